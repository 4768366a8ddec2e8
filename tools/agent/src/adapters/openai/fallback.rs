//! The one other way for a server that refuses its tool API: the same request without tools, and
//! with an instruction how to ask for them in text. `[R-305]` `[R-306]` `[R-307]`
//!
//! Lives on: the attempt's task, only after a refusal. View: one request. Bound: the input's own size
//! and the instruction's; `RUN_MESSAGES_MAX` messages.
//!
//! Earlier calls and their results are put into the same words, since the server has no others, and
//! every system text goes to the front: such servers refuse one elsewhere.
use std::borrow::Cow;
use std::collections::HashMap;

use bytes::Bytes;
use iop_proto::limits::{RUN_MESSAGES_MAX, RUN_PARTS_MAX, RUN_TOOL_CALLS_MAX};
use reqwest::header::HeaderMap;
use reqwest::{Method, Url};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::normalized::members::{Members, Refused, Why, list, string};
use crate::provider::{Carried, ProviderRequest};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// Members that belong to the tool API.
const TOOL_API: [&str; 3] = ["tools", "tool_choice", "parallel_tool_calls"];
/// How servers say that they have no tool API, lower case; each beside the word "tool".
const REFUSALS: [&str; 10] = [
    "support", // "does not support tools", "unsupported", "not supported"
    "requires --",
    "not enabled",
    "not available",
    "not implemented",
    "not permitted", // pydantic: "Extra inputs are not permitted"
    "not allowed",
    "unrecognized",
    "unknown",
    "unexpected",
];

/// The error of an answer says that the server takes no tools.
pub(crate) fn refuses_tools(status: i32, message: &str) -> bool {
    let may_be = matches!(status, 400 | 404 | 405 | 415 | 422 | 500 | 501);
    let message = message.to_ascii_lowercase();
    may_be && message.contains("tool") && REFUSALS.iter().any(|words| message.contains(words))
}

/// What the other request is made of.
#[derive(Debug)]
pub(crate) struct Fallback {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) input: Bytes,
    pub(crate) target: String,
}

impl Fallback {
    /// The request without tools; whether its answer may hold tool calls as text.
    ///
    /// # Errors
    /// Messages that are none.
    pub(crate) fn request(self) -> Result<(ProviderRequest, bool), Refused> {
        let (body, text_tools) = without_tools(&self.input, &self.target)?;
        let Self {
            method,
            url,
            headers,
            ..
        } = self;
        let body = Bytes::from(body);
        let request = ProviderRequest {
            method,
            url,
            headers,
            body,
            credential: Carried::None,
        };
        Ok((request, text_tools))
    }
}

fn without_tools(input: &[u8], target: &str) -> Result<(String, bool), Refused> {
    let members = Members::parse(input)?;
    let instruction = instruction(&members);
    let mut object = Object::default();
    object.text("model", target);
    for (name, value) in members.into_all() {
        match &*name {
            "messages" => {
                let messages = messages(value, instruction.as_deref());
                let messages = messages.map_err(|refused| refused.under("messages"))?;
                object.raw("messages", &messages);
            }
            "model" => {}
            name if TOOL_API.contains(&name) => {}
            name => object.raw(name, value.get()),
        }
    }
    Ok((object.close(), instruction.is_some()))
}

/// How to ask for a tool in text; `None` when the caller wants none asked for.
fn instruction(members: &Members<'_>) -> Option<String> {
    let tools = members.get("tools")?;
    let duty = match members.get("tool_choice").map(RawValue::get) {
        Some("\"none\"") => return None,
        Some("\"required\"") => "\nYou must call at least one tool.".to_owned(),
        Some(choice) => named(choice)
            .map(|name| format!("\nYou must call the tool {}.", quoted(&name)))
            .unwrap_or_default(),
        None => String::new(),
    };
    Some(format!(
        "You may call tools. To call one, write one line of exactly this form, and one such line \
         for each call:\n{OPEN}{{\"name\": \"the tool's name\", \"arguments\": {{}}}}{CLOSE}\nIts \
         arguments are one JSON object that fits the tool's parameters. Write nothing else when \
         you call a tool; answer as usual when you call none. Results come back between \
         <tool_response> and </tool_response>.{duty}\nThe tools are, as JSON:\n{}",
        tools.get()
    ))
}

/// The function a `tool_choice` object names.
fn named(choice: &str) -> Option<String> {
    let choice = Members::parse(choice.as_bytes()).ok()?;
    let function = Members::of(choice.get("function")?).ok()?;
    Some(string(function.get("name")?).ok()?.into_owned())
}

fn messages(value: &RawValue, instruction: Option<&str>) -> Result<String, Refused> {
    let mut system: Vec<Cow<'_, str>> = vec![];
    let mut rest: Vec<Cow<'_, str>> = vec![];
    let mut asked = HashMap::new();
    for (n, entry) in list(value, RUN_MESSAGES_MAX)?.into_iter().enumerate() {
        let told = message(entry, &mut system, &mut asked).map_err(|refused| refused.entry(n))?;
        rest.extend(told);
    }
    system.extend(instruction.map(Cow::Borrowed));
    let mut all = String::from("[");
    if !system.is_empty() {
        let mut object = Object::default();
        object.text("role", "system");
        object.text("content", &system.join("\n\n"));
        all.push_str(&object.close());
    }
    for message in rest {
        if all.len() > 1 {
            all.push(',');
        }
        all.push_str(&message);
    }
    all.push(']');
    Ok(all)
}

/// A message in words without tools; a system message goes to the others of its kind.
fn message<'a>(
    value: &'a RawValue,
    system: &mut Vec<Cow<'a, str>>,
    asked: &mut HashMap<Cow<'a, str>, Cow<'a, str>>,
) -> Result<Option<Cow<'a, str>>, Refused> {
    let members = Members::of(value)?;
    let content = || members.get("content").map(text).transpose();
    match members.get("role").map(RawValue::get) {
        Some("\"system\"" | "\"developer\"") => {
            system.extend(content()?);
            Ok(None)
        }
        Some("\"tool\"") => {
            let id = members.get("tool_call_id").map(string).transpose()?;
            let name = id.and_then(|id| asked.get(&id).cloned());
            let result = content()?.unwrap_or_default();
            Ok(Some(response(name.as_deref(), &result).into()))
        }
        Some("\"assistant\"") if members.get("tool_calls").is_some() => {
            let calls = members.get("tool_calls").map(calls).transpose()?;
            let mut words = content()?.unwrap_or_default().into_owned();
            for Call { id, name, line } in calls.into_iter().flatten() {
                if !words.is_empty() {
                    words.push('\n');
                }
                words.push_str(&line);
                asked.insert(id, name);
            }
            let mut object = Object::default();
            for (name, value) in members.into_all() {
                if !matches!(&*name, "content" | "tool_calls") {
                    object.raw(&name, value.get());
                }
            }
            object.text("content", &words);
            Ok(Some(object.close().into()))
        }
        _ => Ok(Some(value.get().into())),
    }
}

/// A tool's result as a user's message.
fn response(name: Option<&str>, result: &str) -> String {
    let mut inner = Object::default();
    if let Some(name) = name {
        inner.text("name", name);
    }
    inner.text("content", result);
    let words = format!("<tool_response>{}</tool_response>", inner.close());
    let mut object = Object::default();
    object.text("role", "user");
    object.text("content", &words);
    object.close()
}

/// A content's text: all of it, or its text parts.
fn text(value: &RawValue) -> Result<Cow<'_, str>, Refused> {
    if !value.get().starts_with('[') {
        return string(value).map_err(|refused| refused.under("content"));
    }
    let mut texts = vec![];
    for part in list(value, RUN_PARTS_MAX)? {
        if let Some(text) = Members::of(part)?.get("text") {
            texts.push(string(text)?);
        }
    }
    Ok(texts.join("\n").into())
}

struct Call<'a> {
    id: Cow<'a, str>,
    name: Cow<'a, str>,
    /// As the instruction wants it written.
    line: String,
}

fn calls(value: &RawValue) -> Result<Vec<Call<'_>>, Refused> {
    let entries = list(value, RUN_TOOL_CALLS_MAX)?.into_iter();
    entries.map(call).collect()
}

fn call(value: &RawValue) -> Result<Call<'_>, Refused> {
    let missing = |name| Refused::at(name, Why::Missing);
    let members = Members::of(value)?;
    let function = members.get("function").ok_or_else(|| missing("function"))?;
    let function = Members::of(function)?;
    let name = string(function.get("name").ok_or_else(|| missing("name"))?)?;
    let arguments = function.get("arguments").map(string).transpose()?;
    let arguments = arguments.unwrap_or_default();
    let mut inner = Object::default();
    inner.text("name", &name);
    match serde_json::from_str::<&RawValue>(&arguments) {
        Ok(object) if object.get().starts_with('{') => inner.raw("arguments", object.get()),
        _ => inner.raw("arguments", "{}"),
    }
    let line = format!("{OPEN}{}{CLOSE}", inner.close());
    let id = members.get("id").map(string).transpose()?;
    Ok(Call {
        id: id.unwrap_or_default(),
        name,
        line,
    })
}

/// A JSON object in the making.
#[derive(Default)]
struct Object(String);

impl Object {
    fn raw(&mut self, name: &str, json: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&quoted(name));
        self.0.push(':');
        self.0.push_str(json);
    }

    fn text(&mut self, name: &str, text: &str) {
        self.raw(name, &quoted(text));
    }

    /// At least one member was given.
    fn close(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// A JSON string.
fn quoted(text: &(impl Serialize + ?Sized)) -> String {
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

#[cfg(test)]
#[path = "fallback_tests.rs"]
mod tests;
