//! Lower bound on the step of any plan of a forest.

use super::bins::Limits;
use super::leaves::{Leaves, Load};

/// Least cost and tokens of all samples in any plan: each node once, and nodes that the limits force to be computed
/// twice.
///
/// A tree with more tokens than a micro-batch holds is in several. Each of them has the tokens `r` that all samples of
/// the tree share, so `k` micro-batches hold at most `k * (max_tokens - r) + r` of the tree's tokens.
///
/// # Complexity
/// O(n).
pub(super) fn whole(leaves: &Leaves, limits: Limits) -> Load {
    let of_tree = |tree: std::ops::Range<u32>| {
        let all = leaves.together(tree.clone());
        let documents = tree.len();
        if documents == 1 {
            return all;
        }
        let root = leaves.shared(tree.start, tree.end - 1);
        let by_tokens = match limits.tokens - root.tokens {
            room @ 1.. => ((all.tokens - root.tokens) as u64).div_ceil(room as u64),
            _ => 1,
        };
        let more = by_tokens.max(documents.div_ceil(limits.documents) as u64).max(1) - 1;
        all + Load { tokens: root.tokens * more as i64, cost: root.cost * more as f64 }
    };
    leaves.trees().into_iter().map(of_tree).fold(Load::default(), |sum, load| sum + load)
}
