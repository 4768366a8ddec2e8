//! The admin endpoint: `/metrics`, `/healthz`, `/readyz`, `/status`, commands to nodes and orders, over
//! ordinary async HTTP.
//!
//! Lives on: a cold thread with a runtime of its own. View: mirrors, and a snapshot when asked.
//! Bound: the connections of `listener`, one snapshot and one order under way.
//!
//! It has no authentication, so it binds loopback unless it is told otherwise, and shows names and
//! figures only. A scrape of `/metrics` asks nothing of shards or control.
use core::fmt;
use core::time::Duration;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use iop_proto::reason::Reason;
use tokio::sync::{Mutex, oneshot};

use crate::alloc::{self, Role};
use crate::metrics::{CONTENT_TYPE, Exposition, ShardMetric};

mod command;
mod listener;
mod operator;
mod readiness;
mod status;
#[cfg(test)]
mod tests;

pub use command::{AnswerSender, CommandError, CommandRequest, CommandSource, CommandText};
pub use command::{answer_lane, command_lane};
use listener::Bounded;
pub use operator::Operator;
pub use readiness::{Readiness, ReadinessReader, ReadinessWriter, readiness};
use status::{Documents, EdgeFigures, StatusError};
pub use status::{SnapshotRequest, StatusSource, status_lane};

/// What the endpoint shows.
#[derive(Debug)]
pub struct Admin {
    pub exposition: Exposition,
    pub readiness: ReadinessReader,
    pub status: StatusSource,
    pub commands: CommandSource,
    pub operator: Operator,
}

/// Why the endpoint could not start.
#[derive(Debug)]
pub enum AdminError {
    /// The address is taken, not ours, or not permitted.
    Bind {
        address: SocketAddr,
        cause: io::Error,
    },
    /// The thread or its runtime could not be made.
    Thread(io::Error),
}

impl fmt::Display for AdminError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bind { address, cause } => {
                write!(f, "admin listener: cannot bind {address}: {cause}")
            }
            Self::Thread(cause) => write!(f, "admin thread: cannot start: {cause}"),
        }
    }
}

impl core::error::Error for AdminError {}

/// Binds the admin listener. Separate from [`spawn`], so that a start can fail before any thread runs.
///
/// # Errors
/// [`AdminError::Bind`] with the address.
pub fn bind(address: SocketAddr) -> Result<TcpListener, AdminError> {
    let listener = TcpListener::bind(address);
    let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listener.map_err(|cause| AdminError::Bind { address, cause })
}

/// A running endpoint. Dropping it ends the thread as [`AdminHandle::stop`] does, without waiting.
#[derive(Debug)]
pub struct AdminHandle {
    /// Dropped to stop.
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl AdminHandle {
    /// Ends the endpoint: connections close at once. Waits at most about a second, for a status
    /// request under way.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the admin thread had panicked");
        }
    }
}

/// Bounds that tests shorten.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    connections: usize,
    idle: Duration,
    deadline: Duration,
    fresh: Duration,
}

impl Bounds {
    const USUAL: Self = Self {
        connections: listener::CONNECTIONS_MAX,
        idle: listener::IDLE,
        deadline: status::DEADLINE,
        fresh: status::FRESH,
    };
}

/// Serves `admin` on a thread of its own until the handle is stopped or dropped.
///
/// # Errors
/// [`AdminError::Thread`].
pub fn spawn(listener: TcpListener, admin: Admin) -> Result<AdminHandle, AdminError> {
    spawn_within(listener, admin, Bounds::USUAL)
}

fn spawn_within(
    listener: TcpListener,
    admin: Admin,
    bounds: Bounds,
) -> Result<AdminHandle, AdminError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .thread_name("iop-admin-wait")
        .on_thread_start(|| alloc::set_role(Role::Cold))
        .max_blocking_threads(2) // one snapshot, one order of an operator under way
        .build()
        .map_err(AdminError::Thread)?;
    let (stop, stopped) = oneshot::channel();
    let work = move || {
        alloc::set_role(Role::Cold);
        runtime.block_on(serve(listener, admin, bounds, stopped));
        runtime.shutdown_timeout(bounds.deadline);
    };
    let thread = std::thread::Builder::new()
        .name("iop-admin".into())
        .spawn(work);
    Ok(AdminHandle {
        stop,
        thread: thread.map_err(AdminError::Thread)?,
    })
}

async fn serve(
    listener: TcpListener,
    admin: Admin,
    bounds: Bounds,
    stopped: oneshot::Receiver<()>,
) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => Bounded::new(listener, bounds.connections, bounds.idle),
        Err(error) => {
            tracing::error!(%error, "admin listener cannot be used");
            return;
        }
    };
    let shared = Shared {
        admin,
        bounds,
        started: Instant::now(),
        latest: Mutex::new(None),
        ordering: Arc::new(Mutex::new(())),
    };
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || plain(StatusCode::OK, "ok\n")))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .route("/nodes/{id}/commands", post(command))
        .route("/nodes/{id}/drain", post(operator::drain_node))
        .route("/reload", post(operator::reload))
        .layer(DefaultBodyLimit::max(command::BODY_BYTES_MAX))
        .fallback(async || refusal(StatusCode::NOT_FOUND, Reason::RouteUnknown))
        .method_not_allowed_fallback(async || {
            refusal(StatusCode::METHOD_NOT_ALLOWED, Reason::MethodNotAllowed)
        })
        .with_state(Arc::new(shared));
    tokio::select! {
        result = axum::serve(listener, router) => {
            if let Err(error) = result {
                tracing::error!(%error, "admin endpoint ended");
            }
        }
        _dropped = stopped => {}
    }
}

/// The last documents and when they were made.
type Latest = Option<(Instant, Result<Documents, StatusError>)>;

struct Shared {
    admin: Admin,
    bounds: Bounds,
    started: Instant,
    /// Held while a snapshot is under way, so that later readers wait for it and share it.
    latest: Mutex<Latest>,
    /// Held while an order of an operator is carried out: one at a time.
    ordering: Arc<Mutex<()>>,
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let mut text = String::with_capacity(64 * 1024);
    shared.admin.exposition.render(&mut text);
    answer(StatusCode::OK, CONTENT_TYPE, text.into())
}

async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    match shared.admin.readiness.get() {
        Readiness::Ready => plain(StatusCode::OK, "ok\n"),
        Readiness::Starting => failure("starting", "The edge is starting."),
        Readiness::Draining => failure(Reason::Draining.label(), Reason::Draining.text()),
    }
}

/// JSON, or protobuf for who accepts that alone. Each reader gets the same snapshot for a second.
async fn status(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let mut latest = shared.latest.lock().await;
    let fresh = latest
        .as_ref()
        .filter(|(at, _)| at.elapsed() < shared.bounds.fresh);
    let document = match fresh {
        Some((_, document)) => document.clone(),
        None => {
            let document = ask(&shared).await;
            *latest = Some((Instant::now(), document.clone()));
            document
        }
    };
    match document {
        Ok(documents) if status::wants_protobuf(&headers) => {
            answer(StatusCode::OK, status::PROTOBUF, documents.protobuf.into())
        }
        Ok(documents) => answer(StatusCode::OK, "application/json", documents.json.into()),
        Err(error) => failure(error.label(), error.text()),
    }
}

async fn command(
    State(shared): State<Arc<Shared>>,
    Path(node): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let asked = match &body {
        Ok(body) => shared.admin.commands.ask(node, body).await,
        Err(_) => Err(CommandError::TooLong),
    };
    match asked {
        Ok(text) => answer(StatusCode::OK, "application/json", text.into()),
        Err(error) => answer(
            error.status(),
            "application/json",
            error_body(error.label(), error.text()),
        ),
    }
}

/// One snapshot from control, waited for beside the runtime so that `/healthz` goes on answering.
async fn ask(shared: &Arc<Shared>) -> Result<Documents, StatusError> {
    let asker = Arc::clone(shared);
    let asked = tokio::task::spawn_blocking(move || asker.admin.status.ask(asker.bounds.deadline));
    let snapshot = asked.await.map_err(|_ended| StatusError::Stopped)??;
    let figures = &shared.admin.exposition;
    let edge = EdgeFigures {
        version: env!("CARGO_PKG_VERSION"),
        readiness: shared.admin.readiness.get().label(),
        uptime_s: shared.started.elapsed().as_secs(),
        shards: figures.shards(),
        node_connections: figures.shard_sum(ShardMetric::Sessions),
        client_connections: figures.shard_sum(ShardMetric::Clients),
    };
    Ok(status::render(&snapshot, edge))
}

fn plain(status: StatusCode, text: &'static str) -> Response {
    answer(status, "text/plain; charset=utf-8", text.into())
}

fn refusal(status: StatusCode, reason: Reason) -> Response {
    answer(
        status,
        "application/json",
        error_body(reason.label(), reason.text()),
    )
}

fn failure(code: &'static str, text: &'static str) -> Response {
    answer(
        StatusCode::SERVICE_UNAVAILABLE,
        "application/json",
        error_body(code, text),
    )
}

fn error_body(code: &'static str, message: &'static str) -> Body {
    let value = serde_json::json!({"error": {"code": code, "message": message}});
    format!("{value}\n").into()
}

fn answer(status: StatusCode, content_type: &'static str, body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (status, headers, body).into_response()
}
