//! The immutable name table of one configuration: every configured string and figure, by row.
//!
//! Lives on: shared read-only (`Arc`) by control and shards. View: one configuration. Bound: the
//! `*_MAX` tables of `limits`, checked by whoever builds it.
//!
//! Strings from a peer are never interned: they are compared with the names here and become rows. A
//! row means the same for as long as the process lives: the table of a reloaded configuration keeps
//! every row of the one before, marks what is gone and appends what is new.
use core::fmt;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::ids::{ModelIndex, NodeIndex, ProviderIndex};
use iop_proto::limits::{
    DRAIN_MS_DEFAULT, MODELS_MAX, NODES_MAX, PROVIDERS_MAX, REFRESH_MS_DEFAULT,
    RESPONSE_WAIT_EXTRA_MS, STALL_TIMEOUT_MS_DEFAULT,
};

/// One configured node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName {
    pub id: String,
    /// Name the node's certificate must carry: `spiffe://<trust domain>/node/<name>`. `[A-41]` `[A-42]`
    pub certificate_name: String,
    /// What the node is told to be, in RegisterResponse and in each refresh.
    pub config_payload: Arc<NodePayload>,
}

/// The configuration of one node as it goes to it. Compared as a whole to know whether the node has
/// the newest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePayload {
    /// Encoded `iop.NodeConfigPayload`. Secret-free. `[R-332]`
    pub bytes: Vec<u8>,
    /// What of its adapter instances a request depends on.
    pub adapters: Vec<AdapterName>,
}

/// One adapter instance of a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterName {
    /// Resolved, never empty. `[A-65]`
    pub name: String,
    pub kind: ProviderKind,
    pub profile: Vec<ProfileRoute>,
}

impl NodePayload {
    /// A node that holds this payload has what the provider's requests ask it for. `[states §2]`
    #[must_use]
    pub fn serves(&self, provider: &ProviderName) -> bool {
        self.adapters.iter().any(|adapter| {
            adapter.name == provider.adapter
                && adapter.kind == provider.kind
                && adapter.profile == provider.profile
        })
    }
}

/// One configured provider: a (node, adapter, target) with its figures.
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl ProviderName {
    /// An enabled provider of `node` for one request at a time, with nothing else said of it.
    #[must_use]
    pub fn new(id: &str, node: NodeIndex, kind: ProviderKind, adapter: &str, target: &str) -> Self {
        Self {
            id: id.to_owned(),
            node,
            kind,
            adapter: adapter.to_owned(),
            target: target.to_owned(),
            category: Category::Api,
            enabled: true,
            health: "healthy".to_owned(),
            capacity: 1,
            long_capacity: 1,
            operations: OperationSet::ALL,
            profile: Vec::new(),
            stall_timeout_ms: 0,
            timeout_s: 0,
            response_wait_ms: STALL_TIMEOUT_MS_DEFAULT + RESPONSE_WAIT_EXTRA_MS,
        }
    }
}

/// An operation of a protocol profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileRoute {
    pub operation: Operation,
    pub method: String,
    pub path: String,
}

/// One configured model: what clients name, and who can serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// A lease taken whose request has not begun by then is returned. `[states §3: Selected]`
    pub dispatch_ms: u64,
}

/// Waits of control beside the queue's, ms. `[D-29]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    /// A drained node's streams may finish this long. `[D-05]` `[D-07]`
    pub drain_ms: u64,
    /// A node's answer to a refresh.
    pub refresh_ms: u64,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            drain_ms: DRAIN_MS_DEFAULT,
            refresh_ms: REFRESH_MS_DEFAULT,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Names {
    pub nodes: Vec<NodeName>,
    /// Each shared with the tables before and after it, and with the runs granted under it.
    pub providers: Vec<Arc<ProviderName>>,
    pub models: Vec<ModelName>,
    pub queue: QueueLimits,
    pub waits: Waits,
    pub gone: Gone,
}

/// Rows whose names an earlier configuration had and this one has not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gone {
    pub nodes: BTreeSet<NodeIndex>,
    pub providers: BTreeSet<ProviderIndex>,
    pub models: BTreeSet<ModelIndex>,
}

/// A table in the place of another, and where the models of its file stand in it.
#[derive(Debug)]
pub struct Succession {
    pub names: Names,
    /// By row of the file's own table.
    pub models: Vec<ModelIndex>,
}

/// A row for every name that ever was does not fit. A restart forgets those that are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull {
    /// `nodes`, `providers` or `models`.
    pub what: &'static str,
    /// Rows needed, those of gone names included.
    pub rows: usize,
    pub rows_max: usize,
}

impl fmt::Display for TableFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} since the start, more than the {} a process keeps; a restart forgets removed ones",
            self.rows, self.what, self.rows_max
        )
    }
}

impl core::error::Error for TableFull {}

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
        NodeIndex::new(row).filter(|&node| self.has_node(node))
    }

    #[must_use]
    pub fn node_by_certificate(&self, name: &str) -> Option<NodeIndex> {
        // A name may have passed from a node that is gone to one that is not.
        let named = |&(row, node): &(usize, &NodeName)| {
            node.certificate_name == name
                && NodeIndex::new(row).is_some_and(|node| self.has_node(node))
        };
        let (row, _) = self.nodes.iter().enumerate().find(named)?;
        NodeIndex::new(row)
    }

    #[must_use]
    pub fn model_by_name(&self, name: &[u8]) -> Option<ModelIndex> {
        let row = self
            .models
            .iter()
            .position(|model| model.name.as_bytes() == name)?;
        ModelIndex::new(row).filter(|&model| self.has_model(model))
    }

    /// The configuration has the node, not only one before it.
    #[must_use]
    pub fn has_node(&self, node: NodeIndex) -> bool {
        !self.gone.nodes.contains(&node)
    }

    #[must_use]
    pub fn has_provider(&self, provider: ProviderIndex) -> bool {
        !self.gone.providers.contains(&provider)
    }

    #[must_use]
    pub fn has_model(&self, model: ModelIndex) -> bool {
        !self.gone.models.contains(&model)
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

    /// Different enabled providers of the model that could serve the operation.
    #[must_use]
    pub fn candidates(&self, model: ModelIndex, operation: Operation) -> usize {
        let named = &self.model(model).providers;
        let serves = |&(row, provider): &(usize, &ProviderIndex)| {
            let name = self.provider(*provider);
            let is_first = !named[..row].contains(provider);
            is_first && name.enabled && name.operations.contains(operation)
        };
        named.iter().enumerate().filter(serves).count()
    }

    /// `fresh`, the table of one file, in the place of this one: what both have keeps its row, what
    /// only `fresh` has is appended, what it lacks is gone. Nodes are the same by their id, providers
    /// by node and id, models by name. `[D-39]`
    ///
    /// # Errors
    /// When a table would have more rows than its limit.
    pub fn succeed(&self, fresh: &Self) -> Result<Succession, TableFull> {
        let mut names = Self {
            nodes: self.nodes.clone(),
            providers: self.providers.clone(),
            models: self.models.clone(),
            queue: fresh.queue,
            waits: fresh.waits,
            gone: Gone::default(),
        };
        let nodes = names.succeed_nodes(fresh)?;
        let providers = names.succeed_providers(fresh, &nodes)?;
        let models = names.succeed_models(fresh, &providers)?;
        names.gone = Gone {
            nodes: missing(names.nodes.len(), &nodes, NodeIndex::new),
            providers: missing(names.providers.len(), &providers, ProviderIndex::new),
            models: missing(names.models.len(), &models, ModelIndex::new),
        };
        for &provider in &names.gone.providers {
            let row = &mut names.providers[provider.row()];
            if row.enabled {
                Arc::make_mut(row).enabled = false;
            }
        }
        for &model in &names.gone.models {
            names.models[model.row()].providers.clear();
        }
        Ok(Succession { names, models })
    }

    fn succeed_nodes(&mut self, fresh: &Self) -> Result<Vec<NodeIndex>, TableFull> {
        let known = self.nodes.iter().enumerate();
        let known: BTreeMap<String, usize> =
            known.map(|(row, node)| (node.id.clone(), row)).collect();
        let mut rows = Vec::with_capacity(fresh.nodes.len());
        for node in &fresh.nodes {
            let row = known.get(&node.id).copied().unwrap_or(self.nodes.len());
            match self.nodes.get_mut(row) {
                None => self.nodes.push(node.clone()),
                // Unchanged, the payload stays the one that nodes may hold already.
                Some(old) if old == node => {}
                Some(old) => *old = node.clone(),
            }
            rows.push(row);
        }
        indices("nodes", &rows, self.nodes.len(), NODES_MAX, NodeIndex::new)
    }

    fn succeed_providers(
        &mut self,
        fresh: &Self,
        nodes: &[NodeIndex],
    ) -> Result<Vec<ProviderIndex>, TableFull> {
        let known = self.providers.iter().enumerate();
        let known: BTreeMap<(NodeIndex, String), usize> = known
            .map(|(row, provider)| ((provider.node, provider.id.clone()), row))
            .collect();
        let mut rows = Vec::with_capacity(fresh.providers.len());
        for provider in &fresh.providers {
            let mut provider = ProviderName::clone(provider);
            provider.node = nodes[provider.node.row()];
            let key = (provider.node, provider.id.clone());
            let row = known.get(&key).copied().unwrap_or(self.providers.len());
            match self.providers.get_mut(row) {
                None => self.providers.push(Arc::new(provider)),
                Some(old) if **old == provider => {}
                Some(old) => *old = Arc::new(provider),
            }
            rows.push(row);
        }
        let count = self.providers.len();
        indices("providers", &rows, count, PROVIDERS_MAX, ProviderIndex::new)
    }

    fn succeed_models(
        &mut self,
        fresh: &Self,
        providers: &[ProviderIndex],
    ) -> Result<Vec<ModelIndex>, TableFull> {
        let known = self.models.iter().enumerate();
        let known: BTreeMap<String, usize> = known
            .map(|(row, model)| (model.name.clone(), row))
            .collect();
        let mut rows = Vec::with_capacity(fresh.models.len());
        for model in &fresh.models {
            let mut model = model.clone();
            for provider in &mut model.providers {
                *provider = providers[provider.row()];
            }
            let row = known.get(&model.name).copied();
            let row = row.unwrap_or(self.models.len());
            match self.models.get_mut(row) {
                None => self.models.push(model),
                Some(old) => *old = model,
            }
            rows.push(row);
        }
        let count = self.models.len();
        indices("models", &rows, count, MODELS_MAX, ModelIndex::new)
    }
}

/// `rows` as indices of a table of `count` rows.
fn indices<I>(
    what: &'static str,
    rows: &[usize],
    count: usize,
    rows_max: u32,
    index: impl Fn(usize) -> Option<I>,
) -> Result<Vec<I>, TableFull> {
    let rows_max = rows_max as usize;
    let full = TableFull {
        what,
        rows: count,
        rows_max,
    };
    if count > rows_max {
        return Err(full);
    }
    rows.iter().map(|&row| index(row).ok_or(full)).collect()
}

/// The rows of a table that are not in `present`.
fn missing<I: Ord + Copy>(
    count: usize,
    present: &[I],
    index: impl Fn(usize) -> Option<I>,
) -> BTreeSet<I> {
    let present: BTreeSet<I> = present.iter().copied().collect();
    let all = (0..count).filter_map(index);
    all.filter(|row| !present.contains(row)).collect()
}

#[cfg(test)]
mod tests;
