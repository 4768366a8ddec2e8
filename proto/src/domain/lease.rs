//! A credential lease: its signed envelope, and the canonical bytes that digests and signatures cover.
//!
//! Lives on: the Edge's issuer thread, the node agent. Bound: `LEASE_BYTES_MAX` an envelope.
//!
//! ```text
//!  tag            field                field
//!  +--------------+--------+-----------+--------+-----------+ …     lengths u32 big-endian, bytes
//!  | iop-lease-v1 | length | value     | length | value     |       integers big-endian at full width
//!  +--------------+--------+-----------+--------+-----------+ …
//! ```
//! Not protobuf: two encoders of one message may differ, two of these forms may not. `[wire §5]`
use bytes::Bytes;

use super::{Adapter, CredentialBinding, Profile};

/// First bytes of what an issuer signs.
const LEASE_TAG: &[u8] = b"iop-lease-v1";
/// First bytes of what `binding_digest` covers.
const BINDING_TAG: &[u8] = b"iop-binding-v1";
/// First bytes of what a profile's digest covers. `[A-67]`
const PROFILE_TAG: &[u8] = b"iop-profile-v1";

/// `iop.lease.LeaseEnvelope`, fields in the order of their numbers. Never printed, even though sealed.
#[derive(Clone, Default, PartialEq, Eq)]
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct Lease {
    pub version: u32,
    /// 128 random bits in hex: usable once.
    pub lease_id: String,
    pub issuer_key_id: String,
    /// The key it is sealed to.
    pub recipient: String,
    pub issued_at_unix_ms: i64,
    pub expires_at_unix_ms: i64,
    /// SHA-256 of [`CredentialBinding::canonical`].
    pub binding_digest: Bytes,
    /// HPKE `enc`.
    pub encapsulated_key: Bytes,
    pub ciphertext: Bytes,
    /// Ed25519 over [`Self::signed`].
    pub signature: Bytes,
}

impl Lease {
    /// Fields 1 to 7: the associated data of the ciphertext.
    #[must_use]
    pub fn sealed_with(&self) -> Vec<u8> {
        let mut form = Form(Vec::new());
        self.public_fields(&mut form);
        form.0
    }

    /// Tag and fields 1 to 9: what the signature covers.
    #[must_use]
    pub fn signed(&self) -> Vec<u8> {
        let mut form = Form(LEASE_TAG.to_vec());
        self.public_fields(&mut form);
        form.field(&self.encapsulated_key);
        form.field(&self.ciphertext);
        form.0
    }

    fn public_fields(&self, form: &mut Form) {
        form.field(&self.version.to_be_bytes());
        form.field(self.lease_id.as_bytes());
        form.field(self.issuer_key_id.as_bytes());
        form.field(self.recipient.as_bytes());
        form.field(&self.issued_at_unix_ms.to_be_bytes());
        form.field(&self.expires_at_unix_ms.to_be_bytes());
        form.field(&self.binding_digest);
    }
}

impl CredentialBinding {
    /// Tag and the ten components: what `binding_digest` covers. `[R-228]`
    #[must_use]
    pub fn canonical(&self) -> Vec<u8> {
        let mut form = Form(BINDING_TAG.to_vec());
        for text in self.texts() {
            form.field(text.as_bytes());
        }
        form.field(&self.credential_revision.to_be_bytes());
        form.field(&self.route_revision.to_be_bytes());
        form.field(&self.projection_generation.to_be_bytes());
        form.0
    }

    /// No string component is empty; numbers are not judged. `[A-61]`
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.texts().iter().all(|text| !text.is_empty())
    }

    const fn texts(&self) -> [&str; 7] {
        [
            self.principal.as_str(),
            self.slot.as_str(),
            self.route.as_str(),
            self.profile.as_str(),
            self.upstream_target.as_str(),
            self.node_id.as_str(),
            self.recipient.as_str(),
        ]
    }
}

impl Adapter {
    /// What the digest of this adapter's `profile` covers: whatever decides where a credential goes.
    /// `[A-67]`
    #[must_use]
    pub fn profile_canonical(&self, profile: &Profile) -> Vec<u8> {
        let mut form = Form(PROFILE_TAG.to_vec());
        form.field(self.resolved_name().as_bytes());
        form.field(self.base_url.as_bytes());
        form.field(profile.id.as_bytes());
        for operation in &profile.operations {
            form.field(operation.name.as_bytes());
            form.field(operation.method.as_bytes());
            form.field(operation.path.as_bytes());
        }
        form.field(profile.auth_header.as_bytes());
        form.field(profile.auth_prefix.as_bytes());
        form.0
    }
}

struct Form(Vec<u8>);

impl Form {
    fn field(&mut self, value: &[u8]) {
        let length = u32::try_from(value.len()).expect("fields of one envelope");
        self.0.extend_from_slice(&length.to_be_bytes());
        self.0.extend_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_delimited_so_that_no_two_bindings_share_a_form() {
        let of = |principal: &str, slot: &str| {
            CredentialBinding {
                principal: principal.to_owned(),
                slot: slot.to_owned(),
                ..CredentialBinding::default()
            }
            .canonical()
        };
        assert_ne!(of("ab", "c"), of("a", "bc"));
        assert_ne!(of("", "a"), of("a", ""));
        let form = of("p", "");
        assert_eq!(&form[..19], b"iop-binding-v1\0\0\0\x01p");
        assert_eq!(form.len(), 14 + 7 * 4 + 1 + 3 * (4 + 8));
    }
}
