//! The ordered writer of a node connection: control before bulk, each in its order. `[D-02]`
//!
//! Lives on: one shard. Bound: replies and pings are bounded by their askers, one CancelRequest per
//! run, one Window more than what `WINDOW_UNSENT_BYTES_MAX` holds; bulk is begun only while the socket
//! has taken everything before it and what is sealed fits one send, so that a request that has begun is
//! in the kernel and anything else can be withdrawn.
//!
//! ```text
//! control queue ──┐
//!                 ├──► sealed records ──► one waiting send ──► socket
//! bulk in progress┘         <= SESSION_UNSENT_BYTES_MAX
//! ```
//! An envelope begun is finished first; then control; then the next bulk envelope.
use std::os::fd::AsRawFd;
use std::sync::Arc;

use iop_control::step::Event;
use iop_proto::ids::{NodeIndex, RunId};
use iop_proto::limits::{
    BLOCK_BYTES, LENGTH_PREFIX_BYTES, RECORD_PLAIN_BYTES_MAX, SESSION_UNSENT_BYTES_MAX,
};
use iop_proto::reason::Reason;
use iop_proto::view::{self, RegisterReply};

use super::buffer::Chain;
use super::run::{NONE, Stage};
use super::send::{Socket, seal_into};
use super::session::State;
use super::window::Window;
use super::{Shard, piece, slot_of};
use crate::metrics::ShardMetric;
use crate::tls::record::ReplyBuf;

/// Which part of a request comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    BeforeCut,
    /// The provider's model in place of the client's; nothing in a normalized run.
    Cut,
    BehindCut,
    Tail,
}

/// The bulk envelope in progress.
#[derive(Clone, Copy, Debug)]
struct Bulk {
    run: u32,
    part: Part,
    /// Bytes of the part that are still to be sealed.
    left: u64,
    /// Bytes that its length prefix announced and that are still to be sealed.
    owed: u64,
    /// The hard deadline that its length prefix counts, s: the tail says this one, however late it is
    /// written and whoever has left meanwhile.
    timeout_s: u32,
}

#[derive(Debug)]
pub(super) struct Writer {
    /// Plain envelopes that go before the next bulk one.
    control: Chain,
    /// Run slots whose requests wait, in order.
    first: u32,
    last: u32,
    current: Option<Bulk>,
    /// Places given in the bulk queue.
    tickets: u64,
    /// Bytes for the socket: sealed records, or plain in insecure mode.
    pub sealed: Chain,
    /// Bytes of the waiting send in the kernel.
    armed: Option<u32>,
    /// The newest ping that is not answered.
    pong: Option<u64>,
}

impl Default for Writer {
    fn default() -> Self {
        Self {
            control: Chain::EMPTY,
            first: NONE,
            last: NONE,
            current: None,
            tickets: 0,
            sealed: Chain::EMPTY,
            armed: None,
            pong: None,
        }
    }
}

impl Writer {
    pub(super) fn clear(&mut self, pool: &mut super::buffer::Chains) {
        pool.clear(&mut self.control);
        pool.clear(&mut self.sealed);
        self.current = None;
    }

    /// Nothing waits to be sent.
    pub(super) const fn is_idle(&self) -> bool {
        self.control.is_empty()
            && self.sealed.is_empty()
            && self.armed.is_none()
            && self.current.is_none()
    }

    /// A place in the bulk queue behind all others.
    pub(super) const fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    pub(super) const fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    #[cfg(test)]
    pub(super) const fn armed_bytes(&self) -> Option<u32> {
        self.armed
    }

    /// Bytes that the socket has not taken, of a request in progress what is sealed.
    pub(super) const fn unsent_bytes(&self) -> u64 {
        self.control.bytes() + self.sealed.bytes()
    }
}

/// A small envelope with its length prefix.
pub(super) const SMALL_BYTES: usize = 1024;
/// Sealed bytes up to which another request is begun: with it they go in one send.
const BEGIN_BELOW_BYTES: u64 = BLOCK_BYTES as u64 / 2;

impl Shard {
    // ── queueing ─────────────────────────────────────────────────────────────────────────────────

    fn queue_small(
        &mut self,
        row: usize,
        build: impl FnOnce(&mut [u8]) -> Result<usize, view::BuildError>,
    ) -> Result<(), Reason> {
        let mut bytes = [0; SMALL_BYTES];
        let length = build(&mut bytes).map_err(|_| Reason::AssemblyPoolFull)?;
        self.queue_control(row, &bytes[..length])
    }

    pub(super) fn queue_control(&mut self, row: usize, envelope: &[u8]) -> Result<(), Reason> {
        let control = &mut self.sessions[row].writer.control;
        self.wire
            .append(control, envelope)
            .map_err(|_| Reason::AssemblyPoolFull)?;
        self.metrics.inc(ShardMetric::EnvelopesSent);
        self.session_dirty(row);
        Ok(())
    }

    /// Appends bytes that are sealed already: answers to a KeyUpdate, alerts.
    pub(super) fn queue_sealed(&mut self, row: usize, bytes: &[u8]) -> Result<(), Reason> {
        let sealed = &mut self.sessions[row].writer.sealed;
        self.wire
            .append(sealed, bytes)
            .map_err(|_| Reason::AssemblyPoolFull)?;
        self.session_dirty(row);
        Ok(())
    }

    pub(super) fn queue_ping(&mut self, row: usize) -> Result<(), Reason> {
        let session = &mut self.sessions[row];
        if !session.writer.is_idle() {
            return Ok(()); // bytes on their way say as much
        }
        session.last_write = self.now;
        let seq = self.now.as_nanos();
        self.queue_small(row, |out| view::ping(seq, out))
    }

    /// The newest ping is answered; older ones that it overtook are answered by it.
    pub(super) fn queue_pong(&mut self, row: usize, seq: u64) -> Result<(), Reason> {
        self.sessions[row].writer.pong = Some(seq);
        self.session_dirty(row);
        Ok(())
    }

    pub(super) fn queue_cancel(&mut self, row: usize, id: RunId) {
        self.metrics.inc(ShardMetric::CancelsSent);
        if let Err(reason) = self.queue_small(row, |out| view::cancel(id.as_str(), out)) {
            self.close_session(row, reason);
        }
    }

    /// Tells the node what run `run` is granted.
    pub(super) fn queue_window(
        &mut self,
        row: usize,
        run: usize,
        granted: u64,
    ) -> Result<(), Reason> {
        let id = self.runs[run].id;
        self.queue_small(row, |out| view::window(id.as_str(), granted, out))
    }

    pub(super) fn queue_go_away(&mut self, row: usize, grace_ms: u32) -> Result<(), Reason> {
        self.queue_small(row, |out| view::go_away(grace_ms, out))
    }

    pub(super) fn queue_register_response(
        &mut self,
        row: usize,
        reply_to: u64,
        node: Option<NodeIndex>,
        refusal: Option<Reason>,
    ) -> Result<(), Reason> {
        let names = Arc::clone(&self.config.names);
        let mut payload = Arc::default();
        let reply = match (node, refusal) {
            (Some(node), None) => {
                let held = self.sessions[row].payload.take();
                payload = held.unwrap_or_else(|| Arc::clone(&names.node(node).config_payload));
                self.sessions[row].payload = Some(Arc::clone(&payload));
                RegisterReply::Accepted {
                    node_id: &names.node(node).id,
                    config_payload: &payload.bytes,
                }
            }
            (_, refusal) => RegisterReply::Rejected {
                reason: refusal.unwrap_or(Reason::NodeUnknown).text(),
            },
        };
        // Once per registration, as long as the node's configuration: not on the path of a frame.
        let mut bytes = vec![0; payload.bytes.len() + SMALL_BYTES];
        let length = view::register_response(reply_to, reply, &mut bytes)
            .map_err(|_| Reason::EnvelopeTooLong)?;
        self.queue_control(row, &bytes[..length])
    }

    pub(super) fn queue_ready_response(
        &mut self,
        row: usize,
        reply_to: u64,
        refusal: Option<Reason>,
    ) -> Result<(), Reason> {
        let reason = refusal.map(Reason::text);
        self.queue_small(row, |out| view::ready_response(reply_to, reason, out))
    }

    /// Puts a granted run behind the session's waiting requests.
    pub(super) fn queue_bulk(&mut self, run: usize) {
        self.runs[run].stage = Stage::Queued;
        let row = self.runs[run].session.0 as usize;
        let writer = &mut self.sessions[row].writer;
        let slot = slot_of(run);
        self.runs[run].ticket = writer.ticket();
        (self.runs[run].before, self.runs[run].behind) = (writer.last, NONE);
        match writer.last {
            NONE => writer.first = slot,
            last => self.runs[last as usize].behind = slot,
        }
        writer.last = slot;
        self.session_dirty(row);
    }

    /// Takes a run that has not begun out of its session's queue.
    pub(super) fn unlink_bulk(&mut self, run: usize) {
        let (before, behind) = (self.runs[run].before, self.runs[run].behind);
        let writer = &mut self.sessions[self.runs[run].session.0 as usize].writer;
        match before {
            NONE => writer.first = behind,
            before => self.runs[before as usize].behind = behind,
        }
        match behind {
            NONE => writer.last = before,
            behind => self.runs[behind as usize].before = before,
        }
    }

    pub(super) fn session_dirty(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        if !session.in_dirty {
            session.in_dirty = true;
            self.dirty_sessions.push(slot_of(row));
        }
    }

    // ── filling and sending ──────────────────────────────────────────────────────────────────────

    /// Seals what may go now and arms the send. Once per turn and dirty session.
    pub(super) fn pump_session(&mut self, row: usize) {
        if self.sessions[row].state != State::Open {
            return;
        }
        if let Err(reason) = self.fill(row) {
            self.close_session(row, reason);
            return;
        }
        self.arm_session(row);
        let session = &self.sessions[row];
        if let Some(cause) = session.close_when_flushed
            && session.writer.is_idle()
        {
            self.close_counted(row, cause); // control refused it and has counted why
        }
    }

    fn fill(&mut self, row: usize) -> Result<(), Reason> {
        while self.sessions[row].state == State::Open {
            if let Some(bulk) = self.sessions[row].writer.current {
                if !self.continue_bulk(row, bulk)? {
                    return Ok(());
                }
                continue;
            }
            // While the socket takes nothing, the newest ping still stands for all.
            let writer = &mut self.sessions[row].writer;
            let pong = writer.pong.take_if(|_| writer.armed.is_none());
            if let Some(seq) = pong {
                self.queue_small(row, |out| view::pong(seq, out))?;
            }
            self.seal_control(row)?;
            let writer = &self.sessions[row].writer;
            let may_begin = writer.armed.is_none() && writer.sealed.bytes() < BEGIN_BELOW_BYTES;
            let first = (writer.first != NONE).then_some(writer.first as usize);
            let ticket = first.map(|run| self.runs[run].ticket);
            match first {
                _ if !may_begin => return Ok(()),
                _ if self.sessions[row].refreshes.is_before(ticket) => self.begin_refresh(row)?,
                Some(run) => self.begin_bulk(row, run)?,
                None => return Ok(()),
            }
        }
        Ok(())
    }

    fn seal_control(&mut self, row: usize) -> Result<(), Reason> {
        while !self.sessions[row].writer.control.is_empty() {
            let length = self.wire.front(&self.sessions[row].writer.control).len();
            let part = length.min(RECORD_PLAIN_BYTES_MAX as usize);
            self.scratch[..part]
                .copy_from_slice(&self.wire.front(&self.sessions[row].writer.control)[..part]);
            self.wire
                .consume(&mut self.sessions[row].writer.control, part);
            self.seal_scratch(row, part)?;
        }
        Ok(())
    }

    /// Seals the first `length` bytes of the scratch buffer.
    fn seal_scratch(&mut self, row: usize, length: usize) -> Result<(), Reason> {
        let session = &mut self.sessions[row];
        let sealed = &mut session.writer.sealed;
        let bytes = &self.scratch[..length];
        match &mut session.records {
            None => self
                .wire
                .append(sealed, bytes)
                .map_err(|_| Reason::AssemblyPoolFull),
            Some(records) => {
                let count = seal_into(&mut self.wire, sealed, records, core::iter::once(bytes))
                    .map_err(|_| Reason::AssemblyPoolFull)?;
                self.metrics.add(ShardMetric::RecordsSealed, count);
                Ok(())
            }
        }
    }

    /// Seals the head of the first waiting request. From here on it has begun.
    fn begin_bulk(&mut self, row: usize, run: usize) -> Result<(), Reason> {
        self.unlink_bulk(run);
        if self.is_out_of_time(row, run) {
            self.refuse_unsent(run, Reason::CredentialFailed);
            return Ok(());
        }
        let timeout_s = self.hard_deadline_s(run);
        let length = match self.write_request_head(run, timeout_s) {
            Ok(length) => length,
            Err(reason) => {
                // This request cannot be put on the wire: its own failure, not the session's.
                self.refuse_unsent(run, reason);
                return Ok(());
            }
        };
        self.runs[run].stage = Stage::Begun;
        self.runs[run].deadline = self.now.after_ms(self.runs[run].response_wait_ms);
        self.outbox.owe(Event::Begun {
            run: self.runs[run].reference,
        });
        self.metrics.inc(ShardMetric::RunsDispatched);
        self.metrics.inc(ShardMetric::EnvelopesSent);
        self.seal_scratch(row, length)?;
        self.sessions[row].writer.current = Some(Bulk {
            run: slot_of(run),
            part: Part::BeforeCut,
            left: self.runs[run].cut().start,
            owed: self.announced_bytes() - length as u64,
            timeout_s,
        });
        if self.sessions[row].paces && self.runs[run].is_tunnel {
            self.runs[run].window = Window::FIRST;
            // It goes out behind the request.
            self.queue_window(row, run, Window::FIRST.granted())?;
        }
        Ok(())
    }

    /// Bytes of the whole envelope that begins in the scratch buffer.
    fn announced_bytes(&self) -> u64 {
        let prefix = self.scratch.first_chunk().expect("scratch is large");
        u64::from(LENGTH_PREFIX_BYTES) + u64::from(u32::from_be_bytes(*prefix))
    }

    /// Seals more of the bulk envelope in progress. `false`: the socket has enough for now.
    ///
    /// # Panics
    /// When a request comes out longer or shorter than it was announced: the node could read nothing
    /// behind it, and every run of its session would be lost.
    fn continue_bulk(&mut self, row: usize, mut bulk: Bulk) -> Result<bool, Reason> {
        let run = bulk.run as usize;
        while bulk.left > 0 && matches!(bulk.part, Part::BeforeCut | Part::BehindCut) {
            if self.sessions[row].writer.sealed.bytes() >= u64::from(SESSION_UNSENT_BYTES_MAX) {
                self.sessions[row].writer.current = Some(bulk);
                return Ok(false);
            }
            let front = self.runs[run].request.body.front(&self.bodies);
            let part = (front.len() as u64)
                .min(bulk.left)
                .min(u64::from(RECORD_PLAIN_BYTES_MAX));
            let part = piece(part);
            self.scratch[..part].copy_from_slice(&front[..part]);
            self.runs[run].request.body.consume(&mut self.bodies, part);
            self.seal_scratch(row, part)?;
            bulk.left -= part as u64;
            bulk.owed -= part as u64;
        }
        let next = match bulk.part {
            Part::BeforeCut => Some((Part::Cut, 0)),
            Part::Cut => {
                let length = self.write_model(run);
                self.seal_scratch(row, length)?;
                bulk.owed -= length as u64;
                let cut = self.runs[run].cut();
                let replaced = piece(cut.end - cut.start);
                let body = &mut self.runs[run].request.body;
                body.consume(&mut self.bodies, replaced);
                Some((Part::BehindCut, body.bytes()))
            }
            Part::BehindCut => Some((Part::Tail, 0)),
            Part::Tail => {
                let length = self.write_request_tail(run, bulk.timeout_s)?;
                assert_eq!(
                    bulk.owed, length as u64,
                    "a request is as long as announced"
                );
                self.runs[run].credential = None;
                self.seal_scratch(row, length)?;
                None
            }
        };
        let is_sent = next.is_none();
        self.sessions[row].writer.current = next.map(|(part, left)| Bulk { part, left, ..bulk });
        if is_sent {
            self.release_body(run); // its answer may have begun already
        }
        Ok(true)
    }

    fn arm_session(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        let Some(fd) = &session.fd else { return };
        let socket = Socket {
            slot: slot_of(row),
            generation: session.generation,
            fd: fd.as_raw_fd(),
        };
        if session.writer.armed.is_some() || session.writer.sealed.is_empty() {
            return;
        }
        let length =
            super::send::arm_session(&mut self.ring, &self.wire, &session.writer.sealed, socket);
        session.writer.armed = Some(length);
        session.operations += 1;
        session.last_write = self.now;
    }

    /// The session's waiting send completed.
    pub(super) fn session_sent(&mut self, row: usize, result: i32) {
        let session = &mut self.sessions[row];
        session.operations -= 1;
        session.writer.armed = None;
        if session.state != State::Open {
            self.try_free_session(row);
            return;
        }
        match usize::try_from(result) {
            Ok(sent) => {
                self.metrics.add(ShardMetric::NodeBytesOut, sent as u64);
                self.wire.consume(&mut session.writer.sealed, sent);
                session.last_write = self.now;
                self.session_dirty(row);
            }
            Err(_) if -result == libc::EINTR || -result == libc::EAGAIN => self.session_dirty(row),
            Err(_) => self.close_session(row, Reason::SocketError),
        }
    }

    /// The session's writer is in the middle of this run's request.
    pub(super) fn is_being_sent(&self, row: usize, run: usize) -> bool {
        self.sessions[row]
            .writer
            .current
            .is_some_and(|bulk| bulk.run as usize == run)
    }

    /// A closing session's alert, as far as it can go without waiting.
    pub(super) fn last_words(&mut self, row: usize, cause: Reason) {
        let session = &mut self.sessions[row];
        if session.writer.is_armed() {
            let token = super::uring::Token::new(
                super::uring::Kind::SessionSend,
                slot_of(row),
                session.generation,
            );
            self.ring.cancel(token);
            return;
        }
        if matches!(cause, Reason::SocketError | Reason::HeartbeatTimeout) {
            return;
        }
        if let Some(records) = &mut session.records {
            let mut reply = ReplyBuf::default();
            if records.close_notify(&mut reply).is_ok() {
                // A dry pool loses the close_notify; the FIN that follows says enough.
                let _lost = self
                    .wire
                    .append(&mut session.writer.sealed, reply.as_slice());
            }
        }
        self.arm_session(row);
    }

    /// Fails a run that could not be put on the wire, before anything of it was sent.
    pub(super) fn refuse_unsent(&mut self, run: usize, reason: Reason) {
        let (client, _) = std::mem::replace(&mut self.runs[run].client, (NONE, 0));
        // Its one report comes first: to tell its client may end clients, which end their runs.
        self.return_unsent(run);
        if client != NONE {
            self.client_run_failed(client as usize, reason);
        }
    }
}

#[cfg(test)]
mod tests;
