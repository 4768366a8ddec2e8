//! One lease, and everything that must not open it.
#![expect(
    clippy::unwrap_used,
    reason = "a failure in a helper is the test's failure"
)]
use iop_lease::{
    Entropy, Expected, IssueError, IssuerKey, LeaseError, Recipient, RecipientKey, Terms, Window,
    issue, profile_component,
};
use iop_proto::catalog::ProviderKind;
use iop_proto::domain::{Adapter, CredentialBinding, Lease, Profile, ProfileOperation};
use iop_proto::limits::{LEASE_MS_MAX, SECRET_BYTES_MAX};
use iop_proto::map::{decode_lease, encode_lease};

const SECRET: &[u8] = b"sk-canary-0123456789";
const ISSUED: i64 = 1_900_000_000_000;
const EXPIRES: i64 = ISSUED + 60_000;
const SKEW: i64 = 5_000;

fn issuer() -> IssuerKey {
    IssuerKey::from_seed(&[3; 32])
}

fn recipient_key() -> RecipientKey {
    RecipientKey::from_bytes(&[5; 32])
}

fn recipient() -> Recipient {
    Recipient {
        keys: vec![recipient_key()],
        issuers: vec![issuer().public()],
    }
}

fn binding() -> CredentialBinding {
    CredentialBinding {
        principal: "team-a".to_owned(),
        slot: "main".to_owned(),
        route: "m1".to_owned(),
        profile: "openai#00".to_owned(),
        upstream_target: "t1".to_owned(),
        node_id: "n1".to_owned(),
        recipient: recipient_key().public().id().to_owned(),
        credential_revision: 4,
        route_revision: 3,
        projection_generation: 9,
    }
}

fn entropy() -> Entropy {
    Entropy {
        lease_id: [0xab; 16],
        ephemeral: [7; 32].into(),
    }
}

fn issued(binding: &CredentialBinding, issued: i64, expires: i64) -> Vec<u8> {
    let terms = Terms {
        issued_at_unix_ms: issued,
        expires_at_unix_ms: expires,
    };
    let to = recipient_key().public();
    issue(&issuer(), &to, binding, SECRET, terms, &entropy()).unwrap()
}

const EXPECTED: Expected<'static> = Expected {
    node_id: "n1",
    target: "t1",
    profile: Some("openai#00"),
};

const fn at(now_ms: i64) -> Window {
    Window {
        now_ms,
        started_ms: ISSUED - 60_000,
        skew_ms: SKEW,
    }
}

fn open(lease: &[u8], binding: &CredentialBinding) -> Result<Vec<u8>, LeaseError> {
    let node = recipient();
    let verified = node.verify(lease, binding, EXPECTED, at(ISSUED + 1))?;
    verified.open().map(|secret| secret.to_vec())
}

/// The same lease with one field changed, signed anew: an issuer's mistake, not a tamperer's.
fn resigned(change: impl FnOnce(&mut Lease)) -> Vec<u8> {
    let mut lease = decode_lease(&issued(&binding(), ISSUED, EXPIRES)).unwrap();
    change(&mut lease);
    let key = ring::signature::Ed25519KeyPair::from_seed_unchecked(&[3; 32]).unwrap();
    lease.signature = key.sign(&lease.signed()).as_ref().to_vec().into();
    encode_lease(&lease)
}

fn digest_of(binding: &CredentialBinding) -> Vec<u8> {
    let digest = ring::digest::digest(&ring::digest::SHA256, &binding.canonical());
    digest.as_ref().to_vec()
}

#[test]
fn a_lease_opens_for_what_it_was_issued_for() {
    let lease = issued(&binding(), ISSUED, EXPIRES);
    assert_eq!(open(&lease, &binding()).unwrap(), SECRET);
    assert!(!lease.windows(SECRET.len()).any(|part| part == SECRET));
}

/// Proves.
#[test]
fn r209_no_bit_of_a_lease_can_be_flipped() {
    let lease = issued(&binding(), ISSUED, EXPIRES);
    assert!(open(&lease, &binding()).is_ok());
    for bit in 0..8 * lease.len() {
        let mut flipped = lease.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(open(&flipped, &binding()).is_err(), "bit {bit}");
    }
    for length in 0..lease.len() {
        assert!(
            open(&lease[..length], &binding()).is_err(),
            "cut at {length}"
        );
    }
}

/// Proves.
#[test]
fn r210_only_the_recipients_key_opens_a_lease() {
    let lease = issued(&binding(), ISSUED, EXPIRES);
    assert_eq!(open(&lease, &binding()).unwrap(), SECRET);
    let other = RecipientKey::from_bytes(&[6; 32]);
    let mut renamed = binding();
    renamed.recipient = other.public().id().to_owned();
    // Sealed to the first key under the second one's name: even its issuer's word does not help.
    let misnamed = resigned(|lease| {
        lease.recipient = renamed.recipient.clone();
        lease.binding_digest = digest_of(&renamed).into();
    });
    let node = Recipient {
        keys: vec![other],
        issuers: vec![issuer().public()],
    };
    let refused = node.verify(&lease, &binding(), EXPECTED, at(ISSUED + 1));
    assert_eq!(refused.err(), Some(LeaseError::Recipient));
    let verified = node.verify(&misnamed, &renamed, EXPECTED, at(ISSUED + 1));
    let opened = verified.map_err(LeaseError::detail).unwrap().open();
    assert_eq!(opened.err(), Some(LeaseError::Unopenable));
}

/// A change to one component of a binding.
type Change = fn(&mut CredentialBinding);

const COMPONENTS: [(&str, Change); 10] = [
    ("principal", |b| b.principal.push('x')),
    ("slot", |b| b.slot.push('x')),
    ("route", |b| b.route.push('x')),
    ("profile", |b| b.profile.push('x')),
    ("upstream_target", |b| b.upstream_target.push('x')),
    ("node_id", |b| b.node_id.push('x')),
    ("recipient", |b| b.recipient.push('x')),
    ("credential_revision", |b| b.credential_revision += 1),
    ("route_revision", |b| b.route_revision -= 1),
    ("projection_generation", |b| b.projection_generation = 0),
];

#[test]
fn a_component_changed_on_either_side_opens_nothing() {
    let lease = issued(&binding(), ISSUED, EXPIRES);
    assert!(open(&lease, &binding()).is_ok());
    for (name, change) in COMPONENTS {
        let mut changed = binding();
        change(&mut changed);
        let beside = open(&lease, &changed).unwrap_err();
        let within = resigned(|lease| lease.binding_digest = digest_of(&changed).into());
        let within = open(&within, &binding()).unwrap_err();
        assert_eq!(within, LeaseError::Binding, "{name} in the lease");
        let expected = match name {
            "node_id" => LeaseError::Node,
            "recipient" => LeaseError::Recipient,
            _ => LeaseError::Binding,
        };
        assert_eq!(beside, expected, "{name} in the binding");
    }
}

#[test]
fn numbers_of_a_binding_are_compared_and_not_judged() {
    let mut zero = binding();
    zero.credential_revision = 0;
    zero.route_revision = 0;
    zero.projection_generation = 0;
    let lease = issued(&zero, ISSUED, EXPIRES);
    assert_eq!(open(&lease, &zero).unwrap(), SECRET);
    for (name, change) in COMPONENTS.into_iter().take(3) {
        let mut empty = binding();
        change(&mut empty);
        match name {
            "principal" => empty.principal.clear(),
            "slot" => empty.slot.clear(),
            _ => empty.route.clear(),
        }
        let lease = issued(&empty, ISSUED, EXPIRES);
        assert_eq!(open(&lease, &empty), Err(LeaseError::Incomplete), "{name}");
    }
}

#[test]
fn a_binding_is_for_one_request_on_one_configuration() {
    let lease = issued(&binding(), ISSUED, EXPIRES);
    let node = recipient();
    let judge = |expected| {
        let judged = node.verify(&lease, &binding(), expected, at(ISSUED + 1));
        judged.map(|_| ()).err()
    };
    assert_eq!(judge(EXPECTED), None);
    let cases = [
        (
            Expected {
                target: "t2",
                ..EXPECTED
            },
            LeaseError::Target,
        ),
        (
            Expected {
                node_id: "n2",
                ..EXPECTED
            },
            LeaseError::Node,
        ),
        (
            Expected {
                profile: Some("openai#01"),
                ..EXPECTED
            },
            LeaseError::Profile,
        ),
        (
            Expected {
                profile: None,
                ..EXPECTED
            },
            LeaseError::Profile,
        ),
    ];
    for (expected, error) in cases {
        assert_eq!(judge(expected), Some(error));
    }
}

type Mistake = (&'static str, fn(&mut Lease), LeaseError);

#[test]
fn an_issuers_mistakes_are_named() {
    let cases: [Mistake; 8] = [
        ("version", |l| l.version = 2, LeaseError::Version),
        ("issuer", |l| l.issuer_key_id.clear(), LeaseError::Issuer),
        ("id", |l| l.lease_id.push('0'), LeaseError::Malformed),
        (
            "upper",
            |l| l.lease_id = "AB".repeat(16),
            LeaseError::Malformed,
        ),
        (
            "digest",
            |l| l.binding_digest = vec![0; 31].into(),
            LeaseError::Malformed,
        ),
        (
            "enc",
            |l| l.encapsulated_key = vec![0; 33].into(),
            LeaseError::Malformed,
        ),
        (
            "empty",
            |l| l.ciphertext = vec![0; 16].into(),
            LeaseError::Malformed,
        ),
        (
            "long",
            |l| l.ciphertext = vec![0; SECRET_BYTES_MAX as usize + 17].into(),
            LeaseError::Malformed,
        ),
    ];
    for (name, change, expected) in cases {
        assert_eq!(open(&resigned(change), &binding()), Err(expected), "{name}");
    }
    let zero_point = resigned(|l| l.encapsulated_key = vec![0; 32].into());
    assert_eq!(open(&zero_point, &binding()), Err(LeaseError::Unopenable));
    let huge = vec![0; 1 << 20];
    assert_eq!(open(&huge, &binding()), Err(LeaseError::Malformed));
    let stranger = Recipient {
        keys: vec![recipient_key()],
        issuers: vec![IssuerKey::from_seed(&[4; 32]).public()],
    };
    let lease = issued(&binding(), ISSUED, EXPIRES);
    let judged = stranger.verify(&lease, &binding(), EXPECTED, at(ISSUED));
    assert_eq!(judged.err(), Some(LeaseError::Issuer));
}

#[test]
fn times_are_exact() {
    let node = recipient();
    let judge = |issued_at: i64, expires: i64, now: i64| {
        let lease = issued(&binding(), issued_at, expires);
        let judged = node.verify(&lease, &binding(), EXPECTED, at(now));
        judged.map(|_| ()).err()
    };
    let cap = i64::try_from(LEASE_MS_MAX).unwrap();
    let start = ISSUED - 60_000 + SKEW;
    for (issued_at, expires, now, expected) in [
        (ISSUED, EXPIRES, EXPIRES - 1, None),
        (ISSUED, EXPIRES, EXPIRES, Some(LeaseError::Expired)),
        (ISSUED, EXPIRES, EXPIRES + 1, Some(LeaseError::Expired)),
        (ISSUED, EXPIRES, ISSUED - SKEW, None),
        (ISSUED, EXPIRES, ISSUED - SKEW - 1, Some(LeaseError::Early)),
        (ISSUED, ISSUED + cap, ISSUED, None),
        (ISSUED, ISSUED + cap + 1, ISSUED, Some(LeaseError::Lifetime)),
        (ISSUED, ISSUED, ISSUED - 1, Some(LeaseError::Lifetime)),
        (i64::MIN, i64::MAX, ISSUED, Some(LeaseError::Lifetime)),
        (start, start + 60_000, start, None),
        (
            start - 1,
            start + 50_000,
            start,
            Some(LeaseError::BeforeStart),
        ),
    ] {
        let seen = judge(issued_at, expires, now);
        assert_eq!(seen, expected, "{issued_at} {expires} {now}");
    }
}

#[test]
fn what_cannot_be_sealed_is_not_issued() {
    let terms = Terms {
        issued_at_unix_ms: ISSUED,
        expires_at_unix_ms: EXPIRES,
    };
    let make = |secret: &[u8], binding: &CredentialBinding| {
        let to = recipient_key().public();
        issue(&issuer(), &to, binding, secret, terms, &entropy()).err()
    };
    let longest = vec![b'x'; SECRET_BYTES_MAX as usize];
    assert_eq!(make(&longest, &binding()), None);
    let longer = vec![b'x'; SECRET_BYTES_MAX as usize + 1];
    assert_eq!(make(&longer, &binding()), Some(IssueError::SecretSize));
    assert_eq!(make(b"", &binding()), Some(IssueError::SecretSize));
    let mut other = binding();
    other.recipient.push('0');
    assert_eq!(make(SECRET, &other), Some(IssueError::Binding));
}

#[test]
fn a_profile_pins_everything_that_decides_where_a_credential_goes() {
    let profile = Profile {
        id: "openai".to_owned(),
        operations: vec![ProfileOperation {
            name: "chat_completions".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
        }],
        auth_header: "authorization".to_owned(),
        auth_prefix: "Bearer ".to_owned(),
    };
    let mut adapter = Adapter::new(
        String::new(),
        ProviderKind::OpenAiCompat,
        1,
        "http://h".to_owned(),
    );
    let first = profile_component(&adapter, &profile);
    // SHA-256 of the form, made with another program.
    let pinned = "openai#dfd7d26668a52de2422e9dfdd09d3afe3c3058fca8bb3799c05d1e77ecde31aa";
    assert_eq!(first, pinned);
    adapter.capacity = 9;
    assert_eq!(profile_component(&adapter, &profile), first);
    let changes: [fn(&mut Adapter, &mut Profile); 8] = [
        |a, _| a.name = "other".to_owned(),
        |a, _| a.base_url.push('/'),
        |_, p| p.id.push('2'),
        |_, p| p.operations[0].name.push('2'),
        |_, p| p.operations[0].method.push('2'),
        |_, p| p.operations[0].path.push('2'),
        |_, p| p.auth_header.push('2'),
        |_, p| p.auth_prefix.push('2'),
    ];
    for change in changes {
        let (mut adapter, mut profile) = (adapter.clone(), profile.clone());
        change(&mut adapter, &mut profile);
        assert_ne!(profile_component(&adapter, &profile), first);
    }
}

fn bytes(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

/// The example of `docs/contract/implementing-an-agent.md`, made with another implementation: keys of
/// RFC 8032 §7.1 test 1 and RFC 9180 A.2.1.
#[test]
fn the_published_example_is_what_another_implementation_makes() {
    let seed = bytes("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
    let issuer = IssuerKey::from_seed(&seed.try_into().unwrap());
    let key = bytes("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb");
    let key = RecipientKey::from_bytes(&key.try_into().unwrap());
    let mut adapter = Adapter::new(
        "a1".to_owned(),
        ProviderKind::OpenAiCompat,
        4,
        "http://127.0.0.1:9".to_owned(),
    );
    let profile = Profile {
        id: "openai".to_owned(),
        operations: vec![ProfileOperation {
            name: "chat_completions".to_owned(),
            method: "POST".to_owned(),
            path: "/v1/chat/completions".to_owned(),
        }],
        auth_header: "authorization".to_owned(),
        auth_prefix: "Bearer ".to_owned(),
    };
    adapter.profile = Some(profile.clone());
    let binding = CredentialBinding {
        principal: "team-a".to_owned(),
        slot: "main".to_owned(),
        route: "m2".to_owned(),
        profile: profile_component(&adapter, &profile),
        upstream_target: "t2".to_owned(),
        node_id: "n2".to_owned(),
        recipient: key.public().id().to_owned(),
        credential_revision: 2,
        route_revision: 1,
        projection_generation: 2,
    };
    let ephemeral = bytes("909a9b35d3dc4713a5e72a4da274b55d3d3821a37e5d099e74a647db583a904b");
    let ephemeral: [u8; 32] = ephemeral.try_into().unwrap();
    let entropy = Entropy {
        lease_id: core::array::from_fn(|at| u8::try_from(at).unwrap()),
        ephemeral: ephemeral.into(),
    };
    let terms = Terms {
        issued_at_unix_ms: ISSUED,
        expires_at_unix_ms: EXPIRES,
    };
    let secret = b"sk-example-0123456789";
    let lease = issue(&issuer, &key.public(), &binding, secret, terms, &entropy).unwrap();
    let published = "0801122030303031303230333034303530363037303830393061306230633064\
        306530661a203231666533316466613135346132363136323662663835343034\
        3666643232372220396530373437396338643832373961343163313638303362\
        65623933643865382880f0cc86a63730e0c4d086a6373a200a02657866a3efce\
        4a91b560a9b8559c81effef6f711ef277a99b139cf2a287042201afa08d3dec0\
        47a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a4a259c387b8c\
        1f70d20b25fac55d4cdcc9d1f23636535449bddc32bae67ef393f69b7ee77d08\
        4b52400b73d9b4df94318c3235b43a158f20da2abeb9ebe5b7e2431510a3036e\
        17cfe0ebcecb306b9b82eaba3ed93b7fb6905df76d400915df75a7bb38128450\
        4aa408";
    assert_eq!(lease, bytes(published));
}
