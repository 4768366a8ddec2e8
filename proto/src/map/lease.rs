//! Content of `credential_lease`, and the binding as the shards embed it.
use super::{WireError, take, wire};
use crate::domain::{CredentialBinding, Lease};
use prost::Message as _;

/// Encoded `iop.lease.LeaseEnvelope`.
#[must_use]
pub fn encode_lease(lease: &Lease) -> Vec<u8> {
    wire::lease::LeaseEnvelope {
        version: lease.version,
        lease_id: lease.lease_id.clone(),
        issuer_key_id: lease.issuer_key_id.clone(),
        recipient: lease.recipient.clone(),
        issued_at_unix_ms: lease.issued_at_unix_ms,
        expires_at_unix_ms: lease.expires_at_unix_ms,
        binding_digest: lease.binding_digest.clone(),
        encapsulated_key: lease.encapsulated_key.clone(),
        ciphertext: lease.ciphertext.clone(),
        signature: lease.signature.clone(),
    }
    .encode_to_vec()
}

/// # Errors
/// `bytes` is not an encoding of `iop.lease.LeaseEnvelope`.
pub fn decode_lease(bytes: &[u8]) -> Result<Lease, WireError> {
    let m: wire::lease::LeaseEnvelope = take("iop.lease.LeaseEnvelope", bytes)?;
    Ok(Lease {
        version: m.version,
        lease_id: m.lease_id,
        issuer_key_id: m.issuer_key_id,
        recipient: m.recipient,
        issued_at_unix_ms: m.issued_at_unix_ms,
        expires_at_unix_ms: m.expires_at_unix_ms,
        binding_digest: m.binding_digest,
        encapsulated_key: m.encapsulated_key,
        ciphertext: m.ciphertext,
        signature: m.signature,
    })
}

/// Encoded `iop.CredentialLeaseBinding`, to be embedded in a tunnel request as it is.
#[must_use]
pub fn encode_binding(binding: &CredentialBinding) -> Vec<u8> {
    wire::CredentialLeaseBinding::from(binding).encode_to_vec()
}
