//! Words of a node about a provider's health, judged against the binding they must be about. Pure
//! comparisons: what follows from a verdict is decided in `health`.
//!
//! Lives on: the shard that received the words, which are gone afterwards. Bound: one message.
use iop_proto::domain::{ExecutionFailure, HealthEvidence, HealthPair, Metadata, Observation};

use crate::step::{Evidence, EvidenceFault, Probed};

/// Judges a stall's metadata against the lease's own adapter and target: exact, case and blanks
/// included. Keys outside the allowlist were dropped before. `[R-158]` `[R-159]` `[R-163]` `[A-57]`
#[must_use]
pub fn judge_stall(failure: &ExecutionFailure, adapter: &str, target: &str) -> Evidence {
    let verdict = || {
        let HealthPair::Known(health) = failure.health else {
            return Err(EvidenceFault::Pair);
        };
        if failure.adapter.as_deref() != Some(adapter) {
            return Err(EvidenceFault::Adapter);
        }
        if failure.target.as_deref() != Some(target) {
            return Err(EvidenceFault::Target);
        }
        match failure.observation {
            Observation::Unbound => Ok((health, None)),
            Observation::Seq(seq) => Ok((health, Some(seq))),
            Observation::Invalid(_) => Err(EvidenceFault::Sequence),
        }
    };
    match verdict() {
        Ok((health, seq)) => Evidence::Valid { health, seq },
        Err(fault) => Evidence::Rejected(fault),
    }
}

/// The evidence keys of `NodeCommandResponse.result`; every other key is diagnosis. `[R-194]`
/// `[R-193]` `[R-195]`
mod result_key {
    pub(super) const ADAPTER: &str = "adapter_key";
    pub(super) const TARGET: &str = "target";
    pub(super) const STATUS: &str = "provider_status";
    pub(super) const OBSERVATION: &str = "health_observation_seq";
}

/// Judges the result of a CAPABILITIES that asked about `adapter` and `target`. `[R-186]`…`[R-195]`
#[must_use]
pub fn judge_probe(result: &Metadata, adapter: &str, target: &str) -> Probed {
    let get = |key| result.get(key).map(String::as_str);
    let keys = [
        result_key::ADAPTER,
        result_key::TARGET,
        result_key::STATUS,
        result_key::OBSERVATION,
    ];
    if keys.iter().all(|&key| get(key).is_none()) {
        return Probed::Rejected(EvidenceFault::Empty);
    }
    let (Some(said_adapter), Some(said_target), Some(status)) = (
        get(result_key::ADAPTER),
        get(result_key::TARGET),
        get(result_key::STATUS),
    ) else {
        return Probed::Rejected(EvidenceFault::Malformed);
    };
    if said_adapter != adapter {
        return Probed::Rejected(EvidenceFault::Adapter);
    }
    if said_target != target {
        return Probed::Rejected(EvidenceFault::Target);
    }
    let health = HealthEvidence::ALL
        .into_iter()
        .find(|health| health.health() == status);
    match health {
        None => Probed::Rejected(EvidenceFault::Malformed),
        Some(HealthEvidence::Unavailable) => Probed::Unavailable,
        Some(HealthEvidence::Unknown) => Probed::Unknown,
        Some(HealthEvidence::Available) => {
            match Observation::from_text(result.get(result_key::OBSERVATION).cloned()) {
                Observation::Seq(seq) => Probed::Available { seq },
                Observation::Unbound | Observation::Invalid(_) => {
                    Probed::Rejected(EvidenceFault::Sequence)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU64;

    use iop_proto::domain::{FailureCode, Fence};

    use super::*;

    fn stall() -> ExecutionFailure {
        ExecutionFailure {
            code: FailureCode::ResponseStalled,
            health: HealthPair::Known(HealthEvidence::Unavailable),
            idle_ms: Some(1),
            run_id: None,
            attempt_id: None,
            fence: Some(Fence::Confirmed),
            adapter: Some("a1".into()),
            target: Some("t1".into()),
            observation: Observation::from_text(Some("5".into())),
            dropped_keys: 0,
        }
    }

    /// Proves, [R-159], [R-163].
    #[test]
    fn r158_evidence_must_be_about_the_leases_own_adapter_and_target() {
        let judge = |change: fn(&mut ExecutionFailure)| {
            let mut failure = stall();
            change(&mut failure);
            judge_stall(&failure, "a1", "t1")
        };
        let valid = |seq: Option<u64>| Evidence::Valid {
            health: HealthEvidence::Unavailable,
            seq: seq.and_then(NonZeroU64::new),
        };
        assert_eq!(judge(|_| {}), valid(Some(5)));
        assert_eq!(judge(|f| f.observation = Observation::Unbound), valid(None));
        // Neither fence nor identities nor idle time are asked for.
        let bare = judge(|f| {
            (f.fence, f.idle_ms, f.run_id) = (None, None, Some("another".into()));
            f.dropped_keys = 3;
        });
        assert_eq!(bare, valid(Some(5)));
        type Change = fn(&mut ExecutionFailure);
        let faults: [(Change, EvidenceFault); 9] = [
            (|f| f.adapter = Some("a2".into()), EvidenceFault::Adapter),
            (|f| f.adapter = None, EvidenceFault::Adapter),
            (|f| f.target = Some("t2".into()), EvidenceFault::Target),
            (|f| f.target = Some("T1".into()), EvidenceFault::Target),
            (|f| f.target = Some("t1 ".into()), EvidenceFault::Target),
            (|f| f.target = Some(String::new()), EvidenceFault::Target),
            (|f| f.target = None, EvidenceFault::Target),
            (
                |f| {
                    f.health = HealthPair::Invalid {
                        health: Some("unavailable".into()),
                        classification: Some("request_stalled".into()),
                    }
                },
                EvidenceFault::Pair,
            ),
            (
                |f| f.observation = Observation::from_text(Some("+7".into())),
                EvidenceFault::Sequence,
            ),
        ];
        for (change, fault) in faults {
            assert_eq!(judge(change), Evidence::Rejected(fault));
        }
    }

    const ASKED: [(&str, &str); 4] = [
        ("adapter_key", "a1"),
        ("target", "t1"),
        ("provider_status", "available"),
        ("health_observation_seq", "6"),
    ];

    fn result(pairs: &[(&str, &str)]) -> Metadata {
        let owned = pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned()));
        owned.collect()
    }

    /// `ASKED` with one key said otherwise, or not at all.
    fn but(key: &str, value: Option<&str>) -> Probed {
        let mut result = result(&ASKED);
        match value {
            Some(value) => drop(result.insert(key.into(), value.into())),
            None => drop(result.remove(key)),
        }
        judge_probe(&result, "a1", "t1")
    }

    /// Proves, [R-186], [R-187], [R-189], [R-193], [R-194], [R-195].
    #[test]
    fn r187_only_the_four_keys_in_their_exact_form_are_evidence() {
        let seq = NonZeroU64::new(6).unwrap();
        assert_eq!(
            judge_probe(&result(&ASKED), "a1", "t1"),
            Probed::Available { seq }
        );
        let empty = Probed::Rejected(EvidenceFault::Empty);
        assert_eq!(judge_probe(&Metadata::new(), "a1", "t1"), empty);
        let diagnosis = result(&[
            ("adapter", "a1"),
            ("instance_key", "a1"),
            ("health", "ok"),
            ("status", "available"),
            ("provider_health", "available"),
        ]);
        assert_eq!(judge_probe(&diagnosis, "a1", "t1"), empty);
        let malformed = Probed::Rejected(EvidenceFault::Malformed);
        for key in ["adapter_key", "target", "provider_status"] {
            assert_eq!(but(key, None), malformed, "{key}");
        }
        for status in ["Available", "ok", "", " available", "{\"available\":1}"] {
            assert_eq!(but("provider_status", Some(status)), malformed, "{status}");
        }
        assert_eq!(
            but("provider_status", Some("unavailable")),
            Probed::Unavailable
        );
        assert_eq!(but("provider_status", Some("unknown")), Probed::Unknown);
        let adapter = Probed::Rejected(EvidenceFault::Adapter);
        assert_eq!(but("adapter_key", Some("a2")), adapter);
        let target = Probed::Rejected(EvidenceFault::Target);
        for said in ["t2", "T1", "t1 ", ""] {
            assert_eq!(but("target", Some(said)), target, "{said}");
        }
        let sequence = Probed::Rejected(EvidenceFault::Sequence);
        let too_long = "18446744073709551616";
        for seq in ["abc", "-1", "0", "6.0", " 6", "+6", "06", "", too_long] {
            assert_eq!(but("health_observation_seq", Some(seq)), sequence, "{seq}");
        }
        assert_eq!(but("health_observation_seq", None), sequence);
        // Words of the provider's own making stand in for none of the four.
        let mut nested = result(&ASKED);
        nested.remove("provider_status");
        for (key, value) in [("status", "available"), ("health", "ok")] {
            nested.insert(key.into(), value.into());
        }
        assert_eq!(judge_probe(&nested, "a1", "t1"), malformed);
        // Evidence under the diagnostic name alone is none.
        let mut renamed = result(&ASKED);
        renamed.remove("adapter_key");
        renamed.insert("adapter".into(), "a1".into());
        renamed.insert("instance_key".into(), "a1".into());
        assert_eq!(judge_probe(&renamed, "a1", "t1"), malformed);
    }
}
