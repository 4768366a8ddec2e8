//! Fuzz targets: what arbitrary bytes may never do to whatever reads a peer's or an operator's input.
//!
//! Lives on: one thread. View: one input. Bound: the input; the engine keeps it to a few KiB.
//!
//! Each target holds its code to three things: it never panics; how its input was split changes
//! nothing; and where somebody else reads the same format (hyper, serde_json, the generated protobuf
//! decoder, httparse, a stock TLS client), both read it alike. Random choices within a run come from
//! the input alone, so an input that fails once fails always.
//!
//! `cargo xtask fuzz` searches with a coverage-guided engine; `cargo test` replays `corpus/`.
#![forbid(unsafe_code)]

mod chunked;
mod config;
mod dice;
mod framing;
mod head;
mod record;
mod response;
mod splice;
mod stream;
mod tools;
mod views;
#[expect(unreachable_pub, reason = "generated")]
#[allow(dead_code, reason = "generated; `expect` would count as a use")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/iop.rs"));
    pub mod transport {
        include!(concat!(env!("OUT_DIR"), "/iop.transport.rs"));
    }
}

/// One thing to be fuzzed.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Also the folder of its inputs in `corpus/`.
    pub name: &'static str,
    /// Judges one input; `true`: the code under test accepted it.
    ///
    /// # Panics
    /// When the input does what no input may do.
    pub run: fn(&[u8]) -> bool,
}

/// Every target.
pub const TARGETS: [Target; 10] = [
    Target {
        name: "head",
        run: head::run,
    },
    Target {
        name: "chunked",
        run: chunked::run,
    },
    Target {
        name: "splice",
        run: splice::run,
    },
    Target {
        name: "framing",
        run: framing::run,
    },
    Target {
        name: "views",
        run: views::run,
    },
    Target {
        name: "record",
        run: record::run,
    },
    Target {
        name: "response",
        run: response::run,
    },
    Target {
        name: "tools",
        run: tools::run,
    },
    Target {
        name: "edge_yaml",
        run: config::run_edge,
    },
    Target {
        name: "node_yaml",
        run: config::run_node,
    },
];

impl Target {
    /// The target of that name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }
}
