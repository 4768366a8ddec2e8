//! What happens to whom, and when: a list that follows from seed and minutes alone.
//!
//! Lives on: the harness. View: names of parts and links. Bound: `STEPS` a round.
//!
//! Each round of the first two thirds kills one of the parts in turn; in the last third Edges and nodes
//! live on, so that what grows in them shows.
use std::fmt;

use crate::dice::Dice;

/// A round with its quiet point, as planned: three a minute.
const ROUNDS_PER_MINUTE: u32 = 3;
/// Load lasts this long in a round, milliseconds; every fault begins within.
pub(crate) const LOAD_MS: u32 = 13_000;
const FIRST_MS: u32 = 700;
/// Faults of a round besides its kill.
const STEPS: u32 = 5;

/// A program of the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    /// 0: plain clients, two shards, API keys. 1: TLS clients, managed credentials.
    Edge(u8),
    /// 0 and 1 belong to the first Edge, 2 to the second.
    Node(u8),
    /// The model server beside that node.
    Server(u8),
}

pub(crate) const EDGES: u8 = 2;
pub(crate) const NODES: u8 = 3;

impl Who {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Edge(n) => format!("e{}", n + 1),
            Self::Node(n) => format!("n{}", n + 1),
            Self::Server(n) => format!("p{}", n + 1),
        }
    }

    /// The Edge of a node or a model server.
    pub(crate) const fn edge_of(row: u8) -> u8 {
        if row < 2 { 0 } else { 1 }
    }
}

/// In this order they are killed.
const TURNS: [Who; 8] = [
    Who::Edge(0),
    Who::Node(0),
    Who::Server(0),
    Who::Edge(1),
    Who::Node(2),
    Who::Server(1),
    Who::Node(1),
    Who::Server(2),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Signal {
    Kill,
    Terminate,
}

/// Between a node and its Edge, or between a node and its model server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Link {
    Edge(u8),
    Server(u8),
}

impl Link {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Edge(n) => format!("n{0}-e{1}", n + 1, Who::edge_of(n) + 1),
            Self::Server(n) => format!("n{0}-p{0}", n + 1),
        }
    }
}

/// What a link does to what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// Nothing passes, and nobody is told.
    Silent,
    /// Nothing of the node passes, and nobody is told.
    DeafAway,
    /// Nothing for the node passes, and nobody is told.
    DeafBack,
    /// Every connection is reset, at both ends.
    Cut,
    /// The node's sending side of every connection is closed; the other goes on.
    HalfClosed,
    /// Everything is late by this many milliseconds.
    Late(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill {
        who: Who,
        signal: Signal,
        down_ms: u32,
    },
    /// SIGSTOP, then SIGCONT.
    Pause { who: Who, ms: u32 },
    Link {
        link: Link,
        trouble: Trouble,
        ms: u32,
    },
    /// SIGHUP: configuration and certificates are read again.
    Reload { edge: u8 },
    /// An operator drains the node.
    Drain { node: u8 },
}

impl Fault {
    /// What it is counted under.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Kill { who, signal, .. } => match (who, signal) {
                (Who::Edge(_), Signal::Kill) => "SIGKILL of an Edge",
                (Who::Edge(_), Signal::Terminate) => "SIGTERM of an Edge",
                (Who::Node(_), Signal::Kill) => "SIGKILL of a node",
                (Who::Node(_), Signal::Terminate) => "SIGTERM of a node",
                (Who::Server(_), Signal::Kill) => "SIGKILL of a model server",
                (Who::Server(_), Signal::Terminate) => "SIGTERM of a model server",
            },
            Self::Pause { who, .. } => match who {
                Who::Edge(_) => "pause of an Edge",
                Who::Node(_) => "pause of a node",
                Who::Server(_) => "pause of a model server",
            },
            Self::Link { trouble, .. } => match trouble {
                Trouble::Silent => "silent link",
                Trouble::DeafAway | Trouble::DeafBack => "link silent one way",
                Trouble::Cut => "link cut",
                Trouble::HalfClosed => "link half closed",
                Trouble::Late(_) => "late link",
            },
            Self::Reload { .. } => "reload",
            Self::Drain { .. } => "drain of a node",
        }
    }

    /// The Edge whose answers it may break off; a reload touches none.
    pub(crate) const fn troubles(&self) -> Option<Who> {
        let row = match *self {
            Self::Kill { who, .. } | Self::Pause { who, .. } => match who {
                Who::Edge(edge) => edge,
                Who::Node(row) | Who::Server(row) => Who::edge_of(row),
            },
            Self::Link { link, .. } => match link {
                Link::Edge(row) | Link::Server(row) => Who::edge_of(row),
            },
            Self::Drain { node } => Who::edge_of(node),
            Self::Reload { .. } => return None,
        };
        Some(Who::Edge(row))
    }

    /// Whose silence it explains: a model server whose calls may look silent or dead to its node, so that
    /// somebody is asked again, or an Edge that may answer nobody. No loss of an Edge, of a node or of
    /// the link between them is a reason to ask again; nor is a link that is late, or whose node's side
    /// is closed while answers still come.
    pub(crate) const fn explains(&self) -> Option<Who> {
        match *self {
            Self::Kill { who, .. } => match who {
                Who::Server(_) | Who::Edge(_) => Some(who),
                Who::Node(_) => None,
            },
            Self::Pause { who, .. } => match who {
                Who::Server(n) | Who::Node(n) => Some(Who::Server(n)),
                Who::Edge(_) => Some(who),
            },
            Self::Link {
                link: Link::Server(n),
                trouble,
                ..
            } => match trouble {
                Trouble::Silent | Trouble::DeafAway | Trouble::DeafBack | Trouble::Cut => {
                    Some(Who::Server(n))
                }
                Trouble::HalfClosed | Trouble::Late(_) => None,
            },
            Self::Link { .. } | Self::Reload { .. } | Self::Drain { .. } => None,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Kill {
                who,
                signal,
                down_ms,
            } => {
                write!(f, "{signal:?} {}, down {down_ms} ms", who.name())
            }
            Self::Pause { who, ms } => write!(f, "pause {} {ms} ms", who.name()),
            Self::Link { link, trouble, ms } => write!(f, "{} {trouble:?} {ms} ms", link.name()),
            Self::Reload { edge } => write!(f, "reload {}", Who::Edge(edge).name()),
            Self::Drain { node } => write!(f, "drain {}", Who::Node(node).name()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Since the round's begin.
    pub(crate) at_ms: u32,
    pub(crate) fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) steps: Vec<Step>,
}

/// Every round of a run of so many minutes.
pub(crate) fn rounds(seed: u64, minutes: u32) -> Vec<Round> {
    let count = minutes * ROUNDS_PER_MINUTE;
    let lasting = count - count / 3;
    (0..count)
        .map(|row| round(seed, row, row < lasting))
        .collect()
}

fn round(seed: u64, row: u32, may_kill: bool) -> Round {
    let mut dice = Dice::new(seed, u64::from(row));
    let mut steps = Vec::new();
    let mut add = |fault, dice: &mut Dice| {
        let at_ms = dice.between(FIRST_MS, LOAD_MS);
        steps.push(Step { at_ms, fault });
    };
    let turn = TURNS[row as usize % TURNS.len()];
    if may_kill || matches!(turn, Who::Server(_)) {
        let fault = kill(turn, &mut dice);
        add(fault, &mut dice);
    }
    for _ in 0..STEPS {
        let fault = fault(&mut dice, may_kill);
        add(fault, &mut dice);
    }
    steps.sort_by_key(|step| step.at_ms);
    Round { steps }
}

fn kill(who: Who, dice: &mut Dice) -> Fault {
    Fault::Kill {
        who,
        signal: dice.one_of(&[Signal::Kill, Signal::Terminate]),
        down_ms: dice.between(100, 2_500),
    }
}

fn fault(dice: &mut Dice, may_kill: bool) -> Fault {
    let edge = u8::from(dice.chance(40));
    let node = dice.one_of(&[0, 1, 2]);
    match dice.between(1, 20) {
        1 if may_kill => kill(Who::Edge(edge), dice),
        2..=3 if may_kill => kill(Who::Node(node), dice),
        4 => kill(Who::Server(node), dice),
        5..=6 => {
            let who = dice.one_of(&[Who::Edge(edge), Who::Node(node), Who::Server(node)]);
            let ms = dice.between(200, 4_500);
            Fault::Pause { who, ms }
        }
        7 => Fault::Reload { edge },
        8 => Fault::Drain { node },
        _ => link(node, dice),
    }
}

fn link(node: u8, dice: &mut Dice) -> Fault {
    let link = dice.one_of(&[Link::Edge(node), Link::Edge(node), Link::Server(node)]);
    let late = Trouble::Late(dice.between(10, 120));
    let trouble = dice.one_of(&[
        Trouble::Silent,
        Trouble::Silent,
        Trouble::DeafAway,
        Trouble::DeafBack,
        Trouble::Cut,
        Trouble::Cut,
        Trouble::HalfClosed,
        late,
    ]);
    // Some end before anybody gives the other up, some long after.
    let ms = dice.between(300, 6_500);
    Fault::Link { link, trouble, ms }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_plan_follows_from_its_seed() {
        assert_eq!(rounds(5, 3), rounds(5, 3));
        assert_ne!(rounds(5, 3), rounds(6, 3));
        assert_eq!(rounds(5, 3).len(), 9);
    }

    #[test]
    fn what_delays_nobody_past_a_wait_explains_nothing() {
        let link = |link, trouble| Fault::Link {
            link,
            trouble,
            ms: 9,
        };
        let near = |trouble| link(Link::Server(1), trouble).explains();
        for trouble in [
            Trouble::Silent,
            Trouble::DeafAway,
            Trouble::DeafBack,
            Trouble::Cut,
        ] {
            assert_eq!(near(trouble), Some(Who::Server(1)));
            assert_eq!(link(Link::Edge(1), trouble).explains(), None);
        }
        assert_eq!(near(Trouble::Late(120)), None);
        assert_eq!(near(Trouble::HalfClosed), None);
        let at_second = link(Link::Server(2), Trouble::Cut).troubles();
        assert_eq!(at_second, Some(Who::Edge(1)));
        assert_eq!(Fault::Reload { edge: 0 }.troubles(), None);
        let pause = |who| Fault::Pause { who, ms: 9 }.explains();
        assert_eq!(pause(Who::Node(2)), Some(Who::Server(2)));
        assert_eq!(pause(Who::Edge(1)), Some(Who::Edge(1)));
    }

    #[test]
    fn every_part_is_killed_and_the_last_third_lives_on() {
        let rounds = rounds(1, 20);
        let killed = |rounds: &[Round]| -> BTreeSet<Who> {
            let faults = rounds.iter().flat_map(|round| &round.steps);
            let killed = faults.filter_map(|step| match step.fault {
                Fault::Kill { who, .. } => Some(who),
                _ => None,
            });
            killed.collect()
        };
        assert_eq!(killed(&rounds).len(), TURNS.len());
        let last = killed(&rounds[40..]);
        assert!(!last.is_empty() && last.iter().all(|who| matches!(who, Who::Server(_))));
        let kinds = rounds.iter().flat_map(|round| &round.steps);
        let kinds: BTreeSet<_> = kinds.map(|step| step.fault.kind()).collect();
        assert_eq!(kinds.len(), 16, "{kinds:?}");
    }
}
