//! Processes under test and what can be asked of them.
//!
//! Lives on: the main thread. Bound: a deadline for every wait; a child ends with its owner.
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::os;
use crate::proc;

/// How long a part may take to become ready: a Python one reads its packages first.
const READY_LIMIT: Duration = Duration::from_secs(90);
const READY_TICK: Duration = Duration::from_millis(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How long a part may take to end once asked.
const END_LIMIT: Duration = Duration::from_secs(3);

/// The core of what is measured, and that of everything else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    pub(crate) measured: usize,
    pub(crate) rig: usize,
}

/// A child process, ended when dropped.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) child: Child,
}

impl Part {
    /// Starts `command` on the measured core; its words go to `<log>/<name>.log`.
    pub(crate) fn start(
        name: &'static str,
        command: &mut Command,
        cores: Cores,
        log: &Path,
    ) -> Result<Self, Error> {
        let file = log.join(format!("{name}.log"));
        let words = File::create(&file).map_err(Error::io(format!("{}", file.display())))?;
        command.stdin(Stdio::null()).stderr(words);
        let pinned = |core| os::pin(core).map_err(Error::io(format!("pin to core {core}")));
        // A child stays where its parent was: no moment on the wrong core.
        pinned(cores.measured)?;
        let child = command.spawn().map_err(Error::io(format!("start {name}")));
        pinned(cores.rig)?;
        Ok(Self {
            name,
            child: child?,
        })
    }

    /// The process and what it has started, each with the part's name.
    pub(crate) fn processes(&self) -> Vec<(String, u32)> {
        let family = proc::family(self.child.id());
        family
            .into_iter()
            .map(|id| (self.name.to_owned(), id))
            .collect()
    }

    /// Waits until `seen` yields something.
    pub(crate) fn wait<T>(
        &mut self,
        what: &str,
        mut seen: impl FnMut() -> Option<T>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        loop {
            if let Some(found) = seen() {
                return Ok(found);
            }
            let name = self.name;
            let ended = self.child.try_wait().map_err(Error::io(name))?;
            if let Some(status) = ended {
                return Err(Error::part(format!("{name} ended: {status}")));
            }
            if began.elapsed() > READY_LIMIT {
                return Err(Error::part(format!("{name}: no {what} in time")));
            }
            std::thread::sleep(READY_TICK);
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // A parent of workers, like nginx, ends them only when it is asked.
        let id = self.child.id().to_string();
        let _asked = Command::new("kill").args(["-TERM", &id]).status();
        let until = Instant::now() + END_LIMIT;
        while Instant::now() < until && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(READY_TICK);
        }
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// An address of loopback that nobody listens on right now.
pub(crate) fn free() -> Result<SocketAddr, Error> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(Error::io("find a free port"))
}

/// The body of a GET that is answered with 200, in one piece.
pub(crate) fn get(from: SocketAddr, path: &str) -> Option<String> {
    ask(from, path, "1.0")
}

/// Somebody answers a GET with 200. Some proxies refuse HTTP/1.0.
pub(crate) fn answers(from: SocketAddr, path: &str) -> Option<()> {
    ask(from, path, "1.1").map(drop)
}

fn ask(from: SocketAddr, path: &str, version: &str) -> Option<String> {
    let mut socket = TcpStream::connect(from).ok()?;
    socket.set_read_timeout(Some(ANSWER_LIMIT)).ok()?;
    let head = format!("GET {path} HTTP/{version}\r\nhost: bench\r\nconnection: close\r\n\r\n");
    socket.write_all(head.as_bytes()).ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    (head.split(' ').nth(1) == Some("200")).then(|| body.to_owned())
}

/// One reading of an Edge's `/metrics`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics(String);

impl Metrics {
    pub(crate) fn read(admin: SocketAddr) -> Option<Self> {
        get(admin, "/metrics").map(Self)
    }

    /// Value of `series`, spelled with its labels; 0 when it is not there.
    pub(crate) fn get(&self, series: &str) -> f64 {
        let mut lines = self.0.lines();
        let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }

    pub(crate) fn frames(&self) -> f64 {
        self.get("iop_edge_frames_total{kind=\"body\"}")
    }

    pub(crate) fn allocations(&self, role: &str) -> f64 {
        self.get(&format!(
            "iop_edge_heap_allocations_total{{role=\"{role}\"}}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_whole_name() {
        let metrics = Metrics("# TYPE a counter\na_b 1\na{x=\"y\"} 2.5\na 3\n".to_owned());
        assert!((metrics.get("a") - 3.0).abs() < 1e-9);
        assert!((metrics.get("a{x=\"y\"}") - 2.5).abs() < 1e-9);
        assert!(metrics.get("b").abs() < 1e-9);
    }
}
