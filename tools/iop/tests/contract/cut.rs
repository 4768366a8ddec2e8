//! Long frames: forwarded while they arrive, assembled when they must be, refused when neither may
//! be.
use iop_proto::domain::FrameKind;
use iop_proto::limits::ASSEMBLED_BYTES_MAX;

use crate::kit::{
    FRAME, Run, World, bytes_field, catalog, expect_error_event, expect_nothing, int_field, noise,
    prefixed, sealed,
};
use crate::support::{Client, Head, Metrics, Node, chat};

/// A whole BODY frame around `body`, fields in the usual order, `tail` behind the body.
fn usual(run: &Run, body: &[u8], tail: &[u8]) -> Vec<u8> {
    let payload = [&frame_head(run)[..], &bytes_field(7, body), tail].concat();
    sealed(FRAME, &payload)
}

fn frame_head(run: &Run) -> Vec<u8> {
    [
        bytes_field(1, run.id.as_bytes()),
        int_field(3, 2),
        int_field(4, run.next),
    ]
    .concat()
}

/// The same with the body before whose it is.
fn body_first(run: &Run, body: &[u8]) -> Vec<u8> {
    sealed(FRAME, &[bytes_field(7, body), frame_head(run)].concat())
}

fn begin(world: &World, node: &mut Node) -> (Client, Run, Head) {
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(node);
    run.sse(node);
    let head = client.head().expect("the answer begins");
    (client, run, head)
}

/// Sends while the client reads: a body may be longer than every buffer between them.
fn exchange(node: &mut Node, client: &mut Client, head: &Head, bytes: &[u8]) -> (Vec<u8>, bool) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| client.body(head));
        let _closed = node.try_send_bytes(bytes);
        reader.join().expect("the reader ends")
    })
}

const KIB: usize = 1024;
/// Around a record, a block, a receive buffer, the assembled limit; and far beyond.
#[rustfmt::skip]
const LENGTHS: [usize; 23] = [
    1, 2, 100, 4_000, 16_000, 16_300, 16_383, 16_384, 16_385, 16_448, 16_600, 16_700, 32_768,
    65_535, 65_536, 65_700, 70_000, 131_072, 256 * KIB, KIB * KIB - 1, KIB * KIB, KIB * KIB + 1,
    5 * KIB * KIB,
];

/// Proves, [D-02].
#[test]
fn d02_bodies_of_every_length_arrive_byte_for_byte() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    for (row, &length) in LENGTHS.iter().enumerate() {
        let body = noise(length, 1 + row as u64);
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        let text = length.to_string();
        if row % 2 == 0 {
            run.start(&mut node, 200, &[("content-length", text.as_str())]);
        } else {
            run.sse(&mut node);
        }
        let head = client.head().expect("an answer");
        let bytes = [
            usual(&run, &body, b""),
            run.bare(FrameKind::End, run.next + 1),
        ]
        .concat();
        let (seen, whole) = exchange(&mut node, &mut client, &head, &bytes);
        assert!(whole && seen == body, "{length} bytes: {} came", seen.len());
    }
    in_two_pieces(&world, &mut node);
    let seen = world.edge.metrics();
    for path in ["in_place", "carried", "cut_through"] {
        let series = format!("iop_edge_envelopes_received_total{{path=\"{path}\"}}");
        assert!(seen.get(&series) > 0.0, "{path} was on the way");
    }
    assert_eq!(
        seen.get("iop_edge_envelopes_received_total{path=\"assembled\"}"),
        0.0
    );
    drop(node);
    world.rest();
}

/// A body shorter than a block whose second half comes when the first has arrived.
fn in_two_pieces(world: &World, node: &mut Node) {
    let body = noise(9_000, 99);
    let (mut client, mut run, head) = begin(world, node);
    let bytes = usual(&run, &body, b"");
    let came = |seen: &Metrics| seen.get("iop_edge_node_bytes_total{direction=\"in\"}");
    let before = came(&world.edge.metrics());
    node.send_bytes(&bytes[..5_000]);
    world
        .edge
        .wait_metrics("the first half", |seen| came(seen) >= before + 5_000.0);
    node.send_bytes(&bytes[5_000..]);
    run.next += 1;
    run.end(node);
    assert_eq!(client.body(&head), (body, true));
}

#[test]
fn a_body_before_its_run_id_is_assembled_up_to_the_limit_and_no_further() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let limit = ASSEMBLED_BYTES_MAX as usize;
    let (mut client, run, head) = begin(&world, &mut node);
    let mut last = noise(limit - body_first(&run, &[]).len(), 7);
    while body_first(&run, &last).len() > limit + 4 {
        last.pop();
    }
    assert_eq!(
        body_first(&run, &last).len(),
        limit + 4,
        "exactly at the limit"
    );
    for body in [noise(17_000, 5), noise(200_000, 6), last.clone()] {
        let (mut client, mut run, head) = begin(&world, &mut node);
        let bytes = body_first(&run, &body);
        run.next += 1;
        let bytes = [bytes, run.bare(FrameKind::End, run.next)].concat();
        let (seen, whole) = exchange(&mut node, &mut client, &head, &bytes);
        assert!(whole && seen == body, "{} bytes", body.len());
    }
    let seen = world.edge.metrics();
    assert!(seen.get("iop_edge_envelopes_received_total{path=\"assembled\"}") >= 1.0);
    last.push(0);
    let bytes = body_first(&run, &last);
    let (seen, whole) = exchange(&mut node, &mut client, &head, &bytes);
    assert!(whole, "an event stream");
    assert!(
        String::from_utf8_lossy(&seen).contains("node_lost"),
        "{} bytes",
        seen.len()
    );
    node.expect_closed();
    world.saw("envelope_too_long", 1);
    let mut next = world.node("n1");
    world.serves(&mut next, "only1");
    drop((node, next, client));
    world.rest();
}

/// Proves [S-69].
#[test]
fn s69_a_malformed_tail_aborts_the_run_closes_the_session_and_returns_each_lease_once() {
    let world = World::new(&catalog([4, 4], ""));
    let body = noise(100_000, 3);
    let tails: [(&str, Vec<u8>); 6] = [
        ("run_id again", bytes_field(1, b"0")),
        ("kind again", int_field(3, 2)),
        ("sequence again", int_field(4, 2)),
        ("body again", bytes_field(7, b"more")),
        ("bad UTF-8", bytes_field(8, b"\xff")),
        ("cut off", vec![8 << 3 | 2, 200]),
    ];
    for (row, (what, tail)) in tails.iter().enumerate() {
        let mut node = world.node("n1");
        let (mut other, _other_run, other_head) = begin(&world, &mut node);
        let (mut client, run, head) = begin(&world, &mut node);
        let bytes = usual(&run, &body, tail);
        let (seen, whole) = exchange(&mut node, &mut client, &head, &bytes);
        assert!(whole, "an event stream: {what}");
        let event = String::from_utf8_lossy(&seen[body.len()..]).into_owned();
        assert!(
            seen.starts_with(&body) && event.contains("stream_violation"),
            "{what}: {event}"
        );
        expect_error_event(&mut other, &other_head, b"", "node_lost");
        node.expect_closed();
        let rounds = u32::try_from(row).expect("few") + 1;
        world.wait("iop_edge_node_fences_total", rounds);
        world.saw("envelope_malformed", rounds);
        world.wait("iop_edge_leases_returned_total{by=\"fence\"}", 2 * rounds);
    }
    // The same tail where it may be: an observation, a field of tomorrow, the envelope's own ids.
    let mut node = world.node("n1");
    let (mut client, mut run, head) = begin(&world, &mut node);
    let tail = [
        bytes_field(8, b"observed"),
        int_field(90, 1),
        int_field(5, 200),
    ]
    .concat();
    let payload = [&frame_head(&run)[..], &bytes_field(7, &body), &tail].concat();
    let envelope = [
        bytes_field(3, FRAME.as_bytes()),
        bytes_field(4, &payload),
        int_field(1, 9),
    ];
    run.next += 1;
    let bytes = [
        prefixed(&envelope.concat()),
        run.bare(FrameKind::End, run.next),
    ]
    .concat();
    let (seen, whole) = exchange(&mut node, &mut client, &head, &bytes);
    assert!(whole && seen == body);
    drop((node, client));
    world.rest();
}

/// A long body that nobody waits for any more is read past, and its session goes on.
#[test]
fn a_long_body_out_of_order_or_of_nobody_is_dropped_whole() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let body = noise(300_000, 4);
    let nobody = Run {
        id: "0".repeat(32),
        next: 1,
    };
    node.send_bytes(&usual(&nobody, &body, b""));
    expect_nothing(&mut node);
    let (mut client, mut run, head) = begin(&world, &mut node);
    run.next += 1; // a gap
    node.send_bytes(&usual(&run, &body, b""));
    expect_error_event(&mut client, &head, b"", "stream_violation");
    crate::kit::expect_cancel(&mut node, &run);
    assert_eq!(world.violations(), 2.0);
    run.next += 1;
    node.send_bytes(&usual(&run, &body, b"")); // of a settled run: dropped, in order
    run.next += 1;
    node.send_bytes(&run.bare(FrameKind::Error, run.next));
    world.wait_held(0);
    assert_eq!(world.violations(), 2.0);
    world.serves(&mut node, "only1");
    drop((node, client));
    world.rest();
}

/// Assembly has a pool: the session that finds it dry is closed, and nobody else. `[D-02]`
#[test]
fn the_session_that_finds_the_assembly_pool_dry_is_closed() {
    let world = World::one_shard(&catalog([4, 4], "timeouts:\n  registration_ms: 60000\n"));
    let mut owner = world.node("n2");
    // The front part of a long message that is not cut through.
    let filler = vec![b'x'; 900_000];
    let long = sealed("iop.RegisterRequest", &bytes_field(3, &filler));
    let mut holders: Vec<_> = (0..16)
        .map(|row: u32| {
            let mut node = Node::connect(&world.edge, "n1");
            node.send_bytes(&long[..40_000]);
            let held = (row + 1) * ASSEMBLED_BYTES_MAX;
            world.wait("iop_edge_pool_used_bytes{pool=\"assembly\"}", held);
            node
        })
        .collect();
    let mut late = Node::connect(&world.edge, "n1");
    late.send_bytes(&long[..40_000]);
    late.expect_closed();
    world.saw("assembly_pool_full", 1);
    world.serves(&mut owner, "only2");
    // One finishes, and there is room again.
    let mut first = holders.remove(0);
    first.send_bytes(&long[40_000..]);
    assert!(!crate::kit::expect_rejected(&mut first).is_empty());
    first.expect_closed();
    let mut next = Node::connect(&world.edge, "n1");
    next.send_bytes(&long);
    crate::kit::expect_rejected(&mut next);
    drop((owner, holders, late, first, next));
    world.rest();
}
