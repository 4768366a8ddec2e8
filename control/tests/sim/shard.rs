//! A shard as `step` describes it: sessions, client slots, run slots with the dead-slot rule.
use std::collections::{BTreeMap, VecDeque};

use iop_control::step::{CommandAnswer, CommandId, Effect, Eligibility, Ending, Event, Evidence};
use iop_proto::ids::{ClientRef, NodeIndex, Now, ProviderIndex, RefreshId, RunRef, SessionRef};
use iop_proto::ids::{ShardIndex, SlotGeneration};
use iop_proto::reason::Reason;

use crate::dice::Dice;

/// A client with what it asked and what it heard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Person {
    pub(crate) asked: u32,
    pub(crate) answered: u32,
    pub(crate) gone: bool,
}

/// A client on its way to its node's shard, or the news that it left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parcel {
    pub(crate) run: RunRef,
    pub(crate) session: SessionRef,
    pub(crate) provider: ProviderIndex,
    pub(crate) person: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientState {
    Idle,
    /// Submitted, or back from a grant: control owes an answer.
    Waiting,
    Running(u32),
    /// Its run stalled: control owes the handoff, and if `whole` perhaps a second run.
    Parked {
        whole: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) person: usize,
    pub(crate) state: ClientState,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) node: NodeIndex,
    /// Has told control anything.
    pub(crate) told: bool,
    /// NodeReadyResponse(true) was written: bulk is open.
    pub(crate) ready: bool,
    /// Its node was cut off then, and nobody here knows: nothing comes from it.
    pub(crate) silent: Option<Now>,
    /// Its certificate has ended.
    expired: bool,
    /// Refreshes that the node has not answered, oldest first.
    refreshes: VecDeque<RefreshId>,
    /// Requests not begun, in order.
    pub(crate) writer: VecDeque<u32>,
    /// Commands not answered yet.
    pub(crate) commands: Vec<CommandId>,
    /// The node's last observation number on this connection.
    pub(crate) observed: u64,
}

impl Session {
    /// Numbers are drawn in order and may arrive in another: now and then an old one is used.
    fn observe(&mut self, dice: &mut Dice) -> u64 {
        if self.observed > 0 && dice.chance(4) {
            return 1 + dice.below(usize::try_from(self.observed).unwrap()) as u64;
        }
        self.observed += 1;
        self.observed
    }
}

#[derive(Debug)]
pub(crate) struct Seat<T> {
    pub(crate) generation: SlotGeneration,
    pub(crate) tenant: Option<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// A cancel came first: whoever arrives is not dispatched.
    Dead {
        reason: Reason,
    },
    Live {
        provider: ProviderIndex,
        session: u32,
        /// Its client's slot while it is owed an answer.
        client: Option<u32>,
        begun: bool,
    },
    Done,
}

pub(crate) struct Shard {
    index: ShardIndex,
    pub(crate) sessions: Vec<Seat<Session>>,
    pub(crate) clients: Vec<Seat<Client>>,
    /// Per run slot, its latest tenant.
    pub(crate) runs: BTreeMap<u32, (SlotGeneration, Run)>,
    /// To control, in order.
    pub(crate) events: VecDeque<Event>,
}

/// Slots are few, so that they are reused.
const SESSIONS: usize = 6;

impl Shard {
    pub(crate) fn new(index: ShardIndex) -> Self {
        let seat = || Seat {
            generation: SlotGeneration::FIRST,
            tenant: None,
        };
        Self {
            index,
            sessions: (0..SESSIONS).map(|_| seat()).collect(),
            clients: Vec::new(),
            runs: BTreeMap::new(),
            events: VecDeque::new(),
        }
    }

    fn session_ref(&self, slot: usize) -> SessionRef {
        SessionRef {
            shard: self.index,
            slot: u32::try_from(slot).unwrap(),
            generation: self.sessions[slot].generation,
        }
    }

    fn client_ref(&self, slot: u32) -> ClientRef {
        ClientRef {
            shard: self.index,
            slot,
            generation: self.clients[slot as usize].generation,
        }
    }

    fn run_ref(&self, slot: u32) -> RunRef {
        RunRef {
            shard: self.index,
            slot,
            generation: self.runs[&slot].0,
        }
    }

    fn session(&mut self, session: SessionRef) -> Option<&mut Session> {
        let seat = &mut self.sessions[session.slot as usize];
        seat.tenant
            .as_mut()
            .filter(|_| seat.generation == session.generation)
    }

    fn client(&mut self, client: ClientRef) -> Option<&mut Client> {
        let seat = self.clients.get_mut(client.slot as usize)?;
        seat.tenant
            .as_mut()
            .filter(|_| seat.generation == client.generation)
    }

    pub(crate) fn dial(&mut self, node: NodeIndex) -> Option<usize> {
        let slot = self
            .sessions
            .iter()
            .position(|seat| seat.tenant.is_none())?;
        self.sessions[slot].tenant = Some(Session {
            node,
            told: false,
            ready: false,
            silent: None,
            expired: false,
            refreshes: VecDeque::new(),
            writer: VecDeque::new(),
            commands: Vec::new(),
            observed: 0,
        });
        Some(slot)
    }

    /// Places a client here.
    pub(crate) fn seat(&mut self, person: usize, state: ClientState) -> u32 {
        let slot = match self.clients.iter().position(|seat| seat.tenant.is_none()) {
            Some(slot) => slot,
            None => {
                self.clients.push(Seat {
                    generation: SlotGeneration::FIRST,
                    tenant: None,
                });
                self.clients.len() - 1
            }
        };
        self.clients[slot].tenant = Some(Client { person, state });
        u32::try_from(slot).unwrap()
    }

    fn unseat(&mut self, slot: u32) -> Option<Client> {
        let seat = &mut self.clients[slot as usize];
        seat.generation = seat.generation.next().unwrap();
        seat.tenant.take()
    }

    /// An effect of control; the parcel it sends on, and to which shard.
    pub(crate) fn apply(
        &mut self,
        effect: Effect,
        people: &mut [Person],
        dice: &mut Dice,
    ) -> Option<Parcel> {
        match effect {
            Effect::RegisterReply { session, close, .. } => {
                if close && self.session(session).is_some() {
                    self.close(session.slot as usize, Reason::PeerClosed, people, dice);
                }
            }
            Effect::ReadyReply {
                session, refusal, ..
            } => {
                if let Some(session) = self.session(session) {
                    session.ready |= refusal.is_none();
                }
            }
            Effect::Refresh {
                session, refresh, ..
            } => {
                if let Some(session) = self.session(session) {
                    assert!(session.ready, "a refresh before the ready's answer");
                    session.refreshes.push_back(refresh);
                }
            }
            Effect::Close { session, cause } => {
                if self.session(session).is_some() {
                    self.close(session.slot as usize, cause, people, dice);
                }
            }
            Effect::Grant {
                client,
                run,
                session,
                provider,
            } => return self.granted(client, run, session, provider, dice),
            Effect::Refuse { client, .. } => {
                if let Some(client) = self.client(client) {
                    assert_eq!(
                        client.state,
                        ClientState::Waiting,
                        "refused and not waiting"
                    );
                    client.state = ClientState::Idle;
                    people[client.person].answered += 1;
                }
            }
            Effect::Cancel { run, reason } => self.cancel(run, reason, people, dice),
            Effect::Handoff {
                client, recovers, ..
            } => self.handed_on(client, recovers, people),
            Effect::Command {
                session, command, ..
            } => {
                if let Some(session) = self.session(session) {
                    assert!(session.ready, "asked before its acknowledgement");
                    session.commands.push(command);
                }
            }
            Effect::Ping { token } => self.events.push_back(Event::Pong { token }),
            Effect::Configure { .. } | Effect::Drain { .. } | Effect::Stop { .. } => {
                unreachable!("not in this world")
            }
        }
        None
    }

    fn handed_on(&mut self, client: ClientRef, recovers: bool, people: &mut [Person]) {
        let Some(client) = self.client(client) else {
            return;
        };
        let ClientState::Parked { whole } = client.state else {
            panic!("nobody waits for it");
        };
        if recovers {
            assert!(whole, "nothing to ask again with");
            client.state = ClientState::Waiting;
        } else {
            client.state = ClientState::Idle;
            people[client.person].answered += 1;
        }
    }

    fn granted(
        &mut self,
        client: ClientRef,
        run: RunRef,
        session: SessionRef,
        provider: ProviderIndex,
        dice: &mut Dice,
    ) -> Option<Parcel> {
        let waits = self
            .client(client)
            .is_some_and(|c| c.state == ClientState::Waiting);
        let person = if waits {
            self.unseat(client.slot).map(|client| client.person)
        } else {
            None
        };
        if person.is_none() && dice.chance(2) {
            // Its client left: this shard may say so itself, or leave it to the node's.
            self.events.push_back(Event::NotSent { run, client: None });
            return None;
        }
        Some(Parcel {
            run,
            session,
            provider,
            person,
        })
    }

    fn cancel(&mut self, run: RunRef, reason: Reason, people: &mut [Person], dice: &mut Dice) {
        // A cancel that its run's report crossed may meet the slot's next tenant.
        let known = self.runs.get(&run.slot).copied();
        if known.is_some_and(|(generation, _)| generation > run.generation) {
            return;
        }
        let known = known.filter(|&(generation, _)| generation == run.generation);
        match known {
            None => {
                self.runs
                    .insert(run.slot, (run.generation, Run::Dead { reason }));
            }
            Some((
                _,
                Run::Live {
                    client,
                    begun,
                    session,
                    provider,
                },
            )) => {
                if begun {
                    if let Some(slot) = client {
                        self.answer(slot, people);
                    }
                    let live = Run::Live {
                        provider,
                        session,
                        client: None,
                        begun,
                    };
                    self.runs.insert(run.slot, (run.generation, live));
                } else {
                    self.withdraw(run.slot);
                    self.not_sent(run, client, Some(reason), people, dice);
                }
            }
            Some((_, Run::Dead { .. } | Run::Done)) => {}
        }
    }

    fn answer(&mut self, slot: u32, people: &mut [Person]) {
        let client = self.clients[slot as usize].tenant.as_mut().unwrap();
        client.state = ClientState::Idle;
        people[client.person].answered += 1;
    }

    fn withdraw(&mut self, slot: u32) {
        let (_, Run::Live { session, .. }) = self.runs[&slot] else {
            panic!("not live")
        };
        let session = self.sessions[session as usize].tenant.as_mut().unwrap();
        session.writer.retain(|&queued| queued != slot);
    }

    /// Reports the run as not sent. One that was cancelled may be answered right here.
    fn not_sent(
        &mut self,
        run: RunRef,
        client: Option<u32>,
        reason: Option<Reason>,
        people: &mut [Person],
        dice: &mut Dice,
    ) {
        let mut client = client;
        if let Some(slot) = client {
            if reason.is_some() && dice.chance(2) {
                self.answer(slot, people);
                client = None;
            } else {
                let client = self.clients[slot as usize].tenant.as_mut().unwrap();
                client.state = ClientState::Waiting;
            }
        }
        self.runs.insert(run.slot, (run.generation, Run::Done));
        let client = client.map(|slot| self.client_ref(slot));
        self.events.push_back(Event::NotSent { run, client });
    }

    /// A client arrives for a run slot here, or the news that it left.
    pub(crate) fn arrive(&mut self, parcel: Parcel, people: &mut [Person], dice: &mut Dice) {
        let Parcel {
            run,
            session,
            provider,
            person,
        } = parcel;
        let person = person.filter(|&person| !people[person].gone);
        let before = self.runs.get(&run.slot).copied();
        let reason = match before {
            Some((generation, Run::Dead { reason })) if generation == run.generation => {
                Some(reason)
            }
            Some((generation, state)) => {
                assert!(
                    generation < run.generation,
                    "a slot's generation came again"
                );
                let is_live = matches!(state, Run::Live { .. });
                assert!(!is_live, "a slot was given away before its report");
                None
            }
            None => None,
        };
        let client = person.map(|person| self.seat(person, ClientState::Waiting));
        // Before its acknowledgement has come here, a shard may hold the request or hand it back.
        let is_ready = self.session(session).map(|session| session.ready);
        let is_open = is_ready.is_some_and(|is_ready| is_ready || dice.chance(2));
        match client {
            Some(slot) if is_open && reason.is_none() => {
                self.clients[slot as usize].tenant.as_mut().unwrap().state =
                    ClientState::Running(run.slot);
                let live = Run::Live {
                    provider,
                    session: session.slot,
                    client,
                    begun: false,
                };
                self.runs.insert(run.slot, (run.generation, live));
                self.session(session).unwrap().writer.push_back(run.slot);
            }
            Some(_) | None => self.not_sent(run, client, reason, people, dice),
        }
    }

    /// The client in `slot` leaves, in whatever phase.
    pub(crate) fn leave(&mut self, slot: u32, people: &mut [Person]) {
        let client = self.client_ref(slot);
        let Some(tenant) = self.unseat(slot) else {
            return;
        };
        people[tenant.person].gone = true;
        match tenant.state {
            ClientState::Idle | ClientState::Parked { whole: false } => {}
            ClientState::Waiting | ClientState::Parked { whole: true } => {
                self.events.push_back(Event::ClientGone { client })
            }
            ClientState::Running(row) => {
                let run = self.run_ref(row);
                let (
                    _,
                    Run::Live {
                        begun,
                        provider,
                        session,
                        ..
                    },
                ) = self.runs[&row]
                else {
                    panic!("a running client without run")
                };
                if begun {
                    let live = Run::Live {
                        provider,
                        session,
                        client: None,
                        begun,
                    };
                    self.runs.insert(row, (run.generation, live));
                } else {
                    self.withdraw(row);
                    self.runs.insert(row, (run.generation, Run::Done));
                    self.events.push_back(Event::NotSent { run, client: None });
                }
            }
        }
    }

    /// The socket of a session ends; its runs report in any order around the close.
    pub(crate) fn close(
        &mut self,
        slot: usize,
        cause: Reason,
        people: &mut [Person],
        dice: &mut Dice,
    ) {
        let session = self.session_ref(slot);
        let kept = core::mem::take(&mut self.events);
        let of_session =
            |run: &Run| matches!(run, Run::Live { session, .. } if *session as usize == slot);
        let rows: Vec<u32> = self
            .runs
            .iter()
            .filter(|(_, (_, run))| of_session(run))
            .map(|(&row, _)| row)
            .collect();
        for row in rows {
            let run = self.run_ref(row);
            let (_, Run::Live { client, begun, .. }) = self.runs[&row] else {
                continue;
            };
            if begun {
                if let Some(slot) = client {
                    self.answer(slot, people);
                }
                self.runs.insert(row, (run.generation, Run::Done));
                self.events.push_back(Event::Lost { run });
            } else {
                self.not_sent(run, client, None, people, dice);
            }
        }
        let seat = &mut self.sessions[slot];
        seat.generation = seat.generation.next().unwrap();
        let told = seat.tenant.take().is_some_and(|tenant| tenant.told);
        let mut reports = core::mem::replace(&mut self.events, kept);
        if told {
            let at = dice.below(reports.len() + 1);
            reports.insert(at, Event::Closed { session, cause });
        }
        self.events.append(&mut reports);
    }

    /// The writer of a session begins its next request, if it may.
    pub(crate) fn begin(&mut self, slot: usize, reports: bool) -> Option<u32> {
        let session = self.sessions[slot]
            .tenant
            .as_mut()
            .filter(|session| session.ready)?;
        let row = session.writer.pop_front()?;
        let run = self.run_ref(row);
        let Some((_, Run::Live { begun, .. })) = self.runs.get_mut(&row) else {
            panic!("a queued run is live")
        };
        *begun = true;
        if reports {
            self.events.push_back(Event::Begun { run });
        }
        Some(row)
    }

    /// The terminal of a begun run arrives.
    pub(crate) fn end(&mut self, row: u32, ending: Ending, people: &mut [Person]) {
        let run = self.run_ref(row);
        let (
            _,
            Run::Live {
                client,
                begun: true,
                ..
            },
        ) = self.runs[&row]
        else {
            panic!("not begun")
        };
        if let Some(slot) = client {
            self.answer(slot, people);
        }
        self.runs.insert(row, (run.generation, Run::Done));
        self.events.push_back(Event::Terminal { run, ending });
    }

    /// The stall terminal of a begun run arrives: its client waits for the handoff.
    pub(crate) fn stall(&mut self, row: u32, evidence: Evidence, recovery: Eligibility) {
        let run = self.run_ref(row);
        let (
            _,
            Run::Live {
                client,
                begun: true,
                ..
            },
        ) = self.runs[&row]
        else {
            panic!("not begun")
        };
        let recovery = if client.is_some() {
            recovery
        } else {
            Eligibility::ClientGone
        };
        if let Some(slot) = client {
            let whole = recovery == Eligibility::Eligible;
            self.clients[slot as usize].tenant.as_mut().unwrap().state =
                ClientState::Parked { whole };
        }
        self.runs.insert(row, (run.generation, Run::Done));
        let client = client.map(|slot| self.client_ref(slot));
        self.events.push_back(Event::Stalled {
            run,
            client,
            evidence,
            recovery,
        });
    }

    /// The next observation number of the node that run `row` is on; sometimes an old one.
    pub(crate) fn observe(&mut self, row: u32, dice: &mut Dice) -> u64 {
        let (_, Run::Live { session, .. }) = self.runs[&row] else {
            panic!("not live")
        };
        let session = self.sessions[session as usize].tenant.as_mut().unwrap();
        session.observe(dice)
    }

    /// Answers some outstanding command of a session.
    pub(crate) fn answer_command(
        &mut self,
        slot: usize,
        dice: &mut Dice,
        answer: impl FnOnce(u64, &mut Dice) -> CommandAnswer,
    ) -> bool {
        let reference = self.session_ref(slot);
        let session = self.sessions[slot].tenant.as_mut().unwrap();
        if session.commands.is_empty() {
            return false;
        }
        let command = session.commands.remove(dice.below(session.commands.len()));
        let seq = session.observe(dice);
        let answer = answer(seq, dice);
        self.events.push_back(Event::CommandAnswer {
            session: reference,
            command,
            answer,
        });
        true
    }

    /// Rows of begun runs without terminal whose node can still send one.
    pub(crate) fn begun_rows(&self) -> Vec<u32> {
        let can_end = |run: &Run| match *run {
            Run::Live { session, begun, .. } => begun && !self.is_silent(session as usize),
            Run::Dead { .. } | Run::Done => false,
        };
        self.runs
            .iter()
            .filter(|(_, (_, run))| can_end(run))
            .map(|(&row, _)| row)
            .collect()
    }

    /// No run is owed a report.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_live = |run: &Run| matches!(run, Run::Live { .. });
        self.runs.values().all(|(_, run)| !is_live(run))
    }

    fn tenants(&self) -> impl Iterator<Item = (usize, &Session)> {
        let seats = self.sessions.iter().enumerate();
        seats.filter_map(|(slot, seat)| Some((slot, seat.tenant.as_ref()?)))
    }

    pub(crate) fn open_sessions(&self) -> Vec<usize> {
        self.tenants().map(|(slot, _)| slot).collect()
    }

    /// Sessions whose node can be heard, and its certificate's node.
    pub(crate) fn speaking_sessions(&self) -> Vec<(usize, NodeIndex)> {
        let speaking = self.tenants().filter(|(_, tenant)| tenant.silent.is_none());
        speaking.map(|(slot, tenant)| (slot, tenant.node)).collect()
    }

    pub(crate) fn silent_sessions(&self) -> Vec<(usize, Now)> {
        self.tenants()
            .filter_map(|(slot, tenant)| Some((slot, tenant.silent?)))
            .collect()
    }

    pub(crate) fn is_silent(&self, slot: usize) -> bool {
        let tenant = self.sessions[slot].tenant.as_ref();
        tenant.is_some_and(|tenant| tenant.silent.is_some())
    }

    pub(crate) fn set_silent(&mut self, slot: usize, since: Option<Now>) {
        self.sessions[slot].tenant.as_mut().unwrap().silent = since;
    }

    /// The session in `slot` is about to tell control something; its name, and its node.
    pub(crate) fn tells(&mut self, slot: usize) -> (SessionRef, NodeIndex) {
        let session = self.session_ref(slot);
        let tenant = self.sessions[slot].tenant.as_mut().unwrap();
        tenant.told = true;
        (session, tenant.node)
    }

    /// The node announces that it closes, if it is ready.
    pub(crate) fn go_away(&mut self, slot: usize) -> bool {
        let is_ready = self.sessions[slot].tenant.as_ref().unwrap().ready;
        if is_ready {
            let (session, _) = self.tells(slot);
            self.events.push_back(Event::GoAway { session });
        }
        is_ready
    }

    /// Sessions whose node can be heard and has a refresh to answer.
    pub(crate) fn owing_sessions(&self) -> Vec<usize> {
        let owing = self.tenants().filter(|(_, tenant)| {
            let owes = !tenant.refreshes.is_empty();
            owes && tenant.silent.is_none()
        });
        owing.map(|(slot, _)| slot).collect()
    }

    /// The refresh that the node answers next.
    pub(crate) fn answers_refresh(&mut self, slot: usize) -> Option<(SessionRef, RefreshId)> {
        let (session, _) = self.tells(slot);
        let tenant = self.sessions[slot].tenant.as_mut().unwrap();
        Some((session, tenant.refreshes.pop_front()?))
    }

    /// The certificate of the node ends; control is told once, if it knows of the connection.
    pub(crate) fn expires(&mut self, slot: usize) -> bool {
        let session = self.session_ref(slot);
        let tenant = self.sessions[slot].tenant.as_mut().unwrap();
        let tells = tenant.told && !core::mem::replace(&mut tenant.expired, true);
        if tells {
            self.events.push_back(Event::Expired { session });
        }
        tells
    }

    pub(crate) fn seated(&self) -> Vec<u32> {
        (0..u32::try_from(self.clients.len()).unwrap())
            .filter(|&slot| self.clients[slot as usize].tenant.is_some())
            .collect()
    }

    /// Asks for something on a client's behalf.
    pub(crate) fn submit(
        &mut self,
        slot: u32,
        people: &mut [Person],
        ask: impl FnOnce(ClientRef) -> Event,
    ) {
        let reference = self.client_ref(slot);
        let client = self.clients[slot as usize].tenant.as_mut().unwrap();
        client.state = ClientState::Waiting;
        people[client.person].asked += 1;
        self.events.push_back(ask(reference));
    }
}
