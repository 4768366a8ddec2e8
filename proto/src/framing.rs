//! HOT. Length prefix and the closed list of message types an envelope can name.
//!
//! Lives on: shards, agent, bench. View: bytes and type names alone. Bound: no state.
//!
//! ```text
//!  0        4                     4 + length      bytes
//!  +--------+---------------------+
//!  | length | iop.transport.Envelope |            length: u32 big-endian, 1 ..= the direction's limit
//!  +--------+---------------------+
//! ```
use core::fmt;

use crate::limits::LENGTH_PREFIX_BYTES;
use crate::reason::Reason;
use crate::view::ViewError;

pub use crate::assembler::{Assembler, Envelope, Kind, encode_envelope};

/// Why a stream of envelopes cannot be read on. The connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FramingError {
    /// A length prefix of zero.
    Empty,
    /// A length prefix over the direction's limit; nothing was allocated for it. `[D-02]`
    TooLong { length: u32, max: u32 },
    /// The envelope itself is not decodable.
    Malformed(ViewError),
}

impl FramingError {
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::Empty => Reason::EnvelopeEmpty,
            Self::TooLong { .. } => Reason::EnvelopeTooLong,
            Self::Malformed(_) => Reason::EnvelopeMalformed,
        }
    }
}

impl fmt::Display for FramingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("envelope of length 0"),
            Self::TooLong { length, max } => {
                write!(f, "envelope of {length} bytes, at most {max} are allowed")
            }
            Self::Malformed(error) => write!(f, "envelope: {error}"),
        }
    }
}

impl core::error::Error for FramingError {}

/// Length of the envelope that `prefix` announces, judged before anything is allocated. `[D-02]`
///
/// # Errors
/// `Empty` for 0, `TooLong` above `max`.
#[inline]
pub const fn envelope_len(
    prefix: [u8; LENGTH_PREFIX_BYTES as usize],
    max: u32,
) -> Result<u32, FramingError> {
    match u32::from_be_bytes(prefix) {
        0 => Err(FramingError::Empty),
        length if length > max => Err(FramingError::TooLong { length, max }),
        length => Ok(length),
    }
}

/// Who may send a message. `[D-01]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    NodeToEdge,
    EdgeToNode,
    Both,
}

macro_rules! message_types {
    ($($name:ident = $wire:literal, $direction:ident;)*) => {
        /// Every message an envelope of this protocol can carry.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum MessageType { $($name,)* }

        impl MessageType {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Fully qualified name, as `Envelope.type` carries it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $wire,)* }
            }

            /// The only side that may send it, or both. `[R-088]`
            #[must_use]
            pub const fn direction(self) -> Direction {
                match self { $(Self::$name => Direction::$direction,)* }
            }

            fn search(name: &[u8]) -> Option<Self> {
                $(if name == $wire.as_bytes() { return Some(Self::$name); })*
                None
            }
        }
    };
}

message_types! {
    RegisterRequest = "iop.RegisterRequest", NodeToEdge;
    RegisterResponse = "iop.RegisterResponse", EdgeToNode;
    NodeReadyRequest = "iop.NodeReadyRequest", NodeToEdge;
    NodeReadyResponse = "iop.NodeReadyResponse", EdgeToNode;
    RunRequest = "iop.RunRequest", EdgeToNode;
    RunEvent = "iop.RunEvent", NodeToEdge;
    CancelRequest = "iop.CancelRequest", EdgeToNode;
    ProviderTunnelRequest = "iop.ProviderTunnelRequest", EdgeToNode;
    ProviderTunnelFrame = "iop.ProviderTunnelFrame", NodeToEdge;
    NodeCommandRequest = "iop.NodeCommandRequest", EdgeToNode;
    NodeCommandResponse = "iop.NodeCommandResponse", NodeToEdge;
    NodeConfigRefreshRequest = "iop.NodeConfigRefreshRequest", EdgeToNode;
    NodeConfigRefreshResponse = "iop.NodeConfigRefreshResponse", NodeToEdge;
    Ping = "iop.transport.Ping", Both;
    Pong = "iop.transport.Pong", Both;
    GoAway = "iop.transport.GoAway", Both;
    Features = "iop.transport.Features", NodeToEdge;
    Window = "iop.transport.Window", EdgeToNode;
}

impl MessageType {
    /// The type of that exact name; `None` is an unknown envelope, to be ignored once the peer is
    /// registered. `[D-01]`
    #[inline]
    #[must_use]
    pub fn from_name(name: &[u8]) -> Option<Self> {
        if name == Self::ProviderTunnelFrame.name().as_bytes() {
            return Some(Self::ProviderTunnelFrame); // nearly every envelope on the hot path
        }
        Self::search(name)
    }

    /// A node may send it.
    #[must_use]
    pub const fn from_node(self) -> bool {
        matches!(self.direction(), Direction::NodeToEdge | Direction::Both)
    }

    /// An Edge may send it.
    #[must_use]
    pub const fn from_edge(self) -> bool {
        matches!(self.direction(), Direction::EdgeToNode | Direction::Both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_finds_its_own_type_and_no_near_name_does() {
        for &kind in MessageType::ALL {
            let name = kind.name();
            assert_eq!(MessageType::from_name(name.as_bytes()), Some(kind));
            assert_eq!(MessageType::from_name(&name.as_bytes()[1..]), None);
            assert_eq!(MessageType::from_name(name.to_uppercase().as_bytes()), None);
            assert!(kind.from_node() || kind.from_edge());
        }
        assert_eq!(MessageType::from_name(b""), None);
        assert_eq!(MessageType::from_name(b"iop.NodeConfigPayload"), None);
    }

    #[test]
    fn the_last_legal_length_passes_and_the_first_illegal_one_does_not() {
        assert_eq!(envelope_len([0, 0, 0, 0], 9), Err(FramingError::Empty));
        assert_eq!(envelope_len([0, 0, 0, 1], 9), Ok(1));
        assert_eq!(envelope_len([0, 0, 0, 9], 9), Ok(9));
        let too_long = FramingError::TooLong { length: 10, max: 9 };
        assert_eq!(envelope_len([0, 0, 0, 10], 9), Err(too_long));
        assert_eq!(too_long.reason(), Reason::EnvelopeTooLong);
        assert!(envelope_len([255; 4], u32::MAX - 1).is_err());
    }
}
