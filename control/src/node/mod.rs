//! The node's half of the contract as pure machines: who dials when, who may call a provider, and how
//! one execution ends.
//!
//! Lives on: the agent's one task and its attempts. Bound: each machine states its own.
pub mod attempt;
pub mod gate;
pub mod runs;
pub mod supervisor;

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
