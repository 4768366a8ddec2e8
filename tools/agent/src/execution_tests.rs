//! What a driver owes whatever its adapter, its probe or its observer do.
use core::time::Duration;

use iop_control::node::attempt::Stall;
use iop_control::node::runs::Runs;
use iop_control::node::supervisor::{Action, Event, Policy, Supervisor};
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{Adapter, Message, NodeConfig, TunnelFrame, TunnelRequest};
use tokio::net::TcpListener;

use super::*;
use crate::adapters::{Adapters, Plans};
use crate::answer::Family;
use crate::config::ProviderHttp;
use crate::provider::HttpCall;

/// Proves [D-47].
#[tokio::test]
async fn d47_a_panic_in_an_adapter_is_a_failure_of_its_call() {
    let mut call = Call::Tunnel(HttpCall::panicking());
    let error = next(Some(&mut call), false).await.unwrap_err();
    assert_eq!(error, CallError::Http(ProviderError::Fault));
    assert_eq!(error.to_string(), "internal error in the adapter");
}

fn instance(port: u16) -> Arc<Instance> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = ProviderHttp {
        connect_timeout: Duration::from_secs(5),
        pool_idle: Duration::from_secs(1),
        ca: None,
    };
    let base_url = format!("http://127.0.0.1:{port}");
    let adapter = Adapter::new("a".to_owned(), ProviderKind::Vllm, 1, base_url);
    let config = NodeConfig {
        adapters: vec![adapter],
        concurrency: 0,
    };
    let mut adapters = Adapters::default();
    let plans = Plans::judge(&config, &http, None).expect("a good configuration");
    adapters.start(plans).expect("a client");
    adapters.get("a").expect("as configured").clone()
}

/// Some ticket; only the machines make them.
pub(crate) fn ticket() -> Ticket {
    let policy = Policy::new(None, None, None).expect("the defaults");
    let mut supervisor = Supervisor::new(policy, 1);
    let dialled = supervisor.step(Now::from_nanos(0), Event::Valid, 0);
    let Some(Action::Dial(link)) = dialled else {
        panic!("a valid start dials")
    };
    Runs::default().take(link, "r").expect("an empty table")
}

/// The terminal of an attempt whose provider never says a word.
async fn stalled(observer: Observer) -> TunnelFrame {
    let provider = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let instance = instance(provider.local_addr().expect("bound").port());
    let request = TunnelRequest {
        method: "POST".to_owned(),
        path: "/v1/x".to_owned(),
        ..TunnelRequest::default()
    };
    let (_signals, heard) = watch::channel(Signals {
        granted: true,
        ..Signals::default()
    });
    let (bulk, mut sent) = mpsc::channel(4);
    let (reports, _reports) = mpsc::unbounded_channel();
    let clock = Clock::start();
    let (grace_ms, probe_ms) = (50, 50);
    let job = Job {
        ticket: ticket(),
        identity: Identity {
            family: Family::Tunnel,
            run_id: "r".to_owned(),
            attempt_id: "n-1".to_owned(),
            adapter: "a".to_owned(),
            target: "t".to_owned(),
        },
        received: clock.now(),
        timeouts: Timeouts {
            hard_ms: None,
            stall_ms: 50,
        },
        patience: Patience { grace_ms, probe_ms },
        work: instance.resolve_tunnel(request).expect("a good request"),
        instance,
        clock,
        signals: heard,
        bulk,
        numbers: None,
        observer,
        reports,
    };
    let ended = tokio::time::timeout(Duration::from_secs(20), run(job));
    ended.await.expect("an attempt ends");
    let first = sent.recv().await.expect("one terminal");
    assert!(sent.recv().await.is_none(), "and nothing else");
    let Message::TunnelFrame(frame) = *first.message else {
        panic!("a tunnel's terminal is a frame")
    };
    frame
}

/// Takes the one figure out that no two stalls share.
fn without_idle(frame: &mut TunnelFrame) -> Option<u64> {
    let failure = frame.failure.as_mut().expect("a stall has evidence");
    failure.idle_ms.take()
}

/// Proves [S-40], [R-309], [R-313], [D-47], [I5.10].
#[tokio::test]
async fn s40_an_observer_that_panics_or_blocks_changes_no_terminal() {
    let (shown_in, shown) = std::sync::mpsc::channel();
    let telling = Observer::start(move |observed, _| {
        let _ = shown_in.send(observed.stall);
    });
    let mut expected = stalled(telling).await;
    let observed: Stall = shown
        .recv_timeout(Duration::from_secs(20))
        .expect("shown before the terminal was built");
    let idle_ms = without_idle(&mut expected);
    assert_eq!(idle_ms, Some(observed.idle_ms));
    let panicking = Observer::start(|_, _| panic!("planted"));
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocking = Observer::start(move |_, _| {
        let _ = blocked.recv();
    });
    for observer in [panicking, blocking] {
        let mut frame = stalled(observer).await;
        assert!(without_idle(&mut frame) >= Some(50));
        assert_eq!(frame, expected);
    }
    drop(release);
}

#[tokio::test]
async fn an_alarm_rings_for_the_earliest_deadline_and_once() {
    let mut alarm = Alarm::new();
    let (now, clock) = (Instant::now(), Clock::start());
    let at = |ms| Some(clock.now().after_ms(ms));
    alarm.set(None, clock);
    assert!(alarm.ring().now_or_never().is_none(), "not set");
    alarm.set(at(60_000), clock);
    alarm.set(at(30), clock);
    alarm.set(at(40), clock); // later: the one before rings, and is looked at then
    alarm.set(None, clock);
    let ring = tokio::time::timeout(Duration::from_secs(20), alarm.ring());
    ring.await.expect("the earliest one");
    assert!(now.elapsed() >= Duration::from_millis(30));
    assert!(alarm.ring().now_or_never().is_none(), "it has rung");
    alarm.set(at(10), clock);
    let again = tokio::time::timeout(Duration::from_secs(20), alarm.ring());
    again.await.expect("set again");
    assert!(now.elapsed() >= Duration::from_millis(40));
}
