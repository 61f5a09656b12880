//! Numbers of documents in micro-batches, where they are limited.

/// Size of a document where the number of documents is limited: its tokens, but at least its share of a full
/// micro-batch. Documents whose sizes are at most `max_tokens` together keep both limits, and a micro-batch that is
/// full of either has at least that size. So a proof about tokens holds for sizes.
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

/// The documents of each micro-batch.
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

    /// Sizes of a micro-batch's documents, together.
    pub(crate) fn size(&self, micro_batch: usize) -> i64 {
        self.sizes[micro_batch]
    }

    pub(crate) fn put(&mut self, micro_batch: usize, length: i32) {
        self.documents[micro_batch] += 1;
        self.sizes[micro_batch] += self.size.of(length);
    }
}
