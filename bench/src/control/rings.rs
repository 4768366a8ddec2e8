//! A decision through the rings and doorbells that shards and control really use.
//!
//! Lives on: the shard's core here, control (or what stands for it) on the other. Bound:
//! `OUTSTANDING_MAX` requests at once, within a link's slots.
//!
//! The bare wake is the same two threads, rings and bells with nothing decided in between: what a
//! decision costs on top of it is control's own.
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use hdrhistogram::Histogram;
use iop_control::edge::Control;
use iop_control::step::{Effect, Ending, Event};
use iop_dataplane::control_thread::{ControlParts, Runner};
use iop_dataplane::guard::abort_on_unwind;
use iop_dataplane::lanes::{ControlEnd, ShardEnd, Waker, link};
use iop_dataplane::metrics::ControlMetrics;
use iop_dataplane::shard::uring::Ring;
use iop_proto::catalog::Operation;
use iop_proto::ids::Now;
use iop_proto::reason::Reason;

use super::{Options, client, histogram, model, names, node, quantiles, session};
use crate::error::Error;
use crate::os;

/// Requests without an answer: at saturation always so many.
const OUTSTANDING_MAX: usize = 64;
/// A request is due a row's rate apart; closer than this, nobody sleeps in between.
const SPIN_NS: u64 = 60_000;
/// Requests a second of the quiet row.
const QUIET: u64 = 1_000;
/// The longest anything may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opposite {
    /// Answers at once, decides nothing.
    Bare,
    Control,
}

/// Prints the table; how many rows it has.
pub(super) fn run(options: &Options, measured: Duration) -> Result<usize, Error> {
    println!(
        "\n| through rings and doorbells | requests/s | answer ns, p50 / p99 / p99.9 / most |\n\
         |---|---|---|"
    );
    let mut rows = 0;
    for (name, opposite) in [
        ("the bare wake", Opposite::Bare),
        ("a decision", Opposite::Control),
    ] {
        let mut shard = Shard::start(opposite, options.cores.0)?;
        let saturated = shard.measure(None, measured)?;
        let half = saturated.rate() / 2;
        let quiet = shard.measure(Some(QUIET), measured)?;
        let busy = shard.measure(Some(half), measured)?;
        for (load, done) in [
            ("saturated, 64 outstanding", saturated),
            ("1 000 a second", quiet),
            ("half of saturation", busy),
        ] {
            let rate = done.rate();
            println!("| {name}, {load} | {rate} | {} |", quantiles(&done.latency));
            rows += 1;
        }
    }
    println!(
        "\nFrom the instant a request is due to its grant. Below {} µs between requests the \
         shard's part polls; else it sleeps as a shard does.",
        SPIN_NS / 1_000
    );
    Ok(rows)
}

struct Outcome {
    count: u64,
    spent: Duration,
    latency: Histogram<u64>,
}

impl Outcome {
    fn rate(&self) -> u64 {
        let nanos = self.spent.as_nanos().max(1);
        u64::try_from(u128::from(self.count) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
    }
}

/// A shard's end of the link.
struct Shard {
    lanes: ShardEnd,
    waker: Waker,
    ring: Ring,
    inbox: Vec<iop_dataplane::shard::uring::Completion>,
    opposite: Opposite,
    /// Owed to control, in order.
    owed: VecDeque<Event>,
    /// When each outstanding request was due, by client slot; and the slots that are free.
    due: Vec<u64>,
    free: Vec<u32>,
}

impl Shard {
    fn start(opposite: Opposite, core: usize) -> Result<Self, Error> {
        let waker = || Waker::new().map_err(Error::io("eventfd"));
        let (own, theirs) = (waker()?, waker()?);
        let (lanes, far) = link(&own, &theirs);
        let name = "control".to_owned();
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            abort_on_unwind(|| {
                os::pin(core).expect("a core of this machine");
                match opposite {
                    Opposite::Bare => echo(far, &theirs),
                    Opposite::Control => control(far, theirs),
                }
            });
        });
        spawned.map_err(Error::io("a thread"))?;
        let mut ring = Ring::new(64).map_err(|error| Error::part(error.to_string()))?;
        ring.read_wake(own.fd().as_raw_fd());
        let slots = u32::try_from(OUTSTANDING_MAX).expect("a small constant");
        let mut shard = Self {
            lanes,
            waker: own,
            ring,
            inbox: Vec::with_capacity(64),
            opposite,
            owed: VecDeque::with_capacity(4 * OUTSTANDING_MAX),
            due: vec![0; OUTSTANDING_MAX],
            free: (0..slots).collect(),
        };
        if opposite == Opposite::Control {
            shard.connect()?;
        }
        Ok(shard)
    }

    /// The node becomes ready.
    fn connect(&mut self) -> Result<(), Error> {
        let (session, claimed) = (session(), Some(node()));
        self.owed.push_back(Event::Register {
            session,
            reply_to: 1,
            claimed,
            certified: claimed,
        });
        self.owed.push_back(Event::Ready {
            session,
            reply_to: 2,
            claimed,
        });
        self.push();
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            self.sleep(Duration::from_millis(10));
            while let Some(effect) = self.lanes.effects.pop() {
                match effect {
                    Effect::ReadyReply { refusal: None, .. } => return Ok(()),
                    Effect::Ping { token } => self.owed.push_back(Event::Pong { token }),
                    _ => {}
                }
            }
        }
        Err(Error::part("control did not answer a ready"))
    }

    /// As many requests as `rate` a second, each due at its own instant; without a rate as many as
    /// are answered.
    fn measure(&mut self, rate: Option<u64>, measured: Duration) -> Result<Outcome, Error> {
        let mut latency = histogram();
        let mut count = 0;
        let began = os::now_ns();
        let until = began + u64::try_from(measured.as_nanos()).unwrap_or(u64::MAX);
        let step = rate.map_or(0, |rate| 1_000_000_000 / rate.max(1));
        let mut due = began;
        let mut heard = began;
        loop {
            let now = os::now_ns();
            let going = now < until;
            while going && due <= now && !self.free.is_empty() {
                self.submit(if step == 0 { now } else { due });
                due = if step == 0 { now } else { due + step };
            }
            self.push();
            let answered = self.answers(&mut latency);
            count += answered;
            if answered > 0 {
                heard = now;
            }
            let outstanding = OUTSTANDING_MAX - self.free.len();
            if !going && outstanding == 0 {
                break;
            }
            if outstanding > 0 && now - heard.min(now) > 1_000_000_000 * PATIENCE.as_secs() {
                return Err(Error::part("no answer"));
            }
            if answered == 0 && step > SPIN_NS {
                let idle = due.saturating_sub(now);
                if idle > SPIN_NS || outstanding > 0 {
                    self.sleep(Duration::from_nanos(idle.saturating_sub(SPIN_NS)));
                }
            } else if answered == 0 && step == 0 {
                self.sleep(Duration::from_millis(10));
            }
        }
        self.push();
        let spent = Duration::from_nanos(os::now_ns() - began);
        Ok(Outcome {
            count,
            spent,
            latency,
        })
    }

    fn submit(&mut self, due: u64) {
        let slot = self.free.pop().expect("the caller saw one");
        self.due[slot as usize] = due;
        self.owed.push_back(Event::Submit {
            client: client(slot),
            model: model(),
            operation: Operation::ChatCompletions,
            long: false,
            body_bytes: 1,
        });
    }

    /// Hands control what is owed, and rings it.
    fn push(&mut self) {
        let mut pushed = false;
        while let Some(&event) = self.owed.front() {
            if self.lanes.events.push(event).is_err() {
                break;
            }
            self.owed.pop_front();
            pushed = true;
        }
        if pushed {
            self.lanes.control.ring();
        }
    }

    /// Takes what has come; the runs granted are over at once.
    fn answers(&mut self, latency: &mut Histogram<u64>) -> u64 {
        let mut count = 0;
        while let Some(effect) = self.lanes.effects.pop() {
            let client = match effect {
                Effect::Grant { client, run, .. } => {
                    self.owed.push_back(Event::Begun { run });
                    let ending = Ending::Complete;
                    self.owed.push_back(Event::Terminal { run, ending });
                    client
                }
                Effect::Refuse { client, .. } if self.opposite == Opposite::Bare => client,
                Effect::Ping { token } => {
                    self.owed.push_back(Event::Pong { token });
                    continue;
                }
                _ => continue,
            };
            let waited = os::now_ns().saturating_sub(self.due[client.slot as usize]);
            latency.saturating_record(waited.max(1));
            self.free.push(client.slot);
            count += 1;
        }
        count
    }

    /// As a shard sleeps: in its ring, until the bell or the deadline.
    fn sleep(&mut self, longest: Duration) {
        self.waker.prepare();
        let longest = if self.lanes.effects.is_empty() {
            longest
        } else {
            Duration::ZERO
        };
        self.ring.submit_and_wait(longest);
        self.waker.awake();
        self.inbox.clear();
        self.ring.reap(&mut self.inbox);
        if !self.inbox.is_empty() {
            self.ring.read_wake(self.waker.fd().as_raw_fd());
        }
    }
}

/// The Edge's own control thread.
fn control(far: ControlEnd, waker: Waker) {
    let (_snapshots, snapshots) = bounded(1);
    let (_commands, commands) = bounded(1);
    let (_operators, operators) = bounded(1);
    let (_answers, answers) = bounded(1);
    let (metrics, _reader) = ControlMetrics::new();
    let capacity = u32::try_from(OUTSTANDING_MAX).expect("a small constant");
    let names = Arc::new(names(8, capacity, 1));
    let runner = Runner::new(ControlParts {
        control: Control::new(names, 1, Now::default()),
        links: vec![far],
        waker,
        snapshots,
        commands,
        operators,
        answers,
        metrics,
        started: Instant::now(),
    });
    runner.expect("the kernel gives a ring").run()
}

/// The same thread with nothing to decide.
fn echo(mut far: ControlEnd, waker: &Waker) {
    let mut ring = Ring::new(64).expect("the kernel gives a ring");
    let mut inbox = Vec::with_capacity(64);
    ring.read_wake(waker.fd().as_raw_fd());
    loop {
        waker.prepare();
        let longest = if far.events.is_empty() {
            Duration::from_secs(1)
        } else {
            Duration::ZERO
        };
        ring.submit_and_wait(longest);
        waker.awake();
        inbox.clear();
        ring.reap(&mut inbox);
        if !inbox.is_empty() {
            ring.read_wake(waker.fd().as_raw_fd());
        }
        let mut answered = false;
        while let Some(event) = far.events.pop() {
            if let Event::Submit { client, .. } = event {
                let reason = Reason::QueueFull;
                let refuse = Effect::Refuse {
                    client,
                    reason,
                    retry_after_s: 0,
                };
                far.effects
                    .push(refuse)
                    .expect("fewer outstanding than slots");
                answered = true;
            }
        }
        if answered {
            far.shard.ring();
        }
    }
}
