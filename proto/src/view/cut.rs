//! HOT. Cut-through of a long BODY frame: its body is forwarded before its envelope is whole. `[D-02]`
//!
//! Lives on: shards. View: the first bytes of an envelope, later its last ones. Bound: the caller's
//! carry buffer, and `CUT_TAIL_BYTES_MAX` behind the body.
//!
//! ```text
//!  0          header_len              + body_len      + frame_tail_len    + envelope_tail_len = envelope_len
//!  +----------+-----------------------+---------------+-------------------+
//!  | prefix   | body                  | rest of frame | rest of envelope  |
//!  +----------+-----------------------+---------------+-------------------+
//! ```
use super::key::{envelope, frame};
use super::reader::{
    DEPTH_MAX, Reader, Value, ViewError, check_failure, low32, read_entry, read_usage,
};
use crate::domain::{FrameKind, Usage};
use crate::framing::MessageType;
use crate::limits::CUT_TAIL_BYTES_MAX;

/// What the first bytes of a long envelope say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutProbe {
    /// Undecided: ask again with more bytes. When the carry buffer has none to give, assemble.
    NeedMore,
    /// Assemble the envelope, within `ASSEMBLED_BYTES_MAX`, and judge it whole.
    NotCut,
    /// Forward the body as it arrives.
    Cut(CutStart),
}

/// Where a cut-through frame's body lies and whose it is. All lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutStart {
    /// `None`: of another length, so no run of ours.
    pub run_id: Option<[u8; 32]>,
    pub sequence: u64,
    /// Bytes of the envelope before the first body byte; all of them are in the probed prefix.
    pub header_len: u32,
    pub body_len: u32,
    pub frame_tail_len: u32,
    pub envelope_tail_len: u32,
}

/// Why probing stopped before a verdict `Cut`.
enum Stop {
    NeedMore,
    NotCut,
    Malformed(ViewError),
}

/// At the top level of an unfinished prefix, running out of bytes means that more will come.
fn top<T>(result: Result<T, ViewError>) -> Result<T, Stop> {
    result.map_err(|error| match error {
        ViewError::Truncated => Stop::NeedMore,
        other => Stop::Malformed(other),
    })
}

/// Judges the first bytes of an envelope of `envelope_len` bytes (both without the length prefix).
///
/// Cut only if the type names a tunnel frame and precedes the payload, `run_id`, `kind` = BODY and
/// `sequence` precede the body, and what follows the body is at most `CUT_TAIL_BYTES_MAX` bytes.
///
/// # Errors
/// The prefix is malformed whatever follows, or its lengths exceed the envelope.
pub fn cut_probe(prefix: &[u8], envelope_len: u32) -> Result<CutProbe, ViewError> {
    match probe(prefix, envelope_len) {
        Ok(start) => Ok(CutProbe::Cut(start)),
        Err(Stop::NeedMore) => Ok(CutProbe::NeedMore),
        Err(Stop::NotCut) => Ok(CutProbe::NotCut),
        Err(Stop::Malformed(error)) => Err(error),
    }
}

fn probe(prefix: &[u8], envelope_len: u32) -> Result<CutStart, Stop> {
    let mut reader = Reader::new(prefix);
    let mut is_frame = false;
    while !reader.is_done() {
        match top(reader.key())? {
            envelope::TYPE => {
                let name = top(reader.text(envelope::TYPE))?;
                is_frame = MessageType::from_name(name) == Some(MessageType::ProviderTunnelFrame);
            }
            envelope::PAYLOAD if !is_frame => return Err(Stop::NotCut),
            envelope::PAYLOAD => return payload(prefix, reader, envelope_len),
            envelope::ID | envelope::REPLY_TO => drop(top(reader.varint())?),
            other => top(reader.unknown(other, envelope::KNOWN, DEPTH_MAX))?,
        }
    }
    Err(Stop::NeedMore)
}

/// `reader` stands behind the payload's key.
fn payload(prefix: &[u8], mut reader: Reader<'_>, envelope_len: u32) -> Result<CutStart, Stop> {
    let length = top(reader.varint())?;
    let start = prefix.len() - reader.rest.len();
    let too_long = Stop::Malformed(ViewError::Length {
        field: envelope::PAYLOAD >> 3,
    });
    let Some(end) = end_within(start, length, envelope_len as usize) else {
        return Err(too_long);
    };
    if end <= prefix.len() {
        return Err(Stop::NotCut); // the whole frame is here: what makes the envelope long is not its body
    }
    let found = frame_head(reader)?;
    let body_start = prefix.len() - found.rest;
    let too_long = Stop::Malformed(ViewError::Length {
        field: frame::BODY >> 3,
    });
    let Some(body_end) = end_within(body_start, found.body_len, end) else {
        return Err(too_long);
    };
    let length = |from: usize, to: usize| u32::try_from(to - from).map_err(|_| Stop::NotCut);
    let cut = CutStart {
        run_id: found.run_id.try_into().ok(),
        sequence: found.sequence,
        header_len: length(0, body_start)?,
        body_len: length(body_start, body_end)?,
        frame_tail_len: length(body_end, end)?,
        envelope_tail_len: length(end, envelope_len as usize)?,
    };
    if cut.frame_tail_len.saturating_add(cut.envelope_tail_len) > CUT_TAIL_BYTES_MAX {
        return Err(Stop::NotCut);
    }
    Ok(cut)
}

/// `start + length` if that is not past `end`.
fn end_within(start: usize, length: u64, end: usize) -> Option<usize> {
    let length = usize::try_from(length).ok()?;
    start.checked_add(length).filter(|&stop| stop <= end)
}

struct FrameHead<'a> {
    run_id: &'a [u8],
    sequence: u64,
    body_len: u64,
    /// Bytes of the prefix from the body's first byte on.
    rest: usize,
}

/// Reads the frame's fields up to its body. The reader ends with the prefix, inside the frame.
fn frame_head(mut reader: Reader<'_>) -> Result<FrameHead<'_>, Stop> {
    let (mut run_id, mut kind, mut sequence) = (None, None, None);
    while !reader.is_done() {
        match top(reader.key())? {
            frame::RUN_ID => run_id = Some(top(reader.text(frame::RUN_ID))?),
            frame::KIND => kind = Some(low32(top(reader.varint())?).cast_signed()),
            frame::SEQUENCE => sequence = Some(top(reader.varint())?),
            frame::BODY => {
                let is_body = kind.map(FrameKind::from_wire) == Some(FrameKind::Body);
                let (Some(run_id), Some(sequence), true) = (run_id, sequence, is_body) else {
                    return Err(Stop::NotCut);
                };
                let body_len = top(reader.varint())?;
                return Ok(FrameHead {
                    run_id,
                    sequence,
                    body_len,
                    rest: reader.rest.len(),
                });
            }
            other => beside_body(&mut reader, other)?,
        }
    }
    Err(Stop::NeedMore)
}

/// Checks a field that may stand on either side of the body, or is unknown.
fn beside_body(reader: &mut Reader<'_>, key: u32) -> Result<(), Stop> {
    let nested = DEPTH_MAX - 1;
    match key {
        frame::STATUS => drop(top(reader.varint())?),
        frame::ERROR => drop(top(reader.text(key))?),
        frame::HEADERS => {
            let entry = top(reader.bytes())?;
            read_entry(entry, Value::Bytes, nested).map_err(Stop::Malformed)?;
        }
        frame::METADATA => {
            let entry = top(reader.bytes())?;
            read_entry(entry, Value::Text, nested).map_err(Stop::Malformed)?;
        }
        frame::USAGE => {
            let usage = top(reader.bytes())?;
            read_usage(usage, &mut Usage::default(), nested).map_err(Stop::Malformed)?;
        }
        frame::FAILURE => {
            check_failure(top(reader.bytes())?, nested).map_err(Stop::Malformed)?;
        }
        other => top(reader.unknown(other, frame::KNOWN, DEPTH_MAX))?,
    }
    Ok(())
}

/// Completes the check of a cut-through frame with what came behind its body.
///
/// # Errors
/// The tail is malformed, or repeats a field whose value was already used: then the run is aborted and
/// the session closed. `[D-02]` `[D-10]`
pub fn check_cut_tail(frame_tail: &[u8], envelope_tail: &[u8]) -> Result<(), ViewError> {
    let mut reader = Reader::new(frame_tail);
    while !reader.is_done() {
        match reader.key()? {
            key @ (frame::RUN_ID | frame::KIND | frame::SEQUENCE | frame::BODY) => {
                return Err(ViewError::Repeated { field: key >> 3 });
            }
            key => match beside_body(&mut reader, key) {
                Ok(()) => {}
                Err(Stop::Malformed(error)) => return Err(error),
                Err(Stop::NeedMore | Stop::NotCut) => return Err(ViewError::Truncated),
            },
        }
    }
    let mut reader = Reader::new(envelope_tail);
    while !reader.is_done() {
        match reader.key()? {
            key @ (envelope::TYPE | envelope::PAYLOAD) => {
                return Err(ViewError::Repeated { field: key >> 3 });
            }
            envelope::ID | envelope::REPLY_TO => drop(reader.varint()?),
            other => reader.unknown(other, envelope::KNOWN, DEPTH_MAX)?,
        }
    }
    Ok(())
}
