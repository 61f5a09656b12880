//! Receivers of the runs that a strategy cuts.

use crate::cost::Mask;

use super::options::Strategy;
use super::shard::{Segment, Shard};

/// A receiver of runs: a shard, or a clock that only computes the time of one.
pub(super) trait Ranks {
    fn cp_size(&self) -> usize;

    /// Gives a run of a document to a rank. The rank has its runs of earlier tokens already. The run may be empty.
    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32);

    /// Announces the greatest number of runs that each rank will get, if it is known.
    fn expect(&mut self, _runs: &[usize]) {}
}

/// Fills a shard segment by segment.
pub(super) struct Builder {
    lengths: Vec<i32>,
    document_starts: Vec<i32>,
    ranks: Vec<Vec<Segment>>,
}

impl Ranks for Builder {
    fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    #[inline]
    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32) {
        if length == 0 {
            return;
        }
        let segment = Segment { document: document as u32, start, length };
        let segments = &mut self.ranks[rank];
        match segments.last_mut() {
            Some(last) if last.document == segment.document && last.end() == start => last.length += length,
            _ => segments.push(segment),
        }
    }

    fn expect(&mut self, runs: &[usize]) {
        self.ranks.iter_mut().zip(runs).for_each(|(segments, &runs)| segments.reserve_exact(runs));
    }
}

impl Builder {
    /// An empty shard; the lengths must sum to at most int32.
    pub(super) fn new(lengths: &[i32], cp_size: usize) -> Self {
        let mut builder = Self::empty(lengths, cp_size);
        let share = builder.document_starts[lengths.len()] as usize / cp_size + 1;
        let per_rank = (2 * lengths.len()).min(share).min(1024);
        builder.ranks.iter_mut().for_each(|segments| segments.reserve_exact(per_rank));
        builder
    }

    /// An empty shard for a strategy that announces its runs.
    pub(super) fn empty(lengths: &[i32], cp_size: usize) -> Self {
        let mut document_starts = Vec::with_capacity(lengths.len() + 1);
        let mut total = 0;
        document_starts.push(total);
        document_starts.extend(lengths.iter().map(|length| {
            total += length;
            total
        }));
        Self { lengths: lengths.to_vec(), document_starts, ranks: vec![Vec::new(); cp_size] }
    }

    pub(super) fn tokens_per_rank(&self) -> Vec<i64> {
        self.ranks.iter().map(|segments| segments.iter().map(|segment| i64::from(segment.length)).sum()).collect()
    }

    /// Sorts segments that were pushed in any order into packed order.
    pub(super) fn sort(&mut self) {
        for segments in &mut self.ranks {
            segments.sort_unstable_by_key(|segment| (segment.document, segment.start));
            segments.dedup_by(|later, earlier| {
                let touches = earlier.document == later.document && earlier.end() == later.start;
                if touches {
                    earlier.length += later.length;
                }
                touches
            });
        }
    }

    pub(super) fn finish(self, strategy: Strategy, mask: Mask) -> Shard {
        let Self { lengths, document_starts, ranks } = self;
        Shard { strategy, mask, lengths, document_starts, ranks, forest: None }
    }
}

/// The rank that holds chunk `chunk` of `2*cp`: first with last, second with last but one, and so on. This pairing
/// gives all ranks of a causal document equal pairs.
#[inline]
pub(super) fn owner(chunk: usize, cp_size: usize) -> usize {
    chunk.min(2 * cp_size - 1 - chunk)
}
