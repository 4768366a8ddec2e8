//! Real parts for tests of the whole Edge: `iop edge` as a process of its own, a scripted node over
//! real TLS, a plain HTTP client over a socket.
//!
//! Every wait has a deadline and ends with what was seen instead.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use iop_proto::domain::{Message, NodeReadyRequest, RegisterRequest, RunRequest, TunnelRequest};
use iop_proto::framing::{Assembler, Kind, encode_envelope};
use iop_proto::map;
use iop_proto::view::TunnelFrameOut;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use socket2::{Domain, SockRef, Socket, Type};

/// How long anything may take before a test gives up.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The built program.
pub fn iop() -> Command {
    Command::new(env!("CARGO_BIN_EXE_iop"))
}

// ── files ─────────────────────────────────────────────────────────────────────────────────────────

/// A directory of the test's own, gone with it.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("iop-test-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file in the test's directory");
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

/// Makes an authority with one Edge and the named nodes in `directory/pki`.
pub fn make_pki(directory: &Directory, nodes: &[&str]) {
    let pki = directory.path().join("pki");
    let run = |arguments: &[&str]| {
        let status = iop()
            .args(arguments)
            .arg("--dir")
            .arg(&pki)
            .stdout(Stdio::null())
            .status()
            .expect("iop runs");
        assert!(status.success(), "iop {arguments:?}: {status}");
    };
    run(&["pki", "init", "--trust-domain", "iop.test"]);
    run(&["pki", "edge", "edge-1"]);
    for node in nodes {
        run(&["pki", "node", node]);
    }
}

/// Makes the keys of a credential plane in `directory/pki`: `e` for the Edge, one per node.
pub fn make_keys(directory: &Directory, nodes: &[&str]) {
    let recipients = nodes.iter().map(|&node| ("recipient", node));
    for (kind, name) in [("issuer", "e"), ("store-key", "e")]
        .into_iter()
        .chain(recipients)
    {
        let status = iop()
            .args(["pki", kind, name, "--dir"])
            .arg(directory.path().join("pki"))
            .stdout(Stdio::null())
            .status();
        assert!(status.expect("iop runs").success(), "iop pki {kind} {name}");
    }
}

/// Runs `iop credential` on the Edge's store; what it printed.
pub fn credential(
    directory: &Directory,
    command: &str,
    slot: &Slot,
    more: &[&str],
    secret: &str,
) -> String {
    let mut child = iop()
        .args(["credential", command, "--config"])
        .arg(directory.path().join("edge.yaml"))
        .args(["--principal", slot.principal, "--slot", slot.name])
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("iop runs");
    let mut input = child.stdin.take().expect("piped");
    // A command that needs no credential may have ended before.
    let _unread = input.write_all(secret.as_bytes());
    drop(input);
    let output = child.wait_with_output().expect("iop ends");
    assert!(output.status.success(), "iop credential {command}");
    String::from_utf8(output.stdout).expect("text")
}

/// A port nobody listens on right now, below those that outgoing connections are given: nobody takes
/// it by chance before the Edge does.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(389); // test binaries that run at once start apart
    for _ in 0..PORTS {
        let place = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let port = u16::try_from(10_000 + place).expect("below 2^16");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

/// Ports that `free_port` chooses from, counted from 10 000.
const PORTS: u32 = 22_000;

// ── the Edge ──────────────────────────────────────────────────────────────────────────────────────

/// What a test may want different. Defaults: one node `n1` with provider `p1` (adapter `a1`, target
/// `t1`, capacity 64) behind model `m1`.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The `nodes:` list and what follows it: models, keys, limits, timeouts.
    pub catalog: String,
    pub nodes: Vec<&'static str>,
    /// More lines under `listeners:`.
    pub listeners: &'static str,
    pub environment: Vec<(&'static str, &'static str)>,
    /// Provider credentials; with any the Edge is managed, and has keys. Its catalog says so.
    pub slots: Vec<Slot>,
    /// What it writes goes to `edge.log` and `edge.out` in its directory.
    pub is_logged: bool,
}

/// One credential of profile `openai`.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub principal: &'static str,
    pub name: &'static str,
    pub route: &'static str,
    pub profile: &'static str,
    pub secret: &'static str,
}

pub const CATALOG: &str = "nodes:
  - id: n1
    adapters:
      - name: a1
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
    providers:
      - id: p1
        adapter: a1
        target: t1
        capacity: 64
models:
  - name: m1
    providers: [p1]
";

impl Default for Setup {
    fn default() -> Self {
        Self {
            catalog: CATALOG.to_owned(),
            nodes: vec!["n1"],
            listeners: "",
            environment: Vec::new(),
            slots: Vec::new(),
            is_logged: false,
        }
    }
}

impl Setup {
    pub fn with(catalog: &str) -> Self {
        Self {
            catalog: catalog.to_owned(),
            ..Self::default()
        }
    }

    /// `shards:` of this run of the tests, unless the catalog says how many.
    fn shards_line(&self) -> String {
        if self.catalog.starts_with("shards:") || self.catalog.contains("\nshards:") {
            return String::new();
        }
        format!("shards: {}\n", shards())
    }
}

/// Shards of an Edge whose catalog does not say: the whole suite runs with several counts.
pub fn shards() -> u32 {
    std::env::var("IOP_TEST_SHARDS").map_or(1, |count| {
        count.parse().expect("IOP_TEST_SHARDS is a number")
    })
}

/// A running Edge.
#[derive(Debug)]
pub struct Edge {
    child: Child,
    /// Its configuration file as far as `catalog` follows.
    head: String,
    pub directory: Directory,
    pub nodes: SocketAddr,
    pub clients: SocketAddr,
    pub admin: SocketAddr,
}

impl Edge {
    pub fn start(setup: &Setup) -> Self {
        let mut edge = Self::begin(setup);
        edge.wait_ready();
        edge
    }

    /// The process is there; nothing else is sure.
    pub fn begin(setup: &Setup) -> Self {
        let directory = Directory::new();
        make_pki(&directory, &setup.nodes);
        let [nodes, clients, admin] =
            [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let head = format!(
            "listeners:\n  nodes: \"{nodes}\"\n  clients: \"{clients}\"\n  admin: \"{admin}\"\n{}\
             pki:\n  trust_domain: iop.test\n  edge_name: edge-1\n  ca: pki/ca.crt\n  \
             certificate: pki/edge-1.crt\n  key: pki/edge-1.key\n{}",
            setup.listeners,
            setup.shards_line(),
        );
        let config = directory.write("edge.yaml", &format!("{head}{}", setup.catalog));
        if !setup.slots.is_empty() {
            make_keys(&directory, &setup.nodes);
        }
        for slot in &setup.slots {
            let about = ["--route", slot.route, "--profile", slot.profile];
            credential(&directory, "add", slot, &about, slot.secret);
        }
        let sink = |name: &str| {
            let file = fs::File::create(directory.path().join(name));
            Stdio::from(file.expect("a file in the test's directory"))
        };
        let (out, log) = if setup.is_logged {
            (sink("edge.out"), sink("edge.log"))
        } else {
            (Stdio::null(), Stdio::inherit())
        };
        let child = iop()
            .arg("edge")
            .arg("--config")
            .arg(config)
            .envs(setup.environment.iter().copied())
            .stdout(out)
            .stderr(log)
            .spawn()
            .expect("iop edge starts");
        Self {
            child,
            head,
            directory,
            nodes,
            clients,
            admin,
        }
    }

    pub fn wait_ready(&mut self) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                panic!("iop edge ended at once: {status}");
            }
            if http_get(self.admin, "/readyz").is_some_and(|(status, _)| status == 200) {
                return;
            }
            assert!(began.elapsed() < DEADLINE, "the Edge did not become ready");
            std::thread::yield_now();
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn metrics(&self) -> Metrics {
        let (status, body) = http_get(self.admin, "/metrics").expect("/metrics answers");
        assert_eq!(status, 200);
        Metrics(body)
    }

    /// Waits until `seen` holds of the metrics.
    pub fn wait_metrics(&self, what: &str, seen: impl Fn(&Metrics) -> bool) -> Metrics {
        let began = Instant::now();
        loop {
            let metrics = self.metrics();
            if seen(&metrics) {
                return metrics;
            }
            assert!(
                began.elapsed() < DEADLINE,
                "waiting for {what}; last seen:\n{}",
                metrics.0
            );
            // Asking must not starve what is asked about.
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    /// Waits until everything that belongs to a request or a client is back to zero.
    pub fn wait_idle(&self) -> Metrics {
        self.wait_metrics("idle", |metrics| {
            [
                "iop_edge_clients",
                "iop_edge_runs",
                "iop_edge_leases_held",
                "iop_edge_pool_used_bytes{pool=\"output\"}",
                "iop_edge_pool_used_bytes{pool=\"body\"}",
                "iop_edge_receive_buffers_out{pool=\"session\"}",
                "iop_edge_receive_buffers_out{pool=\"client\"}",
            ]
            .iter()
            .all(|name| metrics.get(name) == 0.0)
        })
    }

    pub fn status(&self) -> serde_json::Value {
        let (status, body) = http_get(self.admin, "/status").expect("/status answers");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("/status is JSON")
    }

    pub fn open_descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("the Edge runs")
            .count()
    }

    /// Hold it in a scope whose threads wait for the Edge.
    pub fn guard(&self) -> Guard {
        Guard(self.pid())
    }

    /// Writes another catalog into its configuration file.
    pub fn write_catalog(&self, catalog: &str) {
        let text = format!("{}{catalog}", self.head);
        self.directory.write("edge.yaml", &text);
    }

    /// `iop reload`, `iop drain-node NODE`: whether it was done, and what was said.
    pub fn order(&self, arguments: &[&str]) -> (bool, String) {
        let config = self.directory.path().join("edge.yaml");
        let done = iop().args(arguments).arg("--config").arg(config).output();
        let done = done.expect("iop runs");
        let said = [done.stdout, done.stderr].concat();
        let said = String::from_utf8(said).expect("iop says UTF-8");
        (done.status.success(), said)
    }

    /// Takes another catalog; what has changed.
    pub fn reload(&self, catalog: &str) -> String {
        self.write_catalog(catalog);
        let (done, said) = self.order(&["reload"]);
        assert!(done, "{said}");
        said
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal("-TERM");
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.pid().to_string()])
            .status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for the process to end on its own.
    pub fn wait_exit(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return status;
            }
            assert!(began.elapsed() < DEADLINE, "the Edge did not end");
            std::thread::yield_now();
        }
    }

    /// The Edge still lives: no panic has ended it.
    pub fn assert_alive(&mut self) {
        let ended = self.child.try_wait().expect("a child of ours");
        assert!(ended.is_none(), "the Edge ended: {ended:?}");
    }
}

/// Ends the Edge when the test that holds this panics, so that threads which wait for it end too.
#[derive(Debug)]
pub struct Guard(u32);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ended = Command::new("kill")
                .args(["-KILL", &self.0.to_string()])
                .status();
        }
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// One reading of `/metrics`.
#[derive(Clone, Debug)]
pub struct Metrics(pub String);

impl Metrics {
    /// Value of the series spelled `name` or `name{labels}`; 0 when it is not there.
    pub fn get(&self, series: &str) -> f64 {
        self.0
            .lines()
            .find_map(|line| {
                line.strip_prefix(series)?
                    .strip_prefix(' ')?
                    .trim()
                    .parse()
                    .ok()
            })
            .unwrap_or(0.0)
    }

    /// Sum over every series of `name`, whatever its labels.
    pub fn sum(&self, name: &str) -> f64 {
        self.0
            .lines()
            .filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with([' ', '{']))
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Sum over the series of `name` that carry `label="value"`.
    pub fn labelled(&self, name: &str, label: &str, value: &str) -> f64 {
        let wanted = format!("{label}=\"{value}\"");
        self.0
            .lines()
            .filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with('{'))
                    && line.contains(&wanted)
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// How often the Edge ended something for the reason labelled so.
    pub fn reason(&self, label: &str) -> f64 {
        self.0
            .lines()
            .filter(|line| line.contains(&format!("reason=\"{label}\"")))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }
}

/// One request over a connection of its own, up to the end of the connection; `None` when nobody
/// answers. `headers`: lines, each with its end.
pub fn http_bytes(address: SocketAddr, method: &str, path: &str, headers: &str) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(DEADLINE)).ok()?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: edge\r\nconnection: close\r\n{headers}\r\n"
    )
    .ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// One GET over a connection of its own; `None` when nobody answers.
pub fn http_get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let text = String::from_utf8(http_bytes(address, "GET", path, "")?).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let body = if head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        dechunk(body)?
    } else {
        body.to_owned()
    };
    Some((status, body))
}

fn dechunk(mut body: &str) -> Option<String> {
    let mut whole = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n")?;
        let size = usize::from_str_radix(size, 16).ok()?;
        if size == 0 {
            return Some(whole);
        }
        whole.push_str(rest.get(..size)?);
        body = rest.get(size + 2..)?;
    }
}

// ── a scripted node ───────────────────────────────────────────────────────────────────────────────

/// A node agent whose every byte the test decides.
pub struct Node {
    pub stream: StreamOwned<ClientConnection, TcpStream>,
    assembler: Assembler,
    next_id: u64,
    /// Of the envelope received last.
    pub reply_to: u64,
    pub id: u64,
    /// Everything the Edge has said, if it is wanted.
    pub seen: Option<Vec<u8>>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}

/// Accepts any server: who the Edge is, is other tests' business.
#[derive(Debug)]
struct AnyServer(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS of a node whose certificate files are `directory/pki/<name>.{crt,key}`.
pub fn node_tls(directory: &Directory, name: &str) -> Arc<ClientConfig> {
    let pki = directory.path().join("pki");
    let certificates = CertificateDer::pem_file_iter(pki.join(format!("{name}.crt")))
        .expect("the node's certificate")
        .collect::<Result<Vec<_>, _>>()
        .expect("a certificate");
    let key =
        PrivateKeyDer::from_pem_file(pki.join(format!("{name}.key"))).expect("the node's key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
        .with_client_auth_cert(certificates, key)
        .expect("a matching key");
    config.alpn_protocols = vec![b"iop-edge-node/1".to_vec()];
    Arc::new(config)
}

/// TLS of a client that takes any server.
pub fn client_tls() -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
        .with_no_client_auth();
    Arc::new(config)
}

/// One whole one-way envelope, length prefix included.
pub fn envelope(message: &Message) -> Vec<u8> {
    envelope_with(message, 0)
}

/// As `envelope`, under the request id `id`.
pub fn envelope_with(message: &Message, id: u64) -> Vec<u8> {
    let (kind, payload) = map::encode(message);
    let mut bytes = Vec::new();
    encode_envelope(kind, id, 0, &payload, &mut bytes).expect("a legal envelope");
    bytes
}

/// As `envelope`, in answer to the Edge's request `reply_to`.
pub fn envelope_reply(message: &Message, reply_to: u64) -> Vec<u8> {
    let (kind, payload) = map::encode(message);
    let mut bytes = Vec::new();
    encode_envelope(kind, 0, reply_to, &payload, &mut bytes).expect("a legal envelope");
    bytes
}

impl Node {
    /// A verified connection that has not registered.
    pub fn connect(edge: &Edge, name: &str) -> Self {
        Self::connect_with(edge, node_tls(&edge.directory, name))
    }

    /// A connection with the given TLS; its handshake is done by the first read or write.
    pub fn connect_with(edge: &Edge, config: Arc<ClientConfig>) -> Self {
        Self::connect_over(edge.nodes, config)
    }

    /// From here on its kernel takes no more than so many bytes ahead of it, and tunes nothing.
    pub fn takes_ahead(&self, bytes: usize) {
        let socket = SockRef::from(&self.stream.sock);
        socket.set_recv_buffer_size(bytes).expect("an option");
    }

    /// As `connect_with`, to something that leads to the Edge.
    pub fn connect_over(way: SocketAddr, config: Arc<ClientConfig>) -> Self {
        let socket = TcpStream::connect(way).expect("somebody listens for nodes");
        socket.set_nodelay(true).expect("a TCP socket");
        socket
            .set_read_timeout(Some(DEADLINE))
            .expect("a TCP socket");
        let server = ServerName::try_from("edge").expect("a name");
        let tls = ClientConnection::new(config, server).expect("TLS");
        Self {
            stream: StreamOwned::new(tls, socket),
            assembler: Assembler::new(64 * 1024 * 1024),
            next_id: 1,
            reply_to: 0,
            id: 0,
            seen: None,
        }
    }

    /// A node that may be dispatched to.
    pub fn ready(edge: &Edge, name: &str) -> Self {
        let mut node = Self::connect(edge, name);
        node.become_ready(name);
        node
    }

    pub fn become_ready(&mut self, name: &str) {
        self.register(name);
        assert!(matches!(
            self.receive(),
            Message::RegisterResponse(iop_proto::domain::RegisterResponse::Accepted { .. })
        ));
        self.send(&Message::NodeReadyRequest(NodeReadyRequest {
            node_id: name.to_owned(),
        }));
        match self.receive() {
            Message::NodeReadyResponse(answer) => assert!(answer.ready, "{answer:?}"),
            other => panic!("expected NodeReadyResponse, got {other:?}"),
        }
    }

    pub fn register(&mut self, node_id: &str) {
        self.send(&Message::RegisterRequest(RegisterRequest {
            node_id: node_id.to_owned(),
            ..RegisterRequest::default()
        }));
    }

    pub fn send(&mut self, message: &Message) {
        let id = self.next_id;
        self.next_id += 1;
        self.send_bytes(&envelope_with(message, id));
    }

    pub fn frame(&mut self, frame: &TunnelFrameOut<'_>) {
        let mut bytes = vec![0; frame.body.len() + 4096];
        let length = frame.encode(&mut bytes).expect("a legal frame");
        self.send_bytes(&bytes[..length]);
    }

    /// Plaintext bytes, as they are.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the Edge reads");
        self.stream.flush().expect("the Edge reads");
    }

    /// As `send_bytes`; `false`: the Edge has closed the connection.
    pub fn try_send_bytes(&mut self, bytes: &[u8]) -> bool {
        self.stream
            .write_all(bytes)
            .and_then(|()| self.stream.flush())
            .is_ok()
    }

    /// The next message that is no ping or pong; pings are answered. `None`: the Edge closed.
    pub fn try_receive(&mut self) -> Option<Message> {
        let began = Instant::now();
        loop {
            assert!(
                began.elapsed() < DEADLINE,
                "nothing but heartbeats from the Edge in time"
            );
            match self.try_receive_any()? {
                Message::Ping(ping) => {
                    let pong = envelope(&Message::Pong(iop_proto::domain::Pong { seq: ping.seq }));
                    let _closed = self.try_send_bytes(&pong); // the next read says so
                }
                Message::Pong(_) => {}
                message => return Some(message),
            }
        }
    }

    /// The next message, whatever it is. `None`: the Edge closed.
    pub fn try_receive_any(&mut self) -> Option<Message> {
        loop {
            while let Some(envelope) = self.assembler.next().expect("the Edge frames well") {
                let Kind::Known(kind) = envelope.kind else {
                    continue;
                };
                self.reply_to = envelope.reply_to;
                self.id = envelope.id;
                return Some(map::decode(kind, &envelope.payload).expect("the Edge encodes well"));
            }
            let mut bytes = [0; 16 * 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(length) => {
                    self.assembler.push(&bytes[..length]);
                    if let Some(seen) = &mut self.seen {
                        seen.extend_from_slice(&bytes[..length]);
                    }
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::ConnectionReset
                            | std::io::ErrorKind::UnexpectedEof
                            | std::io::ErrorKind::BrokenPipe
                    ) =>
                {
                    return None;
                }
                Err(error) => panic!("nothing from the Edge in time: {error}"),
            }
        }
    }

    /// Takes at most 16 KiB of what the Edge has sent; it need not end a message.
    pub fn read_some(&mut self) {
        let mut bytes = [0; 16 * 1024];
        let length = self.stream.read(&mut bytes).expect("bytes from the Edge");
        self.assembler.push(&bytes[..length]);
    }

    pub fn receive(&mut self) -> Message {
        self.try_receive().expect("the Edge closed the connection")
    }

    pub fn tunnel(&mut self) -> TunnelRequest {
        match self.receive() {
            Message::TunnelRequest(request) => request,
            other => panic!("expected a tunnel request, got {other:?}"),
        }
    }

    pub fn run(&mut self) -> RunRequest {
        match self.receive() {
            Message::RunRequest(request) => request,
            other => panic!("expected a run request, got {other:?}"),
        }
    }

    /// The Edge closes the connection, whatever it says before.
    pub fn expect_closed(&mut self) {
        while self.try_receive().is_some() {}
    }
}

// ── a client ──────────────────────────────────────────────────────────────────────────────────────

/// An HTTP/1.1 client whose every byte the test decides.
#[derive(Debug)]
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
    /// The connection ended by a reset, not by a FIN.
    pub was_reset: bool,
}

/// Status and lower-cased header lines.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    /// Every value of a repeated header, in order.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let named = self.headers.iter().filter(|(known, _)| known == name);
        named.map(|(_, value)| value.as_str()).collect()
    }
}

/// A chat request for model `model`.
pub fn chat(model: &str, stream: bool) -> String {
    let body = format!(
        "{{\"model\":\"{model}\",\"stream\":{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]}}"
    );
    post("/v1/chat/completions", &body)
}

pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: edge\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

impl Client {
    pub fn connect(edge: &Edge) -> Self {
        Self::over(TcpStream::connect(edge.clients).expect("the Edge listens for clients"))
    }

    /// To which the kernel takes little: small segments, hence a small send buffer at the Edge, and a
    /// small window.
    pub fn narrow(edge: &Edge) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_recv_buffer_size(4 * 1024).expect("an option");
        socket.set_tcp_mss(536).expect("an option");
        socket
            .connect(&edge.clients.into())
            .expect("the Edge listens");
        Self::over(socket.into())
    }

    /// A client on a connection of the test's own making.
    pub fn over(stream: TcpStream) -> Self {
        stream
            .set_read_timeout(Some(DEADLINE))
            .expect("a TCP socket");
        stream.set_nodelay(true).expect("a TCP socket");
        Self {
            stream,
            buffer: Vec::new(),
            was_reset: false,
        }
    }

    pub fn send(&mut self, text: &str) {
        self.stream
            .write_all(text.as_bytes())
            .expect("the Edge reads");
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 16 * 1024];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(length) => {
                self.buffer.extend_from_slice(&bytes[..length]);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                self.was_reset = true;
                false
            }
            Err(error) => panic!("nothing from the Edge in time: {error}"),
        }
    }

    /// The head of the next answer; `None`: the connection ended instead.
    pub fn head(&mut self) -> Option<Head> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|part| part == b"\r\n\r\n") {
                break at;
            }
            if !self.fill() {
                assert!(self.buffer.is_empty(), "half a head");
                return None;
            }
        };
        // Latin-1: a byte of a value is the character of that number.
        let text: String = self.buffer.drain(..end + 4).map(char::from).collect();
        let mut lines = text.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Some(Head { status, headers })
    }

    /// What has come and was not looked at, or else the next bytes; and whether the connection is open.
    pub fn read_some(&mut self) -> (Vec<u8>, bool) {
        let open = !self.buffer.is_empty() || self.fill();
        (std::mem::take(&mut self.buffer), open)
    }

    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.fill() {
                return None;
            }
        }
        Some(self.buffer.drain(..length).collect())
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|part| part == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                return String::from_utf8(line[..at].to_vec()).ok();
            }
            if !self.fill() {
                return None;
            }
        }
    }

    /// The next chunk of a chunked body; empty at its end, `None` when the connection broke off.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line()?, 16).expect("a chunk size");
        let data = self.take(size)?;
        assert_eq!(self.take(2)?, b"\r\n");
        Some(data)
    }

    /// Chunked body bytes until at least `length` have come.
    pub fn at_least(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let chunk = self.chunk().expect("the answer goes on");
            assert!(
                !chunk.is_empty(),
                "the answer ended after {} bytes",
                bytes.len()
            );
            bytes.extend(chunk);
        }
        bytes
    }

    /// The whole body as its head frames it, and whether it came to a proper end.
    pub fn body(&mut self, head: &Head) -> (Vec<u8>, bool) {
        let mut bytes = Vec::new();
        if head
            .header("transfer-encoding")
            .is_some_and(|coding| coding == "chunked")
        {
            loop {
                match self.chunk() {
                    Some(chunk) if chunk.is_empty() => return (bytes, true),
                    Some(chunk) => bytes.extend(chunk),
                    None => return (bytes, false),
                }
            }
        }
        if let Some(length) = head.header("content-length") {
            let length: usize = length.parse().expect("a length");
            return match self.take(length) {
                Some(body) => (body, true),
                None => (std::mem::take(&mut self.buffer), false),
            };
        }
        while self.fill() {}
        (std::mem::take(&mut self.buffer), true)
    }

    /// One whole exchange.
    pub fn ask(&mut self, request: &str) -> (Head, Vec<u8>) {
        self.send(request);
        let head = self.head().expect("an answer");
        let (body, whole) = self.body(&head);
        assert!(whole, "the answer broke off");
        (head, body)
    }

    /// The Edge closes the connection without another byte.
    pub fn expect_closed(&mut self) {
        assert!(
            self.buffer.is_empty() && !self.fill(),
            "bytes instead of a close"
        );
    }
}
