//! Providers put aside by evidence, as operators and clients see them, and the probe that brings them
//! back.
use std::time::{Duration, Instant};

use iop_proto::domain::HealthEvidence::Unavailable;
use iop_proto::domain::{CommandKind, Message, NodeCommandRequest, NodeCommandResponse};

use crate::kit::{Run, World, catalog, expect_error, expect_nothing, stall};
use crate::support::{DEADLINE, Node, chat, envelope_reply};

/// The provider's entry in `/status`, once `seen` holds of it.
fn shown(world: &World, id: &str, seen: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let began = Instant::now();
    loop {
        let status = world.edge.status();
        let nodes = status["nodes"].as_array().expect("nodes");
        let mut providers = nodes
            .iter()
            .flat_map(|node| node["providers"].as_array().expect("providers"));
        let found = providers.find(|provider| provider["id"] == id);
        let found = found.expect("a configured provider is listed");
        if seen(found) {
            return found.clone();
        }
        assert!(began.elapsed() < DEADLINE, "last seen: {found}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

fn is(status: &'static str) -> impl Fn(&serde_json::Value) -> bool {
    move |provider| provider["status"] == status
}

/// A stall of n1's provider says that it is unavailable.
fn falls(world: &World, node: &mut Node, seq: u64) {
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(node);
    run.stall(node, stall(Unavailable, "a1", "t1", Some(&seq.to_string())));
    expect_error(&mut client, 504, "response_stalled", "provider");
}

/// The next question to the node; heartbeats are passed over.
fn question(node: &mut Node) -> (NodeCommandRequest, u64) {
    match node.receive() {
        Message::NodeCommandRequest(request) => (request, node.id),
        other => panic!("expected NodeCommandRequest, got {other:?}"),
    }
}

fn found(request: &NodeCommandRequest, status: &str, seq: u64) -> Message {
    let pairs = [
        ("adapter_key", request.adapter.as_str()),
        ("target", request.target.as_str()),
        ("provider_status", status),
        ("health_observation_seq", &seq.to_string()),
    ];
    let owned = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Message::NodeCommandResponse(NodeCommandResponse {
        command_id: request.command_id.clone(),
        kind: CommandKind::Capabilities,
        error: String::new(),
        result: owned.into_iter().collect(),
    })
}

const LOWERED: &str = "iop_edge_provider_health_transitions_total{to=\"unavailable\"}";
const CLEARED: &str = "iop_edge_provider_health_transitions_total{to=\"available\"}";

/// Proves, [R-277], [R-315], [D-58].
#[test]
fn r275_an_unavailable_provider_is_shown_and_passed_over_until_a_probe_finds_it() {
    let world = World::new(&catalog([2, 1], ""));
    let mut node = world.node("n1");
    let mut other = world.node("n2");
    let mut client = world.asks(&chat("only1", true));
    let mut kept = Run::asked(&mut node);
    kept.sse(&mut node);
    falls(&world, &mut node, 1);
    world.wait(LOWERED, 1);
    let entry = shown(&world, "p1", is("unavailable"));
    let expected = serde_json::json!({
        "id": "p1", "type": "openai_compat", "category": entry["category"], "adapter": "a1",
        "targets": ["t1"], "status": "unavailable", "health": "unavailable", "capacity": 0,
        "in_flight": 0, "queued": 0, "long_context_capacity": 0, "long_in_flight": 0,
        "long_queued": 0,
    });
    assert_eq!(entry, expected);
    world.wait_held(1); // the run that was there goes on
    kept.body(&mut node, b"data: 1\n\n");
    // Others serve what it could have served; what only it can serve waits.
    world.serves(&mut other, "m1");
    let mut waiting = world.asks(&chat("only1", false));
    world.wait_queued(1);
    // It is asked about 5 s later, a fifth more or less. Answers that prove nothing change nothing.
    let began = Instant::now();
    let (request, id) = question(&mut node);
    let waited = began.elapsed();
    assert!(waited < Duration::from_millis(6_500), "{waited:?}");
    assert_eq!(request.kind, CommandKind::Capabilities);
    assert_eq!((&*request.adapter, &*request.target), ("a1", "t1"));
    assert_eq!(request.command_id, id.to_string());
    node.send_bytes(&envelope_reply(&found(&request, "unknown", 2), id));
    let unchanged =
        "iop_edge_provider_health_evidence_total{source=\"capabilities\",outcome=\"unchanged\"}";
    world.wait(unchanged, 1);
    expect_nothing(&mut node);
    let (request, id) = question(&mut node);
    // An answer under another id, or to another request, is no answer.
    node.send_bytes(&envelope_reply(&found(&request, "available", 3), id + 1));
    node.send_bytes(&envelope_reply(&found(&request, "available", 3), 0));
    world.wait("iop_edge_envelopes_ignored_total", 2);
    assert_eq!(world.edge.metrics().get(CLEARED), 0.0);
    node.send_bytes(&envelope_reply(&found(&request, "available", 4), id));
    world.wait(CLEARED, 1);
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(waiting.head().expect("an answer").status, 200);
    let entry = shown(&world, "p1", is("available"));
    assert_eq!(
        (&entry["capacity"], &entry["in_flight"]),
        (&2.into(), &1.into())
    );
    kept.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    drop((node, other, client, waiting));
    world.rest();
}

/// Proves.
#[test]
fn r279_the_next_connection_of_the_node_inherits_no_overlay() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    falls(&world, &mut node, 1);
    world.wait(LOWERED, 1);
    drop(node);
    world.wait("iop_edge_node_fences_total", 1);
    let offline = shown(&world, "p1", |provider| provider["health"] == "offline");
    assert_eq!(offline["status"], "unavailable");
    let mut node = world.node("n1");
    world.serves(&mut node, "only1");
    let entry = shown(&world, "p1", is("available"));
    assert_eq!(entry["capacity"], 1);
    falls(&world, &mut node, 1);
    world.wait(LOWERED, 2);
    drop(node);
    world.rest();
}
