//! One execution attempt, run or tunnel: its outcome cell, its phases, its one terminal.
//!
//! Lives on: the attempt's own task in the agent. View: one attempt. Bound: a few words; at most four
//! orders a step.
//!
//! ```text
//! resource:  Waiting ─grant─► Calling ─returned─► Released         one provider call at most [I5.4]
//! wire:      Open ─terminal─► Sent         Open ─session ends─► Silent
//! outcome:   undecided ─first writer wins─► decided [A-60]
//! ```
//!
//! Between grant and call a managed attempt opens its credential, and while it calls a watchdog
//! waits for activity: both decide through the same cell, in the order of [`Attempt::wake`].
use core::num::NonZeroU64;

use iop_proto::domain::{Credential, HardTimeout, StallTimeout};
use iop_proto::ids::Now;
use iop_proto::legacy;
use iop_proto::limits::{CLOSE_GRACE_MS, STALL_TIMEOUT_MS_DEFAULT};

/// Why a request gets one error terminal before anything is asked of gate or provider. `[A-13]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    TimeoutNegative,
    StallNegative,
    StallTooLong,
    /// Lease without binding or the reverse. `[R-221]`
    CredentialHalf,
    /// A pair for a node whose credential plane is off. `[R-231]` `[A-36]`
    CredentialUnmanaged,
    /// The id's first stream is only retained. `[D-52]`
    RunRetained,
    AttemptsFull,
    WaitingFull,
    AdapterUnknown,
    /// The adapter does not serve normalized runs. `[A-62]`
    RunUnsupported,
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
            Self::CredentialUnmanaged => "this node takes no credential leases",
            Self::RunRetained => "the run id is still in use",
            Self::AttemptsFull => "too many attempts on this node",
            Self::WaitingFull => "too many attempts wait for capacity",
            Self::AdapterUnknown => "unknown adapter",
            Self::RunUnsupported => "the adapter serves raw tunnels only",
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

/// Judges a request's figures before any gate or provider is asked.
///
/// # Errors
/// The first figure no request may carry. `[R-114]` `[R-115]` `[A-53]` `[R-231]`
pub fn boundary(
    timeout: HardTimeout,
    stall: StallTimeout,
    credential: &Credential,
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
        Credential::None => Ok(Timeouts { hard_ms, stall_ms }),
        Credential::Managed { .. } => Err(Rejection::CredentialUnmanaged),
        Credential::LeaseAlone(_) | Credential::BindingAlone(_) => Err(Rejection::CredentialHalf),
    }
}

/// Kind of an error terminal; none of them carries an ExecutionFailure. `[R-145]`
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
}

/// What the main task told the attempt so far; each goes from false to true once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals {
    /// The gate granted a slot.
    pub granted: bool,
    /// A CancelRequest named the run.
    pub cancelled: bool,
    /// The session is over.
    pub ended: bool,
}

/// What a provider handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Status and headers; once, before anything else.
    Head,
    /// At least one byte of the body.
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
}

impl Outcome {
    /// `None`: nobody is told.
    const fn terminal(self) -> Option<Terminal> {
        match self {
            Self::Completed => Some(Terminal::Complete),
            Self::Failed(failure) => Some(Terminal::Error(failure)),
            Self::Disconnected => None,
        }
    }
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
    /// The terminal does not wait longer for a stopped provider. `[A-68]` `[R-356]`
    grace: Option<Now>,
}

impl Attempt {
    /// An attempt received at `now` that has asked its gate for a slot.
    #[must_use]
    pub fn new(now: Now, timeouts: Timeouts) -> Self {
        Self {
            resource: Resource::Waiting,
            wire: Wire::Open,
            outcome: None,
            head: false,
            sequence: 0,
            hard: timeouts.hard_ms.map(|ms| now.after_ms(ms.get())),
            grace: None,
        }
    }

    /// When [`Self::wake`] must be called at the latest.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        match self.outcome {
            None => self.hard,
            Some(_) if self.wire == Wire::Open => self.grace,
            Some(_) => None,
        }
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
    /// deadline, and the grant last. `[A-60]` `[S-30]` `[S-67]`
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
        if self.grace.is_some_and(|grace| now >= grace) {
            self.settle(orders);
        }
        if signals.granted && self.resource == Resource::Waiting {
            self.resource = Resource::Calling;
            orders.push(Order::Call);
        }
    }

    /// The provider handed something over and the session's queue has room for it. Call it in one
    /// critical section with the enqueue.
    ///
    /// # Panics
    /// When the shell breaks the order of an answer: a second head, a body before the head.
    pub fn output(&mut self, output: Output) -> Verdict {
        assert_eq!(self.head, output == Output::Body, "one head, then bodies");
        if self.outcome.is_some() || self.wire != Wire::Open {
            return Verdict::Discard;
        }
        self.head = true;
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
    pub fn returned(&mut self, result: Result<(), Failure>, orders: &mut Vec<Order>) {
        assert_eq!(self.resource, Resource::Calling, "a call returns once");
        self.resource = Resource::Released;
        orders.push(Order::FreeSlot);
        self.outcome.get_or_insert(match result {
            Ok(()) if self.head => Outcome::Completed,
            Ok(()) => Outcome::Failed(Failure::Provider),
            Err(failure) => Outcome::Failed(failure),
        });
        self.settle(orders);
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
                self.grace = Some(now.after_ms(CLOSE_GRACE_MS));
            }
            Resource::Released => {}
        }
    }

    fn settle(&mut self, orders: &mut Vec<Order>) {
        let terminal = self.outcome.and_then(Outcome::terminal);
        if let (Wire::Open, Some(terminal)) = (self.wire, terminal) {
            self.wire = Wire::Sent;
            self.sequence += 1;
            orders.push(Order::Finish {
                sequence: self.sequence,
                terminal,
            });
        }
    }
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
