//! Documents too long to be balanced wait for others of their size (section 4.3 of WLB-LLM).

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
    /// The iteration in which it comes in order: later than that, if it came early.
    pub turn: u64,
    /// Row of its costs, if it brought some ([`Packer::costs`](super::Packer::costs)).
    pub(super) row: usize,
}

/// FIFO levels: level `i` holds documents with `thresholds[i] <= length < thresholds[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutlierQueue {
    thresholds: Vec<i32>,
    pub(super) levels: Vec<VecDeque<Waiting>>,
}

impl OutlierQueue {
    /// An empty queue for what waits under `config`.
    pub(super) fn of(config: &PackerConfig) -> Self {
        match config.release {
            Release::Fifo => Self::new(&config.outlier_thresholds),
            // Any document may wait.
            Release::Adaptive => Self::new(&[1]),
        }
    }

    /// Empty levels; `thresholds` ascend.
    fn new(thresholds: &[i32]) -> Self {
        Self { thresholds: thresholds.to_vec(), levels: vec![VecDeque::new(); thresholds.len()] }
    }

    /// The level that a document of this length waits in; `None` if it is no outlier.
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

    /// Takes out everything, at the end of a stream.
    pub(super) fn release_all(&mut self, released: &mut Vec<Waiting>) {
        for level in &mut self.levels {
            released.extend(level.drain(..));
        }
    }
}
