//! A stream whose documents bring their costs: plans against the oracle, conservation, bounds, states, errors.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use crate::common::check::close;
use crate::common::cost_stream::{Step, Stream};
use crate::common::strategies::{checked, config, cost_model, lengths, pack_options, packer_config, plain_config};
use proptest::collection::vec;
use proptest::prelude::*;
use wlb_core::cost::DocumentCosts;
use wlb_core::packing::{Packing, Piece};
use wlb_core::stream::{CostTable, Oversize, Packer, PackerConfig, Push, Release, StepShape, StreamMethod};
use wlb_core::{Error, Method, pack};

type Document = (i32, Vec<f64>);

/// What can happen to a packer.
#[derive(Clone, Debug)]
enum Event {
    Push(Vec<Document>, i64),
    Resume,
    ResumeOn(usize),
    Flush,
}

/// A packer whose documents bring up to three columns, some of them memory.
fn cost_config() -> impl Strategy<Value = PackerConfig> {
    let limits = vec(prop_oneof![2 => Just(None), 1 => (1.0..300.0).prop_map(Some)], 0..3);
    (plain_config(), limits).prop_map(|(config, others)| {
        let adaptive = config.release == Release::Adaptive;
        let limits = if adaptive { vec![None] } else { [vec![None], others].concat() };
        // With one column that rises with the length a step is refined as under a cost model: not by this oracle.
        let method = if limits.len() == 1 { StreamMethod::VarLength } else { config.method };
        PackerConfig { cost_model: None, limits: Some(limits), method, ..config }
    })
}

fn documents(config: &PackerConfig, most: usize) -> impl Strategy<Value = Vec<Document>> + use<> {
    let limit = config.max_document_tokens;
    let longest = if config.oversize == Oversize::Error {
        limit
    } else {
        limit.saturating_mul(3).min(limit.saturating_add(5000))
    };
    let limits = config.limits.clone().unwrap();
    lengths(most, longest).prop_flat_map(move |lengths| {
        let limits = limits.clone();
        let cost = prop_oneof![2 => Just(0.0), 2 => (1_u8..5).prop_map(f64::from), 6 => 1e-6..100.0, 1 => 1e-6..1e6];
        vec(vec(cost, limits.len()), lengths.len()).prop_map(move |rows| {
            let limited = |row: Vec<f64>| {
                row.iter()
                    .zip(&limits)
                    .map(|(cost, limit)| limit.map_or(*cost, |limit| f64::min(*cost, limit)))
                    .collect()
            };
            lengths.iter().copied().zip(rows.into_iter().map(limited)).collect()
        })
    })
}

fn stream() -> impl Strategy<Value = (PackerConfig, Vec<Event>)> {
    cost_config().prop_flat_map(|config| {
        let tokens = i64::from(config.max_document_tokens);
        let least = prop_oneof![3 => Just(0), 1 => 1..=tokens, 1 => 1..=tokens.saturating_mul(8), 1 => Just(i64::MAX)];
        let event = prop_oneof![
            10 => (documents(&config, 24), least).prop_map(|(documents, least)| Event::Push(documents, least)),
            2 => Just(Event::Resume),
            1 => (1_usize..8).prop_map(Event::ResumeOn),
            1 => Just(Event::Flush),
        ];
        (Just(config), vec(event, 0..10))
    })
}

fn split_rows(documents: &[Document]) -> (Vec<i32>, Vec<f64>) {
    (documents.iter().map(|(length, _)| *length).collect(), documents.iter().flat_map(|(_, row)| row.clone()).collect())
}

fn push(packer: &mut Packer, documents: &[Document], min_step_tokens: i64) -> wlb_core::Result<Packing> {
    let (lengths, values) = split_rows(documents);
    let columns = packer.config().limits.as_ref().map_or(1, Vec::len);
    let costs = Some(CostTable { values: &values, columns });
    packer.push_pieces(&Push { min_step_tokens, costs, ..Push::new(&checked(&lengths)) })
}

fn loads(packing: &Packing) -> Vec<Vec<f64>> {
    match &packing.columns {
        Some(columns) => columns.costs.chunks(columns.len()).map(<[f64]>::to_vec).collect(),
        None => packing.costs.iter().map(|&cost| vec![cost]).collect(),
    }
}

fn is_the_oracles(packing: &Packing, step: &Step) {
    let micro_batches: Vec<Vec<Piece>> =
        (0..packing.num_micro_batches()).map(|j| packing.micro_batch(j).to_vec()).collect();
    assert_eq!(micro_batches, step.micro_batches);
    assert_eq!(loads(packing), step.loads, "to the last bit");
    assert_eq!(packing.leftover, step.leftover);
    assert_eq!(packing.length_fallbacks, step.fallbacks);
}

fn holds_the_same(packer: &Packer, oracle: &Stream) {
    let waiting = packer.queue().levels().iter().flatten().chain(packer.carried());
    let found: Vec<_> = waiting.map(|w| (w.piece, w.arrived, packer.costs(w).to_vec())).collect();
    let expected: Vec<_> = oracle.pending().into_iter().map(|w| (w.piece, w.arrived, w.costs)).collect();
    assert_eq!(found, expected);
}

/// Tokens and limits are kept, and the figures are those of the definition.
fn is_legal(packing: &Packing, config: &PackerConfig) {
    let limits = config.limits.as_ref().unwrap();
    for (j, load) in loads(packing).iter().enumerate() {
        assert!(packing.tokens[j] <= i64::from(config.max_tokens));
        assert!(load.iter().zip(limits).all(|(load, limit)| limit.is_none_or(|limit| *load <= limit)), "{load:?}");
    }
    let timed = || (0..limits.len()).filter(|&k| limits[k].is_none());
    let max = |k: usize| loads(packing).iter().map(|load| load[k]).fold(0.0, f64::max);
    let sum = |k: usize| loads(packing).iter().map(|load| load[k]).sum::<f64>();
    assert!(close(packing.step_cost(), timed().map(max).sum()));
    let mean = timed().map(sum).sum::<f64>() / packing.num_micro_batches() as f64;
    let expected = if mean > 0.0 && !packing.pieces.is_empty() { packing.step_cost() / mean } else { 1.0 };
    assert!((packing.imbalance() - expected.max(1.0)).abs() < 1e-9, "{} {expected}", packing.imbalance());
    assert!(packing.lower_bound() <= packing.step_cost() * (1.0 + 1e-12));
    assert_eq!(Packing::from_json(&packing.to_json()).unwrap(), *packing);
}

proptest! {
    #![proptest_config(config(200))]

    /// Pushed, saved, loaded, resumed on another `N`, flushed: every plan is the oracle's, and every piece comes out
    /// once with its costs.
    #[test]
    fn streams_are_the_oracles((config, events) in stream()) {
        let mut packer = Packer::new(config.clone()).unwrap();
        let mut oracle = Stream::new(config.clone());
        let columns = config.limits.as_ref().unwrap().len();
        let (mut pushed, mut emitted) = (Vec::new(), Vec::new());
        let (mut brought, mut trained) = (vec![0.0; columns], vec![0.0; columns]);
        let mut imbalances = Vec::new();
        for event in events.iter().chain([&Event::Flush]) {
            let packings = match event {
                Event::Push(documents, least) => {
                    for (index, (length, costs)) in documents.iter().enumerate() {
                        let document = Piece { id: oracle.next_id + index as i64, start: 0, length: *length };
                        for (piece, costs) in oracle.pieces(document, costs) {
                            pushed.push(piece);
                            brought.iter_mut().zip(costs).for_each(|(sum, cost)| *sum += cost);
                        }
                    }
                    let packing = push(&mut packer, documents, *least).unwrap();
                    is_the_oracles(&packing, &oracle.push(documents, *least));
                    imbalances.extend((!packing.pieces.is_empty()).then(|| packing.imbalance()));
                    vec![packing]
                }
                Event::Resume => {
                    let resumed = Packer::load(&packer.save()).unwrap();
                    prop_assert_eq!(&resumed, &packer);
                    packer = resumed;
                    vec![]
                }
                Event::ResumeOn(num_micro_batches) => {
                    let config = PackerConfig { num_micro_batches: *num_micro_batches, ..packer.config().clone() };
                    let mut resumed = Packer::new(config.clone()).unwrap();
                    resumed.restore(&packer.save(), false).unwrap();
                    (packer, oracle.config) = (resumed, config);
                    vec![]
                }
                Event::Flush => {
                    let packings = packer.flush();
                    let steps = oracle.flush();
                    prop_assert_eq!(packings.len(), steps.len());
                    packings.iter().zip(&steps).for_each(|(packing, step)| is_the_oracles(packing, step));
                    packings
                }
            };
            for packing in &packings {
                is_legal(packing, packer.config());
                emitted.extend(packing.pieces.clone());
                for load in loads(packing) {
                    trained.iter_mut().zip(load).for_each(|(sum, cost)| *sum += cost);
                }
            }
            holds_the_same(&packer, &oracle);
        }
        let in_order = |mut pieces: Vec<Piece>| {
            pieces.sort_by_key(|piece| (piece.id, piece.start));
            pieces
        };
        prop_assert_eq!(in_order(emitted), in_order(pushed));
        prop_assert!(brought.iter().zip(&trained).all(|(a, b)| close(*a, *b)), "{:?} {:?}", brought, trained);
        let mean = imbalances.iter().sum::<f64>() / imbalances.len().max(1) as f64;
        prop_assert!(imbalances.is_empty() || close(packer.metrics().imbalance_mean(), mean));
    }

    /// Costs that are those of a cost model make its plans, under either release rule, by either method.
    #[test]
    fn costs_of_a_model_are_the_model(
        config in packer_config(), batches in vec(lengths(40, 4000), 1..6), least in prop_oneof![Just(0_i64), 1..5000_i64],
        model in cost_model(),
    ) {
        // Where one document is longer than another it has to cost more: ties go by index in either way.
        prop_assume!(model.micro_batch() == 0.0 && batches.iter().flatten().all(|&d| model.cost(d + 1) > model.cost(d)));
        let config = PackerConfig { oversize: Oversize::Error, cost_model: Some(model.clone()), ..config };
        let mut by_model = Packer::new(config.clone()).unwrap();
        let mut by_costs = Packer::new(PackerConfig { cost_model: None, limits: Some(vec![None]), ..config.clone() }).unwrap();
        for lengths in &batches {
            let lengths: Vec<i32> = lengths.iter().map(|&length| length.min(config.max_document_tokens)).collect();
            let documents: Vec<Document> = lengths.iter().map(|&length| (length, vec![model.cost(length)])).collect();
            let lengths = checked(&lengths);
            let expected = by_model.push_pieces(&Push { min_step_tokens: least, ..Push::new(&lengths) }).unwrap();
            prop_assert_eq!(push(&mut by_costs, &documents, least).unwrap(), expected);
            prop_assert_eq!(by_costs.admits(&lengths, None).unwrap(), by_model.admits(&lengths, None).unwrap());
        }
        prop_assert_eq!(by_costs.flush(), by_model.flush());
        prop_assert_eq!(by_costs.metrics(), by_model.metrics());
    }

    /// Without queues a push is a pack.
    #[test]
    fn without_queues_a_push_is_a_pack(config in cost_config(), rows in vec(vec(1e-3..100.0, 3), 40), lengths in lengths(40, 500)) {
        let config = PackerConfig {
            release: Release::Fifo, delay_price: None, outlier_thresholds: vec![], oversize: Oversize::Error, max_delay: None,
            shape: StepShape::default(), ..config
        };
        let limits = config.limits.clone().unwrap();
        let documents: Vec<Document> = lengths
            .iter()
            .zip(&rows)
            .map(|(length, row)| {
                let row = row.iter().zip(&limits).map(|(cost, limit)| limit.map_or(*cost, |limit| f64::min(*cost, limit)));
                ((*length).min(config.max_document_tokens), row.collect())
            })
            .collect();
        let (lengths, values) = split_rows(&documents);
        let infinite: Vec<f64> = limits.iter().map(|limit| limit.unwrap_or(f64::INFINITY)).collect();
        let costs = DocumentCosts::new(values, lengths.len(), limits.len(), &infinite).unwrap();
        let method = if config.method == StreamMethod::Refined { Method::Refined } else { Method::VarLength };
        let PackerConfig { num_micro_batches, max_tokens, .. } = config;
        let options = pack_options(num_micro_batches, max_tokens, method);
        let expected = pack(&checked(&lengths), &options, &costs).unwrap();
        prop_assert_eq!(push(&mut Packer::new(config).unwrap(), &documents, 0).unwrap(), expected);
    }

    /// As long as no push brings more than is admitted, what waits stays within the bounds, memory that is scarce
    /// included.
    #[test]
    fn what_waits_stays_within_the_bounds(
        (config, batches) in cost_config().prop_flat_map(|config| {
            let batches = vec(documents(&config, 30), 1..6);
            (Just(config), batches)
        }),
        share in prop_oneof![Just(0.0), 0.0..0.6],
    ) {
        let mut packer = Packer::new(config.clone()).unwrap();
        let bounds = packer.bounds();
        let least = (share * config.num_micro_batches as f64 * f64::from(config.max_tokens)) as i64;
        let mut next: Vec<Document> = batches.concat();
        let columns = config.limits.as_ref().unwrap().len();
        let check = |packer: &Packer| {
            assert!(packer.pending_tokens() <= bounds.tokens, "{} of {bounds:?}", packer.pending_tokens());
            if let Some(delay) = bounds.delay {
                assert!(packer.metrics().delay_max() <= delay && packer.oldest_wait() <= delay, "{bounds:?}: {packer:?}");
            }
        };
        for step in 0.. {
            prop_assert!(step < 400, "no progress: {:?}", packer);
            if next.is_empty() {
                break;
            }
            let (lengths, values) = split_rows(&next);
            let Ok(admitted) = packer.admits(&checked(&lengths), Some(CostTable { values: &values, columns })) else {
                let length = next.remove(0).0;
                prop_assert!(config.oversize == Oversize::Split && length > config.max_document_tokens);
                continue;
            };
            let now: Vec<Document> = next.drain(..admitted).collect();
            push(&mut packer, &now, least.max(1)).unwrap();
            check(&packer);
        }
        let steps = packer.flush().len() as u64;
        prop_assert!(steps <= bounds.drain, "{} steps of {:?}", steps, bounds);
    }
}

fn simple(limits: Vec<Option<f64>>) -> PackerConfig {
    PackerConfig {
        num_micro_batches: 2,
        max_tokens: 100,
        max_document_tokens: 100,
        oversize: Oversize::Split,
        outlier_thresholds: vec![50],
        release: Release::Fifo,
        delay_price: None,
        max_delay: None,
        method: StreamMethod::VarLength,
        cost_model: None,
        limits: Some(limits),
        shape: StepShape::default(),
    }
}

/// A document that is light for its length waits in the queue of its length, and leaves with its costs.
#[test]
fn what_waits_keeps_its_costs() {
    let mut packer = Packer::new(simple(vec![None, None])).unwrap();
    push(&mut packer, &[(60, vec![3.0, 0.0]), (10, vec![1.0, 5.0])], 0).unwrap();
    assert_eq!(packer.costs(&packer.queue().levels()[0][0]), [3.0, 0.0]);
    let packing = push(&mut packer, &[(250, vec![10.0, 0.0])], 0).unwrap();
    // Of its pieces of 100, 100 and 50 tokens two fill the step; the others are carried over, each with its share.
    let carried: Vec<&[f64]> = packer.carried().iter().map(|waiting| packer.costs(waiting)).collect();
    assert_eq!(packing.columns.unwrap().costs, [4.0, 0.0, 4.0, 0.0]);
    assert_eq!(carried, [[3.0, 0.0], [2.0, 0.0]]);
}

/// What the heaviest documents hold back is decided by cost, whatever the lengths are.
#[test]
fn adaptive_holds_back_what_is_costly() {
    let config = PackerConfig {
        release: Release::Adaptive,
        delay_price: Some(0.01),
        outlier_thresholds: vec![],
        ..simple(vec![None])
    };
    let mut packer = Packer::new(config).unwrap();
    let packing = push(&mut packer, &[(10, vec![90.0]), (90, vec![5.0]), (90, vec![5.0])], 0).unwrap();
    assert_eq!((packing.assignment.as_slice(), packing.imbalance()), ([-1, 0, 1].as_slice(), 1.0));
    let packing = push(&mut packer, &[(10, vec![90.0])], 0).unwrap();
    assert_eq!((packing.costs.as_slice(), packer.pending()), ([90.0, 90.0].as_slice(), 0));
}

#[test]
fn what_makes_no_sense_is_named() {
    let made = |config: PackerConfig| Packer::new(config).unwrap_err();
    let good = simple(vec![None, Some(5.0)]);
    let adaptive =
        PackerConfig { release: Release::Adaptive, delay_price: Some(0.1), outlier_thresholds: vec![], ..good.clone() };
    assert!(made(adaptive).to_string().starts_with("cost_columns: the adaptive rule weighs one column"));
    assert_eq!(made(PackerConfig { limits: Some(vec![]), ..good.clone() }).argument(), "cost_columns");
    assert_eq!(made(PackerConfig { limits: Some(vec![Some(1.0)]), ..good.clone() }).argument(), "limits");
    assert_eq!(made(PackerConfig { limits: Some(vec![None, Some(-1.0)]), ..good.clone() }).index(), Some(1));
    assert_eq!(made(PackerConfig { limits: None, ..good.clone() }).argument(), "cost_model");

    let mut packer = Packer::new(good.clone()).unwrap();
    let before = packer.clone();
    for (row, message) in [
        (vec![1.0, -1.0], "costs[0, 1] = -1: must be a finite number, 0 or above"),
        (vec![f64::NAN, 1.0], "costs[0, 0] = NaN: must be a finite number, 0 or above"),
        (vec![1e300, 1.0], "costs[0, 0] = 1"),
        (vec![1.0, 6.0], "costs[0, 1] = 6: exceeds the limit of its column"),
    ] {
        let error = push(&mut packer, &[(10, row)], 0).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
    // In pieces of 100 tokens and less it has room.
    push(&mut packer.clone(), &[(200, vec![1.0, 6.0])], 0).unwrap();
    let table = |values, columns| Some(CostTable { values, columns });
    let two = checked(&[10, 20]);
    let refused = |costs| packer.clone().push_pieces(&Push { costs, ..Push::new(&two) }).unwrap_err().to_string();
    assert_eq!(refused(table(&[1.0; 6], 3)), "costs has 3 entries, but a row of this packer's (cost_columns) has 2");
    assert_eq!(refused(table(&[1.0; 6], 2)), "costs has 3 entries, but lengths has 2");
    assert!(refused(None).starts_with("costs: are missing"));
    assert!(packer.admits(&two, None).is_err());
    let mut by_model =
        Packer::new(PackerConfig { limits: None, cost_model: Some(crate::common::strategies::llama_7b()), ..good })
            .unwrap();
    let error = by_model.push_pieces(&Push { costs: table(&[1.0, 2.0], 1), ..Push::new(&two) }).unwrap_err();
    assert!(error.to_string().starts_with("costs: must not be given: this packer"), "{error}");
    let error = packer.set_cost_model(crate::common::strategies::llama_7b()).unwrap_err();
    assert_eq!(error.argument(), "cost_model");
    packer.push_pieces(&Push::new(&checked(&[]))).unwrap();
    assert_eq!(packer.pending(), before.pending());
}

/// What waits goes on only where its costs are of use, and within the limits.
#[test]
fn another_configuration_takes_what_it_can() {
    let mut packer = Packer::new(simple(vec![None, Some(5.0)])).unwrap();
    push(&mut packer, &[(60, vec![1.0, 4.0])], 0).unwrap();
    let text = packer.save();
    let restored = |limits: Option<Vec<Option<f64>>>| {
        let cost_model = limits.is_none().then(crate::common::strategies::llama_7b);
        let mut other = Packer::new(PackerConfig { limits, cost_model, ..simple(vec![None]) }).unwrap();
        other.restore(&text, true).map(|()| other)
    };
    let same = restored(Some(vec![None, Some(4.5)])).unwrap();
    assert_eq!(same.costs(&same.queue().levels()[0][0]), [1.0, 4.0]);
    assert!(matches!(restored(Some(vec![None, Some(3.0)])), Err(Error::State { .. })));
    assert!(matches!(restored(Some(vec![None])), Err(Error::State { .. })));
    let mut by_length = restored(None).unwrap();
    assert_eq!(Packer::load(&by_length.save()).as_ref(), Ok(&by_length));
    assert_eq!(by_length.flush().len(), 1);
    let mut strict = Packer::new(simple(vec![None, Some(4.5)])).unwrap();
    let refused = strict.restore(&text, false).unwrap_err().to_string();
    assert!(refused.contains("limits: saved [null,5.0], now [null,4.5]"), "{refused}");
}

/// A state whose costs were changed is refused.
#[test]
fn forged_costs_are_refused() {
    let mut packer = Packer::new(simple(vec![None, Some(5.0)])).unwrap();
    push(&mut packer, &[(60, vec![1.0, 4.0])], 0).unwrap();
    let text = packer.save();
    assert!(text.contains("\"costs\":[1.0,4.0]"));
    for costs in ["[1.0]", "[1.0,4.5]", "[1.0,-4.0]", "[1.0,9.0]", "null"] {
        let forged = text.replace("\"costs\":[1.0,4.0]", &format!("\"costs\":{costs}"));
        assert!(matches!(Packer::load(&forged), Err(Error::State { .. })), "{costs}");
    }
}
