//! Stall terminals and probe answers: which lease comes back, what is handed on, when a provider is
//! put aside and when it is back.
use iop_control::edge::{Health, HealthSource, Outcome, Status};
use iop_control::step::{
    CommandAnswer, Effect, Eligibility, Ending, Event, Evidence, EvidenceFault, Handoff, Probed,
};
use iop_proto::domain::HealthEvidence::{self, Available, Unavailable, Unknown};

use crate::rig::{
    CHAT, Rig, World, available, client, clients, evidence, granted, grants, handoffs, provider,
    session, small,
};

const FAULTS: [EvidenceFault; 6] = [
    EvidenceFault::Empty,
    EvidenceFault::Malformed,
    EvidenceFault::Pair,
    EvidenceFault::Adapter,
    EvidenceFault::Target,
    EvidenceFault::Sequence,
];

fn is_aside(rig: &Rig, of: usize) -> bool {
    let shown = rig.shown(of);
    let aside = (shown.status, shown.health) == (Status::Unavailable, Health::Unavailable);
    assert!(aside || shown.status == Status::Available, "{shown:?}");
    aside
}

fn handoff(of: usize, health: HealthEvidence) -> Option<Handoff> {
    let provider = provider(of);
    Some(Handoff { provider, health })
}

/// One provider of capacity 1, a run begun on it by client 1, and client 2 waiting.
fn busy() -> (Rig, iop_proto::ids::RunRef) {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    assert_eq!(rig.submit(2, 0), []);
    (rig, run)
}

/// Proves, [R-163], [R-165], [R-166], [R-167], [S-28].
#[test]
fn r163_a_stall_returns_its_lease_once_and_only_valid_evidence_is_handed_on() {
    let valid = HealthEvidence::ALL.map(|health| (evidence(health, 0), handoff(0, health)));
    let rejected = FAULTS.map(|fault| (Evidence::Rejected(fault), None));
    for (said, expected) in valid.into_iter().chain(rejected) {
        let (mut rig, run) = busy();
        let effects = rig.stalls(run, 1, said);
        assert_eq!(handoffs(&effects), [(client(1), expected)], "{said:?}");
        assert!(
            matches!(effects[0], Effect::Handoff { .. }),
            "before grants"
        );
        assert_eq!(
            granted(&effects),
            clients([2]),
            "{said:?}: the slot is free"
        );
        assert!(!is_aside(&rig, 0), "{said:?}");
        let edge = rig.control.snapshot(rig.now).edge;
        assert_eq!((edge.leases_taken, edge.leases_returned), (2, 1));
        // The same terminal once more is nobody's.
        let stale = rig.control.counters().stale_events;
        let again = rig.step(Event::Stalled {
            run,
            client: None,
            evidence: said,
            recovery: Eligibility::ClientGone,
        });
        assert_eq!(again, []);
        assert_eq!(rig.control.counters().stale_events, stale + 1);
        let edge = rig.control.snapshot(rig.now).edge;
        assert_eq!((edge.leases_taken, edge.leases_returned), (2, 1));
    }
}

/// Proves, [S-19], [S-55].
#[test]
fn s55_the_slot_that_an_unavailable_provider_gives_back_is_given_to_nobody() {
    for (health, seq, lowers) in [
        (Unavailable, 1, true),
        (Unavailable, 0, false),
        (Available, 1, false),
        (Unknown, 1, false),
    ] {
        let (mut rig, run) = busy();
        let effects = rig.stalls(run, 1, evidence(health, seq));
        assert_eq!(handoffs(&effects), [(client(1), handoff(0, health))]);
        let next = if lowers { vec![] } else { clients([2]) };
        assert_eq!(granted(&effects), next, "{health:?} {seq}");
        assert_eq!(is_aside(&rig, 0), lowers);
        if lowers {
            // It waits, and the clear alone lets it go. [S-19]
            assert_eq!(rig.submit(3, 0), []);
            assert_eq!(granted(&rig.finds(session(1), 0, 2)), clients([2]));
            assert!(!is_aside(&rig, 0));
        }
    }
}

/// Proves, [R-271], [R-274], [R-275], [R-276], [R-277], [R-278].
#[test]
fn r277_an_overlay_shows_zeros_and_leaves_lease_table_and_configuration_alone() {
    let mut rig = World::new(1)
        .provider(0, 4)
        .provider(0, 4)
        .model(&[0])
        .model(&[1])
        .rig();
    rig.up(session(1), 0);
    let kept = rig.run(1, 0);
    rig.begun(kept);
    let before = rig.shown(0);
    let names = std::sync::Arc::as_ptr(rig.control.names());
    rig.stall(0, Unavailable, 1);
    rig.submit(2, 0);
    rig.submit_as(3, 0, CHAT, true, 10);
    let shown = rig.shown(0);
    assert_eq!(shown.provider, before.provider, "its identity stays");
    assert_eq!(
        (shown.status, shown.health),
        (Status::Unavailable, Health::Unavailable)
    );
    assert_eq!(shown.health_text(rig.control.names()), "unavailable");
    let figures = |rig: &Rig| {
        let shown = rig.shown(0);
        [
            shown.capacity,
            shown.in_flight,
            shown.queued,
            shown.long_context_capacity,
            shown.long_in_flight,
            shown.long_queued,
        ]
    };
    assert_eq!(figures(&rig), [0; 6]);
    assert_eq!(rig.control.snapshot(rig.now).edge.leases_held, 1);
    let other = rig.shown(1);
    assert_eq!((other.status, other.capacity), (Status::Available, 4));
    assert_eq!(rig.run(4, 1).shard, session(1).shard, "others go on");
    rig.finds(session(1), 0, 2);
    assert_eq!(figures(&rig), [4, 3, 0, 4, 1, 0], "the real values again");
    assert_eq!(rig.shown(0).health_text(rig.control.names()), "healthy");
    assert_eq!(std::sync::Arc::as_ptr(rig.control.names()), names);
    rig.complete(kept);
    assert_eq!(rig.shown(0).in_flight, 2);
}

/// Proves, [S-22], [S-23], [S-59].
#[test]
fn s22_a_stall_older_than_the_last_proof_is_handed_on_and_lowers_nothing() {
    // A proof of 6 arrived first, whether it cleared something or not.
    for lowered_before in [true, false] {
        let mut rig = small(4);
        rig.up(session(1), 0);
        if lowered_before {
            rig.stall(0, Unavailable, 3);
            assert!(is_aside(&rig, 0));
        }
        rig.finds(session(1), 0, 6);
        assert!(!is_aside(&rig, 0));
        let effects = rig.stall(0, Unavailable, 5);
        assert_eq!(handoffs(&effects)[0].1, handoff(0, Unavailable));
        assert!(!is_aside(&rig, 0), "5 is older than 6");
        rig.stall(0, Unavailable, 7);
        assert!(is_aside(&rig, 0), "7 is newer");
    }
    // The other order of arrival ends the same. [S-59]
    let mut rig = small(4);
    rig.up(session(1), 0);
    rig.stall(0, Unavailable, 5);
    assert!(is_aside(&rig, 0));
    rig.finds(session(1), 0, 6);
    assert!(!is_aside(&rig, 0));
}

/// Proves [S-24].
#[test]
fn s24_each_provider_has_its_own_mark() {
    let mut rig = World::new(1)
        .provider(0, 1)
        .provider(0, 1)
        .model(&[0])
        .model(&[1])
        .rig();
    rig.up(session(1), 0);
    rig.stall(1, Unavailable, 2);
    rig.stall(0, Unavailable, 1);
    assert!(is_aside(&rig, 0) && is_aside(&rig, 1));
}

/// Proves, [R-164], [R-185], [R-279], [S-25].
#[test]
fn r279_a_new_generation_inherits_nothing_and_old_evidence_does_not_reach_it() {
    let mut rig = small(2);
    rig.up(session(1), 0);
    let old = rig.run(1, 0);
    rig.begun(old);
    rig.stall(0, Unavailable, 1);
    assert!(is_aside(&rig, 0));
    let command = rig.ask(0, 0);
    rig.close(session(1));
    assert_eq!(rig.shown(0).health, Health::Offline, "offline wins");
    rig.up(session(2), 0);
    assert!(!is_aside(&rig, 0));
    let current = rig.run(2, 0);
    // The old connection's terminal comes late: no return, no overlay, no handoff.
    let before = rig.control.snapshot(rig.now).edge;
    let effects = rig.stalls(old, 1, evidence(Unavailable, 9));
    assert_eq!(handoffs(&effects), [(client(1), None)]);
    let after = rig.control.snapshot(rig.now).edge;
    assert_eq!(before.leases_returned, after.leases_returned);
    assert_eq!(after.leases_held, 1);
    assert!(!is_aside(&rig, 0));
    // Nor does an old question's answer clear what the new generation knows.
    rig.begun(current);
    rig.stalls(current, 2, evidence(Unavailable, 1));
    assert!(is_aside(&rig, 0));
    for session in [session(1), session(2)] {
        rig.answers(session, command, available(9));
        assert!(is_aside(&rig, 0), "{session:?}");
    }
    rig.finds(session(2), 0, 2);
    assert!(!is_aside(&rig, 0), "its own does");
}

/// Proves, [R-174].
#[test]
fn r173_a_terminal_without_evidence_returns_its_lease_and_touches_nothing() {
    for ending in [Ending::Complete, Ending::Error, Ending::Violation] {
        let (mut rig, run) = busy();
        let effects = rig.step(Event::Terminal { run, ending });
        assert_eq!(handoffs(&effects), []);
        assert_eq!(granted(&effects), clients([2]), "{ending:?}");
        assert!(!is_aside(&rig, 0));
        assert_eq!(rig.health(), []);
    }
}

/// Proves, [R-191], [R-192].
#[test]
fn r192_no_other_answer_changes_overlay_or_mark() {
    let rejected = FAULTS.map(Probed::Rejected);
    let others = [
        Probed::Unknown,
        Probed::Unavailable,
        available(4),
        available(5),
    ];
    for probed in rejected.into_iter().chain(others) {
        let mut rig = small(1);
        rig.up(session(1), 0);
        let command = rig.ask(0, 0);
        if !matches!(probed, Probed::Available { .. }) {
            rig.answers(session(1), command, probed);
            assert!(!is_aside(&rig, 0), "{probed:?} lowers nothing");
        }
        rig.stall(0, Unavailable, 5);
        assert!(is_aside(&rig, 0), "{probed:?} has marked nothing");
        let command = rig.ask(0, 0);
        assert_eq!(rig.answers(session(1), command, probed), []);
        assert!(is_aside(&rig, 0), "{probed:?} clears nothing");
        rig.finds(session(1), 0, 6);
        assert!(!is_aside(&rig, 0), "{probed:?} has marked nothing");
    }
    for answer in [CommandAnswer::Failed, CommandAnswer::Told] {
        let mut rig = small(1);
        rig.up(session(1), 0);
        rig.stall(0, Unavailable, 5);
        let command = rig.ask(0, 0);
        rig.step(Event::CommandAnswer {
            session: session(1),
            command,
            answer,
        });
        assert!(is_aside(&rig, 0), "{answer:?}");
    }
}

/// Proves, [R-188], [S-26].
#[test]
fn r188_a_proof_that_fits_two_bindings_changes_neither() {
    let twins = |second: fn(&mut iop_control::names::ProviderName)| {
        let mut rig = World::new(1)
            .provider(0, 1)
            .provider(0, 2)
            .but(second)
            .model(&[0])
            .model(&[1])
            .rig();
        rig.up(session(1), 0);
        rig.stall(0, Unavailable, 1);
        rig
    };
    // Equal bindings, the second overlaid or not.
    for both in [true, false] {
        let mut rig = twins(|name| name.target = "t0".into());
        let later = rig.run(70, 1);
        rig.begun(later);
        if both {
            rig.stall(1, Unavailable, 2);
        }
        rig.finds(session(1), 0, 9);
        assert!(is_aside(&rig, 0) && is_aside(&rig, 1) == both);
        rig.stalls(later, 70, evidence(Unavailable, 3));
        assert!(is_aside(&rig, 1));
        let last = rig.health().pop().unwrap();
        assert_ne!(last.outcome, Outcome::Stale, "its mark is not 9");
    }
    // Another target, another adapter, or disabled: one fits, and only that one is cleared.
    type Change = fn(&mut iop_control::names::ProviderName);
    let alone: [Change; 3] = [
        |_| {},
        |name| (name.target, name.adapter) = ("t0".into(), "b".into()),
        |name| (name.target, name.enabled) = ("t0".into(), false),
    ];
    for (row, change) in alone.into_iter().enumerate() {
        let mut rig = twins(change);
        if row < 2 {
            rig.stall(1, Unavailable, 2);
        }
        rig.finds(session(1), 0, 9);
        assert!(!is_aside(&rig, 0), "{row}");
        assert!(row == 2 || is_aside(&rig, 1), "{row}: the other's stays");
    }
}

/// Proves, [R-316].
#[test]
fn r314_each_piece_of_evidence_is_counted_and_told_once_after_its_decision() {
    let mut rig = small(4);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.stalls(run, 1, Evidence::Rejected(EvidenceFault::Target));
    for (health, seq) in [
        (Unknown, 0),
        (Available, 1),
        (Unavailable, 2),
        (Unavailable, 3),
        (Unavailable, 3),
    ] {
        if is_aside(&rig, 0) {
            // Nothing is granted now: a run from before stalls.
            let run = rig.spares.pop().unwrap();
            rig.stalls(run, 1, evidence(health, seq));
        } else {
            keep_spares(&mut rig);
            rig.stall(0, health, seq);
        }
    }
    let ask = |rig: &mut Rig, probed| {
        let command = rig.ask(0, 0);
        rig.answers(session(1), command, probed);
    };
    ask(&mut rig, Probed::Unknown);
    ask(&mut rig, available(3));
    ask(&mut rig, available(4));
    ask(&mut rig, available(5));
    use HealthSource::{Capabilities, Stall};
    let expected = [
        (Stall, None, Outcome::Rejected),
        (Stall, Some(Unknown), Outcome::Unchanged),
        (Stall, Some(Available), Outcome::Marked),
        (Stall, Some(Unavailable), Outcome::Lowered),
        (Stall, Some(Unavailable), Outcome::Marked),
        (Stall, Some(Unavailable), Outcome::Stale),
        (Capabilities, Some(Unknown), Outcome::Unchanged),
        (Capabilities, Some(Available), Outcome::Stale),
        (Capabilities, Some(Available), Outcome::Cleared),
        (Capabilities, Some(Available), Outcome::Marked),
    ];
    let told = rig.health();
    let seen: Vec<_> = told
        .iter()
        .map(|told| (told.source, told.health, told.outcome))
        .collect();
    assert_eq!(seen, expected);
    assert_eq!(told[0].fault, Some(EvidenceFault::Target));
    assert!(told.iter().all(|told| told.provider == provider(0)));
    for source in HealthSource::ALL {
        for outcome in Outcome::ALL {
            let times = seen
                .iter()
                .filter(|told| (told.0, told.2) == (source, outcome));
            let counted = rig.control.counters().evidence_of(source, outcome);
            assert_eq!(counted, times.count() as u64, "{source:?} {outcome:?}");
        }
    }
}

/// Runs begun before an overlay, to stall under it.
fn keep_spares(rig: &mut Rig) {
    while rig.shown(0).in_flight < 3 {
        let run = rig.run(50 + rig.shown(0).in_flight, 0);
        rig.begun(run);
        rig.spares.push(run);
    }
}

#[test]
fn r172_a_handoff_starts_no_second_run() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0, 1])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let run = rig.run(1, 0);
    rig.begun(run);
    let effects = rig.stalls(run, 1, evidence(Available, 1));
    assert_eq!(handoffs(&effects).len(), 1);
    assert_eq!(grants(&effects), []);
    assert_eq!(rig.pass_ms(60_000), []);
}
