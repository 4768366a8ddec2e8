//! Streaming clients: one request each, the answer parsed as cheaply as it can be while every event is
//! still seen whole.
//!
//! Lives on: the rig. Bound: one head of `HEAD_BYTES_MAX`; bodies are not kept.
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::error::Error;
use crate::event::{self, LEAD_BYTES, Wording};

/// Longest answer head that is accepted.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// Longest line of a rewritten answer that is accepted.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// What marks a request of ours: this, its colon and a quote, whatever blanks whoever rewrites it puts
/// between, and then `s` and five digits, the stream's number.
const MARK: &[u8] = b"\"content\"";
const MARK_DIGITS: usize = 5;

/// The request of stream `stream` for model `model`.
pub(crate) fn request(model: &str, stream: usize) -> Vec<u8> {
    let body = format!(
        "{{\"model\":\"{model}\",\"stream\":true,\
         \"messages\":[{{\"role\":\"user\",\"content\":\"s{stream:05}\"}}]}}"
    );
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         accept: text/event-stream\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The stream whose request `bytes` hold, once its mark has arrived.
pub(crate) fn marked(bytes: &[u8]) -> Option<usize> {
    let at = bytes.windows(MARK.len()).position(|part| part == MARK)?;
    let rest = bytes[at + MARK.len()..].trim_ascii_start();
    let rest = rest.strip_prefix(b":")?.trim_ascii_start();
    let digits = rest.strip_prefix(b"\"s")?.get(..MARK_DIGITS)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Where a client is in its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Head,
    /// In the line that gives a chunk's size; the size so far.
    Size(usize),
    /// In the rest of that line.
    SizeEnd(usize),
    /// In a chunk's data, so many bytes before its end.
    Data(usize),
    /// In the line end behind a chunk's data.
    DataEnd,
    /// In a body that ends with the connection.
    Plain,
    Done,
}

/// Takes an answer apart, whatever the pieces it comes in.
#[derive(Debug)]
pub(crate) struct Parser {
    place: Place,
    head: Vec<u8>,
    wording: Wording,
    /// The line that has begun, of an answer that is rewritten.
    line: Vec<u8>,
    event_bytes: usize,
    /// Bytes of the current event that have arrived.
    at: usize,
    lead: [u8; LEAD_BYTES],
    /// Whole events so far.
    events: u64,
}

impl Parser {
    /// Of an answer whose events are `event_bytes` long, unless they are rewritten.
    pub(crate) const fn new(event_bytes: usize, wording: Wording) -> Self {
        Self {
            place: Place::Head,
            head: Vec::new(),
            wording,
            line: Vec::new(),
            event_bytes,
            at: 0,
            lead: [0; LEAD_BYTES],
            events: 0,
        }
    }

    /// Whole events so far.
    pub(crate) const fn events(&self) -> u64 {
        self.events
    }

    /// Takes what arrived; calls `seen` with the stamp of every event that is whole now.
    pub(crate) fn take(
        &mut self,
        mut bytes: &[u8],
        seen: &mut impl FnMut(u64),
    ) -> Result<(), Error> {
        while let Some(&first) = bytes.first() {
            match self.place {
                Place::Head => bytes = self.take_head(bytes)?,
                Place::Size(size) => {
                    bytes = &bytes[1..];
                    self.place = match char::from(first).to_digit(16) {
                        Some(digit) => Place::Size(size << 4 | digit as usize),
                        None => Place::SizeEnd(size),
                    };
                }
                Place::SizeEnd(size) => {
                    bytes = &bytes[1..];
                    if first == b'\n' {
                        self.place = if size == 0 {
                            Place::Done
                        } else {
                            Place::Data(size)
                        };
                    }
                }
                Place::Data(left) => {
                    let (data, rest) = bytes.split_at(left.min(bytes.len()));
                    self.payload(data, seen)?;
                    bytes = rest;
                    self.place = match left - data.len() {
                        0 => Place::DataEnd,
                        left => Place::Data(left),
                    };
                }
                Place::DataEnd => {
                    bytes = &bytes[1..];
                    if first == b'\n' {
                        self.place = Place::Size(0);
                    }
                }
                Place::Plain => {
                    self.payload(bytes, seen)?;
                    return Ok(());
                }
                Place::Done => return Ok(()), // the line end behind the last chunk
            }
        }
        Ok(())
    }

    /// The connection has ended.
    ///
    /// # Errors
    /// When the answer has not.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        match self.place {
            Place::Plain | Place::Done if self.at == 0 => {
                self.place = Place::Done;
                Ok(())
            }
            place => Err(Error::part(format!(
                "the answer broke off after {} events, {place:?}",
                self.events
            ))),
        }
    }

    /// The answer has come to its end, with whole events only.
    pub(crate) fn is_done(&self) -> bool {
        self.place == Place::Done && self.at == 0
    }

    fn take_head<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], Error> {
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let Some(end) = self.head.windows(4).position(|part| part == b"\r\n\r\n") else {
            if self.head.len() > HEAD_BYTES_MAX {
                return Err(Error::part("an answer without an end of its head"));
            }
            return Ok(&[]);
        };
        let head = String::from_utf8_lossy(&self.head[..end]).to_ascii_lowercase();
        if head.split(' ').nth(1) != Some("200") {
            let all = String::from_utf8_lossy(&self.head);
            return Err(Error::part(format!("refused: {all}")));
        }
        self.place = if head.contains("\r\ntransfer-encoding: chunked") {
            Place::Size(0)
        } else {
            Place::Plain
        };
        self.head = Vec::new();
        Ok(&bytes[end + 4 - before..])
    }

    #[inline]
    fn payload(&mut self, data: &[u8], seen: &mut impl FnMut(u64)) -> Result<(), Error> {
        match self.wording {
            Wording::Exact => self.exact(data, seen),
            Wording::Rewritten => self.rewritten(data, seen),
        }
    }

    fn rewritten(&mut self, data: &[u8], seen: &mut impl FnMut(u64)) -> Result<(), Error> {
        for piece in data.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() > LINE_BYTES_MAX {
                return Err(Error::part("a line without an end"));
            }
            if !piece.ends_with(b"\n") {
                break;
            }
            if let Some(stamp) = event::marked(&self.line) {
                self.events += 1;
                seen(stamp);
            }
            self.line.clear();
        }
        Ok(())
    }

    fn exact(&mut self, mut data: &[u8], seen: &mut impl FnMut(u64)) -> Result<(), Error> {
        while !data.is_empty() {
            if self.at < LEAD_BYTES {
                let part = (LEAD_BYTES - self.at).min(data.len());
                self.lead[self.at..self.at + part].copy_from_slice(&data[..part]);
                self.at += part;
                data = &data[part..];
                continue;
            }
            let part = (self.event_bytes - self.at).min(data.len());
            self.at += part;
            data = &data[part..];
            if self.at == self.event_bytes {
                self.at = 0;
                self.events += 1;
                let stamp = event::stamp(&self.lead);
                seen(stamp.ok_or_else(|| Error::part("bytes that are no event of ours"))?);
            }
        }
        Ok(())
    }
}

/// One client connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) socket: TcpStream,
    pub(crate) parser: Parser,
    /// When its request was sent.
    pub(crate) asked: u64,
}

impl Client {
    pub(crate) fn connect(
        to: SocketAddr,
        event_bytes: usize,
        wording: Wording,
    ) -> Result<Self, Error> {
        let socket = TcpStream::connect(to).map_err(Error::io(format!("connect to {to}")))?;
        let set = socket.set_nodelay(true);
        set.and_then(|()| socket.set_nonblocking(true))
            .map_err(Error::io("a client's socket"))?;
        Ok(Self {
            socket,
            parser: Parser::new(event_bytes, wording),
            asked: 0,
        })
    }

    pub(crate) fn ask(&mut self, request: &[u8], now: u64) -> Result<(), Error> {
        self.asked = now;
        self.socket
            .write_all(request)
            .map_err(Error::io("send a request"))
    }

    /// Reads once; `seen` as in `Parser::take`.
    pub(crate) fn read(
        &mut self,
        buffer: &mut [u8],
        seen: &mut impl FnMut(u64),
    ) -> Result<(), Error> {
        match self.socket.read(buffer) {
            Ok(0) => self.parser.end(),
            Ok(length) => self.parser.take(&buffer[..length], seen),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(Error::io("read an answer")(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    const LENGTH: usize = 64;

    fn answer(head: &str, chunks: &[&[u8]]) -> Vec<u8> {
        let mut bytes = format!("HTTP/1.1 200 OK\r\n{head}\r\n").into_bytes();
        for chunk in chunks {
            bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            bytes.extend_from_slice(chunk);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"0\r\n\r\n");
        bytes
    }

    fn events(count: u64) -> Vec<u8> {
        let mut event = Event::new(LENGTH);
        (1..=count)
            .flat_map(|stamp| event.stamped(stamp).to_vec())
            .collect()
    }

    #[test]
    fn every_event_is_seen_once_wherever_the_answer_is_cut() {
        let body = events(3);
        let whole = answer(
            "Transfer-Encoding: chunked\r\n",
            &[&body[..70], &body[70..]],
        );
        for cut in 1..whole.len() {
            let mut parser = Parser::new(LENGTH, Wording::Exact);
            let mut stamps = Vec::new();
            for part in [&whole[..cut], &whole[cut..]] {
                parser.take(part, &mut |stamp| stamps.push(stamp)).unwrap();
            }
            assert_eq!(stamps, [1, 2, 3], "cut at {cut}");
            assert!(parser.is_done() && parser.events() == 3);
        }
    }

    #[test]
    fn a_body_that_ends_with_the_connection_is_read_and_a_broken_one_is_not_taken() {
        let mut whole = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
        whole.extend(events(2));
        let mut parser = Parser::new(LENGTH, Wording::Exact);
        parser.take(&whole, &mut |_| {}).unwrap();
        assert!(!parser.is_done());
        parser.end().unwrap();
        assert!(parser.is_done() && parser.events() == 2);
        let mut broken = Parser::new(LENGTH, Wording::Exact);
        broken.take(&whole[..whole.len() - 1], &mut |_| {}).unwrap();
        assert!(broken.end().is_err());
    }

    #[test]
    fn rewritten_events_are_found_and_what_was_added_is_not_one() {
        let text =
            b": hi\n\ndata: {\"c\": \"~00000000000000ff~xx\"}\n\ndata: {}\n\ndata: [DONE]\n\n";
        let whole = answer(
            "transfer-encoding: chunked\r\n",
            &[&text[..20], &text[20..]],
        );
        for cut in 1..whole.len() {
            let mut parser = Parser::new(LENGTH, Wording::Rewritten);
            let mut stamps = Vec::new();
            for part in [&whole[..cut], &whole[cut..]] {
                parser.take(part, &mut |stamp| stamps.push(stamp)).unwrap();
            }
            assert_eq!(stamps, [255], "cut at {cut}");
            assert!(parser.is_done());
        }
    }

    #[test]
    fn refusals_and_strange_bytes_are_errors() {
        let refused = b"HTTP/1.1 503 no\r\n\r\n";
        assert!(
            Parser::new(LENGTH, Wording::Exact)
                .take(refused, &mut |_| {})
                .is_err()
        );
        let strange = answer("transfer-encoding: chunked\r\n", &[&[b'y'; LENGTH]]);
        assert!(
            Parser::new(LENGTH, Wording::Exact)
                .take(&strange, &mut |_| {})
                .is_err()
        );
    }

    #[test]
    fn a_request_carries_its_stream() {
        let whole = request("m", 321);
        assert_eq!(marked(&whole), Some(321));
        let end = whole.windows(5).position(|part| part == b"00321").unwrap() + 5;
        assert_eq!(marked(&whole[..end - 1]), None);
        assert_eq!(marked(b"{\"content\" : \"s00042\"}"), Some(42));
        assert_eq!(marked(b"{\"content\":\"t00042\"}"), None);
    }
}
