//! What is shown of nodes and providers, as JSON and as protobuf, in each state of a node.
use std::time::Instant;

use serde_json::Value;

use crate::kit::{Run, World, catalog_with, expect_accepted, ready, register};
use crate::support::{DEADLINE, Metrics, Node, chat, http_bytes, post};

/// Field number and value of each field of a protobuf message: numbers and bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        match key & 7 {
            0 => found.push((key >> 3, varint(&mut bytes), Vec::new())),
            2 => {
                let length = usize::try_from(varint(&mut bytes)).expect("short");
                let (value, rest) = bytes.split_at(length);
                found.push((key >> 3, 0, value.to_vec()));
                bytes = rest;
            }
            other => panic!("wire type {other}"),
        }
    }
    found
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (&byte, rest) = bytes.split_first().expect("a whole number");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return value;
        }
    }
    value
}

const PROVIDER: [(u64, &str); 13] = [
    (1, "id"),
    (2, "type"),
    (3, "category"),
    (4, "adapter"),
    (5, "targets"),
    (6, "status"),
    (7, "health"),
    (8, "capacity"),
    (9, "in_flight"),
    (10, "queued"),
    (11, "long_context_capacity"),
    (12, "long_in_flight"),
    (13, "long_queued"),
];

/// An `iop.ProviderSnapshot` in the shape that JSON has.
fn provider(message: &[u8]) -> Value {
    let mut shown = serde_json::Map::new();
    for (_, name) in &PROVIDER[7..] {
        shown.insert((*name).to_owned(), 0.into());
    }
    for (number, value, bytes) in fields(message) {
        let (_, name) = PROVIDER
            .iter()
            .find(|(known, _)| *known == number)
            .expect("a known field");
        let text = || Value::from(String::from_utf8(bytes.clone()).expect("UTF-8"));
        let value = match number {
            5 => Value::Array(vec![text()]),
            1..8 => text(),
            _ => value.into(),
        };
        shown.insert((*name).to_owned(), value);
    }
    Value::Object(shown)
}

/// The nodes of a protobuf status, in the shape that JSON has.
fn nodes(mut body: &[u8]) -> Value {
    let mut all = Vec::new();
    while !body.is_empty() {
        let length = usize::try_from(varint(&mut body)).expect("short");
        let (message, rest) = body.split_at(length);
        body = rest;
        let (mut id, mut connected, mut providers) = (Value::Null, false, Vec::new());
        for (number, value, bytes) in fields(message) {
            match number {
                1 => id = String::from_utf8(bytes).expect("UTF-8").into(),
                2 => connected = value == 1,
                3 => providers.push(provider(&bytes)),
                other => panic!("field {other}"),
            }
        }
        all.push(
            serde_json::json!({"node_id": id, "connected": connected, "providers": providers}),
        );
    }
    Value::Array(all)
}

/// Both forms of one snapshot. They are asked for within the second that a snapshot serves.
fn both(world: &World) -> (Value, Value) {
    let began = Instant::now();
    loop {
        let before = world.edge.status()["nodes"].clone();
        let accept = "accept: application/x-protobuf\r\n";
        let answer = http_bytes(world.edge.admin, "GET", "/status", accept).expect("an answer");
        let end = answer
            .windows(4)
            .position(|at| at == b"\r\n\r\n")
            .expect("a head")
            + 4;
        let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
        assert!(
            head.contains("content-type: application/x-protobuf"),
            "{head}"
        );
        let after = world.edge.status()["nodes"].clone();
        if before == after {
            return (after, nodes(&answer[end..]));
        }
        assert!(
            began.elapsed() < DEADLINE,
            "the status does not come to rest"
        );
    }
}

/// Waits until provider `row` of node `row` is shown so, in both forms.
fn wait_shown(world: &World, row: usize, wanted: &Value) {
    let began = Instant::now();
    loop {
        let (json, protobuf) = both(world);
        assert_eq!(json, protobuf, "two forms of one snapshot");
        let shown = &json[row]["providers"][0];
        let fits = wanted.as_object().expect("fields").iter();
        if fits.clone().all(|(name, value)| shown[name] == *value) {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "{shown} is not {wanted}");
        std::thread::yield_now();
    }
}

fn offline() -> Value {
    serde_json::json!({
        "id": "p1", "type": "openai_compat", "category": "api", "adapter": "a1",
        "targets": ["t1"], "status": "unavailable", "health": "offline", "capacity": 0,
        "in_flight": 0, "queued": 0, "long_context_capacity": 0, "long_in_flight": 0,
        "long_queued": 0,
    })
}

fn connected(world: &World, row: usize) -> bool {
    both(world).0[row]["connected"].as_bool().expect("a flag")
}

/// Waits for a document made while so many nodes have a connection, be they ready or not. Until then one
/// made before may be served.
fn wait_connections(world: &World, count: u32) {
    let began = Instant::now();
    loop {
        let seen = world.edge.status()["edge"]["node_connections"].clone();
        if seen == count {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "{seen} connections of nodes");
        std::thread::yield_now();
    }
}

const LINES: &str = "        category: api\n        long_capacity: 2\n        health: fine\n";

/// A node that never connected, is pending, ready, gone: the same entries, and figures only while it is
/// ready. Proves, [R-268], [R-280], [R-281], [R-282], [R-283], [R-284], [R-285].
#[test]
fn r284_a_provider_is_shown_in_every_state_of_its_node() {
    let world = World::new(&catalog_with(
        [4, 4],
        LINES,
        "timeouts:\n  queue_wait_ms: 60000\n",
    ));
    let waits = [
        world.asks(&chat("only1", false)),
        world.asks(&chat("m1", false)),
    ];
    world.wait_queued(2);
    wait_shown(&world, 0, &offline());
    assert!(!connected(&world, 0), "never connected");
    let mut node = Node::connect(&world.edge, "n1");
    node.send(&register("n1"));
    expect_accepted(&mut node);
    wait_connections(&world, 1);
    wait_shown(&world, 0, &offline());
    assert!(!connected(&world, 0), "pending");
    node.send(&ready("n1"));
    let live = serde_json::json!({
        "id": "p1", "status": "available", "health": "fine", "capacity": 4, "in_flight": 2,
        "long_context_capacity": 2, "queued": 0,
    });
    wait_shown(&world, 0, &live);
    assert!(
        connected(&world, 0) && !connected(&world, 1),
        "each node by itself"
    );
    drop(node);
    wait_shown(&world, 0, &offline());
    assert!(!connected(&world, 0), "disconnected");
    let back = world.node("n1");
    let idle = serde_json::json!({"status": "available", "capacity": 4, "in_flight": 0});
    wait_shown(&world, 0, &idle);
    drop((back, waits));
    world.rest();
}

fn long(model: &str) -> String {
    let pad = "x".repeat(140 * 1024);
    post(
        "/v1/chat/completions",
        &format!("{{\"model\":\"{model}\",\"pad\":\"{pad}\"}}"),
    )
}

/// Leases and candidate pressure, long ones among them; a waiter of two providers is shown at both.
/// Proves, [R-270], [R-271], [R-272], [R-273].
#[test]
fn r269_figures_are_those_of_leases_and_of_who_waits() {
    let world = World::new(&catalog_with([3, 1], "        long_capacity: 1\n", ""));
    let mut one = world.node("n1");
    let mut clients = vec![world.asks(&long("only1"))];
    clients.extend((0..2).map(|_| world.asks(&chat("only1", false))));
    let mut runs: Vec<_> = (0..3).map(|_| Run::asked(&mut one)).collect();
    let held = serde_json::json!({"in_flight": 3, "long_in_flight": 1, "queued": 0});
    wait_shown(&world, 0, &held);
    let _two = world.node("n2");
    clients.push(world.asks(&chat("only2", false)));
    world.wait_held(4);
    clients.extend([world.asks(&chat("m1", false)), world.asks(&long("m1"))]);
    clients.push(world.asks(&chat("only1", false)));
    world.wait_queued(3);
    let queued =
        |queued: u32, long: u32| serde_json::json!({"queued": queued, "long_queued": long});
    wait_shown(&world, 0, &queued(3, 1));
    wait_shown(&world, 1, &queued(2, 1));
    let total = |seen: &Metrics| crate::kit::queued(seen);
    assert_eq!(total(&world.edge.metrics()), 3.0, "each waits once");
    // The long one ends: both figures go down once, and the oldest waiter takes its place.
    let mut run = runs.remove(0);
    run.start(&mut one, 204, &[]);
    run.end(&mut one);
    wait_shown(&world, 0, &serde_json::json!({"in_flight": 3, "queued": 2}));
    drop((one, _two, clients));
    world.rest();
}
