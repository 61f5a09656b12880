//! How long a plan takes.

use crate::interrupt::Meter;
use crate::pipeline::{Kind, Pipeline};

use super::draft::Draft;
use super::options::DynamicCpOptions;

/// Seconds of a step: the pipeline's ops on every rank, where the ranks of a group start together.
///
/// Each stage has `world_size` ranks, and rank `r` of a stage hands its micro-batches to rank `r` of the next. All of
/// them run the same order of ops. A group's op starts when all of its ranks are free and have their input. Groups
/// change from micro-batch to micro-batch, and so do the ranks that wait for one another.
///
/// # Complexity
/// O(ops * world_size).
pub(super) fn step_seconds(pipeline: &Pipeline, draft: &Draft, options: &DynamicCpOptions) -> f64 {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, p2p_seconds, .. } = options;
    let third = 1.0 / (3 * num_stages * num_virtual_stages) as f64;
    let num_micro_batches = draft.offsets.len() - 1;
    // The rank of the pipeline, then of the stage. Of a micro-batch only its latest end is ever waited for.
    let mut clocks = vec![0.0_f64; num_stages * world_size];
    let mut ends = vec![0.0_f64; num_micro_batches * world_size];
    let mut meter = Meter::default();
    for (op, rank, waits) in pipeline.program() {
        meter.spend(world_size);
        let j = op.micro_batch as usize;
        let clocks = &mut clocks[rank * world_size..][..world_size];
        let ends = &mut ends[j * world_size..][..world_size];
        let part = if op.kind == Kind::Backward { 2.0 * third } else { third };
        for group in &draft.groups[draft.offsets[j]..draft.offsets[j + 1]] {
            let ranks = group.first_rank as usize..(group.first_rank + group.cp_size) as usize;
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
