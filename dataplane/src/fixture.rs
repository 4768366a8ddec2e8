//! A small configuration for tests: one node, one provider, one model with quotes in its name.
//!
//! Lives on: test threads. Bound: fixed.
use std::sync::Arc;

use iop_control::names::{
    AdapterName, Gone, ModelName, Names, NodeName, NodePayload, ProviderName, QueueLimits, Waits,
};
use iop_proto::catalog::{Category, ProviderKind};
use iop_proto::ids::{NodeIndex, ProviderIndex};

pub(crate) fn names() -> Arc<Names> {
    let row = |row| ProviderIndex::new(row).unwrap();
    Arc::new(Names {
        nodes: vec![NodeName {
            id: "n1".into(),
            certificate_name: "n1".into(),
            config_payload: Arc::new(NodePayload {
                bytes: Vec::new(),
                adapters: vec![AdapterName {
                    name: "vllm".into(),
                    kind: ProviderKind::Vllm,
                    profile: Vec::new(),
                }],
            }),
        }],
        providers: vec![Arc::new(ProviderName {
            category: Category::LocalInference,
            ..ProviderName::new(
                "pv1",
                NodeIndex::new(0).unwrap(),
                ProviderKind::Vllm,
                "vllm",
                "weights",
            )
        })],
        models: vec![ModelName {
            name: "say \"hi\"".into(),
            providers: vec![row(0)],
            long_threshold_bytes: 1,
            created: 0,
        }],
        queue: QueueLimits {
            waiters_max: 1,
            waiting_bytes_max: 1,
            wait_ms: 1,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    })
}
