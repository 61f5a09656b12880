//! The adaptive release: in every iteration, hold back the longest documents while that gains more than it costs.
//!
//! Thresholds fix once what an outlier is. This rule looks at every document that waits or is new, and holds back the
//! `k` longest; where documents bring their costs, the `k` costliest. It chooses the `k` with the least loss
//!
//! `imbalance - 1 + delay_price * sum(length * iterations) / (N * max_document_tokens)`.
//!
//! The sum is over the documents that would then wait. `iterations` is how long each would have waited after this step,
//! so the first iteration of a wait costs the document's tokens once and the second twice. Waiting becomes more
//! expensive the longer it lasts, and so it always ends. A document that came before its turn is not late: to hold it
//! brings it nearer to its place, and counts as minus one iteration.
//!
//! Only eight values of `k` are tried: those with the smallest lower bound on the loss. The bound uses that the
//! heaviest document that leaves cannot be split, and that tokens beyond the room of all micro-batches have to wait.
//!
//! The documents that leave are placed in that order, each where the cost is least. If the light micro-batches are full
//! and a document could only go where it makes one the heaviest, it waits too ([`Level`]), unless the step would grow
//! by less than the wait costs. So short documents make room in a step that trains many long ones.
//!
//! Where the work of a step is bounded, what of a cut leaves is chosen by what its waiting would cost, for its work: light
//! documents first, and heavy ones the longer they wait.
//!
//! Where ranks wait for each other once a step, their sums are what has to be level. Then all this is done with ranks that
//! have the room of all their micro-batches, and what leaves is placed into these, as Algorithm 1 does, afterwards.

use std::cmp::Ordering;

use crate::interrupt::check;
use crate::packing::methods::bins::Bins;
use crate::packing::methods::columns::Priced;
use crate::packing::options::{Ranks, Sync};
use crate::packing::placement::Placement;

use super::config::{DELAY_PRICE, PackerConfig};
use super::level::Level;
use super::outlier_queue::Waiting;

/// Values of `k` that are tried. More of them change almost nothing, and this bounds the time.
const MOST_CUTS: usize = 8;

/// Places the documents that leave in this iteration. Those without a place wait.
///
/// # Arguments
/// * `priced` - everything that waits and everything new, with costs in one column.
/// * `pieces` - the same.
/// * `order` - all of them, in the order in which they are placed. The first `urgent` must leave, whatever it costs; they
///   are placed as Algorithm 1 does, and if one of them finds no room, all of them again by tokens alone. Those that find
///   none then either are in `leftover`. The others come from the costliest to the cheapest.
/// * `budget` - the most that the documents of the step may cost; infinite for no bound. What is urgent may cost more.
///
/// # Complexity
/// A sort, or two with a bound, O(n) for the lower bounds of all `k`, and at most [`MOST_CUTS`] placements. Two or three are usual: a `k`
/// whose bound is above the least loss found is not tried, and a placement that exceeds it is given up.
pub(super) fn place(
    priced: &Priced<'_>,
    pieces: &[Waiting],
    order: &[usize],
    urgent: usize,
    iteration: u64,
    budget: f64,
    config: &PackerConfig,
) -> Placement {
    let (urgent, others) = order.split_at(urgent);
    let search = Search::new(priced, pieces, (urgent, others), iteration, budget, config);
    check();
    let mut cuts = search.cuts();
    check();
    let mut best: Option<(Cut, Placement)> = None;
    let mut limit = f64::INFINITY;
    let mut attempt = |cut: Cut, limit: &mut f64| {
        let found = search.attempt(cut.held, *limit);
        if let Some((cut, _)) = &found
            && best.as_ref().is_none_or(|(best, _)| cut.compare(best).is_lt())
        {
            *limit = cut.loss + search.rounding;
            best = found;
        }
    };
    // The most promising first: what it leaves of the others is short, and can be sorted.
    if let Some(first) = cuts.iter().copied().min_by(Cut::compare) {
        attempt(first, &mut limit);
        cuts.retain(|cut| cut.held != first.held && cut.loss <= limit);
    }
    if cuts.len() >= MOST_CUTS {
        cuts.select_nth_unstable_by(MOST_CUTS - 1, Cut::compare);
        cuts.truncate(MOST_CUTS - 1);
    }
    cuts.sort_unstable_by(Cut::compare);
    for cut in cuts {
        if cut.loss > limit {
            break;
        }
        attempt(cut, &mut limit);
    }
    let by_rank = search.level.count < priced.num_micro_batches;
    let placement = best.map_or(search.urgent.placement, |(_, placement)| placement);
    if !by_rank {
        return placement;
    }
    let leave = others.iter().copied().filter(|&index| placement.assignment[index] >= 0);
    let mut bins = Levelled::micro_batches(priced).place(priced, urgent);
    let carried = bins.placement.leftover.len();
    leave.for_each(|index| bins.place(index, priced.lengths[index], priced.costs.values()[index]));
    // What finds no room waits on.
    bins.placement.leftover.truncate(carried);
    bins.placement
}

/// What the rule makes level: micro-batches, or ranks with all of theirs.
#[derive(Clone, Copy)]
struct Levelled {
    count: usize,
    max_tokens: i64,
    max_documents: Option<usize>,
    empty_cost: f64,
}

impl Levelled {
    fn micro_batches(priced: &Priced<'_>) -> Self {
        Self {
            count: priced.num_micro_batches,
            max_tokens: i64::from(priced.max_tokens),
            max_documents: priced.max_documents,
            empty_cost: priced.empty_cost(),
        }
    }

    fn of(priced: &Priced<'_>, config: &PackerConfig) -> Self {
        let micro_batches = Self::micro_batches(priced);
        let Some(Ranks { dp_size, sync: Sync::Step }) = config.shape.ranks else { return micro_batches };
        let rounds = micro_batches.count / dp_size;
        Self {
            count: dp_size,
            max_tokens: micro_batches.max_tokens * rounds as i64,
            max_documents: micro_batches.max_documents.map(|most| most.saturating_mul(rounds)),
            empty_cost: micro_batches.empty_cost * rounds as f64,
        }
    }

    /// Nothing but what is urgent, in this order: as Algorithm 1 does, and if one finds no room, by tokens alone.
    fn place(self, priced: &Priced<'_>, urgent: &[usize]) -> Bins {
        let place_urgent = |place: fn(&mut Bins, usize, i32, f64)| {
            let nothing = Placement::new(priced.lengths.len(), self.count, self.empty_cost);
            let mut bins = Bins::limited(nothing, self.max_tokens, self.max_documents);
            for &index in urgent {
                place(&mut bins, index, priced.lengths[index], priced.costs.values()[index]);
            }
            bins
        };
        let bins = place_urgent(Bins::place);
        if bins.placement.leftover.is_empty() { bins } else { place_urgent(Bins::place_by_tokens) }
    }
}

/// The costliest `held` documents wait, and the loss is this or more.
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

/// A document that may leave.
#[derive(Clone, Copy)]
struct Document {
    index: usize,
    length: i32,
    cost: f64,
    /// Tokens times the iterations that it would have waited; minus its tokens before its turn.
    debt: i128,
    /// Of this one and all after it.
    cost_from_here: f64,
    tokens_from_here: i64,
    /// Those of them whose turn has not come.
    early_from_here: i64,
}

impl Document {
    /// What its waiting costs, for its work.
    fn urgency(&self) -> f64 {
        self.debt as f64 / self.cost
    }

    /// Sums over each and all after it.
    fn sum_from_the_end(documents: &mut [Self]) {
        let (mut cost, mut tokens, mut early) = (0.0, 0, 0);
        for document in documents.iter_mut().rev() {
            cost += document.cost;
            tokens += i64::from(document.length);
            early += if document.debt < 0 { i64::from(document.length) } else { 0 };
            (document.cost_from_here, document.tokens_from_here) = (cost, tokens);
            document.early_from_here = early;
        }
    }
}

/// The bound on the work of a step, and who is within it.
struct Budget {
    /// What the others may cost, beside what is urgent.
    left: f64,
    /// Places of documents, the most urgent for their work first.
    order: Vec<usize>,
    /// The least urgency of each document after this place, 0 or above; 0 after the last.
    least_after: Vec<f64>,
}

impl Budget {
    fn new(left: f64, documents: &[Document]) -> Self {
        let mut order: Vec<usize> = (0..documents.len()).collect();
        order.sort_by(|&a, &b| documents[b].urgency().total_cmp(&documents[a].urgency()).then(a.cmp(&b)));
        let mut least_after = vec![0.0; documents.len()];
        let mut least = f64::INFINITY;
        for place in (1..documents.len()).rev() {
            least = documents[place].urgency().max(0.0).min(least);
            least_after[place - 1] = least;
        }
        Self { left, order, least_after }
    }

    /// What all that leaves may cost together, if this document is the first.
    fn most(&self, first: &Document) -> f64 {
        self.left.max(first.cost)
    }

    /// A lower bound on the debt of what waits if the document at `place` is the first to leave.
    fn debt(&self, documents: &[Document], place: usize) -> i128 {
        let first = &documents[place];
        // Sums in another order may differ by less.
        let beyond = first.cost_from_here * (1.0 - 1e-9) - self.most(first);
        if beyond > 0.0 { (beyond * self.least_after[place]) as i128 } else { 0 }
    }

    /// Those from `held` on that leave, and the debt of the others: the first, then whoever is most urgent for its work as
    /// long as it is within the bound.
    fn within(&self, documents: &[Document], held: usize) -> (Vec<Document>, i128) {
        let (mut spent, mut debt) = (documents[held].cost, 0);
        let left = self.most(&documents[held]);
        let mut leaves = vec![false; documents.len()];
        leaves[held] = true;
        for &place in self.order.iter().filter(|&&place| place > held) {
            if spent + documents[place].cost <= left {
                spent += documents[place].cost;
                leaves[place] = true;
            } else {
                debt += documents[place].debt;
            }
        }
        let mut leaving: Vec<Document> =
            documents.iter().zip(leaves).filter(|&(_, leaves)| leaves).map(|(&document, _)| document).collect();
        Document::sum_from_the_end(&mut leaving);
        (leaving, debt)
    }
}

struct Search<'a> {
    config: &'a PackerConfig,
    level: Levelled,
    /// Nothing but what is urgent, placed.
    urgent: Bins,
    /// The others, costliest first.
    documents: Vec<Document>,
    /// Where the work of the step is bounded.
    budget: Option<Budget>,
    /// By how much two ways to sum the costs may differ in the loss.
    rounding: f64,
}

impl<'a> Search<'a> {
    fn new(
        priced: &Priced<'_>,
        pieces: &[Waiting],
        (urgent, others): (&[usize], &[usize]),
        iteration: u64,
        budget: f64,
        config: &'a PackerConfig,
    ) -> Self {
        let costs = priced.costs.values();
        let level = Levelled::of(priced, config);
        let document = |&index: &usize| {
            let (length, cost) = (priced.lengths[index], costs[index]);
            let late = iteration as i128 - i128::from(pieces[index].turn);
            let debt = i128::from(length) * if late < 0 { -1 } else { late + 1 };
            Document { index, length, cost, debt, cost_from_here: 0.0, tokens_from_here: 0, early_from_here: 0 }
        };
        let mut documents: Vec<Document> = others.iter().map(document).collect();
        Document::sum_from_the_end(&mut documents);
        let urgent_alone = level.place(priced, urgent);
        let budget = (budget < f64::INFINITY).then(|| {
            let leaves = |&&index: &&usize| urgent_alone.placement.assignment[index] >= 0;
            let spent: f64 = urgent.iter().filter(leaves).map(|&index| costs[index]).sum();
            Budget::new(budget - spent, &documents)
        });
        // So many additions, each off by half an epsilon; an imbalance is at most `N`.
        let additions = 4.0 * (pieces.len() + config.num_micro_batches) as f64;
        let rounding = additions * config.num_micro_batches as f64 * f64::EPSILON;
        Self { config, level, urgent: urgent_alone, documents, budget, rounding }
    }

    /// Every cut, with a lower bound on its loss. Something leaves in every iteration, if there is anything.
    fn cuts(&self) -> Vec<Cut> {
        let urgent = &self.urgent.placement;
        let heaviest_urgent = urgent.costs.iter().copied().fold(0.0, f64::max);
        let urgent_cost: f64 = urgent.costs.iter().sum();
        let urgent_tokens: i64 = urgent.tokens.iter().sum();
        let room = self.level.count as i64 * self.level.max_tokens - urgent_tokens;
        let mut debt = 0_i128;
        let mut cuts = Vec::with_capacity(self.documents.len() + 1);
        for (held, document) in self.documents.iter().enumerate() {
            if !self.may_begin(held) {
                debt += document.debt;
                continue;
            }
            // What is more than all micro-batches hold waits too, an iteration at least; and what came early may.
            let early = document.early_from_here;
            let mut displaced = i128::from((document.tokens_from_here - room - early).max(0) - early);
            let mut cost_from_here = document.cost_from_here;
            if let Some(budget) = &self.budget {
                cost_from_here = cost_from_here.min(budget.most(document));
                if early == 0 {
                    displaced = displaced.max(budget.debt(&self.documents, held));
                }
            }
            let heaviest = (urgent.empty_cost() + document.cost).max(heaviest_urgent);
            let loss = self.loss(heaviest, urgent_cost + cost_from_here, debt + displaced);
            cuts.push(Cut { held, loss });
            debt += document.debt;
        }
        if urgent_tokens > 0 {
            let loss = self.loss(heaviest_urgent, urgent_cost, debt);
            cuts.push(Cut { held: self.documents.len(), loss });
        }
        cuts
    }

    /// Whether this document may be the first to leave: within the bound on the work, or, where else nothing would leave, the
    /// cheapest.
    fn may_begin(&self, place: usize) -> bool {
        let Some(budget) = &self.budget else { return true };
        let cheapest =
            place + 1 == self.documents.len() && self.urgent.placement.tokens.iter().all(|&tokens| tokens == 0);
        self.documents[place].cost <= budget.left || cheapest
    }

    /// The loss and the placement of a cut; none if the loss turns out to be above `limit`.
    fn attempt(&self, held: usize, limit: f64) -> Option<(Cut, Placement)> {
        let chosen = self.budget.as_ref().filter(|_| held < self.documents.len());
        let chosen = chosen.map(|budget| budget.within(&self.documents, held));
        let (documents, beyond) = match &chosen {
            Some((leaving, debt)) => (leaving.as_slice(), *debt),
            None => (&self.documents[held..], 0),
        };
        let Bins { placement, counts, .. } = &self.urgent;
        let mut level = Level::new(placement.clone(), self.level.max_tokens, counts.clone());
        let mut debt: i128 = self.documents[..held].iter().map(|document| document.debt).sum();
        debt += beyond;
        let mut placed: f64 = placement.costs.iter().sum();
        let mean = (placed + documents.first().map_or(0.0, |first| first.cost_from_here)) / self.level.count as f64;
        for (at, document) in documents.iter().enumerate() {
            // No longer a step than what waiting would cost.
            let tolerated = || self.price(document.debt) * mean;
            if level.place(document.index, document.length, document.cost, tolerated) {
                placed += document.cost;
                continue;
            }
            debt += document.debt;
            let (to_come, early) =
                documents.get(at + 1).map_or((0.0, 0), |next| (next.cost_from_here, next.early_from_here));
            if self.loss(level.heaviest(), placed + to_come, debt - i128::from(early)) > limit {
                return None;
            }
        }
        let costs = &level.placement.costs;
        let loss = self.loss(level.heaviest(), costs.iter().sum(), debt);
        Some((Cut { held, loss }, level.placement))
    }

    fn loss(&self, heaviest: f64, total: f64, debt: i128) -> f64 {
        let imbalance = if total > 0.0 { heaviest * self.level.count as f64 / total } else { 1.0 };
        (imbalance - 1.0).max(0.0) + self.price(debt)
    }

    fn price(&self, debt: i128) -> f64 {
        self.config.delay_price.unwrap_or(DELAY_PRICE) * debt as f64 / self.config.tokens_per_batch() as f64
    }
}
