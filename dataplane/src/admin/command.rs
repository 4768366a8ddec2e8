//! `POST /nodes/{id}/commands`: an operator asks a node something, and reads its whole answer. `[R-254]`
//!
//! ```text
//! admin thread --CommandRequest--> control --Effect::Command--> shard --> node
//!       ^                            ^ finished: answered, timed out, lost
//!       └------ CommandOutcome ------┘<------- CommandText ------- shard <-- node
//! ```
//! Lives on: the admin thread; requests cross to control, whole answers come from shards. Bound:
//! `REQUESTS_MAX` on their way to control, `OPERATOR_COMMANDS_MAX` outstanding, one deadline.
use core::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use iop_control::edge::{CommandEnd, CommandRefusal};
use iop_control::step::CommandId;
use iop_proto::domain::{CommandKind, Metadata, NodeCommandResponse};
use iop_proto::limits::OPERATOR_COMMANDS_MAX;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Requests that wait for control's next turn.
const REQUESTS_MAX: usize = 8;
/// A request's body: a type and a name.
pub(super) const BODY_BYTES_MAX: usize = 4 * 1024;
/// Control ends every command by itself; this is for a control that does not.
const MARGIN: Duration = Duration::from_secs(2);

/// A node's answer, whole, from its shard to control.
#[derive(Debug)]
pub struct CommandText {
    pub(crate) command: CommandId,
    error: String,
    result: Metadata,
}

impl CommandText {
    #[must_use]
    pub fn new(command: CommandId, response: NodeCommandResponse) -> Self {
        Self {
            command,
            error: response.error,
            result: response.result,
        }
    }
}

/// A shard's end of the lane for whole answers.
pub type AnswerSender = Sender<CommandText>;

/// The lane for whole answers, from all shards to control.
#[must_use]
pub fn answer_lane() -> (AnswerSender, Receiver<CommandText>) {
    bounded(OPERATOR_COMMANDS_MAX as usize)
}

/// A command on its way to control.
#[derive(Debug)]
pub struct CommandRequest {
    pub(crate) node: String,
    pub(crate) kind: CommandKind,
    pub(crate) provider: Option<String>,
    pub(crate) reply: oneshot::Sender<Result<CommandText, CommandError>>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    Malformed,
    /// More than `BODY_BYTES_MAX`, or it broke off.
    TooLong,
    NodeUnknown,
    ProviderUnknown,
    ProviderMissing,
    NotReady,
    Busy,
    NodeLost,
    TimedOut,
    /// The node answered, and the answer was lost on its way.
    AnswerLost,
    Stopped,
}

impl CommandError {
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::Malformed | Self::ProviderMissing => StatusCode::BAD_REQUEST,
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NodeUnknown | Self::ProviderUnknown => StatusCode::NOT_FOUND,
            Self::NotReady | Self::Busy | Self::NodeLost | Self::Stopped => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::AnswerLost => StatusCode::BAD_GATEWAY,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Malformed => "command_malformed",
            Self::TooLong => "command_too_long",
            Self::NodeUnknown => "node_unknown",
            Self::ProviderUnknown => "provider_unknown",
            Self::ProviderMissing => "provider_missing",
            Self::NotReady => "node_not_ready",
            Self::Busy => "commands_busy",
            Self::NodeLost => "node_lost",
            Self::TimedOut => "command_timeout",
            Self::AnswerLost => "answer_lost",
            Self::Stopped => "stopped",
        }
    }

    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Malformed => "The body is a JSON object with type and provider.",
            Self::TooLong => "The body of a command has at most 4 KiB.",
            Self::NodeUnknown => "No such node is configured.",
            Self::ProviderUnknown => "The node has no such provider.",
            Self::ProviderMissing => "capabilities asks about one provider.",
            Self::NotReady => "The node is not connected and ready.",
            Self::Busy => "Too many commands are unanswered.",
            Self::NodeLost => "The node's connection ended before its answer.",
            Self::TimedOut => "The node did not answer in time.",
            Self::AnswerLost => "The node's answer was lost on its way.",
            Self::Stopped => "The edge is shutting down.",
        }
    }
}

impl From<CommandRefusal> for CommandError {
    fn from(refusal: CommandRefusal) -> Self {
        match refusal {
            CommandRefusal::NotReady => Self::NotReady,
            CommandRefusal::Busy => Self::Busy,
        }
    }
}

impl CommandError {
    /// Why a command that has ended so has no answer to show.
    #[must_use]
    pub const fn of(end: CommandEnd) -> Self {
        match end {
            CommandEnd::Answered => Self::AnswerLost,
            CommandEnd::NodeLost => Self::NodeLost,
            CommandEnd::TimedOut => Self::TimedOut,
        }
    }
}

/// The asking end of the lane to control.
pub struct CommandSource {
    requests: Sender<CommandRequest>,
    deadline: Duration,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl core::fmt::Debug for CommandSource {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CommandSource").finish_non_exhaustive()
    }
}

/// The lane: control polls the receiver each turn, and `wake` ends its sleep. `command_ms`: what
/// control gives a node.
#[must_use]
pub fn command_lane(
    command_ms: u64,
    wake: impl Fn() + Send + Sync + 'static,
) -> (CommandSource, Receiver<CommandRequest>) {
    let (requests, receiver) = bounded(REQUESTS_MAX);
    let source = CommandSource {
        requests,
        deadline: Duration::from_millis(command_ms) + MARGIN,
        wake: Box::new(wake),
    };
    (source, receiver)
}

/// What an operator sends.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    r#type: KindWord,
    provider: Option<String>,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum KindWord {
    Capabilities,
    TransportStatus,
    ProviderStatus,
}

impl KindWord {
    const fn kind(self) -> CommandKind {
        match self {
            Self::Capabilities => CommandKind::Capabilities,
            Self::TransportStatus => CommandKind::TransportStatus,
            Self::ProviderStatus => CommandKind::ProviderStatus,
        }
    }
}

/// What an operator reads: the node's own words.
#[derive(Serialize)]
struct Document<'a> {
    node_id: &'a str,
    r#type: KindWord,
    /// Empty on success.
    error: &'a str,
    result: &'a Metadata,
}

impl CommandSource {
    /// Asks `node` what `body` says; the answer as JSON.
    pub(super) async fn ask(&self, node: String, body: &[u8]) -> Result<Bytes, CommandError> {
        let asked: Asked = serde_json::from_slice(body).map_err(|_| CommandError::Malformed)?;
        if matches!(asked.r#type, KindWord::Capabilities) && asked.provider.is_none() {
            return Err(CommandError::ProviderMissing);
        }
        let (reply, answer) = oneshot::channel();
        let request = CommandRequest {
            node: node.clone(),
            kind: asked.r#type.kind(),
            provider: asked.provider,
            reply,
        };
        self.requests
            .try_send(request)
            .map_err(|error| match error {
                TrySendError::Full(_) => CommandError::Busy,
                TrySendError::Disconnected(_) => CommandError::Stopped,
            })?;
        (self.wake)();
        let answer = tokio::time::timeout(self.deadline, answer).await;
        let text = answer
            .map_err(|_late| CommandError::TimedOut)?
            .map_err(|_ended| CommandError::Stopped)??;
        let document = Document {
            node_id: &node,
            r#type: asked.r#type,
            error: &text.error,
            result: &text.result,
        };
        let mut text = serde_json::to_vec(&document).expect("strings always serialise");
        text.push(b'\n');
        Ok(text.into())
    }
}
