//! `iop check --host` on the host that runs the tests, which runs an Edge too.
use crate::scratch::Scratch;

#[test]
fn this_host_can_run_an_edge() {
    let scratch = Scratch::new("host");
    let said = scratch.good("iop check --host");
    for part in [
        "ok      kernel ",
        "ok      kernel.io_uring_disabled = ",
        "ok      io_uring waits with a timeout",
        "ok      io_uring operations",
        "ok      io_uring as a shard uses it",
        "RLIMIT_NOFILE = ",
        "RLIMIT_MEMLOCK = ",
        "MiB of memory",
        " cores",
        "net.core.somaxconn = ",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
}

#[test]
fn too_few_descriptors_fail_with_their_remedy() {
    let scratch = Scratch::new("descriptors");
    scratch.write("edge.yaml", "listeners: {insecure_plaintext_nodes: true}\n");
    let both = "iop check --host --config edge.yaml";
    let ran = scratch.run(&format!("ulimit -n 1000; {both}"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.out
            .contains("FAILED  RLIMIT_NOFILE = 1000, at least 4352 wanted"),
        "{ran:?}"
    );
    assert!(ran.out.contains("LimitNOFILE="), "{ran:?}");
    let ran = scratch.run(&format!("ulimit -n 4352; {both}"));
    assert!(ran.out.contains("ok      RLIMIT_NOFILE = 4352"), "{ran:?}");
    // Without a configuration nobody knows how many are needed.
    let ran = scratch.run("ulimit -n 1000; iop check --host");
    assert!(ran.out.contains("warning RLIMIT_NOFILE = 1000"), "{ran:?}");
}

#[test]
fn an_unusable_io_uring_is_named_with_its_remedy() {
    let scratch = Scratch::new("no-ring");
    // One descriptor beside the standard streams: enough to start, too few for a ring and sockets.
    let ran = scratch.run("ulimit -n 4; exec iop check --host");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("raise RLIMIT_NOFILE"), "{ran:?}");
}
