//! HOT. Tool calls of a normalized run: those a node reports as JSON, and those that stand in the answer's
//! text when the node says that they may.
//!
//! Lives on: the client's shard. View: one event's metadata; one answer's text. Bound:
//! `RESTORED_TOOL_CALLS_MAX` calls; a few bytes of state per answer.
//!
//! In text a call is a block at the start of a line, or right behind another block:
//! ```text
//! <tool_call>{"name":"f","arguments":{"x":1}}</tool_call>
//! ```
//! Blanks may stand around the object. Whatever is not exactly that stays text. `[R-308]`
use iop_proto::limits::RESTORED_TOOL_CALLS_MAX;

use crate::surface::json::{self, Elements};
use crate::text::json_escaped;

/// What a block begins and ends with.
pub const OPEN: &[u8] = b"<tool_call>";
const CLOSE: &[u8] = b"</tool_call>";
const CALLS_MAX: usize = RESTORED_TOOL_CALLS_MAX as usize;

// ── reported by the node ─────────────────────────────────────────────────────────────────────────

/// The calls in `openai_tool_calls`, each as it stands; `None`: there are none, or it is not an array
/// of at most `RESTORED_TOOL_CALLS_MAX` objects. `[R-303]`
#[must_use]
pub fn reported(metadata: &[u8]) -> Option<Elements<'_>> {
    let calls = json::array(metadata)?;
    let count = calls.clone().count();
    let is_call = |call: &[u8]| call.starts_with(b"{");
    ((1..=CALLS_MAX).contains(&count) && calls.clone().all(is_call)).then_some(calls)
}

/// The calls as elements of `message.tool_calls`: unchanged.
pub fn whole_calls<'a>(calls: Elements<'a>) -> impl Iterator<Item = &'a [u8]> + Clone + 'a {
    calls.enumerate().flat_map(|(row, call)| [comma(row), call])
}

/// The calls as elements of `delta.tool_calls`, where clients want each to say its `index`.
pub fn delta_calls<'a>(calls: Elements<'a>) -> impl Iterator<Item = &'a [u8]> + Clone + 'a {
    calls.enumerate().flat_map(|(row, call)| {
        let mut members = json::object(call).into_iter().flatten();
        let (before, behind): (&[u8], &[u8]) = match members.next() {
            None => (b"{\"index\":", b""),
            Some(first) if first.0 == b"\"index\"" || members.any(|m| m.0 == b"\"index\"") => {
                return [comma(row), call, b"", b"", b""];
            }
            Some(_) => (b"{\"index\":", b","),
        };
        [comma(row), before, index(row), behind, &call[1..]]
    })
}

const fn comma(row: usize) -> &'static [u8] {
    if row == 0 { b"" } else { b"," }
}

/// `row` in decimal.
fn index(row: usize) -> &'static [u8] {
    let digits = &INDEXES[row.min(CALLS_MAX - 1)];
    match row {
        0..10 => &digits[2..],
        10..100 => &digits[1..],
        _ => digits,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "one digit each")]
static INDEXES: [[u8; 3]; CALLS_MAX] = {
    let mut rows = [[0; 3]; CALLS_MAX];
    let mut row = 0;
    while row < CALLS_MAX {
        rows[row] = [
            b'0' + (row / 100) as u8,
            b'0' + (row / 10 % 10) as u8,
            b'0' + (row % 10) as u8,
        ];
        row += 1;
    }
    rows
};

const _: () = assert!(CALLS_MAX <= 1_000);

// ── in the text ──────────────────────────────────────────────────────────────────────────────────

/// A piece of held text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    Text(&'a [u8]),
    /// Both as they stand: a JSON string with its quotes, and any JSON value.
    Call {
        name: &'a [u8],
        arguments: &'a [u8],
    },
}

/// Held text, whose first bytes stand at the start of a line, as text and calls in their order.
#[must_use]
pub const fn parts(text: &[u8]) -> Parts<'_> {
    Parts {
        rest: text,
        calls: 0,
        may_open: true,
    }
}

/// See [`parts`]. After `RESTORED_TOOL_CALLS_MAX` calls the rest is text.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    rest: &'a [u8],
    calls: usize,
    /// A block may begin here.
    may_open: bool,
}

impl<'a> Iterator for Parts<'a> {
    type Item = Part<'a>;

    fn next(&mut self) -> Option<Part<'a>> {
        if self.rest.is_empty() {
            return None;
        }
        if self.may_open
            && self.calls < CALLS_MAX
            && let Some((call, used)) = block(self.rest)
        {
            self.calls += 1;
            self.rest = &self.rest[used..];
            return Some(call);
        }
        let (text, rest) = self.rest.split_at(text_len(self.rest, self.calls > 0));
        self.rest = rest;
        self.may_open = true;
        Some(Part::Text(text))
    }
}

/// Bytes up to the next place where a block may begin, at least one. Behind a block blanks do not
/// matter.
fn text_len(text: &[u8], behind_block: bool) -> usize {
    let blanks = json::blank_len(text);
    if behind_block && blanks > 0 && text[blanks..].starts_with(OPEN) {
        return blanks;
    }
    let mut at = 0;
    while let Some(line) = text[at..].iter().position(|&byte| byte == b'\n') {
        at += line + 1;
        if text[at..].starts_with(OPEN) {
            return at;
        }
    }
    text.len()
}

/// The block that `text` begins with, and its bytes.
fn block(text: &[u8]) -> Option<(Part<'_>, usize)> {
    let mut at = OPEN.len();
    let inside = text.strip_prefix(OPEN)?;
    let before = json::blank_len(inside);
    let object = &inside[before..];
    let object = &object[..json::value_len(object)?];
    at += before + object.len();
    at += json::blank_len(&text[at..]);
    text[at..].strip_prefix(CLOSE)?;
    let (mut name, mut arguments): (Option<&[u8]>, &[u8]) = (None, b"{}");
    for (key, value) in json::object(object)? {
        match key {
            b"\"name\"" => name = Some(value),
            b"\"arguments\"" => arguments = value,
            _ => {}
        }
    }
    let name = name.filter(|name| name.starts_with(b"\"") && name.len() > 2)?;
    Some((Part::Call { name, arguments }, at + CLOSE.len()))
}

/// The calls of `text` as elements of `tool_calls`, with ids made of `id`; `indexed`: as those of a
/// delta.
pub fn restored<'a>(
    text: &'a [u8],
    id: &'a [u8],
    indexed: bool,
) -> impl Iterator<Item = &'a [u8]> + Clone + 'a {
    let calls = parts(text).filter_map(|part| match part {
        Part::Call { name, arguments } => Some((name, arguments)),
        Part::Text(_) => None,
    });
    calls.enumerate().flat_map(move |(row, (name, arguments))| {
        let numbered: [&[u8]; 3] = if indexed {
            [b"\"index\":", index(row), b","]
        } else {
            [b"", b"", b""]
        };
        let [a, b, c] = numbered;
        let named: [&[u8]; 11] = [
            comma(row),
            b"{",
            a,
            b,
            c,
            b"\"id\":\"call_",
            id,
            b"_",
            index(row),
            b"\",\"type\":\"function\",\"function\":{\"name\":",
            name,
        ];
        named
            .into_iter()
            .chain([&b",\"arguments\":"[..]])
            .chain(as_string(arguments))
            .chain([&b"}}"[..]])
    })
}

/// JSON as a JSON string, which OpenAI's shape wants; what is a string already stays one.
fn as_string(json: &[u8]) -> impl Iterator<Item = &[u8]> + Clone {
    let is_string = json.starts_with(b"\"");
    let quote: &[u8] = if is_string { b"" } else { b"\"" };
    let (kept, escaped) = if is_string {
        (json, &b""[..])
    } else {
        (&b""[..], json)
    };
    [quote, kept]
        .into_iter()
        .chain(json_escaped(escaped))
        .chain([quote])
}

// ── held back ────────────────────────────────────────────────────────────────────────────────────

/// Where the text of an answer stands with regard to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nothing is held back.
    Off,
    /// At a line of which so many bytes are those of `OPEN`; they are held back.
    Line(u8),
    /// Within a line that is none.
    Within,
    /// A block has begun: all that follows is held back.
    Block,
}

/// What becomes of one delta's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken<'a> {
    /// Bytes of `OPEN` held back so far that began no block: they go first.
    pub released: &'static [u8],
    pub passes: &'a [u8],
    /// To be held back.
    pub held: &'a [u8],
    /// A block begins here: `OPEN` stands before `held`.
    pub opens: bool,
}

impl Hold {
    /// Bytes of `OPEN` that are held back.
    #[must_use]
    pub fn partial(self) -> &'static [u8] {
        match self {
            Self::Line(matched) => &OPEN[..usize::from(matched)],
            Self::Off | Self::Within | Self::Block => b"",
        }
    }

    /// Judges the next `text` of the answer.
    pub fn take<'a>(&mut self, text: &'a [u8]) -> Taken<'a> {
        let before = self.partial();
        let mut taken = Taken {
            released: b"",
            passes: text,
            held: b"",
            opens: false,
        };
        match self {
            Self::Off => return taken,
            Self::Block => {
                (taken.passes, taken.held) = (b"", text);
                return taken;
            }
            Self::Line(_) | Self::Within => {}
        }
        let end = self.advance(text);
        taken.opens = *self == Self::Block;
        // Bytes of `OPEN` before `end`, in this text or before it.
        let matched = if taken.opens {
            OPEN.len()
        } else {
            self.partial().len()
        };
        if let Some(start) = end.checked_sub(matched) {
            taken.released = before;
            taken.passes = &text[..start];
        } else {
            taken.passes = b""; // the match goes on that began before
        }
        taken.held = &text[end..];
        taken
    }

    /// Reads `text` up to the end of an `OPEN`, or to its own; where it stopped.
    fn advance(&mut self, text: &[u8]) -> usize {
        let mut at = 0;
        while let Some(&byte) = text.get(at) {
            match self {
                Self::Line(matched) if byte == OPEN[usize::from(*matched)] => {
                    *matched += 1;
                    at += 1;
                    if usize::from(*matched) == OPEN.len() {
                        *self = Self::Block;
                        return at;
                    }
                }
                Self::Line(_) | Self::Within => {
                    let line = text[at..].iter().position(|&byte| byte == b'\n');
                    let Some(line) = line else {
                        *self = Self::Within;
                        return text.len();
                    };
                    *self = Self::Line(0);
                    at += line + 1;
                }
                Self::Off | Self::Block => return at,
            }
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn joined<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Value {
        let text = [
            &b"["[..],
            &pieces.flatten().copied().collect::<Vec<u8>>(),
            b"]",
        ]
        .concat();
        serde_json::from_slice(&text).unwrap_or_else(|_| panic!("{}", text.escape_ascii()))
    }

    #[test]
    fn reported_calls_are_an_array_of_objects_or_none() {
        let calls = r#" [ {"id":"c1","function":{"name":"f","arguments":"{}"}} , {} ] "#;
        let read = reported(calls.as_bytes()).unwrap();
        assert_eq!(
            joined(whole_calls(read.clone())),
            serde_json::from_str::<Value>(calls).unwrap()
        );
        assert_eq!(
            joined(delta_calls(read)),
            json!([{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}, {"index": 1}])
        );
        let own = r#"[{"id":"c","index":7}]"#;
        assert_eq!(
            joined(delta_calls(reported(own.as_bytes()).unwrap())),
            json!([{"id": "c", "index": 7}])
        );
        for none in [
            "",
            " ",
            "null",
            "[]",
            " [ ] ",
            "{}",
            "[1]",
            "[{}",
            "[{}]]",
            "[{}] x",
            "[{}, 1]",
            "[{\"a\":}]",
            "[{\"a\":1,}]",
            "[{a:1}]",
            "[{\"a\":\"\n\"}]",
            "[{\"a\":01}]",
            "[{\"a\":nul}]",
            "[{}\u{a0}]",
        ] {
            assert!(reported(none.as_bytes()).is_none(), "{none:?}");
        }
        let many = |count: usize| format!("[{}]", vec!["{}"; count].join(","));
        assert_eq!(
            joined(delta_calls(reported(many(CALLS_MAX).as_bytes()).unwrap()))[127],
            json!({"index": 127})
        );
        assert!(reported(many(CALLS_MAX + 1).as_bytes()).is_none());
        let deep =
            |levels: usize| format!("[{{\"a\":{}{}}}]", "[".repeat(levels), "]".repeat(levels));
        assert!(reported(deep(62).as_bytes()).is_some());
        assert!(reported(deep(63).as_bytes()).is_none());
    }

    #[test]
    fn blocks_are_calls_and_everything_else_is_text() {
        const F: Part<'_> = Part::Call {
            name: b"\"f\"",
            arguments: b"{\"x\": 1}",
        };
        const CALL: &str = r#"<tool_call>{"name":"f","arguments":{"x": 1}}</tool_call>"#;
        let text = |text: &'static str| Part::Text(text.as_bytes());
        let two = format!("{CALL}\n{CALL}");
        let joined = format!("{CALL}{CALL} tail\n{CALL}");
        let spaced = "<tool_call>\n { \"id\":3, \"name\" : \"f\",\n\"arguments\":{\"x\": 1} }\n</tool_call>\n";
        for (whole, expected) in [
            (CALL, vec![F]),
            (spaced, vec![F, text("\n")]),
            (&two, vec![F, text("\n"), F]),
            (&joined, vec![F, F, text(" tail\n"), F]),
            (
                "<tool_call>{\"name\":\"g\"}</tool_call>",
                vec![Part::Call {
                    name: b"\"g\"",
                    arguments: b"{}",
                }],
            ),
        ] {
            assert_eq!(
                parts(whole.as_bytes()).collect::<Vec<_>>(),
                expected,
                "{whole}"
            );
        }
        for stays in [
            "<tool_call>",
            "<tool_call>{}</tool_call>",
            "<tool_call>{\"name\":1}</tool_call>",
            "<tool_call>{\"name\":\"\"}</tool_call>",
            "<tool_call>[]</tool_call>",
            "<tool_call>{\"name\":\"f\"}",
            "<tool_call>{\"name\":\"f\"} x</tool_call>",
            "<tool_call>{\"name\":\"f\",}</tool_call>",
            "<tool_call>{'name':'f'}</tool_call>",
            "<tool_calls>{\"name\":\"f\"}</tool_calls>",
            "no <tool_call>{\"name\":\"f\"}</tool_call>",
        ] {
            assert_eq!(
                parts(stays.as_bytes()).collect::<Vec<_>>(),
                [text(stays)],
                "{stays}"
            );
        }
        let mixed = format!("<tool_call>broken\n{CALL}");
        assert_eq!(
            parts(mixed.as_bytes()).collect::<Vec<_>>(),
            [text("<tool_call>broken\n"), F]
        );
        assert_eq!(parts(b"").count(), 0);
        let many = CALL.repeat(CALLS_MAX + 1);
        assert_eq!(
            parts(many.as_bytes()).filter(|part| *part == F).count(),
            CALLS_MAX
        );
    }

    #[test]
    fn a_block_becomes_a_call_with_its_arguments_as_a_string() {
        let whole = concat!(
            "<tool_call>{\"name\":\"f \\\"q\\\"\",\"arguments\":{\"s\":\"a\\nb\",\"n\":1e400}}</tool_call>\n",
            "<tool_call>{\"name\":\"g\",\"arguments\":\"{\\\"y\\\":2}\"}</tool_call>"
        );
        let call = |row: usize, name: &str, arguments: &str| {
            json!({"id": format!("call_ab_{row}"), "type": "function",
                   "function": {"name": name, "arguments": arguments}})
        };
        let expected = json!([
            call(0, "f \"q\"", "{\"s\":\"a\\nb\",\"n\":1e400}"),
            call(1, "g", "{\"y\":2}")
        ]);
        assert_eq!(joined(restored(whole.as_bytes(), b"ab", false)), expected);
        let indexed = joined(restored(whole.as_bytes(), b"ab", true));
        assert_eq!(
            (&indexed[0]["index"], &indexed[1]["index"]),
            (&json!(0), &json!(1))
        );
    }

    /// What passes and what is held, over every split, must be the text; a block is held from its start.
    #[test]
    fn text_passes_until_a_line_begins_a_block_however_it_is_cut() {
        for (text, block_at) in [
            ("plain", None),
            ("<tool_call>x", Some(0)),
            ("a\n<tool_call>{}\nb", Some(2)),
            ("a <tool_call>", None),
            ("<tool_cal\n<tool_<tool_call>\n\n<tool_call>", Some(29)),
            ("<too", None),
            ("\n\n<", None),
            ("é\n<tool_call>é", Some(3)),
        ] {
            let whole = text.as_bytes();
            let at = block_at.unwrap_or(whole.len());
            for first in 0..=whole.len() {
                for second in first..=whole.len() {
                    let (mut passed, mut held, mut hold) = (Vec::new(), Vec::new(), Hold::Line(0));
                    for piece in [&whole[..first], &whole[first..second], &whole[second..]] {
                        let taken = hold.take(piece);
                        passed.extend_from_slice(taken.released);
                        passed.extend_from_slice(taken.passes);
                        if taken.opens {
                            held.extend_from_slice(OPEN);
                        }
                        held.extend_from_slice(taken.held);
                    }
                    passed.extend_from_slice(hold.partial());
                    assert_eq!(passed, whole[..at], "{text:?} cut at {first}, {second}");
                    assert_eq!(held, whole[at..], "{text:?} cut at {first}, {second}");
                }
            }
        }
    }
}
