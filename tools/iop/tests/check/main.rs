//! `iop pki`, `iop key`, `iop check` and exit codes, as an operator meets them: through the program.
//!
//! Lives on: a test process per binary. Bound: short commands in a directory of their own each.
#![expect(clippy::unwrap_used, reason = "a test ends where it cannot go on")]
mod config;
mod credential;
mod host;
mod pki;
mod scratch;
