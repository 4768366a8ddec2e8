//! The credential plane from a node's side: what a lease is bound to, when it is asked for, and what
//! never happens when it is not there.
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use iop_lease::{Expected, IssuerPublic, LeaseError, Recipient, RecipientKey, Window};
use iop_proto::domain::HealthEvidence::{Unavailable, Unknown};
use iop_proto::domain::{Credential, CredentialBinding, LeaseEnvelope, Message, TunnelRequest};

use crate::chain::Agent;
use crate::identity::sign;
use crate::kit::{
    Run, World, answer, expect_error, expect_nothing, pending, register_and_ready, stall,
};
use crate::support::{Node, Setup, Slot, chat, credential, free_port, http_get, iop};

const SECRET: &str = "sk-canary-0123456789abcdef";
const MAIN: Slot = slot("main", "m1", "openai", SECRET);

const fn slot(
    name: &'static str,
    route: &'static str,
    profile: &'static str,
    secret: &'static str,
) -> Slot {
    Slot {
        principal: "anonymous",
        name,
        route,
        profile,
        secret,
    }
}

/// Managed nodes `n1` and `n2` with a provider each, of profiles `openai` and `other`; `m1` is served
/// by both, `only1` and `only2` by one each.
fn catalog(capacity: u32, port: u16) -> String {
    let node = |n: u32, profile: &str| {
        format!(
            "  - id: n{n}\n    recipient_key: pki/n{n}.recipient.pub\n    adapters:\n      - name: a{n}\n        \
             type: openai_compat\n        base_url: \"http://127.0.0.1:{port}\"\n        profile:\n          \
             id: {profile}\n          operations: [chat_completions]\n          auth_header: x-key\n          \
             auth_prefix: \"Key \"\n    providers:\n      - {{id: p{n}, adapter: a{n}, target: t{n}, \
             capacity: {capacity}}}\n"
        )
    };
    format!(
        "credential_plane: on\ncredentials:\n  store: slots\n  store_key_file: pki/e.store.key\n  \
         issuer_key: pki/e.issuer.key\nnodes:\n{}{}models:\n  - {{name: m1, providers: [p1, p2]}}\n  \
         - {{name: only1, providers: [p1]}}\n  - {{name: only2, providers: [p2]}}\n",
        node(1, "openai"),
        node(2, "other")
    )
}

fn setup(capacity: u32, slots: &[Slot]) -> Setup {
    Setup {
        nodes: vec!["n1", "n2"],
        slots: slots.to_vec(),
        ..Setup::with(&catalog(capacity, 9))
    }
}

/// While this is there, the issuer of an Edge started with it answers nobody.
struct Hold(PathBuf);

impl Hold {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("iop-hold-{}-{count}", std::process::id());
        let hold = Self(std::env::temp_dir().join(name));
        hold.close();
        hold
    }

    fn close(&self) {
        fs::write(&self.0, "").expect("a temporary file");
    }

    fn open(&self) {
        let _open_already = fs::remove_file(&self.0);
    }

    fn setup(&self, setup: Setup) -> Setup {
        let path = self.0.to_str().expect("a plain path").to_owned().leak();
        Setup {
            environment: vec![("IOP_TEST_ISSUER_HOLD", path)],
            ..setup
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.open();
    }
}

fn asks(world: &World) -> f64 {
    world.edge.metrics().get("iop_edge_credential_asks_total")
}

fn pair(request: &TunnelRequest) -> (&LeaseEnvelope, &CredentialBinding) {
    match &request.credential {
        Credential::Managed { lease, binding } => (lease, binding),
        other => panic!("expected a pair, got {other:?}"),
    }
}

fn key_text(world: &World, name: &str) -> String {
    let path = world.edge.directory.path().join("pki").join(name);
    fs::read_to_string(path).expect("a key of the world")
}

/// Opens a request's lease as node `n` would.
fn open(world: &World, n: u32, request: &TunnelRequest) -> Result<Vec<u8>, LeaseError> {
    let node = Recipient {
        keys: vec![
            RecipientKey::parse(&key_text(world, &format!("n{n}.recipient.key"))).expect("a key"),
        ],
        issuers: vec![IssuerPublic::parse(&key_text(world, "e.issuer.pub")).expect("a key")],
    };
    let (lease, binding) = pair(request);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("now");
    let window = Window {
        now_ms: i64::try_from(now.as_millis()).expect("now"),
        started_ms: 0,
        skew_ms: 5_000,
    };
    let node_id = format!("n{n}");
    let expected = Expected {
        node_id: &node_id,
        target: &request.target,
        profile: Some(&binding.profile),
    };
    let verified = node.verify(lease.expose(), binding, expected, window)?;
    let left = verified.expires_at_ms() - window.now_ms;
    assert!((50_000..=60_000).contains(&left), "valid for {left} ms");
    Ok(verified.open()?.to_vec())
}

/// Proves, [R-229], [R-211].
#[test]
fn r207_a_managed_request_carries_a_lease_bound_to_its_selection() {
    let world = World::with(&setup(4, &[MAIN, slot("s", "only1", "openai", "sk-other")]));
    let mut node = world.node("n1");
    let body = "{\"model\":\"m1\",\"principal\":\"mallory\",\"metadata\":{\"slot\":\"evil\",\"route\":\"evil\"}}";
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edge\r\nprincipal: mallory\r\nslot: evil\r\n\
         x-credential-binding: evil\r\nx-key: mine\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = world.asks(&request);
    let request = node.tunnel();
    let (_, binding) = pair(&request);
    let (id, digest) = binding.profile.split_once('#').expect("id and digest");
    assert_eq!((id, digest.len()), ("openai", 64));
    let recipient = RecipientKey::parse(&key_text(&world, "n1.recipient.key")).expect("a key");
    let expected = CredentialBinding {
        principal: "anonymous".to_owned(),
        slot: "main".to_owned(),
        route: "m1".to_owned(),
        profile: binding.profile.clone(),
        upstream_target: "t1".to_owned(),
        node_id: "n1".to_owned(),
        recipient: recipient.public().id().to_owned(),
        credential_revision: 1,
        route_revision: 1,
        projection_generation: 2,
    };
    assert_eq!(*binding, expected);
    assert_eq!(request.target, "t1");
    assert_eq!(open(&world, 1, &request), Ok(SECRET.as_bytes().to_vec()));
    assert_eq!(open(&world, 2, &request), Err(LeaseError::Recipient));
    let shown = request
        .headers
        .iter()
        .any(|header| header.value.windows(6).any(|part| part == b"canary"));
    assert!(!shown, "the header is the node's to set");
    assert_eq!(asks(&world), 1.0);
    let mut run = Run::of(&request);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(answer(&mut client).0.status, 200);
    drop((node, client));
    world.rest();
}

/// Proves, [S-13].
#[test]
fn r208_the_issuer_is_asked_once_after_selection_and_never_again_after_a_fence() {
    let hold = Hold::new();
    let world = World::with(&hold.setup(setup(1, &[MAIN])));
    let mut client = world.asks(&chat("m1", false));
    world.wait_queued(1);
    assert_eq!(asks(&world), 0.0, "nothing is selected");
    let node = world.node("n1");
    world.wait("iop_edge_credential_asks_total", 1);
    drop(node);
    expect_error(&mut client, 503, "node_lost", "node");
    world.wait_held(0);
    // Its next generation is here before the lease is: it is nobody's.
    let mut node = world.node("n1");
    hold.open();
    world.wait("iop_edge_credential_leases_discarded_total", 1);
    expect_nothing(&mut node);
    assert_eq!(asks(&world), 1.0);
    drop(client);
    let mut client = world.asks(&chat("m1", false));
    let request = node.tunnel();
    assert_eq!(open(&world, 1, &request), Ok(SECRET.as_bytes().to_vec()));
    assert_eq!(asks(&world), 2.0);
    let mut run = Run::of(&request);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(answer(&mut client).0.status, 200);
    drop((node, client));
    world.rest();
}

/// Proves [S-14].
#[test]
fn s14_a_lease_that_comes_after_its_caller_left_is_discarded() {
    let hold = Hold::new();
    let world = World::with(&hold.setup(setup(1, &[MAIN])));
    let mut node = world.node("n1");
    let client = world.asks(&chat("m1", false));
    world.wait("iop_edge_credential_asks_total", 1);
    world.wait_held(1);
    drop(client);
    world.wait_held(0);
    hold.open();
    world.wait("iop_edge_credential_leases_discarded_total", 1);
    expect_nothing(&mut node);
    let mut client = world.asks(&chat("m1", false));
    let mut run = Run::asked(&mut node);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(answer(&mut client).0.status, 200);
    drop((node, client));
    world.rest();
}

/// A lease that does not come within the time a selection has ends its request, and no other.
#[test]
fn an_issuer_that_does_not_answer_ends_the_request_after_its_five_seconds() {
    let hold = Hold::new();
    let world = World::with(&hold.setup(setup(1, &[MAIN])));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("m1", false));
    expect_error(&mut client, 503, "dispatch_timeout", "edge");
    world.wait_held(0);
    hold.open();
    world.wait("iop_edge_credential_leases_discarded_total", 1);
    expect_nothing(&mut node);
    drop(client);
    let mut client = world.asks(&chat("m1", false));
    let mut run = Run::asked(&mut node);
    run.error(&mut node, "node rejected");
    expect_error(&mut client, 502, "node_rejected", "node");
    drop((node, client));
    world.rest();
}

/// Proves.
#[test]
fn r227_without_a_credential_a_managed_edge_sends_nothing() {
    let world = World::with(&setup(4, &[MAIN]));
    let mut node = world.node("n1");
    // No slot for this model; then one that is taken away.
    let mut client = world.asks(&chat("only1", false));
    expect_error(&mut client, 403, "credential_missing", "edge");
    expect_nothing(&mut node);
    drop(client);
    let mut client = world.asks(&chat("m1", false));
    let request = node.tunnel();
    pair(&request);
    let mut run = Run::of(&request);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(answer(&mut client).0.status, 200);
    credential(&world.edge.directory, "remove", &MAIN, &[], "");
    drop(client);
    let mut client = world.asks(&chat("m1", false));
    expect_error(&mut client, 403, "credential_missing", "edge");
    expect_nothing(&mut node);
    drop((node, client));
    world.rest();
}

/// A rotated credential goes out with the next lease, under its own revision; no restart, no reload.
#[test]
fn a_rotated_credential_is_in_the_next_lease() {
    let world = World::with(&setup(4, &[MAIN]));
    let mut node = world.node("n1");
    let mut revisions = Vec::new();
    for secret in [SECRET, "sk-second-0123456789"] {
        if secret != SECRET {
            credential(&world.edge.directory, "rotate", &MAIN, &[], secret);
        }
        let mut client = world.asks(&chat("m1", false));
        let request = node.tunnel();
        assert_eq!(open(&world, 1, &request), Ok(secret.as_bytes().to_vec()));
        let (_, binding) = pair(&request);
        let CredentialBinding {
            credential_revision,
            route_revision,
            projection_generation,
            ..
        } = *binding;
        revisions.push((credential_revision, route_revision, projection_generation));
        let mut run = Run::of(&request);
        run.start(&mut node, 200, &[]);
        run.end(&mut node);
        assert_eq!(answer(&mut client).0.status, 200);
    }
    assert_eq!(revisions, [(1, 1, 1), (2, 1, 2)]);
    // A store that cannot be read leaves the one in force.
    fs::write(world.edge.directory.path().join("slots"), "torn").expect("a file");
    let mut client = world.asks(&chat("m1", false));
    let request = node.tunnel();
    let secret = open(&world, 1, &request);
    assert_eq!(secret, Ok(b"sk-second-0123456789".to_vec()));
    let mut run = Run::of(&request);
    run.error(&mut node, "node rejected");
    expect_error(&mut client, 502, "node_rejected", "node");
    drop((node, client));
    world.rest();
}

/// Tunnel requests among what each node was sent.
fn requests(seen: &[Vec<Message>]) -> Vec<(usize, TunnelRequest)> {
    let each = seen.iter().enumerate();
    each.flat_map(|(row, messages)| {
        messages.iter().filter_map(move |message| match message {
            Message::TunnelRequest(request) => Some((row, request.clone())),
            _ => None,
        })
    })
    .collect()
}

/// Proves. The very same stall, without the plane, is asked of the other provider (see
/// `recovery`).
#[test]
fn r343_a_bound_request_that_stalls_is_asked_of_nobody_else() {
    let second = slot("second", "m1", "other", "sk-second-0123456789");
    let world = World::with(&setup(4, &[MAIN, second]));
    let (mut one, mut two) = (world.node("n1"), world.node("n2"));
    let mut client = world.asks(&chat("m1", false));
    let request = one.tunnel();
    let mut run = Run::of(&request);
    run.stall(&mut one, stall(Unknown, "a1", "t1", None));
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(
        "iop_edge_liveness_recovery_eligibility_total{eligibility=\"credential_bound\"}",
        1,
    );
    expect_nothing(&mut two);
    assert_eq!(asks(&world), 1.0);
    drop(client);
    // A route without a slot is still refused, and asks nobody.
    let mut client = world.asks(&chat("only1", false));
    expect_error(&mut client, 403, "credential_missing", "edge");
    drop((one, two, client));
    world.rest();
}

/// Proves.
#[test]
fn r343_a_bound_route_that_fails_asks_for_no_other_slot() {
    // The model has a slot, for the profile of a provider that is not selected.
    let second = slot("second", "m1", "other", "sk-second-0123456789");
    let world = World::with(&setup(4, &[second]));
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("m1", false));
    expect_error(&mut client, 403, "credential_missing", "edge");
    expect_nothing(&mut node);
    drop((node, client));
    world.rest();
    let world = World::with(&setup(4, &[MAIN, second]));
    let (mut one, mut two) = (world.node("n1"), world.node("n2"));
    let mut asked = 0.0;
    for failure in [
        "401",
        "provider unreachable: connection refused",
        "node rejected: x",
    ] {
        let mut client = world.asks(&chat("m1", false));
        asked += 1.0;
        world.edge.wait_metrics("a dispatch", |seen| {
            seen.get("iop_edge_runs_dispatched_total") == asked
        });
        // Whoever was selected: its failure is the answer.
        let seen = [pending(&mut one), pending(&mut two)];
        let [(row, request)] = &requests(&seen)[..] else {
            panic!("one request for one of them: {seen:?}")
        };
        let node = if *row == 0 { &mut one } else { &mut two };
        let mut run = Run::of(request);
        if failure == "401" {
            run.start(node, 401, &[]);
            run.end(node);
            assert_eq!(answer(&mut client).0.status, 401);
        } else {
            run.error(node, failure);
            assert_eq!(answer(&mut client).0.status, 502);
        }
        expect_nothing(&mut one);
        expect_nothing(&mut two);
        assert_eq!(asks(&world), asked);
    }
    drop((one, two));
    world.rest();
}

/// Proves.
#[test]
fn r206_no_lease_is_issued_once_the_nodes_certificate_has_ended() {
    let world = World::with(&setup(4, &[MAIN]));
    let end = time::OffsetDateTime::now_utc() + time::Duration::seconds(4);
    sign(&world, "n1", &["spiffe://iop.test/node/n1"], |params| {
        params.not_after = end;
    });
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("m1", false));
    let request = node.tunnel();
    assert_eq!(open(&world, 1, &request), Ok(SECRET.as_bytes().to_vec()));
    let before = asks(&world);
    // The shard looks a few times a second; what is asked for by then waits for another node.
    while time::OffsetDateTime::now_utc() <= end + time::Duration::seconds(2) {
        thread::yield_now();
    }
    let waiting = world.asks(&chat("m1", false));
    world.wait_queued(1);
    expect_nothing(&mut node);
    assert_eq!(asks(&world), before);
    let mut run = Run::of(&request);
    run.start(&mut node, 200, &[]);
    run.end(&mut node);
    assert_eq!(answer(&mut client).0.status, 200);
    node.expect_closed();
    assert_eq!(asks(&world), before);
    drop((node, client, waiting));
    world.rest();
}

/// How bytes look in a log, a header, a document.
fn forms(bytes: &[u8]) -> Vec<Vec<u8>> {
    let hex = |upper: bool| -> Vec<u8> {
        let digits = bytes.iter().map(|byte| match upper {
            true => format!("{byte:02X}"),
            false => format!("{byte:02x}"),
        });
        digits.collect::<String>().into_bytes()
    };
    let listed: Vec<_> = bytes.iter().map(u8::to_string).collect();
    let escaped: String = bytes.iter().map(|byte| format!("%{byte:02X}")).collect();
    let mut forms = vec![
        bytes.to_vec(),
        hex(false),
        hex(true),
        listed.join(", ").into_bytes(),
        escaped.into_bytes(),
    ];
    // In base64 of something longer, at each of the three places.
    for skip in 0..3 {
        let whole = bytes[skip..].len() / 3 * 3;
        for alphabet in [b"+/", b"-_"] {
            forms.push(base64(&bytes[skip..skip + whole], *alphabet));
        }
    }
    forms
}

fn base64(bytes: &[u8], last: [u8; 2]) -> Vec<u8> {
    let letters: Vec<u8> = (b'A'..=b'Z')
        .chain(b'a'..=b'z')
        .chain(b'0'..=b'9')
        .chain(last)
        .collect();
    let group = |three: &[u8]| {
        let word = three
            .iter()
            .fold(0u32, |word, &byte| word << 8 | u32::from(byte));
        [18, 12, 6, 0].map(|shift| letters[(word >> shift & 63) as usize])
    };
    bytes.chunks_exact(3).flat_map(group).collect()
}

fn key_bytes(text: &str) -> Vec<u8> {
    let digits = text.split_whitespace().last().expect("a key file");
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex");
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// One provider call: what it was asked, answered with an echo in a header and an error status.
fn provide(listener: &TcpListener) -> String {
    use std::io::{Read as _, Write as _};
    let (mut stream, _) = listener.accept().expect("a call");
    let mut head = Vec::new();
    let mut byte = [0; 1];
    while !head.ends_with(b"\r\n\r\n") {
        assert_eq!(stream.read(&mut byte).expect("a head"), 1);
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text");
    let answer = format!(
        "HTTP/1.1 418 Echo\r\nx-echo: Key {SECRET}\r\nwww-authenticate: {SECRET}\r\n\
         x-kept: 1\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    );
    stream.write_all(answer.as_bytes()).expect("the node reads");
    head
}

type Seen = Vec<(&'static str, Vec<u8>)>;

/// A node whose every byte is kept: registration, configuration, a managed request.
fn through_a_tapped_node(world: &World, seen: &mut Seen) {
    let mut tapped = Node::connect(&world.edge, "n2");
    tapped.seen = Some(Vec::new());
    register_and_ready(&mut tapped, "n2");
    let mut client = world.asks(&chat("only2", false));
    let request = tapped.tunnel();
    assert_eq!(open(world, 2, &request), Ok(SECRET.as_bytes().to_vec()));
    let mut run = Run::of(&request);
    run.error(
        &mut tapped,
        "node rejected: the credential lease has expired",
    );
    seen.push(("an error", answer(&mut client).1));
    seen.push(("the wire", tapped.seen.take().expect("kept")));
}

/// A real node and a provider that says everything it was told.
fn through_a_real_node(world: &World, listener: &TcpListener, seen: &mut Seen) {
    let _agent = Agent::start(
        world,
        "credential_plane: on\ncredentials: {recipient_keys: [pki/n1.recipient.key], issuer_keys: \
         [pki/e.issuer.pub], clock_skew_ms: 100}\n",
    );
    world.wait("iop_edge_node_activations_total", 2);
    let told = thread::scope(|scope| {
        let provider = scope.spawn(|| provide(listener));
        let mut client = world.asks(&chat("only1", false));
        expect_error(&mut client, 403, "credential_missing", "edge");
        let mut client = world.asks(&chat("m1", false));
        let (head, body, _) = answer(&mut client);
        assert_eq!((head.status, head.header("x-kept")), (418, Some("1")));
        let echoes = (head.header("x-echo"), head.header("www-authenticate"));
        assert_eq!(echoes, (None, None));
        seen.push(("the answer", format!("{head:?}").into_bytes()));
        seen.push(("the body", body));
        provider.join().expect("a provider")
    });
    let header = format!("x-key: Key {SECRET}\r\n");
    assert!(told.contains(&header), "{told}");
}

/// What may be seen nowhere: the credential, what is in the store, every secret key.
fn materials(directory: &Path) -> Vec<(&'static str, Vec<u8>)> {
    let read = |name: &str| fs::read(directory.join(name)).expect("a file of the world");
    let key = |name: &str| key_bytes(&String::from_utf8(read(name)).expect("text"));
    vec![
        ("the credential", SECRET.as_bytes().to_vec()),
        ("the store", read("slots")[40..72].to_vec()),
        ("the store's key", key("pki/e.store.key")),
        ("the issuer's key", key("pki/e.issuer.key")),
        ("n1's key", key("pki/n1.recipient.key")),
        ("n2's key", key("pki/n2.recipient.key")),
    ]
}

/// Proves, [R-335], [R-336].
#[test]
fn r333_no_secret_of_the_plane_is_seen_anywhere_but_at_the_provider() {
    let port = free_port();
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
    let mut setup = setup(4, &[MAIN, slot("two", "only2", "other", SECRET)]);
    setup.catalog = catalog(4, port) + "log: {level: trace, access: all}\n";
    setup.environment = vec![("RUST_LOG", "trace")];
    setup.is_logged = true;
    let world = World::with(&setup);
    let directory = world.edge.directory.path().to_owned();
    let mut seen = Seen::new();
    through_a_tapped_node(&world, &mut seen);
    through_a_real_node(&world, &listener, &mut seen);
    for path in ["/metrics", "/status"] {
        let (_, text) = http_get(world.edge.admin, path).expect("admin answers");
        seen.push(("admin", text.into_bytes()));
    }
    let listed = iop()
        .args(["credential", "list", "--config"])
        .arg(directory.join("edge.yaml"))
        .output();
    seen.push(("the list", listed.expect("iop runs").stdout));
    world.edge.terminate();
    let mut edge = world.edge;
    assert!(edge.wait_exit().success());
    for name in ["edge.log", "edge.out", "node.log"] {
        let bytes = fs::read(directory.join(name)).expect("a log");
        assert!(bytes.len() > 100, "{name} says something");
        seen.push((name, bytes));
    }
    let (_, log) = seen.last().expect("the node's log");
    let dropped = b"a response header repeated its credential";
    assert!(log.windows(dropped.len()).any(|part| part == dropped));
    for (what, material) in materials(&directory) {
        for form in forms(&material) {
            for (place, bytes) in &seen {
                let found = bytes.windows(form.len()).any(|part| part == form);
                assert!(!found, "{what} is in {place}");
            }
        }
    }
}

/// Proves, [R-334].
#[test]
fn r321_what_is_observed_of_a_managed_stall_says_nothing_of_its_credential() {
    let mut setup = setup(4, &[MAIN]);
    setup.catalog += "log: {level: trace, access: all}\n";
    setup.environment = vec![("RUST_LOG", "trace")];
    setup.is_logged = true;
    let world = World::with(&setup);
    let directory = world.edge.directory.path().to_owned();
    let mut node = world.node("n1");
    let mut client = world.asks(&chat("m1", false));
    let request = node.tunnel();
    let lease = pair(&request).0.expose().to_vec();
    let evidence = stall(Unavailable, "a1", "t1", Some("1"));
    Run::of(&request).stall(&mut node, evidence);
    expect_error(&mut client, 504, "response_stalled", "provider");
    world.wait(
        "iop_edge_liveness_recovery_eligibility_total{eligibility=\"credential_bound\"}",
        1,
    );
    let mut seen = Seen::new();
    for path in ["/metrics", "/status"] {
        let (_, text) = http_get(world.edge.admin, path).expect("admin answers");
        seen.push((path, text.into_bytes()));
    }
    world.edge.terminate();
    let mut edge = world.edge;
    assert!(edge.wait_exit().success());
    for name in ["edge.log", "edge.out"] {
        seen.push((name, fs::read(directory.join(name)).expect("a log")));
    }
    let all: Vec<_> = seen.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
    let all = String::from_utf8_lossy(&all);
    for fired in [
        "edge_provider_health_observation",
        "edge_liveness_recovery_observation",
    ] {
        assert!(all.contains(fired), "{fired}");
    }
    let mut secrets = materials(&directory);
    secrets.push(("the lease", lease[lease.len() - 64..].to_vec()));
    for (what, secret) in secrets {
        for form in forms(&secret) {
            for (place, bytes) in &seen {
                let found = bytes.windows(form.len()).any(|part| part == form);
                assert!(!found, "{what} is in {place}");
            }
        }
    }
}
