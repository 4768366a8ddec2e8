//! What `openai_compat` and `vllm` share when they serve a normalized run: the surface's own
//! request and answer. Pool requests reach them as raw tunnels; runs are direct calls alone. `[A-62]`
//!
//! Lives on: with their instances. Bound: see the parts.
mod fallback;
mod request;
mod response;

pub(super) use request::call;

pub(crate) use fallback::{Fallback, refuses_tools};
pub(crate) use response::{Events, object};
