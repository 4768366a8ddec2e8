//! One shard: its ring, its sockets, its slots, and the loop that turns them.
//!
//! Lives on: one thread. View: its own sessions, clients and runs. Bound: every table, pool and queue
//! is made once in `Shard::new` from the configuration; nothing grows afterwards.
//!
//! ```text
//! enter kernel ─► reap ─► settle ─► completions ─► parcels ─► effects ─► due ─► flush ─► (enter)
//!                           │                                                    │
//!                           └── receive buffers of the last turn go back         └── sends queued
//! ```
mod answer;
mod body;
pub mod buffer;
mod client;
mod command;
mod configure;
mod credential;
mod dispatch;
mod envelopes;
mod forward;
mod handoff;
pub mod http1;
mod inbound;
pub mod outbox;
mod output;
mod request;
mod run;
mod run_answer;
pub mod send;
mod session;
pub mod splice;
pub mod transfer;
mod turn;
pub mod uring;
mod window;
mod writer;

use std::sync::Arc;
use std::time::Instant;

use iop_control::names::Names;
use iop_proto::ids::{BootNonce, Now, ShardIndex};
use iop_proto::limits::{
    ASSEMBLED_BYTES_MAX, BLOCK_BYTES, CLIENT_RECEIVE_BUFFERS, CLIENT_RECEIVE_BYTES,
    COMPLETIONS_PER_TURN_MAX, GATHERS_PER_TURN_MAX, HEAD_BYTES_MAX, LENGTH_PREFIX_BYTES,
    OPERATIONS_PER_CLIENT, RECEIVE_BUFFER_BYTES, RECEIVE_BUFFERS, RESPONSE_START_BYTES_MAX,
    RUNS_PER_SHARD_MAX, SESSION_UNSENT_BYTES_MAX, SESSIONS_PER_SHARD_MAX,
};
use iop_ring::spsc::Consumer;

use crate::admin::AnswerSender;
use crate::cold::access_log::AccessSink;
use crate::config::{EdgeConfig, Limits, Timeouts};
use crate::credential::issuer::IssuerPort;
use crate::epoch::Epoch;
use crate::front::handover::Handover;
use crate::keys::KeyTable;
use crate::lanes::{ShardEnd, Waker};
use crate::metrics::{ShardMetric, ShardMetrics};
use crate::surface::openai::ModelCatalog;
use body::Reservations;
use buffer::{Chains, Pool};
use client::Client;
use outbox::Outbox;
use run::Run;
use send::Sender;
use session::Session;
use transfer::Peers;
use uring::{Completion, ReceiveRing, Ring, RingError};

const BLOCK: usize = BLOCK_BYTES as usize;
/// Heads of requests and answers, small answers, pieces on their way into a record. A provider's head
/// becomes an HTTP head no longer than itself and what we add. `[D-02]`
const SCRATCH_BYTES: usize = (RESPONSE_START_BYTES_MAX + HEAD_BYTES_MAX) as usize;
/// Messages assembled at once; one more closes the session that asks. `[D-02]`
const ASSEMBLIES: usize = 16;
/// Sessions beyond two per configured node: connections that will be refused.
const SESSIONS_EXTRA: usize = 16;
/// Blocks of the wire pool a session may hold: unsent bytes, one request head, replies.
const WIRE_BLOCKS_PER_SESSION: u32 = SESSION_UNSENT_BYTES_MAX / BLOCK_BYTES + 12;
/// Blocks of early bytes a client may hold: one receive, with the record it completed.
const EARLY_BLOCKS_PER_CLIENT: u32 = 2;
const NODE_GROUP: u16 = 0;
const CLIENT_GROUP: u16 = 1;

/// What a shard needs of the configuration. Sizes are those of the start; the rest is the present
/// epoch's.
#[derive(Debug)]
pub struct ShardConfig {
    pub names: Arc<Names>,
    pub limits: Limits,
    pub timeouts: Timeouts,
    pub tolerate_half_close: bool,
    /// A stalled request may be asked of another provider. `[D-18]`
    pub recovery: bool,
    pub sessions_max: usize,
    /// Blocks of this shard's share of the pools.
    pub output_blocks: u32,
    pub body_blocks: u32,
}

impl ShardConfig {
    /// One shard's share of `config`.
    #[must_use]
    pub fn new(config: &EdgeConfig) -> Self {
        let share = |bytes: u64| {
            let blocks = bytes / u64::from(config.shards) / u64::from(BLOCK_BYTES);
            u32::try_from(blocks.max(1)).unwrap_or(u32::MAX)
        };
        let sessions = 2 * config.names.nodes.len() + SESSIONS_EXTRA;
        Self {
            names: Arc::clone(&config.names),
            limits: config.limits,
            timeouts: config.timeouts,
            tolerate_half_close: config.tolerate_half_close,
            recovery: config.recovery,
            sessions_max: sessions.min(SESSIONS_PER_SHARD_MAX as usize),
            output_blocks: share(config.limits.output_pool_bytes),
            body_blocks: share(config.limits.body_pool_bytes),
        }
    }

    /// Nodes that may be configured while the process lives: a connection each, and some to refuse.
    #[must_use]
    pub const fn nodes_max(&self) -> usize {
        self.sessions_max - SESSIONS_EXTRA / 2
    }

    /// Bytes a shard reserves, by holder. The kernel commits a page when it is first touched.
    #[must_use]
    pub fn memory(&self) -> [(&'static str, u64); 9] {
        let block = u64::from(BLOCK_BYTES);
        let clients = u64::from(self.limits.clients_max);
        let sessions = self.sessions_max as u64;
        let buffers = u64::from(self.limits.receive_buffers);
        [
            (
                "receive buffers of nodes",
                buffers * u64::from(RECEIVE_BUFFER_BYTES),
            ),
            (
                "receive buffers of clients",
                buffers * u64::from(CLIENT_RECEIVE_BYTES),
            ),
            ("output pool", u64::from(self.output_blocks) * block),
            ("body pool", u64::from(self.body_blocks) * block),
            ("request heads", clients * block),
            (
                "early bytes",
                clients * u64::from(EARLY_BLOCKS_PER_CLIENT) * block,
            ),
            ("carried records", self.carry_blocks() as u64 * block),
            (
                "node output",
                sessions * u64::from(WIRE_BLOCKS_PER_SESSION) * block,
            ),
            (
                "assembled messages",
                ASSEMBLIES as u64 * u64::from(ASSEMBLED_BYTES_MAX),
            ),
        ]
    }

    /// Completions that can wait to be handled: neither the kernel's queue nor the inbox ever has to
    /// leave one out, or a send that fell short could be missed.
    fn completions(&self) -> usize {
        self.limits.clients_max as usize * OPERATIONS_PER_CLIENT as usize
            + self.sessions_max * 2 // the end of a receive, a send
            + (RECEIVE_BUFFERS + CLIENT_RECEIVE_BUFFERS) as usize // one receive each
            + GATHERS_PER_TURN_MAX as usize // direct sends
            + 64 // the bell, answers to cancels
    }

    /// Receive buffers of each group, as the kernel counts them.
    fn receive_buffers(&self) -> u16 {
        u16::try_from(self.limits.receive_buffers).expect("limits holds it below 2^15")
    }

    fn carry_blocks(&self) -> usize {
        self.sessions_max * 3 // a carried record, a partial envelope, a cut frame's tail
            + self.limits.clients_max as usize // a carried record
            + 2 * COMPLETIONS_PER_TURN_MAX as usize // completed in this turn, back when it settled
            + 8 // bytes that came with a hand-over
    }
}

/// What a shard is given besides its configuration.
#[derive(Debug)]
pub struct ShardParts {
    pub index: ShardIndex,
    pub config: ShardConfig,
    /// The configuration at start.
    pub epoch: Arc<Epoch>,
    pub nonce: BootNonce,
    /// Random: request ids start from it.
    pub request_seed: u64,
    pub started: Instant,
    /// Unix seconds at `started`.
    pub epoch_s: u64,
    pub lanes: ShardEnd,
    pub arrivals: Consumer<Box<Handover>>,
    pub waker: Waker,
    pub metrics: ShardMetrics,
    pub access: AccessSink,
    pub peers: Peers,
    /// Whole answers to operators' commands go here.
    pub answers: AnswerSender,
    /// `None`: the credential plane is off.
    pub issuer: Option<IssuerPort>,
}

/// A shard's whole state.
#[derive(Debug)]
pub struct Shard {
    index: ShardIndex,
    config: ShardConfig,
    epoch: Arc<Epoch>,
    keys: Arc<KeyTable>,
    catalog: Arc<ModelCatalog>,
    nonce: BootNonce,
    request_seed: u64,
    requests_made: u64,
    started: Instant,
    /// Unix seconds at `Now` 0.
    epoch_s: u64,
    now: Now,

    ring: Ring,
    node_buffers: ReceiveRing,
    client_buffers: ReceiveRing,
    /// Completions reaped; those below `inbox_at` were handled in this turn.
    inbox: Vec<Completion>,
    inbox_at: usize,
    /// Receive buffers of this turn, by group.
    taken: Vec<(u16, u16)>,
    /// Blocks whose bytes this turn's gathers may point to.
    spent: Vec<&'static mut [u8]>,
    spent_assemblies: Vec<&'static mut [u8]>,

    sessions: Vec<Session>,
    free_sessions: Vec<u32>,
    closing: Vec<u32>,
    rearm: Vec<u32>,
    dirty_sessions: Vec<u32>,

    clients: Vec<Client>,
    free_clients: Vec<u32>,
    clients_high: usize,
    rearm_clients: Vec<(u32, u32)>,
    dirty_clients: Vec<u32>,

    runs: Vec<Run>,
    runs_live: usize,
    runs_high: usize,

    sender: Sender,
    wire: Chains,
    bodies: Chains,
    reservations: Reservations,
    early: Chains,
    carry: Pool,
    heads: Pool,
    assembly: Pool,
    scratch: Box<[u8]>,

    outbox: Outbox,
    lanes: ShardEnd,
    peers: Peers,
    arrivals: Consumer<Box<Handover>>,
    waker: Waker,
    metrics: ShardMetrics,
    access: AccessSink,
    answers: AnswerSender,
    issuer: Option<IssuerPort>,
    swept: Now,
    /// A direct send of this turn holds something up: the next enter does not wait.
    settle_soon: bool,
    draining: bool,
    /// One heap allocation per frame is planted, to see that it is seen.
    plant: bool,
}

impl Shard {
    /// Makes a shard on the calling thread, which will run it.
    ///
    /// # Errors
    /// When the kernel gives no ring or no receive buffers.
    #[expect(clippy::too_many_lines, reason = "one line per table and pool")]
    pub fn new(parts: ShardParts) -> Result<Self, RingError> {
        let ShardParts {
            index,
            config,
            lanes,
            arrivals,
            waker,
            mut metrics,
            ..
        } = parts;
        let completions = config.completions();
        let mut ring = Ring::new(slot_of(completions))?;
        let buffers = config.receive_buffers();
        let node_buffers = ring.receive_buffers(NODE_GROUP, buffers, RECEIVE_BUFFER_BYTES)?;
        let client_buffers = ring.receive_buffers(CLIENT_GROUP, buffers, CLIENT_RECEIVE_BYTES)?;
        let clients = config.limits.clients_max as usize;
        let sessions = config.sessions_max;
        let block = u64::from(BLOCK_BYTES);
        metrics.set(
            ShardMetric::OutputPoolSize,
            u64::from(config.output_blocks) * block,
        );
        metrics.set(
            ShardMetric::BodyPoolSize,
            u64::from(config.body_blocks) * block,
        );
        metrics.set(
            ShardMetric::AssemblyPoolSize,
            ASSEMBLIES as u64 * u64::from(ASSEMBLED_BYTES_MAX),
        );
        Ok(Self {
            index,
            keys: Arc::clone(&parts.epoch.keys),
            catalog: Arc::clone(&parts.epoch.catalog),
            epoch: parts.epoch,
            nonce: parts.nonce,
            request_seed: parts.request_seed,
            requests_made: 0,
            started: parts.started,
            epoch_s: parts.epoch_s,
            now: Now::default(),
            ring,
            node_buffers,
            client_buffers,
            inbox: Vec::with_capacity(completions + COMPLETIONS_PER_TURN_MAX as usize),
            inbox_at: 0,
            taken: Vec::with_capacity((RECEIVE_BUFFERS + CLIENT_RECEIVE_BUFFERS) as usize),
            spent: Vec::with_capacity(config.carry_blocks()),
            spent_assemblies: Vec::with_capacity(ASSEMBLIES),
            sessions: (0..sessions).map(|_| Session::free()).collect(),
            free_sessions: rows(sessions),
            closing: Vec::with_capacity(sessions),
            rearm: Vec::with_capacity(sessions + COMPLETIONS_PER_TURN_MAX as usize),
            dirty_sessions: Vec::with_capacity(sessions),
            clients: (0..clients).map(|_| Client::free()).collect(),
            free_clients: rows(clients),
            clients_high: 0,
            rearm_clients: Vec::with_capacity(clients + COMPLETIONS_PER_TURN_MAX as usize),
            dirty_clients: Vec::with_capacity(clients),
            runs: (0..RUNS_PER_SHARD_MAX).map(|_| Run::free(index)).collect(),
            runs_live: 0,
            runs_high: 0,
            sender: Sender::new(Chains::new(config.output_blocks)),
            wire: Chains::new(slot_of(sessions) * WIRE_BLOCKS_PER_SESSION),
            bodies: Chains::new(config.body_blocks),
            reservations: Reservations::default(),
            early: Chains::new(slot_of(clients) * EARLY_BLOCKS_PER_CLIENT),
            carry: Pool::new(config.carry_blocks(), BLOCK),
            heads: Pool::new(clients, BLOCK),
            assembly: Pool::new(
                ASSEMBLIES,
                (ASSEMBLED_BYTES_MAX + LENGTH_PREFIX_BYTES) as usize,
            ),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            outbox: Outbox::new(sessions, clients),
            config,
            lanes,
            arrivals,
            waker,
            metrics,
            access: parts.access,
            answers: parts.answers,
            issuer: parts.issuer,
            peers: parts.peers,
            swept: Now::default(),
            settle_soon: false,
            draining: false,
            plant: crate::alloc::planted(),
        })
    }
}

/// Free rows, the lowest on top.
fn rows(count: usize) -> Vec<u32> {
    (0..slot_of(count)).rev().collect()
}

/// A row as tokens, references and links carry it.
#[expect(
    clippy::cast_possible_truncation,
    reason = "tables and receive buffers are far below 2^32"
)]
const fn slot_of(row: usize) -> u32 {
    row as u32
}

/// A part of a block or body as slices count it.
#[expect(
    clippy::cast_possible_truncation,
    reason = "64-bit hosts; a body is below 2^32 bytes"
)]
const fn piece(bytes: u64) -> usize {
    bytes as usize
}
