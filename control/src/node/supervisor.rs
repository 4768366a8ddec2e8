//! The one supervisor of a node: dial, register, apply, start, install, ready, serve, back off.
//!
//! Lives on: the agent's main task. View: one process. Bound: one link at a time, one action a step.
//!
//! ```text
//! Start ─► Connect ─► Identify ─► Register ─► Apply ─► StartAdapters ─► Install ─► AwaitAck ─► Serving
//!            ▲            └── any failure, close or timeout ──► Ending ◄───────────────┘          │
//!            └─────────────── Backoff ◄───────────────────────────┘         Draining ◄─ shutdown ─┘
//! ```
//!
//! The shell performs each action and reports what came of it; a link is over when its `Ended`
//! arrives, and only then may another be dialled. `[I4.1]`
use core::num::NonZeroU64;

use iop_proto::ids::Now;
use iop_proto::limits::{
    HANDSHAKE_STEP_MS, NODE_DRAIN_WINDOW_MS, RECONNECT_ATTEMPTS_DEFAULT,
    RECONNECT_INTERVAL_S_DEFAULT, RECONNECT_JITTER_DEFAULT, RECONNECT_JITTER_MAX, SHUTDOWN_MS,
};

use super::LinkId;

/// When to dial again, and how often. The same for the first dial and for a lost session. `[R-060]`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    interval_ms: u64,
    /// `None`: until local shutdown. `[R-288]`
    attempts_max: Option<NonZeroU64>,
    jitter: f64,
}

/// Which reconnect setting is wrong, and how. `[R-287]` `[R-291]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyError {
    AttemptsNegative,
    IntervalNegative,
    /// Unlimited attempts need an interval of at least 1 s.
    IntervalZeroUnlimited,
    /// Not within 0 … 0.5. `[D-04]`
    JitterOutOfRange,
}

impl PolicyError {
    /// Field of `node.yaml` the error is about.
    #[must_use]
    pub const fn field(self) -> &'static str {
        match self {
            Self::AttemptsNegative => "reconnect.max_attempts",
            Self::IntervalNegative | Self::IntervalZeroUnlimited => "reconnect.interval_sec",
            Self::JitterOutOfRange => "reconnect.jitter",
        }
    }

    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::AttemptsNegative => "must be 0 (unlimited) or positive",
            Self::IntervalNegative => "must not be negative",
            Self::IntervalZeroUnlimited => "must be positive when max_attempts is 0 (unlimited)",
            Self::JitterOutOfRange => "must be within 0 and 0.5",
        }
    }
}

impl Policy {
    /// Judges the configured values; `None` is an omitted key, which is not the same as 0.
    /// `[R-286]` `[R-289]`
    ///
    /// # Errors
    /// The first value that no policy allows.
    pub fn new(
        interval_sec: Option<i64>,
        max_attempts: Option<i64>,
        jitter: Option<f64>,
    ) -> Result<Self, PolicyError> {
        let attempts = u64::try_from(max_attempts.unwrap_or(RECONNECT_ATTEMPTS_DEFAULT))
            .map_err(|_| PolicyError::AttemptsNegative)?;
        let interval = u64::try_from(interval_sec.unwrap_or(RECONNECT_INTERVAL_S_DEFAULT))
            .map_err(|_| PolicyError::IntervalNegative)?;
        let attempts_max = NonZeroU64::new(attempts);
        if attempts_max.is_none() && interval == 0 {
            return Err(PolicyError::IntervalZeroUnlimited);
        }
        let jitter = jitter.unwrap_or(RECONNECT_JITTER_DEFAULT);
        if !(0.0..=RECONNECT_JITTER_MAX).contains(&jitter) {
            return Err(PolicyError::JitterOutOfRange);
        }
        Ok(Self {
            interval_ms: interval.saturating_mul(1_000),
            attempts_max,
            jitter,
        })
    }

    /// Wait before the next dial, ms: the interval and up to `jitter` of it more, never less. `[D-04]`
    /// `dice`: uniform over all values.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the product is at least 0, and `as` saturates at the top"
    )]
    pub fn wait_ms(&self, dice: u32) -> u64 {
        let share = f64::from(dice) / f64::from(u32::MAX) * self.jitter;
        self.interval_ms
            .saturating_add((self.interval_ms as f64 * share) as u64)
    }
}

/// What happened. Link events of any but the current link change nothing. `[S-49]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Local configuration and credentials are usable.
    Valid,
    /// They are not; nothing a peer does can cause this. `[A-11]`
    Fatal,
    Link(LinkId, LinkEvent),
    /// Local shutdown was asked for; the second time it ends at once. `[D-55]`
    Shutdown,
    /// Attempts without a terminal; told at every change. `[D-07]`
    Active(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// TCP is up.
    Connected,
    /// The peer is the Edge we expect; nothing was sent yet. `[I4.5]`
    Identified,
    /// RegisterResponse accepted, with node id and configuration.
    Registered,
    /// The configuration is in force.
    Applied,
    /// Adapters run.
    Started,
    /// Requests would be handled.
    Installed,
    /// NodeReadyResponse true.
    Ready,
    /// Refused, invalid or a violation; the socket may still be open.
    Failed,
    /// Its sockets are closed and its session context is cancelled. Last event of a link.
    Ended,
}

/// What to do next. At most one a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connect, then prove the peer's identity.
    Dial(LinkId),
    /// Send RegisterRequest.
    Register,
    /// Put the received configuration in force.
    Apply,
    StartAdapters,
    /// From here on run, tunnel, cancel, command and refresh would find a handler. `[R-028]`
    InstallHandlers,
    /// Send NodeReadyRequest.
    SendReady,
    /// Tell the Edge that this node closes. `[D-07]`
    AnnounceDrain {
        grace_ms: u64,
    },
    /// Answer new work with `draining` from now on.
    RefuseWork,
    /// Cancel the session context and close the link; `flush`: what is queued goes out first.
    End {
        link: LinkId,
        why: Why,
        flush: bool,
    },
    /// The process is over.
    Exit(Exit),
}

/// Why a link is being ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The shell said so.
    Failed,
    /// This phase took longer than it may. `[A-08]`
    Timeout(&'static str),
    Shutdown,
    Drained,
}

/// How the process ends. `[I4.2]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Shutdown,
    Fatal,
    Exhausted,
}

impl Exit {
    /// Process exit code. `[R-067]` `[R-068]` `[R-069]`
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Shutdown => 0,
            Self::Fatal | Self::Exhausted => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    Connect,
    Identify,
    Register,
    Apply,
    StartAdapters,
    Install,
    AwaitAck,
    Serving,
    Draining {
        refusing: bool,
        end_at: Now,
    },
    /// The link is being closed. `served`: it had been ready.
    Ending {
        served: bool,
    },
    Backoff,
    Exited,
}

/// The machine. One per process; `step` and `tick` are called from one task only. `[R-058]`
#[derive(Debug)]
pub struct Supervisor {
    policy: Policy,
    drain_ms: u64,
    phase: Phase,
    deadline: Option<Now>,
    link: u64,
    failures: u64,
    active: u32,
    stopping: bool,
}

impl Supervisor {
    /// `drain_ms`: how long a drain may take after the first shutdown. `[D-07]`
    #[must_use]
    pub const fn new(policy: Policy, drain_ms: u64) -> Self {
        Self {
            policy,
            drain_ms,
            phase: Phase::Start,
            deadline: None,
            link: 0,
            failures: 0,
            active: 0,
            stopping: false,
        }
    }

    /// When [`Self::tick`] must be called at the latest.
    #[must_use]
    pub const fn deadline(&self) -> Option<Now> {
        self.deadline
    }

    /// NodeReadyResponse true was received and the link is not being ended.
    #[must_use]
    pub const fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving | Phase::Draining { .. })
    }

    /// Failed attempts in a row since the start or the last ready. `[A-09]`
    #[must_use]
    pub const fn failures(&self) -> u64 {
        self.failures
    }

    /// Takes one event. `dice` is used by a backoff alone. Events that mean nothing in this phase, or
    /// are of an older link, change nothing.
    pub fn step(&mut self, now: Now, event: Event, dice: u32) -> Option<Action> {
        if self.phase == Phase::Exited {
            return None;
        }
        match event {
            Event::Valid if self.phase == Phase::Start => Some(self.dial(now)),
            Event::Fatal if self.phase == Phase::Start => Some(self.exit(Exit::Fatal)),
            Event::Valid | Event::Fatal => None,
            Event::Shutdown => self.shutdown(now),
            Event::Active(active) => {
                self.active = active;
                self.drained(now)
            }
            Event::Link(link, _) if link.0 != self.link => None,
            Event::Link(_, LinkEvent::Ended) => self.ended(now, dice),
            Event::Link(_, LinkEvent::Failed) => self.failed(now),
            Event::Link(_, progress) => self.progress(now, progress),
        }
    }

    /// Lets time pass; call at [`Self::deadline`] or later, as often as a deadline is due.
    pub fn tick(&mut self, now: Now) -> Option<Action> {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return None;
        }
        match self.phase {
            Phase::Backoff => Some(self.dial(now)),
            Phase::Draining {
                refusing: false,
                end_at,
            } => {
                self.phase = Phase::Draining {
                    refusing: true,
                    end_at,
                };
                self.deadline = Some(if self.active == 0 { now } else { end_at });
                Some(Action::RefuseWork)
            }
            Phase::Draining { refusing: true, .. } => Some(self.end(now, Why::Drained, true)),
            Phase::Ending { .. } => Some(self.exit(Exit::Shutdown)),
            Phase::Connect => Some(self.end(now, Why::Timeout("tcp connect"), false)),
            Phase::Identify => Some(self.end(now, Why::Timeout("tls handshake"), false)),
            Phase::Register => Some(self.end(now, Why::Timeout("RegisterResponse"), false)),
            Phase::AwaitAck => Some(self.end(now, Why::Timeout("NodeReadyResponse"), false)),
            Phase::Start
            | Phase::Apply
            | Phase::StartAdapters
            | Phase::Install
            | Phase::Serving
            | Phase::Exited => None,
        }
    }

    fn progress(&mut self, now: Now, event: LinkEvent) -> Option<Action> {
        let step = Some(now.after_ms(HANDSHAKE_STEP_MS));
        let (phase, deadline, action) = match (self.phase, event) {
            (Phase::Connect, LinkEvent::Connected) => (Phase::Identify, step, None),
            (Phase::Identify, LinkEvent::Identified) => {
                (Phase::Register, step, Some(Action::Register))
            }
            (Phase::Register, LinkEvent::Registered) => (Phase::Apply, None, Some(Action::Apply)),
            (Phase::Apply, LinkEvent::Applied) => {
                (Phase::StartAdapters, None, Some(Action::StartAdapters))
            }
            (Phase::StartAdapters, LinkEvent::Started) => {
                (Phase::Install, None, Some(Action::InstallHandlers))
            }
            (Phase::Install, LinkEvent::Installed) => {
                (Phase::AwaitAck, step, Some(Action::SendReady))
            }
            (Phase::AwaitAck, LinkEvent::Ready) => {
                self.failures = 0;
                (Phase::Serving, None, None)
            }
            _ => return None,
        };
        self.phase = phase;
        self.deadline = deadline;
        action
    }

    fn failed(&mut self, now: Now) -> Option<Action> {
        match self.phase {
            Phase::Start | Phase::Backoff | Phase::Ending { .. } | Phase::Exited => None,
            Phase::Connect
            | Phase::Identify
            | Phase::Register
            | Phase::Apply
            | Phase::StartAdapters
            | Phase::Install
            | Phase::AwaitAck
            | Phase::Serving
            | Phase::Draining { .. } => Some(self.end(now, Why::Failed, false)),
        }
    }

    fn ended(&mut self, now: Now, dice: u32) -> Option<Action> {
        let served = match self.phase {
            Phase::Start | Phase::Backoff | Phase::Exited => return None,
            Phase::Serving | Phase::Draining { .. } | Phase::Ending { served: true } => true,
            Phase::Connect
            | Phase::Identify
            | Phase::Register
            | Phase::Apply
            | Phase::StartAdapters
            | Phase::Install
            | Phase::AwaitAck
            | Phase::Ending { served: false } => false,
        };
        if self.stopping {
            return Some(self.exit(Exit::Shutdown)); // also on the last attempt `[S-50]`
        }
        self.failures = if served { 0 } else { self.failures + 1 };
        if self
            .policy
            .attempts_max
            .is_some_and(|max| self.failures >= max.get())
        {
            return Some(self.exit(Exit::Exhausted)); // no wait after the last `[I4.3]`
        }
        self.phase = Phase::Backoff;
        self.deadline = Some(now.after_ms(self.policy.wait_ms(dice)));
        None
    }

    fn shutdown(&mut self, now: Now) -> Option<Action> {
        let again = core::mem::replace(&mut self.stopping, true);
        match self.phase {
            _ if again => Some(self.exit(Exit::Shutdown)),
            Phase::Start | Phase::Backoff => Some(self.exit(Exit::Shutdown)),
            Phase::Serving => {
                let end_at = now.after_ms(self.drain_ms);
                self.phase = Phase::Draining {
                    refusing: false,
                    end_at,
                };
                self.deadline = Some(now.after_ms(NODE_DRAIN_WINDOW_MS.min(self.drain_ms)));
                Some(Action::AnnounceDrain {
                    grace_ms: self.drain_ms,
                })
            }
            Phase::Ending { .. } => {
                self.deadline = Some(now.after_ms(SHUTDOWN_MS));
                None
            }
            Phase::Connect
            | Phase::Identify
            | Phase::Register
            | Phase::Apply
            | Phase::StartAdapters
            | Phase::Install
            | Phase::AwaitAck => Some(self.end(now, Why::Shutdown, false)),
            Phase::Draining { .. } | Phase::Exited => None,
        }
    }

    /// A drain ends as soon as nothing is active, once new work is refused. `[D-07]`
    fn drained(&mut self, now: Now) -> Option<Action> {
        let over = matches!(self.phase, Phase::Draining { refusing: true, .. }) && self.active == 0;
        over.then(|| self.end(now, Why::Drained, true))
    }

    fn dial(&mut self, now: Now) -> Action {
        self.link += 1;
        self.phase = Phase::Connect;
        self.deadline = Some(now.after_ms(HANDSHAKE_STEP_MS));
        Action::Dial(LinkId(self.link))
    }

    fn end(&mut self, now: Now, why: Why, flush: bool) -> Action {
        self.phase = Phase::Ending {
            served: self.is_serving(),
        };
        self.deadline = self.stopping.then(|| now.after_ms(SHUTDOWN_MS));
        Action::End {
            link: LinkId(self.link),
            why,
            flush,
        }
    }

    fn exit(&mut self, exit: Exit) -> Action {
        self.phase = Phase::Exited;
        self.deadline = None;
        Action::Exit(exit)
    }
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
