//! The lightest of many micro-batches, while they grow.

/// A complete binary tree whose every node holds the least `(weight, index)` below it.
///
/// Weight and index share one integer, so that a comparison breaks ties towards the lowest index without a branch.
/// It halves a binary heap's time at 64 leaves: a replay reads one sibling a level, at addresses known from the start.
pub(super) struct Tournament {
    /// Node 1 is the root, node `i` has children `2i` and `2i + 1`; leaves are the second half.
    nodes: Vec<u128>,
    leaves: usize,
}

impl Tournament {
    /// A tree over `weights`; at least one.
    pub(super) fn new(weights: impl ExactSizeIterator<Item = u64>) -> Self {
        let leaves = weights.len().next_power_of_two();
        let mut nodes = vec![u128::MAX; 2 * leaves];
        for (index, weight) in weights.enumerate() {
            nodes[leaves + index] = key(weight, index);
        }
        for node in (1..leaves).rev() {
            nodes[node] = nodes[2 * node].min(nodes[2 * node + 1]);
        }
        Self { nodes, leaves }
    }

    /// Index of the least weight; the lowest index of several.
    #[inline]
    pub(super) fn lightest(&self) -> usize {
        self.nodes[1] as u32 as usize
    }

    /// Sets the weight of one leaf. O(log n).
    #[inline]
    pub(super) fn set(&mut self, index: usize, weight: u64) {
        let mut node = self.leaves + index;
        let mut winner = key(weight, index);
        self.nodes[node] = winner;
        while node > 1 {
            winner = winner.min(self.nodes[node ^ 1]);
            node /= 2;
            self.nodes[node] = winner;
        }
    }
}

#[inline]
fn key(weight: u64, index: usize) -> u128 {
    u128::from(weight) << 32 | index as u128
}

/// Orders non-negative floats as integers.
#[inline]
pub(super) fn ordered(cost: f64) -> u64 {
    cost.to_bits()
}
