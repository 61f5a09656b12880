//! The first of many groups that can take a document, while groups fill up and new ones open.

use super::cost::Load;
use super::problem::Problem;

/// Children of a node.
const CHILDREN: usize = 8;
/// Relative rounding error of seconds.
const ROUNDING: f64 = 1e-12;

/// What a group can still take, or what a document needs there.
#[derive(Clone, Copy)]
struct Spare {
    tokens: i64,
    /// Seconds, in both sums of [`GroupCost::more`](super::cost::GroupCost::more).
    seconds: [f64; 2],
}

impl Spare {
    #[inline]
    fn holds(&self, need: &Self) -> bool {
        self.tokens >= need.tokens && self.seconds[0] >= need.seconds[0] && self.seconds[1] >= need.seconds[1]
    }

    #[inline]
    fn most(self, other: Self) -> Self {
        let seconds = [0, 1].map(|sum: usize| self.seconds[sum].max(other.seconds[sum]));
        Self { tokens: self.tokens.max(other.tokens), seconds }
    }
}

/// Groups of one size.
struct OfSize {
    cp_size: usize,
    /// Numbers of the groups, ascending.
    groups: Vec<u32>,
    /// A tree: what each group can still take; on each level above, the most that any of [`CHILDREN`] nodes can take,
    /// up to one node for all groups.
    levels: Vec<Vec<Spare>>,
}

impl OfSize {
    fn set(&mut self, place: usize, spare: Spare) {
        let (mut at, mut spare) = (place, spare);
        for level in 0.. {
            if level == self.levels.len() {
                self.levels.push(Vec::new());
            }
            let nodes = &mut self.levels[level];
            if at == nodes.len() {
                nodes.push(spare);
            } else {
                nodes[at] = spare;
            }
            if nodes.len() == 1 {
                return;
            }
            at /= CHILDREN;
            let children = &nodes[at * CHILDREN..nodes.len().min((at + 1) * CHILDREN)];
            spare = children.iter().copied().reduce(Spare::most).unwrap_or(spare);
        }
    }

    /// What `take` returns for the first group for which it returns something, among groups that may hold the need.
    fn first<T>(&self, level: usize, above: usize, need: &Spare, take: &mut impl FnMut(u32) -> Option<T>) -> Option<T> {
        let nodes = &self.levels[level];
        let mut children = above * CHILDREN..nodes.len().min((above + 1) * CHILDREN);
        children.find_map(|at| match level {
            _ if !nodes[at].holds(need) => None,
            0 => take(self.groups[at]),
            _ => self.first(level - 1, at, need, take),
        })
    }
}

/// Groups that may take at most some seconds, numbered in the order in which they opened.
///
/// # Complexity
/// For every query and change, a logarithm of the number of groups for each size; more if many groups have time but no
/// room, or room but no time.
pub(super) struct FirstFit<'a> {
    problem: &'a Problem,
    seconds: f64,
    /// By their first groups.
    sizes: Vec<OfSize>,
    /// For each group, the index of its size and its place among the groups of that size.
    places: Vec<(u32, u32)>,
}

impl<'a> FirstFit<'a> {
    pub(super) fn new(problem: &'a Problem, seconds: f64) -> Self {
        Self { problem, seconds, sizes: Vec::new(), places: Vec::new() }
    }

    /// What `take` returns for the first group for which it returns something. It is asked only for groups in which the
    /// document finds room and time, up to rounding.
    pub(super) fn first<T>(&self, document: &Load, mut take: impl FnMut(usize) -> Option<T>) -> Option<T> {
        let mut found: Option<(u32, T)> = None;
        for size in &self.sizes {
            let before = found.as_ref().map_or(u32::MAX, |&(group, _)| group);
            if size.groups[0] > before {
                break;
            }
            let need = Spare { tokens: document.tokens, seconds: self.problem.cost.more(document, size.cp_size) };
            // A group behind the one that was found ends the search.
            let mut take = |group: u32| match group > before {
                true => Some(None),
                false => take(group as usize).map(|taken| Some((group, taken))),
            };
            found = size.first(size.levels.len() - 1, 0, &need, &mut take).flatten().or(found);
        }
        found.map(|(_, taken)| taken)
    }

    /// Opens the next group.
    pub(super) fn open(&mut self, load: &Load, cp_size: usize) {
        let group = self.places.len() as u32;
        let size = self.sizes.iter().position(|size| size.cp_size == cp_size).unwrap_or_else(|| {
            self.sizes.push(OfSize { cp_size, groups: Vec::new(), levels: Vec::new() });
            self.sizes.len() - 1
        });
        self.places.push((size as u32, self.sizes[size].groups.len() as u32));
        self.sizes[size].groups.push(group);
        self.set(group as usize, load);
    }

    /// Sets the load of a group.
    pub(super) fn set(&mut self, group: usize, load: &Load) {
        let (size, place) = self.places[group];
        let size = &mut self.sizes[size as usize];
        let (cost, cp_size) = (&self.problem.cost, size.cp_size);
        let latency = if load.tokens == 0 { 0.0 } else { cost.latency(cp_size) };
        let [computing, exchanging] = cost.more(load, cp_size);
        let most = self.seconds * (1.0 + ROUNDING) - cost.micro_batch_seconds;
        let spare = Spare {
            tokens: self.problem.room(load, cp_size),
            seconds: [most - computing, most - latency - exchanging],
        };
        size.set(place as usize, spare);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod tests {
    use proptest::prelude::*;

    use super::FirstFit;
    use crate::cost::{CostModel, Mask};
    use crate::dynamic_cp::cost::{Costs, Exchange, GroupCost, Load, Node};
    use crate::dynamic_cp::options::DynamicCpOptions;
    use crate::dynamic_cp::problem::Problem;

    proptest! {
        /// The first group with time and room is that of a search one by one, and few groups are asked in vain.
        #[test]
        fn the_first_is_that_of_a_search_one_by_one(
            lengths in proptest::collection::vec(1_i32..400, 1..200),
            sizes in proptest::collection::vec(0_u32..4, 200),
            (per_token, per_exchange, overlap) in (0.0_f64..3.0, prop_oneof![Just(0.0), 0.0_f64..30.0], 0.0_f64..=1.0),
            (node, constant, seconds) in (any::<bool>(), prop_oneof![Just(0.0), Just(7.0)], 50.0_f64..2000.0),
            max_documents in proptest::option::of(1_usize..9),
            sorted in any::<bool>(),
        ) {
            let mut lengths = lengths;
            if sorted {
                lengths.sort_unstable_by_key(|&length| std::cmp::Reverse(length));
            }
            let options = DynamicCpOptions { max_documents, ..DynamicCpOptions::new(8, 1, 100) };
            let exchange = Exchange { seconds_per_exchange: per_exchange, seconds_per_token: per_token, overlap };
            let inside = Node { ranks: 4, seconds_per_exchange: per_exchange / 2.0, seconds_per_token: per_token / 3.0 };
            let cost = GroupCost {
                exchange,
                node: node.then_some(inside),
                micro_batch_seconds: constant,
                document_seconds: constant,
            };
            let model = CostModel::analytic(0.01, 1.0, Mask::Causal).unwrap();
            let costs = Costs::Model(&model);
            let problem = Problem::new(&lengths, costs, cost, &options, 8);
            let mut open = FirstFit::new(&problem, seconds);
            let mut groups: Vec<(Load, usize)> = Vec::new();
            for (index, &length) in lengths.iter().enumerate() {
                let load = costs.load(index, length);
                let takes = |group: usize| {
                    let (load, cp_size) = (groups[group].0 + load, groups[group].1);
                    let is_right = problem.fits(&load, cp_size) && problem.cost.seconds(&load, cp_size) <= seconds;
                    is_right.then_some((group, load))
                };
                let expected = (0..groups.len()).find_map(takes);
                let mut asked = 0;
                let found = open.first(&load, |group| {
                    asked += 1;
                    takes(group)
                });
                prop_assert_eq!(found, expected);
                // Asked are only groups in which it fits, one for each size at most.
                prop_assert!(asked <= 4, "{asked} were asked");
                match found {
                    Some((group, load)) => {
                        groups[group].0 = load;
                        open.set(group, &load);
                    }
                    None => {
                        groups.push((load, 1 << sizes[index]));
                        open.open(&load, 1 << sizes[index]);
                    }
                }
            }
        }
    }
}
