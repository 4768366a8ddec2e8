//! The status surface's part of the mapping: from domain to generated types; nothing reads them back.
//!
//! Lives on: see `map`. Bound: one node.
use super::wire;
use crate::domain::{NodeSnapshot, ProviderSnapshot};

impl From<&NodeSnapshot> for wire::NodeSnapshot {
    fn from(m: &NodeSnapshot) -> Self {
        Self {
            node_id: m.node_id.clone(),
            connected: m.connected,
            providers: m.providers.iter().map(Into::into).collect(),
        }
    }
}

impl From<&ProviderSnapshot> for wire::ProviderSnapshot {
    fn from(m: &ProviderSnapshot) -> Self {
        // Every figure is bounded by a table far below 2^31.
        let figure = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        Self {
            id: m.id.clone(),
            r#type: m.kind.name().to_owned(),
            category: m.category.name().to_owned(),
            adapter: m.adapter.clone(),
            targets: m.targets.clone(),
            status: m.status.clone(),
            health: m.health.clone(),
            capacity: figure(m.capacity),
            in_flight: figure(m.in_flight),
            queued: figure(m.queued),
            long_context_capacity: figure(m.long_context_capacity),
            long_in_flight: figure(m.long_in_flight),
            long_queued: figure(m.long_queued),
        }
    }
}
