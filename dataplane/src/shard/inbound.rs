//! HOT. Received bytes to plaintext: records that lie in one receive buffer are opened in place and
//! their plaintext joined; a record that straddles two is completed in a carried block.
//!
//! Lives on: one shard, one per TLS connection. Bound: one carried block of one record.
use iop_proto::limits::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES};
use iop_proto::reason::Reason;

use super::buffer::Pool;
use crate::tls::Records;
use crate::tls::record::{Opened, ReplyBuf};

/// A block, and how many of its first bytes count.
pub(super) type Piece = (&'static mut [u8], usize);

/// Plaintext of one receive: what the carried record held, then what the buffer held.
#[derive(Debug, Default)]
pub(super) struct Plain<'d> {
    /// To be given back to its pool when the turn has settled.
    pub carried: Option<Piece>,
    pub direct: &'d [u8],
    /// The peer will send no more (close_notify).
    pub closed: bool,
    /// Records opened.
    pub records: u64,
}

impl<'d> Plain<'d> {
    /// What came without protection.
    pub(super) const fn of(data: &'d [u8]) -> Self {
        Self {
            carried: None,
            direct: data,
            closed: false,
            records: 0,
        }
    }
}

/// The front part of a record whose rest has not arrived.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    carry: Option<&'static mut [u8]>,
    length: usize,
}

const HEADER: usize = RECORD_HEADER_BYTES as usize;

/// Bytes of the record that starts with `header`. A length no record may have is left to `open`.
fn record_bytes(header: &[u8]) -> usize {
    let announced = usize::from(u16::from_be_bytes([header[3], header[4]]));
    (HEADER + announced).min(RECORD_BYTES_MAX as usize)
}

impl Inbound {
    /// Opens all whole records of `data`, which follows what was received before.
    ///
    /// # Errors
    /// When a record cannot be opened, or no block is left for a partial one. The alert to send is
    /// in `reply`.
    pub(super) fn open<'d>(
        &mut self,
        records: &mut Records,
        data: &'d mut [u8],
        pool: &mut Pool,
        reply: &mut ReplyBuf,
    ) -> Result<Plain<'d>, Reason> {
        let mut plain = Plain::default();
        let mut at = 0;
        if self.length > 0 {
            let Some(used) = self.complete(data) else {
                return Ok(plain);
            };
            at = used;
            self.open_carried(records, pool, reply, &mut plain)?;
        }
        let start = at;
        let mut end = at;
        while !plain.closed {
            match records.open(data, at, end, reply) {
                Ok(Opened::NeedMore) => break,
                Ok(Opened::Data { next, plain_end }) => {
                    (at, end) = (next, plain_end);
                    plain.records += 1;
                }
                Ok(Opened::Control { next }) => at = next,
                Ok(Opened::Closed { .. }) => plain.closed = true,
                Err(error) => {
                    records.alert(&error, reply);
                    return Err(Reason::RecordInvalid);
                }
            }
        }
        if !plain.closed && at < data.len() {
            let block = pool.take().ok_or(Reason::AssemblyPoolFull)?;
            let rest = data.len() - at;
            block[..rest].copy_from_slice(&data[at..]);
            self.carry = Some(block);
            self.length = rest;
        }
        plain.direct = &data[start..end];
        Ok(plain)
    }

    /// Adds bytes of `data` to the carried record; how many, or `None` while it is partial.
    fn complete(&mut self, data: &[u8]) -> Option<usize> {
        let block = self.carry.as_mut().expect("a carried record has its block");
        let mut used = 0;
        let mut want = HEADER;
        for _header_then_record in 0..2 {
            let take = want.saturating_sub(self.length).min(data.len() - used);
            block[self.length..self.length + take].copy_from_slice(&data[used..used + take]);
            self.length += take;
            used += take;
            if self.length < want {
                return None;
            }
            want = record_bytes(block);
        }
        Some(used)
    }

    fn open_carried(
        &mut self,
        records: &mut Records,
        pool: &mut Pool,
        reply: &mut ReplyBuf,
        plain: &mut Plain<'_>,
    ) -> Result<(), Reason> {
        let block = self.carry.take().expect("a carried record has its block");
        let length = std::mem::take(&mut self.length);
        match records.open(&mut block[..length], 0, 0, reply) {
            Ok(Opened::Data { plain_end, .. }) => {
                plain.carried = Some((block, plain_end));
                plain.records += 1;
                return Ok(());
            }
            Ok(Opened::Control { .. }) => {}
            Ok(Opened::Closed { .. }) => plain.closed = true,
            Ok(Opened::NeedMore) => {
                pool.give(block);
                return Err(Reason::RecordInvalid);
            }
            Err(error) => {
                records.alert(&error, reply);
                pool.give(block);
                return Err(Reason::RecordInvalid);
            }
        }
        pool.give(block);
        Ok(())
    }

    /// Gives the carried block back.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        self.length = 0;
        if let Some(block) = self.carry.take() {
            pool.give(block);
        }
    }

    /// A copy of what is carried, for a connection that moves; the block goes back.
    pub(super) fn take(&mut self, pool: &mut Pool) -> Vec<u8> {
        let held = self.carry.as_deref().unwrap_or_default();
        let copy = held[..self.length].to_vec(); // cold: once per connection that moves
        self.clear(pool);
        copy
    }

    /// Carries `bytes` on; `false`: no block is left.
    pub(super) fn place(&mut self, bytes: &[u8], pool: &mut Pool) -> bool {
        if bytes.is_empty() {
            return true;
        }
        let Some(block) = pool.take() else {
            return false;
        };
        block[..bytes.len()].copy_from_slice(bytes);
        self.carry = Some(block);
        self.length = bytes.len();
        true
    }
}
