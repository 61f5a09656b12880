//! For whom the steps of a stream are made, how much work they may have, and which shapes their micro-batches.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, check_range, saturating_i64};
use crate::limits::MAX_TOKENS;
use crate::packing::options::Ranks;
use crate::packing::padding::Padding;

/// What steps have to keep for the ranks and kernels that run them; by default nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepShape {
    /// The data-parallel ranks that every step is planned for. How many may change on resume, as `num_micro_batches`,
    /// which they divide; where they wait for each other may not.
    pub ranks: Option<Ranks>,
    /// Most documents of a micro-batch.
    pub max_documents: Option<usize>,
    /// What micro-batches are padded to when they run; `max_tokens` is then one of these sizes.
    pub padding: Option<Padding>,
    /// Most work of a step, in mean global batches; only under [`Release::Adaptive`](super::Release::Adaptive).
    /// Documents that are due leave all the same, and it does not hold in a flush.
    pub max_cost: Option<f64>,
    /// Tokens of a global batch, where they are not `num_micro_batches * max_document_tokens`. May change on resume, as
    /// `num_micro_batches`.
    pub tokens_per_batch: Option<i64>,
}

impl StepShape {
    /// Whether documents are exchanged once they are placed: for ranks, or within a limit of their number.
    pub(super) fn is_arranged(&self) -> bool {
        self.ranks.is_some() || self.max_documents.is_some()
    }

    /// As a fingerprint has it: without the number of ranks, the multiple of tokens that follows from it, and how much
    /// they train in a step.
    pub(super) fn of_any_ranks(&self) -> Self {
        Self {
            ranks: self.ranks.map(|ranks| Ranks { dp_size: 0, ..ranks }),
            padding: self.padding.as_ref().and_then(Padding::of_any_multiple),
            tokens_per_batch: None,
            ..self.clone()
        }
    }

    /// Checks every field, for a packer of these.
    pub(super) fn check(&self, total: usize, max_tokens: i32, limits: Option<&[Option<f64>]>) -> Result<()> {
        if let Some(Ranks { dp_size, .. }) = self.ranks
            && (dp_size == 0 || !total.is_multiple_of(dp_size))
        {
            return Err(Error::Indivisible { argument: "dp_size", value: saturating_i64(dp_size), total });
        }
        if let Some(most) = self.max_documents {
            check_range("max_documents", saturating_i64(most), 1, MAX_TOKENS)?;
        }
        if let Some(tokens) = self.tokens_per_batch {
            check_range("tokens_per_batch", tokens, 1, saturating_i64(total).saturating_mul(i64::from(max_tokens)))?;
        }
        if let Some(padding) = &self.padding
            && (!padding.is_sound() || padding.most(max_tokens)? != max_tokens)
        {
            let requirement = "is none of the sizes that micro-batches are padded to: take the largest within it";
            return Err(Error::Combination { argument: "max_tokens", requirement });
        }
        if self.is_arranged() && limits.is_some_and(|limits| limits != [None]) {
            let requirement = "dp_size and max_documents take one column, without a limit";
            return Err(Error::Combination { argument: "cost_columns", requirement });
        }
        Ok(())
    }
}
