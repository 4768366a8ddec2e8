//! Model-checking tests of `iop-ring`, nothing else: see `tests/hazards`, one module per hazard.
//!
//! Lives on: the test runner, under `--cfg iop_loom`; without it every test compiles to nothing.
//! Bound: two or three values and two or three threads per test, preemptions by the runner.
//!
//! `cargo xtask loom` runs the model whole, then once per named ordering of `iop-ring`, weakened,
//! and requires each of those to fail.
