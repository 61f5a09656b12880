//! Plans for adding up rows: the gradients of a key come from every span that sees it, and from other ranks.

use super::calls::{Indices, Rows};

/// Neighbouring rows of a result, and the equally many neighbouring rows of the summed tensor that are added to them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// First row of the result.
    pub(super) to: i64,
    /// First row of the summed tensor.
    pub(super) from: i64,
    pub(super) length: i64,
}

/// Every row of the result is a sum of rows of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// Summed rows: first all rows for the first row of the result, then for the second, and so on.
    pub rows: Rows,
    /// Begin in `rows` of each result row's summands. Without rows, every result row has one summand, and `rows` lists
    /// them.
    pub begins: Rows,
    /// Number of rows of the result.
    pub count: i64,
}

impl Sum {
    /// The sum of these shares, which together must reach each of the `count` rows of the result.
    ///
    /// # Complexity
    /// O(n log n) for `n` shares, and O(rows) of the lists.
    pub(super) fn of(mut shares: Vec<Share>, count: i64, indices: &mut Indices) -> Self {
        if !shares.is_sorted_by_key(|share| share.to) {
            shares.sort_by_key(|share| share.to);
        }
        let total: i64 = shares.iter().map(|share| share.length).sum();
        if total == count {
            // Each row of the result is reached exactly once.
            let rows = indices.list(shares.iter().map(|share| (share.from, share.length)));
            return Self { rows, begins: Rows::default(), count };
        }
        let begin = indices.rows.len();
        indices.rows.reserve((total + count) as usize);
        let mut begins: Vec<(i64, i64, i64)> = Vec::with_capacity(2 * shares.len());
        let (mut open, mut first): (Vec<Share>, Vec<i32>) = (Vec::new(), Vec::new());
        let (mut row, mut next) = (0, 0);
        while row < count {
            while shares.get(next).is_some_and(|share| share.to == row) {
                open.push(shares[next]);
                next += 1;
            }
            open.retain(|share| share.to + share.length > row);
            let end = open.iter().map(|share| share.to + share.length).min().unwrap_or(count);
            let end = shares.get(next).map_or(end, |share| share.to.min(end));
            debug_assert!(!open.is_empty() && end > row, "a row gets nothing");
            begins.push(((indices.rows.len() - begin) as i64, open.len() as i64, end - row));
            first.clear();
            first.extend(open.iter().map(|share| (share.from + row - share.to) as i32));
            let (before, width, length) = (indices.rows.len(), first.len(), (end - row) as i32);
            match first[..] {
                [one] => indices.rows.extend(one..one + length),
                [one, other] => {
                    indices.rows.resize(before + 2 * length as usize, 0);
                    for (pair, at) in indices.rows[before..].chunks_exact_mut(2).zip(0..) {
                        pair.copy_from_slice(&[one + at, other + at]);
                    }
                }
                _ => {
                    indices.rows.resize(before + width * length as usize, 0);
                    for (summed, at) in indices.rows[before..].chunks_exact_mut(width).zip(0..) {
                        summed.iter_mut().zip(&first).for_each(|(summed, first)| *summed = first + at);
                    }
                }
            }
            row = end;
        }
        let rows = Rows { first: begin as i64, count: total, listed: true };
        let first = indices.rows.len() as i64;
        for (begin, width, length) in begins {
            indices.rows.extend((0..length).map(|at| (begin + width * at) as i32));
        }
        Self { rows, begins: Rows { first, count, listed: true }, count }
    }
}
