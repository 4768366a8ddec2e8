//! Who the Edge must be, what is said in which order, and what ends a session before it serves.
use iop_agent::config::Security;
use iop_agent::requests;
use iop_control::node::supervisor::Policy;
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{
    Adapter, CommandKind, Message, NodeCommandRequest, NodeCommandResponse, Ping, RegisterResponse,
    TunnelFrame,
};
use iop_proto::domain::{ConfigRefreshRequest, FrameKind, RefreshStatus};
use iop_proto::framing::{MessageType, encode_envelope};
use iop_proto::limits::ALPN;
use rcgen::{BasicConstraints, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::edge::{Conn, Edge, adapter, payload, ready, tunnel};
use crate::support::pki::{EDGE_ID, Leaf, NODE_ID, Pki};
use crate::support::provider::Provider;
use crate::support::{Agent, config, within};

/// Proves [R-019], [R-020], [R-037].
#[tokio::test]
async fn r019_the_first_message_is_register_request_and_ready_carries_the_returned_id() {
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.accept().await;
    let first = conn.message().await;
    let Message::RegisterRequest(request) = first.message else {
        panic!("{first:?}")
    };
    assert_eq!(request.node_id, "n1");
    assert!(first.id > 0 && first.reply_to == 0);
    conn.accept_registration(first.id, Some(payload(vec![])))
        .await;
    let ready_id = conn.ready_request().await; // asserts the canonical id
    assert!(ready_id > first.id);
}

/// An Edge certificate that must not do, and the same run with a good one.
async fn refused(leaf: Leaf) {
    let bad = Edge::with(Pki::new(), &leaf).await;
    let agent = Agent::start(bad.config());
    for _ in 0..2 {
        // Refused inside the handshake, and retried: a wrong peer is no local error.
        assert!(bad.handshake().await.is_err());
    }
    assert!(agent.is_running());
    let good = Edge::with(Pki::new(), &Leaf::of(EDGE_ID)).await;
    let _agent = Agent::start(good.config());
    assert!(matches!(
        good.accept().await.message().await.message,
        Message::RegisterRequest(_)
    ));
}

/// Proves [R-017].
#[tokio::test]
async fn r017_an_edge_of_another_role_hears_nothing() {
    refused(Leaf::of(NODE_ID)).await;
}

/// Proves [R-018].
#[tokio::test]
async fn r018_an_edge_of_another_name_or_trust_domain_hears_nothing() {
    refused(Leaf::of("spiffe://iop.test/edge/edge-other")).await;
    refused(Leaf::of("spiffe://other.test/edge/e1")).await;
}

/// Proves [R-016], [R-008].
#[tokio::test]
async fn r016_an_edge_of_another_authority_hears_nothing() {
    let (trusted, stranger) = (Pki::new(), Pki::new());
    let security = trusted.node(&Leaf::of(NODE_ID));
    let tls = stranger.edge_for(&trusted, &Leaf::of(EDGE_ID), &[ALPN]);
    let edge = Edge::listen(Some(tls), security.clone(), None).await;
    let agent = Agent::start(edge.config());
    for _ in 0..2 {
        assert!(edge.handshake().await.is_err());
    }
    assert!(agent.is_running());
    let tls = trusted.edge(&Leaf::of(EDGE_ID), &[ALPN]);
    let good = Edge::listen(Some(tls), security, None).await;
    let _agent = Agent::start(good.config());
    good.accept().await.message().await;
}

/// Proves [D-61].
#[tokio::test]
async fn d61_a_certificate_that_is_no_svid_of_a_server_is_refused() {
    let good = Leaf::of(EDGE_ID);
    let two = vec![EDGE_ID.to_owned(), "spiffe://iop.test/edge/e2".to_owned()];
    refused(Leaf {
        uris: two,
        ..good.clone()
    })
    .await;
    refused(Leaf {
        uris: vec![],
        ..good.clone()
    })
    .await;
    refused(Leaf {
        usages: vec![],
        ..good.clone()
    })
    .await;
    refused(Leaf {
        usages: vec![KeyUsagePurpose::KeyEncipherment],
        ..good.clone()
    })
    .await;
    let client_alone = vec![ExtendedKeyUsagePurpose::ClientAuth];
    refused(Leaf {
        extended: client_alone,
        ..good.clone()
    })
    .await;
    let is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    refused(Leaf {
        is_ca,
        ..good.clone()
    })
    .await;
    refused(Leaf {
        years: (2019, 2020),
        ..good
    })
    .await;
}

/// Proves [R-015].
#[tokio::test]
async fn r015_an_edge_without_tls_hears_no_register_request() {
    let pki = Pki::new();
    let edge = Edge::listen(None, pki.node(&Leaf::of(NODE_ID)), Some(pki)).await;
    let agent = Agent::start(edge.config());
    for _ in 0..2 {
        let mut stream = edge.dialled().await;
        stream.write_all(b"IOPEN/1\n").await.unwrap();
        let mut heard = vec![];
        // The agent refuses the record and hangs up; what it said was a TLS ClientHello.
        let _ = within("the agent hangs up", stream.read_to_end(&mut heard)).await;
        assert_eq!(heard[0], 22);
        let name = MessageType::RegisterRequest.name().as_bytes();
        assert!(!heard.windows(name.len()).any(|window| window == name));
    }
    assert!(agent.is_running());
}

#[tokio::test]
async fn an_edge_of_no_or_another_protocol_version_hears_nothing() {
    let pki = Pki::new();
    let security = pki.node(&Leaf::of(NODE_ID));
    let tls = pki.edge(&Leaf::of(EDGE_ID), &[]);
    let silent = Edge::listen(Some(tls), security.clone(), None).await;
    let _agent = Agent::start(silent.config());
    silent.accept().await.closed().await;

    let tls = pki.edge(&Leaf::of(EDGE_ID), &[b"iop-edge-node/2"]);
    let newer = Edge::listen(Some(tls), security, Some(pki)).await;
    let _agent = Agent::start(newer.config());
    assert!(newer.handshake().await.is_err());
}

#[tokio::test]
async fn plaintext_begins_with_the_preface_on_both_sides() {
    let edge = Edge::plaintext().await;
    let _agent = Agent::start(edge.config());
    let mut stream = edge.dialled().await;
    let mut preface = [0; 8];
    within("the preface", stream.read_exact(&mut preface))
        .await
        .unwrap();
    assert_eq!(&preface, b"IOPEN/1\n");
    stream.write_all(b"IOPEN/2\n").await.unwrap();
    let mut rest = vec![];
    let _ = within("the agent hangs up", stream.read_to_end(&mut rest)).await;
    assert_eq!(rest, b"", "nothing after a wrong preface");
    edge.accept().await.message().await;
}

/// Proves [R-028].
#[tokio::test]
async fn r028_a_request_in_the_same_segment_as_the_ready_ack_is_handled() {
    let edge = Edge::plaintext().await;
    let _agent = Agent::start(edge.config());
    for round in 0..1_000 {
        let mut conn = edge.accept().await;
        conn.register(payload(vec![])).await;
        let reply_to = conn.ready_request().await;
        let mut request = tunnel("r", b"");
        request.adapter = format!("unknown-{round}");
        conn.send_all(&[
            (0, reply_to, ready(true)),
            (0, 0, Message::TunnelRequest(request)),
        ])
        .await;
        let frame = conn.frame().await;
        assert_eq!(
            (frame.kind, frame.sequence),
            (FrameKind::Error, 1),
            "round {round}"
        );
    }
}

/// Proves [S-70].
#[tokio::test]
async fn s70_a_request_before_the_ready_ack_is_not_executed_and_ends_the_session() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let adapters = || payload(vec![adapter(provider.port(), 4)]);
    let command = NodeCommandRequest {
        command_id: "c".to_owned(),
        kind: CommandKind::Capabilities,
        adapter: "a".to_owned(),
        target: "t".to_owned(),
    };
    let refresh = ConfigRefreshRequest {
        request_id: "f".to_owned(),
        config: None,
    };
    for early in [
        Message::TunnelRequest(tunnel("r", b"{}")),
        Message::NodeCommandRequest(command),
        Message::ConfigRefreshRequest(refresh),
    ] {
        let mut conn = edge.accept().await;
        conn.register(adapters()).await;
        let reply_to = conn.ready_request().await;
        conn.send_all(&[(9, 0, early), (0, reply_to, ready(true))])
            .await;
        conn.closed().await;
    }
    assert!(provider.is_idle());
    let mut conn = edge.ready(adapters()).await;
    conn.open(tunnel("r", b"{}")).await;
    provider.request().await.answer("200 OK", b"ok").await;
    assert!(conn.answer("r").await.is_complete());
}

/// Whatever may be asked is in force once ready is said; what cannot be put in force is never called so.
/// Proves [R-026], [R-027].
#[tokio::test]
async fn r026_ready_is_said_only_of_a_configuration_that_was_applied_and_started() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let mut config = edge.config();
    config.provider_http.ca = Some("/nonexistent/ca.pem".into());
    let _agent = Agent::start(config);
    let good = adapter(provider.port(), 1);
    let secure = Adapter {
        base_url: "https://127.0.0.1:1".to_owned(),
        ..good.clone()
    };
    // The first cannot be applied, the second not be started: the next thing said would be ready.
    for adapters in [vec![good.clone(), good.clone()], vec![secure]] {
        let mut conn = edge.accept().await;
        conn.register(payload(adapters)).await;
        conn.closed().await;
    }
    let mut conn = edge.ready(payload(vec![good])).await;
    conn.open(tunnel("r", b"{}")).await;
    provider.request().await.answer("200 OK", b"ok").await;
    assert_eq!(conn.answer("r").await.body, b"ok");
}

/// Proves [R-048], [S-51].
#[tokio::test]
async fn r048_a_refused_ready_closes_the_session_and_executes_nothing() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let mut config = edge.config();
    config.reconnect = Policy::new(Some(1), Some(10), Some(0.0)).unwrap();
    let agent = Agent::start(config);
    let mut conn = edge.accept().await;
    conn.register(payload(vec![adapter(provider.port(), 4)]))
        .await;
    let reply_to = conn.ready_request().await;
    let request = Message::TunnelRequest(tunnel("r", b"{}"));
    conn.send_all(&[(0, reply_to, ready(false)), (0, 0, request)])
        .await;
    conn.closed().await;
    let refused_at = tokio::time::Instant::now();
    let mut again = edge.accept().await;
    let waited = refused_at.elapsed().as_secs_f64();
    assert!((0.9..3.0).contains(&waited), "{waited}");
    again
        .register(payload(vec![adapter(provider.port(), 4)]))
        .await;
    again.acknowledge().await;
    assert!(provider.is_idle());
    assert!(agent.is_running());

    let lone = Edge::start().await;
    let mut config = lone.config();
    config.reconnect = Policy::new(Some(0), Some(1), Some(0.0)).unwrap();
    let agent = Agent::start(config);
    let mut conn = lone.accept().await;
    conn.register(payload(vec![])).await;
    let reply_to = conn.ready_request().await;
    conn.send(reply_to, ready(false)).await;
    assert_eq!(agent.exit().await.code(), 1);
}

/// Proves [R-061].
#[tokio::test]
async fn r061_after_a_reset_a_broken_handshake_and_a_rejection_the_fourth_attempt_serves() {
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let stream = edge.dialled().await;
    socket2::SockRef::from(&stream)
        .set_linger(Some(core::time::Duration::ZERO))
        .unwrap();
    drop(stream);
    let mut stream = edge.dialled().await;
    let mut hello = [0; 16];
    within("a ClientHello", stream.read_exact(&mut hello))
        .await
        .unwrap();
    drop(stream);
    let mut conn = edge.accept().await;
    let id = conn.message().await.id;
    let rejected = RegisterResponse::Rejected {
        reason: "unknown node id".to_owned(),
    };
    conn.send(id, Message::RegisterResponse(rejected)).await;
    conn.closed().await;
    edge.ready(payload(vec![])).await;
    assert!(agent.is_running());
}

/// What a hostile Edge may do on one connection; each ends it.
async fn hostile(conn: &mut Conn, how: u32) {
    let id = conn.message().await.id;
    let accepted = |node_id: &str, config| {
        let response = RegisterResponse::Accepted {
            node_id: node_id.to_owned(),
            config,
        };
        Message::RegisterResponse(response)
    };
    let unusable = |adapters: Vec<Adapter>| accepted("n1", Some(payload(adapters)));
    let ftp = Adapter::new(String::new(), ProviderKind::Ollama, 1, "ftp://h".to_owned());
    let no_url = Adapter::new("x".to_owned(), ProviderKind::Vllm, 1, String::new());
    let mut envelope = vec![];
    match how {
        0 => conn.write(&[0; 4]).await,
        1 => conn.write(&[0xff; 4]).await,
        2 => conn.write(&[0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff]).await,
        3 => conn.write(b"HTTP/1.1 400 Bad Request\r\n\r\n").await,
        4 => {
            encode_envelope(MessageType::RegisterResponse, 0, id, &[0xff], &mut envelope).unwrap();
            conn.write(&envelope).await;
        }
        5 => {
            let frame = TunnelFrame::new("r".to_owned(), FrameKind::End, 1);
            conn.send(0, Message::TunnelFrame(frame)).await;
        }
        6 => conn.send(id, accepted("", Some(payload(vec![])))).await,
        7 => conn.send(id, accepted("n1", None)).await,
        8 => {
            conn.send(id, unusable(vec![adapter(1, 1), adapter(2, 1)]))
                .await
        }
        9 => conn.send(id, unusable(vec![ftp])).await,
        10 => conn.send(id, unusable(vec![no_url])).await,
        11 => conn.send(id, unusable(vec![adapter(1, -1)])).await,
        12 => {
            encode_envelope(MessageType::Ping, 0, 0, &[0xff], &mut envelope).unwrap();
            conn.write(&envelope).await;
        }
        _ => {
            // An unknown type before registration.
            encode_envelope(MessageType::Ping, 0, 0, &[], &mut envelope).unwrap();
            let at = envelope.windows(4).position(|w| w == b"Ping").unwrap();
            envelope[at..at + 4].copy_from_slice(b"Pong".map(|b| b ^ 1).as_slice());
            conn.write(&envelope).await;
        }
    }
    conn.closed().await;
}

/// Proves [R-065].
#[tokio::test]
async fn r065_no_remote_behaviour_ends_the_process_while_attempts_remain() {
    let edge = Edge::plaintext().await;
    let mut config = edge.config();
    config.reconnect = Policy::new(Some(0), Some(1_000), Some(0.0)).unwrap();
    let agent = Agent::start(config);
    for how in (0..14).cycle().take(140) {
        hostile(&mut edge.accept().await, how).await;
    }
    edge.ready(payload(vec![])).await;
    assert!(agent.is_running());
}

#[tokio::test]
async fn once_registered_unknown_types_and_stray_answers_are_ignored() {
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.accept().await;
    let id = conn.message().await.id;
    let rejected = || {
        let reason = "not for you".to_owned();
        Message::RegisterResponse(RegisterResponse::Rejected { reason })
    };
    conn.send(id + 7, rejected()).await;
    conn.accept_registration(id, Some(payload(vec![]))).await;
    conn.send(id, rejected()).await;
    let mut unknown = vec![];
    encode_envelope(MessageType::GoAway, 0, 0, &[], &mut unknown).unwrap();
    let at = unknown.windows(6).position(|w| w == b"GoAway").unwrap();
    unknown[at] = b'X';
    conn.write(&unknown).await;
    let reply_to = conn.ready_request().await;
    conn.send(reply_to + 7, ready(false)).await;
    conn.send(reply_to, ready(true)).await;
    conn.send(0, Message::Ping(Ping { seq: 77 })).await;
    conn.until("a pong: the session lives", |conn| conn.pongs == [77])
        .await;
}

/// Proves [D-57].
#[tokio::test]
async fn d57_commands_and_refreshes_are_answered_under_their_ids() {
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![])).await;
    let command = NodeCommandRequest {
        command_id: "c1".to_owned(),
        kind: CommandKind::Unknown(99),
        adapter: String::new(),
        target: String::new(),
    };
    let refresh = ConfigRefreshRequest {
        request_id: "f1".to_owned(),
        config: None,
    };
    conn.send_all(&[
        (41, 0, Message::NodeCommandRequest(command)),
        (42, 0, Message::ConfigRefreshRequest(refresh)),
    ])
    .await;
    let answer = conn.message().await;
    assert_eq!(answer.reply_to, 41);
    let expected = NodeCommandResponse {
        command_id: "c1".to_owned(),
        kind: CommandKind::Unknown(99),
        error: "unsupported command".to_owned(),
        result: Default::default(),
    };
    assert_eq!(answer.message, Message::NodeCommandResponse(expected));
    let answer = conn.message().await;
    assert_eq!(answer.reply_to, 42);
    let Message::ConfigRefreshResponse(refresh) = answer.message else {
        panic!("{answer:?}")
    };
    assert_eq!(refresh.request_id, "f1");
    assert_eq!(refresh.status, RefreshStatus::Failed);
}

/// Proves [R-062], [R-010].
#[tokio::test]
async fn r062_an_unusable_local_identity_ends_the_process_without_a_dial() {
    let edge = Edge::start().await;
    let good = edge.config();
    let Security::Mutual {
        ca,
        cert,
        key,
        edge_id,
    } = good.security.clone()
    else {
        panic!()
    };
    let pki = Pki::new();
    let garbage = crate::support::plant(&pki.directory, "garbage.pem", "no certificate");
    let gone = pki.directory.join("gone.pem");
    let other_key = pki.leaf(&Leaf::of(NODE_ID)).1.serialize_pem();
    let other_key = crate::support::plant(&pki.directory, "other.key", &other_key);
    let expired = Leaf {
        years: (2019, 2020),
        ..Leaf::of(NODE_ID)
    };
    let Security::Mutual {
        cert: old_cert,
        key: old_key,
        ..
    } = pki.node(&expired)
    else {
        panic!()
    };
    for (ca, cert, key) in [
        (&garbage, &cert, &key),
        (&gone, &cert, &key),
        (&ca, &garbage, &key),
        (&ca, &gone, &key),
        (&ca, &cert, &garbage),
        (&ca, &cert, &gone),
        (&ca, &cert, &other_key),
        (&ca, &old_cert, &old_key),
    ] {
        let (ca, cert, key) = (ca.clone(), cert.clone(), key.clone());
        let security = Security::Mutual {
            ca,
            cert,
            key,
            edge_id: edge_id.clone(),
        };
        let port = edge.listener.local_addr().unwrap().port();
        let (_handle, asked) = requests();
        let exit = within("the exit", iop_agent::run(config(port, security), asked)).await;
        assert_eq!(exit.code(), 1);
    }
    let dialled = futures_util::FutureExt::now_or_never(edge.listener.accept());
    assert!(dialled.is_none(), "not one dial");
    let _agent = Agent::start(good);
    edge.accept().await.message().await;
}
