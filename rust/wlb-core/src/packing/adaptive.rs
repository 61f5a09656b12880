//! Which documents wait, decided anew in every iteration: only those that cannot be balanced now.
//!
//! Thresholds say once and for all what an outlier is. This rule looks at everything that waits and everything that is new,
//! and holds the `k` longest documents back, for the `k` with the least loss
//!
//! `imbalance - 1 + delay_price * sum(length * iterations) / (N * max_document_tokens)`.
//!
//! The sum is over all that waits then, and `iterations` counts the one that it would wait now: a first iteration costs a
//! document's tokens once, the second twice. Waits grow dearer, so that none is for ever.
//!
//! The others are placed longest first where the cost is least; a document that could only go where it makes the heaviest
//! micro-batch heavier, because the lighter ones are full, waits as well ([`Bins::place_level`]). So light documents make way in
//! the step that trains many long ones.

use std::cmp::Ordering;

use crate::longest_first::longest_first_of;

use super::outlier_queue::Waiting;
use super::packer::PackerConfig;
use super::placement::Placement;
use super::var_length::Bins;

/// The default price of delay: for a step that is 3 % shorter, a global batch of tokens may wait one iteration.
pub const DELAY_PRICE: f64 = 0.03;

/// Places what leaves in this iteration. What has no place afterwards waits.
///
/// # Arguments
/// * `pieces` - everything that waits and everything new.
/// * `urgent` - indices of those that leave whatever it costs, in the order in which they are placed, before all others: as in
///   Algorithm 1; or all of them by tokens alone, if one found no room. `leftover` lists those that find none then either.
///
/// # Complexity
/// O(n) for a lower bound on the loss of every cut, and a placement for every cut whose bound is not above the least loss: few,
/// because cuts are tried from the lowest bound on, and given up as soon as they lose.
pub(super) fn place(pieces: &[Waiting], urgent: &[usize], iteration: u64, config: &PackerConfig) -> Placement {
    let search = Search::new(pieces, urgent, iteration, config);
    let mut cuts = search.cuts();
    let Some(first) = cuts.iter().copied().min_by(Cut::compare) else { return search.urgent.placement };
    let mut best = search.attempt(first.held, f64::INFINITY);
    let least = |best: &Option<(Cut, Bins)>| best.as_ref().map_or(f64::INFINITY, |(cut, _)| cut.loss);
    let limit = least(&best) + search.rounding;
    cuts.retain(|cut| cut.held != first.held && cut.loss <= limit);
    cuts.sort_unstable_by(Cut::compare);
    for cut in cuts {
        let limit = least(&best) + search.rounding;
        if cut.loss > limit {
            break;
        }
        let attempt = search.attempt(cut.held, limit);
        let is_better = |(cut, _): &(Cut, Bins)| best.as_ref().is_none_or(|(best, _)| cut.compare(best).is_lt());
        if attempt.as_ref().is_some_and(is_better) {
            best = attempt;
        }
    }
    best.map_or(search.urgent.placement, |(_, bins)| bins.placement)
}

/// So many of the longest documents wait, at this loss or more.
#[derive(Clone, Copy)]
struct Cut {
    held: usize,
    loss: f64,
}

impl Cut {
    fn compare(&self, other: &Self) -> Ordering {
        self.loss.total_cmp(&other.loss).then(self.held.cmp(&other.held))
    }
}

struct Document {
    index: usize,
    length: i32,
    cost: f64,
    /// Tokens times the iterations that it would have waited.
    debt: u128,
}

struct Search<'a> {
    config: &'a PackerConfig,
    /// The micro-batches with nothing but what is urgent in them.
    urgent: Bins,
    /// The others, longest first.
    documents: Vec<Document>,
    /// By how much sums of costs in another order may differ, relative to the loss.
    rounding: f64,
}

impl<'a> Search<'a> {
    fn new(pieces: &[Waiting], urgent: &[usize], iteration: u64, config: &'a PackerConfig) -> Self {
        let empty = || Bins::new(pieces.len(), config.num_micro_batches, config.max_tokens);
        let mut bins = empty();
        for &index in urgent {
            let length = pieces[index].piece.length;
            bins.place(index, length, config.cost_model.cost(length));
        }
        if !bins.placement.leftover.is_empty() {
            bins = empty();
            for &index in urgent {
                let length = pieces[index].piece.length;
                bins.place_by_tokens(index, length, config.cost_model.cost(length));
            }
        }
        let mut is_urgent = vec![false; pieces.len()];
        urgent.iter().for_each(|&index| is_urgent[index] = true);
        let others = pieces.iter().enumerate().filter(|&(index, _)| !is_urgent[index]);
        let documents = longest_first_of(others.map(|(index, waiting)| (index, waiting.piece.length)))
            .map(|(length, index)| {
                let iterations = u128::from(iteration - pieces[index].arrived) + 1;
                Document { index, length, cost: config.cost_model.cost(length), debt: length as u128 * iterations }
            })
            .collect();
        // Sums of as many terms differ by less than this, whatever their order; an imbalance is at most `N`.
        let terms = (pieces.len() + config.num_micro_batches) as f64;
        let rounding = 8.0 * terms * config.num_micro_batches as f64 * f64::EPSILON;
        Self { config, urgent: bins, documents, rounding }
    }

    /// Every cut, with a lower bound on its loss. Something leaves in every iteration, if there is anything.
    fn cuts(&self) -> Vec<Cut> {
        let count = self.documents.len();
        let most_held = if self.urgent.placement.tokens.iter().any(|&tokens| tokens > 0) { count } else { count.saturating_sub(1) };
        let heaviest_urgent = self.urgent.placement.costs.iter().copied().fold(0.0, f64::max);
        // Of the light end: then every sum has the rounding of its own terms, not that of larger ones.
        let mut cost: f64 = self.urgent.placement.costs.iter().sum();
        let mut tokens: i64 = self.urgent.placement.tokens.iter().sum();
        let room = self.config.num_micro_batches as i64 * i64::from(self.config.max_tokens);
        let mut after: Vec<(f64, i64)> = Vec::with_capacity(count + 1);
        after.push((cost, tokens));
        for document in self.documents.iter().rev() {
            cost += document.cost;
            tokens += i64::from(document.length);
            after.push((cost, tokens));
        }
        let mut debt = 0;
        let mut cuts = Vec::with_capacity(count + 1);
        for held in 0..=most_held {
            let (cost, tokens) = after[count - held];
            let heaviest = self.documents.get(held).map_or(0.0, |document| document.cost).max(heaviest_urgent);
            // What is more than all micro-batches hold waits too, an iteration at least.
            let displaced = (tokens - room).max(0) as u128;
            cuts.push(Cut { held, loss: self.loss(heaviest, cost, debt + displaced) });
            debt += self.documents.get(held).map_or(0, |document| document.debt);
        }
        cuts
    }

    /// The loss and the micro-batches of a cut; none if the loss turns out to be above `limit`.
    fn attempt(&self, held: usize, limit: f64) -> Option<(Cut, Bins)> {
        let mut bins = self.urgent.clone();
        let mut debt: u128 = self.documents[..held].iter().map(|document| document.debt).sum();
        for document in &self.documents[held..] {
            if !bins.place_level(document.index, document.length, document.cost) {
                debt += document.debt;
                if self.price(debt) > limit {
                    return None;
                }
            }
        }
        let costs = &bins.placement.costs;
        let heaviest = costs.iter().copied().fold(0.0, f64::max);
        let loss = self.loss(heaviest, costs.iter().sum(), debt);
        Some((Cut { held, loss }, bins))
    }

    fn loss(&self, heaviest: f64, total: f64, debt: u128) -> f64 {
        let micro_batches = self.config.num_micro_batches as f64;
        let imbalance = if total > 0.0 { (heaviest * micro_batches / total).max(1.0) } else { 1.0 };
        imbalance - 1.0 + self.price(debt)
    }

    fn price(&self, debt: u128) -> f64 {
        let global_batch = self.config.num_micro_batches as f64 * f64::from(self.config.max_document_tokens);
        self.config.delay_price.unwrap_or(DELAY_PRICE) * debt as f64 / global_batch
    }
}
