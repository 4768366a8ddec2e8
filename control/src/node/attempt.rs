//! One execution attempt, run or tunnel: its outcome cell, its phases, its one terminal.
//!
//! Lives on: the attempt's own task in the agent. View: one attempt. Bound: a few words; at most four
//! orders a step.
//!
//! ```text
//! resource:  Waiting ─grant─► Calling ─returned─► Released         one provider call at most [I5.4]
//! wire:      Open ─terminal─► Sent         Open ─session ends─► Silent
//! outcome:   undecided ─first writer wins─► decided [A-60]
//! watchdog:  armed by the call, moved by activity, at rest while output waits for room [A-17]
//! stalled:   close grace ∥ health probe ─both joined─► the terminal [R-122]
//! ```
//!
//! Between grant and call a managed attempt opens its credential; it decides through the same cell, in
//! the order of [`Attempt::wake`].
use core::num::NonZeroU64;

use iop_proto::domain::{Credential, HardTimeout, HealthEvidence, StallTimeout};
use iop_proto::ids::Now;
use iop_proto::legacy;
use iop_proto::limits::{
    CLOSE_GRACE_MS_DEFAULT, HEALTH_PROBE_MS_DEFAULT, STALL_TIMEOUT_MS_DEFAULT,
};

/// Why a request gets one error terminal before anything is asked of gate or provider. `[A-13]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    TimeoutNegative,
    StallNegative,
    StallTooLong,
    /// Lease without binding or the reverse. `[R-221]`
    CredentialHalf,
    /// No pair for a node whose credential plane is on. `[R-222]`
    CredentialAbsent,
    /// A pair for a node whose credential plane is off. `[R-231]` `[A-36]`
    CredentialUnmanaged,
    /// Nobody could be answered. `[R-082]`
    RunIdMissing,
    /// Run id or target, which an answer may have to repeat more than once.
    NameTooLong,
    /// The id's first stream is only retained. `[D-52]`
    RunRetained,
    AttemptsFull,
    WaitingFull,
    AdapterUnknown,
    /// `operation` is no operation of the adapter's profile. Never falls back to `path`. `[A-38]`
    OperationUnknown,
    PathMissing,
    PathInvalid,
    MethodInvalid,
    HeaderInvalid,
}

impl Rejection {
    /// Stands behind `node rejected: ` in the legacy error.
    #[must_use]
    pub const fn detail(self) -> &'static str {
        match self {
            Self::TimeoutNegative => "timeout_sec is negative",
            Self::StallNegative => "response_stall_timeout_ms is negative",
            Self::StallTooLong => "response_stall_timeout_ms is too large",
            Self::CredentialHalf => "credential lease and binding come as a pair",
            Self::CredentialAbsent => "this node takes no tunnel without a credential lease",
            Self::CredentialUnmanaged => "this node takes no credential leases",
            Self::RunIdMissing => "the request has no run id",
            Self::NameTooLong => "the run id or the target is too long",
            Self::RunRetained => "the run id is still in use",
            Self::AttemptsFull => "too many attempts on this node",
            Self::WaitingFull => "too many attempts wait for capacity",
            Self::AdapterUnknown => "unknown adapter",
            Self::OperationUnknown => "the adapter's profile does not name this operation",
            Self::PathMissing => "neither operation nor path",
            Self::PathInvalid => "the path is not an absolute HTTP path",
            Self::MethodInvalid => "the method is not an HTTP request method",
            Self::HeaderInvalid => "a header is not valid HTTP",
        }
    }
}

/// What bounds an attempt in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From receipt, ms. `[A-53]`
    pub hard_ms: Option<NonZeroU64>,
    /// Without execution activity, ms; the documented default is filled in. `[R-113]`
    pub stall_ms: u64,
}

/// What a stopped provider and a probe are waited for; never one after the other. `[A-19]` `[R-122]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// G: the terminal waits this long for a stopped provider, ms.
    pub grace_ms: u64,
    /// H: a health probe is `unknown` after this long, ms.
    pub probe_ms: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            grace_ms: CLOSE_GRACE_MS_DEFAULT,
            probe_ms: HEALTH_PROBE_MS_DEFAULT,
        }
    }
}

/// Judges a request's figures before any gate or provider is asked. `is_managed`: this node's
/// credential plane is on.
///
/// # Errors
/// The first figure no request may carry. `[R-114]` `[R-115]` `[A-53]` `[R-221]` `[R-222]` `[R-231]`
pub fn boundary(
    timeout: HardTimeout,
    stall: StallTimeout,
    credential: &Credential,
    is_managed: bool,
) -> Result<Timeouts, Rejection> {
    let hard_ms = match timeout {
        HardTimeout::None => None,
        HardTimeout::Seconds(seconds) => NonZeroU64::new(u64::from(seconds.get()) * 1_000),
        HardTimeout::Invalid(_) => return Err(Rejection::TimeoutNegative),
    };
    let stall_ms = match stall {
        StallTimeout::Default => STALL_TIMEOUT_MS_DEFAULT,
        StallTimeout::Millis(ms) => ms.get(),
        StallTimeout::Invalid(..0) => return Err(Rejection::StallNegative),
        StallTimeout::Invalid(_) => return Err(Rejection::StallTooLong),
    };
    match credential {
        Credential::None if is_managed => Err(Rejection::CredentialAbsent),
        Credential::Managed { .. } if !is_managed => Err(Rejection::CredentialUnmanaged),
        Credential::None | Credential::Managed { .. } => Ok(Timeouts { hard_ms, stall_ms }),
        Credential::LeaseAlone(_) | Credential::BindingAlone(_) => Err(Rejection::CredentialHalf),
    }
}

/// Kind of an ordinary error terminal; none of them carries an ExecutionFailure. `[R-145]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The provider refused, broke off or is not HTTP.
    Provider,
    /// The node refused.
    Rejected,
    Cancelled,
    Deadline,
    Draining,
}

impl Failure {
    /// Prefix of the legacy error string. `[R-147]`
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Provider => legacy::PROVIDER_UNREACHABLE,
            Self::Rejected => legacy::NODE_REJECTED,
            Self::Cancelled => legacy::CANCELLED,
            Self::Deadline => legacy::DEADLINE_EXCEEDED,
            Self::Draining => legacy::DRAINING,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terminal {
    Complete,
    Error(Failure),
    /// The one terminal that carries an ExecutionFailure. `[R-129]` `[I5.2]`
    Stalled(Stall),
}

/// Finalized evidence of a stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Silence when the watchdog expired, ms. `[R-138]`
    pub idle_ms: u64,
    /// The provider returned within the grace, and nothing else makes it so. `[I5.7]` `[R-152]`
    pub fenced: bool,
    pub health: HealthEvidence,
    /// Drawn in the step that decided `health`; `None` outside a session. `[I5.8]` `[R-150]`
    pub observation: Option<NonZeroU64>,
}

/// What the main task told the attempt so far; each flag goes from false to true once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// The gate granted a slot.
    pub granted: bool,
    /// A CancelRequest named the run.
    pub cancelled: bool,
    /// The session is over.
    pub ended: bool,
    /// Body bytes the Edge takes of the run, in total; never less than before. `None`: it has not said,
    /// and nothing is paced. Decides nothing of the attempt. `[wire §4.2]`
    pub window: Option<u64>,
}

/// What a provider handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Status and headers, or the start of a run; once, before anything else.
    Head,
    /// At least one byte of the body, or of a delta.
    Body,
}

/// What becomes of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Enqueue it now, under this sequence.
    Forward { sequence: u64 },
    /// The attempt is decided; nothing of it goes out any more.
    Discard,
}

/// What the shell has to do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the provider call.
    Call,
    /// Stop it the way its adapter says, and report when it has returned. `[D-21]`
    Stop,
    /// Probe the exact target, beside everything else. `[R-124]` `[R-125]`
    Probe,
    /// The probe's time is over: give [`Attempt::probed`] an `Unknown`. `[R-176]`
    ProbeOver,
    /// Show the finalized evidence to the observer; whatever it does, `Finish` follows. `[I5.10]`
    Observe(Stall),
    /// Leave the gate's queue or give the slot back. Once per attempt. `[I5.6]`
    FreeSlot,
    /// Enqueue the one terminal. `[I5.1]`
    Finish { sequence: u64, terminal: Terminal },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Completed,
    Failed(Failure),
    Disconnected,
    Stalled { idle_ms: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resource {
    Waiting,
    Calling,
    Released,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    Open,
    Sent,
    Silent,
}

/// The machine of one attempt.
#[derive(Debug)]
pub struct Attempt {
    resource: Resource,
    wire: Wire,
    outcome: Option<Outcome>,
    head: bool,
    /// Of the last frame; the first is 1. `[A-29]`
    sequence: u64,
    hard: Option<Now>,
    stall_ms: u64,
    patience: Patience,
    /// Last activity of the provider. `None`: no call, or its output waits for room: the watchdog
    /// rests. `[A-17]` `[I5.9]`
    active: Option<Now>,
    /// The terminal does not wait longer for a stopped provider. `[A-68]` `[R-356]`
    grace: Option<Now>,
    /// Whether a stopped provider returned within the grace; decided once. `[I5.7]`
    fenced: Option<bool>,
    /// A running probe's end.
    probe: Option<Now>,
    evidence: Option<(HealthEvidence, Option<NonZeroU64>)>,
}

impl Attempt {
    /// An attempt received at `now` that has asked its gate for a slot.
    #[must_use]
    pub fn new(now: Now, timeouts: Timeouts, patience: Patience) -> Self {
        Self {
            resource: Resource::Waiting,
            wire: Wire::Open,
            outcome: None,
            head: false,
            sequence: 0,
            hard: timeouts.hard_ms.map(|ms| now.after_ms(ms.get())),
            stall_ms: timeouts.stall_ms,
            patience,
            active: None,
            grace: None,
            fenced: None,
            probe: None,
            evidence: None,
        }
    }

    /// When [`Self::wake`] must be called at the latest.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        let (first, second) = match self.outcome {
            None => (self.hard, self.watchdog()),
            Some(_) if self.wire == Wire::Open => {
                (self.grace.filter(|_| self.fenced.is_none()), self.probe)
            }
            Some(_) => (None, None),
        };
        first.into_iter().chain(second).min()
    }

    /// Nothing decided yet: a provider may still be retried. `[I5.4]`
    #[must_use]
    pub const fn is_undecided(&self) -> bool {
        self.outcome.is_none()
    }

    /// Slot, call and wire are done with: the entry may go.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.resource == Resource::Released && self.wire != Wire::Open
    }

    /// Signals changed or time passed. At one instant the order is cancel, session end, hard
    /// deadline, watchdog, and the grant last. `[A-60]` `[S-30]` `[S-67]`
    pub fn wake(&mut self, now: Now, signals: Signals, orders: &mut Vec<Order>) {
        if signals.ended && self.wire == Wire::Open {
            self.wire = Wire::Silent; // before anything is decided: nothing more goes out
        }
        if signals.cancelled {
            self.decide(now, Outcome::Failed(Failure::Cancelled), orders);
        }
        if signals.ended {
            self.decide(now, Outcome::Disconnected, orders);
        }
        if self.hard.is_some_and(|hard| now >= hard) {
            self.decide(now, Outcome::Failed(Failure::Deadline), orders);
        }
        if self.watchdog().is_some_and(|expires| now >= expires) {
            let idle_ms = self.active.map_or(0, |active| now.ms_since(active));
            self.decide(now, Outcome::Stalled { idle_ms }, orders);
        }
        self.join(now, orders);
        if signals.granted && self.resource == Resource::Waiting {
            self.resource = Resource::Calling;
            self.active = Some(now); // waiting for capacity is nobody's silence `[A-18]`
            orders.push(Order::Call);
        }
    }

    /// The provider handed something over that now waits for room: the watchdog rests until
    /// [`Self::output`] took all of it.
    pub const fn received(&mut self) {
        self.active = None;
    }

    /// The provider made progress that puts nothing on the wire by itself. `[A-17]`
    pub const fn progressed(&mut self, now: Now) {
        self.active = Some(now);
    }

    /// The provider handed something over and the session's queue has room for it. Call it in one
    /// critical section with the enqueue. `more`: a part of it waits for further room.
    ///
    /// # Panics
    /// When the shell breaks the order of an answer: a second head, a body before the head.
    pub fn output(&mut self, now: Now, output: Output, more: bool) -> Verdict {
        assert_eq!(self.head, output == Output::Body, "one head, then bodies");
        if self.outcome.is_some() || self.wire != Wire::Open {
            return Verdict::Discard;
        }
        self.head = true;
        self.active = (!more).then_some(now);
        self.sequence += 1;
        Verdict::Forward {
            sequence: self.sequence,
        }
    }

    /// The provider call is over and holds nothing any more; whatever it says counts only while
    /// nothing was decided. `Ok` without a head is a failure: END implies a response. `[A-28]`
    ///
    /// # Panics
    /// When no call was running.
    pub fn returned(&mut self, now: Now, result: Result<(), Failure>, orders: &mut Vec<Order>) {
        assert_eq!(self.resource, Resource::Calling, "a call returns once");
        self.resource = Resource::Released;
        orders.push(Order::FreeSlot);
        let in_time = self.grace.is_none_or(|grace| now <= grace);
        self.fenced.get_or_insert(in_time);
        self.outcome.get_or_insert(match result {
            Ok(()) if self.head => Outcome::Completed,
            Ok(()) => Outcome::Failed(Failure::Provider),
            Err(failure) => Outcome::Failed(failure),
        });
        self.settle(orders);
    }

    /// The probe is over. `draw` takes the next number of the session's observations; it is asked
    /// once, in this step, and only when the evidence still counts. It moves neither outcome, fence
    /// nor watchdog. `[R-151]` `[R-152]` `[R-153]`
    pub fn probed(
        &mut self,
        health: HealthEvidence,
        draw: impl FnOnce() -> Option<NonZeroU64>,
        orders: &mut Vec<Order>,
    ) {
        self.probe = None;
        let stalled = matches!(self.outcome, Some(Outcome::Stalled { .. }));
        if !stalled || self.wire != Wire::Open || self.evidence.is_some() {
            return;
        }
        self.evidence = Some((health, draw()));
        self.settle(orders);
    }

    /// When silence becomes a stall.
    fn watchdog(&self) -> Option<Now> {
        let calling = self.resource == Resource::Calling && self.outcome.is_none();
        let active = self.active.filter(|_| calling)?;
        Some(active.after_ms(self.stall_ms))
    }

    fn decide(&mut self, now: Now, outcome: Outcome, orders: &mut Vec<Order>) {
        if self.outcome.is_some() {
            return;
        }
        self.outcome = Some(outcome);
        match self.resource {
            Resource::Waiting => {
                self.resource = Resource::Released;
                orders.push(Order::FreeSlot);
                self.settle(orders);
            }
            Resource::Calling => {
                orders.push(Order::Stop);
                self.grace = Some(now.after_ms(self.patience.grace_ms));
                if matches!(outcome, Outcome::Stalled { .. }) {
                    orders.push(Order::Probe);
                    self.probe = Some(now.after_ms(self.patience.probe_ms));
                }
            }
            Resource::Released => {}
        }
    }

    /// Ends what a decided attempt still waits for, each at its own time.
    fn join(&mut self, now: Now, orders: &mut Vec<Order>) {
        if self.wire != Wire::Open {
            self.probe = None; // nobody is told: the join is abandoned `[S-37]`
            return;
        }
        if self.probe.is_some_and(|probe| now >= probe) {
            self.probe = None;
            orders.push(Order::ProbeOver);
        }
        if self.fenced.is_none() && self.grace.is_some_and(|grace| now >= grace) {
            self.fenced = Some(false);
            self.settle(orders);
        }
    }

    /// Sends the terminal once all it says is known.
    fn settle(&mut self, orders: &mut Vec<Order>) {
        if self.wire != Wire::Open {
            return;
        }
        let terminal = match self.outcome {
            None | Some(Outcome::Disconnected) => return, // nobody is told
            Some(Outcome::Completed) => Terminal::Complete,
            Some(Outcome::Failed(failure)) => Terminal::Error(failure),
            Some(Outcome::Stalled { idle_ms }) => {
                let (Some(fenced), Some((health, observation))) = (self.fenced, self.evidence)
                else {
                    return; // not joined yet
                };
                let stall = Stall {
                    idle_ms,
                    fenced,
                    health,
                    observation,
                };
                orders.push(Order::Observe(stall));
                Terminal::Stalled(stall)
            }
        };
        self.wire = Wire::Sent;
        self.sequence += 1;
        orders.push(Order::Finish {
            sequence: self.sequence,
            terminal,
        });
    }
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
