//! YAML as a tree whose every value knows its line, and typed access that collects complaints.
//!
//! Lives on: the cold thread. View: one file. Bound: `FILE_BYTES_MAX` of text, `DEPTH_MAX` levels,
//! `NODES_MAX` values, `PROBLEMS_MAX` complaints kept.
//!
//! serde stops at the first mistake; an operator wants them all. So serde builds this tree only,
//! and what the fields mean is read from it by name.
use core::cell::RefCell;
use core::fmt;
use core::ops::RangeInclusive;
use core::str::FromStr;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, Location, Spanned};

use super::{ConfigError, Problem};

/// Text of one file. 16 384 providers of 512 bytes are 8 MiB.
pub(super) const FILE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The deepest field, an operation of a profile of an adapter of a node, lies at 9.
const DEPTH_MAX: usize = 16;
/// Values of one file: each provider has about a dozen fields, each a key and a value.
const NODES_MAX: usize = 1_000_000;
/// Complaints listed; an operator reads no more at once.
pub(super) const PROBLEMS_MAX: usize = 32;
/// Bytes of a peer's or operator's text that a message repeats.
const QUOTE_CHARS_MAX: usize = 64;

/// One value and where it stands.
#[derive(Debug)]
pub(super) struct Node {
    line: u64,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Null,
    /// As written. `quoted` text is never a number or a switch.
    Scalar {
        text: String,
        quoted: bool,
    },
    List(Vec<Node>),
    Map(Vec<(String, u64, Node)>),
}

/// What serde makes of a value; plain scalars are read again from the source, so that a name such
/// as `2.0` stays the text it is.
enum Raw {
    Null,
    Plain,
    Text(String),
    List(Vec<Spanned<Self>>),
    Map(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Raw, E> {
        Ok(Raw::Plain)
    }

    fn visit_str<E>(self, text: &str) -> Result<Raw, E> {
        Ok(Raw::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}

/// Parses `text` as one YAML document.
///
/// # Errors
/// The first place at which it is not YAML, or exceeds a bound of this file.
pub(super) fn parse(text: &str, context: &Context) -> Option<Node> {
    if text.len() > FILE_BYTES_MAX {
        context.complain(
            0,
            "",
            format!("the file is longer than {FILE_BYTES_MAX} bytes"),
        );
        return None;
    }
    let options = serde_saphyr::options! {
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        with_snippet: false,
        duplicate_keys: DuplicateKeyPolicy::Error,
        budget: serde_saphyr::budget! {
            max_depth: DEPTH_MAX,
            max_nodes: NODES_MAX,
            max_events: 2 * NODES_MAX,
            max_documents: 1,
        },
    };
    match serde_saphyr::from_str_with_options::<Spanned<Raw>>(text, options) {
        Ok(root) => Some(settle(text, root)),
        Err(error) => {
            let line = error.location().map_or(0, |at| at.line());
            let what = error.to_string();
            let what = what.lines().next().unwrap_or("not YAML");
            context.complain(line, "", format!("not valid YAML: {}", without_place(what)));
            None
        }
    }
}

/// The parser repeats line and column in its messages; ours stand in front already.
fn without_place(what: &str) -> &str {
    let what = what.strip_prefix("error: ").unwrap_or(what);
    match what
        .strip_prefix("line ")
        .and_then(|rest| rest.split_once(": "))
    {
        Some((_, rest)) => rest,
        None => what.split(" at line ").next().unwrap_or(what),
    }
}

fn settle(source: &str, node: Spanned<Raw>) -> Node {
    let at = if node.referenced == Location::UNKNOWN {
        node.defined
    } else {
        node.referenced
    };
    let value = match node.value {
        Raw::Null => Value::Null,
        Raw::Plain => Value::Scalar {
            text: source_of(source, node.defined),
            quoted: false,
        },
        Raw::Text(text) => {
            let quoted = source_of(source, node.defined).starts_with(['"', '\'', '|', '>']);
            Value::Scalar { text, quoted }
        }
        Raw::List(items) => {
            Value::List(items.into_iter().map(|item| settle(source, item)).collect())
        }
        Raw::Map(entries) => Value::Map(
            entries
                .into_iter()
                .map(|(key, value)| (key.value, key.referenced.line(), settle(source, value)))
                .collect(),
        ),
    };
    Node {
        line: at.line(),
        value,
    }
}

/// The value as its author wrote it.
fn source_of(source: &str, at: Location) -> String {
    let span = at.span();
    let bytes = span
        .byte_offset()
        .zip(span.byte_len())
        .and_then(|(start, length)| {
            let start = usize::try_from(start).ok()?;
            source.get(start..start.checked_add(usize::try_from(length).ok()?)?)
        });
    bytes.unwrap_or_default().trim_end().to_owned()
}

/// Collects what is wrong with one file.
#[derive(Debug)]
pub(super) struct Context {
    file: String,
    found: RefCell<ConfigError>,
}

impl Context {
    pub(super) fn new(file: &str) -> Self {
        let found = ConfigError {
            problems: Vec::new(),
            truncated: false,
        };
        Self {
            file: file.to_owned(),
            found: RefCell::new(found),
        }
    }

    pub(super) fn complain(&self, line: u64, field: &str, what: impl Into<String>) {
        let mut found = self.found.borrow_mut();
        if found.problems.len() >= PROBLEMS_MAX {
            found.truncated = true;
            return;
        }
        found.problems.push(Problem {
            file: self.file.clone(),
            line,
            field: field.to_owned(),
            what: what.into(),
        });
    }

    /// `value` if nothing is wrong.
    pub(super) fn finish<T>(self, value: Option<T>) -> Result<T, ConfigError> {
        let mut found = self.found.into_inner();
        match value {
            Some(value) if found.problems.is_empty() => Ok(value),
            _ => {
                found.problems.sort_by_key(|problem| problem.line);
                Err(found)
            }
        }
    }
}

/// A value with its path: everything a complaint needs.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    node: &'a Node,
    path: String,
    context: &'a Context,
}

impl<'a> Field<'a> {
    pub(super) fn root(node: &'a Node, context: &'a Context) -> Self {
        Self {
            node,
            path: String::new(),
            context,
        }
    }

    pub(super) fn complain(&self, what: impl Into<String>) {
        self.context.complain(self.node.line, &self.path, what);
    }

    pub(super) const fn line(&self) -> u64 {
        self.node.line
    }

    fn mistyped(&self, wanted: &str) {
        let got = match &self.node.value {
            Value::Null => "nothing".to_owned(),
            Value::Scalar { text, .. } => quote(text),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a group of fields".to_owned(),
        };
        self.complain(format!("expected {wanted}, found {got}"));
    }

    /// The value as text; a number or a switch counts as the text it was written with.
    pub(super) fn text(&self) -> Option<&'a str> {
        let text = self.scalar();
        if text.is_none() {
            self.mistyped("text");
        }
        text
    }

    /// The text of a scalar; nothing, and no complaint, for anything else.
    pub(super) fn scalar(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Scalar { text, .. } => Some(text),
            Value::Null | Value::List(_) | Value::Map(_) => None,
        }
    }

    /// A field of this group, if it is one; no complaint.
    pub(super) fn peek(&self, name: &str) -> Option<Self> {
        let Value::Map(entries) = &self.node.value else {
            return None;
        };
        let (_, _, node) = entries.iter().find(|(key, ..)| key == name)?;
        Some(Self {
            node,
            path: joined(&self.path, name),
            context: self.context,
        })
    }

    fn plain(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::Scalar {
                text,
                quoted: false,
            } => Some(text),
            _ => None,
        }
    }

    pub(super) fn flag(&self) -> Option<bool> {
        match self.plain() {
            Some("true") => Some(true),
            Some("false") => Some(false),
            _ => {
                self.mistyped("true or false");
                None
            }
        }
    }

    /// A whole number in `range`; `unit` names what it counts in messages, empty for a bare number.
    pub(super) fn whole(&self, range: &RangeInclusive<u64>, unit: &str) -> Option<u64> {
        let (low, high) = (range.start(), range.end());
        let of = if unit.is_empty() { "" } else { " of " };
        let wanted = format!("a whole number{of}{unit} from {low} to {high}");
        let Some(text) = self.plain() else {
            self.mistyped(&wanted);
            return None;
        };
        match text.replace('_', "").parse::<u64>() {
            Ok(value) if range.contains(&value) => Some(value),
            Ok(_) | Err(_) => {
                self.mistyped(&wanted);
                None
            }
        }
    }

    /// A size in bytes: a whole number, or one followed by `KiB`, `MiB` or `GiB`.
    pub(super) fn bytes(&self, range: &RangeInclusive<u64>) -> Option<u64> {
        let value = self
            .scalar()
            .and_then(parse_bytes)
            .filter(|value| range.contains(value));
        if value.is_none() {
            let (low, high) = (show_bytes(*range.start()), show_bytes(*range.end()));
            self.mistyped(&format!(
                "a size from {low} to {high} (bytes, KiB, MiB or GiB)"
            ));
        }
        value
    }

    /// A value of `T`'s own text form.
    pub(super) fn parsed<T: FromStr>(&self, wanted: &str) -> Option<T> {
        let value = self.text()?.parse().ok();
        if value.is_none() {
            self.mistyped(wanted);
        }
        value
    }

    /// One of a closed set of words.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Option<T> {
        let text = self.text()?;
        let found = words
            .iter()
            .find(|(word, _)| *word == text)
            .map(|&(_, value)| value);
        if found.is_none() {
            let words: Vec<_> = words.iter().map(|&(word, _)| word).collect();
            self.mistyped(&format!("one of {}", words.join(", ")));
        }
        found
    }

    /// The elements of a list, none when it is empty or null.
    pub(super) fn list(&self) -> Vec<Self> {
        match &self.node.value {
            Value::List(items) => items
                .iter()
                .enumerate()
                .map(|(row, node)| Self {
                    node,
                    path: format!("{}[{row}]", self.path),
                    context: self.context,
                })
                .collect(),
            Value::Null => Vec::new(),
            Value::Scalar { .. } | Value::Map(_) => {
                self.mistyped("a list");
                Vec::new()
            }
        }
    }

    pub(super) fn is_empty_list(&self) -> bool {
        matches!(&self.node.value, Value::List(items) if items.is_empty())
    }

    pub(super) const fn is_group(&self) -> bool {
        matches!(self.node.value, Value::Map(_))
    }

    /// The fields of a group; complains about any that is not among `allowed`.
    pub(super) fn group(&self, allowed: &'static [&'static str]) -> Option<Group<'a>> {
        let Value::Map(entries) = &self.node.value else {
            self.mistyped("a group of fields");
            return None;
        };
        for (name, line, _) in entries {
            if !allowed.contains(&name.as_str()) {
                let what = format!("unknown field; allowed here: {}", allowed.join(", "));
                self.context
                    .complain(*line, &joined(&self.path, &shortened(name)), what);
            }
        }
        Some(Group {
            allowed,
            field: self.clone(),
        })
    }
}

/// Named fields of one place.
#[derive(Debug)]
pub(super) struct Group<'a> {
    allowed: &'static [&'static str],
    field: Field<'a>,
}

impl<'a> Group<'a> {
    /// The field, unless it is left out or null.
    ///
    /// # Panics
    /// When `name` is not among the allowed ones: the reader would refuse what it reads.
    pub(super) fn get(&self, name: &str) -> Option<Field<'a>> {
        assert!(
            self.allowed.contains(&name),
            "{name} is read but not allowed"
        );
        let found = self.field.peek(name)?;
        (!matches!(found.node.value, Value::Null)).then_some(found)
    }

    /// The field; complains when it is left out.
    pub(super) fn require(&self, name: &str) -> Option<Field<'a>> {
        let found = self.get(name);
        if found.is_none() {
            let path = joined(&self.field.path, name);
            self.field
                .context
                .complain(self.field.node.line, &path, "is required");
        }
        found
    }

    /// A whole number, `default` when left out; also after a complaint, which ends the load anyway.
    pub(super) fn whole(
        &self,
        name: &str,
        range: RangeInclusive<u64>,
        unit: &str,
        default: u64,
    ) -> u64 {
        self.get(name)
            .and_then(|field| field.whole(&range, unit))
            .unwrap_or(default)
    }

    pub(super) fn bytes(&self, name: &str, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.get(name)
            .and_then(|field| field.bytes(&range))
            .unwrap_or(default)
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> bool {
        self.get(name)
            .and_then(|field| field.flag())
            .unwrap_or(default)
    }

    /// Elements of a list; none when left out.
    pub(super) fn list(&self, name: &str) -> Vec<Field<'a>> {
        self.get(name).map(|field| field.list()).unwrap_or_default()
    }

    /// About the group as a whole.
    pub(super) const fn place(&self) -> &Field<'a> {
        &self.field
    }
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// `text` as a message may repeat it: short, on one line, no control characters.
pub(super) fn quote(text: &str) -> String {
    format!("{:?}", shortened(text))
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, unit) = UNITS
        .iter()
        .find_map(|&(name, unit)| Some((text.strip_suffix(name)?.trim_end(), unit)))
        .unwrap_or((text, 1));
    digits
        .replace('_', "")
        .parse::<u64>()
        .ok()?
        .checked_mul(unit)
}

/// Bytes in the largest unit that divides them.
pub(super) fn show_bytes(bytes: u64) -> String {
    UNITS
        .iter()
        .find(|&&(_, unit)| bytes >= unit && bytes.is_multiple_of(unit))
        .map_or_else(
            || format!("{bytes} bytes"),
            |(name, unit)| format!("{} {name}", bytes / unit),
        )
}
