//! Where whole documents are put while a packing is made.

use crate::cost::CostModel;

use super::certificate::Certificate;
use super::options::Method;
use super::piece::Piece;
use super::plan::Packing;

/// Where whole documents were put: what the packing methods that keep documents whole fill in.
#[derive(Clone)]
pub(super) struct Placement {
    pub(super) assignment: Vec<i32>,
    pub(super) tokens: Vec<i64>,
    pub(super) costs: Vec<f64>,
    /// Indices of documents, in the order tried.
    pub(super) leftover: Vec<usize>,
    pub(super) length_fallbacks: usize,
    /// Longest document placed.
    longest: i32,
    /// Cost of a micro-batch without documents.
    empty_cost: f64,
}

impl Placement {
    /// Nothing put anywhere yet; a micro-batch without documents costs `empty_cost`.
    pub(super) fn new(num_documents: usize, num_micro_batches: usize, empty_cost: f64) -> Self {
        Self {
            assignment: vec![-1; num_documents],
            tokens: vec![0; num_micro_batches],
            costs: vec![empty_cost; num_micro_batches],
            leftover: Vec::new(),
            length_fallbacks: 0,
            longest: 0,
            empty_cost,
        }
    }

    /// The same documents and micro-batches, nothing put anywhere yet.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.assignment.len(), self.tokens.len(), self.empty_cost)
    }

    /// The same documents, each placed elsewhere; nothing left over yet.
    pub(super) fn rearranged(&self, assignment: Vec<i32>, tokens: Vec<i64>, costs: Vec<f64>) -> Self {
        let Self { length_fallbacks, longest, empty_cost, .. } = *self;
        Self { assignment, tokens, costs, leftover: Vec::new(), length_fallbacks, longest, empty_cost }
    }

    /// Cost of a micro-batch without documents.
    pub(super) fn empty_cost(&self) -> f64 {
        self.empty_cost
    }

    #[inline]
    pub(super) fn put(&mut self, index: usize, micro_batch: usize, length: i32, cost: f64) {
        self.assignment[index] = micro_batch as i32;
        self.tokens[micro_batch] += i64::from(length);
        self.costs[micro_batch] += cost;
        self.longest = self.longest.max(length);
    }

    pub(super) fn max_cost(&self) -> f64 {
        self.costs.iter().copied().fold(0.0, f64::max)
    }

    /// The packing of documents that cost what the model says.
    pub(super) fn into_packing(
        self,
        method: Option<Method>,
        max_tokens: i32,
        cost_model: &CostModel,
        piece: impl Fn(usize) -> Piece,
    ) -> Packing {
        // Cost never decreases with length.
        let largest_cost = self.empty_cost + if self.longest > 0 { cost_model.cost(self.longest) } else { 0.0 };
        let certificate = Certificate::of_model(cost_model);
        Packing { certificate, ..self.into_packing_of(method, max_tokens, largest_cost, piece) }
    }

    /// Lists the pieces of each micro-batch in document order: a counting sort.
    pub(super) fn into_packing_of(
        self,
        method: Option<Method>,
        max_tokens: i32,
        largest_cost: f64,
        piece: impl Fn(usize) -> Piece,
    ) -> Packing {
        let num_micro_batches = self.tokens.len();
        // One slot more: what is left over (-1) is counted in the first and cut off the front.
        let mut cursors = vec![0_usize; num_micro_batches + 1];
        for &micro_batch in &self.assignment {
            cursors[(micro_batch + 1) as usize] += 1;
        }
        cursors[0] = 0;
        let mut offsets = Vec::with_capacity(num_micro_batches + 1);
        let mut total = 0;
        offsets.push(0);
        for cursor in &mut cursors[1..] {
            (*cursor, total) = (total, total + *cursor);
            offsets.push(total);
        }
        let mut pieces = vec![Piece { id: 0, start: 0, length: 0 }; total];
        for (index, &micro_batch) in self.assignment.iter().enumerate() {
            if micro_batch >= 0 {
                let cursor = &mut cursors[(micro_batch + 1) as usize];
                pieces[*cursor] = piece(index);
                *cursor += 1;
            }
        }
        Packing {
            method,
            max_tokens,
            global_batches: 1,
            pieces,
            offsets,
            assignment: self.assignment,
            tokens: self.tokens,
            costs: self.costs,
            leftover: self.leftover.into_iter().map(piece).collect(),
            length_fallbacks: self.length_fallbacks,
            largest_cost,
            columns: None,
            ranks: None,
            padding: None,
            certificate: Certificate::default(),
        }
    }
}
