//! HOT. Reads protobuf fields off a slice, with the verdicts of the generated decoder.
//!
//! Lives on: any thread. View: the bytes of one message. Bound: `DEPTH_MAX` nested groups and messages.
use core::fmt;

use super::key::{FIXED32, FIXED64, GROUP, GROUP_END, LEN, VARINT, entry, failure, usage};
use crate::domain::Usage;
use crate::reason::Reason;

/// Nesting the generated decoder allows, counted from the message itself.
pub(crate) const DEPTH_MAX: u32 = 100;

/// Why bytes are not the message they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewError {
    /// The bytes end inside a field.
    Truncated,
    /// A varint of more than ten bytes or 64 bits.
    Varint,
    /// Field number 0, or a key of more than 32 bits.
    Key,
    /// A declared field under a wire type that is not its own, or a wire type that does not exist.
    WireType { field: u32 },
    /// A group ends that did not begin.
    GroupEnd { field: u32 },
    /// More nesting than the generated decoder allows.
    TooDeep,
    /// A string that is not UTF-8. `[D-51]`
    Utf8 { field: u32 },
    /// A field that must not come again after cut-through has begun. `[D-02]`
    Repeated { field: u32 },
    /// A length that points past the envelope that holds it.
    Length { field: u32 },
}

impl ViewError {
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::Truncated
            | Self::Varint
            | Self::Key
            | Self::WireType { .. }
            | Self::GroupEnd { .. }
            | Self::TooDeep
            | Self::Utf8 { .. }
            | Self::Repeated { .. }
            | Self::Length { .. } => Reason::EnvelopeMalformed,
        }
    }
}

impl fmt::Display for ViewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("the bytes end inside a field"),
            Self::Varint => f.write_str("a varint is longer than 64 bits"),
            Self::Key => f.write_str("a field key is out of range"),
            Self::WireType { field } => write!(f, "field {field} has a wrong wire type"),
            Self::GroupEnd { field } => write!(f, "group {field} ends but did not begin"),
            Self::TooDeep => f.write_str("nested too deeply"),
            Self::Utf8 { field } => write!(f, "field {field} is not UTF-8"),
            Self::Repeated { field } => {
                write!(f, "field {field} came again after its value was used")
            }
            Self::Length { field } => write!(f, "field {field} is longer than what holds it"),
        }
    }
}

impl core::error::Error for ViewError {}

/// What is left to read of one message.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline]
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[inline]
    pub(crate) const fn is_done(&self) -> bool {
        self.rest.is_empty()
    }

    #[inline]
    pub(crate) fn varint(&mut self) -> Result<u64, ViewError> {
        match *self.rest {
            [a, ref rest @ ..] if a < 0x80 => {
                self.rest = rest;
                Ok(u64::from(a))
            }
            [a, b, ref rest @ ..] if b < 0x80 => {
                self.rest = rest;
                Ok(u64::from(a & 0x7f) | u64::from(b) << 7)
            }
            _ => self.varint_long(),
        }
    }

    #[inline(never)]
    fn varint_long(&mut self) -> Result<u64, ViewError> {
        let mut value = 0;
        for (at, &byte) in self.rest.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte < 0x80 {
                if at == 9 && byte > 1 {
                    return Err(ViewError::Varint); // the 65th bit
                }
                self.rest = &self.rest[at + 1..];
                return Ok(value);
            }
        }
        Err(if self.rest.len() < 10 {
            ViewError::Truncated
        } else {
            ViewError::Varint
        })
    }

    /// The next field's key.
    #[inline]
    pub(crate) fn key(&mut self) -> Result<u32, ViewError> {
        match u32::try_from(self.varint()?) {
            Ok(key) if key >= 8 => Ok(key),
            _ => Err(ViewError::Key),
        }
    }

    /// A length and that many bytes.
    #[inline]
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], ViewError> {
        let length = usize::try_from(self.varint()?).map_err(|_| ViewError::Truncated)?;
        let (head, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or(ViewError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    /// A length and that many bytes of UTF-8. `key` names the field in the error.
    #[inline]
    pub(crate) fn text(&mut self, key: u32) -> Result<&'a [u8], ViewError> {
        let bytes = self.bytes()?;
        // `is_ascii` is vectorised, `from_utf8` is not.
        if bytes.is_ascii() || core::str::from_utf8(bytes).is_ok() {
            Ok(bytes)
        } else {
            Err(ViewError::Utf8 { field: key >> 3 })
        }
    }

    /// Passes over the value of a field that the message does not use; `known` as in [`super::key`].
    #[cold]
    pub(crate) fn unknown(&mut self, key: u32, known: u32, depth: u32) -> Result<(), ViewError> {
        let field = key >> 3;
        if field < 32 && known >> field & 1 == 1 {
            return Err(ViewError::WireType { field });
        }
        self.skip(key, depth)
    }

    /// Passes over one value. `depth`: levels that are left, this one included.
    pub(crate) fn skip(&mut self, key: u32, depth: u32) -> Result<(), ViewError> {
        if depth == 0 {
            return Err(ViewError::TooDeep);
        }
        let field = key >> 3;
        let fixed = match key & 7 {
            VARINT => self.varint().map(|_| 0)?,
            FIXED64 => 8,
            LEN => self.bytes().map(|_| 0)?,
            GROUP => loop {
                let inner = self.key()?;
                if inner & 7 == GROUP_END {
                    if inner >> 3 != field {
                        return Err(ViewError::GroupEnd { field: inner >> 3 });
                    }
                    break 0;
                }
                self.skip(inner, depth - 1)?;
            },
            GROUP_END => return Err(ViewError::GroupEnd { field }),
            FIXED32 => 4,
            _ => return Err(ViewError::WireType { field }),
        };
        self.rest = self.rest.get(fixed..).ok_or(ViewError::Truncated)?;
        Ok(())
    }
}

/// Shows bytes that should be text, escaped.
pub(crate) struct Ascii<'a>(pub(crate) &'a [u8]);

impl fmt::Debug for Ascii<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.escape_ascii(), f)
    }
}

/// Low 32 bits, which is what an int32 or enum keeps of a longer varint.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the wire format asks for the low 32 bits"
)]
pub(crate) const fn low32(value: u64) -> u32 {
    value as u32
}

/// What an entry's value may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    Bytes,
    Text,
}

/// Reads one entry message: key and value, each the last one given.
pub(crate) fn read_entry(
    bytes: &[u8],
    value: Value,
    depth: u32,
) -> Result<(&[u8], &[u8]), ViewError> {
    let mut reader = Reader::new(bytes);
    let (mut name, mut content): (&[u8], &[u8]) = (&[], &[]);
    while !reader.is_done() {
        match reader.key()? {
            entry::KEY => name = reader.text(entry::KEY)?,
            entry::VALUE if value == Value::Text => content = reader.text(entry::VALUE)?,
            entry::VALUE => content = reader.bytes()?,
            other => reader.unknown(other, entry::KNOWN, depth)?,
        }
    }
    Ok((name, content))
}

/// Merges one usage message into `into`: a later occurrence overwrites field by field.
#[cold]
pub(crate) fn read_usage(bytes: &[u8], into: &mut Usage, depth: u32) -> Result<(), ViewError> {
    let mut reader = Reader::new(bytes);
    while !reader.is_done() {
        match reader.key()? {
            usage::PROMPT => into.prompt_tokens = reader.varint()?.cast_signed(),
            usage::COMPLETION => into.completion_tokens = reader.varint()?.cast_signed(),
            usage::TOTAL => into.total_tokens = reader.varint()?.cast_signed(),
            other => reader.unknown(other, usage::KNOWN, depth)?,
        }
    }
    Ok(())
}

/// Checks one failure message; its content is read by the mapping module.
#[cold]
pub(crate) fn check_failure(bytes: &[u8], depth: u32) -> Result<(), ViewError> {
    let mut reader = Reader::new(bytes);
    while !reader.is_done() {
        match reader.key()? {
            failure::CODE => drop(reader.text(failure::CODE)?),
            failure::METADATA => drop(read_entry(reader.bytes()?, Value::Text, depth - 1)?),
            other => reader.unknown(other, failure::KNOWN, depth)?,
        }
    }
    Ok(())
}

/// Headers or metadata left where they lie. Other fields may stand between the entries.
///
/// The entries were checked when their message was parsed.
#[derive(Clone, Copy, Default)]
pub struct Entries<'a> {
    /// From the first entry's key to the end of the last one.
    span: &'a [u8],
    key: u32,
    count: u32,
    start: usize,
}

impl<'a> Entries<'a> {
    /// Adds the entry that `rest_before` began with; `all` is the whole message.
    #[inline(never)]
    pub(crate) fn add(&mut self, key: u32, all: &'a [u8], rest_before: usize, rest_after: usize) {
        if self.count == 0 {
            self.start = all.len() - rest_before;
        }
        self.key = key;
        self.count += 1;
        self.span = &all[self.start..all.len() - rest_after];
    }

    /// Entries on the wire, repeated keys included.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count as usize
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Key and value of each entry in wire order.
    #[must_use]
    pub const fn iter(&self) -> EntryIter<'a> {
        EntryIter {
            reader: Reader::new(self.span),
            key: self.key,
        }
    }

    /// The map's value of `name`: the last entry wins.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&'a [u8]> {
        self.iter()
            .filter(|entry| entry.0 == name)
            .last()
            .map(|entry| entry.1)
    }
}

impl fmt::Debug for Entries<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} entries>", self.count)
    }
}

impl<'a> IntoIterator for Entries<'a> {
    type Item = (&'a [u8], &'a [u8]);
    type IntoIter = EntryIter<'a>;

    fn into_iter(self) -> EntryIter<'a> {
        self.iter()
    }
}

/// See [`Entries::iter`].
#[derive(Clone)]
pub struct EntryIter<'a> {
    reader: Reader<'a>,
    key: u32,
}

impl fmt::Debug for EntryIter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<entries in {} bytes>", self.reader.rest.len())
    }
}

impl<'a> Iterator for EntryIter<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        while !self.reader.is_done() {
            let key = self.reader.key().ok()?;
            if key == self.key {
                return read_entry(self.reader.bytes().ok()?, Value::Bytes, DEPTH_MAX).ok();
            }
            self.reader.skip(key, DEPTH_MAX).ok()?;
        }
        None
    }
}
