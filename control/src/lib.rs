//! Every decision of the Edge and of the node agent as pure state machines: state × time × event in,
//! state and effects out. No sockets, no threads, no clock, no randomness.
#![forbid(unsafe_code)]
pub mod edge;
pub mod names;
pub mod node;
pub mod slab;
pub mod step;
pub mod timers;
