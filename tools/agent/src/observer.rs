//! Who is shown finalized stall evidence before its terminal goes out: the log of this node.
//!
//! Lives on: a thread of its own, so that an observer which panics or blocks touches no terminal.
//! View: configured names and closed words, never an id, a payload or a caller. Bound:
//! `OBSERVATIONS_QUEUED` waiting, the rest counted; lines as of a [`Limit`]. `[I5.10]`
use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use iop_control::node::attempt::Stall;
use tracing::warn;

use crate::trouble::Limit;

/// Observations that wait for a slow observer; small and copied.
const OBSERVATIONS_QUEUED: usize = 256;

/// One finalized stall. Bounded and free of whatever a caller chose. `[R-322]` `[R-323]`
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// Instance name, from the configuration.
    pub(crate) adapter: Arc<str>,
    pub(crate) stall: Stall,
}

/// Shows observations without ever waiting.
#[derive(Clone, Debug)]
pub(crate) struct Observer {
    queue: SyncSender<Observed>,
    /// Not shown: the queue was full, or the observer panicked.
    lost: Arc<AtomicU64>,
}

impl Observer {
    /// Starts `observe` on a thread that ends with the last clone of the observer.
    pub(crate) fn start(mut observe: impl FnMut(&Observed, u64) + Send + 'static) -> Self {
        let (queue, observations): (_, Receiver<Observed>) = sync_channel(OBSERVATIONS_QUEUED);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = lost.clone();
        // Its lines go where those of the agent go.
        let log = tracing::dispatcher::get_default(Clone::clone);
        let show = move || {
            for observed in observations {
                let before = counted.load(Ordering::Relaxed);
                let shown = catch_unwind(AssertUnwindSafe(|| observe(&observed, before)));
                if shown.is_err() {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let thread = std::thread::Builder::new().name("iop-observer".to_owned());
        let started = thread.spawn(move || tracing::dispatcher::with_default(&log, show));
        if let Err(error) = started {
            warn!(%error, "no thread for stall observations: they are counted only");
        }
        Self { queue, lost }
    }

    /// Logs; a dead backend stalls everything that runs on it at once. `[D-25]`
    pub(crate) fn log() -> Self {
        let mut limit = Limit::new();
        Self::start(move |observed, lost| {
            let Some(suppressed) = limit.admit(Instant::now()) else {
                return;
            };
            let Observed { adapter, stall } = observed;
            let (health, fenced) = (stall.health.health(), stall.fenced);
            let idle_ms = stall.idle_ms;
            warn!(%adapter, health, fenced, idle_ms, suppressed, lost, "response stalled");
        })
    }

    /// Hands one over; false when it was only counted.
    pub(crate) fn tell(&self, observed: Observed) -> bool {
        let told = self.queue.try_send(observed).is_ok();
        if !told {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;
    use std::sync::mpsc::channel;

    use iop_proto::domain::HealthEvidence;

    use super::*;

    fn observed(idle_ms: u64) -> Observed {
        Observed {
            adapter: "a".into(),
            stall: Stall {
                idle_ms,
                fenced: true,
                health: HealthEvidence::Unknown,
                observation: None,
            },
        }
    }

    #[test]
    fn a_panic_is_counted_and_the_next_observation_is_shown() {
        let (shown_in, shown) = channel();
        let observer = Observer::start(move |observed, lost| {
            assert!(observed.stall.idle_ms != 1, "planted");
            let _ = shown_in.send((observed.stall.idle_ms, lost));
        });
        assert!(observer.tell(observed(1)) && observer.tell(observed(2)));
        let wait = Duration::from_secs(20);
        assert_eq!(shown.recv_timeout(wait).expect("the second one"), (2, 1));
    }

    #[test]
    fn a_blocked_observer_costs_observations_and_never_the_caller() {
        let (release, blocked) = channel::<()>();
        let observer = Observer::start(move |_, _| {
            let _ = blocked.recv();
        });
        let told = (0..2 * OBSERVATIONS_QUEUED as u64)
            .filter(|&n| observer.tell(observed(n)))
            .count();
        assert!((OBSERVATIONS_QUEUED..=OBSERVATIONS_QUEUED + 1).contains(&told));
        drop(release);
    }
}
