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

    /// Of each rank the keys that an all-gather has to bring: those of segments which see keys of other ranks. Exact.
    ///
    /// Of a document these are the keys up to the end of its last segment that does not find all of its keys on its own
    /// rank, since a segment attends to all of its keys at once; of one that no other rank needs, none.
    ///
    /// # Complexity
    /// O(segments + documents).
    pub fn keys_gathered(&self) -> Vec<i64> {
        let mut needed = vec![0; self.lengths.len()];
        for segments in &self.ranks {
            for of_document in segments.chunk_by(|one, next| one.document == next.document) {
                let document = of_document[0].document as usize;
                let length = self.lengths[document];
                let all: i32 = of_document.iter().map(|segment| segment.length).sum();
                // How many of its tokens lie on this rank up to the end of a segment.
                let mut here = 0;
                for segment in of_document {
                    here += segment.length;
                    let (held, sees) = match self.mask {
                        Mask::Causal => (here, segment.end()),
                        Mask::Full => (all, length),
                    };
                    if held < sees {
                        needed[document] = needed[document].max(sees);
                    }
                }
            }
        }
        let of_segment = |segment: &Segment| {
            let end = segment.end().min(needed[segment.document as usize]);
            i64::from((end - segment.start).max(0))
        };
        self.ranks.iter().map(|segments| segments.iter().map(of_segment).sum()).collect()
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
