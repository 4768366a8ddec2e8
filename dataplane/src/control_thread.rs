//! The thread around `Control`: events in, one step at a time, effects out.
//!
//! Lives on: the control thread. View: the whole Edge. Bound: `EVENTS_PER_LINK_TURN_MAX` events of a
//! link per turn, links in turn; room for one whole step on every link before an event is taken, and
//! for a ping besides.
//!
//! Only control reserves: a shard drains its effects without needing room of its own, so room comes
//! back and two full rings cannot wait for each other. `[D-48]` A shard that does not drain is asked
//! and judged without room for a step, or the standstill would have no end. `[D-38]`
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use iop_control::edge::{Control, HealthNotice, NodeChange, Outcome};
use iop_control::edge::{OverdueNotice, Recovery, RecoveryNotice};
use iop_control::names::Names;
use iop_control::step::{CommandId, Effect, Out};
use iop_proto::ids::{NodeIndex, Now, ProviderIndex, ShardIndex};
use iop_proto::limits::{EFFECTS_PER_STEP_MAX, EVENTS_PER_LINK_TURN_MAX, LINK_SLOTS, SHARDS_MAX};
use iop_proto::reason::Reason;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

use crate::admin::{CommandError, CommandRequest, CommandText, SnapshotRequest};
use crate::epoch::Epoch;
use crate::lanes::{ControlEnd, Waker};
use crate::metrics::{ControlMetric, ControlMetrics};
use crate::shard::uring::{Completion, Kind, Ring, RingError};

/// Longest sleep, ms: what the published counters may be late by.
const SLEEP_MS: u64 = 1_000;
/// A full link is looked at again after this long: its shard makes room without ringing.
const FULL_MS: u64 = 1;
/// The control thread's ring holds the read of its bell alone.
const COMPLETIONS: u32 = 64;
/// Slots of each link that are free before a step. A shard's one unanswered ping needs no step: its
/// slot is left by every step, and free again when it is answered.
const STEP_ROOM: usize = EFFECTS_PER_STEP_MAX as usize + PING_ROOM;
const PING_ROOM: usize = 1;
const _: () = assert!(STEP_ROOM <= LINK_SLOTS as usize && SHARDS_MAX <= EFFECTS_PER_STEP_MAX);
/// Between two lines about runs that a node does not end: it could make any number of them.
const OVERDUE_LINE_MS: u64 = 10_000;
/// Ticks of one turn: each is a whole step.
const TICKS_PER_TURN_MAX: usize = 16;

/// What an operator asks of control.
#[derive(Debug)]
pub enum Command {
    /// Take another configuration. Control first, then every shard, in order with its effects.
    Reload(Arc<Epoch>),
    /// A configuration or its certificates could not be taken: it is counted where all is counted.
    ReloadRefused,
    /// Take the node of that id out; answered with the leases it still finishes.
    DrainNode {
        node_id: String,
        reply: Sender<Result<u32, Reason>>,
    },
    /// Tell every shard to finish what runs. `[D-07]`
    Drain { grace_ms: u32 },
    /// Tell every shard to end what still runs.
    Stop,
}

/// What the thread is given.
#[derive(Debug)]
pub struct ControlParts {
    pub control: Control,
    pub links: Vec<ControlEnd>,
    pub waker: Waker,
    pub snapshots: Receiver<SnapshotRequest>,
    pub commands: Receiver<Command>,
    /// Commands of operators to nodes, and the nodes' whole answers.
    pub operators: Receiver<CommandRequest>,
    pub answers: Receiver<CommandText>,
    pub metrics: ControlMetrics,
    pub started: Instant,
}

/// The running control thread's state.
#[derive(Debug)]
pub struct Runner {
    parts: ControlParts,
    ring: Ring,
    inbox: Vec<Completion>,
    out: Out,
    now: Now,
    /// The link whose turn it is. Kept across turns, so that running out of room favours nobody.
    next: usize,
    /// What went onto each link.
    lanes: Vec<Lane>,
    /// Who waits for which command, at most `OPERATOR_COMMANDS_MAX`.
    asked: Vec<(CommandId, Asker)>,
    /// When runs that a node does not end were last told of, and how many were not since.
    overdue_told: Option<Now>,
    overdue_untold: u64,
    /// Words whose end control has not told yet; each is of one in `asked`.
    texts: Vec<CommandText>,
}

/// What went onto one link.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// It got effects since its shard was rung.
    unrung: bool,
    /// Effects of all time.
    pushed: u64,
    /// Of these, what the shard had taken at the last look.
    taken: u64,
}

type Asker = oneshot::Sender<Result<CommandText, CommandError>>;

impl Runner {
    /// Makes the thread's ring.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn new(parts: ControlParts) -> Result<Self, RingError> {
        Ok(Self {
            ring: Ring::new(COMPLETIONS)?,
            inbox: Vec::with_capacity(64),
            out: Out::default(),
            now: Now::default(),
            next: 0,
            lanes: vec![Lane::default(); parts.links.len()],
            asked: Vec::new(),
            texts: Vec::new(),
            overdue_told: None,
            overdue_untold: 0,
            parts,
        })
    }

    /// Runs for ever.
    pub fn run(mut self) -> ! {
        let wake = self.parts.waker.clone();
        self.ring.read_wake(wake.fd().as_raw_fd());
        loop {
            let timeout = self.sleep_for();
            self.ring.submit_and_wait(timeout);
            wake.awake();
            self.inbox.clear();
            self.ring.reap(&mut self.inbox);
            if self
                .inbox
                .iter()
                .any(|done| done.token.kind() == Kind::Wake)
            {
                self.ring.read_wake(wake.fd().as_raw_fd());
            }
            let elapsed = self.parts.started.elapsed().as_nanos();
            self.turn(Now::from_nanos(u64::try_from(elapsed).unwrap_or(u64::MAX)));
            if let Some(shard) = self.parts.control.wedged() {
                let shard = shard.row();
                error!(shard, "the shard does not answer; the Edge ends");
                std::process::abort();
            }
        }
    }

    fn turn(&mut self, now: Now) {
        self.now = now.max(self.now);
        for _ in 0..self.parts.links.len() {
            if !self.has_room() {
                break; // this link keeps its place
            }
            self.serve(self.next);
            self.next = (self.next + 1) % self.parts.links.len();
        }
        self.watch();
        self.ticks();
        self.commands();
        self.operators();
        self.ticks(); // what an order has made due
        for (link, lane) in self.parts.links.iter().zip(&mut self.lanes) {
            if std::mem::take(&mut lane.unrung) {
                link.shard.ring();
            }
        }
        self.answer_operators();
        while let Ok(request) = self.parts.snapshots.try_recv() {
            request.answer(self.parts.control.snapshot(self.now));
        }
        self.observe();
    }

    fn serve(&mut self, link: usize) {
        for _ in 0..EVENTS_PER_LINK_TURN_MAX {
            if !self.has_room() {
                return;
            }
            let Some(event) = self.parts.links[link].events.pop() else {
                return;
            };
            self.parts.control.handle(self.now, event, &mut self.out);
            self.push_effects();
        }
    }

    /// Whether the shards answer. Behind the events, where the answers are; before anything that
    /// needs room. While there is none no answer is taken, and a shard that takes effects, or has
    /// taken all, lives.
    fn watch(&mut self) {
        let is_deaf = !self.has_room();
        let links = self.parts.links.iter_mut().zip(&mut self.lanes);
        for (row, (link, lane)) in links.enumerate() {
            let unread = link.effects.capacity() - link.effects.free();
            let taken = lane.pushed - unread as u64;
            let lives = taken > std::mem::replace(&mut lane.taken, taken) || unread == 0;
            if is_deaf && lives {
                let shard = ShardIndex::new(row).expect("as many shards as were configured");
                self.parts.control.heard(self.now, shard);
            }
        }
        self.parts.control.watch(self.now, &mut self.out);
        self.push_effects();
    }

    fn ticks(&mut self) {
        for _ in 0..TICKS_PER_TURN_MAX {
            let due = self
                .parts
                .control
                .next_deadline()
                .is_some_and(|at| at <= self.now);
            if !(due || self.parts.control.has_pending()) || !self.has_room() {
                return;
            }
            self.parts.control.tick(self.now, &mut self.out);
            self.push_effects();
        }
    }

    fn commands(&mut self) {
        while self.has_room() && self.has_epoch_room() {
            let Ok(command) = self.parts.commands.try_recv() else {
                return;
            };
            match command {
                Command::Reload(epoch) => self.reload(&epoch),
                Command::ReloadRefused => self.parts.metrics.inc(ControlMetric::ReloadsRefused),
                Command::DrainNode { node_id, reply } => {
                    let node = self.parts.control.names().node_by_id(node_id.as_bytes());
                    let control = &mut self.parts.control;
                    let drained = node.ok_or(Reason::NodeUnknown);
                    let drained = drained.and_then(|node| control.drain_node(self.now, node));
                    let _asker_gone = reply.try_send(drained);
                }
                Command::Drain { grace_ms } => {
                    self.tell_shards(|shard| Effect::Drain { shard, grace_ms });
                }
                Command::Stop => self.tell_shards(|shard| Effect::Stop { shard }),
            }
        }
    }

    /// What operators ask of nodes.
    fn operators(&mut self) {
        while self.has_room() {
            let Ok(request) = self.parts.operators.try_recv() else {
                return;
            };
            match self.ask(&request) {
                Ok(command) => self.asked.push((command, request.reply)),
                Err(error) => {
                    let _gone = request.reply.send(Err(error));
                }
            }
        }
    }

    fn ask(&mut self, request: &CommandRequest) -> Result<CommandId, CommandError> {
        let names = self.parts.control.names();
        let node = names
            .node_by_id(request.node.as_bytes())
            .ok_or(CommandError::NodeUnknown)?;
        let provider = request
            .provider
            .as_ref()
            .map(|id| provider_of(names, node, id).ok_or(CommandError::ProviderUnknown))
            .transpose()?;
        let control = &mut self.parts.control;
        let asked = control.command(self.now, node, request.kind, provider, &mut self.out);
        self.push_effects();
        asked.map_err(CommandError::from)
    }

    /// Ends of operators' commands: the node's words, or why there are none. A shard sends the
    /// words before it reports, so those of every end known by now are here; others are early.
    fn answer_operators(&mut self) {
        self.texts.extend(self.parts.answers.try_iter());
        for (command, end) in self.parts.control.take_finished() {
            let asker = self.asked.iter().position(|&(known, _)| known == command);
            let Some(asker) = asker else { continue };
            let (_, asker) = self.asked.swap_remove(asker);
            let text = self.texts.iter().position(|text| text.command == command);
            let outcome = text.map(|text| self.texts.swap_remove(text));
            let _gone = asker.send(outcome.ok_or_else(|| CommandError::of(end)));
        }
        let asked = &self.asked;
        self.texts
            .retain(|text| asked.iter().any(|&(known, _)| known == text.command));
    }

    /// Nothing that control decides under the new configuration reaches a shard before it.
    fn reload(&mut self, epoch: &Arc<Epoch>) {
        let names = Arc::clone(&epoch.names);
        self.parts.control.reload(self.now, names);
        for link in &mut self.parts.links {
            let pushed = link.epochs.push(Arc::clone(epoch));
            pushed.expect("room was looked for before the command was taken");
        }
        let epoch = epoch.number;
        self.tell_shards(|shard| Effect::Configure { shard, epoch });
    }

    fn tell_shards(&mut self, effect: impl Fn(ShardIndex) -> Effect) {
        for row in 0..self.parts.links.len() {
            let shard = ShardIndex::new(row).expect("as many shards as were configured");
            push(&mut self.parts.links, &mut self.lanes, effect(shard));
        }
    }

    fn has_epoch_room(&mut self) -> bool {
        let mut links = self.parts.links.iter_mut();
        links.all(|link| link.epochs.has_room(1))
    }

    fn push_effects(&mut self) {
        for effect in self.out.drain() {
            push(&mut self.parts.links, &mut self.lanes, effect);
        }
    }

    /// Any step may address any link, so each needs room for a whole step.
    fn has_room(&mut self) -> bool {
        let mut links = self.parts.links.iter_mut();
        links.all(|link| link.effects.free() >= STEP_ROOM)
    }

    fn sleep_for(&mut self) -> Duration {
        if !self.has_room() {
            return Duration::from_millis(FULL_MS);
        }
        if self.parts.control.has_pending() {
            return Duration::ZERO;
        }
        self.parts.waker.prepare();
        let waiting = self
            .parts
            .links
            .iter_mut()
            .any(|link| !link.events.is_empty());
        let asked = !self.parts.snapshots.is_empty()
            || !self.parts.commands.is_empty()
            || !self.parts.operators.is_empty();
        if waiting || asked {
            return Duration::ZERO;
        }
        let longest = Duration::from_millis(SLEEP_MS);
        let elapsed = self.parts.started.elapsed();
        self.parts.control.next_deadline().map_or(longest, |at| {
            Duration::from_nanos(at.as_nanos())
                .saturating_sub(elapsed)
                .min(longest)
        })
    }

    /// Publishes counters and says what changed; nothing here decides anything.
    fn observe(&mut self) {
        self.parts.metrics.copy(self.parts.control.counters());
        let names = std::sync::Arc::clone(self.parts.control.names());
        for notice in self.parts.control.take_events() {
            let node = names.node(notice.node).id.as_str();
            match notice.change {
                NodeChange::Connected => info!(node, "node connected"),
                NodeChange::Disconnected { cause } => {
                    info!(node, cause = cause.label(), "node disconnected");
                }
            }
        }
        for notice in self.parts.control.take_health() {
            tell_health(&names, &notice);
        }
        for notice in self.parts.control.take_recoveries() {
            tell_recovery(&names, &notice);
        }
        for notice in self.parts.control.take_overdue() {
            let at = notice.at;
            let told = self.overdue_told;
            if told.is_some_and(|told| at.ms_since(told) < OVERDUE_LINE_MS) {
                self.overdue_untold += 1;
                continue;
            }
            self.overdue_told = Some(at);
            tell_overdue(&names, &notice, std::mem::take(&mut self.overdue_untold));
        }
    }
}

/// One line per decision about a provider's health; configured names and closed words alone.
/// `[R-316]` `[R-320]`…`[R-323]`
fn tell_health(names: &Names, notice: &HealthNotice) {
    let provider = names.provider(notice.provider);
    info!(
        node = names.node(provider.node).id.as_str(),
        provider = provider.id.as_str(),
        source = notice.source.label(),
        health = notice.health.map_or("", |health| health.health()),
        outcome = notice.outcome.label(),
        fault = notice.fault.map_or("", |fault| fault.label()),
        "edge_provider_health_observation"
    );
    if notice.outcome == Outcome::Lowered {
        let node = names.node(provider.node).id.as_str();
        warn!(node, provider = provider.id.as_str(), "provider put aside");
    }
}

/// One line per stalled request, at the end of its story. `[R-319]`
fn tell_recovery(names: &Names, notice: &RecoveryNotice) {
    let failed = names.provider(notice.failed);
    info!(
        model = names.model(notice.model).name.as_str(),
        node = names.node(failed.node).id.as_str(),
        provider = failed.id.as_str(),
        eligibility = notice.eligibility.label(),
        result = notice.result.map_or("", Recovery::label),
        "edge_liveness_recovery_observation"
    );
}

/// A lease that stays taken because a node does not answer; `others`: of any node, untold since the
/// last line. `[D-08]`
fn tell_overdue(names: &Names, notice: &OverdueNotice, others: u64) {
    let provider = names.provider(notice.provider);
    let node = names.node(provider.node).id.as_str();
    let provider = provider.id.as_str();
    warn!(
        node,
        provider, others, "a cancelled run is not ended; its lease stays held"
    );
}

fn provider_of(names: &Names, node: NodeIndex, id: &str) -> Option<ProviderIndex> {
    let mut rows = names.providers.iter();
    let row = rows.position(|provider| provider.node == node && provider.id == id)?;
    // The row of one that is gone stays, and nobody knows it.
    ProviderIndex::new(row).filter(|&provider| names.has_provider(provider))
}

fn push(links: &mut [ControlEnd], lanes: &mut [Lane], effect: Effect) {
    let row = effect.shard().row();
    let pushed = links[row].effects.push(effect);
    pushed.expect("room was reserved before the event was taken");
    lanes[row].unrung = true;
    lanes[row].pushed += 1;
}

#[cfg(test)]
mod tests {
    use iop_control::step::Event;
    use iop_proto::catalog::Operation;
    use iop_proto::ids::{ClientRef, ModelIndex, SlotGeneration};
    use iop_proto::limits::LINK_SLOTS;

    use super::*;
    use crate::fixture;
    use crate::lanes::{ShardEnd, link};
    use crate::shard::outbox::Outbox;

    /// Requests of each shard: several rings full.
    const REQUESTS: u32 = 5 * LINK_SLOTS;

    struct Shard {
        lanes: ShardEnd,
        outbox: Outbox,
        answered: u32,
    }

    impl Shard {
        /// Pushes what it owes; whether there was room for some of it.
        fn push(&mut self) -> bool {
            self.outbox.push(&mut self.lanes.events)
        }

        /// Takes every answer that is there: each request's, in order, once.
        fn drain(&mut self) {
            while self.take() {}
        }

        /// Takes one effect, if there is one.
        fn take(&mut self) -> bool {
            match self.lanes.effects.pop() {
                Some(Effect::Refuse { client, .. }) => {
                    assert_eq!(client.slot, self.answered, "lost, repeated or out of order");
                    self.answered += 1;
                }
                Some(Effect::Ping { token }) => self.outbox.owe(Event::Pong { token }),
                Some(other) => panic!("{other:?}"),
                None => return false,
            }
            true
        }

        fn is_full(&mut self) -> bool {
            let waits = self.outbox.is_waiting() && self.lanes.events.free() == 0;
            waits && !self.lanes.effects.is_empty()
        }
    }

    /// Two shards that owe control more than any ring holds, and control's thread.
    fn edge() -> (Runner, Vec<Shard>) {
        let waker = || Waker::new().expect("a descriptor");
        let control = waker();
        let (mut shards, mut links) = (Vec::new(), Vec::new());
        for row in 0..2 {
            let (lanes, far) = link(&waker(), &control);
            let mut outbox = Outbox::new(1, REQUESTS as usize);
            for slot in 0..REQUESTS {
                outbox.owe(Event::Submit {
                    client: ClientRef {
                        shard: ShardIndex::new(row).unwrap(),
                        slot,
                        generation: SlotGeneration::FIRST,
                    },
                    model: ModelIndex::new(0).unwrap(),
                    operation: Operation::ChatCompletions,
                    long: false,
                    body_bytes: 2, // more than may wait: refused at once
                });
            }
            shards.push(Shard {
                lanes,
                outbox,
                answered: 0,
            });
            links.push(far);
        }
        let (_snapshots, snapshots) = crossbeam_channel::bounded(1);
        let (_commands, commands) = crossbeam_channel::bounded(1);
        let (_operators, operators) = crossbeam_channel::bounded(1);
        let (_answers, answers) = crossbeam_channel::bounded(1);
        let runner = Runner::new(ControlParts {
            control: Control::new(fixture::names(), 2, Now::default()),
            links,
            waker: control,
            snapshots,
            commands,
            operators,
            answers,
            metrics: ControlMetrics::new().0,
            started: Instant::now(),
        });
        (runner.expect("a ring"), shards)
    }

    /// Turns of everybody, in which only those shards take answers that `drains`; until nothing moves.
    fn turn_until_still(runner: &mut Runner, shards: &mut [Shard], drains: fn(usize) -> bool) {
        for _ in 0..2 * REQUESTS {
            let mut moved = false;
            for (row, shard) in shards.iter_mut().enumerate() {
                moved |= shard.push();
                if drains(row) {
                    let before = shard.answered;
                    shard.drain();
                    moved |= shard.answered > before;
                }
            }
            runner.turn(Now::default());
            if !moved {
                return;
            }
        }
        panic!("it never comes to rest");
    }

    #[test]
    fn an_operator_finds_a_provider_by_its_node_while_it_is_configured() {
        let with = fixture::names();
        let (node, other) = (NodeIndex::new(0).unwrap(), NodeIndex::new(1).unwrap());
        assert_eq!(provider_of(&with, node, "pv1"), ProviderIndex::new(0));
        assert_eq!(provider_of(&with, other, "pv1"), None);
        let mut without = Names::clone(&with);
        without.providers.clear();
        without.models.clear();
        let gone = with.succeed(&without).unwrap().names;
        assert_eq!(provider_of(&gone, node, "pv1"), None, "gone with its file");
        let back = gone.succeed(&with).unwrap().names;
        assert_eq!(provider_of(&back, node, "pv1"), ProviderIndex::new(0));
    }

    /// Proves [S-72], [D-48].
    #[test]
    fn s72_two_full_rings_do_not_wait_for_each_other() {
        let (mut runner, mut shards) = edge();
        turn_until_still(&mut runner, &mut shards, |_| false);
        assert!(shards.iter_mut().all(Shard::is_full), "both ways are full");
        assert!(!runner.has_room());
        // One shard that takes its answers frees nobody while the other's ring has no room.
        turn_until_still(&mut runner, &mut shards, |row| row == 0);
        assert!(!runner.has_room() && shards[0].answered < REQUESTS);
        turn_until_still(&mut runner, &mut shards, |_| true);
        for shard in &mut shards {
            assert_eq!(shard.answered, REQUESTS);
            assert!(!shard.outbox.is_waiting() && shard.lanes.effects.is_empty());
        }
    }

    /// Passes time until a shard is found wedged, at most `until_ms`. The second shard does its work;
    /// the first takes as many effects a turn as `first` says.
    fn pass(
        runner: &mut Runner,
        shards: &mut [Shard],
        until_ms: u64,
        first: usize,
    ) -> Option<(usize, u64)> {
        while runner.now < Now::from_nanos(until_ms * 1_000_000) {
            (0..first).for_each(|_| assert!(shards[0].take(), "its link is not full"));
            shards[1].drain();
            for shard in &mut *shards {
                shard.push();
            }
            runner.turn(runner.now.after_ms(100));
            if let Some(shard) = runner.parts.control.wedged() {
                return Some((shard.row(), runner.now.ms_since(Now::default())));
            }
        }
        None
    }

    /// Proves [D-38].
    #[test]
    fn d38_a_shard_whose_link_is_full_is_found_unless_it_takes_from_it() {
        let (mut runner, mut shards) = edge();
        turn_until_still(&mut runner, &mut shards, |row| row == 1);
        assert!(!runner.has_room() && shards[0].is_full());
        // Slow, and so is control; but both go on, and nobody's answer is missed.
        assert_eq!(pass(&mut runner, &mut shards, 30_000, 1), None);
        assert!(!runner.has_room(), "full all the time");
        assert!(
            runner.parts.control.counters().pings >= 2,
            "asked with no room for a step"
        );
        // Then it stops; the other, whose answers control cannot take either, is not blamed.
        let found = pass(&mut runner, &mut shards, 60_000, 0);
        let (shard, at_ms) = found.expect("the shard is never found");
        assert_eq!(shard, 0);
        assert!((34_000..=36_000).contains(&at_ms), "{at_ms}");
    }

    /// Proves [D-38].
    #[test]
    fn d38_a_shard_that_stops_between_two_questions_is_asked_though_its_link_is_full() {
        let (mut runner, mut shards) = edge();
        turn_until_still(&mut runner, &mut shards, |row| row == 1);
        assert!(!runner.has_room() && runner.parts.control.counters().pings == 0);
        let found = pass(&mut runner, &mut shards, 60_000, 0);
        assert_eq!(
            found,
            Some((0, 6_000)),
            "a second to the question, five for its answer"
        );
    }
}
