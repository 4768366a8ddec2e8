//! The Edge's core in a seeded world: modelled shards, nodes that flap, clients that come and
//! leave, links that deliver in any order between each other, and the faults of `acts`.
//!
//! Every step is judged twice: by `Shadow`, a naive core that knows the contract alone, and, at
//! intervals and after every fault, by the core's own invariants, recounted over its whole state.
//! At the end the faults stop and everything must be answered.
//!
//! `cargo xtask sim` runs it long. `IOP_SIM_SEEDS`, `IOP_SIM_STEPS` and `IOP_SIM_SEED` (the first
//! one) say how long; `IOP_SIM_CHECK=1` checks the whole state at each step. Seeds are spread over
//! all cores. A failure names seed and step, and is run again with every step checked.
#![expect(clippy::unwrap_used, reason = "a test: a broken assumption fails it")]

mod acts;
mod catalog;
mod dice;
mod shadow;
mod shard;
mod tally;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tally::Tally;
use world::World;

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

/// How one seed is run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    steps: u64,
    takes_notices: bool,
    checks_each: bool,
}

/// What one seed did, and a digest of everything control answered.
#[derive(Debug)]
struct Done {
    digest: u64,
    tally: Tally,
}

/// Runs one seed; an error is the step at which it failed.
fn run(seed: u64, plan: Plan) -> Result<Done, u64> {
    let mut world = World::new(seed, plan.takes_notices, plan.checks_each);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..plan.steps {
            world.step();
        }
        world.drain();
    }));
    match outcome {
        Ok(()) => Ok(Done {
            digest: world.digest,
            tally: world.tally,
        }),
        Err(_) => Err(world.steps),
    }
}

#[expect(clippy::print_stderr, reason = "what a long run shows")]
fn say(line: &str) {
    eprintln!("{line}");
}

/// Names the failure and shows it again, as early as it can be seen.
fn replay(seed: u64, step: u64, plan: Plan) -> String {
    let command = format!(
        "cargo xtask sim --seed {seed} --seeds 1 --steps {}",
        plan.steps
    );
    say(&format!(
        "sim: seed {seed} fails at step {step}; again, with every step checked; {command}"
    ));
    let checked = Plan {
        checks_each: true,
        ..plan
    };
    match run(seed, checked) {
        Ok(_) => format!("seed {seed} failed at step {step} and not when every step was checked"),
        Err(again) => format!("seed {seed} fails at step {again}; replay: {command}"),
    }
}

/// Runs the seeds on every core until all are done or one fails.
fn run_all(first: u64, seeds: u64, plan: Plan) -> Tally {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicU64::new(first);
    let failed = AtomicBool::new(false);
    let worker = || {
        let mut total = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds || failed.load(Ordering::Relaxed) {
                return Ok(total);
            }
            // Half of the seeds run with an event bus that nobody empties. `[I1.7]`
            let plan = Plan {
                takes_notices: seed.is_multiple_of(2),
                ..plan
            };
            match run(seed, plan) {
                Ok(done) => total.add(&done.tally),
                Err(step) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err((seed, step, plan));
                }
            }
        }
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let mut total = Tally::default();
    for result in results {
        match result {
            Ok(tally) => total.add(&tally),
            Err((seed, step, plan)) => panic_any(replay(seed, step, plan)),
        }
    }
    total
}

/// Proves, [R-076], [S-11], [S-12], [S-60], [S-64].
#[test]
fn any_order_of_events_keeps_every_invariant_and_drains() {
    let (steps, seeds) = (
        setting("IOP_SIM_STEPS", 10_000),
        setting("IOP_SIM_SEEDS", 240),
    );
    let plan = Plan {
        steps,
        takes_notices: true,
        checks_each: setting("IOP_SIM_CHECK", 0) != 0,
    };
    let began = started();
    let total = run_all(setting("IOP_SIM_SEED", 0), seeds, plan);
    let rate = began(seeds * steps);
    say(&format!(
        "sim: {seeds} seeds of {steps} steps, {} steps, {rate} steps/s\n{total}",
        seeds * steps
    ));
    // The world must not have become too tame to prove anything.
    assert!(
        seeds * steps < 2_000_000 || total.is_lively(),
        "too tame: {total}"
    );
}

/// A stop watch: how many of something a second. The simulation itself lives in virtual time.
#[expect(
    clippy::disallowed_methods,
    reason = "the speed of the simulation is real"
)]
fn started() -> impl Fn(u64) -> u64 {
    let began = std::time::Instant::now();
    move |count| count * 1_000 / u64::try_from(began.elapsed().as_millis()).unwrap().max(1)
}

#[test]
fn a_seed_names_one_run_and_notices_change_nothing() {
    let mut digests = Vec::new();
    let mut notices = 0;
    for seed in 1_000..1_010 {
        let plan = Plan {
            steps: 1_000,
            takes_notices: true,
            checks_each: true,
        };
        let with = run(seed, plan).unwrap();
        let without = Plan {
            takes_notices: false,
            ..plan
        };
        let without = run(seed, without).unwrap();
        assert_eq!(
            with.digest, without.digest,
            "seed {seed} depends on who takes the notices"
        );
        assert_eq!(without.tally.notices, 0, "seed {seed}");
        notices += with.tally.notices;
        digests.push(with.digest);
    }
    assert!(notices >= 50, "{notices} notices: nothing was shown");
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 10, "two seeds gave one run");
}
