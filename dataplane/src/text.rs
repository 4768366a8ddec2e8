//! Bytes written into a caller's slice: heads, JSON, numbers. Nothing is allocated, nothing cut short.
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
        let bytes = text.as_bytes();
        let mut plain = 0;
        self.put(b"\"")?;
        for (at, &byte) in bytes.iter().enumerate() {
            if byte >= 0x20 && byte != b'"' && byte != b'\\' {
                continue;
            }
            self.put(&bytes[plain..at])?;
            plain = at + 1;
            if byte < 0x20 {
                self.put(if byte < 0x10 { b"\\u000" } else { b"\\u00" })?;
                self.put_hex(u64::from(byte))?;
            } else {
                self.put(&[b'\\', byte])?;
            }
        }
        self.put(&bytes[plain..])?;
        self.put(b"\"")
    }
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
