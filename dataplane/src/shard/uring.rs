//! HOT. The kernel ring of one thread: submissions, completions, provided receive buffers.
//!
//! Lives on: the thread that made it (SINGLE_ISSUER). Bound: `SUBMISSIONS` entries between two
//! enters, completions outstanding as its maker says; receive buffers as their ring was made.
//!
//! Everything handed to the kernel stays where it is until its terminal completion: that is the
//! contract of each `unsafe fn` here, and `send.rs` is the only caller of those.
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use io_uring::types::{BufRingEntry, Fd, SubmitArgs, Timespec};
use iop_proto::limits::SESSION_UNSENT_BYTES_MAX;
use socket2::SockRef;

use io_uring::{IoUring, cqueue, opcode, squeue};

/// Entries of the submission queue: pushed ones are submitted early when it is full.
pub const SUBMISSIONS: u32 = 1024;

/// What an operation was for. The number travels in the completion's user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Nobody waits for it (the answer to a cancel).
    Ignored = 0,
    /// Read of the thread's eventfd.
    Wake = 1,
    /// Multishot receive of a node session.
    SessionReceive = 2,
    /// Waiting send of a node session.
    SessionSend = 3,
    /// Single-shot receive of a client.
    ClientReceive = 4,
    /// Direct send to a client; its slot is the gather's, and it completes only when it fell short.
    ClientDirect = 5,
    /// Waiting send to a client.
    ClientSend = 6,
    /// Poll for hang-up of a client.
    ClientHangup = 7,
}

/// Names an operation: kind, slot and the slot's tenant.
///
/// ```text
///  63    56 55      32 31          0
///  +-------+----------+-------------+
///  | kind  | slot     | generation  |
///  +-------+----------+-------------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

impl Token {
    pub const IGNORED: Self = Self(0);

    #[must_use]
    pub const fn new(kind: Kind, slot: u32, generation: u32) -> Self {
        Self((kind as u64) << 56 | ((slot & 0x00ff_ffff) as u64) << 32 | generation as u64)
    }

    #[must_use]
    pub const fn kind(self) -> Kind {
        match self.0 >> 56 {
            1 => Kind::Wake,
            2 => Kind::SessionReceive,
            3 => Kind::SessionSend,
            4 => Kind::ClientReceive,
            5 => Kind::ClientDirect,
            6 => Kind::ClientSend,
            7 => Kind::ClientHangup,
            _ => Kind::Ignored,
        }
    }

    #[must_use]
    pub const fn slot(self) -> usize {
        ((self.0 >> 32) & 0x00ff_ffff) as usize
    }

    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low half is the generation"
    )]
    pub const fn generation(self) -> u32 {
        self.0 as u32
    }
}

/// One completion, copied out of the kernel's queue.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub token: Token,
    /// Bytes, or a negated errno.
    pub result: i32,
    flags: u32,
}

impl Completion {
    /// The provided buffer the kernel chose for it.
    #[must_use]
    pub fn buffer(&self) -> Option<u16> {
        cqueue::buffer_select(self.flags)
    }

    /// The operation goes on and will complete again.
    #[must_use]
    pub fn more(&self) -> bool {
        cqueue::more(self.flags)
    }
}

/// A ring could not be made. Carries the remedy.
#[derive(Debug)]
pub struct RingError {
    pub what: &'static str,
    pub source: io::Error,
}

impl std::fmt::Display for RingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let remedy = match self.source.raw_os_error() {
            Some(libc::ENOMEM) => {
                "raise RLIMIT_MEMLOCK; memory of an instance that just ended is returned late, so retry"
            }
            Some(libc::EPERM) => {
                "io_uring is disabled for this process: see kernel.io_uring_disabled and seccomp"
            }
            Some(libc::ENOSYS) => "this kernel has no io_uring: 6.1 or newer is needed",
            Some(libc::EMFILE | libc::ENFILE) => "raise RLIMIT_NOFILE",
            Some(libc::EINVAL) => "this kernel is too old: 6.1 or newer is needed",
            _ => "see `iop check --host`",
        };
        write!(f, "{}: {} ({remedy})", self.what, self.source)
    }
}

impl std::error::Error for RingError {}

/// The ring of one thread.
pub struct Ring {
    io: IoUring,
    /// Where the eventfd's counter is read to; boxed so that it stays put.
    // cold: made once
    wake: Box<u64>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes the calling thread's ring, for at most `completions` that have not been reaped.
    ///
    /// # Errors
    /// When the kernel refuses; the error names the remedy.
    pub fn new(completions: u32) -> Result<Self, RingError> {
        let io = IoUring::builder()
            .setup_cqsize(completions.max(2 * SUBMISSIONS).next_power_of_two())
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .build(SUBMISSIONS)
            .map_err(|source| RingError {
                what: "io_uring_setup",
                source,
            })?;
        Ok(Self {
            io,
            // cold: made once
            wake: Box::new(0),
        })
    }

    /// Registers `count` (a power of two) receive buffers of `bytes` each as `group`.
    ///
    /// # Errors
    /// When the kernel refuses the memory or the group.
    pub fn receive_buffers(
        &mut self,
        group: u16,
        count: u16,
        bytes: u32,
    ) -> Result<ReceiveRing, RingError> {
        let entries = map(usize::from(count) * size_of::<BufRingEntry>())?.cast::<BufRingEntry>();
        let data = map(usize::from(count) * bytes as usize)?;
        // SAFETY: `entries` is a zeroed, page-aligned mapping of `count` entries that is never
        // unmapped, so it outlives the ring.
        unsafe {
            self.io
                .submitter()
                .register_buf_ring_with_flags(entries as u64, count, group, 0)
        }
        .map_err(|source| RingError {
            what: "register receive buffers",
            source,
        })?;
        let mut ring = ReceiveRing {
            entries,
            data,
            bytes,
            mask: count - 1,
            group,
            tail: 0,
            out: 0,
        };
        for id in 0..count {
            ring.place(id);
        }
        ring.publish();
        Ok(ring)
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the entry's pointers stay valid until its terminal completion: kept by the
            // callers of the `unsafe fn`s below; entries of safe functions point to nothing, to
            // `self.wake`, or to registered buffers.
            if unsafe { self.io.submission().push(entry) }.is_ok() {
                return;
            }
            self.submit();
        }
    }

    /// Multishot receive into buffers of `group`.
    pub fn receive_multi(&mut self, fd: RawFd, group: u16, token: Token) {
        self.push(
            &opcode::RecvMulti::new(Fd(fd), group)
                .build()
                .user_data(token.0),
        );
    }

    /// One receive into a buffer of `group`.
    pub fn receive_once(&mut self, fd: RawFd, buffers: &ReceiveRing, token: Token) {
        let entry = opcode::Recv::new(Fd(fd), std::ptr::null_mut(), buffers.bytes)
            .buf_group(buffers.group)
            .build()
            .flags(squeue::Flags::BUFFER_SELECT)
            .user_data(token.0);
        self.push(&entry);
    }

    /// Completes when the peer hangs up, with however many bytes unread before that.
    pub fn poll_hangup(&mut self, fd: RawFd, token: Token) {
        let mask = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR).cast_unsigned();
        let entry = opcode::PollAdd::new(Fd(fd), u32::from(mask))
            .build()
            .user_data(token.0);
        self.push(&entry);
    }

    /// Asks the kernel to cancel the operation `token`; that one still completes on its own.
    pub fn cancel(&mut self, token: Token) {
        self.push(
            &opcode::AsyncCancel::new(token.0)
                .build()
                .user_data(Token::IGNORED.0),
        );
    }

    /// Reads the eventfd's counter, which sleeps until somebody rings.
    pub fn read_wake(&mut self, fd: RawFd) {
        let target: *mut u64 = &raw mut *self.wake;
        let entry = opcode::Read::new(Fd(fd), target.cast(), 8)
            .build()
            .user_data(Token::new(Kind::Wake, 0, 0).0);
        self.push(&entry);
    }

    /// Sends `bytes` and waits in the kernel as long as it takes. At most one per socket at a time.
    ///
    /// # Safety
    /// `bytes` stays allocated and unchanged until the completion of `token`.
    pub unsafe fn send_waiting(&mut self, fd: RawFd, bytes: &[u8], token: Token) {
        let length = u32::try_from(bytes.len()).expect("a send is at most one block");
        let entry = opcode::Send::new(Fd(fd), bytes.as_ptr(), length)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build()
            .user_data(token.0);
        self.push(&entry);
    }

    /// Sends what fits at once, inside the submit: no completion means all of it went. A short count
    /// or `-EAGAIN` comes back as a completion of that submit.
    ///
    /// # Safety
    /// `message` and all it points to stay valid and unchanged until the next enter has returned and
    /// its completions were read.
    pub unsafe fn send_now(&mut self, fd: RawFd, message: *const libc::msghdr, token: Token) {
        // Without WAITALL, the skipped completion would hide a short count.
        let flags = libc::MSG_DONTWAIT | libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let entry = opcode::SendMsg::new(Fd(fd), message)
            .flags(flags.cast_unsigned())
            .build()
            .flags(squeue::Flags::SKIP_SUCCESS)
            .user_data(token.0);
        self.push(&entry);
    }

    /// Enters the kernel with what was pushed, without waiting.
    ///
    /// # Panics
    /// When the kernel refuses the enter itself, which no load can cause.
    pub fn submit(&mut self) {
        loop {
            match self.io.submit() {
                Ok(_) => return,
                Err(error) => assert!(tolerable(&error), "io_uring_enter: {error}"),
            }
        }
    }

    /// Enters the kernel with what was pushed and waits for a completion, at most `timeout`.
    ///
    /// # Panics
    /// When the kernel refuses the enter itself, which no load can cause.
    pub fn submit_and_wait(&mut self, timeout: Duration) {
        let timespec = Timespec::from(timeout);
        let arguments = SubmitArgs::new().timespec(&timespec);
        match self.io.submitter().submit_with_args(1, &arguments) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => {}
            Err(error) => assert!(tolerable(&error), "io_uring_enter: {error}"),
        }
    }

    /// Copies what has completed behind what is in `inbox` already.
    pub fn reap(&mut self, inbox: &mut Vec<Completion>) {
        let room = inbox.capacity() - inbox.len(); // the rest stays in the kernel's queue
        inbox.extend(self.io.completion().take(room).map(|entry| Completion {
            token: Token(entry.user_data()),
            result: entry.result(),
            flags: entry.flags(),
        }));
    }
}

fn tolerable(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
    )
}

/// Receive buffers the kernel picks from. Each is either the kernel's or, between the completion that
/// named it and `give`, ours.
#[derive(Debug)]
pub struct ReceiveRing {
    entries: *mut BufRingEntry,
    data: *mut u8,
    /// Bytes of one buffer.
    bytes: u32,
    mask: u16,
    group: u16,
    /// Buffers ever placed; published by `publish`.
    tail: u16,
    /// Buffers that are ours right now.
    out: u32,
}

impl ReceiveRing {
    #[must_use]
    pub const fn group(&self) -> u16 {
        self.group
    }

    /// Buffers taken and not given back.
    #[must_use]
    pub const fn out(&self) -> u32 {
        self.out
    }

    /// The first `length` bytes of buffer `id`, which the completion just reaped handed to us.
    ///
    /// The caller takes each buffer once per completion and gives it back once.
    pub fn take(&mut self, id: u16, length: usize) -> &'static mut [u8] {
        assert!(id <= self.mask && length <= self.bytes as usize);
        self.out += 1;
        // SAFETY: the region is never unmapped; the kernel gave buffer `id` up with the completion
        // that named it, and does not touch it until `place` hands it back, which `give` does after
        // its caller has dropped this slice (the turn's rule: no receive buffer outlives its turn).
        unsafe {
            let start = self.data.add(usize::from(id) * self.bytes as usize);
            std::slice::from_raw_parts_mut(start, length)
        }
    }

    /// Hands buffer `id` back to the kernel at the next `publish`.
    pub fn give(&mut self, id: u16) {
        self.out -= 1;
        self.place(id);
    }

    fn place(&mut self, id: u16) {
        let row = usize::from(self.tail & self.mask);
        // SAFETY: `row <= mask`, inside the mapping; `id` likewise inside the data region. The kernel
        // reads the row only after `publish` moved the tail past it.
        unsafe {
            let entry = &mut *self.entries.add(row);
            entry.set_addr(self.data.add(usize::from(id) * self.bytes as usize) as u64);
            entry.set_len(self.bytes);
            entry.set_bid(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    /// Lets the kernel see the buffers given back.
    pub fn publish(&mut self) {
        // SAFETY: the tail lies in the first entry's reserved field, a valid, aligned u16 that only
        // this thread writes and the kernel reads with acquire.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.entries).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

/// A zeroed, private mapping that is never unmapped; the kernel commits its pages as they are touched.
fn map(bytes: usize) -> Result<*mut u8, RingError> {
    // SAFETY: an anonymous mapping at an address of the kernel's choice.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(RingError {
            what: "map receive buffers",
            source: io::Error::last_os_error(),
        });
    }
    Ok(start.cast())
}

/// A new eventfd, close-on-exec, blocking.
///
/// # Errors
/// When the descriptor limit is reached.
pub fn event_fd() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed; a non-negative result is a fresh descriptor that nobody owns.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

/// Makes the close of `fd` an abort: the peer sees a reset, nothing unsent lingers. `[D-10]` `[D-28]`
pub fn reset_on_close(fd: &OwnedFd) {
    // A failure leaves a plain close: the connection is gone already.
    let _plain = SockRef::from(fd).set_linger(Some(Duration::ZERO));
}

/// `sizeof(int)`, as socket options count.
const INT_BYTES: libc::socklen_t = 4;

/// Bounds what a node's socket holds unsent, so that a control message waits behind little. `[D-02]`
pub fn limit_unsent(fd: &OwnedFd) {
    let bytes = SESSION_UNSENT_BYTES_MAX;
    // SAFETY: a valid descriptor and an int of the size that is named. A failure leaves the kernel's
    // own bound.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            INT_BYTES,
        );
    }
}

/// Sends FIN; the socket can still be read.
pub fn shutdown_write(fd: &OwnedFd) {
    // A failure means that the connection is gone already.
    let _gone = SockRef::from(fd).shutdown(Shutdown::Write);
}

/// Binds the calling thread to `core`.
///
/// # Errors
/// When there is no such core or it is not ours.
pub fn pin(core: u32) -> io::Result<()> {
    // SAFETY: a zeroed set is an empty one; the kernel reads it during the call alone.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
