//! Notices that a node became dispatch-ready or stopped being so, of what health evidence has come
//! to, and of runs that a node does not end.
//!
//! They may be dropped: nothing in the Edge decides by them. `[R-056]` `[R-080]`
//!
//! Lives on: control writes, its thread takes. Bound: `NODE_NOTICES_MAX` of each kind; more are
//! dropped, counted.
use std::collections::VecDeque;

use iop_proto::domain::HealthEvidence;
use iop_proto::ids::{Generation, ModelIndex, NodeIndex, Now, ProviderIndex};
use iop_proto::limits::NODE_NOTICES_MAX;
use iop_proto::reason::Reason;

use super::overlay::Outcome;
use crate::step::{Eligibility, EvidenceFault};

/// What happened to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeChange {
    /// `node.connected`
    Connected,
    /// `node.disconnected`
    Disconnected { cause: Reason },
}

/// One lifecycle notice of a node. At most one of each kind per generation. `[I1.5]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeNotice {
    pub at: Now,
    pub node: NodeIndex,
    /// For logs; never leaves the process on a wire. `[R-051]`
    pub generation: Generation,
    pub change: NodeChange,
}

/// Where a piece of evidence came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthSource {
    /// A stall terminal.
    Stall,
    /// The answer to a CAPABILITIES.
    Capabilities,
}

impl HealthSource {
    pub const ALL: [Self; 2] = [Self::Stall, Self::Capabilities];

    /// Metric label and log field.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Stall => "stall",
            Self::Capabilities => "capabilities",
        }
    }
}

/// `edge_provider_health_observation`: one piece of evidence, after what it changed. `[R-316]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthNotice {
    pub at: Now,
    pub provider: ProviderIndex,
    pub source: HealthSource,
    /// `None`: the evidence was rejected before it said anything.
    pub health: Option<HealthEvidence>,
    pub outcome: Outcome,
    /// Of rejected evidence.
    pub fault: Option<EvidenceFault>,
}

/// What became of a stalled request's second run. `[R-318]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// It was answered whole.
    Recovered,
    /// It ended in an error, was cancelled, or could not be sent.
    Failed,
    /// It stalled as well.
    StalledAgain,
    /// No other provider became free in time.
    Unserved,
    /// Its client left first.
    ClientGone,
}

impl Recovery {
    pub const ALL: [Self; 5] = [
        Self::Recovered,
        Self::Failed,
        Self::StalledAgain,
        Self::Unserved,
        Self::ClientGone,
    ];

    /// Metric label and log field.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::Failed => "failed",
            Self::StalledAgain => "stalled_again",
            Self::Unserved => "unserved",
            Self::ClientGone => "client_gone",
        }
    }
}

/// `edge_liveness_recovery_observation`: one stalled request, at the end of its story. `[R-319]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryNotice {
    pub at: Now,
    pub model: ModelIndex,
    /// Where its first run stalled.
    pub failed: ProviderIndex,
    pub eligibility: Eligibility,
    /// Of the second run, if there was to be one.
    pub result: Option<Recovery>,
}

/// A cancelled run whose terminal is overdue. `[D-08]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverdueNotice {
    pub at: Now,
    /// Who holds its lease.
    pub provider: ProviderIndex,
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Notices {
    waiting: VecDeque<NodeNotice>,
    health: VecDeque<HealthNotice>,
    recoveries: VecDeque<RecoveryNotice>,
    overdue: VecDeque<OverdueNotice>,
}

impl Notices {
    /// `false`: nobody takes them, this one is dropped.
    pub(crate) fn publish(&mut self, notice: NodeNotice) -> bool {
        let has_room = self.waiting.len() < NODE_NOTICES_MAX as usize;
        if has_room {
            self.waiting.push_back(notice);
        }
        has_room
    }

    /// As `publish`.
    pub(crate) fn publish_health(&mut self, notice: HealthNotice) -> bool {
        let has_room = self.health.len() < NODE_NOTICES_MAX as usize;
        if has_room {
            self.health.push_back(notice);
        }
        has_room
    }

    /// As `publish`.
    pub(crate) fn publish_recovery(&mut self, notice: RecoveryNotice) -> bool {
        let has_room = self.recoveries.len() < NODE_NOTICES_MAX as usize;
        if has_room {
            self.recoveries.push_back(notice);
        }
        has_room
    }

    /// As `publish`.
    pub(crate) fn publish_overdue(&mut self, notice: OverdueNotice) -> bool {
        let has_room = self.overdue.len() < NODE_NOTICES_MAX as usize;
        if has_room {
            self.overdue.push_back(notice);
        }
        has_room
    }

    pub(crate) fn take_overdue(&mut self) -> impl Iterator<Item = OverdueNotice> + '_ {
        self.overdue.drain(..)
    }

    pub(crate) fn take_recoveries(&mut self) -> impl Iterator<Item = RecoveryNotice> + '_ {
        self.recoveries.drain(..)
    }

    pub(crate) fn take_health(&mut self) -> impl Iterator<Item = HealthNotice> + '_ {
        self.health.drain(..)
    }

    pub(crate) fn take(&mut self) -> impl Iterator<Item = NodeNotice> + '_ {
        self.waiting.drain(..)
    }
}
