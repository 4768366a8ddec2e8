//! A stalled request's second run: where it goes, what it keeps, and that there is no third.
use iop_control::edge::{Recovery, RecoveryNotice};
use iop_control::step::{Effect, Eligibility, Ending, Event};
use iop_proto::domain::HealthEvidence::Unknown;
use iop_proto::ids::RunRef;
use iop_proto::reason::Reason;

use crate::rig::{
    Rig, World, client, clients, evidence, granted, grants, handoffs, provider, refused, session,
};

/// Two nodes with one provider of capacity 1 each, one model served by both.
fn pair() -> Rig {
    let world = World::new(2).provider(0, 1).provider(1, 1);
    let mut rig = world.model(&[0, 1]).model(&[0]).rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    rig
}

fn recovers(effects: &[Effect]) -> bool {
    let said = effects.iter().find_map(|effect| match effect {
        Effect::Handoff { recovers, .. } => Some(*recovers),
        _ => None,
    });
    said.expect("a stall is handed on")
}

fn told(rig: &mut Rig) -> Vec<(Eligibility, Option<Recovery>)> {
    let told = rig.control.take_recoveries();
    told.map(|told: RecoveryNotice| (told.eligibility, told.result))
        .collect()
}

/// A begun run of client 1 stalls, whole.
fn stalls(rig: &mut Rig) -> Vec<Effect> {
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.stalls_whole(run, 1)
}

fn second(rig: &mut Rig) -> RunRef {
    let effects = stalls(rig);
    assert!(recovers(&effects));
    let seen = grants(&effects);
    assert_eq!(seen.len(), 1, "{effects:?}");
    assert_eq!(
        (seen[0].0, seen[0].3),
        (client(1), provider(1)),
        "not where it failed"
    );
    rig.begun(seen[0].1);
    seen[0].1
}

/// Proves [D-18], [R-317], [R-318].
#[test]
fn d18_a_stalled_request_runs_once_more_elsewhere_and_its_story_is_told_once() {
    let ended = |end: fn(&mut Rig, RunRef) -> Vec<Effect>, result| {
        let mut rig = pair();
        let run = second(&mut rig);
        assert_eq!(
            rig.control.snapshot(rig.now).edge.leases_held,
            1,
            "one at a time"
        );
        assert_eq!(told(&mut rig), [], "it goes on");
        let effects = end(&mut rig, run);
        assert_eq!(grants(&effects), [], "no third run");
        assert_eq!(told(&mut rig), [(Eligibility::Eligible, Some(result))]);
        let counters = rig.control.counters();
        assert_eq!(counters.eligibility_of(Eligibility::Eligible), 1);
        for other in Recovery::ALL {
            assert_eq!(counters.recoveries_of(other), u64::from(other == result));
        }
        assert_eq!(rig.control.snapshot(rig.now).edge.leases_held, 0);
    };
    ended(|rig, run| rig.complete(run), Recovery::Recovered);
    let error = |rig: &mut Rig, run| {
        let ending = Ending::Error;
        rig.step(Event::Terminal { run, ending })
    };
    ended(error, Recovery::Failed);
    let again = |rig: &mut Rig, run| {
        let effects = rig.stalls_whole(run, 1);
        assert!(!recovers(&effects));
        effects
    };
    ended(again, Recovery::StalledAgain);
    let lost = |rig: &mut Rig, run| {
        rig.close(session(2));
        rig.step(Event::Lost { run })
    };
    ended(lost, Recovery::Failed);
}

/// Proves, [R-317], [R-319].
#[test]
fn r172_a_handoff_alone_starts_no_second_run() {
    use Eligibility::{ClientGone, Committed, FenceUnconfirmed, NoOtherProvider, Off};
    for said in [
        Off,
        Committed,
        FenceUnconfirmed,
        ClientGone,
        NoOtherProvider,
    ] {
        let mut rig = pair();
        let run = rig.run(1, 0);
        rig.begun(run);
        let waits = (said != ClientGone).then_some(client(1));
        let effects = rig.step(Event::Stalled {
            run,
            client: waits,
            evidence: evidence(Unknown, 1),
            recovery: said,
        });
        assert_eq!(handoffs(&effects).len(), usize::from(waits.is_some()));
        assert_eq!(grants(&effects), [], "{said:?}");
        assert_eq!(rig.waiting(), 0);
        assert_eq!(told(&mut rig), [(said, None)]);
        assert_eq!(rig.control.counters().eligibility_of(said), 1);
    }
    // Nor one whose evidence counts nothing, or whose model has no other provider.
    let mut rig = pair();
    let run = rig.run(1, 0);
    rig.begun(run);
    let effects = rig.step(Event::Stalled {
        run,
        client: Some(client(1)),
        evidence: iop_control::step::Evidence::Rejected(iop_control::step::EvidenceFault::Target),
        recovery: Eligibility::Eligible,
    });
    assert!(!recovers(&effects));
    assert_eq!(told(&mut rig), [(Eligibility::EvidenceRejected, None)]);
    let run = rig.run(2, 1);
    rig.begun(run);
    assert!(!recovers(&rig.stalls_whole(run, 2)));
    assert_eq!(told(&mut rig), [(NoOtherProvider, None)]);
    assert_eq!(rig.waiting(), 0);
}

/// It keeps the age it had, waits for what is left of its wait, and takes the failed provider's free
/// slot from nobody.
#[test]
fn s63_the_second_run_waits_with_its_age_and_never_for_the_provider_that_failed() {
    let mut rig = pair();
    let other = rig.run(8, 0);
    rig.begun(other);
    let other_provider = if rig.shown(0).in_flight == 1 { 0 } else { 1 };
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.submit(2, 0); // younger, waits
    rig.pass_ms(100_000); // the younger one's wait ends; a running request has none
    rig.submit(3, 0);
    let effects = rig.stalls_whole(run, 1);
    // The slot it gives back goes to the younger one; itself, it waits for the other provider.
    assert_eq!(granted(&effects), clients([3]));
    assert_eq!(rig.waiting(), 1);
    assert_eq!(rig.shown(other_provider).queued, 1);
    assert_eq!(
        rig.shown(1 - other_provider).queued,
        0,
        "not a candidate of it"
    );
    rig.submit(4, 0);
    let effects = rig.complete(other);
    assert_eq!(granted(&effects), clients([1]), "older than client 4");
    // Or it waits in vain, for as long as it had left.
    let mut rig = pair();
    let other = rig.run(8, 0);
    rig.begun(other);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.pass_ms(100_000);
    assert_eq!(grants(&rig.stalls_whole(run, 1)), []);
    assert_eq!(rig.pass_ms(29_999), []);
    let effects = rig.pass_ms(1);
    assert_eq!(refused(&effects)[0].1, Reason::QueueTimeout);
    let unserved = (Eligibility::Eligible, Some(Recovery::Unserved));
    assert_eq!(told(&mut rig), [unserved]);
    // Or its client leaves while it waits; or, parked, when it was granted before control heard of that.
    let mut rig = pair();
    let other = rig.run(8, 0);
    rig.begun(other);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.stalls_whole(run, 1);
    rig.step(Event::ClientGone { client: client(1) });
    assert_eq!(rig.waiting(), 0);
    let gone = (Eligibility::Eligible, Some(Recovery::ClientGone));
    assert_eq!(told(&mut rig), [gone]);
    assert_eq!(grants(&rig.complete(other)), []);
    let mut rig = pair();
    let granted = grants(&stalls(&mut rig))[0].1;
    let left = rig.step(Event::ClientGone { client: client(1) });
    assert_eq!((left, told(&mut rig)), (vec![], vec![]), "the grant stands");
    let (run, client) = (granted, None);
    assert_eq!(rig.step(Event::NotSent { run, client }), []);
    assert_eq!((rig.waiting(), told(&mut rig)), (0, vec![gone]));
}

/// A fence before the second run has begun: it waits again, and still not for the first provider.
#[test]
fn a_fenced_second_run_keeps_its_place_and_what_it_may_not_have() {
    let mut rig = pair();
    let effects = stalls(&mut rig);
    let run = grants(&effects)[0].1;
    rig.close(session(2));
    assert_eq!(grants(&rig.back(run, 1)), []);
    assert_eq!(
        rig.waiting(),
        1,
        "the first provider is free and not for it"
    );
    assert_eq!(rig.submit(5, 0).len(), 1, "others may have it");
    let effects = rig.up(session(3), 1);
    assert_eq!(granted(&effects), clients([1]));
}

/// Two of one model wait, each for another provider than its own, while a fenced run of the model may
/// come back; when it has, the oldest are served first, each where it may.
#[test]
fn second_runs_of_different_providers_wait_for_a_run_that_may_come_back() {
    let mut world = World::new(4);
    for node in 0..4 {
        world = world.provider(node, 1);
    }
    let mut rig = world.model(&[0, 1, 2, 3]).rig();
    for row in 0..4 {
        rig.up(session(row), row as usize);
    }
    let runs = [1, 2, 3, 4].map(|slot| {
        let seen = grants(&rig.submit(slot, 0));
        (seen[0].1, seen[0].2, seen[0].3)
    });
    for (run, ..) in &runs[..3] {
        rig.begun(*run);
    }
    rig.close(runs[3].1);
    assert_eq!(grants(&rig.stalls_whole(runs[2].0, 3)), []);
    assert_eq!(grants(&rig.stalls_whole(runs[1].0, 2)), []);
    assert_eq!(grants(&rig.submit(5, 0)), [], "nor past them");
    assert_eq!(rig.waiting(), 3);
    let seen = grants(&rig.back(runs[3].0, 4));
    let served: Vec<_> = seen.iter().map(|grant| (grant.0, grant.3)).collect();
    let expected = [(client(2), runs[2].2), (client(3), runs[1].2)];
    assert_eq!(served, expected, "each where the other has failed");
    rig.begun(seen[0].1);
    assert_eq!(granted(&rig.complete(seen[0].1)), clients([4]));
    assert_eq!(granted(&rig.complete(runs[0].0)), clients([5]));
}
