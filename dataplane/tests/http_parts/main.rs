//! The HTTP parts of the Edge from outside: request heads, chunk framing, response heads, the scan for
//! `model`, error shapes, keys. Pure functions over slices; no socket, no clock.
#![expect(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]
mod chunked;
mod dice;
mod head;
mod heap;
mod hyper_diff;
mod keys;
mod response;
mod splice;
mod surface;

#[global_allocator]
static ALLOCATOR: iop_dataplane::alloc::Counting = iop_dataplane::alloc::Counting;
