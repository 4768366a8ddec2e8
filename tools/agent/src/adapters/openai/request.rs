//! The request of a direct run: the input as it is, and the target as its model.
//!
//! Lives on: the main task. View: one request. Bound: the input's own size.
use bytes::{BufMut, Bytes, BytesMut};
use iop_proto::catalog::Operation;
use serde_json::value::RawValue;

use crate::normalized::members::{Members, Refused, Why};

/// What a run's events cannot bring back: asked for, it would silently be missing.
const LOST: [(&str, &str); 3] = [("n", "1"), ("best_of", "1"), ("logprobs", "false")];

/// Which operation serves `input`, its body with `target` as the model, and whether it brings tools.
///
/// # Errors
/// Not an object with messages or a prompt, a model named in it, or a wish no event can fulfil.
pub(in crate::adapters) fn call(
    input: &Bytes,
    target: &str,
) -> Result<(Operation, Bytes, bool), Refused> {
    let members = Members::parse(input)?;
    for (name, value) in members.iter() {
        if name == "model" {
            return Err(Refused::at(name, Why::ModelNamed));
        }
        let lost = LOST.iter().find(|(lost, _)| *lost == name);
        if lost.is_some_and(|(_, holds)| value.get() != *holds) {
            return Err(Refused::at(name, Why::Unsupported));
        }
    }
    let operation = if members.get("messages").is_some() {
        Operation::ChatCompletions
    } else if members.get("prompt").is_some() {
        Operation::Completions
    } else {
        return Err(Refused::at("messages", Why::Missing));
    };
    let tools = members.get("tools").map(RawValue::get);
    let has_tools = operation == Operation::ChatCompletions && tools.is_some_and(|t| t != "[]");
    Ok((operation, with_model(input, target)?, has_tools))
}

/// A non-empty object with a first member more; every other byte stays.
fn with_model(input: &Bytes, target: &str) -> Result<Bytes, Refused> {
    let not_an_object = || Refused::at("", Why::NotAnObject);
    let open = input.iter().position(|&byte| byte == b'{');
    let rest = &input[open.ok_or_else(not_an_object)? + 1..];
    let target = serde_json::to_vec(target).map_err(|_| not_an_object())?;
    let mut body = BytesMut::with_capacity(rest.len() + target.len() + 16);
    body.put_slice(b"{\"model\":");
    body.put_slice(&target);
    body.put_u8(b',');
    body.put_slice(rest);
    Ok(body.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(input: &'static str) -> String {
        call(&Bytes::from_static(input.as_bytes()), "t")
            .unwrap_err()
            .to_string()
    }

    /// Proves.
    #[test]
    fn r086_an_input_keeps_every_byte_and_gains_the_target() {
        let input =
            " {\"seed\": 18446744073709551617, \"x\":\"\\u00fc\",\n\"messages\":[] , \"n\":1}";
        let (operation, body, tools) = call(&Bytes::from_static(input.as_bytes()), "a\"b").unwrap();
        let expected = format!("{{\"model\":\"a\\\"b\",{}", &input[2..]);
        assert_eq!(body, expected);
        assert_eq!((operation, tools), (Operation::ChatCompletions, false));
        let input = Bytes::from_static(b"{\"prompt\":\"x\",\"tools\":[1]}");
        let (operation, _, tools) = call(&input, "t").unwrap();
        assert_eq!((operation, tools), (Operation::Completions, false));
        let input = Bytes::from_static(b"{\"messages\":[],\"tools\":[{}],\"model\":null}");
        assert!(call(&input, "t").unwrap().2);
    }

    #[test]
    fn what_cannot_come_back_or_say_where_to_go_is_refused_by_name() {
        assert_eq!(refused("[]"), "input is not a JSON object");
        assert_eq!(refused("{}"), "messages is missing");
        assert_eq!(
            refused("{\"messages\":[],\"n\":2}"),
            "n is not supported by this adapter"
        );
        assert_eq!(
            refused("{\"messages\":[],\"model\":\"m\"}"),
            "model belongs to the target, not to the input"
        );
    }
}
