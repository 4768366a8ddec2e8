//! The mapping between generated and domain types: the only module that names a generated type.
//!
//! Lives on: cold threads of the Edge, the node agent. View: one message. Bound: its envelope.
//!
//! Decoding keeps every broken rule as data; it fails only where the bytes are not the message.
use core::fmt;

use bytes::{Buf, Bytes};
use prost::Message as _;

use crate::domain::{
    CancelRequest, CommandKind, Credential, CredentialBinding, ExecutionFailure, FailureCode,
    Features, Fence, FrameKind, GoAway, HardTimeout, Header, HealthEvidence, HealthPair,
    LeaseEnvelope, Message, Metadata, NodeCommandRequest, NodeCommandResponse, NodeConfig,
    NodeReadyRequest, NodeReadyResponse, NodeSnapshot, Observation, Ping, Pong, RefreshStatus,
    RegisterRequest, RegisterResponse, RunEvent, RunEventKind, RunRequest, StallTimeout, Token,
    TunnelFrame, TunnelRequest, Usage, Window,
};
use crate::framing::MessageType;

mod config;
mod lease;
mod snapshot;

pub use lease::{decode_lease, encode_binding, encode_lease};

#[expect(
    unreachable_pub,
    missing_debug_implementations,
    reason = "generated; three messages may hold a secret"
)]
#[allow(
    dead_code,
    reason = "generated, some for consumers to come; `expect` would count as a use"
)]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/iop.rs"));

    pub(super) mod transport {
        include!(concat!(env!("OUT_DIR"), "/iop.transport.rs"));
    }

    pub(super) mod lease {
        include!(concat!(env!("OUT_DIR"), "/iop.lease.rs"));
    }
}

/// Encoded `google.protobuf.FileDescriptorSet` of `iop/*.proto`, without comments and positions.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptor.bin"));

/// Digest of the schema: FNV-1a, 128 bits, over [`FILE_DESCRIPTOR_SET`]. It notices a change, it does
/// not withstand an adversary. `[R-298]`
#[must_use]
pub const fn descriptor_digest() -> u128 {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut at = 0;
    while at < FILE_DESCRIPTOR_SET.len() {
        hash ^= FILE_DESCRIPTOR_SET[at] as u128;
        hash = hash.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        at += 1;
    }
    hash
}

/// A payload that is not the message its envelope names. The peer's fault; nothing of it was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireError {
    /// Fully qualified name of the message.
    pub message: &'static str,
    source: prost::DecodeError,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.message, self.source)
    }
}

impl core::error::Error for WireError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// The message's type and payload, for [`crate::framing::encode_envelope`].
#[must_use]
pub fn encode(message: &Message) -> (MessageType, Bytes) {
    use MessageType as T;
    match message {
        Message::RegisterRequest(m) => pack(T::RegisterRequest, &wire::RegisterRequest::from(m)),
        Message::RegisterResponse(m) => pack(T::RegisterResponse, &wire::RegisterResponse::from(m)),
        Message::NodeReadyRequest(m) => pack(T::NodeReadyRequest, &wire::NodeReadyRequest::from(m)),
        Message::NodeReadyResponse(m) => {
            pack(T::NodeReadyResponse, &wire::NodeReadyResponse::from(m))
        }
        Message::RunRequest(m) => pack(T::RunRequest, &wire::RunRequest::from(m)),
        Message::RunEvent(m) => pack(T::RunEvent, &wire::RunEvent::from(m)),
        Message::CancelRequest(m) => pack(T::CancelRequest, &wire::CancelRequest::from(m)),
        Message::TunnelRequest(m) => pack(
            T::ProviderTunnelRequest,
            &wire::ProviderTunnelRequest::from(m),
        ),
        Message::TunnelFrame(m) => {
            pack(T::ProviderTunnelFrame, &wire::ProviderTunnelFrame::from(m))
        }
        Message::NodeCommandRequest(m) => {
            pack(T::NodeCommandRequest, &wire::NodeCommandRequest::from(m))
        }
        Message::NodeCommandResponse(m) => {
            pack(T::NodeCommandResponse, &wire::NodeCommandResponse::from(m))
        }
        Message::ConfigRefreshRequest(m) => pack(
            T::NodeConfigRefreshRequest,
            &wire::NodeConfigRefreshRequest::from(m),
        ),
        Message::ConfigRefreshResponse(m) => pack(
            T::NodeConfigRefreshResponse,
            &wire::NodeConfigRefreshResponse::from(m),
        ),
        Message::Ping(m) => pack(T::Ping, &wire::transport::Ping { seq: m.seq }),
        Message::Pong(m) => pack(T::Pong, &wire::transport::Pong { seq: m.seq }),
        Message::GoAway(m) => pack(
            T::GoAway,
            &wire::transport::GoAway {
                grace_ms: m.grace_ms,
            },
        ),
        Message::Features(m) => pack(T::Features, &wire::transport::Features { window: m.window }),
        Message::Window(m) => pack(T::Window, &wire::transport::Window::from(m)),
    }
}

fn pack(kind: MessageType, message: &impl prost::Message) -> (MessageType, Bytes) {
    (kind, message.encode_to_vec().into())
}

/// The message that `payload` holds; its byte fields are copied.
///
/// # Errors
/// `payload` is not an encoding of `kind`.
pub fn decode(kind: MessageType, payload: &[u8]) -> Result<Message, WireError> {
    decode_from(kind, payload)
}

/// Like [`decode`], but byte fields (a request's body) share `payload`'s memory.
///
/// # Errors
/// `payload` is not an encoding of `kind`.
pub fn decode_shared(kind: MessageType, payload: Bytes) -> Result<Message, WireError> {
    decode_from(kind, payload)
}

fn decode_from(kind: MessageType, payload: impl Buf) -> Result<Message, WireError> {
    use MessageType as T;
    let name = kind.name();
    Ok(match kind {
        T::RegisterRequest => {
            Message::RegisterRequest(take::<wire::RegisterRequest>(name, payload)?.into())
        }
        T::RegisterResponse => {
            Message::RegisterResponse(take::<wire::RegisterResponse>(name, payload)?.into())
        }
        T::NodeReadyRequest => {
            Message::NodeReadyRequest(take::<wire::NodeReadyRequest>(name, payload)?.into())
        }
        T::NodeReadyResponse => {
            Message::NodeReadyResponse(take::<wire::NodeReadyResponse>(name, payload)?.into())
        }
        T::RunRequest => Message::RunRequest(take::<wire::RunRequest>(name, payload)?.into()),
        T::RunEvent => Message::RunEvent(take::<wire::RunEvent>(name, payload)?.into()),
        T::CancelRequest => {
            Message::CancelRequest(take::<wire::CancelRequest>(name, payload)?.into())
        }
        T::ProviderTunnelRequest => {
            Message::TunnelRequest(take::<wire::ProviderTunnelRequest>(name, payload)?.into())
        }
        T::ProviderTunnelFrame => {
            Message::TunnelFrame(take::<wire::ProviderTunnelFrame>(name, payload)?.into())
        }
        T::NodeCommandRequest => {
            Message::NodeCommandRequest(take::<wire::NodeCommandRequest>(name, payload)?.into())
        }
        T::NodeCommandResponse => {
            Message::NodeCommandResponse(take::<wire::NodeCommandResponse>(name, payload)?.into())
        }
        T::NodeConfigRefreshRequest => {
            let message: wire::NodeConfigRefreshRequest = take(name, payload)?;
            Message::ConfigRefreshRequest(message.into())
        }
        T::NodeConfigRefreshResponse => {
            let message: wire::NodeConfigRefreshResponse = take(name, payload)?;
            Message::ConfigRefreshResponse(message.into())
        }
        T::Ping | T::Pong | T::GoAway | T::Features | T::Window => {
            return decode_transport(kind, payload);
        }
    })
}

/// The transport's own messages; every other kind is handled by the caller.
fn decode_transport(kind: MessageType, payload: impl Buf) -> Result<Message, WireError> {
    use wire::transport as t;
    let name = kind.name();
    Ok(match kind {
        MessageType::Pong => Message::Pong(Pong {
            seq: take::<t::Pong>(name, payload)?.seq,
        }),
        MessageType::GoAway => Message::GoAway(GoAway {
            grace_ms: take::<t::GoAway>(name, payload)?.grace_ms,
        }),
        MessageType::Features => Message::Features(Features {
            window: take::<t::Features>(name, payload)?.window,
        }),
        MessageType::Window => Message::Window(take::<t::Window>(name, payload)?.into()),
        _ => Message::Ping(Ping {
            seq: take::<t::Ping>(name, payload)?.seq,
        }),
    })
}

fn take<M: prost::Message + Default>(
    message: &'static str,
    payload: impl Buf,
) -> Result<M, WireError> {
    M::decode(payload).map_err(|source| WireError { message, source })
}

/// Encoded `iop.NodeConfigPayload`, to be embedded in a registration answer as it is.
#[must_use]
pub fn encode_node_config(config: &NodeConfig) -> Vec<u8> {
    wire::NodeConfigPayload::from(config).encode_to_vec()
}

/// # Errors
/// `payload` is not an encoding of `iop.NodeConfigPayload`.
pub fn decode_node_config(payload: &[u8]) -> Result<NodeConfig, WireError> {
    Ok(take::<wire::NodeConfigPayload>("iop.NodeConfigPayload", payload)?.into())
}

/// Encoded `iop.NodeSnapshot` behind its length as a varint, for status consumers, who read one after
/// another. `[R-266]` `[A-45]`
#[must_use]
pub fn encode_node_snapshot(snapshot: &NodeSnapshot) -> Vec<u8> {
    wire::NodeSnapshot::from(snapshot).encode_length_delimited_to_vec()
}

// Numbers of the domain's enums, which cannot name the generated ones.
const _: () = {
    use wire::{NodeCommandType, NodeConfigRefreshStatus, ProviderTunnelFrameKind as Kind};
    assert!(FrameKind::ResponseStart.to_wire() == Kind::ResponseStart as i32);
    assert!(FrameKind::Body.to_wire() == Kind::Body as i32);
    assert!(FrameKind::End.to_wire() == Kind::End as i32);
    assert!(FrameKind::Error.to_wire() == Kind::Error as i32);
    assert!(FrameKind::Usage.to_wire() == Kind::Usage as i32);
    assert!(CommandKind::Capabilities.to_wire() == NodeCommandType::Capabilities as i32);
    assert!(CommandKind::TransportStatus.to_wire() == NodeCommandType::TransportStatus as i32);
    assert!(CommandKind::ProviderStatus.to_wire() == NodeCommandType::ProviderStatus as i32);
    assert!(RefreshStatus::Applied.to_wire() == NodeConfigRefreshStatus::Applied as i32);
    let restart_required = NodeConfigRefreshStatus::RestartRequired as i32;
    assert!(RefreshStatus::RestartRequired.to_wire() == restart_required);
    assert!(RefreshStatus::Failed.to_wire() == NodeConfigRefreshStatus::Failed as i32);
};

// ── registration and readiness ────────────────────────────────────────────────────────────────────

impl From<&RegisterRequest> for wire::RegisterRequest {
    fn from(m: &RegisterRequest) -> Self {
        Self {
            node_id: m.node_id.clone(),
            token: m.token.expose().to_owned(),
            node_version: m.node_version.clone(),
        }
    }
}

impl From<wire::RegisterRequest> for RegisterRequest {
    fn from(m: wire::RegisterRequest) -> Self {
        let token = Token::new(m.token);
        Self {
            node_id: m.node_id,
            token,
            node_version: m.node_version,
        }
    }
}

impl From<&RegisterResponse> for wire::RegisterResponse {
    fn from(m: &RegisterResponse) -> Self {
        match m {
            RegisterResponse::Accepted { node_id, config } => Self {
                accepted: true,
                reason: String::new(),
                node_id: node_id.clone(),
                config: config.as_ref().map(Into::into),
            },
            RegisterResponse::Rejected { reason } => Self {
                reason: reason.clone(),
                ..Self::default()
            },
        }
    }
}

impl From<wire::RegisterResponse> for RegisterResponse {
    fn from(m: wire::RegisterResponse) -> Self {
        if m.accepted {
            Self::Accepted {
                node_id: m.node_id,
                config: m.config.map(Into::into),
            }
        } else {
            Self::Rejected { reason: m.reason }
        }
    }
}

impl From<&NodeReadyRequest> for wire::NodeReadyRequest {
    fn from(m: &NodeReadyRequest) -> Self {
        Self {
            node_id: m.node_id.clone(),
        }
    }
}

impl From<wire::NodeReadyRequest> for NodeReadyRequest {
    fn from(m: wire::NodeReadyRequest) -> Self {
        Self { node_id: m.node_id }
    }
}

impl From<&NodeReadyResponse> for wire::NodeReadyResponse {
    fn from(m: &NodeReadyResponse) -> Self {
        Self {
            ready: m.ready,
            reason: m.reason.clone(),
        }
    }
}

impl From<wire::NodeReadyResponse> for NodeReadyResponse {
    fn from(m: wire::NodeReadyResponse) -> Self {
        Self {
            ready: m.ready,
            reason: m.reason,
        }
    }
}

// ── normalized execution ──────────────────────────────────────────────────────────────────────────

impl From<&RunRequest> for wire::RunRequest {
    fn from(m: &RunRequest) -> Self {
        Self {
            run_id: m.run_id.clone(),
            adapter: m.adapter.clone(),
            target: m.target.clone(),
            input: m.input.clone(),
            metadata: m.metadata.clone(),
            session_id: m.session_id.clone(),
            timeout_sec: m.timeout.to_wire(),
            response_stall_timeout_ms: m.stall_timeout.to_wire(),
        }
    }
}

impl From<wire::RunRequest> for RunRequest {
    fn from(m: wire::RunRequest) -> Self {
        Self {
            run_id: m.run_id,
            adapter: m.adapter,
            target: m.target,
            input: m.input,
            metadata: m.metadata,
            session_id: m.session_id,
            timeout: HardTimeout::from_wire(m.timeout_sec),
            stall_timeout: StallTimeout::from_wire(m.response_stall_timeout_ms),
        }
    }
}

impl From<Usage> for wire::Usage {
    fn from(m: Usage) -> Self {
        let Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        } = m;
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        }
    }
}

impl From<wire::Usage> for Usage {
    fn from(m: wire::Usage) -> Self {
        let wire::Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        } = m;
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        }
    }
}

impl From<&RunEvent> for wire::RunEvent {
    fn from(m: &RunEvent) -> Self {
        Self {
            run_id: m.run_id.clone(),
            r#type: m.kind.name().to_owned(),
            delta: m.delta.clone(),
            error: m.error.clone(),
            usage: m.usage.map(Into::into),
            metadata: m.metadata.clone(),
            failure: m.failure.as_ref().map(Into::into),
        }
    }
}

impl From<wire::RunEvent> for RunEvent {
    fn from(m: wire::RunEvent) -> Self {
        Self {
            run_id: m.run_id,
            kind: RunEventKind::from_name(m.r#type),
            delta: m.delta,
            error: m.error,
            usage: m.usage.map(Into::into),
            metadata: m.metadata,
            failure: evidence(m.failure),
        }
    }
}

impl From<&CancelRequest> for wire::CancelRequest {
    fn from(m: &CancelRequest) -> Self {
        Self {
            run_id: m.run_id.clone(),
        }
    }
}

impl From<wire::CancelRequest> for CancelRequest {
    fn from(m: wire::CancelRequest) -> Self {
        Self { run_id: m.run_id }
    }
}

// ── stall evidence ────────────────────────────────────────────────────────────────────────────────

/// Keys of `ExecutionFailure.metadata`; every other key is dropped and counted. `[A-57]`
mod failure_key {
    pub(super) const HEALTH: &str = "provider_health";
    pub(super) const CLASSIFICATION: &str = "liveness_classification";
    pub(super) const IDLE: &str = "idle_duration_ms";
    pub(super) const RUN_ID: &str = "run_id";
    pub(super) const ATTEMPT_ID: &str = "attempt_id";
    pub(super) const FENCE: &str = "fence";
    pub(super) const ADAPTER: &str = "adapter";
    pub(super) const TARGET: &str = "target";
    pub(super) const OBSERVATION: &str = "health_observation_seq";
}

impl From<&ExecutionFailure> for wire::ExecutionFailure {
    fn from(m: &ExecutionFailure) -> Self {
        let (health, classification) = match &m.health {
            HealthPair::Known(pair) => (
                Some(pair.health().to_owned()),
                Some(pair.classification().to_owned()),
            ),
            HealthPair::Invalid {
                health,
                classification,
            } => (health.clone(), classification.clone()),
        };
        let values = [
            (failure_key::HEALTH, health),
            (failure_key::CLASSIFICATION, classification),
            (failure_key::IDLE, m.idle_ms.map(|ms| ms.to_string())),
            (failure_key::RUN_ID, m.run_id.clone()),
            (failure_key::ATTEMPT_ID, m.attempt_id.clone()),
            (
                failure_key::FENCE,
                m.fence.as_ref().map(|fence| fence.name().to_owned()),
            ),
            (failure_key::ADAPTER, m.adapter.clone()),
            (failure_key::TARGET, m.target.clone()),
            (failure_key::OBSERVATION, m.observation.to_text()),
        ];
        Self {
            failure_code: m.code.name().to_owned(),
            metadata: values
                .into_iter()
                .filter_map(|(key, value)| Some((key.to_owned(), value?)))
                .collect(),
        }
    }
}

impl From<wire::ExecutionFailure> for ExecutionFailure {
    fn from(m: wire::ExecutionFailure) -> Self {
        let mut values = m.metadata;
        let mut take = |key: &str| values.remove(key);
        let failure = Self {
            code: FailureCode::from_name(m.failure_code),
            health: health_pair(take(failure_key::HEALTH), take(failure_key::CLASSIFICATION)),
            idle_ms: take(failure_key::IDLE).and_then(|text| text.parse().ok()),
            run_id: take(failure_key::RUN_ID),
            attempt_id: take(failure_key::ATTEMPT_ID),
            fence: take(failure_key::FENCE).map(Fence::from_name),
            adapter: take(failure_key::ADAPTER),
            target: take(failure_key::TARGET),
            observation: Observation::from_text(take(failure_key::OBSERVATION)),
            dropped_keys: 0,
        };
        Self {
            dropped_keys: u32::try_from(values.len()).unwrap_or(u32::MAX),
            ..failure
        }
    }
}

/// Keeps presence: an absent failure is no stall, an empty one is a stall without evidence. `[R-132]`
fn evidence(failure: Option<wire::ExecutionFailure>) -> Option<ExecutionFailure> {
    failure.map(ExecutionFailure::from)
}

fn health_pair(health: Option<String>, classification: Option<String>) -> HealthPair {
    HealthEvidence::ALL
        .into_iter()
        .find(|pair| {
            health.as_deref() == Some(pair.health())
                && classification.as_deref() == Some(pair.classification())
        })
        .map_or(
            HealthPair::Invalid {
                health,
                classification,
            },
            HealthPair::Known,
        )
}

// ── provider raw tunnel ───────────────────────────────────────────────────────────────────────────

impl From<&Header> for wire::HeaderEntry {
    fn from(m: &Header) -> Self {
        Self {
            key: m.name.clone(),
            value: m.value.clone(),
        }
    }
}

impl From<wire::HeaderEntry> for Header {
    fn from(m: wire::HeaderEntry) -> Self {
        Self {
            name: m.key,
            value: m.value,
        }
    }
}

impl From<&CredentialBinding> for wire::CredentialLeaseBinding {
    fn from(m: &CredentialBinding) -> Self {
        Self {
            principal: m.principal.clone(),
            slot: m.slot.clone(),
            route: m.route.clone(),
            profile: m.profile.clone(),
            upstream_target: m.upstream_target.clone(),
            node_id: m.node_id.clone(),
            recipient: m.recipient.clone(),
            credential_revision: m.credential_revision,
            route_revision: m.route_revision,
            projection_generation: m.projection_generation,
        }
    }
}

impl From<wire::CredentialLeaseBinding> for CredentialBinding {
    fn from(m: wire::CredentialLeaseBinding) -> Self {
        Self {
            principal: m.principal,
            slot: m.slot,
            route: m.route,
            profile: m.profile,
            upstream_target: m.upstream_target,
            node_id: m.node_id,
            recipient: m.recipient,
            credential_revision: m.credential_revision,
            route_revision: m.route_revision,
            projection_generation: m.projection_generation,
        }
    }
}

impl From<&TunnelRequest> for wire::ProviderTunnelRequest {
    fn from(m: &TunnelRequest) -> Self {
        let (lease, binding) = match &m.credential {
            Credential::None => (None, None),
            Credential::Managed { lease, binding } => (Some(lease), Some(binding)),
            Credential::LeaseAlone(lease) => (Some(lease), None),
            Credential::BindingAlone(binding) => (None, Some(binding)),
        };
        Self {
            run_id: m.run_id.clone(),
            adapter: m.adapter.clone(),
            target: m.target.clone(),
            method: m.method.clone(),
            path: m.path.clone(),
            headers: m.headers.iter().map(Into::into).collect(),
            body: m.body.clone(),
            stream: m.stream,
            timeout_sec: m.timeout.to_wire(),
            metadata: m.metadata.clone(),
            session_id: m.session_id.clone(),
            operation: m.operation.clone(),
            credential_lease: lease
                .map(|lease| lease.expose().clone())
                .unwrap_or_default(),
            credential_binding: binding.map(Into::into),
            response_stall_timeout_ms: m.stall_timeout.to_wire(),
        }
    }
}

impl From<wire::ProviderTunnelRequest> for TunnelRequest {
    fn from(m: wire::ProviderTunnelRequest) -> Self {
        let lease = LeaseEnvelope::new(m.credential_lease);
        let credential = match (lease, m.credential_binding.map(Into::into)) {
            (None, None) => Credential::None,
            (Some(lease), Some(binding)) => Credential::Managed { lease, binding },
            (Some(lease), None) => Credential::LeaseAlone(lease),
            (None, Some(binding)) => Credential::BindingAlone(binding),
        };
        Self {
            run_id: m.run_id,
            adapter: m.adapter,
            target: m.target,
            method: m.method,
            path: m.path,
            headers: m.headers.into_iter().map(Into::into).collect(),
            body: m.body,
            stream: m.stream,
            timeout: HardTimeout::from_wire(m.timeout_sec),
            metadata: m.metadata,
            session_id: m.session_id,
            operation: m.operation,
            credential,
            stall_timeout: StallTimeout::from_wire(m.response_stall_timeout_ms),
        }
    }
}

impl From<&TunnelFrame> for wire::ProviderTunnelFrame {
    fn from(m: &TunnelFrame) -> Self {
        Self {
            run_id: m.run_id.clone(),
            kind: m.kind.to_wire(),
            sequence: m.sequence,
            status_code: m.status_code,
            headers: m.headers.iter().map(Into::into).collect(),
            body: m.body.clone(),
            error: m.error.clone(),
            usage: m.usage.map(Into::into),
            metadata: m.metadata.clone(),
            failure: m.failure.as_ref().map(Into::into),
        }
    }
}

impl From<wire::ProviderTunnelFrame> for TunnelFrame {
    fn from(m: wire::ProviderTunnelFrame) -> Self {
        Self {
            run_id: m.run_id,
            kind: FrameKind::from_wire(m.kind),
            sequence: m.sequence,
            status_code: m.status_code,
            headers: m.headers.into_iter().map(Into::into).collect(),
            body: m.body,
            error: m.error,
            usage: m.usage.map(Into::into),
            metadata: m.metadata,
            failure: evidence(m.failure),
        }
    }
}

// ── commands ──────────────────────────────────────────────────────────────────────────────────────

impl From<&NodeCommandRequest> for wire::NodeCommandRequest {
    fn from(m: &NodeCommandRequest) -> Self {
        Self {
            command_id: m.command_id.clone(),
            r#type: m.kind.to_wire(),
            adapter: m.adapter.clone(),
            target: m.target.clone(),
        }
    }
}

impl From<wire::NodeCommandRequest> for NodeCommandRequest {
    fn from(m: wire::NodeCommandRequest) -> Self {
        let kind = CommandKind::from_wire(m.r#type);
        Self {
            command_id: m.command_id,
            kind,
            adapter: m.adapter,
            target: m.target,
        }
    }
}

impl From<&NodeCommandResponse> for wire::NodeCommandResponse {
    fn from(m: &NodeCommandResponse) -> Self {
        Self {
            command_id: m.command_id.clone(),
            r#type: m.kind.to_wire(),
            error: m.error.clone(),
            result: m.result.clone(),
        }
    }
}

impl From<wire::NodeCommandResponse> for NodeCommandResponse {
    fn from(m: wire::NodeCommandResponse) -> Self {
        let kind = CommandKind::from_wire(m.r#type);
        let result: Metadata = m.result;
        Self {
            command_id: m.command_id,
            kind,
            error: m.error,
            result,
        }
    }
}

// ── transport ─────────────────────────────────────────────────────────────────────────────────────

impl From<&Window> for wire::transport::Window {
    fn from(m: &Window) -> Self {
        Self {
            run_id: m.run_id.clone(),
            bytes: m.bytes,
        }
    }
}

impl From<wire::transport::Window> for Window {
    fn from(m: wire::transport::Window) -> Self {
        Self {
            run_id: m.run_id,
            bytes: m.bytes,
        }
    }
}
