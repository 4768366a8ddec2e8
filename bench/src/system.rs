//! What is measured: our own parts and the baselines; peers are started in `peers.rs`.
//!
//! Lives on: the main thread. Bound: what `part.rs` says.
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::event::Wording;
use crate::part::{self, Cores, Metrics, Part};
use crate::peers;

/// Node, provider and model of every configuration here.
pub(crate) const NODE: &str = "n1";
pub(crate) const MODEL: &str = "bench-model";
const TRUST_DOMAIN: &str = "bench.iop.local";
/// More than any scenario's streams.
const CAPACITY: usize = 4_000;

/// Who stands on the other side of what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A model server, one connection a stream.
    Provider,
    /// A node: TLS, envelopes, one connection.
    Node,
    /// The bare relay's peer: one plain connection.
    Bare,
}

/// What stands between clients and origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum System {
    Direct,
    BareRelay,
    Edge,
    EdgeAndNode,
    Nginx,
    Envoy,
    VllmRouter,
    NginxPair,
    HaproxyReverse,
    EnvoyTunnel,
    Rathole,
    LiteLlm,
}

impl System {
    /// Of one connection that carries every stream, and of a connection a stream.
    pub(crate) const TUNNEL: [Self; 2] = [Self::BareRelay, Self::Edge];
    pub(crate) const WHOLE: [Self; 2] = [Self::Direct, Self::EdgeAndNode];
    /// One hop, of little cost.
    pub(crate) const PROXIES: [Self; 3] = [Self::Nginx, Self::Envoy, Self::VllmRouter];
    pub(crate) const PEERS: [Self; 8] = [
        Self::Nginx,
        Self::Envoy,
        Self::VllmRouter,
        Self::NginxPair,
        Self::HaproxyReverse,
        Self::EnvoyTunnel,
        Self::Rathole,
        Self::LiteLlm,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::BareRelay => "bare relay",
            Self::Edge => "edge",
            Self::EdgeAndNode => "edge + node",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
            Self::VllmRouter => "vllm-router",
            Self::NginxPair => "nginx-mtls",
            Self::HaproxyReverse => "haproxy-reverse",
            Self::EnvoyTunnel => "envoy-tunnel",
            Self::Rathole => "rathole",
            Self::LiteLlm => "litellm",
        }
    }

    pub(crate) const fn side(self) -> Side {
        match self {
            Self::BareRelay => Side::Bare,
            Self::Edge => Side::Node,
            Self::Direct
            | Self::EdgeAndNode
            | Self::Nginx
            | Self::Envoy
            | Self::VllmRouter
            | Self::NginxPair
            | Self::HaproxyReverse
            | Self::EnvoyTunnel
            | Self::Rathole
            | Self::LiteLlm => Side::Provider,
        }
    }

    /// What its clients are to find in an answer.
    pub(crate) const fn wording(self) -> Wording {
        match self {
            Self::LiteLlm => Wording::Rewritten,
            _ => Wording::Exact,
        }
    }

    /// Events a second that it is asked for at most: who rewrites each of them takes a millisecond.
    pub(crate) const fn rate_max(self) -> Option<u64> {
        match self {
            Self::LiteLlm => Some(500),
            _ => None,
        }
    }

    /// Compared within its table with this one.
    pub(crate) const fn baseline(self) -> Self {
        match self.side() {
            Side::Provider => Self::Direct,
            Side::Node | Side::Bare => Self::BareRelay,
        }
    }

    /// The program of a peer, and the version from which it can do what is asked of it.
    pub(crate) const fn program(self) -> Option<(&'static str, Option<(u32, u32)>)> {
        match self {
            Self::Nginx | Self::NginxPair => Some(("nginx", None)),
            Self::Envoy => Some(("envoy", None)),
            Self::EnvoyTunnel => Some(("envoy", Some((1, 37)))),
            Self::VllmRouter => Some(("vllm-router", None)),
            Self::HaproxyReverse => Some(("haproxy", Some((2, 9)))),
            Self::Rathole => Some(("rathole", None)),
            Self::LiteLlm => Some(("litellm", None)),
            Self::Direct | Self::BareRelay | Self::Edge | Self::EdgeAndNode => None,
        }
    }

    /// A peer that can be started here.
    pub(crate) fn is_installed(self) -> bool {
        self.program()
            .is_none_or(|(program, minimum)| peers::is_installed(program, minimum))
    }
}

/// Where everything is.
#[derive(Debug)]
pub(crate) struct Place {
    /// The `iop` program.
    pub(crate) iop: PathBuf,
    /// This program.
    pub(crate) bench: PathBuf,
    /// Configurations, keys and logs.
    pub(crate) scratch: PathBuf,
    pub(crate) cores: Cores,
}

/// A running system.
#[derive(Debug)]
pub(crate) struct Running {
    parts: Vec<Part>,
    /// Where clients connect.
    pub(crate) clients: SocketAddr,
    /// Where the origin connects, if it is not the one that listens.
    pub(crate) nodes: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Running {
    /// What clients connect to, and nothing else.
    pub(crate) const fn proxy(parts: Vec<Part>, clients: SocketAddr) -> Self {
        Self {
            parts,
            clients,
            nodes: None,
            admin: None,
        }
    }

    pub(crate) fn processes(&self) -> Vec<(String, u32)> {
        self.parts.iter().flat_map(Part::processes).collect()
    }

    /// An Edge's metrics.
    pub(crate) fn metrics(&self) -> Option<Metrics> {
        Metrics::read(self.admin?)
    }
}

impl Place {
    /// An authority with one Edge and one node.
    pub(crate) fn make_keys(&self) -> Result<(), Error> {
        for arguments in [
            &["init", "--trust-domain", TRUST_DOMAIN][..],
            &["edge", "edge-1"],
            &["node", NODE],
        ] {
            let mut command = Command::new(&self.iop);
            let command = command
                .arg("pki")
                .args(arguments)
                .arg("--dir")
                .arg(self.pki());
            let done = command.output().map_err(Error::io("iop pki"))?;
            if !done.status.success() {
                let why = String::from_utf8_lossy(&done.stderr);
                return Err(Error::part(format!("iop pki {arguments:?}: {why}")));
            }
        }
        Ok(())
    }

    pub(crate) fn pki(&self) -> PathBuf {
        self.scratch.join("pki")
    }

    /// Starts `system` in front of the model server at `provider`, which answers already.
    pub(crate) fn start(&self, system: System, provider: SocketAddr) -> Result<Running, Error> {
        match system {
            System::Direct => Ok(Running::proxy(Vec::new(), provider)),
            System::BareRelay => self.bare_relay(),
            System::Edge => self.edge(provider),
            System::EdgeAndNode => self.edge_and_node(provider),
            System::Nginx => self.nginx(provider),
            System::Envoy => self.envoy(provider),
            System::VllmRouter => self.vllm_router(provider),
            System::NginxPair => self.nginx_pair(provider),
            System::HaproxyReverse => self.haproxy_reverse(provider),
            System::EnvoyTunnel => self.envoy_tunnel(provider),
            System::Rathole => self.rathole(provider),
            System::LiteLlm => self.litellm(provider),
        }
    }

    pub(crate) fn part(&self, name: &'static str, command: &mut Command) -> Result<Part, Error> {
        Part::start(name, command, self.cores, &self.scratch)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf, Error> {
        let path = self.scratch.join(name);
        std::fs::write(&path, text).map_err(Error::io(format!("{}", path.display())))?;
        Ok(path)
    }

    fn bare_relay(&self) -> Result<Running, Error> {
        let mut command = Command::new(&self.bench);
        command.arg("relay").stdout(Stdio::piped());
        let mut part = self.part("relay", &mut command)?;
        let mut line = String::new();
        if let Some(words) = &mut part.child.stdout {
            let read = BufReader::new(words).read_line(&mut line);
            read.map_err(Error::io("hear where the relay listens"))?;
        }
        let mut words = line.split_whitespace().skip(1).step_by(2);
        let mut address = || words.next()?.parse::<SocketAddr>().ok();
        let (Some(nodes), Some(clients)) = (address(), address()) else {
            return Err(Error::part("the relay did not say where it listens"));
        };
        Ok(Running {
            parts: vec![part],
            clients,
            nodes: Some(nodes),
            admin: None,
        })
    }

    fn edge(&self, provider: SocketAddr) -> Result<Running, Error> {
        let [nodes, clients, admin] = [part::free()?, part::free()?, part::free()?];
        let core = self.cores.measured;
        let text = format!(
            "listeners:\n  nodes: \"{nodes}\"\n  clients: \"{clients}\"\n  admin: \"{admin}\"\n\
             cores: [{core}, {core}, {core}]\n\
             pki:\n  trust_domain: {TRUST_DOMAIN}\n  edge_name: edge-1\n  ca: pki/ca.crt\n  \
             certificate: pki/edge-1.crt\n  key: pki/edge-1.key\n\
             nodes:\n  - id: {NODE}\n    adapters:\n      - name: a1\n        \
             type: openai_compat\n        base_url: \"http://{provider}\"\n    providers:\n      \
             - id: p1\n        adapter: a1\n        target: t1\n        capacity: {CAPACITY}\n\
             models:\n  - name: {MODEL}\n    providers: [p1]\nlog:\n  level: warn\n"
        );
        let config = self.write("edge.yaml", &text)?;
        let mut command = Command::new(&self.iop);
        command.args(["edge", "--config"]).arg(config);
        let mut edge = self.part("edge", command.stdout(Stdio::null()))?;
        edge.wait("/readyz", || part::get(admin, "/readyz"))?;
        Ok(Running {
            parts: vec![edge],
            clients,
            nodes: Some(nodes),
            admin: Some(admin),
        })
    }

    fn edge_and_node(&self, provider: SocketAddr) -> Result<Running, Error> {
        let mut running = self.edge(provider)?;
        let nodes = running.nodes.take().expect("an Edge listens for nodes");
        let text = format!(
            "node_id: {NODE}\nedge:\n  address: \"{nodes}\"\n  trust_domain: {TRUST_DOMAIN}\n  \
             name: edge-1\npki:\n  ca: pki/ca.crt\n  certificate: pki/{NODE}.crt\n  \
             key: pki/{NODE}.key\n"
        );
        let config = self.write("node.yaml", &text)?;
        let mut command = Command::new(&self.iop);
        command.args(["node", "--config"]).arg(config);
        command.stdout(Stdio::null()).env("RUST_LOG", "warn");
        let mut node = self.part("node", &mut command)?;
        let ready = |metrics: &Metrics| metrics.get("iop_edge_node_activations_total") >= 1.0;
        node.wait("ready node", || running.metrics().filter(ready))?;
        running.parts.push(node);
        Ok(running)
    }
}

/// The first line a program says about its version.
pub(crate) fn version(program: &Path, argument: &str) -> String {
    let said = Command::new(program).arg(argument).output();
    let Some(said) = said.ok().filter(|said| said.status.success()) else {
        return String::new(); // it has no such argument
    };
    let words = [said.stdout, said.stderr].concat();
    let words = String::from_utf8_lossy(&words);
    words
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .unwrap_or_default()
        .to_owned()
}
