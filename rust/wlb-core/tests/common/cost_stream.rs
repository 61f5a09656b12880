//! A stream whose documents bring their costs: the specification, written out.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use wlb_core::packing::Piece;
use wlb_core::stream::{Oversize, PackerConfig, Release, StreamMethod};

use super::columns::{Batch, Plan};
use super::naive;

/// A piece that waits, with what it costs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Waiting {
    pub(crate) piece: Piece,
    pub(crate) arrived: u64,
    pub(crate) costs: Vec<f64>,
}

/// What leaves in a step.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) micro_batches: Vec<Vec<Piece>>,
    /// Of each micro-batch, column by column.
    pub(crate) loads: Vec<Vec<f64>>,
    pub(crate) leftover: Vec<Piece>,
    pub(crate) fallbacks: usize,
}

/// The packer.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) config: PackerConfig,
    pub(crate) iteration: u64,
    pub(crate) next_id: i64,
    pub(crate) queues: Vec<Vec<Waiting>>,
    pub(crate) carried: Vec<Waiting>,
    arrived: naive::Arrived,
}

impl Stream {
    pub(crate) fn new(config: PackerConfig) -> Self {
        let levels = if config.release == Release::Adaptive { 1 } else { config.outlier_thresholds.len() };
        let (queues, carried, arrived) = (vec![Vec::new(); levels], Vec::new(), naive::Arrived::default());
        Self { config, iteration: 0, next_id: 0, queues, carried, arrived }
    }

    pub(crate) fn pending(&self) -> Vec<Waiting> {
        self.queues.iter().flatten().chain(&self.carried).cloned().collect()
    }

    fn level(&self, length: i32) -> Option<usize> {
        let threshold = |level: usize| self.config.outlier_thresholds.get(level).copied().unwrap_or(1);
        (0..self.queues.len()).rev().find(|&level| length >= threshold(level))
    }

    /// The pieces that a document becomes, each with its share of the costs.
    pub(crate) fn pieces(&self, document: Piece, costs: &[f64]) -> Vec<(Piece, Vec<f64>)> {
        let limit = self.config.max_document_tokens;
        let pieces = match self.config.oversize {
            Oversize::Split => naive::split(document, limit),
            _ => vec![Piece { length: document.length.min(limit), ..document }],
        };
        let share = |piece: &Piece| f64::from(piece.length) / f64::from(document.length);
        pieces.iter().map(|piece| (*piece, costs.iter().map(|cost| cost * share(piece)).collect())).collect()
    }

    pub(crate) fn push(&mut self, documents: &[(i32, Vec<f64>)], min_step_tokens: i64) -> Step {
        let t = self.iteration;
        let mut new = Vec::new();
        for (length, costs) in documents {
            let document = Piece { id: self.next_id, start: 0, length: *length };
            self.next_id += 1;
            for (piece, costs) in self.pieces(document, costs) {
                let waiting = Waiting { piece, arrived: t, costs };
                match self.level(piece.length) {
                    Some(level) => self.queues[level].push(waiting),
                    None => new.push(waiting),
                }
            }
        }
        let mut released: Vec<Waiting> = Vec::new();
        let (n, max_delay) = (self.config.num_micro_batches, self.config.max_delay);
        for queue in &mut self.queues {
            if self.config.release == Release::Adaptive {
                released.append(queue);
            }
            while queue.len() >= n {
                released.extend(queue.drain(..n));
            }
            while queue.first().is_some_and(|first| max_delay.is_some_and(|delay| t - first.arrived >= delay)) {
                released.push(queue.remove(0));
            }
        }
        let of = |all: &[Waiting]| all.iter().map(|waiting| i64::from(waiting.piece.length)).sum::<i64>();
        while self.config.release == Release::Fifo && of(&self.carried) + of(&released) + of(&new) < min_step_tokens {
            let fronts = (0..self.queues.len()).filter_map(|level| Some((self.queues[level].first()?.arrived, level)));
            let Some((_, level)) = fronts.min() else { break };
            released.push(self.queues[level].remove(0));
        }
        self.step(released, new, Some(min_step_tokens))
    }

    pub(crate) fn flush(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        while !self.pending().is_empty() {
            let released = self.queues.iter_mut().flat_map(std::mem::take).collect();
            steps.push(self.step(released, Vec::new(), None));
        }
        steps
    }

    fn step(&mut self, released: Vec<Waiting>, new: Vec<Waiting>, min_step_tokens: Option<i64>) -> Step {
        let config = &self.config;
        let carried = std::mem::take(&mut self.carried);
        let (first_released, first_new) = (carried.len(), carried.len() + released.len());
        let listing: Vec<Waiting> = [carried, released, new].concat();
        let lengths: Vec<i32> = listing.iter().map(|waiting| waiting.piece.length).collect();

        let flushed = min_step_tokens.is_none();
        let waited = |i: &usize| self.iteration - listing[*i].arrived;
        let due = |i: &usize| !flushed && config.max_delay.is_some_and(|delay| waited(i) >= delay);
        let mut overdue: Vec<usize> = (first_released..first_new).filter(due).collect();
        overdue.sort_by_key(|&i| (-lengths[i], i));
        let urgent: Vec<usize> = (0..first_released).chain(overdue).collect();

        let limits = config.limits.as_ref().unwrap();
        let batch = Batch {
            lengths: lengths.clone(),
            costs: listing.iter().map(|waiting| waiting.costs.clone()).collect(),
            limits: limits.iter().map(|limit| limit.unwrap_or(f64::INFINITY)).collect(),
            micro_batches: config.num_micro_batches,
            max_tokens: config.max_tokens,
        };
        let tried = batch.tried(&urgent);
        let mut plan = match (config.release, min_step_tokens) {
            (Release::Adaptive, Some(tokens)) => {
                let new = listing.iter().filter(|waiting| waiting.arrived == self.iteration);
                let new: Vec<(i32, f64)> = new.map(|waiting| (waiting.piece.length, waiting.costs[0])).collect();
                let budget = self.arrived.budget(&new, config);
                self.adaptive(&batch, &listing, urgent.split_at(first_released), &tried, tokens, budget)
            }
            (_, tokens) => {
                let plan = batch.var_length_after(&urgent);
                if limits.len() > 1 {
                    batch.fill_up(plan, &urgent, tokens.unwrap_or(0))
                } else {
                    of_naive(
                        &batch,
                        naive::fill_up(
                            to_naive(&batch, &listing, plan),
                            &pieces(&listing),
                            &tried,
                            &[],
                            tokens.unwrap_or(0),
                            config,
                            &one_column(&batch),
                        ),
                        &listing,
                    )
                }
            }
        };
        plan = match config.method {
            StreamMethod::VarLength => batch.levelled(&plan),
            StreamMethod::Refined => batch.refined(&plan),
        };

        if config.release == Release::Adaptive && min_step_tokens.is_some() {
            let waits = |i: &usize| plan.assignment[*i].is_none() && !plan.leftover.contains(i);
            self.queues = vec![(0..listing.len()).filter(waits).map(|i| listing[i].clone()).collect()];
        }
        self.carried = plan.leftover.iter().map(|&i| listing[i].clone()).collect();
        self.iteration += 1;
        let inside = |j: usize| {
            (0..listing.len()).filter(|&i| plan.assignment[i] == Some(j)).map(|i| listing[i].piece).collect()
        };
        Step {
            micro_batches: (0..batch.micro_batches).map(inside).collect(),
            loads: plan.loads.clone(),
            leftover: plan.leftover.iter().map(|&i| listing[i].piece).collect(),
            fallbacks: plan.fallbacks,
        }
    }

    /// One column: the release rule of the packer that prices by length, told these costs.
    fn adaptive(
        &self,
        batch: &Batch,
        listing: &[Waiting],
        (carried, due): (&[usize], &[usize]),
        tried: &[usize],
        min_tokens: i64,
        budget: f64,
    ) -> Plan {
        let waiting: Vec<naive::Waiting> =
            listing.iter().map(|w| naive::Waiting { piece: w.piece, arrived: w.arrived, turn: w.arrived }).collect();
        let (costs, by_cost) = (one_column(batch), &batch.tried(carried)[carried.len()..]);
        let plan = naive::adaptive(&waiting, carried, due, by_cost, self.iteration, budget, &self.config, &costs);
        let urgent = [carried, due].concat();
        let plan = naive::fill_up(plan, &pieces(listing), tried, &urgent, min_tokens, &self.config, &costs);
        let mut plan = of_naive(batch, plan, listing);
        plan.leftover.retain(|i| carried.contains(i) || due.contains(i));
        plan
    }
}

fn pieces(listing: &[Waiting]) -> Vec<Piece> {
    listing.iter().map(|waiting| waiting.piece).collect()
}

fn one_column(batch: &Batch) -> naive::Costs {
    naive::Costs { of: batch.costs.iter().map(|row| row[0]).collect(), empty: 0.0 }
}

fn of_naive(batch: &Batch, plan: naive::Plan, listing: &[Waiting]) -> Plan {
    let place_of = |piece: &Piece| listing.iter().position(|waiting| waiting.piece == *piece).unwrap();
    assert_eq!(plan.costs.len(), batch.micro_batches);
    Plan {
        assignment: plan.assignment.iter().map(|&j| usize::try_from(j).ok()).collect(),
        loads: plan.costs.iter().map(|&cost| vec![cost]).collect(),
        leftover: plan.leftover.iter().map(place_of).collect(),
        fallbacks: plan.length_fallbacks,
    }
}

fn to_naive(batch: &Batch, listing: &[Waiting], plan: Plan) -> naive::Plan {
    naive::Plan {
        micro_batches: vec![Vec::new(); batch.micro_batches],
        assignment: plan.assignment.iter().map(|j| j.map_or(-1, |j| j as i32)).collect(),
        tokens: (0..batch.micro_batches).map(|j| batch.tokens(&plan, j)).collect(),
        costs: plan.loads.iter().map(|load| load[0]).collect(),
        leftover: plan.leftover.iter().map(|&i| listing[i].piece).collect(),
        length_fallbacks: plan.fallbacks,
    }
}
