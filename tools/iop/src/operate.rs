//! `iop reload`, `iop drain-node`: an operator's orders to the Edge on this host.
//!
//! Lives on: the main thread of a short command. View: one order. Bound: `ORDER_WAIT` from connect to
//! answer.
//!
//! The Edge is found by its admin listener: `--admin`, or what `--config` says, or the default address.
use core::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use iop_dataplane::config::{ConfigError, EdgeConfig};
use iop_proto::spiffe::is_label;
use serde_json::Value;

use crate::http::{self, HttpError};

/// Longer than the Edge takes to answer an order, behind another that nobody waits for any more.
const ORDER_WAIT: Duration = Duration::from_secs(35);
const ADMIN_DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

/// Where the Edge's admin listener is.
#[derive(Args, Debug)]
pub(crate) struct EdgeArgs {
    /// The Edge's configuration file; its admin listener is used
    #[arg(long)]
    config: Option<PathBuf>,
    /// The admin listener, if it is not where the file says
    #[arg(long)]
    admin: Option<SocketAddr>,
}

#[derive(Args, Debug)]
pub(crate) struct ReloadArgs {
    #[command(flatten)]
    edge: EdgeArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// `id` of the node in the Edge's configuration
    node_id: String,
    #[command(flatten)]
    edge: EdgeArgs,
}

/// Why an order was not carried out.
#[derive(Debug)]
pub(crate) enum OperateError {
    /// The file that should say where the Edge is.
    Config(ConfigError),
    /// The file lets the kernel choose the port.
    PortUnknown,
    NodeId(String),
    Http {
        error: HttpError,
        /// The address was read in the file, which may say another one since the Edge began.
        from_file: bool,
    },
    Late,
    /// Not what an Edge of this version answers.
    Answer(u16),
    /// The Edge refused it: its own words.
    Refused(String),
    Io(io::Error),
}

impl fmt::Display for OperateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::PortUnknown => f.write_str("the admin port is chosen by the kernel: --admin"),
            Self::NodeId(id) => write!(f, "not a node id: {id:?}"),
            Self::Http { error, from_file } => {
                write!(f, "no Edge answers: {error}")?;
                if *from_file {
                    f.write_str("; if listeners.admin has changed, --admin says where it was")?;
                }
                Ok(())
            }
            Self::Late => write!(f, "no answer within {} s", ORDER_WAIT.as_secs()),
            Self::Answer(status) => write!(f, "an answer that is not an Edge's (status {status})"),
            Self::Refused(message) => f.write_str(message),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for OperateError {}

impl From<io::Error> for OperateError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Has the Edge read its configuration and certificates again; prints what changed.
///
/// # Errors
/// What the Edge says is wrong: then everything is as it was, unless it is only not confirmed yet.
pub(crate) fn reload(args: &ReloadArgs, out: &mut dyn Write) -> Result<ExitCode, OperateError> {
    let answer = order(&args.edge, "/reload")?;
    let lines = |name: &str| -> Vec<String> {
        let list = answer[name].as_array().into_iter().flatten();
        list.filter_map(|line| line.as_str().map(str::to_owned))
            .collect()
    };
    let changed = lines("changed");
    writeln!(out, "configuration {} is in use", answer["epoch"])?;
    for line in &changed {
        writeln!(out, "  {line}")?;
    }
    if changed.is_empty() {
        writeln!(out, "  nothing changed; certificates were read again")?;
    }
    for field in lines("restart") {
        writeln!(out, "needs a restart: {field}")?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Has the Edge give a node nothing new and close its connection when it is done.
///
/// # Errors
/// When the node is not configured or not connected.
pub(crate) fn drain_node(args: &DrainArgs, out: &mut dyn Write) -> Result<ExitCode, OperateError> {
    if !is_label(&args.node_id) {
        return Err(OperateError::NodeId(args.node_id.clone()));
    }
    let answer = order(&args.edge, &format!("/nodes/{}/drain", args.node_id))?;
    let (node, leases) = (&args.node_id, &answer["leases"]);
    writeln!(
        out,
        "node {node} takes nothing new; {leases} requests in progress"
    )?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

impl EdgeArgs {
    fn admin(&self) -> Result<SocketAddr, OperateError> {
        let mut address = match (self.admin, &self.config) {
            (Some(address), _) => address,
            (None, None) => ADMIN_DEFAULT,
            (None, Some(path)) => {
                let config = EdgeConfig::load(path).map_err(OperateError::Config)?;
                config.admin_listen
            }
        };
        if address.port() == 0 {
            return Err(OperateError::PortUnknown);
        }
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        Ok(address)
    }
}

/// One order and the Edge's answer to it.
fn order(edge: &EdgeArgs, path: &str) -> Result<Value, OperateError> {
    let admin = edge.admin()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let asked = async {
        let answer = http::post(admin, path, "x-iop-operator: 1\r\n", "").await?;
        let status = answer.status;
        Ok((status, answer.text().await?))
    };
    let answered = runtime.block_on(async { tokio::time::timeout(ORDER_WAIT, asked).await });
    let answered: Result<_, HttpError> = answered.map_err(|_| OperateError::Late)?;
    let (status, text) = answered.map_err(|error| OperateError::Http {
        error,
        from_file: edge.admin.is_none() && edge.config.is_some(),
    })?;
    let answer: Value = serde_json::from_str(&text).map_err(|_| OperateError::Answer(status))?;
    if status == 200 {
        return Ok(answer);
    }
    let message = answer["error"]["message"].as_str();
    Err(message.map_or(OperateError::Answer(status), |message| {
        OperateError::Refused(message.to_owned())
    }))
}
