//! What leases are judged by: a clock that never goes back, and the leases that were used.
//!
//! Lives on: behind the plane's lock. Bound: `REPLAY_ENTRIES_MAX` entries, each for the rest of its
//! lease and the skew.
use std::collections::{BTreeSet, HashSet};

use iop_lease::LeaseError;
use iop_proto::ids::Now;
use iop_proto::limits::REPLAY_ENTRIES_MAX;

/// Wall time that never goes back, and never falls behind the monotonic clock: a step of the system's
/// clock neither revives a lease nor lets one live longer. `[A-35]`
pub(super) struct JudgeClock {
    anchor: Now,
    anchor_ms: i64,
}

impl JudgeClock {
    pub(super) const fn new(now: Now, wall_ms: i64) -> Self {
        Self {
            anchor: now,
            anchor_ms: wall_ms,
        }
    }

    /// Unix ms to judge by.
    pub(super) fn read(&mut self, now: Now, wall_ms: i64) -> i64 {
        let passed = i64::try_from(now.ms_since(self.anchor)).unwrap_or(i64::MAX);
        let floor = self.anchor_ms.saturating_add(passed);
        if wall_ms > floor {
            *self = Self::new(now, wall_ms);
        }
        wall_ms.max(floor)
    }
}

/// Ids of used leases until none of them could be judged valid any more.
#[derive(Default)]
pub(super) struct Used {
    ids: HashSet<String>,
    ends: BTreeSet<(Now, String)>,
}

impl Used {
    /// Uses a lease; the first one wins. `[R-218]`
    ///
    /// # Errors
    /// It was used before, or too many are remembered.
    pub(super) fn insert(&mut self, id: &str, now: Now, keep_ms: u64) -> Result<(), LeaseError> {
        while let Some((end, _)) = self.ends.first()
            && *end <= now
            && let Some((_, id)) = self.ends.pop_first()
        {
            self.ids.remove(&id);
        }
        if self.ids.contains(id) {
            return Err(LeaseError::Replayed);
        }
        if self.ids.len() >= REPLAY_ENTRIES_MAX as usize {
            return Err(LeaseError::ReplayFull);
        }
        self.ids.insert(id.to_owned());
        self.ends.insert((now.after_ms(keep_ms), id.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    const fn at(seconds: u64) -> Now {
        Now::from_nanos(seconds * S)
    }

    #[test]
    fn the_clock_follows_steps_forward_and_no_step_back() {
        let mut clock = JudgeClock::new(at(1), 1_000_000);
        assert_eq!(clock.read(at(1), 1_000_000), 1_000_000);
        assert_eq!(clock.read(at(2), 1_001_000), 1_001_000);
        assert_eq!(
            clock.read(at(3), 400_000),
            1_002_000,
            "an hour back: it runs on"
        );
        assert_eq!(clock.read(at(4), 9_000_000), 9_000_000, "forward: it jumps");
        assert_eq!(clock.read(at(14), 1_012_000), 9_010_000, "and stays there");
        let mut half = JudgeClock::new(at(0), 0);
        for tick in 1..=10 {
            half.read(Now::from_nanos(tick * 500_000), 0);
        }
        assert_eq!(
            half.read(Now::from_nanos(10 * 500_000), 0),
            5,
            "no part is lost"
        );
    }

    #[test]
    fn a_used_lease_is_remembered_to_its_end_and_not_longer() {
        let mut used = Used::default();
        assert_eq!(used.insert("a", at(0), 65_000), Ok(()));
        assert_eq!(used.insert("b", at(1), 1_000), Ok(()));
        assert_eq!(used.insert("a", at(64), 1), Err(LeaseError::Replayed));
        assert_eq!(used.ids.len(), 1, "b is gone");
        assert_eq!(used.insert("a", at(65), 1), Ok(()));
        assert_eq!(used.ids.len(), used.ends.len());
    }

    #[test]
    fn the_table_is_full_at_its_bound_and_refuses_rather_than_forgets() {
        let mut used = Used::default();
        for id in 0..REPLAY_ENTRIES_MAX {
            assert_eq!(used.insert(&format!("{id}"), at(0), 60_000), Ok(()));
        }
        assert_eq!(
            used.insert("new", at(1), 60_000),
            Err(LeaseError::ReplayFull)
        );
        assert_eq!(used.insert("0", at(1), 60_000), Err(LeaseError::Replayed));
        assert_eq!(used.insert("new", at(60), 60_000), Ok(()));
    }
}
