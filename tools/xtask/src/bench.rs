//! `bench`: release binaries, then the harness, which prints its tables and writes them beside plots.
//!
//! Lives on: one thread; the harness starts what it measures. Bound: a deadline per step.
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::process::{self, Echo};
use crate::report::Tally;
use crate::tree;

const BUILD_LIMIT: Duration = Duration::from_secs(3_600);
const RUN_LIMIT: Duration = Duration::from_secs(7_200);

/// Below the target folder: programs of peers that are not installed for everybody.
const PEERS: &str = "peers/bin";

/// The search path with the peers' folder behind it.
fn with_peers(peers: &Path) -> Result<OsString, Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([peers.to_owned()]);
    std::env::join_paths(folders).map_err(|error| Error::Step(format!("PATH: {error}")))
}

/// Builds, then passes `arguments` on to `iop-bench`: to `control` if they begin so, else to `run`.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<Tally, Error> {
    let of_control = arguments.first().is_some_and(|word| word == "control");
    let mut build = process::cargo(root);
    build.args(["build", "--release", "-p", "iop-bench"]);
    if !of_control {
        build.args(["-p", "iop"]);
    }
    let built = process::run(&mut build, BUILD_LIMIT, Echo::Yes)?;
    if !built.success() {
        return Err(Error::Step(format!("cargo build --release: {built}")));
    }
    let target = tree::target(root);
    let programs = target.join("release");
    let mut bench = Command::new(programs.join("iop-bench"));
    bench.current_dir(root);
    if !of_control {
        bench.env("PATH", with_peers(&target.join(PEERS))?);
        bench.arg("run").arg("--iop").arg(programs.join("iop"));
        bench.arg("--out").arg(target.join("bench"));
    }
    let done = process::run(bench.args(arguments), RUN_LIMIT, Echo::Yes)?;
    let closing = done.output.lines().rev().find_map(Tally::parse);
    closing.ok_or_else(|| Error::Step(format!("iop-bench: {done}")))
}
