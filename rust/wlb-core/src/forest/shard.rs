//! Cuts a micro-batch of a forest for the ranks of a context-parallel group.

use std::cmp::Reverse;

use crate::digest::Digest;
use crate::error::{Error, Result, check_range, saturating_i64};
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};
use crate::sharding::{Cursor, Ranks, Segment, cut_document, deal, fill_room};

use super::tree::PrefixForest;

/// Most pairs of a rank over the mean; within this limit, cuts that move fewer keys are preferred.
const MAX_IMBALANCE: f64 = 1.01;
/// Number of lengths that are tried as the least length that is cut.
const TRIES: usize = 64;

/// The tokens of a forest on each rank, and the keys that each run of them sees.
///
/// Nodes lie in memory depth-first, the longest of siblings first. A query sees all keys of the nodes above its own
/// node, and in its own node the keys up to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForestShard {
    /// The forest, its nodes in the order in which they lie in memory.
    pub forest: PrefixForest,
    /// First token of each node in memory, and at the end the number of unique tokens.
    pub node_starts: Vec<i32>,
    /// Segments of each rank in memory order; a segment's document is a node. No two segments of a rank touch.
    pub ranks: Vec<Vec<Segment>>,
}

/// Keys that are neighbours in memory: the first, and one past the last.
pub type Interval = (i32, i32);

/// Cuts a forest for the ranks of a context-parallel group.
///
/// Long nodes are cut like documents, into `2 * cp_size` chunks, two for each rank with equal pairs; tokens left over
/// go to ranks in turn. Short nodes stay whole on one rank. Several least lengths of cut nodes are tried. Of those with
/// all ranks within 1 % of the mean pairs, the one that moves the fewest keys is chosen; if there is none, the most
/// even one.
///
/// # Arguments
/// * `forest` - the samples of one micro-batch.
/// * `cp_size` - number of ranks of the group.
///
/// # Errors
/// O(m (log m + cp_size)) for `m` nodes, for each of at most 66 attempts.
///
/// # Complexity
/// O(m (log m + cp_size)) for `m` nodes, for each of at most 65 attempts.
///
/// # Example
/// ```
/// use wlb_core::Lengths;
/// use wlb_core::forest::{PrefixForest, shard_forest};
///
/// let forest = PrefixForest::from_prompts(&Lengths::new("prompts", &[8])?, &[2], &[4, 4])?;
/// let shard = shard_forest(&forest, 2)?;
/// assert_eq!((shard.tokens(0), shard.pairs(0), shard.pairs(1)), (8, 60, 60));
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn shard_forest(forest: &PrefixForest, cp_size: usize) -> Result<ForestShard> {
    check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
    let total = forest.unique_tokens();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "forest", total });
    }
    let samples: Vec<u32> = (0..forest.num_samples() as u32).collect();
    let forest = forest.of_samples(&samples, forest.order());
    let mut node_starts = vec![0];
    forest.lengths().iter().for_each(|length| node_starts.push(node_starts[node_starts.len() - 1] + length));
    // Nodes with the deepest ends first, so that nodes that get one token more are alike.
    let mut order: Vec<u32> = (0..forest.num_nodes() as u32).collect();
    order.sort_by_key(|&node| Reverse(forest.node_end(node as usize)));
    let mut lengths = forest.lengths().to_vec();
    lengths.sort_unstable_by_key(|&length| Reverse(length));
    lengths.dedup();
    let step = lengths.len().div_ceil(TRIES).max(1);
    let longest = lengths.first().map_or(1, |&length| i64::from(length) + 1);
    let thresholds = std::iter::once(longest).chain(lengths.iter().step_by(step).map(|&length| i64::from(length)));
    let empty = ForestShard { forest, node_starts, ranks: vec![Vec::new(); cp_size] };
    let mut best: Option<(ForestShard, f64, i64)> = None;
    for threshold in thresholds.chain([1]) {
        let shard = empty.cut(&order, threshold);
        let pairs = || (0..cp_size).map(|rank| shard.pairs(rank));
        let (most, sum) = (pairs().max().unwrap_or(0), pairs().sum::<u64>());
        let imbalance = if sum == 0 { 1.0 } else { most as f64 * cp_size as f64 / sum as f64 };
        let moved: i64 = (0..cp_size).map(|rank| shard.keys_moved(rank)).sum();
        let better = best.as_ref().is_none_or(|&(_, other, fewest)| {
            let both = imbalance.max(other) <= MAX_IMBALANCE;
            if both { moved < fewest } else { imbalance < other }
        });
        if better {
            best = Some((shard, imbalance, moved));
        }
    }
    Ok(best.map_or(empty, |(shard, ..)| shard))
}

/// The nodes that ranks have so far.
struct Given {
    ranks: Vec<Vec<Segment>>,
    tokens: Vec<i64>,
}

impl Ranks for Given {
    fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32) {
        if length > 0 {
            self.tokens[rank] += i64::from(length);
            self.ranks[rank].push(Segment { document: document as u32, start, length });
        }
    }
}

impl ForestShard {
    /// Cuts nodes of at least `threshold` tokens and leaves the others whole.
    fn cut(&self, order: &[u32], threshold: i64) -> Self {
        let cp_size = self.cp_size();
        let mut given = Given { ranks: vec![Vec::new(); cp_size], tokens: vec![0; cp_size] };
        let mut cursor = Cursor::new(cp_size);
        let length = |node: u32| self.forest.lengths()[node as usize];
        let is_long = |node: u32| i64::from(length(node)) >= threshold;
        for &node in order.iter().filter(|&&node| is_long(node)) {
            cut_document(&mut given, node as usize, length(node), cursor.step(length(node)));
        }
        let mut room = Vec::with_capacity(cp_size);
        fill_room(&mut room, &given.tokens, i64::from(self.num_tokens()));
        for &node in order.iter().filter(|&&node| !is_long(node)) {
            deal(&mut room, length(node), |rank, start, taken| given.push(rank, node as usize, start, taken));
        }
        for segments in &mut given.ranks {
            segments.sort_unstable_by_key(|segment| (segment.document, segment.start));
            segments.dedup_by(|later, earlier| {
                let touches = earlier.document == later.document && earlier.end() == later.start;
                if touches {
                    earlier.length += later.length;
                }
                touches
            });
        }
        Self { ranks: given.ranks, ..self.clone() }
    }

    /// Number of ranks.
    pub fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    /// Number of unique tokens.
    pub fn num_tokens(&self) -> i32 {
        self.node_starts[self.node_starts.len() - 1]
    }

    /// Tokens of one rank.
    pub fn tokens(&self, rank: usize) -> i64 {
        self.ranks[rank].iter().map(|segment| i64::from(segment.length)).sum()
    }

    /// Position of a segment's first token: the number of tokens before it on its path.
    pub fn position(&self, segment: &Segment) -> i32 {
        self.forest.starts()[segment.document as usize] + segment.start
    }

    /// Index of a segment's first token in memory.
    pub fn packed_start(&self, segment: &Segment) -> i32 {
        self.node_starts[segment.document as usize] + segment.start
    }

    /// (query, key) pairs of one rank; an exact count.
    pub fn pairs(&self, rank: usize) -> u64 {
        let of = |segment: &Segment| {
            let (before, length) = (self.position(segment) as u64, segment.length as u64);
            length * before + length * (length + 1) / 2
        };
        self.ranks[rank].iter().map(of).sum()
    }

    /// Keys that a rank has to fetch: keys that its queries see and other ranks hold, each counted once. An exact
    /// count.
    ///
    /// # Complexity
    /// O(segments of the rank, and nodes above them).
    pub fn keys_moved(&self, rank: usize) -> i64 {
        // For each node, how many of its keys, from the first on, are seen.
        let mut seen = vec![0; self.forest.num_nodes()];
        for segment in &self.ranks[rank] {
            let node = segment.document as usize;
            seen[node] = segment.end().max(seen[node]);
            let mut above = self.forest.parents()[node];
            while let Ok(node) = usize::try_from(above)
                && seen[node] < self.forest.lengths()[node]
            {
                seen[node] = self.forest.lengths()[node];
                above = self.forest.parents()[node];
            }
        }
        seen.iter().map(|&keys| i64::from(keys)).sum::<i64>() - self.tokens(rank)
    }

    /// Keys that the queries of a segment see, in order of positions: the nodes above in full, and its own node up to
    /// the segment's end (each query sees them up to itself). Intervals that touch in memory are joined.
    ///
    /// # Complexity
    /// O(nodes above).
    pub fn intervals(&self, segment: &Segment) -> Vec<Interval> {
        self.path(segment.document as usize, self.packed_start(segment) + segment.length)
    }

    /// The keys on the path to a node, where the node itself ends at `end` in memory.
    pub(super) fn path(&self, mut node: usize, end: i32) -> Vec<Interval> {
        let mut found = vec![(self.node_starts[node], end)];
        while let Ok(above) = usize::try_from(self.forest.parents()[node]) {
            let (start, end) = (self.node_starts[above], self.node_starts[above + 1]);
            match found.last_mut() {
                Some(last) if last.0 == end => last.0 = start,
                _ => found.push((start, end)),
            }
            node = above;
        }
        found.reverse();
        found
    }

    /// A hash of the place of every token: equal on two ranks if and only if their shards are.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        self.forest.add_to(&mut digest);
        digest.add(&(self.ranks.len() as u64).to_le_bytes());
        for segments in &self.ranks {
            digest.add(&(segments.len() as u64).to_le_bytes());
            for segment in segments {
                digest.add(&segment.document.to_le_bytes());
                digest.add(&segment.start.to_le_bytes());
                digest.add(&segment.length.to_le_bytes());
            }
        }
        digest.finish()
    }
}
