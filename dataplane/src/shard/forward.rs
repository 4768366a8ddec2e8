//! HOT. One frame of a provider's answer, whole or cut through, or one event of a normalized run: whose
//! it is, whether its stream's form holds, and on to the client.
//!
//! Lives on: the shard of the node's session. Bound: one frame; no state beyond the run's slot.
//!
//! Transport builds no HTTP answer: of the client this file sees `client_start` and `client_body`;
//! `client_observes`, `client_text` and `client_completes`; `end_client`. `[R-349]`
use iop_control::step::Ending;
use iop_proto::domain::FrameKind;
use iop_proto::framing::MessageType;
use iop_proto::legacy;
use iop_proto::limits::HEADERS_MAX;
use iop_proto::reason::Reason;
use iop_proto::view::{CutStart, RunEventType, RunEventView, TunnelFrameView};

use super::Shard;
use super::run::Stage;
use super::session::Standing;
use crate::metrics::ShardMetric;

/// A run's last word.
enum Word<'a> {
    /// END.
    End,
    Complete(&'a RunEventView<'a>),
    /// The error text of an ERROR, or of an error or cancelled event; and the whole message, if it
    /// carries an ExecutionFailure.
    Failed(&'a [u8], Option<(MessageType, &'a [u8])>),
    /// It broke its stream's form.
    Broken,
}

impl Shard {
    /// A whole `ProviderTunnelFrame` from a registered session.
    pub(super) fn tunnel_frame(&mut self, session: usize, payload: &[u8]) -> Result<(), Reason> {
        let frame = TunnelFrameView::parse(payload).map_err(|error| error.reason())?;
        let kind = frame.frame_kind();
        if kind == FrameKind::ResponseStart {
            Self::check_start(payload)?;
        }
        self.count_frame(kind, frame.body.len());
        let Some(run) = self.answered_run(session, frame.run_id)? else {
            return Ok(());
        };
        if !self.runs[run].is_tunnel {
            let is_terminal = matches!(kind, FrameKind::End | FrameKind::Error);
            return self.other_family(session, run, is_terminal);
        }
        let in_order = self.take_sequence(run, frame.sequence);
        match kind {
            FrameKind::End if in_order && self.runs[run].head_seen => {
                self.terminal(session, run, Word::End)
            }
            FrameKind::Error if in_order => {
                let kind = MessageType::ProviderTunnelFrame;
                let evidence = frame.has_failure.then_some((kind, payload));
                self.terminal(session, run, Word::Failed(frame.error, evidence))
            }
            FrameKind::End | FrameKind::Error => self.terminal(session, run, Word::Broken),
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
                self.client_start(run, frame.status_code, frame.headers.iter());
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
    fn terminal(&mut self, session: usize, run: usize, word: Word<'_>) -> Result<(), Reason> {
        if self.is_being_sent(session, run) {
            return Err(Reason::EnvelopeWrongState); // an answer before the request was whole
        }
        self.runs[run].cancelled = true; // from here on there is nothing left to cancel
        let has_client = self.runs[run].has_client();
        let (ending, outcome) = match word {
            Word::End => (Ending::Complete, Ok(())),
            Word::Complete(event) => {
                if has_client {
                    self.client_completes(run, event);
                }
                self.end_run(run, Some(Ending::Complete));
                return Ok(());
            }
            Word::Failed(error, Some((kind, payload))) => {
                self.failed_terminal(run, kind, payload, failure_of(error));
                return Ok(());
            }
            Word::Failed(error, None) => (Ending::Error, Err(failure_of(error))),
            Word::Broken => (Ending::Violation, Err(Reason::StreamViolation)),
        };
        if has_client {
            self.end_client(run, outcome);
        }
        self.end_run(run, Some(ending));
        match ending {
            Ending::Violation => self.violation(session),
            Ending::Complete | Ending::Error => Ok(()),
        }
    }

    /// A frame that breaks its stream's form fails the run, not the connection. `[A-29]` `[D-41]`
    fn broken_stream(&mut self, session: usize, run: usize) -> Result<(), Reason> {
        self.fail_run(run, Reason::StreamViolation);
        self.violation(session)
    }

    /// A frame or event of the wrong family: a terminal one releases, any other fails the run. `[D-41]`
    /// `[A-29]`
    fn other_family(
        &mut self,
        session: usize,
        run: usize,
        is_terminal: bool,
    ) -> Result<(), Reason> {
        if is_terminal {
            self.terminal(session, run, Word::Broken)
        } else {
            self.broken_stream(session, run)
        }
    }

    /// The run of `session` that `id` names and whose request has begun; `None`: the session was never
    /// sent anything.
    fn answered_run(&mut self, session: usize, id: &[u8]) -> Result<Option<usize>, Reason> {
        if self.sessions[session].standing != Standing::Ready {
            self.metrics.inc(ShardMetric::FramesDropped);
            return Ok(None);
        }
        let Some(run) = self.find_run(session, id) else {
            self.metrics.inc(ShardMetric::FramesDropped);
            self.violation(session)?;
            return Ok(None);
        };
        if self.runs[run].stage != Stage::Begun {
            self.violation(session)?; // an answer to a request that was not sent
            return Ok(None);
        }
        Ok(Some(run))
    }

    // ── events ───────────────────────────────────────────────────────────────────────────────────

    /// A `RunEvent` from a registered session: start once and first, then deltas, then one terminal.
    /// `[R-083]`
    pub(super) fn run_event(&mut self, session: usize, payload: &[u8]) -> Result<(), Reason> {
        let event = RunEventView::parse(payload).map_err(|error| error.reason())?;
        let kind = event.event_type();
        self.count_frame(kind_of(kind), event.delta.len());
        let Some(run) = self.answered_run(session, event.run_id)? else {
            return Ok(());
        };
        if self.runs[run].is_tunnel {
            return self.other_family(session, run, kind.is_terminal());
        }
        self.runs[run].deadline = self.now.after_ms(self.runs[run].response_wait_ms);
        if self.runs[run].has_client() {
            self.client_observes(run, &event);
        }
        let started = self.runs[run].head_seen;
        match kind {
            RunEventType::Complete if started => {
                self.terminal(session, run, Word::Complete(&event))
            }
            RunEventType::Complete => self.terminal(session, run, Word::Broken),
            RunEventType::Error | RunEventType::Cancelled => {
                let is_evidence = event.has_failure && kind == RunEventType::Error;
                let evidence = is_evidence.then_some((MessageType::RunEvent, payload));
                self.terminal(session, run, Word::Failed(event.error, evidence))
            }
            RunEventType::Start if !started => {
                self.runs[run].head_seen = true;
                Ok(())
            }
            RunEventType::Delta if started => {
                if self.runs[run].has_client() && !event.delta.is_empty() {
                    self.client_text(run, event.delta);
                }
                Ok(())
            }
            RunEventType::Start | RunEventType::Delta => self.broken_stream(session, run),
            // Of a newer node: not forwarded, no terminal, counted. `[R-087]`
            RunEventType::Other => Ok(()),
        }
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
        let run_takes = self.runs[run].is_tunnel && self.runs[run].head_seen;
        if self.take_sequence(run, start.sequence) && run_takes {
            return Some(run);
        }
        self.fail_run(run, Reason::StreamViolation);
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

/// Events count as the frames that they are to their runs.
const fn kind_of(event: RunEventType) -> FrameKind {
    match event {
        RunEventType::Start => FrameKind::ResponseStart,
        RunEventType::Delta => FrameKind::Body,
        RunEventType::Complete => FrameKind::End,
        RunEventType::Error | RunEventType::Cancelled => FrameKind::Error,
        RunEventType::Other => FrameKind::Unknown(0),
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
