//! What must never show: a pending node as connected, a node's token or address in the status.
use iop_proto::domain::{Message, RegisterRequest, Token};

use crate::kit::{Run, World, catalog, expect_accepted, expect_nothing, expect_ready, ready};
use crate::support::{Node, chat, http_get};

/// Proves, [R-353].
#[test]
fn r351_the_status_tells_figures_and_names_and_nothing_of_the_connection() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = Node::connect(&world.edge, "n1");
    let token = "marker-7f3a9c";
    node.send(&Message::RegisterRequest(RegisterRequest {
        node_id: "n1".to_owned(),
        token: Token::new(token.to_owned()),
        node_version: "marker-version".to_owned(),
    }));
    expect_accepted(&mut node);
    let status = world.edge.status();
    assert_eq!(status["nodes"][0]["node_id"], "n1");
    assert_eq!(
        status["nodes"][0]["connected"], false,
        "accepted is not connected"
    );
    let client = world.asks(&chat("only1", false));
    world.wait_queued(1);
    expect_nothing(&mut node);
    assert_eq!(
        world.edge.metrics().get("iop_edge_node_activations_total"),
        0.0
    );

    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    let mut run = Run::asked(&mut node);
    world.wait_connected("n1", true);
    let port = node
        .stream
        .sock
        .local_addr()
        .expect("connected")
        .port()
        .to_string();
    let address = format!("127.0.0.1:{port}");
    let run_id = run.id.as_str();
    for path in ["/status", "/metrics"] {
        let (code, text) = http_get(world.edge.admin, path).expect("the admin endpoint answers");
        assert_eq!(code, 200);
        assert!(text.contains(if path == "/status" { "p1" } else { "iop_edge_" }));
        for marker in [token, "marker-version", address.as_str(), run_id] {
            assert!(!text.contains(marker), "{path} shows {marker}");
        }
        assert!(path != "/status" || !text.contains("generation"));
    }
    let status = world.edge.status();
    let keys: Vec<_> = status["nodes"][0]
        .as_object()
        .expect("an object")
        .keys()
        .collect();
    assert_eq!(keys, ["connected", "node_id", "providers"]);
    run.error(&mut node, "node rejected");
    drop((node, client));
    world.rest();
}
