//! Drives one tunnel attempt: its machine, its provider call, its frames.
//!
//! Lives on: one task per attempt. View: one attempt. Bound: one item pending; frames of at most
//! `BODY_FRAME_BYTES`, each enqueued only when the session's queue has room for it.
//!
//! Whatever it waits for (slot, provider, room in the queue), it wakes at once for a cancel, the
//! session's end or its deadline. `[P-04]`
use core::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use iop_control::node::Ticket;
use iop_control::node::attempt::{
    Attempt, Failure, Order, Output, Signals, Terminal, Timeouts, Verdict,
};
use iop_proto::domain::{FrameKind, Message, TunnelFrame};
use iop_proto::ids::Now;
use iop_proto::legacy::ERROR_BYTES_MAX;
use iop_proto::limits::BODY_FRAME_BYTES;
use tokio::sync::{mpsc, watch};

use crate::adapters::{Instance, StopBy};
use crate::clock::Clock;
use crate::provider::{HttpCall, Item, ProviderError, ProviderRequest};
use crate::transport::Outbound;

/// What an attempt tells the main task. At most one of each kind per attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It left its gate, slot or queue.
    SlotFree(Ticket),
    /// Nothing more of it will be sent.
    Settled(Ticket),
}

/// Everything one attempt needs.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ticket: Ticket,
    pub(crate) run_id: String,
    /// The hard deadline counts from here. `[A-53]`
    pub(crate) received: Now,
    pub(crate) timeouts: Timeouts,
    pub(crate) instance: Arc<Instance>,
    pub(crate) request: ProviderRequest,
    pub(crate) clock: Clock,
    pub(crate) signals: watch::Receiver<Signals>,
    /// The session's bulk queue.
    pub(crate) bulk: mpsc::Sender<Outbound>,
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

/// Runs the attempt until its slot, its call and its terminal are done with.
pub(crate) async fn run(job: Job) -> Ticket {
    let ticket = job.ticket;
    let attempt = Attempt::new(job.received, job.timeouts);
    let mut driver = Driver {
        attempt,
        ticket,
        run_id: job.run_id,
        instance: job.instance,
        request: Some(job.request),
        clock: job.clock,
        signals: job.signals,
        bulk: Some(job.bulk),
        reports: job.reports,
        call: None,
        pending: None,
        detail: None,
    };
    driver.run().await;
    ticket
}

struct Driver {
    attempt: Attempt,
    ticket: Ticket,
    run_id: String,
    instance: Arc<Instance>,
    request: Option<ProviderRequest>,
    clock: Clock,
    signals: watch::Receiver<Signals>,
    /// Given up as soon as nothing more is to be sent.
    bulk: Option<mpsc::Sender<Outbound>>,
    reports: mpsc::UnboundedSender<Report>,
    call: Option<HttpCall>,
    /// Received from the provider, not enqueued yet.
    pending: Option<Item>,
    detail: Option<&'static str>,
}

enum Woken {
    /// Signals or the clock changed.
    Look,
    Item(Result<Option<Item>, ProviderError>),
    /// The queue has room for one frame.
    Room(mpsc::OwnedPermit<Outbound>),
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
            match self.wait().await {
                Woken::Look => {}
                Woken::Item(Ok(Some(item))) if self.attempt.is_undecided() => {
                    self.pending = Some(item);
                }
                Woken::Item(Ok(Some(_))) => {} // drained: nobody wants it any more
                Woken::Item(Ok(None)) => self.returned(Ok(()), &mut orders),
                Woken::Item(Err(error)) => self.failed(error, &mut orders),
                Woken::Room(permit) => self.forward(permit),
                Woken::NoWriter => self.bulk = None,
                Woken::Orphaned => return,
            }
            self.obey(&mut orders).await;
            if self.attempt.is_over() {
                return;
            }
        }
    }

    async fn wait(&mut self) -> Woken {
        let deadline = self.attempt.deadline().map(|at| self.clock.instant(at));
        let has_pending = self.pending.is_some();
        let room = self.bulk.clone().filter(|_| has_pending);
        let call = self.call.as_mut().filter(|_| !has_pending);
        tokio::select! {
            biased;
            changed = self.signals.changed() => {
                changed.map_or(Woken::Orphaned, |()| Woken::Look)
            }
            () = sleep_until(deadline) => Woken::Look,
            permit = reserve(room) => permit,
            item = next(call) => Woken::Item(item),
        }
    }

    /// Carries orders out, also those that come of carrying out.
    async fn obey(&mut self, orders: &mut Vec<Order>) {
        let mut next = 0;
        while let Some(&order) = orders.get(next) {
            next += 1;
            match order {
                Order::Call => {
                    let request = self.request.take().expect("one call per attempt");
                    self.call = Some(self.instance.call(request));
                }
                Order::Stop => match self.instance.stop_by {
                    StopBy::Abort => self.returned(Ok(()), orders),
                    StopBy::Drain => {
                        self.pending = None;
                        if let Some(call) = &self.call {
                            call.no_retry();
                        }
                    }
                },
                Order::FreeSlot => self.report(Report::SlotFree(self.ticket)),
                Order::Finish { sequence, terminal } => self.finish(sequence, terminal).await,
            }
        }
        orders.clear();
        if self.signals.borrow().ended {
            self.settled();
        }
    }

    /// The call is gone; its connection is closed if it was not at its end.
    fn returned(&mut self, result: Result<(), Failure>, orders: &mut Vec<Order>) {
        self.call = None;
        self.pending = None;
        self.attempt.returned(result, orders);
    }

    fn failed(&mut self, error: ProviderError, orders: &mut Vec<Order>) {
        if self.attempt.is_undecided() {
            self.detail = Some(error.detail());
        }
        let failure = match error {
            ProviderError::Fault => Failure::Rejected,
            _ => Failure::Provider,
        };
        self.returned(Err(failure), orders);
    }

    /// Enqueues the pending item, or one frame of it.
    fn forward(&mut self, permit: mpsc::OwnedPermit<Outbound>) {
        let Some(item) = self.pending.take() else {
            return;
        };
        let output = match item {
            Item::Head { .. } => Output::Head,
            Item::Body(_) => Output::Body,
        };
        let Verdict::Forward { sequence } = self.attempt.output(output) else {
            return;
        };
        let mut frame = TunnelFrame::new(self.run_id.clone(), FrameKind::Body, sequence);
        match item {
            Item::Head { status, headers } => {
                frame.kind = FrameKind::ResponseStart;
                frame.status_code = status;
                frame.headers = headers;
            }
            Item::Body(mut chunk) => {
                frame.body = chunk.split_to(chunk.len().min(BODY_FRAME_BYTES as usize));
                if !chunk.is_empty() {
                    self.pending = Some(Item::Body(chunk));
                }
            }
        }
        permit.send(Outbound::one_way(Message::TunnelFrame(frame)));
    }

    async fn finish(&mut self, sequence: u64, terminal: Terminal) {
        let frame = terminal_frame(self.run_id.clone(), sequence, terminal, self.detail);
        if let Some(bulk) = self.bulk.clone() {
            let mut signals = self.signals.clone();
            tokio::select! {
                biased;
                permit = bulk.reserve_owned() => if let Ok(permit) = permit {
                    permit.send(Outbound::one_way(Message::TunnelFrame(frame)));
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

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => core::future::pending().await,
    }
}

async fn reserve(queue: Option<mpsc::Sender<Outbound>>) -> Woken {
    match queue {
        Some(queue) => queue
            .reserve_owned()
            .await
            .map_or(Woken::NoWriter, Woken::Room),
        None => core::future::pending().await,
    }
}

/// A panic in the adapter is this attempt's failure and nobody else's. `[D-47]`
async fn next(call: Option<&mut HttpCall>) -> Result<Option<Item>, ProviderError> {
    match call {
        Some(call) => {
            let next = AssertUnwindSafe(call.next()).catch_unwind().await;
            next.unwrap_or(Err(ProviderError::Fault))
        }
        None => core::future::pending().await,
    }
}

/// The one last frame of a tunnel. `[R-109]`
pub(crate) fn terminal_frame(
    run_id: String,
    sequence: u64,
    terminal: Terminal,
    detail: Option<&'static str>,
) -> TunnelFrame {
    let mut frame = TunnelFrame::new(run_id, FrameKind::End, sequence);
    if let Terminal::Error(failure) = terminal {
        frame.kind = FrameKind::Error;
        frame.error = error_text(failure, detail);
    }
    frame
}

/// Prefix of the table and, where there is one, a detail.
pub(crate) fn error_text(failure: Failure, detail: Option<&'static str>) -> String {
    let mut text = failure.prefix().to_owned();
    if let Some(detail) = detail {
        text.push_str(": ");
        text.push_str(detail);
    }
    text.truncate(ERROR_BYTES_MAX);
    text
}

#[cfg(test)]
mod tests {
    use iop_proto::legacy;

    use super::*;

    /// Proves [D-47].
    #[tokio::test]
    async fn d47_a_panic_in_an_adapter_is_a_failure_of_its_call() {
        let mut call = HttpCall::panicking();
        let error = next(Some(&mut call)).await.unwrap_err();
        assert_eq!(error, ProviderError::Fault);
        let text = error_text(Failure::Rejected, Some(error.detail()));
        assert_eq!(text, "node rejected: internal error in the adapter");
    }

    #[test]
    fn a_legacy_error_is_a_prefix_of_the_table_and_an_optional_detail() {
        for failure in [
            Failure::Provider,
            Failure::Rejected,
            Failure::Cancelled,
            Failure::Deadline,
            Failure::Draining,
        ] {
            let bare = error_text(failure, None);
            assert_eq!(bare, failure.prefix());
            let detailed = error_text(failure, Some("why"));
            assert_eq!(detailed, format!("{bare}: why"));
            assert_eq!(
                legacy::reason(detailed.as_bytes()),
                legacy::reason(bare.as_bytes())
            );
        }
    }
}
