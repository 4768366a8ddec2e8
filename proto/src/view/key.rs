//! HOT. Field keys of the messages that views and builders know: the only numbers beside the schema.
//!
//! Lives on: any thread. Bound: constants.
//!
//! A key is `number << 3 | wire type`, as a field starts on the wire. In a message that is read, `KNOWN`
//! has a bit per declared number: such a number under another wire type is malformed, every other
//! number is skipped.

/// Wire types of the protobuf encoding.
pub(crate) const VARINT: u32 = 0;
pub(crate) const FIXED64: u32 = 1;
pub(crate) const LEN: u32 = 2;
pub(crate) const GROUP: u32 = 3;
pub(crate) const GROUP_END: u32 = 4;
pub(crate) const FIXED32: u32 = 5;

macro_rules! keys {
    ($($message:ident { $($name:ident = $number:literal $wire:ident,)* })*) => {$(
        pub(crate) mod $message {
            $(pub(crate) const $name: u32 = $number << 3 | super::$wire;)*
        }
    )*};
}

macro_rules! read_keys {
    ($($message:ident { $($name:ident = $number:literal $wire:ident,)* })*) => {$(
        pub(crate) mod $message {
            $(pub(crate) const $name: u32 = $number << 3 | super::$wire;)*
            pub(crate) const KNOWN: u32 = 0 $(| 1 << $number)*;
        }
    )*};
}

read_keys! {
    envelope { ID = 1 VARINT, REPLY_TO = 2 VARINT, TYPE = 3 LEN, PAYLOAD = 4 LEN, }
    // `HeaderEntry`, and every map<string, string> entry: the same bytes.
    entry { KEY = 1 LEN, VALUE = 2 LEN, }
    usage { PROMPT = 1 VARINT, COMPLETION = 2 VARINT, TOTAL = 3 VARINT, }
    failure { CODE = 1 LEN, METADATA = 2 LEN, }
    frame {
        RUN_ID = 1 LEN, KIND = 3 VARINT, SEQUENCE = 4 VARINT, STATUS = 5 VARINT, HEADERS = 6 LEN,
        BODY = 7 LEN, ERROR = 8 LEN, USAGE = 9 LEN, METADATA = 10 LEN, FAILURE = 15 LEN,
    }
    event {
        RUN_ID = 1 LEN, TYPE = 2 LEN, DELTA = 3 LEN, ERROR = 4 LEN, USAGE = 5 LEN,
        METADATA = 6 LEN, FAILURE = 13 LEN,
    }
    register_request { NODE_ID = 1 LEN, TOKEN = 2 LEN, VERSION = 3 LEN, }
    ready_request { NODE_ID = 1 LEN, }
    ping { SEQ = 1 VARINT, }
    go_away { GRACE = 1 VARINT, }
    features { WINDOW = 1 VARINT, }
}

keys! {
    tunnel_request {
        RUN_ID = 1 LEN, ADAPTER = 3 LEN, TARGET = 4 LEN, METHOD = 5 LEN, PATH = 6 LEN,
        HEADERS = 7 LEN, BODY = 8 LEN, STREAM = 9 VARINT, TIMEOUT = 10 VARINT,
        OPERATION = 13 LEN, LEASE = 14 LEN, BINDING = 15 LEN, STALL_TIMEOUT = 16 VARINT,
    }
    run_request {
        RUN_ID = 1 LEN, ADAPTER = 2 LEN, TARGET = 3 LEN, INPUT = 4 LEN, METADATA = 5 LEN,
        TIMEOUT = 7 VARINT, STALL_TIMEOUT = 8 VARINT,
    }
    config_refresh { REQUEST_ID = 1 LEN, CONFIG = 2 LEN, }
    register_response { ACCEPTED = 1 VARINT, REASON = 2 LEN, NODE_ID = 3 LEN, CONFIG = 4 LEN, }
    ready_response { READY = 1 VARINT, REASON = 2 LEN, }
    cancel { RUN_ID = 1 LEN, }
    window { RUN_ID = 1 LEN, BYTES = 2 VARINT, }
}
