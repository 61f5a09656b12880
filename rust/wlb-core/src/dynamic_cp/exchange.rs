//! A step of several columns made faster: documents change places between groups.

use crate::error::Result;

use super::by_column::{ByColumn, Clock};
use super::cost::Load;
use super::division::{Division, Place};

/// A gain below this part of a step does not count.
const GAIN: f64 = 1e-6;
/// A step is left as it is once it takes so little more than if every micro-batch took what it should.
const CLOSE: f64 = 1.0 + 1.0 / 1024.0;
/// Groups that take least for what they should, of which the slowest of a micro-batch looks for a partner.
const PARTNERS: usize = 4;
/// Slowest groups that are looked at before no exchange is said to be left.
const ATTEMPTS: usize = 16;

/// One document given for at most one.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    giver: usize,
    partner: usize,
    given: u32,
    taken: Option<u32>,
}

/// Lets documents change places while the step gets faster; gives its seconds.
///
/// Where a micro-batch takes longer than it should in a column, and the step waits for that, its slowest group there
/// gives a document for at most one to one of those that take least. For each partner, the exchange that makes the step
/// shortest if its critical paths stay what they are is tried. This ends where the step is hardly longer than it should
/// be, where the slowest groups have no such exchange, or as `looks` says.
///
/// # Arguments
/// * `targets` - column by column, what each micro-batch should take.
/// * `looks` - exchanges that are looked at, at most; a step that is tried counts as one for every op.
pub(super) fn exchange(
    division: &mut Division<'_>,
    by_column: &ByColumn,
    targets: &[Vec<f64>],
    clock: &mut Clock<'_>,
    mut looks: usize,
) -> Result<f64> {
    let mut slowest = division.slowest();
    let mut best = clock.seconds(&slowest)?;
    let close = clock.seconds(targets)? * CLOSE;
    let mut slopes = vec![Vec::new(); slowest.len()];
    let ops = clock.pipeline.num_ops() * slowest.len();
    'search: while best > close {
        clock.slopes(&slowest, &mut slopes);
        for (column, micro_batch) in lacking(&slowest, targets, &slopes).into_iter().take(ATTEMPTS) {
            let mut tries =
                Look { division: &*division, by_column, slowest: &slowest, slopes: &slopes, looks: &mut looks }
                    .best_of(column, micro_batch, targets);
            tries.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (gain, tried) in tries {
                if gain > -GAIN * best || looks < ops {
                    break;
                }
                looks -= ops;
                let before = division.clone_of(&[tried.giver, tried.partner]);
                division.apply(&tried);
                let now = division.slowest_with(&slowest, &[tried.giver, tried.partner]);
                let seconds = clock.seconds(&now)?;
                if seconds < best * (1.0 - GAIN) {
                    (best, slowest) = (seconds, now);
                    continue 'search;
                }
                division.restore(before);
            }
            if looks < ops {
                break;
            }
        }
        break;
    }
    Ok(best)
}

/// Micro-batches that take longer than they should in a column, those first that the step waits for longest.
fn lacking(slowest: &[Vec<f64>], targets: &[Vec<f64>], slopes: &[Vec<f64>]) -> Vec<(usize, usize)> {
    let mut lacking = Vec::new();
    for (column, ((slowest, targets), slopes)) in slowest.iter().zip(targets).zip(slopes).enumerate() {
        for (j, ((slowest, target), slope)) in slowest.iter().zip(targets).zip(slopes).enumerate() {
            let late = (slowest - target) * slope;
            if late > 0.0 {
                lacking.push((late, column, j));
            }
        }
    }
    lacking.sort_by(|a, b| b.0.total_cmp(&a.0));
    lacking.into_iter().map(|(_, column, j)| (column, j)).collect()
}

struct Look<'a, 'b> {
    division: &'a Division<'b>,
    by_column: &'a ByColumn,
    slowest: &'a [Vec<f64>],
    slopes: &'a [Vec<f64>],
    looks: &'a mut usize,
}

impl Look<'_, '_> {
    /// For each of some partners of the slowest group of a micro-batch in a column the exchange after which the step is
    /// shortest, by its slopes, and by how much longer it is then.
    fn best_of(&mut self, column: usize, micro_batch: usize, targets: &[Vec<f64>]) -> Vec<(f64, Exchange)> {
        let Division { groups, offsets, .. } = self.division;
        let columns = self.by_column.columns();
        let seconds = |group: usize| self.division.seconds[group * columns + column];
        let inside = offsets[micro_batch]..offsets[micro_batch + 1];
        let Some(giver) = inside.reduce(|a, b| if seconds(b) > seconds(a) { b } else { a }) else { return Vec::new() };
        let over = |group: usize| seconds(group) - targets[column][groups[group].micro_batch as usize];
        let mut partners: Vec<(f64, usize)> =
            (0..groups.len()).filter(|&group| group != giver).map(|group| (over(group), group)).collect();
        let lightest = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if partners.len() > PARTNERS {
            partners.select_nth_unstable_by(PARTNERS, lightest);
            partners.truncate(PARTNERS);
        }
        partners.sort_unstable_by(lightest);
        partners.into_iter().filter_map(|(_, partner)| self.with(column, giver, partner)).collect()
    }

    /// The best exchange with one partner.
    fn with(&mut self, column: usize, giver: usize, partner: usize) -> Option<(f64, Exchange)> {
        let columns = self.by_column.columns();
        let places = [giver, partner].map(|group| self.division.groups[group]);
        // What the others of their micro-batches take at least.
        let others: Vec<[f64; 2]> = (0..columns)
            .map(|column| {
                places.map(|place| {
                    let j = place.micro_batch as usize;
                    let groups = self.division.offsets[j]..self.division.offsets[j + 1];
                    let others = groups.filter(|&group| group != giver && group != partner);
                    others.map(|group| self.division.seconds[group * columns + column]).fold(0.0, f64::max)
                })
            })
            .collect();
        let (mut found, mut least) = (None, 0.0);
        for &given in &self.division.documents[giver] {
            let work = self.by_column.row(given)[column].work();
            let back = self.division.documents[partner].iter().map(|&taken| Some(taken)).chain([None]);
            for taken in back {
                if *self.looks == 0 {
                    return found;
                }
                *self.looks -= 1;
                // Less has to come back.
                if taken.is_some_and(|taken| self.by_column.row(taken)[column].work() >= work) {
                    continue;
                }
                let exchange = Exchange { giver, partner, given, taken };
                if let Some(gain) = self.longer(&exchange, places, &others)
                    && gain < least
                {
                    (found, least) = (Some((gain, exchange)), gain);
                }
            }
        }
        found
    }

    /// By how much the step is longer after an exchange if its critical paths stay what they are; it is at least that.
    /// `None` if there is no memory for it.
    #[inline]
    fn longer(&self, exchange: &Exchange, places: [Place; 2], others: &[[f64; 2]]) -> Option<f64> {
        let &Exchange { giver, partner, given, taken } = exchange;
        let (by_column, columns) = (self.by_column, others.len());
        let (out, back) = (by_column.row(given), taken.map(|taken| by_column.row(taken)));
        let [a, b] = places.map(|place| place.micro_batch as usize);
        let mut longer = 0.0;
        for (column, others) in others.iter().enumerate() {
            let come = back.map_or(Load::default(), |back| back[column]);
            let after = [
                self.division.loads[giver * columns + column] + come - out[column],
                self.division.loads[partner * columns + column] + out[column] - come,
            ];
            let [mine, theirs] = [0, 1].map(|side| {
                let Place { first_rank, cp_size, .. } = places[side];
                by_column.seconds(column, first_rank, &after[side], cp_size as usize).max(others[side])
            });
            if column == 0 {
                let memory = by_column.last();
                if !(0..2).all(|side| memory.fits(&after[side], places[side].cp_size as usize)) {
                    return None;
                }
            }
            let (slowest, slopes) = (&self.slowest[column], &self.slopes[column]);
            longer += if a == b {
                slopes[a] * (mine.max(theirs) - slowest[a])
            } else {
                slopes[a] * (mine - slowest[a]) + slopes[b] * (theirs - slowest[b])
            };
        }
        Some(longer)
    }
}

/// Some groups as they were.
struct Before {
    groups: Vec<(usize, Vec<u32>)>,
}

impl Division<'_> {
    fn clone_of(&self, groups: &[usize]) -> Before {
        Before { groups: groups.iter().map(|&group| (group, self.documents[group].clone())).collect() }
    }

    fn restore(&mut self, before: Before) {
        for (group, documents) in before.groups {
            self.documents[group] = documents;
            self.sum(group);
        }
    }

    fn apply(&mut self, exchange: &Exchange) {
        let &Exchange { giver, partner, given, taken } = exchange;
        self.documents[giver].retain(|&document| document != given);
        self.documents[giver].extend(taken);
        self.documents[partner].retain(|&document| Some(document) != taken);
        self.documents[partner].push(given);
        self.sum(giver);
        self.sum(partner);
    }

    /// What the slowest group of each micro-batch takes, where only those of these groups are other.
    fn slowest_with(&self, slowest: &[Vec<f64>], groups: &[usize]) -> Vec<Vec<f64>> {
        let mut now = slowest.to_vec();
        for j in groups.iter().map(|&group| self.groups[group].micro_batch as usize) {
            now.iter_mut().enumerate().for_each(|(column, slowest)| slowest[j] = self.slowest_of(j, column));
        }
        now
    }
}
