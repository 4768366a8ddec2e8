//! What a shard is given of a new connection, the door it is given through, and the descriptor's way
//! out of the front's runtime.
//!
//! Lives on: made on the front, moved to a shard. View: one connection. Bound: `HANDOVER_SLOTS`
//! hand-overs wait per shard; `early` is at most `RECORD_BYTES_MAX` bytes.
//!
//! The connection belongs to the front until its hand-over is in the lane, and to the shard from
//! there on: one owner, one descriptor. `[D-33]`
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use glommio::net::{TcpListener, TcpStream};
use iop_proto::limits::HANDOVER_SLOTS;
use iop_ring::parcel;
use iop_ring::spsc::{Consumer, Producer};

use crate::lanes::Waker;
use crate::tls::Records;

/// A connection on its way to the shard that will own it.
#[derive(Debug)]
pub enum Handover {
    Node(NodeHandover),
    Client(ClientHandover),
}

/// A node's connection, its identity verified. `states.md` 1: Identified.
#[derive(Debug)]
pub struct NodeHandover {
    /// Connected, close-on-exec, TCP_NODELAY, keepalive and TCP_USER_TIMEOUT set.
    pub fd: OwnedFd,
    /// `None`: plaintext, the insecure mode, prefaces exchanged. `[A-40]`
    pub records: Option<Records>,
    /// Received behind the handshake, untouched: TLS records, or plaintext without `records`.
    pub early: Vec<u8>,
    /// The name in the certificate, of a configured node; `None` without certificate.
    pub certificate_name: Option<String>,
    /// When the certificate ends, Unix seconds; `i64::MAX` without certificate. `[D-05]`
    pub not_after_unix: i64,
    pub peer: SocketAddr,
}

/// A client's connection. A plaintext one arrives straight from accept, nothing read.
#[derive(Debug)]
pub struct ClientHandover {
    /// Connected, close-on-exec, TCP_NODELAY and keepalive set.
    pub fd: OwnedFd,
    /// `None`: plaintext HTTP.
    pub records: Option<Records>,
    /// Received behind the handshake, untouched: TLS records.
    pub early: Vec<u8>,
    pub peer: SocketAddr,
}

/// The front's end of the lane to one shard.
#[derive(Debug)]
pub struct ShardDoor {
    pub parcels: Producer<Box<Handover>>,
    /// Rung after each push.
    pub waker: Waker,
}

/// A lane for hand-overs, with the shard's end of it.
#[must_use]
pub fn door(waker: Waker) -> (ShardDoor, Consumer<Box<Handover>>) {
    let (parcels, arrivals) = parcel::channel(HANDOVER_SLOTS as usize);
    (ShardDoor { parcels, waker }, arrivals)
}

/// The stream's descriptor, for as long as the stream is borrowed.
pub(super) fn borrow(stream: &TcpStream) -> BorrowedFd<'_> {
    // SAFETY: the stream owns the descriptor and closes it only when dropped, which the returned
    // borrow of the stream rules out.
    unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) }
}

/// A second descriptor of the stream's socket, `F_DUPFD_CLOEXEC`. Dropping the stream closes the first.
pub(super) fn duplicate(stream: &TcpStream) -> io::Result<OwnedFd> {
    borrow(stream).try_clone_to_owned()
}

/// The runtime's listener over a bound, listening, blocking socket.
///
/// Blocking, because the kernel then waits for a connection; a non-blocking one answers `EAGAIN` at
/// once, over and over.
pub(super) fn adopt(listener: std::net::TcpListener) -> TcpListener {
    // SAFETY: `into_raw_fd` gives up the only owner of an open listening socket; the runtime's
    // listener becomes the next one.
    unsafe { TcpListener::from_raw_fd(listener.into_raw_fd()) }
}
