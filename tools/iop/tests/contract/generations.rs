//! One claim's runs are nobody else's: what an older connection, another node or another process
//! says of them counts nothing.
use iop_proto::domain::FrameKind;

use crate::kit::{
    Kill, Run, World, catalog, expect_accepted, expect_error_event, expect_nothing, expect_ready,
    ready, register,
};
use crate::support::{Node, chat};

/// Proves, [R-164], [R-053].
#[test]
fn r156_another_nodes_terminal_ends_nothing() {
    let world = World::new(&catalog([1, 4], ""));
    let mut n1 = world.node("n1");
    let mut n2 = world.node("n2");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut n1);
    run.sse(&mut n1);
    run.body(&mut n1, b"data: 1\n\n");
    let head = client.head().expect("the answer begins");
    assert_eq!(client.at_least(9), b"data: 1\n\n");
    let waiting = world.asks(&chat("only1", false));
    world.wait_queued(1);

    for kind in [FrameKind::Body, FrameKind::End, FrameKind::Error] {
        n2.send_bytes(&run.bare(kind, run.next));
    }
    expect_nothing(&mut n2);
    assert_eq!(world.violations(), 3.0);
    expect_nothing(&mut n1); // the slot was not given to the one that waits
    world.wait_held(1);

    run.body(&mut n1, b"data: 2\n\n");
    run.end(&mut n1);
    assert_eq!(client.body(&head), (b"data: 2\n\n".to_vec(), true));
    Run::asked(&mut n1).error(&mut n1, "node rejected");
    world.serves(&mut n2, "only2"); // violations fail runs, not connections
    drop((client, waiting, n1, n2));
    world.rest();
}

/// Proves [S-20], [P-67].
#[test]
fn s20_a_terminal_on_the_next_connection_for_a_run_of_the_last_is_ignored() {
    let world = World::new(&catalog([1, 4], ""));
    let mut first = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut old = Run::asked(&mut first);
    old.sse(&mut first);
    old.body(&mut first, b"data: 1\n\n");
    let head = client.head().expect("the answer begins");
    Kill::Fin.node(first);
    expect_error_event(&mut client, &head, b"data: 1\n\n", "node_lost");
    world.wait_held(0);

    let mut second = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut second);
    assert_ne!(run.id, old.id);
    run.sse(&mut second);
    let head = client.head().expect("the answer begins");
    let before = world.edge.metrics().sum("iop_edge_leases_returned_total");
    for kind in [FrameKind::Body, FrameKind::End, FrameKind::Error] {
        second.send_bytes(&old.bare(kind, old.next));
    }
    expect_nothing(&mut second);
    let seen = world.edge.metrics();
    assert_eq!(seen.sum("iop_edge_leases_returned_total"), before);
    assert_eq!(seen.get("iop_edge_frames_dropped_total"), 3.0);
    world.wait_held(1);
    run.body(&mut second, b"data: 2\n\n");
    run.end(&mut second);
    assert_eq!(client.body(&head), (b"data: 2\n\n".to_vec(), true));
    drop((client, second));
    world.rest();
}

/// Proves, [R-072], [R-078], [S-03], [S-05].
#[test]
fn s03_a_claim_fences_the_ready_owner_at_once_and_its_late_close_nobody() {
    let world = World::new(&catalog([3, 4], ""));
    let mut first = world.node("n1");
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut first);
        run.sse(&mut first);
        let head = client.head().expect("the answer begins");
        clients.push((client, head));
    }
    let mut second = Node::connect(&world.edge, "n1");
    second.send(&register("n1"));
    expect_accepted(&mut second);
    for (client, head) in &mut clients {
        expect_error_event(client, head, b"", "node_lost");
    }
    let seen = world.wait("iop_edge_leases_held", 0);
    assert_eq!(
        seen.get("iop_edge_leases_returned_total{by=\"fence\"}"),
        3.0
    );
    assert_eq!(seen.get("iop_edge_node_fences_total"), 1.0);
    assert!(!world.is_connected("n1"), "until its own ready");
    first.expect_closed();
    world.saw("superseded", 1);

    second.send(&ready("n1"));
    expect_ready(&mut second, true);
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut second);
    run.sse(&mut second);
    let head = client.head().expect("the answer begins");
    Kill::Reset.node(first);
    world.wait("iop_edge_sessions", 1);
    expect_nothing(&mut second);
    run.end(&mut second);
    assert_eq!(client.body(&head), (Vec::new(), true));
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_node_fences_total"), 1.0);
    assert_eq!(seen.get("iop_edge_node_activations_total"), 2.0);
    drop((clients, client, second));
    world.rest();
}

/// Proves [S-52].
#[test]
fn s52_a_run_id_of_another_process_names_nothing() {
    let other = World::new(&catalog([4, 4], ""));
    let mut node = other.node("n1");
    let client = other.asks(&chat("only1", false));
    let foreign = Run::asked(&mut node);
    drop((node, client, other));

    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    assert_ne!(run.id[..16], foreign.id[..16], "a boot nonce of its own");
    assert_eq!(run.id[16..], foreign.id[16..], "in the same slot");
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    node.send_bytes(&foreign.bare(FrameKind::End, run.next));
    expect_nothing(&mut node);
    assert_eq!(world.violations(), 1.0);
    world.wait_held(1);
    run.body(&mut node, b"data: 1\n\n");
    run.end(&mut node);
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    drop((node, client));
    world.rest();
}
