use iop_proto::domain::run_key;
use serde_json::{Value, json};

use super::*;
use crate::answer::Completion;
use crate::normalized::{Dialect, read_answer};

fn read(pieces: &[&[u8]]) -> Result<(Vec<String>, Completion), RunError> {
    read_answer(Dialect::Ollama, false, pieces)
}

fn ndjson(lines: &[Value]) -> Vec<u8> {
    lines
        .iter()
        .map(|line| format!("{line}\n"))
        .collect::<String>()
        .into_bytes()
}

fn chat(content: &str) -> Value {
    json!({"model": "m", "created_at": "x", "message": {"role": "assistant", "content": content}, "done": false})
}

fn end(reason: &str) -> Value {
    json!({"message": {"role": "assistant", "content": ""}, "done": true, "done_reason": reason,
           "total_duration": 5, "prompt_eval_count": 3, "eval_count": 4})
}

fn finish(completion: &Completion) -> &str {
    &completion.metadata[run_key::FINISH_REASON]
}

/// Proves [P-26], [P-29].
#[test]
fn p29_the_same_deltas_come_of_a_stream_cut_at_every_byte() {
    let words = ["\u{d55c}\u{ad6d}", "\u{c5b4} \u{1f30d}", " \"x\"\n"];
    let mut lines: Vec<_> = words.iter().map(|word| chat(word)).collect();
    lines.push(end("stop"));
    let stream = ndjson(&lines);
    for at in 0..=stream.len() {
        let (deltas, completion) = read(&[&stream[..at], &stream[at..]]).unwrap();
        assert_eq!(deltas, words, "cut at {at}");
        let usage = Usage {
            prompt_tokens: 3,
            completion_tokens: 4,
            total_tokens: 7,
        };
        assert_eq!(completion.usage, Some(usage));
        assert_eq!(
            (finish(&completion), completion.metadata.len()),
            ("stop", 1)
        );
    }
    let bytes: Vec<&[u8]> = stream.chunks(1).collect();
    assert_eq!(read(&bytes).unwrap().0, words);
}

#[test]
fn a_character_split_between_two_lines_is_one_character() {
    let halves = b"{\"response\":\"a\\ud83c\"}\n{\"response\":\"\\udf0d\"}\n{\"done\":true}";
    assert_eq!(read(&[halves]).unwrap().0, ["a", "\u{1f30d}"]);
    let bytes = b"{\"response\":\"a\xf0\x9f\"}\n{\"response\":\"\x8c\x8d\"}\n{\"done\":true}";
    assert_eq!(read(&[bytes]).unwrap().0, ["a", "\u{1f30d}"]);
    let torn = b"{\"response\":\"a\xf0\x9f\"}\n{\"done\":true}";
    assert_eq!(read(&[torn]).unwrap().0, ["a", "\u{fffd}"]);
}

#[test]
fn an_answer_in_one_object_and_one_of_generate_read_alike() {
    let whole = json!({"message": {"content": "hi"}, "done": true, "done_reason": "length"});
    let (deltas, completion) = read(&[whole.to_string().as_bytes()]).unwrap();
    assert_eq!(
        (deltas, finish(&completion)),
        (vec!["hi".to_owned()], "length")
    );
    assert_eq!(completion.usage, None);
    let lines = [
        json!({"response": "a", "thinking": null, "done": false}),
        json!({"response": "", "done": true, "context": [1, 2], "eval_count": 9}),
    ];
    let (deltas, completion) = read(&[&ndjson(&lines)]).unwrap();
    assert_eq!(deltas, ["a"]);
    assert_eq!(completion.usage.unwrap().total_tokens, 9);
}

#[test]
fn thinking_is_no_part_of_the_answer() {
    let thinks =
        json!({"message": {"role": "assistant", "content": "", "thinking": "hmm"}, "done": false});
    let (deltas, completion) = read(&[&ndjson(&[thinks, chat("yes"), end("stop")])]).unwrap();
    assert_eq!(deltas, ["yes"]);
    assert!(!format!("{completion:?}").contains("hmm"));
}

/// Proves [R-302].
#[test]
fn r302_tool_calls_become_openais_on_the_completion_alone() {
    let calls = |calls: &str| format!("{{\"message\":{{\"tool_calls\":{calls}}}}}\n");
    let lines = [
        calls(r#"[{"function":{"name":"look","arguments":{"at": 12345678901234567890.5}}}]"#),
        format!("{}\n", chat("so")),
        calls(r#"[{"id":"theirs","function":{"index":1,"name":"rest"}}]"#),
        calls(r#"[{"function":{"name":"go","arguments":"{\"s\": \"ü\"}"}}]"#),
        format!("{}\n", end("stop")),
    ];
    let (deltas, completion) = read(&[lines.concat().as_bytes()]).unwrap();
    assert_eq!(deltas, ["so"]);
    assert_eq!(finish(&completion), "tool_calls");
    let calls: Value = serde_json::from_str(&completion.metadata[run_key::TOOL_CALLS]).unwrap();
    let call = |n: usize, id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"index": n, "id": id, "type": "function", "function": function})
    };
    let (first, third) = ("call_000000000000000000", "call_000000000000000002");
    let expected = json!([
        call(0, first, "look", "{\"at\": 12345678901234567890.5}"),
        call(1, "theirs", "rest", "{}"),
        call(2, third, "go", "{\"s\": \"ü\"}"),
    ]);
    assert_eq!(calls, expected);
}

/// Proves [R-304].
#[test]
fn r304_text_that_looks_like_a_tool_call_stays_text() {
    let text = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";
    let (deltas, completion) = read(&[&ndjson(&[chat(text), end("stop")])]).unwrap();
    assert_eq!(deltas, [text]);
    assert_eq!(completion.metadata.get(run_key::TOOL_CALLS), None);
    assert_eq!(finish(&completion), "stop");
}

/// Proves [P-30], [P-31].
#[test]
fn p30_an_error_inside_a_stream_and_a_stream_without_its_end_are_failures() {
    let error = json!({"error": "an error was encountered while running the model\n"});
    let said = |error: Value| match read(&[&ndjson(&[chat("a"), error])]) {
        Err(RunError::Said { said }) => said,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        said(error),
        "an error was encountered while running the model\\n"
    );
    assert_eq!(said(json!({"error": {"message": "deep"}})), "deep");
    assert_eq!(said(json!({"error": 7})), "7");
    assert_eq!(read(&[&ndjson(&[chat("a")])]), Err(RunError::Unfinished));
    assert_eq!(read(&[]), Err(RunError::Unfinished));
    for foreign in [
        "<html>",
        "[]",
        "{\"done\":\"yes\"}",
        "{\"message\":{\"content\":1}}",
    ] {
        assert_eq!(
            read(&[foreign.as_bytes()]),
            Err(RunError::Foreign),
            "{foreign}"
        );
    }
    let whole = ndjson(&[chat("a"), end("stop"), chat("after the end")]);
    assert_eq!(read(&[&whole]).unwrap().0, ["a"]);
}
