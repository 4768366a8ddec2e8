//! Allocations of a real Edge under load, counted in its own process by thread role.
mod support;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use iop_proto::domain::{Message, RunEvent, RunEventKind};
use iop_proto::view::TunnelFrameOut;
use support::{CATALOG, Client, Edge, Metrics, Node, Setup, chat, envelope};

const STREAMS: usize = 16;
/// Frames before counting begins, and while it lasts.
const WARM_FRAMES: f64 = 20_000.0;
const COUNTED_FRAMES: f64 = 120_000.0;
const BODY: &[u8] = &[b'x'; 200];

fn hot_allocations(metrics: &Metrics) -> f64 {
    ["shard", "control"]
        .iter()
        .map(|role| metrics.labelled("iop_edge_heap_allocations_total", "role", role))
        .sum()
}

fn body_frames(metrics: &Metrics) -> f64 {
    metrics.get("iop_edge_frames_total{kind=\"body\"}")
}

/// Streams until told to stop, one BODY frame per run and round; then ends every run.
fn stream(mut node: Node, stop: &AtomicBool) {
    let runs: Vec<String> = (0..STREAMS).map(|_| node.tunnel().run_id).collect();
    for run in &runs {
        let headers: &[(&[u8], &[u8])] = &[(b"content-type", b"text/event-stream")];
        node.frame(&TunnelFrameOut::response_start(run, 1, 200, headers));
    }
    let mut sequence = 2;
    let mut bytes = vec![0; STREAMS * (BODY.len() + 256)];
    while !stop.load(Ordering::Relaxed) {
        let mut at = 0;
        for run in &runs {
            let frame = TunnelFrameOut::body(run, sequence, BODY);
            at += frame.encode(&mut bytes[at..]).expect("room");
        }
        sequence += 1;
        node.stream.write_all(&bytes[..at]).expect("the Edge reads");
    }
    for run in &runs {
        node.frame(&TunnelFrameOut::end(run, sequence));
    }
}

/// As `stream`, for normalized runs: one delta per run and round.
fn stream_runs(mut node: Node, stop: &AtomicBool) {
    let runs: Vec<String> = (0..STREAMS).map(|_| node.run().run_id).collect();
    let all = |kind: &RunEventKind, text: &str| {
        let event = |run: &String| {
            let mut event = RunEvent::new(run.clone(), kind.clone());
            text.clone_into(&mut event.delta);
            envelope(&Message::RunEvent(event))
        };
        runs.iter().flat_map(event).collect::<Vec<u8>>()
    };
    node.send_bytes(&all(&RunEventKind::Start, ""));
    let deltas = all(&RunEventKind::Delta, "a token \"or two\"\n");
    while !stop.load(Ordering::Relaxed) {
        node.stream.write_all(&deltas).expect("the Edge reads");
    }
    node.send_bytes(&all(&RunEventKind::Complete, ""));
}

/// Allocations on shard and control threads over at least `COUNTED_FRAMES` frames of steady streams
/// that `stream` sends, and how many frames those were.
fn measure(setup: &Setup, stream: fn(Node, &AtomicBool)) -> (f64, f64) {
    let edge = Edge::start(setup);
    let node = Node::ready(&edge, "n1");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..STREAMS {
            scope.spawn(|| {
                let mut client = Client::connect(&edge);
                client.send(&chat("m1", true));
                let head = client.head().expect("an answer");
                assert_eq!(head.status, 200);
                let (body, whole) = client.body(&head);
                let is_raw = body.len() % BODY.len() == 0;
                assert!(whole && (is_raw || body.ends_with(b"data: [DONE]\n\n")));
            });
        }
        scope.spawn(|| stream(node, &stop));
        let before = edge.wait_metrics("warm streams", |seen| body_frames(seen) >= WARM_FRAMES);
        let enough = body_frames(&before) + COUNTED_FRAMES;
        let after = edge.wait_metrics("counted streams", |seen| body_frames(seen) >= enough);
        stop.store(true, Ordering::Relaxed);
        let frames = body_frames(&after) - body_frames(&before);
        (hot_allocations(&after) - hot_allocations(&before), frames)
    })
}

#[test]
fn a_forwarded_frame_allocates_nothing_on_shard_and_control_threads() {
    let (allocations, frames) = measure(&Setup::default(), stream);
    assert!(frames >= COUNTED_FRAMES);
    assert_eq!(allocations, 0.0, "over {frames} frames");
}

#[test]
fn an_event_of_a_run_allocates_nothing_on_shard_and_control_threads() {
    let setup = Setup::with(&CATALOG.replace("openai_compat", "ollama"));
    let (allocations, events) = measure(&setup, stream_runs);
    assert!(events >= COUNTED_FRAMES);
    assert_eq!(allocations, 0.0, "over {events} events");
}

#[test]
fn a_planted_allocation_per_frame_is_seen() {
    let environment = vec![("IOP_TEST_ALLOC_PER_FRAME", "1")];
    let setup = Setup {
        environment,
        ..Setup::default()
    };
    let (allocations, frames) = measure(&setup, stream);
    // The two figures of one reading are some frames apart.
    let close = frames * 0.9;
    assert!(
        allocations >= close,
        "{allocations} allocations over {frames} frames"
    );
}

/// A reload in the middle of the streams: no shard allocates for it, and afterwards nobody does.
#[test]
fn a_reload_under_load_costs_shards_no_allocation_and_leaves_the_path_free_of_them() {
    let edge = Edge::start(&Setup::default());
    let node = Node::ready(&edge, "n1");
    let stop = AtomicBool::new(false);
    let of =
        |metrics: &Metrics, role| metrics.labelled("iop_edge_heap_allocations_total", "role", role);
    std::thread::scope(|scope| {
        for _ in 0..STREAMS {
            scope.spawn(|| {
                let mut client = Client::connect(&edge);
                client.send(&chat("m1", true));
                let head = client.head().expect("an answer");
                let (body, whole) = client.body(&head);
                assert!(head.status == 200 && whole && body.len() % BODY.len() == 0);
            });
        }
        scope.spawn(|| stream(node, &stop));
        let before = edge.wait_metrics("warm streams", |seen| body_frames(seen) >= WARM_FRAMES);
        for wait in 1..=3 {
            let catalog = format!(
                "{}timeouts:\n  queue_wait_ms: {wait}000\n",
                support::CATALOG
            );
            edge.reload(&catalog);
        }
        let reloaded = edge.metrics();
        assert_eq!(reloaded.get("iop_edge_config_reloads_total"), 3.0);
        let enough = body_frames(&reloaded) + COUNTED_FRAMES;
        let after = edge.wait_metrics("counted streams", |seen| body_frames(seen) >= enough);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(
            of(&after, "shard"),
            of(&before, "shard"),
            "reloads included"
        );
        assert_eq!(of(&after, "control"), of(&reloaded, "control"));
    });
}
