//! A packer saved and loaded: the same packer, or an error that says why not.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::forge::{numbers, refused_or_equal, sign, sign_digest, works_if_accepted};
use crate::common::strategies::{config, stream};
use crate::common::stream::{Event, run};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::Value;
use wlb_core::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Error, Lengths, Mask};

/// A packer with something in every field.
fn full() -> Packer {
    let config = PackerConfig {
        num_micro_batches: 3,
        max_tokens: 120,
        max_document_tokens: 100,
        oversize: Oversize::Split,
        outlier_thresholds: vec![40, 80],
        release: Release::Fifo,
        delay_price: None,
        max_delay: Some(4),
        method: StreamMethod::VarLength,
        cost_model: Some(CostModel::analytic(0.5, 10.0, Mask::Causal).unwrap()),
        limits: None,
        shape: StepShape::default(),
    };
    let events = [Event::Push(vec![50, 7, 90, 30, 30]), Event::Push(vec![39; 12]), Event::Push(vec![85, 39, 250])];
    let packer = run(&config, &events);
    assert!(packer.queue().levels().iter().all(|level| !level.is_empty()) && !packer.carried().is_empty());
    packer
}

/// A packer that finds what has to wait, with documents waiting and one carried over.
fn adaptive() -> Packer {
    let config = PackerConfig {
        outlier_thresholds: Vec::new(),
        release: Release::Adaptive,
        delay_price: Some(0.01),
        max_delay: Some(1),
        method: StreamMethod::Refined,
        ..full().config().clone()
    };
    // More than fits, so that some is late.
    let packer = run(&config, &[Event::Push(vec![100; 7]), Event::Push(vec![50, 90])]);
    assert!(!packer.queue().is_empty() && !packer.carried().is_empty());
    packer
}

/// A packer that was told other costs twice.
fn repriced() -> Packer {
    let mut packer = full();
    for attention in [1.0, 2.0] {
        packer.set_cost_model(CostModel::analytic(attention, 10.0, Mask::Causal).unwrap()).unwrap();
        packer.push(&Lengths::new("lengths", &[30, 90]).unwrap(), None).unwrap();
    }
    packer
}

/// The values of a JSON document that hold no others, as paths to them.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(index, item)| leaves(item, &format!("{path}/{index}"), found));
        }
        Value::Object(items) if !items.is_empty() => {
            items.iter().for_each(|(key, item)| leaves(item, &format!("{path}/{key}"), found));
        }
        _ => found.push(path.to_owned()),
    }
}

/// Other values that could stand in a leaf's place.
fn variants(leaf: &Value) -> Vec<Value> {
    let mut variants = vec![Value::Null, Value::from("x"), Value::from(1.5), Value::Bool(true), Value::from(vec![1])];
    variants.extend([-1, 0, 1, i64::MAX, i64::MIN].map(Value::from));
    variants.extend([u64::MAX.into(), f64::MAX.into()]);
    if let Some(number) = leaf.as_i64() {
        variants.extend([number.wrapping_add(1), number.wrapping_sub(1), number.wrapping_mul(2)].map(Value::from));
    }
    if let Some(number) = leaf.as_f64() {
        variants.extend([number * 2.0, number.next_up(), number.next_down()].map(Value::from));
    }
    if let Some(text) = leaf.as_str() {
        variants.extend([text.to_uppercase(), text.chars().rev().collect(), String::new()].map(Value::from));
    }
    variants
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn what_was_saved_is_loaded((config, events) in stream(8, 30)) {
        let packer = run(&config, &events);
        let text = packer.save();
        assert_eq!(Packer::load(&text).as_ref(), Ok(&packer));
        // Key order and white space are a JSON writer's own affair.
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(Packer::load(&value.to_string()).as_ref(), Ok(&packer));
        assert_eq!(Packer::load(&serde_json::to_string_pretty(&value).unwrap()).as_ref(), Ok(&packer));
    }

    #[test]
    fn a_changed_byte_is_noticed((config, events) in stream(4, 20), at in any::<Index>(), byte in 0_u8..128) {
        let packer = run(&config, &events);
        let mut bytes = packer.save().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        refused_or_equal(&String::from_utf8(bytes).unwrap(), &packer);
    }

    #[test]
    fn a_changed_leaf_is_noticed((config, events) in stream(4, 20), at in any::<Index>(), other in any::<Index>()) {
        let packer = run(&config, &events);
        let mut state: Value = serde_json::from_str(&packer.save()).unwrap();
        let mut paths = Vec::new();
        leaves(&state, "", &mut paths);
        let leaf = state.pointer_mut(&paths[at.index(paths.len())]).unwrap();
        *leaf = other.get(&variants(leaf)).clone();
        refused_or_equal(&state.to_string(), &packer);
    }

    #[test]
    fn a_cut_state_is_refused((config, events) in stream(4, 20), at in any::<Index>()) {
        let text = run(&config, &events).save();
        assert!(matches!(Packer::load(&text[..at.index(text.len())]), Err(Error::State { .. })));
    }

    /// Numbers changed by someone who also knows how to sign: refused, or a packer that works; never a panic.
    #[test]
    fn a_forged_state_is_refused_or_works(
        (config, events) in stream(4, 20), edits in prop::collection::vec((any::<Index>(), any::<Index>()), 1..4),
    ) {
        let mut text = run(&config, &events).save();
        for (at, by) in edits {
            let span = at.get(&numbers(&text)).clone();
            let old: f64 = text[span.clone()].parse().unwrap();
            let near = [old - 1.0, old + 1.0, old * 2.0].map(|number| format!("{}", number as i64));
            let extreme =
                ["0", "-1", "1", "1.5", "2147483647", "2147483648", "9007199254740991", "18446744073709551615"];
            let choices: Vec<&str> = near.iter().map(String::as_str).chain(extreme).collect();
            text.replace_range(span, choices[by.index(choices.len())]);
        }
        works_if_accepted(&sign(&text));
    }
}

#[test]
fn any_byte_changed_anywhere_is_noticed() {
    let packer = full();
    let text = packer.save();
    for at in 0..text.len() {
        for byte in [b'0', b'1', b'9', b'-', b'.', b'e', b' ', b'"', b',', b'}', b'x', 0, text.as_bytes()[at] ^ 1] {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = byte;
            refused_or_equal(&String::from_utf8(bytes).unwrap(), &packer);
        }
    }
}

#[test]
fn any_leaf_changed_or_missing_is_noticed() {
    for packer in [full(), adaptive(), repriced()] {
        every_leaf_counts(&packer);
    }
}

fn every_leaf_counts(packer: &Packer) {
    let state: Value = serde_json::from_str(&packer.save()).unwrap();
    let mut paths = Vec::new();
    leaves(&state, "", &mut paths);
    for path in &paths {
        for variant in variants(state.pointer(path).unwrap()) {
            let mut changed = state.clone();
            *changed.pointer_mut(path).unwrap() = variant;
            refused_or_equal(&changed.to_string(), packer);
        }
        let (parent, key) = path.rsplit_once('/').unwrap();
        let mut without = state.clone();
        match without.pointer_mut(parent).unwrap() {
            Value::Array(items) => drop(items.remove(key.parse().unwrap())),
            Value::Object(items) => drop(items.remove(key)),
            _ => unreachable!("a leaf stands in an array or an object"),
        }
        refused_or_equal(&without.to_string(), packer);
    }
}

/// The tests above prove something only if a state that was not changed passes, and a signature can be forged.
#[test]
fn an_unchanged_state_is_signed_as_it_was() {
    for packer in [full(), adaptive(), repriced()] {
        assert_eq!(sign(&packer.save()), packer.save());
    }
    let text = full().save();
    assert!(numbers(&text).len() > 20);
}

#[test]
fn forged_contradictions_are_refused() {
    let of_full = [
        ("\"iteration\":3", "\"iteration\":1", "waiting documents from the future"),
        ("\"next_id\":20", "\"next_id\":2", "an id that waits would be given again"),
        ("\"outlier_thresholds\":[40,80]", "\"outlier_thresholds\":[40]", "a queue without a threshold"),
        ("\"outlier_thresholds\":[40,80]", "\"outlier_thresholds\":[60,80]", "lengths in the wrong level"),
        ("\"outlier_thresholds\":[40,80]", "\"outlier_thresholds\":[80,40]", "thresholds that descend"),
        ("\"max_document_tokens\":100", "\"max_document_tokens\":99", "a document too long"),
        ("\"max_tokens\":120", "\"max_tokens\":99", "a document that fits nowhere"),
        ("\"num_micro_batches\":3", "\"num_micro_batches\":0", "no micro-batches"),
        ("\"steps\":3", "\"steps\":4", "statistics of steps that never were"),
        ("\"version\":1", "\"version\":2", "another version"),
        ("wlb.packer", "wlb.picker", "another format"),
    ];
    let of_adaptive = [
        ("\"delay_price\":0.01,", "", "an adaptive packer without a price"),
        ("\"release\":\"adaptive\"", "\"release\":\"fifo\"", "a price without a meaning"),
        ("\"delay_price\":0.01", "\"delay_price\":-0.01", "a price below nothing"),
        ("\"outlier_thresholds\":[]", "\"outlier_thresholds\":[40]", "a threshold without a meaning"),
        ("\"method\":\"refined\"", "\"method\":\"fixed_length\"", "a method that no packer has"),
        ("\"queues\":[{", "\"queues\":[{\"ids\":[],\"starts\":[],\"lengths\":[],\"arrived\":[]},{", "two levels"),
    ];
    let of_repriced = [(
        "\"first_cost_model\":{\"attention\":{\"rate\":0.5}",
        "\"first_cost_model\":{\"attention\":{\"rate\":-0.5}",
        "costs below 0",
    )];
    let contradictions = [(full(), &of_full[..]), (adaptive(), &of_adaptive[..]), (repriced(), &of_repriced[..])];
    for (packer, changes) in contradictions {
        let text = packer.save();
        for (from, to, why) in changes {
            assert!(text.contains(from), "{from} is not in {text}");
            let forged = sign(&text.replacen(from, to, 1));
            assert!(matches!(Packer::load(&forged), Err(Error::State { .. })), "accepted: {why}");
        }
    }
    let text = full().save();
    let other = full().config().fingerprint().chars().rev().collect::<String>();
    let forged = sign_digest(&text.replacen(&full().config().fingerprint(), &other, 1)).unwrap();
    assert!(matches!(Packer::load(&forged), Err(Error::State { path, .. }) if path == "fingerprint"));
}

/// Costs that were told later belong to the state, and a packer made with the first ones goes on with them.
#[test]
fn later_costs_come_with_the_state() {
    let packer = repriced();
    assert_eq!(&packer.first_config(), full().config());
    let mut made_alike = Packer::new(full().config().clone()).unwrap();
    made_alike.restore(&packer.save(), false).unwrap();
    assert_eq!(made_alike, packer);
    // One that was made with what the other has learnt is another one.
    let mut made_with_the_last = Packer::new(packer.config().clone()).unwrap();
    let refused = made_with_the_last.restore(&packer.save(), false);
    assert!(matches!(refused, Err(Error::ConfigChanged { fields }) if fields.starts_with("cost_model")));
    made_with_the_last.restore(&packer.save(), true).unwrap();
    assert_eq!((made_with_the_last.config(), &made_with_the_last.first_config()), (packer.config(), packer.config()));
    let mut other = packer.clone();
    // Costs whose sums overflow change nothing.
    let before = other.clone();
    let refused = other.set_cost_model(CostModel::analytic(f64::MAX, 0.0, Mask::Causal).unwrap());
    assert!(matches!(refused, Err(Error::Number { argument: "cost_model", .. })));
    assert_eq!(other, before);
}

#[test]
fn foreign_texts_are_refused() {
    for text in ["", "null", "[]", "{}", "3", "\"wlb.packer\"", "{\"format\":\"wlb.packer\",\"version\":1}", "\u{0}"] {
        assert!(matches!(Packer::load(text), Err(Error::State { .. })), "accepted {text:?}");
    }
    let deep = "[".repeat(100_000);
    assert!(Packer::load(&deep).is_err());
    let twice = full().save().repeat(2);
    assert!(Packer::load(&twice).is_err());
}
