//! API keys: who presents one, and which models it may name.
//!
//! Lives on: shards, shared read-only. View: one configuration. Bound: `KEYS_MAX` keys, one bit each
//! per configured model.
use core::fmt;
use core::hint::black_box;

use iop_proto::ids::{KeyIndex, ModelIndex};
use iop_proto::limits::KEYS_MAX;
use iop_proto::reason::Reason;
use ring::digest::{SHA256, digest};

use crate::config::ApiKey;

/// On whose behalf a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// No keys are configured. `[D-15]`
    Anyone,
    Key(KeyIndex),
}

/// The keys of one configuration, known by their SHA-256 alone. `Debug` shows how many there are.
/// `[D-15]` `[D-43]`
pub struct KeyTable {
    hashes: Vec<[u8; 32]>,
    /// By row; empty: every model.
    permitted: Vec<Vec<u64>>,
}

impl fmt::Debug for KeyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} keys>", self.hashes.len())
    }
}

impl KeyTable {
    /// No keys: everyone is served. The configuration has been checked to say so on purpose or to
    /// listen on loopback only.
    ///
    /// # Panics
    /// With more than `KEYS_MAX` keys; the configuration refuses them.
    #[must_use]
    pub fn new(keys: &[ApiKey]) -> Self {
        assert!(
            keys.len() <= KEYS_MAX as usize,
            "more keys than a table holds"
        );
        Self {
            hashes: keys.iter().map(|key| key.hash).collect(),
            permitted: keys
                .iter()
                .map(|key| key.models.as_deref().map_or_else(Vec::new, bits))
                .collect(),
        }
    }

    /// Who may go on with `presented`, the key of a request head, if any.
    ///
    /// # Errors
    /// `KeyMissing` when keys are configured and this is none of them.
    pub fn admit(&self, presented: Option<&[u8]>) -> Result<Caller, Reason> {
        if self.hashes.is_empty() {
            return Ok(Caller::Anyone);
        }
        let key = presented.and_then(|presented| self.authenticate(presented));
        key.map(Caller::Key).ok_or(Reason::KeyMissing)
    }

    /// The configured key that `presented` is. Its hash is compared with every configured one, each
    /// in a time that depends on neither; of equal ones the last counts.
    #[must_use]
    pub fn authenticate(&self, presented: &[u8]) -> Option<KeyIndex> {
        let hash = digest(&SHA256, presented);
        let hash: &[u8; 32] = hash.as_ref().try_into().expect("SHA-256 has 32 bytes");
        let mut found = usize::MAX;
        for (row, known) in self.hashes.iter().enumerate() {
            let mask = black_box(all_ones_if_equal(hash, known));
            found = (row & mask) | (found & !mask);
        }
        KeyIndex::new(found)
    }

    /// The caller may name the model, and sees it listed.
    #[must_use]
    pub fn permits(&self, caller: Caller, model: ModelIndex) -> bool {
        let Caller::Key(key) = caller else {
            return true;
        };
        match self.permitted[key.row()].as_slice() {
            [] => true,
            words => words
                .get(model.row() / 64)
                .is_some_and(|w| w >> (model.row() % 64) & 1 == 1),
        }
    }
}

/// One bit per permitted model; never empty.
fn bits(models: &[ModelIndex]) -> Vec<u64> {
    let last = models.iter().map(|model| model.row()).max().unwrap_or(0);
    let mut words = vec![0; last / 64 + 1];
    for model in models {
        words[model.row() / 64] |= 1 << (model.row() % 64);
    }
    words
}

/// Looks at every byte of both, without a branch on any.
fn all_ones_if_equal(a: &[u8; 32], b: &[u8; 32]) -> usize {
    let differing = a
        .iter()
        .zip(b)
        .fold(0u8, |bits, (a, b)| black_box(bits | (a ^ b)));
    // 0 - 1 borrows through every bit; 1..=255 - 1 leaves the top one clear.
    let borrow = usize::from(differing).wrapping_sub(1) >> (usize::BITS - 1);
    0usize.wrapping_sub(borrow)
}
