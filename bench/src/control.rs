//! What a decision costs: the control core alone, its queue at three depths, and a decision fetched
//! through the real rings and doorbells beside the bare wake-up.
//!
//! Lives on: two cores, control on one, a shard's part on the other. Bound: `Options::seconds` a row.
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use iop_control::names::{
    AdapterName, Gone, ModelName, Names, NodeName, NodePayload, ProviderName, QueueLimits, Waits,
};
use iop_proto::catalog::ProviderKind;
use iop_proto::ids::{ClientRef, ModelIndex, NodeIndex, ProviderIndex, SessionRef};
use iop_proto::ids::{ShardIndex, SlotGeneration};

use crate::error::Error;
use crate::os;

mod core;
mod rings;

/// How long each row is measured, and on which cores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) seconds: u32,
    /// Control's, the shard's.
    pub(crate) cores: (usize, usize),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seconds: 4,
            cores: (0, 1),
        }
    }
}

/// Latencies up to this are told apart, ns; longer ones count as this.
const LATENCY_MAX_NS: u64 = 10_000_000_000;

/// Prints the tables. Each row that has a result counts as passed.
pub(crate) fn run(options: &Options) -> Result<bool, Error> {
    os::sharp_timers().map_err(Error::io("timer slack"))?;
    let measured = Duration::from_secs(u64::from(options.seconds));
    os::pin(options.cores.1).map_err(Error::io("pin"))?;
    let rows = core::run(measured)? + rings::run(options, measured)?;
    println!("{rows} passed, 0 failed");
    Ok(true)
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).expect("legal bounds")
}

/// p50 / p99 / p99.9 / most.
fn quantiles(of: &Histogram<u64>) -> String {
    let at = |quantile| of.value_at_quantile(quantile);
    let (half, p99, p999) = (at(0.5), at(0.99), at(0.999));
    format!("{half} / {p99} / {p999} / {}", of.max())
}

fn shard() -> ShardIndex {
    ShardIndex::new(0).expect("row 0 is in every table")
}

fn session() -> SessionRef {
    SessionRef {
        shard: shard(),
        slot: 0,
        generation: SlotGeneration::FIRST,
    }
}

fn client(slot: u32) -> ClientRef {
    ClientRef {
        shard: shard(),
        slot,
        generation: SlotGeneration::FIRST,
    }
}

fn node() -> NodeIndex {
    NodeIndex::new(0).expect("row 0 is in every table")
}

fn model() -> ModelIndex {
    ModelIndex::new(0).expect("row 0 is in every table")
}

/// One node, `providers` of `capacity` each, one model that all of them serve.
fn names(providers: usize, capacity: u32, waiters_max: u32) -> Names {
    let provider = |row: usize| ProviderName {
        capacity,
        long_capacity: capacity,
        ..ProviderName::new(
            &format!("p{row}"),
            node(),
            ProviderKind::OpenAiCompat,
            "a",
            &format!("t{row}"),
        )
    };
    let payload = NodePayload {
        bytes: Vec::new(),
        adapters: vec![AdapterName {
            name: "a".into(),
            kind: ProviderKind::OpenAiCompat,
            profile: Vec::new(),
        }],
    };
    Names {
        nodes: vec![NodeName {
            id: "n".into(),
            certificate_name: "n".into(),
            config_payload: Arc::new(payload),
        }],
        providers: (0..providers).map(provider).map(Arc::new).collect(),
        models: vec![ModelName {
            name: "m".into(),
            providers: (0..providers).filter_map(ProviderIndex::new).collect(),
            long_threshold_bytes: u32::MAX,
            created: 0,
        }],
        queue: QueueLimits {
            waiters_max,
            waiting_bytes_max: u64::MAX,
            wait_ms: 30_000,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    }
}
