//! The number of rounds: the fewest that hold everything, or more where that pays.

use crate::error::Result;

/// The smallest number from `least` on for which an attempt makes a plan, and that plan.
///
/// Numbers are tried in steps that double, so that a `least` far too low costs few attempts; then the gap is halved. An
/// attempt with more is taken to succeed if one with fewer does.
///
/// # Arguments
/// * `most` - the largest number that is allowed; the attempt with one more has to be an error.
/// * `attempt` - the plan with this number; `None` if it does not hold everything.
///
/// # Complexity
/// O(log) attempts; usually one, if `least` is enough.
pub(crate) fn fewest<P>(
    least: usize,
    most: usize,
    mut attempt: impl FnMut(usize) -> Result<Option<P>>,
) -> Result<(usize, P)> {
    let (mut too_few, mut step) = (least - 1, 1);
    let (mut enough, mut best) = loop {
        let number = too_few + step;
        if let Some(found) = attempt(number)? {
            break (number, found);
        }
        // The last step goes to the largest number that is allowed.
        step = (2 * step).min(most.saturating_sub(number)).max(1);
        too_few = number;
    };
    while enough - too_few > 1 {
        let middle = too_few + (enough - too_few) / 2;
        match attempt(middle)? {
            Some(found) => (enough, best) = (middle, found),
            None => too_few = middle,
        }
    }
    Ok((enough, best))
}

/// Number of additional rounds that are tried.
const MORE_ROUNDS: usize = 2;
/// Least part by which an additional round must shorten the step, if nobody says what a micro-batch costs to begin.
pub(crate) const WORTH_A_ROUND: f64 = 0.01;

/// The given plan, or a plan with a few more rounds if its step is shorter by at least the part `worth`: micro-batches
/// may be so full that nothing can be exchanged between ranks.
///
/// # Arguments
/// * `step` - time of a plan's step.
/// * `bound` - a lower bound on the step of any plan with this number of rounds.
/// * `attempt` - the plan with this number of rounds; `None` if there is none, or none that counts.
pub(crate) fn more<P>(
    (mut rounds, mut best): (usize, P),
    worth: f64,
    step: impl Fn(&P) -> f64,
    bound: impl Fn(usize) -> f64,
    attempt: impl Fn(usize) -> Option<P>,
) -> (usize, P) {
    for number in rounds + 1..=rounds + MORE_ROUNDS {
        let most = step(&best) * (1.0 - worth);
        if bound(number) > most {
            break;
        }
        if let Some(found) = attempt(number).filter(|found| step(found) <= most) {
            (rounds, best) = (number, found);
        }
    }
    (rounds, best)
}
