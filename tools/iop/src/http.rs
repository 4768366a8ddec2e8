//! A small HTTP/1.1 client for commands: one request per connection, the body as it arrives.
//!
//! Lives on: a command's runtime. View: one answer. Bound: `HEAD_BYTES_MAX` of head, `PIECE_BYTES_MAX`
//! per piece of body, `TEXT_BYTES_MAX` for a body read whole.
//!
//! It is strict: an answer that ends before its framing says so is an error. A demo that took a broken
//! stream for a whole one would prove nothing.
use core::fmt;
use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

const HEAD_BYTES_MAX: u64 = 64 * 1024;
const PIECE_BYTES_MAX: usize = 64 * 1024;
const TEXT_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Why there was no answer, or not a whole one.
#[derive(Debug)]
pub(crate) enum HttpError {
    Connect {
        address: SocketAddr,
        cause: io::Error,
    },
    Broken(io::Error),
    /// The connection ended inside the head or the body.
    Cut,
    /// Not HTTP/1.1 as RFC 9112 writes it.
    Malformed(&'static str),
    TooLong,
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { address, cause } => write!(f, "cannot connect to {address}: {cause}"),
            Self::Broken(cause) => write!(f, "the connection broke: {cause}"),
            Self::Cut => f.write_str("the answer was cut off"),
            Self::Malformed(what) => write!(f, "the answer is malformed: {what}"),
            Self::TooLong => f.write_str("the answer is too long"),
        }
    }
}

impl std::error::Error for HttpError {}

impl From<io::Error> for HttpError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Cut,
            _ => Self::Broken(error),
        }
    }
}

/// What of the body is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// Bytes.
    Length(u64),
    /// Bytes of the chunk in progress; 0: a chunk head comes next.
    Chunk(u64),
    UntilClose,
    Nothing,
}

/// An answer whose head has been read.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    stream: BufReader<TcpStream>,
    rest: Rest,
}

/// Sends a GET.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Result<Answer, HttpError> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    send(address, head.as_bytes()).await
}

/// Sends a POST of JSON. `headers`: more header lines, each with its end.
pub(crate) async fn post(
    address: SocketAddr,
    path: &str,
    headers: &str,
    body: &str,
) -> Result<Answer, HttpError> {
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n{headers}\r\n{body}",
        body.len()
    );
    send(address, request.as_bytes()).await
}

async fn send(address: SocketAddr, request: &[u8]) -> Result<Answer, HttpError> {
    let connected = TcpStream::connect(address).await;
    let mut stream = connected.map_err(|cause| HttpError::Connect { address, cause })?;
    stream.set_nodelay(true)?;
    stream.write_all(request).await?;
    let mut stream = BufReader::new(stream);
    let (status, rest) = head(&mut stream).await?;
    Ok(Answer {
        status,
        stream,
        rest,
    })
}

async fn head(stream: &mut BufReader<TcpStream>) -> Result<(u16, Rest), HttpError> {
    let mut stream = stream.take(HEAD_BYTES_MAX);
    let status_line = line(&mut stream).await?;
    let rest = status_line
        .strip_prefix("HTTP/1.1 ")
        .ok_or(HttpError::Malformed("version"))?;
    let digits = rest.get(..3).ok_or(HttpError::Malformed("status"))?;
    let status = digits.parse().map_err(|_| HttpError::Malformed("status"))?;
    let mut rest = Rest::UntilClose;
    loop {
        let field = line(&mut stream).await?;
        if field.is_empty() {
            break;
        }
        let (name, value) = field.split_once(':').ok_or(HttpError::Malformed("field"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(HttpError::Malformed("transfer coding"));
            }
            rest = Rest::Chunk(0);
        } else if name.eq_ignore_ascii_case("content-length") && rest == Rest::UntilClose {
            rest = Rest::Length(value.parse().map_err(|_| HttpError::Malformed("length"))?);
        }
    }
    Ok((
        status,
        if matches!(status, 204 | 304) {
            Rest::Nothing
        } else {
            rest
        },
    ))
}

/// One line without its end.
async fn line(stream: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> Result<String, HttpError> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    match line.strip_suffix("\r\n") {
        Some(text) => Ok(text.to_owned()),
        None if line.len() as u64 >= HEAD_BYTES_MAX => Err(HttpError::TooLong),
        None => Err(HttpError::Cut),
    }
}

impl Answer {
    /// Replaces `piece` with the next bytes of the body as they arrive; `false` at its end.
    pub(crate) async fn next(&mut self, piece: &mut Vec<u8>) -> Result<bool, HttpError> {
        piece.clear();
        let most = match &mut self.rest {
            Rest::Nothing | Rest::Length(0) => return Ok(false),
            Rest::UntilClose => PIECE_BYTES_MAX,
            Rest::Length(left) => usize::try_from(*left).unwrap_or(PIECE_BYTES_MAX),
            Rest::Chunk(left) => {
                if *left == 0 {
                    *left = chunk_head(&mut self.stream).await?;
                }
                if *left == 0 {
                    self.rest = Rest::Nothing;
                    return Ok(false);
                }
                usize::try_from(*left).unwrap_or(PIECE_BYTES_MAX)
            }
        };
        let arrived = self.stream.fill_buf().await?;
        let taken = arrived.len().min(most);
        piece.extend_from_slice(&arrived[..taken]);
        self.stream.consume(taken);
        match &mut self.rest {
            Rest::UntilClose => return Ok(taken > 0),
            _ if taken == 0 => return Err(HttpError::Cut),
            Rest::Length(left) => *left -= taken as u64,
            Rest::Chunk(left) => {
                *left -= taken as u64;
                if *left == 0 && !line(&mut (&mut self.stream).take(2)).await?.is_empty() {
                    return Err(HttpError::Malformed("chunk end"));
                }
            }
            Rest::Nothing => {}
        }
        Ok(true)
    }

    /// The whole body.
    pub(crate) async fn text(mut self) -> Result<String, HttpError> {
        let (mut text, mut piece) = (Vec::new(), Vec::new());
        while self.next(&mut piece).await? {
            text.extend_from_slice(&piece);
            if text.len() > TEXT_BYTES_MAX {
                return Err(HttpError::TooLong);
            }
        }
        String::from_utf8(text).map_err(|_| HttpError::Malformed("not UTF-8"))
    }
}

/// Size of the next chunk; 0 after the last one and its trailers.
async fn chunk_head(stream: &mut BufReader<TcpStream>) -> Result<u64, HttpError> {
    let mut stream = stream.take(HEAD_BYTES_MAX);
    let head = line(&mut stream).await?;
    let digits = head.split(';').next().unwrap_or_default().trim();
    let size = u64::from_str_radix(digits, 16).map_err(|_| HttpError::Malformed("chunk size"))?;
    while size == 0 && !line(&mut stream).await?.is_empty() {}
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// Answers one connection with `bytes`, in pieces of `cut` bytes, then closes.
    async fn answer(bytes: &'static [u8], cut: usize) -> Result<(u16, String), HttpError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 512];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].ends_with(b"\r\n\r\n"));
            stream.set_nodelay(true).unwrap();
            for piece in bytes.chunks(cut) {
                if stream.write_all(piece).await.is_err() {
                    return; // the client has seen enough
                }
            }
        });
        let answer = async {
            let answer = get(address, "/").await?;
            Ok((answer.status, answer.text().await?))
        };
        let result = answer.await;
        server.await.unwrap();
        result
    }

    fn run<R>(work: impl Future<Output = R>) -> R {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(work)
    }

    #[test]
    fn bodies_of_every_framing_are_read_whole_at_any_cut() {
        let length = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".as_slice();
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nt: u\r\n\r\n";
        let close = b"HTTP/1.1 503 No\r\n\r\nhello".as_slice();
        for cut in [1, 2, 3, 7, 4_096] {
            for (bytes, status) in [(length, 200), (chunked.as_slice(), 200), (close, 503)] {
                assert_eq!(
                    run(answer(bytes, cut)).unwrap(),
                    (status, "hello".to_owned())
                );
            }
        }
        assert_eq!(
            run(answer(b"HTTP/1.1 204 x\r\n\r\n", 9)).unwrap(),
            (204, String::new())
        );
    }

    #[test]
    fn an_answer_that_stops_early_is_no_answer() {
        for bytes in [
            b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello".as_slice(),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Le",
            b"",
        ] {
            assert!(
                matches!(run(answer(bytes, 4_096)), Err(HttpError::Cut)),
                "{bytes:?}"
            );
        }
        for bytes in [
            b"SSH-2.0-x\r\n\r\n".as_slice(),
            b"HTTP/1.1 2xx\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        ] {
            let result = run(answer(bytes, 4_096));
            assert!(
                matches!(result, Err(HttpError::Malformed(_) | HttpError::Cut)),
                "{result:?}"
            );
        }
    }
}
