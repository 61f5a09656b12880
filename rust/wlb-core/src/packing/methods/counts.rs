//! Numbers of documents in micro-batches, if they are limited.

/// Size of a document if the number of documents is limited: its tokens, but at least `max_tokens / max_documents`.
/// Documents whose sizes add up to at most `max_tokens` keep both limits, and a micro-batch with no token or no
/// document left has at least that size. So a proof about tokens holds for sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    least: i64,
}

impl Sizes {
    /// Sizes for micro-batches of at most `max_tokens` tokens and `max_documents` documents.
    pub(crate) fn new(max_tokens: i64, max_documents: Option<usize>) -> Self {
        Self { least: max_documents.map_or(1, |most| (max_tokens as u64).div_ceil(most as u64) as i64) }
    }

    /// Size of a document.
    pub(crate) fn of(self, length: i32) -> i64 {
        i64::from(length).max(self.least)
    }
}

/// The number of documents of each micro-batch, and their sizes.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    most: usize,
    documents: Vec<usize>,
    sizes: Vec<i64>,
    size: Sizes,
}

impl Counts {
    /// Micro-batches without documents.
    pub(crate) fn new(num_micro_batches: usize, max_tokens: i64, max_documents: usize) -> Self {
        let size = Sizes::new(max_tokens, Some(max_documents));
        Self { most: max_documents, documents: vec![0; num_micro_batches], sizes: vec![0; num_micro_batches], size }
    }

    /// Whether a micro-batch may have a further document.
    pub(crate) fn has_room(&self, micro_batch: usize) -> bool {
        self.documents[micro_batch] < self.most
    }

    /// Sum of the sizes of a micro-batch's documents.
    pub(crate) fn size(&self, micro_batch: usize) -> i64 {
        self.sizes[micro_batch]
    }

    pub(crate) fn put(&mut self, micro_batch: usize, length: i32) {
        self.documents[micro_batch] += 1;
        self.sizes[micro_batch] += self.size.of(length);
    }
}
