//! Commands of an operator to a node, through the admin listener, and what their answers may look like.
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::{JoinHandle, spawn};

use iop_proto::domain::HealthEvidence::Unavailable;
use iop_proto::domain::RefreshStatus;
use iop_proto::domain::{CommandKind, Message, NodeCommandRequest, NodeCommandResponse};

use crate::kit::{
    Kill, Run, World, catalog, expect_cancel, expect_error, expect_nothing, expect_refresh,
    pending, ready, refreshed, register, stall,
};
use crate::support::{DEADLINE, Edge, Node, chat, envelope_reply};

type Reply = (u16, serde_json::Value);

/// Asks the admin listener in a thread of its own.
fn asks(edge: &Edge, node: &str, body: &str) -> JoinHandle<Reply> {
    let address = edge.admin;
    let request = format!(
        "POST /nodes/{node}/commands HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    spawn(move || {
        let mut stream = TcpStream::connect(address).expect("the admin listener");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
        stream
            .write_all(request.as_bytes())
            .expect("the Edge reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
        let body = serde_json::from_str(body).unwrap_or_else(|_| panic!("{text}"));
        (status.expect("a status"), body)
    })
}

fn refused(edge: &Edge, node: &str, body: &str) -> (u16, String) {
    let (status, body) = asks(edge, node, body).join().expect("no panic");
    let code = body["error"]["code"].as_str().expect("a code");
    (status, code.to_owned())
}

fn question(node: &mut Node) -> (NodeCommandRequest, u64) {
    match node.receive() {
        Message::NodeCommandRequest(request) => (request, node.id),
        other => panic!("expected NodeCommandRequest, got {other:?}"),
    }
}

fn answer(request: &NodeCommandRequest, error: &str, pairs: &[(&str, &str)]) -> Message {
    let owned = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
    Message::NodeCommandResponse(NodeCommandResponse {
        command_id: request.command_id.clone(),
        kind: request.kind,
        error: error.to_owned(),
        result: owned.collect(),
    })
}

const TRANSPORT: &str = "{\"type\":\"transport_status\"}";
const CAPABILITIES: &str = "{\"type\":\"capabilities\",\"provider\":\"p1\"}";

/// Proves, [R-259].
#[test]
fn r254_three_commands_are_answered_out_of_order_while_the_capacity_is_spent() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let edge = &world.edge;
    let first = asks(edge, "n1", TRANSPORT);
    let (transport, transport_id) = question(&mut node);
    assert_eq!(transport.kind, CommandKind::TransportStatus);
    assert_eq!((&*transport.adapter, &*transport.target), ("", ""));
    let second = asks(
        edge,
        "n1",
        "{\"type\":\"provider_status\",\"provider\":\"p1\"}",
    );
    let (provider, provider_id) = question(&mut node);
    assert_eq!(provider.kind, CommandKind::ProviderStatus);
    assert_eq!((&*provider.adapter, &*provider.target), ("a1", ""));
    let third = asks(edge, "n1", CAPABILITIES);
    let (capabilities, capabilities_id) = question(&mut node);
    assert_eq!(
        (&*capabilities.adapter, &*capabilities.target),
        ("a1", "t1")
    );
    let ids = [transport_id, provider_id, capabilities_id];
    assert!(ids.iter().all(|&id| id > 0) && ids[0] != ids[1] && ids[1] != ids[2]);
    for (request, id, error, pairs) in [
        (
            &capabilities,
            capabilities_id,
            "unsupported command",
            &[][..],
        ),
        (&transport, transport_id, "", &[("state", "ready")][..]),
        (&provider, provider_id, "", &[("state.a1", "running")][..]),
    ] {
        node.send_bytes(&envelope_reply(&answer(request, error, pairs), id));
    }
    let said = |of: JoinHandle<Reply>| of.join().expect("no panic");
    let expected = |kind, error, result| {
        let document = serde_json::json!({
            "node_id": "n1", "type": kind, "error": error, "result": result,
        });
        (200, document)
    };
    let running = serde_json::json!({"state.a1": "running"});
    assert_eq!(said(second), expected("provider_status", "", running));
    let is_ready = serde_json::json!({"state": "ready"});
    assert_eq!(said(first), expected("transport_status", "", is_ready));
    let nothing = serde_json::json!({});
    let unsupported = "unsupported command";
    assert_eq!(said(third), expected("capabilities", unsupported, nothing));
    world.wait("iop_edge_node_commands_total", 3);
    world.wait_held(1); // none of them took a lease or a run
    assert_eq!(edge.metrics().get("iop_edge_runs_dispatched_total"), 1.0);
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (Vec::new(), true));
    drop((node, client));
    world.rest();
}

/// Two streams, a question and a refresh on one connection, each answer to its own request.
/// Proves.
#[test]
fn r002_streams_questions_and_refreshes_share_the_connection() {
    let before = catalog([2, 1], "");
    let world = World::new(&before);
    let mut node = world.node("n1");
    let mut streams: Vec<_> = (0..2)
        .map(|_| {
            let client = world.asks(&chat("only1", true));
            let mut run = Run::asked(&mut node);
            run.sse(&mut node);
            (client, run)
        })
        .collect();
    let asked = asks(&world.edge, "n1", CAPABILITIES);
    let (capabilities, id) = question(&mut node);
    world.reload(&before.replace("capacity: 2", "capacity: 3"));
    let (refresh, config) = expect_refresh(&mut node);
    assert_eq!(config.adapters[0].capacity, 3);
    for piece in ["data: 1\n\n", "data: 2\n\n"] {
        for (client, run) in &mut streams {
            run.body(&mut node, piece.as_bytes());
            if piece == "data: 1\n\n" {
                assert_eq!(client.head().expect("an answer").status, 200);
            }
            assert_eq!(client.at_least(piece.len()), piece.as_bytes());
        }
        if piece == "data: 1\n\n" {
            refreshed(&mut node, &refresh, RefreshStatus::Applied);
            world.wait("iop_edge_config_refreshes_total{result=\"applied\"}", 1);
        } else {
            let found = answer(&capabilities, "", &[("provider_status", "available")]);
            node.send_bytes(&envelope_reply(&found, id));
        }
    }
    let (status, said) = asked.join().expect("no panic");
    let expected = (200, "available".into());
    assert_eq!(
        (status, said["result"]["provider_status"].clone()),
        expected
    );
    // A client of the one leaves: its cancel is not behind the other's stream.
    let (client, run) = streams.remove(0);
    Kill::Reset.client(client);
    expect_cancel(&mut node, &run);
    let (mut client, mut run) = streams.remove(0);
    run.end(&mut node);
    assert_eq!(client.chunk(), Some(Vec::new()));
    drop((node, client));
    world.rest();
}

/// Proves.
#[test]
fn r033_only_a_ready_node_is_asked_and_its_end_ends_the_question() {
    let world = World::new(&catalog([1, 1], ""));
    let edge = &world.edge;
    let not_ready = (503, "node_not_ready".to_owned());
    assert_eq!(refused(edge, "n1", TRANSPORT), not_ready);
    let mut node = Node::connect(edge, "n1");
    node.send(&register("n1"));
    crate::kit::expect_accepted(&mut node);
    assert_eq!(refused(edge, "n1", TRANSPORT), not_ready);
    expect_nothing(&mut node);
    node.send(&ready("n1"));
    crate::kit::expect_ready(&mut node, true);
    let asked = asks(edge, "n1", TRANSPORT);
    let (request, id) = question(&mut node);
    drop(node);
    let (status, body) = asked.join().expect("no panic");
    assert_eq!((status, &body["error"]["code"]), (503, &"node_lost".into()));
    // The next connection's answer to that question is nobody's.
    let mut node = world.node("n1");
    node.send_bytes(&envelope_reply(&answer(&request, "", &[]), id));
    world.wait("iop_edge_envelopes_ignored_total", 1);
    for (body, expected) in [
        ("", (400, "command_malformed")),
        ("[]", (400, "command_malformed")),
        ("{\"type\":\"run\"}", (400, "command_malformed")),
        ("{\"type\":\"capabilities\"}", (400, "provider_missing")),
        (
            "{\"type\":\"capabilities\",\"provider\":\"p2\"}",
            (404, "provider_unknown"),
        ),
    ] {
        let (status, code) = refused(edge, "n1", body);
        assert_eq!((status, code.as_str()), expected, "{body}");
    }
    assert_eq!(
        refused(edge, "n9", TRANSPORT),
        (404, "node_unknown".to_owned())
    );
    expect_nothing(&mut node);
    drop(node);
    world.rest();
}

/// Proves, [R-190].
#[test]
fn r190_an_answer_after_the_wait_is_dropped() {
    let world = World::new(&catalog([1, 1], "timeouts:\n  command_ms: 300\n"));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.stall(&mut node, stall(Unavailable, "a1", "t1", Some("1")));
    expect_error(&mut client, 504, "response_stalled", "provider");
    let asked = asks(&world.edge, "n1", CAPABILITIES);
    let (request, id) = question(&mut node);
    let (status, body) = asked.join().expect("no panic");
    assert_eq!(
        (status, &body["error"]["code"]),
        (504, &"command_timeout".into())
    );
    let available = |seq| {
        [
            ("adapter_key", "a1"),
            ("target", "t1"),
            ("provider_status", "available"),
            ("health_observation_seq", seq),
        ]
    };
    node.send_bytes(&envelope_reply(&answer(&request, "", &available("8")), id));
    world.wait("iop_edge_stale_events_total", 1);
    let cleared = "iop_edge_provider_health_transitions_total{to=\"available\"}";
    assert_eq!(world.edge.metrics().get(cleared), 0.0);
    // One in time clears, with a lower number than the late one's: that has marked nothing.
    let asked = asks(&world.edge, "n1", CAPABILITIES);
    let (request, id) = question(&mut node);
    node.send_bytes(&envelope_reply(&answer(&request, "", &available("2")), id));
    assert_eq!(asked.join().expect("no panic").0, 200);
    world.wait(cleared, 1);
    world.serves(&mut node, "only1");
    drop((node, client));
    world.rest();
}

/// A node that answers what nobody asked, again and again, costs counters and nothing else.
#[test]
fn unasked_answers_are_ignored_whatever_their_number() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let asked = asks(&world.edge, "n1", TRANSPORT);
    let (request, id) = question(&mut node);
    let bytes = envelope_reply(&answer(&request, "", &[("state", "ready")]), id);
    let flood = bytes.repeat(5_000);
    node.send_bytes(&flood);
    assert_eq!(asked.join().expect("no panic").0, 200);
    world.wait("iop_edge_envelopes_ignored_total", 4_999);
    assert!(pending(&mut node).is_empty());
    world.serves(&mut node, "only1");
    drop(node);
    world.rest();
}
