//! Cost of documents against the formulas written out.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::check::close;
use crate::common::naive::{naive_local_pairs, naive_pairs};
use crate::common::strategies::{checked, config, cost_model, llama_7b_flops, mask, rates, tables};
use proptest::prelude::*;
use wlb_core::cost::{FlopsOptions, LocalMask, Passes, Rates};
use wlb_core::{CostModel, Error, Lengths, Mask};

const ANY_LENGTH: std::ops::RangeInclusive<i32> = 1..=i32::MAX;

/// A short or a long document.
fn length() -> impl Strategy<Value = i32> {
    prop_oneof![1..300, 1..200_000, ANY_LENGTH]
}

#[test]
fn pairs_of_a_small_document_are_counted_one_by_one() {
    for d in 1..40 {
        let mut causal = 0;
        for query in 0..d {
            causal += (0..=query).count() as u64;
        }
        assert_eq!((Mask::Causal.pairs(d), Mask::Full.pairs(d)), (causal, (d * d) as u64));
    }
}

#[test]
fn pairs_under_windows_and_in_chunks_are_counted_one_by_one() {
    for size in 1..20 {
        for mask in [LocalMask::Window(size), LocalMask::Chunk(size)] {
            for d in 0..70 {
                assert_eq!(mask.pairs(d), naive_local_pairs(mask, d), "{mask:?} {d}");
            }
        }
    }
}

#[test]
fn the_most_pairs_do_not_overflow() {
    for mask in [LocalMask::Window(i32::MAX), LocalMask::Chunk(i32::MAX)] {
        assert_eq!(mask.pairs(i32::MAX), Mask::Causal.pairs(i32::MAX));
    }
    let d = i128::from(i32::MAX);
    let half = 1 << 30;
    assert_eq!(i128::from(LocalMask::Window(half).pairs(i32::MAX)), {
        let w = i128::from(half);
        w * (w + 1) / 2 + (d - w) * w
    });
}

/// A model of before there was a choice of terms keeps its JSON, and with it its fingerprint.
#[test]
fn a_plain_model_has_the_json_it_always_had() {
    let plain = CostModel::analytic(1.5, 100.0, Mask::Causal).unwrap();
    assert_eq!(plain.to_json(), r#"{"attention":{"rate":1.5},"linear":{"rate":100.0},"mask":"causal"}"#);
    let rates = Rates { attention: 1.5, linear: 100.0, windows: vec![(7, 0.0)], ..Rates::default() };
    assert_eq!(CostModel::from_rates(&rates).unwrap(), plain);
}

#[test]
fn a_window_or_chunk_that_no_document_fills_is_none() {
    let none = Rates { attention: 1.75, linear: 2.0, windows: vec![(7, 3.0)], ..Rates::default() };
    let whole = Rates {
        attention: 1.0,
        windows: vec![(7, 3.0), (i32::MAX, 0.25), (i32::MAX, 0.25)],
        chunks: vec![(i32::MAX, 0.25)],
        ..none.clone()
    };
    assert_eq!(CostModel::from_rates(&whole).unwrap(), CostModel::from_rates(&none).unwrap());
    let longest = Rates { windows: vec![(i32::MAX - 1, 1.0)], ..Rates::default() };
    assert_eq!(CostModel::from_rates(&longest).unwrap().rates().unwrap(), longest);
    // Its rate does not make a wrong one right.
    let negative = Rates { attention: -1.0, windows: vec![(i32::MAX, 2.0)], ..Rates::default() };
    assert_eq!(CostModel::from_rates(&negative).unwrap_err().argument(), "attention");
}

#[test]
fn terms_that_make_no_sense_are_named() {
    let good = Rates { linear: 1.0, ..Rates::default() };
    let argument = |rates: Rates| CostModel::from_rates(&rates).unwrap_err().argument();
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(argument(Rates { document: bad, ..good.clone() }), "document");
        assert_eq!(argument(Rates { micro_batch: bad, ..good.clone() }), "micro_batch");
        assert_eq!(argument(Rates { windows: vec![(8, bad)], ..good.clone() }), "windows");
        assert_eq!(argument(Rates { chunks: vec![(8, bad)], ..good.clone() }), "chunks");
    }
    assert_eq!(argument(Rates { windows: vec![(0, 1.0)], ..good.clone() }), "windows");
    assert_eq!(argument(Rates { chunks: vec![(8, 1.0), (8, 1.0)], ..good.clone() }), "chunks");
    assert_eq!(argument(Rates { windows: vec![(8, 1.0)], mask: Mask::Full, ..good.clone() }), "windows");
    // A micro-batch's constant alone leaves nothing to balance.
    assert_eq!(argument(Rates { micro_batch: 1.0, ..Rates::default() }), "linear");
    assert!(CostModel::from_rates(&Rates { document: 1.0, ..Rates::default() }).is_ok());
    assert!(
        CostModel::from_json(r#"{"attention":{"rate":1.0},"linear":{"rate":1.0},"mask":"full","chunks":[[4,1.0]]}"#)
            .is_err()
    );
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn local_pairs_are_exact(d in 0..3000_i32, size in 1..4000_i32, cut in 0.0..1.0) {
        let first = (f64::from(d) * cut) as i32;
        for mask in [LocalMask::Window(size), LocalMask::Chunk(size)] {
            prop_assert_eq!(mask.pairs(d), naive_local_pairs(mask, d));
            let parts = mask.segment_pairs(0, first) + mask.segment_pairs(first, d - first);
            prop_assert_eq!(parts, mask.pairs(d));
        }
    }

    #[test]
    fn local_pairs_are_rounded_once(d in length(), size in length()) {
        for mask in [LocalMask::Window(size), LocalMask::Chunk(size)] {
            prop_assert_eq!(mask.pairs_f64(d), mask.pairs(d) as f64);
            prop_assert!(mask.pairs(d) <= Mask::Causal.pairs(d));
        }
    }

    #[test]
    fn a_cost_is_the_sum_of_its_terms(rates in rates(), d in length()) {
        let model = CostModel::from_rates(&rates).unwrap();
        let mut attention = rates.attention * Mask::Causal.pairs(d) as f64;
        for &(size, rate) in &rates.windows {
            attention += rate * LocalMask::Window(size).pairs(d) as f64;
        }
        for &(size, rate) in &rates.chunks {
            attention += rate * LocalMask::Chunk(size).pairs(d) as f64;
        }
        prop_assert_eq!(model.attention_cost(d), attention);
        prop_assert_eq!(model.cost(d), attention + rates.linear * f64::from(d) + rates.document);
        prop_assert_eq!((model.document(), model.micro_batch(), model.unit()), (rates.document, rates.micro_batch, rates.unit));
        prop_assert_eq!(model.rates(), Some(rates));
    }

    #[test]
    fn pairs_are_exact(d in length(), mask in mask()) {
        prop_assert_eq!(i128::from(mask.pairs(d)), naive_pairs(mask, d));
    }

    /// Causal: query `i` of a segment sees `start + i + 1` keys. Cut anywhere, the parts are the whole.
    #[test]
    fn segments_add_up_to_the_document(d in length(), cut in 0.0..1.0, mask in mask()) {
        let first = (f64::from(d) * cut) as i32;
        let parts = mask.segment_pairs(0, first, d) + mask.segment_pairs(first, d - first, d);
        prop_assert_eq!(parts, mask.pairs(d));
        let (s, l) = (i128::from(first), i128::from(d - first));
        let expected = if mask == Mask::Causal { l * s + l * (l + 1) / 2 } else { l * i128::from(d) };
        prop_assert_eq!(i128::from(mask.segment_pairs(first, d - first, d)), expected);
    }

    /// To the last bit: every rank must find the same number.
    #[test]
    fn an_analytic_cost_is_the_formula(d in length(), attention in 1e-12..1e6, linear in 1e-12..1e9, mask in mask()) {
        let model = CostModel::analytic(attention, linear, mask).unwrap();
        let pairs = naive_pairs(mask, d) as f64;
        prop_assert_eq!(model.cost(d).to_bits(), (attention * pairs + linear * f64::from(d)).to_bits());
        prop_assert_eq!(model.attention_cost(d), attention * pairs);
        prop_assert_eq!(model.linear_cost(d), linear * f64::from(d));
        prop_assert_eq!(model.mask(), mask);
    }

    #[test]
    fn many_costs_are_the_costs_of_each(lengths in crate::common::strategies::lengths(40, i32::MAX), model in cost_model()) {
        let expected: Vec<u64> = lengths.iter().map(|&d| model.cost(d).to_bits()).collect();
        let found: Vec<u64> = model.costs(&lengths).into_iter().map(f64::to_bits).collect();
        prop_assert_eq!(found, expected);
    }

    /// Up to the last bit of a table's interpolation.
    #[test]
    fn longer_documents_never_cost_less(a in length(), b in length(), model in cost_model()) {
        prop_assert!(model.cost(a.min(b)) <= model.cost(a.max(b)) * (1.0 + 1e-12));
        prop_assert!(model.cost(a) > 0.0);
    }

    #[test]
    fn tables_are_lines_between_their_knots((lengths, attention, linear, mask) in tables(), d in length()) {
        let model = CostModel::from_tables(&checked(&lengths), &attention, &linear, mask).unwrap();
        let line = |work: &dyn Fn(i32) -> f64, table: &[f64]| {
            let knots: Vec<(f64, f64)> = std::iter::once((0.0, 0.0))
                .chain(lengths.iter().map(|&d| work(d)).zip(table.iter().copied()))
                .collect();
            let x = work(d);
            match knots.windows(2).find(|pair| x <= pair[1].0) {
                Some(pair) => {
                    let share = (x - pair[0].0) / (pair[1].0 - pair[0].0);
                    pair[0].1 * (1.0 - share) + pair[1].1 * share
                }
                None => knots[knots.len() - 1].1 * x / knots[knots.len() - 1].0,
            }
        };
        prop_assert!(close(model.attention_cost(d), line(&|d| naive_pairs(mask, d) as f64, &attention)));
        prop_assert!(close(model.linear_cost(d), line(&f64::from, &linear)));
        for (index, &knot) in lengths.iter().enumerate() {
            prop_assert!(close(model.attention_cost(knot), attention[index]));
            prop_assert!(close(model.linear_cost(knot), linear[index]));
        }
    }

    #[test]
    fn flops_follow_the_shape(
        sizes in (
            1..20_000_i64, 1..60_000_i64, 1..200_i64, 1..200_i64, 1..200_i64, 1..512_i64, 1..300_000_i64, 1..9_i64,
        ),
        (gated_ffn, recompute) in any::<(bool, bool)>(),
        (attention_efficiency, flops_per_second) in (0.05..1.0, 1.0..1e15),
        passes in prop_oneof![Just(Passes::Forward), Just(Passes::Backward), Just(Passes::ForwardBackward)],
        (d, mask) in (1..1_000_000, mask()),
    ) {
        let (h, ffn, layers, heads, kv, hd, vocab, experts) = sizes;
        let model = CostModel::from_flops(&FlopsOptions {
            hidden_size: h,
            ffn_hidden_size: ffn,
            num_layers: layers,
            num_heads: heads,
            num_kv_heads: kv,
            head_dim: hd,
            vocab_size: vocab,
            gated_ffn,
            experts_per_token: experts,
            attention_efficiency,
            flops_per_second,
            passes,
            recompute,
            mask,
        })
        .unwrap();
        let matrices = if gated_ffn { 3 } else { 2 };
        let attention_parameters = h * heads * hd + 2 * h * kv * hd + heads * hd * h;
        let parameters = layers * (attention_parameters + matrices * h * ffn * experts) + h * vocab;
        // (forward, backward) in units of a forward.
        let weigh = |backward: f64| match passes {
            Passes::Forward => 1.0,
            Passes::Backward => backward + if recompute { 1.0 } else { 0.0 },
            Passes::ForwardBackward => 1.0 + backward + if recompute { 1.0 } else { 0.0 },
        };
        let pair_flops = (4 * heads * hd * layers) as f64 * naive_pairs(mask, d) as f64;
        let attention = pair_flops * weigh(2.5) / attention_efficiency / flops_per_second;
        let linear = 2.0 * parameters as f64 * f64::from(d) * weigh(2.0) / flops_per_second;
        prop_assert!(close(model.attention_cost(d), attention));
        prop_assert!(close(model.linear_cost(d), linear));
    }

    /// Written and read back, a model is the same to the last bit.
    #[test]
    fn a_model_survives_json(model in cost_model(), d in length()) {
        let again = CostModel::from_json(&model.to_json()).unwrap();
        prop_assert_eq!(again.cost(d).to_bits(), model.cost(d).to_bits());
        prop_assert_eq!(again, model);
    }

    /// Only finite rates, 0 or above and not both 0, make a model.
    #[test]
    fn rates_are_checked(attention in any::<f64>(), linear in any::<f64>(), mask in mask()) {
        let legal = |rate: f64| rate.is_finite() && rate >= 0.0;
        let expected = legal(attention) && legal(linear) && (attention > 0.0 || linear > 0.0);
        prop_assert_eq!(CostModel::analytic(attention, linear, mask).is_ok(), expected);
    }

    /// One bad knot anywhere is named.
    #[test]
    fn a_bad_knot_is_named((lengths, mut attention, linear, mask) in tables(), at in any::<prop::sample::Index>(),
        bad in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(0.0), Just(-1.0)],
    ) {
        let at = at.index(lengths.len());
        attention[at] = bad;
        let error = CostModel::from_tables(&checked(&lengths), &attention, &linear, mask).unwrap_err();
        prop_assert_eq!(error.index(), Some(at));
        prop_assert!(error.argument().starts_with("attention"));
    }

    #[test]
    fn a_length_out_of_range_is_named(
        mut values in prop::collection::vec(1..=i64::from(i32::MAX), 1..50),
        at in any::<prop::sample::Index>(),
        bad in prop_oneof![Just(0), Just(-1), Just(1_i64 << 31), Just(1_i64 << 32 | 5), any::<i64>()],
    ) {
        let at = at.index(values.len());
        values[at] = bad;
        let legal = (1..=i64::from(i32::MAX)).contains(&bad);
        let expected = if legal { None } else { Some(Error::Length { argument: "lengths", index: at, value: bad }) };
        prop_assert_eq!(Lengths::new("lengths", &values).err(), expected);
    }
}

#[test]
fn a_cost_beyond_floats_is_an_error_that_names_the_longest() {
    let model = CostModel::analytic(1e300, 0.0, Mask::Causal).unwrap();
    let error = model.check_finite(&[1, 1_000_000, 5]).unwrap_err();
    assert_eq!(error, Error::InfiniteCost { argument: "lengths", index: 1, value: 1_000_000 });
}

#[test]
fn a_shape_without_a_size_is_named() {
    let error = CostModel::from_flops(&FlopsOptions { num_layers: 0, ..llama_7b_flops() }).unwrap_err();
    assert_eq!(error.argument(), "num_layers");
    for attention_efficiency in [0.0, 55.0] {
        let error = CostModel::from_flops(&FlopsOptions { attention_efficiency, ..llama_7b_flops() }).unwrap_err();
        assert_eq!(error.argument(), "attention_efficiency");
    }
}
