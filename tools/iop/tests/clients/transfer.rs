//! A client connection on its way to another shard: whatever its client, its node or control does
//! meanwhile. Each step of a move waits a few random microseconds, so that the threads race.
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iop_proto::view::TunnelFrameOut;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::support::{Client, DEADLINE, Edge, Metrics, Node, Setup, client_tls};
use crate::{Dice, EVENTS, TWO_NODES, echo, field, request};

const THREADS: u64 = 8;

fn setup(delay_us: &'static str, listeners: &'static str) -> Setup {
    Setup {
        catalog: TWO_NODES.replace("capacity: 3", "capacity: 64"),
        nodes: vec!["n1", "n2"],
        listeners,
        environment: vec![("IOP_TEST_TRANSFER_DELAY_US", delay_us)],
        ..Setup::default()
    }
}

/// Rounds of all threads together.
fn rounds(default: u64) -> u64 {
    std::env::var("IOP_TEST_TRANSFERS").map_or(default, |n| n.parse().expect("a number"))
}

fn transfers(metrics: &Metrics) -> f64 {
    metrics.get("iop_edge_client_transfers_total")
}

/// Lets a random part of the time pass that a move takes.
fn linger(dice: &mut Dice) {
    let until = Instant::now() + Duration::from_micros(dice.roll(400));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// Runs `client` on every thread against two echoing nodes on two shards, then sees the Edge at rest.
fn race(edge: &mut Edge, client: impl Fn(&Edge, u64) + Sync) -> Metrics {
    let nodes = ["n1", "n2"].map(|name| Node::ready(edge, name));
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        for node in nodes {
            scope.spawn(|| echo(node));
        }
        std::thread::scope(|clients| {
            for seed in 1..=THREADS {
                let (edge, client) = (&*edge, &client);
                clients.spawn(move || client(edge, seed));
            }
        });
        let metrics = edge.wait_idle();
        let granted = metrics.sum("iop_edge_leases_granted_total");
        assert_eq!(granted, metrics.sum("iop_edge_leases_returned_total"));
        assert_eq!(metrics.get("iop_edge_stream_violations_total"), 0.0);
        edge.terminate();
        assert!(edge.wait_exit().success());
        metrics
    })
}

fn expect(client: &mut Client, canary: &str, pieces: usize) {
    let head = client.head().expect("an answer");
    assert_eq!(head.status, 200);
    let (body, whole) = client.body(&head);
    let expected = format!("data: {canary}\n\n").repeat(pieces);
    assert!(whole && body == expected.as_bytes(), "{canary}");
}

/// One client that asks either node in turn, so that nearly every request moves it, and does one of
/// the things a client can do while it moves.
fn misbehave(edge: &Edge, seed: u64, rounds: u64) {
    let mut dice = Dice(seed * 104_729 + 7);
    let mut client = Client::connect(edge);
    for round in 0..rounds {
        let model = ["m1", "m2"][(round % 2) as usize];
        let other = ["m2", "m1"][(round % 2) as usize];
        let canary = format!("move-{seed}-{round}");
        let next = format!("next-{seed}-{round}");
        let padding = [0, 100, 20_000][dice.roll(3) as usize];
        let first = request(model, &canary, 2, false, padding);
        let second = request(other, &next, 3, false, [10, 30_000][dice.roll(2) as usize]);
        match dice.roll(7) {
            0 | 1 => {
                client.send(&first);
                expect(&mut client, &canary, 2);
            }
            // It leaves, at once or in the middle.
            2 => {
                client.send(&first);
                linger(&mut dice);
                client = Client::connect(edge);
            }
            // It half-closes, which is leaving; its answer may have been on its way.
            3 => {
                client.send(&first);
                linger(&mut dice);
                client.stream.shutdown(Shutdown::Write).expect("open");
                let mut rest = Vec::new();
                let _reset = client.stream.read_to_end(&mut rest);
                let rest = String::from_utf8(rest).expect("text");
                let lines = rest.lines().filter(|line| line.starts_with("data: "));
                for line in lines {
                    assert!(format!("data: {canary}").starts_with(line), "{line}");
                }
                client = Client::connect(edge);
            }
            // It pipelines in the same segment.
            4 => {
                client.send(&(first + &second));
                expect(&mut client, &canary, 2);
                expect(&mut client, &next, 3);
            }
            // It pipelines while it moves, cut anywhere.
            5 => {
                client.send(&first);
                linger(&mut dice);
                let cut = 1 + dice.roll(second.len() as u64 - 1) as usize;
                client.send(&second[..cut]);
                linger(&mut dice);
                client.send(&second[cut..]);
                expect(&mut client, &canary, 2);
                expect(&mut client, &next, 3);
            }
            // It resets.
            _ => {
                client.send(&(first + &second));
                linger(&mut dice);
                let socket = socket2::SockRef::from(&client.stream);
                socket.set_linger(Some(Duration::ZERO)).expect("a socket");
                client = Client::connect(edge);
            }
        }
    }
}

/// Proves [D-32], [D-33], [D-46], [P-62].
#[test]
fn a_client_may_do_anything_at_every_step_of_its_move() {
    let rounds = rounds(10_000);
    let mut edge = Edge::start(&setup("120", ""));
    let metrics = race(&mut edge, |edge, seed| {
        misbehave(edge, seed, rounds / THREADS)
    });
    assert!(
        transfers(&metrics) > rounds as f64 / 4.0,
        "{} moves in {rounds} rounds",
        transfers(&metrics)
    );
}

// ── TLS ───────────────────────────────────────────────────────────────────────────────────────────

const HTTPS: &str = "  clients_tls:\n    certificate: pki/edge-1.crt\n    key: pki/edge-1.key\n";

/// A client over TLS.
struct Secure {
    stream: StreamOwned<ClientConnection, TcpStream>,
    buffer: Vec<u8>,
}

impl Secure {
    fn connect(edge: &Edge, config: &Arc<ClientConfig>) -> Self {
        let socket = TcpStream::connect(edge.clients).expect("the Edge listens for clients");
        let deadline = Some(DEADLINE);
        socket.set_read_timeout(deadline).expect("a TCP socket");
        socket.set_nodelay(true).expect("a TCP socket");
        let server = ServerName::try_from("edge").expect("a name");
        let tls = ClientConnection::new(Arc::clone(config), server).expect("TLS");
        let stream = StreamOwned::new(tls, socket);
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).expect("it reads");
        self.stream.flush().expect("it reads");
    }

    fn fill(&mut self) -> usize {
        let mut bytes = [0; 16 * 1024];
        let length = self
            .stream
            .read(&mut bytes)
            .expect("an orderly end, or bytes");
        self.buffer.extend_from_slice(&bytes[..length]);
        length
    }

    /// One whole chunked answer, which holds `data: <canary>` so many times.
    fn expect(&mut self, canary: &str, pieces: usize) {
        let end = loop {
            let found = self
                .buffer
                .windows(7)
                .position(|part| part == b"\r\n0\r\n\r\n");
            if let Some(at) = found {
                break at + 7;
            }
            assert!(self.fill() > 0, "the answer broke off");
        };
        let answer = String::from_utf8(self.buffer.drain(..end).collect()).expect("text");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let line = format!("data: {canary}\n");
        assert_eq!(answer.matches(&line).count(), pieces, "{answer}");
        assert_eq!(answer.matches("data: ").count(), pieces, "{answer}");
    }
}

fn move_securely(edge: &Edge, seed: u64, rounds: u64) {
    let mut dice = Dice(seed * 15_485_863 + 3);
    let config = client_tls();
    let mut client = Secure::connect(edge, &config);
    for round in 0..rounds {
        let model = ["m1", "m2"][(round % 2) as usize];
        let other = ["m2", "m1"][(round % 2) as usize];
        let canary = format!("tls-{seed}-{round}");
        let next = format!("next-{seed}-{round}");
        let first = request(model, &canary, 2, false, [0, 40_000][dice.roll(2) as usize]);
        let second = request(other, &next, 1, false, 5_000);
        match dice.roll(8) {
            0..4 => {
                client.send(&first);
                client.expect(&canary, 2);
            }
            // Behind the request: a record that is cut by the move.
            4 | 5 => {
                client.send(&first);
                linger(&mut dice);
                client.send(&second);
                client.expect(&canary, 2);
                client.expect(&next, 1);
            }
            // A key update while it moves: the answer to it is sealed with the old keys.
            6 => {
                client.send(&first);
                linger(&mut dice);
                client.stream.conn.refresh_traffic_keys().expect("TLS 1.3");
                client.stream.flush().expect("it reads");
                client.expect(&canary, 2);
            }
            _ => {
                client.send(&first);
                linger(&mut dice);
                client = Secure::connect(edge, &config);
            }
        }
    }
    // The Edge's last word on a connection that ends is a close_notify, after a move as before.
    let last =
        request("m1", "last", 1, false, 0).replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
    client.send(&last);
    client.expect("last", 1);
    assert_eq!(client.fill(), 0);
}

/// Proves [D-33].
#[test]
fn a_client_over_tls_moves_with_its_keys_and_its_cut_records() {
    let rounds = rounds(4_000);
    let mut edge = Edge::start(&setup("120", HTTPS));
    let metrics = race(&mut edge, |edge, seed| {
        move_securely(edge, seed, rounds / THREADS)
    });
    assert!(
        transfers(&metrics) > rounds as f64 / 4.0,
        "{} moves in {rounds} rounds",
        transfers(&metrics)
    );
}

// ── the node is lost meanwhile ────────────────────────────────────────────────────────────────────

/// Answers a request of `request` as `echo` does; what canary it had.
fn answer(node: &mut Node) -> String {
    let tunnel = node.tunnel();
    let body = String::from_utf8(tunnel.body.to_vec()).expect("JSON");
    let canary = field(&body, "canary").to_owned();
    let pieces: u64 = field(&body, "pieces").parse().expect("a number");
    let line = format!("data: {canary}\n\n");
    let run = &tunnel.run_id;
    node.frame(&TunnelFrameOut::response_start(run, 1, 200, EVENTS));
    for piece in 0..pieces {
        node.frame(&TunnelFrameOut::body(run, 2 + piece, line.as_bytes()));
    }
    node.frame(&TunnelFrameOut::end(run, 2 + pieces));
    canary
}

/// One request whose node is lost: served by the next generation, or refused because it was sent.
fn ask_the_lost(client: &mut Client, round: u32) -> bool {
    let head = client.head().expect("an answer");
    let (body, whole) = client.body(&head);
    assert!(whole);
    let served = head.status == 200;
    if served {
        assert_eq!(body, format!("data: lost-{round}\n\n").repeat(2).as_bytes());
    } else {
        assert!(head.status >= 500, "{head:?}");
    }
    client.send(&request("m2", &format!("end-{round}"), 1, false, 0));
    expect(client, &format!("end-{round}"), 1);
    served
}

/// A request whose node is lost while its client moves to it is never sent to the dead generation:
/// it waits again and the next generation serves it.
/// Proves [D-32], [S-12].
#[test]
fn a_node_lost_while_its_client_moves_is_replaced_under_it() {
    const WANTED: f64 = 3.0;
    let not_sent = |seen: &Metrics| seen.get("iop_edge_queue_entries_total{why=\"not_sent\"}");
    let edge = Edge::start(&setup("20000", ""));
    let stays = Node::ready(&edge, "n1");
    let mut silent = Node::ready(&edge, "n2");
    let (mut served, began) = (0.0, Instant::now());
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        scope.spawn(|| echo(stays));
        let mut client = Client::connect(&edge);
        for round in 0.. {
            let home = format!("home-{round}");
            client.send(&request("m1", &home, 1, false, 0));
            expect(&mut client, &home, 1);
            let granted = edge.metrics().sum("iop_edge_leases_granted_total");
            client.send(&request("m2", &format!("lost-{round}"), 2, false, 0));
            edge.wait_metrics("the grant", |seen| {
                seen.sum("iop_edge_leases_granted_total") > granted
            });
            drop(silent); // the client is on its way, or has just arrived
            silent = Node::ready(&edge, "n2");
            let asking = scope.spawn(move || {
                let served = ask_the_lost(&mut client, round);
                (client, served)
            });
            while !answer(&mut silent).starts_with("end-") {}
            let answered = asking.join().expect("the client got an answer");
            client = answered.0;
            served += f64::from(u8::from(answered.1));
            if not_sent(&edge.metrics()) >= WANTED {
                break;
            }
            assert!(began.elapsed() < 3 * DEADLINE, "none was lost on its way");
        }
        assert!(served >= WANTED, "{served} served");
        drop(client);
        edge.wait_idle();
        edge.terminate();
    });
}

// ── control ends the run meanwhile ────────────────────────────────────────────────────────────────

/// A run that takes too long to begin is ended by control while its client is on its way: the cancel
/// is there first and leaves a dead slot, where the client is told why and nothing is sent.
/// Proves [D-32], [S-64].
#[test]
fn a_run_ended_while_its_client_moves_is_never_sent_and_its_client_is_told() {
    const ROUNDS: u32 = 4;
    let mut setup = setup("200000", "");
    setup.catalog += "timeouts:\n  dispatch_ms: 20\n";
    let edge = Edge::start(&setup);
    let stays = Node::ready(&edge, "n1");
    let mut other = Node::ready(&edge, "n2");
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        scope.spawn(|| echo(stays));
        let mut ended = 0;
        for round in 0..ROUNDS {
            let mut client = Client::connect(&edge);
            let home = format!("home-{round}");
            loop {
                // Its first request may have to move as well, and be ended on that way.
                client.send(&request("m1", &home, 1, false, 0));
                let head = client.head().expect("an answer");
                let (body, whole) = client.body(&head);
                assert!(whole);
                if head.status == 200 {
                    assert_eq!(body, format!("data: {home}\n\n").as_bytes());
                    break;
                }
                assert_eq!(head.status, 503);
            }
            client.send(&request("m2", &format!("lost-{round}"), 1, false, 0));
            let head = client.head().expect("an answer");
            assert_eq!(head.status, 503);
            let (body, whole) = client.body(&head);
            let text = String::from_utf8(body).expect("text");
            assert!(whole && text.contains("dispatch_timeout"), "{text}");
            ended += 1;
            // It is where its node is now: the same connection is served at once.
            client.send(&request("m2", &format!("end-{round}"), 1, false, 0));
            assert_eq!(answer(&mut other), format!("end-{round}"));
            expect(&mut client, &format!("end-{round}"), 1);
        }
        let seen = edge.wait_idle();
        assert!(seen.reason("dispatch_timeout") >= f64::from(ended));
        assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
        edge.terminate();
    });
}
