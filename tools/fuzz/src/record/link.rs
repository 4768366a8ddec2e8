//! One connection after a handshake in memory: our records, and a stock client at the other end.
//!
//! Lives on: one thread. View: one connection. Bound: one handshake per input.
use std::io::Read as _;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use iop_dataplane::config::CertificateFiles;
use iop_dataplane::tls::handshake::client_server_config;
use iop_dataplane::tls::{Records, ServerHandshake, ServerTls};
use rustls::pki_types::CertificateDer;
use rustls::{CipherSuite, ClientConfig, ClientConnection, KeyLog, RootCertStore};

use super::Sealer;

const SUITES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];
const NAME: &str = "edge.test";
/// A moment within the certificate's validity, seconds since 1970.
const NOW_UNIX: i64 = 1_800_000_000;

/// The client's first application traffic secret of the last handshake.
#[derive(Debug, Default)]
struct Secret(Mutex<Vec<u8>>);

impl KeyLog for Secret {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if label == "CLIENT_TRAFFIC_SECRET_0" {
            secret.clone_into(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// Made once per process; a handshake takes its configuration from here.
struct Ends {
    server: ServerTls,
    certificate: CertificateDer<'static>,
}

static ENDS: LazyLock<Ends> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]);
    let made = made.expect("a certificate of a plain name");
    let place = std::env::temp_dir().join(format!("iop-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a temporary folder");
    let files = CertificateFiles {
        cert: place.join("edge.pem"),
        key: place.join("edge.key"),
    };
    std::fs::write(&files.cert, made.cert.pem()).expect("a temporary file");
    std::fs::write(&files.key, made.signing_key.serialize_pem()).expect("a temporary file");
    let server = client_server_config(&files, NOW_UNIX).expect("a server's configuration");
    // Left behind, it would only be litter.
    drop(std::fs::remove_dir_all(&place));
    Ends {
        server,
        certificate: made.cert.der().clone(),
    }
});

fn client_config(suite: CipherSuite, secret: Arc<Secret>) -> ClientConfig {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.retain(|have| have.suite() == suite);
    let mut roots = RootCertStore::empty();
    roots
        .add(ENDS.certificate.clone())
        .expect("our own certificate");
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("a suite of TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.key_log = secret;
    config
}

pub(crate) struct Link {
    pub(crate) records: Records,
    peer: ClientConnection,
}

impl Link {
    /// A new connection, and what seals as its client.
    pub(crate) fn new(suite: usize) -> (Self, Sealer) {
        let suite = SUITES[suite % SUITES.len()];
        let secret = Arc::new(Secret::default());
        let config = Arc::new(client_config(suite, Arc::clone(&secret)));
        let name = NAME.try_into().expect("a DNS name");
        let mut peer = ClientConnection::new(config, name).expect("a client");
        let records = connect(&mut peer);
        let secret = secret
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        (Self { records, peer }, Sealer::new(suite, secret))
    }

    /// Gives the peer bytes of ours.
    pub(crate) fn give(&mut self, bytes: &[u8]) -> Result<(), rustls::Error> {
        give(&mut self.peer, bytes)
    }

    /// Everything the peer has received.
    pub(crate) fn received(&mut self) -> Vec<u8> {
        let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = self.peer.reader().read(&mut part) {
            bytes.extend_from_slice(&part[..length]);
        }
        bytes
    }
}

fn give(peer: &mut ClientConnection, mut bytes: &[u8]) -> Result<(), rustls::Error> {
    while !bytes.is_empty() {
        peer.read_tls(&mut bytes).expect("a slice can be read");
        peer.process_new_packets()?;
    }
    Ok(())
}

fn connect(peer: &mut ClientConnection) -> Records {
    let mut server = ServerHandshake::new(&ENDS.server).expect("a handshake");
    for _ in 0..10 {
        let (mut flight, mut out) = (Vec::new(), Vec::new());
        while peer.wants_write() {
            peer.write_tls(&mut flight)
                .expect("a vector can be written");
        }
        let mut rest = flight.as_slice();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(server.room()));
            rest = after;
            if server
                .read(piece, &mut out)
                .expect("a stock client's handshake")
            {
                let established = server.establish(&mut out).expect("a whole handshake");
                assert!(established.left.is_empty() && rest.is_empty());
                give(peer, &out).expect("tickets");
                return established.records;
            }
        }
        give(peer, &out).expect("a server's flight");
    }
    panic!("the handshake does not end");
}
