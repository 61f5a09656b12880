//! The engine from Rust: what the Python numbers stand on.
//!
//!     cargo bench -p wlb-core
//!
//! First every call on its own, then packing over the floor: sorting the same lengths with `slice::sort_unstable`.
//! Timings on shared machines are noisy; the ratio is what to read.
#![allow(clippy::unwrap_used, reason = "the inputs are legal")]
#![allow(clippy::print_stdout, reason = "a benchmark prints what it measured")]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use divan::Bencher;
use wlb_core::cost::{FlopsOptions, Passes};
use wlb_core::packing::stream::{Oversize, Packer, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::pipeline::{Buffers, PipelineOptions, Times, order_micro_batches};
use wlb_core::sharding::Remainder;
use wlb_core::sharding::kernel::{Generation, KernelModel};
use wlb_core::{
    CostModel, Leftover, Lengths, Mask, Method, PackOptions, Pipeline, Schedule, Shard, ShardOptions, Strategy, pack,
    shard,
};

fn main() -> ExitCode {
    if cfg!(debug_assertions) {
        eprintln!("a debug build says nothing about speed: cargo bench -p wlb-core");
        // Under `cargo test --all-targets` nobody asked for a measurement.
        let asked_for = std::env::args().any(|argument| argument == "--bench");
        return if asked_for { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    divan::main();
    let only = std::env::args().skip(1).any(|argument| argument != "--bench");
    if !only {
        print_floor();
    }
    ExitCode::SUCCESS
}

/// Documents and micro-batches of one global batch.
type Size = (usize, usize);
const SIZES: [Size; 4] = [(100, 4), (1500, 64), (8700, 64), (30_000, 1024)];

/// Lengths close to the paper's histogram: 97.25 % uniform 1..=6250, 2.75 % log-uniform 6250..=125000.
///
/// A linear congruential generator and square roots only: the same on every machine.
fn lengths(documents: usize) -> Lengths {
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let values: Vec<i64> = (0..documents)
        .map(|_| {
            if draw(10_000) < 9_725 {
                return 1 + draw(6_250) as i64;
            }
            // 6250 * 20^u: each bit of `u` is a factor, 20^(1/2), 20^(1/4), ...
            let u = draw(1 << 16);
            let mut factor = 20.0_f64;
            let mut length = 6_250.0;
            for bit in (0..16).rev() {
                factor = factor.sqrt();
                length *= if u >> bit & 1 == 1 { factor } else { 1.0 };
            }
            length as i64
        })
        .collect();
    Lengths::new("lengths", &values).unwrap()
}

/// FLOPs of a 7B Llama.
fn cost_model() -> CostModel {
    CostModel::from_flops(&FlopsOptions {
        hidden_size: 4096,
        ffn_hidden_size: 11_008,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: 32,
        head_dim: 128,
        vocab_size: 32_000,
        gated_ffn: true,
        experts_per_token: 1,
        attention_efficiency: 0.55,
        flops_per_second: 1.0,
        passes: Passes::ForwardBackward,
        recompute: false,
        mask: Mask::Causal,
    })
    .unwrap()
}

/// Half as much memory again as an equal share; fixed lengths have just that share.
fn options(lengths: &Lengths, num_micro_batches: usize, method: Method) -> PackOptions {
    let share = lengths.total().div_euclid(num_micro_batches as i64) + 1;
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let max_tokens = if method == Method::FixedLength { share as i32 } else { longest.max((share * 3 / 2) as i32) };
    PackOptions { num_micro_batches, max_tokens, method, global_batches: 1, leftover: Leftover::Return }
}

fn bench_pack(bencher: Bencher, (documents, num_micro_batches): Size, method: Method) {
    let (lengths, cost_model) = (lengths(documents), cost_model());
    let options = options(&lengths, num_micro_batches, method);
    bencher
        .counter(divan::counter::ItemsCount::new(documents))
        .bench(|| pack(black_box(&lengths), &options, &cost_model));
}

#[divan::bench(args = SIZES)]
fn sort_unstable(bencher: Bencher, (documents, _): Size) {
    let lengths = lengths(documents);
    bencher
        .counter(divan::counter::ItemsCount::new(documents))
        .with_inputs(|| lengths.to_vec())
        .bench_refs(|lengths| lengths.sort_unstable());
}

#[divan::bench(args = SIZES)]
fn pack_var_length(bencher: Bencher, size: Size) {
    bench_pack(bencher, size, Method::VarLength);
}

#[divan::bench(args = SIZES)]
fn pack_var_length_fast(bencher: Bencher, size: Size) {
    bench_pack(bencher, size, Method::VarLengthFast);
}

#[divan::bench(args = [(1500, 64)])]
fn pack_fixed_length(bencher: Bencher, size: Size) {
    bench_pack(bencher, size, Method::FixedLength);
}

/// A packer with two queues that has run for a while, and the batches that go on.
fn running_packer() -> (Packer, Vec<Lengths>) {
    let config = PackerConfig {
        num_micro_batches: 4,
        max_tokens: 196_608,
        max_document_tokens: 131_072,
        oversize: Oversize::Error,
        outlier_thresholds: vec![32_768, 65_536],
        release: Release::Fifo,
        delay_price: None,
        max_delay: None,
        method: StreamMethod::VarLength,
        cost_model: Some(cost_model()),
        limits: None,
        shape: StepShape::default(),
    };
    let mut packer = Packer::new(config).unwrap();
    let stream: Vec<i64> = lengths(130 * 256).iter().map(|&length| i64::from(length)).collect();
    let batches: Vec<Lengths> = stream.chunks(130).map(|batch| Lengths::new("lengths", batch).unwrap()).collect();
    for batch in &batches {
        packer.push(batch, None).unwrap();
    }
    (packer, batches)
}

#[divan::bench]
fn push_130_documents_two_queues(bencher: Bencher) {
    let (mut packer, batches) = running_packer();
    let mut batches = batches.iter().cycle();
    bencher.bench_local(|| packer.push(batches.next().unwrap(), None));
}

#[divan::bench]
fn state_save(bencher: Bencher) {
    let (packer, _) = running_packer();
    bencher.bench(|| packer.save());
}

#[divan::bench]
fn state_load(bencher: Bencher) {
    let state = running_packer().0.save();
    bencher.bench(|| Packer::load(black_box(&state)));
}

/// 64 documents scaled to 128K tokens in all, for 8 ranks.
fn micro_batch(strategy: Strategy, remainder: Remainder) -> (Lengths, ShardOptions) {
    const TOKENS: i64 = 131_072;
    let sample = lengths(64);
    let mut scaled: Vec<i64> =
        sample.iter().map(|&length| (i64::from(length) * TOKENS / sample.total()).max(1)).collect();
    let longest = (0..64).max_by_key(|&index| scaled[index]).unwrap_or(0);
    scaled[longest] += TOKENS - scaled.iter().sum::<i64>();
    let hybrid_threshold = (strategy == Strategy::Hybrid).then_some(4096);
    let options =
        ShardOptions { cp_size: 8, strategy, mask: Mask::Causal, remainder, hybrid_threshold, max_imbalance: 1.01 };
    (Lengths::new("lengths", &scaled).unwrap(), options)
}

#[divan::bench(args = ["per_sequence", "per_document", "per_document, remainder=token", "hybrid"])]
fn shard_64_documents_128k(bencher: Bencher, way: &str) {
    let (name, token) = way.split_once(',').map_or((way, false), |(name, _)| (name, true));
    let remainder = if token { Remainder::Token } else { Remainder::Chunk };
    let (lengths, options) = micro_batch(name.parse().unwrap(), remainder);
    bencher.bench(|| shard(black_box(&lengths), &options));
}

/// 30 documents for 8 ranks: the choice, and the shard beside it.
#[divan::bench(args = ["per_document", "hybrid", "adaptive"])]
fn choose_and_shard_30_documents(bencher: Bencher, way: &str) {
    let lengths = lengths(30);
    let model = KernelModel::analytic(Generation::H100, 32, 32, 128, Mask::Causal).unwrap();
    let kernel = (way != "per_document").then_some(&model);
    let (mask, remainder) = (Mask::Causal, Remainder::Chunk);
    let strategy = way.parse().unwrap();
    let options = ShardOptions { cp_size: 8, strategy, mask, remainder, hybrid_threshold: None, max_imbalance: 1.01 };
    bencher.bench(|| shard(black_box(&lengths), &options.resolve(&lengths, kernel).unwrap()));
}

#[divan::bench]
fn arrays_of_a_rank_16k(bencher: Bencher) {
    let (lengths, options) = micro_batch(Strategy::PerDocument, Remainder::Chunk);
    let shard: Shard = shard(&lengths, &options).unwrap();
    bencher.bench(|| {
        let shard = black_box(&shard);
        (shard.layout(0), shard.token_indices(0), shard.position_ids(0))
    });
}

/// Schedule, pipeline ranks, stages a rank, micro-batches.
type Pipe = (&'static str, usize, usize, usize);
const PIPES: [Pipe; 4] =
    [("1f1b", 4, 1, 8), ("1f1b", 8, 1, 64), ("interleaved_1f1b", 8, 4, 64), ("zb_h1", 16, 1, 1024)];

fn layout((schedule, num_stages, num_virtual_stages, num_micro_batches): Pipe) -> PipelineOptions {
    let schedule: Schedule = schedule.parse().unwrap();
    PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches }
}

/// Costs of micro-batches as unequal as documents.
fn unequal(count: usize) -> Vec<f64> {
    cost_model().costs(&lengths(count))
}

#[divan::bench(args = PIPES)]
fn pipeline_compile(bencher: Bencher, pipe: Pipe) {
    let ops = Pipeline::new(&layout(pipe)).unwrap().num_ops();
    bencher.counter(divan::counter::ItemsCount::new(ops)).bench(|| Pipeline::new(black_box(&layout(pipe))));
}

#[divan::bench(args = PIPES)]
fn pipeline_makespan(bencher: Bencher, pipe: Pipe) {
    let (pipeline, costs) = (Pipeline::new(&layout(pipe)).unwrap(), unequal(pipe.3));
    let times = Times::per_micro_batch(&costs).unwrap();
    let mut buffers = Buffers::default();
    bencher
        .counter(divan::counter::ItemsCount::new(pipeline.num_ops()))
        .bench_local(|| pipeline.makespan(black_box(&times), &mut buffers));
}

#[divan::bench(args = PIPES)]
fn pipeline_simulate(bencher: Bencher, pipe: Pipe) {
    let (pipeline, costs) = (Pipeline::new(&layout(pipe)).unwrap(), unequal(pipe.3));
    let times = Times::per_micro_batch(&costs).unwrap();
    bencher
        .counter(divan::counter::ItemsCount::new(pipeline.num_ops()))
        .bench(|| pipeline.simulate(black_box(&times), None));
}

#[divan::bench(args = [("1f1b", 4, 1, 8), ("interleaved_1f1b", 4, 2, 16)])]
fn pipeline_order(bencher: Bencher, pipe: Pipe) {
    let costs = unequal(pipe.3);
    let times = Times::per_micro_batch(&costs).unwrap();
    bencher.bench(|| order_micro_batches(&layout(pipe), black_box(&times), 1));
}

/// Packing over sorting, the two taking turns, so that what slows the machine slows both.
fn print_floor() {
    println!("\n{:<16} {:>9} {:>12} {:>12} {:>6}", "method", "documents", "pack", "sort", "ratio");
    let ways = SIZES.into_iter().flat_map(|size| [(Method::VarLength, size), (Method::VarLengthFast, size)]);
    for (method, (documents, num_micro_batches)) in ways.chain([(Method::FixedLength, (1500, 64))]) {
        let (lengths, cost_model) = (lengths(documents), cost_model());
        let options = options(&lengths, num_micro_batches, method);
        let calls = (200_000 / documents).max(1) as u32;
        let (mut packing, mut sorting) = (Duration::MAX, Duration::MAX);
        for _ in 0..30 {
            packing = packing.min(mean_time(
                calls,
                || (),
                |()| {
                    black_box(pack(black_box(&lengths), &options, &cost_model).unwrap());
                },
            ));
            sorting = sorting.min(mean_time(
                calls,
                || lengths.to_vec(),
                |mut copy| {
                    copy.sort_unstable();
                    black_box(copy);
                },
            ));
        }
        let ratio = packing.as_secs_f64() / sorting.as_secs_f64();
        let size = format!("{documents}x{num_micro_batches}");
        println!("{:<16} {size:>9} {packing:>12.2?} {sorting:>12.2?} {ratio:>6.2}", method.as_str());
    }
}

/// Mean time of one call; making its input does not count.
fn mean_time<T>(calls: u32, input: impl Fn() -> T, work: impl Fn(T)) -> Duration {
    let inputs: Vec<T> = (0..calls).map(|_| input()).collect();
    let started = Instant::now();
    inputs.into_iter().for_each(work);
    started.elapsed() / calls
}
