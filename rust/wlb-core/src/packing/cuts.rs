//! Where pieces of cut documents are put while a packing is made.

use super::certificate::Certificate;
use super::columns::Columns;
use super::options::Method;
use super::piece::Piece;
use super::plan::Packing;
use super::pricing::Pricing;

/// Where pieces of cut documents were put: what the packing methods that cut documents fill in.
pub(super) struct Cuts {
    placed: Vec<(usize, Piece)>,
    tokens: Vec<i64>,
    leftover: Vec<Piece>,
}

impl Cuts {
    pub(super) fn new(num_documents: usize, num_micro_batches: usize) -> Self {
        Self { placed: Vec::with_capacity(num_documents), tokens: vec![0; num_micro_batches], leftover: Vec::new() }
    }

    pub(super) fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    pub(super) fn put(&mut self, micro_batch: usize, piece: Piece) {
        self.tokens[micro_batch] += i64::from(piece.length);
        self.placed.push((micro_batch, piece));
    }

    pub(super) fn leave_over(&mut self, piece: Piece) {
        self.leftover.push(piece);
    }

    pub(super) fn into_packing(
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
                // A part of a document has the part of its cost that it has of its tokens.
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
            certificate,
        }
    }
}
