//! `dynamic_cp.json`: plans of the engine, of which the oracle says that they are legal and how long they take.

use serde::{Deserialize, Serialize};
use wlb_core::Schedule;
use wlb_core::dynamic_cp::{DynamicCpOptions, Exchange, Group, GroupSizes, Node, plan_dynamic_cp};
use wlb_core::packing::{Padding, Sync};

use super::cost::Cost;
use super::file::{Case, hold};
use crate::common::check::close;
use crate::common::dynamic_cp::{Works, group_seconds, planned, size_of, step_seconds};
use crate::common::strategies::checked;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct DynamicCpCase {
    lengths: Vec<i32>,
    /// Names of the documents.
    ids: Option<Vec<i64>>,
    cost: Cost,
    machine: Machine,
    /// Of each micro-batch.
    #[serde(default)]
    groups: Vec<Vec<CpGroup>>,
    #[serde(default)]
    seconds: f64,
}

/// Arguments of `wlb.plan_dynamic_cp`: those that are not here have their defaults.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    world_size: usize,
    num_stages: usize,
    max_tokens_per_rank: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_virtual_stages: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schedule: Option<Schedule>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sync: Option<Sync>,
    #[serde(skip_serializing_if = "Option::is_none")]
    multiple_of_tokens: Option<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    token_buckets: Vec<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_documents: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_cp_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_sizes: Option<GroupSizes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks_per_node: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_micro_batches: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_micro_batches: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_micro_batches: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exchange: Option<Prices>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p2p_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batch_seconds: Option<f64>,
}

/// Arguments of `wlb.Exchange`.
#[derive(Clone, Copy, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Prices {
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_per_token: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_per_exchange: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_per_token_in_node: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_per_exchange_in_node: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overlap: Option<f64>,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct CpGroup {
    first_rank: u32,
    cp_size: u32,
    document_ids: Vec<i64>,
    /// Of each rank, where they are padded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    padded_tokens_per_rank: Option<i64>,
    seconds: f64,
}

impl DynamicCpCase {
    fn options(&self) -> DynamicCpOptions {
        let machine = &self.machine;
        let prices = machine.exchange.unwrap_or_default();
        DynamicCpOptions {
            num_virtual_stages: machine.num_virtual_stages.unwrap_or(1),
            schedule: machine.schedule,
            sync: machine.sync.unwrap_or_default(),
            padding: Padding::new(machine.multiple_of_tokens.unwrap_or(1), 1, &machine.token_buckets).unwrap().if_any(),
            max_documents: machine.max_documents,
            max_cp_size: machine.max_cp_size,
            group_sizes: machine.group_sizes.unwrap_or_default(),
            node: machine.ranks_per_node.map(|ranks| Node {
                ranks,
                seconds_per_token: prices.seconds_per_token_in_node.unwrap_or(0.0),
                seconds_per_exchange: prices.seconds_per_exchange_in_node.unwrap_or(0.0),
            }),
            num_micro_batches: machine.num_micro_batches,
            min_micro_batches: machine.min_micro_batches,
            max_micro_batches: machine.max_micro_batches,
            exchange: Exchange {
                seconds_per_token: prices.seconds_per_token.unwrap_or(0.0),
                seconds_per_exchange: prices.seconds_per_exchange.unwrap_or(0.0),
                overlap: prices.overlap.unwrap_or(1.0),
            },
            p2p_seconds: machine.p2p_seconds.unwrap_or(0.0),
            micro_batch_seconds: machine.micro_batch_seconds.unwrap_or(0.0),
            ..DynamicCpOptions::new(machine.world_size, machine.num_stages, machine.max_tokens_per_rank)
        }
    }
}

impl Case for DynamicCpCase {
    fn answered(self) -> Self {
        let (options, cost) = (self.options(), self.cost.model());
        let plan = planned(&self.lengths, &options, &cost, true).unwrap();
        let works = Works::of(&self.lengths, (&cost).into());
        let name = |document: usize| self.ids.as_ref().map_or(document as i64, |ids| ids[document]);
        let (mut groups, mut timed) = (Vec::new(), Vec::new());
        for j in 0..plan.num_micro_batches() {
            let of_micro_batch = plan.groups_of(j).map(|g| {
                let Group { first_rank, cp_size, .. } = plan.groups[g];
                let documents: Vec<usize> = plan.documents[plan.documents_of(g)].iter().map(|&i| i as usize).collect();
                let seconds = group_seconds(&documents, &self.lengths, plan.groups[g].ranks(), &options, &works);
                let tokens: i64 = documents.iter().map(|&document| i64::from(self.lengths[document])).sum();
                let tokens = (tokens + i64::from(cp_size) - 1) / i64::from(cp_size);
                let padded_tokens_per_rank = options.padding.as_ref().map(|padding| size_of(tokens, padding).unwrap());
                let document_ids = documents.into_iter().map(name).collect();
                let timed = Group { first_rank, cp_size, seconds };
                (CpGroup { first_rank, cp_size, document_ids, padded_tokens_per_rank, seconds }, timed)
            });
            let (mine, times) = of_micro_batch.unzip();
            groups.push(mine);
            timed.push(times);
        }
        Self { groups, seconds: step_seconds(&timed, &options), ..self }
    }

    fn check_engine(&self) {
        let (options, cost) = (self.options(), self.cost.model());
        let plan = plan_dynamic_cp(&checked(&self.lengths), self.ids.as_deref(), &options, &cost).unwrap();
        assert!(close(plan.seconds, self.seconds));
        let expected: Vec<i64> = self.groups.iter().flatten().flat_map(|group| group.document_ids.clone()).collect();
        assert_eq!(plan.documents, expected);
        for (index, group) in self.groups.iter().flatten().enumerate() {
            let padded = group.padded_tokens_per_rank;
            assert!(padded.is_none_or(|padded| plan.padded_tokens_per_rank(index) == padded));
        }
    }
}

#[test]
fn dynamic_cp_plans() {
    hold::<DynamicCpCase>("dynamic_cp.json");
}
