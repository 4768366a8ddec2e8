//! Stall terminals: their evidence is judged against the run's own lease and reported, and their
//! client waits until control has decided what may be said. `[R-156]`…`[R-168]`
//!
//! Lives on: the shard of the node's session. Bound: one message decoded at a time, one waiting
//! client per run that stalled; its run slot is free at once.
//!
//! ```text
//! Running --stall terminal--> Parked --Handoff--> answered, as any other failed run is
//!                                └─ nothing was answered, recovers --> Waiting, its body as it was
//! ```
use iop_control::edge::evidence::judge_stall;
use iop_control::step::{Eligibility, Ending, Handoff};
use iop_proto::domain::{ExecutionFailure, FailureCode, Fence, Message};
use iop_proto::framing::MessageType;
use iop_proto::ids::ClientRef;
use iop_proto::map;
use iop_proto::reason::Reason;

use super::Shard;
use super::body::Request;
use super::client::Phase;
use super::run::NONE;
use crate::metrics::ShardMetric;

impl Shard {
    /// A well-formed error terminal of `run` that carries an ExecutionFailure: a tunnel's ERROR or a
    /// run's error alike, whole in `payload`. `reason` is what its error text says. Only a stall is
    /// evidence; any other failure is an error like those without one. `[R-161]` `[R-173]`
    pub(super) fn failed_terminal(
        &mut self,
        run: usize,
        kind: MessageType,
        payload: &[u8],
        reason: Reason,
    ) {
        match failure_in(kind, payload) {
            Some(failure) if failure.code == FailureCode::ResponseStalled => {
                self.park(run, &failure);
            }
            Some(_) | None => {
                if self.runs[run].has_client() {
                    self.end_client(run, Err(reason));
                }
                self.end_run(run, Some(Ending::Error));
            }
        }
    }

    fn park(&mut self, run: usize, failure: &ExecutionFailure) {
        self.metrics.add(
            ShardMetric::EvidenceKeysDropped,
            u64::from(failure.dropped_keys),
        );
        let (adapter, target) = self.leased_binding(run);
        let evidence = judge_stall(failure, adapter, target);
        let (mut client, mut recovery) = (None, Eligibility::ClientGone);
        if self.runs[run].has_client() {
            let row = self.runs[run].client.0 as usize;
            recovery = self.eligibility(run, row, failure);
            if recovery == Eligibility::Eligible {
                self.may_run_again(run, row);
            }
            self.runs[run].client = (NONE, 0);
            self.clients[row].phase = Phase::Parked {
                may_recover: recovery == Eligibility::Eligible,
            };
            client = Some(self.client_reference(row));
        }
        self.end_stalled(run, client, evidence, recovery);
    }

    /// The client waits with its whole request, and with what is left of its deadline.
    fn may_run_again(&mut self, run: usize, client: usize) {
        let timeout_s = self.runs[run].lease().timeout_s;
        let slot = &mut self.clients[client];
        slot.request = self.runs[run].request.take();
        slot.answer.clear(&mut self.sender.pool); // gathered, and nothing of it was sent
        if slot.hard_end.is_none() && timeout_s > 0 {
            slot.hard_end = Some(slot.granted.after_ms(1_000 * u64::from(timeout_s)));
        }
    }

    /// What speaks against asking another provider, as far as this shard knows: nothing of the answer
    /// may have been handed to the client, and the whole request must still be here. `[D-18]`
    fn eligibility(
        &mut self,
        run: usize,
        client: usize,
        failure: &ExecutionFailure,
    ) -> Eligibility {
        if !self.config.recovery {
            Eligibility::Off
        } else if self.issuer.is_some() {
            Eligibility::CredentialBound
        } else if self.clients[client].plan.is_some() {
            Eligibility::Committed
        } else if failure.fence != Some(Fence::Confirmed) {
            Eligibility::FenceUnconfirmed
        } else if !self.runs[run].request.body.rewind() {
            Eligibility::NoOtherProvider // its body was not kept: nobody else could have had it
        } else {
            Eligibility::Eligible
        }
    }

    /// A granted request's body stays whole while another provider could still be asked. Of a request
    /// that control granted on this shard: only then are its names known here.
    pub(super) fn keep_body(&mut self, client: usize) {
        let slot = &mut self.clients[client];
        let may_recover = self.config.recovery && self.issuer.is_none();
        let Some(model) = slot.model.filter(|_| may_recover) else {
            return;
        };
        if self.config.names.candidates(model, slot.operation) > 1 {
            slot.request.body.keep();
        }
    }

    /// Gives the body back once no other provider will be asked: the head of an answer is on its way
    /// to the client, or the client is gone; and all of it was sent. `[D-18]`
    pub(super) fn release_body(&mut self, run: usize) {
        let (session, client) = (self.runs[run].session.0, self.runs[run].client.0);
        let client = self.clients.get(client as usize);
        let is_wanted = client.is_some_and(|client| client.plan.is_none());
        if !is_wanted && !self.is_being_sent(session as usize, run) {
            let body = std::mem::take(&mut self.runs[run].request.body);
            self.let_go(Request {
                body,
                ..Request::default()
            });
        }
    }

    /// The hard deadline that a run is sent, s; 0 = none. A second run has what the first one left.
    /// `[A-53]` `[D-18]`
    pub(super) fn hard_deadline_s(&self, run: usize) -> u32 {
        let own = self.runs[run].lease().timeout_s;
        let client = self.clients.get(self.runs[run].client.0 as usize);
        let Some(end) = client.and_then(|client| client.hard_end) else {
            return own;
        };
        let left = end.ms_since(self.now).div_ceil(1_000).max(1);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        if own == 0 { left } else { own.min(left) }
    }

    /// Control has decided: the client hears of it, if it is still there. `[R-168]`
    pub(super) fn handed_off(
        &mut self,
        client: ClientRef,
        handoff: Option<Handoff>,
        recovers: bool,
    ) {
        let row = client.slot as usize;
        let waits = self.clients.get(row).is_some_and(|slot| {
            slot.is_live(client.generation.get()) && matches!(slot.phase, Phase::Parked { .. })
        });
        if !waits {
            return;
        }
        self.metrics.inc(match handoff {
            Some(_) => ShardMetric::HandoffsConfirmed,
            None => ShardMetric::HandoffsWithout,
        });
        if recovers {
            self.clients[row].phase = Phase::Waiting;
            self.clients[row].provider = None;
            return;
        }
        let request = self.clients[row].request.take();
        self.let_go(request);
        self.client_run_failed(row, Reason::ResponseStalled);
    }
}

/// The failure that a terminal carries, read by the mapping module: keys outside the allowlist are
/// gone and counted. The view has checked the bytes. `[A-57]`
fn failure_in(kind: MessageType, payload: &[u8]) -> Option<ExecutionFailure> {
    match map::decode(kind, payload).ok()? {
        Message::TunnelFrame(frame) => frame.failure,
        Message::RunEvent(event) => event.failure,
        _ => None,
    }
}
