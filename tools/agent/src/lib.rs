//! The node agent: dials the Edge, proves itself, and calls the model servers beside it.
//!
//! Lives on: one thread (a tokio `current_thread` runtime, or any the caller brings). View: one node.
//! Bound: the queues and tables of `limits`.
//!
//! Decisions are pure machines of `iop_control::node`; this crate does the sockets and the HTTP.
#![forbid(unsafe_code)]
mod adapters;
mod agent;
mod answer;
mod clock;
pub mod config;
mod credential;
mod execution;
mod identity;
mod normalized;
mod observer;
mod provider;
mod reload;
mod requests;
mod session;
mod transport;
mod trouble;

use std::process::ExitCode;

pub use config::{ConfigError, NodeConfig, load};
pub use identity::{CredentialError, check_credentials};
pub use iop_control::node::supervisor::Exit;
pub use requests::{Handle, Requests, requests};

/// Runs one node agent on the caller's runtime (time and I/O enabled) until it ends: local shutdown
/// (code 0), an unusable local identity or the last allowed attempt (code 1). Needs no connection to
/// start. `[R-057]` `[R-065]`
pub async fn run(config: NodeConfig, requests: Requests) -> Exit {
    // Another provider installed first serves as well; ours is the one the TLS to the Edge uses.
    let _ = rustls::crypto::ring::default_provider().install_default();
    agent::run(config, requests).await
}

/// Runs one node agent as this process: its own runtime, SIGTERM and SIGINT drain, a second one ends
/// at once, SIGHUP reads the certificates again. Blocks until the end; the code is the process's. `[R-067]` `[R-069]`
#[must_use]
pub fn run_process(config: NodeConfig) -> ExitCode {
    ExitCode::from(run_blocking(config).code())
}

/// As [`run_process`], for callers that have more to do before they exit.
#[must_use]
pub fn run_blocking(config: NodeConfig) -> Exit {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "the runtime cannot start");
            return Exit::Fatal;
        }
    };
    let exit = runtime.block_on(async {
        let (handle, requests) = requests();
        tokio::select! {
            exit = run(config, requests) => exit,
            never = listen(handle) => match never {},
        }
    });
    // A name lookup may still block a thread; nothing of it matters any more.
    runtime.shutdown_background();
    exit
}

#[cfg(unix)]
async fn listen(handle: Handle) -> core::convert::Infallible {
    use tokio::signal::unix::{SignalKind, signal};
    let all = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
        signal(SignalKind::hangup()),
    );
    let (Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)) = all else {
        tracing::warn!("signals cannot be listened to: SIGTERM ends at once");
        return core::future::pending().await;
    };
    loop {
        tokio::select! {
            Some(()) = terminate.recv() => handle.shut_down(),
            Some(()) = interrupt.recv() => handle.shut_down(),
            Some(()) = hangup.recv() => handle.reload(),
            else => return core::future::pending().await,
        }
    }
}

#[cfg(not(unix))]
async fn listen(handle: Handle) -> core::convert::Infallible {
    loop {
        if tokio::signal::ctrl_c().await.is_err() {
            return core::future::pending().await;
        }
        handle.shut_down();
    }
}
