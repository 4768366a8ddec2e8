//! The core alone: no thread, no ring, one event after the other.
//!
//! Lives on: one core. Bound: `DEPTHS` waiters.
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use iop_control::edge::Control;
use iop_control::step::{Effect, Eligibility, Ending, Event, Evidence, Out};
use iop_proto::catalog::Operation;
use iop_proto::domain::HealthEvidence;
use iop_proto::ids::{ClientRef, Now, RunRef};
use iop_proto::reason::Reason;

use super::{client, histogram, model, names, node, quantiles, session};
use crate::error::Error;

/// Candidates of the model.
const CANDIDATES: [usize; 3] = [1, 8, 64];
/// Requests that wait while one after the other is served.
const DEPTHS: [u32; 4] = [0, 10, 1_000, 100_000];

/// Prints both tables; how many rows they have.
pub(super) fn run(measured: Duration) -> Result<usize, Error> {
    println!("\n| core alone | leases/s | ns a lease |\n|---|---|---|");
    for candidates in CANDIDATES {
        let (count, spent) = leases(candidates, measured)?;
        let each = spent.as_nanos() / u128::from(count.max(1));
        let rate = u128::from(count) * 1_000_000_000 / spent.as_nanos().max(1);
        println!("| a model with {candidates} candidates | {rate} | {each} |");
    }
    println!(
        "\n| waiters | terminal that grants the next, ns | submit that waits, ns | \
         a fence, ns |\n|---|---|---|---|"
    );
    for depth in DEPTHS {
        let costs = Costs::measure(depth, measured)?;
        let [grant, wait, fence] = [&costs.grant, &costs.wait, &costs.fence].map(quantiles);
        println!("| {depth} | {grant} | {wait} | {fence} |");
    }
    println!(
        "\n| second runs that wait | terminal that grants the next, ns | stall that waits, ns | \
         a fence, ns |\n|---|---|---|---|"
    );
    for depth in DEPTHS {
        let costs = Costs::of_second_runs(depth, measured)?;
        let [grant, wait, fence] = [&costs.grant, &costs.wait, &costs.fence].map(quantiles);
        println!("| {depth} | {grant} | {wait} | {fence} |");
    }
    println!("\nEach p50 / p99 / p99.9 / most; a look at the clock included.");
    Ok(CANDIDATES.len() + 2 * DEPTHS.len())
}

/// A control core whose one node is ready.
struct Core {
    control: Control,
    out: Out,
    now: Now,
    next_session: u32,
}

impl Core {
    fn new(providers: usize, capacity: u32, waiters_max: u32) -> Self {
        let names = Arc::new(names(providers, capacity, waiters_max));
        let mut core = Self {
            control: Control::new(names, 1, Now::default()),
            out: Out::default(),
            now: Now::default(),
            next_session: 1,
        };
        core.connect();
        core
    }

    /// The node registers and becomes ready over its next connection, as in real life.
    fn connect(&mut self) -> Option<(RunRef, ClientRef)> {
        let session = self.session();
        let claimed = Some(node());
        self.step(Event::Register {
            session,
            reply_to: 1,
            claimed,
            certified: claimed,
        });
        self.grants(Event::Ready {
            session,
            reply_to: 2,
            claimed,
        })
    }

    /// Its connection ends.
    fn disconnect(&mut self, fence: &mut Histogram<u64>) {
        let session = self.session();
        let cause = Reason::PeerClosed;
        timed(fence, || self.step(Event::Closed { session, cause }));
        self.next_session += 1;
    }

    fn session(&self) -> iop_proto::ids::SessionRef {
        let generation = iop_proto::ids::SlotGeneration::new(self.next_session);
        iop_proto::ids::SessionRef {
            generation: generation.expect("not 0"),
            ..session()
        }
    }

    /// One event; the run it granted, if it did.
    fn step(&mut self, event: Event) -> Option<RunRef> {
        self.grants(event).map(|(run, _)| run)
    }

    /// One event; the run it granted, if it did, and whose.
    fn grants(&mut self, event: Event) -> Option<(RunRef, ClientRef)> {
        self.control.handle(self.now, event, &mut self.out);
        let mut granted = None;
        for effect in self.out.drain() {
            if let Effect::Grant { run, client, .. } = effect {
                granted = Some((run, client));
            }
        }
        granted
    }

    fn submit(&mut self, slot: u32) -> Option<RunRef> {
        self.step(Event::Submit {
            client: client(slot),
            model: model(),
            operation: Operation::ChatCompletions,
            long: false,
            body_bytes: 1,
        })
    }

    fn end(&mut self, run: RunRef) -> Option<RunRef> {
        let ending = Ending::Complete;
        self.step(Event::Terminal { run, ending })
    }
}

/// Whole leases: submit, begun, terminal.
fn leases(candidates: usize, measured: Duration) -> Result<(u64, Duration), Error> {
    let mut core = Core::new(candidates, 64, 1);
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < measured {
        for slot in 0..1_000 {
            let run = core.submit(slot);
            let run = run.ok_or_else(|| Error::part("a request with room was not granted"))?;
            core.step(Event::Begun { run });
            core.end(run);
        }
        count += 1_000;
    }
    Ok((count, began.elapsed()))
}

/// What single steps cost while so many wait, ns.
struct Costs {
    grant: Histogram<u64>,
    wait: Histogram<u64>,
    fence: Histogram<u64>,
}

impl Costs {
    fn measure(depth: u32, measured: Duration) -> Result<Self, Error> {
        let mut core = Core::new(1, 1, depth + 1);
        let mut costs = Self {
            grant: histogram(),
            wait: histogram(),
            fence: histogram(),
        };
        let mut run = core.submit(0).ok_or_else(|| Error::part("no grant"))?;
        for slot in 1..=depth {
            core.submit(slot);
        }
        let mut slot = depth;
        let began = Instant::now();
        while began.elapsed() < measured {
            for _ in 0..100 {
                slot = (slot + 1) % (4 * (depth + 1));
                timed(&mut costs.wait, || core.submit(slot));
                core.step(Event::Begun { run });
                let next = timed(&mut costs.grant, || core.end(run));
                run = next.ok_or_else(|| Error::part("the next waiter was not granted"))?;
            }
        }
        for _ in 0..100 {
            run = costs.fence(&mut core, run)?;
        }
        Ok(costs)
    }

    /// The same of requests whose first run has stalled at one provider; the other is taken.
    fn of_second_runs(depth: u32, measured: Duration) -> Result<Self, Error> {
        let mut core = Core::new(2, 1, 1);
        let mut costs = Self {
            grant: histogram(),
            wait: histogram(),
            fence: histogram(),
        };
        let first = core.submit(0).ok_or_else(|| Error::part("no grant"))?;
        let other = core.submit(1).ok_or_else(|| Error::part("no grant"))?;
        costs.stall(&mut core, first, 0)?;
        let mut second = (other, client(1));
        for slot in 2..depth + 2 {
            let run = core.submit(slot).ok_or_else(|| Error::part("no grant"))?;
            costs.stall(&mut core, run, slot)?;
        }
        costs.wait.reset();
        let mut slot = depth + 1;
        let began = Instant::now();
        while began.elapsed() < measured {
            for _ in 0..100 {
                slot = (slot + 1) % (4 * (depth + 2));
                let run = core.submit(slot).ok_or_else(|| Error::part("no grant"))?;
                costs.stall(&mut core, run, slot)?;
                let (run, ending) = (second.0, Ending::Complete);
                core.step(Event::Begun { run });
                let next = timed(&mut costs.grant, || {
                    core.grants(Event::Terminal { run, ending })
                });
                second = next.ok_or_else(|| Error::part("no second run was granted"))?;
            }
        }
        for _ in 0..100 {
            // It had not begun: everybody waits until it is back, and it is the oldest again.
            core.disconnect(&mut costs.fence);
            let (run, client) = (second.0, Some(second.1));
            core.step(Event::NotSent { run, client });
            let next = core.connect();
            second = next.ok_or_else(|| Error::part("no second run was granted"))?;
        }
        Ok(costs)
    }

    /// A begun run stalls, its provider being as well as before, and its request waits again.
    fn stall(&mut self, core: &mut Core, run: RunRef, slot: u32) -> Result<(), Error> {
        core.step(Event::Begun { run });
        let event = Event::Stalled {
            run,
            client: Some(client(slot)),
            evidence: Evidence::Valid {
                health: HealthEvidence::Unknown,
                seq: None,
            },
            recovery: Eligibility::Eligible,
        };
        match timed(&mut self.wait, || core.step(event)) {
            None => Ok(()),
            Some(_) => Err(Error::part("a second run was granted where it failed")),
        }
    }

    /// The node goes and comes back: its run is lost, the next waiter is granted.
    fn fence(&mut self, core: &mut Core, run: RunRef) -> Result<RunRef, Error> {
        core.step(Event::Begun { run });
        core.disconnect(&mut self.fence);
        core.step(Event::Lost { run });
        let next = core.connect().map(|(run, _)| run);
        match next {
            Some(next) => Ok(next),
            None => core.submit(u32::MAX).ok_or_else(|| Error::part("no grant")),
        }
    }
}

fn timed<T>(into: &mut Histogram<u64>, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    let spent = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    into.saturating_record(spent.max(1));
    done
}
