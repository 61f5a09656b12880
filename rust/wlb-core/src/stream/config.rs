//! Configuration of a stream, and the shape of its steps for ranks and kernels.

use serde::{Deserialize, Serialize};

use crate::cost::{CostModel, check_limits};
use crate::error::{Error, Result, check_range, named_choices, saturating_i64};
use crate::limits::{MAX_COLUMNS, MAX_ITERATION, MAX_TOKENS};
use crate::packing::methods::counts::Sizes;
use crate::packing::options::{Ranks, check_micro_batches};
use crate::packing::padding::Padding;

/// Default of [`PackerConfig::delay_price`]: one context for each micro-batch may wait one iteration if that makes the
/// step at least 3 % shorter.
pub(super) const DELAY_PRICE: f64 = 0.03;

/// Default of [`PackerConfig::max_delay`] under [`Release::Adaptive`].
const ADAPTIVE_MAX_DELAY: u64 = 16;

named_choices! {
    /// Rule that releases waiting documents.
    #[derive(Default)]
    Release, "release" {
        /// Each level releases its oldest `N` documents while it holds that many (WLB-LLM).
        #[default]
        Fifo = "fifo",
        /// In every iteration the rule weighs how many of the longest documents to hold back; all others are released.
        Adaptive = "adaptive",
    }
}

impl Release {
    /// The rule that follows from the thresholds: queues if they are given, else [`Release::Adaptive`].
    pub fn of_thresholds(outlier_thresholds: Option<&[i32]>) -> Self {
        if outlier_thresholds.is_some() { Self::Fifo } else { Self::Adaptive }
    }

    /// Price of delay, if the user gives none.
    pub fn default_price(self) -> Option<f64> {
        (self == Self::Adaptive).then_some(DELAY_PRICE)
    }

    /// Most iterations that a document waits, if the user gives no limit; the paper's rule has none.
    pub fn default_max_delay(self) -> Option<u64> {
        (self == Self::Adaptive).then_some(ADAPTIVE_MAX_DELAY)
    }
}

named_choices! {
    /// Treatment of documents longer than `max_document_tokens`.
    #[derive(Default)]
    Oversize, "oversize" {
        /// An error that names the document.
        #[default]
        Error = "error",
        /// The document is cut into pieces, each a document of its own for attention.
        Split = "split",
        /// Only the first tokens of the document are kept.
        Truncate = "truncate",
    }
}

named_choices! {
    /// Method that places the released documents.
    #[derive(Default)]
    StreamMethod, "method" {
        /// Longest first, each where the cost is least.
        #[default]
        VarLength = "var_length",
        /// [`StreamMethod::VarLength`], then improved as by [`Method::Refined`](crate::Method::Refined): the same
        /// documents, better balanced where token limits bind.
        Refined = "refined",
    }
}

/// Configuration of a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackerConfig {
    /// Micro-batches of one global batch (`pp_size * dp_size` in the paper). May change on resume.
    pub num_micro_batches: usize,
    /// Most tokens of one micro-batch (`S_max`).
    pub max_tokens: i32,
    /// Most tokens of a document, at most `max_tokens`: the model's context length.
    pub max_document_tokens: i32,
    /// Treatment of documents longer than `max_document_tokens`.
    pub oversize: Oversize,
    /// Lengths at which the levels of the queue begin, ascending; shorter documents never wait. Empty under
    /// [`Release::Adaptive`], which has one level for all lengths.
    pub outlier_thresholds: Vec<i32>,
    /// The rule that releases waiting documents.
    pub release: Release,
    /// Price of one iteration of waiting for one context per micro-batch (`num_micro_batches * max_document_tokens`
    /// tokens), in units of imbalance. Set if and only if `release` is [`Release::Adaptive`].
    pub delay_price: Option<f64>,
    /// Most iterations that a document waits for others; then it leaves, however few wait with it.
    pub max_delay: Option<u64>,
    /// Method that places the released documents.
    pub method: StreamMethod,
    /// Cost model; `None` if documents bring their costs.
    pub cost_model: Option<CostModel>,
    /// Limits of cost columns, if documents bring their costs instead of a `cost_model`.
    ///
    /// They belong to the configuration, not to the first push: ranks compare their configurations before they begin,
    /// and a packer that cannot work with columns is refused before a document is read.
    pub limits: Option<Vec<Option<f64>>>,
    /// Ranks that steps are planned for, and allowed shapes of micro-batches.
    pub shape: StepShape,
}

impl PackerConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Entry`] or [`Error::Number`] naming the first field that makes no sense.
    pub fn check(&self) -> Result<()> {
        check_micro_batches(self.num_micro_batches)?;
        check_range("max_tokens", i64::from(self.max_tokens), 1, MAX_TOKENS)?;
        if self.shape.padding.is_some() && self.max_document_tokens > self.max_tokens {
            let requirement = "is more than the largest size of a micro-batch (token_buckets, multiple_of_tokens) \
                               within max_tokens";
            let value = f64::from(self.max_document_tokens);
            return Err(Error::Number { argument: "max_document_tokens", value, requirement });
        }
        check_range("max_document_tokens", i64::from(self.max_document_tokens), 1, i64::from(self.max_tokens))?;
        let mut previous = 0;
        for (index, &threshold) in self.outlier_thresholds.iter().enumerate() {
            let requirement = if threshold <= previous {
                "thresholds are at least 1 and ascend"
            } else if threshold > self.max_document_tokens {
                "is above max_document_tokens: no document would ever wait there"
            } else {
                previous = threshold;
                continue;
            };
            let (argument, value) = ("outlier_thresholds", f64::from(threshold));
            return Err(Error::Entry { argument, index, value, requirement });
        }
        self.check_release()?;
        self.shape.check(self.num_micro_batches, self.max_tokens, self.limits.as_deref())?;
        if let Some(delay) = self.max_delay {
            check_range("max_delay", i64::try_from(delay).unwrap_or(i64::MAX), 0, MAX_ITERATION as i64)?;
        }
        let wrong = |argument, requirement| Err(Error::Combination { argument, requirement });
        match (&self.cost_model, &self.limits) {
            (Some(model), None) => self.check_model(model),
            (None, Some(limits)) => self.check_limits(limits),
            (Some(_), Some(_)) => wrong("cost_model", "has no meaning beside cost_columns: pass one of the two"),
            (None, None) => {
                wrong("cost_model", "is missing: pass it, or cost_columns where documents bring their costs")
            }
        }
    }

    fn check_model(&self, model: &CostModel) -> Result<()> {
        model.check()?;
        // Checked so that no sum of costs can overflow, however long documents wait.
        let value = (model.cost(self.max_document_tokens) + model.micro_batch()) * MAX_ITERATION as f64;
        if !value.is_finite() {
            let requirement = "the longest document's cost is so high that sums of costs would overflow";
            return Err(Error::Number { argument: "cost_model", value, requirement });
        }
        Ok(())
    }

    fn check_limits(&self, limits: &[Option<f64>]) -> Result<()> {
        check_range("cost_columns", limits.len() as i64, 1, MAX_COLUMNS as i64)?;
        if self.release == Release::Adaptive && limits.len() > 1 {
            let requirement = "the adaptive rule weighs one column: pass outlier_thresholds for queues, or release=\"fifo\" to \
                               hold nothing back, or push one column, the sum of those that take time";
            return Err(Error::Combination { argument: "cost_columns", requirement });
        }
        let numbers: Vec<f64> = limits.iter().map(|limit| limit.unwrap_or(f64::INFINITY)).collect();
        check_limits(&numbers, limits.len()).map(|_| ())
    }

    fn check_release(&self) -> Result<()> {
        let wrong = |argument, requirement| Err(Error::Combination { argument, requirement });
        if let Some(value) = self.shape.max_cost {
            let argument = "max_step_cost";
            if self.release != Release::Adaptive {
                let requirement = "needs release=\"adaptive\", without outlier_thresholds: queues release \
                                   documents of a kind all at once";
                return wrong(argument, requirement);
            }
            if !(value.is_finite() && value > 0.0) {
                let requirement = "must be a finite number above 0";
                return Err(Error::Number { argument, value, requirement });
            }
        }
        match (self.release, self.delay_price) {
            (Release::Fifo, None) => Ok(()),
            (Release::Fifo, Some(_)) => wrong("delay_price", "has a meaning only with release=\"adaptive\""),
            (Release::Adaptive, _) if !self.outlier_thresholds.is_empty() => {
                wrong("outlier_thresholds", "have no meaning with release=\"adaptive\", which finds what has to wait")
            }
            (Release::Adaptive, None) => wrong("delay_price", "is needed with release=\"adaptive\""),
            (Release::Adaptive, Some(price)) if price.is_finite() && price >= 0.0 => Ok(()),
            (Release::Adaptive, Some(value)) => Err(Error::Number {
                argument: "delay_price",
                value,
                requirement: "must be a finite number, 0 or above",
            }),
        }
    }

    /// Tokens of a global batch: one context for each micro-batch, unless the user gives another number.
    pub fn tokens_per_batch(&self) -> i64 {
        self.shape.tokens_per_batch.unwrap_or(self.contexts())
    }

    /// Tokens of one context for each micro-batch.
    pub(super) fn contexts(&self) -> i64 {
        self.num_micro_batches as i64 * i64::from(self.max_document_tokens)
    }

    /// Tokens of a full step: `N * max_tokens`.
    pub(super) fn capacity(&self) -> i64 {
        self.num_micro_batches as i64 * i64::from(self.max_tokens)
    }

    /// Number of equally long documents that make an even step: one for each rank, or one for each micro-batch.
    pub(super) fn company(&self) -> usize {
        self.shape.ranks.map_or(self.num_micro_batches, |ranks| ranks.dp_size)
    }

    /// Size of a piece: its tokens, or more if the number of documents is limited (`Sizes`).
    pub(super) fn size(&self, length: i32) -> i64 {
        Sizes::new(i64::from(self.max_tokens), self.shape.max_documents).of(length)
    }

    /// Size of a document that is cut into pieces of at most `max_document_tokens`.
    pub(super) fn size_cut(&self, length: i32) -> i64 {
        if length <= self.max_document_tokens {
            return self.size(length); // the usual case, without a division
        }
        let (pieces, rest) = (length / self.max_document_tokens, length % self.max_document_tokens);
        i64::from(pieces) * self.size(self.max_document_tokens) + if rest > 0 { self.size(rest) } else { 0 }
    }

    /// Limits of the columns that documents bring; with a cost model there is one column, without a limit.
    pub(super) fn column_limits(&self) -> Vec<Option<f64>> {
        self.limits.clone().unwrap_or_else(|| vec![None])
    }

    /// A hash of everything that must not change on resume: all but the number of micro-batches, the number of ranks,
    /// and the tokens of a global batch.
    pub fn fingerprint(&self) -> String {
        let comparable = Self { num_micro_batches: 0, shape: self.shape.of_any_ranks(), ..self.clone() };
        blake3::hash(&serde_json::to_vec(&comparable).unwrap_or_default()).to_hex().to_string()
    }
}

/// Constraints of steps for the ranks and kernels that run them; by default none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepShape {
    /// Data-parallel ranks that every step is planned for. Their number, a divisor of `num_micro_batches`, may change
    /// on resume; the places where they wait for each other may not.
    pub ranks: Option<Ranks>,
    /// Most documents of a micro-batch.
    pub max_documents: Option<usize>,
    /// Padding of micro-batches; `max_tokens` is then a padded size.
    pub padding: Option<Padding>,
    /// Most work of a step, in mean global batches; only under [`Release::Adaptive`](super::Release::Adaptive).
    /// Documents that are due leave in any case, and a flush ignores the bound.
    pub max_cost: Option<f64>,
    /// Tokens of a global batch, if not `num_micro_batches * max_document_tokens`. May change on resume, like
    /// `num_micro_batches`.
    pub tokens_per_batch: Option<i64>,
}

impl StepShape {
    /// Whether documents are exchanged after placement: for ranks, or because their number is limited.
    pub(super) fn is_arranged(&self) -> bool {
        self.ranks.is_some() || self.max_documents.is_some()
    }

    /// The shape as fingerprints need it: without the ranks and where they wait for each other, the multiple of tokens
    /// that follows from their number, and the tokens of a global batch.
    pub(super) fn of_any_ranks(&self) -> Self {
        Self {
            ranks: None,
            padding: self.padding.as_ref().and_then(Padding::of_any_multiple),
            tokens_per_batch: None,
            ..self.clone()
        }
    }

    /// Checks every field for a packer of `total` micro-batches with these limits.
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
            let requirement = "is no padded size of micro-batches: pass the largest one within it";
            return Err(Error::Combination { argument: "max_tokens", requirement });
        }
        if self.is_arranged() && limits.is_some_and(|limits| limits != [None]) {
            let requirement = "dp_size and max_documents take one column, without a limit";
            return Err(Error::Combination { argument: "cost_columns", requirement });
        }
        Ok(())
    }
}
