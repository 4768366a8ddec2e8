//! A run: rounds of load and faults, a quiet point after each, and the verdict.
//!
//! Lives on: the harness. Bound: the minutes asked for, and one round with its quiet point.
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::client::{get, order};
use crate::error::Error;
use crate::journal::{Calls, now_ms};
use crate::judge::{self, Counts, Past, Span};
use crate::load::{self, Harvest, Load};
use crate::part::Part;
use crate::plan::{self, Fault, LOAD_MS, Round, Signal, Step, Who};
use crate::quiet::{self, Growth};
use crate::stage::Stage;
use crate::{Options, network::Form};

/// Faults after which a run has shown enough.
const FAULTS_MAX: usize = 10;
/// Of those of a round that are shown.
const SHOWN_MAX: usize = 12;
/// A run of so many minutes shows each kind of request come to what it is for.
const SHOWING_MINUTES: u32 = 3;
/// How often the parts are looked at.
const TICK: Duration = Duration::from_millis(100);
/// From a part's start until it answers. Before, it listens to no signals, and nobody sends it one.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// Until a part that is up answers an order: its pauses and its link's troubles end before.
const ORDER_LIMIT: Duration = Duration::from_secs(10);
/// Until an order that was taken shows in the metrics.
const COUNTED_LIMIT: Duration = Duration::from_secs(10);

struct Run {
    options: Options,
    stage: Stage,
    began: Instant,
    counts: Counts,
    past: Past,
    /// Faults that were given, by kind.
    given: BTreeMap<&'static str, u32>,
    growth: BTreeMap<Who, Growth>,
    /// Faults of the plan that were not given: another was at work there, or nobody was.
    skipped: u32,
    /// Providers at quiet points that came back only when the harness had asked for a look.
    asked_about: u32,
    rounds: (usize, usize),
    passed: u32,
    failed: u32,
}

/// A fault that was given.
struct Given {
    fault: Fault,
    from_ms: u64,
    to_ms: u64,
    /// What should not have come of it.
    wrong: Option<String>,
}

impl Given {
    /// While it was at work, `who` being whom that concerns.
    fn span(&self, who: Who) -> Span {
        Span {
            who,
            from_ms: self.from_ms,
            to_ms: self.to_ms,
        }
    }
}

/// `true`: everything held.
pub(crate) async fn run(options: Options) -> Result<bool, Error> {
    let rounds = plan::rounds(options.seed, options.minutes);
    let stage = Stage::set(&options).await?;
    println!(
        "chaos: seed {}, {} minutes, {} rounds planned, {} clients at each Edge, links: {}",
        options.seed,
        options.minutes,
        rounds.len(),
        options.clients,
        match stage.form {
            Form::Veth => "relays and network namespaces",
            Form::Relay => "relays",
        }
    );
    let mut run = Run {
        options,
        stage,
        began: Instant::now(),
        counts: Counts::default(),
        past: Past::default(),
        given: BTreeMap::new(),
        growth: BTreeMap::new(),
        skipped: 0,
        asked_about: 0,
        rounds: (0, rounds.len()),
        passed: 0,
        failed: 0,
    };
    run.all(&rounds).await?;
    run.report();
    println!("{} passed, {} failed", run.passed, run.failed);
    Ok(run.failed == 0 && run.passed > 0)
}

/// Ids of the questions at quiet points, apart from those of the load.
const PROBES: u64 = 1 << 62;

impl Run {
    async fn all(&mut self, rounds: &[Round]) -> Result<(), Error> {
        if !self.quiet("the start", &[]).await {
            return Ok(());
        }
        let limit = Duration::from_secs(u64::from(self.options.minutes) * 60);
        for (row, round) in (0..).zip(rounds) {
            if self.began.elapsed() >= limit {
                break;
            }
            let is_quiet = self.round(row, round).await?;
            self.rounds.0 += 1;
            if !is_quiet || self.failed as usize >= FAULTS_MAX {
                break;
            }
        }
        self.end().await
    }

    /// One round; `false`: it never became quiet, and the next would tell nothing.
    async fn round(&mut self, row: u32, round: &Round) -> Result<bool, Error> {
        let minute = self.minute();
        let told: Vec<_> = round.steps.iter().map(told).collect();
        let told = told.join("; ");
        println!("round {row} (minute {minute:.1}): {told}");
        let load = Load::start(
            &self.stage.sites,
            self.options.seed,
            row + 1,
            self.options.clients,
        );
        let (given, mut faults) = self.faults(&round.steps).await?;
        for fault in &given {
            *self.given.entry(fault.fault.kind()).or_default() += 1;
        }
        let skipped = round.steps.len() - given.len();
        self.skipped += u32::try_from(skipped).unwrap_or(u32::MAX);
        let mut harvest = load.stop().await;
        faults.append(&mut harvest.faults);
        let spans = given.iter();
        let spans = spans.filter_map(|given| Some(given.span(given.fault.explains()?)));
        let spans: Vec<_> = spans.collect();
        let troubles = given.iter();
        let troubles = troubles.filter_map(|given| Some(given.span(given.fault.troubles()?)));
        let troubles: Vec<_> = troubles.collect();
        let broken = judge::broken(&harvest.entries, &troubles);
        harvest.faults.extend(broken);
        self.check("ends", &told, faults);
        let is_quiet = self.quiet(&told, &spans).await;
        if is_quiet {
            self.probe(&mut harvest, u64::from(row)).await;
            self.judge(&told, harvest, &spans)?;
            self.held(&told)?;
        } else {
            self.check("answers", &told, harvest.faults);
        }
        self.looked(&told)?;
        Ok(is_quiet)
    }

    fn minute(&self) -> f64 {
        self.began.elapsed().as_secs_f64() / 60.0
    }

    /// Gives every fault its time; which were given, and what ended that should not have.
    async fn faults(&self, steps: &[Step]) -> Result<(Vec<Given>, Vec<String>), Error> {
        let began = Instant::now();
        let mut ended = Vec::new();
        let given = {
            let mut given = std::pin::pin!(self.give(steps));
            loop {
                tokio::select! {
                    given = &mut given => break given?,
                    () = tokio::time::sleep(TICK) => {
                        ended.extend(self.stage.parts.iter().filter_map(Part::ended));
                    }
                }
            }
        };
        let load = Duration::from_millis(u64::from(LOAD_MS));
        tokio::time::sleep(load.saturating_sub(began.elapsed())).await;
        ended.extend(given.iter().filter_map(|given| given.wrong.clone()));
        Ok((given, ended))
    }

    async fn give(&self, steps: &[Step]) -> Result<Vec<Given>, Error> {
        let under_way = steps.iter().map(async |step| {
            let at = Duration::from_millis(u64::from(step.at_ms));
            tokio::time::sleep(at).await;
            let from_ms = now_ms();
            let done = self.fault(step.fault).await?;
            Ok(done.map(|wrong| Given {
                fault: step.fault,
                from_ms,
                to_ms: now_ms(),
                wrong,
            }))
        });
        let done: Result<Vec<_>, Error> = join_all(under_way).await.into_iter().collect();
        Ok(done?.into_iter().flatten().collect())
    }

    /// `None`: it was not its turn. `Some(Some(_))`: a process did not end as documented.
    async fn fault(&self, fault: Fault) -> Result<Option<Option<String>>, Error> {
        let pause = |ms| tokio::time::sleep(Duration::from_millis(u64::from(ms)));
        match fault {
            Fault::Kill {
                who,
                signal,
                down_ms,
            } => {
                let part = self.stage.part(who);
                let Some(_turn) = part.turn() else {
                    return Ok(None);
                };
                let ended = part.end(signal).await?;
                pause(down_ms).await;
                part.start()?;
                let late = self.until_ready(who).await?;
                Ok(Some(ended.or(late)))
            }
            Fault::Pause { who, ms } => {
                let part = self.stage.part(who);
                let Some(_turn) = part.turn() else {
                    return Ok(None);
                };
                part.signal("STOP").await?;
                pause(ms).await;
                part.signal("CONT").await?;
                Ok(Some(None))
            }
            Fault::Link { link, trouble, ms } => {
                let given = self.stage.link(link).trouble(trouble, ms).await?;
                Ok(given.then_some(None))
            }
            Fault::Reload { edge } => self.reload(edge).await,
            Fault::Drain { node } => self.drain(node).await,
        }
    }

    /// An Edge takes what was changed, and counts it; one with managed credentials refuses the order
    /// and counts that.
    async fn reload(&self, edge: u8) -> Result<Option<Option<String>>, Error> {
        let part = self.stage.part(Who::Edge(edge));
        let Some(_turn) = part.turn() else {
            return Ok(None);
        };
        let family = if edge == 0 {
            "iop_edge_config_reloads_total"
        } else {
            "iop_edge_config_reloads_refused_total"
        };
        let name = part.who.name();
        let Some(before) = self.counted(edge, family).await else {
            return Ok(Some(Some(format!("{name} is up, and tells no {family}"))));
        };
        let (_, log_end) = part.log_since(0)?;
        self.stage.change(edge)?;
        part.signal("HUP").await?;
        Ok(Some(if !self.until_counted(edge, family, before).await {
            Some(format!(
                "{name} was told to reload, and {family} stays {before}"
            ))
        } else if edge == 0 && !until_changed(part, log_end).await? {
            Some(format!("{name} has reloaded, and taken no change"))
        } else {
            None
        }))
    }

    /// `Ok(None)`: the node was away, or another fault is at work on its Edge.
    async fn drain(&self, node: u8) -> Result<Option<Option<String>>, Error> {
        const FAMILY: &str = "iop_edge_node_drains_total";
        let edge = Who::edge_of(node);
        let Some(_turn) = self.stage.part(Who::Edge(edge)).turn() else {
            return Ok(None);
        };
        let name = Who::Node(node).name();
        let request = format!(
            "POST /nodes/{name}/drain HTTP/1.1\r\nhost: chaos\r\nx-iop-operator: chaos\r\n\
             connection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let Some(before) = self.counted(edge, FAMILY).await else {
            let edge = Who::Edge(edge).name();
            return Ok(Some(Some(format!("{edge} is up, and tells no {FAMILY}"))));
        };
        let admin = self.stage.admins[usize::from(edge)];
        let answer = order(admin, &request, ORDER_LIMIT).await;
        match answer {
            Some((200, _)) if self.until_counted(edge, FAMILY, before).await => Ok(Some(None)),
            Some((200, _)) => Ok(Some(Some(format!(
                "{name} was drained, and {FAMILY} stays {before}"
            )))),
            Some((409, _)) => Ok(None),
            None => Ok(Some(Some(format!("drain of {name}: no answer")))),
            Some((status, body)) => Ok(Some(Some(format!("drain of {name}: {status} {body}")))),
        }
    }

    /// The sum of a family of metrics.
    async fn counted(&self, edge: u8, family: &str) -> Option<f64> {
        let admin = self.stage.admins[usize::from(edge)];
        let text = get(admin, "/metrics", ORDER_LIMIT).await?;
        quiet::sum(&text, family)
    }

    async fn until_counted(&self, edge: u8, family: &str, before: f64) -> bool {
        let began = Instant::now();
        while began.elapsed() < COUNTED_LIMIT {
            let now = self.counted(edge, family).await;
            if now.is_some_and(|now| now > before) {
                return true;
            }
            tokio::time::sleep(TICK).await;
        }
        false
    }

    /// `Some`: it does not answer, and should.
    async fn until_ready(&self, who: Who) -> Result<Option<String>, Error> {
        let began = Instant::now();
        while !self.stage.is_ready(who).await? {
            if self.stage.part(who).pid().is_none() {
                return Ok(None); // whoever looks for ends has found this one
            }
            if began.elapsed() > READY_LIMIT {
                let name = who.name();
                return Ok(Some(format!(
                    "{name} is not ready {READY_LIMIT:?} after its start"
                )));
            }
            tokio::time::sleep(TICK).await;
        }
        Ok(None)
    }

    async fn quiet(&mut self, told: &str, spans: &[Span]) -> bool {
        match quiet::wait(&self.stage).await {
            Ok(reached) => {
                let after = reached.after;
                self.asked_about += reached.asked;
                let mut disturbed: Vec<_> = spans.iter().map(|span| span.who.name()).collect();
                disturbed.sort();
                disturbed.dedup();
                println!(
                    "  quiet after {after:.1?}; disturbed: {}",
                    disturbed.join(" ")
                );
                self.passed += 1;
                true
            }
            Err(left) => {
                self.check("counters", told, left);
                false
            }
        }
    }

    /// Every model is served again, with whole answers, and so is everybody at once.
    async fn probe(&mut self, harvest: &mut Harvest, round: u64) {
        let first_id = |row: u64| PROBES | round << 32 | row << 24;
        let (seed, clients) = (self.options.seed, self.options.clients);
        let sites = (0..).zip(&self.stage.sites);
        let probes = sites
            .clone()
            .map(|(row, site)| load::probe(site, first_id(row)));
        let probes = join_all(probes).await;
        let bursts = sites.map(|(row, site)| load::burst(site, seed, first_id(row), clients));
        let bursts = join_all(bursts).await;
        for probed in probes.into_iter().chain(bursts) {
            let entries = probed.entries.iter();
            let incomplete = entries.filter(|entry| entry.outcome.name() != "complete");
            let told = incomplete.map(|entry| format!("not served at a quiet point: {entry:?}"));
            harvest.faults.extend(told);
            harvest.join(probed);
        }
    }

    fn judge(&mut self, told: &str, harvest: Harvest, spans: &[Span]) -> Result<(), Error> {
        let mut calls = Calls::new();
        for journal in &mut self.stage.journals {
            journal.read(&mut calls).map_err(Error::io("a journal"))?;
        }
        let mut counts = Counts::default();
        let past = Past::new(&harvest.entries, &calls, spans);
        let mut faults = harvest.faults;
        faults.extend(judge::round(
            &harvest.entries,
            calls,
            spans,
            &self.past,
            &mut counts,
        ));
        println!(
            "  {} requests: {} complete, {} refused, {} failed, {} cut, {} left; {} calls, {} asked again",
            counts.requests(),
            counts.of("complete"),
            counts.of("refused"),
            counts.of("failed in the stream"),
            counts.of("cut"),
            counts.of("left"),
            counts.calls,
            counts.again
        );
        self.past = past;
        self.counts.join(counts);
        self.check("answers", told, faults);
        Ok(())
    }

    fn held(&mut self, told: &str) -> Result<(), Error> {
        let mut faults = Vec::new();
        for part in &self.stage.parts {
            if matches!(part.who, Who::Server(_)) {
                continue;
            }
            let name = part.who.name();
            let Some(held) = part.held() else {
                faults.push(format!("{name}: what it holds cannot be read"));
                continue;
            };
            let growth = self.growth.entry(part.who).or_default();
            let reserved_kib = quiet::reserved_kib(&part.log()?);
            if matches!(part.who, Who::Edge(_)) && reserved_kib == 0 {
                faults.push(format!("{name} does not say what it has reserved"));
            }
            let grown = growth.take(reserved_kib, held, part.lives.get());
            faults.extend(grown.map(|why| format!("{name} {why}")));
        }
        self.check("growth", told, faults);
        Ok(())
    }

    fn looked(&mut self, told: &str) -> Result<(), Error> {
        let mut faults = Vec::new();
        for part in &self.stage.parts {
            faults.extend(part.look(&self.stage.secrets)?);
        }
        self.check("logs", told, faults);
        Ok(())
    }

    /// Counts what was looked at; shows what was found.
    fn check(&mut self, what: &str, told: &str, faults: Vec<String>) {
        if faults.is_empty() {
            self.passed += 1;
            return;
        }
        self.failed += 1;
        let (seed, minute) = (self.options.seed, self.minute());
        println!("FAILED {what}: seed {seed}, minute {minute:.1}, steps: {told}");
        println!("  {}", self.command());
        for fault in faults.iter().take(SHOWN_MAX) {
            println!("  {fault}");
        }
        println!(
            "  {} in all; logs and journals: {}",
            faults.len(),
            self.out().display()
        );
    }

    /// What gives the same plan and the same requests again.
    fn command(&self) -> String {
        let Options {
            minutes,
            seed,
            clients,
            ..
        } = self.options;
        let links = match self.stage.form {
            Form::Veth => "veth",
            Form::Relay => "relay",
        };
        format!(
            "cargo xtask chaos --minutes {minutes} --seed {seed} --clients {clients} --links {links}"
        )
    }

    fn out(&self) -> &PathBuf {
        &self.options.out
    }

    /// Everybody is asked to go, nodes first, and goes as documented.
    async fn end(&mut self) -> Result<(), Error> {
        let mut faults = Vec::new();
        for is_node in [true, false] {
            for part in &self.stage.parts {
                if matches!(part.who, Who::Node(_)) == is_node {
                    faults.extend(part.end(Signal::Terminate).await?);
                }
            }
        }
        self.check("the end", "SIGTERM to all", faults);
        if self.options.minutes >= SHOWING_MINUTES {
            let missing = self.counts.unseen();
            self.check("kinds", "all", missing);
        }
        self.looked("the end")
    }

    fn report(&self) {
        println!(
            "== after {:.1} minutes, seed {}",
            self.minute(),
            self.options.seed
        );
        println!("-- faults");
        for (kind, count) in &self.given {
            println!("{count:7}  {kind}");
        }
        let (done, planned) = self.rounds;
        println!(
            "{:7}  not given: another was at work there, or nobody to give it to",
            self.skipped
        );
        println!("{done:7}  rounds, of {planned} planned");
        println!(
            "{:7}  providers that the harness had to ask about",
            self.asked_about
        );
        println!(
            "-- requests: {}; calls: {}, {} ended as their client left, {} late; asked again: {}",
            self.counts.requests(),
            self.counts.calls,
            self.counts.stopped,
            self.counts.late,
            self.counts.again
        );
        for (kind, outcomes) in &self.counts.kinds {
            let all: u32 = outcomes.values().sum();
            let each = outcomes
                .iter()
                .map(|(name, count)| format!("{count} {name}"));
            println!("{all:7}  {kind}: {}", each.collect::<Vec<_>>().join(", "));
        }
        println!("-- errors that clients were told");
        for (code, count) in &self.counts.codes {
            println!("{count:7}  {code}");
        }
        println!("-- held at quiet points: warm, at most, and over the last life");
        for (who, growth) in &self.growth {
            let life = growth.life.map_or_else(String::new, |(first, last)| {
                format!(
                    "; {} points of one life: {first} to {last}",
                    growth.life_points
                )
            });
            println!(
                "{:>7}  {}; {}{life}",
                who.name(),
                growth.warm(),
                growth.most
            );
        }
    }
}

/// Whether a part says, in its log from byte `from` on, that it has a configuration with changes.
async fn until_changed(part: &Part, from: u64) -> Result<bool, Error> {
    let began = Instant::now();
    while began.elapsed() < COUNTED_LIMIT {
        let (log, _) = part.log_since(from)?;
        // The last line may be half written.
        let mut lines = log
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'));
        if lines.any(is_change) {
            return Ok(true);
        }
        tokio::time::sleep(TICK).await;
    }
    Ok(false)
}

/// A line of a log that tells of a configuration with changes.
fn is_change(line: &str) -> bool {
    let changes = line.split_once(" changes=").map(|(_, changes)| changes);
    line.contains("configuration reloaded")
        && changes.is_some_and(|changes| !changes.starts_with('0'))
}

fn told(step: &Step) -> String {
    format!("{:.1} s {}", f64::from(step.at_ms) / 1_000.0, step.fault)
}
