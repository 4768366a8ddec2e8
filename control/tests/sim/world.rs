//! The world a seed makes: the core under test, what surrounds it, and how both are checked.
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::sync::Arc;

use iop_control::edge::{Control, Tuning};
use iop_control::names::Names;
use iop_control::step::{Effect, Event, Out};
use iop_proto::catalog::Operation;
use iop_proto::domain::{CommandKind, RefreshStatus};
use iop_proto::ids::{
    ModelIndex, NodeIndex, Now, ProviderIndex, RefreshId, SessionRef, ShardIndex,
};
use iop_proto::limits::EFFECTS_PER_STEP_MAX;
use iop_proto::reason::Reason;

use crate::acts::{self, ACTS};
use crate::catalog::Universe;
use crate::dice::Dice;
use crate::shadow::Shadow;
use crate::shard::{ClientState, Parcel, Person, Run, Shard};
use crate::tally::Tally;

/// A queue between two threads.
#[derive(Debug)]
pub(crate) struct Link<T> {
    queue: VecDeque<T>,
    /// Nothing comes out before this step.
    pub(crate) stalled: u64,
}

impl<T> Link<T> {
    const fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            stalled: 0,
        }
    }

    fn pop(&mut self, step: u64) -> Option<T> {
        if step < self.stalled {
            return None;
        }
        self.queue.pop_front()
    }
}

pub(crate) struct World {
    pub(crate) dice: Dice,
    control: Control,
    out: Out,
    pub(crate) now: Now,
    pub(crate) shards: Vec<Shard>,
    /// Per shard; its events are a queue of the shard's own, which never waits for room.
    pub(crate) effects: Vec<Link<Effect>>,
    pub(crate) events_stalled: Vec<u64>,
    pub(crate) parcels: Vec<Vec<Link<Parcel>>>,
    /// Effects that fit a link: control takes no event before each has room for a step. `[D-48]`
    effect_slots: usize,
    pub(crate) people: Vec<Person>,
    /// Reports that control has had lately, to be repeated.
    pub(crate) past: VecDeque<Event>,
    shadow: Shadow,
    universe: Universe,
    pub(crate) names: Arc<Names>,
    /// Largest capacity each provider ever had.
    most: BTreeMap<ProviderIndex, u32>,
    takes_notices: bool,
    checks_each: bool,
    pub(crate) steps: u64,
    pub(crate) digest: u64,
    pub(crate) tally: Tally,
}

/// Steps from one check of the whole state to the next.
const CHECK_STEPS: u64 = 64;
/// Reports kept to be repeated.
const PAST_MAX: usize = 16;
/// Rounds that everybody is answered within once faults have stopped, beyond one for each request
/// that waits or runs: a round begins and ends every run that it can.
const ROUNDS_EXTRA: usize = 4;

impl World {
    pub(crate) fn new(seed: u64, takes_notices: bool, checks_each: bool) -> Self {
        let mut dice = Dice::new(seed);
        let universe = Universe::new(&mut dice);
        let names = Arc::new(universe.file(&mut dice));
        let shards = 1 + dice.below(3);
        let step = EFFECTS_PER_STEP_MAX as usize;
        Self {
            control: Control::tuned(
                Arc::clone(&names),
                shards,
                Now::default(),
                Tuning {
                    seed,
                    ..Tuning::default()
                },
            ),
            out: Out::default(),
            now: Now::default(),
            shards: (0..shards)
                .map(|row| Shard::new(ShardIndex::new(row).unwrap()))
                .collect(),
            effects: (0..shards).map(|_| Link::new()).collect(),
            events_stalled: vec![0; shards],
            parcels: (0..shards)
                .map(|_| (0..shards).map(|_| Link::new()).collect())
                .collect(),
            effect_slots: dice.pick(&[step, step + 4, 2 * step, 16 * step]).unwrap(),
            people: Vec::new(),
            past: VecDeque::new(),
            shadow: Shadow::new(Arc::clone(&names)),
            universe,
            most: BTreeMap::new(),
            names,
            dice,
            takes_notices,
            checks_each,
            steps: 0,
            digest: 0xcbf2_9ce4_8422_2325,
            tally: Tally::default(),
        }
    }

    /// One thing happens somewhere.
    pub(crate) fn step(&mut self) {
        self.steps += 1;
        let row = acts::choose(self);
        let done = (ACTS[row].run)(self);
        self.tally.acts[row] += u64::from(done);
        let is_fault = done && ACTS[row].is_fault;
        if is_fault || self.checks_each || self.steps.is_multiple_of(CHECK_STEPS) {
            self.check();
        }
    }

    /// The whole state, and the books against the read model.
    fn check(&self) {
        if let Err(violation) = self.control.check() {
            panic!("{violation}");
        }
        self.shadow.compare(self.now, &self.control);
    }

    pub(crate) fn a_shard(&mut self) -> usize {
        self.dice.below(self.shards.len())
    }

    /// A node connection that can say something, and whose.
    pub(crate) fn a_speaker(&mut self, row: usize) -> Option<(usize, NodeIndex)> {
        let open = self.shards[row].speaking_sessions();
        self.dice.pick(&open)
    }

    // ── links ────────────────────────────────────────────────────────────────────────────────────

    fn has_room(&self) -> bool {
        let step = EFFECTS_PER_STEP_MAX as usize;
        self.effects
            .iter()
            .all(|link| link.queue.len() + step <= self.effect_slots)
    }

    pub(crate) fn deliver_event(&mut self) -> bool {
        let row = self.a_shard();
        if self.steps < self.events_stalled[row] || !self.has_room() {
            return false;
        }
        let Some(&event) = self.shards[row].events.front() else {
            return false;
        };
        if matches!(event, Event::CommandAnswer { .. }) && self.is_due() {
            // Whether a wait that is over was noticed before its answer is nobody's business here.
            self.tick();
            return true;
        }
        self.shards[row].events.pop_front();
        self.handle(event);
        true
    }

    fn handle(&mut self, event: Event) {
        self.shadow.told(self.now, &event);
        self.control.handle(self.now, event, &mut self.out);
        self.collect();
        match event {
            Event::Closed { .. }
            | Event::ClientGone { .. }
            | Event::Begun { .. }
            | Event::NotSent { .. }
            | Event::Terminal { .. }
            | Event::Stalled { .. }
            | Event::CommandAnswer { .. }
            | Event::Lost { .. } => {
                self.past.truncate(PAST_MAX - 1);
                self.past.push_front(event);
            }
            Event::Register { .. }
            | Event::Ready { .. }
            | Event::GoAway { .. }
            | Event::Expired { .. }
            | Event::Refreshed { .. }
            | Event::Submit { .. }
            | Event::Overdue { .. }
            | Event::Pong { .. } => {}
        }
    }

    /// A report that control has had already changes nothing, whoever has the slot by now.
    pub(crate) fn repeat(&mut self, event: Event) -> bool {
        let begun_now = matches!(event, Event::Begun { run } if self.shadow.knows(run));
        if begun_now || self.control.has_pending() {
            return false; // a run that goes on may not begin twice; a pending step would go on
        }
        let before = (self.control.snapshot(self.now), *self.control.counters());
        self.control.handle(self.now, event, &mut self.out);
        assert!(self.out.is_empty(), "{event:?} again was answered");
        let after = (self.control.snapshot(self.now), *self.control.counters());
        assert_eq!(before.0.nodes, after.0.nodes, "after {event:?} again");
        assert_eq!(before.0.models, after.0.models, "after {event:?} again");
        assert_eq!(before.0.edge, after.0.edge, "after {event:?} again");
        let mut counted = before.1;
        match event {
            Event::ClientGone { .. } => counted.clients_gone_late += 1,
            _ => counted.stale_events += 1,
        }
        assert_eq!(counted, after.1, "after {event:?} again");
        self.shadow.settle(&self.control);
        true
    }

    fn tick(&mut self) {
        self.control.tick(self.now, &mut self.out);
        self.collect();
    }

    fn collect(&mut self) {
        for effect in self.out.drain() {
            self.shadow.answered(self.now, &effect);
            write!(Digest(&mut self.digest), "{effect:?}").unwrap();
            self.effects[effect.shard().row()].queue.push_back(effect);
        }
        self.shadow.settle(&self.control);
        if self.takes_notices {
            self.tally.notices += self.control.take_events().count() as u64;
            self.tally.notices += self.control.take_health().count() as u64;
            self.tally.notices += self.control.take_recoveries().count() as u64;
        }
        self.control.take_finished().count();
    }

    fn is_due(&self) -> bool {
        let deadline = self.control.next_deadline();
        deadline.is_some_and(|at| at <= self.now)
    }

    /// An operator asks the node about one of its providers, or about itself.
    pub(crate) fn operator_asks(&mut self, node: NodeIndex) -> bool {
        if !self.has_room() {
            return false;
        }
        let rows = (0..self.names.providers.len()).filter_map(ProviderIndex::new);
        let of_node: Vec<_> = rows
            .filter(|&row| self.names.provider(row).node == node)
            .collect();
        let about = self.dice.pick(&of_node);
        let kind = CommandKind::Capabilities;
        let asked = self
            .control
            .command(self.now, node, kind, about, &mut self.out);
        self.collect();
        asked.is_ok()
    }

    pub(crate) fn deliver_effect(&mut self) -> bool {
        let row = self.a_shard();
        let Some(effect) = self.effects[row].pop(self.steps) else {
            return false;
        };
        if let Some(parcel) = self.shards[row].apply(effect, &mut self.people, &mut self.dice) {
            self.parcels[row][parcel.run.shard.row()]
                .queue
                .push_back(parcel);
        }
        true
    }

    pub(crate) fn deliver_parcel(&mut self) -> bool {
        let (from, to) = (self.a_shard(), self.a_shard());
        let Some(parcel) = self.parcels[from][to].pop(self.steps) else {
            return false;
        };
        self.shards[to].arrive(parcel, &mut self.people, &mut self.dice);
        true
    }

    pub(crate) fn time_passes(&mut self, ms: u64) {
        self.now = self.now.after_ms(ms);
        if self.has_room() {
            self.tick();
        }
    }

    // ── what shards are made to do ───────────────────────────────────────────────────────────────

    pub(crate) fn person_arrives(&mut self, row: usize) -> u32 {
        self.people.push(Person::default());
        self.shards[row].seat(self.people.len() - 1, ClientState::Idle)
    }

    pub(crate) fn submit(
        &mut self,
        row: usize,
        slot: u32,
        model: ModelIndex,
        operation: Operation,
        body_bytes: u32,
    ) {
        let long = body_bytes >= self.names.model(model).long_threshold_bytes;
        self.shards[row].submit(slot, &mut self.people, |client| Event::Submit {
            client,
            model,
            operation,
            long,
            body_bytes,
        });
    }

    pub(crate) fn register(&mut self, row: usize, slot: usize, claimed: Option<NodeIndex>) {
        let (session, node) = self.shards[row].tells(slot);
        self.shards[row].events.push_back(Event::Register {
            session,
            reply_to: self.steps,
            claimed,
            certified: Some(node),
        });
    }

    pub(crate) fn ready(&mut self, row: usize, slot: usize, claimed: NodeIndex) {
        let (session, _) = self.shards[row].tells(slot);
        self.shards[row].events.push_back(Event::Ready {
            session,
            reply_to: self.steps,
            claimed: Some(claimed),
        });
    }

    /// The node answers a refresh.
    pub(crate) fn refreshed(
        &mut self,
        row: usize,
        session: SessionRef,
        refresh: RefreshId,
        status: RefreshStatus,
    ) {
        self.shards[row].events.push_back(Event::Refreshed {
            session,
            refresh,
            status,
        });
    }

    // ── an operator ──────────────────────────────────────────────────────────────────────────────

    /// Another configuration; what is due at once happens at once, as room allows.
    pub(crate) fn reload(&mut self) -> bool {
        if !self.has_room() {
            return false;
        }
        let file = self.universe.file(&mut self.dice);
        let names = Arc::new(self.names.succeed(&file).unwrap().names);
        for (row, provider) in self.names.providers.iter().enumerate() {
            let most = self.most.entry(ProviderIndex::new(row).unwrap());
            let most = most.or_default();
            *most = provider.capacity.max(*most);
        }
        self.names = Arc::clone(&names);
        self.shadow.reloaded(Arc::clone(&names));
        self.control.reload(self.now, names);
        self.run_due();
        true
    }

    pub(crate) fn drain_node(&mut self, node: NodeIndex) -> bool {
        let drained = self.control.drain_node(self.now, node);
        self.shadow.drained(node, drained, self.now);
        self.run_due();
        drained.is_ok()
    }

    fn run_due(&mut self) {
        let is_due = |control: &Control, now| control.next_deadline().is_some_and(|at| at <= now);
        while is_due(&self.control, self.now) && self.has_room() {
            self.tick();
        }
    }

    pub(crate) fn close(&mut self, row: usize, slot: usize, cause: Reason) {
        self.shards[row].close(slot, cause, &mut self.people, &mut self.dice);
    }

    pub(crate) fn begin(&mut self, row: usize, slot: usize) -> bool {
        // A begin whose report is overtaken by the terminal may never be told.
        let reports = !self.dice.chance(10) || self.shards[row].is_silent(slot);
        let Some(run) = self.shards[row].begin(slot, reports) else {
            return false;
        };
        self.check_provider_load(row);
        if !reports {
            self.end(row, run);
        }
        true
    }

    /// What a provider sees: never more at once over one connection than it has capacity for.
    fn check_provider_load(&self, row: usize) {
        let mut load = BTreeMap::new();
        for (_, run) in self.shards[row].runs.values() {
            if let Run::Live {
                provider,
                session,
                begun: true,
                ..
            } = run
            {
                *load.entry((*session, *provider)).or_insert(0) += 1;
            }
        }
        for ((_, provider), count) in load {
            let before = self.most.get(&provider).copied().unwrap_or(0);
            let capacity = self.names.provider(provider).capacity.max(before);
            assert!(count <= capacity, "{provider:?} runs {count} of {capacity}");
        }
    }

    // ── the end: faults have stopped ─────────────────────────────────────────────────────────────

    /// Nobody new comes. Either every node comes back and everything is answered, or every node
    /// stays away and every wait ends; in both cases nothing is left anywhere, and the Edge serves.
    pub(crate) fn drain(&mut self) {
        let nodes_return = self.dice.chance(2);
        self.stop_faults();
        self.settle_all(nodes_return);
        for model in (0..self.names.models.len()).filter_map(ModelIndex::new) {
            let row = self.a_shard();
            let slot = self.person_arrives(row);
            self.submit(row, slot, model, Operation::ChatCompletions, 1);
        }
        let before = self.control.counters().returns_terminal;
        self.settle_all(true);
        let served = (0..self.names.models.len()).filter_map(ModelIndex::new);
        let served = served.filter(|&model| {
            let names = &self.names;
            names.candidates(model, Operation::ChatCompletions) > 0
        });
        let ended = self.control.counters().returns_terminal - before;
        assert_eq!(ended, served.count() as u64, "each model is served");
        self.check_rest();
        self.tally.count(self.control.counters());
    }

    /// Links flow, and every node connection that a fault may have touched is gone.
    fn stop_faults(&mut self) {
        self.events_stalled.fill(0);
        for link in &mut self.effects {
            link.stalled = 0;
        }
        for link in self.parcels.iter_mut().flatten() {
            link.stalled = 0;
        }
        for row in 0..self.shards.len() {
            for slot in self.shards[row].open_sessions() {
                self.close(row, slot, Reason::PeerClosed);
            }
        }
        self.deliver_all();
    }

    /// Rounds until nobody waits and nothing runs: as many as there are requests, at most.
    fn settle_all(&mut self, nodes_return: bool) {
        self.deliver_all();
        let bound = self.shadow.waiting() + self.shadow.runs() + ROUNDS_EXTRA;
        let mut rounds = 0;
        while self.shadow.waiting() > 0 || self.shadow.runs() > 0 {
            rounds += 1;
            let (waiting, runs) = (self.shadow.waiting(), self.shadow.runs());
            assert!(
                rounds <= bound,
                "after {bound} rounds {waiting} wait and {runs} run"
            );
            self.steps += 1;
            self.settle_round(nodes_return);
        }
        self.tally.rounds_max = self.tally.rounds_max.max(rounds as u64);
        self.check();
    }

    fn settle_round(&mut self, nodes_return: bool) {
        for row in 0..self.shards.len() {
            for slot in self.shards[row].open_sessions() {
                while self.begin(row, slot) {}
            }
            for run in self.shards[row].begun_rows() {
                self.end(row, run);
            }
        }
        if nodes_return {
            for row in 0..self.names.nodes.len() {
                self.bring_back(NodeIndex::new(row).unwrap());
            }
        }
        self.deliver_all();
        self.time_passes(if nodes_return { 10 } else { 31_000 });
        self.deliver_all();
    }

    /// Every link runs empty, in a random order of links.
    fn deliver_all(&mut self) {
        while !self.is_quiet() {
            self.deliver_event();
            self.deliver_effect();
            self.deliver_parcel();
            if self.control.has_pending() && self.has_room() {
                self.tick();
            }
        }
    }

    fn bring_back(&mut self, node: NodeIndex) {
        if self.control.owner(node).is_some() || !self.names.has_node(node) {
            return;
        }
        let row = self.a_shard();
        if let Some(slot) = self.shards[row].dial(node) {
            self.register(row, slot, Some(node));
            self.ready(row, slot, node);
        }
    }

    fn is_quiet(&self) -> bool {
        self.shards.iter().all(|shard| shard.events.is_empty())
            && self.effects.iter().all(|link| link.queue.is_empty())
            && self
                .parcels
                .iter()
                .flatten()
                .all(|link| link.queue.is_empty())
            && !self.control.has_pending()
    }

    /// Everything is given back, and each client has heard exactly once per question.
    fn check_rest(&self) {
        let edge = self.control.snapshot(self.now).edge;
        assert_eq!((edge.leases_held, edge.runs, edge.waiting), (0, 0, 0));
        assert_eq!(edge.leases_taken, edge.leases_returned);
        for (row, shard) in self.shards.iter().enumerate() {
            assert!(shard.is_at_rest(), "shard {row} holds a run");
        }
        for (who, person) in self.people.iter().enumerate() {
            let heard = if person.gone {
                person.answered <= person.asked && person.answered + 1 >= person.asked
            } else {
                person.answered == person.asked
            };
            assert!(heard, "client {who}: {person:?}");
        }
    }
}

/// FNV-1a over everything written.
struct Digest<'a>(&'a mut u64);

impl Write for Digest<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for byte in text.bytes() {
            *self.0 = (*self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}
