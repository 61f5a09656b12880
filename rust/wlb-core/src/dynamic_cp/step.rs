//! The plan of a step.

use crate::error::{Error, Result};
use crate::lengths::Lengths;

use super::cost::Costs;
use super::options::DynamicCpOptions;
use super::plan::DynamicCpPlan;
use super::sweep;

/// Divides the documents of one step among micro-batches and groups of ranks.
///
/// # Arguments
/// * `ids` - names of the documents in the plan; their indices if not given.
/// * `costs` - what documents cost on one rank: a cost model, or one cost for each document. Memory goes by tokens
///   either way.
///
/// # Returns
/// The groups of every micro-batch, their documents, the predicted time of the step, and a time that no plan beats.
///
/// # Errors
/// [`Error::OutOfRange`], [`Error::Number`] for options; [`Error::Mismatch`] for `ids`; [`Error::TooLong`] for a
/// document that exceeds the memory of the largest group; [`Error::Combination`] when the documents do not fit into the
/// micro-batches allowed ([`MAX_CELLS`](crate::limits::MAX_CELLS) if not given); [`Error::Schedule`] when an
/// interleaved pipeline does not take that number of micro-batches; [`Error::InfiniteCost`]; [`Error::Combination`],
/// [`Error::Column`] and [`Error::Entry`] for costs of documents.
///
/// # Complexity
/// For `n` documents, `p` stages of `v` parts and `m` micro-batches: O(n log world_size + p v m) for each of about a
/// dozen numbers of micro-batches (several times as many attempts where exchange costs), and O(p v m world_size) for
/// the simulation of the best. Where exchange costs and documents' costs do not follow their lengths, a logarithm of
/// the groups more for each document. In a world that is no power of two, up to O(n m log world_size) instead, and O(n
/// m world_size) where memory binds: mostly far less. Twice that where groups may have any size.
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
    let mut plan = sweep::plan(lengths, options, costs)?;
    if let Some(ids) = ids {
        plan.documents.iter_mut().for_each(|document| *document = ids[*document as usize]);
    }
    Ok(plan)
}
