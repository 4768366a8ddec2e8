//! The issuer thread, and the lanes on which shards ask it for leases.
//!
//! Lives on: a cold thread of its own; an [`IssuerPort`] on each shard. Bound: `LINK_SLOTS` asks and as
//! many answers per shard; an ask is taken only while there is room for its answer.
//!
//! ```text
//! shard: Issuing ─ask─► issuer: refresh, find, sign, seal ─answer (boxed)─► shard: queued, or discarded
//! ```
//! An ask answers one selection, once. What happens to its run meanwhile is the shard's to know.
//! `[I3.10]`
use core::time::Duration;
use std::io;
use std::thread::{JoinHandle, Thread};

use crossbeam_channel::{Sender, TryRecvError, bounded};
use iop_proto::ids::RunRef;
use iop_proto::limits::LINK_SLOTS;
use iop_proto::reason::Reason;
use iop_ring::spsc::{Consumer, Producer};
use iop_ring::{parcel, signal};

use super::plane::{Pair, Plane, Selection};
use crate::alloc::{self, Role};
use crate::hooks;
use crate::lanes::Waker;
use crate::system::unix_ms;

/// With an answer lane full the issuer looks again after this long: its shard makes room without
/// waking it.
const FULL: Duration = Duration::from_millis(1);

/// A shard's question: a lease for the run it was granted.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub run: RunRef,
    pub selection: Selection,
}

const _: () = assert!(size_of::<Ask>() <= signal::SIGNAL_BYTES_MAX);

/// The answer, made outside the shard.
#[derive(Debug)]
pub struct Answer {
    pub run: RunRef,
    pub pair: Result<Pair, Reason>,
}

/// A shard's end.
#[derive(Debug)]
pub struct IssuerPort {
    asks: Producer<Ask>,
    answers: Consumer<Box<Answer>>,
    issuer: Thread,
}

impl IssuerPort {
    /// Asks for a lease; `false`: the issuer is too far behind. No heap, no lock; one wake-up when it
    /// sleeps.
    pub fn ask(&mut self, ask: Ask) -> bool {
        let asked = self.asks.push(ask).is_ok();
        self.issuer.unpark();
        asked
    }

    pub fn answer(&mut self) -> Option<Box<Answer>> {
        self.answers.pop()
    }

    pub fn is_waiting(&mut self) -> bool {
        !self.answers.is_empty()
    }
}

/// The running thread.
#[derive(Debug)]
pub struct Issuer {
    /// Dropped to stop.
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

struct Lane {
    asks: Consumer<Ask>,
    answers: Producer<Box<Answer>>,
    shard: Waker,
}

impl Issuer {
    /// Starts the thread and gives each shard its port; `shards`: their wakers, in order.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn spawn(plane: Plane, shards: &[Waker]) -> io::Result<(Self, Vec<IssuerPort>)> {
        let mut ends = Vec::with_capacity(shards.len());
        let mut lanes = Vec::with_capacity(shards.len());
        for shard in shards {
            let (ask_tx, asks) = signal::channel(LINK_SLOTS as usize);
            let (answers, answer_rx) = parcel::channel(LINK_SLOTS as usize);
            ends.push((ask_tx, answer_rx));
            lanes.push(Lane {
                asks,
                answers,
                shard: shard.clone(),
            });
        }
        let (stop, stopped) = bounded(0);
        let thread = std::thread::Builder::new()
            .name("iop-issuer".into())
            .spawn(move || {
                alloc::set_role(Role::Cold);
                let mut work = Work { plane, lanes };
                while stopped.try_recv() != Err(TryRecvError::Disconnected) {
                    match work.turn() {
                        Turn::Worked => {}
                        Turn::Full => std::thread::park_timeout(FULL),
                        Turn::Idle => std::thread::park(), // an unpark since the turn ends it at once
                    }
                }
            })?;
        let issuer = thread.thread().clone();
        let port = |(asks, answers)| IssuerPort {
            asks,
            answers,
            issuer: issuer.clone(),
        };
        let ports = ends.into_iter().map(port).collect();
        Ok((Self { stop, thread }, ports))
    }

    /// Ends the thread; its plaintext is zeroed.
    pub fn stop(self) {
        drop(self.stop);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::error!("the issuer thread had panicked");
        }
    }
}

enum Turn {
    Worked,
    /// Something is asked and cannot be answered yet.
    Full,
    Idle,
}

struct Work {
    plane: Plane,
    lanes: Vec<Lane>,
}

impl Work {
    /// At most one answer per shard, so that none waits for another's burst.
    fn turn(&mut self) -> Turn {
        let (mut worked, mut full) = (false, false);
        for lane in &mut self.lanes {
            if lane.answers.free() == 0 {
                full |= !lane.asks.is_empty();
                continue;
            }
            let Some(ask) = lane.asks.pop() else { continue };
            delay();
            self.plane.refresh();
            let answer = Answer {
                run: ask.run,
                pair: self.plane.issue(ask.selection, unix_ms()),
            };
            let pushed = lane.answers.push(Box::new(answer));
            pushed.expect("there was room for it");
            lane.shard.ring();
            worked = true;
        }
        match (worked, full) {
            (true, _) => Turn::Worked,
            (false, true) => Turn::Full,
            (false, false) => Turn::Idle,
        }
    }
}

/// Holds every lease back while a test says so.
fn delay() {
    let Some(path) = hooks::value(hooks::ISSUER_HOLD) else {
        return;
    };
    while std::fs::exists(&path).unwrap_or(false) {
        std::thread::sleep(FULL);
    }
}
