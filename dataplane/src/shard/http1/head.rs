//! Request heads: found, judged once, and named by spans of the buffer they lie in.
//!
//! Lives on: a shard. View: one connection's unread bytes. Bound: `HEAD_BYTES_MAX`, `HEADERS_MAX`,
//! `CONNECTION_OPTIONS_MAX`.
//!
//! `httparse` judges the field lines (names are tokens, values hold no control character, no folding);
//! what it tolerates beside that, and everything that frames the body, is judged here.
use core::ops::Range;

use iop_proto::catalog::Operation;
use iop_proto::limits::{
    CONNECTION_OPTIONS_MAX, HEAD_BYTES_MAX, HEADERS_MAX, REQUEST_ID_BYTES_MAX,
    REQUEST_LINE_BYTES_MAX,
};
use iop_proto::reason::Reason;
use zeroize::Zeroize;

use super::{Asked, HOP_FIELDS, is_one_of, is_token, members, trimmed};
use crate::surface::{self, Surface};

/// A piece of the head: byte offsets from the start of the buffer that was parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: u16,
    end: u16,
}

impl Span {
    /// A head's offsets fit, as `limits` asserts.
    fn new(start: usize, end: usize) -> Self {
        let offset = |at: usize| u16::try_from(at).expect("an offset within HEAD_BYTES_MAX");
        Self {
            start: offset(start),
            end: offset(end),
        }
    }

    #[must_use]
    pub fn range(self) -> Range<usize> {
        usize::from(self.start)..usize::from(self.end)
    }

    /// The bytes it names in `bytes`, the buffer the head was parsed from.
    ///
    /// # Panics
    /// When `bytes` is shorter than that buffer's head.
    #[must_use]
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        &bytes[self.range()]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
    Options,
    /// Any other token: allowed on no path.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    Http10,
    Http11,
}

/// How the body of a request ends (RFC 9112 §6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    None,
    /// Content-Length, bytes.
    Length(u64),
    Chunked,
}

/// Methods of a known path, as an `Allow` field lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allow {
    Get,
    Post,
}

impl Allow {
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Get => "GET, HEAD, OPTIONS",
            Self::Post => "POST, OPTIONS",
        }
    }

    const fn permits(self, method: Method) -> bool {
        match self {
            Self::Get => matches!(method, Method::Get | Method::Head),
            Self::Post => matches!(method, Method::Post),
        }
    }
}

/// What the request asks for. `[D-09]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`: the id as it stands in the path, still percent-encoded.
    Model(Span),
    Operation(Operation),
    Healthz,
    Readyz,
    /// OPTIONS on a known path: answered 204 before authentication, never dispatched. `[P-56]`
    Options(Allow),
    /// A known path under a method it does not have: 405.
    MethodNotAllowed(Allow),
    /// 404.
    Unknown,
}

/// A request head that may be acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the buffer that belong to the head, its last CR LF included.
    pub consumed: usize,
    pub method: Method,
    pub route: Route,
    /// In what shape its client reads errors.
    pub surface: Surface,
    /// The target's query without its `?`.
    pub query: Option<Span>,
    pub version: Version,
    /// The client expects the connection to stay after this exchange.
    pub keep_alive: bool,
    pub body: BodyFraming,
    /// The client waits for `100 Continue` before it sends its body.
    pub expect_continue: bool,
    /// The API key: bearer token, else `x-api-key`, else `api-key`. Never empty.
    pub credential: Option<Span>,
    /// A well-formed `x-request-id`. `[D-26]`
    pub request_id: Option<Span>,
    /// Where the field lines start.
    fields_at: u16,
    /// Connection lists more than `close` and `keep-alive`.
    lists_fields: bool,
}

/// What a field value may make an inbound request id of: nothing that needs quoting anywhere.
const fn is_id_byte(byte: u8) -> bool {
    matches!(byte,
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'_' | b'.' | b':' | b'/' | b'+' | b'=' | b'@')
}

/// Fields that hold a client's secret; wiped after the key check, never forwarded. `[D-13]` `[D-43]`
const SECRET_FIELDS: [&str; 5] = [
    "authorization",
    "x-api-key",
    "api-key",
    "proxy-authorization",
    "cookie",
];
/// Fields that the agent or we make anew.
const REMADE_FIELDS: [&str; 3] = ["host", "expect", "x-request-id"];

impl Head {
    /// What an answer to this request has to know.
    #[must_use]
    pub fn asked(&self) -> Asked {
        Asked {
            head_only: self.method == Method::Head,
            version: self.version,
            keep_alive: self.keep_alive,
        }
    }

    /// The inbound request id if it is well formed, else `own`. `[D-26]`
    #[must_use]
    pub fn request_id_or<'a>(&self, bytes: &'a [u8], own: &'a [u8]) -> &'a [u8] {
        self.request_id.map_or(own, |id| id.of(bytes))
    }

    /// Calls `f(name, value)` for each field that goes to the provider, in order, and for the request
    /// id last. Left out are the fields of this hop, those that Connection names, credentials and
    /// framing: the agent frames its own request. `[D-13]` `[P-52]`
    ///
    /// `bytes`: the buffer the head was parsed from; `own_id`: the id made for this request.
    pub fn visit_forwarded<'a>(
        &self,
        bytes: &'a [u8],
        own_id: &'a [u8],
        mut f: impl FnMut(&'a [u8], &'a [u8]),
    ) {
        for (name, value) in self.fields(bytes) {
            let name = name.of(bytes);
            let stays_here = is_one_of(name, &HOP_FIELDS)
                || is_one_of(name, &SECRET_FIELDS)
                || is_one_of(name, &REMADE_FIELDS)
                || (self.lists_fields && self.is_listed(bytes, name));
            if !stays_here {
                f(name, value.of(bytes));
            }
        }
        f(b"x-request-id", self.request_id_or(bytes, own_id));
    }

    fn fields<'a>(&self, bytes: &'a [u8]) -> FieldLines<'a> {
        FieldLines {
            bytes: &bytes[..self.consumed],
            at: usize::from(self.fields_at),
        }
    }

    fn is_listed(&self, bytes: &[u8], name: &[u8]) -> bool {
        self.fields(bytes)
            .filter(|(field, _)| field.of(bytes).eq_ignore_ascii_case(b"connection"))
            .any(|(_, value)| members(value.of(bytes)).any(|o| o.eq_ignore_ascii_case(name)))
    }
}

/// Zeroes every credential of `head` in the buffer it was parsed from. Its spans stay valid; the
/// credential's then names zeros. `[D-43]`
pub fn wipe_credentials(bytes: &mut [u8], head: &Head) {
    let mut at = usize::from(head.fields_at);
    loop {
        let mut lines = FieldLines {
            bytes: &bytes[..head.consumed],
            at,
        };
        let Some((name, value)) = lines.next() else {
            break;
        };
        at = lines.at;
        if is_one_of(name.of(bytes), &SECRET_FIELDS) {
            bytes[value.range()].zeroize();
        }
    }
}

/// Field lines of a judged head: spans of name and trimmed value.
struct FieldLines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Iterator for FieldLines<'_> {
    type Item = (Span, Span);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.bytes.get(self.at..)?;
        let line = &rest[..rest.iter().position(|&byte| byte == b'\r')?];
        let colon = line.iter().position(|&byte| byte == b':')?;
        let (start, end) = (self.at, self.at + line.len());
        self.at = end + 2;
        let value = line[colon + 1..].trim_ascii_start();
        let value_at = end - value.len();
        Some((
            Span::new(start, start + colon),
            Span::new(value_at, value_at + trimmed(value).len()),
        ))
    }
}

/// How far a head has been looked at, so that one that arrives byte by byte is read once.
///
/// ```text
/// line_at <= checked <= HEAD_BYTES_MAX
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadCursor {
    checked: usize,
    /// Start of the line that `checked` is in.
    line_at: usize,
    /// Start of the request line: 0, or 2 after a stray CR LF.
    first_at: usize,
    /// Start of the field lines; 0 while the request line is not complete.
    fields_at: usize,
}

impl HeadCursor {
    /// As `parse_head`, for a buffer that has only grown since the cursor saw it last. After a head or
    /// an error the cursor starts over.
    ///
    /// # Errors
    /// As `parse_head`.
    pub fn parse(&mut self, bytes: &[u8]) -> Result<Option<Head>, Reason> {
        let found = self.find_end(bytes);
        if found == Ok(None) {
            return Ok(None);
        }
        let place = core::mem::take(self);
        found?.map(|end| place.judge(bytes, end)).transpose()
    }

    /// Looks for the empty line and refuses at once what no head may hold.
    fn find_end(&mut self, bytes: &[u8]) -> Result<Option<usize>, Reason> {
        let limit = bytes.len().min(HEAD_BYTES_MAX as usize);
        while self.checked < limit {
            let at = self.checked;
            let after_return = at > self.line_at && bytes[at - 1] == b'\r';
            match bytes[at] {
                b'\n' if after_return => {
                    if let Some(end) = self.end_line(at)? {
                        return Ok(Some(end));
                    }
                }
                _ if after_return => return Err(Reason::HeadMalformed),
                b'\t' | b'\r' | 0x20..=0x7e | 0x80.. => {}
                _ => return Err(Reason::HeadMalformed), // bare LF, NUL, a TLS hello
            }
            let in_first = self.fields_at == 0 && bytes[at] != b'\r';
            if in_first && at >= self.first_at + REQUEST_LINE_BYTES_MAX as usize {
                return Err(Reason::RequestLineTooLong);
            }
            self.checked += 1;
        }
        if limit == HEAD_BYTES_MAX as usize {
            return Err(Reason::HeadTooLong);
        }
        Ok(None)
    }

    /// Ends the line whose LF stands at `at`; the head's length if that was the empty one.
    fn end_line(&mut self, at: usize) -> Result<Option<usize>, Reason> {
        let empty = at == self.line_at + 1;
        self.line_at = at + 1;
        match (empty, self.fields_at) {
            (true, 0) if self.first_at > 0 => Err(Reason::HeadMalformed), // one stray line is enough
            (true, 0) => {
                self.first_at = at + 1;
                Ok(None)
            }
            (false, 0) => {
                self.fields_at = at + 1;
                Ok(None)
            }
            (true, _) => Ok(Some(at + 1)),
            (false, _) => Ok(None),
        }
    }

    fn judge(self, bytes: &[u8], end: usize) -> Result<Head, Reason> {
        let line = RequestLine::parse(&bytes[self.first_at..self.fields_at - 2], self.first_at)?;
        let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX as usize];
        match httparse::parse_headers(&bytes[self.fields_at..end], &mut lines) {
            Ok(httparse::Status::Complete(_)) => {}
            Err(httparse::Error::TooManyHeaders) => return Err(Reason::HeadTooLong),
            Ok(httparse::Status::Partial) | Err(_) => return Err(Reason::HeadMalformed),
        }
        let mut fields = Fields::default();
        let head = &bytes[..end];
        for (name, value) in (FieldLines {
            bytes: head,
            at: self.fields_at,
        }) {
            fields.add(name.of(head), value, head)?;
        }
        let body = fields.framing(line.version)?;
        let has_body = !matches!(body, BodyFraming::None | BodyFraming::Length(0));
        let http11 = line.version == Version::Http11;
        if fields.hosts > 1 || (http11 && fields.hosts == 0) {
            return Err(Reason::HeadMalformed);
        }
        Ok(Head {
            consumed: end,
            method: line.method,
            route: line.route(bytes),
            surface: Surface::at(line.path.of(bytes)),
            query: line.query,
            version: line.version,
            keep_alive: !fields.close && (http11 || fields.keep_alive),
            body,
            // RFC 9110 §10.1.1: ignored from HTTP/1.0.
            expect_continue: fields.expect_continue && has_body && http11,
            credential: fields.bearer.or(fields.x_api_key).or(fields.api_key),
            request_id: fields.request_id.flatten(),
            fields_at: u16::try_from(self.fields_at).expect("within HEAD_BYTES_MAX"),
            lists_fields: fields.lists_fields,
        })
    }
}

/// Parses the request head at the start of `bytes`, which may be followed by anything. `None`: not all
/// of it is here yet. One empty line before it is skipped. `Upgrade` is ignored, as RFC 9110 §7.8
/// permits: the connection never leaves HTTP/1.1, so what follows is never raw bytes. `[D-14]` `[P-50]`
///
/// # Errors
/// The head cannot be acted on: answer with `Reason::status` and close. `HeadMalformed`,
/// `FramingAmbiguous`, `TransferCodingUnknown`, `VersionUnsupported`, `ExpectationUnknown`,
/// `RequestLineTooLong`, `HeadTooLong`. Unknown paths and methods are no errors but a `Route`: their
/// framing is known.
pub fn parse_head(bytes: &[u8]) -> Result<Option<Head>, Reason> {
    HeadCursor::default().parse(bytes)
}

struct RequestLine {
    method: Method,
    version: Version,
    path: Span,
    query: Option<Span>,
}

impl RequestLine {
    /// `line`: without its CR LF; `at`: where it starts.
    fn parse(line: &[u8], at: usize) -> Result<Self, Reason> {
        let mut parts = line.split(|&byte| byte == b' ');
        let parts = (parts.next(), parts.next(), parts.next(), parts.next());
        let (Some(method), Some(target), Some(version), None) = parts else {
            return Err(Reason::HeadMalformed);
        };
        if !is_token(method) || target.is_empty() || !target.iter().all(|&b| is_target_byte(b)) {
            return Err(Reason::HeadMalformed);
        }
        let target_at = at + method.len() + 1;
        let path_at = target_at + path_offset(target).ok_or(Reason::HeadMalformed)?;
        let target_end = target_at + target.len();
        let rest = &target[path_at - target_at..];
        let path_end = path_at + rest.iter().position(|&b| b == b'?').unwrap_or(rest.len());
        Ok(Self {
            method: match method {
                b"GET" => Method::Get,
                b"HEAD" => Method::Head,
                b"POST" => Method::Post,
                b"OPTIONS" => Method::Options,
                _ => Method::Other,
            },
            version: match version {
                b"HTTP/1.1" => Version::Http11,
                b"HTTP/1.0" => Version::Http10,
                [b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9'] => {
                    return Err(Reason::VersionUnsupported);
                }
                _ => return Err(Reason::HeadMalformed),
            },
            path: Span::new(path_at, path_end),
            query: (path_end < target_end).then(|| Span::new(path_end + 1, target_end)),
        })
    }

    fn route(&self, bytes: &[u8]) -> Route {
        const MODELS: &[u8] = b"/v1/models";
        let path = self.path.of(bytes);
        let (allow, route) = match path {
            MODELS => (Allow::Get, Route::Models),
            b"/healthz" => (Allow::Get, Route::Healthz),
            b"/readyz" => (Allow::Get, Route::Readyz),
            _ => match (path.strip_prefix(MODELS), surface::operation_at(path)) {
                (Some([b'/', _, ..]), _) => {
                    let id_at = self.path.range().start + MODELS.len() + 1;
                    (
                        Allow::Get,
                        Route::Model(Span::new(id_at, self.path.range().end)),
                    )
                }
                (_, Some(operation)) => (Allow::Post, Route::Operation(operation)),
                (_, None) => return Route::Unknown,
            },
        };
        if allow.permits(self.method) {
            route
        } else if self.method == Method::Options {
            Route::Options(allow)
        } else {
            Route::MethodNotAllowed(allow)
        }
    }
}

/// Where the path starts: origin-form, or absolute-form with an authority. `None` for the forms no
/// route has (asterisk, authority) and for anything else.
fn path_offset(target: &[u8]) -> Option<usize> {
    if target.starts_with(b"/") {
        return Some(0);
    }
    let scheme = [&b"http://"[..], b"https://"].into_iter().find(|s| {
        target
            .get(..s.len())
            .is_some_and(|t| t.eq_ignore_ascii_case(s))
    })?;
    let rest = &target[scheme.len()..];
    let len = rest
        .iter()
        .position(|&b| matches!(b, b'/' | b'?'))
        .unwrap_or(rest.len());
    (len > 0 && is_authority(&rest[..len])).then_some(scheme.len() + len)
}

/// Bytes a request target may hold (RFC 3986): no fragment, nothing that needs encoding.
const fn is_target_byte(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e)
        && !matches!(
            byte,
            b'"' | b'#' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}'
        )
}

/// `uri-host [ ":" port ]` by its characters; user information is refused.
fn is_authority(text: &[u8]) -> bool {
    text.iter()
        .all(|&b| is_target_byte(b) && !matches!(b, b'/' | b'?' | b'@'))
}

/// Transfer codings of all Transfer-Encoding fields, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Coding {
    #[default]
    None,
    Chunked,
    Unknown,
    /// Empty members, or anything after `chunked`.
    Ambiguous,
}

impl Coding {
    fn then(self, member: &[u8]) -> Self {
        match (self, member) {
            (_, b"") | (Self::Chunked | Self::Ambiguous, _) => Self::Ambiguous,
            (Self::None, _) if member.eq_ignore_ascii_case(b"chunked") => Self::Chunked,
            (Self::None | Self::Unknown, _) => Self::Unknown,
        }
    }
}

/// What the fields of one head say, gathered in one pass.
#[derive(Debug, Default)]
struct Fields {
    hosts: u32,
    lengths: u32,
    /// Of the last Content-Length; `None` when it is no number.
    length: Option<u64>,
    coding: Coding,
    close: bool,
    keep_alive: bool,
    options: u32,
    lists_fields: bool,
    expect_continue: bool,
    authorizations: u32,
    bearer: Option<Span>,
    x_api_key: Option<Span>,
    api_key: Option<Span>,
    /// Outer `None`: no such field. Inner `None`: not well formed, or more than one.
    request_id: Option<Option<Span>>,
}

impl Fields {
    fn add(&mut self, name: &[u8], span: Span, head: &[u8]) -> Result<(), Reason> {
        let value = span.of(head);
        let is = |field: &[u8]| name.eq_ignore_ascii_case(field);
        // By length first: most fields match none of these.
        match name.len() {
            4 if is(b"host") => {
                self.hosts += 1;
                return is_authority(value)
                    .then_some(())
                    .ok_or(Reason::HeadMalformed);
            }
            6 if is(b"expect") => {
                if self.expect_continue || !value.eq_ignore_ascii_case(b"100-continue") {
                    return Err(Reason::ExpectationUnknown);
                }
                self.expect_continue = true;
            }
            7 if is(b"api-key") => return set_once(&mut self.api_key, span),
            9 if is(b"x-api-key") => return set_once(&mut self.x_api_key, span),
            10 if is(b"connection") => return self.add_options(value),
            12 if is(b"x-request-id") => self.add_request_id(span, value),
            13 if is(b"authorization") => return self.add_authorization(span, value),
            14 if is(b"content-length") => {
                self.lengths += 1;
                self.length = decimal(value);
            }
            17 if is(b"transfer-encoding") => {
                self.coding = members(value).fold(self.coding, Coding::then);
            }
            _ => {}
        }
        Ok(())
    }

    fn add_options(&mut self, value: &[u8]) -> Result<(), Reason> {
        for option in members(value) {
            self.options += 1;
            if option.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if option.eq_ignore_ascii_case(b"keep-alive") {
                self.keep_alive = true;
            } else if is_token(option) {
                self.lists_fields = true;
            } else if !option.is_empty() {
                return Err(Reason::HeadMalformed);
            }
        }
        (self.options <= CONNECTION_OPTIONS_MAX)
            .then_some(())
            .ok_or(Reason::HeadTooLong)
    }

    fn add_request_id(&mut self, span: Span, value: &[u8]) {
        let formed = !value.is_empty()
            && value.len() <= REQUEST_ID_BYTES_MAX as usize
            && value.iter().all(|&byte| is_id_byte(byte));
        self.request_id = Some((formed && self.request_id.is_none()).then_some(span));
    }

    /// Takes the token of `Bearer <token>`; other schemes are no credential here.
    fn add_authorization(&mut self, span: Span, value: &[u8]) -> Result<(), Reason> {
        self.authorizations += 1;
        if self.authorizations > 1 {
            return Err(Reason::HeadMalformed);
        }
        if value
            .get(..7)
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "))
        {
            let token = trimmed(&value[7..]);
            let end = span.range().end;
            self.bearer = (!token.is_empty()).then(|| Span::new(end - token.len(), end));
        }
        Ok(())
    }

    /// RFC 9112 §6.3 without its leniency: what could be read in two ways is refused.
    fn framing(&self, version: Version) -> Result<BodyFraming, Reason> {
        match (self.coding, self.lengths) {
            (Coding::None, 0) => Ok(BodyFraming::None),
            (Coding::None, 1) => self
                .length
                .map(BodyFraming::Length)
                .ok_or(Reason::FramingAmbiguous),
            (Coding::Chunked, 0) if version == Version::Http11 => Ok(BodyFraming::Chunked),
            (Coding::Unknown, 0) if version == Version::Http11 => {
                Err(Reason::TransferCodingUnknown)
            }
            (Coding::None | Coding::Chunked | Coding::Unknown | Coding::Ambiguous, _) => {
                Err(Reason::FramingAmbiguous)
            }
        }
    }
}

/// A secret that stands there twice could be read as either; an empty one is none.
fn set_once(slot: &mut Option<Span>, span: Span) -> Result<(), Reason> {
    if slot.is_some() {
        return Err(Reason::HeadMalformed);
    }
    *slot = (!span.range().is_empty()).then_some(span);
    Ok(())
}

/// Digits alone, within `u64`.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |value, &byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}
