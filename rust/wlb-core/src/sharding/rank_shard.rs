//! Input of a rank's attention kernel, computed from its segments.

use crate::error::{Error, Result, check_range, saturating_i64};
use crate::limits::MAX_TOKENS;

use super::shard::{Segment, Shard};

/// The arrays of one rank. Segments are in the order of [`Shard::rows`]; segment `i` has the rows
/// `cu_seqlens_q[i]..cu_seqlens_q[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankShard {
    /// Number of tokens of the rank.
    pub num_tokens: usize,
    /// Segments of the rank, in the order of its rows.
    pub segments: Vec<Segment>,
    /// First query of each segment among the rank's tokens, and at the end the number of queries.
    pub cu_seqlens_q: Vec<i32>,
    /// First key of each segment if the keys of all segments are copied one after the other, and at the end their
    /// number.
    pub cu_seqlens_k: Vec<i64>,
    /// First token of each segment's document (of a forest, its node) in the packed sequence. Without a forest it is
    /// the segment's first key: under a causal mask the keys are the document up to the segment's end; under a full
    /// mask, the whole document. [`Shard::intervals`] has the keys in both cases.
    pub k_starts: Vec<i32>,
    /// Position of each segment's first token.
    pub positions: Vec<i32>,
    /// Tokens of the longest segment.
    pub max_seqlen_q: i32,
    /// Keys of the segment with the most keys.
    pub max_seqlen_k: i32,
}

impl Shard {
    /// The arrays of one rank.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank that does not exist, [`Error::TotalTooLong`] when all segments of documents
    /// together have more keys than int32 can count. (Keys that samples of a forest share need not be copied.)
    ///
    /// # Complexity
    /// O(segments of all ranks).
    pub fn rank(&self, rank: usize) -> Result<RankShard> {
        let segments = self.segments(rank)?;
        let mut found = RankShard {
            num_tokens: 0,
            segments: Vec::new(),
            cu_seqlens_q: Vec::with_capacity(segments.len() + 1),
            cu_seqlens_k: Vec::with_capacity(segments.len() + 1),
            k_starts: Vec::with_capacity(segments.len()),
            positions: Vec::with_capacity(segments.len()),
            max_seqlen_q: 0,
            max_seqlen_k: 0,
        };
        let (mut queries, mut keys) = (0_i32, 0_i64);
        found.cu_seqlens_q.push(0);
        found.cu_seqlens_k.push(0);
        for segment in &segments {
            let segment_keys = self.sees(segment);
            queries += segment.length;
            keys += i64::from(segment_keys);
            found.cu_seqlens_q.push(queries);
            found.cu_seqlens_k.push(keys);
            found.k_starts.push(self.document_starts[segment.document as usize]);
            found.positions.push(self.position(segment));
            found.max_seqlen_q = found.max_seqlen_q.max(segment.length);
            found.max_seqlen_k = found.max_seqlen_k.max(segment_keys);
        }
        if keys > MAX_TOKENS && self.forest.is_none() {
            return Err(Error::TotalTooLong { argument: "cu_seqlens_k", total: keys });
        }
        found.num_tokens = queries as usize;
        found.segments = segments;
        Ok(found)
    }

    /// The segments of one rank, in the order of its rows ([`Shard::rows`]).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank that does not exist.
    ///
    /// # Complexity
    /// O(segments of all ranks).
    pub fn segments(&self, rank: usize) -> Result<Vec<Segment>> {
        let last = self.cp_size() as i64 - 1;
        check_range("rank", saturating_i64(rank), 0, last)?;
        Ok(self.rank_rows(rank))
    }

    /// Place of each packed token among the concatenated tokens of all ranks: `rank_major[restore] == packed`.
    ///
    /// # Complexity
    /// O(tokens).
    pub fn restore_indices(&self) -> Vec<i32> {
        let mut restore = vec![0; self.num_tokens() as usize];
        let mut position = 0;
        for segment in self.rows().iter().flatten() {
            let start = self.packed_start(segment) as usize;
            let span = &mut restore[start..start + segment.length as usize];
            span.iter_mut().zip(position..).for_each(|(token, position)| *token = position);
            position += segment.length;
        }
        restore
    }
}

impl RankShard {
    /// Place of each of the rank's tokens in the packed sequence, row by row ([`Shard::rows`]).
    ///
    /// # Complexity
    /// O(tokens of the rank).
    pub fn token_indices(&self) -> Vec<i32> {
        write_out(self.segments.iter().zip(&self.k_starts).map(|(segment, start)| (segment, start + segment.start)))
    }

    /// Position of each of the rank's tokens.
    ///
    /// # Complexity
    /// O(tokens of the rank).
    pub fn position_ids(&self) -> Vec<i32> {
        write_out(self.segments.iter().zip(self.positions.iter().copied()))
    }
}

/// For each segment, consecutive numbers that begin with the number given beside it.
fn write_out<'a>(segments: impl Iterator<Item = (&'a Segment, i32)> + Clone) -> Vec<i32> {
    let mut numbers = Vec::with_capacity(segments.clone().map(|(segment, _)| segment.length as usize).sum());
    for (segment, first) in segments {
        numbers.extend(first..first + segment.length);
    }
    numbers
}
