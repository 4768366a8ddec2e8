//! Clients that are many, slow, hostile, impatient or on the wrong shard, against a real Edge.
//!
//! Lives on: test threads. Bound: one Edge per test; every wait has a deadline.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small numbers of a test, and patterns of bytes"
)]
#[path = "../support/mod.rs"]
mod support;

mod cores;
mod exhaustion;
mod far;
mod hostile;
mod slow;
mod transfer;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iop_proto::domain::Message;
use iop_proto::view::TunnelFrameOut;
use support::{Client, DEADLINE, Edge, Node, Setup, chat, post};

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
