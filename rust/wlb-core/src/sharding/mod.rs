//! Which tokens of a micro-batch go to which context-parallel rank (section 5 of WLB-LLM).
//!
//! Every strategy fills the same [`Shard`]: for each rank, segments in packed order. What a rank feeds its
//! attention kernel follows from them alone, in [`layout`]. How long that takes is predicted in [`kernel`]; by that, and from
//! lengths only, [`ShardOptions::resolve`] chooses between the strategies.

mod adaptive;
mod hybrid;
pub mod kernel;
pub mod layout;
mod per_document;
mod per_sequence;
mod plan;

pub use plan::{Segment, Shard};

use crate::cost::Mask;
use crate::error::{Error, Result, check_range, named_choices, saturating_i64};
use crate::lengths::Lengths;
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};
use kernel::KernelModel;
use plan::Builder;

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
        /// Whichever of these a [`KernelModel`](kernel::KernelModel) predicts to be fastest. A shard is never of this one.
        Adaptive = "adaptive",
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
    /// Documents of at least this many tokens are long; with [`Strategy::Hybrid`] only.
    pub hybrid_threshold: Option<i64>,
}

impl ShardOptions {
    /// The same options with what a kernel model decides filled in: [`Strategy::Adaptive`] becomes the strategy whose slowest
    /// rank is predicted to finish first in a training step, [`Strategy::Hybrid`] without a threshold gets the best one.
    ///
    /// Of equally fast ones the simpler is taken: per sequence, per document, hybrid with the highest threshold. Candidates
    /// for the threshold are "none is long" and all distinct lengths, longest first; of more than 64, those numbered from 64
    /// on are searched in steps of 2, from 128 on of 3 and so on.
    ///
    /// # Errors
    /// [`Error::Combination`] when a kernel model is missing, has no meaning, or is of another mask; and the errors of [`shard`].
    ///
    /// # Complexity
    /// O(n (log n + cp_size)), and O(n cp_size) for each candidate that is not abandoned before: at most 64 and about 44
    /// for each doubling of the number of distinct lengths.
    pub fn resolve(&self, lengths: &Lengths, kernel: Option<&KernelModel>) -> Result<Self> {
        let needs_kernel = match self.strategy {
            Strategy::Adaptive => true,
            Strategy::Hybrid => self.hybrid_threshold.is_none(),
            Strategy::PerSequence | Strategy::PerDocument => false,
        };
        let kernel = match kernel {
            Some(kernel) if needs_kernel => kernel,
            Some(_) => {
                let requirement =
                    "is given with strategy=\"adaptive\" or with \"hybrid\" without a threshold, and only there";
                return wrong("kernel_model", requirement);
            }
            None => return Ok(self.clone()),
        };
        kernel.check_mask("kernel_model", self.mask)?;
        check_size(lengths, self.cp_size)?;
        if self.hybrid_threshold.is_some() {
            return wrong("hybrid_threshold", "has no meaning with strategy=\"adaptive\", which chooses it");
        }
        let choice = adaptive::choose(lengths, self.cp_size, kernel, self.strategy == Strategy::Adaptive);
        Ok(Self { strategy: choice.strategy, hybrid_threshold: choice.hybrid_threshold, ..self.clone() })
    }
}

fn wrong<T>(argument: &'static str, requirement: &'static str) -> Result<T> {
    Err(Error::Combination { argument, requirement })
}

fn check_size(lengths: &Lengths, cp_size: usize) -> Result<()> {
    check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
    let total = lengths.total();
    if total > MAX_TOKENS {
        return Err(Error::TotalTooLong { argument: "lengths", total });
    }
    Ok(())
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
    check_size(lengths, cp_size)?;
    if strategy == Strategy::Adaptive {
        return wrong("kernel_model", "strategy=\"adaptive\" needs one");
    }
    if remainder != Remainder::Chunk && strategy != Strategy::PerDocument {
        return wrong("remainder", "\"token\" needs strategy=\"per_document\"");
    }
    if hybrid_threshold.is_some() != (strategy == Strategy::Hybrid) {
        return wrong("hybrid_threshold", "strategy=\"hybrid\" needs it or a kernel_model, and no other takes it");
    }
    let mut builder = Builder::new(lengths, cp_size);
    match (strategy, remainder) {
        (Strategy::PerSequence, _) => per_sequence::cut(&mut builder, lengths),
        (Strategy::PerDocument, Remainder::Chunk) => per_document::cut(&mut builder, lengths),
        (Strategy::PerDocument, Remainder::Token) => per_document::cut_dealing_tokens(&mut builder, lengths),
        // An adaptive one was refused above.
        (Strategy::Hybrid | Strategy::Adaptive, _) => {
            let threshold = hybrid_threshold.unwrap_or(1);
            check_range("hybrid_threshold", threshold, 1, MAX_TOKENS + 1)?;
            hybrid::cut(&mut builder, lengths, threshold);
        }
    }
    Ok(builder.finish(strategy, mask))
}
