//! One HTTP call to a provider: where it goes, what it carries, what comes back, byte for byte.
//!
//! Lives on: the attempt's task. View: one call. Bound: `GATHERED_BYTES_MAX` and one chunk at a time; a
//! head of `RESPONSE_START_BYTES_MAX`; at most one retry, on a connection found dead. `[D-20]`
//!
//! Nothing here follows a redirect, decompresses, or re-frames; the request's framing is our own, and
//! dropping a call closes its connection.
use core::cell::Cell;
use core::fmt;
use core::future::{Future, poll_fn};
use core::pin::{Pin, pin};
use core::task::{Context, Poll};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use iop_control::node::attempt::Rejection;
use iop_lease::LeaseError;
use iop_proto::domain::Header;
use iop_proto::ids::Now;
use iop_proto::limits::{HEADERS_MAX, RESPONSE_START_BYTES_MAX};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, Request, Response, StatusCode, Url};
use tracing::warn;

use crate::credential::{Injected, Sealed, Target};
use crate::identity::CredentialError;

tokio::task_local! {
    /// Connections begun by the call of this task: none means that an idle one was reused.
    static CONNECTS: Cell<u32>;
}

/// Why a provider call failed; a short text without addresses or payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProviderError {
    Refused,
    ConnectTimeout,
    Connect,
    /// The connection broke before a response head.
    NoResponse,
    /// The connection broke inside the body.
    BodyBroken,
    /// Not HTTP, a head beyond what HTTP servers send, or an upgrade nobody asked for.
    Malformed,
    HeadTooLarge,
    /// The adapter itself panicked.
    Fault,
}

impl ProviderError {
    /// Stands behind the prefix in the legacy error.
    pub(crate) const fn detail(self) -> &'static str {
        match self {
            Self::Refused => "connection refused",
            Self::ConnectTimeout => "connect timed out",
            Self::Connect => "cannot connect",
            Self::NoResponse => "connection lost before a response",
            Self::BodyBroken => "connection lost inside the response body",
            Self::Malformed => "the response is not valid HTTP",
            Self::HeadTooLarge => "the response head is too large",
            Self::Fault => "internal error in the adapter",
        }
    }
}

/// Where an adapter's calls go. Joined with a path by rule: a version segment that both sides name is
/// named once, nothing else is doubled or dropped. `[D-20]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BaseUrl {
    origin: String,
    /// Without a trailing slash.
    path: String,
    secure: bool,
}

/// Why a base URL cannot be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BaseUrlError {
    NotAUrl,
    NotHttp,
    /// User, query or fragment.
    Surplus,
}

impl fmt::Display for BaseUrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAUrl => "base_url is not a URL",
            Self::NotHttp => "base_url is neither http nor https",
            Self::Surplus => "base_url carries a user, a query or a fragment",
        })
    }
}

impl BaseUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, BaseUrlError> {
        let url = Url::parse(text).map_err(|_| BaseUrlError::NotAUrl)?;
        let secure = match url.scheme() {
            "http" => false,
            "https" => true,
            _ => return Err(BaseUrlError::NotHttp),
        };
        let user = !url.username().is_empty() || url.password().is_some();
        if user || url.query().is_some() || url.fragment().is_some() {
            return Err(BaseUrlError::Surplus);
        }
        let origin = url.origin().ascii_serialization();
        let path = url.path().trim_end_matches('/').to_owned();
        Ok(Self {
            origin,
            path,
            secure,
        })
    }

    pub(crate) const fn is_secure(&self) -> bool {
        self.secure
    }

    /// The URL of `path`, which may carry a query.
    ///
    /// # Errors
    /// A path that is not absolute, or that a URL parser would read differently than it is written
    /// (dot segments, fragments, characters that need escaping). In the query, which cannot lead
    /// elsewhere, printable characters that need escaping are escaped.
    pub(crate) fn join(&self, path: &str) -> Result<Url, Rejection> {
        if path.is_empty() {
            return Err(Rejection::PathMissing);
        }
        let Some(rest) = path.strip_prefix('/') else {
            return Err(Rejection::PathInvalid);
        };
        let own = self.path.rsplit('/').next().unwrap_or_default();
        let first = rest.split(['/', '?']).next().unwrap_or_default();
        let tail = if is_version(own) && own == first {
            &path[1 + first.len()..]
        } else {
            path
        };
        let joined = format!("{}{tail}", self.path);
        let url = Url::parse(&format!("{}{joined}", self.origin));
        let url = url.map_err(|_| Rejection::PathInvalid)?;
        let (written, query) = joined.split_once('?').unwrap_or((&joined, ""));
        let printable = query.bytes().all(|byte| matches!(byte, 0x21..=0x7e));
        let as_written = url.fragment().is_none() && url.path() == written && printable;
        as_written.then_some(url).ok_or(Rejection::PathInvalid)
    }
}

/// `v1`, `v2`, `v1beta` …
fn is_version(segment: &str) -> bool {
    let Some(rest) = segment.strip_prefix('v') else {
        return false;
    };
    rest.starts_with(|c: char| c.is_ascii_digit())
        && rest.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// Headers that describe one hop; they never cross this node in either direction. `[D-13]`
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
];
/// What belongs to the client's own hop: framing, address, credentials. `[D-13]` `[P-61]`
const CLIENTS_OWN: [&str; 7] = [
    "content-length",
    "host",
    "authorization",
    "proxy-authorization",
    "x-api-key",
    "api-key",
    "cookie",
];

fn connection_options<'a>(values: impl Iterator<Item = &'a [u8]>) -> BTreeSet<String> {
    values
        .flat_map(|value| value.split(|&b| b == b','))
        .map(|option| String::from_utf8_lossy(option).trim().to_ascii_lowercase())
        .filter(|option| !option.is_empty())
        .collect()
}

/// What of a request's headers reaches the provider, in order, duplicates kept.
///
/// # Errors
/// A name or value that is not HTTP.
pub(crate) fn request_headers(headers: &[Header]) -> Result<HeaderMap, Rejection> {
    let named = |header: &&Header| header.name.eq_ignore_ascii_case("connection");
    let options = connection_options(headers.iter().filter(named).map(|header| &header.value[..]));
    let mut out = HeaderMap::with_capacity(headers.len());
    for Header { name, value } in headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| Rejection::HeaderInvalid)?;
        let text = name.as_str();
        if HOP_BY_HOP.contains(&text) || CLIENTS_OWN.contains(&text) || options.contains(text) {
            continue;
        }
        let value = HeaderValue::from_maybe_shared(value.clone());
        out.append(name, value.map_err(|_| Rejection::HeaderInvalid)?);
    }
    Ok(out)
}

/// What of a response's headers reaches the Edge, in order, duplicates kept. A Content-Length beside
/// a transfer coding is no length; a value that repeats the credential is dropped. `[P-53]` `[R-336]`
fn response_headers(
    headers: &HeaderMap,
    injected: Option<&Injected>,
) -> Result<Vec<Header>, ProviderError> {
    let options = connection_options(
        headers
            .get_all("connection")
            .iter()
            .map(HeaderValue::as_bytes),
    );
    let coded = headers.contains_key("transfer-encoding");
    let mut bytes = 0;
    let mut out = Vec::with_capacity(headers.len());
    for (name, value) in headers {
        let text = name.as_str();
        let dropped = HOP_BY_HOP.contains(&text)
            || options.contains(text)
            || (coded && text == "content-length");
        if dropped {
            continue;
        }
        if let Some(injected) = injected.filter(|injected| injected.is_in(value.as_bytes())) {
            let count = injected.counts.dropped();
            // A provider may do so with every header: the lines grow rarer.
            if count.is_power_of_two() {
                warn!(
                    count,
                    "a response header repeated its credential and was dropped"
                );
            }
            continue;
        }
        bytes += text.len() + value.len() + HEADER_OVERHEAD;
        let value = Bytes::copy_from_slice(value.as_bytes());
        out.push(Header {
            name: text.to_owned(),
            value,
        });
    }
    let fits = out.len() <= HEADERS_MAX as usize && bytes <= RESPONSE_START_BYTES_MAX as usize;
    fits.then_some(out).ok_or(ProviderError::HeadTooLarge)
}

/// Tags and lengths of one header entry and its two fields, at most.
const HEADER_OVERHEAD: usize = 3 * (1 + 5);

/// A call that is ready to be made; nothing of it was sent.
#[derive(Debug)]
pub(crate) struct ProviderRequest {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) credential: Carried,
}

/// A request's credential on its way to the call.
#[derive(Debug)]
pub(crate) enum Carried {
    /// The tunnel is not managed.
    None,
    /// Not opened: nothing of the credential exists here.
    Sealed(Sealed),
    Open(Injected),
}

impl ProviderRequest {
    /// Opens the credential, if there is one.
    ///
    /// # Errors
    /// Why it may not be used. No call may be made then.
    pub(crate) fn open(&mut self, target: Option<&Target>, now: Now) -> Result<(), LeaseError> {
        match core::mem::replace(&mut self.credential, Carried::None) {
            Carried::Sealed(sealed) => {
                self.credential = Carried::Open(sealed.open(target, now)?);
            }
            other => self.credential = other,
        }
        Ok(())
    }

    pub(crate) const fn is_managed(&self) -> bool {
        !matches!(self.credential, Carried::None)
    }

    fn injected(&self) -> Option<&Injected> {
        match &self.credential {
            Carried::Open(injected) => Some(injected),
            Carried::None | Carried::Sealed(_) => None,
        }
    }

    fn build(&self) -> Request {
        let mut request = Request::new(self.method.clone(), self.url.clone());
        request.headers_mut().clone_from(&self.headers);
        if let Some(injected) = self.injected() {
            injected.set(request.headers_mut());
        }
        let bodiless = matches!(self.method, Method::GET | Method::HEAD) && self.body.is_empty();
        if !bodiless {
            *request.body_mut() = Some(self.body.clone().into());
        }
        request
    }
}

/// What a provider hands over, in order: one head, then chunks.
#[derive(Debug)]
pub(crate) enum Item {
    Head {
        status: i32,
        headers: Vec<Header>,
    },
    /// At least one byte.
    Body(Bytes),
}

type Sending = Pin<Box<dyn Future<Output = Result<Response, ProviderError>> + Send>>;

enum State {
    Sending(Sending),
    Streaming(Box<Body>),
    Over,
}

/// Chunks are gathered up to this many bytes; with one frame a chunk, a message's own cost would count
/// for more than its bytes.
const GATHERED_BYTES_MAX: usize = 32 * 1024;

/// The body of an answer as it comes.
struct Body {
    response: Response,
    /// Of the next piece: its one chunk, or copies of several.
    one: Bytes,
    several: BytesMut,
    /// Behind what is gathered.
    end: Option<Result<(), ProviderError>>,
}

/// A call in progress. Dropping it closes the provider connection.
pub(crate) struct HttpCall {
    state: State,
    may_retry: Arc<AtomicBool>,
    /// Held until the provider has returned. `[R-202]`
    injected: Option<Box<Injected>>,
}

impl fmt::Debug for HttpCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Sending(_) => "HttpCall(sending)",
            State::Streaming(_) => "HttpCall(streaming)",
            State::Over => "HttpCall(over)",
        })
    }
}

impl HttpCall {
    pub(crate) fn new(client: Client, request: ProviderRequest) -> Self {
        let may_retry = Arc::new(AtomicBool::new(true));
        let injected = request.injected().cloned();
        let sending = Box::pin(send(client, request, may_retry.clone()));
        Self {
            state: State::Sending(sending),
            may_retry,
            injected: injected.map(Box::new),
        }
    }

    /// A call whose adapter has a bug.
    #[cfg(test)]
    pub(crate) fn panicking() -> Self {
        let sending = Box::pin(async { panic!("planted") });
        let may_retry = Arc::new(AtomicBool::new(true));
        Self {
            state: State::Sending(sending),
            may_retry,
            injected: None,
        }
    }

    /// From now on the call is only run to its end: no second request. `[I5.4]`
    pub(crate) fn no_retry(&self) {
        self.may_retry.store(false, Ordering::Relaxed);
    }

    /// The next item; `Ok(None)` once after the last. Cancel-safe: a dropped wait loses nothing.
    ///
    /// # Errors
    /// How the call failed; nothing follows.
    pub(crate) async fn next(&mut self) -> Result<Option<Item>, ProviderError> {
        self.step(false).await
    }

    /// As `next`, for one who could not send it at once: chunks that are here together are one item.
    ///
    /// # Errors
    /// As `next`.
    pub(crate) async fn next_gathered(&mut self) -> Result<Option<Item>, ProviderError> {
        self.step(true).await
    }

    /// What is gathered of the next item: a wait for it may have been given up.
    pub(crate) fn gathered(&mut self) -> Option<Item> {
        match &mut self.state {
            State::Streaming(body) => body.gathered_bytes().map(Item::Body),
            State::Sending(_) | State::Over => None,
        }
    }

    async fn step(&mut self, may_gather: bool) -> Result<Option<Item>, ProviderError> {
        let next = self.advance(may_gather).await;
        if !matches!(next, Ok(Some(_))) {
            self.state = State::Over;
        }
        next
    }

    async fn advance(&mut self, may_gather: bool) -> Result<Option<Item>, ProviderError> {
        match &mut self.state {
            State::Sending(sending) => {
                let response = sending.await?;
                if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                    return Err(ProviderError::Malformed);
                }
                let status = i32::from(response.status().as_u16());
                let headers = response_headers(response.headers(), self.injected.as_deref())?;
                self.state = State::Streaming(Box::new(Body::new(response)));
                Ok(Some(Item::Head { status, headers }))
            }
            State::Streaming(body) => Ok(body.next(may_gather).await?.map(Item::Body)),
            State::Over => Ok(None),
        }
    }
}

impl Body {
    fn new(response: Response) -> Self {
        Self {
            response,
            one: Bytes::new(),
            several: BytesMut::new(),
            end: None,
        }
    }

    /// The next chunk. With `may_gather`, those behind it that were read with it as well: the task that
    /// reads the connection hands over one at a time, so it is given a turn after each.
    async fn next(&mut self, may_gather: bool) -> Result<Option<Bytes>, ProviderError> {
        let enough = if may_gather { GATHERED_BYTES_MAX } else { 1 };
        let mut had_turn = false;
        poll_fn(|context| {
            while self.gathered() < enough && self.end.is_none() {
                match self.poll_chunk(context) {
                    Poll::Ready(Ok(Some(chunk))) => {
                        self.gather(chunk);
                        had_turn = false;
                    }
                    Poll::Ready(Ok(None)) => self.end = Some(Ok(())),
                    Poll::Ready(Err(error)) => self.end = Some(Err(body_error(&error))),
                    Poll::Pending if self.gathered() == 0 => return Poll::Pending,
                    Poll::Pending if had_turn => break,
                    Poll::Pending => {
                        had_turn = true;
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
            }
            Poll::Ready(self.take())
        })
        .await
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<reqwest::Result<Option<Bytes>>> {
        pin!(self.response.chunk()).poll(context)
    }

    fn gathered(&self) -> usize {
        self.one.len() + self.several.len()
    }

    /// An empty chunk is no progress. `[A-17]`
    fn gather(&mut self, chunk: Bytes) {
        if self.gathered() == 0 {
            self.one = chunk;
            return;
        }
        if self.several.is_empty() {
            self.several.reserve(GATHERED_BYTES_MAX);
            self.several.extend_from_slice(&self.one);
            self.one = Bytes::new();
        }
        self.several.extend_from_slice(&chunk);
    }

    /// What is gathered; nothing: the end.
    fn take(&mut self) -> Result<Option<Bytes>, ProviderError> {
        match self.gathered_bytes() {
            Some(bytes) => Ok(Some(bytes)),
            None => self.end.unwrap_or(Ok(())).map(|()| None),
        }
    }

    fn gathered_bytes(&mut self) -> Option<Bytes> {
        if self.gathered() == 0 {
            return None;
        }
        let one = core::mem::take(&mut self.one);
        Some(if one.is_empty() {
            self.several.split().freeze()
        } else {
            one
        })
    }
}

/// The method of a request whose call has a bug.
#[cfg(test)]
pub(crate) const PANICS: &str = "PANICS";

/// One request; a second one only when an idle connection was reused and found dead before any byte
/// of a response, while nothing else was decided. `[D-20]` `[P-42]`
async fn send(
    client: Client,
    request: ProviderRequest,
    may_retry: Arc<AtomicBool>,
) -> Result<Response, ProviderError> {
    #[cfg(test)]
    assert!(request.method.as_str() != PANICS, "planted");
    let (first, connects) = counted(client.execute(request.build())).await;
    let error = match first {
        Ok(response) => return Ok(response),
        Err(error) => error,
    };
    if connects > 0 || !is_dead_connection(&error) || !may_retry.load(Ordering::Relaxed) {
        return Err(send_error(&error));
    }
    client
        .execute(request.build())
        .await
        .map_err(|error| send_error(&error))
}

async fn counted<T>(call: impl Future<Output = T>) -> (T, u32) {
    let counted = async {
        let result = call.await;
        (result, CONNECTS.with(Cell::get))
    };
    CONNECTS.scope(Cell::new(0), counted).await
}

/// The first cause of a kind `T` behind `error`.
fn cause<T: core::error::Error + 'static>(error: &reqwest::Error) -> Option<&T> {
    let mut next = core::error::Error::source(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

fn is_dead_connection(error: &reqwest::Error) -> bool {
    let by_http = cause::<hyper::Error>(error).is_some_and(|error| {
        error.is_incomplete_message() || error.is_closed() || error.is_canceled()
    });
    let by_socket = cause::<io::Error>(error).is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::NotConnected
                | io::ErrorKind::UnexpectedEof
        )
    });
    !error.is_connect() && (by_http || by_socket)
}

fn send_error(error: &reqwest::Error) -> ProviderError {
    if error.is_connect() {
        let kind = cause::<io::Error>(error).map(io::Error::kind);
        return match kind {
            Some(io::ErrorKind::ConnectionRefused) => ProviderError::Refused,
            Some(io::ErrorKind::TimedOut) => ProviderError::ConnectTimeout,
            _ if error.is_timeout() => ProviderError::ConnectTimeout,
            _ => ProviderError::Connect,
        };
    }
    match cause::<hyper::Error>(error) {
        Some(http) if http.is_parse() => ProviderError::Malformed,
        _ => ProviderError::NoResponse,
    }
}

fn body_error(error: &reqwest::Error) -> ProviderError {
    match cause::<hyper::Error>(error) {
        Some(http) if http.is_parse() => ProviderError::Malformed,
        _ => ProviderError::BodyBroken,
    }
}

/// Figures of one adapter's client.
#[derive(Clone, Debug)]
pub(crate) struct ClientOptions {
    pub(crate) connect_timeout: Duration,
    pub(crate) pool_idle: Duration,
    pub(crate) proxy_from_env: bool,
    pub(crate) secure: bool,
    /// Further roots for `https`.
    pub(crate) ca: Option<PathBuf>,
}

/// Why an adapter's client cannot be built.
#[derive(Debug)]
pub(crate) enum ClientError {
    Roots(CredentialError),
    Build(reqwest::Error),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Roots(error) => write!(f, "provider_http.ca: {error}"),
            Self::Build(error) => write!(f, "HTTP client: {error}"),
        }
    }
}

/// One adapter's HTTP client: HTTP/1.1, no redirects, no decompression, no retries of its own.
///
/// # Errors
/// The extra roots cannot be used, or the system's cannot be loaded for an `https` provider.
pub(crate) fn client(options: &ClientOptions) -> Result<Client, ClientError> {
    let loopback = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let loopback = loopback.map(|address| SocketAddr::new(address, 0));
    let mut builder = Client::builder()
        .http1_only()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .referer(false)
        .connect_timeout(options.connect_timeout)
        .pool_idle_timeout(options.pool_idle)
        .http1_max_headers(HEADERS_MAX as usize)
        .resolve_to_addrs("localhost", &loopback)
        .connector_layer(CountConnects);
    if !options.proxy_from_env {
        builder = builder.no_proxy();
    }
    if !options.secure {
        builder = builder.tls_certs_only([]); // no TLS is spoken: no roots are loaded
    } else if let Some(ca) = &options.ca {
        let roots = crate::identity::certificates(ca).map_err(ClientError::Roots)?;
        let roots = roots
            .iter()
            .map(|root| reqwest::Certificate::from_der(root));
        let roots = roots
            .collect::<Result<Vec<_>, _>>()
            .map_err(ClientError::Build)?;
        builder = builder.tls_certs_merge(roots);
    }
    builder.build().map_err(ClientError::Build)
}

/// Counts the connects that a call causes.
#[derive(Clone, Copy, Debug)]
struct CountConnects;

impl<S> tower_layer::Layer<S> for CountConnects {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner }
    }
}

#[derive(Clone, Debug)]
struct Counted<S> {
    inner: S,
}

impl<S, R> tower_service::Service<R> for Counted<S>
where
    S: tower_service::Service<R>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        // Outside a call's task (a connect finished in the background) there is nothing to count.
        let _ = CONNECTS.try_with(|count| count.set(count.get() + 1));
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, value: &'static [u8]) -> Header {
        Header {
            name: name.to_owned(),
            value: Bytes::from_static(value),
        }
    }

    #[test]
    fn base_and_path_join_without_doubling_or_dropping_a_segment() {
        for (base, expected) in [
            ("http://h:1", "http://h:1/v1/x?q=1"),
            ("http://h:1/", "http://h:1/v1/x?q=1"),
            ("http://h:1/v1", "http://h:1/v1/x?q=1"),
            ("http://h:1/v1/", "http://h:1/v1/x?q=1"),
            ("http://h:1/openai/v1", "http://h:1/openai/v1/x?q=1"),
            ("https://h/openai", "https://h/openai/v1/x?q=1"),
            ("http://[::1]:8/v2", "http://[::1]:8/v2/v1/x?q=1"),
            ("http://h/x", "http://h/x/v1/x?q=1"),
        ] {
            let url = BaseUrl::parse(base).unwrap().join("/v1/x?q=1").unwrap();
            assert_eq!(url.as_str(), expected, "{base}");
        }
        let base = BaseUrl::parse("http://h/v1").unwrap();
        assert_eq!(base.join("/v1").unwrap().as_str(), "http://h/v1");
        assert_eq!(base.join("/chat").unwrap().as_str(), "http://h/v1/chat");
        assert_eq!(base.join("/v1x/y").unwrap().as_str(), "http://h/v1/v1x/y");
        let escaped = base.join("/v1/x?a='b'&c=%2f?d").unwrap();
        assert_eq!(escaped.as_str(), "http://h/v1/x?a=%27b%27&c=%2f?d");
    }

    #[test]
    fn a_path_that_would_leave_its_base_or_change_on_the_way_is_refused() {
        let base = BaseUrl::parse("http://h:1/openai/v1").unwrap();
        assert_eq!(base.join(""), Err(Rejection::PathMissing));
        for bad in [
            "v1/x",
            "http://evil/v1",
            "/../x",
            "/v1/../../x",
            "/a/%2e%2e/b",
            "/a#b",
            "/a b",
            "/a\\b",
            "/ä",
            "/a\nb",
            "/a?b c",
            "/a?b\nc",
            "/a?b\u{e9}",
            "/a?b#c",
            "/./a",
            "*",
        ] {
            assert_eq!(base.join(bad), Err(Rejection::PathInvalid), "{bad:?}");
        }
        assert_eq!(base.join("//evil/x").unwrap().host_str(), Some("h"));
    }

    #[test]
    fn a_base_url_is_http_and_nothing_but_a_place() {
        for (text, expected) in [
            ("h:80", BaseUrlError::NotHttp),
            ("", BaseUrlError::NotAUrl),
            ("/v1", BaseUrlError::NotAUrl),
            ("ftp://h", BaseUrlError::NotHttp),
            ("http://u@h", BaseUrlError::Surplus),
            ("http://u:p@h", BaseUrlError::Surplus),
            ("http://h/?a", BaseUrlError::Surplus),
            ("http://h/#a", BaseUrlError::Surplus),
        ] {
            assert_eq!(BaseUrl::parse(text), Err(expected), "{text}");
        }
    }

    /// Proves [P-61].
    #[test]
    fn p61_hop_headers_and_every_credential_slot_stay_behind() {
        let sent = [
            header("Content-Type", b"application/json"),
            header("X-Tag", b"one"),
            header("x-tag", b"tw\xf6"),
            header("Connection", b"close, X-Private"),
            header("X-Private", b"secret"),
            header("Authorization", b"Bearer canary"),
            header("X-API-Key", b"canary"),
            header("api-key", b"canary"),
            header("Cookie", b"canary"),
            header("Proxy-Authorization", b"canary"),
            header("Content-Length", b"7"),
            header("Transfer-Encoding", b"chunked"),
            header("Host", b"client.example"),
            header("Expect", b"100-continue"),
            header("TE", b"trailers"),
            header("Upgrade", b"h2c"),
        ];
        let out = request_headers(&sent).unwrap();
        let seen: Vec<_> = out
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_bytes()))
            .collect();
        let expected: [(&str, &[u8]); 3] = [
            ("content-type", b"application/json"),
            ("x-tag", b"one"),
            ("x-tag", b"tw\xf6"),
        ];
        assert_eq!(seen, expected);
        let bad = |name, value| request_headers(&[header(name, value)]).unwrap_err();
        assert_eq!(bad("a b", b"x"), Rejection::HeaderInvalid);
        assert_eq!(bad("a", b"x\r\ny: z"), Rejection::HeaderInvalid);
    }

    #[test]
    fn response_headers_keep_duplicates_and_lose_their_hop() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("set-cookie", "a"),
            ("set-cookie", "b"),
            ("content-length", "5"),
            ("connection", "keep-alive, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let names = |headers: &HeaderMap| {
            let out = response_headers(headers, None).unwrap();
            out.into_iter()
                .map(|header| header.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(&headers),
            ["set-cookie", "set-cookie", "content-length"]
        );
        headers.append("transfer-encoding", HeaderValue::from_static("chunked"));
        assert_eq!(names(&headers), ["set-cookie", "set-cookie"]);
    }

    #[test]
    fn a_head_that_does_not_fit_one_frame_is_refused() {
        let value = "v".repeat(RESPONSE_START_BYTES_MAX as usize);
        let mut headers = HeaderMap::new();
        headers.append(
            "x",
            HeaderValue::try_from(&value[..value.len() / 2]).unwrap(),
        );
        assert!(response_headers(&headers, None).is_ok());
        headers.append(
            "x",
            HeaderValue::try_from(&value[..value.len() / 2]).unwrap(),
        );
        assert_eq!(
            response_headers(&headers, None).unwrap_err(),
            ProviderError::HeadTooLarge
        );
    }

    /// A server that says `answer` at once, whatever it is asked, and then closes; the call of it, whose
    /// head has come.
    async fn answered(answer: Vec<u8>) -> HttpCall {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", server.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                assert!(stream.read_buf(&mut asked).await.unwrap() > 0);
            }
            stream.write_all(&answer).await.unwrap();
        });
        let request = ProviderRequest {
            method: Method::GET,
            url: Url::parse(&url).unwrap(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            credential: Carried::None,
        };
        let client = Client::builder().no_proxy().build().unwrap();
        let mut call = HttpCall::new(client, request);
        let head = call.next().await.unwrap().expect("a head");
        assert!(matches!(head, Item::Head { status: 200, .. }));
        call
    }

    /// A chunked answer of `events` and its end, if it has one.
    fn chunked(events: &[&str], end: &str) -> Vec<u8> {
        let mut text = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
        for event in events {
            text += &format!("{:x}\r\n{event}\r\n", event.len());
        }
        (text + end).into_bytes()
    }

    fn bytes(item: Item) -> Bytes {
        match item {
            Item::Body(bytes) => bytes,
            Item::Head { .. } => panic!("a second head"),
        }
    }

    #[tokio::test]
    async fn chunks_that_are_here_together_are_one_item_for_one_who_would_wait() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let events: Vec<_> = (0..2_000).map(|n| format!("data: {n}\n\n")).collect();
        let events: Vec<&str> = events.iter().map(String::as_str).collect();
        let whole = events.concat();
        for gathers in [true, false] {
            let mut call = answered(chunked(&events, "0\r\n\r\n")).await;
            let (mut seen, mut items) = (Vec::new(), 0);
            loop {
                let item = if gathers {
                    call.next_gathered().await.unwrap()
                } else {
                    call.next().await.unwrap()
                };
                let Some(item) = item else { break };
                let bytes = bytes(item);
                assert!(bytes.len() < GATHERED_BYTES_MAX + whole.len() / events.len() * 2);
                seen.extend_from_slice(&bytes);
                items += 1;
            }
            assert_eq!(seen, whole.as_bytes());
            assert!(call.next_gathered().await.unwrap().is_none(), "still over");
            // How much one read brings is the kernel's to say; surely more than ten chunks.
            let few = items * 10 <= events.len();
            assert_eq!(few, gathers, "{items} items of {} chunks", events.len());
        }
    }

    #[tokio::test]
    async fn what_came_before_a_body_broke_comes_before_the_error() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for gathers in [true, false] {
            let mut call = answered(chunked(&["one", "two", "three"], "9\r\nbro")).await;
            let mut seen = Vec::new();
            let error = loop {
                let item = if gathers {
                    call.next_gathered().await
                } else {
                    call.next().await
                };
                match item {
                    Ok(item) => seen.extend_from_slice(&bytes(item.expect("it breaks"))),
                    Err(error) => break error,
                }
            };
            assert_eq!(error, ProviderError::BodyBroken);
            assert_eq!(&seen[..], b"onetwothreebro");
        }
    }

    /// Whoever stops waiting for more finds what was there.
    #[tokio::test]
    async fn a_wait_for_more_that_is_given_up_loses_nothing() {
        use futures_util::FutureExt;
        let _ = rustls::crypto::ring::default_provider().install_default();
        for asks in [false, true] {
            let mut call = answered(chunked(&["one", "two", "three"], "0\r\n\r\n")).await;
            let (mut seen, mut given_up, mut asked_for) = (Vec::new(), 0, 0);
            loop {
                match call.next_gathered().now_or_never() {
                    None => {
                        given_up += 1;
                        if asks && let Some(item) = call.gathered() {
                            asked_for += 1;
                            seen.extend_from_slice(&bytes(item));
                        }
                        tokio::task::yield_now().await;
                    }
                    Some(item) => match item.unwrap() {
                        Some(item) => seen.extend_from_slice(&bytes(item)),
                        None => break,
                    },
                }
            }
            assert_eq!(&seen[..], b"onetwothree");
            assert!(given_up > 0, "it was waited for");
            assert_eq!(asked_for > 0, asks, "what has come is had by asking");
        }
    }
}
