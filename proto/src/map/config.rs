//! The configuration's part of the mapping: generated and domain types, as in `map`.
//!
//! Lives on: see `map`. Bound: one envelope.
use super::wire;
use super::wire::adapter_config::Config as Settings;
use crate::catalog::ProviderKind;
use crate::domain::{
    Adapter, AdapterKind, AdapterOptions, ConfigRefreshRequest, ConfigRefreshResponse, NodeConfig,
    OnCancel, Profile, ProfileOperation, RefreshStatus,
};

impl From<&NodeConfig> for wire::NodeConfigPayload {
    fn from(m: &NodeConfig) -> Self {
        let concurrency = m.concurrency;
        Self {
            adapters: m.adapters.iter().map(Into::into).collect(),
            runtime: (concurrency != 0).then_some(wire::NodeRuntimeConfig { concurrency }),
        }
    }
}

impl From<wire::NodeConfigPayload> for NodeConfig {
    fn from(m: wire::NodeConfigPayload) -> Self {
        Self {
            adapters: m.adapters.into_iter().map(Into::into).collect(),
            concurrency: m.runtime.map_or(0, |runtime| runtime.concurrency),
        }
    }
}

impl From<&Adapter> for wire::AdapterConfig {
    fn from(m: &Adapter) -> Self {
        let base_url = m.base_url.clone();
        let protocol_profile = m.profile.as_ref().map(Into::into);
        let config = m.settings.map(|kind| match kind {
            ProviderKind::Ollama => Settings::Ollama(wire::OllamaAdapterConfig { base_url }),
            ProviderKind::Vllm => Settings::Vllm(wire::VllmAdapterConfig {
                base_url,
                protocol_profile,
            }),
            ProviderKind::OpenAiCompat => {
                let settings = wire::OpenAiCompatAdapterConfig {
                    base_url,
                    protocol_profile,
                };
                Settings::OpenaiCompat(settings)
            }
        });
        let options = (m.options != AdapterOptions::default()).then(|| (&m.options).into());
        let (name, kind) = (m.name.clone(), m.kind.name().to_owned());
        Self {
            name,
            r#type: kind,
            capacity: m.capacity,
            options,
            config,
        }
    }
}

impl From<wire::AdapterConfig> for Adapter {
    fn from(m: wire::AdapterConfig) -> Self {
        let (settings, base_url, profile) = match m.config {
            None => (None, String::new(), None),
            Some(Settings::Ollama(c)) => (Some(ProviderKind::Ollama), c.base_url, None),
            Some(Settings::Vllm(c)) => (Some(ProviderKind::Vllm), c.base_url, c.protocol_profile),
            Some(Settings::OpenaiCompat(c)) => (
                Some(ProviderKind::OpenAiCompat),
                c.base_url,
                c.protocol_profile,
            ),
        };
        Self {
            name: m.name,
            kind: AdapterKind::from_name(m.r#type),
            capacity: m.capacity,
            options: m.options.map(Into::into).unwrap_or_default(),
            settings,
            base_url,
            profile: profile.map(Into::into),
        }
    }
}

impl From<&AdapterOptions> for wire::AdapterOptions {
    fn from(m: &AdapterOptions) -> Self {
        Self {
            on_cancel: m.on_cancel.name().to_owned(),
            pool_idle_ms: m.pool_idle_ms,
            probe_path: m.probe_path.clone(),
            operations: m.operations.clone(),
            proxy_from_env: m.proxy_from_env,
        }
    }
}

impl From<wire::AdapterOptions> for AdapterOptions {
    fn from(m: wire::AdapterOptions) -> Self {
        Self {
            on_cancel: OnCancel::from_name(m.on_cancel),
            pool_idle_ms: m.pool_idle_ms,
            probe_path: m.probe_path,
            operations: m.operations,
            proxy_from_env: m.proxy_from_env,
        }
    }
}

impl From<&Profile> for wire::ConcreteProtocolProfile {
    fn from(m: &Profile) -> Self {
        let operation = |o: &ProfileOperation| wire::ProfileOperation {
            name: o.name.clone(),
            method: o.method.clone(),
            path: o.path.clone(),
        };
        Self {
            id: m.id.clone(),
            operations: m.operations.iter().map(operation).collect(),
            auth_header: m.auth_header.clone(),
            auth_prefix: m.auth_prefix.clone(),
        }
    }
}

impl From<wire::ConcreteProtocolProfile> for Profile {
    fn from(m: wire::ConcreteProtocolProfile) -> Self {
        let operation = |o: wire::ProfileOperation| ProfileOperation {
            name: o.name,
            method: o.method,
            path: o.path,
        };
        Self {
            id: m.id,
            operations: m.operations.into_iter().map(operation).collect(),
            auth_header: m.auth_header,
            auth_prefix: m.auth_prefix,
        }
    }
}

impl From<&ConfigRefreshRequest> for wire::NodeConfigRefreshRequest {
    fn from(m: &ConfigRefreshRequest) -> Self {
        let config = m.config.as_ref().map(Into::into);
        Self {
            request_id: m.request_id.clone(),
            config,
        }
    }
}

impl From<wire::NodeConfigRefreshRequest> for ConfigRefreshRequest {
    fn from(m: wire::NodeConfigRefreshRequest) -> Self {
        Self {
            request_id: m.request_id,
            config: m.config.map(Into::into),
        }
    }
}

impl From<&ConfigRefreshResponse> for wire::NodeConfigRefreshResponse {
    fn from(m: &ConfigRefreshResponse) -> Self {
        let (request_id, message) = (m.request_id.clone(), m.message.clone());
        Self {
            request_id,
            status: m.status.to_wire(),
            message,
        }
    }
}

impl From<wire::NodeConfigRefreshResponse> for ConfigRefreshResponse {
    fn from(m: wire::NodeConfigRefreshResponse) -> Self {
        let status = RefreshStatus::from_wire(m.status);
        Self {
            request_id: m.request_id,
            status,
            message: m.message,
        }
    }
}
