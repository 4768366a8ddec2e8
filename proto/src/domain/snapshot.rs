//! The status surface: never on the Edge–node socket. `[A-45]`
//!
//! Lives on: see `domain`. Bound: one envelope each.
use crate::catalog::{Category, ProviderKind};

/// One provider as status consumers see it. `[R-266]`
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderSnapshot {
    pub id: String,
    pub kind: ProviderKind,
    pub category: Category,
    /// Resolved adapter instance name.
    pub adapter: String,
    pub targets: Vec<String>,
    pub status: String,
    pub health: String,
    pub capacity: u32,
    pub in_flight: u32,
    pub queued: u32,
    pub long_context_capacity: u32,
    pub long_in_flight: u32,
    pub long_queued: u32,
}

/// One node as status consumers see it; no address, no token. `[R-280]` `[R-351]`
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSnapshot {
    pub node_id: String,
    pub connected: bool,
    pub providers: Vec<ProviderSnapshot>,
}
