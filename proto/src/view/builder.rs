//! HOT. One-pass builders of the hot envelopes into a given buffer; fields in the order of their numbers,
//! but for the metadata of a `RunRequest`.
//!
//! Lives on: shards, agent, bench. View: borrowed parts. Bound: the buffer; no heap.
//!
//! Each message says its fields once; the same description first measures and then writes, so that a
//! length on the wire cannot disagree with what follows it. Every builder returns the bytes it used and
//! writes nothing when it fails.
use core::fmt;

use super::key::{
    cancel as cancel_key, config_refresh as config_refresh_key, entry, envelope,
    features as features_key, frame, go_away as go_away_key, ping as ping_key,
    ready_request as ready_request_key, ready_response as ready_response_key,
    register_response as register_response_key, run_request, tunnel_request, usage as usage_key,
    window as window_key,
};
use crate::domain::{FrameKind, Usage};
use crate::framing::MessageType;
use crate::ids::RefreshId;
use crate::limits::{ENVELOPE_TO_EDGE_BYTES_MAX, ENVELOPE_TO_NODE_BYTES_MAX, LENGTH_PREFIX_BYTES};

const PREFIX: usize = LENGTH_PREFIX_BYTES as usize;

/// Why an envelope was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildError {
    /// The buffer is shorter than the `needed` bytes.
    NoRoom { needed: usize },
    /// The envelope would be longer than its receiver takes. `[D-02]`
    TooLong { bytes: usize, max: u32 },
    /// A header name that is not ASCII: the receiver could not decode the message.
    HeaderName,
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoom { needed } => write!(f, "the buffer has no room for {needed} bytes"),
            Self::TooLong { bytes, max } => {
                write!(f, "an envelope of {bytes} bytes, at most {max} are allowed")
            }
            Self::HeaderName => f.write_str("a header name is not ASCII"),
        }
    }
}

impl core::error::Error for BuildError {}

/// Takes fields: counts them while `out` is `None`, writes them otherwise. `at` bytes so far.
struct Sink<'b> {
    out: Option<&'b mut [u8]>,
    at: usize,
}

impl<'b> Sink<'b> {
    /// Writes into the `needed` first bytes of `out`.
    fn into(out: &'b mut [u8], needed: usize) -> Result<Self, BuildError> {
        let out = out.get_mut(..needed).ok_or(BuildError::NoRoom { needed })?;
        Ok(Self {
            out: Some(out),
            at: 0,
        })
    }

    fn varint(&mut self, mut value: u64) {
        let Some(out) = &mut self.out else {
            self.at += varint_len(value);
            return;
        };
        while value >= 0x80 {
            out[self.at] = (value & 0x7f) as u8 | 0x80;
            self.at += 1;
            value >>= 7;
        }
        out[self.at] = (value & 0x7f) as u8;
        self.at += 1;
    }

    fn raw(&mut self, bytes: &[u8]) {
        if let Some(out) = &mut self.out {
            out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }

    /// Key and length of what follows.
    fn open(&mut self, key: u32, length: usize) {
        self.varint(u64::from(key));
        self.varint(length as u64);
    }

    /// Absent when 0.
    fn int(&mut self, key: u32, value: u64) {
        if value != 0 {
            self.varint(u64::from(key));
            self.varint(value);
        }
    }

    /// Absent when empty.
    fn bytes(&mut self, key: u32, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.open(key, bytes.len());
            self.raw(bytes);
        }
    }

    /// A nested message, present even when empty.
    fn message(&mut self, key: u32, fields: impl Fn(&mut Sink<'_>)) {
        self.open(key, measure(&fields));
        fields(self);
    }

    fn header(&mut self, key: u32, (name, value): (&[u8], &[u8])) {
        self.message(key, |sink| {
            sink.bytes(entry::KEY, name);
            sink.bytes(entry::VALUE, value);
        });
    }
}

/// 7 bits a byte; exact for 1 ..= 64 bits.
const fn varint_len(value: u64) -> usize {
    ((value | 1).ilog2() as usize * 9 + 73) / 64
}

/// Bytes that `fields` says.
fn measure(fields: impl Fn(&mut Sink<'_>)) -> usize {
    let mut sink = Sink { out: None, at: 0 };
    fields(&mut sink);
    sink.at
}

/// An int32 on the wire: sign-extended to 64 bits.
const fn wire_int32(value: i32) -> u64 {
    (value as i64).cast_unsigned()
}

/// Everything of an envelope before its payload's first byte; nothing follows the payload.
#[derive(Clone, Copy, Debug)]
pub struct EnvelopeHead {
    pub kind: MessageType,
    /// 0 on a message that expects no answer. `[D-56]`
    pub id: u64,
    /// The request this answers; 0 = none.
    pub reply_to: u64,
    /// Bytes of the payload that follows.
    pub payload_len: usize,
}

impl EnvelopeHead {
    fn fields(&self, sink: &mut Sink<'_>) {
        sink.int(envelope::ID, self.id);
        sink.int(envelope::REPLY_TO, self.reply_to);
        sink.bytes(envelope::TYPE, self.kind.name().as_bytes());
        if self.payload_len > 0 {
            sink.open(envelope::PAYLOAD, self.payload_len);
        }
    }

    /// Bytes that [`Self::write`] uses, and the value of the length prefix.
    fn measure(&self) -> Result<(usize, u32), BuildError> {
        let head = measure(|sink| self.fields(sink));
        let bytes = head.saturating_add(self.payload_len);
        let max = if self.kind.from_node() {
            ENVELOPE_TO_EDGE_BYTES_MAX
        } else {
            ENVELOPE_TO_NODE_BYTES_MAX
        };
        match u32::try_from(bytes) {
            Ok(length) if length <= max => Ok((PREFIX + head, length)),
            _ => Err(BuildError::TooLong { bytes, max }),
        }
    }

    /// Bytes of length prefix and head.
    ///
    /// # Errors
    /// `TooLong` when the whole envelope exceeds the receiver's limit.
    pub fn encoded_len(&self) -> Result<usize, BuildError> {
        self.measure().map(|(head, _)| head)
    }

    /// Writes length prefix and head.
    ///
    /// # Errors
    /// `TooLong`, `NoRoom`.
    pub fn write(&self, out: &mut [u8]) -> Result<usize, BuildError> {
        self.write_before(out, 0)
    }

    /// Writes the head, provided that `behind` more bytes will fit.
    fn write_before(&self, out: &mut [u8], behind: usize) -> Result<usize, BuildError> {
        let (head, length) = self.measure()?;
        if out.len() < head + behind {
            return Err(BuildError::NoRoom {
                needed: head + behind,
            });
        }
        let mut sink = Sink::into(out, head)?;
        sink.raw(&length.to_be_bytes());
        self.fields(&mut sink);
        Ok(sink.at)
    }
}

/// Writes a whole envelope around the payload that `fields` says.
fn seal(
    kind: MessageType,
    reply_to: u64,
    out: &mut [u8],
    fields: impl Fn(&mut Sink<'_>),
) -> Result<usize, BuildError> {
    seal_as(kind, 0, reply_to, out, fields)
}

fn seal_as(
    kind: MessageType,
    id: u64,
    reply_to: u64,
    out: &mut [u8],
    fields: impl Fn(&mut Sink<'_>),
) -> Result<usize, BuildError> {
    let payload_len = measure(&fields);
    let head = EnvelopeHead {
        kind,
        id,
        reply_to,
        payload_len,
    };
    let at = head.write_before(out, payload_len)?;
    let mut sink = Sink { out: Some(out), at };
    fields(&mut sink);
    Ok(sink.at)
}

// ── Edge → node ───────────────────────────────────────────────────────────────────────────────────

/// `ProviderTunnelRequest` without its headers and body, which are streamed between two writes.
///
/// ```text
///  before_body                                   | body_len bytes | after_body
///  length prefix, envelope, fields 1 … 7, key 8  | the body       | fields 9, 10, 13 … 16
/// ```
#[derive(Clone, Copy, Default)]
pub struct TunnelRequestHead<'a> {
    pub run_id: &'a str,
    pub adapter: &'a str,
    pub target: &'a str,
    pub method: &'a str,
    /// Also set when `operation` is. `[R-099]`
    pub path: &'a str,
    /// The client's query without its `?`: goes behind `path`. Empty: none.
    pub query: &'a str,
    pub body_len: u32,
    pub stream: bool,
    /// Hard deadline, s; 0 = none. `[A-53]`
    pub timeout_sec: i32,
    /// Empty: the path says where. `[R-098]`
    pub operation: &'a str,
    /// Both or neither. `[R-221]`
    pub credential: Option<CredentialPair<'a>>,
    /// 0 leaves the node its default. `[R-113]`
    pub stall_timeout_ms: i64,
}

/// The inseparable managed pair, as already encoded bytes.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct CredentialPair<'a> {
    /// `iop.lease.LeaseEnvelope`; never empty, which would mean absence.
    pub lease: &'a [u8],
    /// `iop.CredentialLeaseBinding`.
    pub binding: &'a [u8],
}

impl fmt::Debug for TunnelRequestHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelRequestHead")
            .field("run_id", &self.run_id)
            .field("adapter", &self.adapter)
            .field("target", &self.target)
            .field("path", &self.path)
            .field("body_bytes", &self.body_len)
            .field("is_managed", &self.credential.is_some())
            .finish_non_exhaustive()
    }
}

impl TunnelRequestHead<'_> {
    /// Bytes that [`Self::before_body`] writes for these headers (name, value).
    ///
    /// # Errors
    /// `TooLong` over the node's limit, `HeaderName`.
    pub fn before_len<'h>(
        &self,
        headers: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
    ) -> Result<usize, BuildError> {
        let (envelope, fields) = self.measure_before(headers)?;
        Ok(envelope.encoded_len()? + fields)
    }

    /// Bytes that [`Self::after_body`] writes.
    #[must_use]
    pub fn after_len(&self) -> usize {
        measure(|sink| self.fields_after(sink))
    }

    /// Writes everything up to the body's first byte. `headers` is walked twice and must repeat itself.
    ///
    /// # Errors
    /// `NoRoom`, `TooLong` over the node's limit, `HeaderName`.
    ///
    /// # Panics
    /// When the second walk of `headers` yields more than the first.
    pub fn before_body<'h>(
        &self,
        headers: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
        out: &mut [u8],
    ) -> Result<usize, BuildError> {
        let (envelope, fields) = self.measure_before(headers.clone())?;
        let at = envelope.write_before(out, fields)?;
        let mut sink = Sink {
            out: Some(&mut out[..at + fields]),
            at,
        };
        self.fields_before(headers, &mut sink);
        Ok(sink.at)
    }

    /// Writes everything behind the body's last byte.
    ///
    /// # Errors
    /// `NoRoom`.
    pub fn after_body(&self, out: &mut [u8]) -> Result<usize, BuildError> {
        let mut sink = Sink::into(out, self.after_len())?;
        self.fields_after(&mut sink);
        Ok(sink.at)
    }

    /// The envelope's head, and the bytes of the fields between it and the body.
    fn measure_before<'h>(
        &self,
        mut headers: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
    ) -> Result<(EnvelopeHead, usize), BuildError> {
        let fields = measure(|sink| self.fields_before(headers.clone(), sink));
        if !headers.all(|(name, _)| name.is_ascii()) {
            return Err(BuildError::HeaderName);
        }
        let payload_len = fields + self.body_len as usize + self.after_len();
        let kind = MessageType::ProviderTunnelRequest;
        Ok((
            EnvelopeHead {
                kind,
                id: 0,
                reply_to: 0,
                payload_len,
            },
            fields,
        ))
    }

    fn fields_before<'h>(
        &self,
        headers: impl Iterator<Item = (&'h [u8], &'h [u8])>,
        sink: &mut Sink<'_>,
    ) {
        sink.bytes(tunnel_request::RUN_ID, self.run_id.as_bytes());
        sink.bytes(tunnel_request::ADAPTER, self.adapter.as_bytes());
        sink.bytes(tunnel_request::TARGET, self.target.as_bytes());
        sink.bytes(tunnel_request::METHOD, self.method.as_bytes());
        self.put_path(sink);
        for header in headers {
            sink.header(tunnel_request::HEADERS, header);
        }
        if self.body_len > 0 {
            sink.open(tunnel_request::BODY, self.body_len as usize);
        }
    }

    /// A profile's path may have a query of its own; the client's is one more part of it.
    fn put_path(&self, sink: &mut Sink<'_>) {
        if self.query.is_empty() {
            return sink.bytes(tunnel_request::PATH, self.path.as_bytes());
        }
        let joint: &[u8] = if self.path.contains('?') { b"&" } else { b"?" };
        let bytes = self.path.len() + joint.len() + self.query.len();
        sink.open(tunnel_request::PATH, bytes);
        for part in [self.path.as_bytes(), joint, self.query.as_bytes()] {
            sink.raw(part);
        }
    }

    fn fields_after(&self, sink: &mut Sink<'_>) {
        sink.int(tunnel_request::STREAM, u64::from(self.stream));
        sink.int(tunnel_request::TIMEOUT, wire_int32(self.timeout_sec));
        sink.bytes(tunnel_request::OPERATION, self.operation.as_bytes());
        if let Some(pair) = self.credential {
            sink.bytes(tunnel_request::LEASE, pair.lease);
            sink.open(tunnel_request::BINDING, pair.binding.len());
            sink.raw(pair.binding);
        }
        sink.int(
            tunnel_request::STALL_TIMEOUT,
            self.stall_timeout_ms.cast_unsigned(),
        );
    }
}

/// `RunRequest` without its input, which is streamed between two writes. `[R-082]`
///
/// ```text
///  before_input                                       | input_len bytes | after_input
///  length prefix, envelope, fields 1 … 3, 5, key 4    | the input       | fields 7, 8
/// ```
/// The metadata goes first: what it is borrowed from may be gone once the input has been sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunRequestHead<'a> {
    pub run_id: &'a str,
    pub adapter: &'a str,
    pub target: &'a str,
    /// Key and value. `[R-299]`
    pub metadata: &'a [(&'a str, &'a str)],
    pub input_len: u32,
    /// Hard deadline, s; 0 = none. `[A-53]`
    pub timeout_sec: i32,
    /// 0 leaves the node its default. `[R-113]`
    pub stall_timeout_ms: i64,
}

impl RunRequestHead<'_> {
    /// Writes everything up to the input's first byte.
    ///
    /// # Errors
    /// `NoRoom`, `TooLong` over the node's limit.
    pub fn before_input(&self, out: &mut [u8]) -> Result<usize, BuildError> {
        let fields = measure(|sink| self.fields_before(sink));
        let envelope = EnvelopeHead {
            kind: MessageType::RunRequest,
            id: 0,
            reply_to: 0,
            payload_len: fields + self.input_len as usize + self.after_len(),
        };
        let at = envelope.write_before(out, fields)?;
        let mut sink = Sink { out: Some(out), at };
        self.fields_before(&mut sink);
        Ok(sink.at)
    }

    /// Bytes that [`Self::after_input`] writes.
    #[must_use]
    pub fn after_len(&self) -> usize {
        measure(|sink| self.fields_after(sink))
    }

    /// Writes everything behind the input's last byte.
    ///
    /// # Errors
    /// `NoRoom`.
    pub fn after_input(&self, out: &mut [u8]) -> Result<usize, BuildError> {
        let mut sink = Sink::into(out, self.after_len())?;
        self.fields_after(&mut sink);
        Ok(sink.at)
    }

    fn fields_before(&self, sink: &mut Sink<'_>) {
        sink.bytes(run_request::RUN_ID, self.run_id.as_bytes());
        sink.bytes(run_request::ADAPTER, self.adapter.as_bytes());
        sink.bytes(run_request::TARGET, self.target.as_bytes());
        for (key, value) in self.metadata {
            sink.header(run_request::METADATA, (key.as_bytes(), value.as_bytes()));
        }
        if self.input_len > 0 {
            sink.open(run_request::INPUT, self.input_len as usize);
        }
    }

    fn fields_after(&self, sink: &mut Sink<'_>) {
        sink.int(run_request::TIMEOUT, wire_int32(self.timeout_sec));
        sink.int(
            run_request::STALL_TIMEOUT,
            self.stall_timeout_ms.cast_unsigned(),
        );
    }
}

/// Answers a registration; the configuration travels as already encoded bytes.
#[derive(Clone, Copy, Debug)]
pub enum RegisterReply<'a> {
    /// `config_payload`: encoded `iop.NodeConfigPayload`, which may be empty. `[R-022]`
    Accepted {
        node_id: &'a str,
        config_payload: &'a [u8],
    },
    Rejected {
        reason: &'a str,
    },
}

/// `RegisterResponse`. `[R-021]`
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn register_response(
    reply_to: u64,
    reply: RegisterReply<'_>,
    out: &mut [u8],
) -> Result<usize, BuildError> {
    seal(
        MessageType::RegisterResponse,
        reply_to,
        out,
        |sink| match reply {
            RegisterReply::Accepted {
                node_id,
                config_payload,
            } => {
                sink.int(register_response_key::ACCEPTED, 1);
                sink.bytes(register_response_key::NODE_ID, node_id.as_bytes());
                sink.open(register_response_key::CONFIG, config_payload.len());
                sink.raw(config_payload);
            }
            RegisterReply::Rejected { reason } => {
                sink.bytes(register_response_key::REASON, reason.as_bytes());
            }
        },
    )
}

/// `NodeReadyResponse`; `refusal` none is `ready = true`. `[R-039]` `[R-040]`
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn ready_response(
    reply_to: u64,
    refusal: Option<&str>,
    out: &mut [u8],
) -> Result<usize, BuildError> {
    seal(MessageType::NodeReadyResponse, reply_to, out, |sink| {
        sink.int(ready_response_key::READY, u64::from(refusal.is_none()));
        sink.bytes(
            ready_response_key::REASON,
            refusal.unwrap_or_default().as_bytes(),
        );
    })
}

/// `NodeConfigRefreshRequest`: replaces the node's whole configuration, which travels as already encoded
/// bytes. `[R-260]`
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn config_refresh(
    refresh: RefreshId,
    config_payload: &[u8],
    out: &mut [u8],
) -> Result<usize, BuildError> {
    let (digits, first) = decimal(refresh.get());
    let kind = MessageType::NodeConfigRefreshRequest;
    seal_as(kind, refresh.get(), 0, out, |sink| {
        sink.bytes(config_refresh_key::REQUEST_ID, &digits[first..]);
        sink.open(config_refresh_key::CONFIG, config_payload.len());
        sink.raw(config_payload);
    })
}

/// The decimal digits of `value`: from the second on, in the array.
fn decimal(mut value: u64) -> ([u8; 20], usize) {
    let mut digits = [b'0'; 20];
    let mut first = digits.len() - 1;
    loop {
        digits[first] = b"0123456789"[(value % 10) as usize];
        value /= 10;
        if value == 0 {
            return (digits, first);
        }
        first -= 1;
    }
}

/// `CancelRequest` of a run or tunnel. `[R-251]`
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn cancel(run_id: &str, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::CancelRequest, 0, out, |sink| {
        sink.bytes(cancel_key::RUN_ID, run_id.as_bytes());
    })
}

/// `Window`: body bytes the node may send for the run, in total so far.
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn window(run_id: &str, bytes: u64, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::Window, 0, out, |sink| {
        sink.bytes(window_key::RUN_ID, run_id.as_bytes());
        sink.int(window_key::BYTES, bytes);
    })
}

// ── either way ────────────────────────────────────────────────────────────────────────────────────

/// `Ping`. `[D-03]`
///
/// # Errors
/// `NoRoom`.
pub fn ping(seq: u64, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::Ping, 0, out, |sink| {
        sink.int(ping_key::SEQ, seq)
    })
}

/// `Pong`, echoing the ping's `seq`. `[D-56]`
///
/// # Errors
/// `NoRoom`.
pub fn pong(seq: u64, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::Pong, 0, out, |sink| {
        sink.int(ping_key::SEQ, seq)
    })
}

/// `GoAway`. `[D-07]`
///
/// # Errors
/// `NoRoom`.
pub fn go_away(grace_ms: u32, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::GoAway, 0, out, |sink| {
        sink.int(go_away_key::GRACE, u64::from(grace_ms));
    })
}

// ── node → Edge ───────────────────────────────────────────────────────────────────────────────────

/// `NodeReadyRequest` under the request id `id` > 0. `[R-037]`
///
/// # Errors
/// `NoRoom`, `TooLong`.
pub fn ready_request(id: u64, node_id: &str, out: &mut [u8]) -> Result<usize, BuildError> {
    let fields = |sink: &mut Sink<'_>| {
        sink.bytes(ready_request_key::NODE_ID, node_id.as_bytes());
    };
    let payload_len = measure(fields);
    let head = EnvelopeHead {
        kind: MessageType::NodeReadyRequest,
        id,
        reply_to: 0,
        payload_len,
    };
    let at = head.write_before(out, payload_len)?;
    let mut sink = Sink { out: Some(out), at };
    fields(&mut sink);
    Ok(sink.at)
}

/// `Features`.
///
/// # Errors
/// `NoRoom`.
pub fn features(window: bool, out: &mut [u8]) -> Result<usize, BuildError> {
    seal(MessageType::Features, 0, out, |sink| {
        sink.int(features_key::WINDOW, u64::from(window));
    })
}

/// `ProviderTunnelFrame` from borrowed parts; the kind decides which of them mean something. `[R-091]`
#[derive(Clone, Copy)]
pub struct TunnelFrameOut<'a> {
    pub run_id: &'a str,
    pub kind: FrameKind,
    pub sequence: u64,
    pub status_code: i32,
    /// Name (ASCII) and value.
    pub headers: &'a [(&'a [u8], &'a [u8])],
    pub body: &'a [u8],
    pub error: &'a str,
    pub usage: Option<Usage>,
}

impl fmt::Debug for TunnelFrameOut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelFrameOut")
            .field("run_id", &self.run_id)
            .field("kind", &self.kind)
            .field("sequence", &self.sequence)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl<'a> TunnelFrameOut<'a> {
    const fn new(run_id: &'a str, kind: FrameKind, sequence: u64) -> Self {
        let (headers, body): (&[_], &[_]) = (&[], &[]);
        Self {
            run_id,
            kind,
            sequence,
            status_code: 0,
            headers,
            body,
            error: "",
            usage: None,
        }
    }

    #[must_use]
    pub const fn response_start(
        run_id: &'a str,
        sequence: u64,
        status_code: i32,
        headers: &'a [(&'a [u8], &'a [u8])],
    ) -> Self {
        Self {
            status_code,
            headers,
            ..Self::new(run_id, FrameKind::ResponseStart, sequence)
        }
    }

    #[must_use]
    pub const fn body(run_id: &'a str, sequence: u64, body: &'a [u8]) -> Self {
        Self {
            body,
            ..Self::new(run_id, FrameKind::Body, sequence)
        }
    }

    #[must_use]
    pub const fn end(run_id: &'a str, sequence: u64) -> Self {
        Self::new(run_id, FrameKind::End, sequence)
    }

    #[must_use]
    pub const fn error(run_id: &'a str, sequence: u64, error: &'a str) -> Self {
        Self {
            error,
            ..Self::new(run_id, FrameKind::Error, sequence)
        }
    }

    #[must_use]
    pub const fn usage(run_id: &'a str, sequence: u64, usage: Usage) -> Self {
        Self {
            usage: Some(usage),
            ..Self::new(run_id, FrameKind::Usage, sequence)
        }
    }

    fn fields(&self, sink: &mut Sink<'_>) {
        self.fields_before_body(sink);
        sink.bytes(frame::BODY, self.body);
        sink.bytes(frame::ERROR, self.error.as_bytes());
        if let Some(usage) = self.usage {
            sink.message(frame::USAGE, |sink| {
                sink.int(usage_key::PROMPT, usage.prompt_tokens.cast_unsigned());
                sink.int(
                    usage_key::COMPLETION,
                    usage.completion_tokens.cast_unsigned(),
                );
                sink.int(usage_key::TOTAL, usage.total_tokens.cast_unsigned());
            });
        }
    }

    fn fields_before_body(&self, sink: &mut Sink<'_>) {
        sink.bytes(frame::RUN_ID, self.run_id.as_bytes());
        sink.int(frame::KIND, wire_int32(self.kind.to_wire()));
        sink.int(frame::SEQUENCE, self.sequence);
        sink.int(frame::STATUS, wire_int32(self.status_code));
        for &header in self.headers {
            sink.header(frame::HEADERS, header);
        }
    }

    fn check(&self) -> Result<(), BuildError> {
        if self.headers.iter().all(|(name, _)| name.is_ascii()) {
            Ok(())
        } else {
            Err(BuildError::HeaderName)
        }
    }

    /// Bytes of the whole envelope, prefix included.
    ///
    /// # Errors
    /// `TooLong` over the Edge's limit, `HeaderName`.
    pub fn encoded_len(&self) -> Result<usize, BuildError> {
        self.check()?;
        let payload_len = measure(|sink| self.fields(sink));
        let kind = MessageType::ProviderTunnelFrame;
        let head = EnvelopeHead {
            kind,
            id: 0,
            reply_to: 0,
            payload_len,
        };
        Ok(head.encoded_len()? + payload_len)
    }

    /// Writes the whole envelope, prefix included.
    ///
    /// # Errors
    /// `NoRoom`, `TooLong` over the Edge's limit, `HeaderName`.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, BuildError> {
        self.check()?;
        seal(MessageType::ProviderTunnelFrame, 0, out, |sink| {
            self.fields(sink)
        })
    }
}

/// Writes a BODY frame's envelope up to its body; the `body_len` bytes, at least one, follow, and
/// nothing behind them.
///
/// # Errors
/// `NoRoom`, `TooLong` over the Edge's limit.
pub fn body_frame_head(
    run_id: &str,
    sequence: u64,
    body_len: u32,
    out: &mut [u8],
) -> Result<usize, BuildError> {
    let fields = |sink: &mut Sink<'_>| {
        TunnelFrameOut::body(run_id, sequence, &[]).fields_before_body(sink);
        sink.open(frame::BODY, body_len as usize);
    };
    let before = measure(fields);
    let payload_len = before + body_len as usize;
    let kind = MessageType::ProviderTunnelFrame;
    let at = EnvelopeHead {
        kind,
        id: 0,
        reply_to: 0,
        payload_len,
    }
    .write_before(out, before)?;
    let mut sink = Sink { out: Some(out), at };
    fields(&mut sink);
    Ok(sink.at)
}
