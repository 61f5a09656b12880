//! Micro-batches filled so that tokens and work run out together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::ladder::Ladder;
use crate::packing::placement::Placement;

use super::documents::{Document, Documents};
use super::first_fit::FirstFit;
use super::tournament::Tournament;

/// Mean number of documents in a micro-batch from which on slopes are kept in a tree.
const MANY: usize = 64;

/// Fills micro-batches longest document first. Each document goes to the micro-batch with the steepest slope: the most
/// cost still lacking to `target` per token of room. Only micro-batches with room whose cost stays within `target`
/// count; if there are none, the document goes to the least cost that has room.
///
/// Longer documents cost more per token. A micro-batch with few tokens left and much cost lacking must get long
/// documents; a micro-batch with a heavy document and room to spare can take many short ones. So tokens and cost run
/// out together.
///
/// `None` if a document that `start` places finds no room. Documents that `start` left over are tried last, longest
/// first: each goes to the least cost that has room, if the cost stays within `ceiling`.
///
/// # Complexity
/// O(n log N) if few documents share a row of [`FirstFit`]; else O(n log n).
pub(crate) fn steepest(documents: &Documents, start: &Placement, target: f64, ceiling: f64) -> Option<Placement> {
    let mut assignment = vec![-1; start.assignment.len()];
    let mut held = vec![Held { tokens: 0, cost: start.empty_cost() }; start.tokens.len()];
    let first_fit = FirstFit::new(documents);
    let slope = |held: &Held| (held.cost - target) / (documents.max_tokens - held.tokens) as f64;
    let cost = |held: &Held| held.cost;
    let mut by_cost: Option<Takers<_, _>> = None; // most batches need it only for a few documents at the end
    let mut unplaced = Vec::new();
    // While no micro-batch with a document lacks as much as an empty one, each document goes to the next empty one.
    let empty = held.first().map_or(0.0, slope);
    let (mut rank, mut filled) = (0, 0);
    while let Some(document) = documents.longest_first.get(rank)
        && filled < held.len()
    {
        let index = document.index as usize;
        if start.assignment[index] < 0 {
            unplaced.push(*document);
        } else if start.empty_cost() + document.cost > target || i64::from(document.length) > documents.max_tokens {
            break;
        } else {
            held[filled].put(document);
            assignment[index] = filled as i32;
            filled += 1;
        }
        rank += 1;
        if filled > 0 && slope(&held[filled - 1]) <= empty {
            break;
        }
    }
    let ready = if documents.longest_first.len() < MANY * held.len() {
        // Filled longest first, the micro-batches mostly also ascend by lack; equal ones stay in order of their
        // indices.
        let mut order: Vec<(f64, u32)> = (filled..held.len()).map(|j| (empty, j as u32)).collect();
        for alike in held[..filled].chunk_by(|a, b| a.cost == b.cost && a.tokens == b.tokens).rev() {
            let first = held.len() - order.len() - alike.len();
            order.extend((first..).take(alike.len()).map(|j| (slope(&alike[0]), j as u32)));
        }
        BySlope::List(Ladder::of_mostly_sorted(order))
    } else {
        BySlope::Tree(Tournament::new(held.iter().map(|held| ordered(slope(held)))))
    };
    let mut by_slope = Takers::new(&first_fit, &held, rank, target, slope, ready);
    for (rank, document) in documents.longest_first.iter().enumerate().skip(rank) {
        let index = document.index as usize;
        if start.assignment[index] < 0 {
            unplaced.push(*document);
            continue;
        }
        let j = if let Some(j) = by_slope.first(&held, rank) {
            held[j].put(document);
            by_slope.changed(&held, j, rank + 1);
            if let Some(by_cost) = &mut by_cost {
                by_cost.changed(&held, j, rank + 1);
            }
            j
        } else {
            let room = |held: &Held| documents.max_tokens - held.tokens;
            if by_cost.is_none() && held.iter().map(room).max() < Some(i64::from(document.length)) {
                return None;
            }
            let by_cost = by_cost.get_or_insert_with(|| {
                let ready = Tournament::new(held.iter().map(|held| ordered(held.cost)));
                Takers::new(&first_fit, &held, rank, f64::INFINITY, cost, ready)
            });
            let j = by_cost.first(&held, rank)?;
            held[j].put(document);
            by_cost.changed(&held, j, rank + 1);
            j
        };
        assignment[index] = j as i32;
    }
    let (tokens, costs) = held.into_iter().map(|held| (held.tokens, held.cost)).unzip();
    let mut placement = start.rearranged(assignment, tokens, costs);
    if !start.leftover.is_empty() {
        place_left_over(documents, &unplaced, start, ceiling, &mut placement);
    }
    Some(placement)
}

/// Places the documents that `start` left over, longest first: each in the micro-batch with the least cost that has
/// room, if the cost stays within `ceiling`. Micro-batches without room for the shortest document are skipped, usually
/// all.
///
/// # Complexity
/// O(N), and O(log N) for each document that there may be room for.
fn place_left_over(
    documents: &Documents,
    unplaced: &[Document],
    start: &Placement,
    ceiling: f64,
    placement: &mut Placement,
) {
    let mut left_over = vec![false; start.assignment.len()];
    start.leftover.iter().for_each(|&index| left_over[index] = true);
    let shortest = unplaced.iter().rev().find(|document| left_over[document.index as usize]);
    let shortest = shortest.map_or(i64::MAX, |document| i64::from(document.length));
    // Micro-batches by room; those with enough room are in a second heap by cost.
    let with_room = (0..placement.tokens.len()).map(|j| (room(placement, documents, j), j as u32));
    let mut lacking: BinaryHeap<(i64, u32)> = with_room.filter(|&(room, _)| room >= shortest).collect();
    let mut ready = BinaryHeap::new();
    for document in unplaced.iter().filter(|document| left_over[document.index as usize]) {
        while let Some(&(room, j)) = lacking.peek()
            && room >= i64::from(document.length)
        {
            lacking.pop();
            ready.push(Reverse((ordered(placement.costs[j as usize]), j)));
        }
        if let Some(&Reverse((_, j))) = ready.peek()
            && placement.costs[j as usize] + document.cost <= ceiling
        {
            ready.pop();
            placement.put(document.index as usize, j as usize, document.length, document.cost);
            lacking.push((room(placement, documents, j as usize), j));
        }
    }
    let is_left = |index: &usize| placement.assignment[*index] < 0;
    placement.leftover = start.leftover.iter().copied().filter(is_left).collect();
}

fn room(placement: &Placement, documents: &Documents, micro_batch: usize) -> i64 {
    documents.max_tokens - placement.tokens[micro_batch]
}

/// Tokens and cost of a micro-batch, stored together because they are read together.
#[derive(Clone)]
struct Held {
    tokens: i64,
    cost: f64,
}

impl Held {
    fn put(&mut self, document: &Document) {
        self.tokens += i64::from(document.length);
        self.cost += document.cost;
    }
}

/// Micro-batches by weight, ties by index; some are taken out.
trait Ready {
    fn first(&self) -> Option<usize>;
    fn set(&mut self, j: usize, weight: f64);
    fn take_out(&mut self, j: usize);
    /// Puts back a micro-batch that was taken out for lack of room or for too much work, and that can now take a
    /// document.
    fn come_back(&mut self, j: usize, weight: f64, lacked_room: bool);
}

/// Micro-batches by slope. Documents come longest first, so slopes change little from one document to the next, both of
/// micro-batches that take a document and of those that come back: a list searched from the last place is fast. If many
/// documents share a micro-batch, each moves one slope far among few others, and a tree is faster.
enum BySlope {
    List(Ladder),
    Tree(Tournament),
}

impl Ready for BySlope {
    fn first(&self) -> Option<usize> {
        match self {
            Self::List(list) => list.first().map(|(_, j)| j),
            Self::Tree(tree) => tree.first(),
        }
    }

    #[inline]
    fn set(&mut self, j: usize, weight: f64) {
        match self {
            Self::List(list) => list.set_lightest(j, weight),
            Self::Tree(tree) => Ready::set(tree, j, weight),
        }
    }

    fn take_out(&mut self, j: usize) {
        match self {
            Self::List(list) => list.remove(j),
            Self::Tree(tree) => tree.take_out(j),
        }
    }

    fn come_back(&mut self, j: usize, weight: f64, lacked_room: bool) {
        match self {
            Self::List(list) => list.come_back(j, weight, lacked_room),
            Self::Tree(tree) => tree.come_back(j, weight, lacked_room),
        }
    }
}

/// Micro-batches by cost: most are taken out, and the others change in no order.
impl Ready for Tournament {
    fn first(&self) -> Option<usize> {
        self.least()
    }

    fn set(&mut self, j: usize, weight: f64) {
        self.set(j, ordered(weight));
    }

    fn take_out(&mut self, j: usize) {
        self.set(j, Tournament::NONE);
    }

    fn come_back(&mut self, j: usize, weight: f64, _: bool) {
        self.set(j, ordered(weight));
    }
}

/// The micro-batches that may take a document, by weight, while documents come longest first.
///
/// A micro-batch that may take a document may take all shorter ones, until it takes one. So a micro-batch that may not
/// take the next document waits for one certain later document, and is not looked at until then.
struct Takers<'a, W, R> {
    first_fit: &'a FirstFit<'a>,
    /// Most that a micro-batch may cost.
    target: f64,
    weight: W,
    /// Micro-batches that do not wait, by weight.
    ready: R,
    /// `waits_for`: for each document's rank, a micro-batch that waits for it. `next`: for each micro-batch, the next
    /// one that waits for the same document.
    waits_for: Vec<u32>,
    next: Vec<u32>,
    /// All documents before this rank were handled.
    rank: usize,
}

/// No micro-batch.
const NOBODY: u32 = u32::MAX;
/// Entry of [`Takers::next`] for a micro-batch that does not wait.
const READY: u32 = u32::MAX - 1;

impl<'a, W: Fn(&Held) -> f64, R: Ready> Takers<'a, W, R> {
    /// `ready` holds all micro-batches.
    fn new(first_fit: &'a FirstFit<'a>, held: &[Held], rank: usize, target: f64, weight: W, ready: R) -> Self {
        let num_micro_batches = held.len();
        let mut takers = Self {
            first_fit,
            target,
            weight,
            ready,
            waits_for: vec![NOBODY; first_fit.documents.longest_first.len()],
            next: vec![READY; num_micro_batches],
            rank,
        };
        for (j, held) in held.iter().enumerate() {
            if !takers.fits(held, rank) {
                takers.wait(held, j, rank);
            }
        }
        takers
    }

    fn fits(&self, held: &Held, rank: usize) -> bool {
        self.first_fit.documents.longest_first.get(rank).is_some_and(|document| {
            held.tokens + i64::from(document.length) <= self.first_fit.documents.max_tokens
                && held.cost + document.cost <= self.target
        })
    }

    /// The lightest micro-batch that may take this document. Ranks must not decrease from call to call.
    fn first(&mut self, held: &[Held], rank: usize) -> Option<usize> {
        while self.rank <= rank {
            let mut j = self.waits_for[self.rank];
            while j != NOBODY {
                let waited = j as usize;
                j = std::mem::replace(&mut self.next[waited], READY);
                if self.fits(&held[waited], rank) {
                    let Documents { longest_first, max_tokens } = self.first_fit.documents;
                    let (document, held) = (&longest_first[rank], &held[waited]);
                    // The part of the document that its free tokens hold, against the part that its free cost holds.
                    let room = (max_tokens - held.tokens) as f64 * document.cost;
                    let lacked_room = room <= (self.target - held.cost) * f64::from(document.length);
                    self.ready.come_back(waited, (self.weight)(held), lacked_room);
                } else {
                    self.wait(&held[waited], waited, rank);
                }
            }
            self.rank += 1;
        }
        self.ready.first()
    }

    /// Updates a micro-batch whose documents changed; the next document has this rank.
    #[inline]
    fn changed(&mut self, held: &[Held], j: usize, rank: usize) {
        if self.next[j] != READY {
            return; // it still waits for the first document that it may take
        }
        if self.fits(&held[j], rank) {
            self.ready.set(j, (self.weight)(&held[j]));
        } else {
            self.wait(&held[j], j, rank);
        }
    }

    fn wait(&mut self, held: &Held, j: usize, rank: usize) {
        self.ready.take_out(j);
        let fit = self.first_fit.of(rank + 1, held.tokens, held.cost, self.target);
        if fit < self.waits_for.len() {
            self.next[j] = std::mem::replace(&mut self.waits_for[fit], j as u32);
        }
    }
}

/// Integers in the order of [`f64::total_cmp`].
pub(crate) fn ordered(weight: f64) -> u64 {
    let bits = weight.to_bits();
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}
