//! The report: `bench.json`, `bench.md` and the plots, in one folder.
//!
//! Lives on: the main thread. Bound: the matrix.
use std::fmt::Write;
use std::path::Path;

use serde_json::json;

use crate::error::Error;
use crate::matrix::{Cell, Matrix};
use crate::measure::{OTHERS_MAX, Run, STEAL_MAX};
use crate::peers;
use crate::plot;
use crate::rig::Pace;
use crate::system::{self, Place, Side, System};

/// Versions of what takes part.
pub(crate) fn versions(place: &Place, systems: &[System]) -> Vec<(String, String)> {
    let of = |program: &Path, argument| system::version(program, argument);
    let mut versions = vec![
        ("iop".to_owned(), of(&place.iop, "--version")),
        ("rustc".to_owned(), of(Path::new("rustc"), "--version")),
    ];
    let mut commit = std::process::Command::new("git");
    if let Ok(said) = commit.args(["rev-parse", "--short", "HEAD"]).output() {
        let commit = String::from_utf8_lossy(&said.stdout).trim().to_owned();
        versions.push(("commit".to_owned(), commit));
    }
    for system in systems {
        let Some((program, _)) = system.program() else {
            continue;
        };
        let is_new = versions.iter().all(|(known, _)| known != program);
        if let Some(argument) = peers::version_argument(program).filter(|_| is_new) {
            versions.push((program.to_owned(), of(Path::new(program), argument)));
        }
    }
    versions
}

/// Writes everything, and prints the tables.
pub(crate) fn write(matrix: &Matrix, out: &Path) -> Result<(), Error> {
    let put = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(Error::io(format!("{}", path.display())))
    };
    let tables = tables(matrix);
    println!("\n{tables}");
    put("bench.md", &tables)?;
    put("bench.json", &format!("{:#}\n", json(matrix)))?;
    for (name, picture) in plot::all(matrix) {
        put(&name, &picture)?;
    }
    println!("written to {}", out.display());
    Ok(())
}

fn json(matrix: &Matrix) -> serde_json::Value {
    let cells: Vec<_> = matrix
        .cells
        .iter()
        .map(|cell| {
            json!({
                "scenario": cell.scenario.name,
                "streams": cell.scenario.streams,
                "event_bytes": cell.bytes,
                "system": cell.system.name(),
                "runs": cell.runs.iter().map(Run::json).collect::<Vec<_>>(),
                "disturbed_runs": cell.rejected,
                "failures": cell.failures,
            })
        })
        .collect();
    let object = |pairs: Vec<(String, String)>| {
        let pairs = pairs.into_iter().map(|(key, value)| (key, value.into()));
        serde_json::Value::Object(pairs.collect())
    };
    let machine = matrix
        .machine
        .iter()
        .map(|(key, value)| ((*key).to_owned(), value.clone()));
    json!({
        "machine": object(machine.collect()),
        "versions": object(matrix.versions.clone()),
        "core_map": matrix.core_map,
        "rounds": matrix.rounds,
        "measured_seconds": matrix.measured.as_secs_f64(),
        "steal_max": STEAL_MAX,
        "others_max": OTHERS_MAX,
        "cells": cells,
    })
}

fn tables(matrix: &Matrix) -> String {
    let mut text = String::new();
    let machine = matrix
        .machine
        .iter()
        .map(|(key, value)| format!("{key}: {value}"));
    let versions = matrix
        .versions
        .iter()
        .map(|(key, value)| format!("{key}: {value}"));
    let lines: Vec<String> = machine.chain(versions).collect();
    add(
        &mut text,
        &format!("{}\n\n{}\n", lines.join("; "), matrix.core_map),
    );
    add(
        &mut text,
        &format!(
            "\n{} round(s), {:.1} s measured each; a cell shows its median run. `!`: every run was \
             disturbed (hypervisor above {:.0} % or other processes above {:.0} %), the least \
             disturbed one is shown.\n",
            matrix.rounds,
            matrix.measured.as_secs_f64(),
            STEAL_MAX * 100.0,
            OTHERS_MAX * 100.0
        ),
    );
    for (title, tunnel) in [
        ("One connection carries every stream: the Edge alone", true),
        (
            "A connection a stream at the model server: whole paths",
            false,
        ),
    ] {
        add(
            &mut text,
            &format!("\n### {title}\n\n{}", table(matrix, tunnel)),
        );
    }
    add(&mut text, &ceiling(matrix));
    text
}

const HEAD: &str = "\
| load | event | system | events/s | × | frames/s | CPU µs/event | × | of which | allocs/frame \
| first event p50 / p99 ms | latency µs p50 / p90 / p99 / p99.9 | MiB | busy: measured / rig | noise |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

fn table(matrix: &Matrix, tunnel: bool) -> String {
    let mut text = HEAD.to_owned();
    for cell in &matrix.cells {
        if tunnel == (cell.system.side() == Side::Provider) {
            continue;
        }
        let row = match cell.median() {
            Some(run) => row(cell, run, baseline(matrix, cell)),
            None => {
                let why = cell.failures.last().map_or("not run", String::as_str);
                let why: String = why
                    .chars()
                    .map(|c| if c.is_control() { ' ' } else { c })
                    .collect();
                let (name, bytes) = (cell.scenario.name, cell.bytes);
                format!("| {name} | {bytes} B | {} | {why} |", cell.system.name())
            }
        };
        add(&mut text, &row);
        add(&mut text, "\n");
    }
    text
}

fn baseline<'m>(matrix: &'m Matrix, cell: &Cell) -> Option<&'m Run> {
    let other = matrix.cells.iter().find(|other| {
        other.system == cell.system.baseline()
            && other.bytes == cell.bytes
            && other.scenario.name == cell.scenario.name
    });
    other.and_then(Cell::median)
}

fn row(cell: &Cell, run: &Run, baseline: Option<&Run>) -> String {
    let ratio = |of: fn(&Run) -> f64| {
        let ratio = baseline.map_or(f64::NAN, |other| of(run) / of(other));
        if ratio.is_finite() {
            format!("{ratio:.2}")
        } else {
            "–".to_owned()
        }
    };
    let total = run.cost_total();
    let roles: Vec<String> = run
        .cost_us
        .iter()
        .filter(|(_, us)| **us >= total / 100.0)
        .map(|(role, us)| format!("{role} {us:.2}"))
        .collect();
    let [p50, p90, p99, p999] = run.latency_us;
    let latency = match cell.scenario.pace {
        Pace::Saturated => "–".to_owned(), // queues, nothing else
        Pace::Rate(_) => format!("{p50:.0} / {p90:.0} / {p99:.0} / {p999:.0}"),
    };
    let known = |value: f64, digits: usize| {
        if value.is_nan() {
            "–".to_owned()
        } else {
            format!("{value:.digits$}")
        }
    };
    let (frames, allocations) = (known(run.frames_per_second, 0), known(run.allocations, 4));
    format!(
        "| {} | {} B | {} | {:.0} | {} | {frames} | {total:.2} | {} | {} | {allocations} | {:.2} / {:.2} \
         | {latency} | {:.0} | {:.0} % / {:.0} % | {:.0} % + {:.0} %{} |",
        cell.scenario.name,
        cell.bytes,
        cell.system.name(),
        run.events_per_second,
        ratio(|run| run.events_per_second),
        ratio(Run::cost_total),
        roles.join(", "),
        run.first_us[0] / 1e3,
        run.first_us[2] / 1e3,
        run.resident / 1_048_576.0,
        run.measured_busy * 100.0,
        run.rig_busy * 100.0,
        run.steal * 100.0,
        run.others * 100.0,
        if run.is_quiet() { "" } else { " !" },
    )
}

/// What the rig reaches by itself.
fn ceiling(matrix: &Matrix) -> String {
    let mut text = String::from("\nRig ceiling, nothing between origin and clients: ");
    let parts: Vec<String> = matrix
        .cells
        .iter()
        .filter(|cell| cell.system == System::Direct && cell.scenario.pace == Pace::Saturated)
        .filter_map(|cell| {
            let run = cell.median()?;
            Some(format!(
                "{:.0} events/s of {} B",
                run.events_per_second, cell.bytes
            ))
        })
        .collect();
    text.push_str(if parts.is_empty() { "not run" } else { "" });
    text.push_str(&parts.join(", "));
    let late: Vec<String> = matrix
        .cells
        .iter()
        .filter(|cell| cell.system == System::Direct && cell.scenario.pace != Pace::Saturated)
        .filter_map(|cell| {
            let [p50, _, p99, _] = cell.median()?.late_us;
            let (name, bytes) = (cell.scenario.name, cell.bytes);
            Some(format!("{name} {bytes} B {p50:.0} / {p99:.0}"))
        })
        .collect();
    text.push_str(".\nHow late the rig itself was, µs p50 / p99: ");
    text.push_str(&late.join(", "));
    text.push_str(".\n");
    text
}

fn add(text: &mut String, more: &str) {
    text.write_str(more).expect("a String takes everything");
}
