//! Response heads: whatever a node sends, one well-formed head comes out, and httparse reads in it
//! what may pass, in order, and one framing.
//!
//! Lives on: one thread. View: one answer. Bound: the input.
//!
//! ```text
//!  0       1        3       4                        bytes
//!  +-------+--------+-------+----------------------+
//!  | asked | status | room  | name ':' value '\n' … |    room 0: plenty; else in steps of 16 bytes
//!  +-------+--------+-------+----------------------+
//! ```
use iop_dataplane::shard::http1::{
    Asked, ResponseFraming, ResponsePlan, Version, plan_response, write_response_head,
};
use iop_proto::limits::HEADERS_MAX;

type Field<'a> = (&'a [u8], &'a [u8]);

const REQUEST_ID: &[u8] = b"request-1";
const PLENTY: usize = 64 * 1024;
/// What we may add: framing, connection, request id.
const ADDED_MAX: usize = 4;
/// Fields of one hop, and those that only the Edge sets, in lower case with `-`.
const KEPT_BACK: [&[u8]; 12] = [
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authenticate",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"content-length",
    b"http2-settings",
    b"x-request-id",
    b"x-iop-error-source",
];

pub(crate) fn run(data: &[u8]) -> bool {
    let [asked, status_high, status_low, room, lines @ ..] = data else {
        return false;
    };
    let asked = Asked {
        head_only: asked & 1 != 0,
        version: if asked & 2 == 0 {
            Version::Http11
        } else {
            Version::Http10
        },
        keep_alive: asked & 4 != 0,
    };
    let status = u16::from_be_bytes([*status_high, *status_low]);
    let fields: Vec<Field<'_>> = lines
        .split(|&byte| byte == b'\n')
        .map(|line| {
            let colon = line.iter().position(|&byte| byte == b':');
            colon.map_or((line, &[][..]), |at| (&line[..at], &line[at + 1..]))
        })
        .collect();
    let Ok(plan) = plan_response(asked, status, fields.iter().copied()) else {
        return false;
    };
    assert!((200..1000).contains(&status) && fields.len() <= HEADERS_MAX as usize);
    let mut out = vec![0; PLENTY];
    let head = write_response_head(&mut out, &plan, fields.iter().copied(), REQUEST_ID);
    let head = head.expect("a short head fits");
    let dropped = check_head(&out[..head.len], &plan, &fields);
    assert_eq!(head.dropped as usize, dropped);
    check_plan(asked, &plan);
    let tight = usize::from(*room) * 16;
    let mut small = vec![0; tight];
    let again = write_response_head(&mut small, &plan, fields.iter().copied(), REQUEST_ID);
    match again {
        Ok(again) => assert!(again == head && small[..again.len] == out[..head.len]),
        Err(_) => assert!(tight < head.len, "refused although it fits"),
    }
    true
}

fn check_plan(asked: Asked, plan: &ResponsePlan) {
    let bodiless = asked.head_only || matches!(plan.status, 204 | 304);
    assert_eq!(plan.framing == ResponseFraming::NoBody, bodiless);
    if plan.framing == ResponseFraming::UntilClose {
        assert!(asked.version == Version::Http10 && !plan.keep_alive);
    }
    if plan.framing == ResponseFraming::Chunked {
        assert_eq!(asked.version, Version::Http11);
    }
    assert!(!plan.keep_alive || asked.keep_alive);
    let unframed = [ResponseFraming::Chunked, ResponseFraming::UntilClose];
    assert!(!plan.event_stream || unframed.contains(&plan.framing));
}

/// Reads the head with httparse; returns how many fields no head may hold.
fn check_head(head: &[u8], plan: &ResponsePlan, fields: &[Field<'_>]) -> usize {
    let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX as usize + ADDED_MAX];
    let mut parsed = httparse::Response::new(&mut lines);
    let end = parsed.parse(head).expect("a head that parses");
    assert_eq!(end, httparse::Status::Complete(head.len()));
    assert_eq!((parsed.code, parsed.version), (Some(plan.status), Some(1)));
    let (expected, dropped) = passing(fields);
    let mut ours: Vec<Field<'_>> = Vec::new();
    let mut rest = parsed.headers.iter();
    for (name, value) in expected {
        let found = rest.next().expect("a field that may pass");
        assert_eq!(found.name.as_bytes(), name);
        assert_eq!(trimmed(found.value), trimmed(value));
    }
    ours.extend(rest.map(|field| (field.name.as_bytes(), field.value)));
    let has = |wanted: &str| {
        ours.iter()
            .filter(|field| field.0 == wanted.as_bytes())
            .count()
    };
    let value = |wanted: &str| {
        let field = ours.iter().find(|field| field.0 == wanted.as_bytes());
        field.map(|field| field.1)
    };
    match plan.framing {
        ResponseFraming::Length(length) => {
            let text = length.to_string();
            assert_eq!(value("content-length"), Some(text.as_bytes()));
        }
        ResponseFraming::Chunked => assert_eq!(value("transfer-encoding"), Some(&b"chunked"[..])),
        ResponseFraming::UntilClose => assert_eq!(value("connection"), Some(&b"close"[..])),
        ResponseFraming::NoBody => {}
    }
    let chunked = plan.framing == ResponseFraming::Chunked;
    assert_eq!(has("transfer-encoding"), usize::from(chunked));
    let unsized_ = chunked || plan.framing == ResponseFraming::UntilClose || plan.status == 204;
    assert!(has("content-length") <= usize::from(!unsized_));
    assert!(has("connection") <= 1);
    assert_eq!(ours.last(), Some(&(&b"x-request-id"[..], REQUEST_ID)));
    let added = has("transfer-encoding") + has("content-length") + has("connection");
    assert_eq!(ours.len(), added + 1);
    dropped
}

/// Fields that go to the client, in order, and how many others are no fields at all.
fn passing<'a>(fields: &[Field<'a>]) -> (Vec<Field<'a>>, usize) {
    let options: Vec<&[u8]> = fields
        .iter()
        .filter(|field| field.0.eq_ignore_ascii_case(b"connection"))
        .flat_map(|field| field.1.split(|&byte| byte == b',').map(trimmed))
        .collect();
    let known: [&[u8]; 2] = [b"close", b"keep-alive"];
    let lists_fields = options
        .iter()
        .any(|option| !known.iter().any(|known| option.eq_ignore_ascii_case(known)));
    let is_listed = |name: &[u8]| {
        lists_fields
            && options
                .iter()
                .any(|option| option.eq_ignore_ascii_case(name))
    };
    let (mut passing, mut dropped) = (Vec::new(), 0);
    for &(name, value) in fields {
        let plain: Vec<u8> = name
            .iter()
            .map(|&byte| match byte {
                b'_' => b'-',
                byte => byte.to_ascii_lowercase(),
            })
            .collect();
        if !is_field(name, value) {
            dropped += 1;
        } else if !KEPT_BACK.contains(&plain.as_slice()) && !is_listed(name) {
            passing.push((name, value));
        }
    }
    (passing, dropped)
}

/// RFC 9110 §5.1 and §5.5, by what they exclude.
fn is_field(name: &[u8], value: &[u8]) -> bool {
    let separators = b"\"(),/:;<=>?@[\\]{} ";
    let in_name = |byte: &u8| byte.is_ascii_graphic() && !separators.contains(byte);
    let in_value = |byte: &u8| *byte == b'\t' || !byte.is_ascii_control();
    !name.is_empty() && name.iter().all(in_name) && value.iter().all(in_value)
}

fn trimmed(value: &[u8]) -> &[u8] {
    let inner = |byte: &u8| !matches!(byte, b' ' | b'\t');
    match (value.iter().position(inner), value.iter().rposition(inner)) {
        (Some(first), Some(last)) => &value[first..=last],
        _ => &[],
    }
}
