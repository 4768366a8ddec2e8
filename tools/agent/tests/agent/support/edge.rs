//! The scripted Edge: accepts what an agent dials, and says exactly what a test tells it to.
use std::sync::Arc;

use iop_agent::NodeConfig;
use iop_agent::config::Security;
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{
    Adapter, CancelRequest, FrameKind, Message, Metadata, NodeConfig as Payload, NodeReadyResponse,
    Pong, RegisterResponse, RunEvent, RunEventKind, RunRequest, TunnelFrame, TunnelRequest,
};
use iop_proto::framing::{Assembler, Kind, encode_envelope};
use iop_proto::limits::{ALPN, ENVELOPE_TO_EDGE_BYTES_MAX, PLAINTEXT_PREFACE, RUN_DELTA_BYTES};
use iop_proto::map;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::pki::{EDGE_ID, Leaf, NODE_ID, Pki};
use super::within;

/// A listener for agents.
pub(crate) struct Edge {
    pub(crate) listener: TcpListener,
    tls: Option<tokio_rustls::TlsAcceptor>,
    security: Security,
    _pki: Option<Pki>,
}

impl Edge {
    /// Mutual TLS with a good identity.
    pub(crate) async fn start() -> Self {
        Self::with(Pki::new(), &Leaf::of(EDGE_ID)).await
    }

    /// Mutual TLS, presenting `leaf`.
    pub(crate) async fn with(pki: Pki, leaf: &Leaf) -> Self {
        let tls = pki.edge(leaf, &[ALPN]);
        let security = pki.node(&Leaf::of(NODE_ID));
        Self::listen(Some(tls), security, Some(pki)).await
    }

    pub(crate) async fn plaintext() -> Self {
        Self::listen(None, Security::Plaintext, None).await
    }

    /// On a port that somebody dials already.
    pub(crate) async fn plaintext_on(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        Self {
            listener,
            ..Self::plaintext().await
        }
    }

    pub(crate) async fn listen(
        tls: Option<rustls::ServerConfig>,
        security: Security,
        pki: Option<Pki>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tls = tls.map(|tls| tokio_rustls::TlsAcceptor::from(Arc::new(tls)));
        Self {
            listener,
            tls,
            security,
            _pki: pki,
        }
    }

    /// From the next handshake on it presents, and demands, what `tls` says.
    pub(crate) fn present(&mut self, tls: rustls::ServerConfig) {
        self.tls = Some(tokio_rustls::TlsAcceptor::from(Arc::new(tls)));
    }

    /// What an agent needs to find this Edge.
    pub(crate) fn config(&self) -> NodeConfig {
        let port = self.listener.local_addr().unwrap().port();
        super::config(port, self.security.clone())
    }

    /// The next dial, before anything is said on it.
    pub(crate) async fn dialled(&self) -> TcpStream {
        within("a dial", self.listener.accept()).await.unwrap().0
    }

    /// The next connection whose handshake succeeds or not.
    pub(crate) async fn handshake(&self) -> Result<Conn, std::io::Error> {
        let stream = self.dialled().await;
        within("the handshake", self.greet(stream)).await
    }

    async fn greet(&self, mut stream: TcpStream) -> Result<Conn, std::io::Error> {
        if let Some(tls) = &self.tls {
            return Ok(Conn::new(tls.accept(stream).await?));
        }
        let mut preface = [0; PLAINTEXT_PREFACE.len()];
        stream.write_all(PLAINTEXT_PREFACE).await?;
        stream.read_exact(&mut preface).await?;
        assert_eq!(&preface, PLAINTEXT_PREFACE);
        Ok(Conn::new(stream))
    }

    pub(crate) async fn accept(&self) -> Conn {
        self.handshake().await.unwrap()
    }

    /// A connection that is dispatch-ready under `payload`.
    pub(crate) async fn ready(&self, payload: Payload) -> Conn {
        let mut conn = self.accept().await;
        conn.register(payload).await;
        conn.acknowledge().await;
        conn
    }
}

trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Socket for T {}

/// One connection of an agent.
pub(crate) struct Conn {
    stream: Box<dyn Socket>,
    assembler: Assembler,
    /// Of the message received last, as it stood on the wire.
    pub(crate) payload: Vec<u8>,
    /// Pings seen and answered.
    pub(crate) pings: u32,
    pub(crate) pongs: Vec<u64>,
    /// The agent has said that it paces its answers.
    pub(crate) paces: bool,
}

/// What the agent sent.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) id: u64,
    pub(crate) reply_to: u64,
    pub(crate) message: Message,
}

impl Conn {
    fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let assembler = Assembler::new(ENVELOPE_TO_EDGE_BYTES_MAX);
        Self {
            stream: Box::new(stream),
            assembler,
            payload: vec![],
            pings: 0,
            pongs: vec![],
            paces: false,
        }
    }

    /// The next message other than ping, pong and features; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> Option<Received> {
        within("a message of the agent", self.read()).await
    }

    async fn read(&mut self) -> Option<Received> {
        loop {
            if let Some(received) = self.take().await {
                return Some(received);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Option<()> {
        let mut buffer = vec![0; 64 * 1024];
        match self.stream.read(&mut buffer).await {
            Ok(0) | Err(_) => None,
            Ok(count) => {
                self.assembler.push(&buffer[..count]);
                Some(())
            }
        }
    }

    /// What has arrived whole; pings are answered, pongs and features noted.
    async fn take(&mut self) -> Option<Received> {
        while let Some(envelope) = self.assembler.next().unwrap() {
            let Kind::Known(kind) = envelope.kind else {
                panic!("{envelope:?}")
            };
            assert!(kind.from_node(), "{kind:?}");
            match map::decode(kind, &envelope.payload).unwrap() {
                Message::Ping(ping) => {
                    self.pings += 1;
                    self.send(0, Message::Pong(Pong { seq: ping.seq })).await;
                }
                Message::Pong(pong) => self.pongs.push(pong.seq),
                Message::Features(features) => self.paces = features.window,
                message => {
                    self.payload = envelope.payload.to_vec();
                    let (id, reply_to) = (envelope.id, envelope.reply_to);
                    return Some(Received {
                        id,
                        reply_to,
                        message,
                    });
                }
            }
        }
        None
    }

    pub(crate) async fn message(&mut self) -> Received {
        self.next().await.expect("the agent closed the connection")
    }

    /// Nothing but pings until the agent closes.
    pub(crate) async fn closed(&mut self) {
        if let Some(received) = self.next().await {
            panic!("expected the end of the stream, got {received:?}");
        }
    }

    /// Reads on until `done`; nothing but ping and pong may arrive meanwhile.
    pub(crate) async fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let read = async {
            while !done(self) {
                self.fill().await.expect("the agent closed");
                if let Some(received) = self.take().await {
                    panic!("{received:?}");
                }
            }
        };
        within(what, read).await;
    }

    pub(crate) async fn send(&mut self, reply_to: u64, message: Message) {
        self.send_all(&[(0, reply_to, message)]).await;
    }

    /// Several envelopes in one write.
    pub(crate) async fn send_all(&mut self, messages: &[(u64, u64, Message)]) {
        let mut bytes = vec![];
        for (id, reply_to, message) in messages {
            let (kind, payload) = map::encode(message);
            encode_envelope(kind, *id, *reply_to, &payload, &mut bytes).unwrap();
        }
        self.write(&bytes).await;
    }

    /// Bytes as they are. A connection the agent has closed swallows them.
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        let write = async {
            let _ = self.stream.write_all(bytes).await;
            let _ = self.stream.flush().await;
        };
        within("a write to the agent", write).await;
    }

    /// Expects RegisterRequest, accepts it.
    pub(crate) async fn register(&mut self, payload: Payload) {
        let received = self.message().await;
        let Message::RegisterRequest(request) = received.message else {
            panic!("{received:?}")
        };
        assert_eq!(request.node_id, "n1");
        self.accept_registration(received.id, Some(payload)).await;
    }

    pub(crate) async fn accept_registration(&mut self, reply_to: u64, config: Option<Payload>) {
        let response = RegisterResponse::Accepted {
            node_id: "n1-canon".to_owned(),
            config,
        };
        self.send(reply_to, Message::RegisterResponse(response))
            .await;
    }

    /// Expects NodeReadyRequest; its envelope id.
    pub(crate) async fn ready_request(&mut self) -> u64 {
        let received = self.message().await;
        let Message::NodeReadyRequest(request) = received.message else {
            panic!("{received:?}")
        };
        assert_eq!(request.node_id, "n1-canon");
        received.id
    }

    pub(crate) async fn acknowledge(&mut self) {
        let reply_to = self.ready_request().await;
        self.send(reply_to, ready(true)).await;
    }

    pub(crate) async fn open(&mut self, request: TunnelRequest) {
        self.send(0, Message::TunnelRequest(request)).await;
    }

    pub(crate) async fn start(&mut self, request: RunRequest) {
        self.send(0, Message::RunRequest(request)).await;
    }

    pub(crate) async fn event(&mut self) -> RunEvent {
        let received = self.message().await;
        assert_eq!((received.id, received.reply_to), (0, 0));
        let Message::RunEvent(event) = received.message else {
            panic!("{received:?}")
        };
        event
    }

    /// The rest of one run, alone on the connection, up to its terminal.
    pub(crate) async fn told(&mut self, run_id: &str) -> Told {
        let mut told = Told::default();
        while !told.is_over() {
            let event = self.event().await;
            assert_eq!(event.run_id, run_id);
            told.take(event);
        }
        told
    }

    pub(crate) async fn cancel(&mut self, run_id: &str) {
        let run_id = run_id.to_owned();
        self.send(0, Message::CancelRequest(CancelRequest { run_id }))
            .await;
    }

    pub(crate) async fn frame(&mut self) -> TunnelFrame {
        let received = self.message().await;
        assert_eq!((received.id, received.reply_to), (0, 0));
        let Message::TunnelFrame(frame) = received.message else {
            panic!("{received:?}")
        };
        frame
    }

    /// The rest of one tunnel, alone on the connection, up to its terminal.
    pub(crate) async fn answer(&mut self, run_id: &str) -> Answer {
        let mut answer = Answer::default();
        while answer.terminal.is_none() {
            let frame = self.frame().await;
            assert_eq!(frame.run_id, run_id);
            answer.take(frame);
        }
        answer
    }
}

/// A tunnel's frames put together; the form of the stream is asserted on the way.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: Option<i32>,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    pub(crate) frames: u64,
    pub(crate) terminal: Option<FrameKind>,
    pub(crate) error: String,
}

impl Answer {
    pub(crate) fn take(&mut self, frame: TunnelFrame) {
        self.frames += 1;
        assert_eq!(frame.sequence, self.frames, "contiguous from 1");
        assert_eq!(self.terminal, None, "nothing after the terminal");
        assert_eq!(frame.failure, None, "no evidence on an ordinary answer");
        match frame.kind {
            FrameKind::ResponseStart => {
                assert_eq!(self.status, None, "one RESPONSE_START");
                self.status = Some(frame.status_code);
                let headers = frame.headers.into_iter();
                self.headers = headers.map(|h| (h.name, h.value.to_vec())).collect();
            }
            FrameKind::Body => {
                assert!(self.status.is_some(), "BODY follows RESPONSE_START");
                assert!((1..=256 * 1024).contains(&frame.body.len()));
                self.body.extend_from_slice(&frame.body);
            }
            FrameKind::End => {
                assert!(self.status.is_some(), "END follows RESPONSE_START");
                self.terminal = Some(FrameKind::End);
            }
            FrameKind::Error => {
                self.terminal = Some(FrameKind::Error);
                self.error = frame.error;
            }
            FrameKind::Usage | FrameKind::Unknown(_) => panic!("{:?}", frame.kind),
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.terminal == Some(FrameKind::End)
    }

    /// The legacy text of the ERROR that ended it.
    pub(crate) fn error(&self) -> &str {
        assert_eq!(self.terminal, Some(FrameKind::Error), "{self:?}");
        &self.error
    }

    pub(crate) fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| &value[..])
    }
}

/// A run's events put together; the form of the stream is asserted on the way.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) start: Option<Metadata>,
    pub(crate) deltas: Vec<String>,
    pub(crate) terminal: Option<RunEvent>,
}

impl Told {
    pub(crate) fn take(&mut self, event: RunEvent) {
        assert!(!self.is_over(), "nothing after the terminal");
        let ends = event.kind.is_terminal();
        assert!(ends || (event.usage, &event.failure) == (None, &None));
        match event.kind {
            RunEventKind::Start => {
                assert!(
                    self.start.is_none() && self.deltas.is_empty(),
                    "one start, first"
                );
                self.start = Some(event.metadata);
            }
            RunEventKind::Delta => {
                assert!(self.start.is_some(), "a delta follows the start");
                assert!((1..=RUN_DELTA_BYTES).contains(&event.delta.len()));
                assert!(event.metadata.is_empty(), "a delta is text alone");
                self.deltas.push(event.delta);
            }
            RunEventKind::Complete => {
                assert!(self.start.is_some(), "a completion follows the start");
                self.terminal = Some(event);
            }
            RunEventKind::Error | RunEventKind::Cancelled => {
                assert!(event.metadata.is_empty() && event.usage.is_none());
                self.terminal = Some(event);
            }
            RunEventKind::Other(name) => panic!("{name}"),
        }
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.terminal.is_some()
    }

    pub(crate) fn text(&self) -> String {
        self.deltas.concat()
    }

    /// Metadata of the completion.
    pub(crate) fn completion(&self) -> &Metadata {
        let terminal = self.terminal.as_ref().unwrap();
        assert_eq!(terminal.kind, RunEventKind::Complete, "{terminal:?}");
        &terminal.metadata
    }

    /// The legacy text of the error that ended it.
    pub(crate) fn error(&self) -> &str {
        let terminal = self.terminal.as_ref().unwrap();
        assert_eq!(terminal.kind, RunEventKind::Error, "{terminal:?}");
        &terminal.error
    }
}

/// A run of adapter `a`, target `t`.
pub(crate) fn run(run_id: &str, input: &str) -> RunRequest {
    RunRequest {
        run_id: run_id.to_owned(),
        adapter: "a".to_owned(),
        target: "t".to_owned(),
        input: input.as_bytes().to_vec().into(),
        ..RunRequest::default()
    }
}

pub(crate) fn ready(ready: bool) -> Message {
    let reason = if ready {
        String::new()
    } else {
        "another connection owns it".to_owned()
    };
    Message::NodeReadyResponse(NodeReadyResponse { ready, reason })
}

/// One adapter `a` at `port` of this machine.
pub(crate) fn adapter(port: u16, capacity: i32) -> Adapter {
    let base_url = format!("http://127.0.0.1:{port}");
    Adapter::new(
        "a".to_owned(),
        ProviderKind::OpenAiCompat,
        capacity,
        base_url,
    )
}

pub(crate) fn payload(adapters: Vec<Adapter>) -> Payload {
    Payload {
        adapters,
        concurrency: 0,
    }
}

/// A request of run `run_id` to adapter `a`.
pub(crate) fn tunnel(run_id: &str, body: &[u8]) -> TunnelRequest {
    TunnelRequest {
        run_id: run_id.to_owned(),
        adapter: "a".to_owned(),
        target: "t".to_owned(),
        method: "POST".to_owned(),
        path: "/v1/chat/completions".to_owned(),
        body: body.to_vec().into(),
        stream: true,
        ..TunnelRequest::default()
    }
}
