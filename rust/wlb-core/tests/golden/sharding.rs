//! `shard.json`: what every rank holds, by every strategy that needs no kernel.

use serde::{Deserialize, Serialize};
use wlb_core::sharding::{Segment, Shard};
use wlb_core::{Mask, ShardOptions, Strategy, shard};

use super::cost::mask;
use super::file::{Case, hold};
use crate::common::auto;
use crate::common::naive;
use crate::common::strategies::checked;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ShardCase {
    lengths: Vec<i32>,
    cp_size: usize,
    causal: bool,
    strategy: Strategy,
    #[serde(skip_serializing_if = "Option::is_none")]
    hybrid_threshold: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_imbalance: Option<f64>,
    #[serde(default)]
    ranks: Vec<Rank>,
}

/// A `wlb.RankShard`.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Rank {
    num_tokens: usize,
    num_segments: usize,
    token_indices: Vec<i32>,
    position_ids: Vec<i32>,
    cu_seqlens_q: Vec<i32>,
    cu_seqlens_k: Vec<i32>,
    max_seqlen_q: i32,
    max_seqlen_k: i32,
    k_starts: Vec<i32>,
    documents: Vec<u32>,
    pairs: u64,
}

impl Rank {
    /// Token by token.
    fn of_oracle(lengths: &[i32], segments: &[Segment], pairs: u64, mask: Mask) -> Self {
        let start = |document: usize| lengths[..document].iter().sum::<i32>();
        let tokens: Vec<(usize, i32)> = segments
            .iter()
            .flat_map(|segment| {
                let held = segment.start..segment.start + segment.length;
                held.map(move |position| (segment.document as usize, position))
            })
            .collect();
        let queries: Vec<i32> = segments.iter().map(|segment| segment.length).collect();
        let keys: Vec<i32> = segments
            .iter()
            .map(|segment| match mask {
                Mask::Causal => segment.start + segment.length,
                Mask::Full => lengths[segment.document as usize],
            })
            .collect();
        let cumulative = |lengths: &[i32]| (0..=lengths.len()).map(|i| lengths[..i].iter().sum()).collect();
        let longest = |lengths: &[i32]| lengths.iter().copied().max().unwrap_or(0);
        Self {
            num_tokens: tokens.len(),
            num_segments: segments.len(),
            token_indices: tokens.iter().map(|&(document, position)| start(document) + position).collect(),
            position_ids: tokens.iter().map(|&(_, position)| position).collect(),
            cu_seqlens_q: cumulative(&queries),
            cu_seqlens_k: cumulative(&keys),
            max_seqlen_q: longest(&queries),
            max_seqlen_k: longest(&keys),
            k_starts: segments.iter().map(|segment| start(segment.document as usize)).collect(),
            documents: segments.iter().map(|segment| segment.document).collect(),
            pairs,
        }
    }

    fn of_engine(shard: &Shard, rank: usize) -> Self {
        let (held, segments) = (shard.rank(rank).unwrap(), shard.segments(rank).unwrap());
        Self {
            num_tokens: held.num_tokens,
            num_segments: segments.len(),
            token_indices: held.token_indices(),
            position_ids: held.position_ids(),
            cu_seqlens_q: held.cu_seqlens_q,
            cu_seqlens_k: held.cu_seqlens_k.into_iter().map(|keys| keys as i32).collect(),
            max_seqlen_q: held.max_seqlen_q,
            max_seqlen_k: held.max_seqlen_k,
            k_starts: held.k_starts,
            documents: segments.iter().map(|segment| segment.document).collect(),
            pairs: shard.pairs(rank),
        }
    }
}

impl Case for ShardCase {
    fn answered(self) -> Self {
        let (lengths, cp_size, mask) = (&self.lengths, self.cp_size, mask(self.causal));
        let owners = match self.strategy {
            Strategy::PerSequence => naive::per_sequence(lengths, cp_size),
            Strategy::Contiguous => naive::contiguous(lengths, cp_size),
            Strategy::PerDocument => naive::per_document(lengths, cp_size, 1),
            Strategy::Hybrid => naive::hybrid(lengths, cp_size, self.hybrid_threshold.unwrap()),
            Strategy::Auto => auto::auto(lengths, cp_size, mask, self.max_imbalance.unwrap_or(1.01)),
            Strategy::Adaptive => panic!("kernel.json has what is chosen by a kernel"),
        };
        let in_packed_order = self.strategy == Strategy::Contiguous || cp_size == 1;
        let segments = |rank: usize| {
            if in_packed_order {
                naive::segments(&owners, cp_size).swap_remove(rank)
            } else {
                naive::rows(&owners, cp_size, mask, rank)
            }
        };
        let pairs = auto::pairs(lengths, &owners, cp_size, mask);
        let rank = |rank: usize| Rank::of_oracle(lengths, &segments(rank), pairs[rank], mask);
        Self { ranks: (0..cp_size).map(rank).collect(), ..self }
    }

    fn check_engine(&self) {
        let options = ShardOptions {
            cp_size: self.cp_size,
            strategy: self.strategy,
            mask: mask(self.causal),
            hybrid_threshold: self.hybrid_threshold,
            max_imbalance: self.max_imbalance.unwrap_or(1.01),
        };
        let shard = shard(&checked(&self.lengths), &options).unwrap();
        let ranks: Vec<Rank> = (0..shard.cp_size()).map(|rank| Rank::of_engine(&shard, rank)).collect();
        assert_eq!(ranks, self.ranks);
    }
}

#[test]
fn shards() {
    hold::<ShardCase>("shard.json");
}
