//! Borrowed views against the generated decoder: same verdict, same values; cut-through, whose pieces
//! must be what the whole frame says; and a run's request, which must be read as it was written.
//!
//! Lives on: one thread. View: one message. Bound: the input, whose first byte names the message.
use std::collections::BTreeMap;
use std::fmt::Debug;

use iop_proto::domain::Usage;
use iop_proto::framing::MessageType;
use iop_proto::view::{
    CutProbe, CutStart, Entries, EnvelopeView, FeaturesView, GoAwayView, NodeReadyRequestView,
    PingView, PongView, RegisterRequestView, RunEventView, RunRequestHead, TunnelFrameView,
    ViewError, check_cut_tail, cut_probe,
};
use prost::{DecodeError, Message};

use crate::dice::{Dice, LARGEST_PIECES};
use crate::wire::{self, transport};

pub(crate) fn run(data: &[u8]) -> bool {
    let Some((&message, bytes)) = data.split_first() else {
        return false;
    };
    match message % 8 {
        0 => envelope(bytes),
        1 | 2 => frame(bytes),
        3 => event(bytes),
        4 => registration(bytes),
        5 => transport(bytes),
        _ => cut(bytes),
    }
}

/// Both accept and agree, or both refuse; whether they accept.
fn agree<M: Debug, V: Debug>(
    theirs: Result<M, DecodeError>,
    ours: Result<V, ViewError>,
    same: impl FnOnce(&M, &V) -> bool,
) -> bool {
    match (theirs, ours) {
        (Ok(theirs), Ok(ours)) => {
            assert!(same(&theirs, &ours), "{theirs:?} is not {ours:?}");
            true
        }
        (Err(_), Err(_)) => false,
        (theirs, ours) => panic!("generated {theirs:?}, view {ours:?}"),
    }
}

fn envelope(bytes: &[u8]) -> bool {
    let theirs = transport::Envelope::decode(bytes);
    agree(theirs, EnvelopeView::parse(bytes), |theirs, ours| {
        theirs.id == ours.id
            && theirs.reply_to == ours.reply_to
            && theirs.r#type.as_bytes() == ours.type_name
            && theirs.payload == ours.payload
            && ours.kind == MessageType::from_name(theirs.r#type.as_bytes())
            && ours.kind.is_none_or(|kind| kind.name() == theirs.r#type)
    })
}

fn frame(bytes: &[u8]) -> bool {
    let theirs = wire::ProviderTunnelFrame::decode(bytes);
    agree(theirs, TunnelFrameView::parse(bytes), |theirs, ours| {
        theirs.run_id.as_bytes() == ours.run_id
            && theirs.kind == ours.kind
            && theirs.sequence == ours.sequence
            && theirs.status_code == ours.status_code
            && same_headers(&theirs.headers, &ours.headers)
            && theirs.body == ours.body
            && theirs.error.as_bytes() == ours.error
            && same_usage(theirs.usage, ours.usage)
            && same_map(&theirs.metadata, &ours.metadata)
            && theirs.failure.is_some() == ours.has_failure
    })
}

fn event(bytes: &[u8]) -> bool {
    let theirs = wire::RunEvent::decode(bytes);
    if let Ok(event) = &theirs {
        check_request(event);
    }
    agree(theirs, RunEventView::parse(bytes), |theirs, ours| {
        theirs.run_id.as_bytes() == ours.run_id
            && theirs.r#type.as_bytes() == ours.type_name
            && theirs.delta.as_bytes() == ours.delta
            && theirs.error.as_bytes() == ours.error
            && same_usage(theirs.usage, ours.usage)
            && same_map(&theirs.metadata, &ours.metadata)
            && theirs.failure.is_some() == ours.has_failure
    })
}

/// A request made of the event's strings is read by the generated decoder as it was written.
fn check_request(event: &wire::RunEvent) {
    let metadata: Vec<_> = event
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    let input = event.delta.as_bytes();
    let head = RunRequestHead {
        run_id: &event.run_id,
        adapter: &event.r#type,
        target: &event.error,
        metadata: &metadata,
        input_len: u32::try_from(input.len()).expect("a short text"),
        timeout_sec: -1,
        stall_timeout_ms: i64::MAX,
    };
    let mut out = vec![0; 1_024 + 4 * event.encoded_len()];
    let before = head.before_input(&mut out).expect("room");
    out[before..before + input.len()].copy_from_slice(input);
    let behind = before + input.len();
    let end = behind + head.after_input(&mut out[behind..]).expect("room");
    let envelope = transport::Envelope::decode(&out[4..end]).expect("an envelope");
    let request = wire::RunRequest::decode(&envelope.payload[..]).expect("a request");
    assert_eq!(
        (request.run_id, request.adapter, request.target),
        (
            event.run_id.clone(),
            event.r#type.clone(),
            event.error.clone()
        )
    );
    assert_eq!(
        (request.input.as_slice(), request.metadata),
        (input, event.metadata.clone())
    );
    assert_eq!(
        (request.timeout_sec, request.response_stall_timeout_ms),
        (-1, i64::MAX)
    );
}

fn registration(bytes: &[u8]) -> bool {
    let theirs = wire::NodeReadyRequest::decode(bytes);
    agree(
        theirs,
        NodeReadyRequestView::parse(bytes),
        |theirs, ours| theirs.node_id.as_bytes() == ours.node_id,
    );
    let theirs = wire::RegisterRequest::decode(bytes);
    agree(theirs, RegisterRequestView::parse(bytes), |theirs, ours| {
        theirs.node_id.as_bytes() == ours.node_id
            && theirs.token.as_bytes() == ours.token
            && theirs.node_version.as_bytes() == ours.node_version
    })
}

fn transport(bytes: &[u8]) -> bool {
    let (ping, pong) = (
        transport::Ping::decode(bytes),
        transport::Pong::decode(bytes),
    );
    agree(pong, PongView::parse(bytes), |a, b| a.seq == b.seq);
    let (go_away, features) = (
        transport::GoAway::decode(bytes),
        transport::Features::decode(bytes),
    );
    agree(go_away, GoAwayView::parse(bytes), |a, b| {
        a.grace_ms == b.grace_ms
    });
    agree(features, FeaturesView::parse(bytes), |a, b| {
        a.window == b.window
    });
    agree(ping, PingView::parse(bytes), |a, b| a.seq == b.seq)
}

fn same_headers(theirs: &[wire::HeaderEntry], ours: &Entries<'_>) -> bool {
    ours.len() == theirs.len()
        && theirs
            .iter()
            .zip(*ours)
            .all(|(a, b)| a.key.as_bytes() == b.0 && a.value == b.1)
}

fn same_map(theirs: &BTreeMap<String, String>, ours: &Entries<'_>) -> bool {
    let map: BTreeMap<&[u8], &[u8]> = ours.iter().collect();
    map.len() == theirs.len()
        && ours.len() >= map.len()
        && ours.is_empty() == theirs.is_empty()
        && theirs.iter().all(|(key, value)| {
            map.get(key.as_bytes()) == Some(&value.as_bytes())
                && ours.get(key.as_bytes()) == Some(value.as_bytes())
        })
}

fn same_usage(theirs: Option<wire::Usage>, ours: Option<Usage>) -> bool {
    ours == theirs.map(|usage| Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        total_tokens: usage.total_tokens,
    })
}

// ── cut-through ───────────────────────────────────────────────────────────────────────────────────

/// Probes growing prefixes of an envelope, as a carry buffer would; whether some were cut and valid.
fn cut(bytes: &[u8]) -> bool {
    let mut dice = Dice::of(bytes);
    let mut accepted = false;
    for largest in LARGEST_PIECES {
        let mut end = 0;
        for piece in dice.pieces(bytes, largest) {
            end += piece.len();
            match probe(&bytes[..end], bytes.len()) {
                Ok(CutProbe::NeedMore) => {}
                Ok(CutProbe::NotCut) => break,
                Ok(CutProbe::Cut(start)) => {
                    accepted |= check_cut(bytes, &start);
                    break;
                }
                Err(error) => {
                    check_refused(bytes, error);
                    break;
                }
            }
        }
    }
    accepted
}

fn probe(prefix: &[u8], envelope: usize) -> Result<CutProbe, ViewError> {
    cut_probe(prefix, u32::try_from(envelope).expect("a short envelope"))
}

/// The pieces add up to the envelope, and say what the whole frame says if the tails pass.
fn check_cut(bytes: &[u8], cut: &CutStart) -> bool {
    let (header, rest) = bytes.split_at(cut.header_len as usize);
    let (body, rest) = rest.split_at(cut.body_len as usize);
    let (frame_tail, envelope_tail) = rest.split_at(cut.frame_tail_len as usize);
    assert!(!header.is_empty() && envelope_tail.len() == cut.envelope_tail_len as usize);
    if let Err(error) = check_cut_tail(frame_tail, envelope_tail) {
        check_refused(bytes, error);
        return false;
    }
    let envelope = transport::Envelope::decode(bytes).expect("the cut's tails were valid");
    let frame = wire::ProviderTunnelFrame::decode(&envelope.payload[..]);
    let frame = frame.expect("the cut's tails were valid");
    assert_eq!(envelope.r#type, MessageType::ProviderTunnelFrame.name());
    assert_eq!((frame.body.as_slice(), frame.kind), (body, 2));
    assert_eq!(frame.sequence, cut.sequence);
    let id = Some(frame.run_id.as_bytes()).filter(|id| id.len() == 32);
    assert_eq!(cut.run_id.as_ref().map(<[u8; 32]>::as_slice), id);
    true
}

/// Only what the whole envelope is refused for may be refused, except what cut-through forbids: a
/// value that was used comes again.
fn check_refused(bytes: &[u8], error: ViewError) {
    if matches!(error, ViewError::Repeated { .. }) || payloads(bytes) != Some(1) {
        return; // of several payloads the last counts, and the probe judged the first
    }
    let Ok(envelope) = transport::Envelope::decode(bytes) else {
        return;
    };
    let frame = wire::ProviderTunnelFrame::decode(&envelope.payload[..]);
    assert!(
        frame.is_err(),
        "refused what is valid: {error:?}: {frame:?}"
    );
}

/// Payload fields of an envelope; `None` when it is malformed or holds groups.
fn payloads(mut bytes: &[u8]) -> Option<usize> {
    let mut count = 0;
    while !bytes.is_empty() {
        let key = prost::encoding::decode_varint(&mut bytes).ok()?;
        let skip = match key & 7 {
            0 => {
                prost::encoding::decode_varint(&mut bytes).ok()?;
                0
            }
            1 => 8,
            2 => prost::encoding::decode_varint(&mut bytes).ok()?,
            5 => 4,
            _ => return None,
        };
        bytes = bytes.get(usize::try_from(skip).ok()?..)?;
        count += usize::from(key >> 3 == 4);
    }
    Some(count)
}
