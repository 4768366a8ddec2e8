//! Whole streams of requests, read by us and by hyper: whatever we accept, hyper frames the same way.
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use hyper::body::{Body, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;
use hyper::{Request, Response, server::conn::http1::Builder};
use iop_dataplane::shard::http1::{BodyFraming, ChunkDecoder, Version, parse_head};
use iop_proto::limits::HEADERS_MAX;

use crate::dice::Dice;

/// One request as a reader framed it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    query: Option<String>,
    http11: bool,
    body: Vec<u8>,
}

/// How our reading of a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client or the framing said so, or the bytes ran out.
    Clean,
    /// We refused something.
    Refused,
}

fn read_ours(stream: &[u8]) -> (Vec<Seen>, End) {
    let (mut seen, mut at) = (Vec::new(), 0);
    loop {
        let head = match parse_head(&stream[at..]) {
            Ok(Some(head)) => head,
            Ok(None) => return (seen, End::Clean),
            Err(_) => return (seen, End::Refused),
        };
        let bytes = &stream[at..];
        let query = head
            .query
            .map(|span| String::from_utf8(span.of(bytes).to_vec()).unwrap());
        at += head.consumed;
        let rest = &stream[at..];
        let body = match head.body {
            BodyFraming::None => Ok(Some((Vec::new(), 0))),
            BodyFraming::Length(length) => Ok(usize::try_from(length)
                .ok()
                .and_then(|length| Some((rest.get(..length)?.to_vec(), length)))),
            BodyFraming::Chunked => read_chunks(rest),
        };
        match body {
            Err(()) => return (seen, End::Refused),
            Ok(None) => return (seen, End::Clean),
            Ok(Some((body, len))) => {
                at += len;
                seen.push(Seen {
                    query,
                    http11: head.version == Version::Http11,
                    body,
                });
            }
        }
        if !head.keep_alive {
            return (seen, End::Clean);
        }
    }
}

/// Body and length on the wire; `None` when it is cut off.
fn read_chunks(input: &[u8]) -> Result<Option<(Vec<u8>, usize)>, ()> {
    let (mut decoder, mut body, mut at) = (ChunkDecoder::default(), Vec::new(), 0);
    while at < input.len() {
        let step = decoder.step(&input[at..]).map_err(drop)?;
        body.extend_from_slice(&input[at..][step.data]);
        at += step.consumed;
        if step.done {
            return Ok(Some((body, at)));
        }
    }
    Ok(None)
}

/// A connection whose client has sent all of `input` and then its FIN.
struct Wire {
    input: Vec<u8>,
    at: usize,
}

impl Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let len = buffer.remaining().min(self.input.len() - self.at);
        buffer.put_slice(&self.input[self.at..self.at + len]);
        self.at += len;
        Poll::Ready(Ok(()))
    }
}

impl Write for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Requests whose bodies hyper read to their end.
async fn read_hyper(input: Vec<u8>) -> Vec<Seen> {
    let log = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&log);
    let service = service_fn(move |request: Request<Incoming>| {
        let sink = Rc::clone(&sink);
        async move {
            let query = request.uri().query().map(str::to_owned);
            let http11 = request.version() == hyper::Version::HTTP_11;
            let mut body = pin!(request.into_body());
            let mut bytes = Vec::new();
            loop {
                match poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
                    None => break,
                    Some(Err(_)) => return Ok::<_, Infallible>(Response::new(String::new())),
                    Some(Ok(frame)) => {
                        bytes.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                    }
                }
            }
            sink.borrow_mut().push(Seen {
                query,
                http11,
                body: bytes,
            });
            Ok(Response::new(String::new()))
        }
    });
    let mut builder = Builder::new();
    builder
        .header_read_timeout(None)
        .half_close(true)
        .max_headers(HEADERS_MAX as usize);
    // An error is a refusal: what was read before it counts.
    drop(
        builder
            .serve_connection(Wire { input, at: 0 }, service)
            .await,
    );
    log.take()
}

const LINES: [&str; 14] = [
    "POST /v1/chat/completions HTTP/1.1",
    "POST /v1/chat/completions?n=1 HTTP/1.1",
    "GET /v1/models HTTP/1.1",
    "GET /healthz?a=b HTTP/1.0",
    "POST http://edge/v1/completions?q HTTP/1.1",
    "HEAD /readyz HTTP/1.1",
    "OPTIONS /v1/models HTTP/1.1",
    "PUT /v1/embeddings HTTP/1.1",
    "POST /v1/embeddings HTTP/1.0",
    "GET  / HTTP/1.1",
    "GET / HTTP/1.2",
    "OPTIONS * HTTP/1.1",
    "GET /#x HTTP/1.1",
    "GET /\tx HTTP/1.1",
];

const HARMLESS: [&str; 14] = [
    "Accept: */*",
    "X-Empty:",
    "Connection: keep-alive",
    "Connection: close",
    "Connection: x-a, keep-alive",
    "Upgrade: h2c",
    "Expect: 100-continue",
    "Content_Length: 3",
    "X-Content-Length: 3",
    "X-Transfer-Encoding: chunked",
    "Authorization: Bearer k",
    "TE: trailers",
    "Cookie: a=b",
    "X-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

const HOSTILE: [&str; 18] = [
    "Content-Length: 3",
    "Content-Length: 0",
    "Content-Length: 5, 5",
    "Content-Length: +3",
    "Content-Length: 03",
    "Content-Length:\t3 ",
    "Content-Length : 3",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: Chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: ,chunked",
    "Transfer-Encoding:\tchunked",
    "Transfer-Encoding\t: chunked",
    " Transfer-Encoding: chunked",
    "Host: other",
    "X: a\0b",
    "X: a\rTransfer-Encoding: chunked",
];

const CHUNKS: [&str; 12] = [
    "3\r\nabc\r\n",
    "a;ext=1\r\n0123456789\r\n",
    "0003\r\nabc\r\n",
    "C\r\nGET / HTTP/1\r\n",
    "5\r\n0\r\n\r\n\r\n",
    "3\nabc\n",
    "3 \r\nabc\r\n",
    "3\r\nabcd\r\n",
    "0x3\r\nabc\r\n",
    "+3\r\nabc\r\n",
    "3;a\nb\r\nabc\r\n",
    "00000000000000003\r\nabc\r\n",
];

/// One request: mostly well formed, now and then hostile.
fn request(dice: &mut Dice, out: &mut Vec<u8>) {
    let lines = if dice.one_in(12) {
        &LINES[..]
    } else {
        &LINES[..9]
    };
    let mut fields = vec!["Host: edge"];
    for _ in 0..dice.below(4) {
        fields.push(dice.pick(&HARMLESS));
    }
    let body = match dice.below(4) {
        0 => "",
        1 => "abc",
        2 => "chunked",
        _ => "GET / HTTP/1.1\r\nHost: smuggled\r\n\r\n",
    };
    let length = format!("Content-Length: {}", body.len());
    match body {
        "" => {}
        "chunked" => fields.push("Transfer-Encoding: chunked"),
        _ => fields.push(&length),
    }
    if dice.one_in(6) {
        fields.insert(dice.below(fields.len() + 1), dice.pick(&HOSTILE));
    }
    if dice.one_in(40) {
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(dice.pick(lines).as_bytes());
    out.extend_from_slice(b"\r\n");
    for field in fields {
        out.extend_from_slice(field.as_bytes());
        out.extend_from_slice(if dice.one_in(60) { b"\n" } else { b"\r\n" });
    }
    out.extend_from_slice(b"\r\n");
    if body == "chunked" {
        let chunks = if dice.one_in(5) {
            &CHUNKS[..]
        } else {
            &CHUNKS[..5]
        };
        for _ in 0..dice.below(3) {
            out.extend_from_slice(dice.pick(chunks).as_bytes());
        }
        let ends = [
            "0\r\n\r\n",
            "0\r\n\r\n",
            "0\r\nX: y\r\n\r\n",
            "00;e\r\n\r\n",
            "0\r\n",
            "0\n\n",
        ];
        out.extend_from_slice(dice.pick(&ends).as_bytes());
    } else {
        out.extend_from_slice(body.as_bytes());
    }
}

/// Proves [D-14], [P-50].
#[test]
fn d14_what_we_accept_hyper_frames_the_same_way() {
    let (seed, rounds) = (0x9112_2022, 30_000);
    let mut dice = Dice::new(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let (mut clean, mut refused, mut pipelined) = (0, 0, 0);
    for round in 0..rounds {
        let mut stream = Vec::new();
        for _ in 0..=dice.below(3) {
            request(&mut dice, &mut stream);
        }
        while dice.one_in(3) {
            dice.mutate(&mut stream, b"\r\n\t :,;0359aAxX\0\x0b\x7f\xc3chunked");
        }
        let (ours, end) = read_ours(&stream);
        let theirs = runtime.block_on(read_hyper(stream.clone()));
        let name = || format!("seed {seed:x} round {round}: {}", stream.escape_ascii());
        assert!(
            theirs.len() >= ours.len(),
            "{ours:#?}\nhyper {theirs:#?}\n{}",
            name()
        );
        assert_eq!(ours, theirs[..ours.len()], "{}", name());
        // Where nothing was refused, nobody may see more than we did.
        assert!(
            end == End::Refused || theirs.len() == ours.len(),
            "{theirs:#?}\n{}",
            name()
        );
        clean += usize::from(end == End::Clean && !ours.is_empty());
        refused += usize::from(end == End::Refused);
        pipelined += usize::from(ours.len() > 1);
    }
    assert!(
        clean * 10 >= rounds * 3,
        "only {clean} of {rounds} streams accepted whole"
    );
    assert!(
        refused * 10 >= rounds,
        "only {refused} of {rounds} streams refused"
    );
    assert!(
        pipelined * 10 >= rounds,
        "only {pipelined} streams of several requests"
    );
}
