//! `iop`: the one program users install. Reads its arguments, sets up logging, calls the command.
//!
//! Lives on: the main thread. Bound: one command.
//!
//! Exit codes: 0 done, 1 the command failed, 2 it was called wrongly.
mod check;
mod credential;
mod demo;
mod http;
mod model_server;
mod operate;
mod pki;

use std::error::Error;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use iop_dataplane::alloc::Counting;
use iop_dataplane::config::EdgeConfig;
use time::OffsetDateTime;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// Counts heap calls per thread role, read through `/metrics`.
#[global_allocator]
static HEAP: Counting = Counting;

#[derive(Parser, Debug)]
#[command(
    name = "iop",
    version,
    about = "Inference edge for latency-sensitive hosts"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run an Edge: clients on one side, node agents on the other
    Edge(ConfigArgs),
    /// Run a node agent: dials an Edge and calls the model servers beside it
    Node(ConfigArgs),
    /// Have the running Edge read its configuration and certificates again
    Reload(operate::ReloadArgs),
    /// Have the running Edge give a node nothing new and close its connection when it is done
    DrainNode(operate::DrainArgs),
    /// Show all of it at work: an Edge, a node and a model server on this host, one streamed answer
    Demo(demo::DemoArgs),
    /// Certificates: an authority of one's own, nodes, Edges
    #[command(subcommand)]
    Pki(pki::PkiCommand),
    /// API keys of clients
    #[command(subcommand)]
    Key(pki::KeyCommand),
    /// Provider credentials that an Edge manages: its encrypted store
    #[command(subcommand)]
    Credential(credential::CredentialCommand),
    /// Say what is wrong with a configuration or with this host
    Check(check::CheckArgs),
}

#[derive(Args, Debug)]
struct ConfigArgs {
    /// The configuration file; deploy/examples has annotated ones
    #[arg(long)]
    config: PathBuf,
}

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            // Where standard error is gone, the exit code has to do.
            let _ = writeln!(io::stderr(), "iop: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<ExitCode, Box<dyn Error>> {
    let (mut out, mut notes) = (io::stdout().lock(), io::stderr());
    match command {
        Command::Edge(args) => {
            drop(out);
            edge(args)?;
        }
        Command::Node(args) => {
            drop(out);
            return node(args);
        }
        Command::Reload(args) => return Ok(operate::reload(args, &mut out)?),
        Command::DrainNode(args) => return Ok(operate::drain_node(args, &mut out)?),
        Command::Demo(args) => return Ok(demo::run(args, &mut out, &mut notes)?),
        Command::Pki(command) => pki::run(command, OffsetDateTime::now_utc(), &mut out)?,
        Command::Key(command) => pki::run_key(command, &mut out, &mut notes)?,
        Command::Credential(command) => {
            credential::run(command, &mut io::stdin().lock(), &mut out)?;
        }
        Command::Check(args) => return Ok(check::run(args, OffsetDateTime::now_utc(), &mut out)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn edge(args: &ConfigArgs) -> Result<(), Box<dyn Error>> {
    let config = EdgeConfig::load(&args.config)?;
    log_to_stderr(config.log.level.name());
    for line in config.reserved() {
        info!(holder = line.holder, bytes = line.bytes, "memory reserved");
    }
    for warning in config.warnings() {
        warn!("{warning}");
    }
    Ok(iop_dataplane::edge::run(config)?)
}

fn node(args: &ConfigArgs) -> Result<ExitCode, Box<dyn Error>> {
    let config = iop_agent::load(&args.config)?;
    log_to_stderr(config.log_level.as_str());
    Ok(iop_agent::run_process(config))
}

/// Structured lines on standard error; `RUST_LOG` overrides the configured level.
fn log_to_stderr(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .init();
}
