//! The events that are measured: fixed length, with the time they were due at a fixed place.
//!
//! Lives on: the rig. Bound: `EVENT_BYTES_MIN` to what a scenario asks for.
//!
//! ```text
//!  0              12              28                     length
//!  +--------------+---------------+-----------------------+
//!  | data: {"t":" | 16 hex digits | ","p":"xxx…xxx"}\n\n  |   one server-sent event
//!  +--------------+---------------+-----------------------+
//! ```
//! For who writes every event anew, the stamp stands between two marks in the text of a chat chunk:
//! wherever it is put, a reader finds it.

/// What a reader of answers can count on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wording {
    /// Every byte is as it was sent.
    Exact,
    /// Events are chat chunks that somebody in between reads and writes anew.
    Rewritten,
}

const CHAT_BEFORE: &[u8] =
    b"data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\
    \"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"";
const CHAT_CLOSE: &[u8] = b"\"}}]}\n\n";
/// Stands before and behind a stamp in a text.
const MARK: u8 = b'~';
const BEFORE: &[u8] = b"data: {\"t\":\"";
const AFTER: &[u8] = b"\",\"p\":\"";
const CLOSE: &[u8] = b"\"}\n\n";
/// Hex digits of a stamp: nanoseconds of `CLOCK_MONOTONIC`.
const DIGITS: usize = 16;
/// What a reader needs of an event to know its stamp.
pub(crate) const LEAD_BYTES: usize = BEFORE.len() + DIGITS;
pub(crate) const EVENT_BYTES_MIN: usize = LEAD_BYTES + AFTER.len() + CLOSE.len();

/// One event, to be stamped and sent again and again.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    bytes: Vec<u8>,
    stamp_at: usize,
}

impl Event {
    /// An event of `length` bytes.
    pub(crate) fn new(length: usize) -> Self {
        assert!(length >= EVENT_BYTES_MIN, "room for stamp and frame");
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(BEFORE);
        bytes.extend_from_slice(&[b'0'; DIGITS]);
        bytes.extend_from_slice(AFTER);
        bytes.resize(length - CLOSE.len(), b'x');
        bytes.extend_from_slice(CLOSE);
        Self {
            bytes,
            stamp_at: BEFORE.len(),
        }
    }

    /// A chat chunk of `length` bytes, or the shortest there is.
    fn chat(length: usize) -> Self {
        let mut bytes = CHAT_BEFORE.to_vec();
        bytes.push(MARK);
        let stamp_at = bytes.len();
        bytes.extend_from_slice(&[b'0'; DIGITS]);
        bytes.push(MARK);
        let filler = length.saturating_sub(bytes.len() + CHAT_CLOSE.len());
        bytes.resize(bytes.len() + filler, b'x');
        bytes.extend_from_slice(CHAT_CLOSE);
        Self { bytes, stamp_at }
    }

    /// An event framed as an HTTP chunk of its own.
    pub(crate) fn chunked(length: usize, wording: Wording) -> Self {
        let inner = match wording {
            Wording::Exact => Self::new(length),
            Wording::Rewritten => Self::chat(length),
        };
        let length = inner.bytes.len();
        let mut bytes = format!("{length:x}\r\n").into_bytes();
        let stamp_at = bytes.len() + inner.stamp_at;
        bytes.extend_from_slice(&inner.bytes);
        bytes.extend_from_slice(b"\r\n");
        Self { bytes, stamp_at }
    }

    /// The event as due at `stamp`.
    pub(crate) fn stamped(&mut self, stamp: u64) -> &[u8] {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        for (place, digit) in self.bytes[self.stamp_at..][..DIGITS].iter_mut().enumerate() {
            *digit = HEX[((stamp >> (4 * (DIGITS - 1 - place))) & 15) as usize];
        }
        &self.bytes
    }
}

/// The stamp of an event that begins with `lead`; `None`: no event of ours begins so.
pub(crate) fn stamp(lead: &[u8; LEAD_BYTES]) -> Option<u64> {
    hexadecimal(lead.strip_prefix(BEFORE)?)
}

/// The stamp between the marks of a line; `None`: it is no event of ours.
pub(crate) fn marked(line: &[u8]) -> Option<u64> {
    let at = line.iter().position(|&byte| byte == MARK)?;
    let rest = &line[at + 1..];
    (rest.get(DIGITS) == Some(&MARK)).then(|| hexadecimal(&rest[..DIGITS]))?
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |stamp: u64, &digit| {
        Some(stamp << 4 | u64::from(char::from(digit).to_digit(16)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_comes_back_and_a_damaged_event_does_not() {
        for length in [EVENT_BYTES_MIN, 200, 4096] {
            let mut event = Event::new(length);
            for wanted in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
                let bytes = event.stamped(wanted);
                assert_eq!(bytes.len(), length);
                assert!(bytes.ends_with(b"\"}\n\n"));
                let mut lead: [u8; LEAD_BYTES] = bytes[..LEAD_BYTES].try_into().unwrap();
                assert_eq!(stamp(&lead), Some(wanted));
                lead[3] ^= 1;
                assert_eq!(stamp(&lead), None);
            }
        }
    }

    #[test]
    fn a_chunk_frames_exactly_one_event() {
        let mut event = Event::chunked(200, Wording::Exact);
        let bytes = event.stamped(7).to_vec();
        assert!(bytes.starts_with(b"c8\r\ndata: "));
        assert!(bytes.ends_with(b"\n\n\r\n"));
        assert_eq!(&bytes[4..204], Event::new(200).stamped(7));
    }

    #[test]
    fn a_chat_chunk_is_json_and_its_stamp_is_found_wherever_it_stands() {
        for length in [1, 200, 4096] {
            let bytes = Event::chat(length).stamped(0xfe).to_vec();
            assert!(bytes.len() == length || length == 1);
            let text = bytes.strip_prefix(b"data: ").unwrap();
            let chunk: serde_json::Value = serde_json::from_slice(text).unwrap();
            assert_eq!(chunk["object"], "chat.completion.chunk");
            let content = chunk["choices"][0]["delta"]["content"].as_str().unwrap();
            assert_eq!(marked(content.as_bytes()), Some(0xfe));
            assert_eq!(marked(&bytes), Some(0xfe));
        }
        for line in [
            &b"data: [DONE]"[..],
            b"~00",
            b"",
            b"~0000000000000000x",
            b"~x000000000000000~",
        ] {
            assert_eq!(marked(line), None);
        }
    }
}
