//! The stage: two Edges, three nodes, three model servers, the links between, and their files.
//!
//! Lives on: the harness. Bound: eight processes, six links.
//!
//! ```text
//! clients ─plain─► e1 (2 shards) ◄─link─ n1 ─link─► p1      raw and normalized
//!                                ◄─link─ n2 ─link─► p2
//! clients ──TLS──► e2 (managed)  ◄─link─ n3 ─link─► p3      raw, with credentials
//! ```
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ring::digest::{SHA256, digest};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

use crate::ask::{CANARY, MARK};
use crate::client::{Door, get};
use crate::error::Error;
use crate::link::Relay;
use crate::load::{Site, TARGET};
use crate::network::{Form, Network};
use crate::part::Part;
use crate::plan::{EDGES, Link, NODES, Who};
use crate::provider::CREDENTIAL;
use crate::{Options, journal};

const TRUST_DOMAIN: &str = "chaos.iop.local";
/// Marks a folder as the harness's own.
const OURS: &str = ".iop-chaos";
/// Ports come from below those that outgoing connections are given.
const PORTS: (u32, u32) = (10_000, 22_000);
/// An answer of a part that has just begun.
const READY_ANSWER: Duration = Duration::from_secs(1);
/// Requests at once of a provider, raw and normalized.
const CAPACITY: u32 = 3;
const WORDS_CAPACITY: u32 = 2;

/// What a profile can name, and so all that a managed provider serves.
const MANAGED: &str = "chat_completions, responses, messages, count_tokens";

/// Waits of the stage are short, so that each of them is met often in minutes.
const EDGE_WAITS: &str = "timeouts:
  handshake_ms: 4000
  head_ms: 4000
  body_ms: 4000
  keep_alive_ms: 4000
  queue_wait_ms: 6000
  write_stall_ms: 5000
  heartbeat_ms: 1000
  dead_ms: 3000
  registration_ms: 3000
  drain_ms: 3000
limits:
  clients_max: 128
  handshakes_max: 32
  output_pool_bytes: 16 MiB
  body_pool_bytes: 48 MiB
  body_bytes_max: 4 MiB
log:
  access: all
";
/// What reloads change.
const WAIT: &str = "  queue_wait_ms: ";
const WAIT_MS: u32 = 6_000;
const WAITS_MS: u32 = 1_000;
const NODE_WAITS: &str = "reconnect:
  interval_sec: 1
  max_attempts: 0
  jitter: 0.2
heartbeat:
  ping_ms: 1000
  dead_ms: 3000
drain_timeout_ms: 3000
stall:
  close_grace_ms: 1000
  probe_ms: 1000
provider_http:
  connect_timeout_ms: 1500
";

/// Everything that runs, and where it is reached.
#[derive(Debug)]
pub(crate) struct Stage {
    out: PathBuf,
    pub(crate) parts: Vec<Part>,
    links: Vec<(Link, Relay)>,
    pub(crate) sites: Vec<Rc<Site>>,
    /// Admin listeners of the Edges.
    pub(crate) admins: Vec<SocketAddr>,
    pub(crate) servers: Vec<SocketAddr>,
    pub(crate) journals: Vec<journal::Reader>,
    /// What nobody may write down.
    pub(crate) secrets: Vec<String>,
    pub(crate) form: Form,
    /// Dropped last: the parts live in it.
    _network: Option<Network>,
}

/// Addresses and names while the stage is set.
struct Builder {
    iop: PathBuf,
    out: PathBuf,
    network: Option<Network>,
    nodes: Vec<SocketAddr>,
    clients: Vec<SocketAddr>,
    admins: Vec<SocketAddr>,
    servers: Vec<SocketAddr>,
    keys: Vec<String>,
    credential: String,
    ports: Ports,
}

impl Stage {
    /// Writes every file and starts every part.
    pub(crate) async fn set(options: &Options) -> Result<Self, Error> {
        let mut builder = Builder::new(options).await?;
        builder.make_keys()?;
        let links = builder.links().await?;
        builder.write_files(&links)?;
        let parts = builder.parts()?;
        for part in &parts {
            part.start()?;
        }
        Ok(builder.finish(parts, links))
    }

    pub(crate) fn part(&self, who: Who) -> &Part {
        let found = self.parts.iter().find(|part| part.who == who);
        found.expect("every part is on the stage")
    }

    /// Writes the Edge's file anew, with one figure changed that a running Edge takes: how long may be
    /// waited.
    pub(crate) fn change(&self, edge: u8) -> Result<(), Error> {
        let path = self.out.join(format!("{}.yaml", Who::Edge(edge).name()));
        let failed = || Error::io(path.display().to_string());
        let text = fs::read_to_string(&path).map_err(failed())?;
        let beside = self.out.join("changed.yaml");
        fs::write(&beside, changed(&text)).map_err(failed())?;
        fs::rename(&beside, &path).map_err(failed())
    }

    /// Whether it does what it was started for, signals included: an Edge and a model server answer,
    /// a node's log says that it has begun.
    pub(crate) async fn is_ready(&self, who: Who) -> Result<bool, Error> {
        match who {
            Who::Edge(n) => {
                let admin = self.admins[usize::from(n)];
                Ok(get(admin, "/metrics", READY_ANSWER).await.is_some())
            }
            Who::Server(n) => {
                let server = self.servers[usize::from(n)];
                Ok(get(server, "/chaos", READY_ANSWER).await.is_some())
            }
            Who::Node(_) => Ok(self.part(who).log()?.contains("node agent started")),
        }
    }

    pub(crate) fn link(&self, link: Link) -> &Relay {
        let found = self.links.iter().find(|(known, _)| *known == link);
        &found.expect("every link is on the stage").1
    }
}

impl Builder {
    async fn new(options: &Options) -> Result<Self, Error> {
        let network = match options.form {
            Some(Form::Relay) => None,
            Some(Form::Veth) => Some(Network::new().await?),
            None => Network::permitted().await,
        };
        let out = fresh(&options.out)?;
        let mut ports = Ports::new();
        let mut free = |count: u8| {
            (0..count)
                .map(|_| ports.free())
                .collect::<Result<Vec<_>, _>>()
        };
        let salt = std::process::id();
        Ok(Self {
            iop: options.iop.clone(),
            network,
            nodes: free(EDGES)?,
            clients: free(EDGES)?,
            admins: free(EDGES)?,
            servers: free(NODES)?,
            keys: (0..EDGES)
                .map(|n| format!("iop_chaos-key-{n}-{salt:08x}"))
                .collect(),
            credential: format!("sk-chaos-credential-{salt:08x}"),
            out,
            ports,
        })
    }

    fn make_keys(&self) -> Result<(), Error> {
        self.iop(&["pki", "init", "--trust-domain", TRUST_DOMAIN], "")?;
        for edge in 0..EDGES {
            self.iop(&["pki", "edge", &Who::Edge(edge).name()], "")?;
        }
        for node in 0..NODES {
            self.iop(&["pki", "node", &Who::Node(node).name()], "")?;
        }
        for kind in ["issuer", "store-key"] {
            self.iop(&["pki", kind, "e2"], "")?;
        }
        self.iop(&["pki", "recipient", "n3"], "")
    }

    /// Runs `iop` on the stage's keys.
    fn iop(&self, words: &[&str], input: &str) -> Result<(), Error> {
        let mut command = Command::new(&self.iop);
        command.current_dir(&self.out).args(words);
        if words[0] == "pki" {
            command.arg("--dir").arg(self.out.join("pki"));
        }
        let pipe = std::process::Stdio::piped;
        let child = command.stdin(pipe()).stdout(pipe()).stderr(pipe()).spawn();
        let mut child = child.map_err(Error::io(self.iop.display().to_string()))?;
        if let Some(mut pipe) = child.stdin.take() {
            let _unread = pipe.write_all(input.as_bytes()); // some commands read nothing
        }
        let done = child.wait_with_output().map_err(Error::io("iop"))?;
        if done.status.success() {
            return Ok(());
        }
        let why = String::from_utf8_lossy(&done.stderr);
        Err(Error::Part(format!("iop {}: {why}", words.join(" "))))
    }

    async fn links(&mut self) -> Result<Vec<(Link, Relay)>, Error> {
        let mut links = Vec::new();
        for node in 0..NODES {
            let edge = self.nodes[usize::from(Who::edge_of(node))];
            let server = self.servers[usize::from(node)];
            for (row, link, target) in
                [(0, Link::Edge(node), edge), (1, Link::Server(node), server)]
            {
                let pair = match &self.network {
                    Some(network) => Some(network.pair(node, 2 * node + row).await?),
                    None => None,
                };
                let mut address = self.ports.free()?;
                if let Some(pair) = &pair {
                    address.set_ip(pair.address);
                }
                links.push((link, Relay::start(address, target, pair).await?));
            }
        }
        Ok(links)
    }

    fn write_files(&self, links: &[(Link, Relay)]) -> Result<(), Error> {
        let address = |link| {
            let found = links.iter().find(|(known, _)| *known == link);
            found.expect("every link was made").1.address
        };
        for edge in 0..EDGES {
            let name = Who::Edge(edge).name();
            let text = if edge == 0 {
                self.plain_edge(&address)
            } else {
                self.managed_edge(&address)
            };
            self.write(&format!("{name}.yaml"), &text)?;
        }
        for node in 0..NODES {
            let (name, edge) = (Who::Node(node).name(), Who::Edge(Who::edge_of(node)).name());
            let managed = if node == 2 {
                "credential_plane: on\ncredentials:\n  recipient_keys: [pki/n3.recipient.key]\n  \
                 issuer_keys: [pki/e2.issuer.pub]\n  clock_skew_ms: 500\n"
            } else {
                ""
            };
            let text = format!(
                "node_id: {name}\nedge:\n  address: \"{}\"\n  trust_domain: {TRUST_DOMAIN}\n  \
                 name: {edge}\npki:\n  ca: pki/ca.crt\n  certificate: pki/{name}.crt\n  \
                 key: pki/{name}.key\n{managed}{NODE_WAITS}",
                address(Link::Edge(node))
            );
            self.write(&format!("{name}.yaml"), &text)?;
        }
        let slot = [
            "--principal",
            "team",
            "--slot",
            "main",
            "--route",
            "m",
            "--profile",
            "chaos",
        ];
        let add = ["credential", "add", "--config", "e2.yaml"];
        self.iop(&[&add[..], &slot[..]].concat(), &self.credential)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.out.join(name);
        fs::write(&path, text).map_err(Error::io(path.display().to_string()))
    }

    /// What both Edges have: listeners, identity, the client's key, waits.
    fn edge(&self, row: usize, listeners: &str, rest: &str) -> String {
        let name = Who::Edge(u8::from(row > 0)).name();
        let (nodes, clients, admin) = (self.nodes[row], self.clients[row], self.admins[row]);
        let hash = digest(&SHA256, self.keys[row].as_bytes());
        let hash: String = hash
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!(
            "listeners:\n  nodes: \"{nodes}\"\n  clients: \"{clients}\"\n  admin: \"{admin}\"\n\
             {listeners}pki:\n  trust_domain: {TRUST_DOMAIN}\n  edge_name: {name}\n  \
             ca: pki/ca.crt\n  certificate: pki/{name}.crt\n  key: pki/{name}.key\n\
             keys:\n  - principal: team\n    sha256: {hash}\n{EDGE_WAITS}{rest}"
        )
    }

    fn plain_edge(&self, address: &impl Fn(Link) -> SocketAddr) -> String {
        let node = |row: u8| {
            let (n, url) = (row + 1, address(Link::Server(row)));
            format!(
                "  - id: n{n}\n    adapters:\n      - name: raw\n        type: openai_compat\n        \
                 base_url: \"http://{url}\"\n      - name: words\n        type: ollama\n        \
                 base_url: \"http://{url}\"\n    providers:\n{}{}",
                provider(&format!("p{n}"), "raw", TARGET, CAPACITY),
                provider(&format!("w{n}"), "words", "words", WORDS_CAPACITY)
            )
        };
        let rest = format!(
            "shards: 2\nnodes:\n{}{}models:\n  - name: m\n    providers: [p1, p2]\n    \
             long_threshold_bytes: 128 KiB\n  - name: words\n    providers: [w1, w2]\n",
            node(0),
            node(1)
        );
        self.edge(0, "", &rest)
    }

    fn managed_edge(&self, address: &impl Fn(Link) -> SocketAddr) -> String {
        let url = address(Link::Server(2));
        let rest = format!(
            "credential_plane: on\ncredentials:\n  store: slots\n  \
             store_key_file: pki/e2.store.key\n  issuer_key: pki/e2.issuer.key\nnodes:\n  \
             - id: n3\n    recipient_key: pki/n3.recipient.pub\n    adapters:\n      - name: raw\n        \
             type: openai_compat\n        base_url: \"http://{url}\"\n        profile:\n          \
             id: chaos\n          operations: [{MANAGED}]\n          auth_header: x-key\n          \
             auth_prefix: \"Key \"\n    providers:\n{}        \
             operations: [{MANAGED}]\nmodels:\n  - name: m\n    providers: [p3]\n    \
             long_threshold_bytes: 128 KiB\n",
            provider("p3", "raw", TARGET, CAPACITY)
        );
        let tls = "  clients_tls:\n    certificate: pki/e2.crt\n    key: pki/e2.key\n";
        self.edge(1, tls, &rest)
    }

    fn parts(&self) -> Result<Vec<Part>, Error> {
        let own = std::env::current_exe().map_err(Error::io("this program"))?;
        let text = |path: &Path| path.display().to_string();
        let leash = leash();
        let mut parts = Vec::new();
        let mut add = |who: Who, words: Vec<String>, environment| {
            let words = [&leash[..], &words[..]].concat();
            parts.push(Part::new(who, words, environment, self.out.clone()));
        };
        for (row, address) in (0..NODES).zip(&self.servers) {
            let who = Who::Server(row);
            let journal = self.journal(who);
            let words = ["provider", "--name", &who.name(), "--listen"].map(str::to_owned);
            let end = [address.to_string(), "--journal".to_owned(), text(&journal)];
            let credential = format!("x-key: Key {}", self.credential);
            let environment = if row == 2 {
                vec![(CREDENTIAL, credential)]
            } else {
                Vec::new()
            };
            add(
                who,
                [&[text(&own)], &words[..], &end[..]].concat(),
                environment,
            );
        }
        let iop = |command: &str, who: Who| {
            let config = self.out.join(format!("{}.yaml", who.name()));
            let words = [text(&self.iop), command.to_owned(), "--config".to_owned()];
            [&words[..], &[text(&config)]].concat()
        };
        for edge in 0..EDGES {
            add(Who::Edge(edge), iop("edge", Who::Edge(edge)), Vec::new());
        }
        for node in 0..NODES {
            let who = Who::Node(node);
            let mut words = iop("node", who);
            if let Some(network) = &self.network {
                let space = network.space_name(node);
                let inside = ["ip", "netns", "exec", &space].map(str::to_owned);
                words = [&inside[..], &words[..]].concat();
            }
            add(who, words, Vec::new());
        }
        Ok(parts)
    }

    fn journal(&self, who: Who) -> PathBuf {
        self.out.join(format!("{}.journal", who.name()))
    }

    fn finish(self, parts: Vec<Part>, links: Vec<(Link, Relay)>) -> Stage {
        let tls = [None, Some(client_tls())];
        let site = |row: usize| Site {
            who: Who::Edge(u8::from(row > 0)),
            door: Door {
                address: self.clients[row],
                tls: tls[row].clone(),
            },
            key: self.keys[row].clone(),
            is_managed: row > 0,
        };
        let journals = (0..NODES).map(|row| journal::Reader::new(self.journal(Who::Server(row))));
        let mut secrets = [&self.credential, "PRIVATE KEY", MARK, CANARY]
            .map(str::to_owned)
            .to_vec();
        secrets.extend(self.keys.iter().cloned());
        Stage {
            out: self.out.clone(),
            parts,
            links,
            sites: (0..usize::from(EDGES))
                .map(|row| Rc::new(site(row)))
                .collect(),
            journals: journals.collect(),
            secrets,
            form: if self.network.is_some() {
                Form::Veth
            } else {
                Form::Relay
            },
            admins: self.admins,
            servers: self.servers,
            _network: self.network,
        }
    }
}

/// What makes a program end with the harness, however that ends; nothing where the host has no such tool.
fn leash() -> Vec<String> {
    let words = ["setpriv", "--pdeathsig", "KILL"];
    let mut tried = Command::new(words[0]);
    let tried = tried.args(&words[1..]).arg("true");
    let tried = tried.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if tried.is_ok_and(|status| status.success()) {
        words.map(str::to_owned).to_vec()
    } else {
        Vec::new()
    }
}

/// Makes the folder anew. One that is not empty is deleted only if an earlier run has marked it as its own.
fn fresh(out: &Path) -> Result<PathBuf, Error> {
    let failed = || Error::io(out.display().to_string());
    fs::create_dir_all(out).map_err(failed())?;
    let out = out.canonicalize().map_err(failed())?;
    let mut held = fs::read_dir(&out).map_err(failed())?;
    if held.next().is_some() {
        if !out.join(OURS).is_file() {
            let why = "holds what no run of the harness has left";
            return Err(Error::Usage(format!("--out {}: {why}", out.display())));
        }
        fs::remove_dir_all(&out).map_err(failed())?;
        fs::create_dir_all(&out).map_err(failed())?;
    }
    fs::write(out.join(OURS), "").map_err(failed())?;
    Ok(out)
}

/// The file with the next wait in it: a millisecond longer, or the first again after `WAITS_MS` of them.
fn changed(text: &str) -> String {
    let lines = text.lines().map(|line| match line.strip_prefix(WAIT) {
        Some(ms) => {
            let before = ms.parse().unwrap_or(WAIT_MS);
            let next = WAIT_MS + (before + 1 - WAIT_MS) % WAITS_MS;
            format!("{WAIT}{next}\n")
        }
        None => format!("{line}\n"),
    });
    lines.collect()
}

fn provider(id: &str, adapter: &str, target: &str, capacity: u32) -> String {
    let long = capacity / 2;
    format!(
        "      - id: {id}\n        adapter: {adapter}\n        target: {target}\n        \
         capacity: {capacity}\n        long_capacity: {long}\n        stall_timeout_ms: 3000\n        \
         response_wait_ms: 6000\n"
    )
}

/// Ports nobody listens on right now.
struct Ports {
    next: u32,
}

impl Ports {
    fn new() -> Self {
        Self {
            next: std::process::id().wrapping_mul(389), // runs at once start apart
        }
    }

    fn free(&mut self) -> Result<SocketAddr, Error> {
        let (first, count) = PORTS;
        for _ in 0..count {
            self.next = self.next.wrapping_add(1);
            let port = u16::try_from(first + self.next % count).expect("below 2^16");
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            if TcpListener::bind(address).is_ok() {
                return Ok(address);
            }
        }
        Err(Error::Part("no free port".to_owned()))
    }
}

/// Takes any server: the stage's own certificates name nodes and Edges, not hosts.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::PeerIncompatible(
            rustls::PeerIncompatible::Tls12NotOffered,
        ))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn client_tls() -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("this provider speaks TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
        .with_no_client_auth();
    Arc::new(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_somebody_else_stays() {
        let out = std::env::temp_dir().join(format!("iop-stage-{}", std::process::id()));
        let _gone = fs::remove_dir_all(&out);
        assert!(fresh(&out).is_ok(), "a new one");
        fs::write(out.join("e1.log"), "x").unwrap();
        assert!(fresh(&out).is_ok(), "its own");
        assert!(!out.join("e1.log").exists());
        fs::remove_file(out.join(OURS)).unwrap();
        assert!(fresh(&out).is_ok(), "an empty one");
        fs::remove_file(out.join(OURS)).unwrap();
        fs::write(out.join("thesis"), "x").unwrap();
        assert!(fresh(&out).is_err());
        assert!(out.join("thesis").exists());
        fs::remove_dir_all(&out).unwrap();
    }

    #[test]
    fn a_reload_has_something_to_take() {
        let mut text = EDGE_WAITS.to_owned();
        for _ in 0..WAITS_MS {
            let next = changed(&text);
            assert_ne!(next, text);
            text = next;
        }
        assert_eq!(text, EDGE_WAITS, "the first again");
    }
}
