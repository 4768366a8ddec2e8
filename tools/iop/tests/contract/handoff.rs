//! Stall terminals at the Edge: whose they are, what they give back, what the client hears, and what
//! is handed on.
use iop_proto::domain::HealthEvidence::{self, Available, Unavailable, Unknown};
use iop_proto::domain::{ExecutionFailure, FailureCode, FrameKind, HealthPair};

use crate::kit::{
    Kill, Run, World, catalog, expect_abort, expect_cancel, expect_error, expect_error_event,
    expect_nothing, stall,
};
use crate::support::{Node, chat};

const CONFIRMED: &str = "iop_edge_terminal_handoffs_total{recovery_handoff=\"confirmed\"}";
const WITHOUT: &str = "iop_edge_terminal_handoffs_total{recovery_handoff=\"none\"}";
const STALLED: &str = "iop_edge_terminals_total{ending=\"stalled\"}";

fn evidence(outcome: &str) -> String {
    format!("iop_edge_provider_health_evidence_total{{source=\"stall\",outcome=\"{outcome}\"}}")
}

/// Valid evidence of node n1's provider.
fn of_n1(health: HealthEvidence, seq: &str) -> ExecutionFailure {
    stall(health, "a1", "t1", Some(seq))
}

/// A run that has not answered ends so, and its client hears that.
fn ends(
    world: &World,
    node: &mut Node,
    end: impl FnOnce(&mut Run, &mut Node),
    expected: (u16, &str, &str),
) {
    let (mut client, mut run) = asked(world, node, "only1", false);
    end(&mut run, node);
    expect_error(&mut client, expected.0, expected.1, expected.2);
}

const STALL: (u16, &str, &str) = (504, "response_stalled", "provider");

/// A run of `model` begun on `node`, its answer too if `begun`.
fn asked(
    world: &World,
    node: &mut Node,
    model: &str,
    begun: bool,
) -> (crate::support::Client, Run) {
    let client = world.asks(&chat(model, true));
    let mut run = Run::asked(node);
    if begun {
        run.sse(node);
        run.body(node, b"data: 1\n\n");
    }
    (client, run)
}

/// Proves.
#[test]
fn r168_a_stall_gives_its_slot_back_and_its_client_hears_of_it_before_and_after_the_head() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut handed = 0;
    let mut seq = 0;
    for begun in [false, true] {
        for health in [Available, Unknown] {
            let (mut client, mut run) = asked(&world, &mut node, "only1", begun);
            seq += 1;
            run.stall(&mut node, of_n1(health, &seq.to_string()));
            if begun {
                let head = client.head().expect("an answer");
                expect_error_event(&mut client, &head, b"data: 1\n\n", "response_stalled");
            } else {
                expect_error(&mut client, 504, "response_stalled", "provider");
            }
            handed += 1;
            world.wait(CONFIRMED, handed);
            world.wait_held(0);
            // The whole slot is there again at once.
            world.serves(&mut node, "only1");
        }
    }
    world.wait(STALLED, handed);
    world.wait(&evidence("marked"), handed);
    assert_eq!(world.violations(), 0.0);
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r160_a_stall_is_judged_by_its_lease_as_it_was_taken() {
    let before = catalog([3, 1], "");
    let world = World::new(&before);
    let mut node = world.node("n1");
    let (mut first, mut run) = asked(&world, &mut node, "only1", false);
    let (mut second, mut other) = asked(&world, &mut node, "only1", false);
    world.reload(&before.replace("target: t1", "target: t9"));
    let mut third = world.asks(&chat("only1", true));
    let request = node.tunnel();
    assert_eq!(request.target, "t9", "what is leased from now on");
    run.stall(&mut node, of_n1(Available, "1"));
    expect_error(&mut first, STALL.0, STALL.1, STALL.2);
    world.wait(CONFIRMED, 1);
    other.stall(&mut node, stall(Available, "a1", "t9", Some("2")));
    expect_error(&mut second, STALL.0, STALL.1, STALL.2);
    world.wait(&evidence("rejected"), 1);
    Run::of(&request).stall(&mut node, stall(Available, "a1", "t9", Some("3")));
    expect_error(&mut third, STALL.0, STALL.1, STALL.2);
    world.wait(CONFIRMED, 2);
    world.wait_held(0);
    drop((node, first, second, third));
    world.rest();
}

/// Evidence that is not about the lease of p1, or not in its form.
fn misfits() -> [(&'static str, ExecutionFailure); 12] {
    let crossed = || ExecutionFailure {
        health: HealthPair::Invalid {
            health: Some("unavailable".into()),
            classification: Some("request_stalled".into()),
        },
        ..of_n1(Unavailable, "9")
    };
    let half = || ExecutionFailure {
        health: HealthPair::Invalid {
            health: Some("unavailable".into()),
            classification: None,
        },
        ..of_n1(Unavailable, "9")
    };
    let without = |change: fn(&mut ExecutionFailure)| {
        let mut failure = of_n1(Unavailable, "9");
        change(&mut failure);
        failure
    };
    [
        ("another adapter", stall(Unavailable, "a2", "t1", Some("9"))),
        ("another target", stall(Unavailable, "a1", "t2", Some("9"))),
        ("another case", stall(Unavailable, "a1", "T1", Some("9"))),
        ("a blank more", stall(Unavailable, "a1", "t1 ", Some("9"))),
        ("no target", without(|f| f.target = None)),
        ("no adapter", without(|f| f.adapter = None)),
        ("no number", of_n1(Unavailable, "abc")),
        ("zero", of_n1(Unavailable, "0")),
        ("a sign", of_n1(Unavailable, "+7")),
        ("too large", of_n1(Unavailable, "18446744073709551616")),
        ("a crossed pair", crossed()),
        ("half a pair", half()),
    ]
}

/// Proves, [R-159], [R-163], [R-167].
#[test]
fn r158_evidence_that_does_not_fit_the_lease_is_handed_on_to_nobody() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut rejected = 0;
    for (what, failure) in misfits() {
        ends(
            &world,
            &mut node,
            |run, node| run.stall(node, failure),
            STALL,
        );
        rejected += 1;
        world.wait(WITHOUT, rejected);
        world.wait(&evidence("rejected"), rejected);
        world.wait_held(0);
        world.serves(&mut node, "only1");
        assert_eq!(world.edge.metrics().get(CONFIRMED), 0.0, "{what}");
    }
    // Keys of an Edge's own making count nothing, whatever they say; the rest is judged.
    let (mut client, run) = asked(&world, &mut node, "only1", false);
    let keys = [
        ("provider_id", "p2"),
        ("recovery_handoff", "confirmed"),
        ("recovery_eligible", "true"),
    ];
    run.stall_with(&mut node, &keys);
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(CONFIRMED, 1);
    world.wait("iop_edge_evidence_keys_dropped_total", 3);
    world.wait(&evidence("unchanged"), 1);
    drop((node, client));
    world.rest();
}

/// Proves.
#[test]
fn r173_without_a_stalls_failure_a_terminal_is_an_error_like_any_other() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let other_code = ExecutionFailure {
        code: FailureCode::Other("exploded".into()),
        ..of_n1(Unavailable, "1")
    };
    const REJECTED: (u16, &str, &str) = (502, "node_rejected", "node");
    ends(
        &world,
        &mut node,
        |run, node| run.stall(node, other_code),
        REJECTED,
    );
    ends(
        &world,
        &mut node,
        |run, node| run.error(node, "response stalled"),
        STALL,
    );
    ends(
        &world,
        &mut node,
        |run, node| run.error(node, "response_stalled"),
        REJECTED,
    );
    world.wait("iop_edge_terminals_total{ending=\"error\"}", 3);
    let seen = world.edge.metrics();
    assert_eq!(seen.sum("iop_edge_provider_health_evidence_total"), 0.0);
    assert_eq!(seen.sum("iop_edge_terminal_handoffs_total"), 0.0);
    // The same node's real stall counts.
    let failure = of_n1(Available, "1");
    ends(
        &world,
        &mut node,
        |run, node| run.stall(node, failure),
        STALL,
    );
    world.wait(CONFIRMED, 1);
    drop(node);
    world.rest();
}

/// Proves, [S-21].
#[test]
fn s21_a_stall_is_judged_by_the_connection_it_came_on() {
    let world = World::new(&catalog([1, 1], ""));
    let (mut one, mut two) = (world.node("n1"), world.node("n2"));
    let (mut client, mut run) = asked(&world, &mut one, "only1", false);
    let mut stolen = Run {
        id: run.id.clone(),
        next: 1,
    };
    stolen.stall(&mut two, of_n1(Unavailable, "1"));
    world.wait("iop_edge_stream_violations_total", 1);
    world.wait_held(1);
    let seen = world.edge.metrics();
    assert_eq!(seen.sum("iop_edge_provider_health_evidence_total"), 0.0);
    run.sse(&mut one);
    run.end(&mut one);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (Vec::new(), true));
    world.serves(&mut one, "only1");
    drop((one, two, client));
    world.rest();
}

/// Proves [S-28], [S-68].
#[test]
fn s28_a_second_stall_terminal_and_one_out_of_order_hand_nothing_on() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let twice = |run: &mut Run, node: &mut Node| {
        run.stall(node, of_n1(Available, "1"));
        run.next = 1;
        run.stall(node, of_n1(Unavailable, "2"));
    };
    ends(&world, &mut node, twice, STALL);
    world.wait("iop_edge_stream_violations_total", 1);
    world.wait(CONFIRMED, 1);
    // A gap before it: released, rejected, a local error.
    let gap = |run: &mut Run, node: &mut Node| {
        run.next = 5;
        run.stall(node, of_n1(Unavailable, "3"));
    };
    ends(&world, &mut node, gap, (502, "stream_violation", "node"));
    world.wait_held(0);
    world.serves(&mut node, "only1");
    let seen = world.edge.metrics();
    assert_eq!(seen.sum("iop_edge_provider_health_evidence_total"), 1.0);
    assert_eq!(seen.sum("iop_edge_terminal_handoffs_total"), 1.0);
    drop(node);
    world.rest();
}

/// Evidence counts although nobody waits for the answer any more. Proves.
#[test]
fn r162_a_stall_of_a_client_that_left_returns_its_lease_once() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let (client, mut run) = asked(&world, &mut node, "only1", true);
    Kill::Reset.client(client);
    expect_cancel(&mut node, &run);
    run.stall(&mut node, of_n1(Available, "1"));
    world.wait(&evidence("marked"), 1);
    world.wait_held(0);
    world.serves(&mut node, "only1");
    expect_nothing(&mut node);
    let seen = world.edge.metrics();
    assert_eq!(seen.sum("iop_edge_terminal_handoffs_total"), 0.0);
    // A frame behind the last word is nobody's.
    node.send_bytes(&run.bare(FrameKind::End, run.next));
    world.wait("iop_edge_stream_violations_total", 1);
    drop(node);
    world.rest();
}

/// The body of an answer that was announced whole breaks off by a reset.
#[test]
fn a_stall_inside_an_answer_of_known_length_aborts_it() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[("content-length", "10")]);
    run.body(&mut node, b"four");
    let head = client.head().expect("an answer");
    run.stall(&mut node, of_n1(Unknown, "1"));
    expect_abort(&mut client, &head, b"four");
    world.wait(CONFIRMED, 1);
    drop((node, client));
    world.rest();
}
