//! The search for the plan of a step: which numbers of micro-batches and sizes of blocks are tried, in which order,
//! which are not worth it, and the best solution so far.

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

/// Steps towards the best targets, of numbers of micro-batches that promise to be among the best.
const STEPS: usize = 32;
/// Part of the time that the further steps leave at best.
const PROMISE: f64 = 0.998;
/// With communication cost: the least speed-up for which a document's ranks are doubled when even the doubled group
/// misses the target. A large gain suits many documents that share the ranks, a small one a step that waits for a few.
const GAINS: [f64; 3] = [1.4, 1.2, 1.05];
/// With communication cost, at most this many documents are also planned by the targets of free exchange.
const FEW: usize = 1024;
/// With more documents, another gain is tried only for numbers of micro-batches this close to the best.
const NEAR: f64 = 1.05;
/// A solution is given up where what is placed so far takes so much longer than the best: halving blocks makes up for
/// less.
const LATE: f64 = 1.05;
/// No larger blocks are tried where the step takes so much longer than with smaller ones.
const LARGE: f64 = 1.2;
/// The best block size is tried for other numbers of micro-batches this close to the best.
const CLOSE: f64 = 1.1;
/// Steps towards the best targets, of every number of micro-batches.
const FIRST_STEPS: usize = 6;
/// Promises that differ less are of the same problem.
const SAME: f64 = 1e-9;
/// Few documents are moved between micro-batches, one by one, in as many of the best plans, and so often at most in
/// each.
const FINALISTS: usize = 4;
const TRIES: usize = 512;
/// Most ops that steps towards the best targets simulate: fewer steps for larger pipelines.
const MAX_OPS: usize = 1 << 16;

/// A number of micro-batches, and what each of them should take.
struct Candidate {
    num_micro_batches: usize,
    relaxed: Relaxed,
}

/// Result of a search.
pub(super) struct Found {
    /// The best plan; `None` if the documents fit into no number of micro-batches that was tried.
    pub(super) best: Option<Best>,
    /// Numbers of micro-batches that were tried, and the seconds of a step with each.
    pub(super) sweep: Vec<(usize, f64)>,
    /// The best of each number of micro-batches, of few documents.
    pub(super) others: Vec<Best>,
}

/// The problem with each gain that is tried.
pub(super) fn with_gains(problem: &Problem) -> Vec<Problem> {
    let gains: &[f64] = if problem.cost.is_free() { &GAINS[..1] } else { &GAINS };
    gains.iter().map(|&gain| problem.with_gain(gain)).collect()
}

/// State of a search: the best plan so far, and buffers for the next solution.
pub(super) struct StepSearch<'a> {
    problem: &'a Problem,
    options: &'a DynamicCpOptions,
    best: Option<Best>,
    sweep: Vec<(usize, f64)>,
    pipelines: Vec<(usize, Rc<Pipeline>)>,
    buffers: Buffers,
    /// Demand of ranks by exchange, if it costs.
    demand: Option<Demand>,
    /// Promise of each number of micro-batches under the previous gain.
    promises: Vec<(usize, f64)>,
    /// The problem and the size of blocks that suited the best so far.
    suited: Option<(&'a Problem, usize)>,
    /// The least price with the problem at hand, and the size of blocks that gave it.
    fitting: Option<(f64, usize)>,
    /// The best of each number of micro-batches, of few documents.
    others: Vec<Best>,
    /// A solution is given up if its price is above this.
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
            others,
            limit: f64::INFINITY,
        }
    }

    /// The pipeline that runs that many micro-batches: made once, unless it is large.
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

    /// Targets after a few steps, from the shape that is faster. None where even the least that any targets take is
    /// `hopeless`: its promise is that least.
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
        // Where exchange costs, documents take longer than it knows.
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

    /// The seconds of a solution, or of the part of it that made it too late; infinite if there is none.
    ///
    /// They are estimated with every rank as slow as the slowest of the micro-batch: never less than what it takes, and
    /// close where micro-batches are balanced.
    fn solve(&mut self, candidate: &Candidate, base: usize, pipeline: &Pipeline) -> Result<f64> {
        self.solve_for(candidate, &candidate.relaxed.targets, base, pipeline)
    }

    /// Solves a candidate for other targets.
    fn solve_for(&mut self, candidate: &Candidate, targets: &[f64], base: usize, pipeline: &Pipeline) -> Result<f64> {
        let full = targets.iter().copied().fold(0.0, f64::max);
        self.solve_within(candidate, (targets, targets), base, full, pipeline)
    }

    /// Solves a candidate whose documents get larger blocks only if blocks of `base` take longer than `full`, with the
    /// order of another shape.
    fn solve_within(
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
        if !fits_memory(self.problem, self.options, pipeline, &draft, &order)? {
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
        let order = targets::arrange(costs, shape);
        let p2p = [self.options.p2p_seconds];
        let times = Times::per_micro_batch(costs)?.with_p2p(&p2p)?;
        Ok((pipeline.makespan_in_order(&times, &order, &mut self.buffers), order))
    }

    /// Makes the best faster; of few documents, the best of every number of micro-batches.
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
            // The estimate lets no group wait for another's ranks, so a plan may win by it and lose by the clock.
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

    /// The price of a plan whose ranks wait for one another.
    fn simulated_price(&mut self, plan: &Best) -> Result<f64> {
        let pipeline = self.pipeline(plan.num_micro_batches)?;
        let draft = plan.draft.in_order(&plan.order, &self.problem.documents);
        let seconds = simulate::simulated(&pipeline, &draft, self.options);
        Ok(price(self.options, plan.num_micro_batches, seconds))
    }
}

impl<'a> StepSearch<'a> {
    /// The best plan, and what was tried on the way.
    ///
    /// # Arguments
    /// * `problems` - the problem with each gain ([`with_gains`]).
    /// * `counts` - numbers of micro-batches to try.
    pub(super) fn run(mut self, problems: &'a [Problem], counts: &Counts) -> Result<Found> {
        let (problem, options) = (self.problem, self.options);
        let tried = counts.tried(options);
        if !problem.cost.is_free() && problem.documents.len() <= FEW {
            self.as_if_free(&tried)?;
        }
        for problem in problems {
            self.problem = problem;
            self.fitting = None;
            self.demand = (!problem.cost.is_free()).then(|| Demand::new(problem, counts.most));
            self.all(&tried)?;
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
        if options.num_micro_batches.is_none() {
            self.between(counts.most)?;
        }
        self.refine()?;
        if problem.documents.len() <= SMALL {
            self.few(&tried, counts)?;
        }
        Ok(Found { best: self.best, sweep: self.sweep, others: self.others })
    }

    /// Plans few documents in plainer ways, too.
    fn few(&mut self, tried: &[usize], counts: &Counts) -> Result<()> {
        for (evenly, rising) in [(false, false), (true, false), (true, true)] {
            let (before, sweep) = (self.best.clone(), self.sweep.clone());
            self.plainly(tried, evenly, rising)?;
            self.refine()?;
            // Shorter by the estimate may be longer by the clock: then nothing is left of it, in the sweep neither.
            if rising
                && let (Some(before), Some(after)) = (before, self.best.clone())
                && self.simulated_price(&before)? < self.simulated_price(&after)?
            {
                (self.best, self.sweep) = (Some(before), sweep);
            }
        }
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

    /// A number of micro-batches that promises more seconds changes nothing: neither the best, nor what was noted of
    /// it.
    fn hopeless(&self, num_micro_batches: usize) -> f64 {
        let noted = self.sweep.iter().find(|&&(tried, _)| tried == num_micro_batches);
        let (Some(best), Some(&(_, seconds))) = (&self.best, noted) else { return f64::INFINITY };
        seconds.max(best.price(self.options) / (PROMISE * price(self.options, num_micro_batches, 1.0)))
    }

    /// The candidate whose targets promise most first.
    fn all(&mut self, counts: &[usize]) -> Result<()> {
        let near: Vec<usize> = counts.iter().copied().filter(|&count| self.is_near(count)).collect();
        let mut candidates =
            near.into_iter().map(|count| self.candidate(count, self.hopeless(count))).collect::<Result<Vec<_>>>()?;
        // What promises the same as with the gain before is the same problem.
        let promise = |candidate: &Candidate| (candidate.num_micro_batches, candidate.relaxed.seconds);
        let before = std::mem::replace(&mut self.promises, candidates.iter().map(promise).collect());
        let same = |a: (usize, f64), b: (usize, f64)| a.0 == b.0 && (a.1 - b.1).abs() <= SAME * b.1;
        candidates.retain(|candidate| !before.iter().any(|&before| same(before, promise(candidate))));
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        candidates.into_iter().try_for_each(|candidate| self.attempt(candidate))
    }

    /// Whether a number of micro-batches may be the best with another gain; of few documents any may.
    fn is_near(&self, count: usize) -> bool {
        let Some(best) = self.best.as_ref().filter(|_| self.problem.documents.len() > FEW) else { return true };
        let least = best.price(self.options) * NEAR;
        self.sweep.iter().all(|&(tried, seconds)| tried != count || price(self.options, count, seconds) <= least)
    }

    /// Solves for one number of micro-batches. If it would be slower than the best so far, no more than the promise.
    fn attempt(&mut self, mut candidate: Candidate) -> Result<()> {
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
            // Of few documents the second best may become the best.
            let late = self.best.as_ref().filter(|_| self.problem.documents.len() > SMALL);
            self.limit = late.map_or(f64::INFINITY, |best| best.price(self.options) * LATE);
            let tried = self.sizes(&candidate, &pipeline);
            self.limit = f64::INFINITY;
            tried
        } else {
            self.solve(&candidate, self.problem.largest_group, &pipeline).map(|_| ())
        }
    }

    /// Whether blocks of other than the largest size may be better: where exchange costs, and where a group may not
    /// have all documents, since a block has no more than a group may.
    fn tries_sizes(&self) -> bool {
        self.demand.is_some() || self.problem.counts_documents()
    }

    /// Plans by targets that know nothing of the exchange, then by them as much longer as the first solution took:
    /// largest blocks for all numbers of micro-batches, smaller ones for the best, and the best size for those close to
    /// it.
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

    /// Solves for the targets, for those that they began with, if `start`, and for the longer ones. Whether one is
    /// best.
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

    /// Plans documents as plainly as can be, blocks of one size for all of them but those that need more memory: of few
    /// documents, a time that each micro-batch should take says little. `evenly`: as much work for every micro-batch.
    /// `rising`: the longest last.
    fn plainly(&mut self, counts: &[usize], evenly: bool, rising: bool) -> Result<()> {
        for &count in counts {
            let candidate = self.candidate(count, f64::INFINITY)?;
            let pipeline = self.pipeline(count)?;
            let targets = &candidate.relaxed.targets;
            let even = vec![targets.iter().sum::<f64>() / count as f64; count];
            let targets = if evenly { &even } else { targets };
            let places: Vec<f64> = (0..count).map(|place| place as f64).collect();
            let shape = if rising { &places } else { targets };
            for size in self.problem.plain_sizes() {
                self.solve_within(&candidate, (targets, shape), size, f64::INFINITY, &pipeline)?;
            }
        }
        Ok(())
    }

    /// Tries sizes of blocks: larger ones are more even, smaller ones exchange less, and have more documents in all. At
    /// first, with every gain, from the smallest up to one that is far from the best; then from the one that was
    /// fastest with this gain, as long as it gets faster.
    fn sizes(&mut self, candidate: &Candidate, pipeline: &Pipeline) -> Result<()> {
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

    /// With communication cost, tries numbers of micro-batches between the best and its tried neighbours, ever closer
    /// to the best.
    fn between(&mut self, most: usize) -> Result<()> {
        if let Some((problem, base)) = self.suited.filter(|_| self.demand.is_some()) {
            self.problem = problem;
            self.fitting = self.best.as_ref().map(|best| (best.price(self.options), base));
            self.demand = Some(Demand::new(problem, most));
        }
        // Numbers that did not fit count as tried, too, so that none is tried twice; the sweep does not have them.
        let mut all: Vec<usize> = self.sweep.iter().map(|&(tried, _)| tried).collect();
        while let Some(best) = self.best.as_ref().filter(|_| self.demand.is_some()) {
            let count = best.num_micro_batches;
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
                self.attempt(candidate)?;
            }
        }
        Ok(())
    }

    /// Doubles the micro-batches until the documents fit, which they do when each can have one, or a plan may have no
    /// more.
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

    /// Solves for a number of micro-batches that may be enough where others were not.
    fn enough(&mut self, count: usize) -> Result<()> {
        let candidate = self.candidate(count, f64::INFINITY)?;
        let (pipeline, base) = (self.pipeline(count)?, self.problem.largest_group);
        self.solve(&candidate, base, &pipeline)?;
        self.solve_for(&candidate, &candidate.relaxed.start, base, &pipeline)?;
        if self.best.is_some() && self.tries_sizes() {
            self.fitting = None;
            self.sizes(&candidate, &pipeline)?;
        }
        Ok(())
    }
}
