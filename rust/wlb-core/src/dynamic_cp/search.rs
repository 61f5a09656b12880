//! The search for the plan of a step: which numbers of micro-batches and sizes of blocks are tried, and in which order.
//! It skips those that cannot win, and keeps the best solution so far.

use std::cmp::Ordering;
use std::rc::Rc;

use crate::error::Result;
use crate::pipeline::{Buffers, Pipeline, Times};

use super::bound;
use super::counts::{Counts, limit, note, price, whole};
use super::one_size::{SMALL, in_one_size};
use super::options::DynamicCpOptions;
use super::plan::Best;
use super::problem::Problem;
use super::refine::Refined;
use super::simulate::{self, fits_memory};
use super::solver::Late;
use super::targets::{self, Demand, Relaxed};

/// Further steps towards the best targets, for numbers of micro-batches whose targets promise to win.
const STEPS: usize = 32;
/// Factor by which the further steps shorten a promised time at best.
const PROMISE: f64 = 0.998;
/// With communication cost: the least speed-up for which a document's ranks are doubled when even the doubled group
/// misses the target. A large gain suits many documents that share the ranks, a small one a step that waits for a few.
const GAINS: [f64; 3] = [1.4, 1.2, 1.05];
/// With communication cost, at most this many documents are also planned by the targets of free exchange.
const FEW: usize = 1024;
/// With more documents than `FEW`, a further gain is tried only for numbers of micro-batches this close to the best.
const NEAR: f64 = 1.05;
/// With communication cost, at least so many documents for each rank, and more than `FEW`, are many.
const MANY: usize = 16;
/// With communication cost, plans of at least twice this many documents on at least twice this many ranks begin with a
/// search for a sample of about so many.
const SAMPLE: (usize, usize) = (8192, 256);
/// The most numbers of micro-batches, each with a gain, that were best for the sample and are solved for all documents.
const SOLVED: usize = 4;
/// With many documents, more is tried around a solution (other sizes of blocks, other numbers of micro-batches) only if
/// it comes this close to the best.
const WORTH: f64 = 1.02;
/// A solution is given up if the placed part takes longer than the best by this factor: halving blocks cannot make up
/// for that much.
const LATE: f64 = 1.05;
/// The factor in the place of `LATE` if exchange costs and documents are many: each document then matters less.
const LATE_OF_MANY: f64 = 1.01;
/// No larger blocks are tried if the step takes longer than with smaller ones by this factor.
const LARGE: f64 = 1.2;
/// The best size of blocks is also tried for other numbers of micro-batches within this factor of the best.
const CLOSE: f64 = 1.1;
/// First steps towards the best targets, for every number of micro-batches.
const FIRST_STEPS: usize = 6;
/// Two promises that differ by less than this part belong to the same problem.
const SAME: f64 = 1e-9;
/// For few documents: the number of best plans in which documents are moved between micro-batches, and the most moves
/// tried in each.
const FINALISTS: usize = 4;
const TRIES: usize = 512;
/// Most ops simulated in steps towards the best targets, so that large pipelines get fewer steps.
const MAX_OPS: usize = 1 << 16;

/// A number of micro-batches with the target of each.
struct Candidate {
    num_micro_batches: usize,
    relaxed: Relaxed,
}

/// What was solved for.
#[derive(Clone, Copy)]
struct Solved {
    price: f64,
    num_micro_batches: usize,
    gain: f64,
    base: usize,
}

/// Result of a search.
pub(super) struct Found {
    /// The best plan; `None` if the documents fit into none of the numbers of micro-batches that were tried.
    pub(super) best: Option<Best>,
    /// Numbers of micro-batches that were tried, each with the seconds of its step.
    pub(super) sweep: Vec<(usize, f64)>,
    /// For few documents: the best plan of each number of micro-batches.
    pub(super) others: Vec<Best>,
}

/// The problem, once for each gain that is tried.
pub(super) fn with_gains(problem: &Problem) -> Vec<Problem> {
    let gains: &[f64] = if problem.cost.is_free() { &GAINS[..1] } else { &GAINS };
    gains.iter().map(|&gain| problem.with_gain(gain)).collect()
}

/// State of the search: the best plan so far, and memory for the next solution.
pub(super) struct StepSearch<'a> {
    problem: &'a Problem,
    options: &'a DynamicCpOptions,
    best: Option<Best>,
    sweep: Vec<(usize, f64)>,
    pipelines: Vec<(usize, Rc<Pipeline>)>,
    buffers: Buffers,
    /// Work of the documents as a function of the time of a micro-batch, if exchange costs.
    demand: Option<Demand>,
    /// Promised seconds of each number of micro-batches under the previous gain.
    promises: Vec<(usize, f64)>,
    /// The problem and the size of blocks of the best plan so far.
    suited: Option<(&'a Problem, usize)>,
    /// The least price under the present gain, and the size of blocks that reached it.
    fitting: Option<(f64, usize)>,
    /// All solutions so far.
    solved: Vec<Solved>,
    /// For few documents: the best plan of each number of micro-batches.
    others: Vec<Best>,
    /// A solution is given up if its price exceeds this.
    limit: f64,
}

impl<'a> StepSearch<'a> {
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
            solved: Vec::new(),
            others,
            limit: f64::INFINITY,
        }
    }

    /// The pipeline for this number of micro-batches; kept for the next call unless it is large.
    fn pipeline(&mut self, num_micro_batches: usize) -> Result<Rc<Pipeline>> {
        if let Some((_, pipeline)) = self.pipelines.iter().find(|(count, _)| *count == num_micro_batches) {
            return Ok(pipeline.clone());
        }
        let pipeline = Rc::new(Pipeline::new(&self.options.pipeline(num_micro_batches))?);
        if pipeline.num_ops() <= MAX_OPS {
            self.pipelines.push((num_micro_batches, pipeline.clone()));
        }
        Ok(pipeline)
    }

    /// A candidate whose targets were improved by a few steps, beginning with the faster of two shapes. If even a lower
    /// bound on its step exceeds `hopeless`, no step is made and the bound is its promise.
    fn candidate(&mut self, num_micro_batches: usize, hopeless: f64) -> Result<Candidate> {
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
        let shape = |ends: f64| targets::shape(&options, ends, problem.heaviest());
        let work = problem.total_work / problem.world_size as f64;
        // `around` does not know the cost of exchange, so it is used only if exchange is free.
        let around = problem.cost.is_free().then(|| targets::around(&options, problem.longest(), work)).flatten();
        let other = around.or_else(|| targets::heavier_first(&options).map(shape));
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

    fn descend(&mut self, relaxed: &mut Relaxed, steps: usize, pipeline: &Pipeline) {
        let steps = steps.min(1 + MAX_OPS / pipeline.num_ops());
        relaxed.descend(steps, pipeline, self.options.p2p_seconds, &mut self.buffers);
    }

    /// Solves a candidate. Returns the seconds of the solution, or of the part of it that was already too late;
    /// infinite if there is no solution.
    ///
    /// The seconds are an estimate in which every rank is as slow as the slowest of the micro-batch: never too short,
    /// and close if micro-batches are balanced.
    fn solve(&mut self, candidate: &Candidate, base: usize, pipeline: &Pipeline) -> Result<f64> {
        self.solve_for(candidate, &candidate.relaxed.targets, base, pipeline)
    }

    /// Solves a candidate with other targets.
    fn solve_for(&mut self, candidate: &Candidate, targets: &[f64], base: usize, pipeline: &Pipeline) -> Result<f64> {
        let full = targets.iter().copied().fold(0.0, f64::max);
        self.solve_within(candidate, targets, base, full, pipeline)
    }

    /// Solves a candidate. Documents get larger blocks only if a block of `base` takes longer than `full`.
    fn solve_within(
        &mut self,
        candidate: &Candidate,
        targets: &[f64],
        base: usize,
        full: f64,
        pipeline: &Pipeline,
    ) -> Result<f64> {
        let num_micro_batches = candidate.num_micro_batches;
        let (problem, options, limit) = (self.problem, self.options, self.limit);
        let mut given_up = None;
        let mut late = |costs: &[f64]| {
            let seconds = self.timed(costs, targets, pipeline).map_or(f64::INFINITY, |timed| timed.0);
            given_up = Some(seconds).filter(|&seconds| price(options, num_micro_batches, seconds) > limit);
            given_up.is_some()
        };
        let late: Option<Late<'_>> = if limit.is_finite() { Some(&mut late) } else { None };
        let draft = problem.solve(targets, base, full, late);
        if let Some(seconds) = given_up {
            note(&mut self.sweep, num_micro_batches, seconds);
        }
        let Some(draft) = draft else { return Ok(given_up.unwrap_or(f64::INFINITY)) };
        let (seconds, order) = self.timed(&draft.costs(), targets, pipeline)?;
        if !fits_memory(self.problem, self.options, pipeline, &draft, &order)? {
            return Ok(f64::INFINITY);
        }
        note(&mut self.sweep, num_micro_batches, seconds);
        let price = price(self.options, num_micro_batches, seconds);
        self.solved.push(Solved { price, num_micro_batches, gain: self.problem.gain, base });
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

    /// Seconds of a step whose micro-batches take these times, and their order in it, which is that of the targets.
    fn timed(&mut self, costs: &[f64], targets: &[f64], pipeline: &Pipeline) -> Result<(f64, Vec<usize>)> {
        let order = targets::arrange(costs, targets);
        let p2p = [self.options.p2p_seconds];
        let times = Times::per_micro_batch(costs)?.with_p2p(&p2p)?;
        Ok((pipeline.makespan_in_order(&times, &order, &mut self.buffers), order))
    }

    /// Improves the best plan; for few documents, the best plans of several numbers of micro-batches.
    fn refine(&mut self) -> Result<()> {
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
            // In the estimate groups never wait for another group's ranks, so the faster plan by estimate may be slower
            // exactly.
            let simulated = self.simulated_price(&candidate)?;
            let before = standing.map_or_else(|| self.simulated_price(&best), Ok)?;
            standing = Some(before);
            if simulated < before && fits_memory(problem, self.options, &pipeline, &candidate.draft, &candidate.order)?
            {
                note(&mut self.sweep, num_micro_batches, seconds);
                standing = Some(simulated);
                self.best = Some(candidate);
            }
        }
        Ok(())
    }

    /// Price of a plan timed exactly, with ranks that wait for one another.
    fn simulated_price(&mut self, plan: &Best) -> Result<f64> {
        let pipeline = self.pipeline(plan.num_micro_batches)?;
        let draft = plan.draft.in_order(&plan.order, &self.problem.documents);
        let seconds = simulate::simulated(&pipeline, &draft, self.options);
        Ok(price(self.options, plan.num_micro_batches, seconds))
    }
}

impl<'a> StepSearch<'a> {
    /// Runs the search and returns the best plan and the numbers tried.
    ///
    /// # Arguments
    /// * `problems` - the problem with each gain ([`with_gains`]).
    /// * `counts` - numbers of micro-batches to try.
    pub(super) fn run(mut self, problems: &'a [Problem], counts: &Counts) -> Result<Found> {
        let (problem, options) = (self.problem, self.options);
        let tried = counts.tried(options);
        let is_sampled = self.by_sample(problems, &tried, counts)?;
        if !is_sampled {
            self.each_gain(problems, &tried, counts)?;
        }
        if self.best.is_none() && options.num_micro_batches.is_none() {
            match options.max_micro_batches {
                None => self.more(counts.most)?,
                Some(_) => {
                    let safe = counts.safe(options).filter(|count| !tried.contains(count));
                    safe.map_or(Ok(()), |count| self.enough(count))?;
                }
            }
        }
        if let Some((suited, _)) = self.suited.filter(|_| !is_sampled) {
            // Numbers that did not fit count as tried, although the sweep does not list them.
            let tried = self.sweep.iter().map(|&(tried, _)| tried).collect();
            self.between(suited, tried, counts, WORTH)?;
        }
        self.refine()?;
        if problem.documents.len() <= SMALL {
            self.few(&tried, counts)?;
        }
        Ok(Found { best: self.best, sweep: self.sweep, others: self.others })
    }

    /// Tries numbers of micro-batches of all magnitudes with each gain.
    fn each_gain(&mut self, problems: &'a [Problem], tried: &[usize], counts: &Counts) -> Result<()> {
        if !self.problem.cost.is_free() && self.problem.documents.len() <= FEW {
            self.as_if_free(tried)?;
        }
        for problem in problems {
            self.problem = problem;
            self.fitting = self.suited.filter(|_| self.are_many()).map(|(_, base)| (f64::INFINITY, base));
            self.demand = (!problem.cost.is_free()).then(|| Demand::new(problem, counts.most));
            self.all(tried)?;
        }
        Ok(())
    }

    /// With communication cost and very many documents: searches for a sample of them, on as small a part of the ranks,
    /// and solves for all documents only what was best there. Returns whether they fit.
    fn by_sample(&mut self, problems: &'a [Problem], tried: &[usize], counts: &Counts) -> Result<bool> {
        let Some(sample) = self.problem.sample(SAMPLE.0, SAMPLE.1) else { return Ok(false) };
        let options = DynamicCpOptions { world_size: sample.world_size, ..self.options.clone() };
        let gains = with_gains(&sample);
        let mut search = StepSearch::new(&sample, &options);
        search.each_gain(&gains, tried, counts)?;
        for problem in &gains {
            let is_tried = |count: &usize| search.sweep.iter().any(|(tried, _)| tried == count);
            let tried = tried.iter().copied().filter(is_tried).collect();
            search.between(problem, tried, counts, 1.0)?;
        }
        let mut solved = search.solved;
        solved.sort_by(|a, b| a.price.total_cmp(&b.price));
        // Each pair of a number of micro-batches and a gain is kept once, with its best size of blocks.
        let mut others: Vec<Solved> = Vec::new();
        for found in solved {
            let is_same =
                |other: &Solved| (other.num_micro_batches, other.gain) == (found.num_micro_batches, found.gain);
            others.extend((!others.iter().any(is_same)).then_some(found));
        }
        for &Solved { num_micro_batches, gain, base, .. } in others.iter().take(SOLVED) {
            let Some(problem) = problems.iter().find(|problem| problem.gain == gain) else { continue };
            if self.demand.is_none() || self.problem.gain != gain {
                (self.problem, self.demand) = (problem, Some(Demand::new(problem, counts.most)));
            }
            let mut candidate = self.candidate(num_micro_batches, f64::INFINITY)?;
            let pipeline = self.pipeline(num_micro_batches)?;
            self.descend(&mut candidate.relaxed, STEPS, &pipeline);
            self.limit = self.least_price();
            self.solve(&candidate, base, &pipeline)?;
        }
        self.limit = f64::INFINITY;
        let Some(best) = &self.best else { return Ok(false) };
        // Other numbers are so much slower as they are for the sample.
        let (options, least) = (self.options, best.price(self.options));
        let of_best = search.sweep.iter().find(|&&(count, _)| count == best.num_micro_batches);
        let factor = of_best.map_or(1.0, |&(count, seconds)| least / price(options, count, seconds));
        for (count, seconds) in search.sweep {
            if self.sweep.iter().all(|&(tried, _)| tried != count) {
                note(&mut self.sweep, count, (seconds * factor).max(least / price(options, count, 1.0)));
            }
        }
        Ok(true)
    }

    /// Also plans few documents in simpler ways.
    fn few(&mut self, tried: &[usize], counts: &Counts) -> Result<()> {
        self.plainly(tried)?;
        self.refine()?;
        let limit = match self.best.clone() {
            Some(best) => self.simulated_price(&best)?,
            None => f64::INFINITY,
        };
        let (problem, options) = (self.problem, self.options);
        if let Some(best) = in_one_size(problem, options, counts, true, limit, |count| self.pipeline(count))? {
            note(&mut self.sweep, best.num_micro_batches, best.seconds);
            self.best = Some(best.clone());
            self.others = vec![best];
            self.refine()?;
        }
        Ok(())
    }

    /// The seconds above which a promise for this number of micro-batches changes nothing: neither the best plan nor
    /// the seconds noted for this number.
    fn hopeless(&self, num_micro_batches: usize) -> f64 {
        let noted = self.sweep.iter().find(|&&(tried, _)| tried == num_micro_batches);
        let (Some(best), Some(&(_, seconds))) = (&self.best, noted) else { return f64::INFINITY };
        seconds.max(best.price(self.options) / (PROMISE * price(self.options, num_micro_batches, 1.0)))
    }

    /// Tries these numbers of micro-batches, beginning with the one that promises the least seconds.
    fn all(&mut self, counts: &[usize]) -> Result<()> {
        let near: Vec<usize> = counts.iter().copied().filter(|&count| self.is_near(count)).collect();
        let mut candidates =
            near.into_iter().map(|count| self.candidate(count, self.hopeless(count))).collect::<Result<Vec<_>>>()?;
        // A candidate with the same promise as under the previous gain is the same problem and was solved already.
        let promise = |candidate: &Candidate| (candidate.num_micro_batches, candidate.relaxed.seconds);
        let before = std::mem::replace(&mut self.promises, candidates.iter().map(promise).collect());
        let same = |a: (usize, f64), b: (usize, f64)| a.0 == b.0 && (a.1 - b.1).abs() <= SAME * b.1;
        candidates.retain(|candidate| !before.iter().any(|&before| same(before, promise(candidate))));
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        candidates.into_iter().try_for_each(|candidate| self.attempt(candidate, WORTH))
    }

    /// Whether this number of micro-batches may win with another gain; for few documents any may.
    fn is_near(&self, count: usize) -> bool {
        let Some(best) = self.best.as_ref().filter(|_| self.problem.documents.len() > FEW) else { return true };
        let least = best.price(self.options) * NEAR;
        self.sweep.iter().all(|&(tried, seconds)| tried != count || price(self.options, count, seconds) <= least)
    }

    /// Solves for one number of micro-batches. If its promise is no faster than the best so far, only the promise is
    /// noted.
    fn attempt(&mut self, mut candidate: Candidate, worth: f64) -> Result<()> {
        let Candidate { num_micro_batches, ref mut relaxed } = candidate;
        let promised = price(self.options, num_micro_batches, relaxed.seconds) * PROMISE;
        if self.best.as_ref().is_some_and(|best| promised >= best.price(self.options)) {
            let seconds = relaxed.seconds;
            note(&mut self.sweep, num_micro_batches, seconds);
            return Ok(());
        }
        let pipeline = self.pipeline(num_micro_batches)?;
        self.descend(relaxed, STEPS, &pipeline);
        if self.tries_sizes() {
            // With few documents the second best may still become the best, so no solution is given up.
            let late = self.best.as_ref().filter(|_| self.problem.documents.len() > SMALL);
            let factor = if self.are_many() { LATE_OF_MANY } else { LATE };
            self.limit = late.map_or(f64::INFINITY, |best| best.price(self.options) * factor);
            let tried = self.sizes(&candidate, &pipeline, worth);
            self.limit = f64::INFINITY;
            tried
        } else {
            self.solve(&candidate, self.problem.largest_group, &pipeline).map(|_| ())
        }
    }

    /// Whether smaller blocks may be better than the largest: if exchange costs, or if the documents of a group are
    /// limited (the limit of a block is that of a group).
    fn tries_sizes(&self) -> bool {
        self.demand.is_some() || self.problem.counts_documents()
    }

    /// Price of the best plan so far; infinite if there is none.
    fn least_price(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.price(self.options))
    }

    /// Whether exchange costs the same everywhere and documents are many. Each is then a small part of a step, and a
    /// solution that is a little slower than the best has no neighbour that is faster. Where exchange is cheaper inside
    /// nodes, a neighbour may be.
    fn are_many(&self) -> bool {
        let documents = self.problem.documents.len();
        let is_priced_alike = self.demand.is_some() && self.options.node.is_none();
        is_priced_alike && documents > FEW && documents >= MANY * self.problem.world_size
    }

    /// Plans with targets that ignore exchange, and again with the targets stretched to the time of the first solution.
    /// Tries the largest blocks for all numbers of micro-batches, smaller ones for the best number, and the best size
    /// for numbers close to the best.
    fn as_if_free(&mut self, counts: &[usize]) -> Result<()> {
        let largest = self.problem.largest_group;
        let mut candidates =
            counts.iter().map(|&count| self.candidate(count, f64::INFINITY)).collect::<Result<Vec<_>>>()?;
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        for candidate in &mut candidates {
            let promised = price(self.options, candidate.num_micro_batches, candidate.relaxed.seconds) * PROMISE;
            if self.best.as_ref().is_none_or(|best| promised < best.price(self.options)) {
                let pipeline = self.pipeline(candidate.num_micro_batches)?;
                self.descend(&mut candidate.relaxed, STEPS, &pipeline);
                self.scaled(candidate, largest, false)?;
            }
        }
        let Some(best) = &self.best else { return Ok(()) };
        let (count, close) = (best.num_micro_batches, best.seconds * CLOSE);
        let others: Vec<usize> =
            self.sweep.iter().filter(|other| other.0 != count && other.1 <= close).map(|other| other.0).collect();
        let mut base = None;
        for size in self.problem.base_sizes().into_iter().filter(|&size| size < largest) {
            for candidate in candidates.iter().filter(|candidate| candidate.num_micro_batches == count) {
                if self.scaled(candidate, size, true)? {
                    base = Some(size);
                }
            }
        }
        for candidate in candidates.iter().filter(|candidate| others.contains(&candidate.num_micro_batches)) {
            if let Some(base) = base {
                self.scaled(candidate, base, true)?;
            }
        }
        Ok(())
    }

    /// Solves for the targets, if `start` also for the initial targets, and for the stretched ones. Returns whether one
    /// of these plans is the best so far.
    fn scaled(&mut self, candidate: &Candidate, base: usize, start: bool) -> Result<bool> {
        let pipeline = self.pipeline(candidate.num_micro_batches)?;
        let relaxed = &candidate.relaxed;
        let seconds = self.solve(candidate, base, &pipeline)?;
        let mut least = seconds;
        if start {
            least = least.min(self.solve_for(candidate, &relaxed.start, base, &pipeline)?);
        }
        let longer = seconds / relaxed.seconds;
        if longer.is_finite() {
            let targets: Vec<f64> = relaxed.targets.iter().map(|target| target * longer).collect();
            least = least.min(self.solve_for(candidate, &targets, base, &pipeline)?);
        }
        Ok(self.best.as_ref().is_some_and(|best| best.seconds == least))
    }

    /// Plans with blocks of one size for all documents (larger only where memory needs it): with few documents a target
    /// for each micro-batch means little.
    fn plainly(&mut self, counts: &[usize]) -> Result<()> {
        for &count in counts {
            let candidate = self.candidate(count, f64::INFINITY)?;
            let pipeline = self.pipeline(count)?;
            for size in self.problem.plain_sizes() {
                self.solve_within(&candidate, &candidate.relaxed.targets, size, f64::INFINITY, &pipeline)?;
            }
        }
        Ok(())
    }

    /// Tries sizes of blocks: larger ones are more even, smaller ones exchange less and hold more documents in total.
    /// The first time, sizes go from the smallest up to one that is far slower than the best. Later they start from the
    /// size that was fastest and go on in both directions while the step gets faster. With many documents they go on
    /// only if the first comes within a factor of `worth` of the best; with few, each gain has a first time.
    fn sizes(&mut self, candidate: &Candidate, pipeline: &Pipeline, worth: f64) -> Result<()> {
        let sizes: Vec<usize> = self.problem.base_sizes();
        let Some(middle) = self.fitting.and_then(|(_, base)| sizes.iter().position(|&size| size == base)) else {
            let mut least = f64::INFINITY;
            for &size in &sizes {
                let seconds = self.solve(candidate, size, pipeline)?;
                if self.problem.documents.len() > SMALL && least.is_finite() && seconds > least * LARGE {
                    break;
                }
                least = least.min(seconds);
            }
            return Ok(());
        };
        let seconds = self.solve(candidate, sizes[middle], pipeline)?;
        let least = self.least_price();
        let is_far = price(self.options, candidate.num_micro_batches, seconds) > least * worth;
        if is_far && self.are_many() {
            return Ok(());
        }
        for larger in [true, false] {
            let (mut at, mut least) = (middle, seconds);
            while let Some(next) = if larger { Some(at + 1).filter(|&at| at < sizes.len()) } else { at.checked_sub(1) }
            {
                let seconds = self.solve(candidate, sizes[next], pipeline)?;
                if seconds >= least {
                    break;
                }
                (at, least) = (next, seconds);
            }
        }
        Ok(())
    }

    /// If exchange costs, tries numbers of micro-batches between the best one with a gain and its tried neighbours,
    /// closer and closer to the best, if that is near the best of all gains. `all` are the numbers that were tried, and
    /// other sizes of blocks are tried within a factor of `worth` of the best.
    fn between(&mut self, problem: &'a Problem, mut all: Vec<usize>, counts: &Counts, worth: f64) -> Result<()> {
        let price = |solved: &&Solved| (solved.price, solved.num_micro_batches);
        let of_gain = |solved: &[Solved]| {
            let of_gain = solved.iter().filter(|solved| solved.gain == problem.gain);
            of_gain.min_by(|a, b| price(a).partial_cmp(&price(b)).unwrap_or(Ordering::Equal)).copied()
        };
        let least = self.least_price();
        let best = of_gain(&self.solved).filter(|best| self.demand.is_some() && best.price <= least * WORTH);
        let Some(best) = best.filter(|_| self.options.num_micro_batches.is_none()) else { return Ok(()) };
        self.problem = problem;
        self.fitting = Some((best.price, best.base));
        self.demand = Some(Demand::new(problem, counts.most));
        while let Some(Solved { num_micro_batches: count, .. }) = of_gain(&self.solved) {
            let tried = || all.iter().copied();
            let below = tried().filter(|&tried| tried < count).max().map(|below| below + (count - below) / 2);
            let above = tried().filter(|&tried| tried > count).min().map(|above| count + (above - count) / 2);
            let new = |count: usize| {
                whole(self.options, count, usize::MAX).filter(|&count| !tried().any(|tried| tried == count))
            };
            let new: Vec<usize> = [below, above].into_iter().flatten().filter_map(new).collect();
            if new.is_empty() {
                break;
            }
            for count in new {
                all.push(count);
                let candidate = self.candidate(count, f64::INFINITY)?;
                self.attempt(candidate, worth)?;
            }
        }
        Ok(())
    }

    /// Doubles the number of micro-batches until the documents fit. They fit at the latest when each can have its own,
    /// unless the limit on micro-batches is reached before.
    fn more(&mut self, most: usize) -> Result<()> {
        let round = if self.options.is_interleaved() { self.options.num_stages } else { 1 };
        let limit = limit(self.options);
        let whole = if limit > round { limit - limit % round } else { limit };
        let wanted = self.problem.documents.len().max(self.options.least_micro_batches());
        let enough = wanted.next_multiple_of(round).min(whole);
        let mut count = most;
        while self.best.is_none() && count < enough {
            count = (2 * count).next_multiple_of(round).min(enough);
            self.enough(count)?;
        }
        Ok(())
    }

    /// Solves for a number of micro-batches that may be large enough.
    fn enough(&mut self, count: usize) -> Result<()> {
        let candidate = self.candidate(count, f64::INFINITY)?;
        let (pipeline, base) = (self.pipeline(count)?, self.problem.largest_group);
        self.solve(&candidate, base, &pipeline)?;
        self.solve_for(&candidate, &candidate.relaxed.start, base, &pipeline)?;
        if self.best.is_some() && self.tries_sizes() {
            self.fitting = None;
            self.sizes(&candidate, &pipeline, WORTH)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use super::{Counts, DynamicCpOptions, SAMPLE, StepSearch, with_gains};
    use crate::cost::{CostModel, Mask};
    use crate::dynamic_cp::cost::{Costs, Exchange, GroupCost, Node};
    use crate::dynamic_cp::options::GroupSizes;
    use crate::dynamic_cp::problem::Problem;
    use crate::lengths::Lengths;

    /// Lengths of which few are long.
    fn lengths(count: i64) -> Lengths {
        let length = |at: i64| 64 + at * 7919 % 4001 + if at % 97 == 0 { at * 31 % 60_000 } else { 0 };
        Lengths::new("lengths", &(0..count).map(length).collect::<Vec<_>>()).unwrap()
    }

    /// Plans by a sample are about as fast as those by a search for all documents.
    #[test]
    fn a_sample_finds_what_all_documents_need() {
        let (documents, ranks) = (2 * SAMPLE.0, 2 * SAMPLE.1);
        let model = CostModel::analytic(1.0, 20_000.0, Mask::Causal).unwrap();
        let lengths = lengths(documents as i64);
        let mut regrets = Vec::new();
        for (overlap, node, group_sizes) in [
            (1.0, None, GroupSizes::PowersOfTwo),
            (0.5, Some(8), GroupSizes::Any),
            (0.0, None, GroupSizes::PowersOfTwo),
        ] {
            let exchange = Exchange { seconds_per_token: 10_000.0, seconds_per_exchange: 1e6, overlap };
            let node = node.map(|ranks| Node { ranks, seconds_per_exchange: 1e5, seconds_per_token: 1_000.0 });
            let options = DynamicCpOptions { exchange, node, group_sizes, ..DynamicCpOptions::new(ranks, 4, 8192) };
            let cost = GroupCost { exchange, node, micro_batch_seconds: 0.0, document_seconds: 0.0 };
            let problem = Problem::new(&lengths, Costs::Model(&model), cost, &options, ranks);
            let counts = Counts::new(&lengths, &options).unwrap();
            let problems = with_gains(&problem);
            let found = StepSearch::new(&problem, &options).run(&problems, &counts).unwrap();
            let mut all = StepSearch::new(&problem, &options);
            let tried = counts.tried(&options);
            all.each_gain(&problems, &tried, &counts).unwrap();
            let suited = all.suited.unwrap().0;
            all.between(suited, tried, &counts, f64::INFINITY).unwrap();
            all.refine().unwrap();
            let (found, all) = (found.best.unwrap().seconds, all.best.unwrap().seconds);
            regrets.push(found / all - 1.0);
        }
        // The sample may see another best number of micro-batches; its plans are a little slower, or faster.
        let mean = regrets.iter().sum::<f64>() / regrets.len() as f64;
        assert!(mean < 0.01 && regrets.iter().all(|&regret| regret < 0.02), "{regrets:?}");
    }

    /// A sample has the same documents as all, and less of them: of each length, and of work and tokens for each rank.
    #[test]
    fn a_sample_is_like_all() {
        let model = CostModel::analytic(1.0, 20_000.0, Mask::Causal).unwrap();
        let lengths = lengths(40_000);
        let exchange = Exchange { seconds_per_token: 1.0, ..Exchange::default() };
        let cost = GroupCost { exchange, node: None, micro_batch_seconds: 0.0, document_seconds: 0.0 };
        let given: Vec<f64> = (0..lengths.len()).map(|at| 1e9 * (1 + at * 13 % 1000) as f64).collect();
        let given = crate::cost::DocumentCosts::new(given, lengths.len(), 1, &[]).unwrap();
        for costs in [Costs::Model(&model), Costs::Given { costs: &given, attention: None }] {
            let options = DynamicCpOptions { exchange, ..DynamicCpOptions::new(3 * 512, 4, 8192) };
            let problem = Problem::new(&lengths, costs, cost, &options, 1024);
            let sample = problem.sample(SAMPLE.0, SAMPLE.1).unwrap();
            let parts = problem.world_size / sample.world_size;
            assert_eq!((parts, sample.world_size, sample.largest_group), (4, 384, 256));
            assert_eq!(sample.documents.len(), problem.documents.len() / parts);
            let part = sample.total_work / problem.total_work * parts as f64;
            assert!((part - 1.0).abs() < 0.01, "{part}");
            assert_eq!(sample.is_by_length(), problem.is_by_length());
            if let Some(order) = &sample.by_tokens {
                let mut places: Vec<u32> = order.clone();
                assert!(order.is_sorted_by_key(|&at| std::cmp::Reverse(sample.documents[at as usize].load.tokens)));
                places.sort_unstable();
                assert!(places.into_iter().eq(0..sample.documents.len() as u32));
            }
            // None is needed, free exchange has none, and documents that need all ranks allow none.
            assert!(sample.sample(SAMPLE.0, SAMPLE.1).is_none());
            let free = GroupCost { exchange: Exchange::default(), ..cost };
            assert!(Problem::new(&lengths, costs, free, &options, 1024).sample(SAMPLE.0, SAMPLE.1).is_none());
            let options = DynamicCpOptions { max_tokens_per_rank: 64, ..options };
            assert!(Problem::new(&lengths, costs, cost, &options, 1024).sample(SAMPLE.0, SAMPLE.1).is_none());
        }
    }
}
