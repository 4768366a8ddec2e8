//! Response heads: written by us, read back by httparse.
use iop_dataplane::shard::http1::{
    Allow, Asked, BodyMeter, HeadWritten, ResponseFraming, ResponsePlan, SimpleResponse, Version,
    plan_response, write_response_head, write_simple_head, write_simple_response,
};
use iop_proto::limits::HEADERS_MAX;
use iop_proto::reason::{Reason, Source};

const ASKED: Asked = Asked {
    head_only: false,
    version: Version::Http11,
    keep_alive: true,
};
const OLD: Asked = Asked {
    version: Version::Http10,
    ..ASKED
};
const HEAD_ONLY: Asked = Asked {
    head_only: true,
    ..ASKED
};

type Fields<'a> = &'a [(&'a str, &'a [u8])];

fn pairs<'a>(headers: Fields<'a>) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone {
    headers
        .iter()
        .map(|&(name, value)| (name.as_bytes(), value))
}

fn plan(asked: Asked, status: u16, headers: Fields<'_>) -> Result<ResponsePlan, Reason> {
    plan_response(asked, status, pairs(headers))
}

/// Status, phrase and fields of a head, which must be all of `bytes` up to a body.
fn read(bytes: &[u8]) -> (u16, String, Vec<(String, Vec<u8>)>, usize) {
    let mut headers = [httparse::EMPTY_HEADER; 160];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(len) = response.parse(bytes).unwrap() else {
        panic!("partial")
    };
    let fields = response
        .headers
        .iter()
        .map(|h| (h.name.to_owned(), h.value.to_vec()))
        .collect();
    (
        response.code.unwrap(),
        response.reason.unwrap().to_owned(),
        fields,
        len,
    )
}

/// Plans, writes and reads back.
fn written(asked: Asked, status: u16, headers: Fields<'_>) -> (Vec<(String, Vec<u8>)>, u32) {
    let plan = plan(asked, status, headers).unwrap();
    let mut out = [0; 4096];
    let HeadWritten { len, dropped } =
        write_response_head(&mut out, &plan, pairs(headers), b"id-1").unwrap();
    let (code, _, fields, parsed) = read(&out[..len]);
    assert_eq!((code, parsed), (status, len));
    for room in 0..len {
        let short = write_response_head(&mut out[..room], &plan, pairs(headers), b"id-1");
        assert_eq!(short, Err(Reason::ResponseMalformed));
    }
    (fields, dropped)
}

fn field(name: &str, value: &str) -> (String, Vec<u8>) {
    (name.to_owned(), value.as_bytes().to_vec())
}

const FIVE: Fields<'_> = &[("Content-Length", b"5")];

/// Plans an answer with status and headers; asserts framing, whether the connection stays, and what the
/// head then says beside `x-request-id`.
fn check(
    (asked, status, headers): (Asked, u16, Fields<'_>),
    (framing, stays): (ResponseFraming, bool),
    sent: &[(&str, &str)],
) {
    let plan = plan(asked, status, headers).unwrap();
    assert_eq!(
        (plan.status, plan.framing, plan.keep_alive),
        (status, framing, stays)
    );
    let mut expected: Vec<_> = sent
        .iter()
        .map(|(name, value)| field(name, value))
        .collect();
    expected.push(field("x-request-id", "id-1"));
    assert_eq!(
        written(asked, status, headers),
        (expected, 0),
        "{asked:?} {status} {headers:?}"
    );
}

/// Proves [D-28], [P-53].
#[test]
fn d28_framing_follows_the_providers_length_and_the_clients_version() {
    use ResponseFraming::{Chunked, Length, UntilClose};
    let length = ("content-length", "5");
    let chunked = ("transfer-encoding", "chunked");
    let stays = ("connection", "keep-alive");
    let closes = ("connection", "close");
    check((ASKED, 200, FIVE), (Length(5), true), &[length]);
    check((OLD, 200, FIVE), (Length(5), true), &[length, stays]);
    check((ASKED, 200, &[]), (Chunked, true), &[chunked]);
    check((OLD, 200, &[]), (UntilClose, false), &[closes]);
    let closing = Asked {
        keep_alive: false,
        ..ASKED
    };
    check((closing, 200, FIVE), (Length(5), false), &[length, closes]);
    check((closing, 200, &[]), (Chunked, false), &[chunked, closes]);
    let none = &[("content-length", &b"0"[..])];
    check(
        (ASKED, 999, none),
        (Length(0), true),
        &[("content-length", "0")],
    );
    // Equal repetitions are one; a coded message has no length for us.
    let repeated: Fields<'_> = &[("content-length", b"5, 5"), ("Content-Length", b"05")];
    check((ASKED, 500, repeated), (Length(5), true), &[length]);
    let coded: Fields<'_> = &[("content-length", b"9"), ("Transfer-Encoding", b"chunked")];
    check((ASKED, 200, coded), (Chunked, true), &[chunked]);
}

/// Proves [D-28].
#[test]
fn d28_head_204_and_304_have_no_body() {
    use ResponseFraming::NoBody;
    let length = ("content-length", "5");
    check((HEAD_ONLY, 200, FIVE), (NoBody, true), &[length]);
    check((HEAD_ONLY, 200, &[]), (NoBody, true), &[]);
    check((ASKED, 204, FIVE), (NoBody, true), &[]);
    check((ASKED, 304, FIVE), (NoBody, true), &[length]);
    check(
        (OLD, 304, &[]),
        (NoBody, true),
        &[("connection", "keep-alive")],
    );
}

#[test]
fn answers_that_cannot_be_framed_are_refused() {
    for (status, headers) in [
        (0, &[][..]),
        (100, &[]),
        (101, &[("Upgrade", &b"websocket"[..])][..]),
        (199, &[]),
        (1000, &[]),
        (200, &[("content-length", b"")]),
        (200, &[("content-length", b"x")]),
        (200, &[("content-length", b"-1")]),
        (200, &[("content-length", b"5,")]),
        (200, &[("content-length", b"5, 6")]),
        (200, &[("content-length", b"5"), ("Content-Length", b"6")]),
        (200, &[("content-length", b"18446744073709551616")]),
    ] {
        assert_eq!(
            plan(ASKED, status, headers),
            Err(Reason::ResponseMalformed),
            "{headers:?}"
        );
    }
    let many = vec![("a", &b"b"[..]); HEADERS_MAX as usize + 1];
    assert!(plan(ASKED, 200, &many[1..]).is_ok());
    assert_eq!(plan(ASKED, 200, &many), Err(Reason::ResponseMalformed));
    let options = |count: usize| vec![b"a".as_slice(); count].join(&b',');
    let connection = |value: &[u8]| plan(ASKED, 200, &[("connection", value)]).is_ok();
    assert!(connection(&options(32)) && !connection(&options(33)));
}

/// Proves [D-13].
#[test]
fn d13_only_fields_of_the_message_reach_the_client() {
    let (fields, dropped) = written(
        ASKED,
        200,
        &[
            ("Content-Type", b"application/json"),
            ("Connection", b"close, X-Hop"),
            ("Keep-Alive", b"timeout=5"),
            ("Proxy-Connection", b"x"),
            ("Set-Cookie", b"a=1"),
            ("Trailer", b"x"),
            ("TE", b"x"),
            ("Upgrade", b"x"),
            ("x-hop", b"1"),
            ("Content_Length", b"7"),
            ("set-cookie", b"b=2"),
            ("X-Request-Id", b"the provider's"),
            ("X-IOP-Error-Source", b"edge"),
            ("X-Latin", b"\xe4\tz"),
            ("X-Empty", b""),
            ("Set-Cookie", b"a=1"),
        ],
    );
    let latin = ("X-Latin".to_owned(), b"\xe4\tz".to_vec());
    assert_eq!(dropped, 0);
    assert_eq!(
        fields,
        [
            field("Content-Type", "application/json"),
            field("Set-Cookie", "a=1"),
            field("set-cookie", "b=2"),
            latin,
            field("X-Empty", ""),
            field("Set-Cookie", "a=1"),
            field("transfer-encoding", "chunked"),
            field("x-request-id", "id-1"),
        ]
    );
    // The same field without a Connection that names it.
    assert_eq!(
        written(ASKED, 200, &[("x-hop", b"1")]).0[0],
        field("x-hop", "1")
    );
}

#[test]
fn a_field_that_would_split_the_head_is_dropped_and_counted() {
    let hostile: Fields<'_> = &[
        ("X-A", b"a\r\nSet-Cookie: evil=1"),
        ("X-B", b"a\nb"),
        ("X-C", b"a\0b"),
        ("X-D", b"a\x7fb"),
        ("X-E\r\nSet-Cookie", b"evil"),
        ("X F", b"a"),
        ("X:G", b"a"),
        ("", b"a"),
        ("X-\u{e4}", b"a"),
        ("X-Good", b"a"),
    ];
    let (fields, dropped) = written(ASKED, 200, hostile);
    assert_eq!(dropped, 9);
    let expected = [
        field("X-Good", "a"),
        field("transfer-encoding", "chunked"),
        field("x-request-id", "id-1"),
    ];
    assert_eq!(fields, expected);
}

#[test]
fn an_event_stream_is_known_by_its_type_encoding_and_framing() {
    let kind = "content-type";
    for (headers, expected) in [
        (&[(kind, &b"text/event-stream"[..])][..], true),
        (
            &[
                (kind, b"Text/Event-Stream ; charset=utf-8"),
                ("content-encoding", b"identity"),
            ],
            true,
        ),
        (&[(kind, b"text/event-streams")], false),
        (&[(kind, b"application/json")], false),
        (
            &[(kind, b"text/event-stream"), ("content-encoding", b"gzip")],
            false,
        ),
        (
            &[(kind, b"text/event-stream"), ("content-length", b"5")],
            false,
        ),
        (&[], false),
    ] {
        assert_eq!(
            plan(ASKED, 200, headers).unwrap().event_stream,
            expected,
            "{headers:?}"
        );
        assert!(!plan(HEAD_ONLY, 200, headers).unwrap().event_stream);
    }
}

/// Proves [D-28].
#[test]
fn d28_an_announced_length_is_enforced_both_ways() {
    let meter = |headers: Fields<'_>, asked| plan(asked, 200, headers).unwrap().meter();
    let five: Fields<'_> = &[("content-length", b"5")];
    let mut body = meter(five, ASKED);
    assert_eq!(
        (body.take(3), body.finish()),
        (Ok(true), Err(Reason::LengthMismatch))
    );
    assert_eq!((body.take(2), body.finish()), (Ok(true), Ok(())));
    assert_eq!(
        (body.take(0), body.take(1)),
        (Ok(true), Err(Reason::LengthMismatch))
    );
    let mut body = meter(five, ASKED);
    assert_eq!(body.take(6), Err(Reason::LengthMismatch));
    let mut open = meter(&[], ASKED);
    assert_eq!((open.take(1 << 40), open.finish()), (Ok(true), Ok(())));
    let mut nothing = meter(five, HEAD_ONLY);
    assert_eq!((nothing.take(6), nothing.finish()), (Ok(false), Ok(())));
    assert_eq!(nothing, BodyMeter::Nothing);
}

#[test]
fn answers_of_our_own_are_complete() {
    let answer = SimpleResponse {
        asked: Asked {
            keep_alive: false,
            ..ASKED
        },
        status: 401,
        content_type: "application/json",
        request_id: b"id-2",
        source: Some(Source::Edge),
        retry_after_s: 7,
        allow: Some(Allow::Get),
    };
    let mut out = [0; 1024];
    let len = write_simple_response(&mut out, &answer, b"{}").unwrap();
    let (code, phrase, fields, head) = read(&out[..len]);
    assert_eq!(
        (code, phrase.as_str(), &out[head..len]),
        (401, "Unauthorized", &b"{}"[..])
    );
    assert_eq!(
        fields,
        [
            field("content-type", "application/json"),
            field("content-length", "2"),
            field("www-authenticate", "Bearer"),
            field("allow", "GET, HEAD, OPTIONS"),
            field("retry-after", "7"),
            field("x-iop-error-source", "edge"),
            field("connection", "close"),
            field("x-request-id", "id-2"),
        ]
    );
    for room in 0..len {
        assert!(write_simple_response(&mut out[..room], &answer, b"{}").is_err());
    }
    // HEAD announces the body it leaves out; 204 has none to announce.
    let head_only = SimpleResponse {
        asked: HEAD_ONLY,
        ..answer
    };
    let len = write_simple_response(&mut out, &head_only, b"{}").unwrap();
    assert_eq!(read(&out[..len]).3, len);
    assert_eq!(write_simple_head(&mut [0; 1024], &head_only, 2), Ok(len));
    let empty = SimpleResponse {
        asked: ASKED,
        status: 204,
        content_type: "",
        source: None,
        retry_after_s: 0,
        allow: Some(Allow::Post),
        ..answer
    };
    let len = write_simple_response(&mut out, &empty, b"").unwrap();
    let expected = "HTTP/1.1 204 No Content\r\nallow: POST, OPTIONS\r\nx-request-id: id-2\r\n\r\n";
    assert_eq!(str::from_utf8(&out[..len]).unwrap(), expected);
}
