//! One global batch: every method against its oracle and its guarantees.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use crate::common::bound;
use crate::common::check;
use crate::common::columns::Batch;
use crate::common::naive;
use crate::common::strategies::{
    Memory, checked, config, cost_model, lengths, memory, num_micro_batches, pack_options,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use wlb_core::cost::DocumentCosts;
use wlb_core::limits::MAX_MICRO_BATCHES;
use wlb_core::packing::{Padding, Piece, batch_offsets, split_documents};
use wlb_core::{CostModel, Error, Leftover, Mask, Method, PackOptions, Packing, pack, pack_whole};

const METHODS: [Method; 4] = [Method::Original, Method::FixedLength, Method::VarLength, Method::Refined];

fn pack_var_length(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost: &CostModel) -> Packing {
    let options = pack_options(num_micro_batches, max_tokens, Method::VarLength);
    pack(&checked(lengths), &options, cost).unwrap()
}

proptest! {
    #![proptest_config(config(400))]

    /// Every method: the oracle bit for bit, each document once, never over `max_tokens`, the certificate, the promise
    /// of `var_length_fast`, and the same plan from its own assignment.
    #[test]
    fn plans_are_the_oracles(
        lengths in lengths(600, 130_000), n in num_micro_batches(), g in 1_usize..4, memory in memory(1000),
        cost in cost_model(),
    ) {
        let longest = lengths.iter().copied().max().unwrap_or(1);
        check::pack_every_way(&lengths, n, g, memory.max_tokens(&lengths, n, longest), &cost);
    }

    /// The same where documents may be longer than a micro-batch, or as long as int32 counts.
    #[test]
    fn plans_are_the_oracles_for_documents_of_any_length(
        lengths in lengths(60, i32::MAX), n in num_micro_batches(), g in 1_usize..4, memory in memory(i32::MAX),
        cost in cost_model(),
    ) {
        check::pack_every_way(&lengths, n, g, memory.max_tokens(&lengths, n, 1), &cost);
    }

    /// Micro-batches of equal tokens, full or nearly so: where `refined` has work to do.
    #[test]
    fn full_micro_batches_are_refined(
        lengths in lengths(100, 60_000), n in 2_usize..12, per_mille in 0_i32..120, cost in cost_model(),
    ) {
        let longest = lengths.iter().copied().max().unwrap_or(1);
        check::pack_every_way(&lengths, n, 1, Memory::Share(per_mille).max_tokens(&lengths, n, longest), &cost);
    }

    /// Enough light documents that `var_length_fast` pours instead of sorting.
    #[test]
    fn a_poured_tail_keeps_the_promise(
        lengths in vec(prop_oneof![60 => 1..400, 4 => 1..5000, 1 => 5000..60_000], 300..1500),
        n in 1_usize..9, memory in memory(100_000), cost in cost_model(),
    ) {
        let longest = lengths.iter().copied().max().unwrap_or(1);
        check::pack_every_way(&lengths, n, 1, memory.max_tokens(&lengths, n, longest), &cost);
    }

    /// The plan of a number that suffices where the next lower one does not.
    #[test]
    fn a_whole_batch_takes_no_more_micro_batches_than_it_needs(
        lengths in lengths(80, 1000), multiple_of in 1_usize..9, method in 0..METHODS.len(), room in 0_i32..1500,
        cost in cost_model(),
    ) {
        let max_tokens = lengths.iter().copied().max().unwrap_or(1) + room;
        let options = |num_micro_batches| pack_options(num_micro_batches, max_tokens, METHODS[method]);
        let lengths = checked(&lengths);
        let whole = pack_whole(&lengths, multiple_of, &options(0), &cost).unwrap();
        let n = whole.num_micro_batches();
        prop_assert!(n > 0 && n.is_multiple_of(multiple_of) && whole.leftover.is_empty());
        prop_assert_eq!(&whole, &pack(&lengths, &options(n), &cost).unwrap());
        if n > multiple_of {
            let fewer = pack(&lengths, &options(n - multiple_of), &cost).unwrap();
            prop_assert!(!fewer.leftover.is_empty());
        }
    }

    #[test]
    fn micro_batches_are_dealt_fairly(
        lengths in lengths(200, 100_000), dp_size in 0_usize..10, per_rank in 1_usize..10, odd in 0_usize..2,
        memory in memory(1000), cost in cost_model(),
    ) {
        let n = (dp_size * per_rank + odd).max(1);
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let packing = pack_var_length(&lengths, n, memory.max_tokens(&lengths, n, longest), &cost);
        check::dealt_fairly(&packing, dp_size);
    }

    /// Equal digests iff equal plans.
    #[test]
    fn a_digest_tells_plans_apart(
        lengths in lengths(60, 50), n in 1_usize..5, a in (0..METHODS.len(), 50_i32..100), b in (0..METHODS.len(), 50_i32..100),
    ) {
        let cost = CostModel::analytic(1.0, 10.0, Mask::Causal).unwrap();
        let run = |(method, max_tokens): (usize, i32)| {
            let options = pack_options(n, max_tokens, METHODS[method]);
            pack(&checked(&lengths), &options, &cost).unwrap()
        };
        let (a, b) = (run(a), run(b));
        let same = (&a.pieces, &a.offsets, &a.leftover) == (&b.pieces, &b.offsets, &b.leftover);
        prop_assert_eq!(a.digest() == b.digest(), same);
    }

    /// Written and read back, a plan is the same to the last bit; a changed byte is an error or a plan, never a panic.
    #[test]
    fn a_plan_survives_json(
        lengths in lengths(60, 50),
        n in 1_usize..5,
        method in 0..METHODS.len(),
        max_tokens in 50_i32..100,
        cost in cost_model(),
        at in any::<Index>(), byte in 0_u8..128,
    ) {
        let options = pack_options(n, max_tokens, METHODS[method]);
        let packing = pack(&checked(&lengths), &options, &cost).unwrap();
        let text = packing.to_json();
        assert_eq!(Packing::from_json(&text).as_ref(), Ok(&packing));
        let mut bytes = text.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(changed) = Packing::from_json(&String::from_utf8(bytes).unwrap()) {
            let mut dealt = changed.deal(1).unwrap();
            dealt.sort_unstable();
            prop_assert_eq!(dealt, (0..changed.num_micro_batches()).collect::<Vec<_>>());
            prop_assert!(changed.imbalance() >= 1.0 && changed.digest().len() == 64);
            for j in 0..changed.num_micro_batches() {
                let tokens = changed.micro_batch(j).iter().try_fold(0_i32, |sum, piece| sum.checked_add(piece.length));
                prop_assert_eq!(tokens.map(i64::from), Some(changed.tokens[j]));
            }
        }
    }

    /// An assignment from elsewhere: scored if legal, an error that names the culprit if not.
    #[test]
    fn any_assignment_is_scored_or_refused(
        lengths in lengths(60, 1000), n in 1_usize..6, max_tokens in 1_i32..20_000, cost in cost_model(),
        wild in vec(prop_oneof![20 => -1_i64..6, 1 => any::<i64>()], 60),
    ) {
        let assignment = &wild[..lengths.len().min(60)];
        let result = Packing::from_assignment(&checked(&lengths), assignment, n, max_tokens, &cost);
        let bad = assignment.iter().position(|&j| j < -1 || j >= n as i64);
        let mut tokens = vec![0_i64; n];
        let mut over = None;
        for (index, (&length, &j)) in lengths.iter().zip(assignment).enumerate() {
            if let Some(tokens) = usize::try_from(j).ok().and_then(|j| tokens.get_mut(j)) {
                *tokens += i64::from(length);
                over = over.or((*tokens > i64::from(max_tokens)).then_some(index));
            }
        }
        match result {
            Ok(packing) => {
                prop_assert!(bad.is_none() && tokens.iter().all(|&tokens| tokens <= i64::from(max_tokens)));
                check::packing_is_legal(&packing, &cost);
                check::each_token_once(&packing, &lengths);
                prop_assert_eq!(packing.tokens, tokens);
            }
            Err(Error::Entry { argument: "assignment", index, .. }) => prop_assert_eq!(Some(index), bad.or(over)),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_document_over_max_tokens_is_named(
        mut lengths in lengths(60, 1000),
        at in any::<Index>(),
        cost in cost_model(),
    ) {
        lengths.push(1);
        let at = at.index(lengths.len());
        lengths[at] = 1001;
        for method in [Method::VarLength, Method::Refined] {
            let options = pack_options(3, 1000, method);
            let error = pack(&checked(&lengths), &options, &cost).unwrap_err();
            prop_assert_eq!((error.argument(), error.index()), ("lengths", Some(at)));
        }
    }

    /// Of all packings there are, none has a lower maximum than the bound; nor is a plan's below theirs.
    #[test]
    fn the_bound_is_one(
        lengths in vec(1..20_i32, 1..7), n in 1_usize..4, cost in cost_model(), method in select(METHODS.to_vec()),
    ) {
        let costs = lengths.iter().map(|&length| vec![cost.cost(length)]).collect();
        let options = pack_options(n, 40, method);
        let packing = pack(&checked(&lengths), &options, &cost).unwrap();
        let whole = packing.pieces.iter().all(|piece| piece.length == lengths[piece.id as usize]);
        if packing.leftover.is_empty() && whole {
            let batch = Batch { lengths, costs, limits: vec![f64::INFINITY], micro_batches: n, max_tokens: 40 };
            let optimum = cost.micro_batch() + batch.optimum().unwrap();
            prop_assert!(packing.lower_bound() <= optimum * (1.0 + 1e-9));
            prop_assert!(optimum <= packing.max_cost() * (1.0 + 1e-9));
        }
    }

    #[test]
    fn a_stream_is_cut_into_batches(
        lengths in lengths(100, 5000),
        tokens in prop_oneof![1_i64..200, 1_i64..100_000, Just(i64::MAX)],
    ) {
        prop_assert_eq!(batch_offsets(&checked(&lengths), tokens).unwrap(), naive::batch_offsets(&lengths, tokens));
    }

    #[test]
    fn documents_are_split(lengths in lengths(60, 100_000), limit in 50_i32..100_000) {
        let documents = lengths.iter().enumerate().map(|(id, &length)| Piece { id: id as i64, start: 0, length });
        let expected: Vec<Piece> = documents.flat_map(|document| naive::split(document, limit)).collect();
        prop_assert_eq!(split_documents(&checked(&lengths), i64::from(limit)).unwrap(), expected);
    }
}

/// What no packing is, though each of its numbers can be read.
#[test]
fn a_forged_plan_is_refused() {
    let cost = CostModel::analytic(1.0, 1.0, Mask::Causal).unwrap();
    let plan = pack_var_length(&[5, 7, 4, 6], 2, 11, &cost);
    let changes: [fn(&mut Packing); 8] = [
        // No micro-batches at all.
        |plan| {
            *plan = Packing { pieces: vec![], offsets: vec![0], tokens: vec![], costs: vec![], ..plan.clone() };
            plan.assignment.clear();
        },
        |plan| plan.tokens[1] += 1,
        |plan| plan.max_tokens = 10,
        |plan| plan.assignment[0] = 2,
        |plan| plan.assignment[0] = -2,
        |plan| plan.pieces[0].start = -1,
        |plan| plan.pieces[0].start = i32::MAX,
        |plan| plan.leftover.push(Piece { id: 4, start: 0, length: 0 }),
    ];
    assert!(Packing::from_json(&plan.to_json()).is_ok());
    for change in changes {
        let mut forged = plan.clone();
        change(&mut forged);
        assert!(matches!(Packing::from_json(&forged.to_json()), Err(Error::State { .. })), "{forged:?}");
    }
}

#[test]
fn nothing_packs_into_empty_micro_batches() {
    let cost = CostModel::analytic(1.0, 1.0, Mask::Causal).unwrap();
    check::pack_every_way(&[], 3, 2, 10, &cost);
    assert_eq!(batch_offsets(&checked(&[]), 5).unwrap(), [0]);
}

/// There is room for what `var_length` leaves over, but only in plans with a higher maximum: those are refused.
#[test]
fn refined_pays_for_nothing_with_a_higher_maximum() {
    let cost = CostModel::analytic(1.0, 0.0, Mask::Causal).unwrap();
    check::pack_every_way(&[5, 7, 4, 6, 7, 4, 9, 2, 4, 6, 9, 8, 9], 2, 1, 40, &cost);
    check::pack_every_way(&[11, 6, 4, 5, 7, 9, 6, 9, 5, 4, 3, 12, 3, 12], 4, 1, 24, &cost);
}

#[test]
fn sizes_out_of_range_are_named() {
    let cost = CostModel::analytic(1.0, 1.0, Mask::Causal).unwrap();
    let good = pack_options(2, 10, Method::FixedLength);
    let argument = |options: PackOptions| pack(&checked(&[1]), &options, &cost).unwrap_err().argument();
    assert_eq!(argument(PackOptions { num_micro_batches: 0, ..good.clone() }), "num_micro_batches");
    assert_eq!(argument(PackOptions { num_micro_batches: MAX_MICRO_BATCHES + 1, ..good.clone() }), "num_micro_batches");
    assert_eq!(argument(PackOptions { num_micro_batches: usize::MAX, ..good.clone() }), "num_micro_batches");
    assert_eq!(argument(PackOptions { max_tokens: 0, ..good.clone() }), "max_tokens");
    assert_eq!(argument(PackOptions { max_tokens: -1, ..good.clone() }), "max_tokens");
    assert_eq!(argument(PackOptions { global_batches: 0, ..good.clone() }), "global_batches");
    assert_eq!(argument(PackOptions { global_batches: usize::MAX, ..good.clone() }), "global_batches");
    assert_eq!(argument(PackOptions { method: Method::VarLength, global_batches: 2, ..good }), "global_batches");
}

/// Nobody gave the size that `max_tokens` was lowered to.
#[test]
fn what_does_not_fit_is_told_by_what_was_given() {
    let cost = CostModel::analytic(1.0, 1.0, Mask::Causal).unwrap();
    let tells = |lengths: &[i32], multiple, buckets: &[i32], max_tokens, start: &str| {
        let padding = Padding::new(multiple, 1, buckets).unwrap();
        let (leftover, most) = (Leftover::Error, padding.most(max_tokens).unwrap());
        let options = PackOptions { leftover, ..pack_options(1, most, Method::VarLength) };
        let error = pack(&checked(lengths), &options, &cost).unwrap_err();
        let explained = padding.explained(error.clone(), max_tokens);
        assert_eq!((explained.argument(), explained.index()), (error.argument(), error.index()));
        assert!(explained.to_string().starts_with(start), "{explained}");
    };
    let bucket = "lengths[1] = 7 exceeds 5 tokens, the largest of token_buckets within max_tokens = 6;";
    tells(&[1, 7], 1, &[5, 9], 6, &format!("{bucket} split it first (split_documents), or raise max_tokens"));
    tells(&[1, 7], 1, &[5], 6, &format!("{bucket} split it first (split_documents), or give a larger size"));
    let multiple = "4 tokens, the largest multiple of multiple_of_tokens = 4 within max_tokens = 6";
    tells(&[1, 7], 4, &[], 6, &format!("lengths[1] = 7 exceeds {multiple};"));
    tells(&[1, 7], 3, &[6], 6, "lengths[1] = 7 exceeds max_tokens = 6;");

    let rest = |given: &str, remedy: &str| {
        let documents = "lengths: 1 of 2 documents (3 tokens) do not fit into 1 micro-batches of";
        format!("{documents} {given}, the first of them lengths[1] = 3; {remedy}")
    };
    tells(&[3, 3], 4, &[], 6, &rest(multiple, "max_tokens=8 or"));
    let bucket = "5 tokens, the largest of token_buckets within max_tokens = 6";
    tells(&[3, 3], 1, &[5, 9], 6, &rest(bucket, "max_tokens=9 or"));
    tells(&[3, 3], 1, &[5], 5, &rest("max_tokens = 5", "num_micro_batches=None takes as many"));
    tells(&[3, 3], 1, &[], 5, &rest("max_tokens = 5", "max_tokens=6 or"));
}

proptest! {
    #![proptest_config(config(2000))]

    /// None has a lower maximum where tokens are scarce, to the last bit: sums of whole numbers are exact.
    #[test]
    fn the_bound_is_one_where_tokens_are_scarce(
        lengths in vec(1..20_i32, 4..9), costs in vec(0..40_u32, 9), by_length in any::<bool>(), n in 2_usize..4,
        room in 0..4_i32, method in select(vec![Method::VarLength, Method::Refined]),
    ) {
        let pairs = CostModel::analytic(1.0, 2.0, Mask::Causal).unwrap();
        let costs: Vec<f64> =
            (0..lengths.len()).map(|i| if by_length { pairs.cost(lengths[i]) } else { f64::from(costs[i] + u32::from(i == 0)) }).collect();
        let mean = (lengths.iter().sum::<i32>() as u32).div_ceil(n as u32) as i32;
        let max_tokens = lengths.iter().copied().fold(mean + room, i32::max);
        let given = DocumentCosts::new(costs.clone(), lengths.len(), 1, &[]).unwrap();
        let options = pack_options(n, max_tokens, method);
        let packing = if by_length {
            pack(&checked(&lengths), &options, &pairs).unwrap()
        } else {
            pack(&checked(&lengths), &options, &given).unwrap()
        };
        let documents: Vec<_> = packing.pieces.iter().map(|piece| (i64::from(piece.length), costs[piece.id as usize])).collect();
        let most = packing.max_cost();
        let expected = bound::bound(&documents, n, i64::from(max_tokens), 0.0, most).min(most);
        prop_assert!(check::close(packing.lower_bound(), expected), "{} is not the bound {expected}", packing.lower_bound());
        if packing.leftover.is_empty() {
            let costs = costs.iter().map(|&cost| vec![cost]).collect();
            let batch = Batch { lengths, costs, limits: vec![f64::INFINITY], micro_batches: n, max_tokens };
            let optimum = batch.optimum().unwrap();
            prop_assert!(packing.lower_bound() <= optimum, "{} is above the optimum {optimum}", packing.lower_bound());
        }
        let read = Packing::from_json(&packing.to_json()).unwrap();
        prop_assert_eq!(read.lower_bound().to_bits(), packing.lower_bound().to_bits());
    }
}
