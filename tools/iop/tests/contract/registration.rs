//! What a RegisterRequest is answered with, and what it changes.
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{AdapterKind, RegisterResponse};

use crate::kit::{
    Run, World, catalog, expect_accepted, expect_nothing, expect_ready, expect_rejected, ready,
    register,
};
use crate::support::{Node, chat, envelope_with};

/// Proves, [R-022], [R-023], [R-024], [R-025], [R-035].
#[test]
fn r024_an_accepted_registration_claims_the_node_pending_and_no_more() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = Node::connect(&world.edge, "n1");
    node.send_bytes(&envelope_with(&register("n1"), 77));
    let RegisterResponse::Accepted { node_id, config } = expect_accepted(&mut node) else {
        unreachable!("just matched")
    };
    assert_eq!(node.reply_to, 77);
    assert_eq!(node_id, "n1");
    let config = config.expect("an accepting response carries the configuration");
    let names: Vec<_> = config
        .adapters
        .iter()
        .map(|adapter| adapter.name.as_str())
        .collect();
    assert_eq!(names, ["a1"], "its own adapters and nobody else's");
    let kind = AdapterKind::Known(ProviderKind::OpenAiCompat);
    assert_eq!(config.adapters[0].kind, kind);

    assert!(!world.is_connected("n1"), "pending is not connected");
    let mut client = world.asks(&chat("only1", false));
    world.wait_queued(1);
    expect_nothing(&mut node);

    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    world.wait_connected("n1", true);
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[("content-length", "2")]);
    run.body(&mut node, b"ok");
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(
        (head.status, client.body(&head)),
        (200, (b"ok".to_vec(), true))
    );
    drop((node, client));
    world.rest();
}

/// `[A-02]` `[A-05]`
#[test]
fn a05_a_refused_first_registration_is_told_why_and_closed() {
    let world = World::new(&catalog([4, 4], ""));
    for claim in ["n9", "n2", ""] {
        let mut node = Node::connect(&world.edge, "n1");
        node.send_bytes(&envelope_with(&register(claim), 5));
        let text = expect_rejected(&mut node);
        assert_eq!(node.reply_to, 5);
        assert!(
            !text.contains("n1") && !text.contains("n2"),
            "no internals: {text}"
        );
        node.expect_closed();
    }
    world.saw("node_unknown", 2);
    world.saw("node_not_certified", 1);
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_registrations_total"), 0.0);
    assert_eq!(seen.get("iop_edge_node_activations_total"), 0.0);

    let mut node = world.node("n1");
    world.serves(&mut node, "m1");
    drop(node);
    world.rest();
}

/// `[A-03]`
#[test]
fn a03_the_same_id_again_gets_the_same_answer_and_changes_nothing() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = Node::connect(&world.edge, "n1");
    node.send(&register("n1"));
    let first = expect_accepted(&mut node);
    node.send(&register("n1"));
    assert_eq!(expect_accepted(&mut node), first, "pending");
    node.send(&ready("n1"));
    expect_ready(&mut node, true);

    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    let waiting = world.asks(&chat("only1", false));
    world.wait_queued(1);
    node.send(&register("n1"));
    assert_eq!(expect_accepted(&mut node), first, "ready, with a run");
    expect_nothing(&mut node); // its one slot is still taken
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_activations_total"), 1.0);
    assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
    assert_eq!(seen.get("iop_edge_leases_held"), 1.0);

    run.body(&mut node, b"data: 1\n\n");
    run.end(&mut node);
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    let mut second = Run::asked(&mut node);
    second.error(&mut node, "node rejected");
    drop((waiting, client, node));
    world.rest();
}

/// Proves, [R-006], [R-050], [R-004].
#[test]
fn r005_a_second_node_id_is_refused_and_the_first_binding_stays() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = Node::connect(&world.edge, "n1");
    node.send(&register("n1"));
    expect_accepted(&mut node);
    for state in ["pending", "ready"] {
        node.send(&register("n2"));
        expect_rejected(&mut node);
        node.send(&register("n9"));
        expect_rejected(&mut node);
        if state == "pending" {
            node.send(&ready("n2"));
            expect_ready(&mut node, false);
            node.send(&ready("n1"));
            expect_ready(&mut node, true);
        }
    }
    world.saw("second_node_id", 4);

    // A lease from before is judged current after.
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    node.send(&register("n2"));
    expect_rejected(&mut node);
    // n2 was not claimed: its own connection is a first owner, which supersedes nobody.
    let mut other = world.node("n2");
    run.body(&mut node, b"data: 1\n\n");
    run.end(&mut node);
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    world.wait_held(0);
    let seen = world.edge.metrics();
    assert_eq!(
        seen.get("iop_edge_leases_returned_total{by=\"terminal\"}"),
        1.0
    );
    assert_eq!(seen.get("iop_edge_node_activations_total"), 2.0);
    assert_eq!(seen.get("iop_edge_node_fences_total"), 0.0);
    assert_eq!(seen.get("iop_edge_node_superseded_total"), 0.0);
    world.serves(&mut other, "only2");
    world.serves(&mut node, "only1");
    drop((node, other, client));
    world.rest();
}

#[test]
fn a_connection_that_never_registers_is_closed_in_time_whatever_else_it_says() {
    let world = World::new(&catalog([4, 4], "timeouts:\n  registration_ms: 1500\n"));
    let mut registered = Node::connect(&world.edge, "n2");
    registered.send(&register("n2"));
    expect_accepted(&mut registered);
    let mut talkative = Node::connect(&world.edge, "n1");
    expect_nothing(&mut talkative); // pings are answered, and register nobody
    talkative.expect_closed();
    world.saw("registration_timeout", 1);
    // The one that registered before it has outlived it, and may take its time. `[R-049]`
    expect_nothing(&mut registered);
    registered.send(&ready("n2"));
    expect_ready(&mut registered, true);
    world.serves(&mut registered, "m1");
    world.saw("registration_timeout", 1);
    drop((talkative, registered));
    world.rest();
}
