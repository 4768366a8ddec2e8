//! Lines out of a byte stream that may be cut anywhere.
//!
//! Lives on: the attempt's task. View: one answer. Bound: one unfinished line of
//! `RUN_LINE_BYTES_MAX`, and the chunk it was given.
use bytes::{Bytes, BytesMut};
use iop_proto::limits::RUN_LINE_BYTES_MAX;

/// A line longer than any server sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

/// Chunks in, lines out.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// The beginning of a line whose end has not arrived.
    begun: BytesMut,
    chunk: Bytes,
}

impl Lines {
    /// Takes the next chunk; the lines of the last one were all taken.
    pub(crate) fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty());
        self.chunk = chunk;
    }

    /// The next whole line, without its end.
    ///
    /// # Errors
    /// It is longer than `RUN_LINE_BYTES_MAX`.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, LineTooLong> {
        let end = self.chunk.iter().position(|&byte| byte == b'\n');
        let length = self.begun.len() + end.unwrap_or(self.chunk.len());
        if length > RUN_LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        let Some(end) = end else {
            let rest = core::mem::take(&mut self.chunk);
            self.begun.extend_from_slice(&rest);
            return Ok(None);
        };
        let mut tail = self.chunk.split_to(end + 1);
        tail.truncate(end);
        if self.begun.is_empty() {
            return Ok(Some(without_return(tail)));
        }
        let mut line = core::mem::take(&mut self.begun);
        line.extend_from_slice(&tail);
        Ok(Some(without_return(line.freeze())))
    }

    /// What stands behind the last line's end, once the stream is over.
    pub(crate) fn rest(&mut self) -> Bytes {
        without_return(core::mem::take(&mut self.begun).freeze())
    }
}

fn without_return(mut line: Bytes) -> Bytes {
    if line.ends_with(b"\r") {
        line.truncate(line.len() - 1);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&[u8]]) -> Vec<Bytes> {
        let mut lines = Lines::default();
        let mut out = vec![];
        for piece in pieces {
            lines.push(Bytes::copy_from_slice(piece));
            while let Some(line) = lines.next().unwrap() {
                out.push(line);
            }
        }
        out.push(lines.rest());
        out
    }

    #[test]
    fn lines_are_the_same_wherever_the_stream_is_cut() {
        let stream = b"{\"a\":1}\n\r\n{\"b\":\"\xe2\x82\xac\"}\r\nrest";
        let whole = read(&[stream]);
        let expected: [&[u8]; 4] = [b"{\"a\":1}", b"", b"{\"b\":\"\xe2\x82\xac\"}", b"rest"];
        assert_eq!(whole, expected);
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let cut = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(read(&cut), whole, "{first} {second}");
            }
        }
    }

    #[test]
    fn the_longest_line_passes_and_one_byte_more_does_not() {
        for (surplus, fits) in [(0, true), (1, false)] {
            let mut lines = Lines::default();
            lines.push(vec![b'x'; RUN_LINE_BYTES_MAX - 1].into());
            assert_eq!(lines.next(), Ok(None));
            lines.push([vec![b'y'; 1 + surplus], vec![b'\n']].concat().into());
            let line = lines.next().map(|line| line.map(|line| line.len()));
            assert_eq!(line.is_ok(), fits);
            assert!(!fits || line == Ok(Some(RUN_LINE_BYTES_MAX)));
        }
        let mut endless = Lines::default();
        endless.push(vec![b'x'; RUN_LINE_BYTES_MAX + 1].into());
        assert_eq!(endless.next(), Err(LineTooLong));
    }
}
