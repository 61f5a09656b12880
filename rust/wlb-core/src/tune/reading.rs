//! Reads the sample into a packer as training does: no more than the packer admits, and no nearly empty steps.
//!
//! The loaders of the Python package follow the same rules (`wlb.filling`), and tests compare both: tuning sees the
//! steps of a run.

use crate::error::Result;
use crate::packing::plan::Packing;
use crate::stream::{Packer, PackerConfig, Push};

use super::sample::{Pieces, Sample, table};

/// Result of one run of a packer over the sample.
pub(super) struct Run {
    /// The packer at the end, with nothing waiting; it holds the metrics.
    pub(super) packer: Packer,
    /// Sum of the steps' heaviest micro-batches over the sum of their means, without the steps flushed at the end; 1
    /// without a step.
    pub(super) lost_time: f64,
}

/// The sample, and the rules by which it is read.
pub(super) struct Reading {
    pieces: Pieces,
    /// For each piece, the tokens of all pieces up to its end.
    ends: Vec<i64>,
    tokens_per_batch: i64,
    /// Least tokens of a step.
    least: i64,
    /// Most tokens of a piece.
    longest: i64,
    /// Most iterations by which a document may come before its turn.
    max_early: i64,
}

/// Position in the sample.
#[derive(Default)]
struct Place {
    /// Number of pieces that have had their turn.
    read: usize,
    /// Later pieces that have entered before their turn, ascending.
    taken: Vec<usize>,
}

/// Pieces that could enter next.
struct Offer {
    /// Pieces whose turn is now, then pieces that come before their turn.
    pieces: Vec<usize>,
    /// Number of pieces whose turn is now.
    due: usize,
    /// For each piece, the iterations by which it comes before its turn.
    early: Vec<i64>,
    /// Number of pieces that have had their turn once all pieces whose turn is now are in.
    end: usize,
    /// Whether the sample has no pieces beyond these.
    last: bool,
}

impl Reading {
    /// Documents in order; documents longer than the packer allows are cut.
    pub(super) fn new(sample: Sample<'_>, config: &PackerConfig, max_early: i64) -> Result<Self> {
        let tokens_per_batch = config.tokens_per_batch();
        let pieces = sample.pieces(config)?;
        let ends = pieces.lengths.iter().scan(0, |end, &length| {
            *end += i64::from(length);
            Some(*end)
        });
        let ends = ends.collect();
        // A third of a step's tokens can always be packed.
        let most = config.num_micro_batches as i64 * i64::from(config.max_tokens) / 3;
        let least = (tokens_per_batch / 10).max(1).min(most.max(1));
        let longest = i64::from(config.max_document_tokens);
        Ok(Self { pieces, ends, tokens_per_batch, least, longest, max_early })
    }

    pub(super) fn longest(&self) -> i32 {
        self.pieces.lengths.iter().copied().max().unwrap_or(1)
    }

    /// Puts the whole sample through a packer.
    ///
    /// # Complexity
    /// For each step a push, a copy of the waiting documents and a sum of admissions; a few times that if a step needs
    /// several global batches.
    pub(super) fn through(&self, mut packer: Packer) -> Result<Run> {
        let (mut place, mut heaviest, mut mean) = (Place::default(), 0.0, 0.0);
        while place.read < self.ends.len() {
            let (after, packing) = self.next_step(packer, &mut place)?;
            packer = after;
            if packing.num_tokens() > 0 {
                let of_step = packing.costs.iter().sum::<f64>() / packing.costs.len() as f64;
                heaviest += packing.rank_imbalance() * of_step;
                mean += of_step;
            }
        }
        packer.flush();
        Ok(Run { packer, lost_time: if mean > 0.0 { heaviest / mean } else { 1.0 } })
    }

    /// Makes the next step with enough tokens. Returns the packer after it, and the step.
    fn next_step(&self, mut packer: Packer, place: &mut Place) -> Result<(Packer, Packing)> {
        let mut batches = 1;
        loop {
            let offer = self.offer(&packer, place, batches)?;
            let (lengths, costs) = self.pieces.of(&offer.pieces)?;
            let entering = self.entering(packer.admits(&lengths, table(&costs))?, &lengths, offer.last);
            let may_read = !offer.last && entering == offer.pieces.len();
            let (lengths, costs) = self.pieces.of(&offer.pieces[..entering])?;
            let mut after = packer.clone();
            let packing = after.push_pieces(&Push {
                min_step_tokens: if may_read { 0 } else { self.least },
                early: (self.max_early > 0).then(|| &offer.early[..entering]),
                costs: table(&costs),
                ..Push::new(&lengths)
            })?;
            let tokens: i64 = packing.tokens.iter().sum();
            if !may_read || tokens >= self.least {
                place.advance(&offer, entering);
                return Ok((after, packing));
            }
            if tokens == 0 && entering > 0 {
                // All offered documents wait. They have entered, and the next global batch comes.
                packer = after;
                place.advance(&offer, entering);
                batches = 1;
            } else {
                batches *= 2;
            }
        }
    }

    /// Offers a number of global batches, and later pieces that come with them. The rest of the sample is offered too
    /// if it is too small for a step.
    fn offer(&self, packer: &Packer, place: &Place, batches: i64) -> Result<Offer> {
        let (first, all) = (place.read, self.ends.len());
        let before = self.ends[first] - i64::from(self.pieces.lengths[first]);
        let wanted = self.tokens_per_batch.saturating_mul(batches);
        let is_new = |piece: &usize| place.taken.binary_search(piece).is_err();
        let until = |tokens: i64| self.ends.partition_point(|&end| end <= before.saturating_add(tokens));
        // The first new piece has its turn, however long it and the pieces before it are.
        let next = (first..all).find(is_new).unwrap_or(first);
        let mut end = until(wanted).max(next + 1);
        // A reader looks ahead this far, and the mean of what it sees decides which documents come early.
        let known = self.ends[next] - i64::from(self.pieces.lengths[next]) - before;
        let ahead = self.tokens_per_batch.saturating_mul(self.max_early).saturating_add(self.least);
        let seen = until(wanted.max(known.saturating_add(self.longest)).saturating_add(ahead)) + 1;
        let seen = seen.max(place.taken.last().map_or(0, |&last| last) + 2).min(all);
        let outside =
            |from: usize| (from..seen).filter(is_new).map(|piece| i64::from(self.pieces.lengths[piece])).sum::<i64>();
        if seen == all && outside(end) < self.least {
            end = all;
        }
        let mut pieces: Vec<usize> = (first..end).filter(is_new).collect();
        let (due, last) = (pieces.len(), end == all);
        let mut early = vec![0; due];
        if self.max_early > 0 && !last {
            let (lengths, _) = self.pieces.of(&(first..seen).collect::<Vec<_>>())?;
            let leads = packer.leads(&lengths, self.tokens_per_batch, self.max_early)?;
            let passed = self.ends[end - 1];
            let iterations = |piece: usize| {
                1 + (self.ends[piece] - i64::from(self.pieces.lengths[piece]) - passed) / self.tokens_per_batch
            };
            let comes = |&piece: &usize| {
                is_new(&piece) && self.pieces.whole[piece] && leads[piece - first] >= iterations(piece)
            };
            let comes: Vec<usize> = (end..seen).filter(comes).collect();
            let tokens: i64 = comes.iter().map(|&piece| i64::from(self.pieces.lengths[piece])).sum();
            if seen < all || outside(end) - tokens >= self.least {
                early.extend(comes.iter().map(|&piece| iterations(piece)));
                pieces.extend(comes);
            }
        }
        Ok(Offer { pieces, due, early, end, last })
    }

    /// How many offered pieces enter: all admitted ones, or fewer if the rest would be too small for a step by itself.
    fn entering(&self, admitted: usize, lengths: &[i32], last: bool) -> usize {
        let rest = |count: usize| lengths[count..].iter().map(|&length| i64::from(length)).sum::<i64>();
        if last && admitted < lengths.len() && rest(admitted) < self.least {
            let fewer = (0..lengths.len()).rev().find(|&count| rest(count) >= self.least);
            return fewer.filter(|&fewer| fewer > 0).unwrap_or(admitted);
        }
        admitted
    }
}

impl Place {
    /// Marks the first `entering` pieces of an offer as entered.
    fn advance(&mut self, offer: &Offer, entering: usize) {
        let entered = &offer.pieces[..entering];
        if entering >= offer.due {
            self.read = offer.end;
            self.taken.extend(&entered[offer.due..]);
            self.taken.sort_unstable();
        } else if let Some(&last) = entered.last() {
            self.read = last + 1;
        }
        let read = self.read;
        self.taken.retain(|&piece| piece >= read);
    }
}
