//! A request from submission to its run's final report: machine 3 of the contract.
//!
//! Lives on: control. Bound: `GRANTS_PER_STEP_MAX` grants a step; the rest is a pending step.
use iop_proto::ids::{ClientRef, ModelIndex, Now, RunRef};
use iop_proto::limits::GRANTS_PER_STEP_MAX;
use iop_proto::reason::Reason;

use super::lease::{Lease, Phase};
use super::notice::{OverdueNotice, Recovery};
use super::queue::{Place, Waiter};
use super::{Control, Timer};
use crate::step::{Effect, Ending, Out};

impl Control {
    pub(super) fn submit(
        &mut self,
        now: Now,
        place: Place,
        client: ClientRef,
        body_bytes: u32,
        out: &mut Out,
    ) {
        self.counters.submits += 1;
        let limits = self.names.queue;
        let waiter = Waiter::new(client, now.after_ms(limits.wait_ms), body_bytes);
        if let Some(reason) = self.unserved(place) {
            self.refuse(client, place.model, reason, out);
        } else if let Some(candidate) = self.passes(place) {
            self.grant(now, place, waiter, candidate, out);
        } else if self.queue.has_room(place.model, body_bytes, limits) {
            self.counters.queue_entries += 1;
            self.wait(place, waiter);
        } else {
            self.refuse(client, place.model, Reason::QueueFull, out);
        }
    }

    /// Why nobody in the configuration could ever serve it, if so. `[D-11]`
    fn unserved(&self, place: Place) -> Option<Reason> {
        if !self.names.has_model(place.model) {
            return Some(Reason::ModelUnknown);
        }
        if !self.queue.is_served(place) {
            return Some(Reason::NoProviderConfigured);
        }
        None
    }

    /// The candidate of a new request that need not wait.
    fn passes(&self, place: Place) -> Option<usize> {
        if !self.queue.may_pass(place) {
            return None;
        }
        self.resources
            .select(self.queue.candidates(place.model), place)
    }

    pub(super) fn wait(&mut self, place: Place, waiter: Waiter) {
        self.queue.enter(place, waiter);
        self.timers.set(waiter.ends, Timer::Wait(place));
    }

    fn stop_waiting(&mut self, place: Place) -> Option<Waiter> {
        let waiter = self.queue.leave(place)?;
        self.timers.cancel(waiter.ends, Timer::Wait(place));
        Some(waiter)
    }

    /// Grants the oldest waiter that a provider has room for, again and again, up to a step's
    /// bound. `[R-042]` `[R-077]` `[D-16]`
    pub(super) fn pump(&mut self, now: Now, out: &mut Out) {
        for _ in 0..GRANTS_PER_STEP_MAX {
            if out.room() == 0 {
                return;
            }
            let Some(place) = self.queue.next() else {
                return;
            };
            let waiter = self
                .stop_waiting(place)
                .expect("the queue's next stands in it");
            let candidates = self.queue.candidates(place.model);
            let candidate = self.resources.select(candidates, place);
            let candidate = candidate.expect("a waiter is next while a provider has room for it");
            let before = self.counters.grants;
            self.grant(now, place, waiter, candidate, out);
            self.counters.grants_queued += self.counters.grants - before;
        }
    }

    /// Takes the lease and the run slot, on the node's shard. `[D-32]` `[R-232]` `[R-235]`
    fn grant(&mut self, now: Now, place: Place, waiter: Waiter, candidate: usize, out: &mut Out) {
        let provider = self.queue.candidates(place.model)[candidate].provider;
        let node = self.resources.get(provider).node;
        let owner = self
            .registry
            .owner(node)
            .expect("a live provider's node has an owner");
        let lease = Lease {
            provider,
            generation: owner.generation,
            binding: self.resources.get(provider).bindings.present(),
            place,
            deadline: waiter.deadline,
            body_bytes: waiter.body_bytes,
            granted: now,
            begin_by: now.after_ms(self.names.queue.dispatch_ms),
            phase: Phase::Selected,
        };
        let Some(run) = self.leases.insert(owner.session.shard, lease) else {
            self.recovery_ended(now, place, Recovery::Failed);
            self.refuse(waiter.client, place.model, Reason::RunsFull, out);
            return;
        };
        self.resources.take(provider, place.class);
        *self.queue.selected_mut(place.model, provider) += 1;
        self.offer(provider);
        self.timers.set(lease.begin_by, Timer::Begin(run));
        self.counters.grants += 1;
        out.push(Effect::Grant {
            client: waiter.client,
            run,
            session: owner.session,
            provider,
        });
    }

    fn refuse(&mut self, client: ClientRef, model: ModelIndex, reason: Reason, out: &mut Out) {
        self.counters.refused(reason);
        let comes_back = matches!(
            reason,
            Reason::QueueFull | Reason::QueueTimeout | Reason::RunsFull | Reason::DispatchTimeout
        );
        let retry_after_s = if comes_back {
            self.queue.retry_after_s(model)
        } else {
            0
        };
        out.push(Effect::Refuse {
            client,
            reason,
            retry_after_s,
        });
    }

    /// A waiter leaves at once. Whoever has been granted or refused meanwhile is settled by the
    /// shard that the answer reaches. `[S-17]` `[P-07]`
    pub(super) fn client_gone(&mut self, now: Now, client: ClientRef) {
        let place = self.queue.place_of(client);
        match place.and_then(|place| Some((place, self.stop_waiting(place)?))) {
            Some((place, _)) => {
                self.counters.clients_gone_waiting += 1;
                self.recovery_ended(now, place, Recovery::ClientGone);
            }
            None => self.counters.clients_gone_late += 1,
        }
    }

    /// Queue wait is over, because its time has passed or a reload left it without candidate.
    /// `[S-18]` `[S-61]`
    pub(super) fn wait_over(&mut self, now: Now, place: Place, out: &mut Out) {
        if let Some(waiter) = self.queue.leave(place) {
            self.recovery_ended(now, place, Recovery::Unserved);
            let reason = self.unserved(place);
            let reason = reason.unwrap_or(Reason::QueueTimeout);
            self.refuse(waiter.client, place.model, reason, out);
        }
    }

    /// Granted long ago and not begun: the run is ended. One whose generation is dead comes
    /// back by itself. `[states §3: Selected]`
    pub(super) fn begin_over(&mut self, run: RunRef, out: &mut Out) {
        let Some(lease) = self.leases.get_mut(run) else {
            return;
        };
        if !self.resources.is_current(lease.provider, lease.generation) {
            return;
        }
        let reason = Reason::DispatchTimeout;
        lease.phase = Phase::Cancelled(reason);
        let lease = *lease;
        self.decide(&lease);
        self.counters.cancels += 1;
        out.push(Effect::Cancel { run, reason });
    }

    /// The run, `Selected` until now, will no longer come back to wait.
    fn decide(&mut self, lease: &Lease) {
        let model = lease.place.model;
        if self.resources.is_current(lease.provider, lease.generation) {
            let selected = self.queue.selected_mut(model, lease.provider);
            *selected = selected.checked_sub(1).expect("each run is decided once");
        } else {
            self.queue.unhold(model);
        }
    }

    /// # Panics
    /// When a run begins twice: a shard's bug.
    pub(super) fn begun(&mut self, run: RunRef) {
        let Some(lease) = self.leases.get_mut(run) else {
            self.counters.stale_events += 1;
            return;
        };
        match lease.phase {
            Phase::Selected => {
                lease.phase = Phase::Begun;
                let lease = *lease;
                self.timers.cancel(lease.begin_by, Timer::Begin(run));
                self.decide(&lease);
            }
            Phase::Begun => panic!("a run began twice"),
            // The cancel was on its way; the shard sends CancelRequest when it meets it.
            Phase::Cancelled(_) => {}
        }
    }

    /// Nothing was sent: the lease is returned, the client waits again at its old place until its
    /// old deadline, or hears why not. `[D-02]` `[S-12]` `[S-64]`
    ///
    /// # Panics
    /// When the run had begun: a shard's bug, after which a retry might execute twice.
    pub(super) fn not_sent(
        &mut self,
        now: Now,
        run: RunRef,
        client: Option<ClientRef>,
        out: &mut Out,
    ) {
        let Some((lease, returned)) = self.finish(run) else {
            return;
        };
        self.counters.returns_not_sent += u64::from(returned);
        let mut place = lease.place;
        let Some(client) = client else {
            return self.recovery_ended(now, place, Recovery::ClientGone);
        };
        match lease.phase {
            Phase::Cancelled(reason) => {
                self.recovery_ended(now, place, Recovery::Failed);
                self.refuse(client, place.model, reason, out);
            }
            Phase::Begun => panic!("a run that had begun was reported as not sent"),
            Phase::Selected => {
                if cfg!(iop_break = "requeue_at_tail") {
                    place.age = self.queue.new_place(place.model, place.class).age;
                }
                if let Some(reason) = self.unserved(place) {
                    self.recovery_ended(now, place, Recovery::Unserved);
                    return self.refuse(client, place.model, reason, out);
                }
                self.counters.queue_returns += 1;
                let waiter = Waiter::new(client, lease.deadline, lease.body_bytes);
                self.wait(place, waiter);
            }
        }
    }

    /// The current terminal. Its kind and form do not matter to the lease. `[R-162]` `[R-174]`
    pub(super) fn terminal(&mut self, now: Now, run: RunRef, ending: Ending) {
        let Some((lease, returned)) = self.finish(run) else {
            return;
        };
        self.counters.returns_terminal += u64::from(returned);
        let result = match ending {
            Ending::Complete => Recovery::Recovered,
            Ending::Error | Ending::Violation => Recovery::Failed,
        };
        self.recovery_ended(now, lease.place, result);
        match ending {
            Ending::Complete => {
                self.counters.terminals_complete += 1;
                self.queue
                    .record_service(lease.place.model, now.ms_since(lease.granted));
            }
            Ending::Error => self.counters.terminals_error += 1,
            Ending::Violation => self.counters.terminals_violation += 1,
        }
    }

    /// The connection closed first: the fence returns the lease, or has done so; if its report is
    /// still to come, this is where the lease ends.
    pub(super) fn lost(&mut self, now: Now, run: RunRef) {
        if let Some((lease, returned)) = self.finish(run) {
            self.counters.returns_lost += u64::from(returned);
            self.recovery_ended(now, lease.place, Recovery::Failed);
        }
    }

    /// A node does not end what it was told to. Its lease stays taken: time heals none. `[D-08]`
    pub(super) fn overdue(&mut self, now: Now, run: RunRef) {
        let Some(lease) = self.leases.get_mut(run) else {
            self.counters.stale_events += 1;
            return;
        };
        let provider = lease.provider;
        if !self
            .notices
            .publish_overdue(OverdueNotice { at: now, provider })
        {
            self.counters.notices_dropped += 1;
        }
    }

    /// A final report: frees the run slot and returns the lease, unless the fence has. `[I3.1]`
    pub(super) fn finish(&mut self, run: RunRef) -> Option<(Lease, bool)> {
        let Some(lease) = self.leases.remove(run) else {
            self.counters.stale_events += 1;
            return None;
        };
        if lease.phase == Phase::Selected {
            self.timers.cancel(lease.begin_by, Timer::Begin(run));
            self.decide(&lease);
        }
        let class = lease.place.class;
        let returned = self
            .resources
            .release(lease.provider, lease.generation, class);
        self.note_return(lease.provider);
        self.offer(lease.provider);
        Some((lease, returned))
    }
}
