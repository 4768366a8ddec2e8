//! Every choice of a run: seeded, the same each time.
//!
//! Lives on: one thread. Bound: one word.

/// `SplitMix64`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// The stream of choices that `seed` and `salt` name.
    pub(crate) fn new(seed: u64, salt: u64) -> Self {
        let mut mixed = Self(seed);
        let seed = mixed.next();
        Self(seed ^ salt.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `low <= result <= high`.
    pub(crate) fn between(&mut self, low: u32, high: u32) -> u32 {
        let span = u64::from(high - low) + 1;
        low + u32::try_from(self.next() % span).expect("below a u32")
    }

    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.between(1, 100) <= percent
    }

    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        let last = u32::try_from(all.len() - 1).expect("a short list");
        all[self.between(0, last) as usize]
    }
}
