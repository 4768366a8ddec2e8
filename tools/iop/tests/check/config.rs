//! Configuration files and the certificates they name, through `iop check`; exit codes of `iop`.
use std::fs;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair, KeyUsagePurpose, SanType, date_time_ymd};

use crate::scratch::Scratch;

const EDGE: &str = "\
listeners: {nodes: '127.0.0.1:0', clients: '127.0.0.1:0', admin: '127.0.0.1:0'}
pki:
  trust_domain: iop.test
  edge_name: e1
  ca: pki/ca.crt
  certificate: pki/e1.crt
  key: pki/e1.key
nodes:
  - id: n1
    adapters: [{type: vllm, base_url: 'http://127.0.0.1:8000'}]
    providers: [{id: p1, adapter: vllm, target: t, capacity: 1}]
models: [{name: m1, providers: [p1]}]
";

fn furnished(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.good("iop pki init --trust-domain iop.test && iop pki edge e1 && iop pki node n1");
    scratch.write("edge.yaml", EDGE);
    scratch
}

/// `iop check` finds `what`, as a failure or as a warning.
fn finds(scratch: &Scratch, code: i32, what: &str) {
    let ran = scratch.run("iop check --config edge.yaml");
    assert_eq!(ran.code, Some(code), "{what}: {ran:?}");
    assert!(ran.out.contains(what), "{what:?} is not in {ran:?}");
}

#[test]
fn a_good_edge_file_is_summed_up() {
    let scratch = furnished("good");
    let said = scratch.good("iop check --config edge.yaml");
    for part in [
        "1 shard, 1 nodes, 1 providers, 1 models, 0 keys",
        "MiB reserved at start",
        "511 MiB body pool",
        "pki/e1.crt, towards nodes: 89 days left",
        "pki/e1.crt is signed by a root in pki/ca.crt",
        "pki/e1.key is private (mode 0600)",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    assert!(
        !said.contains("warning") && !said.contains("FAILED"),
        "{said}"
    );
}

#[test]
fn every_mistake_is_printed_with_its_line_and_field() {
    let scratch = furnished("mistakes");
    let wrong = EDGE
        .replace("capacity: 1", "capacity: 0")
        .replace("edge_name: e1", "edge_nam: e1");
    scratch.write("edge.yaml", &wrong);
    let ran = scratch.run("iop check --config edge.yaml");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let lines: Vec<_> = ran.out.lines().collect();
    let [required, unknown, capacity] = lines[..] else {
        panic!("three mistakes: {ran:?}")
    };
    assert_eq!(required, "edge.yaml:3: pki.edge_name: is required");
    assert!(
        unknown.starts_with("edge.yaml:4: pki.edge_nam: unknown field; allowed here: "),
        "{unknown}"
    );
    assert!(
        capacity
            .starts_with("edge.yaml:11: nodes[0].providers[0].capacity: expected a whole number"),
        "{capacity}"
    );
    // The Edge itself says the same and does not start.
    for line in [
        "edge.yaml:3: pki.edge_name",
        "edge.yaml:11: nodes[0].providers[0].capacity",
    ] {
        scratch.fails("iop edge --config edge.yaml", line);
    }
}

#[test]
fn certificate_files_are_checked() {
    let scratch = furnished("certificates");
    let edge_with = |old: &str, new: &str| scratch.write("edge.yaml", &EDGE.replace(old, new));
    edge_with("pki/e1.crt", "pki/none.crt");
    finds(&scratch, 1, "pki/none.crt: cannot be read");
    edge_with("pki/e1.crt", "pki/n1.crt");
    finds(&scratch, 1, "pki/n1.crt: not an Edge's workload identity");
    edge_with("edge_name: e1", "edge_name: e2");
    finds(
        &scratch,
        1,
        "pki/e1.crt: its workload identity is not named e2",
    );
    edge_with("iop.test", "other.test");
    finds(&scratch, 1, "another trust domain");
    edge_with("pki/e1.key", "pki/ca.key");
    finds(
        &scratch,
        1,
        "pki/ca.key: the key does not belong to pki/e1.crt",
    );
    edge_with("pki/ca.crt", "pki/ca.key");
    finds(&scratch, 1, "pki/ca.key: holds no certificate");

    scratch.good("iop pki init --trust-domain iop.test --dir other");
    edge_with("pki/ca.crt", "other/ca.crt");
    finds(
        &scratch,
        0,
        "warning pki/e1.crt is signed by no root in other/ca.crt\n        nodes refuse it",
    );
    scratch.write("edge.yaml", EDGE);
    scratch.good("chmod 640 pki/e1.key");
    finds(
        &scratch,
        0,
        "warning pki/e1.key is not private (mode 0640)\n        others may read it",
    );
    scratch.good("iop pki edge e1 --force --days 6");
    finds(
        &scratch,
        0,
        "warning pki/e1.crt, towards nodes: 5 days left",
    );
    finds(&scratch, 0, "ok      pki/e1.key is private (mode 0600)");
    expired(&scratch.path("pki/e1.crt"), &scratch.path("pki/e1.key"));
    finds(&scratch, 1, "pki/e1.crt: expired at Unix time");
}

fn expired(certificate: &Path, key: &Path) {
    let mut params = CertificateParams::default();
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2020, 4, 1);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.subject_alt_names = vec![SanType::URI(
        "spiffe://iop.test/edge/e1".try_into().unwrap(),
    )];
    let pair = KeyPair::generate().unwrap();
    fs::write(certificate, params.self_signed(&pair).unwrap().pem()).unwrap();
    fs::write(key, pair.serialize_pem()).unwrap();
}

#[test]
fn client_certificates_are_checked_too() {
    let scratch = furnished("clients");
    let tls = "admin: '127.0.0.1:0', clients_tls: {certificate: c.crt, key: c.key}";
    scratch.write("edge.yaml", &EDGE.replace("admin: '127.0.0.1:0'", tls));
    finds(&scratch, 1, "c.crt: cannot be read");
    scratch.good("cp pki/e1.crt c.crt && cp pki/n1.key c.key");
    finds(&scratch, 1, "c.key: the key does not belong to c.crt");
    scratch.good("cp pki/e1.key c.key");
    finds(&scratch, 0, "c.crt, towards clients: 89 days left");
}

#[test]
fn what_is_allowed_but_seldom_meant_is_a_warning() {
    let scratch = Scratch::new("warnings");
    let open =
        "listeners: {clients: '0.0.0.0:80', insecure_open: true, insecure_plaintext_nodes: true}";
    scratch.write("edge.yaml", open);
    finds(&scratch, 0, "warning nodes connect without TLS");
    finds(
        &scratch,
        0,
        "warning every host that reaches the client listener is served",
    );
}

#[test]
fn a_node_file_is_told_from_an_edge_file() {
    let scratch = furnished("node");
    let node = "node_id: n1\nedge: {address: '127.0.0.1:7443', trust_domain: iop.test, name: e1}\n\
                pki: {ca: pki/ca.crt, certificate: pki/n1.crt, key: pki/n1.key}\n";
    scratch.write("node.yaml", node);
    let said = scratch.good("iop check --config node.yaml");
    assert!(
        said.contains("node.yaml: node n1 dials 127.0.0.1:7443"),
        "{said}"
    );
    scratch.write("node.yaml", &node.replace("n1.key", "e1.key"));
    let ran = scratch.run("iop check --config node.yaml");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("pki/e1.key"), "{ran:?}");
    scratch.write("node.yaml", &node.replace("node_id", "node_idd"));
    let ran = scratch.run("iop check --config node.yaml");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("node.yaml:1"), "{ran:?}");
    // Told otherwise, it is judged as what it is said to be.
    let ran = scratch.run("iop check --config node.yaml --as edge");
    assert!(
        ran.code == Some(1) && ran.out.contains("unknown field; allowed here: listeners"),
        "{ran:?}"
    );
    let ran = scratch.run("iop check --config nothing.yaml");
    assert!(
        ran.code == Some(1) && ran.out.contains("nothing.yaml: cannot be read"),
        "{ran:?}"
    );
}

#[test]
fn the_examples_are_right_but_for_their_files() {
    let scratch = Scratch::new("examples");
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/examples");
    scratch.good(&format!("cp {examples}/edge.yaml {examples}/node.yaml ."));
    for file in ["edge.yaml", "node.yaml"] {
        let ran = scratch.run(&format!("iop check --config {file}"));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(
            ran.out.contains("FAILED  pki/"),
            "only certificates are missing: {ran:?}"
        );
        assert_eq!(ran.out.matches("FAILED").count(), 1, "{ran:?}");
    }
}

/// An order looks for the Edge where the file says, and says what helps when it is not there.
#[test]
fn a_reload_that_finds_no_edge_says_what_an_address_in_the_file_may_be() {
    let scratch = furnished("nobody");
    scratch.write(
        "edge.yaml",
        &EDGE.replace("admin: '127.0.0.1:0'", "admin: '127.0.0.1:1'"),
    );
    let hint = "if listeners.admin has changed, --admin says where it was";
    for (line, is_told) in [
        ("iop reload --config edge.yaml", true),
        ("iop reload --config edge.yaml --admin 127.0.0.1:1", false),
        ("iop drain-node n1 --config edge.yaml", true),
    ] {
        let ran = scratch.run(line);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.notes.contains("no Edge answers"), "{ran:?}");
        assert_eq!(ran.notes.contains(hint), is_told, "{ran:?}");
    }
}

#[test]
fn wrong_calls_exit_with_2_and_help_with_0() {
    let scratch = Scratch::new("usage");
    for line in [
        "",
        "edge",
        "node",
        "check",
        "check --config",
        "pki",
        "key",
        "nonsense",
        "check --as edge",
    ] {
        let ran = scratch.run(&format!("iop {line}"));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(
            ran.out.is_empty() && ran.notes.contains("--help"),
            "{ran:?}"
        );
    }
    // What lacks is named, and so is how it would be right.
    let ran = scratch.run("iop check --as edge");
    for said in ["--config <CONFIG>", "Usage: iop check"] {
        assert!(ran.notes.contains(said), "{ran:?}");
    }
    assert!(!ran.notes.contains("|--as"), "{ran:?}");
    for line in ["--help", "--version", "check --help", "pki node --help"] {
        assert!(!scratch.good(&format!("iop {line}")).is_empty());
    }
    for command in ["edge", "node"] {
        scratch.fails(
            &format!("iop {command} --config none.yaml"),
            "none.yaml: cannot",
        );
    }
}
