//! Request bodies: reserved at the head, collected in blocks, read once on their way to the node.
//!
//! Lives on: one shard. Bound: the body pool; a Content-Length is reserved whole before the first
//! byte is taken, a chunked body in steps of `BODY_STEP_BYTES`. `[D-45]`
use core::ops::Range;

use iop_proto::ids::ShardIndex;
use iop_proto::limits::BLOCK_BYTES;

use super::buffer::{Chain, Chains, Cursor, LentBlock};

/// The bytes of a body: in a chain of this shard's pool, given back as they are read or kept for a
/// second run, or on loan from the shard that collected it.
#[derive(Debug)]
pub(super) enum Body {
    Own(Chain),
    Kept(Chain, Cursor),
    Lent(Lent),
}

/// A body on loan, read from the front.
#[derive(Debug)]
pub(super) struct Lent {
    /// Whose pool the blocks belong to.
    pub owner: ShardIndex,
    pub blocks: Box<[LentBlock]>,
    /// First block that is not read to its end, and how much of it is read.
    at: usize,
    offset: usize,
    left: u64,
}

impl Default for Body {
    fn default() -> Self {
        Self::Own(Chain::EMPTY)
    }
}

impl Body {
    /// Bytes that have not been consumed.
    pub(super) const fn bytes(&self) -> u64 {
        match self {
            Self::Own(chain) => chain.bytes(),
            Self::Kept(_, cursor) => cursor.left(),
            Self::Lent(lent) => lent.left,
        }
    }

    /// Its first contiguous bytes; empty when nothing is left.
    pub(super) fn front<'a>(&'a self, pool: &'a Chains) -> &'a [u8] {
        match self {
            Self::Own(chain) => pool.front(chain),
            Self::Kept(_, cursor) => pool.at(cursor),
            Self::Lent(lent) => lent
                .blocks
                .get(lent.at)
                .map_or(&[], |b| &b.bytes()[lent.offset..]),
        }
    }

    /// Drops its first `bytes`.
    pub(super) fn consume(&mut self, pool: &mut Chains, mut bytes: usize) {
        match self {
            Self::Own(chain) => pool.consume(chain, bytes),
            Self::Kept(_, cursor) => pool.advance(cursor, bytes),
            Self::Lent(lent) => {
                lent.left -= bytes as u64;
                while let Some(block) = lent.blocks.get(lent.at) {
                    let held = block.bytes().len() - lent.offset;
                    if bytes < held {
                        lent.offset += bytes;
                        return;
                    }
                    bytes -= held;
                    (lent.at, lent.offset) = (lent.at + 1, 0);
                }
            }
        }
    }

    /// The chain of a body that is being collected here.
    pub(super) fn collecting(&mut self) -> &mut Chain {
        match self {
            Self::Own(chain) => chain,
            Self::Kept(..) | Self::Lent(_) => unreachable!("it is whole"),
        }
    }

    /// Lets go of it: blocks of `pool` go back at once, lent ones are returned for their owner.
    pub(super) fn clear(&mut self, pool: &mut Chains) -> Option<Lent> {
        match std::mem::take(self) {
            Self::Own(mut chain) | Self::Kept(mut chain, _) => {
                pool.clear(&mut chain);
                None
            }
            Self::Lent(lent) => Some(lent),
        }
    }

    /// From here on reading leaves it whole, so that it can be read again.
    pub(super) fn keep(&mut self) {
        if let Self::Own(chain) = self {
            let chain = chain.take();
            *self = Self::Kept(chain, Cursor::start(&chain));
        }
    }

    /// Back to its first byte, if all of it is still here.
    pub(super) fn rewind(&mut self) -> bool {
        match self {
            Self::Own(_) => return false,
            Self::Kept(chain, cursor) => *cursor = Cursor::start(chain),
            Self::Lent(lent) => {
                (lent.at, lent.offset) = (0, 0);
                let blocks = lent.blocks.iter();
                lent.left = blocks.map(|block| block.bytes().len() as u64).sum();
            }
        }
        true
    }

    /// Makes it readable by another shard.
    pub(super) fn lend(self, pool: &mut Chains, owner: ShardIndex) -> Self {
        match self {
            Self::Own(mut chain) | Self::Kept(mut chain, _) => {
                let left = chain.bytes();
                let blocks = pool.lend(&mut chain);
                Self::Lent(Lent {
                    owner,
                    blocks,
                    at: 0,
                    offset: 0,
                    left,
                })
            }
            lent @ Self::Lent(_) => lent,
        }
    }
}

/// A collected body and the place of its `model`.
///
/// ```text
///  0          cut.start         cut.end              bytes
///  +----------+-----------------+--------------------+
///  | untouched| replaced, gone  | untouched          |
///  +----------+-----------------+--------------------+
/// ```
#[derive(Debug, Default)]
pub(super) struct Request {
    pub body: Body,
    /// The JSON string, quotes included: a tunnel gets another one in its place.
    pub model: Range<u64>,
    /// The whole member and a comma: a run's input has none. `[D-50]`
    pub member: Range<u64>,
    /// The body asks for a stream, and for its usage.
    pub stream: bool,
    pub include_usage: bool,
    /// It offers tools.
    pub tools: bool,
}

impl Request {
    pub(super) fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// What of the body does not reach the node, by the family of its request.
    pub(super) const fn cut(&self, is_tunnel: bool) -> &Range<u64> {
        if is_tunnel { &self.model } else { &self.member }
    }

    /// Bytes of the body once `replacement` bytes stand where it was cut.
    pub(super) const fn spliced_bytes(&self, is_tunnel: bool, replacement: usize) -> u64 {
        let cut = self.cut(is_tunnel);
        self.body.bytes() - (cut.end - cut.start) + replacement as u64
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
}
