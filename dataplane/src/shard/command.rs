//! Commands to a node: the question as it goes on the wire, and which answer ends it. `[R-254]`
//!
//! Lives on: the shard of the node's session. Bound: `COMMANDS_PER_NODE_MAX` questions of a session
//! are known; one more takes the place of the oldest, which control has given up by then. An answer
//! to anything else is ignored, so a node cannot make its shard owe more than was asked.
use iop_control::edge::evidence::judge_probe;
use iop_control::step::{CommandAnswer, CommandId, Event};
use iop_proto::domain::{CommandKind, Message, NodeCommandRequest, NodeCommandResponse};
use iop_proto::framing::{MessageType, encode_envelope};
use iop_proto::ids::{ProviderIndex, SessionRef};
use iop_proto::limits::COMMANDS_PER_NODE_MAX;
use iop_proto::map;
use iop_proto::reason::Reason;

use super::Shard;
use crate::admin::CommandText;
use crate::metrics::ShardMetric;

/// A question that was sent.
#[derive(Clone, Copy, Debug)]
struct Question {
    command: CommandId,
    kind: CommandKind,
    provider: Option<ProviderIndex>,
}

/// The unanswered questions of one session.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// The oldest first; rows of answered ones are vacant.
    rows: [Option<Question>; COMMANDS_PER_NODE_MAX as usize],
}

impl Questions {
    fn add(&mut self, question: Question) {
        // The first vacant row closes up, or the oldest question goes.
        let row = self.rows.iter().position(Option::is_none).unwrap_or(0);
        self.rows[row..].rotate_left(1);
        *self.rows.last_mut().expect("COMMANDS_PER_NODE_MAX > 0") = Some(question);
    }

    fn take(&mut self, id: u64) -> Option<Question> {
        let asked = |row: &Option<Question>| row.is_some_and(|known| known.command.get() == id);
        let row = self.rows.iter().position(asked)?;
        self.rows[row].take()
    }
}

impl Shard {
    /// Control asks the node of `session`, if that is still dispatch-ready here. `[I3.3]`
    pub(super) fn command(
        &mut self,
        session: SessionRef,
        command: CommandId,
        kind: CommandKind,
        provider: Option<ProviderIndex>,
    ) {
        let row = session.slot as usize;
        let slot = self.sessions.get(row);
        if !slot.is_some_and(|slot| slot.is_ready(session.generation.get())) {
            return; // its close is on its way to control, which then gives the question up
        }
        let question = Question {
            command,
            kind,
            provider,
        };
        let queued = self.queue_command(row, question);
        self.sessions[row].questions.add(question);
        if let Err(reason) = queued {
            self.close_session(row, reason);
        }
    }

    fn queue_command(&mut self, row: usize, question: Question) -> Result<(), Reason> {
        let names = std::sync::Arc::clone(&self.config.names);
        let about = question.provider.map(|provider| names.provider(provider));
        let of_target = question.kind == CommandKind::Capabilities;
        let target = about.filter(|_| of_target).map(|name| name.target.clone());
        let request = NodeCommandRequest {
            command_id: question.command.get().to_string(),
            kind: question.kind,
            adapter: about.map(|name| name.adapter.clone()).unwrap_or_default(),
            target: target.unwrap_or_default(),
        };
        let (kind, payload) = map::encode(&Message::NodeCommandRequest(request));
        let mut bytes = Vec::new();
        encode_envelope(kind, question.command.get(), 0, &payload, &mut bytes)
            .map_err(|_| Reason::EnvelopeTooLong)?;
        self.queue_control(row, &bytes)
    }

    /// NodeCommandResponse: ends the question whose id it bears in the envelope and in itself.
    pub(super) fn command_answer(
        &mut self,
        row: usize,
        reply_to: u64,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let kind = MessageType::NodeCommandResponse;
        let Ok(Message::NodeCommandResponse(response)) = map::decode(kind, payload) else {
            return Err(Reason::EnvelopeMalformed);
        };
        let is_own = response.command_id == reply_to.to_string();
        let question = is_own.then(|| self.sessions[row].questions.take(reply_to));
        let Some(question) = question.flatten() else {
            self.metrics.inc(ShardMetric::EnvelopesIgnored);
            return Ok(());
        };
        let answer = self.judge_answer(question, &response);
        let session = self.session_reference(row);
        if question.command.is_operators() {
            let text = CommandText::new(question.command, response);
            // A full lane loses the text; the operator is told that there was an answer. The send
            // comes before the report, so whoever hears of the one finds the other.
            let _full = self.answers.try_send(text);
        }
        self.outbox.owe(Event::CommandAnswer {
            session,
            command: question.command,
            answer,
        });
        Ok(())
    }

    fn judge_answer(&self, question: Question, response: &NodeCommandResponse) -> CommandAnswer {
        if response.kind != question.kind || !response.error.is_empty() {
            return CommandAnswer::Failed;
        }
        match (question.kind, question.provider) {
            (CommandKind::Capabilities, Some(provider)) => {
                let name = self.config.names.provider(provider);
                let probed = judge_probe(&response.result, &name.adapter, &name.target);
                CommandAnswer::Probed(probed)
            }
            _ => CommandAnswer::Told,
        }
    }
}

#[cfg(test)]
mod tests {
    use iop_proto::ids::SlotGeneration;

    use super::*;

    fn question(slot: u32) -> Question {
        let generation = SlotGeneration::new(1).expect("not 0");
        Question {
            command: CommandId::new(slot, generation, false),
            kind: CommandKind::TransportStatus,
            provider: None,
        }
    }

    fn is_known(questions: &Questions, slot: u32) -> bool {
        let mut questions = Questions {
            rows: questions.rows,
        };
        questions.take(question(slot).command.get()).is_some()
    }

    #[test]
    fn one_question_too_many_costs_the_oldest_whatever_was_answered_before() {
        let mut questions = Questions::default();
        for slot in 0..COMMANDS_PER_NODE_MAX {
            questions.add(question(slot));
        }
        let answered = question(3).command.get();
        assert!(questions.take(answered).is_some() && questions.take(answered).is_none());
        questions.add(question(100)); // in the place of the answered one
        assert!(is_known(&questions, 0));
        questions.add(question(101));
        questions.add(question(102));
        assert!(!is_known(&questions, 0) && !is_known(&questions, 1));
        let others = (2..COMMANDS_PER_NODE_MAX).filter(|&slot| slot != 3);
        for slot in others.chain(100..103) {
            assert!(is_known(&questions, slot), "{slot}");
        }
    }
}
