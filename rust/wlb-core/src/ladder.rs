//! The lightest of many micro-batches, while they change.

use std::cmp::Ordering;

/// Micro-batches from which on the steps of a search are counted. With fewer, a search is short, and counting is a
/// tenth of all work.
const COUNTED_FROM: usize = 1024;

/// Steps after which a search among so many goes on from a sample.
const FAR: usize = 64;

/// Micro-batches in a list sorted by weight, ties by index.
///
/// Documents come longest first, so a micro-batch that just took one stands close to the one that took the one before:
/// a search that starts there takes 1 to 4 steps on average, for 4 micro-batches as for 1,024, where a tournament tree
/// or a heap always pays log N. In any other order it takes up to N steps with few micro-batches; with many, a long
/// search goes on from the nearest of a sample, the square root of N of them: usually about as many steps away.
pub(crate) struct Ladder {
    /// One rung a micro-batch, and one more, above all (infinite, of the highest index), that closes the list to a
    /// ring.
    rungs: Vec<Rung>,
    /// End of the last search.
    finger: u32,
    /// Ends of the last searches for indices that came back, by kind.
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

    /// A ladder of weights with their indices, which are mostly in order already.
    pub(crate) fn of_mostly_sorted(mut order: Vec<(f64, u32)>) -> Self {
        order.sort_by(by_weight); // one pass, where they do
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

    /// Index of the least weight, the lowest index of several. There is one as long as not all are taken out.
    #[inline]
    pub(crate) fn lightest(&self) -> usize {
        self.rungs[self.end() as usize].heavier as usize
    }

    /// The least weight and its index, the lowest of several. `None` if all are taken out.
    #[inline]
    pub(crate) fn first(&self) -> Option<(f64, usize)> {
        let first = self.lightest();
        (first + 1 < self.rungs.len()).then(|| (self.rungs[first].weight, first))
    }

    /// [`Ladder::lightest`], where weights may have grown since they were set: those met on the way are set first. None
    /// if all are taken out.
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
            // Who comes next stands where the last one does that took a document, not near this one.
            let finger = self.finger;
            self.set(lightest, grown);
            self.finger = finger;
        }
    }

    /// Index of the greatest weight, the lowest index of several.
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

    /// All indices by weight, ties by index.
    pub(crate) fn ascending(&self) -> impl Iterator<Item = usize> + '_ {
        let heavier = |&index: &u32| Some(self.rungs[index as usize].heavier).filter(|&next| next != self.end());
        std::iter::successors(heavier(&self.end()), heavier).map(|index| index as usize)
    }

    /// Takes one out, until its weight is set again.
    pub(crate) fn remove(&mut self, index: usize) {
        let heavier = self.unlink(index);
        let index = index as u32;
        for finger in self.back.iter_mut().chain([&mut self.finger]) {
            if *finger == index {
                *finger = heavier;
            }
        }
        // So that unlinking it once more changes no other.
        let rung = &mut self.rungs[index as usize];
        (rung.lighter, rung.heavier) = (index, index);
    }

    /// Sets the weight of one that was taken out to what it was.
    pub(crate) fn put_back(&mut self, index: usize) {
        self.set(index, self.rungs[index].weight);
    }

    /// Sets the weight of one that was taken out, where those of two kinds come back in an order of their own: near the
    /// last of its kind that did, which may be far from where the others move.
    #[inline]
    pub(crate) fn come_back(&mut self, index: usize, weight: f64, kind: bool) {
        std::mem::swap(&mut self.finger, &mut self.back[usize::from(kind)]);
        self.set(index, weight);
        std::mem::swap(&mut self.finger, &mut self.back[usize::from(kind)]);
    }

    /// [`Ladder::set`], with one look where the lightest stays it.
    #[inline]
    pub(crate) fn set_lightest(&mut self, index: usize, weight: f64) {
        let next = self.rungs[index].heavier as usize;
        if index == self.lightest() && weight < self.rungs[next].weight {
            self.rungs[index].weight = weight;
        } else {
            self.set(index, weight);
        }
    }

    /// Sets one weight.
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

    /// The lowest above one that is being placed, of a sample and the end.
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

    /// Closes the list over a rung. Gives the next one.
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

    /// Changes a weight, or takes it away, in both.
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
