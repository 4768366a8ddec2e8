//! Health evidence and what follows from it: the terminal handoff, the overlay, its end.
//!
//! The order within a step is the contract's: evidence is judged and the overlay decided, then the
//! lease returned, then the terminal handed on; the step's one pump comes last, so a slot that a
//! failed provider gives back is given to nobody. `[I3.9]` `[I3.11]` `[S-55]`
//!
//! Lives on: control. Bound: one overlay and one effect a message. `[I2.6]`
use iop_proto::domain::HealthEvidence;
use iop_proto::ids::{ClientRef, Now, ProviderIndex, RunRef};

use super::command::Row;
use super::lease::Lease;
use super::notice::{HealthNotice, HealthSource};
use super::overlay::Outcome;
use super::queue::{Place, Waiter};
use super::{Control, Timer};
use crate::step::{Effect, Eligibility, Evidence, EvidenceFault, Handoff, Out, Probed};

/// A run whose terminal says that it stalled, as its shard reports it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stalled {
    pub(super) run: RunRef,
    pub(super) client: Option<ClientRef>,
    pub(super) evidence: Evidence,
    pub(super) recovery: Eligibility,
}

/// What was decided about one piece of evidence, for whoever watches.
struct Decided {
    provider: ProviderIndex,
    source: HealthSource,
    health: Option<HealthEvidence>,
    outcome: Outcome,
    fault: Option<EvidenceFault>,
}

impl Control {
    /// The current terminal of a stalled run. The lease is returned whatever its evidence is worth.
    /// `[R-162]` `[R-163]` `[R-168]`
    ///
    /// Hands back who waits for a second run, to enter the queue behind the step's pump.
    pub(super) fn stalled(
        &mut self,
        now: Now,
        stalled: Stalled,
        out: &mut Out,
    ) -> Option<(Place, Waiter)> {
        let Stalled {
            run,
            client,
            evidence,
            recovery,
        } = stalled;
        let (handoff, decided) = match self.leases.get_mut(run).copied() {
            None => (None, None),
            Some(lease) => self.judge(now, &lease, evidence),
        };
        // Reported before: whoever waited has been told.
        let (lease, returned) = self.finish(run)?;
        self.counters.returns_terminal += u64::from(returned);
        self.counters.terminals_stalled += 1;
        let again = self.recovers(now, &lease, client, handoff, recovery);
        if let Some(client) = client {
            out.push(Effect::Handoff {
                client,
                handoff,
                recovers: again.is_some(),
            });
        }
        if let Some(decided) = decided {
            self.observe(now, &decided);
        }
        again
    }

    /// Decides the overlay by a stall's evidence, and what the terminal carries on. `[R-169]`
    fn judge(
        &mut self,
        now: Now,
        lease: &Lease,
        evidence: Evidence,
    ) -> (Option<Handoff>, Option<Decided>) {
        let provider = lease.provider;
        let is_current = self.resources.is_current(provider, lease.generation);
        let decided = |health, outcome, fault| Decided {
            provider,
            source: HealthSource::Stall,
            health,
            outcome,
            fault,
        };
        let rejected = |fault| (None, Some(decided(None, Outcome::Rejected, Some(fault))));
        match evidence {
            Evidence::Rejected(fault) => rejected(fault),
            Evidence::Valid { .. } if !is_current => rejected(EvidenceFault::NotCurrent),
            Evidence::Valid { health, seq } => {
                let bindings = self.resources.bindings_mut(provider);
                let is_present = bindings.present() == lease.binding;
                // The lease's own binding, whatever the provider is bound to now. `[S-58]`
                let Some(record) = bindings.record_of(lease.binding) else {
                    return rejected(EvidenceFault::NotCurrent);
                };
                let outcome = record.stall(health, seq);
                if outcome == Outcome::Lowered && is_present {
                    self.offer(provider);
                    self.probe_as_bound(now, provider);
                }
                let handoff = Handoff { provider, health };
                (Some(handoff), Some(decided(Some(health), outcome, None)))
            }
        }
    }

    /// The answer to a CAPABILITIES about `row.provider`: only proof that fits exactly one binding
    /// of its own generation counts. `[R-184]` `[R-185]` `[A-24]`
    pub(super) fn probed(&mut self, now: Now, row: Row, probed: Probed) {
        let Some(provider) = row.provider else { return };
        let (health, outcome, fault) = match probed {
            Probed::Rejected(fault) => (None, Outcome::Rejected, Some(fault)),
            Probed::Unavailable => (Some(HealthEvidence::Unavailable), Outcome::Unchanged, None),
            Probed::Unknown => (Some(HealthEvidence::Unknown), Outcome::Unchanged, None),
            Probed::Available { seq } => {
                let health = Some(HealthEvidence::Available);
                let present = self.resources.get(provider).bindings.present();
                let is_current = self.resources.is_current(provider, row.generation);
                if !is_current || row.binding != Some(present) {
                    (health, Outcome::Rejected, Some(EvidenceFault::NotCurrent))
                } else if !self.is_unambiguous(provider) {
                    (health, Outcome::Rejected, Some(EvidenceFault::Ambiguous))
                } else {
                    let bindings = self.resources.bindings_mut(provider);
                    let outcome = bindings.record_mut().found(seq);
                    (health, outcome, None)
                }
            }
        };
        if outcome == Outcome::Cleared {
            self.stop_probe(provider);
            self.offer(provider);
        }
        let decided = Decided {
            provider,
            source: HealthSource::Capabilities,
            health,
            outcome,
            fault,
        };
        self.observe(now, &decided);
    }

    /// Adapter and target of `provider` name it alone among the node's enabled bindings. `[S-26]`
    fn is_unambiguous(&self, provider: ProviderIndex) -> bool {
        let asked = self.names.provider(provider);
        let of_node = self.resources.of_node(asked.node).iter();
        let like_it = of_node.filter(|&&other| {
            let name = self.names.provider(other);
            name.enabled && name.adapter == asked.adapter && name.target == asked.target
        });
        like_it.eq([&provider])
    }

    /// Counts and tells, after the decision; nothing is decided by it. `[R-314]`…`[R-316]` `[R-309]`
    fn observe(&mut self, at: Now, decided: &Decided) {
        self.counters.evidence(decided.source, decided.outcome);
        let notice = HealthNotice {
            at,
            provider: decided.provider,
            source: decided.source,
            health: decided.health,
            outcome: decided.outcome,
            fault: decided.fault,
        };
        if !self.notices.publish_health(notice) {
            self.counters.notices_dropped += 1;
        }
    }

    /// The due end of a command's wait, and the due time of a probe.
    pub(super) fn fire_health(&mut self, now: Now, timer: Timer, out: &mut Out) {
        match timer {
            Timer::Command(command) => self.command_over(now, command, out),
            Timer::Probe(provider) => self.probe_due(now, provider, out),
            Timer::Wait(_)
            | Timer::Begin(_)
            | Timer::Close(_)
            | Timer::Refresh(_)
            | Timer::Drain(_)
            | Timer::Beat(_) => unreachable!("fired elsewhere"),
        }
    }
}
