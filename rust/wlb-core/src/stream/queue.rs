//! Documents too long to be balanced wait here for others of their size (section 4.3 of WLB-LLM).

use std::collections::VecDeque;

use crate::packing::piece::Piece;

use super::config::{PackerConfig, Release};

/// A piece that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The waiting piece.
    pub piece: Piece,
    /// The iteration in which it was pushed.
    pub arrived: u64,
    /// The iteration of its turn in the order of the stream; after `arrived` if it came early.
    pub turn: u64,
    /// Row of its costs, if documents bring them ([`Packer::costs`](super::Packer::costs)).
    pub(super) row: usize,
}

/// FIFO levels: level `i` holds documents with `thresholds[i] <= length < thresholds[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutlierQueue {
    thresholds: Vec<i32>,
    pub(super) levels: Vec<VecDeque<Waiting>>,
}

impl OutlierQueue {
    /// An empty queue for a packer of this configuration.
    pub(super) fn of(config: &PackerConfig) -> Self {
        match config.release {
            Release::Fifo => Self::new(&config.outlier_thresholds),
            // Any document may wait, so the only level begins at length 1.
            Release::Adaptive => Self::new(&[1]),
        }
    }

    /// Empty levels; `thresholds` ascend.
    fn new(thresholds: &[i32]) -> Self {
        Self { thresholds: thresholds.to_vec(), levels: vec![VecDeque::new(); thresholds.len()] }
    }

    /// The level in which a document of this length waits; `None` if it is no outlier.
    pub fn level(&self, length: i32) -> Option<usize> {
        self.thresholds.partition_point(|&threshold| threshold <= length).checked_sub(1)
    }

    /// The levels, each oldest first.
    pub fn levels(&self) -> &[VecDeque<Waiting>] {
        &self.levels
    }

    /// Waiting pieces in all levels.
    pub fn len(&self) -> usize {
        self.levels.iter().map(VecDeque::len).sum()
    }

    /// Tokens that wait in all levels.
    pub(super) fn tokens(&self) -> i64 {
        self.levels.iter().flatten().map(|waiting| i64::from(waiting.piece.length)).sum()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(VecDeque::is_empty)
    }

    pub(super) fn push(&mut self, level: usize, waiting: Waiting) {
        self.levels[level].push_back(waiting);
    }

    /// Takes all documents out.
    pub(super) fn release_all(&mut self, released: &mut Vec<Waiting>) {
        for level in &mut self.levels {
            released.extend(level.drain(..));
        }
    }
}
