//! Tunes thresholds of the outlier queues.

use crate::error::{Result, check_range, saturating_i64};
use crate::limits::MAX_QUEUES;

use super::options::TuneOptions;
use super::sample::Sample;
use super::trials::Trials;
use super::tuned::Tuned;

/// Candidate thresholds of the first, coarse search.
const COARSE_CANDIDATES: usize = 12;
/// Ratio of neighbouring coarse candidates; the lowest of twelve is a 23rd of the longest document.
const COARSE_STEP: f64 = 1.3;
/// Rounds of refinement; each halves the step between neighbouring candidates.
const REFINEMENTS: u32 = 3;
/// Mean delay, over the limit, up to which the neighbourhood of a choice is searched: a neighbour may keep the limit.
const BEYOND: f64 = 1.1;

/// Tries every combination of up to `num_queues` geometrically spaced thresholds first. Then, for each number of
/// levels, halves the steps around two choices: the best one, and the best one whose delay is a little above the limit
/// (delay falls in leaps as a threshold passes a common length). No queues at all is always among the choices, so there
/// is always an answer; if no choice keeps the limit, it is the one with the least delay.
///
/// # Complexity
/// One run of the packer for each choice: 79 coarse choices for two queues, 299 for three.
pub(super) fn tune_thresholds(
    sample: Sample<'_>,
    num_queues: usize,
    options: &TuneOptions,
    keep_going: &dyn Fn() -> bool,
) -> Result<Tuned> {
    check_range("num_queues", saturating_i64(num_queues), 0, MAX_QUEUES as i64)?;
    let mut search = Trials::new(sample, options, keep_going)?;
    let longest = search.longest;
    // Strictly below the longest: a threshold there would hold a single length. Repeated division rounds the same on
    // every machine; a power does not.
    let descending = std::iter::successors(Some(f64::from(longest)), |threshold| Some(threshold / COARSE_STEP));
    let mut candidates: Vec<i32> =
        descending.skip(1).take(COARSE_CANDIDATES).map(|threshold| threshold as i32).filter(|&t| t > 0).collect();
    candidates.sort_unstable();
    candidates.dedup();
    for thresholds in combinations(&candidates, num_queues) {
        search.evaluate(thresholds, None)?;
    }
    // Each number of levels is refined by itself: the best two thresholds may be near no coarse choice of three.
    for levels in 1..=num_queues {
        let mut step = COARSE_STEP;
        for _ in 0..REFINEMENTS {
            step = step.sqrt();
            let within = search.best(|point| point.thresholds.len() == levels);
            let beyond = search.best_within(BEYOND * options.max_mean_delay, levels);
            let around: Vec<Vec<i32>> = [within, beyond].into_iter().flatten().map(|p| p.thresholds.clone()).collect();
            for thresholds in around.iter().flat_map(|around| neighbours(around, step, longest)) {
                search.evaluate(thresholds, None)?;
            }
        }
    }
    Ok(search.finish())
}

/// Every ascending choice of up to `most` candidates, the empty choice first.
fn combinations(candidates: &[i32], most: usize) -> Vec<Vec<i32>> {
    let mut all = vec![Vec::new()];
    let mut grown_from = 0;
    for _ in 0..most {
        let grow_until = all.len();
        for index in grown_from..grow_until {
            let above = all[index].last().copied().unwrap_or(0);
            for &candidate in candidates.iter().filter(|&&candidate| candidate > above) {
                let mut longer: Vec<i32> = all[index].clone();
                longer.push(candidate);
                all.push(longer);
            }
        }
        grown_from = grow_until;
    }
    all
}

/// Every combination in which each threshold moves one step down, stays, or moves one step up, and that still ascends.
fn neighbours(thresholds: &[i32], step: f64, longest: i32) -> Vec<Vec<i32>> {
    let mut all: Vec<Vec<i32>> = vec![Vec::new()];
    for &threshold in thresholds {
        let moves = [f64::from(threshold) / step, f64::from(threshold), f64::from(threshold) * step];
        all = all
            .iter()
            .flat_map(|prefix| moves.map(|moved| [prefix.as_slice(), &[moved as i32]].concat()))
            .filter(|choice| {
                let last = choice.len() - 1;
                choice[last] <= longest && choice[last] > choice[..last].last().copied().unwrap_or(0)
            })
            .collect();
    }
    all
}
