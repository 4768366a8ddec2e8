//! Bytes: whatever a provider writes in whatever pieces arrives whole, at once, and bounded.
use core::time::Duration;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use iop_proto::domain::{Adapter, Message, Ping};
use tokio_rustls::TlsAcceptor;

use crate::support::edge::{Answer, Edge, adapter, payload, tunnel};
use crate::support::pki::{Leaf, Pki};
use crate::support::provider::Provider;
use crate::support::{Agent, Dice, within};

/// Proves [R-105], [P-24], [P-26].
#[tokio::test]
async fn r105_random_bytes_in_odd_pieces_arrive_unchanged() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    let mut dice = Dice::new(105);
    let text = "{\"k\":  1e400, \"k\": \"\u{d55c}\u{ad6d}\u{c5b4} \u{1f30d}\"}\r\n";
    let mut body = text.as_bytes().to_vec();
    body.extend(dice.bytes(1024 * 1024));
    for chunked in [true, false] {
        conn.open(tunnel("r", b"{}")).await;
        let mut call = provider.request().await;
        let (head, close) = if chunked {
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
                "0\r\n\r\n",
            )
        } else {
            ("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", "")
        };
        let body = body.clone();
        let mut dice = Dice::new(5);
        let writer = tokio::spawn(async move {
            call.write(head).await;
            let mut rest = &body[..];
            while !rest.is_empty() {
                let (piece, more) = rest.split_at(rest.len().min(1 + dice.below(70_000)));
                if chunked {
                    call.chunk(piece).await;
                } else {
                    call.write(piece).await;
                }
                rest = more;
            }
            call.write(close).await;
            body
        });
        let answer = conn.answer("r").await;
        let sent = within("the provider's writes", writer).await.unwrap();
        assert!(answer.is_complete() && answer.body == sent);
    }
}

/// Proves [P-22].
#[tokio::test]
async fn p22_every_piece_arrives_before_the_next_one_is_written_whatever_its_type() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    for (method, kind) in [
        ("POST", "text/event-stream"),
        ("GET", "text/event-stream; charset=utf-8"),
        ("POST", "application/x-ndjson"),
        ("PUT", "application/octet-stream"),
        ("GET", "text/html"),
    ] {
        let mut request = tunnel("r", b"");
        request.method = method.to_owned();
        conn.open(request).await;
        let mut call = provider.request().await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
        // Byte by byte, also through the head; each body byte is one frame before the next is sent.
        for byte in head.as_bytes() {
            call.write([*byte]).await;
        }
        assert_eq!(conn.frame().await.sequence, 1);
        for (byte, sequence) in "data: \u{1f30d}\n\n".bytes().zip(2..) {
            call.write([byte]).await;
            let frame = conn.frame().await;
            assert_eq!((&frame.body[..], frame.sequence), (&[byte][..], sequence));
        }
        drop(call);
        let end = conn.frame().await;
        assert!(end.kind.is_terminal() && end.error.is_empty());
    }
}

/// Proves [R-091].
#[tokio::test]
async fn r091_tunnels_side_by_side_are_numbered_each_on_its_own() {
    const RUNS: usize = 32;
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let capacity = i32::try_from(RUNS).unwrap();
    let mut conn = edge
        .ready(payload(vec![adapter(provider.port(), capacity)]))
        .await;
    for run in 0..RUNS {
        conn.open(tunnel(&format!("r{run}"), run.to_string().as_bytes()))
            .await;
    }
    let mut writers = vec![];
    for _ in 0..RUNS {
        let mut call = provider.request().await;
        writers.push(tokio::spawn(async move {
            let mut dice = Dice::new(call.body.iter().map(|&b| u64::from(b)).sum());
            call.start_chunked().await;
            let canary = call.body.clone();
            for _ in 0..200 {
                call.chunk(&canary).await;
                if dice.below(4) == 0 {
                    tokio::task::yield_now().await;
                }
            }
            call.end_chunked().await;
            call
        }));
    }
    let mut answers: Vec<_> = (0..RUNS).map(|_| Answer::default()).collect();
    while answers.iter().any(|answer| answer.terminal.is_none()) {
        let frame = conn.frame().await;
        let run: usize = frame.run_id[1..].parse().unwrap();
        answers[run].take(frame); // asserts sequence and form
    }
    for (run, answer) in answers.iter().enumerate() {
        assert!(answer.is_complete());
        assert_eq!(
            answer.body,
            run.to_string().repeat(200).as_bytes(),
            "no foreign byte"
        );
    }
    for writer in writers {
        within("a provider", writer).await.unwrap();
    }
}

#[tokio::test]
async fn a_large_request_body_arrives_whole() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    let body = Dice::new(1).bytes(16 * 1024 * 1024);
    let (_, mut call) = tokio::join!(conn.open(tunnel("r", &body)), provider.request());
    assert!(call.body == body);
    call.answer("200 OK", b"ok").await;
    assert!(conn.answer("r").await.is_complete());
}

/// Proves [P-63].
#[tokio::test]
async fn p63_an_edge_that_does_not_read_stops_the_provider_and_still_cancels() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    conn.open(tunnel("r", b"{}")).await;
    let mut call = provider.request().await;
    call.write("HTTP/1.1 200 OK\r\ncontent-length: 1073741824\r\n\r\n")
        .await;
    // Writes until a whole second passes without room: what is on the way is bounded.
    let piece = vec![b'x'; 256 * 1024];
    let mut written = 0;
    while let Ok(count) =
        tokio::time::timeout(Duration::from_secs(1), call.stream.write(&piece)).await
    {
        written += count.unwrap();
        assert!(written < 64 * 1024 * 1024, "nothing stops the provider");
    }
    assert!(written > 1024 * 1024);
    // The attempt is parked in front of a full queue; a cancel wakes it there as well.
    let cancelled_at = Instant::now();
    conn.cancel("r").await;
    let written_at_cancel = written;
    let aborted = async { while call.stream.write(&piece).await.is_ok() {} };
    within("the provider sees the abort", aborted).await;
    assert!(
        cancelled_at.elapsed() < Duration::from_millis(250),
        "{:?}",
        cancelled_at.elapsed()
    );
    let answer = conn.answer("r").await;
    assert_eq!(answer.error(), "cancelled");
    assert!(answer.body.len() <= written_at_cancel);
    assert!(answer.body.iter().all(|&byte| byte == b'x'));
}

#[tokio::test]
async fn a_paused_edge_loses_nothing_when_it_reads_on() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    conn.open(tunnel("r", b"{}")).await;
    let mut call = provider.request().await;
    let body = Dice::new(3).bytes(48 * 1024 * 1024);
    let sent = body.clone();
    let mut writer = tokio::spawn(async move {
        call.answer("200 OK", &sent).await;
        call
    });
    // Nothing is read until the provider has been blocked for a while.
    let stalled = tokio::time::timeout(Duration::from_millis(300), &mut writer);
    assert!(
        stalled.await.is_err(),
        "48 MiB do not fit between provider and Edge"
    );
    let answer = conn.answer("r").await;
    assert!(answer.is_complete() && answer.body == body);
    within("the provider", writer).await.unwrap();
}

/// One TLS request on `listener`, answered; the error of a handshake that failed.
async fn answer_tls(provider: &Provider, tls: &TlsAcceptor) -> std::io::Result<()> {
    let (stream, _) = provider.listener.accept().await?;
    let mut stream = tls.accept(stream).await?;
    let mut heard = vec![];
    while !heard.windows(4).any(|window| window == b"\r\n\r\n") {
        stream.read_buf(&mut heard).await?;
    }
    stream
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret")
        .await?;
    stream.shutdown().await
}

#[tokio::test]
async fn an_https_provider_is_reached_under_a_configured_root_and_refused_under_another() {
    let provider = Provider::start().await;
    let authority = Pki::new();
    let leaf = Leaf {
        uris: vec![],
        ..Leaf::of("")
    }
    .named("localhost");
    let tls = TlsAcceptor::from(Arc::new(authority.server(&leaf)));
    for (pki, trusted) in [(&authority, true), (&Pki::new(), false)] {
        let edge = Edge::start().await;
        let mut config = edge.config();
        config.provider_http.ca = Some(pki.directory.join("ca.pem"));
        let _agent = Agent::start(config);
        let base_url = format!("https://localhost:{}", provider.port());
        let mut conn = edge
            .ready(payload(vec![Adapter {
                base_url,
                ..adapter(1, 1)
            }]))
            .await;
        let mut request = tunnel("r", b"");
        request.method = "GET".to_owned();
        conn.open(request).await;
        let served = within("the provider's handshake", answer_tls(&provider, &tls)).await;
        let answer = conn.answer("r").await;
        assert_eq!(served.is_ok(), trusted);
        if trusted {
            assert_eq!(answer.body, b"secret");
        } else {
            assert_eq!(answer.error(), "provider unreachable: cannot connect");
        }
    }
}

#[tokio::test]
async fn a_long_body_delays_no_heartbeat() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let mut conn = edge.ready(payload(vec![adapter(provider.port(), 4)])).await;
    conn.open(tunnel("r", b"{}")).await;
    let mut call = provider.request().await;
    let size = 64 * 1024 * 1024;
    let writer = tokio::spawn(async move { call.answer("200 OK", &vec![7; size]).await });
    let mut answer = Answer::default();
    answer.take(conn.frame().await);
    for seq in 1..=8 {
        conn.send(0, Message::Ping(Ping { seq })).await;
        while conn.pongs.len() < usize::try_from(seq).unwrap() {
            answer.take(conn.frame().await);
        }
        // Far less than the whole body lies between a ping and its pong.
        assert!(
            answer.body.len() < size / 2,
            "pong {seq} behind {}",
            answer.body.len()
        );
    }
    while answer.terminal.is_none() {
        answer.take(conn.frame().await);
    }
    assert!(answer.is_complete() && answer.body.len() == size);
    within("the provider", writer).await.unwrap();
}
