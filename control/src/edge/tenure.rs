//! What the present owner of each node id holds of its configuration, and until when it stays.
//!
//! A tenure begins with an accepted claim and ends with the ownership; nothing of it is inherited.
//! Refreshes are serial: one under way, what changes meanwhile is sent when it is answered or its time
//! is up. A late answer still counts for the configuration that it names. `[A-43]` `[A-49]`
//!
//! ```text
//!            newest != held                      answered, or 120 s
//! Current ──────────────────► Pending: one sent ────────────────────► Current, or the condition
//!    ▲                             ▲                                        │ newest changed,
//!    └── newest == held ───────────┴────────────── next reload ◄───────────┘ reload, generation
//! ```
//!
//! Lives on: control. Bound: one row per node; `REFRESHES_UNANSWERED_MAX` payloads of each.
use std::collections::VecDeque;
use std::sync::Arc;

use iop_proto::domain::RefreshStatus;
use iop_proto::ids::{NodeIndex, Now, ProviderIndex, RefreshId, SessionRef};
use iop_proto::limits::REFRESHES_UNANSWERED_MAX;
use iop_proto::reason::Reason;

use super::registry::{Owner, SessionState};
use super::{Control, Timer};
use crate::names::NodePayload;
use crate::step::{Effect, Out};

/// How far a connected node's configuration is behind the newest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefreshState {
    /// It has the newest, or is not connected.
    #[default]
    Current,
    /// A refresh is under way.
    Pending,
    /// The last refresh was not answered in time.
    Unanswered,
    /// The node cannot apply the newest without a restart.
    RestartRequired,
    /// The node refused the newest.
    Failed,
}

impl RefreshState {
    /// Word in `/status`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Pending => "pending",
            Self::Unanswered => "unanswered",
            Self::RestartRequired => "restart_required",
            Self::Failed => "failed",
        }
    }
}

/// The present owner is put out then, or when its last lease is returned. `[D-05]`
#[derive(Clone, Copy, Debug)]
struct Closing {
    at: Now,
    cause: Reason,
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Tenure {
    /// What the node has: of its registration, or of the last refresh it applied.
    held: Option<Arc<NodePayload>>,
    /// Refreshes without answer, oldest first; the last is under way while `waiting`.
    sent: VecDeque<(RefreshId, Arc<NodePayload>)>,
    waiting: bool,
    /// When the timer of the next push is set, or of the answer to the one under way.
    due: Option<Now>,
    state: RefreshState,
    /// Takes nothing new until its generation ends.
    draining: bool,
    closing: Option<Closing>,
}

impl Tenure {
    pub(crate) const fn state(&self) -> RefreshState {
        self.state
    }

    pub(crate) const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Deadlines that are set, of refreshes and of the drain.
    pub(crate) fn deadlines(&self) -> (Option<Now>, Option<Now>) {
        (self.due, self.closing.map(|closing| closing.at))
    }
}

impl Control {
    /// The node has an owner from here on, which is sent the present configuration. `[R-024]`
    pub(super) fn begin_tenure(&mut self, node: NodeIndex) {
        let held = Arc::clone(&self.names.node(node).config_payload);
        self.tenures[node.row()].held = Some(held);
    }

    /// The node has no owner from here on, and nothing of its tenure is left.
    pub(super) fn disown(&mut self, node: NodeIndex) {
        self.registry.disown(node);
        self.set_state(node, RefreshState::Current);
        let tenure = core::mem::take(&mut self.tenures[node.row()]);
        let (due, closing) = tenure.deadlines();
        if let Some(at) = due {
            self.timers.cancel(at, Timer::Refresh(node));
        }
        if let Some(at) = closing {
            self.timers.cancel(at, Timer::Drain(node));
        }
    }

    fn set_state(&mut self, node: NodeIndex, state: RefreshState) {
        let before = core::mem::replace(&mut self.tenures[node.row()].state, state);
        let counts = |state| u64::from(state != RefreshState::Current);
        self.counters.nodes_outdated += counts(state);
        self.counters.nodes_outdated -= counts(before);
    }

    // ── refreshes ────────────────────────────────────────────────────────────────────────────────

    /// Which providers of the node its requests may go to, by the configuration it holds.
    pub(super) fn bind(&mut self, node: NodeIndex) {
        let held = self.tenures[node.row()].held.as_ref();
        for entry in 0..self.resources.of_node(node).len() {
            let provider = self.resources.of_node(node)[entry];
            let applied = held.is_some_and(|held| held.serves(self.names.provider(provider)));
            self.resources.set_applied(provider, applied);
        }
    }

    /// Sends the node the newest configuration soon, unless it has it or an answer is awaited: then
    /// the answer decides. Ready owners only. `[R-265]` `[A-43]`
    pub(super) fn renew(&mut self, now: Now, node: NodeIndex) {
        let is_newest = self.has_newest(node);
        let tenure = &mut self.tenures[node.row()];
        if tenure.waiting {
            return;
        }
        if is_newest {
            if let Some(at) = tenure.due.take() {
                self.timers.cancel(at, Timer::Refresh(node));
            }
            self.set_state(node, RefreshState::Current);
        } else if tenure.due.is_none() {
            tenure.due = Some(now);
            self.timers.set(now, Timer::Refresh(node));
            self.set_state(node, RefreshState::Pending);
        }
    }

    /// The node is known to have the newest: a refresh without answer may have changed it.
    fn has_newest(&self, node: NodeIndex) -> bool {
        let tenure = &self.tenures[node.row()];
        let newest = &self.names.node(node).config_payload;
        tenure.sent.is_empty() && tenure.held.as_ref() == Some(newest)
    }

    /// A push is due, or the answer to one.
    pub(super) fn refresh_due(&mut self, now: Now, node: NodeIndex, out: &mut Out) {
        let newest = &self.names.node(node).config_payload;
        let tenure = &mut self.tenures[node.row()];
        tenure.due = None;
        if core::mem::take(&mut tenure.waiting) {
            let is_newest = tenure.sent.back().is_some_and(|(_, sent)| sent == newest);
            self.counters.refreshes_unanswered += 1;
            self.set_state(node, RefreshState::Unanswered);
            if is_newest {
                return;
            }
        }
        if !self.has_newest(node) {
            self.push_refresh(now, node, out);
        }
    }

    fn push_refresh(&mut self, now: Now, node: NodeIndex, out: &mut Out) {
        let Some(Owner { session, .. }) = self.registry.owner(node).filter(|o| o.is_ready) else {
            return;
        };
        let refresh = self.next_refresh;
        let next = refresh.next();
        self.next_refresh = next.expect("2^64 refreshes take longer than any process lives");
        let payload = Arc::clone(&self.names.node(node).config_payload);
        let due = now.after_ms(self.names.waits.refresh_ms);
        let tenure = &mut self.tenures[node.row()];
        if tenure.sent.len() == REFRESHES_UNANSWERED_MAX as usize {
            tenure.sent.pop_front();
        }
        tenure.sent.push_back((refresh, payload));
        tenure.waiting = true;
        tenure.due = Some(due);
        self.timers.set(due, Timer::Refresh(node));
        self.set_state(node, RefreshState::Pending);
        self.counters.refreshes_sent += 1;
        out.push(Effect::Refresh {
            session,
            refresh,
            node,
        });
    }

    /// NodeConfigRefreshResponse: counts for the configuration that its refresh carried.
    pub(super) fn refreshed(
        &mut self,
        now: Now,
        session: SessionRef,
        refresh: RefreshId,
        status: RefreshStatus,
    ) {
        let ready = self.registry.state_on_event(session) == SessionState::Ready;
        let node = self.registry.bound(session).filter(|_| ready);
        let Some((node, payload)) = node.and_then(|node| {
            let sent = &mut self.tenures[node.row()].sent;
            let at = sent.iter().position(|&(known, _)| known == refresh)?;
            // A node applies in order: what it was sent before is settled too.
            let (_, payload) = sent.drain(..=at).next_back()?;
            Some((node, payload))
        }) else {
            self.counters.stale_events += 1;
            return;
        };
        let tenure = &mut self.tenures[node.row()];
        if tenure.sent.is_empty()
            && core::mem::take(&mut tenure.waiting)
            && let Some(at) = tenure.due.take()
        {
            self.timers.cancel(at, Timer::Refresh(node));
        }
        let is_newest = payload == self.names.node(node).config_payload;
        let refused = match status {
            RefreshStatus::Applied => {
                self.counters.refreshes_applied += 1;
                self.tenures[node.row()].held = Some(payload);
                self.bind(node);
                self.offer_node(node);
                return self.renew(now, node);
            }
            RefreshStatus::RestartRequired => {
                self.counters.refreshes_restart_required += 1;
                RefreshState::RestartRequired
            }
            RefreshStatus::Failed | RefreshStatus::Unknown(_) => {
                self.counters.refreshes_failed += 1;
                RefreshState::Failed
            }
        };
        if self.tenures[node.row()].waiting {
            return; // a late answer; the one under way decides
        }
        if is_newest && !self.has_newest(node) {
            self.set_state(node, refused);
        } else {
            self.renew(now, node);
        }
    }

    // ── draining ─────────────────────────────────────────────────────────────────────────────────

    /// Nothing new is given to the node until its generation ends. `[states §2]`
    pub(super) fn stop_granting(&mut self, node: NodeIndex) {
        self.tenures[node.row()].draining = true;
        for entry in 0..self.resources.of_node(node).len() {
            let provider = self.resources.of_node(node)[entry];
            self.resources.drain(provider);
        }
        self.offer_node(node);
    }

    /// As `stop_granting`; the owner is put out when its last lease is returned, at the latest after
    /// the drain's time. The first cause and time stand. `[D-05]`
    pub(super) fn close_drained(&mut self, now: Now, node: NodeIndex, cause: Reason) {
        self.stop_granting(node);
        let is_idle = self.resources.held_on(node) == 0;
        let wait_ms = if is_idle {
            0
        } else {
            self.names.waits.drain_ms
        };
        let tenure = &mut self.tenures[node.row()];
        if tenure.closing.is_none() {
            let at = now.after_ms(wait_ms);
            tenure.closing = Some(Closing { at, cause });
            self.timers.set(at, Timer::Drain(node));
            self.counters.node_drains += 1;
        }
    }

    /// The operator takes a node out: how many leases it finishes first.
    ///
    /// # Errors
    /// `NotOwner` when the node is not dispatch-ready.
    pub fn drain_node(&mut self, now: Now, node: NodeIndex) -> Result<u32, Reason> {
        self.advance(now);
        let is_ready = self
            .registry
            .owner(node)
            .is_some_and(|owner| owner.is_ready);
        if !is_ready {
            return Err(Reason::NotOwner);
        }
        self.close_drained(now, node, Reason::NodeDrained);
        self.end();
        Ok(self.resources.held_on(node))
    }

    /// A lease on `provider` was returned: the last of a node that is being put out ends it now.
    pub(super) fn note_return(&mut self, provider: ProviderIndex) {
        let node = self.resources.get(provider).node;
        let Some(closing) = self.tenures[node.row()].closing else {
            return;
        };
        let now = self.last;
        if closing.at > now && self.resources.held_on(node) == 0 {
            self.timers.cancel(closing.at, Timer::Drain(node));
            self.timers.set(now, Timer::Drain(node));
            let cause = closing.cause;
            self.tenures[node.row()].closing = Some(Closing { at: now, cause });
        }
    }

    /// The drain of a node is over. `[states §1 row 22]`
    pub(super) fn drain_due(&mut self, now: Now, node: NodeIndex, out: &mut Out) {
        let closing = self.tenures[node.row()].closing.take();
        let owner = self.registry.owner(node).filter(|owner| owner.is_ready);
        if let (Some(Closing { cause, .. }), Some(owner)) = (closing, owner) {
            self.fence(now, node, owner, cause);
            out.push(Effect::Close {
                session: owner.session,
                cause,
            });
        }
    }
}
