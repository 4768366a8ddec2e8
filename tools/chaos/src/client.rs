//! One client of an Edge, well-behaved or not: a connection, a request, and what was seen of the answer.
//!
//! Lives on: a client's task. View: one connection. Bound: `HEAD_BYTES_MAX`, `BODY_BYTES_MAX`, and
//! `PATIENCE` for an exchange: whoever waits longer has been forgotten.
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader,
};
use tokio::net::{TcpSocket, TcpStream};

/// Longer than any chain of waits that the stage configures: queue, two stalls, their graces.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);
const HEAD_BYTES_MAX: u64 = 64 * 1024;
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
const PIECE_BYTES: usize = 64 * 1024;
/// What a slow reader takes at once, and how long it rests between.
const SLOW_BYTES: usize = 4 * 1024;
const SLOW_REST: Duration = Duration::from_millis(8);
/// Its kernel holds no more for it than the least that is possible.
const SLOW_WINDOW_BYTES: u32 = 4 * 1024;

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// When a client has had enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    Never,
    /// Milliseconds after it has asked.
    After(u32),
    /// Bytes of the answer's body.
    Bytes(u32),
    /// It sends this many bytes of its request, and goes.
    Within(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Manner {
    pub(crate) leave: Leave,
    pub(crate) is_slow: bool,
    /// Its close is a reset.
    pub(crate) resets: bool,
}

impl Manner {
    /// Nothing about the connection forbids another request on it.
    pub(crate) fn keeps(&self) -> bool {
        self.leave == Leave::Never && !self.is_slow && !self.resets
    }
}

/// How an answer ended, for one who counts on its framing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Clean,
    /// The connection ended, or its framing broke, before the answer did.
    Cut,
    /// The client left.
    Left,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// `x-iop-error-source`: whose words an error is.
    pub(crate) source: Option<String>,
    pub(crate) body: Vec<u8>,
    pub(crate) end: End,
    closes: bool,
}

#[cfg(test)]
impl Answer {
    pub(crate) fn of(status: u16, source: Option<&str>, body: &[u8], end: End) -> Self {
        Self {
            status,
            source: source.map(str::to_owned),
            body: body.to_vec(),
            end,
            closes: false,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Seen {
    /// No connection, or none that was still good.
    Unreachable,
    /// The connection ended before a head.
    Nothing,
    Answer(Answer),
    /// The client left before a head.
    Left,
    /// Neither an answer nor an end in time.
    Late,
}

/// Where clients connect.
#[derive(Clone, Debug)]
pub(crate) struct Door {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Arc<ClientConfig>>,
}

pub(crate) struct Connection {
    stream: BufReader<Box<dyn Stream>>,
}

impl Connection {
    pub(crate) async fn open(door: &Door, manner: Manner) -> io::Result<Self> {
        let stream = if manner.is_slow {
            let socket = TcpSocket::new_v4()?;
            socket.set_recv_buffer_size(SLOW_WINDOW_BYTES)?;
            socket.connect(door.address).await?
        } else {
            TcpStream::connect(door.address).await?
        };
        stream.set_nodelay(true)?;
        if manner.resets {
            stream.set_zero_linger()?;
        }
        let stream: Box<dyn Stream> = match &door.tls {
            None => Box::new(stream),
            Some(tls) => {
                let connector = tokio_rustls::TlsConnector::from(Arc::clone(tls));
                let name = ServerName::try_from("edge").expect("a DNS name");
                Box::new(connector.connect(name, stream).await?)
            }
        };
        let capacity = if manner.is_slow {
            SLOW_BYTES
        } else {
            PIECE_BYTES
        };
        Ok(Self {
            stream: BufReader::with_capacity(capacity, stream),
        })
    }

    /// One exchange; the connection is good for another one if it says so.
    pub(crate) async fn ask(&mut self, request: &[u8], manner: Manner) -> (Seen, bool) {
        let limit = match manner.leave {
            Leave::After(ms) => Duration::from_millis(u64::from(ms)),
            _ => PATIENCE,
        };
        let mut answer = None;
        let done = tokio::time::timeout(limit, self.exchange(request, manner, &mut answer)).await;
        let seen = match (done, answer) {
            (Err(_), answer) if matches!(manner.leave, Leave::After(_)) => {
                answer.map_or(Seen::Left, |answer| Seen::Answer(left(answer)))
            }
            (Err(_), _) => Seen::Late,
            (Ok(Err(_)), Some(answer)) => Seen::Answer(Answer {
                end: End::Cut,
                ..answer
            }),
            (Ok(Err(_)), None) => Seen::Nothing,
            (Ok(Ok(())), answer) => answer.map_or(Seen::Left, Seen::Answer),
        };
        let again = match &seen {
            Seen::Answer(answer) => answer.end == End::Clean && !answer.closes,
            _ => false,
        };
        (seen, again && manner.keeps())
    }

    async fn exchange(
        &mut self,
        request: &[u8],
        manner: Manner,
        answer: &mut Option<Answer>,
    ) -> io::Result<()> {
        if let Leave::Within(bytes) = manner.leave {
            let bytes = request.len().min(bytes as usize);
            self.stream.write_all(&request[..bytes]).await?;
            return self.stream.flush().await;
        }
        // A refusal may come before the request is sent to its end, and the connection close then.
        let sent = async {
            self.stream.write_all(request).await?;
            self.stream.flush().await
        };
        let unsent = sent.await.err();
        let read = self.head().await;
        let (head, rest) = match (read, unsent) {
            (Ok(read), _) => read,
            (Err(_), Some(error)) | (Err(error), None) => return Err(error),
        };
        let answer = answer.insert(head);
        self.body(rest, manner, answer).await
    }

    async fn head(&mut self) -> io::Result<(Answer, Rest)> {
        let mut stream = (&mut self.stream).take(HEAD_BYTES_MAX);
        let line = line(&mut stream).await?;
        let status = line
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok());
        let mut answer = Answer {
            status: status.ok_or_else(|| malformed("status line"))?,
            source: None,
            body: Vec::new(),
            end: End::Cut,
            closes: false,
        };
        let mut rest = None;
        loop {
            let field = self::line(&mut stream).await?;
            if field.is_empty() {
                break;
            }
            let (name, value) = field.split_once(':').ok_or_else(|| malformed("field"))?;
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "transfer-encoding" => rest = Some(Rest::Chunked),
                "content-length" => {
                    let length = value.parse().map_err(|_| malformed("length"))?;
                    rest = Some(Rest::Length(length));
                }
                "x-iop-error-source" => answer.source = Some(value.to_owned()),
                "connection" => answer.closes = value.eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
        // An end that only a close marks looks the same when the answer was cut: nobody may send it.
        Ok((answer, rest.ok_or_else(|| malformed("framing"))?))
    }

    async fn body(&mut self, rest: Rest, manner: Manner, answer: &mut Answer) -> io::Result<()> {
        loop {
            let length = match rest {
                Rest::Length(length) => length,
                Rest::Chunked => {
                    let line = line(&mut (&mut self.stream).take(HEAD_BYTES_MAX)).await?;
                    usize::from_str_radix(&line, 16).map_err(|_| malformed("chunk size"))?
                }
            };
            if answer.body.len() + length > BODY_BYTES_MAX {
                return Err(malformed("a body too long"));
            }
            if !self.piece(length, manner, answer).await? {
                answer.end = End::Left;
                return Ok(());
            }
            if rest == Rest::Chunked {
                let line = line(&mut (&mut self.stream).take(2)).await?;
                if !line.is_empty() {
                    return Err(malformed("chunk end"));
                }
            }
            if rest != Rest::Chunked || length == 0 {
                answer.end = End::Clean;
                return Ok(());
            }
        }
    }

    /// Takes `length` bytes; `false`: the client has had enough of them.
    async fn piece(
        &mut self,
        mut length: usize,
        manner: Manner,
        answer: &mut Answer,
    ) -> io::Result<bool> {
        while length > 0 {
            if manner.is_slow {
                tokio::time::sleep(SLOW_REST).await;
            }
            let bytes = self.stream.fill_buf().await?;
            if bytes.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let taken = bytes.len().min(length);
            answer.body.extend_from_slice(&bytes[..taken]);
            self.stream.consume(taken);
            length -= taken;
            if matches!(manner.leave, Leave::Bytes(most) if answer.body.len() >= most as usize) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn left(answer: Answer) -> Answer {
    match answer.end {
        End::Clean => answer,
        End::Cut | End::Left => Answer {
            end: End::Left,
            ..answer
        },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    Length(usize),
    Chunked,
}

async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<String> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let text = line.strip_suffix("\r\n").map(str::to_owned);
    text.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// A GET that is answered with 200 within `limit`: what an operator reads.
pub(crate) async fn get(from: SocketAddr, path: &str, limit: Duration) -> Option<String> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n\r\n");
    let (status, body) = order(from, &head, limit).await?;
    (status == 200).then_some(body)
}

/// Sends `request` as it stands; status and body of the answer.
pub(crate) async fn order(
    from: SocketAddr,
    request: &str,
    limit: Duration,
) -> Option<(u16, String)> {
    let door = Door {
        address: from,
        tls: None,
    };
    let manner = Manner {
        leave: Leave::Never,
        is_slow: false,
        resets: false,
    };
    let asked = async {
        let mut connection = Connection::open(&door, manner).await.ok()?;
        match connection.ask(request.as_bytes(), manner).await.0 {
            Seen::Answer(answer) if answer.end == End::Clean => {
                Some((answer.status, String::from_utf8(answer.body).ok()?))
            }
            _ => None,
        }
    };
    tokio::time::timeout(limit, asked).await.ok().flatten()
}
