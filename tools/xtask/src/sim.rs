//! `sim` and `model`: the control core in a seeded world, and in all orders of a small one.
//!
//! Lives on: one thread; the tests themselves take every core. Bound: a deadline for the build and one
//! for the run. Both are built as a release, where a step costs a tenth.
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::{Tally, TestRun};

const BUILD_LIMIT: Duration = Duration::from_secs(1_800);
const RUN_LIMIT: Duration = Duration::from_secs(24 * 3_600);
const SIMULATION: &str = "any_order_of_events_keeps_every_invariant_and_drains";
const MODEL: &str = "edge::model_tests::search::every_order_of_a_small_edge_keeps_every_invariant";

/// How long the simulation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    seeds: u64,
    steps: u64,
    seed: u64,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, Error> {
        let mut options = Self {
            seeds: 1_000,
            steps: 10_000,
            seed: 0,
        };
        for pair in arguments.chunks(2) {
            let [name, value] = pair else {
                return Err(Error::unknown(&pair[0]));
            };
            let least = match name.as_str() {
                "--seed" => 0,
                _ => 1,
            };
            let number = number(name, value, least)?;
            match name.as_str() {
                "--seeds" => options.seeds = number,
                "--steps" => options.steps = number,
                "--seed" => options.seed = number,
                _ => return Err(Error::unknown(name)),
            }
        }
        Ok(options)
    }
}

fn number(name: &str, value: &str, least: u64) -> Result<u64, Error> {
    let number = value.parse().ok().filter(|&number| number >= least);
    number.ok_or_else(|| Error::Usage(format!("{name} {value}: not a number from {least}")))
}

/// Seeded worlds; a failure names its seed and step, and is replayed.
pub(crate) fn run(root: &Path, options: &Options) -> Result<Tally, Error> {
    let mut command = test(root, &["--test", "sim"])?;
    command
        .args(["--exact", SIMULATION])
        .env("IOP_SIM_SEEDS", options.seeds.to_string())
        .env("IOP_SIM_STEPS", options.steps.to_string())
        .env("IOP_SIM_SEED", options.seed.to_string());
    one(&mut command)
}

/// The depth that `--depth` asks for; none: as deep as the states that fit in memory.
pub(crate) fn depth(arguments: &[String]) -> Result<Option<u64>, Error> {
    match arguments {
        [] => Ok(None),
        [name, value] if name == "--depth" => number(name, value, 1).map(Some),
        [word, ..] => Err(Error::unknown(word)),
    }
}

/// Every order of events of the smallest Edge that can go wrong.
pub(crate) fn model(root: &Path, depth: Option<u64>) -> Result<Tally, Error> {
    let mut command = test(root, &["--lib"])?;
    command.args(["--exact", MODEL]);
    command.env("IOP_MODEL_DEPTH", depth.unwrap_or(u64::MAX).to_string());
    one(&mut command)
}

/// Builds, then the command that runs `select`'s tests and shows what they print.
fn test(root: &Path, select: &[&str]) -> Result<Command, Error> {
    let words = ["test", "--release", "--quiet", "--package", "iop-control"];
    let mut build = process::cargo(root);
    build.args(words).args(select).arg("--no-run");
    let built = process::run(&mut build, BUILD_LIMIT, Echo::Yes)?;
    if !built.success() {
        return Err(Error::Step(format!("cargo test --release: {built}")));
    }
    let mut command = process::cargo(root);
    command.args(words).args(select).args(["--", "--nocapture"]);
    Ok(command)
}

fn one(command: &mut Command) -> Result<Tally, Error> {
    let done = process::run(command, RUN_LIMIT, Echo::Yes)?;
    let tally = TestRun::read(&done.output).tally;
    if !done.success() && tally.failed == 0 {
        return Err(Error::Step(format!("cargo test: {done}")));
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_command_line_is_read_and_nonsense_is_not() {
        let options = Options::parse(&words("--seed 0 --steps 5")).unwrap();
        assert_eq!((options.seed, options.steps, options.seeds), (0, 5, 1_000));
        for wrong in ["--seeds", "--seeds 0", "--steps x", "--what 1"] {
            assert!(Options::parse(&words(wrong)).is_err(), "{wrong}");
        }
        assert_eq!(depth(&[]).unwrap(), None);
        assert_eq!(depth(&words("--depth 14")).unwrap(), Some(14));
        assert!(depth(&words("--depth 0")).is_err() && depth(&words("14")).is_err());
    }
}
