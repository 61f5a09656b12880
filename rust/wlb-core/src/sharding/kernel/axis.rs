//! The grid of a kernel's tables: the place of a length between two measured lengths.

/// Place of a length on an axis: two grid points, and the distance from the lower one.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub(super) below: usize,
    pub(super) above: usize,
    pub(super) fraction: f64,
}

/// The grid lengths of queries or keys.
///
/// Between two grid lengths, interpolation is linear in the reciprocal of the length. A fixed time for each segment or
/// query is spread over its pairs, so seconds per pair are a constant plus a part that falls with the length.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    lengths: Vec<i32>,
    /// One over each length, and one over the step to the next reciprocal.
    reciprocals: Vec<(f64, f64)>,
    /// For every power of two, the last grid point that is not above it (or the first of all), from which a search
    /// begins.
    starts: [usize; 32],
}

impl Axis {
    pub(super) fn new(lengths: &[i64]) -> Self {
        let mut starts = [0; 32];
        for (bit, start) in starts.iter_mut().enumerate() {
            *start = lengths.partition_point(|&length| length <= 1 << bit).saturating_sub(1);
        }
        let lengths: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let one_over = |index: usize| 1.0 / f64::from(lengths[index]);
        let next = |index: usize| one_over((index + 1).min(lengths.len() - 1));
        let reciprocals =
            (0..lengths.len()).map(|index| (one_over(index), 1.0 / (next(index) - one_over(index)))).collect();
        Self { lengths, reciprocals, starts }
    }

    /// Number of lengths in the grid.
    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    /// The first grid length that is at least `length`; beyond the grid, the largest integer.
    #[inline]
    pub(super) fn next(&self, length: i32) -> i32 {
        let mut index = self.starts[length.ilog2() as usize];
        while index < self.lengths.len() && self.lengths[index] < length {
            index += 1;
        }
        self.lengths.get(index).copied().unwrap_or(i32::MAX)
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
        let (low, per_step) = self.reciprocals[below];
        Point { below, above: below + 1, fraction: (1.0 / f64::from(length) - low) * per_step }
    }
}
