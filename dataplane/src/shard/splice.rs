//! Finds the `model` of a request body as it arrives, so that its value alone can be replaced, or the
//! whole member cut out.
//!
//! Lives on: a shard. View: one request body, in slices. Bound: `JSON_DEPTH_MAX` levels at a bit each,
//! one name of `NAME_BYTES_MAX`; no heap.
//!
//! The body is never re-serialised: every byte but the `model` value reaches the provider as it came,
//! whatever number, escape, order or duplicate it holds. `[P-34]` In exchange the scan is strict: only
//! RFC 8259 in valid UTF-8 passes, since a body that two parsers could read differently could name one
//! model here and another one there. `[D-31]`
use iop_proto::limits::{JSON_DEPTH_MAX, NAME_BYTES_MAX};
use iop_proto::reason::Reason;

use crate::text::Writer;

/// Writes `text` as a JSON string, quotes included, into `out`; its length, or `None` when it does not
/// fit. `[D-31]`
#[must_use]
pub fn write_json_string(out: &mut [u8], text: &str) -> Option<usize> {
    let mut writer = Writer::new(out);
    writer.put_json_string(text).ok()?;
    Some(writer.written())
}

/// Where the `model` value stands in the body, and what it says; and what else an answer depends on.
/// Of several members of one name the last counts, as with most readers.
///
/// ```text
///  {"a":1 , "model" : "x","b":2}        {"model":"x", "b":2}
///         |           |  |               |       |  ||
///         member_start|  end, member_end |       |  |member_end
///                     start              |       |  end
///                                        |       start
///                                        member_start
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSpan {
    /// Bytes of the body before the value.
    pub start: u64,
    /// The first byte behind it; `start..end` holds both quotes.
    pub end: u64,
    /// `member_start..member_end` is the member with the comma before it, or that behind it if it is
    /// the first: without these bytes the body is the same object without a model. `[D-50]`
    pub member_start: u64,
    pub member_end: u64,
    /// The body's top-level `stream` is `true`.
    pub stream: bool,
    /// Its top-level `stream_options` is an object whose `include_usage` is `true`.
    pub include_usage: bool,
    /// Its top-level `tools` is an array.
    pub tools: bool,
    name: Name,
}

impl ModelSpan {
    /// The unescaped value, valid UTF-8; `None` when it is longer than any configured name.
    #[must_use]
    pub fn name(&self) -> Option<&[u8]> {
        self.name.bytes.get(..self.name.len)
    }
}

/// Unescaped value of `model`. `len` counts on beyond what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Name {
    bytes: [u8; NAME_BYTES_MAX as usize],
    len: usize,
}

impl Name {
    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.len) {
            *place = byte;
        }
        self.len += 1;
    }
}

/// What the scan expects next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The top-level object.
    Start,
    /// A value, after `:` or after `,` in an array.
    Value,
    /// A value or `]`.
    FirstElement,
    /// A key, after `,`.
    Key,
    /// A key or `}`.
    FirstKey,
    Colon,
    /// `,` or the end of the enclosing object or array.
    After,
    /// The rest of a string, and of an escape in it.
    Text,
    Escape,
    Unicode,
    /// A high surrogate was read in a string that is looked at: `\` and `u` must follow.
    LowBackslash,
    LowEscape,
    /// The rest of `true`, `false` or `null`, which stands in `literal`.
    Literal,
    Number(Digits),
    /// Only blanks may follow the top-level object.
    End,
}

/// How far a number has come; the grammar of RFC 8259 §6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    Power,
}

impl Digits {
    /// `None`: `byte` is not of the number.
    const fn then(self, byte: u8) -> Option<Self> {
        Some(match (self, byte) {
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus | Self::Integer, b'0'..=b'9') => Self::Integer,
            (Self::Zero | Self::Integer, b'.') => Self::Point,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Self::Exponent,
            (Self::Exponent, b'+' | b'-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::Power, b'0'..=b'9') => Self::Power,
            _ => return None,
        })
    }

    const fn may_end(self) -> bool {
        matches!(
            self,
            Self::Zero | Self::Integer | Self::Fraction | Self::Power
        )
    }
}

/// Why a string is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Only for where it ends.
    Opaque,
    /// A key below the top level.
    NestedKey,
    /// A key of the top-level object, compared while it is read.
    TopKey,
    /// A key of `stream_options`, compared likewise.
    OptionKey,
    Model,
}

/// A key that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    StreamOptions,
    Tools,
    /// Below `stream_options`.
    IncludeUsage,
    Other,
}

const MODEL: &[u8] = b"model";
const FIELDS: [(&[u8], Field); 5] = [
    (MODEL, Field::Model),
    (b"stream", Field::Stream),
    (b"stream_options", Field::StreamOptions),
    (b"tools", Field::Tools),
    (b"include_usage", Field::IncludeUsage),
];
/// No key that matters is so long.
const KEY_TOO_LONG: usize = 15;

/// Compares an unescaped key with the ones that matter, byte by byte.
#[derive(Clone, Copy, Debug)]
struct KeyMatch {
    len: usize,
    /// Which of `FIELDS` begin like it.
    alike: [bool; FIELDS.len()],
    /// `model` in any case: readers that ignore case (Go's encoding/json) would take it for the model.
    model_any_case: bool,
}

impl KeyMatch {
    const START: Self = Self {
        len: 0,
        alike: [true; FIELDS.len()],
        model_any_case: true,
    };

    fn push(&mut self, byte: u8) {
        let at = |text: &[u8]| text.get(self.len).copied();
        for (alike, (text, _)) in self.alike.iter_mut().zip(FIELDS) {
            *alike &= at(text) == Some(byte);
        }
        self.model_any_case &= at(MODEL) == Some(byte.to_ascii_lowercase());
        self.len = (self.len + 1).min(KEY_TOO_LONG);
    }

    /// It is none of them, whatever follows.
    fn spoil(&mut self) {
        self.len = KEY_TOO_LONG;
    }

    fn field(&self) -> Field {
        let same = self
            .alike
            .iter()
            .zip(FIELDS)
            .find(|(alike, (text, _))| **alike && text.len() == self.len);
        same.map_or(Field::Other, |(_, (_, field))| field)
    }
}

/// A resumable scan of one request body. Any split of the body gives the same result.
///
/// It is a few hundred bytes of plain data, `Copy`, and belongs to whoever collects the body.
#[derive(Clone, Copy, Debug)]
pub struct ModelScanner {
    state: State,
    role: Role,
    /// The last key of the top-level object.
    field: Field,
    /// The last key of `stream_options`, while that object is read.
    option: Option<Field>,
    key: KeyMatch,
    /// Bytes of the body before the slice in hand.
    offset: u64,
    depth: u32,
    /// Bit `d` tells whether level `d + 1` is an object.
    objects: [u64; JSON_DEPTH_MAX as usize / 64],
    literal: &'static [u8],
    /// Continuation bytes a character still needs, and the range the next one must be in.
    utf8_left: u8,
    utf8_next: (u8, u8),
    /// `\uXXXX`: digits still to come, value so far, and the high surrogate before it or 0.
    hex_left: u8,
    unit: u32,
    high: u32,
    /// Keys that name the model, in any case; the second refuses the body.
    models: u32,
    found: bool,
    /// Offsets of the last comma between members of the top-level object, and of the last key there.
    comma_at: Option<u64>,
    key_at: u64,
    span: ModelSpan,
    failed: Option<Reason>,
}

impl Default for ModelScanner {
    fn default() -> Self {
        Self::new()
    }
}

impl ModelScanner {
    #[must_use]
    pub const fn new() -> Self {
        let name = Name {
            bytes: [0; NAME_BYTES_MAX as usize],
            len: 0,
        };
        Self {
            state: State::Start,
            role: Role::Opaque,
            field: Field::Other,
            option: None,
            key: KeyMatch::START,
            offset: 0,
            depth: 0,
            objects: [0; JSON_DEPTH_MAX as usize / 64],
            literal: b"",
            utf8_left: 0,
            utf8_next: (0, 0),
            hex_left: 0,
            unit: 0,
            high: 0,
            models: 0,
            found: false,
            comma_at: None,
            key_at: 0,
            span: ModelSpan {
                start: 0,
                end: 0,
                member_start: 0,
                member_end: 0,
                stream: false,
                include_usage: false,
                tools: false,
                name,
            },
            failed: None,
        }
    }

    /// Reads the next slice of the body.
    ///
    /// # Errors
    /// The first reason to refuse the body, and the same one from then on: `JsonMalformed`,
    /// `ModelMissing` (not a string), `ModelDuplicate`. It may be ignored until the body is complete:
    /// `finish` repeats it.
    pub fn push(&mut self, slice: &[u8]) -> Result<(), Reason> {
        if let Some(reason) = self.failed {
            return Err(reason);
        }
        let result = self.scan(slice);
        self.failed = result.err();
        self.offset += slice.len() as u64;
        result
    }

    /// Judges the whole body.
    ///
    /// # Errors
    /// As `push`; `JsonMalformed` when the object is not complete, `ModelMissing` when it has no
    /// `model`.
    pub fn finish(&self) -> Result<ModelSpan, Reason> {
        match self.failed {
            Some(reason) => Err(reason),
            None if self.state != State::End => Err(Reason::JsonMalformed),
            None if !self.found => Err(Reason::ModelMissing),
            None => Ok(self.span),
        }
    }

    fn scan(&mut self, slice: &[u8]) -> Result<(), Reason> {
        let mut at = 0;
        while let Some(&byte) = slice.get(at) {
            match self.state {
                State::Text => {
                    at = self.text(slice, at)?;
                    continue;
                }
                State::Number(digits) => {
                    at = self.number(slice, at, digits)?;
                    continue;
                }
                State::Literal => self.literal(byte)?,
                State::Escape => self.escape(byte)?,
                State::Unicode => self.unicode(byte)?,
                State::LowBackslash => {
                    expect(byte == b'\\')?;
                    self.state = State::LowEscape;
                }
                State::LowEscape => {
                    expect(byte == b'u')?;
                    self.begin_unicode();
                }
                State::Start
                | State::Value
                | State::FirstElement
                | State::Key
                | State::FirstKey
                | State::Colon
                | State::After
                | State::End => {
                    let is_blank = |byte: &&u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
                    at += slice[at..].iter().take_while(is_blank).count();
                    let Some(&byte) = slice.get(at) else { break };
                    self.token(byte, self.offset + at as u64)?;
                }
            }
            at += 1;
        }
        Ok(())
    }

    /// A byte between values: punctuation, or the first byte of a value. `at`: its offset in the body.
    fn token(&mut self, byte: u8, at: u64) -> Result<(), Reason> {
        match (self.state, byte) {
            (State::Start, b'{') => self.open(true),
            (State::Value | State::FirstElement, _) if byte != b']' => self.value(byte, at),
            (State::FirstElement, b']') => self.close(false),
            (State::Key | State::FirstKey, b'"') => {
                self.begin_key(at);
                Ok(())
            }
            (State::FirstKey, b'}') => self.close(true),
            (State::Colon, b':') => {
                self.state = State::Value;
                Ok(())
            }
            (State::After, b',') => {
                if self.depth == 1 {
                    self.top_comma(at);
                }
                self.state = if self.in_object() {
                    State::Key
                } else {
                    State::Value
                };
                Ok(())
            }
            (State::After, b'}' | b']') => self.close(byte == b'}'),
            _ => Err(Reason::JsonMalformed),
        }
    }

    /// A comma between two members of the top-level object: it goes with a `model` that was the first.
    fn top_comma(&mut self, at: u64) {
        if self.comma_at.is_none() && self.field == Field::Model {
            self.span.member_end = at + 1;
        }
        self.comma_at = Some(at);
    }

    /// Whether the value that begins with `byte` is the model; notes what the others say.
    fn note(&mut self, byte: u8) -> bool {
        let is_true = byte == b't'; // anything else than `true` fails or is not true
        if self.depth == 2 && self.option.take() == Some(Field::IncludeUsage) {
            self.span.include_usage = is_true;
        }
        if self.depth != 1 {
            return false;
        }
        match self.field {
            Field::Model => return true,
            Field::Stream => self.span.stream = is_true,
            Field::StreamOptions => self.span.include_usage = false,
            Field::Tools => self.span.tools = byte == b'[',
            Field::IncludeUsage | Field::Other => {}
        }
        false
    }

    fn value(&mut self, byte: u8, at: u64) -> Result<(), Reason> {
        let is_model = self.note(byte);
        let starts = matches!(byte, b'{' | b'[' | b't' | b'f' | b'n' | b'-' | b'0'..=b'9');
        if is_model && starts {
            return Err(Reason::ModelMissing); // a value, but no string
        }
        self.state = match byte {
            b'{' => return self.open(true),
            b'[' => return self.open(false),
            b'"' => {
                self.begin_text(if is_model { Role::Model } else { Role::Opaque });
                if is_model {
                    self.span.start = at;
                }
                State::Text
            }
            b't' => self.begin_literal(b"rue"),
            b'f' => self.begin_literal(b"alse"),
            b'n' => self.begin_literal(b"ull"),
            b'-' => State::Number(Digits::Minus),
            b'0' => State::Number(Digits::Zero),
            b'1'..=b'9' => State::Number(Digits::Integer),
            _ => return Err(Reason::JsonMalformed),
        };
        Ok(())
    }

    fn open(&mut self, object: bool) -> Result<(), Reason> {
        expect(self.depth < JSON_DEPTH_MAX)?;
        let (word, bit) = (self.depth as usize / 64, self.depth % 64);
        self.objects[word] = self.objects[word] & !(1 << bit) | u64::from(object) << bit;
        self.depth += 1;
        self.state = if object {
            State::FirstKey
        } else {
            State::FirstElement
        };
        Ok(())
    }

    fn close(&mut self, object: bool) -> Result<(), Reason> {
        expect(self.in_object() == object)?;
        self.depth -= 1;
        self.state = if self.depth == 0 {
            State::End
        } else {
            State::After
        };
        Ok(())
    }

    /// The innermost level is an object. Asked only within the top-level one.
    fn in_object(&self) -> bool {
        let level = self.depth - 1;
        self.objects[level as usize / 64] >> (level % 64) & 1 == 1
    }

    /// Reads the number up to the byte behind it, which belongs to what follows, or to the end of the
    /// slice; where it stopped.
    fn number(&mut self, slice: &[u8], mut at: usize, mut digits: Digits) -> Result<usize, Reason> {
        while let Some(&byte) = slice.get(at) {
            let Some(next) = digits.then(byte) else {
                expect(digits.may_end())?;
                self.state = State::After;
                return Ok(at);
            };
            digits = next;
            at += 1;
        }
        self.state = State::Number(digits);
        Ok(at)
    }

    fn begin_literal(&mut self, rest: &'static [u8]) -> State {
        self.literal = rest;
        State::Literal
    }

    fn literal(&mut self, byte: u8) -> Result<(), Reason> {
        let (&first, rest) = self
            .literal
            .split_first()
            .expect("a literal has bytes left");
        expect(byte == first)?;
        self.literal = rest;
        if rest.is_empty() {
            self.state = State::After;
        }
        Ok(())
    }

    // ── strings ─────────────────────────────────────────────────────────────────────────────────

    /// A key begins with the quote at `at`.
    fn begin_key(&mut self, at: u64) {
        let in_options = self.depth == 2 && self.field == Field::StreamOptions;
        let role = match self.depth {
            1 => {
                self.key_at = at;
                Role::TopKey
            }
            // An array there is closed by now, or its objects are a level further down.
            _ if in_options => Role::OptionKey,
            _ => Role::NestedKey,
        };
        self.begin_text(role);
    }

    fn begin_text(&mut self, role: Role) {
        self.state = State::Text;
        self.role = role;
        self.key = KeyMatch::START;
        self.high = 0;
    }

    /// Reads string bytes from `at` up to an escape, the closing quote or the end of the slice; where it
    /// stopped.
    fn text(&mut self, slice: &[u8], mut at: usize) -> Result<usize, Reason> {
        let passes_through = matches!(self.role, Role::Opaque | Role::NestedKey);
        while let Some(&byte) = slice.get(at) {
            match byte {
                _ if self.utf8_left > 0 => self.continuation(byte)?,
                b'"' => {
                    self.end_text(self.offset + at as u64 + 1)?;
                    return Ok(at + 1);
                }
                b'\\' => {
                    self.state = State::Escape;
                    return Ok(at + 1);
                }
                ..0x20 => return Err(Reason::JsonMalformed),
                _ if passes_through => match plain_len(&slice[at..]) {
                    0 => self.lead(byte)?, // a rarer character, or one that the slice cuts
                    len => {
                        at += len;
                        continue;
                    }
                },
                0x80.. => self.lead(byte)?,
                _ => {}
            }
            self.take(byte);
            at += 1;
        }
        Ok(at)
    }

    /// One unescaped byte of a string that is looked at.
    fn take(&mut self, byte: u8) {
        match self.role {
            Role::Opaque | Role::NestedKey => {}
            Role::TopKey | Role::OptionKey => self.key.push(byte),
            Role::Model => self.span.name.push(byte),
        }
    }

    /// First byte of a multi-byte character, by the table of RFC 3629 §4.
    fn lead(&mut self, byte: u8) -> Result<(), Reason> {
        (self.utf8_left, self.utf8_next) = match byte {
            0xc2..=0xdf => (1, (0x80, 0xbf)),
            0xe0 => (2, (0xa0, 0xbf)),
            0xed => (2, (0x80, 0x9f)),
            0xe1..=0xef => (2, (0x80, 0xbf)),
            0xf0 => (3, (0x90, 0xbf)),
            0xf1..=0xf3 => (3, (0x80, 0xbf)),
            0xf4 => (3, (0x80, 0x8f)),
            _ => return Err(Reason::JsonMalformed),
        };
        Ok(())
    }

    fn continuation(&mut self, byte: u8) -> Result<(), Reason> {
        let (low, high) = self.utf8_next;
        expect(low <= byte && byte <= high)?;
        self.utf8_left -= 1;
        self.utf8_next = (0x80, 0xbf);
        Ok(())
    }

    fn escape(&mut self, byte: u8) -> Result<(), Reason> {
        self.state = State::Text;
        self.take(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                self.begin_unicode();
                return Ok(());
            }
            _ => return Err(Reason::JsonMalformed),
        });
        Ok(())
    }

    fn begin_unicode(&mut self) {
        self.state = State::Unicode;
        self.hex_left = 4;
        self.unit = 0;
    }

    fn unicode(&mut self, byte: u8) -> Result<(), Reason> {
        let digit = char::from(byte).to_digit(16).ok_or(Reason::JsonMalformed)?;
        self.unit = self.unit << 4 | digit;
        self.hex_left -= 1;
        if self.hex_left == 0 {
            self.state = State::Text;
            match self.role {
                Role::TopKey | Role::Model => return self.code_unit(),
                Role::OptionKey => self.key.spoil(), // spelled plainly or not at all
                Role::Opaque | Role::NestedKey => {}
            }
        }
        Ok(())
    }

    /// Takes one `\uXXXX` of a string that is looked at. A surrogate without its other half is refused
    /// there, since it has no one meaning; in strings that only pass through it is left alone.
    fn code_unit(&mut self) -> Result<(), Reason> {
        let character = match (self.high, self.unit) {
            (0, high @ 0xd800..=0xdbff) => {
                self.high = high;
                self.state = State::LowBackslash;
                return Ok(());
            }
            (0, unit) => char::from_u32(unit),
            (high, low @ 0xdc00..=0xdfff) => {
                char::from_u32(0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00))
            }
            (_, _) => None,
        };
        self.high = 0;
        let character = character.ok_or(Reason::JsonMalformed)?;
        for &byte in character.encode_utf8(&mut [0; 4]).as_bytes() {
            self.take(byte);
        }
        Ok(())
    }

    /// `end`: offset behind the closing quote.
    fn end_text(&mut self, end: u64) -> Result<(), Reason> {
        self.state = match self.role {
            Role::Opaque => State::After,
            Role::NestedKey => State::Colon,
            Role::TopKey => {
                self.end_key()?;
                State::Colon
            }
            Role::OptionKey => {
                self.option = Some(self.key.field());
                State::Colon
            }
            Role::Model => {
                self.span.end = end;
                self.span.member_start = self.comma_at.unwrap_or(self.key_at);
                self.span.member_end = end;
                self.found = true;
                State::After
            }
        };
        Ok(())
    }

    fn end_key(&mut self) -> Result<(), Reason> {
        let key = self.key;
        self.models += u32::from(key.model_any_case && key.len == MODEL.len());
        self.field = key.field();
        if self.models > 1 {
            Err(Reason::ModelDuplicate)
        } else {
            Ok(())
        }
    }
}

fn expect(holds: bool) -> Result<(), Reason> {
    if holds {
        Ok(())
    } else {
        Err(Reason::JsonMalformed)
    }
}

/// Leading bytes that only pass through a string: all but quotes, backslashes, control characters and
/// the rarer or unfinished multi-byte characters, which the caller looks at one by one.
fn plain_len(text: &[u8]) -> usize {
    let mut len = 0;
    loop {
        len += match &text[len..] {
            // Two- and three-byte characters whose second byte may be any continuation byte.
            [0xc2..=0xdf, 0x80..=0xbf, ..] => 2,
            [0xe1..=0xec | 0xee | 0xef, 0x80..=0xbf, 0x80..=0xbf, ..] => 3,
            rest @ [..0x80, ..] => {
                let ascii = ascii_len(rest);
                if matches!(rest.get(ascii), None | Some(..0x80)) {
                    return len + ascii;
                }
                ascii
            }
            _ => return len,
        };
    }
}

/// Leading bytes that are ASCII without quote, backslash or control character, eight at a time.
fn ascii_len(text: &[u8]) -> usize {
    const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH: u64 = LOW * 0x80;
    let mut len = 0;
    for word in text.as_chunks::<8>().0 {
        let word = u64::from_le_bytes(*word);
        // The high bit of a byte: set if it is special, and wrongly only above one that is.
        let special = (word.wrapping_sub(LOW * 0x20)
            | (word ^ (LOW * u64::from(b'"'))).wrapping_sub(LOW)
            | (word ^ (LOW * u64::from(b'\\'))).wrapping_sub(LOW)
            | word)
            & HIGH;
        if special != 0 {
            return len + special.trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    let is_plain = |&byte: &u8| matches!(byte, 0x20..=0x7f) && byte != b'"' && byte != b'\\';
    len + text[len..].iter().take_while(|byte| is_plain(byte)).count()
}
