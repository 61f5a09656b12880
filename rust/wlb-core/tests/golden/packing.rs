//! `pack.json`: one global batch by every method that has an oracle.

use serde::{Deserialize, Serialize};
use wlb_core::packing::Piece;
use wlb_core::{PackOptions, Packing, pack};

use super::cost::Cost;
use super::file::{Case, hold};
use crate::common::naive;
use crate::common::strategies::{checked, pack_options};

/// `(id, start, length)`.
pub(crate) type Row = (i64, i32, i32);

pub(crate) fn rows<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<Row> {
    pieces.into_iter().map(|piece| (piece.id, piece.start, piece.length)).collect()
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    micro_batches: Vec<Vec<Row>>,
    costs: Vec<f64>,
    assignment: Vec<i32>,
    leftover: Vec<Row>,
    length_fallbacks: usize,
}

impl From<naive::Plan> for Plan {
    fn from(plan: naive::Plan) -> Self {
        Self {
            micro_batches: plan.micro_batches.iter().map(rows).collect(),
            costs: plan.costs,
            assignment: plan.assignment,
            leftover: rows(&plan.leftover),
            length_fallbacks: plan.length_fallbacks,
        }
    }
}

impl From<&Packing> for Plan {
    fn from(packing: &Packing) -> Self {
        Self {
            micro_batches: (0..packing.num_micro_batches()).map(|j| rows(packing.micro_batch(j))).collect(),
            costs: packing.costs.clone(),
            assignment: packing.assignment.clone(),
            leftover: rows(&packing.leftover),
            length_fallbacks: packing.length_fallbacks,
        }
    }
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PackCase {
    lengths: Vec<i32>,
    num_micro_batches: usize,
    max_tokens: i32,
    method: String,
    window: usize,
    cost: Cost,
    #[serde(default)]
    plan: Plan,
}

impl Case for PackCase {
    fn answered(self) -> Self {
        let Self { lengths, num_micro_batches: n, max_tokens, window, .. } = &self;
        let (n, max_tokens, cost) = (*n, *max_tokens, self.cost.model());
        let plan = match self.method.as_str() {
            "original" => naive::original(lengths, n, max_tokens, &cost),
            "fixed_length" => naive::fixed_length(lengths, n * window, max_tokens, &cost),
            "var_length" => naive::var_length(lengths, n, max_tokens, &cost),
            "refined" => naive::refined(lengths, n, max_tokens, &cost),
            other => panic!("{other} has no oracle"),
        };
        Self { plan: plan.into(), ..self }
    }

    fn check_engine(&self) {
        let options = pack_options(self.num_micro_batches, self.max_tokens, self.method.parse().unwrap());
        let options = PackOptions { global_batches: self.window, ..options };
        assert_eq!(Plan::from(&pack(&checked(&self.lengths), &options, &self.cost.model()).unwrap()), self.plan);
    }
}

#[test]
fn packings() {
    hold::<PackCase>("pack.json");
}
