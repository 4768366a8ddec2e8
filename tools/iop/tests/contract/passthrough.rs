//! What the provider said reaches the client as it was said: status, headers, bytes, length; and as
//! soon as it was said.
use crate::kit::{
    Run, World, answer, catalog, expect_abort, expect_cancel, expect_error, expect_error_event,
};
use crate::support::chat;

/// Proves [D-11].
#[test]
fn d11_statuses_headers_and_bodies_pass_untouched_and_hop_headers_do_not() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    for status in [200, 201, 301, 400, 401, 404, 418, 429, 500, 503, 599] {
        let mut client = world.asks(&chat("only1", false));
        let mut run = Run::asked(&mut node);
        let headers = [
            ("Content-Type", "application/problem+json"),
            ("Set-Cookie", "a=1; Path=/"),
            ("X-Provider", "caf\u{e9}"),
            ("Set-Cookie", "b=2"),
            ("Retry-After", "17"),
            ("Content-Encoding", "gzip"),
            ("Connection", "close, x-internal"),
            ("X-Internal", "secret"),
            ("Keep-Alive", "timeout=1"),
            ("Transfer-Encoding", "chunked"),
            ("TE", "trailers"),
            ("Trailer", "x-sum"),
            ("Upgrade", "h2c"),
            ("Proxy-Authenticate", "Basic"),
            ("X-Iop-Error-Source", "edge"),
        ];
        run.start(&mut node, status, &headers);
        run.body(&mut node, b"\x1f\x8b not really gzip \x00\xff");
        run.end(&mut node);
        let (head, body, whole) = answer(&mut client);
        assert_eq!(i32::from(head.status), status);
        assert!(whole && body == b"\x1f\x8b not really gzip \x00\xff");
        assert_eq!(
            head.header("content-type"),
            Some("application/problem+json")
        );
        assert_eq!(
            head.all("set-cookie"),
            ["a=1; Path=/", "b=2"],
            "both, in their order"
        );
        let latin1: String = "caf\u{e9}".bytes().map(char::from).collect();
        assert_eq!(head.header("x-provider"), Some(latin1.as_str()));
        assert_eq!(head.header("retry-after"), Some("17"));
        assert_eq!(head.header("content-encoding"), Some("gzip"));
        assert_eq!(head.all("transfer-encoding"), ["chunked"], "ours");
        for gone in [
            "x-internal",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
            "proxy-authenticate",
        ] {
            assert_eq!(head.header(gone), None, "{gone}");
        }
        assert_eq!(
            head.header("x-iop-error-source"),
            None,
            "a provider's error is no error of ours"
        );
    }
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r108_an_answer_may_have_no_body_at_all() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    type Case = (i32, &'static [(&'static str, &'static str)], usize);
    let cases: [Case; 5] = [
        (204, &[], 0),
        (304, &[("content-length", "5")], 0),
        (200, &[("content-length", "0")], 0),
        (200, &[], 0),
        (200, &[("content-length", "9")], 3),
    ];
    // On one connection: each answer ends where it should.
    let mut client = world.client();
    for (status, headers, bodies) in cases {
        client.send(&chat("only1", false));
        let mut run = Run::asked(&mut node);
        run.start(&mut node, status, headers);
        for _ in 0..bodies {
            run.body(&mut node, b"abc");
        }
        run.end(&mut node);
        let head = client.head().expect("an answer");
        assert_eq!(i32::from(head.status), status);
        if matches!(status, 204 | 304) {
            assert_eq!(head.header("transfer-encoding"), None);
        } else {
            assert_eq!(client.body(&head), (b"abc".repeat(bodies), true));
        }
    }
    drop((node, client));
    world.rest();
}

/// Proves [D-28].
#[test]
fn an_announced_length_is_enforced_both_ways() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    // More than announced: broken off before the excess.
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[("content-length", "5")]);
    run.body(&mut node, b"1234");
    let head = client.head().expect("an answer");
    run.body(&mut node, b"56");
    expect_abort(&mut client, &head, b"1234");
    expect_cancel(&mut node, &run);
    run.error(&mut node, "cancelled");
    world.wait_held(0);
    // Fewer: broken off at the end, which is then no CancelRequest's cause.
    let mut client = world.asks(&chat("only1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[("content-length", "5")]);
    run.body(&mut node, b"1234");
    let head = client.head().expect("an answer");
    run.end(&mut node);
    expect_abort(&mut client, &head, b"1234");
    crate::kit::expect_nothing(&mut node);
    world.saw("length_mismatch", 2);
    world.serves(&mut node, "only1");
    drop((node, client));
    world.rest();
}

/// Proves [P-22].
#[test]
fn p22_every_body_frame_goes_on_at_once_whatever_its_type() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let types = [
        "text/event-stream",
        "text/event-stream; charset=utf-8",
        "application/x-ndjson",
        "application/octet-stream",
        "text/html",
        "application/json",
    ];
    for (row, kind) in types.iter().enumerate() {
        let mut client = world.asks(&chat("only1", row % 2 == 0));
        let mut run = Run::asked(&mut node);
        run.start(&mut node, 200, &[("content-type", kind)]);
        let head = client.head().expect("the head, before any body");
        for piece in [&b"{"[..], b"\"a\":1", b"}\n"] {
            run.body(&mut node, piece);
            assert_eq!(
                client.at_least(piece.len()),
                piece,
                "{kind}: before the next is sent"
            );
        }
        run.end(&mut node);
        assert_eq!(client.body(&head), (Vec::new(), true));
    }
    drop(node);
    world.rest();
}

/// Proves [D-40], [D-10], [P-32].
#[test]
fn d40_an_error_of_the_node_is_answered_by_its_legacy_text_before_and_after_the_head() {
    let world = World::new(&catalog([4, 4], ""));
    let mut node = world.node("n1");
    let cases = [
        (
            "provider unreachable",
            502,
            "provider_unreachable",
            "provider",
        ),
        (
            "provider unreachable: connection refused",
            502,
            "provider_unreachable",
            "provider",
        ),
        (
            "node rejected: unknown adapter",
            502,
            "node_rejected",
            "node",
        ),
        ("deadline exceeded", 504, "deadline_exceeded", "node"),
        ("draining", 503, "node_draining", "node"),
        ("response stalled", 504, "response_stalled", "provider"),
        (
            "something nobody has heard of",
            502,
            "node_rejected",
            "node",
        ),
        ("", 502, "node_rejected", "node"),
        ("cancelled", 502, "node_rejected", "node"), // by nobody we know
    ];
    for (text, status, code, source) in cases {
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.error(&mut node, text);
        let head = expect_error(&mut client, status, code, source);
        assert_eq!(
            head.header("retry-after").is_some(),
            status == 503,
            "{text}"
        );

        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        run.body(&mut node, b"data: 1\n\n");
        run.error(&mut node, text);
        let head = client.head().expect("an answer");
        assert_eq!(head.status, 200);
        expect_error_event(&mut client, &head, b"data: 1\n\n", code);

        let mut client = world.asks(&chat("only1", false));
        let mut run = Run::asked(&mut node);
        run.start(&mut node, 200, &[("content-type", "application/json")]);
        run.body(&mut node, b"{\"half\":");
        let head = client.head().expect("an answer");
        run.error(&mut node, text);
        expect_abort(&mut client, &head, b"{\"half\":");
    }
    let seen = world.wait("iop_edge_leases_held", 0);
    assert_eq!(seen.get("iop_edge_terminals_total{ending=\"error\"}"), 27.0);
    assert_eq!(seen.get("iop_edge_stream_violations_total"), 0.0);
    assert_eq!(
        seen.get("iop_edge_cancels_sent_total"),
        0.0,
        "they had ended already"
    );
    drop(node);
    world.rest();
}
