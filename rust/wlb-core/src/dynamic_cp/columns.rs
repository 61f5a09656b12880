//! The plan of a step whose documents cost several resources, each with a barrier of its own.
//!
//! The number of micro-batches, and what part of the work each should get, are at first those of a plan by the sum of
//! the columns. Its documents are then made level in all columns at once: in blocks of several sizes
//! ([`Division::level`]), by exchanges ([`exchange`]), and halved where that makes no micro-batch slower
//! ([`Division::halved`]). Where groups exchange, other numbers of micro-batches are tried, too: groups that are level
//! in all columns have more documents, so that fewer micro-batches may be better. Of these plans, and the one by the
//! sum, the one whose simulated step is shortest is taken.

use std::rc::Rc;

use crate::cost::DocumentCosts;
use crate::error::Result;
use crate::lengths::Lengths;
use crate::pipeline::{Buffers, Pipeline};

use super::bound;
use super::by_column::{ByColumn, Clock};
use super::check::check;
use super::cost::{Communication, Costs, GroupCost, Load};
use super::counts::{Counts, note, price};
use super::division::{Division, Place};
use super::exchange::exchange;
use super::memory;
use super::options::DynamicCpOptions;
use super::plan::{DynamicCpPlan, Group};
use super::problem::Problem;
use super::relaxed::Relaxed;
use super::shape;
use super::simulate::of_groups;
use super::sweep;

/// Documents, times groups, up to which blocks of a size are tried.
const SPREAD: usize = 1 << 18;
/// Documents of a group on average, below which blocks are too small to be level.
const FEW: usize = 2;
/// Where groups exchange: most numbers of micro-batches that are tried beside that of the plan by the sum, and how many
/// in vain before no better one is expected on that side.
const COUNTS: usize = 5;
const IN_VAIN: usize = 2;
/// Each of them differs from the one before it by at least that part.
const APART: usize = 7;
/// Steps towards the best targets of each of them.
const STEPS: usize = 32;
/// Where groups exchange: plans of which documents are exchanged. Elsewhere one of the largest blocks is hardly ever
/// beaten by another.
const FINALISTS: usize = 3;
/// Exchanges that are looked at in each, for every document; and the least and most of them, whatever the documents.
const LOOKS: usize = 16;
const LEAST_LOOKS: usize = 1 << 13;
const MOST_LOOKS: usize = 1 << 18;

/// Divides the documents of one step, whose names are their indices.
pub(super) fn plan(
    lengths: &Lengths,
    options: &DynamicCpOptions,
    costs: &DocumentCosts,
    attention: Option<&[f64]>,
) -> Result<DynamicCpPlan> {
    let largest_group = check(lengths, options, Costs::Given { costs, attention })?;
    let sums = (0..costs.documents()).map(|document| costs.row(document).iter().sum()).collect();
    let sums = DocumentCosts::checked(sums, vec![None]);
    let by_sum = sweep::plan(lengths, options, Costs::Given { costs: &sums, attention })?;
    let options = &DynamicCpOptions { max_tokens_per_rank: options.most_tokens()?, ..options.clone() };
    let by_column = ByColumn::new(lengths, options, costs, attention, largest_group);

    let mut search = Search { by_column: &by_column, options, found: Vec::new(), sweep: Vec::new(), best: None };
    let slowest = |j: usize| by_sum.groups[by_sum.groups_of(j)].iter().map(|group| group.seconds).fold(0.0, f64::max);
    let num_micro_batches = by_sum.num_micro_batches();
    let shape = (0..num_micro_batches).map(|j| slowest(j) - options.micro_batch_seconds).collect();
    let count = Rc::new(Count::new(options, num_micro_batches, shape)?);
    search.judge(&count, Division::of(&by_column, &by_sum))?;
    search.attempt(&count)?;
    if !by_column.last().cost.is_free() {
        search.offer(&count, Division::of(&by_column, &by_sum), largest_group)?;
        let problem = free(lengths, options, &sums, largest_group);
        search.other_counts(&by_sum, &problem)?;
    }
    search.finish()?;

    let Search { best, mut sweep, .. } = search;
    sweep.sort_by_key(|&(count, _)| count);
    let Some(Best { division, seconds_by_column, .. }) = best else { return Ok(by_sum) };
    let Counts { least, most, .. } = Counts::new(lengths, options)?;
    let most = by_sum.sweep.last().map_or(most, |&(count, _)| count).max(most);
    let bounds = by_column.problems.iter().zip(&by_column.options);
    let lower_bound = bounds.map(|(problem, options)| bound::lower_bound(problem, options, least, most)).sum();
    let total: f64 = by_column.problems.iter().map(|problem| problem.total_work).sum();
    let ends = division.documents.iter().scan(0, |end, documents| {
        *end += documents.len();
        Some(*end)
    });
    let documents: Vec<u32> = division.documents.iter().flatten().copied().collect();
    let columns = by_column.columns();
    let group = |(&Place { first_rank, cp_size, .. }, seconds): (&Place, &[f64])| Group {
        first_rank,
        cp_size,
        seconds: seconds.iter().sum(),
    };
    Ok(DynamicCpPlan {
        document_offsets: std::iter::once(0).chain(ends).collect(),
        lengths: documents.iter().map(|&document| lengths[document as usize]).collect(),
        documents: documents.into_iter().map(i64::from).collect(),
        groups: division.groups.iter().zip(division.seconds.chunks_exact(columns)).map(group).collect(),
        column_seconds: division.seconds,
        group_offsets: division.offsets,
        seconds: seconds_by_column.iter().sum(),
        seconds_by_column,
        lower_bound,
        balanced_seconds: total / (options.world_size * options.num_stages) as f64,
        sweep,
        ..by_sum
    })
}

/// Documents by the sum of the columns where nothing is paid beside.
fn free(lengths: &Lengths, options: &DynamicCpOptions, sums: &DocumentCosts, largest_group: usize) -> Problem {
    let (communication, node) = (Communication::default(), None);
    let cost = GroupCost { communication, node, micro_batch_seconds: 0.0, document_seconds: 0.0 };
    Problem::new(lengths, Costs::Given { costs: sums, attention: None }, cost, options, largest_group)
}

/// A number of micro-batches.
struct Count {
    pipeline: Pipeline,
    /// What part of the work each should get.
    shape: Vec<f64>,
}

impl Count {
    fn new(options: &DynamicCpOptions, num_micro_batches: usize, shape: Vec<f64>) -> Result<Self> {
        Ok(Self { pipeline: Pipeline::new(&options.pipeline(num_micro_batches))?, shape })
    }

    /// With parts that would be best for documents that can be divided at will and exchange nothing.
    fn relaxed(options: &DynamicCpOptions, num_micro_batches: usize, problem: &Problem) -> Result<Self> {
        let of_pipeline = options.pipeline(num_micro_batches);
        let pipeline = Pipeline::new(&of_pipeline)?;
        let shape = shape::shape(&of_pipeline, 1.0, problem.heaviest());
        let mut relaxed = Relaxed::new(problem, &shape, problem.total_work / problem.world_size as f64);
        relaxed.descend(STEPS, &pipeline, options.p2p_seconds, &mut Buffers::default());
        Ok(Self { pipeline, shape: relaxed.targets })
    }

    fn number(&self) -> usize {
        self.shape.len()
    }
}

/// A plan before its documents are exchanged.
struct Found<'a> {
    price: f64,
    count: Rc<Count>,
    division: Division<'a>,
    /// Ranks of its blocks.
    base: usize,
}

/// The fastest plan.
struct Best<'a> {
    price: f64,
    division: Division<'a>,
    seconds_by_column: Vec<f64>,
}

struct Search<'a> {
    by_column: &'a ByColumn,
    options: &'a DynamicCpOptions,
    found: Vec<Found<'a>>,
    /// The least time of each number of micro-batches that was tried.
    sweep: Vec<(usize, f64)>,
    best: Option<Best<'a>>,
}

impl<'a> Search<'a> {
    /// Plans in blocks of several sizes. What the fastest of them takes, infinite if there is none.
    fn attempt(&mut self, count: &Rc<Count>) -> Result<f64> {
        let mut least = f64::INFINITY;
        for base in bases(self.by_column, count.number()) {
            let targets = targets(self.by_column, &count.shape, base);
            if let Some(division) = Division::level(self.by_column, &targets, base) {
                least = least.min(self.offer(count, division, base)?);
            }
        }
        Ok(least)
    }

    /// A plan of which documents may be exchanged, if there is memory for it: its price.
    fn offer(&mut self, count: &Rc<Count>, division: Division<'a>, base: usize) -> Result<f64> {
        if !self.fits_memory(count, &division)? {
            return Ok(f64::INFINITY);
        }
        let seconds = Clock::new(self.by_column, &count.pipeline, count.number()).seconds(&division.slowest())?;
        note(&mut self.sweep, count.number(), seconds);
        let price = price(self.options, count.number(), seconds);
        self.found.push(Found { price, count: count.clone(), division, base });
        Ok(price)
    }

    /// Tries numbers of micro-batches that the plan by the sum was tried with: from its own on, down and up.
    fn other_counts(&mut self, by_sum: &DynamicCpPlan, problem: &Problem) -> Result<()> {
        let counts: Vec<usize> = by_sum.sweep.iter().map(|&(count, _)| count).collect();
        let at = counts.partition_point(|&count| count < by_sum.num_micro_batches());
        let mut left = COUNTS;
        let (below, above) = (counts[..at].iter().rev(), counts.get(at + 1..).unwrap_or_default().iter());
        let sides: [Vec<usize>; 2] = [below.copied().collect(), above.copied().collect()];
        for side in sides {
            let (mut in_vain, mut last) = (0, by_sum.num_micro_batches());
            for number in side {
                // Close to one that was tried not much is other.
                if number.abs_diff(last) * APART < last {
                    continue;
                }
                last = number;
                if left == 0 || in_vain == IN_VAIN {
                    break;
                }
                left -= 1;
                let before = self.found.iter().map(|found| found.price).fold(f64::INFINITY, f64::min);
                let count = Rc::new(Count::relaxed(self.options, number, problem)?);
                in_vain = if self.attempt(&count)? < before { 0 } else { in_vain + 1 };
            }
        }
        Ok(())
    }

    /// Lets documents change places in the fastest plans.
    fn finish(&mut self) -> Result<()> {
        let is_free = self.by_column.last().cost.is_free();
        let looks = (LOOKS * self.by_column.order.len()).clamp(LEAST_LOOKS, MOST_LOOKS);
        let mut found = std::mem::take(&mut self.found);
        found.sort_by(|a, b| a.price.total_cmp(&b.price));
        found.truncate(if is_free { 1 } else { FINALISTS });
        for Found { count, mut division, base, .. } in found {
            let targets = targets(self.by_column, &count.shape, base);
            let mut clock = Clock::new(self.by_column, &count.pipeline, count.number());
            exchange(&mut division, self.by_column, &targets, &mut clock, looks)?;
            let mut halved = division.halved();
            if !is_free {
                exchange(&mut halved, self.by_column, &targets, &mut clock, looks)?;
            }
            self.judge(&count, halved)?;
            self.judge(&count, division)?;
        }
        Ok(())
    }

    /// Keeps a plan whose ranks wait only for those of their groups, if it is the fastest and there is memory for it.
    fn judge(&mut self, count: &Count, division: Division<'a>) -> Result<()> {
        let of = |(column, options): (usize, &DynamicCpOptions)| {
            of_groups(&count.pipeline, &division.of_column(column), &division.offsets, options)
        };
        let seconds_by_column: Vec<f64> = self.by_column.options.iter().enumerate().map(of).collect();
        let seconds = seconds_by_column.iter().sum();
        let price = price(self.options, count.number(), seconds);
        if self.best.as_ref().is_none_or(|best| price < best.price) && self.fits_memory(count, &division)? {
            note(&mut self.sweep, count.number(), seconds);
            self.best = Some(Best { price, division, seconds_by_column });
        }
        Ok(())
    }

    /// Whether there is memory for it.
    fn fits_memory(&self, count: &Count, division: &Division<'_>) -> Result<bool> {
        let fullest = || (0..count.number()).map(|j| division.fullest(j, self.options.padding.as_ref()));
        memory::fits(self.options, &count.pipeline, count.number(), fullest)
    }
}

/// Sizes of blocks to try: the largest, since all others wait for more; and smaller ones where these exchange less, or
/// where a group may not have all documents.
fn bases(by_column: &ByColumn, num_micro_batches: usize) -> Vec<usize> {
    let problem = by_column.last();
    let documents = by_column.order.len();
    let groups = |base: usize| problem.world_size.div_ceil(base) * num_micro_batches;
    let largest = problem.largest_group;
    if problem.cost.is_free() && !problem.counts_documents() {
        return Some(largest).filter(|&base| documents * groups(base) <= SPREAD).into_iter().collect();
    }
    let mut sizes = problem.base_sizes();
    sizes.retain(|&base| documents * groups(base) <= SPREAD && (base == largest || FEW * groups(base) <= documents));
    sizes
}

/// Column by column, what each micro-batch should take: its part of the work, and of what blocks of that size exchange.
fn targets(by_column: &ByColumn, shape: &[f64], base: usize) -> Vec<Vec<f64>> {
    let whole: f64 = shape.iter().sum();
    let of = |(column, problem): (usize, &Problem)| {
        let constant = by_column.options[column].micro_batch_seconds;
        let world = problem.world_size as f64;
        let demand: f64 = match problem.cost.is_free() {
            true => problem.total_work,
            false => {
                let alone = |load: &Load| {
                    let size = problem.smallest(load).max(base).min(problem.largest_group);
                    (problem.cost.seconds(load, size) - constant) * size as f64
                };
                problem.documents.iter().map(|document| alone(&document.load)).sum()
            }
        };
        let scale = if whole > 0.0 { demand / world / whole } else { 0.0 };
        // What is nearly nothing beside the exchange has no finite scale.
        let scaled = |part: &f64| if scale.is_finite() { part * scale } else { part / whole * (demand / world) };
        shape.iter().map(|part| constant + scaled(part)).collect()
    };
    by_column.problems.iter().enumerate().map(of).collect()
}
