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
    pub cu_seqlens_k: Vec<i32>,
    /// First key of each segment in the packed sequence. Under a causal mask a segment's keys are its document up to
    /// the segment's end; under a full mask, the whole document.
    pub k_starts: Vec<i32>,
    /// Tokens of the longest segment.
    pub max_seqlen_q: i32,
    /// Keys of the segment with the most keys.
    pub max_seqlen_k: i32,
}

impl Shard {
    /// The arrays of one rank.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a rank that does not exist, [`Error::TotalTooLong`] when all segments together have
    /// more keys than int32 `cu_seqlens_k` can count.
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
            found.cu_seqlens_k.push(keys as i32);
            found.k_starts.push(self.document_starts[segment.document as usize]);
            found.max_seqlen_q = found.max_seqlen_q.max(segment.length);
            found.max_seqlen_k = found.max_seqlen_k.max(segment_keys);
        }
        if keys > MAX_TOKENS {
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

    /// Place of each of the rank's tokens in its document.
    ///
    /// # Complexity
    /// O(tokens of the rank).
    pub fn position_ids(&self) -> Vec<i32> {
        write_out(self.segments.iter().map(|segment| (segment, segment.start)))
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
