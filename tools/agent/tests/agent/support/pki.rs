//! Throw-away authorities and certificates, as files in a directory that goes with them.
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use iop_agent::config::Security;
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;

use super::plant;

pub(crate) const EDGE_ID: &str = "spiffe://iop.test/edge/e1";
pub(crate) const NODE_ID: &str = "spiffe://iop.test/node/n1";

/// What a certificate is made of; the default is a valid leaf.
#[derive(Clone)]
pub(crate) struct Leaf {
    pub(crate) uris: Vec<String>,
    pub(crate) dns: Vec<String>,
    pub(crate) usages: Vec<KeyUsagePurpose>,
    pub(crate) extended: Vec<ExtendedKeyUsagePurpose>,
    pub(crate) is_ca: IsCa,
    /// First and last year of validity.
    pub(crate) years: (i32, i32),
}

impl Leaf {
    pub(crate) fn of(uri: &str) -> Self {
        Self {
            uris: vec![uri.to_owned()],
            dns: vec![],
            usages: vec![KeyUsagePurpose::DigitalSignature],
            extended: vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
            is_ca: IsCa::ExplicitNoCa,
            years: (2020, 2120),
        }
    }
}

impl Leaf {
    /// Also a host name, for servers that are known by one.
    pub(crate) fn named(mut self, dns: &str) -> Self {
        self.dns.push(dns.to_owned());
        self
    }
}

/// One authority and its directory.
pub(crate) struct Pki {
    pub(crate) directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
}

impl Drop for Pki {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Pki {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("iop-agent-test-{}-{n}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap();
        plant(&directory, "ca.pem", &root.pem());
        Self {
            directory,
            issuer: Issuer::new(params, key),
            root: root.der().clone(),
        }
    }

    pub(crate) fn leaf(&self, leaf: &Leaf) -> (CertificateDer<'static>, KeyPair, String) {
        let mut params = CertificateParams::new(leaf.dns.clone()).unwrap();
        let uris = leaf
            .uris
            .iter()
            .map(|uri| SanType::URI(uri.as_str().try_into().unwrap()));
        params.subject_alt_names.extend(uris);
        params.key_usages.clone_from(&leaf.usages);
        params.extended_key_usages.clone_from(&leaf.extended);
        params.is_ca = leaf.is_ca;
        params.not_before = rcgen::date_time_ymd(leaf.years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(leaf.years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.der().clone(), key, certificate.pem())
    }

    /// Text of the node's certificate, its key and the roots, as another place would hold them.
    pub(crate) fn material(&self, leaf: &Leaf) -> [(&'static str, String); 3] {
        let (_, key, pem) = self.leaf(leaf);
        let roots = std::fs::read_to_string(self.directory.join("ca.pem")).unwrap();
        [
            ("node.pem", pem),
            ("node.key", key.serialize_pem()),
            ("ca.pem", roots),
        ]
    }

    /// The node's side: its files, and the Edge it expects.
    pub(crate) fn node(&self, leaf: &Leaf) -> Security {
        let (_, key, pem) = self.leaf(leaf);
        Security::Mutual {
            ca: self.directory.join("ca.pem"),
            cert: plant(&self.directory, "node.pem", &pem),
            key: plant(&self.directory, "node.key", &key.serialize_pem()),
            edge_id: EDGE_ID.to_owned(),
        }
    }

    /// The Edge's side: demands a certificate of this authority, presents `leaf`.
    pub(crate) fn edge(&self, leaf: &Leaf, alpn: &[&[u8]]) -> rustls::ServerConfig {
        self.edge_for(self, leaf, alpn)
    }

    /// The same, demanding certificates of another authority: theirs are good here, ours not there.
    pub(crate) fn edge_for(
        &self,
        nodes: &Self,
        leaf: &Leaf,
        alpn: &[&[u8]],
    ) -> rustls::ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(nodes.root.clone()).unwrap();
        let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
        let (certificate, key, _) = self.leaf(leaf);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(clients.build().unwrap())
            .with_single_cert(vec![certificate], key)
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        config
    }

    /// A plain HTTPS server: presents `leaf`, asks for nothing.
    pub(crate) fn server(&self, leaf: &Leaf) -> rustls::ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (certificate, key, _) = self.leaf(leaf);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap()
    }
}
