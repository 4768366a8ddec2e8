//! Managed tunnels: what a lease opens, everything that opens nothing, and that each opens once.
use core::time::Duration;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use iop_agent::config::CredentialFiles;
use iop_lease::{
    Entropy, IssuerKey, KeyKind, RecipientKey, Terms, issue, profile_component, secret_text,
};
use iop_proto::domain::{
    Adapter, Credential, CredentialBinding, FailureCode, Header, LeaseEnvelope,
    NodeConfig as Payload, Profile, ProfileOperation, StallTimeout, TunnelRequest,
};
use tokio::time::Instant;

use crate::support::edge::{Answer, Conn, Edge, adapter, payload, tunnel};
use crate::support::provider::Provider;
use crate::support::{Agent, plant, within};

const SECRET: &str = "sk-canary-0123456789";
/// What the agents here allow an issuer's clock; a first ready takes twice as long.
const SKEW: Duration = Duration::from_millis(100);

fn issuer() -> IssuerKey {
    IssuerKey::from_seed(&[3; 32])
}

fn recipient() -> RecipientKey {
    RecipientKey::from_bytes(&[5; 32])
}

fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

/// Adapter `a`, whose credential goes to `x-key` behind `Key `.
fn managed_adapter(port: u16, capacity: i32) -> Adapter {
    let mut adapter = adapter(port, capacity);
    adapter.profile = Some(Profile {
        id: "openai".to_owned(),
        operations: vec![ProfileOperation {
            name: "chat_completions".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
        }],
        auth_header: "x-key".to_owned(),
        auth_prefix: "Key ".to_owned(),
    });
    adapter
}

/// A managed agent, its Edge and its provider.
struct World {
    provider: Provider,
    conn: Conn,
    edge: Edge,
    agent: Agent,
    capacity: i32,
    issued: u8,
}

/// Written once: another test's agent may be reading them.
fn files() -> CredentialFiles {
    static FILES: OnceLock<CredentialFiles> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let directory = std::env::temp_dir().join(format!("iop-agent-keys-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let secret = secret_text(KeyKind::RecipientSecret, &[5; 32]);
        CredentialFiles {
            recipient_keys: vec![plant(&directory, "recipient.key", &secret)],
            issuer_keys: vec![plant(&directory, "issuer.pub", &issuer().public().text())],
            clock_skew: SKEW,
        }
    });
    files.clone()
}

fn agent(edge: &Edge) -> Agent {
    let mut config = edge.config();
    config.credentials = Some(files());
    Agent::start(config)
}

impl World {
    async fn new(capacity: i32) -> Self {
        let provider = Provider::start().await;
        let edge = Edge::start().await;
        let agent = agent(&edge);
        let conn = edge.ready(Self::payload(&provider, capacity)).await;
        Self {
            provider,
            conn,
            edge,
            agent,
            capacity,
            issued: 0,
        }
    }

    fn payload(provider: &Provider, capacity: i32) -> Payload {
        payload(vec![managed_adapter(provider.port(), capacity)])
    }

    fn binding(&self) -> CredentialBinding {
        let adapter = managed_adapter(self.provider.port(), self.capacity);
        let profile = adapter.profile.as_ref().unwrap();
        CredentialBinding {
            principal: "team".to_owned(),
            slot: "main".to_owned(),
            route: "m1".to_owned(),
            profile: profile_component(&adapter, profile),
            upstream_target: "t".to_owned(),
            node_id: "n1".to_owned(),
            recipient: recipient().public().id().to_owned(),
            credential_revision: 4,
            route_revision: 3,
            projection_generation: 9,
        }
    }

    /// A lease nobody has seen, valid from now on for a minute.
    fn lease(&mut self, binding: &CredentialBinding) -> LeaseEnvelope {
        let now = unix_ms();
        self.lease_at(binding, now, now + 60_000)
    }

    fn lease_at(&mut self, binding: &CredentialBinding, from: i64, to: i64) -> LeaseEnvelope {
        self.issued += 1;
        let terms = Terms {
            issued_at_unix_ms: from,
            expires_at_unix_ms: to,
        };
        let entropy = Entropy {
            lease_id: [self.issued; 16],
            ephemeral: [self.issued; 32].into(),
        };
        let sealed_to = recipient().public();
        let own = CredentialBinding {
            recipient: sealed_to.id().to_owned(),
            ..binding.clone()
        };
        let secret = SECRET.as_bytes();
        let lease = issue(&issuer(), &sealed_to, &own, secret, terms, &entropy).unwrap();
        LeaseEnvelope::new(lease.into()).unwrap()
    }

    /// A request with a fresh, good pair.
    fn request(&mut self, run_id: &str) -> TunnelRequest {
        let binding = self.binding();
        let lease = self.lease(&binding);
        managed(run_id, lease, binding)
    }

    /// The connection ends, and the same agent comes back.
    async fn reconnected(self) -> Self {
        let payload = Self::payload(&self.provider, self.capacity);
        drop(self.conn);
        let conn = self.edge.ready(payload).await;
        Self { conn, ..self }
    }

    /// A managed tunnel works: the positive beside every negative.
    async fn serves(&mut self, run_id: &str) {
        let request = self.request(run_id);
        self.conn.open(request).await;
        let mut call = self.provider.request().await;
        assert_eq!(call.header("x-key"), Some("Key sk-canary-0123456789"));
        call.answer("200 OK", b"fine").await;
        assert_eq!(self.conn.answer(run_id).await.body, b"fine");
    }

    /// The tunnel gets one ERROR with this text, and no provider is called.
    async fn refuses(&mut self, what: &str, request: TunnelRequest, detail: &str) {
        let run_id = request.run_id.clone();
        self.conn.open(request).await;
        let answer = self.conn.answer(&run_id).await;
        assert_eq!(answer.frames, 1, "{what}");
        assert_eq!(answer.error(), format!("node rejected: {detail}"), "{what}");
        assert!(self.provider.is_idle(), "{what}");
    }
}

fn managed(run_id: &str, lease: LeaseEnvelope, binding: CredentialBinding) -> TunnelRequest {
    TunnelRequest {
        operation: "chat_completions".to_owned(),
        credential: Credential::Managed { lease, binding },
        ..tunnel(run_id, b"{}")
    }
}

/// Proves [R-219].
#[tokio::test]
async fn r219_the_declared_header_carries_the_credential_and_nothing_else_does() {
    let mut world = World::new(4).await;
    let mut request = world.request("r");
    let header = |name: &str, value: &'static str| Header {
        name: name.to_owned(),
        value: value.into(),
    };
    request.headers = vec![
        header("X-Key", "the caller's own"),
        header("authorization", "Bearer the-caller"),
        header("x-a", "1"),
    ];
    world.conn.open(request).await;
    let mut call = world.provider.request().await;
    let named = call.head.to_ascii_lowercase().matches("x-key:").count();
    assert_eq!(named, 1, "{}", call.head);
    assert_eq!(call.header("x-key"), Some("Key sk-canary-0123456789"));
    assert_eq!(call.header("authorization"), None);
    assert_eq!(call.header("x-a"), Some("1"));
    assert_eq!(call.head.matches("canary").count(), 1);
    // Whoever is named in a redirect gets nothing: it is not followed.
    let elsewhere = Provider::start().await;
    let place = format!("http://127.0.0.1:{}/", elsewhere.port());
    let head = format!("HTTP/1.1 307 Elsewhere\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n");
    call.write(head).await;
    let answer = world.conn.answer("r").await;
    assert_eq!(answer.status, Some(307));
    drop(call); // its connection is not used again
    assert!(elsewhere.is_idle());
    world.serves("after").await;
}

/// Proves [R-329].
#[tokio::test]
async fn r329_the_stall_terminal_of_a_managed_tunnel_says_nothing_of_its_credential() {
    let mut world = World::new(1).await;
    let request = TunnelRequest {
        stall_timeout: StallTimeout::from_wire(200),
        ..world.request("r")
    };
    let Credential::Managed { lease, binding } = request.credential.clone() else {
        panic!("a pair")
    };
    world.conn.open(request).await;
    let call = world.provider.request().await;
    assert!(call.head.contains(SECRET), "the credential is in use");
    let mut probe = world.provider.request().await;
    assert!(!probe.head.contains(SECRET));
    let refusal = "401 Unauthorized\r\nconnection: close";
    probe.answer(refusal, SECRET.as_bytes()).await;
    let terminal = world.conn.frame().await;
    let failure = terminal.failure.expect("a stall has evidence");
    assert_eq!(failure.code, FailureCode::ResponseStalled);
    let said = &world.conn.payload;
    let leased = lease.expose();
    let secrets = [
        SECRET.as_bytes(),
        b"x-key",
        b"Key ",
        binding.principal.as_bytes(),
        binding.recipient.as_bytes(),
        &leased[..16],
        &leased[leased.len() - 64..],
    ];
    for secret in secrets {
        let found = said.windows(secret.len()).any(|part| part == secret);
        assert!(!found, "{}", String::from_utf8_lossy(secret));
    }
    drop(call);
    world.serves("after").await;
}

/// A change to one component of a binding, and what is said to it where the binding alone has it.
type Change = (&'static str, fn(&mut CredentialBinding), &'static str);

const OTHER: &str = "the credential lease is for another binding";
const COMPONENTS: [Change; 10] = [
    ("principal", |b| b.principal.push('x'), OTHER),
    ("slot", |b| b.slot.push('x'), OTHER),
    ("route", |b| b.route.push('x'), OTHER),
    ("profile", |b| b.profile.push('x'), OTHER),
    ("upstream_target", |b| b.upstream_target.push('x'), OTHER),
    (
        "node_id",
        |b| b.node_id.push('x'),
        "the credential lease is for another node",
    ),
    (
        "recipient",
        |b| b.recipient.push('x'),
        "the credential lease is for another recipient key",
    ),
    ("credential_revision", |b| b.credential_revision += 1, OTHER),
    ("route_revision", |b| b.route_revision -= 1, OTHER),
    (
        "projection_generation",
        |b| b.projection_generation = 0,
        OTHER,
    ),
];

/// Proves [R-215], [R-216], [R-226], [R-228], [R-230], [R-339], [R-340], [R-341], [R-342].
#[tokio::test]
async fn r216_a_component_that_differs_anywhere_opens_nothing() {
    let mut world = World::new(4).await;
    for (name, change, detail) in COMPONENTS {
        let good = world.binding();
        let mut changed = good.clone();
        change(&mut changed);
        let lease = world.lease(&good);
        let beside = managed(&format!("{name}-1"), lease, changed.clone());
        world.refuses(name, beside, detail).await;
        // A recipient that differs in the lease is a lease for another key; the issuer makes none.
        if name != "recipient" {
            let lease = world.lease(&changed);
            let within = managed(&format!("{name}-2"), lease, good);
            world.refuses(name, within, OTHER).await;
        }
    }
    // Lease and binding agree with each other, and not with the request or the configuration.
    let agreed: [Change; 4] = [
        (
            "node",
            |b| b.node_id = "n2".to_owned(),
            "the credential lease is for another node",
        ),
        (
            "target",
            |b| b.upstream_target = "t2".to_owned(),
            "the credential lease is for another target",
        ),
        (
            "profile",
            |b| b.profile = b.profile.replace('#', "#0"),
            "the credential lease is for another profile",
        ),
        (
            "empty",
            |b| b.principal.clear(),
            "the credential binding is incomplete",
        ),
    ];
    for (name, change, detail) in agreed {
        let mut binding = world.binding();
        change(&mut binding);
        let lease = world.lease(&binding);
        let request = managed(&format!("agreed-{name}"), lease, binding);
        world.refuses(name, request, detail).await;
    }
    let mut zero = world.binding();
    (zero.credential_revision, zero.route_revision) = (0, 0);
    zero.projection_generation = 0;
    let lease = world.lease(&zero);
    world.conn.open(managed("zero", lease, zero)).await;
    world.provider.request().await.answer("200 OK", b"0").await;
    assert_eq!(world.conn.answer("zero").await.body, b"0");
}

/// Proves [R-214], [R-223].
#[tokio::test]
async fn r214_a_lease_that_is_forged_torn_or_unknown_opens_nothing() {
    let mut world = World::new(4).await;
    let binding = world.binding();
    let good = world.lease(&binding).expose().to_vec();
    let torn = |bytes: &[u8]| LeaseEnvelope::new(bytes.to_vec().into()).unwrap();
    let malformed = "the credential lease is malformed";
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let mut version = good.clone();
    assert_eq!(version[..2], [8, 1], "version stands first");
    version[1] = 2;
    let strange = {
        let (to, secret) = (recipient().public(), SECRET.as_bytes());
        let terms = Terms {
            issued_at_unix_ms: unix_ms(),
            expires_at_unix_ms: unix_ms() + 60_000,
        };
        let entropy = Entropy {
            lease_id: [99; 16],
            ephemeral: [99; 32].into(),
        };
        let stranger = IssuerKey::from_seed(&[4; 32]);
        issue(&stranger, &to, &binding, secret, terms, &entropy).unwrap()
    };
    let cases = [
        ("half", torn(&good[..good.len() / 2]), malformed),
        ("garbage", torn(b"\xff\xff\xff\xff"), malformed),
        ("text", torn(b"a lease"), malformed),
        (
            "signature",
            torn(&flipped),
            "the credential lease's signature is wrong",
        ),
        (
            "version",
            torn(&version),
            "the credential lease is of an unknown version",
        ),
        (
            "issuer",
            torn(&strange),
            "the credential lease is of an unknown issuer key",
        ),
    ];
    for (what, lease, detail) in cases {
        let request = managed(what, lease, binding.clone());
        world.refuses(what, request, detail).await;
    }
    world.serves("after").await;
}

/// Proves [R-221], [R-222].
#[tokio::test]
async fn r222_a_managed_node_takes_no_tunnel_without_the_whole_pair() {
    let mut world = World::new(4).await;
    let (absent, half) = (
        "this node takes no tunnel without a credential lease",
        "credential lease and binding come as a pair",
    );
    let binding = world.binding();
    let lease = world.lease(&binding);
    let cases = [
        ("neither", Credential::None, absent),
        ("lease", Credential::LeaseAlone(lease), half),
        ("binding", Credential::BindingAlone(binding), half),
    ];
    for (what, credential, detail) in cases {
        let request = TunnelRequest {
            credential,
            ..tunnel(what, b"{}")
        };
        world.refuses(what, request, detail).await;
    }
    world.serves("after").await;
}

/// Proves [R-217], [R-224], [R-211].
#[tokio::test]
async fn r217_a_lease_holds_from_its_issue_to_its_expiry_and_no_longer_than_allowed() {
    let mut world = World::new(1).await;
    let binding = world.binding();
    let now = unix_ms();
    let early = "the credential lease is not valid yet";
    let old = "the credential lease is older than this node";
    let expired = "the credential lease has expired";
    let lifetime = "the credential lease's lifetime is not allowed";
    for (what, from, to, detail) in [
        ("expired", now - 20, now - 10, expired),
        ("early", now + 10_000, now + 20_000, early),
        ("old", now - 60_000, now + 60_000, old),
        ("long", now, now + 300_001, lifetime),
        ("none", now, now, lifetime),
    ] {
        let lease = world.lease_at(&binding, from, to);
        let request = managed(what, lease, binding.clone());
        world.refuses(what, request, detail).await;
    }
    // The one slot was given back each time, and the connection stayed.
    world.serves("after").await;
}

/// Proves [R-218], [R-225], [S-43].
#[tokio::test]
async fn s43_a_lease_opens_once_in_turn_at_once_and_after_a_reconnect() {
    let mut world = World::new(4).await;
    let used = "the credential lease was used before";
    let Credential::Managed { lease, binding } = world.request("first").credential else {
        panic!("managed")
    };
    let again = |run_id: &str| managed(run_id, lease.clone(), binding.clone());
    for (one, two) in [("first", "second"), ("third", "fourth")] {
        world.conn.open(again(one)).await;
        world.conn.open(again(two)).await;
        let mut refused = 0;
        if one == "first" {
            world
                .provider
                .request()
                .await
                .answer("200 OK", b"once")
                .await;
        }
        let (mut answers, mut ended) = ([one, two].map(|_| Answer::default()), 0);
        while ended < 2 {
            let frame = world.conn.frame().await;
            let answer = &mut answers[usize::from(frame.run_id == two)];
            answer.take(frame);
            ended += usize::from(answer.terminal.is_some());
        }
        for answer in &answers {
            if answer.is_complete() {
                assert_eq!(answer.body, b"once");
            } else {
                assert_eq!(answer.error(), format!("node rejected: {used}"));
                refused += 1;
            }
        }
        assert_eq!(refused, if one == "first" { 1 } else { 2 });
    }
    let mut world = world.reconnected().await;
    world
        .refuses("after a reconnect", again("fifth"), used)
        .await;
    world.serves("after").await;
}

/// Proves [R-212], [R-213], [R-224], [S-44].
#[tokio::test]
async fn s44_a_lease_that_expires_while_it_waits_for_capacity_is_not_opened() {
    let mut world = World::new(1).await;
    let request = world.request("holds");
    world.conn.open(request).await;
    let mut holds = world.provider.request().await;
    let binding = world.binding();
    let now = unix_ms();
    let short = world.lease_at(&binding, now, now + 200);
    world.conn.open(managed("waits", short, binding)).await;
    let ends = async {
        while unix_ms() <= now + 200 {
            tokio::task::yield_now().await;
        }
    };
    within("the lease's end", ends).await;
    assert!(world.provider.is_idle());
    holds.answer("200 OK", b"done").await;
    drop(holds); // its connection is not used again
    assert_eq!(world.conn.answer("holds").await.body, b"done");
    let answer = world.conn.answer("waits").await;
    let expired = "node rejected: the credential lease has expired";
    assert_eq!((answer.frames, answer.error()), (1, expired));
    assert!(world.provider.is_idle());
    world.serves("after").await;
}

/// Proves [R-337].
#[tokio::test]
async fn r337_a_request_that_ends_while_it_waits_leaves_its_lease_unused() {
    let mut world = World::new(1).await;
    let request = world.request("holds");
    world.conn.open(request).await;
    let mut holds = world.provider.request().await;
    let waiting = world.request("waits");
    world.conn.open(waiting.clone()).await;
    world.conn.cancel("waits").await;
    let answer = world.conn.answer("waits").await;
    assert_eq!((answer.frames, answer.error()), (1, "cancelled"));
    assert!(world.provider.is_idle());
    holds.answer("200 OK", b"done").await;
    drop(holds); // its connection is not used again
    assert_eq!(world.conn.answer("holds").await.body, b"done");
    // The same lease opens now: nothing had used it.
    let again = TunnelRequest {
        run_id: "again".to_owned(),
        ..waiting
    };
    world.conn.open(again).await;
    world
        .provider
        .request()
        .await
        .answer("200 OK", b"now")
        .await;
    assert_eq!(world.conn.answer("again").await.body, b"now");
}

/// Proves [S-57].
#[tokio::test]
async fn s57_a_managed_node_is_ready_only_once_no_lease_of_its_past_is_valid() {
    let began = Instant::now();
    let mut world = World::new(4).await;
    assert!(began.elapsed() >= 2 * SKEW, "{:?}", began.elapsed());
    let request = world.request("before");
    world.conn.open(request.clone()).await;
    world
        .provider
        .request()
        .await
        .answer("200 OK", b"one")
        .await;
    assert_eq!(world.conn.answer("before").await.body, b"one");
    // Another process of the same node knows nothing of it.
    world.agent = agent(&world.edge);
    let payload = World::payload(&world.provider, 4);
    world.conn = world.edge.ready(payload).await;
    let old = "the credential lease is older than this node";
    let replayed = TunnelRequest {
        run_id: "replayed".to_owned(),
        ..request
    };
    world.refuses("after a restart", replayed, old).await;
    world.serves("after").await;
}

/// Proves [R-231].
#[tokio::test]
async fn r231_an_unmanaged_node_refuses_a_pair_and_serves_without_one() {
    let mut world = World::new(4).await;
    let provider = Provider::start().await;
    let edge = Edge::start().await;
    let agent = Agent::start(edge.config());
    let conn = edge.ready(World::payload(&provider, 4)).await;
    let mut unmanaged = World {
        provider,
        conn,
        edge,
        agent,
        capacity: 4,
        issued: 0,
    };
    let request = unmanaged.request("pair");
    let detail = "this node takes no credential leases";
    unmanaged.refuses("a pair", request, detail).await;
    unmanaged.conn.open(tunnel("legacy", b"{}")).await;
    let mut call = unmanaged.provider.request().await;
    assert_eq!(call.header("x-key"), None);
    call.answer("200 OK", b"fine").await;
    assert_eq!(unmanaged.conn.answer("legacy").await.body, b"fine");
    world.serves("managed").await;
}
