//! Which tokens of a micro-batch go to which context-parallel rank (section 5 of WLB-LLM).
//!
//! Every strategy fills the same [`Shard`]: for each rank, segments in packed order. What a rank feeds its
//! attention kernel follows from them alone, in [`layout`]. A strategy that chooses between the others (by predicted
//! latency, from lengths only) calls [`shard`] and stands beside them.

mod hybrid;
pub mod kernel;
pub mod layout;
mod per_document;
mod per_sequence;
mod plan;

pub use plan::{Segment, Shard};

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, named_choices};
use crate::lengths::{Lengths, MAX_TOKENS};
use plan::Builder;

/// More ranks than any context-parallel group has.
pub const MAX_CP_SIZE: usize = 1 << 16;

named_choices! {
    /// How a micro-batch is cut.
    #[derive(Default)]
    Strategy, "strategy" {
        /// The packed sequence in `2*cp` chunks.
        PerSequence = "per_sequence",
        /// Every document in `2*cp` chunks.
        #[default]
        PerDocument = "per_document",
        /// Long documents per document, short ones whole.
        Hybrid = "hybrid",
    }
}

named_choices! {
    /// Where the `length % (2*cp)` left-over tokens of a document go, per document.
    #[derive(Default)]
    Remainder, "remainder" {
        /// They lengthen chunks by one each: at most two segments per document and rank.
        #[default]
        Chunk = "chunk",
        /// They are dealt one by one, as the paper's text has it: more and shorter segments. For comparison.
        Token = "token",
    }
}

/// How to cut a micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardOptions {
    /// Ranks of the context-parallel group.
    pub cp_size: usize,
    /// How.
    pub strategy: Strategy,
    /// Which keys a query attends to: decides pairs and key ranges, not who gets which token.
    pub mask: Mask,
    /// Left-over tokens; other than [`Remainder::Chunk`] only with [`Strategy::PerDocument`].
    pub remainder: Remainder,
    /// Documents of at least this many tokens are long; given with [`Strategy::Hybrid`] and only there.
    pub hybrid_threshold: Option<i64>,
}

/// Cuts one micro-batch for the ranks of a context-parallel group, without padding.
///
/// Ranks differ by at most one token, whatever the lengths.
///
/// # Errors
/// [`Error::OutOfRange`] for `cp_size` and `hybrid_threshold`, [`Error::TotalTooLong`] when the tokens exceed
/// int32, [`Error::Combination`] for an option that does not go with the strategy.
///
/// # Complexity
/// O(n (log n + cp_size)) for `n` documents.
pub fn shard(lengths: &Lengths, options: &ShardOptions) -> Result<Shard> {
    let ShardOptions { cp_size, strategy, mask, remainder, hybrid_threshold } = *options;
    check_range("cp_size", i64::try_from(cp_size).unwrap_or(i64::MAX), 1, MAX_CP_SIZE as i64)?;
    let total = lengths.total();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "lengths", total });
    }
    let wrong = |argument, requirement| Err(Error::Combination { argument, requirement });
    if remainder != Remainder::Chunk && strategy != Strategy::PerDocument {
        return wrong("remainder", "\"token\" needs strategy=\"per_document\"");
    }
    if hybrid_threshold.is_some() != (strategy == Strategy::Hybrid) {
        return wrong("hybrid_threshold", "is given with strategy=\"hybrid\", and only there");
    }
    let mut builder = Builder::new(lengths, cp_size);
    match (strategy, remainder) {
        (Strategy::PerSequence, _) => per_sequence::cut(&mut builder, lengths, total as i32),
        (Strategy::PerDocument, Remainder::Chunk) => per_document::cut(&mut builder, lengths),
        (Strategy::PerDocument, Remainder::Token) => per_document::cut_dealing_tokens(&mut builder, lengths),
        (Strategy::Hybrid, _) => {
            let threshold = hybrid_threshold.unwrap_or(1);
            check_range("hybrid_threshold", threshold, 1, MAX_TOKENS + 1)?;
            hybrid::cut(&mut builder, lengths, threshold);
        }
    }
    Ok(builder.finish(strategy, mask))
}
