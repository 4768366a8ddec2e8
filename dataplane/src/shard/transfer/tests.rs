//! Two shards turned by hand: one has a client, the other the node's session, and control's ends of
//! both links are the test's.
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use iop_control::names::{ModelName, Names};
use iop_control::step::Effect;
use iop_proto::ids::{BootNonce, ClientRef, SlotGeneration};
use iop_proto::reason::Reason;

use super::*;
use crate::cold::access_log::AccessLog;
use crate::config::{AccessLog as Choice, EdgeConfig, Host};
use crate::epoch::{Current, Epoch};
use crate::front::handover::{ClientHandover, NodeHandover, door};
use crate::lanes::{ControlEnd, link};
use crate::metrics::ShardMetrics;
use crate::shard::session::Standing;
use crate::shard::{ShardConfig, ShardParts};

const FILE: &str = "\
listeners: {nodes: 127.0.0.1:7443, clients: 127.0.0.1:8080, insecure_plaintext_nodes: true}
shards: 2
limits: {clients_max: 2, output_pool_bytes: 4 MiB, body_pool_bytes: 4_000_000,
  body_bytes_max: 1_000_000, receive_buffers: 2}
ingress: {tolerate_half_close: true}
nodes:
  - id: n1
    adapters: [{name: vllm, type: vllm, base_url: http://127.0.0.1:8000}]
    providers: [{id: p1, adapter: vllm, target: t1, capacity: 1}]
models: [{name: m1, providers: [p1]}]
";

/// What any wait here takes at most.
const DEADLINE: Duration = Duration::from_secs(30);

struct Side {
    shard: Shard,
    control: ControlEnd,
}

impl Side {
    /// Completions are waited for a moment, then one turn is made of them.
    fn turn(&mut self) {
        self.shard.ring.submit_and_wait(Duration::from_millis(5));
        self.shard.turn();
    }

    fn event(&mut self) -> Event {
        let began = Instant::now();
        loop {
            if let Some(event) = self.control.events.pop() {
                return event;
            }
            assert!(began.elapsed() < DEADLINE, "control is told nothing");
            self.turn();
        }
    }

    fn effect(&mut self, effect: Effect) {
        assert!(self.control.effects.push(effect).is_ok());
        self.turn();
    }
}

/// Shard 0 has the clients, shard 1 the node.
struct Rig {
    config: EdgeConfig,
    a: Side,
    b: Side,
    session: SessionRef,
    node: UnixStream,
}

impl Rig {
    fn new() -> Self {
        let host = Host {
            memory_bytes: Some(8 << 30),
            cores: vec![0, 1],
        };
        let config = EdgeConfig::parse_for(FILE, "edge.yaml", &host).unwrap();
        let names = Current::new(Arc::clone(&config.names));
        let to = Box::new(std::io::sink());
        let log = AccessLog::spawn(Choice::Off, 2, names, SystemTime::now(), to);
        let mut sinks = log.unwrap().1;
        let wakers = [Waker::new().unwrap(), Waker::new().unwrap()];
        let mut peers = Peers::mesh(&wakers);
        let started = Instant::now();
        let mut side = |index: usize| {
            let waker = &wakers[index];
            let (lanes, control) = link(waker, &Waker::new().unwrap());
            let shard = Shard::new(ShardParts {
                index: ShardIndex::new(index).unwrap(),
                config: ShardConfig::new(&config),
                epoch: Arc::new(Epoch::new(0, &config)),
                nonce: BootNonce(1),
                request_seed: 1,
                started,
                epoch_s: 0,
                lanes,
                arrivals: door(waker.clone()).1,
                waker: waker.clone(),
                metrics: ShardMetrics::new().0,
                access: sinks.remove(0),
                peers: peers.remove(0),
                answers: crossbeam_channel::bounded(1).0,
                issuer: None,
            });
            let shard = shard.expect("a ring");
            Side { shard, control }
        };
        let (a, mut b) = (side(0), side(1));
        let (near, node) = UnixStream::pair().unwrap();
        node.set_read_timeout(Some(DEADLINE)).unwrap();
        b.shard.session_arrives(NodeHandover {
            fd: near.into(),
            records: None,
            early: Vec::new(),
            certificate_name: None,
            not_after_unix: i64::MAX,
            peer: ([127, 0, 0, 1], 1).into(),
        });
        let open = |session: &super::super::session::Session| session.fd.is_some();
        let row = b.shard.sessions.iter().position(open).unwrap();
        b.shard.sessions[row].standing = Standing::Ready;
        let session = b.shard.sessions[row].reference(b.shard.index, row);
        Self {
            config,
            a,
            b,
            session,
            node,
        }
    }

    /// A client of shard 0 asks for `model`, with `early` behind its request; where it waits.
    fn asks(&mut self, client: &mut UnixStream, model: &str, early: &str) -> (ClientRef, usize) {
        client.write_all(request(model).as_bytes()).unwrap();
        client.write_all(early.as_bytes()).unwrap();
        let Event::Submit { client, .. } = self.a.event() else {
            panic!("its request was not submitted");
        };
        (client, client.slot as usize)
    }

    fn client(&mut self) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(DEADLINE)).unwrap();
        self.a.shard.client_arrives(ClientHandover {
            fd: near.into(),
            records: None,
            early: Vec::new(),
            peer: ([127, 0, 0, 1], 2).into(),
        });
        far
    }

    /// Control grants the run and shard 0 sends its client.
    fn moves(&mut self, client: ClientRef, granted: Granted) {
        let Granted {
            run,
            session,
            provider,
        } = granted;
        self.a.effect(Effect::Grant {
            client,
            run,
            session,
            provider,
        });
        let began = Instant::now();
        while !self.b.shard.peers.is_waiting() {
            assert!(began.elapsed() < DEADLINE, "it does not move");
            self.a.turn();
        }
    }

    /// `ms` pass.
    fn later(&mut self, ms: u64) {
        for side in [&mut self.a, &mut self.b] {
            side.shard.started -= Duration::from_millis(ms);
            side.turn();
        }
    }

    /// Run 0 of shard 1, in its `tenant`-th use.
    fn granted(&self, tenant: u32) -> Granted {
        Granted {
            run: RunRef {
                shard: self.b.shard.index,
                slot: 0,
                generation: SlotGeneration::new(tenant).unwrap(),
            },
            session: self.session,
            provider: ProviderIndex::new(0).unwrap(),
        }
    }

    /// Shard 1 sends the node the request of `run`.
    fn begins(&mut self, run: RunRef) {
        assert_eq!(self.b.event(), Event::Begun { run });
        self.b.turn(); // what that turn queued is submitted
        let mut bytes = [0; 4096];
        let length = self.node.read(&mut bytes).unwrap();
        let whole = bytes[..length].windows(2).any(|pair| pair == b"t1");
        assert!(whole, "the request names the provider's target");
    }
}

fn body_of(model: &str) -> String {
    format!("{{\"model\":\"{model}\"}}")
}

fn request(model: &str) -> String {
    let body = body_of(model);
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// A client that sent ahead is watched by a poll. It half-closes when its run has just been granted
/// elsewhere: the hang-up completes the poll, and the cancel finds nothing. It moves all the same.
#[test]
fn a_client_whose_hang_up_overtakes_the_cancel_of_its_poll_moves() {
    let mut rig = Rig::new();
    let mut client = rig.client();
    let (reference, row) = rig.asks(&mut client, "m1", "\r\n");
    let Granted {
        run,
        session,
        provider,
    } = rig.granted(1);
    let shard = &mut rig.a.shard;
    assert!(shard.clients[row].polling);
    client.shutdown(Shutdown::Write).unwrap();
    shard.ring.submit_and_wait(DEADLINE); // the poll has completed; nobody has looked at it
    shard.grant(reference, run, session, provider, None);
    assert!(matches!(shard.clients[row].phase, Phase::Leaving { .. }));
    while rig.a.shard.clients[row].polling {
        rig.a.turn();
    }
    assert!(rig.b.shard.peers.is_waiting(), "it is on its way");
    rig.begins(run);
}

/// What the client is sent until `end`, read while its shard turns.
fn read_until(side: &mut Side, client: &mut UnixStream, end: &str) -> Vec<u8> {
    let (mut read, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
    let began = Instant::now();
    client.set_nonblocking(true).unwrap();
    while !read.ends_with(end.as_bytes()) {
        match client.read(&mut piece) {
            Ok(length) => {
                assert!(length > 0, "cut off");
                read.extend_from_slice(&piece[..length]);
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
        assert!(began.elapsed() < DEADLINE, "{} bytes came", read.len());
        side.turn();
    }
    client.set_nonblocking(false).unwrap();
    read
}

/// A client that does not take what it was sent before cannot move. Its run comes back once, when
/// control's time for it to begin is over; it is told so where it is, and moves another time, to a
/// slot that control had ended meanwhile.
#[test]
fn a_client_that_cannot_leave_gives_its_run_back_in_time() {
    const BYTES: usize = 1 << 20; // more than a socket takes
    let mut rig = Rig::new();
    let dispatch_ms = rig.config.names.queue.dispatch_ms;
    let mut far = rig.client();
    let (waits, row) = rig.asks(&mut far, "m1", "");
    rig.a.shard.send_to(row, &vec![b'x'; BYTES]);
    rig.a.turn();
    let granted = rig.granted(1);
    let Granted {
        run,
        session,
        provider,
    } = granted;
    rig.a.effect(Effect::Grant {
        client: waits,
        run,
        session,
        provider,
    });
    rig.later(dispatch_ms - 1_000);
    assert_eq!(rig.a.shard.clients[row].phase, Phase::Leaving { granted });
    assert_eq!(rig.a.control.events.pop(), None);
    rig.later(1_000 + 2 * SWEEP_MS);
    let client = Some(waits);
    let told = Some(Event::NotSent { run, client });
    assert_eq!(rig.a.control.events.pop(), told);
    assert!(!rig.b.shard.peers.is_waiting());

    let reason = Reason::DispatchTimeout;
    rig.b.effect(Effect::Cancel { run, reason });
    rig.a.effect(Effect::Refuse {
        client: waits,
        reason,
        retry_after_s: 1,
    });
    let read = read_until(&mut rig.a, &mut far, "}");
    let (before, answer) = read.split_at(BYTES);
    assert!(before.iter().all(|&byte| byte == b'x'));
    let answer = std::str::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("dispatch_timeout"), "{answer}");

    let (waits, _) = rig.asks(&mut far, "m1", "");
    let granted = rig.granted(2);
    rig.moves(waits, granted);
    rig.begins(granted.run);
}

/// A reload adds a model, and the node's shard is late to take it: a client that asks for the model
/// arrives there first. It is served, and its body kept for a second run.
#[test]
fn a_client_that_overtakes_a_reload_on_its_way_is_served() {
    let mut rig = Rig::new();
    let mut fresh = Names::clone(&rig.config.names);
    let name = String::from("m2");
    let before = fresh.models[0].clone();
    fresh.models.push(ModelName { name, ..before });
    let names = rig.config.names.succeed(&fresh).unwrap().names;
    rig.config.names = Arc::new(names);
    let epoch = Arc::new(Epoch::new(1, &rig.config));
    let takes = |side: &mut Side| {
        assert!(side.control.epochs.push(Arc::clone(&epoch)).is_ok());
        let shard = side.shard.index;
        side.effect(Effect::Configure { shard, epoch: 1 });
        assert_eq!(side.shard.epoch.number, 1);
    };
    takes(&mut rig.a);
    let mut client = rig.client();
    let (reference, _) = rig.asks(&mut client, "m2", "");
    let granted = rig.granted(1);
    rig.moves(reference, granted);
    rig.begins(granted.run);
    assert_eq!(rig.b.shard.epoch.number, 0, "it was there before");
    let body = &mut rig.b.shard.runs[granted.run.slot as usize].request.body;
    assert_eq!(body.bytes(), 0);
    assert!(body.rewind());
    assert_eq!(body.bytes(), body_of("m2").len() as u64);
    takes(&mut rig.b);
}
