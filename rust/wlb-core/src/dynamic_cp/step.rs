//! The plan of a step, from arguments to result: check, search, write out.

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::pipeline::Pipeline;

use super::bound;
use super::check::check;
use super::cost::{Costs, GroupCost};
use super::counts::{Counts, price};
use super::few;
use super::options::{DynamicCpOptions, GroupSizes};
use super::plan::{Best, DraftGroup, DynamicCpPlan};
use super::problem::Problem;
use super::search::{Found, StepSearch, with_gains};
use super::simulate;

/// Divides the documents of one step among micro-batches and groups of ranks.
///
/// # Arguments
/// * `ids` - ids of the documents in the plan; by default their indices.
/// * `costs` - costs of the documents on one rank: a cost model, or one cost for each document. Memory is counted in
///   tokens in both cases.
///
/// # Returns
/// The groups of every micro-batch, their documents, the predicted time of the step, and a lower bound on it.
///
/// [`Error::OutOfRange`], [`Error::Number`] for options; [`Error::Mismatch`] for `ids`; [`Error::TooLong`] for a
/// document that exceeds the memory of the largest group; [`Error::Combination`] when the documents do not fit into the
/// allowed micro-batches ([`MAX_CELLS`](crate::limits::MAX_CELLS) by default); [`Error::Schedule`] when the schedule
/// does not allow that number of micro-batches; [`Error::InfiniteCost`]; [`Error::Combination`], [`Error::Column`] and
/// [`Error::Entry`] for costs of documents.
///
/// # Complexity
/// For `n` documents, `p` stages of `v` parts and `m` micro-batches: O(n log world_size + p v m) for each of about a
/// dozen numbers of micro-batches (several times as many attempts if exchange costs, all but four of them for a sample
/// of the documents if these are very many), and O(p v m world_size) to simulate the best. If exchange costs and
/// documents' costs do not follow their lengths, a logarithm of the groups more for each document. In a world that is
/// no power of two, up to O(n m log world_size) instead, and O(n m world_size) if memory binds, but usually far less.
/// Twice that if groups may have any size. At most 16 documents on at most 64 ranks take one more search of a fixed
/// amount of work.
///
/// # Example
/// ```
/// use wlb_core::dynamic_cp::{DynamicCpOptions, plan_dynamic_cp};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let options = DynamicCpOptions { num_micro_batches: Some(1), ..DynamicCpOptions::new(4, 1, 1000) };
/// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
/// let plan = plan_dynamic_cp(&Lengths::new("lengths", &[2000, 1000, 1000])?, None, &options, &cost)?;
/// // The long document gets two of the four ranks, the short ones one each.
/// let sizes: Vec<u32> = plan.groups.iter().map(|group| group.cp_size).collect();
/// assert_eq!((sizes.as_slice(), plan.seconds), (&[2, 1, 1][..], 1000.0));
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn plan_dynamic_cp<'a>(
    lengths: &Lengths,
    ids: Option<&[i64]>,
    options: &DynamicCpOptions,
    costs: impl Into<Costs<'a>>,
) -> Result<DynamicCpPlan> {
    if let Some(found) = ids.map(<[i64]>::len).filter(|&found| found != lengths.len()) {
        return Err(Error::Mismatch { argument: "ids", found, other: "lengths", expected: lengths.len() });
    }
    let costs = costs.into();
    let mut plan = fastest(lengths, options, costs)?;
    if let Some(ids) = ids {
        plan.documents.iter_mut().for_each(|document| *document = ids[*document as usize]);
    }
    Ok(plan)
}

/// The fastest plan, with indices as ids of the documents.
fn fastest(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>) -> Result<DynamicCpPlan> {
    if options.group_sizes == GroupSizes::PowersOfTwo {
        return Ok(planned(lengths, options, costs, &[])?.plan);
    }
    // With more allowed groups the search sometimes ends at a slower plan, so the plan with powers of two is a
    // candidate, too.
    let of_powers = options.of_powers();
    let paid = |plan: &DynamicCpPlan| price(options, plan.num_micro_batches(), plan.seconds);
    let fewer = planned(lengths, &of_powers, costs, &[]);
    let starts = fewer.as_ref().map_or(&[][..], |fewer| &fewer.others);
    let plan = planned(lengths, options, costs, starts)?.plan;
    Ok(match fewer {
        Ok(Planned { plan: other, .. }) if paid(&other) < paid(&plan) => {
            DynamicCpPlan { lower_bound: plan.lower_bound.min(other.lower_bound), ..other }
        }
        _ => plan,
    })
}

/// A plan, and other plans that were found.
struct Planned {
    plan: DynamicCpPlan,
    /// For few documents: the best plan of each number of micro-batches, whatever number was asked for.
    others: Vec<Best>,
}

/// Plans with the group sizes of the options.
///
/// # Arguments
/// * `starts` - for few documents: plans with fewer allowed groups, from which the search continues.
fn planned(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>, starts: &[Best]) -> Result<Planned> {
    let largest_group = check(lengths, options, costs)?;
    // The cost model's constant for every micro-batch adds to the option's.
    let micro_batch_seconds = options.micro_batch_seconds + costs.micro_batch();
    let max_tokens_per_rank = options.most_tokens()?;
    let options = &DynamicCpOptions { micro_batch_seconds, max_tokens_per_rank, ..options.clone() };
    let cost = GroupCost {
        exchange: options.exchange,
        node: options.node,
        micro_batch_seconds,
        document_seconds: costs.document(),
    };
    let world_size = options.world_size;
    let problem = Problem::new(lengths, costs, cost, options, largest_group);
    let counts = Counts::new(lengths, options)?;
    let problems = with_gains(&problem);
    let mut found = StepSearch::new(&problem, options).run(&problems, &counts)?;
    let mut others = Vec::new();
    if few::are_few(&problem) {
        others = few::of_each_count(lengths, &problem, &problems, options, starts, &found)?;
        few::choose(&problem, options, &counts, &others, &mut found)?;
    }
    let Found { best, mut sweep, .. } = found;
    let Some(best) = best else {
        let argument = match options {
            DynamicCpOptions { num_micro_batches: Some(_), .. } => "num_micro_batches",
            DynamicCpOptions { max_micro_batches: Some(_), .. } => "max_micro_batches",
            DynamicCpOptions { max_documents: Some(_), .. } => "max_documents",
            _ => "max_tokens_per_rank",
        };
        let requirement = match options.max_documents {
            _ if counts.least <= counts.most && counts.safe(options).is_none() => {
                "leaves no multiple of num_stages: in other rounds an interleaved pipeline holds more tokens than \
                 max_tokens_per_rank allows, and no way was found to have fewer in each micro-batch"
            }
            None => {
                "no way was found to fit the documents into so few micro-batches of world_size * max_tokens_per_rank \
                 tokens"
            }
            Some(_) => {
                "no way was found to fit the documents into so few micro-batches of world_size * max_tokens_per_rank \
                 tokens, in groups of at most max_documents"
            }
        };
        return Err(Error::Combination { argument, requirement });
    };
    sweep.sort_by_key(|&(num_micro_batches, _)| num_micro_batches);
    let draft = best.draft.in_order(&best.order, &problem.documents);
    let pipeline = Pipeline::new(&options.pipeline(best.num_micro_batches))?;
    let seconds = simulate::simulated(&pipeline, &draft, options);
    let most = sweep.last().map_or(counts.most, |&(tried, _)| tried).max(counts.most);
    let lower_bound = bound::lower_bound(&problem, options, counts.least, most);
    let documents: Vec<i64> =
        draft.documents.iter().map(|&document| i64::from(problem.documents[document as usize].index)).collect();
    let plan = DynamicCpPlan {
        world_size,
        num_stages: options.num_stages,
        num_virtual_stages: options.num_virtual_stages,
        schedule: options.schedule(),
        sync: options.sync,
        max_tokens_per_rank,
        padding: options.padding.clone(),
        max_documents: options.max_documents,
        lengths: documents.iter().map(|&index| lengths[index as usize]).collect(),
        documents,
        groups: draft.groups.iter().map(DraftGroup::planned).collect(),
        document_offsets: std::iter::once(0).chain(draft.groups.iter().map(|group| group.end as usize)).collect(),
        group_offsets: draft.offsets,
        seconds,
        p2p_seconds: options.p2p_seconds,
        lower_bound,
        balanced_seconds: problem.total_work / (world_size * options.num_stages) as f64,
        sweep,
    };
    Ok(Planned { plan, others })
}
