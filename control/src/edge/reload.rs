//! Another configuration in the place of the present one, in one step. `[D-39]` `[states §2]`
//!
//! The step puts out the nodes that are gone, takes the figures and candidates, and sets everything
//! that speaks to a shard as due now: closes, refusals and refreshes follow in bounded steps.
//!
//! Lives on: control. Bound: O(nodes + providers + models and their candidates + waiters).
use std::sync::Arc;

use iop_proto::ids::{NodeIndex, Now};
use iop_proto::reason::Reason;

use super::tenure::Tenure;
use super::{Control, Timer};
use crate::names::Names;

impl Control {
    /// Takes `names`, which has every row of the table before it. Emits nothing: the caller tells the
    /// shards of the new table before it takes the next step.
    ///
    /// # Panics
    /// When `names` lacks a row of the table before it, or `now` runs backwards.
    pub fn reload(&mut self, now: Now, names: Arc<Names>) {
        self.advance(now);
        let rows = |names: &Names| [names.nodes.len(), names.providers.len(), names.models.len()];
        let (before, after) = (rows(&self.names), rows(&names));
        let kept = before
            .iter()
            .zip(after)
            .all(|(&before, after)| before <= after);
        assert!(kept, "a table lost rows: {before:?} became {after:?}");
        let before = core::mem::replace(&mut self.names, names);
        let names = Arc::clone(&self.names);
        self.registry.grow(names.nodes.len());
        self.tenures.resize_with(names.nodes.len(), Tenure::default);
        self.commands.grow(names.nodes.len());
        self.prober.grow(names.providers.len(), names.nodes.len());
        for row in 0..before.nodes.len() {
            let node = NodeIndex::new(row).expect("nodes are at most NODES_MAX");
            if !names.has_node(node) {
                self.put_out(now, node, Reason::NodeRemoved);
            } else if before.nodes[row].certificate_name != names.nodes[row].certificate_name {
                self.put_out(now, node, Reason::NodeNotCertified);
            }
        }
        self.resources.configure(&names);
        self.queue.configure(&names);
        for row in 0..names.nodes.len() {
            let node = NodeIndex::new(row).expect("nodes are at most NODES_MAX");
            self.reconfigure(now, node);
        }
        for (place, before, ends) in self.queue.strand(now) {
            self.timers.cancel(before, Timer::Wait(place));
            self.timers.set(ends, Timer::Wait(place));
        }
        self.counters.reloads += 1;
        self.end();
    }

    /// The node's owner no longer is one: fenced if it was ready; its connection is closed next.
    fn put_out(&mut self, now: Now, node: NodeIndex, cause: Reason) {
        let Some(owner) = self.registry.owner(node) else {
            return;
        };
        if owner.is_ready {
            self.fence(now, node, owner, cause);
        } else {
            self.disown(node);
        }
        self.close_at(now, owner.session, cause);
    }

    /// New providers of a ready node live under its generation; what its configuration lacks waits
    /// for the refresh.
    fn reconfigure(&mut self, now: Now, node: NodeIndex) {
        self.bind(node);
        let owner = self.registry.owner(node).filter(|owner| owner.is_ready);
        if let Some(owner) = owner {
            for entry in 0..self.resources.of_node(node).len() {
                let provider = self.resources.of_node(node)[entry];
                if self.resources.get(provider).generation().is_none() {
                    self.resources.activate(provider, owner.generation);
                }
            }
            if self.tenures[node.row()].is_draining() {
                self.stop_granting(node);
            }
            self.renew(now, node);
            for entry in 0..self.resources.of_node(node).len() {
                self.probe_as_bound(now, self.resources.of_node(node)[entry]);
            }
        }
        self.offer_node(node);
    }
}
