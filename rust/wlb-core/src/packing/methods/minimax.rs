//! Documents placed so that the imbalance is least whichever cost model of a range is the true one.

use crate::cost::CostModel;
use crate::ladder::Ladder;
use crate::longest_first::longest_first_of;
use crate::packing::placement::Placement;

/// Most searches for the other document of an exchange.
const SEARCHES: usize = 1024;
/// A load that is lower by no more than this part is lower by rounding alone: such exchanges would go round until no
/// search is left for those that help.
const ROUNDING: f64 = 1e-12;

/// The same documents in the same number of micro-batches, the worst imbalance over the models of the range no higher;
/// as it is under a single cost model.
///
/// What counts is the *load* of a micro-batch: its cost over the mean micro-batch's, under the model where that is
/// greatest. Longest first, each document goes to the least load that has room. Of that plan and of `start`, the
/// heaviest micro-batch then exchanges a document for at most one of another's, as long as both end below what the
/// heaviest was. The better plan is given, `start` of equals.
///
/// # Complexity
/// O(n M) for the costs under `M` models, a sort, on average a few steps for each document, and at most [`SEARCHES`]
/// searches in the documents of a micro-batch.
pub(in crate::packing) fn even_out(
    start: Placement,
    lengths: &[i32],
    cost_model: &CostModel,
    max_tokens: i32,
) -> Placement {
    if !cost_model.is_range() {
        return start;
    }
    let documents = Documents::new(&start, lengths, cost_model, max_tokens);
    if documents.order.is_empty() {
        return start;
    }
    let as_it_is = Loads::of(&documents, |rank| start.assignment[documents.order[rank]] as usize);
    let before = as_it_is.worst();
    let greedy = documents.greedy();
    let best = greedy
        .into_iter()
        .map(Loads::exchanged)
        .fold(as_it_is.exchanged(), |best, other| if other.worst() < best.worst() { other } else { best });
    if best.worst() < before { best.into_placement(&start, cost_model) } else { start }
}

/// What is placed, longest first, and what it weighs.
struct Documents<'a> {
    lengths: &'a [i32],
    max_tokens: i64,
    num_micro_batches: usize,
    /// Indices.
    order: Vec<usize>,
    models: usize,
    /// By rank in `order` and model: cost over that of the mean micro-batch. The last rank is no document.
    shares: Vec<f64>,
    /// By model: that of an empty micro-batch.
    empty: Vec<f64>,
}

impl<'a> Documents<'a> {
    fn new(start: &Placement, lengths: &'a [i32], cost_model: &CostModel, max_tokens: i32) -> Self {
        let placed = start.assignment.iter().enumerate().filter(|&(_, &micro_batch)| micro_batch >= 0);
        let order: Vec<usize> =
            longest_first_of(placed.map(|(index, _)| (index, lengths[index]))).map(|(_, index)| index).collect();
        let (num_micro_batches, models) = (start.tokens.len(), cost_model.models().len());
        let mut shares = vec![0.0; (order.len() + 1) * models];
        let mut empty = Vec::with_capacity(models);
        let of_placed: Vec<i32> = order.iter().map(|&index| lengths[index]).collect();
        for (m, model) in cost_model.models().iter().enumerate() {
            let costs = model.costs(&of_placed);
            let mean = model.micro_batch() + costs.iter().sum::<f64>() / num_micro_batches as f64;
            for (rank, cost) in costs.into_iter().enumerate() {
                shares[rank * models + m] = cost / mean;
            }
            empty.push(model.micro_batch() / mean);
        }
        Self { lengths, max_tokens: i64::from(max_tokens), num_micro_batches, order, models, shares, empty }
    }

    fn none(&self) -> usize {
        self.order.len()
    }

    fn share(&self, rank: usize) -> &[f64] {
        &self.shares[rank * self.models..(rank + 1) * self.models]
    }

    fn length(&self, rank: usize) -> i64 {
        self.order.get(rank).map_or(0, |&index| i64::from(self.lengths[index]))
    }

    /// Longest first, each to the least load that has room; none if a document finds none.
    fn greedy(&self) -> Option<Loads<'_>> {
        let mut loads = Loads::empty(self);
        let mut by_load = Ladder::new(loads.worst.iter().copied());
        for rank in 0..self.order.len() {
            let micro_batch = by_load.ascending().find(|&j| loads.room(j) >= self.length(rank))?;
            loads.put(rank, micro_batch);
            by_load.set(micro_batch, loads.worst[micro_batch]);
        }
        Some(loads)
    }
}

/// What every micro-batch holds.
struct Loads<'a> {
    documents: &'a Documents<'a>,
    /// Ranks of each micro-batch, ascending.
    ranks: Vec<Vec<usize>>,
    tokens: Vec<i64>,
    /// By micro-batch and model.
    loads: Vec<f64>,
    /// The greatest over the models.
    worst: Vec<f64>,
}

/// What goes from the heaviest micro-batch to another, and what comes back; the last rank is no document.
struct Exchange {
    partner: usize,
    given: usize,
    taken: usize,
}

impl<'a> Loads<'a> {
    fn empty(documents: &'a Documents<'a>) -> Self {
        let count = documents.num_micro_batches;
        let least = documents.empty.iter().copied().fold(0.0, f64::max);
        Self {
            documents,
            ranks: vec![Vec::new(); count],
            tokens: vec![0; count],
            loads: documents.empty.repeat(count),
            worst: vec![least; count],
        }
    }

    fn of(documents: &'a Documents<'a>, micro_batch: impl Fn(usize) -> usize) -> Self {
        let mut loads = Self::empty(documents);
        (0..documents.order.len()).for_each(|rank| loads.put(rank, micro_batch(rank)));
        loads
    }

    fn put(&mut self, rank: usize, micro_batch: usize) {
        self.ranks[micro_batch].push(rank);
        self.tokens[micro_batch] += self.documents.length(rank);
        let models = self.documents.models;
        let loads = &mut self.loads[micro_batch * models..(micro_batch + 1) * models];
        let mut worst = 0.0_f64;
        for (load, share) in loads.iter_mut().zip(self.documents.share(rank)) {
            *load += share;
            worst = worst.max(*load);
        }
        self.worst[micro_batch] = worst;
    }

    fn room(&self, micro_batch: usize) -> i64 {
        self.documents.max_tokens - self.tokens[micro_batch]
    }

    /// The imbalance, under the model where it is worst.
    fn worst(&self) -> f64 {
        self.worst.iter().copied().fold(0.0, f64::max)
    }

    /// The load of a micro-batch that gave one rank and got another.
    fn after(&self, micro_batch: usize, given: usize, taken: usize) -> f64 {
        let models = self.documents.models;
        let loads = &self.loads[micro_batch * models..(micro_batch + 1) * models];
        let shares = self.documents.share(given).iter().zip(self.documents.share(taken));
        loads.iter().zip(shares).map(|(load, (given, taken))| load - given + taken).fold(0.0, f64::max)
    }

    /// Exchanges until none helps, or the searches are used up.
    fn exchanged(mut self) -> Self {
        let mut searches = 0;
        let mut by_load = Ladder::new(self.worst.iter().copied());
        while let heaviest = by_load.heaviest()
            && let Some(exchange) = self.find(heaviest, &by_load, &mut searches)
        {
            let Exchange { partner, given, taken } = exchange;
            self.move_rank(given, heaviest, partner);
            self.move_rank(taken, partner, heaviest);
            for j in [heaviest, partner] {
                self.sum_anew(j);
                by_load.set(j, self.worst[j]);
            }
        }
        self
    }

    /// Of the lightest partner that has one, the exchange after which the heavier of the two is lightest.
    fn find(&self, heaviest: usize, by_load: &Ladder, searches: &mut usize) -> Option<Exchange> {
        by_load.ascending().filter(|&j| self.worst[j] < self.worst[heaviest]).find_map(|partner| {
            let mut least = self.worst[heaviest] * (1.0 - ROUNDING);
            let mut best = None;
            for &given in &self.ranks[heaviest] {
                if *searches >= SEARCHES {
                    break;
                }
                *searches += 1;
                let (taken, load) = self.answer(heaviest, partner, given);
                if load < least {
                    least = load;
                    best = Some(Exchange { partner, given, taken });
                }
            }
            best
        })
    }

    /// What comes back best for a document, and the load of the heavier of the two then.
    ///
    /// Longer documents cost more under every model: the longer it is, the more the heaviest has and the less its
    /// partner, so that the best is where the one passes the other.
    fn answer(&self, heaviest: usize, partner: usize, given: usize) -> (usize, f64) {
        let documents = self.documents;
        let offers = &self.ranks[partner];
        let rank = |at: usize| offers.get(at).copied().unwrap_or(documents.none());
        let length = documents.length(given);
        // Of no more tokens than the heaviest has room for, and no fewer than the partner lacks.
        let first = offers.partition_point(|&rank| documents.length(rank) > length + self.room(heaviest));
        let lacking = length - self.room(partner);
        let end = offers.partition_point(|&rank| documents.length(rank) >= lacking) + usize::from(lacking <= 0);
        let loads = |at: usize| {
            let taken = rank(at);
            (self.after(heaviest, given, taken), self.after(partner, taken, given))
        };
        let (mut low, mut high) = (first, end.max(first));
        while low < high {
            let middle = low.midpoint(high);
            let (mine, other) = loads(middle);
            if mine > other { low = middle + 1 } else { high = middle }
        }
        let around = (low.saturating_sub(1).max(first)..end).take(2);
        let load = |at: usize| {
            let (mine, other) = loads(at);
            mine.max(other)
        };
        around.fold((documents.none(), f64::INFINITY), |best, at| {
            let load = load(at);
            if load < best.1 { (rank(at), load) } else { best }
        })
    }

    fn move_rank(&mut self, rank: usize, from: usize, to: usize) {
        if rank == self.documents.none() {
            return;
        }
        self.ranks[from].retain(|&other| other != rank);
        let at = self.ranks[to].partition_point(|&other| other < rank);
        self.ranks[to].insert(at, rank);
    }

    /// So that exchanges do not add up rounding.
    fn sum_anew(&mut self, micro_batch: usize) {
        let models = self.documents.models;
        let ranks = std::mem::take(&mut self.ranks[micro_batch]);
        self.loads[micro_batch * models..(micro_batch + 1) * models].copy_from_slice(&self.documents.empty);
        self.tokens[micro_batch] = 0;
        self.worst[micro_batch] = self.documents.empty.iter().copied().fold(0.0, f64::max);
        ranks.into_iter().for_each(|rank| self.put(rank, micro_batch));
    }

    fn into_placement(self, start: &Placement, cost_model: &CostModel) -> Placement {
        let mut placement = start.emptied();
        placement.leftover.clone_from(&start.leftover);
        placement.length_fallbacks = start.length_fallbacks;
        for (j, ranks) in self.ranks.iter().enumerate() {
            for &rank in ranks {
                let index = self.documents.order[rank];
                let length = self.documents.lengths[index];
                placement.put(index, j, length, cost_model.cost(length));
            }
        }
        placement
    }
}
