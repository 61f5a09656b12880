//! A worked example of every algorithm, small enough to be followed on paper: inputs, what the oracle makes of them,
//! and the engine beside it. `docs/semantics.md` says the same in words, `tests/common` in code.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::columns::Batch;
use crate::common::naive::{self, Plan};
use crate::common::strategies::{checked, pack_options};
use crate::common::{auto, bound, check};
use wlb_core::packing::Piece;
use wlb_core::stream::{Oversize, Packer, PackerConfig, Push, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Mask, Method, ShardOptions, Strategy, pack, shard};

/// Costs that follow the pairs alone: 1, 3, 6, 10, 15, 21, 28, 36 for 1 to 8 tokens.
fn pairs() -> CostModel {
    CostModel::analytic(1.0, 0.0, Mask::Causal).unwrap()
}

/// Costs that are the tokens.
fn tokens() -> CostModel {
    CostModel::analytic(0.0, 1.0, Mask::Causal).unwrap()
}

fn piece(id: i64, start: i32, length: i32) -> Piece {
    Piece { id, start, length }
}

/// The oracle's plan, which is the engine's too.
fn packed(lengths: &[i32], n: usize, max_tokens: i32, method: Method, cost: &CostModel) -> Plan {
    let plan = match method {
        Method::Original => naive::original(lengths, n, max_tokens, cost),
        Method::FixedLength => naive::fixed_length(lengths, n, max_tokens, cost),
        Method::Refined => naive::refined(lengths, n, max_tokens, cost),
        _ => naive::var_length(lengths, n, max_tokens, cost),
    };
    let options = pack_options(n, max_tokens, method);
    check::same_plan(&pack(&checked(lengths), &options, cost).unwrap(), &plan);
    plan
}

/// Three documents end to end, cut after 6 tokens: the second lies on both sides of the cut.
#[test]
fn original_cuts_the_concatenation() {
    let plan = packed(&[5, 4, 3], 2, 6, Method::Original, &pairs());
    let expected = vec![vec![piece(0, 0, 5), piece(1, 0, 1)], vec![piece(1, 1, 3), piece(2, 0, 3)]];
    assert_eq!(plan.micro_batches, expected);
    assert_eq!(plan.assignment, [0, -1, 1], "the second is whole nowhere");
}

/// 6 goes to the first, 5 to the second, where there are no pairs yet. 4 fits nowhere: it fills the second, which has
/// the most room, and its last token goes where there is room left.
#[test]
fn fixed_length_goes_to_the_fewest_pairs_and_fills_up() {
    let plan = packed(&[4, 6, 5], 2, 8, Method::FixedLength, &pairs());
    assert_eq!(plan.micro_batches, vec![vec![piece(0, 3, 1), piece(1, 0, 6)], vec![piece(0, 0, 3), piece(2, 0, 5)]]);
}

/// Two documents of 36 pairs each have a micro-batch for themselves; four of 6 share the third: 24.
#[test]
fn var_length_goes_to_the_least_cost() {
    let plan = packed(&[8, 3, 3, 3, 3, 8], 3, 14, Method::VarLength, &pairs());
    assert_eq!((plan.assignment, plan.costs), (vec![0, 2, 2, 2, 2, 1], vec![36.0, 36.0, 24.0]));
}

/// With room for 11 tokens the last 3 do not fit to the other nine: they go to the fewest tokens, counted as a
/// fallback. With room for 10 they fit nowhere, and are left over.
#[test]
fn var_length_goes_by_tokens_where_the_least_cost_has_no_room() {
    let plan = packed(&[8, 8, 3, 3, 3, 3], 3, 11, Method::VarLength, &pairs());
    assert_eq!((plan.assignment, plan.length_fallbacks), (vec![0, 1, 2, 2, 2, 0], 1));
    let plan = packed(&[8, 8, 3, 3, 3, 3], 3, 10, Method::VarLength, &pairs());
    assert_eq!((plan.leftover, plan.length_fallbacks), (vec![piece(5, 0, 3)], 0));
}

/// Longest first gives 3 + 2 + 2 and 3 + 2. Refined finds 3 + 3 and 2 + 2 + 2, which nothing beats.
#[test]
fn refined_finds_what_longest_first_misses() {
    assert_eq!(packed(&[3, 3, 2, 2, 2], 2, 10, Method::VarLength, &tokens()).costs, [7.0, 5.0]);
    let plan = packed(&[3, 3, 2, 2, 2], 2, 10, Method::Refined, &tokens());
    assert_eq!(plan.costs, [6.0, 6.0]);
    assert_eq!(plan.assignment[0], plan.assignment[1]);
}

/// The long document leaves 2 of 10 tokens, and all others have to go somewhere: 5 short ones fill the other
/// micro-batch, and the sixth makes the long one's 36 + 3. The mean would be 27, the longest document 36.
#[test]
fn the_bound_knows_where_tokens_are_scarce() {
    let lengths = [8, 2, 2, 2, 2, 2, 2];
    let packing = pack(&checked(&lengths), &pack_options(2, 10, Method::VarLength), &pairs()).unwrap();
    let documents = lengths.map(|length| (i64::from(length), pairs().cost(length)));
    assert!(check::close(bound::bound(&documents, 2, 10, 0.0, 39.0), 39.0));
    assert!(packing.max_cost() == 39.0 && check::close(packing.lower_bound(), 39.0));
}

/// Two resources: a document that takes much of the one goes with one that takes much of the other. The step, the sum
/// of both maxima, is 20; two of a kind together would make it 36.
#[test]
fn columns_are_level_together() {
    let costs = vec![vec![9.0, 1.0], vec![9.0, 1.0], vec![1.0, 9.0], vec![1.0, 9.0]];
    let batch = Batch { lengths: vec![1; 4], costs, limits: vec![f64::INFINITY; 2], micro_batches: 2, max_tokens: 4 };
    let plan = batch.refined(&batch.var_length());
    assert_eq!(plan.loads, vec![vec![10.0, 10.0], vec![10.0, 10.0]]);
    assert_eq!(batch.step(&plan.loads), 20.0);
}

fn config(outlier_thresholds: Vec<i32>, delay_price: Option<f64>, max_delay: Option<u64>) -> PackerConfig {
    PackerConfig {
        num_micro_batches: 2,
        max_tokens: 20,
        max_document_tokens: 20,
        oversize: Oversize::Error,
        outlier_thresholds,
        release: if delay_price.is_some() { Release::Adaptive } else { Release::Fifo },
        delay_price,
        max_delay,
        method: StreamMethod::VarLength,
        cost_model: Some(pairs()),
        limits: None,
        shape: StepShape::default(),
    }
}

/// The tokens of the micro-batches after each push, by the oracle and by the engine.
fn streamed(config: &PackerConfig, pushes: &[&[i32]]) -> Vec<Vec<i64>> {
    let (mut oracle, mut packer) = (naive::Packer::new(config.clone()), Packer::new(config.clone()).unwrap());
    let push = |lengths: &&[i32]| {
        let plan = oracle.push(lengths, None);
        check::same_plan(&packer.push(&checked(lengths), None).unwrap(), &plan);
        plan.tokens
    };
    pushes.iter().map(push).collect()
}

/// 12 tokens wait for a second document of at least 10; with it they leave, one to each micro-batch.
#[test]
fn fifo_waits_for_as_many_as_there_are_micro_batches() {
    let steps = streamed(&config(vec![10], None, None), &[&[12, 3], &[2], &[11, 1]]);
    assert_eq!(steps, [[3, 0], [2, 0], [12, 12]]);
}

/// After two iterations a document leaves, alone if it must.
#[test]
fn nothing_waits_longer_than_the_maximum() {
    assert_eq!(streamed(&config(vec![10], None, Some(2)), &[&[12], &[1], &[1]]), [[0, 0], [1, 0], [12, 1]]);
}

/// 18 tokens beside two of 2 would make a step of imbalance 1.97: where waiting is cheap they are held until there is
/// another of their size. Where it is dear they leave at once.
#[test]
fn adaptive_holds_what_balance_is_worth() {
    let pushes: [&[i32]; 2] = [&[18, 2, 2], &[18]];
    assert_eq!(streamed(&config(Vec::new(), Some(0.01), None), &pushes), [[2, 2], [18, 18]]);
    assert_eq!(streamed(&config(Vec::new(), Some(10.0), None), &pushes), [[18, 4], [18, 0]]);
}

/// What leaves at once where waiting is dear stays until its turn if it came before it: waiting brings it nearer.
#[test]
fn adaptive_holds_what_came_early() {
    let config = config(Vec::new(), Some(10.0), None);
    let (mut oracle, mut packer) = (naive::Packer::new(config.clone()), Packer::new(config).unwrap());
    let steps = [(&[18, 2, 2][..], &[1, 0, 0][..]), (&[18], &[0])].map(|(lengths, early)| {
        let plan = oracle.push_early(lengths, None, 0, early);
        let checked = checked(lengths);
        let push = Push { early: Some(early), ..Push::new(&checked) };
        check::same_plan(&packer.push_pieces(&push).unwrap(), &plan);
        plan.tokens
    });
    assert_eq!(steps, [[2, 2], [18, 18]]);
    assert_eq!((packer.metrics().delay_mean(), packer.metrics().early_mean()), (0.0, 0.0));
}

/// 171 pairs where the mean of two micro-batches is (171 + 11 * 3) / 2 = 102: 2 * (171 / 102 - 1) = 1.35 iterations.
#[test]
fn costly_documents_have_a_lead() {
    let packer = Packer::new(config(Vec::new(), Some(10.0), None)).unwrap();
    let lengths = checked(&[&[18][..], &[2; 11]].concat());
    let leads = |most| packer.leads(&lengths, 40, most).unwrap();
    assert_eq!(leads(4), [&[1][..], &[0; 11]].concat());
    assert_eq!(leads(0), [0; 12]);
    assert!(packer.leads(&lengths, 0, 1).is_err() && packer.leads(&lengths, 40, 1025).is_err());
}

/// Pieces of at most 4 tokens, all full but the last; batches of as many documents as fit in 6 tokens, at least one.
#[test]
fn documents_are_split_and_streams_are_cut() {
    assert_eq!(naive::split(piece(7, 0, 9), 4), [piece(7, 0, 4), piece(7, 4, 4), piece(7, 8, 1)]);
    assert_eq!(naive::batch_offsets(&[3, 3, 9, 2, 4, 1], 6), [0, 2, 3, 5, 6]);
}

/// The rank of every token of every document on two ranks, by the oracle and by the engine.
fn sharded(lengths: &[i32], strategy: Strategy, hybrid_threshold: Option<i64>) -> naive::Owners {
    let owners = match strategy {
        Strategy::PerSequence => naive::per_sequence(lengths, 2),
        Strategy::Contiguous => naive::contiguous(lengths, 2),
        Strategy::PerDocument => naive::per_document(lengths, 2, 1),
        Strategy::Hybrid => naive::hybrid(lengths, 2, hybrid_threshold.unwrap()),
        _ => auto::auto(lengths, 2, Mask::Causal, 1.01),
    };
    let options = ShardOptions { cp_size: 2, strategy, mask: Mask::Causal, hybrid_threshold, max_imbalance: 1.01 };
    assert_eq!(shard(&checked(lengths), &options).unwrap().ranks, naive::segments(&owners, 2));
    owners
}

/// Four chunks of two tokens: the first rank has the first and the last, whatever documents they are of.
#[test]
fn per_sequence_cuts_the_packed_sequence() {
    let owners = sharded(&[5, 3], Strategy::PerSequence, None);
    assert_eq!(owners, [vec![0, 0, 1, 1, 1], vec![1, 0, 0]]);
}

/// Two runs of four tokens.
#[test]
fn contiguous_gives_each_rank_one_run_of_the_packed_sequence() {
    let owners = sharded(&[5, 3], Strategy::Contiguous, None);
    assert_eq!(owners, [vec![0, 0, 0, 0, 1], vec![1, 1, 1]]);
}

/// Four chunks of each document, the longest first. Of the 6 tokens two are over, for the first two chunks; the 3 of
/// the next go on from there: chunks 2, 3, and 0 again.
#[test]
fn per_document_deals_what_is_over_in_turn() {
    let owners = sharded(&[6, 3], Strategy::PerDocument, None);
    assert_eq!(owners, [vec![0, 0, 1, 1, 1, 0], vec![0, 1, 0]]);
}

/// The document of 6 is cut as above, 3 tokens to each rank. Of 9 tokens the first rank has 5 in the end and the other
/// 4: the document of 3 fills the first up, and its last token goes to the second.
#[test]
fn hybrid_keeps_short_documents_whole_while_there_is_room() {
    let owners = sharded(&[6, 3], Strategy::Hybrid, Some(5));
    assert_eq!(owners, [vec![0, 0, 1, 1, 1, 0], vec![0, 0, 1]]);
}

/// Two equal documents are even as they are: one on each rank, and no key is exchanged.
#[test]
fn auto_cuts_no_more_than_evenness_takes() {
    let owners = sharded(&[4, 4], Strategy::Auto, None);
    assert_eq!(owners, [vec![0; 4], vec![1; 4]]);
    assert_eq!(auto::keys_moved(&owners, 2, Mask::Causal), [0, 0]);
}
