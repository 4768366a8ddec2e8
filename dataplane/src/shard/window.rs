//! HOT. How far a node may be ahead of its client: grants that follow what the client's socket takes.
//! `[D-06]` `[wire §4.2]`
//!
//! Lives on: the shard of the node's session. Bound: one Window when a tunnel's request begins, then
//! one per half of what the node may be ahead; none while the session's socket is behind.
//!
//! ```text
//! 0 ───────────── taken ──────── received ─────────── granted      body bytes of the run
//!                   └─ pending ─────┘                    │
//!                   └────────── size at most ────────────┘
//! ```
//! Taken are the bytes that are no longer pending here. A client that had to wait for the node doubles
//! the size, up to what a long way needs; one for which half of what is ahead waits here halves it; while
//! half of the output pool is used it is the first for all. Grants never shrink.
use iop_proto::ids::Now;
use iop_proto::limits::{
    PACED_WRITE_STALLS, WINDOW_FIRST_BYTES, WINDOW_LONGEST_BYTES, WINDOW_UNSENT_BYTES_MAX,
};
use iop_proto::reason::Reason;

use super::Shard;
use super::client::Phase;

/// Grants of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    received: u64,
    /// In total; 0: the node paces nothing.
    granted: u64,
    size: u64,
    /// Since when the node waits for the client, and what was taken then; begun anew with each half of
    /// the first grant that is taken. `None`: it does not wait.
    shut: Option<(Now, u64)>,
}

impl Window {
    /// What a run begins with at a node that paces itself.
    pub(super) const FIRST: Self = Self {
        received: 0,
        granted: WINDOW_FIRST_BYTES,
        size: WINDOW_FIRST_BYTES,
        shut: None,
    };

    /// Body bytes came.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// In total.
    pub(super) const fn granted(self) -> u64 {
        self.granted
    }

    /// There is more to grant once the client's socket has all that came.
    pub(super) const fn is_due(self) -> bool {
        self.granted > 0 && self.granted.saturating_sub(self.received) <= self.size / 2
    }

    /// The window after the next grant, if it is time for one. `pending`: bytes that the client's socket
    /// has not taken. `scarce`: half of the output pool is used, and nobody is to be far ahead.
    fn renewed(mut self, pending: u64, scarce: bool) -> Option<Self> {
        let taken = self.received.saturating_sub(pending);
        if self.granted.saturating_sub(taken) > self.size / 2 || (scarce && pending > 0) {
            return None;
        }
        if scarce {
            self.size = WINDOW_FIRST_BYTES;
        } else if pending == 0 {
            self.size = (self.size * 2).min(WINDOW_LONGEST_BYTES);
        } else if pending >= self.size / 4 {
            self.size = (self.size / 2).max(WINDOW_FIRST_BYTES);
        }
        if taken + self.size <= self.granted {
            return None; // half the size is ahead already
        }
        self.granted = taken + self.size;
        self.shut = None;
        Some(self)
    }

    /// How long the node has waited for the client to take half of the first grant; `None`: it may send,
    /// or there is nothing that the client could take.
    fn waits_ms(&mut self, pending: u64, now: Now) -> Option<u64> {
        if self.granted == 0 || self.received < self.granted || pending == 0 {
            self.shut = None;
            return None;
        }
        let taken = self.received.saturating_sub(pending);
        let (since, before) = *self.shut.get_or_insert((now, taken));
        if taken.saturating_sub(before) >= WINDOW_FIRST_BYTES / 2 {
            self.shut = Some((now, taken));
            return Some(0);
        }
        Some(now.ms_since(since))
    }
}

impl Shard {
    /// Grants more to the run that answers client `row`, if its socket has taken enough. Called when it
    /// has taken something, and a few times a second.
    pub(super) fn renew_window(&mut self, row: usize) {
        let client = &self.clients[row];
        let Phase::Running { run } = client.phase else {
            return;
        };
        let run = run as usize;
        let window = self.runs[run].window;
        if window.granted == 0 || client.output.is_direct() || !self.runs[run].has_client() {
            return; // a direct send is looked at again when it has settled
        }
        let pending = client.output.pending.bytes();
        let scarce = self.sender.pool.used() > self.sender.pool.count() / 2;
        let session = self.runs[run].session.0 as usize;
        if self.sessions[session].writer.unsent_bytes() > WINDOW_UNSENT_BYTES_MAX {
            return;
        }
        let Some(renewed) = window.renewed(pending, scarce) else {
            return;
        };
        // With no room for it now, it is tried again.
        if self.queue_window(session, run, renewed.granted).is_ok() {
            self.runs[run].window = renewed;
        }
    }

    /// The node of run `row` may send no more before the client takes some of what is here: it is not
    /// the node that is silent. A client that takes next to nothing is not waited for.
    pub(super) fn waits_for_client(&mut self, row: usize) -> bool {
        let (now, client) = (self.now, self.runs[row].client.0 as usize);
        let pending = self.clients[client].output.pending.bytes();
        let limit_ms = PACED_WRITE_STALLS * self.config.timeouts.write_stall_ms;
        let Some(waits_ms) = self.runs[row].window.waits_ms(pending, now) else {
            return false;
        };
        if waits_ms >= limit_ms {
            self.client_ends(client, Reason::ClientTooSlow);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = WINDOW_FIRST_BYTES;
    const LONGEST: u64 = WINDOW_LONGEST_BYTES;

    /// A run of whose `granted` bytes `received` came.
    fn window(granted: u64, received: u64, size: u64) -> Window {
        Window {
            received,
            granted,
            size,
            shut: None,
        }
    }

    fn grant(window: Window, pending: u64) -> Option<(u64, u64)> {
        let renewed = window.renewed(pending, false)?;
        assert!(
            renewed.granted > window.granted,
            "a grant is more than before"
        );
        Some((renewed.granted, renewed.size))
    }

    #[test]
    fn a_client_that_waits_for_its_node_doubles_what_it_may_be_ahead() {
        assert_eq!(grant(window(FIRST, FIRST / 2 - 1, FIRST), 0), None);
        let mut size = FIRST;
        while size < LONGEST {
            let taken = 7 * LONGEST + size / 2;
            let renewed = grant(window(7 * LONGEST + size, taken, size), 0);
            size *= 2;
            assert_eq!(renewed, Some((taken + size, size)));
        }
        let longest = window(LONGEST, LONGEST, LONGEST);
        assert_eq!(grant(longest, 0), Some((2 * LONGEST, LONGEST)));
    }

    #[test]
    fn one_that_is_behind_halves_it_and_one_that_is_busy_keeps_it() {
        // All that was granted is here, and half of it waits.
        let all = |size| window(9 * LONGEST, 9 * LONGEST, size);
        assert_eq!(grant(all(LONGEST), LONGEST / 2 + 1), None);
        let taken = 9 * LONGEST - LONGEST / 4;
        assert_eq!(
            grant(all(LONGEST), LONGEST / 4),
            Some((taken + LONGEST / 2, LONGEST / 2))
        );
        assert_eq!(grant(all(LONGEST), LONGEST / 2), None, "it is ahead enough");
        assert_eq!(
            grant(all(FIRST), FIRST / 2),
            Some((9 * LONGEST + FIRST / 2, FIRST))
        );
        let busy = LONGEST / 4 - 1;
        let taken = 9 * LONGEST - busy;
        assert_eq!(grant(all(LONGEST), busy), Some((taken + LONGEST, LONGEST)));
    }

    #[test]
    fn while_the_pool_is_scarce_nobody_gets_far_ahead_and_nobody_stands_still() {
        let all = window(LONGEST, LONGEST, LONGEST);
        assert_eq!(all.renewed(1, true), None);
        let renewed = all.renewed(0, true).expect("its client waits");
        assert_eq!((renewed.granted, renewed.size), (LONGEST + FIRST, FIRST));
        let far = window(LONGEST, LONGEST - FIRST, LONGEST);
        assert_eq!(far.renewed(0, true), None, "it is ahead enough");
    }

    #[test]
    fn the_wait_for_a_client_begins_anew_with_each_half_of_a_first_grant() {
        let at = |ms: u64| Now::from_nanos(0).after_ms(1_000 + ms);
        let mut shut = window(LONGEST, LONGEST, LONGEST);
        assert_eq!(shut.waits_ms(LONGEST, at(0)), Some(0));
        assert_eq!(shut.waits_ms(LONGEST, at(700)), Some(700));
        let less = LONGEST - FIRST / 2;
        assert_eq!(shut.waits_ms(less + 1, at(900)), Some(900));
        assert_eq!(shut.waits_ms(less, at(900)), Some(0), "it has taken enough");
        assert_eq!(shut.waits_ms(less, at(1_000)), Some(100));
        assert_eq!(
            shut.waits_ms(less - FIRST / 2, at(1_100)),
            Some(0),
            "and again"
        );
        assert_eq!(shut.waits_ms(0, at(1_200)), None, "it has all");
        assert_eq!(shut.waits_ms(1, at(1_300)), Some(0));
        let mut open = window(LONGEST, LONGEST - 1, LONGEST);
        assert_eq!(open.waits_ms(LONGEST, at(0)), None, "the node may send");
        let mut unpaced = window(0, LONGEST, 0);
        assert_eq!(unpaced.waits_ms(LONGEST, at(0)), None);
    }

    #[test]
    fn a_client_that_has_all_is_granted_more_whatever_came() {
        for size in [FIRST, 2 * FIRST, LONGEST] {
            for surplus in [0, 1, 5 * LONGEST] {
                assert!(grant(window(FIRST, FIRST + surplus, size), 0).is_some());
            }
        }
    }
}
