//! Choices that an input makes for itself: seeded by its bytes, the same on every run.
//!
//! Lives on: one thread. Bound: one word.

/// SplitMix64.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// Seeded by FNV-1a of `data`.
    pub(crate) fn of(data: &[u8]) -> Self {
        let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        Self(data.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `0 <= result < below`; `below` is at least 1.
    pub(crate) fn below(&mut self, below: usize) -> usize {
        usize::try_from(self.next() % below as u64).expect("less than a usize")
    }

    /// `data` cut into pieces of 1 to `largest` bytes.
    pub(crate) fn pieces<'a>(&mut self, mut data: &'a [u8], largest: usize) -> Vec<&'a [u8]> {
        let mut pieces = Vec::new();
        while !data.is_empty() {
            let (piece, rest) = data.split_at((1 + self.below(largest)).min(data.len()));
            pieces.push(piece);
            data = rest;
        }
        pieces
    }
}

/// Bytewise, small pieces, and about as a socket would: each with its own hazards.
pub(crate) const LARGEST_PIECES: [usize; 3] = [1, 9, 1_500];
