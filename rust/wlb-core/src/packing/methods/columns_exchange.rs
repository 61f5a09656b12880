//! Documents exchanged between micro-batches, so that a step of several columns becomes shorter.

use crate::longest_first::longest_first;
use crate::packing::placement::Placement;

use super::columns::{Placed, Priced, by_column};
use super::refined::refine;

/// A plan is left as it is once its step is this close to the lower bound.
const CLOSE: f64 = 1.0001;
/// Partners of the heaviest micro-batch that are looked at, from the lightest on.
const PARTNERS: usize = 4;
/// Most exchanges that are looked at: about half a millisecond.
const LOOKS: usize = 1 << 17;

impl Priced<'_> {
    /// [`Priced::place`], made better. Where one column never falls with the length, as with a cost model, as
    /// [`refine`] does it: then lengths tell what costs more, and searches are shorter.
    pub(in crate::packing) fn refine(&self) -> Placed {
        self.refine_from(self.place())
    }

    /// The same for what was placed by other rules; what is neither placed nor left over stays where it is.
    pub(in crate::packing) fn refine_from(&self, start: Placed) -> Placed {
        let by_length = longest_first(self.lengths).map(|(_, index)| self.costs.values()[index]);
        if self.costs.columns() == 1 && by_length.is_sorted_by(|a, b| a >= b) {
            let placement = refine(start.placement, self.lengths, self.costs.values(), self.max_tokens);
            return placement.into();
        }
        self.exchange(start)
    }

    /// A plan no worse than `start`: the same documents are placed, and the step is not longer.
    ///
    /// The heaviest micro-batch of a column gives one document for at most one to one of its lightest partners in that
    /// column: of all these exchanges, the one after which the step is shortest, the first of several. Columns are
    /// tried from the one on that lacks most to its own bound. This ends where no column has an exchange that makes the
    /// step shorter, where the step is next to the bound, or after [`LOOKS`].
    ///
    /// # Complexity
    /// O(n + N columns) an exchange, and [`LOOKS`] in all.
    pub(in crate::packing) fn exchange(&self, start: Placed) -> Placed {
        let mut search = Search::new(self, &start);
        let mut improved = false;
        while let Some(exchange) = search.find() {
            search.apply(&exchange);
            improved = true;
        }
        if !improved {
            return start;
        }
        // Summed anew: rounding may have gathered.
        let found = search.into_placed(&start.placement);
        let better = self.step_cost(&found.loads) <= self.step_cost(&start.loads) && self.keeps_limits(&found.loads);
        if better { found } else { start }
    }
}

struct Exchange {
    heavy: usize,
    partner: usize,
    given: usize,
    taken: Option<usize>,
}

struct Search<'a, 'b> {
    priced: &'a Priced<'b>,
    columns: usize,
    /// Documents of each micro-batch, ascending.
    contents: Vec<Vec<usize>>,
    tokens: Vec<i64>,
    loads: Vec<f64>,
    /// Least that the heaviest micro-batch of each column can have.
    bounds: Vec<f64>,
    looks: usize,
}

impl<'a, 'b> Search<'a, 'b> {
    fn new(priced: &'a Priced<'b>, start: &Placed) -> Self {
        let (columns, micro_batches) = (priced.costs.columns(), priced.num_micro_batches);
        let mut contents = vec![Vec::new(); micro_batches];
        let mut bounds: Vec<f64> =
            (0..columns).map(|k| by_column(&start.loads, columns, k).sum::<f64>() / micro_batches as f64).collect();
        let empty = priced.nothing().loads;
        for (index, &micro_batch) in start.placement.assignment.iter().enumerate() {
            if let Ok(j) = usize::try_from(micro_batch) {
                contents[j].push(index);
                for (bound, (cost, empty)) in bounds.iter_mut().zip(priced.costs.row(index).iter().zip(&empty)) {
                    *bound = bound.max(empty + cost);
                }
            }
        }
        let (tokens, loads) = (start.placement.tokens.clone(), start.loads.clone());
        Self { priced, columns, contents, tokens, loads, bounds, looks: LOOKS }
    }

    fn load(&self, micro_batch: usize, column: usize) -> f64 {
        self.loads[micro_batch * self.columns + column]
    }

    fn is_timed(&self, column: usize) -> bool {
        self.priced.costs.limits()[column].is_none()
    }

    /// The best exchange of the first column that has one.
    fn find(&mut self) -> Option<Exchange> {
        let step = self.priced.step_cost(&self.loads);
        let timed: Vec<usize> = (0..self.columns).filter(|&column| self.is_timed(column)).collect();
        if step <= CLOSE * timed.iter().map(|&column| self.bounds[column]).sum::<f64>() {
            return None;
        }
        let max = |column: usize| by_column(&self.loads, self.columns, column).fold(0.0, f64::max);
        let mut lacking: Vec<(f64, usize)> = timed.iter().map(|&k| (max(k) - self.bounds[k], k)).collect();
        lacking.sort_by(|a, b| b.0.total_cmp(&a.0));
        lacking.into_iter().find_map(|(_, column)| self.best_of(column, step))
    }

    fn best_of(&mut self, column: usize, step: f64) -> Option<Exchange> {
        let mut by_load: Vec<usize> = (0..self.contents.len()).collect();
        by_load.sort_by(|&a, &b| self.load(a, column).total_cmp(&self.load(b, column)));
        let most = by_load.last().map_or(0.0, |&j| self.load(j, column));
        let heavy = by_load.iter().copied().find(|&j| self.load(j, column) == most)?;
        let (mut best, mut least) = (None, step);
        for &partner in by_load.iter().filter(|&&j| j != heavy).take(PARTNERS) {
            // What the others have at most, whatever these two exchange.
            let others: Vec<f64> = (0..self.columns)
                .map(|k| {
                    let others = by_column(&self.loads, self.columns, k).enumerate();
                    others.filter(|&(j, _)| j != heavy && j != partner).map(|(_, load)| load).fold(0.0, f64::max)
                })
                .collect();
            for &given in &self.contents[heavy] {
                for taken in self.contents[partner].iter().map(|&taken| Some(taken)).chain([None]) {
                    if self.looks == 0 {
                        return best;
                    }
                    self.looks -= 1;
                    let exchange = Exchange { heavy, partner, given, taken };
                    if let Some(after) = self.step_after(&exchange, &others)
                        && after < least
                    {
                        (best, least) = (Some(exchange), after);
                    }
                }
            }
        }
        best
    }

    /// Time of the step after an exchange; none if there is no room for it.
    #[inline]
    fn step_after(&self, exchange: &Exchange, others: &[f64]) -> Option<f64> {
        let &Exchange { heavy, partner, given, taken } = exchange;
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

    fn apply(&mut self, exchange: &Exchange) {
        let &Exchange { heavy, partner, given, taken } = exchange;
        self.hand_over(given, heavy, partner);
        if let Some(taken) = taken {
            self.hand_over(taken, partner, heavy);
        }
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

    /// The contents, put into micro-batches in the order of documents.
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
