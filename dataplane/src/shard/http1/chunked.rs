//! Chunk framing, both ways: a decoder that resumes at any byte, and the lines around what we send.
//!
//! Lives on: a shard. View: one message body. Bound: a few words; extensions and trailers are skipped
//! within `CHUNK_EXTENSION_BYTES_MAX`, `TRAILER_BYTES_MAX` and `HEADERS_MAX` fields.
use core::ops::Range;

use iop_proto::limits::{
    CHUNK_EXTENSION_BYTES_MAX, CHUNK_SIZE_DIGITS_MAX, HEADERS_MAX, TRAILER_BYTES_MAX,
};
use iop_proto::reason::Reason;

use crate::text::Writer;

/// Ends the data of every chunk.
pub const CHUNK_END: &[u8] = b"\r\n";
/// Ends a chunked body. Never sent for a body that broke off. `[D-10]`
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// 16 hex digits and CR LF.
pub const CHUNK_HEAD_BYTES_MAX: usize = 18;

/// Writes the line before a chunk of `len` bytes; returns its length.
///
/// # Panics
/// When `out` is shorter than `CHUNK_HEAD_BYTES_MAX`, or `len` is 0: that would end the body.
pub fn write_chunk_head(out: &mut [u8], len: usize) -> usize {
    assert!(len > 0, "an empty chunk is the last one");
    let mut line = Writer::new(&mut out[..CHUNK_HEAD_BYTES_MAX]);
    let written = line.put_hex(len as u64).and_then(|()| line.put(CHUNK_END));
    written.expect("16 digits and CR LF fit");
    line.written()
}

/// What one step made of its input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkStep {
    /// Bytes of the input that are done with, `data` included; at least 1 unless the input was empty
    /// or the body had ended.
    pub consumed: usize,
    /// Body bytes, relative to the input; may be empty. They end where `consumed` ends.
    pub data: Range<usize>,
    /// The body and its trailers have ended; the byte after `consumed` starts the next request.
    pub done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    Extension,
    SizeLineFeed,
    Data,
    DataReturn,
    DataLineFeed,
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLineFeed,
    EndLineFeed,
    Done,
}

/// Decodes a chunked request body (RFC 9112 §7.1), strictly: no bare LF, no blanks in a size line, no
/// size beyond `u64`. Extensions and trailers are skipped. Equal results over any split of the input.
/// `[D-14]`
#[derive(Clone, Copy, Debug)]
pub struct ChunkDecoder {
    state: State,
    /// Bytes the current chunk still brings; while its size line is read, the size so far.
    left: u64,
    digits: u32,
    extension_bytes: u32,
    trailers: u32,
    trailer_bytes: u32,
}

impl Default for ChunkDecoder {
    fn default() -> Self {
        Self {
            state: State::Size,
            left: 0,
            digits: 0,
            extension_bytes: 0,
            trailers: 0,
            trailer_bytes: 0,
        }
    }
}

impl ChunkDecoder {
    /// Reads up to the end of one piece of body data, or of the input. Call again with the rest of the
    /// input until `consumed` is all of it or `done`; after `done` nothing more is consumed.
    ///
    /// # Errors
    /// `ChunkMalformed`; the connection cannot be used further.
    pub fn step(&mut self, input: &[u8]) -> Result<ChunkStep, Reason> {
        let mut at = 0;
        while at < input.len() && self.state != State::Done {
            if self.state == State::Data {
                let len = usize::try_from(self.left)
                    .unwrap_or(usize::MAX)
                    .min(input.len() - at);
                self.left -= len as u64;
                if self.left == 0 {
                    self.state = State::DataReturn;
                }
                return Ok(ChunkStep {
                    consumed: at + len,
                    data: at..at + len,
                    done: false,
                });
            }
            self.state = self.line_byte(input[at]).ok_or(Reason::ChunkMalformed)?;
            at += 1;
        }
        Ok(ChunkStep {
            consumed: at,
            data: at..at,
            done: self.state == State::Done,
        })
    }

    /// The state after one byte that is not body data; `None` refuses it.
    fn line_byte(&mut self, byte: u8) -> Option<State> {
        Some(match (self.state, byte) {
            (State::Size, b'\r') if self.digits > 0 => State::SizeLineFeed,
            (State::Size, b';') if self.digits > 0 => State::Extension,
            (State::Size, _) => self.size_digit(byte)?,
            (State::Extension, b'\r') => State::SizeLineFeed,
            (State::Extension, _) => {
                self.extension_bytes += 1;
                (super::is_value_byte(byte) && self.extension_bytes <= CHUNK_EXTENSION_BYTES_MAX)
                    .then_some(State::Extension)?
            }
            (State::SizeLineFeed, b'\n') if self.left == 0 => State::TrailerStart,
            (State::SizeLineFeed, b'\n') => State::Data,
            (State::DataReturn, b'\r') => State::DataLineFeed,
            (State::DataLineFeed, b'\n') => {
                self.digits = 0;
                State::Size
            }
            (State::TrailerStart, b'\r') => State::EndLineFeed,
            (State::TrailerValue, b'\r') => State::TrailerLineFeed,
            (State::TrailerStart | State::TrailerName | State::TrailerValue, _) => {
                self.trailer_byte(byte)?
            }
            (State::TrailerLineFeed, b'\n') => State::TrailerStart,
            (State::EndLineFeed, b'\n') => State::Done,
            (
                State::SizeLineFeed
                | State::DataReturn
                | State::DataLineFeed
                | State::TrailerLineFeed
                | State::EndLineFeed
                | State::Data
                | State::Done,
                _,
            ) => return None,
        })
    }

    fn trailer_byte(&mut self, byte: u8) -> Option<State> {
        self.trailer_bytes += 1;
        let next = match self.state {
            State::TrailerName if byte == b':' => State::TrailerValue,
            State::TrailerStart | State::TrailerName => {
                super::is_token_byte(byte).then_some(State::TrailerName)?
            }
            _ => super::is_value_byte(byte).then_some(State::TrailerValue)?,
        };
        self.trailers += u32::from(self.state == State::TrailerStart);
        let fits = self.trailers <= HEADERS_MAX && self.trailer_bytes <= TRAILER_BYTES_MAX;
        fits.then_some(next)
    }

    fn size_digit(&mut self, byte: u8) -> Option<State> {
        let digit = char::from(byte).to_digit(16)?;
        self.digits += 1;
        self.left = self.left << 4 | u64::from(digit); // 16 digits fill a u64 exactly
        (self.digits <= CHUNK_SIZE_DIGITS_MAX).then_some(State::Size)
    }
}
