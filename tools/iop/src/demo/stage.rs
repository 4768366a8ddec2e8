//! The demo's stage: a directory with certificates and configurations, an Edge and a node that run
//! from it, and the promise that none of it is left behind.
//!
//! Lives on: the demo's runtime. Bound: one directory, two children.
use std::fs::{self, DirBuilder};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;
use tokio::process::{Child, Command};

use super::DemoError;
use crate::pki::{self, InitArgs, LeafArgs, PkiCommand};

const TRUST_DOMAIN: &str = "demo.iop.local";
const EDGE: &str = "edge";
pub(super) const NODE: &str = "demo-node";
/// A demo certificate outlives no demo.
const DAYS: u32 = 2;
/// Lines of a child's log shown when something failed.
const LOG_LINES: usize = 20;

/// Addresses of one demo, all on loopback.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) nodes: SocketAddr,
    pub(super) clients: SocketAddr,
    pub(super) admin: SocketAddr,
}

impl Addresses {
    /// Free ports, told apart by holding all of them at once; `clients` is taken as given unless 0.
    pub(super) fn pick(clients: u16) -> Result<Self, DemoError> {
        let bind = |port| {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            TcpListener::bind(address).map_err(|cause| DemoError::Port { address, cause })
        };
        let listeners = [bind(0)?, bind(clients)?, bind(0)?];
        let address = |row: usize| {
            let listener: &TcpListener = &listeners[row];
            listener.local_addr().map_err(|cause| DemoError::Port {
                address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                cause,
            })
        };
        Ok(Self {
            nodes: address(0)?,
            clients: address(1)?,
            admin: address(2)?,
        })
    }
}

/// A directory of this run alone; removed when dropped.
#[derive(Debug)]
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn new() -> Result<Self, DemoError> {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let name = format!("iop-demo-{}-{}", std::process::id(), since.as_nanos());
        let path = std::env::temp_dir().join(name);
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|cause| DemoError::File {
            path: path.clone(),
            cause,
        })?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, DemoError> {
        let path = self.0.join(name);
        let written = fs::write(&path, text);
        written.map_err(|cause| DemoError::File {
            path: path.clone(),
            cause,
        })?;
        Ok(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0); // nothing more can be done about it
    }
}

/// Configurations of one demo.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) edge: PathBuf,
    pub(super) node: PathBuf,
}

/// Writes certificates and both configurations.
pub(super) fn furnish(
    directory: &Directory,
    addresses: Addresses,
    model_server: SocketAddr,
    model: &str,
) -> Result<Files, DemoError> {
    let now = OffsetDateTime::now_utc();
    let dir = directory.path().join("pki");
    let leaf = |name: &str| LeafArgs {
        name: name.to_owned(),
        dir: dir.clone(),
        days: DAYS,
        force: false,
    };
    let authority = InitArgs {
        dir: dir.clone(),
        trust_domain: TRUST_DOMAIN.to_owned(),
        days: DAYS,
        force: false,
    };
    let commands = [
        PkiCommand::Init(authority),
        PkiCommand::Edge(leaf(EDGE)),
        PkiCommand::Node(leaf(NODE)),
    ];
    for command in &commands {
        pki::run(command, now, &mut io::sink()).map_err(DemoError::Pki)?;
    }
    let Addresses {
        nodes,
        clients,
        admin,
    } = addresses;
    let edge = format!(
        "listeners:\n  nodes: \"{nodes}\"\n  clients: \"{clients}\"\n  admin: \"{admin}\"\n\
         pki:\n  trust_domain: {TRUST_DOMAIN}\n  edge_name: {EDGE}\n  ca: pki/ca.crt\n  \
         certificate: pki/{EDGE}.crt\n  key: pki/{EDGE}.key\n\
         nodes:\n  - id: {NODE}\n    adapters:\n      - type: openai_compat\n        \
         base_url: \"http://{model_server}\"\n    providers:\n      - id: demo-provider\n        \
         adapter: openai_compat\n        target: {model}\n        category: local_inference\n        \
         capacity: 8\n        operations: [chat_completions, completions, embeddings]\n\
         models:\n  - name: {model}\n    providers: [demo-provider]\n\
         limits:\n  clients_max: 64\n  output_pool_bytes: 16 MiB\n  body_pool_bytes: 64 MiB\n"
    );
    let node = format!(
        "node_id: {NODE}\nedge:\n  address: \"{nodes}\"\n  trust_domain: {TRUST_DOMAIN}\n  \
         name: {EDGE}\npki:\n  ca: pki/ca.crt\n  certificate: pki/{NODE}.crt\n  key: pki/{NODE}.key\n\
         reconnect:\n  interval_sec: 1\n  max_attempts: 10\n"
    );
    Ok(Files {
        edge: directory.write("edge.yaml", &edge)?,
        node: directory.write("node.yaml", &node)?,
    })
}

/// A child process of this program, ended when dropped.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Part {
    /// Starts `iop <name> --config <config>`, its output in a file beside the configuration.
    pub(super) fn start(name: &'static str, config: &Path) -> Result<Self, DemoError> {
        let log = config.with_extension("log");
        let open = || {
            let file = fs::OpenOptions::new().create(true).append(true).open(&log);
            file.map_err(|cause| DemoError::File {
                path: log.clone(),
                cause,
            })
        };
        let program = std::env::current_exe();
        let program = program.map_err(|cause| DemoError::Start { name, cause })?;
        let child = Command::new(program)
            .args([name, "--config"])
            .arg(config)
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?)
            .process_group(0) // ctrl-c is the demo's to hear; it ends its children itself
            .kill_on_drop(true)
            .spawn()
            .map_err(|cause| DemoError::Start { name, cause })?;
        Ok(Self { name, child, log })
    }

    /// Fails when the child has ended by itself.
    pub(super) fn check(&mut self) -> Result<(), DemoError> {
        let waited = self.child.try_wait();
        match waited.map_err(|cause| DemoError::Start {
            name: self.name,
            cause,
        })? {
            None => Ok(()),
            Some(status) => Err(DemoError::Ended {
                name: self.name,
                status,
            }),
        }
    }

    /// The last lines the child wrote.
    pub(super) fn log_tail(&self) -> Vec<String> {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].to_vec()
    }

    /// Ends the child and waits until it is gone.
    pub(super) async fn end(mut self) {
        let _gone = self.child.kill().await; // already gone is as good
    }
}
