//! Notices that a node became dispatch-ready or stopped being so.
//!
//! They may be dropped: nothing in the Edge decides by them. `[R-056]` `[R-080]`
//!
//! Lives on: control writes, its thread takes. Bound: `NODE_NOTICES_MAX`; more are dropped,
//! counted.
use std::collections::VecDeque;

use iop_proto::ids::{Generation, NodeIndex, Now};
use iop_proto::limits::NODE_NOTICES_MAX;
use iop_proto::reason::Reason;

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

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Notices {
    waiting: VecDeque<NodeNotice>,
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

    pub(crate) fn take(&mut self) -> impl Iterator<Item = NodeNotice> + '_ {
        self.waiting.drain(..)
    }
}
