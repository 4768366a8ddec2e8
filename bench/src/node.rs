//! The scripted node: one real TLS connection to the Edge, real envelopes, every stream on it.
//!
//! Lives on: the rig. Bound: what one turn of the rig adds waits here for the socket.
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use iop_proto::domain::{Message, NodeReadyRequest, Pong, RegisterRequest, RegisterResponse};
use iop_proto::framing::{Assembler, Kind, encode_envelope};
use iop_proto::limits::{ALPN, ENVELOPE_TO_NODE_BYTES_MAX};
use iop_proto::map;
use iop_proto::view::TunnelFrameOut;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme};

use crate::client::marked;
use crate::error::Error;
use crate::event::Event;
use crate::origin::{Backlog, ORIGIN_TOKEN, Origin};
use crate::os::{Poll, Ready};

/// Bytes of a frame's envelope besides its body, more than enough.
const FRAME_ROOM: usize = 512;
/// How long each step before `ready` may take.
const STEP_LIMIT: Duration = Duration::from_secs(10);

/// A run of the Edge that the node serves.
#[derive(Debug)]
struct Run {
    id: String,
    /// Of the frame that comes next.
    sequence: u64,
}

/// A node that is ready.
#[derive(Debug)]
pub(crate) struct Node {
    socket: TcpStream,
    tls: ClientConnection,
    assembler: Assembler,
    runs: Vec<Option<Run>>,
    /// Plaintext of the turn in progress.
    plain: Backlog,
    event: Event,
    armed: bool,
}

impl Node {
    /// Connects with the certificate `<name>.{crt,key}` of folder `pki` and becomes ready.
    pub(crate) fn connect(
        edge: SocketAddr,
        pki: &Path,
        name: &str,
        streams: usize,
        event_bytes: usize,
    ) -> Result<Self, Error> {
        let socket = TcpStream::connect(edge).map_err(Error::io("connect as a node"))?;
        let set = socket.set_nodelay(true);
        set.and_then(|()| socket.set_read_timeout(Some(STEP_LIMIT)))
            .map_err(Error::io("the node's socket"))?;
        let server = ServerName::try_from("edge").expect("a legal name");
        let mut tls = ClientConnection::new(config(pki, name)?, server).map_err(tls_error)?;
        tls.set_buffer_limit(None); // the rig bounds what it adds
        let mut node = Self {
            socket,
            tls,
            assembler: Assembler::new(ENVELOPE_TO_NODE_BYTES_MAX),
            runs: (0..streams).map(|_| None).collect(),
            plain: Backlog::default(),
            event: Event::new(event_bytes),
            armed: false,
        };
        node.introduce(name)?;
        Ok(node)
    }

    fn introduce(&mut self, name: &str) -> Result<(), Error> {
        self.say(&Message::RegisterRequest(RegisterRequest {
            node_id: name.to_owned(),
            ..RegisterRequest::default()
        }))?;
        match self.hear()? {
            Message::RegisterResponse(RegisterResponse::Accepted { .. }) => {}
            other => return Err(Error::part(format!("not registered: {other:?}"))),
        }
        let node_id = name.to_owned();
        self.say(&Message::NodeReadyRequest(NodeReadyRequest { node_id }))?;
        match self.hear()? {
            Message::NodeReadyResponse(answer) if answer.ready => {}
            other => return Err(Error::part(format!("not ready: {other:?}"))),
        }
        self.socket
            .set_nonblocking(true)
            .map_err(Error::io("the node's socket"))
    }

    /// Registers with the rig's poll.
    pub(crate) fn watch(&self, poll: &Poll) -> Result<(), Error> {
        let added = poll.add(&self.socket, ORIGIN_TOKEN);
        added.map_err(Error::io("watch the node's socket"))
    }

    fn add(&mut self, message: &Message, id: u64) -> Result<(), Error> {
        let (kind, payload) = map::encode(message);
        let mut bytes = Vec::new();
        let built = encode_envelope(kind, id, 0, &payload, &mut bytes);
        built.map_err(|error| Error::part(format!("a node's envelope: {error}")))?;
        self.plain.add(&bytes);
        Ok(())
    }

    /// Sends and waits until it is sent.
    fn say(&mut self, message: &Message) -> Result<(), Error> {
        self.add(message, 1)?;
        self.plain
            .write(&mut self.tls.writer())
            .and_then(|()| self.tls.complete_io(&mut self.socket).map(drop))
            .map_err(Error::io("speak to the Edge"))
    }

    /// Waits for the next message.
    fn hear(&mut self) -> Result<Message, Error> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(message);
            }
            let read = self.tls.read_tls(&mut self.socket);
            if read.map_err(Error::io("hear the Edge"))? == 0 {
                return Err(Error::part("the Edge closed the node's connection"));
            }
            self.open()?;
        }
    }

    /// Opens the records that were read.
    fn open(&mut self) -> Result<(), Error> {
        let state = self.tls.process_new_packets().map_err(tls_error)?;
        let mut bytes = vec![0; state.plaintext_bytes_to_read()];
        let read = self.tls.reader().read_exact(&mut bytes);
        read.map_err(Error::io("read from the Edge"))?;
        self.assembler.push(&bytes);
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Message>, Error> {
        let framed = |error| Error::part(format!("from the Edge: {error}"));
        while let Some(envelope) = self.assembler.next().map_err(framed)? {
            if let Kind::Known(kind) = envelope.kind {
                let decoded = map::decode(kind, &envelope.payload);
                return decoded
                    .map(Some)
                    .map_err(|error| Error::part(format!("from the Edge: {error}")));
            }
        }
        Ok(None)
    }

    fn receive(&mut self, opened: &mut Vec<usize>) -> Result<(), Error> {
        match self.tls.read_tls(&mut self.socket) {
            Ok(0) => return Err(Error::part("the Edge closed the node's connection")),
            Ok(_) => self.open()?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(Error::io("read from the Edge")(error)),
        }
        while let Some(message) = self.next()? {
            match message {
                Message::TunnelRequest(request) => {
                    let stream = marked(&request.body);
                    let run = stream.and_then(|stream| self.runs.get_mut(stream));
                    *run.ok_or_else(|| Error::part("a request nobody made"))? = Some(Run {
                        id: request.run_id,
                        sequence: 1,
                    });
                    opened.extend(stream);
                }
                Message::Ping(ping) => self.add(&Message::Pong(Pong { seq: ping.seq }), 0)?,
                Message::CancelRequest(cancel) => {
                    return Err(Error::part(format!("the Edge cancelled: {cancel:?}")));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds the next frame of `stream`, as `make` builds it from run id and sequence.
    fn frame<'a>(
        plain: &mut Backlog,
        run: Option<&'a mut Run>,
        room: usize,
        make: impl FnOnce(&'a str, u64) -> TunnelFrameOut<'a>,
    ) {
        let Some(Run { id, sequence }) = run else {
            return;
        };
        let frame = make(id, *sequence);
        *sequence += 1;
        plain.add_with(room, |out| {
            frame.encode(out).expect("a legal frame that fits")
        });
    }
}

impl Origin for Node {
    fn ready(&mut self, poll: &Poll, ready: Ready, opened: &mut Vec<usize>) -> Result<(), Error> {
        if ready.readable {
            self.receive(opened)?;
        }
        self.flush(poll)
    }

    fn begin(&mut self, stream: usize) {
        const HEADERS: &[(&[u8], &[u8])] = &[
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
        ];
        let run = self.runs[stream].as_mut();
        Self::frame(&mut self.plain, run, FRAME_ROOM, |id, sequence| {
            TunnelFrameOut::response_start(id, sequence, 200, HEADERS)
        });
    }

    fn event(&mut self, stream: usize, stamp: u64) {
        let run = self.runs[stream].as_mut();
        let body = self.event.stamped(stamp);
        let room = FRAME_ROOM + body.len();
        let Some(Run { id, sequence }) = run else {
            return;
        };
        let frame = TunnelFrameOut::body(id, *sequence, body);
        *sequence += 1;
        self.plain.add_with(room, |out| {
            frame.encode(out).expect("a legal frame that fits")
        });
    }

    fn end(&mut self, stream: usize) {
        let run = self.runs[stream].as_mut();
        Self::frame(&mut self.plain, run, FRAME_ROOM, TunnelFrameOut::end);
    }

    fn is_full(&self, _stream: usize) -> bool {
        self.armed
    }

    fn flush(&mut self, poll: &Poll) -> Result<(), Error> {
        let gone = |error| Error::io("write to the Edge")(error);
        self.plain.write(&mut self.tls.writer()).map_err(gone)?;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(gone(error)),
            }
        }
        let full = self.tls.wants_write();
        if full != self.armed {
            self.armed = full;
            poll.writable(&self.socket, ORIGIN_TOKEN, full)
                .map_err(Error::io("watch the node's socket"))?;
        }
        Ok(())
    }
}

fn tls_error(error: rustls::Error) -> Error {
    Error::part(format!("TLS of the node: {error}"))
}

fn config(pki: &Path, name: &str) -> Result<Arc<ClientConfig>, Error> {
    let file = |end: &str| pki.join(format!("{name}.{end}"));
    let pem = |error| Error::part(format!("certificate of node {name}: {error}"));
    let certificates = CertificateDer::pem_file_iter(file("crt"))
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(pem)?;
    let key = PrivateKeyDer::from_pem_file(file("key")).map_err(pem)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyEdge(provider)))
        .with_client_auth_cert(certificates, key)
        .map_err(tls_error)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Takes any server for the Edge: it was started by this program a moment ago.
#[derive(Debug)]
struct AnyEdge(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyEdge {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
