//! Keys of the credential plane and their files: one line, a word that says what it is, 64 hex digits.
//!
//! Lives on: process start, reload, `iop pki`. Bound: `FILE_BYTES_MAX` a file.
//!
//! ```text
//! iop-issuer-secret-v1 9d61…      Ed25519 seed            the Edge signs with it
//! iop-issuer-public-v1 d75a…      Ed25519 public key      nodes trust it
//! iop-recipient-secret-v1 8057…   X25519 private key      one node opens with it
//! iop-recipient-public-v1 4310…   X25519 public key       the Edge seals to it
//! iop-store-secret-v1 …           AES-256 key             the Edge's store is encrypted with it
//! ```
//! A key of one kind is refused where another is meant. Secrets are zeroed when they are dropped.
use core::fmt;

use hpke::kem::{Kem, X25519HkdfSha256};
use hpke::{Deserializable as _, Serializable as _};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use zeroize::Zeroizing;

use crate::{hex, sha256};

/// What a key file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    IssuerSecret,
    IssuerPublic,
    RecipientSecret,
    RecipientPublic,
    StoreSecret,
}

impl KeyKind {
    const ALL: [Self; 5] = [
        Self::IssuerSecret,
        Self::IssuerPublic,
        Self::RecipientSecret,
        Self::RecipientPublic,
        Self::StoreSecret,
    ];

    /// First word of its file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::IssuerSecret => "iop-issuer-secret-v1",
            Self::IssuerPublic => "iop-issuer-public-v1",
            Self::RecipientSecret => "iop-recipient-secret-v1",
            Self::RecipientPublic => "iop-recipient-public-v1",
            Self::StoreSecret => "iop-store-secret-v1",
        }
    }
}

/// Why a text is not the key it should be. Nothing of the text is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// Not one line of a word and 64 hex digits.
    Malformed { expected: KeyKind },
    /// A key, but another one.
    OtherKind { expected: KeyKind, found: KeyKind },
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed { expected } => write!(
                f,
                "expected one line, `{}` and 64 hex digits",
                expected.word()
            ),
            Self::OtherKind { expected, found } => {
                write!(
                    f,
                    "expected `{}`, found `{}`",
                    expected.word(),
                    found.word()
                )
            }
        }
    }
}

impl core::error::Error for KeyError {}

/// The Edge's signing key.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct IssuerKey {
    pair: Ed25519KeyPair,
    id: String,
}

impl IssuerKey {
    /// The key whose Ed25519 seed (RFC 8032) this is.
    ///
    /// # Panics
    /// Never: every 32 bytes are a seed.
    #[must_use]
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).expect("a seed is 32 bytes");
        let id = key_id(pair.public_key().as_ref());
        Self { pair, id }
    }

    /// # Errors
    /// `text` is no issuer secret.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        parse(text, KeyKind::IssuerSecret).map(|seed| Self::from_seed(&seed))
    }

    #[must_use]
    pub fn public(&self) -> IssuerPublic {
        let bytes = self.pair.public_key().as_ref().try_into();
        IssuerPublic {
            bytes: bytes.expect("an Ed25519 public key is 32 bytes"),
            id: self.id.clone(),
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }
}

/// What a node trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerPublic {
    pub(crate) bytes: [u8; 32],
    id: String,
}

impl IssuerPublic {
    /// # Errors
    /// `text` is no issuer public key.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let bytes = *parse(text, KeyKind::IssuerPublic)?;
        let id = key_id(&bytes);
        Ok(Self { bytes, id })
    }

    /// `issuer_key_id` of its leases.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its file.
    #[must_use]
    pub fn text(&self) -> String {
        line(KeyKind::IssuerPublic, &self.bytes)
    }
}

/// A node's key: what is sealed to it, only its holder opens.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct RecipientKey {
    pub(crate) secret: <X25519HkdfSha256 as Kem>::PrivateKey,
    id: String,
}

impl RecipientKey {
    /// # Panics
    /// Never: every 32 bytes are an X25519 private key.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        let secret = <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(bytes);
        let secret = secret.expect("an X25519 private key is 32 bytes");
        let id = key_id(&X25519HkdfSha256::sk_to_pk(&secret).to_bytes());
        Self { secret, id }
    }

    /// # Errors
    /// `text` is no recipient secret.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        parse(text, KeyKind::RecipientSecret).map(|bytes| Self::from_bytes(&bytes))
    }

    #[must_use]
    pub fn public(&self) -> RecipientPublic {
        RecipientPublic {
            key: X25519HkdfSha256::sk_to_pk(&self.secret),
            id: self.id.clone(),
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

/// What the Edge seals to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecipientPublic {
    pub(crate) key: <X25519HkdfSha256 as Kem>::PublicKey,
    id: String,
}

impl RecipientPublic {
    /// # Errors
    /// `text` is no recipient public key.
    ///
    /// # Panics
    /// Never: every 32 bytes are taken as an X25519 public key; a bad point fails when it is used.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let bytes = parse(text, KeyKind::RecipientPublic)?;
        let key = <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(&*bytes);
        Ok(Self {
            key: key.expect("an X25519 public key is 32 bytes"),
            id: key_id(&*bytes),
        })
    }

    /// `recipient` of bindings and leases: the identity of the key, not of the node. `[A-33]`
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its file.
    #[must_use]
    pub fn text(&self) -> String {
        line(KeyKind::RecipientPublic, &self.key.to_bytes())
    }
}

/// What the Edge's store is encrypted with.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct StoreKey(Zeroizing<[u8; 32]>);

impl StoreKey {
    /// # Errors
    /// `text` is no store key.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        parse(text, KeyKind::StoreSecret).map(Self)
    }

    #[must_use]
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The file of a secret made of these random bytes.
#[must_use]
pub fn secret_text(kind: KeyKind, bytes: &[u8; 32]) -> Zeroizing<String> {
    Zeroizing::new(line(kind, bytes))
}

fn line(kind: KeyKind, bytes: &[u8]) -> String {
    // Sized at once: a secret that a growing string moved would stay behind.
    let mut line = String::with_capacity(kind.word().len() + 2 + 2 * bytes.len());
    line.push_str(kind.word());
    line.push(' ');
    line.push_str(&Zeroizing::new(hex(bytes)));
    line.push('\n');
    line
}

/// First half of the public key's SHA-256.
fn key_id(public: &[u8]) -> String {
    hex(&sha256(public)[..16])
}

fn parse(text: &str, expected: KeyKind) -> Result<Zeroizing<[u8; 32]>, KeyError> {
    let malformed = KeyError::Malformed { expected };
    let (word, digits) = text.trim_end().split_once(' ').ok_or(malformed)?;
    let found = KeyKind::ALL.into_iter().find(|kind| kind.word() == word);
    let found = found.ok_or(malformed)?;
    if found != expected {
        return Err(KeyError::OtherKind { expected, found });
    }
    let digits = digits.as_bytes();
    let mut bytes = Zeroizing::new([0; 32]);
    if digits.len() != 2 * bytes.len() {
        return Err(malformed);
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = nibble(pair[0]).ok_or(malformed)? << 4 | nibble(pair[1]).ok_or(malformed)?;
    }
    Ok(bytes)
}

const fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_says_what_it_is_and_nothing_of_it_is_repeated() {
        let digits = "4310ee97d88cc1f088a5576c77ab0cf5c3ac797f3d95139c6c84b5429c59662a";
        let public = format!("iop-recipient-public-v1 {digits}\n");
        assert_eq!(RecipientPublic::parse(&public).unwrap().text(), public);
        let error = RecipientKey::parse(&public).err().unwrap();
        let other = KeyError::OtherKind {
            expected: KeyKind::RecipientSecret,
            found: KeyKind::RecipientPublic,
        };
        assert_eq!(error, other);
        let long = format!("{public}0");
        for text in [
            "",
            "iop-recipient-public-v1",
            digits,
            &public[..public.len() - 2],
            &long,
            &public.replace('4', "g"),
            &public.replace("v1 ", "v2 "),
        ] {
            let error = RecipientPublic::parse(text).unwrap_err();
            let expected = KeyKind::RecipientPublic;
            assert_eq!(error, KeyError::Malformed { expected }, "{text}");
            assert!(!error.to_string().contains("4310"), "{error}");
        }
    }

    #[test]
    fn a_secret_and_its_public_half_have_one_identity() {
        let secret = secret_text(KeyKind::IssuerSecret, &[7; 32]);
        let issuer = IssuerKey::parse(&secret).unwrap();
        let public = IssuerPublic::parse(&issuer.public().text()).unwrap();
        assert_eq!(public.id(), issuer.id());
        let secret = secret_text(KeyKind::RecipientSecret, &[7; 32]);
        let recipient = RecipientKey::parse(&secret).unwrap();
        let public = RecipientPublic::parse(&recipient.public().text()).unwrap();
        assert_eq!(public.id(), recipient.id());
        assert_ne!(public.id(), issuer.id());
    }
}
