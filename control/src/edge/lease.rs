//! Granted runs: one lease, one run slot on the node's shard, one final report.
//!
//! The lease's own fields never change. `[I3.5]` Whether it is still held is not written here: it
//! is held while its provider is live under its generation. The row stays until the shard's final
//! report, so a slot is never given to another run while anything may still name it. `[D-32]`
//!
//! Lives on: control. Bound: `RUNS_PER_SHARD_MAX` per shard.
use iop_proto::ids::{Generation, Now, ProviderIndex, RunRef, ShardIndex};
use iop_proto::limits::RUNS_PER_SHARD_MAX;
use iop_proto::reason::Reason;

use super::overlay::BindingId;
use super::queue::Place;
use crate::slab::Slab;

/// How far a granted run is, as far as control knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not known to have begun: it may still be withdrawn, and then waits again.
    Selected,
    /// Its first byte went out: only a terminal or a fence returns its lease. `[D-08]`
    Begun,
    /// Control has ended it; if it comes back its client is told why. `[D-63]`
    Cancelled(Reason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) provider: ProviderIndex,
    pub(crate) generation: Generation,
    pub(crate) binding: BindingId,
    /// The request's place in the queue, should it come back.
    pub(crate) place: Place,
    /// End of the request's queue wait.
    pub(crate) deadline: Now,
    pub(crate) body_bytes: u32,
    pub(crate) granted: Now,
    /// Latest instant for the request to begin. `[states §3: Selected]`
    pub(crate) begin_by: Now,
    pub(crate) phase: Phase,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Leases {
    shards: Vec<Slab<Lease>>,
}

impl Leases {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards).map(|_| Slab::new(RUNS_PER_SHARD_MAX)).collect(),
        }
    }

    /// Takes a run slot on `shard`, the node's. `None`: all are taken.
    pub(crate) fn insert(&mut self, shard: ShardIndex, lease: Lease) -> Option<RunRef> {
        let (slot, generation) = self.shards[shard.row()].insert(lease)?;
        Some(RunRef {
            shard,
            slot,
            generation,
        })
    }

    pub(crate) fn get_mut(&mut self, run: RunRef) -> Option<&mut Lease> {
        self.shards[run.shard.row()].get_mut(run.slot, run.generation)
    }

    /// After the final report: the slot may be used again, under its next generation.
    pub(crate) fn remove(&mut self, run: RunRef) -> Option<Lease> {
        self.shards[run.shard.row()].remove(run.slot, run.generation)
    }

    /// Runs whose final report is outstanding.
    pub(crate) fn used(&self) -> u32 {
        self.shards.iter().map(Slab::used).sum()
    }

    /// Per shard.
    #[cfg(test)]
    pub(crate) fn shards(&self) -> &[Slab<Lease>] {
        &self.shards
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.shards.iter().flat_map(Slab::iter)
    }
}
