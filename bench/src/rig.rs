//! One measurement: clients and origin in one loop on one core, so that the rig costs as little as it
//! can and knows at every moment what is on its way.
//!
//! Lives on: a thread of its own, pinned. Bound: `WINDOW_BYTES` on the way to each client in
//! `Pace::Saturated`; deadlines for the requests and for the end.
//!
//! Requests go out one after the other, each answered by one event at once: time to first token. Then
//! events flow, for a while unmeasured. `Pace::Rate` is an open loop: every event carries the time it
//! was due, late or not, and the streams take turns, so that no two are due at once. Latency is what a
//! client's clock says when it has the event whole, minus that time. Nothing is corrected afterwards.
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::client::{self, Client};
use crate::error::Error;
use crate::event::Wording;
use crate::origin::{ORIGIN_TOKEN, Origin};
use crate::os::{Poll, Ready, now_ns};

/// What may be on its way to one client of a saturated run.
const WINDOW_BYTES: usize = 128 * 1024;
/// What a saturated turn adds, all streams together.
const TURN_BYTES: usize = 256 * 1024;
/// Due events sent before the clients are looked at again.
const DUE_PER_TURN: usize = 64;
/// All requests answered; all answers ended.
const REQUESTS_LIMIT_NS: u64 = 60_000_000_000;
const END_LIMIT_NS: u64 = 10_000_000_000;
/// Between two requests.
const REQUEST_GAP_NS: u64 = 1_000_000;
/// Longest sleep.
const SLEEP_NS: u64 = 1_000_000;
/// Events that go on past the measured window, so that its end sees steady streams.
const OVERTIME_NS: u64 = 50_000_000;
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// How events are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As many as get through.
    Saturated,
    /// Events a second, all streams together, evenly spaced.
    Rate(u64),
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) streams: usize,
    pub(crate) event_bytes: usize,
    pub(crate) wording: Wording,
    pub(crate) pace: Pace,
    /// Unmeasured, then measured.
    pub(crate) warm: Duration,
    pub(crate) measured: Duration,
}

/// The measured window, `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// What the clients saw. Nanoseconds.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) window: Window,
    /// From a request to its first event, of every stream.
    pub(crate) first: Histogram<u64>,
    /// Of events due in the window; of a sample in saturated runs.
    pub(crate) latency: Histogram<u64>,
    /// Events that arrived in the window.
    pub(crate) events: u64,
    /// How late the rig itself was with what it sent: 0 in saturated runs.
    pub(crate) late: Histogram<u64>,
}

/// One in so many events is timed in a saturated run.
const SAMPLE: u64 = 16;

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1_000, LATENCY_NS_MAX, 3).expect("legal bounds")
}

/// The loop of one measurement.
pub(crate) struct Rig<'o> {
    plan: Plan,
    model: String,
    poll: Poll,
    origin: &'o mut dyn Origin,
    clients: Vec<Client>,
    ready: Vec<Ready>,
    opened: Vec<usize>,
    buffer: Vec<u8>,
    /// Events sent on each stream.
    sent: Vec<u64>,
    outcome: Outcome,
}

impl std::fmt::Debug for Rig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").finish_non_exhaustive()
    }
}

impl<'o> Rig<'o> {
    /// Connects every client to `to`.
    pub(crate) fn connect(
        plan: Plan,
        model: &str,
        to: SocketAddr,
        poll: Poll,
        origin: &'o mut dyn Origin,
    ) -> Result<Self, Error> {
        let none = Window {
            from: u64::MAX,
            to: u64::MAX,
        };
        let mut rig = Self {
            plan,
            model: model.to_owned(),
            poll,
            origin,
            clients: Vec::with_capacity(plan.streams),
            ready: Vec::new(),
            opened: Vec::new(),
            buffer: vec![0; 256 * 1024],
            sent: vec![0; plan.streams],
            outcome: Outcome {
                window: none,
                first: histogram(),
                latency: histogram(),
                events: 0,
                late: histogram(),
            },
        };
        for row in 0..plan.streams {
            let client = Client::connect(to, plan.event_bytes, plan.wording)?;
            let added = rig.poll.add(&client.socket, row as u64);
            added.map_err(Error::io("watch a client"))?;
            rig.clients.push(client);
            rig.turn(0)?; // accepts, where the origin is the server
        }
        Ok(rig)
    }

    /// Runs to the end. Says through `window` when the measured window is known.
    pub(crate) fn run(mut self, window: &Sender<Window>) -> Result<Outcome, Error> {
        self.requests()?;
        let from = now_ns() + nanos(self.plan.warm);
        let to = from + nanos(self.plan.measured);
        self.outcome.window = Window { from, to };
        // Nobody listens when the run is only tried out.
        let _unheard = window.send(self.outcome.window);
        match self.plan.pace {
            Pace::Saturated => self.saturated(to + OVERTIME_NS)?,
            Pace::Rate(rate) => self.paced(rate, to + OVERTIME_NS)?,
        }
        self.end()?;
        Ok(self.outcome)
    }

    /// Every client asks, one after the other, and gets its first event.
    fn requests(&mut self) -> Result<(), Error> {
        let began = now_ns();
        let mut asked = 0;
        while asked < self.plan.streams || self.outcome.first.len() < self.plan.streams as u64 {
            let now = now_ns();
            if asked < self.plan.streams && now >= began + REQUEST_GAP_NS * asked as u64 {
                let request = client::request(&self.model, asked);
                self.clients[asked].ask(&request, now)?;
                asked += 1;
            }
            if now > began + REQUESTS_LIMIT_NS {
                let seen = self.outcome.first.len();
                let why = format!("{seen} of {} requests were answered", self.plan.streams);
                return Err(Error::part(why));
            }
            let due = began + REQUEST_GAP_NS * asked as u64;
            self.turn(due.saturating_sub(now_ns()).min(SLEEP_NS))?;
        }
        Ok(())
    }

    fn paced(&mut self, rate: u64, until: u64) -> Result<(), Error> {
        let base = now_ns();
        let due = |number: u64| {
            base + u64::try_from(u128::from(number) * 1_000_000_000 / u128::from(rate))
                .expect("centuries")
        };
        let streams = self.plan.streams as u64;
        let mut number = 0;
        loop {
            let now = now_ns();
            if now >= until {
                return Ok(());
            }
            let measured = self.outcome.window.from <= now && now < self.outcome.window.to;
            for _ in 0..DUE_PER_TURN {
                let at = due(number);
                if at > now {
                    break;
                }
                if measured {
                    self.outcome.late.saturating_record(now - at);
                }
                let stream = usize::try_from(number % streams).expect("below a usize");
                self.origin.event(stream, at);
                self.sent[stream] += 1;
                number += 1;
            }
            self.origin.flush(&self.poll)?;
            self.turn(due(number).saturating_sub(now_ns()).min(SLEEP_NS))?;
        }
    }

    fn saturated(&mut self, until: u64) -> Result<(), Error> {
        let bytes = self.plan.event_bytes;
        let window = (WINDOW_BYTES / bytes).max(4) as u64;
        let rounds = (TURN_BYTES / (bytes * self.plan.streams)).max(1);
        loop {
            let now = now_ns();
            if now >= until {
                return Ok(());
            }
            let mut added = false;
            for _ in 0..rounds {
                for stream in 0..self.plan.streams {
                    let on_way = self.sent[stream] - self.clients[stream].parser.events();
                    if on_way < window && !self.origin.is_full(stream) {
                        self.origin.event(stream, now);
                        self.sent[stream] += 1;
                        added = true;
                    }
                }
            }
            self.origin.flush(&self.poll)?;
            self.turn(if added { 0 } else { SLEEP_NS })?;
        }
    }

    /// Ends every answer and waits until every client has it whole.
    fn end(&mut self) -> Result<(), Error> {
        for stream in 0..self.plan.streams {
            self.origin.end(stream);
        }
        self.origin.flush(&self.poll)?;
        let began = now_ns();
        loop {
            let open = self
                .clients
                .iter()
                .filter(|client| !client.parser.is_done())
                .count();
            if open == 0 {
                break;
            }
            if now_ns() > began + END_LIMIT_NS {
                return Err(Error::part(format!("{open} answers did not end")));
            }
            self.turn(SLEEP_NS)?;
        }
        for (stream, client) in self.clients.iter().enumerate() {
            let (sent, seen) = (self.sent[stream], client.parser.events());
            if sent != seen {
                let why = format!("stream {stream}: {seen} of {sent} events arrived");
                return Err(Error::part(why));
            }
        }
        Ok(())
    }

    /// Waits at most `timeout_ns` for readiness and deals with it.
    fn turn(&mut self, timeout_ns: u64) -> Result<(), Error> {
        self.ready.clear();
        let waited = self.poll.wait(timeout_ns, &mut self.ready);
        waited.map_err(Error::io("wait for readiness"))?;
        for at in 0..self.ready.len() {
            let ready = self.ready[at];
            if ready.token >= ORIGIN_TOKEN {
                self.origin.ready(&self.poll, ready, &mut self.opened)?;
                self.open();
                self.origin.flush(&self.poll)?;
            } else {
                let row = usize::try_from(ready.token).expect("a token of ours");
                self.client(row)?;
            }
        }
        Ok(())
    }

    fn open(&mut self) {
        let now = now_ns();
        for stream in self.opened.drain(..) {
            self.origin.begin(stream);
            self.origin.event(stream, now);
            self.sent[stream] += 1;
        }
    }

    fn client(&mut self, row: usize) -> Result<(), Error> {
        let client = &mut self.clients[row];
        let Outcome {
            window,
            first,
            latency,
            events,
            ..
        } = &mut self.outcome;
        let (paced, asked) = (self.plan.pace != Pace::Saturated, client.asked);
        let mut seen = client.parser.events();
        let mut arrived = 0; // the clock is read once a read, when something is whole
        let mut take = |stamp: u64| {
            if arrived == 0 {
                arrived = now_ns();
            }
            if seen == 0 {
                first.saturating_record(arrived - asked);
            }
            seen += 1;
            *events += u64::from((window.from..window.to).contains(&arrived));
            if (paced || seen.is_multiple_of(SAMPLE)) && (window.from..window.to).contains(&stamp) {
                latency.saturating_record(arrived.saturating_sub(stamp));
            }
        };
        let read = client.read(&mut self.buffer, &mut take);
        read.map_err(|error| Error::part(format!("stream {row}: {error}")))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("less than centuries")
}
