//! The global allocator that counts heap calls per thread role, and what a frame costs in them.
//!
//! Lives on: every thread, inside every heap call. View: the calling thread's role. Bound: one cell
//! per role; two words of thread-local state.
//!
//! `iop` declares [`Counting`] as its `#[global_allocator]`; `/metrics` shows the counts. A shard or
//! control thread forwards frames without a heap call, so its counter stands still while it does.
use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::{GlobalAlloc, Layout, System};

use crate::hooks;

/// What a thread does, for the heap counters. Closed: it is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// Accept and handshake.
    Front,
    /// Forwards frames.
    Shard,
    /// Decides.
    Control,
    /// Admin, access log, issuer.
    Cold,
    /// Main and whatever was not named: the role of a thread that never called [`set_role`].
    Other,
}

impl Role {
    pub const ALL: [Self; 5] = [
        Self::Front,
        Self::Shard,
        Self::Control,
        Self::Cold,
        Self::Other,
    ];

    /// Value of the metric label `role`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::Shard => "shard",
            Self::Control => "control",
            Self::Cold => "cold",
            Self::Other => "other",
        }
    }
}

/// Counts of one role since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks asked for: `alloc`, `alloc_zeroed` and `realloc`, those refused included.
    pub allocations: u64,
    /// Blocks given back.
    pub frees: u64,
    /// Bytes asked for; a `realloc` counts its whole new size.
    pub bytes: u64,
}

/// One role's cells, on a cache line pair of their own so that roles do not disturb each other.
#[repr(align(128))]
struct Cells {
    allocations: AtomicU64,
    frees: AtomicU64,
    bytes: AtomicU64,
}

static CELLS: [Cells; Role::ALL.len()] = [const {
    Cells {
        allocations: AtomicU64::new(0),
        frees: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
    }
}; Role::ALL.len()];

// Both are const-initialised and need no drop, so that reading them inside the allocator neither
// allocates nor fails at thread exit.
thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Other) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The counting allocator, in front of the system's.
#[derive(Debug)]
pub struct Counting;

impl Counting {
    fn allocated(bytes: usize) {
        CALLS.set(CALLS.get().wrapping_add(1));
        let cells = &CELLS[ROLE.get() as usize];
        cells.allocations.fetch_add(1, Ordering::Relaxed);
        cells.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn freed() {
        CALLS.set(CALLS.get().wrapping_add(1));
        CELLS[ROLE.get() as usize]
            .frees
            .fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is forwarded unchanged to `System`, whose contract is the caller's; counting
// touches only atomics and const-initialised thread-locals, so it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::allocated(layout.size());
        // SAFETY: the caller upholds `alloc`'s contract; it is passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::allocated(layout.size());
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        Self::freed();
        // SAFETY: the caller got `ptr` from this allocator, hence from `System`, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        Self::allocated(new_size);
        // SAFETY: as for `dealloc`, and the caller vouches for `new_size`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

// The library's unit tests measure their own heap calls; a program declares its own.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Names the calling thread's role from here on. Called once, first thing, by each thread of the Edge.
pub fn set_role(role: Role) {
    ROLE.set(role);
}

/// Counts of all threads of `role`. Zero for ever when [`Counting`] is not the global allocator.
#[must_use]
pub fn counts(role: Role) -> Counts {
    let cells = &CELLS[role as usize];
    Counts {
        allocations: cells.allocations.load(Ordering::Relaxed),
        frees: cells.frees.load(Ordering::Relaxed),
        bytes: cells.bytes.load(Ordering::Relaxed),
    }
}

/// Heap calls of any kind by all threads of `role`.
#[must_use]
pub fn calls(role: Role) -> u64 {
    let counts = counts(role);
    counts.allocations.wrapping_add(counts.frees)
}

/// Heap calls of any kind that the calling thread makes in `work`: the proof of a hot function.
///
/// Zero for ever when [`Counting`] is not the global allocator, so a test pairs it with a call that
/// is known to allocate.
pub fn heap_calls<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let before = CALLS.get();
    let result = work();
    (CALLS.get().wrapping_sub(before), result)
}

/// Whether this process was asked to spoil its own zero. A shard reads it once at start and then calls
/// [`plant`] per frame.
#[must_use]
pub fn planted() -> bool {
    hooks::value(hooks::ALLOC_PER_FRAME).is_some_and(|value| value == "1")
}

/// One heap allocation, given back at once: shows that the counters would notice one.
#[cold]
pub fn plant() {
    drop(core::hint::black_box(Box::new(1_u8)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_counts_its_own_threads() {
        // Floors, since other tests may run cold threads of their own meanwhile.
        let before = counts(Role::Cold);
        let calls_before = calls(Role::Cold);
        std::thread::spawn(|| {
            set_role(Role::Cold);
            for _ in 0..1_000 {
                plant();
            }
        })
        .join()
        .unwrap();
        let after = counts(Role::Cold);
        assert!(after.allocations - before.allocations >= 1_000);
        assert!(after.frees - before.frees >= 1_000);
        assert!(after.bytes - before.bytes >= 1_000);
        assert!(calls(Role::Cold) - calls_before >= 2_000);
    }

    #[test]
    fn one_thread_counts_every_kind_of_call_once() {
        assert_eq!(heap_calls(|| ()).0, 0);
        let (calls, block) = heap_calls(|| Vec::<u8>::with_capacity(16));
        assert_eq!((calls, block.capacity()), (1, 16));
        let (calls, block) = heap_calls(move || {
            let mut block = block;
            block.reserve_exact(4_096);
            block
        });
        assert_eq!(calls, 1, "realloc");
        assert_eq!(heap_calls(move || drop(block)).0, 1, "dealloc");
        let (calls, zeroed) = heap_calls(|| vec![0_u8; 64]);
        assert_eq!((calls, zeroed.len()), (1, 64), "alloc_zeroed");
        assert_eq!(heap_calls(plant).0, 2);
    }

    #[test]
    fn a_thread_of_another_role_moves_no_counter_of_this_one() {
        let quiet = std::thread::spawn(|| {
            set_role(Role::Front);
            heap_calls(|| counts(Role::Front)).0
        });
        assert_eq!(quiet.join().unwrap(), 0, "reading the counters is free");
    }
}
