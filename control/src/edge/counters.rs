//! What control has counted since it started.
//!
//! Lives on: control writes, metrics copy. Bound: fixed; labels come from closed sets. `[D-24]`
use iop_proto::reason::Reason;

use super::notice::{HealthSource, Recovery};
use super::overlay::Outcome;
use crate::step::Eligibility;

/// Numbers since start; each only grows, but for `nodes_outdated`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Requests submitted by shards.
    pub submits: u64,
    /// Requests that had to wait when they were submitted.
    pub queue_entries: u64,
    /// Requests that came back from a grant to their old place.
    pub queue_returns: u64,
    /// Leases taken.
    pub grants: u64,
    /// Of these, granted from the queue.
    pub grants_queued: u64,
    /// Leases returned by a terminal, because nothing was sent, by a fence, by a lost run.
    pub returns_terminal: u64,
    pub returns_not_sent: u64,
    pub returns_fence: u64,
    pub returns_lost: u64,
    /// Terminals by ending.
    pub terminals_complete: u64,
    pub terminals_error: u64,
    pub terminals_violation: u64,
    pub terminals_stalled: u64,
    /// Health evidence, by where it came from and what it came to. `[R-314]`
    evidence: [[u64; Outcome::ALL.len()]; HealthSource::ALL.len()],
    /// Stalled requests by whether they may have a second run; second runs by what became of them.
    /// `[R-317]` `[R-318]`
    eligibility: [u64; Eligibility::ALL.len()],
    recoveries: [u64; Recovery::ALL.len()],
    /// Commands sent to nodes; answered, answered with an error, not answered in time, and given up
    /// because the node's generation ended.
    pub commands_sent: u64,
    pub commands_answered: u64,
    pub commands_failed: u64,
    pub commands_timed_out: u64,
    pub commands_lost: u64,
    /// Runs control has ended. `[D-63]`
    pub cancels: u64,
    /// Clients that left while their request waited; after their grant or refusal was on its way.
    pub clients_gone_waiting: u64,
    pub clients_gone_late: u64,
    /// Requests refused, by reason.
    refusals: [u64; Reason::ALL.len()],
    /// Registrations accepted, repeats included; refused registrations and readies, by reason.
    pub registrations: u64,
    node_refusals: [u64; Reason::ALL.len()],
    /// Ready transitions; fences; pending owners put out by another claim.
    pub activations: u64,
    pub fences: u64,
    pub superseded_pending: u64,
    /// Configurations taken since the first. Refreshes sent; answered by what; not answered in time.
    pub reloads: u64,
    pub refreshes_sent: u64,
    pub refreshes_applied: u64,
    pub refreshes_restart_required: u64,
    pub refreshes_failed: u64,
    pub refreshes_unanswered: u64,
    /// Connected nodes that do not have the newest configuration, now.
    pub nodes_outdated: u64,
    /// Ready nodes drained by the Edge: certificate's end, operator.
    pub node_drains: u64,
    /// Notices made, and those dropped because nobody took them.
    pub notices_connected: u64,
    pub notices_disconnected: u64,
    pub notices_dropped: u64,
    /// Events about a connection or run that has ended. Few are normal. `[R-078]`
    pub stale_events: u64,
    pub pings: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            submits: 0,
            queue_entries: 0,
            queue_returns: 0,
            grants: 0,
            grants_queued: 0,
            returns_terminal: 0,
            returns_not_sent: 0,
            returns_fence: 0,
            returns_lost: 0,
            terminals_complete: 0,
            terminals_error: 0,
            terminals_violation: 0,
            terminals_stalled: 0,
            evidence: [[0; Outcome::ALL.len()]; HealthSource::ALL.len()],
            eligibility: [0; Eligibility::ALL.len()],
            recoveries: [0; Recovery::ALL.len()],
            commands_sent: 0,
            commands_answered: 0,
            commands_failed: 0,
            commands_timed_out: 0,
            commands_lost: 0,
            cancels: 0,
            clients_gone_waiting: 0,
            clients_gone_late: 0,
            refusals: [0; Reason::ALL.len()],
            registrations: 0,
            node_refusals: [0; Reason::ALL.len()],
            activations: 0,
            fences: 0,
            superseded_pending: 0,
            reloads: 0,
            refreshes_sent: 0,
            refreshes_applied: 0,
            refreshes_restart_required: 0,
            refreshes_failed: 0,
            refreshes_unanswered: 0,
            nodes_outdated: 0,
            node_drains: 0,
            notices_connected: 0,
            notices_disconnected: 0,
            notices_dropped: 0,
            stale_events: 0,
            pings: 0,
        }
    }
}

impl Counters {
    /// Requests refused for `reason`.
    #[must_use]
    pub const fn refusals(&self, reason: Reason) -> u64 {
        self.refusals[reason as usize]
    }

    /// Registrations and readies refused for `reason`.
    #[must_use]
    pub const fn node_refusals(&self, reason: Reason) -> u64 {
        self.node_refusals[reason as usize]
    }

    /// Pieces of evidence from `source` that came to `outcome`.
    #[must_use]
    pub const fn evidence_of(&self, source: HealthSource, outcome: Outcome) -> u64 {
        self.evidence[source as usize][outcome as usize]
    }

    /// Stalled requests judged so.
    #[must_use]
    pub const fn eligibility_of(&self, eligibility: Eligibility) -> u64 {
        self.eligibility[eligibility as usize]
    }

    pub(crate) const fn eligible(&mut self, eligibility: Eligibility) {
        self.eligibility[eligibility as usize] += 1;
    }

    /// Second runs that ended so.
    #[must_use]
    pub const fn recoveries_of(&self, result: Recovery) -> u64 {
        self.recoveries[result as usize]
    }

    pub(crate) const fn recovered(&mut self, result: Recovery) {
        self.recoveries[result as usize] += 1;
    }

    pub(crate) const fn evidence(&mut self, source: HealthSource, outcome: Outcome) {
        self.evidence[source as usize][outcome as usize] += 1;
    }

    pub(crate) const fn refused(&mut self, reason: Reason) {
        self.refusals[reason as usize] += 1;
    }

    pub(crate) const fn node_refused(&mut self, reason: Reason) {
        self.node_refusals[reason as usize] += 1;
    }
}
