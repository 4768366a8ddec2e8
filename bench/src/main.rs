//! `iop-bench`: what a frame costs on its way through an Edge, beside what others take for it.
//!
//! Lives on: one host, two cores: what is measured on one, everything else on the other. Bound: every
//! run has deadlines, `--quick` one for the whole.
//!
//! `docs/benchmarks.md` explains the rig and the table.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line tool"
)]
use std::path::PathBuf;
use std::process::ExitCode;

mod bare;
mod client;
mod control;
mod error;
mod event;
mod matrix;
mod measure;
mod node;
mod origin;
mod os;
mod part;
mod peers;
mod plot;
mod proc;
mod provider;
mod relay;
mod report;
mod rig;
mod system;

use error::Error;
use matrix::Options;

const USAGE: &str = "\
iop-bench run --iop <program> --out <folder> [--quick] [--peers none|installed|all|NAME,NAME]
              [--only SCENARIO] [--rounds N] [--seconds N] [--cores MEASURED,RIG]
iop-bench control [--seconds N] [--cores CONTROL,SHARD]
iop-bench relay               the bare relay, as `run` starts it";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.split_first() {
        Some((&"run", rest)) => options(rest).and_then(|options| matrix::run(&options)),
        Some((&"control", rest)) => control_options(rest).and_then(|asked| control::run(&asked)),
        Some((&"relay", [])) => relay::run().map(|()| true),
        _ => Err(Error::Usage(USAGE.to_owned())),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("iop-bench: {error}");
            ExitCode::from(2)
        }
    }
}

fn control_options(words: &[&str]) -> Result<control::Options, Error> {
    let mut options = control::Options::default();
    for pair in words.chunks(2) {
        let &[word, value] = pair else {
            return Err(Error::Usage(format!(
                "{}: a value is missing\n{USAGE}",
                pair[0]
            )));
        };
        match word {
            "--seconds" => options.seconds = number(word, value)?,
            "--cores" => options.cores = cores(value)?,
            _ => return Err(Error::Usage(format!("unknown argument {word}\n{USAGE}"))),
        }
    }
    Ok(options)
}

fn number(word: &str, text: &str) -> Result<u32, Error> {
    let number = text.parse::<u32>().ok().filter(|&number| number > 0);
    number.ok_or_else(|| Error::Usage(format!("{word}: not a number above 0: {text}")))
}

fn cores(text: &str) -> Result<(usize, usize), Error> {
    let pair = text.split_once(',');
    let cores = pair.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    cores.ok_or_else(|| Error::Usage(format!("--cores: not two cores: {text}")))
}

fn options(words: &[&str]) -> Result<Options, Error> {
    let mut options = Options::default();
    let mut words = words.iter();
    while let Some(&word) = words.next() {
        let mut value = || {
            let value = words.next().copied();
            value.ok_or_else(|| Error::Usage(format!("{word}: a value is missing\n{USAGE}")))
        };
        match word {
            "--quick" => options.quick = true,
            "--iop" => options.iop = PathBuf::from(value()?),
            "--out" => options.out = PathBuf::from(value()?),
            "--peers" => options.peers = value()?.to_owned(),
            "--only" => options.only = Some(value()?.to_owned()),
            "--rounds" => options.rounds = Some(number(word, value()?)?),
            "--seconds" => options.seconds = Some(number(word, value()?)?),
            "--cores" => options.cores = cores(value()?)?,
            _ => return Err(Error::Usage(format!("unknown argument {word}\n{USAGE}"))),
        }
    }
    Ok(options)
}
