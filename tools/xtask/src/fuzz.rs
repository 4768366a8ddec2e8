//! `fuzz`: every target of `tools/fuzz` under a coverage-guided engine for some minutes each.
//!
//! Lives on: one thread; one target at a time. Bound: the minutes given, and a deadline behind them.
//!
//! Only the workspace's own crates are instrumented, so the search follows their branches alone. What it
//! finds interesting is kept in the target directory and found again by the next run. The input of a
//! failure is written to the target's corpus in the tree: `cargo test` is red until the fault is gone,
//! and holds the input from then on.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::loom;
use crate::process::{self, Echo, Finished};
use crate::report::Tally;
use crate::tree;

const PACKAGE: &str = "iop-fuzz";
/// One folder a target.
const CORPUS: &str = "tools/fuzz/corpus";
const BUILD_LIMIT: Duration = Duration::from_secs(1_800);
/// For the engine to start, to finish its last input and to sum up.
const EXTRA: Duration = Duration::from_secs(180);
/// One input may take this long, seconds; on a busy machine that is no fault of the input.
const INPUT_SECONDS_MAX: u32 = 60;
const MEMORY_MIB_MAX: u32 = 2_048;
/// What the engine wants to see of the code.
const INSTRUMENTS: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

#[derive(Debug)]
pub(crate) struct Options {
    /// Empty: all.
    targets: Vec<String>,
    minutes: u32,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, Error> {
        let mut options = Self {
            targets: Vec::new(),
            minutes: 1,
        };
        let mut rest = arguments.iter();
        while let Some(word) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| Error::unknown(word));
            match word.as_str() {
                "--target" => options.targets.push(value()?.clone()),
                "--minutes" => {
                    let text = value()?;
                    let minutes = text
                        .parse()
                        .ok()
                        .filter(|minutes| (1..=10_000).contains(minutes));
                    options.minutes = minutes.ok_or_else(|| {
                        Error::Usage(format!("--minutes {text}: not a number from 1 to 10000"))
                    })?;
                }
                _ => return Err(Error::unknown(word)),
            }
        }
        Ok(options)
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<Tally, Error> {
    let mut targets = names(root)?;
    for name in &options.targets {
        if !targets.contains(name) {
            let known = targets.join(", ");
            return Err(Error::Usage(format!("--target {name}: one of {known}")));
        }
    }
    if !options.targets.is_empty() {
        targets.clone_from(&options.targets);
    }
    let engine = build(root)?;
    let mut tally = Tally::default();
    for target in &targets {
        tally.add(Tally::of(search(root, &engine, target, options.minutes)?));
    }
    Ok(tally)
}

/// Targets, by the folders of their inputs; a test of theirs holds both together.
fn names(root: &Path) -> Result<Vec<String>, Error> {
    let corpus = root.join(CORPUS);
    let entries = std::fs::read_dir(&corpus).map_err(Error::file(&corpus))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::file(&corpus))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn build(root: &Path) -> Result<PathBuf, Error> {
    // A build script runs without the engine, which is what the instruments call.
    let instruments = INSTRUMENTS.join(" ");
    let wrapper = loom::compiler_wrapper(
        root,
        "fuzz",
        &format!(
            "case \" $* \" in *' build_script_build '*) exec \"$@\" ;; esac\n\
             exec \"$@\" {instruments}\n"
        ),
    )?;
    let mut command = process::cargo(root);
    command.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    command.args([
        "build",
        "--package",
        PACKAGE,
        "--features",
        "engine",
        "--bin",
        PACKAGE,
    ]);
    let done = process::run(&mut command, BUILD_LIMIT, Echo::Yes)?;
    if !done.success() {
        return Err(Error::Step(format!(
            "the fuzz targets do not build: {done}"
        )));
    }
    // Kept apart from what a plain build would put in its place.
    let built = tree::target(root).join("debug").join(PACKAGE);
    let engine = tree::target(root).join("fuzz").join("engine");
    std::fs::create_dir_all(tree::target(root).join("fuzz")).map_err(Error::file(&engine))?;
    std::fs::copy(&built, &engine).map_err(Error::file(&built))?;
    Ok(engine)
}

/// Whether the target withstood the search.
fn search(root: &Path, engine: &Path, target: &str, minutes: u32) -> Result<bool, Error> {
    let tree = root.join(CORPUS).join(target);
    let found = tree::target(root).join("fuzz").join("found").join(target);
    std::fs::create_dir_all(&found).map_err(Error::file(&found))?;
    let seconds = minutes * 60;
    let mut command = Command::new(engine);
    command
        .current_dir(root)
        .env("IOP_FUZZ_TARGET", target)
        .args([&found, &tree])
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-report_slow_units={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg(format!("-artifact_prefix={}/", tree.display()))
        .arg("-print_final_stats=1");
    let limit = Duration::from_secs(u64::from(seconds)) + EXTRA;
    let done = process::run(&mut command, limit, Echo::No)?;
    println!("{}", line(target, &done));
    if !done.success() {
        println!("{}", done.tail(40));
    }
    Ok(done.success())
}

/// One line of what the engine summed up.
fn line(target: &str, done: &Finished) -> String {
    let stat = |name: &str| {
        let value = |line: &str| line.strip_prefix(name)?.trim().parse::<u64>().ok();
        done.output.lines().rev().find_map(value).unwrap_or(0)
    };
    let runs = stat("stat::number_of_executed_units:");
    let rate = stat("stat::average_exec_per_sec:");
    let verdict = if done.success() { "ok" } else { "FAILED" };
    format!("fuzz {target:10} {runs:>10} runs, {rate:>6} a second: {verdict}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options, Error> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        Options::parse(&words)
    }

    #[test]
    fn the_command_line_is_read_and_nonsense_is_not() {
        let options = parse(&["--target", "a", "--minutes", "10", "--target", "b"]).unwrap();
        assert_eq!((options.minutes, options.targets.len()), (10, 2));
        assert_eq!(parse(&[]).unwrap().minutes, 1);
        for wrong in [
            &["--minutes", "0"][..],
            &["--minutes"],
            &["--target"],
            &["x"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_target_of_the_tree_is_named() {
        let names = names(&tree::root()).unwrap();
        assert!(names.len() >= 9 && names.contains(&"head".to_owned()));
    }

    #[test]
    fn what_the_engine_sums_up_is_read() {
        let done = Finished {
            status: None,
            output: "stat::number_of_executed_units: 4711\nstat::average_exec_per_sec:     78\n"
                .to_owned(),
        };
        let line = line("head", &done);
        assert!(
            line.contains("4711 runs") && line.contains("78 a second: FAILED"),
            "{line}"
        );
    }
}
