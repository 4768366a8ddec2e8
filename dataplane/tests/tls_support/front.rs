//! A front with shards that do nothing but wait for hand-overs.
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use iop_control::names::{Gone, Names, NodeName, QueueLimits, Waits};
use iop_dataplane::front::{
    self, ClientHandover, FrontConfig, FrontHandle, FrontHooks, FrontLive, Handover, NodeHandover,
    NodeSecurity, PeerKind, ShardDoor,
};
use iop_dataplane::lanes::Waker;
use iop_dataplane::tls::ServerTls;
use iop_proto::limits;
use iop_proto::reason::Reason;
use iop_ring::parcel;
use iop_ring::spsc::Consumer;

use super::{DEADLINE, DOMAIN};

/// Hand-overs a lane of these tests holds.
pub(crate) const LANE_SLOTS: usize = 4;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Accepted(PeerKind),
    HandedOver(PeerKind),
    Refused(PeerKind, Reason),
    Paused(PeerKind),
    Closed(PeerKind),
}

#[derive(Default)]
struct Figures {
    loads: [AtomicU64; 2],
    released: AtomicU64,
}

struct Hooks {
    seen: crossbeam_channel::Sender<Seen>,
    figures: Arc<Figures>,
}

impl Hooks {
    fn tell(&self, seen: Seen) {
        let _ = self.seen.send(seen); // the test may be over
    }
}

impl FrontHooks for Hooks {
    fn load(&self, _: PeerKind, shard: usize) -> u64 {
        self.figures.loads[shard].load(Ordering::SeqCst)
    }

    fn clients_released(&self) -> u64 {
        self.figures.released.load(Ordering::SeqCst)
    }

    fn accepted(&mut self, kind: PeerKind) {
        self.tell(Seen::Accepted(kind));
    }

    fn handed_over(&mut self, kind: PeerKind) {
        self.tell(Seen::HandedOver(kind));
    }

    fn refused(&mut self, kind: PeerKind, reason: Reason) {
        self.tell(Seen::Refused(kind, reason));
    }

    fn accept_paused(&mut self, kind: PeerKind) {
        self.tell(Seen::Paused(kind));
    }

    fn listener_closed(&mut self, kind: PeerKind) {
        self.tell(Seen::Closed(kind));
    }
}

struct Shard {
    arrivals: Consumer<Box<Handover>>,
    waker: Waker,
}

impl Shard {
    /// Sleeps as a shard does: prepare, look once more, block on the descriptor.
    fn next(&mut self) -> Handover {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(handover) = self.arrivals.pop() {
                return *handover;
            }
            self.waker.prepare();
            if self.arrivals.is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(!left.is_zero(), "nothing was handed over");
                let mut poll = libc::pollfd {
                    fd: self.waker.fd().as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                let wait = i32::try_from(left.as_millis()).unwrap();
                // SAFETY: one pollfd, alive for the call.
                if unsafe { libc::poll(&raw mut poll, 1, wait) } == 1 {
                    let fd = self.waker.fd().try_clone_to_owned().unwrap();
                    std::fs::File::from(fd).read_exact(&mut [0; 8]).unwrap();
                }
            }
            self.waker.awake();
        }
    }
}

/// A running front, its two shards, and what it told its hooks.
pub(crate) struct World {
    pub(crate) nodes: SocketAddr,
    pub(crate) clients: SocketAddr,
    pub(crate) handle: Option<FrontHandle>,
    shards: [Shard; 2],
    seen: crossbeam_channel::Receiver<Seen>,
    figures: Arc<Figures>,
}

impl World {
    pub(crate) fn new(tls: ServerTls, change: impl FnOnce(&mut FrontConfig)) -> Self {
        Self::start(
            NodeSecurity::Tls {
                tls,
                trust_domain: DOMAIN.into(),
            },
            change,
        )
    }

    pub(crate) fn insecure(change: impl FnOnce(&mut FrontConfig)) -> Self {
        Self::start(NodeSecurity::InsecurePlaintext, change)
    }

    fn start(node_security: NodeSecurity, change: impl FnOnce(&mut FrontConfig)) -> Self {
        let nodes = front::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let clients = front::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addresses = [nodes.local_addr().unwrap(), clients.local_addr().unwrap()];
        let mut config = FrontConfig {
            nodes,
            clients,
            live: FrontLive {
                node_security,
                client_tls: None,
                names: Arc::new(names(&["n1", "n2"])),
                handshake_ms: limits::TLS_HANDSHAKE_MS_DEFAULT,
                dead_ms: limits::DEAD_MS_DEFAULT,
            },
            clients_max: 100,
            handshakes_max: limits::HANDSHAKES_DEFAULT,
            core: None,
        };
        change(&mut config);
        let (seen_tx, seen) = crossbeam_channel::unbounded();
        let figures = Arc::new(Figures::default());
        let hooks = Hooks {
            seen: seen_tx,
            figures: Arc::clone(&figures),
        };
        let mut doors = Vec::new();
        let shards = [(); 2].map(|()| {
            let waker = Waker::new().unwrap();
            let (parcels, arrivals) = parcel::channel(LANE_SLOTS);
            doors.push(ShardDoor {
                parcels,
                waker: waker.clone(),
            });
            Shard { arrivals, waker }
        });
        // One shard takes all, unless a test says otherwise.
        figures.loads[1].store(u64::MAX, Ordering::SeqCst);
        let handle = Some(front::spawn(config, doors, hooks).unwrap());
        let [nodes, clients] = addresses;
        Self {
            nodes,
            clients,
            handle,
            shards,
            seen,
            figures,
        }
    }

    pub(crate) fn node(&mut self) -> NodeHandover {
        match self.shards[0].next() {
            Handover::Node(node) => node,
            Handover::Client(client) => panic!("a client: {client:?}"),
        }
    }

    pub(crate) fn client(&mut self) -> ClientHandover {
        self.client_on(0)
    }

    pub(crate) fn client_on(&mut self, shard: usize) -> ClientHandover {
        match self.shards[shard].next() {
            Handover::Client(client) => client,
            Handover::Node(node) => panic!("a node: {node:?}"),
        }
    }

    pub(crate) fn set_load(&self, shard: usize, load: u64) {
        self.figures.loads[shard].store(load, Ordering::SeqCst);
    }

    pub(crate) fn release_client(&self) {
        self.figures.released.fetch_add(1, Ordering::SeqCst);
    }

    /// What the front told its hooks next.
    pub(crate) fn seen(&self) -> Seen {
        self.seen
            .recv_timeout(DEADLINE)
            .expect("the front did something")
    }

    pub(crate) fn skip_seen(&self, events: usize) {
        for _ in 0..events {
            self.seen();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.stop();
        }
    }
}

fn names(nodes: &[&str]) -> Names {
    Names {
        nodes: nodes
            .iter()
            .map(|&name| NodeName {
                id: format!("id-of-{name}"),
                certificate_name: name.to_owned(),
                config_payload: Arc::default(),
            })
            .collect(),
        providers: Vec::new(),
        models: Vec::new(),
        queue: QueueLimits {
            waiters_max: 1,
            waiting_bytes_max: 1,
            wait_ms: 1,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    }
}
