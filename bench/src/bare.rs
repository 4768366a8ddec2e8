//! The bare relay's other side: all streams on one plain connection under an eight-byte header.
//!
//! Lives on: the rig. Bound: what one turn of the rig adds waits here for the socket.
//!
//! ```text
//!  0        4        8                 8 + length     bytes
//!  +--------+--------+-----------------+
//!  | length | stream | bytes of a body |            both u32 little-endian; 0 bytes end the answer
//!  +--------+--------+-----------------+
//! ```
//! Towards the relay `stream` counts its client connections in the order of their accept; the request
//! of each comes under that number, so that stream and connection are told apart by its mark.
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};

use crate::client::marked;
use crate::error::Error;
use crate::event::Event;
use crate::origin::{Backlog, ORIGIN_TOKEN, Origin};
use crate::os::{Poll, Ready};

pub(crate) const HEADER_BYTES: usize = 8;

/// Length and stream of a header.
pub(crate) fn header(bytes: &[u8; HEADER_BYTES]) -> (usize, usize) {
    let [a, b, c, d, e, f, g, h] = *bytes;
    let wide = |part| u32::from_le_bytes(part) as usize;
    (wide([a, b, c, d]), wide([e, f, g, h]))
}

/// The header of `length` bytes for connection `stream`.
pub(crate) fn header_of(length: usize, stream: usize) -> [u8; HEADER_BYTES] {
    let narrow = |number| u32::try_from(number).expect("far below 4 GiB");
    let [a, b, c, d] = narrow(length).to_le_bytes();
    let [e, f, g, h] = narrow(stream).to_le_bytes();
    [a, b, c, d, e, f, g, h]
}

/// The connection to a bare relay.
#[derive(Debug)]
pub(crate) struct Bare {
    socket: TcpStream,
    inbound: Vec<u8>,
    /// The relay's number for each stream of ours.
    numbers: Vec<usize>,
    backlog: Backlog,
    event: Event,
    armed: bool,
}

impl Bare {
    pub(crate) fn connect(
        poll: &Poll,
        relay: SocketAddr,
        streams: usize,
        event_bytes: usize,
    ) -> Result<Self, Error> {
        let socket = TcpStream::connect(relay).map_err(Error::io("connect to the relay"))?;
        socket
            .set_nodelay(true)
            .and_then(|()| socket.set_nonblocking(true))
            .and_then(|()| poll.add(&socket, ORIGIN_TOKEN))
            .map_err(Error::io("the relay's socket"))?;
        Ok(Self {
            socket,
            inbound: Vec::new(),
            numbers: vec![0; streams],
            backlog: Backlog::default(),
            event: Event::new(event_bytes),
            armed: false,
        })
    }

    fn add(&mut self, stream: usize, bytes: &[u8]) {
        self.backlog
            .add(&header_of(bytes.len(), self.numbers[stream]));
        self.backlog.add(bytes);
    }

    fn receive(&mut self, opened: &mut Vec<usize>) -> Result<(), Error> {
        let mut buffer = [0; 16 * 1024];
        match self.socket.read(&mut buffer) {
            Ok(0) => return Err(Error::part("the relay closed the connection")),
            Ok(length) => self.inbound.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(Error::io("read from the relay")(error)),
        }
        while let Some((lead, rest)) = self.inbound.split_first_chunk::<HEADER_BYTES>() {
            let (length, number) = header(lead);
            let Some(request) = rest.get(..length) else {
                break;
            };
            let stream = marked(request);
            let known = stream.and_then(|stream| self.numbers.get_mut(stream));
            *known.ok_or_else(|| Error::part("a request nobody made"))? = number;
            opened.extend(stream);
            self.inbound.drain(..HEADER_BYTES + length);
        }
        Ok(())
    }
}

impl Origin for Bare {
    fn ready(&mut self, poll: &Poll, ready: Ready, opened: &mut Vec<usize>) -> Result<(), Error> {
        if ready.readable {
            self.receive(opened)?;
        }
        self.flush(poll)
    }

    /// The relay writes the head itself when the first bytes come.
    fn begin(&mut self, _stream: usize) {}

    fn event(&mut self, stream: usize, stamp: u64) {
        let number = self.numbers[stream];
        let body = self.event.stamped(stamp);
        self.backlog.add(&header_of(body.len(), number));
        self.backlog.add(body);
    }

    fn end(&mut self, stream: usize) {
        self.add(stream, &[]);
    }

    fn is_full(&self, _stream: usize) -> bool {
        self.armed
    }

    fn flush(&mut self, poll: &Poll) -> Result<(), Error> {
        let written = self.backlog.write(&mut self.socket);
        written.map_err(Error::io("write to the relay"))?;
        let full = !self.backlog.is_empty();
        if full != self.armed {
            self.armed = full;
            poll.writable(&self.socket, ORIGIN_TOKEN, full)
                .map_err(Error::io("watch the relay's socket"))?;
        }
        Ok(())
    }
}
