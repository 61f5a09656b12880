//! Documents whose costs are given: plans against the oracle, and what holds for all of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use crate::common::bound::bound;
use crate::common::check::{close, each_token_once};
use crate::common::columns::{Batch, Plan};
use crate::common::strategies::{Memory, checked, config, lengths, llama_7b, memory, num_micro_batches, pack_options};
use proptest::collection::vec;
use proptest::prelude::*;
use wlb_core::cost::DocumentCosts;
use wlb_core::packing::{Piece, Ranks, Sync};
use wlb_core::{Error, Method, PackOptions, Packing, pack, pack_whole};

/// One cost: none, a tie, anything.
fn cost() -> impl Strategy<Value = f64> {
    prop_oneof![2 => Just(0.0), 2 => (1_u8..5).prop_map(f64::from), 6 => 1e-6..100.0, 1 => 1e-6..1e6]
}

/// Up to `most` documents with up to four columns, some of which are memory that is scarce.
fn batch(most: usize) -> impl Strategy<Value = Batch> {
    (lengths(most, 5000), 1_usize..5, num_micro_batches(), memory(5000)).prop_flat_map(
        |(lengths, columns, n, memory)| {
            let rows = vec(vec(cost(), columns), lengths.len());
            let limits = vec(prop_oneof![3 => Just(None), 1 => (1.0..4.0).prop_map(Some)], columns - 1);
            (rows, limits).prop_map(move |(mut costs, room)| {
                let mut limits = vec![f64::INFINITY; columns];
                for (k, room) in room.into_iter().enumerate() {
                    let sum: f64 = costs.iter().map(|row| row[k + 1]).sum();
                    let most = costs.iter().map(|row| row[k + 1]).fold(0.0, f64::max);
                    if let Some(room) = room.filter(|_| sum > 0.0) {
                        limits[k + 1] = f64::max(room * sum / n as f64, most);
                    }
                }
                // A column of nothing but zeros is refused.
                for k in 0..columns {
                    if !costs.is_empty() && costs.iter().all(|row| row[k] == 0.0) {
                        costs[0][k] = if limits[k].is_finite() { limits[k].min(1.0) } else { 1.0 };
                    }
                }
                let longest = lengths.iter().copied().max().unwrap_or(1);
                let max_tokens = memory.max_tokens(&lengths, n, longest);
                Batch { lengths: lengths.clone(), costs, limits, micro_batches: n, max_tokens }
            })
        },
    )
}

fn given(batch: &Batch) -> DocumentCosts {
    let limits: &[f64] = if batch.limits.iter().all(|limit| limit.is_infinite()) { &[] } else { &batch.limits };
    DocumentCosts::new(batch.costs.concat(), batch.lengths.len(), batch.limits.len(), limits).unwrap()
}

fn options(batch: &Batch, method: Method) -> PackOptions {
    pack_options(batch.micro_batches, batch.max_tokens, method)
}

fn packed(batch: &Batch, method: Method) -> Packing {
    pack(&checked(&batch.lengths), &options(batch, method), &given(batch)).unwrap()
}

/// Costs of micro-batches in each column.
fn loads(packing: &Packing) -> Vec<Vec<f64>> {
    match &packing.columns {
        Some(columns) => columns.costs.chunks(columns.len()).map(<[f64]>::to_vec).collect(),
        None => packing.costs.iter().map(|&cost| vec![cost]).collect(),
    }
}

fn is_the_oracles(packing: &Packing, plan: &Plan) {
    let assignment: Vec<Option<usize>> = packing.assignment.iter().map(|&j| usize::try_from(j).ok()).collect();
    assert_eq!(assignment, plan.assignment);
    assert_eq!(packing.leftover.iter().map(|piece| piece.id as usize).collect::<Vec<_>>(), plan.leftover);
    assert_eq!(packing.length_fallbacks, plan.fallbacks);
    assert_eq!(loads(packing), plan.loads, "to the last bit");
}

fn is_legal(packing: &Packing, batch: &Batch) {
    each_token_once(packing, &batch.lengths);
    for (j, load) in loads(packing).iter().enumerate() {
        assert!(packing.tokens[j] <= i64::from(batch.max_tokens));
        assert!(load.iter().zip(&batch.limits).all(|(load, limit)| load <= limit), "micro-batch {j}: {load:?}");
        assert!(close(packing.costs[j], batch.timed().iter().map(|&k| load[k]).sum()));
    }
    assert!(close(packing.step_cost(), batch.step(&loads(packing))));
    assert!(packing.lower_bound() <= packing.step_cost() * (1.0 + 1e-12));
    assert!(packing.imbalance() >= 1.0);
    assert_eq!(Packing::from_json(&packing.to_json()).unwrap(), *packing);
    let assignment: Vec<i64> = packing.assignment.iter().map(|&j| i64::from(j)).collect();
    let (n, most) = (batch.micro_batches, batch.max_tokens);
    let again = Packing::from_assignment(&checked(&batch.lengths), &assignment, n, most, &given(batch)).unwrap();
    assert!(close(again.step_cost(), packing.step_cost()) && close(again.lower_bound(), packing.lower_bound()));
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn plans_are_the_oracles(batch in batch(60)) {
        let plan = batch.levelled(&batch.var_length());
        let packing = packed(&batch, Method::VarLength);
        is_the_oracles(&packing, &plan);
        is_legal(&packing, &batch);
        let mut least = 0.0;
        for &k in &batch.timed() {
            let of = |piece: &Piece| (i64::from(piece.length), batch.costs[piece.id as usize][k]);
            let documents: Vec<_> = packing.pieces.iter().map(of).collect();
            let most = plan.loads.iter().map(|load| load[k]).fold(0.0, f64::max);
            least += bound(&documents, batch.micro_batches, i64::from(batch.max_tokens), 0.0, most).min(most);
        }
        prop_assert!(close(packing.lower_bound(), least));
    }

    #[test]
    fn exchanges_are_the_oracles_and_pay(batch in batch(40)) {
        let start = packed(&batch, Method::VarLength);
        let refined = packed(&batch, Method::Refined);
        is_legal(&refined, &batch);
        prop_assert!(refined.step_cost() <= start.step_cost());
        prop_assert!(refined.leftover.len() <= start.leftover.len());
        if batch.limits.len() > 1 {
            is_the_oracles(&refined, &batch.refined(&batch.var_length()));
        }
    }

    /// The sum of the bounds is one on every packing there is.
    #[test]
    fn tiny_plans_are_between_the_bound_and_the_optimum(
        lengths in vec(1..100_i32, 1..7), rows in vec(vec(1e-3..10.0, 2), 7), n in 1_usize..4, room in 0..100_i32,
    ) {
        let longest = *lengths.iter().max().unwrap();
        let costs = rows[..lengths.len()].to_vec();
        let max_tokens = Memory::Share(10 * room).max_tokens(&lengths, n, longest);
        let limits = vec![f64::INFINITY; 2];
        let batch = Batch { lengths, costs, limits, micro_batches: n, max_tokens };
        let packing = packed(&batch, Method::Refined);
        if let Some(optimum) = batch.optimum().filter(|_| packing.leftover.is_empty()) {
            prop_assert!(packing.step_cost() >= optimum * (1.0 - 1e-12));
            prop_assert!(packing.lower_bound() <= optimum * (1.0 + 1e-12));
        }
    }

    /// One column that follows the length is the cost model that it came from.
    #[test]
    fn one_column_is_a_cost_model(lengths in lengths(200, 100_000), n in num_micro_batches(), memory in memory(100_000)) {
        let cost = llama_7b();
        let values = cost.costs(&lengths);
        let given = DocumentCosts::new(values, lengths.len(), 1, &[]).unwrap();
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let max_tokens = memory.max_tokens(&lengths, n, longest);
        for method in [Method::VarLength, Method::Refined, Method::Original] {
            let options = pack_options(n, max_tokens, method);
            let by_model = pack(&checked(&lengths), &options, &cost).unwrap();
            let by_costs = pack(&checked(&lengths), &options, &given).unwrap();
            if method == Method::Original {
                prop_assert_eq!(by_costs.digest(), by_model.digest());
            } else {
                prop_assert_eq!(by_costs, by_model);
            }
        }
    }

    /// Ranks meet in every column: a deal is no longer than that by the sum, no shorter than any deal can be, and fair.
    #[test]
    fn deals_follow_the_columns(batch in batch(40), dp in 1_usize..4, per_rank in 1_usize..4) {
        let batch = Batch { micro_batches: dp * per_rank, limits: vec![f64::INFINITY; batch.limits.len()], ..batch };
        let packing = packed(&batch, Method::VarLength);
        let rows = loads(&packing);
        let step = |dealt: &[usize]| -> f64 {
            let of_rank = |rank: &[usize], k: usize| rank.iter().map(|&j| rows[j][k]).sum::<f64>();
            let most = |k: usize| dealt.chunks(per_rank).map(|rank| of_rank(rank, k)).fold(0.0, f64::max);
            (0..batch.limits.len()).map(most).sum()
        };
        let dealt = packing.deal(dp).unwrap();
        let mut sorted = dealt.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..dp * per_rank).collect::<Vec<_>>());
        let by_sum = Packing { columns: None, ..packing.clone() }.deal(dp).unwrap();
        prop_assert!(step(&dealt) <= step(&by_sum));
        for row in dealt.chunks(per_rank) {
            let costs: Vec<f64> = row.iter().map(|&j| packing.costs[j]).collect();
            let top = costs.iter().copied().fold(0.0, f64::max);
            let peak = costs.iter().position(|&cost| cost == top).unwrap();
            prop_assert!(costs[..peak].is_sorted() && costs[peak..].iter().rev().is_sorted(), "{:?}", costs);
        }
        if dp * per_rank <= 6 {
            let least = permutations(dp * per_rank).iter().map(|dealt| step(dealt)).fold(f64::INFINITY, f64::min);
            prop_assert!(step(&dealt) >= least * (1.0 - 1e-12));
        }
    }

    /// In which unit time is given, or the memory of a column, makes no difference to where documents go.
    #[test]
    fn units_do_not_matter(batch in batch(60), exponents in vec(-20..20_i32, 4)) {
        let mut scaled = batch.clone();
        for k in 0..batch.limits.len() {
            let factor = f64::powi(2.0, exponents[if batch.limits[k].is_finite() { k } else { 0 }]);
            scaled.limits[k] *= factor;
            scaled.costs.iter_mut().for_each(|row| row[k] *= factor);
        }
        let (first, second) = (packed(&batch, Method::VarLength), packed(&scaled, Method::VarLength));
        prop_assert_eq!(first.assignment, second.assignment);
    }

    #[test]
    fn whole_batches_find_room_in_memory_too(batch in batch(40), multiple_of in 1_usize..4) {
        let options = options(&batch, Method::VarLength);
        let packing = pack_whole(&checked(&batch.lengths), multiple_of, &options, &given(&batch)).unwrap();
        prop_assert!(packing.leftover.is_empty() && packing.num_micro_batches().is_multiple_of(multiple_of));
        is_legal(&packing, &Batch { micro_batches: packing.num_micro_batches(), ..batch });
    }

    /// One bad entry anywhere is named by its row and column.
    #[test]
    fn a_bad_cost_is_named(
        batch in batch(20), at in any::<prop::sample::Index>(),
        bad in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(-1.0)],
    ) {
        prop_assume!(!batch.lengths.is_empty());
        let columns = batch.limits.len();
        let mut values = batch.costs.concat();
        let at = at.index(values.len());
        values[at] = bad;
        let error = DocumentCosts::new(values, batch.lengths.len(), columns, &[]).unwrap_err();
        let place = (columns > 1).then_some(at % columns);
        let Error::Cell { argument: "costs", row, column, .. } = error else { panic!("{error}") };
        prop_assert_eq!((row, column), (at / columns, place));
    }
}

/// By the sum all micro-batches are alike; in each column two of them are not.
#[test]
fn a_deal_by_the_sum_would_pair_what_waits() {
    let costs = DocumentCosts::new(vec![4.0, 0.0, 4.0, 0.0, 0.0, 4.0, 0.0, 4.0], 4, 2, &[]).unwrap();
    let packing = Packing::from_assignment(&checked(&[10; 4]), &[0, 1, 2, 3], 4, 10, &costs).unwrap();
    let by_sum = Packing { columns: None, ..packing.clone() };
    let of_rank = |dealt: &[usize]| dealt.iter().filter(|&&j| j < 2).count();
    for packing in [&packing, &by_sum] {
        let dealt = packing.deal(2).unwrap();
        assert_eq!((of_rank(&dealt[..2]), of_rank(&dealt[2..])), (1, 1));
    }
    // 0 and 3 are the heaviest by the sum, and lead in the same column.
    let costs = DocumentCosts::new(vec![9.0, 0.0, 0.0, 5.0, 0.0, 5.0, 7.0, 0.0], 4, 2, &[]).unwrap();
    let packing = Packing::from_assignment(&checked(&[10; 4]), &[0, 1, 2, 3], 4, 10, &costs).unwrap();
    let dealt = packing.deal(2).unwrap();
    assert_eq!(
        dealt.chunks(2).map(|rank| rank.iter().filter(|&&j| j == 0 || j == 3).count()).collect::<Vec<_>>(),
        [1, 1]
    );
}

fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(n - 1);
    shorter.iter().flat_map(|p| (0..n).map(move |at| [&p[..at], &[n - 1], &p[at..]].concat())).collect()
}

/// 512 documents in 16 micro-batches, none above 5 % of a mean one in either column.
fn small_documents(state: &mut u64, row: impl Fn(&mut dyn FnMut() -> f64) -> [f64; 2]) -> DocumentCosts {
    let mut random = || {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut rows: Vec<[f64; 2]> = (0..512).map(|_| row(&mut random)).collect();
    for _ in 0..50 {
        for k in 0..2 {
            let most = 0.05 * rows.iter().map(|row| row[k]).sum::<f64>() / 16.0;
            rows.iter_mut().for_each(|row| row[k] = row[k].min(most));
        }
    }
    let mean = |k: usize| rows.iter().map(|row| row[k]).sum::<f64>() / 16.0;
    assert!((0..2).all(|k| rows.iter().all(|row| row[k] < 0.0501 * mean(k))));
    DocumentCosts::new(rows.concat(), 512, 2, &[]).unwrap()
}

#[test]
fn many_small_documents_of_two_resources_are_level() {
    let some_images = |random: &mut dyn FnMut() -> f64| {
        let image = random() < 0.7;
        [if image { 0.2 + random() } else { 0.0 }, 0.1 + random()]
    };
    let one_or_the_other = |random: &mut dyn FnMut() -> f64| {
        let share = random();
        [share, 1.0 - share]
    };
    let squares = |random: &mut dyn FnMut() -> f64| {
        let share = random();
        [share * share, (1.0 - share) * (1.0 - share)]
    };
    let few_sizes = |random: &mut dyn FnMut() -> f64| {
        [4.0_f64.powi((4.0 * random()) as i32), 4.0_f64.powi((4.0 * random()) as i32)]
    };
    let lengths = checked(&[100; 512]);
    for seed in 1..9 {
        let mut state = seed;
        for costs in [
            small_documents(&mut state, some_images),
            small_documents(&mut state, one_or_the_other),
            small_documents(&mut state, squares),
            small_documents(&mut state, few_sizes),
        ] {
            let over = |method: Method| {
                let packing = pack(&lengths, &pack_options(16, 10_000, method), &costs).unwrap();
                packing.step_cost() / packing.lower_bound()
            };
            let (greedy, refined) = (over(Method::VarLength), over(Method::Refined));
            assert!(greedy < 1.02 && refined < 1.01 && refined <= greedy, "{seed} {greedy} {refined}");
        }
    }
}

#[test]
fn what_makes_no_sense_is_named() {
    let new = |values: &[f64], documents, columns, limits: &[f64]| {
        DocumentCosts::new(values.to_vec(), documents, columns, limits).unwrap_err().to_string()
    };
    assert_eq!(new(&[1.0; 4], 3, 2, &[]), "costs has 2 entries, but lengths has 3");
    assert_eq!(new(&[1.0, -2.0], 2, 1, &[]), "costs[1] = -2: must be a finite number, 0 or above");
    assert_eq!(new(&[1.0, -1e300], 2, 1, &[]), "costs[1] = -1e300: must be a finite number, 0 or above");
    assert_eq!(new(&[1.0, 1.0], 1, 2, &[f64::NAN, 1.0]), "limits[0] = NaN: must be above 0, infinite for none");
    assert!(new(&[1.0, 1.0], 1, 2, &[1.0, 2.0]).starts_with("limits: leave no column that takes time"));
    assert!(new(&[1.0, 3.0], 1, 2, &[f64::INFINITY, 2.0]).starts_with("costs[0, 1] = 3: exceeds the limit"));
    let zeros = DocumentCosts::new(vec![1.0, 0.0, 2.0, 0.0], 2, 2, &[]).unwrap();
    let options = pack_options(1, 100, Method::VarLength);
    let lengths = checked(&[5, 6]);
    let error = pack(&lengths, &options, &zeros).unwrap_err();
    assert_eq!(error.to_string(), "costs[:, 1]: is 0 for every document: leave this column out");
    // Costs whose sum a float just holds, times the number of micro-batches: the imbalance is a number all the same.
    let huge = DocumentCosts::new(vec![1e307, 3e307], 2, 1, &[]).unwrap();
    let packing = pack(&lengths, &PackOptions { num_micro_batches: 20, ..options.clone() }, &huge).unwrap();
    assert!((packing.imbalance() - 15.0).abs() < 1e-12, "{}", packing.imbalance());
    for sync in [Sync::Step, Sync::MicroBatch] {
        let of_ranks = Packing { ranks: Some(Ranks { dp_size: 20, sync }), ..packing.clone() };
        assert!((of_ranks.rank_imbalance() - 15.0).abs() < 1e-12, "{}", of_ranks.rank_imbalance());
    }
    let good = DocumentCosts::new(vec![1.0, 2.0], 2, 1, &[]).unwrap();
    let method = |method| pack(&lengths, &PackOptions { method, ..options.clone() }, &good).unwrap_err().argument();
    assert_eq!(method(Method::FixedLength), "method");
}
