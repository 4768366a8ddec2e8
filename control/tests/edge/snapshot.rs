//! The read model: what is shown of nodes, providers and models.
use iop_control::edge::{Control, Health, Status};
use iop_control::step::Event;
use iop_proto::reason::Reason;

use crate::rig::{CHAT, World, node, session};

/// Proves, [R-283], [R-284].
#[test]
fn r284_an_offline_provider_shows_zeros_and_keeps_its_entry() {
    let mut rig = World::new(2)
        .provider(0, 4)
        .provider(1, 4)
        .model(&[0, 1])
        .rig();
    let offline = |rig: &crate::rig::Rig, when: &str| {
        let shown = rig.shown(0);
        assert_eq!(
            (shown.status, shown.health),
            (Status::Unavailable, Health::Offline),
            "{when}"
        );
        let figures = [
            shown.capacity,
            shown.in_flight,
            shown.queued,
            shown.long_context_capacity,
            shown.long_in_flight,
            shown.long_queued,
        ];
        assert_eq!(figures, [0; 6], "{when}");
        assert_eq!(shown.health_text(rig.control.names()), "offline");
        assert!(!rig.is_connected(0), "{when}");
    };
    rig.submit(1, 0);
    rig.submit_as(2, 0, CHAT, true, 10);
    offline(&rig, "never connected");
    rig.register(session(1), 0);
    offline(&rig, "pending");
    rig.ready(session(1), 0);
    let shown = rig.shown(0);
    assert_eq!(
        (shown.status, shown.health),
        (Status::Available, Health::Configured)
    );
    assert_eq!(shown.health_text(rig.control.names()), "healthy");
    assert_eq!(
        (shown.capacity, shown.in_flight, shown.long_in_flight),
        (4, 2, 1)
    );
    rig.close(session(1));
    offline(&rig, "disconnected");
    assert_eq!(rig.control.names().provider(shown.provider).id, "pv0");
}

/// Proves, [R-272], [R-273].
#[test]
fn r271_queued_counts_each_waiting_request_once_per_live_candidate() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0, 1, 0])
        .rig();
    rig.up(session(1), 0);
    rig.run(1, 0);
    for slot in 2..5 {
        rig.submit_as(slot, 0, CHAT, slot == 2, 10);
    }
    assert_eq!((rig.shown(0).queued, rig.shown(0).long_queued), (3, 1));
    assert_eq!(rig.shown(1).queued, 0, "not a live candidate");
    rig.up(session(2), 1);
    // Candidate pressure of both; each waits once.
    assert_eq!((rig.shown(0).queued, rig.shown(1).queued), (2, 2));
    assert_eq!(rig.waiting(), 2);
    let models = rig.control.snapshot(rig.now).models;
    assert_eq!(
        (
            models[0].queued,
            models[0].long_queued,
            models[0].queued_bytes
        ),
        (2, 0, 20)
    );
    rig.step(Event::GoAway {
        session: session(2),
    });
    assert_eq!(
        (rig.shown(0).queued, rig.shown(1).queued),
        (2, 0),
        "draining"
    );
}

/// A node that wakes with more to do than fits one step, and one that dies, which is one step: whoever
/// looks sees it whole, as it was or as it is. Proves [S-54].
#[test]
fn s54_a_snapshot_between_two_steps_shows_a_node_before_or_after_and_never_half() {
    const WAITING: u32 = 150;
    let world = (0..3).fold(World::new(1), |world, _| world.provider(0, 60));
    let mut rig = world.model(&[0, 1, 2]).rig();
    for slot in 1..=WAITING {
        rig.submit(slot, 0);
    }
    rig.register(session(1), 0);
    let now = rig.now;
    let look = |control: &Control| {
        let snapshot = control.snapshot(now);
        let node = &snapshot.nodes[0];
        let held: u32 = node.providers.iter().map(|shown| shown.in_flight).sum();
        assert_eq!(u64::from(held), snapshot.edge.leases_held);
        for shown in &node.providers {
            let is_up = node.connected;
            assert_eq!(shown.status == Status::Available, is_up);
            assert_eq!(shown.capacity, if is_up { 60 } else { 0 });
            let waiting = if is_up { WAITING - held } else { 0 };
            assert_eq!(shown.queued, waiting);
        }
        (node.connected, held)
    };
    assert_eq!(look(&rig.control), (false, 0));
    let claimed = Some(node(0));
    let wakes = Event::Ready {
        session: session(1),
        reply_to: 2,
        claimed,
    };
    let mut seen = Vec::new();
    rig.watch(wakes, |control, _| seen.push(look(control)));
    assert!(seen.len() > 3, "in several steps: {seen:?}");
    assert!(seen.iter().all(|shown| shown.0) && seen.is_sorted());
    assert_eq!(seen.last(), Some(&(true, WAITING)));
    let dies = Event::Closed {
        session: session(1),
        cause: Reason::PeerClosed,
    };
    rig.watch(dies, |control, _| assert_eq!(look(control), (false, 0)));
}

/// Proves, [R-281].
#[test]
fn r280_every_configured_node_is_listed_and_connected_only_when_ready() {
    let mut rig = World::new(3)
        .provider(0, 1)
        .provider(1, 1)
        .provider(2, 1)
        .model(&[0])
        .rig();
    rig.register(session(1), 0);
    rig.up(session(2), 2);
    let snapshot = rig.control.snapshot(rig.now);
    let nodes: Vec<_> = snapshot.nodes.iter().map(|node| node.node.row()).collect();
    let connected: Vec<_> = snapshot.nodes.iter().map(|node| node.connected).collect();
    let providers: Vec<_> = snapshot
        .nodes
        .iter()
        .map(|node| node.providers.len())
        .collect();
    assert_eq!(
        (nodes, connected),
        (vec![0, 1, 2], vec![false, false, true])
    );
    assert_eq!(providers, [1, 1, 1]);
}

#[test]
fn a_disabled_provider_is_listed_as_such_and_counts_nothing() {
    let mut rig = World::new(1)
        .provider(0, 4)
        .but(|provider| provider.enabled = false)
        .provider(0, 4)
        .model(&[0, 1])
        .rig();
    for ready in [false, true] {
        if ready {
            rig.up(session(1), 0);
        }
        let shown = rig.shown(0);
        assert_eq!(
            (shown.status, shown.capacity, shown.queued),
            (Status::Disabled, 0, 0)
        );
    }
    assert_eq!(rig.shown(1).capacity, 4);
}

/// Proves.
#[test]
fn r285_a_reconnected_provider_has_its_capacity_back() {
    let mut rig = World::new(1).provider(0, 2).model(&[0]).rig();
    rig.up(session(1), 0);
    let before = rig.shown(0);
    let runs = [rig.run(1, 0), rig.run(2, 0)];
    rig.close(session(1));
    for run in runs {
        rig.step(Event::NotSent { run, client: None });
    }
    rig.register(session(2), 0);
    assert_eq!(rig.shown(0).capacity, 0, "pending is not enough");
    rig.ready(session(2), 0);
    assert_eq!(rig.shown(0), before);
    rig.run(3, 0);
    rig.run(4, 0);
}
