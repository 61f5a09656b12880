//! Improves plans of several columns: documents are spread by all columns at once, and exchanged between micro-batches.

use crate::balance::{Rules, Size, Teams, exchange};
use crate::costliest_first::costliest_first;
use crate::longest_first::longest_first;
use crate::packing::placement::Placement;

use super::columns::{Placed, Priced, by_column};
use super::refined::refine;

/// Effort that is spent on improving a plan.
struct Effort {
    /// Exchanges end once the step is this close to its lower bound.
    close: f64,
    /// Number of partners of the heaviest micro-batch that are looked at, from the lightest on.
    partners: usize,
    /// Most exchanges that are looked at.
    looks: usize,
}

/// Effort for Algorithm 1: about a tenth of a millisecond; most plans are close to the bound already.
const LITTLE: Effort = Effort { close: 1.01, partners: 1, looks: 1 << 15 };
/// Effort for `refined`: about half a millisecond.
const MUCH: Effort = Effort { close: 1.0001, partners: 4, looks: 1 << 17 };
/// Largest product of documents and micro-batches for which [`Priced::spread`] is tried, if a plan is far from its
/// bound.
const SPREAD: usize = 1 << 17;

impl Priced<'_> {
    /// Improves a plan with much effort. With one column in which longer documents never cost less, as with a cost
    /// model, [`refine`] does it: its searches are shorter.
    ///
    /// A document that is neither placed nor left over keeps its place.
    pub(crate) fn refine_from(&self, start: Placed) -> Placed {
        let by_length = longest_first(self.lengths).map(|(_, index)| self.costs.values()[index]);
        if self.costs.columns() == 1 && by_length.is_sorted_by(|a, b| a >= b) {
            let placement = refine(start.placement, self.lengths, self.costs.values(), self.max_tokens);
            return placement.into();
        }
        self.exchange(self.level(start), &MUCH)
    }

    /// A plan no worse than `start`: as many documents are placed, and the step is not longer.
    ///
    /// With one column this is `start`. With several, Algorithm 1 looks at one column at a time, and if documents are
    /// large beside a micro-batch, the other columns become uneven. In that case [`Priced::spread`] makes a second
    /// plan, and documents of the better plan are exchanged.
    ///
    /// # Complexity
    /// O(N) if the step is close to the mean micro-batch; else O(n), and a bounded number of steps more.
    pub(crate) fn level(&self, start: Placed) -> Placed {
        let columns = self.costs.columns();
        let mean =
            |column: usize| by_column(&start.loads, columns, column).sum::<f64>() / self.num_micro_batches as f64;
        let step = self.step_cost(&start.loads);
        if columns == 1 || step <= LITTLE.close * self.timed().map(mean).sum::<f64>() {
            return start;
        }
        let bounds = self.bounds(&start);
        let far = step > LITTLE.close * self.timed().map(|column| bounds[column]).sum::<f64>();
        let all = far && !start.placement.assignment.contains(&-1);
        let spread = if all && self.lengths.len() * self.num_micro_batches <= SPREAD { self.spread() } else { None };
        let better = spread.filter(|spread| self.step_cost(&spread.loads) < step);
        self.exchange(better.unwrap_or(start), &LITTLE)
    }

    /// Places documents by the greatest part that they are of any column, greatest first. Each goes where it fits and
    /// where the micro-batch's greatest part of any column stays least. `None` if a document fits nowhere.
    ///
    /// # Complexity
    /// O(n N columns).
    fn spread(&self) -> Option<Placed> {
        // Memory is no part.
        let scale: Vec<f64> = self.scale().into_iter().map(|scale| scale.max(0.0)).collect();
        let mut placed = self.nothing();
        for index in costliest_first(&self.leading().1) {
            let row = self.costs.row(index);
            let (mut found, mut least, mut least_of_all) = (None, f64::INFINITY, f64::INFINITY);
            for (j, loads) in placed.loads.chunks_exact(row.len()).enumerate() {
                let parts = loads.iter().zip(row).zip(&scale).map(|((load, cost), scale)| (load + cost) * scale);
                let greatest = parts.fold(0.0, f64::max);
                least_of_all = greatest.min(least_of_all);
                if greatest < least && self.has_room(&placed, j, index) {
                    (found, least) = (Some(j), greatest);
                }
            }
            self.put(&mut placed, index, found?);
            placed.placement.length_fallbacks += usize::from(least > least_of_all);
        }
        Some(placed)
    }

    /// For each column, a lower bound on its heaviest micro-batch with the documents that are placed.
    fn bounds(&self, placed: &Placed) -> Vec<f64> {
        let columns = self.costs.columns();
        let mean = |k: usize| by_column(&placed.loads, columns, k).sum::<f64>() / self.num_micro_batches as f64;
        let mut bounds: Vec<f64> = (0..columns).map(mean).collect();
        let empty = self.nothing().loads;
        for (index, _) in placed.placement.assignment.iter().enumerate().filter(|&(_, &j)| j >= 0) {
            for (bound, (cost, empty)) in bounds.iter_mut().zip(self.costs.row(index).iter().zip(&empty)) {
                *bound = bound.max(empty + cost);
            }
        }
        bounds
    }

    /// A plan no worse than `start`: the same documents are placed, and the step is not longer.
    ///
    /// The heaviest micro-batch of a column gives one document to one of its lightest partners in that column, for one
    /// document or none. Of all these exchanges the one with the shortest step is made, the first if several are equal.
    /// The column farthest from its own bound is tried first. The search ends if no column has an exchange that
    /// shortens the step, or if the effort is used up.
    ///
    /// # Complexity
    /// O(n + N columns) for each exchange made, and at most [`Effort::looks`] exchanges looked at.
    fn exchange(&self, start: Placed, effort: &Effort) -> Placed {
        let mut search = ColumnExchangeSearch::new(self, &start, effort);
        if !search.shortens() {
            return start;
        }
        while search.shortens() {}
        // Summed anew, since rounding errors may have added up.
        let found = search.into_placed(&start.placement);
        let better = self.step_cost(&found.loads) <= self.step_cost(&start.loads) && self.keeps_limits(&found.loads);
        if better { found } else { start }
    }
}

/// A document that the heavier micro-batch gives, and a document that it gets back.
type Exchange = (usize, Option<usize>);

struct ColumnExchangeSearch<'a, 'b> {
    priced: &'a Priced<'b>,
    columns: usize,
    /// Documents of each micro-batch, in ascending order.
    contents: Vec<Vec<usize>>,
    tokens: Vec<i64>,
    loads: Vec<f64>,
    bounds: Vec<f64>,
    effort: &'a Effort,
    looks: usize,
}

impl<'a, 'b> ColumnExchangeSearch<'a, 'b> {
    fn new(priced: &'a Priced<'b>, start: &Placed, effort: &'a Effort) -> Self {
        let mut contents = vec![Vec::new(); priced.num_micro_batches];
        for (index, &micro_batch) in start.placement.assignment.iter().enumerate() {
            if let Ok(j) = usize::try_from(micro_batch) {
                contents[j].push(index);
            }
        }
        let (tokens, loads) = (start.placement.tokens.clone(), start.loads.clone());
        let (columns, bounds) = (priced.costs.columns(), priced.bounds(start));
        Self { priced, columns, contents, tokens, loads, bounds, effort, looks: effort.looks }
    }

    fn load(&self, micro_batch: usize, column: usize) -> f64 {
        self.loads[micro_batch * self.columns + column]
    }

    fn is_timed(&self, column: usize) -> bool {
        self.priced.costs.limits()[column].is_none()
    }

    /// Makes the best exchange of the first column that has one; the column farthest from its own bound is tried first.
    /// False if no column has one, or the step is close to its bound.
    fn shortens(&mut self) -> bool {
        let step = self.priced.step_cost(&self.loads);
        let timed: Vec<usize> = (0..self.columns).filter(|&column| self.is_timed(column)).collect();
        if step <= self.effort.close * timed.iter().map(|&column| self.bounds[column]).sum::<f64>() {
            return false;
        }
        let max = |column: usize| by_column(&self.loads, self.columns, column).fold(0.0, f64::max);
        let mut lacking: Vec<(f64, usize)> = timed.iter().map(|&k| (max(k) - self.bounds[k], k)).collect();
        lacking.sort_by(|a, b| b.0.total_cmp(&a.0));
        // Micro-batches that are equal in one column may differ in the others.
        let rules = Rules { enough: f64::NEG_INFINITY, most: 1, ..Rules::new(f64::NEG_INFINITY, self.effort.partners) };
        let (rules, count) = (Rules { sets_aside: false, ..rules }, self.contents.len());
        lacking.into_iter().any(|(_, column)| exchange(&mut InColumn { search: self, column, step }, count, &rules) > 0)
    }

    /// Time of the step after an exchange; `None` if the exchange does not fit.
    #[inline]
    fn step_after(&self, [heavy, partner]: [usize; 2], (given, taken): Exchange, others: &[f64]) -> Option<f64> {
        let costs = self.priced.costs;
        let length = |index: usize| i64::from(self.priced.lengths[index]);
        let moved = length(given) - taken.map_or(0, length);
        let most = i64::from(self.priced.max_tokens);
        if self.tokens[heavy] - moved > most || self.tokens[partner] + moved > most {
            return None;
        }
        let mut step = 0.0;
        for (column, other) in others.iter().enumerate() {
            let moved = costs.row(given)[column] - taken.map_or(0.0, |taken| costs.row(taken)[column]);
            let most = (self.load(heavy, column) - moved).max(self.load(partner, column) + moved);
            match costs.limits()[column] {
                Some(limit) if most > limit => return None,
                Some(_) => {}
                None => step += most.max(*other),
            }
        }
        Some(step)
    }

    fn hand_over(&mut self, index: usize, from: usize, to: usize) {
        self.contents[from].retain(|&other| other != index);
        let at = self.contents[to].partition_point(|&other| other < index);
        self.contents[to].insert(at, index);
        let length = i64::from(self.priced.lengths[index]);
        self.tokens[from] -= length;
        self.tokens[to] += length;
        for (column, cost) in self.priced.costs.row(index).iter().enumerate() {
            self.loads[from * self.columns + column] -= cost;
            self.loads[to * self.columns + column] += cost;
        }
    }

    /// Places the documents of each micro-batch in ascending order.
    fn into_placed(self, start: &Placement) -> Placed {
        let mut placed = self.priced.nothing();
        placed.placement.leftover.clone_from(&start.leftover);
        placed.placement.length_fallbacks = start.length_fallbacks;
        for (j, contents) in self.contents.iter().enumerate() {
            for &index in contents {
                self.priced.put(&mut placed, index, j);
            }
        }
        placed
    }
}

/// Micro-batches as one column sees them. The score of an exchange is the step after it.
struct InColumn<'s, 'a, 'b> {
    search: &'s mut ColumnExchangeSearch<'a, 'b>,
    column: usize,
    /// Time of the present step.
    step: f64,
}

impl Teams for InColumn<'_, '_, '_> {
    type Exchange = Exchange;

    fn load(&self, micro_batch: usize) -> f64 {
        self.search.load(micro_batch, self.column)
    }

    fn is_spent(&self) -> bool {
        self.search.looks == 0
    }

    fn best(&mut self, pair: [usize; 2], _: Size, least: Option<f64>) -> Option<(f64, Exchange)> {
        let search = &mut *self.search;
        let (mut best, mut least) = (None, least.unwrap_or(self.step));
        // The heaviest of all other micro-batches, which this exchange does not change.
        let others: Vec<f64> = (0..search.columns)
            .map(|k| {
                let others = by_column(&search.loads, search.columns, k).enumerate();
                others.filter(|(j, _)| !pair.contains(j)).map(|(_, load)| load).fold(0.0, f64::max)
            })
            .collect();
        let [has, offers] = pair.map(|j| &search.contents[j]);
        for &given in has {
            for taken in offers.iter().map(|&taken| Some(taken)).chain([None]) {
                if search.looks == 0 {
                    return Some(least).zip(best);
                }
                search.looks -= 1;
                if let Some(after) = search.step_after(pair, (given, taken), &others)
                    && after < least
                {
                    (best, least) = (Some((given, taken)), after);
                }
            }
        }
        Some(least).zip(best)
    }

    fn apply(&mut self, [heavy, partner]: [usize; 2], (given, taken): Exchange) {
        self.search.hand_over(given, heavy, partner);
        taken.into_iter().for_each(|taken| self.search.hand_over(taken, partner, heavy));
    }
}
