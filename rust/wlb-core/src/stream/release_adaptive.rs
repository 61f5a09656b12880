//! The adaptive rule: in every step, hold back the longest documents while that gains more than it costs.
//!
//! Thresholds fix once and for all which documents are outliers. This rule looks at all waiting and new documents and
//! holds back the `k` longest (the `k` costliest if documents bring their costs). It chooses the `k` with the least
//! loss `imbalance - 1 + delay_price * sum(length * iterations) / (N * max_document_tokens)`.
//!
//! The sum is over the documents that would then wait. `iterations` is how long each would have waited after this step,
//! so the first iteration of a wait costs the document's tokens once and the second twice. Waiting gets more expensive
//! the longer it lasts, and so it always ends. A document that came before its turn is not late: holding it brings it
//! nearer to its turn, and counts as minus one iteration.
//!
//! Only eight values of `k` are tried: those with the smallest lower bound on the loss. The bound uses two facts: the
//! heaviest document that leaves cannot be split, and tokens beyond the room of all micro-batches have to wait.
//!
//! The documents that leave are placed costliest first, each where the cost is least. If the light micro-batches are
//! full and a document would make another one the heaviest, the document waits too ([`Level`]), unless the step would
//! grow by less than the wait costs. So short documents wait if a step already trains many long ones.
//!
//! Documents that reached `max_delay` (due documents) always leave. They are placed in cost order with the rest, not
//! first: placed first, short ones would occupy every micro-batch before a long one gets its turn. If `max_tokens` is
//! one context, a long due document would then leave alone, and other long ones would wait on. Other documents leave
//! enough tokens free for the due ones. Only if a due document still finds no room are the due documents placed first.
//!
//! If the work of a step is bounded and a step has more, due documents are placed first. The others that leave are
//! chosen by the price of their waiting per work: light documents first, and heavy ones the earlier the longer they
//! have waited.
//!
//! If ranks wait for each other once a step, the sums of the ranks have to be level. The rule then works on ranks with
//! the room of all their micro-batches. Afterwards Algorithm 1 places the documents that leave into micro-batches.

use std::cmp::Ordering;

use crate::packing::methods::bins::Bins;
use crate::packing::methods::columns::Priced;
use crate::packing::options::{Ranks, Sync};
use crate::packing::placement::Placement;

use super::config::{DELAY_PRICE, PackerConfig};
use super::level::Level;
use super::queue::Waiting;

/// Number of values of `k` that are tried. More change almost nothing, and the limit bounds the time.
const MOST_CUTS: usize = 8;

/// Documents that leave in any case, and the order in which documents are placed.
pub(super) struct Tried<'a> {
    /// Carried and due documents, in the order in which they are placed if they go first.
    pub(super) urgent: &'a [usize],
    /// Number of carried documents at the start of `urgent`; they go first in any case.
    pub(super) carried: usize,
    /// All documents: the first so many of `urgent` in their order, then the others from the costliest to the cheapest.
    pub(super) after: &'a dyn Fn(usize) -> Vec<usize>,
}

/// Places the documents that leave in this step. Documents without a place wait.
///
/// # Arguments
/// * `priced` - all waiting and new documents, with costs in one column.
/// * `pieces` - the same documents.
/// * `tried` - urgent documents must leave. If one of them finds no room in cost order, the urgent ones are placed
///   first, by Algorithm 1; if one still finds none, all of them are placed first by tokens alone. Those that still
///   find no room are in `leftover`.
/// * `budget` - most cost of all documents of the step; infinite without a bound. If a step without the bound costs
///   more, its documents are chosen anew, urgent ones first; only the urgent ones may exceed the bound.
///
/// # Complexity
/// A sort, O(n) for the lower bounds of all `k`, and at most [`MOST_CUTS`] placements, usually two or three: a `k`
/// whose bound is above the least loss so far is not tried, and a placement that exceeds it is given up. The same again
/// if a due document finds no room in cost order, and again if the step costs more than its bound.
pub(super) fn place(
    priced: &Priced<'_>,
    pieces: &[Waiting],
    tried: &Tried<'_>,
    iteration: u64,
    budget: f64,
    config: &PackerConfig,
) -> Placement {
    let Tried { urgent, carried, after } = *tried;
    let placed = |first: usize, budget: f64| {
        let order = after(first);
        let (first, others) = order.split_at(first);
        place_after(priced, pieces, (first, others), &urgent[first.len()..], iteration, budget, config)
    };
    let all_leave = |placement: &Placement| urgent.iter().all(|&index| placement.assignment[index] >= 0);
    let in_place = (carried < urgent.len()).then(|| placed(carried, f64::INFINITY)).filter(all_leave);
    let placement = in_place.unwrap_or_else(|| placed(urgent.len(), f64::INFINITY));
    let costs = priced.costs.values().iter().zip(&placement.assignment);
    let spent: f64 = costs.filter(|&(_, &micro_batch)| micro_batch >= 0).map(|(&cost, _)| cost).sum();
    if spent <= budget { placement } else { placed(urgent.len(), budget) }
}

/// The step with the least loss among those in which `first` is placed first and the documents in `due` leave with
/// `others`. If due documents find no room in any of them, some due documents are not placed.
fn place_after(
    priced: &Priced<'_>,
    pieces: &[Waiting],
    (first, others): (&[usize], &[usize]),
    due: &[usize],
    iteration: u64,
    budget: f64,
    config: &PackerConfig,
) -> Placement {
    let search = HoldSearch::new(priced, pieces, (first, others), due, iteration, budget, config);
    let mut cuts = search.cuts();
    let mut best: Option<(Cut, Placement)> = None;
    let mut limit = f64::INFINITY;
    let mut attempt = |cut: Cut, limit: &mut f64| {
        let found = search.attempt(cut.from, *limit);
        if let Some((cut, _)) = &found
            && best.as_ref().is_none_or(|(best, _)| cut.compare(best).is_lt())
        {
            *limit = cut.loss + search.rounding;
            best = found;
        }
    };
    // The most promising cut first: few others remain below its loss, and these can be sorted.
    if let Some(first) = cuts.iter().copied().min_by(Cut::compare) {
        attempt(first, &mut limit);
        cuts.retain(|cut| cut.from != first.from && cut.loss <= limit);
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
    let costs = priced.costs.values();
    let first_cost = |of: &Placement| -> f64 {
        first.iter().filter(|&&index| of.assignment[index] >= 0).map(|&index| costs[index]).sum()
    };
    let by_ranks = first_cost(&search.first.placement);
    let placement = best.map_or(search.first.placement, |(_, placement)| placement);
    if !by_rank {
        return placement;
    }
    let leave = others.iter().copied().filter(|&index| placement.assignment[index] >= 0);
    let mut bins = Levelled::micro_batches(priced).place(priced, first);
    let carried = bins.placement.leftover.len();
    // Micro-batches may hold more of `first` than ranks did, if a long document leaves room for short ones. Then the
    // budget is checked anew.
    let of_first = first_cost(&bins.placement);
    let mut left = if of_first > by_ranks { budget - of_first } else { f64::INFINITY };
    for index in leave {
        if costs[index] <= left {
            bins.place(index, priced.lengths[index], costs[index]);
            left -= if bins.placement.assignment[index] >= 0 { costs[index] } else { 0.0 };
        }
    }
    // Documents that find no room wait on.
    bins.placement.leftover.truncate(carried);
    bins.placement
}

/// The units that the rule makes level: micro-batches, or ranks with the room of all their micro-batches.
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

    /// Places the urgent documents alone, in this order: by Algorithm 1, or by tokens if one of them finds no room.
    fn place(self, priced: &Priced<'_>, first: &[usize]) -> Bins {
        let place_first = |place: fn(&mut Bins, usize, i32, f64)| {
            let nothing = Placement::new(priced.lengths.len(), self.count, self.empty_cost);
            let mut bins = Bins::limited(nothing, self.max_tokens, self.max_documents);
            for &index in first {
                place(&mut bins, index, priced.lengths[index], priced.costs.values()[index]);
            }
            bins
        };
        let bins = place_first(Bins::place);
        if bins.placement.leftover.is_empty() { bins } else { place_first(Bins::place_by_tokens) }
    }
}

/// A choice of `k`: all documents before `from` wait unless they are due, and the loss is at least `loss`.
#[derive(Clone, Copy)]
struct Cut {
    from: usize,
    loss: f64,
}

impl Cut {
    fn compare(&self, other: &Self) -> Ordering {
        self.loss.total_cmp(&other.loss).then(self.from.cmp(&other.from))
    }
}

/// A document that may leave.
#[derive(Clone, Copy)]
struct Document {
    index: usize,
    length: i32,
    cost: f64,
    /// Whether it is due by `max_delay`, so that it must leave.
    due: bool,
    /// Tokens times the iterations that it would have waited; minus its tokens before its turn.
    debt: i128,
    /// Sums over this document and all after it.
    from_here: Sums,
}

impl Document {
    /// Price of waiting relative to the document's work.
    fn urgency(&self) -> f64 {
        self.debt as f64 / self.cost
    }

    /// Fills in, for each document, the sums over it and all after it.
    fn sum_from_the_end(documents: &mut [Self]) {
        let mut sums = Sums::default();
        for document in documents.iter_mut().rev() {
            let tokens = i64::from(document.length);
            sums.cost += document.cost;
            sums.tokens += tokens;
            sums.early += if document.debt < 0 && !document.due { tokens } else { 0 };
            document.from_here = sums;
        }
    }
}

/// Sums over some documents.
#[derive(Clone, Copy, Default)]
struct Sums {
    cost: f64,
    tokens: i64,
    /// Tokens of documents whose turn has not come and that are not due.
    early: i64,
}

/// Sums over the document at a place and all after it.
fn sums_from(documents: &[Document], place: usize) -> Sums {
    documents.get(place).map_or_else(Sums::default, |document| document.from_here)
}

/// Sums over the due documents before a place, and the debt of the other documents there.
#[derive(Clone, Copy, Default)]
struct Before {
    due_cost: f64,
    due_tokens: i64,
    /// Cost of the costliest due document.
    heaviest_due: f64,
    debt: i128,
}

impl Before {
    fn pass(&mut self, document: &Document) {
        if document.due {
            self.heaviest_due = self.heaviest_due.max(document.cost);
            self.due_cost += document.cost;
            self.due_tokens += i64::from(document.length);
        } else {
            self.debt += document.debt;
        }
    }
}

/// The bound on the work of a step, and which documents stay within it. Due documents are already placed.
struct Budget {
    /// Work that the bound leaves for documents that are not urgent.
    left: f64,
    /// Places of documents, the most urgent relative to their work first.
    order: Vec<usize>,
    /// For each place, the least urgency of the documents after it, at least 0; 0 for the last place.
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

    /// Most work of all documents that leave, if this document is the first of them.
    fn most(&self, first: &Document) -> f64 {
        self.left.max(first.cost)
    }

    /// A lower bound on the debt of the waiting documents if the document at `place` is the first to leave.
    fn debt(&self, documents: &[Document], place: usize) -> i128 {
        let first = &documents[place];
        // The factor covers rounding: the costs may be summed in another order.
        let beyond = first.from_here.cost * (1.0 - 1e-9) - self.most(first);
        if beyond > 0.0 { (beyond * self.least_after[place]) as i128 } else { 0 }
    }

    /// The documents that leave from a place on, and the debt of the others. The first document leaves, then the most
    /// urgent relative to their work, while the bound allows.
    fn within(&self, documents: &[Document], from: usize) -> (Vec<Document>, i128) {
        let (mut spent, mut debt) = (documents[from].cost, 0);
        let left = self.most(&documents[from]);
        let mut leaves = vec![false; documents.len()];
        leaves[from] = true;
        for &place in self.order.iter().filter(|&&place| place > from) {
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

struct HoldSearch<'a> {
    config: &'a PackerConfig,
    level: Levelled,
    /// Placement of the documents that go first.
    first: Bins,
    /// All other documents, costliest first.
    documents: Vec<Document>,
    /// Tokens that all micro-batches have free beside the documents that go first and the due ones.
    spare: i64,
    /// Bound on the work of the step, if any.
    budget: Option<Budget>,
    /// Most difference in the loss between two orders of summing the costs.
    rounding: f64,
}

impl<'a> HoldSearch<'a> {
    fn new(
        priced: &Priced<'_>,
        pieces: &[Waiting],
        (first, others): (&[usize], &[usize]),
        due: &[usize],
        iteration: u64,
        budget: f64,
        config: &'a PackerConfig,
    ) -> Self {
        let costs = priced.costs.values();
        let level = Levelled::of(priced, config);
        let mut is_due = vec![false; if due.is_empty() { 0 } else { pieces.len() }];
        due.iter().for_each(|&index| is_due[index] = true);
        let document = |&index: &usize| {
            let (length, cost) = (priced.lengths[index], costs[index]);
            let late = iteration as i128 - i128::from(pieces[index].turn);
            let debt = i128::from(length) * if late < 0 { -1 } else { late + 1 };
            let due = is_due.get(index).is_some_and(|&due| due);
            Document { index, length, cost, due, debt, from_here: Sums::default() }
        };
        let mut documents: Vec<Document> = others.iter().map(document).collect();
        Document::sum_from_the_end(&mut documents);
        // Number of additions; each is off by at most half an epsilon, and an imbalance is at most `N`.
        let additions = 4.0 * (pieces.len() + config.num_micro_batches) as f64;
        let rounding = additions * config.num_micro_batches as f64 * f64::EPSILON;
        let placed = level.place(priced, first);
        let budget = (budget < f64::INFINITY).then(|| {
            let leaves = |&&index: &&usize| placed.placement.assignment[index] >= 0;
            let spent: f64 = first.iter().filter(leaves).map(|&index| costs[index]).sum();
            Budget::new(budget - spent, &documents)
        });
        let first = placed;
        let due: i64 = due.iter().map(|&index| i64::from(priced.lengths[index])).sum();
        let spare = level.count as i64 * level.max_tokens - first.placement.tokens.iter().sum::<i64>() - due;
        Self { config, level, first, documents, spare, budget, rounding }
    }

    /// Every cut, with a lower bound on its loss. In every cut some document leaves, if there is any.
    fn cuts(&self) -> Vec<Cut> {
        let first = &self.first.placement;
        let heaviest_first = first.costs.iter().copied().fold(0.0, f64::max);
        let first_cost: f64 = first.costs.iter().sum();
        let first_tokens: i64 = first.tokens.iter().sum();
        let room = self.level.count as i64 * self.level.max_tokens - first_tokens;
        let mut before = Before::default();
        let mut cuts = Vec::with_capacity(self.documents.len() + 1);
        let bound = |from: usize, longest: f64, before: &Before| {
            let Sums { mut cost, tokens, early } = sums_from(&self.documents, from);
            // Tokens beyond the room of all micro-batches wait at least one iteration; documents that came early may
            // wait for nothing.
            let mut beyond = i128::from((tokens + before.due_tokens - room - early).max(0) - early);
            if let (Some(budget), Some(document)) = (&self.budget, self.documents.get(from)) {
                cost = cost.min(budget.most(document));
                if early == 0 {
                    beyond = beyond.max(budget.debt(&self.documents, from));
                }
            }
            let heaviest = (first.empty_cost() + longest.max(before.heaviest_due)).max(heaviest_first);
            let debt = before.debt.saturating_add(beyond);
            Cut { from, loss: self.loss(heaviest, first_cost + (cost + before.due_cost), debt) }
        };
        for (from, document) in self.documents.iter().enumerate() {
            if !document.due && self.may_begin(from) {
                cuts.push(bound(from, document.cost, &before));
            }
            before.pass(document);
        }
        if first_tokens + before.due_tokens > 0 {
            cuts.push(bound(self.documents.len(), 0.0, &before));
        }
        cuts
    }

    /// Whether this document may be the first to leave: it is within the bound on the work, or it is the cheapest and
    /// no other would leave.
    fn may_begin(&self, place: usize) -> bool {
        let Some(budget) = &self.budget else { return true };
        let cheapest =
            place + 1 == self.documents.len() && self.first.placement.tokens.iter().all(|&tokens| tokens == 0);
        self.documents[place].cost <= budget.left || cheapest
    }

    /// The loss and the placement of a cut. `None` if the loss turns out to be above `limit`, or a due document finds
    /// no room.
    fn attempt(&self, from: usize, limit: f64) -> Option<(Cut, Placement)> {
        let Bins { placement, counts, .. } = &self.first;
        let mut level = Level::new(placement.clone(), self.level.max_tokens, counts.clone());
        let mut before = Before::default();
        self.documents[..from].iter().for_each(|document| before.pass(document));
        let chosen = self.budget.as_ref().filter(|_| from < self.documents.len());
        let chosen = chosen.map(|budget| budget.within(&self.documents, from));
        let (documents, from_place, beyond) = match &chosen {
            Some((leaving, debt)) => (leaving.as_slice(), 0, *debt),
            None => (self.documents.as_slice(), from, 0),
        };
        let mut debt = before.debt + beyond;
        let mut placed: f64 = placement.costs.iter().sum();
        let leaving = sums_from(documents, from_place);
        let mean = (placed + (leaving.cost + before.due_cost)) / self.level.count as f64;
        let mut spare = self.spare;
        for (at, document) in documents.iter().enumerate() {
            if at < from_place && !document.due {
                continue;
            }
            // The step may grow by as much as the document's waiting would cost.
            let tolerated = || if document.due { f64::INFINITY } else { self.price(document.debt) * mean };
            let tokens = if document.due { 0 } else { i64::from(document.length) };
            if tokens <= spare && level.place(document.index, document.length, document.cost, tolerated) {
                placed += document.cost;
                spare -= tokens;
                continue;
            }
            if document.due {
                return None;
            }
            debt += document.debt;
            let Sums { cost: to_come, early, .. } = sums_from(documents, at + 1);
            if self.loss(level.heaviest(), placed + to_come, debt - i128::from(early)) > limit {
                return None;
            }
        }
        let costs = &level.placement.costs;
        let loss = self.loss(level.heaviest(), costs.iter().sum(), debt);
        Some((Cut { from, loss }, level.placement))
    }

    fn loss(&self, heaviest: f64, total: f64, debt: i128) -> f64 {
        let imbalance = if total > 0.0 { heaviest * self.level.count as f64 / total } else { 1.0 };
        (imbalance - 1.0).max(0.0) + self.price(debt)
    }

    fn price(&self, debt: i128) -> f64 {
        self.config.delay_price.unwrap_or(DELAY_PRICE) * debt as f64 / self.config.contexts() as f64
    }
}
