//! Bounded ring from one thread to one thread: no lock, no read-modify-write, no allocation after
//! [`channel`].
//!
//! Lives on: `Producer` on one thread, `Consumer` on one thread. Bound: `capacity` values.
//!
//! ```text
//!   head <= tail <= head + capacity        (counts of pops and pushes, wrapping)
//!   slot i & mask is written by the producer while i in [tail, head + capacity)
//!                    read by the consumer    while i in [head, tail)
//! ```
//! Both handles are `Send`, neither is `Clone`, and every method takes `&mut self`: the type system,
//! not a comment, keeps each side to one thread. Dropping one handle does not fail the other: a
//! producer without consumer fills up, a consumer without producer runs dry. Values still inside when
//! the second handle goes are dropped there, once.
use core::fmt;
use core::mem::MaybeUninit;

use crate::ordering;
use crate::sync::{Arc, AtomicUsize, CachePadded, Ordering, UnsafeCell};

struct Shared<T> {
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// Pops completed. Written by the consumer only.
    head: CachePadded<AtomicUsize>,
    /// Pushes completed. Written by the producer only.
    tail: CachePadded<AtomicUsize>,
}

// SAFETY: a slot is touched by the producer only before its `tail` release-store and by the
// consumer only after the matching acquire-load, so a value moves between threads, never shared.
unsafe impl<T: Send> Sync for Shared<T> {}

/// The pushing end. Owned by one thread.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    tail: usize,
    /// Last head seen; refreshed only when the ring looks full.
    head_seen: usize,
}

/// The popping end. Owned by one thread.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    head: usize,
    /// Last tail seen; refreshed only when the ring looks empty.
    tail_seen: usize,
}

/// The ring had no room: the value comes back untouched.
#[derive(PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T> fmt::Debug for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Full(..)") // the value may be secret or unprintable
    }
}

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ring full")
    }
}

impl<T> std::error::Error for Full<T> {}

/// A ring of `capacity` values, allocated here and never again.
///
/// # Panics
/// When `capacity` is not a power of two.
#[must_use]
pub fn channel<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    channel_at(capacity, 0)
}

/// `start`: both counts at birth, so that a test can stand before their wrap-around.
fn channel_at<T: Send>(capacity: usize, start: usize) -> (Producer<T>, Consumer<T>) {
    assert!(
        capacity.is_power_of_two(),
        "ring capacity {capacity} is not a power of two"
    );
    let shared = Arc::new(Shared {
        slots: (0..capacity)
            .map(|_| UnsafeCell::new(MaybeUninit::uninit()))
            .collect(),
        head: CachePadded::new(AtomicUsize::new(start)),
        tail: CachePadded::new(AtomicUsize::new(start)),
    });
    let producer = Producer {
        shared: Arc::clone(&shared),
        tail: start,
        head_seen: start,
    };
    let consumer = Consumer {
        shared,
        head: start,
        tail_seen: start,
    };
    (producer, consumer)
}

impl<T> Shared<T> {
    #[inline]
    fn slot(&self, count: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[count & (self.slots.len() - 1)]
    }
}

impl<T> Producer<T> {
    /// Values the ring holds at most.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Slots free right now, read from the other side: at least this many pushes will succeed.
    #[inline]
    pub fn free(&mut self) -> usize {
        self.head_seen = self
            .shared
            .head
            .load(ordering!("spsc_head_acquire", Acquire));
        self.free_seen()
    }

    /// Whether `slots` pushes will succeed. Looks at the other side only when it must: the cheap way
    /// to reserve before each step.
    #[inline]
    pub fn has_room(&mut self, slots: usize) -> bool {
        self.free_seen() >= slots || self.free() >= slots
    }

    /// Moves `value` to the consumer. Wakes nobody: that is the doorbell's part.
    ///
    /// # Errors
    /// [`Full`] hands the value back.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), Full<T>> {
        if !self.has_room(1) {
            return Err(Full(value));
        }
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: tail < head + capacity, so the consumer is done with this slot (acquired in
            // `free`) and cannot see it again before the release below.
            unsafe { (*slot).write(value) };
        });
        self.tail = self.tail.wrapping_add(1);
        self.shared
            .tail
            .store(self.tail, ordering!("spsc_tail_release", Release));
        Ok(())
    }

    /// Free slots by the last head seen; the true number is never lower.
    #[inline]
    fn free_seen(&self) -> usize {
        self.shared.slots.len() - self.tail.wrapping_sub(self.head_seen)
    }
}

impl<T> Consumer<T> {
    /// The oldest value, or `None` when the ring is empty.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let value = self.shared.slot(self.head).with(|slot| {
            // SAFETY: head < tail, so the producer wrote this slot and the acquire in `is_empty`
            // makes the write visible; the head store below stops a second read.
            unsafe { (*slot).assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        self.shared
            .head
            .store(self.head, ordering!("spsc_head_release", Release));
        Some(value)
    }

    /// Whether the next [`Self::pop`] has nothing to take. This is the second look of a sleeper.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        if self.head == self.tail_seen {
            self.tail_seen = self
                .shared
                .tail
                .load(ordering!("spsc_tail_acquire", Acquire));
        }
        self.head == self.tail_seen
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Both handles are gone and `Arc` ordered their last writes before this.
        let tail = self.tail.load(Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        while head != tail {
            self.slot(head).with_mut(|slot| {
                // SAFETY: slots in [head, tail) hold values that were pushed and never popped.
                unsafe { (*slot).assume_init_drop() };
            });
            head = head.wrapping_add(1);
        }
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("head", &self.head)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(iop_loom)))]
mod tests {
    use std::rc::Rc;
    use std::sync::atomic::{AtomicUsize as Count, Ordering::SeqCst};

    use super::*;

    #[test]
    fn values_leave_in_the_order_they_came_across_the_wrap_of_the_counts() {
        let (mut tx, mut rx) = channel_at(4, usize::MAX - 2);
        for round in 0..8u32 {
            for n in 0..4 {
                assert_eq!(tx.free(), 4 - n as usize);
                tx.push(round * 4 + n).unwrap();
            }
            assert_eq!(tx.push(99), Err(Full(99)));
            assert!(!tx.has_room(1));
            for n in 0..4 {
                assert!(!rx.is_empty());
                assert_eq!(rx.pop(), Some(round * 4 + n));
            }
            assert!(rx.is_empty() && rx.pop().is_none());
            assert!(tx.has_room(4) && !tx.has_room(5));
        }
    }

    #[test]
    fn a_ring_of_one_slot_alternates() {
        let (mut tx, mut rx) = channel(1);
        assert_eq!(tx.capacity(), 1);
        for n in 0..3 {
            tx.push(n).unwrap();
            assert_eq!(tx.push(n), Err(Full(n)));
            assert_eq!(rx.pop(), Some(n));
        }
    }

    struct Counted<'a>(&'a Count);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn what_is_left_behind_is_dropped_once_whoever_goes_last() {
        for consumer_first in [true, false] {
            let drops = Count::new(0);
            let (mut tx, mut rx) = channel_at(4, usize::MAX);
            for _ in 0..4 {
                tx.push(Counted(&drops)).unwrap();
            }
            drop(rx.pop());
            assert_eq!(drops.load(SeqCst), 1);
            if consumer_first {
                drop(rx);
                tx.push(Counted(&drops)).unwrap();
                assert!(tx.push(Counted(&drops)).is_err()); // handed back and dropped by the test
                drop(tx);
                assert_eq!(drops.load(SeqCst), 6);
            } else {
                drop(tx);
                drop(rx.pop());
                drop(rx);
                assert_eq!(drops.load(SeqCst), 4);
            }
        }
    }

    #[test]
    fn a_capacity_that_is_no_power_of_two_is_refused() {
        for capacity in [0, 3, 6] {
            assert!(std::panic::catch_unwind(|| channel::<u8>(capacity)).is_err());
        }
    }

    #[test]
    fn two_threads_exchange_a_million_boxes() {
        const VALUES: u64 = 1_000_000;
        let (mut tx, mut rx) = channel::<Box<u64>>(64);
        let producer = std::thread::spawn(move || {
            for n in 0..VALUES {
                let mut value = Box::new(n);
                while let Err(Full(back)) = tx.push(value) {
                    value = back;
                    std::thread::yield_now();
                }
            }
        });
        for expected in 0..VALUES {
            let got = loop {
                match rx.pop() {
                    Some(got) => break got,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!(*got, expected);
        }
        producer.join().unwrap();
        assert!(rx.is_empty());
    }

    #[test]
    fn handles_cross_threads_only_with_values_that_may() {
        trait Probe {
            const SEND: bool = false;
        }
        impl<T: ?Sized> Probe for T {}
        struct Asked<T: ?Sized>(core::marker::PhantomData<T>);
        impl<T: Send> Asked<T> {
            const SEND: bool = true;
        }
        const { assert!(Asked::<Producer<u8>>::SEND && Asked::<Consumer<Box<u8>>>::SEND) };
        const { assert!(!Asked::<Producer<Rc<u8>>>::SEND) };
    }
}
