//! Ping and Pong, both ways, and what silence means.
use std::time::{Duration, Instant};

use iop_proto::domain::{Message, Ping, Pong};

use crate::disconnect::block_writer;
use crate::kit::{
    Run, World, body_bytes, catalog, expect_accepted, expect_error, expect_error_event,
    expect_ready, noise, ready, register,
};
use crate::support::{DEADLINE, Node, chat, envelope, envelope_with, post};

const DEAD: Duration = Duration::from_millis(2_000);
const TIMEOUTS: &str = "timeouts:\n  heartbeat_ms: 300\n  dead_ms: 2000\n";

/// Reads pings, and answers each with what `answer` makes of it, until more than `DEAD` has passed.
fn outlive(node: &mut Node, mut answer: impl FnMut(&mut Node, u64)) {
    let began = Instant::now();
    while began.elapsed() <= DEAD + DEAD / 4 {
        match node.try_receive_any().expect("the connection stays open") {
            Message::Ping(ping) => answer(node, ping.seq),
            other => panic!("expected a ping, got {other:?}"),
        }
    }
}

fn pong(node: &mut Node, seq: u64) {
    node.send_bytes(&envelope(&Message::Pong(Pong { seq })));
}

/// Proves, [S-06], [D-03].
#[test]
fn r071_a_silent_node_is_fenced_once_and_one_that_answers_lives() {
    let world = World::new(&catalog([4, 4], TIMEOUTS));
    let mut silent = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut silent);
    run.sse(&mut silent);
    run.body(&mut silent, b"data: 1\n\n");
    let head = client.head().expect("the answer begins");
    let mut alive = world.node("n2");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Pings are answered until the request below comes.
            Run::asked(&mut alive).error(&mut alive, "node rejected");
        });
        expect_error_event(&mut client, &head, b"data: 1\n\n", "node_lost");
        world.saw("heartbeat_timeout", 1);
        let seen = world.wait("iop_edge_node_fences_total", 1);
        assert_eq!(
            seen.get("iop_edge_leases_returned_total{by=\"fence\"}"),
            1.0
        );
        let (head, _) = world.client().ask(&chat("only2", false));
        assert_eq!(head.status, 502, "answered by the other node");
    });
    // Its own close comes later and finds nothing to do.
    silent.expect_closed();
    drop(silent);
    world.wait("iop_edge_sessions", 1);
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_fences_total"), 1.0);
    world.saw("heartbeat_timeout", 1);
    drop((alive, client));
    world.rest();
}

#[test]
fn any_byte_is_a_sign_of_life() {
    let world = World::new(&catalog([4, 4], TIMEOUTS));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    let mut events = 0;
    outlive(&mut node, |node, _seq| {
        run.body(node, b"data: 1\n\n"); // and no pong
        events += 1;
    });
    run.end(&mut node);
    let (body, whole) = client.body(&head);
    assert!(
        whole && body.len() == 9 * events,
        "{} events, {} bytes",
        events,
        body.len()
    );
    drop((node, client));
    world.rest();
}

/// Many pings at once are one question: the newest is answered.
#[test]
fn a_burst_of_pings_is_answered_by_its_last() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let burst: Vec<u8> = (1..=5_000)
        .flat_map(|seq| envelope(&Message::Ping(Ping { seq })))
        .collect();
    node.send_bytes(&burst);
    let mut last = 0;
    while last < 5_000 {
        match node.try_receive_any() {
            Some(Message::Pong(pong)) => {
                assert!(pong.seq > last, "in order, each at most once");
                last = pong.seq;
            }
            other => panic!("expected a pong, got {other:?}"),
        }
    }
    world.serves(&mut node, "m1");
    drop(node);
    world.rest();
}

/// Proves [D-56].
#[test]
fn d56_heartbeats_run_before_registration_and_while_pending() {
    let world = World::new(&catalog(
        [4, 4],
        &format!("{TIMEOUTS}  registration_ms: 60000\n"),
    ));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut unregistered = Node::connect(&world.edge, "n2");
            // An id on a one-way message is ignored; the answer carries none.
            let ping = Message::Ping(Ping { seq: 42 });
            unregistered.send_bytes(&envelope_with(&ping, 7));
            match unregistered.try_receive_any() {
                Some(Message::Pong(pong)) => assert_eq!(pong.seq, 42),
                other => panic!("expected a pong, got {other:?}"),
            }
            assert_eq!(unregistered.reply_to, 0);
            outlive(&mut unregistered, pong);
            unregistered.send(&register("n2"));
            expect_accepted(&mut unregistered);
        });
        let mut pending = Node::connect(&world.edge, "n1");
        pending.send(&register("n1"));
        expect_accepted(&mut pending);
        outlive(&mut pending, pong);
        pending.send(&ready("n1"));
        expect_ready(&mut pending, true);
        world.serves(&mut pending, "only1");
    });
    // And without them: the same connection, silent.
    let mut silent = Node::connect(&world.edge, "n1");
    silent.send(&register("n1"));
    expect_accepted(&mut silent);
    while silent.try_receive_any().is_some() {}
    world.saw("heartbeat_timeout", 1);
    let seen = world.edge.metrics();
    assert_eq!(
        seen.get("iop_edge_node_fences_total"),
        1.0,
        "of the node that had been ready"
    );
    drop(silent);
    world.rest();
}

/// Proves [S-47].
#[test]
fn s47_long_frames_in_either_direction_are_no_silence() {
    const LENGTH: usize = 40 << 20;
    let limits = "limits:\n  body_bytes_max: 48 MiB\n";
    let world = World::new(&catalog([4, 4], &format!("{TIMEOUTS}{limits}")));
    let mut node = world.node("n1");
    let socket = socket2::SockRef::from(&node.stream.sock);
    socket
        .set_recv_buffer_size(64 * 1024)
        .expect("a TCP socket");
    std::thread::scope(|scope| {
        let _guard = world.edge.guard();
        let asking = scope.spawn(|| {
            let body = format!("{{\"model\":\"only1\",\"x\":\"{}\"}}", "x".repeat(LENGTH));
            let mut client = world.asks(&post("/v1/chat/completions", &body));
            let head = client.head().expect("the answer begins");
            let (body, whole) = client.body(&head);
            assert!(head.status == 200 && whole);
            body
        });
        world.wait("iop_edge_runs_dispatched_total", 1);
        // The request fills the socket and its node takes little of it, for longer than the dead
        // may be silent: no ping of the Edge gets through, but pings of the node do.
        pass(&mut node, |node, step| {
            node.send_bytes(&envelope(&Message::Ping(Ping { seq: step })));
            (0..16).for_each(|_| node.read_some());
        });
        let request = node.tunnel();
        assert!(request.body.len() > LENGTH);
        let mut run = Run::of(&request);
        run.sse(&mut node);
        // And one long frame the other way, a little at a time, with nothing else between.
        let body = noise(600 * 1024, 7);
        let frame = body_bytes(&run, run.next, &body);
        run.next += 1;
        let mut pieces = frame.chunks(frame.len() / 40 + 1);
        pass(&mut node, |node, _| {
            if let Some(piece) = pieces.next() {
                node.send_bytes(piece);
            }
        });
        for piece in pieces {
            node.send_bytes(piece);
        }
        run.end(&mut node);
        assert_eq!(asking.join().expect("an answer"), body);
    });
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
    assert_eq!(seen.reason("heartbeat_timeout"), 0.0);
    world.serves(&mut node, "only1");
    // And silence is still silence.
    while node.try_receive_any().is_some() {}
    world.saw("heartbeat_timeout", 1);
    drop(node);
    world.rest();
}

/// Proves [D-03].
#[test]
fn d03_a_node_that_pings_and_reads_nothing_is_dead() {
    let world = World::new(&catalog([4, 4], TIMEOUTS));
    let mut node = world.node("n1");
    node.takes_ahead(64 * 1024);
    let mut client = block_writer(&world, "only1");
    // The kernel gives up on a window that stays shut, whatever comes the other way.
    let began = Instant::now();
    while node.try_send_bytes(&envelope(&Message::Ping(Ping { seq: 1 }))) {
        assert!(began.elapsed() < DEADLINE, "it lives as long as it pings");
        std::thread::park_timeout(DEAD / 20);
    }
    assert!(began.elapsed() > DEAD / 2, "not for anything else");
    world.saw("socket_error", 1);
    world.wait("iop_edge_node_fences_total", 1);
    expect_error(&mut client, 503, "node_lost", "node");
    drop((node, client));
    world.rest();
}

/// Lets more than `DEAD` pass, with a step of `act` every now and then.
fn pass(node: &mut Node, mut act: impl FnMut(&mut Node, u64)) {
    let began = Instant::now();
    let mut step = 0;
    while began.elapsed() <= DEAD + DEAD / 4 {
        step += 1;
        act(node, step);
        std::thread::park_timeout(DEAD / 20);
    }
}
