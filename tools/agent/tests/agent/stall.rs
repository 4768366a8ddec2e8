//! A provider that goes silent: what the Edge is told, when, and what stays held meanwhile.
use core::num::{NonZeroU32, NonZeroU64};
use core::time::Duration;

use iop_control::node::attempt::Patience;
use iop_proto::domain::{
    Adapter, AdapterOptions, ExecutionFailure, FailureCode, Fence, FrameKind, HardTimeout,
    HealthEvidence, HealthPair, Message, Observation, OnCancel, Ping, StallTimeout, TunnelFrame,
    TunnelRequest,
};
use tokio::time::Instant;

use crate::support::edge::{Conn, Edge, adapter, payload, tunnel};
use crate::support::provider::{Call, Provider};
use crate::support::{Agent, Log, within};

/// T, G and H of these tests, ms. Late is fine, early never.
const STALL_MS: u64 = 300;
const GRACE_MS: u64 = 400;
const PROBE_MS: u64 = 500;

fn silent_for(run_id: &str, ms: u64) -> TunnelRequest {
    TunnelRequest {
        stall_timeout: StallTimeout::Millis(NonZeroU64::new(ms).unwrap()),
        ..tunnel(run_id, b"{}")
    }
}

fn stallable(run_id: &str) -> TunnelRequest {
    silent_for(run_id, STALL_MS)
}

struct World {
    provider: Provider,
    edge: Edge,
    conn: Conn,
    agent: Agent,
    adapter: Adapter,
}

/// Adapter `a` of one provider; `drain`: a stalled call is read to its end, so it ignores the abort.
async fn world(capacity: i32, drain: bool) -> World {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let mut config = edge.config();
    config.patience = Patience {
        grace_ms: GRACE_MS,
        probe_ms: PROBE_MS,
    };
    let agent = Agent::start(config);
    let options = AdapterOptions {
        on_cancel: if drain {
            OnCancel::Drain
        } else {
            OnCancel::Abort
        },
        ..AdapterOptions::default()
    };
    let adapter = Adapter {
        options,
        ..adapter(provider.port(), capacity)
    };
    let conn = edge.ready(payload(vec![adapter.clone()])).await;
    World {
        provider,
        edge,
        conn,
        agent,
        adapter,
    }
}

impl World {
    async fn open(&mut self, request: TunnelRequest) -> Call {
        self.conn.open(request).await;
        self.provider.request().await
    }

    async fn still_serves(&mut self) {
        let mut call = self.open(tunnel("after", b"{}")).await;
        call.answer("200 OK", b"ok").await;
        assert_eq!(self.conn.answer("after").await.body, b"ok");
    }

    /// Lets a stall of `run_id` meet a probe that is answered so; the terminal.
    async fn stall(&mut self, run_id: &str, status: &str, body: &str) -> TunnelFrame {
        let call = self.open(stallable(run_id)).await;
        reply(self.probe().await, status, body).await;
        let terminal = self.conn.frame().await;
        drop(call);
        terminal
    }

    async fn probe(&self) -> Call {
        let probe = self.provider.request().await;
        assert_eq!(probe.request_line(), "GET /v1/models HTTP/1.1");
        probe
    }
}

/// Answers a probe on a connection that nothing else will use.
async fn reply(mut probe: Call, status: &str, body: &str) {
    let status = format!("{status}\r\nconnection: close");
    probe.answer(&status, body.as_bytes()).await;
}

const LISTED: &str = r#"{"object":"list","data":[{"id":"u"},{"id":"t","object":"model"}]}"#;

/// The evidence of a well-formed stall terminal.
fn evidence(terminal: &TunnelFrame) -> &ExecutionFailure {
    assert_eq!(terminal.kind, FrameKind::Error);
    assert_eq!(terminal.error, "response stalled");
    assert!(terminal.metadata.is_empty() && terminal.body.is_empty());
    let failure = terminal.failure.as_ref().expect("a stall has evidence");
    assert_eq!(failure.code, FailureCode::ResponseStalled);
    assert_eq!(failure.run_id.as_ref(), Some(&terminal.run_id));
    let who = (failure.adapter.as_deref(), failure.target.as_deref());
    assert_eq!(who, (Some("a"), Some("t")));
    assert_eq!(failure.dropped_keys, 0);
    assert!(failure.idle_ms >= Some(STALL_MS));
    failure
}

fn number(failure: &ExecutionFailure) -> u64 {
    match failure.observation {
        Observation::Seq(number) => number.get(),
        ref other => panic!("a session's observation is numbered: {other:?}"),
    }
}

/// Proves [R-120], [R-127], [R-128], [R-129], [R-139], [R-142], [R-143], [R-147], [R-148], [P-44].
#[tokio::test]
async fn r127_silence_in_any_phase_is_one_error_with_evidence_and_an_aborted_call() {
    let mut world = world(4, false).await;
    let mut attempts = vec![];
    for phase in 0..3 {
        let run_id = format!("r{phase}");
        let mut call = world.open(stallable(&run_id)).await;
        if phase > 0 {
            call.start_chunked().await;
            assert_eq!(world.conn.frame().await.kind, FrameKind::ResponseStart);
        }
        if phase > 1 {
            call.chunk(b"data: one\n\n").await;
            assert_eq!(world.conn.frame().await.kind, FrameKind::Body);
        }
        let silent_from = Instant::now();
        let probe = world.probe().await;
        let expired = silent_from.elapsed().as_millis();
        assert!(
            expired + 20 >= u128::from(STALL_MS),
            "probed after {expired} ms"
        );
        call.gone().await;
        reply(probe, "200 OK", LISTED).await;
        let terminal = world.conn.frame().await;
        assert_eq!(terminal.sequence, phase + 1);
        let failure = evidence(&terminal);
        assert_eq!(failure.fence, Some(Fence::Confirmed));
        assert_eq!(failure.health, HealthPair::Known(HealthEvidence::Available));
        assert_eq!(number(failure), phase + 1);
        attempts.push(failure.attempt_id.clone().expect("this node's own name"));
        assert!(world.provider.is_idle(), "no second call");
    }
    attempts.dedup();
    assert_eq!(attempts.len(), 3);
    assert!(
        attempts
            .iter()
            .all(|id| !id.contains("r0") && id.len() > 16)
    );
    world.still_serves().await;
}

/// Proves [R-124], [R-140], [R-200], [R-201], [R-204], [S-38].
#[tokio::test]
async fn r121_a_provider_that_ignores_the_abort_is_fenced_and_keeps_its_slot_until_it_returns() {
    let mut world = world(1, true).await;
    let mut request = stallable("r");
    request.headers = vec![iop_proto::domain::Header {
        name: "x-tag".to_owned(),
        value: "of the request".into(),
    }];
    let mut call = world.open(request).await;
    call.start_chunked().await;
    call.chunk(b"one").await;
    for sequence in 1..=2 {
        assert_eq!(world.conn.frame().await.sequence, sequence);
    }
    // The one slot is held, and the probe runs all the same, with nothing of the request.
    let probe = world.probe().await;
    let expired = Instant::now();
    assert_eq!(
        (probe.header("x-tag"), probe.header("authorization")),
        (None, None)
    );
    reply(probe, "200 OK", LISTED).await;
    for _ in 0..50 {
        call.chunk(b"late").await;
    }
    world.conn.open(tunnel("next", b"next")).await;
    let terminal = world.conn.frame().await;
    let waited = expired.elapsed().as_millis();
    assert!(waited + 50 >= u128::from(GRACE_MS), "{waited} ms");
    assert_eq!((terminal.run_id.as_str(), terminal.sequence), ("r", 3));
    let failure = evidence(&terminal);
    assert_eq!(failure.fence, Some(Fence::Unconfirmed));
    assert_eq!(failure.health, HealthPair::Known(HealthEvidence::Available));
    // Retained: the id is taken, the slot is not given to the one that waits.
    world.conn.open(tunnel("r", b"again")).await;
    let refused = world.conn.answer("r").await;
    assert_eq!(refused.error(), "node rejected: the run id is still in use");
    assert!(world.provider.is_idle(), "who waits calls nobody");
    call.chunk(b"later still").await;
    call.end_chunked().await;
    let next = async {
        call.read_request().await;
        assert_eq!(call.body, b"next", "on the connection that came back whole");
        call.answer("200 OK", b"ok").await;
    };
    within("the next call", next).await;
    assert_eq!(
        world.conn.answer("next").await.body,
        b"ok",
        "and nothing of the late output"
    );
    world.conn.open(tunnel("r", b"{}")).await;
    call.read_request().await;
    call.answer("200 OK", b"free again").await;
    assert_eq!(world.conn.answer("r").await.body, b"free again");
}

/// Proves [R-125], [D-22], [D-49], [A-20].
#[tokio::test]
async fn r136_only_a_server_that_could_show_the_target_is_unavailable_without_it() {
    let mut world = world(4, false).await;
    let other = r#"{"data":[{"id":"u"},{"id":"T"},{"id":"t2"}]}"#;
    let (available, unavailable, unknown) = (
        HealthEvidence::Available,
        HealthEvidence::Unavailable,
        HealthEvidence::Unknown,
    );
    let cases = [
        ("200 OK", other, unknown), // it never showed `t`: no proof that it could
        ("200 OK", LISTED, available),
        ("200 OK", other, unavailable),
        ("401 Unauthorized", LISTED, unknown),
        ("403 Forbidden", "", unknown),
        ("429 Too Many Requests", LISTED, unknown),
        ("500 Internal Server Error", LISTED, unknown),
        ("302 Found\r\nlocation: /v1/models", LISTED, unknown),
        ("200 OK", r#"{"data":[{"id":"t"}"#, unknown),
        ("200 OK", "t", unknown),
        ("200 OK", LISTED, available),
    ];
    for (n, (status, body, expected)) in (1..).zip(cases) {
        let terminal = world.stall(&format!("r{n}"), status, body).await;
        let failure = evidence(&terminal);
        assert_eq!(
            failure.health,
            HealthPair::Known(expected),
            "{status} {body}"
        );
        assert_eq!(number(failure), n);
        assert!(
            world.provider.is_idle(),
            "no redirect is followed, nothing is retried"
        );
    }
    // A probe that hangs ends at H; a server that refuses is gone.
    let _call = world.open(stallable("hangs")).await;
    let _probe = world.probe().await;
    let began = Instant::now();
    let terminal = world.conn.frame().await;
    assert!(began.elapsed() + Duration::from_millis(50) >= Duration::from_millis(PROBE_MS));
    assert_eq!(evidence(&terminal).health, HealthPair::Known(unknown));
    let _call = world.open(stallable("refused")).await;
    drop(world.provider);
    let terminal = world.conn.frame().await;
    assert_eq!(evidence(&terminal).health, HealthPair::Known(unavailable));
}

/// Proves [D-49].
#[tokio::test]
async fn d49_a_configured_probe_path_states_what_it_can_show() {
    let mut world = world(4, false).await;
    drop(world.conn);
    world.adapter.options.probe_path = "/health/models".to_owned();
    world.conn = world.edge.ready(payload(vec![world.adapter.clone()])).await;
    for (n, body, expected) in [
        (1, r#"{"data":[]}"#, HealthEvidence::Unavailable),
        (2, LISTED, HealthEvidence::Available),
        (3, "[]", HealthEvidence::Unknown),
    ] {
        let _call = world.open(stallable("r")).await;
        let probe = world.provider.request().await;
        assert_eq!(probe.request_line(), "GET /health/models HTTP/1.1");
        reply(probe, "200 OK", body).await;
        let terminal = world.conn.frame().await;
        let failure = evidence(&terminal);
        assert_eq!(failure.health, HealthPair::Known(expected));
        assert_eq!(number(failure), n);
    }
}

/// Proves [P-38], [A-17], [I5.9].
#[tokio::test]
async fn a17_a_trickle_is_no_stall_and_neither_is_an_edge_that_does_not_read() {
    let mut world = world(4, false).await;
    let mut call = world.open(stallable("trickle")).await;
    call.start_chunked().await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(4 * STALL_MS) {
        call.chunk(b".").await;
        tokio::time::sleep(Duration::from_millis(STALL_MS / 4)).await;
    }
    call.end_chunked().await;
    let answer = world.conn.answer("trickle").await;
    assert!(answer.is_complete() && answer.body.len() > 3);
    // Three stall timeouts pass with the provider blocked behind an Edge that reads nothing.
    world.conn.open(stallable("blocked")).await;
    call.read_request().await;
    let body = vec![7; 48 * 1024 * 1024];
    let sent = body.clone();
    let mut writer = tokio::spawn(async move {
        call.answer("200 OK", &sent).await;
        call
    });
    let paused = tokio::time::timeout(Duration::from_millis(3 * STALL_MS), &mut writer);
    assert!(
        paused.await.is_err(),
        "48 MiB do not fit between provider and Edge"
    );
    let answer = world.conn.answer("blocked").await;
    assert!(answer.is_complete() && answer.body == body);
    // A server whose answer stands still after that is a stall as ever.
    drop(within("the provider", writer).await.unwrap());
    let terminal = world.stall("r", "200 OK", LISTED).await;
    assert_eq!(number(evidence(&terminal)), 1);
}

/// Proves [R-119].
#[tokio::test]
async fn r119_pings_other_runs_and_cancels_are_no_activity() {
    let mut world = world(4, false).await;
    let mut lively = world.open(tunnel("lively", b"{}")).await;
    lively.start_chunked().await;
    assert_eq!(world.conn.frame().await.sequence, 1);
    let _silent = world.open(stallable("silent")).await;
    let began = Instant::now();
    let mut sequence = 1;
    let terminal = loop {
        world.conn.send(0, Message::Ping(Ping { seq: 7 })).await;
        world.conn.cancel("nobody").await;
        lively.chunk(b"token").await;
        let frame = world.conn.frame().await;
        if frame.run_id == "silent" {
            break frame;
        }
        sequence += 1;
        assert_eq!(frame.sequence, sequence);
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "the watchdog was moved"
        );
    };
    evidence(&terminal);
    assert!(sequence > 5);
}

/// Proves [R-145], [R-197], [S-31].
#[tokio::test]
async fn r197_a_cancel_before_the_expiry_is_a_cancel_and_one_in_the_join_changes_nothing() {
    let mut world = world(4, false).await;
    let mut call = world.open(stallable("early")).await;
    world.conn.cancel("early").await;
    assert_eq!(world.conn.answer("early").await.error(), "cancelled");
    call.gone().await;
    let _call = world.open(stallable("late")).await;
    let probe = world.probe().await; // the first one: the cancelled run caused none
    world.conn.cancel("late").await;
    // The cancel is read before the probe's answer comes.
    world.conn.send(0, Message::Ping(Ping { seq: 1 })).await;
    world.conn.until("a pong", |conn| conn.pongs == [1]).await;
    reply(probe, "200 OK", LISTED).await;
    let terminal = world.conn.frame().await;
    assert_eq!(number(evidence(&terminal)), 1);
    world.still_serves().await;
}

/// Proves [R-196].
#[tokio::test]
async fn r196_whichever_of_deadline_and_watchdog_is_first_names_the_end() {
    let mut world = world(4, false).await;
    let one_second = HardTimeout::Seconds(NonZeroU32::MIN);
    let deadline = TunnelRequest {
        timeout: one_second,
        ..silent_for("deadline", 2_000)
    };
    let _call = world.open(deadline).await;
    assert_eq!(
        world.conn.answer("deadline").await.error(),
        "deadline exceeded"
    );
    let stall = TunnelRequest {
        timeout: one_second,
        ..stallable("stall")
    };
    let _call = world.open(stall).await;
    reply(world.probe().await, "200 OK", LISTED).await;
    assert_eq!(number(evidence(&world.conn.frame().await)), 1);
}

/// Proves [R-198], [R-199], [S-37], [S-42].
#[tokio::test]
async fn s42_a_lost_session_says_nothing_later_and_its_retained_call_keeps_the_slot() {
    let mut world = world(1, true).await;
    // Lost before the expiry: no probe. Lost in the join: no terminal.
    let mut before = world.open(silent_for("before", 60_000)).await;
    world.conn.open(stallable("waits")).await;
    drop(world.conn);
    world.conn = world.edge.ready(payload(vec![world.adapter.clone()])).await;
    world.conn.open(stallable("r")).await;
    assert!(
        world.provider.is_idle(),
        "the old session's call holds the slot"
    );
    before.answer("200 OK", b"of the old session").await;
    let mut call = before;
    call.read_request().await;
    let mut probe = world.probe().await;
    drop(world.conn);
    world.conn = world.edge.ready(payload(vec![world.adapter.clone()])).await;
    // What arrives on the new session is its own, and its observations count from 1.
    world.conn.open(stallable("new")).await;
    probe.gone().await;
    assert!(world.provider.is_idle(), "the stalled call holds the slot");
    call.answer("200 OK", b"late").await;
    call.read_request().await;
    reply(world.probe().await, "200 OK", LISTED).await;
    let terminal = world.conn.frame().await;
    assert_eq!((terminal.run_id.as_str(), terminal.sequence), ("new", 1));
    assert_eq!(number(evidence(&terminal)), 1);
    assert!(world.agent.is_running());
}

/// Proves [R-320], [R-322], [R-323], [R-324].
#[tokio::test]
async fn r324_the_log_tells_of_a_stall_without_ids_or_payload_and_the_wire_keeps_them() {
    let (log, _guard) = Log::capture();
    let mut world = world(4, false).await;
    let marker = "m4rk3r-of-a-caller";
    let run_id = "5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e";
    let mut request = stallable(run_id);
    request.body = format!("{{\"prompt\":\"{marker}\"}}").into_bytes().into();
    request.session_id = marker.to_owned();
    request.metadata = [(marker.to_owned(), marker.to_owned())].into();
    request.headers = vec![iop_proto::domain::Header {
        name: "x-user".to_owned(),
        value: marker.into(),
    }];
    let mut call = world.open(request).await;
    assert!(String::from_utf8_lossy(&call.body).contains(marker));
    let answer =
        format!("HTTP/1.1 200 OK\r\nx-answer: {marker}\r\ntransfer-encoding: chunked\r\n\r\n");
    call.write(answer).await;
    call.chunk(marker.as_bytes()).await;
    for sequence in 1..=2 {
        assert_eq!(world.conn.frame().await.sequence, sequence);
    }
    reply(world.probe().await, "500 Oops", marker).await;
    let terminal = world.conn.frame().await;
    let failure = evidence(&terminal); // run id, adapter and target among them
    log.wait("response stalled", 1).await;
    let text = log.text();
    let line = text.lines().find(|line| line.contains("response stalled"));
    let line = line.expect("just seen");
    assert!(
        line.contains("adapter=a") && line.contains("health=\"unknown\""),
        "{line}"
    );
    let attempt = failure.attempt_id.clone().expect("this node's own name");
    for word in [marker, run_id, attempt.as_str()] {
        assert!(!text.contains(word), "{word} in the log");
    }
    // The agent's own lines are there: the log was captured.
    assert!(text.contains("node ready"));
}

/// Proves [R-327], [R-328], [R-330].
#[tokio::test]
async fn r327_a_stall_terminal_repeats_nothing_of_caller_payload_or_provider() {
    let mut world = world(4, false).await;
    let marker = "m4rk3r";
    let mut request = stallable("r");
    request.body = format!("{{\"user\":\"{marker}-body\"}}")
        .into_bytes()
        .into();
    request.session_id = format!("{marker}-session");
    request.metadata = [
        (format!("{marker}-key"), format!("{marker}-value")),
        ("recovery_eligible".to_owned(), "true".to_owned()),
    ]
    .into();
    request.headers = vec![iop_proto::domain::Header {
        name: "x-user".to_owned(),
        value: format!("{marker}-header").into_bytes().into(),
    }];
    let mut call = world.open(request).await;
    call.write(format!(
        "HTTP/1.1 200 OK\r\nx-answer: {marker}-head\r\ntransfer-encoding: chunked\r\n\r\n"
    ))
    .await;
    call.chunk(format!("{marker}-partial").as_bytes()).await;
    // The marker is on the wire where it belongs: in the answer as far as it came.
    for part in ["head", "partial"] {
        world.conn.frame().await;
        let said = String::from_utf8_lossy(&world.conn.payload).into_owned();
        assert!(said.contains(&format!("{marker}-{part}")), "{said}");
    }
    reply(world.probe().await, "500 Oops", &format!("{marker}-probe")).await;
    let terminal = world.conn.frame().await;
    evidence(&terminal);
    let said = String::from_utf8_lossy(&world.conn.payload).into_owned();
    assert!(said.contains("response_stalled") && said.contains("attempt_id"));
    for word in [marker, "recovery"] {
        assert!(!said.contains(word), "{word} in {said}");
    }
}

/// Proves [R-141].
#[tokio::test]
async fn r141_evidence_names_the_resolved_instance_also_where_a_request_names_none() {
    let mut world = world(1, false).await;
    drop(world.conn);
    let legacy = Adapter {
        name: String::new(),
        ..world.adapter.clone()
    };
    let second = Adapter {
        name: "second-of-its-type".to_owned(),
        ..world.adapter.clone()
    };
    world.conn = world.edge.ready(payload(vec![legacy, second])).await;
    for (asked, resolved) in [
        ("", "openai_compat"),
        ("openai_compat", "openai_compat"),
        ("second-of-its-type", "second-of-its-type"),
    ] {
        let request = TunnelRequest {
            adapter: asked.to_owned(),
            ..stallable("r")
        };
        let _call = world.open(request).await;
        reply(world.probe().await, "200 OK", LISTED).await;
        let failure = world.conn.frame().await.failure.expect("a stall");
        assert_eq!(failure.adapter.as_deref(), Some(resolved), "{asked:?}");
    }
}

/// Proves [S-39].
#[tokio::test]
async fn s39_a_retained_call_holds_no_shutdown() {
    let mut world = world(1, true).await;
    let mut call = world.open(stallable("r")).await;
    reply(world.probe().await, "200 OK", LISTED).await;
    assert_eq!(
        evidence(&world.conn.frame().await).fence,
        Some(Fence::Unconfirmed)
    );
    let asked = Instant::now();
    world.agent.handle.shut_down();
    assert!(matches!(
        world.conn.message().await.message,
        Message::GoAway(_)
    ));
    world.conn.closed().await;
    assert_eq!(world.agent.exit().await.code(), 0);
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "far from the drain's timeout"
    );
    call.gone().await;
}

/// Proves [P-41].
#[tokio::test]
async fn p41_a_backend_that_hangs_delays_no_other() {
    let mut world = world(2, false).await;
    let other = Provider::start().await;
    drop(world.conn);
    let healthy = Adapter {
        name: "b".to_owned(),
        ..adapter(other.port(), 1)
    };
    let both = vec![world.adapter.clone(), healthy];
    world.conn = world.edge.ready(payload(both)).await;
    let mut hanging = vec![];
    for run_id in ["h1", "h2"] {
        hanging.push(world.open(silent_for(run_id, 60_000)).await);
    }
    for run_id in ["h3", "h4"] {
        world.conn.open(silent_for(run_id, 60_000)).await;
    }
    for n in 0..20 {
        let request = TunnelRequest {
            adapter: "b".to_owned(),
            ..tunnel("quick", b"{}")
        };
        world.conn.open(request).await;
        let mut call = other.request().await;
        call.answer("200 OK\r\nconnection: close", b"ok").await;
        assert_eq!(world.conn.answer("quick").await.body, b"ok", "{n}");
    }
    assert!(world.provider.is_idle(), "those beyond the capacity wait");
}
