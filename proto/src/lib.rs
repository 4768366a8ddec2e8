//! The words of IOP Edge: schema, framing, views, ids, limits, reasons. No I/O, no thread, no clock.
pub mod catalog;
pub mod ids;
pub mod limits;
pub mod reason;
