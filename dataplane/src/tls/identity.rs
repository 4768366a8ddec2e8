//! Workload identity of a certificate: the X.509-SVID rules as an Edge
//! judges them of a node and of its own. `[A-41]` `[D-61]`
//!
//! Lives on: the front, once per handshake; the main thread at start. View: one leaf certificate that
//! the TLS library has verified up to a configured CA. Bound: `IDENTITY_BYTES_MAX`.
//!
//! ```text
//! spiffe://<trust domain>/<role>/<name>      role: edge | node
//! ```
use core::fmt;

use iop_proto::reason::Reason;
use iop_proto::spiffe::{is_segment, is_trust_domain};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// Longest SPIFFE id (SPIFFE-ID §2.3).
const IDENTITY_BYTES_MAX: usize = 2_048;
const SCHEME: &str = "spiffe://";

/// What a workload is, by its certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Edge,
    Node,
}

impl Role {
    /// Spelling in a SPIFFE id.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Edge => "edge",
            Self::Node => "node",
        }
    }
}

/// A certificate that meets the rules for one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub role: Role,
    /// Last segment of the SPIFFE id; never empty.
    pub name: String,
    /// When the certificate ends, Unix seconds. `[D-05]`
    pub not_after_unix: i64,
}

/// Which rule a certificate breaks. Peer-chosen text is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityError {
    /// No certificate at all.
    NoCertificate,
    /// Not a certificate, an extension that does not parse or stands twice, bytes behind the end.
    Unparseable,
    /// basicConstraints CA true, or a key that may sign certificates or CRLs.
    Authority,
    /// keyUsage is absent or lacks digitalSignature.
    NoDigitalSignature,
    /// extendedKeyUsage is present without the role's purpose (clientAuth, serverAuth).
    WrongPurpose,
    /// No URI among the subject alternative names.
    NoUri,
    /// More than one URI.
    ManyUris { uris: usize },
    /// The URI is not `spiffe://<trust domain>/<role>/<name>` by the rules of SPIFFE-ID.
    NotSpiffe,
    /// Well-formed, of another trust domain.
    WrongTrustDomain,
    /// Well-formed, of another role than expected.
    WrongRole,
}

impl IdentityError {
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::NoCertificate | Self::NoUri => Reason::IdentityMissing,
            Self::Unparseable
            | Self::Authority
            | Self::NoDigitalSignature
            | Self::WrongPurpose
            | Self::ManyUris { .. }
            | Self::NotSpiffe
            | Self::WrongTrustDomain => Reason::IdentityInvalid,
            Self::WrongRole => Reason::IdentityWrongRole,
        }
    }
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoCertificate => "no certificate",
            Self::Unparseable => "not a well-formed certificate",
            Self::Authority => "a certificate authority's certificate",
            Self::NoDigitalSignature => "keyUsage without digitalSignature",
            Self::WrongPurpose => "extendedKeyUsage without the role's purpose",
            Self::NoUri => "no URI among its names",
            Self::ManyUris { uris } => {
                return write!(f, "{uris} URIs among its names, expected one");
            }
            Self::NotSpiffe => "its URI is not spiffe://<trust domain>/<role>/<name>",
            Self::WrongTrustDomain => "another trust domain",
            Self::WrongRole => "another role than expected",
        })
    }
}

impl std::error::Error for IdentityError {}

/// The identity in `leaf` (DER), judged for a workload of `role` in `trust_domain`. Signature and
/// validity period are not looked at: the TLS library has done so for a peer.
///
/// # Errors
/// The first rule that is broken, in the order of [`IdentityError`].
pub fn identify(leaf: &[u8], trust_domain: &str, role: Role) -> Result<Identity, IdentityError> {
    let (rest, certificate) =
        X509Certificate::from_der(leaf).map_err(|_| IdentityError::Unparseable)?;
    if !rest.is_empty() {
        return Err(IdentityError::Unparseable);
    }
    check_usage(&certificate, role)?;
    let name = spiffe_name(the_uri(&certificate)?, trust_domain, role)?;
    Ok(Identity {
        role,
        name: name.to_owned(),
        not_after_unix: certificate.validity().not_after.timestamp(),
    })
}

/// First and last second of `certificate`'s validity, Unix time; `None` when it does not parse.
#[must_use]
pub fn validity_unix(certificate: &[u8]) -> Option<(i64, i64)> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let validity = certificate.validity();
    Some((
        validity.not_before.timestamp(),
        validity.not_after.timestamp(),
    ))
}

fn check_usage(certificate: &X509Certificate<'_>, role: Role) -> Result<(), IdentityError> {
    let constraints = certificate
        .basic_constraints()
        .map_err(|_| IdentityError::Unparseable)?;
    if constraints.is_some_and(|extension| extension.value.ca) {
        return Err(IdentityError::Authority);
    }
    let usage = certificate
        .key_usage()
        .map_err(|_| IdentityError::Unparseable)?
        .ok_or(IdentityError::NoDigitalSignature)?
        .value;
    if usage.key_cert_sign() || usage.crl_sign() {
        return Err(IdentityError::Authority);
    }
    if !usage.digital_signature() {
        return Err(IdentityError::NoDigitalSignature);
    }
    let purposes = certificate
        .extended_key_usage()
        .map_err(|_| IdentityError::Unparseable)?;
    let allowed = purposes.is_none_or(|extension| match role {
        Role::Edge => extension.value.server_auth,
        Role::Node => extension.value.client_auth,
    });
    if allowed {
        Ok(())
    } else {
        Err(IdentityError::WrongPurpose)
    }
}

/// Exactly one URI; names of other kinds may stand beside it.
fn the_uri<'a>(certificate: &'a X509Certificate<'_>) -> Result<&'a str, IdentityError> {
    let names = certificate
        .subject_alternative_name()
        .map_err(|_| IdentityError::Unparseable)?
        .ok_or(IdentityError::NoUri)?
        .value;
    let mut found = None;
    let mut uris = 0;
    for name in &names.general_names {
        match name {
            GeneralName::URI(uri) => {
                found = Some(*uri);
                uris += 1;
            }
            GeneralName::Invalid(..) => return Err(IdentityError::Unparseable),
            _ => {}
        }
    }
    if uris > 1 {
        return Err(IdentityError::ManyUris { uris });
    }
    found.ok_or(IdentityError::NoUri)
}

fn spiffe_name<'a>(uri: &'a str, trust_domain: &str, role: Role) -> Result<&'a str, IdentityError> {
    if uri.len() > IDENTITY_BYTES_MAX {
        return Err(IdentityError::NotSpiffe);
    }
    let rest = uri.strip_prefix(SCHEME).ok_or(IdentityError::NotSpiffe)?;
    let mut parts = rest.split('/');
    let (Some(domain), Some(role_part), Some(name), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(IdentityError::NotSpiffe);
    };
    if !is_trust_domain(domain) || !is_segment(role_part) || !is_segment(name) {
        return Err(IdentityError::NotSpiffe);
    }
    if domain != trust_domain {
        return Err(IdentityError::WrongTrustDomain);
    }
    if role_part != role.name() {
        return Err(IdentityError::WrongRole);
    }
    Ok(name)
}
