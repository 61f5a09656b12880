//! Finds the lightest of many blocks that has enough room, while weights and rooms change.

use std::cmp::Ordering;

const NONE: u32 = u32::MAX;

/// A search tree by weight, equal weights by index; each node knows the most room below it. It is a treap (Seidel and
/// Aragon, 1996) whose priorities are a hash of the index.
///
/// # Complexity
/// For every query and change, a logarithm of the number of blocks (expected).
pub(super) struct ByRoom {
    nodes: Vec<Node>,
    root: u32,
}

#[derive(Clone, Copy)]
struct Node {
    weight: f64,
    room: i64,
    /// Most room of all blocks in the subtree.
    most: i64,
    priority: u32,
    lighter: u32,
    heavier: u32,
}

impl ByRoom {
    /// A tree of blocks with these weights and rooms.
    pub(super) fn new(blocks: impl Iterator<Item = (f64, i64)>) -> Self {
        let node = |(index, (weight, room)): (usize, (f64, i64))| {
            let (lighter, heavier) = (NONE, NONE);
            Node { weight, room, most: room, priority: priority(index as u32), lighter, heavier }
        };
        let nodes: Vec<Node> = blocks.enumerate().map(node).collect();
        let mut tree = Self { root: NONE, nodes };
        for index in 0..tree.nodes.len() as u32 {
            tree.root = tree.inserted(tree.root, index);
        }
        tree
    }

    /// The lightest block with this much room; if `behind` is given, the lightest after that block in the order of the
    /// tree.
    pub(super) fn next(&self, behind: Option<usize>, room: i64) -> Option<usize> {
        let (mut at, mut above) = (self.root, None);
        // Goes down to `behind`, and notes the last node from which the way leads to lighter blocks.
        if let Some(index) = behind {
            while at != NONE {
                let node = &self.nodes[at as usize];
                if self.order(index as u32, at) == Ordering::Less {
                    above = if node.room >= room || self.has(node.heavier, room) { Some(at) } else { above };
                    at = node.lighter;
                } else {
                    at = node.heavier;
                }
            }
            let above = above?;
            if self.nodes[above as usize].room >= room {
                return Some(above as usize);
            }
            at = self.nodes[above as usize].heavier;
        }
        loop {
            let node = self.nodes.get(at as usize).filter(|node| node.most >= room)?;
            if self.has(node.lighter, room) {
                at = node.lighter;
            } else if node.room >= room {
                return Some(at as usize);
            } else {
                at = node.heavier;
            }
        }
    }

    /// Weight of a block.
    pub(super) fn weight(&self, index: usize) -> f64 {
        self.nodes[index].weight
    }

    /// Sets the weight and the room of a block.
    pub(super) fn set(&mut self, index: usize, weight: f64, room: i64) {
        let index = index as u32;
        self.root = self.removed(self.root, index);
        let node = &mut self.nodes[index as usize];
        (node.weight, node.room, node.most) = (weight, room, room);
        (node.lighter, node.heavier) = (NONE, NONE);
        self.root = self.inserted(self.root, index);
    }

    fn order(&self, a: u32, b: u32) -> Ordering {
        let [weight_a, weight_b] = [a, b].map(|index| self.nodes[index as usize].weight);
        weight_a.total_cmp(&weight_b).then(a.cmp(&b))
    }

    /// Whether a subtree has a block with this much room.
    fn has(&self, at: u32, room: i64) -> bool {
        self.nodes.get(at as usize).is_some_and(|node| node.most >= room)
    }

    fn most(&self, at: u32) -> i64 {
        self.nodes.get(at as usize).map_or(i64::MIN, |node| node.most)
    }

    /// The subtree with its child on one side replaced.
    fn with(&mut self, at: u32, side: Ordering, child: u32) -> u32 {
        let node = &mut self.nodes[at as usize];
        if side == Ordering::Less {
            node.lighter = child;
        } else {
            node.heavier = child;
        }
        let Node { room, lighter, heavier, .. } = *node;
        self.nodes[at as usize].most = room.max(self.most(lighter)).max(self.most(heavier));
        at
    }

    fn inserted(&mut self, at: u32, index: u32) -> u32 {
        if at == NONE {
            return index;
        }
        let node = self.nodes[at as usize];
        if self.nodes[index as usize].priority > node.priority {
            let (lighter, heavier) = self.split(at, index);
            self.with(index, Ordering::Less, lighter);
            return self.with(index, Ordering::Greater, heavier);
        }
        let side = self.order(index, at);
        let child = self.inserted(if side == Ordering::Less { node.lighter } else { node.heavier }, index);
        self.with(at, side, child)
    }

    fn removed(&mut self, at: u32, index: u32) -> u32 {
        let node = self.nodes[at as usize];
        if at == index {
            return self.joined(node.lighter, node.heavier);
        }
        let side = self.order(index, at);
        let child = self.removed(if side == Ordering::Less { node.lighter } else { node.heavier }, index);
        self.with(at, side, child)
    }

    /// Splits a subtree at a block that is not in it: into the blocks before it and the blocks after it.
    fn split(&mut self, at: u32, index: u32) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        let node = self.nodes[at as usize];
        if self.order(index, at) == Ordering::Less {
            let (before, others) = self.split(node.lighter, index);
            (before, self.with(at, Ordering::Less, others))
        } else {
            let (before, others) = self.split(node.heavier, index);
            (self.with(at, Ordering::Greater, before), others)
        }
    }

    /// Joins two subtrees; all blocks of `a` must be before those of `b`.
    fn joined(&mut self, a: u32, b: u32) -> u32 {
        match [a, b].map(|at| self.nodes.get(at as usize).copied()) {
            [None, _] => b,
            [_, None] => a,
            [Some(left), Some(right)] => {
                if left.priority > right.priority {
                    let heavier = self.joined(left.heavier, b);
                    self.with(a, Ordering::Greater, heavier)
                } else {
                    let lighter = self.joined(a, right.lighter);
                    self.with(b, Ordering::Less, lighter)
                }
            }
        }
    }
}

/// Pseudo-random priority of an index, equal on every machine (the finalizer of MurmurHash3).
fn priority(index: u32) -> u32 {
    let mixed = (index.wrapping_add(1) ^ (index >> 16)).wrapping_mul(0x85eb_ca6b);
    let mixed = (mixed ^ (mixed >> 13)).wrapping_mul(0xc2b2_ae35);
    mixed ^ (mixed >> 16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{ByRoom, NONE};

    /// Number of nodes on the longest way down.
    fn depth(tree: &ByRoom, at: u32) -> usize {
        if at == NONE {
            return 0;
        }
        let node = &tree.nodes[at as usize];
        1 + depth(tree, node.lighter).max(depth(tree, node.heavier))
    }

    proptest! {
        #[test]
        fn the_lightest_with_room_are_found_in_order(
            mut blocks in proptest::collection::vec((0_u8..9, 0_i64..9), 1..40),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0_u8..9, 0_i64..9, prop_oneof![0_i64..10, Just(i64::MIN)]), 0..60),
        ) {
            let mut tree = ByRoom::new(blocks.iter().map(|&(weight, room)| (f64::from(weight), room)));
            for (index, weight, room, asked) in changes {
                let index = index.index(blocks.len());
                blocks[index] = (weight, room);
                tree.set(index, f64::from(weight), room);
                let mut expected: Vec<usize> = (0..blocks.len()).filter(|&at| blocks[at].1 >= asked).collect();
                expected.sort_by_key(|&at| blocks[at].0);
                let first = tree.next(None, asked);
                let found: Vec<usize> = std::iter::successors(first, |&at| tree.next(Some(at), asked)).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }

    /// With rising, falling or equal weights, no way down is much longer than the logarithm.
    #[test]
    fn no_order_makes_it_deep() {
        let all = 1 << 14;
        for weight in [|at: usize| at as f64, |at: usize| -(at as f64), |_: usize| 0.0] {
            let mut tree = ByRoom::new((0..all).map(|at| (weight(at), 1)));
            for at in 0..all {
                tree.set(at, 1e6 + weight(at), 1);
            }
            assert!(depth(&tree, tree.root) < 4 * 14);
        }
    }
}
