//! The Edge's core: one state machine that decides who owns a node, who gets a lease, who waits.
//!
//! `Control` takes one event or one tick at a time and answers with effects; it reads no clock,
//! does no I/O and never waits. A step is bounded: what does not fit goes on in the next `tick`.
//!
//! | file | machine |
//! |---|---|
//! | `registry` | who owns a node id: judgements only |
//! | `connection` | what registration, ready and close do to everything else |
//! | `tenure` | what a node holds of its configuration, and its drain |
//! | `reload` | another configuration in the place of the present one |
//! | `resource` | what a provider can take |
//! | `queue` | who waits, and who of them could go |
//! | `lease` | granted runs and their slots |
//! | `request` | submit, grant, final reports, withdrawal |
//! | `evidence`, `overlay`, `health` | what a node says of a provider, and what that changes |
//! | `recovery` | whether a stalled request is asked of another provider, and what became of it |
//! | `command`, `probe` | questions to nodes, and the one that is asked again and again |
//! | `pulse` | whether shards answer |
//! | `snapshot`, `counters`, `notice` | what others may look at; nothing is decided by them |
//! | `invariants` | what holds after every step |
//!
//! Lives on: the control thread alone. View: the whole Edge. Bound: the tables of `limits`;
//! `EFFECTS_PER_STEP_MAX` effects a step.
use std::sync::Arc;

use iop_proto::ids::{NodeIndex, Now, ProviderIndex, RefreshId, RunRef, SessionRef, ShardIndex};
use iop_proto::limits::{COMMAND_MS_DEFAULT, EFFECTS_PER_STEP_MAX, GRANTS_PER_STEP_MAX};
use iop_proto::limits::{MODELS_MAX, NODES_MAX, PROVIDERS_MAX, SHARDS_MAX};

use crate::names::Names;
use crate::step::{CommandId, Effect, Event, Out};
use crate::timers::Timers;

mod class;
mod command;
mod connection;
mod counters;
pub mod evidence;
mod health;
mod invariants;
mod lease;
#[cfg(test)]
mod model_tests;
mod notice;
mod overlay;
mod probe;
mod pulse;
mod queue;
mod recovery;
mod registry;
mod reload;
mod request;
mod resource;
mod snapshot;
mod tenure;

pub use command::{CommandEnd, CommandRefusal};
pub use counters::Counters;
pub use invariants::Violation;
pub use notice::{HealthNotice, HealthSource, NodeChange, NodeNotice};
pub use notice::{OverdueNotice, Recovery, RecoveryNotice};
pub use overlay::Outcome;
pub use registry::{Owner, SessionState};
pub use snapshot::{EdgeSnapshot, Health, ModelSnapshot, NodeSnapshot, ProviderSnapshot};
pub use snapshot::{Snapshot, Status};
pub use tenure::RefreshState;

use class::Class;
use command::Commands;
use health::Stalled;
use lease::Leases;
use notice::Notices;
use probe::Prober;
use pulse::{Due, Pulse};
use queue::{Place, Queue};
use registry::Registry;
use resource::Resources;
use tenure::Tenure;

/// What a deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// End of a queue wait.
    Wait(Place),
    /// Latest instant for a granted request to begin.
    Begin(RunRef),
    /// A connection that owns nothing is closed.
    Close(SessionRef),
    /// A refresh of the node's configuration is due, or the answer to one.
    Refresh(NodeIndex),
    /// The end of the node's drain.
    Drain(NodeIndex),
    /// A shard's next ping, or its answer to the last.
    Beat(ShardIndex),
    /// End of the wait for a command's answer.
    Command(CommandId),
    /// A binding is asked about next.
    Probe(ProviderIndex),
}

/// What the machine is told once besides the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Of the only jitter here, the prober's. `[D-58]`
    pub seed: u64,
    /// A command's answer must come within this. `[D-29]`
    pub command_ms: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            seed: 0,
            command_ms: COMMAND_MS_DEFAULT,
        }
    }
}

/// A debug build checks the whole state every so many steps, and more rarely the more there is of
/// it, so that checking stays a constant share of the work. A simulator checks every step itself.
const CHECK_STEPS_MIN: u64 = 64;

/// Decisions of the Edge: registry, resources, queue and leases as one atomicity domain.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Control {
    names: Arc<Names>,
    registry: Registry,
    resources: Resources,
    queue: Queue,
    leases: Leases,
    /// By node.
    tenures: Vec<Tenure>,
    next_refresh: RefreshId,
    timers: Timers<Timer>,
    pulse: Pulse,
    commands: Commands,
    prober: Prober,
    notices: Notices,
    counters: Counters,
    last: Now,
    /// Steps until the next check of a debug build.
    unchecked: u64,
}

impl Control {
    /// An Edge with nobody connected. `names` has been checked against `limits`.
    ///
    /// # Panics
    /// When `shards` is not in `1..=SHARDS_MAX`, or a table of `names` exceeds its limit.
    #[must_use]
    pub fn new(names: Arc<Names>, shards: usize, now: Now) -> Self {
        Self::tuned(names, shards, now, Tuning::default())
    }

    /// As `new`, told more.
    ///
    /// # Panics
    /// As `new`.
    #[must_use]
    pub fn tuned(names: Arc<Names>, shards: usize, now: Now, tuning: Tuning) -> Self {
        assert!(
            (1..=SHARDS_MAX as usize).contains(&shards),
            "shards are 1 to SHARDS_MAX"
        );
        assert!(
            names.nodes.len() <= NODES_MAX as usize,
            "names were not checked"
        );
        assert!(
            names.providers.len() <= PROVIDERS_MAX as usize,
            "names were not checked"
        );
        assert!(
            names.models.len() <= MODELS_MAX as usize,
            "names were not checked"
        );
        let mut control = Self {
            registry: Registry::new(shards, names.nodes.len()),
            resources: Resources::new(&names),
            queue: Queue::new(&names),
            leases: Leases::new(shards),
            tenures: names.nodes.iter().map(|_| Tenure::default()).collect(),
            next_refresh: RefreshId::FIRST,
            timers: Timers::default(),
            pulse: Pulse::new(shards, now),
            commands: Commands::new(names.nodes.len(), tuning.command_ms),
            prober: Prober::new(names.providers.len(), names.nodes.len(), tuning.seed),
            notices: Notices::default(),
            counters: Counters::default(),
            last: now,
            unchecked: CHECK_STEPS_MIN,
            names,
        };
        for (shard, due) in control.pulse.shards() {
            control.timers.set(due, Timer::Beat(shard));
        }
        control
    }

    /// Applies one event of a shard. Emits at most `EFFECTS_PER_STEP_MAX` effects into `out`, each
    /// for the shard that `Effect::shard` names, in that order.
    ///
    /// # Panics
    /// When `out` still holds effects, `now` runs backwards, or a shard broke the rules of `step`:
    /// the thread's guard ends the process then.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Out) {
        self.begin(now, out);
        let mut again = None;
        match event {
            Event::Register {
                session,
                reply_to,
                claimed,
                certified,
            } => self.register(now, session, reply_to, claimed, certified, out),
            Event::Ready {
                session,
                reply_to,
                claimed,
            } => self.ready(now, session, reply_to, claimed, out),
            Event::Closed { session, cause } => self.closed(now, session, cause),
            Event::GoAway { session } => self.go_away(session, out),
            Event::Expired { session } => self.expired(now, session, out),
            Event::Refreshed {
                session,
                refresh,
                status,
            } => self.refreshed(now, session, refresh, status),
            Event::Submit {
                client,
                model,
                operation,
                long,
                body_bytes,
            } => {
                let place = self.queue.new_place(model, Class::new(operation, long));
                self.submit(now, place, client, body_bytes, out);
            }
            Event::ClientGone { client } => self.client_gone(now, client),
            Event::Begun { run } => self.begun(run),
            Event::NotSent { run, client } => self.not_sent(now, run, client, out),
            Event::Terminal { run, ending } => self.terminal(now, run, ending),
            Event::Stalled {
                run,
                client,
                evidence,
                recovery,
            } => {
                let stalled = Stalled {
                    run,
                    client,
                    evidence,
                    recovery,
                };
                again = self.stalled(now, stalled, out);
            }
            Event::Lost { run } => self.lost(now, run),
            Event::Overdue { run } => self.overdue(now, run),
            Event::CommandAnswer {
                session,
                command,
                answer,
            } => self.command_answered(now, session, command, answer, out),
            Event::Pong { token } => self.pong(now, token),
        }
        self.pump(now, out);
        if let Some((place, waiter)) = again {
            // Behind the terminal's own pump; granting it is another step. `[D-18]`
            self.wait(place, waiter);
        }
        self.end();
    }

    /// Fires what is due at `now` and goes on with pending grants, within one step's bound. Call it
    /// when `next_deadline` has come or `has_pending`, after the events that have arrived.
    ///
    /// # Panics
    /// As `handle`.
    pub fn tick(&mut self, now: Now, out: &mut Out) {
        self.begin(now, out);
        for _ in 0..EFFECTS_PER_STEP_MAX - GRANTS_PER_STEP_MAX {
            let Some((_, timer)) = self.timers.pop_due(now) else {
                break;
            };
            self.fire(now, timer, out);
        }
        self.pump(now, out);
        self.end();
    }

    /// Asks and judges the shards at `now`, and nothing else. Call it also when there is no room for a
    /// step: it emits one ping at most for a shard, and none before that shard has answered its last,
    /// so one slot of each link that no step may use is enough. `[D-38]`
    ///
    /// # Panics
    /// As `handle`.
    pub fn watch(&mut self, now: Now, out: &mut Out) {
        self.begin(now, out);
        while let Some((shard, due)) = self.pulse.first_due(now) {
            self.timers.cancel(due, Timer::Beat(shard));
            self.beat(now, shard, out);
        }
        self.end();
    }

    /// The shard has taken effects, and the thread cannot take its events for want of room: what it
    /// answered may stand among them, so it gets its time again.
    pub fn heard(&mut self, now: Now, shard: ShardIndex) {
        self.advance(now);
        if let Some((before, next)) = self.pulse.heard(shard, now) {
            self.timers.cancel(before, Timer::Beat(shard));
            self.timers.set(next, Timer::Beat(shard));
        }
    }

    fn begin(&mut self, now: Now, out: &Out) {
        assert!(out.is_empty(), "effects of the last step were not drained");
        self.advance(now);
    }

    fn advance(&mut self, now: Now) {
        assert!(self.last <= now, "time ran backwards");
        self.last = now;
    }

    fn end(&mut self) {
        if !cfg!(debug_assertions) {
            return;
        }
        self.unchecked -= 1;
        if self.unchecked == 0 {
            let size = self.queue.waiting_total() as u64 + u64::from(self.leases.used());
            self.unchecked = CHECK_STEPS_MIN + 4 * size;
            if let Err(violation) = self.check() {
                panic!("{violation}");
            }
        }
    }

    fn fire(&mut self, now: Now, timer: Timer, out: &mut Out) {
        match timer {
            Timer::Wait(place) => self.wait_over(now, place, out),
            Timer::Begin(run) => self.begin_over(run, out),
            Timer::Close(session) => {
                if let Some(cause) = self.registry.close_due(session) {
                    out.push(Effect::Close { session, cause });
                }
            }
            Timer::Refresh(node) => self.refresh_due(now, node, out),
            Timer::Drain(node) => self.drain_due(now, node, out),
            Timer::Beat(shard) => self.beat(now, shard, out),
            Timer::Command(_) | Timer::Probe(_) => self.fire_health(now, timer, out),
        }
    }

    fn beat(&mut self, now: Now, shard: ShardIndex, out: &mut Out) {
        let (due, next) = self.pulse.due(shard, now);
        self.timers.set(next, Timer::Beat(shard));
        match due {
            Due::Ping { token } => {
                self.counters.pings += 1;
                out.push(Effect::Ping { token });
            }
            Due::Wait | Due::Wedged => {}
        }
    }

    fn pong(&mut self, now: Now, token: u64) {
        match self.pulse.pong(token, now) {
            Some((shard, before, next)) => {
                self.timers.cancel(before, Timer::Beat(shard));
                self.timers.set(next, Timer::Beat(shard));
            }
            None => self.counters.stale_events += 1,
        }
    }

    /// Tells the queue what the provider has room for now.
    fn offer(&mut self, provider: ProviderIndex) {
        self.queue.set_open(provider, self.resources.open(provider));
    }

    fn offer_node(&mut self, node: NodeIndex) {
        for entry in 0..self.resources.of_node(node).len() {
            self.offer(self.resources.of_node(node)[entry]);
        }
    }

    /// The earliest instant at which `tick` has something to do; it may have passed.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Now> {
        self.timers.next()
    }

    /// Waiters can be granted that the last step had no room for: call `tick` again. `[I3.7]`
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.queue.next().is_some()
    }

    /// A shard that has not answered in time: end the process. `[D-38]`
    #[must_use]
    pub const fn wedged(&self) -> Option<ShardIndex> {
        self.pulse.wedged()
    }

    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    #[must_use]
    pub const fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// Notices since the last call, oldest first. Taking them, or not, changes no decision.
    pub fn take_events(&mut self) -> impl Iterator<Item = NodeNotice> + '_ {
        self.notices.take()
    }

    /// What was decided by health evidence since the last call, oldest first. Taking it, or not,
    /// changes no decision. `[R-309]`
    pub fn take_health(&mut self) -> impl Iterator<Item = HealthNotice> + '_ {
        self.notices.take_health()
    }

    /// What became of stalled requests since the last call, one each. Taking it, or not, changes no
    /// decision. `[R-319]`
    pub fn take_recoveries(&mut self) -> impl Iterator<Item = RecoveryNotice> + '_ {
        self.notices.take_recoveries()
    }

    /// Cancelled runs that their nodes have not ended since the last call, each once. Taking them, or
    /// not, changes no decision. `[D-08]`
    pub fn take_overdue(&mut self) -> impl Iterator<Item = OverdueNotice> + '_ {
        self.notices.take_overdue()
    }

    /// Who owns the node id now, pending or ready.
    #[must_use]
    pub fn owner(&self, node: NodeIndex) -> Option<Owner> {
        self.registry.owner(node)
    }

    #[must_use]
    pub fn session_state(&self, session: SessionRef) -> SessionState {
        self.registry.state(session)
    }
}

/// The shard a ping's token belongs to; `None` for a token control did not make.
pub(crate) fn ping_shard(token: u64) -> Option<ShardIndex> {
    pulse::shard_of(token)
}
