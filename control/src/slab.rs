//! A fixed table whose rows are named by (slot, generation).
//!
//! Lives on: whoever owns the table. Bound: `rows_max`, set at construction; memory grows to the
//! largest number of rows ever used at once and stays there.
use iop_proto::ids::SlotGeneration;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Row<T> {
    /// Of the tenant if there is one, else of the next. `None`: its generations are spent, for
    /// ever.
    generation: Option<SlotGeneration>,
    value: Option<T>,
}

/// Rows of `T`. A name is valid from `insert` until `remove`, and never again. `[D-32]`
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Slab<T> {
    rows: Vec<Row<T>>,
    /// Vacant rows that may be taken again, the latest first.
    free: Vec<u32>,
    rows_max: u32,
    used: u32,
}

impl<T> Slab<T> {
    #[must_use]
    pub const fn new(rows_max: u32) -> Self {
        Self {
            rows: Vec::new(),
            free: Vec::new(),
            rows_max,
            used: 0,
        }
    }

    /// Takes a row. `None` when all `rows_max` are taken or retired.
    pub fn insert(&mut self, value: T) -> Option<(u32, SlotGeneration)> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.grow()?,
        };
        let row = &mut self.rows[slot as usize];
        let generation = row
            .generation
            .expect("a retired row is never on the free list");
        row.value = Some(value);
        self.used += 1;
        Some((slot, generation))
    }

    fn grow(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.rows.len())
            .ok()
            .filter(|&slot| slot < self.rows_max)?;
        self.rows.push(Row {
            generation: Some(SlotGeneration::FIRST),
            value: None,
        });
        Some(slot)
    }

    /// The row, only if `generation` is its present tenant's.
    #[must_use]
    pub fn get(&self, slot: u32, generation: SlotGeneration) -> Option<&T> {
        let row = self.rows.get(slot as usize)?;
        row.value
            .as_ref()
            .filter(|_| row.generation == Some(generation))
    }

    /// As `get`.
    #[must_use]
    pub fn get_mut(&mut self, slot: u32, generation: SlotGeneration) -> Option<&mut T> {
        let row = self.rows.get_mut(slot as usize)?;
        if row.generation == Some(generation) {
            row.value.as_mut()
        } else {
            None
        }
    }

    /// Ends the tenancy that `generation` names.
    pub fn remove(&mut self, slot: u32, generation: SlotGeneration) -> Option<T> {
        let row = self.rows.get_mut(slot as usize)?;
        if row.generation != Some(generation) {
            return None;
        }
        let value = row.value.take()?;
        row.generation = generation.next();
        if row.generation.is_some() {
            self.free.push(slot);
        }
        self.used -= 1;
        Some(value)
    }

    /// Rows taken now.
    #[must_use]
    pub const fn used(&self) -> u32 {
        self.used
    }

    /// Every row that was ever taken: its slot, its tenant's generation or its next one's, its tenant.
    #[cfg(test)]
    pub(crate) fn rows(&self) -> impl Iterator<Item = (u32, Option<SlotGeneration>, Option<&T>)> {
        (0..)
            .zip(&self.rows)
            .map(|(slot, row)| (slot, row.generation, row.value.as_ref()))
    }

    /// Vacant rows, the one that is taken next last.
    #[cfg(test)]
    pub(crate) fn free(&self) -> &[u32] {
        &self.free
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.rows.iter().filter_map(|row| row.value.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_with_its_tenant() {
        let mut slab = Slab::new(1);
        let (slot, first) = slab.insert('a').unwrap();
        assert_eq!(slab.insert('b'), None, "one row only");
        assert_eq!(slab.get_mut(slot, first), Some(&mut 'a'));
        assert_eq!(slab.get(slot, first), Some(&'a'));
        assert_eq!(slab.remove(slot, first), Some('a'));
        assert_eq!(slab.remove(slot, first), None);
        let (again, second) = slab.insert('c').unwrap();
        assert_eq!((again, second), (slot, first.next().unwrap()));
        assert_eq!(slab.get_mut(slot, first), None);
        assert_eq!(slab.get(slot, first), None);
        assert_eq!(slab.remove(slot, first), None);
        assert_eq!(
            (slab.used(), slab.iter().copied().collect()),
            (1, vec!['c'])
        );
    }

    #[test]
    fn a_row_whose_generations_are_spent_retires() {
        let mut slab = Slab::new(2);
        let (slot, _) = slab.insert('a').unwrap();
        let last = SlotGeneration::new(u32::MAX).unwrap();
        slab.rows[slot as usize].generation = Some(last);
        assert_eq!(slab.remove(slot, last), Some('a'));
        let (other, _) = slab.insert('b').unwrap();
        assert_ne!(other, slot);
        assert_eq!(slab.insert('c'), None, "the retired row still counts");
    }
}
