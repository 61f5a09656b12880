//! A lower bound on the heaviest micro-batch, where tokens are scarce.
//!
//! Suppose that no micro-batch costs more than `C`. Take documents of which no two fit together, by tokens or under
//! `C`: each has a micro-batch for itself. Such a *head* of `L` tokens and cost `h` leaves `T - L` tokens and `C - h`
//! of cost free. Let all other documents be cut at will. For any price `t` of a token, the demand of a document is its
//! cost or `t` times its tokens, whichever is less. A micro-batch holds at most its free cost and at most `t` times its
//! free tokens:
//!
//! `sum over others of min(cost, t * tokens) <= sum over micro-batches of min(C - h, t * (T - L))`
//!
//! For each `t`, the least `C` that satisfies this is a lower bound. The greatest of these bounds equals the optimum of
//! the linear program that places heads whole and other documents in fractions. (The program asks whether the
//! micro-batches' pairs of tokens and cost are a mixture of the documents' pairs. By Hardy, Littlewood and Polya they
//! are, unless some concave, rising function of cost per token shows otherwise; all these functions are mixtures of
//! `min(., t)`.) Both sides are linear in `t` between the documents' costs per token, so only these `t` are tried, and
//! no program is solved.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::cost::CostModel;
use crate::costliest_first::costliest_first;

use super::piece::Piece;

/// Most passes over the documents. Each pass raises the bound; usually two to five do, then nothing does.
const PASSES: usize = 32;
/// Most steps in one pass: at most one for each head whose tokens run out on the way, usually two.
const STEPS: usize = 64;
/// Least gain of a pass, relative to the bound; with less, the bound is final.
const GAIN: f64 = 1e-9;
/// A micro-batch with at least this part of the heaviest cost counts as equally heavy, because of rounding.
const SAME: f64 = 1.0 - 1e-12;
/// Smaller costs are not divided: they have too few significant bits.
const LEAST_COST: f64 = 1e-280;

/// The inputs of a packing's lower bound, besides the packing itself. The bound is computed when it is first asked for.
/// Certificates are not part of the plan: any two are equal.
#[derive(Clone, Debug, Default)]
pub struct Certificate {
    basis: Basis,
    /// The bound, once it is known.
    pub(crate) bound: Known,
}

/// A number that is computed once. It has no lock: in a process forked while another thread held the lock, everybody
/// would wait for ever. Two threads that compute it at the same time find the same number.
#[derive(Debug)]
pub(crate) struct Known(AtomicU64);

impl Known {
    /// The number; NaN stands for "not known yet".
    pub(crate) fn get(&self) -> Option<f64> {
        Some(f64::from_bits(self.0.load(Ordering::Relaxed))).filter(|number| !number.is_nan())
    }

    pub(crate) fn set(&self, number: f64) {
        self.0.store(number.to_bits(), Ordering::Relaxed);
    }
}

impl From<Option<f64>> for Known {
    fn from(number: Option<f64>) -> Self {
        Self(AtomicU64::new(number.unwrap_or(f64::NAN).to_bits()))
    }
}

impl Default for Known {
    fn default() -> Self {
        None.into()
    }
}

impl Clone for Known {
    fn clone(&self) -> Self {
        self.get().into()
    }
}

/// Source of the costs of a packing's pieces.
#[derive(Clone, Debug, Default)]
enum Basis {
    /// Unknown: the packing was read from a file.
    #[default]
    Unknown,
    /// Costs of a model.
    Model(Box<CostModel>),
    /// Costs row by row, with a column for each resource.
    Given(Vec<f64>),
}

impl Certificate {
    pub(crate) fn of_model(model: &CostModel) -> Self {
        Self { basis: Basis::Model(Box::new(model.clone())), ..Self::default() }
    }

    /// A certificate of given costs: one row for each piece, in the order of the packing.
    pub(crate) fn of_rows(rows: Vec<f64>) -> Self {
        Self { basis: Basis::Given(rows), ..Self::default() }
    }

    /// A bound that is known, without its inputs.
    pub(crate) fn of_bound(bound: f64) -> Self {
        Self { bound: Some(bound).into(), ..Self::default() }
    }

    /// The cost model; `None` if documents brought their own costs.
    pub(crate) fn model(&self) -> Option<&CostModel> {
        if let Basis::Model(model) = &self.basis { Some(model) } else { None }
    }

    /// Costs of the pieces in one of several columns; `None` if they are not known.
    pub(crate) fn costs(&self, pieces: &[Piece], column: usize, columns: usize) -> Option<Vec<f64>> {
        match &self.basis {
            Basis::Unknown => None,
            Basis::Model(model) => Some(of_pieces(model, pieces)),
            Basis::Given(rows) => {
                let costs: Vec<f64> = rows.iter().skip(column).step_by(columns).copied().collect();
                (costs.len() == pieces.len()).then_some(costs)
            }
        }
    }

    pub(crate) fn is_unknown(&self) -> bool {
        self.bound.get().is_none()
    }
}

/// Costs of pieces under a model.
fn of_pieces(model: &CostModel, pieces: &[Piece]) -> Vec<f64> {
    model.costs(&pieces.iter().map(|piece| piece.length).collect::<Vec<i32>>())
}

impl PartialEq for Certificate {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Serialize for Certificate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.bound.get().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Certificate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bound = Option::<f64>::deserialize(deserializer)?;
        Ok(Self { basis: Basis::Unknown, bound: bound.into() })
    }
}

/// Empty micro-batches, all alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bins {
    pub(crate) count: usize,
    pub(crate) max_tokens: i32,
    pub(crate) empty_cost: f64,
}

/// Micro-batches with a document that shares them with no other head.
#[derive(Clone, Copy)]
struct Head {
    cost: f64,
    free_tokens: f64,
    count: f64,
}

/// A document that may be cut: its cost per token, its cost and its tokens.
#[derive(Clone, Copy)]
struct Part {
    density: f64,
    cost: f64,
    tokens: f64,
}

/// A lower bound on the heaviest micro-batch of any packing of these pieces into `bins`. The result is at least `from`
/// (a bound that is known) and at most `most` (the heaviest micro-batch of some packing).
///
/// Rounding never lifts the result above the optimum: the greatest possible rounding error of the sums is subtracted.
///
/// # Complexity
/// O(n log n + N log N) for `n` pieces in `N` micro-batches.
pub(crate) fn raised(bins: Bins, pieces: &[Piece], costs: &[f64], from: f64, most: f64) -> f64 {
    let unit = most - bins.empty_cost;
    if pieces.is_empty() || !(from < most && unit > LEAST_COST) {
        return from.min(most);
    }
    let (heads, parts) = divide(bins, pieces, costs, unit);
    // Costs in units of the heaviest micro-batch's cost, so that no sum overflows.
    let mut bound = ((from - bins.empty_cost) / unit).clamp(0.0, 1.0);
    let rounding = 4.0 * f64::EPSILON * (pieces.len() + bins.count) as f64;
    for _ in 0..PASSES {
        let Some(worst) = worst(&heads, &parts, bound, rounding) else { break };
        let before = bound;
        bound = enough(&heads, worst, bound, rounding);
        if bound - before <= GAIN * bound || bound >= SAME {
            break;
        }
    }
    // Packings that cost exactly as much may have two heads together.
    let bound = bound.min(SAME) * (1.0 - 4.0 * f64::EPSILON);
    (bins.empty_cost * (1.0 - 4.0 * f64::EPSILON) + unit * bound).max(from).min(most)
}

/// The heads, ending with an entry for all micro-batches without one; and the other documents, ascending by cost per
/// token.
fn divide(bins: Bins, pieces: &[Piece], costs: &[f64], unit: f64) -> (Vec<Head>, Vec<Part>) {
    let max_tokens = f64::from(bins.max_tokens);
    let (mut heads, mut parts) = (Vec::new(), Vec::new());
    let (mut shortest, mut cheapest, mut apart) = (f64::INFINITY, f64::INFINITY, true);
    for index in costliest_first(costs) {
        let (tokens, cost) = (f64::from(pieces[index].length), costs[index] / unit);
        // A head fits with none of the heads before it.
        apart &= heads.len() < bins.count && (tokens + shortest > max_tokens || cost + cheapest >= SAME);
        if apart {
            (shortest, cheapest) = (shortest.min(tokens), cheapest.min(cost));
            heads.push(Head { cost, free_tokens: max_tokens - tokens, count: 1.0 });
        } else {
            parts.push(Part { density: cost / tokens, cost, tokens });
        }
    }
    heads.push(Head { cost: 0.0, free_tokens: max_tokens, count: (bins.count - heads.len()) as f64 });
    parts.sort_unstable_by(|a, b| a.density.total_cmp(&b.density));
    (heads, parts)
}

/// Demand of the documents at a price of a token.
#[derive(Clone, Copy)]
struct Asked {
    price: f64,
    asked: f64,
}

impl Head {
    /// Cost that the head's micro-batch has free under a bound.
    fn free(&self, bound: f64) -> f64 {
        (bound - self.cost).max(0.0)
    }
}

/// The price with the greatest lack, divided by the number of micro-batches that a higher bound gives more room. `None`
/// if nothing is lacking at any price.
fn worst(heads: &[Head], parts: &[Part], bound: f64, rounding: f64) -> Option<Asked> {
    // Price from which on a micro-batch runs out of cost before it runs out of tokens.
    let mut turns: Vec<(f64, &Head)> = heads.iter().map(|head| (head.free(bound) / head.free_tokens, head)).collect();
    turns.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let mut turns = turns.into_iter().peekable();
    let mut free_tokens: f64 = heads.iter().map(|head| head.count * head.free_tokens).sum();
    let (mut free_cost, mut slope) = (0.0, 0.0);
    let mut tokens: f64 = parts.iter().map(|part| part.tokens).sum();
    let (mut cost, mut most, mut found) = (0.0, 0.0, None);
    for part in parts {
        let price = part.density;
        cost += part.cost;
        tokens -= part.tokens;
        while let Some((_, head)) = turns.next_if(|&(turn, _)| turn.is_nan() || turn <= price) {
            free_cost += head.count * head.free(bound);
            free_tokens -= head.count * head.free_tokens;
            slope += head.count;
        }
        let (asked, held) = (cost + price * tokens, free_cost + price * free_tokens);
        let lacking = asked - held - rounding * (asked + held);
        if lacking > most * slope {
            (most, found) = (lacking / slope, Some(Asked { price, asked }));
        }
    }
    found
}

/// The least bound with which the micro-batches hold the demand.
///
/// The cost that they hold is concave in the bound, so a step along the slope never goes beyond the least bound.
fn enough(heads: &[Head], Asked { price, asked }: Asked, mut bound: f64, rounding: f64) -> f64 {
    for _ in 0..STEPS {
        let (mut held, mut slope) = (0.0, 0.0);
        for head in heads {
            let (free, most) = (head.free(bound), price * head.free_tokens);
            held += head.count * free.min(most);
            slope += if free < most { head.count } else { 0.0 };
        }
        let lacking = asked - held - rounding * (asked + held);
        if !(lacking > 0.0 && slope > 0.0) {
            break;
        }
        bound += lacking / slope;
    }
    bound
}
