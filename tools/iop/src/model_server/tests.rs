use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::http;

const CHAT: &str = "/v1/chat/completions";

struct World {
    address: SocketAddr,
    counts: Arc<Counts>,
}

/// Serves on a port of its own for as long as `work` runs.
fn with_server<W: Future<Output = ()>>(pace_ms: u64, work: impl FnOnce(World) -> W) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let counts = Arc::new(Counts::default());
        let pace = Duration::from_millis(pace_ms);
        let settings = Settings {
            model: "m".into(),
            tokens: 30,
            pace,
        };
        let server = tokio::spawn(serve(listener, settings, Arc::clone(&counts)));
        work(World { address, counts }).await;
        server.abort();
    });
}

async fn call(world: &World, path: &str, body: &Value) -> (u16, Value) {
    let answer = http::post(world.address, path, "", &body.to_string())
        .await
        .unwrap();
    let status = answer.status;
    (
        status,
        serde_json::from_str(&answer.text().await.unwrap()).unwrap(),
    )
}

/// The events of a streamed answer; the last is the terminator.
async fn events(world: &World, path: &str, body: &Value) -> Vec<Value> {
    let answer = http::post(world.address, path, "", &body.to_string())
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
    let text = answer.text().await.unwrap();
    let events = text.strip_suffix("data: [DONE]\n\n").expect("terminated");
    let events = events
        .split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").unwrap());
    events
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

fn chat_request(extra: &[(&str, Value)]) -> Value {
    let mut request = json!({"model": "m", "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "three more words"}]},
    ]});
    for (name, value) in extra {
        request[*name] = value.clone();
    }
    request
}

#[test]
fn the_stream_says_what_the_whole_answer_says() {
    with_server(0, |world| async move {
        let (status, whole) = call(&world, CHAT, &chat_request(&[])).await;
        assert_eq!((status, &whole["object"]), (200, &"chat.completion".into()));
        let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
        let usage = json!({"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35});
        assert_eq!(
            (whole["usage"].clone(), text.split_whitespace().count()),
            (usage.clone(), 30)
        );

        let asked = [
            ("stream", json!(true)),
            ("stream_options", json!({"include_usage": true})),
        ];
        let events = events(&world, CHAT, &chat_request(&asked)).await;
        assert_eq!(events.len(), 1 + 30 + 1 + 1);
        assert!(
            events
                .iter()
                .all(|event| event["object"] == "chat.completion.chunk")
        );
        assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let delta = |event: &Value| {
            event["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        assert_eq!(events.iter().map(delta).collect::<String>(), text);
        assert_eq!(events[31]["choices"][0]["finish_reason"], "stop");
        assert_eq!(
            (&events[32]["choices"], &events[32]["usage"]),
            (&json!([]), &usage)
        );
        assert_eq!((world.counts.completed(), world.counts.aborted()), (2, 0));
    });
}

#[test]
fn a_limit_cuts_the_answer_and_the_text_surface_has_its_own_shape() {
    with_server(0, |world| async move {
        for name in ["max_tokens", "max_completion_tokens"] {
            let (_, whole) = call(&world, CHAT, &chat_request(&[(name, json!(4))])).await;
            assert_eq!(whole["choices"][0]["finish_reason"], "length");
            assert_eq!(whole["usage"]["completion_tokens"], 4);
            let (status, refused) = call(&world, CHAT, &chat_request(&[(name, json!(0))])).await;
            assert_eq!((status, &refused["error"]["param"]), (400, &name.into()));
        }
        let request = json!({"model": "m", "prompt": "one two", "max_tokens": 3});
        let (status, whole) = call(&world, "/v1/completions", &request).await;
        assert_eq!((status, &whole["object"]), (200, &"text_completion".into()));
        assert_eq!(whole["usage"]["prompt_tokens"], 2);
        let mut request = request;
        request["stream"] = json!(true);
        let events = events(&world, "/v1/completions", &request).await;
        let text: String = events
            .iter()
            .map(|event| event["choices"][0]["text"].as_str().unwrap())
            .collect();
        assert_eq!(whole["choices"][0]["text"], text);
        assert_eq!(
            events.last().unwrap()["choices"][0]["finish_reason"],
            "length"
        );
        assert!(
            events.iter().all(|event| event.get("usage").is_none()),
            "usage was not asked for"
        );
    });
}

#[test]
fn an_embedding_depends_on_its_text_alone_in_both_encodings() {
    with_server(0, |world| async move {
        let path = "/v1/embeddings";
        let request = json!({"model": "m", "input": ["a b", "c", "a b"]});
        let (status, floats) = call(&world, path, &request).await;
        assert_eq!(status, 200);
        let row = |row: usize| floats["data"][row]["embedding"].clone();
        assert_eq!((row(0), row(0).as_array().unwrap().len()), (row(2), 8));
        assert_ne!(row(0), row(1));
        assert_eq!(
            floats["usage"],
            json!({"prompt_tokens": 5, "total_tokens": 5})
        );
        let request = json!({"model": "m", "input": "a b", "encoding_format": "base64"});
        let (_, packed) = call(&world, path, &request).await;
        let bytes: Vec<u8> = row(0)
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|number| {
                let number: f32 = serde_json::from_value(number.clone()).unwrap();
                number.to_le_bytes()
            })
            .collect();
        assert_eq!(packed["data"][0]["embedding"], base64(&bytes));
        for (name, value) in [
            ("input", json!([])),
            ("input", json!(7)),
            ("dimensions", json!(0)),
        ] {
            let mut request = json!({"model": "m", "input": "a"});
            request[name] = value;
            let (status, refused) = call(&world, path, &request).await;
            assert_eq!((status, &refused["error"]["param"]), (400, &name.into()));
        }
    });
}

#[test]
fn base64_is_that_of_the_rfc() {
    let pairs = [
        ("", ""),
        ("f", "Zg=="),
        ("fo", "Zm8="),
        ("foo", "Zm9v"),
        ("foobar", "Zm9vYmFy"),
    ];
    for (plain, packed) in pairs {
        assert_eq!(base64(plain.as_bytes()), packed);
    }
}

#[test]
fn unknown_models_and_broken_requests_are_refused_in_the_surface_s_shape() {
    with_server(0, |world| async move {
        let answer = http::get(world.address, "/v1/models").await.unwrap();
        let models: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
        assert_eq!(models["data"][0]["id"], "m");
        for path in [CHAT, "/v1/completions", "/v1/embeddings"] {
            let (status, error) = call(&world, path, &json!({"model": "other"})).await;
            assert_eq!(
                (status, &error["error"]["code"]),
                (404, &"model_not_found".into())
            );
            assert_eq!(call(&world, path, &json!({})).await.0, 400);
            let answer = http::post(world.address, path, "", "{\"model\":")
                .await
                .unwrap();
            assert_eq!(answer.status, 400);
        }
        assert_eq!(
            call(&world, CHAT, &json!({"model": "m", "messages": []}))
                .await
                .0,
            400
        );
    });
}

#[test]
fn a_reader_that_leaves_is_counted_and_one_that_stays_is_not() {
    with_server(20, |world| async move {
        for stream in [true, false] {
            let body = chat_request(&[("stream", json!(stream))]).to_string();
            let mut socket = TcpStream::connect(world.address).await.unwrap();
            let head = format!(
                "POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            socket.write_all(head.as_bytes()).await.unwrap();
            if stream {
                assert!(
                    socket.read(&mut [0; 256]).await.unwrap() > 0,
                    "it has begun"
                );
            }
            drop(socket);
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while world.counts.aborted() < 2 {
            assert!(Instant::now() < deadline, "{:?}", world.counts);
            let answer = http::get(world.address, "/stats").await.unwrap();
            assert_eq!(answer.status, 200);
        }
        let (status, _) = call(&world, CHAT, &chat_request(&[("max_tokens", json!(1))])).await;
        assert_eq!(
            (status, world.counts.completed(), world.counts.aborted()),
            (200, 1, 2)
        );
    });
}

#[test]
fn tokens_come_at_the_pace_and_not_all_at_the_end() {
    with_server(30, |world| async move {
        let body = chat_request(&[("stream", json!(true)), ("max_tokens", json!(10))]);
        let begun = Instant::now();
        let mut answer = http::post(world.address, CHAT, "", &body.to_string())
            .await
            .unwrap();
        let (mut piece, mut pieces, mut second) = (Vec::new(), 0, None);
        while answer.next(&mut piece).await.unwrap() {
            pieces += 1;
            if pieces == 2 {
                second = Some(begun.elapsed());
            }
        }
        let whole = begun.elapsed();
        assert!(whole >= Duration::from_millis(300), "{whole:?}");
        assert!(
            pieces >= 3 && second.unwrap() < whole,
            "{pieces} pieces, {second:?} of {whole:?}"
        );
    });
}
