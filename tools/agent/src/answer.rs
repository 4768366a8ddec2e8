//! What an attempt answers: frames of a tunnel or events of a run, from the same outcomes.
//!
//! Lives on: the attempt's task; a refusal is built by the main task. View: one answer.
//! Bound: a part of at most `BODY_FRAME_BYTES`.
use std::borrow::Cow;

use iop_control::node::attempt::{Failure, Output, Stall, Terminal};
use iop_proto::domain::{
    ExecutionFailure, FailureCode, Fence, FrameKind, HealthPair, Message, Metadata, Observation,
    RunEvent, RunEventKind, TunnelFrame, Usage, run_key,
};
use iop_proto::legacy::{self, ERROR_BYTES_MAX};
use iop_proto::limits::{BODY_FRAME_BYTES, RUN_DELTA_BYTES};

use crate::provider::Item;

/// Which messages an answer is made of: those of the request's kind. `[R-092]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Tunnel,
    Run,
}

/// What a call hands over, in order.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Goes on the wire.
    Part(Part),
    /// The provider moved, and nothing is said about it yet. `[A-17]`
    Progress,
    /// What the completion of a run says besides; the call ends after it.
    Completion(Completion),
}

/// What one frame or event is made of: a tunnel's begins with a head, a run's with its start.
#[derive(Debug)]
pub(crate) enum Part {
    Http(Item),
    /// `text_tools`: the answer's text may hold tool calls. `[R-305]`
    Start {
        text_tools: bool,
    },
    /// At least one byte.
    Delta(String),
}

/// Observations of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) usage: Option<Usage>,
    pub(crate) metadata: Metadata,
}

impl Part {
    /// What fits one message, with at most `allowed` > 0 bytes of a tunnel's body, and the rest.
    pub(crate) fn cut(self, allowed: u64) -> (Self, Option<Self>) {
        let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
        let most = allowed.min(BODY_FRAME_BYTES as usize);
        match self {
            Self::Http(Item::Body(mut bytes)) if bytes.len() > most => {
                let first = bytes.split_to(most);
                let rest = Self::Http(Item::Body(bytes));
                (Self::Http(Item::Body(first)), Some(rest))
            }
            Self::Delta(mut text) if text.len() > RUN_DELTA_BYTES => {
                let rest = text.split_off(text.floor_char_boundary(RUN_DELTA_BYTES));
                (Self::Delta(text), Some(Self::Delta(rest)))
            }
            whole => (whole, None),
        }
    }

    /// Bytes of a tunnel's body.
    pub(crate) const fn body_bytes(&self) -> u64 {
        match self {
            Self::Http(Item::Body(bytes)) => bytes.len() as u64,
            Self::Http(Item::Head { .. }) | Self::Start { .. } | Self::Delta(_) => 0,
        }
    }

    /// What it is to the attempt's machine.
    pub(crate) const fn output(&self) -> Output {
        match self {
            Self::Http(Item::Head { .. }) | Self::Start { .. } => Output::Head,
            Self::Http(Item::Body(_)) | Self::Delta(_) => Output::Body,
        }
    }

    pub(crate) fn message(self, run_id: String, sequence: u64) -> Message {
        let frame = |kind| TunnelFrame::new(run_id.clone(), kind, sequence);
        match self {
            Self::Http(Item::Head { status, headers }) => Message::TunnelFrame(TunnelFrame {
                status_code: status,
                headers,
                ..frame(FrameKind::ResponseStart)
            }),
            Self::Http(Item::Body(body)) => Message::TunnelFrame(TunnelFrame {
                body,
                ..frame(FrameKind::Body)
            }),
            Self::Start { text_tools } => {
                let mut event = RunEvent::new(run_id, RunEventKind::Start);
                if text_tools {
                    let key = run_key::TEXT_TOOL_FALLBACK.to_owned();
                    event.metadata.insert(key, "true".to_owned());
                }
                Message::RunEvent(event)
            }
            Self::Delta(delta) => Message::RunEvent(RunEvent {
                delta,
                ..RunEvent::new(run_id, RunEventKind::Delta)
            }),
        }
    }
}

/// Whose answer it is; what a stall terminal says beside its evidence. `[R-139]` `[R-141]`
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) family: Family,
    pub(crate) run_id: String,
    /// This node's own name of the attempt; nothing of a request is in it.
    pub(crate) attempt_id: String,
    /// Resolved instance name.
    pub(crate) adapter: String,
    /// The exact target that is executed. `[R-142]`
    pub(crate) target: String,
}

impl Identity {
    /// The one last message of an answer. `[R-109]` `[R-126]` `[R-127]`
    pub(crate) fn terminal(
        &self,
        sequence: u64,
        terminal: Terminal,
        detail: Option<&str>,
        completion: Option<Completion>,
    ) -> Message {
        let (error, failure) = match terminal {
            Terminal::Complete => (String::new(), None),
            Terminal::Error(failure) => (error_text(failure, detail), None),
            Terminal::Stalled(stall) => {
                let failure = self.failure(stall);
                (legacy::RESPONSE_STALLED.to_owned(), Some(failure))
            }
        };
        let run_id = self.run_id.clone();
        match self.family {
            Family::Tunnel => {
                let complete = terminal == Terminal::Complete;
                let kind = if complete {
                    FrameKind::End
                } else {
                    FrameKind::Error
                };
                Message::TunnelFrame(TunnelFrame {
                    error,
                    failure,
                    ..TunnelFrame::new(run_id, kind, sequence)
                })
            }
            Family::Run => {
                let Completion { usage, metadata } = match terminal {
                    Terminal::Complete => completion.unwrap_or_default(),
                    Terminal::Error(_) | Terminal::Stalled(_) => Completion::default(),
                };
                Message::RunEvent(RunEvent {
                    error,
                    failure,
                    usage,
                    metadata,
                    ..RunEvent::new(run_id, run_terminal(terminal))
                })
            }
        }
    }

    /// Everything a stall terminal says, and nothing else: both families' own metadata stays empty.
    /// `[R-133]` `[A-14]`
    fn failure(&self, stall: Stall) -> ExecutionFailure {
        ExecutionFailure {
            code: FailureCode::ResponseStalled,
            health: HealthPair::Known(stall.health),
            idle_ms: Some(stall.idle_ms),
            run_id: Some(self.run_id.clone()),
            attempt_id: Some(self.attempt_id.clone()),
            fence: Some(if stall.fenced {
                Fence::Confirmed
            } else {
                Fence::Unconfirmed
            }),
            adapter: Some(self.adapter.clone()),
            target: Some(self.target.clone()),
            observation: stall
                .observation
                .map_or(Observation::Unbound, Observation::Seq),
            dropped_keys: 0,
        }
    }
}

const fn run_terminal(terminal: Terminal) -> RunEventKind {
    match terminal {
        Terminal::Complete => RunEventKind::Complete,
        Terminal::Error(Failure::Cancelled) => RunEventKind::Cancelled, // `[A-27]`
        Terminal::Error(
            Failure::Provider | Failure::Rejected | Failure::Deadline | Failure::Draining,
        )
        | Terminal::Stalled(_) => RunEventKind::Error,
    }
}

/// One error terminal for a request that never became an attempt. `[A-13]`
pub(crate) fn refusal(
    family: Family,
    run_id: String,
    failure: Failure,
    detail: Option<&str>,
) -> Message {
    let error = error_text(failure, detail);
    match family {
        Family::Tunnel => Message::TunnelFrame(TunnelFrame {
            error,
            ..TunnelFrame::new(run_id, FrameKind::Error, 1)
        }),
        Family::Run => Message::RunEvent(RunEvent {
            error,
            ..RunEvent::new(run_id, RunEventKind::Error)
        }),
    }
}

/// Prefix of the table and, where there is one, a detail.
fn error_text(failure: Failure, detail: Option<&str>) -> String {
    let text = match detail {
        Some(detail) => Cow::Owned(format!("{}: {detail}", failure.prefix())),
        None => Cow::Borrowed(failure.prefix()),
    };
    text[..text.floor_char_boundary(ERROR_BYTES_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU64;

    use iop_proto::domain::HealthEvidence;
    use iop_proto::framing::MessageType;
    use iop_proto::map;

    use super::*;

    fn identity(family: Family) -> Identity {
        Identity {
            family,
            run_id: "r".to_owned(),
            attempt_id: "n-1".to_owned(),
            adapter: "a".to_owned(),
            target: "t".to_owned(),
        }
    }

    #[test]
    fn a_legacy_error_is_a_prefix_of_the_table_and_an_optional_detail() {
        for failure in [
            Failure::Provider,
            Failure::Rejected,
            Failure::Cancelled,
            Failure::Deadline,
            Failure::Draining,
        ] {
            let bare = error_text(failure, None);
            assert_eq!(bare, failure.prefix());
            let detailed = error_text(failure, Some("why"));
            assert_eq!(detailed, format!("{bare}: why"));
            let reason = legacy::reason(bare.as_bytes());
            assert_eq!(legacy::reason(detailed.as_bytes()), reason);
            let long = error_text(failure, Some(&"\u{d55c}".repeat(400)));
            assert!((ERROR_BYTES_MAX - 3..=ERROR_BYTES_MAX).contains(&long.len()));
        }
    }

    #[test]
    fn what_does_not_fit_one_message_is_cut_between_characters() {
        let text = format!("x{}", "\u{d55c}".repeat(RUN_DELTA_BYTES / 3 + 1));
        let (first, rest) = Part::Delta(text.clone()).cut(u64::MAX);
        let (Part::Delta(first), Some(Part::Delta(rest))) = (first, rest) else {
            panic!("a long delta is two")
        };
        assert_eq!(first.clone() + &rest, text);
        assert!(first.len() <= RUN_DELTA_BYTES && rest.len() <= 5);
        let body = vec![7; BODY_FRAME_BYTES as usize];
        let (_, rest) = Part::Http(Item::Body(body.into())).cut(u64::MAX);
        assert!(rest.is_none(), "the last length that fits");
    }

    /// The pair as it stands on the wire, each word behind its length.
    fn assert_words(health: HealthEvidence, wire: &str) {
        let words = match health {
            HealthEvidence::Available => ["\u{9}available", "\u{f}request_stalled"],
            HealthEvidence::Unavailable => ["\u{b}unavailable", "\u{12}provider_unhealthy"],
            HealthEvidence::Unknown => ["\u{7}unknown", "\u{e}health_unknown"],
        };
        assert!(words.iter().all(|word| wire.contains(word)), "{health:?}");
    }

    /// Proves [R-126], [R-133], [R-134], [R-135], [R-136], [R-137].
    #[test]
    fn r133_a_stall_says_its_evidence_in_the_failure_and_nothing_anywhere_else() {
        let keys = [
            "adapter",
            "attempt_id",
            "fence",
            "health_observation_seq",
            "idle_duration_ms",
            "liveness_classification",
            "provider_health",
            "run_id",
            "target",
        ];
        for (health, fenced, observation) in [
            (HealthEvidence::Available, true, NonZeroU64::new(7)),
            (
                HealthEvidence::Unavailable,
                false,
                NonZeroU64::new(u64::MAX),
            ),
            (HealthEvidence::Unknown, true, None),
        ] {
            let terminal = Terminal::Stalled(Stall {
                idle_ms: 5_000,
                fenced,
                health,
                observation,
            });
            let said = Completion {
                usage: Some(Usage::default()),
                metadata: [("k".to_owned(), "v".to_owned())].into(),
            };
            let said = || Some(said.clone());
            let tunnel = identity(Family::Tunnel).terminal(3, terminal, Some("x"), said());
            let Message::TunnelFrame(frame) = tunnel else {
                panic!("a tunnel ends with a frame")
            };
            assert_eq!((frame.kind, frame.sequence), (FrameKind::Error, 3));
            assert_eq!(frame.error, "response stalled");
            assert!(frame.metadata.is_empty() && frame.usage.is_none());
            let run = identity(Family::Run).terminal(3, terminal, Some("x"), said());
            let Message::RunEvent(event) = run else {
                panic!("a run ends with an event")
            };
            assert_eq!(event.kind, RunEventKind::Error);
            assert_eq!(event.error, "response stalled");
            assert!(event.metadata.is_empty() && event.usage.is_none());
            assert_eq!(event.failure, frame.failure);
            let failure = event.failure.clone().expect("a stall has evidence");
            assert_eq!(failure.health, HealthPair::Known(health));
            // On the wire: exactly the allowlist, the number left out where there is none.
            let (_, bytes) = map::encode(&Message::RunEvent(event));
            let text = String::from_utf8_lossy(&bytes).into_owned();
            assert_words(health, &text);
            for key in keys {
                let present = key != "health_observation_seq" || observation.is_some();
                assert_eq!(text.contains(key), present, "{key}");
            }
            let decoded = map::decode(MessageType::RunEvent, &bytes).expect("our own bytes");
            let Message::RunEvent(decoded) = decoded else {
                panic!("still an event")
            };
            let decoded = decoded.failure.expect("present");
            assert_eq!((decoded.dropped_keys, decoded), (0, failure));
        }
    }

    /// Proves [R-144], [R-145], [R-146], [A-27].
    #[test]
    fn r145_no_other_terminal_carries_evidence() {
        let mut terminals = vec![Terminal::Complete];
        terminals.extend(
            [
                Failure::Provider,
                Failure::Rejected,
                Failure::Cancelled,
                Failure::Deadline,
                Failure::Draining,
            ]
            .map(Terminal::Error),
        );
        for terminal in terminals {
            for family in [Family::Tunnel, Family::Run] {
                match identity(family).terminal(1, terminal, None, None) {
                    Message::TunnelFrame(frame) => {
                        assert_eq!(frame.failure, None);
                        assert_eq!(frame.error.is_empty(), frame.kind == FrameKind::End);
                    }
                    Message::RunEvent(event) => {
                        assert_eq!(event.failure, None);
                        assert_eq!(event.error.is_empty(), event.kind == RunEventKind::Complete);
                        let cancelled = terminal == Terminal::Error(Failure::Cancelled);
                        assert_eq!(event.kind == RunEventKind::Cancelled, cancelled);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}
