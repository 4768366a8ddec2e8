//! Local shutdown: asked for once it drains, asked for again it ends at once. `[D-07]` `[D-55]`
//!
//! Lives on: whoever may stop the agent, and its main task. Bound: one counter.
use tokio::sync::watch;

/// Asks an agent to stop. Clones ask the same agent.
#[derive(Clone, Debug)]
pub struct ShutdownHandle {
    requests: watch::Sender<u32>,
}

/// What [`crate::run`] listens to.
#[derive(Debug)]
pub struct Shutdown {
    requests: watch::Receiver<u32>,
    taken: u32,
}

/// A handle and what it stops.
#[must_use]
pub fn shutdown() -> (ShutdownHandle, Shutdown) {
    let (sender, requests) = watch::channel(0);
    (
        ShutdownHandle { requests: sender },
        Shutdown { requests, taken: 0 },
    )
}

impl ShutdownHandle {
    /// The first call begins a drain, the second ends the process, more change nothing.
    pub fn request(&self) {
        self.requests
            .send_modify(|count| *count = count.saturating_add(1));
    }
}

impl Shutdown {
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
