//! Registration, readiness, generations, disconnect: machine 1.
use iop_control::edge::{NodeChange, SessionState};
use iop_control::step::{Effect, Ending, Event};
use iop_proto::limits::{NODE_NOTICES_MAX, REJECTED_READY_MS};
use iop_proto::reason::Reason;

use crate::rig::{
    Rig, World, clients, granted, grants, model, node, ready_replies, refused, session,
    session_again, small,
};

fn two_nodes() -> Rig {
    World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0, 1])
        .rig()
}

/// Proves.
#[test]
fn r021_a_registration_is_answered_and_only_its_certified_node_accepted() {
    let mut rig = two_nodes();
    let reply = |session, node, refusal, close| Effect::RegisterReply {
        session,
        reply_to: 7,
        node,
        refusal,
        close,
    };
    let mut ask = |slot, claimed, certified| {
        let session = session(slot);
        rig.step(Event::Register {
            session,
            reply_to: 7,
            claimed,
            certified,
        })
    };
    let (n0, n1) = (Some(node(0)), Some(node(1)));
    assert_eq!(ask(1, n0, n0), [reply(session(1), n0, None, false)]);
    let wrong = Some(Reason::NodeNotCertified);
    assert_eq!(ask(2, n1, n0), [reply(session(2), None, wrong, true)]);
    assert_eq!(
        ask(3, None, n1),
        [reply(session(3), None, Some(Reason::NodeUnknown), true)]
    );
    assert_eq!(ask(4, n1, None), [reply(session(4), None, wrong, true)]);
    assert_eq!(
        rig.control.owner(node(0)).map(|owner| owner.session),
        Some(session(1))
    );
    assert_eq!(rig.control.owner(node(1)), None, "a refusal owns nothing");
    assert_eq!(
        rig.control
            .counters()
            .node_refusals(Reason::NodeNotCertified),
        2
    );
}

/// Proves, [R-035].
#[test]
fn r024_an_accepted_registration_owns_the_node_pending() {
    let mut rig = small(1);
    rig.register(session(1), 0);
    let owner = rig.control.owner(node(0)).unwrap();
    assert_eq!((owner.session, owner.is_ready), (session(1), false));
    assert_eq!(rig.control.session_state(session(1)), SessionState::Pending);
    assert!(!rig.is_connected(0));
    rig.ready(session(1), 0);
    assert!(rig.is_connected(0));
    rig.register(session(2), 0); // the same node, connected before, claims again
    assert!(!rig.is_connected(0));
}

/// Proves, [R-077], [R-352].
#[test]
fn r077_a_waiter_goes_with_the_ready_and_not_before() {
    let mut rig = World::new(1).provider(0, 1).model(&[0]).rig();
    rig.register(session(1), 0);
    assert_eq!(rig.submit(1, 0), []);
    assert_eq!(rig.pass_ms(29_000), []);
    assert_eq!((rig.waiting(), rig.notices().len()), (1, 0));
    let effects = rig.ready(session(1), 0);
    assert_eq!(
        ready_replies(&effects[..1]),
        [None],
        "the acknowledgement comes first"
    );
    assert_eq!(granted(&effects), clients([1]));
    assert_eq!((rig.waiting(), rig.notices().len()), (0, 1));
}

/// Proves, [R-005], [R-050].
#[test]
fn r005_a_second_node_id_changes_nothing() {
    let mut rig = two_nodes();
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    let before = rig.control.owner(node(0));
    let effects = rig.register(session(1), 1);
    let reply = Effect::RegisterReply {
        session: session(1),
        reply_to: 1,
        node: None,
        refusal: Some(Reason::SecondNodeId),
        close: false,
    };
    assert_eq!(effects, [reply]);
    assert_eq!(rig.control.owner(node(0)), before);
    assert_eq!(rig.control.owner(node(1)), None);
    assert_eq!(rig.complete(run), []);
    assert_eq!(
        rig.control.counters().returns_terminal,
        1,
        "the old generation still counts"
    );
}

/// Proves, [R-042], [R-043], [S-09].
#[test]
fn r041_only_the_first_ready_activates() {
    let mut rig = small(2);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    let owner = rig.control.owner(node(0));
    for _ in 0..3 {
        assert_eq!(ready_replies(&rig.ready(session(1), 0)), [None]);
    }
    assert_eq!(rig.shown(0).in_flight, 1);
    assert_eq!(rig.control.owner(node(0)), owner);
    assert_eq!(rig.control.counters().activations, 1);
    let changes: Vec<_> = rig.notices().iter().map(|notice| notice.change).collect();
    assert_eq!(changes, [NodeChange::Connected]);
    rig.complete(run);
    assert_eq!(rig.shown(0).in_flight, 0);
}

/// Proves.
#[test]
fn r030_the_node_is_dispatch_ready_when_its_acknowledgement_is_handed_out() {
    let mut rig = small(1);
    rig.submit(1, 0);
    rig.register(session(1), 0);
    let ready = Event::Ready {
        session: session(1),
        reply_to: 2,
        claimed: Some(node(0)),
    };
    let mut seen = Vec::new();
    rig.watch(ready, |control, effects| {
        if ready_replies(effects) == [None] {
            seen.push(control.session_state(session(1)));
        }
    });
    assert_eq!(seen, [SessionState::Ready]);
    // A connection that has gone is acknowledged nothing, and nothing happens.
    let mut rig = small(1);
    rig.register(session(1), 0);
    rig.close(session(1));
    assert_eq!(rig.ready(session(1), 0), []);
    assert_eq!(rig.control.counters().activations, 0);
    assert_eq!((rig.notices().len(), rig.is_connected(0)), (0, false));
}

/// Proves, [R-047].
#[test]
fn r038_a_ready_counts_only_from_the_connection_that_owns_the_node() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0])
        .rig();
    rig.submit(1, 0);
    rig.register(session(1), 0);
    rig.register(session(2), 0);
    rig.register(session(3), 1);
    let refused = rig.ready(session(1), 0);
    assert_eq!(ready_replies(&refused), [Some(Reason::Superseded)]);
    assert_eq!(
        ready_replies(&rig.ready(session(3), 0)),
        [Some(Reason::NodeIdMismatch)]
    );
    assert_eq!((rig.waiting(), rig.notices().len()), (1, 0));
    assert!(!rig.is_connected(0) && !rig.is_connected(1));
    assert_eq!(granted(&rig.ready(session(2), 0)), clients([1]));
}

/// Proves, [R-046].
#[test]
fn r046_a_ready_without_ownership_is_answered_with_a_reason() {
    let mut rig = two_nodes();
    rig.up(session(1), 0);
    rig.step(Event::Register {
        session: session(3),
        reply_to: 1,
        claimed: None,
        certified: None,
    });
    for stranger in [session(3), session(4)] {
        let effects = rig.ready(stranger, 0);
        assert_eq!(ready_replies(&effects), [Some(Reason::NotRegistered)]);
        assert!(!Reason::NotRegistered.text().is_empty());
    }
    rig.register(session(5), 1);
    rig.register(session(6), 1);
    assert_eq!(
        ready_replies(&rig.ready(session(5), 1)),
        [Some(Reason::Superseded)]
    );
    assert_eq!(rig.control.session_state(session(1)), SessionState::Ready);
    assert_eq!(rig.control.session_state(session(6)), SessionState::Pending);
}

/// Proves.
#[test]
fn r355_a_superseded_pending_connection_keeps_its_socket_for_five_seconds() {
    let mut rig = two_nodes();
    rig.register(session(1), 0);
    rig.pass_ms(1_000);
    let effects = rig.register(session(2), 0);
    assert_eq!(effects.len(), 1, "only the new claim's answer: {effects:?}");
    rig.pass_ms(1_000);
    assert_eq!(
        ready_replies(&rig.ready(session(1), 0)),
        [Some(Reason::Superseded)]
    );
    assert_eq!(rig.pass_ms(REJECTED_READY_MS - 1_001), []);
    let close = Effect::Close {
        session: session(1),
        cause: Reason::Superseded,
    };
    assert_eq!(
        rig.pass_ms(1),
        [close],
        "five seconds from the claim, not from the ready"
    );
    let before = rig.control.owner(node(0));
    rig.close(session(1));
    assert_eq!(rig.control.owner(node(0)), before);
    // A current owner whose ready named a wrong id stays connected.
    rig.ready(session(2), 1);
    assert_eq!(rig.pass_ms(60_000), []);
    assert_eq!(rig.control.session_state(session(2)), SessionState::Pending);
}

#[test]
fn an_unregistered_ready_is_closed_later_unless_it_registers() {
    let mut rig = two_nodes();
    rig.ready(session(1), 0);
    rig.ready(session(2), 1);
    rig.register(session(2), 1);
    let close = Effect::Close {
        session: session(1),
        cause: Reason::NotRegistered,
    };
    assert_eq!(rig.pass_ms(60_000), [close]);
    rig.close(session(1));
    assert_eq!(rig.control.session_state(session(2)), SessionState::Pending);
}

/// Proves.
#[test]
fn r054_a_reconnected_node_serves_under_a_new_generation() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let old = rig.run(1, 0);
    rig.begun(old);
    let before = rig.control.owner(node(0)).unwrap().generation;
    rig.close(session(1));
    rig.up(session(2), 0);
    let after = rig.control.owner(node(0)).unwrap().generation;
    assert!(after > before);
    let new = rig.run(2, 0);
    assert_eq!(rig.step(Event::Lost { run: old }), []);
    assert_eq!(
        rig.shown(0).in_flight,
        1,
        "a lease of the old generation is not the new one's"
    );
    rig.complete(new);
    assert_eq!(rig.shown(0).in_flight, 0);
}

/// Proves, [R-072], [R-078], [R-079], [S-05].
#[test]
fn r055_late_close_leaves_the_new_generation_alone() {
    let mut rig = two_nodes();
    rig.up(session(1), 0);
    rig.up(session(2), 0);
    rig.register(session(3), 0);
    rig.register(session(4), 0);
    rig.ready(session(4), 0);
    rig.step(Event::Register {
        session: session(5),
        reply_to: 1,
        claimed: None,
        certified: Some(node(0)),
    });
    let run = rig.run(1, 0);
    rig.notices();
    let before = (rig.control.owner(node(0)), *rig.control.counters());
    // Superseded while ready, superseded while pending, refused, never seen: each twice.
    for late in [1, 2, 3, 5, 6].into_iter().flat_map(|slot| [slot, slot]) {
        assert_eq!(rig.close(session(late)), []);
    }
    assert_eq!(rig.control.owner(node(0)), before.0);
    assert_eq!(rig.control.counters().fences, before.1.fences);
    assert_eq!((rig.shown(0).in_flight, rig.notices().len()), (1, 0));
    rig.complete(run);
    // The owner's own close, in the same world, does fence.
    rig.close(session(4));
    assert_eq!(rig.control.counters().fences, before.1.fences + 1);
    assert_eq!(rig.notices().len(), 1);
}

/// Proves, [R-071].
#[test]
fn r070_whatever_ends_the_ready_owner_fences_its_generation() {
    for cause in [
        Reason::PeerClosed,
        Reason::SocketError,
        Reason::HeartbeatTimeout,
    ] {
        let mut rig = small(1);
        rig.up(session(1), 0);
        let run = rig.run(1, 0);
        rig.begun(run);
        rig.notices();
        let session = session(1);
        rig.step(Event::Closed { session, cause });
        rig.step(Event::Closed { session, cause });
        assert_eq!(rig.control.owner(node(0)), None);
        assert_eq!(rig.control.counters().fences, 1);
        let changes: Vec<_> = rig.notices().iter().map(|notice| notice.change).collect();
        assert_eq!(changes, [NodeChange::Disconnected { cause }]);
        assert_eq!(rig.submit(2, 0), [], "nothing is dispatched to it");
        // A frame of the ended generation changes nothing.
        let ending = Ending::Complete;
        assert_eq!(rig.step(Event::Terminal { run, ending }), []);
        assert_eq!(rig.control.counters().returns_fence, 1);
        assert_eq!(rig.control.counters().returns_terminal, 0);
    }
}

/// Proves, [R-164].
#[test]
fn r073_a_fence_returns_each_lease_once() {
    let mut rig = World::new(1)
        .provider(0, 3)
        .provider(0, 2)
        .model(&[0])
        .model(&[1])
        .rig();
    rig.up(session(1), 0);
    let runs: Vec<_> = (0..3).map(|slot| rig.run(slot, 0)).collect();
    let other = rig.run(3, 1);
    for &run in &runs {
        rig.begun(run);
    }
    rig.complete(runs[0]);
    rig.close(session(1));
    assert_eq!(rig.control.counters().returns_fence, 3);
    rig.up(session(2), 0);
    let fresh = rig.run(4, 0);
    for &run in &runs {
        let ending = Ending::Error;
        rig.step(Event::Terminal { run, ending });
    }
    rig.step(Event::NotSent {
        run: other,
        client: None,
    });
    let snapshot = rig.control.snapshot(rig.now);
    assert_eq!(
        (snapshot.edge.leases_taken, snapshot.edge.leases_returned),
        (5, 4)
    );
    assert_eq!((snapshot.edge.runs, rig.shown(0).in_flight), (1, 1));
    rig.complete(fresh);
}

/// Proves, [R-075], [R-076].
#[test]
fn r076_a_fence_offers_nothing_of_the_dead_node_to_waiters() {
    let mut rig = two_nodes();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let first = rig.run(1, 0);
    let second = rig.run(2, 0);
    rig.begun(first);
    rig.begun(second);
    assert_eq!(rig.submit(3, 0), []);
    assert_eq!(rig.close(session(1)), [], "the freed slot is not granted");
    assert_eq!(rig.step(Event::Lost { run: first }), []);
    let effects = rig.complete(second);
    assert_eq!(
        grants(&effects)
            .iter()
            .map(|grant| grant.2)
            .collect::<Vec<_>>(),
        [session(2)]
    );
}

/// Proves, [R-080], [R-245].
#[test]
fn r056_nothing_depends_on_who_takes_the_notices() {
    let history = |takes: bool| {
        let mut rig = small(1);
        let mut seen = Vec::new();
        let mut taken = 0;
        for round in 0..NODE_NOTICES_MAX {
            rig.submit(round, 0);
            seen.extend(rig.up(session_again(1, round + 1), 0));
            let run = grants(&seen).last().unwrap().1;
            rig.begun(run);
            seen.extend(rig.close(session_again(1, round + 1)));
            seen.extend(rig.step(Event::Lost { run }));
            if takes {
                taken += rig.notices().len();
            }
        }
        (seen, rig.control.snapshot(rig.now).edge, taken)
    };
    let (with, without) = (history(true), history(false));
    assert_eq!(with.2, 2 * NODE_NOTICES_MAX as usize, "the bus did deliver");
    assert_eq!((with.0, with.1), (without.0, without.1));
}

#[test]
fn a_draining_node_takes_nothing_new_until_it_is_back() {
    let mut rig = small(2);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.step(Event::GoAway {
        session: session(1),
    });
    assert_eq!(rig.submit(2, 0), []);
    assert_eq!((rig.shown(0).queued, rig.shown(0).in_flight), (0, 1));
    assert_eq!(rig.complete(run), [], "a lease lives on and ends as ever");
    rig.close(session(1));
    assert_eq!(granted(&rig.up(session(2), 0)), clients([2]));
    // Before registration it is a violation.
    let session = session(3);
    let close = Effect::Close {
        session,
        cause: Reason::EnvelopeWrongState,
    };
    assert_eq!(rig.step(Event::GoAway { session }), [close]);
}

/// Proves [D-38].
#[test]
fn d38_a_silent_shard_is_wedged_and_a_stopped_process_is_not() {
    let names = || std::sync::Arc::new(World::new(1).0);
    let at = iop_proto::ids::Now::from_nanos;
    let ms = |ms: u64| at(ms * 1_000_000);
    let mut out = iop_control::step::Out::default();
    let mut control = iop_control::edge::Control::new(names(), 2, at(0));
    control.tick(control.next_deadline().unwrap(), &mut out);
    let pings: Vec<_> = out.drain().collect();
    let shards: Vec<_> = pings.iter().map(|ping| ping.shard().row()).collect();
    assert_eq!(shards, [0, 1], "each shard is asked");
    let Effect::Ping { token } = pings[0] else {
        panic!("{pings:?}")
    };
    control.handle(ms(1_500), Event::Pong { token }, &mut out);
    control.handle(ms(1_500), Event::Pong { token }, &mut out);
    assert_eq!(control.counters().stale_events, 1, "an answer counts once");
    // The whole process stood still: nobody is blamed yet.
    control.tick(ms(60_000), &mut out);
    assert_eq!(control.wedged(), None);
    for effect in out.drain().collect::<Vec<_>>() {
        let Effect::Ping { token } = effect else {
            panic!("{effect:?}")
        };
        control.handle(ms(60_000), Event::Pong { token }, &mut out);
    }
    while control.wedged().is_none() {
        let due = control.next_deadline().unwrap();
        assert!(due <= ms(65_000), "the silent shard was not found");
        control.tick(due, &mut out);
        for effect in out.drain().collect::<Vec<_>>() {
            let Effect::Ping { token } = effect else {
                panic!("{effect:?}")
            };
            control.handle(due, Event::Pong { token }, &mut out);
        }
    }
    assert_eq!(
        control.wedged().map(iop_proto::ids::ShardIndex::row),
        Some(1)
    );
}

/// Proves.
#[test]
fn r049_a_node_that_never_readies_stays_pending() {
    let mut rig = small(1);
    rig.register(session(1), 0);
    assert_eq!(rig.pass_ms(3_600_000), []);
    assert_eq!(rig.control.session_state(session(1)), SessionState::Pending);
    assert_eq!(refused(&rig.submit(1, 0)), []);
    assert_eq!(rig.control.snapshot(rig.now).models[0].model, model(0));
    assert_eq!(granted(&rig.ready(session(1), 0)), clients([1]));
}
