//! Costs that documents bring, in rows beside the waiting pieces.
//!
//! A waiting piece holds the number of its row, so a piece stays small and cheap to copy, whatever the number of
//! columns. Rows of documents that left are dropped after every step.

use crate::limits::MAX_ITERATION;

/// Most that a document may cost in a column, so that no sum of costs overflows, however long documents wait.
pub(super) const MOST_COST: f64 = f64::MAX / (MAX_ITERATION as f64 * MAX_ITERATION as f64);

/// Costs of documents as they enter a packer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostTable<'a> {
    /// One row for each document, one row after the other.
    pub values: &'a [f64],
    /// Numbers in a row.
    pub columns: usize,
}

impl<'a> CostTable<'a> {
    /// Costs of the first `documents`.
    pub(super) fn prefix(self, documents: usize) -> Self {
        Self { values: &self.values[..documents * self.columns], ..self }
    }

    /// Costs of one document.
    pub(crate) fn row(&self, document: usize) -> &'a [f64] {
        &self.values[document * self.columns..][..self.columns]
    }

    /// Costs of a piece of a document, by its share of the document's tokens.
    pub(crate) fn shared(self, document: usize, piece: i32, length: i32) -> impl Iterator<Item = f64> + 'a {
        let share = share(piece, length);
        // Adding zero turns -0.0 into 0.0.
        self.row(document).iter().map(move |cost| cost * share + 0.0)
    }
}

/// One row of costs for every waiting piece.
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

    /// Adds a row and returns its number. Without columns there is only one row, which is empty.
    pub(super) fn push(&mut self, row: impl Iterator<Item = f64>) -> usize {
        let at = self.values.len().checked_div(self.columns).unwrap_or(0);
        self.values.extend(row);
        at
    }

    pub(super) fn row(&self, at: usize) -> &[f64] {
        &self.values[at * self.columns..][..self.columns]
    }
}

/// Share of a document's costs that a piece of it has: its share of the tokens.
pub(super) fn share(piece: i32, document: i32) -> f64 {
    f64::from(piece) / f64::from(document)
}
