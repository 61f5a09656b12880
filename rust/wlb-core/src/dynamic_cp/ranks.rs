//! The ranks of a micro-batch that are not in a group yet.

use std::ops::Range;

use super::options::GroupSizes;

/// Free ranks. They are taken in descending numbers: several whole nodes at once, or ranks inside a node.
#[derive(Clone, Debug)]
pub(super) struct FreeRanks {
    node: usize,
    /// Whole nodes, and the rest of the world after the last whole node.
    whole: Range<usize>,
    /// Ranks in nodes that other groups have begun.
    parts: Vec<Range<usize>>,
}

impl FreeRanks {
    /// All ranks of a world; if a node has at least as many ranks as the world, there is one node.
    pub(super) fn new(world_size: usize, node: usize) -> Self {
        Self { node: node.min(world_size), whole: 0..world_size, parts: Vec::new() }
    }

    /// Takes `many` neighbouring ranks if there are so many in one place, and returns the first.
    pub(super) fn take(&mut self, many: usize) -> Option<usize> {
        let fitting = self.parts.iter_mut().filter(|part| part.len() >= many);
        if let Some(part) = fitting.min_by_key(|part| part.len()) {
            let first = part.start;
            part.start += many;
            return Some(first);
        }
        if self.whole.len() < many {
            return None;
        }
        let first = self.whole.start;
        let end = (first + many).next_multiple_of(self.node).min(self.whole.end);
        self.whole.start = end;
        self.parts.push(first + many..end);
        Some(first)
    }

    /// Most neighbouring ranks that can be taken.
    pub(super) fn most(&self) -> usize {
        self.parts.iter().map(|part| part.len()).fold(self.whole.len(), usize::max)
    }

    /// Cuts the remaining ranks into blocks of about `base` ranks, at most `most`: blocks of `base` followed by smaller
    /// powers of two; or, if any size is allowed, equal blocks of at least `base`. Returns first rank and size of each,
    /// in order.
    ///
    /// # Arguments
    /// * `only` - the only allowed sizes of blocks, ascending from 1, if not all.
    pub(super) fn cut(
        mut self,
        sizes: GroupSizes,
        only: Option<&[usize]>,
        base: usize,
        most: usize,
    ) -> Vec<(usize, usize)> {
        self.parts.push(self.whole.clone());
        self.parts.retain(|part| !part.is_empty());
        self.parts.sort_unstable_by_key(|part| part.start);
        let mut blocks = Vec::new();
        for part in self.parts {
            match sizes {
                GroupSizes::PowersOfTwo => {
                    let mut first = part.start;
                    while first < part.end {
                        let aligned = if first == 0 { base } else { 1 << first.trailing_zeros() };
                        let size = base.min(1 << (part.end - first).ilog2()).min(aligned);
                        blocks.push((first, size));
                        first += size;
                    }
                }
                GroupSizes::Any => {
                    // Blocks of several nodes consist of whole nodes where possible.
                    let inside = base <= self.node;
                    let unit = if inside { 1 } else { self.node };
                    let mut first = part.start;
                    while first < part.end {
                        let end = if inside { (first + 1).next_multiple_of(self.node) } else { part.end };
                        let ranks = end.min(part.end) - first;
                        let blocks_of = match only {
                            None => near(ranks, base, most, unit),
                            Some(only) => largest_of(only, ranks, base),
                        };
                        for size in blocks_of {
                            blocks.push((first, size));
                            first += size;
                        }
                    }
                }
            }
        }
        blocks
    }
}

/// Cuts `ranks` ranks into blocks of at most `base`, each the largest of the allowed sizes that fits.
fn largest_of(only: &[usize], mut ranks: usize, base: usize) -> Vec<usize> {
    let mut blocks = Vec::new();
    for &size in only.iter().rev().filter(|&&size| size <= base) {
        blocks.extend(std::iter::repeat_n(size, ranks / size));
        ranks %= size;
    }
    blocks
}

/// Divides ranks into equal blocks of at least `base`, at most `most`, in whole units; or, if equal blocks would be
/// larger than `most`, into blocks of `most` and a rest.
fn near(ranks: usize, base: usize, most: usize, unit: usize) -> Vec<usize> {
    let units = ranks.div_ceil(unit);
    let count = (ranks / base.next_multiple_of(unit)).max(1);
    if units.div_ceil(count) * unit <= most || ranks <= most {
        let end = |index: usize| (index * units / count * unit).min(ranks);
        return (0..count).map(|index| end(index + 1) - end(index)).collect();
    }
    let rest = Some(ranks % most).filter(|&rest| rest > 0);
    std::iter::repeat_n(most, ranks / most).chain(rest).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use proptest::prelude::*;

    use super::{FreeRanks, GroupSizes};

    proptest! {
        /// Every rank is in exactly one block, no block is larger than allowed, and a block that fits into a node is
        /// inside one.
        #[test]
        fn ranks_are_taken_once(
            world_size in 1_usize..70, node in 1_usize..70, most in 1_usize..70, base in 1_usize..70,
            mut taken in proptest::collection::vec(1_usize..70, 0..8),
        ) {
            let most = most.min(world_size);
            let base = base.min(most);
            let mut free = FreeRanks::new(world_size, node);
            let all = taken.is_empty();
            taken.sort_unstable_by_key(|&many| std::cmp::Reverse(many));
            let mut blocks: Vec<(usize, usize)> = Vec::new();
            for many in taken {
                let most = free.most();
                let first = free.take(many);
                prop_assert_eq!(many <= most, first.is_some());
                blocks.extend(first.map(|first| (first, many)));
            }
            let cut = free.cut(GroupSizes::Any, None, base, most);
            let small = cut.iter().filter(|_| base <= node);
            for &(first, size) in blocks.iter().chain(small) {
                prop_assert!(size > node || first / node == (first + size - 1) / node, "{first} {size}");
            }
            prop_assert!(cut.iter().all(|&(_, size)| 0 < size && size <= most));
            prop_assert!(!all || cut.iter().any(|&(_, size)| size >= base), "none of {base}: {cut:?}");
            blocks.extend(cut);
            blocks.sort_unstable();
            let mut next = 0;
            for (first, size) in blocks {
                prop_assert_eq!(first, next);
                next += size;
            }
            prop_assert_eq!(next, world_size);
        }
    }
}
