//! What of a file may take the place of the running configuration, and what waits for a restart.
//!
//! Lives on: the cold thread. View: two configurations. Bound: `CHANGES_MAX` lines of what changed.
use std::collections::BTreeMap;
use std::sync::Arc;

use iop_control::names::{Names, ProviderName, QueueLimits, Succession, TableFull};
use iop_proto::ids::{ModelIndex, NodeIndex, ProviderIndex};
use iop_proto::limits as bounds;

use super::{ConfigError, EdgeConfig, Limits, Problem, Timeouts};

/// Lines of what changed; an operator reads no more at once.
const CHANGES_MAX: usize = 64;

/// What a process has room for since its start.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Nodes that can be connected at once, with some connections to spare.
    pub nodes_max: usize,
}

/// A file's configuration as the running process takes it.
#[derive(Debug)]
pub struct Reload {
    pub config: EdgeConfig,
    /// What is different, a line each, at most `CHANGES_MAX` and one that counts the others.
    pub changed: Vec<String>,
    /// Fields that are different and keep the value of the start.
    pub restart: Vec<&'static str>,
}

impl EdgeConfig {
    /// `fresh` in the place of this configuration: rows keep their meaning, and what only a restart can
    /// change stays as it is.
    ///
    /// # Errors
    /// What the running process has no room for, or must not do with what stays as it is.
    pub fn reload(&self, fresh: Self, room: Room) -> Result<Reload, ConfigError> {
        let mut config = fresh;
        let mut problems = Problems::new(&config);
        let restart = self.keep(&mut config);
        problems.body(&config.limits, config.shards);
        problems.open(&config);
        problems.nodes(&config.names, room);
        match self.names.succeed(&config.names) {
            Ok(Succession { names, models }) => {
                config.names = Arc::new(names);
                let permitted = config.keys.iter_mut().filter_map(|key| key.models.as_mut());
                for model in permitted.flatten() {
                    *model = models[model.row()];
                }
            }
            Err(full) => problems.table(full),
        }
        problems.none()?;
        let changed = changes(self, &config);
        Ok(Reload {
            config,
            changed,
            restart,
        })
    }

    /// Puts back what only a restart can change; the fields that differ.
    fn keep(&self, fresh: &mut Self) -> Vec<&'static str> {
        let mut restart = Restart(Vec::new());
        // Every field by name: a new one does not compile until it is decided here.
        let Self {
            file: _,
            nodes_listen,
            clients_listen,
            clients_tls,
            admin_listen,
            pki,
            trust_domain,
            edge_name,
            insecure_plaintext_nodes,
            credentials,
            insecure_open: _,
            shards,
            cores,
            names: _,
            keys: _,
            limits,
            timeouts,
            tolerate_half_close: _,
            recovery: _,
            log,
        } = fresh;
        restart.keep("listeners.nodes", &self.nodes_listen, nodes_listen);
        restart.keep("listeners.clients", &self.clients_listen, clients_listen);
        restart.keep("listeners.admin", &self.admin_listen, admin_listen);
        // Files may change, whether there is TLS may not.
        if self.clients_tls.is_some() != clients_tls.is_some() {
            restart.keep("listeners.clients_tls", &self.clients_tls, clients_tls);
        }
        let plaintext = &self.insecure_plaintext_nodes;
        let field = "listeners.insecure_plaintext_nodes";
        restart.keep(field, plaintext, insecure_plaintext_nodes);
        restart.keep("credential_plane", &self.credentials, credentials);
        if self.pki.is_some() != pki.is_some() {
            pki.clone_from(&self.pki);
        }
        restart.keep("pki.trust_domain", &self.trust_domain, trust_domain);
        restart.keep("pki.edge_name", &self.edge_name, edge_name);
        restart.keep("shards", &self.shards, shards);
        restart.keep("cores", &self.cores, cores);
        restart.limits(&self.limits, limits);
        let command_ms = &self.timeouts.command_ms;
        restart.keep("timeouts.command_ms", command_ms, &mut timeouts.command_ms);
        restart.keep("log.level", &self.log.level, &mut log.level);
        restart.keep("log.access", &self.log.access, &mut log.access);
        restart.0
    }
}

/// Fields that differ and stay.
struct Restart(Vec<&'static str>);

impl Restart {
    fn keep<T: Clone + PartialEq>(&mut self, field: &'static str, running: &T, wanted: &mut T) {
        if running != wanted {
            self.0.push(field);
            wanted.clone_from(running);
        }
    }

    fn limits(&mut self, running: &Limits, wanted: &mut Limits) {
        let Limits {
            clients_max,
            handshakes_max,
            output_pool_bytes,
            body_pool_bytes,
            body_bytes_max: _,
            receive_buffers,
        } = wanted;
        self.keep("limits.clients_max", &running.clients_max, clients_max);
        let handshakes = &running.handshakes_max;
        self.keep("limits.handshakes_max", handshakes, handshakes_max);
        let output = &running.output_pool_bytes;
        self.keep("limits.output_pool_bytes", output, output_pool_bytes);
        let bodies = &running.body_pool_bytes;
        self.keep("limits.body_pool_bytes", bodies, body_pool_bytes);
        let buffers = &running.receive_buffers;
        self.keep("limits.receive_buffers", buffers, receive_buffers);
    }
}

/// What the running process refuses although the file is right by itself.
struct Problems {
    file: String,
    found: Vec<Problem>,
}

impl Problems {
    fn new(fresh: &EdgeConfig) -> Self {
        Self {
            file: fresh.file.display().to_string(),
            found: Vec::new(),
        }
    }

    fn add(&mut self, field: &str, what: String) {
        self.found.push(Problem {
            file: self.file.clone(),
            line: 0,
            field: field.to_owned(),
            what,
        });
    }

    fn none(self) -> Result<(), ConfigError> {
        if self.found.is_empty() {
            return Ok(());
        }
        Err(ConfigError {
            problems: self.found,
            truncated: false,
        })
    }

    /// The pool is the one of the start.
    fn body(&mut self, limits: &Limits, shards: u32) {
        let block = u64::from(bounds::BLOCK_BYTES);
        let least = u64::from(limits.body_bytes_max).div_ceil(block) * block * u64::from(shards);
        if limits.body_pool_bytes < least {
            let what = format!(
                "the running body pool of {} bytes must hold one body per shard, {least} bytes; \
                 a larger pool needs a restart",
                limits.body_pool_bytes
            );
            self.add("limits.body_bytes_max", what);
        }
    }

    /// The listener is the one of the start, whatever the file says of it. `[D-15]`
    fn open(&mut self, config: &EdgeConfig) {
        let beyond = !config.clients_listen.ip().to_canonical().is_loopback();
        if beyond && config.keys.is_empty() && !config.insecure_open {
            let what = format!(
                "{} serves other hosts until a restart; without any key that needs \
                 listeners.insecure_open: true",
                config.clients_listen
            );
            self.add("keys", what);
        }
    }

    fn nodes(&mut self, names: &Names, room: Room) {
        let (nodes, max) = (names.nodes.len(), room.nodes_max);
        if nodes > max {
            let what =
                format!("{nodes} nodes; this process has room for {max}, more need a restart");
            self.add("nodes", what);
        }
    }

    fn table(&mut self, full: TableFull) {
        self.add(full.what, full.to_string());
    }
}

// ── what changed ──────────────────────────────────────────────────────────────────────────────────

/// Lines, bounded.
#[derive(Default)]
struct Changes {
    lines: Vec<String>,
    more: usize,
}

impl Changes {
    fn add(&mut self, line: String) {
        if self.lines.len() < CHANGES_MAX {
            self.lines.push(line);
        } else {
            self.more += 1;
        }
    }

    /// `what` by the fields of it that differ, if any.
    fn fields(&mut self, what: &str, fields: &[(&str, bool)]) {
        let differing = fields.iter().filter(|(_, differs)| *differs);
        let names: Vec<_> = differing.map(|&(name, _)| name).collect();
        if !names.is_empty() {
            self.add(format!("{what} changed: {}", names.join(", ")));
        }
    }

    fn lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("… and {} more", self.more));
        }
        self.lines
    }
}

/// `after` has every row of `before`.
fn changes(before: &EdgeConfig, after: &EdgeConfig) -> Vec<String> {
    let mut changes = Changes::default();
    nodes(&mut changes, &before.names, &after.names);
    providers(&mut changes, &before.names, &after.names);
    models(&mut changes, &before.names, &after.names);
    keys(&mut changes, before, after);
    let (old, new) = (&before.names.queue, &after.names.queue);
    changes.fields(
        "limits",
        &[
            (
                "body_bytes_max",
                before.limits.body_bytes_max != after.limits.body_bytes_max,
            ),
            ("queue_waiters_max", old.waiters_max != new.waiters_max),
            (
                "queue_bytes_max",
                old.waiting_bytes_max != new.waiting_bytes_max,
            ),
        ],
    );
    timeouts(&mut changes, before, after);
    changes.fields(
        "files",
        &[
            ("pki", before.pki != after.pki),
            (
                "listeners.clients_tls",
                before.clients_tls != after.clients_tls,
            ),
        ],
    );
    let half_close = before.tolerate_half_close != after.tolerate_half_close;
    changes.fields("ingress", &[("tolerate_half_close", half_close)]);
    let recovery = before.recovery != after.recovery;
    changes.fields("requests", &[("recovery", recovery)]);
    changes.lines()
}

/// Says of a row that it came or went; `None`: it is in both.
fn came_or_went(before: bool, after: bool) -> Option<&'static str> {
    match (before, after) {
        (false, true) => Some("added"),
        (true, false) => Some("removed"),
        (true, true) | (false, false) => None,
    }
}

fn nodes(changes: &mut Changes, before: &Names, after: &Names) {
    for (row, new) in after.nodes.iter().enumerate() {
        let Some(index) = NodeIndex::new(row) else {
            continue;
        };
        let old = before.nodes.get(row).filter(|_| before.has_node(index));
        let has = after.has_node(index);
        match (came_or_went(old.is_some(), has), old) {
            (Some(word), _) => changes.add(format!("node {} {word}", new.id)),
            (None, Some(old)) => {
                let fields = [
                    ("name", old.certificate_name != new.certificate_name),
                    ("adapters", old.config_payload != new.config_payload),
                ];
                changes.fields(&format!("node {}", new.id), &fields);
            }
            (None, None) => {}
        }
    }
}

fn providers(changes: &mut Changes, before: &Names, after: &Names) {
    for (row, new) in after.providers.iter().enumerate() {
        let Some(index) = ProviderIndex::new(row) else {
            continue;
        };
        let old = before.providers.get(row);
        let old = old.filter(|_| before.has_provider(index));
        let has = after.has_provider(index);
        match (came_or_went(old.is_some(), has), old) {
            (Some(word), _) => changes.add(format!("provider {} {word}", new.id)),
            (None, Some(old)) => changes.fields(&format!("provider {}", new.id), &fields(old, new)),
            (None, None) => {}
        }
    }
}

fn fields(old: &ProviderName, new: &ProviderName) -> [(&'static str, bool); 11] {
    [
        (
            "adapter",
            (&old.adapter, old.kind) != (&new.adapter, new.kind),
        ),
        ("target", old.target != new.target),
        ("category", old.category != new.category),
        ("enabled", old.enabled != new.enabled),
        ("health", old.health != new.health),
        ("capacity", old.capacity != new.capacity),
        ("long_capacity", old.long_capacity != new.long_capacity),
        ("operations", old.operations != new.operations),
        (
            "stall_timeout_ms",
            old.stall_timeout_ms != new.stall_timeout_ms,
        ),
        ("timeout_sec", old.timeout_s != new.timeout_s),
        (
            "response_wait_ms",
            old.response_wait_ms != new.response_wait_ms,
        ),
    ]
}

fn models(changes: &mut Changes, before: &Names, after: &Names) {
    for (row, new) in after.models.iter().enumerate() {
        let Some(index) = ModelIndex::new(row) else {
            continue;
        };
        let old = before.models.get(row).filter(|_| before.has_model(index));
        let has = after.has_model(index);
        match (came_or_went(old.is_some(), has), old) {
            (Some(word), _) => changes.add(format!("model {} {word}", new.name)),
            (None, Some(old)) => {
                let threshold = old.long_threshold_bytes != new.long_threshold_bytes;
                let fields = [
                    ("providers", old.providers != new.providers),
                    ("long_threshold_bytes", threshold),
                    ("created", old.created != new.created),
                ];
                changes.fields(&format!("model {}", new.name), &fields);
            }
            (None, None) => {}
        }
    }
}

/// Keys are told by their principal alone.
fn keys(changes: &mut Changes, before: &EdgeConfig, after: &EdgeConfig) {
    let by_hash = |config: &EdgeConfig| -> BTreeMap<[u8; 32], usize> {
        let keys = config.keys.iter().enumerate();
        keys.map(|(row, key)| (key.hash, row)).collect()
    };
    let (old, new) = (by_hash(before), by_hash(after));
    for key in &before.keys {
        if !new.contains_key(&key.hash) {
            changes.add(format!("a key of {} removed", key.principal));
        }
    }
    for key in &after.keys {
        match old.get(&key.hash).map(|&row| &before.keys[row]) {
            None => changes.add(format!("a key of {} added", key.principal)),
            Some(old) => {
                let fields = [
                    ("principal", old.principal != key.principal),
                    ("models", old.models != key.models),
                ];
                changes.fields(&format!("a key of {}", key.principal), &fields);
            }
        }
    }
}

fn timeouts(changes: &mut Changes, before: &EdgeConfig, after: &EdgeConfig) {
    let figures = |timeouts: Timeouts, queue: QueueLimits| {
        let Timeouts {
            handshake_ms,
            head_ms,
            body_ms,
            keep_alive_ms,
            write_stall_ms,
            heartbeat_ms,
            dead_ms,
            registration_ms,
            drain_ms,
            command_ms: _, // at the next restart
            refresh_ms,
        } = timeouts;
        [
            ("handshake_ms", handshake_ms),
            ("head_ms", head_ms),
            ("body_ms", body_ms),
            ("keep_alive_ms", keep_alive_ms),
            ("write_stall_ms", write_stall_ms),
            ("heartbeat_ms", heartbeat_ms),
            ("dead_ms", dead_ms),
            ("registration_ms", registration_ms),
            ("drain_ms", drain_ms),
            ("refresh_ms", refresh_ms),
            ("queue_wait_ms", queue.wait_ms),
            ("dispatch_ms", queue.dispatch_ms),
        ]
    };
    let old = figures(before.timeouts, before.names.queue);
    let new = figures(after.timeouts, after.names.queue);
    let differing = old.iter().zip(new).map(|(old, new)| (new.0, *old != new));
    changes.fields("timeouts", &differing.collect::<Vec<_>>());
}
