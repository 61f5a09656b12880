//! A shard: which segments of a micro-batch lie on which rank.

use crate::cost::Mask;
use crate::interrupt::check;

use super::Strategy;

/// A contiguous run of one document on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the document in the micro-batch.
    pub document: u32,
    /// First token, counted inside the document.
    pub start: i32,
    /// Tokens, at least one.
    pub length: i32,
}

impl Segment {
    /// One past the last token, counted inside the document.
    #[inline]
    pub fn end(&self) -> i32 {
        self.start + self.length
    }
}

/// A micro-batch cut for the ranks of a context-parallel group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// How it was cut.
    pub strategy: Strategy,
    /// Which keys a query attends to.
    pub mask: Mask,
    /// Lengths of the documents, in packed order.
    pub lengths: Vec<i32>,
    /// Where each document begins in the packed sequence; one entry more, the total.
    pub document_starts: Vec<i32>,
    /// Segments of each rank, in packed order; no two of a rank touch.
    pub ranks: Vec<Vec<Segment>>,
}

impl Shard {
    /// Number of ranks.
    pub fn cp_size(&self) -> usize {
        self.ranks.len()
    }

    /// Tokens of the micro-batch.
    pub fn num_tokens(&self) -> i32 {
        self.document_starts.last().copied().unwrap_or(0)
    }

    /// Tokens of one rank.
    pub fn tokens(&self, rank: usize) -> i64 {
        self.ranks[rank].iter().map(|segment| i64::from(segment.length)).sum()
    }

    /// (query, key) pairs of one rank. Exact.
    pub fn pairs(&self, rank: usize) -> u64 {
        let of_segment = |segment: &Segment| {
            self.mask.segment_pairs(segment.start, segment.length, self.lengths[segment.document as usize])
        };
        self.ranks[rank].iter().map(of_segment).sum()
    }

    /// First token of a segment in the packed sequence.
    #[inline]
    pub fn packed_start(&self, segment: &Segment) -> i32 {
        self.document_starts[segment.document as usize] + segment.start
    }

    /// A hash of which token lies where; equal on two ranks iff their shards are equal.
    pub fn digest(&self) -> String {
        let mut bytes = Vec::new();
        for &length in &self.lengths {
            bytes.extend_from_slice(&length.to_le_bytes());
        }
        for segments in &self.ranks {
            bytes.extend_from_slice(&(segments.len() as u64).to_le_bytes());
            for segment in segments {
                bytes.extend_from_slice(&segment.document.to_le_bytes());
                bytes.extend_from_slice(&segment.start.to_le_bytes());
                bytes.extend_from_slice(&segment.length.to_le_bytes());
            }
        }
        let causal = [u8::from(self.mask == Mask::Causal)];
        let sizes = [self.lengths.len() as u64, self.ranks.len() as u64].map(u64::to_le_bytes).concat();
        blake3::Hasher::new().update(&causal).update(&sizes).update(&bytes).finalize().to_hex().to_string()
    }
}

/// Where a strategy puts the runs that it cuts: a shard, or the clock that only asks how long one would take.
pub(super) trait Ranks {
    fn cp_size(&self) -> usize;

    /// Gives a run of a document to a rank, after all that the rank already has of earlier tokens. It may be empty.
    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32);
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
}

impl Builder {
    /// The lengths sum to at most int32.
    pub(super) fn new(lengths: &[i32], cp_size: usize) -> Self {
        let mut document_starts = Vec::with_capacity(lengths.len() + 1);
        let mut total = 0;
        document_starts.push(total);
        document_starts.extend(lengths.iter().map(|length| {
            total += length;
            total
        }));
        let share = document_starts[lengths.len()] as usize / cp_size + 1;
        let per_rank = (2 * lengths.len()).min(share).min(1024);
        Self {
            lengths: lengths.to_vec(),
            document_starts,
            ranks: (0..cp_size).map(|_| Vec::with_capacity(per_rank)).collect(),
        }
    }

    pub(super) fn tokens_per_rank(&self) -> Vec<i64> {
        self.ranks.iter().map(|segments| segments.iter().map(|segment| i64::from(segment.length)).sum()).collect()
    }

    /// Brings what was pushed in any order into packed order.
    pub(super) fn sort(&mut self) {
        for segments in &mut self.ranks {
            check();
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
        Shard { strategy, mask, lengths, document_starts, ranks }
    }
}

/// The rank that holds chunk `chunk` of `2*cp`: the head-tail pairing under which a causal document is balanced.
#[inline]
pub(super) fn owner(chunk: usize, cp_size: usize) -> usize {
    chunk.min(2 * cp_size - 1 - chunk)
}
