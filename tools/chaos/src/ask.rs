//! What a request asks, and the bytes of its answer: both sides derive them, nobody stores them.
//!
//! Lives on: harness and model servers. View: one request. Bound: one answer.
//!
//! A request carries a mark in its text, `chaos-asks/ID/STREAM/PIECES/BYTES/PAUSE/FATE/`. The answer follows
//! from the mark and from the call that answers it, whose tag stands in its first bytes: so bytes of
//! another client, of another call, or of none, are seen by one comparison.
use ring::digest::{SHA256, digest};

use crate::dice::Dice;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Surface {
    Chat,
    Completions,
    Embeddings,
    Responses,
    Messages,
    CountTokens,
    /// Chat of a model whose server speaks Ollama's own words: a normalized run.
    Words,
}

impl Surface {
    /// What a client asks for.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Chat | Self::Words => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
        }
    }

    /// What a model server is asked for.
    pub(crate) fn of_provider(path: &str) -> Option<Self> {
        let raw = [
            Self::Chat,
            Self::Completions,
            Self::Embeddings,
            Self::Responses,
            Self::Messages,
            Self::CountTokens,
        ];
        if path == "/api/chat" {
            return Some(Self::Words);
        }
        raw.into_iter().find(|surface| surface.path() == path)
    }

    pub(crate) const fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}

/// What the model server does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Whole,
    /// Answers 429 with a whole body.
    Refused,
    /// Says nothing, not even a head.
    Silent,
    /// As `Silent` at the server of that name, `Whole` at every other.
    SilentAtFirst,
    /// Falls silent after half of the pieces.
    SilentHalf,
    /// Closes after half of the pieces.
    Broken,
}

/// The server of `Fate::SilentAtFirst`.
const FIRST: &str = "p1";

const FATES: [(Fate, u8); 6] = [
    (Fate::Whole, b'w'),
    (Fate::Refused, b'r'),
    (Fate::Silent, b's'),
    (Fate::SilentAtFirst, b'q'),
    (Fate::SilentHalf, b'h'),
    (Fate::Broken, b'b'),
];

impl Fate {
    /// What becomes of it at the server `name`.
    pub(crate) fn at(self, name: &str) -> Self {
        match self {
            Self::SilentAtFirst if name == FIRST => Self::Silent,
            Self::SilentAtFirst => Self::Whole,
            other => other,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    /// Never used twice in a run.
    pub(crate) id: u64,
    pub(crate) stream: bool,
    pub(crate) pieces: u32,
    /// Letters of a piece.
    pub(crate) piece_bytes: u32,
    /// Before each piece, milliseconds.
    pub(crate) pause_ms: u32,
    pub(crate) fate: Fate,
}

/// Begins a mark: what a client says, and nobody else may write down.
pub(crate) const MARK: &str = "chaos-asks/";
/// Longest mark: an id and three numbers.
const MARK_BYTES_MAX: usize = 80;

impl Ask {
    pub(crate) fn mark(&self) -> String {
        let fate = FATES.iter().find(|(fate, _)| *fate == self.fate);
        let fate = fate.map_or('w', |&(_, letter)| char::from(letter));
        format!(
            "{MARK}{:016x}/{}/{}/{}/{}/{fate}/",
            self.id,
            u8::from(self.stream),
            self.pieces,
            self.piece_bytes,
            self.pause_ms
        )
    }

    /// Reads the mark of a request's body.
    pub(crate) fn find(body: &[u8]) -> Option<Self> {
        let at = body
            .windows(MARK.len())
            .position(|part| part == MARK.as_bytes())?;
        let mark = &body[at..body.len().min(at + MARK_BYTES_MAX)];
        let mut words = mark.split(|&byte| byte == b'/').skip(1);
        let mut word = || std::str::from_utf8(words.next()?).ok();
        let id = u64::from_str_radix(word()?, 16).ok()?;
        let stream = word()? == "1";
        let mut number = || word()?.parse::<u32>().ok();
        let (pieces, piece_bytes, pause_ms) = (number()?, number()?, number()?);
        let letter = *word()?.as_bytes().first()?;
        let &(fate, _) = FATES.iter().find(|(_, known)| *known == letter)?;
        Some(Self {
            id,
            stream,
            pieces,
            piece_bytes,
            pause_ms,
            fate,
        })
    }

    /// The body of the request, `padding` bytes longer than it need be. With the target for a model it
    /// is what the server must see.
    pub(crate) fn body(&self, surface: Surface, model: &str, padding: u32) -> String {
        let text = self.mark() + &letters(self.id, 0, u32::MAX, padding);
        let messages = format!("[{{\"role\":\"user\",\"content\":\"{text}\"}}]");
        let stream = self.stream;
        let rest = match surface {
            Surface::Chat | Surface::Words => {
                format!("\"stream\":{stream},\"messages\":{messages}")
            }
            Surface::Completions => format!("\"stream\":{stream},\"prompt\":\"{text}\""),
            Surface::Embeddings => format!("\"input\":\"{text}\""),
            Surface::Responses => format!("\"stream\":{stream},\"input\":\"{text}\""),
            Surface::Messages => {
                format!("\"max_tokens\":9,\"stream\":{stream},\"messages\":{messages}")
            }
            Surface::CountTokens => format!("\"messages\":{messages}"),
        };
        format!("{{\"model\":\"{model}\",{rest}}}")
    }

    /// Piece `n` of the answer that call `tag` gives; the last one, `pieces`, closes it.
    pub(crate) fn piece(&self, surface: Surface, tag: &str, n: u32) -> Vec<u8> {
        if surface == Surface::Words {
            return self.word_line(tag, n).into_bytes();
        }
        let (id, last) = (self.id, n == self.pieces);
        let text = if last {
            String::new()
        } else {
            self.letters(tag, n)
        };
        if !self.is_stream() {
            return match n {
                _ if last => b"\"}".to_vec(),
                0 => format!("{{\"id\":\"{id:016x}\",\"call\":\"{tag}\",\"text\":\"{text}").into(),
                _ => text.into_bytes(),
            };
        }
        let event = match (surface, last) {
            (Surface::Messages, false) => "event: content_block_delta\n",
            (Surface::Messages, true) => "event: message_stop\n",
            (Surface::Responses, false) => "event: response.output_text.delta\n",
            (Surface::Responses, true) => "event: response.completed\n",
            _ => "",
        };
        let data = match (surface, last) {
            (Surface::Messages, true) => "{\"type\":\"message_stop\"}".to_owned(),
            (Surface::Responses, true) => "{\"type\":\"response.completed\"}".to_owned(),
            (_, true) => "[DONE]".to_owned(),
            (_, false) => {
                format!("{{\"id\":\"{id:016x}\",\"call\":\"{tag}\",\"n\":{n},\"text\":\"{text}\"}}")
            }
        };
        format!("{event}data: {data}\n\n").into_bytes()
    }

    /// The server's answer is an event stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.stream && self.fate != Fate::Refused
    }

    /// The whole answer of call `tag`; of `Words` the text that its client is told.
    pub(crate) fn answer(&self, surface: Surface, tag: &str) -> Vec<u8> {
        if surface == Surface::Words {
            let pieces = (0..self.pieces).map(|n| self.word(tag, n));
            return pieces.collect::<String>().into_bytes();
        }
        let pieces = (0..=self.pieces).flat_map(|n| self.piece(surface, tag, n));
        pieces.collect()
    }

    /// The tag in the first bytes of an answer, once it is all there.
    pub(crate) fn tag(surface: Surface, answer: &[u8]) -> Option<String> {
        const BEFORE: &[u8] = b"\"call\":\"";
        let (begin, end) = if surface == Surface::Words {
            (answer.iter().position(|&byte| byte == b'/')? + 1, b'/')
        } else {
            let at = answer
                .windows(BEFORE.len())
                .position(|part| part == BEFORE)?;
            (at + BEFORE.len(), b'"')
        };
        let length = answer[begin..].iter().position(|&byte| byte == end)?;
        String::from_utf8(answer[begin..begin + length].to_vec()).ok()
    }

    fn letters(&self, tag: &str, n: u32) -> String {
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let call = tag.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
        letters(self.id, call, n, self.piece_bytes)
    }

    fn word(&self, tag: &str, n: u32) -> String {
        let text = self.letters(tag, n);
        match n {
            0 => format!("{:016x}/{tag}/{text}", self.id),
            _ => text,
        }
    }

    fn word_line(&self, tag: &str, n: u32) -> String {
        let (text, done) = if n == self.pieces {
            (String::new(), true)
        } else {
            (self.word(tag, n), false)
        };
        let end = if done {
            ",\"done_reason\":\"stop\""
        } else {
            ""
        };
        format!(
            "{{\"model\":\"words\",\"created_at\":\"2026-01-01T00:00:00Z\",\"message\":\
             {{\"role\":\"assistant\",\"content\":\"{text}\"}},\"done\":{done}{end}}}\n"
        )
    }
}

/// The first half of a SHA-256, in hexadecimal.
pub(crate) fn digest_of(bytes: &[u8]) -> String {
    let whole = digest(&SHA256, bytes);
    let half = &whole.as_ref()[..16];
    half.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// In whatever clients and servers say to each other: nobody between may write it down.
pub(crate) const CANARY: &str = "chaostold";

/// `length` letters that only this request, call and piece have, behind the canary.
fn letters(id: u64, call: u64, n: u32, length: u32) -> String {
    let mut dice = Dice::new(id ^ call, u64::from(n));
    let mut text = CANARY.to_owned();
    text.reserve(length as usize);
    while text.len() < length as usize {
        let eight = dice.next().to_le_bytes();
        text.extend(eight.map(|byte| char::from(b'a' + byte % 26)));
    }
    text.truncate(length as usize);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(stream: bool, fate: Fate) -> Ask {
        Ask {
            id: 0xabc,
            stream,
            pieces: 4,
            piece_bytes: 30,
            pause_ms: 3,
            fate,
        }
    }

    #[test]
    fn a_mark_is_found_in_every_body() {
        let surfaces = [Surface::Chat, Surface::Embeddings, Surface::Messages];
        for (surface, (fate, _)) in surfaces.iter().flat_map(|&s| FATES.map(|fate| (s, fate))) {
            let asked = ask(true, fate);
            let body = asked.body(surface, "m", 100);
            assert_eq!(Ask::find(body.as_bytes()), Some(asked), "{body}");
            let value: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!(value["model"], "m");
        }
        assert_eq!(
            Ask::find(b"{\"model\":\"m\",\"input\":\"chaos-asks/1/x\"}"),
            None
        );
    }

    #[test]
    fn an_answer_names_its_call_and_differs_between_calls() {
        for surface in [Surface::Chat, Surface::Responses, Surface::Words] {
            for stream in [true, false] {
                let asked = ask(stream, Fate::Whole);
                let answer = asked.answer(surface, "p1.1.7");
                assert_eq!(Ask::tag(surface, &answer).as_deref(), Some("p1.1.7"));
                assert_eq!(answer, asked.answer(surface, "p1.1.7"));
                let told = String::from_utf8(answer.clone()).unwrap();
                assert!(told.contains(CANARY), "{told}");
                assert_ne!(answer, asked.answer(surface, "p1.1.8"));
                let half = &answer[..answer.len() / 2];
                assert_ne!(half, &asked.answer(surface, "p1.1.8")[..half.len()]);
            }
        }
        let whole = ask(false, Fate::Whole).answer(Surface::Chat, "p1.1.1");
        serde_json::from_slice::<serde_json::Value>(&whole).unwrap();
    }

    #[test]
    fn one_server_is_silent_and_the_other_is_not() {
        assert_eq!(Fate::SilentAtFirst.at("p1"), Fate::Silent);
        assert_eq!(Fate::SilentAtFirst.at("p2"), Fate::Whole);
        assert_eq!(Fate::Broken.at("p1"), Fate::Broken);
    }
}
