//! Everything that can be wrong with what a caller asks Dynamic-CP for.

use crate::cost::{CostModel, Unit};
use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::{MAX_STAGES, MAX_TOKENS, MAX_WORLD_SIZE};

use super::cost::check_seconds;
use super::counts::{limit, whole};
use super::options::DynamicCpOptions;

/// The size of the largest group, if nothing is wrong.
pub(super) fn check(lengths: &Lengths, options: &DynamicCpOptions, cost_model: &CostModel) -> Result<usize> {
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
    options.communication.check()?;
    check_seconds("micro_batch_seconds", options.micro_batch_seconds)?;
    check_seconds("p2p_seconds", options.p2p_seconds)?;
    check_seconds("cost_model.micro_batch", cost_model.micro_batch())?;
    check_unit(options, cost_model)?;
    if cost_model.is_range() {
        let requirement = "is a range: Dynamic-CP plans by one cost model";
        return Err(Error::Combination { argument: "cost_model", requirement });
    }
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

/// Seconds can be added to costs only where these are seconds, or may be.
fn check_unit(options: &DynamicCpOptions, cost_model: &CostModel) -> Result<()> {
    let seconds = [
        ("cp_seconds_per_exchange", options.communication.seconds_per_exchange),
        ("cp_seconds_per_token", options.communication.seconds_per_token),
        ("micro_batch_seconds", options.micro_batch_seconds),
        ("p2p_seconds", options.p2p_seconds),
    ];
    match seconds.into_iter().find(|&(_, seconds)| seconds > 0.0) {
        Some((argument, _)) if cost_model.unit() == Some(Unit::Flops) => {
            let requirement = "is in seconds, but the cost model is in FLOPs (unit=\"flops\"): give costs in seconds, by \
                               flops_per_second, a profile, or CostModel.fit";
            Err(Error::Combination { argument, requirement })
        }
        _ => Ok(()),
    }
}
