//! Cost models of which any may be the true one.

use crate::error::{Error, Result};

use super::model::CostModel;

/// Tokens of a short and of a long document, by which models are compared: what a step cannot even out is the long one.
const SHORT: i32 = 4096;
const LONG: i32 = 131_072;

impl CostModel {
    /// A cost model that is not certain: any of these may be the true one.
    ///
    /// Packings then have the least worst imbalance over all of them. Where two models differ in their rates alone, all
    /// models with rates between theirs are in the range too: a micro-batch costs under such a model what it costs on
    /// average, weighted, under the two, and so does the mean micro-batch; hence no imbalance is above the worse of the
    /// two.
    ///
    /// Where a single cost is asked for ([`CostModel::cost`], the costs of a packing, what a release rule holds back),
    /// it is that of the model under which long documents weigh the most: too heavy documents are what no placing evens
    /// out.
    ///
    /// # Errors
    /// [`Error::Combination`] for fewer than two models, a range inside a range, or models with different masks or
    /// units.
    ///
    /// # Example
    /// ```
    /// use wlb_core::{CostModel, Mask};
    ///
    /// let [low, high] = [0.5, 4.0].map(|attention| CostModel::analytic(attention, 100.0, Mask::Causal));
    /// let cost = CostModel::range(vec![low?, high?])?;
    /// assert_eq!((cost.models().len(), cost.cost(10)), (2, 4.0 * 55.0 + 1000.0));
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn range(models: Vec<Self>) -> Result<Self> {
        check(&models)?;
        let steepest = models.iter().fold(
            &models[0],
            |steepest, model| {
                if weight(model) > weight(steepest) { model } else { steepest }
            },
        );
        let mut range = steepest.clone();
        range.range = models;
        Ok(range)
    }

    /// The models of a range in the order given; of one model, itself.
    pub fn models(&self) -> &[Self] {
        if self.range.is_empty() { std::slice::from_ref(self) } else { &self.range }
    }

    /// Whether any of several models may be the true one.
    pub fn is_range(&self) -> bool {
        !self.range.is_empty()
    }

    /// What [`CostModel::range`] guarantees, for a model that was read from a file.
    pub(super) fn check_range(&self) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        self.range.iter().try_for_each(Self::check)?;
        if *self == Self::range(self.range.clone())? {
            return Ok(());
        }
        let requirement = "does not belong to the models of its range";
        Err(Error::Combination { argument: "cost_model", requirement })
    }
}

/// How much heavier a long document is than a short one.
fn weight(model: &CostModel) -> f64 {
    model.cost(LONG) / model.cost(SHORT)
}

fn check(models: &[CostModel]) -> Result<()> {
    let wrong = |requirement| Err(Error::Combination { argument: "cost_model", requirement });
    let Some((first, others)) = models.split_first().filter(|(_, others)| !others.is_empty()) else {
        return wrong("a range needs two cost models or more");
    };
    if models.iter().any(CostModel::is_range) {
        return wrong("a range holds single cost models, not ranges");
    }
    if others.iter().any(|model| model.mask() != first.mask()) {
        return wrong("the models of a range must have the same mask (causal)");
    }
    if others.iter().any(|model| model.unit() != first.unit()) {
        return wrong("the models of a range must have the same unit");
    }
    Ok(())
}
