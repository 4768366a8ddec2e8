//! Counters that one thread writes and any thread reads: plain loads and stores, no
//! read-modify-write.
//!
//! Lives on: the writer on one thread, readers anywhere. Bound: `N` values of 64 bits.
//!
//! Each value on its own is never torn and, if only added to, never seen to fall. Between two values
//! nothing is promised: a reader may see the later write before the earlier one.
use core::fmt;

use crate::sync::{Arc, AtomicU64, CachePadded, Ordering};

/// The values together on lines of their own: only the writer's cache line bounces, and only when a
/// reader looks.
type Values<const N: usize> = CachePadded<[AtomicU64; N]>;

/// The writing end. Owned by one thread.
pub struct MirrorWriter<const N: usize> {
    values: Arc<Values<N>>,
}

/// A reading end; clone it freely.
pub struct MirrorReader<const N: usize> {
    values: Arc<Values<N>>,
}

/// `N` values, all 0, with their only writer.
#[must_use]
pub fn channel<const N: usize>() -> (MirrorWriter<N>, MirrorReader<N>) {
    let values = Arc::new(CachePadded::new(core::array::from_fn(|_| {
        AtomicU64::new(0)
    })));
    let reader = MirrorReader {
        values: Arc::clone(&values),
    };
    (MirrorWriter { values }, reader)
}

impl<const N: usize> MirrorWriter<N> {
    /// Adds `n`, wrapping.
    ///
    /// # Panics
    /// When `index >= N`; so do all methods here.
    #[inline]
    pub fn add(&mut self, index: usize, n: u64) {
        let value = self.get(index).wrapping_add(n);
        self.set(index, value);
    }

    /// Replaces the value: a gauge.
    #[inline]
    pub fn set(&mut self, index: usize, value: u64) {
        self.values[index].store(value, Ordering::Relaxed);
    }

    /// What was written last.
    #[must_use]
    #[inline]
    pub fn get(&self, index: usize) -> u64 {
        self.values[index].load(Ordering::Relaxed)
    }
}

impl<const N: usize> MirrorReader<N> {
    /// A value that was current a moment ago.
    #[must_use]
    #[inline]
    pub fn get(&self, index: usize) -> u64 {
        self.values[index].load(Ordering::Relaxed)
    }
}

impl<const N: usize> Clone for MirrorReader<N> {
    fn clone(&self) -> Self {
        Self {
            values: Arc::clone(&self.values),
        }
    }
}

impl<const N: usize> fmt::Debug for MirrorWriter<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MirrorWriter").finish_non_exhaustive()
    }
}

impl<const N: usize> fmt::Debug for MirrorReader<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MirrorReader").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(iop_loom)))]
mod tests {
    use super::*;

    #[test]
    fn readers_on_other_threads_see_what_the_writer_wrote() {
        let (mut writer, reader) = channel::<3>();
        writer.add(0, u64::MAX);
        writer.add(0, 3);
        writer.set(2, 9);
        assert_eq!([writer.get(0), writer.get(1), writer.get(2)], [2, 0, 9]);
        let there = reader.clone();
        let seen = std::thread::spawn(move || [there.get(0), there.get(1), there.get(2)]);
        assert_eq!(seen.join().unwrap(), [2, 0, 9]);
        drop(writer);
        assert_eq!(reader.get(2), 9, "the last values outlive the writer");
    }
}
