//! The scan for `model`, against serde_json, and what splicing leaves untouched.
use std::fmt;

use iop_dataplane::shard::splice::{ModelScanner, write_json_string};
use iop_proto::limits::{JSON_DEPTH_MAX, NAME_BYTES_MAX};
use iop_proto::reason::Reason;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::dice::Dice;

/// Span of the value, its text, and `stream`.
type Found = Result<(usize, usize, Option<Vec<u8>>, bool), Reason>;

fn scan<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Found {
    let mut scanner = ModelScanner::new();
    for piece in pieces {
        if let Err(reason) = scanner.push(piece) {
            assert_eq!(scanner.push(b"}"), Err(reason), "not the same reason twice");
            assert_eq!(scanner.finish().err(), Some(reason));
            return Err(reason);
        }
    }
    let span = scanner.finish()?;
    let at = |offset: u64| usize::try_from(offset).unwrap();
    Ok((
        at(span.start),
        at(span.end),
        span.name().map(<[u8]>::to_vec),
        span.stream,
    ))
}

/// Scans whole, bytewise and at every split into two; all must tell the same.
fn every_way(body: &[u8]) -> Found {
    let whole = scan([body]);
    assert_eq!(
        scan(body.chunks(1)),
        whole,
        "bytewise: {}",
        body.escape_ascii()
    );
    for at in 0..=body.len() {
        let (a, b) = body.split_at(at);
        assert_eq!(
            scan([a, b]),
            whole,
            "split at {at}: {}",
            body.escape_ascii()
        );
    }
    whole
}

/// Proves [D-31].
#[test]
fn d31_the_top_level_model_is_found_and_no_other() {
    for (body, value, name) in [
        (r#"{"model":"a"}"#, r#""a""#, "a"),
        (
            r#" {"x":{"model":1,"a":[{"model":"n"}]}, "model" : "a-b" , "y":"model"}  "#,
            r#""a-b""#,
            "a-b",
        ),
        (r#"{"\u006dod\u0065l":"a"}"#, r#""a""#, "a"),
        (r#"{"model":""}"#, r#""""#, ""),
        (
            r#"{"model":"q\"\\\/\b\f\n\r\tz"}"#,
            r#""q\"\\\/\b\f\n\r\tz""#,
            "q\"\\/\u{8}\u{c}\n\r\tz",
        ),
        (
            r#"{"model":"\uD83C\uDF0D\u00e4한"}"#,
            r#""\uD83C\uDF0D\u00e4한""#,
            "\u{1F30D}\u{e4}한",
        ),
        (
            r#"{"models":"x","mode":"y","model":"a","amodel":"z","":"w"}"#,
            r#""a""#,
            "a",
        ),
        (r#"{"modèl":"x","model":"a"}"#, r#""a""#, "a"),
        (r#"{"model\u0000":"x","model":"a"}"#, r#""a""#, "a"),
        (
            r#"{"model":"a","n":[-0,1e400,9223372036854775808,1.0E+2,0.5e-7,null,true,false]}"#,
            r#""a""#,
            "a",
        ),
        (
            r#"{"model":"a","lone":"\ud800 \udc00\ud800"}"#,
            r#""a""#,
            "a",
        ),
        ("{\"model\":\"a\",\"d\":\"\x7f\"}\r\n\t ", r#""a""#, "a"),
    ] {
        let (start, end, found, stream) = every_way(body.as_bytes()).unwrap();
        assert_eq!(&body[start..end], value, "{body}");
        assert_eq!(
            (found.as_deref(), stream),
            (Some(name.as_bytes()), false),
            "{body}"
        );
    }
}

/// Proves [D-31].
#[test]
fn d31_a_model_that_is_missing_twice_there_or_no_string_is_refused() {
    use Reason::{ModelDuplicate, ModelMissing};
    for (body, reason) in [
        ("{}", ModelMissing),
        (r#"{"Model":"a"}"#, ModelMissing),
        (r#"{"x":{"model":"a"}}"#, ModelMissing),
        (r#"{"model":1}"#, ModelMissing),
        (r#"{"model":null}"#, ModelMissing),
        (r#"{"model":["a"]}"#, ModelMissing),
        (r#"{"model":{"model":"a"}}"#, ModelMissing),
        (r#"{"model":"a","model":"a"}"#, ModelDuplicate),
        (r#"{"model":"a","m\u006fdel":"b"}"#, ModelDuplicate),
        (r#"{"model":"a","x":[],"model":"b"}"#, ModelDuplicate),
        // A reader that ignores case would take the other one.
        (r#"{"model":"a","Model":"b"}"#, ModelDuplicate),
        (r#"{"MODEL":"a","model":"b"}"#, ModelDuplicate),
    ] {
        assert_eq!(every_way(body.as_bytes()), Err(reason), "{body}");
    }
}

#[test]
fn bodies_that_are_no_json_object_are_refused() {
    for body in [
        "",
        " ",
        "[]",
        "null",
        "\"model\"",
        "1",
        "{",
        "}",
        "{]",
        "{\"model\":\"a\"",
        "{\"model\":\"a",
        "{\"model\":\"a\"}}",
        "{\"model\":\"a\"}x",
        "{\"model\":\"a\"} {}",
        "{\"model\":\"a\",}",
        "{,\"model\":\"a\"}",
        "{\"model\" \"a\"}",
        "{\"model\":,}",
        "{model:\"a\"}",
        "{'model':\"a\"}",
        "{\"model\":\"a\" \"b\":1}",
        "{\"model\":\"a\",\"b\"}",
        "{\"model\":\"a\",\"b\":}",
        "{\"model\":\"a\",\"b\":[1,]}",
        "{\"model\":\"a\",\"b\":[,1]}",
        "{\"model\":\"a\",\"b\":[1 2]}",
        "{\"model\":\"a\",\"b\":[1}}",
        "{\"model\":\"a\",\"b\":{]}",
        "{\"model\":\"a\",\"b\":01}",
        "{\"model\":\"a\",\"b\":-}",
        "{\"model\":\"a\",\"b\":1.}",
        "{\"model\":\"a\",\"b\":.5}",
        "{\"model\":\"a\",\"b\":1e}",
        "{\"model\":\"a\",\"b\":1e+}",
        "{\"model\":\"a\",\"b\":+1}",
        "{\"model\":\"a\",\"b\":1.e1}",
        "{\"model\":\"a\",\"b\":NaN}",
        "{\"model\":\"a\",\"b\":tru}",
        "{\"model\":\"a\",\"b\":truee}",
        "{\"model\":\"a\",\"b\":nul",
        "{\"model\":\"a\",\"b\":0x1}",
        "{\"model\":\"a\",\"b\":\"\\x\"}",
        "{\"model\":\"a\",\"b\":\"\\u00g0\"}",
        "{\"model\":\"a\",\"b\":\"\\u12\"}",
        "{\"model\":\"a\",\"b\":\"\n\"}",
        "{\"model\":\"a\",\"b\":\"\0\"}",
        "{\"model\":\"a\"\u{b}}",
        "{\"model\":\"a\"\u{a0}}",
        "\u{feff}{\"model\":\"a\"}",
        "{\"model\":\"a\"/**/}",
        "{\"model\":\"a\"}\0",
        "{\"model\":\"\\ud800\"}",
        "{\"model\":\"\\udc00\"}",
        "{\"model\":\"\\ud800\\n\"}",
        "{\"model\":\"\\ud800x\"}",
        "{\"model\":\"\\ud800\\ud800\"}",
        "{\"\\ud800\":1,\"model\":\"a\"}",
    ] {
        assert_eq!(
            every_way(body.as_bytes()),
            Err(Reason::JsonMalformed),
            "{body}"
        );
    }
    let utf16: Vec<u8> = "{\"model\":\"a\"}"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    assert_eq!(every_way(&utf16), Err(Reason::JsonMalformed));
}

/// Two decoders that repair broken UTF-8 differently would read different keys and string ends.
#[test]
fn broken_utf8_is_refused_wherever_it_stands() {
    let good: &[&[u8]] = &[
        b"\xc2\x80",
        b"\xdf\xbf",
        b"\xe0\xa0\x80",
        b"\xed\x9f\xbf",
        b"\xee\x80\x80",
        b"\xef\xbf\xbf",
        b"\xf0\x90\x80\x80",
        b"\xf4\x8f\xbf\xbf",
    ];
    let bad: &[&[u8]] = &[
        b"\x80",
        b"\xbf",
        b"\xc0\x80",
        b"\xc1\xad",
        b"\xc2",
        b"\xc2\"",
        b"\xc2\\u0041",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xe2\x82",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"\xff",
        b"\xf0\x90\x80",
    ];
    for (texts, fine) in [(good, true), (bad, false)] {
        for text in texts {
            for (before, after) in [
                (&b"{\"model\":\"a\",\"x\":\""[..], &b"\"}"[..]),
                (b"{\"model\":\"a\",\"x\":\"longer than one word ", b"\"}"),
                (b"{\"model\":\"a\",\"", b"\":1}"),
                (b"{\"model\":\"a\",\"x\":{\"", b"\":1}}"),
                (b"{\"model\":\"", b"\"}"),
            ] {
                let body = [before, text, after].concat();
                assert_eq!(every_way(&body).is_ok(), fine, "{}", body.escape_ascii());
            }
        }
    }
}

#[test]
fn nesting_is_bounded_at_its_edge() {
    let nested = |levels: u32| {
        let inner = levels as usize - 1;
        let (objects, arrays) = (inner / 2, inner - inner / 2);
        let open = format!("{}{}", "{\"model\":".repeat(objects), "[".repeat(arrays));
        let close = format!("{}{}", "]".repeat(arrays), "}".repeat(objects));
        format!("{{\"x\":{open}{close},\"model\":\"a\"}}")
    };
    let found = scan([nested(JSON_DEPTH_MAX).as_bytes()]);
    assert_eq!(found.unwrap().2.as_deref(), Some(&b"a"[..]));
    let deeper = nested(JSON_DEPTH_MAX + 1);
    assert_eq!(scan([deeper.as_bytes()]), Err(Reason::JsonMalformed));
}

#[test]
fn a_name_longer_than_any_configured_one_is_kept_apart() {
    let named = |bytes: u32| {
        let body = format!("{{\"model\":\"{}\"}}", "n".repeat(bytes as usize));
        scan([body.as_bytes()]).unwrap().2.map(|name| name.len())
    };
    assert_eq!(named(NAME_BYTES_MAX), Some(NAME_BYTES_MAX as usize));
    assert_eq!(named(NAME_BYTES_MAX + 1), None);
    assert_eq!(named(100_000), None);
}

#[test]
fn stream_is_true_only_at_the_top_and_the_last_counts() {
    for (rest, stream) in [
        ("", false),
        (r#","stream":true"#, true),
        (r#","str\u0065am" : true"#, true),
        (r#","stream":false"#, false),
        (r#","stream":"true""#, false),
        (r#","stream":1,"x":true"#, false),
        (r#","x":{"stream":true}"#, false),
        (r#","x":["stream",true]"#, false),
        (r#","Stream":true"#, false),
        (r#","stream":true,"stream":false"#, false),
        (r#","stream":null,"stream":true,"x":false"#, true),
    ] {
        let body = format!("{{\"model\":\"a\"{rest}}}");
        assert_eq!(every_way(body.as_bytes()).unwrap().3, stream, "{body}");
    }
}

/// Proves [D-50].
#[test]
fn d50_without_its_model_a_body_is_the_same_object_to_the_byte() {
    for (body, rest) in [
        (r#"{"model":"a"}"#, "{}"),
        (r#" { "model" : "a" } "#, " {  } "),
        (r#"{"model":"a","b":1}"#, r#"{"b":1}"#),
        ("{\"model\":\"a\"\n ,\t\"b\":1}", "{\t\"b\":1}"),
        (r#"{"b":1,"model":"a"}"#, r#"{"b":1}"#),
        (r#"{"b":[1,2] , "m\u006fdel" : "a" }"#, r#"{"b":[1,2]  }"#),
        (
            r#"{"b":{"model":"n","c":[{"x":1},2]},"model":"a","d":{"e":1,"f":2}}"#,
            r#"{"b":{"model":"n","c":[{"x":1},2]},"d":{"e":1,"f":2}}"#,
        ),
        (
            r#"{"model":"a","b":{"c":1,"d":2},"e":3}"#,
            r#"{"b":{"c":1,"d":2},"e":3}"#,
        ),
    ] {
        let member = |pieces: &mut dyn Iterator<Item = &[u8]>| {
            let mut scanner = ModelScanner::new();
            pieces.for_each(|piece| scanner.push(piece).unwrap());
            let span = scanner.finish().unwrap();
            (span.member_start, span.member_end)
        };
        let whole = member(&mut [body.as_bytes()].into_iter());
        for size in [1, 2, 3, 7] {
            assert_eq!(member(&mut body.as_bytes().chunks(size)), whole, "{body}");
        }
        let at = |offset: u64| usize::try_from(offset).unwrap();
        let cut = [&body[..at(whole.0)], &body[at(whole.1)..]].concat();
        assert_eq!(cut, rest, "{body}");
        serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&cut).unwrap();
    }
}

/// Members behind the model; whether usage is asked for in them, and whether tools are offered.
const ASKED: [(&str, bool, bool); 15] = [
    ("", false, false),
    (
        r#","stream_options":{"include_usage":true},"tools":[]"#,
        true,
        true,
    ),
    (
        r#","stream_options":{"a":[{"include_usage":false}],"include_usage" : true}"#,
        true,
        false,
    ),
    (r#","stream_options":{"include_usage":false}"#, false, false),
    (
        r#","stream_options":{"include_usage":"true"}"#,
        false,
        false,
    ),
    (
        r#","stream_options":{"include_usage":1,"x":true}"#,
        false,
        false,
    ),
    (
        r#","stream_options":{"x":{"include_usage":true}}"#,
        false,
        false,
    ),
    (
        r#","stream_options":[{"include_usage":true}]"#,
        false,
        false,
    ),
    (
        r#","stream_options":{"include_usage":true},"stream_options":{}"#,
        false,
        false,
    ),
    (
        r#","stream_options":{"include_usage":true},"stream_options":null"#,
        false,
        false,
    ),
    (
        r#","include_usage":true,"x":{"include_usage":true}"#,
        false,
        false,
    ),
    (
        r#","x":{"tools":[1],"stream_options":{"include_usage":true}}"#,
        false,
        false,
    ),
    (r#","tools":[1],"tools":null"#, false, false),
    (r#","tools":"x""#, false, false),
    (
        r#","stream_options":{"\ud800":1,"include_\u0075sage":true}"#,
        false,
        false,
    ),
];

#[test]
fn what_an_answer_depends_on_is_read_where_it_stands_and_nowhere_else() {
    for (rest, include_usage, tools) in ASKED {
        let body = format!("{{\"model\":\"a\"{rest}}}");
        for size in [1, 3, body.len()] {
            let mut scanner = ModelScanner::new();
            body.as_bytes()
                .chunks(size)
                .for_each(|piece| scanner.push(piece).unwrap());
            let span = scanner.finish().unwrap();
            assert_eq!(
                (span.include_usage, span.tools),
                (include_usage, tools),
                "{body}"
            );
        }
    }
}

/// Proves [P-34], [D-31].
#[test]
fn p34_splicing_changes_the_model_value_and_nothing_else() {
    let before = r#"{ "tools":[{"n":1e400,"n":1E400,"big":9223372036854775808}],"z":1,"a":2,"#;
    let after =
        r#" ,"messages":[{"model":"kept","content":"\u0000\/한 🌍"}],"unknown":{},"z":1.10}"#;
    for target in ["plain", "with \"quotes\" \\ and\u{1}\n\u{1f}\t한🌍/", ""] {
        let body = format!("{before}\"model\":\"cl\\u0069ent\"{after}");
        let (start, end, name, _) = scan([body.as_bytes()]).unwrap();
        assert_eq!(name.as_deref(), Some(&b"client"[..]));
        let mut out = [0; 256];
        let len = write_json_string(&mut out, target).unwrap();
        let spliced = [
            &body.as_bytes()[..start],
            &out[..len],
            &body.as_bytes()[end..],
        ]
        .concat();
        assert!(spliced.starts_with(before.as_bytes()) && spliced.ends_with(after.as_bytes()));
        assert_eq!(
            serde_json::from_slice::<String>(&out[..len]).unwrap(),
            target
        );
        assert_eq!(oracle(&spliced), Some((target.to_owned(), false)));
        for room in 0..len {
            assert_eq!(write_json_string(&mut out[..room], target), None);
        }
    }
}

// ── against serde_json ──────────────────────────────────────────────────────────────────────────────

/// What serde_json makes of a body under the same rule: the one top-level model, and `stream`.
fn oracle(body: &[u8]) -> Option<(String, bool)> {
    struct TopLevel;
    impl<'de> Visitor<'de> for TopLevel {
        type Value = (Vec<Option<String>>, bool);

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut models, mut stream) = (Vec::new(), false);
            while let Some(key) = map.next_key::<String>()? {
                if key.eq_ignore_ascii_case("model") {
                    let value = map.next_value::<&RawValue>()?.get();
                    let text = serde_json::from_str(value).ok();
                    models.push(text.filter(|_| key == "model"));
                } else if key == "stream" {
                    stream = map.next_value::<&RawValue>()?.get() == "true";
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok((models, stream))
        }
    }
    let mut json = serde_json::Deserializer::from_str(str::from_utf8(body).ok()?);
    let (mut models, stream) = json.deserialize_map(TopLevel).ok()?;
    json.end().ok()?;
    let only = models.pop()?;
    models.is_empty().then_some((only?, stream))
}

fn blank(dice: &mut Dice, out: &mut Vec<u8>) {
    while dice.one_in(4) {
        out.push(dice.pick(b" \t\r\n"));
    }
}

fn string(dice: &mut Dice, out: &mut Vec<u8>) {
    out.push(b'"');
    for _ in 0..dice.below(12) {
        let piece = dice.pick(&[
            "model",
            "stream",
            "a",
            "longer plain text in here",
            "\\\"",
            "\\\\",
            "\\u0041",
            "\\ud83c\\udf0d",
            "한",
            "\u{e4}",
            "🌍",
            "\\n",
            "}",
            "]",
            ":",
            ",",
            "\\/",
        ]);
        out.extend_from_slice(piece.as_bytes());
    }
    out.push(b'"');
}

fn value(dice: &mut Dice, depth: usize, out: &mut Vec<u8>) {
    blank(dice, out);
    match dice.below(if depth == 0 { 4 } else { 6 }) {
        0 | 1 => string(dice, out),
        2 => out.extend_from_slice(
            dice.pick(&["0", "-1", "1e400", "12.5E-3", "9223372036854775808", "-0.0"])
                .as_bytes(),
        ),
        3 => out.extend_from_slice(dice.pick(&["true", "false", "null"]).as_bytes()),
        4 => {
            out.push(b'[');
            for place in 0..dice.below(4) {
                if place > 0 {
                    out.push(b',');
                }
                value(dice, depth - 1, out);
            }
            out.push(b']');
        }
        _ => object(dice, depth - 1, out),
    }
    blank(dice, out);
}

fn object(dice: &mut Dice, depth: usize, out: &mut Vec<u8>) {
    const KEYS: [&str; 12] = [
        "\"messages\"",
        "\"models\"",
        "\"mode\"",
        "\"모델\"",
        "\"\"",
        "\"stream\"",
        "\"temperature\"",
        "\"max_tokens\"",
        "\"str\\u0065am\"",
        "\"Model\"",
        "\"m\\u006Fdel\"",
        "\"model\"",
    ];
    let with_model = dice.below(5);
    out.push(b'{');
    for place in 0..5 {
        if place > 0 {
            out.push(b',');
        }
        blank(dice, out);
        // One model in most objects; two, none or a look-alike now and then.
        let (key, is_model) = match (place == with_model, dice.one_in(12)) {
            (true, false) => (dice.pick(&KEYS[10..]), true),
            (_, true) => (dice.pick(&KEYS), false),
            (false, false) => (dice.pick(&KEYS[..9]), false),
        };
        out.extend_from_slice(key.as_bytes());
        blank(dice, out);
        out.push(b':');
        if is_model && !dice.one_in(8) {
            string(dice, out);
        } else {
            value(dice, depth, out);
        }
    }
    out.push(b'}');
}

/// Proves [D-31].
#[test]
fn d31_random_bodies_name_the_same_model_here_and_in_serde_json() {
    let (seed, rounds) = (0x10d5_2026, 60_000);
    let mut dice = Dice::new(seed);
    let (mut both, mut mutated_both) = (0, 0);
    for round in 0..rounds {
        let mut body = Vec::new();
        object(&mut dice, 5, &mut body);
        let mutations = if dice.one_in(2) { 0 } else { 1 + dice.below(3) };
        for _ in 0..mutations {
            dice.mutate(&mut body, b"{}[]:,\"\\ue019-+. \n\0\x80\xc3\xed\xf0tfnml");
        }
        let ours = scan(body.chunks(1 + dice.below(50)));
        assert_eq!(ours, scan([body.as_slice()]), "seed {seed:x} round {round}");
        let ours = ours
            .ok()
            .map(|(_, _, name, stream)| (name.unwrap_or_default(), stream));
        let theirs = oracle(&body).map(|(name, stream)| (name.into_bytes(), stream));
        assert_eq!(
            ours,
            theirs,
            "seed {seed:x} round {round}: {}",
            body.escape_ascii()
        );
        both += usize::from(ours.is_some());
        mutated_both += usize::from(ours.is_some() && mutations > 0);
    }
    assert!(both * 10 >= rounds * 3, "only {both} of {rounds} accepted");
    assert!(
        mutated_both * 10 >= rounds,
        "only {mutated_both} mutated ones accepted"
    );
}
