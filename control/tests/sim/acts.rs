//! Whoever acts in the world, and what may go wrong in it: the one list of actors and faults.
//!
//! A new one is a line of `ACTS` and a function beside it that says whether there was anything to do.
use core::num::NonZeroU64;

use iop_control::step::{
    CommandAnswer, Eligibility, Ending, Event, Evidence, EvidenceFault, Probed,
};
use iop_proto::catalog::Operation;
use iop_proto::domain::{HealthEvidence, RefreshStatus};
use iop_proto::ids::{ModelIndex, NodeIndex};
use iop_proto::limits::DEAD_MS_DEFAULT;
use iop_proto::reason::Reason;

use crate::shard::ClientState;
use crate::world::World;

pub(crate) struct Act {
    pub(crate) name: &'static str,
    /// How often, among all.
    weight: usize,
    /// The whole state is checked after it.
    pub(crate) is_fault: bool,
    /// `false`: there was nothing to do it to.
    pub(crate) run: fn(&mut World) -> bool,
}

const fn actor(name: &'static str, weight: usize, run: fn(&mut World) -> bool) -> Act {
    Act {
        name,
        weight,
        is_fault: false,
        run,
    }
}

const fn fault(name: &'static str, weight: usize, run: fn(&mut World) -> bool) -> Act {
    Act {
        name,
        weight,
        is_fault: true,
        run,
    }
}

pub(crate) const ACTS: [Act; 24] = [
    // Links, each a queue of its own.
    actor("event", 320, World::deliver_event),
    actor("effect", 240, World::deliver_effect),
    actor("parcel", 100, World::deliver_parcel),
    // Clients, nodes, requests.
    actor("client", 110, World::client_acts),
    actor("dial", 8, World::dials),
    actor("session", 30, World::session_acts),
    actor("begin", 75, World::begins),
    actor("end", 55, World::ends),
    actor("stall", 90, World::stalls),
    actor("answer", 150, World::answers),
    actor("operator", 6, World::operator),
    actor("heartbeat", 40, World::heartbeat),
    actor("clock", 40, World::clock),
    actor("refresh answered", 20, World::answers_refresh),
    // An operator.
    actor("reload", 2, World::reload),
    actor("node drained", 1, World::drains_node),
    // Faults.
    fault("certificate ends", 1, World::expires),
    fault("cut", 3, World::cut),
    fault("half-open", 2, World::goes_silent),
    fault("speaks again", 2, World::speaks_again),
    fault("link stalls", 2, World::link_stalls),
    fault("late repeat", 4, World::repeats),
    fault("goes away", 2, World::goes_away),
    fault("standstill", 1, World::stands_still),
];

/// Row of the next act.
pub(crate) fn choose(world: &mut World) -> usize {
    const TOTAL: usize = {
        let (mut sum, mut row) = (0, 0);
        while row < ACTS.len() {
            sum += ACTS[row].weight;
            row += 1;
        }
        sum
    };
    let mut at = world.dice.below(TOTAL);
    ACTS.iter()
        .position(|act| {
            let here = at < act.weight;
            at = at.wrapping_sub(act.weight);
            here
        })
        .unwrap()
}

/// Clients in the world at once.
const PEOPLE_MAX: usize = 40;
/// Longest stall of a link, steps.
const STALL_STEPS_MAX: usize = 200;

impl World {
    fn client_acts(&mut self) -> bool {
        let row = self.a_shard();
        let present = self.people.iter().filter(|person| !person.gone).count();
        let slot = if present < PEOPLE_MAX && self.dice.chance(2) {
            Some(self.person_arrives(row))
        } else {
            let seated = self.shards[row].seated();
            self.dice.pick(&seated)
        };
        let Some(slot) = slot else { return false };
        let state = self.shards[row].clients[slot as usize]
            .tenant
            .map(|client| client.state);
        match state {
            Some(ClientState::Idle) if !self.dice.chance(8) => self.asks(row, slot),
            Some(_) if self.dice.chance(3) => self.shards[row].leave(slot, &mut self.people),
            Some(_) | None => return false,
        }
        true
    }

    fn asks(&mut self, row: usize, slot: u32) {
        let model = ModelIndex::new(self.dice.below(self.names.models.len())).unwrap();
        let few = [
            Operation::ChatCompletions,
            Operation::Embeddings,
            Operation::CountTokens,
        ];
        let operation = self.dice.pick(&few).unwrap();
        let body_bytes = u32::try_from(1 + self.dice.below(2_000)).unwrap();
        self.submit(row, slot, model, operation, body_bytes);
    }

    fn dials(&mut self) -> bool {
        let row = self.a_shard();
        let node = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        let Some(slot) = self.shards[row].dial(node) else {
            return false;
        };
        if !self.dice.chance(10) {
            self.register(row, slot, Some(node));
        }
        true
    }

    /// A node says something: what it should, mostly.
    fn session_acts(&mut self) -> bool {
        let row = self.a_shard();
        let Some((slot, node)) = self.a_speaker(row) else {
            return false;
        };
        let other = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        match self.dice.below(15) {
            0..12 => self.ready(row, slot, node),
            12 => self.ready(row, slot, other),
            13 => self.register(row, slot, Some(other)),
            _ => {
                let claimed = (!self.dice.chance(2)).then_some(node);
                self.register(row, slot, claimed);
            }
        }
        true
    }

    fn begins(&mut self) -> bool {
        let row = self.a_shard();
        let open = self.shards[row].open_sessions();
        let slot = self.dice.pick(&open);
        slot.is_some_and(|slot| self.begin(row, slot))
    }

    fn ends(&mut self) -> bool {
        let row = self.a_shard();
        let begun = self.shards[row].begun_rows();
        let Some(run) = self.dice.pick(&begun) else {
            return false;
        };
        self.end(row, run);
        true
    }

    pub(crate) fn end(&mut self, row: usize, run: u32) {
        let endings = [Ending::Complete, Ending::Error, Ending::Violation];
        let ending = self.dice.pick(&endings).unwrap();
        self.shards[row].end(run, ending, &mut self.people);
    }

    /// A run stalls; what its node says of the provider is sometimes old, sometimes about another.
    fn stalls(&mut self) -> bool {
        let row = self.a_shard();
        let begun = self.shards[row].begun_rows();
        let Some(run) = self.dice.pick(&begun) else {
            return false;
        };
        let seq = self.shards[row].observe(run, &mut self.dice);
        let seq = NonZeroU64::new(seq).filter(|_| !self.dice.chance(8));
        let health = match self.dice.below(4) {
            0 => HealthEvidence::Available,
            1 => HealthEvidence::Unknown,
            _ => HealthEvidence::Unavailable,
        };
        let evidence = if self.dice.chance(8) {
            Evidence::Rejected(EvidenceFault::Adapter)
        } else {
            Evidence::Valid { health, seq }
        };
        let recovery = if self.dice.chance(3) {
            Eligibility::Committed
        } else {
            Eligibility::Eligible
        };
        self.shards[row].stall(run, evidence, recovery);
        true
    }

    /// A node answers one of the questions it was asked, in no order.
    fn answers(&mut self) -> bool {
        let row = self.a_shard();
        let Some((slot, _)) = self.a_speaker(row) else {
            return false;
        };
        self.shards[row].answer_command(slot, &mut self.dice, |seq, dice| {
            let probed = match dice.below(10) {
                0 => Probed::Unknown,
                1 => Probed::Unavailable,
                2 => Probed::Rejected(EvidenceFault::Target),
                3 => return CommandAnswer::Failed,
                _ => Probed::Available {
                    seq: NonZeroU64::new(seq).unwrap(),
                },
            };
            CommandAnswer::Probed(probed)
        })
    }

    fn operator(&mut self) -> bool {
        let node = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        self.operator_asks(node)
    }

    /// A shard notices that a node has been silent for too long.
    fn heartbeat(&mut self) -> bool {
        let row = self.a_shard();
        let silent = self.shards[row].silent_sessions();
        let due = silent
            .iter()
            .find(|(_, since)| self.now.ms_since(*since) >= DEAD_MS_DEFAULT);
        let Some(&(slot, _)) = due else { return false };
        self.close(row, slot, Reason::HeartbeatTimeout);
        true
    }

    fn clock(&mut self) -> bool {
        let ms = if self.dice.chance(4) {
            self.dice.below(3_000) as u64
        } else {
            self.dice.below(50) as u64
        };
        self.time_passes(ms);
        true
    }

    /// A node answers its oldest refresh, in some way.
    fn answers_refresh(&mut self) -> bool {
        let row = self.a_shard();
        let owing = self.shards[row].owing_sessions();
        let Some(slot) = self.dice.pick(&owing) else {
            return false;
        };
        let Some((session, refresh)) = self.shards[row].answers_refresh(slot) else {
            return false;
        };
        let statuses = [
            RefreshStatus::Applied,
            RefreshStatus::Applied,
            RefreshStatus::Applied,
            RefreshStatus::RestartRequired,
            RefreshStatus::Failed,
        ];
        let status = self.dice.pick(&statuses).unwrap();
        self.refreshed(row, session, refresh, status);
        true
    }

    fn drains_node(&mut self) -> bool {
        let node = NodeIndex::new(self.dice.below(self.names.nodes.len())).unwrap();
        self.drain_node(node)
    }

    // ── faults ───────────────────────────────────────────────────────────────────────────────────

    fn cut(&mut self) -> bool {
        let row = self.a_shard();
        let open = self.shards[row].open_sessions();
        let Some(slot) = self.dice.pick(&open) else {
            return false;
        };
        let causes = [Reason::PeerClosed, Reason::EnvelopeMalformed];
        let cause = self.dice.pick(&causes).unwrap();
        self.close(row, slot, cause);
        true
    }

    /// The path to a node is gone without a word: the socket stays, nothing comes.
    fn goes_silent(&mut self) -> bool {
        let row = self.a_shard();
        let Some((slot, _)) = self.a_speaker(row) else {
            return false;
        };
        self.shards[row].set_silent(slot, Some(self.now));
        true
    }

    fn speaks_again(&mut self) -> bool {
        let row = self.a_shard();
        let silent = self.shards[row].silent_sessions();
        let Some((slot, _)) = self.dice.pick(&silent) else {
            return false;
        };
        self.shards[row].set_silent(slot, None);
        true
    }

    /// A thread is off the core: one of the queues it empties, or fills, stands still.
    fn link_stalls(&mut self) -> bool {
        let until = self.steps + 1 + self.dice.below(STALL_STEPS_MAX) as u64;
        let (row, other) = (self.a_shard(), self.a_shard());
        match self.dice.below(3) {
            0 => self.events_stalled[row] = until,
            1 => self.effects[row].stalled = until,
            _ => self.parcels[row][other].stalled = until,
        }
        true
    }

    /// Something that was reported long ago is reported once more. `[R-078]` `[S-05]`
    fn repeats(&mut self) -> bool {
        let past: Vec<Event> = self.past.iter().copied().collect();
        self.dice
            .pick(&past)
            .is_some_and(|event| self.repeat(event))
    }

    fn expires(&mut self) -> bool {
        let row = self.a_shard();
        let open = self.shards[row].open_sessions();
        let slot = self.dice.pick(&open);
        slot.is_some_and(|slot| self.shards[row].expires(slot))
    }

    fn goes_away(&mut self) -> bool {
        let row = self.a_shard();
        let Some((slot, _)) = self.a_speaker(row) else {
            return false;
        };
        self.shards[row].go_away(slot)
    }

    /// The process was stopped, or the machine asleep.
    fn stands_still(&mut self) -> bool {
        let ms = if self.dice.chance(3) { 31_000 } else { 6_000 };
        self.time_passes(ms);
        true
    }
}
