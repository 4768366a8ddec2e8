//! Stall terminals: their evidence is judged against the run's own lease and reported, and their
//! client waits until control has decided what may be said. `[R-156]`…`[R-168]`
//!
//! Lives on: the shard of the node's session. Bound: one message decoded at a time, one waiting
//! client per run that stalled; its run slot is free at once.
//!
//! ```text
//! Running --stall terminal--> Parked --Handoff--> answered, as any other failed run is
//! ```
use iop_control::edge::evidence::judge_stall;
use iop_control::step::{Ending, Handoff};
use iop_proto::domain::{ExecutionFailure, FailureCode, Message};
use iop_proto::framing::MessageType;
use iop_proto::ids::ClientRef;
use iop_proto::map;
use iop_proto::reason::Reason;

use super::Shard;
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
        let mut client = None;
        if self.runs[run].has_client() {
            let row = self.runs[run].client.0 as usize;
            self.runs[run].client = (NONE, 0);
            self.clients[row].phase = Phase::Parked;
            client = Some(self.client_reference(row));
        }
        self.end_stalled(run, client, evidence);
    }

    /// Control has decided: the client hears of it, if it is still there. `[R-168]`
    pub(super) fn handed_off(&mut self, client: ClientRef, handoff: Option<Handoff>) {
        let row = client.slot as usize;
        let waits = self.clients.get(row).is_some_and(|slot| {
            slot.is_live(client.generation.get()) && slot.phase == Phase::Parked
        });
        if !waits {
            return;
        }
        self.metrics.inc(match handoff {
            Some(_) => ShardMetric::HandoffsConfirmed,
            None => ShardMetric::HandoffsWithout,
        });
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
