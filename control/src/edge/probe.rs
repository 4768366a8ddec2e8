//! The prober: asks about each overlaid binding of an enabled provider until it is found again.
//! `[D-58]`
//!
//! ```text
//! Idle --lowered--> Waiting --due--> Asked --not found: twice as long--> Waiting
//!                      └-- due while its node is asked about another --> Due --> Asked
//! ```
//! Lives on: control. Bound: one row per provider; one question of its own outstanding per node.
use iop_proto::domain::CommandKind;
use iop_proto::ids::{NodeIndex, Now, ProviderIndex};
use iop_proto::limits::{PROBE_FIRST_MS, PROBE_JITTER_PERCENT, PROBE_LONGEST_MS};

use super::command::Question;
use super::{Control, Timer};
use crate::step::{CommandId, Out};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Probe {
    /// No overlay, or disabled: nothing to ask.
    #[default]
    Idle,
    Waiting {
        at: Now,
        wait_ms: u64,
    },
    /// Its time has come, its node is still asked about another.
    Due {
        since: Now,
        wait_ms: u64,
    },
    Asked {
        wait_ms: u64,
    },
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Prober {
    probes: Vec<Probe>,
    /// The outstanding question of each node, and the provider it is about.
    asked: Vec<Option<(CommandId, ProviderIndex)>>,
    /// Jitter comes from here; seeded from outside, so that a run can be repeated.
    dice: u64,
}

impl Prober {
    pub(crate) fn new(providers: usize, nodes: usize, seed: u64) -> Self {
        Self {
            probes: vec![Probe::Idle; providers],
            asked: vec![None; nodes],
            dice: seed,
        }
    }

    /// Rows for what a reload has added.
    pub(crate) fn grow(&mut self, providers: usize, nodes: usize) {
        self.probes.resize(providers, Probe::Idle);
        self.asked.resize(nodes, None);
    }

    pub(crate) fn get(&self, provider: ProviderIndex) -> Probe {
        self.probes[provider.row()]
    }

    pub(crate) fn asked(&self, node: NodeIndex) -> Option<(CommandId, ProviderIndex)> {
        self.asked[node.row()]
    }

    fn set(&mut self, provider: ProviderIndex, probe: Probe) {
        self.probes[provider.row()] = probe;
    }

    /// `wait_ms` and up to a fifth more or less (splitmix64).
    fn jittered(&mut self, wait_ms: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.dice;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let spread = wait_ms * PROBE_JITTER_PERCENT / 100;
        wait_ms - spread + (value ^ (value >> 31)) % (2 * spread + 1)
    }
}

impl Control {
    fn wait_to_probe(&mut self, now: Now, provider: ProviderIndex, wait_ms: u64) {
        let at = now.after_ms(self.prober.jittered(wait_ms));
        self.timers.set(at, Timer::Probe(provider));
        self.prober.set(provider, Probe::Waiting { at, wait_ms });
    }

    /// The overlay is off, or its generation has ended.
    pub(super) fn stop_probe(&mut self, provider: ProviderIndex) {
        if let Probe::Waiting { at, .. } = self.prober.get(provider) {
            self.timers.cancel(at, Timer::Probe(provider));
        }
        self.prober.set(provider, Probe::Idle);
    }

    /// Asks about the provider exactly if it is enabled and its present binding overlaid: a reload may
    /// have changed either. Of a disabled one no proof counts, and asking would only hold up others.
    pub(super) fn probe_as_bound(&mut self, now: Now, provider: ProviderIndex) {
        let resource = self.resources.get(provider);
        let is_sought = resource.enabled && resource.bindings.record().is_lowered();
        let is_probed = self.prober.get(provider) != Probe::Idle;
        if is_sought && !is_probed {
            self.wait_to_probe(now, provider, PROBE_FIRST_MS);
        } else if !is_sought && is_probed {
            self.stop_probe(provider);
        }
    }

    pub(super) fn stop_probes(&mut self, node: NodeIndex) {
        for entry in 0..self.resources.of_node(node).len() {
            self.stop_probe(self.resources.of_node(node)[entry]);
        }
        self.prober.asked[node.row()] = None;
    }

    pub(super) fn probe_due(&mut self, now: Now, provider: ProviderIndex, out: &mut Out) {
        let Probe::Waiting { wait_ms, .. } = self.prober.get(provider) else {
            return;
        };
        let node = self.resources.get(provider).node;
        if self.prober.asked(node).is_some() {
            let since = now;
            self.prober.set(provider, Probe::Due { since, wait_ms });
        } else {
            self.probe(now, provider, wait_ms, out);
        }
    }

    fn probe(&mut self, now: Now, provider: ProviderIndex, wait_ms: u64, out: &mut Out) {
        let node = self.resources.get(provider).node;
        let question = Question {
            node,
            kind: CommandKind::Capabilities,
            provider: Some(provider),
            of_operator: false,
        };
        let command = self.ask(now, question, out);
        let command = command.expect("an overlaid provider's node has a ready owner");
        self.prober.asked[node.row()] = Some((command, provider));
        self.prober.set(provider, Probe::Asked { wait_ms });
    }

    /// A command has ended. If it was the prober's: again later while the overlay stands, and the
    /// node's longest overdue binding is next.
    pub(super) fn probe_ended(
        &mut self,
        now: Now,
        command: CommandId,
        node: NodeIndex,
        out: &mut Out,
    ) {
        let asked = self.prober.asked(node);
        let Some((_, provider)) = asked.filter(|&(known, _)| known == command) else {
            return;
        };
        self.prober.asked[node.row()] = None;
        // Idle if the answer, or another one meanwhile, has found it.
        if let Probe::Asked { wait_ms } = self.prober.get(provider) {
            self.wait_to_probe(now, provider, (2 * wait_ms).min(PROBE_LONGEST_MS));
        }
        let due = self.resources.of_node(node).iter().filter_map(|&provider| {
            match self.prober.get(provider) {
                Probe::Due { since, wait_ms } => Some((since, provider, wait_ms)),
                Probe::Idle | Probe::Waiting { .. } | Probe::Asked { .. } => None,
            }
        });
        if let Some((_, provider, wait_ms)) = due.min() {
            self.probe(now, provider, wait_ms, out);
        }
    }
}
