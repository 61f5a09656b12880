//! Ranks that a group may have.

use crate::dynamic_cp::options::GroupSizes;
use crate::dynamic_cp::problem::Problem;

/// Neighbouring ranks that may be a group: an allowed size at an allowed first rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) first: u32,
    pub(super) size: u32,
    /// One bit for each of its ranks.
    pub(super) ranks: u64,
}

impl Slot {
    /// End of its ranks (one past the last).
    pub(super) fn end(&self) -> u32 {
        self.first + self.size
    }
}

/// All slots of a world of at most 64 ranks.
pub(super) struct Slots {
    all: Vec<Slot>,
    /// `ids[first * (world_size + 1) + size]` is the slot of `size` ranks that begins at `first`, if there is one.
    ids: Vec<Option<u16>>,
    world_size: usize,
}

impl Slots {
    pub(super) fn new(problem: &Problem) -> Self {
        let &Problem { world_size, largest_group, group_sizes, .. } = problem;
        let (mut all, mut ids) = (Vec::new(), vec![None; world_size * (world_size + 1)]);
        for first in 0..world_size {
            for size in 1..=largest_group.min(world_size - first) {
                let is_aligned = size.is_power_of_two() && first.is_multiple_of(size);
                let is_any = group_sizes == GroupSizes::Any && problem.is_size(size);
                if is_any || (group_sizes == GroupSizes::PowersOfTwo && is_aligned) {
                    ids[first * (world_size + 1) + size] = Some(all.len() as u16);
                    let ranks = (u64::MAX >> (64 - size)) << first;
                    all.push(Slot { first: first as u32, size: size as u32, ranks });
                }
            }
        }
        Self { all, ids, world_size }
    }

    /// Number of slots.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The ranks of a slot.
    #[inline]
    pub(super) fn get(&self, id: u16) -> &Slot {
        &self.all[usize::from(id)]
    }

    /// The slot of the ranks `first..end`, if there is one.
    #[inline]
    pub(super) fn between(&self, first: u32, end: u32) -> Option<u16> {
        let size = end.checked_sub(first)? as usize;
        self.ids.get(first as usize * (self.world_size + 1) + size).copied().flatten()
    }
}
