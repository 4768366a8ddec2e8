//! Whether the Edge takes client requests now: one value, one writer, any reader.
//!
//! Lives on: written by the thread that starts and drains the Edge, read by the admin thread and by
//! shards that answer `/readyz`. Bound: one cell.
use iop_ring::mirror::{self, MirrorReader, MirrorWriter};

/// What `/readyz` says. Any state but `Ready` is 503 with the state's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not all listeners are open yet.
    Starting,
    Ready,
    /// The client listener is closed; what was begun may finish. `[D-07]`
    Draining,
}

impl Readiness {
    const ALL: [Self; 3] = [Self::Starting, Self::Ready, Self::Draining];

    /// Word for logs, `/readyz` and `/status`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// The writing end. One thread.
#[derive(Debug)]
pub struct ReadinessWriter(MirrorWriter<1>);

/// A reading end; clone it freely.
#[derive(Clone, Debug)]
pub struct ReadinessReader(MirrorReader<1>);

/// A value that is `Starting`, with its only writer.
#[must_use]
pub fn readiness() -> (ReadinessWriter, ReadinessReader) {
    let (writer, reader) = mirror::channel();
    (ReadinessWriter(writer), ReadinessReader(reader))
}

impl ReadinessWriter {
    pub fn set(&mut self, readiness: Readiness) {
        self.0.set(0, readiness as u64);
    }
}

impl ReadinessReader {
    /// What was written last.
    #[must_use]
    pub fn get(&self) -> Readiness {
        let value = self.0.get(0);
        let known = Readiness::ALL
            .into_iter()
            .find(|&readiness| readiness as u64 == value);
        known.expect("only a Readiness is ever written")
    }
}
