//! `ollama`: Ollama's own API, served by normalized runs. `[A-62]` `[D-50]`
//!
//! Lives on: with its instance. Bound: see `request` and `response`.
//!
//! Requests are always streamed, whatever the caller wants to see: pieces are what tells a working
//! server from a stalled one, and nothing larger than a line is held. Thinking is asked for as
//! `reasoning_effort` says and never forwarded: OpenAI's surface has no place for it, and in the text
//! of an answer it would be taken for the answer. It counts as activity.
mod request;
mod response;

use core::time::Duration;

use super::Traits;
use crate::normalized::members::{Members, Refused};
pub(crate) use response::line;

/// Go's HTTP server keeps idle connections: the node's own idle setting alone counts.
pub(super) const TRAITS: Traits = Traits {
    pool_idle_max: Duration::MAX,
    probe_path: "/api/show",
};

/// Path and body of the call that serves `input` with the model `target`.
///
/// # Errors
/// The first thing in it that Ollama cannot express. `[D-50]`
pub(super) fn call(input: &[u8], target: &str) -> Result<(&'static str, Vec<u8>), Refused> {
    request::build(&Members::parse(input)?, target)
}
