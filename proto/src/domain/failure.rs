//! Stall evidence: what a node says about an attempt that it stalled.
//!
//! Lives on: see `domain`. Bound: one envelope each.
use core::num::NonZeroU64;

/// The three legal pairs of `provider_health` and `liveness_classification`. `[R-136]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvidence {
    /// `available`, `request_stalled`.
    Available,
    /// `unavailable`, `provider_unhealthy`.
    Unavailable,
    /// `unknown`, `health_unknown`.
    Unknown,
}

impl HealthEvidence {
    pub const ALL: [Self; 3] = [Self::Available, Self::Unavailable, Self::Unknown];

    /// Value of `provider_health`.
    #[must_use]
    pub const fn health(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Unavailable => "unavailable",
            Self::Unknown => "unknown",
        }
    }

    /// Value of `liveness_classification`.
    #[must_use]
    pub const fn classification(self) -> &'static str {
        match self {
            Self::Available => "request_stalled",
            Self::Unavailable => "provider_unhealthy",
            Self::Unknown => "health_unknown",
        }
    }
}

/// The health pair as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HealthPair {
    Known(HealthEvidence),
    /// Half a pair, a crossed pair, or a word nobody knows: the evidence counts nothing.
    Invalid {
        health: Option<String>,
        classification: Option<String>,
    },
}

/// `fence`. `[A-16]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fence {
    Confirmed,
    Unconfirmed,
    Other(String),
}

impl Fence {
    #[must_use]
    pub fn from_name(name: String) -> Self {
        match name.as_str() {
            "confirmed" => Self::Confirmed,
            "unconfirmed" => Self::Unconfirmed,
            _ => Self::Other(name),
        }
    }

    #[must_use]
    pub const fn name(&self) -> &str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Unconfirmed => "unconfirmed",
            Self::Other(name) => name.as_str(),
        }
    }
}

/// `health_observation_seq`. `[A-21]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// Omitted: valid for a handoff, never fresh. `[R-150]`
    Unbound,
    /// Canonical decimal 1 ..= `u64::MAX`.
    Seq(NonZeroU64),
    /// Present in another form: the evidence is rejected.
    Invalid(String),
}

impl Observation {
    /// Judges the text of the map value; `None` when the key is absent.
    #[must_use]
    pub fn from_text(text: Option<String>) -> Self {
        let Some(text) = text else {
            return Self::Unbound;
        };
        let canonical = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
        match text.parse::<NonZeroU64>() {
            Ok(seq) if canonical => Self::Seq(seq),
            _ => Self::Invalid(text),
        }
    }

    /// Text of the map value; `None` leaves the key out.
    #[must_use]
    pub fn to_text(&self) -> Option<String> {
        match self {
            Self::Unbound => None,
            Self::Seq(seq) => Some(seq.to_string()),
            Self::Invalid(text) => Some(text.clone()),
        }
    }
}

/// `failure_code`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureCode {
    ResponseStalled,
    Other(String),
}

impl FailureCode {
    #[must_use]
    pub fn from_name(name: String) -> Self {
        if name == "response_stalled" {
            Self::ResponseStalled
        } else {
            Self::Other(name)
        }
    }

    #[must_use]
    pub const fn name(&self) -> &str {
        match self {
            Self::ResponseStalled => "response_stalled",
            Self::Other(name) => name.as_str(),
        }
    }
}

/// What a node says about an attempt it stalled: present on stall terminals alone. `[A-14]` `[R-132]`
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutionFailure {
    pub code: FailureCode,
    pub health: HealthPair,
    /// Silence at expiry, ms; `None`: absent or not a number. `[A-15]`
    pub idle_ms: Option<u64>,
    pub run_id: Option<String>,
    /// The node's own name of the attempt. `[A-15]`
    pub attempt_id: Option<String>,
    pub fence: Option<Fence>,
    pub adapter: Option<String>,
    pub target: Option<String>,
    pub observation: Observation,
    /// Keys outside the allowlist that came and were dropped unread. Never sent. `[A-57]`
    pub dropped_keys: u32,
}
