//! The whole matrix: scenarios, sizes, systems, rounds; which runs count.
//!
//! Lives on: the main thread. Bound: `TRIES` a run; with `--quick` no second try after `RETRY_UNTIL`.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::measure::{self, Run};
use crate::os;
use crate::part::Cores;
use crate::proc;
use crate::report;
use crate::rig::{Pace, Plan};
use crate::system::{Place, System};

/// Runs of a cell and round before the least disturbed is taken.
const TRIES: u32 = 4;
const TRIES_QUICK: u32 = 2;
/// `--quick` repeats nothing after this.
const RETRY_UNTIL: Duration = Duration::from_secs(30);
/// `--quick` begins no cell after this.
const QUICK_UNTIL: Duration = Duration::from_secs(165);
const ROUNDS: u32 = 3;
const SECONDS: u32 = 4;
const MEASURED_QUICK: Duration = Duration::from_millis(1_500);
const SIZES: [usize; 2] = [200, 4096];
/// Streams of the widest load that somebody with a `rate_max` is given.
const STREAMS_REWRITTEN_MAX: usize = 100;

/// The command line.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) iop: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) quick: bool,
    pub(crate) peers: String,
    pub(crate) only: Option<String>,
    pub(crate) rounds: Option<u32>,
    pub(crate) seconds: Option<u32>,
    pub(crate) cores: (usize, usize),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            iop: PathBuf::from("iop"),
            out: PathBuf::from("bench-out"),
            quick: false,
            peers: "installed".to_owned(),
            only: None,
            rounds: None,
            seconds: None,
            cores: (0, 1),
        }
    }
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) streams: usize,
    pub(crate) pace: Pace,
}

pub(crate) const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "saturated",
        streams: 64,
        pace: Pace::Saturated,
    },
    Scenario {
        name: "paced",
        streams: 100,
        pace: Pace::Rate(5_000),
    },
    Scenario {
        name: "wide",
        streams: 1_000,
        pace: Pace::Rate(20_000),
    },
];

impl Scenario {
    /// The load as `system` is given it; `None`: it is not, since it could not end in time.
    fn of(self, system: System) -> Option<Self> {
        let pace = match (self.pace, system.rate_max()) {
            (pace, None) => pace,
            (Pace::Rate(rate), Some(most)) if self.streams <= STREAMS_REWRITTEN_MAX => {
                Pace::Rate(rate.min(most))
            }
            (Pace::Rate(_) | Pace::Saturated, Some(_)) => return None,
        };
        Some(Self { pace, ..self })
    }
}

/// Everything that was run of one system under one load.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) scenario: Scenario,
    pub(crate) bytes: usize,
    pub(crate) system: System,
    /// One a round.
    pub(crate) runs: Vec<Run>,
    /// Thrown away because the machine was not quiet.
    pub(crate) rejected: u32,
    pub(crate) failures: Vec<String>,
}

/// Everything of one call.
#[derive(Debug)]
pub(crate) struct Matrix {
    pub(crate) cells: Vec<Cell>,
    pub(crate) machine: Vec<(&'static str, String)>,
    pub(crate) versions: Vec<(String, String)>,
    pub(crate) core_map: String,
    pub(crate) rounds: u32,
    pub(crate) measured: Duration,
}

/// Runs the matrix and writes the report. False when a cell has no run.
pub(crate) fn run(options: &Options) -> Result<bool, Error> {
    let began = Instant::now();
    let place = place(options)?;
    place.make_keys()?;
    let systems = systems(&options.peers)?;
    let mut matrix = blank(options, &place, &systems)?;
    println!("{}", matrix.core_map);
    let rounds = matrix.rounds;
    for round in 0..rounds {
        for cell in &mut matrix.cells {
            if options.quick && began.elapsed() > QUICK_UNTIL {
                cell.failures.push("no time left".to_owned());
                continue;
            }
            let tries = match (options.quick, began.elapsed() < RETRY_UNTIL) {
                (true, true) => TRIES_QUICK,
                (true, false) => 1,
                (false, _) => TRIES,
            };
            cell.measure(&place, matrix.measured, tries);
            println!("{}/{rounds} {}", round + 1, cell.line());
        }
    }
    let removed = std::fs::remove_dir_all(&place.scratch);
    removed.map_err(Error::io(format!("{}", place.scratch.display())))?;
    report::write(&matrix, &options.out)?;
    let passed = matrix
        .cells
        .iter()
        .filter(|cell| !cell.runs.is_empty())
        .count();
    let failed = matrix.cells.len() - passed;
    println!("{:.0} s in all", began.elapsed().as_secs_f64());
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

fn place(options: &Options) -> Result<Place, Error> {
    std::fs::create_dir_all(&options.out)
        .map_err(Error::io(format!("{}", options.out.display())))?;
    let scratch = std::env::temp_dir().join(format!("iop-bench-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).map_err(Error::io(format!("{}", scratch.display())))?;
    let (measured, rig) = options.cores;
    os::pin(rig).map_err(Error::io(format!("pin to core {rig}")))?;
    Ok(Place {
        iop: options.iop.clone(),
        bench: std::env::current_exe().map_err(Error::io("find this program"))?,
        scratch,
        cores: Cores { measured, rig },
    })
}

fn systems(peers: &str) -> Result<Vec<System>, Error> {
    let chosen = |peer: System| match peers {
        "none" => false,
        "installed" => System::PROXIES.contains(&peer) && peer.is_installed(),
        "all" => peer.is_installed(),
        names => names.split(',').any(|name| name == peer.name()),
    };
    if let Some(name) = peers.split(',').find(|name| {
        let known = System::PEERS.iter().any(|peer| peer.name() == *name);
        !known && !["none", "installed", "all"].contains(name)
    }) {
        return Err(Error::Usage(format!("no peer is called {name}")));
    }
    let peers = System::PEERS.into_iter().filter(|peer| chosen(*peer));
    let peers: Vec<System> = peers.collect();
    if let Some(absent) = peers.iter().find(|peer| !peer.is_installed()) {
        let name = absent.name();
        return Err(Error::Usage(format!("{name} is not installed here")));
    }
    for absent in System::PEERS.iter().filter(|peer| !peer.is_installed()) {
        println!("not installed here: {}", absent.name());
    }
    let ours = System::TUNNEL.into_iter().chain(System::WHOLE);
    Ok(ours.chain(peers).collect())
}

fn blank(options: &Options, place: &Place, systems: &[System]) -> Result<Matrix, Error> {
    let wanted = |scenario: &&Scenario| {
        options
            .only
            .as_deref()
            .is_none_or(|only| only == scenario.name)
    };
    let mut cells = Vec::new();
    for scenario in SCENARIOS.iter().filter(wanted) {
        for bytes in SIZES {
            cells.extend(systems.iter().filter_map(|&system| {
                Some(Cell {
                    scenario: scenario.of(system)?,
                    bytes,
                    system,
                    runs: Vec::new(),
                    rejected: 0,
                    failures: Vec::new(),
                })
            }));
        }
    }
    if cells.is_empty() {
        return Err(Error::Usage("no scenario is called so".to_owned()));
    }
    let seconds = Duration::from_secs(options.seconds.unwrap_or(SECONDS).into());
    let short = options.quick && options.seconds.is_none();
    let rounds = if options.quick { 1 } else { ROUNDS };
    Ok(Matrix {
        cells,
        machine: proc::machine(),
        versions: report::versions(place, systems),
        core_map: format!(
            "core {}: what is measured, all its processes; core {}: clients, origin, counters",
            place.cores.measured, place.cores.rig
        ),
        rounds: options.rounds.unwrap_or(rounds),
        measured: if short { MEASURED_QUICK } else { seconds },
    })
}

impl Cell {
    /// One round: runs until the machine was quiet, at most `tries` times.
    fn measure(&mut self, place: &Place, measured: Duration, tries: u32) {
        let plan = Plan {
            streams: self.scenario.streams,
            event_bytes: self.bytes,
            wording: self.system.wording(),
            pace: self.scenario.pace,
            warm: measured / 4,
            measured,
        };
        let mut best: Option<Run> = None;
        for _ in 0..tries {
            match measure::run(place, self.system, plan) {
                Ok(run) => {
                    let noise = |run: &Run| run.steal + run.others;
                    let quiet = run.is_quiet();
                    self.rejected += u32::from(!quiet);
                    if best.as_ref().is_none_or(|best| noise(&run) < noise(best)) {
                        best = Some(run);
                    }
                    if quiet {
                        break;
                    }
                }
                Err(error) => self.failures.push(error.to_string()),
            }
        }
        self.runs.extend(best);
    }

    /// The run that stands for the cell: of the quiet ones, if there are any, the one whose cost is
    /// the median.
    pub(crate) fn median(&self) -> Option<&Run> {
        let quiet: Vec<&Run> = self.runs.iter().filter(|run| run.is_quiet()).collect();
        let mut runs = if quiet.is_empty() {
            self.runs.iter().collect()
        } else {
            quiet
        };
        let key = |run: &Run| match self.scenario.pace {
            Pace::Saturated => run.events_per_second,
            Pace::Rate(_) if self.system == System::Direct => run.latency_us[0],
            Pace::Rate(_) => run.cost_total(),
        };
        runs.sort_by(|a, b| key(a).total_cmp(&key(b)));
        runs.get(runs.len() / 2).copied()
    }

    fn line(&self) -> String {
        let (name, bytes, system) = (self.scenario.name, self.bytes, self.system.name());
        let head = format!("{name:9} {bytes:4} B {system:15}");
        match (self.runs.last(), self.failures.last()) {
            (Some(run), _) => format!(
                "{head} {:>9.0} events/s {:>7.2} µs/event, p50 {:>6.0} p99 {:>7.0} µs, \
                 steal {:.0} %, others {:.0} %{}",
                run.events_per_second,
                run.cost_total(),
                run.latency_us[0],
                run.latency_us[2],
                run.steal * 100.0,
                run.others * 100.0,
                if run.is_quiet() { "" } else { " (disturbed)" }
            ),
            (None, Some(why)) => format!("{head} {why}"),
            (None, None) => head,
        }
    }
}
