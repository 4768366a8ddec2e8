//! The main task: performs what the supervisor decides, owns gates, run entries and adapters, and
//! hands each request to an attempt of its own (`agent/attempts.rs`).
//!
//! Lives on: one task per process. View: the whole agent. Bound: one session; `ATTEMPTS_MAX` attempts.
mod attempts;
mod commands;

use core::future::Future;
use core::time::Duration;
use std::sync::Arc;

use iop_control::node::supervisor::{Action, Event, Exit, LinkEvent, Supervisor};
use iop_proto::domain::Window;
use iop_proto::ids::Now;
use ring::rand::{SecureRandom, SystemRandom};
use rustls::ClientConfig;
use rustls::pki_types::UnixTime;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use self::attempts::{Attempts, Joined};
use self::commands::Answer;
use crate::adapters::{Adapters, Plans, descriptor_limit};
use crate::clock::Clock;
use crate::config::NodeConfig;
use crate::credential::{Plane, unix_ms};
use crate::execution::Report;
use crate::identity::{self, CredentialError};
use crate::reload;
use crate::requests::{Requests, Shutdowns};
use crate::session::{Fault, Meaning, Session};
use crate::transport::{Inbound, LinkConfig, LinkEnd};

/// Queued frames of a session that ends in order are written within this long.
const FLUSH: Duration = Duration::from_secs(1);

/// Runs one node agent until it ends. See [`crate::run`].
pub(crate) async fn run(config: NodeConfig, requests: Requests) -> Exit {
    let supervisor = Supervisor::new(config.reconnect, millis(config.drain_timeout));
    let clock = Clock::start();
    let dice = SystemRandom::new();
    let mut nonce = [0; 8];
    if dice.fill(&mut nonce).is_err() {
        nonce = [0; 8]; // attempt ids are then unique in this process only
    }
    let attempts = Attempts::new(clock, config.patience, u64::from_ne_bytes(nonce));
    let link_config = LinkConfig {
        edge: config.edge.clone(),
        tls: None,
        ping_every: config.ping_every,
        dead_after: config.dead_after,
    };
    let agent = Agent {
        config,
        link_config,
        tls: watch::Sender::new(None),
        held_until: None,
        clock,
        supervisor,
        dice,
        session: None,
        flush_by: None,
        plans: None,
        adapters: Adapters::default(),
        attempts,
        commands: JoinSet::new(),
        active: 0,
    };
    agent.run(requests).await
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

enum Wake {
    Shutdown,
    Deadline,
    FlushOver,
    HoldOver,
    Report(Report),
    Joined(Joined),
    Probed(Result<Answer, JoinError>),
    Inbound(Inbound),
    Ended(Result<LinkEnd, JoinError>),
}

struct Agent {
    config: NodeConfig,
    /// All but `tls`.
    link_config: LinkConfig,
    /// What the next dial proves itself with; replaced as the files change. `[D-05]`
    tls: watch::Sender<Option<Arc<ClientConfig>>>,
    /// Handlers stand, and ready is held back until then. `[A-34]`
    held_until: Option<Instant>,
    clock: Clock,
    supervisor: Supervisor,
    dice: SystemRandom,
    session: Option<Session>,
    /// The session is being flushed and is cut off then.
    flush_by: Option<Instant>,
    /// Judged, not started yet.
    plans: Option<Plans>,
    adapters: Adapters,
    attempts: Attempts,
    /// CAPABILITIES probes of the session.
    commands: JoinSet<Answer>,
    /// As the supervisor knows it.
    active: u32,
}

impl Agent {
    async fn run(mut self, requests: Requests) -> Exit {
        let Requests {
            mut shutdown,
            reloads,
        } = requests;
        info!(node = %self.config.node_id, "node agent started");
        let mut files = JoinSet::new(); // aborted with this run
        let valid = match self.identify() {
            Ok(()) => {
                let security = self.config.security.clone();
                files.spawn(reload::follow(security, reloads, self.tls.clone()));
                Event::Valid
            }
            Err(error) => {
                error!(%error, "the local identity cannot be used");
                Event::Fatal
            }
        };
        let mut exit = self.step(valid);
        while exit.is_none() {
            exit = match self.wake(&mut shutdown).await {
                Wake::Shutdown => {
                    info!("shutdown requested");
                    self.step(Event::Shutdown)
                }
                Wake::Deadline => {
                    let action = self.supervisor.tick(self.clock.now());
                    self.perform(action)
                }
                Wake::FlushOver => self.cut(),
                Wake::HoldOver => {
                    self.held_until = None;
                    self.progress(LinkEvent::Installed)
                }
                Wake::Report(report) => {
                    self.attempts.report(report);
                    self.active_changed()
                }
                Wake::Joined(joined) => match self.attempts.joined(joined) {
                    Ok(()) => self.active_changed(),
                    Err(fault) => self.fault(&fault),
                },
                Wake::Probed(answer) => self.probed(answer),
                Wake::Inbound(inbound) => self.inbound(inbound),
                Wake::Ended(end) => self.ended(end),
            };
        }
        if let Some(session) = self.session.take() {
            session.task.abort();
            let _ = session.task.await; // the socket is closed when this returns
        }
        let exit = exit.unwrap_or(Exit::Shutdown);
        info!(code = exit.code(), reason = ?exit, "node agent ends");
        exit
    }

    /// Certificates, which may change later, and the keys of the credential plane.
    fn identify(&mut self) -> Result<(), CredentialError> {
        let tls = identity::tls_config(&self.config.security, UnixTime::now())?;
        self.tls.send_replace(tls);
        if let Some(files) = &self.config.credentials {
            let node_id = &self.config.node_id;
            let plane = Plane::read(files, node_id, self.clock.now(), unix_ms())?;
            self.attempts.credentials = Some(Arc::new(plane));
        }
        Ok(())
    }

    /// Ready may be sent, or it is held back: a managed node's first leases are younger than its
    /// process by more than the skew. `[A-34]`
    fn installed(&mut self) -> Option<Exit> {
        let plane = self.attempts.credentials.as_ref();
        let from = plane.map(|plane| plane.ready_from(Now::default()));
        match from.filter(|&from| self.clock.now() < from) {
            Some(from) => {
                self.held_until = Some(self.clock.instant(from));
                None
            }
            None => self.progress(LinkEvent::Installed),
        }
    }

    /// What a link received before it ended is handled before its end.
    async fn wake(&mut self, shutdown: &mut Shutdowns) -> Wake {
        let deadline = self.supervisor.deadline().map(|at| self.clock.instant(at));
        let (inbound, task) = match &mut self.session {
            Some(session) => (Some(&mut session.inbound), Some(&mut session.task)),
            None => (None, None),
        };
        tokio::select! {
            biased;
            () = shutdown.requested() => Wake::Shutdown,
            () = sleep_until(deadline) => Wake::Deadline,
            () = sleep_until(self.flush_by) => Wake::FlushOver,
            () = sleep_until(self.held_until) => Wake::HoldOver,
            Some(report) = self.attempts.reports.recv() => Wake::Report(report),
            Some(joined) = self.attempts.tasks.join_next_with_id() => Wake::Joined(joined),
            Some(answer) = self.commands.join_next() => Wake::Probed(answer),
            Some(inbound) = receive(inbound) => Wake::Inbound(inbound),
            end = join(task) => Wake::Ended(end),
        }
    }

    fn step(&mut self, event: Event) -> Option<Exit> {
        let mut dice = [0; 4];
        let ended = matches!(event, Event::Link(_, LinkEvent::Ended));
        if ended && self.dice.fill(&mut dice).is_err() {
            dice = [0; 4]; // no jitter is still the configured minimum
        }
        let action = self
            .supervisor
            .step(self.clock.now(), event, u32::from_ne_bytes(dice));
        self.perform(action)
    }

    /// One action after the other, until the machine waits or ends.
    fn perform(&mut self, action: Option<Action>) -> Option<Exit> {
        match action? {
            Action::Dial(link) => {
                debug!(link = link.get(), "dialling the edge");
                self.attempts.refusing = false;
                let config = LinkConfig {
                    tls: self.tls.borrow().clone(),
                    ..self.link_config.clone()
                };
                self.session = Some(Session::dial(link, config));
                None
            }
            Action::Register => {
                let node_id = self.config.node_id.clone();
                self.on_session(|session| session.register(&node_id))
            }
            Action::Apply => self.apply(),
            Action::StartAdapters => self.start_adapters(),
            // The handlers are this task's `inbound`: in force from here, before ready is sent.
            Action::InstallHandlers => self.installed(),
            Action::SendReady => self.on_session(Session::ready),
            Action::AnnounceDrain { grace_ms } => {
                info!(grace_ms, attempts = self.attempts.open(), "draining");
                self.on_session(|session| session.go_away(grace_ms))
            }
            Action::RefuseWork => {
                self.attempts.refusing = true;
                None
            }
            Action::End { why, flush, .. } => {
                debug!(?why, "ending the session");
                self.end_session(flush);
                None
            }
            Action::Exit(exit) => Some(exit),
        }
    }

    fn on_session(&mut self, act: impl FnOnce(&mut Session) -> Result<(), Fault>) -> Option<Exit> {
        match self.session.as_mut().map(act) {
            Some(Err(fault)) => self.fault(&fault),
            Some(Ok(())) | None => None,
        }
    }

    fn progress(&mut self, event: LinkEvent) -> Option<Exit> {
        let link = self.session.as_ref()?.link;
        if event == LinkEvent::Ready {
            info!(node = %self.config.node_id, adapters = self.adapters.len(), "node ready");
        }
        self.step(Event::Link(link, event))
    }

    fn fault(&mut self, fault: &Fault) -> Option<Exit> {
        warn!(%fault, "the session cannot go on");
        self.progress(LinkEvent::Failed)
    }

    fn apply(&mut self) -> Option<Exit> {
        let config = self.session.as_mut().and_then(Session::take_config)?;
        let judged = Plans::judge(&config, &self.config.provider_http, descriptor_limit());
        match judged {
            Ok(plans) => {
                self.attempts.configure(plans.capacities());
                self.plans = Some(plans);
                self.progress(LinkEvent::Applied)
            }
            Err(error) => self.fault(&Fault::Apply(Box::new(error))),
        }
    }

    fn start_adapters(&mut self) -> Option<Exit> {
        let plans = self.plans.take()?;
        match self.adapters.start(plans) {
            Ok(()) => self.progress(LinkEvent::Started),
            Err(error) => self.fault(&Fault::Apply(Box::new(error))),
        }
    }

    /// Cancels the session context, then lets the link flush or drops it. `[R-081]`
    fn end_session(&mut self, flush: bool) {
        let Some(session) = &mut self.session else {
            return;
        };
        session.close();
        if flush {
            self.flush_by = Some(Instant::now() + FLUSH);
        } else {
            session.task.abort();
        }
        let link = session.link;
        self.held_until = None;
        self.attempts.end_link(link);
    }

    fn cut(&mut self) -> Option<Exit> {
        self.flush_by = None;
        if let Some(session) = &self.session {
            session.task.abort();
        }
        None
    }

    fn ended(&mut self, end: Result<LinkEnd, JoinError>) -> Option<Exit> {
        let session = self.session.take()?;
        (self.flush_by, self.held_until) = (None, None);
        self.attempts.end_link(session.link);
        self.commands.abort_all();
        match end {
            Ok(LinkEnd::Flushed) => debug!(link = session.link.get(), "link closed"),
            Ok(end) => warn!(link = session.link.get(), %end, "link lost"),
            Err(error) if error.is_cancelled() => debug!(link = session.link.get(), "link dropped"),
            Err(_) => error!(link = session.link.get(), "the link's task panicked"),
        }
        if session.unknown > 0 {
            debug!(count = session.unknown, "unknown envelopes ignored");
        }
        self.step(Event::Link(session.link, LinkEvent::Ended))
    }

    fn inbound(&mut self, inbound: Inbound) -> Option<Exit> {
        let envelope = match inbound {
            Inbound::Connected => return self.progress(LinkEvent::Connected),
            Inbound::Identified => return self.progress(LinkEvent::Identified),
            Inbound::Envelope(envelope) => envelope,
        };
        let session = self.session.as_mut()?;
        session.bulk()?; // being closed: nothing received on it is acted on any more `[I4.6]`
        let link = session.link;
        match session.read(envelope) {
            Meaning::Nothing => None,
            Meaning::Progress(event) => self.progress(event),
            Meaning::Fault(fault) => self.fault(&fault),
            Meaning::Cancel(run_id) => {
                self.attempts.cancel(link, &run_id);
                None
            }
            Meaning::Window(Window { run_id, bytes }) => {
                self.attempts.grant(link, &run_id, bytes);
                None
            }
            Meaning::Command(id, command) => self.command(id, *command),
            Meaning::Refresh(id, request) => self.refresh(id, request),
            Meaning::Execute(request) => {
                let session = self.session.as_ref()?;
                match self.attempts.execute(session, &self.adapters, request) {
                    Ok(()) => self.active_changed(),
                    Err(fault) => self.fault(&fault),
                }
            }
        }
    }

    fn active_changed(&mut self) -> Option<Exit> {
        let active = self.attempts.open();
        if core::mem::replace(&mut self.active, active) == active {
            return None;
        }
        self.step(Event::Active(active))
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => core::future::pending().await,
    }
}

/// `None` once the link will report nothing more; without a link, never.
async fn receive(inbound: Option<&mut mpsc::Receiver<Inbound>>) -> Option<Inbound> {
    match inbound {
        Some(inbound) => inbound.recv().await,
        None => core::future::pending().await,
    }
}

async fn join<T>(task: Option<&mut T>) -> T::Output
where
    T: Future + Unpin,
{
    match task {
        Some(task) => task.await,
        None => core::future::pending().await,
    }
}
