//! Every number the Edge shows of itself: closed lists of metrics per thread, and their Prometheus text.
//!
//! Lives on: writers one per thread, never shared; the exposition on the cold thread. View: its own
//! thread's figures. Bound: fixed lists; one 8-byte cell each, summed over shards when shown.
//!
//! Adding a metric is one line in one of the lists below. A name that stands on several lines makes
//! one family: its lines are adjacent and differ in labels alone. Labels come from the lists, from
//! closed enums and from configured names, never from a peer. `[D-24]` `[R-320]`…`[R-323]`
use iop_control::edge::{Counters, HealthSource, Outcome, Recovery};
use iop_control::step::Eligibility;
use iop_proto::catalog::Operation;
use iop_proto::reason::{Blame, Reason};
use iop_ring::mirror::{self, MirrorReader, MirrorWriter};

mod exposition;
mod process;
#[cfg(test)]
pub(crate) mod strict;

pub use exposition::{CONTENT_TYPE, Exposition, Family, families};

/// The soft limit of open descriptors; `None` when it is unlimited or unknown.
#[must_use]
pub fn descriptors_max() -> Option<u64> {
    process::Process::read().descriptors_max
}

/// How a figure behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at process start.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Cumulative buckets, a sum and a count.
    Histogram,
}

impl Kind {
    /// Word of a `# TYPE` line.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One line of a list: a family's name, kind and help, and this line's labels.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [(&'static str, &'static str)],
    pub help: &'static str,
}

macro_rules! metrics {
    ($(#[$doc:meta])* $list:ident {
        $($variant:ident: $kind:ident, $name:literal, [$($label:literal = $value:literal),*], $help:literal;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum $list { $(#[doc = $help] $variant,)* }

        impl $list {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Name, kind, labels and help.
            #[must_use]
            pub const fn info(self) -> Info {
                match self {
                    $(Self::$variant => Info {
                        name: $name,
                        kind: Kind::$kind,
                        labels: &[$(($label, $value)),*],
                        help: $help,
                    },)*
                }
            }
        }
    };
}

metrics! {
    /// What one shard thread counts.
    ShardMetric {
    // name: kind, family, labels, help
    Turns: Counter, "iop_edge_turns_total", [], "Turns of the shards' loops.";
    Completions: Counter, "iop_edge_completions_total", [], "Kernel completions handled by shards.";
    SendsDirect: Counter, "iop_edge_sends_total", ["path" = "direct"], "Sends to clients: direct from receive buffers, direct but cut short, or waiting for room.";
    SendsShort: Counter, "iop_edge_sends_total", ["path" = "short"], "Sends to clients: direct from receive buffers, direct but cut short, or waiting for room.";
    SendsWaiting: Counter, "iop_edge_sends_total", ["path" = "waiting"], "Sends to clients: direct from receive buffers, direct but cut short, or waiting for room.";
    PendingCopiedBytes: Counter, "iop_edge_pending_copied_bytes_total", [], "Bytes of answers copied to pending output because the client's socket was full.";

    Sessions: Gauge, "iop_edge_sessions", [], "Node connections open, registered or not.";
    NodeBytesIn: Counter, "iop_edge_node_bytes_total", ["direction" = "in"], "Bytes on node connections, TLS included.";
    NodeBytesOut: Counter, "iop_edge_node_bytes_total", ["direction" = "out"], "Bytes on node connections, TLS included.";
    RecordsOpened: Counter, "iop_edge_tls_records_total", ["direction" = "opened"], "TLS records opened and sealed by shards.";
    RecordsSealed: Counter, "iop_edge_tls_records_total", ["direction" = "sealed"], "TLS records opened and sealed by shards.";
    EnvelopesInPlace: Counter, "iop_edge_envelopes_received_total", ["path" = "in_place"], "Envelopes from nodes: whole in a receive buffer, completed in a carry buffer, cut through, or assembled.";
    EnvelopesCarried: Counter, "iop_edge_envelopes_received_total", ["path" = "carried"], "Envelopes from nodes: whole in a receive buffer, completed in a carry buffer, cut through, or assembled.";
    EnvelopesCutThrough: Counter, "iop_edge_envelopes_received_total", ["path" = "cut_through"], "Envelopes from nodes: whole in a receive buffer, completed in a carry buffer, cut through, or assembled.";
    EnvelopesAssembled: Counter, "iop_edge_envelopes_received_total", ["path" = "assembled"], "Envelopes from nodes: whole in a receive buffer, completed in a carry buffer, cut through, or assembled.";
    EnvelopesSent: Counter, "iop_edge_envelopes_sent_total", [], "Envelopes handed to node connections.";
    EnvelopesIgnored: Counter, "iop_edge_envelopes_ignored_total", [], "Envelopes of registered nodes that nothing waits for: of unknown type, unasked, repeated.";

    FramesResponseStart: Counter, "iop_edge_frames_total", ["kind" = "response_start"], "Frames of provider answers from nodes, by kind.";
    FramesBody: Counter, "iop_edge_frames_total", ["kind" = "body"], "Frames of provider answers from nodes, by kind.";
    FramesEnd: Counter, "iop_edge_frames_total", ["kind" = "end"], "Frames of provider answers from nodes, by kind.";
    FramesError: Counter, "iop_edge_frames_total", ["kind" = "error"], "Frames of provider answers from nodes, by kind.";
    FramesOther: Counter, "iop_edge_frames_total", ["kind" = "other"], "Frames of provider answers from nodes, by kind.";
    FrameBodyBytes: Counter, "iop_edge_frame_body_bytes_total", [], "Body bytes in frames of provider answers.";
    FramesDropped: Counter, "iop_edge_frames_dropped_total", [], "Frames of runs already settled.";
    EvidenceKeysDropped: Counter, "iop_edge_evidence_keys_dropped_total", [], "Keys of stall evidence outside the allowlist, dropped unread.";
    HandoffsConfirmed: Counter, "iop_edge_terminal_handoffs_total", ["recovery_handoff" = "confirmed"], "Stall terminals handed on to waiting clients, with validated evidence or without.";
    HandoffsWithout: Counter, "iop_edge_terminal_handoffs_total", ["recovery_handoff" = "none"], "Stall terminals handed on to waiting clients, with validated evidence or without.";
    StreamViolations: Counter, "iop_edge_stream_violations_total", [], "Frames that broke the order of their stream.";

    EpochsTaken: Counter, "iop_edge_shard_configurations_total", [], "Configurations that shards have taken since the one at start, each shard counted.";

    Clients: Gauge, "iop_edge_clients", [], "Client connections open on shards.";
    RequestsOpen: Gauge, "iop_edge_requests_open", [], "Client requests that are read, wait, run or are answered, as of the last look a few times a second.";
    Draining: Gauge, "iop_edge_shards_draining", [], "Shards that take no new requests.";
    ClientsTaken: Counter, "iop_edge_client_connections_total", [], "Client connections that shards took over from the front.";
    ClientsReleased: Counter, "iop_edge_client_connections_closed_total", [], "Client connections that shards have let go.";
    ClientTransfers: Counter, "iop_edge_client_transfers_total", [], "Client connections moved to the shard of their node.";
    ClientBytesIn: Counter, "iop_edge_client_bytes_total", ["direction" = "in"], "Bytes on client connections, TLS included.";
    ClientBytesOut: Counter, "iop_edge_client_bytes_total", ["direction" = "out"], "Bytes on client connections, TLS included.";
    Requests: Counter, "iop_edge_requests_total", [], "Client requests whose head was accepted.";
    Responses2xx: Counter, "iop_edge_responses_total", ["class" = "2xx"], "Response heads sent to clients, by class of status.";
    Responses3xx: Counter, "iop_edge_responses_total", ["class" = "3xx"], "Response heads sent to clients, by class of status.";
    Responses4xx: Counter, "iop_edge_responses_total", ["class" = "4xx"], "Response heads sent to clients, by class of status.";
    Responses5xx: Counter, "iop_edge_responses_total", ["class" = "5xx"], "Response heads sent to clients, by class of status.";
    ResponsesOther: Counter, "iop_edge_responses_total", ["class" = "other"], "Response heads sent to clients, by class of status.";
    ResponsesAborted: Counter, "iop_edge_responses_aborted_total", [], "Answers broken off after their head was sent.";
    AccessLinesDropped: Counter, "iop_edge_access_lines_dropped_total", [], "Access lines lost because the writer was behind.";

    Runs: Gauge, "iop_edge_runs", [], "Runs whose request is on a shard or at a node.";
    RunsDispatched: Counter, "iop_edge_runs_dispatched_total", [], "Requests whose first byte was handed to a node connection.";
    RunsWithdrawn: Counter, "iop_edge_runs_withdrawn_total", [], "Requests withdrawn before their first byte.";
    CredentialsAsked: Counter, "iop_edge_credential_asks_total", [], "Credential leases asked of the issuer, at most one per granted run.";
    CredentialsDiscarded: Counter, "iop_edge_credential_leases_discarded_total", [], "Credential leases made for a run that ended before it began.";
    CancelsSent: Counter, "iop_edge_cancels_sent_total", [], "Cancel requests sent to nodes.";
    CancelsOverdue: Counter, "iop_edge_cancels_overdue_total", [], "Cancelled runs that their node has not ended, and of which it said nothing for response_wait_ms. Each holds its lease.";

    OutputPoolUsed: Gauge, "iop_edge_pool_used_bytes", ["pool" = "output"], "Bytes of a pool in use.";
    BodyPoolUsed: Gauge, "iop_edge_pool_used_bytes", ["pool" = "body"], "Bytes of a pool in use.";
    AssemblyPoolUsed: Gauge, "iop_edge_pool_used_bytes", ["pool" = "assembly"], "Bytes of a pool in use.";
    OutputPoolSize: Gauge, "iop_edge_pool_size_bytes", ["pool" = "output"], "Bytes of a pool, reserved at start.";
    BodyPoolSize: Gauge, "iop_edge_pool_size_bytes", ["pool" = "body"], "Bytes of a pool, reserved at start.";
    AssemblyPoolSize: Gauge, "iop_edge_pool_size_bytes", ["pool" = "assembly"], "Bytes of a pool, reserved at start.";
    SessionBuffersOut: Gauge, "iop_edge_receive_buffers_out", ["pool" = "session"], "Receive buffers a shard holds between turns; 0 unless something is wrong.";
    ClientBuffersOut: Gauge, "iop_edge_receive_buffers_out", ["pool" = "client"], "Receive buffers a shard holds between turns; 0 unless something is wrong.";
    ReceiveExhausted: Counter, "iop_edge_receive_exhausted_total", [], "Receives ended by the kernel for want of a buffer.";
    }
}

metrics! {
    /// What the front thread counts.
    FrontMetric {
    NodeListenerOpen: Gauge, "iop_edge_listener_open", ["listener" = "nodes"], "1 while the listener accepts.";
    ClientListenerOpen: Gauge, "iop_edge_listener_open", ["listener" = "clients"], "1 while the listener accepts.";
    NodesAccepted: Counter, "iop_edge_accepted_connections_total", ["listener" = "nodes"], "Connections accepted.";
    ClientsAccepted: Counter, "iop_edge_accepted_connections_total", ["listener" = "clients"], "Connections accepted.";
    NodeHandshakes: Counter, "iop_edge_handshakes_total", ["listener" = "nodes"], "Handshakes that succeeded and were handed to a shard.";
    ClientHandshakes: Counter, "iop_edge_handshakes_total", ["listener" = "clients"], "Handshakes that succeeded and were handed to a shard.";
    HandshakesInProgress: Gauge, "iop_edge_handshakes_in_progress", [], "Handshakes in progress, both listeners.";
    DescriptorsExhausted: Counter, "iop_edge_descriptors_exhausted_total", [], "Times a listener paused because the process had no descriptor left.";
    HandoverWaits: Counter, "iop_edge_handover_waits_total", [], "Connections that waited because their shard's lane was full.";
    }
}

metrics! {
    /// What the control thread counts.
    ControlMetric {
    Submits: Counter, "iop_edge_submits_total", [], "Whole requests submitted for a lease.";
    QueueEntries: Counter, "iop_edge_queue_entries_total", ["why" = "no_capacity"], "Requests put in the queue: for want of capacity, or again at their old place because nothing of them had been sent.";
    QueueReturns: Counter, "iop_edge_queue_entries_total", ["why" = "not_sent"], "Requests put in the queue: for want of capacity, or again at their old place because nothing of them had been sent.";
    GrantsAtOnce: Counter, "iop_edge_leases_granted_total", ["from" = "submit"], "Leases granted, at submission or from the queue.";
    GrantsQueued: Counter, "iop_edge_leases_granted_total", ["from" = "queue"], "Leases granted, at submission or from the queue.";
    ReturnsTerminal: Counter, "iop_edge_leases_returned_total", ["by" = "terminal"], "Leases returned, each exactly once, by what returned it.";
    ReturnsNotSent: Counter, "iop_edge_leases_returned_total", ["by" = "not_sent"], "Leases returned, each exactly once, by what returned it.";
    ReturnsFence: Counter, "iop_edge_leases_returned_total", ["by" = "fence"], "Leases returned, each exactly once, by what returned it.";
    ReturnsLost: Counter, "iop_edge_leases_returned_total", ["by" = "lost"], "Leases returned, each exactly once, by what returned it.";
    LeasesHeld: Gauge, "iop_edge_leases_held", [], "Leases granted and not returned, all providers.";
    TerminalsComplete: Counter, "iop_edge_terminals_total", ["ending" = "complete"], "Ends of runs as nodes reported them.";
    TerminalsError: Counter, "iop_edge_terminals_total", ["ending" = "error"], "Ends of runs as nodes reported them.";
    TerminalsViolation: Counter, "iop_edge_terminals_total", ["ending" = "violation"], "Ends of runs as nodes reported them.";
    TerminalsStalled: Counter, "iop_edge_terminals_total", ["ending" = "stalled"], "Ends of runs as nodes reported them.";
    StallLowered: Counter, "iop_edge_provider_health_evidence_total", ["source" = "stall", "outcome" = "lowered"], "Pieces of health evidence, by where they came from and what they came to.";
    StallMarked: Counter, "iop_edge_provider_health_evidence_total", ["source" = "stall", "outcome" = "marked"], "Pieces of health evidence, by where they came from and what they came to.";
    StallStale: Counter, "iop_edge_provider_health_evidence_total", ["source" = "stall", "outcome" = "stale"], "Pieces of health evidence, by where they came from and what they came to.";
    StallUnchanged: Counter, "iop_edge_provider_health_evidence_total", ["source" = "stall", "outcome" = "unchanged"], "Pieces of health evidence, by where they came from and what they came to.";
    StallRejected: Counter, "iop_edge_provider_health_evidence_total", ["source" = "stall", "outcome" = "rejected"], "Pieces of health evidence, by where they came from and what they came to.";
    ProbeCleared: Counter, "iop_edge_provider_health_evidence_total", ["source" = "capabilities", "outcome" = "cleared"], "Pieces of health evidence, by where they came from and what they came to.";
    ProbeMarked: Counter, "iop_edge_provider_health_evidence_total", ["source" = "capabilities", "outcome" = "marked"], "Pieces of health evidence, by where they came from and what they came to.";
    ProbeStale: Counter, "iop_edge_provider_health_evidence_total", ["source" = "capabilities", "outcome" = "stale"], "Pieces of health evidence, by where they came from and what they came to.";
    ProbeUnchanged: Counter, "iop_edge_provider_health_evidence_total", ["source" = "capabilities", "outcome" = "unchanged"], "Pieces of health evidence, by where they came from and what they came to.";
    ProbeRejected: Counter, "iop_edge_provider_health_evidence_total", ["source" = "capabilities", "outcome" = "rejected"], "Pieces of health evidence, by where they came from and what they came to.";
    HealthLowered: Counter, "iop_edge_provider_health_transitions_total", ["to" = "unavailable"], "Overlays put on providers and taken off again by evidence.";
    HealthCleared: Counter, "iop_edge_provider_health_transitions_total", ["to" = "available"], "Overlays put on providers and taken off again by evidence.";
    EligibleYes: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "eligible"], "Stalled requests, by whether another provider may be asked.";
    EligibleOff: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "off"], "Stalled requests, by whether another provider may be asked.";
    EligibleClientGone: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "client_gone"], "Stalled requests, by whether another provider may be asked.";
    EligibleCommitted: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "committed"], "Stalled requests, by whether another provider may be asked.";
    EligibleFenceUnconfirmed: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "fence_unconfirmed"], "Stalled requests, by whether another provider may be asked.";
    EligibleEvidenceRejected: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "evidence_rejected"], "Stalled requests, by whether another provider may be asked.";
    EligibleNoOtherProvider: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "no_other_provider"], "Stalled requests, by whether another provider may be asked.";
    EligibleCredentialBound: Counter, "iop_edge_liveness_recovery_eligibility_total", ["eligibility" = "credential_bound"], "Stalled requests, by whether another provider may be asked.";
    RecoveryRecovered: Counter, "iop_edge_liveness_recovery_results_total", ["result" = "recovered"], "Second runs of stalled requests, by what became of them.";
    RecoveryFailed: Counter, "iop_edge_liveness_recovery_results_total", ["result" = "failed"], "Second runs of stalled requests, by what became of them.";
    RecoveryStalledAgain: Counter, "iop_edge_liveness_recovery_results_total", ["result" = "stalled_again"], "Second runs of stalled requests, by what became of them.";
    RecoveryUnserved: Counter, "iop_edge_liveness_recovery_results_total", ["result" = "unserved"], "Second runs of stalled requests, by what became of them.";
    RecoveryClientGone: Counter, "iop_edge_liveness_recovery_results_total", ["result" = "client_gone"], "Second runs of stalled requests, by what became of them.";
    CommandsSent: Counter, "iop_edge_node_commands_total", [], "Commands sent to nodes, the prober's included.";
    CommandsAnswered: Counter, "iop_edge_node_commands_ended_total", ["how" = "answered"], "Ends of commands to nodes.";
    CommandsFailed: Counter, "iop_edge_node_commands_ended_total", ["how" = "failed"], "Ends of commands to nodes.";
    CommandsTimedOut: Counter, "iop_edge_node_commands_ended_total", ["how" = "timed_out"], "Ends of commands to nodes.";
    CommandsLost: Counter, "iop_edge_node_commands_ended_total", ["how" = "node_lost"], "Ends of commands to nodes.";
    Cancels: Counter, "iop_edge_runs_cancelled_total", [], "Runs that control ended.";
    ClientsGoneWaiting: Counter, "iop_edge_clients_gone_total", ["phase" = "waiting"], "Clients that left before their answer: while they waited, or when their grant or refusal was on its way.";
    ClientsGoneLate: Counter, "iop_edge_clients_gone_total", ["phase" = "late"], "Clients that left before their answer: while they waited, or when their grant or refusal was on its way.";
    Registrations: Counter, "iop_edge_node_registrations_total", [], "Registrations accepted, repeats included.";
    Activations: Counter, "iop_edge_node_activations_total", [], "Times a node became ready.";
    Fences: Counter, "iop_edge_node_fences_total", [], "Times a ready node's generation ended.";
    SupersededPending: Counter, "iop_edge_node_superseded_total", [], "Times a node that was not ready yet was put out by a newer connection.";
    Reloads: Counter, "iop_edge_config_reloads_total", [], "Configurations taken since the one at start.";
    ReloadsRefused: Counter, "iop_edge_config_reloads_refused_total", [], "Configurations and certificates that were read again and not taken.";
    RefreshesSent: Counter, "iop_edge_config_refreshes_sent_total", [], "Configuration refreshes sent to nodes.";
    RefreshesApplied: Counter, "iop_edge_config_refreshes_total", ["result" = "applied"], "Configuration refreshes by how they ended; one that was not answered in time may still be.";
    RefreshesRestartRequired: Counter, "iop_edge_config_refreshes_total", ["result" = "restart_required"], "Configuration refreshes by how they ended; one that was not answered in time may still be.";
    RefreshesFailed: Counter, "iop_edge_config_refreshes_total", ["result" = "failed"], "Configuration refreshes by how they ended; one that was not answered in time may still be.";
    RefreshesUnanswered: Counter, "iop_edge_config_refreshes_total", ["result" = "unanswered"], "Configuration refreshes by how they ended; one that was not answered in time may still be.";
    NodesOutdated: Gauge, "iop_edge_nodes_outdated", [], "Connected nodes that do not have the newest configuration.";
    NodeDrains: Counter, "iop_edge_node_drains_total", [], "Ready nodes that the Edge began to drain: at the end of their certificate, or on demand.";
    NoticesDropped: Counter, "iop_edge_node_notices_dropped_total", [], "Lifecycle notices that nobody took in time.";
    StaleEvents: Counter, "iop_edge_stale_events_total", [], "Events about connections, clients or runs that had ended; few are normal.";
    Pings: Counter, "iop_edge_shard_pings_total", [], "Liveness questions put to shards.";
    }
}

/// Durations a shard measures per operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ShardHistogram {
    TimeToFirstToken,
    RequestDuration,
}

const MS: u64 = 1_000_000;

impl ShardHistogram {
    pub const ALL: [Self; 2] = [Self::TimeToFirstToken, Self::RequestDuration];

    /// Upper bounds of the buckets, nanoseconds, ascending; one more bucket catches the rest. The
    /// bounds are those that OpenTelemetry advises for the metric.
    #[must_use]
    pub const fn bounds_ns(self) -> &'static [u64] {
        match self {
            Self::TimeToFirstToken => &[
                MS,
                5 * MS,
                10 * MS,
                20 * MS,
                40 * MS,
                60 * MS,
                80 * MS,
                100 * MS,
                250 * MS,
                500 * MS,
                750 * MS,
                1_000 * MS,
                2_500 * MS,
                5_000 * MS,
                7_500 * MS,
                10_000 * MS,
            ],
            Self::RequestDuration => &[
                10 * MS,
                20 * MS,
                40 * MS,
                80 * MS,
                160 * MS,
                320 * MS,
                640 * MS,
                1_280 * MS,
                2_560 * MS,
                5_120 * MS,
                10_240 * MS,
                20_480 * MS,
                40_960 * MS,
                81_920 * MS,
            ],
        }
    }

    /// Cells of one operation's series: every bucket, the last one, and the sum in nanoseconds.
    const fn cells(self) -> usize {
        self.bounds_ns().len() + 2
    }

    /// First cell of `operation`'s series.
    const fn cell(self, operation: Operation) -> usize {
        let base = match self {
            Self::TimeToFirstToken => HISTOGRAMS_AT,
            Self::RequestDuration => {
                HISTOGRAMS_AT + Operation::ALL.len() * Self::TimeToFirstToken.cells()
            }
        };
        base + operation as usize * self.cells()
    }

    /// Name, kind and help; the label is `gen_ai_operation_name`.
    #[must_use]
    pub const fn info(self) -> Info {
        let (name, help) = match self {
            Self::TimeToFirstToken => (
                "gen_ai_server_time_to_first_token_seconds",
                "From the last byte of a request to the first body byte of its successful answer.",
            ),
            Self::RequestDuration => (
                "gen_ai_server_request_duration_seconds",
                "From the last byte of a request to the end of its answer.",
            ),
        };
        Info {
            name,
            kind: Kind::Histogram,
            labels: &[],
            help,
        }
    }
}

/// Value of `gen_ai_operation_name`: OpenTelemetry's word where it has one, ours elsewhere.
#[must_use]
pub const fn operation_label(operation: Operation) -> &'static str {
    match operation {
        Operation::ChatCompletions => "chat",
        Operation::Completions => "text_completion",
        Operation::Embeddings => "embeddings",
        Operation::Responses => "responses",
        Operation::Messages => "messages",
        Operation::CountTokens => "count_tokens",
    }
}

const fn blame_label(blame: Blame) -> &'static str {
    match blame {
        Blame::Peer => "peer",
        Blame::Capacity => "capacity",
        Blame::Local => "local",
        Blame::Upstream => "upstream",
    }
}

// Cells of a mirror: the list's own, then one per reason, then (shards) the histograms.
const REASONS: usize = Reason::ALL.len();
const HISTOGRAMS_AT: usize = ShardMetric::ALL.len() + REASONS;
/// Cells of one operation's two series, written out: a type's length may not ask a function of its
/// own module whose body the compiler is still working on.
const HISTOGRAM_CELLS: usize = 18 + 16;
const _: () = assert!(
    HISTOGRAM_CELLS
        == ShardHistogram::TimeToFirstToken.cells() + ShardHistogram::RequestDuration.cells()
);
const SHARD_CELLS: usize = HISTOGRAMS_AT + Operation::ALL.len() * HISTOGRAM_CELLS;
const FRONT_CELLS: usize = FrontMetric::ALL.len() + REASONS;
const CONTROL_CELLS: usize = ControlMetric::ALL.len() + REASONS;

macro_rules! writer {
    ($(#[$doc:meta])* $writer:ident, $(#[$reader_doc:meta])* $reader:ident, $list:ident, $cells:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $writer(MirrorWriter<$cells>);

        $(#[$reader_doc])*
        #[derive(Clone, Debug)]
        pub struct $reader(MirrorReader<$cells>);

        impl $writer {
            /// A thread's figures, all 0, and what the exposition reads them by.
            #[must_use]
            pub fn new() -> (Self, $reader) {
                let (writer, reader) = mirror::channel();
                (Self(writer), $reader(reader))
            }

            /// Adds 1.
            #[inline]
            pub fn inc(&mut self, metric: $list) {
                self.0.add(metric as usize, 1);
            }

            /// Adds `n`.
            #[inline]
            pub fn add(&mut self, metric: $list, n: u64) {
                self.0.add(metric as usize, n);
            }

            /// Takes 1 from a gauge; one at 0 stays there.
            #[inline]
            pub fn dec(&mut self, metric: $list) {
                let value = self.0.get(metric as usize);
                debug_assert!(value > 0, "gauge {metric:?} below 0");
                self.0.set(metric as usize, value.saturating_sub(1));
            }

            /// Sets a gauge, or a counter kept elsewhere.
            #[inline]
            pub fn set(&mut self, metric: $list, value: u64) {
                self.0.set(metric as usize, value);
            }

            /// What this thread last wrote.
            #[inline]
            #[must_use]
            pub fn get(&self, metric: $list) -> u64 {
                self.0.get(metric as usize)
            }

            /// Counts one refusal or forced end that this thread decided. What control decided is
            /// control's to count, not the shard's that carries it out.
            #[inline]
            pub fn reason(&mut self, reason: Reason) {
                self.0.add($list::ALL.len() + reason as usize, 1);
            }
        }

        impl $reader {
            /// Any thread; at most a moment old.
            #[must_use]
            pub fn get(&self, metric: $list) -> u64 {
                self.0.get(metric as usize)
            }

            /// As [`Self::get`], for one reason.
            #[must_use]
            pub fn reason(&self, reason: Reason) -> u64 {
                self.0.get($list::ALL.len() + reason as usize)
            }
        }
    };
}

writer! {
    /// A shard thread's figures. No heap, no atomic read-modify-write.
    ShardMetrics,
    /// Reads a shard's figures from any thread.
    ShardReader, ShardMetric, SHARD_CELLS
}
writer! {
    /// The front thread's figures.
    FrontMetrics,
    /// Reads the front's figures from any thread.
    FrontReader, FrontMetric, FRONT_CELLS
}
writer! {
    /// The control thread's figures.
    ControlMetrics,
    /// Reads control's figures from any thread.
    ControlReader, ControlMetric, CONTROL_CELLS
}

impl ControlMetrics {
    /// Copies control's own counters. Once per turn at most; no heap.
    pub fn copy(&mut self, counters: &Counters) {
        let returned = counters
            .returns_terminal
            .wrapping_add(counters.returns_not_sent)
            .wrapping_add(counters.returns_fence)
            .wrapping_add(counters.returns_lost);
        for (metric, value) in [
            (ControlMetric::Submits, counters.submits),
            (ControlMetric::QueueEntries, counters.queue_entries),
            (ControlMetric::QueueReturns, counters.queue_returns),
            (
                ControlMetric::GrantsAtOnce,
                counters.grants.wrapping_sub(counters.grants_queued),
            ),
            (ControlMetric::GrantsQueued, counters.grants_queued),
            (ControlMetric::ReturnsTerminal, counters.returns_terminal),
            (ControlMetric::ReturnsNotSent, counters.returns_not_sent),
            (ControlMetric::ReturnsFence, counters.returns_fence),
            (ControlMetric::ReturnsLost, counters.returns_lost),
            (
                ControlMetric::LeasesHeld,
                counters.grants.wrapping_sub(returned),
            ),
            (
                ControlMetric::TerminalsComplete,
                counters.terminals_complete,
            ),
            (ControlMetric::TerminalsError, counters.terminals_error),
            (
                ControlMetric::TerminalsViolation,
                counters.terminals_violation,
            ),
            (ControlMetric::TerminalsStalled, counters.terminals_stalled),
            (ControlMetric::CommandsSent, counters.commands_sent),
            (ControlMetric::CommandsAnswered, counters.commands_answered),
            (ControlMetric::CommandsFailed, counters.commands_failed),
            (ControlMetric::CommandsTimedOut, counters.commands_timed_out),
            (ControlMetric::CommandsLost, counters.commands_lost),
            (ControlMetric::Cancels, counters.cancels),
            (
                ControlMetric::ClientsGoneWaiting,
                counters.clients_gone_waiting,
            ),
            (ControlMetric::ClientsGoneLate, counters.clients_gone_late),
            (ControlMetric::Registrations, counters.registrations),
            (ControlMetric::Activations, counters.activations),
            (ControlMetric::Fences, counters.fences),
            (
                ControlMetric::SupersededPending,
                counters.superseded_pending,
            ),
            (ControlMetric::NoticesDropped, counters.notices_dropped),
            (ControlMetric::StaleEvents, counters.stale_events),
            (ControlMetric::Pings, counters.pings),
        ] {
            self.set(metric, value);
        }
        self.copy_health(counters);
        self.copy_operations(counters);
        self.copy_recovery(counters);
        for &reason in Reason::ALL {
            let value = counters
                .refusals(reason)
                .wrapping_add(counters.node_refusals(reason));
            self.0
                .set(ControlMetric::ALL.len() + reason as usize, value);
        }
    }
}

impl ControlMetrics {
    fn copy_health(&mut self, counters: &Counters) {
        use HealthSource::{Capabilities, Stall};
        for (metric, source, outcome) in [
            (ControlMetric::StallLowered, Stall, Outcome::Lowered),
            (ControlMetric::StallMarked, Stall, Outcome::Marked),
            (ControlMetric::StallStale, Stall, Outcome::Stale),
            (ControlMetric::StallUnchanged, Stall, Outcome::Unchanged),
            (ControlMetric::StallRejected, Stall, Outcome::Rejected),
            (ControlMetric::ProbeCleared, Capabilities, Outcome::Cleared),
            (ControlMetric::ProbeMarked, Capabilities, Outcome::Marked),
            (ControlMetric::ProbeStale, Capabilities, Outcome::Stale),
            (
                ControlMetric::ProbeUnchanged,
                Capabilities,
                Outcome::Unchanged,
            ),
            (
                ControlMetric::ProbeRejected,
                Capabilities,
                Outcome::Rejected,
            ),
            (ControlMetric::HealthLowered, Stall, Outcome::Lowered),
            (ControlMetric::HealthCleared, Capabilities, Outcome::Cleared),
        ] {
            self.set(metric, counters.evidence_of(source, outcome));
        }
    }

    fn copy_operations(&mut self, counters: &Counters) {
        for (metric, value) in [
            (ControlMetric::Reloads, counters.reloads),
            (ControlMetric::RefreshesSent, counters.refreshes_sent),
            (ControlMetric::RefreshesApplied, counters.refreshes_applied),
            (
                ControlMetric::RefreshesRestartRequired,
                counters.refreshes_restart_required,
            ),
            (ControlMetric::RefreshesFailed, counters.refreshes_failed),
            (
                ControlMetric::RefreshesUnanswered,
                counters.refreshes_unanswered,
            ),
            (ControlMetric::NodesOutdated, counters.nodes_outdated),
            (ControlMetric::NodeDrains, counters.node_drains),
        ] {
            self.set(metric, value);
        }
    }

    fn copy_recovery(&mut self, counters: &Counters) {
        for (metric, eligibility) in [
            (ControlMetric::EligibleYes, Eligibility::Eligible),
            (ControlMetric::EligibleOff, Eligibility::Off),
            (ControlMetric::EligibleClientGone, Eligibility::ClientGone),
            (ControlMetric::EligibleCommitted, Eligibility::Committed),
            (
                ControlMetric::EligibleFenceUnconfirmed,
                Eligibility::FenceUnconfirmed,
            ),
            (
                ControlMetric::EligibleEvidenceRejected,
                Eligibility::EvidenceRejected,
            ),
            (
                ControlMetric::EligibleNoOtherProvider,
                Eligibility::NoOtherProvider,
            ),
            (
                ControlMetric::EligibleCredentialBound,
                Eligibility::CredentialBound,
            ),
        ] {
            self.set(metric, counters.eligibility_of(eligibility));
        }
        for (metric, result) in [
            (ControlMetric::RecoveryRecovered, Recovery::Recovered),
            (ControlMetric::RecoveryFailed, Recovery::Failed),
            (ControlMetric::RecoveryStalledAgain, Recovery::StalledAgain),
            (ControlMetric::RecoveryUnserved, Recovery::Unserved),
            (ControlMetric::RecoveryClientGone, Recovery::ClientGone),
        ] {
            self.set(metric, counters.recoveries_of(result));
        }
    }
}

impl ShardMetrics {
    /// Counts one response head by the class of its status.
    pub fn response(&mut self, status: u16) {
        self.inc(match status / 100 {
            2 => ShardMetric::Responses2xx,
            3 => ShardMetric::Responses3xx,
            4 => ShardMetric::Responses4xx,
            5 => ShardMetric::Responses5xx,
            _ => ShardMetric::ResponsesOther,
        });
    }

    /// Records one duration of `operation`, nanoseconds. Once per request.
    pub fn observe(&mut self, histogram: ShardHistogram, operation: Operation, ns: u64) {
        let bounds = histogram.bounds_ns();
        let first = histogram.cell(operation);
        let bucket = bounds
            .iter()
            .position(|&bound| ns <= bound)
            .unwrap_or(bounds.len());
        self.0.add(first + bucket, 1);
        self.0.add(first + bounds.len() + 1, ns);
    }
}
