//! Server handshakes by rustls, one record at a time, and the material they need.
//!
//! Lives on: the front (handshakes), the main and cold threads (configuration). View: one connection.
//! Bound: `INPUT_BYTES_MAX` of input per handshake, `PEM_BYTES_MAX` per PEM file.
//!
//! rustls sees no byte behind the record that ends the handshake. Otherwise data it had already
//! opened, or its answer to a KeyUpdate that came with Finished, would be lost at the switch to our
//! own record protection. What it never saw is `Established::left`.
//!
//! ```text
//! input   fed, part of a message   | not fed: less than one record
//!         0 .. fed                   fed .. input.len() <= fed + RECORD_BYTES_MAX
//! ```
use core::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_proto::limits::{
    ALPN, PEM_BYTES_MAX, RECORD_BYTES_MAX, RECORD_CIPHER_BYTES_MAX, RECORD_HEADER_BYTES,
};
use iop_proto::reason::Reason;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{CertificateError, Error, InconsistentKeys, RootCertStore, ServerConfig};

use super::Records;
use super::identity::{Identity, IdentityError, Role, identify, validity_unix};
use super::record::{Alert, ReplyBuf, TlsError};
use crate::config::{CertificateFiles, PkiFiles};

/// ALPN of HTTPS clients; a client without ALPN speaks it too.
pub const ALPN_HTTP: &[u8] = b"http/1.1";
/// Input a handshake may hold: the longest message rustls takes (64 KiB) in records of a sane size.
const INPUT_BYTES_MAX: usize = 128 * 1024;
const RECORD_MAX: usize = RECORD_BYTES_MAX as usize;

// ── configuration ─────────────────────────────────────────────────────────────────────────────────

/// One listener's TLS: certificate, key, roots, rules. Cheap to clone; replaced as a whole at reload.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    /// The peer must have agreed on this protocol.
    alpn: Option<&'static [u8]>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls")
            .field("alpn", &self.alpn)
            .finish_non_exhaustive()
    }
}

/// Which file is wrong, and what about it. Fatal at start; a reload keeps the old material. `[D-05]`
#[derive(Debug)]
pub struct PkiError {
    pub path: PathBuf,
    pub problem: PkiProblem,
}

#[derive(Debug)]
pub enum PkiProblem {
    Unreadable(std::io::Error),
    TooLong,
    /// PEM or DER that does not parse.
    Unparseable,
    /// A PEM file without any certificate.
    NoCertificate,
    /// A PEM file without any private key.
    NoKey,
    /// A key of a kind that TLS 1.3 cannot sign with here.
    KeyUnsupported,
    /// The key does not belong to this certificate file.
    KeyMismatch {
        certificate: PathBuf,
    },
    NotYetValid {
        not_before_unix: i64,
    },
    Expired {
        not_after_unix: i64,
    },
    /// The Edge's own certificate breaks the rules every node checks.
    Identity(IdentityError),
    /// The Edge's own certificate bears another name than the configured one.
    WrongName {
        expected: String,
    },
}

impl fmt::Display for PkiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.problem {
            PkiProblem::Unreadable(error) => write!(f, "cannot be read: {error}"),
            PkiProblem::TooLong => write!(f, "longer than {PEM_BYTES_MAX} bytes"),
            PkiProblem::Unparseable => f.write_str("not valid PEM of a certificate or key"),
            PkiProblem::NoCertificate => f.write_str("holds no certificate"),
            PkiProblem::NoKey => f.write_str("holds no private key"),
            PkiProblem::KeyUnsupported => f.write_str("a kind of key that is not supported"),
            PkiProblem::KeyMismatch { certificate } => {
                write!(f, "the key does not belong to {}", certificate.display())
            }
            PkiProblem::NotYetValid { not_before_unix } => {
                write!(f, "not valid before Unix time {not_before_unix}")
            }
            PkiProblem::Expired { not_after_unix } => {
                write!(f, "expired at Unix time {not_after_unix}")
            }
            PkiProblem::Identity(error) => write!(f, "not an Edge's workload identity: {error}"),
            PkiProblem::WrongName { expected } => {
                write!(f, "its workload identity is not named {expected}")
            }
        }
    }
}

impl std::error::Error for PkiError {}

impl PkiProblem {
    fn at(self, path: &Path) -> PkiError {
        PkiError {
            path: path.to_owned(),
            problem: self,
        }
    }
}

/// TLS of the node listener: TLS 1.3 only, a client certificate of our CA and the node protocol's
/// ALPN are mandatory, no resumption (an identity is judged at every connection). `[R-007]` `[R-009]`
///
/// `edge_name` is who the own certificate must say we are; `now_unix` judges validity, seconds.
///
/// # Errors
/// The first file that is missing, unparseable, mismatched, expired, or of another identity.
pub fn node_server_config(
    files: &PkiFiles,
    trust_domain: &str,
    edge_name: &str,
    now_unix: i64,
) -> Result<ServerTls, PkiError> {
    let roots = Arc::new(load_roots(&files.ca, now_unix)?);
    let chain = load_chain(&files.cert, now_unix)?;
    let Identity { name, .. } = identify(&chain[0], trust_domain, Role::Edge)
        .map_err(|error| PkiProblem::Identity(error).at(&files.cert))?;
    if name != edge_name {
        let expected = edge_name.to_owned();
        return Err(PkiProblem::WrongName { expected }.at(&files.cert));
    }
    let key = load_key(&files.key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .build()
        .map_err(|_| PkiProblem::Unparseable.at(&files.ca))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has the TLS 1.3 suites")
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| key_problem(&error, &files.cert).at(&files.key))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.enable_secret_extraction = true;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(ServerTls {
        config: Arc::new(config),
        alpn: Some(ALPN),
    })
}

/// TLS of the client listener: HTTPS, TLS 1.3 only, no client certificate. `http/1.1` is offered; a
/// client that offers no protocol is taken, one that offers only others is refused.
///
/// # Errors
/// As [`node_server_config`], without identity rules.
pub fn client_server_config(
    files: &CertificateFiles,
    now_unix: i64,
) -> Result<ServerTls, PkiError> {
    let chain = load_chain(&files.cert, now_unix)?;
    let key = load_key(&files.key)?;
    let mut config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has the TLS 1.3 suites")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| key_problem(&error, &files.cert).at(&files.key))?;
    config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
    config.enable_secret_extraction = true;
    Ok(ServerTls {
        config: Arc::new(config),
        alpn: None,
    })
}

fn key_problem(error: &Error, certificate: &Path) -> PkiProblem {
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => PkiProblem::KeyMismatch {
            certificate: certificate.to_owned(),
        },
        _ => PkiProblem::KeyUnsupported,
    }
}

fn load_file(path: &Path) -> Result<Vec<u8>, PkiError> {
    let unreadable = |error| PkiProblem::Unreadable(error).at(path);
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut text = Vec::new();
    file.take(u64::from(PEM_BYTES_MAX) + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() > PEM_BYTES_MAX as usize {
        return Err(PkiProblem::TooLong.at(path));
    }
    Ok(text)
}

fn load_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    let text = load_file(path)?;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|_| PkiProblem::Unparseable.at(path))?;
    if chain.is_empty() {
        return Err(PkiProblem::NoCertificate.at(path));
    }
    Ok(chain)
}

/// A chain, leaf first, whose leaf is valid now.
fn load_chain(path: &Path, now_unix: i64) -> Result<Vec<CertificateDer<'static>>, PkiError> {
    let chain = load_certificates(path)?;
    check_validity(&chain[0], now_unix).map_err(|problem| problem.at(path))?;
    Ok(chain)
}

/// A trust bundle: every certificate parses, at least one is valid now.
fn load_roots(path: &Path, now_unix: i64) -> Result<RootCertStore, PkiError> {
    let mut roots = RootCertStore::empty();
    let mut first_problem = None;
    let mut any_valid = false;
    for certificate in load_certificates(path)? {
        match check_validity(&certificate, now_unix) {
            Ok(()) => any_valid = true,
            Err(problem) => first_problem = first_problem.or(Some(problem)),
        }
        roots
            .add(certificate)
            .map_err(|_| PkiProblem::Unparseable.at(path))?;
    }
    match first_problem {
        Some(problem) if !any_valid => Err(problem.at(path)),
        _ => Ok(roots),
    }
}

fn check_validity(certificate: &[u8], now_unix: i64) -> Result<(), PkiProblem> {
    let (not_before_unix, not_after_unix) =
        validity_unix(certificate).ok_or(PkiProblem::Unparseable)?;
    if now_unix < not_before_unix {
        return Err(PkiProblem::NotYetValid { not_before_unix });
    }
    if now_unix > not_after_unix {
        return Err(PkiProblem::Expired { not_after_unix });
    }
    Ok(())
}

fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, PkiError> {
    let text = zeroize::Zeroizing::new(load_file(path)?);
    let key = PrivateKeyDer::pem_slice_iter(&text)
        .next()
        .ok_or_else(|| PkiProblem::NoKey.at(path))?;
    key.map_err(|_| PkiProblem::Unparseable.at(path))
}

// ── one handshake ─────────────────────────────────────────────────────────────────────────────────

/// Why a handshake ended without a connection. Whatever should be said to the peer is in the output.
#[derive(Clone, Debug, PartialEq)]
pub enum HandshakeError {
    /// The first byte is not one of a TLS record.
    Plaintext { first_byte: u8 },
    /// A record header that announces more than a record may hold.
    RecordTooLong { bytes: usize },
    /// More than `INPUT_BYTES_MAX` without the end of a message.
    InputTooLong,
    /// The peer closed before the handshake was done.
    Closed,
    /// The peer agreed on no protocol, or not on the one this listener demands.
    Alpn,
    /// What rustls found wrong.
    Tls(Error),
    /// The switch to our own record protection failed.
    Switch(TlsError),
    /// rustls left the protocol's path; a bug, of it or of this file.
    Driver(&'static str),
}

impl HandshakeError {
    #[must_use]
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Plaintext { .. } => Reason::PlaintextOnTlsPort,
            Self::Alpn | Self::Tls(Error::NoApplicationProtocol) => Reason::AlpnMismatch,
            Self::Tls(Error::NoCertificatesPresented) => Reason::IdentityMissing,
            Self::Tls(Error::InvalidCertificate(error)) => certificate_reason(error),
            Self::Closed => Reason::PeerClosed,
            Self::RecordTooLong { .. }
            | Self::InputTooLong
            | Self::Tls(_)
            | Self::Switch(_)
            | Self::Driver(_) => Reason::TlsHandshakeFailed,
        }
    }
}

const fn certificate_reason(error: &CertificateError) -> Reason {
    match error {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => Reason::CertificateExpired,
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            Reason::CertificateUntrusted
        }
        // An open enum: malformed, wrong purpose, an authority as a leaf, and what is added later.
        _ => Reason::IdentityInvalid,
    }
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plaintext { first_byte } => {
                write!(
                    f,
                    "first byte {first_byte:#04x} does not begin a TLS record"
                )
            }
            Self::RecordTooLong { bytes } => write!(f, "record of {bytes} bytes is over its limit"),
            Self::InputTooLong => f.write_str("handshake message too long"),
            Self::Closed => f.write_str("peer closed during the handshake"),
            Self::Alpn => f.write_str("peer did not agree on the required protocol"),
            Self::Tls(error) => write!(f, "{error}"),
            Self::Switch(error) => write!(f, "after the handshake: {error}"),
            Self::Driver(what) => write!(f, "handshake driver: {what}"),
        }
    }
}

impl std::error::Error for HandshakeError {}

/// A finished handshake. Everything in the output was to be sent before `records` seals anything.
#[derive(Debug)]
pub struct Established {
    pub records: Records,
    /// DER, leaf first; empty when the peer was not asked for any.
    pub peer_certificates: Vec<Vec<u8>>,
    pub alpn: Option<Vec<u8>>,
    /// Received behind the handshake and never seen by rustls: records, the last perhaps in part. At
    /// most `RECORD_BYTES_MAX` bytes.
    pub left: Vec<u8>,
}

/// What rustls has arrived at after one look.
enum Look {
    Again,
    Blocked,
    Done,
}

/// Drives one server handshake. No I/O: the caller reads, feeds, and sends the output.
pub struct ServerHandshake {
    connection: UnbufferedServerConnection,
    alpn: Option<&'static [u8]>,
    input: Vec<u8>,
    /// Bytes at the front of `input` that rustls has seen: part of a message, or 0.
    fed: usize,
    /// The first byte was looked at.
    begun: bool,
}

impl fmt::Debug for ServerHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerHandshake")
            .field("input_bytes", &self.input.len())
            .field("fed", &self.fed)
            .finish_non_exhaustive()
    }
}

impl ServerHandshake {
    /// # Errors
    /// When rustls refuses its configuration.
    pub fn new(tls: &ServerTls) -> Result<Self, HandshakeError> {
        Ok(Self {
            connection: UnbufferedServerConnection::new(Arc::clone(&tls.config))
                .map_err(HandshakeError::Tls)?,
            alpn: tls.alpn,
            input: Vec::new(),
            fed: 0,
            begun: false,
        })
    }

    /// How many bytes the next [`Self::read`] may bring, at least 1: so that what is left over behind
    /// the handshake fits one receive buffer.
    #[must_use]
    pub const fn room(&self) -> usize {
        RECORD_MAX.saturating_sub(self.input.len() - self.fed)
    }

    /// Takes received bytes (at most [`Self::room`]) and appends to `out` what is to be sent. `true`:
    /// the handshake is done, call [`Self::establish`].
    ///
    /// # Errors
    /// The handshake is over; `out` may end with an alert for the peer.
    pub fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<bool, HandshakeError> {
        debug_assert!(bytes.len() <= self.room());
        self.input.extend_from_slice(bytes);
        self.look_at_first_byte()?;
        while let Some(end) = self.next_boundary()? {
            if self.feed(end, out)? {
                return Ok(true);
            }
        }
        if self.input.len() > INPUT_BYTES_MAX {
            return Err(HandshakeError::InputTooLong);
        }
        Ok(false)
    }

    fn look_at_first_byte(&mut self) -> Result<(), HandshakeError> {
        let Some(&first_byte) = self.input.first() else {
            return Ok(());
        };
        // change_cipher_spec, alert, handshake, application_data
        if !self.begun && !(20..=23).contains(&first_byte) {
            return Err(HandshakeError::Plaintext { first_byte });
        }
        self.begun = true;
        Ok(())
    }

    /// End of the first record that was not fed, once it is whole.
    fn next_boundary(&self) -> Result<Option<usize>, HandshakeError> {
        let Some(&[_, _, _, high, low]) = self.input[self.fed..].first_chunk() else {
            return Ok(None);
        };
        let bytes = usize::from(u16::from_be_bytes([high, low]));
        if bytes > RECORD_CIPHER_BYTES_MAX as usize {
            return Err(HandshakeError::RecordTooLong { bytes });
        }
        let end = self.fed + RECORD_HEADER_BYTES as usize + bytes;
        Ok((end <= self.input.len()).then_some(end))
    }

    /// Shows rustls `input[..end]`, one record more than last time.
    fn feed(&mut self, mut end: usize, out: &mut Vec<u8>) -> Result<bool, HandshakeError> {
        loop {
            let UnbufferedStatus { discard, state } =
                self.connection.process_tls_records(&mut self.input[..end]);
            let look = match state {
                Ok(ConnectionState::EncodeTlsData(data)) => encode(data, out).map(|()| Look::Again),
                Ok(ConnectionState::TransmitTlsData(data)) => {
                    data.done();
                    Ok(Look::Again)
                }
                Ok(ConnectionState::BlockedHandshake) => Ok(Look::Blocked),
                Ok(ConnectionState::WriteTraffic(_)) => Ok(Look::Done),
                Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => {
                    Err(HandshakeError::Closed)
                }
                // One record at a time and no early data: nothing opened can be waiting.
                Ok(_) => Err(HandshakeError::Driver(
                    "application data inside the handshake",
                )),
                Err(error) => Err(HandshakeError::Tls(error)),
            };
            self.input.drain(..discard);
            end -= discard;
            self.fed = end;
            match look.inspect_err(|_| self.last_words(out))? {
                Look::Again => {}
                Look::Done if !self.connection.is_handshaking() => return Ok(true),
                Look::Done | Look::Blocked => return Ok(false),
            }
        }
    }

    /// The alert rustls wants to send after an error. Asked for only while there is one: a call that
    /// found nothing to send would look at the input again and panic over its own broken state.
    fn last_words(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            let UnbufferedStatus { state, .. } = self
                .connection
                .process_tls_records(&mut self.input[..self.fed]);
            let Ok(ConnectionState::EncodeTlsData(data)) = state else {
                return;
            };
            if encode(data, out).is_err() {
                return;
            }
        }
    }

    /// Ends rustls' part. Called once, after [`Self::read`] returned `true`.
    ///
    /// # Errors
    /// The protocol is not the one demanded (an alert is appended to `out`), or the switch failed.
    pub fn establish(self, out: &mut Vec<u8>) -> Result<Established, HandshakeError> {
        if self.fed != 0 {
            return Err(HandshakeError::Driver(
                "part of a message behind the handshake",
            ));
        }
        let alpn = self.connection.alpn_protocol().map(<[u8]>::to_vec);
        let peer_certificates = self.connection.peer_certificates().unwrap_or_default();
        let peer_certificates = peer_certificates.iter().map(|der| der.to_vec()).collect();
        let (traffic, secrets) = self
            .connection
            .dangerous_into_kernel_connection()
            .map_err(HandshakeError::Tls)?;
        let mut records = Records::new(traffic, secrets).map_err(HandshakeError::Switch)?;
        if self.alpn.is_some() && alpn.as_deref() != self.alpn {
            let mut reply = ReplyBuf::default();
            records.fatal(Alert::NoApplicationProtocol, &mut reply);
            out.extend_from_slice(reply.as_slice());
            return Err(HandshakeError::Alpn);
        }
        Ok(Established {
            records,
            peer_certificates,
            alpn,
            left: self.input,
        })
    }
}

fn encode<D>(mut data: EncodeTlsData<'_, D>, out: &mut Vec<u8>) -> Result<(), HandshakeError> {
    let required = match data.encode(&mut []) {
        Err(EncodeError::InsufficientSize(size)) => size.required_size,
        Ok(_) => return Ok(()),
        Err(EncodeError::AlreadyEncoded) => return Err(HandshakeError::Driver("encoded twice")),
    };
    let at = out.len();
    out.resize(at + required, 0);
    match data.encode(&mut out[at..]) {
        Ok(bytes) => {
            out.truncate(at + bytes);
            Ok(())
        }
        Err(_) => Err(HandshakeError::Driver("encoding did not fit its own size")),
    }
}
