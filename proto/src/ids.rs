//! Identifiers. An index says where; a generation says which tenant of that place.
//!
//! Lives on: any thread. Bound: the tables of `limits`.
use core::fmt;
use core::num::{NonZeroU32, NonZeroU64};

/// Monotonic time since process start, nanoseconds. Handed in, never read here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now(u64);

impl Now {
    #[must_use]
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// This instant plus `ms` milliseconds, saturating.
    #[must_use]
    pub const fn after_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }

    /// Milliseconds from `earlier` to this instant; 0 when `earlier` is later.
    #[must_use]
    pub const fn ms_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000_000
    }
}

/// Names one claim of a node id. Strictly increasing in the process, never reused, never on a wire.
/// `[A-06]` `[R-051]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(NonZeroU64);

impl Generation {
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// The next claim's generation; `None` once 2^64 are spent.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }

    /// For logs and tests only.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// Which tenant of a slot. Counts up each time the slot is taken; a slot whose count is spent retires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotGeneration(NonZeroU32);

impl SlotGeneration {
    pub const FIRST: Self = Self(NonZeroU32::MIN);

    #[must_use]
    pub fn new(value: u32) -> Option<Self> {
        NonZeroU32::new(value).map(Self)
    }

    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }

    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

macro_rules! row_index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u16);

        impl $name {
            /// `None` when `row` does not fit the table's index.
            #[must_use]
            pub fn new(row: usize) -> Option<Self> {
                u16::try_from(row).ok().map(Self)
            }

            #[must_use]
            pub const fn row(self) -> usize {
                self.0 as usize
            }
        }
    };
}

row_index! {
    /// A configured node: its row in the name table.
    NodeIndex
}
row_index! {
    /// A configured provider: its row in the name table.
    ProviderIndex
}
row_index! {
    /// A configured model (a model group of providers): its row in the name table.
    ModelIndex
}
row_index! {
    /// A configured API key: its row in the key table.
    KeyIndex
}

/// One shard thread: `0 <= index < SHARDS_MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardIndex(u8);

impl ShardIndex {
    #[must_use]
    pub fn new(row: usize) -> Option<Self> {
        u8::try_from(row)
            .ok()
            .filter(|&r| u32::from(r) < crate::limits::SHARDS_MAX)
            .map(Self)
    }

    #[must_use]
    pub const fn row(self) -> usize {
        self.0 as usize
    }
}

macro_rules! slot_ref {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name {
            pub shard: ShardIndex,
            /// Row of the shard's table.
            pub slot: u32,
            /// Tenant of that row; compared before anything is done to it.
            pub generation: SlotGeneration,
        }
    };
}

slot_ref! {
    /// One node connection, on the shard that owns its socket.
    SessionRef
}
slot_ref! {
    /// One HTTP client connection, on the shard that owns its socket right now.
    ClientRef
}
slot_ref! {
    /// One run, on the shard of its node's session. Control allocates and frees the slot. `[D-32]`
    RunRef
}

/// Names one refresh of a node's configuration. Counts up in the process, never reused; on the wire
/// in decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefreshId(NonZeroU64);

impl RefreshId {
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// The next refresh's name; `None` once 2^64 are spent.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }

    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// What a node's answer names; `None`: not a name this process could have made.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let canonical = !text.starts_with(['0', '+']);
        let value = text.parse().ok().filter(|_| canonical);
        value.and_then(NonZeroU64::new).map(Self)
    }
}

/// Random per Edge process, so that run ids of two processes never meet. `[A-58]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootNonce(pub u64);

/// A run's id on the wire: 32 lower-case hex digits. `[A-58]`
///
/// ```text
///  0        16       24                 32   digits
///  +--------+--------+------------------+
///  | nonce  | slot   | slot generation  |    slot = shard << 24 | row
///  +--------+--------+------------------+
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RunId([u8; 32]);

const HEX: &[u8; 16] = b"0123456789abcdef";

impl RunId {
    #[must_use]
    pub fn new(nonce: BootNonce, run: RunRef) -> Self {
        let place = (u64::from(run.shard.0) << 56)
            | (u64::from(run.slot & 0x00ff_ffff) << 32)
            | u64::from(run.generation.get());
        let mut text = [0; 32];
        for (half, value) in [(0, nonce.0), (16, place)] {
            for digit in 0..16 {
                text[half + digit] = HEX[((value >> (60 - 4 * digit)) & 15) as usize];
            }
        }
        Self(text)
    }

    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.0).expect("hex digits are ASCII")
    }

    /// The row of its shard's table that a run id of ours names, for any bytes; `None` for another
    /// length. Says nothing about the rest of `text`: the caller compares all of it with the id
    /// that the row holds.
    #[must_use]
    pub fn row(text: &[u8]) -> Option<usize> {
        let text: &[u8; 32] = text.try_into().ok()?;
        // Whatever is no digit gives some row, whose own id then differs.
        let row = text[18..24].iter().fold(0, |row, &digit| {
            row << 4 | usize::from((digit & 15) + (digit >> 6) * 9) & 15
        });
        Some(row)
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

const _: () = {
    assert!(size_of::<SessionRef>() == 12);
    assert!(size_of::<Option<Generation>>() == 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_id_names_its_slot_and_nothing_else() {
        let run = RunRef {
            shard: ShardIndex::new(3).unwrap(),
            slot: 0x00ab_cdef,
            generation: SlotGeneration::new(0x1234_5678).unwrap(),
        };
        let nonce = BootNonce(0xfedc_ba98_7654_3210);
        let id = RunId::new(nonce, run);
        assert_eq!(id.as_str(), "fedcba987654321003abcdef12345678");
        assert_eq!(RunId::row(id.as_bytes()), Some(0x00ab_cdef));
        assert_eq!(RunId::row(&id.as_bytes()[..31]), None);
        assert_eq!(RunId::row(&[id.as_bytes().as_slice(), b"0"].concat()), None);
        for row in [0, 9, 10, 0x00f0_0f0f, 0x00ff_ffff] {
            let id = RunId::new(nonce, RunRef { slot: row, ..run });
            assert_eq!(RunId::row(id.as_bytes()), Some(row as usize));
        }
        for byte in 0..=u8::MAX {
            assert!(RunId::row(&[byte; 32]).is_some_and(|row| row < 1 << 24));
        }
    }
}
