//! Bytes of what the contract pins: field numbers 13, 13 and 15, and int64 stall timeouts.
//!
//! Lives on: test threads. Bound: fixed inputs. Stays when another schema is dropped in.
mod support;

use iop_proto::domain::{
    ExecutionFailure, FailureCode, FrameKind, HealthPair, Message, Observation, RunEvent,
    RunEventKind, RunRequest, StallTimeout, TunnelFrame, TunnelRequest,
};
use iop_proto::framing::MessageType;
use iop_proto::map::{decode, encode};
use support::hex;

fn payload(message: &Message) -> Vec<u8> {
    encode(message).1.to_vec()
}

/// A failure that says nothing: present, but empty.
fn empty_failure() -> ExecutionFailure {
    ExecutionFailure {
        code: FailureCode::Other(String::new()),
        health: HealthPair::Invalid {
            health: None,
            classification: None,
        },
        idle_ms: None,
        run_id: None,
        attempt_id: None,
        fence: None,
        adapter: None,
        target: None,
        observation: Observation::Unbound,
        dropped_keys: 0,
    }
}

fn empty_event() -> RunEvent {
    RunEvent::new(String::new(), RunEventKind::Other(String::new()))
}

fn empty_frame() -> TunnelFrame {
    TunnelFrame::new(String::new(), FrameKind::Unknown(0), 0)
}

/// Proves [R-096].
#[test]
fn r096_operation_is_field_13() {
    let request = TunnelRequest {
        operation: "models".to_owned(),
        ..TunnelRequest::default()
    };
    assert_eq!(
        hex(&payload(&Message::TunnelRequest(request))),
        "6a 06 6d 6f 64 65 6c 73"
    );
}

/// Proves [R-130].
#[test]
fn r130_failure_is_field_13_of_a_run_event() {
    let event = RunEvent {
        failure: Some(empty_failure()),
        ..empty_event()
    };
    assert_eq!(hex(&payload(&Message::RunEvent(event))), "6a 00");
}

/// Proves [R-131].
#[test]
fn r131_failure_is_field_15_of_a_tunnel_frame() {
    let frame = TunnelFrame {
        failure: Some(empty_failure()),
        ..empty_frame()
    };
    assert_eq!(hex(&payload(&Message::TunnelFrame(frame))), "7a 00");
}

/// Proves [R-132].
#[test]
fn r132_an_absent_failure_is_not_an_empty_one() {
    assert_eq!(payload(&Message::RunEvent(empty_event())), b"");
    assert_eq!(payload(&Message::TunnelFrame(empty_frame())), b"");
    let Ok(Message::RunEvent(event)) = decode(MessageType::RunEvent, b"") else {
        panic!("an empty event is decodable");
    };
    assert_eq!(event.failure, None);
    let Ok(Message::RunEvent(event)) = decode(MessageType::RunEvent, b"\x6a\x00") else {
        panic!("an empty failure is decodable");
    };
    assert_eq!(event.failure, Some(empty_failure()));
    let Ok(Message::TunnelFrame(frame)) = decode(MessageType::ProviderTunnelFrame, b"") else {
        panic!("an empty frame is decodable");
    };
    assert_eq!(frame.failure, None);
    let Ok(Message::TunnelFrame(frame)) = decode(MessageType::ProviderTunnelFrame, b"\x7a\x00")
    else {
        panic!("an empty failure is decodable");
    };
    assert_eq!(frame.failure, Some(empty_failure()));
}

/// -1 as a plain varint of 64 bits; sint64 would take one byte, fixed64 eight, uint64 refuse it.
const MINUS_ONE: &str = "ff ff ff ff ff ff ff ff ff 01";

#[test]
fn a_runs_stall_timeout_is_a_plain_int64() {
    let run = |stall_timeout| {
        payload(&Message::RunRequest(RunRequest {
            stall_timeout,
            ..RunRequest::default()
        }))
    };
    let minus_one = run(StallTimeout::Invalid(-1));
    assert_eq!(hex(&minus_one[minus_one.len() - 10..]), MINUS_ONE);
    let seconds = run(StallTimeout::from_wire(1500));
    assert_eq!(hex(&seconds[seconds.len() - 2..]), "dc 0b");
    assert_eq!(run(StallTimeout::Default), b"");
}

#[test]
fn a_tunnels_stall_timeout_is_a_plain_int64() {
    let tunnel = |stall_timeout| {
        let request = TunnelRequest {
            stall_timeout,
            ..TunnelRequest::default()
        };
        payload(&Message::TunnelRequest(request))
    };
    let minus_one = tunnel(StallTimeout::Invalid(-1));
    assert_eq!(hex(&minus_one[minus_one.len() - 10..]), MINUS_ONE);
    let seconds = tunnel(StallTimeout::from_wire(1500));
    assert_eq!(hex(&seconds[seconds.len() - 2..]), "dc 0b");
    assert_eq!(tunnel(StallTimeout::Default), b"");
}

/// Proves [R-087].
#[test]
fn r087_event_kinds_travel_by_their_lower_case_names_and_the_set_is_open() {
    let known = [
        (RunEventKind::Start, "start", false),
        (RunEventKind::Delta, "delta", false),
        (RunEventKind::Complete, "complete", true),
        (RunEventKind::Error, "error", true),
        (RunEventKind::Cancelled, "cancelled", true),
        (
            RunEventKind::Other("thinking".to_owned()),
            "thinking",
            false,
        ),
        (
            RunEventKind::Other("Complete".to_owned()),
            "Complete",
            false,
        ),
    ];
    for (kind, name, terminal) in known {
        assert_eq!(kind.name(), name);
        assert_eq!(kind.is_terminal(), terminal, "{name}");
        let event = RunEvent::new("r".to_owned(), kind);
        let bytes = payload(&Message::RunEvent(event.clone()));
        let written = bytes
            .windows(name.len())
            .any(|part| part == name.as_bytes());
        assert!(written, "{name} is spelled on the wire");
        assert_eq!(
            decode(MessageType::RunEvent, &bytes),
            Ok(Message::RunEvent(event))
        );
        let view = iop_proto::view::RunEventView::parse(&bytes).unwrap();
        assert_eq!(view.event_type().is_terminal(), terminal, "{name}");
    }
}
