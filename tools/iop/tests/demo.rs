//! `iop demo` as a user runs it: the real binary, real children, real sockets.
//!
//! Lives on: test threads. Bound: one demo each, in a directory of its own.
#![expect(clippy::unwrap_used, reason = "a helper's panic is its test's failure")]
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Far beyond any of these runs; only a hang meets it.
const DEADLINE: Duration = Duration::from_secs(120);

/// Where one demo puts its temporary directory, so that what it leaves behind can be seen.
struct Room(PathBuf);

impl Room {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("iop-demo-test-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn demo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iop"));
        command
            .arg("demo")
            .args(arguments)
            .env("TMPDIR", &self.0)
            .env_remove("RUST_LOG");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        wait(self.demo(arguments).spawn().unwrap())
    }

    /// Nothing is left: no file, and no process that was started from here.
    fn assert_empty(&self) {
        let left: Vec<_> = fs::read_dir(&self.0).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(processes_of(&self.0), Vec::<String>::new());
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

/// Command lines that mention `path`.
fn processes_of(path: &Path) -> Vec<String> {
    let path = path.to_str().unwrap();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(path)).collect()
}

fn wait(mut child: Child) -> Output {
    let begun = Instant::now();
    let output = std::thread::scope(|scope| {
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let read = |from: &mut dyn Read| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).map(|_| bytes)
        };
        let out = scope.spawn(move || read(&mut out).unwrap());
        let stderr = read(&mut err).unwrap();
        Output {
            status: child.wait().unwrap(),
            stdout: out.join().unwrap(),
            stderr,
        }
    });
    assert!(begun.elapsed() < DEADLINE);
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Heap allocations and frames of the last line.
fn report(output: &Output) -> (u64, u64) {
    let out = text(&output.stdout);
    let last = out
        .lines()
        .last()
        .unwrap_or_else(|| panic!("{}", text(&output.stderr)));
    let (_, counted) = last
        .split_once("per forwarded frame (")
        .unwrap_or_else(|| panic!("{last}"));
    let mut words = counted.split(' ');
    let allocations = words.next().unwrap().parse().unwrap();
    assert_eq!(words.next(), Some("in"));
    (allocations, words.next().unwrap().parse().unwrap())
}

#[test]
fn the_demo_streams_an_answer_and_leaves_nothing_behind() {
    let room = Room::new("plain");
    let output = room.run(&["--tokens", "200", "--pace-ms", "5"]);
    assert!(
        output.status.success(),
        "{:?} {}",
        output.status,
        text(&output.stderr)
    );
    let out = text(&output.stdout);
    assert!(out.contains("node demo-node ready"), "{out}");
    let sentence = "crossed the node and the edge, and reached you.\n";
    assert_eq!(out.matches(sentence).count(), 200 / 24, "{out}");
    let last = out.lines().last().unwrap();
    for word in [
        "first token after",
        "frames",
        "bytes",
        "0.000 heap allocations per forwarded",
    ] {
        assert!(last.contains(word), "{last}");
    }
    let (allocations, frames) = report(&output);
    assert!(allocations == 0 && frames >= 100, "{last}");
    room.assert_empty();
}

/// The figure is alive: an Edge that is told to spoil it does.
#[test]
fn a_planted_allocation_shows_in_the_demo_s_last_line() {
    let room = Room::new("planted");
    let mut command = room.demo(&["--tokens", "120", "--pace-ms", "5"]);
    let output = wait(
        command
            .env("IOP_TEST_ALLOC_PER_FRAME", "1")
            .spawn()
            .unwrap(),
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (allocations, frames) = report(&output);
    assert!(
        allocations >= frames && frames >= 50,
        "{allocations} in {frames}"
    );
    room.assert_empty();
}

#[test]
fn a_taken_port_is_named_and_nothing_is_started() {
    let room = Room::new("port");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let output = room.run(&["--port", &address.port().to_string()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&format!("cannot use {address}")));
    room.assert_empty();
    assert_eq!(
        room.run(&["--tokens", "1"]).status.code(),
        Some(2),
        "called wrongly"
    );
}

/// The demo with its answer flowing, ready to be disturbed.
fn streaming(room: &Room, arguments: &[&str]) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = room.demo(arguments).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("Every word") {
        line.clear();
        assert!(
            lines.read_line(&mut line).unwrap() > 0,
            "it ended before its answer"
        );
    }
    (child, lines)
}

fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill")
        .args([name, &pid.to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Process ids of the demo's children whose command line contains `word`.
fn child_of(room: &Room, word: &str) -> u32 {
    let path = room.0.to_str().unwrap();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let found = entries.filter_map(|entry| {
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let pid = entry.file_name().to_str()?.parse().ok()?;
        (line.contains(path) && line.contains(word)).then_some(pid)
    });
    found.last().expect("the child runs")
}

#[test]
fn a_signal_in_mid_stream_ends_everything() {
    for name in ["-INT", "-TERM"] {
        let room = Room::new(&format!("signal{name}"));
        let (child, lines) = streaming(&room, &["--tokens", "100000"]);
        assert_eq!(processes_of(&room.0).len(), 2, "edge and node run");
        signal(name, child.id());
        let mut child = child;
        child.stdout = Some(lines.into_inner());
        let output = wait(child);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            text(&output.stderr).contains("interrupted"),
            "{}",
            text(&output.stderr)
        );
        room.assert_empty();
    }
}

#[test]
fn an_edge_or_node_that_dies_in_mid_stream_is_a_failure() {
    for part in ["iop edge ", "iop node "] {
        let room = Room::new(part.trim().replace(' ', "-").as_str());
        let (child, lines) = streaming(&room, &["--tokens", "100000"]);
        signal("-KILL", child_of(&room, part));
        let mut child = child;
        child.stdout = Some(lines.into_inner());
        let output = wait(child);
        assert_eq!(output.status.code(), Some(1), "{part}");
        let err = text(&output.stderr);
        assert!(
            err.contains("iop: ") && !err.contains("panicked"),
            "{part}: {err}"
        );
        room.assert_empty();
    }
}

#[test]
fn a_demo_that_stays_says_what_to_try_and_it_works() {
    let room = Room::new("stay");
    let (mut child, mut lines) = streaming(&room, &["--stay", "--tokens", "48", "--pace-ms", "1"]);
    let mut line = String::new();
    while !line.trim_start().starts_with("curl -N") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    let tried = Command::new("sh")
        .arg("-c")
        .arg(format!("{} -sS", line.trim()))
        .output()
        .unwrap();
    let answer = text(&tried.stdout);
    assert!(
        answer.ends_with("data: [DONE]\n\n"),
        "{answer} {}",
        text(&tried.stderr)
    );
    signal("-INT", child.id());
    child.stdout = Some(lines.into_inner());
    let output = wait(child);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    room.assert_empty();
}
