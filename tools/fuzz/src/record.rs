//! Record protection against a peer that seals what the input says and a link that changes it: the
//! outcome is exactly the one an independent model of RFC 8446 §5 foretells, whatever the split.
//!
//! Lives on: one thread. View: one connection after its handshake. Bound: `STREAM_BYTES_MAX`.
//!
//! ```text
//!  0       1                   bytes
//!  +-------+---------------------------+
//!  | suite | operation, its arguments … |      see `Script::step`
//!  +-------+---------------------------+
//! ```
mod link;
mod model;
mod sealer;

use iop_dataplane::tls::{Opened, ReplyBuf, TlsError};

use crate::dice::Dice;
use link::Link;
use model::{End, Outcome};
use sealer::Sealer;

/// A few long records, or many short ones.
const STREAM_BYTES_MAX: usize = 80_000;
const PIECE_BYTES_MAX: [usize; 4] = [1, 23, 700, 40_000];

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
const PLAIN_MAX: usize = 16_384;
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];

pub(crate) fn run(data: &[u8]) -> bool {
    let Some((&suite, script)) = data.split_first() else {
        return false;
    };
    let mut dice = Dice::of(data);
    let (mut link, sealer) = Link::new(usize::from(suite));
    let mut script = Script {
        rest: script,
        sealer,
        stream: Vec::new(),
        last: 0,
    };
    while !script.rest.is_empty() && script.stream.len() < STREAM_BYTES_MAX {
        script.step();
    }
    let expected = model::outcome(&script.stream, script.sealer.sent());
    let largest = PIECE_BYTES_MAX[dice.below(PIECE_BYTES_MAX.len())];
    let found = drive(&mut link, &script.stream, &mut dice, largest);
    assert_eq!(found, expected, "pieces of {largest}");
    finish(&mut link, expected.end);
    matches!(expected.end, End::Open | End::Closed)
}

/// What the peer seals and what becomes of it on the way.
struct Script<'a> {
    rest: &'a [u8],
    sealer: Sealer,
    stream: Vec<u8>,
    /// Where the last record starts.
    last: usize,
}

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else {
            return 0;
        };
        self.rest = rest;
        first
    }

    fn number(&mut self) -> usize {
        usize::from(u16::from_be_bytes([self.byte(), self.byte()]))
    }

    fn seal(&mut self, content: u8, message: &[u8], padding: usize) {
        self.last = self.stream.len();
        let record = self.sealer.record(content, message, padding);
        self.stream.extend_from_slice(&record);
    }

    fn step(&mut self) {
        match self.byte() % 12 {
            0 | 1 => {
                let (bytes, padding) = (self.byte(), self.byte() % 8);
                self.seal(DATA, &pattern(bytes.into()), padding.into());
            }
            2 => {
                let bytes = self.number() % (PLAIN_MAX + 2);
                let padding = self.byte() % 2;
                self.seal(DATA, &pattern(bytes), padding.into());
            }
            3 => {
                let request = self.byte() % 3;
                self.seal(HANDSHAKE, &[24, 0, 0, 1, request], 0);
                self.sealer.update(request);
            }
            4 => {
                let (cut, request) = (1 + usize::from(self.byte() % 4), self.byte() % 2);
                let message = [&KEY_UPDATE[..], &[request]].concat();
                self.seal(HANDSHAKE, &message[..cut], 0);
                self.seal(HANDSHAKE, &message[cut..], 0);
                self.sealer.update(request);
            }
            5 => {
                let alert = [self.byte(), self.byte()];
                self.seal(ALERT, &alert, 0);
            }
            6 => {
                let (content, bytes) = (self.byte(), usize::from(self.byte() % 16));
                let message: Vec<u8> = (0..bytes).map(|_| self.byte()).collect();
                self.seal(content, &message, 0);
            }
            7 => self.seal(DATA, &[], 0),
            8 => self.flip(),
            9 => {
                let record = self.stream[self.last..].to_vec();
                self.stream.extend_from_slice(&record);
            }
            10 => {
                let bytes = usize::from(self.byte() % 32);
                let junk: Vec<u8> = (0..bytes).map(|_| self.byte()).collect();
                self.stream.extend_from_slice(&junk);
            }
            _ => {
                let gone = usize::from(self.byte()).min(self.stream.len());
                self.stream.truncate(self.stream.len() - gone);
                self.last = self.last.min(self.stream.len());
            }
        }
    }

    /// Changes one byte, of the whole stream or near the last record's start, where the header is.
    fn flip(&mut self) {
        let (place, change) = (self.number(), self.byte());
        let at = if place >= 0x8000 {
            self.last + place % 8
        } else {
            place % self.stream.len().max(1)
        };
        if let Some(byte) = self.stream.get_mut(at) {
            *byte ^= change;
        }
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..=250).cycle().take(bytes).collect()
}

/// Opens the stream as a shard does, records opened to the end of the plaintext before them.
fn drive(link: &mut Link, stream: &[u8], dice: &mut Dice, largest: usize) -> Outcome {
    let mut outcome = Outcome::default();
    let mut buffer = Vec::new();
    let mut before = 0; // bytes of the stream that have left the buffer
    for piece in dice.pieces(stream, largest) {
        buffer.extend_from_slice(piece);
        let (mut at, mut plain_end) = (0, 0);
        let mut reply = ReplyBuf::default();
        while outcome.end == End::Open {
            match link.records.open(&mut buffer, at, plain_end, &mut reply) {
                Ok(Opened::NeedMore) => {
                    let here = &stream[before + at..before + buffer.len()];
                    assert_eq!(&buffer[at..], here, "an unread record was touched");
                    break;
                }
                Ok(Opened::Data {
                    next,
                    plain_end: end,
                }) => {
                    assert!(at < next && plain_end <= end && end <= next);
                    (at, plain_end) = (next, end);
                }
                Ok(Opened::Control { next }) => {
                    assert!(at < next);
                    at = next;
                    if !reply.is_empty() {
                        outcome.replies += 1;
                        link.give(reply.as_slice())
                            .expect("the peer takes our key update");
                        reply.clear();
                        // A stock peer takes only so many key updates in a row without data.
                        send(link, &[0]);
                    }
                }
                Ok(Opened::Closed { .. }) => outcome.end = End::Closed,
                Err(error) => outcome.end = End::Failed(error),
            }
        }
        outcome.plain.extend_from_slice(&buffer[..plain_end]);
        if outcome.end != End::Open {
            break;
        }
        buffer.drain(..at);
        before += at;
    }
    outcome
}

/// The peer is told about an error as it should be; else we can still send.
fn finish(link: &mut Link, end: End) {
    let mut reply = ReplyBuf::default();
    if let End::Failed(error) = end {
        link.records.alert(&error, &mut reply);
        let told = link.give(reply.as_slice());
        let alerted = matches!(told, Err(rustls::Error::AlertReceived(_)));
        assert_eq!(alerted, error.alert().is_some(), "{told:?}");
        assert_eq!(
            link.records.seal(&mut [0; 64], 1),
            Err(TlsError::WriteClosed)
        );
        return;
    }
    send(link, &pattern(300));
    link.records
        .close_notify(&mut reply)
        .expect("room for an alert");
    link.give(reply.as_slice())
        .expect("close_notify is no error");
}

/// What we seal now the peer opens.
fn send(link: &mut Link, plain: &[u8]) {
    let mut record = vec![0; plain.len() + 22];
    record[5..5 + plain.len()].copy_from_slice(plain);
    let length = link.records.seal(&mut record, plain.len());
    assert_eq!(length, Ok(record.len()));
    link.give(&record).expect("the peer opens our record");
    assert_eq!(link.received(), plain);
}
