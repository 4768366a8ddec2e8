//! `loom`: the lock-free code, model-checked whole and then with each named ordering weakened.
//!
//! Lives on: one thread; children take what the machine has. Bound: preemptions per interleaving and
//! a deadline per run.
//!
//! A weakened build that still passes is a hole in the tests, or an ordering nobody needs.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::{Tally, TestRun};
use crate::tree;

const BUILD_LIMIT: Duration = Duration::from_secs(600);
const RUN_LIMIT: Duration = Duration::from_secs(180);
/// Where the named orderings stand, and how they are written.
const RING: &str = "dataplane/ring/src/";
const MARKS: [&str; 2] = ["ordering!(\"", "full_fence!(\""];

#[derive(Debug)]
pub(crate) struct Options {
    preemptions: u32,
}

impl Default for Options {
    /// Three preemptions find every weakening of the ring; the whole run stays in minutes.
    fn default() -> Self {
        Self { preemptions: 3 }
    }
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, Error> {
        match arguments {
            [] => Ok(Self::default()),
            [name, value] if name == "--preemptions" => match value.parse() {
                Ok(preemptions) => Ok(Self { preemptions }),
                Err(_) => Err(Error::Usage(format!("--preemptions {value}: not a number"))),
            },
            [word, ..] => Err(Error::unknown(word)),
        }
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<Tally, Error> {
    let names = names(root)?;
    let mut tally = whole(root, options)?;
    if tally.failed > 0 {
        return Ok(tally); // weakened builds say nothing about a model that is broken already
    }
    for name in &names {
        tally.add(Tally::of(weakened(root, options, name)?));
    }
    Ok(tally)
}

fn whole(root: &Path, options: &Options) -> Result<Tally, Error> {
    let started = Instant::now();
    build(root, options, None)?;
    let done = process::run(&mut test(root, options, None), RUN_LIMIT, Echo::Yes)?;
    let mut tally = TestRun::read(&done.output).tally;
    if !done.success() || tally.passed == 0 {
        println!("loom: the model is red: {done}");
        tally.failed = tally.failed.max(1);
    }
    println!("loom: whole model: {tally} in {:.1?}", started.elapsed());
    Ok(tally)
}

/// Whether the model without this ordering is red.
fn weakened(root: &Path, options: &Options, name: &str) -> Result<bool, Error> {
    let started = Instant::now();
    let wrapper = wrapper(root, &format!("iop_loom_break=\"{name}\""))?;
    build(root, options, Some(&wrapper))?;
    let done = process::run(
        &mut test(root, options, Some(&wrapper)),
        RUN_LIMIT,
        Echo::No,
    )?;
    let red = TestRun::read(&done.output)
        .tests
        .into_iter()
        .filter(|&(_, good)| !good);
    let red: Vec<String> = red.map(|(test, _)| test).collect();
    let verdict = match done.status {
        None => "neither red nor green: ended at its deadline".to_owned(),
        Some(status) if status.success() => "GREEN: no test needs it".to_owned(),
        Some(_) if red.is_empty() => "red: the model crashed".to_owned(),
        Some(_) => format!("red: {}", red.join(", ")),
    };
    println!(
        "loom: without {name}: {verdict} ({:.1?})",
        started.elapsed()
    );
    Ok(done.status.is_some_and(|status| !status.success()))
}

/// Names of orderings and fences, as the source writes them.
fn names(root: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for file in tree::files(root)?
        .iter()
        .filter(|file| file.starts_with(RING))
    {
        let text = tree::read(root, file)?;
        for mark in MARKS {
            for piece in text.split(mark).skip(1) {
                names.extend(piece.split('"').next().map(str::to_owned));
            }
        }
    }
    names.sort();
    let count = names.len();
    names.dedup();
    if names.is_empty() || names.len() != count {
        return Err(Error::Step(format!(
            "{RING}: ordering names missing or used twice: {names:?}"
        )));
    }
    Ok(names)
}

/// Builds alone, so that a build that fails is not taken for a red model.
fn build(root: &Path, options: &Options, wrapper: Option<&Path>) -> Result<(), Error> {
    let mut command = test(root, options, wrapper);
    command.arg("--no-run");
    match process::run(&mut command, BUILD_LIMIT, Echo::No)? {
        done if done.success() => Ok(()),
        done => Err(Error::Step(format!(
            "loom: build: {done}\n{}",
            done.tail(30)
        ))),
    }
}

fn test(root: &Path, options: &Options, wrapper: Option<&Path>) -> Command {
    let mut command = process::cargo(root);
    command.args(["test", "--package", "loom-tests", "--test", "hazards"]);
    command.env("CARGO_TARGET_DIR", tree::target(root).join("loom"));
    environment(&mut command);
    command.env("LOOM_MAX_PREEMPTIONS", options.preemptions.to_string());
    if let Some(wrapper) = wrapper {
        command.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    }
    command
}

/// What a build of the model needs around it.
pub(crate) fn environment(command: &mut Command) {
    command
        .env("RUSTFLAGS", "--cfg iop_loom")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "3")
        .env(
            "LOOM_MAX_PREEMPTIONS",
            Options::default().preemptions.to_string(),
        )
        .env("RUST_BACKTRACE", "0");
}

/// A compiler wrapper that plants one cfg in the workspace's own crates. Dependencies are built once
/// for all wrappers, and cargo keeps each wrapper's artefacts apart.
pub(crate) fn wrapper(root: &Path, cfg: &str) -> Result<PathBuf, Error> {
    let name: String = cfg
        .chars()
        .map(|c| if c.is_alphanumeric() { c } else { '-' })
        .collect();
    compiler_wrapper(root, &name, &format!("exec \"$@\" --cfg '{cfg}'\n"))
}

/// A compiler wrapper of that name; `script` runs the compiler, `"$@"`, with what it adds.
pub(crate) fn compiler_wrapper(root: &Path, name: &str, script: &str) -> Result<PathBuf, Error> {
    let path = tree::target(root).join("planted").join(name);
    tree::write_changed(&path, format!("#!/bin/sh\n{script}").as_bytes())?;
    executable(&path)?;
    Ok(path)
}

#[cfg(unix)]
fn executable(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).map_err(Error::file(path))
}

#[cfg(not(unix))]
fn executable(path: &Path) -> Result<(), Error> {
    Err(Error::content(
        path,
        0,
        "planting a cfg needs a POSIX shell",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ordering_of_the_ring_has_a_name_of_its_own() {
        let names = names(&tree::root()).unwrap();
        for name in [
            "spsc_tail_release",
            "spsc_head_acquire",
            "doorbell_ring_fence",
        ] {
            assert!(names.iter().any(|found| found == name), "{names:?}");
        }
        // Outside the two macros only `Relaxed` is written, so nothing can be forgotten.
        for file in tree::files(&tree::root()).unwrap() {
            if !file.starts_with(RING) {
                continue;
            }
            let code = crate::rust_text::code(&tree::read(&tree::root(), &file).unwrap());
            let code = crate::rust_text::without_tests(&code);
            for word in ["Acquire", "Release", "AcqRel", "SeqCst"] {
                for at in crate::rust_text::word_offsets(&code, word) {
                    let line = code[..at].lines().last().unwrap_or_default();
                    let named = line.contains("ordering!(") || line.contains("sync::fence(");
                    assert!(named, "{file}: {line}{word}");
                }
            }
        }
    }
}
