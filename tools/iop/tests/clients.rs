//! Clients that are many, slow, impatient or on the wrong shard, against a real Edge.
mod support;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iop_proto::domain::Message;
use iop_proto::view::TunnelFrameOut;
use support::{CATALOG, Client, DEADLINE, Edge, Node, Setup, chat, post};

const EVENTS: &[(&[u8], &[u8])] = &[(b"content-type", b"text/event-stream")];

/// A small seeded generator: the test is the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// What `key="…"` holds in a request body.
fn field<'a>(body: &'a str, key: &str) -> &'a str {
    let start = body.find(&format!("\"{key}\":\"")).expect("the field") + key.len() + 4;
    let rest = &body[start..];
    &rest[..rest.find('"').expect("its end")]
}

/// Answers every request with its own canary, `pieces` times, until the Edge closes. A request that
/// says `"hold":"yes"` gets its first piece and then nothing until it is cancelled.
fn echo(mut node: Node) {
    let mut held: Vec<(String, u64)> = Vec::new();
    while let Some(message) = node.try_receive() {
        match message {
            Message::TunnelRequest(request) => {
                let body = String::from_utf8(request.body.to_vec()).expect("JSON");
                assert_eq!(field(&body, "model"), request.target);
                let canary = format!("data: {}\n\n", field(&body, "canary"));
                let pieces: u64 = field(&body, "pieces").parse().expect("a number");
                let run = &request.run_id;
                node.frame(&TunnelFrameOut::response_start(run, 1, 200, EVENTS));
                let hold = body.contains("\"hold\":\"yes\"");
                let pieces = if hold { 1 } else { pieces };
                for piece in 0..pieces {
                    node.frame(&TunnelFrameOut::body(run, 2 + piece, canary.as_bytes()));
                }
                if hold {
                    held.push((request.run_id.clone(), 2 + pieces));
                } else {
                    node.frame(&TunnelFrameOut::end(run, 2 + pieces));
                }
            }
            Message::CancelRequest(cancel) => {
                if let Some(at) = held.iter().position(|(run, _)| *run == cancel.run_id) {
                    let (run, sequence) = held.swap_remove(at);
                    node.frame(&TunnelFrameOut::error(&run, sequence, "cancelled"));
                }
            }
            Message::GoAway(_) => {} // the Edge drains
            other => panic!("unexpected {other:?}"),
        }
    }
}

const TWO_NODES: &str = "shards: 2
nodes:
  - id: n1
    adapters:
      - name: a1
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
    providers:
      - id: p1
        adapter: a1
        target: t1
        capacity: 3
  - id: n2
    adapters:
      - name: a1
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
    providers:
      - id: p2
        adapter: a1
        target: t2
        capacity: 3
models:
  - name: m1
    providers: [p1]
  - name: m2
    providers: [p2]
  - name: both
    providers: [p1, p2]
limits:
  clients_max: 256
";

fn request(model: &str, canary: &str, pieces: u64, hold: bool, padding: usize) -> String {
    let hold = if hold { ",\"hold\":\"yes\"" } else { "" };
    let padding = "x".repeat(padding);
    post(
        "/v1/chat/completions",
        &format!(
            "{{\"canary\":\"{canary}\",\"pieces\":\"{pieces}\"{hold},\"model\":\"{model}\",\"padding\":\"{padding}\"}}"
        ),
    )
}

/// One client's life: keep-alive requests to models of either node, some left in the middle.
fn wander(edge: &Edge, seed: u64, rounds: u64) {
    let mut dice = Dice(seed * 7919 + 1);
    let mut client = Client::connect(edge);
    for round in 0..rounds {
        let canary = format!("canary-{seed}-{round}");
        let model = ["m1", "m2", "both"][dice.roll(3) as usize];
        let hold = dice.roll(8) == 0;
        let pieces = 1 + dice.roll(20);
        let padding = [0, 0, 100, 40_000][dice.roll(4) as usize];
        client.send(&request(model, &canary, pieces, hold, padding));
        let leaves_at_once = dice.roll(10) == 0;
        if leaves_at_once {
            client = Client::connect(edge); // dropping the old one closes it
            continue;
        }
        let head = client.head().expect("an answer");
        assert_eq!(head.status, 200);
        let line = format!("data: {canary}\n\n");
        if hold {
            assert_eq!(client.at_least(line.len()), line.as_bytes());
            client = Client::connect(edge);
            continue;
        }
        let (body, whole) = client.body(&head);
        assert!(whole);
        assert_eq!(
            String::from_utf8(body).expect("text"),
            line.repeat(pieces as usize)
        );
    }
}

/// Proves [D-33], [P-62].
#[test]
fn no_client_ever_gets_anothers_bytes_whatever_moves_and_leaves() {
    let setup = Setup {
        catalog: TWO_NODES.to_owned(),
        nodes: vec!["n1", "n2"],
        ..Setup::default()
    };
    let mut edge = Edge::start(&setup);
    let rounds = std::env::var("IOP_TEST_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(150);
    let nodes = ["n1", "n2"].map(|name| Node::ready(&edge, name));
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        for node in nodes {
            scope.spawn(|| echo(node));
        }
        std::thread::scope(|clients| {
            for seed in 1..=12 {
                let edge = &edge;
                clients.spawn(move || wander(edge, seed, rounds));
            }
        });
        let metrics = edge.wait_idle();
        assert!(
            metrics.get("iop_edge_client_transfers_total") > 100.0,
            "{}",
            metrics.0
        );
        let granted = metrics.sum("iop_edge_leases_granted_total");
        assert_eq!(granted, metrics.sum("iop_edge_leases_returned_total"));
        edge.terminate(); // ends the nodes' connections, and with them their threads
        assert!(edge.wait_exit().success());
    });
}

/// A catalog with small pools and short waits.
fn slow_catalog() -> String {
    format!(
        "{CATALOG}limits:\n  clients_max: 256\n  output_pool_bytes: 64 MiB\n  body_pool_bytes: 64 MiB\n\
         timeouts:\n  write_stall_ms: 1500\n"
    )
}

fn resident_bytes(edge: &Edge) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", edge.pid())).expect("it runs");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("VmRSS");
    line.split_whitespace()
        .nth(1)
        .and_then(|kib| kib.parse::<u64>().ok())
        .expect("KiB")
        * 1024
}

/// Proves [D-06], [P-63], [P-68].
#[test]
fn clients_that_never_read_cost_themselves_alone() {
    const STUCK: usize = 40;
    let mut edge = Edge::start(&Setup::with(&slow_catalog()));
    let mut node = Node::ready(&edge, "n1");
    let mut stuck: Vec<Client> = (0..STUCK).map(|_| Client::connect(&edge)).collect();
    for client in &mut stuck {
        client.send(&chat("m1", true));
    }
    let runs: Vec<String> = (0..STUCK).map(|_| node.tunnel().run_id).collect();
    let mut reader = Client::connect(&edge);
    reader.send(&chat("m1", true));
    let live = node.tunnel().run_id;
    let before = resident_bytes(&edge);
    let mut sequences = vec![1_u64; STUCK];
    for run in runs.iter().chain([&live]) {
        node.frame(&TunnelFrameOut::response_start(run, 1, 200, EVENTS));
    }
    let head = reader.head().expect("an answer");
    // 8 MiB to each that reads nothing, in 64 KiB frames, between the frames of the one that reads.
    let block = vec![b'x'; 64 * 1024];
    let token = b"data: token\n\n";
    let mut live_sequence = 1;
    let mut slowest = Duration::ZERO;
    for _ in 0..128 {
        for (run, sequence) in runs.iter().zip(&mut sequences) {
            *sequence += 1;
            node.frame(&TunnelFrameOut::body(run, *sequence, &block));
        }
        live_sequence += 1;
        let sent = Instant::now();
        node.frame(&TunnelFrameOut::body(&live, live_sequence, token));
        assert_eq!(reader.at_least(token.len()), token);
        slowest = slowest.max(sent.elapsed());
    }
    assert!(slowest < Duration::from_secs(1), "a token took {slowest:?}");
    let grown = resident_bytes(&edge).saturating_sub(before);
    assert!(grown < 160 << 20, "the Edge grew by {} MiB", grown >> 20);
    // Each offender ends by itself; the reader goes on.
    edge.wait_metrics("offenders to be cut", |seen| {
        seen.reason("client_too_slow") + seen.reason("output_pool_full") >= STUCK as f64
    });
    let mut cancelled = 0;
    while cancelled < STUCK {
        if let Message::CancelRequest(cancel) = node.receive() {
            let at = runs
                .iter()
                .position(|run| *run == cancel.run_id)
                .expect("one of the offenders");
            node.frame(&TunnelFrameOut::error(
                &runs[at],
                sequences[at] + 1,
                "cancelled",
            ));
            cancelled += 1;
        }
    }
    node.frame(&TunnelFrameOut::body(&live, live_sequence + 1, token));
    node.frame(&TunnelFrameOut::end(&live, live_sequence + 2));
    let (rest, whole) = reader.body(&head);
    assert!(whole && rest == token);
    drop((stuck, reader));
    edge.wait_idle();
    edge.assert_alive();
}

/// Proves [P-23].
#[test]
fn a_large_answer_reaches_a_client_that_takes_its_time() {
    const BYTES: usize = 48 << 20;
    let mut edge = Edge::start(&Setup::with(CATALOG));
    let mut node = Node::ready(&edge, "n1");
    let mut client = Client::connect(&edge);
    client.send(&chat("m1", false));
    let run = node.tunnel().run_id;
    let length = BYTES.to_string();
    let headers: &[(&[u8], &[u8])] = &[
        (b"content-type", b"application/json"),
        (b"content-length", length.as_bytes()),
    ];
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        scope.spawn(|| {
            node.frame(&TunnelFrameOut::response_start(&run, 1, 200, headers));
            // Frames longer than any receive buffer: each is cut through.
            let block: Vec<u8> = (0..1 << 20).map(|n| (n / 7) as u8).collect();
            for piece in 0..(BYTES >> 20) as u64 {
                node.frame(&TunnelFrameOut::body(&run, 2 + piece, &block));
            }
            node.frame(&TunnelFrameOut::end(&run, 2 + (BYTES >> 20) as u64));
            node.expect_closed();
        });
        let head = client.head().expect("an answer");
        assert_eq!(head.header("content-length"), Some(length.as_str()));
        let (body, whole) = client.body(&head);
        assert!(whole && body.len() == BYTES);
        let right = body
            .iter()
            .enumerate()
            .all(|(at, &byte)| byte == ((at % (1 << 20)) / 7) as u8);
        assert!(right, "bytes changed on the way");
        let metrics = edge.wait_metrics("cut-through", |seen| {
            seen.get("iop_edge_envelopes_received_total{path=\"cut_through\"}") >= 48.0
        });
        assert_eq!(metrics.get("iop_edge_stream_violations_total"), 0.0);
        drop(client);
        edge.wait_idle();
        edge.terminate();
        assert!(edge.wait_exit().success());
    });
}

#[test]
fn pipelined_requests_are_answered_one_by_one_in_order() {
    let edge = Edge::start(&Setup::default());
    let node = Node::ready(&edge, "n1");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        scope.spawn(|| {
            echo(node);
            assert!(done.load(Ordering::Relaxed));
        });
        let mut client = Client::connect(&edge);
        let all: String = (0..5)
            .map(|n| request("m1", &format!("c{n}"), 2, false, 10))
            .collect();
        client.send(&all);
        for n in 0..5 {
            let head = client.head().expect("an answer");
            let (body, whole) = client.body(&head);
            assert!(whole);
            assert_eq!(body, format!("data: c{n}\n\n").repeat(2).into_bytes());
        }
        done.store(true, Ordering::Relaxed);
        drop(client);
        edge.wait_idle();
        edge.terminate();
    });
}

/// A request that comes byte by byte, and one whose client leaves half-way, at every phase.
#[test]
fn a_client_may_leave_at_any_byte() {
    let mut edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let descriptors = edge.open_descriptors();
    let whole = chat("m1", true);
    for cut in (1..whole.len()).step_by(9) {
        let mut client = Client::connect(&edge);
        client.send(&whole[..cut]);
    }
    let mut client = Client::connect(&edge);
    for byte in whole.as_bytes() {
        client.stream.write_all(&[*byte]).expect("the Edge reads");
    }
    let run = node.tunnel().run_id; // of the whole request alone
    node.frame(&TunnelFrameOut::response_start(&run, 1, 200, EVENTS));
    node.frame(&TunnelFrameOut::body(&run, 2, b"data: x\n\n"));
    assert_eq!(client.head().expect("an answer").status, 200);
    assert_eq!(client.at_least(9), b"data: x\n\n");
    let left = Instant::now();
    drop(client);
    match node.receive() {
        Message::CancelRequest(cancel) => assert_eq!(cancel.run_id, run),
        other => panic!("expected CancelRequest, got {other:?}"),
    }
    assert!(
        left.elapsed() < Duration::from_millis(250),
        "after {:?}",
        left.elapsed()
    );
    assert_eq!(
        edge.metrics().get("iop_edge_leases_held"),
        1.0,
        "held until the terminal"
    );
    node.frame(&TunnelFrameOut::error(&run, 3, "cancelled"));
    edge.wait_idle();
    let began = Instant::now();
    while edge.open_descriptors() > descriptors {
        assert!(began.elapsed() < DEADLINE, "descriptors leak");
    }
    edge.assert_alive();
}

/// An idle connection may end by either side; what comes instead of HTTP is answered and closed.
#[test]
fn what_is_not_http_is_answered_and_closed() {
    let mut edge = Edge::start(&Setup::default());
    for (bytes, status) in [
        (&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], "400"), // a TLS hello
        (b"GET / HTTP/1.1\nhost: x\n\n", "400"),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", "505"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", "501"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", "413"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "411"),
    ] {
        let mut client = Client::connect(&edge);
        client.stream.write_all(bytes).expect("the Edge reads");
        let mut answer = Vec::new();
        let closed = client.stream.read_to_end(&mut answer);
        assert!(closed.is_ok(), "{}: {closed:?} after {}", bytes.escape_ascii(), answer.escape_ascii());
        let answer = String::from_utf8_lossy(&answer);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{}: {answer}", bytes.escape_ascii());
        assert!(answer.contains("connection: close"), "{answer}");
    }
    let mut client = Client::connect(&edge);
    let (head, _) = client.ask("GET /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    let (head, _) = client.ask("GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    drop(client);
    edge.wait_idle();
    edge.assert_alive();
}

/// More slices than one send takes, to a client whose socket takes less than that: what a direct send
/// left over goes before what came behind it.
/// Proves [D-34].
#[test]
fn a_burst_of_small_frames_to_a_full_socket_keeps_its_order() {
    let edge = Edge::start(&Setup::with(CATALOG));
    let mut node = Node::ready(&edge, "n1");
    for round in 1..=40 {
        fill_a_socket(&edge, &mut node, round);
        let seen = edge.wait_idle();
        if seen.get("iop_edge_sends_total{path=\"short\"}") >= 3.0 {
            return;
        }
    }
    panic!("no send fell short: the test shows nothing");
}

/// Bursts of more slices than a send takes, to a client that reads them only at the end.
fn fill_a_socket(edge: &Edge, node: &mut Node, round: u64) {
    const BODY: usize = 400;
    let burst = 65 + round * 7 % 60; // where in a burst the socket is full differs by round
    let mut client = Client::connect(edge);
    client.send(&chat("m1", true));
    let run = node.tunnel().run_id;
    node.frame(&TunnelFrameOut::response_start(&run, 1, 200, EVENTS));
    node.frame(&TunnelFrameOut::body(&run, 2, b"first"));
    let head = client.head().expect("an answer");
    assert_eq!(client.at_least(5), b"first"); // nothing is pending: from here on sends are direct
    let (mut sent, mut expected) = (0, Vec::new());
    let mut bytes = vec![0; burst as usize * (BODY + 256)];
    let before = edge.metrics().get("iop_edge_frames_total{kind=\"body\"}");
    while expected.len() < 9 << 20 {
        let mut at = 0;
        for _ in 0..burst {
            let body = format!("{sent:->BODY$}");
            let frame = TunnelFrameOut::body(&run, 3 + sent, body.as_bytes());
            at += frame.encode(&mut bytes[at..]).expect("room");
            expected.extend_from_slice(body.as_bytes());
            sent += 1;
        }
        node.send_bytes(&bytes[..at]);
        edge.wait_metrics("the burst", |seen| {
            seen.get("iop_edge_frames_total{kind=\"body\"}") >= before + sent as f64
        });
    }
    node.frame(&TunnelFrameOut::end(&run, 3 + sent));
    let (body, whole) = client.body(&head);
    assert!(whole && body.len() == expected.len());
    let wrong = body
        .chunks(BODY)
        .zip(expected.chunks(BODY))
        .position(|(got, sent)| got != sent);
    assert_eq!(wrong, None, "frames changed places");
}
