//! The micro-batch of each document while a packing is being made: for whole documents, and for pieces of cut ones.

use crate::cost::CostModel;

use super::certificate::Certificate;
use super::columns::Columns;
use super::options::Method;
use super::piece::Piece;
use super::plan::Packing;
use super::pricing::Pricing;

/// Micro-batches of whole documents; filled by the methods that keep documents whole.
#[derive(Clone)]
pub(crate) struct Placement {
    pub(crate) assignment: Vec<i32>,
    pub(crate) tokens: Vec<i64>,
    pub(crate) costs: Vec<f64>,
    /// Indices of documents without room, in the order in which they were tried.
    pub(crate) leftover: Vec<usize>,
    pub(crate) length_fallbacks: usize,
    /// Tokens of the longest document that was placed.
    longest: i32,
    /// Cost of a micro-batch without documents.
    empty_cost: f64,
}

impl Placement {
    /// A placement without documents; an empty micro-batch costs `empty_cost`.
    pub(crate) fn new(num_documents: usize, num_micro_batches: usize, empty_cost: f64) -> Self {
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

    /// A placement of the same size with nothing placed.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.assignment.len(), self.tokens.len(), self.empty_cost)
    }

    /// Cost of a micro-batch without documents.
    pub(crate) fn empty_cost(&self) -> f64 {
        self.empty_cost
    }

    #[inline]
    pub(crate) fn put(&mut self, index: usize, micro_batch: usize, length: i32, cost: f64) {
        self.assignment[index] = micro_batch as i32;
        self.tokens[micro_batch] += i64::from(length);
        self.costs[micro_batch] += cost;
        self.longest = self.longest.max(length);
    }

    pub(crate) fn max_cost(&self) -> f64 {
        self.costs.iter().copied().fold(0.0, f64::max)
    }

    /// The packing, if the costs come from a model.
    pub(crate) fn into_packing(
        self,
        method: Option<Method>,
        max_tokens: i32,
        cost_model: &CostModel,
        piece: impl Fn(usize) -> Piece,
    ) -> Packing {
        // The longest document has the greatest cost, since cost never decreases with length.
        let largest_cost = self.empty_cost + if self.longest > 0 { cost_model.cost(self.longest) } else { 0.0 };
        let certificate = Certificate::of_model(cost_model);
        Packing { certificate, ..self.into_packing_of(method, max_tokens, largest_cost, piece) }
    }

    /// Lists the pieces of each micro-batch in document order: a counting sort.
    pub(crate) fn into_packing_of(
        self,
        method: Option<Method>,
        max_tokens: i32,
        largest_cost: f64,
        piece: impl Fn(usize) -> Piece,
    ) -> Packing {
        let num_micro_batches = self.tokens.len();
        // One slot more: documents that are left over (-1) are counted in the first slot, which is cut off afterwards.
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
            forest: None,
            certificate: Certificate::default(),
        }
    }
}

/// Micro-batches of pieces; filled by the methods that cut documents.
pub(crate) struct Cuts {
    placed: Vec<(usize, Piece)>,
    tokens: Vec<i64>,
    leftover: Vec<Piece>,
}

impl Cuts {
    pub(crate) fn new(num_documents: usize, num_micro_batches: usize) -> Self {
        Self { placed: Vec::with_capacity(num_documents), tokens: vec![0; num_micro_batches], leftover: Vec::new() }
    }

    pub(crate) fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    pub(crate) fn put(&mut self, micro_batch: usize, piece: Piece) {
        self.tokens[micro_batch] += i64::from(piece.length);
        self.placed.push((micro_batch, piece));
    }

    pub(crate) fn leave_over(&mut self, piece: Piece) {
        self.leftover.push(piece);
    }

    pub(crate) fn into_packing(
        self,
        method: Method,
        max_tokens: i32,
        lengths: &[i32],
        pricing: Pricing<'_>,
    ) -> Packing {
        let (empty_cost, by_length, certificate) = match pricing {
            Pricing::Model(model) => {
                let of_pieces: Vec<i32> = self.placed.iter().map(|&(_, piece)| piece.length).collect();
                (model.micro_batch(), model.costs(&of_pieces), Certificate::of_model(model))
            }
            Pricing::Given(_) => (0.0, Vec::new(), Certificate::default()),
        };
        let mut costs = vec![empty_cost; self.tokens.len()];
        let mut columns = match pricing {
            Pricing::Given(given) if given.columns() > 1 => Some(Columns::none(given.limits(), self.tokens.len())),
            _ => None,
        };
        let mut largest_cost = 0.0_f64;
        let mut assignment = vec![-1; lengths.len()];
        let mut counts = vec![0_usize; self.tokens.len()];
        for (at, &(micro_batch, piece)) in self.placed.iter().enumerate() {
            let cost = match pricing {
                Pricing::Model(_) => by_length[at],
                // A piece has the share of its document's cost that it has of its tokens.
                Pricing::Given(given) => {
                    let share = f64::from(piece.length) / f64::from(lengths[piece.id as usize]);
                    let row = given.row(piece.id as usize).iter().map(|cost| cost * share);
                    columns.iter_mut().for_each(|columns| columns.put(micro_batch, row.clone()));
                    row.zip(given.limits()).filter(|(_, limit)| limit.is_none()).map(|(cost, _)| cost).sum()
                }
            };
            costs[micro_batch] += cost;
            largest_cost = largest_cost.max(cost);
            counts[micro_batch] += 1;
            if piece.length == lengths[piece.id as usize] {
                assignment[piece.id as usize] = micro_batch as i32;
            }
        }
        let mut placed = self.placed;
        placed.sort_unstable_by_key(|&(micro_batch, piece)| (micro_batch, piece.id, piece.start));
        let mut offsets = vec![0; 1];
        for count in counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }
        Packing {
            method: Some(method),
            max_tokens,
            global_batches: 1,
            pieces: placed.into_iter().map(|(_, piece)| piece).collect(),
            offsets,
            assignment,
            tokens: self.tokens,
            costs,
            leftover: self.leftover,
            length_fallbacks: 0,
            largest_cost: empty_cost + largest_cost,
            columns,
            ranks: None,
            padding: None,
            forest: None,
            certificate,
        }
    }
}
