//! HOT. A normalized run's answer in OpenAI's shapes: event by event, or as one object.
//!
//! Lives on: the client's shard. View: one event. Bound: pieces borrowed from what they are made of;
//! nothing is copied here.
//!
//! ```text
//! data: {"id":…,"object":…,"created":…,"model":…,"choices":[  choice  ]  ,"usage":null  }
//! ───────────────── Shape::opening ─────────────────────────            ─── closing ─────
//! ```
use iop_proto::catalog::Operation;
use iop_proto::domain::Usage;

use crate::text::Writer;

/// What every event and the whole object of one answer say of it.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// `ChatCompletions`; else as `Completions`.
    pub operation: Operation,
    pub id: &'a [u8],
    /// Unix seconds, decimal.
    pub created: &'a [u8],
    /// The name the client asked for, as a JSON string.
    pub model: &'a [u8],
}

/// What an event says of usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageField<'a> {
    /// It was not asked for.
    Absent,
    /// It comes later.
    Null,
    /// The object.
    Is(&'a [u8]),
}

/// The last event of a stream that came to its end.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

impl<'a> Shape<'a> {
    const fn is_chat(&self) -> bool {
        matches!(self.operation, Operation::ChatCompletions)
    }

    /// One event of a stream around its choice; no pieces at all make an empty list of choices.
    pub fn event<'e: 'a>(
        &self,
        choice: impl Iterator<Item = &'e [u8]> + Clone,
        usage: UsageField<'a>,
    ) -> impl Iterator<Item = &'a [u8]> + Clone {
        let start: &[u8] = if self.is_chat() {
            b"data: {\"id\":\"chatcmpl-"
        } else {
            b"data: {\"id\":\"cmpl-"
        };
        let object: &[u8] = if self.is_chat() {
            b"\",\"object\":\"chat.completion.chunk\",\"created\":"
        } else {
            b"\",\"object\":\"text_completion\",\"created\":"
        };
        self.opening(start, object)
            .into_iter()
            .chain(shorter(choice))
            .chain(closing(usage))
            .chain([&b"\n\n"[..]])
    }

    /// Everything of the whole object before its text, which is a JSON string without its quotes.
    pub fn before_text(
        &self,
        text_is_null: bool,
    ) -> impl Iterator<Item = &'a [u8]> + Clone + use<'a> {
        let start: &[u8] = if self.is_chat() {
            b"{\"id\":\"chatcmpl-"
        } else {
            b"{\"id\":\"cmpl-"
        };
        let object: &[u8] = if self.is_chat() {
            b"\",\"object\":\"chat.completion\",\"created\":"
        } else {
            b"\",\"object\":\"text_completion\",\"created\":"
        };
        let choice: &[u8] = match (self.is_chat(), text_is_null) {
            (true, true) => b"{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":null",
            (true, false) => b"{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
            (false, _) => b"{\"index\":0,\"text\":\"",
        };
        self.opening(start, object).into_iter().chain([choice])
    }

    /// Everything behind it. `calls`: elements of `message.tool_calls`, if there are any.
    pub fn behind_text<'e: 'a>(
        &self,
        text_is_null: bool,
        calls: Option<impl Iterator<Item = &'e [u8]> + Clone>,
        finish: &'a str,
        usage: UsageField<'a>,
    ) -> impl Iterator<Item = &'a [u8]> + Clone {
        let quote: &[u8] = if text_is_null && self.is_chat() {
            b""
        } else {
            b"\""
        };
        let (before, behind): (&[u8], &[u8]) = if calls.is_some() {
            (b",\"tool_calls\":[", b"]")
        } else {
            (b"", b"")
        };
        let message: &[u8] = if self.is_chat() { b"}" } else { b"" };
        let finish = [
            behind,
            message,
            b",\"logprobs\":null,\"finish_reason\":\"",
            finish.as_bytes(),
            b"\"}",
        ];
        [quote, before]
            .into_iter()
            .chain(shorter(calls.into_iter().flatten()))
            .chain(finish)
            .chain(closing(usage))
    }

    fn opening(&self, start: &'a [u8], object: &'a [u8]) -> [&'a [u8]; 7] {
        let Self {
            id, created, model, ..
        } = *self;
        [
            start,
            id,
            object,
            created,
            b",\"model\":",
            model,
            b",\"choices\":[",
        ]
    }
}

/// Choice of the first event of a chat.
pub const ROLE: &[u8] =
    b"{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}";

/// Choice around text, which is a JSON string without its quotes.
#[must_use]
pub const fn text_choice(operation: Operation) -> [&'static [u8]; 2] {
    match operation {
        Operation::ChatCompletions => [
            b"{\"index\":0,\"delta\":{\"content\":\"",
            b"\"},\"finish_reason\":null}",
        ],
        _ => [
            b"{\"text\":\"",
            b"\",\"index\":0,\"logprobs\":null,\"finish_reason\":null}",
        ],
    }
}

/// Choice around the reason that ends the text.
#[must_use]
pub const fn finish_choice(operation: Operation) -> [&'static [u8]; 2] {
    match operation {
        Operation::ChatCompletions => [b"{\"index\":0,\"delta\":{},\"finish_reason\":\"", b"\"}"],
        _ => [
            b"{\"text\":\"\",\"index\":0,\"logprobs\":null,\"finish_reason\":\"",
            b"\"}",
        ],
    }
}

/// Choice around the elements of `delta.tool_calls`.
pub const CALLS: [&[u8]; 2] = [
    b"{\"index\":0,\"delta\":{\"tool_calls\":[",
    b"]},\"finish_reason\":null}",
];

/// Pieces taken for a shorter time than they live.
pub fn shorter<'s, 'l: 's>(
    parts: impl Iterator<Item = &'l [u8]> + Clone,
) -> impl Iterator<Item = &'s [u8]> + Clone {
    parts.map(|part| -> &'s [u8] { part })
}

fn closing(usage: UsageField<'_>) -> [&[u8]; 3] {
    match usage {
        UsageField::Absent => [b"]", b"", b"}"],
        UsageField::Null => [b"],\"usage\":", b"null", b"}"],
        UsageField::Is(usage) => [b"],\"usage\":", usage, b"}"],
    }
}

/// `finish_reason` for what the node said: a word of OpenAI's, in accordance with whether there are
/// tool calls.
#[must_use]
pub fn finish_reason(said: Option<&[u8]>, has_calls: bool) -> &'static str {
    match said {
        Some(b"length") => "length",
        Some(b"content_filter") => "content_filter",
        _ if has_calls => "tool_calls",
        _ => "stop",
    }
}

/// Bytes of any usage object.
pub const USAGE_BYTES_MAX: usize = 128;

/// Writes the usage object; its length. Counts below 0 are none; a total that was left out is the sum.
#[must_use]
pub fn write_usage(out: &mut [u8; USAGE_BYTES_MAX], usage: Usage) -> usize {
    let count = |tokens: i64| u64::try_from(tokens).unwrap_or(0);
    let (prompt, completion) = (count(usage.prompt_tokens), count(usage.completion_tokens));
    let total = match count(usage.total_tokens) {
        0 => prompt.saturating_add(completion),
        total => total,
    };
    let mut text = Writer::new(out);
    let counts: [(&[u8], u64); 3] = [
        (b"{\"prompt_tokens\":", prompt),
        (b",\"completion_tokens\":", completion),
        (b",\"total_tokens\":", total),
    ];
    let written = counts
        .into_iter()
        .try_for_each(|(name, value)| text.put(name).and_then(|()| text.put_decimal(value)))
        .and_then(|()| text.put(b"}"));
    written.expect("three names and three numbers fit");
    text.written()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::surface::openai::tools;

    const CHAT: Shape<'_> = Shape {
        operation: Operation::ChatCompletions,
        id: b"ab",
        created: b"1700000000",
        model: b"\"m \\\"1\\\"\"",
    };
    const TEXT: Shape<'_> = Shape {
        operation: Operation::Completions,
        ..CHAT
    };

    fn object<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Value {
        let text: Vec<u8> = pieces.flatten().copied().collect();
        let text = String::from_utf8(text).unwrap();
        let text = text.strip_prefix("data: ").map_or(&text[..], |event| {
            event
                .strip_suffix("\n\n")
                .expect("an event ends with an empty line")
        });
        assert!(!text.contains('\n'));
        serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"))
    }

    fn around(
        parts: [&'static [u8]; 2],
        inside: &'static [u8],
    ) -> impl Iterator<Item = &'static [u8]> + Clone {
        [parts[0], inside, parts[1]].into_iter()
    }

    #[test]
    fn events_are_chunks_of_their_operation() {
        for (shape, kind, id) in [
            (CHAT, "chat.completion.chunk", "chatcmpl-ab"),
            (TEXT, "text_completion", "cmpl-ab"),
        ] {
            let mut expected = json!({
                "id": id, "object": kind, "created": 1_700_000_000, "model": "m \"1\"", "choices": [true]
            });
            let choice = [&b"true"[..]].into_iter();
            assert_eq!(
                object(shape.event(choice.clone(), UsageField::Absent)),
                expected
            );
            expected["usage"] = Value::Null;
            assert_eq!(object(shape.event(choice, UsageField::Null)), expected);
            expected["choices"] = json!([]);
            expected["usage"] = json!({"a": 1});
            let last = shape.event(core::iter::empty(), UsageField::Is(b"{\"a\":1}"));
            assert_eq!(object(last), expected);
        }
        let choice = |parts, inside| object(around(parts, inside));
        assert_eq!(
            choice(text_choice(Operation::ChatCompletions), b"a\\n"),
            json!({"index": 0, "delta": {"content": "a\n"}, "finish_reason": null})
        );
        assert_eq!(
            choice(text_choice(Operation::Completions), b"a"),
            json!({"index": 0, "text": "a", "logprobs": null, "finish_reason": null})
        );
        assert_eq!(
            choice(finish_choice(Operation::ChatCompletions), b"stop"),
            json!({"index": 0, "delta": {}, "finish_reason": "stop"})
        );
        assert_eq!(
            choice(finish_choice(Operation::Completions), b"length"),
            json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "length"})
        );
        assert_eq!(
            choice(CALLS, b"{}"),
            json!({"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": null})
        );
        assert_eq!(
            object([ROLE].into_iter()),
            json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null})
        );
    }

    #[test]
    fn the_whole_object_has_text_calls_reason_and_usage() {
        let calls = || tools::reported(b"[{\"id\":\"c\"}]").map(tools::whole_calls);
        let none = || calls().filter(|_| false);
        let whole = |shape: Shape<'static>, null: bool, called: bool| {
            let text: &[u8] = if null { b"" } else { b"hi" };
            let calls = if called { calls() } else { none() };
            object(
                shape
                    .before_text(null)
                    .chain([text])
                    .chain(shape.behind_text(null, calls, "stop", UsageField::Is(b"{}"))),
            )
        };
        let of = |object: &str, id: &str, choice: Value| {
            json!({"id": id, "object": object, "created": 1_700_000_000, "model": "m \"1\"",
                   "choices": [choice], "usage": {}})
        };
        let chat = |message: Value| {
            of(
                "chat.completion",
                "chatcmpl-ab",
                json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"}),
            )
        };
        assert_eq!(
            whole(CHAT, false, false),
            chat(json!({"role": "assistant", "content": "hi"}))
        );
        assert_eq!(
            whole(CHAT, true, true),
            chat(json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]}))
        );
        assert_eq!(
            whole(CHAT, false, true),
            chat(json!({"role": "assistant", "content": "hi", "tool_calls": [{"id": "c"}]}))
        );
        assert_eq!(
            whole(TEXT, false, false),
            of(
                "text_completion",
                "cmpl-ab",
                json!({"index": 0, "text": "hi", "logprobs": null, "finish_reason": "stop"})
            )
        );
    }

    #[test]
    fn reasons_and_counts_are_what_clients_know() {
        for (said, calls, expected) in [
            (None, false, "stop"),
            (None, true, "tool_calls"),
            (Some("stop"), true, "tool_calls"),
            (Some("tool_calls"), false, "stop"),
            (Some("length"), true, "length"),
            (Some("content_filter"), false, "content_filter"),
            (Some("\"},"), false, "stop"),
        ] {
            assert_eq!(
                finish_reason(said.map(str::as_bytes), calls),
                expected,
                "{said:?}"
            );
        }
        let written = |prompt_tokens, completion_tokens, total_tokens| {
            let mut out = [0; USAGE_BYTES_MAX];
            let usage = Usage {
                prompt_tokens,
                completion_tokens,
                total_tokens,
            };
            let len = write_usage(&mut out, usage);
            serde_json::from_slice::<Value>(&out[..len]).unwrap()
        };
        let of = |p: u64, c: u64, t: u64| json!({"prompt_tokens": p, "completion_tokens": c, "total_tokens": t});
        assert_eq!(written(1, 2, 0), of(1, 2, 3));
        assert_eq!(written(1, 2, 9), of(1, 2, 9));
        assert_eq!(written(-1, i64::MIN, 0), of(0, 0, 0));
        let max = i64::MAX.unsigned_abs();
        assert_eq!(written(i64::MAX, i64::MAX, i64::MAX), of(max, max, max));
    }
}
