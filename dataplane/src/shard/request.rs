//! A client's request on its way in: authentication, limits, body, model, submission. `[D-42]`
//!
//! Lives on: one shard. Bound: one request per client; its body within `body_bytes_max` and the body
//! pool, reserved before it is read. `[D-45]`
use std::sync::Arc;

use iop_control::step::Event;
use iop_proto::catalog::Operation;
use iop_proto::limits::{BODY_STEP_BYTES, NAME_BYTES_MAX};
use iop_proto::reason::Reason;

use super::Shard;
use super::body::blocks_for;
use super::client::{BodyReader, OWN_ID_BYTES, Phase};
use super::http1::{
    Allow, Asked, BodyFraming, CONTINUE, ChunkDecoder, Head, Method, Route, wipe_credentials,
};
use super::send::Framing;
use super::splice::ModelScanner;
use crate::keys::Caller;
use crate::metrics::ShardMetric;
use crate::surface::openai;

const HEX: &[u8; 16] = b"0123456789abcdef";

impl Shard {
    /// Gives the request an id of ours: the shard's seed and a count, in hex. `[D-26]`
    pub(super) fn new_request_id(&mut self, row: usize) {
        self.requests_made += 1;
        let id = u128::from(self.request_seed) << 64 | u128::from(self.requests_made);
        let own = &mut self.clients[row].own_id;
        for (digit, place) in own.iter_mut().zip(0..OWN_ID_BYTES) {
            *digit = HEX[((id >> (124 - 4 * place)) & 15) as usize];
        }
    }

    /// A head was read. Answers what needs no body; else prepares to collect one.
    pub(super) fn begin_request(&mut self, row: usize, head: Head) {
        self.metrics.inc(ShardMetric::Requests);
        self.new_request_id(row);
        let draining = self.draining;
        let client = &mut self.clients[row];
        client.epoch = Some(Arc::clone(&self.epoch));
        client.parsed = Some(head);
        client.asked = Asked {
            head_only: head.method == Method::Head,
            version: head.version,
            keep_alive: head.keep_alive && !draining,
        };
        client.framing = Framing::Plain;
        client.submitted = self.now;
        client.hard_end = None;
        client.model = None;
        let block = client
            .head
            .as_mut()
            .expect("a head was read into its block");
        let admitted = self.keys.admit(head.credential.map(|span| span.of(block)));
        wipe_credentials(block, &head);
        match head.route {
            Route::Options(allow) => self.answer_options(row, allow),
            Route::Healthz => self.answer_text(row, 200, b"ok\n"),
            Route::Readyz if draining => self.answer_text(row, 503, b"draining\n"),
            Route::Readyz => self.answer_text(row, 200, b"ready\n"),
            Route::Unknown => self.refuse_unread(row, Reason::RouteUnknown),
            Route::MethodNotAllowed(allow) => self.refuse_method(row, allow),
            Route::Models | Route::Model(_) | Route::Operation(_) => match admitted {
                Err(reason) => self.refuse_unread(row, reason),
                Ok(caller) => self.begin_admitted(row, &head, caller),
            },
        }
    }

    fn begin_admitted(&mut self, row: usize, head: &Head, caller: Caller) {
        self.clients[row].caller = caller;
        match head.route {
            Route::Models => self.answer_models(row),
            Route::Model(span) => {
                let block = self.clients[row].head.as_ref().expect("read");
                let mut name = [0; NAME_BYTES_MAX as usize];
                let model = openai::decode_model_id(span.of(block), &mut name)
                    .and_then(|name| self.config.names.model_by_name(name))
                    .filter(|&model| self.keys.permits(caller, model));
                match model {
                    Some(model) => self.answer_model(row, model),
                    None => self.refuse_unread(row, Reason::ModelUnknown),
                }
            }
            Route::Operation(operation) => self.begin_operation(row, head, operation),
            Route::Options(_)
            | Route::Healthz
            | Route::Readyz
            | Route::Unknown
            | Route::MethodNotAllowed(_) => unreachable!("answered before authentication"),
        }
    }

    fn begin_operation(&mut self, row: usize, head: &Head, operation: Operation) {
        self.clients[row].operation = operation;
        if self.draining {
            return self.refuse_unread(row, Reason::Draining);
        }
        let length_max = u64::from(self.config.limits.body_bytes_max);
        let (reader, blocks) = match head.body {
            BodyFraming::None => return self.refuse_unread(row, Reason::LengthMissing),
            BodyFraming::Length(length) if length > length_max => {
                return self.refuse_unread(row, Reason::BodyTooLarge);
            }
            BodyFraming::Length(length) => (BodyReader::Length(length), blocks_for(length)),
            BodyFraming::Chunked => (BodyReader::Chunked(ChunkDecoder::default()), 0),
        };
        if !self.reservations.reserve(&self.bodies, blocks) {
            return self.refuse_unread(row, Reason::BodyPoolFull);
        }
        let deadline = self.now.after_ms(self.config.timeouts.body_ms);
        let client = &mut self.clients[row];
        client.promised = blocks;
        client.reader = reader;
        client.scanner = ModelScanner::new();
        client.phase = Phase::Body;
        client.body_since = self.now;
        client.deadline = Some(deadline);
        if head.expect_continue {
            self.send_to(row, CONTINUE);
            if self.clients[row].phase == Phase::Closing {
                return; // there was no room for it
            }
        }
        if matches!(head.body, BodyFraming::Length(0)) {
            self.body_done(row);
        }
    }

    /// Bytes of the body; how many of them belong to it.
    pub(super) fn body_bytes(&mut self, row: usize, bytes: &[u8]) -> usize {
        self.clients[row].deadline = Some(self.now.after_ms(self.config.timeouts.body_ms));
        let (used, data, done) = match &mut self.clients[row].reader {
            BodyReader::Length(left) => {
                let take = usize::try_from(*left)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len());
                *left -= take as u64;
                (take, 0..take, *left == 0)
            }
            BodyReader::Chunked(decoder) => match decoder.step(bytes) {
                Ok(step) => (step.consumed, step.data, step.done),
                Err(reason) => {
                    self.refuse_unread(row, reason);
                    return bytes.len();
                }
            },
        };
        if let Err(reason) = self.collect(row, &bytes[data]) {
            self.refuse_unread(row, reason);
            return bytes.len();
        }
        if done && self.clients[row].phase == Phase::Body {
            self.body_done(row);
        }
        used
    }

    fn collect(&mut self, row: usize, data: &[u8]) -> Result<(), Reason> {
        let length = self.clients[row].request.body.bytes() + data.len() as u64;
        if length > self.body_bytes_max(row) {
            return Err(Reason::BodyTooLarge);
        }
        self.clients[row].scanner.push(data)?;
        if matches!(self.clients[row].reader, BodyReader::Chunked(_)) {
            self.reserve_step(row, data.len())?;
        }
        let client = &mut self.clients[row];
        let before = self.bodies.used();
        let appended = self.bodies.append(client.request.body.collecting(), data);
        let taken = (self.bodies.used() - before).min(client.promised);
        client.promised -= taken;
        self.reservations.release(taken);
        appended.map_err(|_| Reason::BodyPoolFull)
    }

    /// Makes sure that `bytes` more of a chunked body are promised; when the pool is dry the youngest
    /// incomplete body gives way. `[D-45]`
    fn reserve_step(&mut self, row: usize, bytes: usize) -> Result<(), Reason> {
        // Blocks are filled to the end before the next is taken.
        let have = self.clients[row].request.body.bytes();
        let needed = blocks_for(have + bytes as u64) - blocks_for(have);
        while self.clients[row].promised < needed {
            // A whole step, or what there is for these bytes.
            let missing = needed - self.clients[row].promised;
            let step = blocks_for(u64::from(BODY_STEP_BYTES)).max(missing);
            let reserved = [step, missing]
                .into_iter()
                .find(|&blocks| self.reservations.reserve(&self.bodies, blocks));
            if let Some(reserved) = reserved {
                self.clients[row].promised += reserved;
                continue;
            }
            match self.youngest_body() {
                Some(youngest) if youngest != row => {
                    self.refuse_unread(youngest, Reason::BodyPoolFull);
                    if self.clients[row].phase == Phase::Closing {
                        return Err(Reason::BodyPoolFull); // it gave way to that answer
                    }
                }
                _ => return Err(Reason::BodyPoolFull),
            }
        }
        Ok(())
    }

    /// The client whose incomplete chunked body began last. Looked for only when the pool is dry.
    fn youngest_body(&self) -> Option<usize> {
        let growing = self.clients.iter().enumerate().filter(|(_, client)| {
            client.phase == Phase::Body && matches!(client.reader, BodyReader::Chunked(_))
        });
        growing
            .max_by_key(|(_, client)| client.body_since)
            .map(|(row, _)| row)
    }

    /// The whole request is here: which model, and is it the caller's?
    fn body_done(&mut self, row: usize) {
        let client = &mut self.clients[row];
        self.reservations
            .release(std::mem::take(&mut client.promised));
        client.deadline = None;
        client.submitted = self.now;
        client.phase = Phase::Flushing; // nothing is unread; whoever answers decides what follows
        let span = match client.scanner.finish() {
            Ok(span) => span,
            Err(reason) => return self.refuse(row, reason, 0),
        };
        let caller = client.caller;
        let epoch = client.epoch.take();
        let epoch = epoch.unwrap_or_else(|| Arc::clone(&self.epoch));
        let model = span
            .name()
            .and_then(|name| epoch.names.model_by_name(name))
            .filter(|&model| epoch.keys.permits(caller, model));
        let Some(model) = model else {
            return self.refuse(row, Reason::ModelUnknown, 0);
        };
        let threshold = u64::from(epoch.names.model(model).long_threshold_bytes);
        let client = &mut self.clients[row];
        client.model = Some(model);
        client.request.model = span.start..span.end;
        client.request.member = span.member_start..span.member_end;
        client.request.stream = span.stream;
        client.request.include_usage = span.include_usage;
        client.request.tools = span.tools;
        client.phase = Phase::Waiting;
        let bytes = client.request.body.bytes();
        client.body_bytes_in = bytes;
        let operation = client.operation;
        let client = self.client_reference(row);
        self.outbox.owe(Event::Submit {
            client,
            model,
            operation,
            long: bytes >= threshold,
            body_bytes: u32::try_from(bytes).expect("a body is at most body_bytes_max"),
        });
    }

    fn refuse_method(&mut self, row: usize, allow: Allow) {
        self.refuse_with(row, Reason::MethodNotAllowed, 0, Some(allow));
    }
}
