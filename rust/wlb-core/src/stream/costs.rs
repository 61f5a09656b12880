//! Costs that documents bring: rows beside the pieces that wait.
//!
//! A piece that waits names its row, so that it stays small and can be copied whatever the number of columns. Rows of
//! documents that left are dropped after every step.

use crate::limits::MAX_ITERATION;

/// The most that a document costs in a column: then no sum of costs overflows, however long documents wait.
pub(super) const MOST_COST: f64 = f64::MAX / (MAX_ITERATION as f64 * MAX_ITERATION as f64);

/// Costs of documents as they enter a packer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostTable<'a> {
    /// Row by row, one for each document.
    pub values: &'a [f64],
    /// Numbers in a row.
    pub columns: usize,
}

impl<'a> CostTable<'a> {
    /// Costs of one document.
    pub(crate) fn row(&self, document: usize) -> &'a [f64] {
        &self.values[document * self.columns..][..self.columns]
    }

    /// Costs of a piece of a document: its share of the tokens.
    pub(crate) fn shared(self, document: usize, piece: i32, length: i32) -> impl Iterator<Item = f64> + 'a {
        let share = share(piece, length);
        // Minus zero is the zero that it equals.
        self.row(document).iter().map(move |cost| cost * share + 0.0)
    }
}

/// A row of costs for every piece that waits.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CostRows {
    columns: usize,
    values: Vec<f64>,
}

impl CostRows {
    /// Numbers in a row.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// An empty table of costs with this number of columns.
    pub(super) fn new(columns: usize) -> Self {
        Self { columns, values: Vec::new() }
    }

    /// Gives the number of the new row. Without columns there is only one, which is empty.
    pub(super) fn push(&mut self, row: impl Iterator<Item = f64>) -> usize {
        let at = self.values.len().checked_div(self.columns).unwrap_or(0);
        self.values.extend(row);
        at
    }

    pub(super) fn row(&self, at: usize) -> &[f64] {
        &self.values[at * self.columns..][..self.columns]
    }
}

/// The part of a document's costs that a piece of it has: that of its tokens.
pub(super) fn share(piece: i32, document: i32) -> f64 {
    f64::from(piece) / f64::from(document)
}
