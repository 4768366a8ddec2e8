//! Envelopes off a stream: equal over every split, and the ones the generated decoder reads.
//!
//! Lives on: one thread. View: the bytes of one node connection. Bound: the input.
use iop_proto::framing::envelope_len;
use iop_proto::framing::{Assembler, Envelope, FramingError, Kind, MessageType, encode_envelope};
use prost::Message;

use crate::dice::{Dice, LARGEST_PIECES};
use crate::wire;

/// Small enough that a longer prefix is nothing special.
const ENVELOPE_BYTES_MAX: u32 = 2_000;

/// Envelopes in order, then what ended the stream.
type Read = (Vec<Envelope>, Option<FramingError>);

pub(crate) fn run(data: &[u8]) -> bool {
    let whole = assemble([data]);
    let mut dice = Dice::of(data);
    for largest in LARGEST_PIECES {
        let split = assemble(dice.pieces(data, largest));
        assert_eq!(split, whole, "pieces of {largest}");
    }
    compare(data, &whole);
    let mut again = Vec::new();
    let mut known = Vec::new();
    for envelope in &whole.0 {
        if let Kind::Known(kind) = envelope.kind {
            let (id, reply_to) = (envelope.id, envelope.reply_to);
            encode_envelope(kind, id, reply_to, &envelope.payload, &mut again).expect("it fitted");
            known.push(envelope.clone());
        }
    }
    let mut assembler = Assembler::new(u32::MAX);
    assembler.push(&again);
    for envelope in known {
        assert_eq!(
            assembler.next(),
            Ok(Some(envelope)),
            "written and read back"
        );
    }
    assert_eq!((assembler.next(), assembler.pending()), (Ok(None), 0));
    whole.1.is_none() && !whole.0.is_empty()
}

fn assemble<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Read {
    let mut assembler = Assembler::new(ENVELOPE_BYTES_MAX);
    let mut envelopes = Vec::new();
    for piece in pieces {
        assembler.push(piece);
        loop {
            match assembler.next() {
                Ok(Some(envelope)) => envelopes.push(envelope),
                Ok(None) => break,
                Err(error) => {
                    assembler.push(b"more");
                    assert_eq!((assembler.next(), assembler.pending()), (Err(error), 0));
                    return (envelopes, Some(error));
                }
            }
        }
        assert!(assembler.pending() < 4 + ENVELOPE_BYTES_MAX as usize);
    }
    (envelopes, None)
}

/// Reads the stream again with the generated decoder.
fn compare(mut data: &[u8], (envelopes, error): &Read) {
    let mut ours = envelopes.iter();
    while let Some((prefix, rest)) = data.split_first_chunk() {
        let length = match envelope_len(*prefix, ENVELOPE_BYTES_MAX) {
            Ok(length) => length as usize,
            Err(expected) => {
                assert_eq!((ours.next(), *error), (None, Some(expected)));
                return;
            }
        };
        let Some((envelope, rest)) = rest.split_at_checked(length) else {
            break;
        };
        data = rest;
        let Ok(theirs) = wire::transport::Envelope::decode(envelope) else {
            assert!(
                ours.next().is_none(),
                "only the view accepts {envelope:02x?}"
            );
            assert!(matches!(error, Some(FramingError::Malformed(_))));
            return;
        };
        let ours = ours.next().expect("the generated decoder accepts it");
        let kind = MessageType::from_name(theirs.r#type.as_bytes());
        assert_eq!(ours.kind, kind.map_or(Kind::Unknown, Kind::Known));
        assert_eq!((ours.id, ours.reply_to), (theirs.id, theirs.reply_to));
        assert_eq!(ours.payload, theirs.payload);
    }
    assert_eq!((ours.next(), *error), (None, None));
}
