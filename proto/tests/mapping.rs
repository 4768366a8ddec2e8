//! Domain messages to the wire and back; what stays data; what is never printed.
//!
//! Lives on: test threads. Bound: `ROUNDS` messages of each type, seeded.
#![expect(
    clippy::unwrap_used,
    reason = "a failure in a helper is the test's failure"
)]
mod support;

use std::collections::BTreeMap;

use bytes::Bytes;
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::*;
use iop_proto::framing::MessageType;
use iop_proto::limits::STALL_TIMEOUT_MS_MAX;
use iop_proto::map::{decode, decode_node_config, decode_shared, encode, encode_node_config};
use support::Dice;

const ROUNDS: usize = 2_000;

fn maybe<T>(dice: &mut Dice, value: T) -> Option<T> {
    dice.one_in(2).then_some(value)
}

fn blob(dice: &mut Dice) -> Bytes {
    dice.bytes(30).into()
}

fn int32(dice: &mut Dice) -> i32 {
    i32::from_le_bytes(*dice.next().to_le_bytes().first_chunk().unwrap())
}

fn metadata(dice: &mut Dice) -> Metadata {
    (0..dice.below(4))
        .map(|_| (dice.text(), dice.text()))
        .collect()
}

fn headers(dice: &mut Dice) -> Vec<Header> {
    (0..dice.below(4))
        .map(|_| Header {
            name: dice.text(),
            value: blob(dice),
        })
        .collect()
}

fn usage(dice: &mut Dice) -> Option<Usage> {
    let mut count = || dice.number().cast_signed();
    let usage = Usage {
        prompt_tokens: count(),
        completion_tokens: count(),
        total_tokens: count(),
    };
    maybe(dice, usage)
}

fn failure(dice: &mut Dice) -> Option<ExecutionFailure> {
    let health = match dice.below(4) {
        0 => HealthPair::Invalid {
            health: None,
            classification: Some("request_stalled".into()),
        },
        1 => HealthPair::Invalid {
            health: Some("available".into()),
            classification: Some("provider_unhealthy".into()),
        },
        _ => HealthPair::Known(dice.pick(&HealthEvidence::ALL)),
    };
    let observation = dice.pick(&[None, Some("1"), Some("0"), Some("01"), Some("x")]);
    let fence = dice
        .pick(&["confirmed", "unconfirmed", "perhaps"])
        .to_owned();
    let code = dice.pick(&["response_stalled", "other", ""]).to_owned();
    let (idle, run, attempt) = (dice.next(), dice.text(), dice.text());
    let (adapter, target) = (dice.text(), dice.text());
    let failure = ExecutionFailure {
        code: FailureCode::from_name(code),
        health,
        idle_ms: maybe(dice, idle),
        run_id: maybe(dice, run),
        attempt_id: maybe(dice, attempt),
        fence: maybe(dice, Fence::from_name(fence)),
        adapter: maybe(dice, adapter),
        target: maybe(dice, target),
        observation: Observation::from_text(observation.map(str::to_owned)),
        dropped_keys: 0,
    };
    maybe(dice, failure)
}

fn credential(dice: &mut Dice) -> Credential {
    let lease = LeaseEnvelope::new(Bytes::from_static(b"sealed")).unwrap();
    let binding = CredentialBinding {
        principal: dice.text(),
        slot: dice.text(),
        route: dice.text(),
        profile: dice.text(),
        upstream_target: dice.text(),
        node_id: dice.text(),
        recipient: dice.text(),
        credential_revision: dice.number(),
        route_revision: dice.number(),
        projection_generation: dice.number(),
    };
    match dice.below(4) {
        0 => Credential::None,
        1 => Credential::Managed { lease, binding },
        2 => Credential::LeaseAlone(lease),
        _ => Credential::BindingAlone(binding),
    }
}

fn config(dice: &mut Dice) -> NodeConfig {
    let adapters = (0..dice.below(4)).map(|_| adapter(dice)).collect();
    NodeConfig {
        adapters,
        concurrency: int32(dice),
    }
}

fn adapter(dice: &mut Dice) -> Adapter {
    let settings = dice.pick(&[
        None,
        Some(ProviderKind::Ollama),
        Some(ProviderKind::Vllm),
        Some(ProviderKind::OpenAiCompat),
    ]);
    let operations = (0..dice.below(3))
        .map(|_| ProfileOperation {
            name: dice.text(),
            method: dice.text(),
            path: dice.text(),
        })
        .collect();
    let profile = Profile {
        id: dice.text(),
        operations,
        auth_header: dice.text(),
        auth_prefix: dice.text(),
    };
    let takes_profile = settings.is_some_and(ProviderKind::is_tunnel);
    let on_cancel = dice.pick(&["abort", "drain", "other"]).to_owned();
    Adapter {
        name: dice.text(),
        kind: AdapterKind::from_name(dice.pick(&["vllm", "ollama", "future"]).to_owned()),
        capacity: int32(dice),
        options: AdapterOptions {
            on_cancel: OnCancel::from_name(on_cancel),
            pool_idle_ms: int32(dice).cast_unsigned(),
            probe_path: dice.text(),
            operations: (0..dice.below(3)).map(|_| dice.text()).collect(),
            proxy_from_env: dice.one_in(2),
        },
        settings,
        base_url: if settings.is_some() {
            dice.text()
        } else {
            String::new()
        },
        profile: if takes_profile {
            maybe(dice, profile)
        } else {
            None
        },
    }
}

/// Any message of the type; violations included.
fn arbitrary(dice: &mut Dice, kind: MessageType) -> Message {
    match kind {
        MessageType::RegisterRequest => Message::RegisterRequest(RegisterRequest {
            node_id: dice.text(),
            token: Token::new(dice.text()),
            node_version: dice.text(),
        }),
        MessageType::RegisterResponse => Message::RegisterResponse(if dice.one_in(2) {
            let config = config(dice);
            RegisterResponse::Accepted {
                node_id: dice.text(),
                config: maybe(dice, config),
            }
        } else {
            RegisterResponse::Rejected {
                reason: dice.text(),
            }
        }),
        MessageType::NodeReadyRequest => Message::NodeReadyRequest(NodeReadyRequest {
            node_id: dice.text(),
        }),
        MessageType::NodeReadyResponse => {
            let (ready, reason) = (dice.one_in(2), dice.text());
            Message::NodeReadyResponse(NodeReadyResponse { ready, reason })
        }
        MessageType::RunRequest | MessageType::RunEvent | MessageType::CancelRequest => {
            arbitrary_run(dice, kind)
        }
        MessageType::ProviderTunnelRequest | MessageType::ProviderTunnelFrame => {
            arbitrary_tunnel(dice, kind)
        }
        MessageType::NodeCommandRequest => Message::NodeCommandRequest(NodeCommandRequest {
            command_id: dice.text(),
            kind: CommandKind::from_wire(int32(dice) % 5),
            adapter: dice.text(),
            target: dice.text(),
        }),
        MessageType::NodeCommandResponse => Message::NodeCommandResponse(NodeCommandResponse {
            command_id: dice.text(),
            kind: CommandKind::from_wire(int32(dice) % 5),
            error: dice.text(),
            result: metadata(dice),
        }),
        MessageType::NodeConfigRefreshRequest => {
            let config = config(dice);
            Message::ConfigRefreshRequest(ConfigRefreshRequest {
                request_id: dice.text(),
                config: maybe(dice, config),
            })
        }
        MessageType::NodeConfigRefreshResponse => {
            Message::ConfigRefreshResponse(ConfigRefreshResponse {
                request_id: dice.text(),
                status: RefreshStatus::from_wire(int32(dice) % 5),
                message: dice.text(),
            })
        }
        MessageType::Ping => Message::Ping(Ping { seq: dice.number() }),
        MessageType::Pong => Message::Pong(Pong { seq: dice.number() }),
        MessageType::GoAway => Message::GoAway(GoAway {
            grace_ms: int32(dice).cast_unsigned(),
        }),
        MessageType::Features => Message::Features(Features {
            window: dice.one_in(2),
        }),
        MessageType::Window => Message::Window(Window {
            run_id: dice.text(),
            bytes: dice.number(),
        }),
    }
}

fn arbitrary_run(dice: &mut Dice, kind: MessageType) -> Message {
    match kind {
        MessageType::RunRequest => Message::RunRequest(RunRequest {
            run_id: dice.text(),
            adapter: dice.text(),
            target: dice.text(),
            input: blob(dice),
            metadata: metadata(dice),
            session_id: dice.text(),
            timeout: HardTimeout::from_wire(int32(dice)),
            stall_timeout: StallTimeout::from_wire(dice.number().cast_signed()),
        }),
        MessageType::RunEvent => Message::RunEvent(RunEvent {
            run_id: dice.text(),
            kind: RunEventKind::from_name(dice.pick(&["start", "delta", "other"]).to_owned()),
            delta: dice.text(),
            error: dice.text(),
            usage: usage(dice),
            metadata: metadata(dice),
            failure: failure(dice),
        }),
        _ => Message::CancelRequest(CancelRequest {
            run_id: dice.text(),
        }),
    }
}

fn arbitrary_tunnel(dice: &mut Dice, kind: MessageType) -> Message {
    if kind == MessageType::ProviderTunnelFrame {
        return Message::TunnelFrame(TunnelFrame {
            run_id: dice.text(),
            kind: FrameKind::from_wire(int32(dice) % 8),
            sequence: dice.number(),
            status_code: int32(dice),
            headers: headers(dice),
            body: blob(dice),
            error: dice.text(),
            usage: usage(dice),
            metadata: metadata(dice),
            failure: failure(dice),
        });
    }
    Message::TunnelRequest(TunnelRequest {
        run_id: dice.text(),
        adapter: dice.text(),
        target: dice.text(),
        method: dice.text(),
        path: dice.text(),
        headers: headers(dice),
        body: blob(dice),
        stream: dice.one_in(2),
        timeout: HardTimeout::from_wire(int32(dice)),
        metadata: metadata(dice),
        session_id: dice.text(),
        operation: dice.text(),
        credential: credential(dice),
        stall_timeout: StallTimeout::from_wire(dice.number().cast_signed()),
    })
}

#[test]
fn every_message_survives_the_wire() {
    let mut dice = Dice::new(7);
    for &kind in MessageType::ALL {
        for round in 0..ROUNDS {
            let message = arbitrary(&mut dice, kind);
            let (encoded_kind, bytes) = encode(&message);
            assert_eq!(encoded_kind, kind);
            assert_eq!(decode(kind, &bytes).as_ref(), Ok(&message), "round {round}");
            assert_eq!(decode_shared(kind, bytes), Ok(message), "round {round}");
        }
    }
}

#[test]
fn a_message_cut_at_any_byte_is_decoded_or_refused_and_a_cut_field_is_refused() {
    let mut dice = Dice::new(8);
    for &kind in MessageType::ALL {
        let mut refused = 0;
        for _ in 0..50 {
            let (_, bytes) = encode(&arbitrary(&mut dice, kind));
            for end in 0..bytes.len() {
                refused += usize::from(decode(kind, &bytes[..end]).is_err());
            }
        }
        assert!(refused > 0, "{}", kind.name());
    }
    let error = decode(MessageType::Ping, b"\x08").unwrap_err();
    assert!(
        error.to_string().starts_with("iop.transport.Ping: "),
        "{error}"
    );
}

#[test]
fn a_node_configuration_is_the_bytes_that_an_answer_embeds() {
    let mut dice = Dice::new(9);
    for _ in 0..ROUNDS {
        let config = config(&mut dice);
        let bytes = encode_node_config(&config);
        assert_eq!(decode_node_config(&bytes).as_ref(), Ok(&config));
        let mut out = vec![0; bytes.len() + 200];
        let reply = iop_proto::view::RegisterReply::Accepted {
            node_id: "n",
            config_payload: &bytes,
        };
        let used = iop_proto::view::register_response(3, reply, &mut out).unwrap();
        let view = iop_proto::view::EnvelopeView::parse(&out[4..used]).unwrap();
        assert_eq!(view.reply_to, 3);
        let expected = RegisterResponse::Accepted {
            node_id: "n".to_owned(),
            config: Some(config),
        };
        let kind = view.kind.unwrap();
        assert_eq!(
            decode(kind, view.payload),
            Ok(Message::RegisterResponse(expected))
        );
    }
    assert!(decode_node_config(b"\x0a\x05").is_err());
}

#[test]
fn timeouts_are_judged_at_the_last_legal_and_the_first_illegal_value() {
    let max = STALL_TIMEOUT_MS_MAX;
    assert_eq!(StallTimeout::from_wire(0), StallTimeout::Default);
    assert!(matches!(StallTimeout::from_wire(1), StallTimeout::Millis(ms) if ms.get() == 1));
    assert!(matches!(
        StallTimeout::from_wire(max),
        StallTimeout::Millis(_)
    ));
    for illegal in [max + 1, i64::MAX, -1, i64::MIN] {
        assert_eq!(
            StallTimeout::from_wire(illegal),
            StallTimeout::Invalid(illegal)
        );
        assert_eq!(StallTimeout::from_wire(illegal).to_wire(), illegal);
    }
    assert_eq!(HardTimeout::from_wire(0), HardTimeout::None);
    assert!(matches!(
        HardTimeout::from_wire(i32::MAX),
        HardTimeout::Seconds(_)
    ));
    for illegal in [-1, i32::MIN] {
        assert_eq!(
            HardTimeout::from_wire(illegal),
            HardTimeout::Invalid(illegal)
        );
    }
}

#[test]
fn an_observation_is_a_canonical_positive_decimal() {
    let judge = |text: &str| Observation::from_text(Some(text.to_owned()));
    assert_eq!(Observation::from_text(None), Observation::Unbound);
    for legal in ["1", "9", "10", "18446744073709551615"] {
        assert!(matches!(judge(legal), Observation::Seq(_)), "{legal}");
    }
    for illegal in [
        "",
        "0",
        "01",
        "+1",
        "-1",
        " 1",
        "1 ",
        "1.0",
        "18446744073709551616",
        "a",
    ] {
        assert_eq!(judge(illegal), Observation::Invalid(illegal.to_owned()));
    }
}

#[test]
fn only_the_three_health_pairs_are_evidence() {
    let healths = ["available", "unavailable", "unknown", "Available", ""];
    let classes = [
        "request_stalled",
        "provider_unhealthy",
        "health_unknown",
        "",
    ];
    let mut known = 0;
    for health in healths {
        for class in classes {
            let raw = ExecutionFailure {
                code: FailureCode::ResponseStalled,
                health: HealthPair::Invalid {
                    health: Some(health.to_owned()),
                    classification: Some(class.to_owned()),
                },
                idle_ms: None,
                run_id: None,
                attempt_id: None,
                fence: None,
                adapter: None,
                target: None,
                observation: Observation::Unbound,
                dropped_keys: 0,
            };
            let mut frame = TunnelFrame::new("r".to_owned(), FrameKind::Error, 1);
            frame.failure = Some(raw);
            let (kind, bytes) = encode(&Message::TunnelFrame(frame));
            let Ok(Message::TunnelFrame(frame)) = decode(kind, &bytes) else {
                panic!("a crossed pair stays decodable");
            };
            match frame.failure.unwrap().health {
                HealthPair::Known(pair) => {
                    assert_eq!((pair.health(), pair.classification()), (health, class));
                    known += 1;
                }
                HealthPair::Invalid { .. } => {}
            }
        }
    }
    assert_eq!(known, 3);
}

#[test]
fn keys_outside_the_allowlist_are_dropped_and_counted() {
    let mut failure = Vec::new();
    for key in [
        "provider_id",
        "recovery_handoff",
        "recovery_eligible",
        "future",
        "fence",
    ] {
        let mut entry = Vec::new();
        support::len_field(1, key.as_bytes(), &mut entry);
        support::len_field(2, b"confirmed", &mut entry);
        support::len_field(2, &entry, &mut failure);
    }
    let mut frame = Vec::new();
    support::len_field(15, &failure, &mut frame);
    let Ok(Message::TunnelFrame(frame)) = decode(MessageType::ProviderTunnelFrame, &frame) else {
        panic!("unknown keys cost nothing");
    };
    let failure = frame.failure.clone().unwrap();
    assert_eq!(failure.dropped_keys, 4);
    assert_eq!(failure.fence, Some(Fence::Confirmed));
    let (_, bytes) = encode(&Message::TunnelFrame(frame));
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("fence"));
    assert!(!text.contains("recovery") && !text.contains("provider_id"));
}

#[test]
fn unknown_enum_numbers_and_extra_fields_are_no_decode_errors() {
    let mut bytes = Vec::new();
    support::varint_field(3, 77, &mut bytes);
    support::len_field(500, b"from a newer peer", &mut bytes);
    let Ok(Message::TunnelFrame(frame)) = decode(MessageType::ProviderTunnelFrame, &bytes) else {
        panic!("a newer peer is understood");
    };
    assert_eq!(frame.kind, FrameKind::Unknown(77));
}

#[test]
fn an_adapter_says_what_it_cannot_be_started_as() {
    let good = Adapter::new(String::new(), ProviderKind::Vllm, 1, "http://x".to_owned());
    assert_eq!(good.resolved_name(), "vllm");
    assert_eq!(good.usable_kind(), Ok(ProviderKind::Vllm));
    let named = Adapter {
        name: "a1".to_owned(),
        ..good.clone()
    };
    assert_eq!(named.resolved_name(), "a1");
    let faults = [
        (
            Adapter {
                kind: AdapterKind::Other("x".to_owned()),
                ..good.clone()
            },
            AdapterFault::KindUnknown,
        ),
        (
            Adapter {
                settings: None,
                ..good.clone()
            },
            AdapterFault::SettingsMissing,
        ),
        (
            Adapter {
                settings: Some(ProviderKind::Ollama),
                ..good.clone()
            },
            AdapterFault::SettingsOfOtherKind,
        ),
        (
            Adapter {
                capacity: -1,
                ..good
            },
            AdapterFault::CapacityNegative,
        ),
    ];
    for (adapter, fault) in faults {
        assert_eq!(adapter.usable_kind(), Err(fault));
    }
}

const MARK: &str = "canary-7f3a";

/// Messages that hold the mark wherever a secret or a conversation may stand.
fn marked() -> [Message; 5] {
    let text = || MARK.to_owned();
    let body = Bytes::from_static(MARK.as_bytes());
    let header = Header {
        name: "h".to_owned(),
        value: body.clone(),
    };
    let lease = LeaseEnvelope::new(body.clone()).unwrap();
    [
        Message::RegisterRequest(RegisterRequest {
            node_id: "visible".to_owned(),
            token: Token::new(text()),
            node_version: String::new(),
        }),
        Message::RunRequest(RunRequest {
            run_id: "visible".to_owned(),
            input: body.clone(),
            metadata: BTreeMap::from([(text(), text())]),
            session_id: text(),
            ..RunRequest::default()
        }),
        Message::RunEvent(RunEvent {
            delta: text(),
            metadata: BTreeMap::from([(text(), text())]),
            ..RunEvent::new("visible".to_owned(), RunEventKind::Delta)
        }),
        Message::TunnelRequest(TunnelRequest {
            run_id: "visible".to_owned(),
            headers: vec![header.clone()],
            body: body.clone(),
            metadata: BTreeMap::from([(text(), text())]),
            session_id: text(),
            credential: Credential::Managed {
                lease,
                binding: CredentialBinding {
                    principal: text(),
                    ..CredentialBinding::default()
                },
            },
            ..TunnelRequest::default()
        }),
        Message::TunnelFrame(TunnelFrame {
            headers: vec![header],
            body,
            metadata: BTreeMap::from([(text(), text())]),
            ..TunnelFrame::new("visible".to_owned(), FrameKind::Body, 1)
        }),
    ]
}

#[test]
fn debug_prints_neither_secrets_nor_conversations() {
    for message in &marked() {
        let shown = format!("{message:?}");
        assert!(shown.contains("visible"), "{shown}");
        assert!(!shown.contains(MARK), "{shown}");
        let (kind, payload) = encode(message);
        assert!(
            payload
                .windows(MARK.len())
                .any(|part| part == MARK.as_bytes())
        );
        let view = match kind {
            MessageType::RegisterRequest => {
                format!(
                    "{:?}",
                    iop_proto::view::RegisterRequestView::parse(&payload)
                )
            }
            MessageType::RunEvent => {
                format!("{:?}", iop_proto::view::RunEventView::parse(&payload))
            }
            MessageType::ProviderTunnelFrame => {
                format!("{:?}", iop_proto::view::TunnelFrameView::parse(&payload))
            }
            _ => continue,
        };
        assert!(view.contains("visible") && !view.contains(MARK), "{view}");
    }
}
