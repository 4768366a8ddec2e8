//! Adapter instances: what a configuration payload becomes on this node.
//!
//! Lives on: the main task; calls take an `Arc`, so an instance lives until its last call is over.
//! View: one configuration. Bound: `ADAPTERS_MAX` instances.
pub(crate) mod ollama;
pub(crate) mod openai;
mod openai_compat;
mod probe;
mod run;
mod vllm;

use core::fmt;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use iop_control::node::attempt::Rejection;
use iop_lease::LeaseError;
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{
    Adapter, AdapterFault, HealthEvidence, NodeConfig, OnCancel, TunnelRequest,
};
use iop_proto::ids::Now;
use iop_proto::limits::{HEADERS_MAX, PROBED_TARGETS_MAX, PROVIDERS_MAX};
use reqwest::header::HeaderName;
use reqwest::{Client, Method, Url};

use crate::answer::{Part, Piece};
use crate::config::ProviderHttp;
use crate::credential::{Sealed, Target};
use crate::normalized::members::Refused;
use crate::normalized::{RunCall, RunError, RunPlan};
use crate::provider::{
    BaseUrl, BaseUrlError, Carried, ClientError, ClientOptions, HttpCall, ProviderError,
    ProviderRequest, client, request_headers,
};

/// Adapters one payload may name.
const ADAPTERS_MAX: usize = PROVIDERS_MAX as usize;

/// Why a received configuration cannot be put in force. Retryable: the Edge may send a better one.
/// `[A-11]`
#[derive(Debug)]
pub(crate) enum ApplyError {
    TooMany,
    /// Two instances of one resolved name, `""` being the type's. `[A-44]` `[R-296]`
    Duplicate {
        adapter: String,
    },
    Fault {
        adapter: String,
        fault: AdapterFault,
    },
    BaseUrl {
        adapter: String,
        error: BaseUrlError,
    },
    OnCancel {
        adapter: String,
    },
    ProbePath {
        adapter: String,
    },
    /// Every slot needs a descriptor. `[D-23]`
    Descriptors {
        needed: u64,
        limit: u64,
    },
    Client {
        adapter: String,
        error: Box<ClientError>,
    },
}

impl fmt::Display for ApplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => write!(f, "more than {ADAPTERS_MAX} adapters"),
            Self::Duplicate { adapter } => write!(f, "adapter {adapter}: named twice"),
            Self::Fault { adapter, fault } => {
                let what = match fault {
                    AdapterFault::KindUnknown => "unknown type",
                    AdapterFault::SettingsMissing => "no settings of its type",
                    AdapterFault::SettingsOfOtherKind => "settings of another type",
                    AdapterFault::CapacityNegative => "negative capacity",
                };
                write!(f, "adapter {adapter}: {what}")
            }
            Self::BaseUrl { adapter, error } => write!(f, "adapter {adapter}: {error}"),
            Self::OnCancel { adapter } => {
                write!(f, "adapter {adapter}: on_cancel is neither abort nor drain")
            }
            Self::ProbePath { adapter } => {
                write!(
                    f,
                    "adapter {adapter}: probe.path is not an absolute HTTP path"
                )
            }
            Self::Descriptors { needed, limit } => write!(
                f,
                "{needed} open files may be needed, the limit is {limit}: raise it (ulimit -n, \
                 LimitNOFILE=) or lower the capacities"
            ),
            Self::Client { adapter, error } => write!(f, "adapter {adapter}: {error}"),
        }
    }
}

impl ApplyError {
    /// Only a process with other limits could put it in force. `[R-263]`
    pub(crate) const fn needs_restart(&self) -> bool {
        matches!(self, Self::Descriptors { .. })
    }

    /// What the Edge may hear of it: nothing of this machine's files, addresses or limits.
    pub(crate) fn redacted(&self) -> String {
        match self {
            Self::Descriptors { .. } => {
                "more open files may be needed than this process may have".to_owned()
            }
            Self::Client { adapter, .. } => {
                format!("adapter {adapter}: its HTTP client cannot be built")
            }
            Self::TooMany
            | Self::Duplicate { .. }
            | Self::Fault { .. }
            | Self::BaseUrl { .. }
            | Self::OnCancel { .. }
            | Self::ProbePath { .. } => self.to_string(),
        }
    }
}

/// How a stopped call is stopped. `[D-21]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopBy {
    /// Close the provider connection.
    Abort,
    /// Read to the end, for servers that do not survive an abort.
    Drain,
}

/// What a kind of adapter brings along; the configuration says the rest.
struct Traits {
    /// Idle connections of its servers live no longer, unless the adapter's options say so.
    pool_idle_max: Duration,
    /// Where its servers are probed, unless the adapter's options say so. `[D-49]`
    probe_path: &'static str,
}

const fn traits(kind: ProviderKind) -> Traits {
    match kind {
        ProviderKind::OpenAiCompat => openai_compat::TRAITS,
        ProviderKind::Vllm => vllm::TRAITS,
        ProviderKind::Ollama => ollama::TRAITS,
    }
}

/// A checked instance that has not been started.
#[derive(Debug)]
struct Plan {
    adapter: Adapter,
    kind: ProviderKind,
    base: BaseUrl,
    probe: Url,
    stop_by: StopBy,
    options: ClientOptions,
}

/// A configuration in force, not started yet.
#[derive(Debug)]
pub(crate) struct Plans {
    plans: Vec<Plan>,
}

impl Plans {
    /// Judges a payload as a whole. `descriptors`: this process's limit, `None` where unknown.
    ///
    /// # Errors
    /// The first thing in it that no node can run.
    pub(crate) fn judge(
        config: &NodeConfig,
        http: &ProviderHttp,
        descriptors: Option<u64>,
    ) -> Result<Self, ApplyError> {
        if config.adapters.len() > ADAPTERS_MAX {
            return Err(ApplyError::TooMany);
        }
        let mut names = std::collections::BTreeSet::new();
        let mut plans = Vec::with_capacity(config.adapters.len());
        for adapter in &config.adapters {
            if !names.insert(adapter.resolved_name()) {
                return Err(ApplyError::Duplicate {
                    adapter: adapter.resolved_name().to_owned(),
                });
            }
            plans.push(Plan::judge(adapter, http)?);
        }
        let slots = plans
            .iter()
            .map(|plan| u64::from(plan.adapter.capacity.unsigned_abs()));
        let needed = slots.sum::<u64>() + DESCRIPTORS_BESIDE;
        match descriptors {
            Some(limit) if needed > limit => Err(ApplyError::Descriptors { needed, limit }),
            _ => Ok(Self { plans }),
        }
    }

    /// Resolved names and capacities (0 = no local limit), for the gates.
    pub(crate) fn capacities(&self) -> impl Iterator<Item = (&str, u32)> {
        let plans = self.plans.iter();
        plans.map(|plan| {
            (
                plan.adapter.resolved_name(),
                plan.adapter.capacity.unsigned_abs(),
            )
        })
    }
}

/// Sockets to the Edge, log, runtime, resolver: what is open beside provider connections.
const DESCRIPTORS_BESIDE: u64 = 64;

impl Plan {
    fn judge(adapter: &Adapter, http: &ProviderHttp) -> Result<Self, ApplyError> {
        let name = || adapter.resolved_name().to_owned();
        let kind = adapter.usable_kind().map_err(|fault| ApplyError::Fault {
            adapter: name(),
            fault,
        })?;
        let traits = traits(kind);
        let base = BaseUrl::parse(&adapter.base_url).map_err(|error| ApplyError::BaseUrl {
            adapter: name(),
            error,
        })?;
        let probe_path = match adapter.options.probe_path.as_str() {
            "" => traits.probe_path,
            path => path,
        };
        let probe = base
            .join(probe_path)
            .map_err(|_| ApplyError::ProbePath { adapter: name() })?;
        let stop_by = match &adapter.options.on_cancel {
            OnCancel::Abort => StopBy::Abort,
            OnCancel::Drain => StopBy::Drain,
            OnCancel::Other(_) => return Err(ApplyError::OnCancel { adapter: name() }),
        };
        let pool_idle = match adapter.options.pool_idle_ms {
            0 => traits.pool_idle_max.min(http.pool_idle),
            ms => Duration::from_millis(u64::from(ms)),
        };
        let options = ClientOptions {
            connect_timeout: http.connect_timeout,
            pool_idle,
            proxy_from_env: adapter.options.proxy_from_env,
            secure: base.is_secure(),
            ca: http.ca.clone(),
        };
        Ok(Self {
            adapter: adapter.clone(),
            kind,
            base,
            probe,
            stop_by,
            options,
        })
    }
}

/// One running adapter instance.
#[derive(Debug)]
pub(crate) struct Instance {
    adapter: Adapter,
    kind: ProviderKind,
    name: Arc<str>,
    base: BaseUrl,
    probe: Url,
    client: Client,
    pub(crate) stop_by: StopBy,
    /// Where a credential goes; `None`: the adapter declares no header. `[R-219]`
    pub(crate) target: Option<Target>,
    /// Targets that a probe of this instance has found. `[D-22]`
    found: Mutex<BTreeSet<String>>,
}

/// What one call carries out.
#[derive(Debug)]
pub(crate) enum Work {
    Tunnel(Box<ProviderRequest>),
    Run(Box<RunPlan>),
}

impl Work {
    /// The credential it may be carried out with, not opened.
    pub(crate) fn seal(&mut self, sealed: Option<Sealed>) {
        match self {
            Self::Tunnel(request) => {
                request.credential = sealed.map_or(Carried::None, Carried::Sealed);
            }
            Self::Run(_) => debug_assert!(sealed.is_none(), "runs carry no credential"),
        }
    }

    pub(crate) const fn is_managed(&self) -> bool {
        match self {
            Self::Tunnel(request) => request.is_managed(),
            Self::Run(_) => false,
        }
    }

    /// Opens its credential, if it has one, for the call that is next.
    ///
    /// # Errors
    /// Why it may not be used. No call may be made then.
    pub(crate) fn open(&mut self, instance: &Instance, now: Now) -> Result<(), LeaseError> {
        match self {
            Self::Tunnel(request) => request.open(instance.target.as_ref(), now),
            Self::Run(_) => Ok(()),
        }
    }
}

/// A call in progress: a stream of pieces. Dropping it closes the provider connection.
#[derive(Debug)]
pub(crate) enum Call {
    Tunnel(HttpCall),
    Run(Box<RunCall>),
}

/// How a call failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    Http(ProviderError),
    Run(RunError),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(error) => f.write_str(error.detail()),
            Self::Run(error) => error.fmt(f),
        }
    }
}

impl CallError {
    /// The same without anything that the provider wrote: for the log.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::Run(RunError::Status { status, .. }) => format!("HTTP status {status}"),
            Self::Run(RunError::Said { .. }) => "the provider says so in its answer".to_owned(),
            _ => self.to_string(),
        }
    }
}

impl From<ProviderError> for CallError {
    fn from(error: ProviderError) -> Self {
        Self::Http(error)
    }
}

impl From<RunError> for CallError {
    fn from(error: RunError) -> Self {
        Self::Run(error)
    }
}

/// Why a request gets no call.
#[derive(Debug)]
pub(crate) enum Denied {
    Rule(Rejection),
    /// The adapter's server cannot serve this input. `[D-50]`
    Input(Refused),
}

impl Denied {
    /// The same without anything that the caller wrote: for the log.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Rule(rejection) => rejection.detail(),
            Self::Input(_) => "the server cannot express a field of the request, or its value",
        }
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rejection) => f.write_str(rejection.detail()),
            Self::Input(refused) => refused.fmt(f),
        }
    }
}

impl From<Rejection> for Denied {
    fn from(rejection: Rejection) -> Self {
        Self::Rule(rejection)
    }
}

impl From<Refused> for Denied {
    fn from(refused: Refused) -> Self {
        Self::Input(refused)
    }
}

impl Call {
    /// The next piece; `Ok(None)` once after the last. Cancel-safe: a dropped wait loses nothing.
    /// `is_busy`: what was sent before is still to be written, so that what is here may as well go
    /// together.
    ///
    /// # Errors
    /// How the call failed; nothing follows.
    pub(crate) async fn next(&mut self, is_busy: bool) -> Result<Option<Piece>, CallError> {
        match self {
            Self::Tunnel(call) => {
                let item = if is_busy {
                    call.next_gathered().await?
                } else {
                    call.next().await?
                };
                Ok(item.map(|item| Piece::Part(Part::Http(item))))
            }
            Self::Run(call) => call.next().await,
        }
    }

    /// What has come of the next piece, if anything.
    pub(crate) fn gathered(&mut self) -> Option<Piece> {
        match self {
            Self::Tunnel(call) => Some(Piece::Part(Part::Http(call.gathered()?))),
            Self::Run(_) => None,
        }
    }

    /// From now on the call is only run to its end: no second request. `[I5.4]`
    pub(crate) fn no_retry(&mut self) {
        match self {
            Self::Tunnel(call) => call.no_retry(),
            Self::Run(call) => call.no_retry(),
        }
    }
}

impl Instance {
    /// Resolved instance name. `[R-141]`
    pub(crate) fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// Name of its kind.
    pub(crate) const fn kind(&self) -> &str {
        self.adapter.kind.name()
    }

    /// Where a tunnel request goes and what it carries. A named operation is the profile's or
    /// nobody's; without one, `path` decides. Of the path beside a name, only a query behind the
    /// profile's own path counts. `[R-097]` `[R-098]` `[A-38]`
    ///
    /// # Errors
    /// Why no provider is called.
    pub(crate) fn resolve_tunnel(&self, request: TunnelRequest) -> Result<Work, Rejection> {
        let TunnelRequest {
            operation,
            method,
            path,
            headers,
            body,
            ..
        } = request;
        let (method, path) = if operation.is_empty() {
            (method, path)
        } else {
            let profile = self
                .adapter
                .profile
                .as_ref()
                .ok_or(Rejection::OperationUnknown)?;
            let named = profile
                .operations
                .iter()
                .find(|named| named.name == operation);
            let named = named.ok_or(Rejection::OperationUnknown)?;
            let own_method = !named.method.is_empty();
            let only_queries = adds_a_query(&named.path, &path);
            (
                if own_method {
                    named.method.clone()
                } else {
                    method
                },
                if only_queries {
                    path
                } else {
                    named.path.clone()
                },
            )
        };
        let url = self.base.join(&path)?;
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| Rejection::MethodInvalid)?;
        if matches!(method, Method::CONNECT | Method::TRACE) {
            return Err(Rejection::MethodInvalid);
        }
        if headers.len() > HEADERS_MAX as usize {
            return Err(Rejection::HeaderInvalid);
        }
        Ok(Work::Tunnel(Box::new(ProviderRequest {
            method,
            url,
            headers: request_headers(&headers)?,
            body,
            credential: Carried::None,
        })))
    }

    /// Begins a call.
    pub(crate) fn call(&self, work: Work) -> Call {
        match work {
            Work::Tunnel(request) => Call::Tunnel(HttpCall::new(self.client.clone(), *request)),
            Work::Run(plan) => {
                let tag = RandomState::new().hash_one(());
                Call::Run(Box::new(RunCall::new(self.client.clone(), *plan, tag)))
            }
        }
    }

    /// Asks the server itself for exactly this target; the caller bounds the time. Fail-closed, and
    /// without anything of a request. A configured path states that it lists every target without a
    /// key; of the default path only what it once listed is known to be listed. `[R-125]` `[R-177]` `[D-22]`
    pub(crate) async fn probe(&self, target: &str) -> HealthEvidence {
        let (client, url) = (self.client.clone(), self.probe.clone());
        let finding = match self.kind {
            ProviderKind::OpenAiCompat | ProviderKind::Vllm => {
                probe::models(client, url, target).await
            }
            ProviderKind::Ollama => probe::show(client, url, target).await,
        };
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if finding == probe::Finding::Present && found.len() < PROBED_TARGETS_MAX {
            found.insert(target.to_owned());
        }
        let stated = !self.adapter.options.probe_path.is_empty();
        finding.evidence(stated || found.contains(target))
    }
}

/// `path` is `own` and a client's query behind it.
fn adds_a_query(own: &str, path: &str) -> bool {
    let joint = if own.contains('?') { '&' } else { '?' };
    path.strip_prefix(own)
        .is_some_and(|rest| rest.starts_with(joint))
}

/// The instances in force, by resolved name.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    instances: BTreeMap<String, Arc<Instance>>,
}

impl Adapters {
    /// Starts what was judged. An instance whose configuration did not change keeps running, with
    /// its idle connections; the others live until their last call is over. `[S-45]`
    ///
    /// # Errors
    /// The first instance that cannot be started; what ran before stays in force.
    pub(crate) fn start(&mut self, plans: Plans) -> Result<(), ApplyError> {
        let mut instances = BTreeMap::new();
        for plan in plans.plans {
            let name = plan.adapter.resolved_name().to_owned();
            let same = self
                .instances
                .get(&name)
                .filter(|old| old.adapter == plan.adapter);
            let instance = match same {
                Some(old) => old.clone(),
                None => {
                    let client = client(&plan.options).map_err(|error| ApplyError::Client {
                        adapter: name.clone(),
                        error: Box::new(error),
                    })?;
                    let Plan {
                        adapter,
                        kind,
                        base,
                        probe,
                        stop_by,
                        ..
                    } = plan;
                    Arc::new(Instance {
                        name: name.as_str().into(),
                        target: target(&adapter),
                        adapter,
                        kind,
                        base,
                        probe,
                        client,
                        stop_by,
                        found: Mutex::default(),
                    })
                }
            };
            instances.insert(name, instance);
        }
        self.instances = instances;
        Ok(())
    }

    /// The instance a request names. The empty name is that of the only instance configured without
    /// one. `[R-296]` `[R-141]`
    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Instance>> {
        if !name.is_empty() {
            return self.instances.get(name);
        }
        let mut unnamed = self.instances.values();
        let mut unnamed = unnamed.by_ref().filter(|it| it.adapter.name.is_empty());
        let only = unnamed.next();
        only.filter(|_| unnamed.next().is_none())
    }

    /// Resolved names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.instances.keys().map(String::as_str)
    }

    pub(crate) fn len(&self) -> usize {
        self.instances.len()
    }
}

/// What the adapter's profile declares of credentials.
fn target(adapter: &Adapter) -> Option<Target> {
    let profile = adapter.profile.as_ref()?;
    Some(Target {
        header: HeaderName::from_bytes(profile.auth_header.as_bytes()).ok()?,
        prefix: profile.auth_prefix.clone(),
        profile: iop_lease::profile_component(adapter, profile),
    })
}

/// The soft limit of open files, where the system tells.
pub(crate) fn descriptor_limit() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
#[path = "adapters/tests.rs"]
mod tests;
