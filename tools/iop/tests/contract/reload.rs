//! Another configuration for an Edge that runs: what takes effect, what stays, and that nobody who
//! streams notices.
use std::net::TcpStream;
use std::time::Instant;

use crate::kit::{Run, World, catalog, expect_error, noise};
use crate::support::{Client, DEADLINE, Edge, Node, Setup, chat};

/// The catalog of `kit`, with node `n3`, its provider `p3` and model `only3`.
fn third(capacities: [u32; 2], tail: &str) -> String {
    let node = "nodes:\n  - id: n3\n    adapters:\n      - name: a3\n        type: openai_compat\n        \
                base_url: \"http://127.0.0.1:9\"\n    providers:\n      - id: p3\n        \
                adapter: a3\n        target: t3\n        capacity: 1\n";
    let model = "models:\n  - name: only3\n    providers: [p3]\n";
    catalog(capacities, tail)
        .replace("nodes:\n", node)
        .replace("models:\n", model)
}

fn with_third(catalog: &str) -> World {
    World::with(&Setup {
        nodes: vec!["n1", "n2", "n3"],
        ..Setup::with(catalog)
    })
}

/// A stream that a reload must not touch.
struct Stream {
    client: Client,
    run: Run,
    sent: Vec<u8>,
}

impl Stream {
    fn begin(world: &World, node: &mut Node) -> Self {
        let client = world.asks(&chat("only1", true));
        let mut run = Run::asked(node);
        run.sse(node);
        let sent = Vec::new();
        Self { client, run, sent }
    }

    fn goes_on(&mut self, node: &mut Node) {
        let piece = noise(3_000, self.sent.len() as u64 + 1);
        self.run.body(node, &piece);
        self.sent.extend(piece);
    }

    fn ends(mut self, node: &mut Node) {
        self.run.end(node);
        let head = self.client.head().expect("an answer");
        assert_eq!(self.client.body(&head), (self.sent, true));
    }
}

/// Nodes, models and capacities come and go while a stream runs on. Proves [D-39].
#[test]
fn d39_a_reload_adds_and_removes_without_touching_who_streams() {
    let world = with_third(&catalog([1, 4], ""));
    let mut one = world.node("n1");
    let mut stream = Stream::begin(&world, &mut one);
    stream.goes_on(&mut one);
    let mut waits = world.asks(&chat("only1", false));
    world.wait_queued(1);
    let said = world.reload(&third([1, 4], ""));
    for line in ["node n3 added", "provider p3 added", "model only3 added"] {
        assert!(said.contains(line), "{said}");
    }
    let mut three = world.node("n3");
    world.serves(&mut three, "only3");
    stream.goes_on(&mut one);

    let said = world.reload(&third([2, 4], ""));
    assert!(said.contains("provider p1 changed: capacity"), "{said}");
    // The raised capacity serves who waited; the node's own gate follows by a refresh.
    let mut served = None;
    for message in [one.receive(), one.receive()] {
        match message {
            iop_proto::domain::Message::TunnelRequest(request) => served = Some(Run::of(&request)),
            iop_proto::domain::Message::ConfigRefreshRequest(_) => {}
            other => panic!("{other:?}"),
        }
    }
    let mut run = served.expect("a raised capacity is used at once");
    run.start(&mut one, 200, &[("content-length", "2")]);
    run.body(&mut one, b"ok");
    run.end(&mut one);
    let head = waits.head().expect("an answer");
    assert_eq!(waits.body(&head), (b"ok".to_vec(), true));

    let said = world.reload(&catalog([2, 4], ""));
    assert!(said.contains("node n3 removed"), "{said}");
    three.expect_closed();
    expect_error(
        &mut world.asks(&chat("only3", false)),
        404,
        "model_not_found",
        "edge",
    );
    stream.goes_on(&mut one);
    // It comes back under its old names.
    world.reload(&third([2, 4], ""));
    let mut three = world.node("n3");
    world.serves(&mut three, "only3");
    stream.ends(&mut one);
    drop((one, three, waits));
    world.rest();
}

/// A file with a mistake changes nothing, by whatever way it was asked for.
#[test]
fn an_invalid_file_keeps_the_old_configuration_and_is_told_by_line_and_field() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let wrong = catalog([1, 1], "").replace("target: t2", "targt: t2");
    let said = world.reload_fails(&wrong);
    let line = format!(
        "edge.yaml:{}: nodes[1].providers[0].",
        1 + std::fs::read_to_string(world.edge.directory.path().join("edge.yaml"))
            .expect("written above")
            .lines()
            .position(|line| line.contains("targt"))
            .expect("written above")
    );
    assert!(said.contains(&line) && said.contains("targt"), "{said}");
    // That was read by whoever asked, who looked for the admin listener; now the Edge reads it.
    let admin = world.edge.admin.to_string();
    let (done, said) = world.edge.order(&["reload", "--admin", &admin]);
    assert!(!done && said.contains(&line), "{said}");
    world.wait("iop_edge_config_reloads_refused_total", 1);
    world.edge.signal("-HUP");
    world.wait("iop_edge_config_reloads_refused_total", 2);
    world.serves(&mut node, "only1");
    world.edge.write_catalog(&format!(
        "shards: 1\n{}",
        catalog([1, 1], "limits: {clients_max: 1}\n")
    ));
    let (done, said) = world.edge.order(&["reload", "--admin", &admin]);
    assert!(done, "{said}");
    let seen = world.wait("iop_edge_config_reloads_total", 1);
    assert_eq!(
        seen.get("iop_edge_nodes_outdated"),
        0.0,
        "the signal before took nothing"
    );
    assert!(
        said.contains("needs a restart: limits.clients_max"),
        "{said}"
    );
    let several = [world.client(), world.client()];
    world.serves(&mut node, "only1");
    drop((node, several));
    world.rest();
}

/// SIGHUP is the same order, told to nobody but the log.
#[test]
fn sighup_takes_the_file_again() {
    let world = with_third(&catalog([1, 1], ""));
    world.edge.write_catalog(&format!(
        "shards: {}\n{}",
        crate::kit::shards(),
        third([1, 1], "")
    ));
    world.edge.signal("-HUP");
    world.wait("iop_edge_config_reloads_total", 1);
    let mut client = world.asks(&chat("only3", false));
    world.wait_queued(1); // it is known
    world.edge.signal("-HUP");
    world.wait("iop_edge_config_reloads_total", 2);
    let mut three = world.node("n3"); // the first reload has come to its end
    Run::asked(&mut three).answers(&mut three, &mut client);
    drop((three, client));
    world.rest();
}

const KEY: &str = "marker-key";
const KEYS: &str = "keys:\n  - principal: alice\n    \
    sha256: 024a24260d62a255838b8c6c1d3a711982c02d45835ff0160faff1c935a68301\n";
const OTHER_KEYS: &str = "keys:\n  - principal: bob\n    \
    sha256: 11111111111111111111111111111111111111111111111111111111111111ff\n";

/// A request whose head was read keeps the key, limits and models it was read under; the next one on
/// the same connection does not. Proves [D-39].
#[test]
fn d39_a_request_keeps_the_configuration_its_head_was_read_under() {
    let world = World::new(&catalog([4, 4], KEYS));
    let mut node = world.node("n1");
    let mut client = world.client();
    // More than the lowered limit below.
    let body = format!("{{\"model\":\"only1\",\"pad\":\"{}\"}}", "x".repeat(2_000));
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\nauthorization: Bearer {KEY}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.send(&head);
    world.edge.wait_metrics("the head was read", |seen| {
        seen.get("iop_edge_requests_total") == 2.0 // `/healthz` was the first
    });
    // The key, the model and the size it needs are gone.
    let tight = format!("{OTHER_KEYS}limits:\n  body_bytes_max: 1024\n");
    let fresh = catalog([4, 4], &tight).replace("name: only1", "name: other");
    let said = world.reload(&fresh);
    for line in [
        "a key of alice removed",
        "a key of bob added",
        "model only1 removed",
    ] {
        assert!(said.contains(line), "{said}");
    }
    assert!(!said.contains(&KEYS[40..60]), "no hash is shown: {said}");
    client.send(&body);
    expect_error(&mut client, 404, "model_not_found", "edge");
    client.send(&head);
    expect_error(&mut client, 401, "invalid_api_key", "edge");
    client.expect_closed();

    // The other way round: the model stays, the key goes.
    world.reload(&catalog([4, 4], KEYS));
    let mut client = world.client();
    client.send(&head);
    world.edge.wait_metrics("the head was read", |seen| {
        seen.get("iop_edge_requests_total") == 4.0
    });
    world.reload(&catalog([4, 4], OTHER_KEYS));
    client.send(&body);
    Run::asked(&mut node).answers(&mut node, &mut client);
    client.send(&head);
    expect_error(&mut client, 401, "invalid_api_key", "edge");
    drop((node, client));
    world.rest();
}

/// What only a restart can change is named and left; what would open the Edge is refused.
#[test]
fn what_needs_a_restart_is_named_and_stays() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let tail = "limits:\n  output_pool_bytes: 2 MiB\nlog:\n  access: all\ncores: []\n";
    let text = catalog([1, 1], tail);
    let said = world.edge.reload(&format!("shards: 5\n{text}"));
    for field in ["shards", "limits.output_pool_bytes", "log.access"] {
        assert!(
            said.contains(&format!("needs a restart: {field}")),
            "{said}"
        );
    }
    world.serves(&mut node, "only1");
    let huge = "limits:\n  body_bytes_max: 63 MiB\n  body_pool_bytes: 4 GiB\n";
    let wide = catalog([1, 1], huge);
    let (said, fits) = {
        world.edge.write_catalog(&format!("shards: 12\n{wide}"));
        let (done, said) = world.edge.order(&["reload"]);
        (said, done)
    };
    // The running pool of 512 MiB holds one body of 63 MiB per running shard.
    assert!(fits, "{said}");
    drop(node);
    world.rest();
}

/// A node whose certificate name changes is put out; one that is not configured has no certificate here.
#[test]
fn another_certificate_name_ends_the_connection_and_the_new_one_is_let_in() {
    let world = World::new(&catalog([1, 1], ""));
    make_pki_for(&world, "renamed");
    let mut node = world.node("n1");
    let renamed = catalog([1, 1], "").replace("  - id: n1\n", "  - id: n1\n    name: renamed\n");
    let said = world.reload(&renamed);
    assert!(said.contains("node n1 changed: name"), "{said}");
    node.expect_closed();
    crate::identity::expect_refused(
        &world,
        crate::support::node_tls(&world.edge.directory, "n1"),
    );
    let mut new = Node::connect(&world.edge, "renamed");
    new.send(&crate::kit::register("n1"));
    crate::kit::expect_accepted(&mut new);
    new.send(&crate::kit::ready("n1"));
    crate::kit::expect_ready(&mut new, true);
    world.serves(&mut new, "only1");
    drop((node, new));
    world.rest();
}

fn make_pki_for(world: &World, node: &str) {
    let pki = world.edge.directory.path().join("pki");
    let made = crate::support::iop()
        .args(["pki", "node", node, "--dir"])
        .arg(pki)
        .output();
    assert!(made.expect("iop runs").status.success());
}

/// Whoever can see that it starts may signal it: the signal is obeyed once it has started.
#[test]
fn a_signal_while_an_edge_starts_is_obeyed_when_it_has() {
    let setup = Setup {
        nodes: vec!["n1", "n2"],
        ..Setup::with(&catalog([1, 1], ""))
    };
    let begun = || {
        let edge = Edge::begin(&setup);
        let began = Instant::now();
        while TcpStream::connect(edge.clients).is_err() {
            assert!(began.elapsed() < DEADLINE, "it listens to nobody");
            std::thread::yield_now();
        }
        edge
    };
    let mut edge = begun();
    edge.signal("-HUP");
    edge.wait_ready();
    edge.wait_metrics("the reload", |seen| {
        seen.get("iop_edge_config_reloads_total") == 1.0
    });
    let mut edge = begun();
    edge.signal("-TERM");
    assert!(edge.wait_exit().success(), "it drains and ends");
}
