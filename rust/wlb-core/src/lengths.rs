//! Document lengths, checked once at the border.

use std::ops::Deref;

use crate::error::{Error, Result};
use crate::limits::MAX_TOKENS;

/// Lengths of documents, in tokens: each at least 1 and at most [`MAX_TOKENS`].
///
/// Every algorithm of this crate takes this type instead of a bare slice, so that no algorithm checks the lengths
/// again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lengths(Vec<i32>);

impl Lengths {
    /// Checks and narrows `values`; errors name `argument`.
    ///
    /// # Errors
    /// [`Error::Length`] at the first value below 1 or above [`MAX_TOKENS`].
    ///
    /// # Complexity
    /// O(n), one pass.
    pub fn new(argument: &'static str, values: &[i64]) -> Result<Self> {
        let mut lengths = Self::with_capacity(values.len());
        lengths.extend(argument, values)?;
        Ok(lengths)
    }

    /// An empty list with room for `documents` lengths.
    pub fn with_capacity(documents: usize) -> Self {
        Self(Vec::with_capacity(documents))
    }

    /// Checks, narrows and appends `values`. Indices in errors count from the first length of the whole list.
    ///
    /// # Errors
    /// [`Error::Length`] at the first value below 1 or above [`MAX_TOKENS`]; the list then stays as it was.
    ///
    /// # Complexity
    /// O(n), one pass.
    pub fn extend(&mut self, argument: &'static str, values: &[i64]) -> Result<()> {
        let before = self.0.len();
        // A branch for each value would stop vectorisation: first compute whether all are in range, then look for the
        // bad one.
        let mut all_in_range = true;
        self.0.extend(values.iter().map(|value| {
            all_in_range &= (1..=MAX_TOKENS).contains(value);
            *value as i32
        }));
        let culprit = || values.iter().enumerate().find(|(_, value)| !(1..=MAX_TOKENS).contains(*value));
        match (!all_in_range).then(culprit).flatten() {
            None => Ok(()),
            Some((index, &value)) => {
                self.0.truncate(before);
                Err(Error::Length { argument, index: before + index, value })
            }
        }
    }

    /// The first `documents` of them.
    pub fn prefix(&self, documents: usize) -> Self {
        Self(self.0[..documents].to_vec())
    }

    /// Sum of all lengths, in tokens.
    pub fn total(&self) -> i64 {
        self.0.iter().map(|&length| i64::from(length)).sum()
    }
}

impl Deref for Lengths {
    type Target = [i32];

    fn deref(&self) -> &[i32] {
        &self.0
    }
}
