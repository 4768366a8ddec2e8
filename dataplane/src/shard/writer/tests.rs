//! Requests on their way to a node: what is counted from when they begin; and runs whose requests do not
//! go out, each reported once and its client told, even if the output pool has no block left.
use std::io::Read as _;
use std::os::unix::net::UnixStream;

use iop_proto::ids::{Now, ProviderIndex, RunRef, ShardIndex, SlotGeneration};

use super::*;
use crate::front::handover::ClientHandover;
use crate::metrics::ShardMetric;
use crate::shard::client::Phase;
use crate::shard::session::tests::Rig;

const BODY: &str = "{\"model\":\"m1\"}";

/// A client of the shard's, and the row it got.
fn client(rig: &mut Rig, bytes: &str) -> (UnixStream, usize) {
    let row = *rig.shard.free_clients.last().unwrap() as usize;
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    rig.shard.client_arrives(ClientHandover {
        fd: near.into(),
        records: None,
        early: bytes.as_bytes().to_vec(),
        peer: ([127, 0, 0, 1], 2).into(),
    });
    (far, row)
}

/// A client whose request waits in its session's queue; its run.
fn asked(rig: &mut Rig) -> (UnixStream, usize, RunRef) {
    let length = BODY.len();
    let text = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ncontent-length: {length}\r\n\r\n{BODY}"
    );
    let (far, row) = client(rig, &text);
    assert_eq!(rig.shard.clients[row].phase, Phase::Waiting);
    let run = RunRef {
        shard: ShardIndex::new(0).unwrap(),
        slot: 0,
        generation: SlotGeneration::FIRST,
    };
    let (client, session) = (
        rig.shard.client_reference(row),
        rig.shard.session_reference(rig.row),
    );
    let provider = ProviderIndex::new(0).unwrap();
    rig.shard.grant(client, run, session, provider, None);
    assert_eq!(rig.shard.runs[0].stage, Stage::Queued);
    while rig.event().is_some() {}
    (far, row, run)
}

/// The reports of `run` since the last look, each with its client.
fn reports(rig: &mut Rig, run: RunRef) -> Vec<bool> {
    let mut seen = Vec::new();
    while let Some(event) = rig.event() {
        match event {
            Event::NotSent { run: told, client } if told == run => seen.push(client.is_some()),
            other => panic!("{other:?}"),
        }
    }
    seen
}

/// What a run has waited for its issuer, and in its session's queue, is not the node's time.
#[test]
fn d29_the_response_wait_is_counted_from_when_the_request_begins() {
    let mut rig = Rig::ready();
    let (_far, row, _run) = asked(&mut rig);
    let (wait_ms, queued_ms) = (rig.shard.runs[0].response_wait_ms, 4_000);
    rig.shard.now = Now::default().after_ms(queued_ms);
    rig.shard.begin_bulk(rig.row, 0).unwrap();
    assert_eq!(rig.shard.runs[0].stage, Stage::Begun);
    rig.shard.now = Now::default().after_ms(queued_ms + wait_ms - 1);
    rig.shard.run_due(0);
    assert_eq!(rig.shard.clients[row].phase, Phase::Running { run: 0 });
    rig.shard.now = Now::default().after_ms(queued_ms + wait_ms);
    rig.shard.run_due(0);
    assert_eq!(rig.shard.clients[row].reason, Some(Reason::ResponseTimeout));
}

/// With nobody to take a block from, the client breaks while it is told; its run is over before that.
#[test]
fn a_run_that_cannot_be_refused_for_want_of_output_is_reported_once() {
    let mut rig = Rig::ready();
    let (_far, row, run) = asked(&mut rig);
    let pool = &mut rig.shard.sender.pool;
    let mut held = Chain::EMPTY;
    while pool.append(&mut held, &[0; 1024]).is_ok() {}
    assert_eq!(pool.left(), 0);
    rig.shard.runs[0].asked = true;
    rig.shard.take_back(0, Reason::CredentialFailed);
    assert_eq!(reports(&mut rig, run), [false]);
    assert_eq!(rig.shard.runs_live, 0);
    assert!(rig.shard.sessions[rig.row].writer.first == NONE);
    assert!(matches!(
        rig.shard.clients[row].phase,
        Phase::Closing | Phase::Free
    ));
    assert_eq!(rig.shard.clients[row].reason, Some(Reason::OutputPoolFull));
}

/// A client that takes nothing of what fills the pool gives way to one that is told why its run failed.
#[test]
fn a_refused_client_is_told_so_at_the_cost_of_who_fills_the_pool() {
    let mut rig = Rig::ready();
    let (_idle, other) = client(&mut rig, "");
    let (mut far, row, run) = asked(&mut rig);
    assert_ne!(row, other);
    let Shard {
        clients, sender, ..
    } = &mut rig.shard;
    let pending = &mut clients[other].output.pending;
    while sender.pool.append(pending, &[0; 1024]).is_ok() {}
    assert_eq!(sender.pool.left(), 0);
    rig.shard.runs[0].asked = true;
    rig.shard.take_back(0, Reason::CredentialFailed);
    assert_eq!(reports(&mut rig, run), [false]);
    assert_eq!(rig.shard.clients[row].phase, Phase::Flushing);
    assert_eq!(rig.shard.clients[other].reason, Some(Reason::ClientTooSlow));
    rig.shard.flush_client(row);
    rig.shard.ring.submit();
    let mut told = [0; 4096];
    let length = far.read(&mut told).unwrap();
    assert!(told[..length].starts_with(b"HTTP/1.1 503 "));
    assert_eq!(rig.shard.metrics.get(ShardMetric::Responses5xx), 1);
}

/// A peer that pings and takes none of the answers would fill the shard's pool with them.
#[test]
fn while_the_socket_takes_nothing_the_newest_ping_stands_for_all() {
    let mut rig = Rig::ready();
    let row = rig.row;
    let before = rig.shard.metrics.get(ShardMetric::EnvelopesSent);
    for seq in 1..=100 {
        rig.shard.queue_pong(row, seq).unwrap();
        rig.shard.pump_session(row);
    }
    let sent = rig.shard.metrics.get(ShardMetric::EnvelopesSent) - before;
    assert_eq!((sent, rig.shard.sessions[row].writer.pong), (1, Some(100)));
    // It has taken that one.
    let armed = rig.shard.sessions[row].writer.armed.unwrap();
    rig.shard.session_sent(row, i32::try_from(armed).unwrap());
    rig.shard.pump_session(row);
    let sent = rig.shard.metrics.get(ShardMetric::EnvelopesSent) - before;
    assert_eq!((sent, rig.shard.sessions[row].writer.pong), (2, None));
}

/// Nobody to take a block from, and a client that is answered while its bytes are still being read: it is
/// closing until the turn is over, and then its slot is free, once.
#[test]
fn a_client_that_cannot_be_answered_frees_its_slot_once() {
    let mut rig = Rig::ready();
    let pool = &mut rig.shard.sender.pool;
    let mut held = Chain::EMPTY;
    while pool.append(&mut held, &[0; 1024]).is_ok() {}
    let free = rig.shard.free_clients.len();
    let (_far, row) = client(&mut rig, "GET /nowhere HTTP/1.1\r\nhost: edge\r\n\r\n");
    assert_eq!(rig.shard.clients[row].phase, Phase::Closing);
    assert_eq!(
        rig.shard.free_clients.len(),
        free - 1,
        "somebody is at work on it"
    );
    while rig.shard.clients[row].operations > 0 {
        rig.shard.ring.submit();
        rig.shard.turn();
    }
    rig.shard.turn();
    assert_eq!(rig.shard.clients[row].phase, Phase::Free);
    assert_eq!(rig.shard.free_clients.len(), free);
    assert_eq!(rig.shard.metrics.get(ShardMetric::ClientsReleased), 1);
}

/// Whoever is closed for want of room gives its block back when the kernel has let go of it: nobody else
/// is closed for the same room.
#[test]
fn room_that_comes_by_itself_ends_nobody_else() {
    let mut rig = Rig::ready();
    let (_first, one) = client(&mut rig, "");
    let (_second, other) = client(&mut rig, "");
    let Shard {
        clients, sender, ..
    } = &mut rig.shard;
    for row in [one, other] {
        let pending = &mut clients[row].output.pending;
        sender.pool.append(pending, &[0; 1024]).unwrap();
    }
    let mut held = Chain::EMPTY;
    while sender.pool.left() > 1 {
        sender.pool.append(&mut held, &[0; 1024]).unwrap();
    }
    // The sends of both are in the kernel, which may read what it was given.
    for row in [one, other] {
        rig.shard.arm_client_send(row);
        assert!(rig.shard.clients[row].output.is_armed());
    }
    let closing = |rig: &Rig| {
        let phases = [one, other].map(|row| rig.shard.clients[row].phase == Phase::Closing);
        phases.iter().filter(|&&closing| closing).count()
    };
    for _ in 0..2 {
        rig.shard.make_room(1);
        assert_eq!(closing(&rig), 1);
    }
}
