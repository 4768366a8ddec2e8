//! Requests that went wrong, in the node's log: which adapter, and one of a fixed set of reasons.
//!
//! Lives on: any task. View: one line; never an id, a payload, or what a provider or caller wrote.
//! Bound: `LINES_PER_SECOND` of each [`Limit`]; the rest is counted in the next line. `[D-25]`
use core::time::Duration;
use std::sync::Mutex;
use std::time::Instant;

use tracing::warn;

/// A dead server fails everything that is sent to it.
const LINES_PER_SECOND: u32 = 10;

/// So many lines a second, and no more.
#[derive(Debug)]
pub(crate) struct Limit {
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Limit {
    pub(crate) const fn new() -> Self {
        Self {
            since: None,
            lines: 0,
            suppressed: 0,
        }
    }

    /// Whether a line may be written now, and how many were not since the last one.
    pub(crate) fn admit(&mut self, now: Instant) -> Option<u64> {
        let over = |since| now.saturating_duration_since(since) >= Duration::from_secs(1);
        if self.since.is_none_or(over) {
            (self.since, self.lines) = (Some(now), 0);
        }
        if self.lines == LINES_PER_SECOND {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(core::mem::take(&mut self.suppressed))
    }
}

static LIMIT: Mutex<Limit> = Mutex::new(Limit::new());

/// A request ended with an error terminal. `adapter`: an instance of the configuration, or empty.
pub(crate) fn tell(adapter: &str, why: &str) {
    let admitted = LIMIT
        .lock()
        .map_or(None, |mut limit| limit.admit(Instant::now()));
    if let Some(suppressed) = admitted {
        warn!(adapter, why, suppressed, "request failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_by_the_second_and_the_next_says_how_many_are_missing() {
        let mut limit = Limit::new();
        let start = Instant::now();
        let admitted = (0..LINES_PER_SECOND + 5)
            .filter_map(|_| limit.admit(start))
            .count();
        assert_eq!(admitted, LINES_PER_SECOND as usize);
        let later = start + Duration::from_secs(1);
        assert_eq!(limit.admit(later), Some(5));
        assert_eq!(limit.admit(later), Some(0));
    }
}
