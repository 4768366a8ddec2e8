//! `iop demo`: the whole product on one machine, and one streaming request through it.
//!
//! Lives on: the main thread's runtime; Edge and node are processes of their own. Bound: one answer,
//! one deadline per step.
//!
//! ```text
//! this process ──HTTP──► iop edge ◄──mTLS── iop node ──HTTP──► model server in this process
//!        └──/metrics, /status──►┘
//! ```
//! The Edge is a separate process so that its counters are its own: the last line says what a frame
//! cost there in heap allocations, read from `/metrics` at two points of the flowing stream.
use core::fmt;
use core::time::Duration;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::model_server::{self, Counts, Settings};
use crate::pki::PkiError;

mod stage;

use crate::http::{self, HttpError};
use stage::{Addresses, Directory, Files, Part};

const MODEL: &str = "iop-demo";
/// From the start of the children until the node takes requests.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Between two looks at a part that is still starting.
const LOOK_AGAIN: Duration = Duration::from_millis(25);
/// Between two pieces of an answer, and for one scrape.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Tokens, at least, before the first and after the second look at the counters, a tenth if that is
/// more: what start and end cost is not what a frame costs.
const EDGE_TOKENS: u32 = 12;
const TOKENS_MIN: i64 = 4 * EDGE_TOKENS as i64;

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Keep everything running afterwards, until ctrl-c
    #[arg(long)]
    stay: bool,
    /// Tokens of the answer
    #[arg(long, default_value_t = 240, value_parser = clap::value_parser!(u32).range(TOKENS_MIN..=1_000_000))]
    tokens: u32,
    /// Milliseconds from one token to the next
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pace_ms: u32,
    /// Port for clients on 127.0.0.1; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// What failed.
#[derive(Debug)]
pub(crate) enum DemoError {
    Runtime(io::Error),
    Output(io::Error),
    Port {
        address: SocketAddr,
        cause: io::Error,
    },
    File {
        path: PathBuf,
        cause: io::Error,
    },
    Pki(PkiError),
    Start {
        name: &'static str,
        cause: io::Error,
    },
    Ended {
        name: &'static str,
        status: ExitStatus,
    },
    NotReady {
        what: &'static str,
    },
    Http {
        what: &'static str,
        cause: HttpError,
    },
    Silent {
        what: &'static str,
    },
    Refused {
        status: u16,
        body: String,
    },
    Answer(&'static str),
    Metric(&'static str),
    Interrupted,
}

impl fmt::Display for DemoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runtime(cause) => write!(f, "cannot start: {cause}"),
            Self::Output(cause) => write!(f, "cannot write to standard output: {cause}"),
            Self::Port { address, cause } => write!(f, "cannot use {address}: {cause}"),
            Self::File { path, cause } => write!(f, "{}: {cause}", path.display()),
            Self::Pki(cause) => write!(f, "certificates: {cause}"),
            Self::Start { name, cause } => write!(f, "cannot start iop {name}: {cause}"),
            Self::Ended { name, status } => write!(f, "iop {name} ended by itself: {status}"),
            Self::NotReady { what } => {
                write!(f, "{what} within {} s", READY_WITHIN.as_secs())
            }
            Self::Http { what, cause } => write!(f, "{what}: {cause}"),
            Self::Silent { what } => {
                write!(
                    f,
                    "{what}: nothing arrived for {} s",
                    ANSWER_WITHIN.as_secs()
                )
            }
            Self::Refused { status, body } => {
                write!(f, "the edge answered {status}: {}", body.trim_end())
            }
            Self::Answer(what) => write!(f, "the answer is not what was asked for: {what}"),
            Self::Metric(name) => write!(f, "the edge's metrics lack {name}"),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

impl std::error::Error for DemoError {}

/// Runs the demo; failures are explained on `notes` and give exit code 1.
///
/// # Errors
/// [`DemoError`], after everything started has ended and the directory is gone.
pub(crate) fn run(
    args: &DemoArgs,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<ExitCode, DemoError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let result = runtime
        .map_err(DemoError::Runtime)?
        .block_on(demo(args, out, notes));
    result.map(|()| ExitCode::SUCCESS)
}

async fn demo(
    args: &DemoArgs,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), DemoError> {
    let mut stop = Stop::new()?;
    let directory = Directory::new()?;
    let (model_server, server, counts) = serve_model(args).await?;
    let addresses = Addresses::pick(args.port)?;
    let files = stage::furnish(&directory, addresses, model_server, MODEL)?;
    let mut parts = Vec::new();
    let result = tokio::select! {
        result = act(args, addresses, &files, &mut parts, &counts, out) => result,
        () = stop.asked() => Err(DemoError::Interrupted),
    };
    let result = match result {
        Ok(()) if args.stay => stay(addresses, &mut parts, &mut stop, out).await,
        other => other,
    };
    if !matches!(result, Ok(()) | Err(DemoError::Interrupted)) {
        for part in &parts {
            for line in part.log_tail() {
                let _unheard = writeln!(notes, "  {}: {line}", part.name);
            }
        }
    }
    while let Some(part) = parts.pop() {
        part.end().await;
    }
    server.abort();
    result
}

/// The model server, in this process, on a port of its own.
async fn serve_model(
    args: &DemoArgs,
) -> Result<(SocketAddr, JoinHandle<io::Result<()>>, Arc<Counts>), DemoError> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let fail = |cause| DemoError::Port {
        address: any,
        cause,
    };
    let listener = tokio::net::TcpListener::bind(any).await.map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    let counts = Arc::new(Counts::default());
    let settings = Settings {
        model: MODEL.to_owned(),
        tokens: args.tokens,
        pace: Duration::from_millis(args.pace_ms.into()),
    };
    let server = tokio::spawn(model_server::serve(listener, settings, Arc::clone(&counts)));
    Ok((address, server, counts))
}

/// From the start of the children to the report. The children are left in `parts`.
async fn act(
    args: &DemoArgs,
    addresses: Addresses,
    files: &Files,
    parts: &mut Vec<Part>,
    counts: &Counts,
    out: &mut dyn Write,
) -> Result<(), DemoError> {
    let Addresses { clients, admin, .. } = addresses;
    let begun = Instant::now();
    parts.push(Part::start("edge", &files.edge)?);
    until(begun, parts, "the edge did not become ready", || {
        ready(admin)
    })
    .await?;
    // Only now, so that its first dial finds the listener open.
    parts.push(Part::start("node", &files.node)?);
    until(begun, parts, "the node did not become ready", || {
        activated(admin)
    })
    .await?;
    until(begun, parts, "the status does not show the node", || {
        connected(admin)
    })
    .await?;
    let node = stage::NODE;
    say(
        out,
        format_args!("edge on http://{clients}, admin on http://{admin}, node {node} ready\n\n"),
    )?;
    let report = stream(args, addresses, out).await?;
    if counts.completed() != 1 || counts.aborted() != 0 {
        return Err(DemoError::Answer(
            "the model server did not see it read to its end",
        ));
    }
    say(out, format_args!("\n\n{report}\n"))
}

/// Asks until the answer is yes; fails when the time is up or a part ends by itself.
async fn until<A: Future<Output = bool>>(
    begun: Instant,
    parts: &mut [Part],
    what: &'static str,
    asked: impl Fn() -> A,
) -> Result<(), DemoError> {
    while begun.elapsed() < READY_WITHIN {
        for part in &mut *parts {
            part.check()?;
        }
        if timeout(ANSWER_WITHIN, asked()).await == Ok(true) {
            return Ok(());
        }
        sleep(LOOK_AGAIN).await;
    }
    Err(DemoError::NotReady { what })
}

/// `/readyz` says so. Until the listener is open, a refused connection means "not yet" as well.
async fn ready(admin: SocketAddr) -> bool {
    http::get(admin, "/readyz")
        .await
        .is_ok_and(|answer| answer.status == 200)
}

/// A node has become ready, says the counter: a status is up to a second old.
async fn activated(admin: SocketAddr) -> bool {
    read(admin, "/metrics").await.is_ok_and(|text| {
        sum(&text, "iop_edge_node_activations_total", " ").is_some_and(|count| count > 0)
    })
}

/// `/status` shows the node connected.
async fn connected(admin: SocketAddr) -> bool {
    let text = read(admin, "/status").await.unwrap_or_default();
    let status: Value = serde_json::from_str(&text).unwrap_or_default();
    status["nodes"][0]["connected"].as_bool() == Some(true)
}

async fn read(admin: SocketAddr, path: &str) -> Result<String, HttpError> {
    http::get(admin, path).await?.text().await
}

/// What the Edge has counted at one moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    frames: u64,
    allocations: u64,
}

impl Look {
    async fn take(admin: SocketAddr) -> Result<Self, DemoError> {
        let what = "reading the edge's metrics";
        let text = timeout(ANSWER_WITHIN, read(admin, "/metrics"))
            .await
            .map_err(|_| DemoError::Silent { what })?;
        let text = text.map_err(|cause| DemoError::Http { what, cause })?;
        let heap = "iop_edge_heap_allocations_total";
        let role = |role: &str| sum(&text, heap, &format!("{{role=\"{role}\"}} "));
        let shard = role("shard").ok_or(DemoError::Metric(heap))?;
        let control = role("control").ok_or(DemoError::Metric(heap))?;
        let frames = "iop_edge_frames_total";
        Ok(Self {
            frames: sum(&text, frames, "{").ok_or(DemoError::Metric(frames))?,
            allocations: shard + control,
        })
    }
}

/// Sum of the samples of `name` whose line goes on with `next`; `None` without one.
fn sum(text: &str, name: &str, next: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(name));
    let values = lines.filter(|rest| rest.starts_with(next)).map(|rest| {
        rest.rsplit(' ')
            .next()
            .and_then(|value| value.parse::<u64>().ok())
    });
    values.reduce(|sum, value| Some(sum? + value?)).flatten()
}

/// What the last line says.
struct Report {
    first_token: Duration,
    frames: u64,
    bytes: u64,
    steady_frames: u64,
    steady_allocations: u64,
}

impl fmt::Display for Report {
    #[expect(clippy::cast_precision_loss, reason = "shown with three decimals")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "first token after {:.1} ms · {} frames · {} bytes · {:.3} heap allocations per \
             forwarded frame ({} in {} frames of the steady stream, on shard and control threads)",
            self.first_token.as_secs_f64() * 1_000.0,
            self.frames,
            self.bytes,
            self.steady_allocations as f64 / self.steady_frames.max(1) as f64,
            self.steady_allocations,
            self.steady_frames,
        )
    }
}

/// Sends the request, shows the tokens as they arrive, looks at the counters twice on the way.
async fn stream(
    args: &DemoArgs,
    addresses: Addresses,
    out: &mut dyn Write,
) -> Result<Report, DemoError> {
    let what = "the streaming request";
    let fail = |cause| DemoError::Http { what, cause };
    let before = Look::take(addresses.admin).await?;
    let begun = Instant::now();
    let request = request();
    let asked = http::post(addresses.clients, "/v1/chat/completions", "", &request);
    let answer = timeout(ANSWER_WITHIN, asked)
        .await
        .map_err(|_| DemoError::Silent { what })?;
    let mut answer = answer.map_err(fail)?;
    if answer.status != 200 {
        let status = answer.status;
        return Err(DemoError::Refused {
            status,
            body: answer.text().await.map_err(fail)?,
        });
    }
    let margin = EDGE_TOKENS.max(args.tokens / 10);
    let mut events = Events::default();
    let mut looks: Vec<JoinHandle<Result<Look, DemoError>>> = Vec::new();
    let (mut piece, mut bytes, mut first_token) = (Vec::new(), 0, None);
    loop {
        let next = timeout(ANSWER_WITHIN, answer.next(&mut piece)).await;
        if !next
            .map_err(|_| DemoError::Silent { what })?
            .map_err(fail)?
        {
            break;
        }
        bytes += piece.len() as u64;
        let text = events.take(&piece)?;
        if !text.is_empty() {
            first_token.get_or_insert_with(|| begun.elapsed());
            say(out, format_args!("{text}"))?;
        }
        // Both looks are taken while tokens flow; reading goes on meanwhile.
        let due = [margin, args.tokens - margin].get(looks.len()).copied();
        if due.is_some_and(|due| events.tokens >= due) {
            looks.push(tokio::spawn(Look::take(addresses.admin)));
        }
    }
    if !events.done || events.tokens != args.tokens {
        return Err(DemoError::Answer("it ended before its last token"));
    }
    let mut steady = Vec::new();
    for look in looks {
        steady.push(
            look.await
                .map_err(|_| DemoError::Answer("a look at the counters failed"))??,
        );
    }
    let after = Look::take(addresses.admin).await?;
    let [first, second] = steady[..] else {
        return Err(DemoError::Answer("it arrived too fast to be measured"));
    };
    Ok(Report {
        first_token: first_token.unwrap_or_default(),
        frames: after.frames - before.frames,
        bytes,
        steady_frames: second.frames - first.frames,
        steady_allocations: second.allocations - first.allocations,
    })
}

fn request() -> String {
    let body = json!({
        "model": MODEL, "stream": true,
        "messages": [{"role": "user", "content": "Show me how an answer travels."}],
    });
    body.to_string()
}

/// Reads server-sent events out of a byte stream.
#[derive(Debug, Default)]
struct Events {
    /// Bytes of the event in progress.
    held: Vec<u8>,
    tokens: u32,
    done: bool,
}

impl Events {
    /// Takes bytes; returns the text of the tokens they complete.
    fn take(&mut self, bytes: &[u8]) -> Result<String, DemoError> {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        while let Some(end) = self.held.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.held.drain(..end + 2).collect();
            let event = String::from_utf8_lossy(&event);
            let data = event.strip_prefix("data: ");
            let data = data
                .ok_or(DemoError::Answer("an event without data"))?
                .trim_end();
            if data == "[DONE]" {
                self.done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(data)
                .map_err(|_| DemoError::Answer("an event that is not JSON"))?;
            if chunk.get("error").is_some() {
                return Err(DemoError::Answer("an error inside the stream"));
            }
            let token = chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default();
            if !token.is_empty() {
                self.tokens += 1;
                text.push_str(token);
            }
        }
        Ok(text)
    }
}

/// Keeps everything running until it is told to stop or a part ends.
async fn stay(
    addresses: Addresses,
    parts: &mut [Part],
    stop: &mut Stop,
    out: &mut dyn Write,
) -> Result<(), DemoError> {
    let Addresses { clients, admin, .. } = addresses;
    say(
        out,
        format_args!(
            "\nstill running; try\n  curl -N http://{clients}/v1/chat/completions -d '{}'\n  \
             curl http://{admin}/status\n  curl http://{admin}/metrics\nctrl-c ends it\n",
            request()
        ),
    )?;
    loop {
        let pause = timeout(Duration::from_millis(500), stop.asked()).await;
        if pause.is_ok() {
            return Ok(());
        }
        for part in &mut *parts {
            part.check()?;
        }
    }
}

/// Signals that ask the demo to end.
struct Stop([tokio::signal::unix::Signal; 3]);

impl Stop {
    fn new() -> Result<Self, DemoError> {
        let on = |kind| signal(kind).map_err(DemoError::Runtime);
        Ok(Self([
            on(SignalKind::interrupt())?,
            on(SignalKind::terminate())?,
            on(SignalKind::hangup())?,
        ]))
    }

    async fn asked(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

fn say(out: &mut dyn Write, text: fmt::Arguments<'_>) -> Result<(), DemoError> {
    out.write_fmt(text)
        .and_then(|()| out.flush())
        .map_err(DemoError::Output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_the_same_at_every_cut() {
        let stream = "data: {\"choices\":[{\"delta\":{\"content\":\"\"}}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"Grüße\"}}]}\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\" a\\n\"}}]}\n\n\
                      data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                      data: [DONE]\n\n";
        for cut in 1..stream.len() {
            let mut events = Events::default();
            let mut text = String::new();
            for piece in stream.as_bytes().chunks(cut) {
                text += &events.take(piece).unwrap();
            }
            assert_eq!(
                (text.as_str(), events.tokens, events.done),
                ("Grüße a\n", 2, true)
            );
        }
        let broken = ["data: {\"error\":{}}\n\n", "data: {\n\n", "event: x\n\n"];
        for bytes in broken {
            assert!(Events::default().take(bytes.as_bytes()).is_err(), "{bytes}");
        }
    }

    #[test]
    fn samples_are_summed_by_name_and_label() {
        let text = "# TYPE a counter\na{k=\"x\"} 3\na{k=\"y\"} 4\nab{k=\"x\"} 9\n";
        assert_eq!(sum(text, "a", "{"), Some(7));
        assert_eq!(sum(text, "a", "{k=\"y\"} "), Some(4));
        assert_eq!(sum(text, "b", "{"), None);
        assert_eq!(sum("a{k=\"x\"} one\n", "a", "{"), None);
    }

    #[test]
    fn a_stage_is_gone_when_it_is_dropped() {
        let directory = Directory::new().unwrap();
        let path = directory.path().to_owned();
        let any = SocketAddr::from(([127, 0, 0, 1], 9));
        let addresses = Addresses::pick(0).unwrap();
        let Files { edge, node } = stage::furnish(&directory, addresses, any, MODEL).unwrap();
        assert!(edge.starts_with(&path) && node.exists() && path.join("pki/ca.key").exists());
        iop_dataplane::config::EdgeConfig::load(&edge).unwrap_or_else(|error| panic!("{error}"));
        drop(directory);
        assert!(!path.exists());
    }
}
