//! One configuration as the running threads have it: immutable, replaced as a whole. `[D-39]`
//!
//! Lives on: made by the cold thread, read by control, shards and front. View: one configuration.
//! Bound: its tables; `EPOCHS_RETIRED_MAX` earlier ones wait for the last request that holds them.
use std::sync::{Arc, Mutex, PoisonError};

use iop_control::names::Names;

use crate::config::{EdgeConfig, Timeouts};
use crate::keys::KeyTable;
use crate::surface::openai::ModelCatalog;

/// What a request is judged by from its head on, and what a shard works by.
#[derive(Debug)]
pub struct Epoch {
    /// Counts up from 1; the configuration at start is number 0.
    pub number: u64,
    pub names: Arc<Names>,
    pub keys: Arc<KeyTable>,
    pub catalog: Arc<ModelCatalog>,
    /// One request body, bytes.
    pub body_bytes_max: u32,
    pub timeouts: Timeouts,
    pub tolerate_half_close: bool,
    pub recovery: bool,
}

impl Epoch {
    #[must_use]
    pub fn new(number: u64, config: &EdgeConfig) -> Self {
        Self {
            number,
            names: Arc::clone(&config.names),
            keys: Arc::new(KeyTable::new(&config.keys)),
            catalog: Arc::new(ModelCatalog::new(&config.names)),
            body_bytes_max: config.limits.body_bytes_max,
            timeouts: config.timeouts,
            tolerate_half_close: config.tolerate_half_close,
            recovery: config.recovery,
        }
    }
}

/// A value that one thread replaces and others look up: for those that may wait for a moment, never
/// for a shard. Clones share it.
#[derive(Debug)]
pub struct Current<T>(Arc<Mutex<Arc<T>>>);

impl<T> Clone for Current<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Current<T> {
    #[must_use]
    pub fn new(value: Arc<T>) -> Self {
        Self(Arc::new(Mutex::new(value)))
    }

    #[must_use]
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn set(&self, value: Arc<T>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}
