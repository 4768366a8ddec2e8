//! `/status`: a snapshot asked of control, as JSON or protobuf. `[D-59]` `[A-45]`
//!
//! Lives on: the admin thread; the request crosses to control and its answer comes back. View: one
//! control step. Bound: one request under way, one snapshot a second, one deadline.
//!
//! The document holds what an operator may hand on: configured names and figures. No address, no
//! token, no generation, no connection. `[R-351]`
use core::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use iop_control::edge::{ModelSnapshot, NodeSnapshot, ProviderSnapshot, RefreshState, Snapshot};
use iop_control::names::Names;
use iop_proto::{domain, map};
use serde::Serialize;

/// Control has this long to answer.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// A document serves every reader for this long: a snapshot is one O(providers) step.
pub(super) const FRESH: Duration = Duration::from_secs(1);

/// Asks control for one snapshot. Control answers in the turn that finds it, and never waits for
/// the asker.
#[derive(Debug)]
pub struct SnapshotRequest {
    reply: Sender<Snapshot>,
}

impl SnapshotRequest {
    /// Control thread. An asker that gave up meanwhile costs nothing.
    pub fn answer(self, snapshot: Snapshot) {
        let _gone = self.reply.try_send(snapshot);
    }
}

/// The asking end of the lane to control.
pub struct StatusSource {
    requests: Sender<SnapshotRequest>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl core::fmt::Debug for StatusSource {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("StatusSource").finish_non_exhaustive()
    }
}

/// The lane: control polls the receiver each turn, and `wake` ends its sleep.
#[must_use]
pub fn status_lane(
    wake: impl Fn() + Send + Sync + 'static,
) -> (StatusSource, Receiver<SnapshotRequest>) {
    let (requests, receiver) = bounded(1);
    (
        StatusSource {
            requests,
            wake: Box::new(wake),
        },
        receiver,
    )
}

/// Why there is no status. Each is 503.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusError {
    /// An earlier request is still unanswered.
    Busy,
    /// Control did not answer within the deadline.
    Late,
    /// Control has ended.
    Stopped,
}

impl StatusError {
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Busy => "status_busy",
            Self::Late => "status_late",
            Self::Stopped => "status_stopped",
        }
    }

    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Busy => "An earlier status request has not been answered.",
            Self::Late => "The status did not arrive in time.",
            Self::Stopped => "The edge is shutting down.",
        }
    }
}

impl StatusSource {
    /// Blocks for at most `deadline`.
    pub(super) fn ask(&self, deadline: Duration) -> Result<Snapshot, StatusError> {
        let (reply, answer) = bounded(1);
        self.requests
            .try_send(SnapshotRequest { reply })
            .map_err(|error| match error {
                TrySendError::Full(_) => StatusError::Busy,
                TrySendError::Disconnected(_) => StatusError::Stopped,
            })?;
        (self.wake)();
        answer.recv_timeout(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => StatusError::Late,
            RecvTimeoutError::Disconnected => StatusError::Stopped,
        })
    }
}

/// Figures of the process; the document adds control's totals.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct EdgeFigures {
    pub version: &'static str,
    pub readiness: &'static str,
    pub uptime_s: u64,
    pub shards: usize,
    pub node_connections: u64,
    pub client_connections: u64,
}

#[derive(Serialize)]
struct Document<'a> {
    nodes: Vec<Node<'a>>,
    models: Vec<Model<'a>>,
    edge: Edge<'a>,
}

/// A connected node that does not have the newest configuration, and why.
#[derive(Serialize)]
struct Outdated<'a> {
    node_id: &'a str,
    refresh: &'static str,
}

#[derive(Serialize)]
struct Edge<'a> {
    #[serde(flatten)]
    figures: EdgeFigures,
    /// Configurations taken since the start.
    config_epoch: u64,
    outdated_nodes: Vec<Outdated<'a>>,
    /// Nodes that take nothing new.
    draining_nodes: Vec<&'a str>,
    runs: u32,
    waiting: usize,
    leases_held: u64,
    leases_taken: u64,
    leases_returned: u64,
}

/// `NodeSnapshot` under its proto names.
#[derive(Serialize)]
struct Node<'a> {
    node_id: &'a str,
    connected: bool,
    providers: Vec<Provider<'a>>,
}

/// `ProviderSnapshot` under its proto names.
#[derive(Serialize)]
struct Provider<'a> {
    id: &'a str,
    r#type: &'static str,
    category: &'static str,
    adapter: &'a str,
    targets: [&'a str; 1],
    status: &'static str,
    health: &'a str,
    capacity: u32,
    in_flight: u32,
    queued: u32,
    long_context_capacity: u32,
    long_in_flight: u32,
    long_queued: u32,
}

#[derive(Serialize)]
struct Model<'a> {
    name: &'a str,
    queued: u32,
    long_queued: u32,
}

fn provider<'a>(snapshot: &ProviderSnapshot, names: &'a Names) -> Provider<'a> {
    let name = names.provider(snapshot.provider);
    Provider {
        id: &name.id,
        r#type: name.kind.name(),
        category: name.category.name(),
        adapter: &name.adapter,
        targets: [&name.target],
        status: snapshot.status.name(),
        health: snapshot.health_text(names),
        capacity: snapshot.capacity,
        in_flight: snapshot.in_flight,
        queued: snapshot.queued,
        long_context_capacity: snapshot.long_context_capacity,
        long_in_flight: snapshot.long_in_flight,
        long_queued: snapshot.long_queued,
    }
}

/// A snapshot in both its forms.
#[derive(Clone, Debug)]
pub(super) struct Documents {
    pub json: Bytes,
    /// `iop.NodeSnapshot` messages, each behind its length as a varint.
    pub protobuf: Bytes,
}

pub(super) const PROTOBUF: &str = "application/x-protobuf";

/// Its media type is among those the reader takes, and JSON is not.
pub(super) fn wants_protobuf(headers: &HeaderMap) -> bool {
    let accepts = |media: &str| {
        let values = headers.get_all(header::ACCEPT).iter();
        let mut values = values.filter_map(|value| value.to_str().ok());
        values.any(|value| value.split([',', ';']).any(|part| part.trim() == media))
    };
    accepts(PROTOBUF) && !accepts("application/json")
}

pub(super) fn render(snapshot: &Snapshot, figures: EdgeFigures) -> Documents {
    Documents {
        json: json(snapshot, figures),
        protobuf: protobuf(snapshot),
    }
}

fn protobuf(snapshot: &Snapshot) -> Bytes {
    let names = &*snapshot.names;
    let provider = |shown: &ProviderSnapshot| {
        let name = names.provider(shown.provider);
        domain::ProviderSnapshot {
            id: name.id.clone(),
            kind: name.kind,
            category: name.category,
            adapter: name.adapter.clone(),
            targets: vec![name.target.clone()],
            status: shown.status.name().to_owned(),
            health: shown.health_text(names).to_owned(),
            capacity: shown.capacity,
            in_flight: shown.in_flight,
            queued: shown.queued,
            long_context_capacity: shown.long_context_capacity,
            long_in_flight: shown.long_in_flight,
            long_queued: shown.long_queued,
        }
    };
    let mut bytes = Vec::new();
    for node in &snapshot.nodes {
        bytes.extend(map::encode_node_snapshot(&domain::NodeSnapshot {
            node_id: names.node(node.node).id.clone(),
            connected: node.connected,
            providers: node.providers.iter().map(provider).collect(),
        }));
    }
    bytes.into()
}

fn json(snapshot: &Snapshot, figures: EdgeFigures) -> Bytes {
    let names = &*snapshot.names;
    let node = |node: &NodeSnapshot| Node {
        node_id: &names.node(node.node).id,
        connected: node.connected,
        providers: node
            .providers
            .iter()
            .map(|of| provider(of, names))
            .collect(),
    };
    let model = |model: &ModelSnapshot| Model {
        name: &names.model(model.model).name,
        queued: model.queued,
        long_queued: model.long_queued,
    };
    let id = |node: &NodeSnapshot| names.node(node.node).id.as_str();
    let behind = snapshot.nodes.iter();
    let behind = behind.filter(|node| node.refresh != RefreshState::Current);
    let outdated = behind.map(|node| Outdated {
        node_id: id(node),
        refresh: node.refresh.name(),
    });
    let draining = snapshot.nodes.iter().filter(|node| node.draining).map(id);
    let edge = Edge {
        figures,
        config_epoch: snapshot.edge.reloads,
        outdated_nodes: outdated.collect(),
        draining_nodes: draining.collect(),
        runs: snapshot.edge.runs,
        waiting: snapshot.edge.waiting,
        leases_held: snapshot.edge.leases_held,
        leases_taken: snapshot.edge.leases_taken,
        leases_returned: snapshot.edge.leases_returned,
    };
    let document = Document {
        nodes: snapshot.nodes.iter().map(node).collect(),
        models: snapshot.models.iter().map(model).collect(),
        edge,
    };
    let mut text = serde_json::to_vec(&document).expect("strings and numbers always serialise");
    text.push(b'\n');
    text.into()
}
