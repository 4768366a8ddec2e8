//! The hot functions touch no heap: counted per thread by an allocator of this test's own.
//!
//! Lives on: test threads. Bound: fixed inputs.
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use iop_proto::domain::Usage;
use iop_proto::view::{
    self, CutProbe, EnvelopeView, RunEventView, RunRequestHead, TunnelFrameOut, TunnelFrameView,
    TunnelRequestHead,
};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to `System` unchanged; the counter is a plain thread-local without a
// destructor, so counting neither allocates nor runs after the thread's end.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller's contract is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: `pointer` came from `System` through `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Heap calls of this thread during `work`.
fn heap_calls(work: impl FnOnce()) -> u64 {
    let before = CALLS.with(Cell::get);
    work();
    CALLS.with(Cell::get) - before
}

const RUN: &str = "0123456789abcdef0123456789abcdef";
const ROUNDS: usize = 10_000;

#[test]
fn the_counter_counts() {
    assert!(heap_calls(|| drop(black_box(Box::new(1)))) >= 2);
}

#[test]
fn reading_frames_and_events_touches_no_heap() {
    let headers: [(&[u8], &[u8]); 2] = [(b"content-type", b"text/event-stream"), (b"x", b"y")];
    let usage = Usage {
        prompt_tokens: 1,
        completion_tokens: 2,
        total_tokens: 3,
    };
    let frames = [
        TunnelFrameOut::response_start(RUN, 1, 200, &headers),
        TunnelFrameOut::body(RUN, 2, b"data: {}\n\n"),
        TunnelFrameOut::usage(RUN, 3, usage),
        TunnelFrameOut::error(RUN, 4, "broken"),
    ];
    let mut buffer = [0; 400];
    let mut seen = 0;
    let calls = heap_calls(|| {
        for _ in 0..ROUNDS {
            for frame in &frames {
                let used = frame.encode(&mut buffer).unwrap();
                let envelope = EnvelopeView::parse(black_box(&buffer[4..used])).unwrap();
                let view = TunnelFrameView::parse(envelope.payload).unwrap();
                seen += view.headers.iter().count() + view.body.len();
                let probe = view::cut_probe(&buffer[4..used - 1], 100_000);
                seen += usize::from(probe == Ok(CutProbe::NeedMore));
            }
            let event = b"\x0a\x01r\x12\x05delta\x1a\x02hi\x32\x06\x0a\x01k\x12\x01v";
            let event = RunEventView::parse(black_box(event)).unwrap();
            seen += event.metadata.get(b"k").map_or(0, <[u8]>::len);
        }
    });
    assert!(seen > ROUNDS * 10, "the work was done");
    assert_eq!(calls, 0);
}

#[test]
fn building_envelopes_touches_no_heap() {
    let head = TunnelRequestHead {
        run_id: RUN,
        body_len: 10,
        ..TunnelRequestHead::default()
    };
    let headers: [(&[u8], &[u8]); 1] = [(b"accept", b"*/*")];
    let run = RunRequestHead {
        run_id: RUN,
        metadata: &[("x-request-id", "1")],
        input_len: 10,
        ..RunRequestHead::default()
    };
    let mut buffer = [0; 400];
    let mut written = 0;
    let calls = heap_calls(|| {
        for _ in 0..ROUNDS {
            written += head
                .before_body(headers.iter().copied(), &mut buffer)
                .unwrap();
            written += head.after_body(&mut buffer).unwrap();
            written += run.before_input(&mut buffer).unwrap();
            written += run.after_input(&mut buffer).unwrap();
            written += view::cancel(RUN, &mut buffer).unwrap();
            written += view::ping(7, &mut buffer).unwrap();
            written += view::body_frame_head(RUN, 1, 9, &mut buffer).unwrap();
        }
    });
    assert!(written > ROUNDS * 100, "the work was done");
    assert_eq!(calls, 0);
}
