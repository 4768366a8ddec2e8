//! The surfaces clients speak: which operation a path names, and in what shape each is answered.
//!
//! Lives on: shards; rendered parts are made when a configuration is loaded. Bound: fixed tables,
//! `ERROR_BYTES_MAX`.
use iop_proto::catalog::Operation;
use iop_proto::reason::Reason;

use crate::shard::http1::{Allow, Asked, SimpleResponse, write_simple_response};
use crate::text::{NoRoom, Writer};

mod anthropic;
pub mod json;
pub mod openai;

/// Media type of every JSON answer.
pub const JSON: &str = "application/json";
/// Every error body and in-band error event fits, whatever its request id.
pub const ERROR_BYTES_MAX: usize = 640;

/// The operation that is requested by POST to `path`, query excluded. `[D-09]`
#[must_use]
pub fn operation_at(path: &[u8]) -> Option<Operation> {
    Operation::ALL
        .into_iter()
        .find(|operation| operation.path().as_bytes() == path)
}

/// The shape of errors, of a whole answer's and of those within a stream. `[D-09]` `[D-10]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// `{"error":{…}}`, in a stream as one more unnamed event.
    OpenAi,
    /// OpenAI's Responses: the same body; its streams name their events.
    Responses,
    /// `{"type":"error","error":{…},"request_id"}`, in a stream as an event named `error`.
    Anthropic,
}

impl Surface {
    /// What whoever asks for `path`, query excluded, can read, whether or not anything is there.
    #[must_use]
    pub fn at(path: &[u8]) -> Self {
        let is_under = |operation: Operation| {
            let rest = path.strip_prefix(operation.path().as_bytes());
            rest.is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
        };
        if is_under(Operation::Messages) {
            Self::Anthropic
        } else if is_under(Operation::Responses) {
            Self::Responses
        } else {
            Self::OpenAi
        }
    }

    /// Writes the error object that is an answer's whole body; returns its length. `request_id`: as
    /// the answer's head has it, of bytes that JSON takes as they are.
    ///
    /// # Errors
    /// `NoRoom`: never with `ERROR_BYTES_MAX` bytes.
    pub fn write_error(
        self,
        out: &mut [u8],
        reason: Reason,
        request_id: &[u8],
    ) -> Result<usize, NoRoom> {
        let mut text = Writer::new(out);
        match self {
            Self::OpenAi | Self::Responses => openai::put_error(&mut text, reason)?,
            Self::Anthropic => anthropic::put_error(&mut text, reason, request_id)?,
        }
        Ok(text.written())
    }

    /// Writes the event that tells a failure within a stream; returns its length. The stream ends
    /// after it without `[DONE]` or `message_stop`. It begins with an empty line, so that an event
    /// the provider broke off cannot swallow it; after a whole event that line means nothing.
    /// `[D-10]`
    ///
    /// # Errors
    /// `NoRoom`: never with `ERROR_BYTES_MAX` bytes.
    pub fn write_error_event(
        self,
        out: &mut [u8],
        reason: Reason,
        request_id: &[u8],
    ) -> Result<usize, NoRoom> {
        let mut text = Writer::new(out);
        text.put(match self {
            Self::OpenAi => b"\n\ndata: ",
            Self::Responses | Self::Anthropic => b"\n\nevent: error\ndata: ",
        })?;
        match self {
            Self::OpenAi => openai::put_error(&mut text, reason)?,
            Self::Responses => openai::put_responses_error(&mut text, reason)?,
            Self::Anthropic => anthropic::put_error(&mut text, reason, request_id)?,
        }
        text.put(b"\n\n")?;
        Ok(text.written())
    }
}

/// What an answer to a refused request says beside the reason.
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    pub surface: Surface,
    pub reason: Reason,
    pub asked: Asked,
    pub request_id: &'a [u8],
    /// Seconds; 0: no Retry-After.
    pub retry_after_s: u16,
    /// For `MethodNotAllowed`.
    pub allow: Option<Allow>,
}

impl Refusal<'_> {
    /// A reason that answers no request is answered as a failure of the node. `[D-11]` `[D-40]`
    #[must_use]
    pub const fn status(&self) -> u16 {
        match self.reason.status() {
            0 => 502,
            status => status,
        }
    }

    /// Writes the whole answer, head and error object; returns its length.
    ///
    /// # Errors
    /// `NoRoom` when `out` is too short; with `2 * ERROR_BYTES_MAX` bytes never.
    pub fn write(&self, out: &mut [u8]) -> Result<usize, NoRoom> {
        let mut body = [0; ERROR_BYTES_MAX];
        let len = self
            .surface
            .write_error(&mut body, self.reason, self.request_id)?;
        let answer = SimpleResponse {
            asked: self.asked,
            status: self.status(),
            content_type: JSON,
            request_id: self.request_id,
            source: Some(self.reason.source()),
            retry_after_s: self.retry_after_s,
            allow: self.allow,
        };
        write_simple_response(out, &answer, &body[..len])
    }
}
