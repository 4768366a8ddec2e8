//! Normalized execution: request, events, cancel; and the figures a request carries.
//!
//! Lives on: see `domain`. Bound: one envelope each.
use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};

use bytes::Bytes;

use super::{ExecutionFailure, Len, Metadata};
use crate::limits::STALL_TIMEOUT_MS_MAX;

/// `response_stall_timeout_ms`, judged by its value alone. `[R-113]` `[R-115]` `[A-12]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StallTimeout {
    /// 0: the node's documented default.
    #[default]
    Default,
    /// 1 ..= `STALL_TIMEOUT_MS_MAX` milliseconds.
    Millis(NonZeroU64),
    /// Negative or too large: the node rejects the request before any provider call.
    Invalid(i64),
}

impl StallTimeout {
    #[must_use]
    pub fn from_wire(ms: i64) -> Self {
        if ms > STALL_TIMEOUT_MS_MAX {
            return Self::Invalid(ms);
        }
        match u64::try_from(ms).map(NonZeroU64::new) {
            Ok(None) => Self::Default,
            Ok(Some(ms)) => Self::Millis(ms),
            Err(_) => Self::Invalid(ms),
        }
    }

    #[must_use]
    pub fn to_wire(self) -> i64 {
        match self {
            Self::Default => 0,
            Self::Millis(ms) => i64::try_from(ms.get()).unwrap_or(i64::MAX),
            Self::Invalid(ms) => ms,
        }
    }
}

/// `timeout_sec`: the request's hard deadline, measured from its receipt at the node. `[A-53]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HardTimeout {
    /// 0: no deadline.
    #[default]
    None,
    /// 1 ..= `i32::MAX` seconds.
    Seconds(NonZeroU32),
    /// Negative: rejected at the node.
    Invalid(i32),
}

impl HardTimeout {
    #[must_use]
    pub fn from_wire(seconds: i32) -> Self {
        match u32::try_from(seconds).map(NonZeroU32::new) {
            Ok(None) => Self::None,
            Ok(Some(seconds)) => Self::Seconds(seconds),
            Err(_) => Self::Invalid(seconds),
        }
    }

    #[must_use]
    pub fn to_wire(self) -> i32 {
        match self {
            Self::None => 0,
            Self::Seconds(seconds) => i32::try_from(seconds.get()).unwrap_or(i32::MAX),
            Self::Invalid(seconds) => seconds,
        }
    }
}

/// Token counts a provider reported: an observation, nothing hangs on it. `[A-50]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
}

/// Starts one normalized execution. `[R-082]`
#[derive(Clone, Default, PartialEq)]
pub struct RunRequest {
    /// 32 lower-case hex digits from our Edge; any string from another. `[A-58]`
    pub run_id: String,
    /// Adapter instance and exact target: the execution identity. `[R-084]`
    pub adapter: String,
    pub target: String,
    /// UTF-8 JSON that the adapter alone interprets. `[R-086]` `[A-51]`
    pub input: Bytes,
    /// The caller's own; no control meaning. `[R-299]`
    pub metadata: Metadata,
    pub session_id: String,
    pub timeout: HardTimeout,
    pub stall_timeout: StallTimeout,
}

impl fmt::Debug for RunRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunRequest")
            .field("run_id", &self.run_id)
            .field("adapter", &self.adapter)
            .field("target", &self.target)
            .field("input", &Len(self.input.len()))
            .field("metadata", &Len(self.metadata.len()))
            .field("timeout", &self.timeout)
            .field("stall_timeout", &self.stall_timeout)
            .finish_non_exhaustive()
    }
}

/// `RunEvent.type`: an open set of lower-case words. `[R-087]` `[A-52]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunEventKind {
    Start,
    Delta,
    Complete,
    Error,
    Cancelled,
    /// Not forwarded, not terminal, counted.
    Other(String),
}

impl RunEventKind {
    #[must_use]
    pub fn from_name(name: String) -> Self {
        match name.as_str() {
            "start" => Self::Start,
            "delta" => Self::Delta,
            "complete" => Self::Complete,
            "error" => Self::Error,
            "cancelled" => Self::Cancelled,
            _ => Self::Other(name),
        }
    }

    #[must_use]
    pub const fn name(&self) -> &str {
        match self {
            Self::Start => "start",
            Self::Delta => "delta",
            Self::Complete => "complete",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
            Self::Other(name) => name.as_str(),
        }
    }

    /// Ends the run.
    #[must_use]
    pub const fn is_terminal(&self) -> bool {
        match self {
            Self::Complete | Self::Error | Self::Cancelled => true,
            Self::Start | Self::Delta | Self::Other(_) => false,
        }
    }
}

/// Keys of `RunEvent.metadata` that an OpenAI surface reads; it reads no other.
pub mod run_key {
    /// JSON array of tool calls in OpenAI's shape; on a `Complete` alone. `[R-302]`
    pub const TOOL_CALLS: &str = "openai_tool_calls";
    /// `"true"` when the answer's text may hold tool calls, each as one block
    /// `<tool_call>{"name":…,"arguments":{…}}</tool_call>`; on `Start` and `Complete`, so that a
    /// surface knows it before the first delta. `[R-305]` `[R-308]`
    pub const TEXT_TOOL_FALLBACK: &str = "openai_text_tool_fallback";
    /// Why the answer ended, in OpenAI's words: `stop`, `length`, `tool_calls`, `content_filter`; on
    /// a `Complete`. Absent: `stop`, or `tool_calls` beside such calls.
    pub const FINISH_REASON: &str = "openai_finish_reason";
}

/// One step of a normalized execution. `[R-083]`
#[derive(Clone, PartialEq)]
pub struct RunEvent {
    pub run_id: String,
    pub kind: RunEventKind,
    /// Text of a `Delta`.
    pub delta: String,
    /// Legacy error text of an `Error`.
    pub error: String,
    pub usage: Option<Usage>,
    pub metadata: Metadata,
    /// On a stall terminal alone. `[R-130]` `[R-145]`
    pub failure: Option<ExecutionFailure>,
}

impl RunEvent {
    /// An event that says nothing but its kind.
    #[must_use]
    pub const fn new(run_id: String, kind: RunEventKind) -> Self {
        Self {
            run_id,
            kind,
            delta: String::new(),
            error: String::new(),
            usage: None,
            metadata: Metadata::new(),
            failure: None,
        }
    }
}

impl fmt::Debug for RunEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunEvent")
            .field("run_id", &self.run_id)
            .field("kind", &self.kind)
            .field("delta", &Len(self.delta.len()))
            .field("error", &self.error)
            .field("usage", &self.usage)
            .field("metadata", &Len(self.metadata.len()))
            .field("failure", &self.failure)
            .finish()
    }
}

/// Ends a run or a tunnel. `[R-251]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CancelRequest {
    pub run_id: String,
}
