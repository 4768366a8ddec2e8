//! How far a node may be ahead of its clients, if it said that it paces itself.
use std::io::Read;
use std::time::{Duration, Instant};

use iop_proto::domain::{Features, Message};
use iop_proto::limits::{WINDOW_FIRST_BYTES, WINDOW_LONGEST_BYTES};

use crate::kit::{Run, World, catalog, catalog_with, expect_error, expect_nothing, pending};
use crate::support::{Client, DEADLINE, Node, chat, post};

const PIECE: usize = 256 * 1024;
/// Of an answer: more than any socket holds.
const BYTES: u64 = 160 << 20;

fn says_that_it_paces(node: &mut Node, window: bool) {
    node.send(&Message::Features(Features { window }));
}

/// The next message is a Window of `run`: its bytes.
fn granted(node: &mut Node, run: &Run) -> u64 {
    match node.receive() {
        Message::Window(window) => {
            assert_eq!(window.run_id, run.id);
            window.bytes
        }
        other => panic!("expected Window, got {other:?}"),
    }
}

/// The byte at `at` of every answer here.
const fn byte(at: u64) -> u8 {
    (at / 7 % 251) as u8
}

/// A node that sends all it may of one answer.
struct Paced {
    run: Run,
    sent: u64,
    granted: u64,
}

impl Paced {
    fn begin(node: &mut Node) -> Self {
        let mut run = Run::asked(node);
        let granted = granted(node, &run);
        assert_eq!(granted, WINDOW_FIRST_BYTES, "the first one, at once");
        run.start(node, 200, &[("content-type", "application/octet-stream")]);
        Self {
            run,
            sent: 0,
            granted,
        }
    }

    /// Sends up to what is granted, and no more than `most` in all.
    fn send(&mut self, node: &mut Node, most: u64) {
        while self.sent < self.granted.min(most) {
            let left = self.granted.min(most) - self.sent;
            let bytes = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            let piece: Vec<u8> = (self.sent..self.sent + bytes as u64).map(byte).collect();
            self.run.body(node, &piece);
            self.sent += bytes as u64;
        }
    }

    /// What the Edge has granted since.
    fn hear(&mut self, seen: Vec<Message>) -> bool {
        let before = self.granted;
        for message in seen {
            let Message::Window(window) = message else {
                panic!("expected Window, got {message:?}");
            };
            assert_eq!(window.run_id, self.run.id);
            assert!(window.bytes > self.granted, "grants only grow");
            assert!(window.bytes <= self.sent + WINDOW_LONGEST_BYTES);
            self.granted = window.bytes;
        }
        self.granted > before
    }
}

/// Proves [D-06].
#[test]
fn d06_a_node_that_says_it_paces_itself_is_granted_bytes_and_no_other_is() {
    let world = World::new(&catalog([4, 4], ""));
    let (mut paced, mut other) = (world.node("n1"), world.node("n2"));
    says_that_it_paces(&mut paced, true);
    says_that_it_paces(&mut other, false);
    for _ in 0..2 {
        let mut client = world.asks(&chat("only1", false));
        let run = Run::asked(&mut paced);
        assert_eq!(granted(&mut paced, &run), WINDOW_FIRST_BYTES);
        expect_nothing(&mut paced);
        run.answers(&mut paced, &mut client);
        let mut client = world.asks(&chat("only2", false));
        let run = Run::asked(&mut other);
        expect_nothing(&mut other);
        run.answers(&mut other, &mut client);
    }
    drop((paced, other));
    world.rest();
}

/// A node whose grant is used up hears nothing until the client takes something, however long that is;
/// then it is granted the rest, and the client has every byte once.
///
/// Proves [D-06].
#[test]
fn d06_grants_follow_what_the_client_takes_and_its_slowness_is_not_the_nodes_silence() {
    let brief = "        response_wait_ms: 2000\n";
    let world = World::one_shard(&catalog_with([4, 4], brief, ""));
    let (mut node, mut other) = (world.node("n1"), world.node("n2"));
    says_that_it_paces(&mut node, true);
    let mut client = world.asks(&chat("only1", false));
    let mut paced = Paced::begin(&mut node);
    loop {
        paced.send(&mut node, BYTES);
        if !paced.hear(pending(&mut node)) && !paced.hear(pending(&mut node)) {
            break;
        }
    }
    assert!(
        paced.sent == paced.granted && paced.sent < BYTES,
        "it is shut"
    );
    let pool = "iop_edge_pool_used_bytes{pool=\"output\"}";
    let held = world.edge.metrics().get(pool);
    assert!(held > 0.0 && held <= (WINDOW_LONGEST_BYTES + WINDOW_FIRST_BYTES) as f64);
    // A silent node is found out meanwhile.
    let mut waits = world.asks(&chat("only2", false));
    let silent = Run::asked(&mut other);
    expect_error(&mut waits, 504, "response_timeout", "edge");
    let mut reader = Reader::new(&mut client);
    while paced.sent < BYTES {
        reader.take();
        paced.hear(pending(&mut node));
        paced.send(&mut node, BYTES);
    }
    paced.run.end(&mut node);
    assert_eq!(reader.rest(), BYTES);
    drop((node, other, waits, client, silent));
    world.rest();
}

/// A client that compares what it takes.
struct Reader<'c> {
    client: &'c mut Client,
    taken: u64,
}

impl<'c> Reader<'c> {
    fn new(client: &'c mut Client) -> Self {
        assert_eq!(client.head().expect("an answer").status, 200);
        Self { client, taken: 0 }
    }

    /// One chunk; `false`: that was the last one.
    fn take(&mut self) -> bool {
        let chunk = self.client.chunk().expect("a chunk");
        let right = (self.taken..)
            .zip(&chunk)
            .all(|(at, &seen)| seen == byte(at));
        assert!(right, "bytes changed on the way");
        self.taken += chunk.len() as u64;
        !chunk.is_empty()
    }

    fn rest(mut self) -> u64 {
        while self.take() {}
        self.taken
    }
}

/// A grant that a node does not hear, because it does not read, is the node's fault and no client's.
#[test]
fn d06_a_client_that_has_all_is_not_held_up_by_a_node_that_does_not_read() {
    let brief = "        response_wait_ms: 2000\n";
    let world = World::one_shard(&catalog_with([4, 4], brief, ""));
    let mut node = world.node("n1");
    says_that_it_paces(&mut node, true);
    let mut client = world.asks(&chat("only1", false));
    let mut paced = Paced::begin(&mut node);
    // More than any socket holds, and the node reads nothing of it.
    let padding = "x".repeat(30 << 20);
    let body = format!("{{\"model\":\"only1\",\"prompt\":\"{padding}\"}}");
    let uploading = world.asks(&post("/v1/completions", &body));
    world.wait("iop_edge_runs", 2);
    paced.send(&mut node, BYTES);
    let mut reader = Reader::new(&mut client);
    while reader.taken < paced.sent {
        reader.take();
    }
    let aborted = "iop_edge_responses_aborted_total";
    let seen = world
        .edge
        .wait_metrics("its end", |seen| seen.get(aborted) == 1.0);
    assert_eq!(seen.reason("client_too_slow"), 0.0);
    assert!(seen.reason("response_timeout") >= 1.0);
    assert!(
        client.chunk().is_none(),
        "a clean end hides a truncated body"
    );
    drop((node, client, uploading));
    world.rest();
}

/// It holds a slot of its provider: whoever takes next to nothing is not waited for.
///
/// Proves [D-06].
#[test]
fn d06_a_paced_client_that_trickles_is_ended_as_too_slow() {
    let world = World::one_shard(&catalog([4, 4], "timeouts:\n  write_stall_ms: 1000\n"));
    let mut node = world.node("n1");
    says_that_it_paces(&mut node, true);
    let mut trickling = Client::narrow(&world.edge);
    trickling.send(&chat("only1", false));
    let mut paced = Paced::begin(&mut node);
    while paced.hear(pending(&mut node)) || paced.sent < paced.granted {
        paced.send(&mut node, BYTES);
    }
    assert!(paced.sent < BYTES, "it is shut");
    let began = Instant::now();
    let mut cancelled = false;
    while !cancelled {
        assert!(began.elapsed() < DEADLINE, "it is still waited for");
        // The pace of the client; nothing is waited for here.
        std::thread::sleep(Duration::from_millis(20));
        let _ended = trickling.stream.read(&mut [0; 2_048]);
        let (cancels, windows) = pending(&mut node)
            .into_iter()
            .partition(|message| matches!(message, Message::CancelRequest(_)));
        cancelled = !Vec::<Message>::is_empty(&cancels);
        if !cancelled && paced.hear(windows) {
            paced.send(&mut node, BYTES);
        }
    }
    let took = began.elapsed();
    assert!(
        took > Duration::from_millis(2_500),
        "progress counts: {took:?}"
    );
    world.saw("client_too_slow", 1);
    paced.run.error(&mut node, "cancelled");
    let mut client = world.asks(&chat("only1", false));
    let run = Run::asked(&mut node);
    assert_eq!(granted(&mut node, &run), WINDOW_FIRST_BYTES);
    run.answers(&mut node, &mut client);
    drop((node, trickling, client));
    world.rest();
}
