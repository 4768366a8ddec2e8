//! Bytes of every message under the numbers we chose. To be deleted when another schema is dropped in.
//!
//! Lives on: test threads. Bound: fixed inputs. A change here breaks every deployed peer: it needs a
//! new protocol version.
mod support;

use bytes::Bytes;
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::*;
use iop_proto::framing::{MessageType, encode_envelope};
use iop_proto::map::{decode, encode};
use support::hex;

/// Encodes to exactly these bytes, and back.
fn golden(message: &Message, expected: &str) {
    let (kind, bytes) = encode(message);
    assert_eq!(hex(&bytes), expected, "{message:?}");
    assert_eq!(decode(kind, &bytes).as_ref(), Ok(message));
}

fn s(text: &str) -> String {
    text.to_owned()
}

fn map(key: &str, value: &str) -> Metadata {
    Metadata::from([(s(key), s(value))])
}

#[test]
fn registration_and_readiness() {
    let token = Token::new(s("t"));
    let register = RegisterRequest {
        node_id: s("n"),
        token,
        node_version: s("v"),
    };
    golden(
        &Message::RegisterRequest(register),
        "0a 01 6e 12 01 74 1a 01 76",
    );
    let config = Some(NodeConfig {
        adapters: vec![],
        concurrency: 2,
    });
    let accepted = RegisterResponse::Accepted {
        node_id: s("n"),
        config,
    };
    golden(
        &Message::RegisterResponse(accepted),
        "08 01 1a 01 6e 22 04 12 02 08 02",
    );
    let rejected = RegisterResponse::Rejected { reason: s("x") };
    golden(&Message::RegisterResponse(rejected), "12 01 78");
    golden(
        &Message::NodeReadyRequest(NodeReadyRequest { node_id: s("n") }),
        "0a 01 6e",
    );
    let ready = NodeReadyResponse {
        ready: true,
        reason: s(""),
    };
    golden(&Message::NodeReadyResponse(ready), "08 01");
    let refused = NodeReadyResponse {
        ready: false,
        reason: s("x"),
    };
    golden(&Message::NodeReadyResponse(refused), "12 01 78");
}

#[test]
fn runs() {
    let request = RunRequest {
        run_id: s("r"),
        adapter: s("a"),
        target: s("t"),
        input: Bytes::from_static(b"{}"),
        metadata: map("k", "v"),
        session_id: s("s"),
        timeout: HardTimeout::from_wire(3),
        stall_timeout: StallTimeout::from_wire(4),
    };
    golden(
        &Message::RunRequest(request),
        "0a 01 72 12 01 61 1a 01 74 22 02 7b 7d 2a 06 0a 01 6b 12 01 76 32 01 73 38 03 40 04",
    );
    let usage = Usage {
        prompt_tokens: 1,
        completion_tokens: 2,
        total_tokens: 3,
    };
    let event = RunEvent {
        delta: s("d"),
        error: s("e"),
        usage: Some(usage),
        metadata: map("k", "v"),
        ..RunEvent::new(s("r"), RunEventKind::Delta)
    };
    golden(
        &Message::RunEvent(event),
        "0a 01 72 12 05 64 65 6c 74 61 1a 01 64 22 01 65 2a 06 08 01 10 02 18 03 \
         32 06 0a 01 6b 12 01 76",
    );
    golden(
        &Message::CancelRequest(CancelRequest { run_id: s("r") }),
        "0a 01 72",
    );
}

#[test]
fn tunnel_requests() {
    let binding = CredentialBinding {
        principal: s("1"),
        slot: s("2"),
        route: s("3"),
        profile: s("4"),
        upstream_target: s("5"),
        node_id: s("6"),
        recipient: s("7"),
        credential_revision: 8,
        route_revision: 9,
        projection_generation: 10,
    };
    let lease = LeaseEnvelope::new(Bytes::from_static(b"L")).unwrap();
    let request = TunnelRequest {
        run_id: s("r"),
        adapter: s("a"),
        target: s("t"),
        method: s("P"),
        path: s("/"),
        headers: vec![Header {
            name: s("h"),
            value: Bytes::from_static(b"\xff"),
        }],
        body: Bytes::from_static(b"\x00\xff"),
        stream: true,
        timeout: HardTimeout::from_wire(-1),
        metadata: map("k", "v"),
        session_id: s("s"),
        operation: s("o"),
        credential: Credential::Managed { lease, binding },
        stall_timeout: StallTimeout::from_wire(1),
    };
    golden(
        &Message::TunnelRequest(request),
        "0a 01 72 1a 01 61 22 01 74 2a 01 50 32 01 2f 3a 06 0a 01 68 12 01 ff 42 02 00 ff 48 01 \
         50 ff ff ff ff ff ff ff ff ff 01 5a 06 0a 01 6b 12 01 76 62 01 73 6a 01 6f 72 01 4c \
         7a 1b 0a 01 31 12 01 32 1a 01 33 22 01 34 2a 01 35 32 01 36 3a 01 37 40 08 48 09 50 0a \
         80 01 01",
    );
}

#[test]
fn tunnel_frames() {
    let usage = Usage {
        prompt_tokens: 1,
        completion_tokens: 2,
        total_tokens: 3,
    };
    let frame = TunnelFrame {
        status_code: 200,
        headers: vec![Header {
            name: s("h"),
            value: Bytes::from_static(b"v"),
        }],
        body: Bytes::from_static(b"b"),
        error: s("e"),
        usage: Some(usage),
        metadata: map("k", "v"),
        ..TunnelFrame::new(s("r"), FrameKind::Body, 7)
    };
    golden(
        &Message::TunnelFrame(frame),
        "0a 01 72 18 02 20 07 28 c8 01 32 06 0a 01 68 12 01 76 3a 01 62 42 01 65 \
         4a 06 08 01 10 02 18 03 52 06 0a 01 6b 12 01 76",
    );
    let kinds = [
        (FrameKind::ResponseStart, "18 01"),
        (FrameKind::Body, "18 02"),
        (FrameKind::End, "18 03"),
        (FrameKind::Error, "18 04"),
        (FrameKind::Usage, "18 05"),
        (FrameKind::Unknown(6), "18 06"),
    ];
    for (kind, expected) in kinds {
        golden(
            &Message::TunnelFrame(TunnelFrame::new(s(""), kind, 0)),
            expected,
        );
    }
}

#[test]
fn stall_evidence() {
    let failure = ExecutionFailure {
        code: FailureCode::ResponseStalled,
        health: HealthPair::Known(HealthEvidence::Unavailable),
        idle_ms: Some(5),
        run_id: Some(s("r")),
        attempt_id: Some(s("a")),
        fence: Some(Fence::Confirmed),
        adapter: Some(s("v")),
        target: Some(s("t")),
        observation: Observation::from_text(Some(s("1"))),
        dropped_keys: 0,
    };
    let frame = TunnelFrame {
        failure: Some(failure),
        ..TunnelFrame::new(s(""), FrameKind::Error, 0)
    };
    let (_, bytes) = encode(&Message::TunnelFrame(frame));
    let text = String::from_utf8_lossy(&bytes);
    assert!(bytes.starts_with(b"\x18\x04\x7a"), "{}", hex(&bytes));
    let entries = [
        "\n\x10response_stalled",
        "\n\x0fprovider_health\x12\x0bunavailable",
        "\n\x17liveness_classification\x12\x12provider_unhealthy",
        "\n\x10idle_duration_ms\x12\x015",
        "\n\x06run_id\x12\x01r",
        "\n\x0aattempt_id\x12\x01a",
        "\n\x05fence\x12\x09confirmed",
        "\n\x07adapter\x12\x01v",
        "\n\x06target\x12\x01t",
        "\n\x16health_observation_seq\x12\x011",
    ];
    for entry in entries {
        assert!(text.contains(entry), "{entry:?} in {text:?}");
    }
}

#[test]
fn commands() {
    let request = NodeCommandRequest {
        command_id: s("c"),
        kind: CommandKind::Capabilities,
        adapter: s("a"),
        target: s("t"),
    };
    golden(
        &Message::NodeCommandRequest(request),
        "0a 01 63 10 01 1a 01 61 22 01 74",
    );
    let response = NodeCommandResponse {
        command_id: s("c"),
        kind: CommandKind::ProviderStatus,
        error: s("e"),
        result: map("k", "v"),
    };
    golden(
        &Message::NodeCommandResponse(response),
        "0a 01 63 10 03 1a 01 65 22 06 0a 01 6b 12 01 76",
    );
}

#[test]
fn configuration() {
    let operation = ProfileOperation {
        name: s("o"),
        method: s("P"),
        path: s("/"),
    };
    let mut adapter = Adapter::new(s("n"), ProviderKind::OpenAiCompat, 4, s("u"));
    adapter.options = AdapterOptions {
        on_cancel: OnCancel::Drain,
        pool_idle_ms: 2,
        probe_path: s("/h"),
        operations: vec![s("x")],
        proxy_from_env: true,
    };
    adapter.profile = Some(Profile {
        id: s("i"),
        operations: vec![operation],
        auth_header: s("h"),
        auth_prefix: s("B"),
    });
    let config = NodeConfig {
        adapters: vec![adapter],
        concurrency: 0,
    };
    let request = ConfigRefreshRequest {
        request_id: s("q"),
        config: Some(config),
    };
    golden(
        &Message::ConfigRefreshRequest(request),
        "0a 01 71 12 45 0a 43 0a 01 6e 12 0d 6f 70 65 6e 61 69 5f 63 6f 6d 70 61 74 18 04 \
         22 12 0a 05 64 72 61 69 6e 10 02 1a 02 2f 68 22 01 78 28 01 \
         62 19 0a 01 75 12 14 0a 01 69 12 09 0a 01 6f 12 01 50 1a 01 2f 1a 01 68 22 01 42",
    );
    for (kind, expected) in [
        (
            ProviderKind::Ollama,
            "12 0f 0a 0d 12 06 6f 6c 6c 61 6d 61 52 03 0a 01 75",
        ),
        (
            ProviderKind::Vllm,
            "12 0d 0a 0b 12 04 76 6c 6c 6d 5a 03 0a 01 75",
        ),
    ] {
        let adapters = vec![Adapter::new(s(""), kind, 0, s("u"))];
        let config = Some(NodeConfig {
            adapters,
            concurrency: 0,
        });
        let request = ConfigRefreshRequest {
            request_id: s(""),
            config,
        };
        golden(&Message::ConfigRefreshRequest(request), expected);
    }
    for (status, expected) in [
        (RefreshStatus::Applied, "0a 01 71 10 01 1a 01 6d"),
        (RefreshStatus::RestartRequired, "0a 01 71 10 02 1a 01 6d"),
        (RefreshStatus::Failed, "0a 01 71 10 03 1a 01 6d"),
    ] {
        let response = ConfigRefreshResponse {
            request_id: s("q"),
            status,
            message: s("m"),
        };
        golden(&Message::ConfigRefreshResponse(response), expected);
    }
}

#[test]
fn transport() {
    golden(&Message::Ping(Ping { seq: 300 }), "08 ac 02");
    golden(&Message::Pong(Pong { seq: 1 }), "08 01");
    golden(&Message::GoAway(GoAway { grace_ms: 5 }), "08 05");
    golden(&Message::Features(Features { window: true }), "08 01");
    golden(
        &Message::Window(Window {
            run_id: s("r"),
            bytes: 9,
        }),
        "0a 01 72 10 09",
    );
    let mut out = Vec::new();
    encode_envelope(MessageType::CancelRequest, 1, 2, b"\x0a\x01r", &mut out).unwrap();
    let name = hex(b"iop.CancelRequest");
    assert_eq!(
        hex(&out),
        format!("00 00 00 1c 08 01 10 02 1a 11 {name} 22 03 0a 01 72")
    );
}
