//! HTTP as nobody should send it, over real sockets: what comes back, byte for byte where it matters,
//! and what becomes of the connection.
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Instant;

use iop_proto::view::TunnelFrameOut;

use crate::slow::raise_descriptors;
use crate::support::{CATALOG, Client, DEADLINE, Edge, Node, Setup, chat};

/// Everything the Edge sends until it closes the connection.
fn everything(client: &mut Client) -> String {
    let mut answer = Vec::new();
    let closed = client.stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(closed.is_ok(), "{closed:?} after {answer}");
    answer
}

/// One byte per segment; the Edge may have answered and closed before the last.
fn dribble(client: &mut Client, bytes: &[u8]) {
    for byte in bytes {
        if client.stream.write_all(&[*byte]).is_err() {
            return;
        }
    }
}

/// An idle connection may end by either side; what comes instead of HTTP is answered and closed.
#[test]
fn what_is_not_http_is_answered_and_closed() {
    let mut edge = Edge::start(&Setup::default());
    for (bytes, status) in [
        (&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], "400"), // a TLS hello
        (b"GET / HTTP/1.1\nhost: x\n\n", "400"),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", "505"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", "501"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", "413"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "411"),
    ] {
        let mut client = Client::connect(&edge);
        client.stream.write_all(bytes).expect("the Edge reads");
        let mut answer = Vec::new();
        let closed = client.stream.read_to_end(&mut answer);
        assert!(closed.is_ok(), "{}: {closed:?} after {}", bytes.escape_ascii(), answer.escape_ascii());
        let answer = String::from_utf8_lossy(&answer);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{}: {answer}", bytes.escape_ascii());
        assert!(answer.contains("connection: close"), "{answer}");
    }
    let mut client = Client::connect(&edge);
    let (head, _) = client.ask("GET /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    let (head, _) = client.ask("GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    drop(client);
    edge.wait_idle();
    edge.assert_alive();
}

/// Heads that two parsers could read differently, and what is not for this server: each is refused,
/// whole or byte by byte, once, and the connection ends.
const REFUSED: &[(&str, &str)] = &[
    // Two framings, or one that is not clear.
    ("content-length: 5\r\ntransfer-encoding: chunked", "400"),
    ("transfer-encoding: chunked\r\ncontent-length: 5", "400"),
    ("content-length: 5\r\ncontent-length: 6", "400"),
    ("content-length: 5, 6", "400"),
    ("content-length: +5", "400"),
    ("content-length: 0x5", "400"),
    ("content-length: -1", "400"),
    ("content-length:", "400"),
    ("content-length: 5 5", "400"),
    ("content-length: 18446744073709551617", "400|413"),
    ("transfer-encoding: chunked, chunked", "400|501"),
    ("transfer-encoding: chunked, gzip", "400|501"),
    ("transfer-encoding: gzip, chunked", "501"),
    ("transfer-encoding: xchunked", "501"),
    ("transfer-encoding: \x0bchunked", "400"),
    ("transfer-encoding : chunked", "400"),
    ("content-length : 5", "400"),
    // Lines that end, or do not, in ways of their own.
    ("x: 1\ncontent-length: 5", "400"),
    ("x: 1\rcontent-length: 5", "400"),
    ("x: 1\r\n folded: 2", "400"),
    ("x: a\x00b", "400"),
    ("no colon", "400"),
    (": nameless", "400"),
    ("na me: 1", "400"),
    // What this server does not do.
    ("content-length: 5\r\nexpect: 200-ok", "417"),
];

/// Proves [D-14], [P-51].
#[test]
fn ambiguous_heads_are_refused_once_and_end_the_connection() {
    const SMUGGLED: &str = "GET /healthz HTTP/1.1\r\nhost: smuggled\r\n\r\n";
    let mut edge = Edge::start(&Setup::default());
    for (fields, expected) in REFUSED {
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\n{fields}\r\n\r\n");
        for slowly in [false, true] {
            let mut client = Client::connect(&edge);
            let bytes = format!("{head}0\r\n\r\n{SMUGGLED}{SMUGGLED}");
            if slowly {
                dribble(&mut client, bytes.as_bytes());
            } else {
                client.send(&bytes);
            }
            let answer = everything(&mut client);
            let status = answer.get(9..12).unwrap_or_default();
            assert!(
                expected.split('|').any(|one| one == status),
                "{fields:?}: {answer}"
            );
            assert_eq!(
                answer.matches("HTTP/1.1 ").count(),
                1,
                "{fields:?}: {answer}"
            );
            assert!(answer.contains("connection: close"), "{fields:?}: {answer}");
        }
    }
    let seen = edge.wait_idle();
    assert_eq!(
        seen.get("iop_edge_responses_total{class=\"2xx\"}"),
        0.0,
        "smuggled"
    );
    edge.assert_alive();
}

/// An answer that comes before the body was read ends the connection, with a bound on what is read:
/// nothing of the body is ever a request.
/// Proves [P-51], [D-42].
#[test]
fn the_unread_body_of_a_refused_request_is_never_a_request() {
    let catalog = format!("{CATALOG}limits:\n  body_bytes_max: 1 MiB\n");
    let edge = Edge::start(&Setup::with(&catalog));
    let inner = "GET /healthz HTTP/1.1\r\nhost: smuggled\r\n\r\n".repeat(40);
    let length = format!("content-length: {}", inner.len());
    let cases = [
        ("POST", "/nowhere", length.as_str(), "404"),
        ("PUT", "/v1/chat/completions", &length, "405"),
        ("POST", "/v1/models", &length, "405"),
        ("GET", "/healthz", &length, "200"),
        ("GET", "/v1/models", &length, "200"),
        ("OPTIONS", "/v1/models", &length, "204"),
        (
            "POST",
            "/v1/chat/completions",
            "content-length: 99999999",
            "413",
        ),
        ("POST", "/nowhere", "transfer-encoding: chunked", "404"),
        ("GET", "/healthz", "transfer-encoding: chunked", "200"),
    ];
    for (method, path, field, status) in cases {
        for together in [true, false] {
            let mut client = Client::connect(&edge);
            let head = format!("{method} {path} HTTP/1.1\r\nhost: edge\r\n{field}\r\n\r\n");
            if together {
                client.send(&(head + &inner));
            } else {
                client.send(&head);
                client.send(&inner);
            }
            let answer = everything(&mut client);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{path} {field}: {answer}"
            );
            assert_eq!(
                answer.matches("HTTP/1.1 ").count(),
                1,
                "{path} {field}: {answer}"
            );
            assert!(
                answer.contains("connection: close"),
                "{path} {field}: {answer}"
            );
        }
    }
    let seen = edge.wait_idle();
    assert_eq!(
        seen.get("iop_edge_requests_total"),
        2.0 * cases.len() as f64
    );
}

/// Heads that never end: each is told so in time, none holds anything afterwards, and who sends a
/// whole one meanwhile is served.
#[test]
fn thousands_of_half_open_heads_time_out_and_harm_nobody() {
    const HALF: usize = 2_000;
    raise_descriptors();
    let catalog = format!("{CATALOG}limits:\n  clients_max: 2100\ntimeouts:\n  head_ms: 3000\n");
    let mut edge = Edge::start(&Setup::with(&catalog));
    let descriptors = edge.open_descriptors();
    let mut half: Vec<Client> = (0..HALF).map(|_| Client::connect(&edge)).collect();
    for (n, client) in half.iter_mut().enumerate() {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ncontent-le";
        client.send(&head[..1 + n % (head.len() - 1)]);
    }
    let mut whole = Client::connect(&edge);
    let (head, _) = whole.ask("GET /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    for client in &mut half {
        let head = client.head().expect("an answer");
        assert_eq!(
            (head.status, head.header("connection")),
            (408, Some("close"))
        );
        assert!(client.body(&head).1);
        client.expect_closed();
    }
    let seen = edge.wait_metrics("all of them", |seen| {
        seen.reason("head_timeout") >= HALF as f64
    });
    assert_eq!(seen.reason("head_timeout"), HALF as f64);
    drop((half, whole));
    edge.wait_idle();
    let began = Instant::now();
    while edge.open_descriptors() > descriptors {
        assert!(began.elapsed() < DEADLINE, "descriptors leak");
    }
    edge.assert_alive();
}

/// The next request of a node, answered with `body` framed by the Edge.
fn answer(node: &mut Node, body: &[u8]) -> Vec<u8> {
    let tunnel = node.tunnel();
    let run = &tunnel.run_id;
    let headers: &[(&[u8], &[u8])] = &[(b"content-type", b"application/json")];
    node.frame(&TunnelFrameOut::response_start(run, 1, 200, headers));
    node.frame(&TunnelFrameOut::body(run, 2, body));
    node.frame(&TunnelFrameOut::end(run, 3));
    tunnel.body.to_vec()
}

/// Proves [D-45].
#[test]
fn a_client_that_expects_it_is_told_to_continue_first() {
    let edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let request = chat("m1", false);
    let (head, body) = request.split_once("\r\n\r\n").expect("a head");
    let mut client = Client::connect(&edge);
    client.send(&format!("{head}\r\nexpect: 100-continue\r\n\r\n"));
    let interim = client.head().expect("100");
    assert_eq!((interim.status, interim.headers.len()), (100, 0));
    client.send(body);
    assert!(!answer(&mut node, b"{}").is_empty());
    let head = client.head().expect("an answer");
    assert_eq!(
        (head.status, client.body(&head)),
        (200, (b"{}".to_vec(), true))
    );
    // HTTP/1.0 knows no interim answer.
    let mut old = Client::connect(&edge);
    let (line, rest) = request.split_once("HTTP/1.1").expect("a line");
    let rest = rest.replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n");
    old.send(&format!("{line}HTTP/1.0{rest}"));
    answer(&mut node, b"{}");
    assert_eq!(old.head().expect("an answer").status, 200);
}

/// A switch of protocols is not taken up; the request is served as it is, and the next one too.
#[test]
fn upgrades_are_ignored_and_absolute_targets_are_served() {
    let edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let mut client = Client::connect(&edge);
    let upgrade =
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAM\r\n\r\n";
    let request = chat("m1", false).replacen("\r\n\r\n", &format!("\r\n{upgrade}"), 1);
    client.send(&request);
    answer(&mut node, b"{\"a\":1}");
    let head = client.head().expect("an answer");
    assert_eq!((head.status, head.header("upgrade")), (200, None));
    assert_eq!(client.body(&head), (b"{\"a\":1}".to_vec(), true));
    let absolute = chat("m1", false).replacen("POST /", "POST http://elsewhere.test/", 1);
    client.send(&absolute);
    answer(&mut node, b"{\"b\":2}");
    let head = client.head().expect("an answer");
    assert_eq!(
        (head.status, client.body(&head)),
        (200, (b"{\"b\":2}".to_vec(), true))
    );
    for target in ["*", "edge:80", "http://", "ftp://edge/v1/models"] {
        let mut client = Client::connect(&edge);
        client.send(&format!("GET {target} HTTP/1.1\r\nhost: edge\r\n\r\n"));
        let answer = everything(&mut client);
        let status = answer.get(9..12).unwrap_or_default();
        assert!(["400", "404"].contains(&status), "{target}: {answer}");
    }
}

/// The body of an HTTP/1.0 answer without a length ends with the connection; with one, or for a
/// client that asks to stay, it is no different from 1.1. No chunk ever reaches such a client.
/// Proves [P-53].
#[test]
fn http_1_0_gets_one_framing_that_it_knows() {
    let edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let old = |extra: &str| {
        let request = chat("m1", true).replacen("HTTP/1.1\r\n", "HTTP/1.0\r\n", 1);
        request.replacen("\r\n\r\n", &format!("\r\n{extra}\r\n"), 1)
    };
    for extra in ["", "connection: keep-alive\r\n"] {
        let mut client = Client::connect(&edge);
        client.send(&old(extra));
        answer(&mut node, b"data: x\n\n");
        let answer = everything(&mut client);
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(
            !head.contains("transfer-encoding") && !head.contains("content-length"),
            "{head}"
        );
        assert!(
            head.contains("connection: close") || extra.is_empty(),
            "{head}"
        );
        assert_eq!(body, "data: x\n\n");
    }
    // With a length the connection may stay.
    let mut client = Client::connect(&edge);
    for _ in 0..2 {
        client.send(&old("connection: keep-alive\r\n"));
        let run = node.tunnel().run_id;
        let headers: &[(&[u8], &[u8])] = &[
            (b"content-length", b"2"),
            (b"transfer-encoding", b"chunked"),
        ];
        node.frame(&TunnelFrameOut::response_start(&run, 1, 200, headers));
        node.frame(&TunnelFrameOut::body(&run, 2, b"ok"));
        node.frame(&TunnelFrameOut::end(&run, 3));
        let head = client.head().expect("an answer");
        let framings = (
            head.header("content-length"),
            head.header("transfer-encoding"),
        );
        if framings == (None, None) {
            // An upstream that claims both framings is believed in neither.
            assert_eq!(client.body(&head), (b"ok".to_vec(), true));
            break;
        }
        assert_eq!(framings, (Some("2"), None), "{head:?}");
        assert_eq!(client.body(&head), (b"ok".to_vec(), true));
    }
}

/// Chunk extensions and trailers are read over; the node gets the data alone, in one piece, however
/// the bytes were cut. What follows is the next request.
/// Proves [D-14].
#[test]
fn chunk_extensions_and_trailers_are_read_over_at_any_cut() {
    let edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let data = "{\"model\":\"m1\",\"messages\":[]}";
    let (one, two) = data.split_at(7);
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ntransfer-encoding: chunked\r\n\r\n\
         {:X};name=value;quoted=\"a;b\"\r\n{one}\r\n{:04x}\r\n{two}\r\n0;last\r\n\
         trailer: 1\r\ncontent-length: 99\r\nhost: other\r\n\r\n",
        one.len(),
        two.len(),
    );
    let expected = data.replace("m1", "t1");
    for step in [1, 2, 3, 7, 64, request.len()] {
        let mut client = Client::connect(&edge);
        for part in request.as_bytes().chunks(step) {
            client.stream.write_all(part).expect("the Edge reads");
        }
        assert_eq!(
            answer(&mut node, b"{}"),
            expected.as_bytes(),
            "in steps of {step}"
        );
        let head = client.head().expect("an answer");
        assert!(client.body(&head).1);
        assert_eq!(
            client
                .ask("GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n")
                .0
                .status,
            200
        );
    }
    for broken in [
        "5\nabcde\r\n",
        "g\r\n",
        "-1\r\n",
        " 5\r\n",
        "5 \r\n",
        "5\r\nabcdef\r\n",
        "\r\n",
        "10000000000000000\r\n",
        "5;\x00\r\n",
    ] {
        let mut client = Client::connect(&edge);
        client.send(&format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ntransfer-encoding: chunked\r\n\r\n\
             {broken}"
        ));
        let answer = everything(&mut client);
        assert!(answer.starts_with("HTTP/1.1 400 "), "{broken:?}: {answer}");
    }
}

/// A half-closed connection is a client that has left, wherever it stands; unless the configuration
/// tolerates it.
/// Proves [D-27].
#[test]
fn a_client_that_half_closes_is_gone() {
    let edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let mut client = Client::connect(&edge);
    client.send(&chat("m1", true));
    let run = node.tunnel().run_id;
    client.stream.shutdown(Shutdown::Write).expect("open");
    match node.receive() {
        iop_proto::domain::Message::CancelRequest(cancel) => assert_eq!(cancel.run_id, run),
        other => panic!("expected CancelRequest, got {other:?}"),
    }
    node.frame(&TunnelFrameOut::error(&run, 1, "cancelled"));
    edge.wait_idle();
}
