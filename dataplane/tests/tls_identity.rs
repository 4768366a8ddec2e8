//! Workload identities and the files they come from: which certificates pass, what is said of the rest.
//!
//! Lives on: test threads. Bound: one certificate per case.
#![expect(clippy::unwrap_used, reason = "a helper's panic is its test's failure")]
mod tls_support;

use std::path::PathBuf;

use iop_dataplane::config::{CertificateFiles, PkiFiles};
use iop_dataplane::tls::handshake::{PkiProblem, client_server_config, node_server_config};
use iop_dataplane::tls::identity::{IdentityError, Role, identify};
use iop_dataplane::tls::{HandshakeError, PkiError};
use iop_proto::reason::Reason;
use rcgen::{BasicConstraints, ExtendedKeyUsagePurpose as Purpose, IsCa, KeyUsagePurpose as Usage};
use tls_support::*;

fn node(change: impl FnOnce(&mut Leaf)) -> Leaf {
    let mut leaf = Leaf::node(NODE_URI);
    change(&mut leaf);
    leaf
}

/// Every rule of a workload certificate, last legal value beside first illegal one. Proves [D-61].
#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn d61_a_certificate_is_an_identity_only_by_every_rule() {
    use IdentityError as E;
    let ca = Ca::new();
    let named = |uri: &str| Leaf::node(uri);
    let cases: Vec<(&str, Leaf, Result<&str, E>)> = vec![
        ("plain", node(|_| {}), Ok("n1")),
        (
            "a DNS name beside the URI",
            node(|leaf| leaf.dns = vec!["n1.test"]),
            Ok("n1"),
        ),
        (
            "no extendedKeyUsage",
            node(|leaf| leaf.purposes.clear()),
            Ok("n1"),
        ),
        (
            "both purposes",
            node(|leaf| leaf.purposes = vec![Purpose::ServerAuth, Purpose::ClientAuth]),
            Ok("n1"),
        ),
        (
            "one more key usage",
            node(|leaf| leaf.usages.push(Usage::KeyAgreement)),
            Ok("n1"),
        ),
        (
            "no basicConstraints",
            node(|leaf| leaf.ca = IsCa::NoCa),
            Ok("n1"),
        ),
        (
            "every character",
            named("spiffe://test.iop/node/aZ09.-_"),
            Ok("aZ09.-_"),
        ),
        (
            "an authority",
            node(|leaf| leaf.ca = IsCa::Ca(BasicConstraints::Unconstrained)),
            Err(E::Authority),
        ),
        (
            "signs certificates",
            node(|leaf| leaf.usages.push(Usage::KeyCertSign)),
            Err(E::Authority),
        ),
        (
            "signs revocations",
            node(|leaf| leaf.usages.push(Usage::CrlSign)),
            Err(E::Authority),
        ),
        (
            "no keyUsage",
            node(|leaf| leaf.usages.clear()),
            Err(E::NoDigitalSignature),
        ),
        (
            "keyUsage of another kind",
            node(|leaf| leaf.usages = vec![Usage::KeyAgreement]),
            Err(E::NoDigitalSignature),
        ),
        (
            "a server's purpose",
            node(|leaf| leaf.purposes = vec![Purpose::ServerAuth]),
            Err(E::WrongPurpose),
        ),
        ("no names", node(|leaf| leaf.uris.clear()), Err(E::NoUri)),
        (
            "a DNS name alone",
            node(|leaf| {
                leaf.uris.clear();
                leaf.dns = vec!["n1.test"];
            }),
            Err(E::NoUri),
        ),
        (
            "the same URI twice",
            node(|leaf| leaf.uris.push(NODE_URI.into())),
            Err(E::ManyUris { uris: 2 }),
        ),
        (
            "another URI beside it",
            node(|leaf| leaf.uris.push("https://test.iop/".into())),
            Err(E::ManyUris { uris: 2 }),
        ),
        (
            "another scheme",
            named("https://test.iop/node/n1"),
            Err(E::NotSpiffe),
        ),
        (
            "an upper-case scheme",
            named("SPIFFE://test.iop/node/n1"),
            Err(E::NotSpiffe),
        ),
        ("no path", named("spiffe://test.iop"), Err(E::NotSpiffe)),
        (
            "no name",
            named("spiffe://test.iop/node"),
            Err(E::NotSpiffe),
        ),
        (
            "an empty name",
            named("spiffe://test.iop/node/"),
            Err(E::NotSpiffe),
        ),
        (
            "a third segment",
            named("spiffe://test.iop/node/n1/x"),
            Err(E::NotSpiffe),
        ),
        (
            "a relative name",
            named("spiffe://test.iop/node/.."),
            Err(E::NotSpiffe),
        ),
        (
            "an escape",
            named("spiffe://test.iop/node/n%31"),
            Err(E::NotSpiffe),
        ),
        (
            "a query",
            named("spiffe://test.iop/node/n1?x"),
            Err(E::NotSpiffe),
        ),
        (
            "a fragment",
            named("spiffe://test.iop/node/n1#x"),
            Err(E::NotSpiffe),
        ),
        (
            "a port",
            named("spiffe://test.iop:1/node/n1"),
            Err(E::NotSpiffe),
        ),
        (
            "a user",
            named("spiffe://me@test.iop/node/n1"),
            Err(E::NotSpiffe),
        ),
        (
            "no trust domain",
            named("spiffe:///node/n1"),
            Err(E::NotSpiffe),
        ),
        (
            "an upper-case domain",
            named("spiffe://TEST.iop/node/n1"),
            Err(E::NotSpiffe),
        ),
        (
            "another domain",
            named("spiffe://test.iop.evil/node/n1"),
            Err(E::WrongTrustDomain),
        ),
        (
            "a domain cut short",
            named("spiffe://test/node/n1"),
            Err(E::WrongTrustDomain),
        ),
        (
            "another role",
            named("spiffe://test.iop/edge/n1"),
            Err(E::WrongRole),
        ),
        (
            "an unknown role",
            named("spiffe://test.iop/admin/n1"),
            Err(E::WrongRole),
        ),
        (
            "another case of the role",
            named("spiffe://test.iop/Node/n1"),
            Err(E::WrongRole),
        ),
    ];
    for (name, leaf, expected) in cases {
        let found = identify(&ca.sign(&leaf).der(), DOMAIN, Role::Node);
        let found = found.as_ref().map(|identity| identity.name.as_str());
        assert_eq!(found, expected.as_ref().copied(), "{name}");
    }
}

#[test]
fn an_identity_says_when_it_ends_and_longer_ids_or_other_bytes_are_none() {
    let ca = Ca::new();
    let der = ca.sign(&Leaf::node(NODE_URI)).der();
    let identity = identify(&der, DOMAIN, Role::Node).unwrap();
    assert_eq!(identity.not_after_unix, 3_471_292_800); // 2080-01-01T00:00:00Z
    let edge = ca.sign(&Leaf::edge()).der();
    assert_eq!(identify(&edge, DOMAIN, Role::Edge).unwrap().name, EDGE_NAME);
    assert_eq!(
        identify(&edge, DOMAIN, Role::Node),
        Err(IdentityError::WrongPurpose)
    );
    for (bytes, fits) in [(2_048, true), (2_049, false)] {
        let prefix = format!("spiffe://{DOMAIN}/node/");
        let uri = format!("{prefix}{}", "n".repeat(bytes - prefix.len()));
        let der = ca.sign(&Leaf::node(&uri)).der();
        assert_eq!(
            identify(&der, DOMAIN, Role::Node).is_ok(),
            fits,
            "{bytes} bytes"
        );
    }
    for cut in 0..der.len() {
        let cut = identify(&der[..cut], DOMAIN, Role::Node);
        assert_eq!(cut, Err(IdentityError::Unparseable));
    }
    let longer = [&der[..], b"\0"].concat();
    assert_eq!(
        identify(&longer, DOMAIN, Role::Node),
        Err(IdentityError::Unparseable)
    );
}

/// Files for one Edge, in which one thing is then spoiled.
struct Setup {
    files: Files,
    pki: PkiFiles,
}

impl Setup {
    fn new(ca: &Ca) -> Self {
        let files = Files::new();
        let pki = files.pki(ca, &ca.sign(&Leaf::edge()));
        Self { files, pki }
    }

    fn load(&self) -> Result<(), PkiError> {
        node_server_config(&self.pki, DOMAIN, EDGE_NAME, now_unix()).map(drop)
    }

    fn replace(&self, file: &PathBuf, text: &str) {
        assert!(file.starts_with(&self.files.dir));
        std::fs::write(file, text).unwrap();
    }
}

/// One spoiled file: what it is called, how it is spoiled, which file is blamed, for what.
type Spoil = fn(&Setup, &Ca);
type Blamed = fn(&Setup) -> &PathBuf;

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_bad_file_is_named_with_what_is_wrong_about_it() {
    let ca = Ca::new();
    let ca_file: Blamed = |setup| &setup.pki.ca;
    let cert: Blamed = |setup| &setup.pki.cert;
    let key: Blamed = |setup| &setup.pki.key;
    let cases: Vec<(&str, Spoil, Blamed, &str)> = vec![
        (
            "no bundle",
            |s, _| std::fs::remove_file(&s.pki.ca).unwrap(),
            ca_file,
            "cannot be read",
        ),
        (
            "no certificate",
            |s, _| std::fs::remove_file(&s.pki.cert).unwrap(),
            cert,
            "cannot be read",
        ),
        (
            "no key",
            |s, _| std::fs::remove_file(&s.pki.key).unwrap(),
            key,
            "cannot be read",
        ),
        (
            "empty bundle",
            |s, _| s.replace(&s.pki.ca, ""),
            ca_file,
            "holds no certificate",
        ),
        (
            "text",
            |s, _| s.replace(&s.pki.cert, "hello"),
            cert,
            "holds no certificate",
        ),
        (
            "no key inside",
            |s, _| s.replace(&s.pki.key, "hello"),
            key,
            "holds no private key",
        ),
        (
            "broken base64",
            |s, _| {
                let text = "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n";
                s.replace(&s.pki.cert, text);
            },
            cert,
            "not valid PEM",
        ),
        (
            "broken DER",
            |s, _| {
                let text = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
                s.replace(&s.pki.ca, text);
            },
            ca_file,
            "not valid PEM",
        ),
        (
            "a key that is none",
            |s, _| {
                let text = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
                s.replace(&s.pki.key, text);
            },
            key,
            "not supported",
        ),
        (
            "another key",
            |s, ca| s.replace(&s.pki.key, &ca.sign(&Leaf::edge()).key),
            key,
            "does not belong to",
        ),
        (
            "expired",
            |s, ca| {
                drop(s.files.pki(
                    ca,
                    &ca.sign(&Leaf {
                        years: (2020, 2021),
                        ..Leaf::edge()
                    }),
                ))
            },
            cert,
            "expired at",
        ),
        (
            "not yet valid",
            |s, ca| {
                drop(s.files.pki(
                    ca,
                    &ca.sign(&Leaf {
                        years: (2079, 2080),
                        ..Leaf::edge()
                    }),
                ))
            },
            cert,
            "not valid before",
        ),
        (
            "every root expired",
            |s, _| s.replace(&s.pki.ca, &Ca::valid((2020, 2021)).pem),
            ca_file,
            "expired at",
        ),
        (
            "a node's certificate",
            |s, ca| drop(s.files.pki(ca, &ca.sign(&Leaf::node(NODE_URI)))),
            cert,
            "not an Edge's workload identity",
        ),
        (
            "another Edge's certificate",
            |s, ca| {
                let uris = vec![format!("spiffe://{DOMAIN}/edge/other")];
                drop(s.files.pki(
                    ca,
                    &ca.sign(&Leaf {
                        uris,
                        ..Leaf::edge()
                    }),
                ));
            },
            cert,
            "is not named edge-1",
        ),
        (
            "a very long file",
            |s, _| s.replace(&s.pki.ca, &"#\n".repeat(2 * 1024 * 1024 + 1)),
            ca_file,
            "longer than",
        ),
    ];
    for (name, spoil, blamed, complaint) in cases {
        let setup = Setup::new(&ca);
        setup
            .load()
            .unwrap_or_else(|error| panic!("{name}, before: {error}"));
        spoil(&setup, &ca);
        let error = setup.load().expect_err(name);
        assert_eq!(&error.path, blamed(&setup), "{name}: {error}");
        let text = error.to_string();
        let path = error.path.to_str().unwrap();
        assert!(
            text.starts_with(path) && text.contains(complaint),
            "{name}: {text}"
        );
    }
}

#[test]
fn one_valid_root_of_two_is_enough_and_https_needs_no_identity() {
    let ca = Ca::new();
    let setup = Setup::new(&ca);
    setup.replace(
        &setup.pki.ca,
        &format!("{}{}", Ca::valid((2020, 2021)).pem, ca.pem),
    );
    setup.load().unwrap();
    let pair = ca.sign(&node(|leaf| leaf.uris.clear()));
    let files = CertificateFiles {
        cert: setup.files.write("web.pem", &pair.cert),
        key: setup.files.write("web.key", &pair.key),
    };
    client_server_config(&files, now_unix()).unwrap();
    let error = client_server_config(&files, 0).unwrap_err();
    assert!(
        matches!(error.problem, PkiProblem::NotYetValid { .. }),
        "{error}"
    );
}

/// A handshake of `peer` with an Edge of `ca` fails for `reason`, and the peer is told `alert`.
fn refused(ca: &Ca, peer: &Peer<'_>, reason: Reason, alert: rustls::AlertDescription) {
    let mut peer = peer.connection(ca);
    let (error, out) = connect(&node_tls(ca), &mut peer, usize::MAX, |_| {}).unwrap_err();
    assert_eq!(error.reason(), reason, "{error}");
    let told = give(&mut peer, &out).unwrap_err();
    assert_eq!(told, rustls::Error::AlertReceived(alert), "{error}");
}

/// Without a certificate, or with one of another authority, no node connection comes to be; with a
/// good one it does. Proves, [R-011], [R-012].
#[test]
fn r011_r012_certificates_are_demanded_and_checked_up_to_the_authority() {
    use rustls::AlertDescription as A;
    let ca = Ca::new();
    let good = ca.sign(&Leaf::node(NODE_URI));
    let mut peer = Peer::node(&good).connection(&ca);
    assert!(connect(&node_tls(&ca), &mut peer, usize::MAX, |_| {}).is_ok());
    let nobody = Peer {
        identity: None,
        ..Peer::node(&good)
    };
    refused(
        &ca,
        &nobody,
        Reason::IdentityMissing,
        A::CertificateRequired,
    );
    let stranger = Ca::new().sign(&Leaf::node(NODE_URI));
    // The same name and another key: the authorities differ by their signature alone.
    refused(
        &ca,
        &Peer::node(&stranger),
        Reason::CertificateUntrusted,
        A::DecryptError,
    );
    let expired = ca.sign(&node(|leaf| leaf.years = (2020, 2021)));
    refused(
        &ca,
        &Peer::node(&expired),
        Reason::CertificateExpired,
        A::CertificateExpired,
    );
    let authority = ca.sign(&node(|leaf| {
        leaf.ca = IsCa::Ca(BasicConstraints::Unconstrained)
    }));
    refused(
        &ca,
        &Peer::node(&authority),
        Reason::IdentityInvalid,
        A::CertificateUnknown,
    );
}

#[test]
fn the_node_protocol_must_be_agreed_on() {
    use rustls::AlertDescription as A;
    let ca = Ca::new();
    let good = ca.sign(&Leaf::node(NODE_URI));
    for alpn in [
        &[][..],
        &[&b"iop-edge-node/2"[..]],
        &[&b"h2"[..], b"http/1.1"],
    ] {
        let peer = Peer {
            alpn,
            ..Peer::node(&good)
        };
        refused(&ca, &peer, Reason::AlpnMismatch, A::NoApplicationProtocol);
    }
    let alpn: &[&[u8]] = &[b"iop-edge-node/2", b"iop-edge-node/1"];
    let mut peer = Peer {
        alpn,
        ..Peer::node(&good)
    }
    .connection(&ca);
    assert!(connect(&node_tls(&ca), &mut peer, usize::MAX, |_| {}).is_ok());
    // A client may leave it out, but not offer only others.
    let mut silent = Peer {
        alpn: &[],
        ..Peer::browser()
    }
    .connection(&ca);
    assert_eq!(
        connect(&https(&ca), &mut silent, usize::MAX, |_| {})
            .unwrap()
            .alpn,
        None
    );
    let mut h2 = Peer {
        alpn: &[b"h2"],
        ..Peer::browser()
    }
    .connection(&ca);
    let (error, _) = connect(&https(&ca), &mut h2, usize::MAX, |_| {}).unwrap_err();
    assert_eq!(error.reason(), Reason::AlpnMismatch);
}

#[test]
fn bytes_that_are_no_handshake_end_it_at_once() {
    use iop_dataplane::tls::ServerHandshake;
    let tls = node_tls(&Ca::new());
    let read = |bytes: &[u8]| {
        let mut out = Vec::new();
        (
            ServerHandshake::new(&tls).unwrap().read(bytes, &mut out),
            out,
        )
    };
    let (error, out) = read(b"GET / HTTP/1.1\r\n");
    assert_eq!(error, Err(HandshakeError::Plaintext { first_byte: b'G' }));
    assert!(out.is_empty());
    assert_eq!(
        read(b"IOPEN/1\n").0,
        Err(HandshakeError::Plaintext { first_byte: b'I' })
    );
    assert_eq!(
        read(&[22, 3, 1, 0xff, 0xff]).0,
        Err(HandshakeError::RecordTooLong { bytes: 65_535 })
    );
    let (error, out) = read(&[23, 3, 3, 0, 1, 0]);
    assert_eq!(error.unwrap_err().reason(), Reason::TlsHandshakeFailed);
    assert_eq!(out[..2], [21, 3], "an alert");
    assert_eq!(read(&[]).0, Ok(false));
    assert_eq!(read(&[22, 3, 1]).0, Ok(false));
}

/// Bytes of a peer never panic, whatever they are: real flights with one to four bytes changed, cut
/// where the seed says.
#[test]
fn mutated_flights_end_in_errors_not_in_panics() {
    use iop_dataplane::tls::ServerHandshake;
    let ca = Ca::new();
    let tls = node_tls(&ca);
    let node = ca.sign(&Leaf::node(NODE_URI));
    let stranger = Ca::new().sign(&Leaf::node(NODE_URI));
    let mut seed = 0x1234_5678_9abc_def0_u64;
    let mut dice = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed >> 16).unwrap() % below
    };
    let (mut ended, mut done) = (0, 0);
    for round in 0..600 {
        let identity = if round % 3 == 0 { &stranger } else { &node };
        let mut peer = Peer::node(identity).connection(&ca);
        let mut handshake = ServerHandshake::new(&tls).unwrap();
        let mutated_flight = round % 2;
        'peer: for flight in 0..2 {
            let mut bytes = drain(&mut peer);
            if flight == mutated_flight && round % 10 != 1 {
                for _ in 0..=dice(4) {
                    let at = dice(bytes.len());
                    bytes[at] = u8::try_from(dice(256)).unwrap();
                }
            }
            let mut rest = bytes.as_slice();
            let mut out = Vec::new();
            while !rest.is_empty() {
                let (part, after) =
                    rest.split_at(rest.len().min(handshake.room()).min(1 + dice(500)));
                rest = after;
                match handshake.read(part, &mut out) {
                    Ok(false) => {}
                    Ok(true) => {
                        done += 1;
                        break 'peer;
                    }
                    Err(_) => {
                        ended += 1;
                        break 'peer;
                    }
                }
            }
            if give(&mut peer, &out).is_err() {
                break;
            }
        }
    }
    assert!(ended > 200 && done > 20, "{ended} ended, {done} done");
}
