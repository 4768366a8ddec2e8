//! Plots as SVG: bars, one picture a question.
//!
//! Lives on: the main thread. Bound: a bar a cell.
use std::fmt::Write;

use crate::matrix::{Cell, Matrix};
use crate::measure::Run;
use crate::rig::Pace;
use crate::system::{Side, System};

const WIDTH: f64 = 860.0;
const LABEL: f64 = 250.0;
const VALUE: f64 = 90.0;
const BAR: f64 = 18.0;
const STEP: f64 = 24.0;
const TOP: f64 = 44.0;

struct Bar {
    label: String,
    value: f64,
    ours: bool,
}

/// Name and text of every picture.
pub(crate) fn all(matrix: &Matrix) -> Vec<(String, String)> {
    let saturated = |cell: &Cell| cell.scenario.pace == Pace::Saturated;
    let tunnel = |cell: &Cell| cell.system.side() != Side::Provider;
    let pictures: [(&str, &str, Vec<Bar>); 4] = [
        (
            "frames-per-second.svg",
            "events per second, saturated, one connection carries all",
            bars(
                matrix,
                |cell| saturated(cell) && tunnel(cell),
                |run| run.events_per_second,
            ),
        ),
        (
            "cpu-tunnel.svg",
            "CPU µs per event, one connection carries all",
            bars(matrix, tunnel, Run::cost_total),
        ),
        (
            "cpu-whole.svg",
            "CPU µs per event, whole paths",
            bars(
                matrix,
                |cell| !tunnel(cell) && cell.system != System::Direct,
                Run::cost_total,
            ),
        ),
        (
            "latency-p99.svg",
            "latency of an event, p99, µs",
            bars(matrix, |cell| !saturated(cell), |run| run.latency_us[2]),
        ),
    ];
    let drawn = pictures.into_iter().filter(|(_, _, bars)| !bars.is_empty());
    drawn
        .map(|(name, title, bars)| (name.to_owned(), svg(title, &bars)))
        .collect()
}

fn bars(matrix: &Matrix, wanted: impl Fn(&Cell) -> bool, of: impl Fn(&Run) -> f64) -> Vec<Bar> {
    let cells = matrix.cells.iter().filter(|cell| wanted(cell));
    cells
        .filter_map(|cell| {
            let (name, bytes, system) = (cell.scenario.name, cell.bytes, cell.system.name());
            Some(Bar {
                label: format!("{name} {bytes} B, {system}"),
                value: of(cell.median()?),
                ours: [System::Edge, System::EdgeAndNode].contains(&cell.system),
            })
        })
        .filter(|bar| bar.value.is_finite())
        .collect()
}

fn svg(title: &str, bars: &[Bar]) -> String {
    let most = bars
        .iter()
        .map(|bar| bar.value)
        .fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + STEP * bars.len() as f64 + 10.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"24\" font-size=\"16\">{title}</text>\n"
    );
    for (row, bar) in bars.iter().enumerate() {
        let y = TOP + STEP * row as f64;
        let length = (WIDTH - LABEL - VALUE) * bar.value / most;
        let colour = if bar.ours { "#c2410c" } else { "#64748b" };
        let shown = match bar.value {
            value if value >= 1_000.0 => format!("{value:.0}"),
            value => format!("{value:.2}"),
        };
        let (text_y, end) = (y + 14.0, LABEL + length + 6.0);
        writeln!(
            text,
            "<text x=\"10\" y=\"{text_y}\">{}</text>\
             <rect x=\"{LABEL}\" y=\"{y}\" width=\"{length:.1}\" height=\"{BAR}\" \
             fill=\"{colour}\"/><text x=\"{end:.1}\" y=\"{text_y}\">{shown}</text>",
            bar.label
        )
        .expect("a String takes everything");
    }
    text.push_str("</svg>\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_picture_and_every_tag_is_closed() {
        let bar = |value| Bar {
            label: "a".to_owned(),
            value,
            ours: value > 1.0,
        };
        let text = svg("t", &[bar(2.0), bar(1.0)]);
        let full = WIDTH - LABEL - VALUE;
        assert!(text.contains(&format!("width=\"{full:.1}\"")));
        assert!(text.contains(&format!("width=\"{:.1}\"", full / 2.0)));
        assert_eq!(
            text.matches("<text").count(),
            text.matches("</text>").count()
        );
        assert!(text.ends_with("</svg>\n"));
    }
}
