//! One connection to the Edge: dial, prove the peer, then a reader and an ordered writer.
//!
//! Lives on: one task per link. View: bytes and envelopes; knows nothing of registration or runs.
//! Bound: one envelope being read, `INBOUND_QUEUE` decoded ones, two writer queues of `limits`.
//!
//! ```text
//! socket ─► Assembler ─► inbound (envelopes, in order)        ping answered here
//! socket ◄─ writer ◄─ control queue, then bulk queue          one envelope is never interrupted
//! ```
use core::fmt;
use core::pin::pin;
use core::time::Duration;
use std::io;
use std::sync::Arc;

use iop_proto::domain::{Message, Ping, Pong, TunnelFrame};
use iop_proto::framing::{Assembler, Envelope, FramingError, Kind, MessageType, encode_envelope};
use iop_proto::limits::{ALPN, ENVELOPE_TO_NODE_BYTES_MAX, PLAINTEXT_PREFACE};
use iop_proto::map;
use iop_proto::view::TunnelFrameOut;
use rustls::CertificateError;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::EdgeAddress;

/// Envelopes read but not handled yet; the socket waits behind them.
pub(crate) const INBOUND_QUEUE: usize = 16;
/// Read at once.
const READ_BYTES: usize = 64 * 1024;
/// Small envelopes are gathered up to this before a write: four whole records.
const GATHER_BYTES: usize = 64 * 1024;
/// Records the TLS library holds before they are written: a BODY frame and what was gathered before it go
/// to the kernel at once.
const SEALED_BYTES_MAX: usize = 512 * 1024;

/// What a link reports, in the order it happened. `[I4.5]`
#[derive(Debug)]
pub(crate) enum Inbound {
    /// TCP is up.
    Connected,
    /// The peer is the Edge we expect and speaks our version; nothing was sent to it yet.
    Identified,
    /// An envelope other than ping and pong.
    Envelope(Envelope),
}

/// One envelope to be written.
#[derive(Debug)]
pub(crate) struct Outbound {
    /// 0 on a one-way message. `[D-56]`
    pub(crate) id: u64,
    pub(crate) reply_to: u64,
    /// Boxed: the queues move pointers, not messages.
    pub(crate) message: Box<Message>,
}

impl Outbound {
    pub(crate) fn one_way(message: Message) -> Self {
        Self::ask(0, message)
    }

    /// A request under an id of this session.
    pub(crate) fn ask(id: u64, message: Message) -> Self {
        let message = Box::new(message);
        Self {
            id,
            reply_to: 0,
            message,
        }
    }

    pub(crate) fn reply(reply_to: u64, message: Message) -> Self {
        let message = Box::new(message);
        Self {
            id: 0,
            reply_to,
            message,
        }
    }
}

/// Why a link is over.
#[derive(Debug)]
pub(crate) enum LinkEnd {
    /// No address, refused, unreachable.
    Dial(io::Error),
    /// TLS failed; a wrong identity says so in its text.
    Tls(io::Error),
    /// The peer chose no or another protocol version.
    Alpn,
    /// Plaintext mode: the first eight bytes are not ours.
    Preface,
    /// The peer closed.
    Closed,
    Socket(io::Error),
    /// No byte for `dead_after`. `[D-03]`
    Dead,
    Framing(FramingError),
    /// A payload that is not the message its type names.
    Undecodable(MessageType),
    /// Pings faster than pongs can be written.
    PingFlood,
    /// Everything queued was written, and the queues were closed by us.
    Flushed,
}

impl fmt::Display for LinkEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dial(error) => write!(f, "cannot connect: {error}"),
            Self::Tls(error) => write!(f, "TLS: {}", tls_words(error)),
            Self::Alpn => f.write_str("the peer does not speak this protocol version"),
            Self::Preface => f.write_str("the peer does not speak the plaintext protocol"),
            Self::Closed => f.write_str("the edge closed the connection"),
            Self::Socket(error) => write!(f, "connection: {error}"),
            Self::Dead => f.write_str("no byte from the edge in time"),
            Self::Framing(error) => write!(f, "framing: {error}"),
            Self::Undecodable(kind) => write!(f, "undecodable {}", kind.name()),
            Self::PingFlood => f.write_str("more pings than pongs could be sent"),
            Self::Flushed => f.write_str("closed by this node"),
        }
    }
}

/// A wrong identity in its own words, anything else in those of TLS.
fn tls_words(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(own))) => own.to_string(),
        Some(_) | None => error.to_string(),
    }
}

/// What a link needs to know.
#[derive(Clone, Debug)]
pub(crate) struct LinkConfig {
    pub(crate) edge: EdgeAddress,
    /// `None`: plaintext.
    pub(crate) tls: Option<Arc<rustls::ClientConfig>>,
    pub(crate) ping_every: Duration,
    pub(crate) dead_after: Duration,
}

/// A link's ends of its queues. When every sender of both writer queues is gone, what is queued is
/// written and the link ends as `Flushed`.
#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) inbound: mpsc::Sender<Inbound>,
    pub(crate) control: mpsc::Receiver<Outbound>,
    pub(crate) bulk: mpsc::Receiver<Outbound>,
    /// For pongs; weak, so that it does not keep the queue open.
    pub(crate) pongs: mpsc::WeakSender<Outbound>,
}

/// Runs one link from dial to end. Its socket is closed when this returns or is dropped.
pub(crate) async fn run(config: LinkConfig, ports: Ports) -> LinkEnd {
    let stream = match dial(&config).await {
        Ok(stream) => stream,
        Err(error) => return LinkEnd::Dial(error),
    };
    if ports.inbound.send(Inbound::Connected).await.is_err() {
        return LinkEnd::Flushed;
    }
    match &config.tls {
        Some(tls) => {
            let name = server_name(&config.edge.host);
            let connector = tokio_rustls::TlsConnector::from(tls.clone());
            match connector.connect(name, stream).await {
                Ok(mut stream) if stream.get_ref().1.alpn_protocol() == Some(ALPN) => {
                    let tls = stream.get_mut().1;
                    tls.set_buffer_limit(Some(SEALED_BYTES_MAX));
                    serve(stream, &config, ports).await
                }
                Ok(_) => LinkEnd::Alpn,
                Err(error) => LinkEnd::Tls(error),
            }
        }
        None => match exchange_preface(stream).await {
            Ok(stream) => serve(stream, &config, ports).await,
            Err(end) => end,
        },
    }
}

/// The name sent as SNI; the peer's identity is not judged by it.
fn server_name(host: &str) -> ServerName<'static> {
    let fallback = || ServerName::try_from("edge.invalid").expect("a DNS name");
    ServerName::try_from(host.to_owned()).unwrap_or_else(|_| fallback())
}

async fn dial(config: &LinkConfig) -> io::Result<TcpStream> {
    let EdgeAddress { host, port } = &config.edge;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((host.as_str(), *port)).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                tune(&stream, config)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn tune(stream: &TcpStream, config: &LinkConfig) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    // Whole seconds, at least one.
    let quiet = (config.ping_every * 2).max(Duration::from_secs(1));
    let keepalive = socket2::TcpKeepalive::new().with_time(quiet);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        socket.set_tcp_user_timeout(Some(config.dead_after))?;
        // Control waits behind at most this much that the kernel has not sent. `[D-02]`
        socket.set_tcp_notsent_lowat(iop_proto::limits::SESSION_UNSENT_BYTES_MAX)?;
    }
    Ok(())
}

async fn exchange_preface(mut stream: TcpStream) -> Result<TcpStream, LinkEnd> {
    let mut theirs = [0; PLAINTEXT_PREFACE.len()];
    stream
        .write_all(PLAINTEXT_PREFACE)
        .await
        .map_err(LinkEnd::Socket)?;
    match stream.read_exact(&mut theirs).await {
        Ok(_) if &theirs == PLAINTEXT_PREFACE => Ok(stream),
        Ok(_) => Err(LinkEnd::Preface),
        Err(error) => Err(LinkEnd::Socket(error)),
    }
}

async fn serve<S>(stream: S, config: &LinkConfig, ports: Ports) -> LinkEnd
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ports {
        inbound,
        control,
        bulk,
        pongs,
    } = ports;
    if inbound.send(Inbound::Identified).await.is_err() {
        return LinkEnd::Flushed;
    }
    let (read, write) = tokio::io::split(stream);
    tokio::select! {
        end = read_loop(read, config.dead_after, inbound, pongs) => end,
        end = write_loop(write, config.ping_every, control, bulk) => end,
    }
}

async fn read_loop<R: AsyncRead + Unpin>(
    mut read: R,
    dead_after: Duration,
    inbound: mpsc::Sender<Inbound>,
    pongs: mpsc::WeakSender<Outbound>,
) -> LinkEnd {
    let mut assembler = Assembler::new(ENVELOPE_TO_NODE_BYTES_MAX);
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let count = match timeout(dead_after, read.read(&mut buffer)).await {
            Ok(Ok(0)) => return LinkEnd::Closed,
            Ok(Ok(count)) => count,
            Ok(Err(error)) => return LinkEnd::Socket(error),
            Err(_) => return LinkEnd::Dead,
        };
        assembler.push(&buffer[..count]);
        loop {
            let envelope = match assembler.next() {
                Ok(Some(envelope)) => envelope,
                Ok(None) => break,
                Err(error) => return LinkEnd::Framing(error),
            };
            match envelope.kind {
                Kind::Known(MessageType::Ping) => {
                    if let Some(end) = answer(&envelope, &pongs) {
                        return end;
                    }
                }
                Kind::Known(_) | Kind::Unknown => {
                    if inbound.send(Inbound::Envelope(envelope)).await.is_err() {
                        return LinkEnd::Flushed;
                    }
                }
            }
        }
    }
}

/// Pong, one-way, with the ping's number. The reader never waits for the writer.
fn answer(ping: &Envelope, pongs: &mpsc::WeakSender<Outbound>) -> Option<LinkEnd> {
    let decoded = map::decode(MessageType::Ping, &ping.payload);
    let Ok(Message::Ping(Ping { seq })) = decoded else {
        return Some(LinkEnd::Undecodable(MessageType::Ping));
    };
    let queue = pongs.upgrade()?;
    let pong = Outbound::one_way(Message::Pong(Pong { seq }));
    match queue.try_send(pong) {
        Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => None,
        Err(mpsc::error::TrySendError::Full(_)) => Some(LinkEnd::PingFlood),
    }
}

async fn write_loop<W: AsyncWrite + Unpin>(
    mut write: W,
    ping_every: Duration,
    mut control: mpsc::Receiver<Outbound>,
    mut bulk: mpsc::Receiver<Outbound>,
) -> LinkEnd {
    let mut buffer = Vec::with_capacity(GATHER_BYTES);
    let mut pings = 0;
    let mut wrote_at = Instant::now();
    // Set again when it rings: every write moves the ping, and a ring too early costs less than a timer
    // per write.
    let mut alarm = pin!(sleep_until(wrote_at + ping_every));
    let (mut control_open, mut bulk_open) = (true, true);
    while control_open || bulk_open {
        let next = tokio::select! {
            biased;
            next = control.recv(), if control_open => {
                control_open = next.is_some();
                next
            }
            next = bulk.recv(), if bulk_open => {
                bulk_open = next.is_some();
                next
            }
            () = &mut alarm => {
                let due = wrote_at + ping_every;
                let is_due = due <= Instant::now();
                alarm.as_mut().reset(if is_due { Instant::now() + ping_every } else { due });
                is_due.then(|| {
                    pings += 1;
                    Outbound::one_way(Message::Ping(Ping { seq: pings }))
                })
            }
        };
        let Some(next) = next else { continue };
        buffer.clear();
        encode(&next, &mut buffer);
        while buffer.len() < GATHER_BYTES {
            let Ok(next) = control.try_recv().or_else(|_| bulk.try_recv()) else {
                break;
            };
            encode(&next, &mut buffer);
        }
        let written = async {
            write.write_all(&buffer).await?;
            write.flush().await
        };
        if let Err(error) = written.await {
            return LinkEnd::Socket(error);
        }
        wrote_at = Instant::now();
    }
    match write.shutdown().await {
        Ok(()) => LinkEnd::Flushed,
        Err(error) => LinkEnd::Socket(error),
    }
}

const FITS: &str = "a message of ours is valid and far below the limit of an envelope";

fn encode(next: &Outbound, buffer: &mut Vec<u8>) {
    match &*next.message {
        Message::TunnelFrame(frame) if frame.failure.is_none() && frame.metadata.is_empty() => {
            encode_frame(frame, buffer);
        }
        message => {
            let (kind, payload) = map::encode(message);
            encode_envelope(kind, next.id, next.reply_to, &payload, buffer).expect(FITS);
        }
    }
}

/// Body bytes are copied once, into the buffer that is written.
fn encode_frame(frame: &TunnelFrame, buffer: &mut Vec<u8>) {
    let headers: Vec<_> = frame
        .headers
        .iter()
        .map(|header| (header.name.as_bytes(), &header.value[..]))
        .collect();
    let out = TunnelFrameOut {
        run_id: &frame.run_id,
        kind: frame.kind,
        sequence: frame.sequence,
        status_code: frame.status_code,
        headers: &headers,
        body: &frame.body,
        error: &frame.error,
        usage: frame.usage,
    };
    let start = buffer.len();
    buffer.resize(start + out.encoded_len().expect(FITS), 0);
    out.encode(&mut buffer[start..]).expect(FITS);
}

#[cfg(test)]
mod tests {
    use rustls::OtherError;

    use super::*;
    use crate::identity::IdentityError;

    #[test]
    fn a_wrong_identity_is_told_in_its_own_words() {
        let own = OtherError(Arc::new(IdentityError::WrongRole));
        let error = rustls::Error::InvalidCertificate(CertificateError::Other(own));
        let end = LinkEnd::Tls(io::Error::new(io::ErrorKind::InvalidData, error));
        assert_eq!(end.to_string(), "TLS: the peer is no edge");
        let plain = LinkEnd::Tls(io::Error::from(io::ErrorKind::UnexpectedEof));
        assert!(plain.to_string().starts_with("TLS: "));
    }
}
