//! No HTTP part allocates for a request or an answer.
use std::hint::black_box;

use iop_dataplane::alloc::heap_calls;
use iop_dataplane::keys::KeyTable;
use iop_dataplane::shard::http1::{
    ChunkDecoder, HeadCursor, parse_head, plan_response, wipe_credentials, write_chunk_head,
    write_response_head,
};
use iop_dataplane::shard::splice::{ModelScanner, write_json_string};
use iop_dataplane::surface::openai::run::{
    Shape, USAGE_BYTES_MAX, UsageField, text_choice, write_usage,
};
use iop_dataplane::surface::openai::tools::{self, Hold};
use iop_dataplane::surface::{Refusal, Surface};
use iop_dataplane::text::json_escaped;
use iop_proto::catalog::Operation;
use iop_proto::domain::Usage;
use iop_proto::reason::Reason;

const HEAD: &[u8] =
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: edge\r\nAuthorization: Bearer sk\r\n\
    Connection: keep-alive, x-hop\r\nX-Hop: 1\r\nTransfer-Encoding: chunked\r\nAccept: */*\r\n\r\n";
const BODY: &[u8] = b"{\"messages\":[{\"role\":\"user\",\"content\":\"h\\u0069\"}],\"model\":\"m\",\"stream\":true}";

/// One request through every part; what it found, so that nothing is optimised away.
fn exchange(head: &mut [u8], keys: &KeyTable) -> usize {
    let mut cursor = HeadCursor::default();
    assert_eq!(cursor.parse(&head[..40]), Ok(None));
    let parsed = cursor.parse(head).unwrap().unwrap();
    let mut seen = usize::from(
        keys.admit(parsed.credential.map(|span| span.of(head)))
            .is_ok(),
    );
    wipe_credentials(head, &parsed);
    parsed.visit_forwarded(head, b"own", |name, value| seen += name.len() + value.len());

    let mut line = [0; 18];
    let mut decoder = ChunkDecoder::default();
    let len = write_chunk_head(&mut line, BODY.len());
    seen += decoder.step(&line[..len]).unwrap().consumed;
    let step = decoder.step(BODY).unwrap();
    let mut scanner = ModelScanner::new();
    scanner.push(&BODY[step.data]).unwrap();
    let span = scanner.finish().unwrap();
    let mut out = [0; 1024];
    seen += usize::from(span.stream) + write_json_string(&mut out, "target").unwrap();

    let headers = [
        (&b"Content-Type"[..], &b"text/event-stream"[..]),
        (b"connection", b"x, y"),
    ];
    let plan = plan_response(parsed.asked(), 200, headers.into_iter()).unwrap();
    seen += write_response_head(&mut out, &plan, headers.into_iter(), b"own")
        .unwrap()
        .len;
    for surface in [Surface::OpenAi, Surface::Responses, Surface::Anthropic] {
        seen += surface
            .write_error_event(&mut out, Reason::NodeLost, b"own")
            .unwrap();
    }
    let refusal = Refusal {
        surface: parsed.surface,
        reason: Reason::QueueFull,
        asked: parsed.asked(),
        request_id: b"own",
        retry_after_s: 1,
        allow: None,
    };
    seen + refusal.write(&mut out).unwrap() + events()
}

/// One delta and the end of a normalized run.
fn events() -> usize {
    let operation = Operation::ChatCompletions;
    let shape = Shape {
        operation,
        id: b"id",
        created: b"1",
        model: b"\"m\"",
    };
    let taken = Hold::Line(0).take(b"text \"and\" more\n<tool_call>{}");
    let [before, behind] = text_choice(operation);
    let choice = [before]
        .into_iter()
        .chain(json_escaped(taken.passes))
        .chain([behind]);
    let mut usage = [0; USAGE_BYTES_MAX];
    let length = write_usage(&mut usage, Usage::default());
    let event = shape.event(choice, UsageField::Is(&usage[..length]));
    let calls = tools::reported(b"[{\"id\":\"c\"}]").expect("calls");
    let held = b"<tool_call>{\"name\":\"f\"}</tool_call>";
    event
        .chain(tools::delta_calls(calls))
        .chain(tools::restored(held, b"id", true))
        .map(<[u8]>::len)
        .sum()
}

#[test]
fn nothing_allocates() {
    let keys = KeyTable::new(&[]);
    let mut heads: Vec<Vec<u8>> = (0..100).map(|_| HEAD.to_vec()).collect();
    let (calls, seen) = heap_calls(|| {
        heads
            .iter_mut()
            .map(|head| exchange(head, &keys))
            .sum::<usize>()
    });
    assert_eq!(calls, 0);
    assert!(seen > 100 * 100);
    let (calls, _) =
        heap_calls(|| black_box(parse_head(b"GET / HTTP/1.1\nHost: e\r\n\r\n")).is_err());
    assert_eq!(calls, 0);
    // The counter counts.
    let (calls, _) = heap_calls(|| black_box(vec![black_box(0u8); 16]));
    assert!(calls > 0);
}
