//! The plan of a step whose documents cost several resources, each with a barrier of its own.
//!
//! The number of micro-batches, and what part of the work each should get, are those of a plan by the sum of the
//! columns. Its documents are then made level in all columns at once: in blocks of several sizes ([`Division::level`]),
//! by exchanges ([`exchange`]), and halved where that makes no micro-batch slower ([`Division::halved`]). Of these plans,
//! and the one by the sum, the one whose simulated step is shortest is taken.

use crate::cost::DocumentCosts;
use crate::error::Result;
use crate::lengths::Lengths;
use crate::pipeline::Pipeline;

use super::bound;
use super::by_column::{ByColumn, Clock};
use super::check::check;
use super::cost::{Costs, Load};
use super::counts::Counts;
use super::division::{Division, Place};
use super::exchange::exchange;
use super::options::DynamicCpOptions;
use super::plan::{DynamicCpPlan, Group};
use super::problem::Problem;
use super::simulate::of_groups;
use super::sweep;

/// Documents, times groups, up to which blocks of a size are tried.
const SPREAD: usize = 1 << 18;
/// Documents of a group on average, below which blocks are too small to be level.
const FEW: usize = 2;
/// Plans of which documents are exchanged, and how many exchanges are looked at in each, for every document.
const FINALISTS: usize = 2;
const LOOKS: usize = 128;
/// Least and most looks, whatever the documents.
const LEAST_LOOKS: usize = 1 << 15;
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
    let count = by_sum.num_micro_batches();
    let pipeline = Pipeline::new(&options.pipeline(count))?;
    let mut clock = Clock::new(&by_column, &pipeline, count);
    let shape: Vec<f64> = (0..count)
        .map(|j| by_sum.groups[by_sum.groups_of(j)].iter().map(|group| group.seconds).fold(0.0, f64::max))
        .map(|seconds| seconds - options.micro_batch_seconds)
        .collect();

    let given = Division::of(&by_column, &by_sum);
    let mut found = vec![(clock.seconds(&given.slowest())?, given.clone(), by_column.last().largest_group)];
    for base in bases(&by_column, count) {
        let targets = targets(&by_column, &shape, base);
        let Some(level) = Division::level(&by_column, &targets, base) else { continue };
        if fits_memory(options, &level, &pipeline)? {
            found.push((clock.seconds(&level.slowest())?, level, base));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.truncate(FINALISTS);
    let looks = (LOOKS * lengths.len()).clamp(LEAST_LOOKS, MOST_LOOKS);
    let mut best = (simulated(&given, &pipeline, &by_column), clock.seconds(&given.slowest())?, given);
    for (_, mut division, base) in found {
        let targets = targets(&by_column, &shape, base);
        exchange(&mut division, &by_column, &targets, &mut clock, looks)?;
        let mut halved = division.halved();
        if !by_column.last().cost.is_free() {
            exchange(&mut halved, &by_column, &targets, &mut clock, looks / 2)?;
        }
        for candidate in [halved, division] {
            let seconds = simulated(&candidate, &pipeline, &by_column);
            if seconds.iter().sum::<f64>() < best.0.iter().sum() && fits_memory(options, &candidate, &pipeline)? {
                best = (seconds, clock.seconds(&candidate.slowest())?, candidate);
            }
        }
    }
    let (seconds_by_column, estimate, division) = best;

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
        sweep: vec![(count, estimate)],
        ..by_sum
    })
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
        shape.iter().map(|part| constant + part * scale).collect()
    };
    by_column.problems.iter().enumerate().map(of).collect()
}

/// Seconds that each column takes, where ranks wait for those of their groups only.
fn simulated(division: &Division<'_>, pipeline: &Pipeline, by_column: &ByColumn) -> Vec<f64> {
    let of = |(column, options): (usize, &DynamicCpOptions)| {
        of_groups(pipeline, &division.of_column(column), &division.offsets, options)
    };
    by_column.options.iter().enumerate().map(of).collect()
}

/// Whether no rank has more under way than memory was planned for.
fn fits_memory(options: &DynamicCpOptions, division: &Division<'_>, pipeline: &Pipeline) -> Result<bool> {
    if !sweep::limits_rounds(options, division.num_micro_batches()) {
        return Ok(true);
    }
    let fullest = (0..division.num_micro_batches()).map(|j| division.fullest(j, options.padding.as_ref()));
    sweep::fits_memory(options, pipeline, fullest)
}
