//! What of a request decides who can take it: operation and length.
//!
//! Lives on: control. Bound: twelve classes, four kinds.
use iop_proto::catalog::Operation;

/// Operation and length of a request. Requests of one model and class have the same candidates, so
/// the oldest of them stands for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Class {
    operation: Operation,
    long: bool,
}

impl Class {
    pub(crate) const COUNT: usize = 2 * Operation::ALL.len();

    #[must_use]
    pub(crate) const fn new(operation: Operation, long: bool) -> Self {
        Self { operation, long }
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Operation::ALL
            .into_iter()
            .flat_map(|operation| [false, true].map(|long| Self { operation, long }))
    }

    #[must_use]
    pub(crate) const fn operation(self) -> Operation {
        self.operation
    }

    #[must_use]
    pub(crate) const fn is_long(self) -> bool {
        self.long
    }

    #[must_use]
    pub(crate) fn is_count_tokens(self) -> bool {
        self.operation == Operation::CountTokens
    }

    pub(crate) const fn row(self) -> usize {
        2 * self.operation as usize + self.long as usize
    }

    pub(crate) fn kind(self) -> Kind {
        Kind(2 * u8::from(self.is_count_tokens()) + u8::from(self.long))
    }
}

/// What a provider's load depends on: whether a request is long, and whether it counts tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind(u8);

impl Kind {
    pub(crate) const COUNT: usize = 4;

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [Self(0), Self(1), Self(2), Self(3)].into_iter()
    }

    pub(crate) const fn row(self) -> usize {
        self.0 as usize
    }

    pub(crate) const fn is_long(self) -> bool {
        self.0 & 1 != 0
    }

    pub(crate) const fn is_count_tokens(self) -> bool {
        self.0 & 2 != 0
    }
}

/// The kinds a provider can take one more of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds(u8);

impl Kinds {
    pub(crate) const NONE: Self = Self(0);

    #[must_use]
    pub(crate) const fn with(self, kind: Kind) -> Self {
        Self(self.0 | 1 << kind.0)
    }

    pub(crate) const fn contains(self, kind: Kind) -> bool {
        self.0 & 1 << kind.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_kinds_are_distinct() {
        let mut rows: Vec<_> = Class::all().map(Class::row).collect();
        rows.dedup();
        assert_eq!(rows, (0..Class::COUNT).collect::<Vec<_>>());
        for class in Class::all() {
            let kind = class.kind();
            assert_eq!(kind.is_long(), class.is_long());
            assert_eq!(kind.is_count_tokens(), class.is_count_tokens());
        }
        let some = Kinds::NONE.with(Kind(3)).with(Kind(0));
        assert_eq!(
            [0, 1, 2, 3].map(|k| some.contains(Kind(k))),
            [true, false, false, true]
        );
    }
}
