//! What a reload means to a shard and to its nodes: the epoch it works by, refreshes out, their answers
//! in, and the end of a certificate.
//!
//! Lives on: one shard. Bound: one refresh waits per session, behind the requests that waited before
//! it; `REFRESHES_UNANSWERED_MAX` answers are awaited.
use std::sync::Arc;

use iop_control::names::NodePayload;
use iop_control::step::Event;
use iop_proto::domain::Message;
use iop_proto::framing::MessageType;
use iop_proto::ids::{NodeIndex, RefreshId, SessionRef};
use iop_proto::limits::REFRESHES_UNANSWERED_MAX;
use iop_proto::map;
use iop_proto::reason::Reason;
use iop_proto::view;

use super::Shard;
use super::session::{Standing, State};
use super::writer::SMALL_BYTES;
use crate::epoch::Epoch;
use crate::metrics::ShardMetric;
use crate::system::unix_s;

/// A session's part in refreshes.
#[derive(Debug, Default)]
pub(super) struct Refreshes {
    /// Waits for its turn in the writer's bulk queue.
    next: Option<Refresh>,
    /// Sent and not answered; the oldest first.
    awaited: [Option<RefreshId>; REFRESHES_UNANSWERED_MAX as usize],
}

#[derive(Debug)]
struct Refresh {
    id: RefreshId,
    payload: Arc<NodePayload>,
    /// Its place among the session's requests.
    ticket: u64,
}

impl Refreshes {
    fn awaits(&mut self, id: RefreshId) {
        self.awaited.rotate_left(1);
        *self
            .awaited
            .last_mut()
            .expect("REFRESHES_UNANSWERED_MAX > 0") = Some(id);
    }

    /// Whether the answer was awaited; each is once.
    fn take(&mut self, id: RefreshId) -> bool {
        let found = self.awaited.iter_mut().find(|known| **known == Some(id));
        found.is_some_and(|known| known.take().is_some())
    }

    /// The refresh goes before a request with that ticket.
    pub(super) fn is_before(&self, ticket: Option<u64>) -> bool {
        let next = self.next.as_ref();
        next.is_some_and(|next| ticket.is_none_or(|ticket| next.ticket < ticket))
    }
}

impl Shard {
    /// Takes the configurations in the lane up to `number`. Requests in progress keep theirs; nothing is
    /// made here, and the last holder of an old one frees it elsewhere.
    ///
    /// # Panics
    /// When the lane lacks it: control puts it there first.
    pub(super) fn configure(&mut self, number: u64) {
        while self.epoch.number < number {
            let epoch = self.lanes.epochs.pop();
            self.adopt(epoch.expect("control sends a configuration before it names it"));
        }
        self.metrics.inc(ShardMetric::EpochsTaken);
    }

    fn adopt(&mut self, epoch: Arc<Epoch>) {
        self.config.names = Arc::clone(&epoch.names);
        self.config.timeouts = epoch.timeouts;
        self.config.limits.body_bytes_max = epoch.body_bytes_max;
        self.config.tolerate_half_close = epoch.tolerate_half_close;
        self.config.recovery = epoch.recovery;
        self.keys = Arc::clone(&epoch.keys);
        self.catalog = Arc::clone(&epoch.catalog);
        self.epoch = epoch;
    }

    /// What a request body may have, by the configuration its head was read under.
    pub(super) fn body_bytes_max(&self, row: usize) -> u64 {
        let epoch = self.clients[row].epoch.as_ref().unwrap_or(&self.epoch);
        u64::from(epoch.body_bytes_max)
    }

    // ── refreshes ────────────────────────────────────────────────────────────────────────────────

    /// Queues `node`'s configuration for its session. One that still waits is replaced: it was never
    /// sent, and is never answered.
    pub(super) fn refresh(&mut self, session: SessionRef, id: RefreshId, node: NodeIndex) {
        let Some(row) = self.session_of(session) else {
            return;
        };
        let payload = Arc::clone(&self.config.names.node(node).config_payload);
        let ticket = self.sessions[row].writer.ticket();
        self.sessions[row].refreshes.next = Some(Refresh {
            id,
            payload,
            ticket,
        });
        self.session_dirty(row);
    }

    /// The refresh's turn has come: it joins what is sealed next.
    pub(super) fn begin_refresh(&mut self, row: usize) -> Result<(), Reason> {
        let next = self.sessions[row].refreshes.next.take();
        let refresh = next.expect("looked at before");
        // Once per refresh, as long as the node's configuration: not on the path of a frame.
        let mut bytes = vec![0; refresh.payload.bytes.len() + SMALL_BYTES];
        let length = view::config_refresh(refresh.id, &refresh.payload.bytes, &mut bytes)
            .map_err(|_| Reason::EnvelopeTooLong)?;
        let session = &mut self.sessions[row];
        session.refreshes.awaits(refresh.id);
        session.payload = Some(refresh.payload);
        self.queue_control(row, &bytes[..length])
    }

    /// NodeConfigRefreshResponse. One that nobody waits for is dropped. `[wire §4.2]`
    pub(super) fn refresh_answered(
        &mut self,
        row: usize,
        reply_to: u64,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let kind = MessageType::NodeConfigRefreshResponse;
        let answer = map::decode(kind, payload).map_err(|_| Reason::EnvelopeMalformed)?;
        let Message::ConfigRefreshResponse(answer) = answer else {
            return Err(Reason::EnvelopeMalformed);
        };
        let id = RefreshId::parse(&answer.request_id).filter(|id| id.get() == reply_to);
        match id.filter(|&id| self.sessions[row].refreshes.take(id)) {
            None => self.metrics.inc(ShardMetric::EnvelopesIgnored),
            Some(refresh) => {
                let session = self.sessions[row].reference(self.index, row);
                let status = answer.status;
                self.outbox.owe(Event::Refreshed {
                    session,
                    refresh,
                    status,
                });
            }
        }
        Ok(())
    }

    // ── time ─────────────────────────────────────────────────────────────────────────────────────

    /// What is due on every session. Called a few times a second.
    pub(super) fn sessions_due(&mut self) {
        let unix = unix_s();
        for row in 0..self.sessions.len() {
            self.session_due(row);
            if self.sessions[row].certificate_ends(unix) {
                self.certificate_ended(row);
            }
        }
    }

    /// The peer's certificate is past its notAfter. Control decides, unless it has never heard of the
    /// connection. `[D-05]`
    fn certificate_ended(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        if session.standing == Standing::Identified && !session.announced {
            return self.close_session(row, Reason::CertificateExpired);
        }
        session.expiry_told = true;
        let session = session.reference(self.index, row);
        self.outbox.owe(Event::Expired { session });
    }
}

impl super::session::Session {
    /// Its certificate has ended, and nobody was told.
    fn certificate_ends(&self, unix: i64) -> bool {
        self.state == State::Open && !self.expiry_told && unix > self.not_after_unix
    }
}
