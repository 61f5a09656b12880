//! Divides groups of documents so that all ranks have equally many documents, by the sizes of the groups alone.
//!
//! A greedy rule finds such a division almost always. Where it does not, this search is exact: it finds a division if
//! there is one. There are few sizes, so it works with the number of groups of each size and not with single groups.

use std::collections::BTreeSet;

use crate::balance::{Bins, Item, Limits};
use crate::error::{Error, Result};

/// Most steps of the search: some hundredths of a second.
const STEPS: usize = 1 << 22;

/// How many groups of each size each rank gets.
pub(crate) struct Division {
    /// Numbers of documents that groups have, largest first.
    sizes: Vec<u32>,
    /// For each rank, the number of its groups of each size.
    ranks: Vec<Vec<u32>>,
}

impl Division {
    /// A division in which numbers of documents differ by at most one.
    ///
    /// Ranks are filled one after another, each with the largest group that is left and others that make its number
    /// exact. If the remaining groups cannot fill the remaining ranks, that is remembered, so that no such remainder is
    /// searched twice.
    ///
    /// # Errors
    /// [`Error::Combination`] for `equal_documents`: one for groups that no division suits, another one if the search
    /// ends after 2^22 steps.
    pub(crate) fn equal(groups: &[Item], ranks: usize) -> Result<Self> {
        let refused = |requirement| Err(Error::Combination { argument: "equal_documents", requirement });
        let mut search = Search::new(groups, ranks);
        match search.run() {
            Some(true) => {
                let mut of_ranks: Vec<Vec<u32>> = search.levels.into_iter().map(|level| level.taken).collect();
                of_ranks.resize(ranks, vec![0; search.sizes.len()]);
                Ok(Self { sizes: search.sizes, ranks: of_ranks })
            }
            Some(false) => refused(
                "no division of groups of these sizes gives all ranks equally many documents (they may differ by one): \
                 change dp_size or the groups, or leave equal_documents out",
            ),
            None => refused(
                "found neither a division of these groups that gives all ranks equally many documents, nor a proof \
                 that there is none, in 4194304 steps: use fewer sizes of groups or another dp_size, or leave \
                 equal_documents out",
            ),
        }
    }

    /// The groups on ranks as the division says: the costliest first, each to the rank with the least cost among those
    /// that still get a group of its size. `None` if a group finds no room.
    ///
    /// # Complexity
    /// O(groups and ranks, multiplied).
    pub(super) fn filled<'a>(&self, groups: &'a [Item], limits: Limits) -> Option<Bins<'a>> {
        let mut bins = Bins::new(groups, limits, &vec![0.0; self.ranks.len()]);
        let mut wants = self.ranks.clone();
        for (group, place) in groups.iter().zip(0..) {
            let size = self.sizes.iter().position(|&size| size == group.documents)?;
            let takes =
                |&rank: &usize| wants[rank][size] > 0 && bins.has_room(rank, group.tokens, group.documents.into());
            let ranks = (0..wants.len()).filter(takes);
            let rank = ranks.min_by(|&a, &b| bins.loads[a].total_cmp(&bins.loads[b]))?;
            wants[rank][size] -= 1;
            bins.put(place, rank);
        }
        Some(bins)
    }
}

/// One rank of a search.
struct Level {
    /// Documents that the rank gets.
    target: u32,
    /// Number of its groups of each size.
    taken: Vec<u32>,
    /// Whether `taken` is a choice, and not the state before the first.
    chosen: bool,
}

/// A search, depth first: a level for each rank that is filled.
struct Search {
    sizes: Vec<u32>,
    /// Number of groups of each size that no level has.
    left: Vec<u32>,
    levels: Vec<Level>,
    /// Ranks without a level.
    ranks_left: usize,
    /// Documents of a rank, at least; and how many ranks without a level get one more.
    least: u32,
    fuller_left: usize,
    /// Groups that cannot fill the remaining ranks: the number of each size, and at last the number of ranks.
    dead: BTreeSet<Vec<u32>>,
    steps: usize,
}

impl Search {
    fn new(groups: &[Item], ranks: usize) -> Self {
        let mut all: Vec<u32> = groups.iter().map(|group| group.documents).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        let (sizes, left) = all.chunk_by(|a, b| a == b).map(|alike| (alike[0], alike.len() as u32)).unzip();
        let documents: usize = all.iter().map(|&size| size as usize).sum();
        let (least, fuller_left) = ((documents / ranks) as u32, documents % ranks);
        Self {
            sizes,
            left,
            levels: Vec::new(),
            ranks_left: ranks,
            least,
            fuller_left,
            dead: BTreeSet::new(),
            steps: STEPS,
        }
    }

    /// Whether there is a division; then `levels` has it, up to ranks without documents. `None` if the steps are used
    /// up.
    fn run(&mut self) -> Option<bool> {
        self.descend();
        loop {
            let Some(mut level) = self.levels.pop() else { return Some(self.left.iter().all(|&left| left == 0)) };
            self.give_back(&mut level);
            let found = self.choose(&mut level)?;
            if found {
                self.take(level);
                if self.left.iter().all(|&left| left == 0) {
                    return Some(true);
                }
                if !self.dead.contains(&self.remainder()) {
                    self.descend();
                }
            } else if level.target > self.least && self.ranks_left > self.fuller_left {
                self.levels.push(Level { target: self.least, chosen: false, ..level });
            } else {
                let remainder = self.remainder();
                self.dead.insert(remainder);
            }
        }
    }

    /// Begins the next rank, with the larger number of documents if a rank may still have it.
    fn descend(&mut self) {
        if self.ranks_left > 0 && self.left.iter().any(|&left| left > 0) {
            let target = self.least + u32::from(self.fuller_left > 0);
            self.levels.push(Level { target, taken: vec![0; self.sizes.len()], chosen: false });
        }
    }

    fn remainder(&self) -> Vec<u32> {
        self.left.iter().copied().chain([self.ranks_left as u32]).collect()
    }

    fn take(&mut self, level: Level) {
        self.left.iter_mut().zip(&level.taken).for_each(|(left, taken)| *left -= taken);
        self.ranks_left -= 1;
        self.fuller_left -= usize::from(level.target > self.least);
        self.levels.push(level);
    }

    fn give_back(&mut self, level: &mut Level) {
        if level.chosen {
            self.left.iter_mut().zip(&level.taken).for_each(|(left, taken)| *left += taken);
            self.ranks_left += 1;
            self.fuller_left += usize::from(level.target > self.least);
        }
    }

    /// Sets the rank's next choice of groups, in lexicographic order from the most of the largest on; false if there is
    /// none, `None` if the steps are used up. Every choice has the largest group that is left, since some rank has it.
    fn choose(&mut self, level: &mut Level) -> Option<bool> {
        let Self { sizes, left, steps, .. } = self;
        let taken = &mut level.taken;
        let (first, mut at, mut rest) = (left.iter().position(|&left| left > 0)?, sizes.len(), 0);
        // The sums of the groups of this size and of smaller ones: they are multiples of a number, up to another.
        let mut sums = vec![(0_u32, 0_u64); sizes.len() + 1];
        for size in (first..sizes.len()).rev() {
            let (divisor, most) = sums[size + 1];
            let more = u64::from(sizes[size]) * u64::from(left[size]);
            sums[size] = if more == 0 { (divisor, most) } else { (gcd(sizes[size], divisor), most + more) };
        }
        *steps = steps.checked_sub(sums.len())?;
        let mut back = std::mem::replace(&mut level.chosen, false);
        if !back {
            (at, rest) = (first, level.target);
        }
        loop {
            if back {
                let Some(last) = (first..at).rev().find(|&size| taken[size] > 0) else { return Some(false) };
                *steps = steps.checked_sub(at - last)?;
                taken[last] -= 1;
                (at, rest) = (last + 1, rest + sizes[last]);
            }
            while rest > 0 && u64::from(rest) <= sums[at].1 && rest.is_multiple_of(sums[at].0) {
                *steps = steps.checked_sub(1)?;
                taken[at] = left[at].min(rest / sizes[at]);
                rest -= taken[at] * sizes[at];
                at += 1;
            }
            if taken[first] == 0 {
                taken.fill(0);
                return Some(false);
            }
            back = rest > 0;
            if !back {
                level.chosen = true;
                return Some(true);
            }
        }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
