//! Error shapes, in-band errors, the list of models.
use iop_control::names::{Gone, ModelName, Names, QueueLimits, Waits};
use iop_dataplane::config::ApiKey;
use iop_dataplane::keys::{Caller, KeyTable};
use iop_dataplane::shard::http1::{Allow, Asked, Version};
use iop_dataplane::surface::openai::{ModelCatalog, decode_model_id};
use iop_dataplane::surface::{ERROR_BYTES_MAX, Refusal, Surface};
use iop_proto::ids::{KeyIndex, ModelIndex};
use iop_proto::reason::{Reason, Source};
use serde_json::{Value, json};

const ASKED: Asked = Asked {
    head_only: false,
    version: Version::Http11,
    keep_alive: false,
};
const ALL: [Surface; 3] = [Surface::OpenAi, Surface::Responses, Surface::Anthropic];

fn error_of(surface: Surface, reason: Reason) -> Value {
    let mut out = [0; ERROR_BYTES_MAX];
    let len = surface.write_error(&mut out, reason, b"req-1").unwrap();
    serde_json::from_slice(&out[..len]).unwrap()
}

#[test]
fn errors_have_openai_shape_whatever_the_reason() {
    let model = json!("model");
    let none = Value::Null;
    for (reason, kind, param) in [
        (Reason::ModelUnknown, "invalid_request_error", &model),
        (Reason::KeyMissing, "authentication_error", &none),
        (Reason::QueueFull, "rate_limit_error", &none),
        (Reason::QueueTimeout, "server_error", &none),
        (Reason::ModelDuplicate, "invalid_request_error", &model),
        (
            Reason::TransferCodingUnknown,
            "invalid_request_error",
            &none,
        ),
        (Reason::ProviderUnreachable, "server_error", &none),
    ] {
        let code = reason.label();
        let error = json!({"message": reason.text(), "type": kind, "param": param, "code": code});
        for surface in [Surface::OpenAi, Surface::Responses] {
            assert_eq!(error_of(surface, reason), json!({ "error": error }));
        }
    }
}

#[test]
fn errors_have_anthropic_shape_with_the_word_of_the_status() {
    for (reason, kind) in [
        (Reason::JsonMalformed, "invalid_request_error"),
        (Reason::KeyMissing, "authentication_error"),
        (Reason::ModelUnknown, "not_found_error"),
        (Reason::RouteUnknown, "not_found_error"),
        (Reason::MethodNotAllowed, "invalid_request_error"),
        (Reason::BodyTimeout, "invalid_request_error"),
        (Reason::BodyTooLarge, "request_too_large"),
        (Reason::QueueFull, "rate_limit_error"),
        (Reason::TransferCodingUnknown, "invalid_request_error"),
        (Reason::ProviderUnreachable, "api_error"),
        (Reason::QueueTimeout, "overloaded_error"),
        (Reason::ResponseTimeout, "timeout_error"),
        (Reason::ClientGone, "api_error"),
    ] {
        let error = json!({"type": kind, "message": reason.text()});
        let whole = json!({"type": "error", "error": error, "request_id": "req-1"});
        assert_eq!(error_of(Surface::Anthropic, reason), whole);
    }
}

#[test]
fn every_reason_fits_in_every_shape() {
    let id = [b'i'; 128];
    for (&reason, surface) in Reason::ALL
        .iter()
        .flat_map(|r| ALL.map(|surface| (r, surface)))
    {
        let mut out = [0; 2 * ERROR_BYTES_MAX];
        let refusal = Refusal {
            surface,
            reason,
            asked: ASKED,
            request_id: &id,
            retry_after_s: u16::MAX,
            allow: Some(Allow::Get),
        };
        assert!(refusal.write(&mut out).is_ok(), "{}", reason.label());
        let event = surface.write_error_event(&mut out[..ERROR_BYTES_MAX], reason, &id);
        assert!(event.is_ok(), "{}", reason.label());
    }
}

#[test]
fn a_refusal_is_a_whole_answer() {
    let mut out = [0; 1024];
    for surface in ALL {
        let refusal = Refusal {
            surface,
            reason: Reason::NodeLost,
            asked: ASKED,
            request_id: b"req-1",
            retry_after_s: 3,
            allow: None,
        };
        let len = refusal.write(&mut out).unwrap();
        let text = str::from_utf8(&out[..len]).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(body).unwrap(),
            error_of(surface, Reason::NodeLost)
        );
        assert_eq!(
            head,
            format!(
                "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\nretry-after: 3\r\nx-iop-error-source: node\r\n\
                 connection: close\r\nx-request-id: req-1",
                body.len(),
            )
        );
        assert_eq!(Reason::NodeLost.source(), Source::Node);
        // A reason that has no status of its own still answers.
        let mute = Refusal {
            reason: Reason::ClientGone,
            ..refusal
        };
        let len = mute.write(&mut out).unwrap();
        assert!(out[..len].starts_with(b"HTTP/1.1 502 "));
    }
}

/// A line-based reader as in WHATWG "event stream interpretation": type and data of each event.
fn events(stream: &str) -> Vec<(String, String)> {
    let mut events = Vec::new();
    let (mut kind, mut data) = (String::new(), Vec::new());
    for line in stream.lines() {
        if line.is_empty() {
            let kind = std::mem::take(&mut kind);
            if !data.is_empty() {
                events.push((kind, data.join("\n")));
                data.clear();
            }
        } else if let Some(rest) = line.strip_prefix("data:") {
            data.push(rest.strip_prefix(' ').unwrap_or(rest));
        } else if let Some(rest) = line.strip_prefix("event:") {
            rest.trim().clone_into(&mut kind);
        }
    }
    events
}

#[test]
fn an_error_event_stands_alone_wherever_the_stream_broke() {
    let reason = Reason::ProviderUnreachable;
    for surface in ALL {
        let mut out = [0; ERROR_BYTES_MAX];
        let len = surface
            .write_error_event(&mut out, reason, b"req-1")
            .unwrap();
        let event = str::from_utf8(&out[..len]).unwrap();
        for (sent, before) in [
            ("", 0),
            ("data: {\"a\":1}\n\n", 1),
            ("data: {\"a\":1}\r\n\r\n", 1),
            ("data: {\"a\":1}\n", 1),
            ("data: {\"a\":", 1),
            ("event: content_block_delta\n", 0),
            ("event: content_block_delta\ndata: {\"a\":", 1),
            ("da", 0),
            (": comment", 0),
        ] {
            let seen = events(&format!("{sent}{event}"));
            assert_eq!(seen.len(), before + 1, "{sent:?}");
            let (kind, data) = seen.last().unwrap();
            let data: Value = serde_json::from_str(data).unwrap();
            let mut expected = error_of(surface, reason);
            if surface == Surface::Responses {
                // The event's own fields beside what other readers look for.
                for name in ["message", "param", "code"] {
                    expected[name] = expected["error"][name].clone();
                }
                expected["type"] = json!("error");
            }
            assert_eq!(data, expected);
            let named = surface != Surface::OpenAi;
            assert_eq!(kind, if named { "error" } else { "" }, "{sent:?}");
        }
    }
}

fn names(models: &[&str]) -> Names {
    let model = |name: &&str| ModelName {
        name: (*name).to_owned(),
        providers: Vec::new(),
        long_threshold_bytes: 1,
        created: 1_700_000_000,
    };
    Names {
        nodes: Vec::new(),
        providers: Vec::new(),
        models: models.iter().map(model).collect(),
        queue: QueueLimits {
            waiters_max: 1,
            waiting_bytes_max: 1,
            wait_ms: 1,
            dispatch_ms: 5_000,
        },
        waits: Waits::default(),
        gone: Gone::default(),
    }
}

fn listed(catalog: &ModelCatalog, keys: &KeyTable, caller: Caller) -> Value {
    let whole: Vec<u8> = catalog.list(keys, caller).flatten().copied().collect();
    assert_eq!(catalog.list_bytes(keys, caller), whole.len() as u64);
    serde_json::from_slice(&whole).unwrap()
}

#[test]
fn models_are_listed_as_far_as_the_key_may_name_them() {
    let longest = "\u{1}".repeat(256);
    let catalog = ModelCatalog::new(&names(&["a", "org/b \"c\"", &longest]));
    let row = |row: usize| ModelIndex::new(row).unwrap();
    let key = |models: Option<Vec<ModelIndex>>| ApiKey {
        principal: "p".into(),
        hash: [1; 32],
        models,
    };
    let keys = KeyTable::new(&[key(None), key(Some(vec![row(1)])), key(Some(vec![]))]);
    let caller = |index: usize| Caller::Key(KeyIndex::new(index).unwrap());
    let object = |id: &str| json!({"id": id, "object": "model", "created": 1_700_000_000, "owned_by": "iop"});
    let all = json!([object("a"), object("org/b \"c\""), object(&longest)]);
    for (caller, data) in [
        (Caller::Anyone, all.clone()),
        (caller(0), all),
        (caller(1), json!([object("org/b \"c\"")])),
        (caller(2), json!([])),
    ] {
        assert_eq!(
            listed(&catalog, &keys, caller),
            json!({"object": "list", "data": data})
        );
    }
    let one: Value = serde_json::from_slice(catalog.model(row(1))).unwrap();
    assert_eq!(one, object("org/b \"c\""));
    let none = ModelCatalog::new(&names(&[]));
    assert_eq!(
        listed(&none, &keys, Caller::Anyone),
        json!({"object": "list", "data": []})
    );
}

#[test]
fn model_ids_are_decoded_from_paths() {
    let mut out = [0; 256];
    for (encoded, id) in [
        ("gpt", Some("gpt")),
        ("org%2Fmodel%3a1", Some("org/model:1")),
        ("org/model+1", Some("org/model+1")),
        ("%ED%95%9C", Some("한")),
        ("%2", None),
        ("%", None),
        ("%zz", None),
    ] {
        let decoded = decode_model_id(encoded.as_bytes(), &mut out);
        assert_eq!(decoded, id.map(str::as_bytes), "{encoded}");
    }
    assert_eq!(
        decode_model_id(&[b'a'; 256], &mut out).map(<[u8]>::len),
        Some(256)
    );
    assert_eq!(decode_model_id(&[b'a'; 257], &mut out), None);
}
