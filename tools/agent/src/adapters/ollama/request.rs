//! An OpenAI request in Ollama's words: `/api/chat` for messages, `/api/generate` for a prompt.
//!
//! Lives on: the main task. View: one request. Bound: `RUN_MESSAGES_MAX` messages of `RUN_PARTS_MAX`
//! parts; strings and numbers borrow the input.
//!
//! What Ollama has no word for is refused by name, and so is a wish that would silently not come
//! true. A member that only restates the default, or that the answer cannot depend on, is left out.
use std::borrow::Cow;
use std::collections::HashMap;

use iop_proto::limits::{RUN_MESSAGES_MAX, RUN_PARTS_MAX, RUN_TOOL_CALLS_MAX, RUN_TOOLS_MAX};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::normalized::members::{Members, Refused, Why, list, number, string};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

/// Members that change nothing of the answer: accounting, caching, and what the Edge looks after.
const IDLE: [&str; 8] = [
    "user",
    "metadata",
    "stream",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];
/// Members that may be said where they say what holds anyway.
const DEFAULTS: [(&str, &[&str]); 11] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("store", &["false"]),
    ("logprobs", &["false"]),
    ("top_logprobs", &["0"]),
    ("logit_bias", &["{}"]),
    ("parallel_tool_calls", &["true"]),
    ("modalities", &["[\"text\"]"]),
    ("verbosity", &["\"medium\""]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
];
/// What `reasoning_effort` is to Ollama.
const EFFORTS: [(&str, Think); 4] = [
    ("none", Think::Switch(false)),
    ("low", Think::Level("low")),
    ("medium", Think::Level("medium")),
    ("high", Think::Level("high")),
];

/// Body of either call.
#[derive(Default, Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<Message<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    suffix: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<Format<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    think: Option<Think>,
    options: Options<'a>,
    stream: bool,
}

#[derive(Default, Serialize)]
struct Options<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    presence_penalty: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frequency_penalty: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_predict: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<Vec<Cow<'a, str>>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Format<'a> {
    /// Any JSON.
    Json(&'static str),
    Schema(&'a RawValue),
}

#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum Think {
    Switch(bool),
    Level(&'static str),
}

#[derive(Default, Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Cow<'a, str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    images: Vec<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_name: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<Cow<'a, str>>,
}

#[derive(Serialize)]
struct ToolCall<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    id: Cow<'a, str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: Cow<'a, str>,
    arguments: Arguments<'a>,
}

/// A JSON object, out of the string that held it.
#[derive(Serialize)]
#[serde(untagged)]
enum Arguments<'a> {
    Borrowed(&'a RawValue),
    Owned(Box<RawValue>),
}

/// # Errors
/// The first thing in `input` that Ollama cannot express.
pub(super) fn build(input: &Members<'_>, target: &str) -> Result<(&'static str, Vec<u8>), Refused> {
    let mut body = Body {
        model: target,
        stream: true,
        ..Body::default()
    };
    let path = if input.get("prompt").is_some() {
        GENERATE
    } else {
        CHAT
    };
    for (name, value) in input.iter() {
        let taken = if path == CHAT {
            body.chat(name, value)
        } else {
            body.generate(name, value)
        };
        taken.map_err(|refused| refused.under(name))?;
    }
    if path == CHAT && body.messages.is_none() {
        return Err(Refused::at("messages", Why::Missing));
    }
    if input.get("tool_choice").map(RawValue::get) == Some("\"none\"") {
        body.tools = None;
    }
    let json = serde_json::to_vec(&body).map_err(|_| Refused::at("", Why::NotAnObject))?;
    Ok((path, json))
}

impl<'a> Body<'a> {
    fn chat(&mut self, name: &str, value: &'a RawValue) -> Result<(), Refused> {
        match name {
            "messages" => self.messages = Some(messages(value)?),
            "tools" => self.tools = Some(tools(value)?),
            "response_format" => self.format = format(value)?,
            "reasoning_effort" => self.think = Some(effort(value)?),
            _ => return self.common(name, value),
        }
        Ok(())
    }

    fn generate(&mut self, name: &str, value: &'a RawValue) -> Result<(), Refused> {
        match name {
            "prompt" => self.prompt = Some(prompt(value)?),
            "suffix" => self.suffix = Some(string(value)?),
            _ => return self.common(name, value),
        }
        Ok(())
    }

    fn common(&mut self, name: &str, value: &'a RawValue) -> Result<(), Refused> {
        let options = &mut self.options;
        let place = match name {
            "temperature" => &mut options.temperature,
            "top_p" => &mut options.top_p,
            "top_k" => &mut options.top_k,
            "min_p" => &mut options.min_p,
            "seed" => &mut options.seed,
            "presence_penalty" => &mut options.presence_penalty,
            "frequency_penalty" => &mut options.frequency_penalty,
            "max_tokens" | "max_completion_tokens" if options.num_predict.is_some() => {
                return Err(Refused::at("", Why::Twice));
            }
            "max_tokens" | "max_completion_tokens" => &mut options.num_predict,
            "stop" => {
                options.stop = Some(stop(value)?);
                return Ok(());
            }
            "model" => return Err(Refused::at("", Why::ModelNamed)),
            name if IDLE.contains(&name) => return Ok(()),
            name => return default(name, value),
        };
        *place = Some(number(value)?);
        Ok(())
    }
}

/// A member Ollama has no word for may say what holds anyway.
fn default(name: &str, value: &RawValue) -> Result<(), Refused> {
    let known = DEFAULTS.iter().find(|(known, _)| *known == name);
    let says: String = value.get().split_ascii_whitespace().collect();
    let holds = known.is_some_and(|(_, values)| values.contains(&says.as_str()));
    holds
        .then_some(())
        .ok_or_else(|| Refused::at("", Why::Unsupported))
}

fn effort(value: &RawValue) -> Result<Think, Refused> {
    let effort = string(value)?;
    let known = EFFORTS.iter().find(|(name, _)| *name == effort);
    known
        .map(|(_, think)| *think)
        .ok_or_else(|| Refused::at("", Why::Unsupported))
}

fn stop(value: &RawValue) -> Result<Vec<Cow<'_, str>>, Refused> {
    if value.get().starts_with('"') {
        return Ok(vec![string(value)?]);
    }
    let entries = list(value, RUN_PARTS_MAX)?.into_iter().enumerate();
    entries
        .map(|(n, entry)| string(entry).map_err(|refused| refused.entry(n)))
        .collect()
}

/// One prompt, alone or as a list of one; tokens are no text.
fn prompt(value: &RawValue) -> Result<Cow<'_, str>, Refused> {
    if !value.get().starts_with('[') {
        return string(value);
    }
    match list(value, 1)?[..] {
        [only] => string(only).map_err(|refused| refused.entry(0)),
        _ => Err(Refused::at("", Why::Missing)),
    }
}

/// The tools as they were written; each must be a function.
fn tools(value: &RawValue) -> Result<&RawValue, Refused> {
    for (n, tool) in list(value, RUN_TOOLS_MAX)?.into_iter().enumerate() {
        let members = Members::of(tool).map_err(|refused| refused.entry(n))?;
        let kind = members.get("type").map(RawValue::get);
        if kind != Some("\"function\"") || members.get("function").is_none() {
            return Err(Refused::at("", Why::Unsupported).entry(n));
        }
    }
    Ok(value)
}

fn format(value: &RawValue) -> Result<Option<Format<'_>>, Refused> {
    let members = Members::of(value)?;
    let kind = members.get("type");
    match kind.map(RawValue::get) {
        Some("\"text\"") => Ok(None),
        Some("\"json_object\"") => Ok(Some(Format::Json("json"))),
        Some("\"json_schema\"") => {
            let outer = members.get("json_schema").map(Members::of).transpose();
            let outer = outer.map_err(|refused| refused.under("json_schema"))?;
            let schema = outer.and_then(|outer| outer.get("schema"));
            Ok(Some(schema.map_or(Format::Json("json"), Format::Schema)))
        }
        _ => Err(Refused::at("type", Why::Unsupported)),
    }
}

fn messages(value: &RawValue) -> Result<Vec<Message<'_>>, Refused> {
    let entries = list(value, RUN_MESSAGES_MAX)?;
    let mut messages = Vec::with_capacity(entries.len());
    // Who was asked under which id: an answer names the id, Ollama wants the name.
    let mut asked = HashMap::new();
    for (n, entry) in entries.into_iter().enumerate() {
        let message = message(entry, &mut asked).map_err(|refused| refused.entry(n))?;
        messages.push(message);
    }
    Ok(messages)
}

fn message<'a>(
    value: &'a RawValue,
    asked: &mut HashMap<Cow<'a, str>, Cow<'a, str>>,
) -> Result<Message<'a>, Refused> {
    let members = Members::of(value)?;
    let mut message = Message::default();
    for (name, value) in members.iter() {
        let taken = match name {
            "role" => role(value).map(|role| message.role = role),
            "content" => content(value, &mut message),
            "tool_calls" => tool_calls(value).map(|calls| message.tool_calls = calls),
            "tool_call_id" => string(value).map(|id| message.tool_call_id = Some(id)),
            // Names of speakers have no place in Ollama's messages; a tool's is found by its id.
            "name" => string(value).map(|_| ()),
            // What OpenAI's own answers carry, given back with nothing in it.
            "annotations" if value.get() == "[]" => Ok(()),
            _ => Err(Refused::at("", Why::Unsupported)),
        };
        taken.map_err(|refused| refused.under(name))?;
    }
    if message.role.is_empty() {
        return Err(Refused::at("role", Why::Missing));
    }
    for call in &message.tool_calls {
        asked.insert(call.id.clone(), call.function.name.clone());
    }
    let name = message.tool_call_id.as_ref().and_then(|id| asked.get(id));
    message.tool_name = name.cloned();
    Ok(message)
}

fn role(value: &RawValue) -> Result<&'static str, Refused> {
    match &*string(value)? {
        "system" | "developer" => Ok("system"),
        "user" => Ok("user"),
        "assistant" => Ok("assistant"),
        "tool" => Ok("tool"),
        _ => Err(Refused::at("", Why::Unsupported)),
    }
}

/// Text, or parts: texts are joined by a line end, images stand beside them.
fn content<'a>(value: &'a RawValue, message: &mut Message<'a>) -> Result<(), Refused> {
    if !value.get().starts_with('[') {
        message.content = string(value)?;
        return Ok(());
    }
    let mut texts = vec![];
    for (n, part) in list(value, RUN_PARTS_MAX)?.into_iter().enumerate() {
        match part_of(part).map_err(|refused| refused.entry(n))? {
            Part::Text(text) => texts.push(text),
            Part::Image(data) => message.images.push(data),
        }
    }
    message.content = match texts.len() {
        0 => "".into(),
        1 => texts.swap_remove(0),
        _ => texts.join("\n").into(),
    };
    Ok(())
}

enum Part<'a> {
    Text(Cow<'a, str>),
    /// Base64.
    Image(Cow<'a, str>),
}

fn part_of(value: &RawValue) -> Result<Part<'_>, Refused> {
    let members = Members::of(value)?;
    let missing = |name| Refused::at(name, Why::Missing);
    match members.get("type").map(RawValue::get) {
        Some("\"text\"") => {
            let text = members.get("text").ok_or_else(|| missing("text"))?;
            Ok(Part::Text(
                string(text).map_err(|refused| refused.under("text"))?,
            ))
        }
        Some("\"image_url\"") => {
            let outer = members
                .get("image_url")
                .ok_or_else(|| missing("image_url"))?;
            let data = image(outer).map_err(|refused| refused.under("image_url"))?;
            Ok(Part::Image(data))
        }
        _ => Err(Refused::at("type", Why::Unsupported)),
    }
}

/// `{"url": "data:image/png;base64,…"}`: what stands behind the comma.
fn image(value: &RawValue) -> Result<Cow<'_, str>, Refused> {
    let members = Members::of(value)?;
    let url = members
        .get("url")
        .ok_or_else(|| Refused::at("url", Why::Missing))?;
    let url = string(url).map_err(|refused| refused.under("url"))?;
    let start = url
        .strip_prefix("data:")
        .and_then(|rest| rest.split_once(','))
        .filter(|(kind, _)| kind.ends_with(";base64"))
        .map(|(kind, _)| "data:".len() + kind.len() + 1);
    let start = start.filter(|&start| url[start..].bytes().all(is_base64) && start < url.len());
    let start = start.ok_or_else(|| Refused::at("url", Why::NotADataUrl))?;
    Ok(match url {
        Cow::Borrowed(url) => url[start..].into(),
        Cow::Owned(mut url) => {
            url.drain(..start);
            url.into()
        }
    })
}

const fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')
}

/// Calls an assistant made in an earlier turn.
fn tool_calls(value: &RawValue) -> Result<Vec<ToolCall<'_>>, Refused> {
    let entries = list(value, RUN_TOOL_CALLS_MAX)?.into_iter().enumerate();
    entries
        .map(|(n, entry)| tool_call(entry).map_err(|refused| refused.entry(n)))
        .collect()
}

fn tool_call(value: &RawValue) -> Result<ToolCall<'_>, Refused> {
    let members = Members::of(value)?;
    let function = members
        .get("function")
        .ok_or_else(|| Refused::at("function", Why::Missing))?;
    let function = function_of(function).map_err(|refused| refused.under("function"))?;
    let id = members.get("id").map(string).transpose();
    let id = id.map_err(|refused| refused.under("id"))?;
    Ok(ToolCall {
        id: id.unwrap_or_default(),
        function,
    })
}

fn function_of(value: &RawValue) -> Result<Function<'_>, Refused> {
    let members = Members::of(value)?;
    let named = |name: &'static str| {
        let value = members
            .get(name)
            .ok_or_else(|| Refused::at(name, Why::Missing))?;
        string(value).map_err(|refused| refused.under(name))
    };
    let name = named("name")?;
    let arguments = match named("arguments")? {
        // What models say that call a function of no parameters.
        text if text.trim().is_empty() => serde_json::from_str("{}").ok().map(Arguments::Borrowed),
        Cow::Borrowed(text) => serde_json::from_str(text).ok().map(Arguments::Borrowed),
        Cow::Owned(text) => RawValue::from_string(text).ok().map(Arguments::Owned),
    };
    let arguments = arguments.filter(|arguments| arguments.text().starts_with('{'));
    let arguments = arguments.ok_or_else(|| Refused::at("arguments", Why::ToolArguments))?;
    Ok(Function { name, arguments })
}

impl Arguments<'_> {
    fn text(&self) -> &str {
        match self {
            Self::Borrowed(value) => value.get(),
            Self::Owned(value) => value.get(),
        }
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
