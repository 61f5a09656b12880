//! Every document on as few ranks as balance allows, so that few keys have to be fetched and segments stay long.
//!
//! All ranks of a document but one fetch keys of it, and the one that holds its end fetches nearly all. Whole on one
//! rank it costs nothing to fetch, but that rank has more pairs than others then, unless shorter documents even it out.
//! So documents are laid, longest first, on just as many ranks as make the part of each a certain *share* of an even
//! rank's work. The share begins at all that `max_imbalance` allows, and shrinks until the ranks come out even.

use std::cmp::Reverse;

use crate::cost::Mask;
use crate::interrupt::{Meter, parts};
use crate::longest_first::longest_first;

use super::builder::Ranks;
use super::{hybrid, per_document};

/// Each share that is tried is so much of the one before.
const STEP: f64 = 0.85;
/// Shares that are tried; the last is 1/150 of the first.
const ATTEMPTS: usize = 32;

/// Lays every document on as few ranks as leave none with more than `max_imbalance` times the mean pairs. Where no
/// share does that, the evenest way that was tried is taken; every document on all ranks is among them.
pub(super) fn cut(ranks: &mut impl Ranks, lengths: &[i32], mask: Mask, max_imbalance: f64) {
    // Indices fit: each document has at least one token, and there are at most 2^31 - 1 tokens.
    let documents: Vec<_> = longest_first(lengths).map(|(length, index)| (length, index as u32)).collect();
    let mut layer = Layer::new(&documents, ranks.cp_size(), mask, max_imbalance);
    match layer.largest_share(lengths, max_imbalance) {
        Some(share) => {
            layer.lay(ranks, share, u64::MAX);
        }
        None => per_document::cut(ranks, lengths),
    }
}

/// The shares that are tried, from the largest.
fn shares(max_imbalance: f64) -> impl Iterator<Item = f64> {
    std::iter::successors(Some(max_imbalance), |share| Some(share * STEP)).take(ATTEMPTS)
}

/// The fewest parts of a document of which none exceeds the share of an even rank's pairs or tokens.
fn parts_of((pairs, tokens): (f64, f64), share: f64) -> usize {
    (pairs / share).max(tokens / share.min(1.0)).ceil() as usize
}

/// Lays documents on ranks.
struct Layer<'a> {
    /// `(length, index)`, longest first.
    documents: &'a [(i32, u32)],
    /// Pairs and tokens of the longest, over those of an even rank; all others are whole whatever the share.
    work: Vec<(f64, f64)>,
    mask: Mask,
    tokens: i64,
    /// Pairs of all documents.
    all_pairs: u64,
    /// Pairs that each rank has so far.
    pairs: Vec<u64>,
    /// Tokens that each rank still lacks to its equal share of them.
    room: Vec<i64>,
    /// The ranks of the document at hand.
    chosen: Vec<usize>,
    meter: Meter,
}

impl<'a> Layer<'a> {
    fn new(documents: &'a [(i32, u32)], cp_size: usize, mask: Mask, max_imbalance: f64) -> Self {
        let (mut tokens, mut all_pairs) = (0, 0);
        for part in parts(documents) {
            tokens += part.iter().map(|&(length, _)| i64::from(length)).sum::<i64>();
            all_pairs += part.iter().map(|&(length, _)| mask.pairs(length)).sum::<u64>();
        }
        let of_even = |amount: f64, all: f64| amount * cp_size as f64 / all;
        let work = |&(length, _): &(i32, u32)| {
            (of_even(mask.pairs_f64(length), all_pairs as f64), of_even(f64::from(length), tokens as f64))
        };
        let least = shares(max_imbalance).last().unwrap_or(max_imbalance);
        Self {
            documents,
            work: documents.iter().map(work).take_while(|&work| parts_of(work, least) > 1).collect(),
            mask,
            tokens,
            all_pairs,
            pairs: vec![0; cp_size],
            room: vec![0; cp_size],
            chosen: Vec::with_capacity(cp_size),
            meter: Meter::default(),
        }
    }

    fn cp_size(&self) -> usize {
        self.pairs.len()
    }

    /// The largest share under which ranks are even enough; else the one that makes them evenest, or none where every
    /// document on all ranks is as even.
    fn largest_share(&mut self, lengths: &[i32], max_imbalance: f64) -> Option<f64> {
        let enough = (self.all_pairs as f64 / self.cp_size() as f64 * max_imbalance) as u64;
        let (mut evenest, mut least) = (None, u64::MAX);
        for share in shares(max_imbalance) {
            let heaviest = self.lay(&mut Nowhere { cp_size: self.cp_size() }, share, least.max(enough));
            if heaviest <= enough {
                return Some(share);
            }
            if heaviest < least {
                (evenest, least) = (Some(share), heaviest);
            }
        }
        let mut on_all = PairsOfRanks { lengths, mask: self.mask, pairs: vec![0; self.cp_size()] };
        per_document::cut(&mut on_all, lengths);
        evenest.filter(|_| on_all.pairs.iter().copied().max() > Some(least))
    }

    /// Lays all documents, and returns the pairs of the heaviest rank; or, as soon as some rank has more than `bound`,
    /// gives up and returns what that has.
    fn lay(&mut self, ranks: &mut impl Ranks, share: f64, bound: u64) -> u64 {
        let cp_size = self.cp_size() as i64;
        self.pairs.fill(0);
        for (rank, room) in (0..).zip(&mut self.room) {
            *room = self.tokens / cp_size + i64::from(rank < self.tokens % cp_size);
        }
        let mut heaviest = 0;
        for (&(length, document), number) in self.documents.iter().zip(0..) {
            self.meter.spend(self.pairs.len());
            let document = document as usize;
            let parts = self.work.get(number).map_or(1, |&work| parts_of(work, share));
            let laid = match parts.min(self.pairs.len()).min(length as usize) {
                0 | 1 => self.lay_whole(ranks, document, length),
                parts => self.lay_cut(ranks, document, length, parts),
            };
            heaviest = heaviest.max(laid.unwrap_or_else(|| self.lay_where_room_is(ranks, document, length)));
            if heaviest > bound {
                break;
            }
        }
        heaviest
    }

    /// Gives a document to the rank with the fewest pairs that has room for all of it.
    fn lay_whole(&mut self, ranks: &mut impl Ranks, document: usize, length: i32) -> Option<u64> {
        let (mut chosen, mut least) = (None, (u64::MAX, Reverse(0)));
        for (rank, (&pairs, &room)) in self.pairs.iter().zip(&self.room).enumerate() {
            if room >= i64::from(length) && (pairs, Reverse(room)) < least {
                (chosen, least) = (Some(rank), (pairs, Reverse(room)));
            }
        }
        Some(self.give(ranks, chosen?, (document, length), 0, length))
    }

    /// Cuts a document for the `parts` ranks with the fewest pairs that have room for a part: of each rank's tokens,
    /// half from the front of the document and half from its back, so that all have alike many pairs.
    fn lay_cut(&mut self, ranks: &mut impl Ranks, document: usize, length: i32, parts: usize) -> Option<u64> {
        let (each, longer) = (i64::from(length) / parts as i64, length as usize % parts);
        let Self { chosen, pairs, room, .. } = self;
        chosen.clear();
        chosen.extend((0..pairs.len()).filter(|&rank| room[rank] >= each));
        chosen.sort_unstable_by_key(|&rank| (pairs[rank], Reverse(room[rank]), rank));
        chosen.truncate(parts);
        // The `length % parts` tokens that are left over go to those with the most room.
        chosen.sort_unstable_by_key(|&rank| (Reverse(room[rank]), rank));
        let tokens = |place: usize| each + i64::from(place < longer);
        if chosen.len() < parts || (0..parts).any(|place| room[chosen[place]] < tokens(place)) {
            return None;
        }
        let chosen = std::mem::take(chosen);
        let (mut start, mut heaviest) = (0, 0);
        for (place, &rank) in chosen.iter().enumerate() {
            let front = (tokens(place) / 2) as i32;
            self.give(ranks, rank, (document, length), start, front);
            start += front;
        }
        for (place, &rank) in chosen.iter().enumerate().rev() {
            let back = (tokens(place) - tokens(place) / 2) as i32;
            heaviest = heaviest.max(self.give(ranks, rank, (document, length), start, back));
            start += back;
        }
        self.chosen = chosen;
        Some(heaviest)
    }

    /// Fills the rank with the most room, and goes on with the next: what is always possible, since ranks lack as many
    /// tokens as are still to come.
    fn lay_where_room_is(&mut self, ranks: &mut impl Ranks, document: usize, length: i32) -> u64 {
        let mut heaviest = 0;
        let mut room = std::mem::take(&mut self.room);
        hybrid::deal(&mut room, length, |rank, start, taken| {
            ranks.push(rank, document, start, taken);
            self.pairs[rank] += self.mask.segment_pairs(start, taken, length);
            heaviest = heaviest.max(self.pairs[rank]);
        });
        self.room = room;
        heaviest
    }

    /// Gives a run of a document `(index, length)` to a rank; returns the rank's pairs.
    fn give(&mut self, ranks: &mut impl Ranks, rank: usize, document: (usize, i32), start: i32, taken: i32) -> u64 {
        ranks.push(rank, document.0, start, taken);
        self.room[rank] -= i64::from(taken);
        self.pairs[rank] += self.mask.segment_pairs(start, taken, document.1);
        self.pairs[rank]
    }
}

/// Where documents are laid to see how even that would be.
struct Nowhere {
    cp_size: usize,
}

impl Ranks for Nowhere {
    fn cp_size(&self) -> usize {
        self.cp_size
    }

    fn push(&mut self, _rank: usize, _document: usize, _start: i32, _length: i32) {}
}

/// Counts the pairs of every rank.
struct PairsOfRanks<'a> {
    lengths: &'a [i32],
    mask: Mask,
    pairs: Vec<u64>,
}

impl Ranks for PairsOfRanks<'_> {
    fn cp_size(&self) -> usize {
        self.pairs.len()
    }

    fn push(&mut self, rank: usize, document: usize, start: i32, length: i32) {
        self.pairs[rank] += self.mask.segment_pairs(start, length, self.lengths[document]);
    }
}
