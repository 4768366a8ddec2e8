//! All lock-free code of the project and nothing else: two lanes, a doorbell, mirrored counters.
//!
//! Lives on: each handle on the one thread that owns it. Bound: what its constructor was given;
//! nothing here allocates, locks, blocks or reads a clock after construction.
//!
//! - [`spsc`]: the ring both lanes are made of, one producer thread to one consumer thread.
//! - [`signal`]: small `Copy` values. [`parcel`]: boxed values that move.
//! - [`doorbell`]: who has to wake whom.
//! - [`mirror`]: counters with one writer that any thread may read.
//!
//! No order holds between two rings, with one exception that follows from release and acquire: what a
//! producer pushed into any ring *before* a signal is visible to whoever has popped that signal.
//!
//! Under the private `--cfg iop_loom` the atomics, cells and `Arc` are loom's. Every ordering and
//! fence has a name, and `--cfg iop_loom_break="<name>"` beside it weakens that one: a model that
//! still passes then has a hole.
pub mod doorbell;
pub mod mirror;
pub mod parcel;
pub mod signal;
pub mod spsc;

/// An ordering by name: what is written, or `Relaxed` in the model that breaks this name.
macro_rules! ordering {
    ($name:literal, $ordering:ident) => {
        if cfg!(all(iop_loom, iop_loom_break = $name)) {
            crate::sync::Ordering::Relaxed
        } else {
            crate::sync::Ordering::$ordering
        }
    };
}
pub(crate) use ordering;

/// A sequentially consistent fence by name: absent in the model that breaks this name.
macro_rules! full_fence {
    ($name:literal) => {
        if cfg!(not(all(iop_loom, iop_loom_break = $name))) {
            crate::sync::fence(crate::sync::Ordering::SeqCst);
        }
    };
}
pub(crate) use full_fence;

/// The only door to atomics, cells and `Arc`. Under `--cfg iop_loom` every name is loom's.
pub(crate) mod sync {
    #[cfg(iop_loom)]
    pub(crate) use loom::{
        cell::UnsafeCell,
        sync::{
            Arc,
            atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
        },
    };

    #[cfg(not(iop_loom))]
    pub(crate) use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
    #[cfg(not(iop_loom))]
    pub(crate) use crossbeam_utils::CachePadded;
    #[cfg(not(iop_loom))]
    pub(crate) use std::sync::Arc;

    /// Padding means nothing to the model; a plain wrapper keeps the code one.
    #[cfg(iop_loom)]
    #[derive(Debug)]
    pub(crate) struct CachePadded<T>(T);

    #[cfg(iop_loom)]
    impl<T> CachePadded<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(value)
        }
    }

    #[cfg(iop_loom)]
    impl<T> core::ops::Deref for CachePadded<T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }

    /// Same closure-shaped access as loom's cell, so that the model sees every read and write.
    #[cfg(not(iop_loom))]
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    #[cfg(not(iop_loom))]
    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(core::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        #[inline]
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}
