//! What was pushed into any ring before a signal is there once the signal is.
//!
//! Lives on: the model checker. Bound: two rings between two threads, one value each.
//!
//! So a shard drains signals first and parcels after them, and a signal may refer to a parcel.
use iop_ring::{parcel, signal};
use loom::thread;

use crate::pop;

#[test]
fn a_parcel_pushed_before_a_signal_is_visible_once_the_signal_is() {
    loom::model(|| {
        let (mut parcels, mut parcels_there) = parcel::channel::<u32>(1);
        let (mut signals, mut signals_there) = signal::channel::<u32>(1);
        let producer = thread::spawn(move || {
            parcels.push(Box::new(7)).unwrap();
            signals.push(7).unwrap();
        });
        let _stale = parcels_there.is_empty(); // an early look must not hide the parcel later
        let named = pop(&mut signals_there);
        let parcel = parcels_there.pop().expect("the signal came after it");
        assert_eq!(*parcel, named);
        producer.join().unwrap();
    });
}
