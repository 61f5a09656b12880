//! Finds the first item that fits.

/// Finds items that are short enough: a tree of the least tokens of all items, of each half, of each quarter, and so
/// on.
pub(super) struct Shortest {
    /// Least tokens of a range of items; its halves are at twice its index and at the next index.
    tokens: Vec<i64>,
}

impl Shortest {
    pub(super) fn new(items: impl ExactSizeIterator<Item = i64>) -> Self {
        let half = items.len().next_power_of_two();
        let mut tokens = vec![i64::MAX; 2 * half];
        tokens[half..].iter_mut().zip(items).for_each(|(tokens, item)| *tokens = item);
        (1..half).rev().for_each(|at| tokens[at] = tokens[2 * at].min(tokens[2 * at + 1]));
        Self { tokens }
    }

    /// The first item, from `place` on (at most the number of items), of at most this many tokens.
    ///
    /// # Complexity
    /// O(log n).
    #[inline]
    pub(super) fn within(&self, room: i64, place: usize) -> Option<usize> {
        let half = self.tokens.len() / 2;
        let mut at = half + place;
        while *self.tokens.get(at)? > room {
            at += 1;
            if at.is_power_of_two() {
                return None;
            }
            at >>= at.trailing_zeros();
        }
        while at < half {
            at *= 2;
            at += usize::from(self.tokens[at] > room);
        }
        Some(at - half)
    }
}
