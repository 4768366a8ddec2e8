//! One normalized run at its provider: what its HTTP answer says, as the pieces events are made of.
//!
//! Lives on: the attempt's task. View: one run. Bound: one chunk, one unfinished line or one
//! answer of `RUN_ANSWER_BYTES_MAX`, and its tool calls.
//!
//! ```text
//! request ─► head 2xx ─► Start ─► Delta … (Progress between them) ─► Completion
//!        └─► head else ─► what its body says is the error, or, once, the request without tools
//! ```
//!
//! An adapter brings a [`RunPlan`] and reads the answer's dialect; this file knows no server.
pub(crate) mod lines;
pub(crate) mod members;
pub(crate) mod text;
pub(crate) mod tools;

use core::fmt;
use core::time::Duration;

use bytes::{Bytes, BytesMut};
use iop_proto::domain::{Metadata, Usage, run_key};
use iop_proto::limits::{RUN_ANSWER_BYTES_MAX, RUN_ERROR_BYTES_MAX, RUN_TAIL_MS};
use reqwest::Client;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::adapters::{CallError, ollama, openai};
use crate::answer::{Completion, Part, Piece};
use crate::provider::{HttpCall, Item, ProviderError, ProviderRequest};
use crate::session::said;
use lines::{LineTooLong, Lines};
use text::Text;
use tools::{ToolCalls, ToolCallsTooLarge};

/// Why the answer of a run is none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RunError {
    /// A status other than 2xx, and what the body says of it.
    Status {
        status: i32,
        said: String,
    },
    /// An error inside an answer that began well. `[P-30]`
    Said {
        said: String,
    },
    LineTooLong,
    AnswerTooLong,
    ToolCallsTooLarge,
    /// Not what a server of this kind says.
    Foreign,
    /// The stream ended, its answer did not. `[P-31]`
    Unfinished,
    /// The server gave up the answer and says so.
    Aborted,
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { status, said } if said.is_empty() => write!(f, "HTTP status {status}"),
            Self::Status { status, said } => write!(f, "HTTP status {status}: {said}"),
            Self::Said { said } => write!(f, "the provider says: {said}"),
            Self::LineTooLong => f.write_str("a line of the answer is too long"),
            Self::AnswerTooLong => f.write_str("the answer is too long"),
            Self::ToolCallsTooLarge => f.write_str("the tool calls are too large"),
            Self::Foreign => f.write_str("the answer is not of this adapter's kind of server"),
            Self::Unfinished => f.write_str("the answer ended before its end"),
            Self::Aborted => f.write_str("the server gave up the answer"),
        }
    }
}

impl From<LineTooLong> for RunError {
    fn from(LineTooLong: LineTooLong) -> Self {
        Self::LineTooLong
    }
}

impl From<ToolCallsTooLarge> for RunError {
    fn from(ToolCallsTooLarge: ToolCallsTooLarge) -> Self {
        Self::ToolCallsTooLarge
    }
}

/// Why an answer ended, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    ToolCalls,
    ContentFilter,
}

impl Finish {
    const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::ContentFilter => "content_filter",
        }
    }
}

/// How a kind of server writes its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// One JSON object a line.
    Ollama,
    /// Server-sent events, or one JSON object.
    OpenAi,
}

/// What an adapter makes of a RunRequest.
#[derive(Debug)]
pub(crate) struct RunPlan {
    pub(crate) dialect: Dialect,
    pub(crate) request: ProviderRequest,
    /// Where to turn when the server refuses tools; a server without such a way has `None`.
    pub(crate) fallback: Option<openai::Fallback>,
}

/// What was understood of an answer so far.
#[derive(Debug)]
pub(crate) struct Answer {
    text: Text,
    /// Not handed over yet.
    delta: String,
    tools: ToolCalls,
    usage: Option<Usage>,
    finish: Option<Finish>,
    done: bool,
}

impl Answer {
    pub(crate) const fn new(tag: u64) -> Self {
        Self {
            text: Text::new(),
            delta: String::new(),
            tools: ToolCalls::new(tag),
            usage: None,
            finish: None,
            done: false,
        }
    }

    pub(crate) fn say(&mut self, text: &[u8]) {
        self.text.push(text, &mut self.delta);
    }

    pub(crate) const fn tools(&mut self) -> &mut ToolCalls {
        &mut self.tools
    }

    pub(crate) const fn count(&mut self, usage: Usage) {
        self.usage = Some(usage);
    }

    pub(crate) const fn finish(&mut self, finish: Finish) {
        self.finish = Some(finish);
    }

    pub(crate) const fn has_finish(&self) -> bool {
        self.finish.is_some()
    }

    /// Nothing of the answer follows.
    pub(crate) fn done(&mut self) {
        self.done = true;
        self.text.finish(&mut self.delta);
    }

    pub(crate) const fn is_done(&self) -> bool {
        self.done
    }

    fn take_delta(&mut self) -> Option<String> {
        let delta = core::mem::take(&mut self.delta);
        (!delta.is_empty()).then_some(delta)
    }

    fn complete(self, text_tools: bool) -> Result<Completion, RunError> {
        let mut metadata = Metadata::new();
        let tools = self.tools.into_json()?;
        let finish = match (self.finish, &tools) {
            (None | Some(Finish::Stop), Some(_)) => Finish::ToolCalls,
            (finish, _) => finish.unwrap_or(Finish::Stop),
        };
        metadata.insert(run_key::FINISH_REASON.to_owned(), finish.name().to_owned());
        if let Some(tools) = tools {
            metadata.insert(run_key::TOOL_CALLS.to_owned(), tools);
        }
        if text_tools {
            metadata.insert(run_key::TEXT_TOOL_FALLBACK.to_owned(), "true".to_owned());
        }
        let usage = self.usage;
        Ok(Completion { usage, metadata })
    }
}

/// How the body of a well-begun answer is read.
#[derive(Debug)]
enum Reader {
    NdJson(Lines),
    Events(openai::Events),
    Json(BytesMut),
}

impl Reader {
    fn new(dialect: Dialect, event_stream: bool) -> Self {
        match dialect {
            Dialect::Ollama => Self::NdJson(Lines::default()),
            Dialect::OpenAi if event_stream => Self::Events(openai::Events::default()),
            Dialect::OpenAi => Self::Json(BytesMut::new()),
        }
    }

    fn push(&mut self, chunk: Bytes) -> Result<(), RunError> {
        match self {
            Self::NdJson(lines) => lines.push(chunk),
            Self::Events(events) => events.push(chunk),
            Self::Json(all) if all.len() + chunk.len() > RUN_ANSWER_BYTES_MAX => {
                return Err(RunError::AnswerTooLong);
            }
            Self::Json(all) => all.extend_from_slice(&chunk),
        }
        Ok(())
    }

    /// Reads on until something was understood; false when more bytes are needed.
    fn step(&mut self, answer: &mut Answer) -> Result<bool, RunError> {
        match self {
            Self::NdJson(lines) => {
                let line = lines.next()?;
                line.as_deref()
                    .map_or(Ok(false), |line| ollama::line(line, answer).map(|()| true))
            }
            Self::Events(events) => events.step(answer),
            Self::Json(_) => Ok(false),
        }
    }

    /// The body is over.
    fn end(&mut self, answer: &mut Answer) -> Result<(), RunError> {
        match self {
            Self::NdJson(lines) => ollama::line(&lines.rest(), answer)?,
            Self::Events(events) => events.end(answer)?,
            Self::Json(all) => openai::object(all, answer)?,
        }
        answer.is_done().then_some(()).ok_or(RunError::Unfinished)
    }
}

#[derive(Debug)]
enum State {
    /// No head yet.
    Asked,
    Reads(Reader),
    /// A head that says no; its body so far.
    Refused {
        status: i32,
        body: BytesMut,
    },
    /// The answer is whole; its HTTP message may have an end to come.
    Tail {
        until: Instant,
    },
    Over,
}

/// A run in progress. Dropping it closes the provider connection.
#[derive(Debug)]
pub(crate) struct RunCall {
    client: Client,
    dialect: Dialect,
    call: HttpCall,
    state: State,
    answer: Answer,
    fallback: Option<openai::Fallback>,
    text_tools: bool,
    may_retry: bool,
}

impl RunCall {
    /// Begins the run. `tag` makes tool-call ids of ours differ between runs.
    pub(crate) fn new(client: Client, plan: RunPlan, tag: u64) -> Self {
        let RunPlan {
            dialect,
            request,
            fallback,
        } = plan;
        Self {
            call: HttpCall::new(client.clone(), request),
            client,
            dialect,
            state: State::Asked,
            answer: Answer::new(tag),
            fallback,
            text_tools: false,
            may_retry: true,
        }
    }

    /// From now on the call is only run to its end: no second request. `[I5.4]`
    pub(crate) fn no_retry(&mut self) {
        self.may_retry = false;
        self.call.no_retry();
    }

    /// The next piece: a start, text and progress, the completion; then `Ok(None)`, once.
    /// Cancel-safe: a dropped wait loses nothing.
    ///
    /// # Errors
    /// How the run failed; nothing follows.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>, CallError> {
        let next = self.step().await;
        if !matches!(next, Ok(Some(_))) {
            self.state = State::Over;
        }
        next
    }

    async fn step(&mut self) -> Result<Option<Piece>, CallError> {
        loop {
            if let Some(delta) = self.answer.take_delta() {
                return Ok(Some(Piece::Part(Part::Delta(delta))));
            }
            if let State::Reads(reader) = &mut self.state {
                if self.answer.is_done() {
                    return Ok(Some(self.complete()?));
                }
                if reader.step(&mut self.answer)? {
                    continue;
                }
            }
            match self.state {
                State::Tail { until } => {
                    // Whatever it is, the answer is whole.
                    let _ = tokio::time::timeout_at(until, self.call.next()).await;
                    return Ok(None);
                }
                State::Over => return Ok(None),
                State::Asked | State::Reads(_) | State::Refused { .. } => {
                    let item = self.call.next().await?;
                    if let Some(piece) = self.take(item)? {
                        return Ok(Some(piece));
                    }
                }
            }
        }
    }

    fn complete(&mut self) -> Result<Piece, RunError> {
        let until = Instant::now() + Duration::from_millis(RUN_TAIL_MS);
        self.state = State::Tail { until };
        let answer = core::mem::replace(&mut self.answer, Answer::new(0));
        answer.complete(self.text_tools).map(Piece::Completion)
    }

    /// What an item of the HTTP call, or its end, means.
    fn take(&mut self, item: Option<Item>) -> Result<Option<Piece>, CallError> {
        match (&mut self.state, item) {
            (State::Asked, Some(Item::Head { status, headers })) => {
                if !(200..300).contains(&status) {
                    let body = BytesMut::new();
                    self.state = State::Refused { status, body };
                    return Ok(Some(Piece::Progress));
                }
                let kind = headers.iter().find(|header| header.name == "content-type");
                let events = kind.is_some_and(|kind| kind.value.starts_with(b"text/event-stream"));
                self.state = State::Reads(Reader::new(self.dialect, events));
                self.fallback = None;
                let text_tools = self.text_tools;
                Ok(Some(Piece::Part(Part::Start { text_tools })))
            }
            (State::Reads(reader), Some(Item::Body(chunk))) => {
                reader.push(chunk)?;
                Ok(Some(Piece::Progress))
            }
            (State::Reads(reader), None) => {
                reader.end(&mut self.answer)?;
                Ok(None)
            }
            (State::Refused { status, body }, Some(Item::Body(chunk))) => {
                let room = RUN_ERROR_BYTES_MAX - body.len();
                body.extend_from_slice(&chunk[..chunk.len().min(room)]);
                let whole = body.len() == RUN_ERROR_BYTES_MAX;
                let (status, body) = (*status, core::mem::take(body));
                if whole {
                    self.refused(status, &body)?;
                    return Ok(None);
                }
                self.state = State::Refused { status, body };
                Ok(Some(Piece::Progress))
            }
            (State::Refused { status, body }, None) => {
                let (status, body) = (*status, core::mem::take(body));
                self.refused(status, &body)?;
                Ok(None)
            }
            (State::Asked | State::Tail { .. } | State::Over, _) | (_, Some(Item::Head { .. })) => {
                Err(ProviderError::NoResponse.into())
            }
        }
    }

    /// The provider said no: once, where it is about tools, the request goes without them, if it
    /// can. `[R-305]`
    fn refused(&mut self, status: i32, body: &[u8]) -> Result<(), RunError> {
        let message = error_message(body);
        let fallback = self.fallback.take().filter(|_| self.may_retry);
        let fallback = fallback.filter(|_| openai::refuses_tools(status, &message));
        match fallback.and_then(|fallback| fallback.request().ok()) {
            Some((request, text_tools)) => {
                self.call = HttpCall::new(self.client.clone(), request);
                self.state = State::Asked;
                self.text_tools = text_tools;
                Ok(())
            }
            None => {
                let said = said(&message);
                Err(RunError::Status { status, said })
            }
        }
    }
}

/// An object of a provider; a list could be read as one as well, and is none.
pub(crate) fn object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, RunError> {
    let object = json.trim_ascii().starts_with(b"{").then_some(json);
    let read = object.and_then(|json| serde_json::from_slice(json).ok());
    read.ok_or(RunError::Foreign)
}

/// A list of a provider, its entries as they were written; one of more than `max` is `surplus`.
pub(crate) fn entries(
    list: &RawValue,
    max: usize,
    surplus: RunError,
) -> Result<Vec<&RawValue>, RunError> {
    if !list.get().starts_with('[') {
        return Err(RunError::Foreign);
    }
    members::list(list, max).map_err(|_| surplus)
}

/// What an error body says: `error`, or its `message`, or else the body's own text.
pub(crate) fn error_message(body: &[u8]) -> String {
    let error = members::Members::parse(body)
        .ok()
        .and_then(|body| body.get("error"));
    error.map_or_else(
        || String::from_utf8_lossy(body).trim().to_owned(),
        error_text,
    )
}

/// What stands behind a member `error`.
pub(crate) fn error_text(error: &RawValue) -> String {
    let text = |value: &RawValue| members::string(value).map(std::borrow::Cow::into_owned);
    let message = members::Members::of(error)
        .ok()
        .and_then(|error| error.get("message"));
    text(message.unwrap_or(error)).unwrap_or_else(|_| error.get().to_owned())
}

/// Reads a whole answer out of `pieces` as [`RunCall`] does: its deltas and what completes it.
#[cfg(test)]
pub(crate) fn read_answer(
    dialect: Dialect,
    event_stream: bool,
    pieces: &[&[u8]],
) -> Result<(Vec<String>, Completion), RunError> {
    let mut answer = Answer::new(0);
    let mut reader = Reader::new(dialect, event_stream);
    let mut deltas = vec![];
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        reader.push(Bytes::copy_from_slice(piece))?;
        while reader.step(&mut answer)? {
            deltas.extend(answer.take_delta());
        }
    }
    if !answer.is_done() {
        reader.end(&mut answer)?;
    }
    deltas.extend(answer.take_delta());
    Ok((deltas, answer.complete(false)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// xorshift64*.
    fn roll(seed: &mut u64) -> usize {
        *seed ^= *seed >> 12;
        *seed ^= *seed << 25;
        *seed ^= *seed >> 27;
        usize::try_from(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40).unwrap_or_default()
    }

    #[test]
    fn no_bytes_of_a_server_panic_and_no_text_is_ever_broken() {
        let ndjson = "{\"message\":{\"content\":\"\u{d55c}\\ud83c\",\"tool_calls\":[{\"function\":\
                      {\"name\":\"f\",\"arguments\":{\"a\":[1e9]}}}]}}\n{\"response\":\"\\udf0d\"}\n\
                      {\"done\":true,\"done_reason\":\"length\",\"eval_count\":3}\n";
        let events = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\u{1f30d}\",\"tool_calls\":\
                      [{\"index\":1,\"id\":\"c\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},\
                      \"finish_reason\":\"stop\"}],\"usage\":{\"total_tokens\":9}}\n\ndata: [DONE]\n\n";
        let mut seed = 26;
        let (mut good, mut bad) = (0, 0);
        for round in 0..6_000 {
            let (dialect, stream) = match round % 2 {
                0 => (Dialect::Ollama, ndjson),
                _ => (Dialect::OpenAi, events),
            };
            let mut bytes = stream.as_bytes().to_vec();
            for _ in 0..roll(&mut seed) % 3 {
                let at = roll(&mut seed) % bytes.len();
                match roll(&mut seed) % 3 {
                    0 => bytes[at] ^= 1 << (roll(&mut seed) % 8),
                    1 => bytes.truncate(at + 1),
                    _ => bytes.insert(at, b"{}[]\"\\\n:,\xff"[roll(&mut seed) % 10]),
                }
            }
            let cut = roll(&mut seed) % bytes.len();
            let whole = read_answer(dialect, true, &[&bytes]);
            assert_eq!(
                whole,
                read_answer(dialect, true, &[&bytes[..cut], &bytes[cut..]])
            );
            match whole {
                Ok(_) => good += 1,
                Err(_) => bad += 1,
            }
        }
        assert!(good > 2_000 && bad > 500, "{good} {bad}");
    }
}
