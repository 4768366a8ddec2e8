//! The front over real sockets, with shards that only take what it hands over.
//!
//! Lives on: one front thread per test. Bound: a handful of connections each; every wait has a deadline.
#![expect(clippy::unwrap_used, reason = "a helper's panic is its test's failure")]
mod tls_support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use iop_dataplane::front::{
    ClientHandover, FrontConfig, Handover, NodeHandover, NodeSecurity, PeerKind,
};
use iop_dataplane::tls::{ReplyBuf, ServerTls};
use iop_proto::reason::Reason;
use rcgen::{ExtendedKeyUsagePurpose, IsCa};
use rustls::{ClientConnection, StreamOwned};
use tls_support::front::*;
use tls_support::*;

type TlsStream = StreamOwned<ClientConnection, TcpStream>;

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn tls(peer: &Peer<'_>, ca: &Ca, address: SocketAddr) -> TlsStream {
    StreamOwned::new(peer.connection(ca), dial(address))
}

/// The alert that ends a connection, as the peer's stack tells it.
fn alert(stream: &mut TlsStream) -> rustls::AlertDescription {
    let mut part = [0; 16];
    loop {
        match stream.read(&mut part) {
            Ok(n) => assert_ne!(n, 0, "closed without an alert"),
            Err(error) => {
                let inner = error.into_inner().expect("a TLS error");
                match inner.downcast_ref() {
                    Some(&rustls::Error::AlertReceived(alert)) => return alert,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

fn to_stream(fd: std::os::fd::OwnedFd) -> TcpStream {
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

#[test]
fn a_node_arrives_with_its_identity_its_early_bytes_and_a_socket_that_works() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node("spiffe://test.iop/node/n2"));
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut node = tls(&Peer::node(&pair), &ca, world.nodes);
    node.conn.writer().write_all(b"register").unwrap(); // leaves with Finished
    node.flush().unwrap();
    let NodeHandover {
        fd,
        records,
        mut early,
        certificate_name,
        not_after_unix,
        peer,
    } = world.node();
    assert_eq!(certificate_name.as_deref(), Some("n2"));
    assert_eq!(not_after_unix, 3_471_292_800);
    assert_eq!(peer, node.sock.local_addr().unwrap());
    let mut records = records.unwrap();
    let mut socket = to_stream(fd);
    let mut plain = take(&mut records, &mut early).unwrap().plain;
    while plain.len() < 8 {
        let mut part = [0; 512];
        let bytes = socket.read(&mut part).unwrap();
        assert_ne!(bytes, 0);
        early.extend_from_slice(&part[..bytes]);
        plain.extend_from_slice(&take(&mut records, &mut early).unwrap().plain);
    }
    assert_eq!(plain, b"register");
    socket.write_all(&sealed(&mut records, b"welcome")).unwrap();
    let mut answer = [0; 7];
    node.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"welcome");
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    assert_eq!(world.seen(), Seen::HandedOver(PeerKind::Node));
}

#[test]
fn the_socket_has_its_options_and_dies_with_the_shards_descriptor() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut node = tls(&Peer::node(&pair), &ca, world.nodes);
    node.flush().unwrap();
    let handover = world.node();
    let socket = socket2::SockRef::from(&handover.fd);
    assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
    let dead = std::time::Duration::from_millis(iop_proto::limits::DEAD_MS_DEFAULT);
    assert_eq!(socket.tcp_user_timeout().unwrap(), Some(dead));
    // SAFETY: F_GETFD on an open descriptor reads its flags.
    let flags = unsafe { libc::fcntl(handover.fd.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    drop(handover);
    // The front kept none: the peer sees the end.
    assert!(read_to_end(&mut node.sock).is_empty());
}

#[test]
fn clients_arrive_untouched_plaintext_or_https() {
    let ca = Ca::new();
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut client = dial(world.clients);
    client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let ClientHandover {
        fd,
        records,
        early,
        peer,
    } = world.client();
    assert!(records.is_none() && early.is_empty());
    assert_eq!(peer, client.local_addr().unwrap());
    let mut head = [0; 18];
    to_stream(fd).read_exact(&mut head).unwrap();
    assert_eq!(&head, b"GET / HTTP/1.1\r\n\r\n");

    let mut world = World::new(node_tls(&ca), |config| {
        config.live.client_tls = Some(https(&ca))
    });
    let mut client = tls(&Peer::browser(), &ca, world.clients);
    client.flush().unwrap();
    let ClientHandover {
        fd, records, early, ..
    } = world.client();
    assert!(early.is_empty());
    let answer = sealed(&mut records.unwrap(), b"HTTP/1.1 204\r\n\r\n");
    to_stream(fd).write_all(&answer).unwrap();
    let mut answer = [0; 16];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 204\r\n\r\n");
}

#[test]
fn a_handshake_may_come_byte_by_byte() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut peer = Peer::node(&pair).connection(&ca);
    let mut socket = dial(world.nodes);
    while peer.is_handshaking() {
        for byte in drain(&mut peer) {
            socket.write_all(&[byte]).unwrap();
        }
        let mut part = [0; 4_096];
        let bytes = socket.read(&mut part).unwrap();
        give(&mut peer, &part[..bytes]).unwrap();
    }
    peer.writer().write_all(b"data").unwrap();
    for byte in drain(&mut peer) {
        socket.write_all(&[byte]).unwrap();
    }
    let handover = world.node();
    let mut rest = to_stream(handover.fd);
    let mut records = handover.records.unwrap();
    let mut buffer = handover.early;
    loop {
        let taken = take(&mut records, &mut buffer).unwrap();
        if taken.plain == b"data" {
            break;
        }
        let mut part = [0; 512];
        let bytes = rest.read(&mut part).unwrap();
        buffer.extend_from_slice(&part[..bytes]);
    }
}

/// A peer that does not finish is closed at the deadline, silent or half-way; one that finishes is not.
/// Proves [D-29].
#[test]
fn d29_an_unfinished_handshake_ends_at_its_deadline() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let world = World::new(node_tls(&ca), |config| config.live.handshake_ms = 400);
    let hello = drain(&mut Peer::node(&pair).connection(&ca));
    for sent in [0, 1, 5, hello.len() - 1, hello.len()] {
        let mut socket = dial(world.nodes);
        socket.write_all(&hello[..sent]).unwrap();
        let told = read_to_end(&mut socket);
        assert_eq!(told.is_empty(), sent < hello.len(), "{sent} bytes sent");
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
        let timeout = Seen::Refused(PeerKind::Node, Reason::TlsHandshakeTimeout);
        assert_eq!(world.seen(), timeout, "{sent} bytes sent");
    }
    // With the usual deadline the same peer passes.
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut node = tls(&Peer::node(&pair), &ca, world.nodes);
    node.flush().unwrap();
    assert_eq!(world.node().certificate_name.as_deref(), Some("n1"));
}

/// Each wrong peer is told, counted by its reason, and never reaches a shard; a right one does.
/// Proves, [R-012], [R-013], [R-014].
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn r011_to_r014_wrong_peers_end_before_registration() {
    use rustls::AlertDescription as A;
    let ca = Ca::new();
    let good = ca.sign(&Leaf::node(NODE_URI));
    let stranger = Ca::new().sign(&Leaf::node(NODE_URI));
    let expired = ca.sign(&Leaf {
        years: (2020, 2021),
        ..Leaf::node(NODE_URI)
    });
    let role = Leaf {
        purposes: vec![ExtendedKeyUsagePurpose::ClientAuth],
        ..Leaf::node("spiffe://test.iop/edge/n1")
    };
    let role = ca.sign(&role);
    let name = ca.sign(&Leaf::node("spiffe://test.iop/node/n-evil"));
    let nameless = ca.sign(&Leaf {
        uris: vec![],
        ..Leaf::node(NODE_URI)
    });
    let two = ca.sign(&Leaf {
        uris: vec![NODE_URI.into(), NODE_URI.into()],
        ..Leaf::node("")
    });
    let loose = ca.sign(&Leaf {
        ca: IsCa::ExplicitNoCa,
        usages: vec![],
        ..Leaf::node(NODE_URI)
    });
    let node = Peer::node;
    let cases = [
        (
            "no certificate",
            Peer {
                identity: None,
                ..node(&good)
            },
            Reason::IdentityMissing,
            A::CertificateRequired,
        ),
        (
            "wrong authority",
            node(&stranger),
            Reason::CertificateUntrusted,
            A::DecryptError,
        ),
        (
            "expired",
            node(&expired),
            Reason::CertificateExpired,
            A::CertificateExpired,
        ),
        (
            "wrong role",
            node(&role),
            Reason::IdentityWrongRole,
            A::AccessDenied,
        ),
        (
            "wrong name",
            node(&name),
            Reason::IdentityWrongName,
            A::AccessDenied,
        ),
        (
            "no URI",
            node(&nameless),
            Reason::IdentityMissing,
            A::AccessDenied,
        ),
        (
            "two URIs",
            node(&two),
            Reason::IdentityInvalid,
            A::AccessDenied,
        ),
        (
            "no key usage",
            node(&loose),
            Reason::IdentityInvalid,
            A::AccessDenied,
        ),
        (
            "no protocol",
            Peer {
                alpn: &[],
                ..node(&good)
            },
            Reason::AlpnMismatch,
            A::NoApplicationProtocol,
        ),
    ];
    let mut world = World::new(node_tls(&ca), |_| {});
    for (case, peer, reason, told) in cases {
        let mut stream = tls(&peer, &ca, world.nodes);
        // Its registration follows at once and must not be looked at.
        write_what_goes(&mut stream, b"registration");
        assert_eq!(alert(&mut stream), told, "{case}");
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
        assert_eq!(
            world.seen(),
            Seen::Refused(PeerKind::Node, reason),
            "{case}"
        );
    }
    let mut stream = tls(&node(&good), &ca, world.nodes);
    stream.flush().unwrap();
    // The first thing in the lane is the right node.
    assert_eq!(world.node().certificate_name.as_deref(), Some("n1"));
}

#[test]
fn plaintext_on_a_tls_port_is_answered_and_counted() {
    let ca = Ca::new();
    let world = World::new(node_tls(&ca), |config| {
        config.live.client_tls = Some(https(&ca))
    });
    let refused = |kind| Seen::Refused(kind, Reason::PlaintextOnTlsPort);
    for words in [&b"IOPEN/1\n"[..], b"GET / HTTP/1.1\r\n\r\n", b"\0"] {
        let mut socket = dial(world.nodes);
        socket.write_all(words).unwrap();
        assert_eq!(read_to_end(&mut socket), [21, 3, 3, 0, 2, 2, 10]);
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
        assert_eq!(world.seen(), refused(PeerKind::Node));
    }
    let mut socket = dial(world.clients);
    socket
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        .unwrap();
    let answer = String::from_utf8(read_to_end(&mut socket)).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 400 Bad Request\r\n"),
        "{answer}"
    );
    assert!(
        answer.contains("\"code\":\"plaintext_on_tls_port\""),
        "{answer}"
    );
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains(&format!("content-length: {}\r\n", body.len())),
        "{head}"
    );
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Client));
    assert_eq!(world.seen(), refused(PeerKind::Client));
}

#[test]
fn insecure_nodes_exchange_prefaces_and_nothing_else_passes() {
    let mut world = World::insecure(|_| {});
    let mut socket = dial(world.nodes);
    let mut preface = [0; 8];
    socket.read_exact(&mut preface).unwrap(); // ours comes unasked
    assert_eq!(&preface, b"IOPEN/1\n");
    for byte in *b"IOPEN/1\nfirst bytes" {
        socket.write_all(&[byte]).unwrap();
    }
    let NodeHandover {
        fd,
        records,
        early,
        certificate_name,
        not_after_unix,
        ..
    } = world.node();
    assert!(records.is_none() && certificate_name.is_none() && early.is_empty());
    assert_eq!(not_after_unix, i64::MAX);
    let mut rest = [0; 11];
    to_stream(fd).read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"first bytes");
    world.skip_seen(2);

    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let hello = drain(&mut Peer::node(&pair).connection(&ca));
    for (words, reason) in [
        (&hello[..], Reason::TlsOnPlaintextPort),
        (b"IOPEN/2\n", Reason::AlpnMismatch),
        (b"GET / HTTP/1.1\r\n", Reason::AlpnMismatch),
        (b"IOPEN", Reason::PeerClosed),
    ] {
        let mut socket = dial(world.nodes);
        socket.write_all(words).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_to_end(&mut socket), b"IOPEN/1\n");
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
        assert_eq!(world.seen(), Seen::Refused(PeerKind::Node, reason));
    }
}

/// While as many handshakes as allowed are in progress, the next connection stays in the backlog; it
/// is accepted when one ends, and clients are not held up meanwhile. Proves [D-04].
#[test]
fn d04_connections_beyond_the_handshake_limit_wait_unaccepted() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let mut world = World::new(node_tls(&ca), |config| config.handshakes_max = 2);
    let first = dial(world.nodes);
    let _second = dial(world.nodes);
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    let mut third = tls(&Peer::node(&pair), &ca, world.nodes);
    // A whole client passes through the same thread behind the third: it had its chance.
    let client = dial(world.clients);
    drop(world.client());
    drop(client);
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Client));
    assert_eq!(world.seen(), Seen::HandedOver(PeerKind::Client));
    drop(first);
    assert_eq!(
        world.seen(),
        Seen::Refused(PeerKind::Node, Reason::PeerClosed)
    );
    third.flush().unwrap();
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    assert_eq!(world.node().certificate_name.as_deref(), Some("n1"));
}

/// A client over the global limit is answered, plaintext or HTTPS; when one leaves there is room again.
/// Proves [D-33].
#[test]
fn d33_the_front_keeps_the_global_client_limit() {
    let ca = Ca::new();
    for secure in [false, true] {
        let mut world = World::new(node_tls(&ca), |config| {
            config.clients_max = 2;
            config.live.client_tls = secure.then(|| https(&ca));
        });
        let connect = |address| {
            let mut stream = tls(&Peer::browser(), &ca, address);
            if secure {
                stream.flush().unwrap();
            }
            stream
        };
        let _first = connect(world.clients);
        let _second = connect(world.clients);
        let _held = [world.client(), world.client()];
        let mut third = connect(world.clients);
        let answer = if secure {
            read_to_end(&mut third)
        } else {
            read_to_end(&mut third.sock)
        };
        let answer = String::from_utf8(answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 503 Service Unavailable\r\n"),
            "{answer}"
        );
        assert!(answer.contains("retry-after: 1\r\n"), "{answer}");
        assert!(answer.contains("\"code\":\"clients_full\""), "{answer}");
        world.skip_seen(5);
        assert_eq!(
            world.seen(),
            Seen::Refused(PeerKind::Client, Reason::ClientsFull)
        );
        world.release_client();
        let _fourth = connect(world.clients);
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Client));
        drop(world.client());
    }
}

#[test]
fn a_client_that_fails_its_handshake_gives_its_place_back() {
    let ca = Ca::new();
    let mut world = World::new(node_tls(&ca), |config| {
        config.clients_max = 1;
        config.live.client_tls = Some(https(&ca));
    });
    for _ in 0..3 {
        let mut socket = dial(world.clients);
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        read_to_end(&mut socket);
        assert_eq!(world.seen(), Seen::Accepted(PeerKind::Client));
        let plaintext = Seen::Refused(PeerKind::Client, Reason::PlaintextOnTlsPort);
        assert_eq!(world.seen(), plaintext);
    }
    let mut client = tls(&Peer::browser(), &ca, world.clients);
    client.flush().unwrap();
    world.client();
}

#[test]
fn a_full_lane_keeps_connections_until_the_shard_takes_some() {
    let mut world = World::insecure(|_| {});
    let clients: Vec<_> = (0..LANE_SLOTS + 3).map(|_| dial(world.clients)).collect();
    // The lane takes its fill; the others are accepted and wait.
    let mut handed_over = 0;
    for _ in 0..clients.len() + LANE_SLOTS {
        handed_over += usize::from(world.seen() == Seen::HandedOver(PeerKind::Client));
    }
    assert_eq!(handed_over, LANE_SLOTS);
    for _ in &clients {
        world.client();
    }
    for _ in 0..3 {
        assert_eq!(world.seen(), Seen::HandedOver(PeerKind::Client));
    }
}

/// The least loaded shard is chosen; equals take turns. Proves [D-35].
#[test]
fn d35_connections_go_to_the_least_loaded_shard() {
    let mut world = World::insecure(|_| {});
    world.set_load(0, 5);
    world.set_load(1, 3);
    let mut dialled = Vec::new();
    for _ in 0..3 {
        dialled.push(dial(world.clients));
        world.client_on(1);
    }
    world.set_load(1, 6);
    dialled.push(dial(world.clients));
    world.client_on(0);
    world.set_load(0, 6);
    for shard in [1, 0, 1, 0] {
        dialled.push(dial(world.clients));
        world.client_on(shard);
    }
}

#[test]
fn closing_to_clients_leaves_nodes_served_and_stopping_ends_handshakes() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let mut world = World::new(node_tls(&ca), |_| {});
    let _client = dial(world.clients);
    world.client();
    world.skip_seen(2);
    world.handle.as_mut().unwrap().close_clients();
    // The kernel refuses from now on.
    assert!(TcpStream::connect(world.clients).is_err());
    assert_eq!(world.seen(), Seen::Closed(PeerKind::Client));
    let mut node = tls(&Peer::node(&pair), &ca, world.nodes);
    node.flush().unwrap();
    assert_eq!(world.node().certificate_name.as_deref(), Some("n1"));
    world.skip_seen(2);
    let mut half_way = dial(world.nodes);
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    world.handle.take().unwrap().stop();
    assert!(read_to_end(&mut half_way).is_empty());
    assert!(TcpStream::connect(world.nodes).is_err());
}

/// KeyUpdate with the Finished, all in one segment: the front hands over both untouched.
#[test]
fn an_eager_peer_loses_nothing_at_the_hand_over() {
    let ca = Ca::new();
    let pair = ca.sign(&Leaf::node(NODE_URI));
    let mut world = World::new(node_tls(&ca), |_| {});
    let mut node = tls(&Peer::node(&pair), &ca, world.nodes);
    node.conn.complete_io_until_finished(&mut node.sock);
    node.conn.writer().write_all(b"before").unwrap();
    node.conn.refresh_traffic_keys().unwrap();
    node.conn.writer().write_all(b"after").unwrap();
    let flight = drain(&mut node.conn);
    node.sock.write_all(&flight).unwrap();
    node.sock.shutdown(Shutdown::Write).unwrap();
    let handover = world.node();
    let mut buffer = handover.early;
    let mut socket = to_stream(handover.fd);
    buffer.extend_from_slice(&read_to_end(&mut socket));
    let mut records = handover.records.unwrap();
    let taken = take(&mut records, &mut buffer).unwrap();
    assert_eq!(taken.plain, b"beforeafter");
    assert_eq!((taken.controls, taken.reply.len()), (1, 27));
    let mut words = taken.reply;
    words.extend_from_slice(&sealed(&mut records, b"answer"));
    let mut goodbye = ReplyBuf::default();
    records.close_notify(&mut goodbye).unwrap();
    words.extend_from_slice(goodbye.as_slice());
    socket.write_all(&words).unwrap();
    assert_eq!(read_to_end(&mut node), b"answer");
}

trait UntilFinished {
    /// Reads until the client's Finished is ready to be sent, without sending it.
    fn complete_io_until_finished(&mut self, socket: &mut TcpStream);
}

impl UntilFinished for ClientConnection {
    fn complete_io_until_finished(&mut self, socket: &mut TcpStream) {
        socket.write_all(&drain(self)).unwrap();
        while self.is_handshaking() {
            self.read_tls(socket).unwrap();
            self.process_new_packets().unwrap();
        }
    }
}

#[test]
fn a_configuration_is_shown_without_its_secrets() {
    let tls: ServerTls = node_tls(&Ca::new());
    let security = NodeSecurity::Tls {
        tls,
        trust_domain: DOMAIN.into(),
    };
    let text = format!("{security:?}");
    assert!(text.contains(DOMAIN) && text.len() < 200, "{text}");
    let _: fn(FrontConfig) -> Arc<FrontConfig> = Arc::new;
    let _: Option<Handover> = None;
}
