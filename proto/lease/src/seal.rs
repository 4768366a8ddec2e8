//! Making a lease, and the one suite it is sealed with: HPKE base mode, X25519-HKDF-SHA256,
//! ChaCha20-Poly1305 (RFC 9180), `info` empty.
//!
//! Lives on: the Edge's issuer thread. View: one lease. Bound: `SECRET_BYTES_MAX`.
use core::convert::Infallible;
use core::fmt;

use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::{Kem, X25519HkdfSha256};
use hpke::rand_core::{TryCryptoRng, TryRng};
use hpke::{Deserializable as _, OpModeR, OpModeS, Serializable as _};
use iop_proto::domain::{CredentialBinding, Lease};
use iop_proto::limits::SECRET_BYTES_MAX;
use iop_proto::map;
use zeroize::Zeroizing;

use crate::{
    IssuerKey, LEASE_ID_BYTES, RecipientKey, RecipientPublic, VERSION, binding_digest, hex,
};

/// Bytes of the authentication tag behind a ciphertext.
pub(crate) const TAG_BYTES: usize = 16;

/// When a lease holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub issued_at_unix_ms: i64,
    pub expires_at_unix_ms: i64,
}

/// Random bytes of one lease, used for no other.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct Entropy {
    pub lease_id: [u8; LEASE_ID_BYTES],
    /// The ephemeral key is derived from it (RFC 9180 §7.1.3).
    pub ephemeral: Zeroizing<[u8; 32]>,
}

/// Why there is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssueError {
    /// Empty, or longer than `SECRET_BYTES_MAX`.
    SecretSize,
    /// The recipient's public key is no usable point.
    Recipient,
    /// The binding names another recipient than the key.
    Binding,
}

impl fmt::Display for IssueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SecretSize => "the credential is empty or too long",
            Self::Recipient => "the node's recipient key is not usable",
            Self::Binding => "the binding names another recipient",
        })
    }
}

impl core::error::Error for IssueError {}

/// Bytes of `credential_lease`: `secret`, sealed to `recipient` and signed by `issuer`, good for
/// `binding` alone. `[R-209]` `[R-210]`
///
/// # Errors
/// Nothing was made.
pub fn issue(
    issuer: &IssuerKey,
    recipient: &RecipientPublic,
    binding: &CredentialBinding,
    secret: &[u8],
    terms: Terms,
    entropy: &Entropy,
) -> Result<Vec<u8>, IssueError> {
    if secret.is_empty() || secret.len() > SECRET_BYTES_MAX as usize {
        return Err(IssueError::SecretSize);
    }
    if binding.recipient != recipient.id() {
        return Err(IssueError::Binding);
    }
    let mut lease = Lease {
        version: VERSION,
        lease_id: hex(&entropy.lease_id),
        issuer_key_id: issuer.id().to_owned(),
        recipient: recipient.id().to_owned(),
        issued_at_unix_ms: terms.issued_at_unix_ms,
        expires_at_unix_ms: terms.expires_at_unix_ms,
        binding_digest: binding_digest(binding).to_vec().into(),
        ..Lease::default()
    };
    let (enc, ciphertext) = seal(
        &recipient.key,
        &[],
        &lease.sealed_with(),
        secret,
        &entropy.ephemeral,
    )
    .ok_or(IssueError::Recipient)?;
    lease.encapsulated_key = enc.into();
    lease.ciphertext = ciphertext.into();
    lease.signature = issuer.sign(&lease.signed()).into();
    Ok(map::encode_lease(&lease))
}

type Public = <X25519HkdfSha256 as Kem>::PublicKey;

/// `enc` and ciphertext.
fn seal(
    to: &Public,
    info: &[u8],
    aad: &[u8],
    plaintext: &[u8],
    ephemeral: &[u8; 32],
) -> Option<(Vec<u8>, Vec<u8>)> {
    let sealed = hpke::single_shot_seal_with_rng::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
        &OpModeS::Base,
        to,
        info,
        plaintext,
        aad,
        &mut Once(ephemeral),
    );
    let (enc, ciphertext) = sealed.ok()?;
    Some((enc.to_bytes().to_vec(), ciphertext))
}

/// What was sealed; `None` for anything else.
pub(crate) fn open(
    key: &RecipientKey,
    info: &[u8],
    aad: &[u8],
    enc: &[u8],
    ciphertext: &[u8],
) -> Option<Zeroizing<Vec<u8>>> {
    let enc = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(enc).ok()?;
    let opened = hpke::single_shot_open::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
        &OpModeR::Base,
        &key.secret,
        &enc,
        info,
        ciphertext,
        aad,
    );
    opened.ok().map(Zeroizing::new)
}

/// Hands out given bytes: the suite draws exactly 32, once.
struct Once<'a>(&'a [u8; 32]);

impl TryRng for Once<'_> {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        unreachable!("the suite draws the ephemeral key's 32 bytes and nothing else")
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        unreachable!("the suite draws the ephemeral key's 32 bytes and nothing else")
    }

    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Infallible> {
        out.copy_from_slice(self.0);
        Ok(())
    }
}

impl TryCryptoRng for Once<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(digit).collect()
    }

    fn fixed(text: &str) -> [u8; 32] {
        bytes(text).try_into().unwrap()
    }

    /// RFC 9180, appendix A.2.1, sequence number 0.
    #[test]
    fn the_suite_seals_and_opens_as_rfc_9180_publishes() {
        let key = RecipientKey::from_bytes(&fixed(
            "8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb",
        ));
        let public = "4310ee97d88cc1f088a5576c77ab0cf5c3ac797f3d95139c6c84b5429c59662a";
        assert_eq!(key.public().key.to_bytes().to_vec(), bytes(public));
        let ephemeral = fixed("909a9b35d3dc4713a5e72a4da274b55d3d3821a37e5d099e74a647db583a904b");
        let info = bytes("4f6465206f6e2061204772656369616e2055726e");
        let aad = b"Count-0";
        let plaintext = bytes("4265617574792069732074727574682c20747275746820626561757479");
        let enc = bytes("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a");
        let ciphertext = bytes(
            "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db\
             21993c62ce81883d2dd1b51a28",
        );
        let sealed = seal(&key.public().key, &info, aad, &plaintext, &ephemeral).unwrap();
        assert_eq!(sealed, (enc.clone(), ciphertext.clone()));
        let opened = open(&key, &info, aad, &enc, &ciphertext).unwrap();
        assert_eq!(*opened, plaintext);
        assert!(open(&key, &info, b"Count-1", &enc, &ciphertext).is_none());
    }

    /// RFC 8032, section 7.1, test 1.
    #[test]
    fn the_issuer_signs_as_rfc_8032_publishes() {
        let seed = fixed("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
        let issuer = IssuerKey::from_seed(&seed);
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        assert_eq!(issuer.public().bytes.to_vec(), bytes(public));
        let signature = bytes(
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155\
             5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        );
        assert_eq!(issuer.sign(b""), signature);
    }

    #[test]
    fn a_point_of_small_order_is_no_recipient() {
        let text = format!("iop-recipient-public-v1 {}", "0".repeat(64));
        let public = RecipientPublic::parse(&text).unwrap();
        assert!(seal(&public.key, &[], &[], b"x", &[1; 32]).is_none());
    }
}
