//! What `/proc` knows: processor time by thread, memory, what the hypervisor took.
//!
//! Lives on: the thread that asks. Bound: the threads of the processes asked about.
use std::collections::BTreeMap;
use std::fs;

/// Processor time of a group of processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// Nanoseconds on a core since the thread's start, by role: the thread's name without its number.
    pub(crate) by_role: BTreeMap<String, u64>,
}

impl Usage {
    /// Of `processes`, each with the name its threads' roles begin with.
    pub(crate) fn of(processes: &[(String, u32)]) -> Self {
        let mut usage = Self::default();
        for (name, process) in processes {
            let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else {
                continue;
            };
            for task in tasks.flatten() {
                let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
                let run = read("schedstat");
                let Some(Ok(run)) = run.split(' ').next().map(str::parse::<u64>) else {
                    continue;
                };
                let thread = read("comm");
                let role = role(name, thread.trim());
                *usage.by_role.entry(role).or_default() += run;
            }
        }
        usage
    }

    pub(crate) fn total(&self) -> u64 {
        self.by_role.values().sum()
    }

    /// What was used since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let less = |(role, run): (&String, &u64)| {
            let before = earlier.by_role.get(role).copied().unwrap_or(0);
            (role.clone(), run.saturating_sub(before))
        };
        Self {
            by_role: self.by_role.iter().map(less).collect(),
        }
    }
}

fn role(process: &str, thread: &str) -> String {
    let thread = thread.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    let thread = thread.strip_prefix("iop-").unwrap_or(thread);
    if [process, "", "iop", "bench"].contains(&thread) {
        process.to_owned()
    } else {
        format!("{process}/{thread}")
    }
}

/// A process and everything it started.
pub(crate) fn family(process: u32) -> Vec<u32> {
    let mut family = vec![process];
    let mut next = 0;
    while next < family.len() {
        let tasks = fs::read_dir(format!("/proc/{}/task", family[next]));
        for task in tasks.into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            family.extend(
                children
                    .split(' ')
                    .filter_map(|id| id.trim().parse::<u32>().ok()),
            );
        }
        next += 1;
    }
    family
}

/// Resident bytes of `processes` together.
pub(crate) fn resident(processes: &[(String, u32)]) -> u64 {
    let of = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kilobytes.unwrap_or(0) * 1024
    };
    processes.iter().map(|&(_, process)| of(process)).sum()
}

/// Clock ticks of one core, or of all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ticks {
    total: u64,
    idle: u64,
    steal: u64,
}

impl Ticks {
    /// `cpu0`, `cpu1` …, or `cpu` for all.
    pub(crate) fn of(core: &str) -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self::parse(&stat, core)
    }

    fn parse(stat: &str, core: &str) -> Self {
        let line = stat
            .lines()
            .find_map(|line| line.strip_prefix(core)?.strip_prefix(' '));
        // user nice system idle iowait irq softirq steal; guests are part of user
        let mut ticks = [0; 8];
        let fields = line.unwrap_or_default().split_whitespace();
        for (place, field) in ticks.iter_mut().zip(fields) {
            *place = field.parse().unwrap_or(0);
        }
        Self {
            total: ticks.iter().sum(),
            idle: ticks[3] + ticks[4],
            steal: ticks[7],
        }
    }

    /// Shares of the time since `earlier`, 0 to 1: not idle, and taken by the hypervisor.
    pub(crate) fn shares_since(self, earlier: Self) -> (f64, f64) {
        let total = (self.total - earlier.total).max(1) as f64;
        let idle = (self.idle - earlier.idle) as f64;
        let steal = (self.steal - earlier.steal) as f64;
        (1.0 - idle / total, steal / total)
    }
}

/// Cores of this machine, those we are not pinned to included.
pub(crate) fn cores() -> usize {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let lines = stat.lines().filter_map(|line| line.strip_prefix("cpu"));
    let cores = lines.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    cores.count().max(1)
}

/// What this machine is, for the report.
pub(crate) fn machine() -> Vec<(&'static str, String)> {
    let first = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key));
        let value = line.and_then(|line| line.split_once(':'));
        value.map_or_else(String::new, |(_, value)| value.trim().to_owned())
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    vec![
        ("processor", first("/proc/cpuinfo", "model name")),
        ("cores", cores().to_string()),
        ("memory", first("/proc/meminfo", "MemTotal")),
        ("kernel", kernel.trim().to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_the_ticks() {
        let stat = |idle, steal| {
            Ticks::parse(
                &format!("cpu  9 9\ncpu0 10 0 10 {idle} 0 0 0 {steal} 5 5\n"),
                "cpu0",
            )
        };
        let (busy, stolen) = stat(160, 20).shares_since(stat(100, 0));
        assert!((busy - 0.25).abs() < 1e-9 && (stolen - 0.25).abs() < 1e-9);
        assert!(Ticks::of("cpu").total > 0);
    }

    #[test]
    fn roles_are_thread_names_without_numbers() {
        assert_eq!(role("edge", "iop-shard-0"), "edge/shard");
        assert_eq!(role("edge", "iop"), "edge");
        assert_eq!(role("nginx", "nginx"), "nginx");
        let mine = [("test".to_owned(), std::process::id())];
        let before = Usage::of(&mine);
        assert!(before.total() > 0 && resident(&mine) > 0);
        assert_eq!(before.since(&before).total(), 0);
        assert_eq!(family(std::process::id())[0], std::process::id());
    }
}
