//! The oracle of `strategy="auto"`: token by token, every attempt from scratch.

use std::cmp::Reverse;

use wlb_core::Mask;

use super::naive::{self, Owners};

/// Pairs of every rank, query by query.
pub(crate) fn pairs(lengths: &[i32], owners: &Owners, cp: usize, mask: Mask) -> Vec<u64> {
    let mut pairs = vec![0; cp];
    for (document, owners) in owners.iter().enumerate() {
        for (position, &owner) in owners.iter().enumerate() {
            pairs[owner] += match mask {
                Mask::Causal => position as u64 + 1,
                Mask::Full => lengths[document] as u64,
            };
        }
    }
    pairs
}

/// Keys that every rank sees and does not hold, key by key.
pub(crate) fn keys_moved(owners: &Owners, cp: usize, mask: Mask) -> Vec<i64> {
    let mut moved = vec![0; cp];
    for owners in owners {
        for (rank, moved) in moved.iter_mut().enumerate() {
            let last_query = owners.iter().rposition(|&owner| owner == rank);
            let sees = |key: usize| last_query.is_some_and(|query| mask == Mask::Full || query >= key);
            *moved += (0..owners.len()).filter(|&key| owners[key] != rank && sees(key)).count() as i64;
        }
    }
    moved
}

/// Keys of every rank that some query of another rank sees, key by key.
pub(crate) fn keys_gathered(owners: &Owners, cp: usize, mask: Mask) -> Vec<i64> {
    let mut gathered = vec![0; cp];
    for owners in owners {
        let sees = |query: usize, key: usize| mask == Mask::Full || query >= key;
        for (key, &owner) in owners.iter().enumerate() {
            let others = (0..owners.len()).filter(|&query| owners[query] != owner);
            gathered[owner] += i64::from(others.into_iter().any(|query| sees(query, key)));
        }
    }
    gathered
}

/// Of each rank the tokens, if it lacks keys of some of its documents and of the others it has an eighth of its tokens
/// or more, and the keys that the former see, or all where the others have fewer: token by token.
pub(crate) fn tokens_split_and_keys_picked(owners: &Owners, cp: usize, mask: Mask) -> Vec<(i64, i64)> {
    let of_rank = |rank: usize| {
        let (mut tokens, mut complete, mut lacking) = (0, 0, false);
        // Keys seen in documents that lack none, and in the others.
        let mut seen_keys = [0, 0];
        for owners in owners {
            let held = owners.iter().filter(|&&owner| owner == rank).count() as i64;
            tokens += held;
            let Some(last) = owners.iter().rposition(|&owner| owner == rank) else { continue };
            let seen = |end: usize| if mask == Mask::Full { &owners[..] } else { &owners[..=end] };
            let here = seen(last).iter().all(|&owner| owner == rank);
            lacking |= !here;
            complete += if here { held } else { 0 };
            let ends = (0..owners.len()).filter(|&at| owners[at] == rank && owners.get(at + 1) != Some(&rank));
            for (run, end) in ends.enumerate() {
                // Runs that see the same keys are one to attention.
                if mask == Mask::Causal || run == 0 {
                    seen_keys[usize::from(!here)] += seen(end).len() as i64;
                }
            }
        }
        let apart = complete > 0 && 8 * complete >= tokens;
        match (lacking, apart) {
            (false, _) => (0, 0),
            (true, true) => (tokens, seen_keys[1]),
            (true, false) => (0, seen_keys[0] + seen_keys[1]),
        }
    };
    (0..cp).map(of_rank).collect()
}

/// The first share, from `max_imbalance` on down, that makes ranks even enough; else the evenest way that was tried.
pub(crate) fn auto(lengths: &[i32], cp: usize, mask: Mask, max_imbalance: f64) -> Owners {
    let total: u64 = lengths.iter().map(|&length| mask.pairs(length)).sum();
    let enough = (total as f64 / cp as f64 * max_imbalance) as u64;
    let heaviest = |owners: &Owners| pairs(lengths, owners, cp, mask).into_iter().max().unwrap_or(0);
    let on_all = naive::per_document(lengths, cp, 1);
    let mut evenest = (heaviest(&on_all), on_all);
    let mut share = max_imbalance;
    let mut others: Vec<(u64, Owners)> = Vec::new();
    for _ in 0..32 {
        let owners = lay(lengths, cp, mask, share);
        let most = heaviest(&owners);
        if most <= enough {
            return owners;
        }
        others.push((most, owners));
        share *= 0.85;
    }
    // Of equals the first share; cutting every document for all ranks where none is better than that.
    for (most, owners) in others {
        if most < evenest.0 {
            evenest = (most, owners);
        }
    }
    evenest.1
}

/// Every document, longest first, on as few ranks as keep the part of each below a share of an even rank's work.
fn lay(lengths: &[i32], cp: usize, mask: Mask, share: f64) -> Owners {
    let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    let total: u64 = lengths.iter().map(|&length| mask.pairs(length)).sum();
    let mut owners: Owners = vec![Vec::new(); lengths.len()];
    let mut now = vec![0; cp];
    let mut room: Vec<usize> =
        (0..cp).map(|rank| tokens as usize / cp + usize::from(rank < tokens as usize % cp)).collect();
    for document in naive::longest_first(lengths) {
        let length = lengths[document] as usize;
        let of_pairs = mask.pairs(length as i32) as f64 * cp as f64 / total as f64 / share;
        let of_tokens = length as f64 * cp as f64 / tokens as f64 / share.min(1.0);
        let parts = (of_pairs.max(of_tokens).ceil() as usize).clamp(1, cp.min(length));
        let (each, longer) = (length / parts, length % parts);

        let mut chosen: Vec<usize> = (0..cp).filter(|&rank| room[rank] >= each).collect();
        chosen.sort_by_key(|&rank| (now[rank], Reverse(room[rank]), rank));
        chosen.truncate(parts);
        chosen.sort_by_key(|&rank| (Reverse(room[rank]), rank));
        let sizes: Vec<usize> = (0..parts).map(|place| each + usize::from(place < longer)).collect();
        if chosen.len() == parts && chosen.iter().zip(&sizes).all(|(&rank, &size)| room[rank] >= size) {
            let fronts =
                chosen.iter().zip(&sizes).map(|(&rank, size)| (rank, if parts > 1 { size / 2 } else { *size }));
            let backs = chosen.iter().zip(&sizes).map(|(&rank, size)| (rank, size - size / 2)).rev();
            let backs = backs.take(if parts > 1 { parts } else { 0 });
            for (rank, count) in fronts.chain(backs) {
                owners[document].extend(vec![rank; count]);
            }
        } else {
            // The rank with the most room is filled up, then the next.
            let mut left = room.clone();
            while owners[document].len() < length {
                let rank = (0..cp).min_by_key(|&rank| (Reverse(left[rank]), rank)).unwrap_or(0);
                while left[rank] > 0 && owners[document].len() < length {
                    owners[document].push(rank);
                    left[rank] -= 1;
                }
            }
        }
        for (position, &owner) in owners[document].iter().enumerate() {
            room[owner] -= 1;
            now[owner] += match mask {
                Mask::Causal => position as u64 + 1,
                Mask::Full => length as u64,
            };
        }
    }
    owners
}
