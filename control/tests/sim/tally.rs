//! How much happened, so that a simulation cannot become too tame to prove anything.
use core::fmt;

use iop_control::edge::{Counters, HealthSource, Outcome, Recovery};
use iop_control::step::Eligibility;
use iop_proto::reason::Reason;

use crate::acts::ACTS;

/// Over one or more seeds.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// How often each of `ACTS` found something to do.
    pub(crate) acts: [u64; ACTS.len()],
    pub(crate) notices: u64,
    /// Most rounds that a seed needed until everybody was answered.
    pub(crate) rounds_max: u64,
    outcomes: [u64; OUTCOMES.len()],
}

type Count = fn(&Counters) -> u64;

/// What control must have come across often.
const OUTCOMES: [(&str, Count); 24] = [
    ("grants", |c| c.grants),
    ("grants of waiters", |c| c.grants_queued),
    ("back in the queue", |c| c.queue_returns),
    ("leases returned by a fence", |c| c.returns_fence),
    ("runs cancelled", |c| c.cancels),
    ("clients gone late", |c| c.clients_gone_late),
    ("queue timeouts", |c| c.refusals(Reason::QueueTimeout)),
    ("queue full", |c| c.refusals(Reason::QueueFull)),
    ("superseded while pending", |c| c.superseded_pending),
    ("stale events", |c| c.stale_events),
    ("overlays lowered", |c| {
        c.evidence_of(HealthSource::Stall, Outcome::Lowered)
    }),
    ("overlays cleared", |c| {
        c.evidence_of(HealthSource::Capabilities, Outcome::Cleared)
    }),
    ("outdated evidence", |c| {
        HealthSource::ALL
            .map(|source| c.evidence_of(source, Outcome::Stale))
            .iter()
            .sum()
    }),
    ("second runs", |c| c.eligibility_of(Eligibility::Eligible)),
    ("ended second runs", |c| {
        c.recoveries_of(Recovery::Recovered) + c.recoveries_of(Recovery::Failed)
    }),
    ("stalled again", |c| c.recoveries_of(Recovery::StalledAgain)),
    ("never served again", |c| {
        c.recoveries_of(Recovery::Unserved)
    }),
    ("left before", |c| c.recoveries_of(Recovery::ClientGone)),
    ("commands", |c| c.commands_sent),
    ("commands without answer", |c| {
        c.commands_timed_out + c.commands_lost
    }),
    ("refreshes applied", |c| c.refreshes_applied),
    ("refreshes refused", |c| {
        c.refreshes_failed + c.refreshes_restart_required
    }),
    ("refreshes unanswered", |c| c.refreshes_unanswered),
    ("nodes drained", |c| c.node_drains),
];
/// Each outcome and each act at least this often, over a whole run of many seeds.
const OFTEN: u64 = 100;

impl Default for Tally {
    fn default() -> Self {
        Self {
            acts: [0; ACTS.len()],
            notices: 0,
            rounds_max: 0,
            outcomes: [0; OUTCOMES.len()],
        }
    }
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.notices += other.notices;
        self.rounds_max = self.rounds_max.max(other.rounds_max);
        for (mine, theirs) in self.acts.iter_mut().zip(other.acts) {
            *mine += theirs;
        }
        for (mine, theirs) in self.outcomes.iter_mut().zip(other.outcomes) {
            *mine += theirs;
        }
    }

    pub(crate) fn count(&mut self, counters: &Counters) {
        self.outcomes = OUTCOMES.map(|(_, count)| count(counters));
    }

    /// Every interesting thing happened often.
    pub(crate) fn is_lively(&self) -> bool {
        let all = self.outcomes.iter().chain(&self.acts);
        all.copied().chain([self.notices]).all(|n| n >= OFTEN)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (act, count) in ACTS.iter().zip(self.acts) {
            write!(f, "{} {count}, ", act.name)?;
        }
        for ((name, _), count) in OUTCOMES.iter().zip(self.outcomes) {
            write!(f, "{name} {count}, ")?;
        }
        let (notices, rounds) = (self.notices, self.rounds_max);
        write!(
            f,
            "notices {notices}, everybody answered within {rounds} rounds"
        )
    }
}
