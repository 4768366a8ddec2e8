//! A program of the stage: started, watched, killed, started again.
//!
//! Lives on: the harness. View: one process at a time. Bound: `END_LIMIT` for an end that was asked for.
use std::cell::{Cell, RefCell};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};

use crate::error::Error;
use crate::plan::{Signal, Who};

/// Drains of the stage end after 3 s; the machine may be slow.
const END_LIMIT: Duration = Duration::from_secs(15);
/// What ends at once, unless the machine is very slow.
const SEND_LIMIT: Duration = Duration::from_secs(10);
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) who: Who,
    words: Vec<String>,
    environment: Vec<(&'static str, String)>,
    logs: PathBuf,
    child: RefCell<Option<Child>>,
    /// Processes it has been, the present one included.
    pub(crate) lives: Cell<u32>,
    /// A fault is at work on it: no second one meanwhile.
    busy: Cell<bool>,
    /// Log bytes that were looked through.
    read: Cell<[u64; 2]>,
    /// Where the log of the present life begins.
    log_from: Cell<u64>,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
    pub(crate) resident_kib: u64,
}

/// Nobody else's fault is at work on a part while this is held.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a Part);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.busy.set(false);
    }
}

impl Part {
    /// `words`: program and arguments. What it says is added to files in `logs`.
    pub(crate) const fn new(
        who: Who,
        words: Vec<String>,
        environment: Vec<(&'static str, String)>,
        logs: PathBuf,
    ) -> Self {
        Self {
            who,
            words,
            environment,
            logs,
            child: RefCell::new(None),
            lives: Cell::new(0),
            busy: Cell::new(false),
            read: Cell::new([0; 2]),
            log_from: Cell::new(0),
        }
    }

    pub(crate) fn start(&self) -> Result<(), Error> {
        let [out, err] = self.files().map(|path| {
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.map_err(Error::io(path.display().to_string()))
        });
        let written = fs::metadata(&self.files()[1]).map_or(0, |file| file.len());
        self.log_from.set(written);
        let child = Command::new(&self.words[0])
            .args(&self.words[1..])
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(out?)
            .stderr(err?)
            .process_group(0) // ctrl-c is the harness's to hear
            .kill_on_drop(true)
            .spawn()
            .map_err(Error::io(self.words.join(" ")))?;
        *self.child.borrow_mut() = Some(child);
        self.lives.set(self.lives.get() + 1);
        Ok(())
    }

    fn files(&self) -> [PathBuf; 2] {
        let name = self.who.name();
        ["out", "log"].map(|end| self.logs.join(format!("{name}.{end}")))
    }

    /// `None`: another fault is at work on it.
    pub(crate) fn turn(&self) -> Option<Turn<'_>> {
        (!self.busy.replace(true)).then_some(Turn(self))
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.borrow().as_ref()?.id()
    }

    pub(crate) async fn signal(&self, name: &str) -> Result<(), Error> {
        match self.pid() {
            Some(pid) => send(pid, name).await,
            None => Ok(()),
        }
    }

    /// Ends it and waits; `Some`: it did not end as documented.
    pub(crate) async fn end(&self, signal: Signal) -> Result<Option<String>, Error> {
        let (name, documented) = match (signal, self.who) {
            (Signal::Kill, _) => ("KILL", by(SIGKILL)),
            // A model server of the stage drains nothing.
            (Signal::Terminate, Who::Server(_)) => ("TERM", by(SIGTERM)),
            (Signal::Terminate, Who::Edge(_) | Who::Node(_)) => ("TERM", ExitStatus::from_raw(0)),
        };
        // Taken first: an end that was asked for is nobody else's to find.
        let Some(mut child) = self.child.borrow_mut().take() else {
            return Ok(None);
        };
        if let Some(pid) = child.id() {
            send(pid, name).await?;
        }
        let who = self.who.name();
        match tokio::time::timeout(END_LIMIT, child.wait()).await {
            Ok(status) => {
                let status = status.map_err(Error::io(who.clone()))?;
                Ok(
                    (status != documented)
                        .then(|| format!("{who} ended after SIG{name}: {status}")),
                )
            }
            Err(_) => {
                let _gone = child.kill().await;
                Ok(Some(format!(
                    "{who} did not end {END_LIMIT:?} after SIG{name}"
                )))
            }
        }
    }

    /// `Some`: it has ended, and nobody had asked it to.
    pub(crate) fn ended(&self) -> Option<String> {
        let mut child = self.child.borrow_mut();
        let status = child.as_mut()?.try_wait();
        let status = match status {
            Ok(None) => return None,
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
        };
        *child = None;
        Some(format!("{} ended by itself: {status}", self.who.name()))
    }

    pub(crate) fn held(&self) -> Option<Held> {
        let of = Path::new("/proc").join(self.pid()?.to_string());
        let status = fs::read_to_string(of.join("status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Held {
            descriptors: fs::read_dir(of.join("fd")).ok()?.count() as u64,
            threads: field("Threads:")?,
            resident_kib: field("VmRSS:")?,
        })
    }

    /// What the present life has logged.
    pub(crate) fn log(&self) -> Result<String, Error> {
        self.log_since(self.log_from.get()).map(|(text, _)| text)
    }

    /// What was logged from byte `from` on, and where that ends.
    pub(crate) fn log_since(&self, from: u64) -> Result<(String, u64), Error> {
        let [_, path] = self.files();
        let bytes = bytes_from(&path, from)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((text, from + bytes.len() as u64))
    }

    /// Looks through what it has written since the last look: `forbidden` and panics.
    pub(crate) fn look(&self, forbidden: &[String]) -> Result<Vec<String>, Error> {
        let mut found = Vec::new();
        let mut read = self.read.get();
        for (path, read) in self.files().iter().zip(&mut read) {
            let bytes = bytes_from(path, *read)?;
            *read += bytes.len() as u64;
            let text = String::from_utf8_lossy(&bytes);
            let panics = text.lines().filter(|line| line.contains("panicked"));
            found.extend(panics.map(|line| format!("{}: {line}", self.who.name())));
            let told = forbidden.iter().filter(|word| text.contains(word.as_str()));
            let name = self.who.name();
            found.extend(told.map(|word| format!("{name} has written {word}")));
        }
        self.read.set(read);
        Ok(found)
    }
}

fn bytes_from(path: &Path, from: u64) -> Result<Vec<u8>, Error> {
    let failed = || Error::io(path.display().to_string());
    let mut file = File::open(path).map_err(failed())?;
    file.seek(SeekFrom::Start(from)).map_err(failed())?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed())?;
    Ok(bytes)
}

async fn send(pid: u32, name: &str) -> Result<(), Error> {
    let mut kill = Command::new("kill");
    let sent = kill.args([format!("-{name}"), pid.to_string()]);
    let sent = sent.stderr(Stdio::null()).kill_on_drop(true).status();
    let sent = tokio::time::timeout(SEND_LIMIT, sent).await;
    let sent = sent.map_err(|_| Error::Part(format!("kill -{name} {pid}: no end")))?;
    let sent = sent.map_err(Error::io("kill"))?;
    if sent.success() {
        return Ok(());
    }
    Err(Error::Part(format!("kill -{name} {pid}: {sent}")))
}

fn by(signal: i32) -> ExitStatus {
    ExitStatus::from_raw(signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_panics_and_secrets_are_seen() {
        let logs = std::env::temp_dir().join(format!("iop-part-{}", std::process::id()));
        fs::create_dir_all(&logs).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let shell = |script: &str| {
                let words = ["sh", "-c", script].map(str::to_owned).to_vec();
                Part::new(Who::Node(0), words, Vec::new(), logs.clone())
            };
            let steady = shell("exec sleep 300");
            steady.start().unwrap();
            assert!(steady.held().unwrap().descriptors >= 3);
            assert!(steady.ended().is_none());
            assert!(steady.end(Signal::Kill).await.unwrap().is_none());
            steady.start().unwrap();
            let undrained = steady.end(Signal::Terminate).await.unwrap();
            assert!(undrained.unwrap().contains("signal"));

            let bad = shell("echo sk-1 >&2; echo \"thread 'x' panicked at y\"");
            bad.start().unwrap();
            let began = std::time::Instant::now();
            while bad.ended().is_none() {
                assert!(began.elapsed() < END_LIMIT);
                tokio::task::yield_now().await;
            }
            let found = bad.look(&["sk-1".to_owned()]).unwrap();
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(bad.look(&["sk-1".to_owned()]).unwrap().is_empty());

            let twice = shell("echo begun >&2; exec sleep 300");
            for _ in 0..2 {
                twice.start().unwrap();
                while !twice.log().unwrap().contains("begun") {
                    assert!(began.elapsed() < END_LIMIT);
                    tokio::task::yield_now().await;
                }
                assert_eq!(twice.log().unwrap(), "begun\n", "of this life alone");
                let pid = twice.pid().unwrap();
                assert!(twice.end(Signal::Kill).await.unwrap().is_none());
                assert!(send(pid, "CONT").await.is_err(), "nobody is there");
            }
        });
        fs::remove_dir_all(&logs).unwrap();
    }
}
