//! A node's judgement of a lease: everything is verified before anything is opened. `[wire §5]`
//!
//! Lives on: the node agent. View: one lease and what it should be for. Bound: `LEASE_BYTES_MAX`;
//! one signature, one digest, one opening.
use core::fmt;

use iop_proto::domain::{CredentialBinding, Lease};
use iop_proto::limits::{LEASE_BYTES_MAX, LEASE_MS_MAX, SECRET_BYTES_MAX};
use iop_proto::map;
use ring::signature::{ED25519, UnparsedPublicKey};
use zeroize::Zeroizing;

use crate::seal::{TAG_BYTES, open};
use crate::{IssuerPublic, LEASE_ID_BYTES, RecipientKey, VERSION, binding_digest};

/// Why a lease opens nothing. Says nothing of what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseError {
    Malformed,
    Version,
    Issuer,
    Signature,
    Recipient,
    Node,
    /// The lease is for another binding than the one that came with it.
    Binding,
    /// A component of the binding is empty.
    Incomplete,
    Target,
    /// The adapter is not configured as when the lease was issued, or declares no header. `[A-67]`
    Profile,
    Lifetime,
    /// Issued before this process can know what was used. `[A-34]`
    BeforeStart,
    Early,
    Expired,
    Replayed,
    /// The table of used leases is full.
    ReplayFull,
    /// The ciphertext is not sealed to the key it names.
    Unopenable,
    /// What was opened cannot stand in an HTTP header.
    Unusable,
}

impl LeaseError {
    pub const ALL: [Self; 18] = [
        Self::Malformed,
        Self::Version,
        Self::Issuer,
        Self::Signature,
        Self::Recipient,
        Self::Node,
        Self::Binding,
        Self::Incomplete,
        Self::Target,
        Self::Profile,
        Self::Lifetime,
        Self::BeforeStart,
        Self::Early,
        Self::Expired,
        Self::Replayed,
        Self::ReplayFull,
        Self::Unopenable,
        Self::Unusable,
    ];

    /// Stands behind `node rejected: ` in the legacy error.
    #[must_use]
    pub const fn detail(self) -> &'static str {
        match self {
            Self::Malformed => "the credential lease is malformed",
            Self::Version => "the credential lease is of an unknown version",
            Self::Issuer => "the credential lease is of an unknown issuer key",
            Self::Signature => "the credential lease's signature is wrong",
            Self::Recipient => "the credential lease is for another recipient key",
            Self::Node => "the credential lease is for another node",
            Self::Binding => "the credential lease is for another binding",
            Self::Incomplete => "the credential binding is incomplete",
            Self::Target => "the credential lease is for another target",
            Self::Profile => "the credential lease is for another profile",
            Self::Lifetime => "the credential lease's lifetime is not allowed",
            Self::BeforeStart => "the credential lease is older than this node",
            Self::Early => "the credential lease is not valid yet",
            Self::Expired => "the credential lease has expired",
            Self::Replayed => "the credential lease was used before",
            Self::ReplayFull => "too many credential leases are remembered",
            Self::Unopenable => "the credential lease cannot be opened",
            Self::Unusable => "the credential cannot stand in a header",
        }
    }
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.detail())
    }
}

impl core::error::Error for LeaseError {}

/// What a binding must name to be for this request on this node.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    pub node_id: &'a str,
    /// `ProviderTunnelRequest.target`.
    pub target: &'a str,
    /// [`crate::profile_component`] of the adapter as it runs; `None`: it declares none.
    pub profile: Option<&'a str>,
}

/// The instant at which a lease is judged, Unix ms, by a clock that never goes back. `[A-35]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub now_ms: i64,
    /// When this process started.
    pub started_ms: i64,
    pub skew_ms: i64,
}

/// What a node opens leases with: its own keys and the issuers it trusts, the present ones and those
/// that keys are rotated from or to.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct Recipient {
    pub keys: Vec<RecipientKey>,
    pub issuers: Vec<IssuerPublic>,
}

/// A lease that may be opened, once: nothing of it has been.
#[expect(missing_debug_implementations, reason = "a secret is not printable")]
pub struct Verified<'a> {
    lease: Lease,
    key: &'a RecipientKey,
}

impl Recipient {
    /// Judges the bytes of `credential_lease` and the binding beside them, in the contract's order.
    /// Whether the lease was used before is the caller's to know, between this and [`Verified::open`].
    ///
    /// # Errors
    /// The first thing that is wrong. `[R-214]` to `[R-217]`
    pub fn verify(
        &self,
        lease: &[u8],
        binding: &CredentialBinding,
        expected: Expected<'_>,
        window: Window,
    ) -> Result<Verified<'_>, LeaseError> {
        let lease = structure(lease)?;
        let issuer = self.issuers.iter();
        let issuer = issuer.clone().find(|key| key.id() == lease.issuer_key_id);
        let issuer = issuer.ok_or(LeaseError::Issuer)?;
        UnparsedPublicKey::new(&ED25519, &issuer.bytes)
            .verify(&lease.signed(), &lease.signature)
            .map_err(|_| LeaseError::Signature)?;
        let key = self.keys.iter().find(|key| key.id() == lease.recipient);
        let key = key.ok_or(LeaseError::Recipient)?;
        scope(&lease, binding, expected)?;
        times(&lease, window)?;
        Ok(Verified { lease, key })
    }
}

impl Verified<'_> {
    /// The key of a replay table.
    #[must_use]
    pub fn lease_id(&self) -> &str {
        &self.lease.lease_id
    }

    #[must_use]
    pub const fn expires_at_ms(&self) -> i64 {
        self.lease.expires_at_unix_ms
    }

    /// The credential. Zeroed when dropped.
    ///
    /// # Errors
    /// `Unopenable`: signed, but not sealed to the key it names.
    pub fn open(self) -> Result<Zeroizing<Vec<u8>>, LeaseError> {
        let Self { lease, key } = self;
        let aad = lease.sealed_with();
        open(key, &[], &aad, &lease.encapsulated_key, &lease.ciphertext)
            .ok_or(LeaseError::Unopenable)
    }
}

fn structure(bytes: &[u8]) -> Result<Lease, LeaseError> {
    if bytes.len() > LEASE_BYTES_MAX as usize {
        return Err(LeaseError::Malformed);
    }
    let lease = map::decode_lease(bytes).map_err(|_| LeaseError::Malformed)?;
    if lease.version != VERSION {
        return Err(LeaseError::Version);
    }
    let is_id = lease.lease_id.len() == 2 * LEASE_ID_BYTES
        && lease
            .lease_id
            .bytes()
            .all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
    let sealed = TAG_BYTES + 1..=TAG_BYTES + SECRET_BYTES_MAX as usize;
    let whole = is_id
        && lease.binding_digest.len() == 32
        && lease.encapsulated_key.len() == 32
        && lease.signature.len() == 64
        && sealed.contains(&lease.ciphertext.len());
    whole.then_some(lease).ok_or(LeaseError::Malformed)
}

/// Lease, binding, request and configuration are about one thing. `[R-216]` `[I6.4]`
fn scope(
    lease: &Lease,
    binding: &CredentialBinding,
    expected: Expected<'_>,
) -> Result<(), LeaseError> {
    if binding.recipient != lease.recipient {
        return Err(LeaseError::Recipient);
    }
    if binding.node_id != expected.node_id {
        return Err(LeaseError::Node);
    }
    if lease.binding_digest != binding_digest(binding)[..] {
        return Err(LeaseError::Binding);
    }
    if !binding.is_whole() {
        return Err(LeaseError::Incomplete);
    }
    if binding.upstream_target != expected.target {
        return Err(LeaseError::Target);
    }
    if expected.profile != Some(binding.profile.as_str()) {
        return Err(LeaseError::Profile);
    }
    Ok(())
}

/// `[R-211]` `[R-217]` `[A-34]` `[A-35]`
fn times(lease: &Lease, window: Window) -> Result<(), LeaseError> {
    let (issued, expires) = (lease.issued_at_unix_ms, lease.expires_at_unix_ms);
    let lifetime = expires.checked_sub(issued).filter(|&ms| ms > 0);
    if lifetime.is_none_or(|ms| ms.unsigned_abs() > LEASE_MS_MAX) {
        return Err(LeaseError::Lifetime);
    }
    if issued < window.started_ms.saturating_add(window.skew_ms) {
        return Err(LeaseError::BeforeStart);
    }
    if issued > window.now_ms.saturating_add(window.skew_ms) {
        return Err(LeaseError::Early);
    }
    if window.now_ms >= expires {
        return Err(LeaseError::Expired);
    }
    Ok(())
}
