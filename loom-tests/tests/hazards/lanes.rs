//! Nothing is lost, duplicated or reordered; reported room is usable. Rings of one and two slots and
//! three values cross full, empty and wrap-around in every interleaving.
//!
//! Lives on: the model checker. Bound: two threads, three values.
use iop_ring::{parcel, signal};
use loom::thread;

use crate::{pop, push};

#[test]
fn signals_arrive_once_and_in_order() {
    for capacity in [1, 2] {
        loom::model(move || {
            let (mut tx, mut rx) = signal::channel::<[u32; 2]>(capacity);
            let producer = thread::spawn(move || {
                for n in 0..3 {
                    push(&mut tx, [n, !n]);
                }
            });
            for n in 0..3 {
                assert_eq!(pop(&mut rx), [n, !n]);
            }
            assert!(rx.is_empty() && rx.pop().is_none());
            producer.join().unwrap();
        });
    }
}

#[test]
fn parcels_arrive_once_and_in_order() {
    loom::model(|| {
        let (mut tx, mut rx) = parcel::channel::<u32>(2);
        let producer = thread::spawn(move || {
            for n in 0..3 {
                push(&mut tx, Box::new(n));
            }
        });
        for n in 0..3 {
            assert_eq!(*pop(&mut rx), n);
        }
        assert!(rx.pop().is_none());
        producer.join().unwrap();
    });
}

#[test]
fn reported_room_is_usable() {
    loom::model(|| {
        let (mut tx, mut rx) = signal::channel::<u32>(2);
        tx.push(0).unwrap();
        let consumer = thread::spawn(move || rx.pop());
        let free = tx.free();
        assert!(free >= 1 && tx.has_room(free));
        for _ in 0..free {
            tx.push(1).unwrap();
        }
        assert_eq!(consumer.join().unwrap(), Some(0));
    });
}
