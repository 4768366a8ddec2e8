//! The answer of an OpenAI-compatible server: chunks of an event stream, or one object.
//!
//! Lives on: the attempt's task. View: one answer. Bound: one event of `RUN_LINE_BYTES_MAX`.
use bytes::{Bytes, BytesMut};
use iop_proto::domain::Usage;
use iop_proto::limits::{RUN_LINE_BYTES_MAX, RUN_PARTS_MAX, RUN_TOOL_CALLS_MAX};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::normalized::lines::Lines;
use crate::normalized::members::Str;
use crate::normalized::text::Piece;
use crate::normalized::{self, Answer, Finish, RunError, entries, error_text};
use crate::session::said;

/// An event stream, cut anywhere.
#[derive(Debug, Default)]
pub(crate) struct Events {
    lines: Lines,
    /// Of the event whose end has not arrived. It grows in place: a line copies itself alone.
    data: BytesMut,
}

impl Events {
    pub(crate) fn push(&mut self, chunk: Bytes) {
        self.lines.push(chunk);
    }

    /// Reads on to the end of one event; false when more bytes are needed.
    pub(crate) fn step(&mut self, answer: &mut Answer) -> Result<bool, RunError> {
        while let Some(line) = self.lines.next()? {
            if self.take(&line)? {
                self.dispatch(answer)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The stream is over. An answer that gave its reason is whole, also without `[DONE]`.
    pub(crate) fn end(&mut self, answer: &mut Answer) -> Result<(), RunError> {
        let rest = self.lines.rest();
        self.take(&rest)?;
        self.dispatch(answer)?;
        if answer.has_finish() && !answer.is_done() {
            answer.done();
        }
        Ok(())
    }

    /// True when the line ends an event that has data.
    fn take(&mut self, line: &Bytes) -> Result<bool, RunError> {
        if line.is_empty() {
            return Ok(!self.data.is_empty());
        }
        let Some(data) = line.strip_prefix(b"data:") else {
            return Ok(false); // comment, id, event name
        };
        let data = data.strip_prefix(b" ").unwrap_or(data);
        if !self.data.is_empty() {
            if self.data.len() + data.len() >= RUN_LINE_BYTES_MAX {
                return Err(RunError::LineTooLong);
            }
            self.data.extend_from_slice(b"\n");
        }
        self.data.extend_from_slice(data);
        Ok(false)
    }

    fn dispatch(&mut self, answer: &mut Answer) -> Result<(), RunError> {
        let data = core::mem::take(&mut self.data);
        match data.trim_ascii() {
            _ if answer.is_done() => Ok(()),
            b"" => Ok(()),
            b"[DONE]" => {
                answer.done();
                Ok(())
            }
            data => part(data, answer),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Part<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    /// Looked at one by one: what a choice is read into is fifty times as long as an empty one.
    #[serde(borrow)]
    choices: Option<&'a RawValue>,
    usage: Option<Counts>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice<'a> {
    index: Option<u64>,
    /// Of a chunk.
    #[serde(borrow)]
    delta: Option<Said<'a>>,
    /// Of a whole answer.
    #[serde(borrow)]
    message: Option<Said<'a>>,
    /// Of a completion, in either.
    #[serde(borrow)]
    text: Option<Piece<'a>>,
    #[serde(borrow)]
    finish_reason: Option<Str<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Said<'a> {
    #[serde(borrow)]
    content: Option<Piece<'a>>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CallPiece<'a> {
    index: Option<usize>,
    #[serde(borrow)]
    id: Option<Str<'a>>,
    #[serde(borrow)]
    function: Option<FunctionPiece<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FunctionPiece<'a> {
    #[serde(borrow)]
    name: Option<Str<'a>>,
    #[serde(borrow)]
    arguments: Option<Str<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Counts {
    prompt_tokens: i64,
    completion_tokens: i64,
    total_tokens: i64,
}

/// A whole answer.
///
/// # Errors
/// It is none, or an error.
pub(crate) fn object(json: &[u8], answer: &mut Answer) -> Result<(), RunError> {
    part(json, answer)?;
    if !answer.has_finish() {
        return Err(RunError::Unfinished);
    }
    answer.done();
    Ok(())
}

/// A chunk or a whole answer: what it says of the first choice.
fn part(json: &[u8], answer: &mut Answer) -> Result<(), RunError> {
    let part: Part<'_> = normalized::object(json)?;
    if let Some(error) = part.error {
        let said = said(&error_text(error));
        return Err(RunError::Said { said });
    }
    if let Some(counts) = part.usage {
        answer.count(Usage {
            prompt_tokens: counts.prompt_tokens.max(0),
            completion_tokens: counts.completion_tokens.max(0),
            total_tokens: counts.total_tokens.max(0),
        });
    }
    let choices = part.choices.map_or(Ok(vec![]), |choices| {
        entries(choices, RUN_PARTS_MAX, RunError::Foreign)
    })?;
    for choice in choices {
        let choice: Choice<'_> = normalized::object(choice.get().as_bytes())?;
        if choice.index.unwrap_or(0) != 0 {
            continue;
        }
        let message = choice.message.unwrap_or_default();
        let delta = choice.delta.unwrap_or_default();
        let texts = [message.content, delta.content, choice.text];
        for text in texts.into_iter().flatten() {
            answer.say(&text.0);
        }
        if let Some(calls) = message.tool_calls.filter(|calls| calls.get() != "null") {
            answer.tools().take_array(calls)?;
        }
        if let Some(calls) = delta.tool_calls {
            pieces(calls, answer)?;
        }
        if let Some(reason) = choice.finish_reason {
            answer.finish(finish(&reason.0)?);
        }
    }
    Ok(())
}

fn pieces(calls: &RawValue, answer: &mut Answer) -> Result<(), RunError> {
    for piece in entries(calls, RUN_TOOL_CALLS_MAX, RunError::ToolCallsTooLarge)? {
        let CallPiece {
            index,
            id,
            function,
        } = normalized::object(piece.get().as_bytes())?;
        let function = function.unwrap_or_default();
        let text = |text: &Option<Str<'_>>| {
            let text = text.as_ref().map(|text| text.0.as_ref());
            text.unwrap_or_default().to_owned()
        };
        let (id, name, arguments) = (text(&id), text(&function.name), text(&function.arguments));
        answer.tools().piece(index, &id, &name, &arguments)?;
    }
    Ok(())
}

/// A server that gave up says so in the place of a reason. `[P-31]`
fn finish(reason: &str) -> Result<Finish, RunError> {
    match reason {
        "length" => Ok(Finish::Length),
        "tool_calls" | "function_call" => Ok(Finish::ToolCalls),
        "content_filter" => Ok(Finish::ContentFilter),
        "abort" | "error" => Err(RunError::Aborted),
        _ => Ok(Finish::Stop),
    }
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
