//! Requests that wait, in order, and which of them could go now: the waiter's half of machine 3.
//!
//! A model's waiters stand in one line per class, by age. All of a line have the same candidates,
//! so its head decides for it. Each provider keeps the heads of all lines it could serve, by kind
//! and age, over every model that names it; the oldest it has room for right now is its *next*. The
//! set of all nexts is `ready`: empty exactly when no waiter can be served, so "is anything left to
//! do" is one look, and no wake-up can be lost. Who changes a head or a provider's room refreshes
//! it in the same call. `[I3.7]` `[D-16]`
//!
//! Costs, with n waiters, c candidates of the model (≤ `PROVIDERS_PER_MODEL_MAX`): the oldest ready
//! waiter O(1); enter, leave and grant O(log n), plus c times O(log n) when a head changes. Nothing
//! depends on how many wait, nor on how many models share a provider.
//!
//! Lives on: control. Bound: `QueueLimits` per model, plus waiters that came back from a grant,
//! which are bounded by the run slots.
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
}

/// A request that waits. `[states §3: Queued]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) client: ClientRef,
    /// End of its queue wait, fixed at submission.
    pub(crate) deadline: Now,
    pub(crate) body_bytes: u32,
    /// Its first run stalled there: any other provider may have it. `[D-18]`
    pub(crate) without: Option<ProviderIndex>,
}

/// A request that waits for its second run: its candidates are its own, so it stands in no line.
#[derive(Clone, Copy, Debug)]
struct Again {
    class: Class,
    waiter: Waiter,
    /// The providers' seats have it.
    shown: bool,
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

impl Candidate {
    pub(crate) const fn serves(&self, class: Class) -> bool {
        self.classes & 1 << class.row() != 0
    }
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Line {
    waiters: BTreeMap<Age, Waiter>,
    /// The head as the providers' seats have it.
    shown: Option<Age>,
}

/// The waiters and candidates of one model.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Group {
    candidates: Vec<Candidate>,
    lines: [Line; Class::COUNT],
    /// Bounded by the runs that stalled.
    again: BTreeMap<Age, Again>,
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
            lines: Default::default(),
            again: BTreeMap::new(),
            queued: 0,
            long_queued: 0,
            bytes: 0,
            undecided: 0,
            service_ms: 0,
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

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Queue {
    groups: Vec<Group>,
    seats: Vec<Seat>,
    /// Per provider with something to do, the oldest it can serve.
    ready: BTreeSet<(Place, ProviderIndex)>,
    clients: BTreeMap<ClientRef, Place>,
    next_age: u64,
    /// Per provider: the models that name it, and its position among their candidates.
    groups_of: Vec<Vec<(ModelIndex, usize)>>,
}

impl Queue {
    pub(crate) fn new(names: &Names) -> Self {
        let mut queue = Self {
            groups: Vec::with_capacity(names.models.len()),
            seats: Vec::with_capacity(names.providers.len()),
            ready: BTreeSet::new(),
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
        self.seats.resize_with(names.providers.len(), Seat::default);
        for (row, model) in names.models.iter().enumerate() {
            if row == self.groups.len() {
                self.groups.push(Group::new(names, &model.providers));
                continue;
            }
            self.hide_all(row);
            self.groups[row].configure(names, &model.providers);
        }
        self.groups_of = vec![Vec::new(); names.providers.len()];
        for model in self.models() {
            for (position, candidate) in self.groups[model.row()].candidates.iter().enumerate() {
                self.groups_of[candidate.provider.row()].push((model, position));
            }
            self.show_all(model);
        }
    }

    /// Takes a model's heads from the seats of its candidates.
    fn hide_all(&mut self, row: usize) {
        if let Some(model) = ModelIndex::new(row) {
            let places: Vec<_> = self.again(model).map(|(place, _)| place).collect();
            for place in places {
                self.hide_again(place);
            }
        }
        let Self {
            groups,
            seats,
            ready,
            ..
        } = self;
        let group = &mut groups[row];
        let model = ModelIndex::new(row).expect("models are at most MODELS_MAX");
        for class in Class::all() {
            let Some(age) = group.lines[class.row()].shown.take() else {
                continue;
            };
            for candidate in group.candidates.iter().filter(|c| c.serves(class)) {
                let seat = &mut seats[candidate.provider.row()];
                seat.heads[class.kind().row()].remove(&Place { age, model, class });
                seat.refresh(candidate.provider, ready);
            }
        }
    }

    /// Who waits although no candidate is configured for them.
    pub(crate) fn stranded(&self) -> Vec<Place> {
        let lines = self.models().flat_map(|model| {
            let candidates = &self.groups[model.row()].candidates;
            Class::all()
                .filter(move |&class| !candidates.iter().any(|c| c.serves(class)))
                .map(move |class| (model, class))
        });
        let places = lines.flat_map(|(model, class)| self.line(model, class));
        let again = self.models().flat_map(|model| self.again(model));
        let again = again.filter(|(place, waiter)| !self.is_served(*place, waiter.without));
        places.chain(again).map(|(place, _)| place).collect()
    }

    /// Gives a waiter another end of its wait; hands back the one it had.
    pub(crate) fn set_deadline(&mut self, place: Place, deadline: Now) -> Option<Now> {
        let group = &mut self.groups[place.model.row()];
        let in_line = group.lines[place.class.row()].waiters.get_mut(&place.age);
        let again = group
            .again
            .get_mut(&place.age)
            .map(|again| &mut again.waiter);
        let waiter = in_line.or(again)?;
        Some(core::mem::replace(&mut waiter.deadline, deadline))
    }

    /// The place of a request that is submitted now: younger than all before.
    pub(crate) fn new_place(&mut self, model: ModelIndex, class: Class) -> Place {
        let age = Age(self.next_age);
        self.next_age += 1;
        Place { age, model, class }
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

    /// The configuration has a provider for it other than `without`, live or not. `[D-11]` `[D-18]`
    pub(crate) fn is_served(&self, place: Place, without: Option<ProviderIndex>) -> bool {
        self.candidates(place.model)
            .iter()
            .any(|candidate| candidate.serves(place.class) && Some(candidate.provider) != without)
    }

    /// A new request here may be granted past the queue: nobody waits who could be served, nobody
    /// of its own line, nobody who may come back to its model. `[S-15]`
    pub(crate) fn may_pass(&self, place: Place) -> bool {
        let group = &self.groups[place.model.row()];
        self.ready.is_empty()
            && group.undecided == 0
            && group.lines[place.class.row()].waiters.is_empty()
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
        if waiter.without.is_some() {
            let again = Again {
                class: place.class,
                waiter,
                shown: false,
            };
            group.again.insert(place.age, again);
        } else {
            let line = &mut group.lines[place.class.row()];
            line.waiters.insert(place.age, waiter);
        }
        let before = self.clients.insert(waiter.client, place);
        assert!(
            before.is_none(),
            "a client submitted while its request waits"
        );
        self.show(place.model, place.class);
        self.show_again(place);
    }

    /// Takes a waiter out, for whatever reason. `None` if nobody stands there.
    pub(crate) fn leave(&mut self, place: Place) -> Option<Waiter> {
        self.hide_again(place);
        let group = &mut self.groups[place.model.row()];
        let in_line = group.lines[place.class.row()].waiters.remove(&place.age);
        let waiter =
            in_line.or_else(|| group.again.remove(&place.age).map(|again| again.waiter))?;
        group.queued -= 1;
        group.long_queued -= u32::from(place.class.is_long());
        group.bytes -= u64::from(waiter.body_bytes);
        self.clients.remove(&waiter.client);
        self.show(place.model, place.class);
        Some(waiter)
    }

    pub(crate) fn place_of(&self, client: ClientRef) -> Option<Place> {
        self.clients.get(&client).copied()
    }

    /// The oldest waiter that some provider has room for. `[D-16]`
    pub(crate) fn next(&self) -> Option<Place> {
        self.ready.first().map(|&(place, _)| place)
    }

    /// What a provider has room for has changed, or may have.
    pub(crate) fn set_open(&mut self, provider: ProviderIndex, open: Kinds) {
        let seat = &mut self.seats[provider.row()];
        if seat.open != open {
            seat.open = open;
            seat.refresh(provider, &mut self.ready);
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
                self.show_all(model);
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
            self.show_all(model);
        }
    }

    fn show_all(&mut self, model: ModelIndex) {
        for class in Class::all() {
            self.show(model, class);
        }
        let group = &self.groups[model.row()];
        let held = group.undecided > 0;
        let places: Vec<_> = self.again(model).map(|(place, _)| place).collect();
        for place in places {
            if held {
                self.hide_again(place);
            } else {
                self.show_again(place);
            }
        }
    }

    /// Seats one that waits for its second run, unless its model waits for others.
    fn show_again(&mut self, place: Place) {
        let held = self.groups[place.model.row()].undecided > 0;
        self.seat_again(place, !held);
    }

    fn hide_again(&mut self, place: Place) {
        self.seat_again(place, false);
    }

    fn seat_again(&mut self, place: Place, shown: bool) {
        let group = &mut self.groups[place.model.row()];
        let Some(again) = group.again.get_mut(&place.age) else {
            return;
        };
        if core::mem::replace(&mut again.shown, shown) == shown {
            return;
        }
        let without = again.waiter.without;
        for candidate in &group.candidates {
            if !candidate.serves(place.class) || Some(candidate.provider) == without {
                continue;
            }
            let seat = &mut self.seats[candidate.provider.row()];
            let heads = &mut seat.heads[place.class.kind().row()];
            if shown {
                heads.insert(place);
            } else {
                heads.remove(&place);
            }
            seat.refresh(candidate.provider, &mut self.ready);
        }
    }

    /// Brings the seats up to date with the head of one line.
    fn show(&mut self, model: ModelIndex, class: Class) {
        let Self {
            groups,
            seats,
            ready,
            ..
        } = self;
        let group = &mut groups[model.row()];
        let held = group.undecided > 0;
        let line = &mut group.lines[class.row()];
        let head = line
            .waiters
            .first_key_value()
            .map(|(&age, _)| age)
            .filter(|_| !held);
        let before = core::mem::replace(&mut line.shown, head);
        if before == head {
            return;
        }
        for candidate in group
            .candidates
            .iter()
            .filter(|candidate| candidate.serves(class))
        {
            let seat = &mut seats[candidate.provider.row()];
            let heads = &mut seat.heads[class.kind().row()];
            if let Some(age) = before {
                heads.remove(&Place { age, model, class });
            }
            if let Some(age) = head {
                heads.insert(Place { age, model, class });
            }
            seat.refresh(candidate.provider, ready);
        }
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
            for class in Class::all().filter(|&class| candidate.serves(class)) {
                let waiting = group.lines[class.row()].waiters.len();
                let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
                queued += waiting;
                long += if class.is_long() { waiting } else { 0 };
            }
            let again = group.again.values().filter(|again| {
                candidate.serves(again.class) && again.waiter.without != Some(provider)
            });
            for again in again {
                queued += 1;
                long += u32::from(again.class.is_long());
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

    /// Whoever waits for a second run, oldest first.
    pub(crate) fn again(&self, model: ModelIndex) -> impl Iterator<Item = (Place, &Waiter)> {
        let again = self.groups[model.row()].again.iter();
        again.map(move |(&age, again)| {
            let class = again.class;
            (Place { age, model, class }, &again.waiter)
        })
    }

    /// The waiters of one line, oldest first.
    pub(crate) fn line(
        &self,
        model: ModelIndex,
        class: Class,
    ) -> impl Iterator<Item = (Place, &Waiter)> {
        self.groups[model.row()].lines[class.row()]
            .waiters
            .iter()
            .map(move |(&age, waiter)| (Place { age, model, class }, waiter))
    }
}
