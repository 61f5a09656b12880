//! Orders micro-batches: the data-parallel rank and the position of each.
//!
//! A pipeline takes the same micro-batches in any order, but not in the same time. While it fills and drains, all ranks
//! wait for the first and the last micro-batch; under an interleaved schedule they wait for the slowest of a round. A
//! rule that suits one schedule is bad for another, so the simulator decides: it takes the best of a few sorted orders
//! and improves it until no swap and no move helps.

use crate::error::{Error, Result, saturating_i64};
use crate::packing::deal;

use super::makespan::Buffers;
use super::options::PipelineOptions;
use super::program::Pipeline;
use super::times::Times;

/// Ops that a search may simulate: a few milliseconds.
const MAX_OPS: usize = 1 << 20;

/// Ops up to which the sorted orders of all ranks may exceed that: a fraction of a second.
const MAX_SORTED_OPS: usize = 1 << 24;

/// Factor by which a change must shorten the time to count as a gain.
const WORTHWHILE: f64 = 1.0 - 1e-6;

/// Deals the micro-batches of a step to `dp_size` ranks in equal counts, and orders them for the schedule, so that the
/// slowest rank finishes early.
///
/// It deals by cost as [`crate::Packing::deal`] does. Each row gets the fastest of four orders: arrival, heaviest
/// first, lightest first, light ends. Then the slowest rank is improved again and again: by swaps of two micro-batches
/// and moves of one while they help, and by swaps with other ranks while those do. So the result is never slower than
/// `deal`. If the limit on simulated ops is reached, the remaining ranks keep the order of `deal`.
///
/// # Arguments
/// * `options` - the pipeline of one rank; the step has `dp_size` times its number of micro-batches.
/// * `times` - times of all micro-batches of the step.
/// * `dp_size` - data-parallel ranks.
///
/// # Returns
/// Rows of micro-batch indices, one after the other: one row for each rank, in the order of running.
///
/// # Errors
/// The errors of [`PipelineOptions::orders`]; [`Error::Mismatch`] when `times` have another shape;
/// [`Error::OutOfRange`] for `dp_size`.
///
/// # Complexity
/// Simulates about a million ops, or four orders of each rank if that is more: at most 2^24 ops and one order.
///
/// # Example
/// ```
/// use wlb_core::Schedule;
/// use wlb_core::pipeline::{PipelineOptions, Times, order_micro_batches};
///
/// let schedule = Schedule::OneForwardOneBackward;
/// let options = PipelineOptions { schedule, num_stages: 2, num_virtual_stages: 1, num_micro_batches: 2 };
/// let order = order_micro_batches(&options, &Times::per_micro_batch(&[4.0, 3.0, 2.0, 1.0])?, 2)?;
/// let mut sorted = order.clone();
/// sorted.sort_unstable();
/// assert_eq!(sorted, [0, 1, 2, 3]);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn order_micro_batches(options: &PipelineOptions, times: &Times<'_>, dp_size: usize) -> Result<Vec<usize>> {
    let pipeline = Pipeline::new(options)?;
    let per_rank = options.num_micro_batches;
    let Some(total) = per_rank.checked_mul(dp_size).filter(|&total| total > 0) else {
        let (value, maximum) = (saturating_i64(dp_size), i64::MAX / saturating_i64(per_rank));
        return Err(Error::OutOfRange { argument: "dp_size", value, minimum: 1, maximum });
    };
    times.check_shape(total, options.total_stages())?;
    let costs: Vec<f64> = times.costs.chunks(times.costs.len() / total).map(|costs| costs.iter().sum()).collect();
    let mut search = OrderSearch { pipeline, times, left: MAX_SORTED_OPS, buffers: Buffers::default() };
    let mut rows: Vec<Row> = deal(&costs, dp_size).chunks(per_rank).map(|row| search.start(row, &costs)).collect();
    search.left = MAX_OPS.saturating_sub(MAX_SORTED_OPS - search.left);
    while search.improve_slowest(&mut rows) {}
    Ok(rows.into_iter().flat_map(|row| row.order).collect())
}

/// The micro-batches of a rank in an order, and the time of this order.
struct Row {
    order: Vec<usize>,
    seconds: f64,
    /// Whether no swap and no move inside the row helps.
    settled: bool,
}

struct OrderSearch<'a> {
    pipeline: Pipeline,
    times: &'a Times<'a>,
    /// Ops that may still be simulated.
    left: usize,
    buffers: Buffers,
}

impl OrderSearch<'_> {
    fn seconds(&mut self, order: &[usize]) -> f64 {
        self.left = self.left.saturating_sub(self.pipeline.num_ops());
        self.pipeline.makespan_in_order(self.times, order, &mut self.buffers)
    }

    /// The best of a few sorted orders, as long as ops may be simulated.
    fn start(&mut self, dealt: &[usize], costs: &[f64]) -> Row {
        let mut best = Row { order: dealt.to_vec(), seconds: f64::INFINITY, settled: false };
        let mut arrival = dealt.to_vec();
        arrival.sort_unstable();
        let mut heaviest_first = arrival.clone();
        heaviest_first.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
        let mut lightest_first = heaviest_first.clone();
        lightest_first.reverse();
        for order in [dealt.to_vec(), arrival, heaviest_first, lightest_first] {
            if self.left == 0 {
                break;
            }
            let seconds = self.seconds(&order);
            if seconds < best.seconds {
                best = Row { order, seconds, settled: false };
            }
        }
        best
    }

    /// Improves the slowest row, for which the others wait. Returns false if nothing helps it.
    fn improve_slowest(&mut self, rows: &mut [Row]) -> bool {
        let slower = |a: usize, b: usize| if rows[b].seconds > rows[a].seconds { b } else { a };
        let Some(slowest) = (0..rows.len()).reduce(slower) else { return false };
        if rows[slowest].settled {
            return self.exchange(rows, slowest);
        }
        self.settle(&mut rows[slowest]);
        true
    }

    /// Swaps and moves inside a row until none helps or the limit on simulated ops is reached. The loops stop at the
    /// limit: there are quadratically many swaps, too many even to skip.
    fn settle(&mut self, row: &mut Row) {
        let count = row.order.len();
        row.settled = true;
        let mut again = true;
        while again {
            again = false;
            for (i, j) in pairs(count) {
                if self.left == 0 {
                    return;
                }
                again |= self.attempt(row, |order| order.swap(i, j), |order| order.swap(i, j));
            }
            if again {
                continue;
            }
            for (i, j) in pairs(count) {
                if self.left == 0 {
                    return;
                }
                again |= self.attempt(row, |order| order[i..=j].rotate_left(1), |order| order[i..=j].rotate_right(1));
                again |= self.attempt(row, |order| order[i..=j].rotate_right(1), |order| order[i..=j].rotate_left(1));
            }
        }
    }

    fn attempt(&mut self, row: &mut Row, change: impl Fn(&mut [usize]), undo: impl Fn(&mut [usize])) -> bool {
        change(&mut row.order);
        let seconds = self.seconds(&row.order);
        let better = seconds < row.seconds * WORTHWHILE;
        if better {
            row.seconds = seconds;
        } else {
            undo(&mut row.order);
        }
        better
    }

    /// One swap between the slowest row and another row that leaves both faster than the slowest was.
    fn exchange(&mut self, rows: &mut [Row], slowest: usize) -> bool {
        let limit = rows[slowest].seconds * WORTHWHILE;
        let per_row = rows[slowest].order.len();
        for other in (0..rows.len()).filter(|&other| other != slowest) {
            for (i, j) in (0..per_row).flat_map(|i| (0..per_row).map(move |j| (i, j))) {
                if self.left == 0 {
                    return false;
                }
                let swap = |rows: &mut [Row]| {
                    let given = rows[slowest].order[i];
                    rows[slowest].order[i] = std::mem::replace(&mut rows[other].order[j], given);
                };
                swap(rows);
                let seconds = [slowest, other].map(|row| self.seconds(&rows[row].order));
                if seconds.iter().all(|&seconds| seconds < limit) {
                    for (row, seconds) in [slowest, other].into_iter().zip(seconds) {
                        rows[row].seconds = seconds;
                        rows[row].settled = false;
                    }
                    return true;
                }
                swap(rows);
            }
        }
        false
    }
}

/// All pairs of `count` indices, neighbours first.
fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..count).flat_map(move |gap| (0..count - gap).map(move |i| (i, i + gap)))
}
