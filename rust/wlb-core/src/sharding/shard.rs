//! A shard: the segments of a micro-batch on each rank.

use std::sync::Arc;

use crate::cost::Mask;
use crate::digest::Digest;
use crate::forest::PrefixForest;

use super::options::Strategy;

/// A contiguous run of one document on one rank; in the shard of a forest, of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the document in the micro-batch.
    pub document: u32,
    /// First token, counted inside the document.
    pub start: i32,
    /// Number of tokens, at least one.
    pub length: i32,
}

impl Segment {
    /// End of the segment inside the document (one past the last token).
    #[inline]
    pub fn end(&self) -> i32 {
        self.start + self.length
    }
}

/// A segment; the number of keys of its document that it sees (`sees`); whether the rank holds all keys that its
/// segments of this document see (`here`); and whether it is the first of these segments (`first`).
struct Sight<'a> {
    segment: &'a Segment,
    sees: i32,
    here: bool,
    first: bool,
}

/// For a document: the rank whose segments see the most keys, that number, and the most that any other rank sees.
#[derive(Clone, Copy)]
struct SeenMost {
    rank: usize,
    seen: i32,
    others: i32,
}

impl SeenMost {
    /// Number of the document's keys that ranks other than `rank` see.
    fn but(&self, rank: usize) -> i32 {
        if self.rank == rank { self.others } else { self.seen }
    }
}

/// A micro-batch cut for the ranks of a context-parallel group: documents, or the nodes of a forest, which stand in the
/// place of documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Strategy of the shard.
    pub strategy: Strategy,
    /// The mask: the keys that a query attends to.
    pub mask: Mask,
    /// Lengths of the documents, in packed order.
    pub lengths: Vec<i32>,
    /// First token of each document in the packed sequence, and at the end the number of tokens.
    pub document_starts: Vec<i32>,
    /// Segments of each rank, in packed order; no two segments of a rank touch. The rows of a rank have another order:
    /// [`Shard::rows`].
    pub ranks: Vec<Vec<Segment>>,
    /// The forest, if any: its nodes are the documents, and a query also sees all keys of the nodes above its own.
    pub forest: Option<Arc<PrefixForest>>,
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

    /// (query, key) pairs of one rank; an exact count.
    pub fn pairs(&self, rank: usize) -> u64 {
        let of_segment = |segment: &Segment| {
            self.mask.segment_pairs(self.position(segment), segment.length, self.lengths[segment.document as usize])
        };
        self.ranks[rank].iter().map(of_segment).sum()
    }

    /// Keys that a rank has to fetch: keys that its queries see and that other ranks hold. An exact count.
    ///
    /// # Complexity
    /// O(segments of the rank), of a forest O(nodes).
    pub fn keys_moved(&self, rank: usize) -> i64 {
        if let Some(forest) = &self.forest {
            let seen = self.seen(forest, rank);
            return seen.into_iter().map(i64::from).sum::<i64>() - self.tokens(rank);
        }
        let mut moved = 0;
        // The present document, and how many of its tokens the rank's queries have seen so far.
        let (mut document, mut seen) = (None, 0);
        for segment in &self.ranks[rank] {
            if document != Some(segment.document) {
                (document, seen) = (Some(segment.document), 0);
            }
            let sees = self.sees(segment);
            moved += i64::from(sees - seen - segment.length);
            seen = sees;
        }
        moved
    }

    /// For each rank, the number of its keys that some query of another rank sees: an all-gather has to send them. An
    /// exact count.
    ///
    /// # Complexity
    /// O(segments + documents).
    pub fn keys_gathered(&self) -> Vec<i64> {
        let most = self.seen_most();
        let of_rank = |(rank, segments): (usize, &Vec<Segment>)| {
            let of_segment = |segment: &Segment| {
                let needed = most[segment.document as usize].but(rank);
                i64::from((segment.end().min(needed) - segment.start).max(0))
            };
            segments.iter().map(of_segment).sum()
        };
        self.ranks.iter().enumerate().map(of_rank).collect()
    }

    /// For each document, which ranks see the most of its keys.
    fn seen_most(&self) -> Vec<SeenMost> {
        let mut most = vec![SeenMost { rank: usize::MAX, seen: 0, others: 0 }; self.lengths.len()];
        let mut add = |rank: usize, document: usize, sees: i32| {
            let of_document = &mut most[document];
            if of_document.rank == rank {
                of_document.seen = sees.max(of_document.seen);
            } else if sees > of_document.seen {
                *of_document = SeenMost { rank, seen: sees, others: of_document.seen };
            } else {
                of_document.others = sees.max(of_document.others);
            }
        };
        for (rank, segments) in self.ranks.iter().enumerate() {
            match &self.forest {
                Some(forest) => {
                    self.seen(forest, rank).into_iter().enumerate().for_each(|(node, sees)| add(rank, node, sees))
                }
                None => segments.iter().for_each(|segment| add(rank, segment.document as usize, self.sees(segment))),
            }
        }
        most
    }

    /// The segments of every rank in the order of its rows.
    ///
    /// The rows of a rank are in four groups of documents, in this order:
    ///
    /// 1. The rank holds all keys that it needs for the document, and no other rank needs any of its keys.
    /// 2. It holds all keys that it needs, and some other rank needs some of its keys.
    /// 3. It needs keys of other ranks, and some other rank needs some of its keys.
    /// 4. It needs keys of other ranks, and no other rank needs any of its keys.
    ///
    /// This order makes neighbours of documents that attend alone, and of keys that others need. The segments of a
    /// document stay together. Inside a group documents are in packed order. With [`Strategy::Contiguous`], and of a
    /// forest, all rows are in packed order.
    ///
    /// # Complexity
    /// O(segments + documents).
    pub fn rows(&self) -> Vec<Vec<Segment>> {
        let most = self.seen_most();
        (0..self.cp_size()).map(|rank| self.rows_of(rank, &most)).collect()
    }

    /// [`Shard::rows`] of one rank.
    ///
    /// # Complexity
    /// O(segments of all ranks + documents).
    pub fn rank_rows(&self, rank: usize) -> Vec<Segment> {
        self.rows_of(rank, &self.seen_most())
    }

    fn rows_of(&self, rank: usize, most: &[SeenMost]) -> Vec<Segment> {
        let segments = &self.ranks[rank];
        if self.strategy == Strategy::Contiguous || self.cp_size() == 1 || self.forest.is_some() {
            return segments.clone();
        }
        // If another rank needs any of the rank's keys of a document, it needs a key of the first segment.
        let mut needed = false;
        let mut place = |sight: &Sight<'_>| {
            if sight.first {
                needed = most[sight.segment.document as usize].but(rank) > sight.segment.start;
            }
            match (sight.here, needed) {
                (true, false) => 0,
                (true, true) => 1,
                (false, true) => 2,
                (false, false) => 3,
            }
        };
        let mut placed: Vec<(u8, Segment)> =
            self.sights(segments).map(|sight| (place(&sight), *sight.segment)).collect();
        if !placed.is_sorted_by_key(|(place, _)| *place) {
            placed.sort_by_key(|(place, _)| *place);
        }
        placed.into_iter().map(|(_, segment)| segment).collect()
    }

    /// Tokens of a rank that attends in two calls; 0 for a rank that attends in one. A rank attends in two calls if it
    /// needs keys of other ranks for some documents but not for all, and the other documents are enough for a call of
    /// their own, which runs while the keys arrive.
    ///
    /// # Complexity
    /// O(segments of the rank).
    pub fn tokens_split(&self, rank: usize) -> i64 {
        if self.lacks_keys(rank) && self.has_local_call(rank) { self.tokens(rank) } else { 0 }
    }

    /// Number of keys (own and fetched ones) that a rank copies for the call that needs keys of other ranks. Under a
    /// causal mask a key counts once for each segment that sees it, under a full mask once for each document.
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

    /// Whether the documents for which a rank needs no keys of other ranks get a call of their own.
    fn has_local_call(&self, rank: usize) -> bool {
        let here = self.sights(&self.ranks[rank]).filter(|sight| sight.here);
        let local: i64 = here.map(|sight| i64::from(sight.segment.length)).sum();
        local > 0 && pays_alone(local, self.tokens(rank))
    }

    /// The segments of one rank, each with the keys that it sees.
    fn sights<'a>(&'a self, segments: &'a [Segment]) -> impl Iterator<Item = Sight<'a>> {
        segments.chunk_by(|one, next| one.document == next.document).flat_map(move |of_document| {
            let last = of_document[of_document.len() - 1];
            let all: i32 = of_document.iter().map(|segment| segment.length).sum();
            // The last segment sees the most keys.
            let here = all == self.sees(&last);
            let sight = move |(index, segment)| Sight { segment, sees: self.sees(segment), here, first: index == 0 };
            of_document.iter().enumerate().map(sight)
        })
    }

    /// Position of a segment's first token: the number of tokens before it in its document; of a forest, on its path.
    #[inline]
    pub fn position(&self, segment: &Segment) -> i32 {
        segment.start + self.forest.as_ref().map_or(0, |forest| forest.starts()[segment.document as usize])
    }

    /// Number of keys that a segment sees.
    pub(crate) fn sees(&self, segment: &Segment) -> i32 {
        match self.mask {
            Mask::Causal => self.position(segment) + segment.length,
            Mask::Full => self.lengths[segment.document as usize],
        }
    }

    /// First token of a segment in the packed sequence.
    #[inline]
    pub fn packed_start(&self, segment: &Segment) -> i32 {
        self.document_starts[segment.document as usize] + segment.start
    }

    /// A hash of the places of all tokens: equal on two ranks if and only if their shards are equal.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        let size = |size: usize| (size as u64).to_le_bytes();
        if let Some(forest) = &self.forest {
            forest.add_to(&mut digest);
            digest.add(&size(self.ranks.len()));
        } else {
            digest.add(&[u8::from(self.mask == Mask::Causal)]);
            [self.lengths.len(), self.ranks.len()].iter().for_each(|&count| digest.add(&size(count)));
            self.lengths.iter().for_each(|length| digest.add(&length.to_le_bytes()));
        }
        for segments in &self.ranks {
            digest.add(&size(segments.len()));
            for segment in segments {
                digest.add(&segment.document.to_le_bytes());
                digest.add(&segment.start.to_le_bytes());
                digest.add(&segment.length.to_le_bytes());
            }
        }
        digest.finish()
    }
}

/// Whether it pays to attend to `local` of a rank's `tokens`, which need no keys of other ranks, in a call of their
/// own. That call runs while other ranks' keys arrive, but two calls have to copy queries and put outputs together.
pub(super) fn pays_alone(local: i64, tokens: i64) -> bool {
    8 * local >= tokens
}
