//! The sections of `edge.yaml` other than the catalog, and the checks that span sections.
//!
//! Lives on: the cold thread. View: one file. Bound: as the tree it reads.
use core::ops::RangeInclusive;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_control::names::{Names, QueueLimits, Waits};
use iop_proto::ids::ModelIndex;
use iop_proto::limits as bounds;
use iop_proto::spiffe::{TRUST_DOMAIN_BYTES_MAX, is_trust_domain};

use super::catalog::Broken;
use super::host::Host;
use super::tree::{Context, Field, Group, show_bytes};
use super::{
    AccessLog, ApiKey, CertificateFiles, EdgeConfig, Limits, LogConfig, LogLevel, PkiFiles,
    Timeouts, catalog, credentials,
};

/// Where nothing is configured. Only node agents are meant to come from elsewhere.
const NODES_LISTEN: &str = "0.0.0.0:7443";
const CLIENTS_LISTEN: &str = "127.0.0.1:8080";
const ADMIN_LISTEN: &str = "127.0.0.1:9090";

/// Room of a tunnel request's envelope for everything but the body.
const REQUEST_FRAME_BYTES: u64 = 1024 * 1024;
/// A pool larger than this is a mistaken unit.
const POOL_BYTES_MAX: u64 = 1 << 40;

pub(super) const ROOT: &[&str] = &[
    "listeners",
    "shards",
    "cores",
    "pki",
    "credential_plane",
    "credentials",
    "nodes",
    "models",
    "keys",
    "limits",
    "timeouts",
    "ingress",
    "recovery",
    "log",
];

/// Builds the configuration; `None` when nothing can be said beyond the complaints in `context`.
pub(super) fn edge(
    root: &Field<'_>,
    file_name: &str,
    host: &Host,
    context: &Context,
) -> Option<EdgeConfig> {
    let directory = Path::new(file_name)
        .parent()
        .unwrap_or_else(|| Path::new(""))
        .to_owned();
    let root = root.group(ROOT)?;
    let listeners = listeners(&root, &directory);
    let pki = pki(&root, &directory, listeners.insecure_plaintext_nodes);
    let shards = shards(&root);
    let (limits, queue) = limits(&root, shards);
    let (timeouts, queue) = timeouts(&root, queue);
    let waits = Waits {
        drain_ms: timeouts.drain_ms,
        refresh_ms: timeouts.refresh_ms,
    };
    let (names, broken, recipients) = catalog::read(&root, queue, waits, &directory);
    let credentials = credentials::read(&root, &directory, &listeners, &names, recipients);
    let keys = keys(&root, &names, &broken);
    check_open(&root, &listeners);
    let tolerate_half_close = root
        .get("ingress")
        .and_then(|field| field.group(&["tolerate_half_close"]))
        .is_some_and(|group| group.flag("tolerate_half_close", false));
    let config = EdgeConfig {
        file: PathBuf::from(file_name),
        nodes_listen: listeners.nodes?,
        clients_listen: listeners.clients?,
        clients_tls: listeners.clients_tls,
        admin_listen: listeners.admin?,
        pki: pki.files,
        trust_domain: pki.trust_domain,
        edge_name: pki.edge_name,
        insecure_plaintext_nodes: listeners.insecure_plaintext_nodes,
        credentials,
        insecure_open: listeners.insecure_open,
        shards,
        cores: cores(&root, shards, host),
        names: Arc::new(names),
        keys,
        limits,
        timeouts,
        tolerate_half_close,
        recovery: recovery(&root),
        log: log(&root),
    };
    check_memory(&root, &config, host, context);
    Some(config)
}

pub(super) const LISTENERS: &[&str] = &[
    "nodes",
    "clients",
    "clients_tls",
    "admin",
    "insecure_open",
    "insecure_plaintext_nodes",
];

pub(super) struct Listeners<'a> {
    /// The client listener where the file sets it.
    clients_field: Option<Field<'a>>,
    nodes: Option<SocketAddr>,
    clients: Option<SocketAddr>,
    admin: Option<SocketAddr>,
    clients_tls: Option<CertificateFiles>,
    insecure_open: bool,
    pub(super) insecure_plaintext_nodes: bool,
}

fn listeners<'a>(root: &Group<'a>, directory: &Path) -> Listeners<'a> {
    let group = root
        .get("listeners")
        .and_then(|field| field.group(LISTENERS));
    let mut taken = BTreeMap::new();
    let mut address = |name: &str, default: &str| {
        let field = group.as_ref().and_then(|group| group.get(name));
        let address: SocketAddr = match &field {
            Some(field) => field.parsed("an IP address and port, such as \"127.0.0.1:8080\"")?,
            None => default.parse().expect("the defaults are addresses"),
        };
        // Port 0 lets the kernel choose; two of those never meet.
        if let Some(other) = taken.insert(address, name.to_owned())
            && address.port() != 0
            && let Some(field) = &field
        {
            field.complain(format!("the same address as listeners.{other}"));
        }
        Some(address)
    };
    let (nodes, clients) = (
        address("nodes", NODES_LISTEN),
        address("clients", CLIENTS_LISTEN),
    );
    let admin = address("admin", ADMIN_LISTEN);
    let clients_tls = group.as_ref().and_then(|group| group.get("clients_tls"));
    let clients_tls = clients_tls.and_then(|field| {
        let group = field.group(&["certificate", "key"])?;
        let cert = group
            .require("certificate")
            .and_then(|field| file(&field, directory));
        let key = group
            .require("key")
            .and_then(|field| file(&field, directory));
        Some(CertificateFiles {
            cert: cert?,
            key: key?,
        })
    });
    let flag = |name| group.as_ref().is_some_and(|group| group.flag(name, false));
    Listeners {
        clients_field: group.as_ref().and_then(|group| group.get("clients")),
        nodes,
        clients,
        admin,
        clients_tls,
        insecure_open: flag("insecure_open"),
        insecure_plaintext_nodes: flag("insecure_plaintext_nodes"),
    }
}

pub(super) fn file(field: &Field<'_>, directory: &Path) -> Option<PathBuf> {
    let text = field.text()?;
    if text.is_empty() || text.contains('\0') {
        field.complain("expected the path of a file");
        return None;
    }
    Some(directory.join(text))
}

#[derive(Default)]
struct Pki {
    trust_domain: String,
    edge_name: String,
    files: Option<PkiFiles>,
}

fn pki(root: &Group<'_>, directory: &Path, plaintext: bool) -> Pki {
    let section = if plaintext {
        root.get("pki")
    } else {
        root.require("pki")
    };
    let fields = &["trust_domain", "edge_name", "ca", "certificate", "key"];
    let Some(group) = section.and_then(|section| section.group(fields)) else {
        return Pki::default();
    };
    let trust_domain = group
        .require("trust_domain")
        .and_then(|field| trust_domain(&field));
    let edge_name = group
        .require("edge_name")
        .and_then(|field| catalog::label(&field));
    let path = |name| {
        let field = if plaintext {
            group.get(name)
        } else {
            group.require(name)
        };
        field.and_then(|field| file(&field, directory))
    };
    let (ca, cert, key) = (path("ca"), path("certificate"), path("key"));
    let files = (|| {
        Some(PkiFiles {
            ca: ca?,
            cert: cert?,
            key: key?,
        })
    })();
    Pki {
        trust_domain: trust_domain.unwrap_or_default(),
        edge_name: edge_name.unwrap_or_default(),
        files: files.filter(|_| !plaintext),
    }
}

fn trust_domain(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    if is_trust_domain(text) {
        return Some(text.to_owned());
    }
    field.complain(format!(
        "expected a trust domain: 1 to {TRUST_DOMAIN_BYTES_MAX} of a-z 0-9 . - _, such as \
         \"iop.example\""
    ));
    None
}

fn shards(root: &Group<'_>) -> u32 {
    let Some(field) = root.get("shards") else {
        return 1;
    };
    let count = field.whole(&(1..=u64::from(bounds::SHARDS_MAX)), "shards");
    count
        .and_then(|count| u32::try_from(count).ok())
        .unwrap_or(1)
}

/// Threads are pinned in this order: shards, control, front.
fn cores(root: &Group<'_>, shards: u32, host: &Host) -> Vec<u32> {
    let Some(field) = root.get("cores") else {
        return Vec::new();
    };
    let cores: Vec<u32> = field
        .list()
        .iter()
        .filter_map(|item| {
            let core = u32::try_from(item.whole(&(0..=u64::from(u16::MAX)), "")?).ok()?;
            if !host.cores.is_empty() && !host.cores.contains(&core) {
                item.complain(format!("core {core} is not available to this process"));
            }
            Some(core)
        })
        .collect();
    let wanted = shards as usize + 2;
    if !cores.is_empty() && cores.len() != wanted {
        field.complain(format!(
            "expected {wanted} cores (each shard, control, front) or none, found {}",
            cores.len()
        ));
    }
    cores
}

pub(super) const LIMITS: &[&str] = &[
    "clients_max",
    "handshakes_max",
    "output_pool_bytes",
    "body_pool_bytes",
    "body_bytes_max",
    "queue_waiters_max",
    "queue_bytes_max",
    "receive_buffers",
];

fn limits(root: &Group<'_>, shards: u32) -> (Limits, QueueLimits) {
    let group = root.get("limits").and_then(|field| field.group(LIMITS));
    let group = group.as_ref();
    let count = |name, high: u32, default: u32| {
        let range = 1..=u64::from(high);
        let value = group.map(|group| group.whole(name, range, "", u64::from(default)));
        value
            .and_then(|value| u32::try_from(value).ok())
            .unwrap_or(default)
    };
    let size =
        |name, range, default| group.map_or(default, |group| group.bytes(name, range, default));
    let body_max = u64::from(bounds::ENVELOPE_TO_NODE_BYTES_MAX) - REQUEST_FRAME_BYTES;
    let body = size(
        "body_bytes_max",
        1024..=body_max,
        bounds::BODY_BYTES_MAX_DEFAULT.into(),
    );
    let output = u64::from(bounds::PENDING_SOFT_BYTES)..=POOL_BYTES_MAX;
    let bodies = u64::from(bounds::BODY_STEP_BYTES)..=POOL_BYTES_MAX;
    let limits = Limits {
        clients_max: count(
            "clients_max",
            bounds::CLIENTS_MAX_CEILING,
            bounds::CLIENTS_MAX_DEFAULT,
        ),
        handshakes_max: count(
            "handshakes_max",
            bounds::HANDSHAKES_CEILING,
            bounds::HANDSHAKES_DEFAULT,
        ),
        output_pool_bytes: size(
            "output_pool_bytes",
            output,
            bounds::OUTPUT_POOL_BYTES_DEFAULT,
        ),
        body_pool_bytes: size("body_pool_bytes", bodies, bounds::BODY_POOL_BYTES_DEFAULT),
        body_bytes_max: u32::try_from(body).expect("an envelope's size is a u32"),
        receive_buffers: count(
            "receive_buffers",
            bounds::RECEIVE_BUFFERS,
            bounds::RECEIVE_BUFFERS,
        ),
    };
    if !limits.receive_buffers.is_power_of_two()
        && let Some(field) = group.and_then(|group| group.get("receive_buffers"))
    {
        field.complain("the kernel takes a power of two");
    }
    check_body_pool(root, group, &limits, shards);
    let waiting = bounds::WAITING_BYTES_PER_MODEL_DEFAULT;
    let queue = QueueLimits {
        waiters_max: count(
            "queue_waiters_max",
            bounds::CLIENTS_MAX_CEILING,
            bounds::WAITERS_PER_MODEL_DEFAULT,
        ),
        waiting_bytes_max: size("queue_bytes_max", 1024..=POOL_BYTES_MAX, waiting),
        wait_ms: bounds::QUEUE_WAIT_MS_DEFAULT,
        dispatch_ms: bounds::DISPATCH_MS_DEFAULT,
    };
    (limits, queue)
}

/// A body that no shard's share of the pool can hold would be refused with 503 for ever, not with 413.
fn check_body_pool(root: &Group<'_>, group: Option<&Group<'_>>, limits: &Limits, shards: u32) {
    let block = u64::from(bounds::BLOCK_BYTES);
    let least = u64::from(limits.body_bytes_max).div_ceil(block) * block * u64::from(shards);
    if limits.body_pool_bytes >= least {
        return;
    }
    let set = |name| group.and_then(|group| group.get(name));
    let field = set("body_pool_bytes").or_else(|| set("body_bytes_max"));
    let field = field.or_else(|| root.get("shards"));
    field.as_ref().unwrap_or_else(|| root.place()).complain(format!(
        "body_pool_bytes ({}) must hold one body of body_bytes_max ({}) per shard: {least} bytes",
        show_bytes(limits.body_pool_bytes),
        show_bytes(u64::from(limits.body_bytes_max)),
    ));
}

pub(super) const TIMEOUTS: &[&str] = &[
    "handshake_ms",
    "head_ms",
    "body_ms",
    "keep_alive_ms",
    "queue_wait_ms",
    "dispatch_ms",
    "write_stall_ms",
    "heartbeat_ms",
    "dead_ms",
    "registration_ms",
    "drain_ms",
    "command_ms",
    "refresh_ms",
];

/// Waits; those of the queue go with its other limits. `[D-29]`
fn timeouts(root: &Group<'_>, limits: QueueLimits) -> (Timeouts, QueueLimits) {
    let group = root.get("timeouts").and_then(|field| field.group(TIMEOUTS));
    let wait = |name: &str, default| {
        let range: RangeInclusive<u64> = 1..=bounds::WAIT_MS_MAX;
        group.as_ref().map_or(default, |group| {
            group.whole(name, range, "milliseconds", default)
        })
    };
    let timeouts = Timeouts {
        handshake_ms: wait("handshake_ms", bounds::TLS_HANDSHAKE_MS_DEFAULT),
        head_ms: wait("head_ms", bounds::HEAD_MS_DEFAULT),
        body_ms: wait("body_ms", bounds::BODY_STALL_MS_DEFAULT),
        keep_alive_ms: wait("keep_alive_ms", bounds::KEEP_ALIVE_MS_DEFAULT),
        write_stall_ms: wait("write_stall_ms", bounds::WRITE_STALL_MS_DEFAULT),
        heartbeat_ms: wait("heartbeat_ms", bounds::HEARTBEAT_MS_DEFAULT),
        dead_ms: wait("dead_ms", bounds::DEAD_MS_DEFAULT),
        registration_ms: wait("registration_ms", bounds::REGISTRATION_MS_DEFAULT),
        drain_ms: wait("drain_ms", bounds::DRAIN_MS_DEFAULT),
        command_ms: wait("command_ms", bounds::COMMAND_MS_DEFAULT),
        refresh_ms: wait("refresh_ms", bounds::REFRESH_MS_DEFAULT),
    };
    if timeouts.dead_ms < 2 * timeouts.heartbeat_ms
        && let Some(group) = &group
        && let Some(field) = group.get("dead_ms").or_else(|| group.get("heartbeat_ms"))
    {
        field.complain(format!(
            "dead_ms ({}) must be at least twice heartbeat_ms ({})",
            timeouts.dead_ms, timeouts.heartbeat_ms
        ));
    }
    let queue = QueueLimits {
        wait_ms: wait("queue_wait_ms", bounds::QUEUE_WAIT_MS_DEFAULT),
        dispatch_ms: wait("dispatch_ms", bounds::DISPATCH_MS_DEFAULT),
        ..limits
    };
    (timeouts, queue)
}

fn keys(root: &Group<'_>, names: &Names, broken: &Broken) -> Vec<ApiKey> {
    let items = root.list("keys");
    if let Some(first) = items.get(bounds::KEYS_MAX as usize) {
        first.complain(format!("more than {} keys", bounds::KEYS_MAX));
        return Vec::new();
    }
    let mut seen = catalog::Seen::default();
    items
        .iter()
        .filter_map(|item| {
            let group = item.group(&["principal", "sha256", "models"])?;
            let principal = group
                .require("principal")
                .and_then(|field| catalog::label(&field));
            let hash = group
                .require("sha256")
                .and_then(|field| key_hash(&field, &mut seen));
            let models = group
                .get("models")
                .and_then(|field| key_models(&field, names, broken));
            Some(ApiKey {
                principal: principal?,
                hash: hash?,
                models,
            })
        })
        .collect()
}

/// The value is not repeated in the complaint: it may be the key itself, put in the wrong place.
fn key_hash(field: &Field<'_>, seen: &mut catalog::Seen<[u8; 32]>) -> Option<[u8; 32]> {
    let hash = field.text().and_then(parse_hash);
    match hash {
        Some(hash) if seen.claim(field, hash, "the same key") => Some(hash),
        Some(_) => None,
        None => {
            field.complain("expected the SHA-256 of the key, 64 hex digits (see `iop key new`)");
            None
        }
    }
}

fn parse_hash(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    let mut hash = [0; 32];
    if digits.len() != 2 * hash.len() {
        return None;
    }
    let nibble = |digit: u8| {
        char::from(digit)
            .to_digit(16)
            .and_then(|n| u8::try_from(n).ok())
    };
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(hash)
}

fn key_models(field: &Field<'_>, names: &Names, broken: &Broken) -> Option<Vec<ModelIndex>> {
    let items = field.list();
    if field.is_empty_list() {
        field.complain("an empty list permits no model; leave the field out to permit all");
    }
    let models = items.iter().filter_map(|item| {
        let name = item.text()?;
        let model = names.model_by_name(name.as_bytes());
        if model.is_none() && !broken.contains(name) {
            item.complain(format!("no model {} in models", super::tree::quote(name)));
        }
        model
    });
    Some(models.collect())
}

/// Without keys the client listener serves this host alone, unless told otherwise. `[D-15]`
fn check_open(root: &Group<'_>, listeners: &Listeners<'_>) {
    let beyond = |address: SocketAddr| !address.ip().to_canonical().is_loopback();
    let keyed = listeners.insecure_open || !root.list("keys").is_empty();
    if let Some(field) = &listeners.clients_field
        && listeners.clients.is_some_and(beyond)
        && !keyed
    {
        field.complain(
            "serves other hosts without any key; add keys, listen on 127.0.0.1, or set \
             listeners.insecure_open: true",
        );
    }
}

/// What is reserved at start must be there. `[architecture: memory]`
fn check_memory(root: &Group<'_>, config: &EdgeConfig, host: &Host, context: &Context) {
    let total = config.reserved().iter().map(|line| line.bytes).sum::<u64>();
    let Some(memory) = host.memory_bytes.filter(|&memory| total > memory) else {
        return;
    };
    let what = format!(
        "{} MiB would be reserved at start, more than the {} MiB this host has",
        total >> 20,
        memory >> 20
    );
    match root.get("limits") {
        Some(field) => field.complain(what),
        None => context.complain(0, "limits", what),
    }
}

/// On unless switched off. `[D-18]`
fn recovery(root: &Group<'_>) -> bool {
    let words = [("on", true), ("off", false)];
    let field = root.get("recovery");
    field.and_then(|field| field.word(&words)).unwrap_or(true)
}

fn log(root: &Group<'_>) -> LogConfig {
    let mut log = LogConfig {
        level: LogLevel::Info,
        access: AccessLog::Off,
    };
    let Some(group) = root
        .get("log")
        .and_then(|field| field.group(&["level", "access"]))
    else {
        return log;
    };
    let levels = LogLevel::ALL.map(|level| (level.name(), level));
    if let Some(level) = group.get("level").and_then(|field| field.word(&levels)) {
        log.level = level;
    }
    if let Some(access) = group.get("access").and_then(|field| access(&field)) {
        log.access = access;
    }
    log
}

fn access(field: &Field<'_>) -> Option<AccessLog> {
    let found = match field.text()? {
        "off" => Some(AccessLog::Off),
        "all" => Some(AccessLog::All),
        text => text
            .strip_prefix("1/")
            .and_then(|n| n.parse().ok())
            .filter(|&n| n > 0)
            .map(AccessLog::Sampled),
    };
    if found.is_none() {
        field.complain("expected off, all, or 1/N for one request in N");
    }
    found
}
