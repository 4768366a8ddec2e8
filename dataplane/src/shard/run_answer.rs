//! HOT. A normalized run's answer on its way to an OpenAI client: each event at once as an event of its
//! stream, or the text gathered for one object.
//!
//! Lives on: the client's shard. Bound: `GATHERED_ANSWER_BYTES_MAX` gathered and
//! `HELD_TOOL_TEXT_BYTES_MAX` held back per client, both in blocks of the output pool and of at most
//! half of it.
//!
//! Nothing reaches the client before the first text or the end: until then a failure is an answer of
//! its own. `[D-40]`
use iop_proto::catalog::Operation;
use iop_proto::domain::{Usage, run_key};
use iop_proto::limits::{
    GATHERED_ANSWER_BYTES_MAX, HELD_TOOL_TEXT_BYTES_MAX, NAME_BYTES_MAX, RECORD_PLAIN_BYTES_MAX,
};
use iop_proto::reason::Reason;
use iop_proto::view::RunEventView;

use super::Shard;
use super::body::blocks_for;
use super::buffer::{Chain, Chains};
use super::client::{Client, Phase};
use super::http1::{CHUNK_END, CHUNK_HEAD_BYTES_MAX, write_chunk_head, write_simple_head};
use super::run::NONE;
use super::send::{Framing, Output, SendError, Sender};
use crate::surface::openai::run::{
    CALLS, DONE, ROLE, Shape, USAGE_BYTES_MAX, UsageField, finish_choice, finish_reason, shorter,
    text_choice, write_usage,
};
use crate::surface::openai::tools::{self, Hold, Part};
use crate::surface::{self, json};
use crate::text::{Writer, json_escaped};
use crate::tls::Records;

/// What an event holds beside its choice: fixed words, id, time, the model's name were it all escapes.
const EVENT_BYTES_EXTRA: usize = 256 + 6 * NAME_BYTES_MAX as usize;
/// A head of ours: fixed fields, a length, a request id.
const HEAD_ROOM_BYTES: usize = 1024;
const HOLDS_EPOCH: &str = "a normalized run's client holds its configuration";
const EVENT_STREAM: [(&[u8], &[u8]); 2] = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
];

/// What a client's answer has come to, while its request is a normalized run.
#[derive(Debug)]
pub(super) struct RunAnswer {
    begun: bool,
    /// Unix seconds when it began.
    created: u64,
    /// The node said that the text may hold tool calls. `[R-308]`
    marked: bool,
    hold: Hold,
    held: Chain,
    /// Text as the inside of a JSON string.
    gathered: Chain,
    /// The newest that came: an observation. `[A-50]`
    usage: Option<Usage>,
}

impl RunAnswer {
    pub(super) const NONE: Self = Self {
        begun: false,
        created: 0,
        marked: false,
        hold: Hold::Off,
        held: Chain::EMPTY,
        gathered: Chain::EMPTY,
        usage: None,
    };

    /// Gives back what it holds.
    pub(super) fn clear(&mut self, pool: &mut Chains) {
        pool.clear(&mut self.held);
        pool.clear(&mut self.gathered);
        *self = Self::NONE;
    }
}

/// Where an answer's tool calls come from.
#[derive(Clone)]
enum Calls<'e> {
    None,
    Reported(json::Elements<'e>),
    /// Blocks of this text.
    InText(&'e [u8]),
}

impl Shard {
    /// What any event may say beside its text.
    pub(super) fn client_observes(&mut self, run: usize, event: &RunEventView<'_>) {
        let answer = &mut self.clients[self.runs[run].client.0 as usize].answer;
        answer.usage = event.usage.or(answer.usage);
        let key = run_key::TEXT_TOOL_FALLBACK.as_bytes();
        answer.marked |= event.metadata.get(key) == Some(b"true");
    }

    /// A delta's text for the client of `run`.
    pub(super) fn client_text(&mut self, run: usize, text: &[u8]) {
        self.begin_answer(run);
        if let Err(reason) = self.take_text(run, text) {
            self.fail_run(run, reason);
        }
    }

    fn take_text(&mut self, run: usize, text: &[u8]) -> Result<(), Reason> {
        if !self.runs[run].has_client() {
            return Ok(());
        }
        let row = self.runs[run].client.0 as usize;
        let taken = self.clients[row].answer.hold.take(text);
        self.put_text(run, taken.released)?;
        self.put_text(run, taken.passes)?;
        if taken.opens {
            self.hold_text(run, tools::OPEN)?;
        }
        self.hold_text(run, taken.held)
    }

    /// The run is complete: its client gets the rest, and is its own from here on.
    pub(super) fn client_completes(&mut self, run: usize, event: &RunEventView<'_>) {
        self.begin_answer(run);
        let mut scratch = std::mem::take(&mut self.scratch);
        let completed = self.complete_answer(run, event, &mut scratch);
        self.scratch = scratch; // a failure's answer is written in it
        if let Err(reason) = completed {
            self.fail_run(run, reason);
        } else if self.runs[run].has_client() {
            self.end_client(run, Ok(()));
        }
    }

    // ── begin and text ───────────────────────────────────────────────────────────────────────────

    /// Begins the answer, once. Afterwards the client may be gone, as after everything that sends.
    fn begin_answer(&mut self, run: usize) {
        let row = self.runs[run].client.0 as usize;
        let request = &self.runs[run].request;
        let is_chat = self.runs[run].operation == Operation::ChatCompletions;
        let answer = &mut self.clients[row].answer;
        if std::mem::replace(&mut answer.begun, true) {
            return;
        }
        answer.created = self.epoch_s + self.now.as_nanos() / 1_000_000_000;
        // Only an answer to an offer of tools can hold calls; holding back what is gathered costs nothing.
        if is_chat && (!request.stream || request.tools || answer.marked) {
            answer.hold = Hold::Line(0);
        }
        if request.stream {
            self.client_start(run, 200, EVENT_STREAM.into_iter());
            if is_chat {
                self.send_choice(run, [ROLE].into_iter());
            }
        }
    }

    /// Text that is the client's.
    ///
    /// # Errors
    /// When it cannot be gathered.
    fn put_text(&mut self, run: usize, text: &[u8]) -> Result<(), Reason> {
        if text.is_empty() || !self.runs[run].has_client() {
            return Ok(());
        }
        let escaped = json_escaped(text);
        if self.runs[run].request.stream {
            let [before, behind] = text_choice(self.runs[run].operation);
            self.send_choice(run, [before].into_iter().chain(escaped).chain([behind]));
            return Ok(());
        }
        let gathered = &mut self.clients[self.runs[run].client.0 as usize]
            .answer
            .gathered;
        let bytes = escaped.clone().map(<[u8]>::len).sum::<usize>() as u64;
        if gathered.bytes() + bytes > u64::from(GATHERED_ANSWER_BYTES_MAX) {
            return Err(Reason::AnswerTooLong);
        }
        for piece in escaped {
            if !append_within_half(&mut self.sender.pool, gathered, piece) {
                return Err(Reason::OutputPoolFull);
            }
        }
        Ok(())
    }

    /// Text that may be tool calls. More than is ever held is none.
    fn hold_text(&mut self, run: usize, text: &[u8]) -> Result<(), Reason> {
        if text.is_empty() || !self.runs[run].has_client() {
            return Ok(());
        }
        let row = self.runs[run].client.0 as usize;
        let answer = &mut self.clients[row].answer;
        let fits = answer.held.bytes() + text.len() as u64 <= u64::from(HELD_TOOL_TEXT_BYTES_MAX);
        if answer.hold == Hold::Block
            && fits
            && append_within_half(&mut self.sender.pool, &mut answer.held, text)
        {
            return Ok(());
        }
        answer.hold = Hold::Off;
        let mut scratch = std::mem::take(&mut self.scratch);
        let held = self.take_held(row, &mut scratch);
        let put = self.put_text(run, &scratch[..held]);
        self.scratch = scratch;
        put.and_then(|()| self.put_text(run, text))
    }

    /// Moves what is held back to the front of `out`; how much it is.
    fn take_held(&mut self, row: usize, out: &mut [u8]) -> usize {
        let mut held = self.clients[row].answer.held.take();
        let mut length = 0;
        for piece in self.sender.pool.pieces(&held) {
            out[length..length + piece.len()].copy_from_slice(piece);
            length += piece.len();
        }
        self.sender.pool.clear(&mut held);
        length
    }

    // ── end ──────────────────────────────────────────────────────────────────────────────────────

    /// Sends what was held back, tool calls, and how the answer ended. `scratch` holds text meanwhile.
    fn complete_answer(
        &mut self,
        run: usize,
        event: &RunEventView<'_>,
        scratch: &mut [u8],
    ) -> Result<(), Reason> {
        if !self.runs[run].has_client() {
            return Ok(());
        }
        let row = self.runs[run].client.0 as usize;
        let hold = std::mem::replace(&mut self.clients[row].answer.hold, Hold::Off);
        self.put_text(run, hold.partial())?;
        let held = self.take_held(row, scratch);
        let held = &scratch[..held];
        let calls = self.calls_of(run, event, held);
        match &calls {
            Calls::InText(text) => {
                let is_blank = |text: &[u8]| json::blank_len(text) == text.len();
                for part in tools::parts(text) {
                    if let Part::Text(text) = part
                        && !is_blank(text)
                    {
                        self.put_text(run, text)?;
                    }
                }
            }
            Calls::None | Calls::Reported(_) => self.put_text(run, held)?,
        }
        let said = event.metadata.get(run_key::FINISH_REASON.as_bytes());
        let finish = finish_reason(said, !matches!(calls, Calls::None));
        if self.runs[run].request.stream {
            self.end_stream(run, calls, finish);
        } else if self.runs[run].has_client() {
            let id = self.clients[row].own_id;
            match calls {
                Calls::None => self.answer_whole(run, None::<core::iter::Empty<_>>, finish),
                Calls::Reported(calls) => {
                    self.answer_whole(run, Some(tools::whole_calls(calls)), finish);
                }
                Calls::InText(text) => {
                    self.answer_whole(run, Some(tools::restored(text, &id, false)), finish);
                }
            }
        }
        Ok(())
    }

    /// The calls that a complete run's answer has. `[R-303]` `[R-304]` `[R-308]`
    fn calls_of<'e>(&self, run: usize, event: &RunEventView<'e>, held: &'e [u8]) -> Calls<'e> {
        if self.runs[run].operation != Operation::ChatCompletions || !self.runs[run].has_client() {
            return Calls::None;
        }
        let reported = event.metadata.get(run_key::TOOL_CALLS.as_bytes());
        if let Some(calls) = reported.and_then(tools::reported) {
            return Calls::Reported(calls);
        }
        let marked = self.clients[self.runs[run].client.0 as usize].answer.marked;
        let is_call = |part| matches!(part, Part::Call { .. });
        if marked && tools::parts(held).any(is_call) {
            Calls::InText(held)
        } else {
            Calls::None
        }
    }

    fn end_stream(&mut self, run: usize, calls: Calls<'_>, finish: &'static str) {
        let [before, behind] = CALLS.map(|part| [part].into_iter());
        if !self.runs[run].has_client() {
            return;
        }
        let row = self.runs[run].client.0 as usize;
        let (id, usage) = (self.clients[row].own_id, self.clients[row].answer.usage);
        match calls {
            Calls::None => {}
            Calls::Reported(calls) => {
                self.send_choice(run, before.chain(tools::delta_calls(calls)).chain(behind));
            }
            Calls::InText(text) => {
                let calls = tools::restored(text, &id, true);
                self.send_choice(run, before.chain(calls).chain(behind));
            }
        }
        let [before, behind] = finish_choice(self.runs[run].operation);
        self.send_choice(run, [before, finish.as_bytes(), behind].into_iter());
        if let Some(usage) = usage.filter(|_| self.runs[run].request.include_usage) {
            let mut out = [0; USAGE_BYTES_MAX];
            let length = write_usage(&mut out, usage);
            let usage = UsageField::Is(&out[..length]);
            self.send_event(run, core::iter::empty(), usage);
        }
        if self.runs[run].has_client() {
            self.send_body(row, [DONE].into_iter());
        }
    }

    /// The gathered answer, as one object.
    fn answer_whole<'e>(
        &mut self,
        run: usize,
        calls: Option<impl Iterator<Item = &'e [u8]> + Clone>,
        finish: &'static str,
    ) {
        let row = self.runs[run].client.0 as usize;
        self.runs[run].client = (NONE, 0);
        self.clients[row].status = 200;
        self.note_first_byte(row);
        let mut gathered = self.clients[row].answer.gathered.take();
        let is_null = gathered.is_empty() && calls.is_some();
        let mut usage = [0; USAGE_BYTES_MAX];
        let usage = match self.clients[row].answer.usage {
            None => UsageField::Absent,
            Some(counts) => {
                let length = write_usage(&mut usage, counts);
                UsageField::Is(&usage[..length])
            }
        };
        let mut created = [0; DECIMAL_BYTES_MAX];
        let client = &self.clients[row];
        let id = client.own_id;
        let epoch = std::sync::Arc::clone(client.epoch.as_ref().expect(HOLDS_EPOCH)); // once per request
        let shape = Shape {
            operation: client.operation,
            id: &id,
            created: decimal(client.answer.created, &mut created),
            model: epoch
                .catalog
                .name(client.model.expect("a run is of a model")),
        };
        let before = shape.before_text(is_null);
        let behind = shape.behind_text(is_null, calls, finish, usage);
        let fixed = before.clone().chain(behind.clone());
        let length = fixed.map(|part| part.len() as u64).sum::<u64>() + gathered.bytes();
        let mut head = [0; HEAD_ROOM_BYTES];
        let written = write_simple_head(&mut head, &self.simple(row, 200, surface::JSON), length)
            .expect("a head of ours fits");
        self.make_room(super::piece(length));
        self.send_parts(row, [&head[..written]].into_iter().chain(shorter(before)));
        self.send_chain(row, &mut gathered);
        self.send_parts(row, behind);
        self.sender.pool.clear(&mut gathered);
        self.clients[row].body_bytes_out = length;
        self.answered(row, 200);
    }

    // ── sending ──────────────────────────────────────────────────────────────────────────────────

    /// An event of the stream with one choice.
    fn send_choice<'e>(&mut self, run: usize, choice: impl Iterator<Item = &'e [u8]> + Clone) {
        let usage = if self.runs[run].request.include_usage {
            UsageField::Null
        } else {
            UsageField::Absent
        };
        self.send_event(run, choice, usage);
    }

    fn send_event<'e>(
        &mut self,
        run: usize,
        choice: impl Iterator<Item = &'e [u8]> + Clone,
        usage: UsageField<'e>,
    ) {
        if !self.runs[run].has_client() {
            return;
        }
        let row = self.runs[run].client.0 as usize;
        self.make_room(choice.clone().map(<[u8]>::len).sum::<usize>() + EVENT_BYTES_EXTRA);
        if self.clients[row].first_byte.is_none() {
            self.note_first_byte(row);
        }
        let Self {
            clients, sender, ..
        } = self;
        let client = &mut clients[row];
        if client.phase == Phase::Closing {
            return; // it held most of the pool itself
        }
        let mut created = [0; DECIMAL_BYTES_MAX];
        let Client {
            own_id,
            output,
            records,
            answer,
            operation,
            model,
            epoch,
            framing,
            ..
        } = client;
        let epoch = epoch.as_ref().expect(HOLDS_EPOCH);
        let shape = Shape {
            operation: *operation,
            id: own_id,
            created: decimal(answer.created, &mut created),
            model: epoch.catalog.name(model.expect("a run is of a model")),
        };
        let event = shape.event(choice, usage);
        let sent = append_body(sender, output, records.as_mut(), *framing, event);
        self.body_sent(row, sent);
    }

    /// Bytes of the answer's body, framed like the rest of it.
    pub(super) fn send_body<'e>(
        &mut self,
        row: usize,
        parts: impl Iterator<Item = &'e [u8]> + Clone,
    ) {
        let client = &mut self.clients[row];
        if client.phase == Phase::Closing {
            return;
        }
        let (output, records) = (&mut client.output, client.records.as_mut());
        let sent = append_body(&mut self.sender, output, records, client.framing, parts);
        self.body_sent(row, sent);
    }

    fn body_sent(&mut self, row: usize, sent: Result<usize, SendError>) {
        match sent {
            Ok(bytes) => {
                self.clients[row].body_bytes_out += bytes as u64;
                self.client_dirty(row);
            }
            Err(error) => self.client_send_failed(row, error),
        }
    }

    /// Appends parts, joined, behind everything sent so far.
    fn send_parts<'e>(&mut self, row: usize, parts: impl Iterator<Item = &'e [u8]>) {
        let client = &mut self.clients[row];
        if client.phase == Phase::Closing {
            return;
        }
        let (output, records) = (&mut client.output, client.records.as_mut());
        match self.sender.append_parts(output, records, parts) {
            Ok(()) => self.client_dirty(row),
            Err(error) => self.client_send_failed(row, error),
        }
    }

    /// Appends what `chain` holds, consuming it.
    fn send_chain(&mut self, row: usize, chain: &mut Chain) {
        let mut copy = [0; RECORD_PLAIN_BYTES_MAX as usize];
        while !chain.is_empty() && self.clients[row].phase != Phase::Closing {
            let front = self.sender.pool.front(chain);
            let length = front.len().min(copy.len());
            copy[..length].copy_from_slice(&front[..length]);
            self.sender.pool.consume(chain, length);
            self.send_parts(row, [&copy[..length]].into_iter());
        }
    }
}

/// Appends all of `bytes`, or nothing if more than half of the pool would be in use: clients that read
/// slowly are shed for the sake of the pool, and must not be for answers that are only waiting. `[D-06]`
fn append_within_half(pool: &mut Chains, chain: &mut Chain, bytes: &[u8]) -> bool {
    let blocks = blocks_for(bytes.len() as u64);
    pool.used() + blocks <= pool.count() / 2 && pool.append(chain, bytes).is_ok()
}

/// Appends parts of a body, as one chunk if it goes in chunks; their bytes.
fn append_body<'e>(
    sender: &mut Sender,
    output: &mut Output,
    records: Option<&mut Records>,
    framing: Framing,
    parts: impl Iterator<Item = &'e [u8]> + Clone,
) -> Result<usize, SendError> {
    let bytes = parts.clone().map(<[u8]>::len).sum();
    if framing == Framing::Plain {
        sender.append_parts(output, records, parts)?;
        return Ok(bytes);
    }
    let mut head = [0; CHUNK_HEAD_BYTES_MAX];
    let length = write_chunk_head(&mut head, bytes);
    let framed = [&head[..length]]
        .into_iter()
        .chain(shorter(parts))
        .chain([CHUNK_END]);
    sender.append_parts(output, records, framed)?;
    Ok(bytes)
}

/// Every `u64` in decimal.
const DECIMAL_BYTES_MAX: usize = 20;

fn decimal(value: u64, out: &mut [u8; DECIMAL_BYTES_MAX]) -> &[u8] {
    let mut text = Writer::new(out);
    text.put_decimal(value).expect("every number fits");
    let length = text.written();
    &out[..length]
}
