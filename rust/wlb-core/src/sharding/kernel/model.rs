//! Seconds of a segment, read off the tables of a kernel.

use crate::cost::{Mask, Passes};
use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_KERNEL_SIZE;

use super::axis::{Axis, Point};
use super::check::{ascending, check_count, check_seconds, wrong};
use super::description::{KernelDescription, PassTable};

/// Latency of segments of attention.
///
/// A segment of `l` queries ending at key `k` of its document computes the pairs of `l'` queries, `l` rounded up to the
/// tile, from the same first query `s = k - l` on: `l'*s + l'(l'+1)/2` under a causal mask, `l'*k` under a full one. A
/// pair is `4 * num_heads * head_dim` FLOPs. The latency is these pairs times the seconds per pair at `(l, k)`:
///
/// - at a grid point, what was measured there over the same pairs, so that the model is exact there;
/// - between grid points, bilinear in `(1 / l, 1 / k)`;
/// - beyond the grid, as at its nearest edge, so that latency is in proportion to the pairs.
///
/// A grid point with more queries than keys has the value to its right.
#[derive(Clone, Debug)]
pub struct KernelModel {
    description: KernelDescription,
    pub(super) mask: Mask,
    tile: u32,
    queries: Axis,
    keys: Axis,
    /// Seconds per pair of the forward pass, of the backward pass, and of both. Interpolation is linear in them: the
    /// sum of the passes is the table of the sums.
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
                        // A segment has no fewer keys than queries. For fewer, the rate of the fewest keys measured.
                        rates[first..].iter_mut().filter(|rate| **rate == 0.0).for_each(|missing| *missing = rate);
                    }
                }
            }
        }
        Ok(rates)
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
        // As many query heads for each key head as measured; a single key head where that does not divide the query
        // heads, as when GPUs share a key head.
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
    /// [`Error::Mismatch`] unless there are as many keys as queries, [`Error::Entry`] for a segment with more queries
    /// than keys.
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

    /// Seconds that a call takes whatever its segments.
    pub fn launch_seconds(&self, passes: Passes) -> f64 {
        let KernelDescription { forward, backward, .. } = &self.description;
        match passes {
            Passes::Forward => forward.launch_seconds,
            Passes::Backward => backward.launch_seconds,
            Passes::ForwardBackward => forward.launch_seconds + backward.launch_seconds,
        }
    }

    pub(in crate::sharding) fn check_mask(&self, argument: &'static str, mask: Mask) -> Result<()> {
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

    pub(super) fn table(&self, passes: Passes) -> &[f64] {
        let [forward, backward, both] = &self.seconds_per_pair;
        match passes {
            Passes::Forward => forward,
            Passes::Backward => backward,
            Passes::ForwardBackward => both,
        }
    }

    pub(super) fn query(&self, length: i32) -> Query {
        let padded = (length as u32).div_ceil(self.tile) * self.tile;
        Query { length, padded: f64::from(padded), point: self.queries.locate(length) }
    }

    #[inline]
    pub(super) fn seconds(&self, query: &Query, keys: i32, table: &[f64]) -> f64 {
        let key = self.keys.locate(keys);
        let width = self.keys.len();
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
pub(super) struct Query {
    pub(super) length: i32,
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
