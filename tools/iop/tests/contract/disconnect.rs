//! A node leaves: what its clients see, and that its capacity comes back once.
use iop_proto::domain::{StallTimeout, TunnelRequest};

use crate::kit::{
    Kill, Run, World, catalog, expect_abort, expect_accepted, expect_error, expect_error_event,
    expect_nothing, expect_ready, ready, shards,
};
use crate::support::{Client, Edge, Head, Node, chat, envelope_with, post};

/// What the client has seen when the node goes.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// The request is at the node.
    BeforeHead,
    /// An event stream: the failure is told in band.
    Events,
    /// A body of announced length, half of it.
    Length,
    /// Chunks of no event stream.
    Chunks,
}

const PHASES: [Phase; 4] = [
    Phase::BeforeHead,
    Phase::Events,
    Phase::Length,
    Phase::Chunks,
];

fn reach(world: &World, node: &mut Node, phase: Phase) -> (Client, Option<Head>) {
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(node);
    match phase {
        Phase::BeforeHead => return (client, None),
        Phase::Events => run.sse(node),
        Phase::Length => run.start(node, 200, &[("content-length", "10")]),
        Phase::Chunks => run.start(node, 200, &[("content-type", "application/json")]),
    }
    run.body(node, b"half.");
    let head = client.head().expect("the answer begins");
    (client, Some(head))
}

fn expect_lost(phase: Phase, client: &mut Client, head: Option<&Head>) {
    match (phase, head) {
        (Phase::Events, Some(head)) => expect_error_event(client, head, b"half.", "node_lost"),
        (_, Some(head)) => expect_abort(client, head, b"half."),
        (_, None) => {
            let head = expect_error(client, 503, "node_lost", "node");
            assert_eq!(head.header("retry-after"), Some("1"));
        }
    }
}

/// Proves, [R-073], [R-074], [P-32], [P-14].
#[test]
fn r070_a_node_that_leaves_in_any_way_ends_its_answers_and_returns_its_leases_once() {
    let world = World::new(&catalog([4, 4], ""));
    for (row, kill) in Kill::ALL.into_iter().enumerate() {
        let mut node = world.node("n1");
        let mut clients = PHASES.map(|phase| (phase, reach(&world, &mut node, phase)));
        world.wait_held(4);
        kill.node(node);
        for (phase, (client, head)) in &mut clients {
            expect_lost(*phase, client, head.as_ref());
        }
        let round = u32::try_from(row).expect("three");
        world.wait("iop_edge_node_fences_total", 2 * round + 1);
        world.wait_held(0);
        world.wait(
            "iop_edge_leases_returned_total{by=\"fence\"}",
            4 * (round + 1),
        );
        world.saw("node_lost", 4 * (round + 1));
        // All four slots are there again, under the next generation.
        let mut next = world.node("n1");
        let clients: Vec<_> = (0..4).map(|_| world.asks(&chat("only1", false))).collect();
        for _ in 0..4 {
            Run::asked(&mut next).error(&mut next, "node rejected");
        }
        world.wait_held(0);
        kill.node(next);
        world.wait("iop_edge_node_fences_total", 2 * round + 2);
        drop(clients);
    }
    world.rest();
}

/// Proves, [R-076].
#[test]
fn r076_the_slot_a_fence_returns_is_granted_to_nobody_until_the_node_is_back() {
    let world = World::new(&catalog([1, 1], ""));
    let mut n1 = world.node("n1");
    let mut n2 = world.node("n2");
    let mut on_n1 = world.asks(&chat("only1", true));
    let _lost = Run::asked(&mut n1);
    let mut on_n2 = world.asks(&chat("only2", true));
    let mut held = Run::asked(&mut n2);
    let mut either = world.asks(&chat("m1", true));
    let mut only_n1 = world.asks(&chat("only1", true));
    world.wait_queued(2);

    Kill::Fin.node(n1);
    expect_error(&mut on_n1, 503, "node_lost", "node");
    world.wait_held(1);
    expect_nothing(&mut n2); // full: whoever waits goes on waiting
    held.error(&mut n2, "node rejected");
    expect_error(&mut on_n2, 502, "node_rejected", "node");
    let mut moved = Run::asked(&mut n2);
    moved.sse(&mut n2);
    moved.end(&mut n2);
    assert_eq!(either.head().expect("served by the other node").status, 200);
    expect_nothing(&mut n2); // not its model

    let mut back = world.node("n1");
    let mut run = Run::asked(&mut back);
    run.sse(&mut back);
    run.end(&mut back);
    assert_eq!(only_n1.head().expect("served after the return").status, 200);
    assert_eq!(world.edge.metrics().reason("queue_timeout"), 0.0);
    drop((n2, back, on_n1, on_n2, either, only_n1));
    world.rest();
}

/// A request whose body is too long for the socket of a node that does not read.
pub(crate) fn long_chat(model: &str, bytes: usize) -> String {
    let filler = "x".repeat(bytes);
    let body = format!("{{\"model\":\"{model}\",\"stream\":true,\"filler\":\"{filler}\"}}");
    post("/v1/chat/completions", &body)
}

/// Longer than what the kernel buffers for a peer that does not read.
pub(crate) const UNREAD_BYTES: usize = 16 * 1024 * 1024;

/// Blocks the writer of `node`, which must not read: a request that has begun and cannot get on.
/// Returns its client.
pub(crate) fn block_writer(world: &World, model: &str) -> Client {
    let dispatched = world.edge.metrics().get("iop_edge_runs_dispatched_total");
    let client = world.asks(&long_chat(model, UNREAD_BYTES));
    let begun = |seen: &crate::support::Metrics| {
        seen.get("iop_edge_runs_dispatched_total") == dispatched + 1.0
    };
    world.edge.wait_metrics("the long request to begin", begun);
    client
}

/// Proves [S-12].
#[test]
fn s12_requests_that_had_not_begun_go_to_the_next_generation_in_their_order() {
    // The generation ends because its connection does, or because another claims its node.
    for is_claimed in [false, true] {
        s12_with(is_claimed);
    }
}

fn s12_with(is_claimed: bool) {
    let world = World::new(&catalog([4, 4], ""));
    let node = world.node("n1");
    let mut long = block_writer(&world, "only1");
    let mut clients: Vec<_> = (0..3)
        .map(|row| {
            let client = world.asks(&numbered("only1", row));
            world.wait("iop_edge_runs", row + 2);
            client
        })
        .collect();
    // One more, younger than all, finds no slot and waits.
    clients.push(world.asks(&numbered("only1", 3)));
    world.wait_queued(1);
    world.wait_held(4);

    let mut next = Node::connect(&world.edge, "n1");
    let old = if is_claimed {
        Some(node) // it does not read: its close is the Edge's doing
    } else {
        Kill::Reset.node(node);
        None
    };
    next.register("n1");
    expect_accepted(&mut next);
    expect_error(&mut long, 503, "node_lost", "node");
    world.wait_queued(4);
    world.wait_held(0);
    world.wait("iop_edge_queue_entries_total{why=\"not_sent\"}", 3);

    next.send(&ready("n1"));
    expect_ready(&mut next, true);
    for request in numbered_requests(&mut next, 4) {
        let mut run = Run::of(&request);
        run.start(&mut next, 200, &[("content-length", "1")]);
        run.body(&mut next, number(&request.body).to_string().as_bytes());
        run.end(&mut next);
    }
    for (row, client) in clients.iter_mut().enumerate() {
        let head = client.head().expect("an answer");
        assert_eq!(client.body(&head), (row.to_string().into_bytes(), true));
    }
    expect_nothing(&mut next); // each once
    drop((long, clients, next, old));
    world.rest();
}

/// The next requests of a node: 0, 1, 2 …, in the order they came to be waiting. They were granted
/// in that order; with several shards some come from farther than others.
fn numbered_requests(node: &mut Node, count: u32) -> Vec<TunnelRequest> {
    let requests: Vec<_> = (0..count).map(|_| node.tunnel()).collect();
    let mut numbers: Vec<_> = requests
        .iter()
        .map(|request| number(&request.body))
        .collect();
    if shards() > 1 {
        numbers.sort_unstable();
    }
    assert_eq!(numbers, (0..count).collect::<Vec<_>>());
    requests
}

/// Or to another node, if one serves the model; what it carries of a provider is then the other one's.
///
/// Proves, [R-116].
#[test]
fn a_request_that_had_not_begun_goes_to_another_node_of_its_model() {
    let timeouts = |n| format!("- id: p{n}\n        stall_timeout_ms: {n}000\n");
    let text = catalog([4, 4], "")
        .replace("- id: p1\n", &timeouts(1))
        .replace("- id: p2\n", &timeouts(2));
    let world = World::new(&text);
    let node = world.node("n1");
    let mut long = block_writer(&world, "only1");
    let mut either = world.asks(&numbered("m1", 1));
    world.wait("iop_edge_runs", 2);
    let mut own = world.asks(&numbered("only1", 2));
    world.wait("iop_edge_runs", 3);
    let mut other = world.node("n2");
    expect_nothing(&mut other); // a grant that was made stands
    Kill::Reset.node(node);
    expect_error(&mut long, 503, "node_lost", "node");
    let request = other.tunnel();
    assert_eq!((number(&request.body), request.target.as_str()), (1, "t2"));
    assert_eq!(request.stall_timeout, StallTimeout::from_wire(2_000));
    let body = String::from_utf8_lossy(&request.body);
    assert!(body.contains("\"model\":\"t2\""), "spliced anew: {body}");
    Run::of(&request).answers(&mut other, &mut either);
    expect_nothing(&mut other);
    let mut back = world.node("n1");
    let request = back.tunnel();
    assert_eq!(number(&request.body), 2);
    assert_eq!(request.stall_timeout, StallTimeout::from_wire(1_000));
    Run::of(&request).answers(&mut back, &mut own);
    drop((long, either, own, other, back));
    world.rest();
}

/// The last word of a run and the end of its connection, in one record: the answer is whole.
///
/// Proves [S-11].
#[test]
fn a_terminal_before_the_close_counts_and_the_close_finds_nothing_to_return() {
    let world = World::new(&catalog([4, 4], ""));
    for round in 1..=3 {
        let mut node = world.node("n1");
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        run.body(&mut node, b"data: 1\n\n");
        let end = run.bare(iop_proto::domain::FrameKind::End, run.next);
        node.send_bytes(&[end, vec![0; 4]].concat());
        let head = client.head().expect("an answer");
        assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
        node.expect_closed();
        let seen = world.wait("iop_edge_node_fences_total", round);
        assert_eq!(
            seen.get("iop_edge_leases_returned_total{by=\"fence\"}"),
            0.0
        );
    }
    world.wait("iop_edge_leases_returned_total{by=\"terminal\"}", 3);
    world.rest();
}

/// A terminal for a request that has not been sent whole is a peer that knows too much.
#[test]
fn an_answer_that_ends_before_its_request_was_whole_closes_the_session() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut long = block_writer(&world, "only1");
    // Its first bytes name the run.
    let mut bytes = [0; 1_024];
    std::io::Read::read_exact(&mut node.stream, &mut bytes).expect("the request's first bytes");
    let at = bytes
        .windows(2)
        .position(|pair| pair == [0x0a, 32])
        .expect("a run id")
        + 2;
    let id = String::from_utf8(bytes[at..at + 32].to_vec()).expect("hex digits");
    let mut run = Run { id, next: 1 };
    run.sse(&mut node);
    run.body(&mut node, b"data: early\n\n");
    let head = long.head().expect("an early answer may begin");
    assert_eq!(long.at_least(13), b"data: early\n\n");
    run.end(&mut node);
    expect_error_event(&mut long, &head, b"", "node_lost");
    world.saw("envelope_wrong_state", 1);
    world.wait_held(0);
    Kill::Reset.node(node);
    let mut next = world.node("n1");
    world.serves(&mut next, "only1");
    drop((long, next));
    world.rest();
}

/// A chat request that carries a number.
pub(crate) fn numbered(model: &str, number: u32) -> String {
    let body = format!("{{\"model\":\"{model}\",\"number\":{number}}}");
    post("/v1/chat/completions", &body)
}

/// The number a request carries.
pub(crate) fn number(body: &[u8]) -> u32 {
    let body: serde_json::Value = serde_json::from_slice(body).expect("a JSON object");
    let number = body["number"].as_u64().expect("a numbered request");
    u32::try_from(number).expect("small")
}

/// Proves [S-07], [P-21].
#[test]
fn s07_a_node_that_is_ready_and_gone_at_once_settles_nobody_who_waited() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = Node::connect(&world.edge, "n1");
    node.register("n1");
    expect_accepted(&mut node);
    let mut clients: Vec<_> = (0..3)
        .map(|row| {
            let client = world.asks(&numbered("only1", row));
            world.wait_queued(row + 1);
            client
        })
        .collect();
    // In one record: the ready, and an envelope of length zero that closes the connection.
    let last_words = [envelope_with(&ready("n1"), 1), vec![0; 4]].concat();
    node.send_bytes(&last_words);
    node.expect_closed();
    let seen = world.wait("iop_edge_queue_entries_total{why=\"not_sent\"}", 3);
    assert_eq!(seen.get("iop_edge_node_activations_total"), 1.0);
    assert_eq!(seen.get("iop_edge_node_fences_total"), 1.0);
    assert_eq!(seen.get("iop_edge_runs_dispatched_total"), 0.0);
    world.wait_queued(3);

    let mut next = world.node("n1");
    for request in numbered_requests(&mut next, 3) {
        let mut run = Run::of(&request);
        run.sse(&mut next);
        run.end(&mut next);
    }
    for client in &mut clients {
        assert_eq!(client.head().expect("an answer").status, 200);
    }
    drop((clients, next, node));
    world.rest();
}

/// Proves, [R-072].
#[test]
fn r354_a_pending_node_that_leaves_was_never_connected() {
    let world = World::new(&catalog([4, 4], ""));
    for kill in Kill::ALL {
        let mut node = Node::connect(&world.edge, "n1");
        node.register("n1");
        expect_accepted(&mut node);
        kill.node(node);
        world.wait("iop_edge_sessions", 0);
    }
    let seen = world.wait("iop_edge_node_registrations_total", 3);
    assert_eq!(seen.get("iop_edge_node_activations_total"), 0.0);
    assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
    let node = world.node("n1");
    world.wait("iop_edge_node_activations_total", 1);
    Kill::Fin.node(node);
    world.wait("iop_edge_node_fences_total", 1);
    world.rest();
}

/// Half an envelope, half a frame's body: what was begun is given back with the connection.
#[test]
fn a_node_that_leaves_in_the_middle_of_an_envelope_leaves_nothing_behind() {
    let world = World::new(&catalog([8, 4], ""));
    for (length, sent) in [
        (100, 50),
        (20_000, 10),
        (40_000, 30_000),
        (900_000, 500_000),
    ] {
        let mut node = world.node("n1");
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        let body = vec![b'x'; length];
        let whole = iop_proto::view::TunnelFrameOut::body(&run.id, run.next, &body);
        let bytes = crate::kit::frame_bytes(&whole);
        node.send_bytes(&bytes[..sent]);
        let head = client.head().expect("the answer begins");
        Kill::Fin.node(node);
        let (seen, whole) = client.body(&head);
        assert!(whole, "an event stream ends with the event that says why");
        let text = String::from_utf8_lossy(&seen);
        assert!(
            text.contains("node_lost") && seen.len() < length + 400,
            "{length}"
        );
        world.wait("iop_edge_sessions", 0);
    }
    let mut node = world.node("n1");
    world.serves(&mut node, "only1");
    drop(node);
    world.rest();
}

/// A node's own process, killed: what the kernel sends for it is enough.
#[test]
fn an_edge_that_is_killed_is_seen_by_its_node() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    world.serves(&mut node, "m1");
    let World { edge, .. } = world;
    drop::<Edge>(edge);
    node.expect_closed();
}
