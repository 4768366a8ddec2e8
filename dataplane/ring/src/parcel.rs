//! The Parcel lane: a box moves, its content is neither copied nor shared.
//!
//! Lives on: its two ends; the box belongs to exactly one of them or to the ring. Bound: `capacity`
//! boxes. Whoever receives a parcel frees it, so a hot thread hands boxes back rather than drop them.
use crate::spsc::{self, Consumer, Producer};

/// A ring of `capacity` parcels.
///
/// # Panics
/// When `capacity` is not a power of two.
#[must_use]
pub fn channel<T: Send>(capacity: usize) -> (Producer<Box<T>>, Consumer<Box<T>>) {
    spsc::channel(capacity)
}
