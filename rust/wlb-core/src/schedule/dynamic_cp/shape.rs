//! How much of the work each micro-batch should get: where the search for what it really should begins.

use crate::schedule::order::Layout;

/// The first micro-batch, relative to the full ones, times the square root of the micro-batches that a stage has.
const FIRST: f64 = 0.2;
/// The last, relative to the full ones.
const LAST: f64 = 0.5;
/// Ends may be this much lighter, so that the full micro-batches are as heavy as the heaviest documents.
const LIGHTEST: f64 = 1.0 / 16.0;

/// Relative work of each micro-batch, 1 for the full ones: light at both ends.
///
/// A pipeline fills at the speed of its first micro-batches and drains at that of its last, and while it does, ranks
/// idle. A micro-batch finds the last stage still busy if its way there, `(p - 1) f` for a forward of `f`, is
/// no longer than the backwards of those before it: so sizes may rise by `1 + b / ((p - 1) f)` from one to the
/// next, and fall by `1 + f / ((p - 1) b)`, with a backward of `b = 2 f`. The stages in between have other micro-batches in hand than
/// the last one, so a slower rise is better, and a faster fall leaves the full ones lighter: these numbers were found by search
/// over shapes in the simulator. Virtual stages shorten the way.
///
/// # Arguments
/// * `ends` - how heavy the ends are, relative to what suits a long step; above 1, only the first.
/// * `heaviest` - the heaviest document's part of all the work of a rank; the ends get lighter until the full micro-batches reach
///   it.
pub(super) fn shape(layout: &Layout, mut ends: f64, heaviest: f64) -> Vec<f64> {
    let &Layout { num_micro_batches, num_stages, num_virtual_stages, .. } = layout;
    loop {
        let shape = with_ends(num_micro_batches, num_stages, num_virtual_stages, ends);
        if ends <= LIGHTEST || heaviest * shape.iter().sum::<f64>() <= 1.0 {
            return shape;
        }
        ends /= 2.0;
    }
}

/// How heavy to try the first ones, too: where a stage has few micro-batches, light ones leave too much to the others.
pub(super) fn heavier_first(layout: &Layout) -> Option<f64> {
    (layout.num_stages > 1 && layout.num_micro_batches <= 4 * layout.num_stages).then_some(3.0)
}

fn with_ends(num_micro_batches: usize, num_stages: usize, num_virtual_stages: usize, ends: f64) -> Vec<f64> {
    let mut shape = vec![1.0; num_micro_batches];
    if num_stages > 1 {
        let way = (num_stages - 1) as f64 / num_virtual_stages as f64;
        let depth = num_micro_batches as f64 / num_stages as f64;
        ramp(shape.iter_mut(), ends * FIRST / depth.sqrt(), 1.0 + 1.6 / way);
        ramp(shape.iter_mut().rev(), ends.min(1.0) * LAST, 1.0 + 2.0 / (3.0 * way));
    }
    shape
}

fn ramp<'a>(shape: impl Iterator<Item = &'a mut f64>, mut size: f64, growth: f64) {
    for micro_batch in shape {
        if size >= *micro_batch {
            break;
        }
        *micro_batch = size;
        size *= growth;
    }
}

/// An order of micro-batches: the one that takes longest where the shape is fullest, and so on. Ties as they come.
pub(super) fn arrange(costs: &[f64], shape: &[f64]) -> Vec<usize> {
    let falling = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let mut order = vec![0; costs.len()];
    for (place, micro_batch) in falling(shape).into_iter().zip(falling(costs)) {
        order[place] = micro_batch;
    }
    order
}
