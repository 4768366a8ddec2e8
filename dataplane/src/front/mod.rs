//! The front: accepts nodes and clients, finishes their handshakes, hands them to shards.
//!
//! Lives on: one thread of its own, the only one that runs glommio. View: connections that no shard
//! owns yet. Bound: `handshakes_max` connections at once, split between the two listeners so that
//! neither starves the other; whatever is beyond waits in the accept backlog, unaccepted. `[D-04]`
//!
//! ```text
//! backlog → accept → handshake, identity → flush → duplicate fd → lane of the least loaded shard
//!    ▲ one permit per connection, from before accept until it is in the lane, or closed
//! ```
use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glommio::net::TcpStream;
use glommio::sync::{Semaphore, StaticPermit};
use glommio::timer::{sleep, timeout};
use glommio::{GlommioError, LocalExecutorBuilder, Placement, Task, spawn_local};
use iop_control::names::Names;
use iop_proto::reason::Reason;
use iop_ring::spsc::Full;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::alloc::{Role, set_role};
use crate::epoch::Current;
use crate::guard::abort_on_unwind;
use crate::tls::ServerTls;

pub mod handover;
mod handshake;

pub use handover::{ClientHandover, Handover, NodeHandover, ShardDoor, door};
use handshake::{Ready, Refusal};

/// Connections the kernel completes ahead of accept; `somaxconn` caps it.
const BACKLOG: i32 = 1_024;
/// Wait before accept is tried again when the process or the machine is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Wait before a full lane is tried again: a shard drains it every turn.
const LANE_PAUSE: Duration = Duration::from_millis(1);
/// A silent peer is probed after this long, then every interval.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// Lines about refused peers written in one second; the rest are counted in the next line.
const LOG_LINES_PER_SECOND_MAX: u32 = 10;
/// glommio's registered memory, its smallest: the front does no file I/O.
const IO_MEMORY_BYTES: usize = 64 * 1024;
/// Entries of each of glommio's three rings; more operations than that queue behind.
const RING_DEPTH: usize = 256;

/// Which listener a connection came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerKind {
    Node,
    Client,
}

impl PeerKind {
    /// Metric label and log field.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Client => "client",
        }
    }
}

/// What the front asks of, and tells to, the rest of the Edge. Called on the front thread.
pub trait FrontHooks: Send + 'static {
    /// How loaded `shard` is for one more of `kind`: the least is chosen, ties in turn. `[D-35]`
    fn load(&self, kind: PeerKind, shard: usize) -> u64;
    /// Clients that shards have let go since start; with those let in, the global limit. `[D-33]`
    fn clients_released(&self) -> u64;
    /// A connection was accepted. Exactly one of `handed_over` and `refused` follows, unless the
    /// front is stopped first.
    fn accepted(&mut self, kind: PeerKind);
    /// It is in a shard's lane.
    fn handed_over(&mut self, kind: PeerKind);
    /// It was closed here.
    fn refused(&mut self, kind: PeerKind, reason: Reason);
    /// Accept found no descriptor (or no memory) and pauses.
    fn accept_paused(&mut self, kind: PeerKind);
    /// Its listener was shut: nothing is accepted there any more.
    fn listener_closed(&mut self, kind: PeerKind);
}

/// What a reload replaces of the front: each connection is judged by what was current at its accept.
#[derive(Clone, Debug)]
pub struct FrontLive {
    pub node_security: NodeSecurity,
    /// `None`: plaintext HTTP.
    pub client_tls: Option<ServerTls>,
    pub names: Arc<Names>,
    /// From accept to the end of the handshake, ms. `[D-29]`
    pub handshake_ms: u64,
    /// Unacknowledged data to a node ends its connection after this long, ms. `[D-03]`
    pub dead_ms: u64,
}

impl FrontLive {
    const fn handshake(&self) -> Duration {
        Duration::from_millis(self.handshake_ms)
    }
}

/// How nodes prove who they are.
#[derive(Clone, Debug)]
pub enum NodeSecurity {
    /// Mutual TLS; the certificate must name a configured node of this trust domain.
    Tls {
        tls: ServerTls,
        trust_domain: String,
    },
    /// Anyone may claim any node id. `[A-40]`
    InsecurePlaintext,
}

#[derive(Debug)]
pub struct FrontConfig {
    /// Listening, from [`bind`].
    pub nodes: TcpListener,
    /// Listening, from [`bind`].
    pub clients: TcpListener,
    pub live: FrontLive,
    /// Client connections at once, all shards together; one more is answered 503. `[D-33]`
    pub clients_max: u32,
    /// Connections in the front at once, at least 1 per listener. `[D-04]`
    pub handshakes_max: u32,
    /// Core to pin the thread to.
    pub core: Option<usize>,
}

/// A listening socket, close-on-exec, that no second process may share.
///
/// # Errors
/// What the kernel says: in use, not permitted, no such address.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?; // a restart need not wait for old connections to fade
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Controls a running front from another thread.
#[derive(Debug)]
pub struct FrontHandle {
    /// Second descriptors of the listeners: shutting one down ends the front's accept on it.
    nodes: Option<Arc<TcpListener>>,
    clients: Option<Arc<TcpListener>>,
    live: Current<FrontLive>,
    thread: Option<JoinHandle<()>>,
}

impl FrontHandle {
    /// Stops accepting clients, for a drain; those accepted already are still handed over. `[D-07]`
    pub fn close_clients(&mut self) {
        close(&mut self.clients);
    }

    /// What connections accepted from now on are judged by. Clones replace it too.
    #[must_use]
    pub fn live(&self) -> Current<FrontLive> {
        self.live.clone()
    }

    /// Stops accepting, closes what is in a handshake, and waits for the thread.
    pub fn stop(mut self) {
        self.close_both();
        if let Some(thread) = self.thread.take() {
            thread
                .join()
                .expect("the front aborts the process rather than panic");
        }
    }

    fn close_both(&mut self) {
        close(&mut self.nodes);
        close(&mut self.clients);
    }
}

impl Drop for FrontHandle {
    fn drop(&mut self) {
        self.close_both();
    }
}

fn close(listener: &mut Option<Arc<TcpListener>>) {
    if let Some(listener) = listener.take() {
        // Fails only on a socket that is shut down already.
        let _was_closed = SockRef::from(&*listener).shutdown(Shutdown::Both);
    }
}

/// Starts the front's thread. `doors`: one per shard, in their order, at least one.
///
/// # Errors
/// When no thread, descriptor or ring could be had.
///
/// # Panics
/// Without doors.
pub fn spawn<H: FrontHooks>(
    config: FrontConfig,
    doors: Vec<ShardDoor>,
    hooks: H,
) -> io::Result<FrontHandle> {
    assert!(!doors.is_empty(), "an Edge has at least one shard");
    config.nodes.set_nonblocking(false)?; // see `handover::adopt`
    config.clients.set_nonblocking(false)?;
    let nodes = Arc::new(config.nodes.try_clone()?);
    let clients = Arc::new(config.clients.try_clone()?);
    let live = Current::new(Arc::new(config.live.clone()));
    let mut handle = FrontHandle {
        nodes: Some(Arc::clone(&nodes)),
        clients: Some(Arc::clone(&clients)),
        live: live.clone(),
        thread: None,
    };
    let (started_tx, started_rx) = crossbeam_channel::bounded(1);
    let thread = std::thread::Builder::new()
        .name("iop-front".into())
        .spawn(move || {
            abort_on_unwind(|| {
                set_role(Role::Front);
                let placement = config.core.map_or(Placement::Unbound, Placement::Fixed);
                let executor = LocalExecutorBuilder::new(placement)
                    .io_memory(IO_MEMORY_BYTES)
                    .ring_depth(RING_DEPTH)
                    .make();
                let (executor, started) = match executor {
                    Ok(executor) => (Some(executor), Ok(())),
                    Err(error) => (None, Err(not_started(error))),
                };
                // The spawner waits for exactly this one value.
                let _spawner_gone = started_tx.send(started);
                if let Some(executor) = executor {
                    executor.run(run(config, live, [nodes, clients], doors, hooks));
                }
            });
        })?;
    handle.thread = Some(thread);
    started_rx
        .recv()
        .map_err(|_| io::Error::other("the front's thread ended"))??;
    Ok(handle)
}

/// Why the runtime did not start, with what to do about it where that is known.
fn not_started(error: GlommioError<()>) -> io::Error {
    let error = io::Error::from(error);
    // The runtime turns its own error into text on the way.
    if error.to_string().contains("MemLockLimit") {
        return io::Error::other(format!("{error}: raise RLIMIT_MEMLOCK"));
    }
    error
}

/// Permits of one listener, and the tasks that hold them.
struct Gate {
    permits: Rc<Semaphore>,
    /// One per permit. A finished task's handle stays until its place is taken again.
    tasks: RefCell<Vec<Option<Task<()>>>>,
    /// Places whose task has finished: as many as there are permits.
    free: RefCell<Vec<usize>>,
}

impl Gate {
    fn new(permits: u32) -> Self {
        let permits = permits.max(1);
        Self {
            permits: Rc::new(Semaphore::new(u64::from(permits))),
            tasks: RefCell::new((0..permits).map(|_| None).collect()),
            free: RefCell::new((0..permits as usize).collect()),
        }
    }
}

struct Front<H> {
    live: Current<FrontLive>,
    clients_max: u64,
    nodes: Gate,
    clients: Gate,
    doors: RefCell<Vec<ShardDoor>>,
    /// Where the search for the least loaded shard begins.
    next_door: Cell<usize>,
    hooks: RefCell<H>,
    /// Clients let in since start, less those refused afterwards.
    clients_admitted: Cell<u64>,
    log: RefCell<LogGate>,
}

async fn run<H: FrontHooks>(
    config: FrontConfig,
    live: Current<FrontLive>,
    [nodes, clients]: [Arc<TcpListener>; 2],
    doors: Vec<ShardDoor>,
    hooks: H,
) {
    // Without TLS for clients every handshake is a node's.
    let node_share = match config.live.client_tls {
        Some(_) => config.handshakes_max.div_ceil(2),
        None => config.handshakes_max,
    };
    let client_share = match config.live.client_tls {
        Some(_) => config.handshakes_max / 2,
        None => config.handshakes_max, // no asymmetric work: it bounds waits for a lane
    };
    let front = Rc::new(Front {
        live,
        clients_max: u64::from(config.clients_max),
        nodes: Gate::new(node_share),
        clients: Gate::new(client_share),
        doors: RefCell::new(doors),
        next_door: Cell::new(0),
        hooks: RefCell::new(hooks),
        clients_admitted: Cell::new(0),
        log: RefCell::new(LogGate::new(Instant::now())),
    });
    // A task each: the runtime keeps one more waker for every poll of a pending accept, so nobody else's
    // event may poll it. Some 32,000 kept wakers are one too many for its counter.
    let serving = [
        (config.nodes, nodes, PeerKind::Node),
        (config.clients, clients, PeerKind::Client),
    ]
    .map(|(listener, socket, kind)| {
        let front = Rc::clone(&front);
        spawn_local(async move {
            serve(&front, listener, socket, kind).await;
            front.hooks.borrow_mut().listener_closed(kind);
        })
    });
    for task in serving {
        task.await;
    }
    for gate in [&front.nodes, &front.clients] {
        let tasks = core::mem::take(&mut *gate.tasks.borrow_mut());
        for task in tasks.into_iter().flatten() {
            task.cancel().await;
        }
    }
}

/// Accepts until the listener is shut down. `socket`: the same socket, to be asked whether it was.
async fn serve<H: FrontHooks>(
    front: &Rc<Front<H>>,
    listener: TcpListener,
    socket: Arc<TcpListener>,
    kind: PeerKind,
) {
    let listener = handover::adopt(listener);
    let gate = front.gate(kind);
    loop {
        // First the permit, then the connection: what cannot be served is not accepted.
        let permit = gate.permits.acquire_static_permit(1).await;
        let permit = permit.expect("the semaphore is never closed");
        match listener.accept().await {
            Ok(stream) => front.begin(stream, kind, permit),
            Err(error) => match after_accept_error(&error) {
                AfterAccept::Stop => return,
                AfterAccept::Retry => {}
                AfterAccept::Pause => {
                    front.hooks.borrow_mut().accept_paused(kind);
                    sleep(ACCEPT_PAUSE).await;
                    // Without a descriptor to spare the kernel does not say that the socket was shut.
                    if !SockRef::from(&*socket).is_listener().unwrap_or(false) {
                        return;
                    }
                }
            },
        }
        glommio::yield_if_needed().await;
    }
}

enum AfterAccept {
    Retry,
    Pause,
    Stop,
}

fn after_accept_error(error: &GlommioError<()>) -> AfterAccept {
    let GlommioError::IoError(error) = error else {
        return AfterAccept::Pause;
    };
    match error.raw_os_error() {
        // "not listening": `close` has shut it down
        Some(libc::EINVAL | libc::EBADF) => AfterAccept::Stop,
        // The connection died in the backlog, or a signal came; accept(2) names the network errors.
        Some(
            libc::ECONNABORTED
            | libc::EINTR
            | libc::EPROTO
            | libc::ENETDOWN
            | libc::ENETUNREACH
            | libc::EHOSTDOWN
            | libc::EHOSTUNREACH
            | libc::ENOPROTOOPT
            | libc::ENONET,
        ) => AfterAccept::Retry,
        // EMFILE, ENFILE, ENOBUFS, ENOMEM, EPERM, and what is not known: it may last.
        _ => AfterAccept::Pause,
    }
}

impl<H: FrontHooks> Front<H> {
    const fn gate(&self, kind: PeerKind) -> &Gate {
        match kind {
            PeerKind::Node => &self.nodes,
            PeerKind::Client => &self.clients,
        }
    }

    /// Gives the connection a task of its own, which ends with its permit.
    fn begin(self: &Rc<Self>, stream: TcpStream, kind: PeerKind, permit: StaticPermit) {
        let place = self.gate(kind).free.borrow_mut().pop();
        let place = place.expect("as many places as permits, and this one has a permit");
        let front = Rc::clone(self);
        let task = spawn_local(async move {
            front.receive(stream, kind).await;
            front.gate(kind).free.borrow_mut().push(place);
            drop(permit);
        });
        self.gate(kind).tasks.borrow_mut()[place] = Some(task);
    }

    /// One connection, from accept to the lane or to its end.
    async fn receive(&self, mut stream: TcpStream, kind: PeerKind) {
        self.hooks.borrow_mut().accepted(kind);
        let live = self.live.get();
        let peer = match prepare(&stream, kind, &live) {
            Ok(peer) => peer,
            Err(error) => return self.refused(kind, None, &error.into()),
        };
        let has_place = kind == PeerKind::Node || self.admit_client();
        let refusal = match shake(&mut stream, kind, &live).await {
            Ok(ready) if has_place => match self.duplicate(&stream, kind, live.handshake()).await {
                Ok(fd) => {
                    drop(stream); // ends the runtime's polls on the socket, before a shard has it
                    let parcel = Box::new(to_handover(kind, fd, ready, peer));
                    self.deliver(kind, parcel).await;
                    return self.hooks.borrow_mut().handed_over(kind);
                }
                Err(error) => error.into(),
            },
            Ok(ready) => handshake::client_full(ready),
            Err(refusal) => refusal,
        };
        if kind == PeerKind::Client && has_place {
            self.clients_admitted.update(|clients| clients - 1);
        }
        self.refused(kind, Some(peer), &refusal);
        handshake::part(&mut stream, &refusal).await;
    }

    /// A second descriptor, for the shard; waits for one as long as a handshake may take.
    async fn duplicate(
        &self,
        stream: &TcpStream,
        kind: PeerKind,
        limit: Duration,
    ) -> io::Result<OwnedFd> {
        let deadline = Instant::now() + limit;
        loop {
            match handover::duplicate(stream) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EMFILE) && Instant::now() < deadline =>
                {
                    self.hooks.borrow_mut().accept_paused(kind);
                    sleep(ACCEPT_PAUSE).await;
                }
                done => return done,
            }
        }
    }

    /// Counts a client in, unless the Edge is full.
    fn admit_client(&self) -> bool {
        let present = self
            .clients_admitted
            .get()
            .saturating_sub(self.hooks.borrow().clients_released());
        let has_place = present < self.clients_max;
        if has_place {
            self.clients_admitted.update(|clients| clients + 1);
        }
        has_place
    }

    /// Waits for room in a lane, without spinning and without losing the connection.
    async fn deliver(&self, kind: PeerKind, mut parcel: Box<Handover>) {
        loop {
            {
                let mut doors = self.doors.borrow_mut();
                let least = self.least_loaded(kind, doors.len());
                let door = &mut doors[least];
                match door.parcels.push(parcel) {
                    Ok(()) => return door.waker.ring(),
                    Err(Full(returned)) => parcel = returned,
                }
            }
            sleep(LANE_PAUSE).await;
        }
    }

    /// The search starts behind the last choice, so that equal loads take turns.
    fn least_loaded(&self, kind: PeerKind, shards: usize) -> usize {
        let hooks = self.hooks.borrow();
        let first = self.next_door.get();
        let least = (0..shards)
            .map(|step| (first + step) % shards)
            .min_by_key(|&shard| hooks.load(kind, shard))
            .expect("at least one shard");
        self.next_door.set((least + 1) % shards);
        least
    }

    fn refused(&self, kind: PeerKind, peer: Option<SocketAddr>, refusal: &Refusal) {
        self.hooks.borrow_mut().refused(kind, refusal.reason);
        let Some(suppressed) = self.log.borrow_mut().pass(Instant::now()) else {
            return;
        };
        let peer = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
        tracing::warn!(
            kind = kind.label(),
            peer,
            reason = refusal.reason.label(),
            detail = refusal.detail,
            suppressed,
            "connection refused"
        );
    }
}

/// Socket options, and who it is. Fails when the peer has left already.
fn prepare(stream: &TcpStream, kind: PeerKind, live: &FrontLive) -> io::Result<SocketAddr> {
    let fd = handover::borrow(stream);
    let socket = SockRef::from(&fd);
    socket.set_cloexec(true)?; // the runtime's accept does not always say so
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_PROBES),
    )?;
    match kind {
        PeerKind::Node => {
            socket.set_tcp_user_timeout(Some(Duration::from_millis(live.dead_ms)))?;
        }
        PeerKind::Client => {}
    }
    let peer = socket.peer_addr()?.as_socket();
    peer.ok_or_else(|| io::Error::other("not an IP socket"))
}

async fn shake(stream: &mut TcpStream, kind: PeerKind, live: &FrontLive) -> Result<Ready, Refusal> {
    let shaking = async {
        Ok(match (kind, &live.node_security, &live.client_tls) {
            (PeerKind::Node, NodeSecurity::Tls { tls, trust_domain }, _) => {
                handshake::node_tls(stream, tls, trust_domain, &live.names).await
            }
            (PeerKind::Node, NodeSecurity::InsecurePlaintext, _) => {
                handshake::node_plaintext(stream).await
            }
            (PeerKind::Client, _, Some(tls)) => handshake::client_tls(stream, tls).await,
            (PeerKind::Client, _, None) => Ok(Ready::untouched()),
        })
    };
    timeout(live.handshake(), shaking)
        .await
        .unwrap_or_else(|_: GlommioError<()>| {
            Err(Refusal::new(Reason::TlsHandshakeTimeout, "deadline passed"))
        })
}

fn to_handover(kind: PeerKind, fd: OwnedFd, ready: Ready, peer: SocketAddr) -> Handover {
    let Ready {
        records,
        early,
        certificate_name,
        not_after_unix,
    } = ready;
    match kind {
        PeerKind::Node => Handover::Node(NodeHandover {
            fd,
            records,
            early,
            certificate_name,
            not_after_unix,
            peer,
        }),
        PeerKind::Client => Handover::Client(ClientHandover {
            fd,
            records,
            early,
            peer,
        }),
    }
}

/// Lets a few lines per second through and counts the others.
struct LogGate {
    second: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogGate {
    const fn new(now: Instant) -> Self {
        Self {
            second: now,
            lines: 0,
            suppressed: 0,
        }
    }

    /// `Some(lines kept back since the last one)` when this line may be written.
    fn pass(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.lines = 0;
        }
        if self.lines == LOG_LINES_PER_SECOND_MAX {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(core::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_writes_ten_lines_a_second_and_counts_the_rest() {
        let start = Instant::now();
        let mut gate = LogGate::new(start);
        let written = (0..1_000).filter(|_| gate.pass(start).is_some()).count();
        assert_eq!(written, LOG_LINES_PER_SECOND_MAX as usize);
        let later = start + Duration::from_secs(1);
        assert_eq!(gate.pass(later), Some(990));
        assert_eq!(gate.pass(later), Some(0));
    }

    #[test]
    fn accept_errors_pause_only_when_they_may_last() {
        let after = |code| after_accept_error(&io::Error::from_raw_os_error(code).into());
        for code in [
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOBUFS,
            libc::ENOMEM,
            libc::EAGAIN,
        ] {
            assert!(matches!(after(code), AfterAccept::Pause), "{code}");
        }
        assert!(matches!(after(libc::ECONNABORTED), AfterAccept::Retry));
        assert!(matches!(after(libc::EINVAL), AfterAccept::Stop));
    }
}
