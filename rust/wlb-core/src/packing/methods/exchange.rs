//! Documents exchanged between two micro-batches, so that the heaviest becomes lighter.

use crate::ladder::Ladder;
use crate::packing::placement::Placement;

use super::documents::Documents;

/// Most binary searches for the last document of an exchange: a few hundred microseconds.
const SEARCHES: usize = 4096;

/// Lowers the maximum cost, as far as exchanges between the heaviest micro-batch and one other do.
///
/// The heaviest gives one document for at most one, or, where no partner has such an exchange, up to two for up to two.
/// Partners are tried from the lightest on: the first that has an exchange after which both cost less than the heaviest
/// did gets its best one. So the costs, sorted from the heaviest on, only descend, and this ends: where no exchange is
/// left, where the maximum is `low_enough`, or after [`SEARCHES`].
///
/// `None` if there is no such exchange.
///
/// # Complexity
/// O(n), at most [`SEARCHES`] binary searches in the documents of a micro-batch (and one document's more), O(N) an
/// exchange.
pub(super) fn exchange(documents: &Documents, start: &Placement, low_enough: f64) -> Option<Placement> {
    let mut contents = Contents::new(documents, start);
    let mut searches = 0;
    let mut improved = false;
    while let heaviest = contents.by_cost.heaviest()
        && contents.costs[heaviest] > low_enough
        && let Some((partner, exchange)) = contents.find(heaviest, &mut searches)
    {
        contents.apply(heaviest, partner, &exchange);
        improved = true;
    }
    improved.then(|| contents.into_placement(start))
}

/// A document by its place among all, longest first. The last rank is no document: 0 tokens that cost nothing.
type Rank = u32;

/// What goes from the heaviest micro-batch to its partner, what comes back, and what both cost then.
struct Exchange {
    given: [Rank; 2],
    taken: [Rank; 2],
    costs: [f64; 2],
}

/// What is in each micro-batch, in the order that searches need.
struct Contents<'a> {
    documents: &'a Documents<'a>,
    /// Tokens and cost by rank.
    length: Vec<i64>,
    cost: Vec<f64>,
    /// Of each micro-batch, ascending; the last is no document.
    ranks: Vec<Vec<Rank>>,
    tokens: Vec<i64>,
    costs: Vec<f64>,
    by_cost: Ladder,
}

impl<'a> Contents<'a> {
    fn new(documents: &'a Documents<'a>, start: &Placement) -> Self {
        let order = || documents.longest_first.iter().map(|&index| index as usize);
        let mut ranks = vec![Vec::new(); start.tokens.len()];
        for (rank, index) in order().enumerate() {
            if let Ok(j) = usize::try_from(start.assignment[index]) {
                ranks[j].push(rank as Rank);
            }
        }
        ranks.iter_mut().for_each(|ranks| ranks.push(documents.longest_first.len() as Rank));
        Self {
            documents,
            length: order().map(|index| i64::from(documents.lengths[index])).chain([0]).collect(),
            cost: order().map(|index| documents.costs[index]).chain([0.0]).collect(),
            ranks,
            tokens: start.tokens.clone(),
            costs: start.costs.clone(),
            by_cost: Ladder::new(start.costs.iter().copied()),
        }
    }

    /// The lightest partner that has an exchange, and its best one.
    fn find(&self, heaviest: usize, searches: &mut usize) -> Option<(usize, Exchange)> {
        for at_most_two in [false, true] {
            let lighter = self.by_cost.ascending().take_while(|&j| self.costs[j] < self.costs[heaviest]);
            for partner in lighter {
                if let Some(exchange) = self.best_with(heaviest, partner, at_most_two, searches) {
                    return Some((partner, exchange));
                }
            }
        }
        None
    }

    /// The exchange after which the heavier of the two costs least, the first of several.
    ///
    /// Three of the up to four documents are tried one by one; the last, once the others are chosen, is found by
    /// search: lengths say which have room on both sides, and the longer it is, the more the heavy one costs and the
    /// less its partner.
    fn best_with(&self, heavy: usize, light: usize, at_most_two: bool, searches: &mut usize) -> Option<Exchange> {
        let room = |j: usize| self.documents.max_tokens - self.tokens[j];
        let (has, offers) = (&self.ranks[heavy], &self.ranks[light]);
        let (has_none, offers_none) = (has.len() - 1, offers.len() - 1);
        let mut best = None;
        let mut least = self.costs[heavy];
        for (i, &first) in has[..has_none].iter().enumerate() {
            for &second in &has[if at_most_two { i + 1 } else { has_none }..] {
                if *searches >= SEARCHES {
                    return best;
                }
                let given = [first, second];
                let (tokens, cost) = (self.sum(&self.length, given), self.sum(&self.cost, given));
                for k in if at_most_two { 0 } else { offers_none }..offers.len() {
                    *searches += 1;
                    let third = offers[k];
                    let offered = &offers[if at_most_two { (k + 1).min(offers_none) } else { 0 }..];
                    let length = |rank: Rank| self.length[rank as usize];
                    // How many tokens may come back at most, and at least: `from <= to`, since no room is negative.
                    let lacking = tokens - length(third);
                    let from = offered.partition_point(|&rank| length(rank) > lacking + room(heavy));
                    let to = offered.partition_point(|&rank| length(rank) >= lacking - room(light));
                    let after = |rank: Rank| {
                        let moved = cost - self.sum(&self.cost, [third, rank]);
                        [self.costs[heavy] - moved, self.costs[light] + moved]
                    };
                    let legal = &offered[from..to];
                    let turn = legal.partition_point(|&rank| after(rank)[0] > after(rank)[1]);
                    for &fourth in legal.iter().take(turn + 1).skip(turn.saturating_sub(1)) {
                        let costs = after(fourth);
                        let max = costs[0].max(costs[1]);
                        if max < least {
                            least = max;
                            best = Some(Exchange { given, taken: [third, fourth], costs });
                        }
                    }
                }
            }
        }
        best
    }

    fn sum<T: Copy + std::ops::Add<Output = T>>(&self, of: &[T], ranks: [Rank; 2]) -> T {
        of[ranks[0] as usize] + of[ranks[1] as usize]
    }

    fn apply(&mut self, heavy: usize, light: usize, exchange: &Exchange) {
        self.hand_over(exchange.given, heavy, light);
        self.hand_over(exchange.taken, light, heavy);
        for (j, cost) in [heavy, light].into_iter().zip(exchange.costs) {
            self.costs[j] = cost;
            self.by_cost.set(j, cost);
        }
    }

    fn hand_over(&mut self, ranks: [Rank; 2], from: usize, to: usize) {
        let none = (self.length.len() - 1) as Rank;
        for rank in ranks.into_iter().filter(|&rank| rank != none) {
            self.ranks[from].retain(|&other| other != rank);
            let at = self.ranks[to].partition_point(|&other| other < rank);
            self.ranks[to].insert(at, rank);
            self.tokens[from] -= self.length[rank as usize];
            self.tokens[to] += self.length[rank as usize];
        }
    }

    fn into_placement(self, start: &Placement) -> Placement {
        let mut placement = start.emptied();
        placement.leftover.clone_from(&start.leftover);
        placement.length_fallbacks = start.length_fallbacks;
        for (j, ranks) in self.ranks.iter().enumerate() {
            for &rank in &ranks[..ranks.len() - 1] {
                let index = self.documents.longest_first[rank as usize] as usize;
                placement.put(index, j, self.documents.lengths[index], self.documents.costs[index]);
            }
        }
        placement
    }
}
