//! The bare relay: what a raw io_uring loop costs that does no more than the Edge must do per frame.
//!
//! Lives on: a process of its own, one thread. Bound: receive buffers, completions and slices a turn as
//! in an Edge; the rig limits what may be on its way to one client.
//!
//! Same receive buffers, same completions a turn, same coalescing (what a turn brings for a client
//! becomes one HTTP chunk and one send), same direct sends with the same flags. No TLS, no protobuf, no
//! checks, no control thread, no limits on slow clients: a floor, not a proxy.
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode, squeue};
use iop_proto::limits::{
    COMPLETIONS_PER_TURN_MAX, RECEIVE_BUFFER_BYTES, RECEIVE_BUFFERS, SLICES_PER_SEND_MAX,
};

use crate::bare::{self, HEADER_BYTES};
use crate::error::Error;
use crate::origin::{HEAD, TAIL};

const SUBMISSIONS: u32 = 1024;
const COMPLETIONS: u32 = 8192;
/// Receive buffers of clients: they say little.
const CLIENT_BUFFERS: u16 = 256;
const CLIENT_BUFFER_BYTES: u32 = 1024;
const NODE_GROUP: u16 = 0;
const CLIENT_GROUP: u16 = 1;
/// Head, chunk line and slices of one send, and the line end behind them.
const VECTORS: usize = SLICES_PER_SEND_MAX as usize + 2;
const LINE_END: &[u8] = b"\r\n";

const NODE: u64 = 1 << 32;
const ACCEPT: u64 = 2 << 32;
const RECEIVE: u64 = 3 << 32;
const DIRECT: u64 = 4 << 32;
const WAITING: u64 = 5 << 32;

/// Receive buffers the kernel picks from.
struct Buffers {
    entries: *mut BufRingEntry,
    data: *mut u8,
    bytes: u32,
    mask: u16,
    tail: u16,
}

impl Buffers {
    fn new(ring: &IoUring, group: u16, count: u16, bytes: u32) -> Result<Self, Error> {
        let entries = map(usize::from(count) * size_of::<BufRingEntry>())?.cast::<BufRingEntry>();
        let data = map(usize::from(count) * bytes as usize)?;
        // SAFETY: a zeroed, page-aligned mapping of `count` entries that is never unmapped.
        let registered = unsafe {
            ring.submitter()
                .register_buf_ring_with_flags(entries as u64, count, group, 0)
        };
        registered.map_err(Error::io("register receive buffers"))?;
        let mut buffers = Self {
            entries,
            data,
            bytes,
            mask: count - 1,
            tail: 0,
        };
        (0..count).for_each(|id| buffers.give(id));
        buffers.publish();
        Ok(buffers)
    }

    /// What the completion that named `id` brought. Valid until `give(id)` is published.
    fn taken(&self, id: u16, length: usize) -> &'static [u8] {
        assert!(id <= self.mask && length <= self.bytes as usize);
        // SAFETY: inside the data mapping, which lives for ever; the kernel leaves the buffer alone
        // from the completion to `publish`, and the loop gives it back only when nothing of it is
        // being sent.
        unsafe {
            let start = self.data.add(usize::from(id) * self.bytes as usize);
            std::slice::from_raw_parts(start, length)
        }
    }

    fn give(&mut self, id: u16) {
        let row = usize::from(self.tail & self.mask);
        // SAFETY: row and id lie inside their mappings; the kernel reads the row after `publish`.
        unsafe {
            let entry = &mut *self.entries.add(row);
            entry.set_addr(self.data.add(usize::from(id) * self.bytes as usize) as u64);
            entry.set_len(self.bytes);
            entry.set_bid(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: the tail is a valid, aligned u16 in the first entry that only this thread writes.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.entries).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

fn map(bytes: usize) -> Result<*mut u8, Error> {
    let (access, kind) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: an anonymous mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(Error::io("map receive buffers")(
            std::io::Error::last_os_error(),
        ));
    }
    Ok(start.cast())
}

/// A client connection. Never moved once operations point into it.
struct Client {
    socket: TcpStream,
    begun: bool,
    /// Answer head, if not sent yet, and the chunk line of this turn.
    lead: Vec<u8>,
    /// Bytes of this turn, in place; `vectors[0]` is for `lead`.
    vectors: Vec<libc::iovec>,
    /// What did not fit into `vectors`.
    more: Vec<u8>,
    body: usize,
    ends: bool,
    dirty: bool,
    message: libc::msghdr,
    /// A direct send of the last submit, and its bytes.
    direct: Option<usize>,
    /// Waits for the socket.
    pending: Vec<u8>,
    /// With a waiting send, which has taken `sent` of it; empty: there is none.
    sending: Vec<u8>,
    sent: usize,
}

impl Client {
    fn new(socket: TcpStream) -> Self {
        Self {
            socket,
            begun: false,
            lead: Vec::with_capacity(256),
            vectors: Vec::with_capacity(VECTORS + 1),
            more: Vec::new(),
            body: 0,
            ends: false,
            dirty: false,
            // SAFETY: all zeroes is an empty message.
            message: unsafe { std::mem::zeroed() },
            direct: None,
            pending: Vec::new(),
            sending: Vec::new(),
            sent: 0,
        }
    }

    /// Adds bytes that stay where they are until the next turn has settled.
    fn append(&mut self, bytes: &[u8]) {
        if self.vectors.is_empty() {
            self.vectors.push(vector(&[]));
        }
        self.body += bytes.len();
        if self.vectors.len() < VECTORS - 1 && self.more.is_empty() {
            self.vectors.push(vector(bytes));
        } else {
            self.more.extend_from_slice(bytes);
        }
    }

    /// Frames what the turn brought; afterwards `vectors` and `more` are the bytes to send.
    fn frame(&mut self) {
        self.lead.clear();
        if !self.begun {
            self.begun = true;
            self.lead.extend_from_slice(HEAD);
        }
        if self.vectors.is_empty() {
            self.vectors.push(vector(&[]));
        }
        let mut tail = LINE_END;
        if self.body > 0 {
            write!(self.lead, "{:x}\r\n", self.body).expect("a Vec takes everything");
            if self.ends {
                tail = b"\r\n0\r\n\r\n";
            }
        } else {
            tail = TAIL;
        }
        self.vectors[0] = vector(&self.lead);
        if self.more.is_empty() {
            self.vectors.push(vector(tail));
        } else {
            self.more.extend_from_slice(tail);
        }
        self.body = 0;
        self.ends = false;
        self.dirty = false;
    }

    /// Copies the framed bytes from `skip` on behind what is pending.
    fn copy(&mut self, mut skip: usize) {
        for part in &self.vectors {
            // SAFETY: every vector points to bytes of this turn, of `lead` or of a constant, all
            // unchanged until the turn has settled.
            let bytes: &[u8] =
                unsafe { std::slice::from_raw_parts(part.iov_base.cast(), part.iov_len) };
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            self.pending.extend_from_slice(&bytes[skipped..]);
        }
        self.pending.append(&mut self.more);
        self.vectors.clear();
    }
}

fn vector(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

struct Relay {
    ring: IoUring,
    node: TcpStream,
    listener: TcpListener,
    node_buffers: Buffers,
    client_buffers: Buffers,
    // Boxed: operations point into a client.
    #[expect(clippy::vec_box, reason = "the kernel holds pointers into a client")]
    clients: Vec<Box<Client>>,
    dirty: Vec<usize>,
    /// Clients with a direct send in the last submit.
    direct: Vec<usize>,
    taken: Vec<u16>,
    /// A frame cut by the end of a receive buffer, and those completed in this turn.
    carry: Vec<u8>,
    carried: Vec<Vec<u8>>,
    inbox: Vec<cqueue::Entry>,
    at: usize,
    node_armed: bool,
}

/// Relays until its node closes. Prints `nodes <address> clients <address>` when it listens.
pub(crate) fn run() -> Result<(), Error> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::io("listen"));
    let (nodes, clients) = (bind()?, bind()?);
    let longer = socket2::SockRef::from(&clients).listen(4096);
    longer.map_err(Error::io("listen"))?;
    let address = |of: &TcpListener| of.local_addr().map_err(Error::io("a bound address"));
    let line = format!(
        "nodes {} clients {}\n",
        address(&nodes)?,
        address(&clients)?
    );
    std::io::stdout()
        .write_all(line.as_bytes())
        .map_err(Error::io("say where"))?;
    let (node, _) = nodes.accept().map_err(Error::io("accept the node"))?;
    node.set_nodelay(true)
        .map_err(Error::io("the node's socket"))?;
    Relay::new(node, clients)?.run()
}

impl Relay {
    fn new(node: TcpStream, listener: TcpListener) -> Result<Self, Error> {
        let ring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .build(SUBMISSIONS)
            .map_err(Error::io("make a ring"))?;
        let count = u16::try_from(RECEIVE_BUFFERS).expect("limits.rs says so");
        let node_buffers = Buffers::new(&ring, NODE_GROUP, count, RECEIVE_BUFFER_BYTES)?;
        let client_buffers =
            Buffers::new(&ring, CLIENT_GROUP, CLIENT_BUFFERS, CLIENT_BUFFER_BYTES)?;
        Ok(Self {
            ring,
            node,
            listener,
            node_buffers,
            client_buffers,
            clients: Vec::new(),
            dirty: Vec::new(),
            direct: Vec::new(),
            taken: Vec::new(),
            carry: Vec::new(),
            carried: Vec::new(),
            inbox: Vec::with_capacity(COMPLETIONS as usize),
            at: 0,
            node_armed: false,
        })
    }

    fn run(&mut self) -> Result<(), Error> {
        let accept = opcode::AcceptMulti::new(Fd(self.listener.as_raw_fd()));
        self.push(&accept.build().user_data(ACCEPT))?;
        loop {
            self.arm_node()?;
            let wait = usize::from(self.at == self.inbox.len());
            match self.ring.submit_and_wait(wait) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("enter the ring")(error)),
            }
            if self.turn()? {
                return Ok(());
            }
        }
    }

    fn push(&mut self, entry: &squeue::Entry) -> Result<(), Error> {
        // SAFETY: entries point to boxed clients and their vectors, which stay unchanged until the
        // completion, or for direct sends until the submit has returned and was settled.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit().map_err(Error::io("submit"))?;
        }
        Ok(())
    }

    fn arm_node(&mut self) -> Result<(), Error> {
        if self.node_armed {
            return Ok(());
        }
        self.node_armed = true;
        let receive = opcode::RecvMulti::new(Fd(self.node.as_raw_fd()), NODE_GROUP);
        self.push(&receive.build().user_data(NODE))
    }

    /// One turn; true: the node has closed.
    fn turn(&mut self) -> Result<bool, Error> {
        self.inbox.drain(..self.at);
        self.at = 0;
        let from = self.inbox.len();
        let room = self.inbox.capacity() - from;
        self.inbox.extend(self.ring.completion().take(room));
        self.settle(from)?;
        for id in self.taken.drain(..) {
            self.node_buffers.give(id);
        }
        self.node_buffers.publish();
        self.carried.clear();
        while self.at < self.inbox.len().min(COMPLETIONS_PER_TURN_MAX as usize) {
            let entry = self.inbox[self.at].clone();
            self.at += 1;
            if self.complete(&entry)? {
                return Ok(true);
            }
        }
        self.client_buffers.publish();
        self.flush()?;
        Ok(false)
    }

    /// The direct sends of the last submit are done; those that fell short are in `inbox[from..]`.
    fn settle(&mut self, from: usize) -> Result<(), Error> {
        for at in from..self.inbox.len() {
            let (token, result) = (self.inbox[at].user_data(), self.inbox[at].result());
            if token & !0xffff_ffff != DIRECT {
                continue;
            }
            let client = &mut self.clients[row(token)];
            if result < 0 && result != -libc::EAGAIN {
                return Err(failed("send to a client", result));
            }
            client.direct = Some(usize::try_from(result).unwrap_or(0));
        }
        let mut direct = std::mem::take(&mut self.direct);
        for row in direct.drain(..) {
            let client = &mut self.clients[row];
            let sent = client.direct.take().unwrap_or(usize::MAX);
            client.copy(sent);
            self.arm(row)?;
        }
        self.direct = direct;
        Ok(())
    }

    /// Starts a waiting send of what is pending, unless one is on its way.
    fn arm(&mut self, row: usize) -> Result<(), Error> {
        let client = &mut self.clients[row];
        if client.pending.is_empty() || !client.sending.is_empty() {
            return Ok(());
        }
        std::mem::swap(&mut client.pending, &mut client.sending);
        self.wait_to_send(row)
    }

    fn wait_to_send(&mut self, row: usize) -> Result<(), Error> {
        let client = &self.clients[row];
        let bytes = &client.sending[client.sent..];
        let length = u32::try_from(bytes.len()).expect("the rig limits what is on its way");
        let send = opcode::Send::new(Fd(client.socket.as_raw_fd()), bytes.as_ptr(), length)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build()
            .user_data(WAITING | row as u64);
        self.push(&send)
    }

    fn complete(&mut self, entry: &cqueue::Entry) -> Result<bool, Error> {
        let (token, result) = (entry.user_data(), entry.result());
        let buffer = cqueue::buffer_select(entry.flags());
        match token & !0xffff_ffff {
            NODE => {
                self.node_armed = cqueue::more(entry.flags());
                if result == 0 {
                    return Ok(true);
                }
                if let (Some(id), Ok(length)) = (buffer, usize::try_from(result)) {
                    self.taken.push(id);
                    self.frames(self.node_buffers.taken(id, length))?;
                } else if result != -libc::ENOBUFS {
                    return Err(failed("receive from the node", result));
                }
            }
            ACCEPT if result >= 0 => self.accept(result)?,
            ACCEPT => return Err(failed("accept", result)),
            RECEIVE => {
                if let Some(id) = buffer {
                    let length = usize::try_from(result).unwrap_or(0);
                    let bytes = self.client_buffers.taken(id, length);
                    let header = bare::header_of(length, row(token));
                    let written = self.node.write_all(&[&header, bytes].concat());
                    written.map_err(Error::io("pass a request on"))?;
                    self.client_buffers.give(id);
                }
            }
            WAITING => {
                let client = &mut self.clients[row(token)];
                client.sent += usize::try_from(result).map_err(|_| failed("send", result))?;
                if client.sent < client.sending.len() {
                    return self.wait_to_send(row(token)).map(|()| false);
                }
                client.sending.clear();
                client.sent = 0;
                self.arm(row(token))?;
            }
            _ => {} // direct sends were settled
        }
        Ok(false)
    }

    fn accept(&mut self, fd: RawFd) -> Result<(), Error> {
        // SAFETY: a descriptor the kernel has just made for us alone.
        let socket = unsafe { TcpStream::from_raw_fd(fd) };
        socket
            .set_nodelay(true)
            .map_err(Error::io("a client's socket"))?;
        let row = self.clients.len();
        let receive = opcode::RecvMulti::new(Fd(fd), CLIENT_GROUP).build();
        self.push(&receive.user_data(RECEIVE | row as u64))?;
        self.clients.push(Box::new(Client::new(socket)));
        Ok(())
    }

    fn frames(&mut self, mut bytes: &'static [u8]) -> Result<(), Error> {
        if !self.carry.is_empty() {
            bytes = self.complete_carry(bytes)?;
        }
        while let Some((lead, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
            let (length, row) = bare::header(lead);
            let Some((body, rest)) = rest.split_at_checked(length) else {
                break;
            };
            self.deliver(row, body)?;
            bytes = rest;
        }
        self.carry.extend_from_slice(bytes);
        Ok(())
    }

    /// Completes the frame whose first part is carried; what follows it comes back.
    fn complete_carry(&mut self, mut bytes: &'static [u8]) -> Result<&'static [u8], Error> {
        loop {
            let wanted = match self.carry.first_chunk::<HEADER_BYTES>() {
                None => HEADER_BYTES,
                Some(lead) => HEADER_BYTES + bare::header(lead).0,
            };
            let (part, rest) = bytes.split_at((wanted - self.carry.len()).min(bytes.len()));
            self.carry.extend_from_slice(part);
            bytes = rest;
            if self.carry.len() < wanted {
                return Ok(bytes);
            }
            let Some((lead, body)) = self.carry.split_first_chunk::<HEADER_BYTES>() else {
                continue;
            };
            let (length, row) = bare::header(lead);
            if body.len() < length {
                continue; // the header has just become whole
            }
            let carry = std::mem::take(&mut self.carry);
            self.deliver(row, &carry[HEADER_BYTES..])?;
            self.carried.push(carry); // its bytes stay where they are until the turn has settled
            return Ok(bytes);
        }
    }

    fn deliver(&mut self, row: usize, body: &[u8]) -> Result<(), Error> {
        let client = self.clients.get_mut(row);
        let client = client.ok_or_else(|| Error::part("a frame for nobody"))?;
        if body.is_empty() {
            client.ends = true;
        } else {
            client.append(body);
        }
        if !client.dirty {
            client.dirty = true;
            self.dirty.push(row);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let mut dirty = std::mem::take(&mut self.dirty);
        for row in dirty.drain(..) {
            let client = &mut self.clients[row];
            client.frame();
            if !client.sending.is_empty() {
                client.copy(0);
                self.arm(row)?;
                continue;
            }
            client.message.msg_iov = client.vectors.as_mut_ptr();
            client.message.msg_iovlen = client.vectors.len();
            // Without WAITALL, the skipped completion would hide a short count.
            let flags = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
            let fd = Fd(client.socket.as_raw_fd());
            let send = opcode::SendMsg::new(fd, &raw const client.message)
                .flags(flags.cast_unsigned())
                .build()
                .flags(squeue::Flags::SKIP_SUCCESS)
                .user_data(DIRECT | row as u64);
            self.push(&send)?;
            self.direct.push(row);
        }
        self.dirty = dirty;
        Ok(())
    }
}

fn row(token: u64) -> usize {
    usize::try_from(token & 0xffff_ffff).expect("32 bits")
}

fn failed(what: &str, result: i32) -> Error {
    Error::io(what)(std::io::Error::from_raw_os_error(-result))
}
