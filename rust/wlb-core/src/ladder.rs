//! A list of micro-batches by weight that stays sorted while weights change.

use std::cmp::Ordering;

/// Number of micro-batches from which on a search counts its steps. With fewer micro-batches a search is short, and
/// counting would be a tenth of all work.
const COUNTED_FROM: usize = 1024;

/// Steps after which a counted search goes on from a sample.
const FAR: usize = 64;

/// Micro-batches in a list sorted by weight, ties by index.
///
/// Documents come longest first, so the next micro-batch that takes a document is close to the last one that took one.
/// A search that starts at the last place takes 1 to 4 steps on average, for 4 micro-batches as for 1,024; a tournament
/// tree or a heap always pays log N. If documents come in another order, a search takes up to N steps; with many
/// micro-batches a long search goes on from the nearest of a sample of sqrt(N) micro-batches, usually about sqrt(N)
/// steps away.
pub(crate) struct Ladder {
    /// One rung for each micro-batch, and a last rung that closes the list to a ring: its weight is infinite and its
    /// index the highest.
    rungs: Vec<Rung>,
    /// Place where the last search ended.
    finger: u32,
    /// Places where the last searches of [`Ladder::come_back`] ended, one for each kind.
    back: [u32; 2],
}

#[derive(Clone, Copy)]
struct Rung {
    weight: f64,
    lighter: u32,
    heavier: u32,
}

impl Ladder {
    /// A ladder over `weights`: numbers, infinity included; at most `MAX_MICRO_BATCHES`.
    pub(crate) fn new(weights: impl ExactSizeIterator<Item = f64>) -> Self {
        let mut order: Vec<(f64, u32)> = weights.zip(0..).collect();
        order.sort_unstable_by(by_weight);
        Self::sorted(order)
    }

    /// A ladder of `(weight, index)` pairs that are mostly sorted already.
    pub(crate) fn of_mostly_sorted(mut order: Vec<(f64, u32)>) -> Self {
        order.sort_by(by_weight); // one pass if they are sorted already
        Self::sorted(order)
    }

    fn sorted(order: Vec<(f64, u32)>) -> Self {
        let end = order.len() as u32;
        let rung = Rung { weight: f64::INFINITY, lighter: end, heavier: end };
        let mut ladder = Self { rungs: vec![rung; order.len() + 1], finger: end, back: [end; 2] };
        for (weight, index) in order {
            ladder.rungs[index as usize].weight = weight;
            ladder.insert_below(index, end);
        }
        ladder
    }

    /// Index of the least weight, the lowest index if several are equal. Some index must not be taken out.
    #[inline]
    pub(crate) fn lightest(&self) -> usize {
        self.rungs[self.end() as usize].heavier as usize
    }

    /// The least weight and its index, the lowest index if several are equal. `None` if all indices are taken out.
    #[inline]
    pub(crate) fn first(&self) -> Option<(f64, usize)> {
        let first = self.lightest();
        (first + 1 < self.rungs.len()).then(|| (self.rungs[first].weight, first))
    }

    /// [`Ladder::lightest`] for weights that may have grown since they were set: stale weights that the search meets
    /// are set first. `None` if all indices are taken out.
    #[inline]
    pub(crate) fn lightest_by(&mut self, weight: impl Fn(usize) -> f64) -> Option<usize> {
        loop {
            let lightest = self.lightest();
            if lightest == self.rungs.len() - 1 {
                return None;
            }
            let grown = weight(lightest);
            if self.rungs[lightest].weight == grown {
                return Some(lightest);
            }
            // Keep the finger: the next micro-batch is close to the last one that took a document, not close to this
            // one.
            let finger = self.finger;
            self.set(lightest, grown);
            self.finger = finger;
        }
    }

    /// Index of the greatest weight, the lowest index if several are equal.
    pub(crate) fn heaviest(&self) -> usize {
        let end = self.end();
        let mut heaviest = self.rungs[end as usize].lighter;
        loop {
            let below = self.rungs[heaviest as usize].lighter;
            if below == end || self.rungs[below as usize].weight < self.rungs[heaviest as usize].weight {
                return heaviest as usize;
            }
            heaviest = below;
        }
    }

    /// All indices by ascending weight; equal weights by index.
    pub(crate) fn ascending(&self) -> impl Iterator<Item = usize> + '_ {
        let heavier = |&index: &u32| Some(self.rungs[index as usize].heavier).filter(|&next| next != self.end());
        std::iter::successors(heavier(&self.end()), heavier).map(|index| index as usize)
    }

    /// Takes an index out, until its weight is set again.
    pub(crate) fn remove(&mut self, index: usize) {
        let heavier = self.unlink(index);
        let index = index as u32;
        for finger in self.back.iter_mut().chain([&mut self.finger]) {
            if *finger == index {
                *finger = heavier;
            }
        }
        // The rung points to itself, so that unlinking it again changes no other rung.
        let rung = &mut self.rungs[index as usize];
        (rung.lighter, rung.heavier) = (index, index);
    }

    /// Puts an index that was taken out back with its former weight.
    pub(crate) fn put_back(&mut self, index: usize) {
        self.set(index, self.rungs[index].weight);
    }

    /// Sets the weight of an index that was taken out. Indices of one kind come back in an order of their own, so the
    /// search starts at the place of the last one of that kind.
    #[inline]
    pub(crate) fn come_back(&mut self, index: usize, weight: f64, kind: bool) {
        std::mem::swap(&mut self.finger, &mut self.back[usize::from(kind)]);
        self.set(index, weight);
        std::mem::swap(&mut self.finger, &mut self.back[usize::from(kind)]);
    }

    /// [`Ladder::set`] with a single comparison if the lightest index stays the lightest.
    #[inline]
    pub(crate) fn set_lightest(&mut self, index: usize, weight: f64) {
        let next = self.rungs[index].heavier as usize;
        if index == self.lightest() && weight < self.rungs[next].weight {
            self.rungs[index].weight = weight;
        } else {
            self.set(index, weight);
        }
    }

    /// Sets the weight of one index.
    #[inline]
    pub(crate) fn set(&mut self, index: usize, weight: f64) {
        if self.rungs.len() < COUNTED_FROM {
            self.place::<false>(index, weight)
        } else {
            self.place::<true>(index, weight)
        }
    }

    #[inline]
    fn place<const COUNTED: bool>(&mut self, index: usize, weight: f64) {
        let heavier = self.unlink(index);
        let index = index as u32;
        let mut above = if self.finger == index { heavier } else { self.finger };
        self.rungs[index as usize].weight = weight;

        let mut steps = 0;
        while self.is_below(above, index) {
            above = self.rungs[above as usize].heavier;
            steps += usize::from(COUNTED);
            if COUNTED && steps == FAR {
                above = self.sampled_above(index);
            }
        }
        loop {
            let below = self.rungs[above as usize].lighter;
            if below == self.end() || self.is_below(below, index) {
                break;
            }
            above = below;
            steps += usize::from(COUNTED);
            if COUNTED && steps == FAR {
                let sampled = self.sampled_above(index);
                above = if self.is_below(sampled, above) { sampled } else { above };
            }
        }
        self.insert_below(index, above);
        self.finger = index;
    }

    /// The lowest rung of a sample that lies above the index to be placed; the end if none of the sample does.
    #[cold]
    fn sampled_above(&mut self, index: u32) -> u32 {
        let stride = self.rungs.len().isqrt();
        let is_above = |&other: &u32| {
            let is_in = self.rungs[other as usize].heavier != other;
            is_in && other != index && !self.is_below(other, index)
        };
        let sample = (0..self.end()).step_by(stride).filter(is_above);
        sample.fold(self.end(), |lowest, other| if self.is_below(other, lowest) { other } else { lowest })
    }

    /// Takes a rung out of the list and returns the rung above it.
    #[inline]
    fn unlink(&mut self, index: usize) -> u32 {
        let Rung { lighter, heavier, .. } = self.rungs[index];
        self.rungs[lighter as usize].heavier = heavier;
        self.rungs[heavier as usize].lighter = lighter;
        heavier
    }

    fn end(&self) -> u32 {
        (self.rungs.len() - 1) as u32
    }

    #[inline]
    fn is_below(&self, a: u32, b: u32) -> bool {
        let (weight_a, weight_b) = (self.rungs[a as usize].weight, self.rungs[b as usize].weight);
        weight_a < weight_b || (weight_a == weight_b && a < b)
    }

    #[inline]
    fn insert_below(&mut self, index: u32, above: u32) {
        let below = self.rungs[above as usize].lighter;
        let rung = &mut self.rungs[index as usize];
        (rung.lighter, rung.heavier) = (below, above);
        self.rungs[below as usize].heavier = index;
        self.rungs[above as usize].lighter = index;
    }
}

fn by_weight(a: &(f64, u32), b: &(f64, u32)) -> Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::Ladder;

    /// Changes a weight, or takes the index out, in the ladder and in the list that it is compared with.
    fn set(ladder: &mut Ladder, weights: &mut [Option<f64>], index: usize, weight: Option<f64>) {
        let was_out = std::mem::replace(&mut weights[index], weight).is_none();
        match weight {
            Some(weight) if was_out => ladder.come_back(index, weight, index.is_multiple_of(3)),
            Some(weight) if index.is_multiple_of(2) => ladder.set_lightest(index, weight),
            Some(weight) => ladder.set(index, weight),
            None => ladder.remove(index),
        }
    }

    /// Indices that have a weight, from the lightest to the heaviest.
    fn ascending(weights: &[Option<f64>]) -> Vec<usize> {
        let mut ascending: Vec<usize> = (0..weights.len()).filter(|&index| weights[index].is_some()).collect();
        ascending.sort_by(|&a, &b| weights[a].partial_cmp(&weights[b]).unwrap_or(Ordering::Equal));
        ascending
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn keeps_its_order_where_changes_are_far_apart(
            start in proptest::collection::vec(0_u16..900, super::COUNTED_FROM..1200),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), proptest::option::weighted(0.8, 0_u16..900)), 40),
        ) {
            let mut weights: Vec<Option<f64>> = start.iter().map(|&weight| Some(f64::from(weight))).collect();
            let mut order: Vec<(f64, u32)> = start.iter().copied().map(f64::from).zip(0..).collect();
            order.reverse();
            let mut ladder = Ladder::of_mostly_sorted(order);
            let alike = Ladder::new(start.into_iter().map(f64::from));
            prop_assert!(ladder.ascending().eq(alike.ascending()));
            for (index, change) in changes {
                let index = index.index(weights.len());
                set(&mut ladder, &mut weights, index, change.map(f64::from));
            }
            prop_assert_eq!(ladder.ascending().collect::<Vec<_>>(), ascending(&weights));
        }
    }

    proptest! {
        #[test]
        fn keeps_its_order_through_any_changes(
            start in proptest::collection::vec(0_u8..9, 1..12),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), proptest::option::weighted(0.8, 0_u8..9)), 0..40),
        ) {
            let mut weights: Vec<Option<f64>> = start.iter().map(|&weight| Some(f64::from(weight))).collect();
            let mut ladder = Ladder::new(start.into_iter().map(f64::from));
            for (index, change) in changes {
                let index = index.index(weights.len());
                set(&mut ladder, &mut weights, index, change.map(f64::from));
                let ascending = ascending(&weights);
                prop_assert_eq!(ladder.ascending().collect::<Vec<_>>(), ascending.clone());
                let first = ascending.first().map(|&first| (weights[first].unwrap_or(f64::NAN), first));
                prop_assert_eq!(ladder.first(), first);
                let Some((&lightest, &last)) = ascending.first().zip(ascending.last()) else { continue };
                prop_assert_eq!(ladder.lightest(), lightest);
                let heaviest = ascending.iter().find(|&&index| weights[index] == weights[last]);
                prop_assert_eq!(Some(ladder.heaviest()), heaviest.copied());
            }
        }
    }
}
