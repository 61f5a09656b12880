//! A search for the plan of a step: solutions for numbers of micro-batches and sizes of blocks, and the best of them.

use std::rc::Rc;

use crate::error::Result;
use crate::pipeline::{Buffers, Pipeline, Times};

use super::bound;
use super::counts::{note, price};
use super::demand::Demand;
use super::draft::Draft;
use super::memory;
use super::options::DynamicCpOptions;
use super::problem::Problem;
use super::refine::Refined;
use super::relaxed::Relaxed;
use super::shape;
use super::simulate;
use super::solver::Late;

/// Steps towards the best targets, of every number of micro-batches.
const FIRST_STEPS: usize = 6;
/// Promises that differ less are of the same problem.
pub(super) const SAME: f64 = 1e-9;
/// So few documents are moved between micro-batches, one by one, in as many of the best plans, and so often at most in
/// each.
pub(super) const SMALL: usize = 64;
const FINALISTS: usize = 4;
const TRIES: usize = 512;
/// Most ops that steps towards the best targets simulate: fewer steps for larger pipelines.
const MAX_OPS: usize = 1 << 16;

/// A number of micro-batches, and what each of them should take.
pub(super) struct Candidate {
    pub(super) num_micro_batches: usize,
    pub(super) relaxed: Relaxed,
}

/// The best so far.
#[derive(Clone)]
pub(super) struct Best {
    pub(super) num_micro_batches: usize,
    pub(super) draft: Draft,
    /// Which micro-batch of the draft comes when.
    pub(super) order: Vec<usize>,
    pub(super) seconds: f64,
}

impl Best {
    pub(super) fn price(&self, options: &DynamicCpOptions) -> f64 {
        price(options, self.num_micro_batches, self.seconds)
    }
}

/// What was found so far, and what the next solution needs.
pub(super) struct Search<'a> {
    pub(super) problem: &'a Problem,
    pub(super) options: &'a DynamicCpOptions,
    pub(super) best: Option<Best>,
    pub(super) sweep: Vec<(usize, f64)>,
    pipelines: Vec<(usize, Rc<Pipeline>)>,
    buffers: Buffers,
    /// Where exchange costs.
    pub(super) demand: Option<Demand>,
    /// What each number of micro-batches promised with the gain before.
    pub(super) promises: Vec<(usize, f64)>,
    /// The problem and the size of blocks that suited the best so far.
    pub(super) suited: Option<(&'a Problem, usize)>,
    /// The least price with the problem at hand, and the size of blocks that gave it.
    pub(super) fitting: Option<(f64, usize)>,
    /// The best of each number of micro-batches, of few documents.
    pub(super) others: Vec<Best>,
    /// A solution is given up if its price is above this.
    pub(super) limit: f64,
}

impl<'a> Search<'a> {
    pub(super) fn new(problem: &'a Problem, options: &'a DynamicCpOptions) -> Self {
        let (sweep, promises, buffers) = (Vec::new(), Vec::new(), Buffers::default());
        let (suited, fitting, others, pipelines) = (None, None, Vec::new(), Vec::new());
        Self {
            problem,
            options,
            best: None,
            sweep,
            pipelines,
            buffers,
            demand: None,
            promises,
            suited,
            fitting,
            others,
            limit: f64::INFINITY,
        }
    }

    /// The pipeline that runs that many micro-batches: made once, unless it is large.
    pub(super) fn pipeline(&mut self, num_micro_batches: usize) -> Result<Rc<Pipeline>> {
        if let Some((_, pipeline)) = self.pipelines.iter().find(|(count, _)| *count == num_micro_batches) {
            return Ok(pipeline.clone());
        }
        let pipeline = Rc::new(Pipeline::new(&self.options.pipeline(num_micro_batches))?);
        if pipeline.num_ops() <= MAX_OPS {
            self.pipelines.push((num_micro_batches, pipeline.clone()));
        }
        Ok(pipeline)
    }

    /// Targets after a few steps, from the shape that is faster. None where even the least that any targets take is
    /// `hopeless`: its promise is that least.
    pub(super) fn candidate(&mut self, num_micro_batches: usize, hopeless: f64) -> Result<Candidate> {
        let options = self.options.pipeline(num_micro_batches);
        let pipeline = self.pipeline(num_micro_batches)?;
        let problem = self.problem;
        let begin = |shape: Vec<f64>| {
            let work = match &self.demand {
                Some(demand) => demand.work(shape.iter().sum()),
                None => problem.total_work / problem.world_size as f64,
            };
            Relaxed::new(problem, &shape, work)
        };
        let shape = |ends: f64| shape::shape(&options, ends, problem.heaviest());
        let work = problem.total_work / problem.world_size as f64;
        // Where exchange costs, documents take longer than it knows.
        let around = problem.cost.is_free().then(|| shape::around(&options, problem.longest(), work)).flatten();
        let other = around.or_else(|| shape::heavier_first(&options).map(shape));
        let (mut relaxed, other) = (begin(shape(1.0)), other.map(begin));
        let least = |relaxed: &Relaxed| bound::of_sum(relaxed.start.iter().sum(), self.options, num_micro_batches);
        let least = other.iter().map(least).fold(least(&relaxed), f64::min);
        if least * (1.0 - SAME) > hopeless {
            relaxed.seconds = least;
            return Ok(Candidate { num_micro_batches, relaxed });
        }
        self.descend(&mut relaxed, 1, &pipeline);
        if let Some(mut other) = other {
            self.descend(&mut other, 1, &pipeline);
            if other.seconds < relaxed.seconds {
                relaxed = other;
            }
        }
        self.descend(&mut relaxed, FIRST_STEPS, &pipeline);
        Ok(Candidate { num_micro_batches, relaxed })
    }

    pub(super) fn descend(&mut self, relaxed: &mut Relaxed, steps: usize, pipeline: &Pipeline) {
        let steps = steps.min(1 + MAX_OPS / pipeline.num_ops());
        relaxed.descend(steps, pipeline, self.options.p2p_seconds, &mut self.buffers);
    }

    /// The seconds of a solution, or of the part of it that made it too late; infinite if there is none.
    ///
    /// They are estimated with every rank as slow as the slowest of the micro-batch: never less than what it takes, and
    /// close where micro-batches are balanced.
    pub(super) fn solve(&mut self, candidate: &Candidate, base: usize, pipeline: &Pipeline) -> Result<f64> {
        self.solve_for(candidate, &candidate.relaxed.targets, base, pipeline)
    }

    /// The same with other targets.
    pub(super) fn solve_for(
        &mut self,
        candidate: &Candidate,
        targets: &[f64],
        base: usize,
        pipeline: &Pipeline,
    ) -> Result<f64> {
        let full = targets.iter().copied().fold(0.0, f64::max);
        self.solve_within(candidate, (targets, targets), base, full, pipeline)
    }

    /// The same where documents get larger blocks only if those of `base` take longer than `full`, and the order of
    /// micro-batches is that of another shape.
    pub(super) fn solve_within(
        &mut self,
        candidate: &Candidate,
        (targets, shape): (&[f64], &[f64]),
        base: usize,
        full: f64,
        pipeline: &Pipeline,
    ) -> Result<f64> {
        let num_micro_batches = candidate.num_micro_batches;
        let (problem, options, limit) = (self.problem, self.options, self.limit);
        let mut given_up = None;
        let mut late = |costs: &[f64]| {
            let seconds = self.timed(costs, shape, pipeline).map_or(f64::INFINITY, |timed| timed.0);
            given_up = Some(seconds).filter(|&seconds| price(options, num_micro_batches, seconds) > limit);
            given_up.is_some()
        };
        let late: Option<Late<'_>> = if limit.is_finite() { Some(&mut late) } else { None };
        let draft = problem.solve(targets, base, full, late);
        if let Some(seconds) = given_up {
            note(&mut self.sweep, num_micro_batches, seconds);
        }
        let Some(draft) = draft else { return Ok(given_up.unwrap_or(f64::INFINITY)) };
        let (seconds, order) = self.timed(&draft.costs(), shape, pipeline)?;
        if !self.fits_memory(pipeline, &draft, &order)? {
            return Ok(f64::INFINITY);
        }
        note(&mut self.sweep, num_micro_batches, seconds);
        let price = price(self.options, num_micro_batches, seconds);
        let beats = |best: &Best| (price, num_micro_batches) < (best.price(self.options), best.num_micro_batches);
        if self.fitting.is_none_or(|(least, _)| price < least) {
            self.fitting = Some((price, base));
        }
        let found = Best { num_micro_batches, draft, order, seconds };
        if self.problem.documents.len() <= SMALL {
            self.others.retain(|other| other.num_micro_batches != num_micro_batches || other.seconds < seconds);
            if self.others.iter().all(|other| other.num_micro_batches != num_micro_batches) {
                self.others.push(found.clone());
            }
        }
        if self.best.as_ref().is_none_or(beats) {
            self.best = Some(found);
            self.suited = Some((self.problem, base));
        }
        Ok(seconds)
    }

    /// Seconds of a step whose micro-batches take so much, and their order in it.
    fn timed(&mut self, costs: &[f64], shape: &[f64], pipeline: &Pipeline) -> Result<(f64, Vec<usize>)> {
        let order = shape::arrange(costs, shape);
        let p2p = [self.options.p2p_seconds];
        let times = Times::per_micro_batch(costs)?.with_p2p(&p2p)?;
        Ok((pipeline.makespan_in_order(&times, &order, &mut self.buffers), order))
    }

    /// Makes the best faster; of few documents, the best of every number of micro-batches.
    pub(super) fn refine(&mut self) -> Result<()> {
        let mut found = std::mem::take(&mut self.others);
        found.sort_by(|a, b| a.price(self.options).total_cmp(&b.price(self.options)));
        found.truncate(FINALISTS);
        let few = !found.is_empty();
        if !few {
            found.extend(self.best.clone());
        }
        let mut standing = None;
        for Best { num_micro_batches, draft, order, .. } in found {
            let pipeline = self.pipeline(num_micro_batches)?;
            let problem = self.problem;
            let mut refined = Refined::new(problem, &draft, &order);
            let order: Vec<usize> = (0..num_micro_batches).collect();
            let p2p = [self.options.p2p_seconds];
            let buffers = &mut self.buffers;
            let mut step = |costs: &[f64]| {
                let times = Times::per_micro_batch(costs).and_then(|times| times.with_p2p(&p2p));
                times.map_or(f64::INFINITY, |times| pipeline.makespan_in_order(&times, &order, buffers))
            };
            let seconds = if few { refined.improve(step, TRIES) } else { step(&refined.costs()) };
            let draft = refined.into_draft();
            let candidate = Best { num_micro_batches, draft, order, seconds };
            let beaten = |best: &Best| candidate.price(self.options) < best.price(self.options);
            let Some(best) = self.best.clone().filter(beaten) else { continue };
            // The estimate lets no group wait for another's ranks, so a plan may win by it and lose by the clock.
            let simulated = self.simulated_price(&candidate)?;
            let before = standing.map_or_else(|| self.simulated_price(&best), Ok)?;
            standing = Some(before);
            if simulated < before && self.fits_memory(&pipeline, &candidate.draft, &candidate.order)? {
                note(&mut self.sweep, num_micro_batches, seconds);
                standing = Some(simulated);
                self.best = Some(candidate);
            }
        }
        Ok(())
    }

    /// The price of a plan whose ranks wait for one another.
    pub(super) fn simulated_price(&mut self, plan: &Best) -> Result<f64> {
        let pipeline = self.pipeline(plan.num_micro_batches)?;
        let draft = plan.draft.in_order(&plan.order, &self.problem.documents);
        let seconds = simulate::simulated(&pipeline, &draft, self.options);
        Ok(price(self.options, plan.num_micro_batches, seconds))
    }

    /// Whether there is memory for a draft in that order.
    pub(super) fn fits_memory(&self, pipeline: &Pipeline, draft: &Draft, order: &[usize]) -> Result<bool> {
        memory::fits(self.options, pipeline, order.len(), || {
            let fullest = draft.fullest(&self.problem.documents, self.options.padding.as_ref());
            order.iter().map(move |&micro_batch| fullest[micro_batch])
        })
    }
}
