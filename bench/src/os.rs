//! Linux as the rig uses it: the monotonic clock, core pinning, epoll.
//!
//! Lives on: any thread. Bound: `EVENTS` readiness events a wait.
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Readiness events taken at once.
const EVENTS: usize = 256;

/// `CLOCK_MONOTONIC`, nanoseconds: the same in every process of this host.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one timespec into the local.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0, "CLOCK_MONOTONIC exists on every Linux");
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Binds the calling thread, and what it starts from now on, to `core`.
pub(crate) fn pin(core: usize) -> io::Result<()> {
    // SAFETY: a zeroed set is an empty one; `CPU_SET` checks its bound; the kernel only reads it.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    check(result).map(drop)
}

/// Lets the calling thread's timers fire when they are due, not up to 50 µs later.
pub(crate) fn sharp_timers() -> io::Result<()> {
    // SAFETY: takes two integers.
    check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64) }).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// What a descriptor is ready for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    pub(crate) token: u64,
    /// Bytes, an end or an error can be read.
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// A level-triggered epoll instance.
pub(crate) struct Poll {
    fd: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes a flag; a non-negative result is a fresh descriptor that nobody owns.
        let fd = unsafe {
            let fd = check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            OwnedFd::from_raw_fd(fd)
        };
        let events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        Ok(Self { fd, events })
    }

    pub(crate) fn add(&self, socket: &impl AsRawFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, socket, token, false)
    }

    /// Whether readiness for writing is reported besides that for reading.
    pub(crate) fn writable(&self, socket: &impl AsRawFd, token: u64, on: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, socket, token, on)
    }

    fn control(
        &self,
        operation: libc::c_int,
        socket: &impl AsRawFd,
        token: u64,
        writable: bool,
    ) -> io::Result<()> {
        let wanted = libc::EPOLLIN | if writable { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event {
            events: wanted.cast_unsigned(),
            u64: token,
        };
        let (poll, fd) = (self.fd.as_raw_fd(), socket.as_raw_fd());
        // SAFETY: two open descriptors and an event the kernel copies during the call.
        check(unsafe { libc::epoll_ctl(poll, operation, fd, &raw mut event) }).map(drop)
    }

    /// Waits at most `timeout_ns` and appends what is ready to `ready`.
    pub(crate) fn wait(&mut self, timeout_ns: u64, ready: &mut Vec<Ready>) -> io::Result<()> {
        let timeout = libc::timespec {
            tv_sec: (timeout_ns / 1_000_000_000).cast_signed(),
            tv_nsec: (timeout_ns % 1_000_000_000).cast_signed(),
        };
        // SAFETY: the kernel writes at most `EVENTS` events into the vector of that length, reads
        // the timeout during the call, and takes no signal mask.
        let count = unsafe {
            libc::epoll_pwait2(
                self.fd.as_raw_fd(),
                self.events.as_mut_ptr(),
                libc::c_int::try_from(EVENTS).expect("a small constant"),
                &raw const timeout,
                std::ptr::null(),
            )
        };
        let count = match check(count) {
            Ok(count) => usize::try_from(count).expect("not negative"),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        let writable = libc::EPOLLOUT.cast_unsigned();
        ready.extend(self.events[..count].iter().map(|event| Ready {
            token: event.u64,
            readable: event.events & !writable != 0,
            writable: event.events & writable != 0,
        }));
        Ok(())
    }
}
