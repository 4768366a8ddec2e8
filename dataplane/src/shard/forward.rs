//! HOT. One frame of a provider's answer, whole or cut through: whose it is, whether its stream's form
//! holds, and on to the client.
//!
//! Lives on: the shard of the node's session. Bound: one frame; no state beyond the run's slot.
//!
//! Transport builds no HTTP answer: of the client this file sees `client_start`, `client_body`,
//! `client_end` and `client_run_failed`. `[R-349]`
use iop_control::step::Ending;
use iop_proto::domain::FrameKind;
use iop_proto::framing::MessageType;
use iop_proto::legacy;
use iop_proto::limits::HEADERS_MAX;
use iop_proto::reason::Reason;
use iop_proto::view::{CutStart, RunEventView, TunnelFrameView};

use super::Shard;
use super::run::Stage;
use super::session::Standing;
use crate::metrics::ShardMetric;

impl Shard {
    /// A whole `ProviderTunnelFrame` from a registered session.
    pub(super) fn tunnel_frame(&mut self, session: usize, payload: &[u8]) -> Result<(), Reason> {
        let frame = TunnelFrameView::parse(payload).map_err(|error| error.reason())?;
        let kind = frame.frame_kind();
        if kind == FrameKind::ResponseStart {
            Self::check_start(payload)?;
        }
        self.count_frame(kind, frame.body.len());
        if self.sessions[session].standing != Standing::Ready {
            self.metrics.inc(ShardMetric::FramesDropped);
            return Ok(()); // nothing was ever sent to it
        }
        let Some(run) = self.find_run(session, frame.run_id) else {
            self.metrics.inc(ShardMetric::FramesDropped);
            return self.violation(session);
        };
        if self.runs[run].stage != Stage::Begun {
            return self.violation(session); // an answer to a request that was not sent
        }
        let in_order = self.take_sequence(run, frame.sequence);
        match kind {
            FrameKind::End | FrameKind::Error => {
                self.terminal(session, run, &frame, in_order, payload)
            }
            _ if !in_order => self.broken_stream(session, run),
            FrameKind::Body => self.body(session, run, frame.body),
            FrameKind::ResponseStart => self.start(session, run, &frame),
            // Observation, and kinds of a newer node: sequence-checked, not forwarded.
            FrameKind::Usage | FrameKind::Unknown(_) => Ok(()),
        }
    }

    /// Whether `sequence` continues the run's stream: first 0 or 1, then one more each. `[A-29]`
    fn take_sequence(&mut self, run: usize, sequence: u64) -> bool {
        let run = &mut self.runs[run];
        let in_order = match run.sequence {
            None => sequence <= 1,
            Some(expected) => sequence == expected,
        };
        run.sequence = Some(sequence.wrapping_add(1));
        run.deadline = self.now.after_ms(run.response_wait_ms);
        in_order
    }

    fn start(
        &mut self,
        session: usize,
        run: usize,
        frame: &TunnelFrameView<'_>,
    ) -> Result<(), Reason> {
        if self.runs[run].head_seen {
            return self.broken_stream(session, run);
        }
        self.runs[run].head_seen = true;
        if self.runs[run].has_client() {
            if frame.headers.len() > HEADERS_MAX as usize {
                self.fail_run(run, Reason::ResponseMalformed);
            } else {
                self.client_start(run, frame.status_code, frame.headers);
            }
        }
        Ok(())
    }

    fn body(&mut self, session: usize, run: usize, bytes: &[u8]) -> Result<(), Reason> {
        if !self.runs[run].head_seen {
            return self.broken_stream(session, run);
        }
        if self.runs[run].has_client() && !bytes.is_empty() {
            self.client_body(run, bytes);
        }
        Ok(())
    }

    /// A terminal releases the lease whatever its form; only a well-formed one speaks to the client,
    /// and one with evidence not before control has decided by it. `[A-29]` `[R-246]` `[R-168]`
    fn terminal(
        &mut self,
        session: usize,
        run: usize,
        frame: &TunnelFrameView<'_>,
        in_order: bool,
        payload: &[u8],
    ) -> Result<(), Reason> {
        if self.is_being_sent(session, run) {
            return Err(Reason::EnvelopeWrongState); // an answer before the request was whole
        }
        let is_end = frame.frame_kind() == FrameKind::End;
        let well_formed = in_order && (!is_end || self.runs[run].head_seen);
        let client = self.runs[run].has_client();
        if well_formed && !is_end && frame.has_failure {
            let reason = failure_of(frame.error);
            self.failed_terminal(run, MessageType::ProviderTunnelFrame, payload, reason);
            return Ok(());
        }
        let (ending, verdict) = if !well_formed {
            if client {
                self.end_client(run, Err(Reason::StreamViolation));
            }
            (Ending::Violation, self.violation(session))
        } else if is_end {
            if client {
                self.end_client(run, Ok(()));
            }
            (Ending::Complete, Ok(()))
        } else {
            if client {
                self.end_client(run, Err(failure_of(frame.error)));
            }
            (Ending::Error, Ok(()))
        };
        self.end_run(run, Some(ending));
        verdict
    }

    /// A frame that breaks its stream's form fails the run, not the connection. `[A-29]` `[D-41]`
    fn broken_stream(&mut self, session: usize, run: usize) -> Result<(), Reason> {
        if self.runs[run].has_client() {
            self.end_client(run, Err(Reason::StreamViolation));
        }
        self.cancel_run(run);
        self.violation(session)
    }

    /// A `RunEvent` on a tunnel is of the wrong family: a terminal one releases, any other fails the
    /// run. `[D-41]` `[A-29]`
    pub(super) fn run_event(&mut self, session: usize, payload: &[u8]) -> Result<(), Reason> {
        let event = RunEventView::parse(payload).map_err(|error| error.reason())?;
        self.metrics.inc(ShardMetric::FramesOther);
        if self.sessions[session].standing != Standing::Ready {
            self.metrics.inc(ShardMetric::FramesDropped);
            return Ok(());
        }
        let found = self.find_run(session, event.run_id);
        let Some(run) = found.filter(|&run| self.runs[run].stage == Stage::Begun) else {
            self.metrics.inc(ShardMetric::FramesDropped);
            return self.violation(session);
        };
        if !event.event_type().is_terminal() {
            return self.broken_stream(session, run);
        }
        if self.is_being_sent(session, run) {
            return Err(Reason::EnvelopeWrongState);
        }
        if self.runs[run].has_client() {
            self.end_client(run, Err(Reason::StreamViolation));
        }
        self.end_run(run, Some(Ending::Violation));
        self.violation(session)
    }

    // ── cut through ──────────────────────────────────────────────────────────────────────────────

    /// The head of a BODY frame whose body follows piece by piece: the run that wants it.
    pub(super) fn cut_begins(&mut self, session: usize, start: &CutStart) -> Option<usize> {
        self.count_frame(FrameKind::Body, start.body_len as usize);
        let found = start.run_id.and_then(|id| self.find_run(session, &id));
        let Some(run) = found.filter(|&run| self.runs[run].stage == Stage::Begun) else {
            self.metrics.inc(ShardMetric::FramesDropped);
            self.note_violation(session);
            return None;
        };
        if self.take_sequence(run, start.sequence) && self.runs[run].head_seen {
            return Some(run);
        }
        if self.runs[run].has_client() {
            self.end_client(run, Err(Reason::StreamViolation));
        }
        self.cancel_run(run);
        self.note_violation(session);
        None
    }

    /// A piece of a cut-through body.
    pub(super) fn cut_body(&mut self, run: usize, bytes: &[u8]) {
        // The run cannot have ended: its terminal would have to come behind this frame.
        self.runs[run].deadline = self.now.after_ms(self.runs[run].response_wait_ms);
        if self.runs[run].has_client() {
            self.client_body(run, bytes);
        }
    }

    fn note_violation(&mut self, session: usize) {
        if let Err(reason) = self.violation(session) {
            self.close_session(session, reason);
        }
    }

    fn count_frame(&mut self, kind: FrameKind, body_bytes: usize) {
        self.metrics.inc(match kind {
            FrameKind::ResponseStart => ShardMetric::FramesResponseStart,
            FrameKind::Body => ShardMetric::FramesBody,
            FrameKind::End => ShardMetric::FramesEnd,
            FrameKind::Error => ShardMetric::FramesError,
            FrameKind::Usage | FrameKind::Unknown(_) => ShardMetric::FramesOther,
        });
        self.metrics
            .add(ShardMetric::FrameBodyBytes, body_bytes as u64);
        if self.plant {
            crate::alloc::plant();
        }
    }
}

/// What a node's error text means to a client that still waits: one that nobody cancelled was not
/// cancelled by its client. `[D-40]`
fn failure_of(error: &[u8]) -> Reason {
    match legacy::reason(error) {
        Reason::ClientGone => Reason::NodeRejected,
        other => other,
    }
}
