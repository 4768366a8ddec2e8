//! The attempt machine against its invariants: tables for the rules, every history for the rest.

use iop_proto::domain::{CredentialBinding, LeaseEnvelope};
use iop_proto::limits::STALL_TIMEOUT_MS_MAX;

use super::*;
use crate::node::Observations;

const T0: Now = Now::from_nanos(1_000_000_000);
const GRANTED: Signals = Signals {
    granted: true,
    cancelled: false,
    ended: false,
    window: None,
};
const CANCELLED: Signals = Signals {
    granted: true,
    cancelled: true,
    ended: false,
    window: None,
};
const ENDED: Signals = Signals {
    granted: true,
    cancelled: false,
    ended: true,
    window: None,
};

fn timeouts(hard_ms: u64) -> Timeouts {
    Timeouts {
        hard_ms: NonZeroU64::new(hard_ms),
        stall_ms: STALL_TIMEOUT_MS_DEFAULT,
    }
}

fn wake(attempt: &mut Attempt, now: Now, signals: Signals) -> Vec<Order> {
    let mut orders = Vec::new();
    attempt.wake(now, signals, &mut orders);
    orders
}

fn returned(attempt: &mut Attempt, result: Result<(), Failure>) -> Vec<Order> {
    returned_at(attempt, T0, result)
}

fn returned_at(attempt: &mut Attempt, now: Now, result: Result<(), Failure>) -> Vec<Order> {
    let mut orders = Vec::new();
    attempt.returned(now, result, &mut orders);
    orders
}

fn fresh(hard_ms: u64) -> Attempt {
    Attempt::new(T0, timeouts(hard_ms), Patience::default())
}

fn calling() -> Attempt {
    let mut attempt = fresh(0);
    assert_eq!(wake(&mut attempt, T0, GRANTED), [Order::Call]);
    attempt
}

const fn finish(sequence: u64, terminal: Terminal) -> Order {
    Order::Finish { sequence, terminal }
}

const fn error(failure: Failure) -> Terminal {
    Terminal::Error(failure)
}

fn judge(timeout: i32, stall: i64) -> Result<Timeouts, Rejection> {
    let stall = StallTimeout::from_wire(stall);
    boundary(
        HardTimeout::from_wire(timeout),
        stall,
        &Credential::None,
        false,
    )
}

#[test]
fn the_last_legal_figure_passes_and_the_first_illegal_one_does_not() {
    assert_eq!(judge(0, 0).unwrap(), timeouts(0));
    let most = judge(i32::MAX, STALL_TIMEOUT_MS_MAX).unwrap();
    assert_eq!(most.stall_ms, 9_223_372_036_854);
    assert_eq!(most.hard_ms.unwrap().get(), 2_147_483_647_000);
    assert_eq!(
        judge(0, STALL_TIMEOUT_MS_MAX + 1),
        Err(Rejection::StallTooLong)
    );
    assert_eq!(judge(0, i64::MAX), Err(Rejection::StallTooLong));
    assert_eq!(judge(0, -1), Err(Rejection::StallNegative));
    assert_eq!(judge(0, i64::MIN), Err(Rejection::StallNegative));
    assert_eq!(judge(-1, 0), Err(Rejection::TimeoutNegative));
    assert_eq!(judge(i32::MIN, 0), Err(Rejection::TimeoutNegative));
}

/// Proves, [R-222], [R-231].
#[test]
fn r221_a_pair_is_whole_and_there_exactly_where_the_plane_is_on() {
    let lease = || LeaseEnvelope::new("sealed".into()).unwrap();
    let pair = Credential::Managed {
        lease: lease(),
        binding: CredentialBinding::default(),
    };
    let halves = [
        Credential::LeaseAlone(lease()),
        Credential::BindingAlone(CredentialBinding::default()),
    ];
    let judge = |credential: &Credential, is_managed| {
        let (hard, stall) = (HardTimeout::None, StallTimeout::Default);
        boundary(hard, stall, credential, is_managed).map(|_| ())
    };
    assert_eq!(judge(&Credential::None, false), Ok(()));
    assert_eq!(judge(&pair, true), Ok(()));
    assert_eq!(judge(&pair, false), Err(Rejection::CredentialUnmanaged));
    let absent = judge(&Credential::None, true);
    assert_eq!(absent, Err(Rejection::CredentialAbsent));
    for half in &halves {
        for is_managed in [false, true] {
            assert_eq!(judge(half, is_managed), Err(Rejection::CredentialHalf));
        }
    }
}

#[test]
fn an_answer_is_numbered_from_one_without_a_gap_and_ends_once() {
    let mut attempt = calling();
    assert_eq!(
        attempt.output(T0, Output::Head, false),
        Verdict::Forward { sequence: 1 }
    );
    assert_eq!(
        attempt.output(T0, Output::Body, false),
        Verdict::Forward { sequence: 2 }
    );
    assert_eq!(
        attempt.output(T0, Output::Body, false),
        Verdict::Forward { sequence: 3 }
    );
    let orders = returned(&mut attempt, Ok(()));
    assert_eq!(orders, [Order::FreeSlot, finish(4, Terminal::Complete)]);
    assert!(attempt.is_over());
    assert_eq!(wake(&mut attempt, T0.after_ms(1 << 40), CANCELLED), []);
}

#[test]
fn an_end_without_a_head_is_the_providers_failure() {
    let orders = returned(&mut calling(), Ok(()));
    assert_eq!(
        orders,
        [Order::FreeSlot, finish(1, error(Failure::Provider))]
    );
}

#[test]
fn a_waiting_attempt_ends_without_a_call_for_each_reason() {
    let waiting = |cancelled, ended| Signals {
        granted: false,
        cancelled,
        ended,
        window: None,
    };
    let after = T0.after_ms(1_000);
    let cases = [
        (
            T0,
            waiting(true, false),
            vec![finish(1, error(Failure::Cancelled))],
        ),
        (T0, waiting(false, true), vec![]),
        (
            after,
            waiting(false, false),
            vec![finish(1, error(Failure::Deadline))],
        ),
    ];
    for (now, signals, terminal) in cases {
        let mut attempt = fresh(1_000);
        let just_before = Now::from_nanos(after.as_nanos() - 1);
        assert_eq!(wake(&mut attempt, just_before, Signals::default()), []);
        let orders = wake(&mut attempt, now, signals);
        assert_eq!(orders[0], Order::FreeSlot);
        assert_eq!(orders[1..], terminal);
        assert!(attempt.is_over());
        assert_eq!(
            wake(&mut attempt, after, GRANTED),
            [],
            "a late grant calls nobody"
        );
    }
}

/// Proves [S-30], [S-67].
#[test]
fn s30_a_grant_that_meets_a_cancel_calls_nobody() {
    for signals in [CANCELLED, ENDED] {
        let mut attempt = fresh(0);
        let orders = wake(&mut attempt, T0, signals);
        assert!(!orders.contains(&Order::Call));
        assert_eq!(orders[0], Order::FreeSlot);
    }
}

/// Proves [S-32], [A-60].
#[test]
fn a60_at_one_instant_cancel_beats_session_end_beats_deadline_beats_the_watchdog() {
    let all = Signals {
        granted: true,
        cancelled: true,
        ended: true,
        window: None,
    };
    let due = T0.after_ms(5);
    let decided = |signals, now| {
        let mut attempt = stallable(5, 5);
        wake(&mut attempt, T0, GRANTED);
        assert_eq!(wake(&mut attempt, now, signals), [Order::Stop]);
        attempt.outcome.unwrap()
    };
    let mut silent = stallable(6, 5);
    wake(&mut silent, T0, GRANTED);
    assert_eq!(wake(&mut silent, due, GRANTED), STALLS);
    assert_eq!(decided(all, due), Outcome::Failed(Failure::Cancelled));
    assert_eq!(decided(CANCELLED, due), Outcome::Failed(Failure::Cancelled));
    assert_eq!(decided(ENDED, due), Outcome::Disconnected);
    assert_eq!(decided(GRANTED, due), Outcome::Failed(Failure::Deadline));
}

#[test]
fn a_stopped_provider_that_returns_ends_the_attempt_at_once() {
    let mut attempt = calling();
    attempt.output(T0, Output::Head, false);
    assert_eq!(wake(&mut attempt, T0, CANCELLED), [Order::Stop]);
    assert_eq!(attempt.output(T0, Output::Body, false), Verdict::Discard);
    let orders = returned(&mut attempt, Ok(()));
    assert_eq!(
        orders,
        [Order::FreeSlot, finish(2, error(Failure::Cancelled))]
    );
    assert!(attempt.is_over());
}

/// Proves.
#[test]
fn a68_a_provider_that_does_not_return_delays_the_terminal_by_the_grace_and_keeps_its_slot() {
    let mut attempt = calling();
    assert_eq!(wake(&mut attempt, T0, CANCELLED), [Order::Stop]);
    let grace = T0.after_ms(CLOSE_GRACE_MS_DEFAULT);
    assert_eq!(attempt.deadline(), Some(grace));
    let just_before = Now::from_nanos(grace.as_nanos() - 1);
    assert_eq!(wake(&mut attempt, just_before, CANCELLED), []);
    assert_eq!(
        wake(&mut attempt, grace, CANCELLED),
        [finish(1, error(Failure::Cancelled))]
    );
    assert_eq!((attempt.is_over(), attempt.deadline()), (false, None));
    assert_eq!(wake(&mut attempt, grace.after_ms(60_000), CANCELLED), []);
    assert_eq!(
        returned(&mut attempt, Err(Failure::Provider)),
        [Order::FreeSlot]
    );
    assert!(attempt.is_over());
}

#[test]
fn a_session_that_ends_silences_the_attempt_in_every_phase() {
    let mut attempt = calling();
    assert_eq!(wake(&mut attempt, T0, ENDED), [Order::Stop]);
    assert_eq!(attempt.output(T0, Output::Head, false), Verdict::Discard);
    assert_eq!(returned(&mut attempt, Ok(())), [Order::FreeSlot]);
    assert!(attempt.is_over());

    let mut stopping = calling();
    wake(&mut stopping, T0, CANCELLED);
    let both = Signals {
        ended: true,
        ..CANCELLED
    };
    assert_eq!(wake(&mut stopping, T0, both), []);
    assert_eq!(
        wake(&mut stopping, T0.after_ms(CLOSE_GRACE_MS_DEFAULT), both),
        []
    );
    assert_eq!(returned(&mut stopping, Ok(())), [Order::FreeSlot]);
}

// ── stall ─────────────────────────────────────────────────────────────────────────────────────────

const STALLS: [Order; 2] = [Order::Stop, Order::Probe];
const PATIENCE: Patience = Patience {
    grace_ms: 3_000,
    probe_ms: 4_000,
};

fn stallable(hard_ms: u64, stall_ms: u64) -> Attempt {
    let timeouts = Timeouts {
        stall_ms,
        ..timeouts(hard_ms)
    };
    Attempt::new(T0, timeouts, PATIENCE)
}

/// Called at `T0`, silent for its 1000 ms, being joined.
fn joining() -> (Attempt, Now) {
    let mut attempt = stallable(0, 1_000);
    assert_eq!(wake(&mut attempt, T0, GRANTED), [Order::Call]);
    let expired = T0.after_ms(1_000);
    assert_eq!(wake(&mut attempt, expired, GRANTED), STALLS);
    (attempt, expired)
}

fn probed(attempt: &mut Attempt, health: HealthEvidence, numbers: &mut Observations) -> Vec<Order> {
    let mut orders = Vec::new();
    attempt.probed(health, || Some(numbers.draw()), &mut orders);
    orders
}

fn finished(orders: &[Order]) -> Option<Stall> {
    let mut stalls = orders.iter().filter_map(|order| match order {
        Order::Finish {
            terminal: Terminal::Stalled(stall),
            ..
        } => Some(*stall),
        _ => None,
    });
    let stall = stalls.next();
    assert_eq!(stalls.next(), None);
    let shown = stall.is_none_or(|stall| orders.contains(&Order::Observe(stall)));
    assert!(shown, "the observer sees what the terminal says");
    stall
}

fn just_before(instant: Now) -> Now {
    Now::from_nanos(instant.as_nanos() - 1)
}

/// Proves, [R-118], [P-39].
#[test]
fn r113_no_figure_on_the_wire_is_a_stall_after_exactly_300_seconds() {
    let mut attempt = Attempt::new(T0, judge(0, 0).unwrap(), Patience::default());
    wake(&mut attempt, T0, GRANTED);
    let expires = T0.after_ms(300_000);
    assert_eq!(attempt.deadline(), Some(expires));
    assert_eq!(wake(&mut attempt, just_before(expires), GRANTED), []);
    assert!(attempt.is_undecided());
    assert_eq!(wake(&mut attempt, expires, GRANTED), STALLS);
}

/// Proves.
#[test]
fn a18_waiting_for_capacity_is_nobodys_silence() {
    let mut attempt = stallable(0, 1_000);
    let granted = T0.after_ms(60_000);
    assert_eq!(wake(&mut attempt, granted, Signals::default()), []);
    assert_eq!(attempt.deadline(), None);
    assert_eq!(wake(&mut attempt, granted, GRANTED), [Order::Call]);
    assert_eq!(attempt.deadline(), Some(granted.after_ms(1_000)));
}

/// Proves, [A-17], [I5.9].
#[test]
fn a17_only_the_providers_progress_moves_the_watchdog_and_waiting_for_room_rests_it() {
    let mut attempt = stallable(0, 1_000);
    wake(&mut attempt, T0, GRANTED);
    let at = |ms| T0.after_ms(ms);
    // Whatever else wakes the attempt changes nothing.
    for ms in (0..1_000).step_by(10) {
        assert_eq!(wake(&mut attempt, at(ms), GRANTED), []);
    }
    assert_eq!(attempt.deadline(), Some(at(1_000)));
    attempt.received();
    attempt.output(at(999), Output::Head, false);
    assert_eq!(attempt.deadline(), Some(at(1_999)));
    attempt.progressed(at(1_500));
    assert_eq!(attempt.deadline(), Some(at(2_500)));
    // A body of three messages; the session's writer takes a minute for each.
    attempt.received();
    assert_eq!(attempt.deadline(), None);
    for (ms, more, deadline) in [
        (60_000, true, None),
        (120_000, true, None),
        (180_000, false, Some(at(181_000))),
    ] {
        assert_eq!(wake(&mut attempt, at(ms), GRANTED), []);
        attempt.output(at(ms), Output::Body, more);
        assert_eq!(attempt.deadline(), deadline);
    }
    assert_eq!(wake(&mut attempt, at(181_000), GRANTED), STALLS);
}

/// Proves.
#[test]
fn r138_the_idle_time_is_that_at_expiry_without_the_join() {
    let mut attempt = stallable(0, 5_000);
    wake(&mut attempt, T0, GRANTED);
    attempt.received();
    attempt.output(T0.after_ms(10_000), Output::Head, false);
    wake(&mut attempt, T0.after_ms(15_000), GRANTED);
    let mut numbers = Observations::default();
    probed(&mut attempt, HealthEvidence::Unknown, &mut numbers);
    let late = T0.after_ms(17_000);
    let orders = returned_at(&mut attempt, late, Ok(()));
    assert_eq!(finished(&orders).unwrap().idle_ms, 5_000);
}

/// Proves [S-31], [R-197].
#[test]
fn s31_a_cancel_beside_the_expiry_decides_only_when_it_is_not_later() {
    for (ms, cancelled) in [(999, true), (1_000, true), (1_001, false)] {
        let mut attempt = stallable(0, 1_000);
        wake(&mut attempt, T0, GRANTED);
        let mut orders = Vec::new();
        for at in [999, 1_000, 1_001] {
            let signals = if at >= ms { CANCELLED } else { GRANTED };
            attempt.wake(T0.after_ms(at), signals, &mut orders);
        }
        assert_eq!(!orders.contains(&Order::Probe), cancelled, "at {ms}");
        attempt.returned(T0.after_ms(1_002), Ok(()), &mut orders);
        let mut numbers = Observations::default();
        let draw = || Some(numbers.draw());
        attempt.probed(HealthEvidence::Available, draw, &mut orders);
        assert_eq!(finished(&orders).is_none(), cancelled);
        assert_eq!(
            orders.contains(&finish(1, error(Failure::Cancelled))),
            cancelled
        );
        assert_eq!(
            numbers.draw().get() == 1,
            cancelled,
            "no number without a stall"
        );
    }
}

/// Proves [S-33].
#[test]
fn s33_the_last_byte_is_progress_or_comes_too_late_and_never_both() {
    for (at, watchdog_first) in [(999, false), (1_000, false), (1_000, true), (1_001, true)] {
        let mut attempt = stallable(0, 1_000);
        wake(&mut attempt, T0, GRANTED);
        let now = T0.after_ms(at);
        if watchdog_first {
            assert_eq!(wake(&mut attempt, now, GRANTED), STALLS);
        }
        let verdict = attempt.output(now, Output::Head, false);
        assert_eq!(verdict == Verdict::Discard, watchdog_first, "at {at}");
        if !watchdog_first {
            assert_eq!(wake(&mut attempt, now, GRANTED), []);
            assert_eq!(attempt.deadline(), Some(now.after_ms(1_000)));
        }
    }
}

/// Proves, [R-123], [I5.3].
#[test]
fn r122_grace_and_probe_run_side_by_side_and_the_longer_one_ends_the_join() {
    const NEVER: u64 = u64::MAX / 2_000_000;
    for (returns, probes, terminal) in [
        (NEVER, NEVER, 4_000),
        (NEVER, 10, 3_000),
        (10, NEVER, 4_000),
        (10, 20, 20),
        (20, 10, 20),
        (2_999, 3_999, 3_999),
    ] {
        let (mut attempt, expired) = joining();
        let mut numbers = Observations::default();
        let mut ended = None;
        let mut times: Vec<_> = [returns, probes, 3_000, 4_000].into();
        times.sort_unstable();
        for ms in times {
            let now = expired.after_ms(ms);
            let mut orders = wake(&mut attempt, now, GRANTED);
            let over = orders.contains(&Order::ProbeOver);
            if ms == probes || over {
                let health = HealthEvidence::Unknown;
                orders.extend(probed(&mut attempt, health, &mut numbers));
            }
            if ms == returns && attempt.resource == Resource::Calling {
                orders.extend(returned_at(&mut attempt, now, Ok(())));
            }
            if let Some(stall) = finished(&orders) {
                assert_eq!(stall.fenced, returns <= 3_000);
                ended = ended.or(Some(ms));
            }
        }
        assert_eq!(ended, Some(terminal), "returns {returns}, probes {probes}");
        assert!(attempt.is_over(), "and the late return released it");
    }
}

/// Proves, [R-151], [R-152], [R-153], [R-154], [S-36], [I5.7].
#[test]
fn r152_no_probe_result_touches_the_fence_resumes_or_calls_again() {
    for health in HealthEvidence::ALL {
        for (returns_after, fenced) in [(0, true), (3_000, true), (3_001, false)] {
            let (mut attempt, expired) = joining();
            let mut numbers = Observations::default();
            let mut orders = probed(&mut attempt, health, &mut numbers);
            assert_eq!(
                attempt.output(expired, Output::Head, false),
                Verdict::Discard
            );
            assert!(!attempt.is_undecided());
            orders.extend(returned_at(
                &mut attempt,
                expired.after_ms(returns_after),
                Ok(()),
            ));
            orders.extend(wake(&mut attempt, expired.after_ms(10_000), GRANTED));
            assert!(!orders.contains(&Order::Call));
            let stall = finished(&orders).unwrap();
            assert_eq!((stall.fenced, stall.health), (fenced, health));
            assert_eq!(stall.observation.unwrap().get(), 1);
        }
    }
}

/// Proves [S-34], [S-35], [R-205].
#[test]
fn s34_a_return_within_the_grace_frees_the_slot_at_once_and_its_result_is_nobodys() {
    for (returns_after, fenced) in [(1, true), (3_000, true), (3_001, false)] {
        let (mut attempt, expired) = joining();
        let at = expired.after_ms(returns_after);
        // At exactly the grace's end either order of events is possible; what is said fits it.
        let orders = returned_at(&mut attempt, at, Ok(()));
        assert_eq!(
            orders,
            [Order::FreeSlot],
            "the entry stays until the terminal"
        );
        assert!(!attempt.is_over());
        let mut numbers = Observations::default();
        let orders = probed(&mut attempt, HealthEvidence::Available, &mut numbers);
        assert_eq!(finished(&orders).unwrap().fenced, fenced);
        assert!(attempt.is_over());
    }
}

/// Proves, [R-200].
#[test]
fn r204_the_terminal_does_not_wait_for_the_return_and_the_slot_does() {
    let (mut attempt, expired) = joining();
    let mut numbers = Observations::default();
    let quick = probed(&mut attempt, HealthEvidence::Available, &mut numbers);
    assert_eq!(quick, []);
    let grace = expired.after_ms(3_000);
    assert_eq!(wake(&mut attempt, just_before(grace), GRANTED), []);
    let orders = wake(&mut attempt, grace, GRANTED);
    assert!(!finished(&orders).unwrap().fenced && !orders.contains(&Order::FreeSlot));
    assert_eq!((attempt.is_over(), attempt.deadline()), (false, None));
    let late = expired.after_ms(60_000);
    assert_eq!(wake(&mut attempt, late, CANCELLED), []);
    assert_eq!(returned_at(&mut attempt, late, Ok(())), [Order::FreeSlot]);
    assert!(attempt.is_over());
}

/// Proves [S-37], [R-198].
#[test]
fn s37_a_session_that_ends_in_the_join_hears_nothing_and_no_number_is_drawn() {
    for returned_first in [true, false] {
        let (mut attempt, expired) = joining();
        let mut orders = Vec::new();
        if returned_first {
            orders.extend(returned_at(&mut attempt, expired, Ok(())));
        }
        orders.extend(wake(&mut attempt, expired, ENDED));
        let mut numbers = Observations::default();
        orders.extend(probed(
            &mut attempt,
            HealthEvidence::Available,
            &mut numbers,
        ));
        orders.extend(wake(&mut attempt, expired.after_ms(60_000), ENDED));
        if !returned_first {
            assert!(!attempt.is_over(), "retained until the return");
            orders.extend(returned_at(&mut attempt, expired.after_ms(60_000), Ok(())));
        }
        assert_eq!(orders, [Order::FreeSlot]);
        assert!(attempt.is_over());
        assert_eq!(numbers.draw().get(), 1);
    }
    // One tick before the expiry there is no probe either.
    let mut attempt = stallable(0, 1_000);
    wake(&mut attempt, T0, GRANTED);
    let last = T0.after_ms(999);
    assert_eq!(wake(&mut attempt, last, ENDED), [Order::Stop]);
    assert_eq!(wake(&mut attempt, T0.after_ms(1_000), ENDED), []);
}

/// Proves, [R-356].
#[test]
fn r196_a_deadline_before_the_watchdog_stays_a_deadline_and_ends_by_the_grace() {
    let mut attempt = stallable(1_000, 2_000);
    wake(&mut attempt, T0, GRANTED);
    let due = T0.after_ms(1_000);
    assert_eq!(wake(&mut attempt, due, GRANTED), [Order::Stop]);
    let grace = due.after_ms(3_000);
    assert_eq!(wake(&mut attempt, just_before(grace), GRANTED), []);
    let ended = wake(&mut attempt, grace, GRANTED);
    assert_eq!(ended, [finish(1, error(Failure::Deadline))]);
    assert_eq!(wake(&mut attempt, grace.after_ms(60_000), GRANTED), []);
    // The other way round it is a stall, and the deadline that passes in the join changes nothing.
    let mut attempt = stallable(2_000, 1_000);
    wake(&mut attempt, T0, GRANTED);
    assert_eq!(wake(&mut attempt, due, GRANTED), STALLS);
    assert_eq!(wake(&mut attempt, T0.after_ms(2_000), GRANTED), []);
    returned(&mut attempt, Ok(()));
    let mut numbers = Observations::default();
    let orders = probed(&mut attempt, HealthEvidence::Unknown, &mut numbers);
    assert!(finished(&orders).is_some());
}

/// Proves [S-41], [R-149], [I5.8].
#[test]
fn s41_fifty_stalls_at_once_are_numbered_in_the_order_of_their_evidence() {
    let mut numbers = Observations::default();
    let mut attempts: Vec<_> = (0..50).map(|_| joining().0).collect();
    let mut order: Vec<usize> = (0..50).map(|n| n * 37 % 50).collect();
    let mut decided = Vec::new();
    for &n in &order {
        // Half of them have returned before, so their terminal goes out in this very step.
        if n % 2 == 0 {
            returned(&mut attempts[n], Ok(()));
        }
        let orders = probed(&mut attempts[n], HealthEvidence::Available, &mut numbers);
        assert_eq!(finished(&orders).is_some(), n % 2 == 0);
        let (_, number) = attempts[n].evidence.unwrap();
        decided.push(number.unwrap().get());
    }
    assert_eq!(decided, (1..=50).collect::<Vec<_>>());
    order.retain(|n| n % 2 == 1);
    for n in order {
        let orders = returned(&mut attempts[n], Ok(()));
        let (_, number) = attempts[n].evidence.unwrap();
        assert_eq!(finished(&orders).unwrap().observation, number);
    }
}

/// Proves.
#[test]
fn r150_outside_a_session_there_is_no_number() {
    let (mut attempt, _) = joining();
    returned(&mut attempt, Ok(()));
    let mut orders = Vec::new();
    attempt.probed(HealthEvidence::Available, || None, &mut orders);
    assert_eq!(finished(&orders).unwrap().observation, None);
}

/// Walks every history of the events below to a depth, from a fresh attempt.
fn every_history(depth: u32, path: &mut Vec<u8>, check: &mut impl FnMut(&[u8])) {
    check(path);
    if depth > 0 {
        for event in 0..8 {
            path.push(event);
            every_history(depth - 1, path, check);
            path.pop();
        }
    }
}

#[derive(Default)]
struct Trace {
    calls: u32,
    stops: u32,
    probes: u32,
    observed: u32,
    frees: u32,
    terminals: u32,
    sequence: u64,
}

impl Trace {
    fn take(&mut self, orders: Vec<Order>) {
        for order in orders {
            assert!(self.terminals == 0 || matches!(order, Order::FreeSlot | Order::Stop));
            match order {
                Order::Call => self.calls += 1,
                Order::Stop => self.stops += 1,
                Order::Probe => self.probes += 1,
                Order::ProbeOver => assert_eq!(self.probes, 1),
                Order::Observe(_) => self.observed += 1,
                Order::FreeSlot => self.frees += 1,
                Order::Finish { sequence, terminal } => {
                    self.terminals += 1;
                    self.sequence += 1;
                    assert_eq!(sequence, self.sequence);
                    let stalled = matches!(terminal, Terminal::Stalled(_));
                    assert_eq!(self.observed, u32::from(stalled), "shown before it is sent");
                    assert_eq!(self.probes, u32::from(stalled), "probed for a stall alone");
                }
            }
        }
    }
}

/// Proves, [I5.1], [I5.2], [I5.4], [I5.6].
#[test]
fn i51_over_every_history_there_is_one_terminal_one_call_one_release_and_no_gap() {
    // The hard deadline lies before or behind the watchdog; a step of time passes grace and probe.
    for (hard_ms, depth) in [(2_000, 6), (4_000, 7)] {
        every_history(depth, &mut Vec::new(), &mut |path| history(hard_ms, path));
    }
}

fn history(hard_ms: u64, path: &[u8]) {
    let mut numbers = Observations::default();
    let mut attempt = stallable(hard_ms, 2_000);
    let (mut now, mut signals, mut trace) = (T0, Signals::default(), Trace::default());
    for event in path {
        match event {
            0 => signals.granted = true,
            1 => signals.cancelled = true,
            2 => signals.ended = true,
            3 => now = now.after_ms(2_000),
            4 if attempt.resource == Resource::Calling => {
                let output = if attempt.head {
                    Output::Body
                } else {
                    Output::Head
                };
                if let Verdict::Forward { sequence } = attempt.output(now, output, false) {
                    assert!(trace.terminals == 0 && trace.probes == 0 && !signals.ended);
                    trace.sequence += 1;
                    assert_eq!(sequence, trace.sequence);
                }
                continue;
            }
            5 if attempt.resource == Resource::Calling => {
                attempt.received();
                continue;
            }
            6 if attempt.resource == Resource::Calling => {
                trace.take(returned_at(&mut attempt, now, Ok(())));
                continue;
            }
            7 if attempt.probe.is_some() => {
                let health = HealthEvidence::Available;
                trace.take(probed(&mut attempt, health, &mut numbers));
                continue;
            }
            _ => continue,
        }
        let orders = wake(&mut attempt, now, signals);
        let over = orders.contains(&Order::ProbeOver);
        trace.take(orders);
        if over {
            trace.take(probed(&mut attempt, HealthEvidence::Unknown, &mut numbers));
        }
    }
    assert!(trace.calls <= 1 && trace.frees <= 1 && trace.terminals <= 1);
    assert!(trace.stops <= trace.calls && trace.probes <= trace.stops);
    assert!(numbers.draw().get() <= u64::from(trace.probes) + 1);
    if attempt.is_over() {
        assert_eq!(trace.frees, 1);
        assert!(trace.terminals == 1 || signals.ended);
    }
}
