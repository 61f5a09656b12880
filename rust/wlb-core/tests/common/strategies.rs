//! Inputs that hit the corners: ties, single tokens, powers of two, long tails, memory that binds.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;
use wlb_core::cost::{FlopsOptions, Passes, Rates, Unit};
use wlb_core::packing::{Padding, Ranks, Sync};
use wlb_core::sharding::kernel::{Generation, KernelDescription, KernelModel, PassTable};
use wlb_core::stream::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions};

use super::stream::Event;

/// `cases` of them, unless `PROPTEST_CASES` says how many.
pub(crate) fn config(cases: u32) -> ProptestConfig {
    let asked_for = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { asked_for.cases } else { cases };
    // Beside the test file: a case that failed once is run first ever after.
    let failure_persistence = Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions")) as _);
    ProptestConfig { cases, failure_persistence, ..asked_for }
}

/// As `wlb_core` takes them.
pub(crate) fn checked(lengths: &[i32]) -> Lengths {
    Lengths::new("lengths", &lengths.iter().map(|&length| i64::from(length)).collect::<Vec<_>>()).unwrap()
}

/// Of one global batch; what does not fit is left over.
pub(crate) fn pack_options(num_micro_batches: usize, max_tokens: i32, method: Method) -> PackOptions {
    PackOptions { num_micro_batches, max_tokens, method, global_batches: 1, leftover: Leftover::Return }
}

/// Up to `most` documents of up to `longest` tokens.
pub(crate) fn lengths(most: usize, longest: i32) -> BoxedStrategy<Vec<i32>> {
    prop_oneof![
        20 => lengths_of_count(0..24.min(most + 1), longest),
        5 => lengths_of_count(0..most + 1, longest),
    ]
    .boxed()
}

fn lengths_of_count(count: std::ops::Range<usize>, longest: i32) -> impl Strategy<Value = Vec<i32>> {
    let ties = vec(1..=longest, 1..4);
    let range = count.clone();
    prop_oneof![
        1 => vec(Just(1), count.clone()),
        3 => vec(1..=longest.min(6), count.clone()),
        3 => vec(1..=longest, count.clone()),
        3 => ties.prop_flat_map(move |values| vec(select(values), range.clone())),
        3 => vec(near_power_of_two(longest), count.clone()),
        3 => vec(log_uniform(1, longest), count.clone()),
        4 => vec(long_tailed(longest), count),
    ]
}

fn near_power_of_two(longest: i32) -> impl Strategy<Value = i32> {
    (0..=longest.ilog2(), -1..=1).prop_map(move |(bit, off): (u32, i32)| ((1 << bit) + off).clamp(1, longest))
}

fn log_uniform(shortest: i32, longest: i32) -> impl Strategy<Value = i32> {
    let (low, high) = (f64::from(shortest).ln(), f64::from(longest).ln());
    (0.0..=1.0).prop_map(move |u: f64| ((low + u * (high - low)).exp() as i32).clamp(shortest, longest))
}

/// Close to the paper's histogram, scaled to `longest`: few documents hold many of the tokens.
fn long_tailed(longest: i32) -> impl Strategy<Value = i32> {
    let body = (longest / 20).max(1);
    prop_oneof![9 => 1..=body, 1 => log_uniform(body, longest)]
}

/// How much memory a micro-batch has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// An equal share of the tokens, rounded up, and some per mille: `max_tokens` binds.
    Share(i32),
    /// That many tokens, whatever there is.
    Tokens(i32),
    /// All there can be.
    Boundless,
}

impl Memory {
    /// `max_tokens`, at least `least`.
    pub(crate) fn max_tokens(self, lengths: &[i32], num_micro_batches: usize, least: i32) -> i32 {
        let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
        let share = (total as u64).div_ceil(num_micro_batches as u64) as i64;
        let tokens = match self {
            Self::Share(per_mille) => share + (share as i128 * i128::from(per_mille) / 1000) as i64,
            Self::Tokens(tokens) => i64::from(tokens),
            Self::Boundless => i64::from(i32::MAX),
        };
        tokens.clamp(i64::from(least), i64::from(i32::MAX)) as i32
    }
}

/// Mostly tight.
pub(crate) fn memory(longest: i32) -> impl Strategy<Value = Memory> {
    prop_oneof![
        4 => prop_oneof![Just(0), -300..300].prop_map(Memory::Share),
        2 => (300..2000).prop_map(Memory::Share),
        1 => (1..=longest).prop_map(Memory::Tokens),
        2 => Just(Memory::Boundless),
    ]
}

/// Numbers of micro-batches: small, powers of two and their neighbours, many.
pub(crate) fn num_micro_batches() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1_usize..9, 2 => select(vec![15_usize, 16, 17, 31, 32, 33]), 1 => 1_usize..130]
}

/// Either mask.
pub(crate) fn mask() -> impl Strategy<Value = Mask> {
    prop_oneof![2 => Just(Mask::Causal), 1 => Just(Mask::Full)]
}

/// Analytic (quadratic, linear, both), a Llama's FLOPs, measured tables.
pub(crate) fn cost_model() -> BoxedStrategy<CostModel> {
    let analytic = |attention, linear, mask| CostModel::analytic(attention, linear, mask).unwrap();
    prop_oneof![
        1 => mask().prop_map(move |mask| analytic(1.0, 0.0, mask)),
        1 => mask().prop_map(move |mask| analytic(0.0, 1.0, mask)),
        2 => (1e-12..1e6, 1e-12..1e9, mask()).prop_map(move |(a, b, mask)| analytic(a, b, mask)),
        1 => Just(llama_7b()),
        2 => rates().prop_map(|rates| CostModel::from_rates(&rates).unwrap()),
        2 => tables().prop_map(|(lengths, attention, linear, mask)| {
            CostModel::from_tables(&checked(&lengths), &attention, &linear, mask).unwrap()
        }),
    ]
    .boxed()
}

/// Terms of every kind, some of them 0.
pub(crate) fn rates() -> impl Strategy<Value = Rates> {
    let some = |rate: f64| prop_oneof![1 => Just(0.0), 2 => (0.0..1.0).prop_map(move |share: f64| rate * share)];
    let local = || btree_map(prop_oneof![1..40, 1..5000, 1..=i32::MAX], 1e-6..1.0, 0..3);
    let unit = prop_oneof![Just(None), Just(Some(Unit::Seconds)), Just(Some(Unit::Flops))];
    (some(1.0), 1e-3..100.0, local(), local(), some(1e4), some(1e6), unit).prop_map(
        |(attention, linear, windows, chunks, document, micro_batch, unit)| Rates {
            attention,
            linear,
            mask: Mask::Causal,
            windows: windows.into_iter().collect(),
            chunks: chunks.into_iter().collect(),
            document,
            micro_batch,
            unit,
        },
    )
}

/// FLOPs of a 7B Llama.
pub(crate) fn llama_7b() -> CostModel {
    CostModel::from_flops(&llama_7b_flops()).unwrap()
}

/// The shape of a 7B Llama.
pub(crate) fn llama_7b_flops() -> FlopsOptions {
    FlopsOptions {
        hidden_size: 4096,
        ffn_hidden_size: 11008,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: 32,
        head_dim: 128,
        vocab_size: 32000,
        gated_ffn: true,
        experts_per_token: 1,
        attention_efficiency: 0.55,
        flops_per_second: 1.0,
        passes: Passes::ForwardBackward,
        recompute: false,
        mask: Mask::Causal,
    }
}

/// Lengths and the times measured at them: ascending, and never decreasing.
pub(crate) fn tables() -> impl Strategy<Value = (Vec<i32>, Vec<f64>, Vec<f64>, Mask)> {
    // Plateaus too: a kernel can take as long for a longer document.
    let rise = || prop_oneof![4 => 1e-9..1.0, 1 => Just(0.0)];
    (vec((1..100_000, rise(), rise()), 1..6), 1e-9..1.0, mask()).prop_map(|(knots, first, mask)| {
        let (mut length, mut attention, mut linear) = (0, first, first);
        let mut rows = (Vec::new(), Vec::new(), Vec::new(), mask);
        for (step, more_attention, more_linear) in knots {
            length += step;
            attention += more_attention;
            linear += more_linear;
            rows.0.push(length);
            rows.1.push(attention);
            rows.2.push(linear);
        }
        rows
    })
}

/// A measured kernel: any grid, with queries and keys at odd places, and times without any order.
pub(crate) fn kernel() -> impl Strategy<Value = KernelDescription> {
    let grid = || vec(prop_oneof![1_i64..300, 1_i64..10_000, (0_u32..17).prop_map(|bit| 1 << bit)], 1..7);
    let tile = || prop_oneof![3 => Just(128), 1 => select(vec![1_i64, 64, 100])];
    let launch = || prop_oneof![Just(0.0), 1e-7..1e-4];
    let seconds = || vec(1e-7..1e-3, 36);
    (grid(), grid(), any::<bool>(), (tile(), launch(), seconds()), (tile(), launch(), seconds())).prop_map(
        |(mut query_lengths, mut key_lengths, causal, forward, backward)| {
            query_lengths.sort_unstable();
            query_lengths.dedup();
            key_lengths.extend(query_lengths.last());
            key_lengths.sort_unstable();
            key_lengths.dedup();
            let table = |(tile, launch_seconds, seconds): (i64, f64, Vec<f64>)| {
                let mut seconds = seconds.into_iter().cycle();
                let row = |&queries: &i64| {
                    key_lengths.iter().map(|&keys| seconds.next().filter(|_| queries <= keys)).collect()
                };
                PassTable { tile, launch_seconds, median_seconds: query_lengths.iter().map(row).collect() }
            };
            let (forward, backward) = (table(forward), table(backward));
            KernelDescription {
                source: "measured: by no one".to_owned(),
                causal,
                num_heads: 32,
                num_kv_heads: 8,
                head_dim: 128,
                query_lengths,
                key_lengths,
                forward,
                backward,
            }
        },
    )
}

/// Measured or assumed.
pub(crate) fn kernel_model() -> impl Strategy<Value = KernelModel> {
    let generation = select(vec![Generation::A100, Generation::H100, Generation::H200, Generation::B200]);
    prop_oneof![
        1 => kernel().prop_map(|kernel| KernelModel::new(kernel).unwrap()),
        1 => (generation, mask())
            .prop_map(|(generation, mask)| KernelModel::analytic(generation, 32, 8, 128, mask).unwrap()),
    ]
}

/// Either way to place what leaves.
pub(crate) fn method() -> impl Strategy<Value = StreamMethod> {
    prop_oneof![Just(StreamMethod::VarLength), Just(StreamMethod::Refined)]
}

/// A packer as `plain_config` has it, often for ranks and in shapes.
pub(crate) fn packer_config() -> impl Strategy<Value = PackerConfig> {
    let sync = prop_oneof![Just(Sync::Step), Just(Sync::MicroBatch)];
    let ranks = prop::option::weighted(0.4, (1_usize..6, sync));
    let max_documents = prop::option::weighted(0.3, 1_usize..12);
    let buckets = prop_oneof![2 => Just(vec![]), 1 => vec(1..200_i32, 1..4)];
    let padding = prop::option::weighted(0.2, (1..40_i32, buckets));
    let batch = prop::option::weighted(0.3, 0.0..=1.0);
    (plain_config(), ranks, max_documents, padding, batch).prop_map(|(config, ranks, max_documents, padding, batch)| {
        let shape = StepShape { max_documents, ..config.shape.clone() };
        let mut config = PackerConfig { shape, ..config };
        if let Some((dp_size, sync)) = ranks {
            config.num_micro_batches = config.num_micro_batches.div_ceil(dp_size) * dp_size;
            config.shape.ranks = Some(Ranks { dp_size, sync });
        }
        if let Some((multiple, mut buckets)) = padding {
            buckets.sort_unstable();
            buckets.dedup();
            let buckets: Vec<i32> = buckets.into_iter().map(|bucket| bucket * multiple).collect();
            let padding = Padding::new(multiple, 1, &buckets).unwrap();
            if let Ok(most) = padding.most(config.max_tokens) {
                (config.max_tokens, config.shape.padding) = (most, Some(padding));
                config.max_document_tokens = config.max_document_tokens.min(most);
                config.outlier_thresholds.retain(|&threshold| threshold <= most);
            }
        }
        let step = config.num_micro_batches as f64 * f64::from(config.max_tokens);
        config.shape.tokens_per_batch = batch.map(|share: f64| (share * step).max(1.0) as i64);
        config
    })
}

/// A packer: memory often binds, queues often full, documents sometimes too long.
pub(crate) fn plain_config() -> impl Strategy<Value = PackerConfig> {
    let longest = prop_oneof![1 => Just(1), 3 => 2..30, 4 => 30..2000, 1 => 2000..=i32::MAX];
    let n = prop_oneof![8 => 1_usize..6, 1 => 6_usize..40];
    let room = prop_oneof![2 => Just(1.0), 3 => 1.0..2.5, 1 => Just(1e9)];
    let max_delay = prop_oneof![1 => Just(None), 1 => (0..6_u64).prop_map(Some)];
    let oversize = prop_oneof![Just(Oversize::Error), Just(Oversize::Split), Just(Oversize::Truncate)];
    let delay_price = prop_oneof![Just(0.0), 1e-4..1e-2, 1e-2..1.0, Just(1e9)];
    let delay_price = prop_oneof![Just(None), delay_price.prop_map(Some)];
    let max_cost = prop::option::weighted(0.4, prop_oneof![0.01..4.0, 0.6..1.6, Just(1.0)]);
    let delay_price = (delay_price, max_cost);
    (n, longest, room, vec(0.0..=1.0, 0..4), delay_price, max_delay, oversize, method(), cost_model()).prop_map(
        |(
            num_micro_batches,
            longest,
            room,
            shares,
            (delay_price, max_cost),
            max_delay,
            oversize,
            method,
            cost_model,
        )| {
            let mut outlier_thresholds: Vec<i32> =
                shares.iter().map(|share: &f64| ((f64::from(longest) * share) as i32).clamp(1, longest)).collect();
            outlier_thresholds.sort_unstable();
            outlier_thresholds.dedup();
            if delay_price.is_some() {
                outlier_thresholds.clear();
            }
            PackerConfig {
                num_micro_batches,
                max_tokens: (f64::from(longest) * room) as i32,
                max_document_tokens: longest,
                oversize,
                outlier_thresholds,
                release: if delay_price.is_some() { Release::Adaptive } else { Release::Fifo },
                delay_price,
                max_delay,
                method,
                cost_model: Some(cost_model),
                limits: None,
                shape: StepShape { max_cost: max_cost.filter(|_| delay_price.is_some()), ..StepShape::default() },
            }
        },
    )
}

/// A packer and what happens to it.
pub(crate) fn stream(most_events: usize, most_documents: usize) -> impl Strategy<Value = (PackerConfig, Vec<Event>)> {
    packer_config().prop_flat_map(move |config| {
        let longest = config.max_document_tokens;
        // Some documents are too long, but never into very many pieces.
        let lengths = lengths(most_documents, longest.saturating_mul(3).min(longest.saturating_add(50_000)));
        let min_step_tokens =
            prop_oneof![1..=i64::from(longest), 1..=i64::from(longest).saturating_mul(8), Just(i64::MAX)];
        let id = prop_oneof![2 => -3_i64..60, 1 => -(1_i64 << 61)..1 << 61];
        let other = (packer_config(), any::<[bool; 6]>()).prop_map({
            let config = config.clone();
            move |(other, change)| Event::ResumeAs(Box::new(mixed(&config, other, change)))
        });
        let event = prop_oneof![
            10 => lengths.clone().prop_map(Event::Push),
            4 => (lengths.clone(), min_step_tokens).prop_map(|(lengths, tokens)| Event::PushAtLeast(lengths, tokens)),
            6 => vec((1..=longest, 0_i64..5), 0..most_documents.max(1)).prop_map(Event::PushEarly),
            4 => lengths.prop_flat_map(move |lengths| {
                let ids = vec(id.clone(), lengths.len());
                ids.prop_map(move |ids| Event::PushNamed(lengths.iter().copied().zip(ids).collect()))
            }),
            2 => vec(1..=longest, 0..6).prop_map(Event::PushWrong),
            3 => Just(Event::Resume),
            2 => (1_usize..8).prop_map(Event::ResumeOn),
            2 => other,
            2 => cost_model().prop_map(Event::SetCostModel),
            1 => Just(Event::Flush),
        ];
        (Just(config), vec(event, 0..=most_events))
    })
}

/// The most pieces that documents of the longest length are cut into where a configuration changes: what the oracle
/// makes of millions takes a quarter of an hour.
const MOST_PIECES: i32 = 256;

/// Some fields of another configuration.
fn mixed(config: &PackerConfig, other: PackerConfig, change: [bool; 6]) -> PackerConfig {
    let mut mixed = config.clone();
    if change[0] {
        // Ranks divide their number.
        (mixed.num_micro_batches, mixed.shape.ranks) = (other.num_micro_batches, other.shape.ranks);
        mixed.shape.max_documents = other.shape.max_documents;
    }
    if change[1] && other.max_document_tokens >= config.max_document_tokens / MOST_PIECES {
        mixed.shape.padding = other.shape.padding;
        (mixed.max_tokens, mixed.max_document_tokens) = (other.max_tokens, other.max_document_tokens);
        mixed.outlier_thresholds.retain(|&threshold| threshold <= other.max_document_tokens);
    }
    if change[2] {
        (mixed.release, mixed.delay_price) = (other.release, other.delay_price);
        mixed.shape.max_cost = other.shape.max_cost;
        mixed.outlier_thresholds = other.outlier_thresholds;
        mixed.outlier_thresholds.retain(|&threshold| threshold <= mixed.max_document_tokens);
    }
    if change[3] {
        (mixed.max_delay, mixed.oversize) = (other.max_delay, other.oversize);
    }
    if change[4] {
        mixed.cost_model = other.cost_model;
    }
    if change[5] {
        mixed.method = other.method;
    }
    let step = mixed.num_micro_batches as i64 * i64::from(mixed.max_tokens);
    mixed.shape.tokens_per_batch = other.shape.tokens_per_batch.map(|tokens| tokens.min(step));
    mixed
}
