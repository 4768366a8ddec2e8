//! Child processes: output read line by line, ended with all their children at a deadline.
//!
//! Lives on: one thread, plus one reader thread per pipe. Bound: the deadline given.
use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::error::Error;

/// How often a silent child is looked at.
const TICK: Duration = Duration::from_millis(100);
/// A pipe that outlives its process is held by a stray child; it is given this long.
const LINGER: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Echo {
    /// Everything appears as it comes.
    Yes,
    /// Nothing appears; the caller shows what matters.
    No,
}

#[derive(Debug)]
pub(crate) struct Finished {
    /// `None`: ended at the deadline.
    pub status: Option<ExitStatus>,
    /// Standard output and, without echo, standard error.
    pub output: String,
}

impl Finished {
    pub(crate) fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// The last lines, for a report.
    pub(crate) fn tail(&self, lines: usize) -> String {
        let all: Vec<&str> = self.output.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => write!(f, "{status}"),
            None => f.write_str("ended at its deadline"),
        }
    }
}

/// `cargo`, the one that runs us, in `root`, without colours.
pub(crate) fn cargo(root: &Path) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root).env("CARGO_TERM_COLOR", "never");
    // What `cargo run` set for us says nothing about the packages a child builds.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs to the end or to the deadline.
pub(crate) fn run(command: &mut Command, limit: Duration, echo: Echo) -> Result<Finished, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |source| Error::Process {
        program: program.clone(),
        source,
    };
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(if echo == Echo::Yes {
        Stdio::inherit()
    } else {
        Stdio::piped()
    });
    let deadline = Instant::now() + limit;
    let mut child = command.spawn().map_err(failed)?;
    let (sender, lines) = mpsc::channel();
    if let Some(pipe) = child.stderr.take() {
        read(pipe, sender.clone());
    }
    if let Some(pipe) = child.stdout.take() {
        read(pipe, sender);
    }
    let mut output = String::new();
    let mut status = None;
    let mut until = deadline;
    loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => {
                if echo == Echo::Yes {
                    println!("{line}");
                }
                output.push_str(&line);
                output.push('\n');
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if status.is_some() => break,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
        }
        if status.is_none() {
            status = child.try_wait().map_err(failed)?;
            if status.is_some() {
                until = until.min(Instant::now() + LINGER);
            }
        }
        if Instant::now() >= until {
            if status.is_none() {
                end(&mut child);
            }
            break;
        }
    }
    Ok(Finished { status, output })
}

fn read(pipe: impl Read + Send + 'static, lines: Sender<String>) {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        while pipe
            .read_until(b'\n', &mut line)
            .is_ok_and(|length| length > 0)
        {
            let text = String::from_utf8_lossy(&line)
                .trim_end_matches(['\n', '\r'])
                .to_owned();
            line.clear();
            if lines.send(text).is_err() {
                return;
            }
        }
    });
}

/// Ends a child that overstayed and whatever it started: parents first, so that none starts more.
fn end(child: &mut Child) {
    let mut family = vec![child.id()];
    let mut next = 0;
    while next < family.len() {
        family.extend(children(family[next]));
        next += 1;
    }
    for process in &family {
        let mut kill = Command::new("kill");
        drop(
            kill.args(["-KILL", &process.to_string()])
                .stderr(Stdio::null())
                .status(),
        );
    }
    drop(child.kill());
    drop(child.wait());
}

/// Direct children of a process as Linux lists them; none elsewhere.
fn children(process: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|text| {
            text.split(' ')
                .filter_map(|id| id.trim().parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Finished {
        run(Command::new("sh").args(["-c", script]), limit, Echo::No).unwrap()
    }

    #[test]
    fn output_and_status_come_back() {
        let done = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60));
        assert!(done.output.contains("out\n") && done.output.contains("err\n"));
        assert_eq!(done.status.and_then(|status| status.code()), Some(3));
        assert!(!done.success());
        assert!(shell("true", Duration::from_secs(60)).success());
    }

    #[test]
    fn a_child_is_ended_at_its_deadline_with_its_own_children() {
        let started = Instant::now();
        let done = shell("sleep 300 & echo $!; wait", Duration::from_millis(500));
        assert!(done.status.is_none() && !done.success());
        assert!(started.elapsed() < Duration::from_secs(60));
        let grandchild: u32 = done.output.trim().parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let runs = || {
            let stat = std::fs::read_to_string(format!("/proc/{grandchild}/stat"));
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        while runs() {
            assert!(Instant::now() < deadline, "process {grandchild} still runs");
            std::thread::yield_now();
        }
    }
}
