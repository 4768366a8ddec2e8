//! Two full rings, each item provoking one the other way: progress in every interleaving.
//!
//! Lives on: the model checker. Bound: rings of one slot, three events and three effects.
//!
//! It holds because a shard drains without room of its own; what it owes waits in its slots (here a
//! count). Draining only while `event_tx.free() > 0` makes this test fail.
use iop_ring::signal;
use loom::thread;

#[test]
fn a_shard_that_never_needs_room_cannot_deadlock_with_control() {
    loom::model(|| {
        let (mut event_tx, mut event_rx) = signal::channel::<u32>(1);
        let (mut effect_tx, mut effect_rx) = signal::channel::<u32>(1);
        let control = thread::spawn(move || {
            let mut handled = 0;
            while handled < 3 {
                // Control alone reserves: no event is taken without room for its effects.
                if effect_tx.has_room(1)
                    && let Some(event) = event_rx.pop()
                {
                    effect_tx.push(event).unwrap();
                    handled += 1;
                } else {
                    thread::yield_now();
                }
            }
        });
        let (mut owed, mut sent, mut drained) = (2, 0, 0);
        while drained < 3 {
            let mut moved = false;
            if let Some(effect) = effect_rx.pop() {
                assert_eq!(effect, drained);
                owed += u32::from(drained == 0); // this effect provokes an event
                drained += 1;
                moved = true;
            }
            if owed > 0 && event_tx.push(sent).is_ok() {
                (owed, sent) = (owed - 1, sent + 1);
                moved = true;
            }
            if !moved {
                thread::yield_now();
            }
        }
        control.join().unwrap();
    });
}
