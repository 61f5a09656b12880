//! Constraints of a plan for ranks.

use crate::error::{Error, Result, check_range, saturating_i64};
use crate::limits::{MAX_MICRO_BATCHES, MAX_TOKENS};
use crate::packing::options::{Method, Ranks, Sync, Together, check_micro_batches};

/// Options for packing a global batch for ranks, or with a limit on the documents of a micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// Micro-batches of all ranks together; `None` for as few as hold the batch, or more if the step gets shorter.
    pub num_micro_batches: Option<usize>,
    /// If `num_micro_batches` is `None`: whether the number is the smallest that holds the batch, also where more would
    /// make the step shorter.
    pub fewest: bool,
    /// If `num_micro_batches` is `None`: the number of micro-batches is a multiple of this and of `dp_size`.
    pub multiple_of: usize,
    /// Most tokens of one micro-batch.
    pub max_tokens: i32,
    /// [`Method::VarLength`] or [`Method::Refined`]; here both do the same.
    pub method: Method,
    /// The ranks; `None` if only the number of documents is limited and micro-batches are not dealt.
    pub ranks: Option<Ranks>,
    /// A group number for each document: documents with the same number stay together. Empty for no groups.
    pub groups: Vec<i64>,
    /// Where documents of one group stay together: on one rank, or in one micro-batch.
    pub together: Together,
    /// Whether all ranks get equally many documents (they differ by at most one).
    pub equal_documents: bool,
    /// Most documents of a micro-batch.
    pub max_documents: Option<usize>,
}

impl RankOptions {
    /// Number of data-parallel ranks; 1 if micro-batches are not dealt.
    pub(super) fn dp_size(&self) -> usize {
        self.ranks.map_or(1, |ranks| ranks.dp_size)
    }

    /// Where the ranks wait for each other.
    pub(super) fn sync(&self) -> Sync {
        self.ranks.map_or(Sync::Step, |ranks| ranks.sync)
    }

    /// The group numbers of documents that stay together in this way; empty if there are none.
    pub(super) fn groups_in(&self, together: Together) -> &[i64] {
        if self.together == together { &self.groups } else { &[] }
    }

    pub(crate) fn check(&self, documents: usize, of: &'static str) -> Result<()> {
        let (most, dp_size) = (MAX_MICRO_BATCHES as i64, self.dp_size());
        check_range("dp_size", saturating_i64(dp_size), 1, most)?;
        check_range("multiple_of", saturating_i64(self.multiple_of), 1, most)?;
        check_range("max_tokens", i64::from(self.max_tokens), 1, MAX_TOKENS)?;
        if let Some(max_documents) = self.max_documents {
            check_range("max_documents", saturating_i64(max_documents), 1, MAX_TOKENS)?;
        }
        let combination = |argument, requirement| Err(Error::Combination { argument, requirement });
        if !matches!(self.method, Method::VarLength | Method::Refined) {
            let requirement = "dp_size, groups and max_documents need \"var_length\" or \"refined\"";
            return combination("method", requirement);
        }
        if let Some(total) = self.num_micro_batches {
            check_micro_batches(total)?;
            if !total.is_multiple_of(dp_size) {
                return Err(Error::Indivisible { argument: "dp_size", value: saturating_i64(dp_size), total });
            }
        }
        match self.ranks {
            None if !self.groups_in(Together::Rank).is_empty() => {
                let requirement = "needs dp_size, or together=\"micro_batch\": otherwise it says what a rank has";
                return combination("groups", requirement);
            }
            None if self.equal_documents => {
                return combination("equal_documents", "needs dp_size: it says what a rank has");
            }
            _ => {}
        }
        if !self.groups.is_empty() && self.groups.len() != documents {
            let found = self.groups.len();
            return Err(Error::Mismatch { argument: "groups", found, other: of, expected: documents });
        }
        Ok(())
    }
}
