//! Costs of micro-batches in several columns: one for each resource with a barrier of its own.

use serde::{Deserialize, Serialize};

/// Costs of a packing's micro-batches in each column.
///
/// A column with a limit is memory. All others take time: a step takes the sum of the heaviest micro-batches of each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Columns {
    /// The limit of each column, if it has one.
    pub limits: Vec<Option<f64>>,
    /// Cost of each micro-batch, row by row.
    pub costs: Vec<f64>,
    /// Largest cost of a micro-batch with a single document, in each column.
    pub largest: Vec<f64>,
}

impl Columns {
    /// Micro-batches without documents.
    pub(crate) fn none(limits: &[Option<f64>], micro_batches: usize) -> Self {
        let columns = limits.len();
        Self { limits: limits.to_vec(), costs: vec![0.0; columns * micro_batches], largest: vec![0.0; columns] }
    }

    /// Adds a document, or a part of one, to a micro-batch.
    pub(crate) fn put(&mut self, micro_batch: usize, row: impl Iterator<Item = f64>) {
        let at = micro_batch * self.len();
        for ((sum, most), cost) in self.costs[at..].iter_mut().zip(&mut self.largest).zip(row) {
            *sum += cost;
            *most = most.max(cost);
        }
    }

    /// Number of columns.
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Whether there are no columns.
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }

    /// The columns that take time.
    pub fn timed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len()).filter(|&column| self.limits[column].is_none())
    }

    /// Costs of all micro-batches in one column.
    pub fn column(&self, column: usize) -> impl Iterator<Item = f64> + '_ {
        self.costs.iter().skip(column).step_by(self.len()).copied()
    }

    /// The greatest cost of a micro-batch in one column.
    pub fn max(&self, column: usize) -> f64 {
        self.column(column).fold(0.0, f64::max)
    }

    /// Time of a step: the sum over columns of the heaviest micro-batch in that column.
    pub fn step_cost(&self) -> f64 {
        self.timed().map(|column| self.max(column)).sum()
    }

    /// A lower bound on the heaviest micro-batch in one column, for any packing of the same documents into as many
    /// micro-batches.
    pub(crate) fn least(&self, column: usize) -> f64 {
        let micro_batches = (self.costs.len() / self.len()) as f64;
        let mean = self.column(column).sum::<f64>() / micro_batches;
        mean.max(self.largest[column]).min(self.max(column))
    }

    /// Whether the sizes agree with this number of micro-batches.
    pub(crate) fn fit(&self, micro_batches: usize) -> bool {
        !self.is_empty() && self.largest.len() == self.len() && self.costs.len() == self.len() * micro_batches
    }
}
