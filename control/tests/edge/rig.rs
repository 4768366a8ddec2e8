//! A control core, a clock, and short names for what tests say to it.
use core::num::NonZeroU64;
use std::sync::Arc;

use iop_control::edge::{Control, HealthNotice, NodeNotice, ProviderSnapshot};
use iop_control::names::{
    AdapterName, Gone, ModelName, Names, NodeName, NodePayload, ProviderName, QueueLimits, Waits,
};
use iop_control::step::{
    CommandAnswer, CommandId, Effect, Eligibility, Ending, Event, Evidence, Handoff, Out, Probed,
};
use iop_proto::catalog::{Operation, ProviderKind};
use iop_proto::domain::{CommandKind, HealthEvidence, RefreshStatus};
use iop_proto::ids::{ClientRef, ModelIndex, NodeIndex, Now, ProviderIndex, RefreshId, RunRef};
use iop_proto::ids::{SessionRef, ShardIndex, SlotGeneration};
use iop_proto::limits::DISPATCH_MS_DEFAULT;
use iop_proto::reason::Reason;

pub(crate) const CHAT: Operation = Operation::ChatCompletions;

pub(crate) fn node(row: usize) -> NodeIndex {
    NodeIndex::new(row).unwrap()
}

pub(crate) fn provider(row: usize) -> ProviderIndex {
    ProviderIndex::new(row).unwrap()
}

pub(crate) fn model(row: usize) -> ModelIndex {
    ModelIndex::new(row).unwrap()
}

/// Connection number `slot`, in its `generation`th tenancy of that slot.
pub(crate) fn session_again(slot: u32, generation: u32) -> SessionRef {
    SessionRef {
        shard: ShardIndex::new(0).unwrap(),
        slot,
        generation: SlotGeneration::new(generation).unwrap(),
    }
}

pub(crate) fn session(slot: u32) -> SessionRef {
    session_again(slot, 1)
}

pub(crate) fn client(slot: u32) -> ClientRef {
    ClientRef {
        shard: ShardIndex::new(0).unwrap(),
        slot,
        generation: SlotGeneration::FIRST,
    }
}

/// Gives each node the configuration that its providers need.
fn write_payloads(names: &mut Names) {
    for row in 0..names.nodes.len() {
        let of_node = names.providers.iter().filter(|p| p.node == node(row));
        let mut adapters: Vec<_> = of_node
            .map(|provider| AdapterName {
                name: provider.adapter.clone(),
                kind: provider.kind,
                profile: provider.profile.clone(),
            })
            .collect();
        adapters.dedup();
        names.nodes[row].config_payload = Arc::new(NodePayload {
            bytes: format!("{adapters:?}").into_bytes(),
            adapters,
        });
    }
}

/// Takes a provider out of a file's table.
pub(crate) fn drop_provider(names: &mut Names, row: usize) {
    names.providers.remove(row);
    for model in &mut names.models {
        let kept = model.providers.iter().map(|p| p.row());
        let kept = kept.filter(|&p| p != row);
        model.providers = kept.map(|p| provider(p - usize::from(p > row))).collect();
    }
}

/// Takes a node and its providers out of a file's table.
pub(crate) fn drop_node(names: &mut Names, row: usize) {
    while let Some(of_node) = names.providers.iter().position(|p| p.node == node(row)) {
        drop_provider(names, of_node);
    }
    names.nodes.remove(row);
    for provider in &mut names.providers {
        let at = provider.node.row();
        Arc::make_mut(provider).node = node(at - usize::from(at > row));
    }
}

/// Builds a name table row by row.
pub(crate) struct World(pub(crate) Names);

impl World {
    /// `nodes` nodes, no provider, no model; generous queue, 30 s wait.
    pub(crate) fn new(nodes: usize) -> Self {
        let nodes = (0..nodes).map(|row| NodeName {
            id: format!("n{row}"),
            certificate_name: format!("n{row}"),
            config_payload: Arc::default(),
        });
        Self(Names {
            nodes: nodes.collect(),
            providers: Vec::new(),
            models: Vec::new(),
            queue: QueueLimits {
                waiters_max: 1_024,
                waiting_bytes_max: 1 << 30,
                wait_ms: 30_000,
                dispatch_ms: DISPATCH_MS_DEFAULT,
            },
            waits: Waits::default(),
            gone: Gone::default(),
        })
    }

    /// A provider on a node; long requests as many as any.
    pub(crate) fn provider(mut self, on: usize, capacity: u32) -> Self {
        let row = self.0.providers.len();
        self.0.providers.push(Arc::new(ProviderName {
            capacity,
            long_capacity: capacity,
            ..ProviderName::new(
                &format!("pv{row}"),
                node(on),
                ProviderKind::OpenAiCompat,
                "a",
                &format!("t{row}"),
            )
        }));
        self
    }

    /// Changes the provider added last.
    pub(crate) fn but(mut self, change: impl FnOnce(&mut ProviderName)) -> Self {
        change(Arc::make_mut(self.0.providers.last_mut().unwrap()));
        self
    }

    pub(crate) fn model(mut self, providers: &[usize]) -> Self {
        let row = self.0.models.len();
        self.0.models.push(ModelName {
            name: format!("m{row}"),
            providers: providers.iter().map(|&row| provider(row)).collect(),
            long_threshold_bytes: 1_000,
            created: 0,
        });
        self
    }

    pub(crate) fn queue(mut self, waiters_max: u32, waiting_bytes_max: u64) -> Self {
        self.0.queue.waiters_max = waiters_max;
        self.0.queue.waiting_bytes_max = waiting_bytes_max;
        self
    }

    pub(crate) fn rig(mut self) -> Rig {
        write_payloads(&mut self.0);
        Rig {
            control: Control::new(Arc::new(self.0.clone()), 1, Now::default()),
            file: self.0,
            now: Now::default(),
            spares: Vec::new(),
            out: Out::default(),
        }
    }
}

/// One node, one provider of `capacity`, one model.
pub(crate) fn small(capacity: u32) -> Rig {
    World::new(1).provider(0, capacity).model(&[0]).rig()
}

pub(crate) struct Rig {
    pub(crate) control: Control,
    /// The configuration as its file has it.
    file: Names,
    pub(crate) now: Now,
    /// Runs a test has put by.
    pub(crate) spares: Vec<RunRef>,
    out: Out,
}

impl Rig {
    /// One step; every invariant holds after it.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Effect> {
        self.control.handle(self.now, event, &mut self.out);
        self.settle()
    }

    /// Moves the clock and fires what is due; pings are answered and not reported.
    pub(crate) fn pass_ms(&mut self, ms: u64) -> Vec<Effect> {
        let end = self.now.after_ms(ms);
        let mut effects = Vec::new();
        while let Some(due) = self.control.next_deadline().filter(|&due| due <= end) {
            self.now = due.max(self.now);
            effects.extend(self.tick());
        }
        self.now = end;
        effects
    }

    /// Changes the file and takes it.
    pub(crate) fn takes(&mut self, change: impl FnOnce(&mut Names)) {
        change(&mut self.file);
        write_payloads(&mut self.file);
        let names = self.control.names().succeed(&self.file).unwrap().names;
        self.control.reload(self.now, Arc::new(names));
    }

    /// Changes the file and takes it; what follows at once.
    pub(crate) fn reload(&mut self, change: impl FnOnce(&mut Names)) -> Vec<Effect> {
        self.takes(change);
        let mut effects = self.tick();
        effects.extend(self.pass_ms(0));
        effects
    }

    pub(crate) fn tick(&mut self) -> Vec<Effect> {
        self.control.tick(self.now, &mut self.out);
        self.settle()
    }

    /// Handles one event step by step, and lets `look` see the core between two of them, together with
    /// the effects that the last one handed out.
    pub(crate) fn watch(&mut self, event: Event, mut look: impl FnMut(&Control, &[Effect])) {
        self.control.handle(self.now, event, &mut self.out);
        loop {
            let effects: Vec<_> = self.out.drain().collect();
            look(&self.control, &effects);
            if !self.control.has_pending() {
                return;
            }
            self.control.tick(self.now, &mut self.out);
        }
    }

    fn settle(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        loop {
            let mut pongs = Vec::new();
            for effect in self.out.drain() {
                match effect {
                    Effect::Ping { token } => pongs.push(token),
                    _ => effects.push(effect),
                }
            }
            if let Err(violation) = self.control.check() {
                panic!("{violation}");
            }
            for token in pongs {
                self.control
                    .handle(self.now, Event::Pong { token }, &mut self.out);
                effects.extend(self.out.drain());
            }
            if !self.control.has_pending() {
                return effects;
            }
            self.control.tick(self.now, &mut self.out);
        }
    }

    pub(crate) fn register(&mut self, session: SessionRef, row: usize) -> Vec<Effect> {
        let claimed = Some(node(row));
        self.step(Event::Register {
            session,
            reply_to: 1,
            claimed,
            certified: claimed,
        })
    }

    pub(crate) fn ready(&mut self, session: SessionRef, row: usize) -> Vec<Effect> {
        let claimed = Some(node(row));
        self.step(Event::Ready {
            session,
            reply_to: 2,
            claimed,
        })
    }

    /// Registers and readies; what follows from the ready, its acknowledgement included.
    pub(crate) fn up(&mut self, session: SessionRef, row: usize) -> Vec<Effect> {
        let accepted = self.register(session, row);
        assert!(matches!(
            accepted.last(),
            Some(Effect::RegisterReply { refusal: None, .. })
        ));
        let effects = self.ready(session, row);
        assert!(matches!(
            effects.first(),
            Some(Effect::ReadyReply { refusal: None, .. })
        ));
        effects
    }

    pub(crate) fn close(&mut self, session: SessionRef) -> Vec<Effect> {
        let cause = Reason::PeerClosed;
        self.step(Event::Closed { session, cause })
    }

    pub(crate) fn submit(&mut self, slot: u32, to: usize) -> Vec<Effect> {
        self.submit_as(slot, to, CHAT, false, 100)
    }

    pub(crate) fn submit_as(
        &mut self,
        slot: u32,
        to: usize,
        operation: Operation,
        long: bool,
        body_bytes: u32,
    ) -> Vec<Effect> {
        self.step(Event::Submit {
            client: client(slot),
            model: model(to),
            operation,
            long,
            body_bytes,
        })
    }

    /// Submits and is granted at once.
    pub(crate) fn run(&mut self, slot: u32, to: usize) -> RunRef {
        let effects = self.submit(slot, to);
        let granted = grants(&effects);
        assert_eq!(granted.len(), 1, "{effects:?}");
        assert_eq!(granted[0].0, client(slot));
        granted[0].1
    }

    /// A run of model 0 that has begun.
    pub(crate) fn begin_run(&mut self, slot: u32) -> RunRef {
        let run = self.run(slot, 0);
        self.begun(run);
        run
    }

    pub(crate) fn begun(&mut self, run: RunRef) {
        assert_eq!(self.step(Event::Begun { run }), []);
    }

    pub(crate) fn complete(&mut self, run: RunRef) -> Vec<Effect> {
        let ending = Ending::Complete;
        self.step(Event::Terminal { run, ending })
    }

    /// The stall terminal of a begun run, whose client waits for the handoff in `slot`.
    pub(crate) fn stalls(&mut self, run: RunRef, slot: u32, evidence: Evidence) -> Vec<Effect> {
        let client = Some(client(slot));
        self.step(Event::Stalled {
            run,
            client,
            evidence,
            recovery: Eligibility::Off,
        })
    }

    /// As `stalls`, with valid evidence, and nothing on the shard speaks against a second run.
    pub(crate) fn stalls_whole(&mut self, run: RunRef, slot: u32) -> Vec<Effect> {
        let client = Some(client(slot));
        self.step(Event::Stalled {
            run,
            client,
            evidence: evidence(HealthEvidence::Unknown, 0),
            recovery: Eligibility::Eligible,
        })
    }

    /// Submits, is granted, begins and stalls with `health` under `seq`; what follows.
    pub(crate) fn stall(&mut self, to: usize, health: HealthEvidence, seq: u64) -> Vec<Effect> {
        let run = self.run(900, to);
        self.begun(run);
        self.stalls(run, 900, evidence(health, seq))
    }

    /// Asks as an operator; the command that was sent.
    pub(crate) fn ask(&mut self, on: usize, about: usize) -> CommandId {
        let kind = CommandKind::Capabilities;
        let about = Some(provider(about));
        let asked = self
            .control
            .command(self.now, node(on), kind, about, &mut self.out);
        let sent = commands(&self.settle());
        let command = asked.expect("the node is ready");
        assert!(sent.iter().any(|sent| sent.1 == command), "{sent:?}");
        command
    }

    pub(crate) fn answers(
        &mut self,
        session: SessionRef,
        command: CommandId,
        probed: Probed,
    ) -> Vec<Effect> {
        let answer = CommandAnswer::Probed(probed);
        self.step(Event::CommandAnswer {
            session,
            command,
            answer,
        })
    }

    /// Asks about a provider and is told that it is available.
    pub(crate) fn finds(&mut self, session: SessionRef, of: usize, seq: u64) -> Vec<Effect> {
        let on = self.control.names().provider(provider(of)).node.row();
        let command = self.ask(on, of);
        self.answers(session, command, available(seq))
    }

    pub(crate) fn health(&mut self) -> Vec<HealthNotice> {
        self.control.take_health().collect()
    }

    pub(crate) fn answer(
        &mut self,
        session: SessionRef,
        refresh: RefreshId,
        status: RefreshStatus,
    ) -> Vec<Effect> {
        let mut effects = self.step(Event::Refreshed {
            session,
            refresh,
            status,
        });
        effects.extend(self.pass_ms(0));
        effects
    }

    pub(crate) fn back(&mut self, run: RunRef, slot: u32) -> Vec<Effect> {
        let client = Some(client(slot));
        self.step(Event::NotSent { run, client })
    }

    pub(crate) fn shown(&self, of: usize) -> ProviderSnapshot {
        let snapshot = self.control.snapshot(self.now);
        let mut all = snapshot.nodes.iter().flat_map(|node| &node.providers);
        *all.find(|shown| shown.provider == provider(of)).unwrap()
    }

    pub(crate) fn is_connected(&self, row: usize) -> bool {
        self.control.snapshot(self.now).nodes[row].connected
    }

    pub(crate) fn waiting(&self) -> usize {
        self.control.snapshot(self.now).edge.waiting
    }

    pub(crate) fn notices(&mut self) -> Vec<NodeNotice> {
        self.control.take_events().collect()
    }
}

/// (client, run, session, provider) of each grant, in order.
pub(crate) fn grants(effects: &[Effect]) -> Vec<(ClientRef, RunRef, SessionRef, ProviderIndex)> {
    let grant = |effect: &Effect| match *effect {
        Effect::Grant {
            client,
            run,
            session,
            provider,
        } => Some((client, run, session, provider)),
        _ => None,
    };
    effects.iter().filter_map(grant).collect()
}

/// (session, refresh) of each push, in order.
pub(crate) fn refreshes(effects: &[Effect]) -> Vec<(SessionRef, RefreshId)> {
    let push = |effect: &Effect| match *effect {
        Effect::Refresh {
            session, refresh, ..
        } => Some((session, refresh)),
        _ => None,
    };
    effects.iter().filter_map(push).collect()
}

/// (session, cause) of each close, in order.
pub(crate) fn closes(effects: &[Effect]) -> Vec<(SessionRef, Reason)> {
    let close = |effect: &Effect| match *effect {
        Effect::Close { session, cause } => Some((session, cause)),
        _ => None,
    };
    effects.iter().filter_map(close).collect()
}

/// The clients granted, in order.
pub(crate) fn granted(effects: &[Effect]) -> Vec<ClientRef> {
    grants(effects).into_iter().map(|grant| grant.0).collect()
}

pub(crate) fn clients(slots: impl IntoIterator<Item = u32>) -> Vec<ClientRef> {
    slots.into_iter().map(client).collect()
}

/// (client, reason, Retry-After) of each refusal, in order.
pub(crate) fn refused(effects: &[Effect]) -> Vec<(ClientRef, Reason, u16)> {
    let refusal = |effect: &Effect| match *effect {
        Effect::Refuse {
            client,
            reason,
            retry_after_s,
        } => Some((client, reason, retry_after_s)),
        _ => None,
    };
    effects.iter().filter_map(refusal).collect()
}

/// Valid evidence of a stall; 0: without a number.
pub(crate) fn evidence(health: HealthEvidence, seq: u64) -> Evidence {
    let seq = NonZeroU64::new(seq);
    Evidence::Valid { health, seq }
}

pub(crate) fn available(seq: u64) -> Probed {
    let seq = NonZeroU64::new(seq).unwrap();
    Probed::Available { seq }
}

/// (client, handoff) of each handoff, in order.
pub(crate) fn handoffs(effects: &[Effect]) -> Vec<(ClientRef, Option<Handoff>)> {
    let handoff = |effect: &Effect| match *effect {
        Effect::Handoff {
            client, handoff, ..
        } => Some((client, handoff)),
        _ => None,
    };
    effects.iter().filter_map(handoff).collect()
}

/// (session, command, provider) of each command, in order.
pub(crate) fn commands(effects: &[Effect]) -> Vec<(SessionRef, CommandId, Option<ProviderIndex>)> {
    let command = |effect: &Effect| match *effect {
        Effect::Command {
            session,
            command,
            provider,
            ..
        } => Some((session, command, provider)),
        _ => None,
    };
    effects.iter().filter_map(command).collect()
}

/// The answers to readies, in order: `None` is true.
pub(crate) fn ready_replies(effects: &[Effect]) -> Vec<Option<Reason>> {
    let reply = |effect: &Effect| match *effect {
        Effect::ReadyReply { refusal, .. } => Some(refusal),
        _ => None,
    };
    effects.iter().filter_map(reply).collect()
}
