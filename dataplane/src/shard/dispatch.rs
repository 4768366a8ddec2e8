//! A run's request as it goes on the wire: the lease's names, the client's headers, the served model.
//!
//! Lives on: the shard of the node's session. Bound: a request head fits the scratch buffer.
use iop_proto::limits::{HEADERS_MAX, NAME_BYTES_MAX};
use iop_proto::reason::Reason;
use iop_proto::view::TunnelRequestHead;

use super::Shard;
use super::splice::write_json_string;

/// Forwarded headers and the request id.
const HEADER_ROWS: usize = HEADERS_MAX as usize + 1;
/// A target as a JSON string, were each of its bytes escaped.
const MODEL_JSON_BYTES_MAX: usize = 6 * NAME_BYTES_MAX as usize + 2;

impl Shard {
    /// Writes everything of run `run`'s request before the body's first byte to the scratch buffer.
    ///
    /// # Errors
    /// When it cannot be put on the wire: the request fails, its session does not.
    pub(super) fn write_request_head(&mut self, run: usize) -> Result<usize, Reason> {
        let mut model = [0; MODEL_JSON_BYTES_MAX];
        let provider = self.config.names.provider(self.runs[run].provider);
        if !provider.kind.is_tunnel() {
            return Err(Reason::NoProviderConfigured); // normalized runs come in a later version
        }
        let model = write_json_string(&mut model, &provider.target).ok_or(Reason::NodeRejected)?;
        let body_len = self.runs[run].request.spliced_bytes(model);
        let body_len = u32::try_from(body_len).map_err(|_| Reason::BodyTooLarge)?;
        let row = self.runs[run].client.0 as usize;
        let client = &self.clients[row];
        let head = client.parsed.as_ref().ok_or(Reason::NodeRejected)?;
        let block = client.head.as_ref().ok_or(Reason::NodeRejected)?;
        let empty: (&[u8], &[u8]) = (&[], &[]);
        let mut headers = [empty; HEADER_ROWS];
        let mut count = 0;
        head.visit_forwarded(block, &client.own_id, |name, value| {
            if let Some(place) = headers.get_mut(count) {
                *place = (name, value);
                count += 1;
            }
        });
        let query = head.query.map_or(&[][..], |span| span.of(block));
        let query = str::from_utf8(query).map_err(|_| Reason::NodeRejected)?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let request = TunnelRequestHead {
            query,
            ..self.request_head(run, body_len)
        };
        let written = request.before_body(headers[..count].iter().copied(), &mut scratch);
        self.scratch = scratch;
        written.map_err(|_| Reason::HeadTooLong)
    }

    /// Writes the `model` value that the provider knows.
    pub(super) fn write_model(&mut self, run: usize) -> usize {
        let provider = self.config.names.provider(self.runs[run].provider);
        write_json_string(&mut self.scratch[..], &provider.target).expect("scratch is large")
    }

    /// Writes everything behind the body.
    pub(super) fn write_request_tail(&mut self, run: usize) -> Result<usize, Reason> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let written = self.request_head(run, 0).after_body(&mut scratch);
        self.scratch = scratch;
        written.map_err(|_| Reason::EnvelopeTooLong)
    }

    /// Adapter and target of the run's lease: what its request said, and its evidence must. `[I3.5]`
    pub(super) fn leased_binding(&self, run: usize) -> (&str, &str) {
        let provider = self.config.names.provider(self.runs[run].provider);
        (&provider.adapter, &provider.target)
    }

    fn request_head(&self, run: usize, body_len: u32) -> TunnelRequestHead<'_> {
        let run = &self.runs[run];
        let provider = self.config.names.provider(run.provider);
        let route = provider.route(run.operation);
        TunnelRequestHead {
            run_id: run.id.as_str(),
            adapter: &provider.adapter,
            target: &provider.target,
            method: route.map_or("POST", |route| &route.method),
            path: route.map_or_else(|| run.operation.path(), |route| &route.path),
            query: "",
            body_len,
            stream: run.request.stream,
            timeout_sec: i32::try_from(provider.timeout_s).unwrap_or(i32::MAX),
            operation: route
                .and_then(|route| route.operation.wire_name())
                .unwrap_or(""),
            stall_timeout_ms: i64::try_from(provider.stall_timeout_ms).unwrap_or(i64::MAX),
        }
    }
}
