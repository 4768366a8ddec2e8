//! Who may speak at all: certificates, roles, names, and the wrong protocol on either port.
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::ClientConfig;

use crate::kit::{
    Run, World, catalog, expect_accepted, expect_error_event, expect_nothing, register,
};
use crate::support::{DEADLINE, Directory, Node, Setup, chat, envelope_with, make_pki, node_tls};

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

/// Dials, writes a RegisterRequest at once, and reads until the end: not one byte for the
/// application.
pub(crate) fn expect_refused(world: &World, config: Arc<ClientConfig>) {
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

/// Has the world's authority sign a certificate for client use that names `uris`.
pub(crate) fn sign(
    world: &World,
    name: &str,
    uris: &[&str],
    change: impl FnOnce(&mut CertificateParams),
) {
    let pki = world.edge.directory.path().join("pki");
    let read = |file: &str| fs::read_to_string(pki.join(file)).expect("a file of the authority");
    let key = KeyPair::from_pem(&read("ca.key")).expect("the authority's key");
    let issuer = Issuer::from_ca_cert_pem(&read("ca.crt"), key).expect("the authority");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.subject_alt_names = uris
        .iter()
        .map(|&uri| SanType::URI(uri.try_into().expect("ASCII")))
        .collect();
    change(&mut params);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    fs::write(pki.join(format!("{name}.crt")), certificate.pem()).expect("a file");
    fs::write(pki.join(format!("{name}.key")), key.serialize_pem()).expect("a file");
}

/// Certificates by the names they carry, why each is refused, how often that was by then.
#[rustfmt::skip]
const WRONG_NAMES: [(&[&str], &str, u32); 6] = [
    (&["spiffe://iop.test/edge/n1"], "identity_wrong_role", 1),
    (&["spiffe://iop.test/node/n-evil"], "identity_wrong_name", 1),
    (&["spiffe://iop.test/node/N1"], "identity_wrong_name", 2),
    (&["spiffe://other.test/node/n1"], "identity_invalid", 2),
    (&["spiffe://iop.test/node/n1", "spiffe://iop.test/node/n2"], "identity_invalid", 3),
    (&[], "identity_missing", 2),
];

fn expect_signed_refused(world: &World) {
    let refused = |reason: &str, count: u32| {
        expect_refused(world, node_tls(&world.edge.directory, "bad"));
        world.saw(reason, count);
    };
    for (uris, reason, count) in WRONG_NAMES {
        sign(world, "bad", uris, |_| {});
        refused(reason, count);
    }
    let n1 = ["spiffe://iop.test/node/n1"];
    sign(world, "bad", &n1, |params| params.key_usages.clear());
    refused("identity_invalid", 4);
    let yesterday = time::OffsetDateTime::now_utc() - time::Duration::days(1);
    sign(world, "bad", &n1, |params| params.not_after = yesterday);
    refused("certificate_expired", 1);
}

/// Proves, [R-011], [R-012], [R-013], [R-014].
#[test]
fn r011_peers_without_the_right_certificate_get_nothing_and_disturb_nobody() {
    let world = World::new(&catalog([4, 4], ""));
    let mut owner = world.node("n1");
    let registrations = "iop_edge_node_registrations_total";
    assert_eq!(
        world.edge.metrics().get(registrations),
        1.0,
        "the right one is let in"
    );
    let elsewhere = Directory::new();
    make_pki(&elsewhere, &["n1"]);
    let good = node_tls(&world.edge.directory, "n1");
    expect_refused(&world, without_certificate(&good));
    world.saw("identity_missing", 1);
    expect_refused(&world, node_tls(&elsewhere, "n1"));
    world.saw("certificate_untrusted", 1);
    // An Edge's own, and certificates that are right but for one thing.
    expect_refused(&world, node_tls(&world.edge.directory, "edge-1"));
    world.saw("identity_invalid", 1);
    expect_signed_refused(&world);
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
    world.saw("alpn_mismatch", 2);

    let after = world.edge.metrics();
    assert_eq!(after.get(registrations), 1.0, "nobody registered");
    assert_eq!(
        after.get("iop_edge_sessions"),
        1.0,
        "no shard heard of them"
    );
    assert_eq!(after.get("iop_edge_node_fences_total"), 0.0);
    // And signed like them, with nothing wrong.
    sign(&world, "right", &["spiffe://iop.test/node/n2"], |_| {});
    let mut other = Node::connect_with(&world.edge, node_tls(&world.edge.directory, "right"));
    other.send(&register("n2"));
    expect_accepted(&mut other);
    drop(other);
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

/// Records that cannot be opened end the connection, and its generation; a change of keys does not.
#[test]
fn a_record_that_cannot_be_opened_closes_the_session() {
    let world = World::new(&catalog([4, 4], ""));
    let tampered = [&[23, 3, 3, 0, 40][..], &[7; 40]].concat();
    let too_long = [23, 3, 3, 0xff, 0xff];
    let empty = [23, 3, 3, 0, 0];
    let plaintext = b"POST / HTTP/1.1\r\n";
    let cases: [&[u8]; 4] = [&tampered, &too_long, &empty, plaintext];
    for (row, bytes) in cases.into_iter().enumerate() {
        let mut node = world.node("n1");
        let mut client = world.asks(&chat("only1", true));
        let mut run = Run::asked(&mut node);
        run.sse(&mut node);
        let head = client.head().expect("the answer begins");
        node.stream.conn.refresh_traffic_keys().expect("TLS 1.3");
        run.body(&mut node, b"data: 1\n\n");
        assert_eq!(client.at_least(9), b"data: 1\n\n");
        expect_nothing(&mut node);
        node.stream.sock.write_all(bytes).expect("the Edge reads");
        expect_error_event(&mut client, &head, b"", "node_lost");
        let count = u32::try_from(row).expect("few") + 1;
        world.saw("record_invalid", count);
        world.wait("iop_edge_node_fences_total", count);
    }
    let mut node = world.node("n1");
    world.serves(&mut node, "m1");
    drop(node);
    world.rest();
}

/// A shard has room for so many connections; one more is closed, and nobody else.
#[test]
fn connections_beyond_the_bound_are_closed_and_disturb_nobody() {
    let world = World::one_shard(&catalog([4, 4], ""));
    let mut owner = world.node("n1");
    // Two per configured node and sixteen more.
    let mut others: Vec<_> = (1..20)
        .map(|row| {
            let mut node = Node::connect(&world.edge, "n2");
            expect_nothing(&mut node);
            world.wait("iop_edge_sessions", row + 1);
            node
        })
        .collect();
    expect_refused(&world, node_tls(&world.edge.directory, "n2"));
    world.saw("sessions_full", 1);
    world.serves(&mut owner, "m1");
    others.pop();
    world.wait("iop_edge_sessions", 19);
    let mut late = world.node("n2");
    world.serves(&mut late, "only2");
    drop((owner, others, late));
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
