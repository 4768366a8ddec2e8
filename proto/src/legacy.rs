//! Legacy error strings of a node: what stands in `RunEvent.error` and `ProviderTunnelFrame.error`.
//! One table, so that the node writes what the Edge reads. `[R-146]` `[R-147]` `[D-40]`
//!
//! Lives on: any thread. Bound: fixed set; a text is a prefix, optionally `": "` and a detail.
use crate::reason::Reason;

/// The provider refused, broke off, or sent something that is not HTTP.
pub const PROVIDER_UNREACHABLE: &str = "provider unreachable";
/// The node refused before any provider call: boundary reject, unknown adapter or operation, full.
pub const NODE_REJECTED: &str = "node rejected";
/// The request's hard deadline passed. `[A-53]`
pub const DEADLINE_EXCEEDED: &str = "deadline exceeded";
/// A CancelRequest ended it. `[A-27]`
pub const CANCELLED: &str = "cancelled";
/// The node is shutting down and takes no new work. `[D-07]`
pub const DRAINING: &str = "draining";
/// No execution activity for the stall timeout.
pub const RESPONSE_STALLED: &str = "response stalled";

/// Longest legacy error our node writes, bytes: a prefix and a short detail, no payload.
pub const ERROR_BYTES_MAX: usize = 256;

const TABLE: [(&str, Reason); 6] = [
    (PROVIDER_UNREACHABLE, Reason::ProviderUnreachable),
    (NODE_REJECTED, Reason::NodeRejected),
    (DEADLINE_EXCEEDED, Reason::DeadlineExceeded),
    (CANCELLED, Reason::ClientGone),
    (DRAINING, Reason::NodeDraining),
    (RESPONSE_STALLED, Reason::ResponseStalled),
];

/// What an error text of a node means to the Edge. A text of no known prefix, the empty one
/// included, is the node's refusal. `[D-40]`
#[must_use]
pub fn reason(error: &[u8]) -> Reason {
    let known = TABLE.iter().find(|(prefix, _)| {
        error
            .strip_prefix(prefix.as_bytes())
            .is_some_and(|rest| matches!(rest, [] | [b':', ..]))
    });
    known.map_or(Reason::NodeRejected, |&(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefix_is_read_back_with_and_without_a_detail() {
        for (prefix, expected) in TABLE {
            assert_eq!(reason(prefix.as_bytes()), expected);
            assert_eq!(reason(format!("{prefix}: detail").as_bytes()), expected);
        }
    }

    #[test]
    fn an_unknown_text_is_the_nodes_refusal() {
        for text in [
            "",
            "draining-not",
            "Draining",
            "connection refused",
            "provider unreachablex",
        ] {
            assert_eq!(reason(text.as_bytes()), Reason::NodeRejected, "{text}");
        }
        assert_eq!(reason(b"\xff\xfe"), Reason::NodeRejected);
    }
}
