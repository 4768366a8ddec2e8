//! Counts of what ran: the closing line of every command.
//!
//! Lives on: one thread. Bound: three numbers.
use std::fmt;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub passed: u32,
    pub failed: u32,
    /// Of those that passed: only when run again by themselves.
    pub unsteady: u32,
}

impl Tally {
    /// One check.
    pub(crate) fn of(good: bool) -> Self {
        Self {
            passed: u32::from(good),
            failed: u32::from(!good),
            unsteady: 0,
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.unsteady += other.unsteady;
    }

    /// Something ran and nothing failed: a suite that ran nothing has shown nothing.
    pub(crate) fn is_good(self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// Reads a closing line `N passed, N failed`, as our own commands and the e2e script print.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (passed, failed) = line
            .trim()
            .strip_suffix(" failed")?
            .split_once(" passed, ")?;
        Some(Self {
            passed: passed.parse().ok()?,
            failed: failed.parse().ok()?,
            unsteady: 0,
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// What libtest printed, read line by line.
#[derive(Debug, Default)]
pub(crate) struct TestRun {
    pub tally: Tally,
    pub ignored: u32,
    /// Last path segment and whether it passed; ignored tests are not in it.
    pub tests: Vec<(String, bool)>,
}

impl TestRun {
    pub(crate) fn read(output: &str) -> Self {
        let mut run = Self::default();
        for line in output.lines() {
            run.line(line);
        }
        run
    }

    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let count = |word: &str| -> u32 {
                let before = rest.split(word).next().unwrap_or_default();
                before
                    .trim_end()
                    .rsplit(' ')
                    .next()
                    .and_then(|n| n.parse().ok())
                    .unwrap_or(0)
            };
            self.tally.passed += count(" passed");
            self.tally.failed += count(" failed");
            self.ignored += count(" ignored");
        } else if let Some(rest) = line.strip_prefix("test ") {
            let Some((name, outcome)) = rest.rsplit_once(" ... ") else {
                return;
            };
            let good = match outcome {
                "ok" => true,
                "FAILED" => false,
                _ => return,
            };
            let last = name.rsplit("::").next().unwrap_or(name);
            self.tests.push((last.to_owned(), good));
        }
    }

    /// Whether the test of this name ran, and passed.
    pub(crate) fn outcome(&self, name: &str) -> Option<bool> {
        let mut found = self
            .tests
            .iter()
            .filter(|(test, _)| test == name)
            .peekable();
        found.peek()?;
        Some(found.all(|&(_, good)| good))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtest_output_is_summed_over_binaries() {
        let run = TestRun::read(
            "running 3 tests\n\
             test a::b::c_holds ... ok\n\
             test d ... FAILED\n\
             test e ... ignored, slow\n\
             test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out\n\
             test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; in 0.1s\n",
        );
        assert_eq!(
            run.tally,
            Tally {
                passed: 13,
                failed: 1,
                unsteady: 0,
            }
        );
        assert_eq!(run.ignored, 1);
        assert_eq!(run.outcome("c_holds"), Some(true));
        assert_eq!(run.outcome("d"), Some(false));
        assert_eq!(run.outcome("e"), None);
    }

    #[test]
    fn a_closing_line_is_read_and_nothing_else_is() {
        assert_eq!(
            Tally::parse("3 passed, 0 failed\n"),
            Some(Tally {
                passed: 3,
                failed: 0,
                unsteady: 0,
            })
        );
        assert_eq!(Tally::parse("all 3 passed, 0 failed"), None);
        assert!(!Tally::default().is_good(), "nothing ran");
        assert!(Tally::of(true).is_good());
        assert!(
            !Tally {
                passed: 5,
                failed: 1,
                unsteady: 0,
            }
            .is_good()
        );
    }
}
