//! Padded sizes of micro-batches, as kernels, exchanges and captured graphs need them.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, check_range, saturating_i64};
use crate::limits::{MAX_CP_SIZE, MAX_TOKENS};

/// Sizes that micro-batches are padded up to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Padding {
    /// The part of every context-parallel rank is padded up to a multiple of this number of tokens.
    multiple_of: i32,
    /// The only sizes that micro-batches may have, ascending; empty if any multiple is allowed.
    buckets: Vec<i32>,
    /// Context-parallel ranks that share a micro-batch.
    cp_size: usize,
}

impl Padding {
    /// Checks the sizes.
    ///
    /// # Arguments
    /// * `multiple_of` - the part of every context-parallel rank is padded up to a multiple of this number of tokens
    ///   (MXFP8 needs 32, HybridEP 128). Ranks have equal parts, so that the tokens of a micro-batch are a multiple of
    ///   `multiple_of * cp_size`.
    /// * `cp_size` - context-parallel ranks that share a micro-batch.
    /// * `buckets` - the only sizes that micro-batches may have, for steps that are compiled or captured once per size;
    ///   empty for any size.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for `multiple_of_tokens` and `cp_size`; [`Error::Entry`] for a bucket that is not larger
    /// than the bucket before it, or not such a multiple.
    pub fn new(multiple_of: i32, cp_size: usize, buckets: &[i32]) -> Result<Self> {
        check_range("multiple_of_tokens", i64::from(multiple_of), 1, MAX_TOKENS)?;
        check_range("cp_size", saturating_i64(cp_size), 1, MAX_CP_SIZE as i64)?;
        let padding = Self { multiple_of, buckets: buckets.to_vec(), cp_size };
        let refused = |index: usize, requirement| {
            let (argument, value) = ("token_buckets", f64::from(buckets[index]));
            Err(Error::Entry { argument, index, value, requirement })
        };
        let falls = |&index: &usize| buckets[index] <= if index == 0 { 0 } else { buckets[index - 1] };
        if let Some(index) = (0..buckets.len()).find(falls) {
            return refused(index, "must be above 0, and above the size before it");
        }
        if let Some(index) = buckets.iter().position(|&bucket| i64::from(bucket) % padding.multiple() != 0) {
            return refused(
                index,
                match cp_size {
                    1 => "must be a multiple of multiple_of_tokens",
                    _ => "must be a multiple of multiple_of_tokens * cp_size",
                },
            );
        }
        Ok(padding)
    }

    /// Itself, or `None` if it adds no tokens.
    pub fn if_any(self) -> Option<Self> {
        if self.is_none() { None } else { Some(self) }
    }

    /// The part of every context-parallel rank is padded up to a multiple of this number of tokens.
    pub fn multiple_of(&self) -> i32 {
        self.multiple_of
    }

    /// Context-parallel ranks that share a micro-batch.
    pub fn cp_size(&self) -> usize {
        self.cp_size
    }

    /// Micro-batches are padded up to a multiple of this number of tokens. If ranks may have any number of tokens,
    /// their parts need not be equal.
    fn multiple(&self) -> i64 {
        if self.multiple_of == 1 { 1 } else { i64::from(self.multiple_of) * self.cp_size as i64 }
    }

    /// The only sizes that micro-batches may have, ascending; empty if any multiple is allowed.
    pub fn buckets(&self) -> &[i32] {
        &self.buckets
    }

    /// The smallest size of a micro-batch that is not empty.
    pub(crate) fn least(&self) -> i64 {
        self.buckets.first().map_or(self.multiple(), |&bucket| i64::from(bucket))
    }

    /// Most tokens of a micro-batch: the largest padded size within `max_tokens`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if even the smallest size is above `max_tokens`.
    ///
    /// # Example
    /// ```
    /// use wlb_core::packing::Padding;
    ///
    /// let padding = Padding::new(128, 1, &[])?;
    /// assert_eq!(padding.most(1000)?, 896);
    /// assert_eq!([0, 1, 896].map(|tokens| padding.padded(tokens)), [0, 128, 896]);
    /// // Each of two ranks has a multiple of 128.
    /// assert_eq!([0, 1, 896].map(|tokens| Padding::new(128, 2, &[]).unwrap().padded(tokens)), [0, 256, 1024]);
    /// let padding = Padding::new(1, 1, &[256, 1024])?;
    /// assert_eq!(padding.most(1000)?, 256);
    /// assert_eq!([0, 256, 257].map(|tokens| padding.padded(tokens)), [256, 256, 1024]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn most(&self, max_tokens: i32) -> Result<i32> {
        check_range("max_tokens", i64::from(max_tokens), self.least(), MAX_TOKENS)?;
        let within = self.buckets.iter().rev().find(|&&bucket| bucket <= max_tokens);
        Ok(within.copied().unwrap_or(max_tokens - (i64::from(max_tokens) % self.multiple()) as i32))
    }

    /// [`Padding::most`] as a phrase for errors; the caller gave `given` for `argument`.
    pub(crate) fn named(&self, argument: &str, given: i32) -> String {
        match self.most(given) {
            Ok(most) if most < given => format!("{most} tokens, {} within {argument} = {given}", self.largest()),
            _ => format!("{argument} = {given}"),
        }
    }

    /// The rule that makes a size smaller than `max_tokens`, as a phrase for errors.
    pub(crate) fn largest(&self) -> String {
        match (self.buckets.is_empty(), self.cp_size) {
            (false, _) => "the largest of token_buckets".to_owned(),
            (true, 1) => format!("the largest multiple of multiple_of_tokens = {}", self.multiple_of),
            (true, ranks) => {
                format!("the largest multiple of multiple_of_tokens = {} on each of {ranks} ranks", self.multiple_of)
            }
        }
    }

    /// Rewrites an error that names [`Padding::most`] tokens, so that it names the `max_tokens` that the caller gave.
    ///
    /// # Example
    /// ```
    /// use wlb_core::packing::Padding;
    /// use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions, pack};
    ///
    /// let padding = Padding::new(1, 1, &[5, 9])?;
    /// let (method, leftover, max_tokens) = (Method::VarLength, Leftover::Error, padding.most(6)?);
    /// let options = PackOptions { num_micro_batches: 1, max_tokens, method, global_batches: 1, leftover };
    /// let lengths = Lengths::new("lengths", &[2, 7])?;
    /// let error = pack(&lengths, &options, &CostModel::analytic(1.0, 1.0, Mask::Causal)?).unwrap_err();
    /// assert!(error.to_string().starts_with("lengths[1] = 7 exceeds max_tokens = 5;"));
    /// let told = "lengths[1] = 7 exceeds 5 tokens, the largest of token_buckets within max_tokens = 6;";
    /// assert!(padding.explained(error, 6).to_string().starts_with(told));
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn explained(&self, error: Error, max_tokens: i32) -> Error {
        let given = self.named("max_tokens", max_tokens);
        match error {
            Error::TooLong { argument, index, value, limit, hint, .. } => {
                let larger = "; split it first (split_documents), or give a larger size in token_buckets";
                let hint = if self.checked(value).is_ok() { hint } else { larger };
                Error::TooLong { argument, index, value, given, limit, hint }
            }
            Error::LeftOver { documents, all, tokens, micro_batches, index, value, enough, whole, .. } => {
                // The padded size of a `max_tokens` that holds all documents, if a bucket is large enough.
                let enough = enough.and_then(|enough| self.checked(enough).ok()).filter(|&enough| enough <= MAX_TOKENS);
                Error::LeftOver { documents, all, tokens, micro_batches, given, index, value, enough, whole }
            }
            Error::GroupTooLarge { index, value, size, of, limit: limit @ "max_tokens", .. } => {
                Error::GroupTooLarge { index, value, size, of, given, limit }
            }
            error => error,
        }
    }

    /// [`Padding::padded`] for a micro-batch that was not planned for these sizes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a negative number of tokens, and [`Error::NoBucket`] for more than the largest bucket.
    pub fn checked(&self, tokens: i64) -> Result<i64> {
        check_range("tokens", tokens, 0, MAX_TOKENS)?;
        match self.buckets.last() {
            Some(&largest) if i64::from(largest) < tokens => {
                Err(Error::NoBucket { index: self.buckets.len() - 1, value: i64::from(largest), tokens })
            }
            _ => Ok(self.padded(tokens)),
        }
    }

    /// The buckets without the multiple. The multiple follows from the kernels and from how ranks share a micro-batch,
    /// so it may change on resume.
    pub(crate) fn of_any_multiple(&self) -> Option<Self> {
        Self { multiple_of: 1, buckets: self.buckets.clone(), cp_size: 1 }.if_any()
    }

    /// Padded size of a micro-batch of `tokens` tokens, at most the largest size. An empty micro-batch has the smallest
    /// bucket, or no tokens if there are no buckets.
    pub fn padded(&self, tokens: i64) -> i64 {
        match self.buckets.iter().find(|&&bucket| i64::from(bucket) >= tokens) {
            Some(&bucket) => i64::from(bucket),
            None => (tokens as u64).next_multiple_of(self.multiple() as u64) as i64,
        }
    }

    /// Whether [`Padding::new`] could have made it; a file may hold anything.
    pub(crate) fn is_sound(&self) -> bool {
        Self::new(self.multiple_of, self.cp_size, &self.buckets).is_ok()
    }

    /// Whether micro-batches need no padding.
    pub fn is_none(&self) -> bool {
        self.multiple_of == 1 && self.buckets.is_empty()
    }
}
