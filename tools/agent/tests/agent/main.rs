//! The agent over real sockets, between a scripted Edge and a scripted provider.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod commands;
mod credential;
mod handshake;
mod process;
mod refresh;
mod reload;
mod run;
mod stall;
mod stream;
mod supervision;
mod support;
mod tunnel;
mod window;
