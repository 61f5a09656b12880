//! The sample for tuning: documents, and their costs if they bring them.

use crate::cost::DocumentCosts;
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::packing::split::split_documents;
use crate::stream::{CostTable, Packer, PackerConfig};

/// Documents in the order in which they would come.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// Tokens of each document.
    pub lengths: &'a Lengths,
    /// Costs of each document, for a packer without a cost model.
    pub costs: Option<CostTable<'a>>,
}

impl<'a> From<&'a Lengths> for Sample<'a> {
    fn from(lengths: &'a Lengths) -> Self {
        Self { lengths, costs: None }
    }
}

impl Sample<'_> {
    /// Checks all documents before any of them enters a packer.
    pub(super) fn check(&self, config: &PackerConfig) -> Result<()> {
        let packer = Packer::new(config.clone()).map_err(of_costs)?;
        if self.lengths.is_empty() {
            let requirement = "a sample needs at least one document";
            return Err(Error::Combination { argument: "lengths", requirement });
        }
        if let Some(model) = &config.cost_model {
            model.check_finite(self.lengths)?;
        }
        packer.check_costs(self.lengths, self.costs, |length| length.min(config.max_document_tokens))?;
        if let Some(CostTable { values, columns }) = self.costs {
            DocumentCosts::new(values.to_vec(), self.lengths.len(), columns, &[])?.check_columns()?;
        }
        Ok(())
    }

    /// The documents, cut as a packer cuts them, so that no global batch is heavier than its tokens allow.
    pub(super) fn pieces(&self, config: &PackerConfig) -> Result<Pieces> {
        let pieces = split_documents(self.lengths, i64::from(config.max_document_tokens))?;
        let tokens: Vec<i64> = pieces.iter().map(|piece| i64::from(piece.length)).collect();
        let costs = self.costs.map(|costs| {
            let rows = pieces.iter().flat_map(|piece| {
                let document = piece.id as usize;
                costs.shared(document, piece.length, self.lengths[document])
            });
            (rows.collect(), costs.columns)
        });
        let whole = pieces.iter().map(|piece| piece.length == self.lengths[piece.id as usize]).collect();
        Ok(Pieces { lengths: Lengths::new("lengths", &tokens)?, whole, costs })
    }

    /// Calls `then` with the documents at these indices, in this order.
    pub(super) fn reordered<T>(&self, order: &[usize], then: impl FnOnce(Sample<'_>) -> Result<T>) -> Result<T> {
        let tokens: Vec<i64> = order.iter().map(|&index| i64::from(self.lengths[index])).collect();
        let lengths = Lengths::new("lengths", &tokens)?;
        let values: Option<Vec<f64>> =
            self.costs.map(|costs| order.iter().flat_map(|&index| costs.row(index)).copied().collect());
        let costs = self.costs.zip(values.as_deref()).map(|(costs, values)| CostTable { values, ..costs });
        then(Sample { lengths: &lengths, costs })
    }
}

/// Turns a packer's error about `cost_columns` into one about `costs`.
fn of_costs(error: Error) -> Error {
    match error {
        Error::Combination { argument: "cost_columns", requirement } => {
            Error::Combination { argument: "costs", requirement }
        }
        other => other,
    }
}

/// The pieces of a sample.
pub(super) struct Pieces {
    pub(super) lengths: Lengths,
    /// Whether each piece is a whole document.
    pub(super) whole: Vec<bool>,
    /// Costs of the pieces.
    costs: Rows,
}

/// Costs of some pieces: rows one after the other, and the length of a row.
type Rows = Option<(Vec<f64>, usize)>;

/// The rows in the form that a packer takes.
pub(super) fn table(rows: &Rows) -> Option<CostTable<'_>> {
    rows.as_ref().map(|(values, columns)| CostTable { values, columns: *columns })
}

impl Pieces {
    /// Lengths and costs of some pieces.
    pub(super) fn of(&self, pieces: &[usize]) -> Result<(Lengths, Rows)> {
        let tokens: Vec<i64> = pieces.iter().map(|&piece| i64::from(self.lengths[piece])).collect();
        let rows = table(&self.costs)
            .map(|costs| (pieces.iter().flat_map(|&piece| costs.row(piece)).copied().collect(), costs.columns));
        Ok((Lengths::new("lengths", &tokens)?, rows))
    }
}
