//! What one normalized run becomes at Ollama and at an OpenAI-compatible server, and how it ends.
use core::num::NonZeroU64;
use core::time::Duration;

use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{
    Adapter, HardTimeout, OnCancel, RunEventKind, RunRequest, StallTimeout, Usage, run_key,
};
use iop_proto::limits::{NAME_BYTES_MAX, RUN_DELTA_BYTES, RUN_ERROR_BYTES_MAX};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::Agent;
use crate::support::edge::{Conn, Edge, Told, payload, run, tunnel};
use crate::support::provider::{Call, Provider};

/// An Edge, an agent that serves it, and a server of one kind behind adapter `a`.
struct World {
    provider: Provider,
    conn: Conn,
    _agent: Agent,
    _edge: Edge,
}

async fn world(kind: ProviderKind, capacity: i32) -> World {
    world_with(kind, capacity, OnCancel::Abort).await
}

async fn world_with(kind: ProviderKind, capacity: i32, on_cancel: OnCancel) -> World {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let base_url = format!("http://127.0.0.1:{}", provider.port());
    let mut adapter = Adapter::new("a".to_owned(), kind, capacity, base_url);
    adapter.options.on_cancel = on_cancel;
    let conn = edge.ready(payload(vec![adapter])).await;
    World {
        provider,
        conn,
        _agent: agent,
        _edge: edge,
    }
}

const ASK: &str = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// A line of Ollama's stream.
fn line(content: &str) -> Vec<u8> {
    format!(
        "{}\n",
        json!({"message": {"content": content}, "done": false})
    )
    .into_bytes()
}

const LAST: &[u8] = b"{\"message\":{\"content\":\"\"},\"done\":true,\"done_reason\":\"stop\",\
                      \"prompt_eval_count\":3,\"eval_count\":2}\n";

impl World {
    /// Starts a run; the provider's request of it.
    async fn called(&mut self, request: RunRequest) -> Call {
        self.conn.start(request).await;
        self.provider.request().await
    }

    /// The adapter still serves: the positive beside every negative.
    async fn still_serves(&mut self) {
        let mut call = self.called(run("after", ASK)).await;
        call.start_chunked().await;
        call.chunk(&[&line("fine"), LAST].concat()).await;
        call.end_chunked().await;
        assert_eq!(self.conn.told("after").await.deltas, ["fine"]);
    }
}

fn body(call: &Call) -> Value {
    serde_json::from_slice(&call.body).unwrap()
}

/// Proves [R-082], [R-083], [R-084].
#[tokio::test]
async fn r083_a_run_is_one_call_and_its_events_in_order() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let mut call = world.called(run("r", ASK)).await;
    assert_eq!(call.request_line(), "POST /api/chat HTTP/1.1");
    assert_eq!(call.header("content-type"), Some("application/json"));
    assert_eq!(body(&call)["model"], "t");
    assert_eq!(body(&call)["messages"][0]["content"], "hi");
    // Each piece is told before the next one is written, wherever its bytes are cut.
    call.start_chunked().await;
    assert_eq!(world.conn.event().await.kind, RunEventKind::Start);
    for word in ["a", "b", "\u{d55c}\u{1f30d}"] {
        for byte in line(word) {
            call.chunk(&[byte]).await;
        }
        let event = world.conn.event().await;
        assert_eq!(
            (event.kind, event.run_id.as_str()),
            (RunEventKind::Delta, "r")
        );
        assert_eq!(event.delta, word);
    }
    call.chunk(LAST).await;
    call.end_chunked().await;
    let last = world.conn.event().await;
    assert_eq!(last.kind, RunEventKind::Complete);
    let usage = Usage {
        prompt_tokens: 3,
        completion_tokens: 2,
        total_tokens: 5,
    };
    assert_eq!(last.usage, Some(usage));
    assert_eq!(last.metadata[run_key::FINISH_REASON], "stop");
    // The connection is whole: the next run uses it, and no other call was made.
    world.conn.start(run("next", r#"{"prompt":"once"}"#)).await;
    call.read_request().await;
    assert_eq!(call.request_line(), "POST /api/generate HTTP/1.1");
    call.answer("200 OK", b"{\"response\":\"x\",\"done\":true}")
        .await;
    assert_eq!(world.conn.told("next").await.deltas, ["x"]);
    assert!(world.provider.is_idle());
}

/// Proves [R-082], [R-084], [D-50].
#[tokio::test]
async fn r082_what_cannot_be_run_is_one_error_event_and_no_call() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let other = |adapter: &str| RunRequest {
        adapter: adapter.to_owned(),
        ..run("r", ASK)
    };
    let stalls = |ms| RunRequest {
        stall_timeout: StallTimeout::from_wire(ms),
        ..run("r", ASK)
    };
    let to = |target: &str| RunRequest {
        target: target.to_owned(),
        ..run("r", ASK)
    };
    let longest = "n".repeat(NAME_BYTES_MAX as usize);
    let long = format!("{longest}n");
    let late = RunRequest {
        timeout: HardTimeout::from_wire(-1),
        ..run("r", ASK)
    };
    for (request, detail) in [
        (other("b"), "unknown adapter"),
        (other("t"), "unknown adapter"),
        (run("", ASK), "the request has no run id"),
        (run(&long, ASK), "the run id or the target is too long"),
        (to(&long), "the run id or the target is too long"),
        (late, "timeout_sec is negative"),
        (stalls(-1), "response_stall_timeout_ms is negative"),
        (stalls(i64::MAX), "response_stall_timeout_ms is too large"),
        (run("r", "no json"), "input is not a JSON object"),
        (
            run("r", r#"{"messages":[],"logprobs":true}"#),
            "logprobs is not supported by this adapter",
        ),
    ] {
        let run_id = request.run_id.clone();
        world.conn.start(request).await;
        let told = world.conn.told(&run_id).await;
        assert_eq!(told.error(), format!("node rejected: {detail}"));
        assert_eq!((told.start, told.deltas), (None, vec![]));
    }
    assert!(world.provider.is_idle());
    let longest = RunRequest {
        run_id: longest.clone(),
        ..to(&longest)
    };
    let (run_id, target) = (longest.run_id.clone(), longest.target.clone());
    let mut call = world.called(longest).await;
    assert_eq!(body(&call)["model"], target);
    call.write("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        .await;
    call.write(LAST).await;
    drop(call);
    world.conn.told(&run_id).await.completion();
    world.still_serves().await;
}

/// Proves [P-30], [P-31].
#[tokio::test]
async fn p30_each_failure_of_a_server_is_one_error_after_what_had_come() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let not_found = json!({"error": "model 't' not found"}).to_string();
    let huge = format!("{{\"error\":\"{}\"}}", "x".repeat(2 * RUN_ERROR_BYTES_MAX));
    for (status, body, expected) in [
        (
            "404 Not Found",
            not_found.as_str(),
            "HTTP status 404: model 't' not found",
        ),
        ("500 Oops", "", "HTTP status 500"),
        (
            "302 Found",
            "elsewhere\r\n\u{7}",
            "HTTP status 302: elsewhere\\r\\n\\u{7}",
        ),
        ("503 Busy", &huge, "HTTP status 503: {\"error\":\"xxxxxx"),
    ] {
        let mut call = world.called(run("r", ASK)).await;
        call.write(format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        ))
        .await;
        drop(call);
        let told = world.conn.told("r").await;
        let expected = format!("provider unreachable: {expected}");
        assert!(told.error().starts_with(&expected), "{}", told.error());
        assert!(told.error().len() <= 256 && told.start.is_none());
    }
    let said = b"{\"error\":\"the runner crashed\"}\n";
    for (lines, deltas, expected) in [
        (
            [&line("a"), &said[..]].concat(),
            &["a"][..],
            "the provider says: the runner crashed",
        ),
        (line("a"), &["a"], "the answer ended before its end"),
        (vec![], &[], "the answer ended before its end"),
        (
            b"<html>\n".to_vec(),
            &[],
            "the answer is not of this adapter's kind of server",
        ),
    ] {
        let mut call = world.called(run("r", ASK)).await;
        call.start_chunked().await;
        if !lines.is_empty() {
            call.chunk(&lines).await;
        }
        call.end_chunked().await;
        let told = world.conn.told("r").await;
        assert_eq!(told.error(), format!("provider unreachable: {expected}"));
        assert_eq!(told.deltas, deltas);
    }
    let mut call = world.called(run("r", ASK)).await;
    call.start_chunked().await;
    call.chunk(&line("half")).await;
    call.reset();
    let told = world.conn.told("r").await;
    assert_eq!(
        told.error(),
        "provider unreachable: connection lost inside the response body"
    );
    world.still_serves().await;
}

/// Proves [R-242].
#[tokio::test]
async fn r242_runs_and_tunnels_of_one_adapter_share_its_capacity() {
    let mut world = world(ProviderKind::Ollama, 2).await;
    let mut held = world.called(run("run", ASK)).await;
    held.start_chunked().await;
    assert_eq!(world.conn.event().await.kind, RunEventKind::Start);
    world.conn.open(tunnel("tunnel", b"{}")).await;
    let raw = world.provider.request().await;
    world.conn.open(tunnel("more", b"{}")).await;
    world.conn.start(run("most", ASK)).await;
    world.conn.start(run("nobody's", "no json")).await; // answered when those above have arrived
    assert_eq!(world.conn.event().await.kind, RunEventKind::Error);
    assert!(world.provider.is_idle(), "both wait for a slot");
    held.chunk(LAST).await;
    held.end_chunked().await;
    assert_eq!(world.conn.event().await.kind, RunEventKind::Complete);
    held.read_request().await;
    assert_eq!(held.request_line(), "POST /v1/chat/completions HTTP/1.1");
    assert!(world.provider.is_idle(), "the run still waits");
    held.answer("200 OK", b"raw").await;
    assert_eq!(world.conn.answer("more").await.body, b"raw");
    held.read_request().await;
    assert_eq!(held.request_line(), "POST /api/chat HTTP/1.1");
    held.answer("200 OK", LAST).await;
    world.conn.told("most").await.completion();
    drop(raw);
}

/// Proves [R-300], [R-301].
#[tokio::test]
async fn r301_metadata_moves_nothing_and_cancels_nothing() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let entries = |entries: &[(&str, &str)]| {
        let entries = entries.iter();
        entries
            .map(|&(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    };
    let claims = RunRequest {
        metadata: entries(&[
            ("cwd", "/etc"),
            ("work_dir", "/etc"),
            ("working_directory", "/etc"),
            ("session_id", "s2"),
            ("owner", "s2"),
            ("run_id", "plain"),
            (run_key::TEXT_TOOL_FALLBACK, "true"),
        ]),
        session_id: "s1".to_owned(),
        ..run("claims", ASK)
    };
    let plain = world.called(run("plain", ASK)).await;
    let mut call = world.called(claims).await;
    assert_eq!(call.body, plain.body);
    let head = |call: &Call| call.head.to_ascii_lowercase();
    assert_eq!(head(&call), head(&plain));
    assert!(std::env::current_dir().unwrap() != std::path::Path::new("/etc"));
    // Its own id ends it, no id or session it claims.
    for other in ["s1", "s2", "nobody"] {
        world.conn.cancel(other).await;
    }
    call.start_chunked().await;
    let start = world.conn.event().await;
    assert_eq!(
        (start.kind, start.run_id.as_str()),
        (RunEventKind::Start, "claims")
    );
    assert!(start.metadata.is_empty());
    world.conn.cancel("claims").await;
    let cancelled = world.conn.event().await;
    assert_eq!(
        (cancelled.kind, cancelled.run_id.as_str()),
        (RunEventKind::Cancelled, "claims")
    );
    assert!(call.gone().await < Duration::from_millis(250));
    drop(plain);
    assert_eq!(
        world.conn.told("plain").await.error(),
        "provider unreachable: connection lost before a response"
    );
}

/// Proves [R-081].
#[tokio::test]
async fn r081_the_end_of_a_session_ends_its_runs_and_tunnels_and_no_other() {
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let _agent = Agent::start(edge.config());
    let base_url = format!("http://127.0.0.1:{}", provider.port());
    let adapter = || Adapter::new("a".to_owned(), ProviderKind::Ollama, 4, base_url.clone());
    let mut conn = edge.ready(payload(vec![adapter()])).await;
    let mut calls = vec![];
    for n in 0..4 {
        if n % 2 == 0 {
            conn.start(run(&format!("r{n}"), ASK)).await;
        } else {
            conn.open(tunnel(&format!("r{n}"), b"{}")).await;
        }
        let mut call = provider.request().await;
        call.start_chunked().await;
        calls.push(call);
    }
    for _ in 0..4 {
        conn.message().await;
    }
    drop(conn);
    for call in &mut calls {
        assert!(call.gone().await < Duration::from_millis(100));
    }
    // Capacity is back, and the next session's run is nobody else's business.
    let mut conn = edge.ready(payload(vec![adapter()])).await;
    for n in 0..4 {
        conn.start(run(&format!("r{n}"), ASK)).await;
        let mut call = provider.request().await;
        call.write("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            .await;
        call.write(LAST).await;
        drop(call);
        conn.told(&format!("r{n}")).await.completion();
    }
}

#[tokio::test]
async fn thinking_is_silent_on_the_wire_and_keeps_a_run_alive_and_silence_does_not() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let stall_ms = NonZeroU64::new(1_500).unwrap();
    let request = |run_id| RunRequest {
        stall_timeout: StallTimeout::Millis(stall_ms),
        ..run(run_id, ASK)
    };
    let mut call = world.called(request("r")).await;
    call.start_chunked().await;
    let thinks = b"{\"message\":{\"content\":\"\",\"thinking\":\"hmm\"},\"done\":false}\n";
    let began = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(250));
    while began.elapsed() < Duration::from_millis(2 * stall_ms.get()) {
        ticks.tick().await;
        call.chunk(thinks).await;
    }
    call.chunk(&[&line("yes"), LAST].concat()).await;
    call.end_chunked().await;
    let told = world.conn.told("r").await;
    assert_eq!(told.deltas, ["yes"]);
    told.completion();
    let mut call = world.called(request("silent")).await;
    call.start_chunked().await;
    let told = world.conn.told("silent").await;
    assert_eq!(told.error(), "response stalled");
    assert!(told.terminal.unwrap().failure.is_some());
}

#[tokio::test]
async fn a_long_delta_is_cut_between_characters_into_events_an_edge_can_hold() {
    let mut world = world(ProviderKind::Ollama, 4).await;
    let text = format!("x{}", "\u{d55c}\"\n".repeat(RUN_DELTA_BYTES));
    let mut call = world.called(run("r", ASK)).await;
    let answer = [&line(&text), LAST].concat();
    let sent = async {
        call.start_chunked().await;
        for piece in answer.chunks(9_999) {
            call.chunk(piece).await;
        }
        call.end_chunked().await;
    };
    let (told, ()) = tokio::join!(world.conn.told("r"), sent);
    assert_eq!(told.text(), text);
    assert!(told.deltas.len() > 4);
}

/// Proves [R-302].
#[tokio::test]
async fn r302_a_direct_run_brings_native_tool_calls_on_its_completion() {
    for kind in [ProviderKind::OpenAiCompat, ProviderKind::Vllm] {
        let mut world = world(kind, 4).await;
        let input = r#"{"messages":[],"tools":[{"type":"function"}],"seed":18446744073709551617}"#;
        let mut call = world.called(run("r", input)).await;
        assert_eq!(call.request_line(), "POST /v1/chat/completions HTTP/1.1");
        assert_eq!(
            call.body,
            format!("{{\"model\":\"t\",{}", &input[1..]).as_bytes()
        );
        let calls = json!([{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]);
        let text = "<tool_call>{\"name\":\"g\"}</tool_call>";
        let message = json!({"content": text, "tool_calls": calls});
        let answer = json!({"choices": [{"message": message, "finish_reason": "tool_calls"}]});
        call.answer("200 OK", answer.to_string().as_bytes()).await;
        let told = world.conn.told("r").await;
        assert_eq!(
            (told.start.as_ref().unwrap().len(), told.text()),
            (0, text.to_owned())
        );
        let json = &told.completion()[run_key::TOOL_CALLS];
        assert_eq!(serde_json::from_str::<Value>(json).unwrap(), calls);
        assert_eq!(told.completion()[run_key::FINISH_REASON], "tool_calls");
        assert_eq!(told.completion().get(run_key::TEXT_TOOL_FALLBACK), None);
    }
}

const TOOLS: &str = r#"{"messages":[{"role":"system","content":"S"},{"role":"user","content":"U"}],
    "tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","stream":true}"#;

async fn event_stream(call: &mut Call, content: &str) {
    call.start_chunked().await;
    let choice = json!({"index": 0, "delta": {"content": content}, "finish_reason": "stop"});
    let chunk = format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [choice]}));
    call.chunk(chunk.as_bytes()).await;
    call.end_chunked().await;
}

const NO_TOOLS: &[u8] = br#"{"error":{"message":"tools not supported","code":400}}"#;

/// Proves [R-305], [R-306], [R-307].
#[tokio::test]
async fn r305_a_server_without_tools_is_asked_once_more_in_text() {
    let mut world = world(ProviderKind::OpenAiCompat, 4).await;
    let mut call = world.called(run("r", TOOLS)).await;
    assert!(body(&call).get("tools").is_some());
    call.answer("400 Bad Request", NO_TOOLS).await;
    call.read_request().await;
    let second = body(&call);
    assert_eq!(
        (second.get("tools"), second.get("tool_choice")),
        (None, None)
    );
    let messages = second["messages"].as_array().unwrap();
    let systems = messages
        .iter()
        .filter(|message| message["role"] == "system");
    assert_eq!((systems.count(), messages.len()), (1, 2));
    let system = messages[0]["content"].as_str().unwrap();
    assert!(system.starts_with("S") && system.contains("<tool_call>"));
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
    event_stream(&mut call, text).await;
    let told = world.conn.told("r").await;
    assert_eq!(told.text(), text);
    assert_eq!(
        told.start.as_ref().unwrap()[run_key::TEXT_TOOL_FALLBACK],
        "true"
    );
    assert_eq!(told.completion()[run_key::TEXT_TOOL_FALLBACK], "true");
    assert_eq!(told.completion().get(run_key::TOOL_CALLS), None);
    // Served at once, or refused for another reason: one call, no mark.
    world.conn.start(run("first", TOOLS)).await;
    call.read_request().await;
    event_stream(&mut call, "x").await;
    let told: Told = world.conn.told("first").await;
    assert_eq!(told.completion().get(run_key::TEXT_TOOL_FALLBACK), None);
    world.conn.start(run("other", TOOLS)).await;
    call.read_request().await;
    call.answer("400 Bad Request", b"{\"error\":{\"message\":\"too hot\"}}")
        .await;
    let told = world.conn.told("other").await;
    assert_eq!(
        told.error(),
        "provider unreachable: HTTP status 400: too hot"
    );
    assert!(world.provider.is_idle());
    // What cannot be put into text stays as the provider refused it.
    let odd = r#"{"messages":"U","tools":[{"type":"function"}]}"#;
    world.conn.start(run("odd", odd)).await;
    call.read_request().await;
    call.answer("400 Bad Request", NO_TOOLS).await;
    let told = world.conn.told("odd").await;
    assert_eq!(
        told.error(),
        "provider unreachable: HTTP status 400: tools not supported"
    );
    // Refused twice: no third call.
    world.conn.start(run("twice", TOOLS)).await;
    call.read_request().await;
    call.answer("400 Bad Request", NO_TOOLS).await;
    call.read_request().await;
    call.answer("400 Bad Request", NO_TOOLS).await;
    let told = world.conn.told("twice").await;
    assert_eq!(
        told.error(),
        "provider unreachable: HTTP status 400: tools not supported"
    );
    assert!(world.provider.is_idle());
}

#[tokio::test]
async fn a_cancelled_run_is_not_asked_a_second_time() {
    let mut world = world_with(ProviderKind::OpenAiCompat, 1, OnCancel::Drain).await;
    let mut call = world.called(run("r", TOOLS)).await;
    world.conn.cancel("r").await;
    let told = world.conn.told("r").await;
    assert_eq!(told.terminal.unwrap().kind, RunEventKind::Cancelled);
    // Its call is read to its end and holds the only slot: a second request of it would come first.
    world.conn.start(run("next", ASK)).await;
    let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\n";
    call.write(format!("{head}content-length: {}\r\n\r\n", NO_TOOLS.len()))
        .await;
    call.write(NO_TOOLS).await;
    drop(call);
    let mut call = world.provider.request().await;
    assert_eq!(body(&call)["messages"][0]["content"], "hi");
    event_stream(&mut call, "x").await;
    assert_eq!(world.conn.told("next").await.text(), "x");
    assert!(world.provider.is_idle());
}
