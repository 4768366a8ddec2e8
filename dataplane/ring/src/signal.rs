//! The Signal lane: indices and generations by copy.
//!
//! Lives on: its two ends. Bound: values of at most [`SIGNAL_BYTES_MAX`] bytes, `capacity` of them.
use crate::spsc::{self, Consumer, Producer};

/// One cache line: what a signal may cost to copy.
pub const SIGNAL_BYTES_MAX: usize = 64;

/// A ring of `capacity` signals.
///
/// A type that is too large does not compile:
/// ```compile_fail
/// let _ = iop_ring::signal::channel::<[u8; 65]>(2);
/// ```
/// ```
/// let (mut tx, mut rx) = iop_ring::signal::channel::<[u8; 64]>(2);
/// tx.push([7; 64]).expect("an empty ring has room");
/// assert_eq!(rx.pop(), Some([7; 64]));
/// ```
///
/// # Panics
/// When `capacity` is not a power of two.
#[must_use]
pub fn channel<T: Copy + Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    const {
        assert!(
            size_of::<T>() <= SIGNAL_BYTES_MAX,
            "a signal is at most 64 bytes"
        )
    };
    spsc::channel(capacity)
}
