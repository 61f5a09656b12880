//! The documents of a batch as plans that are made better look at them.

use crate::longest_first::longest_first_of;

/// What is to be placed.
pub(super) struct Documents<'a> {
    pub(super) lengths: &'a [i32],
    pub(super) costs: &'a [f64],
    pub(super) max_tokens: i64,
    /// Indices, longest first.
    pub(super) longest_first: Vec<u32>,
}

impl<'a> Documents<'a> {
    pub(super) fn new(lengths: &'a [i32], costs: &'a [f64], max_tokens: i32) -> Self {
        let longest_first =
            longest_first_of(lengths.iter().copied().enumerate()).map(|(_, index)| index as u32).collect();
        Self { lengths, costs, max_tokens: i64::from(max_tokens), longest_first }
    }
}
