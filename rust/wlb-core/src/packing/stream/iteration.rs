//! One iteration of a packer: of all that may leave, what does, and where it goes.

use crate::longest_first::longest_first_of;
use crate::packing::methods::columns::Priced;
use crate::packing::methods::refined::refine;
use crate::packing::options::Method;
use crate::packing::plan::Packing;
use crate::packing::ranks::arrange;

use super::config::{Release, StreamMethod};
use super::fuller::fuller;
use super::outlier_queue::Waiting;
use super::packer::Packer;
use super::release_adaptive::{self, Tried};
use super::shape::StepShape;

/// Why an iteration is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// Documents came, or may come yet.
    Push { min_step_tokens: i64 },
    /// None will come: nothing waits for company.
    Drain,
}

/// The documents of one iteration in listing order: carried over, released, new.
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

impl Packer {
    /// What is carried over goes first, so that nothing is carried for ever: the first of it meets empty micro-batches.
    /// Then what is due by `max_delay`, so that it is not crowded out; the adaptive rule tries first whether that finds
    /// room in its place. At the end of a stream nothing is due: all of it leaves.
    pub(super) fn pack(&mut self, batch: Batch, occasion: Occasion) -> Packing {
        let Batch { pieces, carried, released } = batch;
        let lengths: Vec<i32> = pieces.iter().map(|waiting| waiting.piece.length).collect();
        let costs = self.costs_of(&pieces, &lengths);
        if self.config.shape.max_cost.is_some() {
            let priced = pieces.iter().zip(costs.values());
            let new = priced.filter(|(waiting, _)| waiting.arrived == self.iteration);
            self.arrived.count(new.map(|(waiting, &cost)| (waiting.piece.length, cost)), &self.config);
        }
        let config = &self.config;
        let budget = self.arrived.budget(config);
        let priced = Priced {
            lengths: &lengths,
            costs: &costs,
            num_micro_batches: config.num_micro_batches,
            max_tokens: config.max_tokens,
            max_documents: config.shape.max_documents,
            cost_model: config.cost_model.as_ref(),
        };
        let due = |index: usize| {
            let waited = self.iteration - pieces[index].arrived;
            occasion != Occasion::Drain && config.max_delay.is_some_and(|delay| waited >= delay)
        };
        let first_new = carried + released;
        let of_length = |index: usize| (index, lengths[index]);
        let overdue = longest_first_of((carried..first_new).filter(|&index| due(index)).map(of_length));
        let urgent: Vec<usize> = (0..carried).chain(overdue.map(|(_, index)| index)).collect();
        // Under a cost model the longest are the costliest, and lengths sort faster.
        let by_length = |first: usize| {
            let others =
                (carried..pieces.len()).filter(move |&index| first == carried || index >= first_new || !due(index));
            urgent[..first].iter().copied().chain(longest_first_of(others.map(of_length)).map(|(_, index)| index))
        };
        let after = |first: usize| match config.cost_model {
            Some(_) => by_length(first).collect(),
            None => priced.order_after(&urgent[..first]),
        };
        let adaptive = config.release == Release::Adaptive && occasion != Occasion::Drain;
        let mut placed = if adaptive {
            let tried = Tried { urgent: &urgent, carried, after: &after };
            release_adaptive::place(&priced, &pieces, &tried, self.iteration, budget, config).into()
        } else if config.cost_model.is_some() {
            priced.place_in_order(by_length(urgent.len()), &[])
        } else {
            priced.place_after(&urgent)
        };
        if let Occasion::Push { min_step_tokens } = occasion
            && placed.placement.tokens.iter().sum::<i64>() < min_step_tokens
            && placed.placement.assignment.contains(&-1)
        {
            placed = fuller(placed, &priced, &after(urgent.len()), min_step_tokens);
            if adaptive {
                // Only what had to leave is carried over; all others wait in the queue.
                let mut is_urgent = vec![false; pieces.len()];
                urgent.iter().for_each(|&index| is_urgent[index] = true);
                placed.placement.leftover.retain(|&index| is_urgent[index]);
            }
        }

        let method = match config.method {
            StreamMethod::VarLength => Method::VarLength,
            StreamMethod::Refined => Method::Refined,
        };
        let StepShape { ranks, max_documents, ref padding, .. } = config.shape;
        if config.shape.is_arranged() {
            // Documents are exchanged here, by either method.
            placed =
                arrange(placed.placement, &lengths, costs.values(), config.max_tokens, max_documents, ranks).into();
        } else {
            placed = match (method, &config.cost_model) {
                (Method::Refined, Some(_)) => {
                    refine(placed.placement, &lengths, costs.values(), config.max_tokens).into()
                }
                (Method::Refined, None) => priced.refine_from(placed),
                (Method::VarLength, None) => priced.level(placed),
                _ => placed,
            };
        }

        self.carried = placed.placement.leftover.iter().map(|&index| pieces[index]).collect();
        let assignment = &placed.placement.assignment;
        let piece = |index: usize| pieces[index].piece;
        if adaptive {
            let mut waits: Vec<bool> = assignment.iter().map(|&micro_batch| micro_batch < 0).collect();
            placed.placement.leftover.iter().for_each(|&index| waits[index] = false);
            let held = pieces.iter().zip(waits).filter(|&(_, waits)| waits);
            held.for_each(|(&waiting, _)| self.queue.push(0, waiting));
        }
        let mut packing = priced.packing(placed, Some(method), piece);
        (packing.ranks, packing.padding) = (ranks, padding.clone());
        let now = self.iteration as i64;
        self.iteration += 1;
        self.keep_rows();
        let backlog = self.pending_tokens();
        let emitted = pieces.iter().zip(&packing.assignment).filter(|&(_, &micro_batch)| micro_batch >= 0);
        let moved = emitted.map(|(waiting, _)| (waiting.piece.length, now - waiting.turn as i64));
        let placed = costs.values().iter().zip(&packing.assignment).filter(|&(_, &micro_batch)| micro_batch >= 0);
        let work = if costs.columns() == 1 { placed.map(|(cost, _)| cost).sum() } else { packing.total_cost() };
        self.metrics.record(&packing, occasion == Occasion::Drain, moved, backlog, (work, budget));
        packing
    }
}
