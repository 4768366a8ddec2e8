//! Reads the configuration and the certificates again: on demand, and certificates when their files
//! change. Whatever is wrong, everything stays as it was. `[D-39]` `[D-05]`
//!
//! ```text
//! file ─► checked ─► certificates read ─► control ─► every shard ─► front
//!              any mistake: the answer, nothing else
//! ```
//!
//! Lives on: a cold thread. View: the running configuration. Bound: one reload at a time; one look at
//! the files a second; `EPOCHS_RETIRED_MAX` earlier configurations that requests still hold.
use core::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use iop_control::names::Names;
use iop_proto::limits::EPOCHS_RETIRED_MAX;
use tracing::{info, warn};

use crate::alloc::{self, Role};
use crate::config::{ConfigError, EdgeConfig, Reload, Room};
use crate::control_thread::Command;
use crate::epoch::{Current, Epoch};
use crate::front::{FrontLive, NodeSecurity};
use crate::lanes::Waker;
use crate::metrics::{ShardMetric, ShardReader};
use crate::shard::ShardConfig;
use crate::system::{Stamp, unix_s};
use crate::tls::handshake::{PkiError, client_server_config, node_server_config};

/// How often the certificates' files are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Every shard takes a new configuration within a turn; one that does not is wedged. `[D-38]`
const TAKEN_WAIT: Duration = Duration::from_secs(5);
/// Between two looks whether they have.
const TAKEN_LOOK: Duration = Duration::from_millis(1);
/// Requests that may wait for the one under way.
const REQUESTS: usize = 4;

/// A reload that was made.
#[derive(Clone, Debug)]
pub struct Reloaded {
    /// Counts up from 1.
    pub epoch: u64,
    /// What is different now, a line each.
    pub changed: Vec<String>,
    /// Fields that are different in the file and need a restart.
    pub restart: Vec<&'static str>,
}

/// Why a reload was not made, or not confirmed. Everything is as it was, but for the last.
#[derive(Debug)]
pub enum ReloadError {
    /// The file, by line and field.
    Config(ConfigError),
    /// A certificate's file.
    Pki(PkiError),
    /// Requests still hold as many earlier configurations as are kept.
    Held { epochs: usize },
    /// The issuer of credential leases knows the configuration it started with alone.
    Managed,
    /// Control did not take it in time.
    Late,
    /// Control took it and a shard has not in time. Alone of these, it is in force, or will be.
    Unconfirmed,
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Pki(error) => error.fmt(f),
            Self::Held { epochs } => write!(
                f,
                "requests that are still being read hold {epochs} earlier configurations"
            ),
            Self::Managed => f.write_str(
                "with credential_plane: on only the store and certificates are read again; restart \
                 for the rest",
            ),
            Self::Late => f.write_str("the configuration was not taken in time"),
            Self::Unconfirmed => {
                f.write_str("the configuration is taken, but not every shard works by it yet")
            }
        }
    }
}

impl std::error::Error for ReloadError {}

/// Asks for a reload.
#[derive(Debug)]
pub struct ReloadRequest {
    /// `None`: the log tells.
    pub reply: Option<Sender<Result<Reloaded, ReloadError>>>,
}

/// What the thread is given.
#[derive(Debug)]
pub struct ReloadParts {
    /// The configuration at start.
    pub config: EdgeConfig,
    pub epoch: Current<Epoch>,
    pub names: Current<Names>,
    pub front: Current<FrontLive>,
    pub commands: Sender<Command>,
    pub control: Waker,
    pub shards: Vec<ShardReader>,
}

/// The running thread; it ends when every asker is gone.
#[derive(Debug)]
pub struct Reloader {
    asks: Sender<ReloadRequest>,
    thread: JoinHandle<()>,
}

impl Reloader {
    /// # Errors
    /// When the thread cannot be made.
    pub fn spawn(parts: ReloadParts) -> io::Result<Self> {
        let (asks, requests) = bounded(REQUESTS);
        let thread = std::thread::Builder::new()
            .name("iop-reload".into())
            .spawn(move || {
                alloc::set_role(Role::Cold);
                State::new(parts).run(&requests);
            })?;
        Ok(Self { asks, thread })
    }

    /// Where to ask.
    #[must_use]
    pub fn asks(&self) -> Sender<ReloadRequest> {
        self.asks.clone()
    }

    /// Waits for the reload under way. Other askers must be gone.
    pub fn stop(self) {
        drop(self.asks);
        if self.thread.join().is_err() {
            tracing::error!("the reload thread had panicked");
        }
    }
}

/// TLS of both listeners from the files that `config` names.
///
/// # Errors
/// The first file that is missing or wrong.
pub fn load_tls(config: &EdgeConfig) -> Result<FrontLive, PkiError> {
    let unix = unix_s();
    let node_security = match &config.pki {
        Some(files) => NodeSecurity::Tls {
            tls: node_server_config(files, &config.trust_domain, &config.edge_name, unix)?,
            trust_domain: config.trust_domain.clone(),
        },
        None => NodeSecurity::InsecurePlaintext,
    };
    let client_tls = match &config.clients_tls {
        Some(files) => Some(client_server_config(files, unix)?),
        None => None,
    };
    Ok(FrontLive {
        node_security,
        client_tls,
        names: Arc::clone(&config.names),
        handshake_ms: config.timeouts.handshake_ms,
        dead_ms: config.timeouts.dead_ms,
    })
}

/// The certificates' files as they are; `None`: it could not be looked at.
fn stamps(config: &EdgeConfig) -> Vec<Option<Stamp>> {
    let nodes = config
        .pki
        .iter()
        .flat_map(|pki| [&pki.ca, &pki.cert, &pki.key]);
    let clients = config
        .clients_tls
        .iter()
        .flat_map(|tls| [&tls.cert, &tls.key]);
    nodes.chain(clients).map(|path| Stamp::of(path)).collect()
}

struct State {
    parts: ReloadParts,
    room: Room,
    /// Earlier configurations that somebody still holds: they are freed here, not on a shard.
    retired: Vec<Arc<Epoch>>,
    /// The certificates' files as they were when they were read last, well or not.
    read: Vec<Option<Stamp>>,
}

impl State {
    fn new(parts: ReloadParts) -> Self {
        let sizes = ShardConfig::new(&parts.config);
        Self {
            room: Room {
                nodes_max: parts.config.names.nodes.len().max(sizes.nodes_max()),
            },
            read: stamps(&parts.config),
            retired: Vec::new(),
            parts,
        }
    }

    fn run(&mut self, requests: &Receiver<ReloadRequest>) {
        loop {
            match requests.recv_timeout(LOOK) {
                Ok(request) => {
                    let outcome = self.reload();
                    say(&outcome);
                    let refused = !matches!(outcome, Ok(_) | Err(ReloadError::Unconfirmed));
                    if let Some(reply) = request.reply {
                        let _asker_gone = reply.try_send(outcome);
                    }
                    // After the answer: a control thread without room would hold it up.
                    if refused {
                        self.count_refused();
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.look(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn reload(&mut self) -> Result<Reloaded, ReloadError> {
        if self.parts.config.credentials.is_some() {
            return Err(ReloadError::Managed);
        }
        let fresh = EdgeConfig::load(&self.parts.config.file).map_err(ReloadError::Config)?;
        let running = &self.parts.config;
        let reload = running.reload(fresh, self.room);
        let Reload {
            config,
            changed,
            restart,
        } = reload.map_err(ReloadError::Config)?;
        let read = stamps(&config);
        let front = load_tls(&config).map_err(ReloadError::Pki)?;
        self.retired.retain(|epoch| Arc::strong_count(epoch) > 1);
        if self.retired.len() >= EPOCHS_RETIRED_MAX {
            let epochs = self.retired.len();
            return Err(ReloadError::Held { epochs });
        }
        let before = self.parts.epoch.get();
        let number = before.number + 1;
        let epoch = Arc::new(Epoch::new(number, &config));
        for warning in config.warnings() {
            warn!("{warning}");
        }
        // Rows of the new table may stand in records before control has told every shard.
        self.parts.names.set(Arc::clone(&epoch.names));
        let command = Command::Reload(Arc::clone(&epoch));
        if self
            .parts
            .commands
            .send_timeout(command, TAKEN_WAIT)
            .is_err()
        {
            self.parts.names.set(Arc::clone(&before.names));
            return Err(ReloadError::Late);
        }
        self.parts.control.ring();
        self.parts.epoch.set(epoch);
        self.parts.config = config;
        self.read = read;
        self.retired.push(before);
        let taken = self.taken(number);
        self.parts.front.set(Arc::new(front));
        taken?;
        Ok(Reloaded {
            epoch: number,
            changed,
            restart,
        })
    }

    /// Waits until every shard works by the configuration.
    fn taken(&self, number: u64) -> Result<(), ReloadError> {
        let began = Instant::now();
        let behind = |shard: &ShardReader| shard.get(ShardMetric::EpochsTaken) < number;
        while self.parts.shards.iter().any(behind) {
            if began.elapsed() > TAKEN_WAIT {
                return Err(ReloadError::Unconfirmed);
            }
            std::thread::sleep(TAKEN_LOOK);
        }
        Ok(())
    }

    /// Reads the certificates again when a file of theirs has changed. A pair that is torn now keeps the
    /// old one; the next change is looked at again. `[P-73]`
    fn look(&mut self) {
        self.retired.retain(|epoch| Arc::strong_count(epoch) > 1);
        let seen = stamps(&self.parts.config);
        if seen == self.read {
            return;
        }
        self.read = seen;
        match load_tls(&self.parts.config) {
            Ok(front) => {
                self.parts.front.set(Arc::new(front));
                info!("certificates reloaded");
            }
            Err(error) => {
                warn!(%error, "certificates not reloaded, the old ones stay");
                self.count_refused();
            }
        }
    }

    fn count_refused(&self) {
        // Only a control thread that is wedged has no room this long, and that ends the process.
        let _lost = self
            .parts
            .commands
            .send_timeout(Command::ReloadRefused, TAKEN_WAIT);
        self.parts.control.ring();
    }
}

fn say(outcome: &Result<Reloaded, ReloadError>) {
    match outcome {
        Ok(reloaded) => {
            let changes = reloaded.changed.len();
            info!(epoch = reloaded.epoch, changes, "configuration reloaded");
            for line in &reloaded.changed {
                info!("{line}");
            }
            for field in &reloaded.restart {
                warn!(field, "needs a restart and stays as it was");
            }
        }
        Err(error @ ReloadError::Unconfirmed) => warn!(%error, "configuration reloaded"),
        Err(error) => warn!(%error, "configuration not reloaded"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::metrics::ShardMetrics;

    const FILE: &str = "\
listeners: {nodes: 127.0.0.1:7443, clients: 127.0.0.1:8080, insecure_plaintext_nodes: true}
nodes:
  - id: n1
    adapters: [{name: vllm, type: vllm, base_url: http://127.0.0.1:8000}]
    providers: [{id: p1, adapter: vllm, target: t1, capacity: 1}]
models: [{name: m1, providers: [p1]}]
";

    /// Changed text of the running file, and what is said to be in force.
    struct World {
        path: PathBuf,
        asks: Sender<ReloadRequest>,
        epoch: Current<Epoch>,
        commands: Receiver<Command>,
    }

    impl World {
        fn reload(&self, capacity: &str) -> Result<Reloaded, ReloadError> {
            let text = FILE.replace("capacity: 1", &format!("capacity: {capacity}"));
            std::fs::write(&self.path, text).unwrap();
            let (reply, answer) = bounded(1);
            let reply = Some(reply);
            self.asks.send(ReloadRequest { reply }).unwrap();
            answer.recv_timeout(3 * TAKEN_WAIT).unwrap()
        }

        /// What control was told since.
        fn told(&self) -> Vec<Command> {
            let first = self.commands.recv_timeout(TAKEN_WAIT);
            first.into_iter().chain(self.commands.try_iter()).collect()
        }

        fn in_force(&self) -> (u64, u32) {
            let epoch = self.epoch.get();
            (epoch.number, epoch.names.providers[0].capacity)
        }
    }

    #[test]
    fn a_configuration_that_a_shard_is_late_to_take_is_in_force_and_not_counted_as_refused() {
        let path = std::env::temp_dir().join(format!("iop-reload-{}.yaml", std::process::id()));
        std::fs::write(&path, FILE).unwrap();
        let config = EdgeConfig::load(&path).unwrap();
        let epoch = Current::new(Arc::new(Epoch::new(0, &config)));
        let (mut shard, reader) = ShardMetrics::new();
        let (commands_in, commands) = bounded(4);
        let reloader = Reloader::spawn(ReloadParts {
            epoch: epoch.clone(),
            names: Current::new(Arc::clone(&config.names)),
            front: Current::new(Arc::new(load_tls(&config).unwrap())),
            commands: commands_in,
            control: Waker::new().unwrap(),
            shards: vec![reader],
            config,
        })
        .unwrap();
        let asks = reloader.asks();
        let world = World {
            path,
            asks,
            epoch,
            commands,
        };
        assert!(matches!(world.reload("many"), Err(ReloadError::Config(_))));
        assert!(matches!(world.told()[..], [Command::ReloadRefused]));
        assert_eq!(world.in_force(), (0, 1));
        assert!(matches!(world.reload("2"), Err(ReloadError::Unconfirmed)));
        assert!(
            matches!(world.told()[..], [Command::Reload(_)]),
            "not refused"
        );
        assert_eq!(world.in_force(), (1, 2));
        shard.set(ShardMetric::EpochsTaken, 2);
        assert_eq!(world.reload("3").unwrap().epoch, 2);
        assert!(matches!(world.told()[..], [Command::Reload(_)]));
        assert_eq!(world.in_force(), (2, 3));
        let World { path, asks, .. } = world;
        drop(asks);
        reloader.stop();
        std::fs::remove_file(path).unwrap();
    }
}
