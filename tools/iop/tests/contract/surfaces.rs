//! Each surface's own: its errors whole and within a stream, its client's headers and key, and the
//! share of a provider that counting tokens may take.
use iop_proto::catalog::Operation;
use iop_proto::domain::Message;
use iop_proto::reason::Reason;
use serde_json::{Value, json};

use crate::kit::{
    Kill, Run, SSE, World, answer, catalog, catalog_with, expect_abort, expect_cancel,
    expect_error, expect_nothing,
};
use crate::support::{Client, Head, Node, chat, post};

/// The one key that `KEYS` lets in, and the SHA-256 it is known by.
const KEY: &str = "marker-key";
const KEYS: &str = "keys:\n  - principal: alice\n    \
    sha256: 024a24260d62a255838b8c6c1d3a711982c02d45835ff0160faff1c935a68301\n";

/// A path, and the shape its client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    OpenAi,
    Responses,
    Anthropic,
}

const SURFACES: [(&str, Shape); 6] = [
    ("/v1/chat/completions", Shape::OpenAi),
    ("/v1/completions", Shape::OpenAi),
    ("/v1/embeddings", Shape::OpenAi),
    ("/v1/responses", Shape::Responses),
    ("/v1/messages?beta=true", Shape::Anthropic),
    ("/v1/messages/count_tokens", Shape::Anthropic),
];

impl Shape {
    /// The whole error object for `reason`; `kinds`: its type in OpenAI's words and in Anthropic's.
    fn object(self, reason: Reason, kinds: [&str; 2], request_id: &str) -> Value {
        let message = reason.text();
        let model = matches!(reason, Reason::ModelUnknown | Reason::ModelMissing);
        let param = if model { json!("model") } else { Value::Null };
        let code = reason.label();
        match self {
            Self::OpenAi | Self::Responses => json!({
                "error": {"message": message, "type": kinds[0], "param": param, "code": code},
            }),
            Self::Anthropic => json!({
                "type": "error", "error": {"type": kinds[1], "message": message},
                "request_id": request_id,
            }),
        }
    }

    /// The event that ends a stream for `reason`.
    fn event(self, reason: Reason, kinds: [&str; 2], request_id: &str) -> (&'static str, Value) {
        let mut object = self.object(reason, kinds, request_id);
        if self == Self::Responses {
            for name in ["message", "param", "code"] {
                object[name] = object["error"][name].clone();
            }
            object["type"] = json!("error");
        }
        let named = self != Self::OpenAi;
        (
            if named {
                "event: error\ndata: "
            } else {
                "data: "
            },
            object,
        )
    }

    /// The answer is the Edge's refusal for `reason`, to the last field.
    fn refused(self, client: &mut Client, reason: Reason, kinds: [&str; 2]) -> Head {
        let (head, body, whole) = answer(client);
        let text = String::from_utf8_lossy(&body).into_owned();
        assert!(whole, "{text}");
        assert_eq!(head.status, reason.status(), "{text}");
        assert_eq!(head.header("content-type"), Some("application/json"));
        let id = head.header("x-request-id").expect("an id");
        let body: Value = serde_json::from_slice(&body).expect("an error object");
        assert_eq!(body, self.object(reason, kinds, id), "{self:?}");
        head
    }
}

/// A request with these header lines, each with its line end.
fn with_headers(method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: edge\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
}

const CLIENT: [&str; 2] = ["invalid_request_error", "invalid_request_error"];
const MODEL: &str = "{\"model\":\"only1\"}";

/// Proves [D-09].
#[test]
fn d09_what_is_refused_before_the_body_is_known_has_the_shape_of_its_surface() {
    let tail = format!("{KEYS}limits:\n  body_bytes_max: 1024\n");
    let world = World::new(&catalog([1, 1], &tail));
    let key = format!("x-api-key: {KEY}\r\n");
    let long = format!("{key}content-length: 1025\r\n");
    let chunked = format!("{key}transfer-encoding: chunked\r\n");
    for (path, shape) in SURFACES {
        let ask = |text: &str| world.asks(text);
        let head = shape.refused(
            &mut ask(&with_headers("POST", path, "x-api-key: wrong\r\n", MODEL)),
            Reason::KeyMissing,
            ["authentication_error", "authentication_error"],
        );
        assert_eq!(head.header("x-iop-error-source"), Some("edge"));
        let head = shape.refused(
            &mut ask(&with_headers("GET", path, &key, "")),
            Reason::MethodNotAllowed,
            CLIENT,
        );
        assert_eq!(head.header("allow"), Some("POST, OPTIONS"));
        let below = path.split('?').next().expect("a path");
        shape.refused(
            &mut ask(&with_headers("POST", &format!("{below}/x"), &key, MODEL)),
            Reason::RouteUnknown,
            ["invalid_request_error", "not_found_error"],
        );
        shape.refused(
            &mut ask(&format!("POST {path} HTTP/1.1\r\nhost: edge\r\n{long}\r\n")),
            Reason::BodyTooLarge,
            ["invalid_request_error", "request_too_large"],
        );
        shape.refused(
            &mut ask(&format!("POST {path} HTTP/1.1\r\nhost: edge\r\n{key}\r\n")),
            Reason::LengthMissing,
            CLIENT,
        );
        shape.refused(
            &mut ask(&format!(
                "POST {path} HTTP/1.1\r\nhost: edge\r\n{chunked}\r\nnone\r\n"
            )),
            Reason::ChunkMalformed,
            CLIENT,
        );
        for (body, reason, kinds) in [
            ("[]", Reason::JsonMalformed, CLIENT),
            ("{}", Reason::ModelMissing, CLIENT),
            (
                "{\"model\":\"m9\"}",
                Reason::ModelUnknown,
                ["invalid_request_error", "not_found_error"],
            ),
        ] {
            shape.refused(
                &mut ask(&with_headers("POST", path, &key, body)),
                reason,
                kinds,
            );
        }
    }
    drop(world.node("n1"));
    world.rest();
}

/// Proves [D-11].
#[test]
fn d11_what_control_refuses_has_the_shape_of_its_surface() {
    let tail = "limits:\n  queue_waiters_max: 1\ntimeouts:\n  queue_wait_ms: 400\n";
    let provider = "        operations: [chat_completions]\n";
    let overloaded = ["server_error", "overloaded_error"];
    let world = World::new(&catalog([1, 1], tail));
    for (path, shape) in SURFACES {
        // Nobody is connected: one waits in vain, the next finds the queue full.
        let mut waits = world.asks(&post(path, MODEL));
        world.wait_queued(1);
        let mut next = world.asks(&post(path, MODEL));
        let limit = ["rate_limit_error", "rate_limit_error"];
        let head = shape.refused(&mut next, Reason::QueueFull, limit);
        assert!(head.header("retry-after").is_some());
        let head = shape.refused(&mut waits, Reason::QueueTimeout, overloaded);
        assert!(head.header("retry-after").is_some());
        world.wait_queued(0);
    }
    world.rest();
    let world = World::new(&catalog_with([1, 1], provider, ""));
    for (path, shape) in &SURFACES[1..] {
        let mut client = world.asks(&post(path, MODEL));
        shape.refused(&mut client, Reason::NoProviderConfigured, overloaded);
    }
    world.rest();
}

/// Proves [D-11].
#[test]
fn d11_a_draining_edge_refuses_in_the_shape_of_each_surface() {
    let mut world = World::one_shard(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let mut kept = SURFACES.map(|_| world.client());
    for client in &mut kept {
        assert_eq!(
            client
                .ask("GET /readyz HTTP/1.1\r\nhost: edge\r\n\r\n")
                .0
                .status,
            200
        );
    }
    let mut running = world.asks(&chat("only1", false));
    let run = Run::asked(&mut node);
    world.edge.terminate();
    assert!(matches!(node.receive(), Message::GoAway(_)));
    for ((path, shape), client) in SURFACES.into_iter().zip(&mut kept) {
        client.send(&post(path, MODEL));
        let kinds = ["server_error", "overloaded_error"];
        let head = shape.refused(client, Reason::Draining, kinds);
        assert!(head.header("retry-after").is_some());
    }
    run.answers(&mut node, &mut running);
    drop((kept, running));
    assert!(world.edge.wait_exit().success());
}

/// Proves [D-10].
#[test]
fn d10_a_stream_that_fails_ends_with_one_error_event_of_its_surface() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let before = b"event: first\ndata: {\"n\":1}\n\n";
    for (path, shape) in SURFACES {
        let text = "{\"model\":\"only1\",\"stream\":true}";
        // Told by its node.
        let mut client = world.asks(&post(path, text));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        run.body(&mut node, before);
        let head = client.head().expect("an answer");
        run.error(&mut node, "provider unreachable");
        let kinds = ["server_error", "api_error"];
        expect_last_event(
            &mut client,
            &head,
            before,
            shape,
            Reason::ProviderUnreachable,
            kinds,
        );
        // Within an event, which it ends.
        let mut client = world.asks(&post(path, text));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        run.body(&mut node, b"event: first\ndata: {\"n\"");
        let head = client.head().expect("an answer");
        run.error(&mut node, "deadline exceeded");
        let kinds = ["server_error", "timeout_error"];
        let cut = b"event: first\ndata: {\"n\"";
        expect_last_event(
            &mut client,
            &head,
            cut,
            shape,
            Reason::DeadlineExceeded,
            kinds,
        );
        // Before its head it is an answer of ours, and whole.
        let mut client = world.asks(&post(path, text));
        Run::asked(&mut node).error(&mut node, "draining");
        let kinds = ["server_error", "overloaded_error"];
        shape.refused(&mut client, Reason::NodeDraining, kinds);
        // What is no stream of events is broken off.
        let mut client = world.asks(&post(path, MODEL));
        let mut run = Run::asked(&mut node);
        run.start(&mut node, 200, &[("content-type", "application/json")]);
        run.body(&mut node, b"{\"type\":");
        let head = client.head().expect("an answer");
        run.error(&mut node, "provider unreachable");
        expect_abort(&mut client, &head, b"{\"type\":");
    }
    drop(node);
    world.rest();
}

/// What is left of the answer is `before` and one error event, and then it ends.
fn expect_last_event(
    client: &mut Client,
    head: &Head,
    before: &[u8],
    shape: Shape,
    reason: Reason,
    kinds: [&str; 2],
) {
    let (body, whole) = client.body(head);
    assert!(whole, "the chunks come to their end");
    let id = head.header("x-request-id").expect("an id");
    let (lead, object) = shape.event(reason, kinds, id);
    let text = String::from_utf8_lossy(&body);
    let rest = body
        .strip_prefix(before)
        .unwrap_or_else(|| panic!("{text}"));
    let rest = str::from_utf8(rest).expect("text of ours");
    let event = rest
        .strip_prefix("\n\n")
        .and_then(|rest| rest.strip_prefix(lead));
    let event = event.unwrap_or_else(|| panic!("{shape:?}: {text}"));
    let data = event.strip_suffix("\n\n").expect("a whole event");
    let data: Value = serde_json::from_str(data).expect("one event, one object");
    assert_eq!(data, object);
}

/// Proves [D-13], [D-12].
#[test]
fn d13_an_anthropic_clients_headers_go_on_and_its_key_does_not() {
    let world = World::new(&catalog([4, 4], KEYS));
    let mut node = world.node("n1");
    let body = ["{\"max_tokens\" : 5, \"model\":", ",\"stream\":true}"];
    let headers = format!(
        "X-Api-Key: {KEY}\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a-1\r\n\
         Anthropic-Beta: b-2\r\nanthropic-dangerous-direct-browser-access: true\r\n\
         x-stainless-lang: python\r\nx-request-id: mine\r\n"
    );
    for path in [
        "/v1/messages?beta=true",
        "/v1/messages/count_tokens",
        "/v1/responses?a='b'",
    ] {
        let mut client = world.asks(&with_headers(
            "POST",
            path,
            &headers,
            &body.join("\"only1\""),
        ));
        let request = node.tunnel();
        assert_eq!(request.path, path);
        assert_eq!(request.body, body.join("\"t1\""));
        assert!(request.stream);
        let seen: Vec<_> = request
            .headers
            .iter()
            .map(|header| (header.name.to_ascii_lowercase(), header.value.to_vec()))
            .collect();
        let expected = [
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a-1"),
            ("anthropic-beta", "b-2"),
            ("anthropic-dangerous-direct-browser-access", "true"),
            ("x-stainless-lang", "python"),
            ("x-request-id", "mine"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()));
        assert_eq!(seen, expected);
        // What the provider says passes as it is.
        let mut run = Run::of(&request);
        let named = [
            SSE[0],
            ("request-id", "req_theirs"),
            ("anthropic-ratelimit-x", "1"),
        ];
        run.start(&mut node, 200, &named);
        let event = b"event: message_start\ndata: {\"type\":\"message_start\" }\n\n\xff";
        run.body(&mut node, event);
        run.end(&mut node);
        let (head, answered, whole) = answer(&mut client);
        assert!(whole && answered == event);
        assert_eq!(head.header("request-id"), Some("req_theirs"));
        assert_eq!(head.header("anthropic-ratelimit-x"), Some("1"));
        assert_eq!(head.header("x-request-id"), Some("mine"));
    }
    drop(node);
    world.rest();
}

/// A client that leaves is told to the node at once, whatever it asked for. `[D-27]`
#[test]
fn a_client_that_leaves_is_cancelled_on_every_surface() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    for (row, (path, _)) in SURFACES.into_iter().enumerate() {
        let mut client = world.asks(&post(path, "{\"model\":\"only1\",\"stream\":true}"));
        let mut run = Run::asked(&mut node);
        if row % 2 == 0 {
            run.sse(&mut node);
            assert_eq!(client.head().expect("an answer").status, 200);
        }
        Kill::ALL[row % 3].client(client);
        expect_cancel(&mut node, &run);
        run.error(&mut node, "cancelled");
        world.wait_held(0);
        world.serves(&mut node, "only1");
    }
    drop(node);
    world.rest();
}

/// Proves [P-59], [D-17].
#[test]
fn p59_a_storm_of_count_tokens_is_served_and_takes_a_quarter_of_the_provider() {
    let world = World::new(&catalog([8, 1], ""));
    let mut node = world.node("n1");
    let count = post(Operation::CountTokens.path(), MODEL);
    let mut counting: Vec<_> = (0..50).map(|_| world.asks(&count)).collect();
    let mut runs: Vec<_> = (0..2).map(|_| Run::asked(&mut node)).collect();
    world.wait_queued(48);
    expect_nothing(&mut node);
    // Three quarters are there at once for whoever comes now.
    let generating: Vec<_> = (0..6).map(|_| world.asks(&chat("only1", false))).collect();
    let mut generated: Vec<_> = (0..6).map(|_| Run::asked(&mut node)).collect();
    world.wait_queued(48);
    world.wait_held(8);
    for row in 0..50 {
        count_one(&mut node, runs.remove(0));
        if row < 48 {
            let request = node.tunnel();
            assert_eq!(request.path, Operation::CountTokens.path());
            runs.push(Run::of(&request));
        }
    }
    expect_nothing(&mut node);
    for client in &mut counting {
        let (head, body, whole) = answer(client);
        assert_eq!((head.status, whole), (200, true));
        assert_eq!(body, b"{\"input_tokens\":3}");
    }
    for run in &mut generated {
        run.error(&mut node, "node rejected");
    }
    world.wait_held(0);
    drop((node, counting, generating));
    world.rest();
}

fn count_one(node: &mut Node, mut run: Run) {
    run.start(node, 200, &[("content-length", "18")]);
    run.body(node, b"{\"input_tokens\":3}");
    run.end(node);
}

/// Proves [D-17].
#[test]
fn d17_count_tokens_never_delays_an_older_request_of_another_kind() {
    let world = World::new(&catalog([4, 1], ""));
    let mut node = world.node("n1");
    let running: Vec<_> = (0..4).map(|_| world.asks(&chat("only1", false))).collect();
    let mut runs: Vec<_> = (0..4).map(|_| Run::asked(&mut node)).collect();
    let count = post(Operation::CountTokens.path(), MODEL);
    let mut waiting = vec![world.asks(&chat("only1", false))];
    world.wait_queued(1);
    for queued in 2..4 {
        waiting.push(world.asks(&count));
        world.wait_queued(queued);
    }
    waiting.push(world.asks(&chat("only1", false)));
    world.wait_queued(4);
    // The oldest first; then one that counts; the other one is over its share and lets the chat by.
    let order = [
        "/v1/chat/completions",
        "/v1/messages/count_tokens",
        "/v1/chat/completions",
    ];
    for path in order {
        runs.remove(0).error(&mut node, "node rejected");
        let request = node.tunnel();
        assert_eq!(request.path, path);
        expect_nothing(&mut node);
        runs.push(Run::of(&request));
    }
    world.wait_queued(1);
    runs.remove(0).error(&mut node, "node rejected"); // a chat's slot is none for it
    world.wait_held(3);
    expect_nothing(&mut node);
    runs.remove(1).error(&mut node, "node rejected");
    assert_eq!(node.tunnel().path, "/v1/messages/count_tokens");
    drop((node, running, waiting));
    world.rest();
}

/// The Edge offers no CORS: a preflight is answered without a word of it, before any key is asked
/// for, and reaches nobody. Proves [P-56].
#[test]
fn p56_a_preflight_is_answered_without_cors_and_never_dispatched() {
    let world = World::new(&catalog([1, 1], KEYS));
    let mut node = world.node("n1");
    for (path, _) in SURFACES {
        let mut client = world.asks(&format!(
            "OPTIONS {path} HTTP/1.1\r\nhost: edge\r\norigin: https://page.example\r\n\
             access-control-request-method: POST\r\n\r\n"
        ));
        let head = client.head().expect("an answer");
        assert_eq!(head.status, 204);
        assert_eq!(head.header("allow"), Some("POST, OPTIONS"));
        let cors = |(name, _): &&(String, String)| name.starts_with("access-control");
        assert_eq!(head.headers.iter().find(cors), None);
    }
    expect_nothing(&mut node);
    let key = format!("authorization: Bearer {KEY}\r\n");
    let mut client = world.asks(&with_headers("POST", "/v1/messages", &key, MODEL));
    Run::asked(&mut node).error(&mut node, "provider unreachable");
    expect_error(&mut client, 502, "provider_unreachable", "provider");
    drop((node, client));
    world.rest();
}

/// The list of models is the Edge's own: with nobody connected it is whole, and at once.
/// Proves [P-58].
#[test]
fn p58_models_are_listed_whole_with_no_node_connected() {
    let world = World::new(&catalog([1, 1], ""));
    let listed = |world: &World| {
        let mut client = world.client();
        let (head, body) = client.ask("GET /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n");
        assert_eq!(head.status, 200);
        let body: Value = serde_json::from_slice(&body).expect("an object");
        let entries = body["data"].as_array().expect("a list").iter();
        entries.map(|entry| entry["id"].clone()).collect::<Vec<_>>()
    };
    let all = ["m1", "only1", "only2"].map(Value::from);
    let mut quickest = std::time::Duration::MAX;
    for _ in 0..10 {
        let began = std::time::Instant::now();
        assert_eq!(listed(&world), all);
        quickest = quickest.min(began.elapsed());
    }
    assert!(
        quickest < std::time::Duration::from_millis(5),
        "{quickest:?}"
    );
    // One that hangs makes no difference.
    let mut node = world.node("n1");
    let client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    assert_eq!(listed(&world), all);
    run.error(&mut node, "node rejected");
    world.wait_held(0);
    drop((node, client));
    world.rest();
}

/// Realtime is not offered: a WebSocket is refused at once, in words, and its connection serves on.
/// Proves [P-64].
#[test]
fn p64_a_websocket_is_refused_and_its_connection_serves_on() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                   sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let mut client = world.client();
    client.send(&format!(
        "GET /v1/realtime?model=only1 HTTP/1.1\r\nhost: edge\r\n{upgrade}\r\n"
    ));
    let head = expect_error(&mut client, 404, "route_unknown", "edge");
    assert_eq!(head.header("upgrade"), None);
    client.send(&chat("only1", false));
    Run::asked(&mut node).answers(&mut node, &mut client);
    drop((node, client));
    world.rest();
}
