//! A granted run's credential: asked for once, attached, or discarded. `[states §6]`
//!
//! Lives on: the shard of the node's session. Bound: one ask per run; `ANSWERS_PER_TURN_MAX` answers a
//! turn; control's five seconds for a run to begin include the asking.
//!
//! ```text
//! grant ─► Issuing ─answer─► Queued (pair attached) ─► Begun
//!             └── client, control, session or certificate ends: the answer finds nobody
//! ```
//! A run whose issuer was asked is never selected again: what ends it before it began settles its
//! client. `[R-208]` `[I3.10]`

use iop_proto::ids::Now;
use iop_proto::reason::Reason;

use super::Shard;
use super::run::Stage;
use crate::credential::issuer::{Answer, Ask};
use crate::credential::plane::Selection;
use crate::metrics::ShardMetric;
use crate::system::unix_ms;

/// Answers taken in one turn; more stay in their lane.
const ANSWERS_PER_TURN_MAX: usize = 64;

impl Shard {
    /// A filled slot goes to its session's writer: at once, or by way of the issuer.
    pub(super) fn dispatch_run(&mut self, run: usize) {
        let is_tunnel = self.runs[run].is_tunnel;
        let Some(issuer) = self.issuer.as_mut().filter(|_| is_tunnel) else {
            return self.queue_bulk(run);
        };
        let client = &self.clients[self.runs[run].client.0 as usize];
        let session = &self.sessions[self.runs[run].session.0 as usize];
        self.runs[run].stage = Stage::Issuing;
        self.runs[run].asked = true;
        let selected = client.model.zip(client.provider);
        let selected = selected.filter(|_| self.now < session.not_after);
        let Some((model, provider)) = selected else {
            return self.refuse_unsent(run, Reason::CredentialFailed);
        };
        let ask = Ask {
            run: self.runs[run].reference,
            selection: Selection {
                caller: client.caller,
                model,
                provider,
                not_after_unix: session.not_after_unix,
            },
        };
        self.metrics.inc(ShardMetric::CredentialsAsked);
        if !issuer.ask(ask) {
            self.refuse_unsent(run, Reason::CredentialFailed);
        }
    }

    /// What the issuer has answered.
    pub(super) fn credentials(&mut self) {
        for _ in 0..ANSWERS_PER_TURN_MAX {
            let Some(answer) = self.issuer.as_mut().and_then(|issuer| issuer.answer()) else {
                return;
            };
            self.credential(*answer);
        }
    }

    fn credential(&mut self, Answer { run, pair }: Answer) {
        let waiting = self
            .run_of(run)
            .filter(|&row| self.runs[row].stage == Stage::Issuing);
        match (waiting, pair) {
            (Some(row), Ok(pair)) => {
                self.runs[row].credential = Some(pair);
                self.queue_bulk(row);
            }
            (Some(row), Err(reason)) => self.refuse_unsent(row, reason),
            (None, Ok(_)) => self.metrics.inc(ShardMetric::CredentialsDiscarded),
            (None, Err(_)) => {}
        }
    }

    /// The run carries a credential that its node's certificate has outlived. `[D-05]` `[R-206]`
    pub(super) fn is_out_of_time(&self, row: usize, run: usize) -> bool {
        self.runs[run].credential.is_some() && self.now >= self.sessions[row].not_after
    }
}

/// The instant of a Unix time, by the wall clock as it is now.
pub(super) fn instant_of(unix: i64, now: Now) -> Now {
    let left = unix.saturating_mul(1_000).saturating_sub(unix_ms());
    now.after_ms(u64::try_from(left).unwrap_or(0))
}
