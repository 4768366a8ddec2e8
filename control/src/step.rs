//! The Edge's vocabulary between control and shards: what may come in, what may go out.
//!
//! Lives on: both ends of a link. Bound: `Copy`, at most 64 bytes, indices and generations, no
//! strings. No order holds between a shard's link to control and anything else.
use iop_proto::catalog::Operation;
use iop_proto::ids::{
    ClientRef, ModelIndex, NodeIndex, ProviderIndex, RunRef, SessionRef, ShardIndex,
};
use iop_proto::limits::EFFECTS_PER_STEP_MAX;
use iop_proto::reason::Reason;

/// How a current terminal ended its run, as the node's shard saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// END or RunEvent complete, in order.
    Complete,
    /// ERROR, RunEvent error or cancelled.
    Error,
    /// A terminal of any kind that broke the stream's form; its evidence counts nothing. `[A-29]`
    Violation,
}

/// From a shard to control.
///
/// A granted run gets exactly one *final* report: `NotSent`, `Terminal` or `Lost`. Until then control
/// keeps its row and its lease, and does not reuse its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// RegisterRequest. `claimed`: the configured node it names, `certified`: the one its certificate
    /// names; `None` means nobody configured. On a connection without certificate (insecure mode)
    /// the shard sets `certified = claimed`.
    Register {
        session: SessionRef,
        reply_to: u64,
        claimed: Option<NodeIndex>,
        certified: Option<NodeIndex>,
    },
    /// NodeReadyRequest.
    Ready {
        session: SessionRef,
        reply_to: u64,
        claimed: Option<NodeIndex>,
    },
    /// The session's socket is closed or being closed; nothing follows from it. Sent once per session
    /// that sent anything. Its runs report `NotSent` or `Lost` on their own.
    Closed { session: SessionRef, cause: Reason },
    /// The node announced that it closes. `[D-07]`
    GoAway { session: SessionRef },
    /// A whole request has arrived. Answered by exactly one `Grant` or `Refuse`, unless `ClientGone`
    /// was sent meanwhile.
    Submit {
        client: ClientRef,
        model: ModelIndex,
        operation: Operation,
        long: bool,
        body_bytes: u32,
    },
    /// The client left before its `Grant` or `Refuse` reached its shard. A grant that crosses this is
    /// reported `NotSent` without client.
    ClientGone { client: ClientRef },
    /// The request's first byte was handed to the kernel. `[states §3: begun]`
    Begun { run: RunRef },
    /// Final. Nothing of the request was sent. `client`: where its client waits now, to be queued
    /// again at its old place (`again`) or settled; `None`: it left, or the shard has answered it.
    NotSent {
        run: RunRef,
        client: Option<ClientRef>,
    },
    /// Final. The current terminal of a begun run arrived.
    Terminal { run: RunRef, ending: Ending },
    /// Final. The session closed after the run had begun and before its terminal; the shard settled
    /// the client.
    Lost { run: RunRef },
    /// Answer to `Effect::Ping`.
    Pong { token: u64 },
}

/// From control to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// RegisterResponse. Accepted (`refusal` none): carries `node`'s id and configuration.
    RegisterReply {
        session: SessionRef,
        reply_to: u64,
        node: Option<NodeIndex>,
        refusal: Option<Reason>,
        /// Close once the answer is flushed. `[A-05]`
        close: bool,
    },
    /// NodeReadyResponse; `refusal` none is `ready = true`. From it on the session is dispatch-ready.
    ReadyReply {
        session: SessionRef,
        reply_to: u64,
        refusal: Option<Reason>,
    },
    /// Close the session: superseded, drained, operator.
    Close { session: SessionRef, cause: Reason },
    /// A lease and a run slot. The client's request goes to `session` as `run` for `provider`.
    Grant {
        client: ClientRef,
        run: RunRef,
        session: SessionRef,
        provider: ProviderIndex,
    },
    /// The request ends here. `retry_after_s` 0: no Retry-After.
    Refuse {
        client: ClientRef,
        reason: Reason,
        retry_after_s: u16,
    },
    /// End the run: withdraw it if it has not begun (then `NotSent`), else send CancelRequest and
    /// settle its client with `reason`; the lease stays held until the run's final report. `[D-63]`
    Cancel { run: RunRef, reason: Reason },
    /// Are you alive? `[D-38]` The token's low 8 bits are the shard's index.
    Ping { token: u64 },
    /// The Edge is going: no new requests, GoAway to ready nodes; what runs may finish. `[D-07]`
    Drain { shard: ShardIndex, grace_ms: u32 },
    /// The grace is over: what still runs ends now. `[D-07]` `[D-10]`
    Stop { shard: ShardIndex },
}

impl Effect {
    /// The shard this goes to: of the session, of the client where it waits, or of the run.
    ///
    /// # Panics
    /// For a ping token that control did not make.
    #[must_use]
    pub fn shard(&self) -> ShardIndex {
        match *self {
            Self::RegisterReply { session, .. }
            | Self::ReadyReply { session, .. }
            | Self::Close { session, .. } => session.shard,
            Self::Grant { client, .. } | Self::Refuse { client, .. } => client.shard,
            Self::Cancel { run, .. } => run.shard,
            Self::Drain { shard, .. } | Self::Stop { shard } => shard,
            Self::Ping { token } => {
                crate::edge::ping_shard(token).expect("control's own tokens name a shard")
            }
        }
    }
}

// Both cross a ring by copy: one cache line or less.
const _: () = assert!(size_of::<Event>() <= 64 && size_of::<Effect>() <= 64);

/// Effects of one step, in order. Allocated once; the runner drains it after every step.
#[derive(Debug)]
pub struct Out {
    effects: Vec<Effect>,
}

impl Default for Out {
    fn default() -> Self {
        Self {
            effects: Vec::with_capacity(EFFECTS_PER_STEP_MAX as usize),
        }
    }
}

impl Out {
    /// # Panics
    /// When one step emits more than it promised: a bug in a handler, never load.
    pub fn push(&mut self, effect: Effect) {
        assert!(self.room() > 0, "step exceeded its bound");
        self.effects.push(effect);
    }

    /// Effects this step may still emit.
    #[must_use]
    pub fn room(&self) -> usize {
        EFFECTS_PER_STEP_MAX as usize - self.effects.len()
    }

    pub fn drain(&mut self) -> impl Iterator<Item = Effect> + '_ {
        self.effects.drain(..)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.effects.is_empty()
    }
}
