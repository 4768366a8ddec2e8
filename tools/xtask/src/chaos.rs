//! `chaos`: Edges, nodes and model servers that are killed, hung and cut off under load.
//!
//! Lives on: one thread; the harness starts what it needs. Bound: the minutes asked for, and the last
//! quiet point.
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::Tally;
use crate::tree;

const BUILD_LIMIT: Duration = Duration::from_secs(1_800);
/// Beyond the minutes asked for, at most, in seconds: keys and the first quiet point; the round that
/// has just begun, its last fault given at its end; clients that wait as long as they may, for a
/// connection and for an answer; its quiet point; the questions and the burst there; eight processes
/// that end one by one; the machine.
const EXTRA_LIMIT: Duration = Duration::from_secs(90 + 13 + 40 + 80 + 50 + 40 + 80 + 8 * 15 + 87);
/// Clients at each Edge in `test` and `ci`, which share their cores with other tests.
const CI_CLIENTS: &str = "8";

#[derive(Clone, Debug)]
pub(crate) struct Options {
    minutes: u32,
    /// For the harness as they are.
    rest: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            minutes: 3,
            rest: Vec::new(),
        }
    }
}

impl Options {
    pub(crate) fn parse(words: &[String]) -> Result<Self, Error> {
        let mut options = Self::default();
        for pair in words.chunks(2) {
            let [word, value] = pair else {
                return Err(Error::Usage(format!("{}: a value is missing", pair[0])));
            };
            match word.as_str() {
                "--minutes" => {
                    let minutes = value.parse().ok().filter(|&minutes| minutes > 0);
                    options.minutes =
                        minutes.ok_or_else(|| Error::Usage(format!("--minutes {value}")))?;
                }
                "--seed" | "--clients" | "--links" => options.rest.extend_from_slice(pair),
                _ => return Err(Error::unknown(word)),
            }
        }
        Ok(options)
    }

    /// What `test` and `ci` run.
    pub(crate) fn light() -> Self {
        Self {
            rest: ["--clients", CI_CLIENTS].map(str::to_owned).to_vec(),
            ..Self::default()
        }
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<Tally, Error> {
    let mut build = process::cargo(root);
    build.args(["build", "--package", "iop", "--package", "iop-chaos"]);
    let built = process::run(&mut build, BUILD_LIMIT, Echo::Yes)?;
    if !built.success() {
        return Err(Error::Step(format!("cargo build: {built}")));
    }
    let target = tree::target(root);
    let programs = target.join("debug");
    let mut harness = Command::new(programs.join("iop-chaos"));
    harness.current_dir(root);
    harness.arg("run").arg("--iop").arg(programs.join("iop"));
    harness.arg("--out").arg(target.join("chaos"));
    harness.args(["--minutes", &options.minutes.to_string()]);
    harness.args(&options.rest);
    let limit = Duration::from_secs(u64::from(options.minutes) * 60) + EXTRA_LIMIT;
    let done = process::run(&mut harness, limit, Echo::Yes)?;
    let closing = done.output.lines().rev().find_map(Tally::parse);
    match closing {
        // Whoever counts a failure also ends with one, and nobody else does.
        Some(tally) if done.success() == tally.is_good() => Ok(tally),
        _ => Err(Error::Step(format!("iop-chaos: {done}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ours_is_the_harness_s() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let options = Options::parse(&words("--seed 7 --minutes 60")).unwrap();
        assert_eq!((options.minutes, options.rest), (60, words("--seed 7")));
        assert!(Options::parse(&words("--minutes 0")).is_err());
        assert!(Options::parse(&words("--minutes")).is_err());
        assert!(Options::parse(&words("--speed 1")).is_err());
    }
}
