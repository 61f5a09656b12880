//! A bound on the work of a step: kept but for what is due, however documents come; and no difference where it does not
//! bind.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::strategies::{checked, config, lengths, packer_config};
use proptest::prelude::*;
use wlb_core::packing::{Packing, Piece};
use wlb_core::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Error, Mask};

fn bounded(max_cost: Option<f64>) -> PackerConfig {
    PackerConfig {
        num_micro_batches: 4,
        max_tokens: 150,
        max_document_tokens: 100,
        oversize: Oversize::Split,
        outlier_thresholds: Vec::new(),
        release: Release::Adaptive,
        delay_price: Some(0.03),
        max_delay: Some(16),
        method: StreamMethod::VarLength,
        cost_model: Some(CostModel::analytic(1.0, 20.0, Mask::Causal).unwrap()),
        limits: None,
        shape: StepShape { max_cost, ..StepShape::default() },
    }
}

fn work(packing: &Packing, model: &CostModel) -> f64 {
    packing.pieces.iter().map(|piece| model.cost(piece.length)).sum()
}

proptest! {
    #![proptest_config(config(300))]

    /// What makes a step exceed the bound is due, or the only document of the step. The mean is of all that was pushed:
    /// streams here are too short to forget.
    #[test]
    fn more_than_the_bound_is_due(
        config in packer_config(), batches in prop::collection::vec(lengths(30, 4000), 1..12), max_cost in 0.05..3.0,
    ) {
        let model = config.cost_model.clone().unwrap();
        let config = PackerConfig {
            release: Release::Adaptive, delay_price: Some(0.03), outlier_thresholds: Vec::new(), oversize: Oversize::Truncate,
            shape: StepShape { max_cost: Some(max_cost), ..config.shape.clone() }, ..config
        };
        let global_batch = config.tokens_per_batch() as f64;
        let mut packer = Packer::new(config.clone()).unwrap();
        let (mut cost, mut tokens) = (0.0, 0.0);
        for batch in &batches {
            let batch: Vec<i32> = batch.iter().map(|&length| length.min(config.max_document_tokens)).collect();
            cost += batch.iter().map(|&length| model.cost(length)).sum::<f64>();
            tokens += batch.iter().map(|&length| f64::from(length)).sum::<f64>();
            if tokens > 256.0 * global_batch {
                break;
            }
            let due = |packer: &Packer| -> Vec<Piece> {
                let now = packer.iteration();
                let late = |arrived: u64| config.max_delay.is_some_and(|delay| now - arrived >= delay);
                let waiting = packer.queue().levels().iter().flatten();
                let late = waiting.filter(|waiting| late(waiting.arrived)).chain(packer.carried());
                late.map(|waiting| waiting.piece).collect()
            };
            let urgent = due(&packer);
            let before = packer.metrics().steps_over_max_cost;
            let packing = packer.push(&checked(&batch), None).unwrap();
            let budget = max_cost * (cost / tokens) * global_batch;
            let over = work(&packing, &model) > budget * (1.0 + 1e-9);
            if over {
                // What may wait for no iteration is due when it comes.
                let due = config.max_delay == Some(0) || packing.pieces.iter().all(|piece| urgent.contains(piece));
                prop_assert!(due || packing.pieces.len() == 1, "{:?} of {:?}", packing.pieces, urgent);
                prop_assert_eq!(packer.metrics().steps_over_max_cost, before + 1);
            }
            prop_assert!(packer.pending() == 0 || !packing.pieces.is_empty(), "something waits, and nothing leaves");
        }
    }

    /// A bound that nothing reaches changes no plan and no metric.
    #[test]
    fn a_bound_that_does_not_bind_changes_nothing(
        config in packer_config(), batches in prop::collection::vec(lengths(40, 4000), 1..6),
    ) {
        let config = PackerConfig {
            release: Release::Adaptive, delay_price: Some(0.03), outlier_thresholds: Vec::new(), oversize: Oversize::Truncate,
            ..config
        };
        let shape = |max_cost| StepShape { max_cost, ..config.shape.clone() };
        let mut free = Packer::new(PackerConfig { shape: shape(None), ..config.clone() }).unwrap();
        let mut bounded = Packer::new(PackerConfig { shape: shape(Some(1e200)), ..config.clone() }).unwrap();
        for batch in &batches {
            let batch = checked(batch);
            prop_assert_eq!(free.push(&batch, None).unwrap(), bounded.push(&batch, None).unwrap());
            prop_assert_eq!(free.metrics(), bounded.metrics());
        }
        prop_assert_eq!(free.flush(), bounded.flush());
    }
}

/// One document of a context in every global batch: held until four of them fill a step, or, bounded, spread over
/// steps.
#[test]
fn long_documents_are_spread_over_steps() {
    let heaviest = |max_cost: Option<f64>| {
        let config = bounded(max_cost);
        let model = config.cost_model.clone().unwrap();
        let mut packer = Packer::new(config).unwrap();
        let batch: Vec<i32> = std::iter::repeat_n(10, 30).chain([100]).collect();
        let steps: Vec<f64> =
            (0..200).map(|_| work(&packer.push(&checked(&batch), None).unwrap(), &model)).skip(20).collect();
        assert!(packer.metrics().delay_max() <= 16);
        let mean = steps.iter().sum::<f64>() / steps.len() as f64;
        steps.iter().copied().fold(0.0, f64::max) / mean
    };
    let (free, spread) = (heaviest(None), heaviest(Some(1.3)));
    assert!(free > 1.5, "nothing to bound: {free}");
    // The bound is of a full global batch, and these bring 400 of its 400 tokens.
    assert!(spread < 1.35, "{spread}");
}

/// A packer that reads half as many tokens in a step as it has contexts: the bound is told in these.
#[test]
fn the_bound_is_of_the_global_batch_that_is_read() {
    let model = bounded(None).cost_model.unwrap();
    let heaviest = |tokens_per_batch: Option<i64>| {
        let shape = StepShape { tokens_per_batch, ..bounded(Some(1.3)).shape };
        let mut packer = Packer::new(PackerConfig { shape, ..bounded(None) }).unwrap();
        let batch: Vec<i32> = std::iter::repeat_n(10, 10).chain([100]).collect();
        let steps: Vec<f64> =
            (0..200).map(|_| work(&packer.push(&checked(&batch), None).unwrap(), &model)).skip(20).collect();
        assert_eq!(packer.metrics().steps_over_max_cost, 0);
        steps.iter().copied().fold(0.0, f64::max) / (steps.iter().sum::<f64>() / steps.len() as f64)
    };
    assert!(heaviest(Some(200)) <= 1.3 + 1e-9);
    assert!(heaviest(None) > 1.6, "of 400 tokens, twice what comes");
}

/// The mean work of a step under other costs is that of the documents that come after the change.
#[test]
fn other_costs_begin_another_mean() {
    let batch = checked(&std::iter::repeat_n(10, 30).chain([100]).collect::<Vec<i32>>());
    let mut packer = Packer::new(bounded(Some(1.3))).unwrap();
    for _ in 0..50 {
        packer.push(&batch, None).unwrap();
    }
    packer.push(&checked(&[100; 4]), None).unwrap();
    let model = CostModel::analytic(30.0, 1.0, Mask::Causal).unwrap();
    packer.set_cost_model(model.clone()).unwrap();
    let mut fresh = Packer::new(PackerConfig { cost_model: Some(model), ..bounded(Some(1.3)) }).unwrap();
    for packer in [&mut packer, &mut fresh] {
        packer.push(&batch, None).unwrap();
    }
    let arrived = |packer: &Packer| {
        let text = packer.save();
        let from = text.find("\"arrived\":").unwrap();
        text[from..].split_once('}').unwrap().0.to_owned()
    };
    assert_eq!(arrived(&packer), arrived(&fresh));
}

#[test]
fn what_makes_no_sense_is_named() {
    for tokens in [0, -1, 601] {
        let shape = StepShape { tokens_per_batch: Some(tokens), ..StepShape::default() };
        let error = Packer::new(PackerConfig { shape, ..bounded(None) }).unwrap_err().to_string();
        assert_eq!(error, format!("tokens_per_batch = {tokens}: must be from 1 to 600"));
    }
    for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Packer::new(bounded(Some(value))).unwrap_err();
        assert!(matches!(error, Error::Number { argument: "max_step_cost", .. }), "{error}");
    }
    let fifo = PackerConfig { release: Release::Fifo, delay_price: None, ..bounded(Some(1.5)) };
    let error = Packer::new(fifo).unwrap_err();
    assert!(error.to_string().starts_with("max_step_cost: needs release=\"adaptive\""), "{error}");
}

/// The mean is part of the state, and a forged one is refused.
#[test]
fn the_mean_is_part_of_the_state() {
    let mut packer = Packer::new(bounded(Some(1.3))).unwrap();
    packer.push(&checked(&[100, 100, 30, 30, 30, 10]), None).unwrap();
    let text = packer.save();
    assert!(text.contains("\"arrived\":{\"cost\":"));
    let mut resumed = Packer::load(&text).unwrap();
    let next = checked(&[100, 90, 30, 30, 30, 10, 10]);
    assert_eq!(resumed.push(&next, None).unwrap(), packer.push(&next, None).unwrap());
    let forged = text.replace("\"arrived\":{\"cost\":", "\"arrived\":{\"cost\":-");
    assert!(matches!(Packer::load(&forged), Err(Error::State { .. })));
    let mut free = Packer::new(bounded(None)).unwrap();
    let refused = free.restore(&text, false).unwrap_err().to_string();
    assert!(refused.contains("max_step_cost: saved 1.3, now None"), "{refused}");
    free.restore(&text, true).unwrap();
    assert!(Packer::load(&free.save()).is_ok());
}
