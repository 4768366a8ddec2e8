//! Nodes that are taken out: by the end of their certificate, by the operator.
use iop_control::step::Event;
use iop_proto::limits::DRAIN_MS_DEFAULT;
use iop_proto::reason::Reason;

use crate::rig::{World, closes, granted, grants, node, session};

fn expire(rig: &mut crate::rig::Rig, slot: u32) -> Vec<iop_control::step::Effect> {
    let session = session(slot);
    let mut effects = rig.step(Event::Expired { session });
    effects.extend(rig.pass_ms(0));
    effects
}

/// Nothing is granted to the node from the certificate's end on; its stream finishes, and its last
/// lease ends the connection. Proves [D-05], [S-66].
#[test]
fn s66_an_expired_node_takes_nothing_new_and_closes_at_its_last_lease() {
    let mut rig = World::new(2)
        .provider(0, 4)
        .provider(1, 4)
        .model(&[0])
        .model(&[1])
        .rig();
    rig.up(session(1), 0);
    rig.up(session(2), 1);
    let runs = [rig.run(1, 0), rig.run(2, 0)];
    for run in runs {
        rig.begun(run);
    }
    assert_eq!(expire(&mut rig, 1), []);
    assert_eq!(rig.submit(3, 0), [], "nothing new for the expired one");
    assert_eq!(granted(&rig.submit(4, 1)).len(), 1, "another node serves");
    assert_eq!(rig.shown(0).in_flight, 2, "what runs goes on");
    assert_eq!(rig.complete(runs[0]), []);
    rig.complete(runs[1]);
    let ended = rig.pass_ms(0);
    assert_eq!(closes(&ended), [(session(1), Reason::CertificateExpired)]);
    assert!(rig.control.owner(node(0)).is_none(), "it was fenced");
    rig.close(session(1));
    // The waiter has kept its place for the node's next generation.
    let served = rig.up(session(3), 0);
    assert_eq!(granted(&served).len(), 1);
}

/// Proves [D-05].
#[test]
fn d05_a_drain_ends_at_its_time_whatever_runs() {
    let mut rig = World::new(1).provider(0, 4).model(&[0]).rig();
    rig.up(session(1), 0);
    let run = rig.run(1, 0);
    rig.begun(run);
    expire(&mut rig, 1);
    assert_eq!(closes(&rig.pass_ms(DRAIN_MS_DEFAULT - 1)), []);
    assert_eq!(rig.control.drain_node(rig.now, node(0)), Ok(1));
    let ended = rig.pass_ms(1);
    let cause = Reason::CertificateExpired;
    assert_eq!(
        closes(&ended),
        [(session(1), cause)],
        "the first cause stands"
    );
    assert_eq!(rig.control.snapshot(rig.now).edge.leases_held, 0);
}

#[test]
fn an_idle_node_is_put_out_at_once_by_the_operator() {
    let mut rig = World::new(2)
        .provider(0, 1)
        .provider(1, 1)
        .model(&[0, 1])
        .rig();
    let refused = Err(Reason::NotOwner);
    assert_eq!(rig.control.drain_node(rig.now, node(0)), refused, "nobody");
    rig.register(session(1), 0);
    assert_eq!(rig.control.drain_node(rig.now, node(0)), refused, "pending");
    rig.ready(session(1), 0);
    rig.up(session(2), 1);
    assert_eq!(rig.control.drain_node(rig.now, node(0)), Ok(0));
    let ended = rig.pass_ms(0);
    assert_eq!(closes(&ended), [(session(1), Reason::NodeDrained)]);
    let served = grants(&rig.submit(1, 0));
    assert_eq!(served[0].2, session(2), "the other node goes on");
}
