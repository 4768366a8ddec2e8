//! Domain messages: what the wire messages mean, stricter than their bytes.
//!
//! Lives on: cold threads of the Edge, the node agent. Bound: one envelope each (`limits`).
//!
//! A broken rule inside a decodable message stays data here (half a credential pair, a crossed
//! health pair, a negative timeout): refusing it is a decision of a state machine, not a decode
//! error that would cost the connection. Nothing of a conversation and no secret is ever printed by
//! `Debug`: payloads show their length alone.
use core::fmt;
use std::collections::BTreeMap;

mod failure;
mod lease;
mod node;
mod run;
mod session;
mod snapshot;
mod tunnel;

pub use failure::{ExecutionFailure, FailureCode, Fence, HealthEvidence, HealthPair, Observation};
pub use lease::Lease;
pub use node::{
    Adapter, AdapterFault, AdapterKind, AdapterOptions, CommandKind, ConfigRefreshRequest,
    ConfigRefreshResponse, NodeCommandRequest, NodeCommandResponse, NodeConfig, OnCancel, Profile,
    ProfileOperation, RefreshStatus,
};
pub use run::{
    CancelRequest, HardTimeout, RunEvent, RunEventKind, RunRequest, StallTimeout, Usage, run_key,
};
pub use session::{
    Features, GoAway, NodeReadyRequest, NodeReadyResponse, Ping, Pong, RegisterRequest,
    RegisterResponse, Token, Window,
};
pub use snapshot::{NodeSnapshot, ProviderSnapshot};
pub use tunnel::{
    Credential, CredentialBinding, FrameKind, Header, LeaseEnvelope, TunnelFrame, TunnelRequest,
};

/// String-keyed values of a message. A key given twice on the wire keeps its last value.
pub type Metadata = BTreeMap<String, String>;

/// One message that an envelope can carry, with its direction.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// Node → Edge, first on a connection. `[R-019]`
    RegisterRequest(RegisterRequest),
    /// Edge → Node. `[R-021]`
    RegisterResponse(RegisterResponse),
    /// Node → Edge. `[R-037]`
    NodeReadyRequest(NodeReadyRequest),
    /// Edge → Node. `[R-039]`
    NodeReadyResponse(NodeReadyResponse),
    /// Edge → Node. `[R-082]`
    RunRequest(RunRequest),
    /// Node → Edge. `[R-083]`
    RunEvent(RunEvent),
    /// Edge → Node, run or tunnel. `[R-251]`
    CancelRequest(CancelRequest),
    /// Edge → Node. `[R-093]`
    TunnelRequest(TunnelRequest),
    /// Node → Edge. `[R-091]`
    TunnelFrame(TunnelFrame),
    /// Edge → Node.
    NodeCommandRequest(NodeCommandRequest),
    /// Node → Edge.
    NodeCommandResponse(NodeCommandResponse),
    /// Edge → Node.
    ConfigRefreshRequest(ConfigRefreshRequest),
    /// Node → Edge.
    ConfigRefreshResponse(ConfigRefreshResponse),
    /// Either way.
    Ping(Ping),
    /// Either way.
    Pong(Pong),
    /// Either way, optional. `[D-07]`
    GoAway(GoAway),
    /// Node → Edge, optional.
    Features(Features),
    /// Edge → Node, optional.
    Window(Window),
}

/// Shows how long something is, never what it says.
pub(crate) struct Len(pub(crate) usize);

impl fmt::Debug for Len {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} bytes>", self.0)
    }
}
