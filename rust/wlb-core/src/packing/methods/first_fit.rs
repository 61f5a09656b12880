//! Finds the first document that a micro-batch may take.

use super::documents::{Document, Documents};

/// With fewer documents, binary search is as fast as tables, which have to be filled first.
const SMALL: usize = 1024;

/// Powers of two below the greatest cost that the rows of the cost table cover.
const ORDERS: u64 = 24;

/// Finds the first document, longest first, that fits. Four of five placements need it: after most documents a
/// micro-batch waits for a much shorter one. Binary search would miss the caches, so tables by length and by cost lead
/// to a row of a few documents.
pub(crate) struct FirstFit<'a> {
    pub(crate) documents: &'a Documents,
    /// First rank of a length of at most this many tokens (shifted by `length_shift`).
    by_length: Vec<u32>,
    length_shift: u32,
    /// First rank of a cost of at most this much. A row is the cost's float bits above those of `cheap`, shifted by
    /// `cost_shift`, so rows get wider as costs grow.
    by_cost: Vec<u32>,
    cheap: u64,
    cost_shift: u32,
}

impl<'a> FirstFit<'a> {
    pub(crate) fn new(documents: &'a Documents) -> Self {
        let all = &documents.longest_first;
        let (longest, dearest) = all.first().map_or((0, 0.0), |document| (document.length, document.cost));
        let cheapest = all.last().map_or(0.0, |document| document.cost);
        let cheap = cheapest.to_bits().max(dearest.to_bits().saturating_sub(ORDERS << 52));
        let mut first_fit =
            Self { documents, by_length: Vec::new(), length_shift: 0, by_cost: Vec::new(), cheap, cost_shift: 0 };
        if all.len() < SMALL {
            return first_fit;
        }
        let shift = |most: u64| (0..).find(|&shift| most >> shift <= all.len() as u64).unwrap_or(0);
        first_fit.length_shift = shift(longest as u64);
        first_fit.cost_shift = shift(dearest.to_bits().saturating_sub(cheap));
        first_fit.by_length = table(all, |document| first_fit.length_row(i64::from(document.length)));
        first_fit.by_cost = table(all, |document| first_fit.cost_row(document.cost));
        first_fit
    }

    fn length_row(&self, length: i64) -> usize {
        (length >> self.length_shift) as usize
    }

    fn cost_row(&self, cost: f64) -> usize {
        (cost.max(0.0).to_bits().saturating_sub(self.cheap) >> self.cost_shift) as usize
    }

    /// Rank (at least `from`) of the first document that a micro-batch with these `tokens` and this `cost` may take.
    pub(crate) fn of(&self, from: usize, tokens: i64, cost: f64, target: f64) -> usize {
        let all = &self.documents.longest_first;
        let room = self.documents.max_tokens - tokens;
        if self.by_length.is_empty() {
            let rest = &all[from.min(all.len())..];
            return from
                + rest.partition_point(|document| i64::from(document.length) > room || cost + document.cost > target);
        }
        let first = |table: &[u32], row: usize| table.get(row).map_or(0, |&rank| rank as usize);
        let end = |table: &[u32], row: usize| if row == 0 { all.len() } else { first(table, row - 1) };
        let row = self.length_row(room);
        let mut short = first(&self.by_length, row);
        if self.length_shift > 0 {
            let rest = &all[short..end(&self.by_length, row)];
            short += rest.partition_point(|document| i64::from(document.length) > room);
        }
        let dear = |document: &Document| cost + document.cost > target;
        if !all.get(short).is_some_and(dear) {
            return short.max(from);
        }
        // A little more and less, as much as sums may be rounded: nearly always a single row.
        let (slack, rounding) = (target - cost, target * (2.0 * f64::EPSILON));
        let start = first(&self.by_cost, self.cost_row(slack + rounding)).max(short);
        let rest = &all[start..end(&self.by_cost, self.cost_row(slack - rounding)).max(start)];
        from.max(start + rest.partition_point(dear))
    }
}

/// For each row, the first rank that is in this row or in a lower one.
fn table(all: &[Document], row: impl Fn(&Document) -> usize) -> Vec<u32> {
    let mut table = vec![all.len() as u32; all.first().map_or(0, &row) + 1];
    let mut above = table.len();
    for (rank, document) in all.iter().enumerate() {
        let row = row(document);
        while above > row {
            above -= 1;
            table[above] = rank as u32;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Documents, FirstFit, SMALL};

    #[test]
    fn what_fits_since_sums_are_rounded_is_found() {
        let lengths: Vec<i32> = (1..=SMALL as i32 + 100).collect();
        let costs: Vec<f64> = lengths.iter().map(|&length| f64::from(length) / 100.0).collect();
        let documents = Documents::new(&lengths, &costs, 1 << 20);
        // Floats of this size are two apart: a document that costs a little less than 3 fits beside a rest of 2.
        let (held, target) = (1e16, 1e16 + 2.0);
        let looked = documents.longest_first.iter().position(|document| held + document.cost <= target).unwrap_or(0);
        assert!(documents.longest_first[looked].cost > target - held);
        assert_eq!(FirstFit::new(&documents).of(0, 0, held, target), looked);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_first_that_fits_is_found_in_tables_as_by_looking(
            lengths in proptest::collection::vec(prop_oneof![1..50, 1..5000, 1..=1 << 20], SMALL - 20..SMALL + 400),
            (linear, squares) in (prop_oneof![Just(0.0), 0.1..2.0], prop_oneof![Just(0.0), Just(1e-4), Just(1e30)]),
            asked in proptest::collection::vec(
                (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0.0..1.0, 0.0..1.5), 1..60),
        ) {
            let cost = |length: i32| f64::from(length) * (linear + squares * f64::from(length));
            let costs: Vec<f64> = lengths.iter().copied().map(cost).collect();
            let documents = Documents::new(&lengths, &costs, 1 << 20);
            let all = &documents.longest_first;
            let first_fit = FirstFit::new(&documents);
            for (at, from, tokens, target) in asked {
                // Values near a document's own, so that the side of the boundary matters.
                let document = all[at.index(all.len())];
                let tokens = documents.max_tokens - i64::from(document.length) - (3.0 * tokens) as i64 + 1;
                let (from, target) = (from.index(all.len() + 1), target * 2.0 * document.cost);
                let held = 0.3 * document.cost;
                let fits = |rank: &usize| {
                    tokens + i64::from(all[*rank].length) <= documents.max_tokens && held + all[*rank].cost <= target
                };
                let looked = (from..all.len()).find(fits).unwrap_or(all.len());
                prop_assert_eq!(first_fit.of(from, tokens, held, target), looked);
            }
        }
    }
}
