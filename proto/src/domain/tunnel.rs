//! Provider raw tunnel: request with its credential pair, and frames.
//!
//! Lives on: see `domain`. Bound: one envelope each.
use core::fmt;

use bytes::Bytes;

use super::{ExecutionFailure, HardTimeout, Len, Metadata, StallTimeout, Usage};

/// One HTTP header line, in order and with duplicates. `[A-30]`
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    pub name: String,
    /// Any bytes: providers send more than UTF-8.
    pub value: Bytes,
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(&self.name)
            .field(&Len(self.value.len()))
            .finish()
    }
}

/// A sealed, signed credential envelope. Never printed, even though sealed. `[R-221]`
#[derive(Clone, PartialEq, Eq)]
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct LeaseEnvelope(Bytes);

impl LeaseEnvelope {
    /// `None` for empty bytes, which mean absence on the wire.
    #[must_use]
    pub fn new(sealed: Bytes) -> Option<Self> {
        (!sealed.is_empty()).then_some(Self(sealed))
    }

    #[must_use]
    pub const fn expose(&self) -> &Bytes {
        &self.0
    }
}

/// What a credential lease is bound to: ten independent components. `[R-228]`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CredentialBinding {
    pub principal: String,
    pub slot: String,
    pub route: String,
    pub profile: String,
    pub upstream_target: String,
    pub node_id: String,
    pub recipient: String,
    pub credential_revision: u64,
    pub route_revision: u64,
    /// Of the credential projection; not a connection generation.
    pub projection_generation: u64,
}

/// The inseparable pair as it came. `[R-221]`
#[derive(Clone, Default, PartialEq)]
pub enum Credential {
    #[default]
    None,
    Managed {
        lease: LeaseEnvelope,
        binding: CredentialBinding,
    },
    /// Half a pair: rejected at the node.
    LeaseAlone(LeaseEnvelope),
    /// Half a pair: rejected at the node.
    BindingAlone(CredentialBinding),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Managed { .. } => "Managed",
            Self::LeaseAlone(_) => "LeaseAlone",
            Self::BindingAlone(_) => "BindingAlone",
        })
    }
}

/// Opens a raw tunnel to a provider. `[R-093]`
#[derive(Clone, Default, PartialEq)]
pub struct TunnelRequest {
    pub run_id: String,
    pub adapter: String,
    pub target: String,
    pub method: String,
    /// Also set when `operation` is. `[R-099]`
    pub path: String,
    pub headers: Vec<Header>,
    /// Final serialized body.
    pub body: Bytes,
    pub stream: bool,
    pub timeout: HardTimeout,
    pub metadata: Metadata,
    pub session_id: String,
    /// Empty: `path` says where. `[R-098]`
    pub operation: String,
    pub credential: Credential,
    pub stall_timeout: StallTimeout,
}

impl fmt::Debug for TunnelRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelRequest")
            .field("run_id", &self.run_id)
            .field("adapter", &self.adapter)
            .field("target", &self.target)
            .field("method", &self.method)
            .field("path", &self.path)
            .field("headers", &self.headers)
            .field("body", &Len(self.body.len()))
            .field("stream", &self.stream)
            .field("timeout", &self.timeout)
            .field("operation", &self.operation)
            .field("credential", &self.credential)
            .field("stall_timeout", &self.stall_timeout)
            .finish_non_exhaustive()
    }
}

/// `ProviderTunnelFrame.kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    ResponseStart,
    Body,
    End,
    Error,
    Usage,
    /// Sequence-checked, not forwarded, not terminal, counted.
    Unknown(i32),
}

impl FrameKind {
    #[must_use]
    pub const fn from_wire(kind: i32) -> Self {
        match kind {
            1 => Self::ResponseStart,
            2 => Self::Body,
            3 => Self::End,
            4 => Self::Error,
            5 => Self::Usage,
            other => Self::Unknown(other),
        }
    }

    #[must_use]
    pub const fn to_wire(self) -> i32 {
        match self {
            Self::ResponseStart => 1,
            Self::Body => 2,
            Self::End => 3,
            Self::Error => 4,
            Self::Usage => 5,
            Self::Unknown(other) => other,
        }
    }

    /// Ends the tunnel.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        match self {
            Self::End | Self::Error => true,
            Self::ResponseStart | Self::Body | Self::Usage | Self::Unknown(_) => false,
        }
    }
}

/// One frame of a tunnel's answer. Fields of another kind than `kind` stay as they came. `[R-091]`
#[derive(Clone, PartialEq)]
pub struct TunnelFrame {
    pub run_id: String,
    pub kind: FrameKind,
    /// Counts 1, 2, 3 … over all kinds of one tunnel. `[A-29]`
    pub sequence: u64,
    /// Of `ResponseStart`.
    pub status_code: i32,
    /// Of `ResponseStart`.
    pub headers: Vec<Header>,
    /// Of `Body`.
    pub body: Bytes,
    /// Legacy text of `Error`.
    pub error: String,
    pub usage: Option<Usage>,
    pub metadata: Metadata,
    /// On a stall `Error` alone. `[R-131]` `[R-145]`
    pub failure: Option<ExecutionFailure>,
}

impl TunnelFrame {
    /// A frame that says nothing but its kind.
    #[must_use]
    pub const fn new(run_id: String, kind: FrameKind, sequence: u64) -> Self {
        Self {
            run_id,
            kind,
            sequence,
            status_code: 0,
            headers: Vec::new(),
            body: Bytes::new(),
            error: String::new(),
            usage: None,
            metadata: Metadata::new(),
            failure: None,
        }
    }
}

impl fmt::Debug for TunnelFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TunnelFrame")
            .field("run_id", &self.run_id)
            .field("kind", &self.kind)
            .field("sequence", &self.sequence)
            .field("status_code", &self.status_code)
            .field("headers", &self.headers)
            .field("body", &Len(self.body.len()))
            .field("error", &self.error)
            .field("usage", &self.usage)
            .field("metadata", &Len(self.metadata.len()))
            .field("failure", &self.failure)
            .finish()
    }
}
