//! The documents of a batch as plans that are made better look at them.

use crate::longest_first::longest_first_of;

/// What is to be placed, longest first; ties by index.
pub(super) struct Documents {
    pub(super) longest_first: Vec<Document>,
    pub(super) max_tokens: i64,
}

/// A document of the batch.
#[derive(Clone, Copy)]
pub(super) struct Document {
    pub(super) cost: f64,
    pub(super) length: i32,
    pub(super) index: u32,
}

impl Documents {
    pub(super) fn new(lengths: &[i32], costs: &[f64], max_tokens: i32) -> Self {
        let longest_first = longest_first_of(lengths.iter().copied().enumerate())
            .map(|(length, index)| Document { cost: costs[index], length, index: index as u32 })
            .collect();
        Self { longest_first, max_tokens: i64::from(max_tokens) }
    }
}
