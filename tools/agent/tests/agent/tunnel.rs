//! What one tunnel request becomes, and every way it can end.
use core::num::{NonZeroU32, NonZeroU64};
use core::time::Duration;

use iop_proto::domain::{
    Adapter, AdapterOptions, Credential, CredentialBinding, HardTimeout, Header, LeaseEnvelope,
    NodeConfig, OnCancel, Profile, ProfileOperation, StallTimeout, TunnelRequest,
};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::support::edge::{Conn, Edge, adapter, payload, tunnel};
use crate::support::provider::Provider;
use crate::support::{Agent, Dice, within};

/// An Edge, an agent that serves it, and a provider behind adapter `a`.
pub(crate) struct World {
    pub(crate) provider: Provider,
    pub(crate) conn: Conn,
    _agent: Agent,
    _edge: Edge,
}

pub(crate) async fn world(capacity: i32) -> World {
    world_with(|port| payload(vec![adapter(port, capacity)])).await
}

async fn world_with(config: impl FnOnce(u16) -> NodeConfig) -> World {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let conn = edge.ready(config(provider.port())).await;
    World {
        provider,
        conn,
        _agent: agent,
        _edge: edge,
    }
}

impl World {
    /// The adapter still serves: the positive beside every negative.
    pub(crate) async fn still_serves(&mut self) {
        self.conn.open(tunnel("after", b"{}")).await;
        self.provider
            .request()
            .await
            .answer("200 OK", b"fine")
            .await;
        assert_eq!(self.conn.answer("after").await.body, b"fine");
    }
}

/// Proves [R-089], [R-090], [R-325].
#[tokio::test]
async fn r089_one_request_reaches_the_provider_and_its_answer_comes_back_in_order() {
    let mut world = world(4).await;
    let body = Dice::new(7).bytes(300_000);
    let mut request = tunnel("r", &body);
    let header = |name: &str, value: &'static [u8]| Header {
        name: name.to_owned(),
        value: value.into(),
    };
    request.headers = vec![
        header("content-type", b"application/json"),
        header("x-a", b"1"),
    ];
    world.conn.open(request).await;
    let mut call = world.provider.request().await;
    assert_eq!(call.request_line(), "POST /v1/chat/completions HTTP/1.1");
    assert_eq!(call.body, body);
    assert_eq!(call.header("content-length"), Some("300000"));
    assert_eq!(call.header("transfer-encoding"), None);
    assert_eq!(call.header("accept-encoding"), None);
    assert_eq!(call.header("x-a"), Some("1"));
    let host = format!("127.0.0.1:{}", world.provider.port());
    assert_eq!(call.header("host"), Some(host.as_str()));
    call.start_chunked().await;
    for event in ["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"] {
        call.chunk(event.as_bytes()).await;
    }
    call.end_chunked().await;
    let answer = world.conn.answer("r").await;
    assert_eq!(answer.status, Some(200));
    assert_eq!(
        answer.header("content-type"),
        Some(&b"text/event-stream"[..])
    );
    assert_eq!(answer.header("transfer-encoding"), None);
    assert_eq!(answer.body, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
    assert!(answer.is_complete() && answer.frames >= 3);
}

/// Proves [P-48], [P-61].
#[tokio::test]
async fn p48_a_providers_status_and_body_pass_whatever_they_are_and_no_redirect_is_followed() {
    let mut world = world(4).await;
    for status in [
        "200 OK",
        "302 Found",
        "400 Bad Request",
        "429 Slow Down",
        "500 Oops",
        "599 X",
    ] {
        world.conn.open(tunnel("r", b"{}")).await;
        let mut call = world.provider.request().await;
        call.write(format!("HTTP/1.1 {status}\r\n")).await;
        call.write("location: /elsewhere\r\nset-cookie: a\r\nset-cookie: b\r\n")
            .await;
        call.write("connection: close, x-hop\r\nx-hop: 1\r\nretry-after: 7\r\n")
            .await;
        call.write(
            "x-latin: caf\u{e9}\r\n"
                .chars()
                .map(|c| c as u8)
                .collect::<Vec<_>>(),
        )
        .await;
        call.write("content-length: 7\r\n\r\n{\"e\":1}").await;
        let answer = world.conn.answer("r").await;
        assert!(answer.is_complete());
        assert_eq!(answer.status, Some(status[..3].parse().unwrap()));
        assert_eq!(answer.body, b"{\"e\":1}");
        let names: Vec<_> = answer
            .headers
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        let expected = [
            "location",
            "set-cookie",
            "set-cookie",
            "retry-after",
            "x-latin",
            "content-length",
        ];
        assert_eq!(names, expected);
        assert_eq!(answer.header("x-latin"), Some(&b"caf\xe9"[..]));
    }
    assert!(world.provider.is_idle(), "no redirect was followed");
}

/// Proves [R-108].
#[tokio::test]
async fn r108_a_body_may_be_empty_in_each_way_http_knows() {
    let mut world = world(4).await;
    for head in [
        "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\nconnection: close\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n\
         HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    ] {
        world.conn.open(tunnel("r", b"{}")).await;
        world.provider.request().await.write(head).await;
        let answer = world.conn.answer("r").await;
        assert!(answer.is_complete(), "{head}");
        assert_eq!((answer.frames, answer.body.len()), (2, 0), "{head}");
    }
}

/// A profile of one named operation, and none.
fn profiled(port: u16) -> NodeConfig {
    let operation = |name: &str, method: &str, path: &str| ProfileOperation {
        name: name.to_owned(),
        method: method.to_owned(),
        path: path.to_owned(),
    };
    let profile = Profile {
        id: "p".to_owned(),
        operations: vec![
            operation("models", "GET", "/v1/models"),
            operation("chat_completions", "POST", "/v1/chat/completions"),
            operation("messages", "POST", "/anthropic/v1/messages"),
            operation(
                "count_tokens",
                "POST",
                "/anthropic/v1/messages/count_tokens",
            ),
            operation("responses", "", "/v1/responses"),
        ],
        ..Profile::default()
    };
    let with = Adapter {
        profile: Some(profile),
        ..adapter(port, 4)
    };
    let without = Adapter {
        name: "bare".to_owned(),
        ..adapter(port, 4)
    };
    payload(vec![with, without])
}

/// Proves [R-097], [R-098].
#[tokio::test]
async fn r097_a_named_operation_is_the_profiles_and_an_empty_one_leaves_the_path() {
    let mut world = world_with(profiled).await;
    let request = |operation: &str, path: &str| TunnelRequest {
        operation: operation.to_owned(),
        path: path.to_owned(),
        ..tunnel("r", b"{}")
    };
    for (operation, path, line) in [
        ("models", "/x", "GET /v1/models"),
        ("chat_completions", "/x", "POST /v1/chat/completions"),
        (
            "messages",
            "/v1/chat/completions",
            "POST /anthropic/v1/messages",
        ),
        (
            "count_tokens",
            "",
            "POST /anthropic/v1/messages/count_tokens",
        ),
        ("responses", "/x", "POST /v1/responses"),
        ("", "/v1/embeddings?a=b", "POST /v1/embeddings?a=b"),
        // A query behind the profile's own path is the client's; of any other path nothing counts.
        (
            "messages",
            "/anthropic/v1/messages?beta=true",
            "POST /anthropic/v1/messages?beta=true",
        ),
        ("messages", "/v1/messages?x", "POST /anthropic/v1/messages"),
        (
            "messages",
            "/anthropic/v1/messages/other?x",
            "POST /anthropic/v1/messages",
        ),
        (
            "messages",
            "/anthropic/v1/messages&x",
            "POST /anthropic/v1/messages",
        ),
    ] {
        world.conn.open(request(operation, path)).await;
        let mut call = world.provider.request().await;
        assert_eq!(call.request_line(), format!("{line} HTTP/1.1"));
        call.write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .await;
        assert!(world.conn.answer("r").await.is_complete());
    }
    let unknown = "the adapter's profile does not name this operation";
    let bare = TunnelRequest {
        adapter: "bare".to_owned(),
        ..request("models", "/v1/models")
    };
    for (request, detail) in [
        (request("embeddings", "/v1/embeddings"), unknown),
        (request("Models", "/v1/models"), unknown),
        (bare, unknown),
        (request("", ""), "neither operation nor path"),
        (request("", "v1"), "the path is not an absolute HTTP path"),
    ] {
        world.conn.open(request).await;
        let answer = world.conn.answer("r").await;
        assert_eq!(answer.error(), format!("node rejected: {detail}"));
        assert_eq!(answer.frames, 1);
    }
    assert!(world.provider.is_idle());
}

/// Requests nobody may make, and what is wrong with each.
fn illegal() -> Vec<(TunnelRequest, &'static str)> {
    let lease = || LeaseEnvelope::new("sealed".into()).unwrap();
    let pair = Credential::Managed {
        lease: lease(),
        binding: CredentialBinding::default(),
    };
    let but = |change: &dyn Fn(&mut TunnelRequest)| {
        let mut request = tunnel("r", b"");
        change(&mut request);
        request
    };
    let timed = |seconds| but(&|r| r.timeout = HardTimeout::from_wire(seconds));
    let stalling = |ms| but(&|r| r.stall_timeout = StallTimeout::from_wire(ms));
    let method = |method: &str| but(&|r| r.method = method.to_owned());
    let header = || Header {
        name: "a b".to_owned(),
        value: "c".into(),
    };
    let half = but(&|r| r.credential = Credential::LeaseAlone(lease()));
    vec![
        (timed(-1), "timeout_sec is negative"),
        (timed(i32::MIN), "timeout_sec is negative"),
        (stalling(-1), "response_stall_timeout_ms is negative"),
        (stalling(i64::MIN), "response_stall_timeout_ms is negative"),
        (
            stalling(9_223_372_036_855),
            "response_stall_timeout_ms is too large",
        ),
        (stalling(i64::MAX), "response_stall_timeout_ms is too large"),
        (half, "credential lease and binding come as a pair"),
        (
            but(&|r| r.credential = pair.clone()),
            "this node takes no credential leases",
        ),
        (but(&|r| r.adapter = "b".to_owned()), "unknown adapter"),
        (
            method("CONNECT"),
            "the method is not an HTTP request method",
        ),
        (method(""), "the method is not an HTTP request method"),
        (
            but(&|r| r.headers = vec![header()]),
            "a header is not valid HTTP",
        ),
    ]
}

/// Proves [R-114], [R-115].
#[tokio::test]
async fn r114_what_no_request_may_say_is_one_error_terminal_and_no_call() {
    let mut world = world(4).await;
    for (request, detail) in illegal() {
        world.conn.open(request).await;
        let answer = world.conn.answer("r").await;
        assert_eq!(answer.error(), format!("node rejected: {detail}"));
        assert_eq!((answer.frames, answer.status), (1, None));
    }
    assert!(world.provider.is_idle());
    let most = TunnelRequest {
        stall_timeout: StallTimeout::Millis(NonZeroU64::new(9_223_372_036_854).unwrap()),
        timeout: HardTimeout::Seconds(NonZeroU32::new(i32::MAX.unsigned_abs()).unwrap()),
        ..tunnel("most", b"")
    };
    world.conn.open(most).await;
    world.provider.request().await.answer("200 OK", b"").await;
    assert!(world.conn.answer("most").await.is_complete());
}

/// Proves [R-109].
#[tokio::test]
async fn r109_each_failure_of_a_provider_is_one_error_after_what_had_come() {
    let mut world = world(4).await;
    for (sent, status, body, error) in [
        ("", None, "", "connection lost before a response"),
        (
            "HTTP/1.1 200",
            None,
            "",
            "connection lost before a response",
        ),
        (
            "SSH-2.0-x\r\n\r\n",
            None,
            "",
            "the response is not valid HTTP",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
            None,
            "",
            "the response is not valid HTTP",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
            Some(200),
            "half",
            "connection lost inside the response body",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
            Some(200),
            "half",
            "connection lost inside the response body",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nZZ\r\n",
            Some(200),
            "half",
            "connection lost inside the response body",
        ),
    ] {
        world.conn.open(tunnel("r", b"{}")).await;
        let mut call = world.provider.request().await;
        call.write(sent).await;
        drop(call);
        let answer = world.conn.answer("r").await;
        assert_eq!(
            answer.error(),
            format!("provider unreachable: {error}"),
            "{sent:?}"
        );
        assert_eq!(answer.status, status);
        assert_eq!(answer.body, body.as_bytes());
    }
    world.still_serves().await;
}

#[tokio::test]
async fn a_provider_that_resets_inside_the_body_is_one_error_after_what_had_come() {
    let mut world = world(4).await;
    world.conn.open(tunnel("r", b"{}")).await;
    let mut call = world.provider.request().await;
    call.start_chunked().await;
    call.chunk(b"one").await;
    let start = world.conn.frame().await;
    let body = world.conn.frame().await;
    assert_eq!(
        (start.sequence, body.sequence, &body.body[..]),
        (1, 2, &b"one"[..])
    );
    call.reset();
    let end = world.conn.frame().await;
    assert_eq!(
        end.error,
        "provider unreachable: connection lost inside the response body"
    );
    assert_eq!(end.sequence, 3);
    world.still_serves().await;
}

#[tokio::test]
async fn a_provider_that_is_not_there_says_so() {
    let gone = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut world = world_with(|port| {
        let dead = Adapter {
            name: "dead".to_owned(),
            ..adapter(gone, 1)
        };
        payload(vec![dead, adapter(port, 1)])
    })
    .await;
    for _ in 0..3 {
        let request = TunnelRequest {
            adapter: "dead".to_owned(),
            ..tunnel("r", b"{}")
        };
        world.conn.open(request).await;
        let answer = world.conn.answer("r").await;
        assert_eq!(answer.error(), "provider unreachable: connection refused");
        assert_eq!(answer.frames, 1);
    }
    world.still_serves().await;
}

/// A cancelled call is seen at the provider in less than this.
const ABORT: Duration = Duration::from_millis(250);

/// Proves [R-249], [R-252], [P-03], [P-04].
#[tokio::test]
async fn r249_a_cancel_reaches_the_provider_in_every_window_and_nobody_else() {
    let mut world = world(8).await;
    world.conn.open(tunnel("other", b"{}")).await;
    let mut other = world.provider.request().await;
    other.start_chunked().await;
    other.chunk(b"first").await;
    assert_eq!(
        (
            world.conn.frame().await.sequence,
            world.conn.frame().await.sequence
        ),
        (1, 2)
    );
    for (window, sent, frames) in [
        ("before the head", "", 0),
        ("inside the head", "HTTP/1.1 200 OK\r\nx: ", 0),
        (
            "before the body",
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
            1,
        ),
        (
            "inside the body",
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
            2,
        ),
    ] {
        world.conn.open(tunnel("r", b"{}")).await;
        let mut call = world.provider.request().await;
        call.write(sent).await;
        for sequence in 1..=frames {
            let frame = world.conn.frame().await;
            assert_eq!(
                (frame.run_id.as_str(), frame.sequence),
                ("r", sequence),
                "{window}"
            );
        }
        for stranger in ["nobody", "r9", ""] {
            world.conn.cancel(stranger).await;
        }
        world.conn.cancel("r").await;
        world.conn.cancel("r").await;
        let waited = call.gone().await;
        assert!(waited < ABORT, "{window}: {waited:?}");
        let end = world.conn.frame().await;
        assert_eq!(
            (end.error.as_str(), end.sequence),
            ("cancelled", frames + 1),
            "{window}"
        );
    }
    world.conn.cancel("r").await; // finished long ago: no effect, no frame
    other.chunk(b"second").await;
    other.end_chunked().await;
    let rest = world.conn.frame().await;
    assert_eq!(
        (rest.run_id.as_str(), rest.sequence, &rest.body[..]),
        ("other", 3, &b"second"[..])
    );
    assert_eq!(world.conn.frame().await.sequence, 4);
}

/// Proves [R-250].
#[tokio::test]
async fn r250_a_cancel_at_any_point_of_a_stream_leaves_one_ordered_answer() {
    let mut world = world(1).await;
    let mut dice = Dice::new(250);
    for round in 0..200 {
        let run_id = format!("r{round}");
        world.conn.open(tunnel(&run_id, b"{}")).await;
        let mut call = world.provider.request().await;
        let chunks = dice.below(6);
        call.start_chunked().await;
        for _ in 0..chunks {
            let length = 1 + dice.below(2_000);
            call.chunk(&dice.bytes(length)).await;
        }
        let ends = dice.below(4) == 0;
        if ends {
            call.end_chunked().await;
        }
        for _ in 0..dice.below(3) {
            tokio::task::yield_now().await;
        }
        world.conn.cancel(&run_id).await;
        let answer = world.conn.answer(&run_id).await;
        assert!(
            answer.is_complete() && ends || answer.error() == "cancelled",
            "round {round}"
        );
    }
}

#[tokio::test]
async fn a_hard_deadline_ends_the_call_in_its_own_words() {
    let mut world = world(1).await;
    let timed = |run: &str| TunnelRequest {
        timeout: HardTimeout::Seconds(NonZeroU32::MIN),
        ..tunnel(run, b"{}")
    };
    let begun = Instant::now();
    world.conn.open(timed("r")).await;
    world.conn.open(timed("waits")).await;
    let mut call = world.provider.request().await;
    call.start_chunked().await;
    assert_eq!(world.conn.frame().await.run_id, "r");
    let mut ends = [world.conn.frame().await, world.conn.frame().await];
    ends.sort_by(|one, two| one.run_id.cmp(&two.run_id));
    assert!(
        (1.0..2.0).contains(&begun.elapsed().as_secs_f64()),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(
        (ends[0].error.as_str(), ends[0].sequence),
        ("deadline exceeded", 2)
    );
    assert_eq!(
        (ends[1].error.as_str(), ends[1].sequence),
        ("deadline exceeded", 1)
    );
    assert!(ends.iter().all(|end| end.failure.is_none()));
    call.gone().await;
    world.still_serves().await;
}

#[tokio::test]
async fn a_run_id_in_use_is_dropped_and_free_again_after_its_terminal() {
    let mut world = world(4).await;
    world.conn.open(tunnel("r", b"one")).await;
    let mut call = world.provider.request().await;
    world.conn.open(tunnel("r", b"two")).await;
    let unknown = TunnelRequest {
        adapter: "nobody".to_owned(),
        ..tunnel("r", b"three")
    };
    world.conn.open(unknown).await;
    call.answer("200 OK", b"first").await;
    let answer = world.conn.answer("r").await;
    assert!(answer.is_complete() && answer.body == b"first");
    assert!(world.provider.is_idle(), "the second was never executed");
    world.conn.open(tunnel("r", b"four")).await;
    call.read_request().await;
    assert_eq!(call.body, b"four");
    call.answer("200 OK", b"second").await;
    assert_eq!(world.conn.answer("r").await.body, b"second");
}

/// Proves [R-241], [R-243].
#[tokio::test]
async fn r241_concurrency_gates_nothing_and_each_adapter_admits_its_capacity_in_order() {
    let (one, two) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let second = Adapter {
        name: "b".to_owned(),
        ..adapter(two.port(), 3)
    };
    let adapters = vec![adapter(one.port(), 2), second];
    let mut conn = edge
        .ready(NodeConfig {
            adapters,
            concurrency: 1,
        })
        .await;
    for n in 0..5 {
        conn.open(tunnel(&format!("a{n}"), format!("a{n}").as_bytes()))
            .await;
    }
    for n in 0..3 {
        let request = TunnelRequest {
            adapter: "b".to_owned(),
            ..tunnel(&format!("b{n}"), b"")
        };
        conn.open(request).await;
    }
    let mut held = vec![one.request().await, one.request().await];
    let mut three = [
        two.request().await,
        two.request().await,
        two.request().await,
    ];
    assert!(one.is_idle(), "two of five are admitted");
    let mut admitted: Vec<_> = held.iter().map(|call| call.body.clone()).collect();
    admitted.sort();
    assert_eq!(admitted, [b"a0", b"a1"]);
    conn.cancel("a3").await;
    let cancelled = conn.answer("a3").await;
    assert_eq!((cancelled.error(), cancelled.frames), ("cancelled", 1));
    // Whoever is next gets the slot: a2, then a4; a3 left the queue.
    for expected in ["a2", "a4"] {
        let mut first = held.remove(0);
        let run_id = String::from_utf8(first.body.clone()).unwrap();
        first
            .write("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .await;
        assert!(conn.answer(&run_id).await.is_complete());
        let next = one.request().await;
        assert_eq!(next.body, expected.as_bytes());
        held.push(next);
    }
    for (n, call) in three.iter_mut().enumerate() {
        assert!(call.request_line().starts_with("POST"));
        call.answer("200 OK", n.to_string().as_bytes()).await;
    }
}

/// Proves [D-20], [P-42].
#[tokio::test]
async fn d20_a_reused_connection_found_dead_is_retried_once_and_a_fresh_one_never() {
    let mut world = world(4).await;
    world.conn.open(tunnel("r1", b"one")).await;
    let mut call = world.provider.request().await;
    call.answer("200 OK", b"1").await;
    assert!(world.conn.answer("r1").await.is_complete());
    // The idle connection takes the next request and dies without a byte of a response.
    world.conn.open(tunnel("r2", b"two")).await;
    call.read_request().await;
    assert_eq!(call.body, b"two");
    drop(call);
    let mut again = world.provider.request().await;
    assert_eq!(
        again.body, b"two",
        "the same request, on a connection of its own"
    );
    again.answer("200 OK", b"2").await;
    assert_eq!(world.conn.answer("r2").await.body, b"2");
    // Bytes of a response end the matter, reused or not.
    world.conn.open(tunnel("r3", b"three")).await;
    again.read_request().await;
    again
        .write("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n1")
        .await;
    drop(again);
    let broken = "provider unreachable: connection lost inside the response body";
    assert_eq!(world.conn.answer("r3").await.error(), broken);
    // A fresh connection that dies is the provider's failure.
    world.conn.open(tunnel("r4", b"four")).await;
    drop(world.provider.request().await);
    let lost = "provider unreachable: connection lost before a response";
    assert_eq!(world.conn.answer("r4").await.error(), lost);
    assert!(world.provider.is_idle(), "no second request");
    world.still_serves().await;
}

/// Proves [D-21], [P-08].
#[tokio::test]
async fn d21_drain_reads_a_cancelled_call_to_its_end_and_keeps_its_slot_until_then() {
    let mut world = world_with(|port| {
        let options = AdapterOptions {
            on_cancel: OnCancel::Drain,
            ..AdapterOptions::default()
        };
        payload(vec![Adapter {
            options,
            ..adapter(port, 1)
        }])
    })
    .await;
    world.conn.open(tunnel("r", b"{}")).await;
    let mut call = world.provider.request().await;
    call.start_chunked().await;
    call.chunk(b"one").await;
    assert_eq!(
        (
            world.conn.frame().await.sequence,
            world.conn.frame().await.sequence
        ),
        (1, 2)
    );
    world.conn.cancel("r").await;
    world.conn.open(tunnel("next", b"next")).await;
    let piece = vec![b'x'; 64 * 1024];
    // The provider writes on undisturbed, far more than any buffer on the way holds.
    for _ in 0..64 {
        call.chunk(&piece).await;
    }
    assert!(world.provider.is_idle(), "the slot is still held");
    call.end_chunked().await;
    let end = world.conn.frame().await;
    assert_eq!((end.error.as_str(), end.sequence), ("cancelled", 3));
    call.read_request().await;
    assert_eq!(
        call.body, b"next",
        "now the slot is free, and the connection whole"
    );
    call.answer("200 OK", b"ok").await;
    assert!(world.conn.answer("next").await.is_complete());
}

#[tokio::test]
async fn a_drained_call_that_does_not_end_delays_the_terminal_by_the_grace_and_stays_retained() {
    let mut world = world_with(|port| {
        let options = AdapterOptions {
            on_cancel: OnCancel::Drain,
            ..AdapterOptions::default()
        };
        payload(vec![Adapter {
            options,
            ..adapter(port, 1)
        }])
    })
    .await;
    world.conn.open(tunnel("r", b"{}")).await;
    let mut call = world.provider.request().await;
    let begun = Instant::now();
    world.conn.cancel("r").await;
    let end = world.conn.frame().await;
    let waited = begun.elapsed().as_secs_f64();
    assert_eq!((end.error.as_str(), end.sequence), ("cancelled", 1));
    assert!((5.0..6.0).contains(&waited), "{waited}");
    world.conn.open(tunnel("r", b"again")).await;
    let refused = world.conn.answer("r").await;
    assert_eq!(refused.error(), "node rejected: the run id is still in use");
    world.conn.open(tunnel("next", b"next")).await;
    assert!(world.provider.is_idle());
    call.answer("200 OK", b"late").await;
    let next = async {
        call.read_request().await;
        call.answer("200 OK", b"ok").await;
    };
    within("the next call", next).await;
    assert_eq!(world.conn.answer("next").await.body, b"ok");
    world.conn.open(tunnel("r", b"{}")).await;
    call.read_request().await;
    call.answer("200 OK", b"free again").await;
    assert_eq!(world.conn.answer("r").await.body, b"free again");
}
