//! HOT. What the shard owes control: pushed as room appears, so that the shard never needs room to
//! drain.
//!
//! Lives on: one shard. Bound: the sum of what each slot can owe, reserved at start. A slot owes in
//! order: what a session, a client or a run reports first reaches control first. `[D-48]`
use std::collections::VecDeque;

use iop_control::step::Event;
use iop_proto::limits::{
    COMMANDS_PER_NODE_MAX, REFRESHES_UNANSWERED_MAX, REPLIES_PER_SESSION_MAX, RUNS_PER_SHARD_MAX,
};
use iop_ring::spsc::{Full, Producer};

#[derive(Debug)]
pub struct Outbox {
    owed: VecDeque<Event>,
}

/// Events one session can owe: its unanswered requests, answers to what it was asked, a GoAway, the end
/// of its certificate, its close.
const PER_SESSION: usize =
    (REPLIES_PER_SESSION_MAX + COMMANDS_PER_NODE_MAX + REFRESHES_UNANSWERED_MAX) as usize + 3;
/// Events one client can owe: a submit and its withdrawal.
const PER_CLIENT: usize = 2;
/// Events one run can owe: begun, that its terminal is overdue, and its final report.
const PER_RUN: usize = 3;
/// The answer to control's ping.
const OF_SHARD: usize = 1;

impl Outbox {
    #[must_use]
    pub fn new(sessions: usize, clients: usize) -> Self {
        // A slot's next tenant may owe while the last one's close still does.
        let tenants = 2 * (sessions * PER_SESSION + clients * PER_CLIENT);
        let runs = RUNS_PER_SHARD_MAX as usize * PER_RUN;
        Self {
            owed: VecDeque::with_capacity(tenants + runs + OF_SHARD),
        }
    }

    /// Owes `event`.
    ///
    /// # Panics
    /// When a slot owes more than it can: a bug, never load.
    pub fn owe(&mut self, event: Event) {
        assert!(
            self.owed.len() < self.owed.capacity(),
            "a slot owes more than its bound"
        );
        self.owed.push_back(event);
    }

    /// Pushes as much as there is room for; whether anything was pushed.
    pub fn push(&mut self, lane: &mut Producer<Event>) -> bool {
        let mut pushed = false;
        while let Some(&event) = self.owed.front() {
            match lane.push(event) {
                Ok(()) => {
                    self.owed.pop_front();
                    pushed = true;
                }
                Err(Full(_)) => break,
            }
        }
        pushed
    }

    /// Something waits for room.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.owed.is_empty()
    }
}
