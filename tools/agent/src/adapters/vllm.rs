//! `vllm`: vLLM's OpenAI-compatible server. Raw tunnel. `[A-62]`
//!
//! Lives on: with its instance. Bound: nothing of its own.
use core::time::Duration;

use super::Traits;

/// Its HTTP server closes idle connections after 5 s; a request that meets the close is lost. `[P-42]`
pub(super) const TRAITS: Traits = Traits {
    pool_idle_max: Duration::from_millis(3_500),
    probe_path: "/v1/models",
};
