//! How much of the work each micro-batch should get: where the search for what it really should begins.

use crate::pipeline::PipelineOptions;

/// The first micro-batch, relative to the full ones, times the square root of the micro-batches that a stage has.
const FIRST: f64 = 0.2;
/// The last, relative to the full ones.
const LAST: f64 = 0.5;
/// Ends may be this much lighter, so that the full micro-batches are as heavy as the heaviest documents.
const LIGHTEST: f64 = 1.0 / 16.0;
/// Of the longest document, what a micro-batch begins with at least: what has nothing never gets any.
const LEAST: f64 = 1.0 / 64.0;

/// Relative work of each micro-batch, 1 for the full ones: light at both ends.
///
/// A pipeline fills at the speed of its first micro-batches and drains at that of its last, and while it does, ranks
/// idle. A micro-batch finds the last stage still busy if its way there, `(p - 1) f` for a forward of `f`, is no longer
/// than the backwards of those before it: so sizes may rise by `1 + b / ((p - 1) f)` from one to the next, and fall by
/// `1 + f / ((p - 1) b)`, with a backward of `b = 2 f`. The stages in between have other micro-batches in hand than the
/// last one, so a slower rise is better, and a faster fall leaves the full ones lighter: these numbers were found by
/// search over shapes in the simulator. Virtual stages shorten the way.
///
/// # Arguments
/// * `ends` - how heavy the ends are, relative to what suits a long step; above 1, only the first.
/// * `heaviest` - the heaviest document's part of all the work of a rank; the ends get lighter until the full
///   micro-batches reach it.
pub(super) fn shape(options: &PipelineOptions, mut ends: f64, heaviest: f64) -> Vec<f64> {
    let &PipelineOptions { num_micro_batches, num_stages, num_virtual_stages, .. } = options;
    loop {
        let shape = with_ends(num_micro_batches, num_stages, num_virtual_stages, ends);
        if ends <= LIGHTEST || heaviest * shape.iter().sum::<f64>() <= 1.0 {
            return shape;
        }
        ends /= 2.0;
    }
}

/// How heavy to try the first ones, too: where a stage has few micro-batches, light ones leave too much to the others.
pub(super) fn heavier_first(options: &PipelineOptions) -> Option<f64> {
    (options.num_stages > 1 && options.num_micro_batches <= 4 * options.num_stages).then_some(3.0)
}

/// Around documents so long that the pipeline fills and drains at their speed, in seconds. `None` if they are not.
///
/// The longest is in micro-batch `p`, and what is before it makes three kinds of paths take the same (`x` are the
/// sizes, `w = p - 1`):
///
/// - forwards on the first stage up to one of the `w` micro-batches before `p`, this up to the last stage, everything
///   there up to `p`. Each of these is then `g = 1 + 2/w` times the one before, `x_j = g^(j-1) x_1`;
/// - the same with `p` itself, behind the backward of the first: `x_p = g^w x_1 - 2/w x_0`;
/// - forwards on the first stage up to `w`; on the second this, the backward behind it, and `p`, up to the last stage:
///   `x_p = x_w + 2 (x_1 - x_0)`. Both together: `x_0 = x_1 (w - g^(w-1)) / (w - 1)`.
///
/// In the bound of these documents, whatever is left counts the same wherever it is: so behind them sizes fall, at a
/// rate that was found by search, until nothing is left.
///
/// # Arguments
/// * `longest` - seconds of documents, longest first.
/// * `work` - of all documents, spread evenly over the ranks.
pub(super) fn around(options: &PipelineOptions, mut longest: impl Iterator<Item = f64>, work: f64) -> Option<Vec<f64>> {
    let &PipelineOptions { num_micro_batches, num_stages, num_virtual_stages, .. } = options;
    if num_virtual_stages > 1 || num_stages == 1 || num_micro_batches <= num_stages {
        return None;
    }
    let full = longest.next().filter(|&seconds| seconds > 0.0)?;
    let way = (num_stages - 1) as f64;
    let growth = 1.0 + 2.0 / way;
    let grown = (2..num_stages).fold(1.0, |size, _| size * growth);
    // With two stages any first one will do.
    let first = if num_stages == 2 { 0.0 } else { (way - grown) / (way - 1.0) };
    let mut size = full / (grown * growth - 2.0 / way * first);
    let mut shape = vec![size * first];
    for _ in 1..num_stages {
        shape.push(size);
        size *= growth;
    }
    let mut left = work - shape.iter().sum::<f64>();
    let mut documents = std::iter::once(full).chain(longest);
    size = full;
    for _ in num_stages..num_micro_batches {
        let document = documents.next().unwrap_or(0.0);
        let seconds = if document >= size { document } else { size.min(left.max(0.0)) };
        shape.push(seconds);
        left -= seconds;
        size = size.max(document) / (1.0 + 1.0 / way);
    }
    shape.iter_mut().for_each(|size| *size = size.max(full * LEAST));
    (left <= 0.0).then_some(shape)
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
