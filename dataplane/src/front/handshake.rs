//! From an accepted socket to a connection a shard can serve: TLS, identity, or the plaintext preface;
//! and the answer to a peer that gets none of it.
//!
//! Lives on: the front. View: one connection. Bound: one buffer of `RECORD_BYTES_MAX` per handshake
//! in progress; its caller sets the deadline.
use std::io;
use std::net::Shutdown;
use std::time::Duration;

use futures_lite::{AsyncReadExt, AsyncWriteExt};
use glommio::GlommioError;
use glommio::net::TcpStream;
use glommio::timer::timeout;
use iop_control::names::Names;
use iop_proto::limits::{DRAIN_BYTES_MAX, DRAIN_MS_MAX, PLAINTEXT_PREFACE, RECORD_BYTES_MAX};
use iop_proto::reason::Reason;

use crate::tls::identity::{Identity, IdentityError, Role, identify};
use crate::tls::record::{EXTRA, HEADER};
use crate::tls::{
    Alert, Established, HandshakeError, Records, ReplyBuf, ServerHandshake, ServerTls,
};

/// A TLS handshake record's first byte.
const TLS_HANDSHAKE_BYTE: u8 = 22;
/// A fatal `unexpected_message` in the clear, for a peer that spoke plaintext to a TLS port.
const PLAINTEXT_ALERT: &[u8] = &[21, 3, 3, 0, 2, 2, 10];

/// Why a connection goes no further.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    /// For the log: which rule, which bytes. Made by us, at most a few words of the peer's.
    pub(super) detail: String,
    /// What the peer is told, as it goes on the wire; `None` when nobody listens any more.
    words: Option<Vec<u8>>,
}

impl Refusal {
    pub(super) fn new(reason: Reason, detail: impl ToString) -> Self {
        Self {
            reason,
            detail: detail.to_string(),
            words: None,
        }
    }

    fn saying(self, words: &[u8]) -> Self {
        Self {
            words: Some(words.to_vec()),
            ..self
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::new(Reason::SocketError, error)
    }
}

/// A connection that may be handed over. Its output is flushed.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) records: Option<Records>,
    pub(super) early: Vec<u8>,
    pub(super) certificate_name: Option<String>,
    pub(super) not_after_unix: i64,
}

impl Ready {
    /// Nothing read, nothing known: a plaintext client.
    pub(super) const fn untouched() -> Self {
        Self {
            records: None,
            early: Vec::new(),
            certificate_name: None,
            not_after_unix: i64::MAX,
        }
    }
}

/// A node over TLS: handshake, then identity. `[R-007]` `[R-011]` … `[R-014]`
pub(super) async fn node_tls(
    stream: &mut TcpStream,
    tls: &ServerTls,
    trust_domain: &str,
    names: &Names,
) -> Result<Ready, Refusal> {
    let mut established = shake(stream, tls, PLAINTEXT_ALERT).await?;
    match certified(&established, trust_domain, names) {
        Ok(Identity {
            name,
            not_after_unix,
            ..
        }) => Ok(Ready {
            records: Some(established.records),
            early: established.left,
            certificate_name: Some(name),
            not_after_unix,
        }),
        Err(refusal) => {
            let mut reply = ReplyBuf::default();
            established.records.fatal(Alert::AccessDenied, &mut reply);
            Err(refusal.saying(reply.as_slice()))
        }
    }
}

/// Who the leaf certificate names: a configured node, and until when.
fn certified(
    established: &Established,
    trust_domain: &str,
    names: &Names,
) -> Result<Identity, Refusal> {
    let refusal = |error: IdentityError| Refusal::new(error.reason(), error);
    let leaf = established.peer_certificates.first();
    let leaf = leaf.ok_or_else(|| refusal(IdentityError::NoCertificate))?;
    let identity = identify(leaf, trust_domain, Role::Node).map_err(refusal)?;
    if names.node_by_certificate(&identity.name).is_none() {
        return Err(Refusal::new(
            Reason::IdentityWrongName,
            format_args!("named {}", short(&identity.name)),
        ));
    }
    Ok(identity)
}

/// A name for a log line: SPIFFE characters only, cut.
fn short(name: &str) -> &str {
    name.get(..64).unwrap_or(name)
}

/// A node without TLS: prefaces both ways. `[A-40]` `[wire §4.2]`
pub(super) async fn node_plaintext(stream: &mut TcpStream) -> Result<Ready, Refusal> {
    stream.write_all(PLAINTEXT_PREFACE).await?;
    let mut preface = [0; PLAINTEXT_PREFACE.len()];
    let mut have = 0;
    while have < preface.len() {
        let bytes = stream.read(&mut preface[have..]).await?;
        if bytes == 0 {
            return Err(Refusal::new(
                Reason::PeerClosed,
                "closed before its preface",
            ));
        }
        have += bytes;
        if preface[..have] != PLAINTEXT_PREFACE[..have] {
            let refusal = if preface[0] == TLS_HANDSHAKE_BYTE {
                Refusal::new(Reason::TlsOnPlaintextPort, "TLS instead of the preface")
            } else {
                Refusal::new(Reason::AlpnMismatch, "another preface")
            };
            return Err(refusal.saying(&[])); // it has our preface
        }
    }
    Ok(Ready::untouched()) // not one byte behind the preface was read
}

/// An HTTPS client.
pub(super) async fn client_tls(stream: &mut TcpStream, tls: &ServerTls) -> Result<Ready, Refusal> {
    let to_http = http_answer("400 Bad Request", "", Reason::PlaintextOnTlsPort);
    let established = shake(stream, tls, to_http.as_bytes()).await?;
    Ok(Ready {
        records: Some(established.records),
        early: established.left,
        certificate_name: None,
        not_after_unix: i64::MAX,
    })
}

/// The answer to a client that there is no room for. `[D-11]` `[D-33]`
pub(super) fn client_full(ready: Ready) -> Refusal {
    let refusal = Refusal::new(Reason::ClientsFull, "at the limit of client connections");
    let answer = http_answer(
        "503 Service Unavailable",
        "retry-after: 1\r\n",
        refusal.reason,
    );
    let Some(mut records) = ready.records else {
        return refusal.saying(answer.as_bytes());
    };
    let mut sealed = vec![0; answer.len() + EXTRA];
    sealed[HEADER..HEADER + answer.len()].copy_from_slice(answer.as_bytes());
    let mut goodbye = ReplyBuf::default();
    match records
        .seal(&mut sealed, answer.len())
        .and_then(|_| records.close_notify(&mut goodbye))
    {
        Ok(()) => {
            sealed.extend_from_slice(goodbye.as_slice());
            refusal.saying(&sealed)
        }
        Err(error) => Refusal::new(error.reason(), error),
    }
}

/// A whole answer in the OpenAI error shape: no request was read, so no surface is known.
fn http_answer(status: &str, headers: &str, reason: Reason) -> String {
    let kind = if reason.status() == 503 {
        "server_error"
    } else {
        "invalid_request_error"
    };
    let body = format!(
        r#"{{"error":{{"message":"{}","type":"{kind}","param":null,"code":"{}"}}}}"#,
        reason.text(),
        reason.label(),
    );
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{headers}\
         x-iop-error-source: edge\r\nconnection: close\r\n\r\n{body}",
        body.len(),
    )
}

/// `to_plaintext`: what a peer that does not speak TLS is told.
async fn shake(
    stream: &mut TcpStream,
    tls: &ServerTls,
    to_plaintext: &[u8],
) -> Result<Established, Refusal> {
    let refusal = |error: &HandshakeError| Refusal::new(error.reason(), error);
    let mut handshake = ServerHandshake::new(tls).map_err(|error| refusal(&error))?;
    let mut buffer = vec![0; RECORD_BYTES_MAX as usize];
    let mut out = Vec::new();
    loop {
        let bytes = stream.read(&mut buffer[..handshake.room()]).await?;
        if bytes == 0 {
            return Err(refusal(&HandshakeError::Closed));
        }
        let done = handshake.read(&buffer[..bytes], &mut out);
        if done == Ok(false) {
            stream.write_all(&out).await?;
            out.clear();
            continue;
        }
        return match done.and_then(|_| handshake.establish(&mut out)) {
            Ok(established) => {
                stream.write_all(&out).await?; // tickets: before anything a shard may send
                Ok(established)
            }
            Err(error @ HandshakeError::Plaintext { .. }) => {
                Err(refusal(&error).saying(to_plaintext))
            }
            Err(error) => Err(refusal(&error).saying(&out)), // an alert
        };
    }
}

/// Sends last words and lets the peer read them: a socket closed with unread input is reset, and a
/// reset may overtake what was sent. Bounded in bytes and time. `[D-42]`
pub(super) async fn part(stream: &mut TcpStream, refusal: &Refusal) {
    let Some(words) = &refusal.words else { return };
    let farewell = async {
        let said = stream.write_all(words).await;
        if said.is_err() || stream.shutdown(Shutdown::Write).await.is_err() {
            return Ok(()); // gone already
        }
        let mut scrap = [0; 1024];
        let mut left = DRAIN_BYTES_MAX as usize;
        while left > 0 {
            match stream.read(&mut scrap).await {
                Ok(0) | Err(_) => break,
                Ok(bytes) => left = left.saturating_sub(bytes),
            }
        }
        Ok::<(), GlommioError<()>>(())
    };
    // Expiry is one of the ways this ends well.
    let _expired = timeout(Duration::from_millis(u64::from(DRAIN_MS_MAX)), farewell).await;
}
