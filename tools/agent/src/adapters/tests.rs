//! Payloads as a whole: what is refused, what is kept, where an operation goes.
