//! One lease through the plane, and the life of what it opens.
use core::num::NonZeroU64;

use futures_util::FutureExt as _;
use iop_control::node::attempt::{Patience, Signals, Timeouts};
use iop_lease::{Entropy, IssuerKey, Terms, issue};
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{Adapter, Message, NodeConfig, Profile, ProfileOperation, TunnelRequest};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use super::*;
use crate::adapters::{Adapters, Call, Instance, Plans, Work};
use crate::answer::{Family, Identity, Part, Piece};
use crate::clock::Clock;
use crate::config::ProviderHttp;
use crate::execution::tests::ticket;
use crate::execution::{Job, Report, run};
use crate::observer::Observer;
use crate::provider::{Carried, Item, PANICS};
use crate::transport::Outbound;

const SECRET: &[u8] = b"sk-canary-0123456789";
/// Later than any day this runs on: what is issued then is not expired by the real clock.
const START: i64 = 4_000_000_000_000;

fn plane() -> Arc<Plane> {
    Arc::new(Plane {
        node_id: "n1".to_owned(),
        recipient: Recipient {
            keys: vec![RecipientKey::from_bytes(&[5; 32])],
            issuers: vec![IssuerKey::from_seed(&[3; 32]).public()],
        },
        started_ms: START,
        skew_ms: 5_000,
        state: Mutex::new(State {
            clock: JudgeClock::new(Now::default(), START),
            used: Used::default(),
        }),
        counts: Arc::default(),
        opened: Mutex::default(),
    })
}

fn adapter(port: u16) -> Adapter {
    let base_url = format!("http://127.0.0.1:{port}");
    let mut adapter = Adapter::new("a".to_owned(), ProviderKind::OpenAiCompat, 4, base_url);
    adapter.profile = Some(Profile {
        id: "openai".to_owned(),
        operations: vec![ProfileOperation {
            name: "chat_completions".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
        }],
        auth_header: "authorization".to_owned(),
        auth_prefix: "Bearer ".to_owned(),
    });
    adapter
}

fn instance(port: u16) -> Arc<Instance> {
    let _already = rustls::crypto::ring::default_provider().install_default();
    let http = ProviderHttp {
        connect_timeout: core::time::Duration::from_secs(5),
        pool_idle: core::time::Duration::from_secs(3),
        ca: None,
    };
    let config = NodeConfig {
        adapters: vec![adapter(port)],
        concurrency: 0,
    };
    let mut adapters = Adapters::default();
    adapters
        .start(Plans::judge(&config, &http, None).unwrap())
        .unwrap();
    adapters.get("a").unwrap().clone()
}

/// A pair good for adapter `a` at `port`, issued `at_ms` after the process began.
fn pair(port: u16, id: u8, at_ms: i64, secret: &[u8]) -> Credential {
    let adapter = adapter(port);
    let profile = adapter.profile.as_ref().unwrap();
    let to = RecipientKey::from_bytes(&[5; 32]).public();
    let binding = CredentialBinding {
        principal: "team".to_owned(),
        slot: "main".to_owned(),
        route: "m1".to_owned(),
        profile: iop_lease::profile_component(&adapter, profile),
        upstream_target: "t".to_owned(),
        node_id: "n1".to_owned(),
        recipient: to.id().to_owned(),
        ..CredentialBinding::default()
    };
    let terms = Terms {
        issued_at_unix_ms: START + at_ms,
        expires_at_unix_ms: START + at_ms + 60_000,
    };
    let entropy = Entropy {
        lease_id: [id; 16],
        ephemeral: [id; 32].into(),
    };
    let issuer = IssuerKey::from_seed(&[3; 32]);
    let lease = issue(&issuer, &to, &binding, secret, terms, &entropy).unwrap();
    Credential::Managed {
        lease: LeaseEnvelope::new(lease.into()).unwrap(),
        binding,
    }
}

fn seconds(s: u64) -> Now {
    Now::from_nanos(s * 1_000_000_000)
}

fn open(
    plane: &Arc<Plane>,
    instance: &Instance,
    credential: Credential,
    now: Now,
    wall_ms: i64,
) -> Result<Injected, LeaseError> {
    let Credential::Managed { lease, binding } = credential else {
        panic!("a pair")
    };
    plane.open(
        &lease,
        &binding,
        "t",
        instance.target.as_ref(),
        now,
        wall_ms,
    )
}

fn request(instance: &Instance, injected: Injected) -> Work {
    let work = instance.resolve_tunnel(tunnel()).unwrap();
    let Work::Tunnel(mut request) = work else {
        panic!("a tunnel")
    };
    request.credential = Carried::Open(injected);
    Work::Tunnel(request)
}

fn tunnel() -> TunnelRequest {
    TunnelRequest {
        adapter: "a".to_owned(),
        target: "t".to_owned(),
        operation: "chat_completions".to_owned(),
        body: "{}".into(),
        ..TunnelRequest::default()
    }
}

async fn accept(provider: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = provider.accept().await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n{}") {
        assert!(stream.read_buf(&mut head).await.unwrap() > 0);
    }
    (stream, String::from_utf8(head).unwrap())
}

/// How the call of a credential comes to its end.
#[derive(Clone, Copy, Debug)]
enum End {
    Success,
    ProviderError,
    CancelledBeforeHead,
    CancelledInBody,
    Panic,
}

/// Proves [R-220], [R-202].
#[tokio::test]
async fn r220_a_credential_is_zeroed_once_at_every_end_of_its_call_and_not_before() {
    let provider = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = provider.local_addr().unwrap().port();
    let instance = instance(port);
    let ends = [
        End::Success,
        End::ProviderError,
        End::CancelledBeforeHead,
        End::CancelledInBody,
        End::Panic,
    ];
    for (id, end) in (1..).zip(ends) {
        let plane = plane();
        let lease = pair(port, id, 10_000, SECRET);
        let injected = open(&plane, &instance, lease, seconds(11), START + 11_000).unwrap();
        assert_eq!(plane.counts.opened_and_zeroed(), (1, 0), "{end:?}");
        if matches!(end, End::Panic) {
            panics(&instance, injected).await;
            zeroed(&plane).await;
            continue;
        }
        let mut call = instance.call(request(&instance, injected));
        let provide = async {
            let (mut stream, head) = accept(&provider).await;
            assert!(
                head.contains("authorization: Bearer sk-canary-0123456789"),
                "{head}"
            );
            match end {
                End::ProviderError => drop(stream),
                End::CancelledBeforeHead => return Some(stream),
                _ => {
                    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nda";
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    if matches!(end, End::Success) {
                        stream.write_all(b"ta").await.unwrap();
                    }
                    return Some(stream);
                }
            }
            None
        };
        let _stream = drive(&mut call, provide, end).await;
        assert_eq!(
            plane.counts.opened_and_zeroed(),
            (1, 0),
            "{end:?}: it has not returned"
        );
        drop(call);
        zeroed(&plane).await;
    }
}

/// An attempt whose call has a bug while it holds its credential.
async fn panics(instance: &Arc<Instance>, injected: Injected) {
    let mut work = request(instance, injected);
    if let Work::Tunnel(request) = &mut work {
        request.method = PANICS.parse().unwrap();
    }
    let signals = watch::Sender::new(Signals {
        granted: true,
        ..Signals::default()
    });
    let (bulk, mut sent) = mpsc::channel(4);
    let (reports, _reported) = mpsc::unbounded_channel();
    let (clock, heard) = (Clock::start(), signals.subscribe());
    let job = job(instance, work, clock, heard, bulk, reports, false);
    let limit = core::time::Duration::from_secs(20);
    tokio::time::timeout(limit, run(job)).await.expect("an end");
    let Message::TunnelFrame(frame) = *sent.recv().await.unwrap().message else {
        panic!("a tunnel's terminal is a frame")
    };
    assert_eq!(frame.error, "node rejected: internal error in the adapter");
}

/// Runs call and provider up to the point of `end`.
async fn drive(
    call: &mut Call,
    provide: impl Future<Output = Option<TcpStream>>,
    end: End,
) -> Option<TcpStream> {
    let mut provide = core::pin::pin!(provide);
    let mut stream = None;
    let mut provided = false;
    loop {
        tokio::select! {
            biased;
            given = &mut provide, if !provided => {
                (stream, provided) = (given, true);
                if matches!(end, End::CancelledBeforeHead) {
                    return stream;
                }
            }
            item = call.next(false) => match item {
                Ok(Some(Piece::Part(Part::Http(Item::Body(_)))))
                    if matches!(end, End::CancelledInBody) =>
                {
                    return stream;
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    assert!(matches!(end, End::Success));
                    return stream;
                }
                Err(_) => {
                    assert!(matches!(end, End::ProviderError));
                    return stream;
                }
            }
        }
    }
}

/// The HTTP library lets go of an aborted call's header on its own task.
async fn zeroed(plane: &Plane) {
    let gone = async {
        while plane.counts.opened_and_zeroed() != (1, 1) {
            tokio::task::yield_now().await;
        }
    };
    let limit = core::time::Duration::from_secs(20);
    tokio::time::timeout(limit, gone)
        .await
        .expect("zeroed once");
}

/// Proves [R-220], [R-338].
#[tokio::test]
async fn r338_each_request_opens_its_own_credential_and_nothing_stays_open_between_two() {
    let (plane, instance) = (plane(), instance(9));
    for (id, count) in (1..=3).zip(1..) {
        let lease = pair(9, id, 10_000, SECRET);
        let injected = open(&plane, &instance, lease, seconds(11), START + 11_000).unwrap();
        assert_eq!(plane.counts.opened_and_zeroed(), (count, count - 1));
        drop(injected);
        assert_eq!(plane.counts.opened_and_zeroed(), (count, count));
    }
    // Opened, found unusable, zeroed all the same.
    let lease = pair(9, 9, 10_000, b"two\nlines");
    let refused = open(&plane, &instance, lease, seconds(11), START + 11_000);
    assert_eq!(refused.err(), Some(LeaseError::Unusable));
    assert_eq!(plane.counts.opened_and_zeroed(), (4, 4));
}

/// What ends an attempt around the opening of its credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    CancelAtGrant,
    EndAtGrant,
    DeadlineAtGrant,
    CancelAfterOpening,
    EndAfterOpening,
}

/// Proves [S-67].
#[tokio::test]
async fn s67_what_ends_between_grant_and_call_opens_nothing_or_zeroes_it_and_calls_nobody() {
    let provider = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = provider.local_addr().unwrap().port();
    let instance = instance(port);
    for (id, before) in (1..).zip([
        Before::CancelAtGrant,
        Before::EndAtGrant,
        Before::DeadlineAtGrant,
        Before::CancelAfterOpening,
        Before::EndAfterOpening,
    ]) {
        let plane = Arc::new(Plane {
            started_ms: START - 60_000,
            ..Arc::into_inner(plane()).unwrap()
        });
        let signals = watch::Sender::new(Signals {
            granted: true,
            cancelled: before == Before::CancelAtGrant,
            ended: before == Before::EndAtGrant,
            ..Signals::default()
        });
        let late = signals.clone();
        *plane.opened.lock().unwrap() = Some(Box::new(move || {
            late.send_modify(|signals| match before {
                Before::CancelAfterOpening => signals.cancelled = true,
                _ => signals.ended = true,
            });
        }));
        let (bulk, mut sent) = mpsc::channel(4);
        let (reports, mut reported) = mpsc::unbounded_channel();
        let credential = pair(port, id, 0, SECRET);
        let mut work = instance.resolve_tunnel(tunnel()).unwrap();
        work.seal(Sealed::of(&plane, credential, "t"));
        let expired = before == Before::DeadlineAtGrant;
        let clock = Clock::start();
        while expired && clock.now() < Now::default().after_ms(2) {
            tokio::task::yield_now().await;
        }
        let job = job(
            &instance,
            work,
            clock,
            signals.subscribe(),
            bulk,
            reports,
            expired,
        );
        let limit = core::time::Duration::from_secs(20);
        tokio::time::timeout(limit, run(job)).await.expect("an end");
        assert!(
            provider.accept().now_or_never().is_none(),
            "{before:?}: called"
        );
        expect_end(before, &plane, &mut sent, &mut reported).await;
    }
}

/// One slot given back, what was opened zeroed, and at most one word to the Edge.
async fn expect_end(
    before: Before,
    plane: &Plane,
    sent: &mut mpsc::Receiver<Outbound>,
    reported: &mut mpsc::UnboundedReceiver<Report>,
) {
    let opens = u64::from(matches!(
        before,
        Before::CancelAfterOpening | Before::EndAfterOpening
    ));
    assert_eq!(
        plane.counts.opened_and_zeroed(),
        (opens, opens),
        "{before:?}"
    );
    let slots = core::iter::from_fn(|| reported.try_recv().ok())
        .filter(|report| matches!(report, Report::SlotFree(_)));
    assert_eq!(slots.count(), 1, "{before:?}");
    let told = sent.recv().await.map(|outbound| match *outbound.message {
        Message::TunnelFrame(frame) => frame.error,
        other => panic!("{other:?}"),
    });
    let expected = match before {
        Before::CancelAtGrant | Before::CancelAfterOpening => Some("cancelled"),
        Before::DeadlineAtGrant => Some("deadline exceeded"),
        Before::EndAtGrant | Before::EndAfterOpening => None,
    };
    assert_eq!(told.as_deref(), expected, "{before:?}");
    assert!(sent.recv().await.is_none());
}

fn job(
    instance: &Arc<Instance>,
    work: Work,
    clock: Clock,
    signals: watch::Receiver<Signals>,
    bulk: mpsc::Sender<Outbound>,
    reports: mpsc::UnboundedSender<Report>,
    expired: bool,
) -> Job {
    Job {
        ticket: ticket(),
        identity: Identity {
            family: Family::Tunnel,
            run_id: "r".to_owned(),
            attempt_id: "n-1".to_owned(),
            adapter: "a".to_owned(),
            target: "t".to_owned(),
        },
        received: Now::default(),
        timeouts: Timeouts {
            hard_ms: NonZeroU64::new(u64::from(expired)),
            stall_ms: 300_000,
        },
        patience: Patience::default(),
        instance: instance.clone(),
        work,
        clock,
        signals,
        bulk,
        numbers: None,
        observer: Observer::log(),
        reports,
    }
}

/// Proves [R-218], [S-57].
#[test]
fn s57_a_lease_opens_at_most_once_over_a_restart_and_a_step_of_the_clock() {
    let instance = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(async { instance(9) });
    for issued in -6_000..=6_000 {
        if issued % 500 != 0 {
            continue;
        }
        // Before the restart the lease was used; now it comes again, to a process that began at START.
        let lease = pair(9, 1, issued, SECRET);
        let now = issued.max(0) + 1;
        let judged = open(
            &plane(),
            &instance,
            lease,
            Now::default().after_ms(now.unsigned_abs()),
            START + now,
        );
        let expected = (issued < 5_000).then_some(LeaseError::BeforeStart);
        assert_eq!(judged.err(), expected, "issued at start {issued:+} ms");
    }
    // What a process asks for after its first ready is younger than that.
    let plane = plane();
    assert_eq!(
        plane.ready_from(Now::default()),
        Now::default().after_ms(10_000)
    );
    let honest =
        |id, at, now, wall| open(&plane, &instance, pair(9, id, at, SECRET), now, wall).err();
    assert_eq!(honest(2, 10_000, seconds(10), START + 10_000), None);
    let replayed = Some(LeaseError::Replayed);
    assert_eq!(honest(2, 10_000, seconds(11), START + 11_000), replayed);
    // The wall clock goes back an hour: the lease ends by the monotonic clock all the same.
    let hour_back = START - 3_590_000;
    assert_eq!(honest(2, 10_000, seconds(69), hour_back), replayed);
    let expired = Some(LeaseError::Expired);
    assert_eq!(honest(2, 10_000, seconds(76), hour_back), expired);
}

/// Proves [R-336].
#[tokio::test]
async fn r336_a_response_header_that_echoes_the_credential_is_dropped_and_counted() {
    let provider = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = provider.local_addr().unwrap().port();
    let (plane, instance) = (plane(), instance(port));
    let lease = pair(port, 1, 10_000, SECRET);
    let injected = open(&plane, &instance, lease, seconds(11), START + 11_000).unwrap();
    let mut call = instance.call(request(&instance, injected));
    let provide = async {
        let (mut stream, _) = accept(&provider).await;
        let answer = "HTTP/1.1 200 OK\r\nx-echo: Bearer sk-canary-0123456789\r\nx-other: 1\r\n\
                      x-part: sk-canary\r\nset-cookie: k=sk-canary-0123456789\r\n\
                      content-length: 20\r\n\r\nsk-canary-0123456789";
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream
    };
    let (first, _stream) = tokio::join!(call.next(false), provide);
    let Ok(Some(Piece::Part(Part::Http(Item::Head { headers, .. })))) = first else {
        panic!("{first:?}")
    };
    let names: Vec<_> = headers.iter().map(|header| header.name.as_str()).collect();
    assert_eq!(names, ["x-other", "x-part", "content-length"]);
    assert_eq!(plane.counts.headers_dropped(), 2);
    let Ok(Some(Piece::Part(Part::Http(Item::Body(body))))) = call.next(false).await else {
        panic!("a body")
    };
    assert_eq!(&body[..], SECRET, "the body is the provider's own");
}

#[test]
fn a_value_that_repeats_the_credential_is_recognized() {
    let target = Target {
        header: reqwest::header::HeaderName::from_static("x-key"),
        prefix: "Key ".to_owned(),
        profile: String::new(),
    };
    let injected = Injected::new(&target, SECRET, &Arc::default()).unwrap();
    for (value, expected) in [
        (&b"sk-canary-0123456789"[..], true),
        (b"Key sk-canary-0123456789", true),
        (b"a=1; k=sk-canary-0123456789; b", true),
        (b"Key ", false),
        (b"sk-canary-012345678", false),
        (b"", false),
    ] {
        assert_eq!(injected.is_in(value), expected);
    }
    let shown = format!("{injected:?}");
    assert!(
        shown.contains("x-key") && !shown.contains("canary"),
        "{shown}"
    );
    let mut headers = reqwest::header::HeaderMap::new();
    injected.set(&mut headers);
    assert!(!format!("{headers:?}").contains("canary"));
}
