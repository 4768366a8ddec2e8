//! The agent's side of the envelope stream: whole envelopes out of any split, and envelopes out.
//!
//! Lives on: the agent's connection task, tests, tools; never on a shard. View: bytes and type names.
//! Bound: one envelope of the direction's limit plus what one read brought.
use bytes::{Buf, Bytes, BytesMut};

use crate::framing::{FramingError, MessageType, envelope_len};
use crate::limits::LENGTH_PREFIX_BYTES;
use crate::view::{BuildError, EnvelopeHead, EnvelopeView};

const PREFIX: usize = LENGTH_PREFIX_BYTES as usize;

/// What an envelope's type name means to this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Known(MessageType),
    /// Ignored and counted once the peer is registered. `[D-01]`
    Unknown,
}

/// One envelope; `payload` shares the buffer it arrived in.
#[derive(Clone, PartialEq, Eq)]
pub struct Envelope {
    /// 0 on a one-way message. `[D-56]`
    pub id: u64,
    /// The request this answers; 0 = not an answer.
    pub reply_to: u64,
    pub kind: Kind,
    pub payload: Bytes,
}

impl core::fmt::Debug for Envelope {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Envelope")
            .field("id", &self.id)
            .field("reply_to", &self.reply_to)
            .field("kind", &self.kind)
            .field("payload_bytes", &self.payload.len())
            .finish()
    }
}

/// Cuts a byte stream into envelopes, wherever the stream was split.
///
/// Memory grows with the bytes that arrived, never with the length a peer announced.
#[derive(Debug)]
pub struct Assembler {
    buffer: BytesMut,
    max: u32,
    failed: Option<FramingError>,
}

impl Assembler {
    /// `max`: largest envelope of the direction, bytes without the prefix. `[D-02]`
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self {
            buffer: BytesMut::new(),
            max,
            failed: None,
        }
    }

    /// Appends what was read. Take every envelope out with [`Self::next`] before the next push: that
    /// keeps the buffer within one envelope plus one read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// The next whole envelope; `Ok(None)` while it is incomplete.
    ///
    /// # Errors
    /// The stream cannot be read on; the same error comes again from then on.
    #[expect(
        clippy::should_implement_trait,
        reason = "fallible, and resumes after `None`"
    )]
    pub fn next(&mut self) -> Result<Option<Envelope>, FramingError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.cut().inspect_err(|&error| {
            self.failed = Some(error);
            self.buffer = BytesMut::new();
        })
    }

    /// Bytes that wait for the rest of their envelope.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }

    fn cut(&mut self) -> Result<Option<Envelope>, FramingError> {
        let Some(prefix) = self.buffer.first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = envelope_len(*prefix, self.max)? as usize;
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        let bytes = self.buffer.split_to(length).freeze();
        let view = EnvelopeView::parse(&bytes).map_err(FramingError::Malformed)?;
        let kind = view.kind.map_or(Kind::Unknown, Kind::Known);
        let (id, reply_to) = (view.id, view.reply_to);
        let payload = bytes.slice_ref(view.payload);
        Ok(Some(Envelope {
            id,
            reply_to,
            kind,
            payload,
        }))
    }
}

/// Appends one whole envelope, prefix included, to `out`.
///
/// # Errors
/// `TooLong` when the envelope does not fit a length prefix; `out` is then untouched.
pub fn encode_envelope(
    kind: MessageType,
    id: u64,
    reply_to: u64,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), BuildError> {
    let head = EnvelopeHead {
        kind,
        id,
        reply_to,
        payload_len: payload.len(),
    };
    let start = out.len();
    out.resize(start + head.encoded_len()?, 0);
    head.write(&mut out[start..])?;
    out.extend_from_slice(payload);
    Ok(())
}
