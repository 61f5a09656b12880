//! Divides a round of samples into optimizer steps.

use crate::balance::{Bins, Item, Leveller, Limits, Rule, Rules, sort};
use crate::error::{Result, check_range, named_choices, saturating_i64};
use crate::limits::MAX_MICRO_BATCHES;

use super::division::Division;
use super::share_out::STEPS;

named_choices! {
    /// The samples that an optimizer step takes.
    #[derive(Default)]
    StepSamples, "step_samples" {
        /// The next ones in their order.
        #[default]
        InOrder = "in_order",
        /// The samples with which all steps have equal work.
        Even = "even",
    }
}

/// The number of optimizer steps of a round, or the size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// This many steps.
    Number(usize),
    /// Steps of about this many prompts.
    Prompts(usize),
    /// Steps of about this many samples.
    Samples(usize),
}

impl Steps {
    /// The number of steps for these prompts: with a size, the number whose steps are nearest to that size, at least 1
    /// and at most one step for each prompt.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a size of 0 and for a number above that of the prompts.
    pub(super) fn number(self, prompts: usize, samples: usize) -> Result<usize> {
        let most = MAX_MICRO_BATCHES as i64;
        let nearest = |argument: &'static str, count: usize, size: usize| {
            check_range(argument, saturating_i64(size), 1, i64::MAX)?;
            Ok((count / size + usize::from(count % size > (size - 1) / 2)).clamp(prompts.min(1), prompts))
        };
        match self {
            Self::Number(number) => {
                check_range("num_steps", saturating_i64(number), 1, most.min(saturating_i64(prompts.max(1))))?;
                Ok(number.min(prompts))
            }
            Self::Prompts(size) => nearest("prompts_per_step", prompts, size),
            Self::Samples(size) => nearest("samples_per_step", samples, size),
        }
    }
}

/// The prompts of each step, ascending.
///
/// Steps have equally many prompts, or with [`Steps::Samples`] as nearly equally many samples as whole prompts allow.
/// No step is empty.
///
/// # Arguments
/// * `prompts` - in the order in which they came; `index` is the place there.
///
/// # Complexity
/// O(n) in order; else O(n log n) and a bounded number of exchanges.
pub(super) fn divide(prompts: &[Item], steps: Steps, which: StepSamples) -> Result<Vec<Vec<u32>>> {
    let samples: usize = prompts.iter().map(|prompt| prompt.documents as usize).sum();
    let number = steps.number(prompts.len(), samples)?;
    if number == 0 {
        return Ok(Vec::new());
    }
    let counted = |prompt: &Item| if matches!(steps, Steps::Samples(_)) { prompt.documents } else { 1 };
    match which {
        StepSamples::InOrder => Ok(in_order(&prompts.iter().map(counted).collect::<Vec<u32>>(), number)),
        StepSamples::Even => {
            let mut items: Vec<Item> =
                prompts.iter().map(|prompt| Item { documents: counted(prompt), ..*prompt }).collect();
            sort(&mut items);
            Ok(even(&items, number))
        }
    }
}

/// Cuts prompts in their order: the n-th cut is where the counts before it are nearest to their share.
fn in_order(counts: &[u32], number: usize) -> Vec<Vec<u32>> {
    let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let (mut first, mut before) = (0, 0_u64);
    let step = |step: usize| {
        let share = (step as u64 + 1) * total;
        // At least one prompt, and one left for each later step.
        let most = counts.len() - (number - step - 1);
        let mut end = first;
        while end < most {
            let after = before + u64::from(counts[end]);
            let nearer = (after * number as u64).abs_diff(share) <= (before * number as u64).abs_diff(share);
            if end > first && !nearer && step + 1 < number {
                break;
            }
            (before, end) = (after, end + 1);
        }
        let held = (first as u32..end as u32).collect();
        first = end;
        held
    };
    (0..number).map(step).collect()
}

/// Prompts in steps of equal counts, with costs as level as exchanges make them.
fn even(items: &[Item], number: usize) -> Vec<Vec<u32>> {
    let limits = Limits { tokens: i64::MAX / 2, documents: i64::MAX / 2 };
    // Cannot fail: nothing is limited.
    let Some(mut bins) = Bins::filled(items, limits, &vec![0.0; number], Rule::FewestDocuments) else {
        return Vec::new();
    };
    let counts = |bins: &Bins<'_>| {
        let of_step = |held: &Vec<u32>| held.iter().map(|&place| items[place as usize].documents).sum();
        bins.contents.iter().map(of_step).collect::<Vec<u32>>()
    };
    let spread = counts(&bins).iter().max().unwrap_or(&0) - counts(&bins).iter().min().unwrap_or(&0);
    // Where the rule leaves counts unequal, a division by the sizes of prompts alone is exact if there is one.
    if spread > 1
        && let Ok(division) = Division::equal(items, number)
        && let Some(exact) = division.filled(items, limits)
    {
        bins = exact;
    }
    let mean = items.iter().map(|item| item.cost).sum::<f64>() / number as f64;
    let all: Vec<usize> = (0..number).collect();
    Leveller::new(STEPS, true).exchange(&mut bins, &all, &Rules::new(1e-4 * mean, number));
    let mut steps: Vec<Vec<u32>> =
        bins.contents.iter().map(|held| held.iter().map(|&place| items[place as usize].index).collect()).collect();
    steps.iter_mut().for_each(|held: &mut Vec<u32>| held.sort_unstable());
    steps.sort_unstable();
    steps
}

#[cfg(test)]
mod tests {
    use super::in_order;

    #[test]
    fn cuts_are_nearest_to_equal_shares() {
        assert_eq!(in_order(&[1; 7], 3), [vec![0, 1], vec![2, 3, 4], vec![5, 6]]);
        assert_eq!(in_order(&[9, 1, 1, 1], 2), [vec![0], vec![1, 2, 3]]);
        assert_eq!(in_order(&[1, 1, 1, 9], 3), [vec![0, 1], vec![2], vec![3]]);
        assert_eq!(in_order(&[5, 5], 2), [vec![0], vec![1]]);
    }
}
