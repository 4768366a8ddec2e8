use iop_proto::limits::RUN_MESSAGES_MAX;
use serde_json::{Value, json};

use super::*;

fn built(input: &Value) -> (&'static str, Value) {
    let input = input.to_string();
    let members = Members::parse(input.as_bytes()).unwrap();
    let (path, body) = build(&members, "qwen3:8b").unwrap();
    (path, serde_json::from_slice(&body).unwrap())
}

fn refused(input: &Value) -> String {
    let input = input.to_string();
    let members = Members::parse(input.as_bytes());
    members
        .and_then(|members| build(&members, "t").map(|_| ()))
        .unwrap_err()
        .to_string()
}

/// Proves [D-50].
#[test]
fn d50_a_chat_request_is_said_in_ollamas_words() {
    let input = json!({
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [
                {"type": "text", "text": "what is"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}},
                {"type": "text", "text": "this?"},
            ]},
            {"role": "assistant", "content": null, "refusal": null, "annotations": [], "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 12345678901234567890.5}"}},
                {"id": "c2", "type": "function", "function": {"name": "rest", "arguments": ""}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
            {"role": "tool", "tool_call_id": "gone", "content": [{"type": "text", "text": "?"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "strict": true, "parameters": {"$defs": {}}}}],
        "tool_choice": "auto", "parallel_tool_calls": true,
        "temperature": 0.25, "top_p": 1, "seed": 7, "max_completion_tokens": 99, "stop": "END",
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "n": 1, "logprobs": false,
        "response_format": {"type": "json_object"}, "reasoning_effort": "low",
        "stream": false, "stream_options": {"include_usage": true}, "user": "u", "metadata": {"a": "b"},
    });
    let (path, body) = built(&input);
    assert_eq!(path, "/api/chat");
    let expected = json!({
        "model": "qwen3:8b",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what is\nthis?", "images": ["aGk="]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "function": {"name": "look", "arguments": {"at": 12345678901234567890.5}}},
                {"id": "c2", "function": {"name": "rest", "arguments": {}}},
            ]},
            {"role": "tool", "content": "a cat", "tool_name": "look", "tool_call_id": "c1"},
            {"role": "tool", "content": "?", "tool_call_id": "gone"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "strict": true, "parameters": {"$defs": {}}}}],
        "format": "json",
        "think": "low",
        "options": {
            "temperature": 0.25, "top_p": 1, "seed": 7, "num_predict": 99, "stop": ["END"],
            "presence_penalty": 0.5, "frequency_penalty": -0.5,
        },
        "stream": true,
    });
    assert_eq!(body, expected);
}

#[test]
fn numbers_keep_every_digit() {
    let input = br#"{"messages":[],"seed":18446744073709551617,"temperature":1e-400,
        "stop":["a\u00fc"],"response_format":{"type":"json_schema","json_schema":
        {"name":"x","schema":{"maximum":99999999999999999999}}}}"#;
    let (_, body) = build(&Members::parse(input).unwrap(), "t").unwrap();
    let body = String::from_utf8(body).unwrap();
    for text in [
        "\"seed\":18446744073709551617",
        "\"temperature\":1e-400",
        "\"format\":{\"maximum\":99999999999999999999}",
        "\"stop\":[\"a\u{fc}\"]",
    ] {
        assert!(body.contains(text), "{text} in {body}");
    }
}

#[test]
fn a_prompt_goes_to_generate() {
    let input =
        json!({"prompt": "once", "suffix": "end", "max_tokens": 3, "echo": false, "best_of": 1});
    let (path, body) = built(&input);
    assert_eq!(path, "/api/generate");
    let expected = json!({
        "model": "qwen3:8b", "prompt": "once", "suffix": "end",
        "options": {"num_predict": 3}, "stream": true,
    });
    assert_eq!(body, expected);
    assert_eq!(built(&json!({"prompt": ["once"]})).1["prompt"], "once");
    assert_eq!(
        refused(&json!({"prompt": ["a", "b"]})),
        "prompt has too many entries"
    );
    assert_eq!(
        refused(&json!({"prompt": [1]})),
        "prompt[0] is not a string"
    );
}

#[test]
fn what_was_said_of_tools_and_formats_holds() {
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let with = |choice: &str| json!({"messages": [], "tools": tool, "tool_choice": choice});
    assert_eq!(built(&with("auto")).1["tools"], tool);
    assert_eq!(built(&with("none")).1.get("tools"), None);
    let format = |format: Value| built(&json!({"messages": [], "response_format": format})).1;
    assert_eq!(format(json!({"type": "text"})).get("format"), None);
    assert_eq!(
        format(json!({"type": "json_schema", "json_schema": {}}))["format"],
        "json"
    );
    let thinks = |effort: &str| built(&json!({"messages": [], "reasoning_effort": effort})).1;
    assert_eq!(thinks("none")["think"], false);
    assert_eq!(thinks("high")["think"], "high");
}

/// Proves [D-50].
#[test]
fn d50_what_ollama_cannot_express_is_refused_by_its_name() {
    let unsupported = "is not supported by this adapter";
    for (name, value) in [
        ("n", json!(2)),
        ("logprobs", json!(true)),
        ("logit_bias", json!({"1": 2})),
        ("tool_choice", json!("required")),
        (
            "tool_choice",
            json!({"type": "function", "function": {"name": "f"}}),
        ),
        ("parallel_tool_calls", json!(false)),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x"})),
        ("prediction", json!({})),
        ("functions", json!([])),
        ("web_search_options", json!({})),
        ("reasoning_effort", json!("extreme")),
        ("never_heard_of", json!(0)),
    ] {
        let mut input = json!({"messages": []});
        input[name] = value;
        assert_eq!(refused(&input), format!("{name} {unsupported}"));
        input[name] = Value::Null;
        built(&input); // null is absent
    }
    for (text, expected) in [
        (refused(&json!({})), "messages is missing"),
        (
            refused(&json!({"messages": [], "model": "m"})),
            "model belongs to the target, not to the input",
        ),
        (refused(&json!({"messages": {}})), "messages is not a list"),
        (
            refused(&json!({"messages": [], "temperature": "hot"})),
            "temperature is not a number",
        ),
        (
            refused(&json!({"messages": [], "max_tokens": 1, "max_completion_tokens": 1})),
            "max_tokens is given twice",
        ),
        (
            refused(&json!({"messages": [], "stop": [1]})),
            "stop[0] is not a string",
        ),
        (
            refused(&json!({"messages": [], "tools": [{"type": "web_search"}]})),
            "tools[0] is not supported by this adapter",
        ),
        (
            refused(&json!({"messages": [], "response_format": {"type": "grammar"}})),
            "response_format.type is not supported by this adapter",
        ),
        (
            refused(&json!({"messages": [], "prompt": ""})),
            "messages is not supported by this adapter",
        ),
    ] {
        assert_eq!(text, expected);
    }
}

#[test]
fn a_message_is_refused_by_the_place_of_what_is_wrong_with_it() {
    let message =
        |message: Value| refused(&json!({"messages": [{"role": "user", "content": ""}, message]}));
    let part = |part: Value| message(json!({"role": "user", "content": [part]}));
    let call = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    for (text, expected) in [
        (message(json!({})), "messages[1].role is missing"),
        (message(json!("x")), "messages[1] is not a JSON object"),
        (
            message(json!({"role": "function"})),
            "messages[1].role is not supported by this adapter",
        ),
        (
            message(json!({"role": "user", "content": 1})),
            "messages[1].content is not a string",
        ),
        (
            message(json!({"role": "user", "audio": {"id": "x"}})),
            "messages[1].audio is not supported by this adapter",
        ),
        (
            part(json!({"type": "input_audio"})),
            "messages[1].content[0].type is not supported by this adapter",
        ),
        (
            part(json!({"type": "text"})),
            "messages[1].content[0].text is missing",
        ),
        (
            part(json!({"type": "image_url", "image_url": {"url": "http://x/a.png"}})),
            "messages[1].content[0].image_url.url is not a base64 data URL",
        ),
        (
            part(json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,a b"}})),
            "messages[1].content[0].image_url.url is not a base64 data URL",
        ),
        (
            part(json!({"type": "image_url", "image_url": {"url": "data:image/png,aGk="}})),
            "messages[1].content[0].image_url.url is not a base64 data URL",
        ),
        (
            call(json!({"id": "c"})),
            "messages[1].tool_calls[0].function is missing",
        ),
        (
            call(json!({"function": {"name": "f", "arguments": "[1]"}})),
            "messages[1].tool_calls[0].function.arguments does not hold a JSON object",
        ),
        (
            call(json!({"function": {"name": "f", "arguments": "{"}})),
            "messages[1].tool_calls[0].function.arguments does not hold a JSON object",
        ),
    ] {
        assert_eq!(text, expected);
    }
    let message = json!({"role": "user", "content": ""});
    let most = vec![message.clone(); RUN_MESSAGES_MAX];
    built(&json!({"messages": most}));
    let more = vec![message; RUN_MESSAGES_MAX + 1];
    assert_eq!(
        refused(&json!({"messages": more})),
        "messages has too many entries"
    );
}
