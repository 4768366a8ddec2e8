//! Response heads: how a provider's answer is framed for its client, and the answers we make ourselves.
//!
//! Lives on: a shard. View: one exchange. Bound: the slice a head is written into; `HEADERS_MAX` fields.
use iop_proto::limits::{CONNECTION_OPTIONS_MAX, HEADERS_MAX};
use iop_proto::reason::{Reason, Source};

use super::head::decimal;
use super::{Allow, HOP_FIELDS, Version, is_one_of, is_token, is_value_byte, members, trimmed};
use crate::text::{NoRoom, Writer};

/// The interim answer to `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What an answer has to know of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// HEAD: the answer ends after its head.
    pub head_only: bool,
    pub version: Version,
    /// The connection may stay after the answer. Cleared by whoever means to close it.
    pub keep_alive: bool,
}

impl Asked {
    /// For a request whose head could not be parsed: answer and close.
    pub const UNREADABLE: Self = Self {
        head_only: false,
        version: Version::Http11,
        keep_alive: false,
    };
}

/// How the body of an answer ends. `[D-28]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFraming {
    /// The provider's Content-Length, bytes; enforced.
    Length(u64),
    Chunked,
    /// HTTP/1.0 without a length: the connection closes after it.
    UntilClose,
    /// HEAD, 204, 304.
    NoBody,
}

/// How a provider's answer goes to its client; made once, when its head arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponsePlan {
    /// 200 to 999.
    pub status: u16,
    pub framing: ResponseFraming,
    /// The connection stays after the answer.
    pub keep_alive: bool,
    /// An event stream in plain text and without a length: a failure can be told in band. `[D-10]`
    pub event_stream: bool,
    version: Version,
    /// Content-Length to announce, which an answer without body may have too.
    length: Option<u64>,
    lists_fields: bool,
}

impl ResponsePlan {
    /// Counts the body against the framing.
    #[must_use]
    pub const fn meter(&self) -> BodyMeter {
        match self.framing {
            ResponseFraming::Length(left) => BodyMeter::Length(left),
            ResponseFraming::Chunked | ResponseFraming::UntilClose => BodyMeter::Open,
            ResponseFraming::NoBody => BodyMeter::Nothing,
        }
    }
}

/// Holds a provider to the length it announced. `[D-28]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMeter {
    /// Bytes still to come.
    Length(u64),
    Open,
    /// No body is sent, whatever arrives.
    Nothing,
}

impl BodyMeter {
    /// Takes `bytes` more of body; `false`: they are not for the client, drop them.
    ///
    /// # Errors
    /// `LengthMismatch` when they exceed the announced length: forward none of them and abort.
    pub fn take(&mut self, bytes: usize) -> Result<bool, Reason> {
        match self {
            Self::Length(left) => {
                *left = left
                    .checked_sub(bytes as u64)
                    .ok_or(Reason::LengthMismatch)?;
                Ok(true)
            }
            Self::Open => Ok(true),
            Self::Nothing => Ok(false),
        }
    }

    /// Judges the end of the body.
    ///
    /// # Errors
    /// `LengthMismatch` when bytes are missing: abort, a clean end would hide it.
    pub const fn finish(self) -> Result<(), Reason> {
        match self {
            Self::Length(1..) => Err(Reason::LengthMismatch),
            Self::Length(0) | Self::Open | Self::Nothing => Ok(()),
        }
    }
}

/// Decides how a provider's answer is framed. `headers`: name and value, as the node sent them.
///
/// A Content-Length beside a Transfer-Encoding says nothing about the body the agent decoded, and is
/// ignored (RFC 9112 §6.3). `[P-53]`
///
/// # Errors
/// `ResponseMalformed`: a status that ends no exchange (1xx) or is none, Content-Lengths that are no
/// numbers or differ, more than `HEADERS_MAX` fields or `CONNECTION_OPTIONS_MAX` options.
pub fn plan_response<'a>(
    asked: Asked,
    status: u16,
    headers: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> Result<ResponsePlan, Reason> {
    let seen = Seen::gather(headers)?;
    let length = if seen.coded { None } else { seen.length };
    let framing = match (status, length) {
        (0..200 | 1000.., _) => return Err(Reason::ResponseMalformed),
        (204 | 304, _) => ResponseFraming::NoBody,
        _ if asked.head_only => ResponseFraming::NoBody,
        (_, Some(length)) => ResponseFraming::Length(length),
        (_, None) if asked.version == Version::Http10 => ResponseFraming::UntilClose,
        (_, None) => ResponseFraming::Chunked,
    };
    Ok(ResponsePlan {
        status,
        framing,
        keep_alive: asked.keep_alive && framing != ResponseFraming::UntilClose,
        event_stream: seen.event_stream
            && !seen.encoded
            && matches!(
                framing,
                ResponseFraming::Chunked | ResponseFraming::UntilClose
            ),
        version: asked.version,
        length: length.filter(|_| status != 204), // RFC 9110 §8.6
        lists_fields: seen.lists_fields,
    })
}

/// What frames and types a provider's answer.
#[derive(Debug, Default)]
struct Seen {
    length: Option<u64>,
    coded: bool,
    encoded: bool,
    event_stream: bool,
    lists_fields: bool,
}

impl Seen {
    fn gather<'a>(headers: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Result<Self, Reason> {
        let (mut seen, mut fields, mut options) = (Self::default(), 0, 0);
        for (name, value) in headers {
            fields += 1;
            let is = |field: &[u8]| name.eq_ignore_ascii_case(field);
            match name.len() {
                10 if is(b"connection") => {
                    for option in members(value) {
                        options += 1;
                        seen.lists_fields |= !option.eq_ignore_ascii_case(b"close")
                            && !option.eq_ignore_ascii_case(b"keep-alive");
                    }
                }
                12 if is(b"content-type") => {
                    let media = value.split(|&byte| byte == b';').next().map(trimmed);
                    seen.event_stream =
                        media.is_some_and(|m| m.eq_ignore_ascii_case(b"text/event-stream"));
                }
                14 if is(b"content-length") => seen.add_lengths(value)?,
                16 if is(b"content-encoding") => {
                    seen.encoded |= !trimmed(value).eq_ignore_ascii_case(b"identity");
                }
                17 if is(b"transfer-encoding") => seen.coded = true,
                _ => {}
            }
        }
        (fields <= HEADERS_MAX && options <= CONNECTION_OPTIONS_MAX)
            .then_some(seen)
            .ok_or(Reason::ResponseMalformed)
    }

    /// Equal repetitions count once, as RFC 9112 §6.3 lets a recipient of a response do.
    fn add_lengths(&mut self, value: &[u8]) -> Result<(), Reason> {
        for member in members(value) {
            let length = decimal(member).ok_or(Reason::ResponseMalformed)?;
            if self.length.is_some_and(|known| known != length) {
                return Err(Reason::ResponseMalformed);
            }
            self.length = Some(length);
        }
        Ok(())
    }
}

/// A head as it went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadWritten {
    /// Bytes written.
    pub len: usize,
    /// Fields left out because no HTTP message may hold them: to be counted.
    pub dropped: u32,
}

/// Fields of an answer that only we may set.
const OWN_FIELDS: [&str; 2] = ["x-request-id", "x-iop-error-source"];

/// Writes the head of a provider's answer: its fields in order, duplicates too, without those of its
/// hop and those its Connection lists; then our framing, `connection` and `x-request-id`. A name or
/// value that would split the head is dropped and counted. `[D-13]` `[D-26]` `[P-53]`
///
/// `headers`: the same as `plan_response` saw.
///
/// # Errors
/// `ResponseMalformed` when the head does not fit `out`; what was written must not be sent.
pub fn write_response_head<'a>(
    out: &mut [u8],
    plan: &ResponsePlan,
    headers: impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone,
    request_id: &[u8],
) -> Result<HeadWritten, Reason> {
    let mut text = Writer::new(out);
    let dropped = put_response_head(&mut text, plan, headers, request_id)
        .map_err(|NoRoom| Reason::ResponseMalformed)?;
    Ok(HeadWritten {
        len: text.written(),
        dropped,
    })
}

fn put_response_head<'a>(
    text: &mut Writer<'_>,
    plan: &ResponsePlan,
    headers: impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone,
    request_id: &[u8],
) -> Result<u32, NoRoom> {
    let mut dropped = 0;
    put_status_line(text, plan.status)?;
    for (name, value) in headers.clone() {
        if !is_token(name) || !value.iter().all(|&byte| is_value_byte(byte)) {
            dropped += 1;
            continue;
        }
        let is_ours = is_one_of(name, &HOP_FIELDS) || is_one_of(name, &OWN_FIELDS);
        if is_ours || (plan.lists_fields && is_listed(headers.clone(), name)) {
            continue;
        }
        put_field(text, name, value)?;
    }
    if let Some(length) = plan.length {
        put_number(text, b"content-length", length)?;
    }
    if plan.framing == ResponseFraming::Chunked {
        put_field(text, b"transfer-encoding", b"chunked")?;
    }
    put_end(text, plan.keep_alive, plan.version, request_id)?;
    Ok(dropped)
}

fn is_listed<'a>(mut headers: impl Iterator<Item = (&'a [u8], &'a [u8])>, name: &[u8]) -> bool {
    headers.any(|(field, value)| {
        field.eq_ignore_ascii_case(b"connection")
            && members(value).any(|option| option.eq_ignore_ascii_case(name))
    })
}

/// An answer the Edge makes itself.
#[derive(Clone, Copy, Debug)]
pub struct SimpleResponse<'a> {
    pub asked: Asked,
    pub status: u16,
    /// Media type of the body; empty: no such field.
    pub content_type: &'a str,
    pub request_id: &'a [u8],
    /// Of an error. `[D-11]`
    pub source: Option<Source>,
    /// Seconds; 0: no such field.
    pub retry_after_s: u16,
    /// For 405 and OPTIONS.
    pub allow: Option<Allow>,
}

/// Writes the head of an answer of ours whose body has `length` bytes; returns the head's length. A 401
/// says `www-authenticate: Bearer`. Nothing of a body follows a HEAD request or status 204.
///
/// # Errors
/// `NoRoom` when `out` is too short.
pub fn write_simple_head(
    out: &mut [u8],
    answer: &SimpleResponse<'_>,
    length: u64,
) -> Result<usize, NoRoom> {
    let mut text = Writer::new(out);
    put_status_line(&mut text, answer.status)?;
    if !answer.content_type.is_empty() {
        put_field(&mut text, b"content-type", answer.content_type.as_bytes())?;
    }
    if answer.status != 204 {
        put_number(&mut text, b"content-length", length)?;
    }
    if answer.status == 401 {
        put_field(&mut text, b"www-authenticate", b"Bearer")?;
    }
    if let Some(allow) = answer.allow {
        put_field(&mut text, b"allow", allow.text().as_bytes())?;
    }
    if answer.retry_after_s > 0 {
        put_number(&mut text, b"retry-after", u64::from(answer.retry_after_s))?;
    }
    if let Some(source) = answer.source {
        let source: &[u8] = match source {
            Source::Edge => b"edge",
            Source::Node => b"node",
            Source::Provider => b"provider",
        };
        put_field(&mut text, b"x-iop-error-source", source)?;
    }
    put_end(
        &mut text,
        answer.asked.keep_alive,
        answer.asked.version,
        answer.request_id,
    )?;
    Ok(text.written())
}

/// Writes a whole answer of ours; returns its length.
///
/// # Errors
/// `NoRoom` when `out` is too short.
pub fn write_simple_response(
    out: &mut [u8],
    answer: &SimpleResponse<'_>,
    body: &[u8],
) -> Result<usize, NoRoom> {
    let head = write_simple_head(out, answer, body.len() as u64)?;
    if answer.asked.head_only || answer.status == 204 {
        return Ok(head);
    }
    let mut text = Writer::new(&mut out[head..]);
    text.put(body)?;
    Ok(head + text.written())
}

fn put_status_line(text: &mut Writer<'_>, status: u16) -> Result<(), NoRoom> {
    text.put(b"HTTP/1.1 ")?;
    text.put_decimal(u64::from(status))?;
    text.put(b" ")?;
    text.put(phrase(status).as_bytes())?;
    text.put(b"\r\n")
}

fn put_field(text: &mut Writer<'_>, name: &[u8], value: &[u8]) -> Result<(), NoRoom> {
    for part in [name, b": ", value, b"\r\n"] {
        text.put(part)?;
    }
    Ok(())
}

fn put_number(text: &mut Writer<'_>, name: &[u8], value: u64) -> Result<(), NoRoom> {
    text.put(name)?;
    text.put(b": ")?;
    text.put_decimal(value)?;
    text.put(b"\r\n")
}

/// The last fields of every head, and its empty line.
fn put_end(
    text: &mut Writer<'_>,
    keep_alive: bool,
    version: Version,
    request_id: &[u8],
) -> Result<(), NoRoom> {
    match (keep_alive, version) {
        (true, Version::Http11) => {}
        (true, Version::Http10) => put_field(text, b"connection", b"keep-alive")?,
        (false, _) => put_field(text, b"connection", b"close")?,
    }
    put_field(text, b"x-request-id", request_id)?;
    text.put(b"\r\n")
}

/// Reason phrase; empty for a status without one, which RFC 9112 §4 permits.
const fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        203 => "Non-Authoritative Information",
        204 => "No Content",
        205 => "Reset Content",
        206 => "Partial Content",
        300 => "Multiple Choices",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        402 => "Payment Required",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        411 => "Length Required",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        425 => "Too Early",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}
