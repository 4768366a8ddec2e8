//! The main task: performs what the supervisor decides, owns gates, run entries and adapters, and
//! hands each request to an attempt of its own.
//!
//! Lives on: one task per process. View: the whole agent. Bound: one session; `ATTEMPTS_MAX` attempts.
use core::future::Future;
use core::time::Duration;
use std::collections::HashMap;
use std::sync::Arc;

use iop_control::node::attempt::{Failure, Rejection, Signals, Terminal, Timeouts, boundary};
use iop_control::node::gate::{Entry, Gates};
use iop_control::node::runs::{Refusal, Runs};
use iop_control::node::supervisor::{Action, Event, Exit, LinkEvent, Supervisor};
use iop_control::node::{LinkId, Ticket};
use iop_proto::domain::{Message, RunEvent, RunEventKind, RunRequest, TunnelRequest};
use iop_proto::limits::ATTEMPTS_MAX;
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::UnixTime;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use crate::adapters::{Adapters, Instance, Plans, descriptor_limit};
use crate::clock::Clock;
use crate::config::NodeConfig;
use crate::execution::{self, Job, Report, error_text, terminal_frame};
use crate::identity;
use crate::provider::ProviderRequest;
use crate::session::{Fault, Meaning, Session};
use crate::shutdown::Shutdown;
use crate::transport::{Inbound, LinkConfig, LinkEnd, Outbound};

/// Queued frames of a session that ends in order are written within this long.
const FLUSH: Duration = Duration::from_secs(1);

/// Runs one node agent until it ends. See [`crate::run`].
pub(crate) async fn run(config: NodeConfig, shutdown: Shutdown) -> Exit {
    let supervisor = Supervisor::new(config.reconnect, millis(config.drain_timeout));
    let (reports_in, reports) = mpsc::unbounded_channel();
    let link_config = LinkConfig {
        edge: config.edge.clone(),
        tls: None,
        ping_every: config.ping_every,
        dead_after: config.dead_after,
    };
    let agent = Agent {
        config,
        link_config,
        clock: Clock::start(),
        supervisor,
        dice: SystemRandom::new(),
        session: None,
        flush_by: None,
        plans: None,
        adapters: Adapters::default(),
        gates: Gates::default(),
        runs: Runs::default(),
        running: HashMap::new(),
        tasks: JoinSet::new(),
        reports_in,
        reports,
        refusing: false,
        active: 0,
        duplicates: 0,
    };
    agent.run(shutdown).await
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What the main task knows of an attempt that is not over.
#[derive(Debug)]
struct Running {
    link: LinkId,
    run_id: String,
    adapter: String,
    slot: Slot,
    signals: watch::Sender<Signals>,
    task: tokio::task::Id,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Waits,
    Held,
    Free,
}

enum Wake {
    Shutdown,
    Deadline,
    FlushOver,
    Report(Report),
    Joined(Result<(tokio::task::Id, Option<Ticket>), JoinError>),
    Inbound(Inbound),
    Ended(Result<LinkEnd, JoinError>),
}

struct Agent {
    config: NodeConfig,
    link_config: LinkConfig,
    clock: Clock,
    supervisor: Supervisor,
    dice: SystemRandom,
    session: Option<Session>,
    /// The session is being flushed and is cut off then.
    flush_by: Option<Instant>,
    /// Judged, not started yet.
    plans: Option<Plans>,
    adapters: Adapters,
    gates: Gates,
    runs: Runs,
    running: HashMap<Ticket, Running>,
    /// Attempts, and refusals (no ticket) that wait for room in a writer queue.
    tasks: JoinSet<Option<Ticket>>,
    reports_in: mpsc::UnboundedSender<Report>,
    /// At most two per attempt.
    reports: mpsc::UnboundedReceiver<Report>,
    /// New work is answered with `draining`. `[D-07]`
    refusing: bool,
    active: u32,
    /// Requests under the id of an open stream; dropped. `[D-52]`
    duplicates: u64,
}

impl Agent {
    async fn run(mut self, mut shutdown: Shutdown) -> Exit {
        info!(node = %self.config.node_id, "node agent started");
        let valid = match identity::tls_config(&self.config.security, UnixTime::now()) {
            Ok(tls) => {
                self.link_config.tls = tls;
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
                Wake::Report(report) => self.report(report),
                Wake::Joined(joined) => self.joined(joined),
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

    /// What a link received before it ended is handled before its end.
    async fn wake(&mut self, shutdown: &mut Shutdown) -> Wake {
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
            Some(report) = self.reports.recv() => Wake::Report(report),
            Some(joined) = self.tasks.join_next_with_id() => Wake::Joined(joined),
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
                self.refusing = false;
                self.session = Some(Session::dial(link, self.link_config.clone()));
                None
            }
            Action::Register => {
                let node_id = self.config.node_id.clone();
                self.on_session(|session| session.register(&node_id))
            }
            Action::Apply => self.apply(),
            Action::StartAdapters => self.start_adapters(),
            // The handlers are this task's `inbound`: in force from here, before ready is sent.
            Action::InstallHandlers => self.progress(LinkEvent::Installed),
            Action::SendReady => self.on_session(Session::ready),
            Action::AnnounceDrain { grace_ms } => {
                info!(grace_ms, attempts = self.runs.open(), "draining");
                self.on_session(|session| session.go_away(grace_ms))
            }
            Action::RefuseWork => {
                self.refusing = true;
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
                self.gates.configure(plans.capacities());
                self.plans = Some(plans);
                self.grants();
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
        self.cancel_context(link);
    }

    fn cut(&mut self) -> Option<Exit> {
        self.flush_by = None;
        if let Some(session) = &self.session {
            session.task.abort();
        }
        None
    }

    /// Every attempt of the link ends without a word; those of other links notice nothing.
    fn cancel_context(&mut self, link: LinkId) {
        let tickets: Vec<_> = self.runs.of_link(link).collect();
        for running in tickets.iter().filter_map(|ticket| self.running.get(ticket)) {
            running.signals.send_modify(|signals| signals.ended = true);
            self.runs.settled(link, &running.run_id);
        }
    }

    fn ended(&mut self, end: Result<LinkEnd, JoinError>) -> Option<Exit> {
        let session = self.session.take()?;
        self.flush_by = None;
        self.cancel_context(session.link);
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
                let ticket = self.runs.find(link, &run_id);
                if let Some(running) = ticket.and_then(|ticket| self.running.get(&ticket)) {
                    running
                        .signals
                        .send_modify(|signals| signals.cancelled = true);
                }
                None
            }
            Meaning::Tunnel(request) => self.tunnel(link, *request),
            Meaning::Run(request) => self.run_request(*request),
        }
    }

    /// Normalized runs are served by native adapters; the tunnel kinds have none. `[A-62]`
    fn run_request(&mut self, request: RunRequest) -> Option<Exit> {
        let refusal = if self.refusing {
            error_text(Failure::Draining, None)
        } else if self.adapters.get(&request.adapter).is_some() {
            error_text(Failure::Rejected, Some(Rejection::RunUnsupported.detail()))
        } else {
            error_text(Failure::Rejected, Some(Rejection::AdapterUnknown.detail()))
        };
        let mut event = RunEvent::new(request.run_id, RunEventKind::Error);
        event.error = refusal;
        self.refuse(Message::RunEvent(event))
    }

    /// Checks come in this order: a taken id may never be answered with a terminal.
    fn tunnel(&mut self, link: LinkId, request: TunnelRequest) -> Option<Exit> {
        let bulk = self.session.as_ref().and_then(Session::bulk).cloned()?;
        let received = self.clock.now();
        let run_id = request.run_id.clone();
        let ticket = match self.runs.take(link, &run_id) {
            Ok(ticket) => ticket,
            Err(Refusal::Open) => {
                self.duplicates += 1;
                debug!(
                    count = self.duplicates,
                    "request under an open run id dropped"
                );
                return None;
            }
            Err(Refusal::Retained) => return self.reject(run_id, Rejection::RunRetained),
            Err(Refusal::Full) => return self.reject(run_id, Rejection::AttemptsFull),
        };
        if self.refusing {
            self.runs.remove(link, &run_id);
            return self.refuse_tunnel(run_id, Failure::Draining, None);
        }
        let adapter = request.adapter.clone();
        let admitted = self.admit(ticket, request);
        let (timeouts, instance, request, slot) = match admitted {
            Ok(admitted) => admitted,
            Err(rejection) => {
                self.runs.remove(link, &run_id);
                return self.reject(run_id, rejection);
            }
        };
        let granted = slot == Slot::Held;
        let (signals, heard) = watch::channel(Signals {
            granted,
            ..Signals::default()
        });
        let job = Job {
            ticket,
            run_id: run_id.clone(),
            received,
            timeouts,
            instance,
            request,
            clock: self.clock,
            signals: heard,
            bulk,
            reports: self.reports_in.clone(),
        };
        let task = self
            .tasks
            .spawn(async move { Some(execution::run(job).await) })
            .id();
        let running = Running {
            link,
            run_id,
            adapter,
            slot,
            signals,
            task,
        };
        self.running.insert(ticket, running);
        self.active_changed()
    }

    fn admit(
        &mut self,
        ticket: Ticket,
        request: TunnelRequest,
    ) -> Result<(Timeouts, Arc<Instance>, ProviderRequest, Slot), Rejection> {
        let timeouts = boundary(request.timeout, request.stall_timeout, &request.credential)?;
        let adapter = request.adapter.clone();
        let instance = self
            .adapters
            .get(&adapter)
            .cloned()
            .ok_or(Rejection::AdapterUnknown)?;
        let request = instance.resolve(request)?;
        let slot = match self.gates.enter(&adapter, ticket) {
            Entry::Granted => Slot::Held,
            Entry::Waits => Slot::Waits,
            Entry::Full => return Err(Rejection::WaitingFull),
            Entry::Unknown => return Err(Rejection::AdapterUnknown),
        };
        Ok((timeouts, instance, request, slot))
    }

    fn reject(&mut self, run_id: String, rejection: Rejection) -> Option<Exit> {
        self.refuse_tunnel(run_id, Failure::Rejected, Some(rejection.detail()))
    }

    fn refuse_tunnel(
        &mut self,
        run_id: String,
        failure: Failure,
        detail: Option<&'static str>,
    ) -> Option<Exit> {
        let frame = terminal_frame(run_id, 1, Terminal::Error(failure), detail);
        self.refuse(Message::TunnelFrame(frame))
    }

    /// One terminal and nothing else. This task does not wait for room: when there is none, a small
    /// task does, up to a bound.
    fn refuse(&mut self, message: Message) -> Option<Exit> {
        let bulk = self.session.as_ref().and_then(Session::bulk)?;
        match bulk.try_send(Outbound::one_way(message)) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => None,
            Err(mpsc::error::TrySendError::Full(outbound)) => {
                if self.tasks.len() >= 2 * ATTEMPTS_MAX as usize {
                    return self.fault(&Fault::Flood);
                }
                let bulk = bulk.clone();
                self.tasks.spawn(async move {
                    // Closed: the session is over, and nobody is to be told.
                    let _ = bulk.send(outbound).await;
                    None
                });
                None
            }
        }
    }

    fn report(&mut self, report: Report) -> Option<Exit> {
        match report {
            Report::SlotFree(ticket) => self.free_slot(ticket),
            Report::Settled(ticket) => {
                if let Some(running) = self.running.get(&ticket) {
                    self.runs.settled(running.link, &running.run_id);
                }
            }
        }
        self.active_changed()
    }

    fn free_slot(&mut self, ticket: Ticket) {
        let Some(running) = self.running.get_mut(&ticket) else {
            return;
        };
        match core::mem::replace(&mut running.slot, Slot::Free) {
            Slot::Held => self.gates.release(&running.adapter),
            Slot::Waits => {
                self.gates.leave(&running.adapter, ticket);
            }
            Slot::Free => {}
        }
        self.grants();
    }

    /// Tells each waiter whose turn came. One that is already over gives its slot back by itself.
    fn grants(&mut self) {
        while let Some(ticket) = self.gates.next_grant() {
            let running = self.running.get_mut(&ticket);
            let running = running.expect("a waiter leaves its gate before it is forgotten");
            running.slot = Slot::Held;
            running
                .signals
                .send_modify(|signals| signals.granted = true);
        }
    }

    fn joined(
        &mut self,
        joined: Result<(tokio::task::Id, Option<Ticket>), JoinError>,
    ) -> Option<Exit> {
        match joined {
            Ok((_, Some(ticket))) => self.forget(ticket),
            Ok((_, None)) => {}
            Err(panicked) => {
                error!("an attempt's task panicked");
                let mut running = self.running.iter();
                let ticket = running.find(|(_, running)| running.task == panicked.id());
                if let Some(ticket) = ticket.map(|(&ticket, _)| ticket) {
                    self.forget(ticket);
                }
                return self.fault(&Fault::Attempt);
            }
        }
        self.active_changed()
    }

    fn forget(&mut self, ticket: Ticket) {
        self.free_slot(ticket);
        if let Some(running) = self.running.remove(&ticket) {
            self.runs.remove(running.link, &running.run_id);
        }
    }

    fn active_changed(&mut self) -> Option<Exit> {
        let active = self.runs.open();
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
