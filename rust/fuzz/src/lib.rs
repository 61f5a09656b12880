//! What each fuzz target does with its bytes: read an input out of them, and assert what the tests of `wlb-core`
//! assert.
//!
//! A byte string that is too short for an input is an input all the same: `arbitrary` fills up with zeros.

// The oracles and guarantees of the tests, not a copy of them.
#[path = "../../wlb-core/tests/common/auto.rs"]
mod auto;
#[path = "../../wlb-core/tests/common/bound.rs"]
mod bound;
#[path = "../../wlb-core/tests/common/check.rs"]
mod check;
#[path = "../../wlb-core/tests/common/forge.rs"]
mod forge;
#[path = "../../wlb-core/tests/common/kernel.rs"]
mod kernel;
#[path = "../../wlb-core/tests/common/naive.rs"]
mod naive;
#[path = "../../wlb-core/tests/common/pipeline.rs"]
mod pipeline;
#[path = "../../wlb-core/tests/common/dynamic_cp.rs"]
mod plan;
#[path = "../../wlb-core/tests/common/ranks.rs"]
mod ranks;
#[path = "../../wlb-core/tests/common/stream.rs"]
mod stream;

use arbitrary::{Result, Unstructured};
use wlb_core::cost::DocumentCosts;
use wlb_core::dynamic_cp::{Costs, DynamicCpOptions, Exchange, GroupSizes, Node};
use wlb_core::packing::{Padding, Ranks, Sync, Together};
use wlb_core::ranks::RankOptions;
use wlb_core::sharding::kernel::{KernelDescription, KernelModel, PassTable};
use wlb_core::stream::{Oversize, PackerConfig, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Lengths, Mask, Method, Schedule};

use stream::Event;

/// One global batch by every method.
pub fn pack(data: &[u8]) {
    let _ = try_pack(&mut Unstructured::new(data));
}

fn try_pack(u: &mut Unstructured) -> Result<()> {
    let cost = cost_model(u)?;
    let n = u.int_in_range(1..=40)?;
    let global_batches = u.int_in_range(1..=3)?;
    let longest = longest(u)?;
    let room = u.int_in_range(0..=4)?;
    let tokens = u.int_in_range(1..=longest)?;
    let lengths = lengths(u, 600, longest)?;
    let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    let share = (total / n as i64).clamp(1, i64::from(i32::MAX)) as i32;
    let largest = lengths.iter().copied().max().unwrap_or(1);
    let max_tokens = match room {
        0 => tokens,
        1 => share,
        2 => share.max(largest),
        3 => share.saturating_add(share / 10).max(largest),
        _ => i32::MAX,
    };
    check::pack_every_way(&lengths, n, global_batches, max_tokens, &cost);

    let sync = if u.arbitrary()? { Sync::Step } else { Sync::MicroBatch };
    let groups = match u.int_in_range(0..=5)? {
        0..=2 => vec![],
        size => (0..lengths.len() as i64).map(|document| document / size).collect(),
    };
    let options = RankOptions {
        num_micro_batches: None,
        fewest: u.arbitrary()?,
        multiple_of: u.int_in_range(1..=4)?,
        max_tokens: max_tokens.max(largest),
        method: Method::VarLength,
        ranks: Some(Ranks { dp_size: u.int_in_range(1..=9)?, sync }),
        groups,
        together: if u.arbitrary()? { Together::Rank } else { Together::MicroBatch },
        equal_documents: u.arbitrary()?,
        max_documents: if u.arbitrary()? { Some(u.int_in_range(1..=9)?) } else { None },
    };
    ranks::planned(&lengths, &options, &cost);
    Ok(())
}

/// A packer driven, saved, resumed and flushed beside its oracle.
pub fn packer_stream(data: &[u8]) {
    let _ = try_packer_stream(&mut Unstructured::new(data));
}

fn try_packer_stream(u: &mut Unstructured) -> Result<()> {
    let config = packer_config(u)?;
    let mut events = Vec::new();
    for _ in 0..u.int_in_range(0..=16)? {
        events.push(event(u, &config)?);
    }
    stream::run(&config, &events);
    Ok(())
}

/// Texts and edited states: refused, or a packer that works.
pub fn load_state(data: &[u8]) {
    let _ = try_load_state(&mut Unstructured::new(data));
}

fn try_load_state(u: &mut Unstructured) -> Result<()> {
    let kind = u.int_in_range(0..=3)?;
    if kind == 0 {
        let text = String::from_utf8_lossy(u.bytes(u.len())?);
        forge::works_if_accepted(&text);
        return Ok(());
    }
    let config = packer_config(u)?;
    let mut events = Vec::new();
    for _ in 0..u.int_in_range(0..=4)? {
        events.push(Event::Push(lengths(u, 12, config.max_document_tokens)?));
    }
    let packer = stream::run(&config, &events);
    let mut text = packer.save();
    if kind == 1 {
        // A changed byte: noticed.
        let at = u.choose_index(text.len())?;
        let byte = u.int_in_range(0..=127)?;
        text.replace_range(at..at + 1, char::from(byte).encode_utf8(&mut [0]));
        forge::refused_or_equal(&text, &packer);
        return Ok(());
    }
    // Signed anew: refused, or it works.
    change_numbers(u, &mut text)?;
    forge::works_if_accepted(&forge::sign(&text));
    Ok(())
}

/// Changes some numbers of a JSON text.
fn change_numbers(u: &mut Unstructured, text: &mut String) -> Result<()> {
    for _ in 0..u.int_in_range(1..=6)? {
        let numbers = forge::numbers(text);
        let span = numbers[u.choose_index(numbers.len())?].clone();
        let old: f64 = text[span.clone()].parse().unwrap_or(0.0);
        let number = match u.int_in_range(0..=5)? {
            0 => format!("{}", (old as i64).saturating_add(1)),
            1 => format!("{}", (old as i64).saturating_sub(1)),
            2 => format!("{}", u.arbitrary::<i64>()?),
            3 => format!("{}", u.arbitrary::<u64>()?),
            4 => format!("{:e}", u.arbitrary::<f64>()?.abs()),
            _ => format!("{}", u.int_in_range(0..=100)?),
        };
        text.replace_range(span, &number);
    }
    Ok(())
}

/// Texts and edited profiles: refused, or models that work, and a choice by them that is the best there is.
pub fn profile(data: &[u8]) {
    let _ = try_profile(&mut Unstructured::new(data));
}

fn try_profile(u: &mut Unstructured) -> Result<()> {
    if u.ratio(1, 4)? {
        kernel::works_if_accepted(&String::from_utf8_lossy(u.bytes(u.len())?));
        return Ok(());
    }
    let description = kernel_description(u)?;
    let mut text = kernel::profile(&description, Some((&[100, 20_000], &[1e-5, 2e-3], &[2e-5, 4e-3]))).to_string();
    if u.arbitrary()? {
        change_numbers(u, &mut text)?;
        kernel::works_if_accepted(&text);
        return Ok(());
    }
    let model = KernelModel::from_profile(&text).map_err(|_| arbitrary::Error::IncorrectFormat)?;
    let (cp_size, longest) = (u.int_in_range(1..=16)?, longest(u)?);
    let mut lengths = lengths(u, 80, longest)?;
    let mut total = 0_i64;
    lengths.retain(|&length| {
        total += i64::from(length);
        total <= i64::from(i32::MAX)
    });
    kernel::choice_is_the_best(&lengths, cp_size, &model, u.int_in_range(0..=1 << 24)?);
    Ok(())
}

/// A measured kernel with any grid and times in no order.
fn kernel_description(u: &mut Unstructured) -> Result<KernelDescription> {
    let mut grid = |least: i64| {
        let mut lengths = vec![least.max(u.int_in_range(1..=300)?)];
        for _ in 0..u.int_in_range(0..=4)? {
            let last = lengths.last().copied().unwrap_or(1);
            lengths.push(last + u.int_in_range(1..=2 * last)?);
        }
        Ok::<_, arbitrary::Error>(lengths)
    };
    let query_lengths = grid(1)?;
    let key_lengths = grid(query_lengths.last().copied().unwrap_or(1))?;
    let mut table = || {
        let mut median_seconds = Vec::new();
        for queries in &query_lengths {
            let mut row = Vec::new();
            for keys in &key_lengths {
                let seconds = f64::from(u.int_in_range(1..=1_000_000)?) / 1e9;
                row.push((queries <= keys).then_some(seconds));
            }
            median_seconds.push(row);
        }
        let tile = *u.choose(&[1, 16, 100, 128])?;
        Ok::<_, arbitrary::Error>(PassTable {
            tile,
            launch_seconds: f64::from(u.int_in_range(0..=9)?) / 1e6,
            median_seconds,
        })
    };
    let (forward, backward) = (table()?, table()?);
    Ok(KernelDescription {
        source: String::new(),
        causal: u.arbitrary()?,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        query_lengths,
        key_lengths,
        forward,
        backward,
    })
}

/// A micro-batch by every strategy.
pub fn shard(data: &[u8]) {
    let _ = try_shard(&mut Unstructured::new(data));
}

fn try_shard(u: &mut Unstructured) -> Result<()> {
    let mask = if u.arbitrary()? { Mask::Causal } else { Mask::Full };
    let cp_size = if u.ratio(1, 8)? { u.int_in_range(1..=300)? } else { u.int_in_range(1..=16)? };
    let longest = longest(u)?;
    let threshold = i64::from(u.int_in_range(1..=longest)?) + u.int_in_range(0..=1)?;
    let mut lengths = lengths(u, 100, longest)?;
    let mut total = 0_i64;
    lengths.retain(|&length| {
        let fits = total + i64::from(length) <= i64::from(i32::MAX);
        total += if fits { i64::from(length) } else { 0 };
        fits
    });
    check::shard_every_way(&lengths, cp_size, mask, threshold, total <= 20_000 && cp_size <= 64);
    Ok(())
}

/// A Dynamic-CP plan, whatever the machine.
pub fn dynamic_cp(data: &[u8]) {
    let _ = try_dynamic_cp(&mut Unstructured::new(data));
}

fn try_dynamic_cp(u: &mut Unstructured) -> Result<()> {
    let cost = cost_model(u)?;
    let longest = longest(u)?;
    let world_size = if u.ratio(1, 4)? { u.int_in_range(1..=80)? } else { u.int_in_range(1..=16)? };
    let mut seconds = || {
        Ok::<f64, arbitrary::Error>(if u.arbitrary()? {
            0.0
        } else {
            u.int_in_range(0..=1_000_000_000_u64)? as f64 / 1e3
        })
    };
    let (exchange, token, p2p_seconds, micro_batch_seconds) = (seconds()?, seconds()?, seconds()?, seconds()?);
    let overlap = f64::from(u.int_in_range(0..=4)?) / 4.0;
    let (num_micro_batches, max_micro_batches) = match u.int_in_range(0..=3)? {
        0 => (Some(u.int_in_range(1..=20)?), None),
        1 => (None, Some(u.int_in_range(1..=20)?)),
        _ => (None, None),
    };
    let min_micro_batches = match num_micro_batches {
        None if u.ratio(1, 3)? => Some(u.int_in_range(1..=max_micro_batches.unwrap_or(20))?),
        _ => None,
    };
    let node = if u.arbitrary()? { Some(u.int_in_range(1..=world_size)?) } else { None };
    let (num_virtual_stages, schedule) = match u.int_in_range(0..=7)? {
        0 => (2, Some(Schedule::ZbV)),
        1 => (2, Some(Schedule::DualPipeV)),
        2 | 3 => (u.int_in_range(2..=3)?, None),
        _ => (1, None),
    };
    let options = DynamicCpOptions {
        world_size,
        num_stages: u.int_in_range(1..=8)?,
        num_virtual_stages,
        schedule,
        sync: if u.ratio(1, 4)? { Sync::MicroBatch } else { Sync::Step },
        max_tokens_per_rank: u.int_in_range(1..=longest)?,
        padding: dynamic_cp_padding(u, longest)?,
        max_documents: if u.ratio(1, 3)? { Some(u.int_in_range(1..=8)?) } else { None },
        max_cp_size: if u.arbitrary()? { Some(u.int_in_range(1..=world_size)?) } else { None },
        group_sizes: if u.arbitrary()? { GroupSizes::Any } else { GroupSizes::PowersOfTwo },
        only_sizes: None,
        num_micro_batches,
        min_micro_batches,
        max_micro_batches,
        exchange: Exchange { seconds_per_exchange: exchange, seconds_per_token: token, overlap },
        node: node.map(|ranks| Node { ranks, seconds_per_exchange: exchange / 8.0, seconds_per_token: token / 8.0 }),
        p2p_seconds,
        micro_batch_seconds,
    };
    let lengths = lengths(u, 120, longest)?;
    let small = lengths.len() < 12 && world_size <= 8 && options.num_stages * options.num_virtual_stages <= 4;
    if u.arbitrary()? {
        plan::planned(&lengths, &options, &cost, small);
        return Ok(());
    }
    // Documents that bring their own costs.
    let (mut values, mut attention) = (Vec::new(), Vec::new());
    for _ in &lengths {
        values.push(if u.ratio(1, 4)? { 0.0 } else { f64::from(u.int_in_range(1..=1_000_000)?) });
        attention.push(values[values.len() - 1] * f64::from(u.int_in_range(0..=4)?) / 4.0);
    }
    if let Ok(costs) = DocumentCosts::new(values, lengths.len(), 1, &[]) {
        plan::planned(&lengths, &options, Costs::Given { costs: &costs, attention: Some(&attention) }, small);
    }
    Ok(())
}

/// Sizes of ranks, or none.
fn dynamic_cp_padding(u: &mut Unstructured, longest: i32) -> Result<Option<Padding>> {
    let multiple = u.int_in_range(1..=64)?;
    let mut buckets = Vec::new();
    for _ in 0..u.int_in_range(0..=3)? {
        buckets.push(u.int_in_range(1..=longest / multiple + 1)?.min(i32::MAX / multiple) * multiple);
    }
    buckets.sort_unstable();
    buckets.dedup();
    Ok(Padding::new(multiple, 1, &buckets).ok().and_then(Padding::if_any))
}

/// The longest document that can come: small ones make ties and remainders, large ones overflows.
fn longest(u: &mut Unstructured) -> Result<i32> {
    Ok(*u.choose(&[8, 100, 1000, 1 << 17, i32::MAX])?)
}

/// Documents: single tokens, repetitions, small ones, powers of two and their neighbours, anything.
fn lengths(u: &mut Unstructured, most: usize, longest: i32) -> Result<Vec<i32>> {
    let mut lengths: Vec<i32> = Vec::new();
    for _ in 0..u.int_in_range(0..=most)? {
        let length = match u.int_in_range(0..=5)? {
            0 => 1,
            1 | 2 => lengths.last().copied().unwrap_or(longest),
            3 => u.int_in_range(1..=8)?,
            4 => (1_i64 << u.int_in_range(0..=30)?) as i32 + u.int_in_range(-1..=1)?,
            _ => u.int_in_range(1..=longest)?,
        };
        lengths.push(length.clamp(1, longest));
    }
    Ok(lengths)
}

fn cost_model(u: &mut Unstructured) -> Result<CostModel> {
    let mask = if u.arbitrary()? { Mask::Causal } else { Mask::Full };
    // Where sums neither overflow nor drown in rounding.
    let mut rate = || Ok::<f64, arbitrary::Error>(u.int_in_range(0..=1_000_000_000_u64)? as f64 / 1e3);
    let (attention, linear) = (rate()?, rate()?);
    if u.ratio(1, 3)? {
        let (mut knots, mut times) = (Vec::new(), [Vec::new(), Vec::new()]);
        let mut length = 0;
        for _ in 0..u.int_in_range(1..=5)? {
            length += u.int_in_range(1..=100_000)?;
            knots.push(length);
            for table in &mut times {
                let last = table.last().copied().unwrap_or(1e-3);
                table.push(last + f64::from(u.int_in_range(0..=1000)?) / 1e4);
            }
        }
        let knots = Lengths::new("lengths", &knots).map_err(|_| arbitrary::Error::IncorrectFormat)?;
        return CostModel::from_tables(&knots, &times[0], &times[1], mask)
            .map_err(|_| arbitrary::Error::IncorrectFormat);
    }
    CostModel::analytic(attention, linear, mask)
        .or_else(|_| CostModel::analytic(1.0, 100.0, mask))
        .map_err(|_| arbitrary::Error::IncorrectFormat)
}

fn packer_config(u: &mut Unstructured) -> Result<PackerConfig> {
    let longest = longest(u)?;
    let max_document_tokens = u.int_in_range(1..=longest)?;
    let max_tokens = match u.int_in_range(0..=2)? {
        0 => max_document_tokens,
        1 => max_document_tokens.saturating_add(u.int_in_range(0..=max_document_tokens)?),
        _ => i32::MAX,
    };
    let mut outlier_thresholds = Vec::new();
    for _ in 0..u.int_in_range(0..=3)? {
        outlier_thresholds.push(u.int_in_range(1..=max_document_tokens)?);
    }
    outlier_thresholds.sort_unstable();
    outlier_thresholds.dedup();
    let delay_price = if u.arbitrary()? { Some(f64::from(u.int_in_range(0..=10_000)?) / 1e4) } else { None };
    if delay_price.is_some() {
        outlier_thresholds.clear();
    }
    let (mut num_micro_batches, mut shape) = (u.int_in_range(1..=9)?, StepShape::default());
    if u.arbitrary()? {
        let sync = if u.arbitrary()? { Sync::Step } else { Sync::MicroBatch };
        let dp_size = u.int_in_range(1..=5)?;
        num_micro_batches *= dp_size;
        shape.ranks = Some(Ranks { dp_size, sync });
    }
    if u.arbitrary()? {
        shape.max_documents = Some(u.int_in_range(1..=12)?);
    }
    if u.arbitrary()? {
        // One bucket, so that it is the largest size.
        let multiple = *u.choose(&[1, 2, 128])?;
        let (multiple, buckets) = if max_tokens % multiple == 0 { (multiple, vec![max_tokens]) } else { (1, vec![]) };
        shape.padding = Padding::new(multiple, 1, &buckets).ok().and_then(Padding::if_any);
    }
    if u.arbitrary()? {
        shape.tokens_per_batch = Some(u.int_in_range(1..=num_micro_batches as i64 * i64::from(max_tokens))?);
    }
    Ok(PackerConfig {
        num_micro_batches,
        max_tokens,
        max_document_tokens,
        oversize: *u.choose(&[Oversize::Error, Oversize::Split, Oversize::Truncate])?,
        outlier_thresholds,
        release: if delay_price.is_some() { Release::Adaptive } else { Release::Fifo },
        delay_price,
        max_delay: if u.arbitrary()? { Some(u.int_in_range(0..=5)?) } else { None },
        method: if u.arbitrary()? { StreamMethod::Refined } else { StreamMethod::VarLength },
        cost_model: Some(cost_model(u)?),
        limits: None,
        shape,
    })
}

fn event(u: &mut Unstructured, config: &PackerConfig) -> Result<Event> {
    let longest = config.max_document_tokens.saturating_mul(3);
    Ok(match u.int_in_range(0..=10)? {
        0..=3 => Event::Push(lengths(u, 60, longest)?),
        4 => {
            let mut documents = Vec::new();
            for length in lengths(u, 30, longest)? {
                documents.push((length, u.int_in_range(-(1 << 61)..=1 << 61)? >> u.int_in_range(0..=61)?));
            }
            Event::PushNamed(documents)
        }
        5 => Event::PushWrong(lengths(u, 6, longest)?),
        6 => Event::Resume,
        7 => Event::ResumeOn(u.int_in_range(1..=9)?),
        8 => {
            let mut other = packer_config(u)?;
            if u.arbitrary()? {
                // The same limits: what waits is taken over.
                other.max_document_tokens = config.max_document_tokens;
                other.max_tokens = other.max_tokens.max(config.max_document_tokens);
                other.shape.padding = None;
                other.outlier_thresholds.retain(|&threshold| threshold <= config.max_document_tokens);
            }
            Event::ResumeAs(Box::new(other))
        }
        9 => Event::SetCostModel(cost_model(u)?),
        _ => Event::Flush,
    })
}
