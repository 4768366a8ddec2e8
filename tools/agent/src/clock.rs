//! The process's clock as the machines want it: nanoseconds since start.
//!
//! Lives on: every task of the agent, by copy. Bound: one instant.
use core::time::Duration;

use iop_proto::ids::Now;
use tokio::time::Instant;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub(crate) fn now(self) -> Now {
        let ns = self.start.elapsed().as_nanos();
        Now::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// The instant of `at`; far in the future when it cannot be represented.
    pub(crate) fn instant(self, at: Now) -> Instant {
        let far = Duration::from_secs(60 * 60 * 24 * 365);
        self.start + Duration::from_nanos(at.as_nanos()).min(self.start.elapsed() + far)
    }
}
