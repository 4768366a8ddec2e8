//! Descriptors of the front: none leaks, and running out of them is a pause. A process of its own,
//! since both count or limit what the whole process holds.
//!
//! Lives on: one test thread and the front's. Bound: a few dozen connections.
#![expect(clippy::unwrap_used, reason = "a helper's panic is its test's failure")]
mod tls_support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use iop_dataplane::front::PeerKind;
use rustls::StreamOwned;
use socket2::{Domain, Socket, Type};
use tls_support::front::*;
use tls_support::*;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until the process holds `expected` descriptors.
fn settle(expected: usize, when: &str) {
    let deadline = Instant::now() + DEADLINE;
    while open_descriptors() != expected {
        assert!(
            Instant::now() < deadline,
            "{when}: {} descriptors, not {expected}",
            open_descriptors()
        );
        std::thread::yield_now();
    }
}

#[test]
fn descriptors_come_back_and_running_out_of_them_is_a_pause() {
    let ca = Ca::new();
    let node = ca.sign(&Leaf::node(NODE_URI));
    let stranger = Ca::new().sign(&Leaf::node(NODE_URI));
    let tls = node_tls(&ca);
    let none = open_descriptors();
    drop(World::new(tls.clone(), |_| {}));
    // The runtime keeps its eventfd; a process has one front.
    settle(none + 1, "after an idle front");
    let before = open_descriptors();
    let mut world = World::new(tls, |config| config.live.handshake_ms = 2_000);
    let running = open_descriptors();

    for round in 0..10 {
        let mut good = StreamOwned::new(Peer::node(&node).connection(&ca), dial(&world));
        good.flush().unwrap();
        drop(world.node());
        read_to_end(&mut good.sock);
        let mut bad = StreamOwned::new(Peer::node(&stranger).connection(&ca), dial(&world));
        write_what_goes(&mut bad, b"x");
        read_to_end(&mut bad.sock);
        let mut plain = dial(&world);
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        read_to_end(&mut plain);
        drop(dial(&world)); // gone before a byte
        let silent = dial(&world);
        drop(TcpStream::connect(world.clients).unwrap());
        drop(world.client());
        drop((good, bad, plain));
        settle_round(&world, round);
        drop(silent);
        world.skip_seen(1);
    }
    settle(running, "after the rounds");

    pause_and_resume(&mut world);
    settle(running, "after the pause");
    drop(world); // stops the front
    settle(before + 1, "after the stop");
}

/// Five nodes and a client were accepted; all but the silent one have ended.
fn settle_round(world: &World, round: usize) {
    let (mut accepted, mut ended) = (0, 0);
    for _ in 0..11 {
        match world.seen() {
            Seen::Accepted(_) => accepted += 1,
            Seen::HandedOver(_) | Seen::Refused(..) => ended += 1,
            Seen::Paused(kind) => panic!("{kind:?} paused in round {round}"),
            Seen::Closed(kind) => panic!("{kind:?} closed in round {round}"),
        }
    }
    assert_eq!((accepted, ended), (6, 5), "round {round}");
}

fn dial(world: &World) -> TcpStream {
    let stream = TcpStream::connect(world.nodes).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Without a descriptor to spare, accept pauses and comes back rather than spin; the connection that
/// waited is served once there is one.
fn pause_and_resume(world: &mut World) {
    let [first, second] = [(); 2].map(|()| Socket::new(Domain::IPV4, Type::STREAM, None).unwrap());
    let lowest_free = first.try_clone().unwrap();
    let old = limit_descriptors(u64::try_from(lowest_free.as_raw_fd()).unwrap());
    drop(lowest_free);
    // The accept that waited already was begun under the old limit.
    first.connect(&world.nodes.into()).unwrap();
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    assert_eq!(world.seen(), Seen::Paused(PeerKind::Node));
    let paused = Instant::now();
    second.connect(&world.nodes.into()).unwrap();
    assert_eq!(world.seen(), Seen::Paused(PeerKind::Node));
    assert!(paused.elapsed() >= Duration::from_millis(50), "it spins");
    limit_descriptors(old);
    assert_eq!(world.seen(), Seen::Accepted(PeerKind::Node));
    let mut stream = TcpStream::from(second);
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"not TLS").unwrap();
    let mut alert = [0; 7];
    stream.read_exact(&mut alert).unwrap();
    assert_eq!(alert, [21, 3, 3, 0, 2, 2, 10]);
}

/// Sets the soft limit; returns the one before.
fn limit_descriptors(soft: u64) -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a live rlimit; the hard limit is left as it is.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let old = limit.rlim_cur;
        limit.rlim_cur = soft;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        old
    }
}
