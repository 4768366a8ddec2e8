//! Health probes: whether a server itself proves that it has one exact target. `[D-22]` `[D-49]`
//!
//! Lives on: the task that asks. View: one answer of one server. Bound: `PROBE_BYTES_MAX` of it; the
//! caller bounds the time. Nothing here sends a header of a request, a credential or a body.
use iop_proto::domain::HealthEvidence;
use iop_proto::limits::PROBE_BYTES_MAX;
use reqwest::header::HeaderMap;
use reqwest::{Client, Method, Url};
use serde::Deserialize;

use super::run::json;
use crate::provider::{Carried, HttpCall, Item, ProviderError, ProviderRequest};

/// What one probe found out; only proofs count. `[R-177]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// The exact target is there.
    Present,
    /// A whole, well-formed answer says that it is not.
    Absent,
    /// Nobody listens.
    Refused,
    /// Anything else: authentication, errors, redirects, what cannot be read.
    Unsure,
}

impl Finding {
    /// `known`: this server can show this target to a probe. Without that a probe that can only deny
    /// would lower what no probe could ever raise again. `[D-22]` `[A-20]`
    pub(super) const fn evidence(self, known: bool) -> HealthEvidence {
        match self {
            Self::Present => HealthEvidence::Available,
            Self::Absent | Self::Refused if known => HealthEvidence::Unavailable,
            Self::Absent | Self::Refused | Self::Unsure => HealthEvidence::Unknown,
        }
    }
}

/// `GET` of a list of models in OpenAI's form.
pub(super) async fn models(client: Client, url: Url, target: &str) -> Finding {
    let request = ProviderRequest {
        method: Method::GET,
        url,
        headers: HeaderMap::new(),
        body: bytes::Bytes::new(),
        credential: Carried::None, // a probe never has one `[D-22]`
    };
    let read = |status, body: &[u8]| match status {
        200 => listed(body, target),
        _ => Finding::Unsure,
    };
    ask(client, request, read).await
}

/// `POST` of the target to Ollama, which describes what it has and nothing else.
pub(super) async fn show(client: Client, url: Url, target: &str) -> Finding {
    let request = ProviderRequest {
        method: Method::POST,
        url,
        headers: json(),
        body: serde_json::json!({ "model": target }).to_string().into(),
        credential: Carried::None,
    };
    ask(client, request, shown).await
}

async fn ask(
    client: Client,
    request: ProviderRequest,
    read: impl FnOnce(i32, &[u8]) -> Finding,
) -> Finding {
    match answer(HttpCall::new(client, request)).await {
        Ok((status, body)) => read(status, &body),
        Err(ProviderError::Refused) => Finding::Refused,
        Err(_) => Finding::Unsure,
    }
}

/// Status and whole body of a short answer; one longer than `PROBE_BYTES_MAX` is malformed.
pub(super) async fn answer(mut call: HttpCall) -> Result<(i32, Vec<u8>), ProviderError> {
    let (mut code, mut body) = (0, Vec::new());
    while let Some(item) = call.next().await? {
        match item {
            Item::Head { status, .. } => code = status,
            Item::Body(chunk) => body.extend_from_slice(&chunk),
        }
        if body.len() > PROBE_BYTES_MAX as usize {
            return Err(ProviderError::Malformed);
        }
    }
    Ok((code, body))
}

#[derive(Deserialize)]
struct List {
    data: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
}

/// By the exact name: no prefix, no alias, no case. `[R-178]`
fn listed(body: &[u8], target: &str) -> Finding {
    match serde_json::from_slice::<List>(body) {
        Ok(list) if list.data.iter().any(|entry| entry.id == target) => Finding::Present,
        Ok(_) => Finding::Absent,
        Err(_) => Finding::Unsure,
    }
}

#[derive(Deserialize)]
struct Shown {
    /// Of every model there is.
    details: Option<serde::de::IgnoredAny>,
    error: Option<String>,
}

/// Both proofs are Ollama's own: a gateway's 404 denies nothing.
fn shown(status: i32, body: &[u8]) -> Finding {
    match (status, serde_json::from_slice::<Shown>(body)) {
        (200, Ok(shown)) if shown.details.is_some() => Finding::Present,
        (404, Ok(shown)) if shown.error.is_some() => Finding::Absent,
        _ => Finding::Unsure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves [D-49].
    #[test]
    fn d49_ollama_shows_what_it_has_and_says_so_of_what_it_has_not() {
        let model = br#"{"license":"x","details":{"family":"qwen3"},"model_info":{}}"#;
        let absent = br#"{"error":"model 'qwen3:8b' not found"}"#;
        assert_eq!(shown(200, model), Finding::Present);
        assert_eq!(shown(404, absent), Finding::Absent);
        for (status, body) in [
            (200, &absent[..]),
            (404, model),
            (404, b"<html>"),
            (404, b"404 page not found"),
            (400, absent),
            (401, absent),
            (429, absent),
            (500, absent),
            (200, &model[..20]),
            (200, b"{}"),
            (302, model),
        ] {
            assert_eq!(shown(status, body), Finding::Unsure, "{status}");
        }
    }

    /// Proves [R-178].
    #[test]
    fn r178_only_the_exact_name_is_present_and_only_a_whole_list_denies() {
        let list = br#"{"object":"list","data":[{"id":"qwen3:8b-fp16","x":1},{"id":"b"}]}"#;
        assert_eq!(listed(list, "qwen3:8b-fp16"), Finding::Present);
        assert_eq!(listed(list, "b"), Finding::Present);
        for other in ["qwen3:8b", "QWEN3:8B-FP16", "qwen3:8b-fp16 ", "", "B"] {
            assert_eq!(listed(list, other), Finding::Absent, "{other}");
        }
        for at in 0..list.len() {
            assert_eq!(listed(&list[..at], "b"), Finding::Unsure, "cut at {at}");
        }
        for odd in [
            &br#"{"data":{}}"#[..],
            br#"{"data":[{"name":"b"}]}"#,
            br#"{"data":["b"]}"#,
            br#"{"error":"loading"}"#,
            b"<html>b</html>",
        ] {
            assert_eq!(listed(odd, "b"), Finding::Unsure);
        }
    }

    /// Proves [R-177], [D-22].
    #[test]
    fn r177_nothing_but_a_proof_is_available_and_nothing_is_denied_that_was_never_shown() {
        use HealthEvidence::{Available, Unavailable, Unknown};
        for (finding, unknown, known) in [
            (Finding::Present, Available, Available),
            (Finding::Absent, Unknown, Unavailable),
            (Finding::Refused, Unknown, Unavailable),
            (Finding::Unsure, Unknown, Unknown),
        ] {
            assert_eq!(finding.evidence(false), unknown, "{finding:?}");
            assert_eq!(finding.evidence(true), known, "{finding:?}");
        }
    }
}
