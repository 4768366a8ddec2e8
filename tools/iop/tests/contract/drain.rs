//! Nodes that are taken out and certificates that end or change, while everything else goes on.
use std::fs;
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use rcgen::ExtendedKeyUsagePurpose;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;

use crate::identity::{expect_refused, sign};
use crate::kit::{Run, World, catalog, expect_nothing, noise};
use crate::support::{DEADLINE, Node, chat, node_tls};

/// A stream goes on through a drain of its node, and its end is the connection's. Proves [D-05].
#[test]
fn d05_a_drained_node_finishes_what_it_has_and_takes_nothing_new() {
    let world = World::new(&catalog([4, 4], ""));
    let mut one = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut one);
    run.sse(&mut one);
    for node in ["n2", "n9"] {
        let (done, said) = world.edge.order(&["drain-node", node]);
        assert!(!done && !said.is_empty(), "{said}");
    }
    let (done, said) = world.edge.order(&["drain-node", "n1"]);
    assert!(done && said.contains("1 requests"), "{said}");
    let status = world.edge.status();
    assert_eq!(status["edge"]["draining_nodes"], serde_json::json!(["n1"]));

    let mut waits = world.asks(&chat("m1", false));
    world.wait_queued(1);
    expect_nothing(&mut one);
    let mut two = world.node("n2");
    Run::asked(&mut two).answers(&mut two, &mut waits);

    let body = noise(5_000, 7);
    run.body(&mut one, &body);
    run.end(&mut one);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (body, true), "what ran has finished");
    one.expect_closed();
    world.saw("node_drained", 1);
    let mut back = world.node("n1");
    world.serves(&mut back, "only1");
    drop((two, back, client, waits));
    world.rest();
}

/// A file of the world's authority.
fn file(world: &World, name: &str) -> String {
    let path = world.edge.directory.path().join("pki").join(name);
    fs::read_to_string(path).expect("made before")
}

/// Puts a file in the place of another, at once.
fn replace(world: &World, name: &str, text: &str) {
    let path = world.edge.directory.path().join("pki").join(name);
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, text).expect("a file of the test's");
    fs::rename(&fresh, &path).expect("a file of the test's");
}

/// At its certificate's end a node takes nothing new; its stream finishes, then the connection ends.
/// Proves [D-05], [S-66].
#[test]
fn s66_a_certificate_that_ends_drains_its_node() {
    let world = World::new(&catalog([4, 4], ""));
    let until = OffsetDateTime::now_utc() + time::Duration::seconds(6);
    sign(&world, "n1", &["spiffe://iop.test/node/n1"], |params| {
        params.not_after = until
    });
    let mut one = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut one);
    run.sse(&mut one);
    world.wait("iop_edge_node_drains_total", 1);
    assert!(OffsetDateTime::now_utc() > until, "not before its end");
    let waits = world.asks(&chat("only1", false));
    world.wait_queued(1);
    expect_nothing(&mut one);
    run.body(&mut one, b"data: 1\n\n");
    run.end(&mut one);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (b"data: 1\n\n".to_vec(), true));
    one.expect_closed();
    expect_refused(&world, node_tls(&world.edge.directory, "n1")); // nor may it come back
    drop((waits, client));
    world.rest();
}

/// The serial-bearing bytes of the certificate that the node listener shows.
fn shown(world: &World) -> Vec<u8> {
    let mut node = Node::connect(&world.edge, "n2");
    node.send(&crate::kit::register("n2"));
    node.receive();
    let chain = node.stream.conn.peer_certificates().expect("a handshake");
    chain[0].to_vec()
}

fn wait_shown(world: &World, certificate: &str) {
    let wanted = CertificateDer::from_pem_slice(certificate.as_bytes()).expect("PEM");
    let began = Instant::now();
    while shown(world) != wanted.to_vec() {
        assert!(
            began.elapsed() < DEADLINE,
            "the new certificate is not shown"
        );
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

/// Certificate, key and trust bundle are read again when their files change; a pair that is torn keeps
/// the old one, and so does a reload. Proves [D-05].
#[test]
fn d05_changed_certificates_are_taken_and_torn_ones_are_not() {
    let world = World::new(&catalog([4, 4], ""));
    let before = shown(&world);
    let mut one = world.node("n1");
    sign(
        &world,
        "new",
        &["spiffe://iop.test/edge/edge-1"],
        |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        },
    );
    let (certificate, key) = (file(&world, "new.crt"), file(&world, "new.key"));
    replace(&world, "edge-1.crt", &certificate);
    let (done, said) = world.edge.order(&["reload"]);
    assert!(!done && said.contains("edge-1.key"), "{said}");
    assert_eq!(shown(&world), before, "torn: the old pair stays");
    replace(&world, "edge-1.key", &key);
    wait_shown(&world, &certificate); // found by itself, without any order

    // Another authority: its nodes are let in, who is connected stays.
    let other = World::new(&catalog([1, 1], ""));
    for name in ["n2.crt", "n2.key"] {
        replace(&world, name, &file(&other, name));
    }
    expect_refused(&world, node_tls(&world.edge.directory, "n2"));
    let both = format!("{}{}", file(&world, "ca.crt"), file(&other, "ca.crt"));
    replace(&world, "ca.crt", &both);
    let (done, said) = world.edge.order(&["reload"]);
    assert!(done, "{said}");
    let mut two = world.node("n2");
    world.serves(&mut two, "only2");
    world.serves(&mut one, "only1");
    drop((one, two));
    world.rest();
}

/// The certificate of HTTPS for clients changes under those who are connected. Proves [P-73].
#[test]
fn p73_the_clients_certificate_changes_without_a_restart() {
    let tls = "  clients_tls:\n    certificate: pki/web.crt\n    key: pki/web.key\n";
    let directory = crate::support::Directory::new();
    crate::support::make_pki(&directory, &["web"]);
    let web = |name: &str| {
        fs::read_to_string(directory.path().join("pki").join(name)).expect("made above")
    };
    let (certificate, key) = (web("web.crt"), web("web.key"));
    let edge = crate::support::Edge::start(&crate::support::Setup {
        nodes: vec!["n1", "web"],
        listeners: tls,
        ..crate::support::Setup::default()
    });
    let connect = || {
        let stream = std::net::TcpStream::connect(edge.clients).expect("the Edge listens");
        stream
            .set_read_timeout(Some(DEADLINE))
            .expect("a TCP socket");
        let name = rustls::pki_types::ServerName::try_from("edge").expect("a name");
        let config = crate::support::client_tls();
        let tls = rustls::ClientConnection::new(config, name).expect("TLS");
        let mut tls = rustls::StreamOwned::new(tls, stream);
        tls.conn.complete_io(&mut tls.sock).expect("a handshake");
        let presented = tls.conn.peer_certificates().expect("a handshake")[0].to_vec();
        (tls, presented)
    };
    let wanted = CertificateDer::from_pem_slice(certificate.as_bytes())
        .expect("PEM")
        .to_vec();
    let (mut before, presented) = connect();
    assert_ne!(presented, wanted);
    edge.directory.write("pki/web.key", &key);
    edge.directory.write("pki/web.crt", &certificate);
    let (done, said) = edge.order(&["reload"]);
    assert!(
        done && said.contains("certificates were read again"),
        "{said}"
    );
    let (mut after, presented) = connect();
    assert_eq!(presented, wanted);
    for tls in [&mut before, &mut after] {
        tls.write_all(b"GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n")
            .expect("an open connection");
        let mut status = [0; 12];
        tls.read_exact(&mut status).expect("an answer");
        assert_eq!(&status, b"HTTP/1.1 200");
    }
}

/// Proves [D-07].
#[test]
fn d07_the_client_listener_is_shown_closed_while_an_edge_drains() {
    let world = World::new(&catalog([1, 1], "timeouts:\n  drain_ms: 15000\n"));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("only1", true));
    let mut run = Run::asked(&mut node);
    run.sse(&mut node);
    let open = |listener: &str| format!("iop_edge_listener_open{{listener=\"{listener}\"}}");
    world.wait(&open("clients"), 1);
    world.edge.terminate();
    let seen = world.wait(&open("clients"), 0);
    assert_eq!(seen.get(&open("nodes")), 1.0);
    run.end(&mut node);
    let head = client.head().expect("an answer");
    assert_eq!(client.body(&head), (Vec::new(), true));
    let World { mut edge, .. } = world;
    assert!(edge.wait_exit().success());
}
