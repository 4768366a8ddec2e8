//! The credential plane's keys and store, through the program.
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::scratch::Scratch;

const CANARY: &str = "sk-canary-0123456789abcdef";

const CONFIG: &str = "\
pki: {trust_domain: iop.test, edge_name: e1, ca: pki/ca.crt, certificate: pki/e1.crt, key: pki/e1.key}
credential_plane: on
credentials:
  store: slots
  store_key_file: pki/e1.store.key
  issuer_key: pki/e1.issuer.key
nodes:
  - id: n1
    recipient_key: pki/n1.recipient.pub
    adapters:
      - name: a1
        type: openai_compat
        base_url: https://host.example
        profile: {id: openai, operations: [chat_completions]}
    providers:
      - {id: p1, adapter: a1, target: t1, capacity: 1}
models:
  - {name: m1, providers: [p1]}
";

fn managed(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.good("iop pki init --trust-domain iop.test && iop pki edge e1");
    scratch.good("iop pki issuer e1 && iop pki recipient n1 && iop pki store-key e1");
    scratch.write("edge.yaml", CONFIG);
    scratch
}

const ADD: &str = "iop credential add --config edge.yaml --principal anonymous --slot main \
                   --route m1 --profile openai";

#[test]
fn keys_are_private_and_their_public_halves_belong_to_them() {
    let scratch = managed("credential-keys");
    for (name, mode, word) in [
        ("e1.issuer.key", 0o600, "iop-issuer-secret-v1"),
        ("e1.issuer.pub", 0o644, "iop-issuer-public-v1"),
        ("n1.recipient.key", 0o600, "iop-recipient-secret-v1"),
        ("n1.recipient.pub", 0o644, "iop-recipient-public-v1"),
        ("e1.store.key", 0o600, "iop-store-secret-v1"),
    ] {
        let path = scratch.path("pki").join(name);
        let seen = fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(seen, mode, "{name}");
        assert!(
            fs::read_to_string(&path).unwrap().starts_with(word),
            "{name}"
        );
    }
    assert!(!scratch.path("pki/e1.store.pub").exists());
    scratch.fails("iop pki recipient n1", "--force replaces it");
    // The Edge has a node's public half alone: no key that is not its own is put beside it.
    scratch.good("rm pki/n1.recipient.key");
    scratch.fails(
        "iop pki recipient n1",
        "pki/n1.recipient.pub exists; --force",
    );
    assert!(!scratch.path("pki/n1.recipient.key").exists());
    let before = scratch.read("pki/n1.recipient.pub");
    scratch.good("iop pki recipient n1 --force");
    assert_ne!(scratch.read("pki/n1.recipient.pub"), before);
    // Another kind of key in its place is named, and not shown.
    let secret = scratch.read("pki/e1.issuer.key");
    scratch.write("pki/e1.store.key", &secret);
    let ran = scratch.run("iop credential list --config edge.yaml");
    assert_eq!(ran.code, Some(1));
    let expected = "expected `iop-store-secret-v1`, found `iop-issuer-secret-v1`";
    assert!(ran.notes.contains(expected), "{ran:?}");
    let digits = secret.split_whitespace().last().unwrap();
    assert!(!ran.notes.contains(digits));
}

#[test]
fn a_credential_is_added_listed_rotated_and_removed_and_never_printed() {
    let scratch = managed("credential-life");
    let mut printed = String::new();
    let mut good = |line: String| {
        let ran = scratch.run(&line);
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        printed += &(ran.out.clone() + &ran.notes);
        ran.out
    };
    let added = good(format!("echo {CANARY} | {ADD}"));
    assert_eq!(added, "slots: 1 slots, generation 1\n");
    let listed = good("iop credential list --config edge.yaml".to_owned());
    let line = "anonymous main: model m1, profile openai, credential of generation 1, route of \
                generation 1\n";
    assert!(listed.ends_with(line), "{listed}");
    let checked = good("iop check --config edge.yaml".to_owned());
    assert!(
        checked.contains("slots: 1 slots, generation 1"),
        "{checked}"
    );
    scratch.write("new", &format!("{CANARY}-2\r\n"));
    let slot = "--config edge.yaml --principal anonymous --slot main";
    good(format!("iop credential rotate {slot} --from new"));
    let listed = good("iop credential list --config edge.yaml".to_owned());
    assert!(listed.contains("credential of generation 2, route of generation 1"));
    let store = fs::read(scratch.path("slots")).unwrap();
    let found = store.windows(9).any(|part| part == &CANARY.as_bytes()[..9]);
    assert!(!found, "the store shows a credential");
    assert_eq!(
        fs::metadata(scratch.path("slots"))
            .unwrap()
            .permissions()
            .mode()
            & 0o7777,
        0o600
    );
    good(format!("iop credential remove {slot}"));
    let listed = good("iop credential list --config edge.yaml".to_owned());
    assert_eq!(listed, "slots: 0 slots, generation 3\n");
    assert!(!printed.contains("canary"), "{printed}");
}

#[test]
fn what_could_never_be_used_is_refused_and_changes_nothing() {
    let scratch = managed("credential-refused");
    scratch.good(&format!("echo {CANARY} | {ADD}"));
    let before = fs::read(scratch.path("slots")).unwrap();
    let fails = |line: &str, why: &str| {
        scratch.fails(line, why);
        assert_eq!(fs::read(scratch.path("slots")).unwrap(), before, "{line}");
    };
    let add = |old: &str, new: &str| format!("echo {CANARY} | {}", ADD.replace(old, new));
    fails(&add("anonymous", "alice"), "no key has its principal");
    fails(&add("m1", "m2"), "no model has the name of its route");
    fails(
        &add("openai", "azure"),
        "no provider of its route has its profile",
    );
    fails(&add("main", "main"), "anonymous has a slot main");
    fails(
        &add("main", "second"),
        "slot main of this principal answers",
    );
    for name in ["''", "'a b'", "a/b", "ü"] {
        fails(&add("slot main", &format!("slot {name}")), "is not a name");
    }
    fails(
        &format!("printf '' | {}", ADD.replace("main", "x")),
        "visible ASCII",
    );
    let rotate = "iop credential rotate --config edge.yaml --principal anonymous --slot";
    fails(&format!("echo two words | {rotate} main"), "visible ASCII");
    fails(
        &format!("echo {CANARY} | {rotate} other"),
        "has no slot other",
    );
    scratch.good("iop pki store-key e1 --force");
    fails(
        "iop credential list --config edge.yaml",
        "cannot be decrypted",
    );
    scratch.write(
        "edge.yaml",
        &CONFIG.replace("credential_plane: on", "credential_plane: off"),
    );
    fails(
        "iop credential list --config edge.yaml",
        "credential_plane is off",
    );
}

#[test]
fn the_store_key_may_come_from_the_environment_or_systemd() {
    let scratch = managed("credential-source");
    scratch.good(&format!("echo {CANARY} | {ADD}"));
    let with = |line: &str| CONFIG.replace("store_key_file: pki/e1.store.key", line);
    scratch.write("edge.yaml", &with("store_key_env: IOP_STORE_KEY"));
    let list = "iop credential list --config edge.yaml";
    let ran = scratch.good(&format!("IOP_STORE_KEY=\"$(cat pki/e1.store.key)\" {list}"));
    assert!(ran.contains("1 slots"), "{ran}");
    scratch.fails(list, "the environment variable IOP_STORE_KEY: is not set");
    scratch.write("edge.yaml", &with("store_key_systemd: e1.store.key"));
    let ran = scratch.good(&format!("CREDENTIALS_DIRECTORY=pki {list}"));
    assert!(ran.contains("1 slots"), "{ran}");
    scratch.fails(list, "CREDENTIALS_DIRECTORY is not set");
}
