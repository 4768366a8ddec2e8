//! The Edge's vocabulary between control and shards: what may come in, what may go out.
//!
//! Lives on: both ends of a link. Bound: `Copy`, at most 64 bytes, indices and generations, no
//! strings. No order holds between a shard's link to control and anything else.
use core::num::NonZeroU64;

use iop_proto::catalog::Operation;
use iop_proto::domain::{CommandKind, HealthEvidence, RefreshStatus};
use iop_proto::ids::{
    ClientRef, ModelIndex, NodeIndex, ProviderIndex, RefreshId, RunRef, SessionRef, ShardIndex,
    SlotGeneration,
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

/// Why a piece of health evidence counts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvidenceFault {
    /// None of its keys is there.
    Empty,
    /// A key is missing, or holds a word that it may not hold.
    Malformed,
    /// `provider_health` and `liveness_classification` are no legal pair. `[R-136]`
    Pair,
    /// Not the adapter that was leased or asked.
    Adapter,
    /// Not the target that was leased or asked.
    Target,
    /// `health_observation_seq` is not a canonical number from 1. `[A-21]`
    Sequence,
    /// It fits more than one binding of the node, or none. `[R-188]`
    Ambiguous,
    /// Its lease or its question belongs to a generation that has ended, `[R-157]` or to a binding that
    /// the provider has no longer.
    NotCurrent,
}

impl EvidenceFault {
    /// Word of a log line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Malformed => "malformed",
            Self::Pair => "pair",
            Self::Adapter => "adapter",
            Self::Target => "target",
            Self::Sequence => "sequence",
            Self::Ambiguous => "ambiguous",
            Self::NotCurrent => "not_current",
        }
    }
}

/// What a stall terminal says of its provider, compared by the node's shard with the adapter and
/// target of the run's own lease: strings never cross a ring. `[R-158]` `[R-159]` `[A-57]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    Valid {
        health: HealthEvidence,
        /// `None`: omitted, so valid for a handoff and never fresh. `[A-21]`
        seq: Option<NonZeroU64>,
    },
    Rejected(EvidenceFault),
}

/// What the node's answer to a CAPABILITIES says of the asked binding. `[R-182]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    Available { seq: NonZeroU64 },
    Unavailable,
    Unknown,
    Rejected(EvidenceFault),
}

/// What a node has answered to a command, as its shard saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandAnswer {
    /// With an error, or as another command's.
    Failed,
    /// With a state that only the operator reads.
    Told,
    /// A CAPABILITIES, with evidence.
    Probed(Probed),
}

/// Names one command sent to a node; the `Envelope.id` and `command_id` that its answer must bear.
///
/// ```text
///  63  62  61         55..32   31..0                   bits
///  +---+---+----------+--------+-----------------------+
///  | 0 | 1 | operator | row    | generation of the row |
///  +---+---+----------+--------+-----------------------+
/// ```
/// Bit 62 keeps it apart from every other request's id on the connection. `[wire §4.2]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(NonZeroU64);

impl CommandId {
    const COMMAND: u64 = 1 << 62;
    const OPERATOR: u64 = 1 << 61;

    /// The command in `slot`, of its tenant `generation`.
    #[must_use]
    pub fn new(slot: u32, generation: SlotGeneration, of_operator: bool) -> Self {
        let operator = if of_operator { Self::OPERATOR } else { 0 };
        let place = u64::from(slot & 0x00ff_ffff) << 32 | u64::from(generation.get());
        Self(NonZeroU64::new(Self::COMMAND | operator | place).expect("bit 62 is set"))
    }

    /// As the wire carries it.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// An operator asks, and reads the whole answer.
    #[must_use]
    pub const fn is_operators(self) -> bool {
        self.get() & Self::OPERATOR != 0
    }

    pub(crate) fn place(self) -> Option<(u32, SlotGeneration)> {
        let slot = u32::try_from(self.get() >> 32 & 0x00ff_ffff).ok()?;
        let generation = u32::try_from(self.get() & 0xffff_ffff).ok()?;
        Some((slot, SlotGeneration::new(generation)?))
    }
}

/// What a stall terminal carries on its way downstream, after lease and overlay were decided: the
/// lease's provider and the validated `provider_health`. That there is one is
/// `recovery_handoff=confirmed`; it permits no replay. `[R-165]`…`[R-168]` `[R-172]` `[I3.9]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handoff {
    pub provider: ProviderIndex,
    pub health: HealthEvidence,
}

/// Whether a stalled request may be asked of another provider, and if not, why: by what only its
/// shard knows, then by what control knows. `[D-18]` `[R-172]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eligibility {
    Eligible,
    /// Switched off.
    Off,
    /// Nobody waits for the answer any more.
    ClientGone,
    /// Something of the answer was handed to the client's socket.
    Committed,
    /// The node does not know that the provider has let go.
    FenceUnconfirmed,
    /// The evidence counts nothing.
    EvidenceRejected,
    /// The model has no other provider for it.
    NoOtherProvider,
    /// Its route is bound to a credential: no other slot or route may stand in for it. `[R-343]`
    CredentialBound,
}

impl Eligibility {
    pub const ALL: [Self; 8] = [
        Self::Eligible,
        Self::Off,
        Self::ClientGone,
        Self::Committed,
        Self::FenceUnconfirmed,
        Self::EvidenceRejected,
        Self::NoOtherProvider,
        Self::CredentialBound,
    ];

    /// Metric label and log field.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Eligible => "eligible",
            Self::Off => "off",
            Self::ClientGone => "client_gone",
            Self::Committed => "committed",
            Self::FenceUnconfirmed => "fence_unconfirmed",
            Self::EvidenceRejected => "evidence_rejected",
            Self::NoOtherProvider => "no_other_provider",
            Self::CredentialBound => "credential_bound",
        }
    }
}

/// From a shard to control.
///
/// A granted run gets exactly one *final* report: `NotSent`, `Terminal`, `Stalled` or `Lost`. Until
/// then control keeps its row and its lease, and does not reuse its slot.
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
    /// The peer's certificate is past its notAfter. Sent once, from a session that was announced.
    /// `[D-05]`
    Expired { session: SessionRef },
    /// NodeConfigRefreshResponse to one of the session's last `REFRESHES_UNANSWERED_MAX` refreshes,
    /// each answered once.
    Refreshed {
        session: SessionRef,
        refresh: RefreshId,
        status: RefreshStatus,
    },
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
    /// Final. The current terminal of a begun run arrived, in order and with a stall's
    /// ExecutionFailure. Its client, if one is left, waits on this shard for `Handoff`; one that is
    /// `Eligible` waits like one that has submitted, so `ClientGone` follows if it leaves.
    Stalled {
        run: RunRef,
        client: Option<ClientRef>,
        evidence: Evidence,
        recovery: Eligibility,
    },
    /// Final. The session closed after the run had begun and before its terminal; the shard settled
    /// the client.
    Lost { run: RunRef },
    /// Not final. The node was told to cancel the run and has said nothing of it for as long as its
    /// provider may be silent. Once per run. `[D-08]`
    Overdue { run: RunRef },
    /// The first answer to a command that was sent on this session.
    CommandAnswer {
        session: SessionRef,
        command: CommandId,
        answer: CommandAnswer,
    },
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
    /// NodeConfigRefreshRequest: carries `node`'s configuration of the shard's present epoch, behind
    /// the requests that wait for the session. `[R-260]`
    Refresh {
        session: SessionRef,
        refresh: RefreshId,
        node: NodeIndex,
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
    /// Lease and overlay of a stalled run are decided: its client may hear of it. `None`: the
    /// evidence counts nothing. `recovers`: instead its request waits again, with the age it had, for
    /// a run elsewhere, and a `Grant` or `Refuse` follows. `[D-18]`
    Handoff {
        client: ClientRef,
        handoff: Option<Handoff>,
        recovers: bool,
    },
    /// NodeCommandRequest to a ready session; `provider` names adapter and target. `[R-254]`
    Command {
        session: SessionRef,
        command: CommandId,
        kind: CommandKind,
        provider: Option<ProviderIndex>,
    },
    /// Are you alive? `[D-38]` The token's low 8 bits are the shard's index.
    Ping { token: u64 },
    /// The configuration `epoch` is in the shard's lane; whatever follows this was decided under it.
    /// `[D-39]`
    Configure { shard: ShardIndex, epoch: u64 },
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
            | Self::Refresh { session, .. }
            | Self::Close { session, .. }
            | Self::Command { session, .. } => session.shard,
            Self::Grant { client, .. }
            | Self::Refuse { client, .. }
            | Self::Handoff { client, .. } => client.shard,
            Self::Cancel { run, .. } => run.shard,
            Self::Configure { shard, .. } | Self::Drain { shard, .. } | Self::Stop { shard } => {
                shard
            }
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
