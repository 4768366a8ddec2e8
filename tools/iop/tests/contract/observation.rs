//! What an Edge says of what it does: the same to the wire whoever listens, one line a request, and
//! nothing that a client, a provider or a node chose.
use std::collections::BTreeSet;
use std::fs;

use iop_proto::domain::HealthEvidence::{Available, Unavailable};

use crate::kit::{Run, World, answer, catalog, expect_error, pending, register_and_ready, stall};
use crate::support::{Metrics, Node, Setup, chat, http_get};

/// An Edge of two nodes whose log, at `level`, can be read afterwards.
fn logged(level: &'static str, tail: &str) -> World {
    World::with(&Setup {
        nodes: vec!["n1", "n2"],
        environment: vec![("RUST_LOG", level)],
        is_logged: true,
        ..Setup::with(&catalog([1, 1], tail))
    })
}

/// Ends the Edge; everything it has written.
fn log_of(world: World) -> String {
    world.edge.terminate();
    let mut edge = world.edge;
    assert!(edge.wait_exit().success());
    let read = |name| fs::read_to_string(edge.directory.path().join(name)).expect("a log");
    read("edge.log") + &read("edge.out")
}

fn tapped(world: &World, name: &str) -> Node {
    let mut node = Node::connect(&world.edge, name);
    node.seen = Some(Vec::new());
    register_and_ready(&mut node, name);
    node
}

/// The node's bytes, the one name in them that no two Edges share taken out.
fn heard(node: &mut Node, run: &Run) -> Vec<u8> {
    let mut bytes = node.seen.take().expect("kept");
    let id = run.id.as_bytes();
    let places = bytes.windows(id.len()).enumerate();
    let places: Vec<_> = places.filter(|(_, part)| *part == id).collect();
    assert_eq!(places.len(), 1, "a request names its run once");
    let at = places[0].0;
    bytes[at..at + id.len()].fill(b'.');
    bytes
}

/// A request that stalls on one node, whose provider is put aside, and is answered by another: what
/// both nodes heard, byte for byte, and what the Edge wrote of it.
fn scenario(level: &'static str) -> ([Vec<u8>; 2], String) {
    let world = logged(level, "");
    let (mut one, mut two) = (tapped(&world, "n1"), tapped(&world, "n2"));
    let request = chat("m1", false).replacen("\r\n\r\n", "\r\nx-request-id: same\r\n\r\n", 1);
    let mut client = world.asks(&request);
    let mut run = Run::asked(&mut one);
    let first = heard(&mut one, &run);
    run.stall(&mut one, stall(Unavailable, "a1", "t1", Some("1")));
    let mut run = Run::asked(&mut two);
    let second = heard(&mut two, &run);
    run.start(&mut two, 200, &[]);
    run.end(&mut two);
    assert_eq!(answer(&mut client).0.status, 200);
    world.wait(
        "iop_edge_provider_health_transitions_total{to=\"unavailable\"}",
        1,
    );
    world.wait(
        "iop_edge_liveness_recovery_results_total{result=\"recovered\"}",
        1,
    );
    for node in [&mut one, &mut two] {
        let more = pending(node);
        assert!(more.is_empty(), "{level}: {more:?}");
    }
    drop((one, two, client));
    ([first, second], log_of(world))
}

/// Proves, [R-311].
#[test]
fn r310_nodes_hear_the_same_bytes_whether_anybody_observes_or_not() {
    let (with, log) = scenario("info");
    for fired in [
        "edge_provider_health_observation",
        "provider put aside",
        "edge_liveness_recovery_observation",
    ] {
        assert!(log.contains(fired), "{fired} in {log}");
    }
    let (without, log) = scenario("off");
    assert!(
        !log.contains("observation") && !log.contains("put aside"),
        "{log}"
    );
    assert_eq!(with, without);
}

/// The bytes of a tunnel's request and answer, and a key that no node may send, are nowhere but in the
/// tunnel; what the Edge's notices and figures say is there.
/// Proves, [R-331].
#[test]
fn r326_a_tunnels_body_is_in_no_log_no_figure_and_no_notice() {
    let world = logged("trace", "log: {access: all}\n");
    let mut node = world.node("n1");
    let marker = "marker-31c7e0";
    let body = format!("{{\"model\":\"only1\",\"stream\":true,\"x\":\"{marker}\"}}");
    let asked = crate::support::post("/v1/chat/completions", &body);
    let mut client = world.asks(&asked);
    let request = node.tunnel();
    assert!(String::from_utf8_lossy(&request.body).contains(marker));
    let mut run = Run::of(&request);
    run.sse(&mut node);
    run.body(&mut node, marker.as_bytes());
    let head = client.head().expect("the answer begins");
    assert_eq!(client.at_least(marker.len()), marker.as_bytes());
    let mut shown = String::new();
    for path in ["/status", "/metrics", "/healthz", "/readyz"] {
        let (code, text) = http_get(world.edge.admin, path).expect("the admin endpoint answers");
        assert_eq!(code, 200);
        shown += &text;
    }
    run.end(&mut node);
    assert_eq!(client.body(&head), (Vec::new(), true));
    // The key comes with valid evidence, and is dropped.
    let mut client = world.asks(&asked);
    let run = Run::asked(&mut node);
    run.stall_with(&mut node, &[("recovery_eligible", "true")]);
    let (head, body, _) = answer(&mut client);
    assert_eq!(head.status, 504);
    shown += &format!("{head:?}{}", String::from_utf8_lossy(&body));
    world.wait("iop_edge_evidence_keys_dropped_total", 1);
    drop((node, client));
    shown += &log_of(world);
    for said in [
        "node connected",
        "node disconnected",
        "edge_provider_health_observation",
        "edge_liveness_recovery_observation",
        "\"event\":\"access\"",
        "iop_edge_frames_total",
    ] {
        assert!(shown.contains(said), "{said}");
    }
    for word in [marker, "recovery_eligible"] {
        let line = shown.lines().find(|line| line.contains(word));
        assert_eq!(line, None, "{word}");
    }
}

/// Names of the series, without their values.
fn series(metrics: &Metrics) -> BTreeSet<String> {
    let lines = metrics.0.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()))
        .collect()
}

/// Proves [P-60].
#[test]
fn p60_names_of_a_clients_choosing_make_no_series() {
    const NAMES: u32 = 300;
    let world = World::new(&catalog([1, 1], ""));
    let ask = |n: u32| {
        let mut client = world.asks(&chat(&format!("model-{n}"), false));
        expect_error(&mut client, 404, "model_not_found", "edge");
        client.send(&format!("GET /v1/path-{n} HTTP/1.1\r\nhost: edge\r\n\r\n"));
        expect_error(&mut client, 404, "route_unknown", "edge");
        let mut client = world.asks(&format!("M{n} /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n"));
        assert!(client.head().expect("an answer").status >= 400);
        let mut client = world.asks(&format!(
            "GET /v1/models?n={n} HTTP/1.1\r\nhost: edge-{n}\r\nx-request-id: id-{n}\r\n\r\n"
        ));
        assert_eq!(client.head().expect("an answer").status, 200);
    };
    ask(0);
    let before = series(&world.edge.metrics());
    assert!(
        before
            .iter()
            .any(|name| name.contains("reason=\"model_not_found\""))
    );
    (1..NAMES).for_each(ask);
    world.saw("model_not_found", NAMES);
    assert_eq!(series(&world.edge.metrics()), before);
    world.rest();
}

/// One line for a request, at its end, with the Edge's own name for it; the client's own is echoed and
/// forwarded, and neither it nor the run's name is written.
/// Proves [D-25].
#[test]
fn d25_each_request_is_one_line_at_its_end_under_the_edges_own_name() {
    let world = logged("info", "log: {access: all}\n");
    let mut node = world.node("n1");
    let named = |model: &str| {
        let id = format!("\r\nx-request-id: inbound-of-{model}\r\n\r\n");
        chat(model, true).replacen("\r\n\r\n", &id, 1)
    };
    let mut client = world.asks(&named("only1"));
    let request = node.tunnel();
    let forwarded = request
        .headers
        .iter()
        .find(|it| it.name.eq_ignore_ascii_case("x-request-id"));
    assert_eq!(forwarded.expect("an id").value, &b"inbound-of-only1"[..]);
    let mut run = Run::of(&request);
    run.sse(&mut node);
    for _ in 0..50 {
        run.body(&mut node, b"data: 1\n\n");
    }
    run.end(&mut node);
    let (head, body, _) = answer(&mut client);
    assert_eq!(head.header("x-request-id"), Some("inbound-of-only1"));
    assert_eq!(body.len(), 450);
    let mut refused = world.asks(&named("unknown"));
    expect_error(&mut refused, 404, "model_not_found", "edge");
    let mut stalled = world.asks(&named("only1"));
    let mut ends = Run::asked(&mut node);
    ends.stall(&mut node, stall(Available, "a1", "t1", Some("1")));
    expect_error(&mut stalled, 504, "response_stalled", "provider");
    drop((node, client, refused, stalled));
    let log = log_of(world);
    let lines: Vec<serde_json::Value> = log
        .lines()
        .filter(|line| line.contains("\"event\":\"access\""))
        .map(|line| serde_json::from_str(line).expect("one object a line"))
        // Without the kit's own question.
        .filter(|line: &serde_json::Value| line["operation"].is_string() || line["outcome"] != "ok")
        .collect();
    let outcomes: BTreeSet<_> = lines.iter().map(|line| line["outcome"].as_str()).collect();
    let expected = ["ok", "model_not_found", "response_stalled"].map(Some);
    assert_eq!((lines.len(), outcomes), (3, expected.into()));
    let mut ids: Vec<_> = lines
        .iter()
        .map(|line| line["request_id"].to_string())
        .collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "each its own: {ids:?}");
    let served = lines.iter().find(|line| line["outcome"] == "ok");
    assert_eq!(served.expect("just seen")["bytes_out"], 450, "at its end");
    for word in ["inbound-of", &request.run_id, &ends.id] {
        assert!(!log.contains(word), "{word} in {log}");
    }
}
