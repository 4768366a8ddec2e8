//! Gates, run entries, attempts and observation numbers together, under random histories: requests,
//! duplicates, output, returns, cancels, probes, time, lost sessions, new configurations.
//!
//! The shell here does what the agent's main task does; everything is checked after each event.
use std::collections::{BTreeMap, BTreeSet};

use iop_proto::domain::HealthEvidence;
use iop_proto::ids::Now;

use super::attempt::{
    Attempt, Failure, Order, Output, Patience, Signals, Terminal, Timeouts, Verdict,
};
use super::gate::{Entry, Gates};
use super::runs::{Refusal, Runs};
use super::{LinkId, Observations, Ticket};

const ADAPTERS: [&str; 2] = ["a", "b"];
const PATIENCE: Patience = Patience {
    grace_ms: 30,
    probe_ms: 40,
};

/// xorshift64*: the same history for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    Waits,
    Held,
    Free,
}

/// One attempt and what the outside has seen of it.
struct Actor {
    attempt: Attempt,
    link: LinkId,
    run_id: String,
    adapter: &'static str,
    slot: Slot,
    signals: Signals,
    /// The provider works for it.
    calling: bool,
    /// It does not return when it is stopped.
    stubborn: bool,
    probing: bool,
    head: bool,
    frames: u64,
    calls: u32,
    stalled_at: Option<Now>,
    terminal: bool,
}

struct World {
    dice: Dice,
    now: Now,
    link: LinkId,
    gates: Gates,
    capacity: BTreeMap<&'static str, u32>,
    runs: Runs,
    actors: BTreeMap<Ticket, Actor>,
    numbers: Observations,
    /// Of the present session.
    drawn: Vec<u64>,
    stalls: u32,
    retained: u32,
    waited: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Now::from_nanos(1_000_000_000),
            link: LinkId(1),
            gates: Gates::default(),
            capacity: BTreeMap::new(),
            runs: Runs::default(),
            actors: BTreeMap::new(),
            numbers: Observations::default(),
            drawn: Vec::new(),
            stalls: 0,
            retained: 0,
            waited: 0,
        };
        world.configure([2, 1]);
        world
    }

    /// A capacity of 0 leaves the adapter out.
    fn configure(&mut self, capacities: [u32; 2]) {
        let named = ADAPTERS.into_iter().zip(capacities);
        self.capacity = named.filter(|&(_, capacity)| capacity > 0).collect();
        let named = self.capacity.iter();
        self.gates
            .configure(named.map(|(name, capacity)| (*name, *capacity)));
        self.grants();
    }

    fn grants(&mut self) {
        while let Some(ticket) = self.gates.next_grant() {
            let actor = self.actors.get_mut(&ticket).expect("a waiter is known");
            assert_eq!(actor.slot, Slot::Waits);
            actor.slot = Slot::Held;
            actor.signals.granted = true;
            let capacity = self.capacity.get(actor.adapter);
            let most = capacity.copied().unwrap_or(u32::MAX);
            assert!(self.gates.held(actor.adapter) <= most, "[I5.5]");
            self.wake(ticket);
        }
    }

    fn arrive(&mut self) {
        let run_id = self.dice.below(6).to_string();
        let adapter = ADAPTERS[usize::from(self.dice.below(2) == 1)];
        let ticket = match self.runs.take(self.link, &run_id) {
            Ok(ticket) => ticket,
            Err(Refusal::Open | Refusal::Retained) => return,
            Err(Refusal::Full) => panic!("six ids fill no table"),
        };
        let slot = match self.gates.enter(adapter, ticket) {
            Entry::Granted => Slot::Held,
            Entry::Waits => Slot::Waits,
            Entry::Full | Entry::Unknown => {
                self.runs.remove(self.link, &run_id);
                return;
            }
        };
        self.waited += u32::from(slot == Slot::Waits);
        let hard_ms = core::num::NonZeroU64::new(self.dice.below(4) * 50);
        let stall_ms = 20 + self.dice.below(60);
        let attempt = Attempt::new(self.now, Timeouts { hard_ms, stall_ms }, PATIENCE);
        let actor = Actor {
            attempt,
            link: self.link,
            run_id,
            adapter,
            slot,
            signals: Signals {
                granted: slot == Slot::Held,
                ..Signals::default()
            },
            calling: false,
            stubborn: self.dice.below(3) == 0,
            probing: false,
            head: false,
            frames: 0,
            calls: 0,
            stalled_at: None,
            terminal: false,
        };
        self.actors.insert(ticket, actor);
        self.wake(ticket);
    }

    fn wake(&mut self, ticket: Ticket) {
        let Some(actor) = self.actors.get_mut(&ticket) else {
            return;
        };
        let mut orders = Vec::new();
        actor.attempt.wake(self.now, actor.signals, &mut orders);
        self.obey(ticket, orders);
    }

    fn obey(&mut self, ticket: Ticket, mut orders: Vec<Order>) {
        let mut next = 0;
        let mut freed = false;
        while let Some(&order) = orders.get(next) {
            next += 1;
            let actor = self
                .actors
                .get_mut(&ticket)
                .expect("it lives until it is over");
            match order {
                Order::Call => {
                    assert_eq!(actor.slot, Slot::Held, "[I5.5]");
                    actor.calling = true;
                    actor.calls += 1;
                    assert_eq!(actor.calls, 1, "[I5.4]");
                }
                Order::Stop if actor.stubborn => {}
                Order::Stop => {
                    actor.calling = false;
                    actor.attempt.returned(self.now, Ok(()), &mut orders);
                }
                Order::Probe => {
                    actor.probing = true;
                    actor.stalled_at = Some(self.now);
                    self.stalls += 1;
                }
                Order::ProbeOver => {
                    actor.probing = false;
                    self.probed(ticket, HealthEvidence::Unknown, &mut orders);
                }
                Order::Observe(_) => assert!(!actor.terminal),
                Order::FreeSlot => {
                    assert!(!actor.calling, "[I5.6]");
                    match core::mem::replace(&mut actor.slot, Slot::Free) {
                        Slot::Held => self.gates.release(actor.adapter),
                        Slot::Waits => assert!(self.gates.leave(actor.adapter, ticket)),
                        Slot::Free => panic!("freed twice [I5.6]"),
                    }
                    freed = true;
                }
                Order::Finish { sequence, terminal } => self.finish(ticket, sequence, terminal),
            }
        }
        if let Some(actor) = self.actors.get(&ticket)
            && actor.attempt.is_over()
        {
            self.runs.remove(actor.link, &actor.run_id);
            assert_eq!(actor.slot, Slot::Free);
            assert!(actor.terminal || actor.signals.ended, "[I5.1]");
            self.actors.remove(&ticket);
        }
        if freed {
            self.grants();
        }
    }

    fn probed(&mut self, ticket: Ticket, health: HealthEvidence, orders: &mut Vec<Order>) {
        let actor = self
            .actors
            .get_mut(&ticket)
            .expect("it lives until it is over");
        let own = actor.link == self.link;
        let (numbers, drawn) = (&mut self.numbers, &mut self.drawn);
        let draw = || {
            assert!(own, "no number of a session that is over [S-37]");
            let number = numbers.draw();
            drawn.push(number.get());
            Some(number)
        };
        actor.attempt.probed(health, draw, orders);
    }

    fn finish(&mut self, ticket: Ticket, sequence: u64, terminal: Terminal) {
        let actor = self
            .actors
            .get_mut(&ticket)
            .expect("it lives until it is over");
        assert!(!actor.terminal && actor.link == self.link, "[I5.1]");
        assert_eq!(sequence, actor.frames + 1);
        actor.terminal = true;
        if let (Terminal::Stalled(stall), Some(expired)) = (terminal, actor.stalled_at) {
            let most = PATIENCE.grace_ms.max(PATIENCE.probe_ms);
            assert!(self.now.ms_since(expired) <= most, "[I5.3]");
            let number = stall.observation.expect("a session's").get();
            assert!(self.drawn.contains(&number), "[I5.8]");
        } else {
            assert!(!matches!(terminal, Terminal::Stalled(_)), "[I5.2]");
        }
        self.retained += u32::from(actor.calling);
        self.runs.settled(actor.link, &actor.run_id);
    }

    /// The provider of a calling attempt hands something over, and the queue takes it now or late.
    fn output(&mut self, ticket: Ticket) {
        let late = self.dice.below(4) == 0;
        let actor = self
            .actors
            .get_mut(&ticket)
            .expect("picked among the living");
        if !actor.calling || !actor.attempt.is_undecided() {
            return;
        }
        actor.attempt.received();
        if late {
            self.pass(200);
        }
        let Some(actor) = self.actors.get_mut(&ticket).filter(|actor| actor.calling) else {
            return;
        };
        assert_eq!(actor.stalled_at, None, "its output waited for room [A-17]");
        let output = if actor.head {
            Output::Body
        } else {
            Output::Head
        };
        let verdict = actor.attempt.output(self.now, output, false);
        if let Verdict::Forward { sequence } = verdict {
            assert!(!actor.terminal && actor.link == self.link);
            actor.head = true;
            actor.frames += 1;
            assert_eq!(sequence, actor.frames);
        }
    }

    fn returns(&mut self, ticket: Ticket) {
        let fails = self.dice.below(3) == 0;
        let actor = self
            .actors
            .get_mut(&ticket)
            .expect("picked among the living");
        if core::mem::take(&mut actor.calling) {
            let result = if fails {
                Err(Failure::Provider)
            } else {
                Ok(())
            };
            let mut orders = Vec::new();
            actor.attempt.returned(self.now, result, &mut orders);
            self.obey(ticket, orders);
        }
    }

    /// Time passes, and nobody is woken later than it asked for.
    fn pass(&mut self, ms: u64) {
        let end = self.now.after_ms(ms);
        loop {
            let due = self.actors.iter();
            let due = due.filter_map(|(&ticket, actor)| Some((actor.attempt.deadline()?, ticket)));
            match due.min() {
                Some((at, ticket)) if at <= end => {
                    self.now = self.now.max(at);
                    self.wake(ticket);
                }
                _ => break,
            }
        }
        self.now = end;
    }

    fn lose_session(&mut self) {
        let tickets: Vec<_> = self.runs.of_link(self.link).collect();
        let drawn = core::mem::take(&mut self.drawn);
        assert_eq!(
            drawn,
            (1..=drawn.len() as u64).collect::<Vec<_>>(),
            "[I5.8]"
        );
        for ticket in tickets {
            if let Some(actor) = self.actors.get_mut(&ticket) {
                actor.signals.ended = true;
                self.runs.settled(actor.link, &actor.run_id);
                self.wake(ticket);
            }
        }
        self.link = LinkId(self.link.0 + 1);
        self.numbers = Observations::default();
    }

    fn pick(&mut self) -> Option<Ticket> {
        let count = self.actors.len() as u64;
        if count == 0 {
            return None;
        }
        let nth = usize::try_from(self.dice.below(count)).ok()?;
        self.actors.keys().nth(nth).copied()
    }

    fn step(&mut self) {
        let event = self.dice.below(100);
        match (event, self.pick()) {
            (0..25, _) => self.arrive(),
            (25..45, Some(ticket)) => self.output(ticket),
            (45..60, Some(ticket)) => self.returns(ticket),
            (60..65, Some(ticket)) => {
                let actor = self
                    .actors
                    .get_mut(&ticket)
                    .expect("picked among the living");
                actor.signals.cancelled |= actor.link == self.link;
                self.wake(ticket);
            }
            (65..75, Some(ticket)) => {
                let actor = self
                    .actors
                    .get_mut(&ticket)
                    .expect("picked among the living");
                if core::mem::take(&mut actor.probing) {
                    let health = HealthEvidence::ALL[usize::try_from(event % 3).unwrap_or(0)];
                    let mut orders = Vec::new();
                    self.probed(ticket, health, &mut orders);
                    self.obey(ticket, orders);
                }
            }
            (75..97, _) => {
                let ms = self.dice.below(30);
                self.pass(ms);
            }
            (97, _) => self.lose_session(),
            (98.., _) => {
                let capacities = [self.dice.below(4), self.dice.below(3)];
                self.configure(capacities.map(|n| u32::try_from(n).unwrap_or(0)));
            }
            (25..75, None) => {}
        }
        self.check();
    }

    fn check(&self) {
        for adapter in ADAPTERS {
            let held = self.actors.values();
            let held = held.filter(|actor| actor.adapter == adapter && actor.slot == Slot::Held);
            assert_eq!(self.gates.held(adapter) as usize, held.count(), "[I5.5]");
        }
        let waiting = self
            .actors
            .values()
            .filter(|actor| actor.slot == Slot::Waits);
        assert_eq!(self.gates.waiting(), waiting.count());
        let ids: BTreeSet<_> = self
            .actors
            .values()
            .map(|it| (it.link, &it.run_id))
            .collect();
        assert_eq!(
            ids.len(),
            self.actors.len(),
            "one attempt per session and id"
        );
    }
}

/// Proves, [S-71], [I5.1], [I5.3], [I5.5], [I5.6], [I5.8].
#[test]
fn s71_over_random_histories_slots_ids_and_numbers_are_conserved() {
    let (mut stalls, mut retained, mut waited) = (0, 0, 0);
    for seed in 1..=150 {
        let mut world = World::new(seed);
        for _ in 0..1_500 {
            world.step();
        }
        // Everything returns in the end, and nothing is left.
        world.pass(1_000_000);
        let tickets: Vec<_> = world.actors.keys().copied().collect();
        for ticket in tickets {
            if world.actors.contains_key(&ticket) {
                world.returns(ticket);
            }
        }
        world.pass(1_000_000);
        while let Some(ticket) = world.pick() {
            world.returns(ticket);
            world.pass(1_000_000);
        }
        world.check();
        assert!(
            world.runs.is_empty() && world.runs.open() == 0,
            "seed {seed}"
        );
        assert_eq!(world.gates.waiting(), 0, "seed {seed}");
        stalls += world.stalls;
        retained += world.retained;
        waited += world.waited;
    }
    assert!(
        stalls > 1_000 && retained > 500 && waited > 1_000,
        "{stalls} {retained} {waited}"
    );
}
