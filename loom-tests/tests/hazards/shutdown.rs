//! What is left in a ring is dropped once, whichever end goes last and whatever it does meanwhile.
//!
//! Lives on: the model checker. Bound: two threads, three parcels.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use iop_ring::parcel;
use loom::thread;

#[test]
fn parcels_left_behind_are_dropped_once() {
    loom::model(|| {
        let drops = Arc::new(AtomicU32::new(0));
        let (mut tx, mut rx) = parcel::channel::<Counted>(2);
        let producer = {
            let drops = Arc::clone(&drops);
            thread::spawn(move || {
                for _ in 0..3 {
                    // The third is handed back when the consumer took none in time.
                    drop(tx.push(Box::new(Counted(Arc::clone(&drops)))));
                }
            })
        };
        drop(rx.pop());
        drop(rx);
        producer.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 3);
        assert_eq!(Arc::strong_count(&drops), 1);
    });
}

/// Counts its drops. The counter is std's, outside the model, which sees no leak of a plain box.
struct Counted(Arc<AtomicU32>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}
