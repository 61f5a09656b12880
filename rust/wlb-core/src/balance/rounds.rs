//! The fewest rounds that hold everything.

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
