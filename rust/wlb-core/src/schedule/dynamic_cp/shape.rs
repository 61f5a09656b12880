//! How much of the work each micro-batch should get.

/// First and last micro-batch, relative to the full ones, where there are many for each stage.
const FIRST: f64 = 0.2;
const LAST: f64 = 0.3;

/// Relative work of each micro-batch, 1 for the full ones: light at both ends.
///
/// A pipeline fills at the speed of its first micro-batches and drains at that of its last, and while it does, ranks
/// idle. A micro-batch finds the last stage still busy if its way there, `(p - 1) f` for a forward of `f`, is
/// no longer than the backwards of those before it: so sizes may rise by `1 + b / ((p - 1) f)` from one to the
/// next, and fall by `1 + f / ((p - 1) b)`, where a backward takes `b = 2 f`. Virtual stages shorten the way.
pub(super) fn shape(num_micro_batches: usize, num_stages: usize, num_virtual_stages: usize) -> Vec<f64> {
    let mut shape = vec![1.0; num_micro_batches];
    if num_stages == 1 {
        return shape;
    }
    let way = (num_stages - 1) as f64 / num_virtual_stages as f64;
    let depth = num_micro_batches as f64 / (num_stages as f64 / num_virtual_stages as f64);
    // With few micro-batches a long ramp costs more in the middle than it saves at the ends.
    let first = (0.6 / depth).clamp(FIRST, 1.0);
    let last = (0.9 - depth / 20.0).clamp(LAST, 0.7);
    ramp(shape.iter_mut(), first, 1.0 + 2.0 / way);
    ramp(shape.iter_mut().rev(), last, 1.0 + 0.5 / way);
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
