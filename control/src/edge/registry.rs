//! Who owns each node id, and what every node connection may still do: machine 1 of the contract.
//!
//! Judges only: what a claim, a ready or a close means. What follows for leases and queue is done
//! by `connection.rs`. A connection owns its node exactly while the node's row names it, so there
//! is one record of ownership and every judgement compares with it. `[R-038]`
//!
//! Lives on: control. Bound: `SESSIONS_PER_SHARD_MAX` rows per shard, one row per configured node.
use core::cmp::Ordering;

use iop_proto::ids::{Generation, NodeIndex, Now, SessionRef, SlotGeneration};
use iop_proto::limits::SESSIONS_PER_SHARD_MAX;
use iop_proto::reason::Reason;

/// The connection that owns a node id now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub session: SessionRef,
    pub generation: Generation,
    /// Dispatch-ready; else pending. `[I1.3]`
    pub is_ready: bool,
}

/// A connection's place in machine 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// Verified, not registered.
    Identified,
    /// Its registration was refused.
    Unbound,
    /// Owns its node, not ready yet.
    Pending,
    /// Owns its node and may be dispatched to.
    Ready,
    /// Owned its node once; no longer.
    Superseded,
    /// Closed, or never seen.
    Closed,
}

#[derive(Clone, Copy, Debug)]
enum Row {
    Closed,
    Identified,
    Unbound {
        reason: Reason,
    },
    Bound {
        node: NodeIndex,
        generation: Generation,
    },
}

#[derive(Clone, Copy, Debug)]
struct Session {
    /// Of the latest connection seen in this slot.
    generation: Option<SlotGeneration>,
    row: Row,
    /// Closed then, and why, unless it owns a node by then. `[A-05]` `[D-60]`
    close_at: Option<(Now, Reason)>,
}

impl Session {
    const VACANT: Self = Self {
        generation: None,
        row: Row::Closed,
        close_at: None,
    };
}

/// What a RegisterRequest amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registration {
    Stale,
    Refuse {
        reason: Reason,
        close: bool,
    },
    /// The owner asked again: same answer, no change. `[A-03]`
    Repeat {
        node: NodeIndex,
    },
    /// `claim` it, once the present owner is out of the way.
    Claim {
        node: NodeIndex,
    },
}

/// What a NodeReadyRequest amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Stale,
    /// `orphan`: the connection owns nothing, so it is closed in a while. `[A-05]`
    Refuse {
        reason: Reason,
        orphan: bool,
    },
    Repeat,
    Activate {
        node: NodeIndex,
        owner: Owner,
    },
}

/// What a close amounts to. Only an owner's changes anything. `[R-072]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    Stale,
    NoOwner,
    Pending { node: NodeIndex },
    Ready { node: NodeIndex, owner: Owner },
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Registry {
    /// Per shard, up to the highest slot that was ever used.
    sessions: Vec<Vec<Session>>,
    owners: Vec<Option<Owner>>,
    /// The next claim's; `None` once all are spent.
    next: Option<Generation>,
}

impl Registry {
    pub(crate) fn new(shards: usize, nodes: usize) -> Self {
        let table = || Vec::with_capacity(SESSIONS_PER_SHARD_MAX as usize);
        Self {
            sessions: (0..shards).map(|_| table()).collect(),
            owners: vec![None; nodes],
            next: Some(Generation::FIRST),
        }
    }

    /// Rows for nodes that a reload has added.
    pub(crate) fn grow(&mut self, nodes: usize) {
        self.owners.resize(nodes, None);
    }

    pub(crate) fn owner(&self, node: NodeIndex) -> Option<Owner> {
        self.owners[node.row()]
    }

    pub(crate) fn owners(&self) -> impl Iterator<Item = Option<Owner>> + '_ {
        self.owners.iter().copied()
    }

    pub(crate) fn state(&self, session: SessionRef) -> SessionState {
        let Some(seat) = self
            .sessions
            .get(session.shard.row())
            .and_then(|shard| shard.get(session.slot as usize))
            .filter(|seat| seat.generation == Some(session.generation))
        else {
            return SessionState::Closed;
        };
        match seat.row {
            Row::Closed => SessionState::Closed,
            Row::Identified => SessionState::Identified,
            Row::Unbound { .. } => SessionState::Unbound,
            Row::Bound { node, .. } => match self.owned(session, node) {
                Some(Owner { is_ready: true, .. }) => SessionState::Ready,
                Some(Owner {
                    is_ready: false, ..
                }) => SessionState::Pending,
                None => SessionState::Superseded,
            },
        }
    }

    /// As `state`, for an event that may be the first of its connection.
    pub(crate) fn state_on_event(&mut self, session: SessionRef) -> SessionState {
        match self.open(session) {
            None => SessionState::Closed,
            Some(_) => self.state(session),
        }
    }

    /// The node that the open connection `session` has claimed, whether it still owns it or not.
    pub(crate) fn bound(&self, session: SessionRef) -> Option<NodeIndex> {
        let seat = self.sessions[session.shard.row()][session.slot as usize];
        match seat.row {
            Row::Bound { node, .. } if seat.generation == Some(session.generation) => Some(node),
            Row::Closed | Row::Identified | Row::Unbound { .. } | Row::Bound { .. } => None,
        }
    }

    /// The one comparison of ownership: `session` is who owns `node` now. `[R-038]`
    fn owned(&self, session: SessionRef, node: NodeIndex) -> Option<Owner> {
        self.owners[node.row()].filter(|owner| owner.session == session)
    }

    /// The slot's row if `session` is its tenant, known or new; `None` if it has closed before.
    ///
    /// # Panics
    /// When a slot is used again before its tenant was reported closed, or lies outside its table: a
    /// shard's bug.
    fn open(&mut self, session: SessionRef) -> Option<&mut Session> {
        assert!(
            session.slot < SESSIONS_PER_SHARD_MAX,
            "a session slot is inside its table"
        );
        let shard = &mut self.sessions[session.shard.row()];
        let slot = session.slot as usize;
        if shard.len() <= slot {
            shard.resize(slot + 1, Session::VACANT);
        }
        let seat = &mut shard[slot];
        match seat.generation.cmp(&Some(session.generation)) {
            Ordering::Greater => None,
            Ordering::Equal => match seat.row {
                Row::Closed => None,
                Row::Identified | Row::Unbound { .. } | Row::Bound { .. } => Some(seat),
            },
            Ordering::Less => {
                assert!(
                    matches!(seat.row, Row::Closed),
                    "session slot reused before its close was reported"
                );
                *seat = Session {
                    generation: Some(session.generation),
                    row: Row::Identified,
                    close_at: None,
                };
                Some(seat)
            }
        }
    }

    /// Rows 3–7 of the table. A refusal binds nothing and spends no generation. `[R-005]` `[R-050]`
    pub(crate) fn register(
        &mut self,
        session: SessionRef,
        claimed: Option<NodeIndex>,
        certified: Option<NodeIndex>,
    ) -> Registration {
        let Some(seat) = self.open(session) else {
            return Registration::Stale;
        };
        if matches!(seat.row, Row::Identified) {
            let reason = match claimed {
                None => Reason::NodeUnknown,
                Some(_) if claimed != certified => Reason::NodeNotCertified,
                Some(node) => return Registration::Claim { node },
            };
            seat.row = Row::Unbound { reason };
        }
        let row = seat.row;
        match row {
            Row::Closed | Row::Identified => Registration::Stale,
            Row::Unbound { reason } => Registration::Refuse {
                reason,
                close: true,
            },
            Row::Bound { node, .. } if self.owned(session, node).is_none() => {
                Registration::Refuse {
                    reason: Reason::Superseded,
                    close: false,
                }
            }
            Row::Bound { node, .. } if claimed == Some(node) => Registration::Repeat { node },
            Row::Bound { .. } => Registration::Refuse {
                reason: Reason::SecondNodeId,
                close: false,
            },
        }
    }

    /// Binds `session` to `node` as its pending owner, under a new generation. The former owner
    /// must have been put out before. Hands back the instant a close was set for: it is void.
    /// `[R-024]` `[A-06]`
    ///
    /// # Panics
    /// When 2^64 claims were made, or the node still has an owner.
    pub(crate) fn claim(&mut self, session: SessionRef, node: NodeIndex) -> Option<Now> {
        assert!(
            self.owners[node.row()].is_none(),
            "a node id has one owner at a time"
        );
        let generation = self
            .next
            .expect("2^64 claims take longer than any process lives");
        self.next = generation.next();
        let seat = &mut self.sessions[session.shard.row()][session.slot as usize];
        seat.row = Row::Bound { node, generation };
        self.owners[node.row()] = Some(Owner {
            session,
            generation,
            is_ready: false,
        });
        seat.close_at.take().map(|(at, _)| at)
    }

    /// Rows 8 and 9. Changes nothing; `activate` makes the transition.
    pub(crate) fn ready(&mut self, session: SessionRef, claimed: Option<NodeIndex>) -> Readiness {
        let Some(seat) = self.open(session) else {
            return Readiness::Stale;
        };
        match seat.row {
            Row::Closed => Readiness::Stale,
            Row::Identified | Row::Unbound { .. } => Readiness::Refuse {
                reason: Reason::NotRegistered,
                orphan: true,
            },
            Row::Bound { node, .. } => match self.owned(session, node) {
                None => Readiness::Refuse {
                    reason: Reason::Superseded,
                    orphan: true,
                },
                Some(_) if claimed != Some(node) => Readiness::Refuse {
                    reason: Reason::NodeIdMismatch,
                    orphan: false,
                },
                Some(owner) if owner.is_ready => Readiness::Repeat,
                Some(owner) => Readiness::Activate { node, owner },
            },
        }
    }

    /// The pending owner becomes dispatch-ready. `[R-030]`
    pub(crate) fn activate(&mut self, node: NodeIndex) {
        if let Some(owner) = &mut self.owners[node.row()] {
            owner.is_ready = true;
        }
    }

    /// The node has no owner from here on.
    pub(crate) fn disown(&mut self, node: NodeIndex) {
        self.owners[node.row()] = None;
    }

    /// When a connection that owns nothing is to be closed, and why; kept if one was set before.
    pub(crate) fn close_at(&mut self, session: SessionRef, at: Now, cause: Reason) -> bool {
        let Some(seat) = self.open(session) else {
            return false;
        };
        if seat.close_at.is_some() {
            return false;
        }
        seat.close_at = Some((at, cause));
        true
    }

    /// The close that was set is due: why, if there is still something to close.
    pub(crate) fn close_due(&mut self, session: SessionRef) -> Option<Reason> {
        let (_, cause) = self.open(session)?.close_at.take()?;
        Some(cause)
    }

    /// Rows 12, 13 and 17. `owner`, if any, still owns the node: `disown` it with what it owned.
    /// Hands back the instant a close was set for.
    pub(crate) fn close(&mut self, session: SessionRef) -> (Closing, Option<Now>) {
        let Some(seat) = self.open(session) else {
            return (Closing::Stale, None);
        };
        let row = core::mem::replace(&mut seat.row, Row::Closed);
        let close_at = seat.close_at.take().map(|(at, _)| at);
        let closing = match row {
            Row::Closed | Row::Identified | Row::Unbound { .. } => Closing::NoOwner,
            Row::Bound { node, .. } => {
                let owner = if cfg!(iop_break = "fence_ignores_generation") {
                    self.owner(node)
                } else {
                    self.owned(session, node)
                };
                match owner {
                    None => Closing::NoOwner,
                    Some(owner) if owner.is_ready => Closing::Ready { node, owner },
                    Some(_) => Closing::Pending { node },
                }
            }
        };
        (closing, close_at)
    }

    /// Every open connection: its name, state, node and generation, and when it is to be closed.
    pub(crate) fn open_sessions(&self) -> impl Iterator<Item = OpenSession> + '_ {
        self.sessions
            .iter()
            .enumerate()
            .flat_map(move |(shard, sessions)| {
                sessions.iter().enumerate().filter_map(move |(slot, seat)| {
                    let session = SessionRef {
                        shard: iop_proto::ids::ShardIndex::new(shard)?,
                        slot: u32::try_from(slot).ok()?,
                        generation: seat.generation?,
                    };
                    let bound = match seat.row {
                        Row::Closed => return None,
                        Row::Identified | Row::Unbound { .. } => None,
                        Row::Bound { node, generation } => Some((node, generation)),
                    };
                    Some(OpenSession {
                        session,
                        bound,
                        close_at: seat.close_at.map(|(at, _)| at),
                    })
                })
            })
    }

    /// All generations handed out so far are older.
    pub(crate) fn next_generation(&self) -> Option<Generation> {
        self.next
    }
}

/// One row of `Registry::open_sessions`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSession {
    pub(crate) session: SessionRef,
    pub(crate) bound: Option<(NodeIndex, Generation)>,
    pub(crate) close_at: Option<Now>,
}
