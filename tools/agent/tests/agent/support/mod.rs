//! A scripted Edge, a scripted provider and throw-away certificates, over real sockets.
//!
//! Lives on: each test's own runtime. Bound: every wait ends at `DEADLINE`.
pub(crate) mod edge;
pub(crate) mod pki;
pub(crate) mod provider;

use core::future::Future;
use core::time::Duration;
use std::path::Path;

use iop_agent::config::{EdgeAddress, ProviderHttp, Security};
use iop_agent::{Exit, NodeConfig, ShutdownHandle};
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
    pub(crate) shutdown: ShutdownHandle,
    task: JoinHandle<Exit>,
}

impl Agent {
    pub(crate) fn start(config: NodeConfig) -> Self {
        let (shutdown, requests) = iop_agent::shutdown();
        let task = tokio::spawn(iop_agent::run(config, requests));
        Self { shutdown, task }
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
