//! A shard between a node's socket and control's end of its link, both in the test's hands.
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Instant, SystemTime};

use iop_control::names::{Names, NodeName};
use iop_proto::domain::{Message, RegisterRequest};
use iop_proto::ids::BootNonce;
use iop_proto::map;

use super::*;
use crate::cold::access_log::AccessLog;
use crate::config::{AccessLog as Choice, EdgeConfig, Host};
use crate::epoch::{Current, Epoch};
use crate::front::handover::door;
use crate::lanes::{ControlEnd, Waker, link};
use crate::metrics::ShardMetrics;
use crate::shard::transfer::Peers;
use crate::shard::{ShardConfig, ShardParts};

const FILE: &str = "\
listeners: {nodes: 127.0.0.1:7443, clients: 127.0.0.1:8080}
pki: {trust_domain: iop.test, edge_name: edge-1, ca: ca.crt, certificate: edge.crt, key: edge.key}
limits: {clients_max: 2, output_pool_bytes: 1 MiB, body_pool_bytes: 2_000_000,
  body_bytes_max: 1_000_000, receive_buffers: 2}
nodes:
  - id: n1
    adapters: [{name: vllm, type: vllm, base_url: http://127.0.0.1:8000}]
    providers: [{id: p1, adapter: vllm, target: t1, capacity: 1}]
models: [{name: m1, providers: [p1]}]
keys: [{principal: alice,
  sha256: 00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF}]
";

pub(in crate::shard) struct Rig {
    pub shard: Shard,
    control: ControlEnd,
    config: EdgeConfig,
    pub row: usize,
    _node: UnixStream,
}

impl Rig {
    /// A node has arrived whose certificate bears `certificate_name`.
    fn new(certificate_name: Option<&str>) -> Self {
        Self::of(FILE, certificate_name)
    }

    /// A node that may be asked, and callers without keys.
    pub(in crate::shard) fn ready() -> Self {
        let (file, _keys) = FILE.split_once("keys:").unwrap();
        let mut rig = Self::of(file, Some("n1"));
        rig.shard.sessions[rig.row].standing = Standing::Ready;
        rig
    }

    fn of(file: &str, certificate_name: Option<&str>) -> Self {
        let host = Host {
            memory_bytes: Some(8 << 30),
            cores: vec![0],
        };
        let config = EdgeConfig::parse_for(file, "edge.yaml", &host).unwrap();
        let names = Current::new(Arc::clone(&config.names));
        let to = Box::new(io::sink());
        let log = AccessLog::spawn(Choice::Off, 1, names, SystemTime::now(), to);
        let wakers = [Waker::new().unwrap()];
        let (lanes, control) = link(&wakers[0], &Waker::new().unwrap());
        let mut shard = Shard::new(ShardParts {
            index: ShardIndex::new(0).unwrap(),
            config: ShardConfig::new(&config),
            epoch: Arc::new(Epoch::new(0, &config)),
            nonce: BootNonce(1),
            request_seed: 1,
            started: Instant::now(),
            epoch_s: 0,
            lanes,
            arrivals: door(wakers[0].clone()).1,
            waker: wakers[0].clone(),
            metrics: ShardMetrics::new().0,
            access: log.unwrap().1.remove(0),
            peers: Peers::mesh(&wakers).remove(0),
            answers: crossbeam_channel::bounded(1).0,
            issuer: None,
        })
        .expect("a ring");
        let (near, far) = UnixStream::pair().unwrap();
        shard.session_arrives(NodeHandover {
            fd: near.into(),
            records: None,
            early: Vec::new(),
            certificate_name: certificate_name.map(Into::into),
            not_after_unix: i64::MAX,
            peer: ([127, 0, 0, 1], 1).into(),
        });
        let open = |session: &Session| session.state == State::Open;
        let row = shard.sessions.iter().position(open).unwrap();
        Self {
            shard,
            control,
            config,
            row,
            _node: far,
        }
    }

    pub(in crate::shard) fn event(&mut self) -> Option<Event> {
        self.shard.outbox.push(&mut self.shard.lanes.events);
        self.control.events.pop()
    }

    /// The node claims `n1`; what control is asked.
    fn claims(&mut self) -> (SessionRef, u64, Option<NodeIndex>, Option<NodeIndex>) {
        let request = Message::RegisterRequest(RegisterRequest {
            node_id: "n1".into(),
            ..RegisterRequest::default()
        });
        let (_, payload) = map::encode(&request);
        self.shard.register(self.row, 7, &payload).unwrap();
        match self.event() {
            Some(Event::Register {
                session,
                reply_to,
                claimed,
                certified,
            }) => (session, reply_to, claimed, certified),
            other => panic!("{other:?}"),
        }
    }

    /// Control tells the shard of a changed file.
    fn reload(&mut self, change: impl FnOnce(&mut Names)) {
        let mut fresh = Names::clone(&self.config.names);
        change(&mut fresh);
        let names = self.config.names.succeed(&fresh).unwrap().names;
        self.config.names = Arc::new(names);
        let number = self.shard.epoch.number + 1;
        let epoch = Arc::new(Epoch::new(number, &self.config));
        assert!(self.control.epochs.push(epoch).is_ok());
        self.shard.configure(number);
    }
}

/// A claim judged by the table before a reload is answered behind it: what the reload has taken the
/// certificate from owns no node.
#[test]
fn a_claim_that_a_reload_overtakes_is_judged_by_the_certificates_behind_it() {
    let rename = |names: &mut Names| names.nodes[0].certificate_name = "other".into();
    let pass_on = |names: &mut Names| {
        let id = "n9".into();
        let heir = names.nodes[0].clone();
        names.nodes[0].certificate_name = "other".into();
        names.nodes.push(NodeName { id, ..heir });
    };
    let remove = |names: &mut Names| {
        names.nodes.clear();
        names.providers.clear();
        names.models.clear();
    };
    type Change = fn(&mut Names);
    let cases: [(Option<&str>, Change, bool); 6] = [
        (Some("n1"), |_| {}, true),
        (Some("n1"), |names| names.models[0].created += 1, true),
        (None, rename, true),
        (Some("n1"), rename, false),
        (Some("n1"), pass_on, false),
        (Some("n1"), remove, false),
    ];
    for (case, (name, change, is_kept)) in cases.into_iter().enumerate() {
        let mut rig = Rig::new(name);
        let (session, reply_to, claimed, certified) = rig.claims();
        let node = NodeIndex::new(0);
        assert_eq!(
            (claimed, certified),
            (node, node),
            "by the table of its time"
        );
        rig.reload(change);
        let (row, refusal) = (rig.row, None);
        rig.shard
            .register_reply(session, reply_to, node, refusal, false);
        let told = rig.event();
        if is_kept {
            assert_eq!(
                rig.shard.sessions[row].standing,
                Standing::Pending,
                "{case}"
            );
            assert_eq!(told, None, "{case}");
        } else {
            let cause = Reason::NodeNotCertified;
            assert_eq!(told, Some(Event::Closed { session, cause }), "{case}");
            assert_eq!(rig.shard.sessions[row].standing, Standing::Identified);
        }
    }
}

/// Each answer holds a configuration until the node takes it: one that asks on and reads nothing is a
/// flood.
#[test]
fn answers_that_a_node_does_not_take_count_as_owed() {
    let mut rig = Rig::new(Some("n1"));
    let row = rig.row;
    let answer = |rig: &mut Rig| {
        let (session, reply_to, claimed, _) = rig.claims();
        rig.shard
            .register_reply(session, reply_to, claimed, None, false);
        rig.shard.pump_session(row);
    };
    let (_, payload) = map::encode(&Message::RegisterRequest(RegisterRequest {
        node_id: "n1".into(),
        ..RegisterRequest::default()
    }));
    for _ in 0..REPLIES_PER_SESSION_MAX {
        answer(&mut rig);
    }
    assert!(rig.shard.sessions[row].writer.is_armed(), "nobody reads");
    let refused = rig.shard.register(row, 9, &payload);
    assert_eq!(refused, Err(Reason::ReplyFlood));
    // It has taken what was there, and is answered as ever.
    while !rig.shard.sessions[row].writer.is_idle() {
        let taken = rig.shard.sessions[row].writer.armed_bytes().unwrap();
        rig.shard.session_sent(row, i32::try_from(taken).unwrap());
        rig.shard.pump_session(row);
    }
    answer(&mut rig);
    assert_eq!(rig.shard.sessions[row].state, State::Open);
}
