//! An operator's orders: reload the configuration, drain a node.
//!
//! Lives on: the admin thread; the work is done by the reload thread and by control. Bound: one order
//! at a time, each waits at most `ORDER_WAIT`.
//!
//! Each order is a POST that carries `x-iop-operator`: a page in a browser on this host cannot send that
//! to a listener that does not allow it.
use core::time::Duration;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use crossbeam_channel::{Receiver, Sender, bounded};
use iop_proto::reason::Reason;
use serde_json::{Value, json};

use super::{Shared, answer, failure};
use crate::cold::reload::{ReloadError, ReloadRequest, Reloaded};
use crate::config::ConfigError;
use crate::control_thread::Command;
use crate::lanes::Waker;

/// An order is carried out, or has failed, within this: the reload thread waits twice 5 s for others.
const ORDER_WAIT: Duration = Duration::from_secs(15);
/// Its presence says that the sender is a program of the operator's.
const HEADER: &str = "x-iop-operator";

/// Who carries orders out.
#[derive(Clone, Debug)]
pub struct Operator {
    pub reload: Sender<ReloadRequest>,
    pub commands: Sender<Command>,
    pub control: Waker,
}

/// `POST /reload`: what changed, or every mistake of the file.
pub(super) async fn reload(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    let ask = |operator: &Operator| {
        let (reply, answer) = bounded(1);
        let request = ReloadRequest { reply: Some(reply) };
        operator.reload.try_send(request).ok().map(|()| answer)
    };
    match order(&shared, &headers, ask).await {
        Err(refused) => refused,
        Ok(Ok(reloaded)) => done(&reloaded_json(&reloaded)),
        Ok(Err(error)) => not_reloaded(&error),
    }
}

/// `POST /nodes/{id}/drain`: the leases that the node still finishes.
pub(super) async fn drain_node(
    State(shared): State<Arc<Shared>>,
    Path(node_id): Path<String>,
    headers: HeaderMap,
) -> Response {
    let asked = node_id.clone();
    let ask = move |operator: &Operator| {
        let (reply, answer) = bounded(1);
        let node_id = asked;
        let command = Command::DrainNode { node_id, reply };
        operator.commands.try_send(command).ok()?;
        operator.control.ring();
        Some(answer)
    };
    match order(&shared, &headers, ask).await {
        Err(refused) => refused,
        Ok(Ok(leases)) => done(&json!({"node_id": node_id, "leases": leases})),
        Ok(Err(Reason::NodeUnknown)) => refuse(
            StatusCode::NOT_FOUND,
            Reason::NodeUnknown.label(),
            "No node of this id is configured.",
        ),
        Ok(Err(_)) => refuse(
            StatusCode::CONFLICT,
            "node_not_connected",
            "The node is not connected, or not ready yet.",
        ),
    }
}

/// Gives an order and waits for what comes of it, beside the runtime.
async fn order<T: Send + 'static>(
    shared: &Arc<Shared>,
    headers: &HeaderMap,
    ask: impl FnOnce(&Operator) -> Option<Receiver<T>>,
) -> Result<T, Response> {
    if !headers.contains_key(HEADER) {
        return Err(refuse(
            StatusCode::FORBIDDEN,
            "operator_header_missing",
            "Orders carry the header x-iop-operator.",
        ));
    }
    let turn = Arc::clone(&shared.ordering).lock_owned().await;
    let busy = || failure("operator_busy", "An earlier order is being carried out.");
    let answer = ask(&shared.admin.operator).ok_or_else(busy)?;
    let waited = tokio::task::spawn_blocking(move || {
        let _one_at_a_time = turn; // until the order is over, whoever still listens
        answer.recv_timeout(ORDER_WAIT)
    });
    let waited = waited.await;
    let late = || {
        failure(
            "operator_late",
            "What came of the order is not known in time.",
        )
    };
    waited.ok().and_then(Result::ok).ok_or_else(late)
}

fn done(value: &Value) -> Response {
    answer(
        StatusCode::OK,
        "application/json",
        format!("{value}\n").into(),
    )
}

fn refuse(status: StatusCode, code: &str, message: &str) -> Response {
    let value = json!({"error": {"code": code, "message": message}});
    answer(status, "application/json", format!("{value}\n").into())
}

fn reloaded_json(reloaded: &Reloaded) -> Value {
    json!({
        "epoch": reloaded.epoch,
        "changed": reloaded.changed,
        "restart": reloaded.restart,
    })
}

fn not_reloaded(error: &ReloadError) -> Response {
    let (status, code) = match error {
        ReloadError::Config(_) => (StatusCode::UNPROCESSABLE_ENTITY, "config_invalid"),
        ReloadError::Pki(_) => (StatusCode::UNPROCESSABLE_ENTITY, "certificate_invalid"),
        ReloadError::Held { .. } => (StatusCode::SERVICE_UNAVAILABLE, "config_held"),
        ReloadError::Managed => (StatusCode::CONFLICT, "config_managed"),
        ReloadError::Late => (StatusCode::SERVICE_UNAVAILABLE, "config_late"),
        ReloadError::Unconfirmed => (StatusCode::SERVICE_UNAVAILABLE, "config_unconfirmed"),
    };
    let problems = match error {
        ReloadError::Config(error) => problems(error),
        ReloadError::Pki(_)
        | ReloadError::Held { .. }
        | ReloadError::Managed
        | ReloadError::Late
        | ReloadError::Unconfirmed => Value::Null,
    };
    let message = error.to_string();
    let value = json!({"error": {"code": code, "message": message, "problems": problems}});
    answer(status, "application/json", format!("{value}\n").into())
}

fn problems(error: &ConfigError) -> Value {
    let problem = |problem: &crate::config::Problem| {
        json!({
            "file": problem.file,
            "line": problem.line,
            "field": problem.field,
            "what": problem.what,
        })
    };
    error.problems.iter().map(problem).collect()
}
