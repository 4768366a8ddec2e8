//! Answers to clients: a provider's, frame by frame, and those the Edge makes itself.
//!
//! Lives on: the client's shard. Bound: one head within `HEAD_ROOM_BYTES`; bodies as `send.rs` takes
//! them.
use iop_proto::ids::ModelIndex;
use iop_proto::reason::{Blame, Reason};

use super::Shard;
use super::client::Phase;
use super::http1::{
    Allow, BodyFraming, ResponseFraming, SimpleResponse, plan_response, write_response_head,
    write_simple_head, write_simple_response,
};
use super::run::NONE;
use super::send::Framing;
use crate::cold::access_log::{AccessRecord, Recorded};
use crate::metrics::{ShardHistogram, ShardMetric};
use crate::surface::{self, Refusal};

/// Seconds a client is told to wait when a request could not be served for now.
const RETRY_AFTER_S: u16 = 1;

impl Shard {
    // ── a provider's answer ──────────────────────────────────────────────────────────────────────

    /// RESPONSE_START: status and headers to the client of `run`.
    pub(super) fn client_start<'h>(
        &mut self,
        run: usize,
        status: i32,
        headers: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
    ) {
        let row = self.runs[run].client.0 as usize;
        let client = &self.clients[row];
        let status = u16::try_from(status).unwrap_or(0);
        let planned = plan_response(client.asked, status, headers.clone()).and_then(|plan| {
            let id = client.request_id();
            let written = write_response_head(&mut self.scratch[..], &plan, headers.clone(), id)?;
            Ok((plan, written))
        });
        let (plan, written) = match planned {
            Ok(planned) => planned,
            Err(reason) => return self.fail_run(run, reason),
        };
        let client = &mut self.clients[row];
        client.meter = plan.meter();
        client.asked.keep_alive = plan.keep_alive;
        client.framing = match plan.framing {
            ResponseFraming::Chunked => Framing::Chunked,
            ResponseFraming::Length(_) | ResponseFraming::UntilClose | ResponseFraming::NoBody => {
                Framing::Plain
            }
        };
        client.plan = Some(plan);
        client.status = status;
        self.release_body(run);
        self.count_status(status);
        self.send_scratch(row, written.len);
    }

    /// Body bytes for the client of `run`; they stay where they are until the turn has settled.
    pub(super) fn client_body(&mut self, run: usize, bytes: &[u8]) {
        let row = self.runs[run].client.0 as usize;
        self.runs[run].window.take(bytes.len());
        let client = &mut self.clients[row];
        match client.meter.take(bytes.len()) {
            Ok(true) => {}
            Ok(false) => return,
            Err(reason) => return self.fail_run(run, reason),
        }
        if client.first_byte.is_none() {
            self.note_first_byte(row);
        }
        self.clients[row].body_bytes_out += bytes.len() as u64;
        if !self.gather_for(row, bytes) {
            // No slice left: send this client's so far. No gather left: settle everybody's.
            self.flush_client(row);
            if self.sender.is_full() {
                self.settle_early();
            }
            if !self.runs[run].has_client() || !self.gather_for(row, bytes) {
                return; // the client broke while it was flushed
            }
        }
        self.client_dirty(row);
    }

    /// The run's last word to its client; the client is its own from here on.
    pub(super) fn end_client(&mut self, run: usize, outcome: Result<(), Reason>) {
        let row = self.runs[run].client.0 as usize;
        self.runs[run].client = (NONE, 0);
        let whole = outcome.and_then(|()| self.clients[row].meter.finish());
        match whole {
            Ok(()) => self.finish_answer(row),
            Err(reason) => self.client_run_failed(row, reason),
        }
    }

    /// The answer's body is complete.
    fn finish_answer(&mut self, row: usize) {
        let client = &mut self.clients[row];
        client.phase = Phase::Flushing;
        client.ended = true;
        self.client_dirty(row);
    }

    /// The client's run failed and is not its any more. `[D-10]` `[D-40]`
    pub(super) fn client_run_failed(&mut self, row: usize, reason: Reason) {
        self.metrics.reason(reason);
        self.clients[row].reason = Some(reason);
        let Some(plan) = self.clients[row].plan else {
            let retry = if reason.blame() == Blame::Capacity || reason == Reason::NodeLost {
                RETRY_AFTER_S
            } else {
                0
            };
            self.clients[row].phase = Phase::Flushing; // it owns no run any more
            return self.answer_refusal(row, reason, retry, None);
        };
        self.metrics.inc(ShardMetric::ResponsesAborted);
        if !plan.event_stream {
            self.log_access(row);
            self.clients[row].phase = Phase::Flushing; // it owns no run any more
            self.close_client(row, true);
            return;
        }
        self.clients[row].asked.keep_alive = false;
        let client = &self.clients[row];
        let mut event = [0; surface::ERROR_BYTES_MAX];
        let length = client
            .surface()
            .write_error_event(&mut event, reason, client.request_id())
            .expect("ERROR_BYTES_MAX is enough");
        self.flush_client(row);
        if self.clients[row].phase == Phase::Closing {
            return;
        }
        self.clients[row].phase = Phase::Flushing;
        self.send_body(row, [&event[..length]].into_iter());
        self.finish_answer_if_open(row);
    }

    fn finish_answer_if_open(&mut self, row: usize) {
        if self.clients[row].phase == Phase::Flushing {
            self.finish_answer(row);
        }
    }

    pub(super) fn note_first_byte(&mut self, row: usize) {
        let client = &mut self.clients[row];
        client.first_byte = Some(self.now);
        if (200..300).contains(&client.status) {
            let waited = self
                .now
                .as_nanos()
                .saturating_sub(client.submitted.as_nanos());
            self.metrics
                .observe(ShardHistogram::TimeToFirstToken, client.operation, waited);
        }
    }

    // ── answers of the Edge ──────────────────────────────────────────────────────────────────────

    /// Appends bytes behind everything sent so far.
    pub(super) fn send_to(&mut self, row: usize, bytes: &[u8]) {
        if !self.has_room(row, bytes.len()) {
            return;
        }
        let client = &mut self.clients[row];
        let appended = self
            .sender
            .append(&mut client.output, client.records.as_mut(), bytes);
        match appended {
            Ok(()) => self.client_dirty(row),
            Err(error) => self.client_send_failed(row, error),
        }
    }

    fn send_scratch(&mut self, row: usize, length: usize) {
        if !self.has_room(row, length) {
            return;
        }
        let client = &mut self.clients[row];
        let bytes = &self.scratch[..length];
        let appended = self
            .sender
            .append(&mut client.output, client.records.as_mut(), bytes);
        match appended {
            Ok(()) => self.client_dirty(row),
            Err(error) => self.client_send_failed(row, error),
        }
    }

    /// Makes room for an answer's bytes. `false`: the client held most of the pool itself, and is closed.
    fn has_room(&mut self, row: usize, bytes: usize) -> bool {
        self.make_room(bytes);
        self.clients[row].phase != Phase::Closing
    }

    /// Refuses a request that was read whole; the connection may go on.
    pub(super) fn refuse(&mut self, row: usize, reason: Reason, retry_after_s: u16) {
        self.metrics.reason(reason);
        self.clients[row].reason = Some(reason);
        self.answer_refusal(row, reason, retry_after_s, None);
    }

    /// Control refused the waiting request; it has counted why.
    pub(super) fn refuse_by_control(&mut self, row: usize, reason: Reason, retry_after_s: u16) {
        self.clients[row].reason = Some(reason);
        self.answer_refusal(row, reason, retry_after_s, None);
    }

    /// Refuses a request of which something may be unread: the connection ends with the answer. `[D-42]`
    pub(super) fn refuse_unread(&mut self, row: usize, reason: Reason) {
        self.refuse_with(row, reason, 0, None);
    }

    pub(super) fn refuse_with(
        &mut self,
        row: usize,
        reason: Reason,
        retry_after_s: u16,
        allow: Option<Allow>,
    ) {
        if self.clients[row].phase == Phase::Closing {
            return;
        }
        let retry = if reason.blame() == Blame::Capacity {
            retry_after_s.max(RETRY_AFTER_S)
        } else {
            retry_after_s
        };
        if self.has_unread_body(row) {
            self.clients[row].asked.keep_alive = false;
        }
        self.metrics.reason(reason);
        self.clients[row].reason = Some(reason);
        self.answer_refusal(row, reason, retry, allow);
    }

    /// Something of the request's body has not been read, or its end is not known.
    fn has_unread_body(&self, row: usize) -> bool {
        let client = &self.clients[row];
        match (client.phase, client.parsed) {
            (Phase::Head, Some(head)) => {
                !matches!(head.body, BodyFraming::None | BodyFraming::Length(0))
            }
            _ => true,
        }
    }

    fn answer_refusal(
        &mut self,
        row: usize,
        reason: Reason,
        retry_after_s: u16,
        allow: Option<Allow>,
    ) {
        let client = &self.clients[row];
        let refusal = Refusal {
            surface: client.surface(),
            reason,
            asked: client.asked,
            request_id: client.request_id(),
            retry_after_s,
            allow,
        };
        let status = refusal.status();
        let length = refusal
            .write(&mut self.scratch[..])
            .expect("scratch is large");
        self.answer_scratch(row, status, length);
    }

    /// The answer of ours to the client's request, its body aside.
    pub(super) fn simple<'a>(
        &'a self,
        row: usize,
        status: u16,
        content_type: &'a str,
    ) -> SimpleResponse<'a> {
        let client = &self.clients[row];
        SimpleResponse {
            asked: client.asked,
            status,
            content_type,
            request_id: client.request_id(),
            source: None,
            retry_after_s: 0,
            allow: None,
        }
    }

    fn answer_simple(
        &mut self,
        row: usize,
        status: u16,
        content_type: &str,
        allow: Option<Allow>,
        body: &[u8],
    ) {
        self.close_if_body(row);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut response = self.simple(row, status, content_type);
        response.allow = allow;
        let length =
            write_simple_response(&mut scratch, &response, body).expect("scratch is large");
        self.scratch = scratch;
        self.answer_scratch(row, status, length);
    }

    pub(super) fn answer_text(&mut self, row: usize, status: u16, text: &[u8]) {
        self.answer_simple(row, status, "text/plain; charset=utf-8", None, text);
    }

    pub(super) fn answer_options(&mut self, row: usize, allow: Allow) {
        self.answer_simple(row, 204, "", Some(allow), b"");
    }

    pub(super) fn answer_model(&mut self, row: usize, model: ModelIndex) {
        let catalog = std::sync::Arc::clone(&self.catalog);
        self.answer_simple(row, 200, surface::JSON, None, catalog.model(model));
    }

    /// `GET /v1/models`: from the Edge's own catalog, whatever is connected. `[D-17]`
    pub(super) fn answer_models(&mut self, row: usize) {
        self.close_if_body(row);
        let catalog = std::sync::Arc::clone(&self.catalog);
        let keys = std::sync::Arc::clone(&self.keys);
        let caller = self.clients[row].caller;
        let bytes = catalog.list_bytes(&keys, caller);
        let mut scratch = std::mem::take(&mut self.scratch);
        let response = self.simple(row, 200, surface::JSON);
        let length = write_simple_head(&mut scratch, &response, bytes).expect("scratch is large");
        self.scratch = scratch;
        self.send_scratch(row, length);
        if !self.clients[row].asked.head_only {
            for piece in catalog.list(&keys, caller) {
                if self.clients[row].phase == Phase::Closing {
                    return;
                }
                self.send_to(row, piece);
            }
        }
        self.answered(row, 200);
    }

    fn close_if_body(&mut self, row: usize) {
        if self.has_unread_body(row) {
            self.clients[row].asked.keep_alive = false;
        }
    }

    fn answer_scratch(&mut self, row: usize, status: u16, length: usize) {
        self.send_scratch(row, length);
        self.answered(row, status);
    }

    /// The whole answer is queued.
    pub(super) fn answered(&mut self, row: usize, status: u16) {
        let unread = matches!(self.clients[row].phase, Phase::Body)
            || (self.clients[row].phase == Phase::Head && self.has_unread_body(row));
        if self.clients[row].phase == Phase::Closing {
            return;
        }
        self.count_status(status);
        self.clients[row].status = status;
        self.clients[row].framing = Framing::Plain;
        if unread {
            self.log_access(row);
            self.drain_client(row);
        } else {
            self.clients[row].deadline = None;
            self.clients[row].phase = Phase::Flushing;
            self.client_dirty(row);
        }
    }

    fn count_status(&mut self, status: u16) {
        self.metrics.inc(match status / 100 {
            2 => ShardMetric::Responses2xx,
            3 => ShardMetric::Responses3xx,
            4 => ShardMetric::Responses4xx,
            5 => ShardMetric::Responses5xx,
            _ => ShardMetric::ResponsesOther,
        });
    }

    /// The request's one access line, and its duration. `[D-25]`
    pub(super) fn log_access(&mut self, row: usize) {
        let client = &self.clients[row];
        let Some(_) = client.parsed else { return };
        let since =
            |at: iop_proto::ids::Now| at.as_nanos().saturating_sub(client.submitted.as_nanos());
        let duration_ns = since(self.now);
        let operation = client.model.map(|_| client.operation);
        let mut request_id = [0; 16];
        for (byte, pair) in request_id.iter_mut().zip(client.own_id.chunks_exact(2)) {
            let nibble = |digit: u8| {
                if digit <= b'9' {
                    digit - b'0'
                } else {
                    digit - b'a' + 10
                }
            };
            *byte = nibble(pair[0]) << 4 | nibble(pair[1]);
        }
        let record = AccessRecord {
            request_id,
            ended: self.now,
            duration_ns,
            first_byte_ns: client.first_byte.map_or(AccessRecord::NEVER, since),
            bytes_out: client.body_bytes_out,
            bytes_in: u32::try_from(client.body_bytes_in).unwrap_or(u32::MAX),
            model: client.model,
            provider: client.provider,
            status: client.status,
            operation,
            reason: client.reason,
        };
        if let Some(operation) = operation {
            self.metrics
                .observe(ShardHistogram::RequestDuration, operation, duration_ns);
        }
        match self.access.record(record) {
            Recorded::Sent | Recorded::Skipped => {}
            Recorded::Dropped => self.metrics.inc(ShardMetric::AccessLinesDropped),
        }
    }
}
