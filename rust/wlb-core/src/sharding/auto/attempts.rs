//! Tries one share after the other until ranks are even.

use super::key::Key;
use super::layer::Layer;
use super::parts::{ATTEMPTS, Parts, shares};
use super::runs::Runs;

/// Lays documents on ranks under one share after the other.
pub(super) struct Attempts<'a, W> {
    layer: Layer<'a, W>,
    parts: Parts<'a>,
    /// Number of documents that the last attempt placed, and the pairs of its heaviest rank.
    last: Option<(usize, u64)>,
}

impl<'a, W: Key> Attempts<'a, W> {
    pub(super) fn new(layer: Layer<'a, W>, parts: Parts<'a>) -> Self {
        Self { layer, parts, last: None }
    }

    /// The layout with the largest share under which no rank has more than `enough` pairs; else the most even layout.
    /// `None` if `on_all`, the most pairs of a rank with every document on all ranks, is at least as even.
    pub(super) fn first_even(mut self, max_imbalance: f64, enough: u64, on_all: impl FnOnce() -> u64) -> Option<Runs> {
        let mut tried = Vec::with_capacity(ATTEMPTS);
        for share in shares(max_imbalance) {
            let heaviest = self.attempt(share, enough);
            if heaviest <= enough {
                return Some(self.layer.runs);
            }
            tried.push((share, heaviest));
        }
        // Rare, so it does not matter that the attempts above gave up before they knew how uneven they were.
        self.last = None;
        let (mut evenest, mut least) = (None, on_all());
        for (share, at_least) in tried {
            if at_least >= least {
                continue;
            }
            let heaviest = self.attempt(share, least);
            if heaviest < least {
                least = heaviest;
                let spare = evenest.take().unwrap_or_else(|| Runs::with_capacity(self.layer.documents.len()));
                evenest = Some(std::mem::replace(&mut self.layer.runs, spare));
            }
        }
        evenest
    }

    /// The pairs of the heaviest rank. An attempt stops as soon as a rank exceeds `bound`, and then returns that rank's
    /// pairs.
    fn attempt(&mut self, share: f64, bound: u64) -> u64 {
        let alike = self.parts.set(share);
        match self.last {
            // The changed documents come after the place where the last attempt ended, so this attempt would end there,
            // too.
            Some((laid, heaviest)) if alike.is_none_or(|alike| alike >= laid) => heaviest,
            _ => {
                let (laid, heaviest) = self.layer.lay(&self.parts.now, bound);
                self.last = Some((laid, heaviest));
                heaviest
            }
        }
    }
}
