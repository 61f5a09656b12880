//! The lightest of many micro-batches, while they grow.

/// Micro-batches in a list sorted by weight, ties by index.
///
/// Documents come longest first, so a micro-batch that just took one stands close to the one that took the one before:
/// a search that starts there takes 1 to 4 steps on average, for 4 micro-batches as for 1,024 (`benches/rust/engine.rs`
/// has the time), where a tournament tree or a heap always pays log N. In any other order it takes up to N steps.
#[derive(Clone)]
pub(super) struct Ladder {
    /// One rung a micro-batch, and one more, above all (infinite, of the highest index), that closes the list to a ring.
    rungs: Vec<Rung>,
    /// Where the last search ended.
    finger: u32,
}

#[derive(Clone, Copy)]
struct Rung {
    weight: f64,
    lighter: u32,
    heavier: u32,
}

impl Ladder {
    /// A ladder over `weights`: numbers, infinity included; at most `MAX_MICRO_BATCHES`.
    pub(super) fn new(weights: impl ExactSizeIterator<Item = f64>) -> Self {
        let end = weights.len() as u32;
        let mut rungs: Vec<Rung> = weights.map(|weight| Rung { weight, lighter: end, heavier: end }).collect();
        rungs.push(Rung { weight: f64::INFINITY, lighter: end, heavier: end });
        let mut order: Vec<u32> = (0..end).collect();
        order.sort_by(|&a, &b| rungs[a as usize].weight.total_cmp(&rungs[b as usize].weight));
        let mut ladder = Self { rungs, finger: end };
        for index in order {
            ladder.insert_below(index, end);
        }
        ladder
    }

    /// Index of the least weight, the lowest index of several.
    #[inline]
    pub(super) fn lightest(&self) -> usize {
        self.rungs[self.end() as usize].heavier as usize
    }

    /// Indices by ascending weight, then by index.
    #[inline]
    pub(super) fn ascending(&self) -> impl Iterator<Item = usize> {
        let step = |rung: u32| Some(self.rungs[rung as usize].heavier).filter(|&heavier| heavier != self.end());
        std::iter::successors(step(self.end()), move |&rung| step(rung)).map(|rung| rung as usize)
    }

    /// The greatest weight.
    #[inline]
    pub(super) fn greatest(&self) -> f64 {
        self.rungs[self.rungs[self.end() as usize].lighter as usize].weight
    }

    /// Sets one weight.
    #[inline]
    pub(super) fn set(&mut self, index: usize, weight: f64) {
        let Rung { lighter, heavier, .. } = self.rungs[index];
        self.rungs[lighter as usize].heavier = heavier;
        self.rungs[heavier as usize].lighter = lighter;
        let index = index as u32;
        let mut above = if self.finger == index { heavier } else { self.finger };
        self.rungs[index as usize].weight = weight;

        while self.is_below(above, index) {
            above = self.rungs[above as usize].heavier;
        }
        loop {
            let below = self.rungs[above as usize].lighter;
            if below == self.end() || self.is_below(below, index) {
                break;
            }
            above = below;
        }
        self.insert_below(index, above);
        self.finger = index;
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Ladder;

    proptest! {
        #[test]
        fn finds_the_lightest_after_any_changes(
            start in proptest::collection::vec(0_u8..9, 1..12),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0_u8..9), 0..40),
        ) {
            let mut weights: Vec<f64> = start.into_iter().map(f64::from).collect();
            let mut ladder = Ladder::new(weights.clone().into_iter());
            for (index, weight) in changes {
                let index = index.index(weights.len());
                weights[index] = f64::from(weight);
                ladder.set(index, weights[index]);
                let least = weights.iter().copied().fold(f64::INFINITY, f64::min);
                let first = weights.iter().position(|&weight| weight == least);
                prop_assert_eq!(Some(ladder.lightest()), first);
                let mut ascending: Vec<usize> = (0..weights.len()).collect();
                ascending.sort_by(|&a, &b| weights[a].total_cmp(&weights[b]));
                prop_assert_eq!(ladder.ascending().collect::<Vec<_>>(), ascending);
                prop_assert_eq!(ladder.greatest(), weights.iter().copied().fold(0.0, f64::max));
            }
        }
    }
}
