//! Bounds that the contract fixes, that several files share, or that others are derived from, each with
//! its unit and its reason, and the relations between them. A bound of one file alone stands at its head.
//!
//! Base values first, derived values after them; the `const` block at the end fails the build when a
//! relation breaks. What ends in `_DEFAULT` an operator may change; the configuration is checked where
//! it is read.

// ── tables ────────────────────────────────────────────────────────────────────────────────────────
/// Shard threads: more than the cores of one socket. A run id has 8 bits for the shard, and control
/// serves a ring of each.
pub const SHARDS_MAX: u32 = 64;
/// Configured nodes; their index is a `u16` and a snapshot is O(nodes + providers).
pub const NODES_MAX: u32 = 4_096;
/// Configured providers: four a node at the most nodes. Their index is a `u16`.
pub const PROVIDERS_MAX: u32 = 16_384;
/// Configured models; their index is a `u16`, and `/v1/models` lists all in one answer.
pub const MODELS_MAX: u32 = 4_096;
/// Candidates of one model group: a selection looks at each.
pub const PROVIDERS_PER_MODEL_MAX: u32 = 64;
/// Configured client keys: a request's is compared with each, in constant time.
pub const KEYS_MAX: u32 = 4_096;
/// Node connections on one shard, those in handshake or closing included.
pub const SESSIONS_PER_SHARD_MAX: u32 = 1_024;
/// Client connections on one shard; each shard has a slot for every client of the Edge. `[D-33]`
pub const CLIENTS_MAX_DEFAULT: u32 = 4_096;
/// Operations of one client in the kernel at once: a read or a poll, a send, a cancel's answer.
pub const OPERATIONS_PER_CLIENT: u32 = 3;
/// The kernel's completion queue has at most 65 536 entries, and none may be left out.
pub const CLIENTS_MAX_CEILING: u32 = 20_000;
/// Run slots on one shard; a run id has 24 bits for the row. Bounds leases held on its sessions.
pub const RUNS_PER_SHARD_MAX: u32 = 16_384;
/// Bytes of a configured name (node, provider, model, adapter, target).
pub const NAME_BYTES_MAX: u32 = 256;

// ── lanes ─────────────────────────────────────────────────────────────────────────────────────────
/// Effects one control step may emit.
pub const EFFECTS_PER_STEP_MAX: u32 = 64;
/// Slots of each ring between control and a shard.
pub const LINK_SLOTS: u32 = 1_024;
/// Events one link may have served before the next link's turn.
pub const EVENTS_PER_LINK_TURN_MAX: u32 = 64;
/// Earlier bindings of a provider whose health records are kept within a generation; beyond, the oldest
/// is forgotten and its late evidence counts nothing.
pub const BINDINGS_EARLIER_MAX: usize = 16;
/// Configurations on their way from control to a shard.
pub const EPOCH_SLOTS: u32 = 4;
/// Earlier configurations that requests still hold; a reload beyond them is refused. A request holds
/// its own only until it is submitted.
pub const EPOCHS_RETIRED_MAX: usize = 16;
/// Hand-overs from the front that wait for a shard.
pub const HANDOVER_SLOTS: u32 = 256;

// ── wire ──────────────────────────────────────────────────────────────────────────────────────────
/// `u32` big-endian before every envelope.
pub const LENGTH_PREFIX_BYTES: u32 = 4;
/// Edge → node: the receive limit of one envelope, fixed. `[D-02]`
pub const ENVELOPE_TO_NODE_BYTES_MAX: u32 = 64 * 1024 * 1024;
/// Node → Edge: the length an envelope may announce; longer is refused before allocation. `[D-02]`
pub const ENVELOPE_TO_EDGE_BYTES_MAX: u32 = 64 * 1024 * 1024 + 4096;
/// Node → Edge: what is assembled of one message; a BODY beyond it is cut through. `[D-02]`
pub const ASSEMBLED_BYTES_MAX: u32 = 1024 * 1024;
/// What may follow the body of a cut-through frame, frame and envelope together: the shard collects it
/// to complete the check, within one carry buffer. A longer tail is assembled.
pub const CUT_TAIL_BYTES_MAX: u32 = 8 * 1024;
/// A RESPONSE_START beyond this is a violation. `[D-02]`
pub const RESPONSE_START_BYTES_MAX: u32 = 256 * 1024;
/// Our agent cuts BODY frames at this many bytes; a peer may send longer ones. `[D-02]`
pub const BODY_FRAME_BYTES: u32 = 256 * 1024;
/// Headers one RESPONSE_START or request may carry, and trailers behind a chunked body.
pub const HEADERS_MAX: u32 = 128;
/// No bulk envelope is begun while more of a session's socket is unsent. `[D-02]`
pub const SESSION_UNSENT_BYTES_MAX: u32 = 256 * 1024;
/// ALPN of the node protocol. `[wire §4.2]`
pub const ALPN: &[u8] = b"iop-edge-node/1";
/// Preface of the plaintext mode.
pub const PLAINTEXT_PREFACE: &[u8; 8] = b"IOPEN/1\n";
/// Violations of stream form a session may make in a minute; one more closes it. `[D-41]`
pub const VIOLATIONS_PER_MINUTE_MAX: u32 = 100;

// ── TLS ───────────────────────────────────────────────────────────────────────────────────────────
/// One TLS record's plaintext (RFC 8446 §5.1).
pub const RECORD_PLAIN_BYTES_MAX: u32 = 16 * 1024;
/// Record header; and what protection adds behind the plaintext: inner content type and tag.
pub const RECORD_HEADER_BYTES: u32 = 5;
pub const RECORD_TRAILER_BYTES: u32 = 1 + 16;
pub const RECORD_EXTRA_BYTES: u32 = RECORD_HEADER_BYTES + RECORD_TRAILER_BYTES;
/// Longest ciphertext a record may announce (RFC 8446 §5.2), and the whole record.
pub const RECORD_CIPHER_BYTES_MAX: u32 = RECORD_PLAIN_BYTES_MAX + 256;
pub const RECORD_BYTES_MAX: u32 = RECORD_HEADER_BYTES + RECORD_CIPHER_BYTES_MAX;

/// One PEM file: a chain, a key, or a bundle of roots, of which the common ones take a fifth of this.
pub const PEM_BYTES_MAX: u32 = 1024 * 1024;

// ── buffers of a shard ────────────────────────────────────────────────────────────────────────────
/// Completions one turn handles, each of at most one receive buffer: the fairness between sessions. `[D-44]`
pub const COMPLETIONS_PER_TURN_MAX: u32 = 256;
/// Four full records: with less, nearly every record straddles two buffers and is copied.
pub const RECEIVE_BUFFER_BYTES: u32 =
    (4 * (RECORD_PLAIN_BYTES_MAX + RECORD_EXTRA_BYTES)).next_multiple_of(4096);
/// An operator may configure fewer: then a receive waits for a turn when they run out.
pub const RECEIVE_BUFFERS: u32 = COMPLETIONS_PER_TURN_MAX // held by the turn in progress
    + COMPLETIONS_PER_TURN_MAX; // filled while that turn settles
/// A client's receive: one record, so that a request body arrives in few completions, and one
/// block, so that bytes which arrive too early fit in one.
pub const CLIENT_RECEIVE_BYTES: u32 = BLOCK_BYTES;
pub const CLIENT_RECEIVE_BUFFERS: u32 = COMPLETIONS_PER_TURN_MAX + COMPLETIONS_PER_TURN_MAX;
/// Slices of one send; more are copied to pending. Two more frame the HTTP chunk. `[D-44]`
pub const SLICES_PER_SEND_MAX: u32 = 62;
/// Pooled block: any whole record. Pending output, request bodies, heads, carried records.
pub const BLOCK_BYTES: u32 = RECORD_BYTES_MAX.next_multiple_of(64);
/// Clients with bytes to send that one turn gathers before it submits in between.
pub const GATHERS_PER_TURN_MAX: u32 = 256;
/// Refreshes of one session whose answers still count: the one under way and late ones. `[A-49]`
pub const REFRESHES_UNANSWERED_MAX: u32 = 4;
/// Answers (register, ready) that one session may be owed, or have got and not taken, before it is closed
/// as a flood: each holds a configuration in sealed bytes.
pub const REPLIES_PER_SESSION_MAX: u32 = 8;
/// Output pool of an Edge, bytes, by default. `[D-06]`
pub const OUTPUT_POOL_BYTES_DEFAULT: u64 = 256 * 1024 * 1024;
/// A run's soft budget of pending output, bytes. `[D-06]`
pub const PENDING_SOFT_BYTES: u32 = 1024 * 1024;
/// Request-body pool of an Edge, bytes, by default, and the step a chunked body grows by. `[D-45]`
pub const BODY_POOL_BYTES_DEFAULT: u64 = 512 * 1024 * 1024;
pub const BODY_STEP_BYTES: u32 = 256 * 1024;
/// A request body, bytes, by default. `[D-02]` `[P-55]`
pub const BODY_BYTES_MAX_DEFAULT: u32 = 32 * 1024 * 1024;

// ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────
/// A request head: longer is 431; its request line alone: longer is 414. `[D-14]`
pub const HEAD_BYTES_MAX: u32 = 16 * 1024;
pub const REQUEST_LINE_BYTES_MAX: u32 = 8 * 1024;
/// Options one message's Connection fields may list: each header is compared with each of them.
pub const CONNECTION_OPTIONS_MAX: u32 = 32;
/// An inbound `x-request-id` longer than this is replaced by our own. `[D-26]`
pub const REQUEST_ID_BYTES_MAX: u32 = 128;
/// Digits of one chunk size: every `u64`, leading zeros included.
pub const CHUNK_SIZE_DIGITS_MAX: u32 = 16;
/// Chunk extensions of one body, bytes; skipped, never read.
pub const CHUNK_EXTENSION_BYTES_MAX: u32 = 4 * 1024;
/// Trailer section of one chunked body, bytes; skipped, never read.
pub const TRAILER_BYTES_MAX: u32 = 8 * 1024;
/// Nesting of a request's JSON: one bit each while its `model` is looked for.
pub const JSON_DEPTH_MAX: u32 = 512;
/// What is read of an unwanted body before the connection closes. `[D-42]`
pub const DRAIN_BYTES_MAX: u32 = 64 * 1024;
pub const DRAIN_MS_MAX: u32 = 1_000;

// ── answers of runs ───────────────────────────────────────────────────────────────────────────────
/// Text of a run's answer that is gathered because the client asked for no stream, bytes of JSON.
pub const GATHERED_ANSWER_BYTES_MAX: u32 = 4 * 1024 * 1024;
/// Text that may hold tool calls waits for the end of its run, up to this many bytes; it is judged in
/// one piece, in a shard's scratch buffer.
pub const HELD_TOOL_TEXT_BYTES_MAX: u32 = 128 * 1024;
/// Tool calls of one answer that are restored, and the nesting of their JSON.
pub const RESTORED_TOOL_CALLS_MAX: u32 = 128;
pub const RESTORED_TOOL_CALL_DEPTH_MAX: u32 = 64;

// ── pacing ────────────────────────────────────────────────────────────────────────────────────────
/// How many body bytes a node that paces itself may be ahead of a client: at first, and of one that is
/// behind; and of one that keeps up, for a link of 2 Gbit/s over 64 ms. `[D-06]`
pub const WINDOW_FIRST_BYTES: u64 = 1024 * 1024;
pub const WINDOW_LONGEST_BYTES: u64 = 16 * 1024 * 1024;
/// With more than this unsent to a node, a run's next Window waits: beside what a request in progress
/// may have sealed, some hundred Windows.
pub const WINDOW_UNSENT_BYTES_MAX: u64 = SESSION_UNSENT_BYTES_MAX as u64 + 64 * 1024;
/// A client for which its node waits takes half of the first grant within so many write stalls, by
/// default 4.4 kB/s, or is ended: it holds a provider's slot.
pub const PACED_WRITE_STALLS: u64 = 4;

// ── waits, milliseconds, defaults. `[D-29]` ───────────────────────────────────────────────────────
/// From accept to a finished handshake.
pub const TLS_HANDSHAKE_MS_DEFAULT: u64 = 10_000;
/// From a finished handshake to RegisterRequest, and from its answer to NodeReadyRequest.
pub const REGISTRATION_MS_DEFAULT: u64 = 10_000;
/// From the first byte of a request's head to its last: a slow sender holds a slot.
pub const HEAD_MS_DEFAULT: u64 = 10_000;
/// Between two bytes of a request's body.
pub const BODY_STALL_MS_DEFAULT: u64 = 30_000;
/// Of a client's connection without a request: as long as common balancers keep theirs.
pub const KEEP_ALIVE_MS_DEFAULT: u64 = 60_000;
/// Of a request for a provider. `[D-30]`
pub const QUEUE_WAIT_MS_DEFAULT: u64 = 30_000;
/// Of a client that takes no byte of its answer. `[D-06]`
pub const WRITE_STALL_MS_DEFAULT: u64 = 30_000;
/// Beyond the stall timeout, so that the node's own evidence comes first.
pub const RESPONSE_WAIT_EXTRA_MS: u64 = 15_000;
/// Of a provider that moves nothing: a long prompt is silent for minutes.
pub const STALL_TIMEOUT_MS_DEFAULT: u64 = 300_000;
/// Largest stall timeout, ms: `i64::MAX` nanoseconds. `[A-12]`
pub const STALL_TIMEOUT_MS_MAX: i64 = i64::MAX / 1_000_000;
/// Ping after this long without a write; dead after this long without a read. `[D-03]`
pub const HEARTBEAT_MS_DEFAULT: u64 = 10_000;
pub const DEAD_MS_DEFAULT: u64 = 30_000;
/// A lease taken whose request was not dispatched, by default. `[states §3]`
pub const DISPATCH_MS_DEFAULT: u64 = 5_000;
/// A superseded owner may have its ready answered this long. `[D-60]`
pub const REJECTED_READY_MS: u64 = 5_000;
/// Of answers under way when an Edge, a node or a reload's removed node ends. `[D-07]`
pub const DRAIN_MS_DEFAULT: u64 = 60_000;
/// A node has this long to answer a configuration refresh before its silence is reported. `[D-29]`
pub const REFRESH_MS_DEFAULT: u64 = 120_000;
/// A shard that does not answer control for this long is wedged. `[D-38]`
pub const SHARD_ANSWER_MS: u64 = 5_000;
/// Between a shard's answer and control's next question. `[D-38]`
pub const SHARD_PING_MS: u64 = 1_000;
/// Notices of nodes that nobody has taken yet; more are dropped.
pub const NODE_NOTICES_MAX: u32 = 256;
/// A command's answer must come within the node's probe and this much more. `[D-29]`
pub const COMMAND_EXTRA_MS: u64 = 10_000;
pub const COMMAND_MS_DEFAULT: u64 = HEALTH_PROBE_MS_DEFAULT + COMMAND_EXTRA_MS;
/// An overlaid binding is asked about after this long, then twice as long each time up to the
/// longest, give or take the jitter, percent. `[D-58]`
pub const PROBE_FIRST_MS: u64 = 5_000;
pub const PROBE_LONGEST_MS: u64 = 60_000;
pub const PROBE_JITTER_PERCENT: u64 = 20;
/// Commands outstanding at one node: the prober's one, and those of operators.
pub const COMMANDS_PER_NODE_MAX: u32 = 8;
/// Commands of operators outstanding at all nodes: a person's, or a script's, not a load.
pub const OPERATOR_COMMANDS_MAX: u32 = 64;
/// Handshakes in progress at once, before asymmetric work starts. `[D-04]`
pub const HANDSHAKES_DEFAULT: u32 = 64;
/// More would be a queue of asymmetric work, not a limit.
pub const HANDSHAKES_CEILING: u32 = 4_096;
/// Longest configurable wait, ms: a day. More is a mistaken unit.
pub const WAIT_MS_MAX: u64 = 24 * 60 * 60 * 1000;

// ── queue. `[D-30]` ───────────────────────────────────────────────────────────────────────────────
/// Requests of one model that wait; one more is refused at once.
pub const WAITERS_PER_MODEL_DEFAULT: u32 = 1_024;
/// Their bodies, bytes: half of the body pool, so that one model cannot take all of it.
pub const WAITING_BYTES_PER_MODEL_DEFAULT: u64 = 256 * 1024 * 1024;
/// A request body from which on a request is a long one: some 32 000 tokens of text.
pub const LONG_THRESHOLD_BYTES_DEFAULT: u32 = 128 * 1024;
/// The longest `retry-after`, s: an estimate beyond it is worth nothing.
pub const RETRY_AFTER_S_MAX: u32 = 30;
/// Grants one step makes; the rest is a pending step. Each grant is one effect.
pub const GRANTS_PER_STEP_MAX: u32 = EFFECTS_PER_STEP_MAX / 2;

// ── node agent ────────────────────────────────────────────────────────────────────────────────────
/// Between two attempts to connect, s, and how many in a row may fail; 0: any number.
pub const RECONNECT_INTERVAL_S_DEFAULT: i64 = 10;
pub const RECONNECT_ATTEMPTS_DEFAULT: i64 = 10;
/// Jitter only adds to the interval: a share of it. `[D-04]`
pub const RECONNECT_JITTER_DEFAULT: f64 = 0.5;
pub const RECONNECT_JITTER_MAX: f64 = 0.5;
/// Each step of a handshake with the Edge: TCP, TLS, RegisterResponse, ready ack. `[A-08]`
pub const HANDSHAKE_STEP_MS: u64 = 10_000;
/// A draining node still serves what arrives for this long. `[D-07]`
pub const NODE_DRAIN_WINDOW_MS: u64 = 1_000;
/// Exit of a node with nothing to drain, from the signal. `[D-55]`
pub const SHUTDOWN_MS: u64 = 5_000;
/// Attempts of one agent that still own a run entry, whatever their gates allow.
pub const ATTEMPTS_MAX: u32 = 65_536;
/// Messages a session's writer holds in each of its two queues; a bulk one is at most a BODY frame.
pub const NODE_CONTROL_QUEUE: usize = 256;
pub const NODE_BULK_QUEUE: usize = 32;
/// Idle provider connections live this long unless configured: below the 5 s of common servers. `[D-20]`
pub const PROVIDER_IDLE_MS_DEFAULT: u32 = 3_500;
/// Connecting to a provider, TLS included.
pub const PROVIDER_CONNECT_MS_DEFAULT: u64 = 10_000;
/// Attempts that wait for capacity, per agent. `[D-23]`
pub const WAITING_ATTEMPTS_MAX: u32 = 1_024;
/// Members of one JSON object of a run's input: each is compared with each.
pub const RUN_MEMBERS_MAX: usize = 128;
/// Messages of a run, parts of one message, choices of one answer, tools offered, calls asked for, stop
/// sequences: what is made of a list stays within a small multiple of its text.
pub const RUN_MESSAGES_MAX: usize = 8_192;
pub const RUN_PARTS_MAX: usize = 1_024;
pub const RUN_TOOLS_MAX: usize = 512;
pub const RUN_TOOL_CALLS_MAX: usize = 128;
/// One line of a provider's stream; the last one of Ollama's `/api/generate` lists every token.
pub const RUN_LINE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// An answer that a provider sends as one JSON object.
pub const RUN_ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What is kept of a provider's error answer: its message stands at the front.
pub const RUN_ERROR_BYTES_MAX: usize = 64 * 1024;
/// Text of one delta event: with its envelope within one receive buffer of the Edge.
pub const RUN_DELTA_BYTES: usize = 16 * 1024;
/// JSON of all tool calls of one run: with its event within what the Edge assembles.
pub const RUN_TOOL_CALLS_BYTES_MAX: usize = 512 * 1024;
/// An answer that is whole waits so long for the end of its HTTP message, ms: only then can the
/// connection be used again.
pub const RUN_TAIL_MS: u64 = 250;
/// G and H: close grace and health probe bound, ms. `[D-23]`
pub const CLOSE_GRACE_MS_DEFAULT: u64 = 5_000;
pub const HEALTH_PROBE_MS_DEFAULT: u64 = 5_000;
/// Largest G and H: the Edge waits `RESPONSE_WAIT_EXTRA_MS` beyond the stall timeout for the evidence.
pub const STALL_JOIN_MS_MAX: u64 = 10_000;
/// Read of a probe's answer: a list of many thousand models. `[D-49]`
pub const PROBE_BYTES_MAX: u32 = 1024 * 1024;
/// Probes of one agent that commands asked for, at once. `[D-29]`
pub const COMMANDS_MAX: usize = 64;
/// A look at the certificate files of an agent, ms. `[D-05]`
pub const CERTIFICATE_CHECK_MS: u64 = 5_000;
/// Targets of one adapter that its probes remember having found.
pub const PROBED_TARGETS_MAX: usize = 1_024;

// ── managed credentials ───────────────────────────────────────────────────────────────────────────
/// A lease from issue to expiry, ms: by default, and the most an Edge may configure or a node takes.
/// `[R-211]`
pub const LEASE_MS_DEFAULT: u64 = 60_000;
pub const LEASE_MS_MAX: u64 = 300_000;
/// An issuer's clock may be ahead of a node's by this much, ms. `[A-34]` `[A-35]`
pub const CLOCK_SKEW_MS_DEFAULT: u64 = 5_000;
/// One provider credential, bytes: longer than any API key or token in a header.
pub const SECRET_BYTES_MAX: u32 = 4 * 1024;
/// An encoded lease: a sealed secret, ids, digest, signature.
pub const LEASE_BYTES_MAX: u32 = SECRET_BYTES_MAX + 1024;
/// Stored slots of one Edge; the store is read whole.
pub const SLOTS_MAX: u32 = 16_384;
/// The encrypted store: the names and secret of each slot, most of them short.
pub const STORE_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Leases a node remembers as used: each for `LEASE_MS_MAX` and the skew at most. One more is refused.
pub const REPLAY_ENTRIES_MAX: u32 = 65_536;
/// Keys of one kind a node holds at once: the present one, and others while keys are rotated.
pub const CREDENTIAL_KEYS_MAX: u32 = 4;

const _: () = {
    assert!(LEASE_MS_DEFAULT <= LEASE_MS_MAX && LEASE_BYTES_MAX > SECRET_BYTES_MAX);
    assert!(LINK_SLOTS.is_power_of_two() && HANDOVER_SLOTS.is_power_of_two());
    assert!(EPOCH_SLOTS.is_power_of_two());
    assert!(LINK_SLOTS >= EFFECTS_PER_STEP_MAX); // a step always fits an empty ring
    assert!(GRANTS_PER_STEP_MAX < EFFECTS_PER_STEP_MAX);
    assert!(RECEIVE_BUFFERS.is_power_of_two() && RECEIVE_BUFFERS == CLIENT_RECEIVE_BUFFERS);
    assert!(RECEIVE_BUFFERS <= 32_768 && CLIENT_RECEIVE_BUFFERS <= 32_768); // kernel's buffer-ring bound
    assert!(RECEIVE_BUFFER_BYTES >= 4 * (RECORD_PLAIN_BYTES_MAX + RECORD_EXTRA_BYTES));
    assert!(CLIENT_RECEIVE_BYTES >= RECORD_BYTES_MAX);
    assert!(BLOCK_BYTES >= RECORD_BYTES_MAX && BLOCK_BYTES >= HEAD_BYTES_MAX);
    assert!(RUNS_PER_SHARD_MAX <= 1 << 24); // run id
    assert!(SHARDS_MAX <= 256);
    assert!(
        CLIENTS_MAX_CEILING * OPERATIONS_PER_CLIENT
            + SESSIONS_PER_SHARD_MAX * 2
            + RECEIVE_BUFFERS
            + CLIENT_RECEIVE_BUFFERS
            + GATHERS_PER_TURN_MAX
            + 64
            <= 65_536
    );
    assert!(NODES_MAX <= 65_536 && PROVIDERS_MAX <= 65_536 && MODELS_MAX <= 65_536);
    assert!(BODY_BYTES_MAX_DEFAULT < ENVELOPE_TO_NODE_BYTES_MAX);
    assert!(DEAD_MS_DEFAULT >= 2 * HEARTBEAT_MS_DEFAULT);
    assert!(WAITING_BYTES_PER_MODEL_DEFAULT <= BODY_POOL_BYTES_DEFAULT / 2);
    assert!(STALL_JOIN_MS_MAX < RESPONSE_WAIT_EXTRA_MS); // so that the node's evidence wins [D-29]
    assert!(
        CLOSE_GRACE_MS_DEFAULT <= STALL_JOIN_MS_MAX && HEALTH_PROBE_MS_DEFAULT <= STALL_JOIN_MS_MAX
    );
    assert!(NODES_MAX * COMMANDS_PER_NODE_MAX <= 1 << 24 && COMMANDS_PER_NODE_MAX > 1); // command id
    assert!(HELD_TOOL_TEXT_BYTES_MAX <= RESPONSE_START_BYTES_MAX); // the scratch buffer takes it
    assert!(RUN_TOOL_CALLS_BYTES_MAX + 4_096 <= ASSEMBLED_BYTES_MAX as usize);
    assert!(RUN_TOOL_CALLS_MAX <= RESTORED_TOOL_CALLS_MAX as usize);
    assert!(RUN_DELTA_BYTES + 1_024 <= RECEIVE_BUFFER_BYTES as usize);
    assert!(CUT_TAIL_BYTES_MAX <= BLOCK_BYTES); // collected in one carry buffer
    assert!(HEAD_BYTES_MAX <= u16::MAX as u32 && REQUEST_LINE_BYTES_MAX < HEAD_BYTES_MAX); // 16-bit spans
    assert!(JSON_DEPTH_MAX.is_multiple_of(64)); // whole words
};
