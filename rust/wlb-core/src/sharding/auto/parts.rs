//! The number of ranks for each document.

use crate::cost::Mask;

/// Factor from one share that is tried to the next.
const STEP: f64 = 0.85;
/// Number of shares that are tried; the last is 1/150 of the first.
pub(super) const ATTEMPTS: usize = 32;

/// The shares that are tried, largest first.
pub(super) fn shares(max_imbalance: f64) -> impl Iterator<Item = f64> {
    std::iter::successors(Some(max_imbalance), |share| Some(share * STEP)).take(ATTEMPTS)
}

/// The number of ranks for each document under a share.
pub(super) struct Parts<'a> {
    documents: &'a [(i32, u32)],
    cp_size: usize,
    /// Pairs and tokens of the longest documents, over those of an even rank; all other documents are whole under every
    /// share.
    work: Vec<(f64, f64)>,
    /// Number of ranks of each of the longest documents under the present share; all others stay whole.
    pub(super) now: Vec<u32>,
    before: Vec<u32>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(
        documents: &'a [(i32, u32)],
        cp_size: usize,
        mask: Mask,
        max_imbalance: f64,
        all: (f64, f64),
    ) -> Self {
        let of_even = |amount: f64, all: f64| amount * cp_size as f64 / all;
        let work = |&(length, _): &(i32, u32)| (of_even(mask.pairs_f64(length), all.0), of_even(length.into(), all.1));
        let least = shares(max_imbalance).last().unwrap_or(max_imbalance);
        let work = documents.iter().map(work).take_while(|&work| !is_whole(work, least)).collect();
        Self { documents, cp_size, work, now: Vec::new(), before: Vec::new() }
    }

    /// Sets the share. Returns how many documents at the start keep their number of ranks; `None`: all.
    pub(super) fn set(&mut self, share: f64) -> Option<usize> {
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.clear();
        // Shorter documents have no more work, so all documents after the first whole one are whole.
        let cut = self.work.iter().take_while(|&&work| !is_whole(work, share)).zip(self.documents);
        let most = self.cp_size;
        self.now.extend(cut.map(|(&work, &(length, _))| parts_of(work, share).min(most).min(length as usize) as u32));
        let differs = self.now.iter().zip(&self.before).position(|(now, before)| now != before);
        differs.or((self.now.len() != self.before.len()).then(|| self.now.len().min(self.before.len())))
    }
}

/// The smallest number of parts of which none exceeds the share of an even rank's pairs or tokens.
#[inline]
fn parts_of((pairs, tokens): (f64, f64), share: f64) -> usize {
    let parts = (pairs / share).max(tokens / share.min(1.0));
    // Instead of `ceil`, which is a function call on processors without the instruction.
    let below = parts as usize;
    below + usize::from((below as f64) < parts)
}

/// Whether that number is 1, computed without a division: a quotient is rounded to at most 1 only if it is at most 1.
#[inline]
fn is_whole((pairs, tokens): (f64, f64), share: f64) -> bool {
    pairs <= share && tokens <= share.min(1.0)
}
