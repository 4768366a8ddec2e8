//! NodeReadyRequest: who is believed, what the first one does, and what a refused one leaves alone.
use std::sync::Barrier;
use std::time::{Duration, Instant};

use iop_proto::domain::Message;

use crate::kit::{
    Run, World, catalog, event, expect_accepted, expect_nothing, expect_ready, expect_rejected,
    ready, register,
};
use crate::support::{Node, chat, envelope_with};

fn pending_node(world: &World, name: &str) -> Node {
    let mut node = Node::connect(&world.edge, name);
    node.send(&register(name));
    expect_accepted(&mut node);
    node
}

/// Proves, [R-040], [R-041], [R-043], [R-036], [S-09].
#[test]
fn r040_a_duplicate_ready_is_answered_and_does_nothing_else() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = pending_node(&world, "n1");
    assert_eq!(
        world.edge.metrics().get("iop_edge_node_activations_total"),
        0.0
    );
    node.send_bytes(&envelope_with(&ready("n1"), 9));
    expect_ready(&mut node, true);
    assert_eq!(node.reply_to, 9);

    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    let mut waiting = world.asks(&chat("only1", true));
    world.wait_queued(1);
    for id in [10, 11, 12] {
        node.send_bytes(&envelope_with(&ready("n1"), id));
        expect_ready(&mut node, true);
        assert_eq!(node.reply_to, id);
    }
    expect_nothing(&mut node); // no pump: the one slot is taken, and stays so
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_activations_total"), 1.0);
    assert_eq!(seen.get("iop_edge_leases_held"), 1.0);

    run.end(&mut node);
    assert_eq!(client.body(&head), (Vec::new(), true));
    let mut next = Run::asked(&mut node);
    next.sse(&mut node);
    next.end(&mut node);
    assert_eq!(waiting.head().expect("its turn").status, 200);
    drop((client, waiting, node));
    world.rest();
}

/// Proves, [R-042], [R-077], [S-08].
#[test]
fn r032_the_acknowledgement_comes_before_the_requests_that_waited_for_it() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = pending_node(&world, "n1");
    let mut clients: Vec<_> = (0..3).map(|_| world.asks(&chat("only1", false))).collect();
    world.wait_queued(3);
    expect_nothing(&mut node);
    // Nothing else happens from here on: no submit, no release, no timer.
    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    for _ in 0..3 {
        Run::asked(&mut node).error(&mut node, "provider unreachable");
    }
    for client in &mut clients {
        assert_eq!(client.head().expect("an answer").status, 502);
    }
    drop((clients, node));
    world.rest();
}

/// Proves, [R-046], [R-047].
#[test]
fn r046_a_ready_of_nobody_or_with_another_id_is_refused_and_disturbs_no_owner() {
    let world = World::new(&catalog([4, 4], ""));
    let mut owner = world.node("n2");

    let mut stranger = Node::connect(&world.edge, "n1");
    stranger.send(&ready("n1"));
    expect_ready(&mut stranger, false);
    world.saw("not_registered", 1);
    // It may still register, and owns its node then.
    stranger.send(&register("n1"));
    expect_accepted(&mut stranger);
    for wrong in ["n2", "n9", ""] {
        stranger.send(&ready(wrong));
        expect_ready(&mut stranger, false);
    }
    world.saw("node_id_mismatch", 3);
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_activations_total"), 1.0, "n2's own");
    world.serves(&mut owner, "only2");

    stranger.send(&ready("n1"));
    expect_ready(&mut stranger, true);
    stranger.send(&ready("n2"));
    expect_ready(&mut stranger, false);
    world.serves(&mut stranger, "only1");
    world.serves(&mut owner, "only2");
    assert_eq!(
        world.edge.metrics().get("iop_edge_node_activations_total"),
        2.0
    );
    drop((stranger, owner));
    world.rest();
}

/// Proves, [R-044], [R-355], [S-04], [D-60].
#[test]
fn r045_a_pending_owner_that_was_superseded_is_told_so_and_then_closed() {
    let world = World::new(&catalog([4, 4], ""));
    let mut told = pending_node(&world, "n1");
    let mut silent = pending_node(&world, "n1");
    let claimed = Instant::now();
    let mut owner = pending_node(&world, "n1");
    world.wait("iop_edge_node_superseded_total", 2);
    for _ in 0..2 {
        told.send(&ready("n1"));
        expect_ready(&mut told, false);
    }
    told.send(&register("n1"));
    expect_rejected(&mut told);
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_activations_total"), 0.0);

    owner.send(&ready("n1"));
    expect_ready(&mut owner, true);
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut owner);
    run.sse(&mut owner);
    let head = client.head().expect("the answer begins");

    // Both are closed by the Edge, one of them without ever having asked.
    told.expect_closed();
    silent.expect_closed();
    assert!(
        claimed.elapsed() >= Duration::from_millis(4_900),
        "it had time to ask"
    );
    world.saw("superseded", 5); // two readies, one registration, two closes
    run.end(&mut owner);
    assert_eq!(
        client.body(&head),
        (Vec::new(), true),
        "and the owner did not notice"
    );
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
    drop((told, silent, owner, client));
    world.rest();
}

/// Claims and readies, and whether it was believed; `None`: the Edge closed the connection before.
fn claim(mut node: Node) -> (Node, Option<bool>) {
    let mut is_ready = None;
    if node.try_send_bytes(&envelope_with(&ready("n1"), 2)) {
        while let Some(message) = node.try_receive() {
            if let Message::NodeReadyResponse(answer) = message {
                is_ready = Some(answer.ready);
                break;
            }
        }
    }
    (node, is_ready)
}

/// Proves [S-02].
#[test]
fn s02_many_claims_at_the_same_instant_leave_one_owner() {
    let world = World::new(&catalog([4, 4], ""));
    let start = Barrier::new(8);
    let claims: Vec<_> = std::thread::scope(|scope| {
        let claimants: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut node = Node::connect(&world.edge, "n1");
                    expect_nothing(&mut node); // the handshake is behind it
                    start.wait();
                    node.send(&register("n1"));
                    claim(node)
                })
            })
            .collect();
        claimants
            .into_iter()
            .map(|claimant| claimant.join().expect("it ends"))
            .collect()
    });
    let seen = world.wait("iop_edge_node_registrations_total", 8);
    let activations = seen.get("iop_edge_node_activations_total");
    let believed = claims
        .iter()
        .filter(|(_, is_ready)| *is_ready == Some(true))
        .count();
    assert!(
        believed >= 1 && activations >= believed as f64,
        "{believed} of {activations}"
    );
    // Each claim put out the one before it, ready or not; the last put out nobody it should not.
    assert_eq!(seen.get("iop_edge_node_fences_total"), activations - 1.0);
    assert_eq!(
        seen.get("iop_edge_node_superseded_total"),
        8.0 - activations
    );
    let mut client = world.asks(&chat("only1", false));
    let mut owners = 0;
    let mut nodes: Vec<_> = claims.into_iter().map(|(node, _)| node).collect();
    for node in &mut nodes {
        // Every other connection is closed by now, or will be: only the owner has a request.
        if let Some(Message::TunnelRequest(request)) = node.try_receive() {
            Run::of(&request).error(node, "node rejected");
            owners += 1;
        }
    }
    assert_eq!(owners, 1);
    assert_eq!(client.head().expect("an answer").status, 502);
    drop((client, nodes));
    world.rest();
}

/// Proves [S-01].
#[test]
fn s01_a_second_id_beside_the_first_ready_changes_nothing_in_either_order() {
    let world = World::new(&catalog([4, 4], ""));
    for ready_first in [true, false] {
        let mut node = pending_node(&world, "n1");
        let first = envelope_with(&ready("n1"), 1);
        let second = envelope_with(&register("n2"), 2);
        if ready_first {
            node.send_bytes(&[first, second].concat());
            expect_ready(&mut node, true);
            expect_rejected(&mut node);
        } else {
            node.send_bytes(&[second, first].concat());
            expect_rejected(&mut node);
            expect_ready(&mut node, true);
        }
        world.serves(&mut node, "only1");
    }
    assert_eq!(
        world.edge.metrics().get("iop_edge_node_activations_total"),
        2.0
    );
    world.rest();
}

#[test]
fn register_and_ready_in_one_record_are_answered_in_their_order() {
    let world = World::new(&catalog([4, 4], ""));
    let waiting = world.asks(&chat("only1", false));
    world.wait_queued(1);
    let mut node = Node::connect(&world.edge, "n1");
    let both = [
        envelope_with(&register("n1"), 1),
        envelope_with(&ready("n1"), 2),
    ];
    node.send_bytes(&both.concat());
    expect_accepted(&mut node);
    expect_ready(&mut node, true);
    Run::asked(&mut node).error(&mut node, "node rejected");
    drop((waiting, node));
    world.rest();
}

/// Proves.
#[test]
fn r049_nothing_but_a_ready_promotes_a_pending_node() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = pending_node(&world, "n1");
    let waiting = world.asks(&chat("only1", false));
    world.wait_queued(1);
    for _ in 0..3 {
        node.send_bytes(&event(&"0".repeat(32), "delta"));
    }
    expect_nothing(&mut node);
    world.wait("iop_edge_frames_dropped_total", 3);
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_stream_violations_total"), 0.0);
    assert_eq!(seen.get("iop_edge_node_activations_total"), 0.0);
    assert_eq!(seen.get("iop_edge_leases_held"), 0.0);
    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    Run::asked(&mut node).error(&mut node, "node rejected");
    drop((waiting, node));
    world.rest();
}
