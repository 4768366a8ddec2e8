//! Credential leases: a provider credential on its way from the Edge to the one node that may use it.
//!
//! Lives on: the Edge's issuer thread, the node agent. View: one lease. Bound: `LEASE_BYTES_MAX` a
//! lease, `SECRET_BYTES_MAX` a credential.
//!
//! ```text
//! issue:  seal to the recipient's key (HPKE) ─► sign (Ed25519) ─► bytes of `credential_lease`
//! node:   Recipient::verify ─► Verified, not opened ─► the caller's replay table ─► Verified::open
//! ```
//! Encrypt, then sign: a node verifies everything before any plaintext exists. `[wire §5]`
#![forbid(unsafe_code)]
mod judge;
mod key;
mod seal;

pub use judge::{Expected, LeaseError, Recipient, Verified, Window};
pub use key::{
    IssuerKey, IssuerPublic, KeyError, KeyKind, RecipientKey, RecipientPublic, StoreKey,
    secret_text,
};
pub use seal::{Entropy, IssueError, Terms, issue};

use iop_proto::domain::{Adapter, CredentialBinding, Profile};
use ring::digest::{SHA256, digest};

/// `LeaseEnvelope.version`.
const VERSION: u32 = 1;
/// Bytes of a lease id before it is spelled in hex.
const LEASE_ID_BYTES: usize = 16;

/// `LeaseEnvelope.binding_digest`.
fn binding_digest(binding: &CredentialBinding) -> [u8; 32] {
    sha256(&binding.canonical())
}

/// `CredentialLeaseBinding.profile`: the profile's id, `#`, and the digest of all that decides where
/// the credential goes and how. `[A-67]`
#[must_use]
pub fn profile_component(adapter: &Adapter, profile: &Profile) -> String {
    let digest = sha256(&adapter.profile_canonical(profile));
    format!("{}#{}", profile.id, hex(&digest))
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = digest(&SHA256, bytes);
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// Lower-case digits.
fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from(DIGITS[usize::from(nibble)]));
        }
    }
    text
}
