//! Plans that move tokens from one division of a micro-batch among ranks to another.

use super::calls::{Indices, Rows};
use super::intervals::{Place, among, places, sort};
use super::layout::Layout;
use super::paths::tokens;

/// The rows that one rank sends and receives. Rows between two ranks are in packed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MovesPlan {
    /// Rows that the rank sends, ordered by destination.
    pub sent: Rows,
    /// Number of rows that go to each rank.
    pub sent_rows: Vec<i64>,
    /// For each row that the rank has afterwards, its index among the arriving rows.
    pub placed: Rows,
    /// Number of rows that come from each rank.
    pub arriving_rows: Vec<i64>,
    /// Indices that rows refer to.
    pub indices: Indices,
}

impl MovesPlan {
    /// The plan of `rank`, from one layout of the same tokens to another.
    ///
    /// # Complexity
    /// O(s log s) for the segments `s` of all ranks, and O(tokens of the rank).
    pub fn of(before: &Layout, after: &Layout, rank: usize) -> Self {
        let mut plan = Self::default();
        let source = places(&before.held[rank]);
        let target = places(&after.held[rank]);
        let mut sent = Vec::new();
        for held in &after.held {
            let parts = common(&source, &places(held));
            plan.sent_rows.push(parts.iter().map(|part| part.length).sum());
            sent.extend(parts.iter().map(|part| (part.row, part.length)));
        }
        plan.sent = plan.indices.list(sent);
        // Arriving rows, in the order of arrival, with their final rows.
        let mut arriving: Vec<Place> = Vec::new();
        let mut row = 0;
        for held in &before.held {
            let parts = common(&target, &places(held));
            plan.arriving_rows.push(parts.iter().map(|part| part.length).sum());
            for part in parts {
                // `token` is the final row, for sorting; `row` is the row of arrival.
                arriving.push(Place { token: part.row, row, length: part.length });
                row += part.length;
            }
        }
        sort(&mut arriving, |part| part.token);
        plan.placed = plan.indices.list(arriving.iter().map(|part| (part.row, part.length)));
        debug_assert_eq!(plan.placed.count, tokens(&after.held[rank]));
        plan
    }
}

/// The tokens that both have, ascending, with the rows of `some`.
fn common(some: &[Place], others: &[Place]) -> Vec<Place> {
    let wanted: Vec<_> = others.iter().map(|place| (place.token, place.token + place.length)).collect();
    among(&wanted, some).collect()
}
