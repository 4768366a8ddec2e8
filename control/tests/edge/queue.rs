//! Order, bounds and fairness of the queue.
use iop_control::step::Event;
use iop_proto::catalog::{Operation, OperationSet};
use iop_proto::limits::{GRANTS_PER_STEP_MAX, RETRY_AFTER_S_MAX};
use iop_proto::reason::Reason;

use crate::rig::{CHAT, World, client, clients, granted, grants, refused, session, small};

/// Proves [D-30], [P-16].
#[test]
fn d030_the_bounds_are_exact_for_waiters_and_bytes() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .model(&[0])
        .model(&[0])
        .queue(3, 1_000)
        .rig();
    for slot in 0..3 {
        assert_eq!(rig.submit(slot, 0), []);
    }
    let full = |slot| vec![(client(slot), Reason::QueueFull, 1)];
    assert_eq!(refused(&rig.submit(3, 0)), full(3), "one more than three");
    // The other model has its own bounds: exactly 1 000 bytes fit, one more does not.
    assert_eq!(rig.submit_as(4, 1, CHAT, false, 999), []);
    assert_eq!(rig.submit_as(5, 1, CHAT, false, 1), []);
    assert_eq!(refused(&rig.submit_as(6, 1, CHAT, false, 1)), full(6));
    rig.step(Event::ClientGone { client: client(5) });
    assert_eq!(rig.submit_as(7, 1, CHAT, false, 1), []);
    assert_eq!(rig.control.counters().refusals(Reason::QueueFull), 2);
}

#[test]
fn a_full_queue_refuses_nobody_who_need_not_wait() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .but(|provider| provider.operations = OperationSet::default().with(CHAT))
        .provider(0, 1)
        .but(|provider| {
            provider.operations = OperationSet::default().with(Operation::Embeddings);
        })
        .model(&[0, 1])
        .queue(1, 1_000)
        .rig();
    rig.up(session(1), 0);
    rig.run(1, 0);
    assert_eq!(rig.submit(2, 0), []);
    assert_eq!(refused(&rig.submit(3, 0)).len(), 1);
    let effects = rig.submit_as(4, 0, Operation::Embeddings, false, 10);
    assert_eq!(granted(&effects), clients([4]));
}

#[test]
fn retry_after_follows_recent_service_time() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .model(&[0])
        .queue(0, 1_000)
        .rig();
    rig.up(session(1), 0);
    let mut retry = |service_ms| {
        let run = rig.run(1, 0);
        rig.begun(run);
        rig.pass_ms(service_ms);
        let refusal = refused(&rig.submit(2, 0));
        rig.complete(run);
        refusal[0].2
    };
    assert_eq!(retry(2_001), 1, "nothing is known yet");
    assert_eq!(retry(2_001), 3, "2.001 s rounded up");
    retry(9_000_000);
    assert_eq!(retry(1), u16::try_from(RETRY_AFTER_S_MAX).unwrap());
}

/// Proves [D-16].
#[test]
fn d016_order_is_by_age_within_a_line_and_across_models_that_share_a_provider() {
    let mut rig = World::new(1).provider(0, 1).model(&[0]).model(&[0]).rig();
    rig.up(session(1), 0);
    let mut run = rig.run(0, 0);
    for slot in 1..8 {
        assert_eq!(
            rig.submit_as(slot, slot as usize % 2, CHAT, slot % 3 == 0, 10),
            []
        );
    }
    let mut order = Vec::new();
    for _ in 1..8 {
        let effects = rig.complete(run);
        run = grants(&effects)[0].1;
        order.extend(granted(&effects));
    }
    assert_eq!(order, clients(1..8));
}

/// Proves [P-20], [R-270].
#[test]
fn r270_a_blocked_long_head_holds_up_no_short_one() {
    let mut rig = World::new(1)
        .provider(0, 3)
        .but(|provider| provider.long_capacity = 1)
        .model(&[0])
        .rig();
    rig.up(session(1), 0);
    let figures = |rig: &crate::rig::Rig| (rig.shown(0).in_flight, rig.shown(0).long_in_flight);
    let long = grants(&rig.submit_as(1, 0, CHAT, true, 10))[0].1;
    assert_eq!(
        rig.submit_as(2, 0, CHAT, true, 10),
        [],
        "one long at a time"
    );
    let shorts = [rig.run(3, 0), rig.run(4, 0)];
    assert_eq!(figures(&rig), (3, 1));
    assert_eq!(rig.submit(5, 0), []);
    // The long one is older, and has no room; the short one has.
    assert_eq!(granted(&rig.complete(shorts[0])), clients([5]));
    assert_eq!(figures(&rig), (3, 1));
    assert_eq!(rig.complete(shorts[1]), []);
    assert_eq!(figures(&rig), (2, 1));
    assert_eq!(granted(&rig.complete(long)), clients([2]));
    assert_eq!(figures(&rig), (2, 1));
}

/// Proves [P-07].
#[test]
fn p07_a_waiter_whose_client_left_is_never_dispatched() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(0, 0);
    for slot in 1..=10 {
        rig.submit(slot, 0);
    }
    for slot in 1..10 {
        assert_eq!(
            rig.step(Event::ClientGone {
                client: client(slot)
            }),
            []
        );
        assert_eq!(rig.waiting(), 10 - slot as usize, "gone at once");
    }
    assert_eq!(granted(&rig.complete(run)), clients([10]));
}

#[test]
fn waiters_are_refused_when_their_wait_is_over_and_not_before() {
    let mut rig = small(1);
    rig.submit(1, 0);
    rig.pass_ms(1_000);
    rig.submit(2, 0);
    assert_eq!(rig.pass_ms(28_999), []);
    assert_eq!(
        refused(&rig.pass_ms(1)),
        [(client(1), Reason::QueueTimeout, 1)]
    );
    assert_eq!(rig.waiting(), 1);
    assert_eq!(
        refused(&rig.pass_ms(1_000)),
        [(client(2), Reason::QueueTimeout, 1)]
    );
}

/// A step grants a bounded number and the rest goes on in the next, with nothing else happening.
#[test]
fn a_large_pump_is_spread_over_steps() {
    let count = 5 * GRANTS_PER_STEP_MAX;
    let mut rig = World::new(1).provider(0, count).model(&[0]).rig();
    for slot in 0..count {
        rig.submit(slot, 0);
    }
    rig.register(session(1), 0);
    let mut out = iop_control::step::Out::default();
    let claimed = Some(crate::rig::node(0));
    let event = Event::Ready {
        session: session(1),
        reply_to: 1,
        claimed,
    };
    rig.control.handle(rig.now, event, &mut out);
    let mut order = Vec::new();
    let mut steps = 0;
    loop {
        let effects: Vec<_> = out.drain().collect();
        let step = granted(&effects);
        assert!(step.len() <= GRANTS_PER_STEP_MAX as usize);
        order.extend(step);
        steps += 1;
        if !rig.control.has_pending() {
            break;
        }
        // Somebody new does not overtake those the last step had no room for.
        if steps == 1 {
            let event = Event::Submit {
                client: client(count),
                model: crate::rig::model(0),
                operation: CHAT,
                long: false,
                body_bytes: 1,
            };
            rig.control.handle(rig.now, event, &mut out);
        } else {
            rig.control.tick(rig.now, &mut out);
        }
    }
    assert_eq!((steps, order), (5, clients(0..count)));
    assert_eq!(rig.waiting(), 1);
}

/// A grant costs the same with a hundred waiters as with a hundred thousand, over many models that
/// share the provider: the whole drains in seconds of a debug build, far from quadratic.
#[test]
fn a_hundred_thousand_waiters_drain() {
    const WAITERS: u32 = 100_000;
    const MODELS: u32 = 500;
    let mut world = World::new(1).provider(0, 16).queue(WAITERS, u64::MAX);
    for _ in 0..MODELS {
        world = world.model(&[0]);
    }
    let mut rig = world.rig();
    let mut out = iop_control::step::Out::default();
    for slot in 0..WAITERS {
        let event = Event::Submit {
            client: client(slot),
            model: crate::rig::model((slot % MODELS) as usize),
            operation: CHAT,
            long: slot % 7 == 0,
            body_bytes: 1,
        };
        rig.control.handle(rig.now, event, &mut out);
        assert!(out.is_empty());
    }
    let mut running: std::collections::VecDeque<_> = grants(&rig.up(session(1), 0)).into();
    for slot in 0..WAITERS {
        let (to, run, ..) = running.pop_front().unwrap();
        assert_eq!(to, client(slot));
        let ending = iop_control::step::Ending::Complete;
        rig.control
            .handle(rig.now, Event::Terminal { run, ending }, &mut out);
        let effects: Vec<_> = out.drain().collect();
        running.extend(grants(&effects));
    }
    assert_eq!((running.len(), rig.waiting()), (0, 0));
}
