//! What is asked of a running agent from outside: to shut down, to read its certificates again.
//!
//! Lives on: whoever may ask, the agent's main task and the one that follows the files. Bound: two
//! counters.
use tokio::sync::watch;

/// Asks one agent. Clones ask the same one.
#[derive(Clone, Debug)]
pub struct Handle {
    shutdown: watch::Sender<u32>,
    reload: watch::Sender<u32>,
}

/// What [`crate::run`] listens to.
#[derive(Debug)]
pub struct Requests {
    pub(crate) shutdown: Shutdowns,
    pub(crate) reloads: Reloads,
}

/// Each call counts: the first drains, the second ends at once. `[D-07]` `[D-55]`
#[derive(Debug)]
pub(crate) struct Shutdowns {
    requests: watch::Receiver<u32>,
    taken: u32,
}

/// Any number of calls since the last look is one. `[D-05]`
#[derive(Debug)]
pub(crate) struct Reloads(watch::Receiver<u32>);

/// A handle and what it asks.
#[must_use]
pub fn requests() -> (Handle, Requests) {
    let (shutdown, shutdowns) = watch::channel(0);
    let (reload, reloads) = watch::channel(0);
    let requests = Requests {
        shutdown: Shutdowns {
            requests: shutdowns,
            taken: 0,
        },
        reloads: Reloads(reloads),
    };
    (Handle { shutdown, reload }, requests)
}

impl Handle {
    /// The first call begins a drain, the second ends the process, more change nothing.
    pub fn shut_down(&self) {
        self.shutdown
            .send_modify(|count| *count = count.saturating_add(1));
    }

    /// Certificate, key and trust bundle are read again, whether they seem changed or not.
    pub fn reload(&self) {
        self.reload
            .send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl Shutdowns {
    /// Returns once per request; never again once every handle is gone. Cancel-safe.
    pub(crate) async fn requested(&mut self) {
        let taken = self.taken;
        if self
            .requests
            .wait_for(|&count| count > taken)
            .await
            .is_err()
        {
            core::future::pending::<()>().await;
        }
        self.taken += 1;
    }
}

impl Reloads {
    /// Returns after a request; never again once every handle is gone. Cancel-safe.
    pub(crate) async fn requested(&mut self) {
        if self.0.changed().await.is_err() {
            core::future::pending::<()>().await;
        }
    }
}
