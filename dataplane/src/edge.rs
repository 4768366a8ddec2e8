//! `iop edge`: starts every thread of an Edge, waits for a signal, drains.
//!
//! Lives on: the calling thread. Bound: one Edge; start-up ends with everything open or an error that
//! names what could not be had.
use std::fmt;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, Sender, bounded};
use iop_control::edge::{Control, Tuning};
use iop_control::names::Names;
use iop_proto::ids::{BootNonce, Now, ShardIndex};
use iop_proto::reason::Reason;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::admin::{self, Admin, AdminError, Operator, Readiness};
use crate::alloc::{Role, set_role};
use crate::cold::access_log::AccessLog;
use crate::cold::reload::{ReloadParts, ReloadRequest, Reloader, load_tls};
use crate::config::EdgeConfig;
use crate::control_thread::{Command, ControlParts, Runner};
use crate::credential::issuer::{Issuer, IssuerPort};
use crate::credential::plane::{Plane, PlaneError};
use crate::epoch::{Current, Epoch};
use crate::front::{self, FrontConfig, FrontHooks, PeerKind};
use crate::guard::abort_on_unwind;
use crate::lanes::{Waker, link};
use crate::metrics::{
    ControlMetrics, Exposition, FrontMetric, FrontMetrics, FrontReader, ShardMetric, ShardMetrics,
    ShardReader,
};
use crate::shard::transfer::Peers;
use crate::shard::uring::RingError;
use crate::shard::{Shard, ShardConfig, ShardParts};
use crate::tls::handshake::PkiError;

/// Commands that may wait for control.
const COMMANDS: usize = 4;
/// How often a drain looks whether it is done.
const DRAIN_LOOK: Duration = Duration::from_millis(20);
/// What ends of streams may take after the grace, before the process goes. `[D-55]`
const STOP_WAIT: Duration = Duration::from_millis(1_000);

/// Descriptors of an Edge without connections: listeners, runtimes, standard streams; and per shard its
/// ring and eventfd. A few more than are seen.
const DESCRIPTORS: u64 = 64;
const DESCRIPTORS_PER_SHARD: u64 = 4;

/// Why an Edge did not start.
#[derive(Debug)]
pub enum EdgeError {
    Bind {
        what: &'static str,
        address: SocketAddr,
        source: io::Error,
    },
    Pki(PkiError),
    Ring {
        thread: &'static str,
        source: RingError,
    },
    Admin(AdminError),
    Credentials(PlaneError),
    Thread {
        what: &'static str,
        source: io::Error,
    },
    Random,
    /// The process may open too few descriptors to start at all.
    Descriptors {
        limit: u64,
        least: u64,
    },
}

impl fmt::Display for EdgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bind {
                what,
                address,
                source,
            } => write!(f, "{what} {address}: {source}"),
            Self::Pki(error) => error.fmt(f),
            Self::Ring { thread, source } => write!(f, "{thread}: {source}"),
            Self::Admin(error) => error.fmt(f),
            Self::Credentials(error) => write!(f, "credential plane: {error}"),
            Self::Thread { what, source } => write!(f, "{what}: {source}"),
            Self::Random => f.write_str("the system gives no random bytes"),
            Self::Descriptors { limit, least } => write!(
                f,
                "{limit} file descriptors are allowed, {least} are needed, and one per connection: \
                 raise RLIMIT_NOFILE"
            ),
        }
    }
}

impl std::error::Error for EdgeError {}

/// The front's questions and counts, answered from the shards' mirrors.
struct Hooks {
    metrics: FrontMetrics,
    shards: Vec<ShardReader>,
}

impl FrontHooks for Hooks {
    fn load(&self, kind: PeerKind, shard: usize) -> u64 {
        self.shards[shard].get(match kind {
            PeerKind::Node => ShardMetric::Sessions,
            PeerKind::Client => ShardMetric::Clients,
        })
    }

    fn clients_released(&self) -> u64 {
        self.shards
            .iter()
            .map(|shard| shard.get(ShardMetric::ClientsReleased))
            .sum()
    }

    fn accepted(&mut self, kind: PeerKind) {
        self.metrics.inc(match kind {
            PeerKind::Node => FrontMetric::NodesAccepted,
            PeerKind::Client => FrontMetric::ClientsAccepted,
        });
        self.metrics.inc(FrontMetric::HandshakesInProgress);
    }

    fn handed_over(&mut self, kind: PeerKind) {
        self.metrics.inc(match kind {
            PeerKind::Node => FrontMetric::NodeHandshakes,
            PeerKind::Client => FrontMetric::ClientHandshakes,
        });
        self.metrics.dec(FrontMetric::HandshakesInProgress);
    }

    fn refused(&mut self, _kind: PeerKind, reason: Reason) {
        self.metrics.reason(reason);
        self.metrics.dec(FrontMetric::HandshakesInProgress);
    }

    fn accept_paused(&mut self, _kind: PeerKind) {
        self.metrics.inc(FrontMetric::DescriptorsExhausted);
    }

    fn listener_closed(&mut self, kind: PeerKind) {
        let open = match kind {
            PeerKind::Node => FrontMetric::NodeListenerOpen,
            PeerKind::Client => FrontMetric::ClientListenerOpen,
        };
        self.metrics.set(open, 0);
    }
}

/// Runs an Edge until SIGTERM or SIGINT, then drains it. Logging is set up by the caller.
///
/// # Errors
/// What could not be had at start. After that the Edge ends by signal alone.
pub fn run(config: EdgeConfig) -> Result<(), EdgeError> {
    let least = DESCRIPTORS + u64::from(config.shards) * DESCRIPTORS_PER_SHARD;
    if let Some(limit) = crate::metrics::descriptors_max().filter(|&limit| limit < least) {
        return Err(EdgeError::Descriptors { limit, least });
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| EdgeError::Thread {
            what: "signal runtime",
            source,
        })?;
    let failed = |source| EdgeError::Thread {
        what: "signals",
        source,
    };
    // Before anybody can see that it starts: a signal from then on is obeyed once it has started.
    let signals = {
        let _inside = runtime.enter();
        Signals::new().map_err(failed)?
    };
    let edge = start(config)?;
    runtime.block_on(serve(edge, signals)).map_err(failed)
}

/// What an operator may send.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

/// A running Edge, as its main thread holds it.
struct Edge {
    front: front::FrontHandle,
    admin: admin::AdminHandle,
    readiness: admin::ReadinessWriter,
    commands: Sender<Command>,
    control: Waker,
    shards: Vec<ShardReader>,
    access: AccessLog,
    epoch: Current<Epoch>,
    reloader: Reloader,
    issuer: Option<Issuer>,
}

fn random_u64(random: &SystemRandom) -> Result<u64, EdgeError> {
    let mut bytes = [0; 8];
    random.fill(&mut bytes).map_err(|_| EdgeError::Random)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn bind(what: &'static str, address: SocketAddr) -> Result<std::net::TcpListener, EdgeError> {
    front::bind(address).map_err(|source| EdgeError::Bind {
        what,
        address,
        source,
    })
}

fn epoch_s(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// What the front is made of: certificates read, listeners bound.
fn openings(config: &EdgeConfig) -> Result<FrontConfig, EdgeError> {
    let live = load_tls(config).map_err(EdgeError::Pki)?;
    let core = config.cores.get(config.shards as usize + 1);
    Ok(FrontConfig {
        nodes: bind("node listener", config.nodes_listen)?,
        clients: bind("client listener", config.clients_listen)?,
        live,
        clients_max: config.limits.clients_max,
        handshakes_max: config.limits.handshakes_max,
        core: core.map(|&core| core as usize),
    })
}

fn start(config: EdgeConfig) -> Result<Edge, EdgeError> {
    let openings = openings(&config)?;
    let admin_listener = admin::bind(config.admin_listen).map_err(EdgeError::Admin)?;
    let admin_address = admin_listener.local_addr().ok();
    let [nodes, clients] =
        [&openings.nodes, &openings.clients].map(|listener| listener.local_addr().ok());

    let started = Instant::now();
    let control_waker = waker()?;
    let lanes = AdminLanes::new(&config, &control_waker);
    let (answers, answered) = admin::answer_lane();
    let (commands, command_rx) = bounded(COMMANDS);
    let epoch = Arc::new(Epoch::new(0, &config));
    let names = Current::new(Arc::clone(&config.names));
    let threads = Threads {
        config: &config,
        epoch: &epoch,
        names: &names,
        started,
        control: &control_waker,
        answers: &answers,
    };
    let side = threads.shards(credential_plane(&config)?)?;
    let shards = side.readers;
    let (control_metrics, control_reader) = ControlMetrics::new();
    threads.control(ControlParts {
        control: core(&config)?,
        links: side.links,
        waker: control_waker.clone(),
        snapshots: lanes.snapshots,
        commands: command_rx,
        operators: lanes.operators,
        answers: answered,
        metrics: control_metrics,
        started,
    })?;

    let (front, front_reader) = open_front(openings, side.doors, &shards)?;
    let (mut readiness, ready) = admin::readiness();
    let exposition = Exposition::new(shards.clone(), front_reader, control_reader);
    let epoch = Current::new(epoch);
    let parts = ReloadParts {
        config,
        epoch: epoch.clone(),
        names,
        front: front.live(),
        commands: commands.clone(),
        control: control_waker.clone(),
        shards: shards.clone(),
    };
    let reloader = Reloader::spawn(parts).map_err(threadless("reload"))?;
    let admin = Admin {
        exposition,
        readiness: ready,
        status: lanes.status,
        commands: lanes.commands,
        operator: operator(&reloader, &commands, &control_waker),
    };
    let admin = admin::spawn(admin_listener, admin).map_err(EdgeError::Admin)?;
    readiness.set(Readiness::Ready);
    info!(?nodes, ?clients, admin = ?admin_address, shards = shards.len(), "edge ready");
    Ok(Edge {
        front,
        admin,
        readiness,
        commands,
        control: control_waker,
        shards,
        access: side.access,
        issuer: side.issuer,
        epoch,
        reloader,
    })
}

fn operator(reloader: &Reloader, commands: &Sender<Command>, control: &Waker) -> Operator {
    Operator {
        reload: reloader.asks(),
        commands: commands.clone(),
        control: control.clone(),
    }
}

/// Both ends of what the admin thread may ask of control.
struct AdminLanes {
    status: admin::StatusSource,
    snapshots: Receiver<admin::SnapshotRequest>,
    commands: admin::CommandSource,
    operators: Receiver<admin::CommandRequest>,
}

impl AdminLanes {
    fn new(config: &EdgeConfig, control: &Waker) -> Self {
        let wake = || {
            let control = control.clone();
            move || control.ring()
        };
        let (status, snapshots) = admin::status_lane(wake());
        let (commands, operators) = admin::command_lane(config.timeouts.command_ms, wake());
        Self {
            status,
            snapshots,
            commands,
            operators,
        }
    }
}

fn core(config: &EdgeConfig) -> Result<Control, EdgeError> {
    let tuning = Tuning {
        seed: random_u64(&SystemRandom::new())?,
        command_ms: config.timeouts.command_ms,
    };
    let names = Arc::clone(&config.names);
    let shards = config.shards as usize;
    Ok(Control::tuned(names, shards, Now::default(), tuning))
}

fn open_front(
    openings: FrontConfig,
    doors: Vec<front::ShardDoor>,
    shards: &[ShardReader],
) -> Result<(front::FrontHandle, FrontReader), EdgeError> {
    let (mut metrics, reader) = FrontMetrics::new();
    metrics.set(FrontMetric::NodeListenerOpen, 1);
    metrics.set(FrontMetric::ClientListenerOpen, 1);
    let shards = shards.to_vec();
    let front = front::spawn(openings, doors, Hooks { metrics, shards });
    Ok((front.map_err(threadless("front"))?, reader))
}

fn threadless(what: &'static str) -> impl Fn(io::Error) -> EdgeError {
    move |source| EdgeError::Thread { what, source }
}

fn waker() -> Result<Waker, EdgeError> {
    Waker::new().map_err(|source| EdgeError::Thread {
        what: "eventfd",
        source,
    })
}

/// The main thread's ends of what belongs to shards.
struct ShardSide {
    readers: Vec<ShardReader>,
    doors: Vec<front::ShardDoor>,
    links: Vec<crate::lanes::ControlEnd>,
    access: AccessLog,
    issuer: Option<Issuer>,
}

/// Keys and store of the credential plane; `None` when it is off.
fn credential_plane(config: &EdgeConfig) -> Result<Option<Plane>, EdgeError> {
    let plane = Plane::open(config).map_err(EdgeError::Credentials)?;
    if let Some(plane) = &plane {
        info!(store = plane.summary(), "credential plane on");
        for warning in plane.warnings() {
            warn!("{warning}");
        }
    }
    Ok(plane)
}

/// The issuer and each shard's port to it, if there is one.
fn issuer(
    plane: Option<Plane>,
    shards: &[Waker],
) -> Result<(Option<Issuer>, Vec<Option<IssuerPort>>), EdgeError> {
    let Some(plane) = plane else {
        return Ok((None, shards.iter().map(|_| None).collect()));
    };
    let spawned = Issuer::spawn(plane, shards).map_err(|source| EdgeError::Thread {
        what: "issuer",
        source,
    });
    let (issuer, ports) = spawned?;
    Ok((Some(issuer), ports.into_iter().map(Some).collect()))
}

/// What the threads of an Edge are made from.
struct Threads<'a> {
    config: &'a EdgeConfig,
    epoch: &'a Arc<Epoch>,
    names: &'a Current<Names>,
    started: Instant,
    control: &'a Waker,
    answers: &'a admin::AnswerSender,
}

impl Threads<'_> {
    fn shards(&self, plane: Option<Plane>) -> Result<ShardSide, EdgeError> {
        let count = self.config.shards as usize;
        let random = SystemRandom::new();
        let nonce = BootNonce(random_u64(&random)?);
        let (access, sinks) = AccessLog::spawn(
            self.config.log.access,
            count,
            self.names.clone(),
            SystemTime::now(),
            Box::new(io::stdout()),
        )
        .map_err(|source| EdgeError::Thread {
            what: "access log",
            source,
        })?;
        let (mut readers, mut doors, mut links) = (Vec::new(), Vec::new(), Vec::new());
        let wakers = (0..count).map(|_| waker()).collect::<Result<Vec<_>, _>>()?;
        let peers = Peers::mesh(&wakers);
        let (issuer, ports) = issuer(plane, &wakers)?;
        let each = sinks.into_iter().zip(peers).zip(ports);
        for (row, ((access, peers), issuer)) in each.enumerate() {
            let waker = wakers[row].clone();
            let (lanes, control_end) = link(&waker, self.control);
            let (door, arrivals) = front::door(waker.clone());
            let (metrics, reader) = ShardMetrics::new();
            let parts = ShardParts {
                index: ShardIndex::new(row).expect("shards are checked by the configuration"),
                config: ShardConfig::new(self.config),
                epoch: Arc::clone(self.epoch),
                nonce,
                request_seed: random_u64(&random)?,
                started: self.started,
                epoch_s: epoch_s(SystemTime::now() - self.started.elapsed()),
                lanes,
                arrivals,
                waker,
                metrics,
                access,
                peers,
                answers: self.answers.clone(),
                issuer,
            };
            self.spawn(
                row,
                "shard",
                Role::Shard,
                move || Shard::new(parts),
                |shard| shard.run(),
            )?;
            readers.push(reader);
            doors.push(door);
            links.push(control_end);
        }
        Ok(ShardSide {
            readers,
            doors,
            links,
            access,
            issuer,
        })
    }

    fn control(&self, parts: ControlParts) -> Result<(), EdgeError> {
        let row = self.config.shards as usize;
        self.spawn(
            row,
            "control",
            Role::Control,
            move || Runner::new(parts),
            |runner| runner.run(),
        )
    }

    /// Starts a thread, makes its state there (a ring belongs to its thread), and waits until it runs.
    fn spawn<T>(
        &self,
        row: usize,
        what: &'static str,
        role: Role,
        make: impl FnOnce() -> Result<T, RingError> + Send + 'static,
        run: impl FnOnce(T) -> core::convert::Infallible + Send + 'static,
    ) -> Result<(), EdgeError> {
        let core = self.config.cores.get(row).copied();
        let (made_tx, made) = bounded(1);
        let body = move || {
            abort_on_unwind(|| {
                set_role(role);
                if let Some(core) = core
                    && let Err(error) = crate::shard::uring::pin(core)
                {
                    warn!(what, core, %error, "thread not pinned");
                }
                match make() {
                    Ok(state) => {
                        // The spawner waits for exactly this one value.
                        let _spawner_gone = made_tx.send(Ok(()));
                        run(state);
                    }
                    Err(error) => {
                        let _spawner_gone = made_tx.send(Err(error));
                    }
                }
            });
        };
        std::thread::Builder::new()
            .name(format!("iop-{what}"))
            .spawn(body)
            .map_err(|source| EdgeError::Thread { what, source })?;
        match made.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(EdgeError::Ring {
                thread: what,
                source,
            }),
            Err(_) => Err(EdgeError::Thread {
                what,
                source: io::Error::other("the thread ended"),
            }),
        }
    }
}

/// Waits for a signal, then drains: a second signal ends at once. `[D-07]` `[D-55]`
async fn serve(mut edge: Edge, signals: Signals) -> io::Result<()> {
    let Signals {
        mut terminate,
        mut interrupt,
        mut hangup,
    } = signals;
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => edge.reload(),
        }
    }
    let drain_ms = edge.epoch.get().timeouts.drain_ms;
    info!(drain_ms, "draining");
    edge.readiness.set(Readiness::Draining);
    edge.front.close_clients();
    let grace_ms = u32::try_from(drain_ms).unwrap_or(u32::MAX);
    edge.command(Command::Drain { grace_ms });
    tokio::select! {
        () = edge.drained(Duration::from_millis(drain_ms)) => {}
        _ = terminate.recv() => warn!("second signal: ending at once"),
        _ = interrupt.recv() => warn!("second signal: ending at once"),
    }
    edge.command(Command::Stop);
    edge.drained(STOP_WAIT).await;
    edge.admin.stop(); // the last asker of the reloader beside us
    edge.reloader.stop();
    edge.access.stop();
    if let Some(issuer) = edge.issuer.take() {
        issuer.stop();
    }
    info!("edge stopped");
    io::stdout().flush()
}

impl Edge {
    /// SIGHUP. The log tells what came of it.
    fn reload(&self) {
        let request = ReloadRequest { reply: None };
        if self.reloader.asks().try_send(request).is_err() {
            warn!("a reload is under way; this one is not made");
        }
    }

    fn command(&self, command: Command) {
        if self.commands.try_send(command).is_err() {
            warn!("control takes no command");
        }
        self.control.ring();
    }

    /// Until every shard drains and no request is left, at most `limit`.
    async fn drained(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            // A shard counts its requests before it says that it drains.
            let done = self.shards.iter().all(|shard| {
                shard.get(ShardMetric::Draining) == 1 && shard.get(ShardMetric::RequestsOpen) == 0
            });
            if done {
                return;
            }
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    }
}
