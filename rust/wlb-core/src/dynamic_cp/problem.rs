//! The planning problem: the data that do not depend on the number of micro-batches.

use crate::limits::MAX_TOKENS;
use crate::longest_first::longest_first;

use super::cost::{Costs, GroupCost, Load};
use super::options::{DynamicCpOptions, GroupSizes};

/// A document as the solver sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Document {
    pub(super) index: u32,
    pub(super) load: Load,
}

/// Value of [`Problem::gain`] for a problem whose targets assume free exchange.
const AS_IF_FREE: f64 = 1.0;

/// The data that do not depend on the number of micro-batches.
pub(super) struct Problem {
    /// Costliest first; equal costs longest first, then in arrival order.
    pub(super) documents: Vec<Document>,
    /// Indices of the documents, longest first, if that is another order.
    pub(super) by_tokens: Option<Vec<u32>>,
    /// Least speed-up for which the ranks of a document are doubled when no group meets its target.
    pub(super) gain: f64,
    pub(super) total_work: f64,
    pub(super) cost: GroupCost,
    pub(super) world_size: usize,
    pub(super) group_sizes: GroupSizes,
    /// The only allowed sizes of groups, ascending from 1 up to the largest; `None`: all sizes of `group_sizes`.
    only: Option<Vec<usize>>,
    pub(super) largest_group: usize,
    pub(super) max_tokens_per_rank: i64,
    /// Most documents of a group.
    max_documents: u32,
}

impl Problem {
    pub(super) fn new(
        lengths: &[i32],
        costs: Costs<'_>,
        cost: GroupCost,
        options: &DynamicCpOptions,
        largest_group: usize,
    ) -> Self {
        let mut documents: Vec<Document> = longest_first(lengths)
            .map(|(length, index)| Document { index: index as u32, load: costs.load(index, length) })
            .collect();
        let by_tokens = matches!(costs, Costs::Given { .. }).then(|| {
            documents.sort_by(|a, b| b.load.work().total_cmp(&a.load.work()));
            let mut order: Vec<u32> = (0..documents.len() as u32).collect();
            order.sort_by_key(|&place| std::cmp::Reverse(documents[place as usize].load.tokens));
            order
        });
        let total_work = documents.iter().map(|document| document.load.work()).sum();
        let &DynamicCpOptions { world_size, group_sizes, max_tokens_per_rank, .. } = options;
        let max_tokens_per_rank = i64::from(max_tokens_per_rank);
        let max_documents = options.max_documents.and_then(|most| u32::try_from(most).ok()).unwrap_or(u32::MAX);
        Self {
            documents,
            by_tokens,
            gain: AS_IF_FREE,
            total_work,
            cost,
            world_size,
            group_sizes,
            only: options
                .only_sizes
                .as_ref()
                .map(|sizes| sizes.iter().copied().take_while(|&size| size <= largest_group).collect()),
            largest_group,
            max_tokens_per_rank,
            max_documents,
        }
    }

    /// The problem with another gain.
    pub(super) fn with_gain(&self, gain: f64) -> Self {
        let (documents, by_tokens) = (self.documents.clone(), self.by_tokens.clone());
        Self { documents, by_tokens, gain, only: self.only.clone(), ..*self }
    }

    /// At least `documents` documents, evenly from the costliest to the cheapest, on as small a part of the ranks: at
    /// least `ranks`, and as many as any document needs. `None` if exchange is free, or if that is more than half.
    pub(super) fn sample(&self, documents: usize, ranks: usize) -> Option<Self> {
        let largest = |parts: usize| {
            let ranks = self.largest_group.min(self.world_size / parts);
            match self.group_sizes {
                GroupSizes::PowersOfTwo => 1 << ranks.ilog2(),
                GroupSizes::Any => self.only().map_or(ranks, |sizes| at_most(sizes, ranks)),
            }
        };
        // A power of two that divides the ranks: nodes stay whole.
        let most = (self.documents.len() / documents).min(self.world_size / ranks).checked_ilog2()?;
        let most = most.min(self.world_size.trailing_zeros());
        let needed = self.documents.iter().map(|document| self.smallest(&document.load)).max()?;
        let parts = (1..=most).rev().map(|bits| 1 << bits).find(|&parts| needed <= largest(parts))?;
        if self.cost.is_free() {
            return None;
        }
        let first = parts / 2;
        let documents: Vec<Document> = self.documents.iter().skip(first).step_by(parts).copied().collect();
        let is_in = |&place: &u32| place as usize % parts == first;
        let places = |order: &Vec<u32>| order.iter().copied().filter(is_in).map(|place| place / parts as u32).collect();
        Some(Self {
            by_tokens: self.by_tokens.as_ref().map(places),
            total_work: documents.iter().map(|document| document.load.work()).sum(),
            documents,
            world_size: self.world_size / parts,
            only: self.only.clone(),
            largest_group: largest(parts),
            ..*self
        })
    }

    /// The only sizes that groups may have, ascending from 1, if not all.
    pub(super) fn only(&self) -> Option<&[usize]> {
        self.only.as_deref()
    }

    /// Whether a group may have this number of ranks.
    pub(super) fn is_size(&self, ranks: usize) -> bool {
        self.only().is_none_or(|sizes| sizes.binary_search(&ranks).is_ok())
    }

    /// The least allowed size of at least this many ranks; more than the largest if there is none.
    fn size_from(&self, ranks: usize) -> usize {
        let found = |sizes: &[usize]| sizes.get(sizes.partition_point(|&size| size < ranks)).copied();
        self.only().map_or(ranks, |sizes| found(sizes).unwrap_or(ranks.max(self.largest_group + 1)))
    }

    /// The sizes in the list from `least` to `most`.
    fn only_between(sizes: &[usize], least: usize, most: usize) -> impl Iterator<Item = usize> {
        sizes.iter().copied().filter(move |size| (least..=most).contains(size))
    }

    /// Whether a document that costs more is always longer.
    pub(super) fn is_by_length(&self) -> bool {
        self.by_tokens.is_none()
    }

    /// Time of the heaviest document on the largest group, relative to all work spread evenly.
    pub(super) fn heaviest(&self) -> f64 {
        let work = self.documents.first().map_or(0.0, |document| document.load.work());
        if work > 0.0 { work * self.world_size as f64 / (self.largest_group as f64 * self.total_work) } else { 0.0 }
    }

    /// Seconds of documents on groups where they are nearly as fast as possible, costliest first. Of documents that fit
    /// side by side, only the longest is listed.
    pub(super) fn longest(&self) -> impl Iterator<Item = f64> {
        let largest = self.largest_group;
        let alone = move |document: &Document| match self.gain {
            AS_IF_FREE => (largest, document.load.on(largest as f64)),
            _ => self.fastest(&document.load),
        };
        let mut documents = self.documents.iter().map(alone).peekable();
        std::iter::from_fn(move || {
            let (mut ranks, mut longest) = (0, None);
            while let Some((size, seconds)) = documents.next_if(|(size, _)| ranks + size <= self.world_size) {
                ranks += size;
                longest = Some(longest.map_or(seconds, |longest: f64| longest.max(seconds)));
            }
            longest
        })
    }

    /// The group for a document that no group makes fast enough, and its seconds there without the constant of every
    /// micro-batch. It is the smallest group that doubling does not speed up enough: larger groups exchange more than
    /// they save.
    pub(super) fn fastest(&self, load: &Load) -> (usize, f64) {
        let constant = self.cost.micro_batch_seconds;
        let seconds = |size: usize| self.cost.seconds(load, size) - constant;
        let mut sizes = self.growing(load, |size| 2 * size).map(|size| (size, seconds(size)));
        let mut best = sizes.next().unwrap_or((self.largest_group, 0.0));
        for next in sizes {
            if next.1 * self.gain > best.1 {
                break;
            }
            best = next;
        }
        best
    }

    /// The smallest group on which a load fits.
    pub(super) fn smallest(&self, load: &Load) -> usize {
        let ranks = (load.tokens.max(1) as u64).div_ceil(self.max_tokens_per_rank as u64) as usize;
        match self.group_sizes {
            GroupSizes::PowersOfTwo => ranks.next_power_of_two(),
            GroupSizes::Any => self.size_from(ranks),
        }
    }

    /// Sizes of groups from the smallest on which a load fits up to the largest; `grown` gives the next size.
    fn growing(&self, load: &Load, grown: impl Fn(usize) -> usize) -> impl Iterator<Item = usize> {
        let largest = self.largest_group;
        let grow = move |size: usize| self.size_from(grown(size).min(largest)).min(largest);
        let next = move |&size: &usize| Some(grow(size)).filter(|_| size < largest);
        std::iter::successors(Some(self.smallest(load)).filter(|&size| size <= largest), next)
    }

    /// Sizes of groups that are tried for a load: all powers of two, or, if any size is allowed, enough sizes.
    pub(super) fn sizes_for(&self, load: &Load) -> impl Iterator<Item = usize> {
        let (any, few) = (self.group_sizes == GroupSizes::Any, self.only.is_some());
        self.growing(load, move |size| match (any, few) {
            (true, true) => size + 1,
            (true, false) => size + size.div_ceil(4),
            (false, _) => 2 * size,
        })
    }

    /// Sizes of blocks to try: powers of two, and one between each two of them if groups may have any size.
    pub(super) fn base_sizes(&self) -> Vec<usize> {
        let largest = self.largest_group;
        if let Some(sizes) = self.only() {
            return sizes.to_vec();
        }
        let powers = (0..=largest.ilog2()).map(|bit| 1 << bit);
        match self.group_sizes {
            GroupSizes::PowersOfTwo => powers.collect(),
            GroupSizes::Any => {
                let mut sizes: Vec<usize> = powers.flat_map(|size| [size, size + size / 2]).collect();
                sizes.retain(|&size| size < largest);
                sizes.push(largest);
                sizes.dedup();
                sizes
            }
        }
    }

    /// Sizes that give a micro-batch one block, two, three and so on, up to one for each document; descending.
    pub(super) fn plain_sizes(&self) -> Vec<usize> {
        let size = |blocks: usize| match self.group_sizes {
            GroupSizes::PowersOfTwo => 1 << (self.world_size / blocks).ilog2(),
            GroupSizes::Any => {
                let ranks = self.world_size / blocks;
                self.only().map_or(ranks, |sizes| at_most(sizes, ranks))
            }
        };
        let most = self.world_size.min(self.documents.len().max(1));
        let mut sizes: Vec<usize> = (1..=most).map(size).filter(|&size| size <= self.largest_group).collect();
        sizes.dedup();
        sizes
    }

    /// The smallest group from `least` to `most` ranks on which a load fits and takes at most `seconds`.
    ///
    /// # Complexity
    /// O(log world_size).
    pub(super) fn smallest_in_time(&self, load: &Load, least: usize, most: usize, seconds: f64) -> Option<usize> {
        let in_time = |size: usize| self.cost.seconds(load, size) <= seconds;
        let least = least.max(self.smallest(load));
        match self.group_sizes {
            GroupSizes::PowersOfTwo => std::iter::successors(Some(least), |size| Some(2 * size))
                .take_while(|&size| size <= most)
                .find(|&size| in_time(size)),
            GroupSizes::Any if let Some(sizes) = self.only() => {
                Self::only_between(sizes, least, most).find(|&size| in_time(size))
            }
            // Time falls up to the fastest group, so the first size in time is found by binary search.
            GroupSizes::Any => self.pieces(least, most).into_iter().flatten().find_map(|(least, most)| {
                let best = self.quickest(load, least, most);
                in_time(best).then(|| first_that(least, best, in_time))
            }),
        }
    }

    /// The least seconds of a micro-batch with this load on any group from `least` to `most` ranks on which it fits;
    /// infinite if there is none.
    ///
    /// # Complexity
    /// O(log world_size).
    pub(super) fn least_seconds(&self, load: &Load, least: usize, most: usize) -> f64 {
        let least = least.max(self.smallest(load));
        let on = |size: usize| self.cost.seconds(load, size);
        match self.group_sizes {
            GroupSizes::PowersOfTwo => {
                let sizes = std::iter::successors(Some(least), |size| Some(2 * size));
                sizes.take_while(|&size| size <= most).map(on).fold(f64::INFINITY, f64::min)
            }
            GroupSizes::Any if let Some(sizes) = self.only() => {
                Self::only_between(sizes, least, most).map(on).fold(f64::INFINITY, f64::min)
            }
            GroupSizes::Any => {
                let pieces = self.pieces(least, most).into_iter().flatten();
                pieces.map(|(least, most)| on(self.quickest(load, least, most))).fold(f64::INFINITY, f64::min)
            }
        }
    }

    /// The range of sizes inside a node, and the range beyond; each has one price of exchange.
    fn pieces(&self, least: usize, most: usize) -> [Option<(usize, usize)>; 2] {
        let node = self.cost.ranks_of_node();
        let inside = (least, most.min(node));
        let across = (least.max(node.saturating_add(1)), most);
        [inside, across].map(|(least, most)| (least <= most).then_some((least, most)))
    }

    /// The group size, among sizes with one price of exchange, on which a load takes the least time. The time is the
    /// larger of two functions of the ranks `c`: work over ranks, which falls; and work with exchange,
    /// `a / c + b c + d` with `b >= 0`, which first falls and then rises, or only rises. So the time first falls and
    /// then rises.
    fn quickest(&self, load: &Load, least: usize, most: usize) -> usize {
        first_that(least, most, |size| self.cost.seconds(load, size + 1) >= self.cost.seconds(load, size))
    }

    /// Size of the first part of a block that is cut in two: the middle, or the node boundary nearest to it; if only
    /// some sizes are allowed, the nearest for which both parts have one. `None` if there is none.
    pub(super) fn half(&self, first: usize, size: usize) -> Option<usize> {
        let middle = self.middle(first, size);
        let Some(sizes) = self.only() else { return Some(middle) };
        let both = sizes.iter().copied().filter(|&part| part < size && self.is_size(size - part));
        both.min_by_key(|part| part.abs_diff(middle))
    }

    fn middle(&self, first: usize, size: usize) -> usize {
        let node = self.cost.ranks_of_node();
        let middle = first + size / 2;
        let boundary = middle - middle % node;
        if first / node == (first + size - 1) / node {
            size / 2
        } else if boundary > first {
            boundary - first
        } else {
            boundary + node - first
        }
    }

    /// Number of ranks inside which groups are placed: a node, or all ranks if powers of two are aligned to nodes
    /// anyway.
    pub(super) fn node(&self) -> usize {
        let node = self.cost.ranks_of_node();
        if self.group_sizes == GroupSizes::Any || node.is_power_of_two() { node } else { usize::MAX }
    }

    /// Whether a load fits on a group: no rank gets too many tokens (ranks differ by at most one), int32 `cu_seqlens`
    /// can count the group's tokens, and it has no more documents than allowed.
    #[inline]
    pub(super) fn fits(&self, load: &Load, cp_size: usize) -> bool {
        load.tokens <= self.capacity(cp_size) && load.documents <= self.max_documents
    }

    /// Whether a group with this load can take no further document, however short.
    #[inline]
    pub(super) fn is_full(&self, load: &Load) -> bool {
        load.documents >= self.max_documents
    }

    /// Whether the limit on documents of a group can matter.
    pub(super) fn counts_documents(&self) -> bool {
        self.documents.len() > self.max_documents as usize
    }

    fn capacity(&self, cp_size: usize) -> i64 {
        (cp_size as i64 * self.max_tokens_per_rank).min(MAX_TOKENS)
    }

    /// Tokens that a group with this load can still take; negative if it can take no document.
    pub(super) fn room(&self, load: &Load, cp_size: usize) -> i64 {
        if self.is_full(load) { -1 } else { self.capacity(cp_size) - load.tokens }
    }

    /// Least seconds of each micro-batch: the constant, or a document that is more than a fair share of all work even
    /// on the largest group. The longest such document is in the micro-batch with the largest part of the shape, and so
    /// on.
    pub(super) fn floors(&self, shape: &[f64], work: f64) -> Vec<f64> {
        let mut fullest_first: Vec<usize> = (0..shape.len()).collect();
        fullest_first.sort_by(|&a, &b| shape[b].total_cmp(&shape[a]));
        let share = work / shape.len() as f64;
        let mut floors = vec![self.cost.micro_batch_seconds; shape.len()];
        for (seconds, &j) in self.longest().zip(&fullest_first) {
            if seconds <= share {
                break;
            }
            floors[j] += seconds;
        }
        floors
    }

    /// The part of the shape, scaled to the total work, that lies above each floor.
    pub(super) fn above(&self, floors: &[f64], shape: &[f64], mut work: f64) -> Vec<f64> {
        let constant = self.cost.micro_batch_seconds;
        let mut left: f64 = shape.iter().sum();
        // A floor above the level lowers the level for all others. Floors are visited highest first, relative to the
        // shape.
        let mut heights: Vec<(f64, f64)> =
            floors.iter().zip(shape).map(|(floor, size)| ((floor - constant) / size, *size)).collect();
        heights.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (height, size) in heights {
            if height <= work / left || left <= size {
                break;
            }
            work = (work - height * size).max(0.0);
            left -= size;
        }
        let level = work / left;
        floors.iter().zip(shape).map(|(floor, size)| (size * level - (floor - constant)).max(0.0)).collect()
    }
}

/// The first number from `least` on for which `holds` is true; it must then be true for all larger numbers. `most` if
/// it is true for none before.
fn first_that(mut least: usize, mut most: usize, holds: impl Fn(usize) -> bool) -> usize {
    while least < most {
        let middle = least + (most - least) / 2;
        if holds(middle) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    least
}

/// The largest of these sizes (ascending from 1) that is at most `ranks`.
pub(super) fn at_most(sizes: &[usize], ranks: usize) -> usize {
    sizes.iter().copied().take_while(|&size| size <= ranks).last().unwrap_or(1)
}
