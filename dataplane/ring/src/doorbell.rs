//! Decides who must wake a sleeper, so that a sleeping thread is woken and a busy one is not.
//!
//! Lives on: one sleeper, any number of ringers, all over one `Arc` or static. Bound: one flag.
//!
//! ```text
//!  sleeper                                   ringer
//!  prepare: asleep := true; fence            push into a ring
//!  look at every ring once more              ring: fence; asleep? then := false, answer true
//!  all empty: block; some value: cancel      true: write the sleeper's eventfd
//!  awake for whatever reason: cancel
//! ```
//! Either the sleeper's second look sees the push, or the ringer sees the sleeper: the two fences
//! make "neither" impossible. They are fences because the model treats `SeqCst` accesses as `AcqRel`.
//! Whoever clears the flag for the sleeper wakes it afterwards, so a ringer that finds it cleared has
//! nothing to do. Ringers that meet may both wake, and a sleeper may be woken when it is awake
//! already; a wake-up is never lost.
use crate::full_fence;
use crate::sync::{AtomicBool, CachePadded, Ordering};

/// The flag of one sleeping thread.
#[derive(Debug)]
pub struct Doorbell {
    asleep: CachePadded<AtomicBool>,
}

impl Default for Doorbell {
    fn default() -> Self {
        Self {
            asleep: CachePadded::new(AtomicBool::new(false)),
        }
    }
}

impl Doorbell {
    /// Sleeper: announces the intent to block. Look at every ring once more after this, and block
    /// only if all are empty.
    #[inline]
    pub fn prepare(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        full_fence!("doorbell_prepare_fence");
    }

    /// Sleeper: awake, or not going to sleep after all. Until the next `prepare` nobody writes the
    /// eventfd.
    #[inline]
    pub fn cancel(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Ringer: after one or more pushes. `true`: the caller must wake the sleeper (write its eventfd).
    #[must_use]
    #[inline]
    pub fn ring(&self) -> bool {
        full_fence!("doorbell_ring_fence");
        let asleep = self.asleep.load(Ordering::Relaxed);
        if asleep {
            // Not a swap: one ringer told too many costs a syscall, and only while the sleeper sleeps.
            self.asleep.store(false, Ordering::Relaxed);
        }
        asleep
    }
}

#[cfg(all(test, not(iop_loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_a_sleeper_is_rung_and_only_once() {
        let bell = Doorbell::default();
        assert!(!bell.ring(), "nobody sleeps yet");
        bell.prepare();
        assert!(bell.ring());
        assert!(!bell.ring(), "the first ringer woke it");
        bell.prepare();
        bell.cancel();
        assert!(!bell.ring(), "awake again");
    }
}
