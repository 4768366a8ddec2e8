//! HOT. Plaintext to envelopes: one that lies in one buffer is judged where it lies; one that does not is
//! completed in a block, assembled, or cut through. `[D-02]`
//!
//! Lives on: the session's shard. View: one session. Bound: a partial envelope of a block, an assembled
//! message of `ASSEMBLED_BYTES_MAX`, or a cut-through frame; at most one of them a session.
//!
//! ```text
//! length  body ...            in one buffer     in place
//! length  bo|dy ...           <= BLOCK_BYTES    stash, then whole in the block
//! length  frame head | body   BODY, longer      cut through: head judged, body sent on, tail checked
//! length  ...                 other, longer     assembled, if the pool has room
//! ```
use iop_proto::framing::{MessageType, envelope_len};
use iop_proto::limits::{
    ASSEMBLED_BYTES_MAX, BLOCK_BYTES, ENVELOPE_TO_EDGE_BYTES_MAX, LENGTH_PREFIX_BYTES,
};
use iop_proto::reason::Reason;
use iop_proto::view::{
    CutProbe, CutStart, EnvelopeView, FeaturesView, GoAwayView, PingView, PongView, check_cut_tail,
    cut_probe,
};

use super::session::{Standing, State};
use super::{Shard, slot_of};
use crate::metrics::ShardMetric;

const PREFIX: usize = LENGTH_PREFIX_BYTES as usize;
const BLOCK: usize = BLOCK_BYTES as usize;
/// Bytes added to a long envelope's prefix before it is probed again.
const PROBE_STEP: usize = 512;

/// A frame being cut through.
#[derive(Debug)]
pub(super) struct Cut {
    /// Its run, if it is one of ours that still wants it.
    run: Option<usize>,
    body_left: u32,
    frame_tail: usize,
    tail_total: usize,
    /// The bytes behind the body, as far as they have arrived.
    tail: Option<&'static mut [u8]>,
    tail_length: usize,
}

/// A message longer than a block that is not cut through.
#[derive(Debug)]
pub(super) struct Assembly {
    block: &'static mut [u8],
    length: usize,
    total: usize,
}

impl Shard {
    /// Plaintext of the connection, in order, cut anywhere.
    pub(super) fn feed(&mut self, row: usize, mut bytes: &[u8]) -> Result<(), Reason> {
        while !bytes.is_empty() && self.sessions[row].state == State::Open {
            let session = &self.sessions[row];
            let used = if session.cut.is_some() {
                self.feed_cut(row, bytes)?
            } else if session.assembly.is_some() {
                self.feed_assembly(row, bytes)?
            } else if session.partial_length > 0 {
                self.feed_partial(row, bytes)?
            } else {
                self.feed_direct(row, bytes)?
            };
            bytes = &bytes[used..];
        }
        Ok(())
    }

    /// At an envelope's start, nothing held.
    fn feed_direct(&mut self, row: usize, bytes: &[u8]) -> Result<usize, Reason> {
        let Some(prefix) = bytes.first_chunk::<PREFIX>() else {
            return self.stash(row, bytes);
        };
        let length = announced(*prefix)?;
        let total = PREFIX + length as usize;
        if let Some(envelope) = bytes.get(PREFIX..total) {
            self.metrics.inc(ShardMetric::EnvelopesInPlace);
            self.envelope(row, envelope)?;
            return Ok(total);
        }
        if total <= BLOCK {
            return self.stash(row, bytes);
        }
        match cut_probe(&bytes[PREFIX..], length).map_err(|error| error.reason())? {
            CutProbe::NeedMore if bytes.len() < BLOCK => self.stash(row, bytes),
            CutProbe::NeedMore | CutProbe::NotCut => {
                self.begin_assembly(row, total)?;
                self.feed_assembly(row, bytes)
            }
            CutProbe::Cut(start) => {
                self.begin_cut(row, &start)?;
                Ok(PREFIX + start.header_len as usize)
            }
        }
    }

    /// Holds the front part of an envelope in a block.
    fn stash(&mut self, row: usize, bytes: &[u8]) -> Result<usize, Reason> {
        let block = self.carry.take().ok_or(Reason::AssemblyPoolFull)?;
        block[..bytes.len()].copy_from_slice(bytes);
        let session = &mut self.sessions[row];
        session.partial = Some(block);
        session.partial_length = bytes.len();
        Ok(bytes.len())
    }

    fn feed_partial(&mut self, row: usize, bytes: &[u8]) -> Result<usize, Reason> {
        let session = &mut self.sessions[row];
        let block = session
            .partial
            .as_mut()
            .expect("a partial envelope has its block");
        let held = session.partial_length;
        let take = |want: usize| want.saturating_sub(held).min(bytes.len());
        if held < PREFIX {
            let used = take(PREFIX);
            block[held..held + used].copy_from_slice(&bytes[..used]);
            session.partial_length += used;
            return Ok(used);
        }
        let length = announced(*block.first_chunk::<PREFIX>().expect("held"))?;
        let total = PREFIX + length as usize;
        let used = take(total.min(BLOCK).min(if total > BLOCK {
            held + PROBE_STEP
        } else {
            total
        }));
        block[held..held + used].copy_from_slice(&bytes[..used]);
        session.partial_length += used;
        let held = held + used;
        if held == total {
            let block = session.partial.take().expect("taken above");
            session.partial_length = 0;
            self.metrics.inc(ShardMetric::EnvelopesCarried);
            let result = self.envelope(row, &block[PREFIX..total]);
            self.spent.push(block);
            result?;
        } else if total > BLOCK {
            self.probe_partial(row, length, held)?;
        }
        Ok(used)
    }

    /// Decides what becomes of a long envelope whose first `held` bytes are in the partial block.
    fn probe_partial(&mut self, row: usize, length: u32, held: usize) -> Result<(), Reason> {
        let session = &mut self.sessions[row];
        let block = session
            .partial
            .as_ref()
            .expect("a partial envelope has its block");
        let probe = cut_probe(&block[PREFIX..held], length).map_err(|error| error.reason())?;
        if probe == CutProbe::NeedMore && held < BLOCK {
            return Ok(());
        }
        let block = session.partial.take().expect("looked at above");
        session.partial_length = 0;
        let result = match probe {
            CutProbe::Cut(start) => self.begin_cut(row, &start).and_then(|()| {
                let body_at = PREFIX + start.header_len as usize;
                self.feed(row, &block[body_at..held])
            }),
            CutProbe::NeedMore | CutProbe::NotCut => self
                .begin_assembly(row, PREFIX + length as usize)
                .and_then(|()| self.feed(row, &block[..held])),
        };
        self.spent.push(block);
        result
    }

    fn begin_assembly(&mut self, row: usize, total: usize) -> Result<(), Reason> {
        if total > PREFIX + ASSEMBLED_BYTES_MAX as usize {
            return Err(Reason::EnvelopeTooLong);
        }
        let block = self.assembly.take().ok_or(Reason::AssemblyPoolFull)?;
        self.sessions[row].assembly = Some(Assembly {
            block,
            length: 0,
            total,
        });
        Ok(())
    }

    fn feed_assembly(&mut self, row: usize, bytes: &[u8]) -> Result<usize, Reason> {
        let session = &mut self.sessions[row];
        let assembly = session.assembly.as_mut().expect("asked for");
        let used = bytes.len().min(assembly.total - assembly.length);
        assembly.block[assembly.length..assembly.length + used].copy_from_slice(&bytes[..used]);
        assembly.length += used;
        if assembly.length == assembly.total {
            let assembly = session.assembly.take().expect("asked for");
            self.metrics.inc(ShardMetric::EnvelopesAssembled);
            let bytes = &assembly.block[PREFIX..assembly.total];
            let is_frame = EnvelopeView::parse(bytes)
                .is_ok_and(|view| view.kind == Some(MessageType::ProviderTunnelFrame));
            let result = self.envelope(row, bytes);
            if is_frame {
                self.spent_assemblies.push(assembly.block); // gathered bodies point into it
            } else {
                self.assembly.give(assembly.block);
            }
            result?;
        }
        Ok(used)
    }

    fn begin_cut(&mut self, row: usize, start: &CutStart) -> Result<(), Reason> {
        self.allow_frames(row)?;
        let tail_total = (start.frame_tail_len + start.envelope_tail_len) as usize;
        let tail = if tail_total > 0 {
            Some(self.carry.take().ok_or(Reason::AssemblyPoolFull)?)
        } else {
            None
        };
        debug_assert!(tail_total <= BLOCK);
        self.metrics.inc(ShardMetric::EnvelopesCutThrough);
        let run = if self.sessions[row].standing == Standing::Ready {
            self.cut_begins(row, start)
        } else {
            None
        };
        self.sessions[row].cut = Some(Cut {
            run,
            body_left: start.body_len,
            frame_tail: start.frame_tail_len as usize,
            tail_total,
            tail,
            tail_length: 0,
        });
        Ok(())
    }

    fn feed_cut(&mut self, row: usize, bytes: &[u8]) -> Result<usize, Reason> {
        let cut = self.sessions[row].cut.as_mut().expect("asked for");
        let body = bytes.len().min(cut.body_left as usize);
        cut.body_left -= slot_of(body); // at most what was left
        if body > 0
            && let Some(run) = cut.run
        {
            self.cut_body(run, &bytes[..body]);
        }
        let Some(cut) = self.sessions[row].cut.as_mut() else {
            return Ok(bytes.len()); // the session closed meanwhile
        };
        if cut.body_left > 0 {
            return Ok(body);
        }
        let rest = &bytes[body..];
        let used = rest.len().min(cut.tail_total - cut.tail_length);
        if let Some(tail) = &mut cut.tail {
            tail[cut.tail_length..cut.tail_length + used].copy_from_slice(&rest[..used]);
            cut.tail_length += used;
        }
        if cut.tail_length == cut.tail_total {
            self.end_cut(row)?;
        }
        Ok(body + used)
    }

    fn end_cut(&mut self, row: usize) -> Result<(), Reason> {
        let cut = self.sessions[row].cut.take().expect("asked for");
        let Some(tail) = cut.tail else { return Ok(()) };
        let (of_frame, of_envelope) = tail[..cut.tail_total].split_at(cut.frame_tail);
        let verdict = check_cut_tail(of_frame, of_envelope);
        self.carry.give(tail);
        verdict.map_err(|error| {
            if let Some(run) = cut.run
                && self.runs[run].is_live()
            {
                self.fail_run(run, Reason::StreamViolation);
            }
            error.reason()
        })
    }

    /// Frames and events of runs are legal once registered. `[states §1 row 10]`
    fn allow_frames(&self, row: usize) -> Result<(), Reason> {
        match self.sessions[row].standing {
            Standing::Identified => Err(Reason::EnvelopeWrongState),
            Standing::Pending | Standing::Ready => Ok(()),
        }
    }

    /// One whole envelope, without its length prefix.
    fn envelope(&mut self, row: usize, bytes: &[u8]) -> Result<(), Reason> {
        let view = EnvelopeView::parse(bytes).map_err(|error| error.reason())?;
        let registered = self.sessions[row].standing != Standing::Identified;
        let Some(kind) = view.kind else {
            if !registered {
                return Err(Reason::EnvelopeUnknown);
            }
            self.metrics.inc(ShardMetric::EnvelopesIgnored);
            return Ok(());
        };
        if !kind.from_node() {
            return Err(Reason::EnvelopeWrongDirection);
        }
        match kind {
            MessageType::ProviderTunnelFrame => {
                self.allow_frames(row)?;
                self.tunnel_frame(row, view.payload)
            }
            MessageType::RunEvent => {
                self.allow_frames(row)?;
                self.run_event(row, view.payload)
            }
            MessageType::Ping => {
                let ping = PingView::parse(view.payload).map_err(|error| error.reason())?;
                self.queue_pong(row, ping.seq)
            }
            MessageType::Pong => {
                PongView::parse(view.payload).map_err(|error| error.reason())?;
                Ok(())
            }
            MessageType::RegisterRequest => self.register(row, view.id, view.payload),
            MessageType::NodeReadyRequest => self.ready(row, view.id, view.payload),
            _ if !registered => Err(Reason::EnvelopeWrongState),
            MessageType::GoAway => {
                GoAwayView::parse(view.payload).map_err(|error| error.reason())?;
                self.go_away(row);
                Ok(())
            }
            MessageType::Features => {
                let features = FeaturesView::parse(view.payload).map_err(|error| error.reason())?;
                self.sessions[row].paces = features.window;
                Ok(())
            }
            MessageType::NodeCommandResponse => {
                self.command_answer(row, view.reply_to, view.payload)
            }
            MessageType::NodeConfigRefreshResponse => {
                self.refresh_answered(row, view.reply_to, view.payload)
            }
            MessageType::RegisterResponse
            | MessageType::NodeReadyResponse
            | MessageType::RunRequest
            | MessageType::CancelRequest
            | MessageType::ProviderTunnelRequest
            | MessageType::NodeCommandRequest
            | MessageType::NodeConfigRefreshRequest
            | MessageType::Window => Err(Reason::EnvelopeWrongDirection),
        }
    }

    /// Returns what a session that is over holds of an envelope.
    pub(super) fn drop_partial(&mut self, row: usize) {
        let session = &mut self.sessions[row];
        session.partial_length = 0;
        if let Some(block) = session.partial.take() {
            self.carry.give(block);
        }
        if let Some(tail) = session.cut.take().and_then(|cut| cut.tail) {
            self.carry.give(tail);
        }
        if let Some(assembly) = session.assembly.take() {
            self.assembly.give(assembly.block);
        }
    }
}

fn announced(prefix: [u8; PREFIX]) -> Result<u32, Reason> {
    envelope_len(prefix, ENVELOPE_TO_EDGE_BYTES_MAX).map_err(|error| error.reason())
}
