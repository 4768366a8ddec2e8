//! A stream of requests read by us and by hyper: what both accept they frame alike.
//!
//! Lives on: one thread. View: the bytes of one connection. Bound: the input.
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

/// One request as a reader framed it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    query: Option<Vec<u8>>,
    http11: bool,
    body: Vec<u8>,
}

/// How our reading ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client or the framing said so, or the bytes ran out.
    Clean,
    Refused,
}

/// What we accept hyper accepts and frames alike, and it sees nothing behind an end that we took for
/// clean. It may take what we refuse, and refuse an authority whose form we do not judge: either ends
/// the connection and smuggles nothing. `[D-14]`
pub(crate) fn compare(stream: &[u8]) {
    let (ours, is_absolute, end) = read_ours(stream);
    if ours.is_empty() && end == End::Refused {
        return;
    }
    let theirs = futures_lite::future::block_on(read_hyper(stream.to_vec()));
    let both = ours.len().min(theirs.len());
    assert_eq!(ours[..both], theirs[..both]);
    let refused = ours.get(both);
    assert!(
        refused.is_none() || is_absolute[both],
        "hyper refuses {refused:?}"
    );
    let more = &theirs[both..];
    assert!(
        more.is_empty() || end == End::Refused,
        "hyper sees more: {more:?}"
    );
}

/// Requests, which of them have a target in absolute form, and the end.
fn read_ours(stream: &[u8]) -> (Vec<Seen>, Vec<bool>, End) {
    let (mut seen, mut is_absolute, mut at) = (Vec::new(), Vec::new(), 0);
    loop {
        let bytes = &stream[at..];
        let head = match parse_head(bytes) {
            Ok(Some(head)) => head,
            Ok(None) => return (seen, is_absolute, End::Clean),
            Err(_) => return (seen, is_absolute, End::Refused),
        };
        let rest = &bytes[head.consumed..];
        let body = match head.body {
            BodyFraming::None => Ok(Some((Vec::new(), 0))),
            BodyFraming::Length(length) => Ok(usize::try_from(length)
                .ok()
                .and_then(|length| Some((rest.get(..length)?.to_vec(), length)))),
            BodyFraming::Chunked => read_chunks(rest),
        };
        let (body, length) = match body {
            Ok(Some(whole)) => whole,
            Ok(None) => return (seen, is_absolute, End::Clean),
            Err(()) => return (seen, is_absolute, End::Refused),
        };
        at += head.consumed + length;
        let target = bytes.split(|&byte| byte == b' ').nth(1);
        is_absolute.push(target.is_some_and(|target| !target.starts_with(b"/")));
        seen.push(Seen {
            query: head.query.map(|span| span.of(bytes).to_vec()),
            http11: head.version == Version::Http11,
            body,
        });
        if !head.keep_alive {
            return (seen, is_absolute, End::Clean);
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

/// A connection whose client has sent everything and then its FIN.
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
    let service = service_fn(|request: Request<Incoming>| {
        let log = Rc::clone(&log);
        async move {
            let query = request.uri().query().map(|query| query.as_bytes().to_vec());
            let http11 = request.version() == hyper::Version::HTTP_11;
            let mut incoming = pin!(request.into_body());
            let mut body = Vec::new();
            while let Some(frame) = poll_fn(|cx| incoming.as_mut().poll_frame(cx)).await {
                let Ok(frame) = frame else {
                    return Ok::<_, Infallible>(Response::new(String::new()));
                };
                body.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            }
            log.borrow_mut().push(Seen {
                query,
                http11,
                body,
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
