//! Who may speak at all: certificates, roles, names, and the wrong protocol on either port.
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::Arc;

use rustls::ClientConfig;

use crate::kit::{World, catalog, register};
use crate::support::{DEADLINE, Directory, Node, Setup, envelope_with, iop, make_pki, node_tls};

/// TLS of a peer that presents nothing, or of one with other ALPN names.
fn altered(
    config: &Arc<ClientConfig>,
    change: impl FnOnce(&mut ClientConfig),
) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(config);
    change(&mut config);
    Arc::new(config)
}

fn without_certificate(config: &Arc<ClientConfig>) -> Arc<ClientConfig> {
    altered(config, |config| {
        config.client_auth_cert_resolver = Arc::new(Nobody)
    })
}

#[derive(Debug)]
struct Nobody;

impl rustls::client::ResolvesClientCert for Nobody {
    fn resolve(
        &self,
        _hints: &[&[u8]],
        _schemes: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// Dials, writes a RegisterRequest at once, and reads until the end: not one byte for the application.
fn expect_refused(world: &World, config: Arc<ClientConfig>) {
    let mut node = Node::connect_with(&world.edge, config);
    let _refused_already = node.try_send_bytes(&envelope_with(&register("n1"), 1));
    let mut bytes = [0; 1024];
    match node.stream.read(&mut bytes) {
        Ok(0) | Err(_) => {}
        Ok(length) => panic!("the Edge answered {length} bytes"),
    }
}

/// Writes `bytes` in the clear and reads what comes back until the end.
fn speak(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("the Edge listens");
    stream
        .set_read_timeout(Some(DEADLINE))
        .expect("a TCP socket");
    stream.write_all(bytes).expect("the Edge reads");
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    answer
}

fn more_pki(world: &World, arguments: &[&str]) {
    let status = iop()
        .args(arguments)
        .arg("--dir")
        .arg(world.edge.directory.path().join("pki"))
        .stdout(Stdio::null())
        .status();
    assert!(status.expect("iop runs").success());
}

/// Proves, [R-011], [R-012], [R-013], [R-014].
#[test]
fn r011_peers_without_the_right_certificate_get_nothing_and_disturb_nobody() {
    let world = World::new(&catalog([4, 4], ""));
    let mut owner = world.node("n1");
    let before = world
        .edge
        .metrics()
        .get("iop_edge_node_registrations_total");
    assert_eq!(before, 1.0, "the right certificate is let in");

    more_pki(&world, &["pki", "node", "n-evil"]);
    let elsewhere = Directory::new();
    make_pki(&elsewhere, &["n1"]);
    let good = node_tls(&world.edge.directory, "n1");

    expect_refused(&world, without_certificate(&good));
    expect_refused(&world, node_tls(&elsewhere, "n1"));
    expect_refused(&world, node_tls(&world.edge.directory, "edge-1"));
    expect_refused(&world, node_tls(&world.edge.directory, "n-evil"));
    expect_refused(
        &world,
        altered(&good, |config| config.alpn_protocols.clear()),
    );
    expect_refused(
        &world,
        altered(&good, |config| {
            config.alpn_protocols = vec![b"iop-edge-node/2".to_vec()];
        }),
    );
    world.saw("identity_missing", 1);
    world.saw("identity_wrong_name", 1);
    world.saw("alpn_mismatch", 2);

    let after = world.edge.metrics();
    assert_eq!(
        after.get("iop_edge_node_registrations_total"),
        before,
        "nobody registered"
    );
    assert_eq!(
        after.get("iop_edge_sessions"),
        1.0,
        "no shard heard of them"
    );
    assert_eq!(after.get("iop_edge_node_fences_total"), 0.0);
    world.serves(&mut owner, "m1");
    drop(owner);
    world.rest();
}

#[test]
fn plaintext_on_the_tls_port_and_tls_on_the_plaintext_port_are_told_so() {
    let world = World::new(&catalog([4, 4], ""));
    let mut owner = world.node("n1");

    let alert = speak(world.edge.nodes, b"GET / HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(alert.first(), Some(&21), "a TLS alert: {alert:?}");
    world.saw("plaintext_on_tls_port", 1);
    let alert = speak(world.edge.nodes, b"IOPEN/1\n");
    assert_eq!(alert.first(), Some(&21), "a TLS alert: {alert:?}");
    world.saw("plaintext_on_tls_port", 2);

    let hello = client_hello(&world);
    let answer = speak(world.edge.clients, &hello);
    assert!(
        answer.starts_with(b"HTTP/1.1 400 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    world.saw("head_malformed", 1);

    world.serves(&mut owner, "m1");
    drop(owner);
    world.rest();
}

#[test]
fn tls_to_an_edge_that_takes_plaintext_nodes_is_refused_and_the_preface_is_accepted() {
    let setup = Setup {
        listeners: "  insecure_plaintext_nodes: true\n",
        nodes: vec!["n1", "n2"],
        ..Setup::with(&catalog([4, 4], ""))
    };
    let world = World::with(&setup);
    let hello = client_hello(&world);
    assert_eq!(speak(world.edge.nodes, &hello), b"IOPEN/1\n");
    world.saw("tls_on_plaintext_port", 1);
    assert_eq!(speak(world.edge.nodes, b"IOPEN/2\n"), b"IOPEN/1\n");
    world.saw("alpn_mismatch", 1);

    let mut stream = TcpStream::connect(world.edge.nodes).expect("the Edge listens");
    stream
        .set_read_timeout(Some(DEADLINE))
        .expect("a TCP socket");
    stream.write_all(b"IOPEN/1\n").expect("the Edge reads");
    stream
        .write_all(&envelope_with(&register("n1"), 1))
        .expect("the Edge reads");
    let mut preface = [0; 8];
    stream.read_exact(&mut preface).expect("the Edge's preface");
    assert_eq!(&preface, b"IOPEN/1\n");
    let mut prefix = [0; 4];
    stream
        .read_exact(&mut prefix)
        .expect("an answer to the registration");
    let mut answer = vec![0; u32::from_be_bytes(prefix) as usize];
    stream.read_exact(&mut answer).expect("a whole envelope");
    let text = String::from_utf8_lossy(&answer);
    assert!(
        text.contains("iop.RegisterResponse") && text.contains("a1"),
        "{text}"
    );
    drop(stream);
    world.rest();
}

/// The first flight of a TLS client.
fn client_hello(world: &World) -> Vec<u8> {
    let config = node_tls(&world.edge.directory, "n1");
    let name = rustls::pki_types::ServerName::try_from("edge").expect("a name");
    let mut client = rustls::ClientConnection::new(config, name).expect("TLS");
    let mut hello = Vec::new();
    client.write_tls(&mut hello).expect("into memory");
    hello
}
