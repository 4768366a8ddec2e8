//! Tool calls of an answer: text that passes and text that is held are the text, however it is cut; what
//! is made of either is JSON of the same calls as serde_json reads.
//!
//! Lives on: one thread. View: one answer's text, or one `openai_tool_calls`. Bound: the input, whose
//! first byte chooses.
use iop_dataplane::surface::openai::tools::{
    Hold, OPEN, Part, delta_calls, parts, reported, restored, whole_calls,
};
use serde_json::{Map, Value};

use crate::dice::{Dice, LARGEST_PIECES};

/// Nesting that both read.
const DEPTH_MAX: usize = 60;
const CALLS_MAX: usize = iop_proto::limits::RESTORED_TOOL_CALLS_MAX as usize;

pub(crate) fn run(data: &[u8]) -> bool {
    let Some((&first, rest)) = data.split_first() else {
        return false;
    };
    let Ok(text) = core::str::from_utf8(rest) else {
        return false;
    };
    if first % 2 == 0 {
        calls(text)
    } else {
        blocks(text)
    }
}

/// Both take it and agree, or neither does.
fn calls(text: &str) -> bool {
    let opened = text
        .bytes()
        .filter(|byte| matches!(byte, b'{' | b'['))
        .count();
    let theirs = serde_json::from_str::<Vec<Map<String, Value>>>(text).ok();
    let theirs = theirs.filter(|calls| (1..=CALLS_MAX).contains(&calls.len()));
    let Some(ours) = reported(text.as_bytes()) else {
        // serde_json refuses numbers beyond its range, we refuse depth.
        assert!(theirs.is_none() || opened > DEPTH_MAX, "refused {text:?}");
        return false;
    };
    let Some(theirs) = theirs else { return true };
    let whole = read(whole_calls(ours.clone()));
    assert_eq!(whole, theirs);
    for (row, mut call) in read(delta_calls(ours)).into_iter().enumerate() {
        if !theirs[row].contains_key("index") {
            assert_eq!(call.remove("index"), Some(Value::from(row)));
        }
        assert_eq!(call, theirs[row]);
    }
    true
}

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Map<String, Value>> {
    let text = [
        &b"["[..],
        &pieces.flatten().copied().collect::<Vec<u8>>(),
        b"]",
    ]
    .concat();
    serde_json::from_slice(&text).unwrap_or_else(|_| panic!("{}", text.escape_ascii()))
}

/// Whether the text holds a call.
fn blocks(text: &str) -> bool {
    let whole = split([text.as_bytes()]);
    let mut dice = Dice::of(text.as_bytes());
    for largest in LARGEST_PIECES {
        let pieces = dice.pieces(text.as_bytes(), largest);
        assert_eq!(split(pieces), whole, "pieces of {largest}");
    }
    let (passed, held) = whole;
    assert_eq!([&passed[..], &held].concat(), text.as_bytes());
    let is_call = |part: &Part<'_>| matches!(part, Part::Call { .. });
    let calls = parts(&held).filter(is_call).count();
    if opened(&held) <= DEPTH_MAX {
        let whole = read(restored(&held, b"id", false));
        assert_eq!(whole.len(), calls);
        for call in whole {
            let function = call["function"].as_object().expect("an object");
            assert!(function["name"].is_string() && function["arguments"].is_string());
        }
    }
    calls > 0
}

fn opened(text: &[u8]) -> usize {
    text.iter()
        .filter(|byte| matches!(byte, b'{' | b'['))
        .count()
}

/// What passes and what is held.
fn split<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, Vec<u8>) {
    let (mut passed, mut held, mut hold) = (Vec::new(), Vec::new(), Hold::Line(0));
    for piece in pieces {
        let taken = hold.take(piece);
        passed.extend_from_slice(taken.released);
        passed.extend_from_slice(taken.passes);
        if taken.opens {
            held.extend_from_slice(OPEN);
        }
        held.extend_from_slice(taken.held);
    }
    passed.extend_from_slice(hold.partial());
    (passed, held)
}
