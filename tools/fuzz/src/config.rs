//! The two configuration files: never a panic, complaints that point into the file, and a comment
//! line at the top that moves every line number by one and changes nothing else.
//!
//! Lives on: one thread. View: one file's text. Bound: the input.
use std::path::Path;

use iop_agent::config::{ConfigError as NodeError, parse};
use iop_dataplane::config::{ConfigError, EdgeConfig, Host};

const COMMENT: &str = "# a comment\n";
/// What no file of a megabyte may make of one complaint, bytes.
const COMPLAINT_BYTES_MAX: usize = 64 * 1024;

/// A byte order mark is none behind a comment.
fn commented(text: &str) -> Option<String> {
    (!text.starts_with('\u{feff}')).then(|| format!("{COMMENT}{text}"))
}

/// Lines a complaint may point to: those of the text, and the one behind its last line break.
fn lines(text: &str) -> u64 {
    text.split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}'])
        .count() as u64
}

pub(crate) fn run_edge(data: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(data) else {
        return false;
    };
    let host = Host {
        memory_bytes: Some(64 << 30),
        cores: (0..64).collect(),
    };
    let read = |text: &str| {
        EdgeConfig::parse_for(text, "edge.yaml", &host).map(|config| {
            let all = (config.warnings(), config.reserved());
            format!("{config:?} {all:?}")
        })
    };
    let verdict = read(text);
    if let Err(error) = &verdict {
        check_complaints(error, lines(text));
    }
    if let Some(commented) = commented(text) {
        assert_eq!(placed(read(&commented), 0), placed(verdict.clone(), 1));
    }
    verdict.is_ok()
}

fn check_complaints(error: &ConfigError, lines: u64) {
    assert!(!error.problems.is_empty() && error.to_string().len() < COMPLAINT_BYTES_MAX);
    for problem in &error.problems {
        assert!(problem.line <= lines, "{problem} of {lines} lines");
        assert!(problem.file == "edge.yaml" && !problem.what.is_empty());
    }
}

/// The verdict `further` lines down; a line that a complaint names in words is left out.
fn placed(verdict: Result<String, ConfigError>, further: u64) -> Result<String, ConfigError> {
    verdict.map_err(|mut error| {
        for problem in &mut error.problems {
            problem.line += if problem.line > 0 { further } else { 0 };
            let mut parts = problem.what.split(" on line ");
            let mut what = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                what.push_str(" on line");
                what.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
            }
            problem.what = what;
        }
        error
    })
}

pub(crate) fn run_node(data: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(data) else {
        return false;
    };
    let read = |text: &str| {
        let config = parse(text, Path::new("conf/node.yaml"));
        config.map(|config| format!("{config:?}"))
    };
    let verdict = read(text);
    if let Err(error) = &verdict {
        assert!(error.line.is_none_or(|line| line <= lines(text)), "{error}");
        assert!(!error.what.is_empty() && error.to_string().len() < COMPLAINT_BYTES_MAX);
    }
    if let Some(commented) = commented(text) {
        let moved = verdict.clone().map_err(|error| NodeError {
            line: error.line.map(|line| line + 1),
            ..error
        });
        assert_eq!(read(&commented), moved);
    }
    verdict.is_ok()
}
