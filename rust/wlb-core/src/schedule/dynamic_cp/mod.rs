//! Dynamic context parallelism: every micro-batch divides the ranks into groups as its documents need.
//!
//! A fixed context-parallel size shards short documents as thinly as the longest one, and a document that is more than a fair share of
//! a micro-batch makes everybody wait. Here a document gets as many ranks as it takes to finish with the others, and short ones
//! share few.
//!
//! | part | what |
//! | --- | --- |
//! | `cost` | seconds of a group: its documents' cost over its ranks, and the exchange of keys and values that attention does not hide |
//! | `shape` | how much work each micro-batch should get: less where the pipeline fills and drains |
//! | `relaxed` | from there to the best, if short documents could be divided at will |
//! | `solver` | documents to groups, for one number of micro-batches |
//! | `simulate` | seconds of the step |
//! | `bound` | what no plan can beat |
//!
//! [`plan_dynamic_cp`] tries numbers of micro-batches and block sizes, and keeps what the simulation finds fastest.

mod bound;
mod cost;
mod plan;
mod relaxed;
mod shape;
mod simulate;
mod solver;

pub use cost::Communication;
pub use plan::{DynamicCpPlan, Group};

use crate::cost::CostModel;
use crate::error::{Error, Result, check_range};
use crate::lengths::{Lengths, MAX_TOKENS};
use crate::packing::MAX_MICRO_BATCHES;

use super::Schedule;
use super::order::{Layout, MAX_STAGES};
use super::pipeline::{Buffers, Pipeline};
use super::times::Times;
use cost::GroupCost;
use relaxed::Relaxed;
use solver::{Draft, Problem};

/// More ranks than any pipeline stage has.
pub const MAX_WORLD_SIZE: usize = 1 << 20;

/// Most (micro-batch, rank) pairs of a plan: a mistyped number is an error, not an exhausted memory.
pub const MAX_CELLS: usize = 1 << 22;

/// The sweep ends at this many times the micro-batches that it begins with.
const SWEEP: usize = 4;

/// Steps towards the best targets: of every number of micro-batches, and of those that promise to be among the best.
const FIRST_STEPS: usize = 6;
const STEPS: usize = 32;
/// What those steps leave of the time, at best.
const PROMISE: f64 = 0.998;
/// Where exchange costs, the size of blocks that suits the best number of micro-batches is tried for others that were so close to it.
const CLOSE: f64 = 1.1;
/// Most ops that they simulate: fewer steps for larger pipelines.
const MAX_OPS: usize = 1 << 16;

/// A single round of more micro-batches than stages has nearly all of them under way: it must be so much faster than what has fewer.
const ONE_ROUND: f64 = 1.01;

/// The machine, and what a plan may do.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicCpOptions {
    /// Ranks of one pipeline stage, DP times CP: those that groups are made of.
    pub world_size: usize,
    /// Pipeline stages, PP.
    pub num_stages: usize,
    /// Parts of the model on each of them; above 1, the pipeline is interleaved.
    pub num_virtual_stages: usize,
    /// Most tokens of a rank in one micro-batch: a memory bound.
    pub max_tokens_per_rank: i32,
    /// Largest group; `world_size` if not given. Rounded down to a power of two.
    pub max_cp_size: Option<usize>,
    /// Micro-batches of the step; swept if not given.
    pub num_micro_batches: Option<usize>,
    /// The sweep tries no fewer: for schedules that need so many.
    pub min_micro_batches: Option<usize>,
    /// Where the sweep ends; 4 times where it begins if not given.
    pub max_micro_batches: Option<usize>,
    /// What larger groups cost.
    pub communication: Communication,
    /// Latency between pipeline stages.
    pub p2p_seconds: f64,
    /// What every micro-batch takes through the whole model, whatever is in it.
    pub micro_batch_seconds: f64,
}

/// Divides the documents of one step among micro-batches and groups of ranks.
///
/// # Arguments
/// * `ids` - names of the documents in the plan; their indices if not given.
///
/// # Errors
/// [`Error::OutOfRange`], [`Error::Number`] for options; [`Error::Mismatch`] for `ids`; [`Error::TooLong`] for a document that exceeds the memory of the
/// largest group; [`Error::Combination`] when the documents do not fit into the micro-batches allowed ([`MAX_CELLS`] if not given);
/// [`Error::Layout`] when an interleaved pipeline does not take that number of micro-batches; [`Error::InfiniteCost`].
///
/// # Complexity
/// For `n` documents, `p` stages of `v` parts and `m` micro-batches: O(n log world_size + p v m) for each of about a dozen numbers of
/// micro-batches (several times as many attempts where exchange costs), and O(p v m world_size) for the simulation of the best.
/// In a world that is no power of two, up to O(n m log world_size) instead, and O(n m world_size) where memory binds.
pub fn plan_dynamic_cp(
    lengths: &Lengths,
    ids: Option<&[i64]>,
    options: &DynamicCpOptions,
    cost_model: &CostModel,
) -> Result<DynamicCpPlan> {
    if let Some(found) = ids.map(<[i64]>::len).filter(|&found| found != lengths.len()) {
        return Err(Error::Mismatch { argument: "ids", found, other: "lengths", expected: lengths.len() });
    }
    let cost = GroupCost { communication: options.communication, micro_batch_seconds: options.micro_batch_seconds };
    let largest_group = check(lengths, options, cost_model, &cost)?;
    let &DynamicCpOptions { world_size, max_tokens_per_rank, .. } = options;
    let problem = Problem::new(lengths, cost_model, cost, world_size, largest_group, max_tokens_per_rank);
    let Counts { least, start, most } = Counts::new(lengths, options)?;
    let mut counts = candidates(options, least, start - 1);
    counts.extend(candidates(options, start, most));
    counts.dedup();
    let mut search = Search { problem: &problem, options, best: None, sweep: Vec::new(), buffers: Buffers::default() };
    let candidates = search.all(&counts, largest_group)?;
    if search.best.is_none() && options.num_micro_batches.is_none() && options.max_micro_batches.is_none() {
        search.more(most)?;
    }
    search.smaller_blocks(&candidates)?;
    let Search { best, mut sweep, .. } = search;
    let Some(best) = best else {
        let argument = match options {
            DynamicCpOptions { num_micro_batches: Some(_), .. } => "num_micro_batches",
            DynamicCpOptions { max_micro_batches: Some(_), .. } => "max_micro_batches",
            _ => "max_tokens_per_rank",
        };
        let requirement = "no way was found to fit the documents into so few micro-batches of world_size * max_tokens_per_rank tokens";
        return Err(Error::Combination { argument, requirement });
    };
    sweep.sort_by_key(|&(num_micro_batches, _)| num_micro_batches);
    let draft = best.draft.in_order(&best.order, &problem.documents);
    let pipeline = Pipeline::new(&layout(options, best.num_micro_batches))?;
    let seconds = simulate::step_seconds(&pipeline, &draft, options);
    let last = sweep.last().map_or(most, |&(num_micro_batches, _)| num_micro_batches);
    let lower_bound = bound::lower_bound(&problem, options, least, last.max(most));
    let documents: Vec<usize> =
        draft.documents.iter().map(|&document| problem.documents[document as usize].index as usize).collect();
    let group = |group: &solver::Group| {
        let solver::Group { first_rank, cp_size, seconds, .. } = *group;
        Group { first_rank, cp_size, seconds }
    };
    Ok(DynamicCpPlan {
        world_size,
        num_stages: options.num_stages,
        num_virtual_stages: options.num_virtual_stages,
        max_tokens_per_rank,
        lengths: documents.iter().map(|&index| lengths[index]).collect(),
        documents: documents.into_iter().map(|index| ids.map_or(index as i64, |ids| ids[index])).collect(),
        groups: draft.groups.iter().map(group).collect(),
        document_offsets: std::iter::once(0).chain(draft.groups.iter().map(|group| group.end as usize)).collect(),
        group_offsets: draft.offsets,
        seconds,
        lower_bound,
        balanced_seconds: problem.total_work / (world_size * options.num_stages) as f64,
        sweep,
    })
}

/// Everything that can be wrong; the size of the largest group.
fn check(lengths: &Lengths, options: &DynamicCpOptions, cost_model: &CostModel, cost: &GroupCost) -> Result<usize> {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, max_tokens_per_rank, .. } = options;
    let size = |argument, value: usize, most: usize| check_range(argument, value as i64, 1, most as i64);
    size("world_size", world_size, MAX_WORLD_SIZE)?;
    size("num_stages", num_stages, MAX_STAGES)?;
    size("num_virtual_stages", num_virtual_stages, MAX_STAGES)?;
    check_range("max_tokens_per_rank", i64::from(max_tokens_per_rank), 1, MAX_TOKENS)?;
    let most = limit(options);
    let counts = [
        ("num_micro_batches", options.num_micro_batches),
        ("min_micro_batches", options.min_micro_batches),
        ("max_micro_batches", options.max_micro_batches),
    ];
    for (argument, count) in counts {
        count.map_or(Ok(()), |count| size(argument, count, most))?;
    }
    if let [(_, Some(_)), limits @ ..] = counts
        && let Some((argument, _)) = limits.into_iter().find(|(_, count)| count.is_some())
    {
        let requirement = "has no meaning beside num_micro_batches";
        return Err(Error::Combination { argument, requirement });
    }
    if let Some(least) = options.min_micro_batches
        && whole(options, least, options.max_micro_batches.unwrap_or(most)).is_none()
    {
        let requirement =
            "must be at most max_micro_batches; with virtual stages, with a number between them that its rounds divide";
        return Err(Error::Combination { argument: "min_micro_batches", requirement });
    }
    cost.check()?;
    cost::check_seconds("p2p_seconds", options.p2p_seconds)?;
    let largest = options.max_cp_size.unwrap_or(world_size);
    size("max_cp_size", largest, world_size)?;
    let largest_group = 1 << largest.ilog2();
    cost_model.check_finite(lengths)?;
    let limit = (largest_group as i64 * i64::from(max_tokens_per_rank)).min(MAX_TOKENS);
    match lengths.iter().position(|&length| i64::from(length) > limit) {
        None => Ok(largest_group),
        Some(index) => Err(Error::TooLong {
            argument: "lengths",
            index,
            value: i64::from(lengths[index]),
            limit_name: "max_tokens_per_rank on the largest group",
            limit,
            hint: "; split it first (split_documents), or raise max_tokens_per_rank or max_cp_size",
        }),
    }
}

/// Most micro-batches of any plan on this machine.
fn limit(options: &DynamicCpOptions) -> usize {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, .. } = options;
    (MAX_CELLS / world_size.max(num_stages * num_virtual_stages)).clamp(1, MAX_MICRO_BATCHES)
}

/// Numbers of micro-batches to try.
struct Counts {
    /// None with fewer is tried. The same as `start` without a constant part: fewer than there are stages are then faster only for a
    /// handful of documents that exchange or hops cost much, and the schedules of torch take none.
    least: usize,
    /// Enough for the memory, and for every stage to have one.
    start: usize,
    most: usize,
}

impl Counts {
    fn new(lengths: &Lengths, options: &DynamicCpOptions) -> Result<Self> {
        if let Some(fixed) = options.num_micro_batches {
            return Ok(Self { least: fixed, start: fixed, most: fixed });
        }
        let &DynamicCpOptions { world_size, num_stages, max_tokens_per_rank, .. } = options;
        let tokens = lengths.total() as u64;
        let memory = tokens.div_ceil(world_size as u64 * max_tokens_per_rank as u64) as usize;
        let limit = limit(options);
        let useful = lengths.len().max(num_stages);
        let most = options.max_micro_batches;
        if most.is_none() && memory > limit {
            let minimum = tokens.div_ceil((world_size * limit) as u64) as i64;
            check_range("max_tokens_per_rank", i64::from(max_tokens_per_rank), minimum, MAX_TOKENS)?;
        }
        let forced = memory.max(options.min_micro_batches.unwrap_or(1));
        let wanted = options.min_micro_batches.and_then(|least| whole(options, least, limit)).unwrap_or(1);
        let start = memory.max(wanted).max(num_stages.min(most.unwrap_or(limit)));
        let least = if options.micro_batch_seconds > 0.0 { forced } else { start };
        Ok(Self { least, start, most: most.unwrap_or((SWEEP * start).min(useful.max(start)).min(limit)) })
    }
}

/// Numbers of micro-batches from `least` to `most`, closer where they are few; an interleaved pipeline takes equal rounds only.
fn candidates(options: &DynamicCpOptions, least: usize, most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = Vec::new();
    let mut count = least;
    while count < most {
        counts.push(count);
        count += (count / 6).max(1);
    }
    counts.extend((least <= most).then_some(most));
    if options.num_micro_batches.is_none() {
        let near = |count: usize| {
            let (below, above) = (whole(options, count, most), whole_above(options, count));
            let nearer = below.is_some_and(|below| above <= most && above + below < 2 * count);
            below.into_iter().chain(nearer.then_some(above))
        };
        counts = counts.into_iter().flat_map(near).collect();
        counts.sort_unstable();
    }
    counts
}

/// The number of micro-batches, in equal rounds if the pipeline is interleaved: rounded down, or up if there is a least number. `None` if that is
/// more than `most`.
fn whole(options: &DynamicCpOptions, count: usize, most: usize) -> Option<usize> {
    let below = if options.num_virtual_stages > 1 { count - count % rounds(options, count) } else { count };
    let enough = below >= options.min_micro_batches.unwrap_or(1);
    Some(if enough { below } else { whole_above(options, count) }).filter(|&whole| whole <= most)
}

/// The same, rounded up.
fn whole_above(options: &DynamicCpOptions, count: usize) -> usize {
    if options.num_virtual_stages == 1 {
        return count;
    }
    // Up to `(rounds + 1) * num_stages` there are as many rounds, and there is one more, of `num_stages` each.
    let rounds = rounds(options, count);
    count.next_multiple_of(rounds).min((rounds + 1) * options.num_stages)
}

fn rounds(options: &DynamicCpOptions, count: usize) -> usize {
    (count / options.num_stages).max(1)
}

/// What numbers of micro-batches are compared by: the seconds, and something for what an interleaved pipeline then has under way.
fn price(options: &DynamicCpOptions, count: usize, seconds: f64) -> f64 {
    let one_round = options.num_virtual_stages > 1 && count > options.num_stages && rounds(options, count) == 1;
    if one_round { seconds * ONE_ROUND } else { seconds }
}

/// A number of micro-batches, and what each of them should take.
struct Candidate {
    num_micro_batches: usize,
    relaxed: Relaxed,
}

/// The best so far.
struct Best {
    num_micro_batches: usize,
    draft: Draft,
    /// Which micro-batch of the draft comes when.
    order: Vec<usize>,
    seconds: f64,
}

impl Best {
    fn price(&self, options: &DynamicCpOptions) -> f64 {
        price(options, self.num_micro_batches, self.seconds)
    }
}

struct Search<'a> {
    problem: &'a Problem,
    options: &'a DynamicCpOptions,
    best: Option<Best>,
    sweep: Vec<(usize, f64)>,
    buffers: Buffers,
}

impl Search<'_> {
    fn pipeline(&self, num_micro_batches: usize) -> Result<Pipeline> {
        Pipeline::new(&layout(self.options, num_micro_batches))
    }

    /// Targets after a few steps, from the shape that is faster.
    fn candidate(&mut self, num_micro_batches: usize) -> Result<Candidate> {
        let layout = layout(self.options, num_micro_batches);
        let pipeline = Pipeline::new(&layout)?;
        let problem = self.problem;
        let mut begin = |shape: Vec<f64>| {
            let mut relaxed = Relaxed::new(problem, &shape);
            self.descend(&mut relaxed, 1, &pipeline);
            relaxed
        };
        let shape = |ends: f64| shape::shape(&layout, ends, problem.heaviest());
        let work = problem.total_work / problem.world_size as f64;
        // Where exchange costs, documents take longer than it knows.
        let around = problem.cost.is_free().then(|| shape::around(&layout, problem.longest(), work)).flatten();
        let other = around.or_else(|| shape::heavier_first(&layout).map(shape));
        let mut relaxed = begin(shape(1.0));
        if let Some(other) = other.map(begin).filter(|other| other.seconds < relaxed.seconds) {
            relaxed = other;
        }
        self.descend(&mut relaxed, FIRST_STEPS, &pipeline);
        Ok(Candidate { num_micro_batches, relaxed })
    }

    fn descend(&mut self, relaxed: &mut Relaxed, steps: usize, pipeline: &Pipeline) {
        let steps = steps.min(1 + MAX_OPS / pipeline.num_ops());
        relaxed.descend(steps, pipeline, self.options.p2p_seconds, &mut self.buffers);
    }

    /// The candidate whose targets promise most first; of those that would be slower than the best before, no more than the promise.
    fn all(&mut self, counts: &[usize], base: usize) -> Result<Vec<Candidate>> {
        let mut candidates = counts.iter().map(|&count| self.candidate(count)).collect::<Result<Vec<_>>>()?;
        candidates.sort_by(|a, b| a.relaxed.seconds.total_cmp(&b.relaxed.seconds));
        for candidate in &mut candidates {
            let promised = price(self.options, candidate.num_micro_batches, candidate.relaxed.seconds) * PROMISE;
            if self.best.as_ref().is_none_or(|best| promised < best.price(self.options)) {
                let pipeline = self.pipeline(candidate.num_micro_batches)?;
                self.descend(&mut candidate.relaxed, STEPS, &pipeline);
                self.attempt(candidate, base, false)?;
            } else {
                self.sweep.push((candidate.num_micro_batches, candidate.relaxed.seconds));
            }
        }
        Ok(candidates)
    }

    /// Solves for one number of micro-batches and size of blocks. Whether that is the best so far.
    ///
    /// The targets are those that the descent came to; those that it began with, if `start`; and where exchange costs, which they know
    /// nothing of, those it came to, as much longer as the first solution took.
    fn attempt(&mut self, candidate: &Candidate, base: usize, start: bool) -> Result<bool> {
        let &Candidate { num_micro_batches, ref relaxed } = candidate;
        let pipeline = self.pipeline(num_micro_batches)?;
        let seconds = self.solve(candidate, &relaxed.targets, base, &pipeline)?;
        let mut least = seconds;
        if start {
            least = least.min(self.solve(candidate, &relaxed.start, base, &pipeline)?);
        }
        let longer = seconds / relaxed.seconds;
        if !self.problem.cost.is_free() && longer.is_finite() {
            let targets: Vec<f64> = relaxed.targets.iter().map(|target| target * longer).collect();
            least = least.min(self.solve(candidate, &targets, base, &pipeline)?);
        }
        Ok(self.best.as_ref().is_some_and(|best| best.seconds == least))
    }

    /// The seconds of a solution, infinite if there is none.
    ///
    /// They are estimated with every rank as slow as the slowest of the micro-batch: never less than what it takes, and close where
    /// micro-batches are balanced.
    fn solve(&mut self, candidate: &Candidate, targets: &[f64], base: usize, pipeline: &Pipeline) -> Result<f64> {
        let num_micro_batches = candidate.num_micro_batches;
        let Some(draft) = self.problem.solve(targets, base) else { return Ok(f64::INFINITY) };
        let costs = draft.costs();
        let order = shape::arrange(&costs, targets);
        if !self.fits_memory(pipeline, &draft, &order)? {
            return Ok(f64::INFINITY);
        }
        let p2p = [self.options.p2p_seconds];
        let times = Times::per_micro_batch(&costs)?.with_p2p(&p2p)?;
        let seconds = pipeline.makespan_in_order(&times, &order, &mut self.buffers);
        match self.sweep.iter_mut().find(|(count, _)| *count == num_micro_batches) {
            Some((_, least)) => *least = least.min(seconds),
            None => self.sweep.push((num_micro_batches, seconds)),
        }
        let price = price(self.options, num_micro_batches, seconds);
        let beats = |best: &Best| (price, num_micro_batches) < (best.price(self.options), best.num_micro_batches);
        if self.best.as_ref().is_none_or(beats) {
            self.best = Some(Best { num_micro_batches, draft, order, seconds });
        }
        Ok(seconds)
    }

    /// Whether no rank has more tokens under way than rounds of `num_stages` full micro-batches may have, which memory was planned for.
    ///
    /// An interleaved pipeline holds a round for each of its virtual stages but one, and what 1F1B holds twice. So larger rounds hold
    /// more micro-batches, unless these are small enough. What somebody asks for is taken as it is.
    fn fits_memory(&self, pipeline: &Pipeline, draft: &Draft, order: &[usize]) -> Result<bool> {
        let &DynamicCpOptions { num_stages, num_virtual_stages, max_tokens_per_rank, .. } = self.options;
        let whole = order.len() <= num_stages || order.len().is_multiple_of(num_stages);
        if num_virtual_stages == 1 || whole || self.options.num_micro_batches.is_some() {
            return Ok(true);
        }
        let fullest = self.problem.fullest(draft);
        let tokens: Vec<f64> = order.iter().map(|&micro_batch| fullest[micro_batch] as f64).collect();
        let held = pipeline.peak_activation(Some(&tokens))?.into_iter().fold(0.0, f64::max);
        let passes = (num_virtual_stages + 1) * num_stages - 1;
        Ok(held <= passes as f64 * f64::from(max_tokens_per_rank) / num_virtual_stages as f64)
    }

    /// Doubles the micro-batches until the documents fit, which they do when each can have one, or a plan may have no more.
    fn more(&mut self, most: usize) -> Result<()> {
        let round = if self.options.num_virtual_stages > 1 { self.options.num_stages } else { 1 };
        let limit = limit(self.options);
        let whole = if limit > round { limit - limit % round } else { limit };
        let wanted = self.problem.documents.len().max(self.options.min_micro_batches.unwrap_or(1));
        let enough = wanted.next_multiple_of(round).min(whole);
        let mut count = most;
        while self.best.is_none() && count < enough {
            count = (2 * count).next_multiple_of(round).min(enough);
            let candidate = self.candidate(count)?;
            self.attempt(&candidate, self.problem.largest_group, true)?;
        }
        Ok(())
    }

    /// Tries smaller blocks, where exchange costs: first for the best number of micro-batches, then the best size for those that
    /// were close to it.
    fn smaller_blocks(&mut self, candidates: &[Candidate]) -> Result<()> {
        let Some(best) = self.best.as_ref().filter(|_| !self.problem.cost.is_free()) else {
            return Ok(());
        };
        let (count, close) = (best.num_micro_batches, best.seconds * CLOSE);
        let others: Vec<usize> = self
            .sweep
            .iter()
            .filter(|(other, seconds)| *other != count && *seconds <= close)
            .map(|(other, _)| *other)
            .collect();
        let mut base = None;
        for size in self.problem.group_sizes().filter(|&size| size < self.problem.largest_group) {
            for candidate in candidates.iter().filter(|candidate| candidate.num_micro_batches == count) {
                if self.attempt(candidate, size, true)? {
                    base = Some(size);
                }
            }
        }
        for candidate in candidates.iter().filter(|candidate| others.contains(&candidate.num_micro_batches)) {
            if let Some(base) = base {
                self.attempt(candidate, base, true)?;
            }
        }
        Ok(())
    }
}

fn layout(options: &DynamicCpOptions, num_micro_batches: usize) -> Layout {
    let &DynamicCpOptions { num_stages, num_virtual_stages, .. } = options;
    let schedule = if num_virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward };
    Layout { schedule, num_stages, num_virtual_stages, num_micro_batches }
}
