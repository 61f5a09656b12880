//! How long before its turn a document should come, so that it is trained about then.

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;

use super::arrivals::MAX_EARLY;
use super::packer::Packer;

/// Iterations of lead for each mean micro-batch that a document costs beyond the first.
///
/// A document that costs as much as `c` mean micro-batches is level only in a step of `c` times the work: `c - 1`
/// global batches have to be gathered for it, by holding others of its kind. Found on real lengths: with twice that,
/// documents are trained as often before as after their turn.
const LEAD: f64 = 2.0;

impl Packer {
    /// By how many iterations each of these documents should come before its turn, for [`Push::early`](super::Push).
    ///
    /// # Arguments
    /// * `lengths` - the documents that come next, in order: as many global batches as are known. Their mean is what a
    ///   micro-batch costs.
    /// * `tokens_per_batch` - tokens of a global batch.
    /// * `most` - iterations of lead at most.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for `tokens_per_batch` or `most`; [`Error::Combination`] where documents bring their
    /// costs.
    ///
    /// # Complexity
    /// O(n).
    pub fn leads(&self, lengths: &Lengths, tokens_per_batch: i64, most: i64) -> Result<Vec<i64>> {
        check_range("tokens_per_batch", tokens_per_batch, 1, i64::MAX)?;
        check_range("most", most, 0, MAX_EARLY)?;
        let Some(model) = &self.config.cost_model else {
            let requirement = "is missing: where documents bring their costs, none comes early";
            return Err(Error::Combination { argument: "cost_model", requirement });
        };
        let costs: Vec<f64> =
            lengths.iter().map(|&length| model.cost(length.min(self.config.max_document_tokens))).collect();
        let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
        let batches = tokens as f64 / tokens_per_batch as f64;
        let mean = costs.iter().sum::<f64>() / (batches * self.config.num_micro_batches as f64);
        let lead = |cost: f64| {
            // Not above 0 where everything costs nothing.
            let iterations = LEAD * (cost / mean - 1.0);
            if iterations > 0.0 { (iterations as i64).min(most) } else { 0 }
        };
        Ok(costs.into_iter().map(lead).collect())
    }
}
