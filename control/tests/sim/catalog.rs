//! Configurations drawn by the seed: nodes, providers of every shape, models over them; each file has a
//! part of one universe.
use std::sync::Arc;

use iop_control::names::{
    AdapterName, Gone, ModelName, Names, NodeName, NodePayload, ProviderName, QueueLimits, Waits,
};
use iop_proto::catalog::{Operation, OperationSet, ProviderKind};
use iop_proto::ids::{NodeIndex, ProviderIndex};

use crate::dice::Dice;

/// Everything a configuration of this world may have; each file has a part of it.
pub(crate) struct Universe {
    nodes: usize,
    providers: Vec<ProviderName>,
    models: usize,
    queue: QueueLimits,
}

impl Universe {
    pub(crate) fn new(dice: &mut Dice) -> Self {
        let nodes = 1 + dice.below(3);
        let providers = (0..nodes + dice.below(4)).map(|row| {
            ProviderName::new(
                &format!("pv{row}"),
                NodeIndex::new(row % nodes).unwrap(),
                dice.pick(&ProviderKind::ALL).unwrap(),
                &format!("a{row}"),
                &format!("t{row}"),
            )
        });
        let providers = providers.collect();
        Self {
            nodes,
            providers,
            models: 1 + dice.below(3),
            queue: QueueLimits {
                waiters_max: u32::try_from(2 + dice.below(30)).unwrap(),
                waiting_bytes_max: 2_000 + dice.below(60_000) as u64,
                wait_ms: 30_000,
                dispatch_ms: 5_000,
            },
        }
    }

    /// One file. Now and then something is left out; a node has one at least.
    pub(crate) fn file(&self, dice: &mut Dice) -> Names {
        let mut nodes: Vec<usize> = (0..self.nodes).filter(|_| !dice.chance(12)).collect();
        if nodes.is_empty() {
            nodes.push(0);
        }
        let mut providers = Vec::new();
        for provider in &self.providers {
            let at = nodes.iter().position(|&row| row == provider.node.row());
            let Some(at) = at.filter(|_| !dice.chance(12)) else {
                continue;
            };
            providers.push(Arc::new(self.provider(provider, at, dice)));
        }
        let nodes = nodes.iter().enumerate();
        let nodes = nodes
            .map(|(at, row)| node_name(*row, at, &providers))
            .collect();
        let mut models = Vec::new();
        for row in 0..self.models {
            if row > 0 && dice.chance(12) {
                continue;
            }
            let named = (0..dice.below(2 * providers.len() + 1))
                .map(|_| ProviderIndex::new(dice.below(providers.len())).unwrap())
                .collect();
            models.push(ModelName {
                name: format!("m{row}"),
                providers: named,
                long_threshold_bytes: 1_000,
                created: 0,
            });
        }
        Names {
            nodes,
            providers,
            models,
            queue: self.queue,
            waits: Waits {
                refresh_ms: 4_000,
                ..Waits::default()
            },
            gone: Gone::default(),
        }
    }

    fn provider(&self, like: &ProviderName, at: usize, dice: &mut Dice) -> ProviderName {
        let capacity = u32::try_from(1 + dice.below(9)).unwrap();
        let some = OperationSet::default().with(Operation::ChatCompletions);
        ProviderName {
            node: NodeIndex::new(at).unwrap(),
            adapter: if dice.chance(4) {
                "moved".into()
            } else {
                like.adapter.clone()
            },
            enabled: !dice.chance(10),
            capacity,
            long_capacity: u32::try_from(dice.below(capacity as usize + 1)).unwrap(),
            operations: if dice.chance(3) {
                some
            } else {
                OperationSet::ALL
            },
            ..like.clone()
        }
    }
}

/// A node and the configuration that its providers need.
fn node_name(row: usize, at: usize, providers: &[Arc<ProviderName>]) -> NodeName {
    let of_node = providers.iter().filter(|p| p.node.row() == at);
    let adapters: Vec<_> = of_node
        .map(|provider| AdapterName {
            name: provider.adapter.clone(),
            kind: provider.kind,
            profile: Vec::new(),
        })
        .collect();
    NodeName {
        id: format!("n{row}"),
        certificate_name: format!("n{row}"),
        config_payload: Arc::new(NodePayload {
            bytes: format!("{adapters:?}").into_bytes(),
            adapters,
        }),
    }
}
