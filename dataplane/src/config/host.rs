//! What this host offers an Edge: memory and cores, read from `/proc` and the control group.
//!
//! Lives on: the cold thread. View: the moment of the probe. Bound: a few small files.
use std::fs;

/// Memory and cores as this process may use them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Bytes: the host's memory or the control group's limit, whichever is less; `None` is unknown.
    pub memory_bytes: Option<u64>,
    /// Core numbers this process may run on, ascending; empty is unknown.
    pub cores: Vec<u32>,
}

impl Host {
    /// Looks at this host. What cannot be read stays unknown; nothing fails.
    #[must_use]
    pub fn probe() -> Self {
        let read = |path: &str| fs::read_to_string(path).ok();
        let total = read("/proc/meminfo").as_deref().and_then(memory_total);
        let group = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok());
        let cores = read("/proc/self/status")
            .as_deref()
            .map(cores_allowed)
            .unwrap_or_default();
        Self {
            memory_bytes: [total, group].into_iter().flatten().min(),
            cores,
        }
    }
}

fn memory_total(meminfo: &str) -> Option<u64> {
    let rest = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    rest.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// `Cpus_allowed_list: 0-3,8` as numbers.
fn cores_allowed(status: &str) -> Vec<u32> {
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list
        .unwrap_or_default()
        .trim()
        .split(',')
        .filter_map(|range| {
            let (low, high) = range.split_once('-').unwrap_or((range, range));
            Some(low.parse().ok()?..=high.parse::<u16>().ok().map(u32::from)?)
        });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_cores_are_read_as_the_kernel_prints_them() {
        assert_eq!(
            memory_total("Foo: 1\nMemTotal:        2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(memory_total("MemTotal: x kB"), None);
        let status = "Name:\tx\nCpus_allowed_list:\t0-2,7\nfoo: 1";
        assert_eq!(cores_allowed(status), vec![0, 1, 2, 7]);
        assert_eq!(cores_allowed("nothing"), Vec::<u32>::new());
        let here = Host::probe();
        assert!(
            here.memory_bytes.is_some_and(|bytes| bytes > 1 << 20),
            "{here:?}"
        );
        assert!(!here.cores.is_empty());
    }
}
