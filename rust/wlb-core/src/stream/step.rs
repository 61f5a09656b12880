//! Makes one step of a packer: chooses the documents that leave and places them.

use crate::cost::DocumentCosts;
use crate::longest_first::longest_first_of;
use crate::packing::methods::columns::{Placed, Priced};
use crate::packing::methods::refined::refine;
use crate::packing::options::Method;
use crate::packing::plan::Packing;
use crate::ranks::arrange;

use super::config::{PackerConfig, Release, StreamMethod};
use super::fill_up::fill_up;
use super::packer::Packer;
use super::queue::Waiting;
use super::release_adaptive::{self, Tried};

/// Reason for a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// Documents came, and more may come.
    Push { min_step_tokens: i64 },
    /// The stream has ended, so no document waits for others of its size.
    Drain,
}

/// The documents of one step in the order carried over, released, new.
pub(super) struct Batch {
    pub(super) pieces: Vec<Waiting>,
    pub(super) carried: usize,
    pub(super) released: usize,
}

impl Batch {
    pub(super) fn starting_with(carried: Vec<Waiting>) -> Self {
        Self { carried: carried.len(), released: 0, pieces: carried }
    }
}

/// The order in which the documents of a step are tried.
struct Order<'a> {
    priced: &'a Priced<'a>,
    carried: usize,
    /// For each document, whether it was released and is due by `max_delay`.
    is_due: Vec<bool>,
    /// Carried documents in their order, then due documents, longest first.
    urgent: Vec<usize>,
}

impl<'a> Order<'a> {
    fn new(priced: &'a Priced<'a>, carried: usize, is_due: Vec<bool>) -> Self {
        let due = (carried..is_due.len()).filter(|&index| is_due[index]);
        let due = longest_first_of(due.map(|index| (index, priced.lengths[index]))).map(|(_, index)| index);
        let urgent = (0..carried).chain(due).collect();
        Self { priced, carried, is_due, urgent }
    }

    /// The first documents of `urgent`, then all others, longest first. If only carried documents go first, the others
    /// include due documents.
    fn by_length(&self, first: usize) -> impl Iterator<Item = usize> {
        let others = self.carried..self.is_due.len();
        let others = others.filter(move |&index| first == self.carried || !self.is_due[index]);
        let others = longest_first_of(others.map(|index| (index, self.priced.lengths[index])));
        self.urgent[..first].iter().copied().chain(others.map(|(_, index)| index))
    }

    /// Order in which the first `first` documents stay first and the others come costliest first. Under a cost model
    /// the longest documents are the costliest, and lengths sort faster.
    fn by_cost(&self, first: usize) -> Vec<usize> {
        match self.priced.cost_model {
            Some(_) => self.by_length(first).collect(),
            None => self.priced.order_after(&self.urgent[..first]),
        }
    }
}

impl Packer {
    /// Packs one step of the waiting documents at the end of a stream: as many as fit, outliers too.
    ///
    /// # Returns
    /// The micro-batches of this step, empty if nothing waits; `assignment` is empty, since nothing was pushed.
    ///
    /// # Complexity
    /// The time of [`pack`](crate::pack()) for all waiting documents.
    pub fn drain(&mut self) -> Packing {
        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        self.queue.release_all(&mut batch.pieces);
        batch.released = batch.pieces.len() - batch.carried;
        let mut packing = self.pack(batch, Occasion::Drain);
        packing.assignment.clear();
        packing
    }

    /// Drains until no document waits.
    ///
    /// # Returns
    /// The packings of all steps.
    ///
    /// # Complexity
    /// The time of [`Packer::drain`] for each step.
    pub fn flush(&mut self) -> Vec<Packing> {
        std::iter::from_fn(|| (self.pending() > 0).then(|| self.drain())).collect()
    }

    /// Packs a step of these documents; documents that do not leave go back to the queue or are carried over.
    ///
    /// Carried documents go first, so that none is carried for ever: the first of them meets empty micro-batches. Then
    /// go documents that are due by `max_delay`, so that others do not crowd them out; the adaptive rule tries first
    /// whether they find room in cost order. At the end of a stream nothing is due: all documents may leave.
    pub(super) fn pack(&mut self, batch: Batch, occasion: Occasion) -> Packing {
        let Batch { pieces, carried, released } = batch;
        let lengths: Vec<i32> = pieces.iter().map(|waiting| waiting.piece.length).collect();
        let costs = self.costs_of(&pieces, &lengths);
        self.count_arrived(&pieces, &costs);
        let budget = self.arrived.budget(&self.config);
        let is_over = self.exceeds_admission(&pieces);
        let config = &self.config;
        let priced = Priced {
            lengths: &lengths,
            costs: &costs,
            num_micro_batches: config.num_micro_batches,
            max_tokens: config.max_tokens,
            max_documents: config.shape.max_documents,
            cost_model: config.cost_model.as_ref(),
        };
        let is_late =
            |waiting: &Waiting| config.max_delay.is_some_and(|delay| self.iteration - waiting.arrived >= delay);
        let may_be_due = |index: usize| occasion != Occasion::Drain && index >= carried && index < carried + released;
        let is_due = pieces.iter().enumerate().map(|(index, waiting)| may_be_due(index) && is_late(waiting));
        let order = Order::new(&priced, carried, is_due.collect());

        let may_wait = config.release == Release::Adaptive && occasion != Occasion::Drain;
        let mut placed = if may_wait {
            let after = |first: usize| order.by_cost(first);
            let tried = Tried { urgent: &order.urgent, carried, after: &after };
            release_adaptive::place(&priced, &pieces, &tried, self.iteration, budget, config).into()
        } else {
            all_placed(&order)
        };
        if let Occasion::Push { min_step_tokens } = occasion {
            placed = filled(placed, &order, min_step_tokens, may_wait);
        }
        let mut packing = {
            let placed = improved(placed, &priced, config);
            self.carried = placed.placement.leftover.iter().map(|&index| pieces[index]).collect();
            if may_wait {
                let mut waits: Vec<bool> = placed.placement.assignment.iter().map(|&at| at < 0).collect();
                placed.placement.leftover.iter().for_each(|&index| waits[index] = false);
                let held = pieces.iter().zip(waits).filter(|&(_, waits)| waits);
                held.for_each(|(&waiting, _)| self.queue.push(0, waiting));
            }
            priced.packing(placed, Some(method(config)), |index| pieces[index].piece)
        };
        (packing.ranks, packing.padding) = (config.shape.ranks, config.shape.padding.clone());
        self.iteration += 1;
        self.keep_rows();
        self.update_change(is_over);
        self.record(&packing, &pieces, &costs, occasion, budget);
        packing
    }

    /// Counts the costs of new documents, if the work of a step is bounded.
    fn count_arrived(&mut self, pieces: &[Waiting], costs: &DocumentCosts) {
        if self.config.shape.max_cost.is_some() {
            let priced = pieces.iter().zip(costs.values());
            let new = priced.filter(|(waiting, _)| waiting.arrived == self.iteration);
            self.arrived.count(new.map(|(waiting, &cost)| (waiting.piece.length, cost)), &self.config);
        }
    }

    /// Counts the step that was just made.
    fn record(
        &mut self,
        packing: &Packing,
        pieces: &[Waiting],
        costs: &DocumentCosts,
        occasion: Occasion,
        budget: f64,
    ) {
        let step = self.iteration as i64 - 1;
        let backlog = self.pending_tokens();
        let emitted = || packing.assignment.iter().enumerate().filter(|&(_, &at)| at >= 0).map(|(index, _)| index);
        let moved = emitted().map(|index| (pieces[index].piece.length, step - pieces[index].turn as i64));
        let work = match costs.columns() {
            1 => emitted().map(|index| costs.values()[index]).sum(),
            _ => packing.total_cost(),
        };
        self.metrics.record(packing, occasion == Occasion::Drain, moved, backlog, (work, budget));
    }
}

/// Places all documents that find room.
fn all_placed(order: &Order<'_>) -> Placed {
    match order.priced.cost_model {
        Some(_) => order.priced.place_in_order(order.by_length(order.urgent.len()), &[]),
        None => order.priced.place_after(&order.urgent),
    }
}

/// The step as placed, or a fuller one if it has fewer tokens than the caller wants and documents stayed behind.
fn filled(placed: Placed, order: &Order<'_>, min_step_tokens: i64, may_wait: bool) -> Placed {
    let is_full_enough = placed.placement.tokens.iter().sum::<i64>() >= min_step_tokens;
    if is_full_enough || !placed.placement.assignment.contains(&-1) {
        return placed;
    }
    // Queues promise that a document goes before those behind it; the adaptive rule promises that due documents leave.
    let due = if may_wait { order.urgent.len() } else { 0 };
    let mut placed = fill_up(placed, order.priced, &order.by_cost(order.urgent.len()), due, min_step_tokens);
    if may_wait {
        // Only urgent documents are carried over; all others return to the queue.
        let mut is_urgent = vec![false; order.is_due.len()];
        order.urgent.iter().for_each(|&index| is_urgent[index] = true);
        placed.placement.leftover.retain(|&index| is_urgent[index]);
    }
    placed
}

/// Improves the balance of a placement without changing its documents: for ranks, if the step is planned for some, else
/// by the packer's method.
fn improved(placed: Placed, priced: &Priced<'_>, config: &PackerConfig) -> Placed {
    let (lengths, costs, max_tokens) = (priced.lengths, priced.costs.values(), config.max_tokens);
    if config.shape.is_arranged() {
        let (ranks, max_documents) = (config.shape.ranks, config.shape.max_documents);
        return arrange(placed.placement, lengths, costs, max_tokens, max_documents, ranks).into();
    }
    match (config.method, priced.cost_model) {
        (StreamMethod::VarLength, Some(_)) => placed,
        (StreamMethod::VarLength, None) => priced.level(placed),
        (StreamMethod::Refined, Some(_)) => refine(placed.placement, lengths, costs, max_tokens).into(),
        (StreamMethod::Refined, None) => priced.refine_from(placed),
    }
}

/// The packer's method as a method of [`pack`](crate::pack()).
fn method(config: &PackerConfig) -> Method {
    match config.method {
        StreamMethod::VarLength => Method::VarLength,
        StreamMethod::Refined => Method::Refined,
    }
}
