//! Selection, leases, final reports: machines 2 and 3.
use iop_control::names::ProviderName;
use iop_control::step::{Effect, Ending, Event};
use iop_proto::catalog::{Operation, OperationSet, ProviderKind};
use iop_proto::limits::{DISPATCH_MS_DEFAULT, RUNS_PER_SHARD_MAX};
use iop_proto::reason::Reason;

use crate::rig::{Rig, World, client, clients, granted, grants, provider, refused, session, small};

fn providers(effects: &[Effect]) -> Vec<usize> {
    grants(effects).iter().map(|grant| grant.3.row()).collect()
}

/// Proves, [R-240], [R-269].
#[test]
fn r232_the_candidate_with_room_is_selected_and_capacity_is_never_exceeded() {
    let mut rig = World::new(2)
        .provider(0, 2)
        .provider(1, 3)
        .model(&[0, 1])
        .model(&[])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let mut runs = Vec::new();
    for slot in 0..5 {
        runs.push(rig.run(slot, 0));
    }
    assert_eq!((rig.shown(0).in_flight, rig.shown(1).in_flight), (2, 3));
    assert_eq!(rig.submit(5, 0), [], "the sixth waits");
    rig.complete(runs[0]);
    assert_eq!((rig.shown(0).in_flight, rig.shown(1).in_flight), (2, 3));
    for &run in &runs[1..] {
        rig.complete(run);
    }
    assert_eq!(
        rig.shown(0).in_flight + rig.shown(1).in_flight,
        1,
        "the one that waited"
    );
}

/// Proves.
#[test]
fn r239_one_provider_id_on_two_nodes_is_two_resources() {
    fn gpu(provider: &mut ProviderName) {
        provider.id = "gpu".into();
    }
    let world = World::new(2)
        .provider(0, 1)
        .but(gpu)
        .provider(1, 1)
        .but(gpu);
    let mut rig = world.model(&[0]).model(&[1]).rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let figures = |rig: &Rig| (rig.shown(0).in_flight, rig.shown(1).in_flight);
    rig.run(1, 0);
    assert_eq!(figures(&rig), (1, 0));
    let other = rig.run(2, 1);
    assert_eq!(
        figures(&rig),
        (1, 1),
        "the one's lease fills nothing of the other"
    );
    assert_eq!((rig.submit(3, 0), rig.submit(4, 1)), (vec![], vec![]));
    assert_eq!(granted(&rig.complete(other)), clients([4]));
    rig.close(session(1));
    assert_eq!(figures(&rig), (0, 1));
}

/// Proves [D-11].
#[test]
fn d011_a_model_that_nobody_serves_is_refused_at_once() {
    let mut rig = World::new(1)
        .provider(0, 4)
        .but(|provider| {
            provider.operations = OperationSet::default().with(Operation::Embeddings);
            provider.long_capacity = 0;
        })
        .provider(0, 4)
        .but(|provider| provider.enabled = false)
        .model(&[0, 1])
        .model(&[])
        .rig();
    let none = |slot| vec![(client(slot), Reason::NoProviderConfigured, 0)];
    assert_eq!(
        refused(&rig.submit(1, 0)),
        none(1),
        "no provider for the operation"
    );
    assert_eq!(refused(&rig.submit(2, 1)), none(2), "no provider at all");
    let long = rig.submit_as(3, 0, Operation::Embeddings, true, 100);
    assert_eq!(refused(&long), none(3), "no provider takes long ones");
    // Offline is not unconfigured: it waits. `[A-26]`
    assert_eq!(rig.submit_as(4, 0, Operation::Embeddings, false, 100), []);
    assert_eq!(granted(&rig.up(session(1), 0)), clients([4]));
}

/// Proves.
#[test]
fn r237_a_provider_type_excludes_nobody() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .but(|provider| provider.kind = ProviderKind::Ollama)
        .provider(0, 1)
        .model(&[0, 1])
        .rig();
    rig.up(session(1), 0);
    let mut chosen = Vec::new();
    for slot in 0..2 {
        chosen.extend(providers(&rig.submit(slot, 0)));
    }
    chosen.sort_unstable();
    assert_eq!(chosen, [0, 1]);
}

/// Proves.
#[test]
fn r238_an_unreferenced_provider_is_never_used() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .provider(0, 9)
        .model(&[0])
        .rig();
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    assert_eq!(rig.submit(2, 0), []);
    assert_eq!(rig.shown(1).in_flight, 0);
    assert_eq!(granted(&rig.complete(run)), clients([2]));
}

/// Proves [D-16].
#[test]
fn d016_the_least_loaded_for_its_size_then_the_longest_unused_is_selected() {
    let mut rig = World::new(1)
        .provider(0, 4)
        .provider(0, 2)
        .provider(0, 4)
        .model(&[0, 1, 2])
        .rig();
    rig.up(session(1), 0);
    let mut chosen = Vec::new();
    for slot in 0..5 {
        chosen.extend(providers(&rig.submit(slot, 0)));
    }
    // 1/4 and 1/4 before 1/2; at 2/4, 1/2, 2/4 the one never used goes first.
    assert_eq!(chosen, [0, 2, 1, 0, 2]);
}

/// Proves, [R-174].
#[test]
fn r174_every_kind_of_terminal_returns_the_lease_once() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let mut slot = 0;
    for ending in [Ending::Complete, Ending::Error, Ending::Violation] {
        let run = rig.run(slot, 0);
        rig.submit(slot + 1, 0);
        rig.begun(run);
        assert_eq!(rig.shown(0).in_flight, 1, "beginning returns nothing");
        let effects = rig.step(Event::Terminal { run, ending });
        assert_eq!(granted(&effects), clients([slot + 1]), "{ending:?}");
        assert_eq!(
            rig.step(Event::Terminal { run, ending }),
            [],
            "a second one counts nothing"
        );
        rig.complete(grants(&effects)[0].1);
        assert_eq!(rig.shown(0).in_flight, 0);
        slot += 2;
    }
    let returned = rig.control.counters().returns_terminal;
    assert_eq!(returned, 6);
}

#[test]
fn a_run_that_does_not_begin_in_time_is_cancelled_and_its_client_told() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let late = rig.run(1, 0);
    assert_eq!(rig.pass_ms(DISPATCH_MS_DEFAULT - 1), []);
    let reason = Reason::DispatchTimeout;
    assert_eq!(rig.pass_ms(1), [Effect::Cancel { run: late, reason }]);
    assert_eq!(
        rig.shown(0).in_flight,
        1,
        "only the report returns the lease"
    );
    let effects = rig.back(late, 7);
    assert_eq!(
        refused(&effects),
        [(client(7), reason, 1)],
        "where it waits now"
    );
    assert_eq!((rig.shown(0).in_flight, rig.waiting()), (0, 0));
    // One that began in time is left alone; one that begins while the cancel is on its way ends.
    let run = rig.run(2, 0);
    rig.begun(run);
    assert_eq!(rig.pass_ms(60_000), []);
    rig.complete(run);
    let run = rig.run(3, 0);
    assert_eq!(rig.pass_ms(DISPATCH_MS_DEFAULT).len(), 1);
    rig.begun(run);
    assert_eq!(rig.shown(0).in_flight, 1);
    let ending = Ending::Error;
    rig.step(Event::Terminal { run, ending });
    assert_eq!(rig.shown(0).in_flight, 0);
}

/// Proves [D-17].
#[test]
fn d017_count_tokens_takes_a_quarter_at_most_and_delays_nobody_older() {
    let mut rig = World::new(1).provider(0, 8).model(&[0]).rig();
    rig.up(session(1), 0);
    let mut count = |slot| rig.submit_as(slot, 0, Operation::CountTokens, false, 10);
    let first = grants(&count(0))[0].1;
    assert_eq!(granted(&count(1)), clients([1]));
    assert_eq!(count(2), [], "the third of eight waits");
    for slot in 10..16 {
        rig.run(slot, 0); // the rest of the capacity is the others'
    }
    assert_eq!(rig.submit(20, 0), []);
    // The freed slot could serve the waiting count_tokens, which is older.
    assert_eq!(granted(&rig.complete(first)), clients([2]));
}

#[test]
fn count_tokens_has_at_least_one_place() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let effects = rig.submit_as(1, 0, Operation::CountTokens, false, 10);
    assert_eq!(granted(&effects), clients([1]));
}

#[test]
fn a_shard_without_run_slots_refuses() {
    let mut rig = World::new(1).provider(0, u32::MAX).model(&[0]).rig();
    rig.up(session(1), 0);
    let mut out = iop_control::step::Out::default();
    let mut submit = |slot| {
        let event = Event::Submit {
            client: client(slot),
            model: crate::rig::model(0),
            operation: crate::rig::CHAT,
            long: false,
            body_bytes: 1,
        };
        rig.control.handle(rig.now, event, &mut out);
        out.drain().collect::<Vec<_>>()
    };
    let mut last = None;
    for slot in 0..RUNS_PER_SHARD_MAX {
        last = grants(&submit(slot)).first().map(|grant| grant.1);
    }
    let full = submit(RUNS_PER_SHARD_MAX);
    assert_eq!(
        refused(&full),
        [(client(RUNS_PER_SHARD_MAX), Reason::RunsFull, 1)]
    );
    rig.complete(last.unwrap());
    let again = rig.run(RUNS_PER_SHARD_MAX + 1, 0);
    assert_eq!(again.slot, last.unwrap().slot);
    assert_ne!(
        again.generation,
        last.unwrap().generation,
        "a slot's generation is never reused"
    );
}

#[test]
fn a_grant_names_the_owner_of_the_providers_node() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[1])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let effects = rig.submit(1, 0);
    let (to, run, of, by) = grants(&effects)[0];
    assert_eq!((to, of, by), (client(1), session(2), provider(1)));
    assert_eq!(run.shard, of.shard);
    assert_eq!(effects[0].shard(), to.shard);
}

#[test]
fn a_run_that_is_not_ended_when_it_should_be_is_told_of_and_keeps_its_lease() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.submit(2, 0);
    assert_eq!(rig.step(Event::Overdue { run }), []);
    let told: Vec<_> = rig
        .control
        .take_overdue()
        .map(|told| told.provider)
        .collect();
    assert_eq!(told, [provider(0)]);
    assert_eq!(rig.control.snapshot(rig.now).edge.leases_held, 1);
    assert_eq!(granted(&rig.complete(run)), clients([2]), "its end does");
    rig.step(Event::Overdue { run });
    assert_eq!(
        (
            rig.control.take_overdue().count(),
            rig.control.counters().stale_events
        ),
        (0, 1)
    );
}
