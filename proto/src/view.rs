//! HOT. Borrowed views of the hot messages and one-pass builders of them; no heap.
//!
//! Lives on: shards, agent, bench. View: the bytes of one envelope. Bound: that envelope.
//!
//! A view accepts exactly what the generated decoder accepts and sees the same values: the last of a
//! repeated singular field, entries of maps, UTF-8 checked in every declared string. `[D-51]` A
//! differential test holds them together. Strings stay bytes; whoever needs `str` has it checked.
use core::fmt;

use crate::domain::{FrameKind, Usage};
use crate::framing::MessageType;

mod builder;
mod cut;
mod key;
mod reader;

pub use builder::{
    BuildError, CredentialPair, EnvelopeHead, RegisterReply, RunRequestHead, TunnelFrameOut,
    TunnelRequestHead, body_frame_head, cancel, config_refresh, features, go_away, ping, pong,
    ready_request, ready_response, register_response, window,
};
pub use cut::{CutProbe, CutStart, check_cut_tail, cut_probe};
pub use reader::{Entries, EntryIter, ViewError};

use reader::{Ascii, DEPTH_MAX, Reader, Value, check_failure, low32, read_entry, read_usage};

/// `iop.transport.Envelope`: the bytes behind a length prefix.
#[derive(Clone, Copy)]
pub struct EnvelopeView<'a> {
    /// 0 on a one-way message. `[D-56]`
    pub id: u64,
    /// The request this answers; 0 = not an answer.
    pub reply_to: u64,
    /// `None`: a type this build does not know, spelled in `type_name`. `[D-01]`
    pub kind: Option<MessageType>,
    pub type_name: &'a [u8],
    pub payload: &'a [u8],
}

impl<'a> EnvelopeView<'a> {
    /// # Errors
    /// What the generated decoder refuses too.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ViewError> {
        use key::envelope::{ID, KNOWN, PAYLOAD, REPLY_TO, TYPE};
        let mut view = Self {
            id: 0,
            reply_to: 0,
            kind: None,
            type_name: &[],
            payload: &[],
        };
        let mut reader = Reader::new(bytes);
        while !reader.is_done() {
            match reader.key()? {
                ID => view.id = reader.varint()?,
                REPLY_TO => view.reply_to = reader.varint()?,
                TYPE => view.type_name = reader.text(TYPE)?,
                PAYLOAD => view.payload = reader.bytes()?,
                other => reader.unknown(other, KNOWN, DEPTH_MAX)?,
            }
        }
        view.kind = MessageType::from_name(view.type_name);
        Ok(view)
    }
}

impl fmt::Debug for EnvelopeView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnvelopeView")
            .field("id", &self.id)
            .field("reply_to", &self.reply_to)
            .field("kind", &self.kind)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// `iop.ProviderTunnelFrame`. `[R-091]`
#[derive(Clone, Copy, Default)]
pub struct TunnelFrameView<'a> {
    pub run_id: &'a [u8],
    /// As on the wire; see [`Self::frame_kind`].
    pub kind: i32,
    pub sequence: u64,
    pub status_code: i32,
    /// Values may be any bytes. `[A-30]`
    pub headers: Entries<'a>,
    pub body: &'a [u8],
    pub error: &'a [u8],
    pub usage: Option<Usage>,
    /// An observation, nothing hangs on it.
    pub metadata: Entries<'a>,
    /// Present, even if empty; its content is read by the mapping module. `[R-131]` `[R-132]`
    pub has_failure: bool,
}

impl<'a> TunnelFrameView<'a> {
    /// # Errors
    /// What the generated decoder refuses too.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ViewError> {
        use key::frame::{
            BODY, ERROR, FAILURE, HEADERS, KIND, KNOWN, METADATA, RUN_ID, SEQUENCE, STATUS, USAGE,
        };
        let mut view = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_done() {
            let before = reader.rest.len();
            match reader.key()? {
                RUN_ID => view.run_id = reader.text(RUN_ID)?,
                KIND => view.kind = low32(reader.varint()?).cast_signed(),
                SEQUENCE => view.sequence = reader.varint()?,
                STATUS => view.status_code = low32(reader.varint()?).cast_signed(),
                HEADERS => {
                    read_entry(reader.bytes()?, Value::Bytes, DEPTH_MAX - 1)?;
                    view.headers.add(HEADERS, bytes, before, reader.rest.len());
                }
                BODY => view.body = reader.bytes()?,
                ERROR => view.error = reader.text(ERROR)?,
                USAGE => {
                    let usage = view.usage.get_or_insert_default();
                    read_usage(reader.bytes()?, usage, DEPTH_MAX - 1)?;
                }
                METADATA => {
                    read_entry(reader.bytes()?, Value::Text, DEPTH_MAX - 1)?;
                    view.metadata
                        .add(METADATA, bytes, before, reader.rest.len());
                }
                FAILURE => {
                    check_failure(reader.bytes()?, DEPTH_MAX - 1)?;
                    view.has_failure = true;
                }
                other => reader.unknown(other, KNOWN, DEPTH_MAX)?,
            }
        }
        Ok(view)
    }

    #[inline]
    #[must_use]
    pub const fn frame_kind(&self) -> FrameKind {
        FrameKind::from_wire(self.kind)
    }
}

impl fmt::Debug for TunnelFrameView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelFrameView")
            .field("run_id", &Ascii(self.run_id))
            .field("kind", &self.frame_kind())
            .field("sequence", &self.sequence)
            .field("status_code", &self.status_code)
            .field("headers", &self.headers)
            .field("body_bytes", &self.body.len())
            .field("error_bytes", &self.error.len())
            .field("has_failure", &self.has_failure)
            .finish_non_exhaustive()
    }
}

/// `RunEvent.type` as a closed set; the words nobody knows are one of them. `[R-087]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEventType {
    Start,
    Delta,
    Complete,
    Error,
    Cancelled,
    /// Not forwarded, not terminal, counted.
    Other,
}

impl RunEventType {
    /// Ends the run.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        match self {
            Self::Complete | Self::Error | Self::Cancelled => true,
            Self::Start | Self::Delta | Self::Other => false,
        }
    }
}

/// `iop.RunEvent`. `[R-083]`
#[derive(Clone, Copy, Default)]
pub struct RunEventView<'a> {
    pub run_id: &'a [u8],
    /// `RunEvent.type` as spelled; see [`Self::event_type`].
    pub type_name: &'a [u8],
    pub delta: &'a [u8],
    pub error: &'a [u8],
    pub usage: Option<Usage>,
    /// Look up with [`Entries::get`].
    pub metadata: Entries<'a>,
    /// Present, even if empty; its content is read by the mapping module. `[R-130]` `[R-132]`
    pub has_failure: bool,
}

impl<'a> RunEventView<'a> {
    /// # Errors
    /// What the generated decoder refuses too.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ViewError> {
        use key::event::{DELTA, ERROR, FAILURE, KNOWN, METADATA, RUN_ID, TYPE, USAGE};
        let mut view = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_done() {
            let before = reader.rest.len();
            match reader.key()? {
                RUN_ID => view.run_id = reader.text(RUN_ID)?,
                TYPE => view.type_name = reader.text(TYPE)?,
                DELTA => view.delta = reader.text(DELTA)?,
                ERROR => view.error = reader.text(ERROR)?,
                USAGE => {
                    let usage = view.usage.get_or_insert_default();
                    read_usage(reader.bytes()?, usage, DEPTH_MAX - 1)?;
                }
                METADATA => {
                    read_entry(reader.bytes()?, Value::Text, DEPTH_MAX - 1)?;
                    view.metadata
                        .add(METADATA, bytes, before, reader.rest.len());
                }
                FAILURE => {
                    check_failure(reader.bytes()?, DEPTH_MAX - 1)?;
                    view.has_failure = true;
                }
                other => reader.unknown(other, KNOWN, DEPTH_MAX)?,
            }
        }
        Ok(view)
    }

    #[inline]
    #[must_use]
    pub const fn event_type(&self) -> RunEventType {
        match self.type_name {
            b"start" => RunEventType::Start,
            b"delta" => RunEventType::Delta,
            b"complete" => RunEventType::Complete,
            b"error" => RunEventType::Error,
            b"cancelled" => RunEventType::Cancelled,
            _ => RunEventType::Other,
        }
    }
}

impl fmt::Debug for RunEventView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunEventView")
            .field("run_id", &Ascii(self.run_id))
            .field("type", &self.event_type())
            .field("delta_bytes", &self.delta.len())
            .field("error_bytes", &self.error.len())
            .field("metadata", &self.metadata)
            .field("has_failure", &self.has_failure)
            .finish_non_exhaustive()
    }
}

/// `iop.RegisterRequest`. The token is a secret: compare it in constant time, print it never.
#[derive(Clone, Copy, Default)]
pub struct RegisterRequestView<'a> {
    pub node_id: &'a [u8],
    pub token: &'a [u8],
    pub node_version: &'a [u8],
}

impl fmt::Debug for RegisterRequestView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterRequestView")
            .field("node_id", &Ascii(self.node_id))
            .field("has_token", &!self.token.is_empty())
            .field("node_version", &Ascii(self.node_version))
            .finish()
    }
}

impl<'a> RegisterRequestView<'a> {
    /// # Errors
    /// What the generated decoder refuses too.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ViewError> {
        use key::register_request::{KNOWN, NODE_ID, TOKEN, VERSION};
        let mut view = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_done() {
            match reader.key()? {
                NODE_ID => view.node_id = reader.text(NODE_ID)?,
                TOKEN => view.token = reader.text(TOKEN)?,
                VERSION => view.node_version = reader.text(VERSION)?,
                other => reader.unknown(other, KNOWN, DEPTH_MAX)?,
            }
        }
        Ok(view)
    }
}

/// `iop.NodeReadyRequest`. `[R-037]`
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeReadyRequestView<'a> {
    pub node_id: &'a [u8],
}

impl<'a> NodeReadyRequestView<'a> {
    /// # Errors
    /// What the generated decoder refuses too.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ViewError> {
        use key::ready_request::{KNOWN, NODE_ID};
        let mut view = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_done() {
            match reader.key()? {
                NODE_ID => view.node_id = reader.text(NODE_ID)?,
                other => reader.unknown(other, KNOWN, DEPTH_MAX)?,
            }
        }
        Ok(view)
    }
}

/// Reads a message whose only field is one varint.
fn parse_varint(bytes: &[u8], key: u32, known: u32) -> Result<u64, ViewError> {
    let mut value = 0;
    let mut reader = Reader::new(bytes);
    while !reader.is_done() {
        match reader.key()? {
            found if found == key => value = reader.varint()?,
            other => reader.unknown(other, known, DEPTH_MAX)?,
        }
    }
    Ok(value)
}

macro_rules! varint_view {
    ($(#[$doc:meta])* $name:ident { $field:ident: $type:ty } $message:ident::$key:ident, $convert:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            pub $field: $type,
        }

        impl $name {
            /// # Errors
            /// What the generated decoder refuses too.
            pub fn parse(bytes: &[u8]) -> Result<Self, ViewError> {
                let value = parse_varint(bytes, key::$message::$key, key::$message::KNOWN)?;
                Ok(Self { $field: $convert(value) })
            }
        }
    };
}

varint_view! {
    /// `iop.transport.Ping`.
    PingView { seq: u64 } ping::SEQ, core::convert::identity
}
varint_view! {
    /// `iop.transport.Pong`: the `seq` of the ping it answers.
    PongView { seq: u64 } ping::SEQ, core::convert::identity
}
varint_view! {
    /// `iop.transport.GoAway`. `[D-07]`
    GoAwayView { grace_ms: u32 } go_away::GRACE, low32
}
varint_view! {
    /// `iop.transport.Features`.
    FeaturesView { window: bool } features::WINDOW, |value| value != 0
}
