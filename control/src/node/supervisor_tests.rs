//! The supervisor against its table: exact attempts, exact waits, every exit, stale events.
use super::*;

const T0: Now = Now::from_nanos(0);
const DRAIN_MS: u64 = 60_000;
/// Every step from the dial to serving, and the action each must cause.
const LADDER: [(LinkEvent, Option<Action>); 7] = [
    (LinkEvent::Connected, None),
    (LinkEvent::Identified, Some(Action::Register)),
    (LinkEvent::Registered, Some(Action::Apply)),
    (LinkEvent::Applied, Some(Action::StartAdapters)),
    (LinkEvent::Started, Some(Action::InstallHandlers)),
    (LinkEvent::Installed, Some(Action::SendReady)),
    (LinkEvent::Ready, None),
];

fn policy(interval: i64, attempts: i64) -> Policy {
    Policy::new(Some(interval), Some(attempts), Some(0.0)).unwrap()
}

/// A supervisor, its virtual clock, and a shell that performs every `End` at once.
struct World {
    machine: Supervisor,
    now: Now,
    dials: Vec<Now>,
    actions: Vec<Action>,
    exit: Option<Exit>,
}

impl World {
    fn new(policy: Policy) -> Self {
        let machine = Supervisor::new(policy, DRAIN_MS);
        let mut world = Self {
            machine,
            now: T0,
            dials: vec![],
            actions: vec![],
            exit: None,
        };
        world.event(Event::Valid);
        world
    }

    fn event(&mut self, event: Event) {
        let action = self.machine.step(self.now, event, 0);
        self.perform(action);
    }

    fn perform(&mut self, action: Option<Action>) {
        let Some(action) = action else { return };
        self.actions.push(action);
        match action {
            Action::Dial(_) => self.dials.push(self.now),
            Action::End { link, .. } => self.event(Event::Link(link, LinkEvent::Ended)),
            Action::Exit(exit) => self.exit = Some(exit),
            _ => {}
        }
    }

    fn link(&mut self, event: LinkEvent) {
        self.event(Event::Link(LinkId(self.machine.link), event));
    }

    /// Lets the next deadline come, if there is one.
    fn elapse(&mut self) {
        if let Some(deadline) = self.machine.deadline() {
            self.now = self.now.max(deadline);
            let action = self.machine.tick(self.now);
            self.perform(action);
        }
    }

    fn climb(&mut self, steps: usize) {
        for (event, expected) in &LADDER[..steps] {
            let before = self.actions.len();
            self.link(*event);
            assert_eq!(self.actions.get(before).copied(), *expected, "{event:?}");
        }
    }

    fn serve(&mut self) {
        self.climb(LADDER.len());
        assert!(self.machine.is_serving());
    }

    /// Every dial fails at once, time passes, until the process exits or `dials` were made.
    fn fail_until(&mut self, dials: usize) {
        while self.exit.is_none() && self.dials.len() < dials {
            self.link(LinkEvent::Ended);
            if self.exit.is_none() {
                self.elapse();
            }
        }
    }
}

/// Proves, [R-291].
#[test]
fn r291_impossible_policies_are_refused_by_field() {
    let refused = |interval, attempts| Policy::new(interval, attempts, None).unwrap_err();
    assert_eq!(refused(None, Some(-1)), PolicyError::AttemptsNegative);
    assert_eq!(refused(Some(-1), Some(3)), PolicyError::IntervalNegative);
    assert_eq!(refused(Some(-1), Some(0)), PolicyError::IntervalNegative);
    assert_eq!(
        refused(Some(0), Some(0)),
        PolicyError::IntervalZeroUnlimited
    );
    assert!(Policy::new(Some(1), Some(0), None).is_ok());
    assert!(
        Policy::new(Some(0), Some(3), None).is_ok(),
        "finite mode may retry at once"
    );
    for jitter in [-0.01, 0.51, f64::NAN, f64::INFINITY] {
        let error = Policy::new(None, None, Some(jitter)).unwrap_err();
        assert_eq!(error, PolicyError::JitterOutOfRange);
        assert_eq!(error.field(), "reconnect.jitter");
    }
    assert_eq!(
        PolicyError::AttemptsNegative.field(),
        "reconnect.max_attempts"
    );
    assert_eq!(
        PolicyError::IntervalZeroUnlimited.field(),
        "reconnect.interval_sec"
    );
}

/// Proves, [R-063], [I4.3].
#[test]
fn r290_a_positive_limit_is_the_exact_number_of_dials_without_a_last_wait() {
    for limit in [1, 2, 7] {
        let mut world = World::new(policy(2, limit));
        world.fail_until(usize::MAX);
        assert_eq!(world.exit, Some(Exit::Exhausted));
        assert_eq!(world.exit.unwrap().code(), 1);
        let expected: Vec<_> = (0..limit)
            .map(|n| T0.after_ms(2_000 * n.unsigned_abs()))
            .collect();
        assert_eq!(world.dials, expected);
        assert_eq!(world.now, *expected.last().unwrap());
    }
}

/// Proves.
#[test]
fn r289_an_omitted_limit_is_ten_and_an_omitted_interval_ten_seconds() {
    let mut world = World::new(Policy::new(None, None, Some(0.0)).unwrap());
    world.fail_until(usize::MAX);
    assert_eq!((world.exit, world.dials.len()), (Some(Exit::Exhausted), 10));
    assert!(
        world
            .dials
            .windows(2)
            .all(|pair| pair[1].ms_since(pair[0]) == 10_000)
    );
}

/// Proves, [R-286].
#[test]
fn r288_zero_is_unlimited_until_shutdown() {
    let mut world = World::new(Policy::new(None, Some(0), Some(0.0)).unwrap());
    world.fail_until(10_001);
    assert_eq!((world.exit, world.dials.len()), (None, 10_001));
    assert_eq!(world.now, T0.after_ms(10_000 * 10_000));
    world.event(Event::Shutdown);
    world.link(LinkEvent::Ended);
    assert_eq!(world.exit, Some(Exit::Shutdown));
    assert_eq!(world.exit.unwrap().code(), 0);
}

/// Proves.
#[test]
fn r060_a_lost_session_has_the_full_limit_again_under_the_same_policy() {
    for limit in [1, 3] {
        let mut world = World::new(policy(2, limit));
        world.serve();
        world.link(LinkEvent::Ended);
        assert_eq!((world.exit, world.machine.failures()), (None, 0));
        world.elapse();
        world.fail_until(usize::MAX);
        assert_eq!(world.exit, Some(Exit::Exhausted));
        assert_eq!(world.dials.len(), 1 + usize::try_from(limit).unwrap());
        assert!(
            world
                .dials
                .windows(2)
                .all(|pair| pair[1].ms_since(pair[0]) == 2_000)
        );
    }
}

/// Proves [D-04].
#[test]
fn d04_jitter_only_adds() {
    let jittered = Policy::new(Some(2), Some(0), Some(0.5)).unwrap();
    assert_eq!(jittered.wait_ms(0), 2_000);
    assert_eq!(jittered.wait_ms(u32::MAX), 3_000);
    let mut last = 0;
    for dice in (0..u32::MAX).step_by(1 << 20) {
        let wait = jittered.wait_ms(dice);
        assert!((2_000..=3_000).contains(&wait) && wait >= last);
        last = wait;
    }
    assert_eq!(policy(2, 0).wait_ms(u32::MAX), 2_000);
    let forever = Policy::new(Some(i64::MAX), Some(1), Some(0.5)).unwrap();
    assert_eq!(forever.wait_ms(u32::MAX), u64::MAX, "saturates");
}

/// An Edge that comes back is not dialled by all of its nodes at one instant. Proves [P-72].
#[test]
fn p72_five_thousand_nodes_that_lose_their_edge_come_back_spread_out() {
    const NODES: u32 = 5_000;
    const PARTS: usize = 20;
    let usual = Policy::new(None, None, None).unwrap();
    let (first, last) = (usual.wait_ms(0), usual.wait_ms(u32::MAX));
    assert!(last > first);
    let mut dials = [0_u32; PARTS + 1];
    for node in 0..NODES {
        let mut machine = Supervisor::new(usual, DRAIN_MS);
        let Some(Action::Dial(link)) = machine.step(T0, Event::Valid, 0) else {
            panic!("a valid start dials")
        };
        let dice = node.wrapping_mul(0x9e37_79b9); // visits every part of the range alike
        machine.step(T0, Event::Link(link, LinkEvent::Ended), dice);
        let waited = machine.deadline().unwrap().ms_since(T0);
        let share = |ms: u64| usize::try_from(ms).unwrap();
        dials[share(waited - first) * PARTS / share(last - first)] += 1;
    }
    let peak = dials.into_iter().max().unwrap();
    assert!(peak * 20 < 3 * NODES, "peak to mean: {dials:?}");
}

/// Proves, [I4.4].
#[test]
fn r029_ready_follows_apply_start_and_install_in_that_order_on_every_link() {
    let mut world = World::new(policy(1, 0));
    for _ in 0..2 {
        world.serve();
        world.link(LinkEvent::Ended);
        world.elapse();
    }
    let order = [
        Action::Register,
        Action::Apply,
        Action::StartAdapters,
        Action::InstallHandlers,
        Action::SendReady,
    ];
    let seen: Vec<_> = world
        .actions
        .iter()
        .filter(|action| order.contains(action))
        .collect();
    assert_eq!(seen, order.iter().chain(&order).collect::<Vec<_>>());
}

#[test]
fn steps_out_of_order_change_nothing() {
    for steps in 0..=LADDER.len() {
        for (place, (event, _)) in LADDER
            .iter()
            .enumerate()
            .filter(|(place, _)| *place != steps)
        {
            let mut world = World::new(policy(1, 0));
            world.climb(steps);
            let before = (world.machine.phase, world.actions.len());
            world.link(*event);
            assert_eq!(
                (world.machine.phase, world.actions.len()),
                before,
                "{steps} {place}"
            );
        }
    }
}

#[test]
fn a_failure_in_any_phase_ends_the_link_and_spends_one_attempt_unless_it_served() {
    for steps in 0..=LADDER.len() {
        let mut world = World::new(policy(5, 0));
        world.climb(steps);
        world.link(LinkEvent::Failed);
        let ended = world
            .actions
            .iter()
            .filter(|a| matches!(a, Action::End { .. }))
            .count();
        assert_eq!(ended, 1);
        assert_eq!(world.machine.failures(), u64::from(steps < LADDER.len()));
        let lost_at = world.now;
        world.elapse();
        assert_eq!(world.dials.last().unwrap().ms_since(lost_at), 5_000);
    }
}

#[test]
fn handshake_steps_have_ten_seconds_each_and_local_steps_none() {
    for (steps, what) in [
        (0, "tcp connect"),
        (1, "tls handshake"),
        (2, "RegisterResponse"),
        (6, "NodeReadyResponse"),
    ] {
        let mut world = World::new(policy(1, 1));
        world.climb(steps);
        let due = world.machine.deadline().unwrap();
        assert_eq!(due.ms_since(world.now), HANDSHAKE_STEP_MS);
        assert_eq!(
            world.machine.tick(Now::from_nanos(due.as_nanos() - 1)),
            None
        );
        world.elapse();
        let why = Why::Timeout(what);
        let end = Action::End {
            link: LinkId(1),
            why,
            flush: false,
        };
        assert!(world.actions.contains(&end), "{what}");
        assert_eq!(world.exit, Some(Exit::Exhausted));
    }
    for steps in [3, 4, 5, 7] {
        let mut world = World::new(policy(1, 1));
        world.climb(steps);
        assert_eq!(world.machine.deadline(), None);
    }
}

/// Proves.
#[test]
fn r062_a_local_fatal_error_exits_without_a_dial() {
    let mut machine = Supervisor::new(policy(1, 0), DRAIN_MS);
    let action = machine.step(T0, Event::Fatal, 0);
    assert_eq!(action, Some(Action::Exit(Exit::Fatal)));
    assert_eq!(Exit::Fatal.code(), 1);
    assert_eq!(machine.step(T0, Event::Valid, 0), None);
    let mut running = World::new(policy(1, 0));
    running.event(Event::Fatal);
    assert_eq!(running.exit, None, "judged at start alone");
}

/// Proves.
#[test]
fn r064_shutdown_interrupts_every_phase_with_exit_zero() {
    for steps in 0..LADDER.len() {
        let mut world = World::new(policy(1, 0));
        world.climb(steps);
        world.event(Event::Shutdown);
        assert_eq!(world.exit, Some(Exit::Shutdown), "after {steps} steps");
        assert_eq!(world.dials.len(), 1);
    }
    let mut waiting = World::new(policy(1, 0));
    waiting.link(LinkEvent::Ended);
    waiting.event(Event::Shutdown);
    assert_eq!(waiting.exit, Some(Exit::Shutdown));
    let mut fresh = Supervisor::new(policy(1, 0), DRAIN_MS);
    let action = fresh.step(T0, Event::Shutdown, 0);
    assert_eq!(action, Some(Action::Exit(Exit::Shutdown)));
}

/// Proves [S-50].
#[test]
fn s50_shutdown_beats_exhaustion_in_both_orders() {
    let mut machine = Supervisor::new(policy(1, 1), DRAIN_MS);
    machine.step(T0, Event::Valid, 0);
    let end = machine.step(T0, Event::Link(LinkId(1), LinkEvent::Failed), 0);
    assert!(matches!(end, Some(Action::End { .. })));
    assert_eq!(machine.step(T0, Event::Shutdown, 0), None);
    let last = machine.step(T0, Event::Link(LinkId(1), LinkEvent::Ended), 0);
    assert_eq!(last, Some(Action::Exit(Exit::Shutdown)));

    let mut world = World::new(policy(1, 1));
    world.event(Event::Shutdown);
    assert_eq!(world.exit, Some(Exit::Shutdown));
}

#[test]
fn a_link_that_will_not_end_does_not_hold_a_shutdown() {
    let mut machine = Supervisor::new(policy(1, 0), DRAIN_MS);
    machine.step(T0, Event::Valid, 0);
    assert!(machine.step(T0, Event::Shutdown, 0).is_some());
    let bound = machine.deadline().unwrap();
    assert_eq!(bound.ms_since(T0), SHUTDOWN_MS);
    assert_eq!(machine.tick(bound), Some(Action::Exit(Exit::Shutdown)));
}

/// Proves [D-07].
#[test]
fn d07_a_drain_announces_serves_a_second_refuses_and_ends_when_idle() {
    let mut world = World::new(policy(1, 0));
    world.serve();
    world.event(Event::Active(2));
    world.event(Event::Shutdown);
    assert_eq!(
        world.actions.last(),
        Some(&Action::AnnounceDrain { grace_ms: DRAIN_MS })
    );
    world.event(Event::Active(0));
    world.event(Event::Active(1));
    assert_eq!(world.exit, None, "the first second serves on, idle or not");
    let begun = world.now;
    world.elapse();
    assert_eq!(world.actions.last(), Some(&Action::RefuseWork));
    assert_eq!(world.now.ms_since(begun), 1_000);
    assert!(world.machine.is_serving());
    world.event(Event::Active(0));
    let end = Action::End {
        link: LinkId(1),
        why: Why::Drained,
        flush: true,
    };
    assert!(world.actions.contains(&end));
    assert_eq!(world.exit, Some(Exit::Shutdown));
}

#[test]
fn a_drain_that_does_not_become_idle_ends_at_its_timeout() {
    let mut world = World::new(policy(1, 0));
    world.serve();
    world.event(Event::Active(1));
    world.event(Event::Shutdown);
    world.elapse();
    world.elapse();
    assert_eq!(
        (world.exit, world.now.ms_since(T0)),
        (Some(Exit::Shutdown), DRAIN_MS)
    );
}

#[test]
fn an_idle_drain_ends_right_after_the_window_and_a_second_signal_at_once() {
    let mut world = World::new(policy(1, 0));
    world.serve();
    world.event(Event::Shutdown);
    world.elapse();
    world.elapse();
    assert_eq!(
        (world.exit, world.now.ms_since(T0)),
        (Some(Exit::Shutdown), 1_000)
    );

    let mut impatient = World::new(policy(1, 0));
    impatient.serve();
    impatient.event(Event::Active(9));
    impatient.event(Event::Shutdown);
    impatient.event(Event::Shutdown);
    assert_eq!((impatient.exit, impatient.now), (Some(Exit::Shutdown), T0));

    let mut lost = World::new(policy(1, 0));
    lost.serve();
    lost.event(Event::Shutdown);
    lost.link(LinkEvent::Ended);
    assert_eq!(lost.exit, Some(Exit::Shutdown), "the peer closed first");
}

/// Proves [S-49].
#[test]
fn s49_events_of_an_older_link_change_nothing() {
    let mut world = World::new(policy(1, 0));
    world.serve();
    world.link(LinkEvent::Ended);
    world.elapse();
    world.serve();
    let before = (world.machine.phase, world.actions.len());
    for (event, _) in LADDER {
        world.event(Event::Link(LinkId(1), event));
    }
    for event in [LinkEvent::Failed, LinkEvent::Ended] {
        world.event(Event::Link(LinkId(1), event));
    }
    assert_eq!(
        (world.machine.phase, world.actions.len(), world.dials.len()),
        (before.0, before.1, 2)
    );
}

/// xorshift64*; a seed is reported by the assertion that fails.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

/// Proves, [I4.1], [I4.2].
#[test]
fn r059_over_random_histories_links_are_serial_and_exits_are_explained() {
    for seed in 1..=2_000 {
        let mut dice = Dice(seed);
        let limit = i64::try_from(dice.below(4)).unwrap();
        let mut machine = Supervisor::new(policy(2, limit), 5_000);
        let (mut now, mut live, mut since_ready) = (T0, None::<LinkId>, 0);
        let (mut shutdowns, mut last_end) = (0, None::<Now>);
        let mut pending = vec![machine.step(now, Event::Valid, 0)];
        for _ in 0..200 {
            while let Some(action) = pending.pop().flatten() {
                match action {
                    Action::Dial(link) => {
                        assert_eq!(live, None, "seed {seed}: two links");
                        assert!(last_end.is_none_or(|end| now.ms_since(end) >= 2_000));
                        live = Some(link);
                        since_ready += 1;
                        assert!(limit == 0 || since_ready <= limit, "seed {seed}");
                    }
                    Action::Exit(Exit::Exhausted) => {
                        assert!(
                            limit > 0 && since_ready == limit && shutdowns == 0,
                            "seed {seed}"
                        );
                    }
                    Action::Exit(Exit::Shutdown) => assert!(shutdowns > 0, "seed {seed}"),
                    Action::Exit(Exit::Fatal) => panic!("seed {seed}"),
                    _ => {}
                }
            }
            let choice = dice.below(12);
            let event = match (choice, live) {
                (0..=6, Some(link)) => {
                    Event::Link(link, LADDER[usize::try_from(choice).unwrap()].0)
                }
                (7, Some(link)) => Event::Link(link, LinkEvent::Failed),
                (8, Some(link)) => {
                    live = None;
                    last_end = Some(now);
                    Event::Link(link, LinkEvent::Ended)
                }
                (9, _) if dice.below(20) == 0 => {
                    shutdowns += 1;
                    Event::Shutdown
                }
                (10, _) => Event::Active(u32::try_from(dice.below(2)).unwrap()),
                _ => {
                    now = now.after_ms(dice.below(3_000));
                    pending.push(machine.tick(now));
                    continue;
                }
            };
            let was_serving = machine.is_serving();
            pending.push(machine.step(now, event, 0));
            if machine.is_serving() && !was_serving {
                since_ready = 0;
            }
        }
    }
}
