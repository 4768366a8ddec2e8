//! What an Edge is told to be: the validated form of `edge.yaml`, and the only way to get one.
//!
//! Lives on: the cold thread and, read-only, every other. View: one configuration. Bound: files of
//! at most `FILE_BYTES_MAX`, tables of the `*_MAX` in `limits`, `PROBLEMS_MAX` complaints.
//!
//! ```text
//! text --tree--> nodes with a line each --read, catalog--> EdgeConfig, or every problem found
//! ```
mod catalog;
mod credentials;
mod host;
mod read;
mod reload;
mod tree;

use core::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_control::names::Names;
use iop_proto::ids::ModelIndex;
use iop_proto::limits as bounds;

pub use host::Host;
pub use reload::{Reload, Room};
use tree::{Context, FILE_BYTES_MAX, Field, PROBLEMS_MAX};

use crate::credential::KeySource;
use crate::shard::ShardConfig;

/// A whole, checked configuration. Values are in the units their names say; no field needs a second
/// look by whoever uses it. `[D-36]`
#[derive(Debug)]
pub struct EdgeConfig {
    /// Where it was read from, to be read again.
    pub file: PathBuf,
    /// Where node agents dial in.
    pub nodes_listen: SocketAddr,
    /// Where HTTP clients connect.
    pub clients_listen: SocketAddr,
    /// HTTPS for clients; `None` is plaintext.
    pub clients_tls: Option<CertificateFiles>,
    /// Metrics, health and status, without authentication.
    pub admin_listen: SocketAddr,
    /// The Edge's identity towards nodes; `None` only when `insecure_plaintext_nodes`.
    pub pki: Option<PkiFiles>,
    /// The `<trust domain>` of every SPIFFE id this Edge accepts or bears. `[A-41]`
    pub trust_domain: String,
    /// The Edge's own certificate says `spiffe://<trust domain>/edge/<edge_name>`.
    pub edge_name: String,
    /// Nodes connect without TLS and say who they are unproved. `[A-40]` `[D-37]`
    pub insecure_plaintext_nodes: bool,
    /// Provider credentials managed by this Edge; `None`: the plane is off. `[D-37]`
    pub credentials: Option<CredentialConfig>,
    /// Clients beyond loopback are served without a key. `[D-15]`
    pub insecure_open: bool,
    /// Shard threads, at least 1.
    pub shards: u32,
    /// Cores to pin threads to: each shard, control, front. Empty: the scheduler decides.
    pub cores: Vec<u32>,
    /// Nodes, providers, models and queue bounds, by row.
    pub names: Arc<Names>,
    /// Empty: every client is served. `[D-15]`
    pub keys: Vec<ApiKey>,
    pub limits: Limits,
    pub timeouts: Timeouts,
    /// A client's FIN is not a departure. `[D-27]`
    pub tolerate_half_close: bool,
    /// A stalled request of which nothing was answered is asked of another provider. `[D-18]`
    pub recovery: bool,
    pub log: LogConfig,
}

/// A certificate chain and its key, PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// What mutual TLS needs, PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PkiFiles {
    /// Roots that sign node certificates; at least one.
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// The managed credential plane: files, read when the Edge starts. `[D-37]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialConfig {
    /// The encrypted store; read again when it changes.
    pub store: PathBuf,
    pub store_key: KeySource,
    /// The key that signs leases.
    pub issuer_key: PathBuf,
    /// From a lease's issue to its expiry; at most `LEASE_MS_MAX`. `[R-211]`
    pub lease_ms: u64,
    /// Public keys that leases are sealed to, by node row; there for every node with a tunnel
    /// provider.
    pub recipients: Vec<Option<PathBuf>>,
}

/// One API key, known by its hash alone. `[D-15]`
#[derive(Clone)]
pub struct ApiKey {
    /// Who the key belongs to: for logs and metrics. Several keys may name one principal.
    pub principal: String,
    /// SHA-256 of the key's bytes as a client presents them.
    pub hash: [u8; 32],
    /// Models this key may name; `None`: all.
    pub models: Option<Vec<ModelIndex>>,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey")
            .field("principal", &self.principal)
            .finish_non_exhaustive()
    }
}

/// Sizes of what is reserved at start. Pools are for the whole Edge and divided by shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Client connections at once, all shards together. `[D-33]`
    pub clients_max: u32,
    /// TLS handshakes in progress at once. `[D-04]`
    pub handshakes_max: u32,
    /// Pending output to clients, bytes. `[D-06]`
    pub output_pool_bytes: u64,
    /// Request bodies, bytes. `[D-45]`
    pub body_pool_bytes: u64,
    /// One request body, bytes; longer is 413. `[D-02]`
    pub body_bytes_max: u32,
    /// Receive buffers of each kind on each shard, a power of two.
    pub receive_buffers: u32,
}

/// Waits of front and shards, milliseconds, each at least 1. `[D-29]`
///
/// Queue and dispatch wait are in [`iop_control::names::QueueLimits`]; response wait is each provider's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// TLS, from accept to the end of the handshake.
    pub handshake_ms: u64,
    /// A request head, from its first byte (or from accept).
    pub head_ms: u64,
    /// A request body without progress.
    pub body_ms: u64,
    /// An idle connection between two requests.
    pub keep_alive_ms: u64,
    /// A client that takes no byte of a pending answer.
    pub write_stall_ms: u64,
    /// Ping after this long without having written to a node. `[D-03]`
    pub heartbeat_ms: u64,
    /// A node that sent no byte for this long is dead; at least twice `heartbeat_ms`. `[D-03]`
    pub dead_ms: u64,
    /// From a node's hand-over to its RegisterRequest. `[A-08]`
    pub registration_ms: u64,
    /// Streams may finish this long after SIGTERM, and those of a drained node. `[D-07]` `[D-05]`
    pub drain_ms: u64,
    /// A node's answer to a command.
    pub command_ms: u64,
    /// A node has this long to answer a configuration refresh.
    pub refresh_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogConfig {
    pub level: LogLevel,
    pub access: AccessLog,
}

/// Least severe line that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Which requests leave an access line. `[D-25]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLog {
    Off,
    /// One request in `n`, at least 1.
    Sampled(u32),
    All,
}

/// Everything wrong with a configuration, in the order of its lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// At least one, at most `PROBLEMS_MAX`.
    pub problems: Vec<Problem>,
    /// More were found than are listed.
    pub truncated: bool,
}

/// One complaint: where, about what, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file as the caller named it.
    pub file: String,
    /// Counted from 1; 0 when the complaint is about the file as a whole.
    pub line: u64,
    /// Path of the field, `nodes[0].adapters[1].base_url`; empty for the file as a whole.
    pub field: String,
    /// What is wrong and what is allowed.
    pub what: String,
}

impl EdgeConfig {
    /// Reads and checks a file against this host. Relative paths in it start from its directory.
    ///
    /// # Errors
    /// Every problem found, at most `PROBLEMS_MAX`, with file, line and field.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        match read_bounded(path) {
            Ok(text) => Self::parse(&text, &name),
            Err(error) => Err(ConfigError::whole(
                &name,
                format!("cannot be read: {error}"),
            )),
        }
    }

    /// Checks `text` against this host; `file_name` is used in messages and as the origin of
    /// relative paths.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ConfigError> {
        Self::parse_for(text, file_name, &Host::probe())
    }

    /// Checks `text` against another host's memory and cores.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse_for(text: &str, file_name: &str, host: &Host) -> Result<Self, ConfigError> {
        let context = Context::new(file_name);
        let root = tree::parse(text, &context);
        let config = root
            .as_ref()
            .and_then(|root| read::edge(&Field::root(root, &context), file_name, host, &context));
        context.finish(config)
    }

    /// What all shards together reserve at start, one line per holder, bytes.
    #[must_use]
    pub fn reserved(&self) -> Vec<Reserved> {
        let shards = u64::from(self.shards);
        let of_one = ShardConfig::new(self).memory();
        of_one
            .map(|(holder, bytes)| Reserved {
                holder,
                bytes: shards * bytes,
            })
            .into()
    }

    /// What is allowed but seldom meant: for the operator's eyes at start and in `iop check`.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let beyond = |address: SocketAddr| !address.ip().to_canonical().is_loopback();
        if self.insecure_plaintext_nodes {
            warnings.push("nodes connect without TLS and without proof of identity".to_owned());
        }
        if self.keys.is_empty() && beyond(self.clients_listen) {
            warnings.push("every host that reaches the client listener is served".to_owned());
        }
        if self.clients_tls.is_none() && !self.keys.is_empty() && beyond(self.clients_listen) {
            warnings.push("clients of other hosts send their keys in plaintext".to_owned());
        }
        if beyond(self.admin_listen) {
            warnings.push("the admin listener has no authentication".to_owned());
        }
        for provider in &self.names.providers {
            let stall = match provider.stall_timeout_ms {
                0 => bounds::STALL_TIMEOUT_MS_DEFAULT,
                ms => ms,
            };
            if provider.response_wait_ms <= stall && warnings.len() < PROBLEMS_MAX {
                warnings.push(format!(
                    "provider {}: response_wait_ms ends a request before its node can report a stall",
                    provider.id
                ));
            }
        }
        warnings
    }
}

/// Reads at most one byte more than a configuration may have; the tree refuses what is longer.
fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let most = FILE_BYTES_MAX as u64 + 1;
    fs::File::open(path)?.take(most).read_to_string(&mut text)?;
    Ok(text)
}

/// One holder of memory reserved at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    pub holder: &'static str,
    pub bytes: u64,
}

impl ConfigError {
    fn whole(file: &str, what: String) -> Self {
        let problem = Problem {
            file: file.to_owned(),
            line: 0,
            field: String::new(),
            what,
        };
        Self {
            problems: vec![problem],
            truncated: false,
        }
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (row, problem) in self.problems.iter().enumerate() {
            let end = if row == 0 { "" } else { "\n" };
            write!(f, "{end}{problem}")?;
        }
        if self.truncated {
            write!(f, "\n… and more")?;
        }
        Ok(())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.what)
    }
}

impl LogLevel {
    pub const ALL: [Self; 5] = [
        Self::Error,
        Self::Warn,
        Self::Info,
        Self::Debug,
        Self::Trace,
    ];

    /// Spelling in configuration, as `RUST_LOG` has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

#[cfg(test)]
mod tests;
