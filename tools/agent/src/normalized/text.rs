//! Text that arrives as bytes in pieces: whole characters are handed on, a split one waits.
//!
//! Lives on: the attempt's task. View: one answer. Bound: three bytes held back.
//!
//! A piece may end inside a character, and a JSON string may end between the halves of a surrogate
//! pair, which then stand as three bytes each. What can never become a character is U+FFFD, so that
//! no byte of a provider makes an event undecodable. `[P-26]`
use core::fmt;
use std::borrow::Cow;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};

/// Bytes of a JSON string, whether they are characters or not.
#[derive(Debug)]
pub(crate) struct Piece<'a>(pub(crate) Cow<'a, [u8]>);

impl<'de: 'a, 'a> Deserialize<'de> for Piece<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl<'de> Visitor<'de> for Bytes {
            type Value = Piece<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_bytes<E: Error>(self, bytes: &'de [u8]) -> Result<Piece<'de>, E> {
                Ok(Piece(bytes.into()))
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Piece<'de>, E> {
                Ok(Piece(bytes.to_vec().into()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// Longest thing held back: one half of a surrogate pair, or a character without its last byte.
const HELD_BYTES_MAX: usize = 3;

/// What waits for its rest.
#[derive(Debug)]
pub(crate) struct Text {
    held: Vec<u8>,
}

impl Text {
    pub(crate) const fn new() -> Self {
        Self { held: vec![] }
    }

    /// Takes a piece; appends what is whole.
    pub(crate) fn push(&mut self, piece: &[u8], out: &mut String) {
        if self.held.is_empty() {
            self.held = take_whole(piece, out).to_vec();
        } else {
            let mut joined = core::mem::take(&mut self.held);
            joined.extend_from_slice(piece);
            self.held = take_whole(&joined, out).to_vec();
        }
        debug_assert!(self.held.len() <= HELD_BYTES_MAX);
    }

    /// Nothing follows: what still waits is no character.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !core::mem::take(&mut self.held).is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends all of `bytes` but an end that may become a character, which is returned.
fn take_whole<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        let error = match core::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => error,
        };
        let (whole, rest) = bytes.split_at(error.valid_up_to());
        out.push_str(core::str::from_utf8(whole).unwrap_or_default());
        let Some(bad) = error.error_len() else {
            return rest;
        };
        bytes = match (half(rest), rest.get(3..).map(|next| (next, half(next)))) {
            (Some(Half::High(high)), Some((next, Some(Half::Low(low))))) => {
                let point = 0x1_0000 + (high << 10) + low;
                out.push(char::from_u32(point).unwrap_or(char::REPLACEMENT_CHARACTER));
                &next[3..]
            }
            (Some(Half::High(_)), Some(([], _))) => return rest,
            (Some(_), Some((next, _))) => {
                out.push(char::REPLACEMENT_CHARACTER);
                next
            }
            _ => {
                out.push(char::REPLACEMENT_CHARACTER);
                &rest[bad..]
            }
        };
    }
}

/// Half of a surrogate pair and its ten bits.
enum Half {
    High(u32),
    Low(u32),
}

fn half(bytes: &[u8]) -> Option<Half> {
    let &[0xed, second @ 0xa0..=0xbf, third @ 0x80..=0xbf, ..] = bytes else {
        return None;
    };
    let bits = u32::from(second & 0x0f) << 6 | u32::from(third & 0x3f);
    Some(if second < 0xb0 {
        Half::High(bits)
    } else {
        Half::Low(bits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let (mut text, mut out) = (Text::new(), String::new());
        for piece in pieces {
            text.push(piece, &mut out);
        }
        text.finish(&mut out);
        out
    }

    /// Proves [P-26].
    #[test]
    fn p26_a_character_cut_anywhere_arrives_whole() {
        let sample = "\u{d55c}\u{ad6d}\u{c5b4} \u{1f30d} \u{fc}x";
        let bytes = sample.as_bytes();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(joined(pieces), sample, "{first} {second}");
            }
        }
        assert_eq!(joined(bytes.chunks(1)), sample);
    }

    #[test]
    fn the_halves_of_a_pair_join_and_a_lone_one_is_replaced() {
        let (high, low) = (&b"\xed\xa0\xbc"[..], &b"\xed\xbc\x8d"[..]); // U+1F30D
        assert_eq!(joined([high, low]), "\u{1f30d}");
        assert_eq!(joined([&[high, low].concat()[..]]), "\u{1f30d}");
        assert_eq!(joined([high, b"", low]), "\u{1f30d}");
        assert_eq!(joined([high, b"x"]), "\u{fffd}x");
        assert_eq!(joined([high, high, low]), "\u{fffd}\u{1f30d}");
        assert_eq!(joined([low, b"x"]), "\u{fffd}x");
        assert_eq!(joined([high]), "\u{fffd}");
    }

    #[test]
    fn what_is_no_character_is_replaced_and_the_rest_stays() {
        assert_eq!(joined([&b"a\xff\xfeb"[..]]), "a\u{fffd}\u{fffd}b");
        assert_eq!(joined([&b"a\xe2\x82"[..], b"b"]), "a\u{fffd}b");
        assert_eq!(joined([&b"\xf0\x9f"[..]]), "\u{fffd}");
    }
}
