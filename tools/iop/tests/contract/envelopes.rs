//! Envelopes that must not be, in every state of a connection that may meet them.
use iop_proto::framing::MessageType;
use iop_proto::limits::{ENVELOPE_TO_EDGE_BYTES_MAX, REPLIES_PER_SESSION_MAX};

use crate::kit::{
    EVENT, FRAME, Kill, World, bytes_field, catalog, entry, event, expect_accepted, expect_nothing,
    expect_ready, int_field, prefixed, ready, register, sealed, varint,
};
use crate::support::{Node, chat, envelope_with};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Identified,
    Pending,
    Ready,
}

const STATES: [State; 3] = [State::Identified, State::Pending, State::Ready];

fn in_state(world: &World, state: State) -> Node {
    match state {
        State::Identified => Node::connect(&world.edge, "n1"),
        State::Pending => {
            let mut node = Node::connect(&world.edge, "n1");
            node.send(&register("n1"));
            expect_accepted(&mut node);
            node
        }
        State::Ready => world.node("n1"),
    }
}

/// Sends `bytes` in each state and expects the close for `reason`; then the node is served again.
fn expect_closed_in_every_state(world: &World, what: &str, bytes: &[u8], reason: &str) {
    let seen = |world: &World| world.edge.metrics().reason(reason);
    for state in STATES {
        let before = seen(world);
        let mut node = in_state(world, state);
        node.send_bytes(bytes);
        node.expect_closed();
        drop(node);
        world
            .edge
            .wait_metrics(what, |now| now.reason(reason) > before);
        assert_eq!(seen(world), before + 1.0, "{what}, {state:?}");
    }
}

fn serves_afterwards(world: World) {
    let mut node = world.node("n1");
    world.serves(&mut node, "m1");
    drop(node);
    world.rest();
}

#[test]
fn broken_framing_closes_the_connection_in_every_state() {
    let world = World::new(&catalog([4, 4], ""));
    let too_long = (ENVELOPE_TO_EDGE_BYTES_MAX + 1).to_be_bytes();
    let mut beyond_its_end = bytes_field(3, b"iop.transport.Ping");
    beyond_its_end.extend([4 << 3 | 2, 9, 8]); // a payload of 9 bytes, 1 there
    let cases: [(&str, Vec<u8>, &str); 8] = [
        ("length zero", vec![0; 4], "envelope_empty"),
        ("one over the limit", too_long.to_vec(), "envelope_too_long"),
        ("every bit set", vec![0xff; 64], "envelope_too_long"),
        (
            "garbage of legal length",
            prefixed(&[0xff; 32]),
            "envelope_malformed",
        ),
        (
            "a field beyond the end",
            prefixed(&beyond_its_end),
            "envelope_malformed",
        ),
        (
            "a number without end",
            prefixed(&[0x08, 0x80, 0x80]),
            "envelope_malformed",
        ),
        (
            "field number 0",
            prefixed(&[0x02, 0x00]),
            "envelope_malformed",
        ),
        ("wire type 7", prefixed(&[0x0f, 0x00]), "envelope_malformed"),
    ];
    for (what, bytes, reason) in cases {
        expect_closed_in_every_state(&world, what, &bytes, reason);
    }
    serves_afterwards(world);
}

/// Proves, [R-095].
#[test]
fn r088_what_only_an_edge_may_send_closes_the_connection_in_every_state() {
    let world = World::new(&catalog([4, 4], ""));
    let of_the_edge = MessageType::ALL.iter().filter(|kind| !kind.from_node());
    let mut kinds = 0;
    for kind in of_the_edge {
        let bytes = sealed(kind.name(), b"");
        expect_closed_in_every_state(&world, kind.name(), &bytes, "envelope_wrong_direction");
        kinds += 1;
    }
    assert_eq!(kinds, 8);
    serves_afterwards(world);
}

/// Proves [D-51].
#[test]
fn d51_invalid_utf8_in_a_known_string_is_undecodable() {
    let world = World::new(&catalog([4, 4], ""));
    let bad = b"\xc3\x28";
    let in_field = |name, number| sealed(name, &bytes_field(number, bad));
    let type_name = prefixed(&[bytes_field(3, bad), bytes_field(4, b"")].concat());
    expect_closed_in_every_state(&world, "Envelope.type", &type_name, "envelope_malformed");
    for (what, bytes) in [
        (
            "RegisterRequest.node_id",
            in_field("iop.RegisterRequest", 1),
        ),
        ("RegisterRequest.token", in_field("iop.RegisterRequest", 2)),
        (
            "RegisterRequest.node_version",
            in_field("iop.RegisterRequest", 3),
        ),
        (
            "NodeReadyRequest.node_id",
            in_field("iop.NodeReadyRequest", 1),
        ),
    ] {
        expect_closed_in_every_state(&world, what, &bytes, "envelope_malformed");
    }
    let metadata = bytes_field(10, &entry("\u{fffd}", bad));
    for (what, bytes) in [
        ("frame run_id", in_field(FRAME, 1)),
        ("frame error", in_field(FRAME, 8)),
        ("frame metadata", sealed(FRAME, &metadata)),
        ("event run_id", in_field(EVENT, 1)),
        ("event type", in_field(EVENT, 2)),
        ("event delta", in_field(EVENT, 3)),
        ("command error", in_field("iop.NodeCommandResponse", 3)),
        (
            "refresh message",
            in_field("iop.NodeConfigRefreshResponse", 3),
        ),
    ] {
        for state in [State::Pending, State::Ready] {
            let before = world.edge.metrics().reason("envelope_malformed");
            let mut node = in_state(&world, state);
            node.send_bytes(&bytes);
            node.expect_closed();
            let seen = |now: &crate::support::Metrics| now.reason("envelope_malformed");
            let after = world.edge.wait_metrics(what, |now| seen(now) > before);
            assert_eq!(seen(&after), before + 1.0, "{what}, {state:?}");
        }
    }
    // The same bytes where any are allowed: a header's value.
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", false));
    let run = node.tunnel().run_id;
    let header = bytes_field(6, &entry("x-latin", b"caf\xe9"));
    let fields = [
        bytes_field(1, run.as_bytes()),
        int_field(3, 1),
        int_field(4, 1),
    ];
    let start = [&fields.concat()[..], &int_field(5, 200), &header].concat();
    node.send_bytes(&sealed(FRAME, &start));
    let end = [
        bytes_field(1, run.as_bytes()),
        int_field(3, 3),
        int_field(4, 2),
    ]
    .concat();
    node.send_bytes(&sealed(FRAME, &end));
    let head = client.head().expect("an answer");
    assert_eq!(head.header("x-latin"), Some("caf\u{e9}"));
    assert_eq!(client.body(&head), (Vec::new(), true));
    drop((node, client));
    world.rest();
}

/// Proves [D-01].
#[test]
fn d01_a_known_message_in_the_wrong_state_follows_the_table() {
    let world = World::new(&catalog([4, 4], ""));
    let nobody = "0".repeat(32);
    let messages = [
        ("frame", sealed(FRAME, &bytes_field(1, nobody.as_bytes()))),
        ("event", event(&nobody, "complete")),
        ("command response", sealed("iop.NodeCommandResponse", b"")),
        (
            "refresh response",
            sealed("iop.NodeConfigRefreshResponse", b""),
        ),
        ("go away", sealed("iop.transport.GoAway", b"")),
        (
            "features",
            sealed("iop.transport.Features", &int_field(1, 0)),
        ),
    ];
    for (row, (what, bytes)) in messages.iter().enumerate() {
        let mut node = in_state(&world, State::Identified);
        node.send_bytes(bytes);
        node.expect_closed();
        world.saw("envelope_wrong_state", u32::try_from(row).expect("few") + 1);

        let mut node = in_state(&world, State::Pending);
        node.send_bytes(bytes);
        expect_nothing(&mut node);
        node.send(&ready("n1"));
        expect_ready(&mut node, true);
        world.serves(&mut node, "only1");
        if *what != "go away" {
            node.send_bytes(bytes);
            expect_nothing(&mut node);
            world.serves(&mut node, "only1");
        }
    }
    // A run that never was: dropped while pending, a violation of a ready node.
    assert_eq!(world.violations(), 2.0);
    world.saw("envelope_wrong_state", 6);
    serves_afterwards(world);
}

#[test]
fn an_unknown_type_is_a_violation_before_registration_and_ignored_after() {
    let world = World::new(&catalog([4, 4], ""));
    let unknown = sealed("iop.SomethingNewer", b"\x01\x02\xff");
    let mut node = in_state(&world, State::Identified);
    node.send_bytes(&unknown);
    node.expect_closed();
    world.saw("envelope_unknown", 1);
    for (row, state) in [State::Pending, State::Ready].into_iter().enumerate() {
        let mut node = in_state(&world, state);
        node.send_bytes(&unknown);
        node.send_bytes(&sealed("", b""));
        expect_nothing(&mut node);
        let ignored = 2 * (u32::try_from(row).expect("two") + 1);
        world.wait("iop_edge_envelopes_ignored_total", ignored);
        if state == State::Ready {
            world.serves(&mut node, "m1");
        }
    }
    world.saw("envelope_unknown", 1);
    serves_afterwards(world);
}

#[test]
fn an_envelope_cut_short_by_the_peer_is_the_peers_close() {
    let world = World::new(&catalog([4, 4], ""));
    let whole = envelope_with(&register("n1"), 1);
    let mut closed = 0;
    for state in STATES {
        for at in [1, 3, 4, 5, whole.len() - 1] {
            let mut node = in_state(&world, state);
            node.send_bytes(&whole[..at]);
            Kill::Fin.node(node);
            closed += 1;
            world.saw("peer_closed", closed);
        }
    }
    serves_afterwards(world);
}

/// Field order, unknown fields and repeated fields are the encoder's freedom.
#[test]
fn an_envelope_in_any_order_with_fields_of_tomorrow_is_understood() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = Node::connect(&world.edge, "n1");
    let group = [varint(40 << 3 | 3), int_field(1, 5), varint(40 << 3 | 4)].concat();
    let tomorrow = [
        int_field(31, u64::MAX),
        [varint(32 << 3 | 1), vec![7; 8]].concat(),
        [varint(33 << 3 | 5), vec![7; 4]].concat(),
        bytes_field(34, b"\xff\x00"),
        group,
    ]
    .concat();
    let payload = [
        &tomorrow[..],
        &bytes_field(1, b"n9"),
        &bytes_field(1, b"n1"),
    ]
    .concat();
    let backwards = [
        &bytes_field(4, &payload)[..],
        &bytes_field(3, b"iop.NodeReadyRequest"),
        &tomorrow,
        &bytes_field(3, b"iop.RegisterRequest"),
        &int_field(2, 3),
        &int_field(1, 8),
    ]
    .concat();
    node.send_bytes(&prefixed(&backwards));
    expect_accepted(&mut node);
    assert_eq!(node.reply_to, 8);
    let payload = [&bytes_field(1, b"n1")[..], &tomorrow].concat();
    let backwards = [
        bytes_field(4, &payload),
        int_field(1, 9),
        bytes_field(3, b"iop.NodeReadyRequest"),
    ];
    node.send_bytes(&prefixed(&backwards.concat()));
    expect_ready(&mut node, true);
    assert_eq!(node.reply_to, 9);
    world.serves(&mut node, "m1");
    drop(node);
    world.rest();
}

#[test]
fn more_requests_than_answers_may_be_owed_close_the_connection_and_no_fewer() {
    let world = World::new(&catalog([4, 4], ""));
    let asked = |count: u32| -> Vec<u8> {
        (1..=count)
            .flat_map(|id| envelope_with(&register("n1"), u64::from(id)))
            .collect()
    };
    let mut node = Node::connect(&world.edge, "n1");
    node.send_bytes(&asked(REPLIES_PER_SESSION_MAX));
    for id in 1..=REPLIES_PER_SESSION_MAX {
        expect_accepted(&mut node);
        assert_eq!(node.reply_to, u64::from(id));
    }
    node.send_bytes(&asked(REPLIES_PER_SESSION_MAX + 1));
    node.expect_closed();
    world.saw("reply_flood", 1);
    drop(node);
    serves_afterwards(world);
}
