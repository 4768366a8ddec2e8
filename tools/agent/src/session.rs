//! One session with the Edge: what arrives on a link, judged by what was sent and received before.
//!
//! Lives on: the main task. View: one link. Bound: two writer queues, `INBOUND_QUEUE` envelopes.
use core::fmt;

use iop_control::node::LinkId;
use iop_control::node::attempt::{Rejection, Timeouts, boundary};
use iop_control::node::supervisor::LinkEvent;
use iop_proto::domain::{
    ConfigRefreshRequest, Credential, Features, GoAway, Message, NodeCommandRequest, NodeConfig,
    NodeReadyRequest, NodeReadyResponse, RegisterRequest, RegisterResponse, RunRequest,
    TunnelRequest, Window,
};
use iop_proto::framing::{Envelope, Kind, MessageType};
use iop_proto::limits::{NODE_BULK_QUEUE, NODE_CONTROL_QUEUE};
use iop_proto::map::decode_shared;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::answer::Family;
use crate::execution::Numbers;
use crate::transport::{self, INBOUND_QUEUE, Inbound, LinkConfig, LinkEnd, Outbound, Ports};

/// Why this node ends a session. All of it is the Edge's doing and retryable. `[A-11]`
#[derive(Debug)]
pub(crate) enum Fault {
    Rejected {
        reason: String,
    },
    /// An accepting RegisterResponse without node id or configuration. `[R-037]`
    Incomplete,
    NotReady {
        reason: String,
    },
    /// A request before ready=true; nothing of it was executed. `[R-048]` `[S-70]`
    BeforeReady(MessageType),
    WrongDirection(MessageType),
    Undecodable(MessageType),
    /// An unknown type before registration. `[D-01]`
    Unknown,
    /// The writer's control queue is full: more requests than answers could be sent.
    Flood,
    /// The received configuration cannot be applied or started.
    Apply(Box<crate::adapters::ApplyError>),
    /// A bug of ours in one attempt; only ending the session returns its lease.
    Attempt,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected { reason } => write!(f, "registration rejected: {}", said(reason)),
            Self::Incomplete => f.write_str("registration accepted without node id or config"),
            Self::NotReady { reason } => write!(f, "ready refused: {}", said(reason)),
            Self::BeforeReady(kind) => write!(f, "{} before ready", kind.name()),
            Self::WrongDirection(kind) => write!(f, "{} from an edge", kind.name()),
            Self::Undecodable(kind) => write!(f, "undecodable {}", kind.name()),
            Self::Unknown => f.write_str("unknown message before registration"),
            Self::Flood => f.write_str("more requests than answers could be sent"),
            Self::Apply(error) => write!(f, "configuration: {error}"),
            Self::Attempt => f.write_str("an attempt failed internally"),
        }
    }
}

/// A peer's words as a log or an error may show them: short, without control characters.
pub(crate) fn said(words: &str) -> String {
    let mut said = String::new();
    for c in words.chars().take(200) {
        if matches!(c, '\'' | '"') {
            said.push(c);
        } else {
            said.extend(c.escape_debug());
        }
    }
    said
}

/// What an envelope means to the main task.
#[derive(Debug)]
pub(crate) enum Meaning {
    /// Nothing, or nothing any more.
    Nothing,
    Progress(LinkEvent),
    Execute(Request),
    Cancel(String),
    /// What the Edge takes of a run.
    Window(Window),
    /// Under an envelope id that the answer names. `[R-254]`
    Command(u64, Box<NodeCommandRequest>),
    Refresh(u64, ConfigRefreshRequest),
    Fault(Fault),
}

/// What an Edge asks to execute.
#[derive(Debug)]
pub(crate) enum Request {
    Tunnel(Box<TunnelRequest>),
    Run(Box<RunRequest>),
}

impl Request {
    pub(crate) const fn family(&self) -> Family {
        match self {
            Self::Tunnel(_) => Family::Tunnel,
            Self::Run(_) => Family::Run,
        }
    }

    pub(crate) fn run_id(&self) -> &str {
        match self {
            Self::Tunnel(request) => &request.run_id,
            Self::Run(request) => &request.run_id,
        }
    }

    pub(crate) fn adapter(&self) -> &str {
        match self {
            Self::Tunnel(request) => &request.adapter,
            Self::Run(request) => &request.adapter,
        }
    }

    pub(crate) fn target(&self) -> &str {
        match self {
            Self::Tunnel(request) => &request.target,
            Self::Run(request) => &request.target,
        }
    }

    /// The figures of the request, judged. `is_managed`: tunnels carry a credential here; a run never
    /// does. `[R-114]` `[R-115]` `[A-37]`
    ///
    /// # Errors
    /// As [`boundary`].
    pub(crate) fn boundary(&self, is_managed: bool) -> Result<Timeouts, Rejection> {
        match self {
            Self::Tunnel(it) => boundary(it.timeout, it.stall_timeout, &it.credential, is_managed),
            Self::Run(it) => boundary(it.timeout, it.stall_timeout, &Credential::None, false),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing was sent.
    Fresh,
    Registering {
        id: u64,
    },
    /// Accepted; configuration, adapters and handlers are being set up.
    Accepted,
    /// NodeReadyRequest was sent.
    Readying {
        id: u64,
    },
    Serving,
}

/// One link and what is known of it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) link: LinkId,
    pub(crate) task: JoinHandle<LinkEnd>,
    pub(crate) inbound: mpsc::Receiver<Inbound>,
    control: Option<mpsc::Sender<Outbound>>,
    bulk: Option<mpsc::Sender<Outbound>>,
    phase: Phase,
    last_id: u64,
    /// Identity the Edge returned. `[R-037]`
    node_id: String,
    config: Option<NodeConfig>,
    /// Unknown envelopes after registration; ignored. `[D-01]`
    pub(crate) unknown: u64,
    /// When the Edge acknowledged the node as ready.
    pub(crate) since: Option<Instant>,
    /// Fresh with every connection. `[R-148]`
    pub(crate) numbers: Numbers,
}

impl Session {
    /// Starts the link's task.
    pub(crate) fn dial(link: LinkId, config: LinkConfig) -> Self {
        let (inbound_in, inbound) = mpsc::channel(INBOUND_QUEUE);
        let (control, control_out) = mpsc::channel(NODE_CONTROL_QUEUE);
        let (bulk, bulk_out) = mpsc::channel(NODE_BULK_QUEUE);
        let pongs = control.downgrade();
        let ports = Ports {
            inbound: inbound_in,
            control: control_out,
            bulk: bulk_out,
            pongs,
        };
        let task = tokio::spawn(transport::run(config, ports));
        Self {
            link,
            task,
            inbound,
            control: Some(control),
            bulk: Some(bulk),
            phase: Phase::Fresh,
            last_id: 0,
            node_id: String::new(),
            config: None,
            unknown: 0,
            since: None,
            numbers: Numbers::default(),
        }
    }

    /// The session's bulk queue; `None` once the session is being closed.
    pub(crate) const fn bulk(&self) -> Option<&mpsc::Sender<Outbound>> {
        self.bulk.as_ref()
    }

    /// The configuration that came with the acceptance; once.
    pub(crate) const fn take_config(&mut self) -> Option<NodeConfig> {
        self.config.take()
    }

    /// Lets go of both queues: what is in them is written, then the link ends.
    pub(crate) fn close(&mut self) {
        self.control = None;
        self.bulk = None;
    }

    /// First message on the connection. `[R-019]`
    pub(crate) fn register(&mut self, node_id: &str) -> Result<(), Fault> {
        let id = self.ask(Message::RegisterRequest(RegisterRequest {
            node_id: node_id.to_owned(),
            node_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..RegisterRequest::default()
        }))?;
        self.phase = Phase::Registering { id };
        Ok(())
    }

    /// Under the identity the Edge returned. What else this node can do the Edge hears first, so that
    /// no request comes between. `[R-037]`
    pub(crate) fn ready(&mut self) -> Result<(), Fault> {
        self.send(Outbound::one_way(Message::Features(Features {
            window: true,
        })))?;
        let node_id = self.node_id.clone();
        let id = self.ask(Message::NodeReadyRequest(NodeReadyRequest { node_id }))?;
        self.phase = Phase::Readying { id };
        Ok(())
    }

    pub(crate) fn go_away(&self, grace_ms: u64) -> Result<(), Fault> {
        let grace_ms = u32::try_from(grace_ms).unwrap_or(u32::MAX);
        self.send(Outbound::one_way(Message::GoAway(GoAway { grace_ms })))
    }

    /// Answers a request that came under `id`.
    pub(crate) fn reply(&self, id: u64, message: Message) -> Result<(), Fault> {
        self.send(Outbound::reply(id, message))
    }

    fn ask(&mut self, message: Message) -> Result<u64, Fault> {
        self.last_id += 1;
        self.send(Outbound::ask(self.last_id, message))?;
        Ok(self.last_id)
    }

    fn send(&self, outbound: Outbound) -> Result<(), Fault> {
        match self
            .control
            .as_ref()
            .map(|control| control.try_send(outbound))
        {
            // A closed queue belongs to a link that has ended; that is reported on its own.
            None | Some(Ok(()) | Err(mpsc::error::TrySendError::Closed(_))) => Ok(()),
            Some(Err(mpsc::error::TrySendError::Full(_))) => Err(Fault::Flood),
        }
    }

    /// What an envelope means in this phase.
    pub(crate) fn read(&mut self, envelope: Envelope) -> Meaning {
        self.judge(envelope).unwrap_or_else(Meaning::Fault)
    }

    fn judge(&mut self, envelope: Envelope) -> Result<Meaning, Fault> {
        let Envelope {
            id,
            reply_to,
            kind,
            payload,
        } = envelope;
        let registered = !matches!(self.phase, Phase::Fresh | Phase::Registering { .. });
        let kind = match kind {
            Kind::Known(kind) if kind.from_edge() => kind,
            Kind::Known(kind) => return Err(Fault::WrongDirection(kind)),
            Kind::Unknown if registered => {
                self.unknown += 1;
                return Ok(Meaning::Nothing);
            }
            Kind::Unknown => return Err(Fault::Unknown),
        };
        let message = decode_shared(kind, payload).map_err(|_| Fault::Undecodable(kind))?;
        match message {
            Message::RegisterResponse(response) => self.registered(reply_to, response),
            Message::NodeReadyResponse(response) => self.acknowledged(reply_to, response),
            Message::CancelRequest(cancel) => Ok(Meaning::Cancel(cancel.run_id)),
            Message::RunRequest(_)
            | Message::TunnelRequest(_)
            | Message::NodeCommandRequest(_)
            | Message::ConfigRefreshRequest(_)
                if self.phase != Phase::Serving =>
            {
                Err(Fault::BeforeReady(kind))
            }
            Message::RunRequest(request) => Ok(Meaning::Execute(Request::Run(Box::new(request)))),
            Message::TunnelRequest(request) => {
                Ok(Meaning::Execute(Request::Tunnel(Box::new(request))))
            }
            Message::NodeCommandRequest(command) => Ok(Meaning::Command(id, Box::new(command))),
            Message::ConfigRefreshRequest(refresh) => Ok(Meaning::Refresh(id, refresh)),
            Message::Window(window) => Ok(Meaning::Window(window)),
            // The Edge closes soon; this node goes on. `[D-07]`
            Message::GoAway(_) | Message::Ping(_) | Message::Pong(_) => Ok(Meaning::Nothing),
            Message::RegisterRequest(_)
            | Message::NodeReadyRequest(_)
            | Message::RunEvent(_)
            | Message::TunnelFrame(_)
            | Message::NodeCommandResponse(_)
            | Message::ConfigRefreshResponse(_)
            | Message::Features(_) => Err(Fault::WrongDirection(kind)),
        }
    }

    /// An answer to nothing that is outstanding is dropped. `[wire §4.2]`
    fn registered(&mut self, reply_to: u64, answer: RegisterResponse) -> Result<Meaning, Fault> {
        if self.phase != (Phase::Registering { id: reply_to }) {
            return Ok(Meaning::Nothing);
        }
        match answer {
            RegisterResponse::Accepted {
                node_id,
                config: Some(config),
            } if !node_id.is_empty() => {
                self.phase = Phase::Accepted;
                self.node_id = node_id;
                self.config = Some(config);
                Ok(Meaning::Progress(LinkEvent::Registered))
            }
            RegisterResponse::Accepted { .. } => Err(Fault::Incomplete),
            RegisterResponse::Rejected { reason } => Err(Fault::Rejected { reason }),
        }
    }

    fn acknowledged(&mut self, reply_to: u64, answer: NodeReadyResponse) -> Result<Meaning, Fault> {
        if self.phase != (Phase::Readying { id: reply_to }) {
            return Ok(Meaning::Nothing);
        }
        if !answer.ready {
            return Err(Fault::NotReady {
                reason: answer.reason,
            });
        }
        self.phase = Phase::Serving;
        self.since = Some(Instant::now());
        Ok(Meaning::Progress(LinkEvent::Ready))
    }
}
