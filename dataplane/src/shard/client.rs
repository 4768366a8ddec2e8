//! One HTTP client connection: bytes to requests, answers to bytes, and seeing it leave.
//!
//! Lives on: one shard. Bound: a slot per client of the whole Edge; per client one head block, two
//! blocks of bytes that came too early, one request at a time, pending output of the output pool.
//!
//! ```text
//!            ┌────────────────── keep-alive ───────────────────┐
//!            ▼                                                 │
//! arrives ─ Head ─► Body ─► Waiting ─► Running ─► Flushing ────┤
//!            │        │        │          └► Parked ─┘         ▼
//!            └────────┴────────┴──────────┴──► Draining ──► Closing ──► Free
//! ```
//! A read stays armed in every phase; after early bytes a poll for hang-up takes its place. `[D-46]`
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use iop_control::names::ProviderName;
use iop_control::step::Event;
use iop_proto::catalog::Operation;
use iop_proto::ids::{
    ClientRef, ModelIndex, Now, ProviderIndex, RunRef, SessionRef, ShardIndex, SlotGeneration,
};
use iop_proto::limits::{DRAIN_BYTES_MAX, HEAD_BYTES_MAX};
use iop_proto::reason::Reason;

use super::body::Request;
use super::buffer::{Chain, Pool};
use super::http1::{Asked, BodyMeter, ChunkDecoder, Head, HeadCursor, ResponsePlan};
use super::inbound::{Inbound, Plain};
use super::run_answer::RunAnswer;
use super::send::{Framing, Output};
use super::splice::ModelScanner;
use super::transfer::Granted;
use super::uring::{Kind, Token};
use super::{Shard, slot_of};
use crate::epoch::Epoch;
use crate::front::handover::ClientHandover;
use crate::keys::Caller;
use crate::metrics::ShardMetric;
use crate::surface::Surface;
use crate::tls::Records;
use crate::tls::record::ReplyBuf;

/// Where a connection is between two requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Free,
    /// Reads a head; idle while none of it has come.
    Head,
    /// Collects a body.
    Body,
    /// Its whole request is at control.
    Waiting,
    /// Its run is on another shard; its operations are being joined. `[D-33]`
    Leaving {
        granted: Granted,
    },
    /// Its request is `run`, here or at the node.
    Running {
        run: u32,
    },
    /// Its run stalled; control decides what that says of the provider, then it is told, or waits
    /// again.
    Parked {
        may_recover: bool,
    },
    /// The answer is complete and on its way to the socket.
    Flushing,
    /// Answered for the last time: what still comes is dropped, within a bound. `[D-42]`
    Draining,
    Closing,
}

/// How the body of the request ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum BodyReader {
    /// Bytes still to come.
    Length(u64),
    Chunked(ChunkDecoder),
}

/// Bytes of a request id made here.
pub(super) const OWN_ID_BYTES: usize = 32;

#[derive(Debug)]
pub(super) struct Client {
    pub generation: u32,
    pub phase: Phase,
    pub fd: Option<OwnedFd>,
    pub records: Option<Records>,
    inbound: Inbound,

    pub head: Option<&'static mut [u8]>,
    pub head_length: usize,
    pub cursor: HeadCursor,
    pub parsed: Option<Head>,
    /// Bytes behind the request in progress.
    pub early: Chain,

    pub reader: BodyReader,
    pub scanner: ModelScanner,
    pub request: Request,
    /// Blocks of the body pool promised and not taken yet.
    pub promised: u32,
    /// When the body began: the youngest gives way.
    pub body_since: Now,
    /// What the request in progress was read under, until it is submitted; then, while a normalized run
    /// answers it, what it was granted under. `[D-39]`
    pub epoch: Option<Arc<Epoch>>,
    pub caller: Caller,
    pub model: Option<ModelIndex>,
    pub operation: Operation,
    pub own_id: [u8; OWN_ID_BYTES],

    pub asked: Asked,
    pub plan: Option<ResponsePlan>,
    pub meter: BodyMeter,
    pub framing: Framing,
    pub output: Output,
    /// The answer's body is complete: the next flush ends it.
    pub ended: bool,
    /// Of a normalized run.
    pub answer: RunAnswer,

    pub operations: u8,
    receiving: bool,
    pub polling: bool,
    /// FIN was read, or close_notify.
    pub input_closed: bool,
    /// Close with a reset.
    abort: bool,
    pub deadline: Option<Now>,
    progress_sent: u64,
    progress_at: Now,
    drained: u32,
    pub in_dirty: bool,

    pub submitted: Now,
    /// When its latest run was granted.
    pub granted: Now,
    /// What the deadline of a first run that stalled leaves to the second. `[D-18]`
    pub hard_end: Option<Now>,
    pub first_byte: Option<Now>,
    pub status: u16,
    pub provider: Option<ProviderIndex>,
    /// The provider as it was configured when the lease was taken, while the connection moves to it.
    pub lease: Option<Arc<ProviderName>>,
    pub reason: Option<Reason>,
    pub body_bytes_in: u64,
    pub body_bytes_out: u64,
}

impl Client {
    pub(super) fn free() -> Self {
        Self {
            generation: 0,
            phase: Phase::Free,
            fd: None,
            records: None,
            inbound: Inbound::default(),
            head: None,
            head_length: 0,
            cursor: HeadCursor::default(),
            parsed: None,
            early: Chain::EMPTY,
            reader: BodyReader::Length(0),
            scanner: ModelScanner::new(),
            request: Request::default(),
            promised: 0,
            body_since: Now::default(),
            epoch: None,
            caller: Caller::Anyone,
            model: None,
            operation: Operation::ChatCompletions,
            own_id: [b'0'; OWN_ID_BYTES],
            asked: Asked::UNREADABLE,
            plan: None,
            meter: BodyMeter::Nothing,
            framing: Framing::Plain,
            output: Output::default(),
            ended: false,
            answer: RunAnswer::NONE,
            operations: 0,
            receiving: false,
            polling: false,
            input_closed: false,
            abort: false,
            deadline: None,
            progress_sent: 0,
            progress_at: Now::default(),
            drained: 0,
            in_dirty: false,
            submitted: Now::default(),
            granted: Now::default(),
            hard_end: None,
            first_byte: None,
            status: 0,
            provider: None,
            lease: None,
            reason: None,
            body_bytes_in: 0,
            body_bytes_out: 0,
        }
    }

    pub(super) fn reference(&self, shard: ShardIndex, slot: usize) -> ClientRef {
        ClientRef {
            shard,
            slot: slot_of(slot),
            generation: SlotGeneration::new(self.generation).expect("a taken slot has a tenant"),
        }
    }

    /// The id of the request in progress: the client's own if it is well formed, else ours. `[D-26]`
    pub(super) fn request_id(&self) -> &[u8] {
        match (&self.parsed, &self.head) {
            (Some(head), Some(block)) => head.request_id_or(block, &self.own_id),
            _ => &self.own_id,
        }
    }

    /// The shape of errors for the request in progress; a head nobody could read names none.
    pub(super) fn surface(&self) -> Surface {
        self.parsed.map_or(Surface::OpenAi, |head| head.surface)
    }

    /// Operations that wait for the peer, and whether each is armed.
    pub(super) const fn armed_inputs(&self) -> [(bool, Kind); 2] {
        [
            (self.receiving, Kind::ClientReceive),
            (self.polling, Kind::ClientHangup),
        ]
    }

    /// A copy of the carried part of a record; its block goes back.
    pub(super) fn take_carried(&mut self, pool: &mut Pool) -> Vec<u8> {
        self.inbound.take(pool)
    }

    pub(super) fn place_carried(&mut self, bytes: &[u8], pool: &mut Pool) -> bool {
        self.inbound.place(bytes, pool)
    }

    /// The tenant `generation` is here and not closing.
    pub(super) fn is_live(&self, generation: u32) -> bool {
        self.generation == generation && !matches!(self.phase, Phase::Free | Phase::Closing)
    }
}

impl Shard {
    // ── arrival and input ────────────────────────────────────────────────────────────────────────

    /// Takes over a client connection.
    pub(super) fn client_arrives(&mut self, handover: ClientHandover) {
        let Some(slot) = self.free_clients.pop() else {
            // The front enforces the limit, so this is a bug of ours; shed the connection.
            self.metrics.reason(Reason::ClientsFull);
            return;
        };
        let row = slot as usize;
        let generation = self.clients[row].generation + 1;
        self.clients[row] = Client {
            generation,
            phase: Phase::Head,
            fd: Some(handover.fd),
            records: handover.records,
            deadline: Some(self.now.after_ms(self.config.timeouts.head_ms)),
            ..Client::free()
        };
        self.clients_high = self.clients_high.max(row + 1);
        self.metrics.inc(ShardMetric::ClientsTaken);
        self.metrics.add(ShardMetric::Clients, 1);
        for piece in handover.early.chunks(super::BLOCK) {
            let Some(block) = self.carry.take() else {
                self.close_client(row, true);
                return;
            };
            block[..piece.len()].copy_from_slice(piece);
            self.client_socket_bytes(row, &mut block[..piece.len()]);
            self.spent.push(block);
        }
        self.arm_client_input(row);
    }

    /// Keeps a read, or after early bytes a poll for hang-up, armed.
    pub(super) fn arm_client_input(&mut self, row: usize) {
        let client = &mut self.clients[row];
        let stays = !matches!(
            client.phase,
            Phase::Free | Phase::Closing | Phase::Leaving { .. }
        );
        if !stays || client.input_closed {
            return;
        }
        let Some(fd) = &client.fd else { return };
        if client.early.is_empty() {
            if !client.receiving {
                client.receiving = true;
                client.operations += 1;
                let token = Token::new(Kind::ClientReceive, slot_of(row), client.generation);
                self.ring
                    .receive_once(fd.as_raw_fd(), &self.client_buffers, token);
            }
        } else if !client.polling && !client.receiving {
            client.polling = true;
            client.operations += 1;
            let token = Token::new(Kind::ClientHangup, slot_of(row), client.generation);
            self.ring.poll_hangup(fd.as_raw_fd(), token);
        }
    }

    /// The client's receive completed.
    pub(super) fn client_received(&mut self, row: usize, data: Option<&mut [u8]>, result: i32) {
        let client = &mut self.clients[row];
        client.receiving = false;
        client.operations -= 1;
        if client.phase == Phase::Closing {
            self.try_free_client(row);
            return;
        }
        match (data, result) {
            (Some(data), 1..) => {
                self.metrics
                    .add(ShardMetric::ClientBytesIn, data.len() as u64);
                self.client_socket_bytes(row, data);
                self.arm_client_input(row);
            }
            (_, 0) => self.client_eof(row),
            (_, error) if -error == libc::ENOBUFS => {
                self.metrics.inc(ShardMetric::ReceiveExhausted);
                self.rearm_clients
                    .push((slot_of(row), self.clients[row].generation));
            }
            // Cancelled: it leaves, and nothing is armed; or it has stayed.
            (_, error) if matches!(-error, libc::ECANCELED | libc::EINTR | libc::EAGAIN) => {
                self.arm_client_input(row);
            }
            (_, _) => self.client_gone(row),
        }
        self.try_leave(row);
    }

    /// The poll for hang-up completed.
    pub(super) fn client_hung_up(&mut self, row: usize, result: i32) {
        let client = &mut self.clients[row];
        client.polling = false;
        client.operations -= 1;
        match client.phase {
            Phase::Closing => self.try_free_client(row),
            Phase::Free => {}
            // Cancelled because its phase wanted a read again, or because it leaves.
            _ if result == -libc::ECANCELED => self.arm_client_input(row),
            _ => {
                let errors = i32::from(libc::POLLERR | libc::POLLHUP);
                if result > 0 && result & errors == 0 {
                    self.client_eof(row);
                } else {
                    self.client_gone(row);
                }
            }
        }
        self.try_leave(row); // whatever completed it: the hang-up may have come before the cancel
    }

    fn client_socket_bytes(&mut self, row: usize, data: &mut [u8]) {
        if self.clients[row].records.is_some() && self.clients[row].in_dirty {
            // Sealed before a key update among the new bytes changes the keys it is sealed with.
            self.flush_client(row);
            if self.clients[row].phase == Phase::Closing {
                return;
            }
        }
        let mut reply = ReplyBuf::default();
        let client = &mut self.clients[row];
        let opened = match &mut client.records {
            Some(records) => client
                .inbound
                .open(records, data, &mut self.carry, &mut reply),
            None => Ok(Plain::of(data)),
        };
        if !reply.is_empty() {
            self.append_sealed(row, reply.as_slice());
        }
        let plain = match opened {
            Ok(plain) => plain,
            Err(reason) => {
                self.metrics.reason(reason);
                self.client_gone(row);
                return;
            }
        };
        self.metrics.add(ShardMetric::RecordsOpened, plain.records);
        if let Some((block, length)) = plain.carried {
            self.client_bytes(row, &block[..length]);
            self.spent.push(block);
        }
        self.client_bytes(row, plain.direct);
        if plain.closed {
            self.client_eof(row);
        }
    }

    /// An answer of the record layer itself, sealed already, behind all that was sealed before it.
    fn append_sealed(&mut self, row: usize, bytes: &[u8]) {
        let client = &mut self.clients[row];
        if self
            .sender
            .pool
            .append(&mut client.output.pending, bytes)
            .is_err()
        {
            self.client_gone(row);
        } else {
            self.client_dirty(row);
        }
    }

    /// Plain bytes of the connection, in order, cut anywhere.
    pub(super) fn client_bytes(&mut self, row: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let used = match self.clients[row].phase {
                Phase::Head => self.head_bytes(row, bytes),
                Phase::Body => self.body_bytes(row, bytes),
                Phase::Waiting
                | Phase::Leaving { .. }
                | Phase::Running { .. }
                | Phase::Parked { .. }
                | Phase::Flushing => {
                    if self
                        .early
                        .append(&mut self.clients[row].early, bytes)
                        .is_err()
                    {
                        self.client_gone(row); // more than one receive at once: not a client of ours
                    }
                    return;
                }
                Phase::Draining => {
                    let client = &mut self.clients[row];
                    client.drained = client.drained.saturating_add(slot_of(bytes.len()));
                    if client.drained > DRAIN_BYTES_MAX {
                        self.close_client(row, false);
                    }
                    return;
                }
                Phase::Free | Phase::Closing => return,
            };
            bytes = &bytes[used..];
        }
    }

    fn head_bytes(&mut self, row: usize, bytes: &[u8]) -> usize {
        let deadline = self.now.after_ms(self.config.timeouts.head_ms);
        let client = &mut self.clients[row];
        if client.head.is_none() {
            client.head = self.heads.take();
        }
        let Some(block) = &mut client.head else {
            self.refuse(row, Reason::ClientsFull, 1);
            return bytes.len();
        };
        if client.head_length == 0 {
            client.deadline = Some(deadline);
        }
        let before = client.head_length;
        let take = bytes.len().min(HEAD_BYTES_MAX as usize - before);
        block[before..before + take].copy_from_slice(&bytes[..take]);
        client.head_length += take;
        match client.cursor.parse(&block[..client.head_length]) {
            Ok(None) => take,
            Ok(Some(head)) => {
                client.head_length = head.consumed;
                self.begin_request(row, head);
                head.consumed - before
            }
            Err(reason) => {
                client.asked = Asked::UNREADABLE;
                self.new_request_id(row);
                self.refuse_unread(row, reason);
                bytes.len()
            }
        }
    }

    // ── leaving ──────────────────────────────────────────────────────────────────────────────────

    /// FIN. After a request it means that the client is gone, in every phase. `[D-27]`
    fn client_eof(&mut self, row: usize) {
        let tolerated = self.config.tolerate_half_close;
        let client = &mut self.clients[row];
        client.input_closed = true;
        match client.phase {
            Phase::Waiting
            | Phase::Leaving { .. }
            | Phase::Running { .. }
            | Phase::Parked { .. }
                if tolerated =>
            {
                client.asked.keep_alive = false;
            }
            // The answer is complete: it may still be wanted.
            Phase::Flushing => client.asked.keep_alive = false,
            Phase::Head if client.head_length == 0 => self.close_client(row, false),
            Phase::Draining => self.close_client(row, false),
            _ => self.client_gone(row),
        }
    }

    /// The client left, or its connection broke.
    pub(super) fn client_gone(&mut self, row: usize) {
        self.client_ends(row, Reason::ClientGone);
    }

    /// Ends a client's connection for `reason`, whatever it waits for.
    pub(super) fn client_ends(&mut self, row: usize, reason: Reason) {
        if matches!(self.clients[row].phase, Phase::Free | Phase::Closing) {
            return;
        }
        self.metrics.reason(reason);
        self.clients[row].reason = Some(reason);
        if self.clients[row].plan.is_some() && self.clients[row].phase != Phase::Flushing {
            self.metrics.inc(ShardMetric::ResponsesAborted);
        }
        self.release_request(row);
        self.close_client(row, true);
    }

    /// Takes the request in progress back from wherever it is.
    fn release_request(&mut self, row: usize) {
        match self.clients[row].phase {
            Phase::Leaving { granted } => {
                self.outbox.owe(Event::NotSent {
                    run: granted.run,
                    client: None,
                });
                self.log_access(row);
            }
            Phase::Waiting | Phase::Parked { may_recover: true } => {
                let client = self.client_reference(row);
                self.outbox.owe(Event::ClientGone { client });
                self.log_access(row);
            }
            Phase::Running { run } => {
                self.log_access(row);
                self.detach_run(run as usize);
            }
            Phase::Parked { may_recover: false } | Phase::Flushing => self.log_access(row),
            _ => {}
        }
    }

    /// Closes the connection; `abort`: by reset. Whatever was pending is dropped. The slot is free at the
    /// turn's end at the earliest: whoever is at work on this client finds `Closing` here.
    pub(super) fn close_client(&mut self, row: usize, abort: bool) {
        let client = &mut self.clients[row];
        if matches!(client.phase, Phase::Free | Phase::Closing) {
            return;
        }
        debug_assert!(!matches!(client.phase, Phase::Running { .. }) || abort);
        client.phase = Phase::Closing;
        client.abort = abort;
        client.deadline = None;
        self.sender.shed(&mut client.output);
        let (slot, generation) = (slot_of(row), client.generation);
        for (armed, kind) in [
            (client.receiving, Kind::ClientReceive),
            (client.polling, Kind::ClientHangup),
            (client.output.is_armed(), Kind::ClientSend),
        ] {
            if armed {
                self.ring.cancel(Token::new(kind, slot, generation));
            }
        }
        self.drop_request(row);
        self.client_dirty(row);
    }

    /// Gives back what the request in progress holds.
    pub(super) fn drop_request(&mut self, row: usize) {
        let request = self.clients[row].request.take();
        self.let_go(request);
        let client = &mut self.clients[row];
        self.reservations
            .release(std::mem::take(&mut client.promised));
        if let Some(block) = client.head.take() {
            self.heads.give(block);
        }
        client.head_length = 0;
        client.parsed = None;
        client.epoch = None;
        client.answer.clear(&mut self.sender.pool);
    }

    /// Frees the slot once every operation has completed.
    pub(super) fn try_free_client(&mut self, row: usize) {
        let client = &mut self.clients[row];
        if client.phase != Phase::Closing || client.operations > 0 || client.output.is_direct() {
            return;
        }
        self.sender.discard(&mut client.output);
        client.inbound.clear(&mut self.carry);
        self.early.clear(&mut client.early);
        if client.abort
            && let Some(fd) = &client.fd
        {
            super::uring::reset_on_close(fd);
        }
        client.fd = None;
        client.records = None;
        client.phase = Phase::Free;
        self.free_clients.push(slot_of(row));
        self.metrics.dec(ShardMetric::Clients);
        self.metrics.inc(ShardMetric::ClientsReleased);
    }

    // ── grants ───────────────────────────────────────────────────────────────────────────────────

    /// The live client behind a reference that waits for control.
    pub(super) fn waiting_client(&self, client: ClientRef) -> Option<usize> {
        let row = client.slot as usize;
        let slot = self.clients.get(row)?;
        let waits = slot.is_live(client.generation.get()) && slot.phase == Phase::Waiting;
        waits.then_some(row)
    }

    /// A lease: the waiting request becomes run `run` on `session`. `lease`: what another shard brought
    /// with the client; the shard that control told takes its own epoch's, which is control's. Of a
    /// client that was brought nothing is looked up: its model, too, may be of a later epoch. `[D-32]`
    pub(super) fn grant(
        &mut self,
        client: ClientRef,
        run: RunRef,
        session: SessionRef,
        provider: ProviderIndex,
        lease: Option<Arc<ProviderName>>,
    ) {
        let waiting = self.waiting_client(client);
        if let Some(row) = waiting
            && lease.is_none()
        {
            self.clients[row].epoch = Some(Arc::clone(&self.epoch));
        }
        if let Some(row) = waiting
            && session.shard != self.index
        {
            let lease = Arc::clone(&self.config.names.providers[provider.row()]);
            self.clients[row].lease = Some(lease);
            self.leave(
                row,
                Granted {
                    run,
                    session,
                    provider,
                },
            );
            return;
        }
        let open = self
            .sessions
            .get(session.slot as usize)
            .is_some_and(|slot| slot.is_ready(session.generation.get()));
        let Some(row) = waiting.filter(|_| open) else {
            let client = waiting.map(|row| self.client_reference(row));
            self.outbox.owe(Event::NotSent { run, client });
            return;
        };
        if lease.is_none() {
            self.keep_body(row); // one that moved here is on loan, and whole
        }
        let request = self.clients[row].request.take();
        let lease =
            lease.unwrap_or_else(|| Arc::clone(&self.config.names.providers[provider.row()]));
        self.clients[row].phase = Phase::Running { run: run.slot };
        self.clients[row].provider = Some(provider);
        self.clients[row].granted = self.now;
        let (generation, operation) = (self.clients[row].generation, self.clients[row].operation);
        let session = (session.slot, session.generation.get());
        self.take_run(
            run,
            session,
            (slot_of(row), generation),
            lease,
            operation,
            request,
        );
        if self.runs[run.slot as usize].is_tunnel {
            self.clients[row].epoch = None; // the answer names nothing of it
        }
        self.dispatch_run(run.slot as usize);
    }

    /// The client of a run that was not sent: it waits again, with its request.
    pub(super) fn client_waits_again(
        &mut self,
        row: usize,
        generation: u32,
        request: Request,
    ) -> Option<ClientRef> {
        let client = &mut self.clients[row];
        debug_assert!(client.is_live(generation));
        client.phase = Phase::Waiting;
        client.request = request;
        client.provider = None;
        Some(self.client_reference(row))
    }

    // ── time ─────────────────────────────────────────────────────────────────────────────────────

    /// What is due on a client. Called a few times a second.
    pub(super) fn client_due(&mut self, row: usize) {
        let client = &mut self.clients[row];
        if matches!(client.phase, Phase::Free | Phase::Closing) {
            return;
        }
        if client.output.is_armed() || !client.output.pending.is_empty() {
            if client.output.sent != client.progress_sent || client.progress_at == Now::default() {
                client.progress_sent = client.output.sent;
                client.progress_at = self.now;
            } else if self.now.ms_since(client.progress_at) >= self.config.timeouts.write_stall_ms {
                self.client_ends(row, Reason::ClientTooSlow);
                return;
            }
        } else {
            client.progress_at = Now::default();
        }
        if client.deadline.is_none_or(|deadline| self.now < deadline) {
            return;
        }
        match client.phase {
            Phase::Head if client.head_length == 0 => self.drain_client(row),
            Phase::Head => {
                self.new_request_id(row);
                self.clients[row].asked = Asked::UNREADABLE;
                self.refuse_unread(row, Reason::HeadTimeout);
            }
            Phase::Body => self.refuse_unread(row, Reason::BodyTimeout),
            Phase::Draining => self.close_client(row, false),
            Phase::Leaving { granted } => self.stay(row, granted),
            Phase::Waiting | Phase::Running { .. } | Phase::Parked { .. } | Phase::Flushing => {
                client.deadline = None;
            }
            Phase::Free | Phase::Closing => {}
        }
    }

    /// How long a client has taken nothing of its pending output, ms.
    pub(super) fn idle_output_ms(&self, row: usize) -> u64 {
        let client = &self.clients[row];
        if client.progress_at == Now::default() {
            0
        } else {
            self.now.ms_since(client.progress_at)
        }
    }

    pub(super) fn gather_for(&mut self, row: usize, bytes: &[u8]) -> bool {
        let client = &mut self.clients[row];
        let tenant = (slot_of(row), client.generation);
        self.sender.gather(&mut client.output, tenant, bytes)
    }
}
