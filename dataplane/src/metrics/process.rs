//! What the kernel knows of this process: memory, descriptors, processor time.
//!
//! Lives on: the cold thread, once per scrape. Bound: four small files under `/proc/self`, and one
//! directory entry per open descriptor.
use std::fs;

/// Clock ticks per second of `/proc/self/stat`: 100 on every Linux ABI (`USER_HZ`).
const TICKS_PER_SECOND: u64 = 100;

/// Figures of one moment. A field is `None` where `/proc` does not tell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    pub resident_bytes: Option<u64>,
    pub open_descriptors: Option<u64>,
    /// The soft limit; `None` also when it is unlimited.
    pub descriptors_max: Option<u64>,
    pub threads: Option<u64>,
    /// User and system time, hundredths of a second.
    pub cpu_ticks: Option<u64>,
}

impl Process {
    pub(super) fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        Self {
            resident_bytes: word_after(&status, "VmRSS:", 0).map(|kib| kib * 1024),
            threads: word_after(&status, "Threads:", 0),
            descriptors_max: word_after(&limits, "Max open files", 0),
            // One entry is the descriptor of this very look.
            open_descriptors: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|entries| (entries.count() as u64).saturating_sub(1)),
            cpu_ticks: cpu_ticks(&stat),
        }
    }
}

/// The `n`th word after `key` at the start of a line, as a number.
fn word_after(text: &str, key: &str, n: usize) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().nth(n)?.parse().ok()
}

/// Fields 14 and 15 of `stat`, `utime` and `stime`; the name in field 2 may contain anything, so
/// counting starts behind its last parenthesis.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

/// Ticks as seconds.
#[expect(
    clippy::cast_precision_loss,
    reason = "exact below 2^53 ticks, 2.8 million years"
)]
pub(super) fn ticks_to_seconds(ticks: u64) -> f64 {
    ticks as f64 / TICKS_PER_SECOND as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_descriptors_and_threads() {
        let process = Process::read();
        assert!(process.resident_bytes.unwrap() > 100 * 1024);
        assert!(process.open_descriptors.unwrap() >= 3);
        assert!(process.threads.unwrap() >= 1);
        assert!(process.cpu_ticks.is_some());
        let before = process.open_descriptors.unwrap();
        let held: Vec<_> = (0..50)
            .map(|_| fs::File::open("/proc/self/stat").unwrap())
            .collect();
        assert!(
            Process::read().open_descriptors.unwrap() >= before + 50 - 20,
            "{}",
            held.len()
        );
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
        assert_eq!(cpu_ticks(""), None);
    }
}
