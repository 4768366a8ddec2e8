//! What the TLS and front tests share: a certificate authority, configurations, peers in memory, a
//! shard that only takes hand-overs.
//!
//! Lives on: test threads. Bound: one temporary directory per `Files`.
#![allow(dead_code, reason = "each test file uses its part")]
pub(crate) mod front;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use iop_dataplane::config::{CertificateFiles, PkiFiles};
use iop_dataplane::tls::handshake::{client_server_config, node_server_config};
use iop_dataplane::tls::{
    Established, HandshakeError, Opened, Records, ReplyBuf, ServerHandshake, ServerTls, TlsError,
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CipherSuite, ClientConfig, ClientConnection, RootCertStore};

pub(crate) const DOMAIN: &str = "test.iop";
pub(crate) const EDGE_NAME: &str = "edge-1";
pub(crate) const NODE_URI: &str = "spiffe://test.iop/node/n1";
/// Nothing here takes this long; a wait that does is a failure.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

/// A leaf to be made; the default is what an Edge or node should have.
#[derive(Clone)]
pub(crate) struct Leaf {
    pub(crate) uris: Vec<String>,
    pub(crate) dns: Vec<&'static str>,
    pub(crate) purposes: Vec<ExtendedKeyUsagePurpose>,
    pub(crate) usages: Vec<KeyUsagePurpose>,
    pub(crate) ca: IsCa,
    /// First and last year of validity.
    pub(crate) years: (i32, i32),
}

pub(crate) struct Pair {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Leaf {
    pub(crate) fn node(uri: &str) -> Self {
        Self {
            uris: vec![uri.to_owned()],
            dns: vec![],
            purposes: vec![ExtendedKeyUsagePurpose::ClientAuth],
            usages: vec![KeyUsagePurpose::DigitalSignature],
            ca: IsCa::ExplicitNoCa,
            years: (2020, 2080),
        }
    }

    pub(crate) fn edge() -> Self {
        Self {
            uris: vec![format!("spiffe://{DOMAIN}/edge/{EDGE_NAME}")],
            dns: vec!["edge.test"],
            purposes: vec![ExtendedKeyUsagePurpose::ServerAuth],
            ..Self::node("")
        }
    }
}

impl Ca {
    pub(crate) fn new() -> Self {
        Self::valid((2020, 2080))
    }

    pub(crate) fn valid(years: (i32, i32)) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name = named("test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.not_before = date_time_ymd(years.0, 1, 1);
        params.not_after = date_time_ymd(years.1, 1, 1);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    pub(crate) fn sign(&self, leaf: &Leaf) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name = named("test workload");
        for uri in &leaf.uris {
            params
                .subject_alt_names
                .push(SanType::URI(uri.as_str().try_into().unwrap()));
        }
        for &dns in &leaf.dns {
            params
                .subject_alt_names
                .push(SanType::DnsName(dns.try_into().unwrap()));
        }
        params.extended_key_usages.clone_from(&leaf.purposes);
        params.key_usages.clone_from(&leaf.usages);
        params.is_ca = leaf.ca;
        params.not_before = date_time_ymd(leaf.years.0, 1, 1);
        params.not_after = date_time_ymd(leaf.years.1, 1, 1);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Pair {
            cert: cert.pem(),
            key: key.serialize_pem(),
        }
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

impl Pair {
    pub(crate) fn der(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.cert.as_bytes()).unwrap()
    }

    fn key_der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap()
    }
}

/// A temporary directory of PEM files, removed at the end.
pub(crate) struct Files {
    pub(crate) dir: PathBuf,
}

impl Files {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("iop-tls-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self { dir }
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn pki(&self, ca: &Ca, edge: &Pair) -> PkiFiles {
        PkiFiles {
            ca: self.write("ca.pem", &ca.pem),
            cert: self.write("edge.pem", &edge.cert),
            key: self.write("edge.key", &edge.key),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

pub(crate) fn now_unix() -> i64 {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    i64::try_from(now.as_secs()).unwrap()
}

pub(crate) fn node_tls(ca: &Ca) -> ServerTls {
    let files = Files::new();
    let pki = files.pki(ca, &ca.sign(&Leaf::edge()));
    node_server_config(&pki, DOMAIN, EDGE_NAME, now_unix()).unwrap()
}

pub(crate) fn https(ca: &Ca) -> ServerTls {
    let files = Files::new();
    let pair = ca.sign(&Leaf::edge());
    let certificate = CertificateFiles {
        cert: files.write("web.pem", &pair.cert),
        key: files.write("web.key", &pair.key),
    };
    client_server_config(&certificate, now_unix()).unwrap()
}

/// How a stock peer behaves.
pub(crate) struct Peer<'a> {
    pub(crate) identity: Option<&'a Pair>,
    pub(crate) alpn: &'a [&'a [u8]],
    pub(crate) suite: Option<CipherSuite>,
}

impl<'a> Peer<'a> {
    pub(crate) fn node(identity: &'a Pair) -> Self {
        Self {
            identity: Some(identity),
            alpn: &[b"iop-edge-node/1"],
            suite: None,
        }
    }

    pub(crate) const fn browser() -> Self {
        Self {
            identity: None,
            alpn: &[b"http/1.1"],
            suite: None,
        }
    }

    pub(crate) fn config(&self, ca: &Ca) -> Arc<ClientConfig> {
        let mut provider = rustls::crypto::ring::default_provider();
        if let Some(suite) = self.suite {
            provider.cipher_suites.retain(|have| have.suite() == suite);
        }
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap())
            .unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match self.identity {
            Some(pair) => builder
                .with_client_auth_cert(vec![pair.der()], pair.key_der())
                .unwrap(),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = self.alpn.iter().map(|name| name.to_vec()).collect();
        config.enable_secret_extraction = true;
        Arc::new(config)
    }

    pub(crate) fn connection(&self, ca: &Ca) -> ClientConnection {
        ClientConnection::new(self.config(ca), server_name()).unwrap()
    }
}

pub(crate) fn server_name() -> ServerName<'static> {
    ServerName::try_from("edge.test").unwrap()
}

/// Everything the peer wants to send.
pub(crate) fn drain(peer: &mut ClientConnection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while peer.wants_write() {
        peer.write_tls(&mut bytes).unwrap();
    }
    bytes
}

/// Gives the peer bytes from the Edge.
pub(crate) fn give(peer: &mut ClientConnection, mut bytes: &[u8]) -> Result<(), rustls::Error> {
    while !bytes.is_empty() {
        peer.read_tls(&mut bytes).unwrap();
        peer.process_new_packets()?;
    }
    Ok(())
}

/// Everything the peer has received.
pub(crate) fn received(peer: &mut ClientConnection) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    while let Ok(n @ 1..) = peer.reader().read(&mut part) {
        bytes.extend_from_slice(&part[..n]);
    }
    bytes
}

/// A handshake in memory, the peer's bytes cut into pieces of at most `piece`. `eager` runs the moment
/// the peer thinks it is done, before its Finished leaves.
pub(crate) fn connect(
    tls: &ServerTls,
    peer: &mut ClientConnection,
    piece: usize,
    eager: impl FnOnce(&mut ClientConnection),
) -> Result<Established, (HandshakeError, Vec<u8>)> {
    let mut handshake = ServerHandshake::new(tls).unwrap();
    let mut eager = Some(eager);
    for _ in 0..10 {
        if !peer.is_handshaking()
            && let Some(eager) = eager.take()
        {
            eager(peer);
        }
        let flight = drain(peer);
        let mut rest = flight.as_slice();
        let mut out = Vec::new();
        while !rest.is_empty() {
            let (bytes, after) = rest.split_at(piece.min(rest.len()).min(handshake.room()));
            rest = after;
            match handshake.read(bytes, &mut out) {
                Ok(false) => {}
                Ok(true) => {
                    let end = handshake.establish(&mut out);
                    let mut end = end.map_err(|error| (error, out.clone()))?;
                    give(peer, &out).unwrap();
                    end.left.extend_from_slice(rest);
                    return Ok(end);
                }
                Err(error) => return Err((error, out)),
            }
        }
        if let Err(error) = give(peer, &out) {
            panic!("the peer gave up: {error}");
        }
    }
    panic!("the handshake does not end");
}

/// A node connection in memory, ready for data.
pub(crate) fn linked(ca: &Ca, suite: Option<CipherSuite>) -> (Records, ClientConnection) {
    let node = ca.sign(&Leaf::node(NODE_URI));
    let mut peer = Peer {
        suite,
        ..Peer::node(&node)
    }
    .connection(ca);
    let established = connect(&node_tls(ca), &mut peer, usize::MAX, |_| {}).unwrap();
    assert!(established.left.is_empty());
    (established.records, peer)
}

/// What one receive buffer gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) plain: Vec<u8>,
    pub(crate) reply: Vec<u8>,
    pub(crate) controls: usize,
    pub(crate) closed: bool,
}

/// Opens every whole record of `buffer` as a shard does, leaving what is incomplete.
pub(crate) fn take(records: &mut Records, buffer: &mut Vec<u8>) -> Result<Taken, TlsError> {
    let (mut at, mut plain_end) = (0, 0);
    let mut taken = Taken::default();
    let mut reply = ReplyBuf::default();
    loop {
        match records.open(buffer, at, plain_end, &mut reply)? {
            Opened::NeedMore => break,
            Opened::Data {
                next,
                plain_end: end,
            } => (at, plain_end) = (next, end),
            Opened::Control { next } => {
                at = next;
                taken.controls += 1;
                taken.reply.extend_from_slice(reply.as_slice());
                reply.clear();
            }
            Opened::Closed { next } => {
                at = next;
                taken.closed = true;
                break;
            }
        }
    }
    taken.plain.extend_from_slice(&buffer[..plain_end]);
    buffer.drain(..at);
    Ok(taken)
}

/// One sealed record.
pub(crate) fn sealed(records: &mut Records, plain: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; plain.len() + 22];
    buffer[5..5 + plain.len()].copy_from_slice(plain);
    let bytes = records.seal(&mut buffer, plain.len()).unwrap();
    assert_eq!(bytes, buffer.len());
    buffer
}

/// Reads until the end of the stream; a reset counts as its end.
pub(crate) fn read_to_end(stream: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    while let Ok(n @ 1..) = stream.read(&mut part) {
        bytes.extend_from_slice(&part[..n]);
    }
    bytes
}

/// Writes as much as the other side takes.
pub(crate) fn write_what_goes(stream: &mut impl Write, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}
