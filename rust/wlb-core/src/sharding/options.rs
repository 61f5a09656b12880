//! Options for cutting a micro-batch.

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, named_choices, saturating_i64};
use crate::lengths::Lengths;
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};

named_choices! {
    /// Strategy for cutting a micro-batch.
    #[derive(Default)]
    Strategy, "strategy" {
        /// Every document on as few ranks as balance allows.
        #[default]
        Auto = "auto",
        /// The packed sequence in `2*cp` chunks.
        PerSequence = "per_sequence",
        /// Every document in `2*cp` chunks.
        PerDocument = "per_document",
        /// Long documents in `2*cp` chunks each, short ones whole.
        Hybrid = "hybrid",
        /// The packed sequence in `cp` runs, in the order of ranks: for layers that mix neighbouring tokens.
        /// Attention is uneven under it.
        Contiguous = "contiguous",
        /// The strategy that a [`KernelModel`](crate::sharding::kernel::KernelModel) predicts to be fastest. A finished
        /// shard never has this value.
        Adaptive = "adaptive",
    }
}

/// Options for cutting a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardOptions {
    /// Ranks of the context-parallel group.
    pub cp_size: usize,
    /// Strategy of cutting.
    pub strategy: Strategy,
    /// The mask: it decides pairs and key ranges, but not which rank has a token.
    pub mask: Mask,
    /// Documents of at least this many tokens are long; with [`Strategy::Hybrid`] only.
    pub hybrid_threshold: Option<i64>,
    /// Only for [`Strategy::Auto`]: most pairs of a rank over the mean.
    pub max_imbalance: f64,
}

impl ShardOptions {
    /// Default of [`ShardOptions::max_imbalance`].
    pub const MAX_IMBALANCE: f64 = 1.01;
}

/// Checks the number of ranks, and that int32 can count the tokens.
pub(super) fn check_size(lengths: &Lengths, cp_size: usize) -> Result<()> {
    check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
    let total = lengths.total();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "lengths", total });
    }
    Ok(())
}

/// Checks the most pairs of a rank over the mean.
pub(crate) fn check_imbalance(max_imbalance: f64) -> Result<()> {
    if max_imbalance.is_finite() && max_imbalance >= 1.0 {
        return Ok(());
    }
    let requirement = "must be a finite number, 1 or above";
    Err(Error::Number { argument: "max_imbalance", value: max_imbalance, requirement })
}

/// The error for an option that contradicts another.
pub(super) fn wrong<T>(argument: &'static str, requirement: &'static str) -> Result<T> {
    Err(Error::Combination { argument, requirement })
}
