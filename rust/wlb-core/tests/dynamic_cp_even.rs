//! Plans whose fullest rank holds fewer tokens: legal whatever the input, and as fast as was asked for.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::dynamic_cp::{fullest, planned, under_way};
use common::machines::{is_small, options};
use common::strategies::{checked, config, cost_model, lengths, llama_7b};
use proptest::prelude::*;
use wlb_core::cost::DocumentCosts;
use wlb_core::dynamic_cp::{Costs, DynamicCpOptions, DynamicCpPlan, plan_dynamic_cp};

/// As legal as ever, no slower than allowed, and never fuller than the plan by seconds alone, whose bound it has.
fn is_evener<'a>(
    lengths: &[i32],
    options: &DynamicCpOptions,
    part: f64,
    costs: impl Into<Costs<'a>>,
) -> Option<(DynamicCpPlan, DynamicCpPlan)> {
    let (costs, small) = (costs.into(), is_small(lengths, options));
    let plan = plan_dynamic_cp(&checked(lengths), None, options, costs).ok()?;
    let even =
        planned(lengths, &DynamicCpOptions { even_tokens: Some(part), ..options.clone() }, costs, small).unwrap();
    assert!(even.seconds <= (1.0 + part) * plan.seconds, "{} is slower than {}", even.seconds, plan.seconds);
    assert!(fullest(&even, 0..even.groups.len()) <= fullest(&plan, 0..plan.groups.len()));
    assert!(under_way(&even, options) <= under_way(&plan, options), "more is under way");
    assert_eq!((even.max_tokens_per_rank, even.lower_bound), (plan.max_tokens_per_rank, plan.lower_bound));
    assert!(even.sweep.last().unwrap().0 <= plan.sweep.last().unwrap().0, "the bound is of fewer micro-batches");
    Some((plan, even))
}

/// Few documents: each plan is made up to nine times, twice.
fn steps() -> impl Strategy<Value = (Vec<i32>, DynamicCpOptions)> {
    (1_i32..4000).prop_flat_map(|longest| (lengths(20, longest), options(longest)))
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn even_plans_are_no_fuller(
        (lengths, options) in steps(), part in prop_oneof![Just(0.0), 0.0..0.1, Just(1.0)], cost in cost_model(),
    ) {
        is_evener(&lengths, &options, part, &cost);
    }

    #[test]
    fn even_plans_of_columns_are_no_fuller(
        (lengths, options, rows) in steps().prop_flat_map(|(lengths, options)| {
            let rows = proptest::collection::vec((1.0..1e3, 1.0..1e3), lengths.len());
            (Just(lengths), Just(options), rows)
        }),
        part in prop_oneof![Just(0.0), 0.0..0.1],
    ) {
        let (values, attention): (Vec<[f64; 2]>, Vec<f64>) = rows.iter().map(|&(a, b)| ([a, b], b / 2.0)).unzip();
        let costs = DocumentCosts::new(values.concat(), rows.len(), 2, &[]);
        if let Ok(costs) = costs {
            is_evener(&lengths, &options, part, Costs::Given { costs: &costs, attention: Some(&attention) });
        }
    }
}

/// Two ranks that share all documents take as long as two with two documents each, and are as full.
#[test]
fn tokens_are_even_where_that_costs_nothing() {
    let options = DynamicCpOptions { num_micro_batches: Some(1), ..DynamicCpOptions::new(2, 1, 200) };
    let costs = DocumentCosts::new(vec![1.0; 4], 4, 1, &[]).unwrap();
    let (plan, even) = is_evener(&[100, 1, 1, 1], &options, 0.0, &costs).unwrap();
    let both = |plan: &DynamicCpPlan| (plan.seconds, fullest(plan, 0..plan.groups.len()));
    assert_eq!((both(&plan), both(&even)), ((2.0, 101), (2.0, 52)));
}

/// Where the fullest micro-batch alone has fewer tokens, those under way together may have more: 462, and not 301.
#[test]
fn no_more_is_under_way() {
    let lengths = [14, 2, 8, 9, 15, 58, 13, 18, 11, 12, 10, 197, 6, 17, 157, 7, 8];
    let costs = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 9.0, 9.0, 1.0, 9.0, 1.0, 4.0, 1.0, 9.0, 9.0, 9.0];
    let options = DynamicCpOptions { micro_batch_seconds: 1.0, ..DynamicCpOptions::new(1, 4, 1000) };
    let costs = DocumentCosts::new(costs.to_vec(), costs.len(), 1, &[]).unwrap();
    let (plan, even) = is_evener(&lengths, &options, 1.0, &costs).unwrap();
    assert_eq!((under_way(&plan, &options), under_way(&even, &options)), (301, 267));
}

/// Of many documents a hundredth of the time is a large part of the fullest rank's memory.
#[test]
fn a_little_time_is_much_memory() {
    let lengths: Vec<i32> = (0..1024_i32).map(|i| if i % 128 == 0 { 131_072 } else { 128 + i * i % 40_009 }).collect();
    let options = DynamicCpOptions::new(64, 8, 8192);
    let (plan, even) = is_evener(&lengths, &options, 0.01, &llama_7b()).unwrap();
    let tokens = |plan: &DynamicCpPlan| fullest(plan, 0..plan.groups.len()) as f64;
    assert!(tokens(&even) < 0.8 * tokens(&plan), "{} of {}", tokens(&even), tokens(&plan));
    let held = |plan: &DynamicCpPlan| under_way(plan, &options) as f64;
    assert!(held(&even) < 0.85 * held(&plan), "{} of {}", held(&even), held(&plan));
}
