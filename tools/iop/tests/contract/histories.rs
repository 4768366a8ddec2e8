//! Random histories of two nodes and their clients: whatever happens, everything is given back once.
use std::io::Write;

use iop_proto::domain::{FrameKind, GoAway, Message};

use crate::disconnect::long_chat;
use crate::kit::{Kill, Run, World, catalog, event, noise, ready, register, try_pending};
use crate::support::{Client, Node, chat, envelope, envelope_with};

/// Steps of one history.
const STEPS: u32 = 400;
/// Histories, unless `IOP_TEST_HISTORIES` in the environment says how many.
const HISTORIES: u64 = 4;
const CLIENTS_MAX: usize = 16;

/// xorshift: the same history for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).expect("below a usize")
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

const NAMES: [&str; 2] = ["n1", "n2"];

struct History<'w> {
    world: &'w World,
    dice: Dice,
    /// The connection that claimed the node last.
    nodes: [Option<Node>; 2],
    /// Connections that others have superseded.
    stale: Vec<Node>,
    /// Which node was asked, and how far it has answered.
    runs: Vec<(usize, Run)>,
    clients: Vec<Client>,
}

impl History<'_> {
    fn step(&mut self) {
        match self.dice.below(16) {
            0..4 => self.ask(),
            4 => self.leave(),
            5..7 => self.listen(),
            7..11 => self.answer(),
            11 => self.misanswer(),
            12 => self.chatter(),
            13 => {
                let row = self.dice.below(2);
                self.part(row);
            }
            14 => self.claim(),
            _ => self.haunt(),
        }
    }

    fn ask(&mut self) {
        let model = self.dice.of(&["m1", "only1", "only2"]);
        let stream = self.dice.below(2) == 0;
        if self.clients.len() >= CLIENTS_MAX {
            return;
        }
        let request = chat(model, stream);
        let text = match self.dice.below(6) {
            0 => long_chat(model, 700_000),
            1 => request[..self.dice.below(request.len())].to_owned(),
            2 => request.repeat(3),
            _ => request,
        };
        let mut client = self.world.client();
        // A client that asks too much is cut short; that is its own affair.
        let _refused = client.stream.write_all(text.as_bytes());
        self.clients.push(client);
    }

    fn leave(&mut self) {
        if !self.clients.is_empty() {
            let client = self
                .clients
                .swap_remove(self.dice.below(self.clients.len()));
            self.dice.of(&Kill::ALL).client(client);
        }
    }

    /// Takes what the Edge has for the nodes.
    fn listen(&mut self) {
        for row in 0..2 {
            let Some(node) = &mut self.nodes[row] else {
                continue;
            };
            let Some(messages) = try_pending(node) else {
                self.gone(row);
                continue;
            };
            for message in messages {
                if let Message::TunnelRequest(request) = message {
                    self.runs.push((row, Run::of(&request)));
                }
            }
        }
    }

    fn gone(&mut self, row: usize) {
        self.nodes[row] = None;
        self.runs.retain(|&(node, _)| node != row);
    }

    fn send(&mut self, row: usize, bytes: &[u8]) {
        if let Some(node) = &mut self.nodes[row]
            && !node.try_send_bytes(bytes)
        {
            self.gone(row);
        }
    }

    /// The next frame of some run, as it should be.
    fn answer(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        let at = self.dice.below(self.runs.len());
        let (row, run) = &mut self.runs[at];
        let (row, sequence) = (*row, run.next);
        run.next += 1;
        let last = match (sequence, self.dice.below(4)) {
            (1, 0) => Some(FrameKind::Error),
            (1, _) => None,
            (_, 0) => Some(FrameKind::End),
            (_, _) => None,
        };
        let bytes = match (sequence, last) {
            (_, Some(kind)) => self.runs[at].1.bare(kind, sequence),
            (1, None) => crate::kit::start_bytes(&self.runs[at].1, sequence),
            (_, None) => {
                let length = self.dice.of(&[1, 100, 17_000, 70_000]);
                crate::kit::body_bytes(&self.runs[at].1, sequence, &noise(length, 9))
            }
        };
        if last.is_some() {
            self.runs.swap_remove(at);
        }
        self.send(row, &bytes);
    }

    /// Something about some run that breaks its form.
    fn misanswer(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        let at = self.dice.below(self.runs.len());
        let (row, run) = &self.runs[at];
        let row = *row;
        let bytes = match self.dice.below(6) {
            0 => run.bare(FrameKind::End, run.next + 3),
            1 => crate::kit::body_bytes(run, run.next + 1, b"gap"),
            2 => event(&run.id, "delta"),
            3 => event(&run.id, "error"),
            4 => {
                // Half of a long body, and no more.
                let whole = crate::kit::body_bytes(run, run.next, &noise(90_000, 8));
                self.send(row, &whole[..40_000]);
                return self.part(row);
            }
            _ => run.bare(FrameKind::ResponseStart, run.next),
        };
        self.send(row, &bytes);
    }

    /// What a registered node may say, or not.
    fn chatter(&mut self) {
        let row = self.dice.below(2);
        let bytes = match self.dice.below(6) {
            0 => envelope_with(&register(NAMES[row]), 7),
            1 => envelope_with(&ready(NAMES[row]), 8),
            2 => envelope_with(&register(NAMES[1 - row]), 9),
            3 => envelope(&Message::GoAway(GoAway { grace_ms: 1 })),
            4 => vec![0; 4],
            _ => crate::kit::sealed("iop.Tomorrow", b"?"),
        };
        self.send(row, &bytes);
    }

    fn part(&mut self, row: usize) {
        if let Some(node) = self.nodes[row].take() {
            // Its unread messages are nobody's concern: a FIN is waited for, a reset is not.
            Kill::Reset.node(node);
            self.gone(row);
        }
    }

    fn claim(&mut self) {
        let row = self.dice.below(2);
        let node = Node::ready(&self.world.edge, NAMES[row]);
        self.stale.extend(self.nodes[row].replace(node));
        self.runs.retain(|&(node, _)| node != row);
    }

    /// A connection of the past says something of the present.
    fn haunt(&mut self) {
        if self.stale.is_empty() {
            return;
        }
        let at = self.dice.below(self.stale.len());
        let bytes = match self.runs.first() {
            Some((_, run)) => run.bare(FrameKind::End, run.next),
            None => envelope_with(&ready("n1"), 3),
        };
        if !self.stale[at].try_send_bytes(&bytes) {
            self.stale.swap_remove(at);
        }
    }
}

#[test]
fn whatever_nodes_and_clients_do_everything_is_given_back_once() {
    let told = std::env::var("IOP_TEST_HISTORIES");
    let histories = told.map_or(HISTORIES, |count| {
        count.parse().expect("a number of histories")
    });
    for seed in (0..histories).map(|row| 0x5eed_0001 + row) {
        eprintln!("seed {seed:#x}");
        let world = World::new(&catalog([2, 3], "timeouts:\n  queue_wait_ms: 2000\n"));
        let mut history = History {
            world: &world,
            dice: Dice(seed),
            nodes: [None, None],
            stale: Vec::new(),
            runs: Vec::new(),
            clients: Vec::new(),
        };
        for _ in 0..STEPS {
            history.step();
        }
        drop(history);
        let granted = world.edge.metrics().sum("iop_edge_leases_granted_total");
        assert!(
            granted >= 5.0,
            "a history in which {granted} requests were served shows little"
        );
        world.rest();
    }
}
