//! The costs of a batch's documents, from a model or given.

use crate::cost::{CostModel, DocumentCosts};
use crate::error::{Error, Result};

/// Costs of a batch's documents.
#[derive(Clone, Copy, Debug)]
pub enum Pricing<'a> {
    /// From their lengths.
    Model(&'a CostModel),
    /// Given by the user.
    Given(&'a DocumentCosts),
}

impl<'a> From<&'a CostModel> for Pricing<'a> {
    fn from(model: &'a CostModel) -> Self {
        Self::Model(model)
    }
}

impl<'a> From<&'a DocumentCosts> for Pricing<'a> {
    fn from(costs: &'a DocumentCosts) -> Self {
        Self::Given(costs)
    }
}

impl Pricing<'_> {
    /// Cost of every micro-batch besides its documents.
    pub(crate) fn micro_batch(&self) -> f64 {
        match self {
            Self::Model(model) => model.micro_batch(),
            Self::Given(_) => 0.0,
        }
    }

    /// Checks that every document has a cost and that all sums are finite.
    pub(crate) fn check(&self, lengths: &[i32]) -> Result<()> {
        match self {
            Self::Model(model) => model.check_finite(lengths),
            Self::Given(costs) if costs.documents() == lengths.len() => costs.check_columns(),
            Self::Given(costs) => {
                let (found, expected) = (costs.documents(), lengths.len());
                Err(Error::Mismatch { argument: "costs", found, other: "lengths", expected })
            }
        }
    }
}
