//! A new configuration on a running session: whole or not at all, one after the other.
use iop_proto::domain::{
    Adapter, CommandKind, ConfigRefreshRequest, ConfigRefreshResponse, Message, NodeCommandRequest,
    NodeConfig, RefreshStatus, TunnelRequest,
};

use crate::support::Agent;
use crate::support::edge::{Conn, Edge, adapter, payload, tunnel};
use crate::support::provider::Provider;

fn named(name: &str, port: u16, capacity: i32) -> Adapter {
    Adapter {
        name: name.to_owned(),
        ..adapter(port, capacity)
    }
}

fn request(request_id: &str, config: Option<NodeConfig>) -> Message {
    Message::ConfigRefreshRequest(ConfigRefreshRequest {
        request_id: request_id.to_owned(),
        config,
    })
}

async fn answer(conn: &mut Conn) -> (u64, ConfigRefreshResponse) {
    let received = conn.message().await;
    let Message::ConfigRefreshResponse(response) = received.message else {
        panic!("{received:?}")
    };
    (received.reply_to, response)
}

async fn refresh(conn: &mut Conn, adapters: Vec<Adapter>) -> ConfigRefreshResponse {
    conn.send_all(&[(5, 0, request("f", Some(payload(adapters))))])
        .await;
    let (reply_to, response) = answer(conn).await;
    assert_eq!((reply_to, response.request_id.as_str()), (5, "f"));
    response
}

fn to(adapter: &str, run_id: &str) -> TunnelRequest {
    TunnelRequest {
        adapter: adapter.to_owned(),
        ..tunnel(run_id, b"{}")
    }
}

async fn serves(conn: &mut Conn, adapter: &str, provider: &Provider) {
    conn.open(to(adapter, "s")).await;
    let mut call = provider.request().await;
    call.answer("200 OK\r\nconnection: close", b"ok").await;
    assert_eq!(conn.answer("s").await.body, b"ok");
}

async fn refuses(conn: &mut Conn, adapter: &str) {
    conn.open(to(adapter, "x")).await;
    let answer = conn.answer("x").await;
    assert_eq!(answer.error(), "node rejected: unknown adapter");
}

/// Proves, [R-262].
#[tokio::test]
async fn r262_an_applied_configuration_is_in_force_when_its_answer_arrives_each_in_its_turn() {
    let (one, two) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![named("a", one.port(), 1)])).await;
    refuses(&mut conn, "b").await;
    let both = vec![named("a", one.port(), 1), named("b", two.port(), 1)];
    let applied = refresh(&mut conn, both.clone()).await;
    assert_eq!(
        (applied.status, applied.message.as_str()),
        (RefreshStatus::Applied, "")
    );
    serves(&mut conn, "b", &two).await;
    serves(&mut conn, "a", &one).await;
    // Two at once: in order, each answered, the last one in force.
    let only_b = payload(vec![named("b", one.port(), 1)]);
    conn.send_all(&[
        (8, 0, request("first", Some(payload(both)))),
        (9, 0, request("second", Some(only_b))),
    ])
    .await;
    for (id, name) in [(8, "first"), (9, "second")] {
        let (reply_to, response) = answer(&mut conn).await;
        assert_eq!((reply_to, response.request_id.as_str()), (id, name));
        assert_eq!(response.status, RefreshStatus::Applied);
    }
    refuses(&mut conn, "a").await;
    serves(&mut conn, "b", &one).await;
}

/// Proves, [R-264], [A-49].
#[tokio::test]
async fn r264_a_configuration_that_cannot_be_put_in_force_changes_nothing_and_says_why() {
    let (one, two) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let mut config = edge.config();
    let agent_ca = std::path::PathBuf::from("/nonexistent/secret-place/ca.pem");
    config.provider_http.ca = Some(agent_ca);
    let _agent = Agent::start(config);
    let mut conn = edge.ready(payload(vec![named("a", one.port(), 1)])).await;
    let b = || named("b", two.port(), 1);
    let secure = Adapter {
        base_url: "https://127.0.0.1:1".to_owned(),
        ..b()
    };
    for (adapters, status, message) in [
        (
            vec![b(), b()],
            RefreshStatus::Failed,
            "adapter b: named twice",
        ),
        (
            vec![b(), named("c", two.port(), -1)],
            RefreshStatus::Failed,
            "adapter c: negative capacity",
        ),
        (
            vec![named("a", two.port(), 1), secure],
            RefreshStatus::Failed,
            "adapter b: its HTTP client cannot be built",
        ),
        (
            vec![named("b", two.port(), i32::MAX)],
            RefreshStatus::RestartRequired,
            "more open files may be needed than this process may have",
        ),
    ] {
        let response = refresh(&mut conn, adapters).await;
        assert_eq!(
            (response.status, response.message.as_str()),
            (status, message)
        );
        refuses(&mut conn, "b").await;
        serves(&mut conn, "a", &one).await;
    }
    conn.send_all(&[(6, 0, request("none", None))]).await;
    let (_, response) = answer(&mut conn).await;
    assert_eq!(response.status, RefreshStatus::Failed);
    assert_eq!(response.message, "no configuration");
    assert!(two.is_idle());
    let good = refresh(&mut conn, vec![b()]).await;
    assert_eq!(good.status, RefreshStatus::Applied);
    serves(&mut conn, "b", &two).await;
}

/// Proves.
#[tokio::test]
async fn r295_an_instance_is_its_name_in_whatever_order_and_company_it_is_configured() {
    let (one, two) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let both = || vec![named("a", one.port(), 1), named("b", two.port(), 1)];
    let mut conn = edge.ready(payload(both())).await;
    conn.open(to("a", "held")).await;
    let mut held = one.request().await;
    // Turned round, with another server for `b`, and as it was: `a` is the instance it has been, and
    // its one slot is held.
    let turned = vec![named("b", one.port(), 1), named("a", one.port(), 1)];
    for adapters in [turned, both()] {
        assert_eq!(
            refresh(&mut conn, adapters).await.status,
            RefreshStatus::Applied
        );
        conn.open(to("a", "waits")).await;
        serves_beside(&mut conn, &one, &two).await;
        conn.cancel("waits").await;
        assert_eq!(conn.answer("waits").await.error(), "cancelled");
    }
    // The same over a connection of its own: nothing of the old one is left but the slot, until its
    // call has returned.
    drop(conn);
    held.gone().await;
    let mut conn = edge.ready(payload(both())).await;
    serves(&mut conn, "a", &one).await;
    let twins = vec![named("a", one.port(), 1), named("a", two.port(), 1)];
    assert_eq!(
        refresh(&mut conn, twins).await.status,
        RefreshStatus::Failed
    );
    serves(&mut conn, "a", &one).await;
}

/// `b` is served by whichever server it is configured with, while nobody calls for `a`.
async fn serves_beside(conn: &mut Conn, one: &Provider, two: &Provider) {
    conn.open(to("b", "beside")).await;
    let mut call = tokio::select! {
        call = one.request() => call,
        call = two.request() => call,
    };
    call.answer("200 OK\r\nconnection: close", b"ok").await;
    assert_eq!(conn.answer("beside").await.body, b"ok");
    assert!(one.is_idle() && two.is_idle(), "the slot of `a` is held");
}

/// Proves, [S-45].
#[tokio::test]
async fn r203_a_running_call_keeps_its_instance_and_its_slot_while_new_ones_go_elsewhere() {
    let (old, new) = (Provider::start().await, Provider::start().await);
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![named("a", old.port(), 1)])).await;
    conn.open(to("a", "running")).await;
    let mut running = old.request().await;
    running.start_chunked().await;
    assert_eq!(conn.frame().await.sequence, 1);
    let replaced = refresh(&mut conn, vec![named("a", new.port(), 1)]).await;
    assert_eq!(replaced.status, RefreshStatus::Applied);
    // The gate is the name's, not the instance's: one slot, and it is held.
    conn.open(to("a", "waits")).await;
    running.chunk(b"still here").await;
    assert_eq!(conn.frame().await.body, &b"still here"[..]);
    assert!(new.is_idle() && old.is_idle());
    // A name that is gone drains until its last call is over.
    let removed = refresh(&mut conn, vec![]).await;
    assert_eq!(removed.status, RefreshStatus::Applied);
    refuses(&mut conn, "a").await;
    let status = NodeCommandRequest {
        command_id: String::new(),
        kind: CommandKind::ProviderStatus,
        adapter: String::new(),
        target: String::new(),
    };
    conn.send_all(&[(3, 0, Message::NodeCommandRequest(status))])
        .await;
    let Message::NodeCommandResponse(states) = conn.message().await.message else {
        panic!("the answer to a command")
    };
    assert_eq!(states.result["state.a"], "draining");
    running.end_chunked().await;
    let mut first = crate::support::edge::Answer::default();
    // What waited was admitted under the second configuration and calls its instance.
    let end = conn.frame().await;
    assert_eq!((end.run_id.as_str(), end.sequence), ("running", 3));
    new.request()
        .await
        .answer("200 OK", b"late but served")
        .await;
    while first.terminal.is_none() {
        first.take(conn.frame().await);
    }
    assert_eq!(first.body, b"late but served");
}
