//! HOT. The only file that sends to a client: what one turn gathers, direct sends, waiting sends.
//!
//! Lives on: one shard. Bound: `GATHERS_PER_TURN_MAX` gathers of `SLICES_PER_SEND_MAX` slices a turn;
//! pending output in blocks of the output pool; one waiting send per socket.
//!
//! Three rules keep bytes whole and in order:
//! 1. A direct send goes from the turn's own memory and finishes inside the submit. What it did not
//!    take comes back as a completion of that submit and is copied to pending before anything else.
//! 2. While a waiting send is armed, or bytes are pending, nothing is sent directly.
//! 3. What a gather points to lives until the turn has settled.
use std::os::fd::RawFd;

use iop_proto::limits::{
    BLOCK_BYTES, GATHERS_PER_TURN_MAX, RECORD_EXTRA_BYTES, RECORD_HEADER_BYTES,
    RECORD_PLAIN_BYTES_MAX, SLICES_PER_SEND_MAX,
};

use super::buffer::{Chain, Chains, Dry};
use super::uring::{Kind, Ring, Token};
use crate::tls::Records;
use crate::tls::record::{ReplyBuf, TlsError};

const SLICES: usize = SLICES_PER_SEND_MAX as usize;
/// Slices, and the chunk's head and end.
const PARTS: usize = SLICES + 2;
/// A block with less room than this gets no further record.
const RECORD_ROOM_LEAST: usize = RECORD_EXTRA_BYTES as usize + 1024;

/// How the body of an answer is delimited on the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// As it is: announced length, or until close.
    Plain,
    /// One HTTP chunk per flush.
    Chunked,
}

/// Why bytes could not be taken for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The output pool is dry.
    Dry,
    /// A record could not be sealed: the connection is over.
    Tls(TlsError),
}

impl From<Dry> for SendError {
    fn from(_: Dry) -> Self {
        Self::Dry
    }
}

/// Bytes of this turn for one client.
struct Gather {
    /// Slot and tenant of the client.
    client: (u32, u32),
    /// `parts[1..=slices]` are the body; `parts[0]` and the one behind them frame the chunk.
    parts: [libc::iovec; PARTS],
    slices: usize,
    bytes: usize,
    message: libc::msghdr,
    /// What is being sent: `parts[first..first + count]`.
    first: usize,
    count: usize,
    chunk_head: [u8; 10],
}

/// Output of one client connection.
#[derive(Debug, Default)]
pub struct Output {
    /// Bytes that wait for the socket: plain, or sealed records.
    pub pending: Chain,
    /// Bytes of the waiting send in the kernel.
    armed: Option<u32>,
    /// A direct send of this turn has not settled: nothing else may be sent before it has.
    direct: bool,
    gather: Option<u16>,
    /// Bytes handed over since the connection began, for progress.
    pub sent: u64,
}

impl Output {
    /// Nothing is waiting, armed or gathered.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.armed.is_none() && self.gather.is_none() && !self.direct
    }

    /// A waiting send is in the kernel.
    #[must_use]
    pub const fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    /// A direct send has not settled.
    #[must_use]
    pub const fn is_direct(&self) -> bool {
        self.direct
    }
}

/// Who sends: the client's slot, tenant and descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Socket {
    pub slot: u32,
    pub generation: u32,
    pub fd: RawFd,
}

const CHUNK_END: &[u8] = b"\r\n";
const CHUNK_END_AND_LAST: &[u8] = b"\r\n0\r\n\r\n";
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
const HEX: &[u8; 16] = b"0123456789abcdef";

/// The gathers of a turn and the output pool.
pub struct Sender {
    // cold: made once; the gathers stay put while the kernel reads them
    gathers: Box<[Gather]>,
    /// Gathers in use since the last settle: `gathers[..used]`.
    used: usize,
    pub pool: Chains,
    pub counts: SendCounts,
}

/// Sends since the start, by way.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendCounts {
    pub direct: u64,
    pub short: u64,
    pub waiting: u64,
    pub copied_bytes: u64,
    pub records_sealed: u64,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender")
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}

const EMPTY_PART: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

fn part(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// The bytes a part names.
///
/// # Safety
/// The part was made by `part` from bytes that are still there.
unsafe fn bytes_of<'a>(part: libc::iovec) -> &'a [u8] {
    if part.iov_len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) }
}

/// Writes `size` in hex and CRLF to the end of `head`; where it starts.
fn chunk_head(head: &mut [u8; 10], mut size: usize) -> usize {
    head[8..].copy_from_slice(CHUNK_END);
    let mut at = 8;
    loop {
        at -= 1;
        head[at] = HEX[size & 15];
        size >>= 4;
        if size == 0 {
            return at;
        }
    }
}

impl Sender {
    #[must_use]
    pub fn new(pool: Chains) -> Self {
        let gathers = (0..GATHERS_PER_TURN_MAX)
            .map(|_| Gather {
                client: (0, 0),
                parts: [EMPTY_PART; PARTS],
                slices: 0,
                bytes: 0,
                // SAFETY: a msghdr of zeros names nothing.
                message: unsafe { std::mem::zeroed() },
                first: 0,
                count: 0,
                chunk_head: [0; 10],
            })
            .collect();
        Self {
            gathers,
            used: 0,
            pool,
            counts: SendCounts::default(),
        }
    }

    /// Takes body bytes that stay where they are until the turn has settled. `false`: no slice or
    /// gather is left; flush this client, or settle, and try again.
    #[must_use]
    pub fn gather(&mut self, output: &mut Output, client: (u32, u32), bytes: &[u8]) -> bool {
        let row = match output.gather {
            Some(row) => usize::from(row),
            None if self.used < self.gathers.len() => {
                let row = self.used;
                self.used += 1;
                let gather = &mut self.gathers[row];
                (gather.client, gather.slices, gather.bytes) = (client, 0, 0);
                output.gather = u16::try_from(row).ok();
                row
            }
            None => return false,
        };
        let gather = &mut self.gathers[row];
        if gather.slices == SLICES {
            return false;
        }
        // Consecutive frames of one record are apart by their headers, so slices rarely join.
        gather.parts[1 + gather.slices] = part(bytes);
        gather.slices += 1;
        gather.bytes += bytes.len();
        true
    }

    /// No gather is left for another client.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.used == self.gathers.len()
    }

    /// Appends bytes behind everything flushed so far: heads, whole answers.
    ///
    /// # Errors
    /// When the pool is dry or a record cannot be sealed.
    pub fn append(
        &mut self,
        output: &mut Output,
        records: Option<&mut Records>,
        bytes: &[u8],
    ) -> Result<(), SendError> {
        self.append_parts(output, records, core::iter::once(bytes))
    }

    /// As `append`, the parts joined.
    ///
    /// # Errors
    /// As `append`.
    pub fn append_parts<'a>(
        &mut self,
        output: &mut Output,
        records: Option<&mut Records>,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), SendError> {
        debug_assert!(output.gather.is_none(), "flush the gather first");
        self.enqueue(output, records, parts)
    }

    fn enqueue<'a>(
        &mut self,
        output: &mut Output,
        records: Option<&mut Records>,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), SendError> {
        match records {
            None => {
                for bytes in parts {
                    self.counts.copied_bytes += bytes.len() as u64;
                    self.pool.append(&mut output.pending, bytes)?;
                }
                Ok(())
            }
            Some(records) => {
                let sealed = seal_into(&mut self.pool, &mut output.pending, records, parts)?;
                self.counts.records_sealed += sealed;
                Ok(())
            }
        }
    }

    /// Sends what this turn gathered for the client, framed, and ends the body when `last`.
    ///
    /// # Errors
    /// When the pool is dry or a record cannot be sealed.
    pub fn flush(
        &mut self,
        ring: &mut Ring,
        output: &mut Output,
        records: Option<&mut Records>,
        socket: Socket,
        framing: Framing,
        last: bool,
    ) -> Result<(), SendError> {
        let Some(row) = output.gather.take().map(usize::from) else {
            if last && framing == Framing::Chunked {
                self.enqueue(output, records, core::iter::once(LAST_CHUNK))?;
            }
            return Ok(());
        };
        self.frame(row, framing, last);
        let free = output.armed.is_none() && !output.direct;
        if records.is_none() && output.pending.is_empty() && free {
            self.send_now(ring, row, socket);
            output.direct = true;
            output.sent += self.gathers[row].bytes as u64;
            return Ok(());
        }
        let gather = &self.gathers[row];
        let parts: [libc::iovec; PARTS] = gather.parts;
        let range = gather.first..gather.first + gather.count;
        // SAFETY: every part lies in a receive buffer or carried block of this turn, in this
        // gather's chunk head, or is static; none is given back or rewritten before the settle.
        let bytes = parts[range].iter().map(|&part| unsafe { bytes_of(part) });
        self.enqueue(output, records, bytes)
    }

    fn frame(&mut self, row: usize, framing: Framing, last: bool) {
        let gather = &mut self.gathers[row];
        let end = 1 + gather.slices;
        if framing == Framing::Plain || gather.bytes == 0 {
            (gather.first, gather.count) = (1, gather.slices);
            if framing == Framing::Chunked && last {
                gather.parts[end] = part(LAST_CHUNK);
                gather.count += 1;
            }
            return;
        }
        let start = chunk_head(&mut gather.chunk_head, gather.bytes);
        gather.parts[0] = part(&gather.chunk_head[start..]);
        gather.parts[end] = part(if last { CHUNK_END_AND_LAST } else { CHUNK_END });
        (gather.first, gather.count) = (0, end + 1);
    }

    fn send_now(&mut self, ring: &mut Ring, row: usize, socket: Socket) {
        let gather = &mut self.gathers[row];
        gather.client = (socket.slot, socket.generation);
        gather.message.msg_iov = gather.parts[gather.first..].as_mut_ptr();
        gather.message.msg_iovlen = gather.count as _;
        self.counts.direct += 1;
        let slot = u32::try_from(row).expect("there are fewer gathers than slots");
        let token = Token::new(Kind::ClientDirect, slot, 0);
        // SAFETY: the gathers are boxed and this one is not touched again before `settled`; its parts
        // lie in memory of this turn (rule 3).
        unsafe { ring.send_now(socket.fd, &raw const gather.message, token) };
    }

    /// Slot and tenant of the client that gather `row` is for.
    #[must_use]
    pub fn client_of(&self, row: usize) -> (u32, u32) {
        self.gathers[row].client
    }

    /// Body bytes of gather `row`.
    #[must_use]
    pub fn bytes_of_gather(&self, row: usize) -> usize {
        self.gathers[row].bytes
    }

    /// Gathers in use since the last settle.
    #[must_use]
    pub const fn used(&self) -> usize {
        self.used
    }

    /// The direct send of this turn has settled, whole or kept as pending.
    pub fn direct_settled(output: &mut Output) {
        output.direct = false;
    }

    /// A direct send took only its first `taken` bytes: the rest becomes pending, before whatever
    /// became pending behind it in the same turn.
    ///
    /// # Errors
    /// When the pool is dry.
    pub fn keep_rest(
        &mut self,
        row: usize,
        output: &mut Output,
        mut taken: usize,
    ) -> Result<(), SendError> {
        self.counts.short += 1;
        let gather = &self.gathers[row];
        let parts: [libc::iovec; PARTS] = gather.parts;
        let mut rest = Chain::EMPTY;
        let mut kept = Ok(());
        for part in &parts[gather.first..gather.first + gather.count] {
            // SAFETY: as in `flush`; the turn has not settled.
            let bytes = unsafe { bytes_of(*part) };
            let skipped = taken.min(bytes.len());
            taken -= skipped;
            self.counts.copied_bytes += (bytes.len() - skipped) as u64;
            kept = kept.and_then(|()| self.pool.append(&mut rest, &bytes[skipped..]));
        }
        self.pool.join(&mut rest, output.pending.take());
        output.pending = rest;
        kept.map_err(SendError::from)
    }

    /// The turn has settled: gathers may be used again.
    pub fn settled(&mut self) {
        self.used = 0;
    }

    /// Arms the waiting send if bytes are pending and none is armed.
    pub fn arm(&mut self, ring: &mut Ring, output: &mut Output, socket: Socket) -> bool {
        if output.armed.is_some() || output.direct || output.pending.is_empty() {
            return false;
        }
        let bytes = self.pool.front(&output.pending);
        self.counts.waiting += 1;
        output.armed = u32::try_from(bytes.len()).ok();
        let token = Token::new(Kind::ClientSend, socket.slot, socket.generation);
        // SAFETY: the block stays at the chain's front until the completion consumes it; bytes that
        // are appended meanwhile go behind it. A closing client keeps its chain until then.
        unsafe { ring.send_waiting(socket.fd, bytes, token) };
        true
    }

    /// The waiting send completed with `result`. `false`: the connection is broken.
    pub fn sent(&mut self, output: &mut Output, result: i32) -> bool {
        let armed = output.armed.take();
        let Ok(taken) = usize::try_from(result) else {
            return result == -libc::EAGAIN || result == -libc::EINTR;
        };
        debug_assert!(armed.is_some_and(|armed| taken <= armed as usize));
        self.pool.consume(&mut output.pending, taken);
        output.sent += taken as u64;
        true
    }

    /// Forgets what this turn gathered for a client that is being closed, and its pending bytes.
    /// Call only when no waiting send is armed.
    pub fn discard(&mut self, output: &mut Output) {
        debug_assert!(output.armed.is_none());
        output.gather = None;
        self.pool.clear(&mut output.pending);
    }

    /// Forgets what a closing client was to get: all but the block that the kernel may still read.
    pub fn shed(&mut self, output: &mut Output) {
        output.gather = None;
        if output.armed.is_some() {
            self.pool.keep_first(&mut output.pending);
        } else {
            self.pool.clear(&mut output.pending);
        }
    }

    /// Bytes that this turn gathered for the client.
    #[must_use]
    pub fn gathered(&self, output: &Output) -> usize {
        output
            .gather
            .map_or(0, |row| self.gathers[usize::from(row)].bytes)
    }
}

/// Arms the waiting send of a node session over the front of its sealed bytes; how many they are.
pub fn arm_session(ring: &mut Ring, pool: &Chains, sealed: &Chain, socket: Socket) -> u32 {
    let bytes = pool.front(sealed);
    let token = Token::new(Kind::SessionSend, socket.slot, socket.generation);
    // SAFETY: as in `Sender::arm`: the block stays at the chain's front until the completion consumes
    // it, and a closing session keeps its chain until then.
    unsafe { ring.send_waiting(socket.fd, bytes, token) };
    u32::try_from(bytes.len()).expect("a send is at most one block")
}

/// Seals the parts, joined, as records at the end of `chain`; how many records it took.
///
/// # Errors
/// When the pool is dry or a record cannot be sealed.
pub fn seal_into<'a>(
    pool: &mut Chains,
    chain: &mut Chain,
    records: &mut Records,
    parts: impl Iterator<Item = &'a [u8]>,
) -> Result<u64, SendError> {
    let mut parts = parts;
    let mut rest: &[u8] = &[];
    let mut sealed = 0;
    if records.needs_rekey() {
        let mut reply = ReplyBuf::default();
        records.rekey(&mut reply).map_err(SendError::Tls)?;
        pool.append(chain, reply.as_slice())?;
    }
    loop {
        while rest.is_empty() {
            let Some(next) = parts.next() else {
                return Ok(sealed);
            };
            rest = next;
        }
        let room = pool.room(chain, RECORD_ROOM_LEAST)?;
        let header = RECORD_HEADER_BYTES as usize;
        let plain_max =
            (room.len() - RECORD_EXTRA_BYTES as usize).min(RECORD_PLAIN_BYTES_MAX as usize);
        let mut plain = 0;
        while plain < plain_max {
            if rest.is_empty() {
                match parts.next() {
                    Some(next) => rest = next,
                    None => break,
                }
            }
            let take = rest.len().min(plain_max - plain);
            room[header + plain..header + plain + take].copy_from_slice(&rest[..take]);
            plain += take;
            rest = &rest[take..];
        }
        let used = records.seal(room, plain).map_err(SendError::Tls)?;
        pool.commit(chain, used);
        sealed += 1;
    }
}

const _: () = assert!(RECORD_ROOM_LEAST < BLOCK_BYTES as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_heads_are_hex_without_leading_zeros() {
        for size in [1usize, 15, 16, 255, 4096, 0x00ff_ffff] {
            let mut head = [0; 10];
            let start = chunk_head(&mut head, size);
            assert_eq!(head[start..], *format!("{size:x}\r\n").as_bytes());
        }
    }
}
