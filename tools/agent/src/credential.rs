//! Managed credentials at the node: a lease is judged and opened at the last moment, its header set in
//! memory, and every byte of it zeroed when the provider has returned. `[states §6]`
//!
//! Lives on: read at process start; used by each attempt's task, right before its call. View: this
//! node's keys. Bound: `REPLAY_ENTRIES_MAX` used leases; per managed call one header value.
//!
//! ```text
//! slot granted ─► Plane::open: verify ─► used? (first wins) ─► open ─► Injected ─► call ─► zeroed
//! ```
//! Nothing here waits, and nothing is kept between two calls. `[R-213]` `[R-338]`
mod judge;
mod secret;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use iop_lease::{Expected, IssuerPublic, LeaseError, Recipient, RecipientKey, Window};
use iop_proto::domain::{Credential, CredentialBinding, LeaseEnvelope};
use iop_proto::ids::Now;

use crate::config::CredentialFiles;
use crate::identity::{CredentialError, key_text};
use judge::{JudgeClock, Used};
pub(crate) use secret::{Counts, Injected, Target};

/// What this node opens leases with. One per process: it outlives sessions and configurations.
pub(crate) struct Plane {
    node_id: String,
    recipient: Recipient,
    /// Unix ms at process start. `[A-34]`
    started_ms: i64,
    skew_ms: u64,
    state: Mutex<State>,
    pub(crate) counts: Arc<Counts>,
    /// What a test lets happen between opening and call.
    #[cfg(test)]
    opened: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

struct State {
    clock: JudgeClock,
    used: Used,
}

impl core::fmt::Debug for Plane {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Plane").finish_non_exhaustive()
    }
}

/// A managed tunnel's pair on its way from the boundary to the call; not opened.
pub(crate) struct Sealed {
    pub(crate) plane: Arc<Plane>,
    lease: LeaseEnvelope,
    binding: CredentialBinding,
    /// `ProviderTunnelRequest.target`.
    target: String,
}

impl core::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Sealed")
    }
}

impl Sealed {
    /// `None` without a pair; the boundary has refused half of one.
    pub(crate) fn of(plane: &Arc<Plane>, credential: Credential, target: &str) -> Option<Self> {
        match credential {
            Credential::Managed { lease, binding } => Some(Self {
                plane: plane.clone(),
                lease,
                binding,
                target: target.to_owned(),
            }),
            Credential::None | Credential::LeaseAlone(_) | Credential::BindingAlone(_) => None,
        }
    }

    /// Verifies and opens: the one use of this lease. `[R-212]` to `[R-218]`
    ///
    /// # Errors
    /// Why nothing was opened.
    pub(crate) fn open(self, target: Option<&Target>, now: Now) -> Result<Injected, LeaseError> {
        let Self {
            plane,
            lease,
            binding,
            target: upstream,
        } = self;
        plane.open(&lease, &binding, &upstream, target, now, unix_ms())
    }
}

impl Plane {
    /// Reads the keys. `now` and `wall_ms` are the process's start.
    ///
    /// # Errors
    /// The first key that cannot be used.
    pub(crate) fn read(
        files: &CredentialFiles,
        node_id: &str,
        now: Now,
        wall_ms: i64,
    ) -> Result<Self, CredentialError> {
        let recipient = Recipient {
            keys: files
                .recipient_keys
                .iter()
                .map(|path| key_text(path, RecipientKey::parse))
                .collect::<Result<_, _>>()?,
            issuers: files
                .issuer_keys
                .iter()
                .map(|path| key_text(path, IssuerPublic::parse))
                .collect::<Result<_, _>>()?,
        };
        let skew_ms = u64::try_from(files.clock_skew.as_millis()).unwrap_or(u64::MAX);
        Ok(Self {
            node_id: node_id.to_owned(),
            recipient,
            started_ms: wall_ms,
            skew_ms,
            state: Mutex::new(State {
                clock: JudgeClock::new(now, wall_ms),
                used: Used::default(),
            }),
            counts: Arc::default(),
            #[cfg(test)]
            opened: Mutex::default(),
        })
    }

    /// No ready is sent before: every lease that could be asked for then is younger than the process
    /// by more than the skew, so a restart revives none. `[A-34]` `[S-57]`
    pub(crate) const fn ready_from(&self, started: Now) -> Now {
        started.after_ms(self.skew_ms.saturating_mul(2))
    }

    fn open(
        &self,
        lease: &LeaseEnvelope,
        binding: &CredentialBinding,
        upstream: &str,
        target: Option<&Target>,
        now: Now,
        wall_ms: i64,
    ) -> Result<Injected, LeaseError> {
        let skew_ms = i64::try_from(self.skew_ms).unwrap_or(i64::MAX);
        let now_ms = self.locked(|state| state.clock.read(now, wall_ms));
        let expected = Expected {
            node_id: &self.node_id,
            target: upstream,
            profile: target.map(|target| target.profile.as_str()),
        };
        let window = Window {
            now_ms,
            started_ms: self.started_ms,
            skew_ms,
        };
        let verified = self
            .recipient
            .verify(lease.expose(), binding, expected, window)?;
        let keep_ms = verified
            .expires_at_ms()
            .saturating_sub(now_ms)
            .saturating_add(skew_ms);
        let keep_ms = u64::try_from(keep_ms).unwrap_or(0);
        self.locked(|state| state.used.insert(verified.lease_id(), now, keep_ms))?;
        let secret = verified.open()?;
        let target = target.ok_or(LeaseError::Profile)?;
        #[cfg(test)]
        if let Some(then) = self
            .opened
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            then();
        }
        Injected::new(target, &secret, &self.counts)
    }

    /// Both are whole after each use, so a panic elsewhere leaves nothing to repair.
    fn locked<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The wall clock; 0 before 1970.
pub(crate) fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}

#[cfg(test)]
mod tests;
