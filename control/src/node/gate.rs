//! Capacity gates: how many executions of one adapter may call its backend at once, runs and tunnels
//! together. Defence in depth behind the Edge's queue; nothing of it is ever sent. `[R-242]` `[R-244]`
//!
//! Lives on: the agent's main task. View: one process; gates outlive sessions and configurations.
//! Bound: a gate per adapter named or held; `WAITING_ATTEMPTS_MAX` waiters over all. `[D-23]`
use std::collections::{BTreeMap, VecDeque};

use iop_proto::limits::WAITING_ATTEMPTS_MAX;

use super::Ticket;

/// What became of an attempt that asked for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It holds a slot now.
    Granted,
    /// It waits; [`Gates::next_grant`] names it when its turn comes.
    Waits,
    /// Too many wait already. Never said while a slot is free. `[D-23]`
    Full,
    /// No configuration names the adapter.
    Unknown,
}

/// All gates of the process, keyed by adapter name: apply, refresh, reconnect and teardown keep
/// them. `[R-295]` `[S-71]`
#[derive(Debug, Default)]
pub struct Gates {
    gates: BTreeMap<String, Gate>,
    waiting: usize,
    granted: VecDeque<Ticket>,
}

#[derive(Debug, Default)]
struct Gate {
    /// `None`: no local limit (an Edge that states no capacity). `[A-54]`
    capacity: Option<u32>,
    held: u32,
    /// First come, first served. Not empty only while no slot is free.
    waiters: VecDeque<Ticket>,
    configured: bool,
}

impl Gate {
    fn is_free(&self) -> bool {
        self.capacity.is_none_or(|capacity| self.held < capacity)
    }
}

impl Gates {
    /// Names the adapters in force with their capacities (0 = no local limit). A gate that is no
    /// longer named goes once nothing holds it. A lowered capacity only delays grants.
    pub fn configure<'a>(&mut self, adapters: impl IntoIterator<Item = (&'a str, u32)>) {
        for gate in self.gates.values_mut() {
            gate.configured = false;
        }
        for (name, capacity) in adapters {
            let gate = self.gates.entry(name.to_owned()).or_default();
            gate.configured = true;
            gate.capacity = (capacity > 0).then_some(capacity);
        }
        self.gates
            .retain(|_, gate| gate.configured || gate.held > 0 || !gate.waiters.is_empty());
        for gate in self.gates.values_mut() {
            Self::pump(gate, &mut self.waiting, &mut self.granted);
        }
    }

    /// Asks for a slot of `adapter` for `ticket`.
    pub fn enter(&mut self, adapter: &str, ticket: Ticket) -> Entry {
        let Some(gate) = self.gates.get_mut(adapter).filter(|gate| gate.configured) else {
            return Entry::Unknown;
        };
        if gate.is_free() {
            gate.held += 1;
            return Entry::Granted;
        }
        if self.waiting >= WAITING_ATTEMPTS_MAX as usize {
            return Entry::Full;
        }
        self.waiting += 1;
        gate.waiters.push_back(ticket);
        Entry::Waits
    }

    /// A waiter gives up. False: it was not waiting here, so it may hold a slot.
    pub fn leave(&mut self, adapter: &str, ticket: Ticket) -> bool {
        let Some(gate) = self.gates.get_mut(adapter) else {
            return false;
        };
        let Some(place) = gate.waiters.iter().position(|&waiter| waiter == ticket) else {
            return false;
        };
        gate.waiters.remove(place);
        self.waiting -= 1;
        self.forget(adapter);
        true
    }

    /// A slot comes back, once per grant.
    ///
    /// # Panics
    /// When nothing of the adapter was held: a slot was returned twice.
    pub fn release(&mut self, adapter: &str) {
        let gate = self.gates.get_mut(adapter).filter(|gate| gate.held > 0);
        let gate = gate.expect("a slot is released once, by who holds it");
        gate.held -= 1;
        Self::pump(gate, &mut self.waiting, &mut self.granted);
        self.forget(adapter);
    }

    /// The next waiter that got a slot, in the order of the grants. It holds the slot already.
    pub fn next_grant(&mut self) -> Option<Ticket> {
        self.granted.pop_front()
    }

    /// Slots of `adapter` that are held.
    #[must_use]
    pub fn held(&self, adapter: &str) -> u32 {
        self.gates.get(adapter).map_or(0, |gate| gate.held)
    }

    /// Adapters that no configuration names any more and whose last calls are not over.
    pub fn draining(&self) -> impl Iterator<Item = &str> {
        let gates = self.gates.iter().filter(|(_, gate)| !gate.configured);
        gates.map(|(name, _)| name.as_str())
    }

    /// Attempts that wait, over all gates.
    #[must_use]
    pub const fn waiting(&self) -> usize {
        self.waiting
    }

    fn pump(gate: &mut Gate, waiting: &mut usize, granted: &mut VecDeque<Ticket>) {
        while gate.is_free() {
            let Some(ticket) = gate.waiters.pop_front() else {
                break;
            };
            *waiting -= 1;
            gate.held += 1;
            granted.push_back(ticket);
        }
    }

    fn forget(&mut self, adapter: &str) {
        let idle = |gate: &Gate| !gate.configured && gate.held == 0 && gate.waiters.is_empty();
        if self.gates.get(adapter).is_some_and(idle) {
            self.gates.remove(adapter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "a";

    fn gates(capacity: u32) -> Gates {
        let mut gates = Gates::default();
        gates.configure([(A, capacity)]);
        gates
    }

    fn grants(gates: &mut Gates) -> Vec<u64> {
        core::iter::from_fn(|| gates.next_grant())
            .map(Ticket::get)
            .collect()
    }

    /// Proves.
    #[test]
    fn r240_each_adapter_admits_exactly_its_own_capacity() {
        let mut gates = Gates::default();
        gates.configure([("two", 2), ("three", 3)]);
        let ask = |gates: &mut Gates, name, n| gates.enter(name, Ticket(n));
        assert_eq!(ask(&mut gates, "two", 1), Entry::Granted);
        assert_eq!(ask(&mut gates, "two", 2), Entry::Granted);
        assert_eq!(ask(&mut gates, "two", 3), Entry::Waits);
        for n in 4..7 {
            assert_eq!(ask(&mut gates, "three", n), Entry::Granted);
        }
        assert_eq!(ask(&mut gates, "three", 7), Entry::Waits);
        assert_eq!(
            (gates.held("two"), gates.held("three"), gates.waiting()),
            (2, 3, 2)
        );
        assert_eq!(ask(&mut gates, "other", 8), Entry::Unknown);
    }

    #[test]
    fn waiters_get_slots_in_their_order_and_one_that_left_gets_none() {
        let mut gates = gates(1);
        assert_eq!(gates.enter(A, Ticket(1)), Entry::Granted);
        for n in 2..=5 {
            assert_eq!(gates.enter(A, Ticket(n)), Entry::Waits);
        }
        assert!(gates.leave(A, Ticket(3)));
        assert!(!gates.leave(A, Ticket(3)));
        assert!(!gates.leave(A, Ticket(1)), "a holder does not wait");
        for expected in [2, 4, 5] {
            gates.release(A);
            assert_eq!(grants(&mut gates), [expected]);
            assert_eq!(gates.held(A), 1);
        }
        gates.release(A);
        assert_eq!(
            (grants(&mut gates), gates.held(A), gates.waiting()),
            (vec![], 0, 0)
        );
    }

    /// Proves [S-71].
    #[test]
    fn s71_a_held_slot_counts_across_configurations() {
        let mut gates = gates(1);
        assert_eq!(gates.enter(A, Ticket(1)), Entry::Granted);
        assert_eq!(gates.draining().next(), None);
        gates.configure([]);
        assert_eq!(gates.enter(A, Ticket(2)), Entry::Unknown);
        assert_eq!(gates.draining().collect::<Vec<_>>(), [A]);
        gates.configure([(A, 1)]);
        assert_eq!(
            gates.enter(A, Ticket(3)),
            Entry::Waits,
            "not doubled by the return"
        );
        gates.release(A);
        assert_eq!(grants(&mut gates), [3]);
        gates.configure([]);
        gates.release(A);
        assert!(gates.gates.is_empty(), "unnamed and unheld: gone");
    }

    #[test]
    fn a_raised_capacity_grants_and_a_lowered_one_only_delays() {
        let mut gates = gates(1);
        for n in 1..=4 {
            gates.enter(A, Ticket(n));
        }
        gates.configure([(A, 3)]);
        assert_eq!(grants(&mut gates), [2, 3]);
        gates.configure([(A, 1)]);
        assert_eq!(gates.held(A), 3);
        gates.release(A);
        gates.release(A);
        assert_eq!(grants(&mut gates), [], "still at the new capacity");
        gates.release(A);
        assert_eq!(grants(&mut gates), [4]);
    }

    /// Proves [D-23].
    #[test]
    fn d23_the_last_waiter_fits_the_next_is_refused_and_a_free_slot_never_is() {
        let mut gates = Gates::default();
        gates.configure([(A, 1), ("free", 1)]);
        gates.enter(A, Ticket(0));
        for n in 1..u64::from(WAITING_ATTEMPTS_MAX) {
            assert_eq!(gates.enter(A, Ticket(n)), Entry::Waits);
        }
        assert_eq!(gates.enter(A, Ticket(9_000)), Entry::Waits);
        assert_eq!(gates.enter(A, Ticket(9_001)), Entry::Full);
        assert_eq!(gates.enter("free", Ticket(9_002)), Entry::Granted);
        assert_eq!(gates.enter("free", Ticket(9_003)), Entry::Full);
    }

    #[test]
    fn no_stated_capacity_is_no_local_limit() {
        let mut gates = gates(0);
        for n in 0..5_000 {
            assert_eq!(gates.enter(A, Ticket(n)), Entry::Granted);
        }
    }
}
