//! Deadlines in order: one per key that is set.
//!
//! Lives on: whoever owns the machine. Bound: one entry per row and kind of the owner's tables; an
//! entry leaves with its row, so nothing stale is ever kept.
use std::collections::BTreeSet;

use iop_proto::ids::Now;

/// Deadlines of keys. Setting and cancelling cost O(log n).
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Timers<K> {
    due: BTreeSet<(Now, K)>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self {
            due: BTreeSet::new(),
        }
    }
}

impl<K: Copy + Ord> Timers<K> {
    /// The owner's row remembers `at`, to cancel with.
    pub fn set(&mut self, at: Now, key: K) {
        self.due.insert((at, key));
    }

    /// Whether it was still set.
    pub fn cancel(&mut self, at: Now, key: K) -> bool {
        self.due.remove(&(at, key))
    }

    /// The earliest entry that is due at `now`, taken out, with the instant it was set for.
    pub fn pop_due(&mut self, now: Now) -> Option<(Now, K)> {
        let &(at, key) = self.due.first()?;
        if at > now {
            return None;
        }
        self.due.pop_first();
        Some((at, key))
    }

    /// When the earliest entry is due.
    #[must_use]
    pub fn next(&self) -> Option<Now> {
        self.due.first().map(|&(at, _)| at)
    }

    /// Everything that is set, the earliest first.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Now, K)> {
        self.due.iter().copied()
    }

    #[must_use]
    pub fn contains(&self, at: Now, key: K) -> bool {
        self.due.contains(&(at, key))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.due.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_entries_come_in_order_and_not_before_their_time() {
        let at = Now::from_nanos;
        let mut timers = Timers::default();
        timers.set(at(30), 'c');
        timers.set(at(10), 'a');
        timers.set(at(20), 'b');
        assert_eq!(timers.next(), Some(at(10)));
        assert_eq!(timers.pop_due(at(9)), None);
        assert_eq!(timers.pop_due(at(10)), Some((at(10), 'a')));
        assert!(timers.cancel(at(20), 'b'));
        assert!(!timers.cancel(at(20), 'b'), "only once");
        assert_eq!(timers.pop_due(at(99)), Some((at(30), 'c')));
        assert_eq!(timers.pop_due(at(99)), None);
        assert!(timers.is_empty());
    }
}
