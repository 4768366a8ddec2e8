//! Clients that read slowly or never, and large bodies next to small ones.
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use iop_proto::domain::{Message, Ping};
use iop_proto::view::TunnelFrameOut;

use crate::EVENTS;
use crate::support::{CATALOG, Client, Edge, Node, Setup, chat, envelope, post, shards};

/// A catalog with small pools and short waits.
fn slow_catalog() -> String {
    format!(
        "{CATALOG}limits:\n  clients_max: 1200\n  output_pool_bytes: 64 MiB\n\
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

/// Lets this process, and what it starts, have so many descriptors as the tests with most clients need.
pub(crate) fn raise_descriptors() {
    let status = std::process::Command::new("prlimit")
        .args(["--pid", &std::process::id().to_string(), "--nofile=8192:"])
        .status();
    assert!(
        status.expect("prlimit runs").success(),
        "a hard limit of at least 8192 is needed"
    );
}

/// Proves [D-06], [P-63], [P-68].
#[test]
fn a_thousand_clients_that_never_read_leave_a_reader_its_pace() {
    const STUCK: usize = 1_000;
    const ROUNDS: u64 = 4;
    raise_descriptors();
    let catalog = slow_catalog().replace("capacity: 64", "capacity: 1100");
    let mut edge = Edge::start(&Setup::with(&catalog));
    let mut node = Node::ready(&edge, "n1");
    let mut reader = Client::connect(&edge);
    reader.send(&chat("m1", true));
    let live = node.tunnel().run_id;
    node.frame(&TunnelFrameOut::response_start(&live, 1, 200, EVENTS));
    let head = reader.head().expect("an answer");
    let mut stuck: Vec<Client> = (0..STUCK).map(|_| Client::narrow(&edge)).collect();
    let mut runs = Vec::with_capacity(STUCK);
    for client in &mut stuck {
        client.send(&chat("m1", true));
        runs.push(node.tunnel().run_id);
    }
    let before = resident_bytes(&edge);
    for run in &runs {
        node.frame(&TunnelFrameOut::response_start(run, 1, 200, EVENTS));
    }
    let block = vec![b'x'; 64 * 1024];
    let token = b"data: token\n\n";
    let mut slowest = Duration::ZERO;
    let mut tokens = 1;
    for round in 0..ROUNDS {
        for (at, run) in runs.iter().enumerate() {
            node.frame(&TunnelFrameOut::body(run, 2 + round, &block));
            if at % 50 == 0 {
                tokens += 1;
                let sent = Instant::now();
                node.frame(&TunnelFrameOut::body(&live, tokens, token));
                assert_eq!(reader.at_least(token.len()), token);
                slowest = slowest.max(sent.elapsed());
            }
        }
    }
    assert!(slowest < Duration::from_secs(1), "a token took {slowest:?}");
    let grown = resident_bytes(&edge).saturating_sub(before);
    assert!(grown < 160 << 20, "the Edge grew by {} MiB", grown >> 20);
    edge.wait_metrics("offenders to be cut", |seen| {
        seen.reason("client_too_slow") + seen.reason("output_pool_full") >= STUCK as f64
    });
    for _ in 0..STUCK {
        match node.receive() {
            Message::CancelRequest(cancel) => {
                let place = runs.iter().position(|run| *run == cancel.run_id);
                let run = runs.swap_remove(place.expect("an offender, once"));
                node.frame(&TunnelFrameOut::error(&run, 2 + ROUNDS, "cancelled"));
            }
            other => panic!("expected CancelRequest, got {other:?}"),
        }
    }
    node.frame(&TunnelFrameOut::end(&live, tokens + 1));
    let (rest, whole) = reader.body(&head);
    assert!(whole && rest.is_empty());
    drop((stuck, reader));
    edge.wait_idle();
    edge.assert_alive();
}

/// Proves [P-23], [D-06].
#[test]
fn a_client_at_ten_megabytes_a_second_gets_its_64_mebibytes() {
    const BYTES: usize = 64 << 20;
    const RATE: f64 = 10e6;
    let pool = 128 * shards();
    let catalog = format!("{CATALOG}limits:\n  output_pool_bytes: {pool} MiB\n");
    let edge = Edge::start(&Setup::with(&catalog));
    let mut node = Node::ready(&edge, "n1");
    let mut client = Client::connect(&edge);
    client.send(&chat("m1", false));
    let run = node.tunnel().run_id;
    let length = BYTES.to_string();
    let headers: &[(&[u8], &[u8])] = &[(b"content-length", length.as_bytes())];
    let block: Vec<u8> = (0..1 << 20).map(|n| (n / 5) as u8).collect();
    node.frame(&TunnelFrameOut::response_start(&run, 1, 200, headers));
    for piece in 0..64 {
        node.frame(&TunnelFrameOut::body(&run, 2 + piece, &block));
    }
    node.frame(&TunnelFrameOut::end(&run, 66)); // the node was not held up
    let head = client.head().expect("an answer");
    assert_eq!(head.header("content-length"), Some(length.as_str()));
    let began = Instant::now();
    let mut got = 0;
    let mut bytes = vec![0; 256 * 1024];
    // The first bytes may have come with the head.
    let (first, _) = client.read_some();
    let mut body = first;
    while body.len() < BYTES {
        let length = client.stream.read(&mut bytes).expect("the answer goes on");
        assert!(length > 0, "cut after {} bytes", body.len());
        body.extend_from_slice(&bytes[..length]);
        got += length;
        let due = Duration::from_secs_f64(got as f64 / RATE);
        // The rate of a slow link; nothing is waited for here.
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }
    assert_eq!(body.len(), BYTES);
    assert!(
        body.chunks(1 << 20).all(|part| part == block),
        "bytes changed on the way"
    );
    drop(client);
    edge.wait_idle();
}

/// Proves [P-70].
#[test]
fn a_32_mebibyte_request_holds_up_nothing_but_what_is_behind_it() {
    const BYTES: usize = 31 << 20;
    let edge = Edge::start(&Setup::with(CATALOG));
    let mut node = Node::ready(&edge, "n1");
    let mut live = Client::connect(&edge);
    live.send(&chat("m1", true));
    let live_run = node.tunnel().run_id;
    node.frame(&TunnelFrameOut::response_start(&live_run, 1, 200, EVENTS));
    node.frame(&TunnelFrameOut::body(&live_run, 2, b"first"));
    assert_eq!(live.head().expect("an answer").status, 200);
    assert_eq!(live.at_least(5), b"first");
    // While the large one is still being read, a small one comes and goes.
    let padding = "x".repeat(BYTES);
    let large = post(
        "/v1/completions",
        &format!("{{\"model\":\"m1\",\"prompt\":\"{padding}\"}}"),
    );
    let (most, last) = large.split_at(large.len() - 1);
    let mut uploading = Client::connect(&edge);
    uploading.send(most);
    let mut small = Client::connect(&edge);
    small.send(&chat("m1", false));
    let small_run = node.tunnel();
    assert!(small_run.body.len() < 200);
    node.frame(&TunnelFrameOut::response_start(
        &small_run.run_id,
        1,
        204,
        &[],
    ));
    node.frame(&TunnelFrameOut::end(&small_run.run_id, 2));
    assert_eq!(small.head().expect("an answer").status, 204);
    // Two large ones are on their way to a node that does not read: what control says goes between.
    uploading.send(last);
    edge.wait_metrics("the first to begin", |seen| {
        seen.get("iop_edge_runs_dispatched_total") >= 3.0
    });
    let mut second = Client::connect(&edge);
    second.send(&large);
    edge.wait_metrics("the second", |seen| {
        seen.get("iop_edge_submits_total") >= 4.0
    });
    node.stream
        .write_all(&envelope(&Message::Ping(Ping { seq: 77 })))
        .expect("the Edge reads");
    node.stream.flush().expect("the Edge reads");
    drop(live);
    edge.wait_metrics("the client's leaving", |seen| {
        seen.reason("client_gone") >= 1.0
    });
    let first = node.try_receive_any();
    assert!(matches!(&first, Some(Message::TunnelRequest(request)) if request.body.len() > BYTES));
    let (mut cancelled, mut ponged) = (false, false);
    loop {
        match node.try_receive_any().expect("the Edge is there") {
            Message::CancelRequest(cancel) => cancelled |= cancel.run_id == live_run,
            Message::Pong(pong) => ponged |= pong.seq == 77,
            Message::Ping(_) => {}
            Message::TunnelRequest(request) => {
                assert!(request.body.len() > BYTES);
                break;
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    assert!(
        cancelled && ponged,
        "cancelled {cancelled}, ponged {ponged}"
    );
    drop((uploading, second, small));
    drop(node);
    edge.wait_idle();
}

/// More slices than one send takes, to a client whose socket takes less than that: what a direct send
/// left over goes before what came behind it.
/// Proves [D-34], [P-78].
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

/// More clients than a turn has gathers, in one receive of their node: what was gathered is sent in
/// between. Some of them read only at the end, so that sends may fall short in the middle of a turn.
/// Proves [D-44].
#[test]
fn one_turn_for_more_clients_than_it_gathers_keeps_every_stream_whole() {
    const CLIENTS: usize = 290;
    const ROUNDS: u64 = 600;
    const BODY: usize = 130;
    let catalog = CATALOG.replace("capacity: 64", "capacity: 300");
    let edge = Edge::start(&Setup::with(&format!("shards: 1\n{catalog}")));
    let mut node = Node::ready(&edge, "n1");
    let (mut clients, mut runs) = (Vec::new(), Vec::new());
    for n in 0..CLIENTS {
        let mut client = if n % 3 == 0 {
            Client::narrow(&edge)
        } else {
            Client::connect(&edge)
        };
        client.send(&chat("m1", true));
        let run = node.tunnel().run_id;
        node.frame(&TunnelFrameOut::response_start(&run, 1, 200, EVENTS));
        let head = client.head().expect("an answer");
        clients.push((client, head));
        runs.push(run);
    }
    let text = |n: usize, round: u64| format!("{:->BODY$}", format!("{n}/{round};"));
    let mut bytes = vec![0; CLIENTS * (BODY + 256)];
    let pid = edge.pid().to_string();
    for round in 0..ROUNDS {
        let mut at = 0;
        for (n, run) in runs.iter().enumerate() {
            let body = text(n, round);
            let frame = TunnelFrameOut::body(run, 2 + round, body.as_bytes());
            at += frame.encode(&mut bytes[at..]).expect("room");
        }
        if round % 10 > 0 {
            node.send_bytes(&bytes[..at]);
            continue;
        }
        // Now and then all of it is there when the Edge looks, and nothing else.
        edge.wait_metrics("the frames so far", |seen| {
            let bodies = seen.get("iop_edge_frames_total{kind=\"body\"}");
            bodies >= (CLIENTS as u64 * round) as f64
        });
        signal("-STOP", &pid);
        node.send_bytes(&bytes[..at]);
        signal("-CONT", &pid);
    }
    for run in &runs {
        node.frame(&TunnelFrameOut::end(run, 2 + ROUNDS));
    }
    for (n, (client, head)) in clients.iter_mut().enumerate() {
        let (body, whole) = client.body(head);
        let expected: String = (0..ROUNDS).map(|round| text(n, round)).collect();
        assert!(whole && body == expected.as_bytes(), "client {n}");
    }
    drop(clients);
    edge.wait_idle();
}

fn signal(signal: &str, pid: &str) {
    let status = std::process::Command::new("kill")
        .args([signal, pid])
        .status();
    assert!(status.expect("kill runs").success());
}
