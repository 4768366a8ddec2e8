//! The scripted provider: plain HTTP/1.1 on a raw socket, byte for byte what a test says.
use core::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::within;

pub(crate) struct Provider {
    pub(crate) listener: TcpListener,
}

impl Provider {
    pub(crate) async fn start() -> Self {
        Self {
            listener: TcpListener::bind("127.0.0.1:0").await.unwrap(),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// The next request, read whole, on a connection of its own.
    pub(crate) async fn request(&self) -> Call {
        let (stream, _) = within("a provider call", self.listener.accept())
            .await
            .unwrap();
        stream.set_nodelay(true).unwrap();
        let mut call = Call {
            stream,
            head: String::new(),
            body: vec![],
        };
        call.read_request().await;
        call
    }

    /// Answers every request with `body` from now on, in the background.
    pub(crate) fn serve_all(self, body: &'static str) {
        tokio::spawn(async move {
            while let Ok((stream, _)) = self.listener.accept().await {
                tokio::spawn(async move {
                    let mut call = Call {
                        stream,
                        head: String::new(),
                        body: vec![],
                    };
                    while call.next_request().await {
                        call.answer("200 OK", body.as_bytes()).await;
                    }
                });
            }
        });
    }

    /// Nobody has dialled. True only together with something that has happened.
    pub(crate) fn is_idle(&self) -> bool {
        let accepted = futures_util::FutureExt::now_or_never(self.listener.accept());
        accepted.is_none()
    }
}

/// One provider connection and the last request on it.
pub(crate) struct Call {
    pub(crate) stream: TcpStream,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Call {
    /// Another request on the same connection.
    pub(crate) async fn read_request(&mut self) {
        assert!(
            within("a whole request", self.next_request()).await,
            "the agent closed"
        );
    }

    /// False when the agent closed instead.
    async fn next_request(&mut self) -> bool {
        let mut bytes = vec![];
        let split = loop {
            let at = bytes.windows(4).position(|w| w == b"\r\n\r\n");
            if let Some(at) = at {
                break at + 4;
            }
            if !self.more(&mut bytes).await {
                return false;
            }
        };
        self.head = String::from_utf8(bytes[..split].to_vec()).unwrap();
        let length = self
            .header("content-length")
            .map_or(0, |n| n.parse().unwrap());
        while bytes.len() < split + length {
            if !self.more(&mut bytes).await {
                return false;
            }
        }
        self.body = bytes.split_off(split);
        assert_eq!(self.body.len(), length);
        true
    }

    async fn more(&mut self, bytes: &mut Vec<u8>) -> bool {
        matches!(self.stream.read_buf(bytes).await, Ok(count) if count > 0)
    }

    pub(crate) fn request_line(&self) -> &str {
        self.head.lines().next().unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let write = self.stream.write_all(bytes.as_ref());
        within("a write of the provider", write).await.unwrap();
    }

    /// A whole answer with a length; the connection stays.
    pub(crate) async fn answer(&mut self, status: &str, body: &[u8]) {
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.write(head).await;
        self.write(body).await;
    }

    /// Head of a chunked answer.
    pub(crate) async fn start_chunked(&mut self) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        self.write(head).await;
    }

    pub(crate) async fn chunk(&mut self, bytes: &[u8]) {
        self.write([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat())
            .await;
    }

    pub(crate) async fn end_chunked(&mut self) {
        self.write("0\r\n\r\n").await;
    }

    /// Closes by reset.
    pub(crate) fn reset(self) {
        socket2::SockRef::from(&self.stream)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
    }

    /// How long it took until the agent's end of the connection was gone.
    pub(crate) async fn gone(&mut self) -> Duration {
        let start = Instant::now();
        let read = async {
            let mut rest = [0; 1024];
            loop {
                match self.stream.read(&mut rest).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
            }
        };
        within("the provider sees the abort", read).await;
        start.elapsed()
    }
}
