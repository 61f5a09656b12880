//! Documents from longest to shortest.

/// Below this a comparison sort is faster than clearing the radix counters.
const SMALL: usize = 256;
const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;

/// `(length, index)` from longest to shortest; equal lengths in index order.
///
/// # Complexity
/// O(n) passes of 11 bits over the bits that lengths use (two passes up to 4M tokens); at most 2^32 documents.
pub(crate) fn longest_first(lengths: &[i32]) -> impl ExactSizeIterator<Item = (i32, usize)> + use<'_> {
    longest_first_of(lengths.iter().copied().enumerate())
}

/// [`longest_first`] for a part of a batch, given as `(index, length)`.
pub(crate) fn longest_first_of<I>(documents: I) -> impl ExactSizeIterator<Item = (i32, usize)> + use<I>
where
    I: Iterator<Item = (usize, i32)>,
{
    // The complement of the length above the index: ascending keys are descending lengths, ties by index.
    let keys: Vec<u64> = documents.map(|(index, length)| u64::from(!(length as u32)) << 32 | index as u64).collect();
    // Lengths are positive int32: the complement's unused high bits are all ones.
    let longest = keys.iter().map(|key| !((key >> 32) as u32)).max().unwrap_or(0);
    let sorted = sort(keys, 32 - longest.leading_zeros());
    sorted.into_iter().map(|key| (!((key >> 32) as u32) as i32, key as u32 as usize))
}

/// Sorts keys by the `bits` bits above the lowest 32; higher bits must agree. Keys that agree in these bits must
/// already be in ascending order.
pub(crate) fn sort(mut keys: Vec<u64>, bits: u32) -> Vec<u64> {
    if keys.len() < SMALL {
        keys.sort_unstable();
        return keys;
    }
    let mut scratch = vec![0; keys.len()];
    let mut shift = 32;
    while shift < 32 + bits {
        let digit = |key: u64| (key >> shift) as usize % DIGITS;
        let mut cursors = [0_u32; DIGITS];
        for &key in &keys {
            cursors[digit(key)] += 1;
        }
        let mut total = 0;
        for cursor in &mut cursors {
            (*cursor, total) = (total, total + *cursor);
        }
        for &key in &keys {
            let cursor = &mut cursors[digit(key)];
            scratch[*cursor as usize] = key;
            *cursor += 1;
        }
        std::mem::swap(&mut keys, &mut scratch);
        shift += DIGIT_BITS;
    }
    keys
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::longest_first;

    proptest! {
        #[test]
        fn is_a_stable_descending_sort(
            lengths in proptest::collection::vec(prop_oneof![1..50, 1..5000, 1..=i32::MAX], 0..600),
        ) {
            let mut expected: Vec<(i32, usize)> = lengths.iter().copied().zip(0..).collect();
            expected.sort_by_key(|&(length, _)| std::cmp::Reverse(length));
            prop_assert_eq!(longest_first(&lengths).collect::<Vec<_>>(), expected);
        }
    }
}
