//! States of the model as numbers.
use iop_proto::ids::{ClientRef, Generation, RunRef, SessionRef, SlotGeneration};

use super::{Person, SHARDS, State, shard};
use crate::edge::lease::Phase;
use crate::edge::queue::Age;
use crate::edge::registry::OpenSession;
use crate::edge::resource::Live;
use crate::edge::{Control, Timer};
use crate::step::{Effect, Event};

/// A state's print: equal for states that differ only in how often something has happened. Counts
/// of tenants, claims, ages and uses are written as their rank among those that are mentioned.
#[derive(Default)]
pub(super) struct Print {
    words: Vec<u64>,
    ranked: Vec<(u64, u64, usize)>,
}

const SESSIONS: u64 = 1 << 32;
const CLIENTS: u64 = 2 << 32;
const RUNS: u64 = 3 << 32;
const CLAIMS: u64 = 4 << 32;
const AGES: u64 = 5 << 32;
const USES: u64 = 6 << 32;

impl Print {
    pub(super) fn of(state: &State) -> u128 {
        let mut print = Self::default();
        print.control(&state.control);
        for (row, connection) in state.connections.iter().enumerate() {
            print.session(state.session(row));
            print.word(connection.open.is_some().into());
            let Some(open) = &connection.open else {
                continue;
            };
            print.words.extend([
                open.node as u64,
                open.ready.into(),
                open.said.bits(),
                open.writer.len() as u64,
            ]);
            for &run in &open.writer {
                print.run(run);
            }
        }
        for (who, client) in state.clients.iter().enumerate() {
            print.word(client.shard as u64);
            for (row, generation) in client.generations.iter().enumerate() {
                print.rank(
                    CLIENTS + 16 * row as u64 + who as u64,
                    generation.get().into(),
                );
            }
            match client.state {
                Person::Idle => print.word(0),
                Person::Waiting => print.word(1),
                Person::Moving => print.word(2),
                Person::Running(run) => print.run(run),
            }
        }
        for (&(row, slot), &(generation, run)) in &state.runs {
            print.run(RunRef {
                shard: shard(row),
                slot,
                generation,
            });
            print.debug(&run);
        }
        print.links(state);
        print.finish()
    }

    fn links(&mut self, state: &State) {
        for row in 0..SHARDS {
            self.word(state.events[row].len() as u64);
            for event in &state.events[row] {
                self.event(event);
            }
            self.word(state.effects[row].len() as u64);
            for effect in &state.effects[row] {
                self.effect(effect);
            }
            for to in &state.parcels[row] {
                self.word(to.len() as u64);
                for parcel in to {
                    self.run(parcel.run);
                    self.words.push(parcel.connection as u64);
                    let home = state.session(parcel.connection);
                    self.session(SessionRef {
                        generation: parcel.tenancy,
                        ..home
                    });
                    self.words.push(parcel.who.map_or(9, |who| who as u64));
                }
            }
        }
    }

    fn control(&mut self, control: &Control) {
        self.registry(control);
        self.ranked.push((USES, 0, usize::MAX)); // unused stays apart from used
        for (_, resource) in control.resources.all() {
            self.rank(USES, resource.last_used);
            self.word(resource.load.in_flight.into());
            match resource.live {
                Live::Offline => self.word(7),
                Live::Live {
                    generation,
                    draining,
                } => {
                    self.claim(generation);
                    self.word(draining.into());
                }
            }
        }
        for model in control.queue.models() {
            self.word(control.queue.undecided(model).into());
            for candidate in control.queue.candidates(model) {
                self.word(candidate.selected.into());
            }
            for (place, waiter) in control.queue.lines(model).flatten() {
                self.age(place.age);
                self.client(waiter.client);
            }
        }
        for (row, leases) in control.leases.shards().iter().enumerate() {
            for (slot, generation, lease) in leases.rows() {
                let generation = generation.expect("no row is spent here");
                self.run(RunRef {
                    shard: shard(row),
                    slot,
                    generation,
                });
                let Some(lease) = lease else { continue };
                self.word(lease.provider.row() as u64);
                self.claim(lease.generation);
                self.age(lease.place.age);
                self.word(match lease.phase {
                    Phase::Selected => 0,
                    Phase::Begun => 1,
                    Phase::Cancelled(_) => 2,
                });
            }
            self.words
                .extend(leases.free().iter().map(|&slot| u64::from(slot)));
        }
        for (_, timer) in control.timers.iter() {
            match timer {
                Timer::Wait(place) => self.age(place.age),
                Timer::Begin(run) => self.run(run),
                Timer::Close(session) => self.session(session),
                Timer::Refresh(node) | Timer::Drain(node) => self.word(node.row() as u64),
                Timer::Beat(_) => {}
                Timer::Command(_) | Timer::Probe(_) => unreachable!("nothing stalls here"),
            }
        }
    }

    fn registry(&mut self, control: &Control) {
        for OpenSession {
            session,
            bound,
            close_at,
        } in control.registry.open_sessions()
        {
            self.session(session);
            self.word(close_at.is_some().into());
            self.debug(&control.registry.state(session));
            if let Some((node, generation)) = bound {
                self.word(node.row() as u64);
                self.claim(generation);
            }
        }
        for owner in control.registry.owners() {
            self.word(owner.is_some().into());
            if let Some(owner) = owner {
                self.session(owner.session);
                self.word(owner.is_ready.into());
            }
        }
    }

    fn event(&mut self, event: &Event) {
        self.kind(event);
        match *event {
            Event::Register {
                session, claimed, ..
            }
            | Event::Ready {
                session, claimed, ..
            } => {
                self.session(session);
                self.word(claimed.map_or(9, |node| node.row() as u64));
            }
            Event::Closed { session, .. }
            | Event::GoAway { session }
            | Event::Expired { session }
            | Event::Refreshed { session, .. } => self.session(session),
            Event::Submit { client, model, .. } => {
                self.client(client);
                self.word(model.row() as u64);
            }
            Event::ClientGone { client } => self.client(client),
            Event::NotSent { run, client } => {
                self.run(run);
                self.word(client.is_some().into());
                if let Some(client) = client {
                    self.client(client);
                }
            }
            Event::Begun { run }
            | Event::Terminal { run, .. }
            | Event::Lost { run }
            | Event::Overdue { run } => {
                self.run(run);
            }
            Event::Stalled { .. } | Event::CommandAnswer { .. } => {
                unreachable!("nothing stalls here")
            }
            Event::Pong { .. } => {}
        }
    }

    fn effect(&mut self, effect: &Effect) {
        self.kind(effect);
        match *effect {
            Effect::RegisterReply { session, close, .. } => {
                self.session(session);
                self.word(close.into());
            }
            Effect::ReadyReply {
                session, refusal, ..
            } => {
                self.session(session);
                self.word(refusal.is_none().into());
            }
            Effect::Close { session, .. } | Effect::Refresh { session, .. } => {
                self.session(session);
            }
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => {
                self.client(client);
                self.run(run);
                self.session(session);
                self.word(provider.row() as u64);
            }
            Effect::Refuse { client, .. } => self.client(client),
            Effect::Cancel { run, .. } => self.run(run),
            Effect::Handoff { .. } | Effect::Command { .. } => {
                unreachable!("nothing stalls here")
            }
            Effect::Ping { .. }
            | Effect::Configure { .. }
            | Effect::Drain { .. }
            | Effect::Stop { .. } => {}
        }
    }

    fn word(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Which variant it is.
    fn kind<T: core::fmt::Debug>(&mut self, value: &T) {
        let text = format!("{value:?}");
        let name = text.split([' ', '(', '{']).next().unwrap_or_default();
        self.text(name);
    }

    /// All of a value that holds no counts.
    fn debug<T: core::fmt::Debug>(&mut self, value: &T) {
        self.text(&format!("{value:?}"));
    }

    fn text(&mut self, text: &str) {
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        self.words.push(hash);
    }

    fn rank(&mut self, of: u64, raw: u64) {
        self.ranked.push((of, raw, self.words.len()));
        self.words.push(0);
    }

    fn place(&mut self, table: u64, row: usize, slot: u32, generation: SlotGeneration) {
        let at = 16 * row as u64 + u64::from(slot);
        self.words.push(table | at);
        self.rank(table + at, generation.get().into());
    }

    fn session(&mut self, session: SessionRef) {
        self.place(
            SESSIONS,
            session.shard.row(),
            session.slot,
            session.generation,
        );
    }

    fn client(&mut self, client: ClientRef) {
        self.place(CLIENTS, client.shard.row(), client.slot, client.generation);
    }

    fn run(&mut self, run: RunRef) {
        self.place(RUNS, run.shard.row(), run.slot, run.generation);
    }

    fn claim(&mut self, generation: Generation) {
        self.rank(CLAIMS, generation.get());
    }

    fn age(&mut self, age: Age) {
        self.rank(AGES, age.get());
    }

    fn finish(mut self) -> u128 {
        self.ranked.sort_unstable();
        let mut last = (0, 0);
        let mut rank = 0;
        for &(of, raw, at) in &self.ranked {
            if of != last.0 {
                rank = 0;
            } else if raw != last.1 {
                rank += 1;
            }
            last = (of, raw);
            if at != usize::MAX {
                self.words[at] = rank;
            }
        }
        let half = |seed: u64| {
            self.words.iter().fold(seed, |hash, &word| {
                let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                mixed ^ (mixed >> 29)
            })
        };
        u128::from(half(0x243f_6a88_85a3_08d3)) << 64 | u128::from(half(0x1319_8a2e_0370_7344))
    }
}
