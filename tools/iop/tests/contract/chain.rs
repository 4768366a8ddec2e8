//! The whole way: a client, the Edge, a real node agent as a process of its own, a provider's socket.
//! What the provider saw is what counts.
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::kit::{Kill, World, answer};
use crate::support::{Client, DEADLINE, Setup, chat, free_port, iop, post};

/// A real node agent beside the Edge, at `trace`; its log is `node.log`.
pub(crate) struct Agent(Child);

impl Agent {
    /// Node `n1`, with more lines in its configuration.
    pub(crate) fn start(world: &World, lines: &str) -> Self {
        let directory = world.edge.directory.path();
        let text = format!(
            "node_id: n1\nedge: {{address: \"{}\", trust_domain: iop.test, name: edge-1}}\n\
             pki: {{ca: pki/ca.crt, certificate: pki/n1.crt, key: pki/n1.key}}\n{lines}",
            world.edge.nodes
        );
        let config = world.edge.directory.write("node.yaml", &text);
        let log = fs::File::create(directory.join("node.log")).expect("a file");
        let child = iop()
            .args(["node", "--config"])
            .arg(config)
            .env("RUST_LOG", "trace")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Self(child.expect("iop node starts"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _status = self.0.wait();
    }
}

/// Node `n1` with a tunnel's provider behind `only1` and a native one behind `run`.
fn catalog(port: u16, capacity: u32) -> String {
    format!(
        "nodes:\n  - id: n1\n    adapters:\n      \
         - {{name: a1, type: openai_compat, base_url: \"http://127.0.0.1:{port}\"}}\n      \
         - {{name: a2, type: ollama, base_url: \"http://127.0.0.1:{port}\"}}\n    providers:\n      \
         - {{id: p1, adapter: a1, target: t1, capacity: {capacity}}}\n      \
         - {{id: p2, adapter: a2, target: t2, capacity: 1}}\nmodels:\n  \
         - {{name: only1, providers: [p1]}}\n  - {{name: run, providers: [p2]}}\n"
    )
}

/// The provider, and an Edge that knows of it; nobody has dialled yet.
fn world(capacity: u32) -> (TcpListener, World) {
    let port = free_port();
    let provider = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
    provider.set_nonblocking(true).expect("a TCP socket");
    (
        provider,
        World::with(&Setup::with(&catalog(port, capacity))),
    )
}

fn connected(world: &World) -> Agent {
    let agent = Agent::start(world, "");
    world.wait("iop_edge_node_activations_total", 1);
    agent
}

/// One call as the provider sees it.
struct Call {
    stream: TcpStream,
    head: String,
}

impl Call {
    /// The next call, its body read.
    fn next(provider: &TcpListener) -> Self {
        let began = Instant::now();
        let stream = loop {
            match provider.accept() {
                Ok((stream, _)) => break stream,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            assert!(began.elapsed() < DEADLINE, "the provider was not called");
            std::thread::park_timeout(Duration::from_millis(1));
        };
        stream.set_nonblocking(false).expect("a TCP socket");
        stream.set_nodelay(true).expect("a TCP socket");
        let deadline = Some(DEADLINE);
        stream.set_read_timeout(deadline).expect("a TCP socket");
        let mut call = Self {
            stream,
            head: String::new(),
        };
        let mut byte = [0; 1];
        while !call.head.ends_with("\r\n\r\n") {
            call.stream.read_exact(&mut byte).expect("a head");
            call.head.push(char::from(byte[0]));
        }
        let lower = call.head.to_ascii_lowercase();
        let length = lower.split("content-length: ").nth(1);
        let length = length.and_then(|rest| rest.lines().next()?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        call.stream.read_exact(&mut body).expect("a body");
        call
    }

    /// A whole answer; the connection is not used again.
    fn answer(mut self, body: &str) {
        let length = body.len();
        self.write(&format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        ));
    }

    fn write(&mut self, text: &str) {
        self.stream
            .write_all(text.as_bytes())
            .expect("the node reads");
    }

    fn chunk(&mut self, text: &str) {
        self.write(&format!("{:x}\r\n{text}\r\n", text.len()));
    }

    /// The node closes the connection, or resets it.
    fn gone(mut self) {
        match self.stream.read(&mut [0; 16]) {
            Ok(0) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            Ok(_) => panic!("bytes instead of a close"),
        }
    }
}

/// The one slot is free, and whoever asks next is answered.
fn serves(world: &World, provider: &TcpListener) {
    let mut client = world.asks(&chat("only1", false));
    Call::next(provider).answer("{\"still\":\"here\"}");
    assert_eq!(answer(&mut client).1, b"{\"still\":\"here\"}");
}

/// Before any byte of an answer, in its middle, and in a silence after it; whether the client asked for
/// a stream or not. Proves [P-01], [P-02], [P-05], [P-19].
#[test]
fn p01_a_client_that_leaves_ends_its_call_at_the_provider_and_frees_its_slot() {
    let (provider, world) = world(1);
    let agent = connected(&world);
    let phases = [(false, 0), (true, 0), (false, 1), (true, 5)];
    for (stream, pieces) in phases {
        let mut quickest = DEADLINE;
        for kill in Kill::ALL {
            let mut client = world.asks(&chat("only1", stream));
            let mut call = Call::next(&provider);
            if pieces > 0 {
                call.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
                assert_eq!(client.head().expect("an answer").status, 200);
            }
            for _ in 0..pieces {
                call.chunk("data: 1\n\n");
                assert_eq!(client.at_least(9), b"data: 1\n\n");
            }
            world.wait_held(1);
            let left = Instant::now();
            kill.client(client);
            call.gone();
            quickest = quickest.min(left.elapsed());
            world.wait_held(0);
            serves(&world, &provider);
        }
        // The best says what the way costs; the others, how busy this machine is.
        assert!(
            quickest < Duration::from_millis(250),
            "stream {stream}, {pieces} pieces: {quickest:?}"
        );
    }
    drop(agent);
    let seen = world.rest();
    let by_terminal = "iop_edge_leases_returned_total{by=\"terminal\"}";
    assert_eq!(seen.get(by_terminal), 24.0);
}

/// A client that takes compressed answers gets the provider's own bytes, and in a silence none at all:
/// neither is an answer compressed on its way nor kept alive with comments.
/// Proves [P-36], [P-40], [D-19].
#[test]
fn p36_an_event_stream_is_the_providers_bytes_and_no_others() {
    let (provider, world) = world(1);
    let _agent = connected(&world);
    let asked =
        chat("only1", true).replacen("\r\n\r\n", "\r\naccept-encoding: gzip, br, zstd\r\n\r\n", 1);
    let mut client = world.asks(&asked);
    let mut call = Call::next(&provider);
    call.write(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    );
    let head = client.head().expect("the head, before any event");
    assert_eq!(head.header("content-encoding"), None);
    let event = "data: {\"n\":1}\n\n";
    for _ in 0..3 {
        call.chunk(event);
        assert_eq!(client.at_least(event.len()), event.as_bytes());
        let quiet = Some(Duration::from_millis(400));
        client.stream.set_read_timeout(quiet).expect("a TCP socket");
        let silence = client
            .stream
            .read(&mut [0; 16])
            .map_err(|error| error.kind());
        assert_eq!(
            silence,
            Err(ErrorKind::WouldBlock),
            "nothing but the provider's"
        );
        let deadline = Some(DEADLINE);
        client
            .stream
            .set_read_timeout(deadline)
            .expect("a TCP socket");
    }
    call.write("0\r\n\r\n");
    assert_eq!(client.body(&head), (Vec::new(), true));
}

/// What a process has open: local port, remote port, whether it listens.
fn sockets(pid: u32) -> Vec<(u16, u16, bool)> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let inodes: Vec<String> = links
        .filter_map(|link| fs::read_link(link.ok()?.path()).ok())
        .filter_map(|link| {
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let words: Vec<_> = line.split_whitespace().collect();
            let port = |word: &str| {
                let (_, port) = word.rsplit_once(':').expect("an address");
                u16::from_str_radix(port, 16).expect("a port")
            };
            if inodes.iter().any(|inode| inode == words[9]) {
                found.push((port(words[1]), port(words[2]), words[3] == "0A"));
            }
        }
    }
    found
}

/// The Edge has dialled nobody: whatever it has open, it accepted.
fn assert_only_accepts(world: &World) {
    let edge = &world.edge;
    let own = [edge.nodes.port(), edge.clients.port(), edge.admin.port()];
    let open = sockets(edge.pid());
    assert!(
        open.iter().filter(|socket| socket.2).count() >= 3,
        "{open:?}"
    );
    assert!(
        open.iter().all(|socket| own.contains(&socket.0)),
        "{open:?}"
    );
}

/// Every operation, a run, a cancel and a refresh go over the one connection that the node dialled; the
/// provider hears from the node alone, and nobody could reach a node.
/// Proves, [R-003], [R-346], [P-74].
#[test]
fn r003_everything_goes_over_the_one_connection_that_the_node_dialled() {
    let (provider, world) = world(2);
    assert_only_accepts(&world);
    assert!(provider.accept().is_err(), "nobody called it");
    let agent = connected(&world);
    let node = agent.0.id();
    let port = provider.local_addr().expect("bound").port();
    let audit = |call: &Call, client: &Client| {
        assert_only_accepts(&world);
        let open = sockets(node);
        let edge = world.edge.nodes.port();
        assert_eq!(
            open.iter().filter(|socket| socket.1 == edge).count(),
            1,
            "{open:?}"
        );
        assert!(
            open.iter().all(|socket| !socket.2),
            "a node listens: {open:?}"
        );
        let caller = call.stream.peer_addr().expect("connected").port();
        assert!(
            open.contains(&(caller, port, false)),
            "{caller} of {open:?}"
        );
        let client = client.stream.local_addr().expect("connected").port();
        assert!(open.iter().all(|socket| socket.1 != client));
    };
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ] {
        let mut client = world.asks(&post(path, "{\"model\":\"only1\"}"));
        let call = Call::next(&provider);
        assert!(
            call.head.starts_with(&format!("POST {path} ")),
            "{}",
            call.head
        );
        audit(&call, &client);
        call.answer("{}");
        assert_eq!(answer(&mut client).0.status, 200);
    }
    let mut client = world.asks(&chat("run", false));
    let call = Call::next(&provider);
    assert!(call.head.starts_with("POST /api/chat "), "{}", call.head);
    audit(&call, &client);
    call.answer("{\"message\":{\"content\":\"hi\"},\"done\":true}\n");
    assert_eq!(answer(&mut client).0.status, 200);
    let client = world.asks(&chat("only1", true));
    let call = Call::next(&provider);
    world.reload(&catalog(port, 3));
    world.wait("iop_edge_config_refreshes_total{result=\"applied\"}", 1);
    audit(&call, &client);
    Kill::Fin.client(client);
    call.gone();
    serves(&world, &provider);
}
