//! `cargo xtask`: what the project asks of itself, from one place.
//!
//! Lives on: a developer's machine and CI. Bound: every child process has a deadline.
//!
//! Every command ends with a line `N passed, N failed`, summed from what ran, and exits 1 unless
//! something passed and nothing failed.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line tool"
)]
use std::process::ExitCode;

mod bench;
mod chaos;
mod claims;
mod e2e;
mod error;
mod fuzz;
mod lint;
mod loom;
mod mutate;
mod plants;
mod process;
mod proto;
mod report;
mod rust_text;
mod sim;
mod suite;
mod trace;
mod tree;

const USAGE: &str = "\
cargo xtask <command>
  ci                          format, clippy with warnings denied, then `test`
  test                        unit and contract tests with 1 to 3 shards, loom, lint, proto, trace, e2e,
                              conformance, chaos
  loom [--preemptions N]      model-check iop-ring whole, then once per weakened ordering
  lint                        the walls between files and crates
  proto [--update]            descriptor digest against proto/iop/DIGEST
  trace [--missing]           which requirement has a test that claims to prove it
  mutate [--id ID] [--sample N] [--seed S]
                              plant the changes of docs/contract/mutations.toml; each must turn red
  sim [--seeds N] [--steps M] [--seed S]
                              the control core in N seeded worlds (1000) of M steps (10000), from S
  model [--depth D]           the control core in every order of a small world
  fuzz [--target T] [--minutes M]
                              every fuzz target, or T, for M minutes (1) each
  conformance                 an agent written from the documents alone against the Edge
  e2e                         official clients through Edge and node to a real model server
  chaos [--minutes M] [--seed S] [--clients N] [--links auto|veth|relay]
                              Edges, nodes and model servers killed, hung and cut off under load
  bench [--quick] [--peers none|installed|all|NAME,NAME] [--only SCENARIO] [--rounds N] [--seconds N]
                              frames per second and what they cost, beside baselines and peers
  bench control [--seconds N] what a decision of control costs, alone and through the rings";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let root = tree::root();
    let done = match command.as_str() {
        "ci" => none(&rest).and_then(|()| suite::ci(&root)),
        "test" => none(&rest).and_then(|()| suite::test(&root)),
        "loom" => loom::Options::parse(&rest).and_then(|options| loom::run(&root, &options)),
        "lint" => none(&rest).and_then(|()| lint::run(&root)),
        "proto" => switch(&rest, "--update").and_then(|update| proto::run(&root, update)),
        "trace" => switch(&rest, "--missing").and_then(|missing| trace::run(&root, missing)),
        "mutate" => mutate::Options::parse(&rest).and_then(|options| mutate::run(&root, &options)),
        "sim" => sim::Options::parse(&rest).and_then(|options| sim::run(&root, &options)),
        "model" => sim::depth(&rest).and_then(|depth| sim::model(&root, depth)),
        "fuzz" => fuzz::Options::parse(&rest).and_then(|options| fuzz::run(&root, &options)),
        "e2e" => none(&rest).and_then(|()| e2e::run(&root)),
        "conformance" => none(&rest).and_then(|()| e2e::conformance(&root)),
        "chaos" => chaos::Options::parse(&rest).and_then(|options| chaos::run(&root, &options)),
        "bench" => bench::run(&root, &rest),
        _ => Err(error::Error::Usage(USAGE.to_owned())),
    };
    match done {
        Ok(tally) => {
            println!("{tally}");
            if tally.is_good() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}

fn none(rest: &[String]) -> Result<(), error::Error> {
    match rest.first() {
        None => Ok(()),
        Some(word) => Err(error::Error::unknown(word)),
    }
}

fn switch(rest: &[String], name: &str) -> Result<bool, error::Error> {
    match rest {
        [] => Ok(false),
        [word] if word == name => Ok(true),
        [word, ..] => Err(error::Error::unknown(word)),
    }
}
