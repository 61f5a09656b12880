//! The samples of a forest in depth-first order: the load that each shares with the one before it is all that plans
//! need.

use crate::cost::CostModel;
use crate::forest::PrefixForest;

/// Tokens and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub(super) tokens: i64,
    pub(super) cost: f64,
}

impl std::ops::Add for Load {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { tokens: self.tokens + other.tokens, cost: self.cost + other.cost }
    }
}

impl std::ops::Sub for Load {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { tokens: self.tokens - other.tokens, cost: self.cost - other.cost }
    }
}

/// Samples in depth-first order, so that samples that share most are neighbours.
///
/// In this order each sample adds the tokens that it does not share with the one before it. Two samples share the least
/// load that any two neighbours between them share.
pub(super) struct Leaves {
    /// The samples, depth-first.
    pub(super) samples: Vec<u32>,
    /// The tree of each sample.
    pub(super) trees: Vec<u32>,
    /// Load of each sample alone.
    pub(super) whole: Vec<Load>,
    /// Load that each sample shares with the one before it; empty if that is in another tree.
    shared: Vec<Load>,
    /// `least[k][i]`: among `2^k` neighbours from `i` on, the one that shares least with the one before it.
    least: Vec<Vec<u32>>,
}

impl Leaves {
    pub(super) fn new(forest: &PrefixForest, model: &CostModel) -> Self {
        let nodes = forest.num_nodes();
        let mut offsets = vec![0_usize; nodes + 1];
        forest.ends().iter().for_each(|&end| offsets[end as usize + 1] += 1);
        (0..nodes).for_each(|node| offsets[node + 1] += offsets[node]);
        let mut ending = vec![0_u32; forest.num_samples()];
        let mut next = offsets.clone();
        for (sample, &end) in forest.ends().iter().enumerate() {
            ending[next[end as usize]] = sample as u32;
            next[end as usize] += 1;
        }
        let price = |tokens: i32| model.attention_cost(tokens) + model.linear_cost(tokens);
        let mut leaves =
            Self { samples: Vec::new(), trees: Vec::new(), whole: Vec::new(), shared: Vec::new(), least: Vec::new() };
        let (mut tree, mut shared) = (0, 0);
        for &node in forest.order() {
            let node = node as usize;
            if forest.parents()[node] < 0 {
                tree += 1;
            }
            shared = shared.min(forest.starts()[node]);
            let tokens = forest.node_end(node);
            for &sample in &ending[offsets[node]..offsets[node + 1]] {
                leaves.samples.push(sample);
                leaves.trees.push(tree - 1);
                let (whole, common) = (i64::from(tokens), i64::from(shared));
                leaves.whole.push(Load { tokens: whole, cost: price(tokens) + model.document() });
                leaves.shared.push(Load { tokens: common, cost: if shared == 0 { 0.0 } else { price(shared) } });
                shared = tokens;
            }
        }
        leaves.least = leaves.tables();
        leaves
    }

    fn tables(&self) -> Vec<Vec<u32>> {
        let mut tables = vec![(0..self.shared.len() as u32).collect::<Vec<u32>>()];
        let mut width = 1;
        while 2 * width <= self.shared.len() {
            let last = &tables[tables.len() - 1];
            let table = (0..=self.shared.len() - 2 * width).map(|at| self.lesser(last[at], last[at + width])).collect();
            tables.push(table);
            width *= 2;
        }
        tables
    }

    fn lesser(&self, a: u32, b: u32) -> u32 {
        if self.shared[b as usize].tokens < self.shared[a as usize].tokens { b } else { a }
    }

    pub(super) fn len(&self) -> usize {
        self.samples.len()
    }

    /// Load that two samples share; `first` comes before `second`.
    #[inline]
    pub(super) fn shared(&self, first: u32, second: u32) -> Load {
        let (from, to) = (first as usize + 1, second as usize + 1);
        if to - from == 1 {
            return self.shared[from];
        }
        let level = (to - from).ilog2() as usize;
        let table = &self.least[level];
        self.shared[self.lesser(table[from], table[to - (1 << level)]) as usize]
    }

    /// Load that a sample adds to earlier samples, of which `before` is the last.
    #[inline]
    pub(super) fn added(&self, before: Option<u32>, leaf: u32) -> Load {
        let whole = self.whole[leaf as usize];
        before.map_or(whole, |before| whole - self.shared(before, leaf))
    }

    /// Load of several samples together, in their order.
    pub(super) fn together(&self, leaves: impl Iterator<Item = u32>) -> Load {
        let mut before = None;
        leaves.fold(Load::default(), |sum, leaf| sum + self.added(before.replace(leaf), leaf))
    }

    /// Range of samples of each tree.
    pub(super) fn trees(&self) -> Vec<std::ops::Range<u32>> {
        let runs = self.trees.chunk_by(|a, b| a == b).map(<[u32]>::len);
        let mut at = 0;
        let range = |count: usize| {
            at += count as u32;
            at - count as u32..at
        };
        runs.map(range).collect()
    }
}
