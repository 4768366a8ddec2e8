//! The schema against what the contract names and forbids, read from the compiled descriptor.
//!
//! Lives on: test threads. Bound: the schema. Stays when another schema is dropped in, with the
//! spellings of fields the contract does not name.
#![expect(
    clippy::unwrap_used,
    reason = "a failure in a helper is the test's failure"
)]
use std::collections::BTreeMap;

use iop_proto::framing::{Direction, MessageType};
use iop_proto::map::FILE_DESCRIPTOR_SET;
use prost::Message;

// The parts of google/protobuf/descriptor.proto that are asked for here.

#[derive(Clone, PartialEq, Message)]
struct FileSet {
    #[prost(message, repeated, tag = "1")]
    file: Vec<File>,
}

#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(string, tag = "2")]
    package: String,
    #[prost(message, repeated, tag = "4")]
    message: Vec<Type>,
    #[prost(message, repeated, tag = "5")]
    enumeration: Vec<Enumeration>,
}

#[derive(Clone, PartialEq, Message)]
struct Type {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    field: Vec<Field>,
    #[prost(message, repeated, tag = "3")]
    nested: Vec<Self>,
    #[prost(message, repeated, tag = "9")]
    reserved: Vec<Range>,
}

#[derive(Clone, PartialEq, Message)]
struct Field {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "3")]
    number: i32,
    #[prost(int32, tag = "4")]
    label: i32,
    #[prost(int32, tag = "5")]
    kind: i32,
    #[prost(string, tag = "6")]
    type_name: String,
}

/// `end` is exclusive.
#[derive(Clone, PartialEq, Message)]
struct Range {
    #[prost(int32, tag = "1")]
    start: i32,
    #[prost(int32, tag = "2")]
    end: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Enumeration {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    value: Vec<EnumValue>,
}

#[derive(Clone, PartialEq, Message)]
struct EnumValue {
    #[prost(string, tag = "1")]
    name: String,
}

// `FieldDescriptorProto.Type` and `.Label`.
const INT64: i32 = 3;
const UINT64: i32 = 4;
const INT32: i32 = 5;
const BOOL: i32 = 8;
const STRING: i32 = 9;
const MESSAGE: i32 = 11;
const BYTES: i32 = 12;
const ENUM: i32 = 14;
const REPEATED: i32 = 3;

/// Every message of the schema by its full name, nested ones included.
fn messages() -> BTreeMap<String, Type> {
    fn add(prefix: &str, message: &Type, into: &mut BTreeMap<String, Type>) {
        let name = format!("{prefix}.{}", message.name);
        message
            .nested
            .iter()
            .for_each(|nested| add(&name, nested, into));
        into.insert(name, message.clone());
    }
    let set = FileSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    assert_eq!(set.file.len(), 3, "runtime, transport, lease");
    let mut all = BTreeMap::new();
    for file in &set.file {
        file.message
            .iter()
            .for_each(|message| add(&file.package, message, &mut all));
    }
    assert!(all.len() > 30, "the descriptor holds the schema");
    all
}

fn field(message: &str, name: &str) -> Field {
    let messages = messages();
    let fields = &messages
        .get(message)
        .unwrap_or_else(|| panic!("{message} exists"))
        .field;
    let found = fields.iter().find(|field| field.name == name);
    found
        .unwrap_or_else(|| panic!("{message}.{name} exists"))
        .clone()
}

/// Lower case without underscores, so that a style of writing hides nothing.
fn plain(name: &str) -> String {
    name.replace('_', "").to_lowercase()
}

/// `message.field` of every field whose plain name `banned` refuses; also proves that it looked.
fn offenders(of: impl Fn(&str) -> bool, banned: impl Fn(&str) -> bool) -> Vec<String> {
    let mut seen = 0;
    let mut found = Vec::new();
    for (name, message) in messages().iter().filter(|(name, _)| of(name)) {
        for field in &message.field {
            seen += 1;
            if banned(&plain(&field.name)) {
                found.push(format!("{name}.{}", field.name));
            }
        }
    }
    assert!(seen > 0, "no field was looked at");
    found
}

const CONTRACT_MESSAGES: [(&str, Direction); 13] = [
    ("RegisterRequest", Direction::NodeToEdge),
    ("RegisterResponse", Direction::EdgeToNode),
    ("NodeReadyRequest", Direction::NodeToEdge),
    ("NodeReadyResponse", Direction::EdgeToNode),
    ("RunRequest", Direction::EdgeToNode),
    ("RunEvent", Direction::NodeToEdge),
    ("ProviderTunnelRequest", Direction::EdgeToNode),
    ("ProviderTunnelFrame", Direction::NodeToEdge),
    ("CancelRequest", Direction::EdgeToNode),
    ("NodeCommandRequest", Direction::EdgeToNode),
    ("NodeCommandResponse", Direction::NodeToEdge),
    ("NodeConfigRefreshRequest", Direction::EdgeToNode),
    ("NodeConfigRefreshResponse", Direction::NodeToEdge),
];

#[test]
fn every_named_message_exists_and_has_one_direction() {
    let messages = messages();
    for (name, direction) in CONTRACT_MESSAGES {
        let name = format!("iop.{name}");
        assert!(messages.contains_key(&name), "{name}");
        let kind = MessageType::from_name(name.as_bytes()).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(kind.direction(), direction, "{name}");
    }
    // Nested in an answer or a refresh, never an envelope of its own.
    assert!(messages.contains_key("iop.NodeConfigPayload"));
    for kind in MessageType::ALL {
        assert!(
            messages.contains_key(kind.name()),
            "{} is declared",
            kind.name()
        );
    }
    let ours = ["Ping", "Pong", "GoAway", "Features", "Window"];
    assert_eq!(MessageType::ALL.len(), CONTRACT_MESSAGES.len() + ours.len());
}

#[test]
fn pinned_enum_names_exist() {
    let set = FileSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    let names: Vec<String> = set
        .file
        .iter()
        .flat_map(|file| &file.enumeration)
        .flat_map(|e| {
            e.value
                .iter()
                .map(move |v| format!("{}:{}", e.name, v.name))
        })
        .collect();
    let frame = ["RESPONSE_START", "BODY", "END", "ERROR", "USAGE"]
        .map(|kind| format!("ProviderTunnelFrameKind:PROVIDER_TUNNEL_FRAME_KIND_{kind}"));
    let command = "NodeCommandType:NODE_COMMAND_TYPE_CAPABILITIES".to_owned();
    for name in frame.into_iter().chain([command]) {
        assert!(names.contains(&name), "{name} among {names:?}");
    }
}

#[test]
fn pinned_numbers_and_types() {
    let operation = field("iop.ProviderTunnelRequest", "operation");
    assert_eq!((operation.number, operation.kind), (13, STRING));
    for (message, number) in [("iop.RunEvent", 13), ("iop.ProviderTunnelFrame", 15)] {
        let failure = field(message, "failure");
        assert_eq!((failure.number, failure.kind), (number, MESSAGE));
        assert_eq!(failure.type_name, ".iop.ExecutionFailure");
    }
}

/// The message itself or one declared in it.
fn within(name: &str, message: &str) -> bool {
    name.strip_prefix(message)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Proves.
#[test]
fn r111_a_runs_stall_timeout_is_int64_milliseconds() {
    assert_eq!(
        field("iop.RunRequest", "response_stall_timeout_ms").kind,
        INT64
    );
}

/// Proves.
#[test]
fn r112_a_tunnels_stall_timeout_is_int64_milliseconds() {
    assert_eq!(
        field("iop.ProviderTunnelRequest", "response_stall_timeout_ms").kind,
        INT64
    );
}

/// Proves.
#[test]
fn r093_a_tunnel_request_carries_the_eleven_fields() {
    let of = |name| {
        let field = field("iop.ProviderTunnelRequest", name);
        (field.kind, field.label == REPEATED)
    };
    for name in [
        "adapter",
        "target",
        "method",
        "path",
        "session_id",
        "operation",
    ] {
        assert_eq!(of(name), (STRING, false), "{name}");
    }
    assert_eq!(of("headers"), (MESSAGE, true));
    assert_eq!(of("body"), (BYTES, false));
    assert_eq!(of("stream"), (BOOL, false));
    assert_eq!(of("timeout_sec"), (INT32, false));
    assert_eq!(of("metadata"), (MESSAGE, true));
}

/// Proves.
#[test]
fn r094_tunnel_and_run_requests_do_not_embed_each_other() {
    let messages = messages();
    for (holder, other) in [
        ("RunRequest", "ProviderTunnelRequest"),
        ("ProviderTunnelRequest", "RunRequest"),
    ] {
        let holder = format!("iop.{holder}");
        let inside = |name: &&String| within(name, &holder);
        let mut reached: Vec<String> = messages.keys().filter(inside).cloned().collect();
        let mut at = 0;
        while at < reached.len() {
            for field in &messages[&reached[at]].field {
                let inner = field.type_name.trim_start_matches('.').to_owned();
                if field.kind == MESSAGE && !reached.contains(&inner) {
                    reached.push(inner);
                }
            }
            at += 1;
        }
        assert!(reached.len() > 1, "{holder} holds at least its metadata");
        assert!(
            !reached.contains(&format!("iop.{other}")),
            "{holder} reaches {other}"
        );
    }
}

#[test]
fn the_credential_binding_has_ten_components_of_its_own() {
    let strings = [
        "principal",
        "slot",
        "route",
        "profile",
        "upstream_target",
        "node_id",
        "recipient",
    ];
    let numbers = [
        "credential_revision",
        "route_revision",
        "projection_generation",
    ];
    for name in strings {
        assert_eq!(
            field("iop.CredentialLeaseBinding", name).kind,
            STRING,
            "{name}"
        );
    }
    for name in numbers {
        assert_eq!(
            field("iop.CredentialLeaseBinding", name).kind,
            UINT64,
            "{name}"
        );
    }
    assert_eq!(messages()["iop.CredentialLeaseBinding"].field.len(), 10);
}

#[test]
fn the_profile_travels_in_the_adapter_configuration() {
    for message in ["iop.OpenAICompatAdapterConfig", "iop.VllmAdapterConfig"] {
        let profile = field(message, "protocol_profile");
        assert_eq!(profile.type_name, ".iop.ConcreteProtocolProfile");
    }
    let settings = field("iop.AdapterConfig", "openai_compat");
    assert_eq!(settings.type_name, ".iop.OpenAICompatAdapterConfig");
    let adapters = field("iop.NodeConfigPayload", "adapters");
    assert_eq!(
        (adapters.type_name.as_str(), adapters.label),
        (".iop.AdapterConfig", REPEATED)
    );
    let elsewhere = offenders(
        |name| !name.ends_with("AdapterConfig"),
        |field| field.contains("protocolprofile"),
    );
    assert_eq!(elsewhere, [""; 0]);
}

/// Proves, [R-052].
#[test]
fn r051_a_connection_generation_is_no_field() {
    let found = offenders(|_| true, |name| name.contains("generation"));
    assert_eq!(found, ["iop.CredentialLeaseBinding.projection_generation"]);
}

/// Proves. What an Edge decides by its leases, and a node by its gate, neither tells the other.
#[test]
fn r244_no_lease_and_no_slot_is_counted_on_the_wire() {
    let between = |name: &str| {
        MessageType::ALL
            .iter()
            .any(|kind| within(name, kind.name()))
    };
    let banned = [
        "inflight", "queued", "slot", "occupan", "permit", "grant", "admi", "held", "lease",
    ];
    let found = offenders(between, |name| {
        banned.iter().any(|word| name.contains(word))
    });
    // Sealed bytes, which no gate reads.
    assert_eq!(found, ["iop.ProviderTunnelRequest.credential_lease"]);
    let shown = offenders(
        |name| name == "iop.ProviderSnapshot",
        |name| name == "inflight",
    );
    assert_eq!(
        shown.len(),
        1,
        "the words above are those that would be used"
    );
}

/// Proves.
#[test]
fn r258_a_command_asks_and_executes_nothing() {
    let set = FileSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    let mut kinds = set.file.iter().flat_map(|file| &file.enumeration);
    let kinds = kinds.find(|e| e.name == "NodeCommandType").unwrap();
    let names: Vec<_> = kinds
        .value
        .iter()
        .map(|value| value.name.as_str())
        .collect();
    let known = [
        "UNSPECIFIED",
        "CAPABILITIES",
        "TRANSPORT_STATUS",
        "PROVIDER_STATUS",
    ];
    assert_eq!(names, known.map(|name| format!("NODE_COMMAND_TYPE_{name}")));
    let fields = messages().remove("iop.NodeCommandRequest").unwrap().field;
    let fields: Vec<_> = fields.iter().map(|field| field.name.as_str()).collect();
    assert_eq!(fields, ["command_id", "type", "adapter", "target"]);
}

/// Proves.
#[test]
fn r266_the_snapshot_keeps_its_legacy_name_and_has_no_second_one() {
    let named: Vec<_> = messages()
        .into_keys()
        .filter(|name| name.contains("Snapshot"))
        .collect();
    assert_eq!(named, ["iop.NodeSnapshot", "iop.ProviderSnapshot"]);
    assert_eq!(
        field("iop.NodeSnapshot", "providers").type_name,
        ".iop.ProviderSnapshot"
    );
}

/// Proves.
#[test]
fn r345_no_configuration_says_in_which_directory_work_is_done() {
    let of = |name: &str| {
        [
            "iop.NodeConfigPayload",
            "iop.NodeRuntimeConfig",
            "iop.AdapterConfig",
            "iop.AdapterOptions",
        ]
        .iter()
        .any(|held| within(name, held))
    };
    let banned = ["cwd", "workdir", "workingdir", "workspace", "directory"];
    assert_eq!(
        offenders(of, |name| banned.iter().any(|word| name.contains(word))),
        [""; 0]
    );
}

/// Nothing tells anybody where a node could be dialled. Proves.
#[test]
fn r346_no_field_holds_the_address_of_a_node() {
    let banned = [
        "address", "endpoint", "listen", "host", "port", "url", "dial",
    ];
    let found = offenders(
        |_| true,
        |name| {
            // A `support` is no port.
            banned.iter().any(|word| name.contains(word)) && !name.contains("support")
        },
    );
    // Where a node finds its model servers, told to nobody but the node.
    let servers = ["Ollama", "OpenAICompat", "Vllm"];
    assert_eq!(
        found,
        servers.map(|kind| format!("iop.{kind}AdapterConfig.base_url"))
    );
}

/// Proves.
#[test]
fn r100_a_submission_is_no_message() {
    let named = |name: &str| messages().into_keys().any(|known| known.contains(name));
    assert!(named("ProviderTunnelRequest"));
    assert!(!named("Submit"), "what is submitted stays in the Edge");
}

/// Proves.
#[test]
fn r103_build_body_is_no_field() {
    assert_eq!(
        offenders(|_| true, |name| name.contains("buildbody")),
        [""; 0]
    );
}

#[test]
fn no_field_selects_a_response_path() {
    let banned = [
        "responsepath",
        "responsemode",
        "pathselector",
        "passthrough",
    ];
    let found = offenders(
        |_| true,
        |name| banned.iter().any(|word| name.contains(word)),
    );
    assert_eq!(found, [""; 0]);
}

#[test]
fn recovery_eligibility_is_no_field() {
    assert_eq!(
        offenders(|_| true, |name| name.contains("recovery")),
        [""; 0]
    );
}

/// Proves.
#[test]
fn r344_no_store_location_in_the_configuration() {
    const MAY_HOLD_HTTP_PATHS: [&str; 2] = ["iop.ProfileOperation", "iop.AdapterOptions"];
    let configuration = [
        "NodeConfigPayload",
        "NodeRuntimeConfig",
        "AdapterConfig",
        "AdapterOptions",
        "OllamaAdapterConfig",
        "VllmAdapterConfig",
        "OpenAICompatAdapterConfig",
        "ConcreteProtocolProfile",
        "ProfileOperation",
    ];
    let messages = messages();
    for name in configuration {
        assert!(
            messages.contains_key(&format!("iop.{name}")),
            "{name} exists"
        );
    }
    let of = |name: &str| {
        configuration
            .iter()
            .any(|held| within(name, &format!("iop.{held}")))
    };
    let banned = [
        "store",
        "database",
        "datadir",
        "workdir",
        "workingdir",
        "directory",
        "file",
    ];
    let words = offenders(of, |name| {
        name == "db" || (banned.iter().any(|word| name.contains(word)) && !name.contains("profile"))
    });
    assert_eq!(words, [""; 0]);
    let paths = offenders(
        |name| of(name) && !MAY_HOLD_HTTP_PATHS.contains(&name),
        |name| name.contains("path"),
    );
    assert_eq!(paths, [""; 0]);
}

/// Proves.
#[test]
fn r332_no_secret_in_the_configuration() {
    let of = |name: &str| {
        name.starts_with("iop.NodeConfig")
            || name.contains("Adapter")
            || name.contains("Profile")
            || name.contains("Runtime")
    };
    let banned = [
        "secret",
        "token",
        "password",
        "key",
        "credential",
        "cipher",
        "private",
        "lease",
    ];
    assert_eq!(
        offenders(of, |name| banned.iter().any(|word| name.contains(word))),
        [""; 0]
    );
}

/// Proves.
#[test]
fn r347_no_execution_message_names_a_model() {
    let execution = [
        "RunRequest",
        "RunEvent",
        "ProviderTunnelRequest",
        "ProviderTunnelFrame",
        "CancelRequest",
        "NodeCommandRequest",
        "NodeCommandResponse",
        "CredentialLeaseBinding",
    ];
    for name in execution {
        let found = offenders(
            |full| within(full, &format!("iop.{name}")),
            |f| f.contains("model"),
        );
        assert_eq!(found, [""; 0]);
    }
}

#[test]
fn gaps_that_a_pinned_number_proves_stay_reserved() {
    let gaps: [(&str, &[i32]); 4] = [
        ("iop.ProviderTunnelRequest", &[2]),
        ("iop.ProviderTunnelFrame", &[2, 11, 12, 13, 14]),
        ("iop.RunEvent", &[7, 8, 9, 10, 11, 12]),
        ("iop.RegisterRequest", &[4, 5, 6, 7, 8, 9]),
    ];
    let messages = messages();
    for (name, numbers) in gaps {
        for number in numbers {
            let reserved = &messages[name].reserved;
            let held = reserved
                .iter()
                .any(|range| (range.start..range.end).contains(number));
            assert!(held, "{name} reserves {number}");
        }
    }
}

#[test]
fn kinds_and_statuses_are_enums_and_event_types_are_words() {
    assert_eq!(field("iop.ProviderTunnelFrame", "kind").kind, ENUM);
    assert_eq!(field("iop.NodeCommandRequest", "type").kind, ENUM);
    assert_eq!(field("iop.RunEvent", "type").kind, STRING);
}
