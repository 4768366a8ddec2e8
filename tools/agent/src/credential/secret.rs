//! An opened credential: one header value, shared by reference count, zeroed with its last holder.
//!
//! Lives on: the attempt's task and the HTTP library beneath its call. View: one managed call. Bound:
//! a prefix and a credential.
//!
//! What the HTTP library and the kernel copy into their socket buffers is out of reach; nothing else
//! holds a second copy.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use iop_lease::LeaseError;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use zeroize::Zeroize;

/// Where an adapter's credential goes: declared by its profile. `[R-219]`
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) header: HeaderName,
    /// What stands before the credential.
    pub(crate) prefix: String,
    /// The binding component that names all of this. `[A-67]`
    pub(crate) profile: String,
}

/// What has happened to credentials in this process.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    opened: AtomicU64,
    zeroed: AtomicU64,
    headers_dropped: AtomicU64,
}

impl Counts {
    /// Credentials opened and zeroed so far; what is between them is open now.
    #[cfg(test)]
    pub(crate) fn opened_and_zeroed(&self) -> (u64, u64) {
        let zeroed = self.zeroed.load(Ordering::Acquire);
        (self.opened.load(Ordering::Acquire), zeroed)
    }

    /// A response header held the credential and was dropped; how many so far. `[R-336]`
    pub(crate) fn dropped(&self) -> u64 {
        self.headers_dropped.fetch_add(1, Ordering::Relaxed) + 1
    }

    #[cfg(test)]
    pub(crate) fn headers_dropped(&self) -> u64 {
        self.headers_dropped.load(Ordering::Relaxed)
    }
}

/// The bytes themselves. Dropped once, whoever held them last; zeroed then.
struct Plain {
    bytes: Vec<u8>,
    counts: Arc<Counts>,
}

impl AsRef<[u8]> for Plain {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.bytes.as_mut_slice().zeroize();
        if self.bytes.iter().all(|&byte| byte == 0) {
            self.counts.zeroed.fetch_add(1, Ordering::Release);
        }
    }
}

/// The header of one managed call.
#[derive(Clone)]
pub(crate) struct Injected {
    name: HeaderName,
    value: HeaderValue,
    prefix_bytes: usize,
    pub(crate) counts: Arc<Counts>,
}

impl core::fmt::Debug for Injected {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Injected").field(&self.name).finish()
    }
}

impl Injected {
    /// Puts `secret` behind the target's prefix.
    ///
    /// # Errors
    /// `Unusable`: it cannot stand in a header.
    pub(super) fn new(
        target: &Target,
        secret: &[u8],
        counts: &Arc<Counts>,
    ) -> Result<Self, LeaseError> {
        // Sized at once: a buffer that grew would leave a copy behind.
        let mut bytes = Vec::with_capacity(target.prefix.len() + secret.len());
        bytes.extend_from_slice(target.prefix.as_bytes());
        bytes.extend_from_slice(secret);
        counts.opened.fetch_add(1, Ordering::Release);
        let plain = Plain {
            bytes,
            counts: counts.clone(),
        };
        let mut value = HeaderValue::from_maybe_shared(Bytes::from_owner(plain))
            .map_err(|_| LeaseError::Unusable)?;
        value.set_sensitive(true);
        Ok(Self {
            name: target.header.clone(),
            value,
            prefix_bytes: target.prefix.len(),
            counts: counts.clone(),
        })
    }

    /// Sets the header, whatever the caller sent under its name. `[R-219]`
    pub(crate) fn set(&self, headers: &mut HeaderMap) {
        headers.insert(self.name.clone(), self.value.clone());
    }

    /// Whether `value` repeats the credential. `[R-336]`
    pub(crate) fn is_in(&self, value: &[u8]) -> bool {
        let secret = &self.value.as_bytes()[self.prefix_bytes..];
        value.windows(secret.len()).any(|part| part == secret)
    }
}
