//! How far an answer runs ahead of what its Edge takes.
use core::num::{NonZeroU32, NonZeroU64};

use iop_proto::domain::{
    CommandKind, FrameKind, HardTimeout, Message, StallTimeout, TunnelRequest, Window,
};

use crate::commands::{answer, ask, command};
use crate::support::Dice;
use crate::support::edge::{Answer, Conn, tunnel};
use crate::tunnel::{World, world};

async fn grant(conn: &mut Conn, run_id: &str, bytes: u64) {
    let run_id = run_id.to_owned();
    conn.send(0, Message::Window(Window { run_id, bytes }))
        .await;
}

/// The agent has taken in all that was sent so far: it answers a question behind it.
async fn settled(conn: &mut Conn) {
    ask(conn, 7, command(CommandKind::TransportStatus, "", "")).await;
    assert_eq!(answer(conn).await.0, 7);
}

/// Takes frames of `run_id` until its body has `bytes`.
async fn take(conn: &mut Conn, run_id: &str, answer: &mut Answer, bytes: usize) {
    while answer.body.len() < bytes {
        let frame = conn.frame().await;
        assert_eq!((frame.run_id.as_str(), frame.error.as_str()), (run_id, ""));
        answer.take(frame);
    }
    assert_eq!(answer.body.len(), bytes);
}

/// A tunnel of which the Edge takes half of a body of ten bytes; it has that.
async fn half(world: &mut World, request: TunnelRequest) -> Answer {
    let run_id = request.run_id.clone();
    world.conn.open(request).await;
    grant(&mut world.conn, &run_id, 5).await;
    settled(&mut world.conn).await;
    let mut call = world.provider.request().await;
    call.answer("200 OK", b"0123456789").await;
    let mut answer = Answer::default();
    take(&mut world.conn, &run_id, &mut answer, 5).await;
    answer
}

/// Proves [D-06].
#[tokio::test]
async fn d06_a_tunnel_sends_what_its_edge_takes_and_not_a_byte_more() {
    let mut world = world(4).await;
    assert!(world.conn.paces, "it says so before it is ready");
    let body = Dice::new(9).bytes(700_000);
    world.conn.open(tunnel("r", b"{}")).await;
    grant(&mut world.conn, "r", 100).await;
    settled(&mut world.conn).await;
    world.provider.request().await.answer("200 OK", &body).await;
    let mut answer = Answer::default();
    take(&mut world.conn, "r", &mut answer, 100).await;
    // Nothing of it comes between the frames of one that is not paced.
    world.still_serves().await;
    grant(&mut world.conn, "r", 50).await; // what was taken before is still taken
    grant(&mut world.conn, "nobody", 1 << 40).await;
    world.still_serves().await;
    for granted in [101, 300_000, 600_001] {
        grant(&mut world.conn, "r", granted).await;
        let bytes = usize::try_from(granted).unwrap();
        take(&mut world.conn, "r", &mut answer, bytes).await;
        world.still_serves().await;
    }
    grant(&mut world.conn, "r", u64::MAX).await;
    while answer.terminal.is_none() {
        answer.take(world.conn.frame().await);
    }
    assert!(answer.is_complete());
    assert!(answer.body == body, "every byte once, in order");
}

/// An Edge that waits for its client is no silence of the provider, however long it takes.
#[tokio::test]
async fn d06_a_watchdog_rests_while_the_edge_takes_nothing() {
    let silent_for = |run_id| TunnelRequest {
        stall_timeout: StallTimeout::Millis(NonZeroU64::new(200).unwrap()),
        ..tunnel(run_id, b"{}")
    };
    let mut world = world(4).await;
    let mut answer = half(&mut world, silent_for("r")).await;
    // A provider that began to be silent later has been found out.
    world.conn.open(silent_for("silent")).await;
    let _call = world.provider.request().await;
    let mut probe = world.provider.request().await;
    probe.answer("200 OK", b"{\"data\":[]}").await;
    let stalled = world.conn.frame().await;
    assert_eq!(stalled.run_id, "silent");
    assert!(stalled.kind == FrameKind::Error && stalled.failure.is_some());
    grant(&mut world.conn, "r", 10).await;
    take(&mut world.conn, "r", &mut answer, 10).await;
    answer.take(world.conn.frame().await);
    assert!(answer.is_complete());
}

#[tokio::test]
async fn d06_a_paced_tunnel_ends_at_once_when_it_is_cancelled_or_out_of_time() {
    let mut world = world(1).await;
    let mut answer = half(&mut world, tunnel("cancelled", b"{}")).await;
    world.conn.cancel("cancelled").await;
    answer.take(world.conn.frame().await);
    assert!(answer.error().starts_with("cancelled"), "{answer:?}");
    world.still_serves().await; // in the one slot
    let limited = TunnelRequest {
        timeout: HardTimeout::Seconds(NonZeroU32::MIN),
        ..tunnel("limited", b"{}")
    };
    let mut answer = half(&mut world, limited).await;
    answer.take(world.conn.frame().await);
    assert!(
        answer.error().starts_with("deadline exceeded"),
        "{answer:?}"
    );
    world.still_serves().await;
}
