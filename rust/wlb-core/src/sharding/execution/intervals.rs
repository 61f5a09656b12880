//! Sets of tokens as intervals, and the rows of a tensor that hold them.

use super::paths::{Paths, Reach, Run};

/// Neighbouring tokens: the first, and one past the last.
pub(super) type Interval = (i64, i64);

/// Neighbouring tokens of the packed sequence that are also neighbouring rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) token: i64,
    pub(super) row: i64,
    pub(super) length: i64,
}

/// The places of a holder's tokens, ascending by token.
pub(super) fn places(held: &[Run]) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::with_capacity(held.len());
    for run in held {
        match places.last_mut() {
            Some(last) if last.token + last.length == run.token && last.row + last.length == run.row => {
                last.length += run.length;
            }
            _ => places.push(Place { token: run.token, row: run.row, length: run.length }),
        }
    }
    sort(&mut places, |place| place.token);
    places
}

/// A stable sort that takes linear time if the items are sorted already or consist of a few ascending parts.
pub(super) fn sort<T>(items: &mut [T], key: impl Fn(&T) -> i64) {
    if !items.is_sorted_by_key(&key) {
        items.sort_by_key(key);
    }
}

/// The keys that the queries of a holder see, as ascending intervals that do not touch.
pub(super) fn seen(held: &[Run], paths: &Paths, reach: Reach) -> Vec<Interval> {
    let mut all = Vec::with_capacity(held.len());
    for run in held {
        let (from, to) = run.sees(paths, reach);
        all.extend(paths.cut(run.path, from, to).map(|piece| (piece.token, piece.token + piece.length)));
    }
    union(all)
}

/// Intervals that cover the same tokens, ascending and without touching.
pub(super) fn union(mut all: Vec<Interval>) -> Vec<Interval> {
    sort(&mut all, |interval| interval.0);
    let mut joined: Vec<Interval> = Vec::with_capacity(all.len());
    for (from, to) in all {
        match joined.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    joined
}

/// The tokens in `some` that are not in `places`. Both must ascend.
pub(super) fn without(some: &[Interval], places: &[Place]) -> Vec<Interval> {
    let mut left = Vec::with_capacity(some.len());
    let mut next = 0;
    for &(mut from, to) in some {
        while next < places.len() && places[next].token + places[next].length <= from {
            next += 1;
        }
        let mut at = next;
        while from < to {
            match places.get(at) {
                Some(place) if place.token < to => {
                    if from < place.token {
                        left.push((from, place.token));
                    }
                    from = place.token + place.length;
                    at += 1;
                }
                _ => {
                    left.push((from, to));
                    break;
                }
            }
        }
    }
    left
}

/// The places of the tokens in `some` that have one. `some`, `places` and the result ascend.
pub(super) fn among<'a>(some: &'a [Interval], places: &'a [Place]) -> impl Iterator<Item = Place> + 'a {
    let (mut i, mut j) = (0, 0);
    std::iter::from_fn(move || {
        while let (Some(&(from, to)), Some(place)) = (some.get(i), places.get(j)) {
            let first = from.max(place.token);
            let last = to.min(place.token + place.length);
            if to <= place.token + place.length {
                i += 1;
            } else {
                j += 1;
            }
            if first < last {
                return Some(Place { token: first, row: place.row + first - place.token, length: last - first });
            }
        }
        None
    })
}

/// The places of one interval's tokens that have one, like [`among`], found by binary search.
pub(super) fn find(interval: Interval, places: &[Place]) -> impl Iterator<Item = Place> + '_ {
    let begin = places.partition_point(|place| place.token + place.length <= interval.0);
    places[begin..].iter().take_while(move |place| place.token < interval.1).map(move |place| {
        let first = interval.0.max(place.token);
        let last = interval.1.min(place.token + place.length);
        Place { token: first, row: place.row + first - place.token, length: last - first }
    })
}

/// Whether all tokens of the interval have a place.
pub(super) fn contain(places: &[Place], interval: Interval) -> bool {
    find(interval, places).map(|place| place.length).sum::<i64>() == interval.1 - interval.0
}

/// Number of tokens in these places.
pub(super) fn count(places: &[Place]) -> i64 {
    places.iter().map(|place| place.length).sum()
}
