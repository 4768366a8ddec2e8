//! Work that may block and allocate, away from front, shards and control.
//!
//! Lives on: cold threads. Bound: per task.
pub mod access_log;
pub mod reload;
