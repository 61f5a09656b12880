//! Costs that documents bring: checked when the documents come, looked up when a step is made.

use crate::cost::DocumentCosts;
use crate::error::{Error, Result};

use super::costs::{CostRows, CostTable, MOST_COST, share};
use super::packer::Packer;
use super::queue::Waiting;

impl Packer {
    /// Costs of a waiting piece in each column; empty if there is a cost model.
    pub fn costs(&self, waiting: &Waiting) -> &[f64] {
        self.rows.row(waiting.row)
    }

    /// Costs of a step's documents, as given or from the model.
    pub(super) fn costs_of(&self, pieces: &[Waiting], lengths: &[i32]) -> DocumentCosts {
        let values = match &self.config.cost_model {
            Some(model) => model.costs(lengths),
            None => pieces.iter().flat_map(|waiting| self.costs(waiting)).copied().collect(),
        };
        DocumentCosts::checked(values, self.config.column_limits())
    }

    /// Drops the rows of pieces that have left.
    pub(super) fn keep_rows(&mut self) {
        if self.config.limits.is_none() {
            return;
        }
        let mut kept = CostRows::new(self.rows.columns());
        for waiting in self.queue.levels.iter_mut().flatten().chain(&mut self.carried) {
            waiting.row = kept.push(self.rows.row(waiting.row).iter().copied());
        }
        self.rows = kept;
    }

    /// Checks the costs of documents of these lengths; `kept` gives the tokens of a document's longest piece.
    pub(crate) fn check_costs(
        &self,
        lengths: &[i32],
        costs: Option<CostTable<'_>>,
        kept: impl Fn(i32) -> i32,
    ) -> Result<()> {
        let argument = "costs";
        let (limits, costs) = match (&self.config.limits, costs) {
            (None, None) => return Ok(()),
            (Some(_), None) if lengths.is_empty() => return Ok(()),
            (Some(limits), Some(costs)) => (limits, costs),
            (Some(_), None) => {
                let requirement = "are missing: this packer was made with cost_columns, so that documents bring them";
                return Err(Error::Combination { argument, requirement });
            }
            (None, Some(_)) => {
                let requirement = "must not be given: this packer has a cost_model; make it with \
                                   cost_columns instead";
                return Err(Error::Combination { argument, requirement });
            }
        };
        if costs.columns != limits.len() && !lengths.is_empty() {
            let (found, expected) = (costs.columns, limits.len());
            return Err(Error::Mismatch { argument, found, other: "a row of this packer's (cost_columns)", expected });
        }
        if costs.values.len() != lengths.len() * costs.columns {
            let found = costs.values.len().checked_div(costs.columns).unwrap_or(0);
            return Err(Error::Mismatch { argument, found, other: "lengths", expected: lengths.len() });
        }
        for (row, &length) in lengths.iter().enumerate() {
            for (column, (&value, limit)) in costs.row(row).iter().zip(limits).enumerate() {
                let exceeds = |limit: &f64| value * share(kept(length), length) > *limit;
                let requirement = if !(value.is_finite() && value >= 0.0) {
                    "must be a finite number, 0 or above"
                } else if value > MOST_COST {
                    "is so high that sums of costs would overflow"
                } else if limit.as_ref().is_some_and(exceeds) {
                    "exceeds the limit of its column: no micro-batch can hold this document"
                } else {
                    continue;
                };
                let column = (costs.columns > 1).then_some(column);
                return Err(Error::Cell { argument, row, column, value, requirement });
            }
        }
        Ok(())
    }
}
