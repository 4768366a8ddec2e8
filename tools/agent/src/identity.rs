//! Who the Edge must be, and who this node is: certificates, the one verifier, the TLS configuration.
//!
//! Lives on: process start, then every handshake. View: one trust bundle, one expected identity.
//! Bound: certificate files of `PEM_BYTES_MAX`.
//!
//! The peer is judged inside the handshake, before any byte of ours is application data: chain to the
//! trust bundle first, then the X.509-SVID rules, then the exact SPIFFE id. Its address counts for
//! nothing. `[R-008]` `[A-41]` `[D-61]`
use core::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iop_proto::ids::Now;
use iop_proto::limits::{ALPN, PEM_BYTES_MAX};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, OtherError, RootCertStore,
    SignatureScheme,
};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::Zeroizing;

use crate::config::Security;

/// What of the local identity cannot be used. Ends the process before it dials. `[A-11]` `[R-062]`
#[derive(Debug)]
pub enum CredentialError {
    /// Missing, unreadable or too long.
    File {
        path: PathBuf,
        error: std::io::Error,
    },
    /// Not the PEM it should be; `what`: certificates or a private key.
    Pem { path: PathBuf, what: &'static str },
    /// A root the verifier cannot use.
    Root { path: PathBuf, error: rustls::Error },
    /// Certificate and key do not belong together, or the key is of no known kind.
    Pair {
        cert: PathBuf,
        key: PathBuf,
        error: rustls::Error,
    },
    /// Past its notAfter when the process started.
    Expired { path: PathBuf },
    /// The leaf is no X.509 certificate.
    Leaf { path: PathBuf },
    /// No key of the credential plane, or another one.
    Key {
        path: PathBuf,
        error: iop_lease::KeyError,
    },
}

impl fmt::Display for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Pem { path, what } => {
                write!(f, "{}: holds no {what} in PEM form", path.display())
            }
            Self::Root { path, error } => write!(f, "{}: unusable root: {error}", path.display()),
            Self::Pair { cert, key, error } => {
                write!(f, "{} and {}: {error}", cert.display(), key.display())
            }
            Self::Expired { path } => write!(f, "{}: the certificate has expired", path.display()),
            Self::Leaf { path } => write!(f, "{}: not an X.509 certificate", path.display()),
            Self::Key { path, error } => write!(f, "{}: {error}", path.display()),
        }
    }
}

impl core::error::Error for CredentialError {}

/// Whether the configured certificate and key files can be used at this moment, without dialling.
///
/// # Errors
/// The first file that would end [`crate::run`] at its start.
pub fn check_credentials(config: &crate::NodeConfig) -> Result<(), CredentialError> {
    tls_config(&config.security, UnixTime::now())?;
    if let Some(files) = &config.credentials {
        crate::credential::Plane::read(files, &config.node_id, Now::default(), 0)?;
    }
    Ok(())
}

/// A key file of the credential plane.
pub(crate) fn key_text<T>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, iop_lease::KeyError>,
) -> Result<T, CredentialError> {
    let text = contents(path)?;
    // What is not text is no key either.
    let text = core::str::from_utf8(&text).unwrap_or_default();
    parse(text).map_err(|error| CredentialError::Key {
        path: path.to_owned(),
        error,
    })
}

/// Builds the client side of the node protocol's TLS from the configured files; `None` for plaintext.
///
/// # Errors
/// The first file that cannot be used. The certificate's validity is judged at `now`.
pub(crate) fn tls_config(
    security: &Security,
    now: UnixTime,
) -> Result<Option<Arc<ClientConfig>>, CredentialError> {
    let Security::Mutual {
        ca,
        cert,
        key,
        edge_id,
    } = security
    else {
        return Ok(None);
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for root in certificates(ca)? {
        let unusable = |error| CredentialError::Root {
            path: ca.clone(),
            error,
        };
        roots.add(root).map_err(unusable)?;
    }
    let chain = certificates(cert)?;
    judge_own(&chain[0], now, cert)?;
    let private =
        PrivateKeyDer::from_pem_slice(&contents(key)?).map_err(|_| CredentialError::Pem {
            path: key.clone(),
            what: "private key",
        })?;
    let pair = |error| CredentialError::Pair {
        cert: cert.clone(),
        key: key.clone(),
        error,
    };
    let own = CertifiedKey::from_der(chain, private, &provider).map_err(pair)?;
    let verifier = EdgeVerifier {
        roots,
        edge_id: edge_id.clone(),
        provider: provider.clone(),
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(pair)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(own)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would not show the certificate again.
    config.resumption = Resumption::disabled();
    Ok(Some(Arc::new(config)))
}

fn judge_own(leaf: &CertificateDer<'_>, now: UnixTime, path: &Path) -> Result<(), CredentialError> {
    let (_, leaf) = X509Certificate::from_der(leaf).map_err(|_| CredentialError::Leaf {
        path: path.to_owned(),
    })?;
    let until = u64::try_from(leaf.validity().not_after.timestamp()).unwrap_or(0);
    if now.as_secs() > until {
        return Err(CredentialError::Expired {
            path: path.to_owned(),
        });
    }
    Ok(())
}

fn contents(path: &Path) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
    let failed = |error| CredentialError::File {
        path: path.to_owned(),
        error,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    // All of it at once: growing would leave a copy of a key's beginning behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(PEM_BYTES_MAX as usize + 1));
    file.take(u64::from(PEM_BYTES_MAX) + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() > PEM_BYTES_MAX as usize {
        let error = std::io::Error::new(std::io::ErrorKind::FileTooLarge, "too long");
        return Err(failed(error));
    }
    Ok(bytes)
}

/// At least one certificate.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialError> {
    let bytes = contents(path)?;
    let all = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    all.ok()
        .filter(|all| !all.is_empty())
        .ok_or_else(|| CredentialError::Pem {
            path: path.to_owned(),
            what: "certificates",
        })
}

/// Why a certificate whose chain is good is still not the Edge. `[R-017]` `[R-018]` `[D-61]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdentityError {
    Malformed,
    /// A CA certificate, or one without keyUsage digitalSignature.
    NotALeaf,
    /// An extendedKeyUsage without serverAuth.
    NotAServer,
    /// Not exactly one URI name, or no SPIFFE id.
    NoSpiffeId,
    /// Of this trust domain, but no Edge.
    WrongRole,
    /// Another Edge, or another trust domain.
    WrongName,
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => "the peer's certificate is malformed",
            Self::NotALeaf => "the peer's certificate is no signing leaf",
            Self::NotAServer => "the peer's certificate is not for servers",
            Self::NoSpiffeId => "the peer's certificate carries no single SPIFFE id",
            Self::WrongRole => "the peer is no edge",
            Self::WrongName => "the peer is another edge",
        })
    }
}

impl core::error::Error for IdentityError {}

/// Judges a leaf whose chain was verified against the X.509-SVID rules and the one expected id.
pub(crate) fn judge_edge(leaf: &[u8], edge_id: &str) -> Result<(), IdentityError> {
    let (_, leaf) = X509Certificate::from_der(leaf).map_err(|_| IdentityError::Malformed)?;
    let malformed = |_| IdentityError::Malformed;
    let is_ca = leaf
        .basic_constraints()
        .map_err(malformed)?
        .is_some_and(|basic| basic.value.ca);
    let usage = leaf.key_usage().map_err(malformed)?;
    let signs = usage.is_some_and(|usage| {
        usage.value.digital_signature() && !usage.value.key_cert_sign() && !usage.value.crl_sign()
    });
    if is_ca || !signs {
        return Err(IdentityError::NotALeaf);
    }
    let extended = leaf.extended_key_usage().map_err(malformed)?;
    if extended.is_some_and(|usage| !usage.value.server_auth) {
        return Err(IdentityError::NotAServer);
    }
    let names = leaf.subject_alternative_name().map_err(malformed)?;
    let names = names.map_or(&[][..], |names| &names.value.general_names);
    let mut uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let (Some(id), None) = (uris.next(), uris.next()) else {
        return Err(IdentityError::NoSpiffeId);
    };
    judge_id(id, edge_id)
}

fn judge_id(id: &str, edge_id: &str) -> Result<(), IdentityError> {
    if id == edge_id {
        return Ok(());
    }
    let parts = |id: &str| {
        let mut parts = id
            .strip_prefix("spiffe://")?
            .splitn(3, '/')
            .map(str::to_owned);
        Some((parts.next()?, parts.next()?, parts.next()?))
    };
    match (parts(id), parts(edge_id)) {
        (Some((domain, role, _)), Some((own_domain, own_role, _))) => {
            let other_role = domain == own_domain && role != own_role;
            Err(if other_role {
                IdentityError::WrongRole
            } else {
                IdentityError::WrongName
            })
        }
        _ => Err(IdentityError::NoSpiffeId),
    }
}

#[derive(Debug)]
struct EdgeVerifier {
    roots: RootCertStore,
    edge_id: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for EdgeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &self.roots,
            intermediates,
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        judge_edge(end_entity, &self.edge_id).map_err(|error| {
            rustls::Error::from(CertificateError::Other(OtherError(Arc::new(error))))
        })?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_into_one_buffer_and_the_longest_one_passes() {
        let path = std::env::temp_dir().join(format!("iop-agent-pem-{}", std::process::id()));
        for (surplus, fits) in [(0, true), (1, false)] {
            std::fs::write(&path, vec![b'x'; PEM_BYTES_MAX as usize + surplus]).unwrap();
            let read = contents(&path).map(|bytes| (bytes.len(), bytes.capacity()));
            assert_eq!(read.is_ok(), fits);
            let whole = PEM_BYTES_MAX as usize;
            assert!(!fits || matches!(read, Ok(read) if read == (whole, whole + 1)));
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_id_is_judged_by_domain_role_and_name() {
        let edge = "spiffe://d/edge/one";
        assert_eq!(judge_id(edge, edge), Ok(()));
        for (id, expected) in [
            ("spiffe://d/node/one", IdentityError::WrongRole),
            ("spiffe://d/edge/two", IdentityError::WrongName),
            ("spiffe://D/edge/one", IdentityError::WrongName),
            ("spiffe://d/edge/one/", IdentityError::WrongName),
            ("spiffe://d/edge", IdentityError::NoSpiffeId),
            ("https://d/edge/one", IdentityError::NoSpiffeId),
            ("", IdentityError::NoSpiffeId),
        ] {
            assert_eq!(judge_id(id, edge), Err(expected), "{id}");
        }
    }
}
