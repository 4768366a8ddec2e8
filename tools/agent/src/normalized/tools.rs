//! Tool calls of an answer, whole or in pieces, and their JSON. `[R-302]`
//!
//! Lives on: the attempt's task. View: one answer. Bound: `RUN_TOOL_CALLS_MAX` calls,
//! `RUN_TOOL_CALLS_BYTES_MAX` bytes.
//!
//! They come of a provider's own tool calls and of nothing else; text is never read for them. `[R-304]`
use iop_proto::limits::{RUN_TOOL_CALLS_BYTES_MAX, RUN_TOOL_CALLS_MAX};
use serde::Serialize;
use serde_json::value::RawValue;

use super::{RunError, entries};

/// More calls, or more of them, than an event may carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ToolCallsTooLarge;

#[derive(Debug, Default)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// Calls collected so far.
#[derive(Debug)]
pub(crate) struct ToolCalls {
    /// Makes ids of ours differ between runs.
    tag: u64,
    calls: Vec<Call>,
    bytes: usize,
    /// A provider's own whole array, as it wrote it.
    verbatim: Option<String>,
}

impl ToolCalls {
    pub(crate) const fn new(tag: u64) -> Self {
        Self {
            tag,
            calls: vec![],
            bytes: 0,
            verbatim: None,
        }
    }

    /// The provider's whole array in OpenAI's shape; an empty one is none.
    ///
    /// # Errors
    /// It is no array of objects, or a larger one than the Edge takes calls out of.
    pub(crate) fn take_array(&mut self, array: &RawValue) -> Result<(), RunError> {
        let calls = entries(array, RUN_TOOL_CALLS_MAX, RunError::ToolCallsTooLarge)?;
        self.weigh(array.get().len())?;
        if calls.iter().any(|call| !call.get().starts_with('{')) {
            return Err(RunError::Foreign);
        }
        if !calls.is_empty() {
            self.verbatim = Some(array.get().to_owned());
        }
        Ok(())
    }

    /// One whole call. An empty `id` becomes one of ours.
    pub(crate) fn push(
        &mut self,
        id: &str,
        name: &str,
        arguments: &str,
    ) -> Result<(), ToolCallsTooLarge> {
        self.piece(None, id, name, arguments)
    }

    /// A piece of a call: of the one at `index`, else of a new one if it brings an id or a name,
    /// else of the last one.
    pub(crate) fn piece(
        &mut self,
        index: Option<usize>,
        id: &str,
        name: &str,
        arguments: &str,
    ) -> Result<(), ToolCallsTooLarge> {
        let begins = !id.is_empty() || !name.is_empty();
        let at = match index {
            Some(index) => index,
            None if begins => self.calls.len(),
            None => self.calls.len().saturating_sub(1),
        };
        if at >= RUN_TOOL_CALLS_MAX {
            return Err(ToolCallsTooLarge);
        }
        self.weigh(id.len() + name.len() + arguments.len())?;
        if at >= self.calls.len() {
            self.calls.resize_with(at + 1, Call::default);
        }
        let call = &mut self.calls[at];
        if call.id.is_empty() {
            call.id.push_str(id);
        }
        call.name.push_str(name);
        call.arguments.push_str(arguments);
        Ok(())
    }

    fn weigh(&mut self, bytes: usize) -> Result<(), ToolCallsTooLarge> {
        self.bytes += bytes;
        let fits = self.bytes <= RUN_TOOL_CALLS_BYTES_MAX;
        fits.then_some(()).ok_or(ToolCallsTooLarge)
    }

    /// The JSON array; `None` without a call. A gap in the indexes is no call.
    ///
    /// # Errors
    /// Its escaped text is larger than an event may carry.
    pub(crate) fn into_json(self) -> Result<Option<String>, ToolCallsTooLarge> {
        let json = match self.verbatim {
            Some(array) => array,
            None => {
                let named = self.calls.iter().filter(|call| !call.name.is_empty());
                let calls = named
                    .enumerate()
                    .map(|(n, call)| Out::of(self.tag, n, call));
                let calls: Vec<_> = calls.collect();
                if calls.is_empty() {
                    return Ok(None);
                }
                serde_json::to_string(&calls).map_err(|_| ToolCallsTooLarge)?
            }
        };
        let fits = json.len() <= RUN_TOOL_CALLS_BYTES_MAX;
        fits.then_some(Some(json)).ok_or(ToolCallsTooLarge)
    }
}

/// One call in OpenAI's shape, `index` included: streamed ones need it.
#[derive(Serialize)]
struct Out<'a> {
    index: usize,
    id: std::borrow::Cow<'a, str>,
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> Out<'a> {
    fn of(tag: u64, index: usize, call: &'a Call) -> Self {
        let id = if call.id.is_empty() {
            format!("call_{tag:016x}{index:02x}").into()
        } else {
            call.id.as_str().into()
        };
        let arguments = match call.arguments.as_str() {
            "" => "{}",
            arguments => arguments,
        };
        let function = Function {
            name: &call.name,
            arguments,
        };
        Self {
            index,
            id,
            r#type: "function",
            function,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(calls: ToolCalls) -> String {
        calls.into_json().unwrap().unwrap()
    }

    #[test]
    fn pieces_join_by_index_and_ids_are_made_where_none_came() {
        let mut calls = ToolCalls::new(7);
        assert_eq!(ToolCalls::new(7).into_json(), Ok(None));
        calls.piece(Some(0), "a", "f", "").unwrap();
        calls.piece(Some(1), "", "g", "{\"x\":").unwrap();
        calls.piece(Some(0), "a", "", "{}").unwrap();
        calls.piece(Some(1), "", "", "\"\u{fc}\"}").unwrap();
        let expected = concat!(
            r#"[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":"{}"}},"#,
            r#"{"index":1,"id":"call_000000000000000701","type":"function","#,
            r#""function":{"name":"g","arguments":"{\"x\":\"ü\"}"}}]"#
        );
        assert_eq!(json(calls), expected);
    }

    #[test]
    fn pieces_without_an_index_belong_to_the_last_call_begun() {
        let mut calls = ToolCalls::new(0);
        for (id, name, arguments) in [("a", "f", "{"), ("", "", "}"), ("b", "g", "")] {
            calls.piece(None, id, name, arguments).unwrap();
        }
        let calls: serde_json::Value = serde_json::from_str(&json(calls)).unwrap();
        let arguments = |n: usize| calls[n]["function"]["arguments"].as_str().unwrap();
        assert_eq!((arguments(0), arguments(1)), ("{}", "{}"));
        assert_eq!(
            (&calls[0]["id"], &calls[1]["id"]),
            (&"a".into(), &"b".into())
        );
    }

    #[test]
    fn an_array_of_the_providers_own_stays_as_it_was_written() {
        fn raw(text: &str) -> &RawValue {
            serde_json::from_str(text).unwrap()
        }
        let text = r#"[ {"id":"c1","extra":1e400,"function":{"name":"f","arguments":"{}"}} ]"#;
        let mut calls = ToolCalls::new(0);
        calls.take_array(raw("[ ]")).unwrap();
        assert_eq!(calls.verbatim, None);
        calls.take_array(raw(text)).unwrap();
        assert_eq!(json(calls), text);
        for foreign in ["{}", "7", "\"[]\"", "[7]", "[{}, []]", "[null]"] {
            let taken = ToolCalls::new(0).take_array(raw(foreign));
            assert_eq!(taken, Err(RunError::Foreign), "{foreign}");
        }
        let of = |count| format!("[{}]", vec!["{}"; count].join(","));
        let most = of(RUN_TOOL_CALLS_MAX);
        assert_eq!(ToolCalls::new(0).take_array(raw(&most)), Ok(()));
        let more = ToolCalls::new(0).take_array(raw(&of(RUN_TOOL_CALLS_MAX + 1)));
        assert_eq!(more, Err(RunError::ToolCallsTooLarge));
    }

    #[test]
    fn what_an_event_can_carry_is_the_bound() {
        let mut calls = ToolCalls::new(0);
        for _ in 0..RUN_TOOL_CALLS_MAX {
            calls.push("", "f", "{}").unwrap();
        }
        assert_eq!(calls.push("", "f", "{}"), Err(ToolCallsTooLarge));
        let mut one = ToolCalls::new(0);
        let half = "\"".repeat(RUN_TOOL_CALLS_BYTES_MAX / 2);
        one.piece(Some(0), "", "f", &half).unwrap();
        assert_eq!(one.into_json(), Err(ToolCallsTooLarge), "escapes count");
        let mut long = ToolCalls::new(0);
        let all = "x".repeat(RUN_TOOL_CALLS_BYTES_MAX);
        assert_eq!(long.push("", "f", &all), Err(ToolCallsTooLarge));
        assert_eq!(
            ToolCalls::new(0).piece(Some(usize::MAX), "", "f", ""),
            Err(ToolCallsTooLarge)
        );
    }
}
