//! What the Edge looks like from outside: nodes, providers, models at one instant.
//!
//! Lives on: made by control in one O(nodes + providers + models that name them) step, read
//! anywhere. Bound: the tables of `names`. Ask at most once a second.
use std::sync::Arc;

use iop_proto::ids::{ModelIndex, NodeIndex, Now, ProviderIndex};

use super::Control;
use super::resource::{Live, Load, Resource};
use super::tenure::RefreshState;
use crate::names::Names;

/// Effective status of a provider. `[R-282]` `[A-46]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Available,
    Unavailable,
    /// Switched off in the configuration.
    Disabled,
}

impl Status {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Unavailable => "unavailable",
            Self::Disabled => "disabled",
        }
    }
}

/// Effective health of a provider. `[R-283]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// What the configuration says, unchanged.
    Configured,
    /// Its node is not connected.
    Offline,
    /// A stall's evidence says so, and no probe has found it since. `[R-276]`
    Unavailable,
}

/// State of one provider beneath its node. `[R-267]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderSnapshot {
    /// Its catalog identity: a row of the snapshot's `names`. `[R-281]`
    pub provider: ProviderIndex,
    pub status: Status,
    pub health: Health,
    /// Requests at once.
    pub capacity: u32,
    /// Leases held. `[R-269]`
    pub in_flight: u32,
    /// Waiting requests that it is a live candidate of. `[R-271]`
    pub queued: u32,
    pub long_context_capacity: u32,
    pub long_in_flight: u32,
    pub long_queued: u32,
}

impl ProviderSnapshot {
    /// Health as shown. `[R-283]`
    #[must_use]
    pub fn health_text<'a>(&self, names: &'a Names) -> &'a str {
        match self.health {
            Health::Configured => &names.provider(self.provider).health,
            Health::Offline => "offline",
            Health::Unavailable => "unavailable",
        }
    }
}

/// State of one configured node. `[R-280]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSnapshot {
    pub node: NodeIndex,
    /// Dispatch-ready. `[I1.3]`
    pub connected: bool,
    /// Takes nothing new until its generation ends.
    pub draining: bool,
    /// How far its configuration is behind the newest.
    pub refresh: RefreshState,
    pub providers: Vec<ProviderSnapshot>,
}

/// Waiting requests of one model. Each counts once here. `[R-273]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSnapshot {
    pub model: ModelIndex,
    pub queued: u32,
    pub long_queued: u32,
    /// Of their bodies.
    pub queued_bytes: u64,
}

/// Totals of this Edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeSnapshot {
    pub leases_held: u64,
    /// Since start: `leases_taken == leases_returned + leases_held`. `[I3.1]`
    pub leases_taken: u64,
    pub leases_returned: u64,
    /// Run slots in use, those of ended generations included until their shard has reported.
    pub runs: u32,
    pub waiting: usize,
    /// Configurations taken since the start.
    pub reloads: u64,
}

/// One instant of the Edge.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub at: Now,
    /// The configuration that every index here is a row of.
    pub names: Arc<Names>,
    pub nodes: Vec<NodeSnapshot>,
    pub models: Vec<ModelSnapshot>,
    pub edge: EdgeSnapshot,
}

impl Control {
    /// The read model at `now`. Sees whole steps only. `[S-54]`
    #[must_use]
    pub fn snapshot(&self, now: Now) -> Snapshot {
        let nodes = (0..self.names.nodes.len()).filter_map(NodeIndex::new);
        let nodes = nodes.filter(|&node| self.names.has_node(node));
        Snapshot {
            at: now,
            names: Arc::clone(&self.names),
            nodes: nodes.map(|node| self.node_snapshot(node)).collect(),
            models: self
                .queue
                .models()
                .filter(|&model| self.names.has_model(model))
                .map(|model| self.model_snapshot(model))
                .collect(),
            edge: EdgeSnapshot {
                leases_held: self.resources.held(),
                leases_taken: self.resources.taken,
                leases_returned: self.resources.returned,
                runs: self.leases.used(),
                waiting: self.queue.waiting_total(),
                reloads: self.counters.reloads,
            },
        }
    }

    fn node_snapshot(&self, node: NodeIndex) -> NodeSnapshot {
        let providers = self.resources.of_node(node);
        let owner = self.registry.owner(node);
        NodeSnapshot {
            node,
            connected: owner.is_some_and(|owner| owner.is_ready),
            draining: self.tenures[node.row()].is_draining(),
            refresh: self.tenures[node.row()].state(),
            providers: providers
                .iter()
                .filter(|&&provider| self.names.has_provider(provider))
                .map(|&provider| self.provider_snapshot(provider))
                .collect(),
        }
    }

    /// The projection table of the contract: offline or overlaid and enabled, all figures 0;
    /// disabled, figures 0 but for the leases still held under a live node; else the real ones.
    /// `[R-284]` `[R-277]` `[A-46]`
    fn provider_snapshot(&self, provider: ProviderIndex) -> ProviderSnapshot {
        let resource: &Resource = self.resources.get(provider);
        let is_enabled = self.names.provider(provider).enabled;
        let is_live = resource.live != Live::Offline;
        let is_lowered = resource.bindings.record().is_lowered();
        let (status, health) = match (is_enabled, is_live) {
            (false, _) => (Status::Disabled, Health::Configured),
            (true, false) => (Status::Unavailable, Health::Offline),
            (true, true) if is_lowered => (Status::Unavailable, Health::Unavailable),
            (true, true) => (Status::Available, Health::Configured),
        };
        let is_shown = is_enabled && is_live && !is_lowered;
        let load = if is_enabled && is_lowered {
            Load::default()
        } else {
            resource.load
        };
        let (queued, long_queued) = if resource.is_candidate() {
            self.queue.pressure(provider)
        } else {
            (0, 0)
        };
        ProviderSnapshot {
            provider,
            status,
            health,
            capacity: if is_shown { resource.capacity } else { 0 },
            in_flight: load.in_flight,
            queued,
            long_context_capacity: if is_shown { resource.long_capacity } else { 0 },
            long_in_flight: load.long,
            long_queued,
        }
    }

    fn model_snapshot(&self, model: ModelIndex) -> ModelSnapshot {
        let (queued, long_queued) = self.queue.waiting(model);
        ModelSnapshot {
            model,
            queued,
            long_queued,
            queued_bytes: self.queue.waiting_bytes(model),
        }
    }
}
