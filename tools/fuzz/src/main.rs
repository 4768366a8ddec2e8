//! Coverage-guided fuzzing of one target, named by `IOP_FUZZ_TARGET`; arguments are libFuzzer's.
//!
//! Lives on: one thread. Bound: libFuzzer's own limits on time, memory and input length.
#![no_main]
use std::sync::OnceLock;

use iop_fuzz::Target;

static TARGET: OnceLock<&'static Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        let name = std::env::var("IOP_FUZZ_TARGET").expect("IOP_FUZZ_TARGET names a target");
        let target = Target::find(&name).expect("IOP_FUZZ_TARGET names a target we have");
        TARGET.set(target).expect("the engine starts once");
    },
    |data: &[u8]| {
        (TARGET.get().expect("the engine starts before it runs").run)(data);
    }
);
