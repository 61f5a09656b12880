//! On how many ranks each document is laid.

use crate::cost::Mask;

/// Each share that is tried is so much of the one before.
const STEP: f64 = 0.85;
/// Shares that are tried; the last is 1/150 of the first.
pub(super) const ATTEMPTS: usize = 32;

/// The shares that are tried, from the largest.
pub(super) fn shares(max_imbalance: f64) -> impl Iterator<Item = f64> {
    std::iter::successors(Some(max_imbalance), |share| Some(share * STEP)).take(ATTEMPTS)
}

/// On how many ranks documents are laid under a share.
pub(super) struct Parts<'a> {
    documents: &'a [(i32, u32)],
    cp_size: usize,
    /// Pairs and tokens of the longest, over those of an even rank; all others are whole whatever the share.
    work: Vec<(f64, f64)>,
    /// Ranks of the longest documents under this share; all others stay whole.
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

    /// Sets those of a share. Returns how many documents are laid on as many ranks as before; none: all.
    pub(super) fn set(&mut self, share: f64) -> Option<usize> {
        std::mem::swap(&mut self.now, &mut self.before);
        self.now.clear();
        // Shorter documents have no more work: the first that is whole is the first of many.
        let cut = self.work.iter().take_while(|&&work| !is_whole(work, share)).zip(self.documents);
        let most = self.cp_size;
        self.now.extend(cut.map(|(&work, &(length, _))| parts_of(work, share).min(most).min(length as usize) as u32));
        let differs = self.now.iter().zip(&self.before).position(|(now, before)| now != before);
        differs.or((self.now.len() != self.before.len()).then(|| self.now.len().min(self.before.len())))
    }
}

/// The fewest parts of a document of which none exceeds the share of an even rank's pairs or tokens.
#[inline]
fn parts_of((pairs, tokens): (f64, f64), share: f64) -> usize {
    let parts = (pairs / share).max(tokens / share.min(1.0));
    // `ceil` is a call on processors that may lack it.
    let below = parts as usize;
    below + usize::from((below as f64) < parts)
}

/// Whether that is one part, without a division: a quotient is rounded to 1 or less only where it is that.
#[inline]
fn is_whole((pairs, tokens): (f64, f64), share: f64) -> bool {
    pairs <= share && tokens <= share.min(1.0)
}
