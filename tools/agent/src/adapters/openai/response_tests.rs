use iop_proto::domain::run_key;
use serde_json::{Value, json};

use super::*;
use crate::answer::Completion;
use crate::normalized::{Dialect, read_answer};

type Read = Result<(Vec<String>, Completion), RunError>;

fn events(pieces: &[&[u8]]) -> Read {
    read_answer(Dialect::OpenAi, true, pieces)
}

fn whole(answer: &Value) -> Read {
    let json = format!("{answer:#}\n");
    let (first, rest) = json.as_bytes().split_at(json.len() / 2);
    read_answer(Dialect::OpenAi, false, &[first, rest])
}

fn chunk(delta: Value, finish: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    format!(
        "data: {}\n\n",
        json!({"id": "x", "choices": [choice], "usage": null})
    )
}

fn tool_calls(read: Read) -> Option<Value> {
    let json = read.unwrap().1.metadata.remove(run_key::TOOL_CALLS)?;
    Some(serde_json::from_str(&json).unwrap())
}

/// Proves [P-26].
#[test]
fn p26_the_same_deltas_come_of_an_event_stream_cut_at_every_byte() {
    let words = ["\u{d55c}\u{ad6d}", " \u{1f30d}"];
    let stream = [
        ": keep-alive\r\n\r\n".to_owned(),
        chunk(json!({"role": "assistant", "content": ""}), None),
        chunk(json!({"content": words[0]}), None).replace('\n', "\r\n"),
        format!("event: message\nid: 7\n{}", chunk(json!({"content": words[1]}), None)),
        chunk(json!({}), Some("length")),
        "data:{\"choices\":[],\"usage\":{\"prompt_tokens\":1,\ndata: \"completion_tokens\":2,\"total_tokens\":3}}\n\n".to_owned(),
        "data: [DONE]\n\n".to_owned(),
        chunk(json!({"content": "after the end"}), None),
    ]
    .concat();
    let stream = stream.as_bytes();
    for at in 0..=stream.len() {
        let (deltas, completion) = events(&[&stream[..at], &stream[at..]]).unwrap();
        assert_eq!(deltas, words, "cut at {at}");
        assert_eq!(completion.metadata[run_key::FINISH_REASON], "length");
        assert_eq!(completion.usage.unwrap().total_tokens, 3);
    }
    let bytes: Vec<&[u8]> = stream.chunks(1).collect();
    assert_eq!(events(&bytes).unwrap().0, words);
}

#[test]
fn an_event_of_many_lines_grows_in_place_up_to_its_bound() {
    let line = Bytes::from(format!("data: {}", "x".repeat(63)));
    let mut events = Events::default();
    let (mut moves, mut at) = (0, events.data.as_ptr());
    for lines in 1..=RUN_LINE_BYTES_MAX / 64 {
        assert_eq!(events.take(&line), Ok(false));
        assert_eq!(events.data.len(), lines * 64 - 1);
        moves += u32::from(events.data.as_ptr() != at);
        at = events.data.as_ptr();
        if moves > 64 {
            break;
        }
    }
    assert!(moves <= 64, "gathered again with every line");
    assert_eq!(events.data.len(), RUN_LINE_BYTES_MAX - 1, "the longest");
    assert_eq!(events.take(&"data:".into()), Ok(false));
    assert_eq!(events.take(&"data:".into()), Err(RunError::LineTooLong));
}

/// Proves.
#[test]
fn r302_native_tool_calls_are_equal_on_the_completion() {
    let calls = json!([{"id": "c1", "function": {"name": "f", "arguments": "{}"}, "own": 1}]);
    let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
    let answer =
        json!({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]});
    assert_eq!(tool_calls(whole(&answer)), Some(calls));
    let piece = |piece: Value| chunk(json!({"tool_calls": [piece]}), None);
    let stream = [
        piece(
            json!({"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}),
        ),
        piece(json!({"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}})),
        piece(json!({"index": 0, "function": {"arguments": "{\"a\":"}})),
        piece(json!({"index": 0, "function": {"arguments": "1}"}})),
        chunk(json!({}), Some("tool_calls")),
        "data: [DONE]\n\n".to_owned(),
    ];
    let call = |n: usize, id: &str, name: &str, arguments: &str| json!({"index": n, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!([call(0, "c1", "f", "{\"a\":1}"), call(1, "c2", "g", "{}")]);
    assert_eq!(
        tool_calls(events(&[stream.concat().as_bytes()])),
        Some(expected)
    );
}

/// Proves.
#[test]
fn r304_content_is_never_read_for_tool_calls() {
    let text = "<tool_call>{\"name\":\"f\"}</tool_call>";
    for calls in [json!(null), json!([])] {
        let message = json!({"content": text, "tool_calls": calls});
        let answer = json!({"choices": [{"message": message, "finish_reason": "stop"}]});
        assert_eq!(whole(&answer).unwrap().0, [text]);
        assert_eq!(tool_calls(whole(&answer)), None);
    }
}

#[test]
fn completions_and_foreign_choices() {
    let choices = json!([
        {"index": 0, "text": "a", "finish_reason": "stop"},
        {"index": 1, "text": "other", "finish_reason": "length"},
    ]);
    let (deltas, completion) = whole(&json!({"choices": choices})).unwrap();
    assert_eq!(
        (deltas, &*completion.metadata[run_key::FINISH_REASON]),
        (vec!["a".to_owned()], "stop")
    );
    let stream = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n";
    assert_eq!(
        events(&[stream.as_bytes()]).unwrap().0,
        ["a", "b"],
        "whole without [DONE]"
    );
}

#[test]
fn lists_of_an_answer_are_bounded_before_they_are_read() {
    let choices = |count: usize| {
        let mut choices = vec![json!({"index": 1}); count];
        choices[0] = json!({"text": "a", "finish_reason": "stop"});
        whole(&json!({"choices": choices})).map(|(deltas, _)| deltas)
    };
    assert_eq!(choices(RUN_PARTS_MAX), Ok(vec!["a".to_owned()]));
    assert_eq!(choices(RUN_PARTS_MAX + 1), Err(RunError::Foreign));
    let pieces = |count: usize| {
        let piece = json!({"index": 0, "function": {"name": "f"}});
        let delta = json!({"tool_calls": vec![piece; count]});
        events(&[chunk(delta, Some("stop")).as_bytes()])
    };
    let named = tool_calls(pieces(RUN_TOOL_CALLS_MAX)).unwrap();
    let name = named[0]["function"]["name"].as_str().unwrap();
    assert_eq!(name.len(), RUN_TOOL_CALLS_MAX);
    let more = pieces(RUN_TOOL_CALLS_MAX + 1);
    assert_eq!(more, Err(RunError::ToolCallsTooLarge));
    for choices in ["[[]]", "[null]", "[7]", "{}"] {
        let event = format!("data: {{\"choices\":{choices}}}\n\n");
        let read = events(&[event.as_bytes()]);
        assert_eq!(read, Err(RunError::Foreign), "{choices}");
    }
}

/// Proves [P-30], [P-31].
#[test]
fn p31_an_error_or_a_missing_end_is_a_failure() {
    let begun = chunk(json!({"content": "a"}), None);
    let error = "data: {\"error\":{\"message\":\"boom\",\"code\":500}}\n\n";
    let said = RunError::Said {
        said: "boom".to_owned(),
    };
    assert_eq!(events(&[begun.as_bytes(), error.as_bytes()]), Err(said));
    assert_eq!(events(&[begun.as_bytes()]), Err(RunError::Unfinished));
    assert_eq!(events(&[]), Err(RunError::Unfinished));
    let aborted = [
        begun,
        chunk(json!({}), Some("abort")),
        "data: [DONE]\n\n".to_owned(),
    ]
    .concat();
    assert_eq!(events(&[aborted.as_bytes()]), Err(RunError::Aborted));
    assert_eq!(
        events(&[b"data: {\"choices\":7}\n\n"]),
        Err(RunError::Foreign)
    );
    assert_eq!(whole(&json!({"choices": []})), Err(RunError::Unfinished));
    assert_eq!(
        whole(&json!({"error": "no"})),
        Err(RunError::Said {
            said: "no".to_owned()
        })
    );
    assert_eq!(
        read_answer(Dialect::OpenAi, false, &[b"<html>"]),
        Err(RunError::Foreign)
    );
}
