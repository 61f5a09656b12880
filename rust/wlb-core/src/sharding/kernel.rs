//! How long an attention kernel takes for the segments of a rank (section 5.2 of WLB-LLM).
//!
//! A kernel computes whole tiles of queries, so a segment costs the pairs that it would have if its queries filled the last
//! tile. How fast these are computed depends on how many queries share a load of keys and on how many keys there are to
//! hide the prologue behind: that is a table over both, measured or assumed, forward and backward apart.

use serde::{Deserialize, Serialize};

use crate::cost::{Mask, Passes};
use crate::error::{Error, Result, check_range, named_choices};
use crate::lengths::Lengths;
use crate::limits::{MAX_KERNEL_SIZE, MAX_TOKENS};

use super::Shard;

/// Sums of latencies are sums of integers, so that they do not depend on the order of the segments, and equal plans are
/// exactly equal. One tick is 2^-44 s, or 57 femtoseconds.
pub(super) const TICKS_PER_SECOND: f64 = (1_u64 << 44) as f64;

/// All that makes a [`KernelModel`]: plain data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelDescription {
    /// "measured: (GPU) (kernel)" or "analytic: (generation)".
    pub source: String,
    /// Whether the kernel was measured under a causal mask.
    pub causal: bool,
    /// Query heads of one GPU.
    pub num_heads: i64,
    /// Key and value heads of one GPU.
    pub num_kv_heads: i64,
    /// Width of one head.
    pub head_dim: i64,
    /// Queries that a thread block computes at a time.
    pub tile: i64,
    /// Queries of a segment: the rows of the tables. Ascending.
    pub query_lengths: Vec<i64>,
    /// Keys of a segment: the columns of the tables. Ascending.
    pub key_lengths: Vec<i64>,
    /// Times of the forward pass.
    pub forward: PassTable,
    /// Times of the backward pass.
    pub backward: PassTable,
}

/// Times of one pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassTable {
    /// Seconds of a call, whatever its segments.
    pub launch_seconds: f64,
    /// Seconds of one segment of a call that fills the GPU: a row per query length, a column per key length; nothing where
    /// there are more queries than keys.
    pub median_seconds: Vec<Vec<Option<f64>>>,
}

named_choices! {
    /// GPUs with a documented default where nothing was measured.
    Generation, "generation" {
        /// Ampere.
        A100 = "a100",
        /// Hopper.
        H100 = "h100",
        /// Hopper with more memory.
        H200 = "h200",
        /// Blackwell.
        B200 = "b200",
    }
}

/// What [`KernelModel::analytic`] assumes of a GPU.
struct Assumption {
    /// Dense bfloat16 FLOP/s, as the vendor states it.
    peak: f64,
    /// Share of the peak with unlimited keys, forward and backward.
    efficiency: [f64; 2],
    /// Rate below 256 queries, relative to the rate from there on.
    without_multicast: f64,
}

impl Generation {
    fn assumption(self) -> Assumption {
        match self {
            Self::A100 => Assumption { peak: 312e12, efficiency: [0.70, 0.60], without_multicast: 1.0 },
            Self::H100 | Self::H200 => Assumption { peak: 989e12, efficiency: [0.64, 0.575], without_multicast: 0.8 },
            Self::B200 => Assumption { peak: 2250e12, efficiency: [0.70, 0.63], without_multicast: 0.8 },
        }
    }
}

/// Latency of segments of attention.
///
/// A segment of `l` queries ending at key `k` of its document computes the pairs of `l'` queries, `l` rounded up to the
/// tile, from the same first query `s = k - l` on: `l'*s + l'(l'+1)/2` under a causal mask, `l'*k` under a full one
/// (`4 * num_heads * head_dim` FLOPs each). Its latency is these pairs times the seconds per pair at `(l, k)`: at a grid point
/// what was measured there, over the same pairs, so that the model is exact there; between them bilinear in `(log2 l, log2 k)`;
/// beyond them as at the nearest edge, which leaves latency in proportion to the pairs. Where a point has more queries than
/// keys, the table holds the value to its right.
#[derive(Clone, Debug)]
pub struct KernelModel {
    description: KernelDescription,
    mask: Mask,
    tile: u32,
    queries: Axis,
    keys: Axis,
    /// Seconds per pair of the forward pass, of the backward pass, and of both. Interpolation is linear in them: the sum
    /// of the passes is the table of the sums.
    seconds_per_pair: [Vec<f64>; 3],
}

impl PartialEq for KernelModel {
    fn eq(&self, other: &Self) -> bool {
        self.description == other.description
    }
}

impl KernelModel {
    /// The model of a description.
    ///
    /// # Errors
    /// [`Error::Profile`] naming the first entry that makes no sense.
    pub fn new(description: KernelDescription) -> Result<Self> {
        let sizes = [
            ("num_heads", description.num_heads),
            ("num_kv_heads", description.num_kv_heads),
            ("head_dim", description.head_dim),
            ("tile", description.tile),
        ];
        for (path, size) in sizes {
            if !(1..=MAX_KERNEL_SIZE).contains(&size) {
                return wrong(path, format!("{size} is not from 1 to {MAX_KERNEL_SIZE}"));
            }
        }
        ascending("query_lengths", &description.query_lengths)?;
        ascending("key_lengths", &description.key_lengths)?;
        if description.query_lengths.last() > description.key_lengths.last() {
            let last = description.query_lengths.len() - 1;
            return wrong(format!("query_lengths[{last}]"), "is more than the largest key length");
        }
        let mask = if description.causal { Mask::Causal } else { Mask::Full };
        let mut model = Self {
            mask,
            tile: description.tile as u32,
            queries: Axis::new(&description.query_lengths),
            keys: Axis::new(&description.key_lengths),
            seconds_per_pair: Default::default(),
            description,
        };
        let forward = model.rates("forward", &model.description.forward)?;
        let backward = model.rates("backward", &model.description.backward)?;
        let both = forward.iter().zip(&backward).map(|(forward, backward)| forward + backward).collect();
        model.seconds_per_pair = [forward, backward, both];
        Ok(model)
    }

    /// Seconds per pair at every grid point, row by row.
    fn rates(&self, pass: &str, table: &PassTable) -> Result<Vec<f64>> {
        let launch = table.launch_seconds;
        if !(launch.is_finite() && launch >= 0.0) {
            return wrong(format!("{pass}.launch_seconds"), format!("{launch} is no time of 0 or above"));
        }
        let KernelDescription { query_lengths, key_lengths, .. } = &self.description;
        let name = format!("{pass}.median_seconds");
        check_count(&name, table.median_seconds.len(), "query_lengths", query_lengths.len())?;
        let mut rates = Vec::with_capacity(query_lengths.len() * key_lengths.len());
        for (row, (entries, &queries)) in table.median_seconds.iter().zip(query_lengths).enumerate() {
            check_count(&format!("{name}[{row}]"), entries.len(), "key_lengths", key_lengths.len())?;
            let query = self.query(queries as i32);
            let first = rates.len();
            for (column, (&entry, &keys)) in entries.iter().zip(key_lengths).enumerate() {
                let path = || format!("{name}[{row}][{column}]");
                match entry {
                    None if queries <= keys => {
                        return wrong(path(), "is null, but so many queries can have so many keys");
                    }
                    Some(_) if queries > keys => {
                        return wrong(path(), "must be null: a segment has no more queries than keys");
                    }
                    None => rates.push(0.0),
                    Some(seconds) => {
                        check_seconds(path, seconds)?;
                        let rate = seconds / query.pairs(self.mask, keys as i32);
                        check_seconds(path, rate)?;
                        rates.push(rate);
                        // Where no segment can be: as with the fewest keys there are.
                        rates[first..].iter_mut().filter(|rate| **rate == 0.0).for_each(|missing| *missing = rate);
                    }
                }
            }
        }
        Ok(rates)
    }

    /// The documented default of a GPU generation where nothing was measured. An assumption, not a measurement.
    ///
    /// Rate = peak * efficiency * `m / (m + c)` * multicast, where `m` is the mean number of keys of a query, `c` the keys that a tile's
    /// prologue, epilogue and masked corner cost (224 forward, 330 backward), and multicast 0.8 below 256 queries on Hopper and
    /// Blackwell, where a tile of keys is not shared between thread blocks. Backward computes 2.5 times the FLOPs. On
    /// H100 `c` and the efficiencies follow FlashAttention-3's published rates (head width 128, 16-bit: causal forward 423, 579
    /// and 616 TFLOP/s at 1K, 4K and 16K tokens; backward without a mask 424, 542 and 561). A100: FlashAttention-2's "50 to 73 %" of the peak
    /// forward; B200: FlashAttention-4's 71 %, and backward below it as on H100. That multicast costs 0.8 and a call 5 us
    /// (10 us backward) is a guess.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a size, [`Error::Combination`] for query heads that key/value heads do not divide.
    pub fn analytic(
        generation: Generation,
        num_heads: i64,
        num_kv_heads: i64,
        head_dim: i64,
        mask: Mask,
    ) -> Result<Self> {
        for (argument, size) in [("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)] {
            check_range(argument, size, 1, MAX_KERNEL_SIZE)?;
        }
        if num_heads % num_kv_heads != 0 {
            return Err(Error::Combination { argument: "num_kv_heads", requirement: "must divide num_heads" });
        }
        let Assumption { peak, efficiency, without_multicast } = generation.assumption();
        let query_lengths: Vec<i64> = (7..=13).map(|bit| 1 << bit).collect();
        let key_lengths: Vec<i64> = (7..=20).map(|bit| 1 << bit).collect();
        let flops_per_pair = (4 * num_heads * head_dim) as f64;
        let table = |pass: usize| {
            let (overhead, work) = [(224.0, 1.0), (330.0, 2.5)][pass];
            let seconds = |queries: i64, keys: i64| {
                let pairs = mask.segment_pairs((keys - queries) as i32, queries as i32, keys as i32) as f64;
                let mean = pairs / queries as f64;
                let multicast = if queries < 256 { without_multicast } else { 1.0 };
                let rate = peak * efficiency[pass] * multicast * (mean / (mean + overhead));
                pairs * flops_per_pair * work / rate
            };
            let row = |&queries: &i64| {
                key_lengths.iter().map(|&keys| (queries <= keys).then(|| seconds(queries, keys))).collect()
            };
            PassTable { launch_seconds: [5e-6, 10e-6][pass], median_seconds: query_lengths.iter().map(row).collect() }
        };
        Self::new(KernelDescription {
            source: format!("analytic: {}", generation.as_str()),
            causal: mask == Mask::Causal,
            num_heads,
            num_kv_heads,
            head_dim,
            tile: 128,
            forward: table(0),
            backward: table(1),
            query_lengths,
            key_lengths,
        })
    }

    /// The same kernel with another number of query heads on a GPU: times in proportion, launches as they are.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a number of heads.
    pub fn with_num_heads(&self, num_heads: i64) -> Result<Self> {
        check_range("num_heads", num_heads, 1, MAX_KERNEL_SIZE)?;
        let mut description = self.description.clone();
        let factor = num_heads as f64 / description.num_heads as f64;
        for table in [&mut description.forward, &mut description.backward] {
            table.median_seconds.iter_mut().flatten().flatten().for_each(|seconds| *seconds *= factor);
        }
        // Groups as large as before; where the heads do not divide so, as when GPUs share a key head, one.
        let group = (description.num_heads / description.num_kv_heads).max(1);
        description.num_kv_heads = if num_heads % group == 0 { num_heads / group } else { 1 };
        description.num_heads = num_heads;
        Self::new(description)
    }

    /// What it was made of.
    pub fn description(&self) -> &KernelDescription {
        &self.description
    }

    /// Which keys a query attends to.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// All lengths of the grid, of queries and of keys, ascending.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = i32> + use<> {
        let mut lengths = [&self.description.query_lengths[..], &self.description.key_lengths[..]].concat();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.into_iter().map(|length| length as i32)
    }

    /// Seconds of one segment: `queries` of them, the last of which sees `keys`, no fewer.
    ///
    /// # Complexity
    /// O(1) on a grid of powers of two.
    pub fn segment_seconds(&self, queries: i32, keys: i32, passes: Passes) -> f64 {
        self.seconds(&self.query(queries), keys, self.table(passes))
    }

    /// Seconds of many segments, one by one.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless there are as many keys as queries, [`Error::Entry`] for a segment with more queries than keys.
    pub fn segments_seconds(&self, queries: &Lengths, keys: &Lengths, passes: Passes) -> Result<Vec<f64>> {
        if keys.len() != queries.len() {
            let (argument, other) = ("key_lengths", "query_lengths");
            return Err(Error::Mismatch { argument, found: keys.len(), other, expected: queries.len() });
        }
        if let Some(index) = (0..keys.len()).find(|&index| keys[index] < queries[index]) {
            let requirement = "a segment has no fewer keys than queries";
            return Err(Error::Entry { argument: "key_lengths", index, value: f64::from(keys[index]), requirement });
        }
        Ok(queries.iter().zip(keys.iter()).map(|(&l, &k)| self.segment_seconds(l, k, passes)).collect())
    }

    /// Seconds of each rank's call: its segments, each rounded to 2^-44 s, and the launch; 0 for a rank without any.
    ///
    /// # Errors
    /// [`Error::Combination`] when the shard has another mask than the model.
    ///
    /// # Complexity
    /// O(segments).
    pub fn rank_seconds(&self, shard: &Shard, passes: Passes) -> Result<Vec<f64>> {
        self.check_mask("shard", shard.mask)?;
        let mut clock = Clock::new(self, passes);
        let of_rank = |segments: &Vec<super::Segment>| {
            let ticks = segments.iter().fold(0_i64, |sum, segment| {
                let keys = clock.keys(&shard.lengths, segment.document as usize, segment.end());
                sum.saturating_add(clock.ticks(segment.length, keys))
            });
            if segments.is_empty() { 0.0 } else { ticks as f64 / TICKS_PER_SECOND + self.launch_seconds(passes) }
        };
        Ok(shard.ranks.iter().map(of_rank).collect())
    }

    /// Seconds that a call takes whatever its segments.
    pub fn launch_seconds(&self, passes: Passes) -> f64 {
        let KernelDescription { forward, backward, .. } = &self.description;
        match passes {
            Passes::Forward => forward.launch_seconds,
            Passes::Backward => backward.launch_seconds,
            Passes::ForwardBackward => forward.launch_seconds + backward.launch_seconds,
        }
    }

    pub(super) fn check_mask(&self, argument: &'static str, mask: Mask) -> Result<()> {
        if mask == self.mask {
            return Ok(());
        }
        let requirement = "the kernel model and the shard must both be causal, or neither";
        Err(Error::Combination { argument, requirement })
    }

    /// The model as JSON, for pickles.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.description).unwrap_or_default()
    }

    /// The model that [`KernelModel::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::Profile`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        Self::new(crate::error::from_json(json).map_err(|(path, problem)| Error::Profile { path, problem })?)
    }

    fn table(&self, passes: Passes) -> &[f64] {
        let [forward, backward, both] = &self.seconds_per_pair;
        match passes {
            Passes::Forward => forward,
            Passes::Backward => backward,
            Passes::ForwardBackward => both,
        }
    }

    fn query(&self, length: i32) -> Query {
        let padded = (length as u32).div_ceil(self.tile) * self.tile;
        Query { length, padded: f64::from(padded), point: self.queries.locate(length) }
    }

    #[inline]
    fn seconds(&self, query: &Query, keys: i32, table: &[f64]) -> f64 {
        let key = self.keys.locate(keys);
        let width = self.keys.logs.len();
        // A grid of one row or column has its only one on both sides.
        let along_keys = |row: usize| {
            let (left, right) = (table[row * width + key.below], table[row * width + key.above]);
            left + (right - left) * key.fraction
        };
        let (below, above) = (along_keys(query.point.below), along_keys(query.point.above));
        query.pairs(self.mask, keys) * (below + (above - below) * query.point.fraction)
    }
}

/// The queries of a segment, as far as nothing else needs to be known.
#[derive(Clone, Copy)]
struct Query {
    length: i32,
    /// Rounded up to the tile.
    padded: f64,
    point: Point,
}

impl Query {
    /// Pairs that the kernel computes. Exact up to 2^53.
    #[inline]
    fn pairs(&self, mask: Mask, keys: i32) -> f64 {
        match mask {
            Mask::Causal => self.padded * (f64::from(keys - self.length) + (self.padded + 1.0) * 0.5),
            Mask::Full => self.padded * f64::from(keys),
        }
    }
}

/// Where a length lies on an axis: between two grid points, and how far from the lower one.
#[derive(Clone, Copy)]
struct Point {
    below: usize,
    above: usize,
    fraction: f64,
}

/// The grid lengths of queries or keys, as logarithms.
#[derive(Clone, Debug)]
struct Axis {
    lengths: Vec<i32>,
    /// And one over the step to the next.
    logs: Vec<(f64, f64)>,
    /// For every power of two, the last grid point that is not above it (or the first of all): where a search begins.
    starts: [usize; 32],
}

impl Axis {
    fn new(lengths: &[i64]) -> Self {
        let mut starts = [0; 32];
        for (bit, start) in starts.iter_mut().enumerate() {
            *start = lengths.partition_point(|&length| length <= 1 << bit).saturating_sub(1);
        }
        let lengths: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let log = |index: usize| log2(lengths[index]);
        let next = |index: usize| log((index + 1).min(lengths.len() - 1));
        let logs = (0..lengths.len()).map(|index| (log(index), 1.0 / (next(index) - log(index)))).collect();
        Self { lengths, logs, starts }
    }

    #[inline]
    fn locate(&self, length: i32) -> Point {
        let mut below = self.starts[length.ilog2() as usize];
        while below + 1 < self.lengths.len() && self.lengths[below + 1] <= length {
            below += 1;
        }
        if below + 1 == self.lengths.len() || length <= self.lengths[below] {
            return Point { below, above: below, fraction: 0.0 };
        }
        let (low, per_step) = self.logs[below];
        Point { below, above: below + 1, fraction: (log2(length) - low) * per_step }
    }
}

/// Binary logarithm of a whole number of at least 1, within 1e-12, of `+ - * /` only: the same on every machine.
///
/// The exponent's bits are the whole part. The mantissa's first bits choose a knot of a table, and a short series does the
/// rest of the way: `ln(1 + r)` for `r < 1/128`.
#[inline]
fn log2(length: i32) -> f64 {
    const FRACTION: u64 = (1 << 52) - 1;
    let bits = f64::from(length).to_bits();
    let exponent = (bits >> 52) as i64 - 1023;
    let mantissa = f64::from_bits(bits & FRACTION | 1023 << 52);
    let (inverse, log) = KNOTS[(bits >> (52 - KNOT_BITS)) as usize % KNOTS.len()];
    let r = mantissa * inverse - 1.0;
    let series = r * (1.0 - r * (1.0 / 2.0 - r * (1.0 / 3.0 - r * (1.0 / 4.0 - r * (1.0 / 5.0)))));
    exponent as f64 + (log + std::f64::consts::LOG2_E * series)
}

const KNOT_BITS: u32 = 7;

/// `(1 / m, log2(m))` at even steps of a mantissa `m` from 1 to 2.
static KNOTS: [(f64, f64); 1 << KNOT_BITS] = knots();

const fn knots() -> [(f64, f64); 1 << KNOT_BITS] {
    let mut knots = [(1.0, 0.0); 1 << KNOT_BITS];
    let mut knot = 1;
    while knot < knots.len() {
        let mantissa = 1.0 + knot as f64 / knots.len() as f64;
        // ln(m) = 2 atanh(t) with t = (m - 1) / (m + 1), at most 1/3: t + t^3/3 + t^5/5 + ...
        let t = (mantissa - 1.0) / (mantissa + 1.0);
        let (mut atanh, mut power, mut odd) = (0.0, t, 1.0);
        while odd < 40.0 {
            atanh += power / odd;
            power *= t * t;
            odd += 2.0;
        }
        knots[knot] = (1.0 / mantissa, 2.0 * std::f64::consts::LOG2_E * atanh);
        knot += 1;
    }
    knots
}

/// Reads latencies of segments off a model, in ticks. Remembers the last number of queries: neighbours have the same.
pub(super) struct Clock<'a> {
    model: &'a KernelModel,
    table: &'a [f64],
    last: Query,
}

impl<'a> Clock<'a> {
    pub(super) fn new(model: &'a KernelModel, passes: Passes) -> Self {
        Self { model, table: model.table(passes), last: model.query(1) }
    }

    /// Keys of a segment that ends at `end`.
    #[inline]
    pub(super) fn keys(&self, lengths: &[i32], document: usize, end: i32) -> i32 {
        match self.model.mask {
            Mask::Causal => end,
            Mask::Full => lengths[document],
        }
    }

    #[inline]
    pub(super) fn ticks(&mut self, queries: i32, keys: i32) -> i64 {
        if queries != self.last.length {
            self.last = self.model.query(queries);
        }
        // The cast saturates; half a tick rounds.
        (self.model.seconds(&self.last, keys, self.table) * TICKS_PER_SECOND + 0.5) as i64
    }
}

/// Lengths of a grid: at least one, ascending, each a length.
pub(crate) fn ascending(path: &str, values: &[i64]) -> Result<()> {
    if values.is_empty() {
        return wrong(path, "is empty");
    }
    let mut last = 0;
    for (index, &value) in values.iter().enumerate() {
        if !(1..=MAX_TOKENS).contains(&value) {
            return wrong(format!("{path}[{index}]"), format!("{value} is not from 1 to {MAX_TOKENS}"));
        }
        if value <= last {
            return wrong(format!("{path}[{index}]"), format!("{value} is not above the entry before it"));
        }
        last = value;
    }
    Ok(())
}

pub(crate) fn check_count(path: &str, found: usize, other: &str, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { wrong(path, format!("has {found} entries, but {other} has {expected}")) }
}

/// A time, and one that arithmetic survives.
pub(crate) fn check_seconds(path: impl Fn() -> String, seconds: f64) -> Result<()> {
    if seconds.is_normal() && seconds > 0.0 { Ok(()) } else { wrong(path(), format!("{seconds} is no time above 0")) }
}

pub(crate) fn wrong<T>(path: impl Into<String>, problem: impl Into<String>) -> Result<T> {
    Err(Error::Profile { path: path.into(), problem: problem.into() })
}
