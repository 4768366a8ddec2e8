//! A naive core: what the contract says about each step, by looking at everything every time.
//!
//! It watches what control is told and what it answers, keeps its own books, and objects.
use std::collections::BTreeMap;
use std::sync::Arc;

use iop_control::edge::{Control, Health};
use iop_control::names::Names;
use iop_control::step::{CommandAnswer, CommandId, Effect, Event, Evidence, Handoff, Probed};
use iop_proto::catalog::Operation;
use iop_proto::domain::HealthEvidence;
use iop_proto::ids::{ClientRef, ModelIndex, NodeIndex, Now, ProviderIndex, RunRef, SessionRef};
use iop_proto::limits::COMMAND_MS;
use iop_proto::reason::Reason;

/// What is known of a provider in its present generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Known {
    aside: bool,
    mark: u64,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    session: SessionRef,
    provider: Option<ProviderIndex>,
    deadline: Now,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    client: ClientRef,
    age: u64,
    model: ModelIndex,
    operation: Operation,
    long: bool,
    bytes: u32,
    deadline: Now,
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    request: Request,
    provider: ProviderIndex,
    session: SessionRef,
    fenced: bool,
    begun: bool,
    cancelled: Option<Reason>,
}

#[derive(Clone, Copy, Debug)]
struct Owner {
    session: SessionRef,
    ready: bool,
    draining: bool,
}

/// Leases a provider holds: all, long ones, those that count tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    all: u32,
    long: u32,
    counting: u32,
}

pub(crate) struct Shadow {
    names: Arc<Names>,
    waiting: Vec<Request>,
    runs: BTreeMap<RunRef, Granted>,
    owners: Vec<Option<Owner>>,
    next_age: u64,
    taken: u64,
    returned: u64,
    last_used: Vec<u64>,
    /// A client that came back from a cancelled run: to be refused in this step.
    owed: Option<(ClientRef, Reason)>,
    known: Vec<Known>,
    asked: BTreeMap<CommandId, Asked>,
    /// A client whose run stalled: to be handed on in this step, with this.
    parked: Option<(ClientRef, Option<Handoff>)>,
    granted_this_step: u32,
}

impl Shadow {
    pub(crate) fn new(names: Arc<Names>) -> Self {
        Self {
            waiting: Vec::new(),
            runs: BTreeMap::new(),
            owners: vec![None; names.nodes.len()],
            next_age: 0,
            taken: 0,
            returned: 0,
            last_used: vec![0; names.providers.len()],
            owed: None,
            known: vec![Known::default(); names.providers.len()],
            asked: BTreeMap::new(),
            parked: None,
            granted_this_step: 0,
            names,
        }
    }

    /// What control is told, before its answer.
    pub(crate) fn told(&mut self, now: Now, event: &Event) {
        self.granted_this_step = 0;
        match *event {
            Event::Submit {
                client,
                model,
                operation,
                long,
                body_bytes,
            } => {
                self.waiting.push(Request {
                    client,
                    age: self.next_age,
                    model,
                    operation,
                    long,
                    bytes: body_bytes,
                    deadline: now.after_ms(self.names.queue.wait_ms),
                });
                self.next_age += 1;
            }
            Event::ClientGone { client } => self.waiting.retain(|w| w.client != client),
            Event::Begun { run } => {
                self.runs.get_mut(&run).expect("a run begins once").begun = true
            }
            Event::NotSent { run, client } => {
                let granted = self.finish(run);
                if let Some(client) = client {
                    match granted.cancelled {
                        Some(reason) => self.owed = Some((client, reason)),
                        None => self.waiting.push(Request {
                            client,
                            ..granted.request
                        }),
                    }
                }
            }
            Event::Terminal { run, .. } | Event::Lost { run } => {
                self.finish(run);
            }
            Event::Stalled {
                run,
                client,
                evidence,
            } => {
                let granted = self.finish(run);
                let handoff = self.stalled(&granted, evidence);
                self.parked = client.map(|client| (client, handoff));
            }
            Event::CommandAnswer {
                session,
                command,
                answer,
            } => self.command_answered(now, session, command, answer),
            Event::Closed { session, .. } => {
                for row in 0..self.owners.len() {
                    if self.owners[row].is_some_and(|owner| owner.session == session) {
                        self.end_ownership(row);
                    }
                }
            }
            Event::GoAway { session } => {
                for owner in self.owners.iter_mut().flatten() {
                    owner.draining |= owner.session == session && owner.ready;
                }
            }
            Event::Register { .. } | Event::Ready { .. } | Event::Pong { .. } => {}
        }
    }

    /// The evidence of a stall, by the letter: the overlay, and what is handed on.
    fn stalled(&mut self, granted: &Granted, evidence: Evidence) -> Option<Handoff> {
        let Evidence::Valid { health, seq } = evidence else {
            return None;
        };
        if granted.fenced {
            return None;
        }
        let provider = granted.provider;
        let known = &mut self.known[provider.row()];
        if let Some(seq) = seq.filter(|seq| seq.get() > known.mark) {
            known.mark = seq.get();
            known.aside |= health == HealthEvidence::Unavailable;
        }
        Some(Handoff { provider, health })
    }

    fn command_answered(
        &mut self,
        now: Now,
        session: SessionRef,
        command: CommandId,
        answer: CommandAnswer,
    ) {
        self.asked.retain(|_, asked| asked.deadline > now);
        let Some(asked) = self.asked.get(&command).copied() else {
            return;
        };
        assert_eq!(asked.session, session, "a shard answers for another");
        self.asked.remove(&command);
        let CommandAnswer::Probed(Probed::Available { seq }) = answer else {
            return;
        };
        let Some(provider) = asked.provider else {
            return;
        };
        let known = &mut self.known[provider.row()];
        if self.names.provider(provider).enabled && seq.get() > known.mark {
            *known = Known {
                aside: false,
                mark: seq.get(),
            };
        }
    }

    fn finish(&mut self, run: RunRef) -> Granted {
        let granted = self.runs.remove(&run).expect("a run is reported once");
        self.returned += u64::from(!granted.fenced);
        granted
    }

    fn end_ownership(&mut self, row: usize) {
        let owner = self.owners[row].take().expect("had an owner");
        self.asked.retain(|_, asked| asked.session != owner.session);
        for (known, name) in self.known.iter_mut().zip(&self.names.providers) {
            if name.node.row() == row {
                *known = Known::default();
            }
        }
        for granted in self.runs.values_mut() {
            if granted.session == owner.session && !granted.fenced {
                assert!(owner.ready, "a pending owner holds no lease");
                granted.fenced = true;
                self.returned += 1;
            }
        }
    }

    /// What control answered, in order.
    pub(crate) fn answered(&mut self, now: Now, effect: &Effect) {
        match *effect {
            Effect::RegisterReply {
                session,
                node: Some(node),
                refusal: None,
                ..
            } => self.accepted(session, node),
            Effect::RegisterReply { refusal, .. } => {
                assert!(refusal.is_some_and(|reason| !reason.text().is_empty()));
            }
            Effect::ReadyReply {
                session,
                refusal: None,
                ..
            } => {
                let mut owners = self.owners.iter_mut().flatten();
                let owner = owners.find(|owner| owner.session == session);
                owner.expect("only an owner's ready is true").ready = true;
            }
            Effect::ReadyReply { .. } | Effect::Ping { .. } => {}
            Effect::Close { session, .. } => {
                let owns = self
                    .owners
                    .iter()
                    .flatten()
                    .any(|owner| owner.session == session && !owner.ready);
                assert!(!owns, "a pending owner is never closed by control");
            }
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => self.granted(client, run, session, provider),
            Effect::Refuse { client, reason, .. } => self.refused(now, client, reason),
            Effect::Cancel { run, reason } => {
                let granted = self
                    .runs
                    .get_mut(&run)
                    .expect("only a granted run is cancelled");
                assert!(!granted.fenced && !granted.begun && granted.cancelled.is_none());
                granted.cancelled = Some(reason);
            }
            Effect::Handoff { client, handoff } => {
                let expected = self.parked.take();
                assert_eq!(expected, Some((client, handoff)), "not what was stalled");
                assert!(
                    self.granted_this_step == 0,
                    "granted before it was handed on"
                );
            }
            Effect::Command {
                session,
                command,
                provider,
                ..
            } => self.asks(now, session, command, provider),
            Effect::Drain { .. } | Effect::Stop { .. } => unreachable!("not in this world"),
        }
    }

    fn asks(
        &mut self,
        now: Now,
        session: SessionRef,
        command: CommandId,
        provider: Option<ProviderIndex>,
    ) {
        let mut owners = self.owners.iter().flatten();
        let owner = owners.find(|owner| owner.session == session);
        assert!(owner.is_some_and(|owner| owner.ready), "asked a stranger");
        if !command.is_operators() {
            let about = provider.expect("a probe is about a provider");
            assert!(
                self.known[about.row()].aside,
                "{about:?} is asked about in vain"
            );
            let mut others = self.asked.iter();
            let other = others.find(|(id, asked)| !id.is_operators() && asked.session == session);
            let is_over = other.is_none_or(|(_, asked)| asked.deadline <= now);
            assert!(is_over, "two probes at one node");
        }
        let deadline = now.after_ms(COMMAND_MS);
        let asked = Asked {
            session,
            provider,
            deadline,
        };
        let before = self.asked.insert(command, asked);
        assert!(before.is_none(), "a command's name was used again");
    }

    fn accepted(&mut self, session: SessionRef, node: NodeIndex) {
        let row = node.row();
        if self.owners[row].is_some_and(|owner| owner.session == session) {
            return; // a repeated registration
        }
        let others = self.owners.iter().flatten();
        assert!(
            others.into_iter().all(|owner| owner.session != session),
            "a second node id"
        );
        if self.owners[row].is_some() {
            self.end_ownership(row);
        }
        self.owners[row] = Some(Owner {
            session,
            ready: false,
            draining: false,
        });
    }

    fn granted(
        &mut self,
        client: ClientRef,
        run: RunRef,
        session: SessionRef,
        provider: ProviderIndex,
    ) {
        let at = self
            .waiting
            .iter()
            .position(|waiting| waiting.client == client);
        let request = self
            .waiting
            .remove(at.expect("only a waiting request is granted"));
        let owner = self.owners[self.names.provider(provider).node.row()];
        assert!(
            owner.is_some_and(|owner| owner.session == session),
            "granted to a stranger"
        );
        assert_eq!(run.shard, session.shard, "the run slot is on another shard");
        let (loads, held) = (self.loads(), self.held_models());
        assert!(
            self.may_serve(&loads, provider, &request),
            "{provider:?} may not serve {request:?}"
        );
        assert!(
            !held[request.model.row()],
            "granted while older ones may come back"
        );
        let chosen = self.rank(&loads, provider);
        for &other in &self.names.model(request.model).providers {
            let better =
                self.may_serve(&loads, other, &request) && self.rank(&loads, other) < chosen;
            assert!(
                !better,
                "{other:?} was better than {provider:?} for {request:?}"
            );
        }
        for older in self
            .waiting
            .iter()
            .filter(|waiting| waiting.age < request.age)
        {
            let passed = self.may_serve(&loads, provider, older) && !held[older.model.row()];
            assert!(!passed, "{request:?} overtook {older:?}");
        }
        self.granted_this_step += 1;
        self.taken += 1;
        self.last_used[provider.row()] = self.taken;
        let granted = Granted {
            request,
            provider,
            session,
            fenced: false,
            begun: false,
            cancelled: None,
        };
        assert!(
            self.runs.insert(run, granted).is_none(),
            "a run slot in use was given away"
        );
    }

    fn refused(&mut self, now: Now, client: ClientRef, reason: Reason) {
        if let Some((owed, why)) = self.owed.take() {
            assert_eq!((owed, why), (client, reason));
            return;
        }
        let at = self
            .waiting
            .iter()
            .position(|waiting| waiting.client == client);
        let request = self
            .waiting
            .remove(at.expect("only a waiting request is refused"));
        let limits = self.names.queue;
        let same = self
            .waiting
            .iter()
            .filter(|waiting| waiting.model == request.model);
        let bytes: u64 = same.clone().map(|waiting| u64::from(waiting.bytes)).sum();
        let is_right = match reason {
            Reason::QueueFull => {
                same.count() >= limits.waiters_max as usize
                    || bytes + u64::from(request.bytes) > limits.waiting_bytes_max
            }
            Reason::QueueTimeout => request.deadline <= now,
            Reason::NoProviderConfigured => {
                let providers = &self.names.model(request.model).providers;
                !providers
                    .iter()
                    .any(|&provider| self.is_configured(provider, &request))
            }
            _ => false,
        };
        assert!(is_right, "{request:?} refused as {}", reason.label());
    }

    fn is_configured(&self, provider: ProviderIndex, request: &Request) -> bool {
        let name = self.names.provider(provider);
        name.enabled
            && self
                .names
                .model(request.model)
                .providers
                .contains(&provider)
            && name.operations.contains(request.operation)
            && (!request.long || name.long_capacity > 0)
    }

    /// What each provider holds, counted from the runs.
    fn loads(&self) -> Vec<Load> {
        let mut loads = vec![Load::default(); self.names.providers.len()];
        for run in self.runs.values().filter(|run| !run.fenced) {
            let load = &mut loads[run.provider.row()];
            load.all += 1;
            load.long += u32::from(run.request.long);
            load.counting += u32::from(run.request.operation == Operation::CountTokens);
        }
        loads
    }

    /// Selectable for it.
    fn may_serve(&self, loads: &[Load], provider: ProviderIndex, request: &Request) -> bool {
        let name = self.names.provider(provider);
        let load = loads[provider.row()];
        let counts_tokens = request.operation == Operation::CountTokens;
        self.is_configured(provider, request)
            && self.owners[name.node.row()].is_some_and(|owner| owner.ready && !owner.draining)
            && !self.known[provider.row()].aside
            && load.all < name.capacity
            && (!request.long || load.long < name.long_capacity)
            && (!counts_tokens || load.counting < (name.capacity / 4).max(1))
    }

    /// Load after a grant, in 1/(5·7·8·9)ths so that it is exact for capacities up to 9; then age.
    fn rank(&self, loads: &[Load], provider: ProviderIndex) -> (u64, u64) {
        let load = u64::from(loads[provider.row()].all) + 1;
        let capacity = u64::from(self.names.provider(provider).capacity);
        (load * 2_520 / capacity, self.last_used[provider.row()])
    }

    /// Models that runs of ended generations may still come back to.
    fn held_models(&self) -> Vec<bool> {
        let mut held = vec![false; self.names.models.len()];
        for run in self.runs.values() {
            let returns = run.fenced && !run.begun && run.cancelled.is_none();
            held[run.request.model.row()] |= returns;
        }
        held
    }

    /// After a step.
    pub(crate) fn settle(&self, control: &Control) {
        assert!(
            self.owed.is_none(),
            "a cancelled request was never answered"
        );
        assert!(
            self.parked.is_none(),
            "a stalled request was never handed on"
        );
        if !control.has_pending() {
            let (loads, held) = (self.loads(), self.held_models());
            for waiting in self.waiting.iter().filter(|w| !held[w.model.row()]) {
                for &provider in &self.names.model(waiting.model).providers {
                    let stuck = self.may_serve(&loads, provider, waiting);
                    assert!(!stuck, "{waiting:?} waits while {provider:?} has room");
                }
            }
        }
        for (row, owner) in self.owners.iter().enumerate() {
            let own = control.owner(NodeIndex::new(row).unwrap());
            let same = own.map(|own| (own.session, own.is_ready));
            assert_eq!(
                same,
                owner.map(|owner| (owner.session, owner.ready)),
                "owner of n{row}"
            );
        }
    }

    /// The books, compared with the read model.
    pub(crate) fn compare(&self, now: Now, control: &Control) {
        let snapshot = control.snapshot(now);
        let loads = self.loads();
        for shown in snapshot.nodes.iter().flat_map(|node| &node.providers) {
            let load = loads[shown.provider.row()];
            let aside = self.known[shown.provider.row()].aside;
            let is_shown = !(aside && self.names.provider(shown.provider).enabled);
            let books = if is_shown {
                (load.all, load.long)
            } else {
                (0, 0)
            };
            let is_aside = shown.health == Health::Unavailable;
            assert_eq!(is_aside, !is_shown, "{:?}", shown.provider);
            let figures = (shown.in_flight, shown.long_in_flight);
            assert_eq!(figures, books, "{:?}", shown.provider);
            let node = self.names.provider(shown.provider).node;
            let owner = self.owners[node.row()];
            let live = owner.is_some_and(|owner| owner.ready && !owner.draining) && !aside;
            let counts = |waiting: &&Request| live && self.is_configured(shown.provider, waiting);
            let queued = self.waiting.iter().filter(counts).count();
            assert_eq!(
                shown.queued as usize, queued,
                "queued of {:?}",
                shown.provider
            );
        }
        let edge = snapshot.edge;
        assert_eq!(edge.waiting, self.waiting.len());
        assert_eq!(
            (edge.leases_taken, edge.leases_returned),
            (self.taken, self.returned)
        );
        assert_eq!(edge.runs as usize, self.runs.len());
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.len()
    }

    /// The run was granted and its end has not been reported.
    pub(crate) fn knows(&self, run: RunRef) -> bool {
        self.runs.contains_key(&run)
    }
}
