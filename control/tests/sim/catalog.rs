//! A configuration drawn by the seed: nodes, providers of every shape, models over them.
use iop_control::names::{ModelName, Names, NodeName, ProviderName, QueueLimits};
use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::ids::{NodeIndex, ProviderIndex};

use crate::dice::Dice;

pub(crate) fn names(dice: &mut Dice) -> Names {
    let nodes = 1 + dice.below(3);
    let providers: Vec<_> = (0..nodes + dice.below(4))
        .map(|row| {
            let capacity = u32::try_from(1 + dice.below(9)).unwrap();
            let long_capacity = u32::try_from(dice.below(capacity as usize + 1)).unwrap();
            let some = OperationSet::default().with(Operation::ChatCompletions);
            ProviderName {
                id: format!("pv{row}"),
                node: NodeIndex::new(row % nodes).unwrap(),
                kind: dice.pick(&ProviderKind::ALL).unwrap(),
                adapter: "a".into(),
                target: format!("t{row}"),
                category: Category::Api,
                enabled: !dice.chance(10),
                health: "healthy".into(),
                capacity,
                long_capacity,
                operations: if dice.chance(3) {
                    some
                } else {
                    OperationSet::ALL
                },
                profile: Vec::new(),
                stall_timeout_ms: 0,
                timeout_s: 0,
                response_wait_ms: 315_000,
            }
        })
        .collect();
    let models = (0..1 + dice.below(3)).map(|row| {
        let named = (0..1 + dice.below(providers.len()))
            .map(|_| ProviderIndex::new(dice.below(providers.len())).unwrap())
            .collect();
        ModelName {
            name: format!("m{row}"),
            providers: named,
            long_threshold_bytes: 1_000,
            created: 0,
        }
    });
    let models = models.collect();
    Names {
        nodes: (0..nodes)
            .map(|row| NodeName {
                id: format!("n{row}"),
                certificate_name: format!("n{row}"),
                config_payload: Vec::new(),
            })
            .collect(),
        providers,
        models,
        queue: QueueLimits {
            waiters_max: u32::try_from(2 + dice.below(30)).unwrap(),
            waiting_bytes_max: 2_000 + dice.below(60_000) as u64,
            wait_ms: 30_000,
        },
    }
}
