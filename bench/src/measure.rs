//! One run of one cell: starts what is measured, runs the rig against it, reads what it cost.
//!
//! Lives on: the main thread; the rig has one of its own. Bound: the rig's deadlines.
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::bare::Bare;
use crate::error::Error;
use crate::node::Node;
use crate::origin::{ORIGIN_TOKEN, Origin};
use crate::os::{self, Poll, now_ns};
use crate::part::Metrics;
use crate::proc::{self, Ticks, Usage};
use crate::provider::Provider;
use crate::rig::{Outcome, Plan, Rig, Window};
use crate::system::{MODEL, NODE, Place, Running, Side, System};

/// Longest wait for the rig to say when its window is.
const WINDOW_LIMIT: Duration = Duration::from_secs(90);
/// Sleep of a provider that answers probes while its system starts.
const PROBE_NS: u64 = 5_000_000;
/// A run is taken when the hypervisor had at most this share of the time, and others here this.
pub(crate) const STEAL_MAX: f64 = 0.03;
pub(crate) const OTHERS_MAX: f64 = 0.05;

/// Percentiles that are kept.
pub(crate) const PERCENTILES: [(&str, f64); 4] =
    [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99.9", 99.9)];

/// What one run showed. Absent figures are `NAN`.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Events that reached clients, a second.
    pub(crate) events_per_second: f64,
    /// Body frames the Edge took from its nodes, a second.
    pub(crate) frames_per_second: f64,
    /// Processor time per event: of each thread role, µs.
    pub(crate) cost_us: BTreeMap<String, f64>,
    /// Heap allocations per frame on shard and control threads.
    pub(crate) allocations: f64,
    /// From a request to its first event, µs, as `PERCENTILES`.
    pub(crate) first_us: [f64; 4],
    /// From due to arrived, µs, as `PERCENTILES`; saturated runs show their queues alone.
    pub(crate) latency_us: [f64; 4],
    /// How late the rig itself was, µs, as `PERCENTILES`.
    pub(crate) late_us: [f64; 4],
    /// Resident bytes at the end of the window.
    pub(crate) resident: f64,
    /// Shares of the window: measured core and rig's core busy; taken by the hypervisor; used by
    /// processes that are not ours.
    pub(crate) measured_busy: f64,
    pub(crate) rig_busy: f64,
    pub(crate) steal: f64,
    pub(crate) others: f64,
}

impl Run {
    pub(crate) fn cost_total(&self) -> f64 {
        self.cost_us.values().fold(0.0, |sum, us| sum + us)
    }

    /// Neither the hypervisor nor other processes took part.
    pub(crate) fn is_quiet(&self) -> bool {
        self.steal <= STEAL_MAX && self.others <= OTHERS_MAX
    }

    pub(crate) fn json(&self) -> Value {
        let percentiles = |values: &[f64; 4]| {
            let named = PERCENTILES.iter().zip(values);
            Value::Object(
                named
                    .map(|((name, _), us)| ((*name).to_owned(), json!(us)))
                    .collect(),
            )
        };
        json!({
            "events_per_second": self.events_per_second,
            "frames_per_second": self.frames_per_second,
            "cpu_us_per_event": self.cost_us,
            "allocations_per_frame": self.allocations,
            "time_to_first_event_us": percentiles(&self.first_us),
            "latency_us": percentiles(&self.latency_us),
            "rig_late_us": percentiles(&self.late_us),
            "resident_bytes": self.resident,
            "measured_core_busy": self.measured_busy,
            "rig_core_busy": self.rig_busy,
            "steal": self.steal,
            "others": self.others,
            "quiet": self.is_quiet(),
        })
    }
}

/// Where the rig's clients and origin are to connect.
#[derive(Clone, Copy, Debug)]
struct Target {
    clients: SocketAddr,
    nodes: Option<SocketAddr>,
}

/// One reading of everything that is counted.
struct Reading {
    at: u64,
    usage: Usage,
    own: u64,
    metrics: Metrics,
    resident: u64,
    all: Ticks,
    measured: Ticks,
    rig: Ticks,
}

impl Reading {
    fn take(running: &Running, place: &Place) -> Self {
        let own = [("bench".to_owned(), std::process::id())];
        let core = |number| Ticks::of(&format!("cpu{number}"));
        let processes = running.processes();
        Self {
            at: now_ns(),
            usage: Usage::of(&processes),
            resident: proc::resident(&processes),
            own: Usage::of(&own).total(),
            metrics: running.metrics().unwrap_or_default(),
            all: Ticks::of("cpu"),
            measured: core(place.cores.measured),
            rig: core(place.cores.rig),
        }
    }
}

/// Runs one cell once.
pub(crate) fn run(place: &Place, system: System, plan: Plan) -> Result<Run, Error> {
    let (listener, provider) = Provider::bind()?;
    let (target, targets) = mpsc::channel();
    let (window, windows) = mpsc::channel();
    std::thread::scope(|scope| {
        let rig = std::thread::Builder::new()
            .name("rig".to_owned())
            .spawn_scoped(scope, move || {
                rig(place, system.side(), plan, listener, &targets, window)
            })
            .map_err(Error::io("start the rig"))?;
        let running = match place.start(system, provider) {
            Ok(running) => running,
            Err(error) => {
                drop(target); // the rig hears it and ends
                let _for_want_of_a_system = rig.join();
                return Err(error);
            }
        };
        let watched = watch(place, &running, target, &windows);
        let outcome = rig.join().map_err(|_| Error::part("the rig panicked"))?;
        // The rig's own reason says more than that it stopped.
        let outcome = outcome?;
        let (before, after) = watched?;
        Ok(figures(&outcome, plan, &before, &after))
    })
}

/// Tells the rig where the system is, and reads the counters at both ends of its window.
fn watch(
    place: &Place,
    running: &Running,
    target: Sender<Target>,
    windows: &Receiver<Window>,
) -> Result<(Reading, Reading), Error> {
    let Running { clients, nodes, .. } = *running;
    let told = target.send(Target { clients, nodes });
    told.map_err(|_| Error::part("the rig stopped"))?;
    let window = windows.recv_timeout(WINDOW_LIMIT);
    let window = window.map_err(|_| Error::part("the rig stopped before it measured"))?;
    sleep_until(window.from);
    let before = Reading::take(running, place);
    sleep_until(window.to);
    let after = Reading::take(running, place);
    // The rig ends its streams while the system still runs.
    let _ended = windows.recv_timeout(WINDOW_LIMIT);
    Ok((before, after))
}

fn sleep_until(at: u64) {
    std::thread::sleep(Duration::from_nanos(at.saturating_sub(now_ns())));
}

/// The rig's thread. `window` is dropped when it ends, which the watcher hears.
fn rig(
    place: &Place,
    side: Side,
    plan: Plan,
    listener: TcpListener,
    targets: &Receiver<Target>,
    window: Sender<Window>,
) -> Result<Outcome, Error> {
    os::pin(place.cores.rig)
        .and_then(|()| os::sharp_timers())
        .map_err(Error::io("prepare the rig's thread"))?;
    let mut poll = Poll::new().map_err(Error::io("make an epoll"))?;
    let (streams, bytes) = (plan.streams, plan.event_bytes);
    let stopped = |_| Error::part("the system did not start");
    let (mut origin, target): (Box<dyn Origin>, Target) = match side {
        Side::Provider => {
            let mut provider = Provider::listen(&poll, listener, streams, bytes, plan.wording)?;
            let target = answer_probes(&mut poll, &mut provider, targets)?;
            (Box::new(provider), target)
        }
        Side::Node => {
            let target = targets.recv().map_err(stopped)?;
            let node = Node::connect(nodes_of(target)?, &place.pki(), NODE, streams, bytes)?;
            node.watch(&poll)?;
            (Box::new(node), target)
        }
        Side::Bare => {
            let target = targets.recv().map_err(stopped)?;
            let bare = Bare::connect(&poll, nodes_of(target)?, streams, bytes)?;
            (Box::new(bare), target)
        }
    };
    Rig::connect(plan, MODEL, target.clients, poll, origin.as_mut())?.run(&window)
}

fn nodes_of(target: Target) -> Result<SocketAddr, Error> {
    let nodes = target.nodes;
    nodes.ok_or_else(|| Error::part("a system without an address for nodes"))
}

/// Serves health probes until the system has started.
fn answer_probes(
    poll: &mut Poll,
    provider: &mut Provider,
    targets: &Receiver<Target>,
) -> Result<Target, Error> {
    let (mut ready, mut opened) = (Vec::new(), Vec::new());
    loop {
        match targets.try_recv() {
            Ok(target) => return Ok(target),
            Err(TryRecvError::Disconnected) => return Err(Error::part("the system did not start")),
            Err(TryRecvError::Empty) => {}
        }
        ready.clear();
        let waited = poll.wait(PROBE_NS, &mut ready);
        waited.map_err(Error::io("wait for probes"))?;
        for event in &ready {
            debug_assert!(event.token >= ORIGIN_TOKEN);
            provider.ready(poll, *event, &mut opened)?;
        }
    }
}

fn figures(outcome: &Outcome, plan: Plan, before: &Reading, after: &Reading) -> Run {
    let events_per_second = outcome.events as f64 / plan.measured.as_secs_f64();
    let seconds = (after.at - before.at) as f64 / 1e9;
    let between = |of: fn(&Metrics) -> f64| of(&after.metrics) - of(&before.metrics);
    let frames = between(Metrics::frames);
    let hot = |metrics: &Metrics| metrics.allocations("shard") + metrics.allocations("control");
    let usage = after.usage.since(&before.usage);
    let cost = |(role, run): (&String, &u64)| {
        let us_per_second = *run as f64 / 1e3 / seconds;
        (role.clone(), us_per_second / events_per_second)
    };
    let (all, steal) = after.all.shares_since(before.all);
    let ours = (usage.total() + after.own - before.own) as f64 / 1e9;
    let cores = proc::cores() as f64;
    let per_frame = |count: f64| {
        if frames > 0.0 {
            count / frames
        } else {
            f64::NAN
        }
    };
    Run {
        events_per_second,
        frames_per_second: if frames > 0.0 {
            frames / seconds
        } else {
            f64::NAN
        },
        cost_us: usage.by_role.iter().map(cost).collect(),
        allocations: per_frame(between(hot)),
        first_us: percentiles(&outcome.first),
        latency_us: percentiles(&outcome.latency),
        late_us: percentiles(&outcome.late),
        resident: after.resident as f64,
        measured_busy: after.measured.shares_since(before.measured).0,
        rig_busy: after.rig.shares_since(before.rig).0,
        steal,
        others: (all - steal - ours / seconds / cores).max(0.0),
    }
}

fn percentiles(of: &Histogram<u64>) -> [f64; 4] {
    PERCENTILES.map(|(_, at)| {
        if of.is_empty() {
            f64::NAN
        } else {
            of.value_at_percentile(at) as f64 / 1e3
        }
    })
}
