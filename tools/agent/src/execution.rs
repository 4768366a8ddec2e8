//! Drives one attempt, run or tunnel: its machine, its provider call, its probe, its answer.
//!
//! Lives on: one task per attempt. View: one attempt. Bound: one piece pending; messages of at most
//! `BODY_FRAME_BYTES`, each enqueued only when the session's queue has room for it.
//!
//! Whatever it waits for (slot, provider, the run's window, room in the queue, probe), it wakes at once
//! for a cancel, the session's end or its deadline. `[P-04]`
use core::future::Future;
use core::num::NonZeroU64;
use core::panic::AssertUnwindSafe;
use core::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use iop_control::node::attempt::{
    Attempt, Failure, Order, Patience, Signals, Terminal, Timeouts, Verdict,
};
use iop_control::node::{Observations, Ticket};
use iop_proto::domain::HealthEvidence;
use iop_proto::ids::Now;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Sleep};

use crate::adapters::{Call, CallError, Instance, StopBy, Work};
use crate::answer::{Completion, Identity, Part, Piece};
use crate::clock::Clock;
use crate::observer::{Observed, Observer};
use crate::provider::ProviderError;
use crate::transport::Outbound;
use crate::trouble;

/// What an attempt tells the main task. At most one of each kind per attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It left its gate, slot or queue.
    SlotFree(Ticket),
    /// Nothing more of it will be sent.
    Settled(Ticket),
}

/// The numbers of one session's health observations, for everything that runs in it. `[I5.8]`
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers(Arc<Mutex<Observations>>);

impl Numbers {
    /// The next one; taken in the step that decides the evidence.
    pub(crate) fn draw(&self) -> NonZeroU64 {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.draw()
    }
}

/// Everything one attempt needs.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ticket: Ticket,
    pub(crate) identity: Identity,
    /// The hard deadline counts from here. `[A-53]`
    pub(crate) received: Now,
    pub(crate) timeouts: Timeouts,
    pub(crate) patience: Patience,
    pub(crate) instance: Arc<Instance>,
    pub(crate) work: Work,
    pub(crate) clock: Clock,
    pub(crate) signals: watch::Receiver<Signals>,
    /// The session's bulk queue.
    pub(crate) bulk: mpsc::Sender<Outbound>,
    /// `None` outside a session. `[R-150]`
    pub(crate) numbers: Option<Numbers>,
    pub(crate) observer: Observer,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

/// Runs the attempt until its slot, its call and its terminal are done with.
pub(crate) async fn run(job: Job) -> Ticket {
    let ticket = job.ticket;
    let attempt = Attempt::new(job.received, job.timeouts, job.patience);
    let mut driver = Driver {
        attempt,
        ticket,
        identity: job.identity,
        instance: job.instance,
        work: Some(job.work),
        clock: job.clock,
        signals: job.signals,
        bulk: Some(job.bulk),
        numbers: job.numbers,
        observer: job.observer,
        reports: job.reports,
        alarm: Alarm::new(),
        call: None,
        probe: None,
        pending: None,
        sent: 0,
        detail: None,
        completion: None,
    };
    driver.run().await;
    ticket
}

type Probe = Pin<Box<dyn Future<Output = HealthEvidence> + Send>>;

struct Driver {
    attempt: Attempt,
    ticket: Ticket,
    identity: Identity,
    instance: Arc<Instance>,
    work: Option<Work>,
    clock: Clock,
    signals: watch::Receiver<Signals>,
    /// Given up as soon as nothing more is to be sent.
    bulk: Option<mpsc::Sender<Outbound>>,
    numbers: Option<Numbers>,
    observer: Observer,
    reports: mpsc::UnboundedSender<Report>,
    alarm: Alarm,
    call: Option<Call>,
    /// Independent of the call, its slot and its signals. `[R-124]`
    probe: Option<Probe>,
    /// Received from the provider, not enqueued yet.
    pending: Option<Part>,
    /// Bytes of a tunnel's body that were enqueued.
    sent: u64,
    detail: Option<String>,
    completion: Option<Completion>,
}

enum Woken {
    /// Signals changed.
    Look,
    /// The alarm has rung. What has come by now comes first. `[A-17]`
    Rang,
    Piece(Result<Option<Piece>, CallError>),
    Probed(HealthEvidence),
    /// The queue has room for one message, and the Edge for so many bytes of a tunnel's body.
    Room(mpsc::OwnedPermit<Outbound>, u64),
    /// The session's writer is gone; its end will be signalled.
    NoWriter,
    /// The main task is gone, and with it everybody who could be told.
    Orphaned,
}

impl Driver {
    async fn run(&mut self) {
        let mut orders = Vec::with_capacity(4);
        loop {
            let signals = *self.signals.borrow_and_update();
            self.attempt.wake(self.clock.now(), signals, &mut orders);
            self.obey(&mut orders).await;
            if self.attempt.is_over() {
                return;
            }
            let woken = match self.room() {
                Some(room) => room,
                None => self.wait().await,
            };
            match woken {
                Woken::Look => {}
                Woken::Rang => {
                    let wants = self.pending.is_none() && self.attempt.is_undecided();
                    let call = self.call.as_mut().filter(|_| wants);
                    if let Some(piece) = call.and_then(Call::gathered) {
                        self.take(piece);
                    }
                }
                Woken::Piece(Ok(Some(piece))) if self.attempt.is_undecided() => self.take(piece),
                Woken::Piece(Ok(Some(_))) => {} // drained: nobody wants it any more
                Woken::Piece(Ok(None)) => self.returned(Ok(()), &mut orders),
                Woken::Piece(Err(error)) => self.failed(error, &mut orders),
                Woken::Probed(health) => self.probed(health, &mut orders),
                Woken::Room(permit, allowed) => self.forward(permit, allowed),
                Woken::NoWriter => self.bulk = None,
                Woken::Orphaned => return,
            }
            self.obey(&mut orders).await;
            if self.attempt.is_over() {
                return;
            }
        }
    }

    /// Who would take the pending part, and how much of it; `None`: nobody, or there is none.
    fn taker(&self) -> Option<(mpsc::Sender<Outbound>, u64)> {
        let allowed = self.allowed();
        let goes = |part: &Part| allowed > 0 || part.body_bytes() == 0;
        let bulk = self.bulk.as_ref()?;
        let goes_now = self.pending.as_ref().is_some_and(goes);
        goes_now.then(|| (bulk.clone(), allowed))
    }

    /// Room that is there needs no wait. Whoever waits for it is before us: then there is none.
    fn room(&self) -> Option<Woken> {
        let (bulk, allowed) = self.taker()?;
        let permit = bulk.try_reserve_owned().ok()?;
        Some(Woken::Room(permit, allowed))
    }

    async fn wait(&mut self) -> Woken {
        self.alarm.set(self.attempt.deadline(), self.clock);
        let room = self.taker();
        let is_busy = self
            .bulk
            .as_ref()
            .is_some_and(|bulk| bulk.capacity() < bulk.max_capacity());
        let call = self.call.as_mut().filter(|_| self.pending.is_none());
        tokio::select! {
            biased;
            changed = self.signals.changed() => {
                changed.map_or(Woken::Orphaned, |()| Woken::Look)
            }
            health = finish(self.probe.as_mut()) => Woken::Probed(health),
            woken = reserve(room) => woken,
            piece = next(call, is_busy) => Woken::Piece(piece),
            () = self.alarm.ring() => Woken::Rang,
        }
    }

    /// Carries orders out, also those that come of carrying out.
    async fn obey(&mut self, orders: &mut Vec<Order>) {
        let mut next = 0;
        while let Some(&order) = orders.get(next) {
            next += 1;
            match order {
                Order::Call => self.begin(orders),
                Order::Stop if self.call.is_none() => {} // it never began
                Order::Stop => match self.instance.stop_by {
                    StopBy::Abort => self.returned(Ok(()), orders),
                    StopBy::Drain => {
                        self.pending = None;
                        if let Some(call) = &mut self.call {
                            call.no_retry();
                        }
                    }
                },
                Order::Probe => {
                    let target = self.identity.target.clone();
                    self.probe = Some(Box::pin(probe(self.instance.clone(), target)));
                }
                Order::ProbeOver => self.probed(HealthEvidence::Unknown, orders),
                Order::Observe(stall) => {
                    let adapter = self.instance.name();
                    self.observer.tell(Observed { adapter, stall });
                }
                Order::FreeSlot => self.report(Report::SlotFree(self.ticket)),
                Order::Finish { sequence, terminal } => self.finish(sequence, terminal).await,
            }
        }
        orders.clear();
        if self.signals.borrow().ended {
            self.probe = None;
            self.settled();
        }
    }

    /// Opens the credential, then calls; nothing is waited for in between. What came meanwhile ends
    /// the attempt without a call. `[R-213]` `[S-67]`
    fn begin(&mut self, orders: &mut Vec<Order>) {
        let mut work = self.work.take().expect("one call per attempt");
        if work.is_managed() {
            if let Err(error) = work.open(&self.instance, self.clock.now()) {
                trouble::tell(&self.instance.name(), error.detail());
                self.detail = Some(error.detail().to_owned());
                return self.returned(Err(Failure::Rejected), orders);
            }
            let signals = *self.signals.borrow();
            self.attempt.wake(self.clock.now(), signals, orders);
            if !self.attempt.is_undecided() {
                drop(work);
                return self.returned(Ok(()), orders);
            }
        }
        self.call = Some(self.instance.call(work));
    }

    /// The call is gone; its connection is closed if it was not at its end.
    fn returned(&mut self, result: Result<(), Failure>, orders: &mut Vec<Order>) {
        self.call = None;
        self.pending = None;
        self.attempt.returned(self.clock.now(), result, orders);
    }

    fn failed(&mut self, error: CallError, orders: &mut Vec<Order>) {
        if self.attempt.is_undecided() {
            trouble::tell(&self.instance.name(), &error.kind());
            self.detail = Some(error.to_string());
        }
        let failure = match error {
            CallError::Http(ProviderError::Fault) => Failure::Rejected,
            _ => Failure::Provider,
        };
        self.returned(Err(failure), orders);
    }

    fn probed(&mut self, health: HealthEvidence, orders: &mut Vec<Order>) {
        self.probe = None;
        let numbers = self.numbers.as_ref();
        let draw = || numbers.map(Numbers::draw);
        self.attempt.probed(health, draw, orders);
    }

    fn take(&mut self, piece: Piece) {
        match piece {
            Piece::Part(part) => {
                self.attempt.received();
                self.pending = Some(part);
            }
            Piece::Progress => self.attempt.progressed(self.clock.now()),
            Piece::Completion(completion) => {
                self.attempt.progressed(self.clock.now());
                self.completion = Some(completion);
            }
        }
    }

    /// Bytes of a tunnel's body that the Edge takes now; only its window says less than all.
    fn allowed(&self) -> u64 {
        let window = self.signals.borrow().window;
        window.map_or(u64::MAX, |window| window.saturating_sub(self.sent))
    }

    /// Enqueues the pending part, or one message of it.
    fn forward(&mut self, permit: mpsc::OwnedPermit<Outbound>, allowed: u64) {
        let Some(part) = self.pending.take() else {
            return;
        };
        let (part, rest) = part.cut(allowed);
        let verdict = self
            .attempt
            .output(self.clock.now(), part.output(), rest.is_some());
        let Verdict::Forward { sequence } = verdict else {
            return;
        };
        self.pending = rest;
        self.sent += part.body_bytes();
        let message = part.message(self.identity.run_id.clone(), sequence);
        permit.send(Outbound::one_way(message));
    }

    async fn finish(&mut self, sequence: u64, terminal: Terminal) {
        let completion = self.completion.take();
        let message =
            self.identity
                .terminal(sequence, terminal, self.detail.as_deref(), completion);
        if let Some(bulk) = self.bulk.clone() {
            let mut signals = self.signals.clone();
            tokio::select! {
                biased;
                permit = bulk.reserve_owned() => if let Ok(permit) = permit {
                    permit.send(Outbound::one_way(message));
                },
                _ = signals.wait_for(|signals| signals.ended) => {}
            }
        }
        self.settled();
    }

    fn settled(&mut self) {
        if self.bulk.take().is_some() {
            self.report(Report::Settled(self.ticket));
        }
    }

    fn report(&self, report: Report) {
        // Without a main task the process is over.
        let _ = self.reports.send(report);
    }
}

/// The one timer of an attempt. It is set again for an earlier deadline only: every piece moves the
/// watchdog, and a ring too early now and then costs less than a timer per piece.
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    rings: Option<Now>,
}

impl Alarm {
    fn new() -> Self {
        Self {
            sleep: Box::pin(tokio::time::sleep_until(Instant::now())),
            rings: None,
        }
    }

    fn set(&mut self, deadline: Option<Now>, clock: Clock) {
        let earlier = |deadline| self.rings.is_none_or(|rings| deadline < rings);
        if let Some(deadline) = deadline.filter(|&deadline| earlier(deadline)) {
            self.sleep.as_mut().reset(clock.instant(deadline));
            self.rings = Some(deadline);
        }
    }

    /// At the deadline or before it, never later than the runtime lets it; what has arrived by then
    /// comes first: this process being late is no silence of the provider. Cancel-safe. `[A-17]`
    async fn ring(&mut self) {
        if self.rings.is_none() {
            core::future::pending::<()>().await;
        }
        self.sleep.as_mut().await;
        for _ in 0..LATE_TURNS {
            tokio::task::yield_now().await;
        }
        self.rings = None;
    }
}

/// Turns of the runtime for bytes in a socket to become a piece: its driver, the connection's task.
const LATE_TURNS: u32 = 2;

async fn reserve(taker: Option<(mpsc::Sender<Outbound>, u64)>) -> Woken {
    match taker {
        Some((queue, allowed)) => match queue.reserve_owned().await {
            Ok(permit) => Woken::Room(permit, allowed),
            Err(_) => Woken::NoWriter,
        },
        None => core::future::pending().await,
    }
}

/// A panic in the adapter is this attempt's failure and nobody else's. `[D-47]`
async fn next(call: Option<&mut Call>, is_busy: bool) -> Result<Option<Piece>, CallError> {
    match call {
        Some(call) => {
            let next = AssertUnwindSafe(call.next(is_busy)).catch_unwind().await;
            next.unwrap_or(Err(ProviderError::Fault.into()))
        }
        None => core::future::pending().await,
    }
}

async fn finish(probe: Option<&mut Probe>) -> HealthEvidence {
    match probe {
        Some(probe) => probe.await,
        None => core::future::pending().await,
    }
}

/// One probe of the exact target; a panic in it says nothing. `[D-47]` `[A-20]`
pub(crate) async fn probe(instance: Arc<Instance>, target: String) -> HealthEvidence {
    let probe = AssertUnwindSafe(instance.probe(&target)).catch_unwind();
    probe.await.unwrap_or(HealthEvidence::Unknown)
}

#[cfg(test)]
#[path = "execution_tests.rs"]
pub(crate) mod tests;
