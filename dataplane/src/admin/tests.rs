use std::io::{Read, Write};
use std::net::TcpStream;

use crossbeam_channel::Receiver;
use iop_control::edge::Control;
use iop_control::step::{Event, Out};
use iop_proto::ids::{NodeIndex, Now, SessionRef, ShardIndex, SlotGeneration};

use super::*;
use crate::fixture;
use crate::metrics::{ControlMetrics, FrontMetrics, ShardMetrics, strict};

const BOUNDS: Bounds = Bounds {
    connections: 8,
    idle: Duration::from_secs(20),
    deadline: Duration::from_millis(300),
    fresh: Duration::from_secs(60),
};

struct World {
    address: SocketAddr,
    handle: AdminHandle,
    shard: ShardMetrics,
    readiness: ReadinessWriter,
    requests: Receiver<SnapshotRequest>,
    rings: Receiver<()>,
}

fn world(bounds: Bounds) -> World {
    let (shard, shard_reader) = ShardMetrics::new();
    let (_, front) = FrontMetrics::new();
    let (_, control) = ControlMetrics::new();
    let (readiness, readiness_reader) = readiness();
    let (ring, rings) = crossbeam_channel::unbounded();
    let (source, requests) = status_lane(move || ring.send(()).unwrap());
    let admin = Admin {
        exposition: Exposition::new(vec![shard_reader], front, control),
        readiness: readiness_reader,
        status: source,
        commands: command_lane(1_000, || {}).0,
        operator: Operator {
            reload: crossbeam_channel::bounded(1).0,
            commands: crossbeam_channel::bounded(1).0,
            control: crate::lanes::Waker::new().unwrap(),
        },
    };
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let handle = spawn_within(listener, admin, bounds).unwrap();
    World {
        address,
        handle,
        shard,
        readiness,
        requests,
        rings,
    }
}

#[derive(Debug)]
struct Reply {
    status: u16,
    head: String,
    body: String,
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
}

/// Sends `bytes`, reads to the end of the connection.
fn exchange(address: SocketAddr, bytes: &[u8]) -> Reply {
    let mut stream = connect(address);
    stream.write_all(bytes).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {text}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Reply {
        status,
        head: head.to_lowercase(),
        body: body.to_owned(),
    }
}

fn call(address: SocketAddr, method: &str, path: &str) -> Reply {
    let request = format!("{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    exchange(address, request.as_bytes())
}

fn code(reply: &Reply) -> String {
    let value: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
    assert!(
        reply.head.contains("content-type: application/json"),
        "{}",
        reply.head
    );
    assert!(value["error"]["message"].as_str().unwrap().ends_with('.'));
    value["error"]["code"].as_str().unwrap().to_owned()
}

#[test]
fn health_is_of_the_process_and_readiness_of_the_edge() {
    let mut world = world(BOUNDS);
    let readyz = |world: &World| call(world.address, "GET", "/readyz");
    let starting = readyz(&world);
    assert_eq!(
        (starting.status, code(&starting).as_str()),
        (503, "starting")
    );
    world.readiness.set(Readiness::Ready);
    let ready = readyz(&world);
    assert_eq!((ready.status, ready.body.as_str()), (200, "ok\n"));
    world.readiness.set(Readiness::Draining);
    let draining = readyz(&world);
    assert_eq!(
        (draining.status, code(&draining).as_str()),
        (503, "draining")
    );
    assert_eq!(call(world.address, "GET", "/healthz").status, 200);
    world.handle.stop();
}

#[test]
fn metrics_are_strict_text_and_show_what_a_shard_wrote() {
    let mut world = world(BOUNDS);
    world.shard.add(ShardMetric::FramesBody, 7);
    let reply = call(world.address, "GET", "/metrics");
    assert_eq!(reply.status, 200);
    assert!(
        reply
            .head
            .contains("content-type: text/plain; version=0.0.4; charset=utf-8")
    );
    let value = |name, labels: &[_]| strict::value(&reply.body, name, labels);
    assert_eq!(
        value("iop_edge_frames_total", &[("kind", "body")]),
        Some(7.0)
    );
    // The admin thread has named its role: its heap calls are not counted as anyone else's.
    let cold = value("iop_edge_heap_allocations_total", &[("role", "cold")]).unwrap();
    let again = call(world.address, "GET", "/metrics");
    let name = "iop_edge_heap_allocations_total";
    assert!(strict::value(&again.body, name, &[("role", "cold")]).unwrap() > cold);
    assert!(
        world.requests.is_empty(),
        "a scrape asks nothing of control"
    );
    world.handle.stop();
}

#[test]
fn unknown_paths_and_methods_are_refused_and_head_has_no_body() {
    let world = world(BOUNDS);
    let unknown = call(world.address, "GET", "/metric");
    assert_eq!(
        (unknown.status, code(&unknown).as_str()),
        (404, "route_unknown")
    );
    for method in ["POST", "DELETE", "OPTIONS"] {
        let refused = call(world.address, method, "/metrics");
        assert_eq!(
            (refused.status, code(&refused).as_str()),
            (405, "method_not_allowed")
        );
        assert!(refused.head.contains("allow: get,head"), "{}", refused.head);
    }
    for path in ["/metrics", "/healthz"] {
        let head = call(world.address, "HEAD", path);
        assert_eq!((head.status, head.body.as_str()), (200, ""));
        assert!(head.head.contains("content-length: "), "{}", head.head);
    }
    assert_eq!(
        exchange(world.address, b"\x16\x03\x01 hello\r\n\r\n").status,
        400
    );
    assert_eq!(
        call(world.address, "GET", "/healthz").status,
        200,
        "garbage harms nobody"
    );
    world.handle.stop();
}

/// Keys of an object, sorted.
fn keys(value: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<_> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    keys
}

/// Control with its only node ready: a live connection with indices and generations of its own.
fn live() -> Control {
    let now = Now::from_nanos(1);
    let mut control = Control::new(fixture::names(), 1, now);
    let session = SessionRef {
        shard: ShardIndex::new(0).unwrap(),
        slot: 1_013,
        generation: SlotGeneration::new(535_353).unwrap(),
    };
    let node = NodeIndex::new(0);
    let mut out = Out::default();
    for event in [
        Event::Register {
            session,
            reply_to: 646_464,
            claimed: node,
            certified: node,
        },
        Event::Ready {
            session,
            reply_to: 757_575,
            claimed: node,
        },
    ] {
        control.handle(now, event, &mut out);
        assert!(out.drain().count() > 0, "{event:?} was answered");
    }
    control
}

fn status_of(control: &Control) -> Reply {
    let mut world = world(BOUNDS);
    world.readiness.set(Readiness::Ready);
    let asker = std::thread::spawn(move || call(world.address, "GET", "/status"));
    let request = world
        .requests
        .recv_timeout(Duration::from_secs(10))
        .unwrap();
    world
        .rings
        .recv_timeout(Duration::from_secs(10))
        .expect("control is woken");
    request.answer(control.snapshot(Now::from_nanos(2)));
    let reply = asker.join().unwrap();
    world.handle.stop();
    reply
}

/// The status of a live node holds exactly the named fields: no address, token, generation or socket
/// is among them, and none of its connection's numbers appears. Proves, [D-59].
#[test]
fn r351_status_has_the_named_fields_and_no_others() {
    let reply = status_of(&live());
    assert_eq!(reply.status, 200);
    let document: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
    assert_eq!(keys(&document), ["edge", "models", "nodes"]);
    let provider = serde_json::json!({
        "id": "pv1", "type": "vllm", "category": "local_inference", "adapter": "vllm",
        "targets": ["weights"], "status": "available", "health": "healthy", "capacity": 1,
        "in_flight": 0, "queued": 0, "long_context_capacity": 1, "long_in_flight": 0,
        "long_queued": 0,
    });
    let node = serde_json::json!({"node_id": "n1", "connected": true, "providers": [provider]});
    assert_eq!(document["nodes"], serde_json::json!([node]));
    let model = serde_json::json!({"name": "say \"hi\"", "queued": 0, "long_queued": 0});
    assert_eq!(document["models"], serde_json::json!([model]));
    let edge = [
        "client_connections",
        "config_epoch",
        "draining_nodes",
        "leases_held",
        "leases_returned",
        "leases_taken",
        "node_connections",
        "outdated_nodes",
        "readiness",
        "runs",
        "shards",
        "uptime_s",
        "version",
        "waiting",
    ];
    assert_eq!(keys(&document["edge"]), edge);
    assert_eq!(document["edge"]["readiness"], "ready");
    for marker in ["1013", "535353", "646464", "757575", "127.0.0.1"] {
        assert!(!reply.body.contains(marker), "{marker} in {}", reply.body);
    }
}

/// A node that never connected is listed with its catalog and no figures.
#[test]
fn status_lists_a_node_that_never_connected() {
    let control = Control::new(fixture::names(), 1, Now::from_nanos(0));
    let reply = status_of(&control);
    let document: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
    let node = &document["nodes"][0];
    assert_eq!(node["connected"], false);
    let provider = &node["providers"][0];
    assert_eq!(
        (&provider["id"], &provider["health"]),
        (&"pv1".into(), &"offline".into())
    );
    assert_eq!(
        (&provider["status"], &provider["capacity"]),
        (&"unavailable".into(), &0.into())
    );
}

#[test]
fn readers_share_one_snapshot_while_it_is_fresh() {
    let world = world(BOUNDS);
    let readers: Vec<_> = (0..6)
        .map(|_| std::thread::spawn(move || call(world.address, "GET", "/status").status))
        .collect();
    let request = world
        .requests
        .recv_timeout(Duration::from_secs(10))
        .unwrap();
    let control = Control::new(fixture::names(), 1, Now::from_nanos(0));
    request.answer(control.snapshot(Now::from_nanos(0)));
    for reader in readers {
        assert_eq!(reader.join().unwrap(), 200);
    }
    assert!(world.requests.is_empty(), "one question answered all");
    world.handle.stop();
}

#[test]
fn a_control_that_does_not_answer_costs_503_and_nothing_else() {
    let bounds = Bounds {
        fresh: Duration::ZERO,
        ..BOUNDS
    };
    let world = world(bounds);
    let asked = Instant::now();
    let late = call(world.address, "GET", "/status");
    assert_eq!((late.status, code(&late).as_str()), (503, "status_late"));
    assert!(asked.elapsed() >= bounds.deadline);
    // The question still lies in the lane: the next asker does not queue another.
    let busy = call(world.address, "GET", "/status");
    assert_eq!((busy.status, code(&busy).as_str()), (503, "status_busy"));
    // While one waits, the rest of the endpoint answers at once.
    let stale = world.requests.recv().unwrap();
    let waiting = std::thread::spawn(move || call(world.address, "GET", "/status").status);
    let fresh = world
        .requests
        .recv_timeout(Duration::from_secs(10))
        .unwrap();
    assert_eq!(call(world.address, "GET", "/healthz").status, 200);
    let control = Control::new(fixture::names(), 1, Now::from_nanos(0));
    stale.answer(control.snapshot(Now::from_nanos(0))); // nobody listens any more
    fresh.answer(control.snapshot(Now::from_nanos(0)));
    assert_eq!(waiting.join().unwrap(), 200);
    drop(world.requests);
    let stopped = call(world.address, "GET", "/status");
    assert_eq!(
        (stopped.status, code(&stopped).as_str()),
        (503, "status_stopped")
    );
    world.handle.stop();
}

#[test]
fn connections_are_few_and_none_is_idle_for_long() {
    let bounds = Bounds {
        connections: 2,
        idle: Duration::from_millis(400),
        ..BOUNDS
    };
    let world = world(bounds);
    // Two connections hold every place: one sends half a head, one nothing.
    let mut half = connect(world.address);
    half.write_all(b"GET /healthz HTT").unwrap();
    let mut mute = connect(world.address);
    let begun = Instant::now();
    // The third is served once they are closed for their silence, and not before.
    assert_eq!(call(world.address, "GET", "/healthz").status, 200);
    assert!(begun.elapsed() >= bounds.idle / 2, "{:?}", begun.elapsed());
    let mut rest = Vec::new();
    for idle in [&mut half, &mut mute] {
        let _reset = idle.read_to_end(&mut rest);
    }
    world.handle.stop();
}

#[test]
fn a_stopped_endpoint_gives_its_address_back() {
    let world = world(BOUNDS);
    let mut open = connect(world.address);
    open.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        .unwrap();
    assert!(open.read(&mut [0; 512]).unwrap() > 0, "kept alive");
    let taken = bind(world.address).unwrap_err();
    let text = taken.to_string();
    assert!(
        text.contains(&world.address.to_string()) && text.contains("in use"),
        "{text}"
    );
    world.handle.stop();
    assert_eq!(
        open.read(&mut [0; 512]).unwrap_or(0),
        0,
        "closed with the endpoint"
    );
    bind(world.address).unwrap();
}
