//! The scan for `model`: equal over every split, the same model as serde_json finds, a splice that
//! changes that value alone, and a cut that leaves the object without it.
//!
//! Lives on: one thread. View: one request body. Bound: the input.
use std::fmt;

use iop_dataplane::shard::splice::{ModelScanner, ModelSpan, write_json_string};
use iop_proto::limits::NAME_BYTES_MAX;
use iop_proto::reason::Reason;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::dice::{Dice, LARGEST_PIECES};

/// Nesting that serde_json surely takes; we take more.
const THEIR_DEPTH_MAX: usize = 100;
/// A model name that needs every kind of escape.
const TARGET: &str = "a \"b\" \\ /\u{1}\n\u{1f}\u{7f}한🌍";

pub(crate) fn run(data: &[u8]) -> bool {
    let whole = scan([data]);
    let mut dice = Dice::of(data);
    for largest in LARGEST_PIECES {
        assert_eq!(
            scan(dice.pieces(data, largest)),
            whole,
            "pieces of {largest}"
        );
    }
    let opened = data
        .iter()
        .filter(|byte| matches!(byte, b'{' | b'['))
        .count();
    if opened < THEIR_DEPTH_MAX {
        let theirs = oracle(data);
        match (&whole, &theirs) {
            (Ok(span), Some((name, stream))) => {
                assert_eq!(span.stream, *stream, "stream");
                match span.name() {
                    Some(ours) => assert_eq!(ours, name.as_bytes()),
                    None => assert!(name.len() > NAME_BYTES_MAX as usize),
                }
                check_spliced(data, span);
                check_cut(data, span);
            }
            (Err(_), None) => {}
            _ => panic!("ours {whole:?}, theirs {theirs:?}"),
        }
    }
    whole.is_ok()
}

fn scan<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<ModelSpan, Reason> {
    let mut scanner = ModelScanner::new();
    for piece in pieces {
        if let Err(reason) = scanner.push(piece) {
            assert_eq!(scanner.push(b"}"), Err(reason));
            assert_eq!(scanner.finish().err(), Some(reason));
            return Err(reason);
        }
    }
    scanner.finish()
}

fn check_spliced(body: &[u8], span: &ModelSpan) {
    let at = |offset: u64| usize::try_from(offset).expect("an offset of the body");
    let mut value = [0; 256];
    let len = write_json_string(&mut value, TARGET).expect("the target fits");
    let spliced = [
        &body[..at(span.start)],
        &value[..len],
        &body[at(span.end)..],
    ]
    .concat();
    assert_eq!(oracle(&spliced), Some((TARGET.to_owned(), span.stream)));
}

/// Without the member the body is the same object, its other members as they were.
fn check_cut(body: &[u8], span: &ModelSpan) {
    let at = |offset: u64| usize::try_from(offset).expect("an offset of the body");
    let cut = [&body[..at(span.member_start)], &body[at(span.member_end)..]].concat();
    let members = |body: &[u8]| {
        serde_json::from_slice::<Members>(body)
            .expect("a body that was accepted")
            .0
    };
    let mut kept = members(body);
    kept.retain(|(key, _)| key != "model");
    assert_eq!(members(&cut), kept);
}

/// An object's members in their order, each value as it stands.
struct Members(Vec<(String, String)>);

impl<'de> serde::Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                    members.push((key, value.get().to_owned()));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Each)
    }
}

/// What serde_json makes of a body under the same rule: the one top-level model, and `stream`.
fn oracle(body: &[u8]) -> Option<(String, bool)> {
    struct TopLevel;
    impl<'de> Visitor<'de> for TopLevel {
        type Value = (Vec<Option<String>>, bool);

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut models, mut stream) = (Vec::new(), false);
            while let Some(key) = map.next_key::<String>()? {
                if key.eq_ignore_ascii_case("model") {
                    let value = map.next_value::<&RawValue>()?.get();
                    let text = serde_json::from_str(value).ok();
                    models.push(text.filter(|_| key == "model"));
                } else if key == "stream" {
                    stream = map.next_value::<&RawValue>()?.get() == "true";
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok((models, stream))
        }
    }
    let mut json = serde_json::Deserializer::from_str(str::from_utf8(body).ok()?);
    let (mut models, stream) = json.deserialize_map(TopLevel).ok()?;
    json.end().ok()?;
    let only = models.pop()?;
    models.is_empty().then_some((only?, stream))
}
