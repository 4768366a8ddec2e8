//! What an Edge hands to a node: commands and configuration.
//!
//! Lives on: see `domain`. Bound: one envelope each.
use super::Metadata;
use crate::catalog::ProviderKind;

/// `NodeCommandType`. `[A-48]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    Capabilities,
    TransportStatus,
    ProviderStatus,
    /// 0 or a number nobody knows.
    Unknown(i32),
}

impl CommandKind {
    #[must_use]
    pub const fn from_wire(kind: i32) -> Self {
        match kind {
            1 => Self::Capabilities,
            2 => Self::TransportStatus,
            3 => Self::ProviderStatus,
            other => Self::Unknown(other),
        }
    }

    #[must_use]
    pub const fn to_wire(self) -> i32 {
        match self {
            Self::Capabilities => 1,
            Self::TransportStatus => 2,
            Self::ProviderStatus => 3,
            Self::Unknown(other) => other,
        }
    }
}

/// The Edge asks a node; `adapter` and `target` name the subject of a probe. `[R-175]`
#[derive(Clone, Debug, PartialEq)]
pub struct NodeCommandRequest {
    pub command_id: String,
    pub kind: CommandKind,
    pub adapter: String,
    pub target: String,
}

/// The node's answer; an empty `error` is success.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeCommandResponse {
    pub command_id: String,
    pub kind: CommandKind,
    pub error: String,
    pub result: Metadata,
}

/// What an Edge hands to a node: adapter instances, secret-free. `[R-294]` `[R-332]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeConfig {
    pub adapters: Vec<Adapter>,
    /// Legacy metadata, never a gate. `[R-241]`
    pub concurrency: i32,
}

/// `AdapterConfig.type`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    Known(ProviderKind),
    /// A type this build does not know; the payload cannot be applied.
    Other(String),
}

impl AdapterKind {
    #[must_use]
    pub fn from_name(name: String) -> Self {
        ProviderKind::from_name(&name).map_or(Self::Other(name), Self::Known)
    }

    #[must_use]
    pub const fn name(&self) -> &str {
        match self {
            Self::Known(kind) => kind.name(),
            Self::Other(name) => name.as_str(),
        }
    }
}

impl From<ProviderKind> for AdapterKind {
    fn from(kind: ProviderKind) -> Self {
        Self::Known(kind)
    }
}

/// One adapter instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Instance name as sent; empty is equivalent to the type's name. `[R-296]`
    pub name: String,
    pub kind: AdapterKind,
    /// Requests at once at the node's local gate; 0 = no limit stated, negative is a violation. `[A-54]`
    pub capacity: i32,
    pub options: AdapterOptions,
    /// Which kind's settings came; disagreement with `kind` is a violation, see [`Adapter::fault`].
    pub settings: Option<ProviderKind>,
    pub base_url: String,
    /// Of tunnel kinds alone. `[R-292]`
    pub profile: Option<Profile>,
}

/// Why an adapter's settings cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFault {
    KindUnknown,
    SettingsMissing,
    SettingsOfOtherKind,
    CapacityNegative,
}

impl Adapter {
    /// An instance with the options' defaults and no profile.
    #[must_use]
    pub fn new(name: String, kind: ProviderKind, capacity: i32, base_url: String) -> Self {
        Self {
            name,
            kind: AdapterKind::Known(kind),
            capacity,
            options: AdapterOptions::default(),
            settings: Some(kind),
            base_url,
            profile: None,
        }
    }

    /// The name requests and evidence use. `[R-296]` `[A-65]`
    #[must_use]
    pub const fn resolved_name(&self) -> &str {
        if self.name.is_empty() {
            self.kind.name()
        } else {
            self.name.as_str()
        }
    }

    /// The kind this instance can be started as.
    ///
    /// # Errors
    /// The first rule that the instance breaks by itself; duplicates are the payload's business.
    pub fn usable_kind(&self) -> Result<ProviderKind, AdapterFault> {
        let AdapterKind::Known(kind) = self.kind else {
            return Err(AdapterFault::KindUnknown);
        };
        match self.settings {
            None => Err(AdapterFault::SettingsMissing),
            Some(settings) if settings != kind => Err(AdapterFault::SettingsOfOtherKind),
            Some(_) if self.capacity < 0 => Err(AdapterFault::CapacityNegative),
            Some(_) => Ok(kind),
        }
    }
}

/// What the agent does with a provider call whose caller left. `[D-21]`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OnCancel {
    #[default]
    Abort,
    Drain,
    /// A word nobody knows; the payload cannot be applied.
    Other(String),
}

impl OnCancel {
    /// Empty is the default.
    #[must_use]
    pub fn from_name(name: String) -> Self {
        match name.as_str() {
            "" | "abort" => Self::Abort,
            "drain" => Self::Drain,
            _ => Self::Other(name),
        }
    }

    #[must_use]
    pub const fn name(&self) -> &str {
        match self {
            Self::Abort => "abort",
            Self::Drain => "drain",
            Self::Other(name) => name.as_str(),
        }
    }
}

/// How an adapter behaves; no secrets, no file-system paths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterOptions {
    pub on_cancel: OnCancel,
    /// Idle provider connections live this long, ms; 0 = the agent's default. `[D-20]`
    pub pool_idle_ms: u32,
    /// HTTP path of the unauthenticated probe; empty = the adapter's default. `[D-22]`
    pub probe_path: String,
    /// Operations a native provider can express. `[A-37]`
    pub operations: Vec<String>,
    pub proxy_from_env: bool,
}

/// A resolved protocol profile: how named operations look at the provider. Secret-free. `[R-292]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    pub id: String,
    pub operations: Vec<ProfileOperation>,
    /// Declared name of the authentication header, and what stands before the credential in it.
    pub auth_header: String,
    pub auth_prefix: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileOperation {
    pub name: String,
    pub method: String,
    pub path: String,
}

/// Replaces the whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigRefreshRequest {
    pub request_id: String,
    /// `None` is a violation of the Edge.
    pub config: Option<NodeConfig>,
}

/// `NodeConfigRefreshStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefreshStatus {
    Applied,
    RestartRequired,
    Failed,
    /// 0 or a number nobody knows.
    Unknown(i32),
}

impl RefreshStatus {
    #[must_use]
    pub const fn from_wire(status: i32) -> Self {
        match status {
            1 => Self::Applied,
            2 => Self::RestartRequired,
            3 => Self::Failed,
            other => Self::Unknown(other),
        }
    }

    #[must_use]
    pub const fn to_wire(self) -> i32 {
        match self {
            Self::Applied => 1,
            Self::RestartRequired => 2,
            Self::Failed => 3,
            Self::Unknown(other) => other,
        }
    }
}

/// `message` is a redacted diagnostic.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigRefreshResponse {
    pub request_id: String,
    pub status: RefreshStatus,
    pub message: String,
}
