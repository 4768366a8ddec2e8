//! Access lines: a fixed-size record per request from its shard, one line of JSON from a cold thread.
//!
//! Lives on: [`AccessSink`] on its shard, [`AccessLog`] on the writer's thread. View: one finished
//! request. Bound: `ACCESS_SLOTS` records per shard; a writer that falls behind costs lines, which
//! are counted, never time of a shard.
//!
//! A line carries only the id that the Edge made, configured names, figures and words of closed
//! sets: nothing that a client or provider chose. `[D-25]` `[R-320]`…`[R-323]`
use core::time::Duration;
use std::io::{self, Write};
use std::thread::{JoinHandle, Thread};
use std::time::SystemTime;

use crossbeam_channel::{Sender, TryRecvError, bounded};
use iop_control::names::Names;
use iop_proto::catalog::Operation;
use iop_proto::ids::{ModelIndex, Now, ProviderIndex};
use iop_proto::reason::Reason;
use iop_ring::signal;
use iop_ring::spsc::{Consumer, Producer};
use serde::Serialize;

use crate::alloc::{self, Role};
use crate::config::AccessLog as Choice;
use crate::epoch::Current;

/// Records a shard may be ahead of the writer: at `GATHER` a shard of 50 000 requests a second.
const ACCESS_SLOTS: usize = 1_024;
/// After a record arrived the writer waits this long for company: at most 50 wake-ups a second.
const GATHER: Duration = Duration::from_millis(20);

/// What is known of a request when it ends. Written once per request by its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessRecord {
    /// The Edge's own id of the request; an inbound one is not logged. `[D-26]`
    pub request_id: [u8; 16],
    /// When it ended.
    pub ended: Now,
    /// From the last byte of the request to the end of the answer.
    pub duration_ns: u64,
    /// To the first body byte of the answer; [`AccessRecord::NEVER`] without one.
    pub first_byte_ns: u64,
    /// Body bytes of the answer handed to the socket.
    pub bytes_out: u64,
    /// Body bytes of the request.
    pub bytes_in: u32,
    /// The configured model; `None`: none was named, or nobody configured it.
    pub model: Option<ModelIndex>,
    /// Who served it.
    pub provider: Option<ProviderIndex>,
    /// Status sent to the client; 0: it left before one.
    pub status: u16,
    pub operation: Option<Operation>,
    /// Why it was refused or broken off; `None`: it ran to its end.
    pub reason: Option<Reason>,
}

impl AccessRecord {
    /// `first_byte_ns` of a request that got no body byte.
    pub const NEVER: u64 = u64::MAX;
}

const _: () = assert!(size_of::<AccessRecord>() <= signal::SIGNAL_BYTES_MAX);

/// What became of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    Sent,
    /// Off, or not in the sample.
    Skipped,
    /// The writer is behind: the caller counts it.
    Dropped,
}

/// A shard's end. Never waits; wakes the writer only when it sleeps.
#[derive(Debug)]
pub struct AccessSink {
    /// `None`: access lines are off.
    lane: Option<Lane>,
}

#[derive(Debug)]
struct Lane {
    records: Producer<AccessRecord>,
    writer: Thread,
    /// One in this many is sent.
    every: u32,
    /// Requests until the next that is sent: `0 <= wait < every`.
    wait: u32,
}

impl AccessSink {
    /// The sink of an Edge without access lines.
    #[must_use]
    pub const fn off() -> Self {
        Self { lane: None }
    }

    /// Takes one finished request. No heap, no lock; one wake-up when the writer sleeps.
    pub fn record(&mut self, record: AccessRecord) -> Recorded {
        let Some(lane) = &mut self.lane else {
            return Recorded::Skipped;
        };
        if lane.wait > 0 {
            lane.wait -= 1;
            return Recorded::Skipped;
        }
        lane.wait = lane.every - 1;
        if lane.records.push(record).is_err() {
            return Recorded::Dropped;
        }
        lane.writer.unpark();
        Recorded::Sent
    }
}

/// The running writer; `None` inside when access lines are off.
#[derive(Debug)]
pub struct AccessLog(Option<Writer>);

#[derive(Debug)]
struct Writer {
    /// Dropped to stop.
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl AccessLog {
    /// Starts the writer and gives each of `shards` its sink. `to` gets whole lines; `started` is the
    /// wall time at `Now` 0.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn spawn(
        choice: Choice,
        shards: usize,
        names: Current<Names>,
        started: SystemTime,
        to: Box<dyn Write + Send>,
    ) -> io::Result<(Self, Vec<AccessSink>)> {
        let every = match choice {
            Choice::Off => {
                let sinks = (0..shards).map(|_| AccessSink::off()).collect();
                return Ok((Self(None), sinks));
            }
            Choice::Sampled(every) => every.max(1),
            Choice::All => 1,
        };
        let mut producers = Vec::with_capacity(shards);
        let mut lanes = Vec::with_capacity(shards);
        for _ in 0..shards {
            let (producer, consumer) = signal::channel(ACCESS_SLOTS);
            producers.push(producer);
            lanes.push(consumer);
        }
        let (stop, stopped) = bounded(0);
        let thread = std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || {
                alloc::set_role(Role::Cold);
                let mut lines = Lines {
                    names,
                    started,
                    to,
                    failed: false,
                };
                loop {
                    // Asked before the lanes are drained: what was pushed before the stop is written.
                    let last = stopped.try_recv() == Err(TryRecvError::Disconnected);
                    let taken = lines.drain(&mut lanes);
                    if last {
                        return;
                    }
                    if taken == 0 {
                        std::thread::park(); // an unpark since the drain makes this return at once
                    }
                    std::thread::sleep(GATHER);
                }
            })?;
        let writer = thread.thread().clone();
        let sink = |records| {
            let writer = writer.clone();
            AccessSink {
                lane: Some(Lane {
                    records,
                    writer,
                    every,
                    wait: 0,
                }),
            }
        };
        let sinks = producers.into_iter().map(sink).collect();
        Ok((Self(Some(Writer { stop, thread })), sinks))
    }

    /// Ends the writer after it has written what the shards had sent before.
    pub fn stop(self) {
        let Some(Writer { stop, thread }) = self.0 else {
            return;
        };
        drop(stop);
        thread.thread().unpark();
        if thread.join().is_err() {
            tracing::error!("the access log thread had panicked");
        }
    }
}

/// Turns records into lines.
struct Lines {
    names: Current<Names>,
    started: SystemTime,
    to: Box<dyn Write + Send>,
    /// A failing sink is reported once, not per line.
    failed: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    event: &'static str,
    request_id: String,
    operation: Option<&'static str>,
    model: Option<&'a str>,
    provider: Option<&'a str>,
    node: Option<&'a str>,
    status: u16,
    bytes_in: u32,
    bytes_out: u64,
    first_byte_us: Option<u64>,
    duration_us: u64,
    outcome: &'static str,
}

impl Lines {
    /// Writes everything the lanes hold now, each up to its size, so that none starves another.
    fn drain(&mut self, lanes: &mut [Consumer<AccessRecord>]) -> usize {
        let mut text = Vec::new();
        let mut taken = 0;
        for lane in lanes {
            for _ in 0..ACCESS_SLOTS {
                let Some(record) = lane.pop() else { break };
                self.line(&record, &mut text);
                taken += 1;
            }
        }
        if taken > 0 {
            let written = self.to.write_all(&text).and_then(|()| self.to.flush());
            if let Err(error) = written
                && !core::mem::replace(&mut self.failed, true)
            {
                tracing::warn!(%error, "access lines cannot be written; this is said once");
            }
        }
        taken
    }

    fn line(&self, record: &AccessRecord, text: &mut Vec<u8>) {
        // The newest table has every row that was ever recorded.
        let names = self.names.get();
        let provider = record.provider.map(|provider| names.provider(provider));
        let ended = self.started + Duration::from_nanos(record.ended.as_nanos());
        let line = Line {
            time: utc(ended),
            event: "access",
            request_id: format!("{:032x}", u128::from_be_bytes(record.request_id)),
            operation: record.operation.map(Operation::name),
            model: record.model.map(|model| names.model(model).name.as_str()),
            provider: provider.map(|provider| provider.id.as_str()),
            node: provider.map(|provider| names.node(provider.node).id.as_str()),
            status: record.status,
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            first_byte_us: (record.first_byte_ns != AccessRecord::NEVER)
                .then_some(record.first_byte_ns / 1_000),
            duration_us: record.duration_ns / 1_000,
            outcome: record.reason.map_or("ok", Reason::label),
        };
        serde_json::to_writer(&mut *text, &line).expect("a Vec takes every write");
        text.push(b'\n');
    }
}

/// RFC 3339, UTC, milliseconds. Times before 1970 show as 1970.
fn utc(time: SystemTime) -> String {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days to date by 400-year eras that begin on 1 March (H. Hinnant, "chrono-compatible date
    // algorithms"), so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3_600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis(),
    )
}

#[cfg(test)]
mod tests;
