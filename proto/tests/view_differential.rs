//! Views and cut-through against the generated decoder: same verdict, same values.
//!
//! Lives on: test threads. Bound: `IOP_DIFF_INPUTS` inputs a message (default 300 000), seed
//! `IOP_DIFF_SEED`. An input is a message with permuted, repeated, unknown and oddly encoded fields,
//! mutated afterwards in half of the cases; both sides must accept at least 30 % of them.
mod support;

#[expect(unreachable_pub, reason = "generated")]
#[allow(dead_code, reason = "generated; `expect` would count as a use")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/iop.rs"));
    pub mod transport {
        include!(concat!(env!("OUT_DIR"), "/iop.transport.rs"));
    }
}

use std::collections::BTreeMap;

use iop_proto::domain::Usage;
use iop_proto::framing::MessageType;
use iop_proto::view::{
    CutProbe, Entries, EnvelopeView, FeaturesView, GoAwayView, NodeReadyRequestView, PingView,
    PongView, RegisterRequestView, RunEventView, TunnelFrameView, ViewError, check_cut_tail,
    cut_probe,
};
use prost::Message;
use support::{
    Dice, FIXED32, FIXED64, GROUP, GROUP_END, LEN, VARINT, key, len_field, long_varint, varint,
};

const FRAME: &str = "iop.ProviderTunnelFrame";

/// What a declared field holds.
#[derive(Clone, Copy)]
enum Shape {
    Number,
    /// One of the numbers a kind can have, mostly.
    Kind,
    Text,
    /// The envelope's type.
    TypeName,
    Bytes,
    TextEntry,
    BytesEntry,
    Usage,
    Failure,
}

type Spec = &'static [(u32, Shape)];

const ENVELOPE: Spec = &[
    (1, Shape::Number),
    (2, Shape::Number),
    (3, Shape::TypeName),
    (4, Shape::Bytes),
];
const TUNNEL_FRAME: Spec = &[
    (1, Shape::Text),
    (3, Shape::Kind),
    (4, Shape::Number),
    (5, Shape::Number),
    (6, Shape::BytesEntry),
    (7, Shape::Bytes),
    (8, Shape::Text),
    (9, Shape::Usage),
    (10, Shape::TextEntry),
    (15, Shape::Failure),
];
const RUN_EVENT: Spec = &[
    (1, Shape::Text),
    (2, Shape::Text),
    (3, Shape::Text),
    (4, Shape::Text),
    (5, Shape::Usage),
    (6, Shape::TextEntry),
    (13, Shape::Failure),
];
const REGISTER: Spec = &[(1, Shape::Text), (2, Shape::Text), (3, Shape::Text)];
const ONE_TEXT: Spec = &[(1, Shape::Text)];
const ONE_NUMBER: Spec = &[(1, Shape::Number)];
const ENTRY_TEXT: Spec = &[(1, Shape::Text), (2, Shape::Text)];
const ENTRY_BYTES: Spec = &[(1, Shape::Text), (2, Shape::Bytes)];
const USAGE: Spec = &[(1, Shape::Number), (2, Shape::Number), (3, Shape::Number)];
const FAILURE: Spec = &[(1, Shape::Text), (2, Shape::TextEntry)];

fn number(dice: &mut Dice, value: u64, out: &mut Vec<u8>) {
    if dice.one_in(8) {
        long_varint(value, 1 + dice.below(10), out);
    } else {
        varint(value, out);
    }
}

/// One declared field.
fn field(dice: &mut Dice, number_: u32, shape: Shape) -> Vec<u8> {
    let mut out = Vec::new();
    let wire = if matches!(shape, Shape::Number | Shape::Kind) {
        VARINT
    } else {
        LEN
    };
    number(dice, u64::from(number_ << 3 | wire), &mut out);
    let content = match shape {
        Shape::Number => {
            let value = dice.number();
            number(dice, value, &mut out);
            return out;
        }
        Shape::Kind => {
            let value = if dice.one_in(4) {
                dice.number()
            } else {
                dice.next() % 7
            };
            number(dice, value, &mut out);
            return out;
        }
        Shape::Text => dice.text().into_bytes(),
        Shape::TypeName => {
            let known = dice.pick(MessageType::ALL).name();
            dice.pick(&[FRAME, known, "iop.Future", ""])
                .as_bytes()
                .to_vec()
        }
        Shape::Bytes => dice.bytes(40),
        Shape::TextEntry => message(dice, ENTRY_TEXT, 2),
        Shape::BytesEntry => message(dice, ENTRY_BYTES, 2),
        Shape::Usage => message(dice, USAGE, 1),
        Shape::Failure => message(dice, FAILURE, 1),
    };
    number(dice, content.len() as u64, &mut out);
    out.extend_from_slice(&content);
    out
}

/// A field nobody declared, or a reserved one; groups nest up to and beyond what decoders allow.
fn unknown(dice: &mut Dice) -> Vec<u8> {
    let mut out = Vec::new();
    let number_ = dice.pick(&[2, 11, 14, 16, 19, 100, 2047, 2048, (1 << 29) - 1]);
    match dice.below(5) {
        0 => {
            key(number_, VARINT, &mut out);
            let value = dice.number();
            number(dice, value, &mut out);
        }
        1 => {
            key(number_, FIXED64, &mut out);
            out.extend_from_slice(&dice.next().to_le_bytes());
        }
        2 => len_field(number_, &dice.bytes(20), &mut out),
        3 => {
            key(number_, FIXED32, &mut out);
            out.extend_from_slice(&dice.next().to_le_bytes()[..4]);
        }
        _ => {
            let depth = dice.pick(&[1, 1, 1, 2, 97, 98, 99, 100, 101]);
            (0..depth).for_each(|_| key(number_, GROUP, &mut out));
            if dice.one_in(2) {
                support::varint_field(1, 5, &mut out);
            }
            (0..depth).for_each(|_| key(number_, GROUP_END, &mut out));
        }
    }
    out
}

/// A message of declared fields (each often absent, sometimes repeated) and unknown ones, in any order.
fn message(dice: &mut Dice, spec: Spec, repeats: usize) -> Vec<u8> {
    let mut fields = Vec::new();
    for &(number, shape) in spec {
        for _ in 0..dice.below(repeats + 1) + dice.below(2) {
            fields.push(field(dice, number, shape));
        }
    }
    if dice.one_in(3) {
        fields.push(unknown(dice));
    }
    if dice.one_in(2) {
        dice.shuffle(&mut fields);
    }
    fields.concat()
}

/// Breaks bytes a little, in half of the cases.
fn mutate(dice: &mut Dice, bytes: &mut Vec<u8>) {
    if dice.one_in(2) {
        return;
    }
    for _ in 0..=dice.below(3) {
        let at = dice.below(bytes.len());
        match dice.below(6) {
            _ if bytes.is_empty() => bytes.push(dice.byte()),
            0 => bytes[at] = dice.byte(),
            1 => bytes.truncate(at),
            2 => bytes.insert(at, dice.byte()),
            3 => bytes[at] ^= 1 << dice.below(8),
            4 => drop(bytes.remove(at)),
            _ => {
                let again = bytes[at..].to_vec();
                bytes.extend_from_slice(&again);
            }
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// `Ok(true)`: both accept and agree. `Ok(false)`: both refuse. `Err`: they differ.
fn verdict<M, V>(
    theirs: Result<M, prost::DecodeError>,
    ours: Result<V, ViewError>,
    same: impl FnOnce(&M, &V) -> bool,
) -> Result<bool, String> {
    match (theirs, ours) {
        (Ok(theirs), Ok(ours)) if same(&theirs, &ours) => Ok(true),
        (Ok(_), Ok(_)) => Err("values differ".to_owned()),
        (Err(_), Err(_)) => Ok(false),
        (theirs, ours) => Err(format!(
            "generated {:?}, view {:?}",
            theirs.err(),
            ours.err()
        )),
    }
}

/// Runs both decoders over the inputs.
#[expect(clippy::print_stdout, reason = "the counts are the result")]
fn compare(name: &str, spec: Spec, check: impl Fn(&[u8]) -> Result<bool, String>) {
    let (inputs, seed) = (
        setting("IOP_DIFF_INPUTS", 300_000),
        setting("IOP_DIFF_SEED", 1),
    );
    let mut dice = Dice::new(seed);
    let mut accepted = 0;
    for input in 0..inputs {
        let mut bytes = message(&mut dice, spec, 1);
        mutate(&mut dice, &mut bytes);
        match check(&bytes) {
            Ok(both) => accepted += u64::from(both),
            Err(text) => panic!("{name}, seed {seed}, input {input}: {text}: {bytes:02x?}"),
        }
    }
    println!("{name}: {inputs} inputs, {accepted} accepted by both, the others refused by both");
    assert!(
        accepted * 10 >= inputs * 3,
        "{name}: too few inputs are accepted: {accepted}"
    );
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
        && ours.get(b"nobody sends this").is_none()
}

fn same_headers(theirs: &[wire::HeaderEntry], ours: &Entries<'_>) -> bool {
    ours.len() == theirs.len()
        && theirs
            .iter()
            .zip(*ours)
            .all(|(a, b)| a.key.as_bytes() == b.0 && a.value == b.1)
}

fn same_usage(theirs: Option<wire::Usage>, ours: Option<Usage>) -> bool {
    ours == theirs.map(|usage| Usage {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        total_tokens: usage.total_tokens,
    })
}

fn same_frame(theirs: &wire::ProviderTunnelFrame, ours: &TunnelFrameView<'_>) -> bool {
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
}

#[test]
fn tunnel_frame_view_agrees_with_the_generated_decoder() {
    compare(FRAME, TUNNEL_FRAME, |bytes| {
        verdict(
            wire::ProviderTunnelFrame::decode(bytes),
            TunnelFrameView::parse(bytes),
            same_frame,
        )
    });
}

#[test]
fn envelope_view_agrees_with_the_generated_decoder() {
    compare("iop.transport.Envelope", ENVELOPE, |bytes| {
        let (theirs, ours) = (
            wire::transport::Envelope::decode(bytes),
            EnvelopeView::parse(bytes),
        );
        verdict(theirs, ours, |theirs, ours| {
            theirs.id == ours.id
                && theirs.reply_to == ours.reply_to
                && theirs.r#type.as_bytes() == ours.type_name
                && theirs.payload == ours.payload
                && ours.kind.is_none_or(|kind| kind.name() == theirs.r#type)
                && ours.kind == MessageType::from_name(theirs.r#type.as_bytes())
        })
    });
}

#[test]
fn run_event_view_agrees_with_the_generated_decoder() {
    compare("iop.RunEvent", RUN_EVENT, |bytes| {
        verdict(
            wire::RunEvent::decode(bytes),
            RunEventView::parse(bytes),
            |theirs, ours| {
                theirs.run_id.as_bytes() == ours.run_id
                    && theirs.r#type.as_bytes() == ours.type_name
                    && theirs.delta.as_bytes() == ours.delta
                    && theirs.error.as_bytes() == ours.error
                    && same_usage(theirs.usage, ours.usage)
                    && same_map(&theirs.metadata, &ours.metadata)
                    && theirs.failure.is_some() == ours.has_failure
            },
        )
    });
}

#[test]
fn register_request_view_agrees_with_the_generated_decoder() {
    compare("iop.RegisterRequest", REGISTER, |bytes| {
        let (theirs, ours) = (
            wire::RegisterRequest::decode(bytes),
            RegisterRequestView::parse(bytes),
        );
        verdict(theirs, ours, |theirs, ours| {
            theirs.node_id.as_bytes() == ours.node_id
                && theirs.token.as_bytes() == ours.token
                && theirs.node_version.as_bytes() == ours.node_version
        })
    });
}

#[test]
fn ready_request_view_agrees_with_the_generated_decoder() {
    compare("iop.NodeReadyRequest", ONE_TEXT, |bytes| {
        let (theirs, ours) = (
            wire::NodeReadyRequest::decode(bytes),
            NodeReadyRequestView::parse(bytes),
        );
        verdict(theirs, ours, |theirs, ours| {
            theirs.node_id.as_bytes() == ours.node_id
        })
    });
}

#[test]
fn transport_views_agree_with_the_generated_decoder() {
    use wire::transport as t;
    compare("iop.transport.Ping", ONE_NUMBER, |bytes| {
        verdict(t::Ping::decode(bytes), PingView::parse(bytes), |a, b| {
            a.seq == b.seq
        })
    });
    compare("iop.transport.Pong", ONE_NUMBER, |bytes| {
        verdict(t::Pong::decode(bytes), PongView::parse(bytes), |a, b| {
            a.seq == b.seq
        })
    });
    compare("iop.transport.GoAway", ONE_NUMBER, |bytes| {
        let (theirs, ours) = (t::GoAway::decode(bytes), GoAwayView::parse(bytes));
        verdict(theirs, ours, |a, b| a.grace_ms == b.grace_ms)
    });
    compare("iop.transport.Features", ONE_NUMBER, |bytes| {
        let (theirs, ours) = (t::Features::decode(bytes), FeaturesView::parse(bytes));
        verdict(theirs, ours, |a, b| a.window == b.window)
    });
}

// ── cut-through ───────────────────────────────────────────────────────────────────────────────────

/// An envelope around a frame whose body is the longest part of it, with its pieces.
struct LongFrame {
    head: Vec<u8>,
    frame: Vec<u8>,
    envelope: Vec<u8>,
}

/// Fields of a frame around its body, mostly in the order of an encoder.
fn frame_around_body(dice: &mut Dice) -> Vec<u8> {
    let mut before = Vec::new();
    len_field(1, b"0123456789abcdef0123456789abcdef", &mut before);
    support::varint_field(
        3,
        if dice.one_in(8) { dice.next() % 7 } else { 2 },
        &mut before,
    );
    support::varint_field(4, dice.number(), &mut before);
    let pieces = [
        field(dice, 5, Shape::Number),
        field(dice, 6, Shape::BytesEntry),
        unknown(dice),
    ];
    for piece in pieces {
        if dice.one_in(4) {
            before.extend(piece);
        }
    }
    let mut body = Vec::new();
    len_field(7, &dice.bytes(300), &mut body);
    let mut after = Vec::new();
    for &(number, shape) in &TUNNEL_FRAME[3..] {
        if number != 7 && dice.one_in(3) {
            after.extend(field(dice, number, shape));
        }
    }
    if dice.one_in(4) {
        after.extend(unknown(dice));
    }
    match dice.below(16) {
        0 => [after, body, before].concat(),
        1 => [before.clone(), body, after, before].concat(),
        _ => [before, body, after].concat(),
    }
}

fn long_frame(dice: &mut Dice) -> LongFrame {
    let mut frame = frame_around_body(dice);
    if dice.one_in(2) {
        mutate(dice, &mut frame);
    }
    let mut head = Vec::new();
    for number in [1, 2] {
        if dice.one_in(3) {
            head.extend(field(dice, number, Shape::Number));
        }
    }
    if dice.one_in(8) {
        head.extend(unknown(dice));
    }
    if !dice.one_in(16) {
        len_field(3, FRAME.as_bytes(), &mut head);
    }
    let mut tail = Vec::new();
    for &(number, shape) in &[ENVELOPE[0], ENVELOPE[2], ENVELOPE[3]] {
        if dice.one_in(if number == 1 { 4 } else { 16 }) {
            tail.extend(field(dice, number, shape));
        }
    }
    if dice.one_in(4) {
        tail.extend(unknown(dice));
    }
    if dice.one_in(8) {
        mutate(dice, &mut head);
    }
    if dice.one_in(8) {
        mutate(dice, &mut tail);
    }
    let mut envelope = head.clone();
    len_field(4, &frame, &mut envelope);
    envelope.extend(tail);
    LongFrame {
        head,
        frame,
        envelope,
    }
}

/// Feeds a growing prefix, as a carry buffer would; the verdict must not change afterwards.
fn probe_growing(dice: &mut Dice, envelope: &[u8]) -> Result<CutProbe, ViewError> {
    let length = u32::try_from(envelope.len()).expect("a short envelope");
    let mut end = 0;
    while end < envelope.len() {
        end = (end + 1 + dice.below(40)).min(envelope.len());
        let probe = cut_probe(&envelope[..end], length)?;
        if probe != CutProbe::NeedMore {
            return Ok(probe);
        }
    }
    Ok(CutProbe::NeedMore)
}

/// The cut's pieces against the generated decoder; true when the frame was cut and is valid.
fn check_cut(input: &LongFrame, probe: Result<CutProbe, ViewError>) -> Result<bool, String> {
    let envelope = wire::transport::Envelope::decode(&input.envelope[..]);
    let frame = wire::ProviderTunnelFrame::decode(&input.frame[..]);
    // Only then the frame is what a probe of the first payload sees.
    let frame_is_first = wire::transport::Envelope::decode(&input.head[..])
        .is_ok_and(|head| head.payload.is_empty());
    let refused = envelope.is_err() || (frame_is_first && frame.is_err());
    let cut = match probe {
        Ok(CutProbe::Cut(cut)) => cut,
        Ok(CutProbe::NeedMore | CutProbe::NotCut) => return Ok(false),
        Err(_) if refused || !frame_is_first => return Ok(false),
        Err(error) => return Err(format!("probe refused what is valid: {error}")),
    };
    let (header, rest) = input.envelope.split_at(cut.header_len as usize);
    let (body, rest) = rest.split_at(cut.body_len as usize);
    let (frame_tail, envelope_tail) = rest.split_at(cut.frame_tail_len as usize);
    if envelope_tail.len() != cut.envelope_tail_len as usize || header.is_empty() {
        return Err("lengths do not add up".to_owned());
    }
    match check_cut_tail(frame_tail, envelope_tail) {
        Ok(()) => {
            let envelope = envelope.map_err(|error| format!("envelope: {error}"))?;
            let frame = wire::ProviderTunnelFrame::decode(&envelope.payload[..])
                .map_err(|error| format!("frame: {error}"))?;
            let same = envelope.r#type == FRAME
                && frame.body == body
                && frame.kind == 2
                && frame.sequence == cut.sequence
                && cut.run_id.as_ref().map(<[u8; 32]>::as_slice)
                    == Some(frame.run_id.as_bytes()).filter(|id| id.len() == 32);
            if same {
                Ok(true)
            } else {
                Err("values differ".to_owned())
            }
        }
        Err(ViewError::Repeated { .. }) => Ok(false),
        Err(_) if refused || !frame_is_first => Ok(false),
        Err(error) => Err(format!("tail refused what is valid: {error}")),
    }
}

#[test]
fn cut_through_agrees_with_the_generated_decoder() {
    let (inputs, seed) = (
        setting("IOP_DIFF_INPUTS", 300_000),
        setting("IOP_DIFF_SEED", 1),
    );
    let mut dice = Dice::new(seed);
    let mut accepted = 0;
    for input in 0..inputs {
        let long = long_frame(&mut dice);
        let probe = probe_growing(&mut dice, &long.envelope);
        match check_cut(&long, probe) {
            Ok(cut) => accepted += u64::from(cut),
            Err(text) => panic!("seed {seed}, input {input}: {text}: {:02x?}", long.envelope),
        }
    }
    println!("cut-through: {inputs} inputs, {accepted} cut and equal");
    assert!(
        accepted * 10 >= inputs * 3,
        "too few inputs are cut: {accepted}"
    );
}
