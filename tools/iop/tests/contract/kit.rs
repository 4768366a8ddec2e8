//! What the contract tests share: an Edge that must come to rest, scripted answers of a node, bytes
//! that no builder would write.
//!
//! Lives on: test threads. Bound: one Edge process per test, ended with it.
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use iop_proto::domain::{
    ConfigRefreshResponse, ExecutionFailure, FailureCode, Fence, FrameKind, HealthEvidence,
    HealthPair, Message, NodeConfig, NodeReadyRequest, Observation, Ping, Pong, RefreshStatus,
    RegisterRequest, RegisterResponse, TunnelFrame, TunnelRequest,
};
use iop_proto::reason::Reason;
use iop_proto::view::TunnelFrameOut;

use crate::support::{
    Client, DEADLINE, Edge, Head, Metrics, Node, Setup, chat, envelope, envelope_reply,
};

// ── the Edge under test ──────────────────────────────────────────────────────────────────────────

/// A running Edge with nodes `n1` and `n2` in its configuration, and what it has open at rest.
pub(crate) struct World {
    pub(crate) edge: Edge,
    shards: u32,
    resting: f64,
}

/// Node `n1` with provider `p1`, node `n2` with `p2`; `m1` is served by both, `only1` and `only2`
/// by one each. `tail`: limits, timeouts.
pub(crate) fn catalog(capacities: [u32; 2], tail: &str) -> String {
    catalog_with(capacities, "", tail)
}

/// As `catalog`, with more lines in both providers.
pub(crate) fn catalog_with(capacities: [u32; 2], provider: &str, tail: &str) -> String {
    let mut text = "nodes:\n".to_owned();
    for (row, capacity) in capacities.iter().enumerate() {
        let n = row + 1;
        text += &format!(
            "  - id: n{n}\n    adapters:\n      - name: a{n}\n        type: openai_compat\n        \
             base_url: \"http://127.0.0.1:9\"\n    providers:\n      - id: p{n}\n        \
             adapter: a{n}\n        target: t{n}\n        capacity: {capacity}\n{provider}"
        );
    }
    text + "models:\n  - name: m1\n    providers: [p1, p2]\n  - name: only1\n    \
            providers: [p1]\n  - name: only2\n    providers: [p2]\n"
        + tail
}

/// Shards of every Edge here: 1, or what `IOP_TEST_SHARDS` in the environment says.
pub(crate) fn shards() -> u32 {
    let told = std::env::var("IOP_TEST_SHARDS");
    told.map_or(1, |count| count.parse().expect("a number of shards"))
}

impl World {
    pub(crate) fn new(catalog: &str) -> Self {
        Self::with(&Setup {
            nodes: vec!["n1", "n2"],
            ..Setup::with(catalog)
        })
    }

    pub(crate) fn with(setup: &Setup) -> Self {
        Self::with_shards(setup, shards())
    }

    /// One shard always: its own bounds are what the test is about.
    pub(crate) fn one_shard(catalog: &str) -> Self {
        Self::with_shards(
            &Setup {
                nodes: vec!["n1", "n2"],
                ..Setup::with(catalog)
            },
            1,
        )
    }

    fn with_shards(setup: &Setup, shards: u32) -> Self {
        let catalog = format!("shards: {shards}\n{}", setup.catalog);
        let edge = Edge::start(&Setup {
            catalog,
            ..setup.clone()
        });
        // The front opens the last of what it keeps when it first accepts.
        let (head, _) = Client::connect(&edge).ask("GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n");
        assert_eq!(head.status, 200);
        edge.wait_metrics("a started Edge", |seen| {
            seen.get("iop_edge_client_connections_closed_total") == 1.0
        });
        let resting = (0..3).map(|_| descriptors(&edge)).fold(f64::MAX, f64::min);
        Self {
            edge,
            shards,
            resting,
        }
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.edge)
    }

    /// A client whose request is on its way.
    pub(crate) fn asks(&self, request: &str) -> Client {
        let mut client = self.client();
        client.send(request);
        client
    }

    pub(crate) fn node(&self, name: &str) -> Node {
        Node::ready(&self.edge, name)
    }

    /// Takes another catalog, on as many shards as before; what has changed.
    pub(crate) fn reload(&self, catalog: &str) -> String {
        self.edge.reload(&self.with_shards_line(catalog))
    }

    /// A catalog that the Edge refuses; what it says.
    pub(crate) fn reload_fails(&self, catalog: &str) -> String {
        self.edge.write_catalog(&self.with_shards_line(catalog));
        let (done, said) = self.edge.order(&["reload"]);
        assert!(!done, "{said}");
        said
    }

    fn with_shards_line(&self, catalog: &str) -> String {
        format!("shards: {}\n{catalog}", self.shards)
    }

    /// Waits until the Edge has counted `reason` exactly `count` times.
    pub(crate) fn saw(&self, reason: &str, count: u32) {
        let count = f64::from(count);
        let seen = self
            .edge
            .wait_metrics(reason, |seen| seen.reason(reason) >= count);
        assert_eq!(seen.reason(reason), count, "{reason}");
    }

    pub(crate) fn wait(&self, series: &str, value: u32) -> Metrics {
        let value = f64::from(value);
        self.edge
            .wait_metrics(series, |seen| seen.get(series) == value)
    }

    /// Waits until so many requests wait.
    pub(crate) fn wait_queued(&self, count: u32) {
        let what = format!("{count} queued");
        self.edge
            .wait_metrics(&what, |seen| queued(seen) == f64::from(count));
    }

    /// Waits until so many leases are held, of all providers.
    pub(crate) fn wait_held(&self, count: u32) {
        self.wait("iop_edge_leases_held", count);
    }

    pub(crate) fn violations(&self) -> f64 {
        self.edge.metrics().get("iop_edge_stream_violations_total")
    }

    /// Whether `/status` says that the node is connected. A document serves every reader for a
    /// second, so only the first reading of an Edge is sure to be news.
    pub(crate) fn is_connected(&self, node: &str) -> bool {
        let status = self.edge.status();
        let nodes = status["nodes"].as_array().expect("a list of nodes");
        let found = nodes.iter().find(|known| known["node_id"] == node);
        found
            .and_then(|known| known["connected"].as_bool())
            .expect("a configured node is listed")
    }

    pub(crate) fn wait_connected(&self, node: &str, connected: bool) {
        let began = Instant::now();
        while self.is_connected(node) != connected {
            assert!(
                began.elapsed() < DEADLINE,
                "{node} connected: {}",
                !connected
            );
            std::thread::yield_now();
        }
    }

    /// A whole exchange with `model` through `node` still works.
    pub(crate) fn serves(&self, node: &mut Node, model: &str) {
        let mut client = self.asks(&chat(model, false));
        let mut run = Run::asked(node);
        run.start(node, 200, &[("content-type", "application/json")]);
        run.body(node, b"{\"still\":\"here\"}");
        run.end(node);
        let head = client.head().expect("an answer");
        assert_eq!(head.status, 200);
        assert_eq!(client.body(&head), (b"{\"still\":\"here\"}".to_vec(), true));
    }

    /// Everything is given back: requests, leases, buffers, sessions, descriptors; and it still
    /// runs. Drop every node and client before.
    pub(crate) fn rest(mut self) -> Metrics {
        let metrics = self.edge.wait_idle();
        self.wait("iop_edge_sessions", 0);
        self.wait("iop_edge_pool_used_bytes{pool=\"assembly\"}", 0);
        let began = Instant::now();
        loop {
            let open = descriptors(&self.edge);
            if open == self.resting {
                break;
            }
            let resting = self.resting;
            assert!(
                began.elapsed() < DEADLINE,
                "{open} descriptors, {resting} at rest"
            );
            std::thread::park_timeout(Duration::from_millis(2));
        }
        self.edge.assert_alive();
        let granted = metrics.sum("iop_edge_leases_granted_total");
        let returned = metrics.sum("iop_edge_leases_returned_total");
        assert_eq!(granted, returned, "each lease is returned exactly once");
        metrics
    }
}

/// Open descriptors as the Edge itself counts them while it answers us: with our one connection,
/// and without the last one, whose end it has met before.
fn descriptors(edge: &Edge) -> f64 {
    edge.metrics().get("process_open_fds")
}

/// Requests that wait in control's queue.
pub(crate) fn queued(metrics: &Metrics) -> f64 {
    metrics.sum("iop_edge_queue_entries_total")
        - metrics.get("iop_edge_leases_granted_total{from=\"queue\"}")
        - metrics.get("iop_edge_clients_gone_total{phase=\"waiting\"}")
        - metrics.reason("queue_timeout")
}

// ── a node's half ────────────────────────────────────────────────────────────────────────────────

/// A run as its node sees it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) id: String,
    /// Sequence of the next frame.
    pub(crate) next: u64,
}

pub(crate) const SSE: &[(&str, &str)] = &[("content-type", "text/event-stream")];

impl Run {
    /// The next request the node is asked for.
    pub(crate) fn asked(node: &mut Node) -> Self {
        Self::of(&node.tunnel())
    }

    pub(crate) fn of(request: &TunnelRequest) -> Self {
        Self {
            id: request.run_id.clone(),
            next: 1,
        }
    }

    /// Answers it with a head alone, and `client` has that.
    pub(crate) fn answers(mut self, node: &mut Node, client: &mut Client) {
        self.start(node, 204, &[]);
        self.end(node);
        assert_eq!(client.head().expect("an answer").status, 204);
    }

    fn step(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn start(&mut self, node: &mut Node, status: i32, headers: &[(&str, &str)]) {
        let headers: Vec<_> = headers
            .iter()
            .map(|(n, v)| (n.as_bytes(), v.as_bytes()))
            .collect();
        let sequence = self.step();
        let frame = TunnelFrameOut::response_start(&self.id, sequence, status, &headers);
        node.send_bytes(&frame_bytes(&frame));
    }

    pub(crate) fn sse(&mut self, node: &mut Node) {
        self.start(node, 200, SSE);
    }

    pub(crate) fn body(&mut self, node: &mut Node, bytes: &[u8]) {
        let sequence = self.step();
        node.frame(&TunnelFrameOut::body(&self.id, sequence, bytes));
    }

    pub(crate) fn end(&mut self, node: &mut Node) {
        let sequence = self.step();
        node.frame(&TunnelFrameOut::end(&self.id, sequence));
    }

    pub(crate) fn error(&mut self, node: &mut Node, text: &str) {
        let sequence = self.step();
        node.frame(&TunnelFrameOut::error(&self.id, sequence, text));
    }

    /// The stall terminal of the run.
    pub(crate) fn stall(&mut self, node: &mut Node, failure: ExecutionFailure) {
        let sequence = self.step();
        let frame = TunnelFrame {
            error: "provider stopped".into(),
            failure: Some(failure),
            ..TunnelFrame::new(self.id.clone(), FrameKind::Error, sequence)
        };
        node.send_bytes(&envelope(&Message::TunnelFrame(frame)));
    }

    /// The stall terminal of a run of `a1` and `t1`, first frame of it, that says `available` and has
    /// `keys` of an Edge's own making.
    pub(crate) fn stall_with(&self, node: &mut Node, keys: &[(&str, &str)]) {
        let evidence = [
            ("provider_health", "available"),
            ("liveness_classification", "request_stalled"),
            ("adapter", "a1"),
            ("target", "t1"),
        ];
        let pairs = evidence.iter().chain(keys);
        let metadata = pairs.map(|(key, value)| bytes_field(2, &entry(key, value.as_bytes())));
        let metadata = metadata.collect::<Vec<_>>().concat();
        let frame = [
            bytes_field(1, self.id.as_bytes()),
            int_field(3, 4),
            int_field(4, 1),
            bytes_field(
                15,
                &[bytes_field(1, b"response_stalled"), metadata].concat(),
            ),
        ];
        node.send_bytes(&sealed(FRAME, &frame.concat()));
    }

    /// A frame of that kind and sequence, nothing else in it.
    pub(crate) fn bare(&self, kind: FrameKind, sequence: u64) -> Vec<u8> {
        let mut frame = TunnelFrameOut::end(&self.id, sequence);
        frame.kind = kind;
        frame_bytes(&frame)
    }
}

/// What a node says of a stalled run, its fence confirmed.
pub(crate) fn stall(
    health: HealthEvidence,
    adapter: &str,
    target: &str,
    seq: Option<&str>,
) -> ExecutionFailure {
    ExecutionFailure {
        code: FailureCode::ResponseStalled,
        health: HealthPair::Known(health),
        idle_ms: Some(300_000),
        run_id: Some("of the node".into()),
        attempt_id: Some("1".into()),
        fence: Some(Fence::Confirmed),
        adapter: Some(adapter.into()),
        target: Some(target.into()),
        observation: Observation::from_text(seq.map(str::to_owned)),
        dropped_keys: 0,
    }
}

/// A head of an event stream.
pub(crate) fn start_bytes(run: &Run, sequence: u64) -> Vec<u8> {
    let headers: &[(&[u8], &[u8])] = &[(b"content-type", b"text/event-stream")];
    frame_bytes(&TunnelFrameOut::response_start(
        &run.id, sequence, 200, headers,
    ))
}

pub(crate) fn body_bytes(run: &Run, sequence: u64, body: &[u8]) -> Vec<u8> {
    frame_bytes(&TunnelFrameOut::body(&run.id, sequence, body))
}

/// A whole frame with its length prefix.
pub(crate) fn frame_bytes(frame: &TunnelFrameOut<'_>) -> Vec<u8> {
    let mut bytes = vec![0; frame.encoded_len().expect("a legal frame")];
    frame.encode(&mut bytes).expect("measured");
    bytes
}

/// Everything the Edge's shard had for the node before this call. Two round trips: a pong goes
/// before requests that wait, and they go before the next pong.
pub(crate) fn pending(node: &mut Node) -> Vec<Message> {
    try_pending(node).expect("the connection stays open")
}

/// As `pending`; `None`: the Edge has closed the connection.
pub(crate) fn try_pending(node: &mut Node) -> Option<Vec<Message>> {
    static SEQUENCE: AtomicU64 = AtomicU64::new(1_000_000);
    let mut seen = Vec::new();
    let began = Instant::now();
    for _ in 0..2 {
        let seq = SEQUENCE.fetch_add(1, Ordering::Relaxed);
        let _closed = node.try_send_bytes(&envelope(&Message::Ping(Ping { seq })));
        loop {
            assert!(began.elapsed() < DEADLINE, "a ping was not answered");
            match node.try_receive_any()? {
                Message::Pong(pong) if pong.seq == seq => break,
                Message::Ping(ping) => {
                    let pong = envelope(&Message::Pong(Pong { seq: ping.seq }));
                    let _closed = node.try_send_bytes(&pong);
                }
                other => seen.push(other),
            }
        }
    }
    Some(seen)
}

/// The Edge has nothing for the node, and the connection is open.
pub(crate) fn expect_nothing(node: &mut Node) {
    let seen = pending(node);
    assert!(seen.is_empty(), "{seen:?}");
}

/// The next message is the CancelRequest of `run`.
pub(crate) fn expect_cancel(node: &mut Node, run: &Run) {
    match node.receive() {
        Message::CancelRequest(cancel) => assert_eq!(cancel.run_id, run.id),
        other => panic!("expected CancelRequest, got {other:?}"),
    }
}

pub(crate) fn register(node_id: &str) -> Message {
    Message::RegisterRequest(RegisterRequest {
        node_id: node_id.to_owned(),
        ..RegisterRequest::default()
    })
}

pub(crate) fn ready(node_id: &str) -> Message {
    Message::NodeReadyRequest(NodeReadyRequest {
        node_id: node_id.to_owned(),
    })
}

/// The next message is a refresh: its id, and the names of the adapters in it.
pub(crate) fn expect_refresh(node: &mut Node) -> (String, NodeConfig) {
    match node.receive() {
        Message::ConfigRefreshRequest(request) => {
            let config = request.config.expect("a refresh carries the configuration");
            (request.request_id, config)
        }
        other => panic!("expected NodeConfigRefreshRequest, got {other:?}"),
    }
}

/// Answers a refresh.
pub(crate) fn refreshed(node: &mut Node, id: &str, status: RefreshStatus) {
    let message = Message::ConfigRefreshResponse(ConfigRefreshResponse {
        request_id: id.to_owned(),
        status,
        message: "because".to_owned(),
    });
    let asked = id.parse().expect("a number: the envelope had the same one");
    node.send_bytes(&envelope_reply(&message, asked));
}

/// The node registers and is dispatch-ready.
pub(crate) fn register_and_ready(node: &mut Node, name: &str) {
    node.send(&register(name));
    expect_accepted(node);
    node.send(&ready(name));
    expect_ready(node, true);
}

/// The next message accepts a registration.
pub(crate) fn expect_accepted(node: &mut Node) -> RegisterResponse {
    match node.receive() {
        Message::RegisterResponse(answer @ RegisterResponse::Accepted { .. }) => answer,
        other => panic!("expected an accepting RegisterResponse, got {other:?}"),
    }
}

/// The next message refuses a registration; why.
pub(crate) fn expect_rejected(node: &mut Node) -> String {
    match node.receive() {
        Message::RegisterResponse(RegisterResponse::Rejected { reason }) => {
            assert!(!reason.is_empty());
            reason
        }
        other => panic!("expected a rejecting RegisterResponse, got {other:?}"),
    }
}

/// The next message answers a ready.
pub(crate) fn expect_ready(node: &mut Node, is_ready: bool) {
    match node.receive() {
        Message::NodeReadyResponse(answer) => {
            assert_eq!(answer.ready, is_ready, "{answer:?}");
            assert_eq!(answer.reason.is_empty(), is_ready, "{answer:?}");
        }
        other => panic!("expected NodeReadyResponse, got {other:?}"),
    }
}

/// How a connection ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kill {
    /// TLS close_notify, then FIN.
    Goodbye,
    Fin,
    Reset,
}

impl Kill {
    pub(crate) const ALL: [Self; 3] = [Self::Goodbye, Self::Fin, Self::Reset];

    pub(crate) fn node(self, mut node: Node) {
        match self {
            Self::Goodbye => {
                node.stream.conn.send_close_notify();
                node.stream
                    .conn
                    .write_tls(&mut node.stream.sock)
                    .expect("the Edge reads");
                node.stream
                    .sock
                    .shutdown(Shutdown::Write)
                    .expect("connected");
                node.expect_closed(); // a close with unread bytes would be a reset
            }
            Self::Fin => {
                node.stream
                    .sock
                    .shutdown(Shutdown::Write)
                    .expect("connected");
                node.expect_closed();
            }
            Self::Reset => reset_on_close(&node.stream.sock),
        }
    }

    pub(crate) fn client(self, client: Client) {
        match self {
            Self::Goodbye | Self::Fin => {
                client.stream.shutdown(Shutdown::Write).expect("connected");
            }
            Self::Reset => reset_on_close(&client.stream),
        }
    }
}

fn reset_on_close(socket: &TcpStream) {
    let socket = socket2::SockRef::from(socket);
    socket
        .set_linger(Some(Duration::ZERO))
        .expect("a TCP socket");
}

// ── a client's half ──────────────────────────────────────────────────────────────────────────────

/// The whole answer, and whether it came to a proper end.
pub(crate) fn answer(client: &mut Client) -> (Head, Vec<u8>, bool) {
    let head = client.head().expect("an answer");
    let (body, whole) = client.body(&head);
    (head, body, whole)
}

/// The answer is an error of the Edge's making.
pub(crate) fn expect_error(client: &mut Client, status: u16, code: &str, source: &str) -> Head {
    let (head, body, whole) = answer(client);
    let text = String::from_utf8_lossy(&body);
    assert_eq!(head.status, status, "{text}");
    assert!(whole, "{text}");
    let body: serde_json::Value = serde_json::from_slice(&body).expect("an error object");
    assert_eq!(code_of(&body), code, "{body}");
    assert_eq!(head.header("x-iop-error-source"), Some(source));
    assert!(head.header("x-request-id").is_some());
    head
}

/// The reason an error object gives; in Anthropic's shape, which has no codes, by its sentence.
pub(crate) fn code_of(body: &serde_json::Value) -> &str {
    let error = &body["error"];
    let text = error["message"].as_str().unwrap_or_default();
    let by_text = Reason::ALL.iter().find(|reason| reason.text() == text);
    let by_text = by_text.map_or(text, |reason| reason.label());
    error["code"].as_str().unwrap_or(by_text)
}

/// The stream that has begun ends with one error event of ours behind `before`, and not with
/// `[DONE]`.
pub(crate) fn expect_error_event(client: &mut Client, head: &Head, before: &[u8], code: &str) {
    let (body, whole) = client.body(head);
    assert!(whole, "the chunks come to their end");
    let text = String::from_utf8_lossy(&body);
    let tail = body
        .strip_prefix(before)
        .unwrap_or_else(|| panic!("{text}"));
    let tail = String::from_utf8_lossy(tail);
    let event = tail.trim();
    let event = event
        .strip_prefix("event: error\n")
        .unwrap_or(event)
        .strip_prefix("data: ")
        .unwrap_or_else(|| panic!("{text}"));
    let event: serde_json::Value = serde_json::from_str(event).expect("one event, one object");
    assert_eq!(code_of(&event), code, "{text}");
}

/// The answer breaks off without its proper end, after `before`.
pub(crate) fn expect_abort(client: &mut Client, head: &Head, before: &[u8]) {
    let (body, whole) = client.body(head);
    assert!(!whole, "a clean end hides a truncated body");
    assert!(
        before.starts_with(&body),
        "{}",
        String::from_utf8_lossy(&body)
    );
    assert!(
        client.was_reset,
        "a reader until close would take a FIN for the end"
    );
}

// ── bytes no builder writes ──────────────────────────────────────────────────────────────────────

pub(crate) fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push((value & 0x7f) as u8);
    bytes
}

/// Field `number` with a varint.
pub(crate) fn int_field(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

/// Field `number` with bytes, a string or a nested message.
pub(crate) fn bytes_field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [
        &varint(number << 3 | 2)[..],
        &varint(bytes.len() as u64),
        bytes,
    ]
    .concat()
}

/// Bytes of a header or metadata entry.
pub(crate) fn entry(name: &str, value: &[u8]) -> Vec<u8> {
    [bytes_field(1, name.as_bytes()), bytes_field(2, value)].concat()
}

/// A length prefix before anything at all.
pub(crate) fn prefixed(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("a short envelope");
    [&length.to_be_bytes()[..], bytes].concat()
}

/// An envelope of any type name around any payload.
pub(crate) fn sealed(type_name: &str, payload: &[u8]) -> Vec<u8> {
    prefixed(
        &[
            bytes_field(3, type_name.as_bytes()),
            bytes_field(4, payload),
        ]
        .concat(),
    )
}

pub(crate) const FRAME: &str = "iop.ProviderTunnelFrame";
pub(crate) const EVENT: &str = "iop.RunEvent";

/// A RunEvent of that type, with a text.
pub(crate) fn event(run_id: &str, kind: &str) -> Vec<u8> {
    let fields = [(1, run_id), (2, kind), (3, "hi")];
    let fields = fields.map(|(number, text)| bytes_field(number, text.as_bytes()));
    sealed(EVENT, &fields.concat())
}

/// Bytes that look like nothing and differ everywhere.
pub(crate) fn noise(length: usize, mut seed: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        bytes.extend_from_slice(&seed.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
