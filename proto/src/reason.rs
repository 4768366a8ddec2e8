//! Why something was refused or ended: one list for wire text, HTTP status, metric label and blame.
//!
//! Every error an Edge makes is one of these; matches on `Reason` have no wildcard arm.

/// Whose fault it is decides what happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The peer's doing: close or refuse, never retry.
    Peer,
    /// We are full or waiting for a node: say when to come back.
    Capacity,
    /// Our bug or our machine: count it, shed the one request.
    Local,
    /// The provider or its node failed behind us.
    Upstream,
}

/// Who an error answer names in `x-iop-error-source`. `[D-11]` `[D-40]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Edge,
    Node,
    Provider,
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident: $label:literal, $status:literal, $blame:ident, $source:ident, $text:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Metric label, log field and `code` of an error answer: closed set, lower snake case.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)* }
            }

            /// HTTP status where the reason answers an HTTP request; 0 where it never does.
            #[must_use]
            pub const fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            #[must_use]
            pub const fn blame(self) -> Blame {
                match self { $(Self::$name => Blame::$blame,)* }
            }

            #[must_use]
            pub const fn source(self) -> Source {
                match self { $(Self::$name => Source::$source,)* }
            }

            /// One sentence for a peer or a client; no internals.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

reasons! {
    // ── HTTP request, before anything is asked of a node ──
    HeadMalformed: "head_malformed", 400, Peer, Edge, "The request head is not valid HTTP/1.1.";
    HeadTooLong: "head_too_long", 431, Peer, Edge, "The request head is too long.";
    RequestLineTooLong: "request_line_too_long", 414, Peer, Edge, "The request line is too long.";
    FramingAmbiguous: "framing_ambiguous", 400, Peer, Edge, "The request's body length is ambiguous.";
    TransferCodingUnknown: "transfer_coding_unknown", 501, Peer, Edge, "The transfer coding is not supported.";
    VersionUnsupported: "version_unsupported", 505, Peer, Edge, "The HTTP version is not supported.";
    ExpectationUnknown: "expectation_unknown", 417, Peer, Edge, "The expectation cannot be met.";
    ChunkMalformed: "chunk_malformed", 400, Peer, Edge, "The chunked body is malformed.";
    LengthMissing: "length_missing", 411, Peer, Edge, "The request needs a body.";
    RouteUnknown: "route_unknown", 404, Peer, Edge, "Unknown path.";
    MethodNotAllowed: "method_not_allowed", 405, Peer, Edge, "The method is not allowed on this path.";
    UpgradeRefused: "upgrade_refused", 501, Peer, Edge, "Protocol upgrades are not supported.";
    KeyMissing: "invalid_api_key", 401, Peer, Edge, "Missing or incorrect API key.";
    BodyTooLarge: "body_too_large", 413, Peer, Edge, "The request body is too large.";
    BodyPoolFull: "body_pool_full", 503, Capacity, Edge, "The server has no room for the request body.";
    HeadTimeout: "head_timeout", 408, Peer, Edge, "The request head did not arrive in time.";
    BodyTimeout: "body_timeout", 408, Peer, Edge, "The request body stopped arriving.";
    JsonMalformed: "json_malformed", 400, Peer, Edge, "The request body is not a JSON object.";
    ModelMissing: "model_missing", 400, Peer, Edge, "The request must name a model as a string.";
    ModelDuplicate: "model_duplicate", 400, Peer, Edge, "The request names its model more than once.";
    ModelUnknown: "model_not_found", 404, Peer, Edge, "The model does not exist or you do not have access to it.";
    Draining: "draining", 503, Capacity, Edge, "The server is shutting down.";
    ClientsFull: "clients_full", 503, Capacity, Edge, "The server has no room for the connection.";

    // ── queue and lease ──
    NoProviderConfigured: "no_provider_configured", 503, Capacity, Edge, "No provider of the model supports this operation.";
    QueueFull: "queue_full", 429, Capacity, Edge, "Too many requests are waiting for the model.";
    QueueTimeout: "queue_timeout", 503, Capacity, Edge, "No provider of the model became free in time.";
    RunsFull: "runs_full", 503, Capacity, Edge, "The server has no room for the request.";
    DispatchTimeout: "dispatch_timeout", 503, Local, Edge, "The request could not be handed to its node in time.";
    CredentialMissing: "credential_missing", 403, Peer, Edge, "No provider credential is stored for this key and model.";
    CredentialFailed: "credential_failed", 503, Local, Edge, "The provider credential could not be issued.";
    ResponseTimeout: "response_timeout", 504, Upstream, Edge, "The provider did not answer in time.";
    NodeLost: "node_lost", 503, Upstream, Node, "The provider's node disconnected.";

    // ── answers of a node or provider ──
    ProviderUnreachable: "provider_unreachable", 502, Upstream, Provider, "The provider could not be reached or broke off.";
    NodeRejected: "node_rejected", 502, Upstream, Node, "The node refused the request.";
    NodeDraining: "node_draining", 503, Capacity, Node, "The provider's node is shutting down.";
    DeadlineExceeded: "deadline_exceeded", 504, Upstream, Node, "The request's deadline passed.";
    ResponseStalled: "response_stalled", 504, Upstream, Provider, "The provider stopped answering.";
    StreamViolation: "stream_violation", 502, Upstream, Node, "The node broke the order of the answer.";
    ResponseMalformed: "response_malformed", 502, Upstream, Provider, "The provider's answer cannot be forwarded.";
    LengthMismatch: "length_mismatch", 502, Upstream, Provider, "The provider's answer does not have the announced length.";

    AnswerTooLong: "answer_too_long", 502, Upstream, Provider, "The provider's answer is too long for a request without stream.";

    // ── ends of a client's request that need no answer, mostly ──
    ClientGone: "client_gone", 0, Peer, Edge, "The client disconnected.";
    ClientTooSlow: "client_too_slow", 0, Peer, Edge, "The client did not read the answer.";
    OutputPoolFull: "output_pool_full", 503, Capacity, Edge, "The server has no room for pending output.";

    // ── node connections: handshake and identity ──
    TlsHandshakeFailed: "tls_handshake_failed", 0, Peer, Edge, "TLS handshake failed.";
    TlsHandshakeTimeout: "tls_handshake_timeout", 0, Peer, Edge, "TLS handshake did not finish in time.";
    PlaintextOnTlsPort: "plaintext_on_tls_port", 0, Peer, Edge, "The peer does not speak TLS on a TLS port.";
    TlsOnPlaintextPort: "tls_on_plaintext_port", 0, Peer, Edge, "The peer speaks TLS on a plaintext port.";
    CertificateUntrusted: "certificate_untrusted", 0, Peer, Edge, "The peer's certificate is not signed by a trusted authority.";
    CertificateExpired: "certificate_expired", 0, Peer, Edge, "The peer's certificate is not valid now.";
    IdentityInvalid: "identity_invalid", 0, Peer, Edge, "The peer's certificate breaks the rules of a workload identity.";
    AlpnMismatch: "alpn_mismatch", 0, Peer, Edge, "The peer does not speak this protocol version.";
    IdentityMissing: "identity_missing", 0, Peer, Edge, "The peer's certificate carries no workload identity.";
    IdentityWrongRole: "identity_wrong_role", 0, Peer, Edge, "The peer's certificate has the wrong role.";
    IdentityWrongName: "identity_wrong_name", 0, Peer, Edge, "The peer's certificate names nobody configured.";

    // ── node connections: registration, readiness, envelopes ──
    NodeUnknown: "node_unknown", 0, Peer, Edge, "unknown node id";
    NodeNotCertified: "node_not_certified", 0, Peer, Edge, "the certificate does not name this node id";
    SecondNodeId: "second_node_id", 0, Peer, Edge, "this connection already owns another node id";
    NotRegistered: "not_registered", 0, Peer, Edge, "this connection has not registered";
    NotOwner: "not_owner", 0, Peer, Edge, "another connection owns this node id";
    NodeIdMismatch: "node_id_mismatch", 0, Peer, Edge, "this connection registered another node id";
    SessionsFull: "sessions_full", 0, Capacity, Edge, "the edge has no room for another node";
    RegistrationTimeout: "registration_timeout", 0, Peer, Edge, "no registration in time";
    HeartbeatTimeout: "heartbeat_timeout", 0, Peer, Edge, "no byte in time";
    NodeRemoved: "node_removed", 0, Peer, Edge, "the configuration no longer has this node id";
    NodeDrained: "node_drained", 0, Peer, Edge, "the operator drained this node";
    Superseded: "superseded", 0, Peer, Edge, "a newer connection registered this node id";
    PeerClosed: "peer_closed", 0, Peer, Edge, "the peer closed the connection";
    SocketError: "socket_error", 0, Peer, Edge, "the connection broke";
    RecordInvalid: "record_invalid", 0, Peer, Edge, "a TLS record could not be opened";
    SealFailed: "seal_failed", 0, Local, Edge, "a TLS record could not be sealed";
    EnvelopeEmpty: "envelope_empty", 0, Peer, Edge, "an envelope of length zero";
    EnvelopeTooLong: "envelope_too_long", 0, Peer, Edge, "an envelope over its limit";
    EnvelopeMalformed: "envelope_malformed", 0, Peer, Edge, "an envelope that cannot be decoded";
    EnvelopeWrongDirection: "envelope_wrong_direction", 0, Peer, Edge, "a message that only an edge may send";
    EnvelopeWrongState: "envelope_wrong_state", 0, Peer, Edge, "a message that is not allowed before registration";
    EnvelopeUnknown: "envelope_unknown", 0, Peer, Edge, "a message of unknown type before registration";
    AssemblyPoolFull: "assembly_pool_full", 0, Capacity, Edge, "no room to assemble a message";
    ViolationsTooMany: "violations_too_many", 0, Peer, Edge, "too many stream violations";
    ReplyFlood: "reply_flood", 0, Peer, Edge, "more requests than answers could be sent";
    Stopped: "stopped", 0, Capacity, Edge, "the edge is shutting down";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_unique_and_fit_a_metric_label() {
        let mut labels: Vec<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert!(labels.iter().all(|label| {
            !label.is_empty() && label.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
        }));
        labels.sort_unstable();
        labels.dedup();
        assert_eq!(labels.len(), Reason::ALL.len());
    }

    #[test]
    fn every_text_is_a_sentence_and_every_status_is_an_error() {
        for reason in Reason::ALL {
            assert!(!reason.text().is_empty());
            assert!(
                matches!(reason.status(), 0 | 400..=599),
                "{}",
                reason.label()
            );
        }
    }
}
