//! Which slot a selected provider's request needs, and the lease that carries it to the node.
//!
//! Lives on: the issuer thread; opened once at start and by `iop check`. View: one configuration, one
//! store. Bound: one lookup, one signature and one sealing a lease.
//!
//! One selection names one slot: caller, model, and the profile of the provider's adapter. There is
//! no second choice; what fails fails the request. `[R-343]` `[I6.7]`
use core::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use iop_control::names::{Names, ProviderName};
use iop_lease::{
    Entropy, IssueError, IssuerKey, KeyError, RecipientPublic, StoreKey, Terms, issue,
    profile_component,
};
use iop_proto::domain::CredentialBinding;
use iop_proto::ids::{ModelIndex, ProviderIndex};
use iop_proto::map::{decode_node_config, encode_binding};
use iop_proto::reason::Reason;
use ring::rand::{SecureRandom as _, SystemRandom};
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::KeySource;
use super::store::{Store, StoreError};
use crate::config::{CredentialConfig, EdgeConfig};
use crate::keys::Caller;
use crate::system::Stamp;

/// Principal of every caller when no keys are configured. `[D-15]`
pub const ANYONE: &str = "anonymous";

/// Why the plane cannot be opened.
#[derive(Debug)]
pub enum PlaneError {
    Key {
        what: &'static str,
        source: KeySource,
        error: io::Error,
    },
    KeyText {
        what: &'static str,
        source: KeySource,
        error: KeyError,
    },
    Store(StoreError),
    /// A slot for a model whose group holds a provider that takes no tunnels. `[A-37]`
    RunPath {
        slot: String,
        route: String,
        provider: String,
    },
}

impl fmt::Display for PlaneError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key {
                what,
                source,
                error,
            } => write!(f, "{what}, {source}: {error}"),
            Self::KeyText {
                what,
                source,
                error,
            } => write!(f, "{what}, {source}: {error}"),
            Self::Store(error) => error.fmt(f),
            Self::RunPath {
                slot,
                route,
                provider,
            } => write!(
                f,
                "slot {slot} is bound to model {route}, whose provider {provider} takes no \
                 credential"
            ),
        }
    }
}

impl std::error::Error for PlaneError {}

impl From<StoreError> for PlaneError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// What a lease is asked for: one selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    pub caller: Caller,
    pub model: ModelIndex,
    pub provider: ProviderIndex,
    /// When the node's certificate ends, Unix seconds. `[D-05]`
    pub not_after_unix: i64,
}

/// The inseparable pair as it goes into a request, encoded. Printed by its size alone.
pub struct Pair {
    pub lease: Vec<u8>,
    pub binding: Vec<u8>,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} and {} bytes>", self.lease.len(), self.binding.len())
    }
}

/// Who may need which slot, by the configuration alone.
pub struct Uses {
    names: Arc<Names>,
    /// By key row.
    principals: Vec<String>,
    /// By provider row: profile id and binding component, where its adapter declares a profile.
    profiles: Vec<Option<(String, String)>>,
}

impl Uses {
    #[must_use]
    pub fn of(config: &EdgeConfig) -> Self {
        Self {
            names: Arc::clone(&config.names),
            principals: config
                .keys
                .iter()
                .map(|key| key.principal.clone())
                .collect(),
            profiles: profiles(&config.names),
        }
    }

    /// Why nobody can use a slot of these names; `None`: somebody can.
    #[must_use]
    pub fn fault(&self, principal: &str, route: &str, profile: &str) -> Option<&'static str> {
        let names = &self.names;
        let known = match self.principals.as_slice() {
            [] => principal == ANYONE,
            known => known.iter().any(|own| own == principal),
        };
        if !known {
            return Some("no key has its principal (without keys it is `anonymous`)");
        }
        let Some(model) = names.model_by_name(route.as_bytes()) else {
            return Some("no model has the name of its route");
        };
        let mut profiles = names.model(model).providers.iter().filter_map(|provider| {
            let profile = self.profiles[provider.row()].as_ref();
            profile.map(|(id, _)| id.as_str())
        });
        let named = profiles.any(|own| own == profile);
        (!named).then_some("no provider of its route has its profile")
    }

    fn principal(&self, caller: Caller) -> &str {
        match caller {
            Caller::Anyone => ANYONE,
            Caller::Key(key) => &self.principals[key.row()],
        }
    }
}

/// Everything that issuing needs. `Debug` shows the store's names alone.
pub struct Plane {
    uses: Uses,
    /// By node row.
    recipients: Vec<Option<RecipientPublic>>,
    /// By node row: the log was told that nothing can be sealed to it.
    told: Vec<bool>,
    path: PathBuf,
    key: StoreKey,
    store: Store,
    stamp: Option<Stamp>,
    issuer: IssuerKey,
    lease_ms: i64,
    random: SystemRandom,
}

impl fmt::Debug for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} principals>", self.principals.len())
    }
}

impl fmt::Debug for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plane")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl Plane {
    /// Reads keys and store; `None` when the plane is off.
    ///
    /// # Errors
    /// The first thing that cannot be used.
    pub fn open(config: &EdgeConfig) -> Result<Option<Self>, PlaneError> {
        let Some(plane) = &config.credentials else {
            return Ok(None);
        };
        let key = store_key(plane)?;
        let source = KeySource::File(plane.issuer_key.clone());
        let issuer = parsed("the issuer key", source, IssuerKey::parse)?;
        let recipients = plane.recipients.iter().map(|path| {
            let source = path.clone().map(KeySource::File);
            source
                .map(|source| parsed("a recipient key", source, RecipientPublic::parse))
                .transpose()
        });
        let recipients = recipients.collect::<Result<_, _>>()?;
        let stamp = Stamp::of(&plane.store);
        let store = Store::load(&plane.store, &key)?;
        check_routes(&store, &config.names)?;
        Ok(Some(Self {
            uses: Uses::of(config),
            told: vec![false; config.names.nodes.len()],
            recipients,
            path: plane.store.clone(),
            key,
            store,
            stamp,
            issuer,
            lease_ms: i64::try_from(plane.lease_ms).unwrap_or(i64::MAX),
            random: SystemRandom::new(),
        }))
    }

    /// What can be said about the store without using it.
    #[must_use]
    pub fn summary(&self) -> String {
        format!(
            "{}: {} slots, generation {}",
            self.path.display(),
            self.store.slots().len(),
            self.store.generation()
        )
    }

    /// Slots that nobody can use as things are.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let slots = self.store.slots().iter().filter_map(|slot| {
            let fault = self
                .uses
                .fault(&slot.principal, &slot.route, &slot.profile)?;
            let (principal, slot) = (&slot.principal, &slot.name);
            Some(format!("slot {slot} of {principal} is never used: {fault}"))
        });
        slots.collect()
    }

    /// Reads the store again if its file is another one. A store that cannot be used leaves the old
    /// one in force, and is said once.
    pub fn refresh(&mut self) {
        let stamp = Stamp::of(&self.path);
        if stamp == self.stamp {
            return;
        }
        self.stamp = stamp;
        let loaded = Store::load(&self.path, &self.key)
            .map_err(PlaneError::from)
            .and_then(|store| check_routes(&store, &self.uses.names).map(|()| store));
        match loaded {
            Ok(store) => {
                info!(generation = store.generation(), "credential store read");
                self.store = store;
            }
            Err(error) => warn!(%error, "credential store not read; the old one stays in force"),
        }
    }

    /// The pair for one selection, at `unix_ms`. `[R-207]` `[R-211]`
    ///
    /// # Errors
    /// `CredentialMissing`: no slot. `CredentialFailed`: there is one, and no lease can be made of it.
    pub fn issue(&mut self, selection: Selection, unix_ms: i64) -> Result<Pair, Reason> {
        let names = &self.uses.names;
        let provider = names.provider(selection.provider);
        let principal = self.uses.principal(selection.caller);
        let route = &names.model(selection.model).name;
        let profile = self.uses.profiles[selection.provider.row()].as_ref();
        let (id, component) = profile.ok_or(Reason::CredentialMissing)?;
        let slot = self.store.find(principal, route, id);
        let slot = slot.ok_or(Reason::CredentialMissing)?;
        let recipient = self.recipients[provider.node.row()].as_ref();
        let recipient = recipient.ok_or(Reason::CredentialFailed)?;
        if unix_ms.div_euclid(1_000) >= selection.not_after_unix {
            return Err(Reason::CredentialFailed); // nothing is issued for it any more `[D-05]`
        }
        let binding = CredentialBinding {
            principal: principal.to_owned(),
            slot: slot.name.clone(),
            route: route.clone(),
            profile: component.clone(),
            upstream_target: provider.target.clone(),
            node_id: names.node(provider.node).id.clone(),
            recipient: recipient.id().to_owned(),
            credential_revision: slot.credential_revision,
            route_revision: slot.route_revision,
            projection_generation: self.store.generation(),
        };
        let terms = Terms {
            issued_at_unix_ms: unix_ms,
            expires_at_unix_ms: unix_ms.saturating_add(self.lease_ms),
        };
        let entropy = self.entropy().ok_or(Reason::CredentialFailed)?;
        let lease = issue(
            &self.issuer,
            recipient,
            &binding,
            &slot.secret,
            terms,
            &entropy,
        );
        let lease = lease.map_err(|error: IssueError| {
            if !std::mem::replace(&mut self.told[provider.node.row()], true) {
                warn!(node = binding.node_id, slot = slot.name, %error, "no credential lease");
            }
            Reason::CredentialFailed
        })?;
        Ok(Pair {
            lease,
            binding: encode_binding(&binding),
        })
    }

    fn entropy(&self) -> Option<Entropy> {
        let mut entropy = Entropy {
            lease_id: [0; 16],
            ephemeral: Zeroizing::new([0; 32]),
        };
        self.random.fill(&mut entropy.lease_id).ok()?;
        self.random.fill(&mut *entropy.ephemeral).ok()?;
        Some(entropy)
    }
}

/// The key that the store of `config` is encrypted with.
///
/// # Errors
/// It is not there, or is another kind of key.
pub fn store_key(config: &CredentialConfig) -> Result<StoreKey, PlaneError> {
    parsed("the store key", config.store_key.clone(), StoreKey::parse)
}

fn parsed<T>(
    what: &'static str,
    source: KeySource,
    parse: impl FnOnce(&str) -> Result<T, KeyError>,
) -> Result<T, PlaneError> {
    match source.read() {
        Ok(text) => parse(&text).map_err(|error| PlaneError::KeyText {
            what,
            source,
            error,
        }),
        Err(error) => Err(PlaneError::Key {
            what,
            source,
            error,
        }),
    }
}

/// No slot answers for a model that a run-path provider serves as well. `[A-37]` `[D-39]`
fn check_routes(store: &Store, names: &Names) -> Result<(), PlaneError> {
    for slot in store.slots() {
        let Some(model) = names.model_by_name(slot.route.as_bytes()) else {
            continue;
        };
        let providers = names.model(model).providers.iter();
        let mut providers = providers.map(|&provider| names.provider(provider));
        if let Some(provider) = providers.find(|provider| !provider.kind.is_tunnel()) {
            return Err(PlaneError::RunPath {
                slot: slot.name.clone(),
                route: slot.route.clone(),
                provider: provider.id.clone(),
            });
        }
    }
    Ok(())
}

fn profiles(names: &Names) -> Vec<Option<(String, String)>> {
    let of = |provider: &Arc<ProviderName>| {
        let payload = &names.node(provider.node).config_payload;
        let config = decode_node_config(&payload.bytes).expect("the configuration's own encoding");
        let mut adapters = config.adapters.iter();
        let adapter = adapters.find(|adapter| adapter.resolved_name() == provider.adapter)?;
        let profile = adapter.profile.as_ref()?;
        Some((profile.id.clone(), profile_component(adapter, profile)))
    };
    names.providers.iter().map(of).collect()
}
