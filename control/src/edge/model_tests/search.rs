//! The search: level by level, on every core.
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::print::Print;
use super::{Action, State};

/// Steps from each start in `cargo test`.
const DEPTH: u64 = 7;
/// States kept, as a print and the step that led to them: about 2 GB.
const STATES_MAX: usize = 30_000_000;
/// One state in so many is driven on to its end.
const DRAINED_SHARE: usize = 32;

/// How a state came about: the state before, and which of its actions in which way.
#[derive(Clone, Copy)]
struct Step {
    parent: u32,
    choice: u16,
}

/// All states met so far; whole ones are made again from the start when they are needed.
struct Search {
    start: State,
    steps: Vec<Step>,
    seen: BTreeSet<u128>,
}

impl Search {
    fn new(start: State) -> Self {
        let seen = BTreeSet::from([Print::of(&start)]);
        let none = Step {
            parent: 0,
            choice: 0,
        };
        Self {
            start,
            steps: vec![none],
            seen,
        }
    }

    fn state(&self, row: usize) -> State {
        let mut way = Vec::new();
        let mut at = row;
        while at != 0 {
            way.push(self.steps[at].choice);
            at = self.steps[at].parent as usize;
        }
        let mut state = self.start.clone();
        for choice in way.into_iter().rev() {
            let action = state.actions()[usize::from(choice / 2)];
            state.act_in_way(action, !choice.is_multiple_of(2));
        }
        state
    }

    /// What follows from the state in `row` and was not known before this level.
    fn expand(&self, row: usize, new: &mut BTreeSet<u128>, found: &mut Vec<(u128, Step)>) {
        let state = self.state(row);
        let next = catch_unwind(AssertUnwindSafe(|| {
            if row.is_multiple_of(DRAINED_SHARE) {
                state.clone().drain();
            }
            state.next()
        }));
        let next = next.unwrap_or_else(|_| panic!("after {:?} or one step more", state.trail));
        for (choice, state) in next {
            let print = Print::of(&state);
            if !self.seen.contains(&print) && new.insert(print) {
                let parent = u32::try_from(row).unwrap();
                found.push((print, Step { parent, choice }));
            }
        }
    }

    /// One step more from all states since `first`, on every core.
    fn level(&mut self, first: usize) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let rows: Vec<usize> = (first..self.steps.len()).collect();
        let share = rows.len().div_ceil(cores).max(1);
        let this = &*self;
        let work = |part: &[usize]| {
            let (mut new, mut found) = (BTreeSet::new(), Vec::new());
            for &row in part {
                this.expand(row, &mut new, &mut found);
            }
            found
        };
        let found: Vec<_> = std::thread::scope(|scope| {
            let parts: Vec<_> = rows
                .chunks(share)
                .map(|part| scope.spawn(move || work(part)))
                .collect();
            parts
                .into_iter()
                .flat_map(|part| part.join().unwrap())
                .collect()
        });
        for (print, step) in found {
            if self.seen.insert(print) {
                self.steps.push(step);
            }
        }
    }
}

#[expect(clippy::print_stderr, reason = "what a long run shows")]
fn say(line: &str) {
    eprintln!("{line}");
}

/// All states within `depth` steps of `start`; how many, and how deep it got.
fn search(name: &str, start: State, depth: u64) -> (usize, u64) {
    let mut search = Search::new(start);
    let (mut first, mut steps) = (0, 0);
    while steps < depth && first < search.steps.len() {
        let known = search.steps.len();
        search.level(first);
        (first, steps) = (known, steps + 1);
        let states = search.steps.len();
        say(&format!(
            "model: {name}: {states} states within {steps} steps"
        ));
        if states > STATES_MAX {
            say(&format!(
                "model: {name}: stopped by the bound of {STATES_MAX} states"
            ));
            break;
        }
    }
    (search.steps.len(), steps)
}

#[test]
fn every_order_of_a_small_edge_keeps_every_invariant() {
    let depth = std::env::var("IOP_MODEL_DEPTH").map_or(DEPTH, |text| text.parse().unwrap());
    let (states, steps) = search("from rest", State::new(), depth);
    assert!(states > 1_000 && steps >= DEPTH, "{states} in {steps}");
    let (states, steps) = search("at work", State::at_work(), depth);
    assert!(states > 1_000 && steps >= DEPTH, "{states} in {steps}");
}

#[test]
fn states_that_differ_in_counts_alone_are_one() {
    let mut first = State::at_work();
    first.clone().drain();
    let print = Print::of(&first);
    let runs: Vec<_> = first.runs.keys().copied().collect();
    // Both requests end, both clients ask and are granted again: every count is higher now.
    for (row, slot) in runs {
        first.act(Action::End(row, slot));
    }
    first.deliver_all();
    assert_ne!(Print::of(&first), print);
    let on_shard = |state: &State| state.clients.map(|client| client.shard);
    let before = on_shard(&first);
    for client in 0..2 {
        first.act(Action::Submit(client, 0));
        first.deliver_all();
    }
    for connection in [0, 2] {
        first.act(Action::Begin(connection));
    }
    first.deliver_all();
    assert_eq!(on_shard(&first), before);
    assert_eq!(Print::of(&first), print);
}
