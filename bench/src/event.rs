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

    /// As `new`, framed as an HTTP chunk of its own.
    pub(crate) fn chunked(length: usize) -> Self {
        let inner = Self::new(length);
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
    let digits = lead.strip_prefix(BEFORE)?;
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
        let mut event = Event::chunked(200);
        let bytes = event.stamped(7).to_vec();
        assert!(bytes.starts_with(b"c8\r\ndata: "));
        assert!(bytes.ends_with(b"\n\n\r\n"));
        assert_eq!(&bytes[4..204], Event::new(200).stamped(7));
    }
}
