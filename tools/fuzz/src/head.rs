//! Request heads: equal over every split, nothing of this hop or secret forwarded, framed as hyper does.
//!
//! Lives on: one thread. View: the bytes a client sends. Bound: the input.
use iop_dataplane::shard::http1::{Head, HeadCursor, parse_head, wipe_credentials};
use iop_proto::reason::Reason;

use crate::dice::{Dice, LARGEST_PIECES};
use crate::stream;

/// Fields that may not reach a provider under any spelling, in lower case with `-`.
const KEPT_BACK: [&[u8]; 17] = [
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
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"proxy-authorization",
    b"cookie",
    b"host",
    b"expect",
];
const OWN_ID: &[u8] = b"own-id";

pub(crate) fn run(data: &[u8]) -> bool {
    let whole = parse_head(data);
    let mut dice = Dice::of(data);
    for largest in LARGEST_PIECES {
        assert_eq!(grow(data, &mut dice, largest), whole, "pieces of {largest}");
    }
    if let Ok(Some(head)) = &whole {
        check_forwarded(data, head);
        check_wiped(data, head);
    }
    stream::compare(data);
    matches!(whole, Ok(Some(_)))
}

/// Parses as the bytes would arrive.
fn grow(data: &[u8], dice: &mut Dice, largest: usize) -> Result<Option<Head>, Reason> {
    let mut cursor = HeadCursor::default();
    let mut end = 0;
    for piece in dice.pieces(data, largest) {
        end += piece.len();
        let found = cursor.parse(&data[..end]);
        if found != Ok(None) {
            return found;
        }
    }
    Ok(None)
}

fn forwarded<'a>(bytes: &'a [u8], head: &Head) -> Vec<(&'a [u8], &'a [u8])> {
    let mut fields = Vec::new();
    head.visit_forwarded(bytes, OWN_ID, |name, value| fields.push((name, value)));
    fields
}

fn check_forwarded(data: &[u8], head: &Head) {
    let mut fields = forwarded(data, head);
    let (name, id) = fields.pop().expect("the request id comes last");
    assert!(name == b"x-request-id" && !id.is_empty());
    for (name, value) in fields {
        let plain: Vec<u8> = name
            .iter()
            .map(|&byte| match byte {
                b'_' => b'-',
                byte => byte.to_ascii_lowercase(),
            })
            .collect();
        assert!(!plain.is_empty() && plain != b"x-request-id");
        assert!(
            !KEPT_BACK.contains(&plain.as_slice()),
            "{plain:?} was forwarded"
        );
        assert!(!value.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
        assert!(
            !name
                .iter()
                .any(|&byte| byte == b':' || byte <= b' ' || byte >= 0x7f)
        );
    }
}

fn check_wiped(data: &[u8], head: &Head) {
    let mut wiped = data.to_vec();
    wipe_credentials(&mut wiped, head);
    assert_eq!(wiped[head.consumed..], data[head.consumed..]);
    assert!(
        wiped
            .iter()
            .zip(data)
            .all(|(&now, &then)| now == then || now == 0)
    );
    assert_eq!(forwarded(&wiped, head), forwarded(data, head));
    if let Some(credential) = head.credential {
        assert!(!credential.of(data).is_empty());
        assert!(credential.of(&wiped).iter().all(|&byte| byte == 0));
    }
}
