//! The words of IOP Edge: schema, framing, views, ids, limits, reasons. No I/O, no thread, no clock.
#![forbid(unsafe_code)]
pub mod assembler;
pub mod catalog;
pub mod domain;
pub mod framing;
pub mod ids;
pub mod legacy;
pub mod limits;
pub mod map;
pub mod reason;
pub mod spiffe;
pub mod view;
