//! What registration, ready, GoAway and close of a node connection do to everything else.
//!
//! Lives on: control. Bound: a step is O(providers of the node + models that name them).
use iop_proto::ids::{NodeIndex, Now, SessionRef};
use iop_proto::limits::REJECTED_READY_MS;
use iop_proto::reason::Reason;

use super::registry::{Closing, Owner, Readiness, Registration, SessionState};
use super::{Control, NodeChange, NodeNotice, Timer};
use crate::step::{Effect, Out};

impl Control {
    /// Rows 3–7 and 11 of the table.
    pub(super) fn register(
        &mut self,
        now: Now,
        session: SessionRef,
        reply_to: u64,
        claimed: Option<NodeIndex>,
        certified: Option<NodeIndex>,
        out: &mut Out,
    ) {
        // A shard may not know yet that the node is gone.
        let claimed = claimed.filter(|&node| self.names.has_node(node));
        let (node, refusal, close) = match self.registry.register(session, claimed, certified) {
            Registration::Stale => {
                self.counters.stale_events += 1;
                return;
            }
            Registration::Refuse { reason, close } => {
                if close {
                    // The shard closes it once the answer is flushed. Its peer may never read that.
                    self.close_later(now, session, Reason::RegistrationTimeout);
                }
                (None, Some(reason), close)
            }
            Registration::Repeat { node } => (Some(node), None, false),
            Registration::Claim { node } => {
                self.supersede(now, node, out);
                if let Some(at) = self.registry.claim(session, node) {
                    self.timers.cancel(at, Timer::Close(session));
                }
                self.begin_tenure(node);
                (Some(node), None, false)
            }
        };
        match refusal {
            None => self.counters.registrations += 1,
            Some(reason) => self.counters.node_refused(reason),
        }
        out.push(Effect::RegisterReply {
            session,
            reply_to,
            node,
            refusal,
            close,
        });
    }

    /// Puts the present owner out, if there is one. A ready one is fenced while it is still
    /// current, and its connection closed; a pending one keeps its socket, so that its ready can be
    /// answered. `[A-04]` `[D-60]`
    fn supersede(&mut self, now: Now, node: NodeIndex, out: &mut Out) {
        let Some(owner) = self.registry.owner(node) else {
            return;
        };
        if owner.is_ready {
            self.fence(now, node, owner, Reason::Superseded);
            let cause = Reason::Superseded;
            out.push(Effect::Close {
                session: owner.session,
                cause,
            });
        } else {
            self.disown(node);
            self.counters.superseded_pending += 1;
            self.close_later(now, owner.session, Reason::Superseded);
        }
    }

    /// Closes a connection that owns nothing once its peer has had time to read why.
    fn close_later(&mut self, now: Now, session: SessionRef, cause: Reason) {
        self.close_at(now.after_ms(REJECTED_READY_MS), session, cause);
    }

    /// Closes a connection at that instant unless it owns a node by then.
    pub(super) fn close_at(&mut self, at: Now, session: SessionRef, cause: Reason) {
        if self.registry.close_at(session, at, cause) {
            self.timers.set(at, Timer::Close(session));
        }
    }

    /// Rows 8 and 9. A refusal has no effect but its answer. `[R-047]`
    pub(super) fn ready(
        &mut self,
        now: Now,
        session: SessionRef,
        reply_to: u64,
        claimed: Option<NodeIndex>,
        out: &mut Out,
    ) {
        let refusal = match self.registry.ready(session, claimed) {
            Readiness::Stale => {
                self.counters.stale_events += 1;
                return;
            }
            Readiness::Refuse { reason, orphan } => {
                self.counters.node_refused(reason);
                if orphan {
                    self.close_later(now, session, reason);
                }
                Some(reason)
            }
            Readiness::Repeat => None,
            Readiness::Activate { node, owner } => {
                self.registry.activate(node);
                // The acknowledgement is the first effect of the step: grants follow it. `[A-07]`
                out.push(Effect::ReadyReply {
                    session,
                    reply_to,
                    refusal: None,
                });
                self.activate(now, node, owner);
                return;
            }
        };
        out.push(Effect::ReadyReply {
            session,
            reply_to,
            refusal,
        });
    }

    fn activate(&mut self, now: Now, node: NodeIndex, owner: Owner) {
        self.bind(node);
        for entry in 0..self.resources.of_node(node).len() {
            let provider = self.resources.of_node(node)[entry];
            self.resources.activate(provider, owner.generation);
            if !cfg!(iop_break = "no_pump_on_ready") {
                self.offer(provider);
            }
        }
        self.renew(now, node);
        self.counters.activations += 1;
        self.counters.notices_connected += 1;
        self.publish(now, node, owner, NodeChange::Connected);
    }

    /// The generation is dead: its leases are returned, its resources offline, its models on hold
    /// until the shard has said which of its granted runs come back. Never O(leases). `[R-076]`
    pub(super) fn fence(&mut self, now: Now, node: NodeIndex, owner: Owner, cause: Reason) {
        self.disown(node);
        self.fail_commands(node);
        for entry in 0..self.resources.of_node(node).len() {
            let provider = self.resources.of_node(node)[entry];
            self.counters.returns_fence += u64::from(self.resources.fence(provider));
            self.queue.hold(provider);
            self.offer(provider);
        }
        self.counters.fences += 1;
        self.counters.notices_disconnected += 1;
        self.publish(now, node, owner, NodeChange::Disconnected { cause });
    }

    fn publish(&mut self, at: Now, node: NodeIndex, owner: Owner, change: NodeChange) {
        let generation = owner.generation;
        let notice = NodeNotice {
            at,
            node,
            generation,
            change,
        };
        if !self.notices.publish(notice) {
            self.counters.notices_dropped += 1;
        }
    }

    /// Rows 12, 13 and 17: close, heartbeat timeout, violation. Only the ready owner's fences.
    /// `[R-072]` `[R-078]`
    pub(super) fn closed(&mut self, now: Now, session: SessionRef, cause: Reason) {
        let (closing, close_at) = self.registry.close(session);
        if let Some(at) = close_at {
            self.timers.cancel(at, Timer::Close(session));
        }
        match closing {
            Closing::Stale => self.counters.stale_events += 1,
            Closing::NoOwner => {}
            Closing::Pending { node } => self.disown(node),
            Closing::Ready { node, owner } => self.fence(now, node, owner, cause),
        }
    }

    /// Row 19.
    pub(super) fn go_away(&mut self, session: SessionRef, out: &mut Out) {
        match self.registry.state_on_event(session) {
            SessionState::Ready => {
                let Some(node) = self.registry.bound(session) else {
                    return;
                };
                self.stop_granting(node);
            }
            SessionState::Pending | SessionState::Superseded => {}
            SessionState::Identified | SessionState::Unbound => {
                let cause = Reason::EnvelopeWrongState;
                out.push(Effect::Close { session, cause });
            }
            SessionState::Closed => self.counters.stale_events += 1,
        }
    }

    /// Row 21. `[D-05]`
    pub(super) fn expired(&mut self, now: Now, session: SessionRef, out: &mut Out) {
        let cause = Reason::CertificateExpired;
        let node = self.registry.state_on_event(session);
        match (node, self.registry.bound(session)) {
            (SessionState::Ready, Some(node)) => self.close_drained(now, node, cause),
            (SessionState::Pending, Some(node)) => {
                self.disown(node);
                out.push(Effect::Close { session, cause });
            }
            (SessionState::Identified | SessionState::Unbound, _) => {
                out.push(Effect::Close { session, cause });
            }
            (SessionState::Superseded, _) => {}
            (SessionState::Closed, _) => self.counters.stale_events += 1,
            (SessionState::Ready | SessionState::Pending, None) => {
                unreachable!("an owner is bound to its node")
            }
        }
    }
}
