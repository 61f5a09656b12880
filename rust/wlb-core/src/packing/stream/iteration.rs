//! One iteration of a packer: of all that may leave, what does, and where it goes.

use crate::interrupt::check;
use crate::longest_first::longest_first_of;
use crate::packing::methods::minimax::even_out;
use crate::packing::methods::refined::refine;
use crate::packing::options::Method;
use crate::packing::plan::Packing;

use super::config::{Release, StreamMethod};
use super::fuller::fuller;
use super::outlier_queue::Waiting;
use super::packer::Packer;
use super::{release_adaptive, release_fifo};

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
    /// Then what is due by `max_delay`, so that it is not crowded out.
    pub(super) fn pack(&mut self, batch: Batch, occasion: Occasion) -> Packing {
        let Batch { pieces, carried, released } = batch;
        let config = &self.config;
        let due = |index: usize| {
            let waited = self.iteration - pieces[index].arrived;
            config.max_delay.is_some_and(|delay| waited >= delay)
        };
        let first_new = carried + released;
        let of_length = |index: usize| (index, pieces[index].piece.length);
        let overdue = longest_first_of((carried..first_new).filter(|&index| due(index)).map(of_length));
        let urgent: Vec<usize> = (0..carried).chain(overdue.map(|(_, index)| index)).collect();
        let others = || {
            let others = (carried..pieces.len()).filter(|&index| index >= first_new || !due(index));
            longest_first_of(others.map(of_length)).map(|(_, index)| index)
        };
        let adaptive = config.release == Release::Adaptive && occasion != Occasion::Drain;
        let mut placement = if adaptive {
            release_adaptive::place(&pieces, &urgent, self.iteration, config)
        } else {
            release_fifo::place(&pieces, urgent.iter().copied().chain(others()), config)
        };
        if let Occasion::Push { min_step_tokens } = occasion
            && placement.tokens.iter().sum::<i64>() < min_step_tokens
            && placement.assignment.contains(&-1)
        {
            let order: Vec<usize> = urgent.iter().copied().chain(others()).collect();
            placement = fuller(placement, &pieces, &order, min_step_tokens, config);
            if adaptive {
                // Only what had to leave is carried over; all others wait in the queue.
                let mut is_urgent = vec![false; pieces.len()];
                urgent.iter().for_each(|&index| is_urgent[index] = true);
                placement.leftover.retain(|&index| is_urgent[index]);
            }
        }

        check();
        let lengths = || pieces.iter().map(|waiting| waiting.piece.length).collect::<Vec<i32>>();
        let (method, mut placement) = match config.method {
            StreamMethod::VarLength => (Method::VarLength, placement),
            StreamMethod::Refined => {
                let lengths = lengths();
                let costs = config.cost_model.costs(&lengths);
                (Method::Refined, refine(placement, &lengths, &costs, config.max_tokens))
            }
        };
        if config.cost_model.is_range() {
            placement = even_out(placement, &lengths(), &config.cost_model, config.max_tokens);
        }

        self.carried = placement.leftover.iter().map(|&index| pieces[index]).collect();
        let assignment = &placement.assignment;
        let emitted = pieces.iter().zip(assignment).filter(|&(_, &micro_batch)| micro_batch >= 0);
        let delays: Vec<(i32, u64)> =
            emitted.map(|(waiting, _)| (waiting.piece.length, self.iteration - waiting.arrived)).collect();
        let piece = |index: usize| pieces[index].piece;
        if adaptive {
            let mut waits: Vec<bool> = assignment.iter().map(|&micro_batch| micro_batch < 0).collect();
            placement.leftover.iter().for_each(|&index| waits[index] = false);
            let held = pieces.iter().zip(waits).filter(|&(_, waits)| waits);
            held.for_each(|(&waiting, _)| self.queue.push(0, waiting));
        }
        let packing = placement
            .into_packing(Some(method), config.max_tokens, &config.cost_model, piece)
            .scored(&config.cost_model);
        self.iteration += 1;
        let backlog = self.pending_tokens();
        self.metrics.record(&packing, occasion == Occasion::Drain, delays.into_iter(), backlog);
        packing
    }
}
