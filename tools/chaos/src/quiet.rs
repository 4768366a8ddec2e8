//! A quiet point: no load, everything up, and nothing left of what was.
//!
//! Lives on: the harness, between two rounds. Bound: `LIMIT`, then what is left is a fault.
use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::{get, order};
use crate::part::Held;
use crate::plan::{EDGES, Who};
use crate::stage::Stage;

/// Longer than any wait of the stage: a lost link is seen after 3 s, a stall after 3 s and its graces,
/// a node comes back after 1 s and says ready after one more.
const LIMIT: Duration = Duration::from_secs(40);
const TICK: Duration = Duration::from_millis(100);
/// So long an Edge has to find out by itself that a provider is back: its first look is after 5 s, the
/// next one after 10 more.
const PROBER: Duration = Duration::from_secs(15);
/// A status serves its readers for a second: the first one here is of after the load.
const STALE: Duration = Duration::from_millis(1_050);
/// An answer of an idle Edge.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Gauges that are 0 when nobody asks anything.
const ZERO: [&str; 9] = [
    "iop_edge_clients",
    "iop_edge_requests_open",
    "iop_edge_runs",
    "iop_edge_leases_held",
    "iop_edge_handshakes_in_progress",
    "iop_edge_pool_used_bytes{pool=\"output\"}",
    "iop_edge_pool_used_bytes{pool=\"body\"}",
    "iop_edge_pool_used_bytes{pool=\"assembly\"}",
    "iop_edge_receive_buffers_out{pool=\"session\"}",
];

/// A quiet point that was reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached {
    pub(crate) after: Duration,
    /// Providers that were put aside, and of which the harness had to ask for a look.
    pub(crate) asked: u32,
}

/// Waits until nothing is left.
///
/// # Errors
/// What is left.
pub(crate) async fn wait(stage: &Stage) -> Result<Reached, Vec<String>> {
    let mut asked = BTreeSet::new();
    let began = Instant::now();
    tokio::time::sleep(STALE).await;
    loop {
        let (left, aside) = left(stage).await;
        if left.is_empty() {
            return Ok(Reached {
                after: began.elapsed(),
                asked: u32::try_from(asked.len()).unwrap_or(u32::MAX),
            });
        }
        if began.elapsed() > PROBER {
            for (admin, node, provider) in aside {
                ask_again(admin, &node, &provider).await;
                if asked.insert((node.clone(), provider.clone())) {
                    println!("  {provider} of {node} is aside after {PROBER:?}: asked for a look");
                }
            }
        }
        if began.elapsed() > LIMIT {
            return Err(left);
        }
        let ended = stage.parts.iter().filter_map(crate::part::Part::ended);
        let ended: Vec<_> = ended.collect();
        if !ended.is_empty() {
            return Err(ended);
        }
        tokio::time::sleep(TICK).await;
    }
}

/// An admin listener, and a node's provider that is put aside there.
type Aside = (SocketAddr, String, String);

async fn left(stage: &Stage) -> (Vec<String>, Vec<Aside>) {
    let (mut left, mut aside) = (Vec::new(), Vec::new());
    for (row, &server) in (0..).zip(&stage.servers) {
        let open = get(server, "/chaos", ANSWER_LIMIT).await;
        if open.as_deref() != Some("{\"open\":0}") {
            left.push(format!("{} has calls: {open:?}", Who::Server(row).name()));
        }
    }
    for (edge, &admin) in (0..EDGES).zip(&stage.admins) {
        let name = Who::Edge(edge).name();
        let of_edge = |what: String| format!("{name}: {what}");
        match get(admin, "/metrics", ANSWER_LIMIT).await {
            Some(text) => left.extend(counters(&text, edge).into_iter().map(of_edge)),
            None => left.push(of_edge("no metrics".to_owned())),
        }
        match get(admin, "/status", ANSWER_LIMIT).await {
            Some(text) => {
                let found = status(&text, edge);
                let found_aside = found.aside.into_iter();
                aside.extend(found_aside.map(|(node, provider)| (admin, node, provider)));
                left.extend(found.left.into_iter().map(of_edge));
            }
            None => left.push(of_edge("no status".to_owned())),
        }
    }
    (left, aside)
}

/// What an operator does about a provider that was put aside: a look takes it back.
async fn ask_again(admin: SocketAddr, node: &str, provider: &str) {
    let body = format!("{{\"type\":\"capabilities\",\"provider\":\"{provider}\"}}");
    let request = format!(
        "POST /nodes/{node}/commands HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let _looked = order(admin, &request, ANSWER_LIMIT).await; // its status tells what came of it
}

/// Value of the series spelled `name` or `name{labels}`.
fn series(text: &str, name: &str) -> Option<f64> {
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok()
}

/// Sum over every series of a family; `None`: there is none.
pub(crate) fn sum(text: &str, family: &str) -> Option<f64> {
    let lines = text.lines().filter(|line| {
        let rest = line.strip_prefix(family);
        rest.is_some_and(|rest| rest.starts_with([' ', '{']))
    });
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

fn counters(text: &str, edge: u8) -> Vec<String> {
    let mut left = Vec::new();
    let mut wants = |name: &str, wanted: f64| {
        let found = series(text, name);
        if found != Some(wanted) {
            left.push(format!("{name} is {found:?}, not {wanted}"));
        }
    };
    for name in ZERO {
        wants(name, 0.0);
    }
    wants("iop_edge_receive_buffers_out{pool=\"client\"}", 0.0);
    wants("iop_edge_nodes_outdated", 0.0);
    wants("iop_edge_shards_draining", 0.0);
    wants("iop_edge_sessions", if edge == 0 { 2.0 } else { 1.0 });
    for [taken, returned] in [
        [
            "iop_edge_leases_granted_total",
            "iop_edge_leases_returned_total",
        ],
        [
            "iop_edge_client_connections_total",
            "iop_edge_client_connections_closed_total",
        ],
    ] {
        let both = [taken, returned].map(|family| sum(text, family));
        if both[0].is_none() || both[0] != both[1] {
            left.push(format!("{taken} {:?}, {returned} {:?}", both[0], both[1]));
        }
    }
    left
}

#[derive(Debug, Default)]
struct Found {
    left: Vec<String>,
    /// Node and provider that evidence has put aside.
    aside: Vec<(String, String)>,
}

/// Nodes, models and providers of each Edge of the stage.
const ROWS: [[usize; 3]; EDGES as usize] = [[2, 2, 4], [1, 1, 1]];

fn status(text: &str, of_edge: u8) -> Found {
    let mut found = Found::default();
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        found.left.push("a status that is no JSON".to_owned());
        return found;
    };
    let edge = &value["edge"];
    for name in ["runs", "waiting", "leases_held", "client_connections"] {
        if edge[name] != 0 {
            found.left.push(format!("{name} is {}", edge[name]));
        }
    }
    if !edge["leases_taken"].is_u64() || edge["leases_taken"] != edge["leases_returned"] {
        found.left.push(format!("leases: {edge}"));
    }
    if edge["draining_nodes"] != Value::Array(Vec::new()) {
        found
            .left
            .push(format!("drains {}", edge["draining_nodes"]));
    }
    let nodes = list(&value["nodes"]);
    let providers = nodes.iter().map(|node| list(&node["providers"]).len());
    let rows = [nodes.len(), list(&value["models"]).len(), providers.sum()];
    if rows != ROWS[usize::from(of_edge)] {
        found
            .left
            .push(format!("nodes, models, providers: {rows:?}"));
    }
    for model in list(&value["models"]) {
        if model["queued"] != 0 || model["long_queued"] != 0 {
            found.left.push(format!("waits: {model}"));
        }
    }
    for node in list(&value["nodes"]) {
        if node["connected"] != true {
            found
                .left
                .push(format!("{} is not connected", node["node_id"]));
        }
        for provider in list(&node["providers"]) {
            provider_left(node, provider, &mut found);
        }
    }
    found
}

fn provider_left(node: &Value, provider: &Value, found: &mut Found) {
    let figures = ["in_flight", "queued", "long_in_flight", "long_queued"];
    let is_idle = figures.iter().all(|name| provider[name] == 0);
    let has_capacity = provider["capacity"]
        .as_u64()
        .is_some_and(|capacity| capacity > 0);
    if is_idle && has_capacity && provider["status"] == "available" {
        return;
    }
    if provider["health"] == "unavailable" {
        let name = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        found
            .aside
            .push((name(&node["node_id"]), name(&provider["id"])));
    }
    found
        .left
        .push(format!("capacity is not whole: {provider}"));
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

// ── growth ────────────────────────────────────────────────────────────────────────────────────────

/// Quiet points before a part's figures count: pools and heaps touch their pages first.
const WARM: usize = 2;
/// Above the most that was held while warming up. A runtime's helper threads, and descriptors of
/// connections to a model server that are kept, come and go.
const ALLOWED: Held = Held {
    descriptors: 16,
    threads: 4,
    resident_kib: 48 * 1024,
};

/// What a life says in its log that it has reserved at its start, KiB: it touches the pages as it uses
/// them, and that is no growth.
pub(crate) fn reserved_kib(log: &str) -> u64 {
    let lines = log.lines().filter(|line| line.contains("memory reserved"));
    let bytes = lines.filter_map(|line| {
        let (_, rest) = line.split_once("bytes=")?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    });
    bytes.sum::<u64>() / 1024
}

/// What one part held at its quiet points, all its lives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growth {
    warm: Held,
    points: usize,
    /// The most, ever.
    pub(crate) most: Held,
    /// First and last of the present life, once warm.
    pub(crate) life: Option<(Held, Held)>,
    lives: u32,
    pub(crate) life_points: usize,
}

impl Growth {
    /// Takes the figures of a quiet point, `reserved_kib` being what this life has set aside at its
    /// start; `Some`: too much.
    pub(crate) fn take(&mut self, reserved_kib: u64, held: Held, lives: u32) -> Option<String> {
        let untouched_kib = reserved_kib.saturating_sub(self.warm.resident_kib);
        if self.lives != lives {
            (self.lives, self.life_points, self.life) = (lives, 0, None);
        }
        self.points += 1;
        self.life_points += 1;
        self.most = most(self.most, held);
        if self.life_points > WARM {
            let first = self.life.map_or(held, |(first, _)| first);
            self.life = Some((first, held));
        }
        if self.points <= WARM {
            self.warm = most(self.warm, held);
            return None;
        }
        let grown = held.descriptors > self.warm.descriptors + ALLOWED.descriptors
            || held.threads > self.warm.threads + ALLOWED.threads
            || held.resident_kib > self.warm.resident_kib + untouched_kib + ALLOWED.resident_kib;
        grown.then(|| format!("holds {held}; while warming up {}", self.warm))
    }

    pub(crate) const fn warm(&self) -> Held {
        self.warm
    }
}

fn most(a: Held, b: Held) -> Held {
    Held {
        descriptors: a.descriptors.max(b.descriptors),
        threads: a.threads.max(b.threads),
        resident_kib: a.resident_kib.max(b.resident_kib),
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.resident_kib / 1024;
        write!(
            f,
            "{} fds, {} threads, {mib} MiB",
            self.descriptors, self.threads
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        let metrics = |held: u32| {
            let zero = ZERO.map(|name| format!("{name} 0\n")).concat();
            format!(
                "{}iop_edge_receive_buffers_out{{pool=\"client\"}} 0\niop_edge_nodes_outdated 0\n\
                 iop_edge_shards_draining 0\niop_edge_sessions 2\n\
                 iop_edge_leases_granted_total{{from=\"submit\"}} 3\n\
                 iop_edge_leases_granted_total{{from=\"queue\"}} 2\n\
                 iop_edge_leases_returned_total{{by=\"fence\"}} 5\n\
                 iop_edge_client_connections_total 1\n\
                 iop_edge_client_connections_closed_total 1\n",
                zero.replace("leases_held 0", &format!("leases_held {held}"))
            )
        };
        assert!(counters(&metrics(0), 0).is_empty());
        assert_eq!(counters(&metrics(1), 0).len(), 1);
        assert_eq!(counters(&metrics(0), 1).len(), 1, "one node too many");
        assert_eq!(counters(&metrics(0).replace("\"} 5", "\"} 4"), 0).len(), 1);
        assert!(counters("", 0).len() > ZERO.len());
        let without = metrics(0);
        let without = without.lines().filter(|line| !line.contains("_leases_"));
        let without = without.collect::<Vec<_>>().join("\n");
        assert_eq!(
            counters(&without, 0).len(),
            2,
            "no lease that is held, and none at all"
        );
    }

    #[test]
    fn a_status_is_whole_or_says_what_is_not() {
        let document = |in_flight: u32, health: &str| {
            format!(
                "{{\"nodes\":[{{\"node_id\":\"n1\",\"connected\":true,\"providers\":[{{\"id\":\"p1\",\
                 \"status\":\"{}\",\"health\":\"{health}\",\"capacity\":4,\"in_flight\":{in_flight},\
                 \"queued\":0,\"long_in_flight\":0,\"long_queued\":0}}]}}],\"models\":[{{\"queued\":0,\"long_queued\":0}}],\"edge\":\
                 {{\"runs\":0,\"waiting\":0,\"leases_held\":0,\"client_connections\":0,\
                 \"leases_taken\":1,\"leases_returned\":1,\"draining_nodes\":[]}}}}",
                if health == "available" {
                    "available"
                } else {
                    "unavailable"
                }
            )
        };
        let whole = status(&document(0, "available"), 1);
        assert!(whole.left.is_empty(), "{whole:?}");
        assert_eq!(status(&document(1, "available"), 1).left.len(), 1);
        assert_eq!(
            status(&document(0, "available"), 0).left.len(),
            1,
            "too few"
        );
        let bare = "{\"edge\":{}}";
        assert!(status(bare, 1).left.len() > 4, "nothing at all");
        let aside = status(&document(0, "unavailable"), 1);
        assert_eq!((aside.left.len(), aside.aside.len()), (1, 1));
    }

    #[test]
    fn growth_is_told_from_warming_up() {
        let held = |mib: u64| Held {
            descriptors: 20,
            threads: 5,
            resident_kib: mib * 1024,
        };
        let mut growth = Growth::default();
        for mib in [10, 80, 90, 70] {
            assert_eq!(growth.take(0, held(mib), 1), None);
        }
        assert_eq!(growth.life.map(|(first, _)| first), Some(held(90)));
        assert!(growth.take(0, held(200), 2).is_some());
        let log = "INFO iop: memory reserved holder=\"a b\" bytes=104857600\n\
                   INFO iop: other bytes=1\n\
                   INFO iop: memory reserved holder=\"c\" bytes=52428800 x=1\n";
        let reserved = reserved_kib(log);
        assert_eq!(reserved, 150 * 1024);
        assert!(growth.take(reserved, held(150 + 48), 2).is_none());
        assert!(growth.take(reserved, held(150 + 49), 2).is_some());
        let leaks = Held {
            descriptors: 60,
            ..held(70)
        };
        assert!(growth.take(reserved, leaks, 2).is_some());
    }
}
