//! HTTP/1.1 over slices: request heads, chunk framing, response heads. No socket, no buffer of its own.
//!
//! Lives on: a shard. View: one connection's bytes. Bound: one head of `HEAD_BYTES_MAX`.
//!
//! Where RFC 9112 leaves a recipient a choice between repairing and refusing, this side refuses: a
//! message that two parsers could frame differently is never forwarded. `[D-14]` `[P-50]`
mod chunked;
mod head;
mod response;

pub use chunked::{
    CHUNK_END, CHUNK_HEAD_BYTES_MAX, ChunkDecoder, ChunkStep, LAST_CHUNK, write_chunk_head,
};
pub use head::{
    Allow, BodyFraming, Head, HeadCursor, Method, Route, Span, Version, parse_head,
    wipe_credentials,
};
pub use response::{
    Asked, BodyMeter, CONTINUE, HeadWritten, ResponseFraming, ResponsePlan, SimpleResponse,
    plan_response, write_response_head, write_simple_head, write_simple_response,
};

/// `tchar` of RFC 9110 §5.6.2: what methods and field names are made of.
const fn is_token_byte(byte: u8) -> bool {
    matches!(byte,
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z'
        | b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_'
        | b'`' | b'|' | b'~')
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&byte| is_token_byte(byte))
}

/// What a field value may hold (RFC 9110 §5.5): HTAB, SP, visible and non-ASCII bytes.
const fn is_value_byte(byte: u8) -> bool {
    matches!(byte, b'\t' | 0x20..=0x7e | 0x80..)
}

/// `value` without the spaces and tabs around it.
const fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// The members of a comma-separated field value, trimmed; empty ones included.
fn members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(trimmed)
}

/// Fields of one hop: they say how *this* connection carries the message (RFC 9110 §7.6.1), so neither
/// side's ever reach the other. `[D-13]` `[P-53]`
const HOP_FIELDS: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "http2-settings",
];

/// One of `fields` under the spelling of any reader: case ignored, and `_` taken for `-`, since
/// gateways of the CGI family make the two one name.
fn is_one_of(name: &[u8], fields: &[&str]) -> bool {
    let same = |a: u8, b: u8| a.to_ascii_lowercase() == b || (a == b'_' && b == b'-');
    fields.iter().any(|field| {
        field.len() == name.len() && name.iter().zip(field.bytes()).all(|(&a, b)| same(a, b))
    })
}
