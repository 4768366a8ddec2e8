//! Run slots: allocated and freed by control, lived in here. `[D-32]`
//!
//! Lives on: one shard, that of the node's session. Bound: `RUNS_PER_SHARD_MAX` slots; a slot gets
//! exactly one final report (`NotSent`, `Terminal`, `Stalled`, `Lost`) and is free from then on.
use core::ops::Range;
use std::sync::Arc;

use iop_control::names::ProviderName;
use iop_control::step::{Eligibility, Ending, Event, Evidence};
use iop_proto::catalog::Operation;
use iop_proto::ids::{BootNonce, ClientRef, Now, RunId, RunRef, ShardIndex, SlotGeneration};
use iop_proto::reason::Reason;

use super::body::Request;
use super::window::Window;
use super::{Shard, slot_of};
use crate::credential::plane::Pair;
use crate::metrics::ShardMetric;

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// How far a run's request has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    /// Its credential was asked for; can be withdrawn.
    Issuing,
    /// In the session's bulk queue; can be withdrawn.
    Queued,
    /// Its first byte was handed to the kernel. `[states §3]`
    Begun,
}

/// One run.
#[derive(Debug)]
pub(super) struct Run {
    pub stage: Stage,
    pub id: RunId,
    pub reference: RunRef,
    /// Slot and tenant of the session it runs on.
    pub session: (u32, u32),
    /// Slot and tenant of the client that waits; `NONE` once it is settled.
    pub client: (u32, u32),
    /// The provider as it was configured when the lease was taken; `None` in a free slot. `[I3.5]`
    pub lease: Option<Arc<ProviderName>>,
    /// The provider is reached by a raw tunnel, else by a normalized run. `[A-62]` `[I3.4]`
    pub is_tunnel: bool,
    pub operation: Operation,
    /// The request's body and where its `model` stands, until it was sent; and what it asks for.
    pub request: Request,
    /// Until it was sent. `[R-221]`
    pub credential: Option<Pair>,
    /// The issuer was asked: the request is never queued again. `[I3.10]`
    pub asked: bool,
    /// Sequence the next frame must have; `None` before the first, which may be 0 or 1. `[A-29]`
    pub sequence: Option<u64>,
    /// RESPONSE_START came, or the start of a normalized run.
    pub head_seen: bool,
    /// CancelRequest was sent: at most once. `[R-246]`
    pub cancelled: bool,
    /// Control was told that its terminal is overdue.
    pub overdue_told: bool,
    /// How far the node may be ahead of the client.
    pub window: Window,
    /// The next frame must come until then: from when the request has begun, and how long after a
    /// frame or a CancelRequest. `[D-29]`
    pub deadline: Now,
    pub response_wait_ms: u64,
    /// Place in the session's bulk queue, and neighbours there.
    pub ticket: u64,
    pub before: u32,
    pub behind: u32,
    /// A tenant that control ended before it arrived. `[D-32]`
    pub dead: Option<RunRef>,
}

impl Run {
    pub(super) fn free(shard: ShardIndex) -> Self {
        let reference = RunRef {
            shard,
            slot: 0,
            generation: SlotGeneration::FIRST,
        };
        Self {
            stage: Stage::Free,
            id: RunId::new(BootNonce(0), reference),
            reference,
            session: (NONE, 0),
            client: (NONE, 0),
            lease: None,
            is_tunnel: true,
            operation: Operation::ChatCompletions,
            request: Request::default(),
            credential: None,
            asked: false,
            sequence: None,
            head_seen: false,
            cancelled: false,
            overdue_told: false,
            window: Window::default(),
            deadline: Now::default(),
            response_wait_ms: 0,
            ticket: 0,
            before: NONE,
            behind: NONE,
            dead: None,
        }
    }

    pub(super) const fn is_live(&self) -> bool {
        !matches!(self.stage, Stage::Free)
    }

    /// The provider as its lease has it, whatever the configuration says now.
    ///
    /// # Panics
    /// For a free slot.
    pub(super) fn lease(&self) -> &ProviderName {
        self.lease
            .as_ref()
            .expect("a run that is not over has a lease")
    }

    pub(super) const fn has_client(&self) -> bool {
        self.client.0 != NONE
    }

    /// What of the client's body does not reach the node.
    pub(super) const fn cut(&self) -> &Range<u64> {
        self.request.cut(self.is_tunnel)
    }
}

impl Shard {
    /// Fills the slot that control allocated.
    ///
    /// # Panics
    /// When control hands out a slot that has not reported its end: a bug, never load.
    pub(super) fn take_run(
        &mut self,
        reference: RunRef,
        session: (u32, u32),
        client: (u32, u32),
        lease: Arc<ProviderName>,
        operation: Operation,
        request: Request,
    ) {
        let response_wait_ms = lease.response_wait_ms;
        let is_tunnel = lease.kind.is_tunnel();
        let row = reference.slot as usize;
        assert!(
            !self.runs[row].is_live(),
            "control granted a run slot that is in use"
        );
        self.runs[row] = Run {
            stage: Stage::Queued,
            id: RunId::new(self.nonce, reference),
            reference,
            session,
            client,
            lease: Some(lease),
            is_tunnel,
            operation,
            request,
            credential: None,
            asked: false,
            sequence: None,
            head_seen: false,
            cancelled: false,
            overdue_told: false,
            window: Window::default(),
            deadline: Now::default(),
            response_wait_ms,
            ticket: 0,
            before: NONE,
            behind: NONE,
            dead: None,
        };
        self.runs_live += 1;
        self.runs_high = self.runs_high.max(row + 1);
    }

    /// The live run that `id` names on session `session`.
    pub(super) fn find_run(&self, session: usize, id: &[u8]) -> Option<usize> {
        let row = RunId::row(id)?;
        let run = self.runs.get(row)?;
        let tenant = (slot_of(session), self.sessions[session].generation);
        // The id's bytes are its shard, row and tenant: equal bytes are the same run.
        let same = run.is_live() && run.id.as_bytes().as_slice() == id && run.session == tenant;
        same.then_some(row)
    }

    pub(super) fn run_of(&self, reference: RunRef) -> Option<usize> {
        let row = reference.slot as usize;
        let run = self.runs.get(row)?;
        (run.is_live() && run.reference == reference).then_some(row)
    }

    /// Ends a run whose request has begun: its final report, its slot.
    pub(super) fn end_run(&mut self, row: usize, ending: Option<Ending>) {
        let run = self.runs[row].reference;
        debug_assert_eq!(self.runs[row].stage, Stage::Begun);
        self.outbox.owe(match ending {
            Some(ending) => Event::Terminal { run, ending },
            None => Event::Lost { run },
        });
        self.free_run(row);
    }

    /// Ends a run whose terminal says that it stalled; `client` waits for control's word on it.
    pub(super) fn end_stalled(
        &mut self,
        row: usize,
        client: Option<ClientRef>,
        evidence: Evidence,
        recovery: Eligibility,
    ) {
        debug_assert_eq!(self.runs[row].stage, Stage::Begun);
        self.outbox.owe(Event::Stalled {
            run: self.runs[row].reference,
            client,
            evidence,
            recovery,
        });
        self.free_run(row);
    }

    /// Ends a run of which nothing was sent. Its client, if it still waits, waits again.
    pub(super) fn return_unsent(&mut self, row: usize) {
        debug_assert!(matches!(
            self.runs[row].stage,
            Stage::Issuing | Stage::Queued
        ));
        let reference = self.runs[row].reference;
        let mut client = None;
        if self.runs[row].has_client() {
            let (slot, generation) = self.runs[row].client;
            let request = self.runs[row].request.take();
            client = self.client_waits_again(slot as usize, generation, request);
        }
        self.outbox.owe(Event::NotSent {
            run: reference,
            client,
        });
        self.free_run(row);
    }

    /// Ends a run of which nothing was sent, for `reason`: its client waits again, or is told so when
    /// the issuer was asked for it.
    pub(super) fn take_back(&mut self, row: usize, reason: Reason) {
        if self.runs[row].stage == Stage::Queued {
            self.unlink_bulk(row);
        }
        if self.runs[row].asked {
            self.refuse_unsent(row, reason);
        } else {
            self.return_unsent(row);
        }
    }

    /// The client of a run has left or was answered: withdraw the request, or cancel it at the node.
    /// `[R-246]` `[D-02]` `[D-63]`
    pub(super) fn detach_run(&mut self, row: usize) {
        self.runs[row].client = (NONE, 0);
        match self.runs[row].stage {
            Stage::Free => {}
            Stage::Issuing | Stage::Queued => {
                self.metrics.inc(ShardMetric::RunsWithdrawn);
                if self.runs[row].stage == Stage::Queued {
                    self.unlink_bulk(row);
                }
                self.return_unsent(row);
            }
            Stage::Begun => {
                self.release_body(row);
                self.cancel_run(row);
            }
        }
    }

    /// Sends CancelRequest, once.
    pub(super) fn cancel_run(&mut self, row: usize) {
        if std::mem::replace(&mut self.runs[row].cancelled, true) {
            return;
        }
        self.runs[row].deadline = self.now.after_ms(self.runs[row].response_wait_ms);
        let (session, generation) = self.runs[row].session;
        let session = session as usize;
        if self.sessions[session].is_open(generation) {
            let id = self.runs[row].id;
            self.queue_cancel(session, id);
        }
    }

    fn free_run(&mut self, row: usize) {
        let request = self.runs[row].request.take();
        self.let_go(request);
        let run = &mut self.runs[row];
        if run.credential.take().is_some() {
            self.metrics.inc(ShardMetric::CredentialsDiscarded);
        }
        run.stage = Stage::Free;
        run.client = (NONE, 0);
        run.lease = None;
        self.runs_live -= 1;
    }

    /// What is due on a run: its node's next frame, unless its client is behind. `[A-64]`
    pub(super) fn run_due(&mut self, row: usize) {
        let run = &self.runs[row];
        if run.stage != Stage::Begun {
            return;
        }
        if !run.has_client() {
            return self.terminal_due(row);
        }
        self.renew_window(run.client.0 as usize);
        if self.waits_for_client(row) {
            let run = &mut self.runs[row];
            run.deadline = self.now.after_ms(run.response_wait_ms);
        } else if self.now >= self.runs[row].deadline {
            self.fail_run(row, Reason::ResponseTimeout);
        }
    }

    /// A node that does not end what it was told to is no reason to take its lease away, but one to
    /// say so, once. `[D-08]`
    fn terminal_due(&mut self, row: usize) {
        let run = &mut self.runs[row];
        if run.cancelled && !run.overdue_told && self.now >= run.deadline {
            run.overdue_told = true;
            let run = run.reference;
            self.metrics.inc(ShardMetric::CancelsOverdue);
            self.outbox.owe(Event::Overdue { run });
        }
    }

    /// Control ends a run: withdrawn if it has not begun, else cancelled; one whose connection has not
    /// arrived yet finds its slot dead. `[D-32]` `[D-63]`
    pub(super) fn cancel_by_control(&mut self, reference: RunRef, reason: Reason) {
        let Some(row) = self.run_of(reference) else {
            self.runs[reference.slot as usize].dead = Some(reference);
            return;
        };
        match self.runs[row].stage {
            Stage::Free => {}
            // Control refuses the client with its own reason once it knows that nothing was sent.
            Stage::Issuing | Stage::Queued => {
                self.metrics.inc(ShardMetric::RunsWithdrawn);
                self.take_back(row, reason);
            }
            Stage::Begun => self.fail_run(row, reason),
        }
    }

    /// Fails a run towards its client, and cancels it at the node.
    pub(super) fn fail_run(&mut self, row: usize, reason: Reason) {
        if self.runs[row].has_client() {
            let (slot, _) = self.runs[row].client;
            self.runs[row].client = (NONE, 0);
            self.client_run_failed(slot as usize, reason);
        }
        self.detach_run(row);
    }

    /// The client behind a run reference, for reports.
    pub(super) fn client_reference(&self, slot: usize) -> ClientRef {
        self.clients[slot].reference(self.index, slot)
    }
}
