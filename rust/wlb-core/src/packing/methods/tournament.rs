//! The least of many keys, while they change.

/// Children of a node: as many keys as a cache line holds.
const WIDTH: usize = 8;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Node([u64; WIDTH]);

/// One key for each of some indices, in a tree that is wide and so flat: a node has the least key of each of its
/// children.
///
/// Keys stand where their index says: nothing moves, ties go to the lowest index by themselves, and most changes end at
/// the first node, whose least key is as before. A binary heap goes through twice as many cache lines and more, and
/// what it has of indices that changed must be told from what holds.
pub(super) struct Tournament {
    /// From the keys up to a single node.
    levels: Vec<Vec<Node>>,
}

impl Tournament {
    /// The key of an index that has none: above all others.
    pub(super) const NONE: u64 = u64::MAX;

    pub(super) fn new(keys: impl Iterator<Item = u64>) -> Self {
        let mut levels = vec![nodes(keys)];
        while let Some(below) = levels.last()
            && below.len() > 1
        {
            levels.push(nodes(below.iter().map(least)));
        }
        Self { levels }
    }

    /// The index of the least key, the lowest of several.
    #[inline]
    pub(super) fn least(&self) -> Option<usize> {
        let least = least(self.levels.last()?.first()?);
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let keys = &level[at].0;
            at = at * WIDTH + (0..WIDTH).rev().fold(0, |child, i| if keys[i] == least { i } else { child });
        }
        (least < Self::NONE).then_some(at)
    }

    #[inline]
    pub(super) fn set(&mut self, index: usize, key: u64) {
        let (mut at, mut key) = (index, key);
        for level in &mut self.levels {
            let node = &mut level[at / WIDTH];
            if std::mem::replace(&mut node.0[at % WIDTH], key) == key {
                return;
            }
            (at, key) = (at / WIDTH, least(node));
        }
    }
}

fn nodes(mut keys: impl Iterator<Item = u64>) -> Vec<Node> {
    let mut nodes = Vec::with_capacity(keys.size_hint().0.div_ceil(WIDTH));
    while let Some(first) = keys.next() {
        let mut node = Node([Tournament::NONE; WIDTH]);
        node.0[0] = first;
        node.0[1..].iter_mut().zip(&mut keys).for_each(|(place, key)| *place = key);
        nodes.push(node);
    }
    nodes
}

/// The least key of a node. Without a branch, since which it is cannot be predicted, and with few steps one after
/// another.
#[inline]
fn least(node: &Node) -> u64 {
    let [a, b, c, d, e, f, g, h] = node.0;
    a.min(b).min(c.min(d)).min(e.min(f).min(g.min(h)))
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
