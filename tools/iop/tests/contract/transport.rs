//! GoAway, both ways: a node that leaves politely, an Edge that does.
use iop_proto::domain::{GoAway, Message};

use crate::disconnect::{number, numbered};
use crate::kit::{Run, World, catalog, expect_error, expect_error_event, expect_nothing, pending};
use crate::support::{Metrics, Node, chat, envelope, http_get};

fn go_away(node: &mut Node) {
    node.send_bytes(&envelope(&Message::GoAway(GoAway { grace_ms: 5_000 })));
}

/// Proves [S-65].
#[test]
fn s65_after_a_nodes_go_away_its_runs_finish_and_new_ones_go_elsewhere() {
    let world = World::new(&catalog([4, 2], ""));
    let mut leaving = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut leaving);
    run.sse(&mut leaving);
    let head = client.head().expect("the answer begins");
    let mut other = world.node("n2");
    go_away(&mut leaving);
    expect_nothing(&mut leaving);

    let mut clients: Vec<_> = (0..2).map(|_| world.asks(&chat("m1", false))).collect();
    for _ in 0..2 {
        let mut run = Run::asked(&mut other);
        run.start(&mut other, 204, &[]);
        run.end(&mut other);
    }
    for client in &mut clients {
        assert_eq!(client.head().expect("an answer").status, 204);
    }
    // Its own model waits for its next generation, and loses nobody.
    let mut waits = world.asks(&chat("only1", false));
    world.wait_queued(1);
    expect_nothing(&mut leaving);
    run.body(&mut leaving, b"data: 1\n\n");
    run.end(&mut leaving);
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    expect_nothing(&mut leaving); // its slots are free, and nobody is sent to them
    drop(leaving);
    let mut next = world.node("n1");
    Run::asked(&mut next).answers(&mut next, &mut waits);
    assert_eq!(
        world
            .edge
            .metrics()
            .get("iop_edge_responses_total{class=\"5xx\"}"),
        0.0
    );
    drop((next, other, client, clients, waits));
    world.rest();
}

/// More than any session may owe control, as fast as the socket takes them.
#[test]
fn a_node_that_never_stops_saying_that_it_leaves_is_told_from_one_that_says_it_once() {
    const TIMES: usize = 300_000;
    let world = World::new(&catalog([4, 2], ""));
    let mut leaving = world.node("n1");
    let once = envelope(&Message::GoAway(GoAway { grace_ms: 1 }));
    leaving.send_bytes(&once.repeat(TIMES));
    let ignored = "iop_edge_envelopes_ignored_total";
    let all = (TIMES - 1) as f64;
    world
        .edge
        .wait_metrics("the repeats", |seen| seen.get(ignored) == all);
    let mut other = world.node("n2");
    let mut client = world.asks(&chat("m1", false));
    Run::asked(&mut other).answers(&mut other, &mut client);
    drop((leaving, other, client));
    world.rest();
}

const POST: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ncontent-length: 1\r\n\r\n1";

/// Proves [D-07], [P-75].
#[test]
fn d07_an_edge_that_is_told_to_stop_serves_what_it_has_and_then_ends() {
    let world = World::new(&catalog([1, 1], "timeouts:\n  drain_ms: 15000\n"));
    let mut node = world.node("n1");
    let mut pending_one = Node::connect(&world.edge, "n2");
    pending_one.send(&crate::kit::register("n2"));
    crate::kit::expect_accepted(&mut pending_one);
    let mut kept = world.client();
    kept.send(&chat("only1", false));
    Run::asked(&mut node).answers(&mut node, &mut kept);

    let mut streams = world.asks(&numbered("only1", 0));
    let request = node.tunnel();
    let mut run = Run::of(&request);
    run.sse(&mut node);
    let head = streams.head().expect("the answer begins");
    let mut waits = world.asks(&numbered("only1", 1));
    world.wait_queued(1);
    let (half, other_half) = POST.split_at(20);
    let came = |seen: &Metrics| seen.get("iop_edge_client_bytes_total{direction=\"in\"}");
    let before = came(&world.edge.metrics());
    let mut late = world.asks(half);
    world
        .edge
        .wait_metrics("half a head", |seen| came(seen) == before + 20.0);

    world.edge.terminate();
    match node.receive() {
        Message::GoAway(away) => assert_eq!(away.grace_ms, 15_000),
        other => panic!("expected GoAway, got {other:?}"),
    }
    assert!(
        pending(&mut pending_one).is_empty(),
        "only a ready node is told"
    );
    let readiness = http_get(world.edge.admin, "/readyz");
    assert_eq!(readiness.expect("the admin endpoint answers").0, 503);
    // A new request is refused, on whatever connection; a node may still come back.
    kept.send(&chat("only1", false));
    late.send(other_half);
    for client in [&mut kept, &mut late] {
        let head = expect_error(client, 503, "draining", "edge");
        assert_eq!(head.header("connection"), Some("close"));
        client.expect_closed();
    }
    run.body(&mut node, b"data: 1\n\n");
    drop(node);
    expect_error_event(&mut streams, &head, b"data: 1\n\n", "node_lost");
    let mut back = world.node("n1");
    let request = back.tunnel();
    assert_eq!(number(&request.body), 1, "who waited kept its place");
    let mut run = Run::of(&request);
    run.start(&mut back, 200, &[("content-length", "2")]);
    run.body(&mut back, b"ok");
    run.end(&mut back);
    let head = waits.head().expect("an answer");
    assert_eq!(waits.body(&head), (b"ok".to_vec(), true));
    let World { mut edge, .. } = world;
    assert!(edge.wait_exit().success());
    back.expect_closed();
}

#[test]
fn what_is_not_over_when_the_grace_is_ends_as_a_failure_that_can_be_told() {
    let world = World::new(&catalog([2, 1], "timeouts:\n  drain_ms: 500\n"));
    let mut node = world.node("n1");
    let mut streams = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    run.body(&mut node, b"data: 1\n\n");
    let head = streams.head().expect("the answer begins");
    let mut silent = world.asks(&chat("only1", true));
    let _unanswered = Run::asked(&mut node);
    world.edge.terminate();
    expect_error_event(&mut streams, &head, b"data: 1\n\n", "draining");
    expect_error(&mut silent, 503, "draining", "edge");
    let World { mut edge, .. } = world;
    assert!(edge.wait_exit().success());
}
