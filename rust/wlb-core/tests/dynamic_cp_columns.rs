//! Dynamic-CP plans of documents that cost several resources: legal, as long as they say, no slower than a plan by the
//! sum, and close to the optimum and to the bound where these are known.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::dynamic_cp::{optimum, planned};
use common::machines::{is_small, steps};
use common::strategies::{checked, config, lengths};
use proptest::prelude::*;
use proptest::sample::select;
use wlb_core::cost::DocumentCosts;
use wlb_core::dynamic_cp::{
    Communication, Costs, DynamicCpOptions, DynamicCpPlan, plan_dynamic_cp, step_seconds_by_column,
};
use wlb_core::{Error, Lengths};

fn table(rows: &[Vec<f64>]) -> DocumentCosts {
    let columns = rows.first().map_or(2, Vec::len);
    DocumentCosts::new(rows.concat(), rows.len(), columns, &[]).unwrap()
}

/// What each document costs in two or three columns, and how much of the last is attention.
fn rows(documents: usize) -> impl Strategy<Value = (Vec<Vec<f64>>, Vec<f64>)> {
    let cost = || prop_oneof![2 => Just(0.0), 3 => 1.0..1e3, 1 => 1e3..1e6];
    let part = prop_oneof![Just(0.0), Just(1.0), 0.0..1.0];
    (2_usize..4).prop_flat_map(move |columns| {
        let row = proptest::collection::vec(cost(), columns);
        proptest::collection::vec((row, part.clone()), documents).prop_map(|documents| {
            documents.into_iter().map(|(row, part)| (row.clone(), row[row.len() - 1] * part)).unzip()
        })
    })
}

/// The plan by the sum of the columns, and what its step takes by all of them.
fn by_sum(lengths: &[i32], options: &DynamicCpOptions, rows: &[Vec<f64>], attention: &[f64]) -> (DynamicCpPlan, f64) {
    let sums: Vec<f64> = rows.iter().map(|row| row.iter().sum()).collect();
    let sums = DocumentCosts::new(sums, rows.len(), 1, &[]).unwrap();
    let costs = Costs::Given { costs: &sums, attention: Some(attention) };
    let plan = plan_dynamic_cp(&checked(lengths), None, options, costs).unwrap();
    let seconds = judged(&plan, lengths, options, rows, attention);
    (plan, seconds)
}

/// What a plan's step takes by all columns.
fn judged(
    plan: &DynamicCpPlan,
    lengths: &[i32],
    options: &DynamicCpOptions,
    rows: &[Vec<f64>],
    attention: &[f64],
) -> f64 {
    let costs = table(rows);
    let works = common::dynamic_cp::Works::of(lengths, Costs::Given { costs: &costs, attention: Some(attention) });
    let seconds = common::dynamic_cp::column_seconds(plan, lengths, options, &works);
    step_seconds_by_column(&plan.groups, &seconds, works.len(), &plan.group_offsets, options).unwrap().iter().sum()
}

proptest! {
    #![proptest_config(config(300))]

    /// Every document once, groups aligned, memory kept, times those of the naive simulation, bounds that bound; and no
    /// slower than the plan by the sum.
    #[test]
    fn plans_of_columns_are_legal(
        (lengths, options, (rows, attention)) in steps().prop_flat_map(|(lengths, options)| {
            let rows = rows(lengths.len());
            (Just(lengths), Just(options), rows)
        }),
    ) {
        let small = is_small(&lengths, &options);
        let costs = table(&rows);
        let plan = planned(&lengths, &options, Costs::Given { costs: &costs, attention: Some(&attention) }, small);
        if let Some(plan) = plan.filter(|_| !rows.is_empty()) {
            let (_, seconds) = by_sum(&lengths, &options, &rows, &attention);
            prop_assert!(plan.seconds <= seconds * (1.0 + 1e-9), "{} is above {seconds}", plan.seconds);
        }
    }

    /// Columns in which nothing costs anything change nothing but what is searched.
    #[test]
    fn idle_columns_take_no_time(
        lengths in lengths(100, 20_000), world_size in 1_usize..33, num_stages in 1_usize..5, p2p_seconds in 0.0..1e4,
    ) {
        let options = DynamicCpOptions { p2p_seconds, ..DynamicCpOptions::new(world_size, num_stages, 20_000) };
        let rows: Vec<Vec<f64>> = lengths.iter().map(|&length| vec![0.0, f64::from(length)]).collect();
        let costs = table(&rows);
        let plan = planned(&lengths, &options, &costs, false).unwrap();
        prop_assert_eq!(plan.seconds_by_column[0], 0.0);
        let (_, seconds) = by_sum(&lengths, &options, &rows, &vec![0.0; rows.len()]);
        prop_assert!(plan.seconds <= seconds * (1.0 + 1e-9));
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// Against all plans there are: never better than the best, and the bound never above it.
    #[test]
    fn tiny_plans_of_columns_are_close_to_the_optimum(
        documents in proptest::collection::vec((1_i32..40, 0.0..100.0, 0.0..100.0, 0.0..1.0), 1..4),
        shape in select(vec![(2_usize, 1_usize, 2_usize), (2, 2, 2), (3, 1, 1), (4, 1, 1), (3, 2, 1), (1, 3, 4)]),
        max_tokens in 20_i32..60, free in any::<bool>(), p2p_seconds in select(vec![0.0, 40.0]),
    ) {
        let (world_size, num_stages, m) = shape;
        let mut options = DynamicCpOptions {
            num_micro_batches: Some(m), p2p_seconds, ..DynamicCpOptions::new(world_size, num_stages, max_tokens)
        };
        if !free {
            options.communication = Communication { seconds_per_exchange: 5.0, seconds_per_token: 2.0, overlap: 0.5 };
            options.micro_batch_seconds = 3.0;
        }
        let lengths: Vec<i32> = documents.iter().map(|document| document.0).collect();
        let rows: Vec<Vec<f64>> = documents.iter().map(|document| vec![document.1, document.2 + 1.0]).collect();
        let attention: Vec<f64> = documents.iter().map(|document| document.2 * document.3).collect();
        let costs = table(&rows);
        let costs = Costs::Given { costs: &costs, attention: Some(&attention) };
        let best = optimum(&lengths, &options, costs, m);
        if let Some(plan) = planned(&lengths, &options, costs, true) {
            let best = best.unwrap();
            prop_assert!(plan.lower_bound <= best * (1.0 + 1e-9), "{} is above the optimum {best}", plan.lower_bound);
            prop_assert!(plan.seconds >= best * (1.0 - 1e-9));
            prop_assert!(plan.seconds <= best * 3.0, "{} is far above the optimum {best}", plan.seconds);
        }
    }
}

/// Images in some documents, and text in all, which one does not tell from the other: 512 documents.
fn vision_and_language(seed: u64) -> (Vec<i32>, Vec<Vec<f64>>) {
    let mut state = seed;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1_u32 << 31)
    };
    let documents = (0..512).map(|_| {
        let (image, patches, text) = (draw() < 0.5, 256.0 + 4000.0 * draw(), 100.0 + 4000.0 * draw());
        let patches = if image { patches } else { 0.0 };
        let length = text + patches / 4.0;
        let encoder = patches * (3000.0 + patches);
        (length as i32, vec![encoder, length * (15_000.0 + length)])
    });
    documents.unzip()
}

/// Where no document dominates, both resources are level on all ranks: the step is what nothing beats but for 1 %,
/// where a plan by the sum is far from it. With several stages the bound knows little of filling and draining.
#[test]
fn columns_are_level_on_all_ranks() {
    for (num_stages, most, seed) in [(1, 1.01, 1), (1, 1.01, 2), (4, 1.08, 3), (8, 1.09, 4)] {
        let (lengths, rows) = vision_and_language(seed);
        let options = DynamicCpOptions::new(64, num_stages, 8192);
        let plan = planned(&lengths, &options, &table(&rows), false).unwrap();
        let over = plan.seconds / plan.lower_bound;
        assert!(over < most, "{num_stages} stages: {over}");
        let (_, seconds) = by_sum(&lengths, &options, &rows, &[0.0; 512]);
        assert!(plan.seconds < 0.97 * seconds, "{} is not far below {seconds}", plan.seconds);
    }
}

#[test]
fn errors_name_the_wrong_column() {
    let lengths = Lengths::new("lengths", &[50, 60]).unwrap();
    let plan = |rows: &[Vec<f64>], attention: Option<&[f64]>, overlap: f64| {
        let communication = Communication { seconds_per_token: 1.0, overlap, ..Communication::default() };
        let options = DynamicCpOptions { communication, ..DynamicCpOptions::new(12, 4, 100) };
        plan_dynamic_cp(&lengths, None, &options, Costs::Given { costs: &table(rows), attention })
    };
    let rows = [vec![9.0, 1.0], vec![9.0, 2.0]];
    assert!(plan(&rows, Some(&[1.0, 2.0]), 0.5).is_ok());
    let error = plan(&rows, Some(&[1.0, 2.5]), 0.5).unwrap_err();
    assert!(matches!(error, Error::Entry { argument: "attention_costs", index: 1, .. }), "{error}");
    let error = plan(&rows, None, 0.5).unwrap_err();
    assert!(matches!(error, Error::Combination { argument: "attention_costs", .. }), "{error}");
    let error = plan(&[vec![1e200, 1.0], vec![1.0, 1e200]], None, 0.0).unwrap_err();
    assert!(matches!(error, Error::Cell { argument: "costs", row: 0, .. }), "{error}");
    let error = plan(&rows[..1], None, 0.0).unwrap_err();
    assert!(matches!(error, Error::Mismatch { argument: "costs", found: 1, expected: 2, .. }), "{error}");

    let plan = plan(&rows, None, 0.0).unwrap();
    let options = DynamicCpOptions::new(12, 4, 100);
    let seconds = |seconds: &[f64]| step_seconds_by_column(&plan.groups, seconds, 2, &plan.group_offsets, &options);
    let mut others = plan.column_seconds.clone();
    assert!(seconds(&others).is_ok());
    assert!(matches!(seconds(&others[1..]).unwrap_err(), Error::Combination { argument: "group_seconds", .. }));
    others[3] = f64::NAN;
    let error = seconds(&others).unwrap_err();
    assert!(matches!(error, Error::Cell { argument: "group_seconds", row: 1, column: Some(1), .. }), "{error}");
}
