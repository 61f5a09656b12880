//! Simulation of a plan: seconds of the step, and tokens under way on a rank, which activations depend on.

use crate::error::{Error, Result};
use crate::packing::Sync;
use crate::pipeline::{Kind, Pipeline};

use super::counts::limits_rounds;
use super::options::DynamicCpOptions;
use super::plan::{Draft, Group};
use super::problem::Problem;

/// Seconds of a step: the pipeline's ops on every rank, where the ranks of a group start together.
///
/// Each stage has `world_size` ranks, and rank `r` of a stage hands its micro-batches to rank `r` of the next. All of
/// them run the same order of ops. A group's op starts when all of its ranks are free and have their input. Groups
/// change from micro-batch to micro-batch, and so do the ranks that wait for one another. Where they wait in every
/// micro-batch, all ranks of a stage do so like those of one group, as slow as its slowest.
///
/// # Complexity
/// O(ops * world_size).
pub(super) fn simulated(pipeline: &Pipeline, draft: &Draft, options: &DynamicCpOptions) -> f64 {
    let groups: Vec<Group> = draft.groups.iter().map(|group| group.planned()).collect();
    of_groups(pipeline, &groups, &draft.offsets, options)
}

/// Seconds of a step whose groups take what they say, in the pipeline of the options: what a plan's `seconds` would be.
///
/// # Arguments
/// * `groups` - micro-batch by micro-batch, in each in the order of their ranks, which are all ranks.
/// * `group_offsets` - where those of each micro-batch begin, then their number.
///
/// # Errors
/// [`Error::Combination`] if these are no micro-batches of all ranks, [`Error::Entry`] for seconds that are negative or
/// not finite, and those of a pipeline that there is not.
///
/// # Complexity
/// O(ops * world_size).
pub fn step_seconds(groups: &[Group], group_offsets: &[usize], options: &DynamicCpOptions) -> Result<f64> {
    let requirement = "must begin with 0, ascend, and end with the number of groups";
    let ascending = group_offsets.is_sorted() && group_offsets.first() == Some(&0);
    if !ascending || group_offsets.last() != Some(&groups.len()) {
        return Err(Error::Combination { argument: "group_offsets", requirement });
    }
    for ends in group_offsets.windows(2) {
        let mut ranks = 0;
        for group in &groups[ends[0]..ends[1]] {
            if group.first_rank as usize != ranks || group.cp_size == 0 {
                ranks = usize::MAX;
                break;
            }
            ranks += group.cp_size as usize;
        }
        if ranks != options.world_size {
            let requirement = "must be those of groups that are all ranks of their micro-batch";
            return Err(Error::Combination { argument: "cp_sizes", requirement });
        }
    }
    if let Some(index) = groups.iter().position(|group| !(group.seconds >= 0.0 && group.seconds.is_finite())) {
        let (value, requirement) = (groups[index].seconds, "must be finite and not negative");
        return Err(Error::Entry { argument: "group_seconds", index, value, requirement });
    }
    let pipeline = Pipeline::new(&options.pipeline(group_offsets.len() - 1))?;
    Ok(of_groups(&pipeline, groups, group_offsets, options))
}

pub(super) fn of_groups(pipeline: &Pipeline, groups: &[Group], offsets: &[usize], options: &DynamicCpOptions) -> f64 {
    if options.sync == Sync::MicroBatch && options.world_size > 1 {
        let slowest = |ends: &[usize]| groups[ends[0]..ends[1]].iter().map(|group| group.seconds).fold(0.0, f64::max);
        let one = |ends| Group { first_rank: 0, cp_size: 1, seconds: slowest(ends) };
        let together: Vec<Group> = offsets.windows(2).map(one).collect();
        let offsets: Vec<usize> = (0..offsets.len()).collect();
        return of_groups(pipeline, &together, &offsets, &DynamicCpOptions { world_size: 1, ..options.clone() });
    }
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, p2p_seconds, .. } = options;
    let third = 1.0 / (3 * num_stages * num_virtual_stages) as f64;
    let num_micro_batches = offsets.len() - 1;
    // The rank of the pipeline, then of the stage. Of a micro-batch only its latest end is ever waited for.
    let mut clocks = vec![0.0_f64; num_stages * world_size];
    let mut ends = vec![0.0_f64; num_micro_batches * world_size];
    for (op, rank, waits) in pipeline.program() {
        let j = op.micro_batch as usize;
        let clocks = &mut clocks[rank * world_size..][..world_size];
        let ends = &mut ends[j * world_size..][..world_size];
        let part = if op.kind == Kind::Backward { 2.0 * third } else { third };
        for group in &groups[offsets[j]..offsets[j + 1]] {
            let ranks = group.ranks();
            let clocks = &mut clocks[ranks.clone()];
            let ends = &mut ends[ranks];
            let mut start = clocks.iter().copied().fold(0.0, f64::max);
            if waits {
                // Of a group all ended together.
                start = start.max(ends[0] + p2p_seconds);
            }
            let end = start + group.seconds * part;
            clocks.fill(end);
            // Nobody waits for the gradient of weights.
            if op.kind != Kind::WeightGradient {
                ends.fill(end);
            }
        }
    }
    clocks.into_iter().fold(0.0, f64::max)
}

/// Whether no rank has more tokens under way than rounds of `num_stages` full micro-batches may have, which memory was
/// planned for.
///
/// An interleaved pipeline holds a round for each of its virtual stages but one, and what 1F1B holds twice. So larger
/// rounds hold more micro-batches, unless these are small enough.
pub(super) fn fits_memory(
    problem: &Problem,
    options: &DynamicCpOptions,
    pipeline: &Pipeline,
    draft: &Draft,
    order: &[usize],
) -> Result<bool> {
    if !limits_rounds(options, order.len()) {
        return Ok(true);
    }
    let &DynamicCpOptions { num_stages, num_virtual_stages, max_tokens_per_rank, .. } = options;
    let passes = (num_virtual_stages + 1) * num_stages - 1;
    let most = passes as f64 * f64::from(max_tokens_per_rank) / num_virtual_stages as f64;
    // Each micro-batch as its fullest rank.
    let fullest = draft.fullest(&problem.documents, options.padding.as_ref());
    let tokens: Vec<f64> = order.iter().map(|&micro_batch| fullest[micro_batch] as f64).collect();
    let under_way = pipeline.peak_activation(Some(&tokens))?.into_iter().fold(0.0, f64::max);
    Ok(under_way <= most)
}
