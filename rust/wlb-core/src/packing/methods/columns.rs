//! Algorithm 1 for documents whose costs are given, in one column or several.
//!
//! A step takes the sum over columns of the heaviest micro-batch in each column. The *leading* column of a document is
//! the one in which its cost is the greatest part of a mean micro-batch. Documents are placed by that part, greatest
//! first, each in the micro-batch with the least cost in the leading column, where the document does the most harm. If
//! many documents lead in each column, all columns become level. With one column this is Algorithm 1, by cost instead
//! of by length.

use std::borrow::Cow;

use crate::cost::{CostModel, DocumentCosts};
use crate::costliest_first::costliest_first;
use crate::ladder::Ladder;
use crate::packing::certificate::Certificate;
use crate::packing::columns::Columns;
use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::bins::Bins;

/// Documents with costs, and the micro-batches that they go to.
pub(crate) struct Priced<'a> {
    pub(crate) lengths: &'a [i32],
    pub(crate) costs: &'a DocumentCosts,
    pub(crate) num_micro_batches: usize,
    pub(crate) max_tokens: i32,
    /// Most documents of a micro-batch; only for costs in one column.
    pub(crate) max_documents: Option<usize>,
    /// The cost model, if the costs come from one.
    pub(crate) cost_model: Option<&'a CostModel>,
}

/// Documents placed in micro-batches, and each micro-batch's cost in each column.
#[derive(Clone)]
pub(crate) struct Placed {
    /// Its costs are sums over all columns that take time.
    pub(crate) placement: Placement,
    /// Costs of the micro-batches, row by row.
    pub(crate) loads: Vec<f64>,
}

impl From<Placement> for Placed {
    /// A placement with costs in one column.
    fn from(placement: Placement) -> Self {
        Self { loads: placement.costs.clone(), placement }
    }
}

impl Priced<'_> {
    /// Cost of a micro-batch without documents; it counts in the first column that takes time.
    pub(crate) fn empty_cost(&self) -> f64 {
        self.cost_model.map_or(0.0, CostModel::micro_batch)
    }

    /// Algorithm 1. If documents are left over, it runs a second time with the documents first that take most of a
    /// limit (tokens or memory). The plan that leaves fewer over wins, then the plan with the shorter step.
    ///
    /// # Complexity
    /// O(n) for the sort, and a few steps for each document and column; O(n N) in the worst case and if memory is
    /// limited.
    pub(crate) fn place(&self) -> Placed {
        self.place_after(&[])
    }

    /// Places the `urgent` documents first, in the order of the list, and then the others.
    pub(crate) fn place_after(&self, urgent: &[usize]) -> Placed {
        let (leading, parts) = self.parts();
        // Without urgent documents the order needs no filter, which saves much of the time of a document.
        let placed = match urgent {
            [] => self.place_in_order(costliest_first(&parts), &leading),
            _ => self.place_in_order(costliest_after(urgent, &parts), &leading),
        };
        if placed.placement.leftover.is_empty() {
            return placed;
        }
        let bulks: Vec<f64> = (0..self.lengths.len()).map(|index| self.bulk(index)).collect();
        let other = self.place_in_order(costliest_after(urgent, &bulks), &leading);
        let rank = |placed: &Placed| (placed.placement.leftover.len(), self.step_cost(&placed.loads));
        if rank(&other) < rank(&placed) { other } else { placed }
    }

    /// The order in which [`Priced::place_after`] tries documents first.
    pub(crate) fn order_after(&self, urgent: &[usize]) -> Vec<usize> {
        costliest_after(urgent, &self.parts().1).collect()
    }

    /// Puts each document, in the order given, in the micro-batch with the least cost in its leading column. If the
    /// document does not fit there, it goes where the tokens are fewest; if memory is limited, to the first with room
    /// in ascending order of that cost. Else it is left over.
    pub(crate) fn place_in_order(&self, order: impl Iterator<Item = usize>, leading: &[u8]) -> Placed {
        match self.costs.columns() {
            1 => {
                let mut bins = self.bins();
                order.for_each(|index| bins.place(index, self.lengths[index], self.costs.values()[index]));
                bins.placement.into()
            }
            // Compiled for two columns, the usual number, so that loops over columns are unrolled.
            2 => self.place_by_leading(order, leading, 2),
            columns => self.place_by_leading(order, leading, columns),
        }
    }

    /// [`Priced::place_in_order`] for several columns.
    #[inline(always)]
    fn place_by_leading(&self, order: impl Iterator<Item = usize>, leading: &[u8], columns: usize) -> Placed {
        let values = self.costs.values();
        let mut placed = self.nothing();
        // A document changes all columns of a micro-batch. Only its leading column's ladder is updated at once; the
        // others are when the micro-batch comes first there.
        let mut by_load: Vec<Ladder> =
            (0..columns).map(|column| Ladder::new(by_column(&placed.loads, columns, column))).collect();
        let mut by_tokens: Option<Ladder> = None;
        for index in order {
            let leading = usize::from(leading[index]);
            let lightest = by_load[leading].lightest_by(|j| placed.loads[j * columns + leading]);
            let mut found = lightest.filter(|&j| self.has_room(&placed, j, index));
            if found.is_none() {
                found = if self.costs.is_limited() {
                    let mut by_load: Vec<(f64, usize)> = by_column(&placed.loads, columns, leading).zip(0..).collect();
                    by_load.sort_by(|a, b| a.0.total_cmp(&b.0));
                    by_load.into_iter().map(|(_, j)| j).find(|&j| self.has_room(&placed, j, index))
                } else {
                    let tokens = &placed.placement.tokens;
                    let fewest = by_tokens.get_or_insert_with(|| Ladder::new(tokens.iter().map(|&t| t as f64)));
                    Some(fewest.lightest()).filter(|&j| self.has_room(&placed, j, index))
                };
                placed.placement.length_fallbacks += usize::from(found.is_some());
            }
            let Some(j) = found else {
                placed.placement.leftover.push(index);
                continue;
            };
            self.put_row(&mut placed, index, j, &values[index * columns..][..columns]);
            by_load[leading].set(j, placed.loads[j * columns + leading]);
            if let Some(by_tokens) = &mut by_tokens {
                by_tokens.set(j, placed.placement.tokens[j] as f64);
            }
        }
        placed
    }

    /// Empty micro-batches, for costs in one column.
    pub(crate) fn bins(&self) -> Bins {
        Bins::limited(self.nothing().placement, i64::from(self.max_tokens), self.max_documents)
    }

    /// Empty micro-batches.
    pub(crate) fn nothing(&self) -> Placed {
        let placement = Placement::new(self.lengths.len(), self.num_micro_batches, self.empty_cost());
        let columns = self.costs.columns();
        let first = self.timed().next().unwrap_or(0);
        let load = |at: usize| if at % columns == first { self.empty_cost() } else { 0.0 };
        Placed { placement, loads: (0..self.num_micro_batches * columns).map(load).collect() }
    }

    #[inline]
    pub(crate) fn put(&self, placed: &mut Placed, index: usize, micro_batch: usize) {
        self.put_row(placed, index, micro_batch, self.costs.row(index));
    }

    #[inline(always)]
    fn put_row(&self, placed: &mut Placed, index: usize, micro_batch: usize, row: &[f64]) {
        placed.placement.put(index, micro_batch, self.lengths[index], self.time(row));
        for (load, cost) in placed.loads[micro_batch * row.len()..][..row.len()].iter_mut().zip(row) {
            *load += cost;
        }
    }

    /// Time of a document: the sum over all columns that take time.
    #[inline]
    pub(crate) fn time(&self, row: &[f64]) -> f64 {
        if !self.costs.is_limited() {
            return row.iter().sum();
        }
        row.iter().zip(self.costs.limits()).filter(|(_, limit)| limit.is_none()).map(|(cost, _)| cost).sum()
    }

    #[inline]
    pub(crate) fn has_room(&self, placed: &Placed, micro_batch: usize, index: usize) -> bool {
        let tokens = placed.placement.tokens[micro_batch] + i64::from(self.lengths[index]);
        tokens <= i64::from(self.max_tokens)
            && (!self.costs.is_limited() || self.has_memory(&placed.loads, micro_batch, self.costs.row(index)))
    }

    #[inline]
    fn has_memory(&self, loads: &[f64], micro_batch: usize, row: &[f64]) -> bool {
        let loads = &loads[micro_batch * row.len()..][..row.len()];
        let limits = self.costs.limits().iter().zip(loads.iter().zip(row));
        limits
            .filter_map(|(limit, sum)| Some((limit.as_ref()?, sum)))
            .all(|(limit, (load, cost))| load + cost <= *limit)
    }

    /// Whether every micro-batch keeps the memory limits.
    pub(crate) fn keeps_limits(&self, loads: &[f64]) -> bool {
        let mut limits = self.costs.limits().iter().cycle();
        loads.iter().all(|load| limits.next().copied().flatten().is_none_or(|limit| *load <= limit))
    }

    /// Columns that take time.
    pub(crate) fn timed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.costs.columns()).filter(|&column| self.costs.limits()[column].is_none())
    }

    /// Factor of each column that turns a cost into a part of the column: one over the column's sum, 0 for a column of
    /// zeros, minus infinity for memory.
    pub(crate) fn scale(&self) -> Vec<f64> {
        let limits = self.costs.limits().iter();
        let scale = self.costs.sums().iter().zip(limits).map(|(&sum, limit)| match limit {
            Some(_) => f64::NEG_INFINITY,
            None if sum == 0.0 => 0.0,
            None => 1.0 / sum,
        });
        scale.collect()
    }

    /// Leading column of each document, and the part that orders the documents. With one column the part is the cost.
    fn parts(&self) -> (Vec<u8>, Cow<'_, [f64]>) {
        if self.costs.columns() == 1 {
            return (Vec::new(), Cow::Borrowed(self.costs.values()));
        }
        let (leading, parts) = self.leading();
        (leading, Cow::Owned(parts))
    }

    /// Leading column of each document (the first if several are equal), and the document's part there.
    pub(crate) fn leading(&self) -> (Vec<u8>, Vec<f64>) {
        match self.costs.columns() {
            2 => self.leading_of(2),
            columns => self.leading_of(columns),
        }
    }

    #[inline(always)]
    fn leading_of(&self, columns: usize) -> (Vec<u8>, Vec<f64>) {
        let scale = self.scale();
        let greatest = |row: &[f64]| {
            // Memory never leads: its scale is minus infinity.
            let mut greatest = (0, -1.0);
            for (column, (cost, scale)) in row.iter().zip(&scale).enumerate() {
                let part = cost * scale;
                greatest = if part > greatest.1 { (column as u8, part) } else { greatest };
            }
            greatest
        };
        self.costs.values().chunks_exact(columns).map(greatest).unzip()
    }

    /// The greatest share of a limit (tokens or memory) that a document takes.
    fn bulk(&self, index: usize) -> f64 {
        let tokens = f64::from(self.lengths[index]) / f64::from(self.max_tokens);
        let memory = self.costs.row(index).iter().zip(self.costs.limits());
        memory.fold(tokens, |most, (cost, limit)| limit.map_or(most, |limit| most.max(cost / limit)))
    }

    /// Time of a step: the sum over columns of the heaviest micro-batch.
    pub(crate) fn step_cost(&self, loads: &[f64]) -> f64 {
        let columns = self.costs.columns();
        self.timed().map(|column| by_column(loads, columns, column).fold(0.0, f64::max)).sum()
    }

    /// The packing of the placed documents.
    pub(crate) fn packing(&self, placed: Placed, method: Option<Method>, piece: impl Fn(usize) -> Piece) -> Packing {
        let Placed { placement, loads } = placed;
        let columns = self.costs.columns();
        // In a stream, documents with -1 may be waiting instead of left over.
        let mut largest = if !placement.assignment.contains(&-1) {
            self.costs.largest().to_vec()
        } else {
            let mut largest = vec![0.0; columns];
            for (row, _) in rows(self.costs).zip(&placement.assignment).filter(|&(_, &micro_batch)| micro_batch >= 0) {
                largest.iter_mut().zip(row).for_each(|(most, cost)| *most = f64::max(*most, *cost));
            }
            largest
        };
        largest[self.timed().next().unwrap_or(0)] += self.empty_cost();
        let largest_cost = self.time(&largest);
        let columns = (columns > 1).then(|| Columns { limits: self.costs.limits().to_vec(), costs: loads, largest });
        let packing = placement.into_packing_of(method, self.max_tokens, largest_cost, piece);
        let certificate = match self.cost_model {
            Some(model) => Certificate::of_model(model),
            None => Certificate::of_rows(self.rows_of(&packing)),
        };
        Packing { columns, certificate, ..packing }
    }

    /// Costs of a packing's pieces, in the order of the packing.
    fn rows_of(&self, packing: &Packing) -> Vec<f64> {
        let columns = self.costs.columns();
        let (mut cursors, mut found) = (packing.offsets.clone(), vec![0.0; packing.pieces.len() * columns]);
        for (row, &micro_batch) in
            rows(self.costs).zip(&packing.assignment).filter(|&(_, &micro_batch)| micro_batch >= 0)
        {
            let cursor = &mut cursors[micro_batch as usize];
            found[*cursor * columns..][..columns].copy_from_slice(row);
            *cursor += 1;
        }
        found
    }
}

/// Loads of one column, micro-batch by micro-batch.
pub(crate) fn by_column(loads: &[f64], columns: usize, column: usize) -> impl ExactSizeIterator<Item = f64> {
    loads.iter().skip(column).step_by(columns).copied()
}

/// The `urgent` documents in the order of the list, then all others from the greatest weight to the least.
fn costliest_after<'a>(urgent: &'a [usize], weights: &[f64]) -> impl Iterator<Item = usize> + use<'a> {
    let mut is_urgent = vec![false; weights.len()];
    urgent.iter().for_each(|&index| is_urgent[index] = true);
    let others = costliest_first(weights).filter(move |&index| !is_urgent[index]);
    urgent.iter().copied().chain(others)
}

fn rows(costs: &DocumentCosts) -> impl Iterator<Item = &[f64]> {
    costs.values().chunks_exact(costs.columns())
}
