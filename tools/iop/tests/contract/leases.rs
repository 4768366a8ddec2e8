//! However a run ends, its slot comes back once: the same matrix for every operation.
use iop_proto::catalog::Operation;
use iop_proto::domain::FrameKind;

use crate::kit::{
    Kill, Run, SSE, World, catalog_with, expect_cancel, expect_error, expect_error_event,
    expect_nothing,
};
use crate::support::{Client, Node, post};

#[derive(Clone, Copy, Debug)]
enum Ending {
    End,
    ErrorBeforeHead,
    ErrorAfterHead,
    ClientLeaves,
    ResponseTimeout,
    StreamViolation,
    EndBeforeHead,
    MalformedHead,
    NodeReset,
    MalformedFrame,
}

const ENDINGS: [Ending; 10] = [
    Ending::End,
    Ending::ErrorBeforeHead,
    Ending::ErrorAfterHead,
    Ending::ClientLeaves,
    Ending::ResponseTimeout,
    Ending::StreamViolation,
    Ending::EndBeforeHead,
    Ending::MalformedHead,
    Ending::NodeReset,
    Ending::MalformedFrame,
];

/// One run that ends so; the node that is there afterwards.
fn end_so(world: &World, mut node: Node, mut client: Client, ending: Ending) -> Node {
    let mut run = Run::asked(&mut node);
    match ending {
        Ending::End => {
            run.sse(&mut node);
            run.end(&mut node);
            let head = client.head().expect("an answer");
            assert_eq!(client.body(&head), (Vec::new(), true));
        }
        Ending::ErrorBeforeHead => {
            run.error(&mut node, "provider unreachable");
            expect_error(&mut client, 502, "provider_unreachable", "provider");
        }
        Ending::ErrorAfterHead => {
            run.sse(&mut node);
            run.error(&mut node, "provider unreachable");
            let head = client.head().expect("an answer");
            expect_error_event(&mut client, &head, b"", "provider_unreachable");
        }
        Ending::ClientLeaves => {
            Kill::Reset.client(client);
            expect_cancel(&mut node, &run);
            run.error(&mut node, "cancelled");
        }
        Ending::ResponseTimeout => {
            expect_error(&mut client, 504, "response_timeout", "edge");
            expect_cancel(&mut node, &run);
            run.error(&mut node, "cancelled");
        }
        Ending::StreamViolation => {
            run.next = 5;
            run.start(&mut node, 200, SSE);
            expect_error(&mut client, 502, "stream_violation", "node");
            expect_cancel(&mut node, &run);
            run.error(&mut node, "cancelled");
        }
        Ending::EndBeforeHead => {
            run.end(&mut node);
            expect_error(&mut client, 502, "stream_violation", "node");
        }
        Ending::MalformedHead => {
            run.start(&mut node, 99, SSE);
            expect_error(&mut client, 502, "response_malformed", "provider");
            expect_cancel(&mut node, &run);
            run.error(&mut node, "cancelled");
        }
        Ending::NodeReset => {
            Kill::Reset.node(node);
            expect_error(&mut client, 503, "node_lost", "node");
            return world.node("n1");
        }
        Ending::MalformedFrame => {
            let mut frame = run.bare(FrameKind::Body, 1);
            frame.truncate(frame.len() - 1); // the length prefix still counts it
            frame.push(0xff);
            node.send_bytes(&frame);
            expect_error(&mut client, 503, "node_lost", "node");
            node.expect_closed();
            return world.node("n1");
        }
    }
    node
}

/// Proves [P-11], [P-12], [P-13].
#[test]
fn p11_after_every_ending_of_every_operation_the_slot_is_there_again() {
    let provider = "        response_wait_ms: 700\n";
    let world = World::new(&catalog_with([1, 1], provider, ""));
    let mut node = world.node("n1");
    let mut runs = 0;
    for path in Operation::ALL.map(Operation::path) {
        let request = post(path, "{\"model\":\"only1\"}");
        for ending in ENDINGS {
            node = end_so(&world, node, world.asks(&request), ending);
            world.wait_held(0);
            runs += 1;
            let seen = world.edge.metrics();
            let returned = seen.sum("iop_edge_leases_returned_total");
            assert_eq!(returned, f64::from(runs), "{path} {ending:?}");
        }
        // Ten more succeed, one after the other: the capacity is 1.
        for _ in 0..10 {
            world.serves(&mut node, "only1");
            runs += 1;
        }
        expect_nothing(&mut node);
    }
    drop(node);
    let metrics = world.rest();
    assert_eq!(
        metrics.sum("iop_edge_leases_granted_total"),
        f64::from(runs)
    );
}
