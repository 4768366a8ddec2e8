//! Certificates and keys, judged by OpenSSL.
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::scratch::Scratch;

fn with_ca(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.good("iop pki init --trust-domain iop.test");
    scratch
}

fn mode(scratch: &Scratch, name: &str) -> u32 {
    fs::metadata(scratch.path(name))
        .unwrap()
        .permissions()
        .mode()
        & 0o7777
}

/// One extension as OpenSSL prints it, its title line left out.
fn extension(scratch: &Scratch, file: &str, name: &str) -> String {
    let text = scratch.good(&format!("openssl x509 -in {file} -noout -ext {name}"));
    text.lines()
        .skip(1)
        .map(str::trim)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn d61_certificates_are_what_openssl_expects_of_each_role() {
    let scratch = with_ca("roles");
    scratch.good("iop pki node n-1 && iop pki edge e.1");
    for (file, purpose, other) in [
        ("n-1.crt", "sslclient", "sslserver"),
        ("e.1.crt", "sslserver", "sslclient"),
    ] {
        let verify = "openssl verify -x509_strict -CAfile pki/ca.crt -purpose";
        assert_eq!(
            scratch.good(&format!("{verify} {purpose} pki/{file}")),
            format!("pki/{file}: OK\n")
        );
        let wrong = scratch.run(&format!("{verify} {other} pki/{file}"));
        assert_ne!(wrong.code, Some(0), "{wrong:?}");
    }
    let read = |file: &str, name: &str| extension(&scratch, file, name);
    assert_eq!(
        read("pki/n-1.crt", "subjectAltName"),
        "URI:spiffe://iop.test/node/n-1"
    );
    assert_eq!(
        read("pki/e.1.crt", "subjectAltName"),
        "URI:spiffe://iop.test/edge/e.1"
    );
    assert_eq!(
        read("pki/ca.crt", "subjectAltName"),
        "URI:spiffe://iop.test"
    );
    assert_eq!(
        read("pki/n-1.crt", "extendedKeyUsage"),
        "TLS Web Client Authentication"
    );
    assert_eq!(
        read("pki/e.1.crt", "extendedKeyUsage"),
        "TLS Web Server Authentication"
    );
    assert_eq!(read("pki/n-1.crt", "keyUsage"), "Digital Signature");
    assert_eq!(read("pki/n-1.crt", "basicConstraints"), "CA:FALSE");
    assert_eq!(read("pki/ca.crt", "basicConstraints"), "CA:TRUE, pathlen:0");
    assert_eq!(read("pki/ca.crt", "keyUsage"), "Certificate Sign, CRL Sign");
    for name in ["ca", "n-1", "e.1"] {
        let of_certificate =
            scratch.good(&format!("openssl x509 -in pki/{name}.crt -noout -pubkey"));
        let of_key = scratch.good(&format!("openssl pkey -in pki/{name}.key -pubout"));
        assert_eq!(of_certificate, of_key);
        let key = scratch.good(&format!("openssl pkey -in pki/{name}.key -noout -text"));
        assert!(key.contains("NIST CURVE: P-256"), "another kind of key");
    }
}

#[test]
fn another_authority_has_not_signed_it() {
    let scratch = with_ca("authorities");
    scratch.good("iop pki node n1 && iop pki init --trust-domain iop.test --dir other");
    scratch.good("openssl verify -CAfile pki/ca.crt pki/n1.crt");
    let wrong = scratch.run("openssl verify -CAfile other/ca.crt pki/n1.crt");
    assert_ne!(wrong.code, Some(0), "{wrong:?}");
    scratch.good("cp other/ca.key pki/ca.key");
    scratch.fails(
        "iop pki node n2",
        "pki/ca.key does not belong to pki/ca.crt",
    );
    assert!(!scratch.path("pki/n2.crt").exists() && !scratch.path("pki/n2.key").exists());
}

#[test]
fn files_have_their_modes_whatever_the_umask() {
    for umask in ["000", "022", "077"] {
        let scratch = Scratch::new(&format!("umask-{umask}"));
        scratch.good(&format!(
            "umask {umask}; iop pki init --trust-domain iop.test"
        ));
        scratch.good(&format!("umask {umask}; iop pki node n1"));
        assert_eq!(mode(&scratch, "pki"), 0o700);
        for name in ["pki/ca", "pki/n1"] {
            assert_eq!(mode(&scratch, &format!("{name}.key")), 0o600);
            assert_eq!(mode(&scratch, &format!("{name}.crt")), 0o644);
        }
        let left: Vec<_> = fs::read_dir(scratch.path("pki")).unwrap().collect();
        assert_eq!(left.len(), 4, "no drafts are left: {left:?}");
    }
}

#[test]
fn lifetimes_are_as_asked_and_end_with_the_authority() {
    let scratch = with_ca("days");
    let ends_within = |file: &str, days: u32| {
        let seconds = days * 24 * 60 * 60;
        scratch
            .run(&format!(
                "openssl x509 -in {file} -noout -checkend {seconds}"
            ))
            .code
            == Some(1)
    };
    scratch.good("iop pki node usual && iop pki node short --days 3");
    assert!(!ends_within("pki/usual.crt", 89) && ends_within("pki/usual.crt", 91));
    assert!(!ends_within("pki/short.crt", 2) && ends_within("pki/short.crt", 4));
    assert!(!ends_within("pki/ca.crt", 3649) && ends_within("pki/ca.crt", 3651));
    scratch.good("iop pki init --trust-domain iop.test --dir brief --days 2");
    let said = scratch.good("iop pki node n1 --dir brief");
    assert!(
        said.contains("valid only until the authority ends"),
        "{said}"
    );
    assert!(ends_within("brief/n1.crt", 3));
    for wrong in ["0", "-1", "7301", "x"] {
        let ran = scratch.run(&format!(
            "iop pki init --trust-domain a --dir no --days={wrong}"
        ));
        assert_eq!(ran.code, Some(2), "{ran:?}");
    }
}

#[test]
fn nothing_is_overwritten_unless_forced() {
    let scratch = with_ca("overwrite");
    scratch.good("iop pki edge e1");
    let before = scratch.good("cat pki/ca.crt pki/ca.key pki/e1.crt pki/e1.key");
    scratch.fails(
        "iop pki init --trust-domain iop.test",
        "pki/ca.crt exists; --force replaces it",
    );
    scratch.fails("iop pki node e1", "pki/e1.crt exists; --force replaces it");
    assert_eq!(
        scratch.good("cat pki/ca.crt pki/ca.key pki/e1.crt pki/e1.key"),
        before
    );
    // Half a pair is somebody's too.
    scratch.good("rm pki/e1.crt");
    scratch.fails("iop pki edge e1", "pki/e1.key exists");
    scratch.good("iop pki node e1 --force");
    assert_eq!(
        extension(&scratch, "pki/e1.crt", "subjectAltName"),
        "URI:spiffe://iop.test/node/e1"
    );
    assert_eq!(mode(&scratch, "pki/e1.key"), 0o600);
    assert_ne!(scratch.good("cat pki/e1.key"), before);
}

#[test]
fn names_and_places_are_checked() {
    let scratch = Scratch::new("names");
    scratch.fails("iop pki node n1", "cannot read pki/ca.key");
    for wrong in ["Iop.test", "a/b", "''", "a..b/"] {
        let line = format!("iop pki init --trust-domain {wrong}");
        scratch.fails(&line, "is not a trust domain");
        assert!(!scratch.path("pki").exists(), "{line}");
    }
    scratch.good("iop pki init --trust-domain iop.test");
    for wrong in ["a/b", "''", "'a b'", "..", &"x".repeat(257)] {
        scratch.fails(&format!("iop pki node {wrong}"), "is not a name");
    }
    scratch.fails(
        "iop pki edge ca",
        "is the name of the authority's own files",
    );
    scratch.good("cp pki/ca.key pki/k && iop pki node leaf && cp pki/leaf.crt pki/ca.crt");
    scratch.good("cp pki/leaf.key pki/ca.key");
    scratch.fails(
        "iop pki node n1",
        "pki/ca.crt is not a certificate authority",
    );
    scratch.write("pki/ca.key", "no key");
    scratch.fails("iop pki node n1", "pki/ca.key holds no private key");
    let ran = scratch.run("iop pki node n1 --dir");
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

#[test]
fn show_prints_identity_validity_and_fingerprint_but_no_key() {
    let scratch = with_ca("show");
    scratch.good("iop pki node n1 && cat pki/n1.key pki/n1.crt pki/ca.crt > all.pem");
    let shown = scratch.good("iop pki show all.pem");
    assert_eq!(shown.matches("all.pem: ").count(), 2, "{shown}");
    for part in [
        "spiffe://iop.test/node/n1",
        "workload",
        "certificate authority",
        "89 days left",
        "CN=node n1",
    ] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let print = scratch.good("openssl x509 -in pki/n1.crt -noout -fingerprint -sha256");
    let print = print.trim().rsplit('=').next().unwrap().to_lowercase();
    assert!(shown.contains(&print), "{print} is not in\n{shown}");
    let key = scratch.read("pki/n1.key");
    let secret = key.lines().nth(1).unwrap();
    assert!(!shown.contains(secret));
    let ran = scratch.run("iop pki show pki/n1.key");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.notes.contains("holds no certificate") && !ran.notes.contains(secret),
        "{ran:?}"
    );
    scratch.fails("iop pki show nothing.pem", "cannot read nothing.pem");
    assert_eq!(scratch.run("iop pki show").code, Some(2));
}

#[test]
fn a_new_key_is_random_and_its_hash_is_the_one_the_edge_wants() {
    let scratch = Scratch::new("key");
    let ran = scratch.run("iop key new --principal alice");
    let key = ran.out.strip_suffix('\n').unwrap();
    assert!(
        key.starts_with("iop_") && key.len() == 68 && !key.contains('\n'),
        "{ran:?}"
    );
    assert!(
        !ran.notes.contains(key),
        "what may be pasted into edge.yaml holds no key"
    );
    scratch.write("key", key);
    let hash = scratch.good("openssl dgst -sha256 -r key");
    let hash = hash.split(' ').next().unwrap();
    let entry = ran.notes.split_once("keys:").unwrap().1;
    assert_eq!(
        entry.trim(),
        format!("- principal: alice\n    sha256: {hash}")
    );
    let config = format!("listeners: {{insecure_plaintext_nodes: true}}\nkeys:{entry}");
    scratch.write("edge.yaml", &config);
    assert!(
        scratch
            .good("iop check --config edge.yaml")
            .contains("1 keys")
    );
    assert_ne!(scratch.good("iop key new"), ran.out);
    scratch.fails("iop key new --principal 'a b'", "is not a name");
}
