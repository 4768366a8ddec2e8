//! What clients were told, compared with what the model servers wrote down.
//!
//! Lives on: the harness. View: one exchange, then one round of them. Bound: the requests of a round.
//!
//! Whole answers are the bytes of exactly one call; cut ones are seen as cut, and hold the beginning of
//! one call and nothing else; nobody is asked twice unless the first can have said nothing.
use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use crate::ask::{Ask, Fate, Surface, digest_of};
use crate::client::{Answer, End, Leave, Seen};
use crate::journal::{Call, Calls};
use crate::load::KINDS;
use crate::plan::Who;

/// What an exchange came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every byte, and a clean end.
    Complete {
        tag: String,
        digest: String,
    },
    /// An error instead of an answer, by its code.
    Refused {
        code: String,
    },
    /// A stream that ended with an error event.
    Failed {
        code: String,
        tag: Option<String>,
    },
    /// Broken off, and seen to be.
    Cut {
        tag: Option<String>,
    },
    /// The client went.
    Left {
        tag: Option<String>,
    },
    Nothing,
    Unreachable,
    /// What nobody may be told.
    Wrong {
        why: String,
    },
}

impl Outcome {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Complete { .. } => "complete",
            Self::Refused { .. } => "refused",
            Self::Failed { .. } => "failed in the stream",
            Self::Cut { .. } => "cut",
            Self::Left { .. } => "left",
            Self::Nothing => "no answer",
            Self::Unreachable => "no connection",
            Self::Wrong { .. } => "wrong",
        }
    }

    fn tag(&self) -> Option<&str> {
        match self {
            Self::Complete { tag, .. } => Some(tag),
            Self::Failed { tag, .. } | Self::Cut { tag } | Self::Left { tag } => tag.as_deref(),
            Self::Refused { .. } | Self::Nothing | Self::Unreachable | Self::Wrong { .. } => None,
        }
    }
}

/// One request of a client, and what became of it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) ask: Ask,
    pub(crate) surface: Surface,
    pub(crate) kind: &'static str,
    /// Digest of the body that a raw server must see.
    pub(crate) asked: String,
    pub(crate) leave: Leave,
    /// The Edge that was asked.
    pub(crate) site: Who,
    /// Its connection was made for it, or had served, and was to be kept, 2 s ago at most.
    pub(crate) is_fresh: bool,
    pub(crate) from_ms: u64,
    pub(crate) to_ms: u64,
    pub(crate) outcome: Outcome,
}

/// Statuses that an Edge may answer with while its parts die.
const STATUSES: [u16; 5] = [429, 500, 502, 503, 504];

/// What the client of `ask` concludes from what it saw.
pub(crate) fn conclude(ask: &Ask, surface: Surface, seen: Seen) -> Outcome {
    found(ask, surface, seen).unwrap_or_else(|why| Outcome::Wrong { why })
}

fn found(ask: &Ask, surface: Surface, seen: Seen) -> Result<Outcome, String> {
    let answer = match seen {
        Seen::Unreachable => return Ok(Outcome::Unreachable),
        Seen::Nothing => return Ok(Outcome::Nothing),
        Seen::Left => return Ok(Outcome::Left { tag: None }),
        Seen::Late => return Err("neither an answer nor an end in time".to_owned()),
        Seen::Answer(answer) => answer,
    };
    if answer.source.is_some() {
        return refusal(&answer);
    }
    let wanted = if ask.fate == Fate::Refused { 429 } else { 200 };
    if answer.status != wanted {
        let text = start_of(&answer.body);
        return Err(format!("status {} of nobody: {text}", answer.status));
    }
    if surface == Surface::Words {
        return words(ask, &answer);
    }
    let (said, error) = if ask.is_stream() {
        split_error(&answer.body, answer.end)?
    } else {
        (&answer.body[..], None)
    };
    let tag = Ask::tag(surface, said);
    let whole = is_beginning(ask, surface, tag.as_deref(), said)?;
    if whole && error.is_some() {
        return Err("an error event behind the last event of a whole answer".to_owned());
    }
    ending(&answer, tag, whole.then(|| digest_of(said)), error)
}

fn ending(
    answer: &Answer,
    tag: Option<String>,
    whole: Option<String>,
    error: Option<String>,
) -> Result<Outcome, String> {
    match (answer.end, error, tag, whole) {
        (End::Left, _, tag, _) => Ok(Outcome::Left { tag }),
        (End::Cut, _, tag, _) => Ok(Outcome::Cut { tag }),
        (End::Clean, Some(code), tag, _) => Ok(Outcome::Failed { code, tag }),
        (End::Clean, None, Some(tag), Some(digest)) => Ok(Outcome::Complete { tag, digest }),
        (End::Clean, None, ..) => Err(format!(
            "a clean end of {} bytes that are no whole answer: …{}",
            answer.body.len(),
            start_of(&answer.body[answer.body.len().saturating_sub(80)..])
        )),
    }
}

/// An error in an Edge's words.
fn refusal(answer: &Answer) -> Result<Outcome, String> {
    match answer.end {
        End::Cut => return Ok(Outcome::Cut { tag: None }),
        End::Left => return Ok(Outcome::Left { tag: None }),
        End::Clean => {}
    }
    let text = start_of(&answer.body);
    if !STATUSES.contains(&answer.status) {
        return Err(format!("status {} of the Edge: {text}", answer.status));
    }
    let value: Value = serde_json::from_slice(&answer.body)
        .map_err(|_| format!("an error that is no JSON: {text}"))?;
    let code = code_of(&value).ok_or_else(|| format!("an error without words: {text}"))?;
    let status = answer.status;
    Ok(Outcome::Refused {
        code: format!("{status} {code}"),
    })
}

/// The code of an error, or what stands for it in a shape without codes.
fn code_of(value: &Value) -> Option<String> {
    let error = value.get("error").unwrap_or(value);
    let words = ["code", "message", "type"]
        .iter()
        .find_map(|name| error[*name].as_str());
    words.map(str::to_owned)
}

/// Either begins an error event.
const ERRORS: [&[u8]; 2] = [b"event: error\n", b"data: {\"error\""];

/// What stands before the error event of a stream, and the error's code. An Edge puts an empty line
/// before its event, since the one before it may be cut. The event is whole, and the last thing that
/// is said; of an answer that was cut or left it may be half.
fn split_error(body: &[u8], end: End) -> Result<(&[u8], Option<String>), String> {
    let mut at = 0;
    loop {
        let event = &body[at..];
        let length = event.windows(2).position(|pair| pair == b"\n\n");
        if ERRORS.iter().any(|begin| event.starts_with(begin)) {
            let said = body[..at].strip_suffix(b"\n\n").unwrap_or(&body[..at]);
            let Some(length) = length else {
                return match end {
                    End::Clean => Err(format!("half an error event: {}", start_of(event))),
                    End::Cut | End::Left => Ok((said, None)),
                };
            };
            let behind = &event[length + 2..];
            if !behind.is_empty() {
                return Err(format!("behind an error event: {}", start_of(behind)));
            }
            return Ok((said, Some(error_of(&event[..length])?)));
        }
        match length {
            Some(length) => at += length + 2,
            // Half of the first words of one are no half of anything else.
            None if end != End::Clean && at >= 4 && body[..at].ends_with(b"\n\n\n\n") => {
                return Ok((&body[..at - 2], None));
            }
            None => return Ok((body, None)),
        }
    }
}

/// The code of a whole error event.
fn error_of(event: &[u8]) -> Result<String, String> {
    let without = || format!("an error event without words: {}", start_of(event));
    let text = std::str::from_utf8(event).map_err(|_| without())?;
    let data = text
        .strip_prefix("event: error\n")
        .unwrap_or(text)
        .strip_prefix("data: ")
        .ok_or_else(without)?;
    let value: Value = serde_json::from_str(data).map_err(|_| without())?;
    code_of(&value).ok_or_else(without)
}

/// `said` is the beginning of the answer of call `tag`; whether it is all of it.
fn is_beginning(
    ask: &Ask,
    surface: Surface,
    tag: Option<&str>,
    said: &[u8],
) -> Result<bool, String> {
    let Some(tag) = tag else {
        // The tag is not whole: what stands before any tag.
        let whole = ask.answer(surface, "-");
        let before = whole.iter().position(|&byte| byte == b'-').unwrap_or(0);
        let both = before.min(said.len());
        return if said[..both] == whole[..both] {
            Ok(false)
        } else {
            Err(format!("another answer: {}", start_of(said)))
        };
    };
    let whole = ask.answer(surface, tag);
    if whole.starts_with(said) {
        return Ok(whole.len() == said.len());
    }
    let at = whole.iter().zip(said).take_while(|(a, b)| a == b).count();
    Err(format!(
        "bytes of no answer of call {tag}, from byte {at} of {}: {}",
        said.len(),
        start_of(&said[at.min(said.len())..])
    ))
}

fn start_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).replace('\n', "\\n")
}

/// A normalized run's answer, in the Edge's own words around the server's text.
fn words(ask: &Ask, answer: &Answer) -> Result<Outcome, String> {
    let told = if ask.stream {
        Told::stream(&answer.body, answer.end)?
    } else if answer.end == End::Clean {
        Told::object(&answer.body)?
    } else {
        Told::default() // half an object tells nothing
    };
    let said = told.text.as_bytes();
    let tag = Ask::tag(Surface::Words, said);
    let whole = is_beginning(ask, Surface::Words, tag.as_deref(), said)? && told.is_done;
    ending(answer, tag, whole.then(|| digest_of(said)), told.error)
}

#[derive(Debug, Default)]
struct Told {
    text: String,
    /// A finish reason, and for a stream its last event.
    is_done: bool,
    error: Option<String>,
}

impl Told {
    fn stream(body: &[u8], end: End) -> Result<Self, String> {
        let mut told = Self::default();
        let text = std::str::from_utf8(body).map_err(|error| format!("no UTF-8: {error}"))?;
        let (whole, half) = text.rsplit_once("\n\n").unwrap_or(("", text));
        if end == End::Clean && !half.is_empty() {
            return Err(format!(
                "a clean end of half an event: {}",
                start_of(half.as_bytes())
            ));
        }
        let (mut finish, mut is_last) = (false, false);
        for event in whole.split("\n\n").filter(|event| !event.is_empty()) {
            let named = || start_of(event.as_bytes());
            if is_last {
                return Err(format!("behind the last event: {}", named()));
            }
            let data = event.strip_prefix("data: ");
            let data = data.ok_or_else(|| format!("no event: {}", named()))?;
            if data == "[DONE]" {
                (told.is_done, is_last) = (finish, true);
                continue;
            }
            let value: Value = serde_json::from_str(data)
                .map_err(|_| format!("an event that is no JSON: {}", named()))?;
            if value.get("error").is_some() {
                (told.error, is_last) = (Some(error_of(event.as_bytes())?), true);
                continue;
            }
            let choice = &value["choices"][0];
            told.text += choice["delta"]["content"].as_str().unwrap_or_default();
            finish = finish || choice["finish_reason"] == "stop";
        }
        Ok(told)
    }

    fn object(body: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|_| format!("an answer that is no JSON: {}", start_of(body)))?;
        let choice = &value["choices"][0];
        Ok(Self {
            text: choice["message"]["content"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            is_done: choice["finish_reason"] == "stop",
            error: None,
        })
    }
}

// ── a round ───────────────────────────────────────────────────────────────────────────────────────

/// Calls of one request, at most: a run, a second one elsewhere, and a dead connection's retry of each.
const CALLS_MAX: usize = 4;

/// Counts of a round or of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// By kind of request, then by outcome.
    pub(crate) kinds: BTreeMap<&'static str, BTreeMap<&'static str, u32>>,
    /// Codes of errors.
    pub(crate) codes: BTreeMap<String, u32>,
    pub(crate) calls: u32,
    /// Calls that ended before their answer did, after their client had left.
    pub(crate) stopped: u32,
    /// Calls that a server met in the round after that of their request.
    pub(crate) late: u32,
    /// Requests that were asked again of a server.
    pub(crate) again: u32,
}

impl Counts {
    fn add(&mut self, entry: &Entry, calls: &[Call]) {
        let kind = self.kinds.entry(entry.kind).or_default();
        *kind.entry(entry.outcome.name()).or_default() += 1;
        match &entry.outcome {
            Outcome::Refused { code } | Outcome::Failed { code, .. } => {
                *self.codes.entry(code.clone()).or_default() += 1;
            }
            _ => {}
        }
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.calls += count(calls.len());
        if matches!(entry.outcome, Outcome::Left { .. }) {
            self.stopped += count(calls.iter().filter(|call| call.was_left).count());
        }
        self.again += u32::from(calls.len() > 1);
    }

    pub(crate) fn join(&mut self, other: Self) {
        for (kind, outcomes) in other.kinds {
            for (name, count) in outcomes {
                *self.kinds.entry(kind).or_default().entry(name).or_default() += count;
            }
        }
        for (code, count) in other.codes {
            *self.codes.entry(code).or_default() += count;
        }
        self.calls += other.calls;
        self.stopped += other.stopped;
        self.late += other.late;
        self.again += other.again;
    }

    /// Kinds of requests of which none came to what it is for: nothing is shown of them.
    pub(crate) fn unseen(&self) -> Vec<String> {
        let wanted = KINDS.iter().map(|&(kind, _)| match kind {
            "broken by the server" => (kind, "failed in the stream"),
            kind if kind.starts_with("leaves") => (kind, "left"),
            kind => (kind, "complete"),
        });
        let seen = |kind, outcome| {
            self.kinds
                .get(kind)
                .is_some_and(|of| of.contains_key(outcome))
        };
        let unseen = wanted.filter(|&(kind, outcome)| !seen(kind, outcome));
        let unseen = unseen.map(|(kind, outcome)| format!("{kind}: never {outcome}"));
        let never = [
            (self.stopped, "no call ended with its client's leaving"),
            (self.again, "no request was asked again after a stall"),
        ];
        let never = never.into_iter().filter(|(count, _)| *count == 0);
        unseen.chain(never.map(|(_, why)| why.to_owned())).collect()
    }

    pub(crate) fn requests(&self) -> u32 {
        self.kinds.values().flat_map(BTreeMap::values).sum()
    }

    pub(crate) fn of(&self, outcome: &str) -> u32 {
        let counts = self.kinds.values().filter_map(|kind| kind.get(outcome));
        counts.sum()
    }
}

/// A call may be given up so long after what it waited for was over, milliseconds: stall, close, probe.
const STALL_WAIT_MS: u64 = 3_000 + 1_000 + 1_000;
/// What a server has written to its end may so long be on its way, in the kernels of a slow reader.
const ON_THE_WAY_MS: u64 = 2_000;
/// Silence after which a node rightly gives a call up, nearly.
const SILENCE_MS: u64 = 2_900;
/// An Edge that was killed or paused has caught up so long afterwards.
const EDGE_BACK_MS: u64 = 2_000;
/// A link that is back: the kernel's next try may be as far away as the silence was long.
const LATE_MS: u64 = 8_000;

/// When a part was, or its link looked, silent or dead; milliseconds as in the journals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) who: Who,
    pub(crate) from_ms: u64,
    pub(crate) to_ms: u64,
}

impl Span {
    /// Something of `from..=to` lay in it, or within `after` behind it.
    const fn meets(&self, from_ms: u64, to_ms: u64, after_ms: u64) -> bool {
        from_ms <= self.to_ms.saturating_add(after_ms) && to_ms >= self.from_ms
    }

    fn explains(&self, call: &Call, after_ms: u64) -> bool {
        let ended_ms = call.ended_ms.unwrap_or(u64::MAX);
        self.who.name() == call.server()
            && self.meets(
                call.begun_ms,
                ended_ms.saturating_add(ON_THE_WAY_MS),
                after_ms,
            )
    }
}

/// Its server got so little time that it said nothing for as long as nodes wait.
fn was_starved(call: &Call) -> bool {
    let spoke_ms = call.output_ms.or(call.ended_ms).unwrap_or(call.begun_ms);
    spoke_ms.saturating_sub(call.begun_ms) >= SILENCE_MS
}

/// A call that its node may have taken for a silent or dead one: a fault was at work while it was
/// open, or nearly, or its server was starved.
fn is_explained(call: &Call, spans: &[Span]) -> bool {
    was_starved(call) || spans.iter().any(|span| span.explains(call, STALL_WAIT_MS))
}

/// What a round leaves to the next one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    /// With the calls that were known of each.
    entries: HashMap<u64, (Entry, usize)>,
    spans: Vec<Span>,
}

impl Past {
    pub(crate) fn new(entries: &[Entry], calls: &Calls, spans: &[Span]) -> Self {
        let with_calls = |entry: &Entry| {
            let known = calls.get(&entry.ask.id).map_or(0, Vec::len);
            (entry.ask.id, (entry.clone(), known))
        };
        Self {
            entries: entries.iter().map(with_calls).collect(),
            spans: spans.to_vec(),
        }
    }

    /// A request that its node gave up while the link lost every packet: the kernel goes on sending
    /// what the connection owed when it was closed, and the server meets it when the link is back.
    fn late(&self, id: u64, calls: &[Call], spans: &[Span]) -> Result<(), String> {
        let of = self.entries.get(&id);
        let (entry, known) = of.ok_or("which nobody asked")?;
        for call in calls {
            let mut all = self.spans.iter().chain(spans);
            if !all.any(|span| span.explains(call, LATE_MS)) {
                return Err("of the round before, and no link had held it back".to_owned());
            }
        }
        was_passed_on(entry, calls)?;
        if known + calls.len() > CALLS_MAX {
            return Err("asked too often".to_owned());
        }
        Ok(())
    }
}

/// Compares a round's exchanges with the servers' record of them. `spans`: when servers may have
/// looked silent or dead to their nodes, and Edges to their clients, in this round.
pub(crate) fn round(
    entries: &[Entry],
    mut calls: Calls,
    spans: &[Span],
    past: &Past,
    counts: &mut Counts,
) -> Vec<String> {
    let mut faults = Vec::new();
    for entry in entries {
        let of = calls.remove(&entry.ask.id).unwrap_or_default();
        counts.add(entry, &of);
        if let Err(why) = exchange(entry, &of, spans) {
            faults.push(format!(
                "{} {}: {why}: {entry:?}: {of:?}",
                entry.kind,
                entry.ask.mark()
            ));
        }
    }
    for (id, of) in calls {
        match past.late(id, &of, spans) {
            Ok(()) => counts.late += u32::try_from(of.len()).unwrap_or(u32::MAX),
            Err(why) => faults.push(format!("a call for {id:016x}, {why}: {of:?}")),
        }
    }
    faults
}

/// Trouble of a site is over so long after its fault: what was lost is sent again, or given up.
const OVER_MS: u64 = 8_000;
/// The node took its server for silent. On a machine with too little time it may be right.
const STALLS: [&str; 2] = ["response_stalled", "The provider stopped answering."];

/// Answers that broke off although nothing was wrong. `troubles`: when a fault was at work on anything
/// of the Edge that a span names, its nodes, servers and links included.
pub(crate) fn broken(entries: &[Entry], troubles: &[Span]) -> Vec<String> {
    let is_untroubled = |entry: &&Entry| {
        let mut at_site = troubles.iter().filter(|span| span.who == entry.site);
        !at_site.any(|span| span.meets(entry.from_ms, entry.to_ms, OVER_MS))
    };
    let breaks = |entry: &&Entry| match &entry.outcome {
        Outcome::Cut { .. } => entry.leave == Leave::Never,
        Outcome::Failed { code, .. } => !STALLS.contains(&code.as_str()),
        Outcome::Complete { .. } | Outcome::Refused { .. } | Outcome::Left { .. } => false,
        Outcome::Nothing | Outcome::Unreachable | Outcome::Wrong { .. } => false,
    };
    let whole = entries.iter().filter(|entry| entry.ask.fate == Fate::Whole);
    let broken = whole.filter(breaks).filter(is_untroubled);
    broken
        .map(|entry| format!("broke off, and nothing was wrong: {entry:?}"))
        .collect()
}

/// What a server was asked is what the client asked, and all of it.
fn was_passed_on(entry: &Entry, calls: &[Call]) -> Result<(), String> {
    let raw = entry.surface != Surface::Words;
    for call in calls {
        let found = Surface::of_provider(&call.path);
        if found != Some(entry.surface) {
            return Err(format!("asked as {}", call.path));
        }
        if raw && call.asked != entry.asked {
            return Err(format!("call {} saw another body", call.tag));
        }
    }
    if matches!(entry.leave, Leave::Within(_)) && !calls.is_empty() {
        return Err("half a request was passed on".to_owned());
    }
    Ok(())
}

fn exchange(entry: &Entry, calls: &[Call], spans: &[Span]) -> Result<(), String> {
    if let Outcome::Wrong { why } = &entry.outcome {
        return Err(why.clone());
    }
    was_answered(entry, spans)?;
    was_passed_on(entry, calls)?;
    let raw = entry.surface != Surface::Words;
    if let Some(tag) = entry.outcome.tag() {
        let call = calls.iter().find(|call| call.tag == tag && call.has_output);
        let call = call.ok_or_else(|| format!("no server made call {tag}"))?;
        if let Outcome::Complete { digest, .. } = &entry.outcome {
            let same = call
                .whole
                .as_ref()
                .is_some_and(|whole| !raw || whole == digest);
            if !same {
                return Err(format!("complete, but not as call {tag} wrote it"));
            }
        }
    }
    if calls.len() > CALLS_MAX {
        return Err("asked too often".to_owned());
    }
    again(entry, calls, spans)
}

/// Who makes a connection gets an answer on it, in words: unless the Edge was killed or paused then.
/// So does who has just got one on it. One that was kept for long may just have been closed.
fn was_answered(entry: &Entry, spans: &[Span]) -> Result<(), String> {
    let is_silent = matches!(entry.outcome, Outcome::Nothing | Outcome::Unreachable);
    if !is_silent || !entry.is_fresh {
        return Ok(());
    }
    let mut of_edge = spans.iter().filter(|span| span.who == entry.site);
    if of_edge.any(|span| span.meets(entry.from_ms, entry.to_ms, EDGE_BACK_MS)) {
        return Ok(());
    }
    Err(format!("{} of an Edge that lives", entry.outcome.name()))
}

/// Every call but the one that answered can have told nobody anything: it was silent, or what it wrote
/// may have been lost on a link that was disturbed.
fn again(entry: &Entry, calls: &[Call], spans: &[Span]) -> Result<(), String> {
    if calls.len() < 2 {
        return Ok(());
    }
    let told = entry.outcome.tag();
    let talkative = calls.iter().filter(|call| call.has_output);
    let unexplained = talkative
        .filter(|call| Some(call.tag.as_str()) != told && !is_explained(call, spans))
        .count();
    // Of one whose client saw nothing of it, one may have spoken to a client that had gone.
    if unexplained > usize::from(told.is_none()) {
        return Err("several calls with output".to_owned());
    }
    let may_be_asked_again = |call: &Call| {
        entry.ask.fate.at(&call.server()) == Fate::Silent || is_explained(call, spans)
    };
    let settled = calls.iter().filter(|call| !may_be_asked_again(call));
    if settled.count() > 1 {
        return Err("asked again for no reason".to_owned());
    }
    // A node asks its server again only if the connection had served before, and so may have been dead.
    for (row, call) in calls.iter().enumerate() {
        let mut later = calls[row + 1..].iter();
        let was_silent = entry.ask.fate.at(&call.server()) == Fate::Silent || was_starved(call);
        if call.nth < 2 && !was_silent && later.any(|other| other.server() == call.server()) {
            return Err("asked again of the same server, after a new connection".to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASK: Ask = Ask {
        id: 7,
        stream: true,
        pieces: 4,
        piece_bytes: 30,
        pause_ms: 0,
        fate: Fate::Whole,
    };

    fn seen(body: &[u8], end: End) -> Seen {
        Seen::Answer(Answer::of(200, None, body, end))
    }

    fn chat(body: &[u8], end: End) -> Outcome {
        conclude(&ASK, Surface::Chat, seen(body, end))
    }

    fn is_wrong(outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Wrong { .. })
    }

    fn error_event(before: usize) -> Vec<u8> {
        let mut body = ASK.answer(Surface::Chat, "p1.1.1");
        body.truncate(before);
        body.extend_from_slice(b"\n\ndata: {\"error\":{\"code\":\"node_lost\"}}\n\n");
        body
    }

    #[test]
    fn whole_answers_alone_are_complete() {
        let whole = ASK.answer(Surface::Chat, "p1.1.1");
        assert!(matches!(chat(&whole, End::Clean), Outcome::Complete { .. }));
        for cut in [0, 3, whole.len() / 2, whole.len() - 1] {
            let part = &whole[..cut];
            assert!(
                is_wrong(&chat(part, End::Clean)),
                "{cut} bytes, as if they were all"
            );
            assert!(matches!(chat(part, End::Cut), Outcome::Cut { .. }));
        }
    }

    #[test]
    fn other_bytes_are_seen_wherever_they_are() {
        let whole = ASK.answer(Surface::Chat, "p1.1.1");
        for at in [0, 5, whole.len() / 2, whole.len() - 1] {
            let mut other = whole.clone();
            other[at] ^= 1;
            assert!(is_wrong(&chat(&other, End::Clean)), "byte {at}");
            assert!(
                is_wrong(&chat(&other, End::Cut)) || at + 1 >= whole.len(),
                "byte {at}"
            );
        }
        let strange = Ask { id: 8, ..ASK }.answer(Surface::Chat, "p1.1.1");
        assert!(is_wrong(&chat(&strange, End::Cut)));
    }

    #[test]
    fn an_error_event_ends_a_stream_behind_whole_events() {
        let first = ASK.piece(Surface::Chat, "p1.1.1", 0).len();
        let failed = chat(&error_event(first), End::Clean);
        let tag = Some("p1.1.1".to_owned());
        let code = "node_lost".to_owned();
        assert_eq!(failed, Outcome::Failed { code, tag });
        assert!(!is_wrong(&chat(&error_event(0), End::Clean)));
        let within = chat(&error_event(first - 5), End::Clean);
        assert!(matches!(within, Outcome::Failed { .. }));
        let mut other = error_event(first);
        other[5] ^= 1;
        assert!(is_wrong(&chat(&other, End::Clean)));
    }

    #[test]
    fn normalized_answers_are_compared_by_their_text() {
        let told = |text: &str, rest: &str| {
            let head = "{\"choices\":[{\"index\":0,\"delta\":{\"content\":";
            format!("data: {head}\"{text}\"}},\"finish_reason\":\"stop\"}}]}}\n\n{rest}")
        };
        let text = String::from_utf8(ASK.answer(Surface::Words, "p1.1.2")).unwrap();
        let judged = |body: &str| conclude(&ASK, Surface::Words, seen(body.as_bytes(), End::Clean));
        let whole = told(&text, "data: [DONE]\n\n");
        assert!(matches!(judged(&whole), Outcome::Complete { .. }));
        assert!(is_wrong(&judged(&told(&text, ""))), "no last event");
        assert!(
            is_wrong(&judged(&told(&text[..30], "data: [DONE]\n\n"))),
            "half a text"
        );
        let error = "data: {\"error\":{\"code\":\"x\"}}\n\n";
        let failed = told(&text[..30], error);
        assert!(matches!(judged(&failed), Outcome::Failed { .. }));
        let done = "data: [DONE]\n\n";
        for behind in [error, done, "data: {}\n\n", "data: {", "event: x\n\n"] {
            assert!(is_wrong(&judged(&(whole.clone() + behind))), "{behind}");
            assert!(is_wrong(&judged(&(failed.clone() + behind))), "{behind}");
        }
    }

    /// Open from 10 000 to 11 000.
    fn call(tag: &str, has_output: bool) -> Call {
        Call {
            tag: tag.to_owned(),
            path: Surface::Chat.path().to_owned(),
            asked: "d".to_owned(),
            has_output,
            whole: has_output.then(|| digest_of(&ASK.answer(Surface::Chat, tag))),
            begun_ms: 10_000,
            output_ms: has_output.then_some(10_001),
            ended_ms: Some(11_000),
            ..Call::default()
        }
    }

    fn entry(ask: Ask, outcome: Outcome) -> Entry {
        Entry {
            ask,
            surface: Surface::Chat,
            kind: "test",
            asked: "d".to_owned(),
            leave: Leave::Never,
            site: Who::Edge(0),
            is_fresh: true,
            from_ms: 10_000,
            to_ms: 11_000,
            outcome,
        }
    }

    fn span(who: Who, from_ms: u64, to_ms: u64) -> Span {
        Span {
            who,
            from_ms,
            to_ms,
        }
    }

    fn judged(ask: Ask, outcome: Outcome, calls: &[Call], spans: &[Span]) -> usize {
        let entry = entry(ask, outcome);
        let calls = Calls::from([(ask.id, calls.to_vec())]);
        let past = Past::default();
        round(&[entry], calls, spans, &past, &mut Counts::default()).len()
    }

    #[test]
    fn a_call_of_the_round_before_needs_a_disturbed_link_and_is_looked_at() {
        let refused = Outcome::Refused {
            code: "503".to_owned(),
        };
        let entry = entry(ASK, refused);
        let late = |spans: &[Span], known: usize, id, call: Call| {
            let before = Calls::from([(ASK.id, vec![self::call("p1.1.0", false); known])]);
            let past = Past::new(std::slice::from_ref(&entry), &before, spans);
            let calls = Calls::from([(id, vec![call])]);
            round(&[], calls, &[], &past, &mut Counts::default()).len()
        };
        let p1 = [span(Who::Server(0), 5_000, 9_000)];
        let met = || call("p1.1.1", true);
        assert_eq!(late(&p1, 1, ASK.id, met()), 0);
        assert_eq!(
            late(&[span(Who::Server(1), 5_000, 9_000)], 1, ASK.id, met()),
            1
        );
        assert_eq!(
            late(&[span(Who::Server(0), 1_000, 1_900)], 1, ASK.id, met()),
            1
        );
        assert_eq!(late(&p1, 1, ASK.id + 1, met()), 1, "nobody's");
        assert_eq!(late(&p1, CALLS_MAX, ASK.id, met()), 1, "once too often");
        let other = Call {
            asked: "e".to_owned(),
            ..met()
        };
        assert_eq!(late(&p1, 1, ASK.id, other), 1, "another body");
        let other = Call {
            path: "/v1/responses".to_owned(),
            ..met()
        };
        assert_eq!(late(&p1, 1, ASK.id, other), 1, "another path");
    }

    #[test]
    fn an_edge_that_lives_answers_whoever_makes_a_connection() {
        for outcome in [Outcome::Nothing, Outcome::Unreachable] {
            let of = |spans: &[Span]| judged(ASK, outcome.clone(), &[], spans);
            assert_eq!(of(&[]), 1);
            assert_eq!(of(&[span(Who::Edge(0), 10_900, 12_000)]), 0);
            assert_eq!(of(&[span(Who::Edge(0), 8_000, 8_000)]), 0, "not back yet");
            assert_eq!(of(&[span(Who::Edge(0), 7_000, 7_999)]), 1, "back");
            assert_eq!(of(&[span(Who::Edge(0), 11_001, 12_000)]), 1, "later");
            assert_eq!(of(&[span(Who::Edge(1), 10_900, 12_000)]), 1, "another");
            let kept = Entry {
                is_fresh: false,
                ..entry(ASK, outcome.clone())
            };
            let past = Past::default();
            let faults = round(&[kept], Calls::new(), &[], &past, &mut Counts::default());
            assert!(faults.is_empty());
        }
    }

    #[test]
    fn an_answer_breaks_off_only_where_something_is_wrong() {
        let failed = |code: &str| Outcome::Failed {
            code: code.to_owned(),
            tag: None,
        };
        let of =
            |outcome: &Outcome, spans: &[Span]| broken(&[entry(ASK, outcome.clone())], spans).len();
        for outcome in [failed("node_lost"), Outcome::Cut { tag: None }] {
            assert_eq!(of(&outcome, &[]), 1);
            assert_eq!(of(&outcome, &[span(Who::Edge(0), 1_000, 2_000)]), 0);
            assert_eq!(of(&outcome, &[span(Who::Edge(0), 1_000, 1_999)]), 1, "over");
            assert_eq!(
                of(&outcome, &[span(Who::Edge(1), 1_000, 20_000)]),
                1,
                "elsewhere"
            );
        }
        assert_eq!(of(&failed(STALLS[0]), &[]), 0);
        let asked_for = Ask {
            fate: Fate::Broken,
            ..ASK
        };
        assert!(broken(&[entry(asked_for, failed("node_lost"))], &[]).is_empty());
    }

    #[test]
    fn nothing_stands_behind_an_error_event() {
        let first = ASK.piece(Surface::Chat, "p1.1.1", 0).len();
        let whole = error_event(first);
        assert!(!is_wrong(&chat(&whole, End::Clean)));
        let half = &whole[..whole.len() - 2];
        assert!(is_wrong(&chat(half, End::Clean)), "half of it");
        assert!(matches!(chat(half, End::Cut), Outcome::Cut { .. }));
        assert!(matches!(
            chat(&whole[..first + 7], End::Cut),
            Outcome::Cut { .. }
        ));
        for behind in [
            "data: [DONE]\n\n",
            "data: {\"error\":{\"code\":\"x\"}}\n\n",
            "\n",
        ] {
            let more = [&whole[..], behind.as_bytes()].concat();
            assert!(is_wrong(&chat(&more, End::Clean)), "{behind}");
        }
        let no_words = [&whole[..first], b"\n\ndata: {\"error\":{}}\n\n"].concat();
        assert!(is_wrong(&chat(&no_words, End::Clean)));
        let all = ASK.answer(Surface::Chat, "p1.1.1").len();
        assert!(
            is_wrong(&chat(&error_event(all), End::Clean)),
            "behind [DONE]"
        );
    }

    #[test]
    fn complete_answers_are_those_that_a_server_wrote() {
        let complete = chat(&ASK.answer(Surface::Chat, "p1.1.1"), End::Clean);
        assert_eq!(
            judged(ASK, complete.clone(), &[call("p1.1.1", true)], &[]),
            0
        );
        assert_eq!(judged(ASK, complete.clone(), &[], &[]), 1);
        assert_eq!(
            judged(ASK, complete.clone(), &[call("p2.1.1", true)], &[]),
            1
        );
        let half = Call {
            whole: None,
            ..call("p1.1.1", true)
        };
        assert_eq!(judged(ASK, complete.clone(), &[half], &[]), 1);
        let other = Call {
            asked: "e".to_owned(),
            ..call("p1.1.1", true)
        };
        assert_eq!(judged(ASK, complete, &[other], &[]), 1);
    }

    #[test]
    fn a_second_call_needs_a_reason() {
        let complete = chat(&ASK.answer(Surface::Chat, "p2.1.1"), End::Clean);
        let spoke = [call("p1.1.1", true), call("p2.1.1", true)];
        assert_eq!(judged(ASK, complete.clone(), &spoke, &[]), 1);
        let p1 = |from, to| [span(Who::Server(0), from, to)];
        assert_eq!(
            judged(ASK, complete.clone(), &spoke, &p1(10_500, 12_000)),
            0
        );
        assert_eq!(judged(ASK, complete.clone(), &spoke, &p1(5_000, 5_000)), 0);
        assert_eq!(
            judged(ASK, complete.clone(), &spoke, &p1(4_000, 4_999)),
            1,
            "long over"
        );
        assert_eq!(
            judged(ASK, complete.clone(), &spoke, &p1(13_001, 14_000)),
            1,
            "long written"
        );
        let starved = Call {
            ended_ms: Some(12_900),
            ..call("p1.1.1", false)
        };
        let starved = [starved, call("p2.1.1", true)];
        assert_eq!(judged(ASK, complete.clone(), &starved, &[]), 0);
        let dead = |nth| Call {
            nth,
            ..call("p2.1.0", false)
        };
        let p2 = [span(Who::Server(1), 10_500, 12_000)];
        let twice = |nth| {
            judged(
                ASK,
                complete.clone(),
                &[dead(nth), call("p2.1.1", true)],
                &p2,
            )
        };
        assert_eq!(twice(2), 0);
        assert_eq!(twice(1), 1, "that connection was new");
        let silent = [call("p1.1.1", false), call("p2.1.1", true)];
        assert_eq!(
            judged(ASK, complete, &silent, &[]),
            1,
            "no stall was asked for"
        );
        let ask = Ask {
            fate: Fate::SilentAtFirst,
            ..ASK
        };
        let complete = chat(&ask.answer(Surface::Chat, "p2.1.1"), End::Clean);
        assert_eq!(judged(ask, complete, &silent, &[]), 0);
        let refused = Outcome::Refused {
            code: "503".to_owned(),
        };
        assert_eq!(judged(ASK, refused, &spoke, &[]), 1);
    }
}
