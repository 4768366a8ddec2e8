//! How threads reach each other: rings of `iop_ring`, and the bell that wakes a sleeping consumer.
//!
//! Lives on: every thread of the Edge, each holding its own ends. Bound: `LINK_SLOTS` per ring.
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use iop_control::step::{Effect, Event};
use iop_proto::limits::{EPOCH_SLOTS, LINK_SLOTS};
use iop_ring::doorbell::Doorbell;
use iop_ring::spsc::{Consumer, Producer, channel};

use crate::epoch::Epoch;
use crate::shard::uring::event_fd;

#[derive(Debug)]
struct Inner {
    bell: Doorbell,
    event: File,
}

/// The bell of one consumer thread. Clones ring the same bell.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Inner>);

impl Waker {
    /// # Errors
    /// When the kernel gives no eventfd (descriptor limit).
    pub fn new() -> std::io::Result<Self> {
        let event = File::from(event_fd()?);
        Ok(Self(Arc::new(Inner {
            bell: Doorbell::default(),
            event,
        })))
    }

    /// Ringer, any thread: after a push. Writes the eventfd only if the consumer sleeps.
    pub fn ring(&self) {
        if self.0.bell.ring() {
            // The counter saturates only at 2^64 - 1 unread rings, and the fd never blocks before.
            let _written = (&self.0.event).write(&1u64.to_ne_bytes());
        }
    }

    /// Consumer: about to block. Look at every ring once more after this.
    pub fn prepare(&self) {
        self.0.bell.prepare();
    }

    /// Consumer: awake again.
    pub fn awake(&self) {
        self.0.bell.cancel();
    }

    /// What the consumer reads 8 bytes from to sleep.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

/// A shard's end of its link to control.
#[derive(Debug)]
pub struct ShardEnd {
    pub events: Producer<Event>,
    pub effects: Consumer<Effect>,
    /// Configurations that effects name.
    pub epochs: Consumer<Arc<Epoch>>,
    pub control: Waker,
}

/// Control's end of its link to one shard.
#[derive(Debug)]
pub struct ControlEnd {
    pub events: Consumer<Event>,
    pub effects: Producer<Effect>,
    pub epochs: Producer<Arc<Epoch>>,
    pub shard: Waker,
}

/// One link between a shard and control.
#[must_use]
pub fn link(shard: &Waker, control: &Waker) -> (ShardEnd, ControlEnd) {
    let (event_tx, event_rx) = channel(LINK_SLOTS as usize);
    let (effect_tx, effect_rx) = channel(LINK_SLOTS as usize);
    let (epoch_tx, epoch_rx) = channel(EPOCH_SLOTS as usize);
    let shard_end = ShardEnd {
        events: event_tx,
        effects: effect_rx,
        epochs: epoch_rx,
        control: control.clone(),
    };
    let control_end = ControlEnd {
        events: event_rx,
        effects: effect_tx,
        epochs: epoch_tx,
        shard: shard.clone(),
    };
    (shard_end, control_end)
}
