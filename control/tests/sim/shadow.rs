//! A naive core: what the contract says about each step, by looking at everything every time.
//!
//! It watches what control is told and what it answers, keeps its own books, and objects.
use std::collections::BTreeMap;
use std::sync::Arc;

use iop_control::edge::{Control, Health, RefreshState};
use iop_control::names::{Names, NodePayload};
use iop_control::step::{
    CommandAnswer, CommandId, Effect, Eligibility, Event, Evidence, Handoff, Probed,
};
use iop_proto::catalog::Operation;
use iop_proto::domain::{HealthEvidence, RefreshStatus};
use iop_proto::ids::{
    ClientRef, ModelIndex, NodeIndex, Now, ProviderIndex, RefreshId, RunRef, SessionRef,
};
use iop_proto::limits::{COMMAND_MS_DEFAULT, DRAIN_MS_DEFAULT, REFRESHES_UNANSWERED_MAX};
use iop_proto::reason::Reason;

/// Adapter and target of a provider, as a number.
type Bound = u64;

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
    binding: Option<Bound>,
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
    /// A second run: not there.
    without: Option<ProviderIndex>,
}

#[derive(Clone, Copy, Debug)]
struct Granted {
    request: Request,
    provider: ProviderIndex,
    binding: Bound,
    session: SessionRef,
    at: Now,
    fenced: bool,
    begun: bool,
    cancelled: Option<Reason>,
}

#[derive(Clone, Debug)]
struct Owner {
    session: SessionRef,
    ready: bool,
    draining: bool,
    /// Put out by the Edge: at the latest then.
    closing: Option<Now>,
    /// The configuration it was sent when it registered, or applied last.
    held: Arc<NodePayload>,
    /// Refreshes without answer, with the end of the wait for each.
    sent: Vec<(RefreshId, Arc<NodePayload>, Now)>,
}

impl Owner {
    /// A refresh is under way.
    fn awaits(&self, now: Now) -> bool {
        let last = self.sent.last();
        last.is_some_and(|&(_, _, until)| now < until)
    }
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
    /// By provider, adapter and target.
    known: BTreeMap<(ProviderIndex, Bound), Known>,
    asked: BTreeMap<CommandId, Asked>,
    /// A client whose run stalled: to be handed on in this step, with this.
    parked: Option<(ClientRef, Option<Handoff>, bool)>,
    /// Who enters the queue behind this step.
    again: Option<Request>,
    granted_this_step: u32,
}

impl Shadow {
    pub(crate) fn new(names: Arc<Names>) -> Self {
        Self {
            waiting: Vec::new(),
            runs: BTreeMap::new(),
            owners: (0..names.nodes.len()).map(|_| None).collect(),
            next_age: 0,
            taken: 0,
            returned: 0,
            last_used: vec![0; names.providers.len()],
            owed: None,
            known: BTreeMap::new(),
            asked: BTreeMap::new(),
            parked: None,
            again: None,
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
                body_bytes: bytes,
            } => {
                let deadline = now.after_ms(self.names.queue.wait_ms);
                let age = self.next_age;
                self.next_age += 1;
                self.waiting.push(Request {
                    client,
                    age,
                    model,
                    operation,
                    long,
                    bytes,
                    deadline,
                    without: None,
                });
            }
            Event::ClientGone { client } => self.waiting.retain(|w| w.client != client),
            Event::Begun { run } => {
                self.runs.get_mut(&run).expect("a run begins once").begun = true
            }
            Event::NotSent { run, client } => self.not_sent(run, client),
            Event::Terminal { run, .. } | Event::Lost { run } => {
                self.finish(run);
            }
            Event::Stalled {
                run,
                client,
                evidence,
                recovery,
            } => {
                let granted = self.finish(run);
                let handoff = self.stalled(&granted, evidence);
                let whole = recovery == Eligibility::Eligible && handoff.is_some();
                self.park(now, &granted, client, handoff, whole);
            }
            Event::CommandAnswer {
                session,
                command,
                answer,
            } => self.command_answered(now, session, command, answer),
            Event::Closed { session, .. } => {
                if let Some(row) = self.row_of(session) {
                    self.end_ownership(row);
                }
            }
            Event::Expired { session } => self.expired(now, session),
            Event::Refreshed {
                session,
                refresh,
                status,
            } => self.refreshed(session, refresh, status),
            Event::GoAway { session } => {
                for owner in self.owners.iter_mut().flatten() {
                    owner.draining |= owner.session == session && owner.ready;
                }
            }
            Event::Register { .. }
            | Event::Ready { .. }
            | Event::Overdue { .. }
            | Event::Pong { .. } => {}
        }
    }

    fn not_sent(&mut self, run: RunRef, client: Option<ClientRef>) {
        let granted = self.finish(run);
        let Some(client) = client else { return };
        match granted.cancelled {
            Some(reason) => self.owed = Some((client, reason)),
            None => self.waiting.push(Request {
                client,
                ..granted.request
            }),
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
        let binding = (provider, granted.binding);
        let known = self.known.entry(binding).or_default();
        if let Some(seq) = seq.filter(|seq| seq.get() > known.mark) {
            known.mark = seq.get();
            known.aside |= health == HealthEvidence::Unavailable;
        }
        Some(Handoff { provider, health })
    }

    fn park(
        &mut self,
        now: Now,
        granted: &Granted,
        client: Option<ClientRef>,
        handoff: Option<Handoff>,
        whole: bool,
    ) {
        let again = client.filter(|_| whole);
        self.again = again.and_then(|client| self.second(now, granted, client));
        let recovers = self.again.is_some();
        self.parked = client.map(|client| (client, handoff, recovers));
    }

    /// The request of a second run, if there may be one: never a third, never without another
    /// provider, never elsewhere in the order of age.
    fn second(&self, now: Now, granted: &Granted, client: ClientRef) -> Option<Request> {
        if granted.request.without.is_some() {
            return None;
        }
        let left = granted.request.deadline.ms_since(granted.at);
        let request = Request {
            client,
            deadline: now.after_ms(left),
            without: Some(granted.provider),
            ..granted.request
        };
        let mut named = self.names.model(request.model).providers.iter();
        let is_served = named.any(|&provider| self.is_configured(provider, &request));
        is_served.then_some(request)
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
        if asked.binding != Some(self.binding(provider)) {
            return; // bound to something else by now
        }
        let binding = (provider, self.binding(provider));
        let known = self.known.entry(binding).or_default();
        if self.names.provider(provider).enabled && seq.get() > known.mark {
            *known = Known {
                aside: false,
                mark: seq.get(),
            };
        }
    }

    fn row_of(&self, session: SessionRef) -> Option<usize> {
        let of_session = |owner: &Option<Owner>| {
            let owner = owner.as_ref();
            owner.is_some_and(|owner| owner.session == session)
        };
        self.owners.iter().position(of_session)
    }

    fn expired(&mut self, now: Now, session: SessionRef) {
        let Some(row) = self.row_of(session) else {
            return;
        };
        if self.owners[row].as_ref().is_some_and(|owner| owner.ready) {
            self.put_out_by(row, now);
        } else {
            self.end_ownership(row);
        }
    }

    fn put_out_by(&mut self, row: usize, now: Now) {
        let owner = self.owners[row].as_mut().expect("had an owner");
        owner.draining = true;
        owner
            .closing
            .get_or_insert_with(|| now.after_ms(DRAIN_MS_DEFAULT));
    }

    /// The operator has asked for a node's drain.
    pub(crate) fn drained(&mut self, node: NodeIndex, answer: Result<u32, Reason>, now: Now) {
        let row = node.row();
        let is_ready = self.owners[row].as_ref().is_some_and(|owner| owner.ready);
        assert_eq!(answer.is_ok(), is_ready, "{answer:?}");
        if let Ok(held) = answer {
            let on_node = |run: &&Granted| self.names.provider(run.provider).node == node;
            let running = self.runs.values().filter(|run| !run.fenced);
            assert_eq!(running.filter(on_node).count(), held as usize);
            self.put_out_by(row, now);
        }
    }

    fn refreshed(&mut self, session: SessionRef, refresh: RefreshId, status: RefreshStatus) {
        let row = self.row_of(session);
        let owner = row.and_then(|row| self.owners[row].as_mut());
        let Some(owner) = owner.filter(|owner| owner.ready) else {
            return;
        };
        if let Some(at) = owner.sent.iter().position(|sent| sent.0 == refresh) {
            let (_, payload, _) = owner.sent.drain(..=at).next_back().expect("found");
            if status == RefreshStatus::Applied {
                owner.held = payload;
            }
        }
    }

    /// Another configuration.
    pub(crate) fn reloaded(&mut self, names: Arc<Names>) {
        self.names = names;
        self.owners.resize(self.names.nodes.len(), None);
        self.last_used.resize(self.names.providers.len(), 0);
        for row in 0..self.owners.len() {
            if self.owners[row].is_some() && !self.names.has_node(NodeIndex::new(row).unwrap()) {
                self.end_ownership(row);
            }
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
        let names = &self.names;
        let of_node = |provider: ProviderIndex| names.provider(provider).node.row() == row;
        self.known.retain(|&(provider, _), _| !of_node(provider));
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
            Effect::Close { session, cause } => self.closed_by_control(now, session, cause),
            Effect::Refresh {
                session,
                refresh,
                node,
            } => self.pushed(now, session, refresh, node),
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => self.granted(now, client, run, session, provider),
            Effect::Refuse { client, reason, .. } => self.refused(now, client, reason),
            Effect::Cancel { run, reason } => {
                let granted = self
                    .runs
                    .get_mut(&run)
                    .expect("only a granted run is cancelled");
                assert!(!granted.fenced && !granted.begun && granted.cancelled.is_none());
                granted.cancelled = Some(reason);
            }
            Effect::Handoff {
                client,
                handoff,
                recovers,
            } => {
                let expected = self.parked.take();
                let said = Some((client, handoff, recovers));
                assert_eq!(expected, said, "not what was stalled");
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
            Effect::Configure { .. } | Effect::Drain { .. } | Effect::Stop { .. } => {
                unreachable!("not in this world")
            }
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
            assert!(self.is_aside(about), "{about:?} is asked about in vain");
            let mut others = self.asked.iter();
            let other = others.find(|(id, asked)| !id.is_operators() && asked.session == session);
            let is_over = other.is_none_or(|(_, asked)| asked.deadline <= now);
            assert!(is_over, "two probes at one node");
        }
        let deadline = now.after_ms(COMMAND_MS_DEFAULT);
        let asked = Asked {
            session,
            provider,
            binding: provider.map(|provider| self.binding(provider)),
            deadline,
        };
        let before = self.asked.insert(command, asked);
        assert!(before.is_none(), "a command's name was used again");
    }

    fn pushed(&mut self, now: Now, session: SessionRef, refresh: RefreshId, node: NodeIndex) {
        let newest = Arc::clone(&self.names.node(node).config_payload);
        let owner = self.owners[node.row()].as_mut().expect("has an owner");
        assert!(
            owner.session == session && owner.ready,
            "pushed to a stranger"
        );
        assert!(!owner.awaits(now), "two refreshes at once");
        let has_it = owner.held == newest && owner.sent.is_empty();
        assert!(!has_it, "pushed what the node has");
        if owner.sent.len() == REFRESHES_UNANSWERED_MAX as usize {
            owner.sent.remove(0);
        }
        let until = now.after_ms(self.names.waits.refresh_ms);
        owner.sent.push((refresh, newest, until));
    }

    fn closed_by_control(&mut self, now: Now, session: SessionRef, cause: Reason) {
        let Some(row) = self.row_of(session) else {
            return;
        };
        let owner = self.owners[row].as_ref().expect("just found");
        assert!(owner.ready, "a pending owner is never closed by control");
        if cause == Reason::Superseded {
            return; // the claim that follows ends the ownership
        }
        let closing = owner.closing.expect("only a drained owner is put out");
        let of_session = |run: &&Granted| run.session == session && !run.fenced;
        let held = self.runs.values().filter(of_session).count();
        assert!(held == 0 || closing <= now, "{held} leases were cut short");
        self.end_ownership(row);
    }

    fn accepted(&mut self, session: SessionRef, node: NodeIndex) {
        let row = node.row();
        if self.row_of(session) == Some(row) {
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
            closing: None,
            held: Arc::clone(&self.names.node(node).config_payload),
            sent: Vec::new(),
        });
    }

    fn granted(
        &mut self,
        now: Now,
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
        let owner = self.owners[self.names.provider(provider).node.row()].as_ref();
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
            binding: self.binding(provider),
            session,
            at: now,
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
            Reason::ModelUnknown => !self.names.has_model(request.model),
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
            && request.without != Some(provider)
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
            && self.is_bound(provider)
            && !self.is_aside(provider)
            && load.all < name.capacity
            && (!request.long || load.long < name.long_capacity)
            && (!counts_tokens || load.counting < (name.capacity / 4).max(1))
    }

    /// The node takes requests and holds what those for this provider need.
    fn is_bound(&self, provider: ProviderIndex) -> bool {
        let name = self.names.provider(provider);
        let owner = self.owners[name.node.row()].as_ref();
        owner.is_some_and(|owner| owner.ready && !owner.draining && owner.held.serves(name))
    }

    fn binding(&self, provider: ProviderIndex) -> Bound {
        let name = self.names.provider(provider);
        let text = format!("{} {}", name.adapter, name.target);
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Its present binding is overlaid.
    fn is_aside(&self, provider: ProviderIndex) -> bool {
        let known = self.known.get(&(provider, self.binding(provider)));
        known.is_some_and(|known| known.aside)
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
    pub(crate) fn settle(&mut self, control: &Control) {
        self.waiting.extend(self.again.take());
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
                owner.as_ref().map(|owner| (owner.session, owner.ready)),
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
            let aside = self.is_aside(shown.provider);
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
            let live = self.is_bound(shown.provider) && !aside;
            let counts = |waiting: &&Request| live && self.is_configured(shown.provider, waiting);
            let queued = self.waiting.iter().filter(counts).count();
            assert_eq!(
                shown.queued as usize, queued,
                "queued of {:?}",
                shown.provider
            );
        }
        for shown in &snapshot.nodes {
            let owner = self.owners[shown.node.row()]
                .as_ref()
                .filter(|owner| owner.ready);
            let newest = &self.names.node(shown.node).config_payload;
            let is_current =
                owner.is_none_or(|owner| owner.held == *newest && owner.sent.is_empty());
            let says = shown.refresh == RefreshState::Current;
            assert_eq!(says, is_current, "{owner:?} is shown {:?}", shown.refresh);
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
