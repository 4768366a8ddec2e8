//! The Edge: front, shards, control thread, cold thread, and what `iop edge` runs.
pub mod admin;
pub mod alloc;
pub mod cold;
pub mod config;
pub mod control_thread;
pub mod credential;
pub mod edge;
pub mod epoch;
#[cfg(test)]
mod fixture;
pub mod front;
pub mod guard;
mod hooks;
pub mod keys;
pub mod lanes;
pub mod metrics;
pub mod shard;
pub mod surface;
pub mod system;
pub mod text;
pub mod tls;
