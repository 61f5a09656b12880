//! A shard: which segments of a micro-batch lie on which rank.

use crate::cost::Mask;
use crate::digest::Digest;

use super::options::Strategy;

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

/// A segment, how many keys it sees of its document, whether all of them lie on its rank, and whether it is the first
/// of the document there.
struct Sight<'a> {
    segment: &'a Segment,
    sees: i32,
    here: bool,
    first: bool,
}

/// A micro-batch cut for the ranks of a context-parallel group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Strategy of the shard.
    pub strategy: Strategy,
    /// The mask: the keys that a query attends to.
    pub mask: Mask,
    /// Lengths of the documents, in packed order.
    pub lengths: Vec<i32>,
    /// First token of each document in the packed sequence, and the total at the end.
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

    /// Keys that a rank has to fetch: those that its queries see and other ranks hold. Exact.
    ///
    /// # Complexity
    /// O(segments of the rank).
    pub fn keys_moved(&self, rank: usize) -> i64 {
        let mut moved = 0;
        // The document at hand, and how many of its tokens the rank's queries have seen so far.
        let (mut document, mut seen) = (None, 0);
        for segment in &self.ranks[rank] {
            if document != Some(segment.document) {
                (document, seen) = (Some(segment.document), 0);
            }
            let sees = match self.mask {
                Mask::Causal => segment.end(),
                Mask::Full => self.lengths[segment.document as usize],
            };
            moved += i64::from(sees - seen - segment.length);
            seen = sees;
        }
        moved
    }

    /// Of each rank the keys that an all-gather has to bring: those that some query of another rank sees. Exact.
    ///
    /// # Complexity
    /// O(segments + documents).
    pub fn keys_gathered(&self) -> Vec<i64> {
        // Of each document the rank that sees the most of its keys, how many, and the most that another sees.
        let mut most = vec![(usize::MAX, 0, 0); self.lengths.len()];
        for (rank, segments) in self.ranks.iter().enumerate() {
            for segment in segments {
                let sees = match self.mask {
                    Mask::Causal => segment.end(),
                    Mask::Full => self.lengths[segment.document as usize],
                };
                let (first, seen, others) = &mut most[segment.document as usize];
                if *first == rank {
                    *seen = sees.max(*seen);
                } else if sees > *seen {
                    (*first, *seen, *others) = (rank, sees, *seen);
                } else {
                    *others = sees.max(*others);
                }
            }
        }
        let of_rank = |(rank, segments): (usize, &Vec<Segment>)| {
            let of_segment = |segment: &Segment| {
                let (first, seen, others) = most[segment.document as usize];
                let needed = if first == rank { others } else { seen };
                i64::from((segment.end().min(needed) - segment.start).max(0))
            };
            segments.iter().map(of_segment).sum()
        };
        self.ranks.iter().enumerate().map(of_rank).collect()
    }

    /// Tokens of a rank that attends to its own keys while others' arrive: all, if some of its segments find their keys
    /// there, enough for a call of their own, and some do not; else none, since one call does it. Exact.
    ///
    /// # Complexity
    /// O(segments of the rank).
    pub fn tokens_split(&self, rank: usize) -> i64 {
        if self.lacks_keys(rank) && self.has_local_call(rank) { self.tokens(rank) } else { 0 }
    }

    /// Keys that a rank picks, its own and those that arrive, for segments that do not find theirs in place: all that a
    /// segment sees; one that several segments see as often, but once where all of a document's segments see all of
    /// its keys. Exact.
    ///
    /// # Complexity
    /// O(segments of the rank).
    pub fn keys_picked(&self, rank: usize) -> i64 {
        if !self.lacks_keys(rank) {
            return 0;
        }
        let apart = self.has_local_call(rank);
        let once = |sight: &Sight<'_>| self.mask == Mask::Causal || sight.first;
        self.sights(&self.ranks[rank])
            .filter(|sight| !(sight.here && apart) && once(sight))
            .map(|sight| i64::from(sight.sees))
            .sum()
    }

    fn lacks_keys(&self, rank: usize) -> bool {
        self.sights(&self.ranks[rank]).any(|sight| !sight.here)
    }

    /// Whether the segments that find all of their keys on their rank have a call of their own.
    fn has_local_call(&self, rank: usize) -> bool {
        let here = self.sights(&self.ranks[rank]).filter(|sight| sight.here);
        let local: i64 = here.map(|sight| i64::from(sight.segment.length)).sum();
        local > 0 && pays_alone(local, self.tokens(rank))
    }

    /// Keys that the segments of one rank see.
    fn sights<'a>(&'a self, segments: &'a [Segment]) -> impl Iterator<Item = Sight<'a>> {
        segments.chunk_by(|one, next| one.document == next.document).flat_map(move |of_document| {
            let length = self.lengths[of_document[0].document as usize];
            let all: i32 = of_document.iter().map(|segment| segment.length).sum();
            // How many tokens of the document lie on this rank up to the end of a segment.
            of_document.iter().enumerate().scan(0, move |held, (index, segment)| {
                *held += segment.length;
                let (held, sees) = match self.mask {
                    Mask::Causal => (*held, segment.end()),
                    Mask::Full => (all, length),
                };
                Some(Sight { segment, sees, here: held == sees, first: index == 0 })
            })
        })
    }

    /// First token of a segment in the packed sequence.
    #[inline]
    pub fn packed_start(&self, segment: &Segment) -> i32 {
        self.document_starts[segment.document as usize] + segment.start
    }

    /// A hash of which token lies where; equal on two ranks iff their shards are equal.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        digest.add(&[u8::from(self.mask == Mask::Causal)]);
        [self.lengths.len(), self.ranks.len()].iter().for_each(|&size| digest.add(&(size as u64).to_le_bytes()));
        for &length in &self.lengths {
            digest.add(&length.to_le_bytes());
        }
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

/// Whether `local` of a rank's `tokens`, whose keys are all there, get a call of attention of their own, while other
/// ranks' keys arrive: two calls pick their queries and put their outputs together, one call does not.
pub(super) fn pays_alone(local: i64, tokens: i64) -> bool {
    8 * local >= tokens
}
