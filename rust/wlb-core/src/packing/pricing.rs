//! Source of the costs of a batch's documents.

use crate::cost::{CostModel, DocumentCosts};
use crate::error::{Error, Result};

/// Costs of a batch's documents.
#[derive(Clone, Copy, Debug)]
pub enum Pricing<'a> {
    /// By their lengths.
    Model(&'a CostModel),
    /// Each as the user says.
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
    /// Cost of every micro-batch beside its documents.
    pub(crate) fn micro_batch(&self) -> f64 {
        match self {
            Self::Model(model) => model.micro_batch(),
            Self::Given(_) => 0.0,
        }
    }

    /// Checks that these documents have costs, whose sums are finite.
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
