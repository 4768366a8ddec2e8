//! Where long-lived connections end up: every shard has its share of nodes and of streams.
use iop_proto::view::TunnelFrameOut;

use crate::EVENTS;
use crate::support::{Client, Edge, Metrics, Node, Setup, chat};

const SHARDS: usize = 4;
const NODES: [&str; 8] = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"];
const STREAMS: usize = 64;

/// As many nodes as there are names, one provider each, all of them behind `m1`.
fn setup() -> Setup {
    let mut catalog = format!("shards: {SHARDS}\nnodes:\n");
    for name in NODES {
        catalog += &format!(
            "  - id: {name}\n    adapters:\n      - name: a1\n        type: openai_compat\n        \
             base_url: \"http://127.0.0.1:9\"\n    providers:\n      - id: p-{name}\n        \
             adapter: a1\n        target: t\n        capacity: 64\n"
        );
    }
    let providers = NODES.map(|name| format!("p-{name}")).join(", ");
    catalog += &format!("models:\n  - name: m1\n    providers: [{providers}]\n");
    Setup {
        nodes: NODES.to_vec(),
        ..Setup::with(&catalog)
    }
}

/// One figure of each shard.
fn by_shard(seen: &Metrics, family: &str) -> Vec<f64> {
    (0..SHARDS)
        .map(|row| seen.get(&format!("{family}{{shard=\"{row}\"}}")))
        .collect()
}

/// The next node is placed by what the last one left.
fn connect(edge: &Edge, name: &str, open: usize) -> Node {
    let node = Node::ready(edge, name);
    edge.wait_metrics("the session", |seen| {
        seen.get("iop_edge_sessions") == open as f64
    });
    node
}

/// Opens as many streams as there are to be, and looks where they are.
fn streams_are_even(edge: &Edge, nodes: &mut [Node]) {
    let mut clients: Vec<Client> = (0..STREAMS).map(|_| Client::connect(edge)).collect();
    for client in &mut clients {
        client.send(&chat("m1", true));
    }
    let mut runs = Vec::new();
    for (row, node) in nodes.iter_mut().enumerate() {
        for _ in 0..STREAMS / NODES.len() {
            let run = node.tunnel().run_id;
            node.frame(&TunnelFrameOut::response_start(&run, 1, 200, EVENTS));
            runs.push((row, run));
        }
    }
    for client in &mut clients {
        assert_eq!(client.head().expect("an answer").status, 200);
    }
    let even = STREAMS as f64 / SHARDS as f64;
    edge.wait_metrics("all streams", |seen| {
        by_shard(seen, "iop_edge_shard_runs").iter().sum::<f64>() == STREAMS as f64
    });
    let runs_now = by_shard(&edge.metrics(), "iop_edge_shard_runs");
    assert!(
        runs_now.iter().all(|&runs| runs < 1.5 * even),
        "{runs_now:?}"
    );
    for (row, run) in runs {
        nodes[row].frame(&TunnelFrameOut::end(&run, 2));
    }
    for client in &mut clients {
        assert_eq!(client.chunk(), Some(Vec::new()));
    }
}

/// Proves [D-35], [P-77].
#[test]
fn p77_long_lived_connections_are_spread_over_the_shards() {
    let edge = Edge::start(&setup());
    let mut nodes = Vec::new();
    for (row, name) in NODES.iter().enumerate() {
        nodes.push(connect(&edge, name, row + 1));
    }
    let share = (NODES.len() / SHARDS) as f64;
    let spread = by_shard(&edge.metrics(), "iop_edge_shard_sessions");
    assert_eq!(spread, [share; SHARDS]);
    streams_are_even(&edge, &mut nodes);
    // Half of the nodes come again, in another order: where they leave room they are put.
    for row in [6, 1, 3, 4] {
        nodes.remove(row);
        edge.wait_metrics("the place", |seen| {
            seen.get("iop_edge_sessions") == (NODES.len() - 1) as f64
        });
        nodes.insert(row, connect(&edge, NODES[row], NODES.len()));
    }
    let spread = by_shard(&edge.metrics(), "iop_edge_shard_sessions");
    assert_eq!(spread, [share; SHARDS]);
    streams_are_even(&edge, &mut nodes);
    drop(nodes);
    edge.wait_idle();
}
