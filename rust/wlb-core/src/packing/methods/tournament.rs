//! The least of many keys, while they change.

/// Children of a node: as many keys as a cache line holds.
const WIDTH: usize = 8;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Node([u64; WIDTH]);

/// The nodes of a level, and for each node the child with the least key (the first if several are equal).
struct Level {
    nodes: Vec<Node>,
    least: Vec<u8>,
}

/// One key for each index, in a wide and flat tree. A node holds the least key of each of its children, and which child
/// has the least of these; so the way down takes one look at each level.
///
/// A key's place is its index: nothing moves, ties go to the lowest index, and most changes end at the first node,
/// because its least key stays. A binary heap would go through twice as many cache lines, and would have to tell stale
/// entries from valid ones.
pub(crate) struct Tournament {
    /// From the level of the keys up to a single node.
    levels: Vec<Level>,
}

impl Tournament {
    /// Key of an index without one: above all other keys.
    pub(crate) const NONE: u64 = u64::MAX;

    pub(crate) fn new(keys: impl Iterator<Item = u64>) -> Self {
        let mut levels = vec![Level::new(keys)];
        while let Some(below) = levels.last()
            && below.nodes.len() > 1
        {
            let least = below.nodes.iter().zip(&below.least).map(|(node, &child)| node.0[child as usize % WIDTH]);
            levels.push(Level::new(least));
        }
        Self { levels }
    }

    /// The index of the least key, the lowest of several.
    #[inline]
    pub(crate) fn least(&self) -> Option<usize> {
        let at = self.levels.iter().rev().fold(0, |at, level| at * WIDTH + usize::from(level.least[at]));
        let node = self.levels.first()?.nodes.get(at / WIDTH)?;
        (node.0[at % WIDTH] < Self::NONE).then_some(at)
    }

    #[inline]
    pub(crate) fn set(&mut self, index: usize, key: u64) {
        let (mut at, mut key) = (index, key);
        for level in &mut self.levels {
            let node = &mut level.nodes[at / WIDTH];
            if std::mem::replace(&mut node.0[at % WIDTH], key) == key {
                return;
            }
            let (least, child) = least(node);
            level.least[at / WIDTH] = child;
            (at, key) = (at / WIDTH, least);
        }
    }
}

impl Level {
    fn new(mut keys: impl Iterator<Item = u64>) -> Self {
        let mut nodes = Vec::with_capacity(keys.size_hint().0.div_ceil(WIDTH));
        while let Some(first) = keys.next() {
            let mut node = Node([Tournament::NONE; WIDTH]);
            node.0[0] = first;
            node.0[1..].iter_mut().zip(&mut keys).for_each(|(place, key)| *place = key);
            nodes.push(node);
        }
        let least = nodes.iter().map(|node| least(node).1).collect();
        Self { nodes, least }
    }
}

/// The least key of a node and its child, the first if several are equal. Written without a branch, since the result
/// cannot be predicted, and with few steps that depend on each other.
#[inline]
fn least(node: &Node) -> (u64, u8) {
    let less = |a: (u64, u8), b: (u64, u8)| if b.0 < a.0 { b } else { a };
    let [a, b, c, d, e, f, g, h] = node.0;
    let (ab, cd) = (less((a, 0), (b, 1)), less((c, 2), (d, 3)));
    let (ef, gh) = (less((e, 4), (f, 5)), less((g, 6), (h, 7)));
    less(less(ab, cd), less(ef, gh))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Tournament;

    proptest! {
        #[test]
        fn the_least_is_found_through_any_changes(
            mut keys in proptest::collection::vec(prop_oneof![0_u64..9, Just(Tournament::NONE)], 1..600),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![0_u64..9, Just(Tournament::NONE)]), 0..60),
        ) {
            let least = |keys: &[u64]| (0..keys.len()).filter(|&j| keys[j] < Tournament::NONE).min_by_key(|&j| (keys[j], j));
            let mut tournament = Tournament::new(keys.iter().copied());
            prop_assert_eq!(tournament.least(), least(&keys));
            for (index, key) in changes {
                let index = index.index(keys.len());
                keys[index] = key;
                tournament.set(index, key);
                prop_assert_eq!(tournament.least(), least(&keys));
            }
        }
    }
}
