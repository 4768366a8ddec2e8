//! What health evidence has said of one binding within one generation: the overlay rows of machine 2.
//!
//! A sequence number is drawn by the node in the step in which the evidence is decided, so a higher
//! one is newer evidence, whatever order it arrives in. `[A-22]`
//!
//! Lives on: control, in the provider's row. Bound: two numbers a binding, `BINDINGS_EARLIER_MAX`
//! bindings beside the present one.
use core::num::NonZeroU64;
use std::collections::VecDeque;
use std::sync::Arc;

use iop_proto::domain::HealthEvidence;
use iop_proto::limits::BINDINGS_EARLIER_MAX;

use crate::names::ProviderName;

/// What a piece of evidence has come to. `[R-170]` `[A-23]` `[A-24]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The overlay was put on: a transition.
    Lowered,
    /// The overlay was taken off: a transition.
    Cleared,
    /// It is the newest now, and changes nothing else.
    Marked,
    /// Not newer than what is known.
    Stale,
    /// It says nothing that could change anything: no number, or no proof.
    Unchanged,
    /// It counts nothing.
    Rejected,
}

impl Outcome {
    pub const ALL: [Self; 6] = [
        Self::Lowered,
        Self::Cleared,
        Self::Marked,
        Self::Stale,
        Self::Unchanged,
        Self::Rejected,
    ];

    /// Metric label and log field.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Lowered => "lowered",
            Self::Cleared => "cleared",
            Self::Marked => "marked",
            Self::Stale => "stale",
            Self::Unchanged => "unchanged",
            Self::Rejected => "rejected",
        }
    }
}

/// The record of one (node, generation, provider, adapter, target). New with its generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// The observation that put the overlay on: `lowered <= mark`.
    lowered: Option<NonZeroU64>,
    /// Highest observation that counted; only grows. `[I2.5]`
    mark: u64,
}

impl Record {
    /// Unavailable at run time: not a candidate. `[R-275]`
    pub(crate) const fn is_lowered(&self) -> bool {
        self.lowered.is_some()
    }

    /// `lowered <= mark`, and nothing is known of a record that was never told.
    pub(crate) fn is_sound(&self) -> bool {
        self.lowered.is_none_or(|seq| seq.get() <= self.mark)
    }

    pub(crate) fn is_new(&self) -> bool {
        *self == Self::default()
    }

    /// Validated evidence of a stall. Only a fresh `unavailable` lowers; nothing clears. `[R-170]`
    pub(crate) fn stall(&mut self, health: HealthEvidence, seq: Option<NonZeroU64>) -> Outcome {
        let Some(seq) = seq else {
            return Outcome::Unchanged;
        };
        if seq.get() <= self.mark {
            return Outcome::Stale;
        }
        self.mark = seq.get();
        match health {
            HealthEvidence::Available | HealthEvidence::Unknown => Outcome::Marked,
            HealthEvidence::Unavailable => match self.lowered.replace(seq) {
                None => Outcome::Lowered,
                Some(_) => Outcome::Marked,
            },
        }
    }

    /// A probe found the binding available. `[R-182]` `[R-183]`
    pub(crate) fn found(&mut self, seq: NonZeroU64) -> Outcome {
        if seq.get() <= self.mark {
            return Outcome::Stale;
        }
        self.mark = seq.get();
        match self.lowered.take() {
            None => Outcome::Marked,
            Some(_) => Outcome::Cleared,
        }
    }
}

/// Names one binding of a provider within a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BindingId(u32);

#[derive(Clone, Debug)]
struct Binding {
    id: BindingId,
    /// As it was configured: adapter and target are what counts.
    name: Arc<ProviderName>,
    record: Record,
}

/// Records of a provider's bindings, one per (adapter, target) that it has had within its generation:
/// a lease's evidence acts on its own, selection looks at the present one, and one that comes back
/// finds its old record. `[S-58]`
#[derive(Clone, Debug)]
pub(crate) struct Bindings {
    present: Binding,
    /// The oldest first, at most `BINDINGS_EARLIER_MAX`.
    earlier: VecDeque<Binding>,
    next: u32,
}

impl Bindings {
    pub(crate) fn new(name: &Arc<ProviderName>) -> Self {
        Self {
            present: Binding {
                id: BindingId(0),
                name: Arc::clone(name),
                record: Record::default(),
            },
            earlier: VecDeque::new(),
            next: 1,
        }
    }

    pub(crate) const fn present(&self) -> BindingId {
        self.present.id
    }

    /// Of the present binding.
    pub(crate) const fn record(&self) -> &Record {
        &self.present.record
    }

    pub(crate) const fn record_mut(&mut self) -> &mut Record {
        &mut self.present.record
    }

    /// Of one binding; `None`: it was forgotten.
    pub(crate) fn record_of(&mut self, id: BindingId) -> Option<&mut Record> {
        if self.present.id == id {
            return Some(&mut self.present.record);
        }
        let earlier = self.earlier.iter_mut().find(|known| known.id == id);
        earlier.map(|known| &mut known.record)
    }

    /// A generation begins or ends: nothing is known of any binding.
    pub(crate) fn renew(&mut self) {
        self.earlier.clear();
        self.present.record = Record::default();
    }

    /// The provider is configured so from here on.
    pub(crate) fn bind(&mut self, name: &Arc<ProviderName>) {
        let is_same = |known: &Binding| {
            (&known.name.adapter, &known.name.target) == (&name.adapter, &name.target)
        };
        if is_same(&self.present) {
            self.present.name = Arc::clone(name);
            return;
        }
        let known = self.earlier.iter().position(is_same);
        let fresh = match known.and_then(|at| self.earlier.remove(at)) {
            Some(known) => known,
            None => {
                self.next = self.next.wrapping_add(1);
                Binding {
                    id: BindingId(self.next),
                    name: Arc::clone(name),
                    record: Record::default(),
                }
            }
        };
        if self.earlier.len() == BINDINGS_EARLIER_MAX {
            self.earlier.pop_front();
        }
        let before = core::mem::replace(&mut self.present, fresh);
        self.earlier.push_back(before);
    }
}

#[cfg(test)]
mod tests {
    use iop_proto::catalog::ProviderKind;
    use iop_proto::ids::NodeIndex;

    use super::*;

    fn seq(value: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(value)
    }

    #[test]
    fn a_binding_that_comes_back_has_its_record_until_sixteen_others_stood_behind_it() {
        for others in [1, BINDINGS_EARLIER_MAX, BINDINGS_EARLIER_MAX + 1] {
            let node = NodeIndex::new(0).unwrap();
            let to = |target: usize| {
                let target = format!("t{target}");
                Arc::new(ProviderName::new(
                    "p",
                    node,
                    ProviderKind::Vllm,
                    "a",
                    &target,
                ))
            };
            let mut bindings = Bindings::new(&to(0));
            let first = bindings.present();
            let outcome = bindings
                .record_mut()
                .stall(HealthEvidence::Unavailable, seq(7));
            assert_eq!(outcome, Outcome::Lowered);
            for target in 1..=others {
                bindings.bind(&to(target));
                assert!(bindings.record().is_new(), "of its own");
                assert!(bindings.earlier.len() <= BINDINGS_EARLIER_MAX);
            }
            let is_known = others <= BINDINGS_EARLIER_MAX;
            assert_eq!(bindings.record_of(first).is_some(), is_known, "{others}");
            bindings.bind(&to(0));
            assert_eq!(bindings.present() == first, is_known, "{others}");
            assert_eq!(bindings.record().is_lowered(), is_known, "{others}");
            assert_eq!(bindings.record().is_new(), !is_known, "{others}");
            assert!(bindings.earlier.len() <= BINDINGS_EARLIER_MAX);
        }
    }

    /// Proves.
    #[test]
    fn r170_only_a_fresh_unavailable_stall_lowers() {
        for health in HealthEvidence::ALL {
            for (name, number) in [
                ("fresh", seq(8)),
                ("equal", seq(7)),
                ("lower", seq(5)),
                ("absent", None),
            ] {
                let mut record = Record::default();
                assert_eq!(record.found(seq(7).unwrap()), Outcome::Marked);
                let outcome = record.stall(health, number);
                let lowers = health == HealthEvidence::Unavailable && name == "fresh";
                assert_eq!(record.is_lowered(), lowers, "{health:?} {name}");
                assert_eq!(outcome == Outcome::Lowered, lowers, "{health:?} {name}");
                let expected = if name == "fresh" { 8 } else { 7 };
                assert_eq!(record.mark, expected, "{health:?} {name}");
                assert!(record.is_sound());
            }
        }
    }

    /// Proves.
    #[test]
    fn r182_only_a_higher_observation_clears_and_no_stall_does() {
        for (number, outcome) in [
            (4, Outcome::Stale),
            (5, Outcome::Stale),
            (6, Outcome::Cleared),
        ] {
            let mut record = Record::default();
            record.stall(HealthEvidence::Unavailable, seq(5));
            assert_eq!(record.found(seq(number).unwrap()), outcome, "{number}");
            assert_eq!(record.is_lowered(), outcome == Outcome::Stale);
        }
        let mut record = Record::default();
        record.stall(HealthEvidence::Unavailable, seq(1));
        let again = record.stall(HealthEvidence::Unavailable, seq(2));
        assert_eq!(again, Outcome::Marked, "no second transition");
        for health in [HealthEvidence::Available, HealthEvidence::Unknown] {
            record.stall(health, seq(record.mark + 1));
            assert!(record.is_lowered(), "a stall never clears: {health:?}");
        }
        assert_eq!(record.found(seq(4).unwrap()), Outcome::Stale);
        assert_eq!(record.found(seq(5).unwrap()), Outcome::Cleared);
    }
}
