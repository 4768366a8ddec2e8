//! The scripted model server: plain HTTP/1.1, one connection a stream, each event a chunk of its own.
//!
//! Lives on: the rig. Bound: a connection a stream and those of health probes; requests of
//! `REQUEST_BYTES_MAX`.
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use crate::client::marked;
use crate::error::Error;
use crate::event::{Event, Wording};
use crate::origin::{Backlog, HEAD, ORIGIN_TOKEN, Origin, TAIL};
use crate::os::{Poll, Ready};

const REQUEST_BYTES_MAX: usize = 64 * 1024;
const PROBE_ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

#[derive(Debug)]
struct Connection {
    socket: TcpStream,
    /// The request as far as it has arrived.
    request: Vec<u8>,
    backlog: Backlog,
    /// The poll reports room for writing.
    armed: bool,
    dirty: bool,
}

/// A probe that is its connection's last request, as `part::answers` spells it.
const CLOSE: &[u8] = b"connection: close";
/// The last event of a chat, for who reads it as one.
const DONE: &[u8] = b"e\r\ndata: [DONE]\n\n\r\n";

/// The model server of one measurement.
#[derive(Debug)]
pub(crate) struct Provider {
    listener: TcpListener,
    connections: Vec<Option<Connection>>,
    /// Connection of each stream.
    rows: Vec<usize>,
    dirty: Vec<usize>,
    event: Event,
    wording: Wording,
}

impl Provider {
    pub(crate) fn listen(
        poll: &Poll,
        listener: TcpListener,
        streams: usize,
        event_bytes: usize,
        wording: Wording,
    ) -> Result<Self, Error> {
        let set = listener.set_nonblocking(true);
        set.and_then(|()| poll.add(&listener, ORIGIN_TOKEN))
            .map_err(Error::io("the provider's listener"))?;
        Ok(Self {
            listener,
            connections: Vec::new(),
            rows: vec![usize::MAX; streams],
            dirty: Vec::new(),
            event: Event::chunked(event_bytes, wording),
            wording,
        })
    }

    /// A listener on a free port of loopback, and its address.
    pub(crate) fn bind() -> Result<(TcpListener, SocketAddr), Error> {
        let bound = TcpListener::bind("127.0.0.1:0");
        let listener = bound.map_err(Error::io("listen on loopback"))?;
        // The standard library's backlog of 128 is less than a scenario's streams.
        let longer = socket2::SockRef::from(&listener).listen(4096);
        longer.map_err(Error::io("listen on loopback"))?;
        let address = listener
            .local_addr()
            .map_err(Error::io("a bound address"))?;
        Ok((listener, address))
    }

    fn accept(&mut self, poll: &Poll) -> Result<(), Error> {
        loop {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    let token = ORIGIN_TOKEN + 1 + self.connections.len() as u64;
                    socket
                        .set_nodelay(true)
                        .and_then(|()| socket.set_nonblocking(true))
                        .and_then(|()| poll.add(&socket, token))
                        .map_err(Error::io("a provider's connection"))?;
                    self.connections.push(Some(Connection {
                        socket,
                        request: Vec::new(),
                        backlog: Backlog::default(),
                        armed: false,
                        dirty: false,
                    }));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Error::io("accept at the provider")(error)),
            }
        }
    }

    fn read(&mut self, row: usize, opened: &mut Vec<usize>) -> Result<(), Error> {
        let Some(connection) = &mut self.connections[row] else {
            return Ok(());
        };
        let mut buffer = [0; 4096];
        match connection.socket.read(&mut buffer) {
            Ok(0) => self.connections[row] = None,
            Ok(length) => {
                connection.request.extend_from_slice(&buffer[..length]);
                if connection.request.len() > REQUEST_BYTES_MAX {
                    return Err(Error::part("a request that is none of ours"));
                }
                if connection.request.starts_with(b"GET ") {
                    if connection.request.ends_with(b"\r\n\r\n") {
                        let written = connection.socket.write_all(PROBE_ANSWER);
                        written.map_err(Error::io("answer a probe"))?;
                        // Whoever tunnels bytes leaves the end of the connection to us.
                        let last = connection
                            .request
                            .windows(CLOSE.len())
                            .any(|at| at == CLOSE);
                        connection.request.clear();
                        if last {
                            self.connections[row] = None;
                        }
                    }
                } else if let Some(stream) = marked(&connection.request) {
                    connection.request.clear();
                    let known = self.rows.get_mut(stream);
                    *known.ok_or_else(|| Error::part("a stream nobody asked for"))? = row;
                    opened.push(stream);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.connections[row] = None, // its client says so, if it matters
        }
        Ok(())
    }

    fn connection(&mut self, stream: usize) -> Option<&mut Connection> {
        let row = self.rows[stream];
        let connection = self.connections.get_mut(row)?.as_mut()?;
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push(row);
        }
        Some(connection)
    }

    fn write(&mut self, poll: &Poll, row: usize) -> Result<(), Error> {
        let Some(connection) = &mut self.connections[row] else {
            return Ok(());
        };
        connection.dirty = false;
        if connection.backlog.write(&mut connection.socket).is_err() {
            self.connections[row] = None;
            return Ok(());
        }
        let full = !connection.backlog.is_empty();
        if full != connection.armed {
            connection.armed = full;
            let token = ORIGIN_TOKEN + 1 + row as u64;
            poll.writable(&connection.socket, token, full)
                .map_err(Error::io("watch a provider's connection"))?;
        }
        Ok(())
    }
}

impl Origin for Provider {
    fn ready(&mut self, poll: &Poll, ready: Ready, opened: &mut Vec<usize>) -> Result<(), Error> {
        if ready.token == ORIGIN_TOKEN {
            return self.accept(poll);
        }
        let row = usize::try_from(ready.token - ORIGIN_TOKEN - 1).expect("a token of ours");
        if ready.writable {
            self.write(poll, row)?;
        }
        if ready.readable {
            self.read(row, opened)?;
        }
        Ok(())
    }

    fn begin(&mut self, stream: usize) {
        if let Some(connection) = self.connection(stream) {
            connection.backlog.add(HEAD);
        }
    }

    fn event(&mut self, stream: usize, stamp: u64) {
        let row = self.rows[stream];
        let Some(Some(connection)) = self.connections.get_mut(row) else {
            return;
        };
        connection.backlog.add(self.event.stamped(stamp));
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push(row);
        }
    }

    fn end(&mut self, stream: usize) {
        let done: &[u8] = match self.wording {
            Wording::Exact => b"",
            Wording::Rewritten => DONE,
        };
        if let Some(connection) = self.connection(stream) {
            connection.backlog.add(done);
            connection.backlog.add(TAIL);
        }
    }

    fn is_full(&self, stream: usize) -> bool {
        let connection = self.connections.get(self.rows[stream]);
        connection.is_none_or(|connection| connection.as_ref().is_none_or(|at| at.armed))
    }

    fn flush(&mut self, poll: &Poll) -> Result<(), Error> {
        let mut dirty = std::mem::take(&mut self.dirty);
        for row in dirty.drain(..) {
            self.write(poll, row)?;
        }
        self.dirty = dirty;
        Ok(())
    }
}
