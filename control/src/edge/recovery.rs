//! A stalled request's second run: who may have one, and what became of it. `[D-18]`
//!
//! The handoff permits nothing by itself: shard and control each say what they know against it, and
//! only a request that nothing speaks against waits again, with the age it had, for any provider of
//! its model but the one that failed. It is one waiter and one lease at a time throughout. `[R-172]`
//!
//! Lives on: control. Bound: two runs a request; one record a stalled request.
use iop_proto::ids::{ClientRef, ModelIndex, Now, ProviderIndex};

use super::Control;
use super::lease::Lease;
use super::notice::{Recovery, RecoveryNotice};
use super::queue::{Place, Waiter};
use crate::step::{Eligibility, Handoff};

impl Control {
    /// Judges a stalled request whose lease has just been returned; whoever waits again.
    pub(super) fn recovers(
        &mut self,
        now: Now,
        lease: &Lease,
        client: Option<ClientRef>,
        handoff: Option<Handoff>,
        said: Eligibility,
    ) -> Option<(Place, Waiter)> {
        if lease.place.without.is_some() {
            self.recovery_ended(now, lease.place, Recovery::StalledAgain);
            return None; // judged once in its life
        }
        let place = Place {
            without: Some(lease.provider),
            ..lease.place
        };
        let client = client.filter(|_| said == Eligibility::Eligible);
        let judged = if client.is_none() {
            said
        } else if handoff.is_none() {
            Eligibility::EvidenceRejected
        } else if !self.queue.is_served(place) {
            Eligibility::NoOtherProvider
        } else {
            Eligibility::Eligible
        };
        self.counters.eligible(judged);
        let client = client.filter(|_| judged == Eligibility::Eligible);
        let Some(client) = client else {
            self.tell_recovery(now, place.model, lease.provider, judged, None);
            return None;
        };
        // What it had not waited when it was granted is left of its wait.
        let left_ms = lease.deadline.ms_since(lease.granted);
        let waiter = Waiter::new(client, now.after_ms(left_ms), lease.body_bytes);
        Some((place, waiter))
    }

    /// A second run, or the wait for one, has ended; nothing for anybody else. `[R-318]`
    pub(super) fn recovery_ended(&mut self, now: Now, place: Place, result: Recovery) {
        if let Some(failed) = place.without {
            self.counters.recovered(result);
            let said = Eligibility::Eligible;
            self.tell_recovery(now, place.model, failed, said, Some(result));
        }
    }

    fn tell_recovery(
        &mut self,
        at: Now,
        model: ModelIndex,
        failed: ProviderIndex,
        eligibility: Eligibility,
        result: Option<Recovery>,
    ) {
        let notice = RecoveryNotice {
            at,
            model,
            failed,
            eligibility,
            result,
        };
        if !self.notices.publish_recovery(notice) {
            self.counters.notices_dropped += 1;
        }
    }
}
