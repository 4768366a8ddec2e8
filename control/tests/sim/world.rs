//! The seeded scheduler: what may happen next, and to whom.
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use iop_control::edge::Control;
use iop_control::names::{ModelName, Names, NodeName, ProviderName, QueueLimits};
use iop_control::step::{Effect, Ending, Event, Out};
use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::ids::{ModelIndex, NodeIndex, Now, ProviderIndex, ShardIndex};
use iop_proto::reason::Reason;

use crate::shadow::Shadow;
use crate::shard::{ClientState, Parcel, Person, Run, Shard};

/// Repeatable randomness (splitmix64).
pub(crate) struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    /// One time in `n`.
    pub(crate) fn chance(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() {
            None
        } else {
            Some(from[self.below(from.len())])
        }
    }
}

/// How much happened, over one or more seeds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) notices: u64,
    grants: u64,
    grants_queued: u64,
    queue_returns: u64,
    fenced: u64,
    lost: u64,
    cancels: u64,
    gone_late: u64,
    timeouts: u64,
    full: u64,
    superseded: u64,
    stale: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.notices += other.notices;
        self.grants += other.grants;
        self.grants_queued += other.grants_queued;
        self.queue_returns += other.queue_returns;
        self.fenced += other.fenced;
        self.lost += other.lost;
        self.cancels += other.cancels;
        self.gone_late += other.gone_late;
        self.timeouts += other.timeouts;
        self.full += other.full;
        self.superseded += other.superseded;
        self.stale += other.stale;
    }

    /// Every interesting thing happened often.
    pub(crate) fn is_lively(&self) -> bool {
        let often = [
            self.grants,
            self.grants_queued,
            self.queue_returns,
            self.fenced,
            self.cancels,
            self.gone_late,
            self.timeouts,
            self.full,
            self.superseded,
            self.notices,
        ];
        often.iter().all(|&count| count >= 100) && self.lost > 0
    }
}

pub(crate) struct World {
    dice: Dice,
    control: Control,
    out: Out,
    now: Now,
    shards: Vec<Shard>,
    effects: Vec<VecDeque<Effect>>,
    parcels: Vec<Vec<VecDeque<Parcel>>>,
    people: Vec<Person>,
    shadow: Shadow,
    names: Arc<Names>,
    takes_notices: bool,
    pub(crate) steps: u64,
    pub(crate) digest: u64,
    pub(crate) tally: Tally,
}

const PEOPLE_MAX: usize = 40;
const DRAIN_ROUNDS_MAX: u32 = 2_000;

fn names(dice: &mut Dice) -> Names {
    let nodes = 1 + dice.below(3);
    let providers: Vec<_> = (0..nodes + dice.below(4))
        .map(|row| {
            let capacity = u32::try_from(1 + dice.below(9)).unwrap();
            let long_capacity = u32::try_from(dice.below(capacity as usize + 1)).unwrap();
            let some = OperationSet::default().with(Operation::ChatCompletions);
            ProviderName {
                id: format!("pv{row}"),
                node: NodeIndex::new(row % nodes).unwrap(),
                kind: dice.pick(&ProviderKind::ALL).unwrap(),
                adapter: "a".into(),
                target: format!("t{row}"),
                category: Category::Api,
                enabled: !dice.chance(10),
                health: "healthy".into(),
                capacity,
                long_capacity,
                operations: if dice.chance(3) {
                    some
                } else {
                    OperationSet::ALL
                },
                profile: Vec::new(),
                stall_timeout_ms: 0,
                timeout_s: 0,
                response_wait_ms: 315_000,
            }
        })
        .collect();
    let models = (0..1 + dice.below(3)).map(|row| {
        let named = (0..1 + dice.below(providers.len()))
            .map(|_| ProviderIndex::new(dice.below(providers.len())).unwrap())
            .collect();
        ModelName {
            name: format!("m{row}"),
            providers: named,
            long_threshold_bytes: 1_000,
            created: 0,
        }
    });
    let models = models.collect();
    Names {
        nodes: (0..nodes)
            .map(|row| NodeName {
                id: format!("n{row}"),
                certificate_name: format!("n{row}"),
                config_payload: Vec::new(),
            })
            .collect(),
        providers,
        models,
        queue: QueueLimits {
            waiters_max: u32::try_from(2 + dice.below(30)).unwrap(),
            waiting_bytes_max: 2_000 + dice.below(60_000) as u64,
            wait_ms: 30_000,
        },
    }
}

impl World {
    pub(crate) fn new(seed: u64, takes_notices: bool) -> Self {
        let mut dice = Dice(seed);
        let names = Arc::new(names(&mut dice));
        let shards = 1 + dice.below(3);
        Self {
            control: Control::new(Arc::clone(&names), shards, Now::default()),
            out: Out::default(),
            now: Now::default(),
            shards: (0..shards)
                .map(|row| Shard::new(ShardIndex::new(row).unwrap()))
                .collect(),
            effects: (0..shards).map(|_| VecDeque::new()).collect(),
            parcels: (0..shards)
                .map(|_| (0..shards).map(|_| VecDeque::new()).collect())
                .collect(),
            people: Vec::new(),
            shadow: Shadow::new(Arc::clone(&names)),
            names,
            dice,
            takes_notices,
            steps: 0,
            digest: 0xcbf2_9ce4_8422_2325,
            tally: Tally::default(),
        }
    }

    /// One thing happens somewhere.
    pub(crate) fn step(&mut self) {
        self.steps += 1;
        match self.dice.below(100) {
            0..30 => self.deliver_event(),
            30..50 => self.deliver_effect(),
            50..60 => self.deliver_parcel(),
            60..70 => self.client_acts(),
            70..75 => self.session_acts(),
            75..80 => self.dial(),
            80..95 => self.run_acts(),
            _ => self.time_passes(),
        }
    }

    fn a_shard(&mut self) -> usize {
        self.dice.below(self.shards.len())
    }

    fn deliver_event(&mut self) {
        let row = self.a_shard();
        if let Some(event) = self.shards[row].events.pop_front() {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        let before = self.control.counters().stale_events;
        self.shadow.told(self.now, &event);
        self.control.handle(self.now, event, &mut self.out);
        self.tally.stale += self.control.counters().stale_events - before;
        self.collect();
    }

    fn tick(&mut self) {
        self.control.tick(self.now, &mut self.out);
        self.collect();
    }

    fn collect(&mut self) {
        for effect in self.out.drain() {
            self.shadow.answered(self.now, &effect);
            for byte in format!("{effect:?}").bytes() {
                self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            self.effects[effect.shard().row()].push_back(effect);
        }
        self.shadow.settle(self.now, &self.control);
        if self.steps.is_multiple_of(16) {
            self.shadow.compare(self.now, &self.control);
        }
        if self.takes_notices {
            self.tally.notices += self.control.take_events().count() as u64;
        }
    }

    fn deliver_effect(&mut self) {
        let row = self.a_shard();
        let Some(effect) = self.effects[row].pop_front() else {
            return;
        };
        if let Some(parcel) = self.shards[row].apply(effect, &mut self.people, &mut self.dice) {
            self.parcels[row][parcel.run.shard.row()].push_back(parcel);
        }
    }

    fn deliver_parcel(&mut self) {
        let (from, to) = (self.a_shard(), self.a_shard());
        if let Some(parcel) = self.parcels[from][to].pop_front() {
            self.shards[to].arrive(parcel, &mut self.people, &mut self.dice);
        }
    }

    fn client_acts(&mut self) {
        let row = self.a_shard();
        let present = self.people.iter().filter(|person| !person.gone).count();
        let slot = if present < PEOPLE_MAX && self.dice.chance(2) {
            self.people.push(Person::default());
            Some(self.shards[row].seat(self.people.len() - 1, ClientState::Idle))
        } else {
            let seated = self.shards[row].seated();
            self.dice.pick(&seated)
        };
        let Some(slot) = slot else { return };
        let state = self.shards[row].clients[slot as usize]
            .tenant
            .map(|client| client.state);
        match state {
            Some(ClientState::Idle) if !self.dice.chance(8) => self.submit(row, slot),
            Some(_) if self.dice.chance(3) => self.shards[row].leave(slot, &mut self.people),
            Some(_) | None => {}
        }
    }

    fn submit(&mut self, row: usize, slot: u32) {
        let model = ModelIndex::new(self.dice.below(self.names.models.len())).unwrap();
        let few = [
            Operation::ChatCompletions,
            Operation::Embeddings,
            Operation::CountTokens,
        ];
        let operation = self.dice.pick(&few).unwrap();
        let body_bytes = u32::try_from(1 + self.dice.below(2_000)).unwrap();
        let long = body_bytes >= 1_000;
        self.shards[row].submit(slot, &mut self.people, |client| Event::Submit {
            client,
            model,
            operation,
            long,
            body_bytes,
        });
    }

    fn dial(&mut self) {
        let row = self.a_shard();
        let node = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        if let Some(slot) = self.shards[row].dial(node)
            && !self.dice.chance(10)
        {
            self.register(row, slot, Some(node));
        }
    }

    fn register(&mut self, row: usize, slot: usize, claimed: Option<NodeIndex>) {
        let session = self.shards[row].session_ref(slot);
        let tenant = self.shards[row].sessions[slot].tenant.as_mut().unwrap();
        tenant.told = true;
        let certified = Some(tenant.node);
        self.shards[row].events.push_back(Event::Register {
            session,
            reply_to: self.steps,
            claimed,
            certified,
        });
    }

    fn ready(&mut self, row: usize, slot: usize, claimed: NodeIndex) {
        let session = self.shards[row].session_ref(slot);
        self.shards[row].sessions[slot]
            .tenant
            .as_mut()
            .unwrap()
            .told = true;
        self.shards[row].events.push_back(Event::Ready {
            session,
            reply_to: self.steps,
            claimed: Some(claimed),
        });
    }

    fn session_acts(&mut self) {
        let row = self.a_shard();
        let open = self.shards[row].open_sessions();
        let Some(slot) = self.dice.pick(&open) else {
            return;
        };
        let other = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        let node = self.shards[row].sessions[slot]
            .tenant
            .as_ref()
            .unwrap()
            .node;
        match self.dice.below(20) {
            0..12 => self.ready(row, slot, node),
            12 => self.ready(row, slot, other),
            13 => self.register(row, slot, Some(other)),
            14 => {
                let claimed = if self.dice.chance(2) {
                    None
                } else {
                    Some(node)
                };
                self.register(row, slot, claimed);
            }
            15 => {
                let session = self.shards[row].session_ref(slot);
                let tenant = self.shards[row].sessions[slot].tenant.as_mut().unwrap();
                if tenant.ready {
                    tenant.draining = true;
                    self.shards[row].events.push_back(Event::GoAway { session });
                }
            }
            _ => {
                let causes = [
                    Reason::PeerClosed,
                    Reason::HeartbeatTimeout,
                    Reason::EnvelopeMalformed,
                ];
                let cause = self.dice.pick(&causes).unwrap();
                self.shards[row].close(slot, cause, &mut self.people, &mut self.dice);
            }
        }
    }

    fn run_acts(&mut self) {
        let row = self.a_shard();
        if self.dice.chance(2) {
            let open = self.shards[row].open_sessions();
            if let Some(slot) = self.dice.pick(&open) {
                self.begin(row, slot);
            }
        } else {
            let begun = self.shards[row].begun_rows();
            if let Some(run) = self.dice.pick(&begun) {
                self.end(row, run);
            }
        }
    }

    fn begin(&mut self, row: usize, slot: usize) -> bool {
        // A begin whose report is overtaken by the terminal may never be told.
        let reports = !self.dice.chance(10);
        let Some(run) = self.shards[row].begin(slot, reports) else {
            return false;
        };
        self.check_provider_load(row);
        if !reports {
            self.end(row, run);
        }
        true
    }

    fn end(&mut self, row: usize, run: u32) {
        let endings = [Ending::Complete, Ending::Error, Ending::Violation];
        let ending = self.dice.pick(&endings).unwrap();
        self.shards[row].end(run, ending, &mut self.people);
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
            let capacity = self.names.provider(provider).capacity;
            assert!(count <= capacity, "{provider:?} runs {count} of {capacity}");
        }
    }

    fn time_passes(&mut self) {
        let ms = match self.dice.below(20) {
            0 => 31_000,
            1 => 6_000,
            2..6 => self.dice.below(3_000) as u64,
            _ => self.dice.below(50) as u64,
        };
        self.now = self.now.after_ms(ms);
        self.tick();
    }

    /// Nobody new comes. Either every node comes back and everything is answered, or every node
    /// stays away and every wait ends; in both cases nothing is left anywhere.
    pub(crate) fn drain(&mut self) {
        let nodes_return = self.dice.chance(2);
        for row in 0..self.shards.len() {
            for slot in self.shards[row].open_sessions() {
                let cause = Reason::PeerClosed;
                self.shards[row].close(slot, cause, &mut self.people, &mut self.dice);
            }
        }
        let mut rounds = 0;
        self.deliver_all();
        while self.shadow.waiting() > 0 || self.shadow.runs() > 0 {
            rounds += 1;
            assert!(
                rounds < DRAIN_ROUNDS_MAX,
                "it does not drain: {}",
                self.describe()
            );
            self.steps += 1;
            self.drain_round(nodes_return);
        }
        self.shadow.compare(self.now, &self.control);
        let edge = self.control.snapshot(self.now).edge;
        assert_eq!((edge.leases_held, edge.runs, edge.waiting), (0, 0, 0));
        assert_eq!(edge.leases_taken, edge.leases_returned);
        for (who, person) in self.people.iter().enumerate() {
            let heard = if person.gone {
                person.answered <= person.asked && person.answered + 1 >= person.asked
            } else {
                person.answered == person.asked
            };
            assert!(heard, "client {who}: {person:?}");
        }
        self.count();
    }

    fn drain_round(&mut self, nodes_return: bool) {
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
        self.now = self.now.after_ms(if nodes_return { 10 } else { 31_000 });
        self.tick();
        self.deliver_all();
    }

    /// Every link runs empty, in a random order of links.
    fn deliver_all(&mut self) {
        while !self.is_quiet() {
            self.deliver_event();
            self.deliver_effect();
            self.deliver_parcel();
            if self.control.has_pending() {
                self.tick();
            }
        }
    }

    fn bring_back(&mut self, node: NodeIndex) {
        if self.control.owner(node).is_some() {
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
            && self.effects.iter().all(VecDeque::is_empty)
            && self.parcels.iter().flatten().all(VecDeque::is_empty)
    }

    fn describe(&self) -> String {
        format!(
            "{} wait, {} runs",
            self.shadow.waiting(),
            self.shadow.runs()
        )
    }

    fn count(&mut self) {
        let counters = self.control.counters();
        self.tally.grants = counters.grants;
        self.tally.grants_queued = counters.grants_queued;
        self.tally.queue_returns = counters.queue_returns;
        self.tally.fenced = counters.returns_fence;
        self.tally.lost = counters.returns_lost;
        self.tally.cancels = counters.cancels;
        self.tally.gone_late = counters.clients_gone_late;
        self.tally.timeouts = counters.refusals(Reason::QueueTimeout);
        self.tally.full = counters.refusals(Reason::QueueFull);
        self.tally.superseded = counters.superseded_pending;
    }
}
