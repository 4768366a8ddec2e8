//! Requests that wait, in order, and which of them could go now: the waiter's half of machine 3.
//!
//! A model's waiters stand in lines, by age: one per class, and for second runs one per class and the
//! provider that the first has failed at. All of a line have the same candidates, so its head decides
//! for it. Each provider keeps the heads of all lines it could serve, by kind
//! and age, over every model that names it; the oldest it has room for right now is its *next*. The
//! set of all nexts is `ready`: empty exactly when no waiter can be served, so "is anything left to
//! do" is one look, and no wake-up can be lost. Who changes a head or a provider's room refreshes
//! it in the same call. `[I3.7]` `[D-16]`
//!
//! Costs, with n waiters, c candidates of the model (≤ `PROVIDERS_PER_MODEL_MAX`): the oldest ready
//! waiter O(1); enter, leave and grant O(log n), plus c times O(log n) when a head changes. A fence
//! hides and shows heads alone, of at most `Class::COUNT` lines and as many per failed provider.
//! Nothing but a reload depends on how many wait, nor on how many models share a provider.
//!
//! Lives on: control. Bound: `QueueLimits` per model for new requests; who comes back from a run is
//! let in beyond it. In all one place per client slot, and no line without waiters.
use std::collections::{BTreeMap, BTreeSet};

use iop_proto::ids::{ClientRef, ModelIndex, Now, ProviderIndex};
use iop_proto::limits::{PROVIDERS_PER_MODEL_MAX, RETRY_AFTER_S_MAX};

use super::class::{Class, Kind, Kinds};
use crate::names::{Names, QueueLimits};

/// A request's seniority: smaller is older. Given at submission, kept over a re-queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Age(u64);

#[cfg(test)]
impl Age {
    pub(crate) const fn get(self) -> u64 {
        self.0
    }
}

/// Where a request stands, or stood: by age first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    pub(crate) age: Age,
    pub(crate) model: ModelIndex,
    pub(crate) class: Class,
    /// Its first run stalled there: any other provider may have the second. `[D-18]`
    pub(crate) without: Option<ProviderIndex>,
}

impl Place {
    /// The line of its model in which it stands.
    pub(crate) const fn line(self) -> LineKey {
        (self.class, self.without)
    }
}

/// What decides who could serve a request of the model: its class, and whom it must not have again.
pub(crate) type LineKey = (Class, Option<ProviderIndex>);

/// A request that waits. `[states §3: Queued]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) client: ClientRef,
    /// End of its queue wait, fixed when it is put here: at submission, or by what a first run left.
    pub(crate) deadline: Now,
    /// When it is refused: then, or earlier while no candidate is configured for it.
    pub(crate) ends: Now,
    pub(crate) body_bytes: u32,
}

impl Waiter {
    pub(crate) const fn new(client: ClientRef, deadline: Now, body_bytes: u32) -> Self {
        Self {
            client,
            deadline,
            ends: deadline,
            body_bytes,
        }
    }
}

/// A provider that a model names, enabled in the configuration; or one that it named before a reload,
/// which serves nothing and stays while granted runs of it may come back.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) provider: ProviderIndex,
    /// Bit per class it may be given: its operations; long ones only if it takes any. `[D-16]`
    /// `[D-62]`
    classes: u16,
    /// Runs granted here under the present generation whose request is not known to have begun.
    pub(crate) selected: u32,
}

// A bit per class.
const _: () = assert!(Class::COUNT <= u16::BITS as usize);

impl Candidate {
    /// May have requests of the line.
    pub(crate) fn serves(&self, (class, without): LineKey) -> bool {
        self.classes & 1 << class.row() != 0 && Some(self.provider) != without
    }
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Line {
    waiters: BTreeMap<Place, Waiter>,
    /// The head as the providers' seats have it.
    shown: Option<Place>,
}

impl Line {
    fn head(&self) -> Option<Place> {
        self.waiters.first_key_value().map(|(&place, _)| place)
    }

    /// Brings the seats up to date: with the head, or with nobody if the line is hidden.
    fn show(&mut self, is_hidden: bool, candidates: &[Candidate], seats: &mut Seats) {
        let head = self.head().filter(|_| !is_hidden);
        let before = core::mem::replace(&mut self.shown, head);
        let Some(Place { class, without, .. }) = before.or(head).filter(|_| before != head) else {
            return;
        };
        for candidate in candidates.iter().filter(|c| c.serves((class, without))) {
            let seat = &mut seats.rows[candidate.provider.row()];
            let heads = &mut seat.heads[class.kind().row()];
            if let Some(place) = before {
                heads.remove(&place);
            }
            if let Some(place) = head {
                heads.insert(place);
            }
            seat.refresh(candidate.provider, &mut seats.ready);
        }
    }
}

/// The waiters and candidates of one model.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Group {
    candidates: Vec<Candidate>,
    /// Those in which somebody waits.
    lines: BTreeMap<LineKey, Line>,
    queued: u32,
    long_queued: u32,
    bytes: u64,
    /// Runs of ended generations that may still come back: while there are any, nobody of this
    /// model is granted, so that no younger waiter overtakes them. `[states §1 fence]`
    undecided: u32,
    /// Recent time from grant to a complete answer, ms; 0 before the first.
    service_ms: u64,
}

impl Group {
    fn new(names: &Names, providers: &[ProviderIndex]) -> Self {
        Self {
            candidates: candidates(names, providers),
            lines: BTreeMap::new(),
            queued: 0,
            long_queued: 0,
            bytes: 0,
            undecided: 0,
            service_ms: 0,
        }
    }

    const fn is_held(&self) -> bool {
        self.undecided > 0
    }

    /// Shows the head of each line, or nobody.
    fn show(&mut self, is_hidden: bool, seats: &mut Seats) {
        for line in self.lines.values_mut() {
            line.show(is_hidden, &self.candidates, seats);
        }
    }

    /// Takes the candidates of another configuration. No line may be shown.
    fn configure(&mut self, names: &Names, providers: &[ProviderIndex]) {
        let before = core::mem::replace(&mut self.candidates, candidates(names, providers));
        for old in before.into_iter().filter(|old| old.selected > 0) {
            let now = &mut self.candidates;
            match now.iter_mut().find(|new| new.provider == old.provider) {
                Some(new) => new.selected = old.selected,
                None => now.push(Candidate { classes: 0, ..old }),
            }
        }
    }
}

fn candidates(names: &Names, providers: &[ProviderIndex]) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = Vec::new();
    for &provider in providers {
        let name = names.provider(provider);
        // Named twice is one candidate. `[R-271]`
        let is_known = candidates.iter().any(|known| known.provider == provider);
        if !name.enabled || is_known {
            continue;
        }
        let classes = Class::all()
            .filter(|class| name.operations.contains(class.operation()))
            .filter(|class| !class.is_long() || name.long_capacity > 0)
            .fold(0, |bits, class| bits | 1 << class.row());
        candidates.push(Candidate {
            provider,
            classes,
            selected: 0,
        });
    }
    assert!(
        candidates.len() <= PROVIDERS_PER_MODEL_MAX as usize,
        "names were not checked"
    );
    candidates
}

/// What one provider could serve, and the oldest of it that it has room for.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Seat {
    open: Kinds,
    heads: [BTreeSet<Place>; Kind::COUNT],
    next: Option<Place>,
}

impl Seat {
    fn refresh(&mut self, provider: ProviderIndex, ready: &mut BTreeSet<(Place, ProviderIndex)>) {
        let open = Kind::all().filter(|&kind| self.open.contains(kind));
        let next = open
            .filter_map(|kind| self.heads[kind.row()].first().copied())
            .min();
        let before = core::mem::replace(&mut self.next, next);
        if before == next {
            return;
        }
        if let Some(place) = before {
            ready.remove(&(place, provider));
        }
        if let Some(place) = next {
            ready.insert((place, provider));
        }
    }
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Seats {
    /// By provider.
    rows: Vec<Seat>,
    /// Per provider with something to do, the oldest it can serve.
    ready: BTreeSet<(Place, ProviderIndex)>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Queue {
    groups: Vec<Group>,
    seats: Seats,
    clients: BTreeMap<ClientRef, Place>,
    next_age: u64,
    /// Per provider: the models that name it, and its position among their candidates.
    groups_of: Vec<Vec<(ModelIndex, usize)>>,
}

impl Queue {
    pub(crate) fn new(names: &Names) -> Self {
        let mut queue = Self {
            groups: Vec::with_capacity(names.models.len()),
            seats: Seats::default(),
            clients: BTreeMap::new(),
            next_age: 0,
            groups_of: Vec::new(),
        };
        queue.configure(names);
        queue
    }

    /// Takes the models and candidates of another configuration; who waits keeps their place. The
    /// caller offers every provider's room anew. O(models and their candidates).
    pub(crate) fn configure(&mut self, names: &Names) {
        let seats = &mut self.seats.rows;
        seats.resize_with(names.providers.len(), Seat::default);
        for (row, model) in names.models.iter().enumerate() {
            if row == self.groups.len() {
                self.groups.push(Group::new(names, &model.providers));
                continue;
            }
            let group = &mut self.groups[row];
            group.show(true, &mut self.seats);
            group.configure(names, &model.providers);
        }
        self.groups_of = vec![Vec::new(); names.providers.len()];
        for model in self.models() {
            for (position, candidate) in self.groups[model.row()].candidates.iter().enumerate() {
                self.groups_of[candidate.provider.row()].push((model, position));
            }
            self.show(model);
        }
    }

    /// Ends the wait of everybody for whom no candidate is configured at `now`, and of everybody else
    /// at their own deadline again. Hands back whose end has moved, from when to when. O(waiters).
    pub(crate) fn strand(&mut self, now: Now) -> Vec<(Place, Now, Now)> {
        let mut moved = Vec::new();
        for Group {
            lines, candidates, ..
        } in &mut self.groups
        {
            for (&key, line) in lines {
                let is_served = candidates.iter().any(|c| c.serves(key));
                for (&place, waiter) in &mut line.waiters {
                    let before = waiter.ends;
                    waiter.ends = if is_served {
                        waiter.deadline
                    } else {
                        before.min(now)
                    };
                    if waiter.ends != before {
                        moved.push((place, before, waiter.ends));
                    }
                }
            }
        }
        moved
    }

    /// The place of a request that is submitted now: younger than all before.
    pub(crate) fn new_place(&mut self, model: ModelIndex, class: Class) -> Place {
        let age = Age(self.next_age);
        self.next_age += 1;
        Place {
            age,
            model,
            class,
            without: None,
        }
    }

    pub(crate) fn candidates(&self, model: ModelIndex) -> &[Candidate] {
        &self.groups[model.row()].candidates
    }

    /// The model's runs granted to `provider` whose request is not known to have begun.
    ///
    /// # Panics
    /// When the provider is none of the model's candidates.
    pub(crate) fn selected_mut(&mut self, model: ModelIndex, provider: ProviderIndex) -> &mut u32 {
        let candidates = &mut self.groups[model.row()].candidates;
        let candidate = candidates.iter_mut().find(|c| c.provider == provider);
        &mut candidate
            .expect("a candidate stays while its runs may come back")
            .selected
    }

    /// The configuration has a provider for it, live or not. `[D-11]` `[D-18]`
    pub(crate) fn is_served(&self, place: Place) -> bool {
        let mut candidates = self.candidates(place.model).iter();
        candidates.any(|candidate| candidate.serves(place.line()))
    }

    /// A new request here may be granted past the queue: nobody waits who could be served, nobody
    /// of its own line, nobody who may come back to its model. `[S-15]`
    pub(crate) fn may_pass(&self, place: Place) -> bool {
        let group = &self.groups[place.model.row()];
        self.seats.ready.is_empty() && !group.is_held() && !group.lines.contains_key(&place.line())
    }

    /// One more fits the model's bounds; exactly at the limit is accepted. `[D-30]` `[P-16]`
    pub(crate) fn has_room(&self, model: ModelIndex, body_bytes: u32, limits: QueueLimits) -> bool {
        let group = &self.groups[model.row()];
        group.queued < limits.waiters_max
            && group.bytes + u64::from(body_bytes) <= limits.waiting_bytes_max
    }

    /// Enters a waiter at its place: the tail for a new one, its old place for one that comes back.
    ///
    /// # Panics
    /// When the client waits already: a shard's bug.
    pub(crate) fn enter(&mut self, place: Place, waiter: Waiter) {
        let group = &mut self.groups[place.model.row()];
        group.queued += 1;
        group.long_queued += u32::from(place.class.is_long());
        group.bytes += u64::from(waiter.body_bytes);
        let is_held = group.is_held();
        let line = group.lines.entry(place.line()).or_default();
        line.waiters.insert(place, waiter);
        line.show(is_held, &group.candidates, &mut self.seats);
        let before = self.clients.insert(waiter.client, place);
        assert!(
            before.is_none(),
            "a client submitted while its request waits"
        );
    }

    /// Takes a waiter out, for whatever reason. `None` if nobody stands there.
    pub(crate) fn leave(&mut self, place: Place) -> Option<Waiter> {
        let group = &mut self.groups[place.model.row()];
        let is_held = group.is_held();
        let line = group.lines.get_mut(&place.line())?;
        let waiter = line.waiters.remove(&place)?;
        line.show(is_held, &group.candidates, &mut self.seats);
        if line.waiters.is_empty() {
            group.lines.remove(&place.line());
        }
        group.queued -= 1;
        group.long_queued -= u32::from(place.class.is_long());
        group.bytes -= u64::from(waiter.body_bytes);
        self.clients.remove(&waiter.client);
        Some(waiter)
    }

    pub(crate) fn place_of(&self, client: ClientRef) -> Option<Place> {
        self.clients.get(&client).copied()
    }

    /// The oldest waiter that some provider has room for. `[D-16]`
    pub(crate) fn next(&self) -> Option<Place> {
        self.seats.ready.first().map(|&(place, _)| place)
    }

    /// What a provider has room for has changed, or may have.
    pub(crate) fn set_open(&mut self, provider: ProviderIndex, open: Kinds) {
        let seat = &mut self.seats.rows[provider.row()];
        if seat.open != open {
            seat.open = open;
            seat.refresh(provider, &mut self.seats.ready);
        }
    }

    /// The provider's generation has ended: its granted runs that have not begun may come back, and
    /// their models wait for them. O(models that name the provider).
    pub(crate) fn hold(&mut self, provider: ProviderIndex) {
        for entry in 0..self.groups_of[provider.row()].len() {
            let (model, position) = self.groups_of[provider.row()][entry];
            let group = &mut self.groups[model.row()];
            let returning = core::mem::take(&mut group.candidates[position].selected);
            if returning > 0 {
                group.undecided += returning;
                self.show(model);
            }
        }
    }

    /// One of those runs is decided: it came back, began or ended.
    pub(crate) fn unhold(&mut self, model: ModelIndex) {
        let group = &mut self.groups[model.row()];
        group.undecided = group
            .undecided
            .checked_sub(1)
            .expect("each run is decided once");
        if group.undecided == 0 {
            self.show(model);
        }
    }

    /// Shows the model's heads, unless it waits for runs that may come back.
    fn show(&mut self, model: ModelIndex) {
        let group = &mut self.groups[model.row()];
        group.show(group.is_held(), &mut self.seats);
    }

    /// A request of the model was answered completely `ms` after its grant.
    pub(crate) fn record_service(&mut self, model: ModelIndex, ms: u64) {
        let recent = &mut self.groups[model.row()].service_ms;
        *recent = if *recent == 0 {
            ms
        } else {
            (*recent * 7 + ms) / 8
        };
    }

    /// When to come back, s: recent service time rounded up, at least 1. `[D-30]`
    pub(crate) fn retry_after_s(&self, model: ModelIndex) -> u16 {
        let seconds = self.groups[model.row()].service_ms.div_ceil(1_000);
        let bounded = seconds.clamp(1, u64::from(RETRY_AFTER_S_MAX));
        u16::try_from(bounded).expect("RETRY_AFTER_S_MAX fits")
    }

    /// Waiting requests of the model, and how many of them are long.
    pub(crate) fn waiting(&self, model: ModelIndex) -> (u32, u32) {
        let group = &self.groups[model.row()];
        (group.queued, group.long_queued)
    }

    pub(crate) fn waiting_bytes(&self, model: ModelIndex) -> u64 {
        self.groups[model.row()].bytes
    }

    /// All waiting requests.
    pub(crate) fn waiting_total(&self) -> usize {
        self.clients.len()
    }

    /// Waiting requests that have `provider` among the candidates configured for them, and how many
    /// are long. Each once, however often the model names the provider. `[R-271]` `[R-273]`
    pub(crate) fn pressure(&self, provider: ProviderIndex) -> (u32, u32) {
        let mut queued = 0;
        let mut long = 0;
        for &(model, position) in &self.groups_of[provider.row()] {
            let group = &self.groups[model.row()];
            let candidate = &group.candidates[position];
            for (&(class, without), line) in &group.lines {
                if !candidate.serves((class, without)) {
                    continue;
                }
                let waiting = u32::try_from(line.waiters.len()).unwrap_or(u32::MAX);
                queued += waiting;
                long += if class.is_long() { waiting } else { 0 };
            }
        }
        (queued, long)
    }

    pub(crate) fn undecided(&self, model: ModelIndex) -> u32 {
        self.groups[model.row()].undecided
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = ModelIndex> + use<> {
        (0..self.groups.len()).filter_map(ModelIndex::new)
    }

    /// Who waits for the model, line by line, each the oldest first.
    pub(crate) fn lines(
        &self,
        model: ModelIndex,
    ) -> impl Iterator<Item = impl Iterator<Item = (Place, &Waiter)>> {
        let lines = self.groups[model.row()].lines.values();
        lines.map(|line| line.waiters.iter().map(|(&place, waiter)| (place, waiter)))
    }

    /// Heads in the seats: one per line that is shown and candidate of it.
    pub(crate) fn seated(&self) -> usize {
        let heads = self.seats.rows.iter().flat_map(|seat| &seat.heads);
        heads.map(BTreeSet::len).sum()
    }
}
