//! The contract seen from a node, against `iop edge` as a process of its own: real TLS, real
//! sockets, a node and a client whose every byte the test decides. One file per category of the
//! ledger.
//!
//! Lives on: test threads. Bound: one Edge per test; every wait has a deadline.
#[path = "../support/mod.rs"]
mod support;

mod cancel;
mod chain;
mod commands;
mod credential;
mod cut;
mod disconnect;
mod dispatch;
mod drain;
mod envelopes;
mod generations;
mod handoff;
mod heartbeat;
mod histories;
mod identity;
mod kit;
mod leases;
mod observation;
mod overlay;
mod passthrough;
mod prohibition;
mod readiness;
mod recovery;
mod refresh;
mod registration;
mod reload;
mod runs;
mod snapshot;
mod surfaces;
mod transport;
mod tunnel;
mod window;
