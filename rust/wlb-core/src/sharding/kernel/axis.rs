//! The grid of a kernel's tables: where a length lies between two that were measured.

use super::log2::log2;

/// Where a length lies on an axis: between two grid points, and how far from the lower one.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub(super) below: usize,
    pub(super) above: usize,
    pub(super) fraction: f64,
}

/// The grid lengths of queries or keys, as logarithms.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    lengths: Vec<i32>,
    /// And one over the step to the next.
    pub(super) logs: Vec<(f64, f64)>,
    /// For every power of two, the last grid point that is not above it (or the first of all): where a search begins.
    starts: [usize; 32],
}

impl Axis {
    pub(super) fn new(lengths: &[i64]) -> Self {
        let mut starts = [0; 32];
        for (bit, start) in starts.iter_mut().enumerate() {
            *start = lengths.partition_point(|&length| length <= 1 << bit).saturating_sub(1);
        }
        let lengths: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let log = |index: usize| log2(lengths[index]);
        let next = |index: usize| log((index + 1).min(lengths.len() - 1));
        let logs = (0..lengths.len()).map(|index| (log(index), 1.0 / (next(index) - log(index)))).collect();
        Self { lengths, logs, starts }
    }

    #[inline]
    pub(super) fn locate(&self, length: i32) -> Point {
        let mut below = self.starts[length.ilog2() as usize];
        while below + 1 < self.lengths.len() && self.lengths[below + 1] <= length {
            below += 1;
        }
        if below + 1 == self.lengths.len() || length <= self.lengths[below] {
            return Point { below, above: below, fraction: 0.0 };
        }
        let (low, per_step) = self.logs[below];
        Point { below, above: below + 1, fraction: (log2(length) - low) * per_step }
    }
}
