//! A run's request as it goes on the wire: the lease's names, the client's headers or ids, the served
//! model in the place of the client's.
//!
//! Lives on: the shard of the node's session. Bound: a request head fits the scratch buffer.
//!
//! Which message it is depends on the selected provider alone. `[R-233]` `[R-234]` `[I3.4]`
use iop_proto::catalog::Operation;
use iop_proto::limits::{HEADERS_MAX, NAME_BYTES_MAX};
use iop_proto::reason::Reason;
use iop_proto::view::{CredentialPair, RunRequestHead, TunnelRequestHead};

use super::Shard;
use super::splice::write_json_string;

/// Forwarded headers and the request id.
const HEADER_ROWS: usize = HEADERS_MAX as usize + 1;
/// A target as a JSON string, were each of its bytes escaped.
const MODEL_JSON_BYTES_MAX: usize = 6 * NAME_BYTES_MAX as usize + 2;
/// Headers of the client that go along as a run's metadata: they name the request, nothing more.
/// `[D-26]` `[R-299]`
const RUN_METADATA: [&str; 3] = ["traceparent", "tracestate", "x-request-id"];

impl Shard {
    /// Writes everything of run `run`'s request before the body's first byte to the scratch buffer.
    /// `timeout_s` goes behind the body and is counted in the length that stands here.
    ///
    /// # Errors
    /// When it cannot be put on the wire: the request fails, its session does not.
    pub(super) fn write_request_head(
        &mut self,
        run: usize,
        timeout_s: u32,
    ) -> Result<usize, Reason> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let written = if self.runs[run].is_tunnel {
            self.write_tunnel_head(run, timeout_s, &mut scratch)
        } else {
            self.write_run_head(run, timeout_s, &mut scratch)
        };
        self.scratch = scratch;
        written
    }

    fn write_tunnel_head(
        &self,
        run: usize,
        timeout_s: u32,
        out: &mut [u8],
    ) -> Result<usize, Reason> {
        let mut model = [0; MODEL_JSON_BYTES_MAX];
        let provider = self.runs[run].lease();
        let model = write_json_string(&mut model, &provider.target).ok_or(Reason::NodeRejected)?;
        let body_len = self.runs[run].request.spliced_bytes(true, model);
        let body_len = u32::try_from(body_len).map_err(|_| Reason::BodyTooLarge)?;
        let empty: (&[u8], &[u8]) = (&[], &[]);
        let mut headers = [empty; HEADER_ROWS];
        let mut count = 0;
        self.visit_forwarded(run, |name, value| {
            if let Some(place) = headers.get_mut(count) {
                *place = (name, value);
                count += 1;
            }
        })?;
        let request = TunnelRequestHead {
            query: self.query(run)?,
            ..self.tunnel_head(run, timeout_s, body_len)
        };
        request
            .before_body(headers[..count].iter().copied(), out)
            .map_err(|_| Reason::HeadTooLong)
    }

    fn write_run_head(&self, run: usize, timeout_s: u32, out: &mut [u8]) -> Result<usize, Reason> {
        if !matches!(
            self.runs[run].operation,
            Operation::ChatCompletions | Operation::Completions
        ) {
            return Err(Reason::NoProviderConfigured); // the configuration admits no other
        }
        let input_len = self.runs[run].request.spliced_bytes(false, 0);
        let input_len = u32::try_from(input_len).map_err(|_| Reason::BodyTooLarge)?;
        let mut metadata = [("", ""); RUN_METADATA.len()];
        let mut count = 0;
        self.visit_forwarded(run, |name, value| {
            let known = RUN_METADATA
                .into_iter()
                .find(|known| name.eq_ignore_ascii_case(known.as_bytes()));
            // A header's value may be any bytes, a string of the wire may not.
            if let (Some(key), Ok(value)) = (known, core::str::from_utf8(value))
                && !metadata[..count].iter().any(|&(taken, _)| taken == key)
            {
                metadata[count] = (key, value);
                count += 1;
            }
        })?;
        self.run_head(run, timeout_s, input_len, &metadata[..count])
            .before_input(out)
            .map_err(|_| Reason::HeadTooLong)
    }

    /// The query of the client's path.
    fn query(&self, run: usize) -> Result<&str, Reason> {
        let client = &self.clients[self.runs[run].client.0 as usize];
        let head = client.parsed.as_ref().ok_or(Reason::NodeRejected)?;
        let block = client.head.as_ref().ok_or(Reason::NodeRejected)?;
        let query = head.query.map_or(&[][..], |span| span.of(block));
        str::from_utf8(query).map_err(|_| Reason::NodeRejected)
    }

    /// Calls `f(name, value)` for each header of the client that goes on, and for the request id.
    fn visit_forwarded<'a>(
        &'a self,
        run: usize,
        f: impl FnMut(&'a [u8], &'a [u8]),
    ) -> Result<(), Reason> {
        let client = &self.clients[self.runs[run].client.0 as usize];
        let head = client.parsed.as_ref().ok_or(Reason::NodeRejected)?;
        let block = client.head.as_ref().ok_or(Reason::NodeRejected)?;
        head.visit_forwarded(block, &client.own_id, f);
        Ok(())
    }

    /// Writes what stands in the place of the client's `model`: the value that the provider knows; in a
    /// normalized run, whose target says it, nothing.
    pub(super) fn write_model(&mut self, run: usize) -> usize {
        if !self.runs[run].is_tunnel {
            return 0;
        }
        let provider = self.runs[run].lease();
        write_json_string(&mut self.scratch[..], &provider.target).expect("scratch is large")
    }

    /// Writes everything behind the body; `timeout_s` is what its head was written for.
    pub(super) fn write_request_tail(
        &mut self,
        run: usize,
        timeout_s: u32,
    ) -> Result<usize, Reason> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let written = if self.runs[run].is_tunnel {
            self.tunnel_head(run, timeout_s, 0).after_body(&mut scratch)
        } else {
            self.run_head(run, timeout_s, 0, &[])
                .after_input(&mut scratch)
        };
        self.scratch = scratch;
        written.map_err(|_| Reason::EnvelopeTooLong)
    }

    /// Adapter and target of the run's lease: what its request said, and its evidence must. `[I3.5]`
    pub(super) fn leased_binding(&self, run: usize) -> (&str, &str) {
        let provider = self.runs[run].lease();
        (&provider.adapter, &provider.target)
    }

    fn tunnel_head(&self, run: usize, timeout_s: u32, body_len: u32) -> TunnelRequestHead<'_> {
        let run = &self.runs[run];
        let provider = run.lease();
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
            timeout_sec: i32::try_from(timeout_s).unwrap_or(i32::MAX),
            operation: route
                .and_then(|route| route.operation.wire_name())
                .unwrap_or(""),
            credential: run.credential.as_ref().map(|pair| CredentialPair {
                lease: &pair.lease,
                binding: &pair.binding,
            }),
            stall_timeout_ms: i64::try_from(provider.stall_timeout_ms).unwrap_or(i64::MAX),
        }
    }

    fn run_head<'a>(
        &'a self,
        run: usize,
        timeout_s: u32,
        input_len: u32,
        metadata: &'a [(&'a str, &'a str)],
    ) -> RunRequestHead<'a> {
        let run = &self.runs[run];
        let provider = run.lease();
        RunRequestHead {
            run_id: run.id.as_str(),
            adapter: &provider.adapter,
            target: &provider.target,
            metadata,
            input_len,
            timeout_sec: i32::try_from(timeout_s).unwrap_or(i32::MAX),
            stall_timeout_ms: i64::try_from(provider.stall_timeout_ms).unwrap_or(i64::MAX),
        }
    }
}
