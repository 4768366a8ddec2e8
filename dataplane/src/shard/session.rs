//! One node connection: its socket, its standing, its answers, its close.
//!
//! Lives on: one shard. Bound: `sessions_max` slots; per session one carried record, what `envelopes.rs`
//! holds, `REPLIES_PER_SESSION_MAX` answers owed. The ordered writer is in `writer.rs`.
//!
//! ```text
//! Open --close_session--> Closing --runs settled, operations joined--> Free
//! ```
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use iop_control::names::NodePayload;
use iop_control::step::Event;
use iop_proto::ids::{NodeIndex, Now, SessionRef, ShardIndex, SlotGeneration};
use iop_proto::limits::{
    BLOCK_BYTES, REPLIES_PER_SESSION_MAX, RESPONSE_START_BYTES_MAX, VIOLATIONS_PER_MINUTE_MAX,
};
use iop_proto::reason::Reason;
use iop_proto::view::{NodeReadyRequestView, RegisterRequestView};

use super::command::Questions;
use super::configure::Refreshes;
use super::credential::instant_of;
use super::envelopes::{Assembly, Cut};
use super::inbound::{Inbound, Plain};
use super::run::{NONE, Stage};
use super::uring::{Kind, Token};
use super::writer::Writer;
use super::{Shard, slot_of};
use crate::front::handover::NodeHandover;
use crate::metrics::ShardMetric;
use crate::tls::Records;
use crate::tls::record::ReplyBuf;

/// What the session may do, as control last said. `[states §1]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Identity verified; nobody registered. Also after a rejected registration.
    Identified,
    /// Owner of its node id, not dispatch-ready.
    Pending,
    /// Dispatch-ready owner.
    Ready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Open,
    /// Runs below `settle_at` are settled.
    Closing {
        settle_at: u32,
    },
}

/// A closing session's last bytes may take this long, ms.
const LAST_WORDS_MS: u64 = 1_000;

#[derive(Debug)]
pub(super) struct Session {
    pub generation: u32,
    pub state: State,
    pub fd: Option<OwnedFd>,
    pub records: Option<Records>,
    /// The name its certificate bears; `None` only in insecure mode.
    certificate_name: Option<String>,
    /// When the certificate ends, Unix seconds. `[D-05]`
    pub not_after_unix: i64,
    /// The same instant by the clock of this process.
    pub not_after: Now,
    /// Control was told that it has.
    pub expiry_told: bool,
    /// Control was told that the node leaves.
    leaving_told: bool,
    /// It paces its answers to what it is granted. `[states §1 row 20]`
    pub paces: bool,
    pub standing: Standing,
    inbound: Inbound,
    pub partial: Option<&'static mut [u8]>,
    pub partial_length: usize,
    pub assembly: Option<Assembly>,
    pub cut: Option<Cut>,
    pub writer: Writer,
    pub refreshes: Refreshes,
    /// The configuration last sent on this connection. `[A-03]`
    pub payload: Option<Arc<NodePayload>>,
    /// Operations the kernel has not completed.
    pub operations: u8,
    receiving: bool,
    pub last_read: Now,
    pub last_write: Now,
    opened: Now,
    replies_owed: u32,
    /// Answered since the socket last had everything.
    replies_untaken: u32,
    /// Control knows of it and must hear of its close.
    pub announced: bool,
    pub close_when_flushed: Option<Reason>,
    violations: u32,
    violations_since: Now,
    pub questions: Questions,
    pub in_dirty: bool,
}

impl Session {
    pub(super) fn free() -> Self {
        Self {
            generation: 0,
            state: State::Free,
            fd: None,
            records: None,
            certificate_name: None,
            not_after_unix: i64::MAX,
            not_after: Now::default(),
            expiry_told: false,
            leaving_told: false,
            paces: false,
            standing: Standing::Identified,
            inbound: Inbound::default(),
            partial: None,
            partial_length: 0,
            assembly: None,
            cut: None,
            writer: Writer::default(),
            refreshes: Refreshes::default(),
            payload: None,
            operations: 0,
            receiving: false,
            last_read: Now::default(),
            last_write: Now::default(),
            opened: Now::default(),
            replies_owed: 0,
            replies_untaken: 0,
            announced: false,
            close_when_flushed: None,
            violations: 0,
            violations_since: Now::default(),
            questions: Questions::default(),
            in_dirty: false,
        }
    }

    /// The tenant `generation` is here and not closing.
    pub(super) fn is_open(&self, generation: u32) -> bool {
        self.state == State::Open && self.generation == generation
    }

    /// `is_open`, and runs may be dispatched. `[I3.3]`
    pub(super) fn is_ready(&self, generation: u32) -> bool {
        self.is_open(generation) && self.standing == Standing::Ready
    }

    pub(super) fn reference(&self, shard: ShardIndex, slot: usize) -> SessionRef {
        SessionRef {
            shard,
            slot: slot_of(slot),
            generation: SlotGeneration::new(self.generation).expect("a taken slot has a tenant"),
        }
    }
}

/// Rows of the run table looked at in one turn when a session closes.
const SETTLE_ROWS_PER_TURN: u32 = 4096;

impl Shard {
    // ── arrival ──────────────────────────────────────────────────────────────────────────────────

    /// Takes over a verified node connection.
    pub(super) fn session_arrives(&mut self, handover: NodeHandover) {
        let Some(slot) = self.free_sessions.pop() else {
            self.metrics.reason(Reason::SessionsFull);
            return; // dropping it closes the socket
        };
        let row = slot as usize;
        let generation = self.sessions[row].generation + 1;
        super::uring::limit_unsent(&handover.fd);
        self.sessions[row] = Session {
            generation,
            state: State::Open,
            fd: Some(handover.fd),
            records: handover.records,
            certificate_name: handover.certificate_name,
            not_after_unix: handover.not_after_unix,
            not_after: instant_of(handover.not_after_unix, self.now),
            last_read: self.now,
            last_write: self.now,
            opened: self.now,
            violations_since: self.now,
            ..Session::free()
        };
        self.metrics.inc(ShardMetric::Sessions);
        self.arm_session_receive(row);
        for piece in handover.early.chunks(BLOCK_BYTES as usize) {
            let Some(block) = self.carry.take() else {
                self.close_session(row, Reason::AssemblyPoolFull);
                return;
            };
            block[..piece.len()].copy_from_slice(piece);
            let result = self.session_bytes(row, &mut block[..piece.len()]);
            self.spent.push(block);
            if let Err(reason) = result {
                self.close_session(row, reason);
                return;
            }
        }
    }

    pub(super) fn arm_session_receive(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        if session.state != State::Open || session.receiving {
            return;
        }
        let Some(fd) = &session.fd else { return };
        let token = Token::new(Kind::SessionReceive, slot_of(row), session.generation);
        self.ring
            .receive_multi(fd.as_raw_fd(), self.node_buffers.group(), token);
        session.receiving = true;
        session.operations += 1;
    }

    // ── inbound ──────────────────────────────────────────────────────────────────────────────────

    /// The session's receive completed, for good unless `more`.
    pub(super) fn session_received(
        &mut self,
        row: usize,
        data: Option<&mut [u8]>,
        result: i32,
        more: bool,
    ) {
        if !more {
            self.sessions[row].receiving = false;
            self.sessions[row].operations -= 1;
        }
        if self.sessions[row].state != State::Open {
            self.try_free_session(row);
            return;
        }
        let outcome = match (data, result) {
            (Some(data), 1..) => {
                self.sessions[row].last_read = self.now;
                self.metrics
                    .add(ShardMetric::NodeBytesIn, data.len() as u64);
                self.session_bytes(row, data)
            }
            (_, 0) => Err(Reason::PeerClosed),
            (_, error) if -error == libc::ENOBUFS => {
                self.metrics.inc(ShardMetric::ReceiveExhausted);
                Ok(())
            }
            (_, error) if -error == libc::EINTR || -error == libc::EAGAIN => Ok(()),
            (_, _) => Err(Reason::SocketError),
        };
        match outcome {
            Err(reason) => self.close_session(row, reason),
            // Re-armed after the turn has settled, when buffers have returned.
            Ok(()) if !more => self.rearm.push(slot_of(row)),
            Ok(()) => {}
        }
    }

    /// Bytes of the socket, in order.
    fn session_bytes(&mut self, row: usize, data: &mut [u8]) -> Result<(), Reason> {
        let mut reply = ReplyBuf::default();
        let session = &mut self.sessions[row];
        let opened = match &mut session.records {
            Some(records) => session
                .inbound
                .open(records, data, &mut self.carry, &mut reply),
            None => Ok(Plain::of(data)),
        };
        if !reply.is_empty() {
            self.queue_sealed(row, reply.as_slice())?;
        }
        let plain = opened?;
        self.metrics.add(ShardMetric::RecordsOpened, plain.records);
        if let Some((block, length)) = plain.carried {
            let result = self.feed(row, &block[..length]);
            self.spent.push(block);
            result?;
        }
        self.feed(row, plain.direct)?;
        if plain.closed {
            Err(Reason::PeerClosed)
        } else {
            Ok(())
        }
    }

    pub(super) fn session_reference(&self, row: usize) -> SessionRef {
        self.sessions[row].reference(self.index, row)
    }

    fn owe_reply(&mut self, row: usize) -> Result<SessionRef, Reason> {
        let session = &mut self.sessions[row];
        if session.writer.is_idle() {
            session.replies_untaken = 0;
        }
        if session.replies_owed + session.replies_untaken >= REPLIES_PER_SESSION_MAX {
            return Err(Reason::ReplyFlood);
        }
        session.replies_owed += 1;
        session.announced = true;
        Ok(session.reference(self.index, row))
    }

    pub(super) fn register(&mut self, row: usize, id: u64, payload: &[u8]) -> Result<(), Reason> {
        let view = RegisterRequestView::parse(payload).map_err(|error| error.reason())?;
        let claimed = self.config.names.node_by_id(view.node_id);
        let session = self.owe_reply(row)?;
        // By the same table as the claim: the front may have judged by another.
        let certified = match &self.sessions[row].certificate_name {
            Some(name) => self.config.names.node_by_certificate(name),
            None => claimed,
        };
        self.outbox.owe(Event::Register {
            session,
            reply_to: id,
            claimed,
            certified,
        });
        Ok(())
    }

    pub(super) fn ready(&mut self, row: usize, id: u64, payload: &[u8]) -> Result<(), Reason> {
        let view = NodeReadyRequestView::parse(payload).map_err(|error| error.reason())?;
        let claimed = self.config.names.node_by_id(view.node_id);
        let session = self.owe_reply(row)?;
        self.outbox.owe(Event::Ready {
            session,
            reply_to: id,
            claimed,
        });
        Ok(())
    }

    /// Once per session: it leaves for good, and what it may owe control is bounded.
    pub(super) fn go_away(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        if session.standing == Standing::Ready && !session.leaving_told {
            session.leaving_told = true;
            let session = session.reference(self.index, row);
            self.outbox.owe(Event::GoAway { session });
        } else {
            self.metrics.inc(ShardMetric::EnvelopesIgnored);
        }
    }

    // ── control's answers ────────────────────────────────────────────────────────────────────────

    /// The open session behind a reference.
    pub(super) fn session_of(&self, session: SessionRef) -> Option<usize> {
        let row = session.slot as usize;
        let open = self
            .sessions
            .get(row)
            .is_some_and(|s| s.is_open(session.generation.get()));
        open.then_some(row)
    }

    pub(super) fn register_reply(
        &mut self,
        session: SessionRef,
        reply_to: u64,
        node: Option<NodeIndex>,
        refusal: Option<Reason>,
        close: bool,
    ) {
        let Some(row) = self.session_of(session) else {
            return;
        };
        self.sessions[row].replies_owed -= 1;
        if node.is_some_and(|node| !self.is_certified(row, node)) {
            return self.close_session(row, Reason::NodeNotCertified);
        }
        if refusal.is_none() && self.sessions[row].standing == Standing::Identified {
            self.sessions[row].standing = Standing::Pending;
        }
        let queued = self.queue_register_response(row, reply_to, node, refusal);
        self.after_reply(row, queued, refusal.filter(|_| close));
    }

    /// The session's certificate is the node's by the present table. The claim was judged by the table
    /// of its time; if another came between the two, control has put it before this answer. `[D-39]`
    fn is_certified(&self, row: usize, node: NodeIndex) -> bool {
        let name = self.sessions[row].certificate_name.as_ref();
        name.is_none_or(|name| self.config.names.node_by_certificate(name) == Some(node))
    }

    pub(super) fn ready_reply(
        &mut self,
        session: SessionRef,
        reply_to: u64,
        refusal: Option<Reason>,
    ) {
        let Some(row) = self.session_of(session) else {
            return;
        };
        self.sessions[row].replies_owed -= 1;
        if refusal.is_none() {
            self.sessions[row].standing = Standing::Ready;
        }
        let queued = self.queue_ready_response(row, reply_to, refusal);
        self.after_reply(row, queued, None);
    }

    fn after_reply(&mut self, row: usize, queued: Result<(), Reason>, close: Option<Reason>) {
        self.sessions[row].replies_untaken += 1;
        if let Err(reason) = queued {
            self.close_session(row, reason);
        } else if close.is_some() {
            self.sessions[row].close_when_flushed = close;
        }
    }

    // ── violations ───────────────────────────────────────────────────────────────────────────────

    /// Counts a violation of a stream's form; too many close the session. `[D-41]`
    pub(super) fn violation(&mut self, row: usize) -> Result<(), Reason> {
        self.metrics.inc(ShardMetric::StreamViolations);
        let session = &mut self.sessions[row];
        if self.now.ms_since(session.violations_since) >= 60_000 {
            session.violations = 0;
            session.violations_since = self.now;
        }
        session.violations += 1;
        if session.violations > VIOLATIONS_PER_MINUTE_MAX {
            Err(Reason::ViolationsTooMany)
        } else {
            Ok(())
        }
    }

    /// A RESPONSE_START has its own limit.
    pub(super) const fn check_start(payload: &[u8]) -> Result<(), Reason> {
        if payload.len() > RESPONSE_START_BYTES_MAX as usize {
            Err(Reason::EnvelopeTooLong)
        } else {
            Ok(())
        }
    }

    // ── time and close ───────────────────────────────────────────────────────────────────────────

    /// What is due on a session. Called a few times a second.
    pub(super) fn session_due(&mut self, row: usize) {
        let timeouts = &self.config.timeouts;
        let session = &self.sessions[row];
        match session.state {
            State::Free => return,
            State::Closing { .. } => {
                // `last_read` is when the close began.
                if self.now.ms_since(session.last_read) >= LAST_WORDS_MS
                    && session.writer.is_armed()
                {
                    let token = Token::new(Kind::SessionSend, slot_of(row), session.generation);
                    self.ring.cancel(token);
                }
                return self.try_free_session(row);
            }
            State::Open => {}
        }
        let unregistered = session.standing == Standing::Identified && !session.announced;
        let cause = if unregistered && self.now.ms_since(session.opened) >= timeouts.registration_ms
        {
            Some(Reason::RegistrationTimeout)
        } else if self.now.ms_since(session.last_read) >= timeouts.dead_ms {
            Some(Reason::HeartbeatTimeout)
        } else {
            None
        };
        if let Some(cause) = cause {
            self.close_session(row, cause);
        } else if self.now.ms_since(session.last_write) >= timeouts.heartbeat_ms
            && let Err(reason) = self.queue_ping(row)
        {
            self.close_session(row, reason);
        }
    }

    /// Closes a session: nothing is read or sent from here on, its runs are settled in slices.
    pub(super) fn close_session(&mut self, row: usize, cause: Reason) {
        if self.sessions[row].state == State::Open {
            self.metrics.reason(cause);
            self.close_counted(row, cause);
        }
    }

    /// As `close_session`, for a cause that was counted where it was decided.
    pub(super) fn close_counted(&mut self, row: usize, cause: Reason) {
        let session = &mut self.sessions[row];
        if session.state != State::Open {
            return;
        }
        session.state = State::Closing { settle_at: 0 };
        session.last_read = self.now;
        self.metrics.dec(ShardMetric::Sessions);
        if session.announced {
            let session = session.reference(self.index, row);
            self.outbox.owe(Event::Closed { session, cause });
        }
        self.last_words(row, cause);
        let session = &self.sessions[row];
        if session.receiving {
            self.ring.cancel(Token::new(
                Kind::SessionReceive,
                slot_of(row),
                session.generation,
            ));
        }
        self.closing.push(slot_of(row));
    }

    /// Settles a slice of the runs of every closing session.
    pub(super) fn settle_closing(&mut self) {
        let mut at = 0;
        while at < self.closing.len() {
            let row = self.closing[at] as usize;
            let State::Closing { settle_at } = self.sessions[row].state else {
                self.closing.swap_remove(at);
                continue;
            };
            let end = (settle_at + SETTLE_ROWS_PER_TURN).min(slot_of(self.runs.len()));
            let tenant = (slot_of(row), self.sessions[row].generation);
            for run in settle_at as usize..end as usize {
                if self.runs[run].session == tenant {
                    self.settle_lost(run);
                }
            }
            self.sessions[row].state = State::Closing { settle_at: end };
            if end as usize == self.runs.len() {
                self.closing.swap_remove(at);
                self.try_free_session(row);
            } else {
                at += 1;
            }
        }
    }

    fn settle_lost(&mut self, run: usize) {
        match self.runs[run].stage {
            Stage::Free => {}
            Stage::Issuing | Stage::Queued => self.take_back(run, Reason::NodeLost),
            Stage::Begun => {
                if self.runs[run].has_client() {
                    let (client, _) = self.runs[run].client;
                    self.runs[run].client = (NONE, 0);
                    self.client_run_failed(client as usize, Reason::NodeLost);
                }
                self.end_run(run, None);
            }
        }
    }

    /// Frees a closed session's slot once its runs are settled and every operation has completed.
    pub(super) fn try_free_session(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        let settled = matches!(session.state, State::Closing { settle_at } if settle_at as usize == self.runs.len());
        if !settled || session.operations > 0 {
            return;
        }
        session.inbound.clear(&mut self.carry);
        self.drop_partial(row);
        let session = &mut self.sessions[row];
        session.writer.clear(&mut self.wire);
        session.records = None;
        session.fd = None;
        session.refreshes = Refreshes::default();
        session.payload = None;
        session.state = State::Free;
        self.free_sessions.push(slot_of(row));
    }
}

#[cfg(test)]
pub(super) mod tests;
