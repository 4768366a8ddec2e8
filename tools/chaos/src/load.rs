//! Clients of every kind, all the while.
//!
//! Lives on: a task per client. View: one Edge. Bound: one request a client; a round's entries.
//!
//! What is asked follows from the seed; when, from how fast it is answered.
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::ask::{Ask, Fate, Surface, digest_of};
use crate::client::{Connection, Door, Leave, Manner, PATIENCE, Seen};
use crate::dice::Dice;
use crate::journal::now_ms;
use crate::judge::{Entry, Outcome, conclude};
use crate::plan::Who;

/// Between two requests of a client, milliseconds.
const REST_MS: (u32, u32) = (30, 250);
/// Before a client comes back that found nobody.
const AWAY: Duration = Duration::from_millis(250);
/// Half of what an Edge keeps a connection that is not used, which is 4 s.
const KEPT: Duration = Duration::from_secs(2);
/// What the model servers of the stage call their models.
pub(crate) const TARGET: &str = "t";

/// One Edge as its clients see it.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) who: Who,
    pub(crate) door: Door,
    pub(crate) key: String,
    /// Its requests carry managed credentials, and are raw alone.
    pub(crate) is_managed: bool,
}

/// What a client is about to do.
#[derive(Clone, Copy, Debug)]
struct Choice {
    kind: &'static str,
    surface: Surface,
    stream: bool,
    pieces: u32,
    piece_bytes: u32,
    pause_ms: u32,
    fate: Fate,
    padding: u32,
    leave: Leave,
    is_slow: bool,
    resets: bool,
}

const STREAMS: [Surface; 4] = [
    Surface::Chat,
    Surface::Completions,
    Surface::Responses,
    Surface::Messages,
];
const WHOLES: [Surface; 6] = [
    Surface::Chat,
    Surface::Completions,
    Surface::Responses,
    Surface::Messages,
    Surface::Embeddings,
    Surface::CountTokens,
];

/// Kinds of requests, and how many of a hundred are of each.
pub(crate) const KINDS: [(&str, u32); 13] = [
    ("stream", 28),
    ("whole", 16),
    ("normalized stream", 8),
    ("normalized whole", 4),
    ("large request", 6),
    ("large answer", 6),
    ("slow reader", 6),
    ("leaves before the answer", 6),
    ("leaves within the answer", 6),
    ("leaves within the request", 3),
    ("refused by the server", 4),
    ("broken by the server", 3),
    ("stalled by the server", 4),
];

impl Choice {
    fn new(dice: &mut Dice, is_managed: bool) -> Self {
        let mut roll = dice.between(1, KINDS.iter().map(|(_, share)| share).sum());
        let mut kind = KINDS[0].0;
        for (name, share) in KINDS {
            if roll <= share {
                kind = name;
                break;
            }
            roll -= share;
        }
        if is_managed && kind.starts_with("normalized") {
            kind = "stream";
        }
        let mut choice = Self {
            kind,
            surface: dice.one_of(&STREAMS),
            stream: true,
            pieces: dice.between(2, 30),
            piece_bytes: dice.between(16, 500),
            pause_ms: dice.between(0, 40),
            fate: Fate::Whole,
            padding: 0,
            leave: Leave::Never,
            is_slow: false,
            resets: false,
        };
        choice.refine(dice);
        if is_managed {
            choice.surface = match choice.surface {
                Surface::Completions => Surface::Chat,
                Surface::Embeddings => Surface::CountTokens,
                other => other,
            };
        }
        choice
    }

    fn refine(&mut self, dice: &mut Dice) {
        match self.kind {
            "whole" => self.whole(dice),
            "normalized stream" => self.surface = Surface::Words,
            "normalized whole" => {
                self.surface = Surface::Words;
                self.stream = false;
            }
            "large request" => self.padding = dice.between(200_000, 3_000_000),
            "large answer" | "slow reader" => {
                self.is_slow = self.kind == "slow reader";
                self.stream = dice.chance(50);
                self.pieces = dice.between(4, 16);
                self.piece_bytes = dice.between(20_000, 60_000);
                self.pause_ms = 1;
            }
            "leaves before the answer" => {
                self.pause_ms = dice.between(100, 400);
                self.leave = Leave::After(dice.between(1, 150));
                if dice.chance(25) {
                    // About when the stall is found, judged, and asked of somebody else.
                    self.fate = Fate::SilentAtFirst;
                    self.leave = Leave::After(dice.between(2_700, 5_200));
                }
                self.resets = dice.chance(50);
            }
            "leaves within the answer" => {
                self.pieces = dice.between(10, 60);
                self.leave = Leave::Bytes(dice.between(1, 3_000));
                self.resets = dice.chance(50);
            }
            "leaves within the request" => {
                self.padding = dice.between(2_000, 300_000);
                self.leave = Leave::Within(dice.between(1, 1_500));
                self.resets = dice.chance(50);
            }
            "refused by the server" => {
                self.whole(dice);
                self.fate = Fate::Refused;
            }
            "broken by the server" => self.fate = Fate::Broken,
            "stalled by the server" => {
                let fates = [
                    Fate::Silent,
                    Fate::SilentAtFirst,
                    Fate::SilentAtFirst,
                    Fate::SilentHalf,
                ];
                self.fate = dice.one_of(&fates);
            }
            _ => {}
        }
    }

    fn whole(&mut self, dice: &mut Dice) {
        self.stream = false;
        self.surface = dice.one_of(&WHOLES);
        self.pieces = dice.between(2, 5);
    }

    const fn ask(&self, id: u64) -> Ask {
        Ask {
            id,
            stream: self.stream,
            pieces: self.pieces,
            piece_bytes: self.piece_bytes,
            pause_ms: self.pause_ms,
            fate: self.fate,
        }
    }

    const fn manner(&self) -> Manner {
        Manner {
            leave: self.leave,
            is_slow: self.is_slow,
            resets: self.resets,
        }
    }

    /// One of a burst: whoever has to wait for all others is still served in time.
    fn whole_one(dice: &mut Dice, is_managed: bool) -> Self {
        const KINDS: [&str; 4] = ["stream", "whole", "normalized stream", "normalized whole"];
        let mut choice = Self::new(dice, is_managed);
        while !KINDS.contains(&choice.kind) {
            choice = Self::new(dice, is_managed);
        }
        Self {
            kind: "burst at a quiet point",
            pieces: choice.pieces.min(10),
            pause_ms: choice.pause_ms.min(10),
            ..choice
        }
    }

    /// The one request that shows that a model is served: of the kind that needs it.
    const fn plain(surface: Surface) -> Self {
        Self {
            kind: "at a quiet point",
            surface,
            stream: true,
            pieces: 3,
            piece_bytes: 20,
            pause_ms: 1,
            fate: Fate::Whole,
            padding: 0,
            leave: Leave::Never,
            is_slow: false,
            resets: false,
        }
    }
}

/// What a client, or all of them, brought back.
#[derive(Debug, Default)]
pub(crate) struct Harvest {
    pub(crate) entries: Vec<Entry>,
    /// Of the harness itself.
    pub(crate) faults: Vec<String>,
}

impl Harvest {
    pub(crate) fn join(&mut self, other: Self) {
        self.entries.extend(other.entries);
        self.faults.extend(other.faults);
    }
}

/// Clients at work.
#[derive(Debug)]
pub(crate) struct Load {
    stop: Rc<Cell<bool>>,
    clients: Vec<JoinHandle<Harvest>>,
}

impl Load {
    /// `clients` at each site. `round`: of the run, so that no id is used twice.
    pub(crate) fn start(sites: &[Rc<Site>], seed: u64, round: u32, clients: u32) -> Self {
        let stop = Rc::new(Cell::new(false));
        let mut tasks = Vec::new();
        for (row, site) in (0_u32..).zip(sites) {
            for n in 0..clients {
                let salt = u64::from(round) << 32 | u64::from(row * clients + n + 1) << 16;
                let client = Client::new(site, seed, salt);
                tasks.push(tokio::task::spawn_local(client.run(Rc::clone(&stop))));
            }
        }
        Self {
            stop,
            clients: tasks,
        }
    }

    /// Every client ends with the request it is in.
    pub(crate) async fn stop(self) -> Harvest {
        self.stop.set(true);
        let mut all = Harvest::default();
        for client in self.clients {
            match client.await {
                Ok(harvest) => all.join(harvest),
                Err(error) => all.faults.push(format!("a client of the harness: {error}")),
            }
        }
        all
    }
}

/// Asks for each model of the site once: all must be complete.
pub(crate) async fn probe(site: &Rc<Site>, first_id: u64) -> Harvest {
    let mut harvest = Harvest::default();
    let surfaces: &[Surface] = if site.is_managed {
        &[Surface::Chat, Surface::Messages]
    } else {
        &[Surface::Chat, Surface::Messages, Surface::Words]
    };
    let mut client = Client::new(site, 0, first_id);
    for &surface in surfaces {
        harvest
            .entries
            .push(client.request(Choice::plain(surface)).await);
    }
    harvest
}

/// As many clients as the load has ask at once, each for one whole answer: all must be complete.
pub(crate) async fn burst(site: &Rc<Site>, seed: u64, first_id: u64, clients: u32) -> Harvest {
    let all = (1..=u64::from(clients)).map(async |n| {
        let mut client = Client::new(site, seed, first_id + (n << BURST_SHIFT));
        let choice = Choice::whole_one(&mut client.dice, site.is_managed);
        client.request(choice).await
    });
    Harvest {
        entries: join_all(all).await,
        faults: Vec::new(),
    }
}

/// Ids of one client of a burst lie apart from the next one's.
const BURST_SHIFT: u32 = 4;

struct Client {
    site: Rc<Site>,
    dice: Dice,
    next_id: u64,
    connection: Option<Connection>,
    /// When `connection` has served, if there is one.
    served: Instant,
}

impl Client {
    fn new(site: &Rc<Site>, seed: u64, first_id: u64) -> Self {
        Self {
            site: Rc::clone(site),
            dice: Dice::new(seed, first_id),
            next_id: first_id,
            connection: None,
            served: Instant::now(),
        }
    }

    async fn run(mut self, stop: Rc<Cell<bool>>) -> Harvest {
        let mut harvest = Harvest::default();
        while !stop.get() {
            let choice = Choice::new(&mut self.dice, self.site.is_managed);
            harvest.entries.push(self.request(choice).await);
            if self.dice.chance(30) {
                self.connection = None;
            }
            let rest = self.dice.between(REST_MS.0, REST_MS.1);
            tokio::time::sleep(Duration::from_millis(u64::from(rest))).await;
        }
        harvest
    }

    async fn request(&mut self, choice: Choice) -> Entry {
        let ask = choice.ask(self.next_id);
        self.next_id += 1;
        let surface = choice.surface;
        let model = if surface == Surface::Words {
            "words"
        } else {
            "m"
        };
        let body = ask.body(surface, model, choice.padding);
        let asked = digest_of(ask.body(surface, TARGET, choice.padding).as_bytes());
        let from_ms = now_ms();
        let (seen, is_fresh) = self
            .exchange(&self.text(surface, &body), choice.manner())
            .await;
        let to_ms = now_ms();
        let outcome = conclude(&ask, surface, seen);
        if !matches!(outcome, Outcome::Complete { .. } | Outcome::Refused { .. }) {
            self.connection = None; // an Edge closes behind an error event
        }
        Entry {
            ask,
            surface,
            kind: choice.kind,
            asked,
            leave: choice.leave,
            site: self.site.who,
            is_fresh,
            from_ms,
            to_ms,
            outcome,
        }
    }

    fn text(&self, surface: Surface, body: &str) -> String {
        let path = surface.path();
        let key = &self.site.key;
        let key = if surface.is_anthropic() {
            format!("x-api-key: {key}")
        } else {
            format!("authorization: Bearer {key}")
        };
        let length = body.len();
        format!(
            "POST {path} HTTP/1.1\r\nhost: edge\r\n{key}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
    }

    /// Also whether the connection was made for it, or has just served.
    async fn exchange(&mut self, request: &str, manner: Manner) -> (Seen, bool) {
        let kept = if manner.keeps() {
            self.connection.take()
        } else {
            None
        };
        let is_fresh = kept.is_none() || self.served.elapsed() < KEPT;
        let mut connection = match kept {
            Some(connection) => connection,
            None => match timeout(PATIENCE, Connection::open(&self.site.door, manner)).await {
                Ok(Ok(connection)) => connection,
                Err(_) => return (Seen::Late, true),
                Ok(Err(_)) => {
                    tokio::time::sleep(AWAY).await;
                    return (Seen::Unreachable, true);
                }
            },
        };
        let (seen, again) = connection.ask(request.as_bytes(), manner).await;
        if again {
            self.connection = Some(connection);
            self.served = Instant::now();
        }
        (seen, is_fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_chosen_and_the_same_each_time() {
        let all = |managed| {
            let mut dice = Dice::new(3, 4);
            (0..1_000)
                .map(|_| Choice::new(&mut dice, managed).kind)
                .collect::<Vec<_>>()
        };
        assert_eq!(all(false), all(false));
        for (kind, _) in KINDS {
            assert!(all(false).contains(&kind), "{kind}");
        }
        assert!(!all(true).iter().any(|kind| kind.starts_with("normalized")));
        let mut dice = Dice::new(3, 5);
        for _ in 0..100 {
            let choice = Choice::whole_one(&mut dice, false);
            assert_eq!((choice.fate, choice.leave), (Fate::Whole, Leave::Never));
        }
    }
}
