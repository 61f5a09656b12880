//! The documents of a batch, in the order that improving a plan needs.

use crate::longest_first::longest_first_of;

/// Documents to be placed, longest first; ties by index.
pub(crate) struct Documents {
    pub(crate) longest_first: Vec<Document>,
    pub(crate) max_tokens: i64,
}

/// A document of the batch.
#[derive(Clone, Copy)]
pub(crate) struct Document {
    pub(crate) cost: f64,
    pub(crate) length: i32,
    pub(crate) index: u32,
}

impl Documents {
    pub(crate) fn new(lengths: &[i32], costs: &[f64], max_tokens: i32) -> Self {
        let longest_first = longest_first_of(lengths.iter().copied().enumerate())
            .map(|(length, index)| Document { cost: costs[index], length, index: index as u32 })
            .collect();
        Self { longest_first, max_tokens: i64::from(max_tokens) }
    }
}
