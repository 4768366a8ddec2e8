//! Nodes, adapters, providers and models of `edge.yaml`, made into the name table.
//!
//! Lives on: the cold thread. View: one file. Bound: `NODES_MAX`, `PROVIDERS_MAX`, `MODELS_MAX`,
//! `PROVIDERS_PER_MODEL_MAX`, `ADAPTERS_PER_NODE_MAX`.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::{HeaderName, Uri};
use iop_control::names::{
    AdapterName, Gone, ModelName, Names, NodeName, NodePayload, ProfileRoute, ProviderName,
    QueueLimits, Waits,
};
use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::domain::{Adapter, AdapterOptions, NodeConfig, OnCancel, Profile, ProfileOperation};
use iop_proto::ids::{NodeIndex, ProviderIndex};
use iop_proto::limits as bounds;
use iop_proto::map;
use iop_proto::spiffe::is_label;

use super::read::file;
use super::tree::{Field, Group, quote};

/// Adapter instances of one node.
const ADAPTERS_PER_NODE_MAX: usize = 256;
/// A node counts its idle provider connections in milliseconds; longer is a mistaken unit.
const POOL_IDLE_MS_MAX: u64 = 60 * 60 * 1000;
/// Bytes of an HTTP path and of a base URL.
const PATH_BYTES_MAX: usize = 1024;
/// Bytes of what stands before a credential in its header.
const AUTH_PREFIX_BYTES_MAX: usize = 64;
/// Operations a protocol profile may name. `[R-097]`
const PROFILE_OPERATIONS: [&str; 5] = [
    "models",
    "chat_completions",
    "messages",
    "count_tokens",
    "responses",
];

/// Keys already used, with the line of their first use.
#[derive(Debug)]
pub(super) struct Seen<K = String>(BTreeMap<K, u64>);

impl<K> Default for Seen<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Seen<K> {
    /// Takes `key`; complains at `field` when an earlier line has it.
    pub(super) fn claim(&mut self, field: &Field<'_>, key: K, what: &str) -> bool {
        if let Some(line) = self.0.get(&key) {
            field.complain(format!("{what} is already on line {line}"));
            return false;
        }
        self.0.insert(key, field.line());
        true
    }
}

/// Names of entries that are refused on their own account: whoever refers to them has done no wrong.
#[derive(Debug, Default)]
pub(super) struct Broken(BTreeSet<String>);

impl Broken {
    /// Remembers an entry by its `name`, as far as it has one.
    fn note(&mut self, name: Option<Field<'_>>) {
        if let Some(text) = name.and_then(|field| field.scalar()) {
            self.0.insert(text.to_owned());
        }
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// A name that also stands in certificates, metric labels and logs: node, provider, adapter.
pub(super) fn label(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    if is_label(text) {
        return Some(text.to_owned());
    }
    let bytes_max = bounds::NAME_BYTES_MAX;
    field.complain(format!(
        "expected 1 to {bytes_max} of A-Z a-z 0-9 . - _, found {}",
        quote(text)
    ));
    None
}

/// A name that others chose: of a model, or what its provider calls it.
fn free_name(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    let bytes_max = bounds::NAME_BYTES_MAX as usize;
    let fault = if text.is_empty() {
        "must not be empty".to_owned()
    } else if text.len() > bytes_max {
        format!(
            "is {} bytes long; at most {bytes_max} are allowed",
            text.len()
        )
    } else if text.trim() != text || text.chars().any(char::is_control) {
        "must not start or end with blanks, nor hold control characters".to_owned()
    } else {
        return Some(text.to_owned());
    };
    field.complain(fault);
    None
}

/// Builds the name table from `nodes` and `models`; also the models that are refused, and each node's
/// recipient key.
pub(super) fn read(
    root: &Group<'_>,
    queue: QueueLimits,
    waits: Waits,
    directory: &Path,
) -> (Names, Broken, Vec<Option<PathBuf>>) {
    let mut builder = Builder::default();
    for item in bounded(root.list("nodes"), bounds::NODES_MAX as usize, "nodes") {
        builder.node(&item, directory);
    }
    let (mut models, mut broken) = (Vec::new(), Broken::default());
    let mut seen = Seen::default();
    for item in bounded(root.list("models"), bounds::MODELS_MAX as usize, "models") {
        match builder.model(&item, &mut seen) {
            Some(model) => models.push(model),
            None => broken.note(item.peek("name")),
        }
    }
    (
        Names {
            nodes: builder.nodes,
            providers: builder.providers,
            models,
            queue,
            waits,
            gone: Gone::default(),
        },
        broken,
        builder.recipients,
    )
}

/// `items`, cut at `max` with a complaint.
fn bounded<'a>(mut items: Vec<Field<'a>>, max: usize, what: &str) -> Vec<Field<'a>> {
    if let Some(first) = items.get(max) {
        first.complain(format!("more than {max} {what}"));
        items.truncate(max);
    }
    items
}

#[derive(Default)]
struct Builder {
    nodes: Vec<NodeName>,
    providers: Vec<Arc<ProviderName>>,
    node_ids: Seen,
    certificate_names: Seen,
    provider_ids: Seen,
    broken_providers: Broken,
    /// By node row.
    recipients: Vec<Option<PathBuf>>,
}

pub(super) const NODE: &[&str] = &[
    "id",
    "name",
    "concurrency",
    "recipient_key",
    "adapters",
    "providers",
];

impl Builder {
    fn node(&mut self, item: &Field<'_>, directory: &Path) {
        let Some(group) = item.group(NODE) else {
            return;
        };
        let id_field = group.require("id");
        let id = id_field.as_ref().and_then(label);
        if let (Some(field), Some(id)) = (&id_field, &id) {
            self.node_ids.claim(field, id.clone(), "the same node id");
        }
        let name_field = group.get("name").or(id_field);
        let name = name_field.as_ref().and_then(label);
        if let (Some(field), Some(name)) = (&name_field, &name) {
            self.certificate_names
                .claim(field, name.clone(), "the same certificate name");
        }
        let Some(index) = NodeIndex::new(self.nodes.len()) else {
            return;
        };
        let (mut adapters, broken) = adapters(&group);
        self.providers(index, &mut adapters, &broken, group.list("providers"));
        let concurrency = group.whole("concurrency", 0..=i32::MAX as u64, "requests", 0);
        let config = NodeConfig {
            adapters,
            concurrency: i32::try_from(concurrency).unwrap_or(i32::MAX),
        };
        let recipient = group.get("recipient_key");
        self.recipients
            .push(recipient.and_then(|field| file(&field, directory)));
        self.nodes.push(NodeName {
            id: id.unwrap_or_default(),
            certificate_name: name.unwrap_or_default(),
            config_payload: Arc::new(payload(&config)),
        });
    }

    /// Reads a node's providers and sums their capacities into its adapters. `[D-54]`
    fn providers(
        &mut self,
        node: NodeIndex,
        adapters: &mut [Adapter],
        broken: &Broken,
        items: Vec<Field<'_>>,
    ) {
        let room = bounds::PROVIDERS_MAX as usize - self.providers.len();
        let mut bindings = Seen::default();
        for item in bounded(items, room, "providers") {
            let read = provider(&item, node, adapters, broken, &mut self.provider_ids);
            let Some((row, provider)) = read else {
                self.broken_providers.note(item.peek("id"));
                continue;
            };
            if provider.enabled {
                let binding = (row, provider.target.clone());
                bindings.claim(
                    &item,
                    binding,
                    "an enabled provider of this adapter and target",
                );
                let capacity = i32::try_from(provider.capacity).unwrap_or(i32::MAX);
                adapters[row].capacity = adapters[row].capacity.saturating_add(capacity);
            }
            self.providers.push(Arc::new(provider));
        }
        for adapter in adapters {
            // 0 would mean "no limit stated". `[A-54]`
            adapter.capacity = adapter.capacity.max(1);
        }
    }

    fn model(&self, item: &Field<'_>, seen: &mut Seen) -> Option<ModelName> {
        let group = item.group(&["name", "providers", "long_threshold_bytes", "created"])?;
        let name_field = group.require("name")?;
        let name = free_name(&name_field);
        if let Some(name) = &name {
            seen.claim(&name_field, name.clone(), "the same model");
        }
        let mut providers = Vec::new();
        let max = bounds::PROVIDERS_PER_MODEL_MAX as usize;
        for item in bounded(group.list("providers"), max, "providers of one model") {
            let Some(provider) = self.reference(&item) else {
                continue;
            };
            if providers.contains(&provider) {
                item.complain("names a provider that stands in this list already");
            }
            providers.push(provider);
        }
        let threshold = u64::from(bounds::LONG_THRESHOLD_BYTES_DEFAULT);
        let threshold = group.bytes("long_threshold_bytes", 1..=u64::from(u32::MAX), threshold);
        Some(ModelName {
            name: name?,
            providers,
            long_threshold_bytes: u32::try_from(threshold).unwrap_or(u32::MAX),
            created: group.whole("created", 0..=u64::from(u32::MAX), "seconds since 1970", 0),
        })
    }

    /// `provider`, or `node/provider`.
    fn reference(&self, item: &Field<'_>) -> Option<ProviderIndex> {
        let text = item.text()?;
        let (node, id) = match text.split_once('/') {
            Some((node, id)) => (Some(node), id),
            None => (None, text),
        };
        let row = self.providers.iter().position(|provider| {
            provider.id == id && node.is_none_or(|node| self.nodes[provider.node.row()].id == node)
        });
        if row.is_none() && !self.broken_providers.contains(id) {
            item.complain(format!("no provider {} in nodes", quote(text)));
        }
        row.and_then(ProviderIndex::new)
    }
}

/// A node's configuration as it goes to it, and what requests depend on.
fn payload(config: &NodeConfig) -> NodePayload {
    let adapters = config.adapters.iter().filter_map(|adapter| {
        Some(AdapterName {
            name: adapter.resolved_name().to_owned(),
            kind: adapter.usable_kind().ok()?,
            profile: profile_routes(adapter.profile.as_ref()),
        })
    });
    NodePayload {
        bytes: map::encode_node_config(config),
        adapters: adapters.collect(),
    }
}

/// Adapters of one node; also those that are refused.
fn adapters(group: &Group<'_>) -> (Vec<Adapter>, Broken) {
    let (mut adapters, mut broken) = (Vec::new(), Broken::default());
    let mut seen = Seen::default();
    let items = group.list("adapters");
    for item in bounded(items, ADAPTERS_PER_NODE_MAX, "adapters of one node") {
        match adapter(&item, &mut seen) {
            Some(adapter) => adapters.push(adapter),
            None => broken.note(item.peek("name").or_else(|| item.peek("type"))),
        }
    }
    (adapters, broken)
}

fn adapter(item: &Field<'_>, seen: &mut Seen) -> Option<Adapter> {
    let group = item.group(&["name", "type", "base_url", "profile", "options"])?;
    let kinds = ProviderKind::ALL.map(|kind| (kind.name(), kind));
    let kind = group.require("type").and_then(|field| field.word(&kinds));
    let base_url = group.require("base_url").and_then(|field| base_url(&field));
    let name_field = group.get("name").filter(|field| field.scalar() != Some(""));
    let name = name_field.as_ref().map(label);
    let profile_field = group.get("profile");
    let profile = profile_field.as_ref().and_then(profile);
    let options = group
        .get("options")
        .and_then(|field| options(&field))
        .unwrap_or_default();
    let kind = kind?;
    if let Some(field) = &profile_field
        && !kind.is_tunnel()
    {
        field.complain(format!("not allowed for {}", kind.name()));
    }
    let name = name.unwrap_or(Some(String::new()))?;
    let mut adapter = Adapter::new(name, kind, 0, base_url.unwrap_or_default());
    adapter.profile = profile;
    adapter.options = options;
    let resolved = adapter.resolved_name().to_owned();
    let what = format!("an adapter named {}", quote(&resolved));
    seen.claim(name_field.as_ref().unwrap_or(item), resolved, &what);
    Some(adapter)
}

/// One provider and the row of its adapter.
fn provider(
    item: &Field<'_>,
    node: NodeIndex,
    adapters: &[Adapter],
    broken: &Broken,
    ids: &mut Seen,
) -> Option<(usize, ProviderName)> {
    let group = item.group(PROVIDER)?;
    let id_field = group.require("id");
    let id = id_field.as_ref().and_then(label);
    if let (Some(field), Some(id)) = (&id_field, &id) {
        ids.claim(field, id.clone(), "the same provider id");
    }
    let row = group
        .require("adapter")
        .and_then(|field| adapter_row(&field, adapters, broken));
    let target = group.require("target").and_then(|field| free_name(&field));
    let figures = figures(&group);
    let categories =
        [Category::Api, Category::LocalInference].map(|category| (category.name(), category));
    let category = group
        .get("category")
        .and_then(|field| field.word(&categories));
    let health = group.get("health").and_then(|field| label(&field));
    let enabled = group.flag("enabled", true);
    let listed = group.get("operations");
    let listed = listed.map(|field| (operations(&field), field));
    let row = row?;
    let adapter = &adapters[row];
    let kind = adapter.usable_kind().ok()?;
    Some((
        row,
        ProviderName {
            id: id.unwrap_or_default(),
            node,
            kind,
            adapter: adapter.resolved_name().to_owned(),
            target: target?,
            category: category.unwrap_or(Category::LocalInference),
            enabled,
            health: health.unwrap_or_else(|| "available".to_owned()),
            capacity: figures.capacity,
            long_capacity: figures.long_capacity,
            operations: served(listed, kind),
            profile: profile_routes(adapter.profile.as_ref()),
            stall_timeout_ms: figures.stall_timeout_ms,
            timeout_s: figures.timeout_s,
            response_wait_ms: figures.response_wait_ms,
        },
    ))
}

pub(super) const PROVIDER: &[&str] = &[
    "id",
    "adapter",
    "target",
    "category",
    "capacity",
    "long_capacity",
    "stall_timeout_ms",
    "response_wait_ms",
    "timeout_sec",
    "operations",
    "enabled",
    "health",
];

/// By resolved name; an empty one is not a name here.
fn adapter_row(field: &Field<'_>, adapters: &[Adapter], broken: &Broken) -> Option<usize> {
    let name = field.text()?;
    let row = adapters
        .iter()
        .position(|adapter| adapter.resolved_name() == name);
    if row.is_none() && !broken.contains(name) {
        let known: Vec<_> = adapters
            .iter()
            .map(Adapter::resolved_name)
            .take(8)
            .collect();
        field.complain(format!(
            "no adapter {} on this node; it has: {}",
            quote(name),
            if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            }
        ));
    }
    row
}

struct Figures {
    capacity: u32,
    long_capacity: u32,
    stall_timeout_ms: u64,
    response_wait_ms: u64,
    timeout_s: u32,
}

fn figures(group: &Group<'_>) -> Figures {
    let capacity_max = u64::from(bounds::RUNS_PER_SHARD_MAX);
    let capacity = group
        .require("capacity")
        .and_then(|field| field.whole(&(1..=capacity_max), "requests at once"));
    let long = group
        .get("long_capacity")
        .and_then(|field| Some((field.whole(&(0..=capacity_max), "requests at once")?, field)));
    if let (Some(capacity), Some((long, field))) = (capacity, &long)
        && *long > capacity
    {
        field.complain(format!("{long} is more than capacity, {capacity}"));
    }
    let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    let capacity = capacity.unwrap_or(1);
    let stall_max = bounds::STALL_TIMEOUT_MS_MAX.unsigned_abs();
    let stall = group
        .get("stall_timeout_ms")
        .and_then(|field| field.whole(&(1..=stall_max), "milliseconds"));
    // The node's evidence wins by default. `[D-29]`
    let wait = stall.unwrap_or(bounds::STALL_TIMEOUT_MS_DEFAULT) + bounds::RESPONSE_WAIT_EXTRA_MS;
    Figures {
        capacity: narrow(capacity),
        long_capacity: narrow(long.map_or(capacity, |(long, _)| long)),
        stall_timeout_ms: stall.unwrap_or(0),
        response_wait_ms: group.whole("response_wait_ms", 1..=stall_max, "milliseconds", wait),
        timeout_s: narrow(group.whole("timeout_sec", 0..=i32::MAX as u64, "seconds", 0)),
    }
}

fn operations(field: &Field<'_>) -> OperationSet {
    let words = Operation::ALL.map(|operation| (operation.name(), operation));
    let items = field.list();
    if field.is_empty_list() {
        field.complain("an empty list serves nothing; leave the field out for the default");
    }
    let named = items.iter().filter_map(|item| item.word(&words));
    named.fold(OperationSet::default(), OperationSet::with)
}

/// What a provider serves: what is listed, within what its path can carry.
fn served(listed: Option<(OperationSet, Field<'_>)>, kind: ProviderKind) -> OperationSet {
    let usual = kind.operations_default();
    let Some((listed, field)) = listed else {
        return usual;
    };
    let beyond = |&operation: &Operation| listed.contains(operation) && !usual.contains(operation);
    if let Some(operation) = Operation::ALL.into_iter().find(beyond) {
        field.complain(format!("{} cannot serve {}", kind.name(), operation.name()));
    }
    listed
}

/// Those of the profile's operations that a tunnel request may name. `[D-09]` `[R-097]` `[R-099]`
fn profile_routes(profile: Option<&Profile>) -> Vec<ProfileRoute> {
    let listed = profile.map_or(&[][..], |profile| &profile.operations);
    let named = |operation: Operation| {
        let listed = listed
            .iter()
            .find(|listed| Some(listed.name.as_str()) == operation.wire_name())?;
        Some(ProfileRoute {
            operation,
            method: listed.method.clone(),
            path: listed.path.clone(),
        })
    };
    Operation::ALL.into_iter().filter_map(named).collect()
}

fn profile(field: &Field<'_>) -> Option<Profile> {
    let group = field.group(&["id", "operations", "auth_header", "auth_prefix"])?;
    let id = group.require("id").and_then(|field| label(&field));
    let listed = group.require("operations");
    let mut seen = Seen::default();
    let operations = listed.map(|field| field.list()).unwrap_or_default();
    let operations = operations.iter().filter_map(|item| {
        let operation = profile_operation(item)?;
        let what = format!("the operation {}", operation.name);
        seen.claim(item, operation.name.clone(), &what)
            .then_some(operation)
    });
    let operations = operations.collect();
    let header = group.get("auth_header").and_then(|field| {
        let name = field.text()?;
        if HeaderName::from_bytes(name.as_bytes()).is_err() {
            field.complain(format!(
                "expected the name of an HTTP header, found {}",
                quote(name)
            ));
        }
        Some(name.to_owned())
    });
    let prefix = group.get("auth_prefix").and_then(|field| {
        let text = field.text()?;
        if text.len() > AUTH_PREFIX_BYTES_MAX || !text.bytes().all(|c| matches!(c, 0x20..=0x7e)) {
            field.complain(format!(
                "expected at most {AUTH_PREFIX_BYTES_MAX} printable characters"
            ));
        }
        Some(text.to_owned())
    });
    Some(Profile {
        id: id?,
        operations,
        auth_header: header.unwrap_or_else(|| "authorization".to_owned()),
        auth_prefix: prefix.unwrap_or_else(|| "Bearer ".to_owned()),
    })
}

/// A bare name stands for the method and path that operation usually has.
fn profile_operation(item: &Field<'_>) -> Option<ProfileOperation> {
    let names = PROFILE_OPERATIONS.map(|name| (name, name));
    let usual = |name: &str| match Operation::from_name(name) {
        Some(operation) => ("POST", operation.path()),
        None => ("GET", "/v1/models"),
    };
    if !item.is_group() {
        let name = item.word(&names)?;
        let (method, path) = usual(name);
        return Some(ProfileOperation {
            name: name.to_owned(),
            method: method.to_owned(),
            path: path.to_owned(),
        });
    }
    let group = item.group(&["name", "method", "path"])?;
    let name = group.require("name").and_then(|field| field.word(&names))?;
    let (method, path) = usual(name);
    let methods = ["GET", "POST", "PUT"].map(|method| (method, method));
    let chosen = group.get("method").and_then(|field| field.word(&methods));
    let given = group.get("path").and_then(|field| http_path(&field));
    Some(ProfileOperation {
        name: name.to_owned(),
        method: chosen.unwrap_or(method).to_owned(),
        path: given.unwrap_or_else(|| path.to_owned()),
    })
}

fn options(field: &Field<'_>) -> Option<AdapterOptions> {
    let group = field.group(&[
        "on_cancel",
        "pool_idle_ms",
        "probe_path",
        "proxy_from_env",
        "operations",
    ])?;
    let on_cancel = group
        .get("on_cancel")
        .and_then(|field| field.word(&[("abort", false), ("drain", true)]));
    let idle = group.whole("pool_idle_ms", 1..=POOL_IDLE_MS_MAX, "milliseconds", 0);
    let probe_path = group.get("probe_path").and_then(|field| http_path(&field));
    let listed = group
        .get("operations")
        .map(|field| operations(&field))
        .unwrap_or_default();
    let named = Operation::ALL
        .into_iter()
        .filter(|&operation| listed.contains(operation));
    Some(AdapterOptions {
        on_cancel: if on_cancel == Some(true) {
            OnCancel::Drain
        } else {
            OnCancel::Abort
        },
        pool_idle_ms: u32::try_from(idle).unwrap_or(u32::MAX),
        probe_path: probe_path.unwrap_or_default(),
        operations: named.map(|operation| operation.name().to_owned()).collect(),
        proxy_from_env: group.flag("proxy_from_env", false),
    })
}

fn http_path(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    let plain = text.bytes().all(|c| matches!(c, 0x21..=0x7e) && c != b'#');
    if text.starts_with('/') && text.len() <= PATH_BYTES_MAX && plain {
        return Some(text.to_owned());
    }
    field.complain(format!(
        "expected a path such as \"/v1/models\", found {}",
        quote(text)
    ));
    None
}

/// `http://host[:port][/path]`. What was found is repeated only when it holds no user name. `[D-20]`
fn base_url(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    let fault = match text.parse::<Uri>() {
        _ if text.contains('@') => {
            Some("must not hold a user name or password: it is sent to the node".to_owned())
        }
        _ if text.len() > PATH_BYTES_MAX || text.contains(['?', '#', ' ']) => {
            Some("must be short and hold neither query nor fragment".to_owned())
        }
        Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) && has_host(&uri) => None,
        Ok(_) | Err(_) => Some(format!(
            "expected a URL such as \"http://127.0.0.1:8000\", found {}",
            quote(text)
        )),
    };
    let clean = fault.is_none();
    if let Some(fault) = fault {
        field.complain(fault);
    }
    clean.then(|| text.to_owned())
}

fn has_host(uri: &Uri) -> bool {
    let Some(authority) = uri.authority() else {
        return false;
    };
    // `host:` and `host:70000` parse as authorities without a port.
    let port_lost = authority.as_str().len() > authority.host().len() && uri.port_u16().is_none();
    !authority.host().is_empty() && !port_lost && uri.port_u16() != Some(0)
}
