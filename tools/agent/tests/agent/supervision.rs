//! How often, when and why the agent dials, and how it ends.
use core::time::Duration;

use iop_agent::Exit;
use iop_control::node::supervisor::Policy;
use iop_proto::domain::{Adapter, FrameKind, Message, Ping, TunnelRequest};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::support::edge::{Answer, Edge, adapter, payload, tunnel};
use crate::support::provider::Provider;
use crate::support::{Agent, Log, within};

fn limited(interval: i64, attempts: i64) -> Policy {
    Policy::new(Some(interval), Some(attempts), Some(0.0)).unwrap()
}

#[tokio::test]
async fn a_finite_limit_is_the_number_of_dials_and_their_spacing_the_interval() {
    let edge = Edge::plaintext().await;
    let mut config = edge.config();
    config.reconnect = limited(1, 3);
    let agent = Agent::start(config);
    let mut dials = vec![];
    for _ in 0..3 {
        drop(edge.dialled().await);
        dials.push(Instant::now());
    }
    assert_eq!(agent.exit().await, Exit::Exhausted);
    assert!(
        dials[2].elapsed() < Duration::from_millis(500),
        "no wait after the last"
    );
    for pair in dials.windows(2) {
        let gap = pair[1] - pair[0];
        assert!((0.95..1.9).contains(&gap.as_secs_f64()), "{gap:?}");
    }
    let more = futures_util::FutureExt::now_or_never(edge.listener.accept());
    assert!(more.is_none());
}

#[tokio::test]
async fn a_dead_port_is_dialled_until_the_limit_and_a_lost_session_starts_a_new_series() {
    let dead = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut config = Edge::plaintext().await.config();
    config.edge.port = dead;
    config.reconnect = limited(0, 2);
    assert_eq!(Agent::start(config).exit().await, Exit::Exhausted);

    let edge = Edge::plaintext().await;
    let mut config = edge.config();
    config.reconnect = limited(0, 1);
    let agent = Agent::start(config);
    for _ in 0..5 {
        drop(edge.ready(payload(vec![])).await);
    }
    drop(edge.dialled().await);
    assert_eq!(agent.exit().await, Exit::Exhausted);
}

#[tokio::test]
async fn shutdown_ends_every_state_without_a_session_with_code_zero() {
    let edge = Edge::start().await;
    let quick = Duration::from_secs(5);
    // Dialled, nothing answered.
    let agent = Agent::start(edge.config());
    let silent = edge.dialled().await;
    let begun = Instant::now();
    agent.handle.shut_down();
    assert_eq!(agent.exit().await.code(), 0);
    drop(silent);
    // Registered, no answer.
    let agent = Agent::start(edge.config());
    let mut conn = edge.accept().await;
    conn.message().await;
    agent.handle.shut_down();
    assert_eq!(agent.exit().await.code(), 0);
    conn.closed().await;
    // Ready asked, no answer.
    let agent = Agent::start(edge.config());
    let mut conn = edge.accept().await;
    conn.register(payload(vec![])).await;
    conn.ready_request().await;
    agent.handle.shut_down();
    assert_eq!(agent.exit().await.code(), 0);
    // Between two attempts; on the last one it is still no exhaustion.
    let mut config = edge.config();
    config.reconnect = limited(3_600, 2);
    let agent = Agent::start(config);
    drop(edge.dialled().await);
    agent.handle.shut_down();
    assert_eq!(agent.exit().await.code(), 0);
    assert!(begun.elapsed() < quick);
}

/// Proves [D-07].
#[tokio::test]
async fn d07_a_drain_announces_itself_serves_on_then_refuses_and_ends_when_idle() {
    let (provider, busy) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let second = Adapter {
        name: "b".to_owned(),
        ..adapter(busy.port(), 8)
    };
    busy.serve_all("still served");
    let mut conn = edge
        .ready(payload(vec![adapter(provider.port(), 8), second]))
        .await;
    conn.open(tunnel("old", b"{}")).await;
    let mut old = provider.request().await;
    agent.handle.shut_down();
    let notice = conn.message().await;
    assert!(matches!(notice.message, Message::GoAway(away) if away.grace_ms == 10_000));
    // For a second everything is served; then every new request is one error terminal.
    let begun = Instant::now();
    let mut served = 0;
    let refused = loop {
        let run_id = format!("new-{served}");
        let request = TunnelRequest {
            adapter: "b".to_owned(),
            ..tunnel(&run_id, b"{}")
        };
        conn.open(request).await;
        let answer = conn.answer(&run_id).await;
        if answer.terminal == Some(FrameKind::Error) {
            break answer;
        }
        assert_eq!(answer.body, b"still served");
        served += 1;
    };
    assert!(served > 0 && begun.elapsed() >= Duration::from_millis(950));
    assert_eq!(refused.error(), "draining");
    assert_eq!((refused.frames, refused.status), (1, None));
    assert!(agent.is_running(), "one attempt is still active");
    old.answer("200 OK", b"old").await;
    assert_eq!(conn.answer("old").await.body, b"old");
    conn.closed().await;
    assert_eq!(agent.exit().await.code(), 0);
}

/// Proves [D-55].
#[tokio::test]
async fn d55_a_second_signal_ends_at_once_and_closes_what_is_open() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 8)])).await;
    conn.open(tunnel("r", b"{}")).await;
    let mut call = provider.request().await;
    agent.handle.shut_down();
    assert!(matches!(conn.message().await.message, Message::GoAway(_)));
    let begun = Instant::now();
    agent.handle.shut_down();
    assert_eq!(agent.exit().await.code(), 0);
    conn.closed().await;
    call.gone().await;
    assert!(begun.elapsed() < Duration::from_secs(1));
}

/// Proves [R-081].
#[tokio::test]
async fn r081_a_lost_session_cancels_its_calls_and_frees_their_slots() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let adapters = || payload(vec![adapter(provider.port(), 4)]);
    let mut conn = edge.ready(adapters()).await;
    let mut calls = vec![];
    for run in ["r1", "r2", "r3", "r4"] {
        conn.open(tunnel(run, b"{}")).await;
        let mut call = provider.request().await;
        call.start_chunked().await;
        calls.push(call);
    }
    conn.open(tunnel("waits", b"{}")).await;
    drop(conn);
    let lost_at = Instant::now();
    for call in &mut calls {
        call.gone().await;
    }
    assert!(
        lost_at.elapsed() < Duration::from_millis(250),
        "{:?}",
        lost_at.elapsed()
    );
    // The next session is its own: the same ids run, the slots are back.
    let mut conn = edge.ready(adapters()).await;
    for run in ["r1", "r2", "r3", "r4"] {
        conn.open(tunnel(run, b"{}")).await;
        provider
            .request()
            .await
            .answer("200 OK", run.as_bytes())
            .await;
        assert_eq!(conn.answer(run).await.body, run.as_bytes());
    }
    assert!(
        provider.is_idle(),
        "who waited in the old session calls nobody"
    );
}

#[tokio::test]
async fn an_idle_agent_pings_and_answers_pings_with_their_number() {
    let edge = Edge::start().await;
    let mut config = edge.config();
    config.ping_every = Duration::from_millis(50);
    let _agent = Agent::start(config);
    let mut conn = edge.ready(payload(vec![])).await;
    for seq in [5, 6, u64::MAX] {
        conn.send(0, Message::Ping(Ping { seq })).await;
    }
    conn.until("three pings", |conn| {
        conn.pings >= 3 && conn.pongs.len() >= 3
    })
    .await;
    assert_eq!(conn.pongs, [5, 6, u64::MAX]);
}

/// Proves [D-03], [P-65].
#[tokio::test]
async fn d03_a_silent_edge_is_dead_after_the_timeout_and_any_byte_is_liveness() {
    let edge = Edge::plaintext().await;
    let mut config = edge.config();
    config.ping_every = Duration::from_millis(100);
    config.dead_after = Duration::from_millis(400);
    let _agent = Agent::start(config);
    let mut conn = edge.ready(payload(vec![])).await;
    // One byte of an envelope now and then: the session lives past the timeout.
    let begun = Instant::now();
    for byte in [0, 0, 0, 200, 8, 1] {
        conn.write(&[byte]).await;
        let redialled = tokio::time::timeout(Duration::from_millis(200), edge.listener.accept());
        assert!(redialled.await.is_err(), "fenced while bytes arrive");
    }
    assert!(begun.elapsed() > Duration::from_millis(1_000));
    let silent_from = Instant::now();
    let again = edge.dialled().await;
    let waited = silent_from.elapsed();
    assert!(waited < Duration::from_millis(900), "{waited:?}");
    drop(again);
}

#[tokio::test]
async fn an_agent_reaches_an_edge_by_name_and_by_ipv6_address() {
    for (bound, host) in [("[::1]:0", "::1"), ("127.0.0.1:0", "localhost")] {
        let listener = TcpListener::bind(bound).await.unwrap();
        let mut config = Edge::plaintext().await.config();
        config.edge.port = listener.local_addr().unwrap().port();
        config.edge.host = host.to_owned();
        let _agent = Agent::start(config);
        within(host, listener.accept()).await.unwrap();
    }
}

#[tokio::test]
async fn frames_of_a_drained_session_are_flushed_before_it_closes() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 1)])).await;
    conn.open(tunnel("r", b"{}")).await;
    let mut call = provider.request().await;
    agent.handle.shut_down();
    let body = vec![7; 3_000_000];
    call.answer("200 OK", &body).await;
    let mut answer = Answer::default();
    while answer.terminal.is_none() {
        let received = conn.message().await;
        match received.message {
            Message::GoAway(_) => {}
            Message::TunnelFrame(frame) => answer.take(frame),
            other => panic!("{other:?}"),
        }
    }
    assert!(answer.is_complete() && answer.body == body);
    conn.closed().await;
    assert_eq!(agent.exit().await.code(), 0);
}

/// Proves [R-057], [R-066].
#[tokio::test]
async fn r057_an_agent_starts_without_an_edge_and_serves_when_one_comes() {
    let (log, _guard) = Log::capture();
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = nobody.local_addr().unwrap().port();
    drop(nobody);
    let mut config = Edge::plaintext().await.config();
    config.edge.port = port;
    config.reconnect = Policy::new(Some(1), Some(0), Some(0.0)).unwrap();
    let begun = Instant::now();
    let agent = Agent::start(config);
    log.wait("node agent started", 1).await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    log.wait("link lost", 3).await;
    assert!(agent.is_running());
    let edge = Edge::plaintext_on(port).await;
    let mut conn = edge.ready(payload(vec![])).await;
    conn.send(0, Message::Ping(Ping { seq: 9 })).await;
    conn.until("a pong of the same process", |conn| conn.pongs == [9])
        .await;
    assert_eq!(log.count("node agent started"), 1);
}

/// Proves [R-058], [I4.1].
#[tokio::test]
async fn r058_one_supervisor_dials_one_connection_at_a_time_over_many_sessions() {
    let edge = Edge::plaintext().await;
    let _agent = Agent::start(edge.config());
    for _ in 0..50 {
        let mut conn = edge.ready(payload(vec![])).await;
        conn.send(0, Message::Ping(Ping { seq: 1 })).await;
        conn.until("a pong", |conn| conn.pongs == [1]).await;
        let second = futures_util::FutureExt::now_or_never(edge.listener.accept());
        assert!(second.is_none(), "a second dial beside a live session");
    }
}

/// Proves [D-53].
#[tokio::test]
async fn d53_the_interval_runs_from_the_end_of_a_session_to_the_next_dial() {
    let edge = Edge::plaintext().await;
    let mut config = edge.config();
    config.reconnect = limited(1, 5);
    let _agent = Agent::start(config);
    let conn = edge.ready(payload(vec![])).await;
    // A session longer than the interval: the dial does not follow its end at once.
    let longer = tokio::time::timeout(Duration::from_millis(1_300), edge.listener.accept());
    assert!(longer.await.is_err(), "a dial beside a live session");
    drop(conn);
    let lost_at = Instant::now();
    drop(edge.dialled().await);
    let waited = lost_at.elapsed().as_secs_f64();
    assert!((0.95..3.0).contains(&waited), "{waited}");
}

/// Proves [S-48].
#[tokio::test]
async fn s48_a_shutdown_that_meets_a_dial_leaves_no_register_request_and_no_socket() {
    let edge = Edge::plaintext().await;
    for turns in 0..12 {
        let agent = Agent::start(edge.config());
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        agent.handle.shut_down();
        assert_eq!(agent.exit().await, Exit::Shutdown);
        while let Some(Ok((mut stream, _))) =
            futures_util::FutureExt::now_or_never(edge.listener.accept())
        {
            let mut heard = vec![];
            let read = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut heard);
            let _ = within("the end of the socket", read).await;
            let preface = iop_proto::limits::PLAINTEXT_PREFACE.len();
            assert!(heard.len() <= preface, "{heard:?}");
        }
    }
    let _agent = Agent::start(edge.config());
    let registers = edge.accept().await.message().await;
    assert!(matches!(registers.message, Message::RegisterRequest(_)));
}
