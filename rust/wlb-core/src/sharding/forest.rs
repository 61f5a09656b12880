//! Cuts a micro-batch of a forest for the ranks of a context-parallel group.

use std::cmp::Reverse;
use std::sync::Arc;

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, saturating_i64};
use crate::forest::PrefixForest;
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};

use super::builder::{Builder, Ranks};
use super::hybrid::{deal, fill_room};
use super::options::{Strategy, check_imbalance};
use super::per_document::{Cursor, cut_document};
use super::shard::{Segment, Shard};

/// Number of lengths that are tried as the least length that is cut.
const TRIES: usize = 64;

/// Keys that are neighbours in memory: the first, and one past the last.
pub type Interval = (i32, i32);

/// Cuts a forest for the ranks of a context-parallel group.
///
/// Long nodes are cut like documents, into `2 * cp_size` chunks, two for each rank with equal pairs; tokens left over
/// go to ranks in turn. Short nodes stay whole on one rank. Several least lengths of cut nodes are tried. Of those with
/// all ranks within `max_imbalance` times the mean pairs, the one that moves the fewest keys is chosen; if there is
/// none, the most even one.
///
/// # Arguments
/// * `forest` - the samples of one micro-batch.
/// * `cp_size` - number of ranks of the group.
/// * `max_imbalance` - as in [`ShardOptions`](crate::sharding::ShardOptions).
///
/// # Returns
/// A shard whose documents are the nodes of its forest, in the order in which they lie in memory: depth-first, the
/// longest of siblings first.
///
/// # Errors
/// [`Error::OutOfRange`] for `cp_size`, [`Error::Number`] for `max_imbalance`, [`Error::TotalTooLong`] for more unique
/// tokens than int32 can count.
///
/// # Complexity
/// O(m (log m + cp_size)) for `m` nodes, for each of at most 66 attempts.
///
/// # Example
/// ```
/// use wlb_core::Lengths;
/// use wlb_core::forest::PrefixForest;
/// use wlb_core::sharding::shard_forest;
///
/// let forest = PrefixForest::from_prompts(&Lengths::new("prompts", &[8])?, &[2], &[4, 4])?;
/// let shard = shard_forest(&forest, 2, 1.01)?;
/// assert_eq!((shard.tokens(0), shard.pairs(0), shard.pairs(1)), (8, 60, 60));
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn shard_forest(forest: &PrefixForest, cp_size: usize, max_imbalance: f64) -> Result<Shard> {
    check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
    check_imbalance(max_imbalance)?;
    let total = forest.unique_tokens();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "forest", total });
    }
    let samples: Vec<u32> = (0..forest.num_samples() as u32).collect();
    let forest = Arc::new(forest.of_samples(&samples, forest.order()));
    // Nodes with the deepest ends first, so that nodes that get one token more are alike.
    let mut order: Vec<u32> = (0..forest.num_nodes() as u32).collect();
    order.sort_by_key(|&node| Reverse(forest.node_end(node as usize)));
    let mut lengths = forest.lengths().to_vec();
    lengths.sort_unstable_by_key(|&length| Reverse(length));
    lengths.dedup();
    let step = lengths.len().div_ceil(TRIES).max(1);
    let longest = lengths.first().map_or(1, |&length| i64::from(length) + 1);
    let thresholds = std::iter::once(longest).chain(lengths.iter().step_by(step).map(|&length| i64::from(length)));
    let mut best: Option<(Shard, f64, i64)> = None;
    for threshold in thresholds.chain([1]) {
        let shard = cut(&forest, cp_size, &order, threshold);
        let pairs = || (0..cp_size).map(|rank| shard.pairs(rank));
        let (most, sum) = (pairs().max().unwrap_or(0), pairs().sum::<u64>());
        let imbalance = if sum == 0 { 1.0 } else { most as f64 * cp_size as f64 / sum as f64 };
        let moved: i64 = (0..cp_size).map(|rank| shard.keys_moved(rank)).sum();
        let better = best.as_ref().is_none_or(|&(_, other, fewest)| {
            let both = imbalance.max(other) <= max_imbalance;
            if both { moved < fewest } else { imbalance < other }
        });
        if better {
            best = Some((shard, imbalance, moved));
        }
    }
    Ok(best.map_or_else(|| cut(&forest, cp_size, &order, 1), |(shard, ..)| shard))
}

/// Cuts nodes of at least `threshold` tokens and leaves the others whole.
fn cut(forest: &Arc<PrefixForest>, cp_size: usize, order: &[u32], threshold: i64) -> Shard {
    let mut builder = Builder::empty(forest.lengths(), cp_size);
    let mut cursor = Cursor::new(cp_size);
    let length = |node: u32| forest.lengths()[node as usize];
    let is_long = |node: u32| i64::from(length(node)) >= threshold;
    for &node in order.iter().filter(|&&node| is_long(node)) {
        cut_document(&mut builder, node as usize, length(node), cursor.step(length(node)));
    }
    let mut room = Vec::with_capacity(cp_size);
    fill_room(&mut room, &builder.tokens_per_rank(), forest.unique_tokens());
    for &node in order.iter().filter(|&&node| !is_long(node)) {
        deal(&mut room, length(node), |rank, start, taken| builder.push(rank, node as usize, start, taken));
    }
    builder.sort();
    Shard { forest: Some(forest.clone()), ..builder.finish(Strategy::Auto, Mask::Causal) }
}

impl Shard {
    /// For each node of the forest, how many of its keys, from the first on, a rank's queries see.
    ///
    /// # Complexity
    /// O(nodes + segments of the rank).
    pub(super) fn seen(&self, forest: &PrefixForest, rank: usize) -> Vec<i32> {
        let mut seen = vec![0; forest.num_nodes()];
        for segment in &self.ranks[rank] {
            let node = segment.document as usize;
            seen[node] = segment.end().max(seen[node]);
            let mut above = forest.parents()[node];
            while let Ok(node) = usize::try_from(above)
                && seen[node] < forest.lengths()[node]
            {
                seen[node] = forest.lengths()[node];
                above = forest.parents()[node];
            }
        }
        seen
    }

    /// Keys that a segment sees, as intervals of the packed sequence, in order of positions: the nodes above in full,
    /// and its own document or node up to the segment's end. Each query before the last one sees one key less; under a
    /// full mask all queries see the whole document. Intervals that touch are joined, so documents have one.
    ///
    /// # Complexity
    /// O(nodes above).
    pub fn intervals(&self, segment: &Segment) -> Vec<Interval> {
        let document = segment.document as usize;
        match &self.forest {
            Some(forest) => self.path(forest, document, self.packed_start(segment) + segment.length),
            None => vec![(self.document_starts[document], self.document_starts[document] + self.sees(segment))],
        }
    }

    /// The keys on the path to a node, where the node itself ends at `end` in memory.
    pub(super) fn path(&self, forest: &PrefixForest, mut node: usize, end: i32) -> Vec<Interval> {
        let mut found = vec![(self.document_starts[node], end)];
        while let Ok(above) = usize::try_from(forest.parents()[node]) {
            let (start, end) = (self.document_starts[above], self.document_starts[above + 1]);
            match found.last_mut() {
                Some(last) if last.0 == end => last.0 = start,
                _ => found.push((start, end)),
            }
            node = above;
        }
        found.reverse();
        found
    }
}
