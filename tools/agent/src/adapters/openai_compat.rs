//! `openai_compat`: any server that speaks the OpenAI HTTP surface. Raw tunnel. `[A-62]`
//!
//! Lives on: with its instance. Bound: nothing of its own.
use core::time::Duration;

use super::Traits;

/// Servers of unknown make: the node's own idle setting alone counts.
pub(super) const TRAITS: Traits = Traits {
    pool_idle_max: Duration::MAX,
    probe_path: "/v1/models",
};
