//! The immutable name table of one configuration: every configured string and figure, by row.
//!
//! Lives on: shared read-only (`Arc`) by control and shards. View: one configuration. Bound: the
//! `*_MAX` tables of `limits`, checked by whoever builds it.
//!
//! Strings from a peer are never interned: they are compared with the names here and become rows.
use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::ids::{ModelIndex, NodeIndex, ProviderIndex};

/// One configured node.
#[derive(Clone, Debug)]
pub struct NodeName {
    pub id: String,
    /// Name the node's certificate must carry: `spiffe://<trust domain>/node/<name>`. `[A-41]` `[A-42]`
    pub certificate_name: String,
    /// Encoded `iop.NodeConfigPayload`, sent in RegisterResponse. Secret-free. `[R-332]`
    pub config_payload: Vec<u8>,
}

/// One configured provider: a (node, adapter, target) with its figures.
#[derive(Clone, Debug)]
pub struct ProviderName {
    pub id: String,
    pub node: NodeIndex,
    pub kind: ProviderKind,
    /// Resolved adapter instance name, never empty. `[A-65]`
    pub adapter: String,
    /// The model name the provider itself knows; spliced into the request.
    pub target: String,
    pub category: Category,
    pub enabled: bool,
    /// Configured health, projected unchanged; never written by evidence. `[I2.2]`
    pub health: String,
    /// Requests at once, at least 1.
    pub capacity: u32,
    /// Long requests at once; at most `capacity`. `[D-16]`
    pub long_capacity: u32,
    pub operations: OperationSet,
    /// What the adapter's resolved protocol profile names: only these operations travel in
    /// `ProviderTunnelRequest.operation`, each with the profile's method and path. `[D-09]` `[R-099]`
    pub profile: Vec<ProfileRoute>,
    /// Stall timeout sent with each request, ms; 0 leaves the node its default. `[R-111]` `[A-59]`
    pub stall_timeout_ms: u64,
    /// Hard deadline sent with each request, s; 0 = none. `[A-53]`
    pub timeout_s: u32,
    /// The Edge's wait for the next frame, ms. `[D-29]` `[A-64]`
    pub response_wait_ms: u64,
}

/// An operation of a protocol profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileRoute {
    pub operation: Operation,
    pub method: String,
    pub path: String,
}

/// One configured model: what clients name, and who can serve it.
#[derive(Clone, Debug)]
pub struct ModelName {
    pub name: String,
    pub providers: Vec<ProviderIndex>,
    /// A body of at least this many bytes makes a long request. `[D-16]`
    pub long_threshold_bytes: u32,
    /// Unix seconds shown by `GET /v1/models`.
    pub created: u64,
}

/// Bounds of the queue, configurable. `[D-30]` `[D-29]`
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    pub waiters_max: u32,
    pub waiting_bytes_max: u64,
    pub wait_ms: u64,
}

#[derive(Clone, Debug)]
pub struct Names {
    pub nodes: Vec<NodeName>,
    pub providers: Vec<ProviderName>,
    pub models: Vec<ModelName>,
    pub queue: QueueLimits,
}

impl ProviderName {
    /// How the profile spells `operation`; `None`: it travels by its usual path alone.
    #[must_use]
    pub fn route(&self, operation: Operation) -> Option<&ProfileRoute> {
        self.profile
            .iter()
            .find(|route| route.operation == operation)
    }
}

impl Names {
    #[must_use]
    pub fn node_by_id(&self, id: &[u8]) -> Option<NodeIndex> {
        let row = self
            .nodes
            .iter()
            .position(|node| node.id.as_bytes() == id)?;
        NodeIndex::new(row)
    }

    #[must_use]
    pub fn node_by_certificate(&self, name: &str) -> Option<NodeIndex> {
        let row = self
            .nodes
            .iter()
            .position(|node| node.certificate_name == name)?;
        NodeIndex::new(row)
    }

    #[must_use]
    pub fn model_by_name(&self, name: &[u8]) -> Option<ModelIndex> {
        let row = self
            .models
            .iter()
            .position(|model| model.name.as_bytes() == name)?;
        ModelIndex::new(row)
    }

    #[must_use]
    pub fn node(&self, index: NodeIndex) -> &NodeName {
        &self.nodes[index.row()]
    }

    #[must_use]
    pub fn provider(&self, index: ProviderIndex) -> &ProviderName {
        &self.providers[index.row()]
    }

    #[must_use]
    pub fn model(&self, index: ModelIndex) -> &ModelName {
        &self.models[index.row()]
    }

    /// Some enabled provider of the model could serve the operation, whatever is connected.
    #[must_use]
    pub fn has_candidate(&self, model: ModelIndex, operation: Operation) -> bool {
        self.model(model).providers.iter().any(|&provider| {
            let provider = self.provider(provider);
            provider.enabled && provider.operations.contains(operation)
        })
    }
}
