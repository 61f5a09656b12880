//! A packing that somebody else made, scored like ours.

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;

use super::methods::columns::Priced;
use super::options::check_micro_batches;
use super::piece::Piece;
use super::placement::Placement;
use super::plan::Packing;
use super::pricing::Pricing;

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
    pub fn from_assignment<'a>(
        lengths: &Lengths,
        assignment: &[i64],
        num_micro_batches: usize,
        max_tokens: i32,
        costs: impl Into<Pricing<'a>>,
    ) -> Result<Self> {
        let costs = costs.into();
        check_micro_batches(num_micro_batches)?;
        check_range("max_tokens", i64::from(max_tokens), 1, MAX_TOKENS)?;
        costs.check(lengths)?;
        if assignment.len() != lengths.len() {
            let (found, expected) = (assignment.len(), lengths.len());
            return Err(Error::Mismatch { argument: "assignment", found, other: "lengths", expected });
        }
        let requirement = "must be a micro-batch, or -1 for a document left over";
        let wrong = |&micro_batch: &i64| !(-1..num_micro_batches as i64).contains(&micro_batch);
        if let Some(index) = assignment.iter().position(wrong) {
            let (argument, value) = ("assignment", assignment[index] as f64);
            return Err(Error::Entry { argument, index, value, requirement });
        }
        let placed = assignment.iter().map(|&micro_batch| usize::try_from(micro_batch).ok()).enumerate();
        let piece = |index: usize| Piece::whole(index, lengths[index]);
        let packing = match costs {
            Pricing::Model(cost_model) => {
                let mut placement = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
                for (index, micro_batch) in placed {
                    match micro_batch {
                        Some(j) => placement.put(index, j, lengths[index], cost_model.cost(lengths[index])),
                        None => placement.leftover.push(index),
                    }
                }
                placement.into_packing(None, max_tokens, cost_model, piece)
            }
            Pricing::Given(costs) => {
                let priced = Priced { lengths, costs, num_micro_batches, max_tokens, empty_cost: 0.0 };
                let mut found = priced.nothing();
                for (index, micro_batch) in placed {
                    match micro_batch {
                        Some(j) => priced.put(&mut found, index, j),
                        None => found.placement.leftover.push(index),
                    }
                }
                if !priced.keeps_limits(&found.loads) {
                    let requirement = "puts more than the limit of a column into one micro-batch";
                    return Err(Error::Combination { argument: "assignment", requirement });
                }
                priced.packing(found, None, piece)
            }
        };
        if packing.tokens.iter().any(|&tokens| tokens > i64::from(max_tokens)) {
            let requirement = "puts more than max_tokens tokens into one micro-batch";
            return Err(Error::Combination { argument: "assignment", requirement });
        }
        Ok(match costs {
            Pricing::Model(cost_model) => packing.scored(cost_model),
            Pricing::Given(_) => packing,
        })
    }
}
