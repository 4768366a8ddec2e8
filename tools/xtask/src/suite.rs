//! `test` and `ci`: every check in turn, each counted, none hidden by an earlier one.
//!
//! Lives on: one thread. Bound: a deadline per step.
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::{Tally, TestRun};
use crate::{chaos, e2e, lint, loom, proto, trace};

const CHECK_LIMIT: Duration = Duration::from_secs(900);
const TEST_LIMIT: Duration = Duration::from_secs(1_200);

type Step = (&'static str, fn(&Path) -> Result<Tally, Error>);

/// Shard counts the tests of the whole Edge run with besides one.
const SHARDS: [&str; 2] = ["2", "3"];

const TEST: [Step; 9] = [
    ("unit and contract tests", cargo_test),
    ("with 2 and 3 shards", with_more_shards),
    ("loom", |root| loom::run(root, &loom::Options::default())),
    ("lint", lint::run),
    ("proto", |root| proto::run(root, false)),
    ("trace", |root| trace::run(root, false)),
    ("e2e", e2e::run),
    ("conformance", e2e::conformance),
    ("chaos", |root| chaos::run(root, &chaos::Options::light())),
];

/// What the README calls the test command.
pub(crate) fn test(root: &Path) -> Result<Tally, Error> {
    Ok(steps(root, &TEST))
}

/// `test`, after format and clippy.
pub(crate) fn ci(root: &Path) -> Result<Tally, Error> {
    let mut all: Vec<Step> = vec![("format", format), ("clippy", clippy)];
    all.extend(TEST);
    Ok(steps(root, &all))
}

fn steps(root: &Path, steps: &[Step]) -> Tally {
    let mut lines = Vec::new();
    let mut total = Tally::default();
    for (name, step) in steps {
        println!("== {name}");
        let started = Instant::now();
        let tally = step(root).unwrap_or_else(|error| {
            println!("{name}: {error}");
            Tally::of(false)
        });
        let unsteady = match tally.unsteady {
            0 => String::new(),
            count => format!(", {count} of them UNSTEADY"),
        };
        lines.push(format!(
            "{name:24} {tally}{unsteady} in {:.0?}",
            started.elapsed()
        ));
        total.add(tally);
    }
    println!("== summary\n{}", lines.join("\n"));
    total
}

fn cargo_test(root: &Path) -> Result<Tally, Error> {
    let mut command = process::cargo(root);
    command.args(["test", "--workspace", "--no-fail-fast"]);
    counted(&mut command)
}

/// What runs against a whole Edge, again with more shards.
fn with_more_shards(root: &Path) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    for shards in SHARDS {
        println!("-- {shards} shards");
        let mut command = process::cargo(root);
        command.env("IOP_TEST_SHARDS", shards).args([
            "test",
            "--package",
            "iop",
            "--no-fail-fast",
            "--test",
            "contract",
            "--test",
            "clients",
            "--test",
            "zero_alloc",
        ]);
        tally.add(counted(&mut command)?);
    }
    Ok(tally)
}

/// Tests that failed are run once more by themselves, when they are few: one that then passes is named
/// as unsteady, which is a fault of the test or the host to be looked at, and is not counted as failed.
fn counted(command: &mut Command) -> Result<Tally, Error> {
    let done = process::run(command, TEST_LIMIT, Echo::Yes)?;
    let run = TestRun::read(&done.output);
    let mut tally = run.tally;
    let failed = failed_tests(&done.output);
    if !failed.is_empty() && failed.len() <= AGAIN_MAX && tally.failed as usize == failed.len() {
        println!("-- again: {}", failed.join(" "));
        command.args(["--", "--exact"]).args(&failed);
        let again = process::run(command, TEST_LIMIT, Echo::Yes)?;
        let second = TestRun::read(&again.output);
        if again.success() && second.tally.passed as usize >= failed.len() {
            println!("unsteady: {}", failed.join(" "));
            tally.unsteady = tally.failed;
            tally.passed += tally.failed;
            tally.failed = 0;
            return Ok(with_ignored(tally, &run));
        }
    }
    if !done.success() && tally.failed == 0 {
        println!("cargo test: {done}");
        tally.failed = 1;
    }
    Ok(with_ignored(tally, &run))
}

/// Failed tests that are worth a second look; more are no accident.
const AGAIN_MAX: usize = 5;

/// An ignored test claims what it does not show.
fn with_ignored(mut tally: Tally, run: &TestRun) -> Tally {
    tally.failed += run.ignored;
    tally
}

/// Names of the tests that a run lists as failed, at the end of each binary's output.
fn failed_tests(output: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut listing = false;
    for line in output.lines() {
        match line.strip_prefix("    ") {
            Some(name) if listing && !name.contains(' ') => names.push(name.to_owned()),
            _ => listing = line == "failures:" || (listing && line.is_empty() && names.is_empty()),
        }
    }
    names.sort();
    names.dedup();
    names
}

fn format(root: &Path) -> Result<Tally, Error> {
    let mut command = process::cargo(root);
    command.args(["fmt", "--all", "--check"]);
    check(&mut command)
}

fn clippy(root: &Path) -> Result<Tally, Error> {
    let mut command = process::cargo(root);
    command.args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]);
    check(&mut command)
}

fn check(command: &mut Command) -> Result<Tally, Error> {
    let done = process::run(command, CHECK_LIMIT, Echo::Yes)?;
    if !done.success() {
        println!("{done}");
    }
    Ok(Tally::of(done.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_read_from_the_closing_lists() {
        let output = "test a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\n    at: here\n\n\
                      failures:\n    a::b\n    c\n\ntest result: FAILED. 1 passed; 2 failed\n\
                      failures:\n    d\n\ntest result: FAILED.\n";
        assert_eq!(failed_tests(output), ["a::b", "c", "d"]);
        assert!(failed_tests("test result: ok. 3 passed; 0 failed\n").is_empty());
    }
}
