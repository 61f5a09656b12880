//! A packing from an assignment that was made elsewhere.

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
    /// A packing from an assignment that was made elsewhere (by a solver, by another packer), with our costs and
    /// imbalance.
    ///
    /// # Arguments
    /// * `assignment` - micro-batch of each document; -1 leaves the document over.
    ///
    /// # Errors
    /// [`Error::Mismatch`] and [`Error::OutOfRange`]; [`Error::Entry`] for a micro-batch that does not exist, and for
    /// the document with which a micro-batch exceeds `max_tokens` or the limit of a column.
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
        let argument = "assignment";
        let requirement = "must be a micro-batch, or -1 for a document left over";
        let wrong = |&micro_batch: &i64| !(-1..num_micro_batches as i64).contains(&micro_batch);
        if let Some(index) = assignment.iter().position(wrong) {
            let value = assignment[index] as f64;
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
                let columns = costs.columns();
                let priced =
                    Priced { lengths, costs, num_micro_batches, max_tokens, max_documents: None, cost_model: None };
                let mut found = priced.nothing();
                for (index, micro_batch) in placed {
                    let Some(j) = micro_batch else {
                        found.placement.leftover.push(index);
                        continue;
                    };
                    priced.put(&mut found, index, j);
                    if !priced.keeps_limits(&found.loads[j * columns..][..columns]) {
                        let requirement = "with this document the micro-batch has more than the limit of a column";
                        return Err(Error::Entry { argument, index, value: j as f64, requirement });
                    }
                }
                priced.packing(found, None, piece)
            }
        };
        let mut tokens = vec![0_i64; num_micro_batches];
        let fits = |(j, length): (&i64, &i32)| {
            usize::try_from(*j).is_err() || {
                tokens[*j as usize] += i64::from(*length);
                tokens[*j as usize] <= i64::from(max_tokens)
            }
        };
        if let Some(index) = assignment.iter().zip(lengths.iter()).map(fits).position(|fits| !fits) {
            let requirement = "with this document the micro-batch has more than max_tokens tokens";
            return Err(Error::Entry { argument, index, value: assignment[index] as f64, requirement });
        }
        Ok(packing)
    }
}
