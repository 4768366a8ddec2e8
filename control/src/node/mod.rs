//! The node's half of the contract as pure machines: who dials when, who may call a provider, and how
//! one execution ends.
//!
//! Lives on: the agent's one task and its attempts. Bound: each machine states its own.
pub mod attempt;
pub mod gate;
pub mod runs;
pub mod supervisor;

use core::num::NonZeroU64;

/// One execution attempt of this process, run or tunnel. Never reused. `[states §5]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// One dial and the session that may follow from it. Never reused. `[I4.6]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u64);

impl Ticket {
    /// For logs and tests only.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl LinkId {
    /// For logs and tests only.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Numbers of one session's health observations, over runs, tunnels and CAPABILITIES: 1, 2, 3 …,
/// each drawn once, in the step that decides the evidence. `[R-148]` `[R-149]` `[I5.8]`
#[derive(Debug, Default)]
pub struct Observations {
    last: u64,
}

impl Observations {
    /// The next number.
    pub fn draw(&mut self) -> NonZeroU64 {
        self.last += 1;
        NonZeroU64::new(self.last).expect("counts up from 1, and 2^64 are not reached")
    }
}

#[cfg(test)]
#[path = "sim_tests.rs"]
mod sim_tests;
