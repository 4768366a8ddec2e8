//! The figures as Prometheus text, format 0.0.4, and the list of every family there can be.
//!
//! Lives on: the cold thread, once per scrape. View: all threads' mirrors, the heap counters, `/proc`,
//! and the last status snapshot. Bound: fixed series, plus a few per configured node, provider and
//! model.
use core::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use iop_proto::catalog::Operation;
use iop_proto::reason::Reason;

use super::process::{Process, ticks_to_seconds};
use super::{
    ControlMetric, ControlReader, FrontMetric, FrontReader, Info, Kind, ShardHistogram,
    ShardMetric, ShardReader, blame_label, operation_label,
};
use crate::alloc::{self, Role};

/// `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A family: what `# HELP` and `# TYPE` say, and the label names its samples carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: Vec<&'static str>,
    pub help: &'static str,
}

macro_rules! single {
    ($($constant:ident: $kind:ident, $name:literal, [$($label:literal),*], $help:literal;)*) => {
        $(const $constant: Single = Single {
            name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help,
        };)*
        const SINGLES: &[Single] = &[$($constant,)*];
    };
}

/// A family that is not a line of a thread's list.
struct Single {
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
}

single! {
    BUILD: Gauge, "iop_edge_build_info", ["version"], "1, labelled with the version that runs.";
    FAILURES: Counter, "iop_edge_failures_total", ["reason", "blame", "by"], "Refusals and forced ends, by reason, by whose doing it was, and by the thread that decided.";
    SHARD_SESSIONS: Gauge, "iop_edge_shard_sessions", ["shard"], "Node connections open on each shard: where the traffic of nodes is.";
    SHARD_RUNS: Gauge, "iop_edge_shard_runs", ["shard"], "Runs on each shard.";
    HEAP_ALLOCATIONS: Counter, "iop_edge_heap_allocations_total", ["role"], "Heap blocks asked for, by thread role.";
    HEAP_FREES: Counter, "iop_edge_heap_frees_total", ["role"], "Heap blocks given back, by thread role.";
    HEAP_BYTES: Counter, "iop_edge_heap_allocated_bytes_total", ["role"], "Heap bytes asked for, by thread role.";
    RESIDENT: Gauge, "process_resident_memory_bytes", [], "Resident memory.";
    DESCRIPTORS: Gauge, "process_open_fds", [], "Open file descriptors.";
    DESCRIPTORS_MAX: Gauge, "process_max_fds", [], "Limit of open file descriptors.";
    THREADS: Gauge, "process_threads", [], "Threads.";
    CPU: Counter, "process_cpu_seconds_total", [], "User and system processor time.";
    START: Gauge, "process_start_time_seconds", [], "Start of the process, Unix time.";
}

/// Every family the text can contain, in its order.
#[must_use]
pub fn families() -> Vec<Family> {
    let listed = ShardMetric::ALL.iter().map(|metric| metric.info());
    let listed = listed.chain(FrontMetric::ALL.iter().map(|metric| metric.info()));
    let listed = listed.chain(ControlMetric::ALL.iter().map(|metric| metric.info()));
    let mut families: Vec<Family> = Vec::new();
    for info in listed {
        if families.last().is_some_and(|last| last.name == info.name) {
            continue;
        }
        let labels = info.labels.iter().map(|&(name, _)| name).collect();
        families.push(Family {
            name: info.name,
            kind: info.kind,
            labels,
            help: info.help,
        });
    }
    for histogram in ShardHistogram::ALL {
        let Info {
            name, kind, help, ..
        } = histogram.info();
        families.push(Family {
            name,
            kind,
            labels: vec![OPERATION, "le"],
            help,
        });
    }
    families.extend(SINGLES.iter().map(|single| Family {
        name: single.name,
        kind: single.kind,
        labels: single.labels.to_vec(),
        help: single.help,
    }));
    families
}

const OPERATION: &str = "gen_ai_operation_name";

/// Where the figures of all threads are read.
#[derive(Debug)]
pub struct Exposition {
    shards: Vec<ShardReader>,
    front: FrontReader,
    control: ControlReader,
    started_unix_s: f64,
}

impl Exposition {
    /// Called once at start; the process's start time is this moment.
    #[must_use]
    pub fn new(shards: Vec<ShardReader>, front: FrontReader, control: ControlReader) -> Self {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            shards,
            front,
            control,
            started_unix_s: since.as_secs_f64(),
        }
    }

    /// Appends the whole text.
    pub fn render(&self, out: &mut String) {
        let mut text = Text { out };
        let shard = ShardMetric::ALL
            .iter()
            .map(|&metric| (metric.info(), self.shard_sum(metric)));
        let front = FrontMetric::ALL
            .iter()
            .map(|&metric| (metric.info(), self.front.get(metric)));
        let control = ControlMetric::ALL
            .iter()
            .map(|&metric| (metric.info(), self.control.get(metric)));
        let mut family = "";
        for (info, value) in shard.chain(front).chain(control) {
            if family != info.name {
                text.family(info.name, info.kind, info.help);
                family = info.name;
            }
            text.sample(info.name, info.labels, Value::Whole(value));
        }
        self.histograms(&mut text);
        text.single(
            &BUILD,
            &[("version", env!("CARGO_PKG_VERSION"))],
            Value::Whole(1),
        );
        self.failures(&mut text);
        self.by_shard(&mut text, &SHARD_SESSIONS, ShardMetric::Sessions);
        self.by_shard(&mut text, &SHARD_RUNS, ShardMetric::Runs);
        heap(&mut text);
        self.process(&mut text);
    }

    /// Shard threads.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Sum over the shards of one figure.
    #[must_use]
    pub fn shard_sum(&self, metric: ShardMetric) -> u64 {
        self.shards
            .iter()
            .map(|shard| shard.get(metric))
            .fold(0, u64::wrapping_add)
    }

    /// One number per bucket in the mirrors, cumulative in the text.
    fn histograms(&self, text: &mut Text<'_>) {
        for histogram in ShardHistogram::ALL {
            let Info {
                name, kind, help, ..
            } = histogram.info();
            text.family(name, kind, help);
            let bounds = histogram.bounds_ns();
            for operation in Operation::ALL {
                let first = histogram.cell(operation);
                let cell = |offset: usize| {
                    let cells = self.shards.iter().map(|shard| shard.0.get(first + offset));
                    cells.fold(0_u64, u64::wrapping_add)
                };
                let label = operation_label(operation);
                let mut count = 0;
                for (row, &bound) in bounds.iter().enumerate() {
                    count += cell(row);
                    let le = Seconds(bound).to_string();
                    let labels = [(OPERATION, label), ("le", le.as_str())];
                    text.suffixed(name, "_bucket", &labels, Value::Whole(count));
                }
                count += cell(bounds.len());
                let labels = [(OPERATION, label), ("le", "+Inf")];
                text.suffixed(name, "_bucket", &labels, Value::Whole(count));
                let labels = [(OPERATION, label)];
                text.suffixed(
                    name,
                    "_sum",
                    &labels,
                    Value::Nanoseconds(cell(bounds.len() + 1)),
                );
                text.suffixed(name, "_count", &labels, Value::Whole(count));
            }
        }
    }

    fn failures(&self, text: &mut Text<'_>) {
        text.family(FAILURES.name, FAILURES.kind, FAILURES.help);
        for &reason in Reason::ALL {
            let shards = self.shards.iter().map(|shard| shard.reason(reason));
            let counts = [
                ("front", self.front.reason(reason)),
                ("shard", shards.fold(0_u64, u64::wrapping_add)),
                ("control", self.control.reason(reason)),
            ];
            for (by, count) in counts {
                let labels = [
                    ("reason", reason.label()),
                    ("blame", blame_label(reason.blame())),
                    ("by", by),
                ];
                text.sample(FAILURES.name, &labels, Value::Whole(count));
            }
        }
    }

    /// One figure of each shard by itself, so that uneven cores are seen. `[P-77]`
    fn by_shard(&self, text: &mut Text<'_>, family: &Single, metric: ShardMetric) {
        text.family(family.name, family.kind, family.help);
        for (row, shard) in self.shards.iter().enumerate() {
            let row = row.to_string();
            let value = Value::Whole(shard.get(metric));
            text.sample(family.name, &[("shard", row.as_str())], value);
        }
    }

    fn process(&self, text: &mut Text<'_>) {
        let process = Process::read();
        let whole = [
            (&RESIDENT, process.resident_bytes),
            (&DESCRIPTORS, process.open_descriptors),
            (&DESCRIPTORS_MAX, process.descriptors_max),
            (&THREADS, process.threads),
        ];
        for (family, value) in whole {
            if let Some(value) = value {
                text.single(family, &[], Value::Whole(value));
            }
        }
        if let Some(ticks) = process.cpu_ticks {
            text.single(&CPU, &[], Value::Real(ticks_to_seconds(ticks)));
        }
        text.single(&START, &[], Value::Real(self.started_unix_s));
    }
}

/// Heap counters per role. The text under construction is itself counted, under the cold role.
fn heap(text: &mut Text<'_>) {
    let counts = Role::ALL.map(|role| (role, alloc::counts(role)));
    type Column = fn(&alloc::Counts) -> u64;
    let columns: [(&Single, Column); 3] = [
        (&HEAP_ALLOCATIONS, |counts| counts.allocations),
        (&HEAP_FREES, |counts| counts.frees),
        (&HEAP_BYTES, |counts| counts.bytes),
    ];
    for (family, column) in columns {
        text.family(family.name, family.kind, family.help);
        for (role, counts) in &counts {
            text.sample(
                family.name,
                &[("role", role.label())],
                Value::Whole(column(counts)),
            );
        }
    }
}

/// A sample's number.
#[derive(Clone, Copy, Debug)]
enum Value {
    Whole(u64),
    Real(f64),
    /// Written in seconds, every digit kept.
    Nanoseconds(u64),
}

/// Nanoseconds written as seconds without trailing zeros.
struct Seconds(u64);

impl core::fmt::Display for Seconds {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (whole, fraction) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        if fraction == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{fraction:09}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

/// Writes lines. The only place that knows the format's escapes.
struct Text<'a> {
    out: &'a mut String,
}

impl Text<'_> {
    fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {}", kind.word()));
    }

    fn single(&mut self, family: &Single, labels: &[(&str, &str)], value: Value) {
        self.family(family.name, family.kind, family.help);
        self.sample(family.name, labels, value);
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: Value) {
        self.suffixed(name, "", labels, value);
    }

    fn suffixed(&mut self, name: &str, suffix: &str, labels: &[(&str, &str)], value: Value) {
        self.out.push_str(name);
        self.out.push_str(suffix);
        for (row, (label, value)) in labels.iter().enumerate() {
            self.out.push(if row == 0 { '{' } else { ',' });
            self.out.push_str(label);
            self.out.push_str("=\"");
            for character in value.chars() {
                match character {
                    '\\' => self.out.push_str(r"\\"),
                    '"' => self.out.push_str("\\\""),
                    '\n' => self.out.push_str(r"\n"),
                    other => self.out.push(other),
                }
            }
            self.out.push('"');
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
        match value {
            Value::Whole(value) => self.line(format_args!(" {value}")),
            Value::Real(value) => self.line(format_args!(" {value}")),
            Value::Nanoseconds(ns) => self.line(format_args!(" {}", Seconds(ns))),
        }
    }

    fn line(&mut self, line: core::fmt::Arguments<'_>) {
        writeln!(self.out, "{line}").expect("a String takes every write");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{ControlMetrics, FrontMetrics, ShardMetrics, strict};
    use super::*;

    struct World {
        shards: [ShardMetrics; 2],
        front: FrontMetrics,
        control: ControlMetrics,
        exposition: Exposition,
    }

    fn world() -> World {
        let (first, first_reader) = ShardMetrics::new();
        let (second, second_reader) = ShardMetrics::new();
        let (front, front_reader) = FrontMetrics::new();
        let (control, control_reader) = ControlMetrics::new();
        let readers = vec![first_reader, second_reader];
        let exposition = Exposition::new(readers, front_reader, control_reader);
        World {
            shards: [first, second],
            front,
            control,
            exposition,
        }
    }

    fn text(world: &World) -> String {
        let mut text = String::new();
        world.exposition.render(&mut text);
        text
    }

    #[test]
    fn the_text_is_strictly_well_formed_and_complete() {
        let world = world();
        let parsed = strict::parse(&text(&world)).unwrap();
        let listed = families();
        for family in &listed {
            let found = parsed
                .get(family.name)
                .unwrap_or_else(|| panic!("{} absent", family.name));
            assert_eq!(
                (found.kind.as_str(), found.help.as_str()),
                (family.kind.word(), family.help)
            );
            let labels: BTreeSet<_> = found
                .samples
                .iter()
                .flat_map(|sample| sample.labels.keys().cloned())
                .collect();
            let expected: BTreeSet<_> = family.labels.iter().map(|&l| l.to_owned()).collect();
            assert_eq!(labels, expected, "{}", family.name);
        }
        assert_eq!(
            parsed.len(),
            listed.len(),
            "a family is shown that is not listed"
        );
    }

    /// Proves [D-24].
    #[test]
    fn d24_every_list_names_metrics_by_the_rule() {
        let prefixes = ["iop_edge_", "gen_ai_server_", "process_"];
        let mut names = BTreeSet::new();
        for family in families() {
            assert!(
                names.insert(family.name),
                "{} is listed in two places",
                family.name
            );
            assert!(
                prefixes
                    .iter()
                    .any(|prefix| family.name.starts_with(prefix))
            );
            assert_eq!(
                family.kind == Kind::Counter,
                family.name.ends_with("_total"),
                "{}",
                family.name
            );
            assert!(
                family.help.ends_with('.') && family.help.len() > 6,
                "{}",
                family.name
            );
        }
        // Lines of one family agree in everything but label values.
        let all = ShardMetric::ALL.iter().map(|metric| metric.info());
        let all = all.chain(FrontMetric::ALL.iter().map(|metric| metric.info()));
        let all = all.chain(ControlMetric::ALL.iter().map(|metric| metric.info()));
        for info in all {
            let family = families()
                .into_iter()
                .find(|family| family.name == info.name)
                .unwrap();
            let labels: Vec<_> = info.labels.iter().map(|&(name, _)| name).collect();
            assert_eq!(
                (family.kind, family.help),
                (info.kind, info.help),
                "{}",
                info.name
            );
            assert_eq!(family.labels, labels, "{}", info.name);
        }
    }

    #[test]
    fn a_shown_figure_is_the_sum_of_what_the_shards_wrote() {
        let mut world = world();
        world.shards[0].add(ShardMetric::FramesBody, 40);
        world.shards[1].add(ShardMetric::FramesBody, 2);
        world.shards[1].inc(ShardMetric::FramesEnd);
        world.shards[0].inc(ShardMetric::Sessions);
        world.shards[0].inc(ShardMetric::Sessions);
        world.shards[0].dec(ShardMetric::Sessions);
        world.shards[0].response(200);
        world.shards[1].response(503);
        world.shards[1].response(101);
        world.front.inc(FrontMetric::NodesAccepted);
        world.control.set(ControlMetric::LeasesHeld, 3);
        let text = text(&world);
        let value = |name: &str, labels: &[(&str, &str)]| strict::value(&text, name, labels);
        let frames = "iop_edge_frames_total";
        assert_eq!(value(frames, &[("kind", "body")]), Some(42.0));
        assert_eq!(value(frames, &[("kind", "end")]), Some(1.0));
        assert_eq!(value(frames, &[("kind", "error")]), Some(0.0));
        assert_eq!(value("iop_edge_sessions", &[]), Some(1.0));
        for (class, count) in [("2xx", 1.0), ("4xx", 0.0), ("5xx", 1.0), ("other", 1.0)] {
            assert_eq!(
                value("iop_edge_responses_total", &[("class", class)]),
                Some(count)
            );
        }
        let accepted = "iop_edge_accepted_connections_total";
        assert_eq!(value(accepted, &[("listener", "nodes")]), Some(1.0));
        assert_eq!(value("iop_edge_leases_held", &[]), Some(3.0));
    }

    #[test]
    fn each_reason_counts_for_itself_and_its_thread() {
        for &reason in Reason::ALL {
            let mut world = world();
            world.shards[1].reason(reason);
            world.front.reason(reason);
            world.front.reason(reason);
            let text = text(&world);
            let parsed = strict::parse(&text).unwrap();
            let moved: Vec<_> = parsed["iop_edge_failures_total"]
                .samples
                .iter()
                .filter(|sample| sample.value > 0.0)
                .map(|sample| {
                    (
                        sample.labels["reason"].clone(),
                        sample.labels["by"].clone(),
                        sample.value,
                    )
                })
                .collect();
            let label = reason.label().to_owned();
            let expected = [
                (label.clone(), "front".into(), 2.0),
                (label, "shard".into(), 1.0),
            ];
            assert_eq!(moved, expected);
        }
    }

    #[test]
    fn a_duration_falls_into_the_bucket_whose_bound_it_does_not_exceed() {
        for histogram in ShardHistogram::ALL {
            let bounds = histogram.bounds_ns();
            assert!(bounds.is_sorted_by(|low, high| low < high));
            for operation in Operation::ALL {
                let mut world = world();
                world.shards[0].observe(histogram, operation, bounds[3]);
                world.shards[1].observe(histogram, operation, bounds[3] + 1);
                world.shards[1].observe(histogram, operation, u64::MAX / 4);
                let text = text(&world);
                let name = histogram.info().name;
                let label = (OPERATION, operation_label(operation));
                let bucket = |bound: &str| {
                    strict::value(&text, &format!("{name}_bucket"), &[label, ("le", bound)])
                };
                let le = |row: usize| Seconds(bounds[row]).to_string();
                assert_eq!(bucket(&le(2)), Some(0.0));
                assert_eq!(bucket(&le(3)), Some(1.0));
                assert_eq!(bucket(&le(4)), Some(2.0));
                assert_eq!(bucket("+Inf"), Some(3.0));
                let parsed = strict::parse(&text).unwrap();
                let others = parsed[name].samples.iter().filter(|sample| {
                    sample.labels[OPERATION] != operation_label(operation) && sample.value > 0.0
                });
                assert_eq!(
                    others.count(),
                    0,
                    "{operation:?} spilled into another series"
                );
            }
        }
    }

    #[test]
    fn writing_a_figure_touches_no_heap() {
        let (mut shard, reader) = ShardMetrics::new();
        let (calls, ()) = alloc::heap_calls(|| {
            for n in 0..10_000 {
                shard.inc(ShardMetric::FramesBody);
                shard.add(ShardMetric::FrameBodyBytes, n);
                shard.reason(Reason::ClientGone);
                let (family, asked) =
                    (ShardHistogram::TimeToFirstToken, Operation::ChatCompletions);
                shard.observe(family, asked, n * MS_10);
                shard.response(200);
            }
        });
        assert_eq!((calls, reader.get(ShardMetric::FramesBody)), (0, 10_000));
        assert!(
            alloc::heap_calls(|| text(&world())).0 > 0,
            "the meter is connected"
        );
    }

    const MS_10: u64 = 10_000_000;

    #[test]
    fn seconds_keep_every_digit_and_labels_are_escaped() {
        let shown = [0, 1, 999_999_999, 1_000_000_000, 2_500_000_000, 10_000_000];
        let shown = shown.map(|ns| Seconds(ns).to_string());
        assert_eq!(
            shown,
            ["0", "0.000000001", "0.999999999", "1", "2.5", "0.01"]
        );
        let mut out = String::new();
        let mut text = Text { out: &mut out };
        text.family("x", Kind::Gauge, "a\\b\nc");
        text.sample("x", &[("name", "q\"u\\o\nte")], Value::Whole(1));
        assert_eq!(
            strict::value(&out, "x", &[("name", "q\"u\\o\nte")]),
            Some(1.0)
        );
        assert!(out.starts_with("# HELP x a\\\\b\\nc\n"), "{out}");
    }

    /// Values a list gives to one label of a family, in its order.
    fn values(name: &str, label: &str) -> Vec<&'static str> {
        let all = ShardMetric::ALL.iter().map(|metric| metric.info());
        let all = all.chain(FrontMetric::ALL.iter().map(|metric| metric.info()));
        let all = all.chain(ControlMetric::ALL.iter().map(|metric| metric.info()));
        let labels = all
            .filter(|info| info.name == name)
            .flat_map(|info| info.labels);
        let mut values = Vec::new();
        for &(_, value) in labels.filter(|(name, _)| *name == label) {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        values
    }

    /// The table of `docs/metrics.md`.
    fn table() -> String {
        let mut table = "| metric | type | labels | what it says |\n|---|---|---|---|\n".to_owned();
        for family in families() {
            let label = |label: &&str| {
                let values = values(family.name, label).join(", ");
                if values.is_empty() {
                    format!("`{label}`")
                } else {
                    format!("`{label}`: {values}")
                }
            };
            let labels: Vec<_> = family.labels.iter().map(label).collect();
            let Family {
                name, kind, help, ..
            } = family;
            writeln!(
                table,
                "| `{name}` | {} | {} | {help} |",
                kind.word(),
                labels.join("; ")
            )
            .unwrap();
        }
        table
    }

    /// `IOP_UPDATE_DOCS=1` writes the table instead of comparing it.
    #[test]
    fn the_reference_lists_every_family_as_it_is() {
        const BEGIN: &str = "<!-- families: written by a test of dataplane/src/metrics -->\n";
        const END: &str = "<!-- end of families -->";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (before, rest) = text
            .split_once(BEGIN)
            .expect("the table's beginning is marked");
        let (listed, after) = rest.split_once(END).expect("the table's end is marked");
        if std::env::var_os("IOP_UPDATE_DOCS").is_some() {
            std::fs::write(path, format!("{before}{BEGIN}{}{END}{after}", table())).unwrap();
            return;
        }
        assert_eq!(
            listed,
            table(),
            "docs/metrics.md is behind: run with IOP_UPDATE_DOCS=1"
        );
        // The contract's own names. `[D-24]`
        for pinned in [
            "iop_edge_provider_health_evidence_total",
            "iop_edge_provider_health_transitions_total",
            "iop_edge_liveness_recovery_eligibility_total",
            "iop_edge_liveness_recovery_results_total",
        ] {
            let listed = families().iter().any(|family| family.name == pinned);
            assert!(listed, "{pinned} is gone");
        }
    }
}
