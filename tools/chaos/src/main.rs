//! `iop-chaos`: Edges, nodes and model servers that die, hang and lose their links under load, and
//! the proof that nobody was told anything wrong meanwhile.
//!
//! Lives on: one thread; what it starts are processes of their own. Bound: the minutes given.
//!
//! What happens when is `plan`, from a seed; what clients ask is `ask`, also from it, so that a model
//! server and the judge derive the same answer from the same request. `docs/chaos.md` tells the rest.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line tool"
)]
use std::path::PathBuf;
use std::process::ExitCode;

mod ask;
mod client;
mod dice;
mod error;
mod journal;
mod judge;
mod link;
mod load;
mod network;
mod part;
mod plan;
mod provider;
mod quiet;
mod run;
mod stage;

use tokio::signal::unix::{SignalKind, signal};

use error::Error;
use network::Form;

const USAGE: &str = "\
iop-chaos run --iop <program> --out <folder> [--minutes M] [--seed S] [--clients N]
              [--links auto|veth|relay]
iop-chaos provider --name NAME --listen ADDRESS --journal FILE   a model server, as `run` starts it
iop-chaos reach ADDRESS                                          whether one connection comes about";

/// What a run is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) iop: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) minutes: u32,
    pub(crate) seed: u64,
    /// Clients at each Edge that ask at the same time.
    pub(crate) clients: u32,
    /// `None`: network namespaces where the host permits them.
    pub(crate) form: Option<Form>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            iop: PathBuf::new(),
            out: PathBuf::new(),
            minutes: 3,
            seed: 1,
            clients: 12,
            form: None,
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.split_first() {
        Some((&"run", rest)) => options(rest).and_then(|options| block_on(until_told(options))),
        Some((&"provider", rest)) => {
            provider_options(rest).and_then(|options| block_on(provider::run(options)))
        }
        Some((&"reach", &[address])) => network::reach_out(address),
        _ => Err(Error::Usage(USAGE.to_owned())),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("iop-chaos: {error}");
            ExitCode::from(2)
        }
    }
}

/// A run that is told to stop takes its processes and namespaces with it.
async fn until_told(options: Options) -> Result<bool, Error> {
    let listen = |kind| signal(kind).map_err(Error::io("listen to signals"));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::select! {
        done = run::run(options) => done,
        _ = hangup.recv() => Err(Error::Part("hung up".to_owned())),
        _ = interrupt.recv() => Err(Error::Part("interrupted".to_owned())),
        _ = terminate.recv() => Err(Error::Part("terminated".to_owned())),
    }
}

/// One thread carries all of it: nothing here is shared, and the load stays light.
fn block_on(work: impl Future<Output = Result<bool, Error>>) -> Result<bool, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Error::io("start the runtime"))?;
    tokio::task::LocalSet::new().block_on(&runtime, work)
}

fn options(words: &[&str]) -> Result<Options, Error> {
    let mut options = Options::default();
    for pair in words.chunks(2) {
        let (word, value) = both(pair)?;
        match word {
            "--iop" => options.iop = PathBuf::from(value),
            "--out" => options.out = PathBuf::from(value),
            "--minutes" => options.minutes = number(word, value)?,
            "--seed" => options.seed = number(word, value)?,
            "--clients" => options.clients = number(word, value)?,
            "--links" => options.form = Form::parse(value)?,
            _ => return Err(Error::Usage(format!("unknown argument {word}\n{USAGE}"))),
        }
    }
    if options.iop.as_os_str().is_empty() || options.out.as_os_str().is_empty() {
        return Err(Error::Usage(USAGE.to_owned()));
    }
    Ok(options)
}

fn provider_options(words: &[&str]) -> Result<provider::Options, Error> {
    let mut options = provider::Options::default();
    for pair in words.chunks(2) {
        let (word, value) = both(pair)?;
        match word {
            "--name" => value.clone_into(&mut options.name),
            "--listen" => value.clone_into(&mut options.listen),
            "--journal" => options.journal = PathBuf::from(value),
            _ => return Err(Error::Usage(format!("unknown argument {word}\n{USAGE}"))),
        }
    }
    Ok(options)
}

fn both<'a>(pair: &[&'a str]) -> Result<(&'a str, &'a str), Error> {
    let &[word, value] = pair else {
        let why = format!("{}: a value is missing\n{USAGE}", pair[0]);
        return Err(Error::Usage(why));
    };
    Ok((word, value))
}

fn number<T: std::str::FromStr + PartialOrd + From<u8>>(
    word: &str,
    text: &str,
) -> Result<T, Error> {
    let number = text.parse().ok().filter(|number| *number >= T::from(1));
    number.ok_or_else(|| Error::Usage(format!("{word}: not a number above 0: {text}")))
}
