//! A node's configuration changes while it is connected: what it is sent, and when its new bindings are
//! used.
use iop_proto::domain::{Message, RefreshStatus};

use crate::disconnect::block_writer;
use crate::kit::{
    Run, World, catalog, expect_accepted, expect_nothing, expect_ready, expect_refresh, pending,
    ready, refreshed, register,
};
use crate::support::{Node, chat};

/// Provider `p1` on adapter `name` of n1.
fn moved(name: &str, tail: &str) -> String {
    catalog([4, 4], tail)
        .replace("- name: a1\n", &format!("- name: {name}\n"))
        .replace("adapter: a1\n", &format!("adapter: {name}\n"))
}

const OUTDATED: &str = "iop_edge_nodes_outdated";

/// What `/status` says of n1's refresh; none: it has the newest.
fn wait_state(world: &World, state: Option<&str>) {
    let began = std::time::Instant::now();
    loop {
        let status = world.edge.status();
        let nodes = status["edge"]["outdated_nodes"].as_array().expect("a list");
        let of_one = nodes.iter().find(|node| node["node_id"] == "n1");
        let seen = of_one.and_then(|node| node["refresh"].as_str());
        if seen == state {
            return;
        }
        assert!(
            began.elapsed() < crate::support::DEADLINE,
            "{seen:?}, not {state:?}"
        );
        std::thread::yield_now();
    }
}

/// Proves, [R-262].
#[test]
fn r260_a_ready_node_is_sent_its_new_configuration_and_used_by_it_once_applied() {
    let world = World::new(&catalog([4, 4], ""));
    let mut one = world.node("n1");
    let mut two = world.node("n2");
    world.reload(&moved("b1", ""));
    let (id, config) = expect_refresh(&mut one);
    assert!(one.reply_to == 0 && !id.is_empty());
    let names: Vec<_> = config.adapters.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(names, ["b1"], "the whole new configuration");
    assert_eq!(config.adapters[0].capacity, 4);
    expect_nothing(&mut two); // its own is the same

    let mut client = world.asks(&chat("only1", false));
    world.wait_queued(1);
    expect_nothing(&mut one);
    wait_state(&world, Some("pending"));
    refreshed(&mut one, &id, RefreshStatus::Applied);
    let request = one.tunnel();
    assert_eq!(request.adapter, "b1", "the new binding");
    Run::of(&request).answers(&mut one, &mut client);
    wait_state(&world, None);
    // What it has it is not sent again; a registration carries the newest.
    world.reload(&moved("b1", ""));
    expect_nothing(&mut one);
    drop(one);
    let mut one = Node::connect(&world.edge, "n1");
    one.send(&register("n1"));
    let answer = format!("{:?}", expect_accepted(&mut one));
    assert!(answer.contains("b1"), "{answer}");
    drop((one, two, client));
    world.rest();
}

/// Refused, the old configuration stays in force whole; the next reload tries again. Proves [S-62].
#[test]
fn s62_a_refused_refresh_keeps_its_bindings_out_until_a_later_one_is_applied() {
    for (status, word) in [
        (RefreshStatus::Failed, "failed"),
        (RefreshStatus::RestartRequired, "restart_required"),
    ] {
        let world = World::new(&catalog([4, 4], ""));
        let mut one = world.node("n1");
        world.reload(&moved("b1", ""));
        let (id, _) = expect_refresh(&mut one);
        refreshed(&mut one, &id, status);
        let series = format!("iop_edge_config_refreshes_total{{result=\"{word}\"}}");
        world.wait(&series, 1);
        world.wait(OUTDATED, 1);
        wait_state(&world, Some(word));
        let mut client = world.asks(&chat("only1", false));
        world.wait_queued(1);
        expect_nothing(&mut one);
        world.reload(&moved("b1", ""));
        let (again, _) = expect_refresh(&mut one);
        assert_ne!(again, id);
        refreshed(&mut one, &again, RefreshStatus::Applied);
        Run::asked(&mut one).answers(&mut one, &mut client);
        world.wait(OUTDATED, 0);
        drop((one, client));
        world.rest();
    }
}

/// Never answered: reported, sent again when something new is to be said; late: it still counts.
/// Proves [D-29].
#[test]
fn d29_an_unanswered_refresh_is_reported_and_a_late_answer_counts() {
    let tail = "timeouts:\n  refresh_ms: 300\n";
    let world = World::new(&catalog([4, 4], tail));
    let mut one = world.node("n1");
    world.reload(&moved("b1", tail));
    let (id, _) = expect_refresh(&mut one);
    world.wait("iop_edge_config_refreshes_total{result=\"unanswered\"}", 1);
    wait_state(&world, Some("unanswered"));
    expect_nothing(&mut one);
    let mut client = world.asks(&chat("only1", false));
    world.wait_queued(1);
    let nobodys = id.parse::<u64>().expect("a number") + 1_000;
    refreshed(&mut one, &nobodys.to_string(), RefreshStatus::Applied);
    expect_nothing(&mut one);
    refreshed(&mut one, &id, RefreshStatus::Applied);
    Run::asked(&mut one).answers(&mut one, &mut client);
    world.wait(OUTDATED, 0);
    drop((one, client));
    world.rest();
}

/// Proves, [R-265], [S-10].
#[test]
fn s10_a_pending_node_is_sent_nothing_and_after_its_ready_what_it_lacks() {
    let world = World::new(&catalog([4, 4], ""));
    let mut one = Node::connect(&world.edge, "n1");
    one.send(&register("n1"));
    expect_accepted(&mut one);
    world.reload(&moved("b1", ""));
    expect_nothing(&mut one);
    one.send(&ready("n1"));
    expect_ready(&mut one, true);
    let (id, config) = expect_refresh(&mut one);
    assert_eq!(config.adapters[0].name, "b1");
    // Asked to register again it is sent what it was sent last, and nothing changes. `[A-03]`
    one.send(&register("n1"));
    let answer = format!("{:?}", expect_accepted(&mut one));
    assert!(answer.contains("b1"), "{answer}");
    refreshed(&mut one, &id, RefreshStatus::Applied);
    world.serves(&mut one, "only1");
    drop(one);
    world.rest();
}

/// Three reloads while one refresh is under way make one more, with the newest. Proves [S-46].
#[test]
fn s46_refreshes_are_serial_and_only_the_newest_follows() {
    let world = World::new(&catalog([4, 4], ""));
    let mut one = world.node("n1");
    world.reload(&moved("b1", ""));
    let (first, _) = expect_refresh(&mut one);
    for name in ["c1", "d1", "e1"] {
        world.reload(&moved(name, ""));
    }
    expect_nothing(&mut one);
    refreshed(&mut one, &first, RefreshStatus::Applied);
    let (second, config) = expect_refresh(&mut one);
    assert_eq!(config.adapters[0].name, "e1");
    assert!(pending(&mut one).is_empty());
    refreshed(&mut one, &second, RefreshStatus::Applied);
    world.serves(&mut one, "only1");
    drop(one);
    world.rest();
}

/// A refresh keeps its place among the session's requests: those granted before it go before it.
#[test]
fn a_refresh_does_not_pass_requests_that_were_granted_before_it() {
    let world = World::new(&catalog([8, 4], ""));
    let mut one = world.node("n1");
    // The long one has begun and cannot get on: the others still wait when the refresh joins them.
    let mut clients = vec![block_writer(&world, "only1")];
    clients.extend((0..4).map(|_| world.asks(&chat("only1", false))));
    world.wait_held(5);
    world.wait("iop_edge_runs", 5);
    world.reload(&moved("b1", "").replace("capacity: 4", "capacity: 8"));
    world.wait(OUTDATED, 1);
    let mut requests = 0;
    loop {
        match one.receive() {
            Message::TunnelRequest(request) => {
                assert_eq!(request.adapter, "a1");
                requests += 1;
            }
            Message::ConfigRefreshRequest(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(requests, 5);
    drop((one, clients));
    world.rest();
}
