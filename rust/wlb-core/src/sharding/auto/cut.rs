//! The strategy [`Strategy::Auto`](crate::Strategy::Auto) as a whole.

use crate::cost::Mask;
use crate::longest_first::longest_first;

use super::super::builder::Ranks;
use super::super::per_document;
use super::attempts::Attempts;
use super::key::Format;
use super::layer::Layer;
use super::parts::Parts;

/// Lays every document on as few ranks as possible without giving a rank more than `max_imbalance` times the mean
/// pairs. If no share achieves that, the most even layout that was tried is taken; "every document on all ranks" is
/// among them.
pub(in super::super) fn cut(ranks: &mut impl Ranks, lengths: &[i32], mask: Mask, max_imbalance: f64) {
    let cp_size = ranks.cp_size();
    // Indices fit: each document has at least one token, and there are at most 2^31 - 1 tokens.
    let documents: Vec<_> = longest_first(lengths).map(|(length, index)| (length, index as u32)).collect();
    let tokens = documents.iter().map(|&(length, _)| length as u64).sum::<u64>();
    let all_pairs = documents.iter().map(|&(length, _)| mask.pairs(length)).sum::<u64>();
    let parts = Parts::new(&documents, cp_size, mask, max_imbalance, (all_pairs as f64, tokens as f64));
    let enough = (all_pairs as f64 / cp_size as f64 * max_imbalance) as u64;
    let on_all = || {
        let mut on_all = PairsOfRanks { lengths, mask, pairs: vec![0; cp_size] };
        per_document::cut(&mut on_all, lengths);
        on_all.pairs.into_iter().max().unwrap_or(0)
    };
    let format = Format::new(tokens, cp_size);
    let laid = if format.is_small(all_pairs) {
        let layer = Layer::<u64>::new(&documents, mask, format, tokens, cp_size);
        Attempts::new(layer, parts).first_even(max_imbalance, enough, on_all)
    } else {
        let layer = Layer::<u128>::new(&documents, mask, format, tokens, cp_size);
        Attempts::new(layer, parts).first_even(max_imbalance, enough, on_all)
    };
    match laid {
        Some(runs) => runs.give_to(ranks, lengths),
        None => per_document::cut(ranks, lengths),
    }
}

/// Counts the pairs of every rank.
struct PairsOfRanks<'a> {
    lengths: &'a [i32],
    mask: Mask,
    pairs: Vec<u64>,
}

impl Ranks for PairsOfRanks<'_> {
    fn cp_size(&self) -> usize {
        self.pairs.len()
    }

    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32) {
        self.pairs[rank] += self.mask.segment_pairs(start, length, self.lengths[document]);
    }
}
