//! What runs: the way of a request through run entry and gate to an attempt of its own, and back.
//!
//! Lives on: the main task. View: every attempt of the process, of whatever session. Bound:
//! `ATTEMPTS_MAX` attempts, as many refusals that wait for room in a writer queue.
use std::collections::HashMap;
use std::sync::Arc;

use iop_control::node::attempt::{Failure, Patience, Rejection, Signals, Timeouts};
use iop_control::node::gate::{Entry, Gates};
use iop_control::node::runs::{Refusal, Runs};
use iop_control::node::{LinkId, Ticket};
use iop_proto::ids::Now;
use iop_proto::limits::{ATTEMPTS_MAX, NAME_BYTES_MAX};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tracing::{debug, error};

use crate::adapters::{Adapters, Denied, Instance, Work};
use crate::answer::{Family, Identity, refusal};
use crate::clock::Clock;
use crate::credential::{Plane, Sealed};
use crate::execution::{self, Job, Report};
use crate::observer::Observer;
use crate::session::{Fault, Request, Session};
use crate::transport::Outbound;
use crate::trouble;

/// A task that is over: an attempt with its ticket, or a refusal that was sent.
pub(super) type Joined = Result<(tokio::task::Id, Option<Ticket>), JoinError>;

/// What the main task knows of an attempt that is not over.
#[derive(Debug)]
struct Running {
    link: LinkId,
    run_id: String,
    adapter: Arc<str>,
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

/// What of a request its answer needs.
struct Asked {
    ticket: Ticket,
    family: Family,
    run_id: String,
    target: String,
    received: Now,
}

/// A request that may run as soon as its gate lets it.
struct Admitted {
    timeouts: Timeouts,
    instance: Arc<Instance>,
    work: Work,
    slot: Slot,
}

/// A stall's terminal names the run twice and the target too, and has to fit one envelope.
const fn is_long(name: &str) -> bool {
    name.len() > NAME_BYTES_MAX as usize
}

/// All attempts, their ids and their slots.
#[derive(Debug)]
pub(super) struct Attempts {
    clock: Clock,
    patience: Patience,
    /// Of this process; what makes an attempt's id more than a count.
    nonce: u64,
    /// `None`: the credential plane is off.
    pub(super) credentials: Option<Arc<Plane>>,
    observer: Observer,
    gates: Gates,
    runs: Runs,
    running: HashMap<Ticket, Running>,
    /// Attempts, and refusals (no ticket) that wait for room in a writer queue.
    pub(super) tasks: JoinSet<Option<Ticket>>,
    /// Of `tasks`: messages that wait for room.
    waiting: u32,
    reports_in: mpsc::UnboundedSender<Report>,
    /// At most two per attempt.
    pub(super) reports: mpsc::UnboundedReceiver<Report>,
    /// New work is answered with `draining`. `[D-07]`
    pub(super) refusing: bool,
    /// Requests under the id of an open stream; dropped. `[D-52]`
    duplicates: u64,
}

impl Attempts {
    pub(super) fn new(clock: Clock, patience: Patience, nonce: u64) -> Self {
        let (reports_in, reports) = mpsc::unbounded_channel();
        Self {
            clock,
            patience,
            nonce,
            credentials: None,
            observer: Observer::log(),
            gates: Gates::default(),
            runs: Runs::default(),
            running: HashMap::new(),
            tasks: JoinSet::new(),
            waiting: 0,
            reports_in,
            reports,
            refusing: false,
            duplicates: 0,
        }
    }

    /// Attempts without a terminal.
    pub(super) const fn open(&self) -> u32 {
        self.runs.open()
    }

    /// Puts capacities in force; gates that are held outlive it. `[R-295]`
    pub(super) fn configure<'a>(&mut self, capacities: impl IntoIterator<Item = (&'a str, u32)>) {
        self.gates.configure(capacities);
        self.grants();
    }

    /// Every attempt of the link ends without a word; those of other links notice nothing. `[R-199]`
    pub(super) fn end_link(&mut self, link: LinkId) {
        let tickets: Vec<_> = self.runs.of_link(link).collect();
        for running in tickets.iter().filter_map(|ticket| self.running.get(ticket)) {
            running.signals.send_modify(|signals| signals.ended = true);
            self.runs.settled(link, &running.run_id);
        }
    }

    pub(super) fn cancel(&self, link: LinkId, run_id: &str) {
        if let Some(running) = self.find(link, run_id) {
            let signals = &running.signals;
            signals.send_modify(|signals| signals.cancelled = true);
        }
    }

    /// The Edge takes `bytes` of the run's body, in total; what it took before it still takes.
    pub(super) fn grant(&self, link: LinkId, run_id: &str, bytes: u64) {
        if let Some(running) = self.find(link, run_id) {
            let signals = &running.signals;
            signals.send_modify(|signals| signals.window = signals.window.max(Some(bytes)));
        }
    }

    fn find(&self, link: LinkId, run_id: &str) -> Option<&Running> {
        let ticket = self.runs.find(link, run_id)?;
        self.running.get(&ticket)
    }

    /// Starts an attempt or refuses it with one terminal.
    ///
    /// # Errors
    /// Too many refusals wait for room: the session is being flooded.
    pub(super) fn execute(
        &mut self,
        session: &Session,
        adapters: &Adapters,
        request: Request,
    ) -> Result<(), Fault> {
        let Some(bulk) = session.bulk() else {
            return Ok(()); // being closed
        };
        let (link, received) = (session.link, self.clock.now());
        let (family, run_id) = (request.family(), request.run_id().to_owned());
        if run_id.is_empty() {
            return self.reject(bulk, family, run_id, &Rejection::RunIdMissing.into());
        }
        if is_long(&run_id) {
            return self.reject(bulk, family, run_id, &Rejection::NameTooLong.into());
        }
        // Checks come in this order: a taken id may never be answered with a terminal.
        let ticket = match self.runs.take(link, &run_id) {
            Ok(ticket) => ticket,
            Err(Refusal::Open) => {
                self.duplicates += 1;
                let count = self.duplicates;
                debug!(count, "request under an open run id dropped");
                return Ok(());
            }
            Err(Refusal::Retained) => {
                return self.reject(bulk, family, run_id, &Rejection::RunRetained.into());
            }
            Err(Refusal::Full) => {
                return self.reject(bulk, family, run_id, &Rejection::AttemptsFull.into());
            }
        };
        if self.refusing {
            self.runs.remove(link, &run_id);
            let draining = refusal(family, run_id, Failure::Draining, None);
            return self.say(bulk, Outbound::one_way(draining));
        }
        let target = request.target().to_owned();
        let admitted = match self.admit(adapters, ticket, request) {
            Ok(admitted) => admitted,
            Err(denied) => {
                self.runs.remove(link, &run_id);
                return self.reject(bulk, family, run_id, &denied);
            }
        };
        let asked = Asked {
            ticket,
            family,
            run_id,
            target,
            received,
        };
        self.start(session, bulk.clone(), asked, admitted);
        Ok(())
    }

    fn start(
        &mut self,
        session: &Session,
        bulk: mpsc::Sender<Outbound>,
        asked: Asked,
        admitted: Admitted,
    ) {
        let granted = admitted.slot == Slot::Held;
        let (signals, heard) = watch::channel(Signals {
            granted,
            ..Signals::default()
        });
        let adapter = admitted.instance.name();
        let ticket = asked.ticket;
        let identity = Identity {
            family: asked.family,
            run_id: asked.run_id.clone(),
            attempt_id: format!("{:016x}-{}", self.nonce, ticket.get()),
            adapter: adapter.as_ref().to_owned(),
            target: asked.target,
        };
        let job = Job {
            ticket,
            identity,
            received: asked.received,
            timeouts: admitted.timeouts,
            patience: self.patience,
            instance: admitted.instance,
            work: admitted.work,
            clock: self.clock,
            signals: heard,
            bulk,
            numbers: Some(session.numbers.clone()),
            observer: self.observer.clone(),
            reports: self.reports_in.clone(),
        };
        let task = self
            .tasks
            .spawn(async move { Some(execution::run(job).await) });
        let running = Running {
            link: session.link,
            run_id: asked.run_id,
            adapter,
            slot: admitted.slot,
            signals,
            task: task.id(),
        };
        self.running.insert(ticket, running);
    }

    fn admit(
        &mut self,
        adapters: &Adapters,
        ticket: Ticket,
        request: Request,
    ) -> Result<Admitted, Denied> {
        if is_long(request.target()) {
            return Err(Rejection::NameTooLong.into());
        }
        let timeouts = request.boundary(self.credentials.is_some())?;
        let instance = adapters.get(request.adapter()).cloned();
        let instance = instance.ok_or(Rejection::AdapterUnknown)?;
        let work = match request {
            Request::Tunnel(mut request) => {
                let credential = core::mem::take(&mut request.credential);
                let plane = self.credentials.as_ref();
                let sealed = plane.and_then(|plane| Sealed::of(plane, credential, &request.target));
                let mut work = instance.resolve_tunnel(*request)?;
                work.seal(sealed);
                work
            }
            Request::Run(request) => instance.resolve_run(*request)?,
        };
        let slot = match self.gates.enter(&instance.name(), ticket) {
            Entry::Granted => Slot::Held,
            Entry::Waits => Slot::Waits,
            Entry::Full => return Err(Rejection::WaitingFull.into()),
            Entry::Unknown => return Err(Rejection::AdapterUnknown.into()),
        };
        Ok(Admitted {
            timeouts,
            instance,
            work,
            slot,
        })
    }

    fn reject(
        &mut self,
        bulk: &mpsc::Sender<Outbound>,
        family: Family,
        run_id: String,
        denied: &Denied,
    ) -> Result<(), Fault> {
        trouble::tell("", denied.kind());
        let detail = denied.to_string();
        let message = refusal(family, run_id, Failure::Rejected, Some(&detail));
        self.say(bulk, Outbound::one_way(message))
    }

    /// One message of the main task, which does not wait for room: when there is none, a small task
    /// does, up to a bound, and later messages stay behind it.
    ///
    /// # Errors
    /// Too many wait already.
    pub(super) fn say(
        &mut self,
        bulk: &mpsc::Sender<Outbound>,
        message: Outbound,
    ) -> Result<(), Fault> {
        let message = if self.waiting > 0 {
            message
        } else {
            match bulk.try_send(message) {
                Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => return Ok(()),
                Err(mpsc::error::TrySendError::Full(message)) => message,
            }
        };
        if self.waiting >= ATTEMPTS_MAX {
            return Err(Fault::Flood);
        }
        self.waiting += 1;
        let bulk = bulk.clone();
        self.tasks.spawn(async move {
            // Closed: the session is over, and nobody is to be told.
            let _ = bulk.send(message).await;
            None
        });
        Ok(())
    }

    /// Adapters that only calls of an earlier configuration still use.
    pub(super) fn draining(&self) -> impl Iterator<Item = &str> {
        self.gates.draining()
    }

    pub(super) fn report(&mut self, report: Report) {
        match report {
            Report::SlotFree(ticket) => self.free_slot(ticket),
            Report::Settled(ticket) => {
                if let Some(running) = self.running.get(&ticket) {
                    self.runs.settled(running.link, &running.run_id);
                }
            }
        }
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
            let signals = &running.signals;
            signals.send_modify(|signals| signals.granted = true);
        }
    }

    /// A task ended.
    ///
    /// # Errors
    /// It panicked: a bug of ours, whose lease only the session's end returns.
    pub(super) fn joined(&mut self, joined: Joined) -> Result<(), Fault> {
        match joined {
            Ok((_, Some(ticket))) => self.forget(ticket),
            Ok((_, None)) => self.waiting -= 1,
            Err(panicked) => {
                error!("an attempt's task panicked");
                let mut running = self.running.iter();
                let ticket = running.find(|(_, running)| running.task == panicked.id());
                if let Some(ticket) = ticket.map(|(&ticket, _)| ticket) {
                    self.forget(ticket);
                }
                return Err(Fault::Attempt);
            }
        }
        Ok(())
    }

    fn forget(&mut self, ticket: Ticket) {
        self.free_slot(ticket);
        if let Some(running) = self.running.remove(&ticket) {
            self.runs.remove(running.link, &running.run_id);
        }
    }
}
