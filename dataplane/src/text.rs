//! HOT. Bytes written into a caller's slice: heads, JSON, numbers; and text in pieces for JSON. Nothing is
//! allocated, nothing cut short.
//!
//! Lives on: any thread. Bound: the slice it is given.

/// The slice has no room for what was to be written. What it holds is incomplete and must not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// Appends to a slice. `len <= out.len()`.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    #[must_use]
    pub fn new(out: &'a mut [u8]) -> Self {
        Self { out, len: 0 }
    }

    /// Bytes written so far.
    #[must_use]
    pub const fn written(&self) -> usize {
        self.len
    }

    /// # Errors
    /// `NoRoom` when `bytes` does not fit whole; then nothing of it is written.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), NoRoom> {
        let free = &mut self.out[self.len..];
        free.get_mut(..bytes.len())
            .ok_or(NoRoom)?
            .copy_from_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }

    /// Writes `value` in decimal.
    ///
    /// # Errors
    /// `NoRoom`, as `put`.
    pub fn put_decimal(&mut self, value: u64) -> Result<(), NoRoom> {
        self.put_digits(value, 10)
    }

    /// Writes `value` in lower-case hexadecimal.
    ///
    /// # Errors
    /// `NoRoom`, as `put`.
    pub fn put_hex(&mut self, value: u64) -> Result<(), NoRoom> {
        self.put_digits(value, 16)
    }

    fn put_digits(&mut self, mut value: u64, base: u64) -> Result<(), NoRoom> {
        let mut digits = [0; 20]; // u64::MAX in decimal
        let mut first = digits.len();
        loop {
            first -= 1;
            let digit = u8::try_from(value % base).expect("below 16");
            digits[first] = if digit < 10 {
                b'0' + digit
            } else {
                b'a' + digit - 10
            };
            value /= base;
            if value == 0 {
                return self.put(&digits[first..]);
            }
        }
    }

    /// Writes `text` as a JSON string, quotes included: `"`, `\` and control characters escaped,
    /// everything else as it is.
    ///
    /// # Errors
    /// `NoRoom`, as `put`, but a part may have been written.
    pub fn put_json_string(&mut self, text: &str) -> Result<(), NoRoom> {
        self.put(b"\"")?;
        for piece in json_escaped(text.as_bytes()) {
            self.put(piece)?;
        }
        self.put(b"\"")
    }
}

/// `text`, which is UTF-8, as the inside of a JSON string: runs of bytes that stand for themselves,
/// borrowed from it, and escapes between them.
#[must_use]
pub const fn json_escaped(text: &[u8]) -> Escaped<'_> {
    Escaped { rest: text }
}

/// See [`json_escaped`]. No piece is empty.
#[derive(Clone, Debug)]
pub struct Escaped<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Escaped<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let &first = self.rest.first()?;
        if let Some(escape) = escape_of(first) {
            self.rest = &self.rest[1..];
            return Some(escape);
        }
        let (plain, rest) = self.rest.split_at(json_plain_len(self.rest));
        self.rest = rest;
        Some(plain)
    }
}

const fn escape_of(byte: u8) -> Option<&'static [u8]> {
    Some(match byte {
        b'"' => b"\\\"",
        b'\\' => b"\\\\",
        b'\n' => b"\\n",
        b'\r' => b"\\r",
        b'\t' => b"\\t",
        ..0x20 => &CONTROLS[byte as usize],
        _ => return None,
    })
}

/// `\u0000` to `\u001f`.
static CONTROLS: [[u8; 6]; 0x20] = {
    let mut controls = [*b"\\u0000"; 0x20];
    let mut byte = 0;
    while byte < 0x20 {
        controls[byte][4] = if byte < 0x10 { b'0' } else { b'1' };
        controls[byte][5] = b"0123456789abcdef"[byte % 16];
        byte += 1;
    }
    controls
};

/// Leading bytes that stand for themselves in a JSON string: all but quote, backslash and control
/// characters, eight at a time.
#[must_use]
pub fn json_plain_len(text: &[u8]) -> usize {
    const LOW: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH: u64 = LOW * 0x80;
    // The high bit of a byte that is 0, and wrongly only above one that is.
    let zeros = |word: u64| word.wrapping_sub(LOW) & !word;
    let mut len = 0;
    for word in text.as_chunks::<8>().0 {
        let word = u64::from_le_bytes(*word);
        let special = (word.wrapping_sub(LOW * 0x20) & !word)
            | zeros(word ^ (LOW * u64::from(b'"')))
            | zeros(word ^ (LOW * u64::from(b'\\')));
        if special & HIGH != 0 {
            return len + (special & HIGH).trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    let is_plain = |&&byte: &&u8| byte >= 0x20 && byte != b'"' && byte != b'\\';
    len + text[len..].iter().take_while(is_plain).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_all_their_digits() {
        for value in [0, 9, 10, 255, 256, 4_096, u64::MAX] {
            let mut out = [0; 64];
            let mut text = Writer::new(&mut out);
            text.put_decimal(value).unwrap();
            text.put(b" ").unwrap();
            text.put_hex(value).unwrap();
            let len = text.written();
            assert_eq!(
                std::str::from_utf8(&out[..len]).unwrap(),
                format!("{value} {value:x}")
            );
        }
    }

    #[test]
    fn escaped_text_is_the_same_text_in_json_whatever_it_holds() {
        let mut dice = 0x9e37_79b9_7f4a_7c15u64;
        for round in 0..20_000 {
            let mut text = String::new();
            for _ in 0..round % 40 {
                dice ^= dice << 13;
                dice ^= dice >> 7;
                dice ^= dice << 17;
                let odd = [
                    '"', '\\', '\n', '\r', '\t', '\0', '\u{1f}', '\u{7f}', 'é', '한', '🌍', '!',
                    '#', '[', ']', ' ',
                ];
                let row = usize::try_from(dice % 48).unwrap();
                text.push(odd.get(row).copied().unwrap_or('a'));
            }
            let pieces: Vec<_> = json_escaped(text.as_bytes()).collect();
            assert!(pieces.iter().all(|piece| !piece.is_empty()));
            let json = [&b"\""[..], &pieces.concat(), b"\""].concat();
            assert_eq!(serde_json::from_slice::<String>(&json).unwrap(), text);
            let mut out = [0; 512];
            let mut writer = Writer::new(&mut out);
            writer.put_json_string(&text).unwrap();
            let len = writer.written();
            assert_eq!(out[..len], json);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut out = [0; 3];
        let mut text = Writer::new(&mut out);
        assert_eq!(text.put(b"abcd"), Err(NoRoom));
        assert_eq!(text.put(b"abc"), Ok(()));
        assert_eq!(text.put(b""), Ok(()));
        assert_eq!(text.put(b"d"), Err(NoRoom));
        assert_eq!(&out, b"abc");
    }
}
