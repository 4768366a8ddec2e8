//! What each provider can take: live or not, and how much of it is held: machine 2 of the contract.
//!
//! A lease counts here from grant to return. A fence returns all of a generation's at once, by
//! clearing the counters: from then on every lease of that generation *is* returned, because its
//! generation compares unequal. `[R-073]`
//!
//! Lives on: control. Bound: one row per configured provider.
use iop_proto::ids::{Generation, NodeIndex, ProviderIndex};

use super::class::{Class, Kind, Kinds};
use super::overlay::Bindings;
use super::queue::{Candidate, Place};
use crate::names::Names;

/// Leases held on a provider, of every operation. `long <= in_flight`, `count_tokens <= in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) in_flight: u32,
    pub(crate) long: u32,
    pub(crate) count_tokens: u32,
}

impl Load {
    fn add(&mut self, class: Class) {
        self.in_flight += 1;
        self.long += u32::from(class.is_long());
        self.count_tokens += u32::from(class.is_count_tokens());
    }

    fn remove(&mut self, class: Class) {
        let less = |count: u32, by: bool| {
            count
                .checked_sub(u32::from(by))
                .expect("a lease is returned at most once")
        };
        self.in_flight = less(self.in_flight, true);
        self.long = less(self.long, class.is_long());
        self.count_tokens = less(self.count_tokens, class.is_count_tokens());
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    Offline,
    /// Serves under this connection generation; `draining`: takes nothing new. `[I2.1]`
    Live {
        generation: Generation,
        draining: bool,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Resource {
    pub(crate) node: NodeIndex,
    pub(crate) enabled: bool,
    /// The node holds a configuration that has what the provider's requests ask it for.
    applied: bool,
    pub(crate) capacity: u32,
    pub(crate) long_capacity: u32,
    pub(crate) live: Live,
    pub(crate) load: Load,
    /// What evidence of this generation has said, by binding. `[I2.1]`
    pub(crate) bindings: Bindings,
    /// Its load when the figures changed last: a lowered capacity is exceeded until leases end.
    at_change: Load,
    /// Number of its latest grant among all grants; 0 = none yet.
    pub(crate) last_used: u64,
}

impl Resource {
    /// Most leases of `count_tokens` at once: a quarter of the capacity, at least one. `[D-17]`
    pub(crate) fn count_tokens_max(&self) -> u32 {
        (self.capacity / 4).max(1)
    }

    /// May be chosen, room or no room. `[states §2]`
    pub(crate) fn is_candidate(&self) -> bool {
        match self.live {
            Live::Offline => false,
            Live::Live { draining, .. } => {
                self.enabled && self.applied && !draining && !self.bindings.record().is_lowered()
            }
        }
    }

    /// Live candidate with room for one more of `kind`. Its type plays no part. `[R-237]`
    fn takes(&self, kind: Kind) -> bool {
        self.is_candidate()
            && self.load.in_flight < self.capacity
            && (!kind.is_long() || self.load.long < self.long_capacity)
            && (!kind.is_count_tokens() || self.load.count_tokens < self.count_tokens_max())
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        match self.live {
            Live::Offline => None,
            Live::Live { generation, .. } => Some(generation),
        }
    }

    /// The load is within the figures, or still the one from before they were lowered. `[I2.8]`
    pub(crate) fn is_within_bounds(&self) -> bool {
        let (load, before) = (self.load, self.at_change);
        load.in_flight <= self.capacity.max(before.in_flight)
            && load.long <= self.long_capacity.max(before.long)
            && load.count_tokens <= self.count_tokens_max().max(before.count_tokens)
            && load.long.max(load.count_tokens) <= load.in_flight
    }
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Resources {
    rows: Vec<Resource>,
    of_node: Vec<Vec<ProviderIndex>>,
    /// Leases ever taken, and returned in any way: `taken == returned + held`. `[I3.1]`
    pub(crate) taken: u64,
    pub(crate) returned: u64,
}

impl Resources {
    pub(crate) fn new(names: &Names) -> Self {
        let mut resources = Self {
            rows: Vec::with_capacity(names.providers.len()),
            of_node: Vec::new(),
            taken: 0,
            returned: 0,
        };
        resources.configure(names);
        resources
    }

    /// Takes the figures of another configuration. Leases, liveness and what is held stay as they are;
    /// a provider that is gone is a disabled one. `[states §2]`
    pub(crate) fn configure(&mut self, names: &Names) {
        self.of_node.resize(names.nodes.len(), Vec::new());
        for (row, provider) in names.providers.iter().enumerate() {
            if let Some(known) = self.rows.get_mut(row) {
                known.enabled = provider.enabled;
                known.capacity = provider.capacity;
                known.long_capacity = provider.long_capacity;
                known.at_change = known.load;
                known.bindings.bind(provider);
                continue;
            }
            let index = ProviderIndex::new(row).expect("providers are at most PROVIDERS_MAX");
            self.of_node[provider.node.row()].push(index);
            self.rows.push(Resource {
                node: provider.node,
                enabled: provider.enabled,
                applied: false,
                capacity: provider.capacity,
                long_capacity: provider.long_capacity,
                live: Live::Offline,
                load: Load::default(),
                bindings: Bindings::new(provider),
                at_change: Load::default(),
                last_used: 0,
            });
        }
    }

    pub(crate) fn get(&self, provider: ProviderIndex) -> &Resource {
        &self.rows[provider.row()]
    }

    /// Where evidence about the provider's bindings is kept.
    pub(crate) fn bindings_mut(&mut self, provider: ProviderIndex) -> &mut Bindings {
        &mut self.rows[provider.row()].bindings
    }

    pub(crate) fn of_node(&self, node: NodeIndex) -> &[ProviderIndex] {
        &self.of_node[node.row()]
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (ProviderIndex, &Resource)> {
        self.rows.iter().enumerate().filter_map(|(row, resource)| {
            ProviderIndex::new(row).map(|provider| (provider, resource))
        })
    }

    /// Leases held on one node's providers.
    pub(crate) fn held_on(&self, node: NodeIndex) -> u32 {
        let of_node = self.of_node(node).iter();
        of_node.map(|&row| self.get(row).load.in_flight).sum()
    }

    /// Leases held now, over all providers.
    pub(crate) fn held(&self) -> u64 {
        self.rows
            .iter()
            .map(|row| u64::from(row.load.in_flight))
            .sum()
    }

    /// What the provider can take one more of.
    pub(crate) fn open(&self, provider: ProviderIndex) -> Kinds {
        let resource = self.get(provider);
        Kind::all()
            .filter(|&kind| resource.takes(kind))
            .fold(Kinds::NONE, Kinds::with)
    }

    /// A lease of `generation` on this provider is held, not returned. The one comparison.
    pub(crate) fn is_current(&self, provider: ProviderIndex, generation: Generation) -> bool {
        self.get(provider).generation() == Some(generation)
    }

    /// The candidate that takes one more, whom a request there may have: least loaded for its size
    /// after the grant, then longest unused, then first configured. `[D-16]` `[D-18]`
    pub(crate) fn select(&self, candidates: &[Candidate], place: Place) -> Option<usize> {
        let mut best: Option<(usize, &Resource)> = None;
        for (position, candidate) in candidates.iter().enumerate() {
            let resource = self.get(candidate.provider);
            if !candidate.serves(place.line()) || !resource.takes(place.class.kind()) {
                continue;
            }
            if best.is_none_or(|(_, best)| precedes(resource, best)) {
                best = Some((position, resource));
            }
        }
        best.map(|(position, _)| position)
    }

    /// Whether the node holds what the provider's requests need.
    pub(crate) fn set_applied(&mut self, provider: ProviderIndex, applied: bool) {
        self.rows[provider.row()].applied = applied;
    }

    /// Live under `generation` from here on, empty. `[R-041]` `[R-054]` `[R-285]`
    pub(crate) fn activate(&mut self, provider: ProviderIndex, generation: Generation) {
        let resource = &mut self.rows[provider.row()];
        resource.load = Load::default();
        resource.bindings.renew();
        resource.at_change = Load::default();
        resource.live = Live::Live {
            generation,
            draining: false,
        };
    }

    /// Takes nothing new until its generation ends. `[D-07]`
    pub(crate) fn drain(&mut self, provider: ProviderIndex) {
        match &mut self.rows[provider.row()].live {
            Live::Offline => {}
            Live::Live { draining, .. } => *draining = true,
        }
    }

    /// Offline, and every lease held on it returned. Hands back how many. `[R-073]` `[R-074]`
    pub(crate) fn fence(&mut self, provider: ProviderIndex) -> u32 {
        let resource = &mut self.rows[provider.row()];
        let held = core::mem::take(&mut resource.load).in_flight;
        resource.bindings.renew();
        resource.live = Live::Offline;
        self.returned += u64::from(held);
        held
    }

    /// Takes a lease; the caller has seen that there is room. `[I2.3]`
    pub(crate) fn take(&mut self, provider: ProviderIndex, class: Class) {
        let resource = &mut self.rows[provider.row()];
        debug_assert!(resource.takes(class.kind()), "granted without room");
        resource.load.add(class);
        self.taken += 1;
        resource.last_used = self.taken;
    }

    /// Returns a lease of `generation`; `false` if the fence has done so already. `[R-073]`
    pub(crate) fn release(
        &mut self,
        provider: ProviderIndex,
        generation: Generation,
        class: Class,
    ) -> bool {
        if !self.is_current(provider, generation) {
            return false;
        }
        let resource = &mut self.rows[provider.row()];
        resource.load.remove(class);
        if cfg!(iop_break = "double_release") && resource.load.in_flight > 0 {
            resource.load.in_flight -= 1;
        }
        self.returned += 1;
        true
    }
}

/// (in_flight + 1) / capacity, compared without division; then the one unused for longer.
fn precedes(left: &Resource, right: &Resource) -> bool {
    let share = |mine: &Resource, other: &Resource| {
        u64::from(mine.load.in_flight + 1) * u64::from(other.capacity)
    };
    (share(left, right), left.last_used) < (share(right, left), right.last_used)
}
