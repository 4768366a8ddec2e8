//! Every hazard of the lock-free code, one module each, in one binary: it is built once per ordering.
//!
//! Lives on: the model checker. Bound: preemptions and branches by `cargo xtask loom`.
#![cfg(iop_loom)]
use iop_ring::spsc::{Consumer, Full, Producer};

mod doorbell;
mod drain_order;
mod lanes;
mod mirror;
mod pair;
mod shutdown;

/// Pushes, letting the other thread run while the ring is full.
fn push<T: Send>(tx: &mut Producer<T>, mut value: T) {
    while let Err(Full(back)) = tx.push(value) {
        value = back;
        loom::thread::yield_now();
    }
}

/// Pops, letting the other thread run while the ring is empty.
fn pop<T: Send>(rx: &mut Consumer<T>) -> T {
    loop {
        match rx.pop() {
            Some(value) => return value,
            None => loom::thread::yield_now(),
        }
    }
}
