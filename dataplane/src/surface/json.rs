//! HOT. JSON text walked where it lies: where a value ends, the elements of an array, the members of an
//! object. Nothing is decoded or copied.
//!
//! Lives on: shards. View: one text, which is UTF-8. Bound: its length; `RESTORED_TOOL_CALL_DEPTH_MAX`
//! levels.
//!
//! Only RFC 8259 passes: what is handed on as JSON must be JSON to everybody.
use iop_proto::limits::RESTORED_TOOL_CALL_DEPTH_MAX;

use crate::text::json_plain_len;

/// Bytes of the value that `text` begins with; `None`: it begins with none.
#[must_use]
pub fn value_len(text: &[u8]) -> Option<usize> {
    value(text, 0, RESTORED_TOOL_CALL_DEPTH_MAX)
}

/// Blanks that `text` begins with.
#[must_use]
pub fn blank_len(text: &[u8]) -> usize {
    skip_blank(text, 0)
}

/// The elements of the array that is all of `text`, blanks aside; `None`: it is no such thing.
#[must_use]
pub fn array(text: &[u8]) -> Option<Elements<'_>> {
    Some(Elements {
        text: whole(text, b'[')?,
        at: 1,
    })
}

/// The members of the object that is all of `text`, blanks aside; `None`: it is no such thing.
#[must_use]
pub fn object(text: &[u8]) -> Option<Members<'_>> {
    Some(Members {
        text: whole(text, b'{')?,
        at: 1,
    })
}

/// `text` without the blanks around its one value, if that begins with `first`.
fn whole(text: &[u8], first: u8) -> Option<&[u8]> {
    let start = skip_blank(text, 0);
    let end = value(text, start, RESTORED_TOOL_CALL_DEPTH_MAX)?;
    let is_all = text[start] == first && skip_blank(text, end) == text.len();
    is_all.then(|| &text[start..end])
}

/// See [`array`]: each element as it stands.
#[derive(Clone, Debug)]
pub struct Elements<'a> {
    /// A whole array.
    text: &'a [u8],
    /// Behind its `[`, or behind a comma or the last element.
    at: usize,
}

impl<'a> Iterator for Elements<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let start = skip_blank(self.text, self.at);
        // At the closing bracket there is no value.
        let end = value(self.text, start, RESTORED_TOOL_CALL_DEPTH_MAX)?;
        self.at = behind_comma(self.text, end);
        Some(&self.text[start..end])
    }
}

/// See [`object`]: each key as it stands, quotes included, and its value.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Members<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let start = skip_blank(self.text, self.at);
        let end = string(self.text, start)?;
        let colon = skip_blank(self.text, end);
        let from = skip_blank(self.text, colon + 1);
        let to = value(self.text, from, RESTORED_TOOL_CALL_DEPTH_MAX)?;
        self.at = behind_comma(self.text, to);
        Some((&self.text[start..end], &self.text[from..to]))
    }
}

/// Behind the comma that follows `at`, if one does.
fn behind_comma(text: &[u8], at: usize) -> usize {
    let next = skip_blank(text, at);
    next + usize::from(text.get(next) == Some(&b','))
}

fn skip_blank(text: &[u8], at: usize) -> usize {
    let is_blank = |byte: &&u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
    let blanks = text.get(at..).unwrap_or_default().iter();
    at + blanks.take_while(is_blank).count()
}

/// Where the value that starts at `at` ends. `depth`: levels that may still be opened.
fn value(text: &[u8], at: usize, depth: u32) -> Option<usize> {
    match text.get(at)? {
        b'"' => string(text, at),
        b'{' | b'[' if depth > 0 => nested(text, at, depth - 1),
        b't' => literal(text, at, b"true"),
        b'f' => literal(text, at, b"false"),
        b'n' => literal(text, at, b"null"),
        b'-' | b'0'..=b'9' => number(text, at),
        _ => None,
    }
}

/// An object or array.
fn nested(text: &[u8], at: usize, depth: u32) -> Option<usize> {
    let is_object = text[at] == b'{';
    let close = if is_object { b'}' } else { b']' };
    let mut at = skip_blank(text, at + 1);
    if text.get(at) == Some(&close) {
        return Some(at + 1);
    }
    loop {
        if is_object {
            at = skip_blank(text, string(text, at)?);
            if text.get(at) != Some(&b':') {
                return None;
            }
            at = skip_blank(text, at + 1);
        }
        at = skip_blank(text, value(text, at, depth)?);
        match text.get(at)? {
            b',' => at = skip_blank(text, at + 1),
            byte if *byte == close => return Some(at + 1),
            _ => return None,
        }
    }
}

fn string(text: &[u8], at: usize) -> Option<usize> {
    if text.get(at) != Some(&b'"') {
        return None;
    }
    let mut at = at + 1;
    loop {
        at += json_plain_len(text.get(at..)?);
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => match text.get(at + 1)? {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => at += 2,
                b'u' if text.get(at + 2..at + 6)?.iter().all(u8::is_ascii_hexdigit) => at += 6,
                _ => return None,
            },
            _ => return None, // a control character
        }
    }
}

fn literal(text: &[u8], at: usize, word: &[u8]) -> Option<usize> {
    text[at..].starts_with(word).then_some(at + word.len())
}

fn number(text: &[u8], at: usize) -> Option<usize> {
    let digits = |at: usize| {
        let rest = text.get(at..).unwrap_or_default().iter();
        at + rest.take_while(|byte| byte.is_ascii_digit()).count()
    };
    // At least one digit from `at` on; where they end.
    let some = |at: usize| Some(digits(at)).filter(|&end| end > at);
    let start = at + usize::from(text[at] == b'-');
    let mut at = if text.get(start) == Some(&b'0') {
        start + 1
    } else {
        some(start)?
    };
    if text.get(at) == Some(&b'.') {
        at = some(at + 1)?;
    }
    if matches!(text.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(text.get(at + 1), Some(b'+' | b'-')));
        at = some(at + 1 + sign)?;
    }
    Some(at)
}
