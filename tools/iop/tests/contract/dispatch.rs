//! Who is chosen, who waits, in which order, for how long; and the request as its node sees it.
use core::num::{NonZeroU32, NonZeroU64};

use iop_proto::domain::{Credential, HardTimeout, Message, RegisterResponse, StallTimeout};

use crate::disconnect::{number, numbered};
use crate::kit::{
    Kill, Run, World, catalog, expect_accepted, expect_error, expect_nothing, expect_ready,
    pending, ready, register,
};
use crate::support::{Client, Edge, Node, Setup, chat, post};

/// Everything a request may carry that must not reach a provider, and what must.
const HEAD: &str = "POST /v1/chat/completions?trace=1 HTTP/1.1\r\nHost: edge\r\n\
    Content-Type: application/json; charset=utf-8\r\nAuthorization: Bearer marker-1\r\n\
    X-Api-Key: marker-2\r\napi-key: marker-3\r\nProxy-Authorization: Basic marker-4\r\n\
    Cookie: session=marker-5\r\nConnection: keep-alive, x-hop\r\nKeep-Alive: timeout=5\r\n\
    X-Hop: marker-6\r\nTE: trailers\r\nUpgrade: h2c\r\nAccept-Encoding: gzip, br\r\n\
    X-Request-Id: the-clients-own.1\r\nX-Custom: one\r\nx-custom: two\r\n\
    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
/// What a re-serialiser would change: space, order, numbers, escapes, a nested key of the same
/// name.
const BODY: [&str; 2] = [
    "{ \"z\" : 1e400 ,\n\t\"n\":{\"model\":\"only1\"},\"model\" : ",
    " ,\"a\":12345678901234567890,\"s\":\"\\u0041\\/\u{e9}\u{1f600}\", \"stream\" :true, \
     \"z\":-0.0 }",
];

/// Proves [R-085], [R-093], [R-102], [R-233], [D-12], [D-13].
#[test]
fn d13_the_node_sees_the_request_with_its_model_spliced_and_its_secrets_gone() {
    let provider = "        stall_timeout_ms: 1234\n        timeout_sec: 7\n";
    let text = crate::kit::catalog_with([4, 4], provider, "")
        .replace("target: t1", "target: 'vendor/\"t\"-1'");
    let world = World::new(&text);
    let mut node = world.node("n1");
    let body = BODY.join("\"only1\"");
    let head = format!("{HEAD}Content-Length: {}\r\n\r\n", body.len());
    let mut client = world.asks(&(head + &body));
    let request = node.tunnel();
    assert_eq!(
        (request.adapter.as_str(), request.target.as_str()),
        ("a1", "vendor/\"t\"-1")
    );
    assert_eq!(
        (request.method.as_str(), request.path.as_str()),
        ("POST", "/v1/chat/completions?trace=1")
    );
    assert_eq!(request.operation, "", "the adapter's profile names none");
    assert!(request.stream);
    assert_eq!(
        request.timeout,
        HardTimeout::Seconds(NonZeroU32::new(7).expect("7"))
    );
    let stall = NonZeroU64::new(1_234).expect("1234");
    assert_eq!(request.stall_timeout, StallTimeout::Millis(stall));
    assert!(request.metadata.is_empty() && request.session_id.is_empty());
    assert_eq!(request.credential, Credential::None);
    assert_eq!(request.run_id.len(), 32);
    assert!(
        request
            .run_id
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    );

    let expected = BODY.join("\"vendor/\\\"t\\\"-1\"");
    assert_eq!(String::from_utf8_lossy(&request.body), expected);
    let headers: Vec<_> = request
        .headers
        .iter()
        .map(|header| (header.name.to_ascii_lowercase(), header.value.to_vec()))
        .collect();
    let expected = [
        ("content-type", "application/json; charset=utf-8"),
        ("accept-encoding", "gzip, br"),
        ("x-custom", "one"),
        ("x-custom", "two"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("x-request-id", "the-clients-own.1"),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
        .collect();
    assert_eq!(headers, expected);

    let mut run = Run::of(&request);
    run.start(
        &mut node,
        200,
        &[("content-length", "0"), ("x-request-id", "the-providers")],
    );
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(head.all("x-request-id"), ["the-clients-own.1"]);
    drop((node, client));
    world.rest();
}

/// A caller's own words move nothing, and what a provider does not say, its neighbour does not say for
/// it: the node's default holds. Proves [R-117], [R-155].
#[test]
fn r155_a_request_carries_the_stall_timeout_of_its_provider_and_of_nobody_else() {
    let provider = "- id: p1\n        stall_timeout_ms: 1000\n";
    let world = World::new(&catalog([4, 4], "").replace("- id: p1\n", provider));
    let (mut one, mut two) = (world.node("n1"), world.node("n2"));
    for (model, node, expected) in [
        ("only1", &mut one, StallTimeout::from_wire(1_000)),
        ("only2", &mut two, StallTimeout::Default),
    ] {
        let text = format!(
            "{{\"model\":\"{model}\",\"response_stall_timeout_ms\":1,\
             \"metadata\":{{\"response_stall_timeout_ms\":\"1\"}}}}"
        );
        let own = "\r\nresponse-stall-timeout-ms: 1\r\nx-stall-timeout: 1\r\n\r\n";
        let request = post("/v1/chat/completions", &text).replacen("\r\n\r\n", own, 1);
        let mut client = world.asks(&request);
        let asked = node.tunnel();
        assert_eq!(asked.stall_timeout, expected);
        Run::of(&asked).error(node, "node rejected");
        expect_error(&mut client, 502, "node_rejected", "node");
    }
    assert_eq!(StallTimeout::from_wire(0), StallTimeout::Default, "absent");
    drop((one, two));
    world.rest();
}

/// Sixteen at once, over three shards, for one place: the node never has two.
/// Proves [P-17].
#[test]
fn p17_a_provider_has_its_capacity_once_and_not_once_a_shard() {
    let text = format!("shards: 3\n{}", crate::support::CATALOG.replace("64", "1"));
    let edge = Edge::start(&Setup::with(&text));
    let mut node = Node::ready(&edge, "n1");
    let mut clients: Vec<_> = (0..16).map(|_| Client::connect(&edge)).collect();
    edge.wait_metrics("the clients", |seen| seen.get("iop_edge_clients") == 16.0);
    for client in &mut clients {
        client.send(&chat("m1", false));
    }
    edge.wait_metrics("all of them", |seen| {
        seen.get("iop_edge_submits_total") == 16.0
    });
    for _ in 0..16 {
        let mut run = Run::asked(&mut node);
        expect_nothing(&mut node);
        run.start(&mut node, 204, &[]);
        run.end(&mut node);
    }
    for client in &mut clients {
        assert_eq!(client.head().expect("an answer").status, 204);
    }
    drop((node, clients));
    edge.wait_idle();
}

const PROFILED: &str = "nodes:
  - id: n1
    adapters:
      - name: with
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
        profile:
          id: named
          operations: [chat_completions, responses, messages, count_tokens]
      - name: mapped
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
        profile:
          id: mapped
          operations:
            - name: chat_completions
              method: PUT
              path: /v2/chat
            - name: messages
              path: /anthropic/v1/messages?v=1
            - count_tokens
      - name: without
        type: vllm
        base_url: \"http://127.0.0.1:9\"
    providers:
      - id: p1
        adapter: with
        target: t1
        capacity: 4
      - id: p2
        adapter: without
        target: t2
        capacity: 4
        operations: [chat_completions, completions]
      - id: p3
        adapter: mapped
        target: t3
        capacity: 4
      - id: p4
        adapter: without
        target: t4
        capacity: 4
models:
  - name: bare
    providers: [p4]
  - name: mapped
    providers: [p3]
  - name: profiled
    providers: [p1]
  - name: plain
    providers: [p2]
";

/// Proves [R-097], [R-099], [D-09], [D-62].
#[test]
fn d62_an_operation_travels_by_name_only_if_the_profile_names_it_and_always_by_path() {
    let world = World::new(PROFILED);
    let mut node = world.node("n1");
    let chat = "/v1/chat/completions";
    let (text, vectors) = ("/v1/completions", "/v1/embeddings");
    let (answers, messages) = ("/v1/responses", "/v1/messages");
    let (beta, count) = ("/v1/messages?beta=true", "/v1/messages/count_tokens");
    let own = "/anthropic/v1/messages?v=1";
    let own_beta = "/anthropic/v1/messages?v=1&beta=true";
    // model, what is asked for; adapter, method, path and operation at the node
    let cases = [
        ("profiled", chat, "with", "POST", chat, "chat_completions"),
        ("profiled", text, "with", "POST", text, ""),
        ("profiled", vectors, "with", "POST", vectors, ""),
        ("profiled", answers, "with", "POST", answers, "responses"),
        ("profiled", messages, "with", "POST", messages, "messages"),
        ("profiled", beta, "with", "POST", beta, "messages"),
        ("profiled", count, "with", "POST", count, "count_tokens"),
        (
            "mapped",
            chat,
            "mapped",
            "PUT",
            "/v2/chat",
            "chat_completions",
        ),
        ("mapped", text, "mapped", "POST", text, ""),
        ("mapped", answers, "mapped", "POST", answers, ""),
        ("mapped", messages, "mapped", "POST", own, "messages"),
        ("mapped", beta, "mapped", "POST", own_beta, "messages"),
        ("mapped", count, "mapped", "POST", count, "count_tokens"),
        ("plain", chat, "without", "POST", chat, ""),
        ("plain", text, "without", "POST", text, ""),
        ("bare", answers, "without", "POST", answers, ""),
        ("bare", beta, "without", "POST", beta, ""),
        ("bare", count, "without", "POST", count, ""),
    ];
    for (model, asked, adapter, method, path, operation) in cases {
        let mut client = world.asks(&post(asked, &format!("{{\"model\":\"{model}\"}}")));
        let request = node.tunnel();
        assert_eq!(
            (request.method.as_str(), request.path.as_str()),
            (method, path)
        );
        assert_eq!(request.operation, operation, "{model} {path}");
        assert_eq!(request.adapter, adapter);
        assert!(!request.stream);
        assert_eq!(request.stall_timeout, StallTimeout::Default);
        assert_eq!(request.timeout, HardTimeout::None);
        Run::of(&request).error(&mut node, "node rejected");
        assert_eq!(client.head().expect("an answer").status, 502);
    }
    // The catalog's list alone excludes; and it is said at once, not after a wait.
    for path in [vectors, answers, messages, count] {
        let mut client = world.asks(&post(path, "{\"model\":\"plain\"}"));
        expect_error(&mut client, 503, "no_provider_configured", "edge");
    }
    expect_nothing(&mut node);
    drop(node);
    world.rest();
}

/// Proves [R-104].
#[test]
fn r104_a_request_says_where_it_goes_and_nothing_of_the_profile() {
    let text = PROFILED.replace(
        "          id: named\n",
        "          id: marker-id\n          auth_header: x-marker\n          \
         auth_prefix: \"Marker \"\n",
    );
    let world = World::new(&text);
    let mut node = Node::connect(&world.edge, "n1");
    node.send(&register("n1"));
    let RegisterResponse::Accepted { config, .. } = expect_accepted(&mut node) else {
        unreachable!("accepted")
    };
    let told = format!("{config:?}");
    let markers = ["marker-id", "x-marker", "Marker ", "127.0.0.1:9"];
    assert!(markers.iter().all(|marker| told.contains(marker)), "{told}");
    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    let client = world.asks(&post("/v1/messages?beta=true", "{\"model\":\"profiled\"}"));
    let request = node.tunnel();
    assert_eq!(request.operation, "messages");
    let whole = crate::support::envelope(&Message::TunnelRequest(request.clone()));
    let whole = String::from_utf8_lossy(&whole);
    for marker in markers {
        assert!(!whole.contains(marker), "{marker} in {whole}");
    }
    Run::of(&request).error(&mut node, "node rejected");
    world.wait_held(0);
    drop((node, client));
    world.rest();
}

/// Proves [R-232], [R-240], [D-16].
#[test]
fn r232_the_free_provider_is_chosen_and_the_rest_wait_for_their_own() {
    let world = World::new(&catalog([2, 3], ""));
    let mut n1 = world.node("n1");
    let mut n2 = world.node("n2");
    let clients: Vec<_> = (0..5).map(|row| world.asks(&numbered("m1", row))).collect();
    let mut on_n1: Vec<_> = (0..2).map(|_| Run::asked(&mut n1)).collect();
    let mut on_n2: Vec<_> = (0..3).map(|_| Run::asked(&mut n2)).collect();
    let sixth = world.asks(&numbered("only1", 6));
    let seventh = world.asks(&numbered("m1", 7));
    world.wait_queued(2);
    expect_nothing(&mut n1);
    expect_nothing(&mut n2);
    // n2's slot goes to whoever can use it, past an older one who cannot.
    on_n2.remove(0).error(&mut n2, "node rejected");
    let request = n2.tunnel();
    assert_eq!(number(&request.body), 7);
    on_n2.push(Run::of(&request));
    expect_nothing(&mut n1);
    on_n1.remove(0).error(&mut n1, "node rejected");
    let request = n1.tunnel();
    assert_eq!(number(&request.body), 6);
    on_n1.push(Run::of(&request));
    for mut run in on_n1 {
        run.error(&mut n1, "node rejected");
    }
    for mut run in on_n2 {
        run.error(&mut n2, "node rejected");
    }
    world.wait_held(0);
    drop((n1, n2, clients, sixth, seventh));
    world.rest();
}

/// Proves [R-241], [R-238].
#[test]
fn r241_concurrency_gates_nothing_and_an_unreferenced_provider_serves_nobody() {
    let text = "nodes:
  - id: n1
    concurrency: 1
    adapters:
      - name: a1
        type: openai_compat
        base_url: \"http://127.0.0.1:9\"
    providers:
      - id: p1
        adapter: a1
        target: t1
        capacity: 2
      - id: p2
        adapter: a1
        target: t2
        capacity: 3
      - id: p9
        adapter: a1
        target: t9
        capacity: 64
models:
  - name: m1
    providers: [p1, p2]
";
    let world = World::new(text);
    let mut node = world.node("n1");
    let clients: Vec<_> = (0..6).map(|_| world.asks(&chat("m1", false))).collect();
    let requests: Vec<_> = (0..5).map(|_| node.tunnel()).collect();
    world.wait_queued(1);
    expect_nothing(&mut node);
    let on = |target: &str| {
        requests
            .iter()
            .filter(|request| request.target == target)
            .count()
    };
    assert_eq!((on("t1"), on("t2"), on("t9")), (2, 3, 0));
    for request in &requests {
        Run::of(request).error(&mut node, "node rejected");
    }
    let last = node.tunnel();
    assert_ne!(last.target, "t9");
    Run::of(&last).error(&mut node, "node rejected");
    world.wait_held(0);
    drop((node, clients));
    world.rest();
}

#[test]
fn requests_are_served_in_the_order_they_came_and_never_beyond_capacity() {
    let world = World::new(&catalog([1, 1], ""));
    let mut node = world.node("n1");
    let mut clients = vec![world.asks(&numbered("only1", 0))];
    let mut request = node.tunnel();
    for row in 1..8 {
        clients.push(world.asks(&numbered("only1", row)));
        world.wait_queued(row);
    }
    for row in 0..8 {
        assert_eq!(number(&request.body), row);
        expect_nothing(&mut node);
        let mut run = Run::of(&request);
        run.start(&mut node, 200, &[("content-length", "1")]);
        run.body(&mut node, b"x");
        run.end(&mut node);
        if row < 7 {
            request = node.tunnel();
        }
    }
    for client in &mut clients {
        let head = client.head().expect("an answer");
        assert_eq!(client.body(&head), (b"x".to_vec(), true));
    }
    drop((node, clients));
    world.rest();
}

/// Proves [P-16], [D-30].
#[test]
fn p16_exactly_the_bound_may_wait_in_number_and_in_bytes() {
    let limits = "limits:\n  queue_waiters_max: 2\n  queue_bytes_max: 4096\n";
    let world = World::new(&catalog([1, 1], limits));
    let mut node = world.node("n1");
    let running = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);

    // A body of exactly so many bytes.
    let sized = |model: &str, bytes: usize| {
        let empty = format!("{{\"model\":\"{model}\",\"f\":\"\"}}").len();
        let filler = "x".repeat(bytes - empty);
        post(
            "/v1/completions",
            &format!("{{\"model\":\"{model}\",\"f\":\"{filler}\"}}"),
        )
    };
    let first = world.asks(&sized("only1", 2048));
    world.wait_queued(1);
    let mut beyond = world.asks(&sized("only1", 2049));
    let head = expect_error(&mut beyond, 429, "queue_full", "edge");
    let retry_after: u32 = head
        .header("retry-after")
        .expect("when")
        .parse()
        .expect("seconds");
    assert!((1..=30).contains(&retry_after));
    let second = world.asks(&sized("only1", 2048));
    world.wait_queued(2);
    let mut third = world.asks(&sized("only1", 64));
    expect_error(&mut third, 429, "queue_full", "edge");
    world.saw("queue_full", 2);
    // Another model has a queue of its own.
    let other = world.asks(&chat("only2", false));
    world.wait_queued(3);

    run.error(&mut node, "node rejected");
    for _ in 0..2 {
        Run::asked(&mut node).error(&mut node, "node rejected");
    }
    world.wait_queued(1);
    let mut n2 = world.node("n2");
    Run::asked(&mut n2).error(&mut n2, "node rejected");
    drop((node, n2, running, first, second, third, beyond, other));
    world.rest();
}

/// Proves [D-29], [D-11].
#[test]
fn a_wait_without_end_ends_in_503_and_the_next_one_is_served() {
    let world = World::new(&catalog([1, 1], "timeouts:\n  queue_wait_ms: 500\n"));
    // Nobody is connected: it waits all the same, until its time is over. `[A-26]`
    let mut nobody = world.asks(&chat("m1", false));
    let head = expect_error(&mut nobody, 503, "queue_timeout", "edge");
    assert!(head.header("retry-after").is_some());
    world.saw("queue_timeout", 1);
    let mut node = world.node("n1");
    let running = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    let mut waits = world.asks(&chat("only1", false));
    expect_error(&mut waits, 503, "queue_timeout", "edge");
    world.saw("queue_timeout", 2);
    assert!(
        pending(&mut node).is_empty(),
        "nothing is sent of who only waited"
    );
    run.error(&mut node, "node rejected");
    world.serves(&mut node, "only1");
    drop((node, running, waits, nobody));
    world.rest();
}

/// Proves [P-07], [P-21].
#[test]
fn p07_who_left_while_waiting_is_never_dispatched_and_holds_nobody_up() {
    let world = World::new(&catalog([1, 1], ""));
    let mut clients: Vec<_> = (0..10)
        .map(|row| {
            let client = world.asks(&numbered("only1", row));
            world.wait_queued(row + 1);
            Some(client)
        })
        .collect();
    for (row, kill) in (1..9).zip(Kill::ALL.into_iter().cycle()) {
        kill.client(clients[row].take().expect("still there"));
    }
    world.wait_queued(2); // the gauge drops when they leave, not when their turn comes
    world.saw("client_gone", 8);
    // From here on nothing arrives but the node.
    let mut node = world.node("n1");
    for row in [0, 9] {
        let request = node.tunnel();
        assert_eq!(number(&request.body), row);
        expect_nothing(&mut node);
        let mut run = Run::of(&request);
        run.start(&mut node, 204, &[]);
        run.end(&mut node);
    }
    for client in clients.iter_mut().flatten() {
        assert_eq!(client.head().expect("an answer").status, 204);
    }
    expect_nothing(&mut node);
    assert_eq!(world.edge.metrics().get("iop_edge_cancels_sent_total"), 0.0);
    drop((node, clients));
    world.rest();
}

/// A request for nothing that is configured asks nobody.
#[test]
fn unknown_models_ask_no_node() {
    let world = World::with(&Setup {
        nodes: vec!["n1", "n2"],
        ..Setup::with(&catalog([1, 1], ""))
    });
    let mut node: Node = world.node("n1");
    let mut client = world.asks(&chat("m9", false));
    expect_error(&mut client, 404, "model_not_found", "edge");
    expect_nothing(&mut node);
    world.serves(&mut node, "m1");
    drop((node, client));
    world.rest();
}
