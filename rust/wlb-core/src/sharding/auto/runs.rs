//! Runs that an attempt placed on each rank.

use super::super::builder::Ranks;

/// The runs of every document, in the order of its tokens.
pub(super) struct Runs {
    /// `(rank, tokens)` of each run. A document's runs begin at `first` and end with its last token. Some runs are
    /// empty.
    list: Vec<(u32, i32)>,
    /// Begin in `list` of each document's runs. There are at most twice as many runs as tokens.
    first: Vec<u32>,
}

impl Runs {
    pub(super) fn with_capacity(documents: usize) -> Self {
        Self { list: Vec::with_capacity(4 * documents), first: vec![0; documents] }
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }

    /// Begins the runs of this document.
    #[inline]
    pub(super) fn begin(&mut self, document: u32) {
        self.first[document as usize] = self.list.len() as u32;
    }

    #[inline]
    pub(super) fn push(&mut self, rank: u32, tokens: i32) {
        self.list.push((rank, tokens));
    }

    /// Adds this many runs, to be written in any order.
    #[inline]
    pub(super) fn push_empty(&mut self, count: usize) -> &mut [(u32, i32)] {
        let before = self.list.len();
        self.list.resize(before + count, (0, 0));
        &mut self.list[before..]
    }

    /// Gives every rank its runs in packed order.
    pub(super) fn give_to(&self, ranks: &mut impl Ranks, lengths: &[i32]) {
        let mut counts = vec![0; ranks.cp_size()];
        self.list.iter().for_each(|&(rank, _)| counts[rank as usize] += 1);
        ranks.expect(&counts);
        for (document, (&length, &first)) in lengths.iter().zip(&self.first).enumerate() {
            let mut start = 0;
            for &(rank, taken) in &self.list[first as usize..] {
                ranks.push(rank as usize, document, start, taken);
                start += taken;
                if start == length {
                    break;
                }
            }
        }
    }
}
