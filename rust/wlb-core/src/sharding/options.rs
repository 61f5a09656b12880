//! Options for cutting a micro-batch.

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, named_choices, saturating_i64};
use crate::lengths::Lengths;
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};

named_choices! {
    /// Strategy of cutting a micro-batch.
    #[derive(Default)]
    Strategy, "strategy" {
        /// Every document on as few ranks as balance allows.
        #[default]
        Auto = "auto",
        /// The packed sequence in `2*cp` chunks.
        PerSequence = "per_sequence",
        /// Every document in `2*cp` chunks.
        PerDocument = "per_document",
        /// Long documents per document, short ones whole.
        Hybrid = "hybrid",
        /// The packed sequence in `cp` runs, in the order of ranks: for layers that mix neighbouring tokens.
        /// Attention is uneven under it.
        Contiguous = "contiguous",
        /// The strategy that a [`KernelModel`](crate::sharding::kernel::KernelModel) predicts to be fastest. No shard
        /// has this value.
        Adaptive = "adaptive",
    }
}

/// Options for cutting a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardOptions {
    /// Ranks of the context-parallel group.
    pub cp_size: usize,
    /// How.
    pub strategy: Strategy,
    /// The mask: it decides pairs and key ranges, not the rank of a token.
    pub mask: Mask,
    /// Documents of at least this many tokens are long; with [`Strategy::Hybrid`] only.
    pub hybrid_threshold: Option<i64>,
    /// With [`Strategy::Auto`], how many pairs the rank with the most may have, over the mean; otherwise of no effect.
    pub max_imbalance: f64,
}

impl ShardOptions {
    /// [`ShardOptions::max_imbalance`] where nobody says another.
    pub const MAX_IMBALANCE: f64 = 1.01;
}

/// Checks what every strategy needs: so many ranks, and tokens that int32 counts.
pub(super) fn check_size(lengths: &Lengths, cp_size: usize) -> Result<()> {
    check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
    let total = lengths.total();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "lengths", total });
    }
    Ok(())
}

/// An option that does not go with the others.
pub(super) fn wrong<T>(argument: &'static str, requirement: &'static str) -> Result<T> {
    Err(Error::Combination { argument, requirement })
}
