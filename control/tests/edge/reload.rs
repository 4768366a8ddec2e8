//! Another configuration while nodes are connected, requests run and wait.
use std::sync::Arc;

use iop_control::edge::RefreshState;
use iop_control::names::{Names, NodeName, ProviderName};
use iop_proto::domain::HealthEvidence;
use iop_proto::domain::RefreshStatus::{Applied, Failed, RestartRequired};
use iop_proto::limits::{EFFECTS_PER_STEP_MAX, REFRESH_MS_DEFAULT};
use iop_proto::reason::Reason;

use crate::rig::{
    Rig, World, client, clients, closes, drop_node, drop_provider, evidence, granted, grants,
};
use crate::rig::{model, node, provider, refreshes, refused, session};

fn row(file: &mut Names, row: usize) -> &mut ProviderName {
    Arc::make_mut(&mut file.providers[row])
}

/// A ready node with one provider on adapter `a`, and a model.
fn ready(capacity: u32) -> Rig {
    let mut rig = World::new(1).provider(0, capacity).model(&[0]).rig();
    rig.up(session(1), 0);
    rig
}

fn state(rig: &Rig) -> RefreshState {
    rig.control.snapshot(rig.now).nodes[0].refresh
}

#[test]
fn a_raised_capacity_serves_who_waits_and_a_lowered_one_cancels_nobody() {
    let mut rig = ready(2);
    let runs = [rig.run(1, 0), rig.run(2, 0)];
    for slot in 3..6 {
        assert_eq!(rig.submit(slot, 0), []);
    }
    let raised = rig.reload(|file| row(file, 0).capacity = 4);
    assert_eq!(granted(&raised), clients([3, 4]));
    assert_eq!(refreshes(&raised), [], "the payload is the same");
    assert_eq!(rig.reload(|file| row(file, 0).capacity = 1), []);
    assert_eq!(rig.shown(0).in_flight, 4, "nothing is cancelled");
    for run in runs {
        assert_eq!(rig.complete(run), [], "still at or over its capacity");
    }
    assert_eq!(rig.waiting(), 1);
    for (_, run, _, _) in grants(&raised) {
        rig.complete(run);
    }
    assert_eq!(rig.waiting(), 0);
}

/// A removed provider's leases are counted and returned as before, also when it comes back.
/// Proves [S-61].
#[test]
fn s61_a_provider_removed_and_added_again_keeps_its_leases() {
    let mut rig = World::new(2)
        .provider(1, 1)
        .provider(0, 2)
        .model(&[1])
        .model(&[1, 0])
        .rig();
    rig.up(session(1), 0);
    let runs = [rig.run(1, 0), rig.run(2, 0)];
    for (slot, to) in [(3, 0), (4, 0), (5, 1)] {
        assert_eq!(rig.submit(slot, to), []);
    }
    let gone = rig.reload(|file| drop_provider(file, 1));
    let told = refused(&gone);
    assert_eq!(
        told.iter()
            .map(|refusal| (refusal.0, refusal.1))
            .collect::<Vec<_>>(),
        [3, 4].map(|slot| (client(slot), Reason::NoProviderConfigured)),
        "who has another candidate keeps waiting"
    );
    let edge = rig.control.snapshot(rig.now);
    assert_eq!((edge.edge.leases_held, edge.edge.waiting), (2, 1));
    assert!(edge.nodes[0].providers.is_empty(), "not listed any more");
    assert_eq!(
        refused(&rig.submit(6, 0))[0].1,
        Reason::NoProviderConfigured
    );
    rig.reload(|file| {
        let back = Arc::new(ProviderName {
            id: "pv1".into(),
            node: node(0),
            capacity: 3,
            ..ProviderName::clone(&file.providers[0])
        });
        file.providers.push(back);
        file.models[0].providers = vec![provider(1)];
    });
    assert_eq!(rig.shown(1).in_flight, 2, "it revives with what it holds");
    rig.run(7, 0);
    assert_eq!(rig.submit(8, 0), [], "3 of 3");
    assert_eq!(granted(&rig.complete(runs[0])), clients([8]));
    rig.complete(runs[1]);
    assert_eq!(rig.shown(1).in_flight, 2);
}

#[test]
fn a_removed_model_is_unknown_and_a_removed_one_comes_back_under_its_row() {
    let mut rig = World::new(1).provider(0, 1).model(&[0]).model(&[0]).rig();
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.submit(2, 0);
    rig.submit(3, 1);
    let gone = rig.reload(|file| drop(file.models.remove(0)));
    assert_eq!(refused(&gone), [(client(2), Reason::ModelUnknown, 0)]);
    assert_eq!(
        refused(&rig.submit(4, 0)),
        [(client(4), Reason::ModelUnknown, 0)]
    );
    assert_eq!(
        granted(&rig.complete(run)),
        clients([3]),
        "the other model goes on"
    );
    rig.reload(|file| {
        let mut back = file.models[0].clone();
        back.name = "m0".into();
        file.models.push(back);
    });
    assert!(rig.control.names().has_model(model(0)));
    assert_eq!(rig.submit(5, 0), [], "it waits");
}

/// A run that had not begun comes back to a model that nobody serves any more.
#[test]
fn a_returning_run_without_candidates_is_refused_at_once() {
    let mut rig = ready(1);
    let run = rig.run(1, 0);
    rig.reload(|file| row(file, 0).enabled = false);
    let told = refused(&rig.back(run, 1));
    assert_eq!(told, [(client(1), Reason::NoProviderConfigured, 0)]);
    assert_eq!(rig.control.snapshot(rig.now).edge.leases_held, 0);
}

/// Who is left without candidate is refused over several steps. Another file between two of them may
/// serve the rest again: they wait on, to the end that their wait has always had.
#[test]
fn who_is_served_again_before_the_refusal_waits_on_to_the_end_of_the_own_wait() {
    const WAIT: u32 = 2 * EFFECTS_PER_STEP_MAX;
    let world = World::new(1).provider(0, 1).model(&[0]);
    let mut rig = world.queue(WAIT, u64::MAX).rig();
    rig.up(session(1), 0);
    let run = rig.run(0, 0);
    for slot in 1..=WAIT {
        assert_eq!(rig.submit(slot, 0), []);
    }
    rig.pass_ms(10_000);
    rig.takes(|file| row(file, 0).enabled = false);
    let told = refused(&rig.tick());
    let count = u32::try_from(told.len()).unwrap();
    assert!((1..WAIT).contains(&count), "{count}");
    assert_eq!(told[0], (client(1), Reason::NoProviderConfigured, 0));
    rig.takes(|file| row(file, 0).enabled = true);
    assert_eq!(rig.pass_ms(19_999), []);
    assert_eq!(rig.waiting(), (WAIT - count) as usize);
    let seen = grants(&rig.complete(run));
    assert_eq!(seen[0].0, client(count + 1));
    let again = grants(&rig.back(seen[0].1, count + 1));
    assert_eq!(again[0].0, client(count + 1), "its end has not come either");
    let told = refused(&rig.pass_ms(1));
    assert_eq!(told.len(), (WAIT - count - 1) as usize);
    assert!(told.iter().all(|told| told.1 == Reason::QueueTimeout));
}

/// Proves.
#[test]
fn r260_a_ready_node_whose_payload_changed_is_sent_the_new_one_once() {
    let mut rig = World::new(3)
        .provider(0, 1)
        .provider(1, 1)
        .provider(2, 1)
        .model(&[0, 1, 2])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    // Node 1's own payload is the same, node 2 is not connected.
    let pushed = rig.reload(|file| {
        row(file, 0).adapter = "b".into();
        row(file, 2).adapter = "b".into();
    });
    let pushed = refreshes(&pushed);
    assert_eq!(pushed.len(), 1);
    assert_eq!(pushed[0].0, session(1));
    assert_eq!(rig.reload(|_| {}), [], "while the answer is awaited");
    assert_eq!(rig.answer(session(1), pushed[0].1, Applied), []);
    assert_eq!(rig.reload(|_| {}), [], "it has the newest");
    assert_eq!(
        refreshes(&rig.up(session(3), 2)),
        [],
        "its registration carried it"
    );
}

/// Proves, [S-62].
#[test]
fn s62_a_moved_binding_is_used_only_after_its_node_has_applied_it() {
    for refusal in [Failed, RestartRequired] {
        let mut rig = ready(4);
        rig.run(1, 0);
        let moved = rig.reload(|file| row(file, 0).adapter = "b".into());
        let (_, first) = refreshes(&moved)[0];
        assert_eq!(state(&rig), RefreshState::Pending);
        assert_eq!(rig.submit(2, 0), [], "not before it is applied");
        assert_eq!(rig.answer(session(1), first, refusal), []);
        assert_ne!(state(&rig), RefreshState::Pending);
        assert_ne!(state(&rig), RefreshState::Current);
        assert_eq!(
            (rig.waiting(), rig.shown(0).queued),
            (1, 0),
            "no live candidate"
        );
        assert_eq!(rig.control.counters().nodes_outdated, 1);
        let again = refreshes(&rig.reload(|_| {}));
        assert_eq!(again.len(), 1, "retried at the next reload");
        let served = rig.answer(session(1), again[0].1, Applied);
        assert_eq!(granted(&served), clients([2]));
        assert_eq!(state(&rig), RefreshState::Current);
        assert_eq!(rig.control.counters().nodes_outdated, 0);
    }
}

/// Proves [S-46].
#[test]
fn s46_reloads_during_a_refresh_cause_one_more_with_the_newest() {
    let mut rig = ready(1);
    let name = |name: &'static str| move |file: &mut Names| row(file, 0).adapter = name.into();
    let first = refreshes(&rig.reload(name("b")))[0].1;
    for adapter in ["c", "d", "e"] {
        assert_eq!(rig.reload(name(adapter)), [], "one at a time");
    }
    let second = refreshes(&rig.answer(session(1), first, Applied));
    assert_eq!(second.len(), 1);
    assert_eq!(rig.submit(1, 0), [], "e is not applied yet");
    let served = rig.answer(session(1), second[0].1, Applied);
    assert_eq!(
        (granted(&served), refreshes(&served)),
        (clients([1]), vec![])
    );
    // Back to what the node holds while a refresh is under way: its answer decides.
    let third = refreshes(&rig.reload(name("f")))[0].1;
    assert_eq!(rig.reload(name("e")), []);
    assert_eq!(rig.answer(session(1), third, Failed), []);
    assert_eq!(state(&rig), RefreshState::Current);
}

/// Proves, [R-265], [S-10].
#[test]
fn s10_a_pending_node_is_pushed_nothing_and_after_its_ready_one_or_none() {
    for changed_back in [false, true] {
        let mut rig = World::new(1).provider(0, 1).model(&[0]).rig();
        rig.register(session(1), 0);
        rig.submit(1, 0);
        assert_eq!(rig.reload(|file| row(file, 0).adapter = "b".into()), []);
        if changed_back {
            assert_eq!(rig.reload(|file| row(file, 0).adapter = "a".into()), []);
        }
        assert_eq!(
            rig.register(session(1), 0).len(),
            1,
            "a repeat changes nothing"
        );
        let mut effects = rig.ready(session(1), 0);
        effects.extend(rig.pass_ms(0));
        if changed_back {
            assert_eq!(refreshes(&effects), []);
            assert_eq!(granted(&effects), clients([1]));
            continue;
        }
        let pushed = refreshes(&effects);
        assert_eq!(pushed.len(), 1);
        assert_eq!(granted(&effects), [], "the payload it was sent has no b");
        assert_eq!(
            granted(&rig.answer(session(1), pushed[0].1, Applied)),
            clients([1])
        );
    }
}

/// Proves [D-29].
#[test]
fn d29_an_unanswered_refresh_is_reported_and_its_late_answer_still_counts() {
    let mut rig = ready(1);
    let first = refreshes(&rig.reload(|file| row(file, 0).adapter = "b".into()))[0].1;
    assert_eq!(refreshes(&rig.pass_ms(REFRESH_MS_DEFAULT - 1)), []);
    assert_eq!(state(&rig), RefreshState::Pending);
    assert_eq!(refreshes(&rig.pass_ms(1)), [], "the same is not sent again");
    assert_eq!(state(&rig), RefreshState::Unanswered);
    let second = refreshes(&rig.reload(|file| row(file, 0).adapter = "c".into()))[0].1;
    assert!(second > first);
    rig.submit(1, 0);
    assert_eq!(
        rig.answer(session(1), first, Applied),
        [],
        "b, and c is under way"
    );
    assert_eq!(state(&rig), RefreshState::Pending);
    assert_eq!(
        granted(&rig.answer(session(1), second, Applied)),
        clients([1])
    );
    assert_eq!(rig.answer(session(1), second, Applied), [], "answered once");
    assert_eq!(state(&rig), RefreshState::Current);
    assert_eq!(rig.control.counters().refreshes_unanswered, 1);
}

#[test]
fn what_changed_while_an_unanswered_refresh_ran_out_is_sent_then() {
    let mut rig = ready(1);
    let first = refreshes(&rig.reload(|file| row(file, 0).adapter = "b".into()))[0].1;
    assert_eq!(rig.reload(|file| row(file, 0).adapter = "c".into()), []);
    let second = refreshes(&rig.pass_ms(REFRESH_MS_DEFAULT));
    assert_eq!(second.len(), 1, "under a new id");
    assert_ne!(second[0].1, first);
    // A new generation starts anew with the newest.
    rig.close(session(1));
    assert_eq!(refreshes(&rig.up(session(2), 0)), []);
    assert_eq!(
        rig.answer(session(2), second[0].1, Failed),
        [],
        "of another connection"
    );
    assert_eq!(state(&rig), RefreshState::Current);
}

#[test]
fn a_removed_node_is_put_out_and_may_come_back() {
    for is_ready in [true, false] {
        let mut rig = World::new(2)
            .provider(0, 1)
            .provider(1, 1)
            .model(&[0, 1])
            .rig();
        rig.register(session(1), 0);
        if is_ready {
            rig.ready(session(1), 0);
            rig.begin_run(1);
        }
        let mut dropped = None;
        let gone = rig.reload(|file| {
            dropped = Some((
                file.nodes[0].clone(),
                ProviderName::clone(&file.providers[0]),
            ));
            drop_node(file, 0);
        });
        assert_eq!(closes(&gone), [(session(1), Reason::NodeRemoved)]);
        let edge = rig.control.snapshot(rig.now);
        assert_eq!((edge.edge.leases_held, edge.nodes.len()), (0, 1));
        assert!(rig.control.owner(node(0)).is_none());
        rig.close(session(1));
        let refusal = rig.register(session(2), 0);
        let reason = format!("{refusal:?}");
        assert!(reason.contains("NodeUnknown"), "{reason}");
        let (name, provider) = dropped.unwrap();
        rig.reload(|file| {
            file.nodes.push(name);
            let node = node(1);
            file.providers
                .push(Arc::new(ProviderName { node, ..provider }));
            file.models[0].providers.push(crate::rig::provider(1));
        });
        rig.close(session(2));
        rig.up(session(3), 0);
        assert_eq!(rig.shown(0).capacity, 1, "under its old row");
    }
}

#[test]
fn another_certificate_name_puts_the_node_out_and_an_added_node_is_served() {
    let mut rig = ready(1);
    let other = rig.reload(|file| file.nodes[0].certificate_name = "other".into());
    assert_eq!(closes(&other), [(session(1), Reason::NodeNotCertified)]);
    rig.reload(|file| {
        file.nodes.push(NodeName {
            id: "n1".into(),
            ..file.nodes[0].clone()
        });
        let node = node(1);
        let id = "pv1".into();
        let like = ProviderName::clone(&file.providers[0]);
        file.providers
            .push(Arc::new(ProviderName { id, node, ..like }));
        file.models[0].providers.push(provider(1));
    });
    rig.up(session(2), 1);
    assert_eq!(granted(&rig.submit(1, 0)), clients([1]));
}

#[test]
fn a_provider_added_to_a_ready_node_lives_under_its_generation() {
    let mut rig = ready(1);
    rig.run(1, 0);
    let added = rig.reload(|file| {
        let like = ProviderName::clone(&file.providers[0]);
        let (id, target) = ("pv1".into(), "other".into());
        file.providers
            .push(Arc::new(ProviderName { id, target, ..like }));
        file.models[0].providers.push(provider(1));
    });
    assert_eq!(refreshes(&added), [], "on an adapter that the node has");
    assert_eq!(grants(&rig.submit(2, 0))[0].3, provider(1));
    assert_eq!(rig.shown(1).in_flight, 1);
}

/// A late stall of an earlier binding touches that binding's record alone, and the round trip finds it
/// again. Proves [S-58], [R-160].
#[test]
fn s58_a_late_stall_of_an_earlier_binding_touches_that_binding_alone() {
    let mut rig = ready(4);
    let target = |name: &'static str| move |file: &mut Names| row(file, 0).target = name.into();
    let first = rig.begin_run(1);
    rig.reload(target("t1"));
    assert_eq!(
        granted(&rig.submit(2, 0)),
        clients([2]),
        "same adapter, same payload"
    );
    rig.stalls(first, 1, evidence(HealthEvidence::Unavailable, 1));
    assert_eq!(
        granted(&rig.submit(3, 0)),
        clients([3]),
        "t1 has done nothing"
    );
    rig.reload(target("t0"));
    assert_eq!(rig.submit(4, 0), [], "t0 is set aside still");
    rig.reload(target("t1"));
    assert_eq!(rig.waiting(), 0, "t1 serves who waited");
}
