//! HOT. Pools of a shard: blocks in chains, and single blocks. (Lending, which makes a list, is warm.)
//!
//! Lives on: one shard. Bound: each pool is made once with a fixed number of blocks; an empty pool
//! is an answer (`None`, `Dry`), never growth. The memory is taken zeroed from the system at start,
//! so that the kernel commits a page when it is first touched, and lives as long as the process.
use iop_proto::limits::BLOCK_BYTES;

/// The pool has no block left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dry;

/// Blocks handed out one by one, each as the slice it is.
#[derive(Debug)]
pub struct Pool {
    free: Vec<&'static mut [u8]>,
    count: usize,
}

impl Pool {
    #[must_use]
    pub fn new(count: usize, block_bytes: usize) -> Self {
        // cold: once, when the pool is made
        let region: &'static mut [u8] = vec![0; count * block_bytes].leak();
        let mut free: Vec<_> = region.chunks_exact_mut(block_bytes).collect();
        free.reverse(); // the lowest is taken first: fewest pages touched
        Self { free, count }
    }

    pub fn take(&mut self) -> Option<&'static mut [u8]> {
        self.free.pop()
    }

    /// Takes back a block of this pool.
    pub fn give(&mut self, block: &'static mut [u8]) {
        debug_assert!(self.free.len() < self.count, "a block came back twice");
        self.free.push(block);
    }

    /// Blocks handed out.
    #[must_use]
    pub fn used(&self) -> usize {
        self.count - self.free.len()
    }
}

/// Zeroed memory that lives as long as the process. Blocks of it may be lent to another thread for
/// reading, so it is reached through a pointer and never through one reference to all of it.
#[derive(Debug)]
struct Region {
    start: *mut u8,
    length: usize,
}

// SAFETY: the region belongs to whoever holds it; what it lends is described at `lend`.
unsafe impl Send for Region {}

impl Region {
    fn new(length: usize) -> Self {
        // cold: once, when the pool is made
        let region: &'static mut [u8] = vec![0; length].leak();
        Self {
            start: region.as_mut_ptr(),
            length,
        }
    }

    fn bytes(&self, from: usize, to: usize) -> &[u8] {
        assert!(from <= to && to <= self.length);
        // SAFETY: inside the region; a block is written only through `bytes_mut` of its one pool, on
        // this thread, and `&self` keeps that off while the slice lives.
        unsafe { std::slice::from_raw_parts(self.start.add(from), to - from) }
    }

    fn bytes_mut(&mut self, from: usize, to: usize) -> &mut [u8] {
        assert!(from <= to && to <= self.length);
        // SAFETY: inside the region; `&mut self` rules out other slices of this thread, and a lent
        // block is not in any chain, so nobody asks for its bytes until it is back.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), to - from) }
    }

    /// As `bytes`, for as long as the borrower likes: the memory is never freed, and the pool writes
    /// to a lent block only after `Chains::take_back`.
    fn lend(&self, from: usize, to: usize) -> &'static [u8] {
        assert!(from <= to && to <= self.length);
        // SAFETY: inside a region that lives for ever; see above for writes.
        unsafe { std::slice::from_raw_parts(self.start.add(from), to - from) }
    }
}

/// A block on loan: its bytes, and its row in the pool it belongs to.
#[derive(Clone, Copy, Debug)]
pub struct LentBlock {
    bytes: &'static [u8],
    row: u32,
}

impl LentBlock {
    #[must_use]
    pub const fn bytes(&self) -> &'static [u8] {
        self.bytes
    }
}

const NONE: u32 = u32::MAX;

/// What a block of a chain holds: bytes `start..end`, and the block behind it.
#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    start: u32,
    end: u32,
}

/// Blocks that form chains. A chain is a queue of bytes; several chains share the pool.
#[derive(Debug)]
pub struct Chains {
    region: Region,
    links: Vec<Link>,
    free: u32,
    used: u32,
    /// Blocks this pool may hand out.
    count: u32,
}

/// A queue of bytes in blocks of one `Chains`.
///
/// `head..tail` are linked blocks, all but the last full up to what their writer put there;
/// `bytes` is the sum of their `end - start`.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    head: u32,
    tail: u32,
    bytes: u64,
}

impl Default for Chain {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Chain {
    pub const EMPTY: Self = Self {
        head: NONE,
        tail: NONE,
        bytes: 0,
    };

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes in the chain.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The chain's content, leaving it empty: how a chain moves to another owner.
    #[must_use]
    pub const fn take(&mut self) -> Self {
        core::mem::replace(self, Self::EMPTY)
    }
}

/// A place in a chain to read from that leaves the chain whole.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    row: u32,
    /// Bytes of the block behind its `start` that were read.
    read: u32,
    left: u64,
}

impl Cursor {
    /// The chain's first byte.
    #[must_use]
    pub const fn start(chain: &Chain) -> Self {
        Self {
            row: chain.head,
            read: 0,
            left: chain.bytes,
        }
    }

    /// Bytes from here to the chain's end.
    #[must_use]
    pub const fn left(&self) -> u64 {
        self.left
    }
}

const BLOCK: usize = BLOCK_BYTES as usize;

impl Chains {
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        let links = (0..blocks)
            .map(|row| Link {
                next: if row + 1 < blocks { row + 1 } else { NONE },
                start: 0,
                end: 0,
            })
            .collect();
        Self {
            region: Region::new(blocks as usize * BLOCK),
            links,
            free: if blocks == 0 { NONE } else { 0 },
            used: 0,
            count: blocks,
        }
    }

    /// Blocks handed out.
    #[must_use]
    pub const fn used(&self) -> u32 {
        self.used
    }

    /// Blocks in all.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Blocks that can still be taken.
    #[must_use]
    pub const fn left(&self) -> u32 {
        self.count - self.used
    }

    fn grow(&mut self, chain: &mut Chain) -> Result<usize, Dry> {
        let row = self.free;
        if row == NONE {
            return Err(Dry);
        }
        self.free = self.links[row as usize].next;
        self.used += 1;
        self.links[row as usize] = Link {
            next: NONE,
            start: 0,
            end: 0,
        };
        if chain.head == NONE {
            chain.head = row;
        } else {
            self.links[chain.tail as usize].next = row;
        }
        chain.tail = row;
        Ok(row as usize)
    }

    /// Free bytes at the end of the chain's last block.
    fn tail_room(&self, chain: &Chain) -> usize {
        if chain.tail == NONE {
            0
        } else {
            BLOCK - self.links[chain.tail as usize].end as usize
        }
    }

    /// Contiguous room of at least `least` bytes at the chain's end; a new block if need be.
    ///
    /// # Errors
    /// When a new block is needed and none is left.
    pub fn room(&mut self, chain: &mut Chain, least: usize) -> Result<&mut [u8], Dry> {
        debug_assert!(least <= BLOCK);
        let row = if self.tail_room(chain) >= least.max(1) {
            chain.tail as usize
        } else {
            self.grow(chain)?
        };
        let end = self.links[row].end as usize;
        Ok(self.region.bytes_mut(row * BLOCK + end, (row + 1) * BLOCK))
    }

    /// The first `bytes` of what `room` gave are now part of the chain.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a block is shorter than 2^32"
    )]
    pub fn commit(&mut self, chain: &mut Chain, bytes: usize) {
        let link = &mut self.links[chain.tail as usize];
        link.end += bytes as u32;
        debug_assert!(link.end <= BLOCK_BYTES);
        chain.bytes += bytes as u64;
    }

    /// Appends a copy of `bytes`.
    ///
    /// # Errors
    /// When the pool runs dry; what was appended until then stays.
    pub fn append(&mut self, chain: &mut Chain, mut bytes: &[u8]) -> Result<(), Dry> {
        while !bytes.is_empty() {
            let room = self.room(chain, 1)?;
            let part = room.len().min(bytes.len());
            room[..part].copy_from_slice(&bytes[..part]);
            self.commit(chain, part);
            bytes = &bytes[part..];
        }
        Ok(())
    }

    /// Returns every block of the chain but its first.
    pub fn keep_first(&mut self, chain: &mut Chain) {
        if chain.head == NONE {
            return;
        }
        let first = &mut self.links[chain.head as usize];
        let mut row = std::mem::replace(&mut first.next, NONE);
        chain.bytes = u64::from(first.end - first.start);
        chain.tail = chain.head;
        while row != NONE {
            let next = self.links[row as usize].next;
            self.free_block(row);
            row = next;
        }
    }

    /// Puts `behind` at the end of `chain`.
    pub fn join(&mut self, chain: &mut Chain, behind: Chain) {
        if chain.head == NONE {
            *chain = behind;
        } else if behind.head != NONE {
            self.links[chain.tail as usize].next = behind.head;
            chain.tail = behind.tail;
            chain.bytes += behind.bytes;
        }
    }

    /// The chain's first contiguous bytes; empty when the chain is.
    #[must_use]
    pub fn front(&self, chain: &Chain) -> &[u8] {
        if chain.head == NONE {
            return &[];
        }
        let row = chain.head as usize;
        let link = self.links[row];
        self.region.bytes(
            row * BLOCK + link.start as usize,
            row * BLOCK + link.end as usize,
        )
    }

    /// Drops the chain's first `bytes`.
    #[expect(clippy::cast_possible_truncation, reason = "part of a block")]
    pub fn consume(&mut self, chain: &mut Chain, mut bytes: usize) {
        debug_assert!(bytes as u64 <= chain.bytes);
        chain.bytes -= bytes as u64;
        while chain.head != NONE {
            let row = chain.head as usize;
            let link = &mut self.links[row];
            let held = (link.end - link.start) as usize;
            if bytes < held {
                link.start += bytes as u32;
                return;
            }
            bytes -= held;
            let next = link.next;
            self.free_block(chain.head);
            chain.head = next;
        }
        chain.tail = NONE;
        debug_assert!(bytes == 0);
    }

    /// The contiguous bytes at a place of a chain of this pool; empty at its end.
    #[must_use]
    pub fn at(&self, cursor: &Cursor) -> &[u8] {
        if cursor.row == NONE {
            return &[];
        }
        let row = cursor.row as usize;
        let link = self.links[row];
        let from = row * BLOCK + (link.start + cursor.read) as usize;
        self.region.bytes(from, row * BLOCK + link.end as usize)
    }

    /// Reads on by `bytes` of what follows.
    #[expect(clippy::cast_possible_truncation, reason = "part of a block")]
    pub fn advance(&self, cursor: &mut Cursor, mut bytes: usize) {
        debug_assert!(bytes as u64 <= cursor.left);
        cursor.left -= bytes as u64;
        while cursor.row != NONE {
            let link = self.links[cursor.row as usize];
            let held = (link.end - link.start - cursor.read) as usize;
            if bytes < held {
                cursor.read += bytes as u32;
                return;
            }
            bytes -= held;
            (cursor.row, cursor.read) = (link.next, 0);
        }
    }

    fn free_block(&mut self, row: u32) {
        self.links[row as usize].next = self.free;
        self.free = row;
        self.used -= 1;
    }

    /// Returns every block of the chain.
    pub fn clear(&mut self, chain: &mut Chain) {
        let mut row = chain.head;
        while row != NONE {
            let next = self.links[row as usize].next;
            self.free_block(row);
            row = next;
        }
        *chain = Chain::EMPTY;
    }

    /// Takes the chain apart to be read by another thread; its blocks stay used until `take_back`.
    #[must_use]
    // cold: once per request that moves to another shard
    pub fn lend(&mut self, chain: &mut Chain) -> Box<[LentBlock]> {
        // cold: once per request that moves to another shard
        let mut blocks = Vec::with_capacity(self.used as usize);
        let mut row = chain.head;
        while row != NONE {
            let link = self.links[row as usize];
            let at = row as usize * BLOCK;
            let bytes = self
                .region
                .lend(at + link.start as usize, at + link.end as usize);
            blocks.push(LentBlock { bytes, row });
            row = link.next;
        }
        *chain = Chain::EMPTY;
        blocks.into_boxed_slice() // cold: as above
    }

    /// Takes back what this pool lent; the borrower has let go of the bytes.
    pub fn take_back(&mut self, blocks: &[LentBlock]) {
        for block in blocks {
            self.free_block(block.row);
        }
    }

    /// Visits the chain's contiguous pieces, front to back.
    pub fn pieces<'a>(&'a self, chain: &Chain) -> impl Iterator<Item = &'a [u8]> + 'a {
        let mut row = chain.head;
        core::iter::from_fn(move || {
            if row == NONE {
                return None;
            }
            let at = row as usize * BLOCK;
            let link = self.links[row as usize];
            row = link.next;
            Some(
                self.region
                    .bytes(at + link.start as usize, at + link.end as usize),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_a_queue_of_bytes_and_gives_every_block_back() {
        let mut pool = Chains::new(4);
        let (mut a, mut b) = (Chain::EMPTY, Chain::EMPTY);
        let bytes: Vec<u8> = (0..BLOCK * 2 + 100)
            .map(|n| (n % 251).to_le_bytes()[0])
            .collect();
        pool.append(&mut a, &bytes).unwrap();
        assert_eq!((pool.used(), a.bytes()), (3, bytes.len() as u64));
        pool.append(&mut b, b"other").unwrap();
        assert_eq!(pool.append(&mut b, &vec![0; BLOCK]), Err(Dry));
        assert_eq!(b.bytes(), BLOCK as u64); // what fitted stays
        let mut seen = Vec::new();
        while !a.is_empty() {
            let part = pool.front(&a).len().min(1000);
            seen.extend_from_slice(&pool.front(&a)[..part]);
            pool.consume(&mut a, part);
        }
        assert_eq!(seen, bytes);
        pool.clear(&mut b);
        assert_eq!(pool.used(), 0);
        assert!(pool.front(&a).is_empty());
    }

    #[test]
    fn room_is_contiguous_and_reused_after_the_chain_is_drained() {
        let mut pool = Chains::new(2);
        let mut chain = Chain::EMPTY;
        for _ in 0..10 {
            let room = pool.room(&mut chain, BLOCK - 10).unwrap();
            assert!(room.len() >= BLOCK - 10);
            room[0] = 7;
            pool.commit(&mut chain, 20);
            assert_eq!(pool.front(&chain)[0], 7);
            pool.consume(&mut chain, 20);
        }
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn joined_chains_read_as_one() {
        let mut pool = Chains::new(5);
        let (mut first, mut second) = (Chain::EMPTY, Chain::EMPTY);
        pool.append(&mut first, &vec![1; BLOCK + 10]).unwrap();
        pool.append(&mut second, &vec![2; BLOCK + 10]).unwrap();
        pool.join(&mut first, second);
        pool.append(&mut first, &[3; 10]).unwrap();
        let bytes: Vec<u8> = pool.pieces(&first).flatten().copied().collect();
        let expected = [vec![1; BLOCK + 10], vec![2; BLOCK + 10], vec![3; 10]].concat();
        assert_eq!(
            (bytes, first.bytes()),
            (expected.clone(), expected.len() as u64)
        );
        let mut empty = Chain::EMPTY;
        pool.join(&mut empty, first);
        pool.keep_first(&mut empty);
        assert_eq!((pool.used(), empty.bytes()), (1, BLOCK as u64));
        pool.clear(&mut empty);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn a_cursor_reads_a_chain_and_leaves_it_whole() {
        let mut pool = Chains::new(3);
        let mut chain = Chain::EMPTY;
        let bytes: Vec<u8> = (0..BLOCK * 2 + 100)
            .map(|n| (n % 251).to_le_bytes()[0])
            .collect();
        pool.append(&mut chain, &bytes).unwrap();
        for step in [1_000, BLOCK, BLOCK + 1, bytes.len()] {
            let mut cursor = Cursor::start(&chain);
            let mut seen = Vec::new();
            while cursor.left() > 0 {
                let part = pool.at(&cursor).len().min(step);
                seen.extend_from_slice(&pool.at(&cursor)[..part]);
                pool.advance(&mut cursor, part);
            }
            assert!(seen == bytes && pool.at(&cursor).is_empty());
        }
        let mut over_blocks = Cursor::start(&chain);
        pool.advance(&mut over_blocks, BLOCK + 7);
        assert_eq!(pool.at(&over_blocks)[0], bytes[BLOCK + 7]);
        assert_eq!((pool.used(), chain.bytes()), (3, bytes.len() as u64));
        pool.clear(&mut chain);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn an_empty_pool_says_so() {
        let mut pool = Pool::new(1, 8);
        let block = pool.take().unwrap();
        assert!(pool.take().is_none());
        assert_eq!(pool.used(), 1);
        pool.give(block);
        assert_eq!(pool.used(), 0);
    }
}
