//! Classes of documents that never share a micro-batch.

use std::collections::BTreeMap;

use crate::balance::Item;

/// Classes of a batch's documents.
#[derive(Clone, Debug, Default)]
pub(super) struct Classes {
    /// Class of each document or bundle, counted from 0; empty if there is only one.
    pub(super) of: Vec<u32>,
    /// Number of classes.
    pub(super) number: usize,
    /// Whether all ranks run micro-batches of one class in the same round.
    pub(super) in_rounds: bool,
}

impl Classes {
    /// The classes that the user numbered as he likes.
    pub(super) fn new(classes: &[i64], in_rounds: bool) -> Self {
        let mut numbers = BTreeMap::new();
        classes.iter().for_each(|&class| _ = numbers.insert(class, 0));
        numbers.values_mut().zip(0..).for_each(|(number, next)| *number = next);
        match numbers.len() {
            0 | 1 => Self::default(),
            number => Self { of: classes.iter().map(|class| numbers[class]).collect(), number, in_rounds },
        }
    }

    /// Whether all documents may share a micro-batch.
    pub(super) fn is_one(&self) -> bool {
        self.of.is_empty()
    }

    /// These items (as places in `items`) by class.
    pub(super) fn divide(&self, places: &[u32], items: &[Item]) -> Vec<Vec<u32>> {
        let mut divided = vec![Vec::new(); self.number];
        for &place in places {
            divided[self.of[items[place as usize].index as usize] as usize].push(place);
        }
        divided
    }
}

/// What a class needs, on the rank where it needs most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    /// Least number of units of micro-batches.
    pub(super) least: usize,
    /// Number of units from which on some would be empty.
    pub(super) most: usize,
    /// Cost of its documents.
    pub(super) cost: f64,
}

/// The units of micro-batches that each class gets of `units`: what it needs, then one at a time for the class with the
/// most cost in a unit. `None` if the needs exceed `units`.
///
/// # Complexity
/// O(units * classes).
pub(super) fn shares(needs: &[Need], units: usize) -> Option<Vec<usize>> {
    let mut shares: Vec<usize> = needs.iter().map(|need| need.least).collect();
    let rest = units.checked_sub(shares.iter().sum())?;
    for _ in 0..rest {
        let fuller = |&class: &usize| (shares[class] < needs[class].most, needs[class].cost / shares[class] as f64);
        // The first of equals; the first of all if no class has documents.
        let class = (0..needs.len()).filter(|&class| shares[class] > 0).rev().max_by(|a, b| {
            let (a, b) = (fuller(a), fuller(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        shares[class.unwrap_or(0)] += 1;
    }
    Some(shares)
}

#[cfg(test)]
mod tests {
    use super::{Need, shares};

    #[test]
    fn the_class_with_the_most_cost_in_a_unit_gets_the_next() {
        let needs = [(1, 9, 10.0), (2, 2, 90.0), (0, 0, 0.0)];
        let needs = needs.map(|(least, most, cost)| Need { least, most, cost });
        assert_eq!(shares(&needs, 2), None);
        assert_eq!(shares(&needs, 3), Some(vec![1, 2, 0]));
        assert_eq!(shares(&needs, 5), Some(vec![3, 2, 0]));
        assert_eq!(shares(&needs, 13), Some(vec![9, 4, 0]));
        assert_eq!(shares(&[Need::default(); 2], 3), Some(vec![3, 0]));
    }
}
