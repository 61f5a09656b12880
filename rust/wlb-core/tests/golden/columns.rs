//! `columns.json`: documents that bring their costs, in columns.

use serde::{Deserialize, Serialize};
use wlb_core::cost::DocumentCosts;
use wlb_core::pack;

use super::file::{Case, hold};
use crate::common::columns::Batch;
use crate::common::strategies::{checked, pack_options};

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ColumnsCase {
    lengths: Vec<i32>,
    costs: Vec<Vec<f64>>,
    /// None for a column that takes time.
    limits: Vec<Option<f64>>,
    num_micro_batches: usize,
    max_tokens: i32,
    method: String,
    #[serde(default)]
    plan: Plan,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    assignment: Vec<i32>,
    column_costs: Vec<Vec<f64>>,
    leftover: Vec<i64>,
    length_fallbacks: usize,
}

impl ColumnsCase {
    fn limits(&self) -> Vec<f64> {
        self.limits.iter().map(|limit| limit.unwrap_or(f64::INFINITY)).collect()
    }
}

impl Case for ColumnsCase {
    fn answered(self) -> Self {
        let batch = Batch {
            lengths: self.lengths.clone(),
            costs: self.costs.clone(),
            limits: self.limits(),
            micro_batches: self.num_micro_batches,
            max_tokens: self.max_tokens,
        };
        let plan = match self.method.as_str() {
            "var_length" => batch.levelled(&batch.var_length()),
            "refined" => batch.refined(&batch.var_length()),
            other => panic!("{other} has no oracle"),
        };
        let plan = Plan {
            assignment: plan.assignment.iter().map(|j| j.map_or(-1, |j| j as i32)).collect(),
            column_costs: plan.loads,
            leftover: plan.leftover.iter().map(|&index| index as i64).collect(),
            length_fallbacks: plan.fallbacks,
        };
        Self { plan, ..self }
    }

    fn check_engine(&self) {
        let columns = self.limits.len();
        let costs = DocumentCosts::new(self.costs.concat(), self.lengths.len(), columns, &self.limits()).unwrap();
        let options = pack_options(self.num_micro_batches, self.max_tokens, self.method.parse().unwrap());
        let packing = pack(&checked(&self.lengths), &options, &costs).unwrap();
        // Of one column there is no need to keep more.
        let costs = packing.columns.as_ref().map_or(&packing.costs, |columns| &columns.costs);
        let found = Plan {
            column_costs: costs.chunks(columns).map(<[f64]>::to_vec).collect(),
            leftover: packing.leftover.iter().map(|piece| piece.id).collect(),
            length_fallbacks: packing.length_fallbacks,
            assignment: packing.assignment,
        };
        assert_eq!(found, self.plan);
    }
}

#[test]
fn columns() {
    hold::<ColumnsCase>("columns.json");
}
