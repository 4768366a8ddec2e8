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
//! Taken are the bytes that are no longer pending here. A client that keeps up doubles the size, up to
//! what a long way needs; one that is behind has the first size again. Grants never shrink, so a node
//! is never further ahead than the size was when it was granted.
use iop_proto::limits::{WINDOW_FIRST_BYTES, WINDOW_LONGEST_BYTES, WINDOW_UNSENT_BYTES_MAX};

use super::Shard;
use super::client::Phase;

/// Grants of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    received: u64,
    /// In total; 0: the node paces nothing.
    granted: u64,
    size: u64,
}

impl Window {
    /// What a run begins with at a node that paces itself.
    pub(super) const FIRST: Self = Self {
        received: 0,
        granted: WINDOW_FIRST_BYTES,
        size: WINDOW_FIRST_BYTES,
    };

    /// Body bytes came.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// In total.
    pub(super) const fn granted(self) -> u64 {
        self.granted
    }

    /// The node waits for a grant: its silence is the client's.
    pub(super) const fn is_shut(self) -> bool {
        self.granted > 0 && self.received >= self.granted
    }

    /// The next grant, if it is time for one. `pending`: bytes that the client's socket has not taken.
    fn renew(&mut self, pending: u64) -> Option<u64> {
        if pending > 0 {
            self.size = WINDOW_FIRST_BYTES;
        }
        let taken = self.received.saturating_sub(pending);
        if self.granted.saturating_sub(taken) > self.size / 2 {
            return None;
        }
        if pending == 0 {
            self.size = (self.size * 2).min(WINDOW_LONGEST_BYTES);
        }
        self.granted = taken + self.size;
        Some(self.granted)
    }
}

impl Shard {
    /// Grants more to the run that answers client `row`, if its socket has taken enough.
    pub(super) fn renew_window(&mut self, row: usize) {
        let client = &self.clients[row];
        let Phase::Running { run } = client.phase else {
            return;
        };
        let run = run as usize;
        let mut window = self.runs[run].window;
        if window.granted == 0 || client.output.is_direct() {
            return; // a direct send is looked at again when it has settled
        }
        let session = self.runs[run].session.0 as usize;
        if self.sessions[session].writer.unsent_bytes() > WINDOW_UNSENT_BYTES_MAX {
            return; // looked at again when deadlines are
        }
        let was_shut = window.is_shut();
        let granted = window.renew(client.output.pending.bytes());
        self.runs[run].window = window;
        if granted.is_none() {
            return;
        }
        if was_shut {
            let wait = self.runs[run].response_wait_ms;
            self.runs[run].deadline = self.now.after_ms(wait);
        }
        self.queue_window(session, run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = WINDOW_FIRST_BYTES;
    const LONGEST: u64 = WINDOW_LONGEST_BYTES;

    fn received(bytes: u64) -> Window {
        Window {
            received: bytes,
            ..Window::FIRST
        }
    }

    #[test]
    fn a_grant_follows_when_half_is_taken_and_grows_while_the_client_keeps_up() {
        let mut window = received(FIRST / 2 - 1);
        assert_eq!(window.renew(0), None);
        assert!(!window.is_shut());
        let mut size = FIRST;
        for _ in 0..8 {
            window.received = window.granted - size / 2;
            size = (size * 2).min(LONGEST);
            assert_eq!(window.renew(0), Some(window.received + size));
        }
        assert_eq!(size, LONGEST);
    }

    #[test]
    fn a_client_that_is_behind_is_the_first_size_ahead_at_most_and_grants_never_shrink() {
        let mut window = Window {
            received: 40 * LONGEST,
            granted: 41 * LONGEST,
            size: LONGEST,
        };
        // It has stopped reading: what was granted comes, and nothing more is granted.
        for pending in [1, LONGEST / 2, LONGEST] {
            window.received = 40 * LONGEST + pending;
            assert_eq!(window.renew(pending), None);
        }
        assert!(window.is_shut());
        assert_eq!(window.renew(FIRST / 2 + 1), None);
        assert_eq!(window.renew(FIRST / 2), Some(41 * LONGEST + FIRST / 2));
        assert!(!window.is_shut());
    }

    #[test]
    fn a_node_that_waits_is_granted_more_once_its_client_has_all() {
        for size in [FIRST, 2 * FIRST, LONGEST] {
            let mut window = Window {
                received: 3 * LONGEST,
                granted: 3 * LONGEST,
                size,
            };
            assert!(window.is_shut());
            assert!(window.renew(0).is_some_and(|granted| granted > 3 * LONGEST));
        }
    }
}
