//! What several test files share: a seeded dice and raw protobuf fields.
//!
//! Lives on: test threads. Bound: the caller's counts.
#![allow(dead_code, reason = "every test file uses its own part")]

/// SplitMix64: small, seeded, the same everywhere.
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

    /// 0 .. `bound`; 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound.max(1) as u64)).expect("less than a usize")
    }

    /// True once in `n`.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Small, large, negative as int64, or any.
    pub(crate) fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => 0,
            1 => self.next() % 6,
            2 => u64::MAX - self.next() % 3,
            3 => 1 << self.below(64),
            4 => self.next() % 1000,
            _ => self.next(),
        }
    }

    pub(crate) fn text(&mut self) -> String {
        let words = [
            "",
            "a",
            "content-type",
            "0123456789abcdef0123456789abcdef",
            "é",
            "start",
            "日本",
        ];
        self.pick(&words).to_owned()
    }

    pub(crate) fn bytes(&mut self, longest: usize) -> Vec<u8> {
        let length = self.below(longest + 1);
        (0..length).map(|_| self.byte()).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

pub(crate) const VARINT: u32 = 0;
pub(crate) const FIXED64: u32 = 1;
pub(crate) const LEN: u32 = 2;
pub(crate) const GROUP: u32 = 3;
pub(crate) const GROUP_END: u32 = 4;
pub(crate) const FIXED32: u32 = 5;

pub(crate) fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

/// The same value with up to ten bytes: legal, but no encoder writes it.
pub(crate) fn long_varint(value: u64, bytes: usize, out: &mut Vec<u8>) {
    let mut short = Vec::new();
    varint(value, &mut short);
    while short.len() < bytes.min(10) {
        let last = short.len() - 1;
        short[last] |= 0x80;
        short.push(0);
    }
    out.extend_from_slice(&short);
}

pub(crate) fn key(number: u32, wire: u32, out: &mut Vec<u8>) {
    varint(u64::from(number << 3 | wire), out);
}

pub(crate) fn len_field(number: u32, content: &[u8], out: &mut Vec<u8>) {
    key(number, LEN, out);
    varint(content.len() as u64, out);
    out.extend_from_slice(content);
}

pub(crate) fn varint_field(number: u32, value: u64, out: &mut Vec<u8>) {
    key(number, VARINT, out);
    varint(value, out);
}

/// Lower-case hex with spaces, for golden bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<Vec<_>>()
        .join(" ")
}
