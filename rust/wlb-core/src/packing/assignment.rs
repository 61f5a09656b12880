//! A packing that somebody else made, scored like ours.

use crate::cost::CostModel;
use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;

use super::options::check_micro_batches;
use super::piece::Piece;
use super::placement::Placement;
use super::plan::Packing;

impl Packing {
    /// A packing from an assignment made elsewhere (a solver, another packer), scored like ours.
    ///
    /// # Arguments
    /// * `assignment` - micro-batch of each document; -1 leaves it over.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::OutOfRange`], [`Error::Entry`] for a micro-batch that does not exist, and
    /// [`Error::Combination`] if a micro-batch has more than `max_tokens` tokens.
    ///
    /// # Complexity
    /// O(n + num_micro_batches).
    ///
    /// # Example
    /// ```
    /// use wlb_core::{CostModel, Lengths, Mask, Packing};
    ///
    /// let lengths = Lengths::new("lengths", &[30, 20, 10])?;
    /// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
    /// let packing = Packing::from_assignment(&lengths, &[0, 1, 1], 2, 100, &cost)?;
    /// assert_eq!((packing.tokens.as_slice(), packing.imbalance()), (&[30, 30][..], 1.0));
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn from_assignment(
        lengths: &Lengths,
        assignment: &[i64],
        num_micro_batches: usize,
        max_tokens: i32,
        cost_model: &CostModel,
    ) -> Result<Self> {
        check_micro_batches(num_micro_batches)?;
        check_range("max_tokens", i64::from(max_tokens), 1, MAX_TOKENS)?;
        cost_model.check_finite(lengths)?;
        if assignment.len() != lengths.len() {
            let (found, expected) = (assignment.len(), lengths.len());
            return Err(Error::Mismatch { argument: "assignment", found, other: "lengths", expected });
        }
        let mut placement = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
        for (index, (&length, &micro_batch)) in lengths.iter().zip(assignment).enumerate() {
            match usize::try_from(micro_batch) {
                Ok(j) if j < num_micro_batches => placement.put(index, j, length, cost_model.cost(length)),
                Err(_) if micro_batch == -1 => placement.leftover.push(index),
                _ => {
                    let requirement = "must be a micro-batch, or -1 for a document left over";
                    let (argument, value) = ("assignment", micro_batch as f64);
                    return Err(Error::Entry { argument, index, value, requirement });
                }
            }
        }
        if placement.tokens.iter().any(|&tokens| tokens > i64::from(max_tokens)) {
            let requirement = "puts more than max_tokens tokens into one micro-batch";
            return Err(Error::Combination { argument: "assignment", requirement });
        }
        Ok(placement.into_packing(None, max_tokens, cost_model, |index| Piece::whole(index, lengths[index])))
    }
}
