use serde_json::{Value, json};

use super::*;

fn retold(input: &Value) -> (Value, bool) {
    let (body, text_tools) = without_tools(input.to_string().as_bytes(), "t").unwrap();
    (serde_json::from_str(&body).unwrap(), text_tools)
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
}

fn instructed(messages: Value) -> Value {
    retold(&json!({"messages": messages, "tools": tools()})).0["messages"].clone()
}

/// Proves.
#[test]
fn r306_the_tool_api_is_gone_and_everything_else_stays() {
    let input = json!({
        "seed": 18_446_744_073_709_551_615_u64, "tools": tools(), "tool_choice": "auto",
        "parallel_tool_calls": false, "messages": [{"role": "user", "content": "U"}], "stream": true,
    });
    let (body, text_tools) = retold(&input);
    assert!(text_tools);
    let mut names: Vec<_> = body
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["messages", "model", "seed", "stream"]);
    assert_eq!(
        (&body["model"], &body["seed"]),
        (&"t".into(), &input["seed"])
    );
    let (body, _) = without_tools(b"{\"x\":1e400,\"messages\":[],\"y\":[ 1 ]}", "t").unwrap();
    assert_eq!(
        body,
        "{\"model\":\"t\",\"x\":1e400,\"messages\":[],\"y\":[ 1 ]}"
    );
}

/// Proves.
#[test]
fn r307_the_instruction_stands_in_the_one_leading_system_message() {
    let user = json!({"role": "user", "content": "U"});
    let system = |content: Value| json!({"role": "system", "content": content});
    for (messages, texts) in [
        (json!([system(json!("S")), user]), &["S"][..]),
        (json!([user]), &[]),
        (
            json!([system(json!([{"type": "text", "text": "P"}])), user]),
            &["P"],
        ),
        (
            json!([{"role": "developer", "content": "D"}, user, system(json!("late"))]),
            &["D", "late"],
        ),
    ] {
        let told = instructed(messages);
        let roles: Vec<_> = told
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].clone())
            .collect();
        assert_eq!(roles, ["system", "user"]);
        let words = told[0]["content"].as_str().unwrap();
        for text in texts {
            assert!(words.contains(text), "{text}");
        }
        assert!(words.contains("<tool_call>") && words.contains(&tools().to_string()));
        assert_eq!(told[1], user);
    }
}

#[test]
fn what_the_caller_said_of_choosing_holds() {
    let with = |choice: Value| {
        let input = json!({"messages": [], "tools": tools(), "tool_choice": choice});
        let (body, text_tools) = retold(&input);
        let words = body["messages"][0]["content"].as_str().map(str::to_owned);
        (words.unwrap_or_default(), text_tools)
    };
    assert!(
        with(json!("required"))
            .0
            .contains("You must call at least one tool.")
    );
    let named = json!({"type": "function", "function": {"name": "look"}});
    assert!(with(named).0.contains("You must call the tool \"look\"."));
    assert!(!with(json!("auto")).0.contains("must"));
    assert_eq!(with(json!("none")), (String::new(), false));
}

#[test]
fn earlier_calls_and_their_results_are_told_in_the_same_words() {
    let told = instructed(json!([
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 1e400}"}},
            {"id": "c2", "type": "function", "function": {"name": "rest", "arguments": "oops"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "a \"cat\""},
    ]));
    let calls = "I look.\n<tool_call>{\"name\":\"look\",\"arguments\":{\"at\": 1e400}}</tool_call>\n\
                 <tool_call>{\"name\":\"rest\",\"arguments\":{}}</tool_call>";
    assert_eq!(told[2], json!({"role": "assistant", "content": calls}));
    let result = "<tool_response>{\"name\":\"look\",\"content\":\"a \\\"cat\\\"\"}</tool_response>";
    assert_eq!(told[3], json!({"role": "user", "content": result}));
}

/// Proves.
#[test]
fn r305_only_a_refusal_of_tools_is_one() {
    for (status, message) in [
        (400, "tools not supported"),
        (
            400,
            "registry.ollama.ai/library/gemma does not support tools",
        ),
        (
            400,
            "\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set",
        ),
        (500, "tools param requires --jinja flag"),
        (422, "Extra inputs are not permitted: body.tools"),
        (400, "Unrecognized request argument supplied: tools"),
        (501, "Tool calling is not implemented"),
    ] {
        assert!(refuses_tools(status, message), "{message}");
    }
    for (status, message) in [
        (400, "temperature must be at most 2"),
        (400, "this model does not support images"),
        (400, "messages[3].tool_call_id is missing"),
        (401, "tools not supported"),
        (429, "tools not supported"),
        (503, "tools not supported"),
        (200, "tools not supported"),
        (500, ""),
    ] {
        assert!(!refuses_tools(status, message), "{status} {message}");
    }
}
