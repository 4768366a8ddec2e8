//! A node far away, on a link that takes its time.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use iop_proto::domain::{Features, Message, Ping};
use iop_proto::view::TunnelFrameOut;

use crate::support::{CATALOG, Client, Edge, Node, Setup, chat, node_tls};

const ONE_WAY: Duration = Duration::from_millis(25);
const BYTES_PER_SECOND: u32 = 32 << 20;
const PIECE: usize = 64 * 1024;
/// What the link's queue holds: several times what is on its way at once.
const QUEUED: usize = 128;

type Due = (Instant, Vec<u8>);

/// A link of its own to `to`, for one connection: as fast and as late either way as said above.
fn link(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        let (near, _) = listener.accept().expect("a connection");
        let far = TcpStream::connect(to).expect("somebody listens");
        let copy = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
        for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
            to.set_nodelay(true).expect("a TCP socket");
            let (queue, due) = sync_channel(QUEUED);
            std::thread::spawn(move || take_in(from, &queue));
            std::thread::spawn(move || hand_over(&due, to));
        }
    });
    address
}

fn take_in(mut from: TcpStream, queue: &SyncSender<Due>) {
    let mut free = Instant::now();
    let mut bytes = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let takes = Duration::from_secs(1) * count as u32 / BYTES_PER_SECOND;
        free = free.max(Instant::now()) + takes;
        if queue
            .send((free + ONE_WAY, bytes[..count].to_vec()))
            .is_err()
        {
            return;
        }
    }
}

fn hand_over(due: &Receiver<Due>, mut to: TcpStream) {
    for (at, bytes) in due {
        // The length of the link; nothing is waited for here.
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _gone = to.shutdown(Shutdown::Write);
}

/// How long `bytes` take over a link of their own until the far end has them all and has said so.
fn plain(bytes: usize) -> Duration {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let end = listener.local_addr().expect("it is bound");
    let sink = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut left = bytes;
        let mut buffer = vec![0; PIECE];
        while left > 0 {
            let count = stream.read(&mut buffer).expect("the rest");
            assert!(count > 0, "{left} bytes are missing");
            left -= count;
        }
        stream.write_all(b"!").expect("it waits");
    });
    let mut stream = TcpStream::connect(link(end)).expect("the link");
    let began = Instant::now();
    let piece = vec![7; PIECE];
    for _ in 0..bytes / PIECE {
        stream.write_all(&piece).expect("it is read");
    }
    stream.read_exact(&mut [0]).expect("its word");
    sink.join().expect("it has read all");
    began.elapsed()
}

/// How long an answer of `bytes` takes from the node's first frame until the client has it.
fn answered(node: &mut Node, mut client: Client, bytes: usize) -> (Client, Duration) {
    client.send(&chat("m1", false));
    let run = loop {
        match node.receive() {
            Message::TunnelRequest(request) => break request.run_id,
            Message::Window(_) => {} // of the answer before, which needed no more
            other => panic!("expected a tunnel request, got {other:?}"),
        }
    };
    let length = bytes.to_string();
    let headers: &[(&[u8], &[u8])] = &[(b"content-length", length.as_bytes())];
    let began = Instant::now();
    let reader = std::thread::spawn(move || {
        let head = client.head().expect("an answer");
        let (body, whole) = client.body(&head);
        assert!(whole && body.len() == bytes);
        (client, Instant::now())
    });
    node.frame(&TunnelFrameOut::response_start(&run, 1, 200, headers));
    let piece = vec![7; PIECE];
    let (mut granted, mut sent) = (0, 0);
    for sequence in (2..).take(bytes / PIECE) {
        sent += PIECE as u64;
        while granted < sent {
            match node.receive() {
                Message::Window(window) => granted = window.bytes,
                other => panic!("expected Window, got {other:?}"),
            }
        }
        node.frame(&TunnelFrameOut::body(&run, sequence, &piece));
    }
    node.frame(&TunnelFrameOut::end(&run, 2 + (bytes / PIECE) as u64));
    let (client, ended) = reader.join().expect("a reader");
    (client, ended - began)
}

/// An answer of a node that paces itself is no slower over 50 ms there and back than the link is. The
/// machine may be slow for a while: one of a few tries shows it.
///
/// Proves [P-69].
#[test]
fn p69_one_answer_fills_a_long_link_as_plain_tcp_does() {
    const BYTES: usize = 96 << 20;
    const TRIES: usize = 4;
    let edge = Edge::start(&Setup::with(CATALOG));
    let mut node = Node::connect_over(link(edge.nodes), node_tls(&edge.directory, "n1"));
    node.become_ready("n1");
    node.send(&Message::Features(Features { window: true }));
    node.send(&Message::Ping(Ping { seq: 1 }));
    while !matches!(node.try_receive_any().expect("a pong"), Message::Pong(_)) {}
    let mut client = Client::connect(&edge);
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let took;
        (client, took) = answered(&mut node, client, BYTES);
        seen.push((took, plain(BYTES)));
        let (took, plain) = seen[seen.len() - 1];
        if took.as_secs_f64() <= plain.as_secs_f64() / 0.9 {
            drop((client, node));
            edge.wait_idle();
            return;
        }
    }
    panic!("through an Edge, and without: {seen:?}");
}
