//! A reader never sees a counter fall, and the last value is the sum.
//!
//! Lives on: the model checker. Bound: one writer, two readers, two looks each.
use iop_ring::mirror;
use loom::thread;

#[test]
fn counters_only_rise_and_lose_nothing() {
    loom::model(|| {
        let (mut writer, reader) = mirror::channel::<2>();
        let writing = thread::spawn(move || {
            writer.add(0, 1);
            writer.add(1, 5);
            writer.add(0, 2);
            writer.get(0)
        });
        let watching = {
            let reader = reader.clone();
            thread::spawn(move || (reader.get(0), reader.get(0)))
        };
        let (first, second) = watching.join().unwrap();
        assert!(first <= second && [0, 1, 3].contains(&first) && [0, 1, 3].contains(&second));
        assert_eq!(writing.join().unwrap(), 3);
        assert_eq!([reader.get(0), reader.get(1)], [3, 5]);
    });
}
