//! A stalled request asked of another provider: the client notices nothing, the other node gets the
//! very same request, and there is never a third run.
use iop_proto::domain::HealthEvidence::{Available, Unavailable, Unknown};
use iop_proto::domain::{ExecutionFailure, Fence, HardTimeout};

use crate::kit::{
    Kill, Run, World, catalog, expect_cancel, expect_error, expect_error_event, expect_nothing,
    noise, stall,
};
use crate::support::{Node, chat, post};

fn eligibility(what: &str) -> String {
    format!("iop_edge_liveness_recovery_eligibility_total{{eligibility=\"{what}\"}}")
}

fn result(what: &str) -> String {
    format!("iop_edge_liveness_recovery_results_total{{result=\"{what}\"}}")
}

fn of_n1() -> ExecutionFailure {
    stall(Unknown, "a1", "t1", None)
}

fn of_n2() -> ExecutionFailure {
    stall(Unknown, "a2", "t2", None)
}

/// Both nodes ready, nobody asked yet: the first request goes to n1.
fn both(tail: &str) -> (World, Node, Node) {
    let world = World::new(&catalog([1, 1], tail));
    let (one, two) = (world.node("n1"), world.node("n2"));
    (world, one, two)
}

/// A request body of `model` with a few hundred KB in it.
fn large(model: &str) -> String {
    let text: String = noise(300_000, 7)
        .iter()
        .map(|byte| char::from(b'a' + byte % 26))
        .collect();
    format!("{{\"model\":\"{model}\",\"n\":1e400,\"x\":\"{text}\",\"stream\":true}}")
}

/// Proves [D-18], [R-317], [R-318].
#[test]
fn d18_a_stalled_request_is_answered_by_another_provider_and_its_client_sees_one_answer() {
    let (world, mut one, mut two) = both("");
    let mut client = world.asks(&post("/v1/chat/completions", &large("m1")));
    let first = one.tunnel();
    let mut run = Run::of(&first);
    run.stall(&mut one, stall(Unavailable, "a1", "t1", Some("1")));
    let second = two.tunnel();
    assert_ne!(second.run_id, first.run_id);
    assert_eq!((&*second.adapter, &*second.target), ("a2", "t2"));
    assert_eq!(&first.body[..], large("t1").as_bytes());
    assert_eq!(
        &second.body[..],
        large("t2").as_bytes(),
        "the very same request"
    );
    let of = |name: &str, request: &iop_proto::domain::TunnelRequest| {
        let found = request.headers.iter().find(|header| header.name == name);
        found.map(|header| header.value.clone())
    };
    assert_eq!(of("x-request-id", &first), of("x-request-id", &second));
    world.wait_held(1); // one lease at a time
    let mut run = Run::of(&second);
    run.sse(&mut two);
    run.body(&mut two, b"data: whole\n\n");
    run.end(&mut two);
    let head = client.head().expect("an answer");
    assert_eq!(head.status, 200);
    assert_eq!(client.body(&head), (b"data: whole\n\n".to_vec(), true));
    world.wait(&eligibility("eligible"), 1);
    world.wait(&result("recovered"), 1);
    expect_nothing(&mut one);
    // The connection goes on: the next request is one of its own.
    client.send(&chat("m1", false));
    let mut run = Run::asked(&mut two);
    run.start(&mut two, 200, &[]);
    run.end(&mut two);
    assert_eq!(client.head().expect("an answer").status, 200);
    drop((one, two, client));
    let seen = world.rest();
    assert_eq!(
        seen.sum("iop_edge_liveness_recovery_eligibility_total"),
        1.0
    );
    assert_eq!(seen.sum("iop_edge_liveness_recovery_results_total"), 1.0);
}

/// A second request counts what its deadline is in its length, says it behind the body, and is finished
/// whatever becomes of its client: it says what it counted. Proves [D-18].
#[test]
fn d18_a_second_run_is_as_long_as_its_head_says_though_its_client_leaves_before_its_tail() {
    // More than the sockets hold between an Edge and a node that does not read.
    let padding = "x".repeat(8 << 20);
    let body = format!("{{\"model\":\"m1\",\"x\":\"{padding}\"}}");
    // A client that has left leaves nothing of its first run's deadline: longer on the wire, or not there.
    for own in [300, 0] {
        let text = catalog([1, 1], "")
            .replace("- id: p1\n", "- id: p1\n        timeout_sec: 100\n")
            .replace(
                "- id: p2\n",
                &format!("- id: p2\n        timeout_sec: {own}\n"),
            );
        let world = World::one_shard(&text);
        let (mut one, mut two) = (world.node("n1"), world.node("n2"));
        let narrow = socket2::SockRef::from(&two.stream.sock).set_recv_buffer_size(64 * 1024);
        narrow.expect("a TCP socket");
        let client = world.asks(&post("/v1/chat/completions", &body));
        Run::asked(&mut one).stall(&mut one, of_n1());
        world.wait("iop_edge_runs_dispatched_total", 2);
        Kill::Reset.client(client);
        world.saw("client_gone", 1);
        let second = two.tunnel();
        assert_eq!(second.body.len(), body.len());
        let HardTimeout::Seconds(left) = second.timeout else {
            panic!("{:?}", second.timeout)
        };
        assert!((1..=100).contains(&left.get()), "{left}");
        let mut run = Run::of(&second);
        expect_cancel(&mut two, &run);
        run.error(&mut two, "cancelled");
        world.wait(&result("failed"), 1);
        drop((one, two));
        world.rest();
    }
}

/// Proves, [R-317].
#[test]
fn r172_what_was_answered_or_is_not_let_go_is_never_asked_again() {
    let (world, mut one, mut two) = both("");
    // The head is out: the stream says so and ends.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut one);
    run.sse(&mut one);
    let head = client.head().expect("an answer");
    run.stall(&mut one, of_n1());
    expect_error_event(&mut client, &head, b"", "response_stalled");
    world.wait(&eligibility("committed"), 1);
    drop(client);
    // The node does not know that its provider has let go. n2 is the longer unused.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut two);
    let unconfirmed = ExecutionFailure {
        fence: Some(Fence::Unconfirmed),
        ..of_n2()
    };
    run.stall(&mut two, unconfirmed);
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(&eligibility("fence_unconfirmed"), 1);
    drop(client);
    // Evidence about something else.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut one);
    run.stall(&mut one, of_n2());
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(&eligibility("evidence_rejected"), 1);
    drop(client);
    // Nobody else serves the model.
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut one);
    run.stall(&mut one, of_n1());
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(&eligibility("no_other_provider"), 1);
    expect_nothing(&mut one);
    expect_nothing(&mut two);
    drop((one, two, client));
    let seen = world.rest();
    assert_eq!(
        seen.sum("iop_edge_liveness_recovery_eligibility_total"),
        4.0
    );
    assert_eq!(seen.sum("iop_edge_liveness_recovery_results_total"), 0.0);
}

/// A provider's own error in its stream is the answer, and a stream that has begun is never told again:
/// whoever could serve it otherwise is not asked. Proves [P-46], [P-47].
#[test]
fn p47_once_a_byte_of_an_answer_was_sent_nobody_else_is_asked() {
    let (world, mut one, mut two) = both("");
    let created = b"event: response.created\ndata: {\"n\":1}\n\n";
    let failed = b"event: error\ndata: {\"code\":\"insufficient_quota\"}\n\n";
    // Told by the provider: its bytes, and its end.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut one);
    run.sse(&mut one);
    run.body(&mut one, created);
    run.body(&mut one, failed);
    run.end(&mut one);
    let head = client.head().expect("an answer");
    let both = [&created[..], failed].concat();
    assert_eq!((head.status, client.body(&head)), (200, (both, true)));
    drop(client);
    expect_nothing(&mut one);
    // A stall behind the first event. n2 is the longer unused.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut two);
    run.sse(&mut two);
    run.body(&mut two, created);
    let head = client.head().expect("an answer");
    run.stall(&mut two, of_n2());
    expect_error_event(&mut client, &head, created, "response_stalled");
    world.wait(&eligibility("committed"), 1);
    drop(client);
    // Lost with its node.
    let mut client = world.asks(&chat("m1", true));
    let mut run = Run::asked(&mut one);
    run.sse(&mut one);
    run.body(&mut one, created);
    let head = client.head().expect("an answer");
    Kill::Reset.node(one);
    expect_error_event(&mut client, &head, created, "node_lost");
    expect_nothing(&mut two);
    world.serves(&mut two, "m1");
    drop((two, client));
    let seen = world.rest();
    assert_eq!(seen.get("iop_edge_runs_dispatched_total"), 4.0);
}

/// Proves [S-63], [P-10].
#[test]
fn s63_there_is_no_third_run_however_the_second_one_ends() {
    let (world, mut one, mut two) = both("");
    let mut client = world.asks(&chat("m1", true));
    Run::asked(&mut one).stall(&mut one, of_n1());
    Run::asked(&mut two).stall(&mut two, of_n2());
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(&result("stalled_again"), 1);
    drop(client);
    // Its client leaves while the second one runs.
    let client = world.asks(&chat("m1", true));
    Run::asked(&mut one).stall(&mut one, of_n1());
    let mut run = Run::asked(&mut two);
    Kill::Reset.client(client);
    expect_cancel(&mut two, &run);
    run.error(&mut two, "cancelled");
    world.wait(&result("failed"), 1);
    // The second node's connection breaks before its answer.
    let mut client = world.asks(&chat("m1", true));
    Run::asked(&mut one).stall(&mut one, of_n1());
    let _run = Run::asked(&mut two);
    Kill::Reset.node(two);
    expect_error(&mut client, 503, "node_lost", "node");
    world.wait(&result("failed"), 2);
    drop(client);
    // Nobody else is there: it waits for as long as it had left to wait, and its client leaves.
    let client = world.asks(&chat("m1", true));
    Run::asked(&mut one).stall(&mut one, stall(Available, "a1", "t1", Some("1")));
    world.wait(&eligibility("eligible"), 4);
    expect_nothing(&mut one);
    Kill::Reset.client(client);
    world.wait(&result("client_gone"), 1);
    world.serves(&mut one, "only1");
    drop(one);
    world.rest();
}

#[test]
fn recovery_can_be_switched_off() {
    let (world, mut one, mut two) = both("recovery: off\n");
    let mut client = world.asks(&chat("m1", true));
    Run::asked(&mut one).stall(&mut one, of_n1());
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(&eligibility("off"), 1);
    expect_nothing(&mut two);
    world.serves(&mut two, "only2");
    drop((one, two, client));
    world.rest();
}

/// What was kept for another provider is not kept for a client that has its answer.
#[test]
fn a_kept_body_goes_back_with_the_failure_of_its_request() {
    let (world, mut one, two) = both("");
    let used = "iop_edge_pool_used_bytes{pool=\"body\"}";
    let mut client = world.asks(&post("/v1/chat/completions", &large("m1")));
    let request = one.tunnel();
    world
        .edge
        .wait_metrics("a kept body", |seen| seen.get(used) > 0.0);
    let mut run = Run::of(&request);
    run.body(&mut one, b"no head before it");
    expect_error(&mut client, 502, "stream_violation", "node");
    expect_cancel(&mut one, &run);
    world
        .edge
        .wait_metrics("the body's blocks", |seen| seen.get(used) == 0.0);
    run.error(&mut one, "cancelled");
    drop((one, two, client));
    world.rest();
}
