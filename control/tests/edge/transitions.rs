//! Machine 1 as a table: every connection state against every event, compared with a reviewed text.
//!
//! Run with `IOP_BLESS=1` to write the text anew; then read it before it is committed.
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use iop_control::edge::SessionState;
use iop_control::step::{Effect, Event};
use iop_proto::ids::{NodeIndex, SessionRef};
use iop_proto::limits::REJECTED_READY_MS;
use iop_proto::reason::Reason;

use crate::rig::{Rig, World, drop_node, node, session};

type Arrange = fn(&mut Rig);
type Apply = fn(&mut Rig) -> Vec<Effect>;

/// The connection under test is `session(1)`; its node is n0.
const STATES: [(&str, Arrange); 9] = [
    ("new", |_| {}),
    ("identified", |rig| {
        ready(rig, Some(node(0)));
    }),
    ("unbound", |rig| {
        register(rig, None, Some(node(0)));
    }),
    ("pending", |rig| {
        rig.register(session(1), 0);
    }),
    ("ready", |rig| {
        rig.up(session(1), 0);
        work(rig);
    }),
    ("draining", |rig| {
        rig.up(session(1), 0);
        work(rig);
        rig.step(Event::GoAway {
            session: session(1),
        });
    }),
    ("superseded", |rig| {
        rig.register(session(1), 0);
        rig.up(session(2), 0);
        work(rig);
    }),
    ("fenced", |rig| {
        rig.up(session(1), 0);
        rig.up(session(2), 0);
        work(rig);
    }),
    ("closed", |rig| {
        rig.up(session(1), 0);
        rig.close(session(1));
        rig.up(session(2), 0);
        work(rig);
    }),
];

const EVENTS: [(&str, Apply); 17] = [
    ("register n0", |rig| {
        register(rig, Some(node(0)), Some(node(0)))
    }),
    ("register n1, certified", |rig| {
        register(rig, Some(node(1)), Some(node(1)))
    }),
    ("register n1, certified n0", |rig| {
        register(rig, Some(node(1)), Some(node(0)))
    }),
    ("register unknown", |rig| register(rig, None, Some(node(0)))),
    ("ready n0", |rig| ready(rig, Some(node(0)))),
    ("ready n1", |rig| ready(rig, Some(node(1)))),
    ("ready unknown", |rig| ready(rig, None)),
    ("go away", |rig| {
        rig.step(Event::GoAway {
            session: session(1),
        })
    }),
    ("certificate ends", |rig| {
        let session = session(1);
        let mut effects = rig.step(Event::Expired { session });
        effects.extend(rig.pass_ms(0));
        effects
    }),
    ("n0 is configured anew", |rig| {
        rig.reload(|file| {
            let provider = Arc::make_mut(&mut file.providers[0]);
            provider.adapter = "b".into();
        })
    }),
    ("n0 has another certificate", |rig| {
        rig.reload(|file| file.nodes[0].certificate_name = "other".into())
    }),
    ("n0 is removed", |rig| rig.reload(|file| drop_node(file, 0))),
    ("claim by another", |rig| rig.register(session(3), 0)),
    ("close", |rig| closed(rig, Reason::PeerClosed)),
    ("heartbeat timeout", |rig| {
        closed(rig, Reason::HeartbeatTimeout)
    }),
    ("violation", |rig| {
        closed(rig, Reason::EnvelopeWrongDirection)
    }),
    ("nothing for 5 s", |rig| rig.pass_ms(REJECTED_READY_MS)),
];

/// Events that are not of the connection under test.
const UNHEARD: [&str; 5] = [
    "n0 is configured anew",
    "n0 has another certificate",
    "n0 is removed",
    "claim by another",
    "nothing for 5 s",
];

/// One run begun, one waiting.
fn work(rig: &mut Rig) {
    let run = rig.run(1, 0);
    rig.begun(run);
    rig.submit(2, 0);
}

fn register(
    rig: &mut Rig,
    claimed: Option<NodeIndex>,
    certified: Option<NodeIndex>,
) -> Vec<Effect> {
    rig.step(Event::Register {
        session: session(1),
        reply_to: 1,
        claimed,
        certified,
    })
}

fn ready(rig: &mut Rig, claimed: Option<NodeIndex>) -> Vec<Effect> {
    rig.step(Event::Ready {
        session: session(1),
        reply_to: 2,
        claimed,
    })
}

fn closed(rig: &mut Rig, cause: Reason) -> Vec<Effect> {
    rig.step(Event::Closed {
        session: session(1),
        cause,
    })
}

fn name(session: SessionRef) -> String {
    format!("c{}", session.slot)
}

fn describe(effect: &Effect) -> String {
    let refused = |refusal: Option<Reason>| refusal.map_or("true", Reason::label);
    match *effect {
        Effect::RegisterReply {
            session,
            node,
            refusal,
            close,
            ..
        } => {
            let node = node.map_or(String::new(), |node| format!(" n{}", node.row()));
            let close = if close { ", then close" } else { "" };
            format!(
                "{} registered={}{node}{close}",
                name(session),
                refused(refusal)
            )
        }
        Effect::ReadyReply {
            session, refusal, ..
        } => {
            format!("{} ready={}", name(session), refused(refusal))
        }
        Effect::Close { session, cause } => format!("close {} {}", name(session), cause.label()),
        Effect::Grant {
            client, session, ..
        } => {
            format!("grant client {} to {}", client.slot, name(session))
        }
        Effect::Refuse { client, reason, .. } => {
            format!("refuse client {} {}", client.slot, reason.label())
        }
        Effect::Cancel { reason, .. } => format!("cancel {}", reason.label()),
        Effect::Refresh { session, node, .. } => {
            format!("refresh {} n{}", name(session), node.row())
        }
        Effect::Handoff { .. }
        | Effect::Command { .. }
        | Effect::Ping { .. }
        | Effect::Configure { .. }
        | Effect::Drain { .. }
        | Effect::Stop { .. } => {
            unreachable!("not an answer to a connection: {effect:?}")
        }
    }
}

/// What of the whole state may change: the connection, both owners, leases, waiters, notices.
fn state(rig: &mut Rig, fresh: bool) -> String {
    let state = match rig.control.session_state(session(1)) {
        SessionState::Identified => "identified",
        SessionState::Unbound => "unbound",
        SessionState::Pending => "pending",
        SessionState::Ready => "ready",
        SessionState::Superseded => "superseded",
        SessionState::Closed if fresh => "new",
        SessionState::Closed => "closed",
    };
    let owner = |row| match rig.control.owner(node(row)) {
        None => "nobody".into(),
        Some(owner) => {
            let ready = if owner.is_ready { "ready" } else { "pending" };
            format!(
                "{} {ready} g{}",
                name(owner.session),
                owner.generation.get()
            )
        }
    };
    let owners = format!("n0 {}, n1 {}", owner(0), owner(1));
    let snapshot = rig.control.snapshot(rig.now);
    let edge = snapshot.edge;
    let n0 = snapshot.nodes.iter().find(|shown| shown.node == node(0));
    let draining = match n0 {
        Some(shown) if shown.draining => ", draining",
        Some(_) => "",
        None => ", n0 not listed",
    };
    let notices = rig.notices().len();
    format!(
        "{state}; {owners}{draining}; {} held, {} wait; {notices} notices",
        edge.leases_held, edge.waiting
    )
}

fn table() -> String {
    let mut text = String::new();
    for (state_name, arrange) in STATES {
        let begin = || {
            let mut rig = World::new(2)
                .provider(0, 1)
                .provider(1, 1)
                .model(&[0])
                .rig();
            arrange(&mut rig);
            rig.notices();
            rig
        };
        let before = state(&mut begin(), state_name == "new");
        writeln!(text, "{state_name}: {before}").unwrap();
        for (event_name, apply) in EVENTS {
            let mut rig = begin();
            let fresh = state_name == "new" && UNHEARD.contains(&event_name);
            let effects: Vec<_> = apply(&mut rig).iter().map(describe).collect();
            let after = state(&mut rig, fresh);
            let change = if after == before {
                "no change".into()
            } else {
                after
            };
            let effects = if effects.is_empty() {
                "-".into()
            } else {
                effects.join(" | ")
            };
            writeln!(text, "  {event_name:<26} {effects:<58} => {change}").unwrap();
        }
        text.push('\n');
    }
    text
}

#[test]
fn every_state_and_event_does_what_the_reviewed_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/edge/transitions.txt");
    let now = table();
    if std::env::var_os("IOP_BLESS").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let reviewed = std::fs::read_to_string(&path).unwrap();
    for (line, (now, reviewed)) in now.lines().zip(reviewed.lines()).enumerate() {
        assert_eq!(now, reviewed, "line {}", line + 1);
    }
    assert_eq!(now, reviewed);
}
