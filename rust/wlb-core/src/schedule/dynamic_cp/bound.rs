//! What no plan can beat.

use super::DynamicCpOptions;
use super::solver::Problem;

/// A step takes at least this long, whatever the plan, in seconds.
///
/// The largest of
/// - all work spread evenly over all ranks of all stages, and `least` micro-batches' constant part;
/// - without virtual stages, the drain: `most` micro-batches that share this work cannot shrink towards the end faster than
///   the pipeline drains behind each of them ([`drain`]);
/// - the way of the longest document through the pipeline on its best group; and where only all ranks together are fast
///   enough for the few longest, what they do before and after these ([`behind`]).
pub(super) fn lower_bound(problem: &Problem, options: &DynamicCpOptions, least: usize, most: usize) -> f64 {
    let stages = options.num_stages as f64;
    let share = problem.total_work / problem.world_size as f64 / stages;
    let constant = problem.cost.micro_batch_seconds / stages;
    let mut bound = share + least as f64 * constant;
    if options.num_virtual_stages == 1 && options.num_stages > 1 {
        bound = bound.max(share + drain(share, stages, most));
    }
    // With one rank there is nowhere to hop to.
    let hops = if options.num_stages == 1 { 0 } else { 2 * (options.num_stages * options.num_virtual_stages - 1) };
    let hops = hops as f64 * options.p2p_seconds;
    // Of the longest so far. Their work only: those in one micro-batch share its constant, and hide their exchange.
    let mut work = 0.0;
    for document in problem.documents.iter().take(most) {
        let load = document.load;
        let seconds = |cp_size: usize| problem.cost.seconds(&load, cp_size);
        let fitting = || problem.group_sizes().filter(|&cp_size| problem.fits(&load, cp_size));
        let apart =
            fitting().filter(|&cp_size| cp_size < problem.world_size).map(seconds).fold(f64::INFINITY, f64::min);
        let mut way = apart + hops;
        if fitting().any(|cp_size| cp_size == problem.world_size) {
            let whole = seconds(problem.world_size);
            way = way.min(whole + hops);
            if options.num_virtual_stages == 1 {
                work += load.work();
                let (each, together) = (whole / stages, work / problem.world_size as f64 / stages);
                let others = (share - together).max(0.0);
                way = way.max(behind(together, each, others, stages).min(apart + hops));
            }
        }
        bound = bound.max(way);
    }
    bound
}

/// `p` stages, equal work `share` on each rank, at most `m` micro-batches.
///
/// The backward of a micro-batch of `x` leaves the last stage with `(p - 1) * 2x/3` still to go to the first, which
/// then runs the backwards of all later ones, `2/3` of their work `s`. All forwards and the other backwards lie before. So the step
/// takes at least `share + (p - 1) * 2x/3 - s/3`. For every micro-batch to hold this to `share + d`, counted from the
/// last, `x <= (d + s/3) / ((p - 1) * 2/3)`: together at most `3 d (g^m - 1)` with `g = 1 + 1 / (2 (p - 1))`.
fn drain(share: f64, stages: f64, most: usize) -> f64 {
    let growth = 1.0 + 0.5 / (stages - 1.0);
    let mut power = 1.0;
    for _ in 0..most {
        power *= growth;
    }
    share / (3.0 * (power - 1.0))
}

/// Documents of `together` work a stage on all ranks at once, each alone at least `x` seconds; other work `others` on each rank, before (`q`)
/// the first of them or after (`s`) the last: in between it takes longest.
///
/// The forward of the first reaches the last stage behind `q/3` and on a way of `(p - 1) x/3`; there `together` and all of `s`
/// remain. Or: as in [`drain`], behind the last. Or: the way there, `together`, the way back, and the backwards of `s` on the first
/// stage. The least maximum of the three:
///
/// `t + s + q/3 + (p-1) x/3`, `t + s + q + (p-1) 2x/3 - s/3`, `t + q/3 + (p-1) x + 2s/3`. All are sums in `q` and `s`, so uneven
/// ranks do not help; nor do several in one micro-batch, which then is the first and the last, and larger.
fn behind(together: f64, x: f64, others: f64, stages: f64) -> f64 {
    let way = stages - 1.0;
    let fill = together + others / 3.0 + way * x / 3.0;
    let drain = together + others + way * x * 2.0 / 3.0;
    let through = together + others / 3.0 + way * x;
    // With `s`, the second falls by a third and the others rise by two thirds and one: least where it meets the first of them.
    let s = (drain - fill).min((drain - through) * 1.5).clamp(0.0, others);
    (fill + s * 2.0 / 3.0).max(drain - s / 3.0).max(through + s / 3.0)
}
