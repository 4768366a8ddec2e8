//! The surfaces clients speak: which operation a path names, and in what shape each is answered.
//!
//! Lives on: shards; rendered parts are made when a configuration is loaded. Bound: fixed tables.
use iop_proto::catalog::Operation;

pub mod openai;

/// Operations that are served.
const SERVED: [Operation; 3] = [
    Operation::ChatCompletions,
    Operation::Completions,
    Operation::Embeddings,
];

/// The operation that is requested by POST to `path`, query excluded. `[D-09]`
#[must_use]
pub fn operation_at(path: &[u8]) -> Option<Operation> {
    SERVED
        .into_iter()
        .find(|operation| operation.path().as_bytes() == path)
}
