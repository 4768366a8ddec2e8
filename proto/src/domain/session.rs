//! Registration, readiness, heartbeat and the optional transport messages.
//!
//! Lives on: see `domain`. Bound: one envelope each.
use core::fmt;

use super::NodeConfig;

/// A registration token. Never printed, never in status. `[R-351]`
#[derive(Clone, Default, PartialEq, Eq)]
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct Token(String);

impl Token {
    #[must_use]
    pub const fn new(token: String) -> Self {
        Self(token)
    }

    /// Empty means that the peer sent none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The secret itself, for the one comparison or the one message that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

/// A node claims its id. `[R-019]`
#[derive(Clone, Default, PartialEq)]
pub struct RegisterRequest {
    /// Claimed node id; in managed mode the certificate must name it. `[A-02]`
    pub node_id: String,
    /// Empty where no token is used.
    pub token: Token,
    /// Diagnostic alone.
    pub node_version: String,
}

impl fmt::Debug for RegisterRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterRequest")
            .field("node_id", &self.node_id)
            .field("has_token", &!self.token.is_empty())
            .field("node_version", &self.node_version)
            .finish()
    }
}

/// The Edge's answer to a claim. `[R-021]`
#[derive(Clone, Debug, PartialEq)]
pub enum RegisterResponse {
    Accepted {
        /// Identity to use in `NodeReadyRequest`. `[R-023]`
        node_id: String,
        /// `None` is a violation of the Edge. `[R-022]`
        config: Option<NodeConfig>,
    },
    Rejected {
        reason: String,
    },
}

/// The node has started its adapters. `[R-037]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeReadyRequest {
    pub node_id: String,
}

/// `ready`: dispatch may begin. Otherwise `reason` says why not. `[R-039]` `[R-040]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeReadyResponse {
    pub ready: bool,
    pub reason: String,
}

/// Sent after a silence of our own; answered by [`Pong`] with the same `seq`. `[D-03]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ping {
    pub seq: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pong {
    pub seq: u64,
}

/// The sender closes this session within `grace_ms`. `[D-07]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GoAway {
    pub grace_ms: u32,
}

/// What the agent understands beyond the contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub window: bool,
}

/// Total body bytes the node may send for this run so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub run_id: String,
    pub bytes: u64,
}
