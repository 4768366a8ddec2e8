//! Reading a run's input: objects member by member, values as they were written.
//!
//! Lives on: the main task, before anything is asked of gate or provider. View: one request. Bound:
//! `RUN_MEMBERS_MAX` members an object; values borrow the input's memory.
//!
//! A value is handed on as its own text wherever it can be, so no number loses a digit. `[R-086]`
use core::fmt;
use std::borrow::Cow;

use iop_proto::limits::RUN_MEMBERS_MAX;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What is wrong with a part of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The server cannot express it. `[D-50]`
    Unsupported,
    /// The target says which model; a second name could say another.
    ModelNamed,
    /// A second member of one name: two readers could see two requests.
    Twice,
    Missing,
    NotAnObject,
    NotAString,
    NotANumber,
    NotAList,
    TooMany,
    /// An image elsewhere than in the request itself: this node fetches nothing.
    NotADataUrl,
    ToolArguments,
}

/// Where an input cannot be served, and why: one error terminal, no call. `[D-50]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// As in `messages[3].content`; empty for the input itself.
    at: String,
    why: Why,
}

impl Refused {
    pub(crate) fn at(name: &str, why: Why) -> Self {
        let at = name.to_owned();
        Self { at, why }
    }

    /// The same as seen from the object that holds it.
    pub(crate) fn under(self, outer: &str) -> Self {
        let at = match self.at.as_str() {
            "" => outer.to_owned(),
            inner if inner.starts_with('[') => format!("{outer}{inner}"),
            inner => format!("{outer}.{inner}"),
        };
        Self { at, ..self }
    }

    /// The same as an entry of a list.
    pub(crate) fn entry(self, index: usize) -> Self {
        self.under(&format!("[{index}]"))
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = if self.at.is_empty() {
            "input"
        } else {
            &self.at
        };
        let why = match self.why {
            Why::Unsupported => "is not supported by this adapter",
            Why::ModelNamed => "belongs to the target, not to the input",
            Why::Twice => "is given twice",
            Why::Missing => "is missing",
            Why::NotAnObject => "is not a JSON object",
            Why::NotAString => "is not a string",
            Why::NotANumber => "is not a number",
            Why::NotAList => "is not a list",
            Why::TooMany => "has too many entries",
            Why::NotADataUrl => "is not a base64 data URL",
            Why::ToolArguments => "does not hold a JSON object",
        };
        write!(f, "{at} {why}")
    }
}

/// An object's members in their order; a member that is `null` is as good as absent.
#[derive(Debug)]
pub(crate) struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Members<'a> {
    /// # Errors
    /// Not one JSON object, a name given twice, or more members than any request has.
    pub(crate) fn parse(json: &'a [u8]) -> Result<Self, Refused> {
        let all: All<'a> =
            serde_json::from_slice(json).map_err(|_| Refused::at("", Why::NotAnObject))?;
        if all.surplus {
            return Err(Refused::at("", Why::TooMany));
        }
        if let Some(name) = all.twice {
            return Err(Refused::at(&name, Why::Twice));
        }
        Ok(Self(all.members))
    }

    pub(crate) fn of(value: &'a RawValue) -> Result<Self, Refused> {
        Self::parse(value.get().as_bytes())
    }

    /// Members that say something.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        let members = self.0.iter().map(|(name, value)| (name.as_ref(), *value));
        members.filter(|(_, value)| value.get() != "null")
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.iter().find(|(own, _)| *own == name).map(|(_, v)| v)
    }

    /// Every member as it was written.
    pub(crate) fn into_all(self) -> Vec<(Cow<'a, str>, &'a RawValue)> {
        self.0
    }
}

struct All<'a> {
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
    twice: Option<String>,
    surplus: bool,
}

impl<'de: 'a, 'a> Deserialize<'de> for All<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = All<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<All<'de>, A::Error> {
                let mut all = All {
                    members: vec![],
                    twice: None,
                    surplus: false,
                };
                while let Some((Str(name), value)) = map.next_entry()? {
                    if all.members.iter().any(|(own, _)| *own == name) {
                        all.twice.get_or_insert_with(|| name.into_owned());
                    } else if all.members.len() == RUN_MEMBERS_MAX {
                        all.surplus = true;
                    } else {
                        all.members.push((name, value));
                    }
                }
                Ok(all)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A string that borrows where it holds no escape.
#[derive(Deserialize, Serialize)]
#[serde(transparent)]
pub(crate) struct Str<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

pub(crate) fn string(value: &RawValue) -> Result<Cow<'_, str>, Refused> {
    let text: Result<Str<'_>, _> = serde_json::from_str(value.get());
    let text = text.map_err(|_| Refused::at("", Why::NotAString))?;
    Ok(text.0)
}

/// A number, as it was written.
pub(crate) fn number(value: &RawValue) -> Result<&RawValue, Refused> {
    let is_number = value
        .get()
        .starts_with(|c: char| c == '-' || c.is_ascii_digit());
    is_number
        .then_some(value)
        .ok_or_else(|| Refused::at("", Why::NotANumber))
}

/// A list's entries, at most `max`.
pub(crate) fn list(value: &RawValue, max: usize) -> Result<Vec<&RawValue>, Refused> {
    if !value.get().starts_with('[') {
        return Err(Refused::at("", Why::NotAList));
    }
    let mut reader = serde_json::Deserializer::from_str(value.get());
    let entries = reader.deserialize_seq(Entries { max });
    entries.map_err(|_| Refused::at("", Why::TooMany))
}

struct Entries {
    max: usize,
}

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} entries", self.max)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut entries = vec![];
        while let Some(entry) = seq.next_element()? {
            if entries.len() == self.max {
                return Err(A::Error::custom("too many"));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        Members::parse(json.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn members_keep_their_order_and_their_text() {
        let json = r#"{"b": 1e400 , "a\u0041":"x\n","n":null,"big":18446744073709551616}"#;
        let members = Members::parse(json.as_bytes()).unwrap();
        let seen: Vec<_> = members.iter().map(|(name, v)| (name, v.get())).collect();
        let expected = [
            ("b", "1e400"),
            ("aA", "\"x\\n\""),
            ("big", "18446744073709551616"),
        ];
        assert_eq!(seen, expected);
        assert_eq!(members.get("n").map(RawValue::get), None);
        assert_eq!(members.into_all().len(), 4);
    }

    #[test]
    fn what_is_not_one_object_is_refused() {
        for json in ["", "[]", "1", "{", "{}x", "{\"a\":}", "{\"a\":\u{0}}"] {
            assert_eq!(refused(json), "input is not a JSON object", "{json}");
        }
        assert_eq!(refused(r#"{"a":1,"\u0061":2}"#), "a is given twice");
        let many = |count| {
            let members: Vec<_> = (0..count).map(|n| format!("\"m{n}\":0")).collect();
            format!("{{{}}}", members.join(","))
        };
        assert!(Members::parse(many(RUN_MEMBERS_MAX).as_bytes()).is_ok());
        assert_eq!(
            refused(&many(RUN_MEMBERS_MAX + 1)),
            "input has too many entries"
        );
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(
            Members::parse(deep.as_bytes()).is_ok(),
            "depth costs no stack"
        );
    }

    #[test]
    fn values_are_judged_by_their_kind() {
        let raw = |json: &'static str| serde_json::from_str::<&RawValue>(json).unwrap();
        assert_eq!(string(raw("\"a\\u00fc\"")).unwrap(), "a\u{fc}");
        assert!(string(raw("1")).is_err() && string(raw("\"\\ud800\"")).is_err());
        assert!(number(raw("-1.5e3")).is_ok() && number(raw("\"1\"")).is_err());
        assert_eq!(list(raw("[1, [2]]"), 2).unwrap().len(), 2);
        let error = list(raw("[1,2,3]"), 2).unwrap_err().entry(4).under("stop");
        assert_eq!(error.to_string(), "stop[4] has too many entries");
        let error = list(raw("{}"), 2).unwrap_err().under("x").under("stop");
        assert_eq!(error.to_string(), "stop.x is not a list");
    }
}
