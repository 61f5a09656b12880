//! Groups of documents that cost several resources: made level in all columns at once, and halved.

use crate::packing::Padding;

use super::by_column::ByColumn;
use super::cost::Load;
use super::options::GroupSizes;
use super::plan::{DynamicCpPlan, Group};
use super::ranks::FreeRanks;

/// Halves, and documents in blocks of their own, may take this much longer than what their micro-batch takes anyway.
const SLACK: f64 = 1.0 + 1.0 / 256.0;
/// What a micro-batch should take at least, of the mean one: of nothing no part is full.
const LEAST: f64 = 1e-6;

/// A group of ranks in a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) micro_batch: u32,
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
}

/// Groups, micro-batch by micro-batch and in the order of their ranks, while documents change places between them.
#[derive(Clone)]
pub(super) struct Division<'a> {
    by_column: &'a ByColumn,
    pub(super) groups: Vec<Place>,
    /// Micro-batch `j` is `groups[offsets[j]..offsets[j + 1]]`.
    pub(super) offsets: Vec<usize>,
    /// Of each group.
    pub(super) documents: Vec<Vec<u32>>,
    /// Group by group, of each column.
    pub(super) loads: Vec<Load>,
    pub(super) seconds: Vec<f64>,
}

impl<'a> Division<'a> {
    /// Of these groups, without documents.
    fn empty(by_column: &'a ByColumn, groups: Vec<Place>, num_micro_batches: usize) -> Self {
        let columns = by_column.columns();
        let ends = |j: usize| groups.partition_point(|group| (group.micro_batch as usize) < j);
        let offsets = (0..=num_micro_batches).map(ends).collect();
        let nothing = Load::default();
        let seconds = |group: &Place| {
            let &Place { first_rank, cp_size, .. } = group;
            (0..columns).map(move |column| by_column.seconds(column, first_rank, &nothing, cp_size as usize))
        };
        let seconds = groups.iter().flat_map(seconds).collect();
        let (documents, loads) = (vec![Vec::new(); groups.len()], vec![nothing; groups.len() * columns]);
        Self { by_column, groups, offsets, documents, loads, seconds }
    }

    /// Of a plan whose documents are named by their indices.
    pub(super) fn of(by_column: &'a ByColumn, plan: &DynamicCpPlan) -> Self {
        let of_micro_batch = |j: usize| {
            plan.groups[plan.groups_of(j)].iter().map(move |&Group { first_rank, cp_size, .. }| Place {
                micro_batch: j as u32,
                first_rank,
                cp_size,
            })
        };
        let groups = (0..plan.num_micro_batches()).flat_map(of_micro_batch).collect();
        let mut division = Self::empty(by_column, groups, plan.num_micro_batches());
        for group in 0..plan.groups.len() {
            let documents = plan.documents[plan.documents_of(group)].iter().map(|&document| document as u32);
            division.documents[group] = documents.collect();
            division.sum(group);
        }
        division
    }

    pub(super) fn num_micro_batches(&self) -> usize {
        self.offsets.len() - 1
    }

    /// What the slowest group of each micro-batch takes, column by column.
    pub(super) fn slowest(&self) -> Vec<Vec<f64>> {
        let of_column = |column: usize| (0..self.num_micro_batches()).map(move |j| self.slowest_of(j, column));
        (0..self.by_column.columns()).map(|column| of_column(column).collect()).collect()
    }

    pub(super) fn slowest_of(&self, micro_batch: usize, column: usize) -> f64 {
        let groups = self.offsets[micro_batch]..self.offsets[micro_batch + 1];
        groups.map(|group| self.seconds[group * self.by_column.columns() + column]).fold(0.0, f64::max)
    }

    /// Tokens of a micro-batch on its fullest rank, padding included.
    pub(super) fn fullest(&self, micro_batch: usize, padding: Option<&Padding>) -> i64 {
        let of_group = |group: usize| {
            let ranks = i64::from(self.groups[group].cp_size);
            let tokens = (self.loads[group * self.by_column.columns()].tokens + ranks - 1) / ranks;
            padding.map_or(tokens, |padding| padding.padded(tokens))
        };
        (self.offsets[micro_batch]..self.offsets[micro_batch + 1]).map(of_group).fold(0, i64::max)
    }

    /// Loads and seconds of a group, summed in the order of its documents' indices.
    pub(super) fn sum(&mut self, group: usize) {
        let (by_column, columns) = (self.by_column, self.by_column.columns());
        let loads = &mut self.loads[group * columns..][..columns];
        loads.fill(Load::default());
        self.documents[group].sort_unstable();
        for &document in &self.documents[group] {
            loads.iter_mut().zip(by_column.row(document)).for_each(|(load, more)| *load = *load + *more);
        }
        let Place { first_rank, cp_size, .. } = self.groups[group];
        for (column, load) in loads.iter().enumerate() {
            self.seconds[group * columns + column] = by_column.seconds(column, first_rank, load, cp_size as usize);
        }
    }

    /// Seconds of each group by one column.
    pub(super) fn of_column(&self, column: usize) -> Vec<Group> {
        let seconds = self.seconds.iter().skip(column).step_by(self.by_column.columns());
        let of =
            |(&Place { first_rank, cp_size, .. }, &seconds): (&Place, &f64)| Group { first_rank, cp_size, seconds };
        self.groups.iter().zip(seconds).map(of).collect()
    }

    /// Documents in blocks of `base` ranks, level in all columns. `None` if one fits nowhere.
    ///
    /// A document that would take longer than a full micro-batch on such a block opens a larger one of its own, where
    /// ranks are left. The others go, by the greatest part that they are of a column's sum, greatest first, each to
    /// where the sum over columns of the fourth powers of how full groups are grows least: nearly the least greatest of
    /// them, and where a document is nothing of a column, by the others.
    ///
    /// # Arguments
    /// * `targets` - column by column, what each micro-batch should take.
    ///
    /// # Complexity
    /// O(documents * groups * columns).
    pub(super) fn level(by_column: &'a ByColumn, targets: &[Vec<f64>], base: usize) -> Option<Self> {
        let (groups, opened) = opened(by_column, targets, base);
        let columns = by_column.columns();
        let mut division = Self::empty(by_column, groups, targets[0].len());
        // Of each group and column: its target, and the fourth power of how full it is, by weight.
        let weighed: Vec<(f64, f64)> = division
            .groups
            .iter()
            .flat_map(|group| {
                targets.iter().map(move |targets| {
                    let mean = targets.iter().sum::<f64>() / targets.len() as f64;
                    let target = targets[group.micro_batch as usize].max(LEAST * mean);
                    // Of a column in which nothing costs anything, nothing counts.
                    if mean > 0.0 { (1.0 / target, target * f64::from(group.cp_size)) } else { (0.0, 0.0) }
                })
            })
            .collect();
        let power = |full: f64| (full * full) * (full * full);
        let mut powers: Vec<f64> =
            weighed.iter().zip(&division.seconds).map(|(weighed, seconds)| power(seconds * weighed.0)).collect();
        let mut placed = vec![false; by_column.order.len()];
        let add = |division: &mut Self, document: u32, group: usize, powers: &mut [f64]| {
            let Place { first_rank, cp_size, .. } = division.groups[group];
            for (column, more) in by_column.row(document).iter().enumerate() {
                let at = group * columns + column;
                division.loads[at] = division.loads[at] + *more;
                let seconds = by_column.seconds(column, first_rank, &division.loads[at], cp_size as usize);
                (division.seconds[at], powers[at]) = (seconds, power(seconds * weighed[at].0));
            }
            division.documents[group].push(document);
        };
        for (document, micro_batch, first_rank) in opened {
            let groups = division.offsets[micro_batch]..division.offsets[micro_batch + 1];
            let group = groups.start
                + division.groups[groups].partition_point(|group| (group.first_rank as usize) < first_rank);
            add(&mut division, document, group, &mut powers);
            placed[document as usize] = true;
        }
        for &document in &by_column.order {
            if placed[document as usize] {
                continue;
            }
            let row = by_column.row(document);
            let tokens = &row[columns - 1];
            let (mut found, mut least) = (None, f64::INFINITY);
            for (group, &Place { first_rank, cp_size, .. }) in division.groups.iter().enumerate() {
                let mut grown = 0.0;
                for (column, more) in row.iter().enumerate() {
                    let at = group * columns + column;
                    let seconds =
                        by_column.seconds(column, first_rank, &(division.loads[at] + *more), cp_size as usize);
                    let (part, weight) = weighed[at];
                    grown += weight * (power(seconds * part) - powers[at]);
                }
                let with = division.loads[group * columns + columns - 1] + *tokens;
                if grown < least && by_column.last().fits(&with, cp_size as usize) {
                    (found, least) = (Some(group), grown);
                }
            }
            add(&mut division, document, found?, &mut powers);
        }
        (0..division.groups.len()).for_each(|group| division.sum(group));
        Some(division)
    }

    /// The same with groups cut in two, and their halves again, while both are done within what their micro-batch takes
    /// anyway in every column.
    ///
    /// # Complexity
    /// O(documents * columns * log world_size).
    pub(super) fn halved(&self) -> Self {
        let by_column = self.by_column;
        let mut rank_of = vec![0_u32; by_column.order.len()];
        by_column.order.iter().zip(0..).for_each(|(&document, place)| rank_of[document as usize] = place);
        let limits: Vec<Vec<f64>> =
            self.slowest().into_iter().map(|column| column.into_iter().map(|most| most * SLACK).collect()).collect();
        let (mut groups, mut documents) = (Vec::new(), Vec::new());
        for (group, inside) in self.groups.iter().zip(&self.documents) {
            let mut inside = inside.clone();
            inside.sort_unstable_by_key(|&document| rank_of[document as usize]);
            let limits: Vec<f64> = limits.iter().map(|column| column[group.micro_batch as usize]).collect();
            halve(by_column, *group, inside, &limits, &mut |group, inside| {
                groups.push(group);
                documents.push(inside);
            });
        }
        let mut halved = Self::empty(by_column, groups, self.num_micro_batches());
        halved.documents = documents;
        (0..halved.groups.len()).for_each(|group| halved.sum(group));
        halved
    }
}

/// Blocks of all micro-batches in the order of their ranks; and documents that open one of their own, each with its
/// micro-batch and the first rank of its block.
fn opened(by_column: &ByColumn, targets: &[Vec<f64>], base: usize) -> (Vec<Place>, Vec<(u32, usize, usize)>) {
    let memory = by_column.last();
    let full: Vec<f64> = targets.iter().map(|targets| targets.iter().copied().fold(0.0, f64::max) * SLACK).collect();
    let mut large: Vec<(usize, u32)> = Vec::new();
    for &document in &by_column.order {
        let size = wanted(by_column, document, base, &full);
        if size > base {
            large.push((size, document));
        }
    }
    // Falling sizes, so that powers of two are aligned.
    large.sort_by_key(|&(size, _)| std::cmp::Reverse(size));
    let num_micro_batches = targets[0].len();
    let world = FreeRanks::new(memory.world_size, memory.node());
    let mut free = vec![world; num_micro_batches];
    let mut used = vec![0; num_micro_batches];
    let (mut opened, mut groups) = (Vec::new(), Vec::new());
    for (size, document) in large {
        let row = by_column.row(document);
        // Where it exceeds the targets least; of those, where most ranks are free.
        let late = |j: usize| {
            let of = |(column, load): (usize, &Load)| {
                (alone(by_column, column, load, size) - targets[column][j] * SLACK).max(0.0)
            };
            row.iter().enumerate().map(of).sum::<f64>()
        };
        let fitting = (0..num_micro_batches).filter(|&j| free[j].most() >= size);
        let least = fitting.min_by(|&a, &b| late(a).total_cmp(&late(b)).then(used[a].cmp(&used[b])).then(a.cmp(&b)));
        let Some((j, first)) = least.and_then(|j| Some((j, free[j].take(size)?))) else { continue };
        used[j] += size;
        groups.push(Place { micro_batch: j as u32, first_rank: first as u32, cp_size: size as u32 });
        opened.push((document, j, first));
    }
    for (j, free) in free.into_iter().enumerate() {
        for (first, size) in free.cut(memory.group_sizes, base, memory.largest_group) {
            groups.push(Place { micro_batch: j as u32, first_rank: first as u32, cp_size: size as u32 });
        }
    }
    groups.sort_unstable_by_key(|group| (group.micro_batch, group.first_rank));
    (groups, opened)
}

/// Seconds of a column on a group of so many ranks, inside a node where it can be.
fn alone(by_column: &ByColumn, column: usize, load: &Load, size: usize) -> f64 {
    by_column.problems[column].cost.seconds(load, size)
}

/// The smallest group from `base` ranks on that a document fits on and is done on in a full micro-batch, in every
/// column; if there is none, the one where it is fastest.
fn wanted(by_column: &ByColumn, document: u32, base: usize, full: &[f64]) -> usize {
    let row = by_column.row(document);
    let (mut fastest, mut least) = (base, f64::INFINITY);
    for size in by_column.last().sizes_for(&row[0]).filter(|&size| size >= base) {
        let seconds = |column: usize| alone(by_column, column, &row[column], size);
        if (0..row.len()).all(|column| seconds(column) <= full[column]) {
            return size;
        }
        let together: f64 = (0..row.len()).map(seconds).sum();
        if together < least {
            (fastest, least) = (size, together);
        }
    }
    fastest
}

/// Gives the groups that a group of documents, by their parts greatest first, is cut into.
fn halve(
    by_column: &ByColumn,
    group: Place,
    documents: Vec<u32>,
    limits: &[f64],
    give: &mut impl FnMut(Place, Vec<u32>),
) {
    match halves(by_column, group, &documents, limits) {
        Some([(left, of_left), (right, of_right)]) => {
            halve(by_column, left, of_left, limits, give);
            halve(by_column, right, of_right, limits, give);
        }
        None => give(group, documents),
    }
}

/// Two groups in the place of one, if both are done within the limits: each document to the half that then is the least
/// full in the column where it is fullest.
fn halves(by_column: &ByColumn, group: Place, documents: &[u32], limits: &[f64]) -> Option<[(Place, Vec<u32>); 2]> {
    let (problem, columns) = (by_column.last(), by_column.columns());
    let size = group.cp_size as usize;
    if size == 1 || documents.len() < 2 {
        return None;
    }
    let first = match problem.group_sizes {
        GroupSizes::PowersOfTwo => size / 2,
        GroupSizes::Any => problem.half(group.first_rank as usize, size),
    };
    let second = group.first_rank + first as u32;
    let places = [
        Place { cp_size: first as u32, ..group },
        Place { first_rank: second, cp_size: (size - first) as u32, ..group },
    ];
    let sizes = [first, size - first];
    let mut all = vec![0.0_f64; columns];
    for &document in documents {
        all.iter_mut().zip(by_column.row(document)).for_each(|(all, load)| *all += load.work());
    }
    let mut loads = [vec![Load::default(); columns], vec![Load::default(); columns]];
    let mut inside = [Vec::new(), Vec::new()];
    for &document in documents {
        let row = by_column.row(document);
        let with = |side: usize, column: usize| loads[side][column] + row[column];
        let fullest = |side: usize| {
            let part = |column: usize| if all[column] > 0.0 { with(side, column).work() / all[column] } else { 0.0 };
            (0..columns).map(part).fold(0.0, f64::max) / sizes[side] as f64
        };
        let mut side = usize::from(fullest(1) < fullest(0));
        if !problem.fits(&with(side, columns - 1), sizes[side]) {
            side = 1 - side;
            if !problem.fits(&with(side, columns - 1), sizes[side]) {
                return None;
            }
        }
        loads[side].iter_mut().zip(row).for_each(|(load, more)| *load = *load + *more);
        inside[side].push(document);
    }
    let in_time = |side: usize| {
        let Place { first_rank, cp_size, .. } = places[side];
        let seconds = |column: usize| by_column.seconds(column, first_rank, &loads[side][column], cp_size as usize);
        !inside[side].is_empty() && (0..columns).all(|column| seconds(column) <= limits[column])
    };
    if !(in_time(0) && in_time(1)) {
        return None;
    }
    let [of_left, of_right] = inside;
    Some([(places[0], of_left), (places[1], of_right)])
}
