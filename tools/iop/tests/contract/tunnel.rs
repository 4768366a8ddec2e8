//! The ordered answer of one run: what its form must be, and who pays when it is not.
use iop_proto::domain::{FrameKind, Usage};
use iop_proto::view::TunnelFrameOut;

use crate::kit::{
    FRAME, Run, SSE, World, bytes_field, catalog, entry, event, expect_cancel, expect_error,
    expect_error_event, expect_nothing, frame_bytes, int_field, sealed, varint,
};
use crate::support::{Client, Node, chat};

const EVENT_1: &[u8] = b"data: 1\n\n";
const USAGE: Usage = Usage {
    prompt_tokens: 3,
    completion_tokens: 4,
    total_tokens: 7,
};

/// What the violation is: a frame that is no terminal, or the run's last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offence {
    Frame,
    Terminal,
}

struct Case {
    what: &'static str,
    /// The answer has begun, with one event, before the offence.
    begun: bool,
    offence: Offence,
    /// The bytes of the offence; `next` is the sequence that would be right.
    bytes: fn(&Run) -> Vec<u8>,
}

const fn case(
    what: &'static str,
    begun: bool,
    offence: Offence,
    bytes: fn(&Run) -> Vec<u8>,
) -> Case {
    Case {
        what,
        begun,
        offence,
        bytes,
    }
}

fn body_at(run: &Run, sequence: u64) -> Vec<u8> {
    frame_bytes(&TunnelFrameOut::body(&run.id, sequence, b"data: never\n\n"))
}

fn start_at(run: &Run, sequence: u64) -> Vec<u8> {
    frame_bytes(&TunnelFrameOut::response_start(&run.id, sequence, 200, &[]))
}

const CASES: [Case; 18] = [
    case("a gap", true, Offence::Frame, |run| {
        body_at(run, run.next + 1)
    }),
    case("a repeat", true, Offence::Frame, |run| {
        body_at(run, run.next - 1)
    }),
    case("back to the first", true, Offence::Frame, |run| {
        body_at(run, 1)
    }),
    case("the last number there is", true, Offence::Frame, |run| {
        body_at(run, u64::MAX)
    }),
    case("a second head", true, Offence::Frame, |run| {
        start_at(run, run.next)
    }),
    case("a usage out of order", true, Offence::Frame, |run| {
        run.bare(FrameKind::Usage, 9)
    }),
    case(
        "an unknown kind out of order",
        true,
        Offence::Frame,
        |run| run.bare(FrameKind::Unknown(77), 9),
    ),
    case("a delta of the other family", true, Offence::Frame, |run| {
        event(&run.id, "delta")
    }),
    case("an event nobody knows", true, Offence::Frame, |run| {
        event(&run.id, "progress")
    }),
    case("a head that begins with 2", false, Offence::Frame, |run| {
        start_at(run, 2)
    }),
    case("a body before the head", false, Offence::Frame, |run| {
        body_at(run, 1)
    }),
    case(
        "a start of the other family",
        false,
        Offence::Frame,
        |run| event(&run.id, "start"),
    ),
    case("an end before the head", false, Offence::Terminal, |run| {
        run.bare(FrameKind::End, 1)
    }),
    case("an end after a gap", true, Offence::Terminal, |run| {
        run.bare(FrameKind::End, run.next + 1)
    }),
    case("an error after a gap", true, Offence::Terminal, |run| {
        frame_bytes(&TunnelFrameOut::error(
            &run.id,
            run.next + 1,
            "provider unreachable",
        ))
    }),
    case(
        "complete of the other family",
        true,
        Offence::Terminal,
        |run| event(&run.id, "complete"),
    ),
    case(
        "error of the other family",
        true,
        Offence::Terminal,
        |run| event(&run.id, "error"),
    ),
    case(
        "cancelled of the other family",
        false,
        Offence::Terminal,
        |run| event(&run.id, "cancelled"),
    ),
];

/// Proves, [R-107], [R-092], [R-161], [R-162], [D-41], [S-68].
#[test]
fn a29_a_stream_that_breaks_its_form_fails_alone_and_its_lease_waits_for_the_terminal() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    for (row, case) in CASES.iter().enumerate() {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        // Whoever waits shows whether the one slot is free.
        let mut waiting = world.asks(&chat("only1", true));
        world.wait_queued(1);
        let head = case.begun.then(|| begin(&mut run, &mut node, &mut client));
        node.send_bytes(&(case.bytes)(&run));
        match head {
            Some(head) => expect_error_event(&mut client, &head, b"", "stream_violation"),
            None => drop(expect_error(&mut client, 502, "stream_violation", "node")),
        }
        if case.offence == Offence::Frame {
            expect_cancel(&mut node, &run);
            // What still comes is dropped, and is no violation again.
            run.next += 2;
            expect_nothing(&mut node);
            node.send_bytes(&run.bare(FrameKind::Error, run.next));
        }
        let mut next = Run::asked(&mut node); // and no CancelRequest before it
        next.sse(&mut node);
        next.end(&mut node);
        let head = waiting.head().expect("its turn");
        assert_eq!(waiting.body(&head), (Vec::new(), true), "{}", case.what);
        let offences = u32::try_from(row).expect("few") + 1;
        world.saw("stream_violation", offences);
        world.wait_held(0);
    }
    world.serves(&mut node, "only1");
    let seen = world.edge.metrics();
    assert_eq!(
        seen.get("iop_edge_node_fences_total"),
        0.0,
        "the connection stayed"
    );
    drop(node);
    world.rest();
}

/// Head and first event, seen by the client.
fn begin(run: &mut Run, node: &mut Node, client: &mut Client) -> crate::support::Head {
    run.sse(node);
    run.body(node, EVENT_1);
    let head = client.head().expect("the answer begins");
    assert_eq!(client.at_least(EVENT_1.len()), EVENT_1);
    head
}

/// Proves, [R-106], [R-105].
#[test]
fn r106_numbers_may_start_at_0_or_1_and_what_is_only_observed_changes_no_byte() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    for first in [0, 1] {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.next = first;
        run.sse(&mut node);
        run.body(&mut node, b"data: \xff\xfe {\"a\" :1}\n\n");
        node.frame(&TunnelFrameOut::usage(&run.id, run.next, USAGE));
        run.next += 1;
        node.send_bytes(&run.bare(FrameKind::Unknown(9), run.next));
        run.next += 1;
        // A frame with metadata, a usage and an error text beside its body.
        let fields = [
            bytes_field(1, run.id.as_bytes()),
            int_field(3, 2),
            int_field(4, run.next),
            bytes_field(7, b"data: 2\n\n"),
            bytes_field(8, b"observed"),
            bytes_field(9, &int_field(1, 5)),
            bytes_field(10, &entry("observed", b"too")),
        ];
        node.send_bytes(&sealed(FRAME, &fields.concat()));
        run.next += 1;
        run.body(&mut node, b"");
        let mut end = TunnelFrameOut::end(&run.id, run.next);
        end.usage = Some(USAGE);
        node.frame(&end);
        let head = client.head().expect("an answer");
        let (body, whole) = client.body(&head);
        assert_eq!(body, b"data: \xff\xfe {\"a\" :1}\n\ndata: 2\n\n");
        assert!(whole);
    }
    assert_eq!(world.violations(), 0.0);
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r109_after_the_terminal_nothing_of_a_run_counts_again() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let late = [
        FrameKind::End,
        FrameKind::Error,
        FrameKind::ResponseStart,
        FrameKind::Body,
    ];
    for (row, kind) in late.into_iter().chain([FrameKind::Usage]).enumerate() {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        let mut waiting = world.asks(&chat("only1", true));
        world.wait_queued(1);
        let head = begin(&mut run, &mut node, &mut client);
        // The terminal and what follows it, in one record.
        let both = [
            run.bare(FrameKind::End, run.next),
            run.bare(kind, run.next + 1),
        ];
        node.send_bytes(&both.concat());
        assert_eq!(client.body(&head), (Vec::new(), true));
        let mut next = Run::asked(&mut node);
        // And again while its slot has another tenant.
        node.send_bytes(&run.bare(kind, run.next + 1));
        let second = world.asks(&chat("only1", true));
        world.wait_queued(1);
        expect_nothing(&mut node);
        let head = begin(&mut next, &mut node, &mut waiting);
        next.end(&mut node);
        assert_eq!(waiting.body(&head), (Vec::new(), true));
        Run::asked(&mut node).error(&mut node, "node rejected");
        world.wait_held(0);
        assert_eq!(world.violations(), 2.0 * (row as f64 + 1.0), "{kind:?}");
        drop(second);
    }
    drop(node);
    world.rest();
}

#[test]
fn a_frame_of_nobodys_run_is_counted_and_the_connection_stays() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    let mut names = vec![
        String::new(),
        "0".repeat(32),
        "é".repeat(16),
        "x".repeat(4000),
    ];
    names.push(run.id.to_uppercase());
    names.push(format!("{}0", run.id));
    names.push(run.id[..31].to_owned());
    // The right process, another slot; the right slot, another tenant.
    for at in [23, 31] {
        let mut id = run.id.clone().into_bytes();
        id[at] = if id[at] == b'7' { b'8' } else { b'7' };
        names.push(String::from_utf8(id).expect("ASCII"));
    }
    for name in &names {
        let nobody = Run {
            id: name.clone(),
            next: 1,
        };
        node.send_bytes(&nobody.bare(FrameKind::End, 1));
        node.send_bytes(&event(name, "complete"));
    }
    expect_nothing(&mut node);
    let seen = world.edge.metrics();
    let count = 2.0 * names.len() as f64;
    assert_eq!(seen.get("iop_edge_stream_violations_total"), count);
    assert_eq!(seen.get("iop_edge_frames_dropped_total"), count);
    let head = begin(&mut run, &mut node, &mut client);
    run.end(&mut node);
    assert_eq!(client.body(&head), (Vec::new(), true));
    drop((node, client));
    world.rest();
}

/// A hundred in a minute are borne, one more closes the session and fences its runs. `[D-41]`
#[test]
fn more_than_a_hundred_violations_close_the_session() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    let head = begin(&mut run, &mut node, &mut client);
    let nobody = Run {
        id: "0".repeat(32),
        next: 1,
    };
    let hundred = nobody.bare(FrameKind::Body, 1).repeat(100);
    node.send_bytes(&hundred);
    expect_nothing(&mut node);
    run.body(&mut node, EVENT_1);
    assert_eq!(client.at_least(EVENT_1.len()), EVENT_1);
    node.send_bytes(&nobody.bare(FrameKind::Body, 1));
    expect_error_event(&mut client, &head, b"", "node_lost");
    node.expect_closed();
    world.saw("violations_too_many", 1);
    world.wait("iop_edge_node_fences_total", 1);
    let mut next = world.node("n1");
    world.serves(&mut next, "only1");
    drop((node, next, client));
    world.rest();
}

// ── encodings ────────────────────────────────────────────────────────────────────────────────────

/// Start, two bodies, end, each with its fields and its envelope's backwards and among unknown
/// ones.
fn backwards(run: &Run) -> Vec<u8> {
    let tomorrow = [
        int_field(90, 1),
        bytes_field(91, b"\xff"),
        varint(92 << 3 | 3),
        { varint(92 << 3 | 4) },
    ]
    .concat();
    let frame = |kind: u64, sequence: u64, rest: &[u8]| {
        let payload = [
            rest,
            &tomorrow,
            &int_field(4, 99),
            &int_field(4, sequence),
            &int_field(3, kind),
            &bytes_field(1, b"another"),
            &bytes_field(1, run.id.as_bytes()),
        ]
        .concat();
        let envelope = [
            &bytes_field(4, &payload)[..],
            &tomorrow,
            &bytes_field(3, FRAME.as_bytes()),
        ];
        crate::kit::prefixed(&envelope.concat())
    };
    let header = bytes_field(6, &entry(SSE[0].0, SSE[0].1.as_bytes()));
    let start = [header, int_field(5, 418), int_field(5, 200)].concat();
    let body = |text: &[u8]| bytes_field(7, text);
    [
        frame(1, 1, &start),
        frame(2, 2, &body(EVENT_1)),
        frame(2, 3, &[body(b"data: dropped\n\n"), body(EVENT_1)].concat()),
        frame(3, 4, b""),
    ]
    .concat()
}

#[test]
fn the_same_answer_in_any_encoding_and_any_records_is_the_same_answer() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    type Way = (&'static str, fn(&mut Node, &[u8]));
    let ways: [Way; 3] = [
        ("all in one record", |node, bytes| node.send_bytes(bytes)),
        ("one byte a record", |node, bytes| {
            for byte in bytes {
                node.send_bytes(std::slice::from_ref(byte));
            }
        }),
        ("seven bytes a record, all in one write", |node, bytes| {
            use std::io::Write;
            for piece in bytes.chunks(7) {
                node.stream.conn.writer().write_all(piece).expect("room");
                let mut records = Vec::new();
                while node.stream.conn.wants_write() {
                    node.stream
                        .conn
                        .write_tls(&mut records)
                        .expect("into memory");
                }
                node.stream
                    .sock
                    .write_all(&records)
                    .expect("the Edge reads");
            }
        }),
    ];
    for (what, send) in ways {
        let mut client = world.asks(&chat("only1", true));
        let run = Run::asked(&mut node);
        send(&mut node, &backwards(&run));
        let head = client.head().expect("an answer");
        assert_eq!(
            (head.status, head.header("content-type")),
            (200, Some("text/event-stream"))
        );
        assert_eq!(client.body(&head), (EVENT_1.repeat(2), true), "{what}");
    }
    assert_eq!(world.violations(), 0.0);
    drop(node);
    world.rest();
}

/// Many answers at once, their frames in one record: each client gets its own.
#[test]
fn interleaved_answers_in_one_record_reach_their_own_clients() {
    let world = World::new(&catalog([64, 4], ""));
    let mut node = world.node("n1");
    let mut clients: Vec<_> = (0..20).map(|_| world.asks(&chat("only1", true))).collect();
    let runs: Vec<_> = (0..20).map(|_| Run::asked(&mut node)).collect();
    let mut bytes = Vec::new();
    for run in &runs {
        let headers: &[(&[u8], &[u8])] = &[(b"x-run", run.id.as_bytes())];
        let start = TunnelFrameOut::response_start(&run.id, 1, 200, headers);
        bytes.extend(frame_bytes(&start));
    }
    for sequence in 2..5 {
        for run in &runs {
            let text = format!("{} {sequence}\n", run.id);
            bytes.extend(frame_bytes(&TunnelFrameOut::body(
                &run.id,
                sequence,
                text.as_bytes(),
            )));
        }
    }
    for run in &runs {
        bytes.extend(run.bare(FrameKind::End, 5));
    }
    node.send_bytes(&bytes);
    let mut answered = Vec::new();
    for client in &mut clients {
        let head = client.head().expect("an answer");
        let id = head.header("x-run").expect("which run").to_owned();
        let (body, whole) = client.body(&head);
        let expected = format!("{id} 2\n{id} 3\n{id} 4\n");
        assert_eq!(
            (String::from_utf8_lossy(&body).as_ref(), whole),
            (expected.as_str(), true)
        );
        answered.push(id);
    }
    answered.sort_unstable();
    answered.dedup();
    assert_eq!(answered.len(), 20);
    drop((node, clients));
    world.rest();
}

/// More heads than an answer may have: the run's own failure.
#[test]
fn a_head_that_no_client_could_be_given_fails_its_run_alone() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let many: Vec<_> = (0..129)
        .map(|row| (format!("x-{row}"), "v".to_owned()))
        .collect();
    let many: Vec<_> = many.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    type Case<'a> = (i32, &'a [(&'a str, &'a str)]);
    let cases: [Case<'_>; 6] = [
        (200, &many),
        (100, &[]),
        (0, &[]),
        (-1, &[]),
        (200, &[("content-length", "-1")]),
        (200, &[("content-length", "1"), ("content-length", "2")]),
    ];
    for (row, (status, headers)) in cases.into_iter().enumerate() {
        let mut client = world.asks(&chat("only1", false));
        let mut run = Run::asked(&mut node);
        run.start(&mut node, status, headers);
        expect_error(&mut client, 502, "response_malformed", "provider");
        expect_cancel(&mut node, &run);
        run.body(&mut node, b"dropped");
        run.error(&mut node, "cancelled");
        world.saw("response_malformed", u32::try_from(row).expect("few") + 1);
        world.wait_held(0);
    }
    assert_eq!(
        world.violations(),
        0.0,
        "the provider's doing, not the node's"
    );
    // As many as there may be, and as long.
    let long = "v".repeat(200_000);
    let mut most = many[..127].to_vec();
    most.push(("x-long", &long));
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &most);
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(
        (head.header("x-126"), head.header("x-long")),
        (Some("v"), Some(long.as_str()))
    );
    drop((node, client));
    world.rest();
}

/// A RESPONSE_START has a limit of its own; one more byte closes the session. `[D-02]`
#[test]
fn a_head_frame_over_its_limit_closes_the_session() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", false));
    let run = Run::asked(&mut node);
    let filled = |bytes: usize| {
        let fixed = [
            bytes_field(1, run.id.as_bytes()),
            int_field(3, 1),
            int_field(4, 1),
        ];
        let fixed = [fixed.concat(), int_field(5, 204)].concat();
        // Metadata is observed, so its length alone matters. Its key and lengths take 11 bytes.
        let filler = vec![b'm'; bytes - fixed.len() - 11];
        let filler = bytes_field(
            10,
            &[&[0x0a, 1, b'k'][..], &bytes_field(2, &filler)].concat(),
        );
        [fixed, filler].concat()
    };
    let at_limit = iop_proto::limits::RESPONSE_START_BYTES_MAX as usize;
    assert_eq!(filled(at_limit).len(), at_limit);
    node.send_bytes(&sealed(FRAME, &filled(at_limit)));
    assert_eq!(client.head().expect("an answer").status, 204);
    node.send_bytes(&run.bare(FrameKind::End, 2));
    drop(client);
    let mut client = world.asks(&chat("only1", false));
    let run = Run::asked(&mut node);
    let fixed = [
        bytes_field(1, run.id.as_bytes()),
        int_field(3, 1),
        int_field(4, 1),
    ]
    .concat();
    let filler = vec![b'm'; at_limit - fixed.len()];
    let over = [fixed, bytes_field(10, &bytes_field(2, &filler))].concat();
    node.send_bytes(&sealed(FRAME, &over));
    expect_error(&mut client, 503, "node_lost", "node");
    node.expect_closed();
    world.saw("envelope_too_long", 1);
    drop((node, client));
    world.rest();
}
