//! Nothing left: descriptors, places, buffers, pools, locked memory. What exists lives on, what is
//! refused is told why, and all of it is over once there is room again.
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use iop_proto::view::TunnelFrameOut;

use crate::EVENTS;
use crate::slow::raise_descriptors;
use crate::support::{
    CATALOG, Client, DEADLINE, Directory, Edge, Metrics, Node, Setup, chat, free_port, iop, post,
    shards,
};

const HEALTH: &str = "GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n";

fn healthy(client: &mut Client) {
    assert_eq!(client.ask(HEALTH).0.status, 200);
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status();
    assert!(
        status.expect("it runs").success(),
        "{program} {arguments:?}"
    );
}

// ── descriptors ───────────────────────────────────────────────────────────────────────────────────

fn limit_descriptors(edge: &Edge, soft: usize) {
    let pid = edge.pid().to_string();
    run("prlimit", &["--pid", &pid, &format!("--nofile={soft}:")]);
}

/// Metrics over a connection that is open already: one more could not be made.
fn metrics_over(admin: &mut Client) -> Metrics {
    let (head, body) = admin.ask("GET /metrics HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(head.status, 200);
    Metrics(String::from_utf8(body).expect("text"))
}

/// Hundredths of a second that the front's thread has run.
fn front_ticks(edge: &Edge) -> u64 {
    let tasks = format!("/proc/{}/task", edge.pid());
    let tasks = std::fs::read_dir(tasks).expect("the Edge runs");
    let stats =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    let front = stats.filter(|stat| stat.contains("(iop-front)"));
    front
        .map(|stat| {
            let (_, fields) = stat.rsplit_once(')').expect("a name");
            let fields = fields.split_whitespace().skip(11).take(2);
            fields
                .map(|ticks| ticks.parse::<u64>().expect("ticks"))
                .sum::<u64>()
        })
        .sum()
}

#[test]
fn without_descriptors_accept_waits_without_spinning_and_goes_on() {
    const WAITING: usize = 12;
    let exhausted = |seen: &Metrics| seen.get("iop_edge_descriptors_exhausted_total");
    let mut edge = Edge::start(&Setup::default());
    let mut node = Node::ready(&edge, "n1");
    let mut live = Client::connect(&edge);
    live.send(&chat("m1", true));
    let run = node.tunnel().run_id;
    node.frame(&TunnelFrameOut::response_start(&run, 1, 200, EVENTS));
    assert_eq!(live.head().expect("an answer").status, 200);
    let mut admin = Client::over(TcpStream::connect(edge.admin).expect("it listens"));
    metrics_over(&mut admin);
    limit_descriptors(&edge, edge.open_descriptors() + 4);
    let mut clients: Vec<Client> = (0..WAITING).map(|_| Client::connect(&edge)).collect();
    for client in &mut clients {
        client.send(HEALTH);
    }
    // The first few are served, the rest wait; the stream that exists goes on.
    for client in &mut clients[..3] {
        let head = client.head().expect("an answer");
        assert_eq!((head.status, client.body(&head).1), (200, true));
    }
    let (began, ticks) = (Instant::now(), front_ticks(&edge));
    let first = exhausted(&metrics_over(&mut admin));
    let last = loop {
        let seen = exhausted(&metrics_over(&mut admin));
        if seen >= first + 8.0 {
            break seen;
        }
        assert!(began.elapsed() < DEADLINE, "accept does not try again");
        std::thread::park_timeout(Duration::from_millis(20));
    };
    let (elapsed, used) = (began.elapsed(), front_ticks(&edge) - ticks);
    let tries = (last - first) * 100.0;
    assert!(
        tries <= 3.0 * elapsed.as_millis() as f64 + 400.0,
        "{tries} in {elapsed:?}"
    );
    assert!(
        used * 10 <= elapsed.as_millis() as u64 / 4 + 20,
        "{used} ticks in {elapsed:?}"
    );
    node.frame(&TunnelFrameOut::body(&run, 2, b"goes on"));
    assert_eq!(live.at_least(7), b"goes on");
    // Whoever leaves makes room for one who waits; none of those was turned away.
    clients.drain(..3);
    let head = clients[0].head().expect("an answer");
    assert_eq!((head.status, clients[0].body(&head).1), (200, true));
    limit_descriptors(&edge, 1_000);
    for client in &mut clients[1..] {
        let head = client.head().expect("an answer");
        assert_eq!((head.status, client.body(&head).1), (200, true));
    }
    node.frame(&TunnelFrameOut::end(&run, 3));
    assert_eq!(live.chunk(), Some(Vec::new()));
    drop((clients, live));
    edge.wait_idle();
    edge.assert_alive();
}

// ── places ────────────────────────────────────────────────────────────────────────────────────────

/// Proves [D-33].
#[test]
fn one_client_too_many_is_told_so_and_another_may_come_when_one_has_left() {
    const PLACES: usize = 4;
    let limits = format!("limits:\n  clients_max: {PLACES}\n");
    let edge = Edge::start(&Setup::with(&format!("{CATALOG}{limits}")));
    let mut clients: Vec<Client> = (0..PLACES).map(|_| Client::connect(&edge)).collect();
    clients.iter_mut().for_each(healthy);
    let mut refused = Client::connect(&edge);
    let head = refused.head().expect("an answer, unasked");
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some() && head.header("connection") == Some("close"));
    let (_, whole) = refused.body(&head);
    assert!(whole);
    refused.expect_closed();
    assert_eq!(edge.metrics().reason("clients_full"), 1.0);
    clients.iter_mut().for_each(healthy);
    clients.pop();
    edge.wait_metrics("the place", |seen| {
        seen.get("iop_edge_clients") < PLACES as f64
    });
    healthy(&mut Client::connect(&edge));
}

/// More connections than a 15-bit counter holds, with a listener for nodes beside it that waits all
/// the while.
#[test]
fn forty_thousand_clients_come_and_go_and_one_more_is_served() {
    const EACH: usize = 10_000;
    const THREADS: usize = 4;
    let mut edge = Edge::start(&Setup::default());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..EACH {
                    let stream = TcpStream::connect(edge.clients).expect("it listens");
                    // A reset leaves no port behind.
                    let socket = socket2::SockRef::from(&stream);
                    socket.set_linger(Some(Duration::ZERO)).expect("a socket");
                }
            });
        }
    });
    healthy(&mut Client::connect(&edge));
    let accepted = "iop_edge_accepted_connections_total{listener=\"clients\"}";
    let seen = edge.wait_idle();
    assert!(seen.get(accepted) > 33_000.0, "{}", seen.0);
    Node::ready(&edge, "n1");
    edge.assert_alive();
}

#[test]
fn one_node_connection_too_many_is_closed_and_another_may_come_when_one_has_left() {
    const PLACES: usize = 2 + 16; // two per configured node, and those that will be refused
    let edge = Edge::start(&Setup::with(&format!("shards: 1\n{CATALOG}")));
    let connect = || {
        let mut node = Node::connect(&edge, "n1");
        let stream = &mut node.stream;
        while stream.conn.is_handshaking() {
            stream
                .conn
                .complete_io(&mut stream.sock)
                .expect("a handshake");
        }
        node
    };
    let mut nodes: Vec<Node> = (0..PLACES).map(|_| connect()).collect();
    edge.wait_metrics("the sessions", |seen| {
        seen.get("iop_edge_sessions") == PLACES as f64
    });
    connect().expect_closed();
    assert_eq!(edge.metrics().reason("sessions_full"), 1.0);
    nodes.pop();
    edge.wait_metrics("the place", |seen| {
        seen.get("iop_edge_sessions") < PLACES as f64
    });
    let mut node = Node::ready(&edge, "n1");
    let mut client = Client::connect(&edge);
    client.send(&chat("m1", true));
    node.tunnel();
}

// ── receive buffers ───────────────────────────────────────────────────────────────────────────────

/// More clients speak at once than a shard has receive buffers: each is heard all the same. (Whether
/// the kernel runs out of them on the way depends on how many receives it completes in one go.)
/// Proves [D-44].
#[test]
fn more_clients_speak_at_once_than_there_are_receive_buffers() {
    let count = 700 * shards() as usize;
    raise_descriptors();
    let edge = Edge::start(&Setup::default());
    let mut clients: Vec<Client> = (0..count).map(|_| Client::connect(&edge)).collect();
    edge.wait_metrics("the clients", |seen| {
        seen.get("iop_edge_clients") == count as f64
    });
    let body = |n: usize| format!("{{\"model\":\"none-{n}\",\"x\":\"{}\"}}", "x".repeat(9_000));
    let pid = edge.pid().to_string();
    run("kill", &["-STOP", &pid]);
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(&post("/v1/chat/completions", &body(n)));
    }
    run("kill", &["-CONT", &pid]);
    for client in &mut clients {
        let head = client.head().expect("an answer");
        assert_eq!((head.status, client.body(&head).1), (404, true));
    }
    let seen = edge.metrics();
    assert_eq!(seen.get("iop_edge_requests_total"), count as f64);
    clients.iter_mut().take(50).for_each(healthy);
    drop(clients);
    edge.wait_idle();
}

/// Everybody asks while the Edge stands still, so that all of it completes in one go: each client's
/// number and its run.
fn all_ask_at_once(edge: &Edge, node: &mut Node, clients: &mut [Client]) -> Vec<(usize, String)> {
    let padding = "x".repeat(60_000);
    let ask = |n: usize| {
        let body = format!("{{\"model\":\"m1\",\"n\":{n},\"stream\":true,\"x\":\"{padding}\"}}");
        post("/v1/chat/completions", &body)
    };
    let pid = edge.pid().to_string();
    run("kill", &["-STOP", &pid]);
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(&ask(n));
    }
    run("kill", &["-CONT", &pid]);
    let mut runs = Vec::new();
    for _ in 0..clients.len() {
        let request = node.tunnel();
        let body = String::from_utf8(request.body.to_vec()).expect("JSON");
        assert!(body.ends_with(&format!("{padding}\"}}")), "a whole body");
        let (_, n) = body.split_once("\"n\":").expect("its number");
        let n: usize = n[..n.find(',').expect("more")].parse().expect("a number");
        node.frame(&TunnelFrameOut::response_start(
            &request.run_id,
            1,
            200,
            EVENTS,
        ));
        runs.push((n, request.run_id));
    }
    runs
}

/// With two buffers of each kind a shard runs out of them whenever two sockets speak at once: reads
/// wait a turn, and every stream and body arrives whole, none written over by a later read.
/// Proves [P-78].
#[test]
fn streams_live_on_when_receive_buffers_run_out() {
    const STREAMS: usize = 24;
    const FRAMES: u64 = 200;
    let limits = "limits:\n  receive_buffers: 2\n";
    let edge = Edge::start(&Setup::with(&format!("{CATALOG}{limits}")));
    let exhausted = |seen: &Metrics| seen.get("iop_edge_receive_exhausted_total");
    let mut node = Node::ready(&edge, "n1");
    let mut clients: Vec<Client> = (0..STREAMS).map(|_| Client::connect(&edge)).collect();
    edge.wait_metrics("the clients", |seen| {
        seen.get("iop_edge_clients") == STREAMS as f64
    });
    let runs = all_ask_at_once(&edge, &mut node, &mut clients);
    let bodies = exhausted(&edge.metrics());
    assert!(
        bodies > 0.0,
        "clients had more to say than there were buffers"
    );
    let event = |n: usize, frame: u64| format!("data: {n}-{frame} {}\n\n", "y".repeat(4_000));
    std::thread::scope(|scope| {
        let _guard = edge.guard();
        let readers: Vec<_> = clients
            .iter_mut()
            .enumerate()
            .map(|(n, client)| {
                scope.spawn(move || {
                    let head = client.head().expect("an answer");
                    let (body, whole) = client.body(&head);
                    let expected: String = (2..2 + FRAMES).map(|frame| event(n, frame)).collect();
                    assert!(whole && body == expected.as_bytes(), "stream {n}");
                })
            })
            .collect();
        for frame in 2..2 + FRAMES {
            for (n, id) in &runs {
                let bytes = event(*n, frame);
                node.frame(&TunnelFrameOut::body(id, frame, bytes.as_bytes()));
            }
        }
        for (_, id) in &runs {
            node.frame(&TunnelFrameOut::end(id, 2 + FRAMES));
        }
        for reader in readers {
            reader.join().expect("a whole stream");
        }
    });
    assert!(exhausted(&edge.metrics()) > bodies, "and so had the node");
    drop((clients, node));
    edge.wait_idle();
}

// ── body pool ─────────────────────────────────────────────────────────────────────────────────────

const CHUNKED: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\n\
                       transfer-encoding: chunked\r\n\r\n";

fn small_bodies() -> Setup {
    let limits = "limits:\n  body_bytes_max: 960 KiB\n  body_pool_bytes: 1 MiB\n";
    Setup::with(&format!("shards: 1\n{CATALOG}{limits}"))
}

fn too_full(client: &mut Client) {
    let head = client.head().expect("an answer");
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some() && head.header("connection") == Some("close"));
    assert!(client.body(&head).1);
}

/// Proves [D-45], [P-55].
#[test]
fn a_body_that_does_not_fit_the_pool_is_refused_before_it_is_sent() {
    let edge = Edge::start(&small_bodies());
    let body = format!(
        "{{\"model\":\"none\",\"x\":\"{}\"}}",
        "x".repeat(900 * 1024)
    );
    let whole = post("/v1/chat/completions", &body);
    let (most, last) = whole.split_at(whole.len() - 10);
    let mut first = Client::connect(&edge);
    first.send(most);
    edge.wait_metrics("the body", |seen| {
        seen.get("iop_edge_pool_used_bytes{pool=\"body\"}") > 800.0 * 1024.0
    });
    let mut second = Client::connect(&edge);
    let (head, _) = whole.split_once("\r\n\r\n").expect("a head");
    second.send(&format!("{head}\r\nexpect: 100-continue\r\n\r\n"));
    too_full(&mut second); // and no 100 before it
    first.send(last);
    let head = first.head().expect("an answer");
    assert_eq!((head.status, first.body(&head).1), (404, true));
    // Its room is free again.
    let mut third = Client::connect(&edge);
    assert_eq!(third.ask(&whole).0.status, 404);
    drop((first, second, third));
    let seen = edge.wait_idle();
    assert_eq!(seen.reason("body_pool_full"), 1.0);
}

/// Proves [D-45].
#[test]
fn of_chunked_bodies_the_youngest_gives_way() {
    let edge = Edge::start(&small_bodies());
    let chunk = |kib: usize| format!("{:x}\r\n{}\r\n", kib * 1024, "x".repeat(kib * 1024));
    let start = "1b\r\n{\"model\":\"none\",\"padding\":\"\r\n";
    let begin = |count: f64| {
        let mut client = Client::connect(&edge);
        client.send(&format!("{CHUNKED}{start}"));
        edge.wait_metrics("the request", |seen| {
            seen.get("iop_edge_requests_total") == count
        });
        client
    };
    let mut oldest = begin(1.0);
    let mut youngest = begin(2.0);
    oldest.send(&chunk(400));
    youngest.send(&chunk(200));
    edge.wait_metrics("both", |seen| {
        seen.get("iop_edge_pool_used_bytes{pool=\"body\"}") >= 600.0 * 1024.0
    });
    oldest.send(&chunk(500));
    too_full(&mut youngest);
    oldest.send("2\r\n\"}\r\n0\r\n\r\n");
    let head = oldest.head().expect("an answer");
    assert_eq!((head.status, oldest.body(&head).1), (404, true));
    drop((oldest, youngest));
    let seen = edge.wait_idle();
    assert_eq!(seen.reason("body_pool_full"), 1.0);
}

/// A chunked body alone gets all of the pool, down to its last block.
/// Proves [P-55].
#[test]
fn a_chunked_body_as_long_as_the_limit_fits_a_pool_that_holds_one() {
    const LIMIT: usize = 960 * 1024;
    let edge = Edge::start(&small_bodies());
    let open = "{\"model\":\"none\",\"padding\":\"";
    let mut client = Client::connect(&edge);
    for (length, status) in [(LIMIT, 404), (LIMIT + 1, 413)] {
        let body = format!("{open}{}\"}}", "x".repeat(length - open.len() - 2));
        let chunks = body.as_bytes().chunks(10_000);
        let chunks = chunks.map(|part| {
            let part = std::str::from_utf8(part).expect("ASCII");
            format!("{:x}\r\n{part}\r\n", part.len())
        });
        let chunks: String = chunks.collect();
        client.send(&format!("{CHUNKED}{chunks}0\r\n\r\n"));
        let head = client.head().expect("an answer");
        assert_eq!((head.status, client.body(&head).1), (status, true));
    }
    client.expect_closed();
}

// ── at start ──────────────────────────────────────────────────────────────────────────────────────

/// What an Edge says that may not have as much as it needs: its exit code and its last line.
fn start_limited(limit: &str) -> (Option<i32>, String) {
    let directory = Directory::new();
    let [nodes, clients, admin] = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
    let config = directory.write(
        "edge.yaml",
        &format!(
            "listeners:\n  nodes: \"{nodes}\"\n  clients: \"{clients}\"\n  admin: \"{admin}\"\n  \
             insecure_plaintext_nodes: true\n{CATALOG}"
        ),
    );
    let program = iop().get_program().to_owned();
    let mut child = Command::new("prlimit")
        .arg(limit)
        .arg(program)
        .args(["edge", "--config"])
        .arg(config)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("prlimit runs");
    let began = Instant::now();
    while child.try_wait().expect("a child of ours").is_none() {
        if began.elapsed() > DEADLINE {
            let _ended = child.kill();
            panic!("an Edge with {limit} runs");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let done = child.wait_with_output().expect("it ended");
    let said = String::from_utf8(done.stderr).expect("text");
    (done.status.code(), said)
}

#[test]
fn an_edge_that_may_not_have_what_it_needs_says_what_to_raise() {
    for (limit, remedy) in [
        ("--memlock=4096:4096", "RLIMIT_MEMLOCK"),
        ("--nofile=12:12", "RLIMIT_NOFILE"),
        ("--nofile=20:20", "RLIMIT_NOFILE"),
    ] {
        let (code, said) = start_limited(limit);
        let last = said.lines().last().unwrap_or_default();
        assert!(
            code == Some(1) && last.contains(remedy),
            "{limit}: {code:?} {said}"
        );
    }
}
