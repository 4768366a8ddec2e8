//! A scripted model server: its answers follow from the requests, and it writes down what it did.
//!
//! Lives on: a process of its own, one thread. View: its callers. Bound: `HEAD_BYTES_MAX`,
//! `BODY_BYTES_MAX` a request; a task per connection.
//!
//! It speaks the raw surfaces as they are asked for and Ollama's `/api/chat`, lists its models for
//! probes, and tells at `GET /chaos` how many calls it has open.
use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::ask::{Ask, Fate, Surface, digest_of};
use crate::error::Error;
use crate::journal::Writer;

const HEAD_BYTES_MAX: u64 = 64 * 1024;
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What every call must carry, as `name: value`, when it is set: a managed credential.
pub(crate) const CREDENTIAL: &str = "IOP_CHAOS_CREDENTIAL";
/// What a model server of the stage can be asked for.
const TARGETS: [&str; 2] = ["t", "words"];

#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) name: String,
    pub(crate) listen: String,
    pub(crate) journal: PathBuf,
}

struct Server {
    name: String,
    journal: Writer,
    credential: Option<String>,
    calls: Cell<u64>,
    open: Cell<u64>,
}

/// Serves until it is ended.
pub(crate) async fn run(options: Options) -> Result<bool, Error> {
    let file = options.journal.display().to_string();
    let journal = Writer::open(&options.journal).map_err(Error::io(file))?;
    let listener = TcpListener::bind(&options.listen).await;
    let listener = listener.map_err(Error::io(format!("listen on {}", options.listen)))?;
    let server = Rc::new(Server {
        name: options.name,
        journal,
        credential: std::env::var(CREDENTIAL).ok(),
        calls: Cell::new(0),
        open: Cell::new(0),
    });
    loop {
        let (stream, _) = listener.accept().await.map_err(Error::io("accept"))?;
        let server = Rc::clone(&server);
        tokio::task::spawn_local(async move {
            let _left = server.connection(stream).await; // its journal says so
        });
    }
}

struct Request {
    path: String,
    head: String,
    body: Vec<u8>,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Whole,
    Left,
    Broken,
}

impl Server {
    async fn connection(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut stream = BufReader::new(stream);
        let mut nth = 0;
        while let Some(request) = read(&mut stream).await? {
            nth += 1;
            let Some(surface) = Surface::of_provider(&request.path) else {
                let (status, body) = self.about(&request.path);
                stream.write_all(&whole(status, &body)).await?;
                continue;
            };
            let Some(ask) = Ask::find(&request.body) else {
                stream
                    .write_all(&whole("400 Bad Request", "{\"error\":\"no mark\"}"))
                    .await?;
                continue;
            };
            if !self.is_allowed(&request.head) {
                stream
                    .write_all(&whole("401 Unauthorized", "{\"error\":\"key\"}"))
                    .await?;
                continue;
            }
            if self.call(&mut stream, surface, &ask, &request, nth).await? != End::Whole {
                return Ok(());
            }
        }
        Ok(())
    }

    fn is_allowed(&self, head: &str) -> bool {
        let wanted = self.credential.as_deref();
        wanted.is_none_or(|wanted| head.lines().any(|line| line == wanted))
    }

    /// What is no call: probes, and the harness's own question.
    fn about(&self, path: &str) -> (&'static str, String) {
        match path {
            "/v1/models" => {
                let model = |name: &&str| format!("{{\"id\":\"{name}\",\"object\":\"model\"}}");
                let models: Vec<_> = TARGETS.iter().map(model).collect();
                let list = models.join(",");
                (
                    "200 OK",
                    format!("{{\"object\":\"list\",\"data\":[{list}]}}"),
                )
            }
            "/api/show" => ("200 OK", "{\"capabilities\":[\"completion\"]}".to_owned()),
            "/chaos" => ("200 OK", format!("{{\"open\":{}}}", self.open.get())),
            _ => ("404 Not Found", "{\"error\":\"no such path\"}".to_owned()),
        }
    }

    async fn call(
        &self,
        stream: &mut BufReader<TcpStream>,
        surface: Surface,
        ask: &Ask,
        request: &Request,
        nth: u32,
    ) -> io::Result<End> {
        self.calls.set(self.calls.get() + 1);
        let tag = format!("{}.{}.{}", self.name, self.journal.life, self.calls.get());
        self.journal.line(&format!(
            "B {tag} {:016x} {} {} {nth}",
            ask.id,
            request.path,
            digest_of(&request.body)
        ))?;
        self.open.set(self.open.get() + 1);
        let end = self.answer(stream, surface, ask, &tag).await;
        self.open.set(self.open.get() - 1);
        let end = end.unwrap_or(End::Left);
        let how = match end {
            End::Whole => "whole",
            End::Left => "left",
            End::Broken => "broken",
        };
        self.journal.line(&format!("E {tag} {how}"))?;
        Ok(end)
    }

    async fn answer(
        &self,
        stream: &mut BufReader<TcpStream>,
        surface: Surface,
        ask: &Ask,
        tag: &str,
    ) -> io::Result<End> {
        let fate = ask.fate.at(&self.name);
        if fate == Fate::Silent {
            return Ok(left(stream).await);
        }
        let chunked = ask.stream || surface == Surface::Words || ask.id % 2 == 1;
        let mut sent = Vec::new();
        self.journal.line(&format!("O {tag}"))?;
        stream
            .write_all(head(surface, ask, tag, chunked).as_bytes())
            .await?;
        for n in 0..=ask.pieces {
            if n == ask.pieces / 2 {
                match fate {
                    Fate::SilentHalf => return Ok(left(stream).await),
                    Fate::Broken => return Ok(End::Broken),
                    _ => {}
                }
            }
            let pause = Duration::from_millis(u64::from(ask.pause_ms));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                end = left(stream) => return Ok(end),
            }
            let piece = ask.piece(surface, tag, n);
            sent.extend_from_slice(&piece);
            if n == ask.pieces {
                let (digest, bytes) = (digest_of(&sent), sent.len());
                self.journal.line(&format!("W {tag} {digest} {bytes}"))?;
            }
            write(stream, &piece, chunked).await?;
        }
        if chunked {
            stream.write_all(b"0\r\n\r\n").await?;
        }
        Ok(End::Whole)
    }
}

/// Waits for the caller to leave; one that sends more instead is as good as gone.
async fn left(stream: &mut BufReader<TcpStream>) -> End {
    let _bytes = stream.fill_buf().await;
    End::Left
}

async fn write(stream: &mut BufReader<TcpStream>, piece: &[u8], chunked: bool) -> io::Result<()> {
    if piece.is_empty() {
        return Ok(()); // an empty chunk would be the last one
    }
    if !chunked {
        return stream.write_all(piece).await;
    }
    let mut bytes = format!("{:x}\r\n", piece.len()).into_bytes();
    bytes.extend_from_slice(piece);
    bytes.extend_from_slice(b"\r\n");
    stream.write_all(&bytes).await
}

fn head(surface: Surface, ask: &Ask, tag: &str, chunked: bool) -> String {
    let status = match ask.fate {
        Fate::Refused => "429 Too Many Requests",
        _ => "200 OK",
    };
    let kind = match surface {
        Surface::Words => "application/x-ndjson",
        _ if ask.is_stream() => "text/event-stream",
        _ => "application/json",
    };
    let length = ask.answer(surface, tag).len();
    let framing = if chunked {
        "transfer-encoding: chunked".to_owned()
    } else {
        format!("content-length: {length}")
    };
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n")
}

fn whole(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = "content-type: application/json\r\ncontent-length";
    format!("HTTP/1.1 {status}\r\n{head}: {length}\r\n\r\n{body}").into_bytes()
}

/// The next request; `None`: the caller closed between two.
async fn read(stream: &mut BufReader<TcpStream>) -> io::Result<Option<Request>> {
    let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut head = String::new();
    {
        let mut limited = (&mut *stream).take(HEAD_BYTES_MAX);
        while !head.ends_with("\r\n\r\n") {
            if limited.read_line(&mut head).await? == 0 {
                return if head.is_empty() {
                    Ok(None)
                } else {
                    Err(bad("half a head"))
                };
            }
        }
    }
    let head = head.replace("\r\n", "\n");
    let path = head.split(' ').nth(1).ok_or_else(|| bad("request line"))?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.trim().parse::<usize>().ok())?
    });
    let length = length.unwrap_or(0);
    if length > BODY_BYTES_MAX {
        return Err(bad("a body too long"));
    }
    let path = path.to_owned();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(Some(Request { path, head, body }))
}
