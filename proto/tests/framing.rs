//! The envelope stream over every split, its limits, and the builders against the mapping module.
//!
//! Lives on: test threads. Bound: fixed inputs, seeded.
#![expect(
    clippy::unwrap_used,
    reason = "a failure in a helper is the test's failure"
)]
mod support;

use bytes::Bytes;
use iop_proto::domain::*;
use iop_proto::framing::{Assembler, Envelope, FramingError, Kind, MessageType, encode_envelope};
use iop_proto::limits::{ENVELOPE_TO_EDGE_BYTES_MAX, ENVELOPE_TO_NODE_BYTES_MAX};
use iop_proto::map::{self, decode, encode};
use iop_proto::view::{
    self, BuildError, CredentialPair, CutProbe, RegisterReply, RunRequestHead, TunnelFrameOut,
    TunnelRequestHead, ViewError,
};
use support::{Dice, len_field};

const RUN: &str = "0123456789abcdef0123456789abcdef";

/// A short stream: an answer, an unknown type, an empty payload, a frame.
fn stream() -> (Vec<u8>, Vec<Envelope>) {
    let mut bytes = Vec::new();
    encode_envelope(
        MessageType::NodeReadyResponse,
        0,
        300,
        b"\x08\x01",
        &mut bytes,
    )
    .unwrap();
    let mut unknown = Vec::new();
    len_field(3, b"iop.Future", &mut unknown);
    len_field(4, b"?", &mut unknown);
    bytes.extend_from_slice(&u32::try_from(unknown.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(&unknown);
    encode_envelope(MessageType::Ping, 0, 0, b"", &mut bytes).unwrap();
    let mut frame = [0; 200];
    let used = TunnelFrameOut::body(RUN, 2, b"data: x\n\n")
        .encode(&mut frame)
        .unwrap();
    bytes.extend_from_slice(&frame[..used]);
    let payload = {
        let view = view::EnvelopeView::parse(&frame[4..used]).unwrap();
        Bytes::copy_from_slice(view.payload)
    };
    let known = |kind, reply_to, payload| Envelope {
        id: 0,
        reply_to,
        kind,
        payload,
    };
    let envelopes = vec![
        known(
            Kind::Known(MessageType::NodeReadyResponse),
            300,
            Bytes::from_static(b"\x08\x01"),
        ),
        known(Kind::Unknown, 0, Bytes::from_static(b"?")),
        known(Kind::Known(MessageType::Ping), 0, Bytes::new()),
        known(Kind::Known(MessageType::ProviderTunnelFrame), 0, payload),
    ];
    (bytes, envelopes)
}

fn drain(assembler: &mut Assembler, into: &mut Vec<Envelope>) {
    while let Some(envelope) = assembler.next().unwrap() {
        into.push(envelope);
    }
}

#[test]
fn envelopes_come_out_whole_whatever_the_split() {
    let (bytes, expected) = stream();
    for first in 0..=bytes.len() {
        for second in first..=bytes.len() {
            let mut assembler = Assembler::new(1000);
            let mut found = Vec::new();
            for part in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                assembler.push(part);
                drain(&mut assembler, &mut found);
            }
            assert_eq!(found, expected, "split at {first} and {second}");
            assert_eq!(assembler.pending(), 0);
        }
    }
    let mut assembler = Assembler::new(1000);
    let mut found = Vec::new();
    for byte in &bytes {
        assembler.push(std::slice::from_ref(byte));
        drain(&mut assembler, &mut found);
    }
    assert_eq!(found, expected, "byte by byte");
}

#[test]
fn the_limit_is_judged_on_the_prefix_alone_and_an_error_stays() {
    let mut exact = vec![0, 0, 0, 9, 0x1a, 7];
    exact.extend_from_slice(b"iop.Run");
    let mut assembler = Assembler::new(9);
    assembler.push(&exact);
    assert_eq!(assembler.next().unwrap().unwrap().kind, Kind::Unknown);
    let too_long = FramingError::TooLong { length: 10, max: 9 };
    for (prefix, error) in [([0, 0, 0, 10], too_long), ([0; 4], FramingError::Empty)] {
        let mut assembler = Assembler::new(9);
        assembler.push(&prefix[..3]);
        assert_eq!(assembler.next(), Ok(None));
        assembler.push(&prefix[3..]);
        assert_eq!(assembler.next(), Err(error));
        assembler.push(&exact);
        assert_eq!(
            assembler.next(),
            Err(error),
            "nothing is read after an error"
        );
        assert_eq!(assembler.pending(), 0);
    }
}

#[test]
fn a_malformed_envelope_is_an_error_of_the_stream() {
    let mut assembler = Assembler::new(100);
    assembler.push(&[0, 0, 0, 2, 0x22, 9]);
    assert_eq!(
        assembler.next(),
        Err(FramingError::Malformed(ViewError::Truncated))
    );
    let mut assembler = Assembler::new(100);
    assembler.push(&[0, 0, 0, 3, 0x1a, 1, 0xff]);
    assert_eq!(
        assembler.next(),
        Err(FramingError::Malformed(ViewError::Utf8 { field: 3 }))
    );
}

/// The one envelope in `bytes`, decoded by the mapping module.
fn only_message(bytes: &[u8]) -> (Envelope, Message) {
    let mut assembler = Assembler::new(ENVELOPE_TO_EDGE_BYTES_MAX);
    assembler.push(bytes);
    let envelope = assembler.next().unwrap().expect("one whole envelope");
    assert_eq!(assembler.pending(), 0, "and nothing behind it");
    let Kind::Known(kind) = envelope.kind else {
        panic!("a known type")
    };
    let message = decode(kind, &envelope.payload).unwrap();
    (envelope, message)
}

/// What the builder writes equals what the generated encoder writes; one byte less room is refused.
fn same_bytes(
    build: impl Fn(&mut [u8]) -> Result<usize, BuildError>,
    id: u64,
    reply_to: u64,
    message: &Message,
) {
    let (kind, payload) = encode(message);
    let mut expected = Vec::new();
    encode_envelope(kind, id, reply_to, &payload, &mut expected).unwrap();
    let mut out = vec![0xee; expected.len() + 5];
    assert_eq!(build(&mut out), Ok(expected.len()), "{message:?}");
    assert_eq!(out[..expected.len()], expected, "{message:?}");
    assert_eq!(out[expected.len()..], [0xee; 5], "{message:?}");
    let mut short = vec![0xee; expected.len() - 1];
    let no_room = BuildError::NoRoom {
        needed: expected.len(),
    };
    assert_eq!(build(&mut short), Err(no_room), "{message:?}");
    assert!(
        short.iter().all(|&byte| byte == 0xee),
        "nothing is written without room"
    );
    assert_eq!(only_message(&expected).1, *message);
}

fn s(text: &str) -> String {
    text.to_owned()
}

#[test]
fn transport_builders_write_what_the_generated_encoder_writes() {
    let cancel = Message::CancelRequest(CancelRequest { run_id: s(RUN) });
    same_bytes(|out| view::cancel(RUN, out), 0, 0, &cancel);
    for seq in [0, 1, 127, 128, u64::MAX] {
        same_bytes(
            |out| view::ping(seq, out),
            0,
            0,
            &Message::Ping(Ping { seq }),
        );
        same_bytes(
            |out| view::pong(seq, out),
            0,
            0,
            &Message::Pong(Pong { seq }),
        );
        let window = Message::Window(Window {
            run_id: s(RUN),
            bytes: seq,
        });
        same_bytes(|out| view::window(RUN, seq, out), 0, 0, &window);
    }
    let go_away = Message::GoAway(GoAway { grace_ms: 60_000 });
    same_bytes(|out| view::go_away(60_000, out), 0, 0, &go_away);
    let features = Message::Features(Features { window: true });
    same_bytes(|out| view::features(true, out), 0, 0, &features);
}

#[test]
fn registration_builders_write_what_the_generated_encoder_writes() {
    let ready = Message::NodeReadyRequest(NodeReadyRequest { node_id: s("n") });
    same_bytes(|out| view::ready_request(5, "n", out), 5, 0, &ready);
    let yes = NodeReadyResponse {
        ready: true,
        reason: s(""),
    };
    same_bytes(
        |out| view::ready_response(9, None, out),
        0,
        9,
        &Message::NodeReadyResponse(yes),
    );
    let no = NodeReadyResponse {
        ready: false,
        reason: s("why"),
    };
    let no = Message::NodeReadyResponse(no);
    same_bytes(
        |out| view::ready_response(u64::MAX, Some("why"), out),
        0,
        u64::MAX,
        &no,
    );
    let rejected = RegisterReply::Rejected { reason: "why" };
    let message = Message::RegisterResponse(RegisterResponse::Rejected { reason: s("why") });
    same_bytes(
        |out| view::register_response(1, rejected, out),
        0,
        1,
        &message,
    );
    let accepted = RegisterReply::Accepted {
        node_id: "n",
        config_payload: b"",
    };
    let config = Some(NodeConfig::default());
    let message = Message::RegisterResponse(RegisterResponse::Accepted {
        node_id: s("n"),
        config,
    });
    same_bytes(
        |out| view::register_response(1, accepted, out),
        0,
        1,
        &message,
    );
}

#[test]
fn frame_builders_write_what_the_generated_encoder_writes() {
    let headers: [(&[u8], &[u8]); 2] = [(b"content-type", b"text/html"), (b"x", b"\xff")];
    let usage = Usage {
        prompt_tokens: 1,
        completion_tokens: -1,
        total_tokens: 0,
    };
    let frame = |kind, sequence| TunnelFrame::new(s(RUN), kind, sequence);
    let cases = [
        (
            TunnelFrameOut::response_start(RUN, 1, 200, &headers),
            TunnelFrame {
                status_code: 200,
                headers: headers
                    .iter()
                    .map(|(name, value)| Header {
                        name: String::from_utf8(name.to_vec()).unwrap(),
                        value: Bytes::copy_from_slice(value),
                    })
                    .collect(),
                ..frame(FrameKind::ResponseStart, 1)
            },
        ),
        (
            TunnelFrameOut::body(RUN, 2, b"data"),
            TunnelFrame {
                body: Bytes::from_static(b"data"),
                ..frame(FrameKind::Body, 2)
            },
        ),
        (TunnelFrameOut::end(RUN, 300), frame(FrameKind::End, 300)),
        (
            TunnelFrameOut::error(RUN, 4, "cancelled"),
            TunnelFrame {
                error: s("cancelled"),
                ..frame(FrameKind::Error, 4)
            },
        ),
        (
            TunnelFrameOut::usage(RUN, 5, usage),
            TunnelFrame {
                usage: Some(usage),
                ..frame(FrameKind::Usage, 5)
            },
        ),
    ];
    for (out, message) in cases {
        let message = Message::TunnelFrame(message);
        same_bytes(|buffer| out.encode(buffer), 0, 0, &message);
        let mut buffer = [0; 300];
        assert_eq!(out.encoded_len(), out.encode(&mut buffer));
    }
    let bad: [(&[u8], &[u8]); 1] = [(b"\xc3\xa9", b"")];
    let start = TunnelFrameOut::response_start(RUN, 1, 200, &bad);
    assert_eq!(start.encode(&mut [0; 300]), Err(BuildError::HeaderName));
    assert_eq!(start.encoded_len(), Err(BuildError::HeaderName));
}

#[test]
fn a_body_frames_head_and_its_body_are_the_whole_frame() {
    for length in [1u32, 127, 128, 20_000] {
        let body = vec![b'x'; length as usize];
        let mut whole = vec![0; body.len() + 200];
        let used = TunnelFrameOut::body(RUN, 3, &body)
            .encode(&mut whole)
            .unwrap();
        let mut head = [0; 200];
        let at = view::body_frame_head(RUN, 3, length, &mut head).unwrap();
        assert_eq!(
            view::body_frame_head(RUN, 3, length, &mut head[..at]),
            Ok(at)
        );
        let no_room = Err(BuildError::NoRoom { needed: at });
        assert_eq!(
            view::body_frame_head(RUN, 3, length, &mut [0; 200][..at - 1]),
            no_room
        );
        assert_eq!([&head[..at], &body].concat(), whole[..used]);
    }
    assert!(matches!(
        view::body_frame_head(RUN, 3, u32::MAX, &mut [0; 200]),
        Err(BuildError::TooLong { .. })
    ));
}

/// A path with a client's query behind it.
fn with_query(path: &str, query: &str) -> String {
    match (query, path.contains('?')) {
        ("", _) => s(path),
        (_, true) => format!("{path}&{query}"),
        (_, false) => format!("{path}?{query}"),
    }
}

/// A lease, and a binding with its encoding.
fn pair(dice: &mut Dice) -> (Vec<u8>, Vec<u8>, CredentialBinding) {
    let lease = [&[1][..], &dice.bytes(200)].concat();
    let binding = CredentialBinding {
        principal: dice.text(),
        recipient: dice.text(),
        credential_revision: dice.number(),
        ..CredentialBinding::default()
    };
    (lease, map::encode_binding(&binding), binding)
}

fn managed((lease, _, binding): (Vec<u8>, Vec<u8>, CredentialBinding)) -> Credential {
    let lease = LeaseEnvelope::new(lease.into()).unwrap();
    Credential::Managed { lease, binding }
}

#[test]
fn a_tunnel_request_is_its_two_parts_around_the_streamed_body() {
    let mut dice = Dice::new(3);
    for round in 0..2_000 {
        let body = dice.bytes(300);
        let names = ["content-type", "accept", "x-a"];
        let owned: Vec<(&str, Vec<u8>)> = (0..dice.below(4))
            .map(|_| (dice.pick(&names), dice.bytes(200)))
            .collect();
        let headers = owned
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_slice()));
        let (target, operation) = (dice.text(), dice.text());
        let path = dice.pick(&["/v1/messages", "/x?v=2"]);
        let query = dice.pick(&["", "beta=true&a"]);
        let pair = dice.one_in(2).then(|| pair(&mut dice));
        let head = TunnelRequestHead {
            run_id: RUN,
            adapter: "a",
            target: &target,
            method: "POST",
            path,
            query,
            body_len: u32::try_from(body.len()).unwrap(),
            stream: dice.one_in(2),
            timeout_sec: dice.pick(&[0, 1, 30, -1]),
            operation: &operation,
            credential: pair
                .as_ref()
                .map(|(lease, binding, _)| CredentialPair { lease, binding }),
            stall_timeout_ms: dice.pick(&[0, 1, 300_000, -1]),
        };
        let message = Message::TunnelRequest(TunnelRequest {
            run_id: s(RUN),
            adapter: s("a"),
            target: target.clone(),
            method: s("POST"),
            path: with_query(path, query),
            headers: owned
                .iter()
                .map(|(name, value)| Header {
                    name: s(name),
                    value: value.clone().into(),
                })
                .collect(),
            body: body.clone().into(),
            stream: head.stream,
            timeout: HardTimeout::from_wire(head.timeout_sec),
            operation: operation.clone(),
            credential: pair.clone().map_or(Credential::None, managed),
            stall_timeout: StallTimeout::from_wire(head.stall_timeout_ms),
            ..TunnelRequest::default()
        });
        let parts = |out: &mut [u8]| {
            let (before, after) = (head.before_len(headers.clone())?, head.after_len());
            let needed = before + body.len() + after;
            if out.len() < needed {
                return Err(BuildError::NoRoom { needed });
            }
            let wrote = head.before_body(headers.clone(), &mut out[..before]);
            assert_eq!(wrote, Ok(before));
            out[before..before + body.len()].copy_from_slice(&body);
            let wrote = head.after_body(&mut out[before + body.len()..needed]);
            assert_eq!(wrote, Ok(after), "round {round}");
            Ok(needed)
        };
        same_bytes(parts, 0, 0, &message);
        let before = head.before_len(headers.clone()).unwrap();
        let mut short = vec![0; before - 1];
        let no_room = Err(BuildError::NoRoom { needed: before });
        assert_eq!(head.before_body(headers.clone(), &mut short), no_room);
    }
}

#[test]
fn a_run_request_is_its_two_parts_around_the_streamed_input() {
    let mut dice = Dice::new(4);
    for _ in 0..2_000 {
        let input = dice.bytes(300);
        let owned: Vec<(&str, String)> = (0..dice.below(3))
            .map(|row| (["traceparent", "x-request-id"][row], dice.text()))
            .collect();
        let metadata: Vec<_> = owned
            .iter()
            .map(|(key, value)| (*key, value.as_str()))
            .collect();
        let target = dice.text();
        let head = RunRequestHead {
            run_id: RUN,
            adapter: "a",
            target: &target,
            metadata: &metadata,
            input_len: u32::try_from(input.len()).unwrap(),
            timeout_sec: dice.pick(&[0, 1, 30, -1]),
            stall_timeout_ms: dice.pick(&[0, 1, 300_000, -1]),
        };
        let message = Message::RunRequest(RunRequest {
            run_id: s(RUN),
            adapter: s("a"),
            target: target.clone(),
            input: input.clone().into(),
            metadata: owned
                .iter()
                .map(|(key, value)| (s(key), value.clone()))
                .collect(),
            timeout: HardTimeout::from_wire(head.timeout_sec),
            stall_timeout: StallTimeout::from_wire(head.stall_timeout_ms),
            ..RunRequest::default()
        });
        let mut out = vec![0xee; 4_096];
        let before = head.before_input(&mut out).unwrap();
        let behind = before + input.len();
        out[before..behind].copy_from_slice(&input);
        let end = behind + head.after_input(&mut out[behind..]).unwrap();
        assert_eq!(end - behind, head.after_len());
        assert!(out[end..].iter().all(|&byte| byte == 0xee));
        assert_eq!(only_message(&out[..end]).1, message);
        for (room, needed) in [(before - 1, before), (0, before)] {
            let no_room = Err(BuildError::NoRoom { needed });
            assert_eq!(head.before_input(&mut vec![0; room]), no_room);
        }
        if metadata.is_empty() {
            let (kind, payload) = encode(&message);
            let mut expected = Vec::new();
            encode_envelope(kind, 0, 0, &payload, &mut expected).unwrap();
            assert_eq!(out[..end], expected);
        }
    }
    let endless = RunRequestHead {
        input_len: ENVELOPE_TO_NODE_BYTES_MAX,
        ..RunRequestHead::default()
    };
    assert!(matches!(
        endless.before_input(&mut [0; 200]),
        Err(BuildError::TooLong { .. })
    ));
}

#[test]
fn a_request_over_the_nodes_limit_or_with_a_bad_header_is_refused() {
    let head = TunnelRequestHead {
        run_id: RUN,
        ..TunnelRequestHead::default()
    };
    let none = std::iter::empty();
    let fixed = head.before_len(none.clone()).unwrap();
    // The key and length of a body this long take 1 + 4 bytes, as does the payload's length more.
    let body_len = ENVELOPE_TO_NODE_BYTES_MAX - u32::try_from(fixed - 4).unwrap() - 5 - 3;
    let longest = TunnelRequestHead { body_len, ..head };
    let before = longest.before_len(none.clone()).unwrap();
    assert_eq!(
        before - 4 + body_len as usize,
        ENVELOPE_TO_NODE_BYTES_MAX as usize
    );
    let mut out = [0; 200];
    assert_eq!(longest.before_body(none.clone(), &mut out), Ok(before));
    assert_eq!(out[..4], ENVELOPE_TO_NODE_BYTES_MAX.to_be_bytes());
    let bytes = ENVELOPE_TO_NODE_BYTES_MAX as usize + 1;
    let too_long = BuildError::TooLong {
        bytes,
        max: ENVELOPE_TO_NODE_BYTES_MAX,
    };
    let longer = TunnelRequestHead {
        body_len: body_len + 1,
        ..head
    };
    assert_eq!(longer.before_body(none, &mut out), Err(too_long));
    let bad: [(&[u8], &[u8]); 1] = [(b"\xff", b"")];
    assert_eq!(
        head.before_body(bad.into_iter(), &mut out),
        Err(BuildError::HeaderName)
    );
}

// ── cut-through by hand ───────────────────────────────────────────────────────────────────────────

fn envelope_of(frame: &[u8], tail: &[u8]) -> Vec<u8> {
    let mut envelope = Vec::new();
    len_field(3, b"iop.ProviderTunnelFrame", &mut envelope);
    len_field(4, frame, &mut envelope);
    envelope.extend_from_slice(tail);
    envelope
}

#[test]
fn our_own_long_frame_is_cut_as_soon_as_its_body_begins() {
    let body = vec![b'x'; 100_000];
    let mut out = vec![0; 101_000];
    let used = TunnelFrameOut::body(RUN, 7, &body)
        .encode(&mut out)
        .unwrap();
    let envelope = &out[4..used];
    let length = u32::try_from(envelope.len()).unwrap();
    let header_len = envelope.len() - body.len();
    for end in 0..header_len {
        assert_eq!(
            view::cut_probe(&envelope[..end], length),
            Ok(CutProbe::NeedMore),
            "{end}"
        );
    }
    for end in [header_len, header_len + 1, 16_384] {
        let Ok(CutProbe::Cut(cut)) = view::cut_probe(&envelope[..end], length) else {
            panic!("{end}");
        };
        assert_eq!(
            cut.run_id.as_ref().map(<[u8; 32]>::as_slice),
            Some(RUN.as_bytes())
        );
        assert_eq!((cut.sequence, cut.body_len), (7, 100_000));
        assert_eq!(cut.header_len as usize, header_len);
        assert_eq!((cut.frame_tail_len, cut.envelope_tail_len), (0, 0));
    }
    assert_eq!(view::check_cut_tail(b"", b""), Ok(()));
}

#[test]
fn a_frame_is_cut_only_when_everything_needed_precedes_its_body() {
    let mut id = Vec::new();
    len_field(1, RUN.as_bytes(), &mut id);
    let (kind, sequence) = ([0x18, 2], [0x20, 1]);
    let mut body = Vec::new();
    len_field(7, &[b'x'; 2_000], &mut body);
    let probe = |envelope: &[u8]| {
        let length = u32::try_from(envelope.len()).unwrap();
        view::cut_probe(&envelope[..1_000.min(envelope.len())], length)
    };
    let ordered = [&id[..], &kind, &sequence, &body].concat();
    assert!(matches!(
        probe(&envelope_of(&ordered, b"")),
        Ok(CutProbe::Cut(_))
    ));
    let incomplete: [&[&[u8]]; 5] = [
        &[&body, &id, &kind, &sequence],
        &[&id, &kind, &body, &sequence],
        &[&id, &sequence, &body, &kind],
        &[&kind, &sequence, &body, &id],
        &[&id, &[0x18, 4], &sequence, &body], // an ERROR with a body
    ];
    for parts in incomplete {
        assert_eq!(
            probe(&envelope_of(&parts.concat(), b"")),
            Ok(CutProbe::NotCut),
            "{parts:x?}"
        );
    }
    // Another message, and a payload that comes before its type.
    let mut other = Vec::new();
    len_field(3, b"iop.RunEvent", &mut other);
    len_field(4, &ordered, &mut other);
    assert_eq!(probe(&other), Ok(CutProbe::NotCut));
    let mut payload_first = Vec::new();
    len_field(4, &ordered, &mut payload_first);
    len_field(3, b"iop.ProviderTunnelFrame", &mut payload_first);
    assert_eq!(probe(&payload_first), Ok(CutProbe::NotCut));
    // Too much behind the body to be collected.
    let mut long_error = ordered.clone();
    len_field(8, &[b'e'; 9_000], &mut long_error);
    assert_eq!(probe(&envelope_of(&long_error, b"")), Ok(CutProbe::NotCut));
    let mut short_error = ordered;
    len_field(8, &[b'e'; 8_000], &mut short_error);
    let Ok(CutProbe::Cut(cut)) = probe(&envelope_of(&short_error, b"\x08\x05")) else {
        panic!("a tail that can be collected");
    };
    assert_eq!((cut.frame_tail_len, cut.envelope_tail_len), (8_003, 2));
}

#[test]
fn lengths_past_the_envelope_are_malformed_before_a_byte_is_forwarded() {
    let mut frame = Vec::new();
    len_field(1, RUN.as_bytes(), &mut frame);
    frame.extend_from_slice(&[0x18, 2, 0x20, 1]);
    let body_at = frame.len();
    len_field(7, &[b'x'; 2_000], &mut frame);
    let envelope = envelope_of(&frame, b"");
    let length = u32::try_from(envelope.len()).unwrap();
    assert!(matches!(
        view::cut_probe(&envelope[..500], length),
        Ok(CutProbe::Cut(_))
    ));
    let payload_too_long = view::cut_probe(&envelope[..500], length - 1);
    assert_eq!(payload_too_long, Err(ViewError::Length { field: 4 }));
    let mut longer_body = frame.clone();
    longer_body[body_at + 1] += 1; // 2001 bytes announced, 2000 in the frame
    let envelope = envelope_of(&longer_body, b"");
    assert_eq!(
        view::cut_probe(&envelope[..500], length),
        Err(ViewError::Length { field: 7 })
    );
}

#[test]
fn a_tail_may_not_repeat_what_was_used() {
    let repeated = |field| Err(ViewError::Repeated { field });
    let mut id = Vec::new();
    len_field(1, RUN.as_bytes(), &mut id);
    assert_eq!(view::check_cut_tail(&id, b""), repeated(1));
    assert_eq!(view::check_cut_tail(&[0x18, 2], b""), repeated(3));
    assert_eq!(view::check_cut_tail(&[0x20, 1], b""), repeated(4));
    assert_eq!(view::check_cut_tail(&[0x3a, 0], b""), repeated(7));
    assert_eq!(view::check_cut_tail(b"", &[0x22, 0]), repeated(4));
    assert_eq!(view::check_cut_tail(b"", &[0x1a, 0]), repeated(3));
    assert_eq!(
        view::check_cut_tail(&[0x28, 1, 0x42, 0], &[0x08, 1, 0x10, 2]),
        Ok(())
    );
    assert_eq!(
        view::check_cut_tail(&[0x42, 1], b""),
        Err(ViewError::Truncated)
    );
    assert_eq!(
        view::check_cut_tail(&[0x42, 1, 0xff], b""),
        Err(ViewError::Utf8 { field: 8 })
    );
    assert_eq!(
        view::check_cut_tail(b"", &[0x2b]),
        Err(ViewError::Truncated)
    );
}
