//! Of plans that take no longer, or hardly, one whose fullest rank holds fewer tokens.
//!
//! Groups are made equal in seconds: one with a long document has few tokens a rank, one with short ones many. What
//! activations take goes by tokens, and the fullest rank decides. The solver keeps any limit of tokens, so the least
//! limit is searched for that leaves the step as fast.

use crate::error::Result;
use crate::lengths::Lengths;
use crate::pipeline::Pipeline;

use super::cost::Costs;
use super::memory;
use super::options::DynamicCpOptions;
use super::plan::DynamicCpPlan;

/// Limits that are tried: the last two differ by 1/256 of what there is between the least and that of the plan.
const TRIES: usize = 8;

/// The plan, or one of `solve` whose step takes at most `part` longer, with fewer tokens on its fullest rank in any
/// micro-batch, and no more under way.
///
/// It has no more micro-batches than were tried for the plan, whose bound then holds for it, too.
pub(super) fn even<'a>(
    plan: DynamicCpPlan,
    part: f64,
    lengths: &Lengths,
    options: &DynamicCpOptions,
    costs: Costs<'a>,
    solve: impl Fn(&Lengths, &DynamicCpOptions, Costs<'a>) -> Result<DynamicCpPlan>,
) -> Result<DynamicCpPlan> {
    let seconds = plan.seconds * (1.0 + part);
    let most = plan.sweep.last().map_or(plan.num_micro_batches(), |&(tried, _)| tried);
    let max_micro_batches = Some(most).filter(|_| options.num_micro_batches.is_none());
    let cells = options.num_micro_batches.unwrap_or(most) * options.world_size;
    let largest_group = options.max_cp_size.unwrap_or(options.world_size);
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let least = (lengths.total() as u64).div_ceil(cells as u64).max((longest as u64).div_ceil(largest_group as u64));
    // No plan keeps the one, the best does the other.
    let (mut fails, mut keeps) = ((least as i64 - 1).max(0), fullest(&plan).max().unwrap_or(0));
    let mut held = under_way(&plan, options)?;
    let mut best = plan;
    for _ in 0..TRIES {
        if keeps - fails <= 1 {
            break;
        }
        let limit = fails + (keeps - fails) / 2;
        let options = DynamicCpOptions { max_tokens_per_rank: limit as i32, max_micro_batches, ..options.clone() };
        // Whatever else could be wrong was found before: it does not fit.
        let found = solve(lengths, &options, costs).ok().filter(|found| found.seconds <= seconds);
        let found = found.map(|found| under_way(&found, &options).map(|tokens| (tokens, found))).transpose()?;
        match found.filter(|&(tokens, _)| tokens <= held) {
            Some((tokens, found)) => {
                (held, keeps) = (tokens, fullest(&found).max().unwrap_or(0));
                best = DynamicCpPlan {
                    max_tokens_per_rank: best.max_tokens_per_rank,
                    lower_bound: best.lower_bound,
                    ..found
                };
            }
            None => fails = limit,
        }
    }
    Ok(best)
}

/// Tokens of each micro-batch on its fullest rank, as they run.
fn fullest(plan: &DynamicCpPlan) -> impl Iterator<Item = i64> {
    (0..plan.num_micro_batches())
        .map(|j| plan.groups_of(j).map(|group| plan.padded_tokens_per_rank(group)).max().unwrap_or(0))
}

/// The most tokens that a rank has under way.
fn under_way(plan: &DynamicCpPlan, options: &DynamicCpOptions) -> Result<f64> {
    let pipeline = Pipeline::new(&options.pipeline(plan.num_micro_batches()))?;
    memory::under_way(&pipeline, fullest(plan))
}
