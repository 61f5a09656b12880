//! The terms of a cost, each with its rate.

use crate::error::{Error, Result, check_range, named_choices};
use crate::limits::MAX_TOKENS;

use super::mask::Mask;

named_choices! {
    /// Unit of a cost.
    Unit, "unit" {
        /// Time.
        Seconds = "seconds",
        /// Floating-point operations.
        Flops = "flops",
    }
}

/// Rates of a cost's terms, all in one unit; a term with rate 0 costs nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Rate of a (query, key) pair under `mask`.
    pub attention: f64,
    /// Rate of a token.
    pub linear: f64,
    /// The mask: the keys that a query attends to, unless a window or chunk limits them.
    pub mask: Mask,
    /// Rates of pairs under sliding windows: `(keys, rate)`, ascending by keys, for causal masks. A window of
    /// [`MAX_TOKENS`] is full attention: its rate is added to `attention`.
    pub windows: Vec<(i32, f64)>,
    /// Rates of pairs inside chunks: `(tokens, rate)`, ascending by tokens, for causal masks. A chunk of [`MAX_TOKENS`]
    /// is full attention.
    pub chunks: Vec<(i32, f64)>,
    /// Cost of a document besides the cost of its length.
    pub document: f64,
    /// Cost of a micro-batch besides its documents; an empty micro-batch is run and costs this, too.
    pub micro_batch: f64,
    /// Unit of the rates; `None` if the user does not say.
    pub unit: Option<Unit>,
}

/// Whether a window or chunk of this size is full attention: see [`MAX_TOKENS`].
pub(super) fn hides_nothing(size: i32) -> bool {
    i64::from(size) >= MAX_TOKENS
}

/// Checks the rates of pairs under windows or in chunks.
pub(super) fn check_local(argument: &'static str, terms: &[(i32, f64)], mask: Mask) -> Result<()> {
    if terms.is_empty() {
        return Ok(());
    }
    if mask != Mask::Causal {
        let requirement = "need causal=True: windows and chunks are defined only for causal masks";
        return Err(Error::Combination { argument, requirement });
    }
    let mut previous = 0;
    for (index, &(size, rate)) in terms.iter().enumerate() {
        check_range(argument, i64::from(size), 1, MAX_TOKENS)?;
        if size <= previous && !hides_nothing(size) {
            return Err(Error::Entry { argument, index, value: f64::from(size), requirement: "sizes must ascend" });
        }
        if !(rate.is_finite() && rate >= 0.0) {
            let requirement = "rates must be finite numbers, 0 or above";
            return Err(Error::Entry { argument, index, value: rate, requirement });
        }
        previous = size;
    }
    Ok(())
}
