//! Switches in the environment that tests of a whole process turn; a release build has none of them.
//!
//! Lives on: any thread, at start or on a cold path. Bound: one look at the environment.
//!
//! | name | in the process |
//! |---|---|
//! | `IOP_TEST_ALLOC_PER_FRAME=1` | a shard allocates once per frame |
//! | `IOP_TEST_TRANSFER_DELAY_US=N` | each step of a move between shards waits up to N µs |
//! | `IOP_TEST_ISSUER_HOLD=PATH` | no credential lease is issued while there is such a file |
use std::ffi::OsString;

/// Why a shard spoils its own zero: a test must see that the counters would notice.
pub(crate) const ALLOC_PER_FRAME: &str = "IOP_TEST_ALLOC_PER_FRAME";
/// So that tests see threads race.
pub(crate) const TRANSFER_DELAY_US: &str = "IOP_TEST_TRANSFER_DELAY_US";
/// So that tests see what happens before a lease is there.
pub(crate) const ISSUER_HOLD: &str = "IOP_TEST_ISSUER_HOLD";

/// What the switch is set to; `None` in a release build without the feature `test-hooks`.
pub(crate) fn value(name: &str) -> Option<OsString> {
    let hooked = cfg!(any(debug_assertions, feature = "test-hooks"));
    hooked.then(|| std::env::var_os(name)).flatten()
}
