//! Commands to nodes: one question, one answer, a bounded wait; never an execution. `[R-254]` `[R-259]`
//!
//! A command belongs to the generation it was sent under. Whatever ends it (its answer, its time,
//! the generation's end) takes its row away, so that a later answer finds nothing. `[R-181]`
//!
//! Lives on: control. Bound: `COMMANDS_PER_NODE_MAX` per node, `OPERATOR_COMMANDS_MAX` of operators
//! in all; an operator's that has ended waits to be taken, within that bound.
use std::collections::VecDeque;

use iop_proto::domain::CommandKind;
use iop_proto::ids::{Generation, NodeIndex, Now, ProviderIndex, SessionRef};
use iop_proto::limits::{COMMANDS_PER_NODE_MAX, NODES_MAX, OPERATOR_COMMANDS_MAX};

use super::overlay::BindingId;
use super::{Control, Timer};
use crate::slab::Slab;
use crate::step::{CommandAnswer, CommandId, Effect, Out};

/// How a command of an operator has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandEnd {
    /// The node has answered, with an error or without.
    Answered,
    /// The node's generation ended first.
    NodeLost,
    /// No answer in time. `[D-29]`
    TimedOut,
}

/// Why a command was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandRefusal {
    /// Nobody dispatch-ready owns the node id. `[R-033]`
    NotReady,
    /// As many as may be outstanding are.
    Busy,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) node: NodeIndex,
    pub(crate) session: SessionRef,
    pub(crate) generation: Generation,
    pub(crate) provider: Option<ProviderIndex>,
    /// What the provider was bound to when it was asked about.
    pub(crate) binding: Option<BindingId>,
    deadline: Now,
}

/// A command about to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) node: NodeIndex,
    pub(crate) kind: CommandKind,
    pub(crate) provider: Option<ProviderIndex>,
    pub(crate) of_operator: bool,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Commands {
    rows: Slab<Row>,
    /// Outstanding ones of each node.
    of_node: Vec<Vec<CommandId>>,
    of_operators: u32,
    finished: VecDeque<(CommandId, CommandEnd)>,
    timeout_ms: u64,
}

impl Commands {
    pub(crate) fn new(nodes: usize, timeout_ms: u64) -> Self {
        Self {
            rows: Slab::new(NODES_MAX * COMMANDS_PER_NODE_MAX),
            of_node: vec![Vec::new(); nodes],
            of_operators: 0,
            finished: VecDeque::new(),
            timeout_ms,
        }
    }

    /// Rows for nodes that a reload has added.
    pub(crate) fn grow(&mut self, nodes: usize) {
        self.of_node.resize(nodes, Vec::new());
    }

    pub(crate) fn get(&self, command: CommandId) -> Option<Row> {
        let (slot, generation) = command.place()?;
        self.rows.get(slot, generation).copied()
    }

    /// Room for one more: a node's own probe always has a place beside those of operators.
    fn may_ask(&self, node: NodeIndex) -> bool {
        let at_node = self.of_node[node.row()].iter();
        let at_node = at_node.filter(|command| command.is_operators()).count();
        at_node + 1 < COMMANDS_PER_NODE_MAX as usize && self.of_operators < OPERATOR_COMMANDS_MAX
    }

    fn insert(&mut self, row: Row, of_operator: bool) -> CommandId {
        let (slot, generation) = self
            .rows
            .insert(row)
            .expect("each node has room for its commands");
        let command = CommandId::new(slot, generation, of_operator);
        self.of_node[row.node.row()].push(command);
        self.of_operators += u32::from(of_operator);
        command
    }

    /// Takes the row away; an operator's end is kept until it is taken.
    fn remove(&mut self, command: CommandId, end: CommandEnd) -> Option<Row> {
        let (slot, generation) = command.place()?;
        let row = self.rows.remove(slot, generation)?;
        self.of_node[row.node.row()].retain(|&known| known != command);
        if command.is_operators() {
            self.finished.push_back((command, end));
        }
        Some(row)
    }

    fn last_of(&self, node: NodeIndex) -> Option<CommandId> {
        self.of_node[node.row()].last().copied()
    }

    /// Outstanding commands, each with its deadline.
    pub(crate) fn deadlines(&self) -> impl Iterator<Item = Now> + '_ {
        self.rows.iter().map(|row| row.deadline)
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter()
    }

    /// Outstanding and untaken ones of operators, and rows in the nodes' lists: what must be equal.
    pub(crate) fn is_sound(&self) -> bool {
        let listed: usize = self.of_node.iter().map(Vec::len).sum();
        let operators = self.of_node.iter().flatten().filter(|c| c.is_operators());
        listed == self.rows.used() as usize
            && operators.count() + self.finished.len() == self.of_operators as usize
    }
}

impl Control {
    /// Asks a ready node on an operator's behalf; one effect. `provider` names what is asked about,
    /// and is one of the node's. The end comes from `take_finished`.
    ///
    /// # Errors
    /// Nothing was sent.
    ///
    /// # Panics
    /// As `handle`.
    pub fn command(
        &mut self,
        now: Now,
        node: NodeIndex,
        kind: CommandKind,
        provider: Option<ProviderIndex>,
        out: &mut Out,
    ) -> Result<CommandId, CommandRefusal> {
        self.begin(now, out);
        if !self.commands.may_ask(node) {
            return Err(CommandRefusal::Busy);
        }
        let question = Question {
            node,
            kind,
            provider,
            of_operator: true,
        };
        let asked = self.ask(now, question, out);
        self.end();
        asked.ok_or(CommandRefusal::NotReady)
    }

    /// Ends of operators' commands since the last call, oldest first. Each frees its place.
    pub fn take_finished(&mut self) -> impl Iterator<Item = (CommandId, CommandEnd)> + '_ {
        let commands = &mut self.commands;
        commands.of_operators -= u32::try_from(commands.finished.len()).unwrap_or(u32::MAX);
        commands.finished.drain(..)
    }

    /// Sends a command to the node's ready owner. `None`: there is none.
    pub(super) fn ask(&mut self, now: Now, question: Question, out: &mut Out) -> Option<CommandId> {
        let owner = self.registry.owner(question.node)?;
        if !owner.is_ready {
            return None;
        }
        let deadline = now.after_ms(self.commands.timeout_ms);
        let row = Row {
            node: question.node,
            session: owner.session,
            generation: owner.generation,
            provider: question.provider,
            binding: question
                .provider
                .map(|provider| self.resources.get(provider).bindings.present()),
            deadline,
        };
        let command = self.commands.insert(row, question.of_operator);
        self.timers.set(deadline, Timer::Command(command));
        self.counters.commands_sent += 1;
        out.push(Effect::Command {
            session: owner.session,
            command,
            kind: question.kind,
            provider: question.provider,
        });
        Some(command)
    }

    /// The node has answered, once; on another session than it was asked is not an answer.
    pub(super) fn command_answered(
        &mut self,
        now: Now,
        session: SessionRef,
        command: CommandId,
        answer: CommandAnswer,
        out: &mut Out,
    ) {
        let known = self.commands.get(command);
        let Some(row) = known.filter(|row| row.session == session) else {
            self.counters.stale_events += 1;
            return;
        };
        self.finish_command(command, CommandEnd::Answered);
        match answer {
            CommandAnswer::Failed => self.counters.commands_failed += 1,
            CommandAnswer::Told => self.counters.commands_answered += 1,
            CommandAnswer::Probed(probed) => {
                self.counters.commands_answered += 1;
                self.probed(now, row, probed);
            }
        }
        self.probe_ended(now, command, row.node, out);
    }

    /// No answer in time: it fails here, and leases are none of its business. `[D-29]`
    pub(super) fn command_over(&mut self, now: Now, command: CommandId, out: &mut Out) {
        let Some(row) = self.commands.remove(command, CommandEnd::TimedOut) else {
            return;
        };
        self.counters.commands_timed_out += 1;
        self.probe_ended(now, command, row.node, out);
    }

    /// The node's generation ends, and with it every question to it. `[states §1 fence]`
    pub(super) fn fail_commands(&mut self, node: NodeIndex) {
        while let Some(command) = self.commands.last_of(node) {
            self.finish_command(command, CommandEnd::NodeLost);
            self.counters.commands_lost += 1;
        }
        self.stop_probes(node);
    }

    fn finish_command(&mut self, command: CommandId, end: CommandEnd) {
        if let Some(row) = self.commands.remove(command, end) {
            self.timers.cancel(row.deadline, Timer::Command(command));
        }
    }
}
