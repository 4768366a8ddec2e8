//! Request heads: a table of valid, ambiguous and hostile ones with what RFC 9110 and 9112 (or our
//! stricter decision) make of each.
use iop_dataplane::shard::http1::{
    Allow, BodyFraming, Head, HeadCursor, Method, Route, Version, parse_head, wipe_credentials,
};
use iop_dataplane::surface::Surface;
use iop_proto::catalog::Operation;
use iop_proto::limits::{
    CONNECTION_OPTIONS_MAX, HEAD_BYTES_MAX, HEADERS_MAX, REQUEST_LINE_BYTES_MAX,
};
use iop_proto::reason::Reason;

const CHAT: Route = Route::Operation(Operation::ChatCompletions);

fn accepted(bytes: &[u8]) -> Head {
    let parsed = parse_head(bytes);
    let Ok(Some(head)) = parsed else {
        panic!("{parsed:?} for {}", bytes.escape_ascii());
    };
    head
}

/// Parses whole, with every prefix, with junk behind, and byte by byte through one cursor: all must
/// tell the same. Returns what they tell.
fn every_way(bytes: &[u8]) -> Result<Option<Head>, Reason> {
    let whole = parse_head(bytes);
    let mut cursor = HeadCursor::default();
    let mut resumed = Ok(None);
    for end in 0..=bytes.len() {
        let prefix = parse_head(&bytes[..end]);
        assert!(
            prefix == Ok(None) || prefix == whole,
            "{prefix:?}: {}",
            bytes.escape_ascii()
        );
        resumed = cursor.parse(&bytes[..end]);
        assert_eq!(
            resumed,
            prefix,
            "resumed at {end}: {}",
            bytes.escape_ascii()
        );
        if resumed != Ok(None) {
            break;
        }
    }
    assert_eq!(resumed, whole);
    if let Ok(Some(head)) = whole {
        let longer = [bytes, b"\x00\n junk"].concat();
        assert_eq!(parse_head(&longer), whole);
        assert!(head.consumed <= bytes.len());
    }
    whole
}

/// A head by its first line and field lines.
fn head_of(first: &str, fields: &[&str]) -> Vec<u8> {
    let mut text = format!("{first}\r\n");
    for field in fields {
        text.push_str(field);
        text.push_str("\r\n");
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// A POST of a chat completion with these field lines beside Host.
fn post(fields: &[&str]) -> Vec<u8> {
    let fields = [&["Host: edge"], fields].concat();
    head_of("POST /v1/chat/completions HTTP/1.1", &fields)
}

#[test]
fn every_route_and_method_is_told_apart() {
    let allow_get = Route::MethodNotAllowed(Allow::Get);
    let allow_post = Route::MethodNotAllowed(Allow::Post);
    for (line, route) in [
        ("POST /v1/chat/completions", CHAT),
        ("POST /v1/chat/completions?api-version=1&x=%2f", CHAT),
        ("POST http://edge:8080/v1/chat/completions", CHAT),
        ("POST HTTPS://[::1]:8080/v1/chat/completions?a", CHAT),
        (
            "POST /v1/completions",
            Route::Operation(Operation::Completions),
        ),
        (
            "POST /v1/embeddings",
            Route::Operation(Operation::Embeddings),
        ),
        ("POST /v1/responses", Route::Operation(Operation::Responses)),
        (
            "POST /v1/messages?beta=true",
            Route::Operation(Operation::Messages),
        ),
        (
            "POST /v1/messages/count_tokens",
            Route::Operation(Operation::CountTokens),
        ),
        ("GET /v1/messages", allow_post),
        ("GET /v1/models", Route::Models),
        ("HEAD /v1/models", Route::Models),
        ("GET /healthz", Route::Healthz),
        ("HEAD /readyz?verbose", Route::Readyz),
        ("OPTIONS /v1/models/x", Route::Options(Allow::Get)),
        ("OPTIONS /v1/chat/completions", Route::Options(Allow::Post)),
        ("OPTIONS /nowhere", Route::Unknown),
        ("GET /v1/chat/completions", allow_post),
        ("HEAD /v1/embeddings", allow_post),
        ("post /v1/chat/completions", allow_post),
        ("BREW /v1/chat/completions", allow_post),
        ("POST /v1/models", allow_get),
        ("DELETE /v1/models/x", allow_get),
        ("CONNECT /healthz", allow_get),
        ("GET /", Route::Unknown),
        ("GET //v1/models", Route::Unknown),
        ("GET /v1/models/", Route::Unknown),
        ("GET /v1/modelsx", Route::Unknown),
        ("GET /V1/models", Route::Unknown),
        ("GET /v1/%6dodels", Route::Unknown),
        ("GET /v1/../v1/models", Route::Unknown),
        ("POST /v1/chat/completions/", Route::Unknown),
        ("POST /v1/responses/", Route::Unknown),
        ("POST /v1/messages/batches", Route::Unknown),
        ("GET http://edge", Route::Unknown),
        ("GET http://edge?q", Route::Unknown),
    ] {
        let bytes = head_of(&format!("{line} HTTP/1.1"), &["Host: edge"]);
        let head = every_way(&bytes).unwrap().unwrap();
        assert_eq!(head.route, route, "{line}");
        assert_eq!(head.consumed, bytes.len());
    }
}

#[test]
fn errors_have_the_shape_of_the_nearest_surface() {
    for (line, surface) in [
        ("POST /v1/chat/completions", Surface::OpenAi),
        ("POST /v1/responses?x", Surface::Responses),
        ("GET /v1/responses/resp_1", Surface::Responses),
        ("POST /v1/responsesx", Surface::OpenAi),
        ("POST /v1/messages", Surface::Anthropic),
        ("GET /v1/messages?beta=true", Surface::Anthropic),
        ("POST http://e/v1/messages/count_tokens", Surface::Anthropic),
        ("POST /v1/messages/batches", Surface::Anthropic),
        ("POST /v1/messages/", Surface::Anthropic),
        ("POST /v1/messagesx", Surface::OpenAi),
        ("POST /v2/messages", Surface::OpenAi),
        ("GET /v1/models", Surface::OpenAi),
        ("GET /v1/files", Surface::OpenAi),
        ("GET /", Surface::OpenAi),
    ] {
        let head = accepted(&head_of(&format!("{line} HTTP/1.1"), &["Host: e"]));
        assert_eq!(head.surface, surface, "{line}");
    }
}

#[test]
fn a_model_id_and_a_query_are_spans_of_the_target() {
    let bytes = head_of(
        "GET http://e/v1/models/org%2Fa/b?x=1?y HTTP/1.1",
        &["Host: e"],
    );
    let head = accepted(&bytes);
    let Route::Model(id) = head.route else {
        panic!("{:?}", head.route)
    };
    assert_eq!(id.of(&bytes), b"org%2Fa/b");
    assert_eq!(head.query.unwrap().of(&bytes), b"x=1?y");
    assert_eq!(
        accepted(&head_of("GET /v1/models? HTTP/1.0", &[]))
            .query
            .unwrap()
            .of(&bytes),
        b""
    );
}

/// Proves [D-14], [P-50].
#[test]
fn d14_heads_that_two_parsers_could_read_differently_are_refused() {
    let malformed: &[&[u8]] = &[
        b"GET /healthz HTTP/1.1\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\n\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\rX: y\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX: a\r\n b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n X: a\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX: a\r\n\tb\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX: a\0b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX: a\x0bb\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX: a\x7fb\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX : a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX\t: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\n: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX(y): a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nX\xc3\xa4: a\r\n\r\n",
        b"\r\n\r\nGET /healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"\nGET /healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b" GET /healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET  /healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /healthz  HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.1 \r\nHost: e\r\n\r\n",
        b"GET\t/healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /healthz\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.1x\r\nHost: e\r\n\r\n",
        b"GET /healthz http/1.1\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/11\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.10\r\nHost: e\r\n\r\n",
        b"GET /healthz#f HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /health z HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /h\xc3\xa4 HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /{} HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"G(T /healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: e\r\n\r\n",
        b"CONNECT e:443 HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET ftp://e/healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET http:///healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET http://u@e/healthz HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nHost: e\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nHost: e\r\nhost: f\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e/f\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e f\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: e\r\nConnection: close, a b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ];
    for bytes in malformed {
        assert_eq!(
            every_way(bytes),
            Err(Reason::HeadMalformed),
            "{}",
            bytes.escape_ascii()
        );
    }
    for (line, reason) in [
        ("GET / HTTP/2.0", Reason::VersionUnsupported),
        ("PRI * HTTP/2.0", Reason::HeadMalformed),
        ("GET / HTTP/1.2", Reason::VersionUnsupported),
        ("GET / HTTP/0.9", Reason::VersionUnsupported),
    ] {
        assert_eq!(
            every_way(&head_of(line, &["Host: e"])),
            Err(reason),
            "{line}"
        );
    }
}

/// Proves [D-14], [P-50].
#[test]
fn d14_ambiguous_body_lengths_are_refused() {
    use Reason::{FramingAmbiguous as Ambiguous, TransferCodingUnknown as Unknown};
    for (fields, reason) in [
        (
            &["Content-Length: 5", "Transfer-Encoding: chunked"][..],
            Ambiguous,
        ),
        (
            &["Transfer-Encoding: chunked", "Content-Length: 5"],
            Ambiguous,
        ),
        (&["Transfer-Encoding: gzip", "Content-Length: 5"], Ambiguous),
        (
            &["Transfer-Encoding: chunked", "Content-Length: x"],
            Ambiguous,
        ),
        (&["Content-Length: 5", "Content-Length: 5"], Ambiguous),
        (&["Content-Length: 5", "content-length: 6"], Ambiguous),
        (&["Content-Length: 5, 5"], Ambiguous),
        (&["Content-Length: 5,"], Ambiguous),
        (&["Content-Length:"], Ambiguous),
        (&["Content-Length: +5"], Ambiguous),
        (&["Content-Length: -0"], Ambiguous),
        (&["Content-Length: 0x5"], Ambiguous),
        (&["Content-Length: 5 5"], Ambiguous),
        (&["Content-Length: 5.0"], Ambiguous),
        (&["Content-Length: \u{0665}"], Ambiguous),
        (&["Content-Length: 18446744073709551616"], Ambiguous),
        (&["Transfer-Encoding:"], Ambiguous),
        (&["Transfer-Encoding: ,chunked"], Ambiguous),
        (&["Transfer-Encoding: chunked,"], Ambiguous),
        (&["Transfer-Encoding: chunked, gzip"], Ambiguous),
        (&["Transfer-Encoding: chunked, chunked"], Ambiguous),
        (
            &["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
            Ambiguous,
        ),
        (
            &["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
            Ambiguous,
        ),
        (&["Transfer-Encoding: gzip"], Unknown),
        (&["Transfer-Encoding: gzip, chunked"], Unknown),
        (
            &["Transfer-Encoding: identity", "Transfer-Encoding: chunked"],
            Unknown,
        ),
        (&["Transfer-Encoding: xchunked"], Unknown),
        (&["Transfer-Encoding: chunkedx"], Unknown),
        (&["Transfer-Encoding: chunked;a=b"], Unknown),
        (&["Transfer-Encoding: \"chunked\""], Unknown),
    ] {
        assert_eq!(every_way(&post(fields)), Err(reason), "{fields:?}");
    }
    let old = |field| head_of("POST /v1/chat/completions HTTP/1.0", &[field]);
    assert_eq!(
        every_way(&old("Transfer-Encoding: chunked")),
        Err(Ambiguous)
    );
    assert_eq!(every_way(&old("Transfer-Encoding: gzip")), Err(Ambiguous));
    // A name that only looks like a framing field is none.
    let head = accepted(&post(&["Content-Lengt: 5", "X-Transfer-Encoding: chunked"]));
    assert_eq!(head.body, BodyFraming::None);
}

#[test]
fn clear_body_lengths_are_accepted() {
    for (fields, body) in [
        (&[][..], BodyFraming::None),
        (&["Content-Length: 0"][..], BodyFraming::Length(0)),
        (&["CONTENT-LENGTH:\t 007 \t"], BodyFraming::Length(7)),
        (
            &["Content-Length: 18446744073709551615"],
            BodyFraming::Length(u64::MAX),
        ),
        (&["Transfer-Encoding: chunked"], BodyFraming::Chunked),
        (&["transfer-encoding:CHUNKED \t"], BodyFraming::Chunked),
    ] {
        assert_eq!(
            every_way(&post(fields)).unwrap().unwrap().body,
            body,
            "{fields:?}"
        );
    }
}

#[test]
fn connection_and_version_decide_whether_it_stays() {
    for (version, fields, stays) in [
        ("HTTP/1.1", &["Host:"][..], true),
        ("HTTP/1.1", &["Host: e", "Connection: close"], false),
        (
            "HTTP/1.1",
            &["Host: e", "Connection: keep-alive, CLOSE"],
            false,
        ),
        (
            "HTTP/1.1",
            &["Host: e", "Connection: foo", "Connection: close"],
            false,
        ),
        ("HTTP/1.1", &["Host: e", "Connection: , foo"], true),
        ("HTTP/1.0", &[], false),
        ("HTTP/1.0", &["Connection: Keep-Alive"], true),
        ("HTTP/1.0", &["Connection: keep-alive, close"], false),
    ] {
        let head = accepted(&head_of(&format!("GET /healthz {version}"), fields));
        assert_eq!(head.keep_alive, stays, "{version} {fields:?}");
        assert_eq!(head.version == Version::Http11, version == "HTTP/1.1");
        assert_eq!(head.asked().keep_alive, stays);
    }
}

#[test]
fn upgrades_are_ignored_and_never_leave_http() {
    let fields = [
        "Host: e",
        "Connection: upgrade, http2-settings",
        "Upgrade: h2c",
        "HTTP2-Settings: A",
    ];
    let bytes = head_of("GET /healthz HTTP/1.1", &fields);
    let head = accepted(&bytes);
    assert_eq!(
        (head.route, head.body, head.keep_alive),
        (Route::Healthz, BodyFraming::None, true)
    );
    assert_eq!(forwarded(&bytes), [("x-request-id".into(), "own".into())]);
}

#[test]
fn expectations_are_met_or_refused() {
    let body = "Content-Length: 5";
    assert!(accepted(&post(&[body, "Expect: 100-Continue"])).expect_continue);
    assert!(
        accepted(&post(&[
            "Transfer-Encoding: chunked",
            "Expect: 100-continue"
        ]))
        .expect_continue
    );
    assert!(!accepted(&post(&[body])).expect_continue);
    // Nothing to wait for; and HTTP/1.0 has no interim answers.
    assert!(!accepted(&post(&["Expect: 100-continue"])).expect_continue);
    assert!(!accepted(&post(&["Content-Length: 0", "Expect: 100-continue"])).expect_continue);
    let old = head_of(
        "POST /v1/completions HTTP/1.0",
        &[body, "Expect: 100-continue"],
    );
    assert!(!accepted(&old).expect_continue);
    for fields in [
        &[body, "Expect: 200-ok"][..],
        &[body, "Expect:"],
        &[body, "Expect: 100-continue, x"],
        &[body, "Expect: 100-continue", "Expect: 100-continue"],
    ] {
        assert_eq!(
            every_way(&post(fields)),
            Err(Reason::ExpectationUnknown),
            "{fields:?}"
        );
    }
}

#[test]
fn one_credential_is_found_and_none_is_guessed() {
    for (fields, key) in [
        (&[][..], None),
        (&["Authorization: Bearer sk-1"][..], Some("sk-1")),
        (&["authorization:  bearer   sk-1 "], Some("sk-1")),
        (&["X-Api-Key: sk-2"], Some("sk-2")),
        (&["api-key: sk-3"], Some("sk-3")),
        (
            &[
                "api-key: sk-3",
                "x-api-key: sk-2",
                "Authorization: Bearer sk-1",
            ],
            Some("sk-1"),
        ),
        (&["api-key: sk-3", "x-api-key: sk-2"], Some("sk-2")),
        (
            &["Authorization: Basic dTpw", "x-api-key: sk-2"],
            Some("sk-2"),
        ),
        (&["Authorization: Bearer"], None),
        (&["Authorization: Bearer "], None),
        (&["Authorization: Bearersk-1"], None),
        (&["x-api-key:"], None),
        (&["x_api_key: sk-2"], None),
    ] {
        let bytes = post(fields);
        let found = accepted(&bytes).credential;
        let found = found.map(|span| str::from_utf8(span.of(&bytes)).unwrap());
        assert_eq!(found, key, "{fields:?}");
    }
    for fields in [
        ["Authorization: Bearer a", "Authorization: Bearer b"],
        ["Authorization: Basic a", "Authorization: Bearer b"],
        ["x-api-key: a", "x-api-key: b"],
        ["api-key: a", "Api-Key: a"],
    ] {
        assert_eq!(
            every_way(&post(&fields)),
            Err(Reason::HeadMalformed),
            "{fields:?}"
        );
    }
}

/// The secrets are gone from the buffer; the head stays usable.
/// Proves [D-43].
#[test]
fn d43_credentials_are_wiped_where_they_lie() {
    let secrets = [
        "Authorization: Bearer canary-1",
        "X-API-Key: canary-2",
        "api-key: canary-3",
        "Cookie: s=canary-4",
        "Proxy-Authorization: Basic canary-5",
        "X: kept",
    ];
    let mut bytes = post(&secrets);
    let head = accepted(&bytes);
    let before = bytes.clone();
    wipe_credentials(&mut bytes, &head);
    assert!(before.windows(6).any(|w| w == b"canary"));
    assert!(!bytes.windows(6).any(|w| w == b"canary"));
    assert_eq!(head.credential.unwrap().of(&bytes), [0; 8]);
    let wiped = bytes
        .iter()
        .zip(&before)
        .filter(|(now, then)| now != then)
        .count();
    assert_eq!(
        wiped,
        "Bearer canary-1canary-2canary-3s=canary-4Basic canary-5".len()
    );
    let mut kept = Vec::new();
    head.visit_forwarded(&bytes, b"own", |name, _| kept.push(name.to_vec()));
    assert_eq!(kept, [&b"X"[..], b"x-request-id"]);
}

fn forwarded(bytes: &[u8]) -> Vec<(String, String)> {
    let head = accepted(bytes);
    let text = |part: &[u8]| String::from_utf8(part.to_vec()).unwrap();
    let mut list = Vec::new();
    head.visit_forwarded(bytes, b"own", |name, value| {
        list.push((text(name), text(value)))
    });
    list
}

/// Proves [D-13], [P-52].
#[test]
fn d13_hop_credentials_and_framing_stay_here() {
    let dropped = [
        "Connection: close, X-Hop, x-other",
        "Keep-Alive: timeout=5",
        "Proxy-Connection: keep-alive",
        "TE: trailers",
        "Trailer: x",
        "Transfer-Encoding: chunked",
        "Upgrade: websocket",
        "Expect: 100-continue",
        "X-HOP: 1",
        "x-Other: 1",
        "Authorization: Bearer k",
        "X-Api-Key: k",
        "Api-Key: k",
        "Proxy-Authorization: Basic k",
        "Cookie: a=b",
        "Content_Length: 5",
        "X_API_KEY: k",
    ];
    let kept = [
        ("Content-Type", "application/json"),
        ("Accept-Encoding", "gzip, br"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("User-Agent", ""),
        ("X-Many", "1"),
        ("x-many", "2"),
        ("X-Latin", "z\tz"),
    ];
    let lines: Vec<_> = kept
        .iter()
        .map(|(name, value)| format!("{name}:  {value} "))
        .collect();
    let mixed: Vec<&str> = dropped
        .iter()
        .copied()
        .chain(lines.iter().map(String::as_str))
        .rev()
        .collect();
    let mut expected: Vec<_> = kept
        .iter()
        .rev()
        .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
        .collect();
    expected.push(("x-request-id".to_owned(), "own".to_owned()));
    assert_eq!(forwarded(&post(&mixed)), expected);
    // Without `Connection` naming it, the same field goes through.
    assert_eq!(
        forwarded(&post(&["X-Hop: 1"]))[0],
        ("X-Hop".to_owned(), "1".to_owned())
    );
    let with_length = forwarded(&post(&["Content-Length: 5"]));
    assert_eq!(with_length.len(), 1, "{with_length:?}");
}

/// Proves [D-26].
#[test]
fn d26_a_well_formed_request_id_is_kept_and_any_other_replaced() {
    let longest = format!("x-request-id: {}", "a".repeat(128));
    let too_long = format!("x-request-id: {}", "a".repeat(129));
    for (fields, id) in [
        (
            &["X-Request-Id: req_1-2.3:4/5+6=@"][..],
            "req_1-2.3:4/5+6=@",
        ),
        (&[&longest], &longest[14..]),
        (&[], "own"),
        (&[&too_long], "own"),
        (&["x-request-id:"], "own"),
        (&["x-request-id: a b"], "own"),
        (&["x-request-id: \"a\""], "own"),
        (&["x-request-id: a", "x-request-id: b"], "own"),
        (&["x-request-id: a\"", "x-request-id: b"], "own"),
    ] {
        let bytes = post(fields);
        assert_eq!(
            forwarded(&bytes),
            [("x-request-id".into(), id.into())],
            "{fields:?}"
        );
        assert_eq!(
            accepted(&bytes).request_id_or(&bytes, b"own"),
            id.as_bytes()
        );
    }
}

/// Proves [D-14].
#[test]
fn d14_limits_hold_at_their_edge() {
    let line = |bytes: usize| {
        let fixed = "GET /?".len() + " HTTP/1.1".len();
        head_of(
            &format!("GET /?{} HTTP/1.1", "a".repeat(bytes - fixed)),
            &["Host: e"],
        )
    };
    let line_max = REQUEST_LINE_BYTES_MAX as usize;
    assert!(matches!(parse_head(&line(line_max)), Ok(Some(_))));
    assert_eq!(
        parse_head(&line(line_max + 1)),
        Err(Reason::RequestLineTooLong)
    );
    // Told as soon as it is known, not when the line ends.
    assert_eq!(parse_head(&line(line_max + 1)[..line_max]), Ok(None));
    assert_eq!(
        parse_head(&line(line_max + 1)[..=line_max]),
        Err(Reason::RequestLineTooLong)
    );
    let after_blank = [b"\r\n", line(line_max).as_slice()].concat();
    assert!(matches!(parse_head(&after_blank), Ok(Some(_))));

    let head = |bytes: usize| {
        let fixed = post(&["X: "]).len();
        post(&[&format!("X: {}", "a".repeat(bytes - fixed))])
    };
    let head_max = HEAD_BYTES_MAX as usize;
    assert_eq!(accepted(&head(head_max)).consumed, head_max);
    assert_eq!(parse_head(&head(head_max + 1)), Err(Reason::HeadTooLong));
    assert_eq!(parse_head(&head(head_max + 1)[..head_max - 1]), Ok(None));
    assert_eq!(
        parse_head(&head(head_max + 1)[..head_max]),
        Err(Reason::HeadTooLong)
    );

    let fields = |count: usize| post(&vec!["a: b"; count - 1]);
    assert!(parse_head(&fields(HEADERS_MAX as usize)).unwrap().is_some());
    assert_eq!(
        parse_head(&fields(HEADERS_MAX as usize + 1)),
        Err(Reason::HeadTooLong)
    );

    let options =
        |count: u32| post(&[&format!("Connection: a{}", ",a".repeat(count as usize - 1))]);
    assert!(
        parse_head(&options(CONNECTION_OPTIONS_MAX))
            .unwrap()
            .is_some()
    );
    assert_eq!(
        parse_head(&options(CONNECTION_OPTIONS_MAX + 1)),
        Err(Reason::HeadTooLong)
    );
}

#[test]
fn one_empty_line_before_a_request_belongs_to_it() {
    let bytes = [
        b"\r\n",
        post(&["x-request-id: a", "x-api-key: k"]).as_slice(),
    ]
    .concat();
    let head = every_way(&bytes).unwrap().unwrap();
    assert_eq!(
        (head.consumed, head.method, head.route),
        (bytes.len(), Method::Post, CHAT)
    );
    assert_eq!(head.credential.unwrap().of(&bytes), b"k");
    assert_eq!(forwarded(&bytes), [("x-request-id".into(), "a".into())]);
}

#[test]
fn a_second_request_is_left_alone() {
    let (first, second) = (
        post(&["Content-Length: 0"]),
        head_of("GET /healthz HTTP/1.0", &[]),
    );
    let both = [first.as_slice(), &second].concat();
    let head = accepted(&both);
    assert_eq!(head.consumed, first.len());
    assert_eq!(accepted(&both[head.consumed..]).route, Route::Healthz);
}
