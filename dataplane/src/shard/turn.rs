//! HOT. The loop of a shard: what one turn does, in which order, and what it gives back.
//!
//! Lives on: one shard. Bound: `COMPLETIONS_PER_TURN_MAX` completions, `PARCELS_PER_TURN_MAX`
//! hand-overs, `EFFECTS_PER_TURN_MAX` effects a turn.
//!
//! No receive buffer outlives its turn: those that a turn reaped go back when its sends have settled,
//! which is first thing after the next enter. `[D-34]`
use std::os::fd::AsRawFd;
use std::time::Duration;

use iop_control::step::{Effect, Event};
use iop_proto::ids::Now;
use iop_proto::limits::{
    ASSEMBLED_BYTES_MAX, BLOCK_BYTES, COMPLETIONS_PER_TURN_MAX, RECORD_PLAIN_BYTES_MAX,
};
use iop_proto::reason::Reason;

use super::client::Phase;
use super::session::{Standing, State};
use super::uring::{Completion, Kind, Token};
use super::{CLIENT_GROUP, NODE_GROUP, Shard, slot_of};
use crate::front::handover::Handover;
use crate::metrics::ShardMetric;

const PARCELS_PER_TURN_MAX: usize = 64;
const EFFECTS_PER_TURN_MAX: usize = 256;
/// How often deadlines are looked at, ms: what a wait may be late by.
pub(super) const SWEEP_MS: u64 = 100;
/// A client that took nothing of its output for this long gives way first, ms. `[D-06]`
const STUCK_MS: u64 = 1_000;
/// Longest sleep with nothing open.
const IDLE_MS: u64 = 1_000;

impl Shard {
    /// Runs the shard for ever.
    pub fn run(mut self) -> ! {
        let wake = self.waker.clone();
        self.ring.read_wake(wake.fd().as_raw_fd());
        loop {
            let timeout = self.sleep_for();
            self.ring.submit_and_wait(timeout);
            self.waker.awake();
            self.turn();
        }
    }

    /// How long the kernel may keep us: not at all while something waits in a lane or the inbox.
    fn sleep_for(&mut self) -> Duration {
        let settle_soon = std::mem::take(&mut self.settle_soon);
        if settle_soon
            || self.inbox_at < self.inbox.len()
            || !self.closing.is_empty()
            || !self.rearm.is_empty()
        {
            return Duration::ZERO;
        }
        self.waker.prepare();
        let waiting = !self.lanes.effects.is_empty()
            || (!self.outbox.is_waiting() && !self.arrivals.is_empty())
            || self.peers.is_waiting()
            || self
                .issuer
                .as_mut()
                .is_some_and(|issuer| issuer.is_waiting());
        if waiting {
            return Duration::ZERO;
        }
        if self.outbox.is_waiting() || self.peers.is_holding() {
            return Duration::from_millis(1); // control is behind; it makes room without ringing
        }
        let open = self.metrics.get(ShardMetric::Sessions) + self.metrics.get(ShardMetric::Clients);
        Duration::from_millis(if open == 0 && self.runs_live == 0 {
            IDLE_MS
        } else {
            SWEEP_MS
        })
    }

    /// One turn. `submit_and_wait` has just returned.
    pub(super) fn turn(&mut self) {
        let elapsed = self.started.elapsed().as_nanos();
        self.now = Now::from_nanos(u64::try_from(elapsed).unwrap_or(u64::MAX)).max(self.now);
        self.metrics.inc(ShardMetric::Turns);
        let from = self.inbox.len();
        self.ring.reap(&mut self.inbox);
        self.settle(from);
        self.return_buffers();
        self.completions();
        self.parcels();
        self.peer_parcels();
        self.effects();
        self.credentials();
        self.due();
        self.relieve_output();
        self.settle_closing();
        self.flush();
        self.rearm();
        self.peers.flush();
        if self.outbox.push(&mut self.lanes.events) {
            self.lanes.control.ring();
        }
        self.publish_gauges();
    }

    /// Direct sends of the last submit have finished; what fell short is among `inbox[from..]`.
    fn settle(&mut self, from: usize) {
        for at in from..self.inbox.len() {
            let completion = self.inbox[at];
            if completion.token.kind() == Kind::ClientDirect {
                self.inbox[at].token = Token::IGNORED;
                self.client_direct_short(completion.token.slot(), completion.result);
            }
        }
        for gather in 0..self.sender.used() {
            self.client_direct_settled(gather);
        }
        self.sender.settled();
    }

    /// Every gather is in use: sends what was gathered, so that they can be used again. The turn's
    /// receive buffers stay ours.
    pub(super) fn settle_early(&mut self) {
        for at in 0..self.dirty_clients.len() {
            let row = self.dirty_clients[at] as usize;
            self.flush_client(row);
        }
        self.ring.submit();
        let from = self.inbox.len();
        self.ring.reap(&mut self.inbox);
        self.settle(from);
    }

    fn return_buffers(&mut self) {
        for (group, id) in self.taken.drain(..) {
            match group {
                NODE_GROUP => self.node_buffers.give(id),
                _ => self.client_buffers.give(id),
            }
        }
        self.node_buffers.publish();
        self.client_buffers.publish();
        for block in self.spent.drain(..) {
            self.carry.give(block);
        }
        for block in self.spent_assemblies.drain(..) {
            self.assembly.give(block);
        }
        assert!(
            self.node_buffers.out() == 0 && self.client_buffers.out() == 0,
            "a receive buffer outlived its turn"
        );
    }

    fn completions(&mut self) {
        let end = self
            .inbox
            .len()
            .min(self.inbox_at + COMPLETIONS_PER_TURN_MAX as usize);
        let first = self.inbox_at;
        while self.inbox_at < end {
            let completion = self.inbox[self.inbox_at];
            self.inbox_at += 1;
            self.complete(completion);
        }
        self.metrics
            .add(ShardMetric::Completions, (end - first) as u64);
        if self.inbox_at == self.inbox.len() {
            self.inbox.clear();
            self.inbox_at = 0;
        } else {
            self.inbox.drain(..self.inbox_at); // room for whatever else can complete
            self.inbox_at = 0;
        }
    }

    fn complete(&mut self, completion: Completion) {
        let token = completion.token;
        let (row, result) = (token.slot(), completion.result);
        match token.kind() {
            Kind::Ignored | Kind::ClientDirect => {}
            Kind::Wake => {
                let wake = self.waker.clone();
                self.ring.read_wake(wake.fd().as_raw_fd());
            }
            Kind::SessionReceive => {
                let data = self.received(NODE_GROUP, &completion);
                if self.sessions[row].generation == token.generation() {
                    self.session_received(row, data, result, completion.more());
                }
            }
            Kind::SessionSend => {
                if self.sessions[row].generation == token.generation() {
                    self.session_sent(row, result);
                }
            }
            Kind::ClientReceive => {
                let data = self.received(CLIENT_GROUP, &completion);
                if self.clients[row].generation == token.generation() {
                    self.client_received(row, data, result);
                }
            }
            Kind::ClientSend => {
                if self.clients[row].generation == token.generation() {
                    self.client_sent(row, result);
                }
            }
            Kind::ClientHangup => {
                if self.clients[row].generation == token.generation() {
                    self.client_hung_up(row, result);
                }
            }
        }
    }

    /// The receive buffer of a completion; ours until the turn has settled.
    fn received(&mut self, group: u16, completion: &Completion) -> Option<&'static mut [u8]> {
        let id = completion.buffer()?;
        self.taken.push((group, id));
        let length = usize::try_from(completion.result).unwrap_or(0);
        let buffers = if group == NODE_GROUP {
            &mut self.node_buffers
        } else {
            &mut self.client_buffers
        };
        Some(buffers.take(id, length))
    }

    /// New connections wait while control is behind: a slot's next tenant then owes nothing on top of
    /// what its last one still does.
    fn parcels(&mut self) {
        if self.outbox.is_waiting() {
            return;
        }
        for _ in 0..PARCELS_PER_TURN_MAX {
            let Some(handover) = self.arrivals.pop() else {
                break;
            };
            match *handover {
                Handover::Node(node) => self.session_arrives(node),
                Handover::Client(client) => self.client_arrives(client),
            }
        }
    }

    fn effects(&mut self) {
        for _ in 0..EFFECTS_PER_TURN_MAX {
            let Some(effect) = self.lanes.effects.pop() else {
                break;
            };
            self.effect(effect);
        }
    }

    fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::RegisterReply {
                session,
                reply_to,
                node,
                refusal,
                close,
            } => self.register_reply(session, reply_to, node, refusal, close),
            Effect::ReadyReply {
                session,
                reply_to,
                refusal,
            } => self.ready_reply(session, reply_to, refusal),
            Effect::Refresh {
                session,
                refresh,
                node,
            } => self.refresh(session, refresh, node),
            Effect::Configure { epoch, .. } => self.configure(epoch),
            Effect::Close { session, cause } => {
                if let Some(row) = self.session_of(session) {
                    self.close_session(row, cause);
                }
            }
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => self.grant(client, run, session, provider, None),
            Effect::Refuse {
                client,
                reason,
                retry_after_s,
            } => {
                if let Some(row) = self.waiting_client(client) {
                    self.refuse_by_control(row, reason, retry_after_s);
                }
            }
            Effect::Cancel { run, reason } => self.cancel_by_control(run, reason),
            Effect::Handoff {
                client,
                handoff,
                recovers,
            } => self.handed_off(client, handoff, recovers),
            Effect::Command {
                session,
                command,
                kind,
                provider,
            } => self.command(session, command, kind, provider),
            Effect::Ping { token } => self.outbox.owe(Event::Pong { token }),
            Effect::Drain { grace_ms, .. } => self.drain(grace_ms),
            Effect::Stop { .. } => self.stop(),
        }
    }

    /// No new work from here on; what runs may finish. `[D-07]`
    fn drain(&mut self, grace_ms: u32) {
        self.draining = true;
        for row in 0..self.sessions.len() {
            let session = &self.sessions[row];
            if session.state == State::Open && session.standing == Standing::Ready {
                let queued = self.queue_go_away(row, grace_ms);
                if let Err(reason) = queued {
                    self.close_session(row, reason);
                }
            }
        }
        // Idle connections stay: what still comes on them is told why it is refused.
        self.count_requests();
        self.metrics.set(ShardMetric::Draining, 1);
    }

    /// Requests in any phase, and answers that are not in their sockets yet.
    fn count_requests(&mut self) {
        let open = self.clients[..self.clients_high]
            .iter()
            .filter(|client| match client.phase {
                Phase::Free | Phase::Closing => false,
                Phase::Head | Phase::Draining => !client.output.is_idle(),
                Phase::Body
                | Phase::Waiting
                | Phase::Leaving { .. }
                | Phase::Running { .. }
                | Phase::Parked { .. }
                | Phase::Flushing => true,
            });
        self.metrics
            .set(ShardMetric::RequestsOpen, open.count() as u64);
    }

    /// The grace is over: what still runs is told so, and ends.
    fn stop(&mut self) {
        self.draining = true;
        for row in 0..self.clients_high {
            match self.clients[row].phase {
                Phase::Running { run } => self.fail_run(run as usize, Reason::Draining),
                Phase::Waiting | Phase::Leaving { .. } | Phase::Parked { .. } => {
                    self.client_ends(row, Reason::Draining);
                }
                Phase::Head | Phase::Body => self.close_client(row, true),
                Phase::Free | Phase::Flushing | Phase::Draining | Phase::Closing => {}
            }
        }
    }

    /// Deadlines, a few times a second.
    fn due(&mut self) {
        if self.now.ms_since(self.swept) < SWEEP_MS {
            return;
        }
        self.swept = self.now;
        self.sessions_due();
        for row in 0..self.clients_high {
            self.client_due(row);
        }
        for row in 0..self.runs_high {
            self.run_due(row);
        }
        self.count_requests();
    }

    /// Above three quarters of the output pool the client that holds most of it and takes least gives
    /// way. `[D-06]`
    fn relieve_output(&mut self) {
        let limit = self.sender.pool.count() / 4 * 3;
        // What is coming is counted only when it matters: that looks at every client.
        while self.sender.pool.used() > limit
            && self.sender.pool.used() > limit + self.coming()
            && self.shed_largest()
        {}
    }

    /// Makes sure that the output pool can take `bytes`, at the cost of whoever holds most of it: a
    /// client that reads is not ended because others do not.
    pub(super) fn make_room(&mut self, bytes: usize) {
        // Sealed records are longer than what they carry, and begin in a block of their own.
        let blocks = slot_of(bytes / RECORD_PLAIN_BYTES_MAX as usize) + 2;
        while self.sender.pool.left() < blocks
            && self.sender.pool.left() + self.coming() < blocks
            && self.shed_largest()
        {}
    }

    /// Blocks of the output pool that come back by themselves: the kernel still reads the one block that
    /// each client holds which was closed with a send under way.
    fn coming(&self) -> u32 {
        let coming = self.clients[..self.clients_high]
            .iter()
            .filter(|client| client.phase == Phase::Closing && client.output.pending.bytes() > 0);
        slot_of(coming.count())
    }

    /// Ends the client with the most pending output, those that take none of it first. `false`: nobody
    /// holds anything.
    fn shed_largest(&mut self) -> bool {
        let held = |row: &usize| {
            let client = &self.clients[*row];
            let bytes = match client.phase {
                Phase::Free | Phase::Closing => 0,
                _ => client.output.pending.bytes(),
            };
            (bytes > 0, self.idle_output_ms(*row) >= STUCK_MS, bytes)
        };
        let largest = (0..self.clients_high)
            .max_by_key(held)
            .filter(|row| held(row).0);
        if let Some(row) = largest {
            self.client_ends(row, Reason::ClientTooSlow);
        }
        largest.is_some()
    }

    /// Queues every send of the turn. A flush may dirty others; each round has fewer left.
    fn flush(&mut self) {
        while !self.dirty_clients.is_empty() || !self.dirty_sessions.is_empty() {
            while let Some(row) = self.dirty_clients.pop() {
                let row = row as usize;
                self.clients[row].in_dirty = false;
                self.flush_client(row);
                self.try_free_client(row); // no effect unless it is closing
            }
            while let Some(row) = self.dirty_sessions.pop() {
                self.sessions[row as usize].in_dirty = false;
                self.pump_session(row as usize);
            }
        }
    }

    /// Receives that ended for want of a buffer or of their own: again, now that buffers are back.
    fn rearm(&mut self) {
        while let Some(row) = self.rearm.pop() {
            self.arm_session_receive(row as usize);
        }
        while let Some((row, generation)) = self.rearm_clients.pop() {
            if self.clients[row as usize].is_live(generation) {
                self.arm_client_input(row as usize);
            }
        }
    }

    fn publish_gauges(&mut self) {
        let block = u64::from(BLOCK_BYTES);
        let counts = self.sender.counts;
        let metrics = &mut self.metrics;
        metrics.set(
            ShardMetric::OutputPoolUsed,
            u64::from(self.sender.pool.used()) * block,
        );
        metrics.set(
            ShardMetric::BodyPoolUsed,
            u64::from(self.bodies.used()) * block,
        );
        metrics.set(
            ShardMetric::AssemblyPoolUsed,
            self.assembly.used() as u64 * u64::from(ASSEMBLED_BYTES_MAX),
        );
        metrics.set(ShardMetric::Runs, self.runs_live as u64);
        metrics.set(ShardMetric::SendsDirect, counts.direct);
        metrics.set(ShardMetric::SendsShort, counts.short);
        metrics.set(ShardMetric::SendsWaiting, counts.waiting);
        metrics.set(ShardMetric::PendingCopiedBytes, counts.copied_bytes);
    }
}
