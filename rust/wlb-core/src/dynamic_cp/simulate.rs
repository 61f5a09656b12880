//! Simulates a plan: the seconds of its step, and the tokens that a rank has under way, which decide activation memory.

use crate::error::{Error, Result};
use crate::packing::Sync;
use crate::pipeline::{Kind, Pipeline};

use super::counts::limits_rounds;
use super::options::DynamicCpOptions;
use super::plan::{Draft, DynamicCpPlan, Group};
use super::problem::Problem;

/// Seconds of a step, simulated op by op on every rank.
///
/// Each stage has `world_size` ranks, and rank `r` of a stage sends its micro-batches to rank `r` of the next stage.
/// All ranks run the same order of ops. A group's op starts when all of its ranks are free and have their input. Groups
/// change from micro-batch to micro-batch, and so do the ranks that wait for one another. If ranks wait in every
/// micro-batch, all ranks of a stage act like one group that is as slow as its slowest.
///
/// # Complexity
/// O(ops * world_size).
pub(super) fn simulated(pipeline: &Pipeline, draft: &Draft, options: &DynamicCpOptions) -> f64 {
    let groups: Vec<Group> = draft.groups.iter().map(|group| group.planned()).collect();
    of_groups(pipeline, &groups, &draft.offsets, options)
}

/// Seconds of a step whose groups take the given seconds, in the pipeline of the options: the `seconds` of such a plan.
///
/// # Arguments
/// * `groups` - micro-batch by micro-batch; inside one in the order of ranks and covering all ranks.
/// * `group_offsets` - index of each micro-batch's first group, and at the end the number of groups.
///
/// # Errors
/// [`Error::Combination`] if the groups of a micro-batch do not cover all ranks, [`Error::Entry`] for seconds that are
/// negative or not finite, and the errors of the pipeline.
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
            let requirement = "must cover all ranks of every micro-batch";
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

impl DynamicCpPlan {
    /// Time of the step if its groups took these seconds.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another number of groups, [`Error::Entry`] for seconds that are negative or not finite.
    ///
    /// # Complexity
    /// O(ops * world_size).
    pub fn step_seconds(&self, seconds: &[f64]) -> Result<f64> {
        let (found, expected) = (seconds.len(), self.groups.len());
        if found != expected {
            return Err(Error::Mismatch { argument: "group_seconds", found, other: "groups", expected });
        }
        let timed = self.groups.iter().zip(seconds).map(|(group, &seconds)| Group { seconds, ..*group });
        let options = DynamicCpOptions {
            num_virtual_stages: self.num_virtual_stages,
            schedule: Some(self.schedule),
            sync: self.sync,
            p2p_seconds: self.p2p_seconds,
            ..DynamicCpOptions::new(self.world_size, self.num_stages, self.max_tokens_per_rank)
        };
        step_seconds(&timed.collect::<Vec<_>>(), &self.group_offsets, &options)
    }
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
    // `clocks`: by stage, then by rank. `ends`: only the latest end of a micro-batch on a rank is ever waited for.
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
                // All ranks of a group ended together.
                start = start.max(ends[0] + p2p_seconds);
            }
            let end = start + group.seconds * part;
            clocks.fill(end);
            // No stage waits for the gradient of weights.
            if op.kind != Kind::WeightGradient {
                ends.fill(end);
            }
        }
    }
    clocks.into_iter().fold(0.0, f64::max)
}

/// Whether no rank has more tokens under way than memory was planned for: the tokens of rounds of `num_stages` full
/// micro-batches.
///
/// An interleaved pipeline holds one round for each virtual stage but one, and twice the micro-batches of 1F1B. Larger
/// rounds hold more micro-batches, which fit only if they are small enough.
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
    // Each micro-batch counts with its fullest rank.
    let fullest = draft.fullest(&problem.documents, options.padding.as_ref());
    let tokens: Vec<f64> = order.iter().map(|&micro_batch| fullest[micro_batch] as f64).collect();
    let under_way = pipeline.peak_activation(Some(&tokens))?.into_iter().fold(0.0, f64::max);
    Ok(under_way <= most)
}
