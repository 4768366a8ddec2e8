//! The model server of `iop demo`: OpenAI-shaped answers of made-up words at a chosen pace.
//!
//! Lives on: the runtime it is served on. View: its own requests. Bound: `BODY_BYTES_MAX` per
//! request, `tokens` per answer; connections are the demo's own.
//!
//! It is honest about what it is: a token is one word, usage counts the words that were really read
//! and sent, and an answer whose reader left is counted as aborted.
use core::convert::Infallible;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until};

/// Longest request body, bytes: what an Edge lets through by default.
const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Length of an embedding nobody asked a length for, and the longest one.
const DIMENSIONS_DEFAULT: usize = 8;
const DIMENSIONS_MAX: usize = 4_096;
/// Texts one embeddings request may hold.
const INPUTS_MAX: usize = 2_048;

const WORDS: [&str; 24] = [
    "Every", "word", "of", "this", "answer", "left", "the", "model", "server", "as", "a", "frame",
    "of", "its", "own,", "crossed", "the", "node", "and", "the", "edge,", "and", "reached",
    "you.\n",
];

/// What the server answers.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The one model it knows.
    pub(crate) model: String,
    /// Tokens of an answer that is not asked to be shorter.
    pub(crate) tokens: u32,
    /// From one token to the next.
    pub(crate) pace: Duration,
}

/// What has happened, read by whoever started the server and at `/stats`.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    requests: AtomicU64,
    completed: AtomicU64,
    aborted: AtomicU64,
}

impl Counts {
    /// Answers whose reader left before their end.
    pub(crate) fn aborted(&self) -> u64 {
        self.aborted.load(Ordering::Relaxed)
    }

    /// Answers sent whole.
    pub(crate) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }
}

struct Server {
    settings: Settings,
    counts: Arc<Counts>,
    created: u64,
}

/// Serves until the future is dropped.
///
/// # Errors
/// When the listener can no longer be used.
pub(crate) async fn serve(
    listener: TcpListener,
    settings: Settings,
    counts: Arc<Counts>,
) -> std::io::Result<()> {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let server = Arc::new(Server {
        settings,
        counts,
        created: since.as_secs(),
    });
    let router = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embeddings))
        .route("/stats", get(stats))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(server);
    axum::serve(listener, router).await
}

async fn models(State(server): State<Arc<Server>>) -> Response {
    let model = json!({
        "id": server.settings.model, "object": "model", "created": server.created,
        "owned_by": "iop-demo",
    });
    ok(&json!({"object": "list", "data": [model]}))
}

async fn stats(State(server): State<Arc<Server>>) -> Response {
    let counts = &server.counts;
    ok(&json!({
        "requests": counts.requests.load(Ordering::Relaxed),
        "completed": counts.completed(),
        "aborted": counts.aborted(),
    }))
}

async fn chat(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    generate(&server, Shape::Chat, &body)
        .await
        .unwrap_or_else(|refused| refused.answer())
}

async fn completions(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    generate(&server, Shape::Text, &body)
        .await
        .unwrap_or_else(|refused| refused.answer())
}

async fn embeddings(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    embed(&server, &body).map_or_else(|refused| refused.answer(), |value| ok(&value))
}

/// A request that is not served, in the words of its error answer.
struct Refused {
    status: StatusCode,
    message: String,
    parameter: Option<&'static str>,
    code: Option<&'static str>,
}

impl Refused {
    fn bad(parameter: &'static str, message: &str) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.to_owned(),
            parameter: Some(parameter),
            code: None,
        }
    }

    fn answer(self) -> Response {
        let error = json!({"error": {
            "message": self.message, "type": "invalid_request_error", "param": self.parameter,
            "code": self.code,
        }});
        let content = [(header::CONTENT_TYPE, "application/json")];
        (self.status, content, error.to_string()).into_response()
    }
}

fn ok(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}

/// Which of the two text surfaces an answer speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Chat,
    Text,
}

impl Shape {
    const fn id(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-demo-",
            Self::Text => "cmpl-demo-",
        }
    }

    const fn object(self, stream: bool) -> &'static str {
        match (self, stream) {
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Chat, false) => "chat.completion",
            (Self::Text, _) => "text_completion",
        }
    }
}

/// Counts an answer as completed, or as aborted if it is dropped before.
struct Outcome(Option<Arc<Counts>>);

impl Outcome {
    fn complete(&mut self) {
        if let Some(counts) = self.0.take() {
            counts.completed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if let Some(counts) = self.0.take() {
            counts.aborted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One answer under way.
struct Answer {
    shape: Shape,
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    tokens: u32,
    /// The answer was cut by the request's own limit.
    cut: bool,
    pace: Duration,
    include_usage: bool,
    outcome: Outcome,
}

/// The request as an object that names this server's model.
fn object(server: &Server, body: &[u8]) -> Result<Value, Refused> {
    let request: Value = serde_json::from_slice(body)
        .map_err(|error| Refused::bad("body", &format!("The body is not JSON: {error}.")))?;
    match request["model"].as_str() {
        None => Err(Refused::bad("model", "The request must name a model.")),
        Some(model) if model == server.settings.model => Ok(request),
        Some(model) => Err(Refused {
            status: StatusCode::NOT_FOUND,
            message: format!("The model `{model}` does not exist."),
            parameter: Some("model"),
            code: Some("model_not_found"),
        }),
    }
}

async fn generate(server: &Arc<Server>, shape: Shape, body: &[u8]) -> Result<Response, Refused> {
    let request = object(server, body)?;
    let prompt_tokens = match shape {
        Shape::Chat => {
            let messages = request["messages"]
                .as_array()
                .filter(|messages| !messages.is_empty());
            let messages = messages.ok_or_else(|| {
                Refused::bad("messages", "`messages` must be a list that is not empty.")
            })?;
            messages
                .iter()
                .map(|message| words(&message["content"]))
                .sum()
        }
        Shape::Text => words(&request["prompt"]),
    };
    let asked = ["max_completion_tokens", "max_tokens"]
        .into_iter()
        .find_map(|name| Some((name, request.get(name).filter(|value| !value.is_null())?)));
    let mut tokens = server.settings.tokens;
    if let Some((name, value)) = asked {
        let limit = value.as_u64().filter(|&limit| limit > 0);
        let limit = limit.ok_or_else(|| Refused::bad(name, "The limit must be at least 1."))?;
        tokens = tokens.min(u32::try_from(limit).unwrap_or(u32::MAX));
    }
    let number = server.counts.requests.fetch_add(1, Ordering::Relaxed);
    let answer = Answer {
        shape,
        id: format!("{}{number}", shape.id()),
        created: server.created,
        model: server.settings.model.clone(),
        prompt_tokens,
        tokens,
        cut: tokens < server.settings.tokens,
        pace: server.settings.pace,
        include_usage: request["stream_options"]["include_usage"].as_bool() == Some(true),
        outcome: Outcome(Some(Arc::clone(&server.counts))),
    };
    if request["stream"].as_bool() == Some(true) {
        Ok(answer.stream())
    } else {
        Ok(answer.whole().await)
    }
}

impl Answer {
    fn usage(&self, sent: u32) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": sent,
            "total_tokens": self.prompt_tokens as u64 + u64::from(sent),
        })
    }

    const fn finish(&self) -> &'static str {
        if self.cut { "length" } else { "stop" }
    }

    fn envelope(&self, choices: Value, stream: bool) -> Value {
        json!({
            "id": self.id, "object": self.shape.object(stream), "created": self.created,
            "model": self.model, "choices": choices,
        })
    }

    /// The answer in one piece, after the time its tokens take.
    async fn whole(mut self) -> Response {
        tokio::time::sleep(self.pace * self.tokens).await;
        let text: String = (0..self.tokens).map(word).collect();
        let finish = self.finish();
        let choice = match self.shape {
            Shape::Chat => json!({
                "index": 0, "finish_reason": finish, "logprobs": null,
                "message": {"role": "assistant", "content": text, "refusal": null},
            }),
            Shape::Text => {
                json!({"index": 0, "finish_reason": finish, "logprobs": null, "text": text})
            }
        };
        let mut value = self.envelope(json!([choice]), false);
        value["usage"] = self.usage(self.tokens);
        self.outcome.complete();
        ok(&value)
    }

    /// One event per token, each when it is due.
    fn stream(self) -> Response {
        let begun = Instant::now();
        let events =
            futures_util::stream::unfold((self, 0_u32), move |(mut answer, at)| async move {
                // Events: the role, `tokens` words, the end, usage if asked for, the terminator.
                let (last_word, end) = (answer.tokens, answer.tokens + 1);
                if (1..=last_word).contains(&at) {
                    sleep_until(begun + answer.pace * at).await;
                }
                let (text, next) = if at <= end {
                    let skip_usage = at == end && !answer.include_usage;
                    (
                        event(&answer.chunk(at)),
                        if skip_usage { at + 2 } else { at + 1 },
                    )
                } else if at == end + 1 {
                    let mut value = answer.envelope(json!([]), true);
                    value["usage"] = answer.usage(answer.tokens);
                    (event(&value), at + 1)
                } else if at == end + 2 {
                    answer.outcome.complete();
                    ("data: [DONE]\n\n".to_owned(), at + 1)
                } else {
                    return None;
                };
                Some((Ok::<_, Infallible>(Bytes::from(text)), (answer, next)))
            });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, Body::from_stream(events)).into_response()
    }

    /// Chunk `at`: 0 opens, `1..=tokens` hold a word each, the one after them ends.
    fn chunk(&self, at: u32) -> Value {
        let finish = (at == self.tokens + 1).then(|| self.finish());
        let text = (1..=self.tokens).contains(&at).then(|| word(at - 1));
        let choice = match self.shape {
            Shape::Chat => {
                let delta = match (at, text) {
                    (0, _) => json!({"role": "assistant", "content": ""}),
                    (_, Some(text)) => json!({"content": text}),
                    (_, None) => json!({}),
                };
                json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish})
            }
            Shape::Text => json!({
                "index": 0, "text": text.unwrap_or_default(), "logprobs": null,
                "finish_reason": finish,
            }),
        };
        self.envelope(json!([choice]), true)
    }
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Token `at` of every answer: a word, with the blank that separates it from the one before.
fn word(at: u32) -> String {
    let word = WORDS[at as usize % WORDS.len()];
    let joined = at == 0 || WORDS[(at as usize - 1) % WORDS.len()].ends_with('\n');
    if joined {
        word.to_owned()
    } else {
        format!(" {word}")
    }
}

/// Words in a string, or in every string of a list or of its `text` parts.
fn words(value: &Value) -> usize {
    match value {
        Value::String(text) => text.split_whitespace().count(),
        Value::Array(parts) => parts.iter().map(words).sum(),
        Value::Object(part) => part.get("text").map_or(0, words),
        _ => 0,
    }
}

fn embed(server: &Arc<Server>, body: &[u8]) -> Result<Value, Refused> {
    let request = object(server, body)?;
    let inputs = match &request["input"] {
        Value::String(text) => vec![text.as_str()],
        Value::Array(texts) => texts.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if inputs.is_empty() || inputs.len() > INPUTS_MAX {
        return Err(Refused::bad(
            "input",
            "`input` must be a string or a list of strings.",
        ));
    }
    let dimensions = match &request["dimensions"] {
        Value::Null => DIMENSIONS_DEFAULT,
        value => value
            .as_u64()
            .and_then(|asked| usize::try_from(asked).ok())
            .filter(|asked| (1..=DIMENSIONS_MAX).contains(asked))
            .ok_or_else(|| Refused::bad("dimensions", "`dimensions` must be 1 to 4096."))?,
    };
    server.counts.requests.fetch_add(1, Ordering::Relaxed);
    let packed = request["encoding_format"].as_str() == Some("base64");
    let rows = inputs.iter().enumerate().map(|(index, text)| {
        let vector = vector(text, dimensions);
        let embedding = if packed {
            let bytes: Vec<u8> = vector
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect();
            Value::String(base64(&bytes))
        } else {
            json!(vector)
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    });
    let data: Vec<_> = rows.collect();
    let read: usize = inputs
        .iter()
        .map(|text| text.split_whitespace().count())
        .sum();
    server.counts.completed.fetch_add(1, Ordering::Relaxed);
    Ok(json!({
        "object": "list", "data": data, "model": server.settings.model,
        "usage": {"prompt_tokens": read, "total_tokens": read},
    }))
}

/// Numbers in [-1, 1) that depend on the text alone (FNV-1a, then one step per dimension).
fn vector(text: &str, dimensions: usize) -> Vec<f32> {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let mut state = text.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
    let mut number = || {
        state = fold(state, 0x5a);
        let bits = u16::try_from(state >> 48).expect("16 bits");
        f32::from(bits) / 32_768.0 - 1.0
    };
    (0..dimensions).map(|_| number()).collect()
}

/// RFC 4648 §4, padded.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |row: usize| u32::from(three.get(row).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            let filled = digit <= three.len();
            text.push(if filled {
                char::from(DIGITS[index as usize])
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests;
