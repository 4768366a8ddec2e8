//! `e2e`: official clients through Edge and node to a real model server; `conformance`: an agent
//! written from the documents alone against the Edge.
//!
//! Lives on: one thread; the script starts what it needs. Bound: a deadline per step.
//!
//! A missing Python, client or model server is a failure, never a skip.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::Tally;
use crate::tree;

/// The script; it takes `--iop <binary> --out <folder>` and ends with `N passed, N failed`.
const SCRIPT: &str = "tools/e2e/run.py";
const CONFORMANCE: &str = "tools/conformance-node/conformance.py";
/// Official clients, and a model server that runs from a wheel.
const PACKAGES: [&str; 6] = [
    "ollama==0.6.3",
    "openai==3.57.0",
    "anthropic==2.14.0",
    "xllamacpp==2026.10.11549",
    "gguf==0.19.0",
    "numpy==2.4.6",
];
const INSTALL_LIMIT: Duration = Duration::from_secs(900);
const BUILD_LIMIT: Duration = Duration::from_secs(1_800);
const RUN_LIMIT: Duration = Duration::from_secs(900);

/// Official clients, to a real model server and back.
pub(crate) fn run(root: &Path) -> Result<Tally, Error> {
    let python = environment(root, "e2e-venv", &PACKAGES)?;
    script(root, &python, SCRIPT, "e2e")
}

/// The independent agent's cases.
pub(crate) fn conformance(root: &Path) -> Result<Tally, Error> {
    let list = root.join("tools/conformance-node/requirements.txt");
    let text = std::fs::read_to_string(&list).map_err(Error::file(&list))?;
    let packages: Vec<&str> = text.lines().filter(|line| line.contains("==")).collect();
    let python = environment(root, "conformance-venv", &packages)?;
    script(root, &python, CONFORMANCE, "conformance")
}

/// Builds the binary and runs a script on it that ends with `N passed, N failed`.
fn script(root: &Path, python: &Path, script: &str, out: &str) -> Result<Tally, Error> {
    let mut build = process::cargo(root);
    build.args(["build", "--package", "iop"]);
    must(&mut build, BUILD_LIMIT, Echo::Yes)?;
    let target = tree::target(root);
    let out = target.join(out);
    std::fs::create_dir_all(&out).map_err(Error::file(&out))?;
    let mut command = Command::new(python);
    command
        .current_dir(root)
        .env("PYTHONUNBUFFERED", "1")
        .arg(script)
        .arg("--iop")
        .arg(target.join("debug").join("iop"))
        .arg("--out")
        .arg(&out);
    let done = process::run(&mut command, RUN_LIMIT, Echo::Yes)?;
    let closing = done.output.lines().rev().find_map(Tally::parse);
    let mut tally = closing.unwrap_or_default();
    if !done.success() || closing.is_none() {
        println!("{script}: {done}");
        tally.failed = tally.failed.max(1);
    }
    Ok(tally)
}

/// A virtual environment with exactly our packages; made anew when the list changes.
fn environment(root: &Path, name: &str, packages: &[&str]) -> Result<PathBuf, Error> {
    let home = tree::target(root).join(name);
    let python = home.join("bin").join("python");
    let mark = home.join("packages");
    let wanted = packages.join("\n");
    if python.exists() && std::fs::read_to_string(&mark).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv", "--clear"]).arg(&home);
    must(&mut venv, INSTALL_LIMIT, Echo::Yes)?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ])
    .args(packages);
    must(&mut pip, INSTALL_LIMIT, Echo::Yes)?;
    tree::write_changed(&mark, wanted.as_bytes())?;
    Ok(python)
}

fn must(command: &mut Command, limit: Duration, echo: Echo) -> Result<(), Error> {
    let done = process::run(command, limit, echo)?;
    if done.success() {
        return Ok(());
    }
    Err(Error::Step(format!(
        "{command:?}: {done}\n{}",
        done.tail(30)
    )))
}
