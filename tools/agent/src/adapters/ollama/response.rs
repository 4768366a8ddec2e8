//! One line of Ollama's answer, streamed or not: text, tool calls, the end, or an error.
//!
//! Lives on: the attempt's task. View: one line. Bound: the line.
use std::borrow::Cow;

use iop_proto::domain::Usage;
use iop_proto::limits::RUN_TOOL_CALLS_MAX;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::normalized::members::Str;
use crate::normalized::text::Piece;
use crate::normalized::{Answer, Finish, RunError, entries, error_text, object};
use crate::session::said;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Line<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<Message<'a>>,
    /// Of `/api/generate`.
    #[serde(borrow)]
    response: Option<Piece<'a>>,
    done: bool,
    #[serde(borrow)]
    done_reason: Option<Str<'a>>,
    prompt_eval_count: Option<i64>,
    eval_count: Option<i64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Message<'a> {
    #[serde(borrow)]
    content: Option<Piece<'a>>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ToolCall<'a> {
    #[serde(borrow)]
    id: Option<Str<'a>>,
    #[serde(borrow)]
    function: Function<'a>,
}

#[derive(Deserialize)]
struct Function<'a> {
    #[serde(borrow)]
    name: Str<'a>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// Reads one line into `answer`; an empty one says nothing.
///
/// # Errors
/// The line is not of this kind, or says that the run failed.
pub(crate) fn line(line: &[u8], answer: &mut Answer) -> Result<(), RunError> {
    if answer.is_done() || line.trim_ascii().is_empty() {
        return Ok(());
    }
    let line: Line<'_> = object(line)?;
    if let Some(error) = line.error {
        let said = said(&error_text(error));
        return Err(RunError::Said { said });
    }
    let message = line.message.unwrap_or_default();
    for text in [message.content, line.response].into_iter().flatten() {
        answer.say(&text.0);
    }
    let calls = message
        .tool_calls
        .map(|calls| entries(calls, RUN_TOOL_CALLS_MAX, RunError::ToolCallsTooLarge));
    for call in calls.transpose()?.unwrap_or_default() {
        let ToolCall { id, function } = object(call.get().as_bytes())?;
        let id = id.as_ref().map_or("", |id| &id.0);
        let arguments = arguments(function.arguments);
        answer.tools().push(id, &function.name.0, &arguments)?;
    }
    if line.done {
        end(line.done_reason.as_ref().map(|reason| &*reason.0), answer);
        usage(line.prompt_eval_count, line.eval_count, answer);
    }
    Ok(())
}

/// The text of the arguments' object; a proxy that already made it a string is believed.
fn arguments(value: Option<&RawValue>) -> Cow<'_, str> {
    let text = value.map_or("", RawValue::get);
    match serde_json::from_str::<Str<'_>>(text) {
        Ok(Str(inner)) => inner,
        Err(_) => text.into(),
    }
}

/// Every reason that is no length is a stop.
fn end(reason: Option<&str>, answer: &mut Answer) {
    answer.finish(match reason {
        Some("length") => Finish::Length,
        _ => Finish::Stop,
    });
    answer.done();
}

/// Counts that are zero are left out by Ollama; both missing is no usage.
fn usage(prompt: Option<i64>, completion: Option<i64>, answer: &mut Answer) {
    if prompt.is_none() && completion.is_none() {
        return;
    }
    let count = |tokens: Option<i64>| tokens.unwrap_or_default().max(0);
    let (prompt_tokens, completion_tokens) = (count(prompt), count(completion));
    answer.count(Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens.saturating_add(completion_tokens),
    });
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
