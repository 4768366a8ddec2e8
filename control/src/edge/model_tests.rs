//! Every order of events of the smallest Edge that can go wrong: two node ids, three connections on
//! two shards, two providers of capacity 1, two clients. `[states §8]`
//!
//! Breadth first over the real core, cloned, and modelled shards around it; a state that was met
//! before, whatever its clock and its counts of tenants, is not met again. Time is abstracted: a
//! deadline that is set may fire at any moment, before or after any other. In every state every
//! invariant holds, and a share of them is driven on until everybody has been answered.
//!
//! Bound: `IOP_MODEL_DEPTH` steps from each start (`DEPTH`), or `STATES_MAX` states; what stopped it
//! is printed. `cargo xtask model` goes deeper.
use std::collections::{BTreeMap, VecDeque};

use iop_proto::catalog::{Operation, ProviderKind};
use iop_proto::ids::{ClientRef, ModelIndex, SlotGeneration};
use iop_proto::reason::Reason;

use super::*;
use crate::names::{
    AdapterName, Gone, ModelName, NodeName, NodePayload, ProviderName, QueueLimits, Waits,
};
use crate::step::Ending;

mod print;
mod search;

/// Rounds until everybody is answered, once nothing more goes wrong.
const ROUNDS_MAX: usize = 12;

/// Reports a shard may owe before somebody on it does something new.
const OWED_MAX: usize = 2;

const SHARDS: usize = 2;
/// Where each connection's socket is, and the node ids it may claim.
const CONNECTIONS: [(usize, u32, &[usize]); 3] = [(0, 0, &[0]), (1, 0, &[0, 1]), (1, 1, &[1])];
/// The models each client asks for: the first is served by both providers, the second by one.
const ASKS: [&[usize]; 2] = [&[0], &[0, 1]];

#[derive(Clone, Copy, Debug)]
enum Action {
    Event(usize),
    Effect(usize),
    Parcel(usize, usize),
    /// Dials if the connection is closed.
    Register(usize, usize),
    Ready(usize),
    GoAway(usize),
    Close(usize),
    Submit(usize, usize),
    Leave(usize),
    Begin(usize),
    End(usize, u32),
    Fire(Timer),
}

#[derive(Clone, Debug)]
struct Connection {
    generation: SlotGeneration,
    open: Option<Open>,
}

#[derive(Clone, Debug)]
struct Open {
    node: usize,
    /// Its shard has sent the acknowledgement.
    ready: bool,
    /// What its node has said already: each a few times, or the states never end.
    said: Said,
    writer: VecDeque<RunRef>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Said {
    ready: bool,
    /// Once more, after the acknowledgement.
    ready_again: bool,
    another_id: bool,
    goodbye: bool,
}

impl Said {
    fn bits(self) -> u64 {
        let said = [self.ready, self.ready_again, self.another_id, self.goodbye];
        said.into_iter()
            .fold(0, |bits, bit| bits << 1 | u64::from(bit))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Person {
    Idle,
    Waiting,
    Moving,
    Running(RunRef),
}

#[derive(Clone, Copy, Debug)]
struct Client {
    shard: usize,
    state: Person,
    /// Its next tenancy of its slot, per shard.
    generations: [SlotGeneration; SHARDS],
}

#[derive(Clone, Copy, Debug)]
struct Parcel {
    run: RunRef,
    connection: usize,
    /// The connection's tenancy that the run was granted for.
    tenancy: SlotGeneration,
    provider: ProviderIndex,
    who: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Run {
    Dead,
    Live {
        connection: usize,
        provider: ProviderIndex,
        who: Option<usize>,
        begun: bool,
    },
    Done,
}

#[derive(Clone, Debug)]
struct State {
    control: Control,
    events: [VecDeque<Event>; SHARDS],
    effects: [VecDeque<Effect>; SHARDS],
    parcels: [[VecDeque<Parcel>; SHARDS]; SHARDS],
    connections: [Connection; 3],
    clients: [Client; 2],
    runs: BTreeMap<(usize, u32), (SlotGeneration, Run)>,
    /// The other way of what a shard may do either way.
    other_way: bool,
    /// The last action could be done in two ways.
    two_ways: bool,
    trail: Vec<Action>,
}

fn shard(row: usize) -> ShardIndex {
    ShardIndex::new(row).unwrap()
}

fn node(row: usize) -> NodeIndex {
    NodeIndex::new(row).unwrap()
}

fn names() -> Names {
    let provider = |row: usize| {
        ProviderName::new(
            &format!("pv{row}"),
            node(row),
            ProviderKind::OpenAiCompat,
            "a",
            &format!("t{row}"),
        )
    };
    let model = |row: usize, providers: &[usize]| ModelName {
        name: format!("m{row}"),
        providers: providers
            .iter()
            .filter_map(|&row| ProviderIndex::new(row))
            .collect(),
        long_threshold_bytes: 1_000,
        created: 0,
    };
    let adapters = vec![AdapterName {
        name: "a".into(),
        kind: ProviderKind::OpenAiCompat,
        profile: Vec::new(),
    }];
    let bytes = Vec::new();
    let payload = Arc::new(NodePayload { bytes, adapters });
    Names {
        nodes: (0..2)
            .map(|row| NodeName {
                id: format!("n{row}"),
                certificate_name: format!("n{row}"),
                config_payload: Arc::clone(&payload),
            })
            .collect(),
        providers: (0..2).map(|row| Arc::new(provider(row))).collect(),
        models: vec![model(0, &[0, 1]), model(1, &[0])],
        queue: QueueLimits {
            waiters_max: 2,
            waiting_bytes_max: 1_000,
            wait_ms: 30_000,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    }
}

impl State {
    fn new() -> Self {
        let first = SlotGeneration::FIRST;
        Self {
            control: Control::new(Arc::new(names()), SHARDS, Now::default()),
            events: Default::default(),
            effects: Default::default(),
            parcels: Default::default(),
            connections: [(); 3].map(|()| Connection {
                generation: first,
                open: None,
            }),
            clients: [Client {
                shard: 0,
                state: Person::Idle,
                generations: [first; SHARDS],
            }; 2],
            runs: BTreeMap::new(),
            other_way: false,
            two_ways: false,
            trail: Vec::new(),
        }
    }

    /// Both nodes ready, one request begun at each, and both clients' next ones on their way.
    fn at_work() -> Self {
        let mut state = Self::new();
        for (connection, node) in [(0, 0), (2, 1)] {
            state.act(Action::Register(connection, node));
            state.act(Action::Ready(connection));
        }
        state.deliver_all();
        for client in 0..2 {
            state.act(Action::Submit(client, 0));
            state.deliver_all();
        }
        for connection in [0, 2] {
            state.act(Action::Begin(connection));
        }
        state.deliver_all();
        state.trail.clear();
        state
    }

    fn session(&self, connection: usize) -> SessionRef {
        let (row, slot, _) = CONNECTIONS[connection];
        SessionRef {
            shard: shard(row),
            slot,
            generation: self.connections[connection].generation,
        }
    }

    /// The connection that `session` names, if it is open.
    fn connection(&self, session: SessionRef) -> Option<usize> {
        (0..3).find(|&row| self.connections[row].open.is_some() && self.session(row) == session)
    }

    fn client_ref(&self, who: usize) -> ClientRef {
        let client = self.clients[who];
        ClientRef {
            shard: shard(client.shard),
            slot: u32::try_from(who).unwrap(),
            generation: client.generations[client.shard],
        }
    }

    /// Whoever waits under that name.
    fn waiting(&self, client: ClientRef) -> Option<usize> {
        let who = client.slot as usize;
        let is_here = self.clients[who].state == Person::Waiting && self.client_ref(who) == client;
        is_here.then_some(who)
    }

    // ── what may happen ──────────────────────────────────────────────────────────────────────────

    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for row in 0..SHARDS {
            if !self.events[row].is_empty() {
                actions.push(Action::Event(row));
            }
            if !self.effects[row].is_empty() {
                actions.push(Action::Effect(row));
            }
            for to in (0..SHARDS).filter(|&to| !self.parcels[row][to].is_empty()) {
                actions.push(Action::Parcel(row, to));
            }
        }
        for (row, &(home, _, _)) in CONNECTIONS.iter().enumerate() {
            if self.has_room(home) {
                self.node_actions(row, &mut actions);
            }
        }
        for (who, client) in self.clients.iter().enumerate() {
            if !self.has_room(client.shard) {
                continue;
            }
            match client.state {
                Person::Idle => {
                    actions.extend(ASKS[who].iter().map(|&model| Action::Submit(who, model)));
                }
                Person::Waiting | Person::Moving | Person::Running(_) => {
                    actions.push(Action::Leave(who));
                }
            }
        }
        let begun = self
            .runs
            .iter()
            .filter(|(_, (_, run))| matches!(run, Run::Live { begun: true, .. }));
        let begun = begun.filter(|((row, _), _)| self.has_room(*row));
        actions.extend(begun.map(|(&(row, slot), _)| Action::End(row, slot)));
        let timers = self.control.timers.iter().map(|(_, timer)| timer);
        actions.extend(
            timers
                .filter(|timer| !matches!(timer, Timer::Beat(_)))
                .map(Action::Fire),
        );
        actions
    }

    /// A node or client of the shard acts only while the shard owes control little, so that states
    /// do not differ by what was said too fast.
    fn has_room(&self, shard: usize) -> bool {
        self.events[shard].len() < OWED_MAX
    }

    fn node_actions(&self, row: usize, actions: &mut Vec<Action>) {
        let Some(open) = &self.connections[row].open else {
            let claims = CONNECTIONS[row].2.iter();
            actions.extend(claims.map(|&node| Action::Register(row, node)));
            return;
        };
        actions.push(Action::Close(row));
        let other = CONNECTIONS[row].2.iter().find(|&&node| node != open.node);
        if let Some(&other) = other.filter(|_| !open.said.another_id) {
            actions.push(Action::Register(row, other));
        }
        if !open.said.ready || (open.ready && !open.said.ready_again) {
            actions.push(Action::Ready(row));
        }
        if open.ready && !open.said.goodbye {
            actions.push(Action::GoAway(row));
        }
        if open.ready && !open.writer.is_empty() {
            actions.push(Action::Begin(row));
        }
    }

    fn act(&mut self, action: Action) {
        self.two_ways = false;
        self.trail.push(action);
        match action {
            Action::Event(row) => {
                let event = self.events[row].pop_front().unwrap();
                self.control_step(|control, out| control.handle(Now::default(), event, out));
            }
            Action::Fire(timer) => self.control_step(|control, out| control.fire_now(timer, out)),
            Action::Effect(row) => {
                let effect = self.effects[row].pop_front().unwrap();
                self.effect(row, effect);
            }
            Action::Parcel(from, to) => {
                let parcel = self.parcels[from][to].pop_front().unwrap();
                self.arrive(parcel);
            }
            Action::Register(row, claimed) => self.register(row, claimed),
            Action::Ready(row) => {
                let open = self.connections[row].open.as_mut().unwrap();
                open.said.ready_again = open.said.ready;
                open.said.ready = true;
                let claimed = Some(node(open.node));
                let session = self.session(row);
                self.tell(
                    row,
                    Event::Ready {
                        session,
                        reply_to: 2,
                        claimed,
                    },
                );
            }
            Action::GoAway(row) => {
                let open = self.connections[row].open.as_mut().unwrap();
                open.said.goodbye = true;
                let session = self.session(row);
                self.tell(row, Event::GoAway { session });
            }
            Action::Close(row) => self.close(row),
            Action::Submit(who, model) => {
                self.clients[who].state = Person::Waiting;
                let client = self.client_ref(who);
                let model = ModelIndex::new(model).unwrap();
                self.events[client.shard.row()].push_back(Event::Submit {
                    client,
                    model,
                    operation: Operation::ChatCompletions,
                    long: false,
                    body_bytes: 1,
                });
            }
            Action::Leave(who) => self.leave(who),
            Action::Begin(row) => self.begin(row),
            Action::End(row, slot) => self.end(row, slot),
        }
    }

    fn control_step(&mut self, step: impl FnOnce(&mut Control, &mut Out)) {
        let mut out = Out::default();
        step(&mut self.control, &mut out);
        for effect in out.drain() {
            let says_nothing = matches!(effect, Effect::RegisterReply { close: false, .. });
            if !says_nothing {
                self.effects[effect.shard().row()].push_back(effect);
            }
        }
        assert!(!self.control.has_pending(), "two grants fit a step");
        let _taken = self.control.take_events().count();
    }

    /// Either of two ways, both of which are met.
    fn either(&mut self) -> bool {
        self.two_ways = true;
        self.other_way
    }

    fn tell(&mut self, connection: usize, event: Event) {
        self.events[CONNECTIONS[connection].0].push_back(event);
    }

    // ── nodes ────────────────────────────────────────────────────────────────────────────────────

    fn register(&mut self, row: usize, claimed: usize) {
        let open = self.connections[row].open.get_or_insert_with(|| Open {
            node: claimed,
            ready: false,
            said: Said::default(),
            writer: VecDeque::new(),
        });
        open.said.another_id |= open.node != claimed;
        // A certificate names one node; another's claim is refused.
        let certified = Some(node(open.node));
        let session = self.session(row);
        let claimed = Some(node(claimed));
        self.tell(
            row,
            Event::Register {
                session,
                reply_to: 1,
                claimed,
                certified,
            },
        );
    }

    fn close(&mut self, row: usize) {
        let session = self.session(row);
        let closed = Event::Closed {
            session,
            cause: Reason::PeerClosed,
        };
        let closed_last = self.either();
        if !closed_last {
            self.tell(row, closed);
        }
        let home = CONNECTIONS[row].0;
        let of_it: Vec<u32> = self
            .runs
            .iter()
            .filter(|((on, _), (_, run))| {
                *on == home && matches!(run, Run::Live { connection, .. } if *connection == row)
            })
            .map(|(&(_, slot), _)| slot)
            .collect();
        for slot in of_it {
            let (generation, run) = self.runs[&(home, slot)];
            let Run::Live { who, begun, .. } = run else {
                continue;
            };
            let run = RunRef {
                shard: shard(home),
                slot,
                generation,
            };
            if begun {
                self.settle(who);
                self.finish(run, Event::Lost { run });
            } else {
                self.hand_back(run, who);
            }
        }
        if closed_last {
            self.tell(row, closed);
        }
        let connection = &mut self.connections[row];
        connection.open = None;
        connection.generation = connection.generation.next().unwrap();
    }

    fn begin(&mut self, row: usize) {
        let open = self.connections[row].open.as_mut().unwrap();
        let run = open.writer.pop_front().unwrap();
        let (generation, state) = self.runs.get_mut(&(run.shard.row(), run.slot)).unwrap();
        assert_eq!(
            *generation, run.generation,
            "a queued run is its slot's tenant"
        );
        let Run::Live {
            begun, provider, ..
        } = state
        else {
            panic!("a queued run is live: {state:?}")
        };
        *begun = true;
        let provider = *provider;
        let at_provider = self.runs.values().filter(|(_, state)| {
            matches!(*state, Run::Live { connection, provider: at, begun: true, .. }
                if connection == row && at == provider)
        });
        assert_eq!(at_provider.count(), 1, "capacity is 1");
        self.tell(row, Event::Begun { run });
    }

    fn end(&mut self, row: usize, slot: u32) {
        let (generation, run) = self.runs[&(row, slot)];
        let Run::Live {
            who, begun: true, ..
        } = run
        else {
            panic!("not begun: {run:?}")
        };
        self.settle(who);
        let run = RunRef {
            shard: shard(row),
            slot,
            generation,
        };
        self.finish(
            run,
            Event::Terminal {
                run,
                ending: Ending::Complete,
            },
        );
    }

    // ── runs and clients ─────────────────────────────────────────────────────────────────────────

    fn finish(&mut self, run: RunRef, report: Event) {
        let row = run.shard.row();
        self.runs
            .insert((row, run.slot), (run.generation, Run::Done));
        self.events[row].push_back(report);
    }

    /// The client of a run, if it is still there, has its answer.
    fn settle(&mut self, who: Option<usize>) {
        if let Some(who) = who {
            self.clients[who].state = Person::Idle;
        }
    }

    /// Nothing was sent: the client, if it is there, waits on this shard again.
    fn hand_back(&mut self, run: RunRef, who: Option<usize>) {
        let client = who.map(|who| {
            self.clients[who].state = Person::Waiting;
            self.client_ref(who)
        });
        self.finish(run, Event::NotSent { run, client });
    }

    /// As `hand_back`, for a run that control has ended: the shard may answer the client itself.
    fn hand_back_cancelled(&mut self, run: RunRef, who: Option<usize>) {
        if who.is_some() && self.either() {
            self.settle(who);
            self.finish(run, Event::NotSent { run, client: None });
        } else {
            self.hand_back(run, who);
        }
    }

    fn leave(&mut self, who: usize) {
        let client = self.clients[who];
        let name = self.client_ref(who);
        match client.state {
            Person::Idle => {}
            Person::Waiting => {
                self.events[client.shard].push_back(Event::ClientGone { client: name })
            }
            Person::Moving => {
                for parcel in self.parcels.iter_mut().flatten().flatten() {
                    parcel.who = parcel.who.filter(|&moved| moved != who);
                }
            }
            Person::Running(run) => {
                let at = (run.shard.row(), run.slot);
                let (
                    _,
                    Run::Live {
                        connection,
                        provider,
                        begun,
                        ..
                    },
                ) = self.runs[&at]
                else {
                    panic!("a running client without run")
                };
                if begun {
                    let live = Run::Live {
                        connection,
                        provider,
                        who: None,
                        begun,
                    };
                    self.runs.insert(at, (run.generation, live));
                } else {
                    self.withdraw(connection, run);
                    self.finish(run, Event::NotSent { run, client: None });
                }
            }
        }
        if client.state != Person::Moving {
            self.vacate(who);
        }
        // Somebody else comes in its stead, where the front places new connections.
        self.clients[who].shard = 0;
        self.clients[who].state = Person::Idle;
    }

    fn vacate(&mut self, who: usize) {
        let client = &mut self.clients[who];
        let generation = &mut client.generations[client.shard];
        *generation = generation.next().unwrap();
    }

    fn withdraw(&mut self, connection: usize, run: RunRef) {
        let open = self.connections[connection].open.as_mut().unwrap();
        open.writer.retain(|&queued| queued != run);
    }

    // ── effects ──────────────────────────────────────────────────────────────────────────────────

    fn effect(&mut self, row: usize, effect: Effect) {
        match effect {
            Effect::RegisterReply { session, close, .. } => {
                if close && let Some(connection) = self.connection(session) {
                    self.close(connection);
                }
            }
            Effect::ReadyReply {
                session, refusal, ..
            } => {
                if let Some(connection) = self.connection(session) {
                    let open = self.connections[connection].open.as_mut().unwrap();
                    open.ready |= refusal.is_none();
                }
            }
            Effect::Close { session, .. } => {
                if let Some(connection) = self.connection(session) {
                    self.close(connection);
                }
            }
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => {
                self.grant(row, client, run, session, provider);
            }
            Effect::Refuse { client, .. } => {
                let who = self.waiting(client);
                self.settle(who);
            }
            Effect::Cancel { run, .. } => self.cancel(run),
            Effect::Handoff { .. }
            | Effect::Command { .. }
            | Effect::Ping { .. }
            | Effect::Refresh { .. }
            | Effect::Configure { .. }
            | Effect::Drain { .. }
            | Effect::Stop { .. } => {
                unreachable!("nobody asked for it")
            }
        }
    }

    fn grant(
        &mut self,
        row: usize,
        client: ClientRef,
        run: RunRef,
        session: SessionRef,
        provider: ProviderIndex,
    ) {
        let who = self.waiting(client);
        if let Some(who) = who {
            self.vacate(who);
            self.clients[who].state = Person::Moving;
        } else if self.either() {
            // Its client left: this shard may say so itself, or leave it to the node's.
            self.events[row].push_back(Event::NotSent { run, client: None });
            return;
        }
        let connection = (0..3).find(|&row| {
            let (home, slot, _) = CONNECTIONS[row];
            session.shard.row() == home && session.slot == slot
        });
        let parcel = Parcel {
            run,
            connection: connection.unwrap(),
            tenancy: session.generation,
            provider,
            who,
        };
        let to = run.shard.row();
        if to == row {
            self.arrive(parcel);
        } else {
            self.parcels[row][to].push_back(parcel);
        }
    }

    fn arrive(&mut self, parcel: Parcel) {
        let Parcel {
            run,
            connection,
            tenancy,
            provider,
            who,
        } = parcel;
        let row = run.shard.row();
        let before = self.runs.get(&(row, run.slot)).copied();
        let is_dead = match before {
            Some((generation, Run::Dead)) if generation == run.generation => true,
            Some((generation, state)) => {
                assert!(generation < run.generation, "a slot's tenancy came again");
                assert!(
                    !matches!(state, Run::Live { .. }),
                    "a slot was given away too early"
                );
                false
            }
            None => false,
        };
        if let Some(who) = who {
            self.clients[who].shard = row;
        }
        if is_dead {
            return self.hand_back_cancelled(run, who);
        }
        let here = &self.connections[connection];
        let is_open = here.open.is_some() && here.generation == tenancy;
        let is_ready = here.open.as_ref().is_some_and(|open| open.ready);
        // Before its acknowledgement is here, a shard may hold the request or hand it back.
        if !is_open || who.is_none() || (!is_ready && self.either()) {
            return self.hand_back(run, who);
        }
        let live = Run::Live {
            connection,
            provider,
            who,
            begun: false,
        };
        self.runs.insert((row, run.slot), (run.generation, live));
        let open = self.connections[connection].open.as_mut().unwrap();
        assert_eq!(
            open.node,
            provider.row(),
            "a request goes to its provider's node"
        );
        open.writer.push_back(run);
        self.clients[who.unwrap()].state = Person::Running(run);
    }

    fn cancel(&mut self, run: RunRef) {
        let at = (run.shard.row(), run.slot);
        match self.runs.get(&at).copied() {
            Some((generation, _)) if generation > run.generation => {}
            Some((
                generation,
                Run::Live {
                    connection,
                    provider,
                    who,
                    begun,
                },
            )) if generation == run.generation => {
                if begun {
                    self.settle(who);
                    let live = Run::Live {
                        connection,
                        provider,
                        who: None,
                        begun,
                    };
                    self.runs.insert(at, (generation, live));
                } else {
                    self.withdraw(connection, run);
                    self.hand_back_cancelled(run, who);
                }
            }
            Some((generation, _)) if generation == run.generation => {}
            Some(_) | None => {
                self.runs.insert(at, (run.generation, Run::Dead));
            }
        }
    }

    // ── to the end ───────────────────────────────────────────────────────────────────────────────

    fn deliver_all(&mut self) {
        loop {
            let mut quiet = true;
            for action in self.actions() {
                let delivers = match action {
                    Action::Event(row) => !self.events[row].is_empty(),
                    Action::Effect(row) => !self.effects[row].is_empty(),
                    Action::Parcel(from, to) => !self.parcels[from][to].is_empty(),
                    _ => false,
                };
                if delivers {
                    self.act(action);
                    quiet = false;
                }
            }
            if quiet {
                return;
            }
        }
    }

    /// Nothing more goes wrong: nodes come back, and everybody is answered.
    fn drain(mut self) {
        for row in 0..3 {
            if self.connections[row].open.is_some() {
                self.close(row);
            }
        }
        self.deliver_all();
        for (connection, node) in [(0, 0), (2, 1)] {
            self.act(Action::Register(connection, node));
            self.act(Action::Ready(connection));
        }
        let mut rounds = 0;
        self.deliver_all();
        while self
            .clients
            .iter()
            .any(|client| client.state != Person::Idle)
            || self.control.leases.used() > 0
        {
            rounds += 1;
            assert!(
                rounds <= ROUNDS_MAX,
                "still not answered: {:?}",
                self.clients
            );
            for action in self.actions() {
                if matches!(action, Action::Begin(_) | Action::End(..)) {
                    self.act(action);
                }
            }
            self.deliver_all();
        }
        self.check();
        let edge = self.control.snapshot(Now::default()).edge;
        assert_eq!((edge.leases_held, edge.runs, edge.waiting), (0, 0, 0));
        assert_eq!(edge.leases_taken, edge.leases_returned);
    }

    fn check(&self) {
        if let Err(violation) = self.control.check() {
            panic!("{violation}");
        }
        for open in self.connections.iter().filter_map(|c| c.open.as_ref()) {
            assert!(open.writer.len() <= 1, "capacity is 1: {:?}", open.writer);
        }
    }

    /// Every state that may follow, and the choice that leads there: twice the action's place, and one
    /// more for the other way.
    fn next(&self) -> Vec<(u16, Self)> {
        let mut next = Vec::new();
        for (choice, action) in (0..).step_by(2).zip(self.actions()) {
            for other_way in [false, true] {
                let mut state = self.clone();
                state.act_in_way(action, other_way);
                state.check();
                let two_ways = state.two_ways;
                next.push((choice + u16::from(other_way), state));
                if !two_ways {
                    break;
                }
            }
        }
        next
    }

    fn act_in_way(&mut self, action: Action, other_way: bool) {
        self.other_way = other_way;
        self.act(action);
        self.other_way = false;
    }
}

impl Control {
    /// A tick at which `timer`, whenever it was set for, is what is due.
    fn fire_now(&mut self, timer: Timer, out: &mut Out) {
        let set = self.timers.iter().find(|&(_, set)| set == timer);
        let (at, _) = set.expect("a deadline that is set");
        self.timers.cancel(at, timer);
        self.begin(Now::default(), out);
        self.fire(Now::default(), timer, out);
        self.pump(Now::default(), out);
        self.end();
    }
}
