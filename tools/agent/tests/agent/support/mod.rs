//! A scripted Edge, a scripted provider and throw-away certificates, over real sockets.
//!
//! Lives on: each test's own runtime. Bound: every wait ends at `DEADLINE`.
pub(crate) mod edge;
pub(crate) mod pki;
pub(crate) mod provider;

use core::future::Future;
use core::time::Duration;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use iop_agent::config::{EdgeAddress, ProviderHttp, Security};
use iop_agent::{Exit, Handle, NodeConfig};
use iop_control::node::attempt::Patience;
use iop_control::node::supervisor::Policy;
use tokio::task::JoinHandle;

/// No wait of a test is longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The future's result, or a failed test that says what did not happen.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(result) => result,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

/// An agent running on the test's own runtime.
pub(crate) struct Agent {
    pub(crate) handle: Handle,
    task: JoinHandle<Exit>,
}

impl Agent {
    pub(crate) fn start(config: NodeConfig) -> Self {
        let (handle, requests) = iop_agent::requests();
        let task = tokio::spawn(iop_agent::run(config, requests));
        Self { handle, task }
    }

    pub(crate) async fn exit(mut self) -> Exit {
        within("the agent's exit", &mut self.task).await.unwrap()
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.task.is_finished()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What this thread logs from here on, at the most verbose level; a clone reads along.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Until the guard goes.
    pub(crate) fn capture() -> (Self, tracing::subscriber::DefaultGuard) {
        // With one subscriber alone, a line that another test's thread reaches first is judged by that
        // thread, which has none, and stays off for all.
        static SECOND: OnceLock<tracing::Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| tracing_subscriber::fmt().with_writer(std::io::sink).into());
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    pub(crate) fn count(&self, words: &str) -> usize {
        self.text().matches(words).count()
    }

    /// Waits until `words` were logged `count` times.
    pub(crate) async fn wait(&self, words: &str, count: usize) {
        let seen = async {
            while self.count(words) < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within(words, seen).await;
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Retries at once, for ever long enough.
pub(crate) fn eager() -> Policy {
    Policy::new(Some(0), Some(1_000), Some(0.0)).unwrap()
}

/// A configuration towards `port` of this machine, certificates from `pki`.
pub(crate) fn config(port: u16, security: Security) -> NodeConfig {
    NodeConfig {
        node_id: "n1".to_owned(),
        edge: EdgeAddress {
            host: "127.0.0.1".to_owned(),
            port,
        },
        security,
        reconnect: eager(),
        ping_every: Duration::from_secs(10),
        dead_after: Duration::from_secs(30),
        drain_timeout: Duration::from_secs(10),
        patience: Patience::default(),
        provider_http: ProviderHttp {
            connect_timeout: Duration::from_secs(5),
            pool_idle: Duration::from_millis(3_500),
            ca: None,
        },
        credentials: None,
        log_level: tracing::Level::INFO,
    }
}

/// Text of a file that tests plant.
pub(crate) fn plant(directory: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// xorshift64*: the same bytes for the same seed.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from((self.next() >> 33) % n as u64).unwrap()
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next().to_be_bytes()[0]).collect()
    }
}
