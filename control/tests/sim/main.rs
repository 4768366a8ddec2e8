//! The Edge's core in a seeded world: modelled shards, nodes that flap, clients that come and
//! leave, and links that deliver in any order between each other.
//!
//! Every step is judged twice: by the core's own invariants, recounted over its whole state, and by
//! `Shadow`, a naive core that knows the contract alone. At the end everything must drain.
//!
//! `IOP_SIM_SEEDS` and `IOP_SIM_STEPS` make it longer; `IOP_SIM_SEED` runs one seed. A failure
//! names seed and step.
#![expect(clippy::unwrap_used, reason = "a test: a broken assumption fails it")]

mod shadow;
mod shard;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use world::World;

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

/// Runs one seed and hands back the digest of everything control did, and what happened.
fn run(seed: u64, steps: u64, takes_notices: bool) -> (u64, world::Tally) {
    let mut world = World::new(seed, takes_notices);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..steps {
            world.step();
        }
        world.drain();
    }));
    if let Err(panic) = outcome {
        let step = world.steps;
        std::io::Write::write_all(
            &mut std::io::stderr(),
            format!("seed {seed} fails at step {step}: IOP_SIM_SEED={seed}\n").as_bytes(),
        )
        .unwrap();
        resume_unwind(panic);
    }
    (world.digest, world.tally)
}

/// Proves, [R-076], [S-11], [S-12], [S-60], [S-64].
#[test]
fn any_order_of_events_keeps_every_invariant_and_drains() {
    let steps = setting("IOP_SIM_STEPS", 2_000);
    let seeds = match std::env::var("IOP_SIM_SEED") {
        Ok(_) => {
            let seed = setting("IOP_SIM_SEED", 0);
            seed..seed + 1
        }
        Err(_) => 0..setting("IOP_SIM_SEEDS", 200),
    };
    let many = seeds.end - seeds.start >= 100;
    let mut total = world::Tally::default();
    for seed in seeds {
        total.add(&run(seed, steps, seed % 2 == 0).1);
    }
    // The world must not have become too tame to prove anything.
    assert!(!many || total.is_lively(), "{total:?}");
}

#[test]
fn a_seed_names_one_run_and_notices_change_nothing() {
    let mut digests = Vec::new();
    for seed in 1_000..1_010 {
        let with = run(seed, 1_000, true);
        let without = run(seed, 1_000, false);
        assert_eq!(
            with.0, without.0,
            "seed {seed} depends on who takes the notices"
        );
        assert!(with.1.notices > 0 && without.1.notices == 0, "seed {seed}");
        digests.push(with.0);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 10, "two seeds gave one run");
}
