//! Where the measured events come from: a model server with a connection a stream, or a peer with all
//! streams on one connection.
//!
//! Lives on: the rig. Bound: what each kind says.
use crate::error::Error;
use crate::os::{Poll, Ready};

/// What every answer begins with, as a model server would send it.
pub(crate) const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
    cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
/// What ends it.
pub(crate) const TAIL: &[u8] = b"0\r\n\r\n";
/// Tokens of the origin's descriptors; the rig's clients have the numbers below.
pub(crate) const ORIGIN_TOKEN: u64 = 1 << 32;

/// A source of streams, driven by the rig's loop. Nothing here waits.
pub(crate) trait Origin {
    /// Deals with a descriptor that is ready; adds the streams whose request has arrived to `opened`.
    ///
    /// # Errors
    /// When the other side ended or broke its protocol.
    fn ready(&mut self, poll: &Poll, ready: Ready, opened: &mut Vec<usize>) -> Result<(), Error>;
    /// Begins the answer of `stream`.
    fn begin(&mut self, stream: usize);
    /// Adds one event, due at `stamp`.
    fn event(&mut self, stream: usize, stamp: u64);
    /// Ends the answer of `stream`.
    fn end(&mut self, stream: usize);
    /// What was added for `stream` is still here, for want of room in the socket.
    fn is_full(&self, stream: usize) -> bool;
    /// Gives what was added to the kernel, as far as it takes it.
    ///
    /// # Errors
    /// When the other side has gone.
    fn flush(&mut self, poll: &Poll) -> Result<(), Error>;
}

/// Bytes that wait for a socket; sent from the front, added at the back.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    bytes: Vec<u8>,
    sent: usize,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Adds `length` bytes that `fill` writes.
    pub(crate) fn add_with(&mut self, length: usize, fill: impl FnOnce(&mut [u8]) -> usize) {
        let at = self.bytes.len();
        self.bytes.resize(at + length, 0);
        let used = fill(&mut self.bytes[at..]);
        self.bytes.truncate(at + used);
    }

    /// Writes until nothing is left or `to` takes no more.
    pub(crate) fn write(&mut self, to: &mut impl std::io::Write) -> std::io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.bytes[self.sent..]) {
                Ok(length) => self.sent += length,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }
}
