//! The Edge's core, one claim per test: who owns a node, who gets a lease, who waits, what is
//! shown.
//!
//! Virtual time, real code, no shards: each test plays the shards itself and checks every invariant
//! after each step.
#![expect(clippy::unwrap_used, reason = "a test: a broken assumption fails it")]

mod commands;
mod dispatch;
mod drain;
mod health;
mod queue;
mod races;
mod readiness;
mod recovery;
mod reload;
mod rig;
mod snapshot;
mod transitions;
