//! What holds after every step, checked over the whole state by recounting it.
//!
//! Nothing here uses the indexes it checks: each figure is counted again from the rows it stands
//! for.
//!
//! Lives on: control, in debug builds now and then; in the simulator after each step.
//! Bound: O(everything).
use core::fmt;
use std::collections::BTreeSet;

use iop_proto::ids::NodeIndex;

use super::lease::Phase;
use super::probe::Probe;
use super::queue::Place;
use super::resource::Live;
use super::{Control, Timer};

/// An invariant that does not hold: a bug.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Its name in the contract's states, `I3.1` and so on; or `index` for a table of our own.
    pub id: &'static str,
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} does not hold: {}", self.id, self.detail)
    }
}

macro_rules! holds {
    ($id:literal, $condition:expr, $($detail:tt)+) => {
        if !$condition {
            return Err(Violation { id: $id, detail: format!($($detail)+) });
        }
    };
}

impl Control {
    /// Recounts the whole state.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.check_owners()?;
        self.check_resources()?;
        self.check_health()?;
        self.check_leases()?;
        self.check_queue()?;
        self.check_order()?;
        self.check_timers()
    }

    /// I1.1, I1.2, I1.3, I1.5, I2.1.
    fn check_owners(&self) -> Result<(), Violation> {
        let mut generations = BTreeSet::new();
        let mut owning = 0;
        for open in self.registry.open_sessions() {
            let Some((node, generation)) = open.bound else {
                continue;
            };
            let older = self
                .registry
                .next_generation()
                .is_none_or(|next| generation < next);
            holds!(
                "I1.2",
                generations.insert(generation) && older,
                "{generation:?} twice"
            );
            if let Some(owner) = self
                .registry
                .owner(node)
                .filter(|o| o.session == open.session)
            {
                owning += 1;
                holds!(
                    "I1.2",
                    owner.generation == generation,
                    "{owner:?} differs from its row"
                );
            }
        }
        let owned = self.registry.owners().flatten().count();
        holds!(
            "I1.1",
            owned == owning,
            "{owned} node ids owned by {owning} open connections"
        );
        for (provider, resource) in self.resources.all() {
            let ready = self
                .registry
                .owner(resource.node)
                .filter(|owner| owner.is_ready);
            let expected = ready.map(|owner| owner.generation);
            let live = resource.generation();
            holds!(
                "I1.3",
                live == expected,
                "{provider:?} lives under {live:?}, not {expected:?}"
            );
        }
        let counted = &self.counters;
        holds!(
            "I1.5",
            counted.notices_connected == counted.activations
                && counted.notices_disconnected == counted.fences
                && counted.fences <= counted.activations,
            "{counted:?}"
        );
        Ok(())
    }

    /// I2.8, and the queue's view of each provider's room.
    fn check_resources(&self) -> Result<(), Violation> {
        for (provider, resource) in self.resources.all() {
            let load = resource.load;
            let fits = resource.is_within_bounds();
            holds!("I2.8", fits, "{provider:?} is over its bounds: {load:?}");
            let is_empty = resource.live != Live::Offline || load.in_flight == 0;
            holds!(
                "I2.1",
                is_empty,
                "{provider:?} is offline and holds {load:?}"
            );
        }
        Ok(())
    }

    /// I2.1 and I2.5 of the overlay; commands of live generations alone; a probe in sight for each
    /// overlay of an enabled provider, and for nothing else.
    fn check_health(&self) -> Result<(), Violation> {
        for (provider, resource) in self.resources.all() {
            let record = *resource.bindings.record();
            let is_live = resource.live != Live::Offline;
            holds!(
                "I2.1",
                is_live || record.is_new(),
                "{provider:?} is offline with {record:?}"
            );
            holds!("I2.5", record.is_sound(), "{provider:?} has {record:?}");
            let probe = self.prober.get(provider);
            let is_probed = probe != Probe::Idle;
            holds!(
                "index",
                is_probed == (resource.enabled && record.is_lowered()),
                "{provider:?} has {record:?} and {probe:?}"
            );
            let asked = self.prober.asked(resource.node);
            let moves = match probe {
                Probe::Idle | Probe::Waiting { .. } => true,
                Probe::Due { .. } => asked.is_some(),
                Probe::Asked { .. } => asked.is_some_and(|(_, about)| about == provider),
            };
            holds!(
                "index",
                moves,
                "{provider:?} is {probe:?} and {asked:?} is asked"
            );
            let ends = asked.is_none_or(|(command, _)| self.commands.get(command).is_some());
            holds!("index", ends, "{asked:?} is asked and nobody will answer");
        }
        for row in self.commands.rows() {
            let owner = self.registry.owner(row.node);
            let is_current = owner.is_some_and(|owner| {
                owner.is_ready && owner.session == row.session && owner.generation == row.generation
            });
            holds!("I1.3", is_current, "{row:?} is asked of {owner:?}");
        }
        holds!(
            "index",
            self.commands.is_sound(),
            "commands and their lists differ"
        );
        Ok(())
    }

    /// I2.8 and I3.1, from the lease rows.
    fn check_leases(&self) -> Result<(), Violation> {
        let providers = self.names.providers.len();
        let mut held = vec![(0, 0, 0); providers];
        for lease in self.leases.iter() {
            if self.resources.is_current(lease.provider, lease.generation) {
                let count = &mut held[lease.provider.row()];
                count.0 += 1;
                count.1 += u32::from(lease.place.class.is_long());
                count.2 += u32::from(lease.place.class.is_count_tokens());
            }
        }
        for (provider, resource) in self.resources.all() {
            let load = resource.load;
            let counted = held[provider.row()];
            let same = counted == (load.in_flight, load.long, load.count_tokens);
            holds!(
                "I2.8",
                same,
                "{provider:?} counts {load:?}, its leases are {counted:?}"
            );
        }
        let (taken, returned) = (self.resources.taken, self.resources.returned);
        let held = self.resources.held();
        holds!(
            "I3.1",
            taken == returned + held,
            "{taken} taken, {returned} returned, {held} held"
        );
        let counted = &self.counters;
        let by_reason = counted.returns_terminal
            + counted.returns_not_sent
            + counted.returns_fence
            + counted.returns_lost;
        holds!(
            "I3.1",
            by_reason == returned,
            "{returned} returned, {by_reason} by reason"
        );
        holds!(
            "I3.1",
            counted.grants == taken,
            "{taken} taken by {} grants",
            counted.grants
        );
        Ok(())
    }

    /// I3.2 and I3.8: lines, counts, the client index, runs that may come back.
    fn check_queue(&self) -> Result<(), Violation> {
        let mut waiting = 0;
        for model in self.queue.models() {
            let (mut queued, mut long, mut bytes) = (0, 0, 0);
            for line in self.queue.lines(model) {
                let mut key = None;
                for (place, waiter) in line {
                    queued += 1;
                    long += u32::from(place.class.is_long());
                    bytes += u64::from(waiter.body_bytes);
                    let known = self.queue.place_of(waiter.client);
                    holds!(
                        "I3.2",
                        known == Some(place) && place.model == model,
                        "{waiter:?} at {place:?} is known at {known:?}"
                    );
                    let own = place.line();
                    let is_own = key.is_none_or(|key| key == own);
                    holds!("index", is_own, "{place:?} stands among {key:?}");
                    key = Some(own);
                }
                holds!("index", key.is_some(), "a line of {model:?} is empty");
            }
            let counted = (self.queue.waiting(model), self.queue.waiting_bytes(model));
            let same = counted == ((queued, long), bytes);
            holds!(
                "I3.8",
                same,
                "{model:?} counts {counted:?}, lines hold {queued} {long} {bytes}"
            );
            waiting += queued as usize;
            let dead = self.leases.iter().filter(|lease| {
                lease.place.model == model
                    && lease.phase == Phase::Selected
                    && !self.resources.is_current(lease.provider, lease.generation)
            });
            let (dead, undecided) = (dead.count(), self.queue.undecided(model) as usize);
            holds!(
                "index",
                dead == undecided,
                "{model:?} waits for {undecided} runs, not {dead}"
            );
        }
        let total = self.queue.waiting_total();
        holds!(
            "I3.2",
            waiting == total,
            "{waiting} wait, {total} clients are known to"
        );
        Ok(())
    }

    /// I3.7 and D-16: the next to be granted is the oldest that some provider has room for, found
    /// by asking every provider for every line; the seats hold each line's head once, and no more.
    fn check_order(&self) -> Result<(), Violation> {
        let mut oldest: Option<Place> = None;
        let mut seated = 0;
        for model in self
            .queue
            .models()
            .filter(|&model| self.queue.undecided(model) == 0)
        {
            let candidates = self.queue.candidates(model);
            for (head, _) in self.queue.lines(model).filter_map(|mut line| line.next()) {
                seated += candidates.iter().filter(|c| c.serves(head.line())).count();
                if self.resources.select(candidates, head).is_some() {
                    oldest = Some(oldest.map_or(head, |oldest| oldest.min(head)));
                }
            }
        }
        let shown = self.queue.seated();
        holds!(
            "index",
            shown == seated,
            "{shown} heads are seated, not {seated}"
        );
        let next = self.queue.next();
        holds!(
            "I3.7",
            next == oldest,
            "next is {next:?}, the oldest with room is {oldest:?}"
        );
        Ok(())
    }

    /// Every wait has its deadline, and nothing else has one.
    fn check_timers(&self) -> Result<(), Violation> {
        let mut expected = 0;
        for model in self.queue.models() {
            for (place, waiter) in self.queue.lines(model).flatten() {
                expected += 1;
                let is_set = self.timers.contains(waiter.ends, Timer::Wait(place));
                holds!("index", is_set, "{waiter:?} has no deadline");
                let waits_on = waiter.ends == waiter.deadline || !self.queue.is_served(place);
                holds!("index", waits_on, "{waiter:?} is served and ends early");
            }
        }
        for open in self.registry.open_sessions() {
            let Some(at) = open.close_at else { continue };
            expected += 1;
            let is_set = self.timers.contains(at, Timer::Close(open.session));
            holds!("index", is_set, "{:?} is never closed", open.session);
        }
        for (provider, _) in self.resources.all() {
            let Probe::Waiting { at, .. } = self.prober.get(provider) else {
                continue;
            };
            expected += 1;
            let is_set = self.timers.contains(at, Timer::Probe(provider));
            holds!("index", is_set, "{provider:?} is never asked about");
        }
        expected += self.commands.deadlines().count();
        for (row, tenure) in self.tenures.iter().enumerate() {
            let Some(node) = NodeIndex::new(row) else {
                continue;
            };
            let (refresh, drain) = tenure.deadlines();
            let timers = [(refresh, Timer::Refresh(node)), (drain, Timer::Drain(node))];
            for (at, timer) in timers {
                let Some(at) = at else { continue };
                expected += 1;
                let is_set = self.timers.contains(at, timer);
                holds!("index", is_set, "{timer:?} is never due");
            }
        }
        for (shard, due) in self.pulse.shards() {
            expected += 1;
            let is_set = self.timers.contains(due, Timer::Beat(shard));
            holds!("index", is_set, "{shard:?} is not watched");
        }
        let selected = self
            .leases
            .iter()
            .filter(|lease| lease.phase == Phase::Selected)
            .count();
        // A run of an ended generation may have lost its deadline: it comes back by itself.
        let bounds = expected..=expected + selected;
        let set = self.timers.len();
        holds!(
            "index",
            bounds.contains(&set),
            "{set} deadlines set, {bounds:?} expected"
        );
        Ok(())
    }
}
