//! Checks the arguments of Dynamic-CP.

use crate::cost::{CostModel, DocumentCosts, Unit};
use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::{MAX_STAGES, MAX_TOKENS, MAX_WORLD_SIZE};
use crate::pipeline::Schedule;

use super::cost::{Costs, MAX_SECONDS, check_seconds};
use super::counts::{limit, whole};
use super::options::{DynamicCpOptions, GroupSizes};

/// Checks everything; returns the size of the largest group.
pub(super) fn check(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>) -> Result<usize> {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, max_tokens_per_rank, .. } = options;
    let size = |argument, value: usize, most: usize| check_range(argument, value as i64, 1, most as i64);
    size("world_size", world_size, MAX_WORLD_SIZE)?;
    size("num_stages", num_stages, MAX_STAGES)?;
    size("num_virtual_stages", num_virtual_stages, MAX_STAGES)?;
    check_range("max_tokens_per_rank", i64::from(max_tokens_per_rank), 1, MAX_TOKENS)?;
    if let Some(max_documents) = options.max_documents {
        check_range("max_documents", i64::try_from(max_documents).unwrap_or(i64::MAX), 1, MAX_TOKENS)?;
    }
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
        let requirement = "must not be given with num_micro_batches";
        return Err(Error::Combination { argument, requirement });
    }
    check_schedule(options)?;
    if let Some(least) = options.min_micro_batches
        && whole(options, least, options.max_micro_batches.unwrap_or(most)).is_none()
    {
        let requirement =
            "must be at most max_micro_batches; with virtual stages, with a number between them that its rounds divide";
        return Err(Error::Combination { argument: "min_micro_batches", requirement });
    }
    options.exchange.check()?;
    options.node.map_or(Ok(()), |node| node.check(&options.exchange))?;
    check_seconds("micro_batch_seconds", options.micro_batch_seconds)?;
    check_seconds("p2p_seconds", options.p2p_seconds)?;
    match costs {
        Costs::Model(model) => check_model(options, model)?,
        Costs::Given { costs, attention } => check_given(lengths, options, costs, attention)?,
    }
    let largest = options.max_cp_size.unwrap_or(world_size);
    size("max_cp_size", largest, world_size)?;
    let largest_group = match options.group_sizes {
        GroupSizes::PowersOfTwo => 1 << largest.ilog2(),
        GroupSizes::Any => match &options.only_sizes {
            None => largest,
            Some(sizes) => sizes.iter().copied().take_while(|&size| size <= largest).last().unwrap_or(1),
        },
    };
    if let Costs::Model(model) = costs {
        model.check_finite(lengths)?;
    }
    let most = largest_group as i64 * i64::from(options.most_tokens()?);
    if options.padding.is_some() && most > MAX_TOKENS {
        let requirement = "times max_tokens_per_rank is more than int32 cu_seqlens can count: pass a smaller \
                           max_cp_size for padded micro-batches";
        return Err(Error::Combination { argument: "max_cp_size", requirement });
    }
    let limit = most.min(MAX_TOKENS);
    match lengths.iter().position(|&length| i64::from(length) > limit) {
        None => Ok(largest_group),
        Some(index) => Err(Error::TooLong {
            argument: "lengths",
            index,
            value: i64::from(lengths[index]),
            given: match &options.padding {
                Some(padding) if options.most_tokens()? < max_tokens_per_rank => {
                    let of_a_rank = padding.named("max_tokens_per_rank", max_tokens_per_rank);
                    format!("{limit} tokens on the largest group: {largest_group} ranks of {of_a_rank}")
                }
                _ => format!("max_tokens_per_rank on the largest group = {limit}"),
            },
            limit,
            hint: "; split it first (split_documents), or raise max_tokens_per_rank or max_cp_size",
        }),
    }
}

/// Only these four schedules have bounds and rules for the number of micro-batches.
fn check_schedule(options: &DynamicCpOptions) -> Result<()> {
    use Schedule::{DualPipeV, Interleaved, OneForwardOneBackward, ZbV};
    let schedule = options.schedule();
    if !matches!(schedule, OneForwardOneBackward | Interleaved | ZbV | DualPipeV) {
        let requirement = "must be \"1f1b\", \"interleaved_1f1b\", \"zbv\" or \"dualpipev\" for Dynamic-CP";
        return Err(Error::Combination { argument: "schedule", requirement });
    }
    if schedule == DualPipeV && options.max_micro_batches.is_some_and(|most| most < 2 * options.num_stages) {
        let requirement = "is too low: \"dualpipev\" needs at least two for each stage";
        return Err(Error::Combination { argument: "max_micro_batches", requirement });
    }
    // Checks the number of stages, and the number of micro-batches if it is given.
    options.pipeline(options.num_micro_batches.unwrap_or(2 * options.num_stages)).check()
}

fn check_model(options: &DynamicCpOptions, cost_model: &CostModel) -> Result<()> {
    check_seconds("cost_model.micro_batch", cost_model.micro_batch())?;
    check_unit(options, cost_model)
}

fn check_given(
    lengths: &Lengths,
    options: &DynamicCpOptions,
    costs: &DocumentCosts,
    attention: Option<&[f64]>,
) -> Result<()> {
    let expected = lengths.len();
    let mismatch = |argument, found| Err(Error::Mismatch { argument, found, other: "lengths", expected });
    if costs.columns() > 1 || costs.is_limited() {
        let requirement = "must be one number for each document, float64[n]: Dynamic-CP takes no columns";
        return Err(Error::Combination { argument: "costs", requirement });
    }
    if costs.documents() != expected {
        return mismatch("costs", costs.documents());
    }
    if costs.sums().iter().sum::<f64>() > MAX_SECONDS {
        let requirement = "is too large: the sum of all costs must be at most 1e200";
        let (argument, value) = ("costs", costs.values()[0]);
        return Err(Error::Cell { argument, row: 0, column: None, value, requirement });
    }
    if let Some(attention) = attention {
        if attention.len() != expected {
            return mismatch("attention_costs", attention.len());
        }
        let within = |(part, whole): (&f64, &f64)| (0.0..=*whole).contains(part);
        if let Some(index) = attention.iter().zip(costs.values()).position(|pair| !within(pair)) {
            let requirement = "is a part of costs: must be from 0 to the document's entry there";
            let value = attention[index];
            return Err(Error::Entry { argument: "attention_costs", index, value, requirement });
        }
    } else if options.hides() {
        let requirement = "is missing: attention hides exchange, so the part of costs that is attention is \
                           needed; pass it, or exchange with overlap=0";
        return Err(Error::Combination { argument: "attention_costs", requirement });
    }
    Ok(())
}

/// Options in seconds can only be added to costs in seconds, or to costs without a unit.
fn check_unit(options: &DynamicCpOptions, cost_model: &CostModel) -> Result<()> {
    let seconds = [
        ("exchange.seconds_per_exchange", options.exchange.seconds_per_exchange),
        ("exchange.seconds_per_token", options.exchange.seconds_per_token),
        ("exchange.seconds_per_exchange_in_node", options.node.map_or(0.0, |node| node.seconds_per_exchange)),
        ("exchange.seconds_per_token_in_node", options.node.map_or(0.0, |node| node.seconds_per_token)),
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
