//! The attempt machine against its invariants: tables for the rules, every history for the rest.
use core::num::NonZeroU32;

use iop_proto::domain::{CredentialBinding, LeaseEnvelope};
use iop_proto::limits::STALL_TIMEOUT_MS_MAX;

use super::*;

const T0: Now = Now::from_nanos(1_000_000_000);
const GRANTED: Signals = Signals {
    granted: true,
    cancelled: false,
    ended: false,
};
const CANCELLED: Signals = Signals {
    granted: true,
    cancelled: true,
    ended: false,
};
const ENDED: Signals = Signals {
    granted: true,
    cancelled: false,
    ended: true,
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
    let mut orders = Vec::new();
    attempt.returned(result, &mut orders);
    orders
}

fn calling() -> Attempt {
    let mut attempt = Attempt::new(T0, timeouts(0));
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
    boundary(HardTimeout::from_wire(timeout), stall, &Credential::None)
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

#[test]
fn a_credential_whole_or_half_is_refused_while_the_plane_is_off() {
    let lease = || LeaseEnvelope::new("sealed".into()).unwrap();
    let binding = CredentialBinding::default;
    let judge = |credential| boundary(HardTimeout::None, StallTimeout::Default, &credential);
    assert!(judge(Credential::None).is_ok());
    let pair = Credential::Managed {
        lease: lease(),
        binding: binding(),
    };
    assert_eq!(judge(pair), Err(Rejection::CredentialUnmanaged));
    assert_eq!(
        judge(Credential::LeaseAlone(lease())),
        Err(Rejection::CredentialHalf)
    );
    assert_eq!(
        judge(Credential::BindingAlone(binding())),
        Err(Rejection::CredentialHalf)
    );
    assert!(
        boundary(
            HardTimeout::Seconds(NonZeroU32::MIN),
            StallTimeout::Default,
            &Credential::None
        )
        .is_ok()
    );
}

#[test]
fn an_answer_is_numbered_from_one_without_a_gap_and_ends_once() {
    let mut attempt = calling();
    assert_eq!(
        attempt.output(Output::Head),
        Verdict::Forward { sequence: 1 }
    );
    assert_eq!(
        attempt.output(Output::Body),
        Verdict::Forward { sequence: 2 }
    );
    assert_eq!(
        attempt.output(Output::Body),
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
        let mut attempt = Attempt::new(T0, timeouts(1_000));
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
        let mut attempt = Attempt::new(T0, timeouts(0));
        let orders = wake(&mut attempt, T0, signals);
        assert!(!orders.contains(&Order::Call));
        assert_eq!(orders[0], Order::FreeSlot);
    }
}

/// Proves.
#[test]
fn a60_at_one_instant_cancel_beats_session_end_beats_deadline() {
    let all = Signals {
        granted: true,
        cancelled: true,
        ended: true,
    };
    let due = T0.after_ms(5);
    let decided = |signals, now| {
        let mut attempt = Attempt::new(T0, timeouts(5));
        wake(&mut attempt, T0, GRANTED);
        assert_eq!(wake(&mut attempt, now, signals), [Order::Stop]);
        attempt.outcome.unwrap()
    };
    assert_eq!(decided(all, due), Outcome::Failed(Failure::Cancelled));
    assert_eq!(decided(CANCELLED, due), Outcome::Failed(Failure::Cancelled));
    assert_eq!(decided(ENDED, due), Outcome::Disconnected);
    assert_eq!(decided(GRANTED, due), Outcome::Failed(Failure::Deadline));
}

#[test]
fn a_stopped_provider_that_returns_ends_the_attempt_at_once() {
    let mut attempt = calling();
    attempt.output(Output::Head);
    assert_eq!(wake(&mut attempt, T0, CANCELLED), [Order::Stop]);
    assert_eq!(attempt.output(Output::Body), Verdict::Discard);
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
    let grace = T0.after_ms(CLOSE_GRACE_MS);
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
    assert_eq!(attempt.output(Output::Head), Verdict::Discard);
    assert_eq!(returned(&mut attempt, Ok(())), [Order::FreeSlot]);
    assert!(attempt.is_over());

    let mut stopping = calling();
    wake(&mut stopping, T0, CANCELLED);
    let both = Signals {
        ended: true,
        ..CANCELLED
    };
    assert_eq!(wake(&mut stopping, T0, both), []);
    assert_eq!(wake(&mut stopping, T0.after_ms(CLOSE_GRACE_MS), both), []);
    assert_eq!(returned(&mut stopping, Ok(())), [Order::FreeSlot]);
}

/// Walks every history of the events below to a depth, from a fresh attempt.
fn every_history(depth: u32, path: &mut Vec<u8>, check: &mut impl FnMut(&[u8])) {
    check(path);
    if depth > 0 {
        for event in 0..7 {
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
                Order::FreeSlot => self.frees += 1,
                Order::Finish { sequence, .. } => {
                    self.terminals += 1;
                    self.sequence += 1;
                    assert_eq!(sequence, self.sequence);
                }
            }
        }
    }
}

/// Proves [I5.1], [I5.4], [I5.6].
#[test]
fn i51_over_every_history_there_is_one_terminal_one_call_one_release_and_no_gap() {
    every_history(7, &mut Vec::new(), &mut |path| {
        let mut attempt = Attempt::new(T0, timeouts(2_000));
        let (mut now, mut signals, mut trace) = (T0, Signals::default(), Trace::default());
        for event in path {
            match event {
                0 => signals.granted = true,
                1 => signals.cancelled = true,
                2 => signals.ended = true,
                3 => now = now.after_ms(2_000),
                4 | 5 if attempt.resource == Resource::Calling => {
                    let output = if attempt.head {
                        Output::Body
                    } else {
                        Output::Head
                    };
                    if let Verdict::Forward { sequence } = attempt.output(output) {
                        assert!(trace.terminals == 0 && !signals.ended);
                        trace.sequence += 1;
                        assert_eq!(sequence, trace.sequence);
                    }
                    continue;
                }
                6 if attempt.resource == Resource::Calling => {
                    trace.take(returned(&mut attempt, Ok(())));
                    continue;
                }
                _ => continue,
            }
            trace.take(wake(&mut attempt, now, signals));
        }
        assert!(trace.calls <= 1 && trace.frees <= 1 && trace.terminals <= 1);
        assert!(trace.stops <= trace.calls);
        if attempt.is_over() {
            assert_eq!(trace.frees, 1);
            assert!(trace.terminals == 1 || signals.ended);
        }
    });
}
