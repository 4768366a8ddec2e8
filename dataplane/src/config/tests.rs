//! One case per class of mistake, with its exact line and field, and what a good file becomes.
use std::path::PathBuf;

use iop_control::names::ProviderName;
use iop_proto::catalog::{Category, Operation, OperationSet, ProviderKind};
use iop_proto::domain::{NodeConfig, OnCancel};
use iop_proto::ids::ModelIndex;
use iop_proto::{limits, map};

use super::*;

const BASE: &str = "\
listeners:
  nodes: 0.0.0.0:7443
  clients: 127.0.0.1:8080
  admin: 127.0.0.1:9090
pki:
  trust_domain: iop.test
  edge_name: edge-1
  ca: ca.crt
  certificate: edge.crt
  key: /abs/edge.key
nodes:
  - id: n1
    adapters:
      - name: a1
        type: vllm
        base_url: http://127.0.0.1:8000
      - type: ollama
        base_url: http://[::1]:11434/
    providers:
      - id: p1
        adapter: a1
        target: t1
        capacity: 4
      - id: p2
        adapter: ollama
        target: t2
        capacity: 3
        long_capacity: 0
        stall_timeout_ms: 1000
  - id: n2
    name: other
    adapters:
      - name: a1
        type: openai_compat
        base_url: https://host.example
    providers:
      - id: p3
        adapter: a1
        target: t1
        capacity: 1
models:
  - name: m1
    providers: [p1, n2/p3]
  - name: m2
    providers: [p2]
keys:
  - principal: alice
    sha256: 00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF
    models: [m2]
";

fn host() -> Host {
    Host {
        memory_bytes: Some(8 << 30),
        cores: vec![0, 1, 2],
    }
}

fn parse(text: &str) -> Result<EdgeConfig, ConfigError> {
    EdgeConfig::parse_for(text, "dir/edge.yaml", &host())
}

fn good(text: &str) -> EdgeConfig {
    parse(text).unwrap_or_else(|error| panic!("refused:\n{error}\n{text}"))
}

/// `BASE` with one place changed; `old` must be there exactly once.
fn changed(old: &str, new: &str) -> String {
    assert_eq!(
        BASE.matches(old).count(),
        1,
        "{old:?} is not a unique place"
    );
    BASE.replace(old, new)
}

/// Changes one place; the only complaint must be on the line of `mark`, about `field`, and say `what`.
fn refused(old: &str, new: &str, mark: &str, field: &str, what: &str) {
    let text = changed(old, new);
    let at = text
        .find(mark)
        .unwrap_or_else(|| panic!("{mark:?} is not in the text"));
    let line = 1 + text[..at].matches('\n').count() as u64;
    let error = parse(&text).expect_err(new);
    assert!(!error.truncated);
    let [problem] = &error.problems[..] else {
        panic!("{new:?} brought:\n{error}")
    };
    assert_eq!(
        (problem.file.as_str(), problem.line, problem.field.as_str()),
        ("dir/edge.yaml", line, field),
        "{new:?}: {problem}"
    );
    assert!(problem.what.contains(what), "{new:?}: {problem}");
    let place = if field.is_empty() {
        String::new()
    } else {
        format!("{field}: ")
    };
    assert_eq!(
        problem.to_string(),
        format!("dir/edge.yaml:{line}: {place}{}", problem.what)
    );
}

fn provider(config: &EdgeConfig, id: &str) -> ProviderName {
    let found = config
        .names
        .providers
        .iter()
        .find(|provider| provider.id == id)
        .expect(id);
    ProviderName::clone(found)
}

fn payload(config: &EdgeConfig, node: usize) -> NodeConfig {
    map::decode_node_config(&config.names.nodes[node].config_payload.bytes)
        .expect("our own payload")
}

#[test]
fn a_good_file_becomes_the_name_table() {
    let config = good(BASE);
    assert_eq!(config.nodes_listen, "0.0.0.0:7443".parse().unwrap());
    let pki = config.pki.as_ref().unwrap();
    assert_eq!(
        (&pki.ca, &pki.key),
        (
            &PathBuf::from("dir/ca.crt"),
            &PathBuf::from("/abs/edge.key")
        )
    );
    assert_eq!(
        (config.trust_domain.as_str(), config.edge_name.as_str()),
        ("iop.test", "edge-1")
    );
    let names = &config.names;
    assert_eq!(names.nodes[0].certificate_name, "n1");
    assert_eq!(names.nodes[1].certificate_name, "other");
    assert_eq!(names.node_by_certificate("other").unwrap().row(), 1);
    let rows = |model: usize| -> Vec<_> {
        names.models[model]
            .providers
            .iter()
            .map(|provider| provider.row())
            .collect()
    };
    assert_eq!((rows(0), rows(1)), (vec![0, 2], vec![1]));
    assert_eq!(names.models[0].long_threshold_bytes, 128 * 1024);

    let p1 = provider(&config, "p1");
    assert_eq!((p1.kind, p1.adapter.as_str()), (ProviderKind::Vllm, "a1"));
    assert_eq!((p1.capacity, p1.long_capacity), (4, 4));
    assert_eq!(p1.operations, OperationSet::ALL);
    assert_eq!((p1.category, p1.enabled), (Category::LocalInference, true));
    let p2 = provider(&config, "p2");
    assert_eq!((p2.adapter.as_str(), p2.long_capacity), ("ollama", 0));
    assert!(p2.operations.contains(Operation::Completions));
    assert!(!p2.operations.contains(Operation::Embeddings));

    let [key] = &config.keys[..] else {
        panic!("one key")
    };
    assert_eq!((key.hash[0], key.hash[1], key.hash[31]), (0x00, 0x11, 0xff));
    assert_eq!(key.models, Some(vec![ModelIndex::new(1).unwrap()]));
    assert!(
        !format!("{config:?}").contains("0x11, 0x22"),
        "a hash is not for logs"
    );
    assert!(
        !format!("{config:?}").contains("17, 34"),
        "a hash is not for logs"
    );
}

#[test]
fn defaults_are_those_of_the_limits() {
    let config = good("listeners: {insecure_plaintext_nodes: true}\n");
    assert_eq!(config.clients_listen, "127.0.0.1:8080".parse().unwrap());
    assert_eq!(config.shards, 1);
    assert_eq!(config.limits.clients_max, limits::CLIENTS_MAX_DEFAULT);
    assert_eq!(config.limits.body_bytes_max, limits::BODY_BYTES_MAX_DEFAULT);
    assert_eq!(config.timeouts.dead_ms, limits::DEAD_MS_DEFAULT);
    assert_eq!(config.names.queue.wait_ms, limits::QUEUE_WAIT_MS_DEFAULT);
    assert_eq!(
        config.log,
        LogConfig {
            level: LogLevel::Info,
            access: AccessLog::Off
        }
    );
    assert_eq!(
        (config.pki.is_none(), config.tolerate_half_close),
        (true, false)
    );
}

#[test]
fn every_setting_reaches_its_field() {
    let more = "\
shards: 1
cores: [2, 0, 0]
credential_plane: off
limits: {clients_max: 10, handshakes_max: 3, output_pool_bytes: 2 MiB, body_pool_bytes: 3_000_000,
         body_bytes_max: 64KiB, queue_waiters_max: 7, queue_bytes_max: 1 GiB,
         receive_buffers: 16}
timeouts: {handshake_ms: 1, head_ms: 2, body_ms: 3, keep_alive_ms: 4, queue_wait_ms: 5, dispatch_ms: 8,
           write_stall_ms: 6, heartbeat_ms: 7, dead_ms: 14, registration_ms: 9, drain_ms: 10,
           command_ms: 11, refresh_ms: 12}
ingress: {tolerate_half_close: true}
recovery: off
log: {level: debug, access: 1/100}
";
    let config = good(&format!("{BASE}{more}"));
    assert_eq!(config.cores, vec![2, 0, 0]);
    let limits = Limits {
        clients_max: 10,
        handshakes_max: 3,
        output_pool_bytes: 2 << 20,
        body_pool_bytes: 3_000_000,
        body_bytes_max: 64 << 10,
        receive_buffers: 16,
    };
    assert_eq!(config.limits, limits);
    let queue = config.names.queue;
    assert_eq!(
        (queue.waiters_max, queue.waiting_bytes_max, queue.wait_ms),
        (7, 1 << 30, 5)
    );
    assert_eq!(queue.dispatch_ms, 8);
    let timeouts = Timeouts {
        handshake_ms: 1,
        head_ms: 2,
        body_ms: 3,
        keep_alive_ms: 4,
        write_stall_ms: 6,
        heartbeat_ms: 7,
        dead_ms: 14,
        registration_ms: 9,
        drain_ms: 10,
        command_ms: 11,
        refresh_ms: 12,
    };
    assert_eq!(config.timeouts, timeouts);
    assert!(config.tolerate_half_close);
    assert!(!config.recovery && good(BASE).recovery);
    assert_eq!(
        config.log,
        LogConfig {
            level: LogLevel::Debug,
            access: AccessLog::Sampled(100)
        }
    );
}

/// Proves [R-292], [R-293], [R-294], [R-297].
#[test]
fn a_node_is_sent_its_own_adapters_with_resolved_profiles() {
    let adapter = "        base_url: http://127.0.0.1:8000
        profile:
          id: prof
          operations: [models, chat_completions, {name: responses, method: PUT, path: /r}]
          auth_header: x-key
          auth_prefix: ''
        options: {on_cancel: drain, pool_idle_ms: 9, probe_path: /p, proxy_from_env: true,
                  operations: [embeddings]}
";
    let text = changed("        base_url: http://127.0.0.1:8000\n", adapter);
    let config = good(&text.replace("- id: n1", "- id: n1\n    concurrency: 12"));
    let sent = payload(&config, 0);
    assert_eq!(sent.concurrency, 12);
    let [a1, ollama] = &sent.adapters[..] else {
        panic!("two adapters: {sent:?}")
    };
    assert_eq!((a1.name.as_str(), ollama.name.as_str()), ("a1", ""));
    assert_eq!(a1.usable_kind(), Ok(ProviderKind::Vllm));
    assert_eq!(a1.base_url, "http://127.0.0.1:8000");
    let profile = a1.profile.as_ref().unwrap();
    let listed: Vec<_> = profile
        .operations
        .iter()
        .map(|one| (one.name.as_str(), one.method.as_str(), one.path.as_str()))
        .collect();
    let wanted = [
        ("models", "GET", "/v1/models"),
        ("chat_completions", "POST", "/v1/chat/completions"),
        ("responses", "PUT", "/r"),
    ];
    assert_eq!(listed, wanted);
    assert_eq!(
        (profile.auth_header.as_str(), profile.auth_prefix.as_str()),
        ("x-key", "")
    );
    assert_eq!(a1.options.on_cancel, OnCancel::Drain);
    assert_eq!(
        (a1.options.pool_idle_ms, a1.options.probe_path.as_str()),
        (9, "/p")
    );
    assert!(a1.options.proxy_from_env);
    assert_eq!(a1.options.operations, ["embeddings"]);
    assert_eq!(ollama.profile, None);

    // What the Edge may name on the wire is what the profile names. `[D-09]`
    let p1 = provider(&config, "p1");
    let named: Vec<_> = p1.profile.iter().map(|route| route.operation).collect();
    assert_eq!(named, [Operation::ChatCompletions, Operation::Responses]);
    assert_eq!(
        payload(&config, 1).adapters.len(),
        1,
        "no adapter of another node"
    );
}

/// Proves [D-54].
#[test]
fn d54_gate_capacity_is_the_sum_over_enabled_providers() {
    let capacities = |text: &str| -> Vec<i32> {
        payload(&good(text), 0)
            .adapters
            .iter()
            .map(|adapter| adapter.capacity)
            .collect()
    };
    assert_eq!(capacities(BASE), [4, 3]);
    let more = "      - {id: p4, adapter: a1, target: t4, capacity: 10}
      - {id: p5, adapter: a1, target: t5, capacity: 100, enabled: false}
  - id: n2
";
    assert_eq!(capacities(&changed("  - id: n2\n", more)), [14, 3]);
    // Nobody's adapter still states a limit: 0 would mean none.
    let idle = "    adapters:\n      - {name: idle, type: ollama, base_url: 'http://x'}\n      - name: a1\n        type: vllm";
    let text = changed("    adapters:\n      - name: a1\n        type: vllm", idle);
    assert_eq!(capacities(&text), [1, 4, 3]);
}

/// Proves [R-296].
#[test]
fn r296_an_empty_adapter_name_is_its_type() {
    refused(
        "      - type: ollama",
        "      - {name: ollama, type: vllm, base_url: 'http://x'}\n      - type: ollama",
        "      - type: ollama",
        "nodes[0].adapters[2]",
        "an adapter named \"ollama\" is already on line 17",
    );
    let config = good(&changed(
        "      - type: ollama",
        "      - name: \"\"\n        type: ollama",
    ));
    assert_eq!(provider(&config, "p2").adapter, "ollama");
}

/// Four minutes of silence before the first byte are within every default. Proves [P-39].
#[test]
fn d29_response_wait_leaves_the_node_the_last_word() {
    let waits = |config: &EdgeConfig, id: &str| {
        let provider = provider(config, id);
        (provider.stall_timeout_ms, provider.response_wait_ms)
    };
    let config = good(BASE);
    assert_eq!(waits(&config, "p1"), (0, 315_000));
    assert_eq!(waits(&config, "p2"), (1000, 16_000));
    assert_eq!(config.warnings(), Vec::<String>::new());
    let shorter = changed(
        "stall_timeout_ms: 1000",
        "stall_timeout_ms: 1000\n        response_wait_ms: 1000",
    );
    let config = good(&shorter);
    assert_eq!(waits(&config, "p2"), (1000, 1000));
    assert!(
        config.warnings()[0].contains("provider p2: response_wait_ms"),
        "{:?}",
        config.warnings()
    );
}

#[test]
fn a12_stall_timeout_ends_where_its_nanoseconds_do() {
    let with = |ms: &str| changed("stall_timeout_ms: 1000", &format!("stall_timeout_ms: {ms}"));
    assert_eq!(
        provider(&good(&with("9223372036854")), "p2").stall_timeout_ms,
        9_223_372_036_854
    );
    for wrong in [
        "9223372036855",
        "0",
        "-1",
        "9223372036854775807",
        "1.5",
        "'1'",
    ] {
        refused(
            "stall_timeout_ms: 1000",
            &format!("stall_timeout_ms: {wrong}"),
            &format!("stall_timeout_ms: {wrong}"),
            "nodes[0].providers[1].stall_timeout_ms",
            "a whole number of milliseconds from 1 to 9223372036854",
        );
    }
}

#[test]
fn text_that_is_not_yaml_is_refused_with_its_line() {
    refused(
        "models: [m2]",
        "models: [m2",
        "models: [m2",
        "",
        "not valid YAML",
    );
    refused(
        "  admin: ",
        "  nodes: 1\n  admin: ",
        "  nodes: 1",
        "",
        "duplicate mapping key: nodes",
    );
    refused("pki:", "pki: &a\n  <<: *a", "<<: *a", "", "not valid YAML");
    let many = parse("---\nshards: 1\n---\nshards: 1\n").expect_err("two documents");
    assert_eq!(many.problems.len(), 1, "{many}");
    let deep = format!("cores: {}1{}", "[".repeat(100), "]".repeat(100));
    let deep = parse(&deep).expect_err("deep");
    assert_eq!(
        (deep.problems.len(), deep.problems[0].line),
        (1, 1),
        "{deep}"
    );
    for text in ["", "# nothing\n", "just text", "- a\n- b\n"] {
        let error = parse(text).expect_err(text);
        assert!(
            error.problems[0]
                .what
                .contains("expected a group of fields"),
            "{text:?}: {error}"
        );
    }
}

#[test]
fn a_file_that_is_too_long_or_missing_is_refused() {
    let long = format!("# {}\n{BASE}", "x".repeat(FILE_BYTES_MAX));
    assert!(
        parse(&long)
            .expect_err("long")
            .to_string()
            .contains("longer than")
    );
    let error = EdgeConfig::load("/nonexistent/edge.yaml").expect_err("missing");
    assert!(
        error
            .to_string()
            .starts_with("/nonexistent/edge.yaml: cannot be read: "),
        "{error}"
    );
}

#[test]
fn unknown_and_mistyped_fields_are_refused_where_they_stand() {
    let allowed = "unknown field; allowed here: listeners, shards";
    refused("pki:", "lisners: {}\npki:", "lisners", "lisners", allowed);
    refused(
        "    name: other",
        "    nam: other",
        "nam: other",
        "nodes[1].nam",
        "unknown field",
    );
    let at = "nodes[0].adapters[0].type";
    refused(
        "type: vllm",
        "type: tgi",
        "type: tgi",
        at,
        "one of openai_compat, vllm, ollama",
    );
    refused(
        "models: [m2]",
        "models: m2",
        "models: m2",
        "keys[0].models",
        "",
    );
    refused(
        "  edge_name: edge-1\n",
        "",
        "trust_domain",
        "pki.edge_name",
        "is required",
    );
    refused(
        "target: t1\n        capacity: 4",
        "target: [t1]\n        capacity: 4",
        "[t1]",
        "nodes[0].providers[0].target",
        "expected text, found a list",
    );
    refused(
        "    name: other",
        "    name: {}",
        "name: {}",
        "nodes[1].name",
        "expected text",
    );
    refused(
        "long_capacity: 0",
        "enabled: yes",
        "enabled: yes",
        "nodes[0].providers[1].enabled",
        "expected true or false, found \"yes\"",
    );
}

#[test]
fn listeners_are_checked() {
    let nodes = "nodes: 0.0.0.0:7443";
    let wanted = "an IP address and port";
    refused(
        nodes,
        "nodes: localhost:7443",
        "localhost",
        "listeners.nodes",
        wanted,
    );
    refused(
        nodes,
        "nodes: 0.0.0.0",
        "0.0.0.0",
        "listeners.nodes",
        wanted,
    );
    refused(
        "admin: 127.0.0.1:9090",
        "admin: 127.0.0.1:8080",
        "admin",
        "listeners.admin",
        "the same address as listeners.clients",
    );
    let zero = changed("admin: 127.0.0.1:9090", "admin: 127.0.0.1:0");
    good(&zero.replace("clients: 127.0.0.1:8080", "clients: 127.0.0.1:0"));
    refused(
        "  admin:",
        "  clients_tls: {key: k}\n  admin:",
        "clients_tls",
        "listeners.clients_tls.certificate",
        "is required",
    );
    let text = changed(
        "  admin:",
        "  clients_tls: {certificate: c, key: k}\n  admin:",
    );
    let files = CertificateFiles {
        cert: "dir/c".into(),
        key: "dir/k".into(),
    };
    assert_eq!(good(&text).clients_tls, Some(files));
}

/// Proves [D-15].
#[test]
fn d15_without_keys_the_client_listener_stays_on_loopback() {
    let open = BASE.split("keys:").next().unwrap();
    good(open);
    for address in ["127.9.9.9:80", "'[::1]:80'", "'[::ffff:127.0.0.1]:80'"] {
        good(&open.replace("clients: 127.0.0.1:8080", &format!("clients: {address}")));
    }
    for address in ["0.0.0.0:8080", "'[::]:80'", "192.168.1.1:80"] {
        let text = open.replace("clients: 127.0.0.1:8080", &format!("clients: {address}"));
        let error = parse(&text).expect_err(address);
        let [problem] = &error.problems[..] else {
            panic!("{error}")
        };
        assert_eq!(
            (problem.line, problem.field.as_str()),
            (3, "listeners.clients")
        );
        assert!(problem.what.contains("without any key"), "{problem}");
        let config = good(&text.replace("  admin:", "  insecure_open: true\n  admin:"));
        assert!(config.insecure_open && !config.warnings().is_empty());
        let keyed = changed("clients: 127.0.0.1:8080", &format!("clients: {address}"));
        assert!(!good(&keyed).insecure_open);
    }
}

#[test]
fn pki_is_required_unless_nodes_are_plaintext() {
    let without = BASE.replace(
        &BASE[BASE.find("pki:").unwrap()..BASE.find("nodes:\n").unwrap()],
        "",
    );
    let error = parse(&without).expect_err("no pki");
    let [problem] = &error.problems[..] else {
        panic!("{error}")
    };
    assert_eq!(
        (problem.field.as_str(), problem.what.as_str()),
        ("pki", "is required")
    );
    let text = without.replace("listeners:", "listeners:\n  insecure_plaintext_nodes: true");
    let config = good(&text);
    assert!(config.insecure_plaintext_nodes && config.pki.is_none());
    assert!(config.warnings()[0].contains("without TLS"));
    for domain in ["Iop.test", "a b", "''", "a/b"] {
        refused(
            "iop.test",
            domain,
            "trust_domain",
            "pki.trust_domain",
            "a trust domain",
        );
    }
}

#[test]
fn shards_and_cores_are_checked() {
    for wrong in ["0", "65", "two"] {
        let line = format!("shards: {wrong}");
        refused(
            "pki:",
            &format!("{line}\npki:"),
            &line,
            "shards",
            "from 1 to 64",
        );
    }
    let many = changed("pki:", "shards: 64\nlimits: {body_pool_bytes: 4 GiB}\npki:");
    let large = Host {
        memory_bytes: None,
        cores: Vec::new(),
    };
    assert_eq!(
        EdgeConfig::parse_for(&many, "edge.yaml", &large)
            .expect("64")
            .shards,
        64
    );
    let what = "body_pool_bytes (512 MiB) must hold one body";
    refused("pki:", "shards: 16\npki:", "shards", "shards", what);
    refused(
        "pki:",
        "cores: [0, 1]\npki:",
        "cores",
        "cores",
        "expected 3 cores",
    );
    refused(
        "pki:",
        "cores: [0, 1, 9]\npki:",
        "cores",
        "cores[2]",
        "core 9 is not available",
    );
    let two = changed("pki:", "shards: 2\ncores: [0, 1, 2, 2]\npki:");
    assert_eq!(good(&two).cores, [0, 1, 2, 2]);
    let one = parse(&two.replace("shards: 2", "shards: 1")).expect_err("four for one shard");
    assert!(one.to_string().contains("cores: expected 3 cores"), "{one}");
}

#[test]
fn duplicates_are_refused_at_the_second() {
    refused(
        "  - id: n2",
        "  - {id: n1, name: twin}\n  - id: n2",
        "{id: n1",
        "nodes[1].id",
        "the same node id is already on line 12",
    );
    refused(
        "name: other",
        "name: n1",
        "name: n1",
        "nodes[1].name",
        "certificate name is already",
    );
    refused(
        "      - id: p2",
        "      - {id: p1, adapter: a1, target: t9, capacity: 1}\n      - id: p2",
        "{id: p1",
        "nodes[0].providers[1].id",
        "the same provider id is already on line 20",
    );
    refused(
        "  - name: m2",
        "  - {name: m1}\n  - name: m2",
        "{name: m1}",
        "models[1].name",
        "the same model is already on line 42",
    );
    refused(
        "[p1, n2/p3]",
        "[p1, n1/p1]",
        "[p1",
        "models[0].providers[1]",
        "in this list already",
    );
    let hash = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    refused(
        "    models: [m2]",
        &format!("  - {{principal: bob, sha256: {hash}}}"),
        "bob",
        "keys[1].sha256",
        "the same key is already on line 48",
    );
}

#[test]
fn d39_two_enabled_providers_of_one_target_are_refused() {
    let twin = "      - {id: p9, adapter: a1, target: t1, capacity: 1}\n  - id: n2\n";
    refused(
        "  - id: n2\n",
        twin,
        "p9",
        "nodes[0].providers[2]",
        "an enabled provider of this adapter and target is already on line 20",
    );
    good(&changed(
        "  - id: n2\n",
        &twin.replace("capacity: 1", "capacity: 1, enabled: false"),
    ));
    good(&changed(
        "  - id: n2\n",
        &twin.replace("target: t1", "target: t9"),
    ));
}

#[test]
fn references_must_exist() {
    refused(
        "adapter: ollama",
        "adapter: a2",
        "adapter: a2",
        "nodes[0].providers[1].adapter",
        "no adapter \"a2\" on this node; it has: a1, ollama",
    );
    refused(
        "[p2]",
        "[p7]",
        "[p7]",
        "models[1].providers[0]",
        "no provider \"p7\"",
    );
    refused(
        "n2/p3",
        "n1/p3",
        "n1/p3",
        "models[0].providers[1]",
        "no provider \"n1/p3\"",
    );
    refused(
        "models: [m2]",
        "models: [m2, m3]",
        "m3",
        "keys[0].models[1]",
        "no model \"m3\"",
    );
}

#[test]
fn figures_of_a_provider_are_checked() {
    let at = |name: &str| format!("nodes[0].providers[1].{name}");
    for wrong in ["0", "-1", "16385", "two"] {
        refused(
            "capacity: 3\n        long_capacity: 0",
            &format!("capacity: {wrong}"),
            &format!("capacity: {wrong}"),
            &at("capacity"),
            "from 1 to 16384",
        );
    }
    refused(
        "long_capacity: 0",
        "long_capacity: 4",
        "long_capacity",
        &at("long_capacity"),
        "4 is more than capacity, 3",
    );
    good(&changed("long_capacity: 0", "long_capacity: 3"));
    refused(
        "long_capacity: 0",
        "timeout_sec: -1",
        "timeout_sec",
        &at("timeout_sec"),
        "seconds",
    );
    refused(
        "long_capacity: 0",
        "operations: []",
        "operations",
        &at("operations"),
        "empty list",
    );
    refused(
        "long_capacity: 0",
        "operations: [chat]",
        "operations",
        &at("operations[0]"),
        "one of chat_completions, completions",
    );
    // A normalized run has no shape for anything else. `[A-37]`
    good(&changed("long_capacity: 0", "operations: [completions]"));
    refused(
        "long_capacity: 0",
        "operations: [completions, embeddings]",
        "operations",
        &at("operations"),
        "ollama cannot serve embeddings",
    );
    refused(
        "long_capacity: 0",
        "category: gpu",
        "category",
        &at("category"),
        "api, local_inference",
    );
    refused(
        "long_capacity: 0",
        "response_wait_ms: 0",
        "response_wait",
        &at("response_wait_ms"),
        "",
    );
}

#[test]
fn names_must_be_usable_where_they_go() {
    let long = "x".repeat(limits::NAME_BYTES_MAX as usize);
    good(&changed("- id: n2", &format!("- id: {long}")).replace("n2/p3", "p3"));
    for wrong in [
        format!("{long}x"),
        "a b".into(),
        "''".into(),
        "a/b".into(),
        "..".into(),
    ] {
        let text = changed("- id: n2", &format!("- id: {wrong}")).replace("n2/p3", "p3");
        let error = parse(&text).expect_err(&wrong);
        let [problem] = &error.problems[..] else {
            panic!("{error}")
        };
        assert_eq!((problem.line, problem.field.as_str()), (30, "nodes[1].id"));
        assert!(problem.to_string().len() < 256, "{problem}");
    }
    for name in [
        "meta/Llama 3:8b",
        "2.0",
        "null-ish",
        "true",
        "モデル",
        "0x10",
        "1e3",
    ] {
        let config = good(&changed("- name: m1", &format!("- name: {name}")));
        assert_eq!(config.names.models[0].name, name);
    }
    for (wrong, what) in [
        ("''", "must not be empty"),
        ("' m'", "blanks"),
        ("\"a\\tb\"", "control"),
        (&format!("{long}x"), "is 257 bytes long; at most 256"),
    ] {
        refused(
            "- name: m1",
            &format!("- name: {wrong}"),
            &format!("name: {wrong}"),
            "models[0].name",
            what,
        );
    }
}

#[test]
fn base_urls_are_checked_and_credentials_in_them_not_repeated() {
    let field = "nodes[0].adapters[0].base_url";
    for url in [
        "http://h",
        "https://h:1/v1/",
        "http://[::1]:80",
        "http://10.0.0.1:8000/openai/v1",
    ] {
        good(&changed("http://127.0.0.1:8000", url));
    }
    for url in [
        "h:80",
        "ftp://h",
        "http://",
        "http://:80",
        "http://h:99999",
        "http://h:0",
        "/v1",
        "''",
    ] {
        refused(
            "http://127.0.0.1:8000",
            url,
            "base_url",
            field,
            "expected a URL such as",
        );
    }
    for url in ["http://h?q=1", "http://h#f"] {
        refused(
            "http://127.0.0.1:8000",
            url,
            "base_url",
            field,
            "neither query nor fragment",
        );
    }
    let text = changed("http://127.0.0.1:8000", "http://user:hunter2@h");
    let error = parse(&text).expect_err("user name").to_string();
    assert!(
        error.contains("user name or password") && !error.contains("hunter2"),
        "{error}"
    );
}

#[test]
fn profiles_and_options_are_checked() {
    let url = "        base_url: http://127.0.0.1:8000\n";
    let with = |more: &str| format!("{url}        {more}\n");
    let adapter = "nodes[0].adapters[0]";
    let cases = [
        (
            "profile: {operations: [models]}",
            "profile.id",
            "is required",
        ),
        ("profile: {id: x}", "profile.operations", "is required"),
        (
            "profile: {id: x, operations: [embeddings]}",
            "profile.operations[0]",
            "one of models",
        ),
        (
            "profile: {id: x, operations: [models, models]}",
            "profile.operations[1]",
            "already",
        ),
        (
            "profile: {id: x, operations: [{name: models, path: x}]}",
            "profile.operations[0].path",
            "",
        ),
        (
            "profile: {id: x, operations: [], auth_header: 'a b'}",
            "profile.auth_header",
            "header",
        ),
        (
            "profile: {id: x, operations: [], auth_prefix: \"a\\nb\"}",
            "profile.auth_prefix",
            "",
        ),
        (
            "options: {on_cancel: kill}",
            "options.on_cancel",
            "one of abort, drain",
        ),
        (
            "options: {pool_idle_ms: 0}",
            "options.pool_idle_ms",
            "from 1",
        ),
        (
            "options: {probe_path: v1}",
            "options.probe_path",
            "expected a path",
        ),
    ];
    for (more, field, what) in cases {
        let mark = more.split('{').next().unwrap();
        refused(url, &with(more), mark, &format!("{adapter}.{field}"), what);
    }
    let ollama = "        base_url: http://[::1]:11434/\n";
    let more = format!("{ollama}        profile: {{id: x, operations: [models]}}\n");
    refused(
        ollama,
        &more,
        "profile",
        "nodes[0].adapters[1].profile",
        "not allowed for ollama",
    );
}

#[test]
fn keys_are_checked_and_never_repeated() {
    let hash = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";
    for wrong in [
        "sk-secret-key",
        &hash[1..],
        &hash.replace("AA", "gg"),
        "''",
        &format!("{hash}0"),
    ] {
        let text = changed(hash, wrong);
        let error = parse(&text).expect_err(wrong);
        let [problem] = &error.problems[..] else {
            panic!("{error}")
        };
        assert_eq!(
            (problem.line, problem.field.as_str()),
            (48, "keys[0].sha256")
        );
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    refused(
        "models: [m2]",
        "models: []",
        "models: []",
        "keys[0].models",
        "permits no model",
    );
    refused(
        "principal: alice",
        "principal: 'a b'",
        "principal",
        "keys[0].principal",
        "expected 1 to",
    );
}

#[test]
fn limits_have_ceilings_and_must_fit_the_host() {
    let with = |line: &str| format!("limits:\n  {line}\npki:");
    for (name, wrong, what) in [
        ("clients_max", "20001", "from 1 to 20000"),
        ("clients_max", "0", "from 1"),
        ("handshakes_max", "0", "from 1"),
        ("body_bytes_max", "64 MiB", "from 1 KiB to 63 MiB"),
        ("body_bytes_max", "1 KB", "a size"),
        ("output_pool_bytes", "1 KiB", "from 1 MiB"),
        ("body_pool_bytes", "99999999 GiB", "to 1024 GiB"),
        ("queue_waiters_max", "1.5", "a whole number"),
        ("queue_bytes_max", "-1", "a size"),
    ] {
        let line = format!("{name}: {wrong}");
        refused("pki:", &with(&line), &line, &format!("limits.{name}"), what);
    }
    refused(
        "pki:",
        &with("body_pool_bytes: 16 MiB"),
        "body_pool",
        "limits.body_pool_bytes",
        "body_pool_bytes (16 MiB) must hold one body of body_bytes_max (32 MiB) per shard: 33558336 bytes",
    );
    good(&changed("pki:", &with("clients_max: 20000")));
    refused(
        "pki:",
        &with("output_pool_bytes: 8 GiB"),
        "output_pool",
        "limits",
        "more than the 8192 MiB this host has",
    );
    let body = changed(
        "pki:",
        &format!("{}\npki:", "limits: {body_pool_bytes: 64 MiB}"),
    );
    good(&body);
    let error = parse(&format!("shards: 2\n{body}")).expect_err("half a body each");
    assert!(error.to_string().contains("per shard: 67"), "{error}");
    let one = good(BASE)
        .reserved()
        .iter()
        .map(|line| line.bytes)
        .sum::<u64>();
    let two = good(&format!("shards: 2\n{BASE}"))
        .reserved()
        .iter()
        .map(|line| line.bytes)
        .sum::<u64>();
    assert!(
        two > one + (64 << 20),
        "a shard has buffers of its own: {one}, {two}"
    );
    let small = Host {
        memory_bytes: Some(512 << 20),
        cores: Vec::new(),
    };
    let error =
        EdgeConfig::parse_for(BASE, "edge.yaml", &small).expect_err("defaults on a small host");
    assert!(
        error.to_string().starts_with("edge.yaml: limits: "),
        "{error}"
    );
}

#[test]
fn receive_buffers_are_a_power_of_two() {
    for (value, why) in [
        ("3", "a power of two"),
        ("0", "1 to 512"),
        ("1024", "1 to 512"),
    ] {
        let line = format!("receive_buffers: {value}");
        let text = format!("limits:\n  {line}\npki:");
        refused("pki:", &text, &line, "limits.receive_buffers", why);
    }
    let config = good(&format!("{BASE}limits: {{receive_buffers: 1}}\n"));
    assert_eq!(config.limits.receive_buffers, 1);
}

#[test]
fn d29_no_wait_is_zero_and_the_dead_have_had_two_pings() {
    let names = [
        "handshake_ms",
        "head_ms",
        "body_ms",
        "keep_alive_ms",
        "queue_wait_ms",
        "dispatch_ms",
        "write_stall_ms",
        "registration_ms",
        "drain_ms",
        "command_ms",
        "refresh_ms",
        "heartbeat_ms",
        "dead_ms",
    ];
    for name in names {
        for wrong in ["0", "86400001", "-5", "10s"] {
            let line = format!("{name}: {wrong}");
            refused(
                "pki:",
                &format!("timeouts:\n  {line}\npki:"),
                &line,
                &format!("timeouts.{name}"),
                "milliseconds from 1 to 86400000",
            );
        }
    }
    refused(
        "pki:",
        "timeouts:\n  heartbeat_ms: 15001\npki:",
        "heartbeat",
        "timeouts.heartbeat_ms",
        "dead_ms (30000) must be at least twice heartbeat_ms (15001)",
    );
    refused(
        "pki:",
        "timeouts:\n  heartbeat_ms: 5\n  dead_ms: 9\npki:",
        "dead_ms",
        "timeouts.dead_ms",
        "must be at least twice",
    );
    good(&changed("pki:", "timeouts:\n  heartbeat_ms: 15000\npki:"));
}

#[test]
fn log_is_checked() {
    for (line, field) in [
        ("level: loud", "log.level"),
        ("access: 1/0", "log.access"),
        ("access: some", "log.access"),
    ] {
        refused(
            "pki:",
            &format!("log:\n  {line}\npki:"),
            line,
            field,
            "expected",
        );
    }
    for (text, access) in [("all", AccessLog::All), ("off", AccessLog::Off)] {
        let config = good(&changed("pki:", &format!("log: {{access: {text}}}\npki:")));
        assert_eq!(config.log.access, access);
    }
}

#[test]
fn several_mistakes_are_reported_at_once_in_order_and_bounded() {
    let text = changed("capacity: 4", "capacity: 0").replace("- name: m2", "- nam: m2");
    let text = text
        .replace("nodes: 0.0.0.0:7443", "nodes: here")
        .replace("[m2]", "[mx]");
    let error = parse(&text).expect_err("four mistakes");
    let fields: Vec<_> = error
        .problems
        .iter()
        .map(|problem| problem.field.as_str())
        .collect();
    let wanted = [
        "listeners.nodes",
        "nodes[0].providers[0].capacity",
        "models[1].nam",
        "models[1].name",
        "keys[0].models[0]",
    ];
    for field in wanted {
        assert!(fields.contains(&field), "{field} in\n{error}");
    }
    assert!(
        error.problems.is_sorted_by_key(|problem| problem.line),
        "{error}"
    );

    let many: String = (0..50).map(|n| format!("x{n}: 1\n")).collect();
    let error = parse(&format!("{many}{BASE}")).expect_err("fifty mistakes");
    assert_eq!(
        (error.problems.len(), error.truncated),
        (PROBLEMS_MAX, true)
    );
    assert!(error.to_string().ends_with("… and more"));
}

#[test]
fn values_are_read_as_written_through_anchors_and_behind_other_scripts() {
    let text = changed(
        "target: t1\n        capacity: 4",
        "target: &t 2.50\n        capacity: &c 4_0",
    );
    let text = text
        .replace("target: t2", "target: *t")
        .replace("capacity: 3", "capacity: *c");
    let config = good(&format!("# モデル 🔑\n{text}"));
    let p2 = provider(&config, "p2");
    assert_eq!((p2.target.as_str(), p2.capacity), ("2.50", 40));
    let crlf = good(&BASE.replace('\n', "\r\n"));
    assert_eq!(provider(&crlf, "p2").stall_timeout_ms, 1000);
}

/// Proves [D-36].
#[test]
fn d36_the_annotated_example_loads() {
    let text = include_str!("../../../deploy/examples/edge.yaml");
    let config =
        EdgeConfig::parse_for(text, "edge.yaml", &host()).unwrap_or_else(|error| panic!("{error}"));
    let names = &config.names;
    assert_eq!(
        (names.nodes.len(), names.providers.len(), names.models.len()),
        (1, 3, 3)
    );
    assert_eq!(config.keys.len(), 2);
    assert_eq!(config.warnings(), Vec::<String>::new());
    let fields = [
        read::ROOT,
        read::LISTENERS,
        read::LIMITS,
        read::TIMEOUTS,
        catalog::NODE,
        catalog::PROVIDER,
        credentials::FIELDS,
    ];
    for field in fields.concat() {
        assert!(text.contains(&format!("{field}:")), "{field} is not shown");
    }
    // Values shown as defaults are the defaults.
    let bare = good("listeners: {insecure_plaintext_nodes: true}\n");
    assert_eq!(
        (config.limits, config.timeouts),
        (bare.limits, bare.timeouts)
    );
    assert_eq!(config.log, bare.log);
    assert_eq!(provider(&config, "gpu-1-llama").response_wait_ms, 315_000);
}

// ── reload ────────────────────────────────────────────────────────────────────────────────────────

const ROOM: Room = Room { nodes_max: 3 };

fn reloaded(from: &str, to: &str) -> Reload {
    let reload = good(from).reload(good(to), ROOM);
    reload.unwrap_or_else(|error| panic!("refused:\n{error}\n{to}"))
}

/// What a running Edge refuses of a file that is right by itself: about which field, and what it says.
fn not_reloaded(from: &str, to: &str, field: &str, what: &str) {
    let error = good(from).reload(good(to), ROOM).expect_err(to);
    let [problem] = &error.problems[..] else {
        panic!("{error}")
    };
    assert_eq!(problem.field, field, "{problem}");
    assert!(problem.what.contains(what), "{problem}");
}

#[test]
fn a_reload_keeps_rows_names_what_changed_and_what_waits_for_a_restart() {
    let to = changed("        capacity: 4\n", "        capacity: 5\n");
    let to = to.replace("  - name: m1\n    providers: [p1, n2/p3]\n", "");
    let to = to.replace("clients: 127.0.0.1:8080", "clients: 127.0.0.1:8081");
    let to = format!("{to}timeouts: {{head_ms: 1}}\nshards: 2\nlog: {{access: all}}\n");
    let Reload {
        config,
        changed,
        restart,
    } = reloaded(BASE, &to);
    assert_eq!(
        changed,
        [
            "node n1 changed: adapters",
            "provider p1 changed: capacity, long_capacity",
            "model m1 removed",
            "timeouts changed: head_ms",
        ]
    );
    assert_eq!(restart, ["listeners.clients", "shards", "log.access"]);
    assert_eq!((config.shards, config.timeouts.head_ms), (1, 1));
    assert_eq!(config.clients_listen, "127.0.0.1:8080".parse().unwrap());
    // The file's only model stands in the old one's row, for the key as well.
    let m2 = config.names.model_by_name(b"m2").unwrap();
    assert_eq!(m2.row(), 1);
    assert_eq!(config.keys[0].models, Some(vec![m2]));
    let back = config
        .reload(good(BASE), ROOM)
        .expect("the first file again");
    assert!(back.changed.contains(&"model m1 added".to_owned()));
    assert_eq!(reloaded(BASE, BASE).changed, Vec::<String>::new());
}

#[test]
fn a_reload_refuses_what_the_running_edge_must_not_do() {
    let open = changed("clients: 127.0.0.1:8080", "clients: 0.0.0.0:8080");
    let (keys, _) = BASE.split_once("keys:\n").unwrap();
    // The file closes the listener, which takes a restart; until then it would serve everybody.
    not_reloaded(&open, keys, "keys", "insecure_open");
    assert!(good(&open).reload(good(&open), ROOM).is_ok());
    let larger = format!("{BASE}limits: {{body_bytes_max: 63 MiB, body_pool_bytes: 2 GiB}}\n");
    let small = format!("{BASE}limits: {{body_pool_bytes: 33 MiB}}\n");
    not_reloaded(&small, &larger, "limits.body_bytes_max", "restart");
    let more = ["n3", "n4"].map(|id| format!("nodes:\n  - id: {id}\n"));
    let three = BASE.replace("nodes:\n  - id: n1", &format!("{}  - id: n1", more[0]));
    assert!(
        good(BASE).reload(good(&three), ROOM).is_ok(),
        "exactly full"
    );
    let four = three.replace("nodes:\n  - id: n3", &format!("{}  - id: n3", more[1]));
    not_reloaded(BASE, &four, "nodes", "room for 3");
}

#[test]
fn keys_are_told_by_their_principal_and_never_by_their_hash() {
    let hash = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";
    let to = changed(hash, &"ab".repeat(32)).replace("principal: alice", "principal: bob");
    let changed = reloaded(BASE, &to).changed;
    assert_eq!(changed, ["a key of alice removed", "a key of bob added"]);
}
