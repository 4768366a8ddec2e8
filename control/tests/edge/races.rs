//! The races of the contract that control decides, in every order that matters.
use iop_control::edge::NodeChange;
use iop_control::step::{Effect, Ending, Event};
use iop_proto::limits::{DISPATCH_MS_DEFAULT, NODE_NOTICES_MAX};
use iop_proto::reason::Reason;

use crate::rig::{
    World, client, clients, granted, grants, node, ready_replies, refused, session, session_again,
    small,
};

fn registration_refusal(effects: &[Effect]) -> Option<Reason> {
    match effects.last() {
        Some(Effect::RegisterReply { refusal, .. }) => *refusal,
        _ => panic!("no answer in {effects:?}"),
    }
}

/// Proves [S-01].
#[test]
fn s01_second_node_id_against_the_first_ready() {
    for ready_first in [true, false] {
        let mut rig = World::new(2).provider(0, 1).model(&[0]).rig();
        rig.register(session(1), 0);
        let generation = rig.control.owner(node(0)).unwrap().generation;
        let mut readied = Vec::new();
        if ready_first {
            readied = rig.ready(session(1), 0);
        }
        let second = rig.register(session(1), 1);
        if !ready_first {
            readied = rig.ready(session(1), 0);
        }
        assert_eq!(ready_replies(&readied), [None]);
        assert_eq!(registration_refusal(&second), Some(Reason::SecondNodeId));
        let owner = rig.control.owner(node(0)).unwrap();
        assert!(owner.is_ready && owner.generation == generation);
    }
}

/// Proves [S-02], [S-04].
#[test]
fn s02_two_claims_leave_one_pending_owner() {
    let mut rig = World::new(1).provider(0, 1).model(&[0]).rig();
    rig.register(session(1), 0);
    let first = rig.control.owner(node(0)).unwrap().generation;
    rig.register(session(2), 0);
    let second = rig.control.owner(node(0)).unwrap();
    assert!(second.session == session(2) && !second.is_ready && second.generation > first);
    assert_eq!(
        ready_replies(&rig.ready(session(1), 0)),
        [Some(Reason::Superseded)]
    );
    assert_eq!(rig.notices(), []);
    assert_eq!(ready_replies(&rig.ready(session(2), 0)), [None]);
}

/// Two processes under one node id, each putting the other out before it is ready, while an owner's lease
/// of before and a waiter are there. Proves [S-51].
#[test]
fn s51_claims_that_put_each_other_out_are_no_events_and_cost_nothing() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.submit(2, 0);
    rig.register(session(2), 0);
    rig.step(Event::Lost { run });
    let fenced: Vec<_> = rig.notices();
    assert_eq!(fenced.len(), 2, "connected, disconnected: {fenced:?}");
    for round in 0..20 {
        let (old, new) = (session(2 + round), session(3 + round));
        rig.register(new, 0);
        let refused = rig.ready(old, 0);
        assert_eq!(ready_replies(&refused), [Some(Reason::Superseded)]);
        rig.close(old);
        assert_eq!((rig.notices().len(), rig.waiting()), (0, 1));
    }
    let counters = rig.control.counters();
    assert_eq!((counters.activations, counters.returns_fence), (1, 1));
    assert_eq!(granted(&rig.ready(session(22), 0)), clients([2]));
}

/// Proves [S-03].
#[test]
fn s03_a_claim_fences_the_ready_owner_with_its_leases() {
    let mut rig = small(3);
    rig.up(session(1), 0);
    let runs: Vec<_> = (0..3).map(|slot| rig.run(slot, 0)).collect();
    for &run in &runs {
        rig.begun(run);
    }
    rig.notices();
    let effects = rig.register(session(2), 0);
    let close = Effect::Close {
        session: session(1),
        cause: Reason::Superseded,
    };
    assert_eq!(effects[0], close);
    assert_eq!(registration_refusal(&effects), None);
    assert_eq!(rig.control.counters().returns_fence, 3);
    let changes: Vec<_> = rig.notices().iter().map(|notice| notice.change).collect();
    let cause = Reason::Superseded;
    assert_eq!(changes, [NodeChange::Disconnected { cause }]);
    rig.close(session(1));
    for &run in &runs {
        rig.step(Event::Lost { run });
    }
    assert_eq!((rig.notices().len(), rig.control.counters().fences), (0, 1));
    assert_eq!(rig.control.snapshot(rig.now).edge.runs, 0);
}

/// Proves [S-06].
#[test]
fn s06_heartbeat_timeout_and_close_fence_once() {
    let mut rig = small(2);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.notices();
    for cause in [Reason::HeartbeatTimeout, Reason::PeerClosed] {
        let session = session(1);
        rig.step(Event::Closed { session, cause });
    }
    assert_eq!((rig.control.counters().fences, rig.notices().len()), (1, 1));
    assert_eq!(rig.control.counters().returns_fence, 1);
}

/// Proves [S-07].
#[test]
fn s07_a_close_right_after_ready_puts_the_pumped_back_in_their_order() {
    let mut rig = small(2);
    for slot in 1..=3 {
        rig.submit(slot, 0);
    }
    let pumped = grants(&rig.up(session(1), 0));
    assert_eq!(pumped.len(), 2);
    rig.close(session(1));
    // Their shard reports in any order, from wherever the clients are by then.
    assert_eq!(rig.back(pumped[1].1, 12), []);
    assert_eq!(rig.back(pumped[0].1, 11), []);
    assert_eq!(rig.waiting(), 3);
    assert_eq!(rig.notices().len(), 2);
    assert_eq!(granted(&rig.up(session(2), 0)), clients([11, 12]));
}

/// Proves [S-11].
#[test]
fn s11_disconnect_against_terminal_returns_the_lease_once() {
    for terminal_first in [true, false] {
        let mut rig = small(1);
        rig.up(session(1), 0);
        let run = rig.run(1, 0);
        rig.begun(run);
        let ending = Ending::Complete;
        if terminal_first {
            rig.step(Event::Terminal { run, ending });
            rig.close(session(1));
        } else {
            rig.close(session(1));
            rig.up(session(2), 0);
            let fresh = rig.run(2, 0);
            rig.step(Event::Terminal { run, ending });
            assert_eq!(rig.shown(0).in_flight, 1);
            rig.complete(fresh);
        }
        let edge = rig.control.snapshot(rig.now).edge;
        assert_eq!((edge.leases_held, edge.runs), (0, 0));
        assert_eq!(edge.leases_taken, edge.leases_returned);
    }
}

/// Proves [S-12].
#[test]
fn s12_a_run_that_had_not_begun_waits_again_at_its_place_until_its_deadline() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.pass_ms(DISPATCH_MS_DEFAULT / 2);
    for slot in 2..=4 {
        rig.submit(slot, 0);
    }
    rig.close(session(1));
    rig.pass_ms(DISPATCH_MS_DEFAULT); // it is not cancelled meanwhile: it comes back by itself
    // Another connection is ready before the shard has reported: nobody overtakes.
    assert_eq!(granted(&rig.up(session(2), 0)), []);
    assert_eq!(rig.submit(5, 0), []);
    assert_eq!(granted(&rig.back(run, 11)), clients([11]));
    let again = rig.control.snapshot(rig.now).edge;
    assert_eq!((again.leases_taken, again.leases_returned), (2, 1));
}

#[test]
fn a_returned_waiter_keeps_its_deadline_and_is_refused_by_no_bound() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .model(&[0])
        .queue(1, 1_000)
        .rig();
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.submit(2, 0);
    rig.pass_ms(1_000);
    rig.close(session(1));
    assert_eq!(
        rig.back(run, 11),
        [],
        "the queue is full and it waits all the same"
    );
    assert_eq!(rig.waiting(), 2);
    let over = refused(&rig.pass_ms(29_000));
    assert_eq!(
        over.iter().map(|refusal| refusal.0).collect::<Vec<_>>(),
        clients([11, 2])
    );
}

/// Proves [S-15].
#[test]
fn s15_release_against_submit_keeps_the_order() {
    for submit_first in [true, false] {
        let mut rig = small(1);
        rig.up(session(1), 0);
        let run = rig.run(1, 0);
        rig.submit(2, 0);
        let mut effects = Vec::new();
        if submit_first {
            effects.extend(rig.submit(3, 0));
        }
        effects.extend(rig.complete(run));
        if !submit_first {
            effects.extend(rig.submit(3, 0));
        }
        assert_eq!(granted(&effects), clients([2]));
        assert_eq!((rig.shown(0).in_flight, rig.waiting()), (1, 1));
    }
}

/// Proves [S-16].
#[test]
fn s16_two_releases_and_one_waiter() {
    let mut rig = small(2);
    rig.up(session(1), 0);
    let runs = [rig.run(1, 0), rig.run(2, 0)];
    rig.submit(3, 0);
    assert_eq!(granted(&rig.complete(runs[0])), clients([3]));
    assert_eq!(rig.complete(runs[1]), []);
    assert_eq!((rig.shown(0).in_flight, rig.waiting()), (1, 0));
}

/// Proves [S-17].
#[test]
fn s17_a_waiter_that_leaves_as_it_is_pumped() {
    // Before the pump: the next one is granted.
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.submit(2, 0);
    rig.submit(3, 0);
    rig.step(Event::ClientGone { client: client(2) });
    let effects = rig.complete(run);
    assert_eq!(granted(&effects), clients([3]));
    // After it: the grant meets nobody, its shard says so, and the lease goes to the next.
    rig.submit(4, 0);
    let lost = grants(&effects)[0].1;
    assert_eq!(rig.step(Event::ClientGone { client: client(3) }), []);
    let effects = rig.step(Event::NotSent {
        run: lost,
        client: None,
    });
    assert_eq!(granted(&effects), clients([4]));
    let counters = rig.control.counters();
    assert_eq!(
        (counters.clients_gone_waiting, counters.clients_gone_late),
        (1, 1)
    );
}

/// Proves [S-18].
#[test]
fn s18_queue_timeout_against_the_ready_pump() {
    for ready_first in [true, false] {
        let mut rig = small(1);
        rig.submit(1, 0);
        rig.register(session(1), 0);
        rig.pass_ms(29_999);
        let mut effects = Vec::new();
        if ready_first {
            effects.extend(rig.ready(session(1), 0));
        }
        effects.extend(rig.pass_ms(1));
        if !ready_first {
            effects.extend(rig.ready(session(1), 0));
        }
        let answers = (granted(&effects).len(), refused(&effects).len());
        assert_eq!(answers, if ready_first { (1, 0) } else { (0, 1) });
    }
}

/// Proves [S-60].
#[test]
fn s60_a_flapping_node_loses_nobody() {
    let mut rig = World::new(2)
        .provider(0, 50)
        .provider(1, 1)
        .model(&[0, 1])
        .rig();
    for slot in 0..100 {
        rig.submit(slot, 0);
    }
    let pumped = grants(&rig.up(session(1), 0));
    assert_eq!(pumped.len(), 50);
    rig.close(session(1));
    for (moved, &(_, run, ..)) in (1_000..1_050).zip(&pumped).rev() {
        assert_eq!(rig.back(run, moved), []);
    }
    let mut order = Vec::new();
    let mut effects = rig.up(session(2), 1);
    while let Some(&(who, run, ..)) = grants(&effects).first() {
        order.push(who);
        rig.begun(run);
        effects = rig.complete(run);
    }
    assert_eq!(order, clients((1_000..1_050).chain(50..100)));
    let counters = rig.control.counters();
    assert!(
        Reason::ALL
            .iter()
            .all(|&reason| counters.refusals(reason) == 0)
    );
}

/// Proves [S-64].
#[test]
fn s64_a_cancel_that_reaches_the_slot_before_the_client_settles_it_once() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    let reason = Reason::DispatchTimeout;
    assert_eq!(
        rig.pass_ms(DISPATCH_MS_DEFAULT),
        [Effect::Cancel { run, reason }]
    );
    // The slot was marked dead; the client arrives there and is reported.
    assert_eq!(refused(&rig.back(run, 9)), [(client(9), reason, 1)]);
    assert_eq!(rig.back(run, 9), [], "a second report counts nothing");
    // A fence instead of a cancel: it waits again.
    let run = rig.run(2, 0);
    rig.close(session(1));
    assert_eq!(rig.back(run, 10), []);
    assert_eq!(rig.waiting(), 1);
    assert_eq!(granted(&rig.up(session_again(1, 2), 0)), clients([10]));
}

/// Proves [S-53].
#[test]
fn s53_a_fence_does_not_wait_for_whoever_takes_the_notices() {
    let mut rig = small(1);
    for round in 1..=NODE_NOTICES_MAX + 10 {
        // Nobody takes a notice; each generation still serves one request and loses one.
        let connection = session_again(0, round);
        rig.up(connection, 0);
        let run = rig.run(2 * round, 0);
        rig.begun(run);
        rig.complete(run);
        let run = rig.run(2 * round + 1, 0);
        rig.begun(run);
        assert_eq!(rig.close(connection), []);
        assert_eq!(rig.shown(0).in_flight, 0);
        assert_eq!(rig.step(Event::Lost { run }), []);
    }
    let counters = *rig.control.counters();
    assert_eq!(counters.fences, u64::from(NODE_NOTICES_MAX + 10));
    assert_eq!(counters.returns_fence, counters.fences);
    assert_eq!(rig.notices().len(), NODE_NOTICES_MAX as usize);
    assert_eq!(counters.notices_dropped, u64::from(NODE_NOTICES_MAX + 20));
}
