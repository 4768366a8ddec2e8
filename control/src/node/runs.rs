//! Run entries: which ids of a session are taken, by runs and tunnels alike. `[R-253]` `[A-58]`
//!
//! Lives on: the agent's main task. View: one process; an entry outlives its session until its
//! attempt is over. Bound: `ATTEMPTS_MAX` entries.
use std::collections::BTreeMap;

use iop_proto::limits::ATTEMPTS_MAX;

use super::{LinkId, Ticket};

/// Why an id cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its first stream is open: an answer would end that stream at the Edge. Drop and count.
    Open,
    /// Its terminal was sent, its provider has not returned: one error terminal. `[R-201]`
    Retained,
    /// The table is full: one error terminal.
    Full,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    ticket: Ticket,
    /// No terminal was sent yet and the session lives.
    open: bool,
}

/// The table, keyed by session and id.
#[derive(Debug, Default)]
pub struct Runs {
    entries: BTreeMap<(LinkId, String), Entry>,
    last_ticket: u64,
    open: u32,
}

impl Runs {
    /// Takes `run_id` of `link` for a new attempt.
    ///
    /// # Errors
    /// The id is taken, or there is no room. `[D-52]`
    pub fn take(&mut self, link: LinkId, run_id: &str) -> Result<Ticket, Refusal> {
        let key = (link, run_id.to_owned());
        if let Some(entry) = self.entries.get(&key) {
            return Err(if entry.open {
                Refusal::Open
            } else {
                Refusal::Retained
            });
        }
        if self.entries.len() >= ATTEMPTS_MAX as usize {
            return Err(Refusal::Full);
        }
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        self.entries.insert(key, Entry { ticket, open: true });
        self.open += 1;
        Ok(ticket)
    }

    /// The attempt a CancelRequest of `link` names. An id nobody has, or one of an earlier session,
    /// is nobody. `[R-252]`
    #[must_use]
    pub fn find(&self, link: LinkId, run_id: &str) -> Option<Ticket> {
        self.entries
            .get(&(link, run_id.to_owned()))
            .map(|entry| entry.ticket)
    }

    /// Nothing more of this attempt will be sent: its terminal was, or its session ended.
    pub fn settled(&mut self, link: LinkId, run_id: &str) {
        if let Some(entry) = self.entries.get_mut(&(link, run_id.to_owned())) {
            self.open -= u32::from(core::mem::replace(&mut entry.open, false));
        }
    }

    /// The attempt is over; its id may be taken again.
    pub fn remove(&mut self, link: LinkId, run_id: &str) {
        if let Some(entry) = self.entries.remove(&(link, run_id.to_owned())) {
            self.open -= u32::from(entry.open);
        }
    }

    /// Attempts of `link` that are not over, in the order of their ids.
    pub fn of_link(&self, link: LinkId) -> impl Iterator<Item = Ticket> + '_ {
        let range = self.entries.range((link, String::new())..);
        range
            .take_while(move |((of, _), _)| *of == link)
            .map(|(_, entry)| entry.ticket)
    }

    /// Attempts without a terminal.
    #[must_use]
    pub const fn open(&self) -> u32 {
        self.open
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: LinkId = LinkId(1);
    const TWO: LinkId = LinkId(2);

    /// Proves [D-52].
    #[test]
    fn d52_a_taken_id_is_refused_as_open_then_as_retained_then_free() {
        let mut runs = Runs::default();
        let first = runs.take(ONE, "r").unwrap();
        assert_eq!(runs.take(ONE, "r"), Err(Refusal::Open));
        runs.settled(ONE, "r");
        assert_eq!(runs.take(ONE, "r"), Err(Refusal::Retained));
        assert_eq!(runs.find(ONE, "r"), Some(first));
        runs.remove(ONE, "r");
        let second = runs.take(ONE, "r").unwrap();
        assert_ne!(first, second);
    }

    #[test]
    fn a_retained_entry_neither_collides_with_nor_obeys_a_later_session() {
        let mut runs = Runs::default();
        let old = runs.take(ONE, "r").unwrap();
        runs.settled(ONE, "r");
        assert_eq!(runs.find(TWO, "r"), None);
        let new = runs.take(TWO, "r").unwrap();
        assert_eq!(runs.of_link(ONE).collect::<Vec<_>>(), [old]);
        assert_eq!(runs.of_link(TWO).collect::<Vec<_>>(), [new]);
    }

    #[test]
    fn open_counts_what_has_no_terminal_once() {
        let mut runs = Runs::default();
        for id in ["a", "b", "c"] {
            runs.take(ONE, id).unwrap();
        }
        runs.settled(ONE, "a");
        runs.settled(ONE, "a");
        assert_eq!(runs.open(), 2);
        runs.remove(ONE, "a");
        runs.remove(ONE, "b");
        runs.remove(ONE, "b");
        assert_eq!(runs.open(), 1);
        runs.settled(ONE, "nobody");
        assert_eq!((runs.open(), runs.is_empty()), (1, false));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut runs = Runs::default();
        for n in 0..ATTEMPTS_MAX {
            runs.take(ONE, &n.to_string()).unwrap();
        }
        assert_eq!(runs.take(ONE, "more"), Err(Refusal::Full));
        runs.remove(ONE, "7");
        assert!(runs.take(ONE, "more").is_ok());
    }
}
