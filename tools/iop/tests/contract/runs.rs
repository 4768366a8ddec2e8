//! Normalized runs: the request a native provider's node gets, and the OpenAI answer that is made of
//! its events.
use core::num::{NonZeroU32, NonZeroU64};

use iop_proto::domain::HealthEvidence::Unknown;
use iop_proto::domain::{
    FrameKind, HardTimeout, Message, RunEvent, RunEventKind, RunRequest, StallTimeout, Usage,
};
use iop_proto::limits::GATHERED_ANSWER_BYTES_MAX;
use serde_json::{Value, json};

use crate::kit::{
    EVENT, Kill, Run, World, answer, body_bytes, bytes_field, entry, event, expect_accepted,
    expect_cancel, expect_error, expect_nothing, expect_ready, frame_bytes, pending, ready,
    register, sealed, stall,
};
use crate::support::{Client, Head, Node, chat, envelope, post};

/// Model `native` on Ollama's node half, `raw` on a tunnel, `mixed` on both; one more native with room
/// for one request.
const CATALOG: &str = "nodes:
  - id: n1
    adapters:
      - {type: ollama, base_url: \"http://127.0.0.1:9\"}
      - {name: a1, type: openai_compat, base_url: \"http://127.0.0.1:9\"}
    providers:
      - {id: p-native, adapter: ollama, target: \"qwen3:8b\", capacity: 8, stall_timeout_ms: 1234, timeout_sec: 7}
      - {id: p-raw, adapter: a1, target: t1, capacity: 8}
      - {id: p-one, adapter: ollama, target: tiny, capacity: 1}
      - {id: p-brief, adapter: ollama, target: brief, capacity: 4, response_wait_ms: 700}
  - id: n2
models:
  - {name: native, providers: [p-native]}
  - {name: raw, providers: [p-raw]}
  - {name: mixed, providers: [p-native, p-raw]}
  - {name: one, providers: [p-one]}
  - {name: brief, providers: [p-brief]}
  - {name: 'my \"own\" model', providers: [p-native]}
";

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A run as its node sees it.
struct Native {
    id: String,
}

impl Native {
    fn asked(node: &mut Node) -> (Self, RunRequest) {
        let request = node.run();
        let id = request.run_id.clone();
        (Self { id }, request)
    }

    /// The next run, begun.
    fn started(node: &mut Node) -> Self {
        let (run, _) = Self::asked(node);
        node.send_bytes(&run.event(RunEventKind::Start));
        run
    }

    fn event(&self, kind: RunEventKind) -> Vec<u8> {
        self.event_with(kind, |_| {})
    }

    fn event_with(&self, kind: RunEventKind, fill: impl FnOnce(&mut RunEvent)) -> Vec<u8> {
        let mut event = RunEvent::new(self.id.clone(), kind);
        fill(&mut event);
        envelope(&Message::RunEvent(event))
    }

    fn delta(&self, text: &str) -> Vec<u8> {
        self.event_with(RunEventKind::Delta, |event| event.delta = text.to_owned())
    }

    fn complete(&self, metadata: &[(&str, &str)]) -> Vec<u8> {
        self.event_with(RunEventKind::Complete, |event| {
            for (key, value) in metadata {
                event
                    .metadata
                    .insert((*key).to_owned(), (*value).to_owned());
            }
        })
    }

    fn error(&self, text: &str) -> Vec<u8> {
        self.event_with(RunEventKind::Error, |event| event.error = text.to_owned())
    }
}

const USAGE: Usage = Usage {
    prompt_tokens: 3,
    completion_tokens: 4,
    total_tokens: 7,
};

/// Proves.
#[test]
fn r031_no_run_is_asked_of_a_node_before_it_is_told_that_it_is_ready() {
    let world = World::new(CATALOG);
    let mut node = Node::connect(&world.edge, "n1");
    node.send(&register("n1"));
    expect_accepted(&mut node);
    let seed = |client| format!("\"seed\":{client}");
    let mut clients = [0, 1].map(|client| world.asks(&asks("native", CHAT, &seed(client))));
    world.wait_queued(2);
    expect_nothing(&mut node);
    node.send(&ready("n1"));
    expect_ready(&mut node, true);
    for _ in 0..2 {
        let (run, request) = Native::asked(&mut node); // first the one on the node's shard
        let client = usize::from(String::from_utf8_lossy(&request.input).contains(&seed(1)));
        node.send_bytes(&run.error("provider unreachable"));
        expect_error(
            &mut clients[client],
            502,
            "provider_unreachable",
            "provider",
        );
    }
    drop((node, clients));
    world.rest();
}

/// A request for `model` with `more` members, such as `"stream":true`.
fn asks(model: &str, path: &str, more: &str) -> String {
    let comma = if more.is_empty() { "" } else { "," };
    let input = if path == CHAT {
        "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
    } else {
        "\"prompt\":\"hi\""
    };
    post(
        path,
        &format!("{{\"model\":\"{model}\",{input}{comma}{more}}}"),
    )
}

const STREAM: &str = "\"stream\":true";
const TOOLS: &str = "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]";

/// The whole answer is a JSON object of ours.
fn object(client: &mut Client) -> Value {
    let (head, body, whole) = answer(client);
    let text = String::from_utf8_lossy(&body);
    assert_eq!((head.status, whole), (200, true), "{text}");
    assert_eq!(head.header("content-type"), Some("application/json"));
    assert_eq!(
        head.header("content-length"),
        Some(&*body.len().to_string())
    );
    serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{text}"))
}

/// The events of a whole stream, the last one `[DONE]`, taken off.
fn events(client: &mut Client) -> Vec<Value> {
    let (head, body, whole) = answer(client);
    expect_stream(&head);
    assert!(whole);
    let mut events = parsed(&body);
    assert_eq!(events.pop(), Some(Value::from("[DONE]")));
    events
}

fn expect_stream(head: &Head) {
    assert_eq!(
        (head.status, head.header("content-type")),
        (200, Some("text/event-stream"))
    );
}

fn parsed(body: &[u8]) -> Vec<Value> {
    let text = core::str::from_utf8(body).expect("UTF-8");
    let events = text
        .strip_suffix("\n\n")
        .expect("whole events")
        .split("\n\n");
    events
        .filter(|event| !event.is_empty())
        .map(|event| {
            let data = event
                .trim()
                .strip_prefix("data: ")
                .unwrap_or_else(|| panic!("{text}"));
            serde_json::from_str(data).unwrap_or_else(|_| Value::from(data))
        })
        .collect()
}

/// Text of a chat's chunks, joined.
fn content(events: &[Value]) -> String {
    let pieces = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    pieces.collect()
}

// ── the request ──────────────────────────────────────────────────────────────────────────────────

/// Proves, [R-086], [R-234], [R-299], [D-50].
#[test]
fn r086_the_node_gets_the_clients_input_bit_for_bit_without_the_model() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    // What a re-serialiser would change stands around the member; a model below it stays.
    let rest = "\"z\":1e400,\"z\":-0.0, \"n\" : {\"model\":\"native\"} ,\"s\":\"\\u0041\\/\u{e9}\u{1f600}\"";
    let cases = [
        (
            format!("{{\"model\":\"native\",{rest}}}"),
            format!("{{{rest}}}"),
        ),
        (
            format!("{{ \"m\\u006fdel\" : \"n\\u0061tive\" , {rest} }}"),
            format!("{{  {rest} }}"),
        ),
        (
            format!("{{{rest},\"model\":\"native\"}}"),
            format!("{{{rest}}}"),
        ),
        (
            format!("{{{rest}\n,\t\"model\" : \"native\" ,\"b\":[]}}"),
            format!("{{{rest}\n ,\"b\":[]}}"),
        ),
        (" { \"model\":\"native\" } ".to_owned(), " {  } ".to_owned()),
        (
            format!(
                "{{\"long\":\"{0}\",\"model\":\"native\",\"x\":\"{0}\"}}",
                "y".repeat(70_000)
            ),
            format!("{{\"long\":\"{0}\",\"x\":\"{0}\"}}", "y".repeat(70_000)),
        ),
    ];
    for (body, input) in cases {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\nauthorization: Bearer marker\r\n\
             x-request-id: mine.1\r\ntraceparent: 00-0af7-b7ad-01\r\nx-other: marker\r\n";
        let mut client = world.asks(&format!(
            "{head}content-length: {}\r\n\r\n{body}",
            body.len()
        ));
        let (run, request) = Native::asked(&mut node);
        assert_eq!(String::from_utf8_lossy(&request.input), input);
        assert_eq!(
            (request.adapter.as_str(), request.target.as_str()),
            ("ollama", "qwen3:8b")
        );
        assert_eq!(
            request.timeout,
            HardTimeout::Seconds(NonZeroU32::new(7).expect("7"))
        );
        let stall = NonZeroU64::new(1_234).expect("1234");
        assert_eq!(request.stall_timeout, StallTimeout::Millis(stall));
        let metadata: Vec<_> = request
            .metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        assert_eq!(
            metadata,
            [
                ("traceparent", "00-0af7-b7ad-01"),
                ("x-request-id", "mine.1")
            ]
        );
        assert!(request.session_id.is_empty() && request.run_id.len() == 32);
        node.send_bytes(&run.event(RunEventKind::Start));
        node.send_bytes(&run.complete(&[]));
        assert_eq!(object(&mut client)["choices"][0]["message"]["content"], "");
    }
    drop(node);
    world.rest();
}

/// Proves, [R-235], [R-236], [R-237].
#[test]
fn r237_the_selected_provider_alone_decides_the_family_of_its_request() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let selectors = [
        "",
        "\"response_path\":\"run\",\"metadata\":{\"passthrough\":\"true\"}",
        "\"stream\":true,\"adapter\":\"a1\"",
        "\"path_selector\":\"tunnel\",\"target\":\"t1\"",
    ];
    let mut seen = Vec::new();
    for selector in selectors {
        // One is busy, so the other is chosen, whatever it is.
        for _ in 0..2 {
            let first = world.asks(&asks("mixed", CHAT, selector));
            let one = node.receive();
            let second = world.asks(&asks("mixed", CHAT, selector));
            let other = node.receive();
            for message in [one, other] {
                let (family, id) = match message {
                    Message::RunRequest(request) => {
                        assert_eq!(
                            (&*request.adapter, &*request.target),
                            ("ollama", "qwen3:8b")
                        );
                        ("run", request.run_id)
                    }
                    Message::TunnelRequest(request) => {
                        assert_eq!((&*request.adapter, &*request.target), ("a1", "t1"));
                        ("tunnel", request.run_id)
                    }
                    other => panic!("unexpected {other:?}"),
                };
                seen.push(family);
                if family == "run" {
                    node.send_bytes(&Native { id }.error("node rejected"));
                } else {
                    Run { id, next: 1 }.error(&mut node, "node rejected");
                }
            }
            world.wait_held(0);
            drop((first, second));
        }
    }
    let of = |family: &str| seen.iter().filter(|one| **one == family).count();
    assert_eq!((of("run"), of("tunnel")), (8, 8));
    let metrics = world.edge.metrics();
    assert_eq!(metrics.sum("iop_edge_leases_granted_total"), 16.0);
    assert_eq!(metrics.get("iop_edge_runs_dispatched_total"), 16.0);
    drop(node);
    world.rest();
}

// ── the answer ───────────────────────────────────────────────────────────────────────────────────

/// Text that JSON must escape, and that a careless cut would break.
const ODD: [&str; 6] = [
    "안녕 \u{1f30d}",
    "\"q\" \\ /",
    "\n\r\t\u{8}\u{0}\u{1f}\u{7f}",
    "data: x\n\n",
    "<b>&",
    "é",
];

/// Proves [P-26].
#[test]
fn p26_each_delta_is_a_chunk_at_once_and_the_text_is_the_same() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    for (path, kind, prefix) in [
        (CHAT, "chat.completion.chunk", "chatcmpl-"),
        (TEXT, "text_completion", "cmpl-"),
    ] {
        let more = format!("{STREAM},\"stream_options\":{{\"include_usage\":true}}");
        let mut client = world.asks(&asks("my \\\"own\\\" model", path, &more));
        let run = Native::started(&mut node);
        expect_nothing(&mut node);
        let mut body = Vec::new();
        let mut head = None;
        for text in ODD {
            node.send_bytes(&run.delta(text));
            let head = head.get_or_insert_with(|| client.head().expect("the answer begins"));
            expect_stream(head);
            // The chunk is here before the next delta is sent.
            while !parsed_text(&body).ends_with(text) {
                body.extend(client.chunk().expect("the answer goes on"));
            }
        }
        node.send_bytes(&run.event_with(RunEventKind::Complete, |event| event.usage = Some(USAGE)));
        let (rest, whole) = client.body(&head.expect("seen"));
        assert!(whole);
        body.extend(rest);
        let mut events = parsed(&body);
        assert_eq!(events.pop(), Some(Value::from("[DONE]")));
        let id = events[0]["id"].as_str().expect("an id").to_owned();
        assert!(
            id.starts_with(prefix) && id.len() == prefix.len() + 32,
            "{id}"
        );
        let usage = events.pop().expect("a usage event");
        let count = events.len();
        for (row, event) in events.iter().chain([&usage]).enumerate() {
            assert_eq!((&event["id"], &event["object"]), (&json!(id), &json!(kind)));
            assert_eq!(event["model"], "my \"own\" model");
            assert!(
                event["created"]
                    .as_u64()
                    .is_some_and(|at| at > 1_700_000_000),
                "{event}"
            );
            assert_eq!(event["created"], usage["created"]);
            let reason = if row + 1 == count {
                json!("stop")
            } else {
                Value::Null
            };
            assert_eq!(event["choices"][0]["finish_reason"], reason, "{event}");
            assert!(event.get("usage").is_some());
        }
        assert_eq!(usage["choices"], json!([]));
        let counted = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
        assert_eq!(usage["usage"], counted);
        if path == CHAT {
            let first = json!({"role": "assistant", "content": ""});
            assert_eq!(events[0]["choices"][0]["delta"], first);
            assert_eq!(events[count - 1]["choices"][0]["delta"], json!({}));
        }
        assert_eq!(parsed_text(&body), ODD.concat());
    }
    drop(node);
    world.rest();
}

/// Text of the whole events in `body`.
fn parsed_text(body: &[u8]) -> String {
    let whole = body.windows(2).rposition(|pair| pair == b"\n\n");
    let Some(end) = whole else {
        return String::new();
    };
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        let text = choice
            .get("text")
            .unwrap_or_else(|| &choice["delta"]["content"]);
        text.as_str().unwrap_or_default().to_owned()
    };
    parsed(&body[..end + 2]).iter().map(text).collect()
}

/// Proves [P-28].
#[test]
fn p28_without_a_stream_there_is_one_object_and_usage_only_where_it_belongs() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    for (path, kind) in [(CHAT, "chat.completion"), (TEXT, "text_completion")] {
        let mut client = world.asks(&asks("native", path, ""));
        let run = Native::started(&mut node);
        for text in ODD {
            node.send_bytes(&run.delta(text));
        }
        node.send_bytes(&run.event_with(RunEventKind::Complete, |event| {
            event.usage = Some(USAGE);
            event
                .metadata
                .insert("openai_finish_reason".to_owned(), "length".to_owned());
        }));
        let whole = object(&mut client);
        assert_eq!(
            (&whole["object"], &whole["model"]),
            (&json!(kind), &json!("native"))
        );
        assert_eq!(whole["usage"]["total_tokens"], 7);
        let choice = &whole["choices"][0];
        assert_eq!(
            (&choice["index"], &choice["finish_reason"]),
            (&json!(0), &json!("length"))
        );
        let text = if path == CHAT {
            assert_eq!(choice["message"]["role"], "assistant");
            &choice["message"]["content"]
        } else {
            &choice["text"]
        };
        assert_eq!(text, &json!(ODD.concat()));
        // The same connection serves the next one; nobody asked for usage in this stream.
        client.send(&asks("native", path, STREAM));
        let run = Native::started(&mut node);
        node.send_bytes(&run.delta("x"));
        node.send_bytes(&run.event_with(RunEventKind::Complete, |event| event.usage = Some(USAGE)));
        let events = events(&mut client);
        assert!(
            events.iter().all(|event| event.get("usage").is_none()),
            "{events:?}"
        );
    }
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r087_an_unknown_event_is_counted_and_changes_nothing() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut client = world.asks(&asks("native", CHAT, STREAM));
    let (run, _) = Native::asked(&mut node);
    let strange = |text: &str| {
        run.event_with(RunEventKind::Other("progress".to_owned()), |event| {
            event.delta = text.to_owned()
        })
    };
    node.send_bytes(&strange("before"));
    node.send_bytes(&run.event(RunEventKind::Start));
    node.send_bytes(&run.delta("a"));
    node.send_bytes(&strange("never"));
    node.send_bytes(&run.delta("b"));
    node.send_bytes(&run.complete(&[]));
    assert_eq!(content(&events(&mut client)), "ab");
    let seen = world.edge.metrics();
    assert_eq!(seen.get("iop_edge_frames_total{kind=\"other\"}"), 2.0);
    assert_eq!(seen.get("iop_edge_frames_total{kind=\"body\"}"), 2.0);
    assert_eq!(world.violations(), 0.0);
    drop((node, client));
    world.rest();
}

/// Any encoding of the same events is the same answer.
#[test]
fn events_may_come_backwards_and_with_unknown_fields() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut client = world.asks(&asks("native", CHAT, ""));
    let (run, _) = Native::asked(&mut node);
    let backwards = |kind: &str, rest: &[u8]| {
        let fields = [
            rest,
            &bytes_field(90, b"\xff"),
            &bytes_field(2, b"never"),
            &bytes_field(2, kind.as_bytes()),
            &bytes_field(1, run.id.as_bytes()),
        ];
        sealed(EVENT, &fields.concat())
    };
    node.send_bytes(&backwards("start", b""));
    let delta = [bytes_field(3, b"lost"), bytes_field(3, "한".as_bytes())].concat();
    node.send_bytes(&backwards("delta", &delta));
    let reason = bytes_field(6, &entry("openai_finish_reason", b"content_filter"));
    node.send_bytes(&backwards("complete", &reason));
    let choice = &object(&mut client)["choices"][0];
    assert_eq!(choice["message"]["content"], "한");
    assert_eq!(choice["finish_reason"], "content_filter");
    drop((node, client));
    world.rest();
}

// ── tool calls ───────────────────────────────────────────────────────────────────────────────────

const CALLS: &str = "[{\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\
     \"arguments\":\"{\\\"x\\\": 1}\"}}, {\"id\":\"c2\",\"function\":{\"name\":\"g\",\"arguments\":\"{}\"}}]";

/// Proves.
#[test]
fn r303_reported_tool_calls_are_restored_and_broken_ones_are_none() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let expected: Value = serde_json::from_str(CALLS).expect("JSON");
    let cases = [
        (CALLS, true),
        ("[]", false),
        ("null", false),
        ("[{\"id\":\"c1\"}", false),
        ("{\"id\":\"c1\"}", false),
        ("[1]", false),
        ("\u{1}", false),
    ];
    for (calls, restored) in cases {
        let metadata = [
            ("openai_tool_calls", calls),
            ("openai_finish_reason", "tool_calls"),
        ];
        let mut client = world.asks(&asks("native", CHAT, ""));
        let run = Native::started(&mut node);
        node.send_bytes(&run.complete(&metadata));
        let choice = &object(&mut client)["choices"][0];
        let message = &choice["message"];
        if restored {
            assert_eq!(message["tool_calls"], expected);
            assert_eq!(
                (&message["content"], &choice["finish_reason"]),
                (&Value::Null, &json!("tool_calls"))
            );
        } else {
            assert_eq!(
                message,
                &json!({"role": "assistant", "content": ""}),
                "{calls}"
            );
            assert_eq!(choice["finish_reason"], "stop", "{calls}");
        }
        client.send(&asks("native", CHAT, STREAM));
        let run = Native::started(&mut node);
        node.send_bytes(&run.delta("text"));
        node.send_bytes(&run.complete(&metadata));
        let events = events(&mut client);
        assert_eq!(content(&events), "text");
        let called: Vec<_> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"].get("tool_calls"))
            .collect();
        let reason = &events[events.len() - 1]["choices"][0]["finish_reason"];
        if restored {
            let mut calls = called[0].clone();
            for (row, call) in calls.as_array_mut().expect("a list").iter_mut().enumerate() {
                assert_eq!(call["index"], row);
                call.as_object_mut().expect("an object").remove("index");
            }
            assert_eq!(
                (called.len(), &calls, reason),
                (1, &expected, &json!("tool_calls"))
            );
        } else {
            assert_eq!((called.len(), reason), (0, &json!("stop")), "{calls}");
        }
    }
    drop(node);
    world.rest();
}

const BEFORE: &str = "Let me <tool_call> look.\n";
const BLOCK: &str =
    "<tool_call>{\"name\":\"f\",\"arguments\":{\"q\":\"한 \\\"x\\\"\"}}</tool_call>\n";

/// Proves, [R-308].
#[test]
fn r308_calls_in_the_text_are_restored_only_where_the_node_says_so() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let text = format!("{BEFORE}{BLOCK}{BLOCK}");
    let marks = [
        None,
        Some("false"),
        Some("TRUE"),
        Some("1"),
        Some(""),
        Some("true"),
    ];
    // The caller's own copy of the key means nothing.
    let copied = format!("{TOOLS},\"metadata\":{{\"openai_text_tool_fallback\":\"true\"}}");
    for mark in marks {
        for (stream, cut) in [
            (false, 7),
            (true, 7),
            (false, 1_000),
            (true, 1),
            (true, 1_000),
        ] {
            let more = if stream {
                format!("{copied},{STREAM}")
            } else {
                copied.clone()
            };
            let mut client = world.asks(&asks("native", CHAT, &more));
            let run = Native::started(&mut node);
            let characters: Vec<char> = text.chars().collect();
            for piece in characters.chunks(cut) {
                node.send_bytes(&run.delta(&piece.iter().collect::<String>()));
            }
            let metadata = mark.map(|mark| ("openai_text_tool_fallback", mark));
            node.send_bytes(&run.complete(metadata.as_slice()));
            let (content, calls, reason) = text_and_calls(&mut client, stream);
            if mark == Some("true") {
                let calls = calls.expect("restored");
                assert_eq!((content.as_str(), reason), (BEFORE, json!("tool_calls")));
                assert_eq!(calls.as_array().map(Vec::len), Some(2));
                assert_eq!(calls[1]["type"], "function");
                assert_eq!(
                    calls[1]["function"],
                    json!({"name": "f", "arguments": "{\"q\":\"한 \\\"x\\\"\"}"})
                );
                assert_ne!(calls[0]["id"], calls[1]["id"]);
                assert_eq!(calls[1].get("index"), stream.then(|| json!(1)).as_ref());
            } else {
                assert_eq!(
                    (content.as_str(), calls, reason),
                    (&*text, None, json!("stop")),
                    "{mark:?}"
                );
            }
        }
    }
    drop(node);
    world.rest();
}

/// Content, tool calls and finish reason of a chat's answer.
fn text_and_calls(client: &mut Client, stream: bool) -> (String, Option<Value>, Value) {
    if stream {
        let events = events(client);
        let called = events
            .iter()
            .find_map(|event| event["choices"][0]["delta"].get("tool_calls").cloned());
        let reason = events[events.len() - 1]["choices"][0]["finish_reason"].clone();
        return (content(&events), called, reason);
    }
    let choice = object(client)["choices"][0].clone();
    let message = &choice["message"];
    let content = message["content"].as_str().expect("text").to_owned();
    let called = message.get("tool_calls").cloned();
    (content, called, choice["finish_reason"].clone())
}

/// Said at the start of the run it is known before the first delta, whatever the client offered.
#[test]
fn r308_a_mark_at_the_start_counts_as_well() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut client = world.asks(&asks("native", CHAT, STREAM));
    let (run, _) = Native::asked(&mut node);
    node.send_bytes(&run.event_with(RunEventKind::Start, |event| {
        event
            .metadata
            .insert("openai_text_tool_fallback".to_owned(), "true".to_owned());
    }));
    node.send_bytes(&run.delta(BLOCK));
    node.send_bytes(&run.delta("<tool_call>no call</tool_call>"));
    node.send_bytes(&run.complete(&[]));
    let events = events(&mut client);
    assert_eq!(content(&events), "<tool_call>no call</tool_call>");
    let called = events
        .iter()
        .filter(|event| event["choices"][0]["delta"].get("tool_calls").is_some());
    assert_eq!(called.count(), 1);
    drop((node, client));
    world.rest();
}

/// What might have been a call and is too long for one is text.
#[test]
fn held_text_beyond_its_bound_is_let_go_as_text() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let most = iop_proto::limits::HELD_TOOL_TEXT_BYTES_MAX as usize;
    for (filler, restored) in [(1_000, true), (most, false)] {
        for stream in [false, true] {
            let block = format!(
                "<tool_call>{{\"name\":\"f\",\"arguments\":{{\"x\":\"{}\"}}}}</tool_call>",
                "한".repeat(filler / 3)
            );
            let more = if stream {
                format!("{TOOLS},{STREAM}")
            } else {
                TOOLS.to_owned()
            };
            let mut client = world.asks(&asks("native", CHAT, &more));
            let run = Native::started(&mut node);
            let characters: Vec<char> = block.chars().collect();
            for piece in characters.chunks(5_000) {
                node.send_bytes(&run.delta(&piece.iter().collect::<String>()));
            }
            node.send_bytes(&run.complete(&[("openai_text_tool_fallback", "true")]));
            let text = if stream {
                content(&events(&mut client))
            } else {
                let content = object(&mut client)["choices"][0]["message"]["content"].clone();
                content.as_str().unwrap_or_default().to_owned()
            };
            assert_eq!(text == block, !restored);
            assert_eq!(text.is_empty(), restored);
        }
    }
    drop(node);
    world.rest();
}

// ── failures ─────────────────────────────────────────────────────────────────────────────────────

/// Proves [D-40].
#[test]
fn d40_a_runs_error_is_a_status_until_something_was_sent_and_an_event_afterwards() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let cases = [
        (
            "provider unreachable: refused",
            502,
            "provider_unreachable",
            "provider",
        ),
        (
            "node rejected: no such adapter",
            502,
            "node_rejected",
            "node",
        ),
        ("something else", 502, "node_rejected", "node"),
        ("deadline exceeded", 504, "deadline_exceeded", "node"),
        ("draining", 503, "node_draining", "node"),
    ];
    for (text, status, code, source) in cases {
        for (more, started, delta) in [
            ("", false, None),
            (STREAM, true, None),
            ("", true, Some("never seen")),
        ] {
            let mut client = world.asks(&asks("native", CHAT, more));
            let (run, _) = Native::asked(&mut node);
            if started {
                node.send_bytes(&run.event(RunEventKind::Start));
            }
            if let Some(delta) = delta {
                node.send_bytes(&run.delta(delta));
            }
            node.send_bytes(&run.error(text));
            expect_error(&mut client, status, code, source);
        }
        let mut client = world.asks(&asks("native", CHAT, STREAM));
        let run = Native::started(&mut node);
        node.send_bytes(&run.delta("a"));
        node.send_bytes(&run.error(text));
        let (head, body, whole) = answer(&mut client);
        expect_stream(&head);
        assert!(whole);
        let mut events = parsed(&body);
        let last = events.pop().expect("events");
        assert_eq!(
            (&last["error"]["code"], content(&events).as_str()),
            (&json!(code), "a")
        );
    }
    // A run that its node calls cancelled, though nobody did, failed.
    let mut client = world.asks(&asks("native", CHAT, ""));
    let run = Native::started(&mut node);
    node.send_bytes(&run.event(RunEventKind::Cancelled));
    expect_error(&mut client, 502, "node_rejected", "node");
    expect_nothing(&mut node);
    drop((node, client));
    world.rest();
}

/// Proves.
#[test]
fn r168_a_runs_stall_is_evidence_as_a_tunnels_is() {
    const CONFIRMED: &str = "iop_edge_terminal_handoffs_total{recovery_handoff=\"confirmed\"}";
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let cases = [("", false), ("", true), (STREAM, false), (STREAM, true)];
    for (seq, (more, begun)) in (1..).zip(cases) {
        let mut client = world.asks(&asks("native", CHAT, more));
        let run = Native::started(&mut node);
        if begun {
            node.send_bytes(&run.delta("begun"));
        }
        let failure = stall(Unknown, "ollama", "qwen3:8b", Some(&seq.to_string()));
        node.send_bytes(&run.event_with(RunEventKind::Error, |event| {
            event.error = "response stalled".to_owned();
            event.failure = Some(failure);
        }));
        if begun && more == STREAM {
            let (head, body, whole) = answer(&mut client);
            expect_stream(&head);
            let events = parsed(&body);
            assert!(whole && content(&events) == "begun");
            let last = &events[events.len() - 1];
            assert_eq!(last["error"]["code"], "response_stalled");
        } else {
            expect_error(&mut client, 504, "response_stalled", "provider");
        }
        world.wait(CONFIRMED, seq);
        world.wait_held(0);
    }
    assert_eq!(world.violations(), 0.0);
    drop(node);
    world.rest();
}

/// What a node may not do with a run: begun, is it a terminal, its bytes.
type Offence = (&'static str, bool, bool, fn(&Native) -> Vec<u8>);

const OFFENCES: [Offence; 11] = [
    ("a delta before the start", false, false, |run| {
        run.delta("never")
    }),
    ("a second start", true, false, |run| {
        run.event(RunEventKind::Start)
    }),
    ("a body of the other family", true, false, |run| {
        body_bytes(&of(run), 1, b"never")
    }),
    ("a head of the other family", false, false, |run| {
        crate::kit::start_bytes(&of(run), 1)
    }),
    ("a usage of the other family", true, false, |run| {
        of(run).bare(FrameKind::Usage, 1)
    }),
    ("a kind nobody knows", true, false, |run| {
        of(run).bare(FrameKind::Unknown(9), 1)
    }),
    ("a body that is cut through", true, false, |run| {
        body_bytes(&of(run), 1, "x".repeat(100_000).as_bytes())
    }),
    ("complete before the start", false, true, |run| {
        run.complete(&[])
    }),
    ("an end of the other family", true, true, |run| {
        of(run).bare(FrameKind::End, 1)
    }),
    ("an error of the other family", true, true, |run| {
        frame_bytes(&iop_proto::view::TunnelFrameOut::error(
            &run.id,
            1,
            "provider unreachable",
        ))
    }),
    ("an end of the other family at once", false, true, |run| {
        of(run).bare(FrameKind::End, 0)
    }),
];

/// The run as a tunnel's frames would name it.
fn of(run: &Native) -> Run {
    Run {
        id: run.id.clone(),
        next: 1,
    }
}

/// Proves, [S-68].
#[test]
fn s68_a_run_that_breaks_its_form_fails_alone_and_its_lease_waits_for_the_terminal() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    for (row, (what, begun, is_terminal, bytes)) in OFFENCES.into_iter().enumerate() {
        let mut client = world.asks(&asks("one", CHAT, STREAM));
        let (run, _) = Native::asked(&mut node);
        // Whoever waits shows whether the one slot is free.
        let mut waiting = world.asks(&asks("one", CHAT, ""));
        world.wait_queued(1);
        if begun {
            node.send_bytes(&run.event(RunEventKind::Start));
            node.send_bytes(&run.delta("begun"));
        }
        node.send_bytes(&bytes(&run));
        if begun {
            let (head, body, whole) = answer(&mut client);
            expect_stream(&head);
            let events = parsed(&body);
            assert!(whole && content(&events) == "begun", "{what}");
            assert_eq!(
                events[events.len() - 1]["error"]["code"],
                "stream_violation",
                "{what}"
            );
        } else {
            expect_error(&mut client, 502, "stream_violation", "node");
        }
        if !is_terminal {
            expect_cancel(&mut node, &of(&run));
            // What still comes is dropped, and is no violation again; the terminal frees the slot.
            node.send_bytes(&run.event(RunEventKind::Other("late".to_owned())));
            expect_nothing(&mut node);
            node.send_bytes(&run.event(RunEventKind::Cancelled));
        }
        let next = Native::started(&mut node); // and no CancelRequest before it
        node.send_bytes(&next.complete(&[]));
        assert_eq!(
            object(&mut waiting)["choices"][0]["finish_reason"],
            "stop",
            "{what}"
        );
        world.saw("stream_violation", u32::try_from(row).expect("few") + 1);
        world.wait_held(0);
    }
    assert_eq!(world.edge.metrics().get("iop_edge_node_fences_total"), 0.0);
    drop(node);
    world.rest();
}

/// Proves [S-21], [S-28].
#[test]
fn s28_only_the_first_terminal_of_the_runs_own_node_counts() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut other = world.node("n2");
    let mut client = world.asks(&asks("one", CHAT, ""));
    let run = Native::started(&mut node);
    let mut waiting = world.asks(&asks("one", CHAT, ""));
    world.wait_queued(1);
    for kind in ["complete", "error", "cancelled", "delta"] {
        other.send_bytes(&event(&run.id, kind));
    }
    expect_nothing(&mut other);
    assert_eq!(world.violations(), 4.0);
    world.wait_held(1);
    node.send_bytes(&run.delta("mine"));
    node.send_bytes(&[run.complete(&[]), run.complete(&[]), run.error("late")].concat());
    assert_eq!(
        object(&mut client)["choices"][0]["message"]["content"],
        "mine"
    );
    // The slot was freed once: one more runs, and a second has to wait.
    let next = Native::started(&mut node);
    let last = world.asks(&asks("one", CHAT, ""));
    world.wait_queued(1);
    expect_nothing(&mut node);
    node.send_bytes(&run.complete(&[])); // again, while the slot has another tenant
    expect_nothing(&mut node);
    node.send_bytes(&next.complete(&[]));
    assert_eq!(object(&mut waiting)["choices"][0]["message"]["content"], "");
    let run = Native::started(&mut node);
    node.send_bytes(&run.complete(&[]));
    world.wait_held(0);
    drop((node, other, client, waiting, last));
    world.rest();
}

/// Proves.
#[test]
fn r246_a_client_that_leaves_cancels_its_run_once_in_every_phase() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    for kill in Kill::ALL {
        for (more, started, delta) in [
            ("", false, false),
            ("", true, true),
            (STREAM, true, false),
            (STREAM, true, true),
        ] {
            let client = world.asks(&asks("native", CHAT, more));
            let (run, _) = Native::asked(&mut node);
            if started {
                node.send_bytes(&run.event(RunEventKind::Start));
            }
            if delta {
                node.send_bytes(&run.delta("a"));
            }
            expect_nothing(&mut node);
            kill.client(client);
            expect_cancel(&mut node, &of(&run));
            if started {
                node.send_bytes(&run.delta("dropped"));
            }
            node.send_bytes(&run.event(RunEventKind::Cancelled));
            expect_nothing(&mut node);
            world.wait_held(0);
        }
    }
    assert_eq!(world.violations(), 0.0);
    drop(node);
    world.rest();
}

/// Proves.
#[test]
fn r247_each_event_of_a_run_is_waited_for_and_silence_cancels_it() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut gathered = world.asks(&asks("brief", CHAT, ""));
    let run = Native::started(&mut node);
    node.send_bytes(&run.delta("half"));
    expect_error(&mut gathered, 504, "response_timeout", "edge");
    let cancelled = pending(&mut node);
    assert!(
        matches!(&cancelled[..], [Message::CancelRequest(cancel)] if cancel.run_id == run.id),
        "{cancelled:?}"
    );
    node.send_bytes(&run.event(RunEventKind::Cancelled));
    world.wait_held(0);
    drop((node, gathered));
    world.rest();
}

#[test]
fn an_answer_without_stream_is_gathered_up_to_its_bound_and_not_beyond() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let most = GATHERED_ANSWER_BYTES_MAX as usize;
    // Half of it takes two bytes as JSON.
    let delta = "\n".repeat(30_000) + &"x".repeat(60_000);
    for (more, fits) in [(0, true), (1, false)] {
        let mut client = world.asks(&asks("native", CHAT, ""));
        let run = Native::started(&mut node);
        let whole = most / 120_000;
        for _ in 0..whole {
            node.send_bytes(&run.delta(&delta));
        }
        let last = "y".repeat(most - whole * 120_000 + more);
        node.send_bytes(&run.delta(&last));
        if fits {
            node.send_bytes(&run.complete(&[]));
            let content = object(&mut client)["choices"][0]["message"]["content"].clone();
            assert!(content == json!(delta.repeat(whole) + &last));
        } else {
            expect_error(&mut client, 502, "answer_too_long", "provider");
            expect_cancel(&mut node, &of(&run));
            node.send_bytes(&run.event(RunEventKind::Cancelled));
        }
    }
    world.saw("answer_too_long", 1);
    drop(node);
    world.rest();
}

/// A client without chunks reads events until the connection closes.
#[test]
fn a_stream_to_an_old_client_ends_with_its_connection() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let request = asks("native", CHAT, STREAM).replace("HTTP/1.1", "HTTP/1.0");
    let mut client = world.asks(&request);
    let run = Native::started(&mut node);
    node.send_bytes(&run.delta("old"));
    node.send_bytes(&run.complete(&[]));
    let head = client.head().expect("an answer");
    assert_eq!((head.status, head.header("transfer-encoding")), (200, None));
    let (body, _) = client.body(&head);
    let events = parsed(&body);
    assert_eq!(
        (content(&events).as_str(), events.last()),
        ("old", Some(&Value::from("[DONE]")))
    );
    drop((node, client));
    world.rest();
}

/// Many runs and tunnels on one session, their messages in one record: each client gets its own.
#[test]
fn runs_and_tunnels_interleave_and_keep_to_themselves() {
    let world = World::new(CATALOG);
    let mut node = world.node("n1");
    let mut clients: Vec<_> = (0..8)
        .map(|_| world.asks(&asks("native", CHAT, STREAM)))
        .collect();
    let runs: Vec<_> = (0..8).map(|_| Native::asked(&mut node).0).collect();
    let mut raw = world.asks(&chat("raw", true));
    let mut tunnel = Run::asked(&mut node);
    tunnel.sse(&mut node);
    let mut bytes = Vec::new();
    for run in &runs {
        bytes.extend(run.event(RunEventKind::Start));
    }
    for turn in 0..20 {
        for run in &runs {
            bytes.extend(run.delta(&format!("{} {turn}\n", run.id)));
        }
        bytes.extend(body_bytes(&tunnel, tunnel.next, b"data: raw\n\n"));
        tunnel.next += 1;
    }
    for run in &runs {
        bytes.extend(run.complete(&[]));
    }
    node.send_bytes(&bytes);
    tunnel.end(&mut node);
    let mut answered = Vec::new();
    for client in &mut clients {
        let text = content(&events(client));
        let id = text.split(' ').next().expect("an id").to_owned();
        let expected: String = (0..20).map(|turn| format!("{id} {turn}\n")).collect();
        assert_eq!(text, expected);
        answered.push(id);
    }
    answered.sort_unstable();
    answered.dedup();
    assert_eq!(answered.len(), 8);
    let (head, body, whole) = answer(&mut raw);
    expect_stream(&head);
    assert_eq!((body, whole), (b"data: raw\n\n".repeat(20), true));
    drop((node, clients, raw));
    world.rest();
}
