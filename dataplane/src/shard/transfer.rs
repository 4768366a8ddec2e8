//! A client connection moves to the shard of its node, with its request, and stays there. `[D-33]`
//!
//! Lives on: A, the shard that has the client, then B, the shard that has the node's session. Bound:
//! one parcel per client; what does not fit the lane waits in `held`, at most one per slot.
//!
//! ```text
//! A: Grant ─► Leaving: reads are cancelled, all is joined ─► parcel ─► A knows nothing of it
//!                └─ control's time for the run to begin is over: NotSent, it waits here
//! B: parcel ─► slot dead, or session gone? NotSent : queued for the session's writer
//! ```
//! A body's blocks stay the property of the shard that collected them: they travel on loan and come
//! back as a list of rows.
use std::collections::VecDeque;
use std::time::Duration;

use iop_control::step::Event;
use iop_proto::ids::{ProviderIndex, RunRef, SessionRef, ShardIndex};
use iop_ring::spsc::{Consumer, Full, Producer, channel};

use super::body::{Lent, Request};
use super::client::{Client, Phase};
use super::turn::SWEEP_MS;
use super::uring::Token;
use super::{Shard, piece, slot_of};
use crate::hooks;
use crate::lanes::Waker;
use crate::metrics::ShardMetric;

/// Parcels a lane between two shards holds.
const LANE_SLOTS: usize = 256;
/// Parcels taken from one peer per turn.
const PARCELS_PER_PEER_TURN_MAX: usize = 64;

/// Where a leaving client's run was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    pub run: RunRef,
    pub session: SessionRef,
    pub provider: ProviderIndex,
}

/// A connection on its way, nothing of it left behind.
#[derive(Debug)]
pub(super) struct Moving {
    client: Client,
    granted: Granted,
    request: Request,
    /// Copies of what lay in the old shard's blocks: head, early bytes, part of a record.
    head: Vec<u8>,
    early: Vec<u8>,
    carried: Vec<u8>,
}

/// What one shard sends another. Opaque outside the shard.
#[derive(Debug)]
pub struct Parcel(Content);

#[derive(Debug)]
enum Content {
    Client(Box<Moving>),
    /// Blocks that were on loan.
    Blocks(Lent),
}

/// One shard's lanes to and from every other.
#[derive(Debug)]
pub struct Peers {
    /// By shard; `None` for oneself.
    to: Vec<Option<(Producer<Box<Parcel>>, Waker)>>,
    from: Vec<Consumer<Box<Parcel>>>,
    /// Parcels that found their lane full, in order.
    held: VecDeque<(usize, Box<Parcel>)>,
    unrung: Vec<bool>,
    dawdle: Dawdle,
}

/// Waits of a seeded random length at each step of a move, where a test has asked for them.
#[derive(Debug)]
struct Dawdle {
    state: u64,
    longest_us: u64,
}

impl Dawdle {
    fn new(shard: usize) -> Self {
        let asked = hooks::value(hooks::TRANSFER_DELAY_US);
        let longest_us = asked.and_then(|text| text.to_str()?.parse().ok());
        Self {
            state: 0x9e37_79b9_7f4a_7c15 ^ shard as u64,
            longest_us: longest_us.unwrap_or(0),
        }
    }

    fn step(&mut self) {
        if self.longest_us == 0 {
            return;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let wait = self.state % self.longest_us;
        std::thread::sleep(Duration::from_micros(wait));
    }
}

impl Peers {
    /// Lanes between all of `wakers`' shards, one set each.
    #[must_use]
    pub fn mesh(wakers: &[Waker]) -> Vec<Self> {
        let count = wakers.len();
        let mut peers: Vec<Self> = (0..count)
            .map(|shard| Self {
                to: (0..count).map(|_| None).collect(),
                from: Vec::with_capacity(count),
                held: VecDeque::new(),
                unrung: vec![false; count],
                dawdle: Dawdle::new(shard),
            })
            .collect();
        for from in 0..count {
            for to in (0..count).filter(|&to| to != from) {
                let (producer, consumer) = channel(LANE_SLOTS);
                peers[from].to[to] = Some((producer, wakers[to].clone()));
                peers[to].from.push(consumer);
            }
        }
        peers
    }

    fn post(&mut self, to: usize, content: Content) {
        self.dawdle.step();
        let parcel = Box::new(Parcel(content));
        if self.held.iter().any(|&(held, _)| held == to) {
            self.held.push_back((to, parcel)); // behind those that wait already
            return;
        }
        self.push(to, parcel);
    }

    fn push(&mut self, to: usize, parcel: Box<Parcel>) {
        let lane = self.to[to].as_mut().expect("a shard posts to others only");
        match lane.0.push(parcel) {
            Ok(()) => self.unrung[to] = true,
            Err(Full(parcel)) => self.held.push_back((to, parcel)),
        }
    }

    /// Tries what was held again, and rings whoever got something.
    pub(super) fn flush(&mut self) {
        for _ in 0..self.held.len() {
            let Some((to, parcel)) = self.held.pop_front() else {
                break;
            };
            self.push(to, parcel);
        }
        for (unrung, lane) in self.unrung.iter_mut().zip(&self.to) {
            if std::mem::take(unrung)
                && let Some((_, waker)) = lane
            {
                waker.ring();
            }
        }
    }

    pub(super) fn is_waiting(&mut self) -> bool {
        self.from.iter_mut().any(|lane| !lane.is_empty())
    }

    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }
}

impl Shard {
    // ── A ────────────────────────────────────────────────────────────────────────────────────────

    /// The waiting client's run is on another shard: takes its operations back, then sends it.
    pub(super) fn leave(&mut self, row: usize, granted: Granted) {
        self.peers.dawdle.step();
        // Later than control's own deadline: what becomes of the run is decided there.
        let wait_ms = self.config.names.queue.dispatch_ms + SWEEP_MS;
        let client = &mut self.clients[row];
        client.phase = Phase::Leaving { granted };
        client.deadline = Some(self.now.after_ms(wait_ms));
        let (slot, generation) = (slot_of(row), client.generation);
        for (armed, kind) in client.armed_inputs() {
            if armed {
                self.ring.cancel(Token::new(kind, slot, generation));
            }
        }
        self.try_leave(row);
    }

    /// Sends a leaving client once every operation has completed.
    pub(super) fn try_leave(&mut self, row: usize) {
        let Phase::Leaving { granted } = self.clients[row].phase else {
            return;
        };
        self.peers.dawdle.step();
        if self.clients[row].operations > 0 || !self.clients[row].output.is_idle() {
            return;
        }
        let early = self.take_early(row);
        self.clients[row].deadline = None;
        let mut client = std::mem::replace(&mut self.clients[row], Client::free());
        // The slot keeps its count of tenants: nothing that names this one may find the next.
        self.clients[row].generation = client.generation;
        self.clients[row].in_dirty = client.in_dirty;
        self.free_clients.push(slot_of(row));
        self.metrics.dec(ShardMetric::Clients);
        let head = client.head.take().map_or_else(Vec::new, |block| {
            let bytes = block[..client.head_length].to_vec();
            self.heads.give(block);
            bytes
        });
        let carried = client.take_carried(&mut self.carry);
        let mut request = client.request.take();
        request.body = request.body.lend(&mut self.bodies, self.index);
        let to = granted.session.shard.row();
        self.peers.post(
            to,
            Content::Client(Box::new(Moving {
                client,
                granted,
                request,
                head,
                early,
                carried,
            })),
        );
        self.metrics.inc(ShardMetric::ClientTransfers);
    }

    /// The client has not left in time: an answer before this one, or one of its operations, holds it.
    /// Its run comes back, and it waits here for what control says to that. What control has told the
    /// run's own shard finds nobody there, then or later. `[states §3: Selected]` `[D-32]`
    pub(super) fn stay(&mut self, row: usize, granted: Granted) {
        let client = &mut self.clients[row];
        client.phase = Phase::Waiting;
        client.deadline = None;
        client.lease = None;
        let reference = self.client_reference(row);
        self.outbox.owe(Event::NotSent {
            run: granted.run,
            client: Some(reference),
        });
        self.arm_client_input(row);
    }

    /// A copy of the bytes that came too early; their blocks go back.
    fn take_early(&mut self, row: usize) -> Vec<u8> {
        let mut early = self.clients[row].early.take();
        let mut bytes = Vec::with_capacity(piece(early.bytes()));
        for piece in self.early.pieces(&early) {
            bytes.extend_from_slice(piece);
        }
        self.early.clear(&mut early);
        bytes
    }

    // ── B ────────────────────────────────────────────────────────────────────────────────────────

    /// What other shards have sent, each peer up to its quota.
    pub(super) fn peer_parcels(&mut self) {
        for peer in 0..self.peers.from.len() {
            for _ in 0..PARCELS_PER_PEER_TURN_MAX {
                let Some(parcel) = self.peers.from[peer].pop() else {
                    break;
                };
                match parcel.0 {
                    Content::Client(moving) => self.client_moves_in(*moving),
                    Content::Blocks(lent) => self.bodies.take_back(&lent.blocks),
                }
            }
        }
    }

    /// A connection arrives with its granted run. `[D-32]`
    fn client_moves_in(&mut self, moving: Moving) {
        self.peers.dawdle.step();
        let Moving {
            mut client,
            granted,
            request,
            head,
            early,
            carried,
        } = moving;
        let row = self
            .free_clients
            .pop()
            .expect("every shard has a slot for every client") as usize;
        client.generation = self.clients[row].generation + 1;
        client.phase = Phase::Waiting;
        client.in_dirty = self.clients[row].in_dirty;
        self.clients[row] = client;
        self.clients_high = self.clients_high.max(row + 1);
        self.metrics.inc(ShardMetric::Clients);
        let placed = self.place_head(row, &head)
            && self
                .early
                .append(&mut self.clients[row].early, &early)
                .is_ok()
            && self.clients[row].place_carried(&carried, &mut self.carry);
        if !placed {
            // Every shard has blocks for every client, so this is a bug of ours; shed the client.
            self.let_go(request);
            self.outbox.owe(Event::NotSent {
                run: granted.run,
                client: None,
            });
            self.clients[row].phase = Phase::Flushing;
            self.close_client(row, true);
            return;
        }
        self.clients[row].request = request;
        let lease = self.clients[row].lease.take();
        let reference = self.client_reference(row);
        let slot = granted.run.slot as usize;
        if self.runs[slot].dead.take() == Some(granted.run) {
            self.outbox.owe(Event::NotSent {
                run: granted.run,
                client: Some(reference),
            });
        } else {
            let Granted {
                run,
                session,
                provider,
            } = granted;
            self.grant(reference, run, session, provider, lease);
        }
        self.arm_client_input(row);
    }

    fn place_head(&mut self, row: usize, head: &[u8]) -> bool {
        if head.is_empty() {
            return true;
        }
        let Some(block) = self.heads.take() else {
            return false;
        };
        block[..head.len()].copy_from_slice(head);
        self.clients[row].head = Some(block);
        true
    }

    // ── loans ────────────────────────────────────────────────────────────────────────────────────

    /// Lets go of a request: its blocks go back to the pool they are from.
    pub(super) fn let_go(&mut self, mut request: Request) {
        if let Some(lent) = request.body.clear(&mut self.bodies) {
            if lent.owner == self.index {
                self.bodies.take_back(&lent.blocks);
            } else {
                let owner: ShardIndex = lent.owner;
                self.peers.post(owner.row(), Content::Blocks(lent));
            }
        }
    }
}

#[cfg(test)]
mod tests;
