//! The client leaves, or is let go, in every phase of its request: what the node hears, and when
//! the lease comes back.
use iop_proto::domain::Message;

use crate::disconnect::{UNREAD_BYTES, block_writer, numbered};
use crate::kit::{
    Kill, Run, World, catalog, catalog_with, expect_abort, expect_cancel, expect_error,
    expect_error_event, expect_nothing, pending,
};
use crate::support::chat;

/// Where the answer is when the client leaves.
#[derive(Clone, Copy, Debug)]
enum Phase {
    BeforeHead,
    AfterHead,
    MidBody,
}

/// Proves, [R-251], [R-253], [D-08].
#[test]
fn r246_a_client_that_leaves_is_told_to_the_node_once_and_its_lease_waits_for_the_terminal() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let phases = [Phase::BeforeHead, Phase::AfterHead, Phase::MidBody];
    let all = phases
        .iter()
        .flat_map(|&phase| Kill::ALL.map(|kill| (phase, kill)));
    for (row, (phase, kill)) in all.enumerate() {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        let mut waiting = world.asks(&chat("only1", true));
        world.wait_queued(1);
        if !matches!(phase, Phase::BeforeHead) {
            run.sse(&mut node);
            client.head().expect("the answer begins");
        }
        if matches!(phase, Phase::MidBody) {
            run.body(&mut node, b"data: 1\n\n");
            client.at_least(9);
        }
        kill.client(client);
        expect_cancel(&mut node, &run);
        // What was on its way is dropped; the slot is not free before the node says so.
        if matches!(phase, Phase::BeforeHead) {
            run.sse(&mut node);
        }
        run.body(&mut node, b"data: nobody\n\n");
        expect_nothing(&mut node);
        world.saw("client_gone", u32::try_from(row).expect("few") + 1);
        run.error(&mut node, "cancelled");
        let mut next = Run::asked(&mut node); // and no second CancelRequest before it
        next.sse(&mut node);
        next.end(&mut node);
        let head = waiting.head().expect("its turn");
        assert_eq!(
            waiting.body(&head),
            (Vec::new(), true),
            "{phase:?} {kill:?}"
        );
    }
    assert_eq!(
        world.violations(),
        0.0,
        "late frames of a settled run are none"
    );
    assert_eq!(world.edge.metrics().get("iop_edge_cancels_sent_total"), 9.0);
    drop(node);
    world.rest();
}

/// Proves [S-29], [P-06].
#[test]
fn s29_an_end_that_meets_the_cancel_on_its_way_ends_the_run_once() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    client.head().expect("the answer begins");
    Kill::Reset.client(client);
    world.saw("client_gone", 1);
    run.body(&mut node, b"data: late\n\n");
    run.end(&mut node); // before the node has read the CancelRequest
    world.wait_held(0);
    expect_cancel(&mut node, &run);
    expect_nothing(&mut node);
    assert_eq!(world.violations(), 0.0);
    // The end first: then nobody is told anything.
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (Vec::new(), true));
    Kill::Reset.client(client);
    world.wait("iop_edge_clients", 0);
    expect_nothing(&mut node);
    assert_eq!(world.edge.metrics().get("iop_edge_cancels_sent_total"), 1.0);
    world.serves(&mut node, "only1");
    drop(node);
    world.rest();
}

/// Proves [S-56], [D-63].
#[test]
fn s56_a_request_that_has_not_begun_is_withdrawn_and_one_that_has_comes_before_its_cancel() {
    let unhurried = "timeouts:\n  dispatch_ms: 120000\n"; // it is withdrawn for its client alone
    let world = World::new(&catalog([2, 1], unhurried));
    let mut node = world.node("n1");
    let long = block_writer(&world, "only1");
    let withdrawn = world.asks(&numbered("only1", 1));
    world.wait("iop_edge_runs", 2);
    Kill::Fin.client(withdrawn);
    world.wait("iop_edge_runs_withdrawn_total", 1);
    world.wait_held(1); // at once: nothing of it was sent
    let mut second = world.asks(&numbered("only1", 2));
    world.wait("iop_edge_runs", 2);

    // The long one is half sent: it is finished, and then cancelled.
    Kill::Reset.client(long);
    world.saw("client_gone", 2);
    world.wait("iop_edge_cancels_sent_total", 1);
    let request = node.tunnel();
    assert!(request.body.len() > UNREAD_BYTES, "whole");
    let mut cancelled = Run::of(&request);
    let mut run = None;
    let mut was_told = false;
    for _ in 0..2 {
        match node.receive() {
            Message::CancelRequest(cancel) => {
                assert_eq!(cancel.run_id, cancelled.id);
                was_told = true;
            }
            Message::TunnelRequest(request) => {
                assert_eq!(
                    crate::disconnect::number(&request.body),
                    2,
                    "the withdrawn is gone"
                );
                assert!(was_told, "control goes before the next request");
                run = Some(Run::of(&request));
            }
            other => panic!("{other:?}"),
        }
    }
    world.wait_held(2); // what has begun is held until its terminal
    cancelled.error(&mut node, "cancelled");
    let mut run = run.expect("the second request");
    run.sse(&mut node);
    run.end(&mut node);
    let head = second.head().expect("an answer");
    assert_eq!(second.body(&head), (Vec::new(), true));
    expect_nothing(&mut node);
    drop((node, second));
    world.rest();
}

/// A second request lies unread behind the first: its client's leaving is seen all the same.
/// Proves [D-46].
#[test]
fn d46_a_client_that_sent_ahead_and_left_is_seen_before_and_within_its_answer() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    for (begun, kill) in [
        (false, Kill::Fin),
        (false, Kill::Reset),
        (true, Kill::Fin),
        (true, Kill::Reset),
    ] {
        let mut client = world.asks(&chat("only1", true).repeat(2));
        let mut run = Run::asked(&mut node);
        if begun {
            run.sse(&mut node);
            assert_eq!(client.head().expect("an answer").status, 200);
        }
        kill.client(client);
        expect_cancel(&mut node, &run);
        run.error(&mut node, "cancelled");
        world.wait_held(0);
        expect_nothing(&mut node); // nobody waits for the second one
        world.serves(&mut node, "only1");
    }
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r247_a_node_that_does_not_answer_in_time_is_told_and_the_client_gets_504() {
    let provider = "        response_wait_ms: 700\n";
    let world = World::new(&catalog_with([1, 1], provider, ""));
    let mut node = world.node("n1");
    // Before the head.
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    let mut waiting = world.asks(&chat("only1", true));
    world.wait_queued(1);
    expect_error(&mut client, 504, "response_timeout", "edge");
    expect_cancel(&mut node, &run);
    run.sse(&mut node); // late: dropped
    expect_nothing(&mut node);
    run.error(&mut node, "cancelled");
    drop(client);
    // After it, in an event stream. The one that waited has its own time.
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    run.body(&mut node, b"data: 1\n\n");
    let head = waiting.head().expect("its turn");
    expect_error_event(&mut waiting, &head, b"data: 1\n\n", "response_timeout");
    expect_cancel(&mut node, &run);
    run.end(&mut node);
    world.wait_held(0);
    // After it, in any other answer.
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[("content-length", "9")]);
    run.body(&mut node, b"half");
    let head = client.head().expect("an answer");
    expect_abort(&mut client, &head, b"half");
    expect_cancel(&mut node, &run);
    run.error(&mut node, "cancelled");
    world.saw("response_timeout", 3);
    world.serves(&mut node, "only1");
    drop((node, client, waiting));
    world.rest();
}

/// A lease whose terminal never comes is not healed by time; only the connection's end returns it.
///
/// Proves [P-15].
#[test]
fn no_timer_returns_the_lease_of_a_cancelled_run() {
    let provider = "        response_wait_ms: 300\n";
    let tail = "timeouts:\n  queue_wait_ms: 1500\n";
    let world = World::new(&catalog_with([1, 1], provider, tail));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let run = Run::asked(&mut node);
    expect_error(&mut client, 504, "response_timeout", "edge");
    expect_cancel(&mut node, &run);
    // Five times the response wait later the slot is still taken.
    let mut waits = world.asks(&chat("only1", true));
    expect_error(&mut waits, 503, "queue_timeout", "edge");
    expect_nothing(&mut node);
    world.wait_held(1);
    Kill::Fin.node(node);
    world.wait_held(0);
    let mut next = world.node("n1");
    world.serves(&mut next, "only1");
    drop((next, client, waits));
    world.rest();
}

/// Proves [D-08].
#[test]
fn d08_a_cancelled_run_that_its_node_does_not_end_is_counted_once_and_stays_held() {
    let provider = "        response_wait_ms: 1500\n";
    let world = World::new(&catalog_with([3, 1], provider, ""));
    let mut node = world.node("n1");
    let overdue = |count| drop(world.wait("iop_edge_cancels_overdue_total", count));
    // One that is ended when its node is told to is not overdue, however long the next ones take.
    let client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    Kill::Fin.client(client);
    expect_cancel(&mut node, &run);
    run.error(&mut node, "cancelled");
    world.wait_held(0);
    // The client has left, or was told that nothing came.
    let client = world.asks(&chat("only1", true));
    let mut left = Run::asked(&mut node);
    Kill::Fin.client(client);
    expect_cancel(&mut node, &left);
    overdue(1);
    let mut first = world.asks(&chat("only1", true));
    let mut late = Run::asked(&mut node);
    expect_error(&mut first, 504, "response_timeout", "edge");
    expect_cancel(&mut node, &late);
    overdue(2);
    // As long again: each is counted once.
    let mut second = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    expect_error(&mut second, 504, "response_timeout", "edge");
    expect_cancel(&mut node, &run);
    run.error(&mut node, "cancelled");
    world.wait_held(2);
    left.error(&mut node, "cancelled");
    late.end(&mut node);
    world.wait_held(0);
    overdue(2);
    world.serves(&mut node, "only1");
    drop((node, first, second));
    world.rest();
}

/// Proves.
#[test]
fn r248_an_answer_that_cannot_be_written_is_cancelled_and_the_rest_of_it_dropped() {
    let tail = "ingress:\n  tolerate_half_close: true\n";
    let world = World::new(&catalog([1, 1], tail));
    let mut node = world.node("n1");
    // A client that has closed its sending side, and reads: it gets its answer.
    let mut client = world.asks(&chat("only1", true));
    client
        .stream
        .shutdown(std::net::Shutdown::Write)
        .expect("connected");
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    run.body(&mut node, b"data: 1\n\n");
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    drop(client);
    // One that has gone altogether shows it by nothing but failing writes.
    let mut client = world.asks(&chat("only1", true));
    client
        .stream
        .shutdown(std::net::Shutdown::Write)
        .expect("connected");
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    client.head().expect("the answer begins");
    drop(client);
    let cancel = (0..1_000).find_map(|_| {
        run.body(&mut node, b"data: nobody\n\n");
        pending(&mut node).pop()
    });
    match cancel.expect("a CancelRequest") {
        Message::CancelRequest(cancel) => assert_eq!(cancel.run_id, run.id),
        other => panic!("expected CancelRequest, got {other:?}"),
    }
    world.saw("client_gone", 1);
    world.wait_held(1);
    run.body(&mut node, b"data: dropped\n\n");
    run.error(&mut node, "cancelled");
    world.wait_held(0);
    world.serves(&mut node, "only1");
    drop(node);
    world.rest();
}

#[test]
fn a_client_that_does_not_read_is_cancelled_when_its_time_is_over() {
    let tail = "timeouts:\n  write_stall_ms: 600\n";
    let world = World::new(&catalog([1, 1], tail));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let head = client.head().expect("the answer begins");
    // More than its socket takes, and it does not read.
    let piece = vec![b'x'; 256 * 1024];
    for _ in 0..48 {
        run.body(&mut node, &piece);
    }
    expect_cancel(&mut node, &run);
    world.saw("client_too_slow", 1);
    run.body(&mut node, b"dropped");
    run.error(&mut node, "cancelled");
    world.wait_held(0);
    let (body, whole) = client.body(&head);
    assert!(!whole && body.len() < 48 * piece.len());
    world.serves(&mut node, "only1");
    drop((node, client));
    world.rest();
}
