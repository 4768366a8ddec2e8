//! What the Edge may ask beside executions, and what it is told.
use core::time::Duration;

use iop_control::node::attempt::Patience;
use iop_proto::domain::{
    Adapter, CommandKind, Message, Metadata, NodeCommandRequest, NodeCommandResponse,
};
use tokio::time::Instant;

use crate::support::Agent;
use crate::support::edge::{Conn, Edge, adapter, payload, tunnel};
use crate::support::provider::{Call, Provider};

const PROBE_MS: u64 = 400;

pub(crate) fn command(kind: CommandKind, adapter: &str, target: &str) -> NodeCommandRequest {
    NodeCommandRequest {
        command_id: format!("c-{adapter}-{target}"),
        kind,
        adapter: adapter.to_owned(),
        target: target.to_owned(),
    }
}

pub(crate) async fn ask(conn: &mut Conn, id: u64, command: NodeCommandRequest) {
    conn.send_all(&[(id, 0, Message::NodeCommandRequest(command))])
        .await;
}

pub(crate) async fn answer(conn: &mut Conn) -> (u64, NodeCommandResponse) {
    let received = conn.message().await;
    assert_eq!(received.id, 0, "an answer expects none");
    let Message::NodeCommandResponse(response) = received.message else {
        panic!("{received:?}")
    };
    (received.reply_to, response)
}

fn metadata<const N: usize>(pairs: [(&str, &str); N]) -> Metadata {
    pairs
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

async fn list(provider: &Provider, target: &str) {
    let call = provider.request().await;
    assert_eq!(call.request_line(), "GET /v1/models HTTP/1.1");
    list_on(call, target).await;
}

async fn list_on(mut call: Call, target: &str) {
    let body = format!(r#"{{"data":[{{"id":"{target}"}}]}}"#);
    call.answer("200 OK\r\nconnection: close", body.as_bytes())
        .await;
}

struct World {
    one: Provider,
    two: Provider,
    edge: Edge,
    conn: Conn,
    _agent: Agent,
}

fn adapters(one: &Provider, two: &Provider) -> Vec<Adapter> {
    let second = Adapter {
        name: "b".to_owned(),
        ..adapter(two.port(), 1)
    };
    vec![adapter(one.port(), 1), second]
}

/// Adapters `a` and `b` of one type, each with a provider of its own and one slot.
async fn world() -> World {
    let (one, two) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let mut config = edge.config();
    config.patience = Patience {
        probe_ms: PROBE_MS,
        ..Patience::default()
    };
    let agent = Agent::start(config);
    let conn = edge.ready(payload(adapters(&one, &two))).await;
    World {
        one,
        two,
        edge,
        conn,
        _agent: agent,
    }
}

const CAPABILITIES: CommandKind = CommandKind::Capabilities;

/// Proves [R-175], [R-179], [R-180], [R-255].
#[tokio::test]
async fn r175_capabilities_probes_the_named_instance_and_numbers_what_it_found() {
    let mut world = world().await;
    ask(&mut world.conn, 41, command(CAPABILITIES, "b", "t")).await;
    list(&world.two, "t").await;
    let (reply_to, response) = answer(&mut world.conn).await;
    assert_eq!(reply_to, 41);
    let expected = NodeCommandResponse {
        command_id: "c-b-t".to_owned(),
        kind: CAPABILITIES,
        error: String::new(),
        result: metadata([
            ("adapter", "openai_compat"),
            ("adapter_key", "b"),
            ("health_observation_seq", "1"),
            ("instance_key", "b"),
            ("provider_status", "available"),
            ("target", "t"),
        ]),
    };
    assert_eq!(response, expected);
    // Nobody is asked for an instance that is not there, or for no target; no number is spent.
    for (adapter, target, error) in [
        ("c", "t", "unknown adapter"),
        ("openai_compat", "t", "unknown adapter"),
        ("b", "", "no target to probe"),
    ] {
        ask(&mut world.conn, 42, command(CAPABILITIES, adapter, target)).await;
        let (reply_to, response) = answer(&mut world.conn).await;
        assert_eq!((reply_to, response.error.as_str()), (42, error));
        assert!(response.result.is_empty());
    }
    assert!(world.one.is_idle() && world.two.is_idle());
    // Two at once have two numbers; those of a new connection count from 1.
    ask(&mut world.conn, 43, command(CAPABILITIES, "a", "t")).await;
    ask(&mut world.conn, 44, command(CAPABILITIES, "b", "t")).await;
    list(&world.one, "t").await;
    list(&world.two, "t").await;
    let number = |response: NodeCommandResponse| response.result["health_observation_seq"].clone();
    let mut numbers = vec![];
    for _ in 0..2 {
        numbers.push(number(answer(&mut world.conn).await.1));
    }
    numbers.sort_unstable();
    assert_eq!(numbers, ["2", "3"]);
    drop(world.conn);
    world.conn = world
        .edge
        .ready(payload(adapters(&world.one, &world.two)))
        .await;
    ask(&mut world.conn, 1, command(CAPABILITIES, "a", "t")).await;
    list(&world.one, "t").await;
    assert_eq!(number(answer(&mut world.conn).await.1), "1");
}

/// Proves [R-176], [R-254], [R-259].
#[tokio::test]
async fn r176_a_hanging_server_is_unknown_by_the_bound_and_delays_no_other_answer() {
    let mut world = world().await;
    // The one slot of `a` is busy.
    world.conn.open(tunnel("r", b"{}")).await;
    let mut run = world.one.request().await;
    ask(&mut world.conn, 1, command(CAPABILITIES, "a", "t")).await;
    let hanging = world.one.request().await;
    let began = Instant::now();
    ask(&mut world.conn, 2, command(CAPABILITIES, "b", "t")).await;
    list(&world.two, "t").await;
    let (reply_to, quick) = answer(&mut world.conn).await;
    assert_eq!((reply_to, quick.command_id.as_str()), (2, "c-b-t"));
    assert_eq!(quick.result["provider_status"], "available");
    let (reply_to, late) = answer(&mut world.conn).await;
    assert_eq!((reply_to, late.command_id.as_str()), (1, "c-a-t"));
    assert_eq!(late.result["provider_status"], "unknown");
    assert_eq!(
        late.result["health_observation_seq"], "2",
        "in the order of the findings"
    );
    assert!(began.elapsed() < Duration::from_secs(5));
    drop(hanging);
    run.answer("200 OK", b"undisturbed").await;
    assert_eq!(world.conn.answer("r").await.body, b"undisturbed");
}

#[tokio::test]
async fn more_probes_than_a_node_may_run_at_once_are_refused_and_all_are_answered() {
    let mut world = world().await;
    let count = iop_proto::limits::COMMANDS_MAX as u64 + 5;
    for id in 1..=count {
        ask(&mut world.conn, id, command(CAPABILITIES, "a", "t")).await;
    }
    let mut busy = 0;
    let mut ids = vec![];
    for _ in 0..count {
        let (reply_to, response) = answer(&mut world.conn).await;
        ids.push(reply_to);
        match response.error.as_str() {
            "" => assert_eq!(response.result["provider_status"], "unknown"),
            "too many commands at once" => busy += 1,
            other => panic!("{other}"),
        }
    }
    ids.sort_unstable();
    assert_eq!(ids, (1..=count).collect::<Vec<_>>(), "each exactly once");
    assert_eq!(busy, 5);
}

/// Proves [R-256].
#[tokio::test]
async fn r256_transport_status_tells_the_session_and_nothing_of_its_address_or_keys() {
    let mut world = world().await;
    world.conn.open(tunnel("r", b"{}")).await;
    let _call = world.one.request().await;
    ask(
        &mut world.conn,
        7,
        command(CommandKind::TransportStatus, "", ""),
    )
    .await;
    let (reply_to, mut response) = answer(&mut world.conn).await;
    assert_eq!((reply_to, response.error.as_str()), (7, ""));
    for key in ["session_uptime_ms", "agent_uptime_ms"] {
        let value = response.result.remove(key).expect(key);
        assert!(value.parse::<u64>().unwrap() < 60_000, "{key} {value}");
    }
    let rest = metadata([("attempts_open", "1"), ("state", "serving")]);
    assert_eq!(response.result, rest);
}

/// Proves [R-257].
#[tokio::test]
async fn r257_provider_status_names_each_adapter_and_makes_no_state_up() {
    let mut world = world().await;
    let both = metadata([("state.a", "running"), ("state.b", "running")]);
    for (adapter, error, result) in [
        ("", "", both),
        ("b", "", metadata([("state.b", "running")])),
        ("c", "unknown adapter", metadata([])),
    ] {
        ask(
            &mut world.conn,
            9,
            command(CommandKind::ProviderStatus, adapter, ""),
        )
        .await;
        let (_, response) = answer(&mut world.conn).await;
        assert_eq!((response.error.as_str(), response.result), (error, result));
    }
    assert!(
        world.one.is_idle() && world.two.is_idle(),
        "nobody was probed"
    );
}
