//! Questions to nodes: who may be asked, what ends a question, and when an overlaid binding is
//! asked about again.
use std::sync::Arc;

use iop_control::edge::{CommandEnd, CommandRefusal};
use iop_control::names::Names;
use iop_control::step::{CommandAnswer, CommandId, Effect, Event, Out};
use iop_proto::domain::CommandKind;
use iop_proto::domain::HealthEvidence::Unavailable;
use iop_proto::ids::SessionRef;
use iop_proto::limits::{
    COMMAND_MS_DEFAULT, COMMANDS_PER_NODE_MAX, OPERATOR_COMMANDS_MAX, PROBE_FIRST_MS,
    PROBE_LONGEST_MS,
};

use crate::rig::{
    Rig, World, available, commands, drop_provider, evidence, node, provider, session, small,
};

fn told(rig: &mut Rig, session: SessionRef, command: CommandId) {
    let answer = CommandAnswer::Told;
    let effects = rig.step(Event::CommandAnswer {
        session,
        command,
        answer,
    });
    assert_eq!(effects, []);
}

fn finished(rig: &mut Rig) -> Vec<(CommandId, CommandEnd)> {
    rig.control.take_finished().collect()
}

/// Proves, [R-254], [S-27].
#[test]
fn r254_each_answer_ends_its_own_question_and_a_late_one_nothing() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let [first, second, third] = [rig.ask(0, 0), rig.ask(0, 0), rig.ask(0, 0)];
    told(&mut rig, session(1), second);
    told(&mut rig, session(1), first);
    let answered = CommandEnd::Answered;
    assert_eq!(finished(&mut rig), [(second, answered), (first, answered)]);
    // A second answer, and one that a stranger's connection claims, are nobody's.
    let stale = rig.control.counters().stale_events;
    told(&mut rig, session(1), first);
    told(&mut rig, session(2), third);
    assert_eq!(rig.control.counters().stale_events, stale + 2);
    assert_eq!(finished(&mut rig), []);
    assert_eq!(rig.pass_ms(COMMAND_MS_DEFAULT - 1), []);
    assert_eq!(finished(&mut rig), []);
    rig.pass_ms(1);
    assert_eq!(finished(&mut rig), [(third, CommandEnd::TimedOut)]);
    told(&mut rig, session(1), third);
    assert_eq!(finished(&mut rig), []);
    // Two proofs in reverse order: the lower one comes too late. [S-27]
    rig.stall(0, Unavailable, 1);
    let [first, second] = [rig.ask(0, 0), rig.ask(0, 0)];
    rig.answers(session(1), second, available(3));
    rig.answers(session(1), first, available(2));
    rig.stall(0, Unavailable, 3);
    assert_eq!(rig.shown(0).capacity, 1, "3 is known already");
}

/// Proves.
#[test]
fn r259_a_question_takes_no_lease_and_needs_no_capacity() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    let before = rig.control.snapshot(rig.now).edge;
    let command = rig.ask(0, 0);
    assert_eq!(rig.control.snapshot(rig.now).edge, before);
    told(&mut rig, session(1), command);
    assert_eq!(rig.control.snapshot(rig.now).edge, before);
}

/// Proves.
#[test]
fn r033_only_a_ready_owner_is_asked_and_its_generation_takes_its_questions_along() {
    let mut rig = small(1);
    let kind = CommandKind::TransportStatus;
    let mut out = Out::default();
    let mut ask = |rig: &mut Rig| {
        let asked = rig.control.command(rig.now, node(0), kind, None, &mut out);
        (asked, out.drain().collect::<Vec<_>>())
    };
    let not_ready = (Err(CommandRefusal::NotReady), vec![]);
    assert_eq!(ask(&mut rig), not_ready, "nobody");
    rig.register(session(1), 0);
    assert_eq!(ask(&mut rig), not_ready, "pending");
    rig.ready(session(1), 0);
    let (asked, effects) = ask(&mut rig);
    let command = asked.unwrap();
    let sent = Effect::Command {
        session: session(1),
        command,
        kind,
        provider: None,
    };
    assert_eq!(effects, [sent]);
    rig.close(session(1));
    assert_eq!(finished(&mut rig), [(command, CommandEnd::NodeLost)]);
    assert_eq!(ask(&mut rig), not_ready, "gone");
    rig.up(session(2), 0);
    told(&mut rig, session(1), command);
    assert_eq!(rig.pass_ms(COMMAND_MS_DEFAULT), []);
    assert_eq!(finished(&mut rig), []);
}

#[test]
fn questions_are_bounded_per_node_and_in_all_and_a_taken_end_makes_room() {
    let mut world = World::new(12);
    for row in 0..12 {
        world = world.provider(row, 1);
    }
    let mut rig = world.model(&[0]).rig();
    let mut out = Out::default();
    let mut ask = |rig: &mut Rig, on| {
        let kind = CommandKind::ProviderStatus;
        let asked = rig.control.command(rig.now, node(on), kind, None, &mut out);
        out.drain().count();
        asked
    };
    for row in 0..12 {
        rig.up(session(u32::try_from(row).unwrap()), row);
    }
    for _ in 1..COMMANDS_PER_NODE_MAX {
        ask(&mut rig, 0).unwrap();
    }
    assert_eq!(
        ask(&mut rig, 0),
        Err(CommandRefusal::Busy),
        "its last is the prober's"
    );
    let mut asked = COMMANDS_PER_NODE_MAX - 1;
    let mut row = 1;
    while asked < OPERATOR_COMMANDS_MAX {
        if ask(&mut rig, row).is_ok() {
            asked += 1;
        } else {
            row += 1;
        }
    }
    assert_eq!(ask(&mut rig, 11), Err(CommandRefusal::Busy));
    rig.close(session(0));
    assert_eq!(
        ask(&mut rig, 11),
        Err(CommandRefusal::Busy),
        "not taken yet"
    );
    let taken = COMMANDS_PER_NODE_MAX as usize - 1;
    assert_eq!(finished(&mut rig).len(), taken);
    ask(&mut rig, 11).unwrap();
}

/// Milliseconds until the next command of the prober, and the command.
fn next_probe(rig: &mut Rig) -> (u64, CommandId) {
    for waited in 0..200 {
        let sent = commands(&rig.pass_ms(500));
        if let Some(&(_, command, Some(_))) = sent.first() {
            assert_eq!(sent.len(), 1);
            assert!(!command.is_operators());
            return ((waited + 1) * 500, command);
        }
    }
    panic!("nobody is asked")
}

/// Proves [D-58].
#[test]
fn d58_an_overlaid_binding_is_asked_about_after_5_s_then_doubling_to_60_s() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    assert_eq!(
        rig.pass_ms(10 * PROBE_LONGEST_MS),
        [],
        "no overlay, no question"
    );
    rig.stall(0, Unavailable, 1);
    for base in [
        PROBE_FIRST_MS,
        10_000,
        20_000,
        40_000,
        PROBE_LONGEST_MS,
        PROBE_LONGEST_MS,
    ] {
        let (waited, command) = next_probe(&mut rig);
        let (least, most) = (base * 8 / 10, base * 12 / 10 + 500);
        assert!((least..=most).contains(&waited), "{waited} ms for {base}");
        rig.answers(session(1), command, iop_control::step::Probed::Unknown);
    }
    // One that is never answered counts from the end of its wait.
    let (_, silent) = next_probe(&mut rig);
    let (waited, command) = next_probe(&mut rig);
    assert!(
        waited >= COMMAND_MS_DEFAULT + PROBE_LONGEST_MS * 8 / 10,
        "{waited}"
    );
    rig.answers(session(1), silent, available(8));
    assert_eq!(rig.shown(0).capacity, 0, "too late");
    rig.answers(session(1), command, available(9));
    assert_eq!(rig.shown(0).capacity, 1);
    assert_eq!(rig.pass_ms(10 * PROBE_LONGEST_MS), [], "found");
    rig.stall(0, Unavailable, 10);
    let (waited, _) = next_probe(&mut rig);
    assert!(
        waited <= 6_500,
        "a new overlay begins at 5 s again: {waited}"
    );
    rig.close(session(1));
    assert_eq!(
        rig.pass_ms(10 * PROBE_LONGEST_MS),
        [],
        "gone with its generation"
    );
}

/// One question of the prober is outstanding per node; others of the node wait for it.
#[test]
fn d58_a_nodes_bindings_are_asked_about_one_at_a_time() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0])
        .model(&[1])
        .model(&[2])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    for row in 0..3 {
        rig.stall(row, Unavailable, 1 + row as u64);
    }
    let sent = commands(&rig.pass_ms(7_000));
    let about: Vec<_> = sent.iter().map(|sent| (sent.0, sent.2.unwrap())).collect();
    assert_eq!(about.len(), 2, "{about:?}");
    assert!(
        about.contains(&(session(2), provider(2))),
        "another node's is independent"
    );
    let &(_, first, Some(asked)) = sent.iter().find(|sent| sent.0 == session(1)).unwrap() else {
        panic!("no provider")
    };
    let next = commands(&rig.answers(session(1), first, available(9)));
    let other = provider(1 - asked.row());
    assert_eq!(next.len(), 1);
    assert_eq!((next[0].0, next[0].2), (session(1), Some(other)));
}

/// Nothing clears the overlay of a disabled or removed provider, so nothing is asked about it; enabled
/// again it is asked about as before.
#[test]
fn d58_a_disabled_or_removed_provider_is_not_asked_about_and_holds_nobody_up() {
    let enable =
        |enabled| move |file: &mut Names| Arc::make_mut(&mut file.providers[0]).enabled = enabled;
    for removed in [false, true] {
        let mut rig = World::new(1)
            .provider(0, 1)
            .provider(0, 1)
            .model(&[0])
            .model(&[1])
            .rig();
        rig.up(session(1), 0);
        rig.stall(0, Unavailable, 1);
        let mut row = None;
        let gone = rig.reload(|file| {
            row = Some(Arc::clone(&file.providers[0]));
            if removed {
                drop_provider(file, 0);
            } else {
                enable(false)(file);
            }
        });
        assert_eq!(commands(&gone), []);
        assert_eq!(commands(&rig.pass_ms(10 * PROBE_LONGEST_MS)), []);
        rig.stall(1, Unavailable, 2);
        let (waited, command) = next_probe(&mut rig);
        assert!(waited <= 6_500, "it waits for nobody: {waited}");
        assert_eq!(rig.answers(session(1), command, available(3)), []);
        rig.reload(|file| {
            if removed {
                file.providers.push(row.take().unwrap());
            } else {
                enable(true)(file);
            }
        });
        let (_, command) = next_probe(&mut rig);
        rig.answers(session(1), command, available(4));
        assert_eq!(rig.shown(0).capacity, 1, "found");
    }
}

/// The overlay comes while the provider is disabled, from a run that it had before.
#[test]
fn d58_an_overlay_of_a_disabled_provider_is_asked_about_once_it_is_enabled() {
    let mut rig = small(1);
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.reload(|file| Arc::make_mut(&mut file.providers[0]).enabled = false);
    rig.stalls(run, 1, evidence(Unavailable, 1));
    assert_eq!(commands(&rig.pass_ms(10 * PROBE_LONGEST_MS)), []);
    rig.reload(|file| Arc::make_mut(&mut file.providers[0]).enabled = true);
    let (waited, command) = next_probe(&mut rig);
    assert!(waited <= 6_500, "{waited}");
    rig.answers(session(1), command, available(2));
    assert_eq!(rig.shown(0).capacity, 1);
}
