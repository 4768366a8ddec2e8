//! No interleaving leaves a sleeper asleep beside a full ring. loom would call it a deadlock.
//!
//! Lives on: the model checker. Bound: one sleeper, two producers, one value each.
use iop_ring::doorbell::Doorbell;
use iop_ring::signal;
use iop_ring::spsc::{Consumer, Producer};
use loom::sync::{Arc, Notify};
use loom::thread;

/// A sleeper's eventfd: a count that blocks while 0, as the kernel's.
#[derive(Clone)]
struct Bell {
    flag: Arc<Doorbell>,
    eventfd: Arc<Notify>,
}

impl Bell {
    fn new() -> Self {
        Self {
            flag: Arc::new(Doorbell::default()),
            eventfd: Arc::new(Notify::new()),
        }
    }

    fn send(&self, tx: &mut Producer<u32>, value: u32) {
        tx.push(value).expect("the ring has a slot for each value");
        if self.flag.ring() {
            self.eventfd.notify();
        }
    }

    /// Drains all rings until `count` values have come, sleeping in between.
    fn receive(&self, rings: &mut [Consumer<u32>], count: usize) -> Vec<u32> {
        let mut got = Vec::new();
        loop {
            got.extend(rings.iter_mut().filter_map(Consumer::pop));
            if got.len() == count {
                return got;
            }
            self.flag.prepare();
            if rings.iter_mut().all(Consumer::is_empty) {
                self.eventfd.wait();
            }
            self.flag.cancel();
        }
    }
}

#[test]
fn a_push_wakes_a_sleeper() {
    loom::model(|| {
        let bell = Bell::new();
        let (mut tx, rx) = signal::channel::<u32>(2);
        let producer = {
            let bell = bell.clone();
            thread::spawn(move || bell.send(&mut tx, 7))
        };
        assert_eq!(bell.receive(&mut [rx], 1), [7]);
        producer.join().unwrap();
    });
}

#[test]
fn two_producers_of_one_sleeper_are_both_heard() {
    loom::model(|| {
        let bell = Bell::new();
        let (mut first_tx, first) = signal::channel::<u32>(1);
        let (mut second_tx, second) = signal::channel::<u32>(1);
        let producers = [
            thread::spawn({
                let bell = bell.clone();
                move || bell.send(&mut first_tx, 1)
            }),
            thread::spawn({
                let bell = bell.clone();
                move || bell.send(&mut second_tx, 2)
            }),
        ];
        let mut got = bell.receive(&mut [first, second], 2);
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
        for producer in producers {
            producer.join().unwrap();
        }
    });
}
