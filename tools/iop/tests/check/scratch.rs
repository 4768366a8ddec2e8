//! A directory per test, and programs run in it.
//!
//! Lives on: one test. Bound: removed when dropped.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// `name` is the test's own.
    pub(crate) fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("check-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Runs a command line here; `iop` is the program under test.
    pub(crate) fn run(&self, line: &str) -> Ran {
        let line = line.replace("iop ", concat!(env!("CARGO_BIN_EXE_iop"), " "));
        self.shell(&line)
    }

    /// As [`Self::run`], without replacing anything.
    pub(crate) fn shell(&self, line: &str) -> Ran {
        let mut command = Command::new("sh");
        command
            .args(["-c", line])
            .current_dir(&self.0)
            .env_remove("RUST_LOG");
        Ran::of(&command.output().expect("sh runs"))
    }

    /// Runs what must succeed.
    pub(crate) fn good(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        ran.out
    }

    /// Runs what must end with exit code 1 and say `why` on standard error.
    pub(crate) fn fails(&self, line: &str, why: &str) {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(1), "{line}: {ran:?}");
        assert!(ran.notes.contains(why), "{line}: {why:?} is not in {ran:?}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) notes: String,
}

impl Ran {
    fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            code: output.status.code(),
            out: text(&output.stdout),
            notes: text(&output.stderr),
        }
    }
}
