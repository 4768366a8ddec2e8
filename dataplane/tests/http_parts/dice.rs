//! Seeded random numbers (SplitMix64): a failing run is named by its seed.

#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `0 <= result < below`.
    pub(crate) fn below(&mut self, below: usize) -> usize {
        usize::try_from(self.next() % below as u64).unwrap()
    }

    /// True once in `n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Changes, drops, doubles or inserts a byte, from `bytes` itself or from `alphabet`.
    pub(crate) fn mutate(&mut self, bytes: &mut Vec<u8>, alphabet: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.below(bytes.len());
        let new = self.pick(alphabet);
        match self.below(4) {
            0 => bytes[at] = new,
            1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, bytes[at]),
            _ => bytes.insert(at, new),
        }
    }
}
