//! Questions of the Edge and new configurations: answered here, under the id they came with, on the
//! connection they came on. None of them takes a slot or a run id. `[R-259]`
//!
//! Lives on: the main task; each CAPABILITIES probe is a small task of its own. View: adapters, gates,
//! the one session. Bound: `COMMANDS_MAX` probes at once, each of at most H.
use core::time::Duration;

use iop_control::node::LinkId;
use iop_control::node::supervisor::Exit;
use iop_proto::domain::{
    CommandKind, ConfigRefreshRequest, ConfigRefreshResponse, HealthEvidence, Message, Metadata,
    NodeCommandRequest, NodeCommandResponse, NodeConfig, RefreshStatus,
};
use iop_proto::legacy::ERROR_BYTES_MAX;
use iop_proto::limits::COMMANDS_MAX;
use tokio::task::JoinError;
use tokio::time::timeout;
use tracing::{error, info, warn};

use super::Agent;
use crate::adapters::{ApplyError, Plans, descriptor_limit};
use crate::execution::probe;
use crate::transport::Outbound;

/// What a probe found, and where the answer belongs.
#[derive(Debug)]
pub(super) struct Answer {
    link: LinkId,
    reply_to: u64,
    response: NodeCommandResponse,
}

/// Why a question has no answer. The text is the whole of the response's `error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// `[D-57]`
    Unsupported,
    AdapterUnknown,
    TargetMissing,
    Busy,
}

impl Refusal {
    const fn text(self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported command",
            Self::AdapterUnknown => "unknown adapter",
            Self::TargetMissing => "no target to probe",
            Self::Busy => "too many commands at once",
        }
    }
}

/// Why a configuration is not put in force; the old one stays whole. `[A-49]`
enum RefreshError {
    /// The request carries none.
    Missing,
    Apply(ApplyError),
}

impl RefreshError {
    fn status(&self) -> RefreshStatus {
        match self {
            Self::Apply(error) if error.needs_restart() => RefreshStatus::RestartRequired,
            Self::Missing | Self::Apply(_) => RefreshStatus::Failed,
        }
    }

    /// Bounded, and without paths or addresses of this machine.
    fn message(&self) -> String {
        let mut text = match self {
            Self::Missing => "no configuration".to_owned(),
            Self::Apply(error) => error.redacted(),
        };
        text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX));
        text
    }
}

impl Agent {
    /// `[R-254]`
    pub(super) fn command(&mut self, id: u64, command: NodeCommandRequest) -> Option<Exit> {
        let (kind, command_id) = (command.kind, command.command_id.clone());
        let judged = match kind {
            CommandKind::Capabilities => match self.capabilities(id, command) {
                Ok(()) => return None, // its task answers
                Err(refusal) => Err(refusal),
            },
            CommandKind::TransportStatus => Ok(self.transport_status()),
            CommandKind::ProviderStatus => self.provider_status(&command.adapter),
            CommandKind::Unknown(_) => Err(Refusal::Unsupported),
        };
        let (error, result) = match judged {
            Ok(result) => (String::new(), result),
            Err(refusal) => (refusal.text().to_owned(), Metadata::new()),
        };
        let response = NodeCommandResponse {
            command_id,
            kind,
            error,
            result,
        };
        self.on_session(|session| session.reply(id, Message::NodeCommandResponse(response)))
    }

    /// One bounded, fail-closed probe of the exact target. The number is drawn in the step that
    /// decides the evidence, not when the answer is sent. `[R-175]` `[R-176]` `[R-180]`
    fn capabilities(&mut self, id: u64, command: NodeCommandRequest) -> Result<(), Refusal> {
        let NodeCommandRequest {
            command_id,
            kind,
            adapter,
            target,
        } = command;
        let instance = self.adapters.get(&adapter).cloned();
        let instance = instance.ok_or(Refusal::AdapterUnknown)?;
        if target.is_empty() {
            return Err(Refusal::TargetMissing);
        }
        if self.commands.len() >= COMMANDS_MAX {
            return Err(Refusal::Busy);
        }
        let Some(session) = &self.session else {
            return Ok(()); // nobody to tell
        };
        let (link, numbers) = (session.link, session.numbers.clone());
        let bound = Duration::from_millis(self.config.patience.probe_ms);
        self.commands.spawn(async move {
            let name = instance.name();
            let server = instance.kind().to_owned();
            let probed = timeout(bound, probe(instance, target.clone())).await;
            let health = probed.unwrap_or(HealthEvidence::Unknown);
            let number = numbers.draw();
            let result = [
                ("adapter_key", name.as_ref().to_owned()),
                ("target", target),
                ("provider_status", health.health().to_owned()),
                ("health_observation_seq", number.to_string()),
                // Diagnostic alone.
                ("adapter", server),
                ("instance_key", name.as_ref().to_owned()),
            ];
            let result = result.map(|(key, value)| (key.to_owned(), value)).into();
            let response = NodeCommandResponse {
                command_id,
                kind,
                error: String::new(),
                result,
            };
            Answer {
                link,
                reply_to: id,
                response,
            }
        });
        Ok(())
    }

    /// A probe is over. Its answer goes to the session that asked, or nowhere.
    pub(super) fn probed(&mut self, answer: Result<Answer, JoinError>) -> Option<Exit> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(cancelled) if cancelled.is_cancelled() => return None,
            Err(_) => {
                error!("a command's task panicked"); // the Edge's own timeout answers it
                return None;
            }
        };
        let session = self.session.as_ref()?;
        if session.link != answer.link {
            return None;
        }
        let message = Message::NodeCommandResponse(answer.response);
        self.on_session(|session| session.reply(answer.reply_to, message))
    }

    /// `[R-256]`: no address, no identity, no key.
    fn transport_status(&self) -> Metadata {
        let state = if self.attempts.refusing {
            "draining"
        } else {
            "serving"
        };
        let served = self.session.as_ref().and_then(|session| session.since);
        let served = served.map_or(0, |since| since.elapsed().as_millis());
        [
            ("state", state.to_owned()),
            ("session_uptime_ms", served.to_string()),
            (
                "agent_uptime_ms",
                self.clock.now().ms_since(Default::default()).to_string(),
            ),
            ("attempts_open", self.attempts.open().to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }

    /// `[R-257]`: a name of the configuration runs, one that is only held drains.
    fn provider_status(&self, adapter: &str) -> Result<Metadata, Refusal> {
        let mut states: Metadata = self
            .attempts
            .draining()
            .map(|name| (format!("state.{name}"), "draining".to_owned()))
            .collect();
        let now = if self.attempts.refusing {
            "draining"
        } else {
            "running"
        };
        let named = self.adapters.names();
        states.extend(named.map(|name| (format!("state.{name}"), now.to_owned())));
        if adapter.is_empty() {
            return Ok(states);
        }
        let instance = self.adapters.get(adapter);
        let name = instance.map_or_else(|| adapter.into(), |instance| instance.name());
        let key = format!("state.{name}");
        let state = states.remove(&key).ok_or(Refusal::AdapterUnknown)?;
        Ok([(key, state)].into())
    }

    /// A whole replacement: in force when the answer is sent, or nothing of it is. One at a time, in
    /// order: this task does nothing else meanwhile. `[R-261]` `[S-46]`
    pub(super) fn refresh(&mut self, id: u64, request: ConfigRefreshRequest) -> Option<Exit> {
        let (status, message) = match self.replace(request.config) {
            Ok(()) => {
                info!(adapters = self.adapters.len(), "configuration replaced");
                (RefreshStatus::Applied, String::new())
            }
            Err(error) => {
                let (status, message) = (error.status(), error.message());
                warn!(?status, %message, "configuration refused, the old one stays");
                (status, message)
            }
        };
        let response = ConfigRefreshResponse {
            request_id: request.request_id,
            status,
            message,
        };
        let message = Outbound::reply(id, Message::ConfigRefreshResponse(response));
        let bulk = self.session.as_ref()?.bulk()?;
        let said = self.attempts.say(bulk, message);
        said.err().and_then(|fault| self.fault(&fault))
    }

    fn replace(&mut self, config: Option<NodeConfig>) -> Result<(), RefreshError> {
        let config = config.ok_or(RefreshError::Missing)?;
        let plans = Plans::judge(&config, &self.config.provider_http, descriptor_limit())
            .map_err(RefreshError::Apply)?;
        let capacities: Vec<_> = plans
            .capacities()
            .map(|(name, capacity)| (name.to_owned(), capacity))
            .collect();
        self.adapters.start(plans).map_err(RefreshError::Apply)?;
        let capacities = capacities.iter();
        self.attempts
            .configure(capacities.map(|(name, capacity)| (name.as_str(), *capacity)));
        Ok(())
    }
}
