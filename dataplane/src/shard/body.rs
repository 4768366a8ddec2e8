//! Request bodies: reserved at the head, collected in blocks, read once on their way to the node.
//!
//! Lives on: one shard. Bound: the body pool; a Content-Length is reserved whole before the first
//! byte is taken, a chunked body in steps of `BODY_STEP_BYTES`. `[D-45]`
use iop_proto::limits::BLOCK_BYTES;

use super::buffer::{Chain, Chains};

/// A collected body and the place of its `model` value.
///
/// ```text
///  0          model_start       model_end            bytes
///  +----------+-----------------+--------------------+
///  | untouched| replaced        | untouched          |
///  +----------+-----------------+--------------------+
/// ```
#[derive(Debug, Default)]
pub(super) struct Request {
    pub body: Chain,
    /// Offsets of the JSON string, quotes included, in the body.
    pub model_start: u64,
    pub model_end: u64,
    /// The body asks for a stream.
    pub stream: bool,
}

impl Request {
    pub(super) fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    pub(super) fn clear(&mut self, pool: &mut Chains) {
        pool.clear(&mut self.body);
    }

    /// Bytes of the body once `model` is `replacement` bytes long.
    pub(super) const fn spliced_bytes(&self, replacement: usize) -> u64 {
        self.body.bytes() - (self.model_end - self.model_start) + replacement as u64
    }
}

/// Blocks promised to bodies that have not arrived.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    blocks: u32,
}

/// Blocks that `bytes` need.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a body is at most body_bytes_max"
)]
pub(super) const fn blocks_for(bytes: u64) -> u32 {
    bytes.div_ceil(BLOCK_BYTES as u64) as u32
}

impl Reservations {
    /// Promises `blocks`; `false` when the pool cannot keep the promise.
    pub(super) fn reserve(&mut self, pool: &Chains, blocks: u32) -> bool {
        let free = pool.left().saturating_sub(self.blocks);
        let fits = blocks <= free;
        if fits {
            self.blocks += blocks;
        }
        fits
    }

    /// `blocks` of a promise were taken from the pool, or are not needed any more.
    pub(super) fn release(&mut self, blocks: u32) {
        self.blocks -= blocks;
    }

    /// Blocks promised and not taken.
    pub(super) const fn outstanding(&self) -> u32 {
        self.blocks
    }
}
